"""Each rank's own sequence of contributions, and the clocks that say who may read: one rule in each test."""

from __future__ import annotations

import pytest

from kvstore_server.consistency import Accepted, Applied
from kvstore_server.errors import ProtocolError
from kvstore_server.lanes import Lanes
from kvstore_server.protocol.messages import Commit, Push


def lanes_at(*clocks: int, bound: int | None = 0) -> Lanes[str]:
    """Lanes of ranks with these clocks; payloads are plain strings."""
    lanes: Lanes[str] = Lanes(len(clocks), bound, lambda a, b: a == b)
    for rank, clock in enumerate(clocks):
        for _ in range(clock):
            contribute(lanes, rank)
    return lanes


def contribute(lanes: Lanes[str], rank: int) -> None:
    lane = lanes.of(rank, lanes.clocks[rank] + 1)
    lane.commit(rank, Commit(0, lane.number, (), None, False, 60.0), "waiter", 0.0)
    lanes.advance(rank)
    lane.finish()


def test_a_rank_alone_completes_a_round_of_its_lane() -> None:
    lane = lanes_at(0, 0).of(1, 1)
    assert lane.commit(1, Commit(0, 1, (), None, False, 60.0), "w", 0.0) == Accepted(repeated=False)
    assert lane.is_complete()
    lane.finish()
    assert lane.commit(1, Commit(0, 1, (), None, False, 60.0), "w", 0.0) == Applied()


def test_lanes_are_independent_and_refuse_gaps() -> None:
    lanes = lanes_at(2, 0)
    assert (lanes.of(0).number, lanes.of(1, 1).number) == (3, 1)
    with pytest.raises(ProtocolError, match="pushed to round 2 while round 1 is open"):
        lanes.of(1).push(1, Push(0, 0, 2, 0, "x"))


def test_without_a_bound_nobody_waits() -> None:
    assert lanes_at(100, 0, bound=None).behind(0) == []


@pytest.mark.parametrize(
    ("bound", "behind"), [(0, [1, 2]), (1, [1, 2]), (2, [2]), (3, [2]), (4, []), (5, [])]
)
def test_who_is_more_than_the_bound_behind_holds_a_reader_back(bound: int, behind: list[int]) -> None:
    assert lanes_at(4, 2, 0, bound=bound).behind(0) == behind


def test_the_slowest_may_always_read() -> None:
    assert lanes_at(4, 2, 0).behind(2) == []


def test_a_rank_that_has_joined_or_left_done_holds_nobody_back() -> None:
    lanes = lanes_at(4, 2, 0)
    lanes.join(1)
    lanes.leave(2, is_done=True)
    assert lanes.behind(0) == []
    assert lanes.missing_from_join() == [0]


def test_a_rank_that_left_before_it_was_done_is_missed() -> None:
    lanes = lanes_at(4, 2, 0)
    lanes.leave(2, is_done=False)
    assert lanes.behind(0) == [1, 2]
    assert lanes.missing_from_join() == [0, 1, 2]


def test_when_all_have_joined_they_go_on_side_by_side_without_who_has_left() -> None:
    lanes = lanes_at(4, 2, 0)
    lanes.leave(2, is_done=True)
    lanes.join(0)
    lanes.join(1)
    assert lanes.missing_from_join() == []
    lanes.part_again()
    assert (lanes.behind(0), lanes.behind(1)) == ([], [])
    contribute(lanes, 1)
    assert lanes.behind(1) == [0]
    assert lanes.missing_from_join() == [0, 1]


def test_a_rank_that_contributes_after_joining_is_back() -> None:
    lanes = lanes_at(4, 2)
    lanes.join(1)
    contribute(lanes, 1)
    assert lanes.behind(0) == [1]


def test_a_new_process_drops_what_the_old_one_had_not_committed() -> None:
    lanes = lanes_at(1, 1)
    lanes.of(0).push(0, Push(0, 0, 2, 0, "old"))
    lanes.begin(0)
    assert lanes.of(0, lanes.proposed(0)).contributions() == []


@pytest.mark.parametrize(
    ("clocks", "proposed"), [((3, 7, 5), 6), ((6, 7, 5), 7), ((9, 7, 5), 10), ((0, 0, 0), 1)]
)
def test_a_new_process_begins_beside_the_slowest_of_the_others_or_ahead(
    clocks: tuple[int, ...], proposed: int
) -> None:
    lanes = lanes_at(*clocks)
    lanes.begin(0)
    assert lanes.proposed(0) == proposed


def test_ranks_without_data_do_not_say_where_a_new_process_begins() -> None:
    lanes = lanes_at(3, 1, 5, 9)
    lanes.join(1)
    lanes.leave(3, is_done=True)
    lanes.begin(0)
    assert lanes.proposed(0) == 6


def test_the_first_round_that_a_new_process_means_sets_its_clock() -> None:
    lanes = lanes_at(3, 7, bound=1)
    lanes.begin(0)
    assert lanes.behind(1) == [0]  # until it comes
    assert lanes.of(0, 9).number == 9
    assert (lanes.clocks[0], lanes.behind(1), lanes.proposed(0)) == (8, [], 9)


def test_who_returns_after_it_had_left_is_counted_again() -> None:
    lanes = lanes_at(0, 4)
    lanes.leave(0, is_done=True)
    assert lanes.behind(1) == []
    lanes.begin(0)
    assert lanes.behind(1) == [0]


def test_different_payloads_under_one_identity_are_counted_over_all_lanes() -> None:
    lanes = lanes_at(0, 0)
    for rank in range(2):
        lanes.of(rank, 1).push(rank, Push(0, 0, 1, 0, "x"))
        lanes.of(rank, 1).push(rank, Push(0, 0, 1, 0, "y"))
    assert lanes.mismatches == 2
