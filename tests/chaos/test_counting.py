"""Pushes that are applied one by one count once each, whoever dies; reads keep the bound on staleness."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.chaos.jobs import SERVERS, Event, Job
from tests.chaos.test_random import go_on, kill, pause

FEW, MANY = 200, 12_500
"""Pushes of each worker."""


def events(seed: int, workers: int) -> Iterator[Event]:
    """Deaths and pauses of servers and workers, as long as the job takes."""
    draw = random.Random(seed)
    while True:
        at = draw.randrange(SERVERS + workers)
        if draw.random() < 0.8:
            yield draw.uniform(0.3, 1.0), partial(kill, at=at)
        else:
            yield draw.uniform(0.3, 1.0), partial(pause, at=at)
            yield draw.uniform(0.1, 0.5), partial(go_on, at=at)


def check(kvstore: str, workers: int, pushes: int, folder: Path, seconds: float) -> None:
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
        outcome = job.run(events(len(kvstore), workers), seconds)
    assert outcome.results == [f"{workers * pushes}.0"] * workers
    assert sum(outcome.starts.values()) > len(outcome.starts), "nobody died"


@pytest.mark.parametrize("kvstore", ["dist_async", "dist_ssp"])
def test_every_push_counts_once_although_servers_and_workers_die(kvstore: str, tmp_path: Path) -> None:
    check(kvstore, 3, FEW, tmp_path, 120.0)


@pytest.mark.chaos
@pytest.mark.parametrize("kvstore", ["dist_async", "dist_ssp"])
def test_a_hundred_thousand_pushes_count_once_each(kvstore: str, tmp_path: Path) -> None:
    check(kvstore, 8, MANY, tmp_path, 1000.0)
