"""The default torch.distributed process group, with the few collectives that stores need.

`RankGroup` adds three things to torch's collectives. If all ranks are on one host, CPU tensors are exchanged through
shared memory (`RankMemory`) instead of gloo. `agree` compares what the ranks are about to do before they exchange
numbers, so different calls, shapes or options raise an error that names both sides, instead of mixing up data or
hanging. And torch's errors become this project's.

All collectives block, are called by every rank in the same order, and are limited by the process group's timeout. After
an error the group is unusable. `PendingGroupSums` sums asynchronously, over connections of its own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from types import MappingProxyType
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from kvstore_server import check
from kvstore_server.errors import (
    ConfigurationError,
    DeadlineError,
    PlanMismatchError,
    ProtocolError,
    RoundAbortedError,
    WorkerLostError,
)
from kvstore_server.plan import TensorSpec, check_same
from kvstore_server.protocol.frames import pack_control, unpack_control
from kvstore_server.protocol.rows import RowSet
from kvtrainer.ranks.shared_memory import RankMemory, open_rank_memory

BUCKET = 25 * 1024 * 1024
"""Bytes in one collective if no size is set."""
_MB = 1024 * 1024
_CPU = torch.device("cpu")
# Collectives in flight at a time. Limits the memory for copies in another dtype or on another device.
_UNDER_WAY = 4

# Process group → the shared memory of its ranks, or None. All users of a group share it, as they do its connections.
_memories: MutableMapping[dist.ProcessGroup, RankMemory | None] = WeakKeyDictionary()


def current_group() -> RankGroup | None:
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() < 2:
        return None
    return RankGroup()


@dataclass(frozen=True)
class Buckets:
    """How gradients are grouped into collectives.

    Args:
        size_mb: Size limit in MiB; -1 for no limit, None for 25.
        coalesce: Whether adjacent parameters share a collective. If not, each has its own.

    Raises:
        ConfigurationError: An argument is wrong or would have no effect.
    """

    size_mb: float | None = None
    coalesce: bool = True

    def __post_init__(self) -> None:
        size = self.size_mb
        if size is not None and size != -1:
            check.number("bucket_size_mb (-1 for one bucket)", size, above=0)
        check.boolean("coalesce", self.coalesce)
        if not self.coalesce and size not in (None, -1):
            raise ConfigurationError(
                f"bucket_size_mb={size!r} would have no effect with coalesce=False, which sums each parameter "
                "separately; leave one of the two out"
            )

    def elements(self, itemsize: int) -> int | None:
        """Return how many elements of this size in bytes one collective may have; None for any number."""
        if self.size_mb == -1 or not self.coalesce:
            return None
        nbytes = BUCKET if self.size_mb is None else int(self.size_mb * _MB)
        return max(1, nbytes // itemsize)


class RankGroup:
    """The default process group, with NCCL for CUDA tensors if it has that, and gloo otherwise.

    Attributes:
        buckets: Grouping into collectives; equal on all ranks.
        is_agreed: Whether the ranks have compared `buckets`, which must not change afterwards.

    Raises:
        ConfigurationError: The group has neither backend.
    """

    def __init__(self) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.buckets = Buckets()
        self.is_agreed = False
        pairs = [pair.partition(":")[::2] for pair in dist.get_backend_config().split(",")]
        self._backends = {device: name for device, name in pairs if name in ("gloo", "nccl")}
        if not self._backends:
            raise ConfigurationError(
                f"the process group has backend {dist.get_backend()!r}; kvstores work over 'gloo' and 'nccl'"
            )

    @property
    def has_nccl(self) -> bool:
        return self._backends.get("cuda") == "nccl"

    def can_overlap(self, device: torch.device) -> bool:
        """Return whether sums can run beside CPU exchanges. Not with NCCL for both: its communicators may deadlock."""
        return self._backends.get("cpu") == "gloo" and (device.type == "cpu" or self.has_nccl)

    def all_gather(self, mine: Tensor) -> list[Tensor]:
        """Return the tensors of all ranks, by rank, on the device of `mine`. All have the same shape and dtype."""
        sent = mine.to(self._place(mine.device)).contiguous()
        memory = self.memory_for(mine.device)
        with self.errors("exchange what they hold"):
            if memory is not None:
                found = memory.all_gather(sent)
            else:
                found = [torch.empty_like(sent) for _ in range(self.size)]
                dist.all_gather(found, sent)
        return [one.to(mine.device) for one in found]

    def all_gather_bytes(self, mine: bytes) -> list[bytes]:
        """Return the bytes of all ranks, by rank. Lengths may differ."""
        lengths = [int(one) for one in self.all_gather(torch.tensor([len(mine)], device="cpu"))]
        padded = bytearray(max(1, *lengths))
        padded[: len(mine)] = mine
        found = self.all_gather(torch.frombuffer(padded, dtype=torch.uint8))
        return [one.numpy().tobytes()[:length] for one, length in zip(found, lengths, strict=True)]

    @torch.no_grad()
    def broadcast(self, flat: Tensor) -> None:
        sent = flat.to(self._place(flat.device)).contiguous()
        memory = self.memory_for(flat.device)
        with self.errors("take rank 0's values"):
            if memory is not None:
                memory.broadcast(sent)
            else:
                dist.broadcast(sent, 0)
        if sent is not flat:
            flat.copy_(sent)

    @torch.no_grad()
    def sum(
        self,
        flat: Tensor,
        runs: Sequence[tuple[int, int]],
        before: float = 1.0,
        after: float = 1.0,
        borrowed: Mapping[int, Tensor] = MappingProxyType({}),
    ) -> None:
        """Replace ranges of a flat tensor by after · Σ over ranks of before · element.

        Half precision is summed in float32. All ranks get the same bits. Through shared memory the sum is from left to
        right in rank order.

        Args:
            flat: One-dimensional and contiguous.
            runs: (begin, end) of the ranges, ascending.
            borrowed: Begin of a range → its elements, if they are not in `flat`. Only with shared memory.
        """
        compute = torch.float32 if flat.dtype.itemsize < 4 else flat.dtype
        memory = self.memory_for(flat.device)
        if memory is not None:
            targets = [(begin, flat[begin:end]) for begin, end in runs]
            pieces = [(borrowed.get(begin, target), target) for begin, target in targets]
            with self.errors("sum gradients"):
                memory.sum(pieces, compute, before, after)
        else:
            self._sum_by_torch(flat, runs, compute, before, after)

    def memory_for(self, device: torch.device) -> RankMemory | None:
        """Return the shared memory for tensors of a device, or None to use torch.distributed. Collective on first use.

        Raises:
            ConfigurationError: KVSTORE_TRANSPORT demands shared memory, which is not possible. Raised on every rank.
        """
        group = dist.group.WORLD
        if group is None or self._place(device).type != "cpu":
            return None
        if group not in _memories:
            # The exchange that opens the memory calls this too, and must go through torch.distributed.
            _memories[group] = None
            try:
                _memories[group] = open_rank_memory(self.rank, self.all_gather_bytes, _process_group_timeout)
            except BaseException:
                del _memories[group]
                raise
        return _memories[group]

    def _sum_by_torch(
        self,
        flat: Tensor,
        runs: Sequence[tuple[int, int]],
        compute: torch.dtype,
        before: float,
        after: float,
    ) -> None:
        place = self._place(flat.device)
        most = self.buckets.elements(compute.itemsize)
        pending: deque[tuple[Tensor, Tensor, Any]] = deque()

        def finish() -> None:
            target, part, work = pending.popleft()
            with self.errors("sum gradients"):
                work.wait()
            if after != 1.0:
                part.mul_(after)
            if part is not target:
                target.copy_(part)

        # Up to _UNDER_WAY all-reduces are in flight; the oldest is completed before another one starts.
        for begin, end in runs:
            step = max(1, end - begin) if most is None else most
            for start in range(begin, end, step):
                target = flat[start : min(start + step, end)]
                part = target.to(place, compute)
                if before != 1.0:
                    part.mul_(before)
                with self.errors("sum gradients"):
                    pending.append((target, part, dist.all_reduce(part, async_op=True)))
                if len(pending) == _UNDER_WAY:
                    finish()
        while pending:
            finish()

    def barrier(self) -> None:
        self.all_gather(torch.zeros(1, dtype=torch.uint8, device="cpu"))

    @torch.no_grad()
    def gather_rows(self, mine: RowSet, counts: Sequence[int]) -> list[RowSet]:
        """Return the rows of one key of all ranks with any, given each rank's `counts`; this rank's if none has any."""
        most = max(counts)
        if most <= 0:
            return [mine]
        # all_gather needs equal shapes: pad to the longest.
        ids, values = mine.ids.new_zeros(most), mine.values.new_zeros(most, mine.values.shape[1])
        ids[: len(mine.ids)] = mine.ids
        values[: len(mine.ids)] = mine.values
        rows = zip(self.all_gather(ids), self.all_gather(values), counts, strict=True)
        return [RowSet(i[:count], v[:count]) for i, v, count in rows if count > 0]

    def agree(self, verb: str, said: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Compare what the ranks are about to do, and return what all of them said, by rank.

        Args:
            verb: The method that is called.
            said: Its "keys", "specs", "optimizer", "overlap", "bucket_size_mb" and "coalesce", which must be equal on
                all ranks, and other values that may differ.

        Raises:
            RoundAbortedError: A rank reported an error.
            ProtocolError, PlanMismatchError: Ranks differ. Raised on every rank, and names both sides.
        """
        packed = self.all_gather_bytes(pack_control({"verb": verb, **said}))
        heard: list[dict[str, Any]] = [unpack_control(one) for one in packed]
        if all(one == packed[0] for one in packed):
            return heard
        # An error that a rank reported comes first: it explains why its call differs.
        for rank, theirs in enumerate(heard):
            if "error" in theirs:
                raise RoundAbortedError(f"rank {rank} raised in {theirs['verb']}: {theirs['error']}")
        for rank, theirs in enumerate(heard):
            _check_same_group_call(heard[0], theirs, rank)
        return heard

    def report(self, verb: str, error: Exception) -> None:
        """Tell the other ranks, which are in `agree`, about an error that this rank is going to raise."""
        text = f"{type(error).__name__}: {error}"[:1000]
        self.all_gather_bytes(pack_control({"verb": verb, "error": text}))

    def _place(self, device: torch.device) -> torch.device:
        if device.type == "cuda" and self.has_nccl:
            return device
        if self._backends.get("cpu") == "gloo":
            return torch.device("cpu")
        return torch.device("cuda", torch.cuda.current_device())

    @contextmanager
    def errors(self, what: str) -> Iterator[None]:
        """A context that converts errors of the process group; `what` continues "could not … with the other ranks".

        Raises:
            DeadlineError: The wait was longer than the timeout of the group.
            WorkerLostError: Any other failure, probably because a rank has ended.
        """
        try:
            yield
        except (RuntimeError, OSError) as error:
            text = str(error)
            hint = (
                "the process group cannot be used any more; restart the job from a saved state. If ranks have "
                "different numbers of batches, train in a block `with trainer.join():` on all of them"
            )
            if "timed out" in text.lower() or "timeout" in text.lower():
                raise DeadlineError(
                    f"rank {self.rank} of {self.size} waited for the other ranks to {what}, longer than the timeout of "
                    f"the process group ({text:.300}); {hint}"
                ) from error
            raise WorkerLostError(
                f"rank {self.rank} of {self.size} could not {what} with the other ranks, probably because one is gone "
                f"({text:.300}); {hint}"
            ) from error


