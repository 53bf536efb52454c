"""When a contribution counts: the state machine of synchronous rounds, one rule in each test."""

from __future__ import annotations

import math

import pytest

from kvstore_server.consistency import Accepted, Applied, Lost, Refused, SyncRounds, Verdict
from kvstore_server.errors import KVStoreError, ProtocolError, RoundAbortedError
from kvstore_server.protocol.messages import Commit, Push

ERROR = RoundAbortedError("rank 0 aborted round 0")


@pytest.fixture
def rounds() -> SyncRounds[str]:
    """Rounds of two workers; payloads are plain strings."""
    return SyncRounds(2, lambda a, b: a == b)


def push(rounds: SyncRounds[str], rank: int, payload: str, *, round_: int = 0, generation: int = 0) -> None:
    rounds.push(rank, Push(table=0, slice=5, round=round_, generation=generation, payload=payload))


def commit(
    rounds: SyncRounds[str],
    rank: int,
    *,
    round_: int = 0,
    manifest: tuple[tuple[int, int], ...] = (),
    waiter: str = "waiter",
    now: float = 0.0,
    timeout: float = 60.0,
) -> Verdict:
    return rounds.commit(rank, Commit(0, round_, manifest, None, False, timeout), waiter, now)


def given(rounds: SyncRounds[str]) -> list[tuple[int, dict[int, tuple[int, str]]]]:
    return [(rank, mine.slices) for rank, mine in rounds.contributions()]


def test_a_push_alone_counts_for_nothing(rounds: SyncRounds[str]) -> None:
    push(rounds, 0, "x")
    assert rounds.missing_ranks() == [0, 1]
    assert not rounds.is_waiting()


def test_a_commit_makes_a_contribution_final(rounds: SyncRounds[str]) -> None:
    push(rounds, 0, "x")
    assert commit(rounds, 0, manifest=((5, 0),)) == Accepted(repeated=False)
    assert rounds.missing_ranks() == [1]
    assert rounds.has_committed(0)
    assert not rounds.has_committed(1)


def test_a_commit_is_refused_while_a_slice_has_not_arrived(rounds: SyncRounds[str]) -> None:
    push(rounds, 0, "x")
    assert commit(rounds, 0, manifest=((5, 0), (6, 0), (7, 0))) == Refused((6, 7))
    assert not rounds.is_waiting()


@pytest.mark.parametrize("named", [0, 2])
def test_a_commit_is_refused_that_names_another_generation(rounds: SyncRounds[str], named: int) -> None:
    push(rounds, 0, "x", generation=1)
    assert commit(rounds, 0, manifest=((5, named),)) == Refused((5,))


def test_a_higher_generation_replaces_a_lower_one(rounds: SyncRounds[str]) -> None:
    push(rounds, 0, "old")
    push(rounds, 0, "new", generation=1)
    assert given(rounds) == [(0, {5: (1, "new")})]


def test_a_lower_generation_that_comes_late_changes_nothing(rounds: SyncRounds[str]) -> None:
    push(rounds, 0, "new", generation=1)
    push(rounds, 0, "old")
    assert given(rounds) == [(0, {5: (1, "new")})]


def test_after_the_commit_a_higher_generation_changes_nothing(rounds: SyncRounds[str]) -> None:
    push(rounds, 0, "first")
    commit(rounds, 0, manifest=((5, 0),))
    push(rounds, 0, "later", generation=1)
    assert given(rounds) == [(0, {5: (0, "first")})]


def test_slices_that_the_commit_does_not_name_do_not_count(rounds: SyncRounds[str]) -> None:
    push(rounds, 0, "x")
    commit(rounds, 0, manifest=())
    assert given(rounds) == [(0, {})]


def test_an_equal_duplicate_is_no_mismatch(rounds: SyncRounds[str]) -> None:
    push(rounds, 0, "x")
    push(rounds, 0, "x")
    assert rounds.mismatches == 0


def test_another_payload_under_the_same_identity_is_counted_and_dropped(rounds: SyncRounds[str]) -> None:
    push(rounds, 0, "x")
    push(rounds, 0, "y")
    assert rounds.mismatches == 1
    assert given(rounds) == [(0, {5: (0, "x")})]


def test_one_rank_cannot_complete_a_round_by_committing_twice(rounds: SyncRounds[str]) -> None:
    commit(rounds, 0)
    assert commit(rounds, 0) == Accepted(repeated=True)
    assert rounds.missing_ranks() == [1]


def test_the_latest_request_of_a_rank_is_the_one_to_answer(rounds: SyncRounds[str]) -> None:
    commit(rounds, 0, waiter="first")
    commit(rounds, 0, waiter="again")
    assert rounds.fail(ERROR) == ["again"]


