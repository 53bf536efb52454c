#!/bin/sh
# Install the wheel in an environment of one Python, then train the example and run unit tests far from the sources:
#
#     one_python.sh PYTHON [TESTS ...]
#
# The environment is .venv-NAME, by the version of that Python, and is kept. torch is what pip finds for it.
set -eu

python=$1
shift
cd "$(dirname "$0")/.."
root=$PWD
# By a name like python3.10 pyenv runs that version only where it is asked for it.
its_python() {
    PYENV_VERSION=${python##*python} "$python" "$@"
}
version=$(its_python -c 'import sys; print("%d.%d" % sys.version_info[:2])')
environment=$root/.venv-$version
[ -x "$environment/bin/python" ] || its_python -m venv "$environment"
wheel=$(ls -t dist/kvtrainer-*.whl | head -1)
"$environment/bin/pip" install --quiet --disable-pip-version-check "$wheel[test,watch,examples,arrow]"
"$environment/bin/pip" install --quiet --disable-pip-version-check --no-deps --force-reinstall "$wheel"

place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
# All but the two packages, which are in the environment alone.
cp -r tests examples docs benchmarks README.md CHANGELOG.md setup.cfg "$place"
cd "$place"
PATH=$environment/bin:$PATH
kvlaunch -n 2 -s 2 -- python examples/digits.py | tail -1
python -m pytest -m "not full" -n 2 --dist loadfile "${@:-tests/unit}"
