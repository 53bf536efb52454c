"""One process of a row-sparse step on MXNet 1.9.1: scheduler, server or worker, as DMLC_ROLE says.

Runs under the interpreter of the environment that `mxnet_env.sh` makes, which has numpy but no torch.
"""

from __future__ import annotations

import argparse
import importlib
import json
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
from sparse_steps import BATCHES, LEARNING_RATE, PULL, Table, gradient
from steps import mark


class RowSparse:
    """A weight of storage type row_sparse: `push` of a gradient and `row_sparse_pull` of the rows that it has."""

    def __init__(self, mx: Any, table: Table, optimizer: str, base: str) -> None:
        self._mx, self._table, self._optimizer = mx, table, optimizer
        self._kv = mx.kv.create("dist_sync")
        self.rank: int = self._kv.rank
        if not self.rank:
            mark(base)
        self._kv.init("table", mx.nd.array(table.first()).tostype("row_sparse"))
        if optimizer != PULL:
            self._kv.set_optimizer(mx.optimizer.create(optimizer, learning_rate=LEARNING_RATE))
        self._out = mx.nd.sparse.zeros("row_sparse", (table.rows, table.width))

    def given(self, number: int) -> tuple[Any, Any]:
        """The gradient of a step, its rows distinct as a backward pass of MXNet leaves them, and their ids."""
        ids, values = gradient(self._table, self.rank, number)
        distinct, place = np.unique(ids, return_inverse=True)
        summed = np.zeros((len(distinct), self._table.width), np.float32)
        np.add.at(summed, place, values)
        shape = (self._table.rows, self._table.width)
        rows = self._mx.nd.sparse.row_sparse_array((summed, distinct), shape=shape)
        return rows, self._mx.nd.array(distinct, dtype="int64")

    def step(self, rows: Any, ids: Any) -> None:
        if self._optimizer != PULL:
            self._kv.push("table", rows)
        self._kv.row_sparse_pull("table", out=self._out, row_ids=ids)
        self._mx.nd.waitall()

    def weights(self) -> Any:
        every = self._mx.nd.arange(self._table.rows, dtype="int64")
        self._kv.row_sparse_pull("table", out=self._out, row_ids=every)
        return self._out.tostype("default").asnumpy()

    def barrier(self) -> None:
        self._kv._barrier()


def main() -> None:
    """Measure one case; rank 0 writes the seconds of every step, and the weights."""
    options = _options()
    table = Table(**json.loads(options.table))
    # For a scheduler or a server this import serves the job and ends the process.
    store = RowSparse(importlib.import_module("mxnet"), table, options.optimizer, f"{options.out}.0.base")
    given = [store.given(number) for number in range(BATCHES)]
    seconds = []
    for number in range(table.warm_up + table.rounds):
        if number == table.warm_up and not store.rank:
            mark(f"{options.out}.0.begin")
        store.barrier()
        began = time.perf_counter()
        store.step(*given[number % BATCHES])
        if number >= table.warm_up:
            seconds.append(time.perf_counter() - began)
    store.barrier()
    if not store.rank:
        mark(f"{options.out}.0.end")
        np.save(options.weights, store.weights())
        measured = {"rounds": seconds, "median": statistics.median(seconds)}
        Path(options.out).write_text(json.dumps({options.optimizer: measured}))
    store.barrier()


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--table", required=True, help="JSON of the fields of Table")
    parser.add_argument("--optimizer", required=True)
    parser.add_argument("--workers", type=int, required=True)
    parser.add_argument("--out", required=True, help="file for the seconds measured by rank 0")
    parser.add_argument("--weights", required=True, help="file for the weights of rank 0")
    return parser.parse_args()


if __name__ == "__main__":
    main()
