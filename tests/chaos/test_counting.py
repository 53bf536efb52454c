"""Pushes that are applied one by one count once each, whoever dies; reads keep the bound on staleness."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.chaos.jobs import SERVERS, Event, Job
from tests.chaos.test_random import go_on, kill, pause
from tests.support.limits import JOB_LIMIT, LIMIT

FEW, MANY = 40, 12_500
"""Pushes of each worker."""
DEATHS = 300
"""And pauses, at most: a slow machine has no more of them for each push."""


def events(seed: int, workers: int, every: float) -> Iterator[Event]:
    """Deaths and pauses of servers and workers, so many seconds from each other or less."""
    draw = random.Random(seed)
    for _ in range(DEATHS):
        at, after = draw.randrange(SERVERS + workers), draw.uniform(0.3, 1.0) * every
        if draw.random() < 0.8:
            yield after, partial(kill, at=at)
        else:
            yield after, partial(pause, at=at)
            yield draw.uniform(0.1, 0.5) * every, partial(go_on, at=at)


def check(kvstore: str, workers: int, pushes: int, folder: Path, seconds: float, every: float) -> None:
    (folder / "done").write_bytes(bytes(8 * workers))
    with Job(
        kvstore,
        pushes,
        folder,
        {},
        stopped=lambda job, member: None,
        workers=workers,
        module="tests.chaos.counting",
    ) as job:
        outcome = job.run(events(len(kvstore), workers, every), seconds)
    assert outcome.results == [f"{workers * pushes}.0"] * workers
    assert sum(outcome.starts.values()) > len(outcome.starts), "nobody died"


@pytest.mark.parametrize("kvstore", ["dist_async", "dist_ssp"])
def test_every_push_counts_once_although_servers_and_workers_die(kvstore: str, tmp_path: Path) -> None:
    check(kvstore, 3, FEW, tmp_path, LIMIT, 0.3)


@pytest.mark.chaos
@pytest.mark.parametrize("kvstore", ["dist_async", "dist_ssp"])
def test_a_hundred_thousand_pushes_count_once_each(kvstore: str, tmp_path: Path) -> None:
    check(kvstore, 8, MANY, tmp_path, JOB_LIMIT, 1.0)
