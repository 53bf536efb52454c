"""Jobs that the parity tests share: at most one for each number of workers and servers."""

from __future__ import annotations

import importlib

import pytest

from tests.support.jobs import Job, PartOfJob, Results, run_job

TOGETHER = {
    (1, 1): ("bits", "trajectories"),
    (1, 3): ("bits", "trajectories"),
}
"""Sizes of which one job serves several tests."""


MODULES = {
    "bits": "test_bit_identity",
    "one_problem": "test_one_process_loop",
    "trajectories": "test_random_trajectories",
}
"""Parts of jobs, and the modules of this folder whose `run` they are."""


def run_parts(rank: int, workers: int, *parts: str) -> Results:
    """In a worker: play one part after the other, so that all but the first find servers that have served others."""
    modules = {part: importlib.import_module(f"tests.parity.{MODULES[part]}") for part in parts}
    return {part: module.run(rank, workers) for part, module in modules.items()}


@pytest.fixture(scope="session")
def part_of_job(tmp_path_factory: pytest.TempPathFactory) -> PartOfJob:
    """Runs the job that has a part, unless it has run already; one that failed is not run again for the next test."""
    done: dict[tuple[str, int, int], Job | AssertionError] = {}

    def run(part: str, workers: int, servers: int) -> Job:
        if (part, workers, servers) not in done:
            together = TOGETHER.get((workers, servers), ())
            parts = together if part in together else (part,)
            folder = tmp_path_factory.mktemp(f"{workers}x{servers}")
            try:
                job = run_job(run_parts, folder, workers, servers, *parts)
            except AssertionError as error:
                done.update({(name, workers, servers): error for name in parts})
            else:
                done.update({(name, workers, servers): Job(workers, servers, job[name]) for name in parts})
        outcome = done[part, workers, servers]
        if isinstance(outcome, AssertionError):
            raise outcome
        return outcome

    return run
