"""Memory of a Shard's slices: their layout, who may write to it, and which rows have changed.

Slices of one dtype lie consecutively in blocks of flat memory, each on a 64-byte line, in the order in which they were
added; the index of a slice in that order is its slot. A key is in adjacent slots of one block.

Large blocks are in shared memory where possible, so that workers map the weights instead of receiving them. Behind the
weights are two counters for each 64 KiB: writes begun and writes ended (a seqlock), by which a worker recognises
weights that are being written. `borrow` counts the beginning of a write and `settle` its end.

Weights that are being sent to a slow peer must not change. While `Leases` reports such a reader, the Shard continues
on a copy of the slot (`make_writable`), and returns to the block when the reader is done. A moved slot cannot be
mapped.

With a `Journal`, weights and optimizer state are in memory that outlives the process. `borrow` protects weights before
they are written, and a moved slot continues in a *spare*, memory with the layout of its block that outlives the
process, too.

`StoredRowChanges` records which rows have changed since a version, so that workers are sent only these.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from kvstore_server.codec import torch_dtype
from kvstore_server.durable.journal import Journal
from kvstore_server.durable.memory import typed_durable_memory
from kvstore_server.optimizer import States
from kvstore_server.optimizer.state import aligned_zeros
from kvstore_server.plan import LONG, PAGE, SIZES, Plan, Slice, TensorSpec, group_slices, row_numel
from kvstore_server.transport.arena import Leases

Hypers = Sequence[Mapping[str, Any]]
"""By index of the key: the optimizer's options with multipliers applied. Keys with equal options may share a
mapping.
"""
Counts = np.ndarray[Any, np.dtype[np.int64]]


Rows = Mapping[int, Tensor | None]
"""Position of a segment → ids of rows, counted from the key's first row here, distinct and ascending; None: all
rows.
"""

COUNTER_BYTES = 16
"""Bytes of write counters for each LONG bytes of mapped weights."""
_WORTH_A_GAP = 4 * LONG
"""From this size a slice is moved to a page boundary if needed: the gap costs one more call, less than copying the
slice to workers.
"""
_UNKNOWN = -1
"""The weights of a slot before its last change are not known."""
_COPIED, _ROWS, _SAME, _KINDS = 0, 1, 2, 4
"""How they are: all of them in the shadow, some rows, or unchanged. What is stored is the change times `_KINDS`, plus
this."""
VERSIONS_KEPT = 256
"""How many changes of a key are stored one by one."""


class StoredRowChanges:
    """Which rows of a table have changed since a worker was sent its weights.

    Changes are recorded as they are made, and get the table's version when `since` is called. Row ids are stored as
    long as sending rows is cheaper than sending the whole key; older changes, and changes of all rows, make it be sent
    whole. The result may contain rows that have not changed, but never lacks one that has. Nothing is recorded before
    the first `since`.

    Args:
        key_slices: The slices here that workers hold copies of, by first key.
    """

    def __init__(self, key_slices: Mapping[int, Sequence[Slice]]) -> None:
        self._rooms = {key: sum([slice_.used for slice_ in slices]) for key, slices in key_slices.items()}
        """Key → its elements, which is also the most ids that are stored."""
        self._is_wanted = False
        self._pending: dict[int, list[Rows] | None] = {}
        """Key → changes without a version yet; None: the whole key."""
        self._entries: dict[int, deque[tuple[int, Rows]]] = {}
        """Key → (version, rows changed since the version before), ascending."""
        self._kept: dict[int, int] = {}
        """Key → how many ids are in its entries."""
        self._floors: dict[int, int] = {}
        """Key → the version before which changes are unknown."""

    def record(self, key: int, position: int | None = None, ids: Tensor | None = None) -> None:
        """Record that rows of a segment have changed, `ids` as in `Rows`; without a position the whole key has."""
        if self._is_wanted and key in self._rooms:
            before = self._pending.setdefault(key, [])
            if position is None or before is None:
                self._pending[key] = None
            elif ids is None or len(ids):
                before.append({position: ids})

    def begin(self, version: int) -> None:
        """Record changes from a version on."""
        self._is_wanted = True
        self._floors = dict.fromkeys(self._rooms, version)

    def record_all(self) -> None:
        for key in self._rooms:
            self.record(key)

    def since(self, key: int, held: int, version: int) -> Rows | None:
        """Return the rows of a key that changed from version `held` to the current one; None: send the whole key."""
        if not self._is_wanted:
            self.begin(version)
        for changed, noted in self._pending.items():  # changes so far belong to the current version
            entries = self._entries.setdefault(changed, deque())
            if noted is None:
                entries.clear()
                self._kept[changed] = 0
                self._floors[changed] = version
            elif noted:
                entries.append((version, _union_stored_rows(noted)))
                self._kept[changed] = self._kept.get(changed, 0) + _count_stored_rows(entries[-1][1])
                while self._kept[changed] > self._rooms[changed] or len(entries) > VERSIONS_KEPT:
                    self._floors[changed], oldest = entries.popleft()
                    self._kept[changed] -= _count_stored_rows(oldest)
        self._pending.clear()
        if held == version:
            return {}
        if held < self._floors[key]:
            return None
        newest_first = reversed(self._entries.get(key, ()))
        return _union_stored_rows(
            [rows for _, rows in itertools.takewhile(lambda entry: entry[0] > held, newest_first)]
        )


def _count_stored_rows(rows: Rows) -> int:
    return sum(1 if ids is None else len(ids) for ids in rows.values())


def _union_stored_rows(parts: Sequence[Rows]) -> Rows:
    if len(parts) == 1:
        return parts[0]
    found: dict[int, list[Tensor] | None] = {}
    for rows in parts:
        for position, ids in rows.items():
            before = found.setdefault(position, [])
            if ids is None or before is None:
                found[position] = None
            else:
                before.append(ids)
    return {at: None if some is None else torch.unique(torch.cat(some)) for at, some in found.items()}


def write_counters_in(memory: Tensor) -> Counts:
    """Return the (begun, ended) write counters of each LONG bytes, a seqlock stored behind the weights."""
    lines = memory.nbytes // (LONG + COUNTER_BYTES)
    return memory.view(torch.uint8).numpy()[lines * LONG :].view(np.int64).reshape(2, lines)


@dataclass
class Block:
    dtype: str
    weights: Tensor
    states: States
    counters: Counts | None = None
    """Write counters (begun, ended) of weights that peers can map, one column for each LONG bytes."""
    used: int = 0
    """Elements given to slots, or in gaps between them."""
    ends: list[int] = field(default_factory=list)
    """For each segment, the end of its padding."""
    keys: list[int] = field(default_factory=list)
    """For each segment, the key, as the Shard numbers keys."""
    key_starts: list[int] = field(default_factory=list)
    """For each segment, its offset in the key."""
    hypers: list[Mapping[str, Any]] = field(default_factory=list)
    """For each segment, the options of its last update."""
    hyper_ids: Counts = field(default_factory=lambda: np.zeros(0, np.int64))
    sums: Tensor | None = None
    """Memory for held sums."""
    number: int = 0
    """Of its memory, if that outlives the process."""
    spares: list[Tensor] = field(default_factory=list)
    """Memory that outlives the process for slots that have moved, with the layout of the block."""


class SliceLayout(NamedTuple):
    slice: Slice
    unit: Unit
    block: Block
    start: int
    """Offset in the block, in elements."""
    first: int
    """Its first segment in the block."""
    last: int
    """End of its segments."""


class Undo(NamedTuple):
    weights: list[Tensor]
    states: list[States]
    counts: Counts
    counters: list[Counts | None]
    change: int = -1
    """The change in which the tensors are the journal's shadow; in later ones they are overwritten. -1: copies."""
    moved_to: Mapping[int, int] = {}
    """`Storage.moved_to` as it was."""


