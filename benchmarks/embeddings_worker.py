"""One worker that trains a model with 26 tables, as Criteo's data have, on any of the systems; started by
`embeddings.py`.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from ctr_worker import Group, join_ranks, join_store, leave
from steps import Zipf
from torch import Tensor, nn

import kvtrainer

VOCABULARIES = (
    1460, 583, 10_131_227, 2_202_608, 305, 24, 12_517, 633, 3, 93_145, 5683, 8_351_593, 3194, 27, 14_992, 5_461_306,
    10, 5652, 2173, 4, 7_046_547, 18, 15, 286_181, 105, 142_572,
)  # fmt: skip
"""Different values of the 26 categorical features of Criteo's display advertising challenge."""
HASHED, WIDTH, DENSE, HIDDEN, BATCHES = 1_000_000, 16, 13, 64, 16
"""Tables of a fixed size have at most HASHED rows: ids are taken modulo that."""
OPTIONS = {"lr": 0.05, "initial_accumulator_value": 0.01}

Batch = tuple[dict[str, Tensor], Tensor, Tensor]
"""Ids of each table, other features, and whether there was a click."""


class Clicks(nn.Module):
    """26 tables, and two layers over their rows and the other features."""

    def __init__(self, tables: nn.ModuleDict) -> None:
        super().__init__()
        self.tables = tables
        self.is_together = False
        self.hidden, self.out = nn.Linear(len(VOCABULARIES) * WIDTH + DENSE, HIDDEN), nn.Linear(HIDDEN, 1)

    def look_up(self, ids: dict[str, Tensor]) -> dict[str, Tensor]:
        if self.is_together:
            found: dict[str, Tensor] = self.tables(ids)
            return found
        return {name: self.tables[name](own) for name, own in ids.items()}

    def forward(self, ids: dict[str, Tensor], dense: Tensor) -> Tensor:
        found = self.look_up(ids)
        return self.out(torch.relu(self.hidden(torch.cat([*found.values(), dense], 1)))).view(-1)


def stored_tables() -> kvtrainer.EmbeddingBagCollection:
    """Tables without a number of rows."""
    return kvtrainer.EmbeddingBagCollection(
        {f"c{at}": kvtrainer.Embedding(WIDTH, scale=0.1, seed=at) for at in range(len(VOCABULARIES))}
    )


def fixed_tables() -> nn.ModuleDict:
    """Tables that this process has, of a fixed size."""
    sizes = {f"c{at}": min(rows, HASHED) for at, rows in enumerate(VOCABULARIES)}
    tables = {name: nn.Embedding(rows, WIDTH, sparse=True) for name, rows in sizes.items()}
    for table in tables.values():
        nn.init.normal_(table.weight, 0, 0.1)
    return nn.ModuleDict(tables)


def batches(ranks: Sequence[int], size: int, is_hashed: bool) -> list[Batch]:
    """The batches of some ranks together, which take turns; popular ids are much more frequent (Zipf's law)."""
    drawn = [np.random.default_rng(rank) for rank in ranks]
    ids: dict[str, list[Tensor]] = {}
    for at, rows in enumerate(VOCABULARIES):
        popular = Zipf(rows)
        of_batches = [np.concatenate([popular.draw(one, size) for one in drawn]) for _ in range(BATCHES)]
        ids[f"c{at}"] = [torch.from_numpy(one % HASHED if is_hashed else one) for one in of_batches]
    count = size * len(ranks)
    dense = torch.from_numpy(drawn[0].standard_normal((count, DENSE), np.float32))
    clicks = torch.from_numpy((drawn[0].random(count) < 0.3).astype(np.float32))
    return [({name: own[at] for name, own in ids.items()}, dense, clicks) for at in range(BATCHES)]


@dataclass(frozen=True)
class Training:
    """A network, what its loop does around it, and the ways to look up that take turns."""

    network: Clicks
    forward: Callable[[dict[str, Tensor], Tensor], Tensor]
    zero_grad: Callable[[], object]
    step: Callable[[], object]
    ways: tuple[str, ...] = ("one by one",)
    """How to look up, in turns; "collection" is together."""
    fetch: Callable[[dict[str, Tensor]], object] = lambda ids: None
    """Told the ids of the next batch before a step."""


def start_kvtrainer(group: Group, kvstore: str = "", prefetches: bool = False) -> Training:
    network = Clicks(stored_tables())
    store: Any = kvstore or group.store
    trainer = kvtrainer.Trainer(network, torch.optim.Adagrad, OPTIONS, kvstore=store)
    step = functools.partial(trainer.step, 1 if kvstore else group.store.num_workers)
    if not prefetches:
        return Training(network, network, network.zero_grad, step, ("collection", "one by one"))

    def fetch(ids: dict[str, Tensor]) -> None:
        trainer.prefetch({f"tables.{name}.weight": own for name, own in ids.items()})

    return Training(network, network, network.zero_grad, step, ("collection",), fetch)


def start_ddp(_group: Group) -> Training:
    network = Clicks(fixed_tables())
    wrapped = nn.parallel.DistributedDataParallel(network, gradient_as_bucket_view=True, static_graph=True)
    updater = torch.optim.Adagrad(network.parameters(), **OPTIONS)  # type: ignore[arg-type]
    return Training(network, wrapped, updater.zero_grad, updater.step)


START: dict[str, tuple[Callable[[], Group], Callable[[Group], Training]]] = {
    "kvtrainer": (join_store, start_kvtrainer),
    "prefetched": (join_store, functools.partial(start_kvtrainer, prefetches=True)),
    "local": (Group, functools.partial(start_kvtrainer, kvstore="local")),
    "ddp": (join_ranks, start_ddp),
}
"""How to connect, and how to begin then."""


def train(training: Training, given: Sequence[Batch], rounds: int, group: Group) -> dict[str, Any]:
    """Train with all ways to look up in turns, and measure the seconds of every step after all batches have come."""
    seconds: dict[str, list[float]] = {name: [] for name in training.ways}
    for number in range(BATCHES + rounds):
        # In the next turn of the batches, another way begins.
        way = training.ways[(number + number // BATCHES) % len(training.ways)]
        training.network.is_together = way == "collection"
        ids, dense, clicks = given[number % BATCHES]
        if number == BATCHES:
            group.barrier()  # steps wait for no other but by what they exchange
        began = time.perf_counter()
        training.zero_grad()
        nn.functional.binary_cross_entropy_with_logits(training.forward(ids, dense), clicks).backward()
        training.fetch(given[(number + 1) % BATCHES][0])
        training.step()
        seconds[way] += [time.perf_counter() - began] * (number >= BATCHES)
    group.barrier()
    return {name: {"rounds": own, "median": statistics.median(own)} for name, own in seconds.items()}


def main() -> None:
    """Train; rank 0 writes the seconds of every step."""
    options = _options()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    torch.sparse.check_sparse_tensor_invariants.disable()
    join, start = START[options.system]
    group = join()
    ranks = range(options.workers) if options.system == "local" else [group.rank]
    given = batches(list(ranks), options.batch, is_hashed=options.system == "ddp")
    measured = train(start(group), given, options.rounds, group)
    if group.rank == 0:
        Path(options.out).write_text(json.dumps(measured))
    leave(group)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--system", choices=START, required=True)
    parser.add_argument("--batch", type=int, required=True, help="samples of a worker in a step")
    parser.add_argument("--workers", type=int, required=True)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--out", required=True, help="file for the seconds measured by rank 0")
    return parser.parse_args()


if __name__ == "__main__":
    main()
