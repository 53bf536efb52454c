"""The stores 'device' and 'nccl': sums over the devices of this process and the ranks of torch.distributed."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from kvstore_server.errors import ConfigurationError, PlanMismatchError, ProtocolError, RoundAbortedError
from kvstore_server.plan import TensorSpec, check_same
from kvstore_server.protocol.control import pack_control, unpack_control
from kvstore_server.reduction import torch_dtype
from kvtrainer.comm.rank_group import current_group
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
from kvtrainer.kvstore.row_values import densified, is_sparse, merge_rows
from kvtrainer.kvstore.values import merge, pair, spec_of
from kvtrainer.row_sums import gather_row_sum

Pairs = Sequence[tuple[Key, list[Tensor]]]


@register("device", "local_allreduce_device", "nccl")
class DeviceKVStore(LocalKVStore):
    """As LocalKVStore; inside a torch.distributed group of several ranks it sums over those as well.

    Then `init`, `broadcast`, `push`, `pushpull` and `barrier` are collective: every rank calls them with the same keys
    and in the same order, and they block, as long as the group's own timeout says. `init` takes rank 0's values. Every
    rank keeps all keys and applies the same updates to the same sums, so `pull` concerns this rank alone.

    "device" compresses each replica by itself, with a residual of its own; not in a group. "nccl" takes CUDA tensors
    only, and in a group needs its NCCL.
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

    def __init__(self, type: str = "device") -> None:
        super().__init__(type)
        self.group = current_group()
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

    def push(self, key: Any, value: Any, priority: int = 0) -> None:
        self._agree("push", key, value)
        super().push(key, value, priority)

    def pushpull(self, key: Any, value: Any, out: Any = None, priority: int = 0) -> None:
        self._agree("pushpull", key, value, value if out is None else out)
        super().pushpull(key, value, out, priority)

    def barrier(self) -> None:
        if self.group is None:
            super().barrier()
        else:
            self._exchange("barrier", {})

    def set_gradient_compression(self, compression_params: Mapping[str, Any]) -> None:
        if not self._can_compress:
            what = "between the ranks of torch.distributed" if self.group is not None else "on kvstore 'nccl'"
            raise ConfigurationError(
                f"gradient compression is not supported {what}; use 'dist_sync', or none"
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
        flat, is_own = super()._merged(spec, replicas)
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
            specs = [spec_of(key, replicas[0]) for key, replicas in values]
            said["specs"] = [[spec.key, list(spec.shape), spec.dtype] for spec in specs]
        except Exception as error:
            self._exchange("init", {"error": _text(error)}, error)
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
            self._exchange(verb, {"error": _text(error)}, error)
            raise
        sparse = [
            entry.spec.key
            for entry, values in found
            if all(map(is_sparse, values)) and entry.table.plan.takes_rows(0)
        ]
        said = {"keys": [entry.spec.key for entry, _ in found], "optimizer": optimizer, "sparse": sparse}
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
            _check_same_call(heard[0], theirs, rank)
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


def _check_same_call(first: Mapping[str, Any], other: Mapping[str, Any], rank: int) -> None:
    if first["verb"] != other["verb"] or first.get("keys") != other.get("keys"):
        raise ProtocolError(
            f"rank 0 calls {first['verb']}({first.get('keys', '')}) and rank {rank} {other['verb']}"
            f"({other.get('keys', '')}); every rank must make the same calls with the same keys in the same order"
        )
    if "specs" in first:
        specs = [[TensorSpec(k, tuple(s), d) for k, s, d in said["specs"]] for said in (first, other)]
        check_same(specs[0], specs[1], "rank 0", f"rank {rank}")
    if first.get("optimizer") != other.get("optimizer"):
        raise PlanMismatchError(
            f"ranks set different optimizers: {first['optimizer']} on rank 0 and {other['optimizer']} on rank {rank}; "
            "set the same one, with the same numbers, on every rank"
        )


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:1000]
