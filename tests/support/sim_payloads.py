"""What processes of the simulation contribute: values that depend on nothing but who gives them, and when."""

from __future__ import annotations

import numpy as np

from kvstore_server.plan import Plan
from tests.support.sim_compression import Array

ROWS = 4
"""Rows of a slice that takes rows, each of as many elements."""

_POOL_SIZE = 1 << 14


def _make_pools() -> tuple[Array, Array]:
    rng = np.random.default_rng(20240)
    magnitude = np.exp2(rng.integers(-12, 13, _POOL_SIZE)).astype(np.float32)
    pool: Array = rng.standard_normal(_POOL_SIZE).astype(np.float32) * magnitude
    return pool, rng.integers(-8, 9, _POOL_SIZE).astype(np.float32)


POOL, INTEGERS = _make_pools()
"""Values of very different magnitude: their sum in another order has other bits. And some whose sums are exact."""


def _mixed(process: int, table: int, round_: int, slice_: int, generation: int) -> int:
    return process * 7919 + table * 104729 + round_ * 611953 + slice_ * 15485863 + generation * 32452843


def payload_at(process: int, table: int, round_: int, slice_: int, generation: int, numel: int) -> slice:
    """The part of a pool that is the payload of this identity; different identities give different values."""
    start = _mixed(process, table, round_, slice_, generation) % (_POOL_SIZE - numel)
    return slice(start, start + numel)


def rows_at(process: int, table: int, round_: int, slice_: int, generation: int) -> tuple[int, ...] | None:
    """The rows that this identity has of a slice that takes rows, often none; None: it gives all of the slice."""
    mixed = (_mixed(process, table, round_, slice_, generation) * 2654435761 % (1 << 32)) >> 8
    if not mixed % 8:
        return None
    chosen = mixed // 8 % 20  # none of the rows more often than any other choice
    return tuple(row for row in range(ROWS) if chosen & (1 << row) and chosen < 1 << ROWS)


def row_slices(plan: Plan) -> frozenset[int]:
    """The slices of a table that may be given by rows: those of a key of two dimensions."""
    return frozenset(
        piece.index
        for piece in plan.slices
        if piece.used == ROWS * ROWS and all(len(plan.specs[s.key].shape) == 2 for s in piece.segments)
    )


def only_rows(values: Array, rows: tuple[int, ...] | None) -> Array:
    """What a contribution by rows means: zeros elsewhere."""
    if rows is None:
        return values
    part = np.zeros_like(values)
    part.reshape(ROWS, -1)[list(rows)] = values.reshape(ROWS, -1)[list(rows)]
    return part
