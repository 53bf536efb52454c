"""One round of a Trainer's gradients over the ranks of torch.distributed: sums are made in place, every rank updates.

A round is a small header from every rank, from which all of them conclude the same, and then collectives over the
gradients. The header is (int64, all ranks' equally long):

    what is called | digest of the hyper-parameters | scale, as bits | veto | for every key: rows, or DENSE, or ABSENT |
    for every bucket that goes during the backward pass: what has become of it
"""

from __future__ import annotations

import hashlib
import logging
import struct
from collections.abc import Collection, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from kvstore_server.codec import compute_dtype
from kvstore_server.hyper import AgreedOptions
from kvstore_server.optimizer import Optimizer
from kvstore_server.plan import Plan, row_numel
from kvstore_server.rows import RowSet
from kvtrainer.comm.rank_group import RankGroup
from kvtrainer.errors import ProtocolError
from kvtrainer.kvstore.replicas import sum_rows
from kvtrainer.memory.memory import DeviceMemory
from kvtrainer.memory.row_sparse import NO_TABLES, Tables
from kvtrainer.sync.buckets import BucketOverlap, key_ends
from kvtrainer.sync.exchange import Exchange, Gradients, Outcome, Shadowed

_log = logging.getLogger(__name__)

_DENSE, _ABSENT = -1, -2
_CALL, _HYPER, _SCALE, _VETO, _FIRST_KEY = range(5)
_CALLS = ("step", "set_data", "join")


class _Headers(NamedTuple):
    """The headers of all ranks before a round."""

    states: Tensor
    """(rank, key): the number of rows, or DENSE, or ABSENT."""
    scales: list[float]
    """Of the ranks that have data."""
    hyper: bytes = b""
    """The hyper-parameters of the lowest rank that has data, where another one has none."""
    is_over: bool = False
    """No rank has data."""


