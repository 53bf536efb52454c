"""The public names and signatures, which nobody changes by accident, and what `import kvtrainer` brings with it."""

from __future__ import annotations

import json
import subprocess
import sys

from tests.support import api
from tests.support.processes import ROOT


def test_public_names_and_signatures_are_those_of_the_list() -> None:
    listed = (ROOT / "tests" / "data" / "api.txt").read_text().splitlines()
    found = api.lines()
    gone, new = sorted(set(listed) - set(found)), sorted(set(found) - set(listed))
    assert (gone, new) == ([], []), "if it is wanted: python -m tests.support.api > tests/data/api.txt"


def test_the_package_is_imported_without_torch_and_numpy() -> None:
    script = (
        "import json, sys, kvtrainer; print(json.dumps([name.partition('.')[0] for name in sys.modules]))"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, check=True)
    assert not {"torch", "numpy", "zmq", "msgpack", "safetensors"} & set(json.loads(run.stdout))
