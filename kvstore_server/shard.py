"""The numbers of one server's part: weights, optimizer state and sums, and what is done to them.

A Shard holds the slices of many *units*: a unit is what one plan lays out (one verb key, or all parameters of a
Trainer). Slices lie one after the other in flat memory, in the order in which their units came, each on a 64-byte line;
the place of a slice in that order is its *slot*. Optimizer state lies in memory of the same layout. So neighbours that
are updated alike, in whichever slice and unit, are summed and updated by one call, padding included. Slices stay the
unit of norms, of compression and of what is saved. A key lies in neighbouring slots, so its rows are one block.

Servers, `local` and Trainers that update in process use the same class. Nothing here knows a message, a clock or a
socket, and no bit depends on the order of arrival or on the number of servers.
"""

from __future__ import annotations

import sys
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from kvstore_server.errors import OptimizerError, ProtocolError
from kvstore_server.norms import UNCHANGED, Decision, apply_decision, only_segments, partial_of_slice
from kvstore_server.optimizer import Optimizer, State, States, update_key, update_rows, update_run
from kvstore_server.optimizer.apply import moves_only_rows, takes_rows
from kvstore_server.optimizer.state import aligned_zeros
from kvstore_server.plan import Plan, Slice, TensorSpec, row_numel
from kvstore_server.reduction import (
    Contribution,
    Encoded,
    Part,
    RowSet,
    Run,
    Scratch,
    SparsePayload,
    compute_dtype,
    left_out_by_all,
    sum_into,
    sum_rows_of,
    torch_dtype,
)
from kvstore_server.row_changes import RowChanges, Rows

Hypers = Sequence[Mapping[str, Any]]
"""By index of the key: the optimizer's numbers, multipliers applied. Keys with equal numbers may share a mapping."""
Updater = Callable[[str, Tensor, Tensor], None]
"""`updater(key, merged, stored)` changes `stored` in place."""
Present = np.ndarray[Any, np.dtype[np.bool_]] | None
"""Of neighbouring segments, which are updated; None: all."""

_AT_ONCE = 256 * 1024
"""Elements that are summed before they are updated, so that the sum is still in the cache."""


class Leases(Protocol):
    """Knows which buffers are still being sent, and so may not be written."""

    def is_busy(self, buffer: Tensor) -> bool: ...


class Partial(NamedTuple):
    """What is told of the sum of one slice."""

    slice: int
    value: float
    is_finite: bool


class HeldSum(NamedTuple):
    """A sum that waits for a decision, and its partial norms by slice."""

    total: Contribution
    partials: tuple[Partial, ...]


@dataclass
class _Block:
    """Flat memory of one dtype, and the segments in it."""

    dtype: str
    weights: Tensor
    states: States
    used: int = 0
    """Elements that are given to slots."""
    ends: list[int] = field(default_factory=list)
    """Of each segment, where its padding ends."""
    keys: list[int] = field(default_factory=list)
    """Of each segment, as the Shard numbers keys."""
    key_starts: list[int] = field(default_factory=list)
    """Of each segment, where it begins in its key."""
    hypers: list[Mapping[str, Any]] = field(default_factory=list)
    """Of each segment, those of the last update."""
    hyper_ids: np.ndarray[Any, np.dtype[np.int64]] = field(default_factory=lambda: np.zeros(0, np.int64))
    sums: Tensor | None = None
    """Sums that are kept."""


class _Slot(NamedTuple):
    piece: Slice
    unit: Unit
    block: _Block
    start: int
    """In the block, in elements."""
    first: int
    """Its first segment in the block."""

    @property
    def last(self) -> int:
        """The segment behind its last one."""
        return self.first + len(self.piece.segments)


@dataclass(eq=False)
class Unit:
    """The slices that one plan gives to this server."""

    plan: Plan
    server: int
    first: int
    """Its first slot."""
    first_key: int
    """The number of the plan's first key among those of the Shard."""
    slices: tuple[Slice, ...]
    slots: dict[int, int]
    """Slice → slot."""
    keys: frozenset[int]
    """The keys (by index in the plan) of which there is something here."""
    changes: RowChanges
    undo: _Undo | None = None
    """How to take the last update back."""
    reads: dict[int, list[Tensor]] = field(default_factory=dict)
    """Rank → the weights that it was sent last, for optimizers that make up for what others have changed since."""
    hypers: Hypers | None = None

    @property
    def end(self) -> int:
        """The slot behind its last one."""
        return self.first + len(self.slices)


class _Undo(NamedTuple):
    """What a unit looked like before its last update."""

    weights: list[Tensor]
    states: list[States]
    counts: np.ndarray[Any, np.dtype[np.int64]]


class _Home(NamedTuple):
    """Where a key lies: neighbouring segments of one block, in neighbouring slots."""

    unit: Unit
    slot: int
    end_slot: int
    block: _Block
    first: int
    last: int
    part: slice
    """Its elements in the block."""
    width: int
    """Elements of a row, at least 1."""

    @property
    def key(self) -> int:
        return self.block.keys[self.first]

    @property
    def spec(self) -> TensorSpec:
        return self.unit.plan.specs[self.key - self.unit.first_key]


class _Span(NamedTuple):
    """Neighbouring slots to which the same ranks contribute."""

    first: int
    end: int
    given: list[tuple[Contribution, Run | None]]
    """None: the rank has only rows."""
    sparse: Sequence[_Home] = ()
    """The keys of which a rank gave rows that count as dense numbers."""


