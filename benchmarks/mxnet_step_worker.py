"""One process of a measured step on MXNet 1.9.1: scheduler, server or worker, as DMLC_ROLE says.

Runs under the interpreter of the environment that `mxnet_env.sh` makes, which has numpy but no torch.
"""

from __future__ import annotations

import argparse
import importlib
from typing import Any

import numpy as np
from steps import LEARNING_RATE, Array, Work, run, worker_options


class MXNetStep:
    """The `Store` of `steps.py` over a Gluon Trainer with `dist_sync` and `update_on_kvstore=True`."""

    is_continuous = False

    def __init__(self, mx: Any) -> None:
        self._mx = mx
        self._kv = mx.kv.create("dist_sync")
        self.rank: int = self._kv.rank
        self._parameters: list[Any] = []
        self._trainer: Any = None
        self._loss: Any = None

    def begin(self, work: Work) -> None:
        gluon = self._mx.gluon
        self._parameters = [
            gluon.Parameter(f"p{key}", shape=(work.floats,), init="zeros") for key in range(work.keys)
        ]
        for parameter in self._parameters:
            parameter.initialize()
        rate = {"learning_rate": LEARNING_RATE[work.optimizer]}
        self._trainer = gluon.Trainer(
            self._parameters, work.optimizer, rate, kvstore=self._kv, update_on_kvstore=True
        )

    def end(self) -> None:
        self._parameters, self._trainer, self._loss = [], None, None

    def assign(self, grads: list[Array]) -> None:
        for parameter, grad in zip(self._parameters, grads):  # noqa: B905 - Python 3.8, 3.9 know no strict=
            parameter.grad()[:] = grad
        self._mx.nd.waitall()

    def forward(self, grads: list[Array]) -> None:
        values = [self._mx.nd.array(grad) for grad in grads]
        with self._mx.autograd.record():
            pairs = zip(self._parameters, values)  # noqa: B905
            self._loss = self._mx.nd.add_n(*[self._mx.nd.dot(p.data(), value) for p, value in pairs])
        self._mx.nd.waitall()

    def backward(self) -> None:
        self._loss.backward()

    def step(self) -> None:
        # Gradients that no backward pass wrote count as stale.
        self._trainer.step(self._kv.num_workers, ignore_stale_grad=True)
        self._mx.nd.waitall()

    def weights(self) -> Array:
        result: Array = np.concatenate([parameter.data().asnumpy() for parameter in self._parameters])
        return result

    def barrier(self) -> None:
        self._kv._barrier()


if __name__ == "__main__":
    options = worker_options(argparse.ArgumentParser(description=__doc__)).parse_args()
    # For a scheduler or a server this import serves the job and ends the process.
    run(MXNetStep(importlib.import_module("mxnet")), options)
