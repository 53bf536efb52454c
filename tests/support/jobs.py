"""Real jobs for tests: worker modules under the launcher, with a deadline, and their results as files.

A job is the module `tests.support.workers.NAME`, started once per worker beside real servers. Each worker ends by
calling `deliver`; `run_job` gives the tests what all of them delivered.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[2]
FOLDER = "KVTRAINER_TEST_FOLDER"
"""The variable that tells a worker where its results go."""

Results = Mapping[str, Any]
"""What one worker delivers: numbers, strings and tensors under names, nested as one likes."""


@dataclass(frozen=True)
class Job:
    """A job that has ended well: its size, and what each worker delivered, by rank."""

    workers: int
    servers: int
    results: list[Results]

    def __getitem__(self, name: str) -> list[Any]:
        """What the workers delivered under one name, by rank."""
        return [result[name] for result in self.results]


PartOfJob = Callable[[str, int, int], Job]
"""Takes the name of a part of `workers.parity`, a number of workers and one of servers; gives what it returned."""


def run_job(
    worker: str, folder: Path, workers: int, servers: int, *arguments: str, seconds: float = 100.0
) -> Job:
    """Run `tests.support.workers.WORKER` to its end; every process computes on one thread, warnings are errors.

    Args:
        worker: Name of the module.
        folder: An empty folder for results and output.
        arguments: The worker's command line.
        seconds: How long the job may take before all of it is killed.

    Raises:
        AssertionError: the job failed or took too long, or a rank delivered nothing; shows its output.
    """
    counts = ["-n", str(workers), "-s", str(servers)]
    command = [sys.executable, "-m", f"tests.support.workers.{worker}", *arguments]
    log = folder / "output.txt"
    with log.open("wb") as output:
        launcher = subprocess.Popen(
            [sys.executable, "-m", "kvtrainer.launch", *counts, "--", *command],
            cwd=ROOT,
            env=_environ(folder),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        try:
            code: int | None = launcher.wait(seconds)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            _end(launcher)
    what = f"the job {' '.join([worker, *arguments])} with {workers} workers and {servers} servers"
    if code != 0:
        how = f"took more than {seconds:g} s" if code is None else f"exited with code {code}"
        raise AssertionError(f"{what} {how}; its output:\n{log.read_text(errors='replace')}")
    missing = [rank for rank in range(workers) if not _file(folder, rank).exists()]
    if missing:
        raise AssertionError(f"{what} ended well, but ranks {missing} delivered nothing")
    return Job(workers, servers, [torch.load(_file(folder, rank)) for rank in range(workers)])


def own_place() -> tuple[int, int]:
    """In a worker: its rank and the number of workers."""
    return int(os.environ["KVSTORE_RANK"]), int(os.environ["KVSTORE_NUM_WORKERS"])


def deliver(results: Results) -> None:
    """In a worker: hand the results to the test that started the job."""
    rank, _ = own_place()
    torch.save(dict(results), _file(Path(os.environ[FOLDER]), rank))


def _environ(folder: Path) -> dict[str, str]:
    inherited = {
        name: value for name, value in os.environ.items() if not name.startswith(("KVSTORE_", "OMP_"))
    }
    return {**inherited, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "error", FOLDER: str(folder)}


def _file(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank}.pt"


def _end(launcher: subprocess.Popen[bytes]) -> None:
    """End the launcher, which ends all processes of its job, even when it is killed."""
    if launcher.poll() is None:
        launcher.terminate()
        try:
            launcher.wait(10)
        except subprocess.TimeoutExpired:
            launcher.kill()
    launcher.wait()
