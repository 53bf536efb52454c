"""One worker that learns which advertisements are clicked on, on any of the systems; started by `ctr.py`."""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from step_worker import import_what_steps_need
from steps import Zipf, mark_base, time_rounds
from torch import Tensor, nn

ROWS, WIDTH, DENSE, HIDDEN = (1_000_000, 250_000, 50_000), 16, 13, 64
CLASSES: dict[str, Any] = {"sgd": torch.optim.SGD, "adagrad": torch.optim.Adagrad}
OPTIONS = {"sgd": {"lr": 0.05}, "adagrad": {"lr": 0.05, "initial_accumulator_value": 0.01}}
"""The accumulator keeps the first steps from being the sign of a gradient, which rounding may change."""
WARM_UP, BATCHES = 10, 16

Batch = tuple[list[Tensor], Tensor, Tensor]
"""Ids of each table, other features, and whether there was a click."""


class Clicks(nn.Module):
    """Three tables of embeddings, and two layers over their rows and the other features.

    Args:
        stored: Makes a table that lives on the servers alone; None: each worker has all of it.
    """

    def __init__(self, stored: Callable[[Tensor], Any] | None = None) -> None:
        super().__init__()
        gen = torch.Generator().manual_seed(1)
        tables = [torch.empty(rows, WIDTH).normal_(0, 0.1, generator=gen) for rows in ROWS]
        if stored is None:
            self.tables = nn.ModuleList([nn.Embedding(*t.shape, sparse=True, _weight=t) for t in tables])
            self.look_up: list[Callable[[Tensor], Tensor]] = list(self.tables)
        else:
            self.stored = nn.ParameterList([stored(table) for table in tables])
            self.look_up = [one.row_sparse_data for one in self.stored]
        self.hidden, self.out = nn.Linear(len(ROWS) * WIDTH + DENSE, HIDDEN), nn.Linear(HIDDEN, 1)
        with torch.no_grad():
            for parameter in (*self.hidden.parameters(), *self.out.parameters()):
                parameter.copy_(torch.empty(parameter.shape).uniform_(-0.1, 0.1, generator=gen))

    def forward(self, ids: Sequence[Tensor], dense: Tensor) -> Tensor:
        found = [look_up(own) for look_up, own in zip(self.look_up, ids, strict=True)]
        return self.out(torch.relu(self.hidden(torch.cat([*found, dense], 1)))).view(-1)


def batches(rank: int, size: int) -> list[Batch]:
    """The batches of a rank, which take turns; popular ids are much more frequent (Zipf's law)."""
    drawn, popular = np.random.default_rng(rank), [Zipf(rows) for rows in ROWS]
    found = []
    for _ in range(BATCHES):
        ids = [torch.from_numpy(one.draw(drawn, size)) for one in popular]
        dense = torch.from_numpy(drawn.standard_normal((size, DENSE), np.float32))
        found.append((ids, dense, torch.from_numpy((drawn.random(size) < 0.3).astype(np.float32))))
    return found


@dataclass(frozen=True)
class Training:
    """A worker's network as its loop calls it, and what the loop does around it."""

    network: nn.Module
    zero_grad: Callable[[], object]
    step: Callable[[], object]
    fetch: Callable[[Sequence[Tensor]], object] = lambda ids: None
    """Told the ids of the next batch before a step."""


@dataclass(frozen=True)
class Group:
    """How a worker is connected before it has a network."""

    rank: int = 0
    barrier: Callable[[], object] = lambda: None
    store: Any = None
    """Of kvtrainer."""


def join_store() -> Group:
    """Connect with the servers of kvtrainer."""
    store = importlib.import_module("kvtrainer").kvstore.create("dist_sync")
    return Group(store.rank, store.barrier, store)


def join_ranks() -> Group:
    """Connect with the other ranks by gloo."""
    dist.init_process_group("gloo")
    return Group(dist.get_rank(), dist.barrier)


def start_kvtrainer(optimizer: str, group: Group) -> Training:
    """`Trainer.step` over `dist_sync`; each worker has the tables, and rows travel."""
    return _start_trainer(Clicks(), optimizer, group)


def start_stored(optimizer: str, group: Group, prefetches: bool = False) -> Training:
    """The same; the tables are on the servers alone."""
    kvtrainer = importlib.import_module("kvtrainer")
    network = Clicks(lambda table: kvtrainer.RowSparseParameter(table.shape, table))
    return _start_trainer(network, optimizer, group, prefetches)


