"""When a contribution counts: the arrays of all rounds of a namespace, one rule in each test."""

from __future__ import annotations

import math
import weakref
from typing import Any

import numpy as np
import pytest
import torch

from kvstore_server.errors import KVStoreError, ProtocolError, RoundAbortedError
from kvstore_server.memo import Memo
from kvstore_server.protocol import messages as m
from kvstore_server.rounds import Book, Rounds, Slots, Verdict, Wait, Waiter, Waits

ERROR = RoundAbortedError("rank 0 aborted round 0")
W = 1
"""The table of most tests: two slices, in slots 1 and 2."""


def same(nbytes: int, a: Any, start_a: int, b: Any, start_b: int) -> bool:
    return bool(a == b)


def rounds_of(num_workers: int = 2, bound: int | None = None, is_sync: bool = True) -> Rounds:
    """Rounds of three tables; payloads are plain strings."""
    rounds = Rounds(num_workers, is_sync, bound, same)
    for sizes in ([64], [64, 64], [64]):
        rounds.add(sizes, [False] * len(sizes))
    return rounds


@pytest.fixture
def book() -> Book:
    """Rounds of two workers."""
    return rounds_of().shared


def push(book: Book, rank: int, payload: str, *, slot: int = 1, round_: int = 0, generation: int = 0) -> None:
    book.push(
        rank, m.matrix([(slot, round_, generation, 64)], 4), [payload], np.zeros(1, int), np.zeros(1, int)
    )


def commit(
    book: Book,
    rank: int,
    *tables: int,
    round_: int = 0,
    given: tuple[int, int] = (0, 0),
    waiter: int = 1,
    now: float = 0.0,
    timeout: float = 60.0,
    flags: int = 0,
) -> list[Verdict]:
    """Commit with (slices, sum of their generations); what became of it."""
    rows = m.matrix([(table, round_, *given, -1, flags) for table in tables or (W,)], m.COMMIT_WORDS)
    said = m.Contribute(m.matrix((), 4), (), rows, timeout=timeout)
    verdicts = book.commit(rank, rows, said, Waiter(b"%d" % rank, waiter), now)
    return [Verdict.ACCEPTED] * len(rows) if verdicts is None else [Verdict(one) for one in verdicts]


def given(book: Book, rank: int, table: int = W) -> list[tuple[int, str]]:
    return [(slot, source) for slot, source, _ in book.of(rank).here(table)]


def finish(book: Book, *tables: int) -> None:
    ended = np.array(tables or (W,))
    book.finish(ended, book._slots.of(ended))


def test_a_push_alone_counts_for_nothing(book: Book) -> None:
    push(book, 0, "x")
    assert book.missing_ranks(W) == [0, 1]
    assert not book.num_committed[W]


def test_a_commit_makes_a_contribution_final(book: Book) -> None:
    push(book, 0, "x")
    assert commit(book, 0, given=(1, 0)) == [Verdict.ACCEPTED]
    assert book.missing_ranks(W) == [1]


def test_each_table_of_a_commit_counts_for_itself(book: Book) -> None:
    push(book, 0, "x", slot=3)
    assert commit(book, 0, 0, 2) == [Verdict.ACCEPTED, Verdict.REFUSED]
    commit(book, 1, 0, 1)
    assert book.num_committed[:3].tolist() == [2, 1, 0]


def test_a_commit_is_refused_while_a_slice_has_not_arrived_and_names_what_has_not(book: Book) -> None:
    push(book, 0, "x")
    assert commit(book, 0, given=(2, 0)) == [Verdict.REFUSED]
    assert book.missing_slots(0, W, 2) == (2,)
    assert not book.num_committed[W]


@pytest.mark.parametrize("named", [0, 2])
def test_a_commit_of_another_generation_is_refused_and_names_all_slices(book: Book, named: int) -> None:
    push(book, 0, "x", generation=1)
    push(book, 0, "y", slot=2)
    assert commit(book, 0, given=(2, named)) == [Verdict.REFUSED]
    assert book.missing_slots(0, W, 2) == (1, 2)


def test_a_lower_generation_is_named_though_the_rank_leaves_another_slice_out(book: Book) -> None:
    push(book, 0, "x", generation=0)
    assert commit(book, 0, given=(1, 1)) == [Verdict.REFUSED]
    assert 1 in book.missing_slots(0, W, 1)


