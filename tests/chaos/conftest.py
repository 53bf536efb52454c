"""Jobs in which nothing happens, whose results all others must have; each is run once."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

from tests.chaos.jobs import Job, Undisturbed


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    """Return the results of a case without faults."""

    @functools.cache
    def results(case: str, rounds: int) -> list[str]:
        folder: Path = tmp_path_factory.mktemp(case)
        with Job(case, rounds, folder, {}) as job:
            outcome = job.run()
        assert not outcome.recomputed
        assert set(outcome.starts.values()) == {1}
        assert len(set(outcome.results)) == 1, "the ranks differ"
        return outcome.results

    return results
