#!/bin/sh
# Make the environment that the comparison with MXNet needs:  mxnet_env.sh [DIRECTORY]  (default .venv-mxnet)
#
# MXNet 1.9.1 needs numpy 1.23, whose wheels end at Python 3.11. PYTHON=... names the interpreter to use; otherwise the
# newest one from 3.8 to 3.11 on the PATH is taken. Does nothing when the directory is complete already.
set -eu

directory=${1:-.venv-mxnet}
mxnet=1.9.1
numpy=1.23.5
stamp="$directory/mxnet-$mxnet-numpy-$numpy.complete"

works() {
    "$directory/bin/python" -c "import mxnet, numpy; assert (mxnet.__version__, numpy.__version__) == ('$mxnet', '$numpy')"
}

is_usable() {
    command -v "$1" > /dev/null 2>&1 &&
        "$1" -c 'import sys, venv; sys.exit(not (3, 8) <= sys.version_info[:2] <= (3, 11))' 2> /dev/null
}

if [ -e "$stamp" ] && works 2> /dev/null; then
    exit 0
fi

chosen=
for candidate in ${PYTHON:-python3.11 python3.10 python3.9 python3.8 python3 python}; do
    if is_usable "$candidate"; then
        chosen=$candidate
        break
    fi
done
if [ -z "$chosen" ]; then
    echo "mxnet_env.sh: MXNet $mxnet needs a Python from 3.8 to 3.11 with venv; install one, or set PYTHON=/path/to/it" >&2
    exit 1
fi

# Only a directory that is an environment already is ever replaced.
if [ -e "$directory" ] && [ ! -e "$directory/pyvenv.cfg" ]; then
    echo "mxnet_env.sh: $directory exists and is not a virtual environment; name another directory" >&2
    exit 1
fi
"$chosen" -m venv --clear "$directory"
"$directory/bin/python" -m pip install --quiet --disable-pip-version-check "mxnet==$mxnet" "numpy==$numpy"
if ! works; then
    echo "mxnet_env.sh: MXNet was installed in $directory but cannot be imported; see the error above" >&2
    exit 1
fi
touch "$stamp"
