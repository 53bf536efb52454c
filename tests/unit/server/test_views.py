"""Which ranks are members, where that may change."""

from __future__ import annotations

import pytest

from kvstore_server.engine.views import MemberView as View
from kvstore_server.engine.views import Views
from kvstore_server.errors import ConfigurationError, ProtocolError


def views_of(initial_workers: int = 3, min_workers: int = 1) -> Views:
    return Views(8, initial_workers, min_workers)


def test_a_rank_that_asks_joins_at_the_end_of_the_round() -> None:
    views = views_of()
    views.joining.add(5)
    assert views.end_round(7, True) == []
    assert views.current == View(1, (0, 1, 2, 5))
    assert (views.since, views.ended) == ({5: 7}, View(0, (0, 1, 2)))


def test_another_server_makes_no_view() -> None:
    views = views_of()
    views.joining.add(5)
    views.end_round(7, False)
    assert views.current == View(0, (0, 1, 2))


def test_a_rank_that_leaves_is_gone_at_once_unless_it_has_committed() -> None:
    views = views_of()
    views.leaving.add(0)
    assert views.remove(committed=[2]) == [0]
    assert views.current == View(1, (1, 2))
    views.leaving.add(2)
    assert views.remove(committed=[1, 2]) == []
    assert views.end_round(4, True) == [2]
    assert views.current == View(2, (1,))


def test_a_rank_that_has_committed_goes_with_another_one_because_its_commit_is_forgotten() -> None:
    views = views_of()
    views.leaving |= {0, 2}
    assert views.remove(committed=[2]) == [0, 2]
    assert views.current == View(1, (1,))


def test_as_many_ranks_stay_as_must_be_left() -> None:
    views = views_of(min_workers=2)
    views.leaving |= {0, 1, 2}
    assert views.remove(committed=[]) == [0]
    assert not views.may_leave()


def test_a_rank_that_joins_makes_room_for_one_that_leaves() -> None:
    views = views_of(initial_workers=2, min_workers=2)
    views.leaving.add(0)
    views.joining.add(7)
    assert views.end_round(3, True) == [0]
    assert views.current == View(1, (1, 7))


def test_a_view_of_the_coordinator_replaces_the_own_one() -> None:
    views = views_of()
    assert views.adopt(View(4, (1, 6))) == [0, 2]
    assert views.current == View(4, (1, 6))


@pytest.mark.parametrize(
    "view", [View(1, ()), View(1, (2, 1)), View(1, (1, 1)), View(1, (1, 8)), View(1, (-1, 1)), View(1, (0, 2)),
             View(-1, (0, 1)), View(0, (0, 1))]
)  # fmt: skip
def test_a_view_that_cannot_be_is_refused(view: View) -> None:
    with pytest.raises(ProtocolError):
        views_of().check(1, view)


def test_what_is_stored_comes_back() -> None:
    views, again = views_of(), views_of()
    views.joining.add(4)
    views.end_round(2, True)
    again.restore(views.export())
    assert (again.current, again.ended, again.since) == (views.current, views.ended, views.since)
    views.go_back((1, 4))
    again.restore(views.export())
    assert (again.current, again.absent()) == (View(0, ()), [1, 4])


def test_a_job_that_has_gone_back_awaits_those_that_were_members_and_begins_with_all_that_have_come() -> None:
    views = views_of(min_workers=2)
    views.go_back((1, 3, 9))  # there is no rank 9 any more
    assert not views.is_complete(6, 0)
    for rank, absent in ((5, [1, 3]), (3, [1]), (1, [])):
        views.joining.add(rank)
        assert views.absent() == absent
    assert views.begin(6) == []
    assert (views.current, views.since) == (View(1, (1, 3, 5)), {1: 6, 3: 6, 5: 6})


def test_it_awaits_any_ranks_if_all_that_were_members_are_too_few() -> None:
    views = views_of(min_workers=3)
    views.go_back((1, 2))
    views.joining |= {1, 2}
    assert views.absent() == [0, 3, 4, 5, 6, 7]


def test_ranks_that_do_not_come_back_are_gone_on_all_servers() -> None:
    views, other = views_of(), views_of()
    for one in (views, other):
        one.go_back((1, 2, 3))
    views.joining |= {0, 2}
    gone = views.begin(6)
    assert gone == other.adopt(views.current) == [1, 3]