@pytest.mark.parametrize("generations", [(0, 1), (1, 0)])
def test_of_two_generations_the_higher_one_counts_whatever_came_first(
    book: Book, generations: tuple[int, int]
) -> None:
    for generation in generations:
        push(book, 0, f"generation {generation}", generation=generation)
    assert given(book, 0) == [(1, "generation 1")]
    assert commit(book, 0, given=(1, 1)) == [Verdict.ACCEPTED]


def test_after_the_commit_a_higher_generation_changes_nothing(book: Book) -> None:
    push(book, 0, "first")
    commit(book, 0, given=(1, 0))
    push(book, 0, "later", generation=1)
    assert given(book, 0) == [(1, "first")]


def test_a_commit_that_begins_anew_counts_without_what_was_pushed_before(book: Book) -> None:
    push(book, 0, "left out")
    push(book, 0, "other table", slot=3)
    push(book, 0, "newer", slot=2, generation=1)
    assert commit(book, 0, given=(1, 1), flags=m.ANEW) == [Verdict.ACCEPTED]
    assert given(book, 0) == [(2, "newer")]
    assert given(book, 0, 2) == [(3, "other table")]


def test_a_commit_of_several_tables_begins_each_of_them_anew(book: Book) -> None:
    push(book, 0, "x", slot=0)
    push(book, 0, "y", slot=3)
    push(book, 0, "z")
    assert commit(book, 0, 0, 2, flags=m.ANEW) == [Verdict.ACCEPTED] * 2
    assert (given(book, 0, 0), given(book, 0, 2), given(book, 0)) == ([], [], [(1, "z")])


def test_what_was_left_out_does_not_come_back_with_a_late_copy(book: Book) -> None:
    push(book, 0, "left out")
    assert commit(book, 0, given=(1, 1), flags=m.ANEW) == [Verdict.REFUSED]
    push(book, 0, "left out")
    push(book, 0, "newer", slot=2, generation=1)
    assert commit(book, 0, given=(1, 1), flags=m.ANEW) == [Verdict.ACCEPTED]
    assert commit(book, 0, given=(1, 1), flags=m.ANEW) == [Verdict.REPEATED]
    assert given(book, 0) == [(2, "newer")]


def test_of_a_round_that_is_over_nothing_begins_anew(book: Book) -> None:
    for rank in range(2):
        commit(book, rank)
    finish(book)
    push(book, 0, "x", round_=1)
    assert commit(book, 0, round_=0, flags=m.ANEW) == [Verdict.APPLIED]
    assert given(book, 0) == [(1, "x")]


@pytest.mark.parametrize(("payload", "mismatches"), [("x", 0), ("y", 1)])
def test_another_payload_under_the_same_identity_is_counted_and_dropped(
    book: Book, payload: str, mismatches: int
) -> None:
    push(book, 0, "x")
    push(book, 0, payload)
    assert book.mismatches.get(W, 0) == mismatches
    assert given(book, 0) == [(1, "x")]


def test_buffers_are_kept_only_while_a_slice_in_them_counts(book: Book) -> None:
    mine = book.of(0)
    rows = m.matrix([(0, 0, 0, 64), (1, 0, 0, 64), (2, 0, 0, 64)], 4)
    book.push(0, rows, ["several"], np.zeros(3, int), np.array([0, 64, 128]))
    push(book, 0, "newer", slot=2, generation=1)
    assert list(mine.here(W)) == [(1, "several", 64), (2, "newer", 0)]
    finish(book, W)
    assert {mine.payload(slot)[0] for slot in range(4)} == {"several", None}
    finish(book, 0)
    assert {mine.payload(slot)[0] for slot in range(4)} == {None}


def test_a_commit_keeps_nothing_of_the_payloads_that_came_with_it(book: Book) -> None:
    payload = torch.zeros(64)
    kept = weakref.ref(payload)
    rows = m.matrix([(W, 0, 0, 0, -1, 0)], m.COMMIT_WORDS)
    said = m.Contribute(m.matrix((), 4), (payload,), rows)
    book.commit(0, rows, said, Waiter(b"0", 1), 0.0)
    del payload, said
    assert kept() is None


def test_one_rank_cannot_complete_a_round_by_committing_twice(book: Book) -> None:
    commit(book, 0)
    assert commit(book, 0) == [Verdict.REPEATED]
    assert book.missing_ranks(W) == [1]
    assert book.num_committed[W] == 1


def test_the_latest_request_of_a_rank_is_the_one_to_answer(book: Book) -> None:
    commit(book, 0, waiter=1)
    commit(book, 0, waiter=2**64 - 1)
    assert book.fail(W, ERROR) == [Waiter(b"0", 2**64 - 1)]


