"""When a contribution counts: the rounds of all tables of a namespace, and the modes that there are."""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np
import pytest
import torch

from kvstore_server.engine.rounds import (
    ASYNC,
    SSP,
    SYNCHRONOUS,
    CommitStatus,
    DelayedRequest,
    DelayedRequests,
    Mode,
    NamespaceRounds,
    RoundTracker,
    Slots,
    Waiter,
)
from kvstore_server.errors import ConfigurationError, KVStoreError, ProtocolError, RoundAbortedError
from kvstore_server.memo import BoundedCache
from kvstore_server.protocol import messages as m

ERROR = RoundAbortedError("rank 0 aborted round 0")
W = 1
"""The table of most tests: two slices, in slots 1 and 2."""


def rounds_of(num_workers: int = 2, mode: Mode = SYNCHRONOUS) -> NamespaceRounds:
    """Rounds of three tables; what payloads are concerns nobody, so most are plain strings."""
    rounds = NamespaceRounds(num_workers, mode)
    for sizes in ([64], [64, 64], [64]):
        rounds.add(sizes, [False] * len(sizes))
    return rounds


@pytest.fixture
def tracker() -> RoundTracker:
    """Rounds of two workers."""
    return rounds_of().shared


def push(
    tracker: RoundTracker, rank: int, payload: Any, *, slot: int = 1, round_: int = 0, generation: int = 0
) -> None:
    tracker.push(
        rank, m.matrix([(slot, round_, generation, 64)], 4), [payload], np.zeros(1, int), np.zeros(1, int)
    )


def commit(
    tracker: RoundTracker,
    rank: int,
    *tables: int,
    round_: int = 0,
    given: tuple[int, int] = (0, 0),
    waiter: int = 1,
    now: float = 0.0,
    timeout: float = 60.0,
    flags: int = 0,
) -> list[CommitStatus]:
    """Commit with (slices, sum of their generations); what became of it."""
    rows = m.matrix([(table, round_, *given, -1, flags) for table in tables or (W,)], m.COMMIT_WORDS)
    said = m.Contribute(m.matrix((), 4), (), rows, timeout=timeout)
    verdicts = tracker.commit(rank, rows, said, Waiter(b"%d" % rank, waiter), now)
    return (
        [CommitStatus.ACCEPTED] * len(rows) if verdicts is None else [CommitStatus(one) for one in verdicts]
    )


def given(tracker: RoundTracker, rank: int, table: int = W) -> list[tuple[int, Any]]:
    first, end = tracker._slots.first[table : table + 2].tolist()
    mine = tracker.of(rank)
    return [(slot, mine.payload(slot)[0]) for slot in range(first, end) if mine.arrivals[slot]]


def finish(tracker: RoundTracker, *tables: int) -> None:
    ended = np.array(tables or (W,))
    tracker.finish(ended, tracker._slots.of(ended))


@pytest.mark.parametrize(("value", "mismatches"), [(1, 0), (2, 1)])
def test_another_payload_under_the_same_identity_is_counted_and_dropped(
    tracker: RoundTracker, value: int, mismatches: int
) -> None:
    first, second = (torch.full((64,), number, dtype=torch.uint8) for number in (1, value))
    push(tracker, 0, first)
    push(tracker, 0, second)
    assert tracker.mismatches.get(W, 0) == mismatches
    [(_, kept)] = given(tracker, 0)
    assert kept is first


def test_buffers_are_kept_only_while_a_slice_in_them_counts(tracker: RoundTracker) -> None:
    mine = tracker.of(0)
    rows = m.matrix([(0, 0, 0, 64), (1, 0, 0, 64), (2, 0, 0, 64)], 4)
    tracker.push(0, rows, ["several"], np.zeros(3, int), np.array([0, 64, 128]))
    push(tracker, 0, "newer", slot=2, generation=1)
    assert [mine.payload(slot) for slot in (1, 2)] == [("several", 64), ("newer", 0)]
    finish(tracker, W)
    assert {mine.payload(slot)[0] for slot in range(4)} == {"several", None}
    finish(tracker, 0)
    assert {mine.payload(slot)[0] for slot in range(4)} == {None}


