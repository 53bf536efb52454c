"""Thousands of schedules in which servers and workers die, come back and are replaced, over a network that loses,
repeats and reorders: every job ends with the bits of one in which nothing happened, and no round that all servers have
is computed again.

A failing schedule is reported with its seed and the shortest part of it that fails.
"""

from __future__ import annotations

import numpy as np
import pytest

from tests.sim.many import play_all, report
from tests.sim.mutants import mutated
from tests.sim.recovery import CASES, fails, play, schedule, shortest, undisturbed
from tests.sim.recovery_mutants import RECOVERY, SHOWN_BY
from tests.sim.recovery_process import RANKS, ROUNDS, digest, every_place, gradient
from tests.sim.workers import tiny_slices

SEEDS, BLOCK = 10_000, 500
FIRST = 60
"""Schedules in `make test`; all others run with `make test-full`."""
MUTANT_SEEDS = 40
EVERYTHING = {"killed", "replaced", "restarted", "crashed", "lose", "repeat", "overtake", "computed"}
"""What must happen in every block of schedules."""


@pytest.fixture(scope="module", autouse=True)
def references() -> None:
    """The jobs in which nothing happens, made by the real servers before a mutant stands in their place."""
    with tiny_slices():
        for case in CASES:
            undisturbed(case)


@pytest.mark.parametrize(
    "first", [0, *[pytest.param(at, marks=pytest.mark.full) for at in range(0, SEEDS, BLOCK)]]
)
def test_every_job_ends_with_the_same_bits(first: int, request: pytest.FixtureRequest) -> None:
    is_full = request.node.get_closest_marker("full") is not None
    played = play_all(range(first, first + (BLOCK if is_full else FIRST)))
    assert not played.failed, report(played.failed)
    assert set(played.seen) >= EVERYTHING


def test_a_job_in_which_nothing_happens_has_the_weights_of_a_loop_over_numpy_arrays() -> None:
    with tiny_slices():
        weights = {place: gradient(0, 0, place, digest({})) for place in every_place()}
        memory = {place: np.zeros_like(values) for place, values in weights.items()}
        for round_ in range(1, ROUNDS + 1):
            seen = digest({place: values.tobytes() for place, values in weights.items()})
            for place in every_place():
                given = [gradient(rank, round_, place, seen) for rank in range(RANKS)]
                memory[place] = np.float32(0.5) * memory[place] + sum(given[1:], given[0])
                weights[place] = weights[place] - np.float32(0.5 if round_ >= 2 else 1.0) * memory[place]
        [(first, *_), (second, *_)] = undisturbed(CASES[0])
    assert [*first, *second] == [weights[place].tobytes() for place in every_place()]


def test_a_seed_names_one_schedule() -> None:
    assert schedule(7) == schedule(7) != schedule(8)
    assert play(7) == play(7)


@pytest.mark.parametrize("name", sorted(RECOVERY))
def test_a_server_that_is_wrong_about_what_outlives_it_is_found(name: str) -> None:
    with mutated(RECOVERY[name]):
        seed = next((s for s in (SHOWN_BY.get(name, 0), *range(MUTANT_SEEDS)) if fails(s, schedule(s))), None)
    assert seed is not None
    play(seed)


def test_a_schedule_that_fails_is_shortened_to_events_that_are_all_needed() -> None:
    with mutated(RECOVERY["tokens_not_restored"]):
        events = shortest(0)
        assert fails(0, events)
        assert not any(fails(0, events[:at] + events[at + 1 :]) for at in range(len(events)))
    assert len(events) <= 4