class Shard:
    """Weights, optimizer state and arithmetic of the slices of many units.

    Args:
        leases: Weights that these call busy are not written: the Shard goes on with a copy.
    """

    def __init__(self, leases: Leases | None = None) -> None:
        self.units: list[Unit] = []
        self._leases = leases
        self._slots: list[_Slot] = []
        self._ends: list[int] = []
        """Of each slot, where it ends in its block."""
        self._visible: list[Tensor] = []
        """Of each slot, its weights without padding."""
        self._moved: dict[int, Tensor] = {}
        """Slot → its weights, while those in the block are being sent."""
        self._blocks: dict[str, _Block] = {}
        self._homes: dict[int, _Home] = {}
        self._counts = np.zeros(0, np.int64)
        """Updates of each key since the optimizer was set, on whichever server it lies."""
        self._notes_changes = False
        self._scratch = Scratch()

    def add(self, plan: Plan, server: int = 0, memory: Mapping[str, Tensor] | None = None) -> Unit:
        """Take in the slices of a plan that lie on `server`, with weights of zero.

        Args:
            memory: dtype → the flat memory in which the weights are to lie: the arenas of a plan for one server.
        """
        slices, first_key = plan.slices_of(server), len(self._counts)
        keys = frozenset(segment.key for piece in slices for segment in piece.segments)
        slots = {piece.index: len(self._slots) + at for at, piece in enumerate(slices)}
        unit = Unit(plan, server, len(self._slots), first_key, slices, slots, keys, RowChanges(slices))
        blocks = self._blocks_for(slices, memory)
        for piece in slices:
            self._add_slot(unit, piece, blocks[piece.dtype])
        for block in blocks.values():
            block.hyper_ids = np.zeros(len(block.keys), np.int64)
            block.hypers += [{}] * (len(block.keys) - len(block.hypers))
        for one in self.units:
            one.hypers = None
        self._counts = np.concatenate([self._counts, np.zeros(len(plan.specs), np.int64)])
        self.units.append(unit)
        return unit

    def _blocks_for(self, slices: Sequence[Slice], memory: Mapping[str, Tensor] | None) -> dict[str, _Block]:
        """The memory for some slices, by dtype: what is left of the last block, or a new one."""
        sizes: dict[str, int] = {}
        for piece in slices:
            sizes[piece.dtype] = sizes.get(piece.dtype, 0) + piece.length
        found = {}
        for dtype, size in sizes.items():
            block = self._blocks.get(dtype) if memory is None else None
            if block is None or block.used + size > block.weights.numel():
                if memory is not None:
                    weights = memory[dtype]
                else:
                    # Room for as much again, which takes no memory before it is written.
                    weights = aligned_zeros(max(size, 2 * block.used if block else 0), torch_dtype(dtype))
                states = States(dtype, weights.numel(), device=weights.device)
                block = self._blocks[dtype] = _Block(dtype, weights, states)
            found[dtype] = block
        return found

    def _add_slot(self, unit: Unit, piece: Slice, block: _Block) -> None:
        number, first = len(self._slots), len(block.keys)
        start = block.used
        block.states.add([(start + s.start, s.numel) for s in piece.segments])
        starts = [start + s.start for s in piece.segments]
        block.ends += [*starts[1:], start + piece.length]
        for at, segment in enumerate(piece.segments):
            key = unit.first_key + segment.key
            block.keys.append(key)
            block.key_starts.append(segment.key_start)
            begin, home = start + segment.start, self._homes.get(key)
            if home is not None:
                begin = home.part.start
            self._homes[key] = _Home(
                unit,
                number if home is None else home.slot,
                number + 1,
                block,
                first + at if home is None else home.first,
                first + at + 1,
                slice(begin, start + segment.start + segment.numel),
                max(row_numel(unit.plan.specs[segment.key]), 1),
            )
        block.used += piece.length
        self._slots.append(_Slot(piece, unit, block, start, first))
        self._ends.append(block.used)
        self._visible.append(block.weights[start : start + piece.used])

    def contribution(
        self,
        unit: Unit,
        payloads: Mapping[int, Tensor | Encoded | SparsePayload],
        scale: float,
        absent: frozenset[int],
    ) -> Contribution:
        """What a rank gave to the slices of a unit, each by itself; `absent` are keys by their index in the plan."""
        runs, found = [], dict[int, list[RowSet]]()
        for index, payload in sorted(payloads.items()):
            slot = unit.slots[index]
            dense = payload.dense if isinstance(payload, SparsePayload) else payload
            if isinstance(payload, SparsePayload):
                for position, rows in payload.rows.items():
                    segment = unit.plan.slices[index].segments[position]
                    key, width = unit.first_key + segment.key, rows.values.shape[1]
                    start = self._slots[slot].start + segment.start - self._homes[key].part.start
                    found.setdefault(key, []).append(RowSet(rows.ids + start // max(width, 1), rows.values))
            if dense is not None:
                runs.append(Run(slot, slot + 1, dense))
        rows_of = {
            key: parts[0]
            if len(parts) == 1
            else RowSet(torch.cat([p.ids for p in parts]), torch.cat([p.values for p in parts]))
            for key, parts in found.items()
        }
        if unit.first_key:
            absent = frozenset(unit.first_key + key for key in absent)
        return Contribution(runs, scale, absent, rows_of)

    def runs_of(self, unit: Unit, arenas: Mapping[str, Tensor], without: Collection[int] = ()) -> list[Run]:
        """Numbers for the slices of a unit, laid out as a plan for one server says.

        Args:
            without: Keys that may be left out, where a slice holds nothing else.
        """
        homes = [home for home in map(self._homes.get, without) if home is not None]
        alone = sorted((h.slot, h.end_slot) for h in homes if len(self._slots[h.slot].piece.segments) == 1)
        runs: list[Run] = []
        for first, end in zip(
            [unit.first, *(e for _, e in alone)], [*(f for f, _ in alone), unit.end], strict=True
        ):
            for number in range(first, end):
                slot = self._slots[number]
                if runs and runs[-1].end == number and self._slots[number - 1].block is slot.block:
                    runs[-1] = runs[-1]._replace(end=number + 1)
                else:
                    runs.append(Run(number, number + 1, arenas[slot.block.dtype][slot.piece.offset :]))
        return runs

    def visible(self, unit: Unit, index: int) -> Tensor:
        """The weights of a slice without its padding, as they are sent; not a copy."""
        return self._visible[unit.slots[index]]

    def rows_of(self, unit: Unit, index: int, position: int) -> Tensor:
        """The rows of the part of a key that a slice has at a position; not a copy.

        Raises:
            ProtocolError: there is no such slice here, or it has no such rows.
        """
        slot = unit.slots.get(index)
        piece = None if slot is None else self._slots[slot].piece
        if slot is None or piece is None or not 0 <= position < len(piece.segments):
            raise ProtocolError(f"this server has no slice {index} with a segment {position}")
        segment = piece.segments[position]
        width = row_numel(unit.plan.specs[segment.key])
        if not width or segment.numel % width or segment.key_start % width:
            raise ProtocolError(f"slice {index} has no whole rows of {unit.plan.specs[segment.key].key!r}")
        return self._visible[slot][segment.start : segment.start + segment.numel].view(-1, width)

    def changed_since(self, unit: Unit, index: int, held: int, version: int) -> Rows | None:
        """Which rows of a slice have changed; see `RowChanges.since`."""
        self._notes_changes = True
        return unit.changes.since(index, held, version)

    def assign(self, unit: Unit, values: Mapping[int, Tensor]) -> None:
        """Replace the weights of the given slices."""
        for index, payload in values.items():
            unit.changes.note(index)
            slot = unit.slots[index]
            self._make_writable(slot)
            self._visible[slot].copy_(payload)

    @torch.no_grad()
    def assign_sum(self, contributions: Sequence[Contribution]) -> None:
        """Without an optimizer the sum replaces the weights; keys that every rank left out stay.

        So do the other rows of a key of which all ranks gave only rows.
        """
        by_rows = self._given_as_rows(contributions)
        for key in by_rows:
            rows = self._sum_of_rows(key, contributions)
            weight, put_back = self._lent_key(key)
            weight.view(-1, rows.values.shape[1]).index_copy_(0, rows.ids, rows.values.to(weight.dtype))
            put_back()
            self._note_rows(key, rows.ids)
        for spans in self._chunks(contributions, self._to_densify(contributions, by_rows), False):
            block, part = self._place_of(spans)
            weight, put_back = self._lent(spans[0].first, spans[-1].end)
            present = self._present(spans, by_rows)
            is_direct = present is None and weight.dtype == compute_dtype(block.dtype)
            total = self._total(spans, weight if is_direct else None)
            if present is None and not is_direct:
                weight.copy_(total)
            elif present is not None:
                first = self._slots[spans[0].first].first
                for at in np.flatnonzero(present).tolist():
                    start, numel = block.states.segments[first + at]
                    own = slice(start - part.start, start - part.start + numel)
                    weight[own].copy_(total[own])
            put_back()
            self._note_dense(spans, present)

    def update(
        self,
        contributions: Sequence[Contribution],
        optimizer: Optimizer,
        hypers: Sequence[Hypers],
        units: Sequence[Unit] | None = None,
        decision: Decision = UNCHANGED,
    ) -> None:
        """Sum the contributions, multiply and clip as decided, and apply the optimizer.

        Args:
            hypers: Of each unit.
            units: Those that take part; None: all.

        Raises:
            OptimizerError: the optimizer raised; weights and state are as before.
        """
        units = self.units if units is None else units
        for unit in units:
            unit.undo = self._snapshot(unit) if optimizer.may_raise else None
        try:
            self._update(contributions, optimizer, zip(units, hypers, strict=True), decision)
        except Exception as error:
            if not optimizer.may_raise:
                raise
            for unit in units:
                self.undo(unit)
            raise OptimizerError(
                f"optimizer {optimizer.registered_name!r} raised {type(error).__name__}: {error}; nothing was applied"
            ) from error
        first = end = 0
        for unit in units:  # neighbours are counted together
            if unit.first_key != end:
                self._counts[first:end] += 1
                first = unit.first_key
            end = unit.first_key + len(unit.plan.specs)
        self._counts[first:end] += 1
        left_out = left_out_by_all(contributions)
        if left_out:
            self._counts[list(left_out)] -= 1

    @torch.no_grad()
    def _update(
        self,
        contributions: Sequence[Contribution],
        optimizer: Optimizer,
        hypers: Any,
        decision: Decision,
    ) -> None:
        for unit, own in hypers:
            if unit.hypers is not own:
                self._set_hypers(unit, own)
        by_rows = self._updated_by_rows(contributions, optimizer)
        for key in by_rows:
            rows = self._sum_of_rows(key, contributions)
            apply_decision(rows.values, decision)
            self._update_rows(optimizer, key, rows)
        whole = not optimizer.elementwise
        for spans in self._chunks(contributions, self._to_densify(contributions, by_rows), whole):
            present = self._present(spans, by_rows)
            if present is not None and not present.any():
                continue
            total = self._total(spans)
            apply_decision(total, decision)
            weight, put_back = self._lent(spans[0].first, spans[-1].end)
            if whole:
                self._update_keys(optimizer, spans, weight, total, present)
            else:
                self._update_runs(optimizer, spans, weight, total, present)
            put_back()
            self._note_dense(spans, present)

    def _update_runs(
        self, optimizer: Optimizer, spans: Sequence[_Span], weight: Tensor, grad: Tensor, present: Present
    ) -> None:
        """Update neighbouring segments with equal numbers together."""
        block, place = self._place_of(spans)
        first, end = self._slots[spans[0].first].first, self._slots[spans[-1].end - 1].last
        states = block.states
        for i, j in self._runs(block, first, end, present, optimizer.positioned):
            start, stop = states.segments[i][0], block.ends[j - 1]
            hyper = block.hypers[i]
            if optimizer.positioned:
                name = self._homes[block.keys[i]].spec.key
                hyper = {**hyper, "key": name, "first": block.key_starts[i]}
            part, own = slice(start, stop), slice(start - place.start, stop - place.start)

            def padding(i: int = i, j: int = j, start: int = start) -> list[slice]:
                rows = zip(states.segments[i:j], block.ends[i:j], strict=True)
                return [slice(at + numel - start, after - start) for (at, numel), after in rows]

            state = states.view(i, j, part)
            update_run(optimizer, weight[own], grad[own], state, hyper, padding)
            states.keep(i, j, part, state)

    def _runs(
        self, block: _Block, first: int, end: int, present: Present, is_each_alone: bool
    ) -> list[tuple[int, int]]:
        """Group neighbouring segments that are present and updated alike."""
        if is_each_alone:
            return [(i, i + 1) for i in range(first, end) if present is None or present[i - first]]
        if end - first == 1:
            return [(first, end)]
        steps, ids = block.states.steps[first:end], block.hyper_ids[first:end]
        entries = np.fromiter(map(id, block.states.entries[first:end]), np.int64, end - first)
        breaks = (steps[1:] != steps[:-1]) | (ids[1:] != ids[:-1]) | (entries[1:] != entries[:-1])
        if present is not None:
            breaks |= present[1:] != present[:-1]
        edges = [first, *(np.flatnonzero(breaks) + (first + 1)).tolist(), end]
        runs: list[tuple[int, int]] = []
        for i, j in pairwise(edges):
            if present is not None and not present[i - first]:
                continue
            if runs and runs[-1][1] == i and _alike(block, i - 1, i):
                runs[-1] = (runs[-1][0], j)
            else:
                runs.append((i, j))
        return runs

    def _update_keys(
        self, optimizer: Optimizer, spans: Sequence[_Span], weight: Tensor, grad: Tensor, present: Present
    ) -> None:
        """Update each key that is present as a whole."""
        block, place = self._place_of(spans)
        first, end = self._slots[spans[0].first].first, self._slots[spans[-1].end - 1].last
        for i in range(first, end):
            home = self._homes[block.keys[i]]
            if home.last != i + 1 or not (present is None or present[i - first]):
                continue
            spec = home.spec
            own = slice(home.part.start - place.start, home.part.stop - place.start)
            state, hyper = self._key_state(home, optimizer, spec.shape), {**block.hypers[i], "key": spec.key}
            update_key(optimizer, weight[own].view(spec.shape), grad[own].view(spec.shape), state, hyper)
            block.states.keep_key(home.first, home.last, home.part, state)

    def _update_rows(self, optimizer: Optimizer, key: int, rows: RowSet) -> None:
        """Update some rows of a key."""
        home = self._homes[key]
        states, width = home.block.states, home.width
        hyper = {**home.block.hypers[home.first], "key": home.spec.key}
        weight, put_back = self._lent_key(key)
        runs = [(home.first, home.last)]
        if optimizer.elementwise:  # one as well, unless state of another origin was loaded for some slices
            runs = self._runs(home.block, home.first, home.last, None, False)
        for i, j in runs:
            begin, end = states.segments[i][0], sum(states.segments[j - 1])
            first, last = (begin - home.part.start) // width, (end - home.part.start) // width
            ids, values = rows
            if len(runs) > 1:
                cut = slice(*torch.searchsorted(ids, torch.tensor([first, last])).tolist())
                ids, values = ids[cut] - first, values[cut]
            part, shape = slice(begin, end), (last - first, *home.spec.shape[1:])
            state = self._key_state(home._replace(first=i, last=j, part=part), optimizer, shape)

            def room(name: str, like: Tensor, part: slice = part) -> Tensor:
                return states.cleared(name, like, part)

            own = weight[begin - home.part.start : end - home.part.start].view(shape)
            update_rows(optimizer, own, ids, values, state, hyper, room)
            keep = states.keep if optimizer.elementwise else states.keep_key
            keep(i, j, part, state)
        put_back()
        self._note_rows(key, rows.ids if moves_only_rows(optimizer, hyper) else None)

    def _key_state(self, home: _Home, optimizer: Optimizer, shape: Sequence[int]) -> State:
        """The state of a key in its shape."""
        states = home.block.states
        state = states.view(home.first, home.last, home.part)
        if state.master is not None:
            state.master = state.master.view(tuple(shape))
        if optimizer.elementwise:
            state.values = {
                name: value.view(tuple(shape)) if isinstance(value, Tensor) and value.dim() else value
                for name, value in state.values.items()
            }
        return state

    def hold(
        self,
        contributions: Sequence[Contribution],
        optimizer: Optimizer,
        hypers: Hypers,
        norm_type: float,
        unit: Unit,
    ) -> HeldSum:
        """Sum the contributions to one unit and keep that; return it, as a contribution to `update`, and its norms.

        What all ranks gave as rows is measured as rows, whatever the optimizer makes of it: so does a worker that
        updates by itself. The memory is used again by the next call.
        """
        self._set_hypers(unit, hypers)
        by_rows = self._updated_by_rows(contributions, optimizer)
        given_as_rows = self._given_as_rows(contributions)
        rows = {key: self._sum_of_rows(key, contributions) for key in given_as_rows}
        measured = self._by_slot(rows)
        runs, partials = [], dict[int, Partial]()
        for spans in self._chunks(contributions, self._to_densify(contributions, by_rows), False):
            block, place = self._place_of(spans)
            if block.sums is None:
                block.sums = aligned_zeros(
                    block.weights.numel(), compute_dtype(block.dtype), block.weights.device
                )
            total = self._total(spans, block.sums[place])
            runs.append(Run(spans[0].first, spans[-1].end, total))
            present, first = self._present(spans, frozenset()), self._slots[spans[0].first].first
            for slot in range(spans[0].first, spans[-1].end):
                one = self._slots[slot]
                here = None if present is None else present[one.first - first : one.last - first]
                own = total[one.start - place.start :][: one.piece.used]
                sparse = measured.pop(slot, {})
                if here is None or here.any():
                    body = _only_dense(own, one.piece, here, sparse)
                    partials[slot] = Partial(one.piece.index, *partial_of_slice(body, sparse, norm_type))
        for slot, sparse in measured.items():
            partials[slot] = Partial(
                self._slots[slot].piece.index, *partial_of_slice(None, sparse, norm_type)
            )
        updated = {key: rows[key] for key in by_rows}
        held = Contribution(runs, 1.0, left_out_by_all(contributions), updated, is_scratch=True)
        return HeldSum(held, tuple(partials[slot] for slot in sorted(partials)))

    def call_updater(self, unit: Unit, contributions: Sequence[Contribution], updater: Updater) -> None:
        """Sum the contributions and let a user's function change each key; the unit holds all slices of its plan.

        Raises:
            OptimizerError: the function raised; the weights are as before.
        """
        unit.undo = self._snapshot(unit)
        unit.changes.note_all()
        left_out = left_out_by_all(contributions)
        sums: dict[int, Tensor] = {}
        for spans in self._chunks(contributions, self._to_densify(contributions, frozenset()), True):
            block, place = self._place_of(spans)
            total = self._total(spans).to(torch_dtype(block.dtype), copy=True)
            for slot in self._slots[spans[0].first : spans[-1].end]:
                for key in {unit.first_key + segment.key for segment in slot.piece.segments}:
                    part = self._homes[key].part
                    sums[key] = total[part.start - place.start : part.stop - place.start]
        try:
            for at, spec in enumerate(unit.plan.specs):
                key = unit.first_key + at
                if key in left_out:
                    continue
                if key not in self._homes:  # without elements
                    empty = torch.empty(spec.shape, dtype=torch_dtype(spec.dtype))
                    updater(spec.key, empty, empty.clone())
                    continue
                weight, put_back = self._lent_key(key)
                merged = sums.get(key)
                updater(
                    spec.key,
                    (torch.zeros_like(weight) if merged is None else merged).view(spec.shape),
                    weight.view(spec.shape),
                )
                put_back()
        except Exception as error:
            self.undo(unit)
            raise OptimizerError(f"the updater raised {type(error).__name__}: {error}") from error

    def undo(self, unit: Unit) -> None:
        """Take the last update of a unit back; allowed while it has an `undo`."""
        former = unit.undo
        assert former is not None
        unit.changes.note_all()
        for slot, weight, state in zip(
            range(unit.first, unit.end), former.weights, former.states, strict=True
        ):
            self._make_writable(slot)
            self.padded(slot).copy_(weight)
            self._replace_state(slot, state)
        self._counts[unit.first_key : unit.first_key + len(former.counts)] = former.counts
        unit.undo = None

    def get_state(self, unit: Unit, index: int) -> States:
        """Copy out the optimizer state of one slice.

        Raises:
            ProtocolError: the slice is not here.
        """
        return self._copied_state(self.slot_of(unit, index))

    def put_state(self, unit: Unit, index: int, state: States) -> None:
        """Replace the optimizer state of one slice. Raises as `get_state`."""
        self._replace_state(self.slot_of(unit, index), state)
        unit.undo = None

    def reset_states(self) -> None:
        """Drop all optimizer state."""
        for block in {id(slot.block): slot.block for slot in self._slots}.values():
            block.states.forget()
        self._counts[:] = 0

    @property
    def state_nbytes(self) -> int:
        """Bytes of the optimizer state."""
        return sum(block.states.nbytes for block in {id(s.block): s.block for s in self._slots}.values())

    def updates_after(self, unit: Unit, contributions: Sequence[Contribution]) -> int:
        """The number of updates of the key of a unit, on whichever server, that will have had most after this one.

        Every server of a table hears of every contribution which keys it has, also of those that lie on other servers;
        so all count alike. State that was loaded has counts of its own.
        """
        left_out = left_out_by_all(contributions)
        end = unit.first_key + len(unit.plan.specs)
        found = [
            c + (k not in left_out)
            for k, c in enumerate(self._counts[unit.first_key : end].tolist(), unit.first_key)
        ]
        for slot in self._slots[unit.first : unit.end]:
            states, keys = slot.block.states, slot.block.keys
            found += [int(states.steps[i]) + (keys[i] not in left_out) for i in range(slot.first, slot.last)]
        return max(found, default=0)

    def note_read(self, unit: Unit, ranks: Sequence[int]) -> None:
        """The present weights of a unit are those that these ranks have.

        A delay-compensated optimizer keeps in its state the weights that a gradient was computed with. Where ranks
        contribute by themselves these are other ones for each rank (Zheng et al., Asynchronous SGD with Delay
        Compensation, 2017). Costs the memory of one copy for each rank.
        """
        copies = [weight.clone() for weight in self._visible[unit.first : unit.end]]
        unit.reads |= dict.fromkeys(ranks, copies)

    def restore_read(self, unit: Unit, rank: int, name: str) -> None:
        """Put what a rank has read in place of the state of that name; where there is none yet, nothing has changed."""
        for slot, read in zip(self._slots[unit.first : unit.end], unit.reads.get(rank, ()), strict=False):
            kept = slot.block.states.tensors.get(name)
            if kept is not None:
                kept[slot.start : slot.start + len(read)].copy_(read)

    def slot_of(self, unit: Unit, index: int) -> int:
        """The slot of a slice. Raises ProtocolError if it is not here."""
        slot = unit.slots.get(index)
        if slot is None:
            raise ProtocolError(f"slice {index} of the table is not on this server")
        return slot

    def _copied_state(self, slot: int) -> States:
        one = self._slots[slot]
        return one.block.states.copy(one.first, one.last, slice(one.start, self._ends[slot]))

    def _replace_state(self, slot: int, state: States) -> None:
        one = self._slots[slot]
        one.block.states.replace(one.first, slice(one.start, self._ends[slot]), state)

    def _snapshot(self, unit: Unit) -> _Undo:
        slots = range(unit.first, unit.end)
        counts = self._counts[unit.first_key : unit.first_key + len(unit.plan.specs)]
        weights = [self.padded(slot).clone() for slot in slots]
        return _Undo(weights, [self._copied_state(slot) for slot in slots], counts.copy())

    def _set_hypers(self, unit: Unit, hypers: Hypers) -> None:
        """Note the numbers of each segment."""
        unit.hypers = hypers
        for slot in self._slots[unit.first : unit.end]:
            own = [hypers[segment.key] for segment in slot.piece.segments]
            slot.block.hypers[slot.first : slot.last] = own
            slot.block.hyper_ids[slot.first : slot.last] = list(map(id, own))

    # What the ranks gave.

    def _given_as_rows(self, contributions: Sequence[Contribution]) -> list[int]:
        """The keys of which all ranks that have them gave only rows."""
        return [
            key
            for key in sorted({key for given in contributions for key in given.rows})
            if not any(self._gives_all_of(given, key) for given in contributions)
        ]

    def _gives_all_of(self, given: Contribution, key: int) -> bool:
        """Whether a rank gave all rows of a key."""
        if key in given.rows or key in given.absent:
            return False
        slot = self._homes[key].slot
        at = bisect_right(given.runs, slot, key=lambda run: run.first) - 1
        return at >= 0 and slot < given.runs[at].end

    def _updated_by_rows(self, contributions: Sequence[Contribution], optimizer: Optimizer) -> list[int]:
        """Those among them that the optimizer updates by rows."""
        return [
            key
            for key in self._given_as_rows(contributions)
            if not optimizer.elementwise
            or takes_rows(optimizer, self._homes[key].block.hypers[self._homes[key].first])
        ]

    def _to_densify(self, contributions: Sequence[Contribution], by_rows: Collection[int]) -> list[_Home]:
        """Where rows count as a gradient that is zero elsewhere."""
        keys = {key for given in contributions for key in given.rows}
        return [self._homes[key] for key in sorted(keys.difference(by_rows))] if keys else []

    def _sum_of_rows(self, key: int, contributions: Sequence[Contribution]) -> RowSet:
        """The sum of rows, in memory that may be overwritten."""
        home = self._homes[key]
        given = [(one.rows[key], one.scale) for one in contributions if key in one.rows]
        num_rows = (home.part.stop - home.part.start) // home.width
        total = sum_rows_of(given, home.block.dtype, num_rows)
        if total.values is given[0][0].values and not contributions[0].is_scratch:
            return total._replace(values=total.values.clone())
        return total

    def _by_slot(self, rows: Mapping[int, RowSet]) -> dict[int, dict[int, RowSet]]:
        """Slot → position of a segment → its rows."""
        found: dict[int, dict[int, RowSet]] = {}
        for key, (ids, values) in rows.items():
            home, width = self._homes[key], self._homes[key].width
            segments = home.block.states.segments[home.first : home.last]
            edges = [(start - home.part.start) // width for start, _ in segments]
            cuts = torch.searchsorted(
                ids, torch.tensor([*edges, edges[-1] + segments[-1][1] // width])
            ).tolist()
            for at, slot in enumerate(range(home.slot, home.end_slot)):
                part = slice(cuts[at], cuts[at + 1])
                position = home.first + at - self._slots[slot].first
                found.setdefault(slot, {})[position] = RowSet(ids[part] - edges[at], values[part])
        return found

    def _spans(self, contributions: Sequence[Contribution], homes: Sequence[_Home]) -> Iterator[_Span]:
        """Cut what was given where the ranks that give it, or their runs, change; `homes` are of keys with rows."""
        bounds = [[(run.first, run.end) for run in given.runs] for given in contributions]
        if not homes and all(own == bounds[0] for own in bounds[1:]):
            for runs in zip(*(given.runs for given in contributions), strict=True):
                yield _Span(runs[0].first, runs[0].end, list(zip(contributions, runs, strict=True)))
            return
        pairs = [(home.slot, home.end_slot) for home in homes] + [pair for own in bounds for pair in own]
        cuts = sorted({edge for pair in pairs for edge in pair})
        at = [0] * len(contributions)
        for first, end in pairwise(cuts):
            sparse = [home for home in homes if home.slot <= first < home.end_slot]
            given: list[tuple[Contribution, Run | None]] = []
            for number, one in enumerate(contributions):
                while at[number] < len(one.runs) and one.runs[at[number]].end <= first:
                    at[number] += 1
                run = one.runs[at[number]] if at[number] < len(one.runs) else None
                if run is not None and run.first <= first:
                    given.append((one, run))
                elif any(home.key in one.rows for home in sparse):
                    given.append((one, None))
            if given:
                yield _Span(first, end, given, sparse)

    def _chunks(
        self, contributions: Sequence[Contribution], homes: Sequence[_Home], whole_keys: bool
    ) -> Iterator[list[_Span]]:
        """Neighbouring slots, as many as are summed at once; with `whole_keys` none ends within a key."""
        chunk: list[_Span] = []
        begin = 0
        for span in self._spans(contributions, homes):
            first = span.first
            while first < span.end:
                is_next = bool(chunk) and self._is_next(chunk[-1].end - 1, first)
                is_bound = is_next and whole_keys and self._continues_key(first)
                at_once = _AT_ONCE if self._slots[first].block.weights.device.type == "cpu" else sys.maxsize
                if chunk and not is_bound and not (is_next and self._ends[first] - begin <= at_once):
                    yield chunk
                    chunk = []
                if not chunk:
                    begin = self._slots[first].start
                end = bisect_right(self._ends, begin + at_once, first + 1, span.end)
                while whole_keys and end < span.end and self._continues_key(end):
                    end += 1
                chunk.append(span._replace(first=first, end=end))
                first = end
        if chunk:
            yield chunk

    def _is_next(self, slot: int, other: int) -> bool:
        """Whether a slot is the neighbour of another one in memory."""
        a, b = self._slots[slot], self._slots[other]
        return other == slot + 1 and a.block is b.block and self._ends[slot] == b.start

    def _continues_key(self, slot: int) -> bool:
        """Whether a slot goes on with the key of the one before."""
        return slot > 0 and self._slots[slot].piece.segments[0].key_start > 0

    def _place_of(self, spans: Sequence[_Span]) -> tuple[_Block, slice]:
        first = self._slots[spans[0].first]
        return first.block, slice(first.start, self._ends[spans[-1].end - 1])

    def _present(self, spans: Sequence[_Span], by_rows: Collection[int]) -> Present:
        """Which segments of neighbouring slots any rank contributed to, but for those keys; None: all."""
        if not by_rows and all(any(not one.absent for one, _ in span.given) for span in spans):
            return None
        found = []
        for span in spans:
            keys = self._slots[span.first].block.keys[
                self._slots[span.first].first : self._slots[span.end - 1].last
            ]
            is_full = any(not one.absent for one, _ in span.given)
            found += [
                key not in by_rows and (is_full or any(key not in one.absent for one, _ in span.given))
                for key in keys
            ]
        return None if all(found) else np.array(found)

    def _total(self, spans: Sequence[_Span], out: Tensor | None = None) -> Tensor:
        """The sum over ranks of neighbouring slots with zeros as padding, in the dtype to compute in.

        The result is `out`, scratch memory that the next call overwrites, or what a rank gave as scratch.
        """
        block, place = self._place_of(spans)
        dtype, length = compute_dtype(block.dtype), place.stop - place.start
        if out is None:
            lent = self._lent_sum(spans, dtype, length)
            if lent is not None:
                return lent
            out = self._scratch.get(block.weights, dtype, length)
        for span in spans:
            last = self._slots[span.end - 1]
            start, used = (
                self._slots[span.first].start - place.start,
                last.start + last.piece.used - place.start,
            )
            out[used : self._ends[span.end - 1] - place.start].zero_()
            parts = [self._part(span, one, run, used - start) for one, run in span.given]
            sum_into(out[start:used], block.dtype, parts, self._scratch)
        return out

    def _lent_sum(self, spans: Sequence[_Span], dtype: torch.dtype, length: int) -> Tensor | None:
        """The sum of neighbouring slots in the memory in which a single rank gave it, where that may be overwritten."""
        [span, *others], [(one, run), *more] = spans, spans[0].given
        if others or more or run is None or span.sparse or not one.is_scratch:
            return None
        if not isinstance(run.payload, Tensor) or run.payload.dtype != dtype:
            return None
        start = self._slots[span.first].start - self._slots[run.first].start
        lent = run.payload[start : start + length]
        if len(lent) < length:
            return None
        return lent.mul_(one.scale) if one.scale != 1.0 else lent

    def _part(self, span: _Span, one: Contribution, run: Run | None, numel: int) -> Part:
        """What one rank gave to the first `numel` elements of a span."""
        slot = self._slots[span.first]
        rows: list[tuple[slice, RowSet]] = []
        for home in span.sparse:
            found = one.rows.get(home.key)
            if found is None:
                continue
            width = max(found.values.shape[1], 1)
            low, high = max(home.part.start, slot.start), min(home.part.stop, slot.start + numel)
            first, end = (low - home.part.start) // width, (high - home.part.start) // width
            cut = slice(*torch.searchsorted(found.ids, torch.tensor([first, end])).tolist())
            if first < end:
                own = RowSet(found.ids[cut] - first, found.values[cut])
                rows.append((slice(low - slot.start, high - slot.start), own))
        if run is None:
            return Part(None, one.scale, rows)
        if isinstance(run.payload, Tensor):
            start = slot.start - self._slots[run.first].start
            return Part(run.payload[start : start + numel], one.scale, rows)
        # One bit cannot say zero, and a residual may speak up where the rank gave nothing.
        zeros, end = [], 0
        for segment in slot.piece.segments:
            zeros.append(slice(end, segment.start))
            end = segment.start + segment.numel
            if slot.unit.first_key + segment.key in one.absent:
                zeros.append(slice(segment.start, end))
        return Part(run.payload, one.scale, rows, [gap for gap in zeros if gap.start < gap.stop])

    # Weights that are written, and what is told of that.

    def _lent(self, first: int, end: int) -> tuple[Tensor, Callable[[], None]]:
        """The weights of neighbouring slots, to be written, and what is called when they are."""
        slots = range(first, end)
        for slot in slots if self._leases is not None else ():
            self._make_writable(slot)
        one = self._slots[first]
        weights = one.block.weights[one.start : self._ends[end - 1]]
        if not self._moved or not any(slot in self._moved for slot in slots):
            return weights, _do_nothing
        own = [self.padded(slot) for slot in slots]
        joined = torch.cat(own)

        def put_back() -> None:
            for target, source in zip(own, torch.split(joined, list(map(len, own))), strict=True):
                target.copy_(source)

        return joined, put_back

    def _lent_key(self, key: int) -> tuple[Tensor, Callable[[], None]]:
        """The weights of a key, flat, as `_lent`."""
        home = self._homes[key]
        weights, put_back = self._lent(home.slot, home.end_slot)
        start = self._slots[home.slot].start
        return weights[home.part.start - start : home.part.stop - start], put_back

    def padded(self, slot: int) -> Tensor:
        """The weights of a slot with their padding."""
        one = self._slots[slot]
        return self._moved.get(slot, one.block.weights[one.start : self._ends[slot]])

    def _make_writable(self, slot: int) -> None:
        """Leave a buffer that a slow peer is still being sent to it; go on with a copy as long as that takes."""
        visible, leases = self._visible[slot], self._leases
        if leases is None or (slot not in self._moved and not leases.is_busy(visible)):
            return
        one = self._slots[slot]
        home, own = one.block.weights[one.start : self._ends[slot]], self._moved.pop(slot, None)
        if own is not None and not leases.is_busy(home):
            home.copy_(own)
            self._visible[slot] = home[: one.piece.used]
            return
        if own is None or leases.is_busy(own):
            own = (home if own is None else own).clone()
        self._moved[slot] = own
        self._visible[slot] = own[: one.piece.used]

    def _note_dense(self, spans: Sequence[_Span], present: Present) -> None:
        """Say that all of some segments has changed."""
        if not self._notes_changes:
            return
        first = self._slots[spans[0].first].first
        for slot in self._slots[spans[0].first : spans[-1].end]:
            here = present[slot.first - first : slot.last - first].tolist() if present is not None else [True]
            slot.unit.changes.note_segments(slot.piece.index, here)

    def _note_rows(self, key: int, ids: Tensor | None) -> None:
        """Say that some rows of a key have changed; None: all."""
        if not self._notes_changes:
            return
        home = self._homes[key]
        if ids is None:
            for at, slot in enumerate(self._slots[home.slot : home.end_slot]):
                slot.unit.changes.note(slot.piece.index, home.first + at - slot.first)
            return
        for number, parts in self._by_slot(
            {key: RowSet(ids, ids.view(-1, 1).expand(-1, home.width))}
        ).items():
            for position, rows in parts.items():
                home.unit.changes.note(self._slots[number].piece.index, position, rows.ids)


def _do_nothing() -> None:
    pass


def _alike(block: _Block, a: int, b: int) -> bool:
    """Whether two segments have equal numbers and equal state but for what lies in memory."""
    states = block.states
    return bool(
        states.steps[a] == states.steps[b]
        and (block.hypers[a] is block.hypers[b] or block.hypers[a] == block.hypers[b])
        and (states.entries[a] is states.entries[b] or states.entries[a] == states.entries[b])
    )


def _only_dense(body: Tensor, piece: Slice, present: Present, rows: Mapping[int, RowSet]) -> Tensor | None:
    """The elements of a slice that count beside some rows, zero elsewhere; None where there are none."""
    dense = [(present is None or present[at]) and at not in rows for at in range(len(piece.segments))]
    if not any(dense):
        return None
    return body if all(dense) else only_segments(body, piece, dense)
