"""Jobs in which nothing happens, whose results all others must have; each is run once, in one of the test processes."""

from __future__ import annotations

import fcntl
import functools
import json
import os
from pathlib import Path

import pytest

from tests.chaos.jobs import Job, Undisturbed


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    """Return the results of a case without faults."""
    shared: Path = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = shared.parent

    @functools.cache
    def results(case: str, rounds: int) -> list[str]:
        # Whoever comes first runs the job; others that need it wait for that.
        with (shared / f"undisturbed-{case}-{rounds}").open("a+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(0)
            known = file.read()
            if not known:
                known = json.dumps(run(case, rounds))
                file.write(known)
        found: list[str] = json.loads(known)
        return found

    def run(case: str, rounds: int) -> list[str]:
        folder: Path = tmp_path_factory.mktemp(case)
        with Job(case, rounds, folder, {}) as job:
            outcome = job.run()
        assert not outcome.recomputed
        assert set(outcome.starts.values()) == {1}
        assert len(set(outcome.results)) == 1, "the ranks differ"
        return outcome.results

    return results