def test_who_waits_is_found_by_request_with_its_tables(book: Book) -> None:
    commit(book, 0, 0, 1, waiter=7)
    commit(book, 0, 2, waiter=8)
    assert book.of(0).waiters == [Waiter(b"0", 7), Waiter(b"0", 7), Waiter(b"0", 8)]


def test_contributions_come_in_rank_order_whatever_arrived_first(book: Book) -> None:
    push(book, 1, "b")
    push(book, 0, "a")
    assert [*book.given] == [0, 1]


def test_a_finished_round_opens_the_next_one_empty(book: Book) -> None:
    push(book, 0, "x")
    finish(book)
    assert [book.number(table) for table in range(3)] == [0, 1, 0]
    assert given(book, 0) == []


def test_a_repeated_commit_of_an_applied_round_is_told_so(book: Book) -> None:
    assert not book.was_applied(W, 0)
    finish(book)
    assert commit(book, 0) == [Verdict.APPLIED]
    assert book.was_applied(W, 0)


def test_a_rank_that_comes_late_to_a_failed_round_is_told_the_same_error(book: Book) -> None:
    commit(book, 0, waiter=3)
    assert book.fail(W, ERROR) == [Waiter(b"0", 3)]
    assert [commit(book, rank) for rank in (0, 1, 0, 1)] == [[Verdict.FAILED]] * 4
    assert book.why_failed(W, 0) is ERROR
    assert not book.was_applied(W, 0)


def test_failures_are_forgotten_once_every_rank_has_gone_on(book: Book) -> None:
    for _ in range(100):
        book.fail(W, ERROR)
    finish(book)
    assert not book._failures


def test_of_very_many_failures_in_a_row_the_last_reasons_are_kept_and_none_counts_as_applied(
    book: Book,
) -> None:
    for number in range(1000):
        book.fail(W, KVStoreError(str(number)))
    assert all(commit(book, 0, round_=number) == [Verdict.FAILED] for number in range(1000))
    assert not any(book.was_applied(W, number) for number in range(1000))
    assert str(book.why_failed(W, 999)) == "999"
    assert len(book._failures[W]) < 100


def test_an_undone_round_counts_as_failed(book: Book) -> None:
    finish(book)
    book.undo(W, ERROR)
    assert commit(book, 0) == [Verdict.FAILED]
    assert not book.was_applied(W, 0)


def test_a_push_of_a_past_round_changes_nothing(book: Book) -> None:
    finish(book)
    push(book, 0, "late", round_=0)
    assert given(book, 0) == []


def test_what_is_ahead_of_the_open_round_is_refused(book: Book) -> None:
    with pytest.raises(ProtocolError, match="rank 1 pushed to round 3 while round 0 is open"):
        push(book, 1, "x", round_=3)
    assert commit(book, 1, round_=3) == [Verdict.AHEAD]


def test_a_new_process_drops_what_the_old_one_had_not_committed(book: Book) -> None:
    push(book, 0, "of the dead", generation=7)
    book.replace_process(0)
    push(book, 0, "of the living")
    assert given(book, 0) == [(1, "of the living")]
    assert commit(book, 0, given=(1, 0)) == [Verdict.ACCEPTED]


def test_a_new_process_keeps_what_the_old_one_had_committed_and_may_wait_for_it(book: Book) -> None:
    push(book, 0, "x")
    commit(book, 0, given=(1, 0), waiter=1)
    book.replace_process(0)
    assert book.missing_ranks(W) == [1]
    assert given(book, 0) == [(1, "x")]
    assert book.of(0).waiters[W] is None
    commit(book, 0, waiter=2)
    assert book.fail(W, ERROR) == [Waiter(b"0", 2)]


def test_the_shortest_patience_decides_the_deadline_and_repeating_does_not_move_it(book: Book) -> None:
    push(book, 0, "x", slot=3)
    assert book.times(W) == (math.inf, math.inf)
    commit(book, 0, now=100.0, timeout=60.0)
    commit(book, 0, now=150.0, timeout=60.0)
    assert book.times(W) == (100.0, 160.0)
    commit(book, 1, now=110.0, timeout=5.0)
    assert book.times(W) == (100.0, 115.0)


def test_a_round_is_late_from_its_deadline_on_until_it_ends(book: Book) -> None:
    commit(book, 0, 0, now=100.0, timeout=60.0)
    commit(book, 0, 1, now=101.0, timeout=5.0)
    assert [book.late(now) for now in (105.9, 106.0, 106.0, 160.0)] == [[], [1], [1], [0, 1]]
    book.fail(1, ERROR)
    assert book.late(160.0) == [0]


