"""One worker of the dense round on kvtrainer; started by `dense_round.py` through kvlaunch."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

import kvtrainer

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.workloads import Array, run_worker, worker_options  # noqa: E402


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

    def init(self, keys: list[int], values: list[Array]) -> None:
        self._keys = keys
        self._values = [torch.from_numpy(value) for value in values]
        self._outs = [torch.zeros_like(value) for value in self._values]
        self._kv.init(keys, self._outs)

    def round(self) -> None:
        self._kv.pushpull(self._keys, self._values, out=self._outs)

    def result(self, at: int) -> Array:
        result: Array = self._outs[at].numpy()
        return result

    def barrier(self) -> None:
        self._kv.barrier()


if __name__ == "__main__":
    options = worker_options(argparse.ArgumentParser(description=__doc__)).parse_args()
    torch.set_num_threads(1)
    run_worker(KvtrainerStore(), options)
