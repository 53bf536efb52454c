"""The stores of one process, and 'device' and 'nccl', which also sum over the ranks of torch.distributed.

Their keys are in the servers' engine, called in place of a server.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from kvstore_server.errors import ConfigurationError
from kvstore_server.plan import INTEGERS
from kvtrainer.comm.loopback import LocalEngine
from kvtrainer.comm.rank_group import Buckets, RankGroup, current_group
from kvtrainer.kvstore.base import BUILT_IN, COMPRESSION, DEVICE_NAMES, LOCAL_NAMES, NCCL, Key, register
from kvtrainer.kvstore.replicas import densified, merge, merge_rows, sum_rows
from kvtrainer.kvstore.values import (
    Entry,
    as_sparse,
    check_keys,
    check_on_cuda,
    check_out,
    check_value,
    is_sparse,
    pair,
    spec_of,
)
from kvtrainer.kvstore.verbs import Found, TableKVStore
from kvtrainer.one_thread import by_one_thread
from kvtrainer.parallel.reducers import check_reducer, is_left_fold


@register(*LOCAL_NAMES)
class LocalKVStore(TableKVStore):
    """Keeps keys in this process; several replicas of a value are summed. Rank 0 of 1 worker.

    Sums and updates run on the CPU for every name, so results are the same bit for bit. A round is over, and its
    error raised, when `push` returns. Keys may also be integers, which no optimizer can update.
    """

    capabilities: ClassVar[Collection[str]] = BUILT_IN["local"]

    def __init__(self, type: str = "local") -> None:
        engine = LocalEngine()
        super().__init__(type, engine.client, engine)

    def set_updater(self, updater: Callable[[Key, Tensor, Tensor], object]) -> None:
        """Call `updater(key, merged, stored)` in place of an optimizer; it changes `stored` in place.

        An error that it raises is raised by the push (as OptimizerError) and leaves the values as they were. It must
        not call this store, which is busy with the push.
        """
        self._set_updater(updater)


@register(*DEVICE_NAMES)
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
        super().__init__(type, engine.client, engine)
        self._reducer = reducer
        self.group = current_group()
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
    def rank(self) -> int:
        return 0 if self.group is None else self.group.rank

    @property
    def num_workers(self) -> int:
        return 1 if self.group is None else self.group.size

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

    @by_one_thread
    def init(self, key: Any, value: Any) -> None:
        super().init(key, value if self.group is None else self._of_rank_0(self.group, key, value))

    @by_one_thread
    def broadcast(self, key: Any, value: Any, out: Any, priority: int = 0) -> None:
        given = value if self.group is None else self._of_rank_0(self.group, key, value)
        super().broadcast(key, given, out, priority)

    @by_one_thread
    def push(self, key: Any, value: Any, priority: int = 0) -> None:
        if self.group is None:
            super().push(key, value, priority)
        else:
            pushed, _ = self._over_ranks(self.group, "push", key, value)
            self._contribute(pushed, None, priority)

    @by_one_thread
    def pushpull(self, key: Any, value: Any, out: Any = None, priority: int = 0) -> None:
        if self.group is None:
            super().pushpull(key, value, out, priority)
        else:
            pushed, outs = self._over_ranks(self.group, "pushpull", key, value, value if out is None else out)
            self._contribute(pushed, outs, priority)

    @by_one_thread
    def barrier(self) -> None:
        if self.group is None:
            super().barrier()
        else:
            self.group.agree("barrier", {})

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

    def set_updater(self, updater: Callable[[Key, Tensor, Tensor], object]) -> None:
        self._set_updater(updater)

    set_updater.__doc__ = LocalKVStore.set_updater.__doc__

    def _set_buckets(self, buckets: Buckets) -> None:
        if self.group is not None:
            if self.group.is_agreed:
                raise ConfigurationError(
                    "how much is summed in one collective cannot change after the first step; set it before, on "
                    "every rank"
                )
            self.group.buckets = buckets
        self._buckets = buckets

    def _of_rank_0(self, group: RankGroup, key: Any, value: Any) -> Any:
        """Take rank 0's values of new keys, once all ranks agree on keys, shapes and dtypes.

        They come in the form of `value`.
        """
        try:
            values = pair(key, value, "value")
            check_keys([one for one, _ in values])
            seen: set[str] = set()
            for one, replicas in values:
                self._check_new(one, seen)
                seen.add(str(one))
                if self._only_cuda:
                    check_on_cuda([tensor.device for tensor in replicas], f"the values of key {one!r}")
            specs = [spec_of(one, replicas[0], INTEGERS) for one, replicas in values]
        except Exception as error:
            group.report("init", error)
            raise
        group.agree("init", {"specs": [[spec.key, list(spec.shape), spec.dtype] for spec in specs]})
        rows = zip(specs, values, strict=True)
        flats = [merge([densified(spec, replicas[0])])[0].clone() for spec, (_, replicas) in rows]
        for flat in flats:
            group.broadcast(flat)
        shaped = [flat.view(spec.shape) for flat, spec in zip(flats, specs, strict=True)]
        return shaped if isinstance(key, list | tuple) else shaped[0]

    def _over_ranks(
        self, group: RankGroup, verb: str, key: Any, value: Any, out: Any = None
    ) -> tuple[Found, Found]:
        """Find keys, as every rank does, and sum their values over ranks; also find those of `out`.

        Raises:
            ProtocolError, PlanMismatchError: ranks differ in what they call; on every rank.
            RoundAbortedError: another rank's arguments are wrong.
        """
        try:
            pushed = self._find(pair(key, value, "value"), check_value)
            outs = [] if out is None else self._find(pair(key, out, "out"), check_out)
            optimizer = None if self._optimizer is None else self._optimizer.spec()
            by_rows = [
                entry.spec.key
                for entry, values in pushed
                if all(map(is_sparse, values)) and self._goes_by_rows(entry)
            ]
        except Exception as error:
            group.report(verb, error)
            raise
        keys, size = [entry.spec.key for entry, _ in pushed], group.buckets.size_mb
        said = {"keys": keys, "optimizer": optimizer, "sparse": by_rows, "bucket_size_mb": size}
        heard = group.agree(verb, said)
        rows_only = frozenset.intersection(*(frozenset(one["sparse"]) for one in heard))
        return [(entry, [self._sum_over(group, entry, values, rows_only)]) for entry, values in pushed], outs

    def _sum_over(
        self, group: RankGroup, entry: Entry, values: Sequence[Tensor], rows_only: Collection[str]
    ) -> Tensor:
        """Sum one key's values over replicas and ranks; sparse if every rank gives only rows."""
        spec = entry.spec
        if spec.key in rows_only:
            mine = merge_rows(spec, values)
            counts = [int(one) for one in group.all_gather(torch.tensor([len(mine.ids)]))]
            ids, total = sum_rows(group.gather_rows(mine, counts), spec.dtype)
            return as_sparse(spec, ids, total.to(entry.dtype))
        flat, is_own = self._sum(spec, [densified(spec, one) for one in values])
        flat = flat if is_own else flat.clone()
        group.sum(flat, [(0, flat.numel())])
        return flat.view(spec.shape)


def is_nccl(type: str) -> bool:
    """Tell whether a store of this name takes CUDA tensors only."""
    return type.lower() == NCCL