# ---------------------------------------------------------------- each rank for itself


def lanes_at(*clocks: int, bound: int | None = 0) -> Rounds:
    """Rounds without synchrony, of ranks with these clocks."""
    rounds = rounds_of(len(clocks), bound, is_sync=False)
    rounds.shared.finish(np.arange(3), rounds.slots.of(np.arange(3)))
    for rank, clock in enumerate(clocks):
        for _ in range(clock):
            contribute(rounds, rank)
    return rounds


def lane_of(rounds: Rounds, rank: int, round_: int) -> Book:
    return rounds.lane(rank, np.array([W]), np.array([round_]))


def contribute(rounds: Rounds, rank: int) -> None:
    lane = lane_of(rounds, rank, rounds.clocks(W)[rank] + 1)
    number = lane.number(W)
    assert commit(lane, rank, round_=number) == [Verdict.ACCEPTED]
    assert lane.num_committed[W] == lane.num_members
    finish(lane)
    rounds.advance(rank, W)


def test_the_first_round_is_for_all_ranks_and_from_then_on_each_has_a_lane() -> None:
    rounds = rounds_of(2, None, is_sync=False)
    both = np.array([0, W])
    [(book, _)] = rounds.books(0, both, np.array([1, 1]))
    assert book is rounds.shared
    rounds.shared.finish(np.array([W]), rounds.slots.of(np.array([W])))
    [(first, zero), (second, one)] = rounds.books(0, both, np.array([1, 1]))
    assert (first, zero.tolist()) == (rounds.shared, [True, False])
    assert (second, one.tolist()) == (rounds.book(0, W), [False, True])
    [(book, _)] = rounds.books(0, both, np.array([0, 0]))
    assert book is rounds.shared
    assert rounds.book(0, W) is not rounds.shared


def test_lanes_are_independent_and_refuse_gaps() -> None:
    rounds = lanes_at(2, 0)
    assert (lane_of(rounds, 0, 3).number(W), lane_of(rounds, 1, 1).number(W)) == (3, 1)
    with pytest.raises(ProtocolError, match="pushed to round 2 while round 1 is open"):
        push(lane_of(rounds, 1, 1), 1, "x", round_=2)


def test_without_a_bound_nobody_waits() -> None:
    assert lanes_at(100, 0, bound=None).behind(0, W) == []


@pytest.mark.parametrize(
    ("bound", "behind"), [(0, [1, 2]), (1, [1, 2]), (2, [2]), (3, [2]), (4, []), (5, [])]
)
def test_who_is_more_than_the_bound_behind_holds_a_reader_back(bound: int, behind: list[int]) -> None:
    assert lanes_at(4, 2, 0, bound=bound).behind(0, W) == behind


def test_the_slowest_may_always_read() -> None:
    assert lanes_at(4, 2, 0).behind(2, W) == []


def test_a_rank_that_has_joined_or_left_done_holds_nobody_back() -> None:
    rounds = lanes_at(4, 2, 0)
    rounds.joined(W).add(1)
    rounds.end_process(2, is_done=True)
    assert rounds.behind(0, W) == []
    assert rounds.missing_from_join(W) == [0]


def test_a_rank_that_left_before_it_was_done_is_missed() -> None:
    rounds = lanes_at(4, 2, 0)
    rounds.end_process(2, is_done=False)
    assert rounds.behind(0, W) == [1, 2]
    assert rounds.missing_from_join(W) == [0, 1, 2]


def test_when_all_have_joined_they_go_on_side_by_side_without_who_has_left() -> None:
    rounds = lanes_at(4, 2, 0)
    rounds.end_process(2, is_done=True)
    rounds.joined(W).update({0, 1})
    assert rounds.missing_from_join(W) == []
    rounds.part_again(W)
    assert (rounds.behind(0, W), rounds.behind(1, W)) == ([], [])
    contribute(rounds, 1)
    assert rounds.behind(1, W) == [0]
    assert rounds.missing_from_join(W) == [0, 1]


def test_a_rank_that_contributes_after_joining_is_back() -> None:
    rounds = lanes_at(4, 2)
    rounds.joined(W).add(1)
    contribute(rounds, 1)
    assert rounds.behind(0, W) == [1]


def test_a_new_process_begins_a_lane_without_what_the_old_one_had_not_committed() -> None:
    rounds = lanes_at(1, 1)
    push(lane_of(rounds, 0, 2), 0, "old", round_=2)
    rounds.begin_process(0)
    assert given(lane_of(rounds, 0, rounds.next_round(0, W)), 0) == []