def test_a_commit_keeps_nothing_of_the_payloads_that_came_with_it(tracker: RoundTracker) -> None:
    payload = torch.zeros(64)
    kept = weakref.ref(payload)
    rows = m.matrix([(W, 0, 0, 0, -1, 0)], m.COMMIT_WORDS)
    said = m.Contribute(m.matrix((), 4), (payload,), rows)
    tracker.commit(0, rows, said, Waiter(b"0", 1), 0.0)
    del payload, said
    assert kept() is None


def test_waiters_are_found_by_request_with_their_tables(tracker: RoundTracker) -> None:
    commit(tracker, 0, 0, 1, waiter=7)
    commit(tracker, 0, 2, waiter=8)
    assert tracker.of(0).waiters == [Waiter(b"0", 7), Waiter(b"0", 7), Waiter(b"0", 8)]


def test_failures_are_forgotten_once_every_rank_has_gone_on(tracker: RoundTracker) -> None:
    for _ in range(100):
        tracker.fail(W, ERROR)
    finish(tracker)
    assert not tracker._failures


def test_of_very_many_failures_in_a_row_the_last_reasons_are_kept_and_none_counts_as_applied(
    tracker: RoundTracker,
) -> None:
    for number in range(1000):
        tracker.fail(W, KVStoreError(str(number)))
    assert all(commit(tracker, 0, round_=number) == [CommitStatus.FAILED] for number in range(1000))
    assert not any(tracker.was_applied(W, number) for number in range(1000))
    assert str(tracker.why_failed(W, 999)) == "999"
    assert len(tracker._failures[W]) < 100


def test_what_is_ahead_of_the_open_round_is_refused(tracker: RoundTracker) -> None:
    with pytest.raises(ProtocolError, match="rank 1 pushed to round 3 while round 0 is open"):
        push(tracker, 1, "x", round_=3)
    assert commit(tracker, 1, round_=3) == [CommitStatus.AHEAD]


def test_a_round_is_late_from_its_deadline_on_until_it_ends(tracker: RoundTracker) -> None:
    commit(tracker, 0, 0, now=100.0, timeout=60.0)
    commit(tracker, 0, 1, now=101.0, timeout=5.0)
    assert [tracker.late(now) for now in (105.9, 106.0, 106.0, 160.0)] == [[], [1], [1], [0, 1]]
    tracker.fail(1, ERROR)
    assert tracker.late(160.0) == [0]


def lanes_at(*clocks: int, bound: int | None = 0) -> NamespaceRounds:
    """Rounds without synchrony, of ranks with these clocks."""
    rounds = rounds_of(len(clocks), Mode(ASYNC) if bound is None else Mode(SSP, bound))
    rounds.shared.finish(np.arange(3), rounds.slots.of(np.arange(3)))
    for rank, clock in enumerate(clocks):
        for _ in range(clock):
            contribute(rounds, rank)
    return rounds


def lane_of(rounds: NamespaceRounds, rank: int, round_: int) -> RoundTracker:
    return rounds.lane(rank, np.array([W]), np.array([round_]))


def contribute(rounds: NamespaceRounds, rank: int) -> None:
    lane = lane_of(rounds, rank, rounds.clocks(W)[rank] + 1)
    number = lane.number(W)
    assert commit(lane, rank, round_=number) == [CommitStatus.ACCEPTED]
    assert lane.num_committed[W] == lane.num_members
    finish(lane)
    rounds.advance(rank, W)


