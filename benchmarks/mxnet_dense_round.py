"""One process of the dense round on MXNet 1.9.1: scheduler, server or worker, as DMLC_ROLE says.

Runs under the interpreter of the environment that `mxnet_env.sh` makes, which has numpy but no torch.
"""

from __future__ import annotations

import argparse
import importlib
from typing import Any

from workloads import Array, run_worker, worker_options


class MXNetStore:
    """The `Store` of `workloads.py` over MXNet's `dist_sync`."""

    def __init__(self, mx: Any) -> None:
        self._mx = mx
        self._kv = mx.kv.create("dist_sync")
        self.rank: int = self._kv.rank
        self.num_workers: int = self._kv.num_workers
        self._keys: list[int] = []
        self._values: list[Any] = []
        self._outs: list[Any] = []

    def set_sgd(self, learning_rate: float) -> None:
        self._kv.set_optimizer(self._mx.optimizer.create("sgd", learning_rate=learning_rate))

    def init(self, keys: list[int], floats: int) -> None:
        self._keys = keys
        self._values = [self._mx.nd.zeros((floats,)) for _ in keys]
        self._outs = [self._mx.nd.zeros((floats,)) for _ in keys]
        self._kv.init(keys, self._outs)

    def write(self, values: list[Array]) -> None:
        for mine, value in zip(self._values, values):  # noqa: B905 - Python 3.8 and 3.9 know no strict=
            mine[:] = value
        self._mx.nd.waitall()

    def round(self) -> None:
        self._kv.pushpull(self._keys, self._values, out=self._outs)
        self._mx.nd.waitall()

    def result(self, at: int) -> Array:
        result: Array = self._outs[at].asnumpy()
        return result

    def barrier(self) -> None:
        self._kv._barrier()


if __name__ == "__main__":
    options = worker_options(argparse.ArgumentParser(description=__doc__)).parse_args()
    # For a scheduler or a server this import serves the job and ends the process.
    run_worker(MXNetStore(importlib.import_module("mxnet")), options)