class PendingGroupSums:
    """Asynchronous sums over ranks beside other exchanges, over connections of their own. Needs `can_overlap`.

    All ranks start sums of the same sizes in the same order, but may be at different sums at a time.
    """

    def __init__(self, group: RankGroup, device: torch.device) -> None:
        self._group = group
        backend = "gloo" if device.type == "cpu" else "nccl"
        self._own = dist.new_group(backend=backend, timeout=timedelta(seconds=_process_group_timeout(device)))
        self._started: list[Any] = []
        # Kept until the next sums have ended. Torch attaches a Python object to a sum that is started in a backward
        # pass, and the process aborts if a gloo thread drops the last reference to it while the interpreter shuts down.
        self._ended: list[Any] = []

    @property
    def count(self) -> int:
        return len(self._started)

    def start(self, flat: Tensor) -> None:
        """Start replacing a tensor by its sum over ranks. It must not be used until `wait`."""
        with self._group.errors("sum gradients"):
            self._started.append(dist.all_reduce(flat, group=self._own, async_op=True))

    def wait(self) -> None:
        with self._group.errors("sum gradients"):
            for work in self._started:
                work.wait()
        self._ended, self._started = self._started, []

    def close(self) -> None:
        """Close the connections. If sums are unfinished this would block, so they are left until the process ends."""
        with suppress(ValueError):  # the process group has ended already
            if not self._started:
                dist.destroy_process_group(self._own)


