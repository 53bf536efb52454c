"""One round of a Trainer's gradients over the ranks of torch.distributed: sums are made in place, every rank updates.

A round is a small header from every rank, from which all ranks conclude the same, and then collectives over the
gradients. The header is (int64, equally long on all ranks):

    call | digest of the hyper-parameters | scale, as bits | veto | for every key: number of rows, or DENSE, or
        ABSENT |
    for every bucket of the backward pass: its state

With `overlap=True` buckets are summed while the backward pass still computes others, each when all of its gradients
are there, as in DDP. Ranks must begin the same sums in the same order, although in one round they may have different
gradients, or none. So the order of the buckets is common: each rank begins with the first and never skips one. The
header tells how far every rank has come, and which sums are not of what it gives now. Sums that a rank has not begun
it then begins with zeros, so that all of them end; what is not the sum of every rank's present gradient is summed
again.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
import math
import struct
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kvstore_server.codec import compute_dtype, torch_dtype
from kvstore_server.engine.agreed_options import AgreedOptions
from kvstore_server.optimizer import Optimizer
from kvstore_server.plan import Plan, row_numel
from kvstore_server.protocol.rows import RowSet, same_bits
from kvtrainer.client.contribution import Contribution
from kvtrainer.client.replica_sums import sum_replica_rows
from kvtrainer.client.rounds import EagerPushMonitor
from kvtrainer.errors import ProtocolError
from kvtrainer.memory.memory import DeviceMemory
from kvtrainer.memory.row_sparse import NO_TABLES, Tables
from kvtrainer.ranks.process_group import Buckets, PendingGroupSums, RankGroup
from kvtrainer.sync.exchange import Exchange, JoinedRound, RoundResult, keys_sent_without_copy
from kvtrainer.sync.step_guard import StepGuard

_log = logging.getLogger(__name__)

_DENSE, _ABSENT = -1, -2
_CALL, _HYPER, _SCALE, _VETO, _FIRST_KEY = range(5)
_CALLS = ("step", "set_data", "join")


class _RankHeaders(NamedTuple):
    states: Tensor
    """(rank, key): the number of rows, or DENSE, or ABSENT."""
    scales: list[float]
    """Scales of the ranks that have data."""
    hyper: bytes = b""
    """The hyper-parameters of the lowest rank that has data, if another one has none."""
    is_over: bool = False
    """No rank has data."""


class RankExchange(Exchange):
    """Over a RankGroup. All ranks make the same calls in the same order; if one does not, the others time out.

    The optimizer runs on every rank. With `overlaps` gradients are summed during the backward pass, see `listen`.
    """

    def __init__(
        self, group: RankGroup, plan: Plan, optimizer: Optimizer, name: str = "device", overlaps: bool = False
    ) -> None:
        self._num_workers = group.size
        self._group, self._plan = group, plan
        self._overlaps = overlaps
        self._overlap: RankBucketOverlap | None = None
        if name == "nccl":
            self.refuses_rows = (
                "but kvstore 'nccl' does not support sparse gradients; use kvstore='device', or build the module with "
                "sparse=False"
            )
        self._optimizer = {
            "name": optimizer.registered_name,
            "multi_precision": getattr(optimizer, "multi_precision", None),
            "begin_num_update": optimizer.begin_num_update,
        }
        self._hyper = b""
        self._ends = key_ends(plan)
        self._known_runs: dict[str, tuple[frozenset[int], frozenset[int], list[tuple[int, int]]]] = {}

    def init(self, weights: Mapping[str, Tensor], tables: Tables = NO_TABLES) -> None:
        """Give every rank rank 0's weights.

        Raises:
            PlanMismatchError: ranks have different parameters or optimizers; on every rank.
        """
        specs = [[spec.key, list(spec.shape), spec.dtype, spec.group] for spec in self._plan.specs]
        buckets = self._group.buckets
        said = {"specs": specs, "optimizer": self._optimizer, "overlap": self._overlaps}
        self._group.agree(
            "Trainer", {**said, "bucket_size_mb": buckets.size_mb, "coalesce": buckets.coalesce}
        )
        self._group.is_agreed = True
        if any([self._group.memory_for(flat.device) is not None for flat in weights.values()]):
            self.zero_copy_keys = keys_sent_without_copy(self._plan, self._keys)
        self._broadcast(weights)

    def listen(self, memory: DeviceMemory) -> None:
        """Sum gradients during the backward pass from now on, if that was asked for; collective, after `init`.

        Sums through shared memory are made in the step: there is no network that could work while the process
        computes.
        """
        if not self._overlaps:
            return
        if self._group.memory_for(memory.arena.device) is None:
            self._overlap = RankBucketOverlap(self._group, memory)
        elif not self._group.rank:
            _log.info(
                "overlap=True: ranks of one host sum gradients in memory, in step(), which takes less time"
            )

    def close(self) -> None:
        if self._overlap is not None:
            self._overlap.close()

    def run(self, contribution: Contribution, weights: Mapping[str, Tensor], step: StepGuard) -> RoundResult:
        """Run one round; see `Exchange.run`.

        Raises:
            PlanMismatchError: ranks disagree on a hyper-parameter; on every rank, and nothing has changed.
        """
        self._hyper = contribution.hyper or self._hyper
        step.sent()
        return self._sum(contribution, self._headers("step", contribution))

    def _sum(self, contribution: Contribution, headers: _RankHeaders | None) -> RoundResult:
        overlap = self._overlap
        if headers is None or headers.is_over:
            if overlap is not None:
                overlap.end_round()
            return RoundResult(frozenset(), skipped=headers is None)
        # 1. What each key is on all ranks together, and where it is scaled: after the sum if all scales are equal.
        left_out = _keys_in_rank_mask((headers.states == _ABSENT).all(0))
        dense = _keys_in_rank_mask(
            (headers.states == _DENSE).any(0)
        )  # if one rank has all rows, the sum has, too
        is_common = len(set(headers.scales)) == 1
        before, after = (1.0, headers.scales[0]) if is_common else (contribution.scale, 1.0)
        [arenas] = contribution.values or ()
        # 2. Rows of a key that another rank has as a whole become a dense gradient.
        for (_, key), (ids, values) in contribution.rows.items():
            if key in dense:
                spec, at = self._plan.specs[key], self._plan.key_offsets[key]
                place = arenas[spec.dtype][at : at + spec.numel].view(-1, row_numel(spec))
                place[ids] = values.to(place.dtype)  # it was zero
        # 3. Dense sums, except for those that were made during the backward pass.
        specs, offsets, rest = self._plan.specs, self._plan.key_offsets, dense
        if overlap is not None and is_common:
            rest = dense - overlap.take(arenas, after)
        for dtype, flat in arenas.items():
            found = contribution.borrowed.items()
            borrowed = {offsets[key]: addends for key, addends in found if specs[key].dtype == dtype}
            self._group.sum(flat, self._runs_of(dtype, rest, frozenset(borrowed)), before, after, borrowed)
        # 4. Sums of rows.
        sparse = [key for key in range(len(self._plan.specs)) if key not in dense and key not in left_out]
        summed = {key: self._sum_rows(key, contribution, headers, before, after) for key in sparse}
        if overlap is not None:
            overlap.end_round(dense)
        return RoundResult(left_out, skipped=False, rows=summed)

    def run_without_data(
        self, weights: Mapping[str, Tensor], grads: Mapping[str, Tensor], client_state: bytes = b""
    ) -> JoinedRound:
        for flat in grads.values():
            flat.zero_()
        nothing = Contribution((), [grads], None, 1.0, absent=frozenset(self._keys))
        headers = self._headers("join", nothing)
        outcome = self._sum(nothing, headers)
        if headers is None:
            return JoinedRound(outcome, b"", is_over=False)
        return JoinedRound(outcome, headers.hyper, headers.is_over)

    def assign(
        self, weights: Mapping[str, Tensor], tables: Tables = NO_TABLES, client_state: bytes = b""
    ) -> None:
        self._headers("set_data", None)
        self._broadcast(weights)

    def _broadcast(self, weights: Mapping[str, Tensor]) -> None:
        for flat in weights.values():
            self._group.broadcast(flat)

    def _headers(self, call: str, grads: Contribution | None) -> _RankHeaders | None:
        # 1. This rank's header.
        states = [_ABSENT if grads is None else _DENSE] * len(self._plan.specs)
        for key in grads.absent if grads is not None else ():
            states[key] = _ABSENT
        for (_, key), (ids, _) in grads.rows.items() if grads is not None else ():
            states[key] = len(ids)
        scale, veto = (1.0, False) if grads is None else (grads.scale, grads.veto)
        [digest] = struct.unpack("<q", hashlib.blake2b(self._hyper, digest_size=8).digest())
        [bits] = struct.unpack("<q", struct.pack("<d", scale))
        mine = [_CALLS.index(call), digest if grads is not None else 0, bits, veto, *states]
        # 2. All ranks' headers. Ranks that have joined without data agree with any call but `set_data`.
        found = self._gather_headers(mine, grads)
        calls = [_CALLS[at] for at in found[:, _CALL].tolist()]
        active = [rank for rank, name in enumerate(calls) if name != "join"]
        if len({calls[rank] for rank in active}) > 1 or (active and set(calls) == {"set_data", "join"}):
            raise ProtocolError(
                "ranks came to one exchange with different calls: "
                f"{', '.join(f'{name} on rank {rank}' for rank, name in enumerate(calls))}; call the Trainer's "
                "collective methods in the same order on every rank (add_param_group comes as set_data)"
            )
        # 3. Digests differ: exchange the hyper-parameters themselves, for an error that names the difference.
        if len(set(found[active, _HYPER].tolist())) > 1:
            belief = AgreedOptions(self._plan)
            for rank, packed in enumerate(self._group.all_gather_bytes(self._hyper)):
                belief.set(rank, packed)
            belief.common(active)
        hyper = b""
        if active and len(active) < self.num_workers:
            hyper = self._group.all_gather_bytes(self._hyper)[active[0]]
        if found[:, _VETO].any():
            return None
        scales = [struct.unpack("<d", struct.pack("<q", bits))[0] for bits in found[active, _SCALE].tolist()]
        return _RankHeaders(found[:, _FIRST_KEY:], scales, hyper, is_over=not active)

    def _gather_headers(self, mine: list[int], grads: Contribution | None) -> Tensor:
        num, overlap = len(mine), self._overlap
        if overlap is not None:
            given = Contribution((), [{}], None, absent=frozenset(self._keys)) if grads is None else grads
            [arenas] = given.values or ()
            mine = mine + overlap.states(arenas, {key for _, key in given.rows}, given.absent)
        found = torch.stack(self._group.all_gather(torch.tensor(mine, dtype=torch.int64, device="cpu")))
        if overlap is not None:
            overlap.finish_sums(found[:, num:].tolist())
        return found[:, :num]

    @property
    def _keys(self) -> range:
        return range(len(self._plan.specs))

    def _runs_of(self, dtype: str, keys: frozenset[int], alone: frozenset[int]) -> list[tuple[int, int]]:
        known = self._known_runs.get(dtype)
        if known is None or known[:2] != (keys, alone):
            self._known_runs[dtype] = known = keys, alone, self._runs(dtype, keys, alone)
        return known[2]

    def _runs(self, dtype: str, keys: frozenset[int], alone: Collection[int]) -> list[tuple[int, int]]:
        """Return the ranges of the arena with these keys; neighbours are one range if they coalesce.

        Ranges that begin at the offsets `alone` stay apart.
        """
        runs: list[tuple[int, int]] = []
        specs, offsets = self._plan.specs, self._plan.key_offsets
        for at, end in sorted((offsets[key], self._ends[key]) for key in keys if specs[key].dtype == dtype):
            if at < end:
                is_next = self._group.buckets.coalesce and runs and runs[-1][1] == at
                is_apart = at in alone or (is_next and runs[-1][0] in alone)
                joined = runs.pop()[0] if is_next and not is_apart else at
                runs.append((joined, end))
        return runs

    def _sum_rows(
        self, key: int, grads: Contribution, headers: _RankHeaders, before: float, after: float
    ) -> RowSet:
        """Sum one key that came only as rows from all ranks: a left fold in the order of ranks."""
        spec, counts = self._plan.specs[key], headers.states[:, key].tolist()
        [arenas] = grads.values or ()
        device = arenas[spec.dtype].device
        none = RowSet(
            torch.zeros(0, dtype=torch.int64, device=device), torch.zeros(0, row_numel(spec), device=device)
        )
        mine = grads.rows.get((0, key), none)
        values = mine.values.to(compute_dtype(spec.dtype))
        mine = mine._replace(values=values * before if before != 1.0 else values)
        total = sum_replica_rows(self._group.gather_rows(mine, counts), spec.dtype)
        return total._replace(values=total.values * after) if after != 1.0 else total


def _keys_in_rank_mask(mask: Tensor) -> frozenset[int]:
    return frozenset(mask.nonzero().flatten().tolist())


# ---------------------------------------------------------------- during the backward pass

FIRST = 1024 * 1024
"""Bytes of the first bucket of a dtype, which is short so that it goes soon."""
_LASTING = 3
"""After this many rounds in a row a change is taken to last: buckets are made for the new set of keys, and a gradient
that did not come is not waited for any more."""
NOT_SENT, NOTHING, SAME, CHANGED = range(4)
"""States of a bucket in a header: its sum was not begun here; not begun, because this rank gives nothing; begun with
what this rank gives; begun with something else."""


class RankBucketLayout(NamedTuple):
    dtype: str
    keys: Sequence[int]
    """By index, in the order of the arena."""
    runs: Sequence[tuple[int, int]]
    """(begin, end) in the arena, in elements; one behind the other they are the bucket."""


class _RankBucket:
    def __init__(self, layout: RankBucketLayout, plan: Plan, device: torch.device) -> None:
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
        """Yield (range of the arena, its part of `mine`), where `mine` is `sent` or `sum`."""
        at = 0
        for begin, end in self.layout.runs:
            yield arena[begin:end], mine[at : at + end - begin]
            at += end - begin


class RankBucketOverlap:
    """Sums a Trainer's gradients over ranks as they become complete. All ranks make the same calls.

    A key whose gradient came in several backward passes in the last step is complete after as many of them in this
    one. The first steps show which gradients there are, and in what order.
    """

    def __init__(self, group: RankGroup, memory: DeviceMemory) -> None:
        self._group, self._plan = group, memory.plan
        self._parameters, self._device = memory.parameters, memory.arena.device
        self._sums = PendingGroupSums(group, self._device)
        count = len(memory.plan.specs)
        # What is known of the gradients, key by key.
        self._passes = [0] * count
        """In how many backward passes since the last step each key has come."""
        self._needed = [1] * count
        """After how many it is complete."""
        self._absences = [0] * count
        """In how many rounds in a row each has not come."""
        self._came: list[int] = []
        """The keys that have come since the last step, in this order."""
        self._keys: frozenset[int] | None = None
        """The keys in buckets; None before there are buckets."""
        self._num_strange = 0
        self._buckets: list[_RankBucket] = []
        self._bucket_of: dict[int, int] = {}
        self._missing: list[int] = []
        """How many keys of each bucket have yet to come."""
        self._usable: list[_RankBucket] = []
        self._monitor = EagerPushMonitor()
        # Of CUDA tensors another thread computes the gradients.
        self._lock = threading.Lock()
        memory.tracker.listen(self._on_gradient)

    @property
    def count(self) -> int:
        return len(self._buckets)

    def states(
        self, arenas: Mapping[str, Tensor], rows: Collection[int], absent: frozenset[int]
    ) -> list[int]:
        """Return the state of each bucket.

        Args:
            arenas: What this rank gives, zero where it gives nothing; empty if it gives nothing at all.
            rows: Keys (by index) given only as rows.
            absent: Keys that this rank does not give.
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
                is_same = all(_have_same_bits(*pair) for pair in bucket.pairs(arena, bucket.sent))
                states.append(SAME if is_same else CHANGED)
        return states

    def finish_sums(self, states: Sequence[Sequence[int]]) -> None:
        """End all sums that any rank has begun, given the states of all ranks; `take` then finds the sums."""
        # Ranks that have begun fewer sums take part in the others with zeros.
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
            self._monitor.count(bool(self._usable))

    @torch.no_grad()
    def take(self, arenas: Mapping[str, Tensor], factor: float) -> frozenset[int]:
        """Write the sums of every rank's present gradients, scaled, to the arenas; returns their keys (by index)."""
        found: set[int] = set()
        for bucket in self._usable:
            if factor != 1.0:
                bucket.sum.mul_(factor)
            for target, total in bucket.pairs(arenas[bucket.layout.dtype], bucket.sum):
                target.copy_(total)
            found.update(bucket.layout.keys)
        return frozenset(found)

    def end_round(self, dense: frozenset[int] | None = None) -> None:
        """Begin the next round. `dense` are the keys (by index) summed as a whole in this one; None if there was no
        sum.
        """
        # 1. Make buckets for another set of keys, if it has lasted for some rounds.
        if dense is not None:
            self._num_strange = 0 if dense == self._keys else self._num_strange + 1
            if self._keys is None or self._num_strange == _LASTING:
                self._num_strange = 0
                self._make_buckets(dense)
        # 2. Learn after how many backward passes a gradient is complete.
        for key, passes in enumerate(self._passes) if self._came else ():
            self._absences[key] = 0 if passes else self._absences[key] + 1
            if passes or self._absences[key] == _LASTING:
                self._needed[key] = passes
        self._passes, self._came = [0] * len(self._passes), []
        self._missing = [sum([self._needed[key] > 0 for key in one.layout.keys]) for one in self._buckets]

    def close(self) -> None:
        self._sums.close()

    def _make_buckets(self, dense: frozenset[int]) -> None:
        mine = torch.full((len(self._passes),), -1, device="cpu")
        mine[: len(self._came)] = torch.tensor(self._came, dtype=torch.int64, device="cpu")
        orders = [[key for key in one.tolist() if key >= 0] for one in self._group.all_gather(mine)]
        first = next((order for order in orders if order), None)
        if first is None:
            return
        behind = sorted(dense.difference(first), reverse=True)
        order = [key for key in first if key in dense] + behind
        layouts = lay_out_rank_buckets(order, self._plan, self._group.buckets)
        self._keys = dense
        self._buckets = [_RankBucket(layout, self._plan, self._device) for layout in layouts]
        self._bucket_of = {key: at for at, layout in enumerate(layouts) for key in layout.keys}

    def _on_gradient(self, key: int) -> None:
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
    def _send(self, bucket: _RankBucket) -> bool:
        """Begin the sum of a bucket; False if that is left to the step."""
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


