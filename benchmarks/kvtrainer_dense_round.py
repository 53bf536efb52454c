"""One worker of the dense round on kvtrainer; started by `dense_round.py` through kvlaunch."""

from __future__ import annotations

import argparse

import torch
from workloads import Array, needs_trainer, run_worker, worker_options

import kvtrainer


class KvtrainerStore:
    """The `Store` of `workloads.py` over `dist_sync`."""

    def __init__(self) -> None:
        store = kvtrainer.kvstore.create("dist_sync")
        assert isinstance(store, kvtrainer.kvstore.DistKVStore)
        self._kv = store
        self.rank = store.rank
        self.num_workers = store.num_workers
        self._keys: list[int] = []
        self._values: list[torch.Tensor] = []
        self._outs: list[torch.Tensor] = []

    def set_sgd(self, learning_rate: float) -> None:
        self._kv.set_optimizer(kvtrainer.optimizer.create("sgd", learning_rate=learning_rate))

    def init(self, keys: list[int], floats: int) -> None:
        self._keys = keys
        self._values = [torch.zeros(floats) for _ in keys]
        self._outs = [torch.zeros(floats) for _ in keys]
        self._kv.init(keys, self._outs)

    def write(self, values: list[Array]) -> None:
        for mine, value in zip(self._values, values, strict=True):
            mine.copy_(torch.from_numpy(value))

    def round(self) -> None:
        self._kv.pushpull(self._keys, self._values, out=self._outs)

    def result(self, at: int) -> Array:
        result: Array = self._outs[at].numpy()
        return result

    def barrier(self) -> None:
        self._kv.barrier()


class KvtrainerTrainer:
    """The `Store` of `workloads.py` over a Trainer whose optimizer runs on the servers."""

    def __init__(self) -> None:
        store = kvtrainer.kvstore.create("dist_sync")
        assert isinstance(store, kvtrainer.kvstore.DistKVStore)
        self._kv = store
        self.rank = store.rank
        self.num_workers = store.num_workers
        self._options: dict[str, float] = {}
        self._params: list[torch.nn.Parameter] = []
        self._trainer: kvtrainer.Trainer | None = None

    def set_sgd(self, learning_rate: float) -> None:
        self._options = {"learning_rate": learning_rate}

    def init(self, keys: list[int], floats: int) -> None:
        self._params = [torch.nn.Parameter(torch.zeros(floats)) for _ in keys]
        self._trainer = kvtrainer.Trainer(self._params, "sgd", self._options, kvstore=self._kv)

    def write(self, values: list[Array]) -> None:
        for parameter, value in zip(self._params, values, strict=True):
            parameter.grad = torch.tensor(value)

    def round(self) -> None:
        assert self._trainer is not None
        self._trainer.step(1)

    def result(self, at: int) -> Array:
        result: Array = self._params[at].detach().numpy()
        return result

    def barrier(self) -> None:
        self._kv.barrier()


if __name__ == "__main__":
    options = worker_options(argparse.ArgumentParser(description=__doc__)).parse_args()
    torch.set_num_threads(1)
    run_worker(KvtrainerTrainer() if needs_trainer(options.workloads) else KvtrainerStore(), options)
