"""A worker whose store is a plug-in of its own: sums over torch.distributed, as MXNet's horovod plug-in has them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import kvtrainer
from kvtrainer.errors import ConfigurationError
from tests.support.jobs import Results

KEYS = 20
"""MXNet's test has 400; each is a message of its own here."""
REPLICAS = 2


@kvtrainer.kvstore.KVStoreBase.register
class AllReduce(kvtrainer.kvstore.KVStoreBase):
    """Sums over all processes of the group, and over the tensors of a list; known as "allreduce"."""

    capabilities = ("several_workers",)

    @property
    def type(self) -> str:
        return "allreduce"

    @property
    def rank(self) -> int:
        return dist.get_rank()

    @property
    def num_workers(self) -> int:
        return dist.get_world_size()

    def broadcast(self, key: Any, value: Any, out: Any, priority: int = 0) -> None:
        shared = _listed(value)[0].clone()
        dist.broadcast(shared, src=0)
        for one in _listed(out):
            one.copy_(shared)

    def pushpull(self, key: Any, value: Any, out: Any = None, priority: int = 0) -> None:
        total = torch.stack(list(_listed(value))).sum(0)
        dist.all_reduce(total)
        for one in _listed(value if out is None else out):
            one.copy_(total)


def _listed(tensors: Any) -> Sequence[Tensor]:
    return [tensors] if isinstance(tensors, Tensor) else list(tensors)


def verbs() -> dict[str, Any]:
    """Broadcast of many keys, then in-place pushpull, several times over."""
    store = kvtrainer.kvstore.create("AllReduce")
    first = []
    for key in range(KEYS):
        out = torch.empty(2, 3)
        store.broadcast(key, torch.full((2, 3), float(key)) * (1 + store.rank), out)
        first.append(out)
    sums = []
    for _ in range(3):
        values = [torch.full((2, 3), store.rank + 1.0) for _ in range(REPLICAS)]
        store.pushpull(0, values)
        sums.append(values)
    return {"type": store.type, "first": first, "sums": sums}


def trained(kvstore: Any, steps: int) -> list[Tensor]:
    """The weights after each step of MXNet's test of Trainers: y = (rank + 1) · w, learning rate 1."""
    weight = torch.nn.Parameter(torch.full((10, 1), 1.0 + dist.get_rank()))  # rank 0's ones count
    seen = []
    with kvtrainer.Trainer([weight], "sgd", {"learning_rate": 1.0}, kvstore=kvstore) as trainer:
        for _ in range(steps):
            ((dist.get_rank() + 1) * weight).sum().backward()
            trainer.step(1)
            seen.append(weight.detach().clone())
    return seen


def refusals() -> dict[str, str]:
    """What a Trainer says to that which a plug-in cannot do."""
    said = {}
    try:
        kvtrainer.Trainer(torch.nn.Linear(2, 2), "sgd", kvstore="allreduce", update_on_kvstore=True)
    except ConfigurationError as error:
        said["update_on_kvstore"] = str(error)
    try:
        params = {"type": "2bit"}
        kvtrainer.Trainer(torch.nn.Linear(2, 2), "sgd", kvstore="allreduce", compression_params=params)
    except ConfigurationError as error:
        said["compression"] = str(error)
    table = torch.nn.Embedding(4, 2, sparse=True)
    with kvtrainer.Trainer(table, "sgd", kvstore="allreduce") as trainer:
        table(torch.tensor([1])).sum().backward()
        try:
            trainer.step(1)
        except ConfigurationError as error:
            said["sparse"] = str(error)
    return said


def run(rank: int, workers: int) -> Results:
    """In a group of torch.distributed."""
    return {
        **verbs(),
        "by_name": trained("allreduce", 2),
        "by_object": trained(AllReduce(), 2),
        "refusals": refusals(),
    }
