"""The programs in examples/: as modules of this process, as workers beside servers, or as ranks of torchrun."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.support.jobs import run_program
from tests.support.limits import LIMIT

ROOT = Path(__file__).parents[2]


def example(name: str) -> ModuleType:
    """The module examples/NAME.py, imported as it imports its neighbours."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "examples"))
        return importlib.import_module(name)


def run_with_servers(name: str, folder: Path, *options: str) -> str:
    """Run an example with two workers and two servers to its end; gives what they printed."""
    folder_of_examples = str(ROOT / "examples")
    code = f"""
import runpy, sys
sys.path.insert(0, {folder_of_examples!r})
runpy.run_module({name!r}, run_name="__main__")
"""
    return run_program(["-c", code, *options], folder, 2, 2)


def run_with_ranks(name: str, *options: str) -> None:
    """Run an example on two ranks of torch.distributed to its end, as torchrun starts it.

    Raises:
        AssertionError: it failed.
        subprocess.TimeoutExpired: it took longer.
    """
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("KVSTORE_", "DMLC_"))}
    launcher = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [sys.executable, "-m", *launcher, f"examples/{name}.py", *options],
        cwd=ROOT,
        env={**inherited, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LIMIT,
        check=False,
    )
    assert done.returncode == 0, done.stdout