@pytest.mark.parametrize(("capacity", "initial_workers", "min_workers"), [(4, 2, 3), (2, 3, 1), (3, 2, 0)])
def test_limits_that_contradict_each_other_are_refused(
    capacity: int, initial_workers: int, min_workers: int
) -> None:
    with pytest.raises(ConfigurationError):
        Views(capacity, initial_workers, min_workers)


def backup_views(initial_workers: int = 4, min_workers: int = 2, backup_workers: int = 1) -> Views:
    """Views after the first round, which takes all."""
    views = Views(8, initial_workers, min_workers, backup_workers)
    assert views.current == View(0, tuple(range(initial_workers)))
    views.end_round(1, True)
    return views


def test_rounds_after_the_first_one_leave_out_as_many_as_there_are_backup_workers() -> None:
    assert backup_views().current == View(1, (0, 1, 2, 3), 1)
    assert backup_views(backup_workers=2).current.counted == 2


def test_no_round_takes_fewer_than_must_be_left() -> None:
    assert backup_views(4, 3, 2).current.num_backup == 1
    assert backup_views(3, 3, 2).current.num_backup == 0


def test_a_closed_round_has_those_that_have_committed_it_and_the_next_one_has_all() -> None:
    views = backup_views()
    views.close(1, [3, 0, 2])
    assert views.current == View(2, (0, 2, 3), 0, 1)
    assert (views.late, views.members, views.left_out) == ({1}, {0, 1, 2, 3}, {1: 1})
    assert views.is_complete(1, 3)
    assert not views.is_complete(2, 3)
    assert views.end_round(2, True) == []
    assert (views.current, views.ended) == (View(3, (0, 1, 2, 3), 1), View(2, (0, 2, 3), 0, 1))
    assert not views.late


def test_a_round_of_which_it_is_not_known_who_counts_is_not_complete() -> None:
    views = backup_views()
    assert not any(views.is_complete(1, count) for count in range(5))


def test_commits_of_a_closed_round_count_under_its_view_and_the_one_before() -> None:
    views = backup_views()
    views.close(1, [0, 1, 2])
    assert [views.takes(0, number, 1) for number in range(4)] == [False, True, True, False]
    assert not views.takes(3, 1, 1)
    assert not views.takes(0, 2, 2)
    views.end_round(2, True)
    assert [views.has_counted(0, number) for number in range(4)] == [False, True, True, False]
    assert not views.has_counted(3, 1)


def test_another_server_keeps_commits_only_under_the_view_that_is_closed() -> None:
    views = backup_views()
    closed = View(2, (0, 1, 2), 0, 1)
    assert views.follows(closed)
    assert not views.follows(closed._replace(number=3))
    assert not views.follows(View(2, (0, 1, 2), 0))
    assert views.adopt(closed) == []
    assert (views.current, views.left_out) == (closed, {3: 1})


def test_after_a_closed_round_has_failed_all_are_members_of_the_next_one() -> None:
    views = backup_views()
    assert not views.reopen()
    views.close(1, [0, 1, 2])
    assert views.reopen()
    assert views.current == View(3, (0, 1, 2, 3), 1)


def test_a_rank_that_leaves_a_closed_round_is_gone_at_its_end() -> None:
    views = backup_views()
    views.close(1, [0, 1, 2])
    views.leaving.add(3)
    assert views.remove(committed=[0, 1, 2]) == []
    assert views.end_round(2, True) == [3]
    assert views.current == View(3, (0, 1, 2), 1)


@pytest.mark.parametrize("view", [View(2, (0, 1), 2), View(2, (0, 1), -1), View(2, (0, 1, 2), 1, 1)])
def test_a_view_that_leaves_out_what_it_cannot_is_refused(view: View) -> None:
    with pytest.raises(ProtocolError):
        backup_views().check(1, view)


def test_what_is_stored_of_a_closed_round_comes_back() -> None:
    views, again = backup_views(), Views(8, 4, 2, 1)
    views.end_round(2, True)
    views.close(2, [0, 1, 3])
    again.restore(views.export())
    assert vars(again) == vars(views)


@pytest.mark.parametrize("backup_workers", [-1, 4, 5])
def test_backup_workers_that_leave_none_are_refused(backup_workers: int) -> None:
    with pytest.raises(ConfigurationError):
        Views(8, 4, 2, backup_workers)