def _process_group_timeout(device: torch.device = _CPU) -> float:
    assert dist.group.WORLD is not None
    backend: Any = dist.group.WORLD._get_backend(device)
    seconds: float = backend.options._timeout.total_seconds()
    return seconds


def _check_same_group_call(first: Mapping[str, Any], other: Mapping[str, Any], rank: int) -> None:
    if first["verb"] != other["verb"] or first.get("keys") != other.get("keys"):
        raise ProtocolError(
            f"rank 0 calls {first['verb']}({first.get('keys', '')}) and rank {rank} {other['verb']}"
            f"({other.get('keys', '')}); every rank must make the same calls with the same keys in the same order"
        )
    if "specs" in first:
        specs = [[TensorSpec(k, tuple(s), *rest) for k, s, *rest in said["specs"]] for said in (first, other)]
        check_same(specs[0], specs[1], "rank 0", f"rank {rank}")
    one, two = first.get("optimizer") or {}, other.get("optimizer") or {}
    for what, names, mine, theirs in (
        ("options", ("overlap", "bucket_size_mb", "coalesce"), first, other),
        ("optimizers", {**one, **two}, one, two),
    ):
        for name in names:
            if mine.get(name) != theirs.get(name):
                raise PlanMismatchError(
                    f"ranks set different {what}: {name} is {mine.get(name)!r} on rank 0 and {theirs.get(name)!r} on "
                    f"rank {rank}; set the same one on every rank"
                )
