#!/bin/sh
# Make the environment that the tests with mmengine need:  mmengine_env.sh [DIRECTORY]
#
# DIRECTORY is .venv-mmengine by default. PYTHON=... names the interpreter to use. Does nothing when the directory has
# the right versions already. mmengine asks for opencv-python, which needs libraries of a desktop; all that mmengine
# does with it works with the headless build, so that one is installed, and mmengine without what it asks for.
set -eu

directory=${1:-.venv-mmengine}
mmengine=0.10.7
here=$(dirname "$0")
constraints=$here/../../constraints.txt

works() {
    "$directory/bin/python" -c "
from importlib.metadata import version
import msgpack, numpy, safetensors.torch, zmq
from mmengine.runner import FlexibleRunner
assert version('mmengine') == '$mmengine'
pinned = dict(line.split('==') for line in open('$constraints').read().split() if '==' in line)
assert version('torch').split('+')[0] == pinned['torch']"
}

if works 2> /dev/null; then
    exit 0
fi

# Only a directory that is an environment already is ever replaced.
if [ -e "$directory" ] && [ ! -e "$directory/pyvenv.cfg" ]; then
    echo "mmengine_env.sh: $directory exists and is not a virtual environment; name another directory" >&2
    exit 1
fi
install() {
    "$directory/bin/python" -m pip install --quiet --disable-pip-version-check -c "$constraints" "$@"
}
"${PYTHON:-python3}" -m venv --clear "$directory"
install torch numpy pyzmq msgpack safetensors
install addict matplotlib pyyaml rich termcolor yapf packaging opencv-python-headless
install --no-deps "mmengine==$mmengine"
if ! works; then
    echo "mmengine_env.sh: mmengine was installed in $directory but cannot be used; see the error above" >&2
    exit 1
fi
