"""The stores 'device' and 'nccl': sums over the devices of this process and the ranks of torch.distributed."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from kvstore_server.errors import ConfigurationError, RoundAbortedError
from kvstore_server.plan import TensorSpec
from kvstore_server.protocol.control import pack_control, unpack_control
from kvstore_server.reduction import torch_dtype
from kvtrainer.comm.rank_group import Buckets, current_group
from kvtrainer.comm.tickets import Arenas, RoundItem
from kvtrainer.kvstore.base import (
    COMPRESSION,
    OPTIMIZER,
    SEVERAL_WORKERS,
    SPARSE_GRADIENTS,
    SPARSE_WEIGHTS,
    Key,
    register,
)
from kvtrainer.kvstore.entries import Entry
from kvtrainer.kvstore.local import LocalKVStore
from kvtrainer.kvstore.row_sums import gather_row_sum
from kvtrainer.kvstore.row_values import densified, is_sparse, merge_rows
from kvtrainer.kvstore.same_calls import check_same_call, error_text
from kvtrainer.kvstore.values import merge, pair, spec_of
from kvtrainer.one_thread import by_one_thread
from kvtrainer.parallel.reducers import check_reducer, is_left_fold, make_reducer

Pairs = Sequence[tuple[Key, list[Tensor]]]


@register("device", "local_allreduce_device", "nccl")
class DeviceKVStore(LocalKVStore):
    """As LocalKVStore; inside a torch.distributed group of several ranks it sums over those as well.

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

    capabilities: ClassVar[Collection[str]] = (OPTIMIZER, SEVERAL_WORKERS)

    @classmethod
    def capabilities_as(cls, type: str) -> Collection[str]:
        if is_nccl(type):
            return cls.capabilities
        return (*cls.capabilities, COMPRESSION, SPARSE_GRADIENTS, SPARSE_WEIGHTS)

    def is_capable(self, capability: str) -> bool:
        can = super().is_capable(capability)
        return can and (self._can_compress or capability.lower() != COMPRESSION)

    def __init__(
        self,
        type: str = "device",
        *,
        reducer: str = "auto",
        bucket_size_mb: float | None = None,
        coalesce: bool = True,
    ) -> None:
        self.reducer = check_reducer(reducer)
        self._buckets = Buckets(bucket_size_mb, coalesce)
        super().__init__(type)
        self.group = current_group()
        if self.group is not None:
            self.group.buckets = self._buckets
        self._sparse_keys: frozenset[str] = frozenset()
        """In a group: the keys of which every rank pushes rows only, in the call that is under way."""
        self._can_compress = not is_nccl(type) and self.group is None
        if is_nccl(type) and not torch.cuda.is_available():
            raise ConfigurationError(
                "kvstore 'nccl' needs CUDA, and torch finds no CUDA device; use 'device'"
            )
        if is_nccl(type) and self.group is not None and not self.group.has_nccl:
            raise ConfigurationError(
                "kvstore 'nccl' needs a process group with NCCL for CUDA tensors; call "
                "init_process_group('cpu:gloo,cuda:nccl'), or use 'device'"
            )

    @property
    def rank(self) -> int:
        return 0 if self.group is None else self.group.rank

    @property
    def num_workers(self) -> int:
        return 1 if self.group is None else self.group.size

    @property
    def bucket_size_mb(self) -> float | None:
        """The most that is summed in one collective; may change, on every rank, until a Trainer's first step."""
        return self._buckets.size_mb

    @bucket_size_mb.setter
    def bucket_size_mb(self, value: float | None) -> None:
        self._set_buckets(Buckets(value, self._buckets.coalesce))

    @property
    def coalesce(self) -> bool:
        """Whether parameters share collectives; may change, on every rank, until a Trainer's first step."""
        return self._buckets.coalesce

    @coalesce.setter
    def coalesce(self, value: bool) -> None:
        self._set_buckets(Buckets(self._buckets.size_mb, value))

    @by_one_thread
    def push(self, key: Any, value: Any, priority: int = 0) -> None:
        self._agree("push", key, value)
        super().push(key, value, priority)

    @by_one_thread
    def pushpull(self, key: Any, value: Any, out: Any = None, priority: int = 0) -> None:
        self._agree("pushpull", key, value, value if out is None else out)
        super().pushpull(key, value, out, priority)

    @by_one_thread
    def barrier(self) -> None:
        if self.group is None:
            super().barrier()
        else:
            self._exchange("barrier", {})

    @by_one_thread
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

    def _create(self, values: Pairs, outs: Pairs | None) -> None:
        if self.group is not None:
            values = self._of_rank_0(values)
        super()._create(values, outs)

    def _lookup(self, pairs: Pairs, same_dtype: bool) -> list[tuple[Entry, list[Tensor]]]:
        found = super()._lookup(pairs, same_dtype)
        if is_nccl(self._type):
            for entry, tensors in found:
                check_on_cuda([tensor.device for tensor in tensors], f"the values of key {entry.spec.key!r}")
        return found

    def _merged(self, spec: TensorSpec, replicas: Sequence[Tensor]) -> tuple[Tensor, bool]:
        if is_left_fold(self.reducer) or len(replicas) == 1:
            flat, is_own = super()._merged(spec, replicas)
        else:
            flat, is_own = self._reduced(replicas), True
        if self.group is None:
            return flat, is_own
        flat = flat if is_own else flat.clone()
        self.group.sum(flat, [(0, flat.numel())])
        return flat, True

    def _item(self, entry: Entry, replicas: Sequence[Tensor], out: Arenas | None) -> RoundItem:
        if self.group is None:
            return super()._item(entry, replicas, out)
        spec, table = entry.spec, entry.table
        if spec.key not in self._sparse_keys:
            return super()._item(entry, [densified(spec, one) for one in replicas], out)
        mine = merge_rows(spec, replicas)
        counts = [int(one) for one in self.group.all_gather(torch.tensor([len(mine.ids)]))]
        total = gather_row_sum(self.group, mine, counts, spec.dtype)
        rows = total._replace(values=total.values.to(torch_dtype(spec.dtype)))
        return RoundItem(table, {}, out, rows={0: rows})

    def _reduced(self, replicas: Sequence[Tensor]) -> Tensor:
        """The flat sum of replicas on the CPU, as the reducer computes it where they are."""
        parts = [one.detach().clone(memory_format=torch.contiguous_format).view(-1) for one in replicas]
        make_reducer(self.reducer, [part.device for part in parts]).sum(parts)
        return parts[0].to("cpu")

    def _set_buckets(self, buckets: Buckets) -> None:
        if self.group is not None:
            if self.group.is_agreed:
                raise ConfigurationError(
                    "how much is summed in one collective cannot change after the first step; set it before, on "
                    "every rank"
                )
            self.group.buckets = buckets
        self._buckets = buckets

    def _of_rank_0(self, values: Pairs) -> Pairs:
        """Rank 0's values, after ranks have agreed on the keys, shapes and dtypes."""
        said: dict[str, Any] = {}
        try:
            seen: set[str] = set()
            for key, replicas in values:
                self._check_new(key, seen)
                seen.add(str(key))
                if is_nccl(self._type):
                    check_on_cuda([one.device for one in replicas], f"the values of key {key!r}")
            specs = [spec_of(key, replicas[0], self._other_dtypes) for key, replicas in values]
            said["specs"] = [[spec.key, list(spec.shape), spec.dtype] for spec in specs]
        except Exception as error:
            self._exchange("init", {"error": error_text(error)}, error)
            raise
        self._exchange("init", said)
        flats = [
            merge([densified(spec, replicas[0])])[0].clone()
            for spec, (_, replicas) in zip(specs, values, strict=True)
        ]
        assert self.group is not None
        for flat in flats:
            self.group.broadcast(flat)
        return [
            (key, [flat.view(replicas[0].shape)]) for (key, replicas), flat in zip(values, flats, strict=True)
        ]

    def _agree(self, verb: str, key: Any, value: Any, out: Any = None) -> None:
        """In a group: check the arguments here, and let the ranks compare their keys and optimizers."""
        if self.group is None:
            return
        try:
            found = self._lookup(pair(key, value, "value"), same_dtype=True)
            if out is not None:
                self._lookup(pair(key, out, "out"), same_dtype=False)
            optimizer = None if self._optimizer is None else self._optimizer.spec()
        except Exception as error:
            self._exchange(verb, {"error": error_text(error)}, error)
            raise
        sparse = [
            entry.spec.key
            for entry, values in found
            if all(map(is_sparse, values)) and self._goes_by_rows(entry)
        ]
        keys, buckets = [entry.spec.key for entry, _ in found], self.group.buckets.size_mb
        said = {"keys": keys, "optimizer": optimizer, "sparse": sparse, "bucket_size_mb": buckets}
        heard = self._exchange(verb, said)
        self._sparse_keys = frozenset.intersection(*(frozenset(one["sparse"]) for one in heard))

    def _exchange(
        self, verb: str, said: Mapping[str, Any], mine: Exception | None = None
    ) -> list[dict[str, Any]]:
        """Compare what the ranks are about to do; raise on every rank if they differ, or one cannot do it.

        Returns what all ranks said.

        Args:
            mine: The error that this rank is about to raise, which the others hear of.
        """
        assert self.group is not None
        packed = self.group.all_gather_bytes(pack_control({"verb": verb, **said}))
        if mine is not None:
            raise mine
        heard: list[dict[str, Any]] = [unpack_control(one) for one in packed]
        if all(one == packed[0] for one in packed):
            return heard
        for rank, theirs in enumerate(heard):
            if "error" in theirs:
                raise RoundAbortedError(f"rank {rank} raised in {theirs['verb']}: {theirs['error']}")
        for rank, theirs in enumerate(heard):
            check_same_call(heard[0], theirs, rank)
        return heard


def is_nccl(type: str) -> bool:
    """Whether a store's name is that of the one for CUDA tensors only."""
    return type.lower() == "nccl"


def check_on_cuda(devices: Sequence[torch.device], what: str) -> None:
    """Raise ConfigurationError unless all devices are CUDA's."""
    others = sorted({str(device) for device in devices if device.type != "cuda"})
    if others:
        raise ConfigurationError(
            f"kvstore 'nccl' takes CUDA tensors only, but {what} are on {', '.join(others)}; use 'device'"
        )