def test_contributions_come_in_rank_order_whatever_arrived_first(rounds: SyncRounds[str]) -> None:
    push(rounds, 1, "b")
    push(rounds, 0, "a")
    assert [rank for rank, _ in rounds.contributions()] == [0, 1]


def test_a_finished_round_opens_the_next_one_empty(rounds: SyncRounds[str]) -> None:
    push(rounds, 0, "x")
    rounds.finish()
    assert rounds.number == 1
    assert given(rounds) == []


def test_a_repeated_commit_of_an_applied_round_is_told_so(rounds: SyncRounds[str]) -> None:
    rounds.finish()
    assert commit(rounds, 0) == Applied()
    assert rounds.was_applied(0)


def test_the_open_round_was_not_applied(rounds: SyncRounds[str]) -> None:
    assert not rounds.was_applied(0)


def test_a_rank_that_comes_late_to_a_failed_round_is_told_the_same_error(rounds: SyncRounds[str]) -> None:
    commit(rounds, 0, waiter="early")
    assert rounds.fail(ERROR) == ["early"]
    assert commit(rounds, 1) == Lost(ERROR)
    assert not rounds.was_applied(0)


def test_a_failed_round_stays_failed_however_often_its_ranks_ask(rounds: SyncRounds[str]) -> None:
    rounds.fail(ERROR)
    assert [commit(rounds, rank) for rank in (0, 1, 0, 1)] == [Lost(ERROR)] * 4


def test_failures_are_forgotten_once_every_rank_has_gone_on(rounds: SyncRounds[str]) -> None:
    for _ in range(100):
        rounds.fail(ERROR)
    rounds.finish()
    assert not rounds._failures


def test_of_very_many_failures_in_a_row_the_last_reasons_are_kept_and_none_counts_as_applied(
    rounds: SyncRounds[str],
) -> None:
    for number in range(1000):
        rounds.fail(KVStoreError(str(number)))
    told = [commit(rounds, 0, round_=number) for number in range(1000)]
    assert all(isinstance(verdict, Lost) for verdict in told)
    assert not any(rounds.was_applied(number) for number in range(1000))
    assert str(told[-1].error) == "999"  # type: ignore[union-attr]
    assert len(rounds._failures) < 100


def test_an_undone_round_counts_as_failed(rounds: SyncRounds[str]) -> None:
    rounds.finish()
    rounds.undo(ERROR)
    assert commit(rounds, 0) == Lost(ERROR)
    assert not rounds.was_applied(0)


def test_a_push_of_a_past_round_changes_nothing(rounds: SyncRounds[str]) -> None:
    rounds.finish()
    push(rounds, 0, "late", round_=0)
    assert given(rounds) == []


def test_a_push_ahead_of_the_open_round_is_refused_with_both_numbers(rounds: SyncRounds[str]) -> None:
    with pytest.raises(ProtocolError, match="rank 1 pushed to round 3 while round 0 is open"):
        push(rounds, 1, "x", round_=3)


def test_a_commit_ahead_of_the_open_round_is_refused_with_both_numbers(rounds: SyncRounds[str]) -> None:
    with pytest.raises(ProtocolError, match="rank 1 committed round 3 while round 0 is open"):
        commit(rounds, 1, round_=3)


def test_a_new_process_drops_what_the_old_one_had_not_committed(rounds: SyncRounds[str]) -> None:
    push(rounds, 0, "of the dead", generation=7)
    rounds.replace_process(0)
    push(rounds, 0, "of the living")
    assert given(rounds) == [(0, {5: (0, "of the living")})]


def test_a_new_process_keeps_what_the_old_one_had_committed(rounds: SyncRounds[str]) -> None:
    push(rounds, 0, "x")
    commit(rounds, 0, manifest=((5, 0),), waiter="dead")
    rounds.replace_process(0)
    assert rounds.missing_ranks() == [1]
    assert rounds.fail(ERROR) == []


def test_a_new_process_may_wait_for_the_round_that_the_old_one_committed(rounds: SyncRounds[str]) -> None:
    commit(rounds, 0, waiter="dead")
    rounds.replace_process(0)
    commit(rounds, 0, waiter="living")
    assert rounds.fail(ERROR) == ["living"]


def test_the_shortest_patience_decides_the_deadline(rounds: SyncRounds[str]) -> None:
    commit(rounds, 0, now=100.0, timeout=60.0)
    commit(rounds, 1, now=110.0, timeout=5.0)
    assert rounds.earliest_deadline() == 115.0


def test_repeating_a_commit_does_not_move_its_deadline(rounds: SyncRounds[str]) -> None:
    commit(rounds, 0, now=100.0, timeout=60.0)
    commit(rounds, 0, now=150.0, timeout=60.0)
    assert rounds.earliest_deadline() == 160.0


def test_nobody_waits_means_no_deadline(rounds: SyncRounds[str]) -> None:
    push(rounds, 0, "x")
    assert rounds.earliest_deadline() == math.inf
