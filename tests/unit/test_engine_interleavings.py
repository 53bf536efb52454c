"""Exactly-once rounds under loss, repetition, delay, aborts, vetoes, crashes and zombies, in thousands of seeded
schedules; with replaced weights, and with compression of which residuals must follow what was applied.

A failing schedule is rerun alone with `SIM_SEED=123 pytest tests/unit/test_engine_interleavings.py -k one_seed`.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator

import pytest

from tests.support.sim_mutants import MUTANTS, mutated
from tests.support.sim_referee import Violation
from tests.support.simulation import run_seed, small_slices

SEEDS = 10_000
MUTANT_SEEDS = 2_000
BLOCK = 1000
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
    "undone",
    "apart",
    "repeated",
    "missing",
    "replaced generation",
    "fenced",
    "left",
}
"""What must happen in every block of schedules; otherwise they prove little."""


@pytest.fixture(autouse=True)
def tiny_slices() -> Iterator[None]:
    with small_slices():
        yield


def seed_that_fails(seeds: range) -> int | None:
    """The first seed whose schedule the engine does not survive."""
    for seed in seeds:
        try:
            run_seed(seed)
        except Violation:
            return seed
    return None


def run_block(start: int) -> Counter[str]:
    """Run `BLOCK` schedules; return how often what happened in them."""
    seen: Counter[str] = Counter()
    for seed in range(start, start + BLOCK):
        seen.update(run_seed(seed).seen)
    return seen


@pytest.mark.parametrize("start", range(0, SEEDS, BLOCK))
def test_every_promise_holds_in_every_schedule(start: int) -> None:
    assert set(run_block(start)) == EVERYTHING


def test_one_seed_can_be_rerun_alone() -> None:
    assert run_seed(int(os.environ.get("SIM_SEED", "0"))).seen


def test_a_seed_names_one_schedule() -> None:
    assert [run_seed(7).seen for _ in range(2)] == [run_seed(7).seen] * 2


@pytest.mark.parametrize("name", sorted(MUTANTS))
def test_a_wrong_server_is_found_by_a_seed_that_the_real_one_survives(name: str) -> None:
    with mutated(name):
        seed = seed_that_fails(range(MUTANT_SEEDS))
    assert seed is not None
    run_seed(seed)