@pytest.mark.parametrize(
    ("clocks", "proposed"), [((3, 7, 5), 6), ((6, 7, 5), 7), ((9, 7, 5), 10), ((0, 0, 0), 1)]
)
def test_a_new_process_begins_beside_the_slowest_of_the_others_or_ahead(
    clocks: tuple[int, ...], proposed: int
) -> None:
    rounds = lanes_at(*clocks)
    rounds.begin_process(0)
    assert rounds.next_round(0, W) == proposed


def test_ranks_without_data_do_not_say_where_a_new_process_begins() -> None:
    rounds = lanes_at(3, 1, 5, 9)
    rounds.joined(W).add(1)
    rounds.end_process(3, is_done=True)
    rounds.begin_process(0)
    assert rounds.next_round(0, W) == 6


def test_the_first_round_that_a_new_process_means_sets_its_clock() -> None:
    rounds = lanes_at(3, 7, bound=1)
    rounds.begin_process(0)
    assert rounds.behind(1, W) == [0]  # until it comes
    assert lane_of(rounds, 0, 9).number(W) == 9
    assert (rounds.clocks(W)[0], rounds.behind(1, W), rounds.next_round(0, W)) == (8, [], 9)


def test_who_returns_after_it_had_left_is_counted_again() -> None:
    rounds = lanes_at(0, 4)
    rounds.end_process(0, is_done=True)
    assert rounds.behind(1, W) == []
    rounds.begin_process(0)
    assert rounds.behind(1, W) == [0]


def test_different_payloads_under_one_identity_are_counted_over_all_lanes() -> None:
    rounds = lanes_at(0, 0)
    for rank in range(2):
        for payload in "xy":
            push(lane_of(rounds, rank, 1), rank, payload, round_=1)
    assert rounds.mismatches(W) == 2


# ---------------------------------------------------------------- requests that wait


def wait(rank: int, deadline: float = 60.0, *, number: int = 1, is_join: bool = False) -> Wait:
    return Wait(W, rank, Waiter(b"p%d" % rank, number), deadline, 60.0, is_join, list)


def deadlines(waits: Waits) -> list[float]:
    return [one.deadline for one in waits.take(lambda _: True)]


def test_a_read_is_ready_when_nobody_is_too_far_behind() -> None:
    rounds = lanes_at(3, 1, bound=1)
    waits, read = Waits(rounds), wait(0)
    waits.add(read)
    assert (read.missing(rounds), waits.take_ready()) == ([1], [])
    rounds.advance(1, W)
    assert waits.take_ready() == [read]
    assert not waits.all


def test_a_join_is_ready_when_nobody_has_data() -> None:
    rounds = lanes_at(3, 1, bound=1)
    waits, join = Waits(rounds), wait(0, is_join=True)
    waits.add(join)
    rounds.joined(W).add(0)
    assert (join.missing(rounds), waits.take_ready()) == ([1], [])
    rounds.joined(W).add(1)
    assert waits.take_ready() == [join]


def test_a_repeated_request_has_no_more_time_and_another_one_waits_for_itself() -> None:
    waits = Waits(lanes_at(3, 1))
    waits.add(wait(0, 60.0))
    waits.add(wait(0, 90.0))
    waits.add(wait(0, 95.0, number=2))
    assert deadlines(waits) == [60.0, 95.0]


def test_a_contribution_gives_joined_ranks_more_time_and_readers_none() -> None:
    waits = Waits(lanes_at(3, 1, 1))
    waits.add(wait(0, 60.0))
    waits.add(wait(1, 60.0, is_join=True))
    waits.contributed(0, 2, now=55.0)  # to another table
    waits.contributed(W, 2, now=50.0)
    assert deadlines(waits) == [60.0, 110.0]


def test_a_rank_that_contributes_no_longer_waits_for_the_others_to_join() -> None:
    waits = Waits(lanes_at(3, 1))
    waits.add(wait(1, is_join=True))
    waits.contributed(W, 1, now=0.0)
    assert not waits.all


# ---------------------------------------------------------------- what depends on the keys alone


def test_what_depends_on_keys_alone_is_made_once_and_kept_in_proportion_to_the_slots() -> None:
    slots, made = Slots(), list[int]()
    slots.add([64] * 100, [False] * 100)
    memo = Memo[int](slots)

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
    found = [slots.of(np.flatnonzero([1, *map(int, f"{number:010b}")])) for number in range(1000)]
    assert len(found[-1]) > 1000
    assert len(slots._known._known) < 50
