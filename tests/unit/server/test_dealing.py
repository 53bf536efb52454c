"""Rows of a table in a store are interleaved over its slices, so that no server has most of the popular ones."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest

from kvstore_server.plan import Deal, Plan, TensorSpec, make_plan

SHAPES = ((1_000_000, 64), (1_000_000, 16), (100_000, 16), (10_000, 16), (6_000, 33), (3_000_000, 8))


def plan_of(*shapes: tuple[int, ...], servers: int, row_sparse: bool = True, **options: Any) -> Plan:
    specs = [TensorSpec(f"t{i}", shape, "float32", 0, row_sparse) for i, shape in enumerate(shapes)]
    return make_plan(specs, servers, **options)


@functools.cache
def popular(rows: int, exponent: float, draws: int) -> np.ndarray:
    """The distinct ids of a batch that is drawn by Zipf's law."""
    sums = np.cumsum(np.arange(1.0, rows + 1) ** -exponent)
    return np.unique(np.searchsorted(sums, np.random.default_rng(draws).random(draws) * sums[-1]))


@pytest.mark.parametrize("servers", [2, 3, 4])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_no_server_has_more_than_its_share_of_popular_rows_and_a_fifth(
    shape: tuple[int, int], servers: int
) -> None:
    places = plan_of(shape, servers=servers).rows(0)
    for exponent in (1.05, 1.2):
        for draws in (2_000, 8_192):
            ids = popular(shape[0], exponent, draws)
            most = max(len(own) for _, _, own in places.by_server(ids))
            assert most <= 1.2 * len(ids) / servers


@pytest.mark.parametrize("deal", [Deal(1, 7), Deal(0, 0), Deal(3, 4), Deal(4, 3), Deal(2, 1)], ids=str)
def test_every_row_lies_in_a_place_of_its_own_and_is_found_there(deal: Deal) -> None:
    rows = np.arange(20)
    places = deal.places(rows)
    assert sorted(places.tolist()) == rows.tolist()
    assert deal.rows(places).tolist() == rows.tolist()
    numbers, order = deal.in_order(rows[::2])
    assert numbers.tolist() == sorted(places[::2].tolist())
    assert deal.places(rows[::2][order]).tolist() == numbers.tolist()


def test_rows_go_to_slices_in_turn_and_the_last_ones_to_a_short_slice() -> None:
    places = Deal(3, 4).places(np.arange(14))
    assert (places // 4).tolist() == [0, 1, 2] * 4 + [3, 3]
    assert places[[0, 3, 6, 9]].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("options", [{"row_sparse": False}, {"whole_keys": True}], ids=str)
def test_what_workers_hold_too_and_keys_that_stay_whole_are_not_dealt(options: dict[str, Any]) -> None:
    ids = np.arange(0, 9_000, 7)
    places = plan_of((9_001, 16), servers=1, **options).rows(0)
    [(_, which, own)] = places.by_server(ids)
    assert (ids[which] == ids).all()
    assert (own == ids).all()
