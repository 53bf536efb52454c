#!/bin/sh
# Make the environment that the comparison with MXNet needs:  mxnet_env.sh [DIRECTORY [VERSION]]
#
# DIRECTORY is .venv-mxnet by default, VERSION 1.9.1, the last stable one; the other one of interest is 2.0.0b1.
# MXNet needs numpy 1.23, whose wheels end at Python 3.11. PYTHON=... names the interpreter to use; otherwise the
# newest one from 3.8 to 3.11 on the PATH is taken. Does nothing when the directory has that version already.
set -eu

directory=${1:-.venv-mxnet}
mxnet=${2:-1.9.1}
numpy=1.23.5

works() {
    # Asked of the metadata, because MXNet 2.0.0b1 calls itself 2.0.0beta1.
    "$directory/bin/python" -c "
import mxnet
from importlib.metadata import version
assert (version('mxnet'), version('numpy')) == ('$mxnet', '$numpy')"
}

is_usable() {
    command -v "$1" > /dev/null 2>&1 &&
        "$1" -c 'import sys, venv; sys.exit(not (3, 8) <= sys.version_info[:2] <= (3, 11))' 2> /dev/null
}

if works 2> /dev/null; then
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
