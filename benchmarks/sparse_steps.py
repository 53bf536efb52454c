"""A table and the gradients of some of its rows, the same for every system; needs numpy alone."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from steps import Array, Zipf, mark_base, time_rounds

LEARNING_RATE = 2.0**-6
PULL = "pull"
"""Stands where an optimizer stands, where rows are only read."""


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


class Gradients:
    """The gradients of one rank: ids by Zipf's law, some of them again and again, others in each round; and values.

    Values are of few bits, so their sum is exact in every order. Each round looks at another place of one random
    array, as in `steps.py`.
    """

    def __init__(self, table: Table, rank: int) -> None:
        drawn, count = np.random.default_rng(rank), table.warm_up + table.rounds
        self._ids = [_popular(table.rows).draw(drawn, table.ids) for _ in range(count)]
        values: Any = drawn.integers(-8, 9, (table.ids + count, table.width), dtype=np.int16)
        self._values: Array = values.astype(np.float32)

    def of(self, number: int) -> tuple[NDArray[np.int64], Array]:
        """The ids of a round, and a row of values for each; not to be changed."""
        ids = self._ids[number]
        return ids, self._values[number : number + len(ids)]


def run(begin: Callable[[Table, str], Any], rank: int, barrier: Callable[[], object], options: Any) -> None:
    """Measure all cases of `options`; rank 0 writes the seconds of every step, and weights to WEIGHTS.CASE.npy.

    `begin` makes a table and what updates it by the named optimizer: a function that prepares the gradient of a round,
    one that takes a step with that, and one that returns all weights.
    """
    table, measured = Table(**json.loads(options.table)), {}
    for at, optimizer in enumerate(options.optimizers.split(",")):
        marks = "" if rank else f"{options.out}.{at}"
        mark_base(marks, barrier)
        prepare, step, weights = begin(table, optimizer)
        measured[optimizer] = time_rounds(prepare, step, barrier, table.warm_up, table.rounds, marks)
        if not rank:
            np.save(f"{options.weights}.{optimizer}.npy", weights())
        prepare = step = weights = None  # what follows has their memory
        barrier()
    if not rank:
        Path(options.out).write_text(json.dumps(measured))
    barrier()


def worker_options(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add what every worker script takes."""
    parser.add_argument("--table", required=True, help="JSON of the fields of Table")
    parser.add_argument("--optimizers", required=True, help="commas between them")
    parser.add_argument("--workers", type=int, required=True)
    parser.add_argument("--out", required=True, help="file for the seconds measured by rank 0")
    parser.add_argument("--weights", required=True, help="stem of the files for the weights of rank 0")
    return parser
