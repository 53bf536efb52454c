#!/bin/sh
# Build the image of examples/deploy/Dockerfile with podman, and have tests run a job in it and the pods of the manifests:
#
#     image.sh PYTHON
#
# The machine may reach no registry of images: the base is a small Debian with a Python of its own, made here, which
# stands for python:3.12-slim, and all that pip installs is in a folder that PYTHON's pip fills first. So nothing of the
# Dockerfile is left out but the base itself. Everything is kept in build/image, to go on from, and nothing is left in
# the system's own storage of images. Needs root, podman, runc and mmdebstrap.
set -eu

python=$1
cd "$(dirname "$0")/.."
place=$PWD/build/image
wheel=$(ls -t dist/kvtrainer-*.whl | head -1)
mkdir -p "$place/context" "$place/wheels"

# A container may not ask for more than its host allows.
cat > "$place/containers.conf" <<END
[containers]
default_ulimits = ["nofile=1024:1024", "nproc=4096:4096"]
[engine]
runtime = "runc"
END
cat > "$place/storage.conf" <<END
[storage]
driver = "overlay"
graphroot = "$place/store"
runroot = "$place/run"
END
# What podman leaves mounted there would be in the way of whoever removes it.
trap 'umount "$place/store/overlay" 2> /dev/null || true' EXIT
export CONTAINERS_CONF=$place/containers.conf CONTAINERS_STORAGE_CONF=$place/storage.conf

"$python" -m pip download --quiet --disable-pip-version-check --only-binary=:all: --python-version 3.11 \
    -c constraints.txt --dest "$place/wheels" torch "$wheel"
rm -f "$place"/wheels/kvtrainer-*
if ! podman image exists localhost/base; then
    mmdebstrap --quiet --variant=minbase --include=python3-pip,python-is-python3 bookworm "$place/base.tar"
    # Debian has pip leave its own Python alone.
    podman import --quiet --change "ENV PIP_BREAK_SYSTEM_PACKAGES=1" --change "ENV PIP_NO_INDEX=1" \
        --change "ENV PIP_FIND_LINKS=/wheels" "$place/base.tar" localhost/base
    rm "$place/base.tar"
fi
rm -f "$place"/context/*
cp "$wheel" examples/deploy/Dockerfile "$place/context"
"$python" - docs/start.md > "$place/context/train.py" <<'END'
import re, sys
print(re.search('```python title="train.py"\n(.*?)```', open(sys.argv[1]).read(), re.DOTALL)[1])
END
podman build --quiet --network none --build-arg BASE=localhost/base --volume "$place/wheels:/wheels:ro" \
    --tag localhost/train "$place/context"
KVTRAINER_IMAGE=localhost/train "$python" -m pytest -n 0 tests/test_image.py