class GroupExchange(Exchange):
    """Over a RankGroup. Called by all ranks in the same order; a rank that does not come makes the others time out.

    Args:
        optimizer: which runs on every rank; ranks must have the same.
        overlaps: whether gradients are summed during the backward pass, see `listen`.
    """

    def __init__(
        self, group: RankGroup, plan: Plan, optimizer: Optimizer, name: str = "device", overlaps: bool = False
    ) -> None:
        self.num_workers = group.size
        self._group, self._plan = group, plan
        self._overlaps = overlaps
        self._overlap: BucketOverlap | None = None
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
            self.lendable = frozenset(self._keys)
        self._broadcast(weights)

    def listen(self, memory: DeviceMemory) -> None:
        """Sum gradients during the backward pass from now on, if that was asked for; collective, after `init`.

        What goes through memory does so in the step: there is no network that could work while the process computes.
        """
        if not self._overlaps:
            return
        if self._group.memory_for(memory.arena.device) is None:
            self._overlap = BucketOverlap(self._group, memory)
        elif not self._group.rank:
            _log.info(
                "overlap=True: ranks of one host sum gradients in memory, in step(), which takes less time"
            )

    def close(self) -> None:
        if self._overlap is not None:
            self._overlap.close()

    def run(self, grads: Gradients, weights: Mapping[str, Tensor]) -> Outcome:
        """Run one round; see Exchange.

        Raises:
            PlanMismatchError: ranks disagree on a hyper-parameter; on every rank, and nothing has changed.
        """
        self._hyper = grads.hyper or self._hyper
        return self._sum(grads, self._headers("step", grads))

    def _sum(self, grads: Gradients, headers: _Headers | None) -> Outcome:
        """Sum gradients of which the headers of all ranks are known, unless one vetoed; this ends the round."""
        overlap = self._overlap
        if headers is None or headers.is_over:
            if overlap is not None:
                overlap.end_round()
            return Outcome(frozenset(), skipped=headers is None)
        left_out = _keys((headers.states == _ABSENT).all(0))
        dense = _keys((headers.states == _DENSE).any(0))  # if one rank has all rows, the sum has, too
        is_common = len(set(headers.scales)) == 1
        before, after = (1.0, headers.scales[0]) if is_common else (grads.scale, 1.0)
        for key in dense.intersection(grads.rows):
            spec, at = self._plan.specs[key], self._plan.key_offsets[key]
            ids, values = grads.rows[key]
            place = grads.arenas[spec.dtype][at : at + spec.numel].view(-1, row_numel(spec))
            place[ids] = values.to(place.dtype)  # it was zero
        specs, offsets, rest = self._plan.specs, self._plan.key_offsets, dense
        if overlap is not None and is_common:
            rest = dense - overlap.take(grads.arenas, after)
        for dtype, flat in grads.arenas.items():
            lent = {offsets[key]: addends for key, addends in grads.lent.items() if specs[key].dtype == dtype}
            self._group.sum(flat, self._runs_of(dtype, rest, frozenset(lent)), before, after, lent)
        sparse = [key for key in range(len(self._plan.specs)) if key not in dense and key not in left_out]
        summed = {key: self._sum_rows(key, grads, headers, before, after) for key in sparse}
        if overlap is not None:
            overlap.end_round(dense)
        return Outcome(left_out, skipped=False, rows=summed)

    def shadow(self, weights: Mapping[str, Tensor], grads: Mapping[str, Tensor]) -> Shadowed:
        for flat in grads.values():
            flat.zero_()
        nothing = Gradients(grads, {}, 1.0, frozenset(self._keys))
        headers = self._headers("join", nothing)
        outcome = self._sum(nothing, headers)
        if headers is None:
            return Shadowed(outcome, b"", is_over=False)
        return Shadowed(outcome, headers.hyper, headers.is_over)

    def assign(self, weights: Mapping[str, Tensor], tables: Tables = NO_TABLES) -> None:
        self._headers("set_data", None)
        self._broadcast(weights)

    def _broadcast(self, weights: Mapping[str, Tensor]) -> None:
        for flat in weights.values():
            self._group.broadcast(flat)

    def _headers(self, call: str, grads: Gradients | None) -> _Headers | None:
        """Exchange headers; None if a rank vetoed. What ranks must not disagree on is checked."""
        states = [_ABSENT if grads is None else _DENSE] * len(self._plan.specs)
        for key in grads.absent if grads is not None else ():
            states[key] = _ABSENT
        for key, (ids, _) in grads.rows.items() if grads is not None else ():
            states[key] = len(ids)
        scale, veto = (1.0, False) if grads is None else (grads.scale, grads.veto)
        [digest] = struct.unpack("<q", hashlib.blake2b(self._hyper, digest_size=8).digest())
        [bits] = struct.unpack("<q", struct.pack("<d", scale))
        mine = [_CALLS.index(call), digest if grads is not None else 0, bits, veto, *states]
        found = self._gather_headers(mine, grads)
        calls = [_CALLS[at] for at in found[:, _CALL].tolist()]
        active = [rank for rank, name in enumerate(calls) if name != "join"]
        if len({calls[rank] for rank in active}) > 1 or (active and set(calls) == {"set_data", "join"}):
            raise ProtocolError(
                "ranks came to one exchange with different calls: "
                f"{', '.join(f'{name} on rank {rank}' for rank, name in enumerate(calls))}; call the Trainer's "
                "collective methods in the same order on every rank (add_param_group comes as set_data)"
            )
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
        return _Headers(found[:, _FIRST_KEY:], scales, hyper, is_over=not active)

    def _gather_headers(self, mine: list[int], grads: Gradients | None) -> Tensor:
        """Exchange headers, and end what ranks have begun during the backward pass, whatever the headers say."""
        num, overlap = len(mine), self._overlap
        if overlap is not None:
            given = Gradients({}, {}, 1.0, frozenset(self._keys)) if grads is None else grads
            mine = mine + overlap.states(given.arenas, given.rows, given.absent)
        found = torch.stack(self._group.all_gather(torch.tensor(mine, dtype=torch.int64)))
        if overlap is not None:
            overlap.settle(found[:, num:].tolist())
        return found[:, :num]

    @property
    def _keys(self) -> range:
        return range(len(self._plan.specs))

    def _runs_of(self, dtype: str, keys: frozenset[int], alone: frozenset[int]) -> list[tuple[int, int]]:
        """Return `_runs`, of the last step where they are the same: keys are looked at one by one."""
        known = self._known_runs.get(dtype)
        if known is None or known[:2] != (keys, alone):
            self._known_runs[dtype] = known = keys, alone, self._runs(dtype, keys, alone)
        return known[2]

    def _runs(self, dtype: str, keys: frozenset[int], alone: Collection[int]) -> list[tuple[int, int]]:
        """Find the parts of the arena with these keys; neighbours are one part, if they coalesce.

        Those that begin at the offsets `alone` are parts of their own.
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

    def _sum_rows(self, key: int, grads: Gradients, headers: _Headers, before: float, after: float) -> RowSet:
        """Sum one key of which every rank has only some rows: a left fold in the order of ranks."""
        spec, counts = self._plan.specs[key], headers.states[:, key].tolist()
        device = grads.arenas[spec.dtype].device
        none = RowSet(
            torch.zeros(0, dtype=torch.int64, device=device), torch.zeros(0, row_numel(spec), device=device)
        )
        mine = grads.rows.get(key, none)
        values = mine.values.to(compute_dtype(spec.dtype))
        mine = mine._replace(values=values * before if before != 1.0 else values)
        total = sum_rows(self._group.gather_rows(mine, counts), spec.dtype)
        return total._replace(values=total.values * after) if after != 1.0 else total


def _keys(mask: Tensor) -> frozenset[int]:
    return frozenset(mask.nonzero().flatten().tolist())
