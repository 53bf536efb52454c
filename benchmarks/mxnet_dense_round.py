"""One process of the dense round on MXNet 1.9.1: scheduler, server or worker, as DMLC_ROLE says.

Runs under the interpreter of the environment that `mxnet_env.sh` makes, which has numpy but no torch.
"""

from __future__ import annotations

import argparse
import importlib
from typing import Any

from workloads import Array, needs_trainer, run_worker, worker_options


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


class MXNetTrainer:
    """The `Store` of `workloads.py` over a Gluon Trainer whose optimizer runs on the servers."""

    def __init__(self, mx: Any) -> None:
        self._mx = mx
        self._kv = mx.kv.create("dist_sync")
        self.rank: int = self._kv.rank
        self.num_workers: int = self._kv.num_workers
        self._options: dict[str, float] = {}
        self._params: list[Any] = []
        self._trainer: Any = None

    def set_sgd(self, learning_rate: float) -> None:
        self._options = {"learning_rate": learning_rate}

    def init(self, keys: list[int], floats: int) -> None:
        gluon = self._mx.gluon
        self._params = [gluon.Parameter(f"p{key}", shape=(floats,), init="zeros") for key in keys]
        for parameter in self._params:
            parameter.initialize()
        self._trainer = gluon.Trainer(
            self._params, "sgd", self._options, kvstore=self._kv, update_on_kvstore=True
        )

    def write(self, values: list[Array]) -> None:
        for parameter, value in zip(self._params, values):  # noqa: B905 - Python 3.8 and 3.9 know no strict=
            parameter.grad()[:] = value
        self._mx.nd.waitall()

    def round(self) -> None:
        # Gradients that no backward pass wrote count as stale.
        self._trainer.step(1, ignore_stale_grad=True)
        self._mx.nd.waitall()

    def result(self, at: int) -> Array:
        result: Array = self._params[at].data().asnumpy()
        return result

    def barrier(self) -> None:
        self._kv._barrier()


if __name__ == "__main__":
    options = worker_options(argparse.ArgumentParser(description=__doc__)).parse_args()
    # For a scheduler or a server this import serves the job and ends the process.
    mxnet = importlib.import_module("mxnet")
    run_worker(MXNetTrainer(mxnet) if needs_trainer(options.workloads) else MXNetStore(mxnet), options)
