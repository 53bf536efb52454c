"""Weights, optimizer state and arithmetic of one server.

A Shard holds the slices of many *units*. A unit is what one plan puts on this server: one verb key, or all parameters
of a Trainer. Slices lie consecutively in flat memory, in the order in which their units were added, each on a 64-byte
line; the index of a slice in that order is its *slot*. Optimizer state has the same layout. So adjacent slices with
equal options are summed and updated by one call, padding included, even if they belong to different units. A key is in
adjacent slots, so its rows are one block.

How an update works: `Reduction` (in `reduction`) cuts the contributions into chunks and adds them in rank order, the
optimizer is applied to each chunk, split where options or state differ (`_update_runs`); keys that all ranks gave
as rows are updated row by row (`_update_rows`); optimizers that are not elementwise get whole keys (`_update_keys`).

Invariants:

- No bit depends on the order of arrival or on the number of servers.
- Weights are written only between `Storage.borrow` and `Storage.settle`.
- An update that raises leaves everything as before if the optimizer may raise; see `undos`.
- Nothing here knows a message, a clock or a socket: servers, `local` and in-process Trainers use the same class.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import nullcontext
from itertools import accumulate, count, pairwise, repeat
from operator import attrgetter, is_
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from kvstore_server.codec import compute_dtype, torch_dtype
from kvstore_server.durable.journal import SHADOW, Journal
from kvstore_server.durable.spill_folder import SpilledMemory, SpillFile, SpillFolder
from kvstore_server.errors import ConfigurationError, OptimizerError, ProtocolError
from kvstore_server.failpoints import failpoint
from kvstore_server.optimizer import Optimizer, State, States, apply_update, apply_update_to_rows
from kvstore_server.optimizer.apply import leaves_other_rows, needs_row_sparse
from kvstore_server.optimizer.rows import GradFragments, Gradient, ViewCache, scatter_rows
from kvstore_server.optimizer.state import aligned_zeros
from kvstore_server.plan import HashTableOptions, Ints, Plan, Slice, TensorSpec, row_numel
from kvstore_server.protocol.rows import SENT, HeldRows, Parts, RowSet, cut_rows, new_pulled_rows
from kvstore_server.shard.hash_table import HashTable, HashTableStats
from kvstore_server.shard.norms import (
    UNCHANGED,
    Decision,
    apply_decision,
    only_segments,
    partial_norm_of_slice,
)
from kvstore_server.shard.reduction import (
    NO_KEYS,
    Present,
    RankContribution,
    ReduceChunk,
    Reduction,
    Run,
    left_out_of_reduction,
    part_of,
)
from kvstore_server.shard.storage import Block, Hypers, KeyLayout, Read, Storage, Undo, Unit
from kvstore_server.shard.undo_plans import ChunkUndoPlans
from kvstore_server.transport.arena import Leases

__all__ = ["HeldSum", "Leases", "Partial", "Shard", "Unit", "Updater"]

Updater = Callable[[str, Tensor, Tensor], None]
"""`updater(key, merged, stored)` changes `stored` in place."""
_AS_IT_IS = nullcontext()
_rows_of = attrgetter("rows")


class Partial(NamedTuple):
    """The measurements of the sum of one slice."""

    slice: int
    value: float
    is_finite: bool


class HeldSum(NamedTuple):
    """A sum that waits for a decision, with its partial norms by slice."""

    total: RankContribution
    partials: tuple[Partial, ...]


class Shard:
    """Weights, optimizer state and arithmetic of the slices of many units. Not thread-safe.

    Args:
        leases: Tells which weights are being read by peers; those are not written, the Shard continues on a copy.
        journal: Has memory that outlives the process, and keeps what is changed until the change is complete. What is
            changed in several calls is held there (`hold_former`).
        name: Of this Shard in the journal's memory.
        spill: Where rows of hash tables are; None: in memory.
    """

    def __init__(
        self,
        leases: Leases | None = None,
        journal: Journal | None = None,
        name: str = "",
        spill: SpillFolder | None = None,
    ) -> None:
        self.units: list[Unit] = []
        self.storage = Storage(leases, journal, name)
        self._journal, self._spill = journal, spill
        self._undo_plans = None if journal is None else ChunkUndoPlans(self.storage, journal)
        self._sums = Reduction(self.storage)
        self._cuts = ViewCache()
        self.counts = np.zeros(0, np.int64)
        """Updates of each key since the optimizer was set, also of keys that are on other servers."""
        self.tracks_changes = False
        """Whether changes have to be recorded, because they are asked for."""
        self.undos: dict[Unit, Undo] = {}
        """How to undo the last update of a unit, where that is possible."""
        self.keeps_undos = False
        """Whether that has to be possible for optimizers that cannot raise, too."""
        self.claim: Callable[[int, str], object] = lambda _nbytes, _what: None
        """Claims bytes for rows of hash tables, for some purpose. Raises ConfigurationError if there are too few."""
        self.hash_tables: dict[int, HashTable] = {}
        """Key → its rows, if it is a hash table."""

    def add(self, plan: Plan, server: int = 0, memory: Mapping[str, Tensor] | None = None) -> Unit:
        """Add the slices of a plan that belong to `server`, with weights of zero.

        Args:
            memory: dtype → flat memory to use for the weights: the arenas of a plan for one server.
        """
        # First what may fail.
        keys = {segment.key for slice_ in plan.slices_of(server) for segment in slice_.segments}
        tables = {}
        for at in sorted(keys):
            spec, key = plan.specs[at], self.storage.num_keys + at
            if spec.hash_table is not None:
                try:
                    tables[key] = self._make_hash_table(key, spec, spec.hash_table)
                except MemoryError as error:
                    raise ConfigurationError(
                        f"there is no room for hash table {spec.key!r}: {error}"
                    ) from None
        unit = self.storage.add(plan, server, memory)
        self.hash_tables |= tables
        self.units.append(unit)
        self.counts = np.concatenate([self.counts, np.zeros(len(plan.specs), np.int64)])
        return unit

    def _make_hash_table(self, key: int, spec: TensorSpec, options: HashTableOptions) -> HashTable:
        journal, spill = self._journal, self._spill
        if journal is None:
            files = None if spill is None else SpilledMemory(spill)
            return HashTable(spec.key, row_numel(spec), spec.dtype, options, spilled=files)
        begin = f"{self.storage.name}.hash{key}."

        def allocate(name: str, nbytes: int) -> Tensor:
            return journal.memory.take(begin + name, nbytes).data

        def open_file(name: str, nbytes: int) -> SpillFile:
            assert spill is not None
            region = journal.memory.take(begin + name, nbytes, spill.make_file)
            shadow = journal.memory.take(f"{begin}{name}{SHADOW}", nbytes, spill.make_file)
            shadow.arena.expect_random_access()
            return SpillFile(region.arena, (region.fd, shadow.fd))

        def protect(array: Tensor, rows: Ints) -> None:
            journal.protect_rows(array, torch.from_numpy(rows))

        is_known = journal.memory.known(f"{begin}head") is not None

        files = None if spill is None else SpilledMemory(spill, open_file)
        table = HashTable(spec.key, row_numel(spec), spec.dtype, options, allocate, protect, spilled=files)
        if is_known:
            table.restore()
        return table

    def _claim_rows(self, nbytes: int, what: str) -> None:
        # The journal's shadow is as large as what it protects.
        self.claim(nbytes * (1 + (self._journal is not None)), what)

    def contribution_of(
        self, given: Iterable[Run], scale: float, absent: frozenset[int] = NO_KEYS
    ) -> RankContribution:
        """Build one rank's contribution from its slices, in slot order. Raises ProtocolError if rows are repeated."""
        runs, found = [], dict[int, list[RowSet]]()
        for run in given:
            if isinstance(run.payload, Tensor):
                runs.append(run)
            elif isinstance(run.payload, Mapping):
                dense = self._take_rows(run.first, run.payload, found)
                runs += [] if dense is None else [Run(run.first, run.end, dense)]
            else:
                runs.append(run)
        if not found:
            return RankContribution(runs, scale, absent)
        rows_of = {
            key: parts[0] if len(parts) == 1 else _join_shard_slices(parts) for key, parts in found.items()
        }
        return RankContribution(runs, scale, absent, rows_of)

    def _take_rows(self, slot: int, parts: Parts, found: dict[int, list[RowSet]]) -> Tensor | None:
        """Collect the rows of a slice in `found`, numbered as in their block; return its dense elements, if any."""
        one, dense = self.storage.slots[slot], None
        for position, part in parts.items():
            segment = one.slice.segments[position]
            if isinstance(part, RowSet):
                layout = self.storage.layouts[one.unit.first_key + segment.key]
                first = (one.start + segment.start - layout.part.start) // layout.width
                first *= layout.spec.hash_table is None
                found.setdefault(layout.key, []).append(
                    part if not first else RowSet(part.ids + first, part.values)
                )
                continue
            if dense is None:
                dense = torch.zeros(one.slice.used, dtype=part.dtype, device="cpu")
            dense[segment.start : segment.start + segment.numel] = part
        return dense

    def runs_of(self, unit: Unit, arenas: Mapping[str, Tensor], without: Collection[int] = ()) -> list[Run]:
        """Return the runs of a unit's slices in flat arenas, which are laid out like a plan for one server.

        Args:
            without: Keys to leave out; only those that have their slices to themselves are.
        """
        layouts = [layout for layout in map(self.storage.layouts.get, without) if layout is not None]
        alone = sorted(
            (h.slot, h.end_slot) for h in layouts if len(self.storage.slots[h.slot].slice.segments) == 1
        )
        runs: list[Run] = []
        slots = self.storage.slots
        for first, end in zip(
            [unit.first, *(e for _, e in alone)], [*(f for f, _ in alone), unit.end], strict=True
        ):
            begin = first
            for number in range(first, end):
                block, after = slots[number].block, number + 1
                if after == end or slots[after].block is not block:
                    runs.append(Run(begin, after, arenas[block.dtype][slots[begin].slice.offset :]))
                    begin = after
        return runs

    def visible(self, unit: Unit, index: int) -> Tensor:
        """Return the weights of a slice without padding; not a copy."""
        return self.storage.visible[unit.slots[index]]

    def check_rows(self, unit: Unit, key: int) -> None:
        """Raise ProtocolError if a key has no rows on this server."""
        if key not in unit.keys or unit.server not in unit.plan.rows(key).blocks:
            raise ProtocolError(f"this server has no rows of a key {key}")

    def pull_hash_table(
        self, unit: Unit, key: int, rows: Ints, held: HeldRows | None = None, is_former: bool = False
    ) -> Tensor:
        """Return rows of a hash table as `PulledRows`.

        Args:
            held: What the worker has of them.
            is_former: As they were before the last round, which the caller knows to be kept.
        """
        table, journal = self.hash_tables[unit.first_key + key], self._journal
        if not is_former or journal is None:
            return table.pull(rows, held)
        change = self.storage.last_change(self.storage.layouts[unit.first_key + key].slot)
        former = table.read_former(rows, lambda array: journal.former_rows(array, change))
        forms = np.full(len(rows), SENT, np.uint8)
        data, values = new_pulled_rows(-1, table.epoch, forms, table.width, table.dtype)
        values.copy_(former)
        return data

    def hash_table_stats(self, unit: Unit) -> dict[str, HashTableStats]:
        """Return figures of a unit's hash tables, by the name of the key."""
        specs = {unit.first_key + at: spec for at, spec in enumerate(unit.plan.specs)}
        return {specs[key].key: table.stats() for key, table in self.hash_tables.items() if key in specs}

    def rows_of(self, unit: Unit, key: int) -> Tensor:
        """Return the rows of a key on this server; may be a copy. Raises ProtocolError if it has none here."""
        self.check_rows(unit, key)
        return self.storage.rows(unit.first_key + key, unit.first_key + key)

    def take_rows(self, unit: Unit, key: int, ids: Tensor) -> Tensor:
        """Copy rows (ascending ids) of a key, or of its row group (`Plan.joined_rows`). Raises like `rows_of`."""
        first = self.rows_of(unit, key)
        keys = [one for one in unit.plan.joined_rows(key).keys if one in unit.keys]
        layouts = [self.storage.layouts[unit.first_key + one] for one in keys]
        if all([after.part.start == one.part.stop for one, after in pairwise(layouts)]):
            return self.storage.rows(layouts[0].key, layouts[-1].key).index_select(0, ids)
        # Some keys of the group start on a page boundary of their own, so the group is not contiguous in memory.
        starts = list(
            accumulate([(one.part.stop - one.part.start) // one.width for one in layouts], initial=0)
        )
        parts = zip(keys, cut_rows(RowSet(ids, ids), starts[:-1]), strict=True)
        rows = [
            (first if one == key else self.rows_of(unit, one)).index_select(0, own) for one, (own, _) in parts
        ]
        return torch.cat(rows)

    @torch.no_grad()
    def assign_sum(self, contributions: Sequence[RankContribution]) -> None:
        """Replace the weights by the sum, except what no rank gave. Raises ConfigurationError for scaled integers."""
        # 1. Keys that every rank gave as rows.
        if any([one.scale != 1.0 for one in contributions]):
            self._check_factors(contributions)
        has_rows = any([given.rows for given in contributions])
        by_rows = self._sums.given_as_rows(contributions) if has_rows else ()
        for key in self.hash_tables.keys() & by_rows:
            raise ConfigurationError(
                f"rows of hash table {self.hash_tables[key].name!r} came without an optimizer that updates them; set "
                "it on every worker before the first push"
            )
        for key in by_rows:
            layout = self.storage.layouts[key]
            rows = self._sums.sum_of_rows([layout], contributions, is_only_read=True)
            are_protected = self.storage.protect_rows(layout, rows.ids, False)
            with self.storage.borrowed_key(layout, are_protected) as weight:
                scatter_rows(weight.view(-1, rows.values.shape[1]), rows.ids, rows.values.to(weight.dtype))
            self._record_rows(key, rows.ids)
        # 2. All others. A single unscaled contribution is copied in its own dtype: a wider one could change NaN bits.
        is_sum = len(contributions) != 1 or contributions[0].scale != 1.0
        is_sum = is_sum or not all([isinstance(run.payload, Tensor) for run in contributions[0].runs])
        for chunk in self._sums.chunks(contributions, by_rows, False):
            block, part, present = chunk.block, chunk.place, chunk.present
            weight = self.storage.borrow(chunk.first, chunk.end)
            is_direct = present is None and (not is_sum or weight.dtype == compute_dtype(block.dtype))
            total = self._sums.total(chunk, contributions, weight if is_direct else None)
            if present is None and not is_direct:
                weight.copy_(total)
            elif present is not None:
                for at in np.flatnonzero(present).tolist():
                    start, numel = block.states.segments[chunk.segments[at]]
                    own = slice(start - part.start, start - part.start + numel)
                    weight[own].copy_(total[own])
            self.storage.settle(chunk.first, chunk.end, weight)
            if self.tracks_changes:
                self._record_dense(chunk)

    def _check_factors(self, contributions: Sequence[RankContribution]) -> None:
        for one in contributions:
            if one.scale == 1.0:
                continue
            dtypes = {self.storage.slots[run.first].block.dtype for run in one.runs}
            if not all(torch_dtype(dtype).is_floating_point for dtype in dtypes):
                raise ConfigurationError(
                    f"integers cannot be multiplied by rescale_grad={one.scale:g}; leave it at 1"
                )

    def update(
        self,
        contributions: Sequence[RankContribution],
        optimizer: Optimizer,
        hypers: Sequence[Hypers],
        units: Sequence[Unit] | None = None,
        decision: Decision = UNCHANGED,
    ) -> None:
        """Sum the contributions, scale and clip as decided, and apply the optimizer.

        Args:
            hypers: The hyper-parameters of each unit.
            units: The units that take part; None: all.

        Raises:
            OptimizerError: The optimizer raised, or rows of a hash table found no room; weights and state are as
                before.
        """
        units = self.units if units is None else units
        given_as_rows = self._sums.given_as_rows(contributions) if self.hash_tables else ()
        for key, table in self.hash_tables.items():
            if any([key in one.rows for one in contributions]) and key not in given_as_rows:
                raise OptimizerError(
                    f"a rank has given hash table {table.name!r} something else than rows; nothing was applied"
                )
            rows = [one.rows[key].ids.numpy() for one in contributions if key in one.rows]
            own = [
                given[key - unit.first_key]
                for unit, given in zip(units, hypers, strict=True) if key - unit.first_key in unit.keys
            ]  # fmt: skip
            table.check_update(rows, self._claim_rows, optimizer, own[0] if rows and own else None)
        failpoint("server.update.begin")
        keeps_undos = optimizer.may_raise or self.keeps_undos
        for unit in units if keeps_undos or self.undos else ():
            self.undos.pop(unit, None)
            if keeps_undos:
                self.undos[unit] = self.snapshot(unit)
        try:
            # Entering no_grad takes as long as a small sum, so it is skipped where gradients are off, as in servers.
            with torch.no_grad() if torch.is_grad_enabled() else _AS_IT_IS:
                self._update(contributions, optimizer, zip(units, hypers, strict=True), decision)
        except Exception as error:
            if not optimizer.may_raise:
                raise
            for unit in units:
                self.undo(unit)
            raise OptimizerError(
                f"optimizer {optimizer.registered_name!r} raised {type(error).__name__}: {error}; nothing was applied"
            ) from error
        failpoint("server.update.end")
        self.count(units)
        left_out = left_out_of_reduction(contributions)
        if left_out:
            self.counts[list(left_out)] -= 1

    def count(self, units: Sequence[Unit]) -> None:
        first = end = units[0].first_key if units else 0
        for unit in units:  # adjacent units are counted in one call
            if unit.first_key != end:
                self.counts[first:end] += 1
                first = unit.first_key
            end = unit.first_key + len(unit.plan.specs)
        if end - first == 1:
            self.counts[first] += 1  # faster than a slice
        else:
            self.counts[first:end] += 1

    @torch.no_grad()
    def update_some(
        self,
        contributions: Sequence[RankContribution],
        optimizer: Optimizer | None,
        hypers: Hypers,
        unit: Unit,
    ) -> None:
        """Update only the slices that were given, without counting the update; see `update` and `assign_sum`."""
        if optimizer is None:
            self.assign_sum(contributions)
        else:
            self._update(contributions, optimizer, [(unit, hypers)], UNCHANGED)

    @torch.no_grad()
    def update_part(
        self,
        contributions: Sequence[RankContribution],
        optimizer: Optimizer | None,
        hypers: Hypers,
        unit: Unit,
        slot: int,
        begin: int,
        end: int,
    ) -> None:
        """Update some elements of a slot (whole cache lines, in ascending order); otherwise like `update_some`.

        Args:
            contributions: What each rank gives to these elements, or nothing.
        """
        chunk = self._sums.part(slot, begin, end, contributions)
        if optimizer is None:
            self._check_factors(contributions)
        elif unit.hypers is not hypers:
            self._set_hypers(unit, hypers)
        total, states, last = self._sums.total(chunk, contributions), chunk.block.states, chunk.segments[-1]
        former = int(states.steps[last]), states.entries[last]
        self.storage.protect_state(chunk.block, chunk.place)
        with self.storage.borrowed(slot, slot + 1) as weight:
            if optimizer is None:
                weight[begin:end].copy_(total)
            else:
                self._update_runs(optimizer, chunk, weight[begin:end], total, 1.0, {})
        if chunk.place.stop < chunk.block.ends[last]:
            # The slot counts as updated only with its last element.
            states.steps[last], states.entries[last] = former
        if self.tracks_changes:
            self._record_dense(chunk)

    def _update(
        self,
        contributions: Sequence[RankContribution],
        optimizer: Optimizer,
        hypers: Any,
        decision: Decision,
    ) -> None:
        # 1. Set the options where they changed.
        for unit, own in hypers:
            if unit.hypers is not own:
                self._set_hypers(unit, own)
        # 2. Keys that every rank gave as rows, a row group at a time.
        has_rows = any(map(_rows_of, contributions))
        by_rows = self._updated_by_rows(contributions, optimizer) if has_rows else ()
        whole = not optimizer.elementwise
        bounded = [key for key in by_rows if key not in self.hash_tables]
        joined = self._sums.side_by_side(bounded, contributions) if bounded else ()
        for layouts in [[layout] for some in joined for layout in some] if whole else joined:
            rows = self._sums.sum_of_rows(layouts, contributions, is_only_read=optimizer.takes_pieces)
            if decision != UNCHANGED:
                # In process, the rows of a single contribution may be the gradient that the loop still uses.
                rows = rows._replace(values=rows.values.clone())
                apply_decision(rows.values, decision)
            self._update_rows(optimizer, layouts, rows)
            failpoint("server.update.next_row_group")
        # 3. All others, chunk by chunk. In process, a single contribution can be used without copying it.
        is_plain = not whole and decision == UNCHANGED
        is_alone = len(contributions) == 1 and contributions[0].is_scratch
        borrowed = contributions[0].borrowed if is_alone else {}
        if borrowed:
            self._cuts.begin()
        chunks = self._sums.chunks(contributions, by_rows, whole, is_plain and is_alone)
        undo_plans = self._undo_plans
        plan = None if undo_plans is None else undo_plans.begin(chunks)
        for at, chunk in enumerate(chunks):
            if chunk.present is not None and not chunk.present.any():
                continue
            given = self._sums.alone(chunk, contributions) if is_alone else None
            total, scale = given or (self._sums.total(chunk, contributions), 1.0)
            if not is_plain:
                if scale != 1.0:
                    total, scale = total.mul_(scale), 1.0
                apply_decision(total, decision)
            if plan is not None and undo_plans is not None:
                undo_plans.protect(plan, at, chunk)
            else:
                self.storage.protect_state(chunk.block, chunk.place)
            weight = self.storage.borrow(chunk.first, chunk.end, are_protected=plan is not None)
            if whole:
                self._update_keys(optimizer, chunk, weight, total)
            else:
                self._update_runs(optimizer, chunk, weight, total, scale, borrowed)
            self.storage.settle(chunk.first, chunk.end, weight)
            failpoint("server.update.next_chunk")
            if self.tracks_changes:
                self._record_dense(chunk)
        # 4. Hash tables last: they cannot raise any more, so they need not be undone.
        for key in self.hash_tables.keys() & by_rows:
            self._update_hash_table(key, contributions, optimizer, decision)

    def _update_hash_table(
        self,
        key: int,
        contributions: Sequence[RankContribution],
        optimizer: Optimizer,
        decision: Decision,
    ) -> None:
        layout = self.storage.layouts[key]
        rows = self._sums.sum_of_rows([layout], contributions)
        times = self._sums.times_of_rows(key, rows.ids.numpy(), contributions)
        if decision != UNCHANGED:
            rows = rows._replace(values=rows.values.clone())
            apply_decision(rows.values, decision)
        table = self.hash_tables[key]
        table.update(rows, times, optimizer, layout.block.hypers[layout.first])
        layout.block.states.steps[layout.first : layout.last] = table.step

    def _update_runs(
        self,
        optimizer: Optimizer,
        chunk: ReduceChunk,
        weight: Tensor,
        grad: Tensor,
        scale: float,
        borrowed: Mapping[int, Tensor],
    ) -> None:
        """Update a chunk by `scale * grad` and `borrowed` gradients, in one call for equal options and state."""
        block, place, segments = chunk.block, chunk.place, chunk.segments
        states = block.states
        for i, j in self._runs(block, segments.start, segments.stop, chunk.present, optimizer.positioned):
            hyper = block.hypers[i]
            # 1. Where the run is. The chunk may contain only a part of its first and last segment.
            start, stop = max(states.segments[i][0], place.start), min(block.ends[j - 1], place.stop)
            if optimizer.positioned:
                name, skipped = self.storage.layouts[block.keys[i]].spec.key, start - states.segments[i][0]
                hyper = {**hyper, "key": name, "first": block.key_starts[i] + skipped}

            def padding(i: int = i, j: int = j, start: int = start, stop: int = stop) -> list[slice]:
                rows = zip(states.segments[i:j], block.ends[i:j], strict=True)
                return [
                    slice(at + numel - start, after - start) for (at, numel), after in rows if after <= stop
                ]

            # 2. Its weights and gradient: those of the chunk, unless several runs share it; borrowed ones as they lie.
            part, own, given = slice(start, stop), weight, grad
            if part != place:
                where = slice(start - place.start, stop - place.start)
                own, given = weight[where], grad[where]
            if borrowed:
                gradient: Gradient = GradFragments(self._pieces(chunk, i, j, grad, borrowed), cuts=self._cuts)
            else:
                gradient = given
            # 3. Update, and keep entries that the optimizer has replaced.
            state = states.view(i, part)
            apply_update(optimizer, own, gradient, state, hyper, padding, scale)
            states.keep(i, j, part, state)

    def _pieces(
        self, chunk: ReduceChunk, first: int, end: int, grad: Tensor, borrowed: Mapping[int, Tensor]
    ) -> list[Tensor]:
        """Return the gradient of adjacent segments as flat fragments, in order; those of borrowed keys are views."""
        block, begin = chunk.block, chunk.place.start
        keys = list(dict.fromkeys(block.keys[first:end]))
        # The common case: every key is borrowed as a whole.
        if all(map(borrowed.__contains__, keys)):
            ends_there = self.storage.layouts[keys[0]].first, self.storage.layouts[keys[-1]].last
            if ends_there == (first, end):
                return [borrowed[key].view(-1) for key in keys]
        # Otherwise alternate between borrowed keys and the ranges between them.
        starts, ends = block.states.segments, block.ends
        layouts = [layout for key in borrowed if (layout := self.storage.layouts[key]).block is block]
        found: list[Tensor] = []
        at = first
        for layout in sorted(layouts, key=attrgetter("first")):
            low, high = max(layout.first, first), min(layout.last, end)
            if low >= high:
                continue
            if at < low:
                found.append(grad[starts[at][0] - begin : ends[low - 1] - begin])
            start = layout.part.start
            flat = borrowed[layout.key].view(-1)
            found.append(part_of(flat, starts[low][0] - start, ends[high - 1] - start))
            at = high
        if at < end:
            found.append(grad[starts[at][0] - begin : ends[end - 1] - begin])
        return found

    def _runs(
        self, block: Block, first: int, end: int, present: Present, is_each_alone: bool
    ) -> list[tuple[int, int]]:
        """Group adjacent segments that are present and have equal options and state."""
        if is_each_alone:
            return [(i, i + 1) for i in range(first, end) if present is None or present[i - first]]
        if end - first == 1:
            return [(first, end)]
        steps, ids = block.states.steps[first:end], block.hyper_ids[first:end]
        breaks, entries = (steps[1:] != steps[:-1]) | (ids[1:] != ids[:-1]), block.states.entries[first:end]
        if not all(map(is_, entries, repeat(entries[0]))):  # most models have one entry for all segments
            own = np.fromiter(map(id, entries), np.int64, end - first)
            breaks |= own[1:] != own[:-1]
        if present is not None:
            breaks |= present[1:] != present[:-1]
        edges = [first, *(np.flatnonzero(breaks) + (first + 1)).tolist(), end]
        runs: list[tuple[int, int]] = []
        for i, j in pairwise(edges):
            if present is not None and not present[i - first]:
                continue
            if runs and runs[-1][1] == i and _same_options_and_state(block, i - 1, i):
                runs[-1] = (runs[-1][0], j)
            else:
                runs.append((i, j))
        return runs

    def _update_keys(self, optimizer: Optimizer, chunk: ReduceChunk, weight: Tensor, grad: Tensor) -> None:
        block, place, present = chunk.block, chunk.place, chunk.present
        for at, i in enumerate(chunk.segments):
            layout = self.storage.layouts[block.keys[i]]
            if layout.last != i + 1 or not (present is None or present[at]):
                continue
            spec = layout.spec
            own = slice(layout.part.start - place.start, layout.part.stop - place.start)
            state, hyper = (
                self._key_state(layout, optimizer, spec.shape),
                {**block.hypers[i], "key": spec.key},
            )
            apply_update(optimizer, weight[own].view(spec.shape), grad[own].view(spec.shape), state, hyper)
            block.states.keep_key(layout.first, layout.last, layout.part, state)

    def _update_rows(self, optimizer: Optimizer, layouts: Sequence[KeyLayout], rows: RowSet) -> None:
        """Update some rows of a key, or of a row group that is contiguous in memory."""
        # 1. Treat a row group as one long key.
        layout, last = layouts[0], layouts[-1]
        if layout is not last:
            part = slice(layout.part.start, last.part.stop)
            layout = layout._replace(end_slot=last.end_slot, last=last.last, part=part)
        block, states, begin = layout.block, layout.block.states, layout.part.start
        keep, runs = states.keep_key, [(layout.first, layout.last)]
        if optimizer.elementwise:  # one call, unless options or state differ
            keep, runs = states.keep, self._runs(block, layout.first, layout.last, None, False)
        # 2. Protect what is written: these rows, or all of the key.
        are_protected = False
        if self._journal is not None:
            are_protected = self._writes_only_rows(optimizer, block, runs)
            are_protected = are_protected and self.storage.protect_rows(layout, rows.ids, True)
            if not are_protected:
                self.storage.protect_state(block, layout.part)
        # 3. Update each run of rows with equal options and state. Nothing has to know the former state of other rows,
        # unless an image of the state names what has been replaced.
        copies = self._journal is not None or optimizer.may_raise
        starts = [(states.segments[i][0] - begin) // layout.width for i, _ in runs]
        with self.storage.borrowed_key(layout, are_protected) as weight:
            for (i, j), own in zip(runs, cut_rows(rows, starts), strict=True):
                of_part, of_run = layout, weight
                if len(runs) > 1:
                    part = slice(states.segments[i][0], sum(states.segments[j - 1]))
                    of_part = layout._replace(first=i, last=j, part=part)
                    of_run = weight[part.start - begin : part.stop - begin]
                part = of_part.part
                shape = ((part.stop - part.start) // layout.width, *layout.spec.shape[1:])
                state = self._key_state(of_part, optimizer, shape, copies)

                def room(name: str, like: Tensor, part: slice = part) -> Tensor:
                    return states.cleared(name, like, part)

                hyper = {**block.hypers[i], "key": layout.spec.key}
                apply_update_to_rows(optimizer, of_run.view(shape), *own, state, hyper, room)
                keep(i, j, part, state)
        # 4. Record the changed rows of each key. Some optimizers change rows without gradient, too.
        if not self.tracks_changes:
            return
        starts = [(one.part.start - begin) // layout.width for one in layouts]
        for one, (ids, _) in zip(layouts, cut_rows(rows, starts), strict=True):
            is_all = not leaves_other_rows(optimizer, block.hypers[one.first])
            self._record_rows(one.key, None if is_all else ids)

    @staticmethod
    def _writes_only_rows(optimizer: Optimizer, block: Block, runs: Iterable[tuple[int, int]]) -> bool:
        """Return whether an update of rows leaves weights and state of all other rows as they are."""
        if torch_dtype(block.dtype) in (torch.float16, torch.bfloat16):
            return False  # its float32 copy follows weights that were replaced
        # The first update creates the state of all rows.
        return all(
            block.states.steps[i:j].all() and leaves_other_rows(optimizer, block.hypers[i]) for i, j in runs
        )

    def _key_state(
        self, layout: KeyLayout, optimizer: Optimizer, shape: Sequence[int], copies: bool = True
    ) -> State:
        states = layout.block.states
        state = states.view(layout.first, layout.part, copies=copies)
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
        contributions: Sequence[RankContribution],
        optimizer: Optimizer,
        hypers: Hypers,
        norm_type: float,
        unit: Unit,
    ) -> HeldSum:
        """Sum the contributions to one unit and keep the sum; return it, as a contribution for `update`, with its
        norms.

        What all ranks gave as rows is measured as rows, as in workers that update in process. The next call reuses
        memory.
        """
        # 1. Sum the rows that all ranks gave as rows.
        if unit.hypers is not hypers:
            self._set_hypers(unit, hypers)
        by_rows, rows, measured = list[int](), dict[int, RowSet](), dict[int, dict[int, RowSet]]()
        if any(given.rows for given in contributions):
            by_rows = self._updated_by_rows(contributions, optimizer)
            given_as_rows = self._sums.given_as_rows(contributions)
            layouts = self.storage.layouts
            rows = {key: self._sums.sum_of_rows([layouts[key]], contributions) for key in given_as_rows}
            measured = self._sums.by_slot(rows)
        # 2. Sum everything else into memory that stays until the decision, and measure it slice by slice.
        runs, partials = [], dict[int, Partial]()
        for chunk in self._sums.chunks(contributions, by_rows, False):
            block, place, present = chunk.block, chunk.place, chunk.present
            if block.sums is None:
                block.sums = aligned_zeros(
                    block.weights.numel(), compute_dtype(block.dtype), block.weights.device
                )
            total = self._sums.total(chunk, contributions, block.sums[place])
            first = chunk.segments.start
            runs.append(Run(chunk.first, chunk.end, total))
            for slot in range(runs[-1].first, runs[-1].end):
                one = self.storage.slots[slot]
                here = None if present is None else present[one.first - first : one.last - first]
                own = total[one.start - place.start :][: one.slice.used]
                sparse = measured.pop(slot, {})
                if here is None or here.any() or sparse:
                    body = own if here is None and not sparse else _only_dense(own, one.slice, here, sparse)
                    partials[slot] = Partial(one.slice.index, *partial_norm_of_slice(body, sparse, norm_type))
        # 3. Measure the slices that consist of rows only.
        for slot, sparse in measured.items():
            partials[slot] = Partial(
                self.storage.slots[slot].slice.index, *partial_norm_of_slice(None, sparse, norm_type)
            )
        updated = {key: rows[key] for key in by_rows}
        times = {
            key: self._sums.times_of_rows(key, updated[key].ids.numpy(), contributions)
            for key in self.hash_tables.keys() & updated.keys()
        }
        left_out = left_out_of_reduction(contributions)
        held = RankContribution(runs, 1.0, left_out, updated, is_scratch=True, times=times)
        return HeldSum(held, tuple(partials[slot] for slot in sorted(partials)))

    def call_updater(self, unit: Unit, contributions: Sequence[RankContribution], updater: Updater) -> None:
        """Sum, and let a user's function update each key of a unit. Raises OptimizerError, after a rollback."""
        # 1. Sum. The function gets whole keys, so the sums of all chunks are collected first.
        self.undos[unit] = self.snapshot(unit)
        unit.changes.record_all()
        left_out = left_out_of_reduction(contributions)
        sums: dict[int, Tensor] = {}
        for chunk in self._sums.chunks(contributions, (), True):
            place = chunk.place
            total = self._sums.total(chunk, contributions).to(torch_dtype(chunk.block.dtype), copy=True)
            for slot in self.storage.slots[chunk.first : chunk.end]:
                for key in {unit.first_key + segment.key for segment in slot.slice.segments}:
                    part = self.storage.layouts[key].part
                    sums[key] = total[part.start - place.start : part.stop - place.start]
        # 2. Call it for each key. Keys without elements are not in memory, but the function gets them, too.
        try:
            for at, spec in enumerate(unit.plan.specs):
                key = unit.first_key + at
                if key in left_out:
                    continue
                if key not in self.storage.layouts:  # it has no elements
                    empty = torch.empty(spec.shape, dtype=torch_dtype(spec.dtype), device="cpu")
                    updater(spec.key, empty, empty.clone())
                    continue
                with self.storage.borrowed_key(self.storage.layouts[key]) as weight:
                    merged = sums.get(key)
                    merged = torch.zeros_like(weight) if merged is None else merged
                    updater(spec.key, merged.view(spec.shape), weight.view(spec.shape))
        except Exception as error:
            self.undo(unit)
            raise OptimizerError(f"the updater raised {type(error).__name__}: {error}") from error

    def undo(self, unit: Unit) -> None:
        """Undo the last update of a unit, which must be in `undos`."""
        self.restore(unit, self.undos.pop(unit))

    def restore(self, unit: Unit, former: Undo) -> None:
        """Put back what `snapshot` or `hold_former` has kept."""
        unit.changes.record_all()
        if self._journal is not None and former.change not in (-1, self._journal.number):
            former = former._replace(
                weights=[one.clone() for one in former.weights],
                states=[one.copied() for one in former.states],
            )
        rows = zip(range(unit.first, unit.end), former.weights, former.states, former.counters, strict=True)
        for slot, weight, state, before in rows:
            self.storage.make_writable(slot)
            self.storage.protect(slot, slot + 1)
            self.storage.padded[slot].copy_(weight)
            self._replace_state(slot, state)
            counters = self.storage.slots[slot].block.counters
            if counters is not None and before is not None:
                # Peers that map the weights see those of the round before again.
                counters[:, self.storage.lines[slot]] = before
        self.counts[unit.first_key : unit.first_key + len(former.counts)] = former.counts

    def get_state(
        self, unit: Unit, index: int, copied: Callable[[Tensor], Tensor] = torch.clone, since: int = 0
    ) -> States:
        """Copy the optimizer state of one slice, of a hash table all of it.

        Args:
            copied: Copies flat memory.
            since: Of a hash table, for `HashTable.slice_state`.

        Raises ProtocolError if the slice is not on this server, or is not one of a hash table where that is needed.
        """
        slot = self.slot_of(unit, index)
        table = self._hash_table_of(slot)
        if table is None:
            if since:
                raise ProtocolError(f"slice {index} is not one of a hash table, which alone has changed rows")
            return self._copied_state(slot, copied)
        state = States.of_slice(self.storage.slots[slot].slice)
        state.steps[:] = table.step
        state.entries = [table.slice_state(self._hash_slice(slot), since)]
        return state

    def history(self, unit: Unit, index: int) -> int:
        """Return the history of a hash table's slice, 0 for another one. Raises like `get_state`."""
        slot = self.slot_of(unit, index)
        table = self._hash_table_of(slot)
        return 0 if table is None else table.history(self._hash_slice(slot))

    def put_state(self, unit: Unit, index: int, state: States, history: int = 0) -> None:
        """Replace the optimizer state of one slice, of a hash table all of it. Raises like `get_state`.

        Args:
            history: Of a hash table's slice, for `HashTable.put_slice_state`.
        """
        slot = self.slot_of(unit, index)
        table = self._hash_table_of(slot)
        if table is None:
            self._replace_state(slot, state)
        elif state.steps[0] or state.entries[0]:
            table.put_slice_state(
                self._hash_slice(slot), int(state.steps[0]), state.entries[0], self._claim_rows, history
            )
        else:
            table.clear_slice(self._hash_slice(slot))
        self.undos.pop(unit, None)

    def put_weights(self, unit: Unit, index: int, weights: Tensor) -> None:
        """Replace the weights of one slice, with padding. Raises like `get_state`."""
        slot = self.slot_of(unit, index)
        with self.storage.borrowed(slot, slot + 1) as own:
            own.copy_(weights)
        self.undos.pop(unit, None)
        if self.tracks_changes:
            unit.changes.record_all()

    def reset_states(self) -> None:
        for block in self.storage.blocks:
            block.states.forget()
        for table in self.hash_tables.values():
            table.forget_state()
        self.counts[:] = 0

    @property
    def state_nbytes(self) -> int:
        return sum(block.states.nbytes for block in self.storage.blocks)

    def updates_after(self, unit: Unit, contributions: Sequence[RankContribution]) -> int:
        """Return the updates of a unit's most updated key, this one included.

        Every server learns from every contribution which keys it has, also those of other servers, so all servers
        count the same. Loaded state has its own counts.
        """
        left_out = left_out_of_reduction(contributions)
        end = unit.first_key + len(unit.plan.specs)
        found = [
            c + (k not in left_out)
            for k, c in enumerate(self.counts[unit.first_key : end].tolist(), unit.first_key)
        ]
        for slot in self.storage.slots[unit.first : unit.end]:
            states, keys = slot.block.states, slot.block.keys
            found += [int(states.steps[i]) + (keys[i] not in left_out) for i in range(slot.first, slot.last)]
        return max(found, default=0)

    def copy_read(self, unit: Unit, version: int, others: Mapping[int, Tensor] | None = None) -> Read:
        """Copy the current weights of a unit as ranks are sent them; `others` replaces those of some slots.

        Delay-compensated optimizers need the weights that a gradient was computed with. In asynchronous modes these
        differ by rank (Zheng et al., Asynchronous SGD with Delay Compensation, 2017).
        """
        present = enumerate(self.storage.visible[unit.first : unit.end], unit.first)
        others = others or {}
        read = [(slot, others.get(slot, weight)[: len(weight)]) for slot, weight in present]
        if self._journal is None:
            return Read(version, [weight.clone() for _, weight in read])
        # The first copy that neither a rank nor a restarted process has read.
        used = {one.copy for own in unit.reads.values() for one in own} | unit.stored_copies
        copy = next(at for at in count() if at not in used)
        kept = self.stored_read(unit, version, copy)
        for (_, weight), own in zip(read, kept.weights, strict=True):
            own.copy_(weight)
        return kept

    def stored_read(self, unit: Unit, version: int, copy: int) -> Read:
        """Return a copy of a unit's weights in memory that outlives the process."""
        weights = []
        for slot in range(unit.first, unit.end):
            own = self.storage.durable_part(f"reads{copy}", slot)
            weights.append(own[: self.storage.slots[slot].slice.used])
        return Read(version, weights, copy)

    def restore_read(self, unit: Unit, rank: int, version: int, name: str) -> None:
        """Copy the weights that a rank read at `version` into the optimizer state `name`; forget its other reads."""
        known = unit.reads.get(rank)
        if not known:
            return
        # The version itself, or the one before it.
        read = next((one for one in reversed(known) if one.version <= version), known[0])
        unit.reads[rank] = [read]
        for slot, weights in zip(self.storage.slots[unit.first : unit.end], read.weights, strict=True):
            kept = slot.block.states.tensors.get(name)
            if kept is not None:
                own = kept[slot.start : slot.start + len(weights)]
                if self._journal is not None:
                    self._journal.protect([own])
                own.copy_(weights)

    def _hash_table_of(self, slot: int) -> HashTable | None:
        one = self.storage.slots[slot]
        return self.hash_tables.get(one.unit.first_key + one.slice.segments[0].key)

    def _hash_slice(self, slot: int) -> int:
        """Return the number of a hash table's slice."""
        [segment] = self.storage.slots[slot].slice.segments
        return segment.key_start // segment.numel

    def slot_of(self, unit: Unit, index: int) -> int:
        slot = unit.slots.get(index)
        if slot is None:
            raise ProtocolError(f"slice {index} of the table is not on this server")
        return slot

    def _copied_state(self, slot: int, copied: Callable[[Tensor], Tensor] = torch.clone) -> States:
        one = self.storage.slots[slot]
        return one.block.states.copy(one.first, one.last, slice(one.start, self.storage.ends[slot]), copied)

    def _replace_state(self, slot: int, state: States) -> None:
        one = self.storage.slots[slot]
        part = slice(one.start, self.storage.ends[slot])
        self.storage.protect_state(one.block, part)
        one.block.states.replace(one.first, part, state)

    def former_weights(self, unit: Unit, index: int) -> Tensor | None:
        """Return the weights of a slice, with padding, before the last change of the unit; None if they are not kept.

        They are kept with a journal, unless the last change was of some rows. Not a copy: valid until the next change.
        """
        return self.storage.former(self.slot_of(unit, index))

    def hold_former(self, unit: Unit) -> Undo:
        """Keep what a unit has, to `restore` it after changes in several calls, until `release_former`."""
        former = self.snapshot(unit)
        if self._journal is not None:
            self._journal.hold(unit, self._tensors_of(unit))
            former = former._replace(change=-1)  # the shadow stays as it is
        return former

    def release_former(self, unit: Unit) -> None:
        """Accept the changes since `hold_former`."""
        if self._journal is not None:
            self._journal.release(unit)
            self.storage.note_protected(unit.first, unit.end)  # since one and the same change

    def keep_undo(self, unit: Unit, former: Undo) -> None:
        """Let the changes since `hold_former` be undone until the next one, if `keeps_undos`."""
        if self.keeps_undos and self._journal is not None:
            self.undos[unit] = former._replace(change=self._journal.number)

    def _tensors_of(self, unit: Unit) -> list[Tensor]:
        """Return all memory that a change of the unit can write: weights, counters and optimizer state."""
        found: list[Tensor] = []
        for slot in range(unit.first, unit.end):
            one, lines = self.storage.slots[slot], self.storage.lines[slot]
            part = slice(one.start, self.storage.ends[slot])
            found += [
                self.storage.padded[slot],
                *(memory[part] for memory in one.block.states.tensors.values()),
            ]
            if one.block.counters is not None:
                found += map(torch.from_numpy, one.block.counters[:, lines])
        return found

    def snapshot(self, unit: Unit) -> Undo:
        """Keep what a unit has now, so that a change of it can be undone: weights, write counters, state and counts.

        With a journal the copies are those in its shadow, which it makes anyway; they hold until the next commit.
        """
        slots = range(unit.first, unit.end)
        counts = self.counts[unit.first_key : unit.first_key + len(unit.plan.specs)]
        copied: Callable[[Tensor], Tensor] = torch.clone
        change, journal = -1, self._journal
        if journal is not None:
            journal.protect(self._tensors_of(unit))
            self.storage.note_protected(unit.first, unit.end)
            change = journal.number

            def copied(tensor: Tensor) -> Tensor:
                kept = journal.former(tensor)
                return tensor.clone() if kept is None else kept

        weights = [copied(self.storage.padded[slot]) for slot in slots]
        lines = [(self.storage.slots[slot].block.counters, self.storage.lines[slot]) for slot in slots]
        counters = [None if own is None else own[:, where].copy() for own, where in lines]
        states = [self._copied_state(slot, copied) for slot in slots]
        return Undo(weights, states, counts.copy(), counters, change, dict(self.storage.moved_to))

    def _set_hypers(self, unit: Unit, hypers: Hypers) -> None:
        unit.hypers = hypers
        for slot in self.storage.slots[unit.first : unit.end]:
            own = [hypers[segment.key] for segment in slot.slice.segments]
            before = slot.block.hypers[slot.first - 1] if slot.first else None
            # Adjacent segments with equal values share one mapping, so that updates compare by identity.
            if before is not None and own[0] == before:
                own = [before if row is own[0] else row for row in own]
            slot.block.hypers[slot.first : slot.last] = own
            slot.block.hyper_ids[slot.first : slot.last] = list(map(id, own))

    def _updated_by_rows(self, contributions: Sequence[RankContribution], optimizer: Optimizer) -> list[int]:
        return [
            key
            for key in self._sums.given_as_rows(contributions)
            if not optimizer.elementwise
            or key in self.hash_tables
            or needs_row_sparse(
                optimizer, self.storage.layouts[key].block.hypers[self.storage.layouts[key].first]
            )
        ]

    def _record_dense(self, chunk: ReduceChunk) -> None:
        first, present = chunk.segments.start, chunk.present
        for slot in self.storage.slots[chunk.first : chunk.end]:
            changes, key = slot.unit.changes, slot.slice.segments[0].key
            here = None if present is None else present[slot.first - first : slot.last - first]
            if here is None or here.all():
                changes.record(key)
                continue
            for position in np.flatnonzero(here).tolist():
                changes.record(key, position)

    def _record_rows(self, key: int, ids: Tensor | None) -> None:
        if not self.tracks_changes:
            return
        layout = self.storage.layouts[key]
        slot = self.storage.slots[layout.slot]
        layout.unit.changes.record(slot.slice.segments[0].key, layout.first - slot.first, ids)


def _join_shard_slices(parts: Sequence[RowSet]) -> RowSet:
    """Join rows of a key from several slices. Raises ProtocolError unless they are distinct and ascending."""
    ids = torch.cat([part.ids for part in parts])
    if not bool((ids[1:] > ids[:-1]).all()):
        raise ProtocolError("slices of one key name the same rows, or rows of each other")
    return RowSet(ids, torch.cat([part.values for part in parts]))


def _same_options_and_state(block: Block, a: int, b: int) -> bool:
    states = block.states
    return bool(
        states.steps[a] == states.steps[b]
        and (block.hypers[a] is block.hypers[b] or block.hypers[a] == block.hypers[b])
        and (states.entries[a] is states.entries[b] or states.entries[a] == states.entries[b])
    )


def _only_dense(body: Tensor, slice_: Slice, present: Present, rows: Mapping[int, RowSet]) -> Tensor | None:
    """Return a slice's dense elements, with zeros for segments given as rows or not at all; None if there are none."""
    dense = [(present is None or present[at]) and at not in rows for at in range(len(slice_.segments))]
    if not any(dense):
        return None
    return body if all(dense) else only_segments(body, slice_, dense)
