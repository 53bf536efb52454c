"""One process of a row-sparse step on MXNet 1.9.1: scheduler, server or worker, as DMLC_ROLE says.

Runs under the interpreter of the environment that `mxnet_env.sh` makes, which has numpy but no torch.
"""

from __future__ import annotations

import argparse
import importlib
from typing import Any

import numpy as np
from sparse_steps import LEARNING_RATE, PULL, Gradients, Table, run, worker_options


class RowSparse:
    """A weight of storage type row_sparse: `push` of a gradient and `row_sparse_pull` of the rows that it has."""

    def __init__(self, mx: Any, kv: Any, table: Table, optimizer: str) -> None:
        self._mx, self._kv, self._table, self._optimizer = mx, kv, table, optimizer
        kv.init(optimizer, mx.nd.array(table.first()).tostype("row_sparse"))
        if optimizer != PULL:
            kv.set_optimizer(mx.optimizer.create(optimizer, learning_rate=LEARNING_RATE))
        self._out = mx.nd.sparse.zeros("row_sparse", (table.rows, table.width))
        grads = Gradients(table, kv.rank)
        self._given = [self._gradient(*grads.of(number)) for number in range(table.warm_up + table.rounds)]

    def _gradient(self, ids: Any, values: Any) -> tuple[Any, Any]:
        """The gradient of a step, its rows distinct as a backward pass of MXNet leaves them, and their ids."""
        distinct, place = np.unique(ids, return_inverse=True)
        summed = np.zeros((len(distinct), self._table.width), np.float32)
        np.add.at(summed, place, values)
        shape = (self._table.rows, self._table.width)
        rows = self._mx.nd.sparse.row_sparse_array((summed, distinct), shape=shape)
        return rows, self._mx.nd.array(distinct, dtype="int64")

    def prepare(self, number: int) -> tuple[Any, Any]:
        return self._given[number]

    def step(self, given: tuple[Any, Any]) -> None:
        rows, ids = given
        if self._optimizer != PULL:
            self._kv.push(self._optimizer, rows)
        self._kv.row_sparse_pull(self._optimizer, out=self._out, row_ids=ids)
        self._mx.nd.waitall()

    def weights(self) -> Any:
        every = self._mx.nd.arange(self._table.rows, dtype="int64")
        self._kv.row_sparse_pull(self._optimizer, out=self._out, row_ids=every)
        return self._out.tostype("default").asnumpy()


def main() -> None:
    """Measure all cases."""
    options = worker_options(argparse.ArgumentParser(description=__doc__)).parse_args()
    # For a scheduler or a server this import serves the job and ends the process.
    mx = importlib.import_module("mxnet")
    kv = mx.kv.create("dist_sync")

    def begin(table: Table, optimizer: str) -> tuple[Any, Any, Any]:
        made = RowSparse(mx, kv, table, optimizer)
        return made.prepare, made.step, made.weights

    run(begin, kv.rank, kv._barrier, options)


if __name__ == "__main__":
    main()
