#!/bin/sh
# Install the wheel with each extra alone, and use what it brings, far from the sources:
#
#     extras.sh [EXTRA ...]
#
# By default all of setup.cfg. The wheel and what it needs itself are installed once, in .venv-extras/core, which the
# environments of the extras can see; each of them is made anew, has one extra, and is removed when it was of use.
set -eu

cd "$(dirname "$0")/.."
root=$PWD
python=${PYTHON:-python3}
wheel=$(ls -t dist/kvtrainer-*.whl | head -1)
core=$root/.venv-extras/core
install() {
    "$1/bin/python" -m pip install --quiet --disable-pip-version-check -c constraints.txt "$2"
}
"$python" -m venv --clear "$core"
install "$core" "$wheel"
[ $# -gt 0 ] || set -- $("$core/bin/python" tests/extra_uses.py)
for extra; do
    own=$root/.venv-extras/$extra
    "$python" -m venv --clear "$own"
    "$own/bin/python" -c "import site; print(site.getsitepackages()[0])" > "$own/where"
    "$core/bin/python" -c "import site; print(site.getsitepackages()[0])" > "$(cat "$own/where")/core.pth"
    install "$own" "$wheel[$extra]"
    place=$(mktemp -d)
    (cd "$place" && PATH=$own/bin:$PATH "$own/bin/python" "$root/tests/extra_uses.py" "$extra") || exit 1
    rm -rf "$place" "$own"
    echo "$extra: all is there"
done