class Read(NamedTuple):
    """The weights of a unit that a rank was sent."""

    version: int
    weights: list[Tensor]
    """For each slot; shared between ranks, so they must not be changed."""
    copy: int = -1
    """Which copy in memory that outlives the process they are; -1: they do not."""


@dataclass(eq=False)
class Unit:
    """The slices of one plan on this server."""

    plan: Plan
    server: int
    first: int
    first_key: int
    """The number of the plan's first key in the Shard."""
    slices: tuple[Slice, ...]
    slots: dict[int, int]
    """Slice → slot."""
    key_slices: Mapping[int, Sequence[Slice]]
    """First key → its slices here, or one slice of several keys; only what workers hold copies of."""
    keys: frozenset[int]
    """The keys (by index in the plan) with elements on this server."""
    changes: StoredRowChanges
    reads: dict[int, list[Read]] = field(default_factory=dict)
    """Rank → the weights that it was sent, oldest first; it computes its next gradient with one of them. Only for
    optimizers with delay compensation.
    """
    stored_copies: frozenset[int] = frozenset()
    """The copies of `reads` to which a restarted process would return, so that they must not be overwritten."""
    hypers: Hypers | None = None

    @property
    def end(self) -> int:
        return self.first + len(self.slices)


class KeyLayout(NamedTuple):
    """Where a key is: adjacent segments of one block, in adjacent slots."""

    key: int
    """As the Shard numbers keys."""
    unit: Unit
    slot: int
    end_slot: int
    block: Block
    first: int
    last: int
    part: slice
    """Its elements in the block."""
    width: int
    """Elements of a row, at least 1."""

    @property
    def spec(self) -> TensorSpec:
        return self.unit.plan.specs[self.key - self.unit.first_key]

    @property
    def in_plan(self) -> int:
        """The index of the key in its plan."""
        return self.key - self.unit.first_key


