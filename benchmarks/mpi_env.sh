#!/bin/sh
# Make the environment that the comparison with MPICH needs:  mpi_env.sh [DIRECTORY [VENV]]
#
# DIRECTORY is .venv-mpi by default. VENV, .venv by default, is an environment that has torch, which is used from there.
# Does nothing when the directory has what is needed already.
set -eu

directory=${1:-.venv-mpi}
venv=${2:-.venv}

works() {
    "$directory/bin/python" -c "import mpi4py.MPI, torch" && [ -x "$directory/bin/mpiexec" ]
}

if works 2> /dev/null; then
    exit 0
fi

# Only a directory that is an environment already is ever replaced.
if [ -e "$directory" ] && [ ! -e "$directory/pyvenv.cfg" ]; then
    echo "mpi_env.sh: $directory exists and is not a virtual environment; name another directory" >&2
    exit 1
fi
"$venv/bin/python" -m venv --clear "$directory"
"$directory/bin/python" -m pip install --quiet --disable-pip-version-check mpich mpi4py
"$venv/bin/python" -c "
from importlib.util import find_spec
print(find_spec('torch').submodule_search_locations[0].rpartition('/')[0])
" > "$("$directory/bin/python" -c "import sysconfig; print(sysconfig.get_path('purelib'))")/torch_of_another.pth"
if ! works; then
    echo "mpi_env.sh: MPICH was installed in $directory but cannot be used; see the error above" >&2
    exit 1
fi
