"""The programs in examples/, as modules of this process or run as a user runs them."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import pytest

from tests.support.limits import LIMIT

ROOT = Path(__file__).parents[2]
SERVERS = ("-m", "kvtrainer.launch", "-n", "2", "-s", "2", "--", sys.executable)
"""Starts two workers and two servers."""
RANKS = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
"""Starts two ranks of torch.distributed."""


def example(name: str) -> ModuleType:
    """The module examples/NAME.py, imported as it imports its neighbours."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "examples"))
        return importlib.import_module(name)


def run(name: str, *options: str, launcher: Sequence[str] = ()) -> str:
    """Run an example to its end, alone or by a launcher; gives what it printed.

    Raises:
        AssertionError: it failed.
        subprocess.TimeoutExpired: it took longer.
    """
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("KVSTORE_", "DMLC_"))}
    done = subprocess.run(
        [sys.executable, *launcher, f"examples/{name}.py", *options],
        cwd=ROOT,
        env={**inherited, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LIMIT,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout
