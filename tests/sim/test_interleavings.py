"""Exactly-once contributions under loss, repetition, delay, aborts, vetoes, crashes and zombies, in thousands of seeded
schedules: in synchronous rounds, one by one, and with a bound on how far ranks drift apart; with ranks that run out of
data, rows, replaced weights, compression of which residuals must follow what was applied, and sums that are held until
it was decided what becomes of them.

A failing schedule is rerun alone with `SIM_SEED=123 pytest tests/sim/test_interleavings.py -k one_seed`.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from tests.sim.model import Violation
from tests.sim.mutants import ASYNC, SHOWN_BY, SYNC, mutated
from tests.sim.schedule import run_async_seed, run_seed

SEEDS, ASYNC_SEEDS = 1_000, 200
MUTANT_SEEDS = 250
BLOCK, ASYNC_BLOCK = 250, 50
READS = 200
"""For each of a block of asynchronous schedules so many reads are compared with the bound."""
EVERYTHING = {
    "applied",
    "vetoed",
    "assigned",
    "assigned by some",
    "compressed, applied",
    "compressed, vetoed",
    "compressed, failed",
    "failed",
    "hopeless",
    "hopeless, for a process is seen to be dead",
    "undone",
    "apart",
    "repeated",
    "missing",
    "replaced generation",
    "begun anew",
    "fenced",
    "hello again",
    "strangers",
    "left",
    "joined by some, applied",
    "joined by some, vetoed",
    "joined by some, failed",
    "joined by all, applied",
    "by rows alone",
    "rows and all of it",
    "without rows",
    "told new numbers after joining",
    "held",
    "held by some",
    "clipped",
    "skipped",
    "resolved again",
    "given up while held",
    "begun",
    "applied slice by slice",
    "taken back",
    "announced again",
    "announced otherwise",
    "committed otherwise",
}
"""What must happen in every block of schedules; otherwise they prove little."""
ASYNC_EVERYTHING = {
    "applied",
    "vetoed",
    "joined",
    "all joined",
    "read had to wait",
    "read released",
    "waited in vain",
    "reads within a bound",
    "kept",
    "given up",
    "undone",
    "repeated",
    "missing",
    "fenced",
    "hello again",
    "strangers",
    "left",
    "left, done",
}


Run = Callable[[int], Counter[str]]


def seed_that_fails(run: Run, seeds: Iterable[int]) -> int | None:
    """The first seed whose schedule the engine does not survive."""
    for seed in seeds:
        try:
            run(seed)
        except Violation:
            return seed
    return None


def run_block(run: Run, seeds: range) -> Counter[str]:
    """Run schedules; return how often what happened in them."""
    seen: Counter[str] = Counter()
    for seed in seeds:
        seen.update(run(seed))
    return +seen


def blocks(seeds: int, block: int) -> list[Any]:
    """Where each block of schedules starts, and how many it has: half a block in `make test`, all in the full run."""
    whole = [pytest.param(at, block, marks=pytest.mark.full) for at in range(0, seeds, block)]
    return [(0, block // 2), *whole]


@pytest.mark.parametrize(("start", "count"), blocks(SEEDS, BLOCK))
def test_every_promise_holds_in_every_schedule(start: int, count: int) -> None:
    assert set(run_block(run_seed, range(start, start + count))) == EVERYTHING


@pytest.mark.parametrize(("start", "count"), blocks(ASYNC_SEEDS, ASYNC_BLOCK))
def test_contributions_count_once_and_reads_keep_the_bound_in_every_schedule(start: int, count: int) -> None:
    seen = run_block(run_async_seed, range(start, start + count))
    assert set(seen) == ASYNC_EVERYTHING
    assert seen["reads within a bound"] >= READS * count


@pytest.mark.parametrize("run", [run_seed, run_async_seed])
def test_one_seed_can_be_rerun_alone(run: Run) -> None:
    assert run(int(os.environ.get("SIM_SEED", "0")))


@pytest.mark.parametrize("run", [run_seed, run_async_seed])
def test_a_seed_names_one_schedule(run: Run) -> None:
    assert [run(7) for _ in range(2)] == [run(7)] * 2


@pytest.mark.parametrize("name", sorted(SYNC))
def test_a_wrong_server_is_found_by_a_seed_that_the_real_one_survives(name: str) -> None:
    with mutated(SYNC[name]):
        seed = seed_that_fails(run_seed, (SHOWN_BY.get(name, 0), *range(MUTANT_SEEDS)))
    assert seed is not None
    run_seed(seed)


@pytest.mark.parametrize("name", sorted(ASYNC))
def test_a_wrong_asynchronous_server_is_found_by_a_seed_that_the_real_one_survives(name: str) -> None:
    with mutated(ASYNC[name]):
        seed = seed_that_fails(run_async_seed, (SHOWN_BY.get(name, 0), *range(MUTANT_SEEDS)))
    assert seed is not None
    run_async_seed(seed)