def _start_trainer(network: Clicks, optimizer: str, group: Group, prefetches: bool = False) -> Training:
    kvtrainer = importlib.import_module("kvtrainer")
    trainer = kvtrainer.Trainer(network, CLASSES[optimizer], OPTIONS[optimizer], kvstore=group.store)
    step = functools.partial(trainer.step, group.store.num_workers)
    if not prefetches:
        return Training(network, trainer.zero_grad, step)

    def fetch(ids: Sequence[Tensor]) -> None:
        trainer.prefetch(dict(zip(network.stored, ids, strict=True)))

    return Training(network, trainer.zero_grad, step, fetch)


def start_ddp(optimizer: str, group: Group) -> Training:
    """DistributedDataParallel over gloo, which all-reduces the rows; torch's optimizer on every rank."""
    alone = start_torch(optimizer, group)
    wrapped = nn.parallel.DistributedDataParallel(
        alone.network, gradient_as_bucket_view=True, static_graph=True
    )
    return replace(alone, network=wrapped)


def start_torch(optimizer: str, group: Group) -> Training:
    """A process that sends nothing: one that has the batches of all workers, or as many as there are workers."""
    network = Clicks()
    updater = CLASSES[optimizer](network.parameters(), **OPTIONS[optimizer])
    return Training(network, updater.zero_grad, updater.step)


START: dict[str, tuple[Callable[[], Group], Callable[[str, Group], Training]]] = {
    "kvtrainer": (join_store, start_kvtrainer),
    "stored": (join_store, start_stored),
    "prefetched": (join_store, functools.partial(start_stored, prefetches=True)),
    "ddp": (join_ranks, start_ddp),
    "alone": (join_ranks, start_torch),
    "torch": (Group, start_torch),
}
"""How to connect, and how to begin then."""


def joined(all: Sequence[Batch]) -> Batch:
    """The batches of several workers as one."""
    ids, dense, clicks = zip(*all, strict=True)
    return [torch.cat(own) for own in zip(*ids, strict=True)], torch.cat(dense), torch.cat(clicks)


def train(
    training: Training, given: Sequence[Batch], rounds: int, barrier: Callable[[], object], marks: str = ""
) -> dict[str, Any]:
    """Train, and measure the seconds of every step after the first WARM_UP."""

    def prepare(number: int) -> tuple[Batch, Batch]:
        if number == WARM_UP:
            barrier()  # steps wait for no other but by what they exchange
        return given[number % BATCHES], given[(number + 1) % BATCHES]

    def step(both: tuple[Batch, Batch]) -> None:
        (ids, dense, clicks), following = both
        training.zero_grad()
        nn.functional.binary_cross_entropy_with_logits(training.network(ids, dense), clicks).backward()
        training.fetch(following[0])
        training.step()

    measured = time_rounds(prepare, step, lambda: None, WARM_UP, rounds, marks)
    barrier()
    return measured


def main() -> None:
    """Train; rank 0 writes the seconds of every step, and the weights."""
    options = _options()
    torch.set_num_threads(1)
    torch.sparse.check_sparse_tensor_invariants.disable()
    import_what_steps_need()
    join, start = START[options.system]
    group, workers = join(), options.workers
    ranks = range(workers) if options.system == "torch" else [group.rank]
    given = [joined(all) for all in zip(*[batches(rank, options.batch) for rank in ranks], strict=True)]
    marks = "" if group.rank else f"{options.out}.0"
    mark_base(marks, group.barrier)
    training = start(options.optimizer, group)
    measured = train(training, given, options.rounds, group.barrier, marks)
    if group.rank == 0:
        state = {name.removeprefix("module."): one for name, one in training.network.state_dict().items()}
        torch.save(list(state.values()), options.weights)
        Path(options.out).write_text(json.dumps({options.optimizer: measured}))
    leave(group)


def leave(group: Group) -> None:
    """End with all others."""
    group.barrier()
    if dist.is_initialized():
        dist.destroy_process_group()
        os._exit(0)  # a thread of gloo that still holds an object of Python could abort the ordinary end


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--system", choices=START, required=True)
    parser.add_argument("--optimizer", choices=CLASSES, required=True)
    parser.add_argument("--batch", type=int, required=True, help="samples of a worker in a step")
    parser.add_argument("--workers", type=int, required=True)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--out", required=True, help="file for the seconds measured by rank 0")
    parser.add_argument("--weights", required=True, help="file for the weights of rank 0")
    return parser.parse_args()


if __name__ == "__main__":
    main()
