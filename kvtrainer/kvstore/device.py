"""The stores of one process. 'device' and 'nccl' also sum over the ranks of torch.distributed.

Their keys are in the servers' engine, called in place of a server.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, ClassVar

import torch

from kvstore_server.errors import ConfigurationError
from kvtrainer.client.client import LocalEngine
from kvtrainer.common.thread_guard import exclusive
from kvtrainer.common.uncompiled import uncompiled
from kvtrainer.kvstore.base import BUILT_IN, COMPRESSION, DEVICE_NAMES, LOCAL_NAMES, NCCL, register
from kvtrainer.kvstore.verbs import TableKVStore
from kvtrainer.parallel.replicas import check_reducer, is_left_fold
from kvtrainer.ranks.process_group import Buckets, current_group


@register(*LOCAL_NAMES)
@uncompiled
class LocalKVStore(TableKVStore):
    """Keeps keys in this process; several replicas of a value are summed. Rank 0 of 1 worker.

    Sums and updates run on the CPU for every name, so results are the same bit for bit. A round is over, and its
    error raised, when `push` returns. Keys may also be integers, which no optimizer can update.
    """

    capabilities: ClassVar[Collection[str]] = BUILT_IN["local"]

    def __init__(self, type: str = "local") -> None:
        engine = LocalEngine()
        super().__init__(type, engine.client, engine)


@register(*DEVICE_NAMES)
@uncompiled
class DeviceKVStore(TableKVStore):
    """As LocalKVStore; in a torch.distributed group of several ranks it sums over those, too.

    Then `init`, `broadcast`, `push`, `pushpull` and `barrier` are collective: every rank calls them with the same keys
    and in the same order, and they block, as long as the group's own timeout says. `init` takes rank 0's values. Every
    rank keeps all keys and applies the same updates to the same sums, so `pull` concerns this rank alone.

    "device" compresses each replica by itself, with a residual of its own; not in a group. "nccl" takes CUDA tensors
    only, and in a group needs its NCCL.

    Args:
        type: the name.
        reducer: how replicas are summed: "flat" from left to right; "tree" in pairs; "coalesced" by torch's own sum
            over devices; "nccl" on distinct CUDA devices only. "auto": from left to right on the CPU; between CUDA
            devices of a Trainer the tree where they reach each other's memory. Rows always go from left to right.
        bucket_size_mb: in a group, the most that is summed in one collective, in units of 1024² bytes of one dtype. -1
            for no limit, None for 25. The same on every rank.
        coalesce: in a group, whether parameters share collectives.

    Raises:
        ConfigurationError: an argument is wrong, or the store cannot work here.
    """

    capabilities: ClassVar[Collection[str]] = BUILT_IN["device"]

    def __init__(
        self,
        type: str = "device",
        *,
        reducer: str = "auto",
        bucket_size_mb: float | None = None,
        coalesce: bool = True,
    ) -> None:
        check_reducer(reducer)
        self._buckets = Buckets(bucket_size_mb, coalesce)
        engine = LocalEngine()
        super().__init__(type, engine.client, engine, current_group())
        self._reducer = reducer
        if self.group is not None:
            self.group.buckets = self._buckets
        self._only_cuda = is_nccl(type)
        self._can_compress = self._can_compress and self.group is None
        if self._only_cuda and not torch.cuda.is_available():
            raise ConfigurationError(
                "kvstore 'nccl' needs CUDA, and torch finds no CUDA device; use 'device'"
            )
        if self._only_cuda and self.group is not None and not self.group.has_nccl:
            raise ConfigurationError(
                "kvstore 'nccl' needs a process group with NCCL for CUDA tensors; call "
                "init_process_group('cpu:gloo,cuda:nccl'), or use 'device'"
            )

    def is_capable(self, capability: str) -> bool:
        can = super().is_capable(capability)
        return can and (self._can_compress or capability.lower() != COMPRESSION)

    @property
    def reducer(self) -> str:
        """The name of the reducer that sums replicas."""
        return self._reducer

    @property
    def bucket_size_mb(self) -> float | None:
        """The most that is summed in one collective, in units of 1024² bytes.

        It may change, on every rank, until a Trainer's first step.
        """
        return self._buckets.size_mb

    @bucket_size_mb.setter
    def bucket_size_mb(self, value: float | None) -> None:
        self._set_buckets(Buckets(value, self._buckets.coalesce))

    @property
    def coalesce(self) -> bool:
        """Whether parameters share collectives. It may change as `bucket_size_mb` may."""
        return self._buckets.coalesce

    @coalesce.setter
    def coalesce(self, value: bool) -> None:
        self._set_buckets(Buckets(self._buckets.size_mb, value))

    @exclusive
    def set_gradient_compression(self, compression_params: Mapping[str, Any]) -> None:
        if not self._can_compress:
            what = "between the ranks of torch.distributed" if self.group is not None else "on kvstore 'nccl'"
            raise ConfigurationError(
                f"gradient compression is not supported {what}; use 'dist_sync', or none"
            )
        if not is_left_fold(self.reducer):
            raise ConfigurationError(
                f"this store has reducer={self.reducer!r}, but replicas that are compressed are decoded and added from "
                "left to right; leave the reducer or the compression out"
            )
        super().set_gradient_compression(compression_params)

    def _set_buckets(self, buckets: Buckets) -> None:
        if self.group is not None:
            if self.group.is_agreed:
                raise ConfigurationError(
                    "how much is summed in one collective cannot change after the first step; set it before, on "
                    "every rank"
                )
            self.group.buckets = buckets
        self._buckets = buckets


def is_nccl(type: str) -> bool:
    """Tell whether a store of this name takes CUDA tensors only."""
    return type.lower() == NCCL
