"""Gradients that are summed over the ranks of torch.distributed while the backward pass still computes others.

They go in buckets, each when all of its gradients are there, as in DDP. Ranks must begin the same sums in the same
order, although in one round they may have different gradients, or none: so the order of the buckets is common, each
rank begins with the first, and never passes one over. The header of a round says how far every rank has come, and which
sums are not of what it gives now. Those that a rank lacks it then begins with zeros, so that all of them end; the step
sums anew what is not of everybody's gradients.
"""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kvstore_server.codec import compute_dtype, torch_dtype
from kvstore_server.plan import Plan
from kvstore_server.rows import same_bits
from kvtrainer.comm.ahead import InVain
from kvtrainer.comm.rank_group import Buckets, RankGroup, SumsUnderWay
from kvtrainer.memory.memory import DeviceMemory

FIRST = 1024 * 1024
"""Bytes of the first bucket of a dtype, which is to go soon."""
_LASTING = 3
"""After so many rounds in a row a change lasts: buckets are made anew for gradients of other keys, and one that did not
come is no longer waited for."""
NOT_SENT, NOTHING, SAME, CHANGED = range(4)
"""A bucket in a header: its sum was not begun here; nor was it, but this rank gives nothing; it is of what this rank
gives; it is of something else."""


class Layout(NamedTuple):
    """The place of a bucket in the arena of its dtype."""

    dtype: str
    keys: Sequence[int]
    """By index, in the order of the arena."""
    runs: Sequence[tuple[int, int]]
    """From where to where; one behind the other they are the bucket."""


class _Bucket:
    """The memory of a bucket."""

    def __init__(self, layout: Layout, plan: Plan, device: torch.device) -> None:
        self.layout = layout
        numel = sum(end - begin for begin, end in layout.runs)
        self.sent = torch.zeros(numel, dtype=torch_dtype(layout.dtype), device=device)
        """What this rank gave, with padding."""
        self.sum = torch.zeros(numel, dtype=compute_dtype(layout.dtype), device=device)
        self.pieces: dict[int, Tensor] = {}
        """Key (by index) → its part of what is sent."""
        at = 0
        for begin, end in layout.runs:
            for key in layout.keys:
                spec, start = plan.specs[key], plan.key_offsets[key]
                if begin <= start < end:
                    piece = self.sent[at + start - begin :][: spec.numel]
                    self.pieces[key] = piece.view(spec.shape)
            at += end - begin

    def pairs(self, arena: Tensor, mine: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the runs of the arena, and their parts of `sent` or `sum`."""
        at = 0
        for begin, end in self.layout.runs:
            yield arena[begin:end], mine[at : at + end - begin]
            at += end - begin


class BucketOverlap:
    """Sums a Trainer's gradients over ranks as they become complete; all ranks have one, and make the same calls.

    A key whose gradient came in several backward passes in the last step is complete after as many of them in this one.
    The first steps show which gradients there are, and in what order.

    Args:
        group: in which `can_overlap` holds for the device.
        memory: of the only device.
    """

    def __init__(self, group: RankGroup, memory: DeviceMemory) -> None:
        self._group, self._plan = group, memory.plan
        self._parameters, self._device = memory.parameters, memory.arena.device
        self._sums = SumsUnderWay(group, self._device)
        count = len(memory.plan.specs)
        self._passes = [0] * count
        """In how many backward passes since the last step each key has come."""
        self._needed = [1] * count
        """After how many it is complete."""
        self._absences = [0] * count
        """In how many rounds in a row each has not come."""
        self._came: list[int] = []
        """The keys that have come since the last step, in this order."""
        self._keys: frozenset[int] | None = None
        """Those that are in buckets; None before there are any."""
        self._num_strange = 0
        self._buckets: list[_Bucket] = []
        self._bucket_of: dict[int, int] = {}
        self._missing: list[int] = []
        """How many keys of each bucket have yet to come."""
        self._usable: list[_Bucket] = []
        self._vain = InVain()
        # Of CUDA tensors another thread computes the gradients.
        self._lock = threading.Lock()
        memory.tracker.listen(self._arrived)

    @property
    def count(self) -> int:
        """The number of buckets."""
        return len(self._buckets)

    def states(
        self, arenas: Mapping[str, Tensor], rows: Collection[int], absent: frozenset[int]
    ) -> list[int]:
        """Say what has become of each bucket.

        Args:
            arenas: what this rank gives, zero where it gives nothing; empty if nothing at all.
            rows: keys (by index) of which it gives only rows.
            absent: those of which it gives nothing.
        """
        states = []
        for at, bucket in enumerate(self._buckets):
            keys = bucket.layout.keys
            if at >= self._sums.count:
                states.append(NOTHING if absent and absent.issuperset(keys) else NOT_SENT)
                continue
            arena = arenas.get(bucket.layout.dtype)
            if arena is None or any([key in rows for key in keys]):
                states.append(CHANGED)
            else:
                is_same = all(_equal(*pair) for pair in bucket.pairs(arena, bucket.sent))
                states.append(SAME if is_same else CHANGED)
        return states

    def settle(self, states: Sequence[Sequence[int]]) -> None:
        """End all sums that any rank has begun, given what every rank says of each bucket; `take` finds the sums."""
        most = max(sum([state in (SAME, CHANGED) for state in of_rank]) for of_rank in states)
        for bucket in self._buckets[self._sums.count : most]:
            self._sums.start(bucket.sum.zero_())
        self._sums.wait()
        self._usable = [
            bucket
            for bucket, *said in zip(self._buckets[:most], *states, strict=False)
            if not {NOT_SENT, CHANGED}.intersection(said)
        ]
        if most:
            self._vain.count(bool(self._usable))

    @torch.no_grad()
    def take(self, arenas: Mapping[str, Tensor], factor: float) -> frozenset[int]:
        """Write the sums that are everybody's, multiplied, to the arenas; returns their keys (by index)."""
        found: set[int] = set()
        for bucket in self._usable:
            if factor != 1.0:
                bucket.sum.mul_(factor)
            for target, total in bucket.pairs(arenas[bucket.layout.dtype], bucket.sum):
                target.copy_(total)
            found.update(bucket.layout.keys)
        return frozenset(found)

    def end_round(self, dense: frozenset[int] | None = None) -> None:
        """The gradients that come from now on are those of the next round.

        Args:
            dense: keys (by index) of which all elements were summed in this one; None if none were.
        """
        if dense is not None:
            self._num_strange = 0 if dense == self._keys else self._num_strange + 1
            if self._keys is None or self._num_strange == _LASTING:
                self._num_strange = 0
                self._make_buckets(dense)
        for key, passes in enumerate(self._passes) if self._came else ():
            self._absences[key] = 0 if passes else self._absences[key] + 1
            if passes or self._absences[key] == _LASTING:
                self._needed[key] = passes
        self._passes, self._came = [0] * len(self._passes), []
        self._missing = [sum([self._needed[key] > 0 for key in one.layout.keys]) for one in self._buckets]

    def close(self) -> None:
        self._sums.close()

    def _make_buckets(self, dense: frozenset[int]) -> None:
        """Lay out buckets in the order in which gradients came on the lowest rank that had any."""
        mine = torch.full((len(self._passes),), -1)
        mine[: len(self._came)] = torch.tensor(self._came, dtype=torch.int64)
        orders = [[key for key in one.tolist() if key >= 0] for one in self._group.all_gather(mine)]
        first = next((order for order in orders if order), None)
        if first is None:
            return
        behind = sorted(dense.difference(first), reverse=True)
        order = [key for key in first if key in dense] + behind
        layouts = lay_out(order, self._plan, self._group.buckets)
        self._keys = dense
        self._buckets = [_Bucket(layout, self._plan, self._device) for layout in layouts]
        self._bucket_of = {key: at for at, layout in enumerate(layouts) for key in layout.keys}

    def _arrived(self, key: int) -> None:
        """A backward pass has added to the gradient of a key (by index)."""
        if getattr(self._parameters[key], "grad_req", None) == "null":
            return
        with self._lock:
            self._passes[key] += 1
            if self._passes[key] == 1:
                self._came.append(key)
            if self._passes[key] == self._needed[key] and key in self._bucket_of:
                self._missing[self._bucket_of[key]] -= 1
                while self._sums.count < self.count and not self._missing[self._sums.count]:
                    if not self._send(self._buckets[self._sums.count]):
                        break

    @torch.no_grad()
    def _send(self, bucket: _Bucket) -> bool:
        """Begin the sum of a bucket; False where that is left to the step."""
        given = {key: self._parameters[key].grad for key in bucket.pieces if self._passes[key]}
        grads = [grad for grad in given.values() if grad is not None and grad.layout is torch.strided]
        if len(grads) < len(given):
            return False
        if len(given) < len(bucket.pieces):
            bucket.sent.zero_()
        if given:
            torch._foreach_copy_([bucket.pieces[key] for key in given], grads)
        self._sums.start(bucket.sum.copy_(bucket.sent))
        return True


def lay_out(order: Sequence[int], plan: Plan, sizes: Buckets) -> list[Layout]:
    """Fill buckets with keys (by index) in this order; each dtype has its own, in the order in which they are full."""
    ends, full = key_ends(plan), list[Layout]()
    filled: dict[str, list[int]] = {}
    room: dict[str, float] = {}
    for key in order:
        dtype = plan.specs[key].dtype
        nbytes = plan.specs[key].numel * compute_dtype(dtype).itemsize
        if dtype not in filled:
            filled[dtype], room[dtype] = [], _limit(sizes, FIRST)
        elif room[dtype] < nbytes:
            full.append(_layout(filled[dtype], ends, plan))
            filled[dtype], room[dtype] = [], _limit(sizes)
        filled[dtype].append(key)
        room[dtype] -= nbytes
    return full + [_layout(keys, ends, plan) for keys in filled.values()]


def _limit(sizes: Buckets, most: float = math.inf) -> float:
    """Return the bytes that a bucket may have; a gradient that has more is a bucket by itself."""
    if not sizes.coalesce:
        return 0.0
    nbytes = sizes.elements(1)
    return math.inf if nbytes is None else min(nbytes, most)


def _layout(keys: Collection[int], ends: Mapping[int, int], plan: Plan) -> Layout:
    """Place some keys (by index) of one dtype; neighbours in the arena are one run."""
    by_place = sorted(keys, key=lambda key: (plan.key_offsets[key], ends[key]))
    runs: list[tuple[int, int]] = []
    for key in by_place:
        begin = plan.key_offsets[key]
        if runs and runs[-1][1] == begin:
            begin = runs.pop()[0]
        runs.append((begin, ends[key]))
    return Layout(plan.specs[by_place[0]].dtype, by_place, runs)


def key_ends(plan: Plan) -> dict[int, int]:
    """Find where each key (by index) ends in its arena, with its padding."""
    by_place = sorted(range(len(plan.specs)), key=lambda key: (plan.specs[key].dtype, plan.key_offsets[key]))
    ends = {}
    for key, other in itertools.zip_longest(by_place, by_place[1:]):
        dtype = plan.specs[key].dtype
        is_last = other is None or plan.specs[other].dtype != dtype
        ends[key] = plan.arena_sizes[dtype] if is_last else plan.key_offsets[other]
    return ends


def _equal(one: Tensor, other: Tensor) -> bool:
    """Tell whether whole 64-byte lines hold the same bits."""
    if one.is_cpu:
        return same_bits(one, other)
    return torch.equal(one.view(torch.int64), other.view(torch.int64))
