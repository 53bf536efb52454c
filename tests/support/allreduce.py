"""A store that is a plug-in of its own: sums over torch.distributed, as MXNet's horovod plug-in has them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import kvtrainer


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