def lay_out_rank_buckets(order: Sequence[int], plan: Plan, sizes: Buckets) -> list[RankBucketLayout]:
    """Fill buckets with keys (by index) in this order. Each dtype has its own; full ones come first."""
    ends, full = key_ends(plan), list[RankBucketLayout]()
    filled: dict[str, list[int]] = {}
    room: dict[str, float] = {}
    for key in order:
        dtype = plan.specs[key].dtype
        nbytes = plan.specs[key].numel * compute_dtype(dtype).itemsize
        if dtype not in filled:
            filled[dtype], room[dtype] = [], _rank_bucket_limit(sizes, FIRST)
        elif room[dtype] < nbytes:
            full.append(_rank_bucket_layout(filled[dtype], ends, plan))
            filled[dtype], room[dtype] = [], _rank_bucket_limit(sizes)
        filled[dtype].append(key)
        room[dtype] -= nbytes
    return full + [_rank_bucket_layout(keys, ends, plan) for keys in filled.values()]


def _rank_bucket_limit(sizes: Buckets, most: float = math.inf) -> float:
    """Return the bytes that a bucket may have; a longer gradient is a bucket of its own."""
    if not sizes.coalesce:
        return 0.0
    nbytes = sizes.elements(1)
    return math.inf if nbytes is None else min(nbytes, most)


def _rank_bucket_layout(keys: Collection[int], ends: Mapping[int, int], plan: Plan) -> RankBucketLayout:
    by_place = sorted(keys, key=lambda key: (plan.key_offsets[key], ends[key]))
    runs: list[tuple[int, int]] = []
    for key in by_place:
        begin = plan.key_offsets[key]
        if runs and runs[-1][1] == begin:
            begin = runs.pop()[0]
        runs.append((begin, ends[key]))
    return RankBucketLayout(plan.specs[by_place[0]].dtype, by_place, runs)


def key_ends(plan: Plan) -> dict[int, int]:
    by_place = sorted(range(len(plan.specs)), key=lambda key: (plan.specs[key].dtype, plan.key_offsets[key]))
    ends = {}
    for key, other in itertools.zip_longest(by_place, by_place[1:]):
        dtype = plan.specs[key].dtype
        is_last = other is None or plan.specs[other].dtype != dtype
        ends[key] = plan.arena_sizes[dtype] if is_last else plan.key_offsets[other]
    return ends


def _have_same_bits(one: Tensor, other: Tensor) -> bool:
    if one.is_cpu:
        return same_bits(one, other)
    return torch.equal(one.view(torch.int64), other.view(torch.int64))
