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


@pytest.mark.parametrize(("capacity", "initial_workers", "min_workers"), [(4, 2, 3), (2, 3, 1), (3, 2, 0)])
def test_limits_that_contradict_each_other_are_refused(
    capacity: int, initial_workers: int, min_workers: int
) -> None:
    with pytest.raises(ConfigurationError):
        Views(capacity, initial_workers, min_workers)