def test_the_first_round_that_a_new_process_means_sets_its_clock() -> None:
    rounds = lanes_at(3, 7, bound=1)
    rounds.begin_process(0, resumes=False)
    assert rounds.behind(1, W) == [0]  # until it comes
    assert lane_of(rounds, 0, 9).number(W) == 9
    assert (rounds.clocks(W)[0], rounds.behind(1, W), rounds.next_round(0, W)) == (8, [], 9)


def test_different_payloads_under_one_identity_are_counted_over_all_lanes() -> None:
    rounds = lanes_at(0, 0)
    for rank in range(2):
        for payload in "xy":
            push(lane_of(rounds, rank, 1), rank, payload, round_=1)
    assert rounds.mismatches(W) == 2


def wait(rank: int, deadline: float = 60.0, *, number: int = 1, is_join: bool = False) -> DelayedRequest:
    return DelayedRequest(W, rank, Waiter(b"p%d" % rank, number), deadline, 60.0, is_join, list)


def test_a_rank_that_contributes_no_longer_waits_for_the_others_to_join() -> None:
    waits = DelayedRequests(lanes_at(3, 1))
    waits.add(wait(1, is_join=True))
    waits.contributed(W, 1, now=0.0)
    assert not waits.all


def test_what_depends_on_keys_alone_is_made_once_and_kept_in_proportion_to_the_slots() -> None:
    slots, made = Slots(), list[int]()
    slots.add([64] * 100, [False] * 100)
    memo = BoundedCache[int](slots)

    def double(numbers: Any) -> int:
        made.append(int(numbers[0]))
        return 2 * made[-1]

    assert [memo.get(7, double, [7]) for _ in range(3)] == [14] * 3
    assert made == [7]
    for number in range(100_000):
        numbers = np.array([number, 0, 0, 0, 0])
        memo.get(numbers.tobytes(), double, numbers)
    assert len(memo._known) < 400


def test_what_is_kept_is_counted_with_the_slots_of_the_tables_that_are_named() -> None:
    slots = Slots()
    slots.add([64] * 1000, [False] * 1000)
    for _ in range(10):
        slots.add([64], [False])
    memo = BoundedCache[Any](slots)
    for number in range(1000):
        tables = np.flatnonzero([1, *map(int, f"{number:010b}")])
        found = memo.get(tables.tobytes(), slots.of, tables)
    assert len(found) > 1000
    assert len(memo._known) < 50


@pytest.mark.parametrize(
    "mode",
    [
        Mode(), Mode(by_host=True), Mode("async"), Mode("async", slow_down=True), Mode("ssp", 0),
        Mode("ssp", 7, slow_down=True),
    ],
)  # fmt: skip
def test_parts_that_fit_together_are_accepted(mode: Mode) -> None:
    mode.check()


@pytest.mark.parametrize(
    ("mode", "text"),
    [
        (Mode("eventual"), "must be 'sync', 'async' or 'ssp', got 'eventual'"),
        (Mode("ssp", -1), "staleness=-1 does not go with mode 'ssp'"),
        (Mode("async", 2), "staleness=2 does not go with mode 'async'"),
        (Mode("sync", 2), "staleness=2 does not go with mode 'sync'"),
        (Mode("sync", slow_down=True), "slow_down does not go with 'sync'"),
        (Mode("async", by_host=True), "by_host does not go with 'async'"),
        (Mode("ssp", 1, by_host=True), "by_host does not go with 'ssp'"),
    ],
)
def test_parts_that_do_not_are_named(mode: Mode, text: str) -> None:
    with pytest.raises(ConfigurationError, match=text):
        mode.check()


def test_only_bounded_staleness_has_a_bound_which_may_be_0() -> None:
    assert [Mode().bound, Mode("async").bound, Mode("ssp").bound, Mode("ssp", 3).bound] == [None, None, 0, 3]


def test_a_mode_reads_as_one_would_say_it() -> None:
    modes = [SYNCHRONOUS, Mode(by_host=True), Mode("ssp", 2, True)]
    assert list(map(str, modes)) == ["sync", "sync by_host", "ssp staleness=2 slow_down"]
