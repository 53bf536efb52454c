"""A table and the gradients of some of its rows, the same for every system; needs numpy alone."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray
from steps import Array, Zipf

LEARNING_RATE = 2.0**-6
PULL = "pull"
"""Stands where an optimizer stands, where rows are only read."""
BATCHES = 4
"""Different gradients, which take turns."""


@dataclass(frozen=True)
class Table:
    """A table of float32, and how many ids each worker has in a step."""

    rows: int
    width: int
    ids: int
    warm_up: int = 4
    rounds: int = 20

    @property
    def name(self) -> str:
        size = self.rows * self.width * 4 / 2**20
        return f"{size:,.0f} MiB: {self.rows:,} x {self.width}, {self.ids:,} ids"

    def first(self) -> Array:
        """The values to begin with."""
        drawn: Any = np.random.default_rng(7).integers(-512, 512, (self.rows, self.width), dtype=np.int16)
        result: Array = drawn.astype(np.float32) / np.float32(1024)
        return result


@lru_cache(maxsize=1)
def _popular(rows: int) -> Zipf:
    return Zipf(rows)


def gradient(table: Table, rank: int, number: int) -> tuple[NDArray[np.int64], Array]:
    """Ids by Zipf's law, some of them again and again, and values of few bits, whose sum is exact in every order."""
    drawn = np.random.default_rng(rank * BATCHES + number % BATCHES)
    ids = _popular(table.rows).draw(drawn, table.ids)
    values: Any = drawn.integers(-8, 9, (table.ids, table.width), dtype=np.int16)
    return ids, values.astype(np.float32)
