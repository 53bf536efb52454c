"""The programs in examples/: as modules of this process, as workers beside servers, or as ranks."""

from __future__ import annotations

import importlib
import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.support.forks import inherited
from tests.support.jobs import armed, run_program
from tests.support.limits import JOB_LIMIT
from tests.support.processes import held_port

ROOT = Path(__file__).parents[2]
NEEDS_DIGITS = pytest.mark.skipif(
    importlib.util.find_spec("sklearn") is None, reason="the data are not installed: pip install scikit-learn"
)
FIRST_DAYS = 8_000
"""Flights at the beginning of the file, which has one day after the other: the stream's first 4,500 are of six days."""
_FEW_FLIGHTS = f"""
import itertools, flights_data
every = flights_data.flights
flights_data.flights = lambda: itertools.islice(every(), {FIRST_DAYS})
"""


def example(name: str) -> ModuleType:
    """The module examples/NAME.py, imported as it imports its neighbours."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "examples"))
        return importlib.import_module(name)


def run_with_servers(name: str, folder: Path, *options: str, **numbers: float) -> str:
    """Run an example with two workers and two servers to its end; gives what they printed.

    `numbers` take the place of constants of the example.
    """
    return run_program(["-c", _program(name, numbers), *options], folder, 2, 2)


def launch_with_deaths(name: str, folder: Path, points: str, *options: str) -> str:
    """Run an example by `kvlaunch --restart` with two workers and two servers to its end; gives what they printed.

    Processes die at failpoints, all of which must be reached, and kvlaunch starts them again.
    """
    restarts = ["--restart", str(points.count(",") + 1)]
    launcher = [sys.executable, "-m", "kvtrainer.jobs.kvlaunch", "-n", "2", "-s", "2", *restarts, "--"]
    command = [*launcher, sys.executable, str(ROOT / "examples" / f"{name}.py"), *options]
    with armed(points, folder) as variables:
        environ = {**inherited(), "PYTHONPATH": str(ROOT), **variables}
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=JOB_LIMIT, env=environ, cwd=folder, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def run_with_ranks(name: str, folder: Path, *options: str) -> str:
    """Run an example on two ranks of torch.distributed to its end, with the variables that torchrun sets."""
    variables = f"""
import os
place = {{"RANK": os.environ.pop("KVSTORE_RANK"), "WORLD_SIZE": os.environ.pop("KVSTORE_NUM_WORKERS")}}
os.environ.update(place, TORCHELASTIC_RUN_ID="test", MASTER_ADDR="127.0.0.1", MASTER_PORT="{held_port()}")
"""
    return run_program(["-c", variables + _program(name, {}), *options], folder, 2, 0)


def _program(name: str, numbers: dict[str, float]) -> str:
    folder = str(ROOT / "examples")
    return f"""
import sys
sys.path.insert(0, {folder!r})
import {name} as example
vars(example).update({numbers!r})
{_FEW_FLIGHTS if name == "stream" else ""}
example.main()
"""