class Storage:
    """The memory of a Shard.

    Args:
        leases: Tells which weights peers are reading; those are not written, a copy replaces them until then.
        journal: Has memory that outlives the process; None: weights and state end with it.
        name: Distinguishes this memory from that of other Shards with the same journal.
    """

    def __init__(self, leases: Leases | None = None, journal: Journal | None = None, name: str = "") -> None:
        self.slots: list[SliceLayout] = []
        self.ends: list[int] = []
        """For each slot, its end in its block."""
        self.lines: list[slice] = []
        """For each slot, its range of write counters."""
        self.padded: list[Tensor] = []
        """For each slot, its weights with padding."""
        self.visible: list[Tensor] = []
        """For each slot, its weights without padding."""
        self.layouts: dict[int, KeyLayout] = {}
        """Where each key is."""
        self.num_keys = 0
        """Keys of all units, including those on other servers."""
        self.locations: list[int] = []
        """For each slot, the location at which peers can map its weights; -1 if they cannot."""
        self.journal = journal
        self.name = name
        self.all_blocks: list[Block] = []
        """In the order in which they were allocated."""
        self.protected_at = np.zeros(0, np.int64)
        """For each slot, the number of its last change and how the weights before it are known, or `_UNKNOWN`. Longer
        than there are slots.
        """
        self.moved_to: dict[int, int] = {}
        """Slot that has moved → the spare of its block where it is; only with a journal."""
        self._leases = leases
        self._moved: dict[int, Tensor] = {}
        """Slot → its weights while those in the block are being sent."""
        self._halves: dict[int, tuple[int, Tensor]] = {}
        """Slot → (version, weights rounded to bfloat16)."""
        self._blocks: dict[str, Block] = {}

    def add(self, plan: Plan, server: int, memory: Mapping[str, Tensor] | None) -> Unit:
        """Add the slices of a plan that belong to `server`, with weights of zero; see `Shard.add`."""
        slices, first_key = plan.slices_of(server), self.num_keys
        keys = frozenset(segment.key for slice_ in slices for segment in slice_.segments)
        slots = {slice_.index: len(self.slots) + at for at, slice_ in enumerate(slices)}
        own = group_slices([(slice_.segments[0].key, slice_) for slice_ in plan.resident_slices_of(server)])
        unit = Unit(plan, server, len(self.slots), first_key, slices, slots, own, keys, StoredRowChanges(own))
        blocks = self._blocks_for(plan, slices, memory)
        if len(self.protected_at) < len(self.slots) + len(slices):
            more = np.full(len(self.protected_at) + len(slices), _UNKNOWN, np.int64)
            self.protected_at = np.concatenate([self.protected_at, more])
        for slice_ in slices:
            self._add_slot(unit, slice_, blocks[slice_.dtype])
        for block in blocks.values():
            new = len(block.keys) - len(block.hypers)
            block.hyper_ids = np.concatenate([block.hyper_ids, np.zeros(new, np.int64)])
            block.hypers += [{}] * new
        self.num_keys += len(plan.specs)
        return unit

    def _blocks_for(
        self, plan: Plan, slices: Sequence[Slice], memory: Mapping[str, Tensor] | None
    ) -> dict[str, Block]:
        """Return the memory for a plan's slices, by dtype: free space of the last block, or a new one."""
        sizes: dict[str, int] = {}
        for slice_ in slices:
            # Slices that workers map may start on a page boundary, so leave room for a gap before each.
            may_part = slice_.nbytes >= LONG or not plan.is_resident(slice_)
            gap = PAGE // SIZES[slice_.dtype] if may_part else 0
            sizes[slice_.dtype] = sizes.get(slice_.dtype, 0) + slice_.length + gap
        found = {}
        for dtype, size in sizes.items():
            block = self._blocks.get(dtype) if memory is None else None
            if block is None or block.used + size > block.weights.numel():
                # Blocks grow geometrically; pages that are not written take no memory.
                numel = max(size, 2 * block.used if block else 0)
                if memory is None and self.journal is not None:
                    found[dtype] = self._blocks[dtype] = self._durable_block(dtype, numel, self.journal)
                    continue
                shared = self._shared_zeros(numel, torch_dtype(dtype)) if memory is None else None
                if memory is not None:
                    weights = memory[dtype]
                else:
                    weights = aligned_zeros(numel, torch_dtype(dtype)) if shared is None else shared[0]
                states = States(dtype, weights.numel(), device=weights.device)
                counters = None if shared is None else shared[1]
                block = self._blocks[dtype] = Block(dtype, weights, states, counters)
                self.all_blocks.append(block)
            found[dtype] = block
        return found

    def _durable_block(self, dtype: str, numel: int, journal: Journal) -> Block:
        """Allocate a block that outlives the process, or find it again after a restart."""
        nbytes, itemsize = numel * SIZES[dtype], torch_dtype(dtype).itemsize
        has_counters = nbytes >= LONG
        if has_counters:
            nbytes = -(-nbytes // LONG) * LONG
            nbytes += nbytes // LONG * COUNTER_BYTES
        region = journal.memory.take(f"{self.name}.weights.{len(self.all_blocks)}", nbytes)
        if has_counters and self._leases is not None:
            self._leases.export(region.number, region.fd, region.bytes)

        def allocate(entry: str, length: int, dtype: torch.dtype) -> Tensor:
            # A new region for each: one that another optimizer has left is not zero.
            key = f"{self.name}.state.{region.number}.{journal.memory.last + 1}.{entry}"
            return typed_durable_memory(journal.memory.take(key, length * dtype.itemsize).data, length, dtype)

        weights = typed_durable_memory(region.data[: numel * itemsize], numel, torch_dtype(dtype))
        counters = write_counters_in(region.data) if has_counters else None
        block = Block(dtype, weights, States(dtype, numel, allocate=allocate), counters, number=region.number)
        self.all_blocks.append(block)
        return block

    def _shared_zeros(self, numel: int, dtype: torch.dtype) -> tuple[Tensor, Counts] | None:
        """Allocate shared memory that peers can map, if it is large enough and possible; and its write counters."""
        nbytes = -(-numel * dtype.itemsize // LONG) * LONG
        room = nbytes + nbytes // LONG * COUNTER_BYTES
        shared = self._leases.shared(room) if numel * dtype.itemsize >= LONG and self._leases else None
        if shared is None:
            return None
        return shared[: numel * dtype.itemsize].view(dtype), write_counters_in(shared)

    def _add_slot(self, unit: Unit, slice_: Slice, block: Block) -> None:
        number, first = len(self.slots), len(block.keys)
        # 1. Align it. Workers map the whole range of a key that they keep no copy of, otherwise the slice.
        key, _, begin, _ = slice_.segments[0]
        nbytes = unit.plan.specs[key].nbytes
        if unit.plan.is_resident(slice_):
            begin, nbytes = slice_.offset, slice_.nbytes
        is_mapped = block.counters is not None and nbytes >= LONG
        gap = (begin - block.used) % (PAGE // SIZES[slice_.dtype])
        may_part = nbytes >= _WORTH_A_GAP and unit.first_key + key not in self.layouts
        if is_mapped and may_part:
            block.used, gap = block.used + gap, 0  # it starts at the same offset in its page as on workers
        # 2. Append its segments to the block.
        start = block.used
        block.states.add([(start + s.start, s.numel) for s in slice_.segments])
        starts = [start + s.start for s in slice_.segments]
        block.ends += [*starts[1:], start + slice_.length]
        # 3. A key's home grows with each of its segments, here or in slots before.
        for at, segment in enumerate(slice_.segments):
            key = unit.first_key + segment.key
            block.keys.append(key)
            block.key_starts.append(segment.key_start)
            begin, layout = start + segment.start, self.layouts.get(key)
            if layout is not None:
                begin = layout.part.start
            self.layouts[key] = KeyLayout(
                key,
                unit,
                number if layout is None else layout.slot,
                number + 1,
                block,
                first + at if layout is None else layout.first,
                first + at + 1,
                slice(begin, start + segment.start + segment.numel),
                max(row_numel(unit.plan.specs[segment.key]), 1),
            )
        # 4. Append the slot.
        block.used += slice_.length
        self.slots.append(SliceLayout(slice_, unit, block, start, first, len(block.keys)))
        self.ends.append(block.used)
        size = SIZES[slice_.dtype]
        self.lines.append(slice(start * size // LONG, -(-block.used * size // LONG)))
        self.visible.append(block.weights[start : start + slice_.used])
        self.padded.append(block.weights[start : block.used])
        location = (
            self._leases.location_of(self.padded[-1]) if is_mapped and not gap and self._leases else None
        )
        self.locations.append(-1 if location is None else location)

    def location(self, slot: int) -> int:
        """Return the location at which peers can map a slot's current weights; -1 if they cannot."""
        return -1 if slot in self._moved else self.locations[slot]

    @property
    def has_moved(self) -> bool:
        """Whether some slots have moved out of their block because that is being sent."""
        return bool(self._moved)

    @property
    def may_move(self) -> bool:
        """Whether slots have moved out of their block, or would if they were written now."""
        return bool(self._moved) or bool(self._leases and self._leases.held)

    @property
    def blocks(self) -> list[Block]:
        return list({id(slot.block): slot.block for slot in self.slots}.values())

    def is_next(self, slot: int, other: int) -> bool:
        """Return whether a slot directly follows another one in memory."""
        a, b = self.slots[slot], self.slots[other]
        return other == slot + 1 and a.block is b.block and self.ends[slot] == b.start

    def padding_of(self, slot: int) -> int:
        """Return the bytes of padding at the end of a slot."""
        slice_ = self.slots[slot].slice
        return (slice_.length - slice_.used) * self.slots[slot].block.weights.itemsize

    def continues_key(self, slot: int) -> bool:
        """Return whether a slot continues the key of the slot before."""
        return slot > 0 and self.slots[slot].slice.segments[0].key_start > 0

    def borrow(self, first: int, end: int, to_write: bool = True, are_protected: bool = False) -> Tensor:
        """Return the weights of adjacent slots as one tensor; a copy if some have moved.

        Args:
            to_write: The caller writes them, and then calls `settle`; False: it only reads.
            are_protected: The journal protects what is written already.
        """
        counters = self.slots[first].block.counters if to_write else None
        if to_write and self.may_move:
            for slot in range(first, end):
                self.make_writable(slot)
        if to_write and self.journal is not None and not are_protected:
            self.protect(first, end)
        if counters is not None:
            counters[0, self.lines[first].start : self.lines[end - 1].stop] += 1
        if self._moved and not self._moved.keys().isdisjoint(range(first, end)):
            return torch.cat(self.padded[first:end])
        return self.slots[first].block.weights[self.slots[first].start : self.ends[end - 1]]

    def protect(self, first: int, end: int) -> None:
        """Copy the weights of adjacent slots, and their counters, to the journal's shadow, if there is one."""
        if self.journal is None:
            return
        block, lines = self.slots[first].block, slice(self.lines[first].start, self.lines[end - 1].stop)
        written = [] if block.counters is None else [torch.from_numpy(row[lines]) for row in block.counters]
        if self._moved and not self._moved.keys().isdisjoint(range(first, end)):
            self.journal.protect([*self.padded[first:end], *written])
        else:
            weights = block.weights[self.slots[first].start : self.ends[end - 1]]
            self.journal.protect([weights, *written])
        self.note_protected(first, end)

    def note_protected(self, first: int, end: int) -> None:
        assert self.journal is not None
        self.protected_at[first:end] = self.journal.number * _KINDS + _COPIED

    def end_change(self, slots: Counts) -> None:
        """Record that a round of these slots has ended: those that it has not written are as they were before it."""
        if self.journal is not None:
            of_slots = self.protected_at[slots]
            is_same = of_slots // _KINDS != self.journal.number
            self.protected_at[slots] = np.where(is_same, self.journal.number * _KINDS + _SAME, of_slots)

    def protect_rows(self, layout: KeyLayout, ids: Tensor, with_state: bool) -> bool:
        """Copy only some rows of a key, or of several as one, to the journal's shadow; return whether it did."""
        if self.journal is None or not self._moved.keys().isdisjoint(range(layout.slot, layout.end_slot)):
            return False
        block, lines = (
            layout.block,
            slice(self.lines[layout.slot].start, self.lines[layout.end_slot - 1].stop),
        )
        self.journal.protect(
            [] if block.counters is None else map(torch.from_numpy, block.counters[:, lines])
        )
        for memory in [block.weights, *(block.states.tensors.values() if with_state else ())]:
            self.journal.protect_rows(memory[layout.part].view(-1, layout.width), ids)
        if len(ids):
            self.protected_at[layout.slot : layout.end_slot] = self.journal.number * _KINDS + _ROWS
        return True

    def protect_state(self, block: Block, part: slice) -> None:
        """Copy the optimizer state of some elements to the journal's shadow, if there is one."""
        if self.journal is not None:
            self.journal.protect([memory[part] for memory in block.states.tensors.values()])

    def knows_former(self, slot: int) -> bool:
        """Return whether a slot's weights before its last round are kept."""
        return self.journal is not None and int(self.protected_at[slot]) >= 0

    def last_change(self, slot: int) -> int:
        """Return the number of a slot's last change, as the journal counts."""
        return int(self.protected_at[slot]) // _KINDS

    def former(self, slot: int) -> Tensor | None:
        """Return a slot's weights (with padding) before its last round; None if they were not kept."""
        change, kind = divmod(int(self.protected_at[slot]), _KINDS)
        if self.journal is None or not self.knows_former(slot):
            return None
        if kind == _COPIED:
            return self.journal.former(self.padded[slot])
        if kind == _SAME:
            return self.padded[slot]
        found = self.padded[slot].clone()
        for position, segment in enumerate(self.slots[slot].slice.segments):
            if segment.numel:
                rows = self._rows_of_segment(slot, position, found)
                before = self.journal.former_rows(
                    self._rows_of_segment(slot, position, self.padded[slot]), change
                )
                if before is not None:
                    rows[torch.from_numpy(before[0])] = before[1]
        return found

    def former_rows(self, slot: int, position: int, ids: Tensor) -> Tensor | None:
        """Return rows of a segment, counted from its first one, before its last round; None if they were not kept."""
        rows = self._rows_of_segment(slot, position, self.padded[slot])
        change, kind = divmod(int(self.protected_at[slot]), _KINDS)
        if self.journal is None or not self.knows_former(slot):
            return None
        if kind == _COPIED:
            former = self.journal.former(self.padded[slot])
            return (
                None if former is None else self._rows_of_segment(slot, position, former).index_select(0, ids)
            )
        found = rows.index_select(0, ids)
        before = self.journal.former_rows(rows, change) if kind == _ROWS else None
        if before is not None and len(before[0]):
            known, values = torch.from_numpy(before[0]), before[1]
            at = torch.searchsorted(known, ids).clamp_(max=len(known) - 1)
            have_changed = known[at] == ids
            found[have_changed] = values[at[have_changed]]
        return found

    def _rows_of_segment(self, slot: int, position: int, weights: Tensor) -> Tensor:
        """View a segment of a slot's weights as rows of its key; as one row if it has no whole ones."""
        one = self.slots[slot]
        segment = one.slice.segments[position]
        width = self.layouts[one.unit.first_key + segment.key].width
        flat = weights[segment.start : segment.start + segment.numel]
        return flat.view(-1, width if segment.numel % width == 0 else segment.numel)

    def settle(self, first: int, end: int, joined: Tensor) -> None:
        """End a write begun by `borrow`; a copy is written back."""
        counters = self.slots[first].block.counters
        if counters is not None:
            counters[1, self.lines[first].start : self.lines[end - 1].stop] += 1
        if self._moved and not self._moved.keys().isdisjoint(range(first, end)):
            own = self.padded[first:end]
            for target, source in zip(own, torch.split(joined, list(map(len, own))), strict=True):
                target.copy_(source)

    @contextmanager
    def borrowed(self, first: int, end: int, are_protected: bool = False) -> Iterator[Tensor]:
        """Borrow the weights of adjacent slots to write them in a `with` block; see `borrow`."""
        joined = self.borrow(first, end, are_protected=are_protected)
        yield joined
        self.settle(first, end, joined)

    @contextmanager
    def borrowed_key(self, layout: KeyLayout, are_protected: bool = False) -> Iterator[Tensor]:
        """Like `borrowed`, for the weights of one key."""
        start = self.slots[layout.slot].start
        with self.borrowed(layout.slot, layout.end_slot, are_protected) as weights:
            yield weights[layout.part.start - start : layout.part.stop - start]

    def rows(self, key: int, last: int) -> Tensor:
        """Return the rows of a key, or of adjacent keys up to `last`, as one matrix; may be a copy."""
        layout, end = self.layouts[key], self.layouts[last]
        start = self.slots[layout.slot].start
        weights = self.borrow(layout.slot, end.end_slot, to_write=False)
        return weights[layout.part.start - start : end.part.stop - start].view(-1, layout.width)

    def make_writable(self, slot: int) -> None:
        """Copy-on-write: while a slow peer reads this slot's buffer, continue on a copy."""
        visible, leases = self.visible[slot], self._leases
        if leases is None or (slot not in self._moved and not leases.is_busy(visible)):
            return
        # Return to the block as soon as it is free; otherwise use a copy that is not being read.
        one = self.slots[slot]
        layout, own = one.block.weights[one.start : self.ends[slot]], self._moved.pop(slot, None)
        if own is not None and not leases.is_busy(layout):
            layout.copy_(own)
            own = layout
            self.moved_to.pop(slot, None)
        else:
            if own is None or leases.is_busy(own):
                own = self._copy_of(slot, layout if own is None else own, leases)
            self._moved[slot] = own
        self.padded[slot], self.visible[slot] = own, own[: one.slice.used]

    def _copy_of(self, slot: int, weights: Tensor, leases: Leases) -> Tensor:
        """Copy the weights of a slot: to a spare that no peer reads, if they outlive the process."""
        if self.journal is None:
            return weights.clone()
        one, at = self.slots[slot], 0
        part = slice(one.start, self.ends[slot])
        while leases.is_busy(self.spare(one.block, at)[part]):
            at += 1
        self.moved_to[slot] = at
        return self.spare(one.block, at)[part].copy_(weights)

    def spare(self, block: Block, at: int) -> Tensor:
        assert self.journal is not None
        while len(block.spares) <= at:
            key = f"{self.name}.spare.{block.number}.{len(block.spares)}"
            region = self.journal.memory.take(key, block.weights.nbytes)
            block.spares.append(typed_durable_memory(region.data, block.weights.numel(), block.weights.dtype))
        return block.spares[at]

    def return_moved(self) -> None:
        """After a restart: no peer reads the blocks any more, so slots that had moved continue there."""
        for slot, at in self.moved_to.items():
            one, part = self.slots[slot], slice(self.slots[slot].start, self.ends[slot])
            one.block.weights[part].copy_(self.spare(one.block, at)[part])
            self.protected_at[slot] = _UNKNOWN  # what was before is in the spare's shadow
        self.moved_to.clear()

    def forget_former(self, undone: Sequence[tuple[int, int, int]]) -> None:
        """Keep no former weights of slots in parts (region, begin, end) of durable memory that were undone."""
        for slot, one in enumerate(self.slots) if undone else ():
            size = SIZES[one.slice.dtype]
            begin, end = one.start * size, self.ends[slot] * size
            if any(n == one.block.number and first < end and begin < last for n, first, last in undone):
                self.protected_at[slot] = _UNKNOWN

    def durable_copy(self, name: str, slot: int) -> Tensor | None:
        """Copy a slot's weights into memory with the layout of its block that outlives the process, if any does."""
        if self.journal is None:
            return None
        own = self.durable_part(name, slot)
        self.journal.protect([own])
        return own.copy_(self.padded[slot])

    def durable_part(self, name: str, slot: int) -> Tensor:
        """Return a slot's part of the memory of that name, with the layout of its block."""
        assert self.journal is not None
        one = self.slots[slot]
        region = self.journal.memory.take(f"{self.name}.{name}.{one.block.number}", one.block.weights.nbytes)
        whole = typed_durable_memory(region.data, one.block.weights.numel(), one.block.weights.dtype)
        return whole[one.start : self.ends[slot]]

    def half(self, slot: int, version: int) -> Tensor:
        """Return a slot's weights rounded to bfloat16, once for each version; narrower dtypes unchanged."""
        weights = self.padded[slot]
        if not weights.is_floating_point() or weights.dtype.itemsize <= torch.bfloat16.itemsize:
            return weights
        known, half = self._halves.get(slot, (-1, None))
        if half is None or known != version:
            if half is None or (self._leases is not None and self._leases.is_busy(half)):
                half = torch.empty_like(weights, dtype=torch.bfloat16)
            self._halves[slot] = version, half.copy_(weights)
        return half
