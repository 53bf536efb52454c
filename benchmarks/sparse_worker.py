"""One worker of the row-sparse round, on any of the systems; started by `sparse_round.py`."""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

import kvtrainer

WORKERS = 2
LEARNING_RATE = 0.5
CLASSES: dict[str, type[torch.optim.Optimizer]] = {"sgd": torch.optim.SGD, "adagrad": torch.optim.Adagrad}
_BATCHES = 4
"""Different gradients, which take turns."""


@dataclass(frozen=True)
class Workload:
    """A table of float32, and how many of its rows have a gradient on each worker in a round."""

    name: str
    rows: int
    width: int
    touched: int
    warm_up: int = 3
    rounds: int = 16

    def gradient(self, rank: int, number: int) -> Tensor:
        """Whole numbers in distinct rows that are not in order, as a backward pass leaves them."""
        gen = torch.Generator().manual_seed(rank * _BATCHES + number % _BATCHES)
        ids = torch.randperm(self.rows, generator=gen)[: self.touched]
        values = torch.randint(-8, 9, (self.touched, self.width), generator=gen).float()
        return torch.sparse_coo_tensor(ids[None], values, (self.rows, self.width), check_invariants=False)


WORKLOADS = (
    Workload("16 MiB, 4,300 of 262,144 rows of 16 floats", 1 << 18, 16, 4_300),
    Workload("16 MiB, 13,000 of 262,144 rows of 16 floats", 1 << 18, 16, 13_000),
    Workload("16 MiB, 32,768 of 65,536 rows of 64 floats", 1 << 16, 64, 1 << 15),
    Workload("128 MiB, 8,192 of 524,288 rows of 64 floats", 1 << 19, 64, 8_192, rounds=8),
)

Step = Callable[[Parameter], None]
Start = Callable[[Parameter, str], tuple[int, Step, Callable[[], None]]]
"""Gives the rank, one round with the gradient that the parameter has, and a barrier."""


def start_kvtrainer(table: Parameter, optimizer: str) -> tuple[int, Step, Callable[[], None]]:
    store = kvtrainer.kvstore.create("dist_sync")
    assert isinstance(store, kvtrainer.kvstore.DistKVStore)
    trainer = kvtrainer.Trainer([table], CLASSES[optimizer], {"lr": LEARNING_RATE}, kvstore=store)
    return store.rank, lambda _: trainer.step(1), store.barrier


def start_gloo(table: Parameter, optimizer: str) -> tuple[int, Step, Callable[[], None]]:
    """What DistributedDataParallel does with a dense gradient, without its hooks; every rank updates."""
    dist.init_process_group("gloo")
    updater = CLASSES[optimizer]([table], lr=LEARNING_RATE)  # type: ignore[call-arg]

    def step(parameter: Parameter) -> None:
        assert parameter.grad is not None
        dist.all_reduce(parameter.grad)
        updater.step()

    return dist.get_rank(), step, dist.barrier


def start_alone(table: Parameter, optimizer: str) -> tuple[int, Step, Callable[[], None]]:
    updater = CLASSES[optimizer]([table], lr=LEARNING_RATE)  # type: ignore[call-arg]
    return 0, lambda _: updater.step(), lambda: None


SYSTEMS: dict[str, tuple[Start, bool, int]] = {
    "kvtrainer": (start_kvtrainer, True, 1),
    "kvtrainer dense": (start_kvtrainer, False, 1),
    "gloo dense": (start_gloo, False, 1),
    "1 process": (start_alone, True, WORKERS),
}
"""How to begin; whether gradients are sparse; of how many workers each process has them."""


def main() -> None:
    """Measure one workload; rank 0 checks the weights and writes the seconds of every round."""
    options = _options()
    torch.set_num_threads(1)
    torch.sparse.check_sparse_tensor_invariants.disable()
    workload = WORKLOADS[options.workload]
    start, is_sparse, share = SYSTEMS[options.system]
    table = Parameter(torch.zeros(workload.rows, workload.width))
    rank, step, barrier = start(table, options.optimizer)
    ranks = range(rank * share, (rank + 1) * share)
    grads = [_sum_of(workload, list(ranks), number) for number in range(_BATCHES)]
    seconds = []
    for number in range(workload.warm_up + workload.rounds):
        grad = grads[number % _BATCHES]
        table.grad = grad.clone() if is_sparse else grad.to_dense()
        barrier()
        began = time.perf_counter()
        step(table)
        if number >= workload.warm_up:
            seconds.append(time.perf_counter() - began)
    if rank == 0:
        _check(workload, options.optimizer, table.detach())
        measured = {workload.name: {"rounds": seconds, "median": statistics.median(seconds)}}
        Path(options.out).write_text(json.dumps(measured))
    barrier()
    if dist.is_initialized():
        dist.destroy_process_group()


def _sum_of(workload: Workload, ranks: list[int], number: int) -> Tensor:
    """The gradient of some workers together, not coalesced."""
    parts = [workload.gradient(rank, number) for rank in ranks]
    ids, values = torch.cat([p._indices() for p in parts], 1), torch.cat([p._values() for p in parts])
    return torch.sparse_coo_tensor(ids, values, parts[0].shape, check_invariants=False)


def _check(workload: Workload, optimizer: str, found: Tensor) -> None:
    expected = Parameter(torch.zeros(workload.rows, workload.width))
    updater = CLASSES[optimizer]([expected], lr=LEARNING_RATE)  # type: ignore[call-arg]
    for number in range(workload.warm_up + workload.rounds):
        expected.grad = _sum_of(workload, list(range(WORKERS)), number)
        updater.step()
    torch.testing.assert_close(found, expected.detach(), rtol=1e-5, atol=1e-5)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--system", choices=SYSTEMS, required=True)
    parser.add_argument("--workload", type=int, required=True, help="position in WORKLOADS")
    parser.add_argument("--optimizer", choices=CLASSES, required=True)
    parser.add_argument("--out", required=True, help="file for the seconds measured by rank 0")
    return parser.parse_args()


if __name__ == "__main__":
    main()
