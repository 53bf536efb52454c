"""The stores of one process. "device" and "nccl" also sum over the ranks of torch.distributed.

Their keys live in the same engine that servers run, called directly.
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
from kvtrainer.kvstore.verbs import KVStoreVerbs
from kvtrainer.parallel.replicas import check_replica_reducer, is_left_fold
from kvtrainer.ranks.process_group import Buckets, current_group


@register(*LOCAL_NAMES)
@uncompiled
class LocalKVStore(KVStoreVerbs):
    """Keeps keys in this process and sums the replicas of a value. Rank 0 of 1 worker.

    Sums and updates run on the CPU under every name, so results are bitwise equal. A round is complete when `push`
    returns, which raises its errors. Keys may also hold integers, which no optimizer can update.
    """

    capabilities: ClassVar[Collection[str]] = BUILT_IN["local"]

    def __init__(self, type: str = "local") -> None:
        engine = LocalEngine()
        super().__init__(type, engine.client, engine)


@register(*DEVICE_NAMES)
@uncompiled
class DeviceKVStore(KVStoreVerbs):
    """A LocalKVStore that also sums over the ranks of a torch.distributed group with several ranks.

    In a group, `init`, `broadcast`, `push`, `pushpull` and `barrier` are collective: every rank calls them with the
    same keys in the same order, and they block up to the group's timeout. `init` takes rank 0's values. Every rank
    holds all keys and applies the same updates to the same sums, so `pull` is local.

    "device" compresses each replica separately, with its own residual, but not in a group. "nccl" takes CUDA tensors
    only, and in a group needs the NCCL backend.

    Args:
        type: The name under which the store is created.
        reducer: How replicas are summed: "flat" from left to right, "tree" in pairs, "coalesced" by torch's sum over
            devices, "nccl" on distinct CUDA devices only. "auto" means "flat" on the CPU; for a Trainer's CUDA devices
            it means "tree" if they can access each other's memory. Rows are always summed from left to right.
        bucket_size_mb: In a group, the size limit of one collective in MiB for each dtype: -1 for no limit, None for
            25. Must be equal on all ranks.
        coalesce: In a group, whether parameters share collectives.

    Raises:
        ConfigurationError: An argument is wrong, or the store cannot work here.
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
        check_replica_reducer(reducer)
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
        """Name of the reducer that sums replicas."""
        return self._reducer

    @property
    def bucket_size_mb(self) -> float | None:
        """Size limit of one collective in MiB. It may be changed, on every rank, until a Trainer's first step."""
        return self._buckets.size_mb

    @bucket_size_mb.setter
    def bucket_size_mb(self, value: float | None) -> None:
        self._set_buckets(Buckets(value, self._buckets.coalesce))

    @property
    def coalesce(self) -> bool:
        """Whether parameters share collectives. It may be changed until a Trainer's first step, as `bucket_size_mb`."""
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
                f"this store has reducer={self.reducer!r}, but compressed replicas are decoded and added from left to "
                "right; leave out the reducer or the compression"
            )
        super().set_gradient_compression(compression_params)

    def _set_buckets(self, buckets: Buckets) -> None:
        if self.group is not None:
            if self.group.is_agreed:
                raise ConfigurationError(
                    "bucket_size_mb and coalesce cannot change after the first step; set them before, on every rank"
                )
            self.group.buckets = buckets
        self._buckets = buckets


def is_nccl(type: str) -> bool:
    """Return whether a store of this name takes CUDA tensors only."""
    return type.lower() == NCCL
