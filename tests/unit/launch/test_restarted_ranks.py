"""Which workers are started again, and when, on a clock that the test moves."""

from __future__ import annotations

import pytest

from kvstore_server.restarts import REPLACED, STEADY
from kvtrainer.jobs.restarted_ranks import RestartedRanks

KILLED = -9


def test_a_rank_is_due_when_its_wait_is_over_and_then_no_longer() -> None:
    ranks = RestartedRanks(3, 5)
    for _ in range(2):  # the second restart in a row waits for half a second
        ranks.count(1, "worker 1", KILLED, lived=0.1, now=100.0)
    assert (ranks.take_due(100.4), ranks.are_awaited) == ([], True)
    assert ranks.seconds_left(100.4) == pytest.approx(0.1)
    assert ranks.take_due(100.5) == [1]
    assert (ranks.are_awaited, ranks.seconds_left(100.5)) == (False, float("inf"))


def test_several_ranks_are_due_in_their_order() -> None:
    ranks = RestartedRanks(3, 5)
    for rank in (2, 0):
        ranks.count(rank, f"worker {rank}", KILLED, lived=STEADY, now=100.0)
    assert ranks.take_due(100.0) == [0, 2]


def test_each_rank_has_restarts_of_its_own_and_the_environment_says_how_many_were_used() -> None:
    ranks = RestartedRanks(2, 1)
    assert ranks.environment(0) == {"KVSTORE_RESTARTS": "0"}
    assert ranks.count(0, "worker 0", KILLED, STEADY, now=0.0) == (
        "worker 0 was killed by signal 9 (SIGKILL) after 5.0 s; restart 1 of 1",
        False,
        137,
    )
    assert [ranks.environment(rank) for rank in range(2)] == [
        {"KVSTORE_RESTARTS": "1"},
        {"KVSTORE_RESTARTS": "0"},
    ]
    last = ranks.count(0, "worker 0", 3, STEADY, now=0.0)
    assert last is not None
    assert (last.is_last, last.code) == (True, 3)


def test_without_restarts_no_death_is_counted_and_no_environment_speaks_of_them() -> None:
    ranks = RestartedRanks(1, 0)
    assert ranks.count(0, "worker 0", KILLED, 1.0, now=0.0) is None
    assert ranks.environment(0) == {}


@pytest.mark.parametrize("code", [0, REPLACED])
def test_a_worker_that_is_done_or_replaced_has_not_died(code: int) -> None:
    ranks = RestartedRanks(1, 3)
    assert ranks.count(0, "worker 0", code, 1.0, now=0.0) is None
    assert not ranks.are_awaited
