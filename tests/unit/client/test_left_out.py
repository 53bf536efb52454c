"""When a worker that was left out of a round knows where the others are."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvstore_server.protocol import messages as m
from kvtrainer.client.contribution import Contribution
from kvtrainer.client.round import Round


def late_round(*told: tuple[int, int]) -> Round:
    """A round of rank 1, about which the first of two servers have told (open round, last applied one)."""
    session: Any = SimpleNamespace(clock=lambda: 0.0)
    round_ = Round(Contribution([], None, None), session)
    round_.coordinator, round_.server_requests = 0, [SimpleNamespace()] * 2  # type: ignore[list-item]
    for server, (opened, applied) in enumerate(told):
        round_.left_out[server] = m.LeftOut(0, opened, applied, False, (), (0, 1), 5, 1)
    return round_


def test_a_worker_goes_on_where_all_servers_have_the_same_round_open() -> None:
    assert late_round((7, 6), (7, 6)).has_caught_up(1)


def test_a_worker_that_the_open_round_leaves_out_asks_what_there_is_after_it() -> None:
    round_ = late_round((7, 6), (7, 6))
    assert not round_.has_caught_up(2)
    assert round_.next_asked() == (7, False)


@pytest.mark.parametrize(
    ("told", "asked"),
    [
        ([(7, 6)], (6, False)),
        ([(7, 6), (8, 7)], (7, False)),
        ([(8, 7), (7, 6)], (7, False)),
        ([(7, 6), (7, 5)], (6, True)),
        ([(7, 6), (8, 6)], (7, True)),
    ],
)
def test_a_worker_asks_again_until_servers_agree_and_has_undone_what_one_has_failed(
    told: list[tuple[int, int]], asked: tuple[int, bool]
) -> None:
    round_ = late_round(*told)
    assert not round_.has_caught_up(1)
    assert round_.next_asked() == asked
