"""Sums of the ranks' contributions to a Shard, some adjacent slots at a time.

A contribution is a list of runs (dense elements of adjacent slots) and of rows of keys. `Reduction.chunks` divides the
slots into chunks that fit into a cache: first into spans to which the same ranks contribute (`_spans`), then into
groups of spans that are adjacent and short enough (`_span_groups`). The division depends only on what was given, not
on its contents, so it is cached. `Reduction.total` adds one chunk; `Reduction.sum_of_rows` adds rows.

Invariants: sums are left folds in rank order, so bits do not depend on the order of arrival. Half precision is summed
in float32. Compressed payloads are decoded while they are added. Equal scales are applied once, to the sum.
"""

from __future__ import annotations

import sys
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import pairwise
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from kvstore_server.codec import compute_dtype
from kvstore_server.memo import BoundedCache
from kvstore_server.optimizer import coalesce_rows
from kvstore_server.optimizer.rows import CACHED
from kvstore_server.plan import Ints
from kvstore_server.protocol.rows import CompressedPayload, Payload, RowSet, cut_rows, payload_nbytes
from kvstore_server.shard.storage import Block, KeyLayout, Storage

NO_KEYS: frozenset[int] = frozenset()

Present = np.ndarray[Any, np.dtype[np.bool_]] | None
"""For adjacent segments, whether they are updated; None: all are."""

_HALF = (torch.float16, torch.bfloat16)
_bounds_of = itemgetter(0, 1)


class Run(NamedTuple):
    """What a rank gives to adjacent slots of a Shard, from `first` up to `end`."""

    first: int
    end: int
    payload: Payload
    """Plain elements of whole slots with zeros as padding, which the last slot may lack; otherwise the payload of one
    slot. Sums never get parts of a slice.
    """


class RankContribution(NamedTuple):
    """One rank's contribution to a sum.

    Args:
        runs: Ascending, without overlaps.
        scale: Factor of everything.
        absent: Keys (as the Shard numbers them) that this rank leaves out.
        rows: Key → the rows that the rank gives instead of the whole key; runs are ignored there.
        is_scratch: Whether the memory may be overwritten.
        times: Key of a hash table → how many gradients are in each of its rows, where that is not one.
        borrowed: Key → its elements, contiguous, in whole lines, which must not be overwritten; runs are ignored
            there. Only for a single contribution that is scratch.
    """

    runs: Sequence[Run]
    scale: float = 1.0
    absent: frozenset[int] = NO_KEYS
    rows: Mapping[int, RowSet] = {}
    is_scratch: bool = False
    borrowed: Mapping[int, Tensor] = {}
    times: Mapping[int, Ints] = {}

    @property
    def nbytes(self) -> int:
        return sum([payload_nbytes(run.payload) for run in self.runs]) + payload_nbytes(self.rows)


class ContributionShape(NamedTuple):
    """What a rank contributes to, without payloads."""

    bounds: tuple[tuple[int, int], ...]
    """First slot and end of each run."""
    absent: frozenset[int]
    rows: frozenset[int]
    """The keys that it gives rows of."""


class SpanInput(NamedTuple):
    """Where the elements of a span are in a contribution."""

    number: int
    """The index of the contribution."""
    run: int
    """The index of its run; -1: it has only rows."""
    at: int
    """Offset of the span in the run, in elements."""


class Span(NamedTuple):
    """Adjacent slots to which the same ranks contribute."""

    first: int
    end: int
    given: list[SpanInput]
    sparse: Sequence[KeyLayout] = ()
    """Keys with rows that count as dense elements."""
    start: int = 0
    """Offset in its chunk, in elements."""
    used: int = 0
    """End in its chunk without the padding of its last slot."""
    stop: int = 0
    """End in its chunk with that padding."""


class ScratchViews(NamedTuple):
    """The scratch memory in which a chunk is summed, for it costs more to make a view than to add a small one."""

    memory: Tensor
    """All of it."""
    out: Tensor
    """What the chunk takes."""
    spans: list[tuple[Tensor | None, Tensor]]
    """The padding of each span, if it has some, and its elements."""


class ReduceChunk(NamedTuple):
    """Adjacent slots that are summed at once, from `first` up to `end`."""

    first: int
    end: int
    spans: list[Span]
    block: Block
    place: slice
    """Their elements in the block."""
    segments: range
    """Their segments in the block."""
    present: Present
    scratch: list[ScratchViews]
    """Those of its last sum, if there was one."""


def part_of(flat: Tensor, start: int, stop: int) -> Tensor:
    """Return a part of a vector. Making a view costs as much as adding 10,000 elements, so the whole needs none."""
    return flat if not start and stop >= flat.numel() else flat[start:stop]


def _divide_scratch(chunk: ReduceChunk, memory: Tensor, out: Tensor) -> ScratchViews:
    spans = [
        (
            out[span.used : span.stop] if span.used < span.stop else None,
            out if span.used - span.start == len(out) else out[span.start : span.used],
        )
        for span in chunk.spans
    ]
    return ScratchViews(memory, out, spans)


def left_out_of_reduction(contributions: Sequence[RankContribution]) -> frozenset[int]:
    """Return the keys that every contribution leaves out."""
    left_out = contributions[0].absent if contributions else NO_KEYS
    for given in contributions:
        left_out &= given.absent
    return left_out


class Reduction:
    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._chunks = BoundedCache[list[ReduceChunk]](storage.slots)
        self._memory: dict[tuple[torch.device, torch.dtype, int], Tensor] = {}

    def given_as_rows(self, contributions: Sequence[RankContribution]) -> list[int]:
        """Return the keys that all ranks with a contribution to them gave as rows."""
        keys = sorted({key for given in contributions for key in given.rows})
        for given in contributions:
            known = {*given.rows, *given.absent}
            keys = [key for key in keys if key in known or not self._has_run(given, key)]
        return keys

    def _has_run(self, given: RankContribution, key: int) -> bool:
        slot = self._storage.layouts[key].slot
        at = bisect_right(given.runs, slot, key=lambda run: run.first) - 1
        return at >= 0 and slot < given.runs[at].end

    def side_by_side(
        self, keys: Sequence[int], contributions: Sequence[RankContribution]
    ) -> list[list[KeyLayout]]:
        """Group (ascending) keys whose rows, from the same ranks, are adjacent in memory, gaps of whole rows aside."""
        joined: list[list[KeyLayout]] = []
        for layout in map(self._storage.layouts.__getitem__, keys):
            before = joined[-1][-1] if joined else layout
            is_next = before.block is layout.block and before.last == layout.first
            is_next = is_next and before.width == layout.width
            is_next = is_next and not (layout.part.start - before.part.stop) % layout.width
            if is_next and all((layout.key in one.rows) == (before.key in one.rows) for one in contributions):
                joined[-1].append(layout)
            else:
                joined.append([layout])
        return joined

    def sum_of_rows(
        self,
        layouts: Sequence[KeyLayout],
        contributions: Sequence[RankContribution],
        is_only_read: bool = False,
    ) -> RowSet:
        """Sum rows; as in dense sums, equal scales are applied once. May return the rows of a scratch contribution.

        Args:
            layouts: Of one key, or of a group from `side_by_side`: ids count from the first row of the first key.
            is_only_read: The result may be the rows of any contribution, because the caller reads them at once.
        """
        # 1. Collect the rows of each rank, in the compute dtype.
        layout, parts = layouts[0], [one for one in contributions if layouts[0].key in one.rows]
        common = parts[0].scale if len({one.scale for one in parts}) == 1 else None
        of_keys = [one.rows[layout.key] for one in parts]
        if len(layouts) > 1:
            starts = [(one.part.start - layout.part.start) // layout.width for one in layouts]
            of_keys = [_join_reduced_keys([one.rows[here.key] for here in layouts], starts) for one in parts]
        values = [rows.values.to(compute_dtype(layout.block.dtype)) for rows in of_keys]
        if common is None:
            values = [value * one.scale for value, one in zip(values, parts, strict=True)]
        # 2. Sum rows with equal ids, in rank order; those of one rank are distinct.
        ids, total = of_keys[0].ids, values[0]
        if len(parts) > 1:
            num_rows = (layouts[-1].part.stop - layout.part.start) // layout.width
            num_rows *= layout.spec.hash_table is None
            ids, total = torch.cat([rows.ids for rows in of_keys]), torch.cat(values)
            ids, total = coalesce_rows(ids, total, num_rows)
        if common not in (None, 1.0):
            total = total * common
        # 3. Never return memory to write to that the caller of this process still uses.
        is_given = len(layouts) == 1 and total is of_keys[0].values and not parts[0].is_scratch
        return RowSet(ids, total.clone() if is_given and not is_only_read else total)

    def times_of_rows(self, key: int, ids: Ints, contributions: Sequence[RankContribution]) -> Ints:
        """Return how many gradients there were of each of these rows of a hash table, which is all of them."""
        times = np.zeros(len(ids), np.int64)
        for one in contributions:
            if key in one.rows:
                own = one.rows[key].ids.numpy()
                where = slice(None) if len(own) == len(ids) else ids.searchsorted(own)
                times[where] += one.times.get(key, 1)
        return times

    def by_slot(self, rows: Mapping[int, RowSet]) -> dict[int, dict[int, RowSet]]:
        """Return slot → position of a segment → its rows."""
        found: dict[int, dict[int, RowSet]] = {}
        for key, own in rows.items():
            layout = self._storage.layouts[key]
            segments = layout.block.states.segments[layout.first : layout.last]
            if layout.spec.hash_table is None:
                starts = [(start - layout.part.start) // layout.width for start, _ in segments]
            else:
                starts = layout.unit.plan.rows(layout.in_plan).blocks[layout.unit.server].starts[:-1].tolist()
            parts = cut_rows(own, starts)
            for at, (slot, part) in enumerate(zip(range(layout.slot, layout.end_slot), parts, strict=True)):
                found.setdefault(slot, {})[layout.first + at - self._storage.slots[slot].first] = part
        return found

    def chunks(
        self,
        contributions: Sequence[RankContribution],
        by_rows: Sequence[int],
        whole_keys: bool,
        are_whole: bool = False,
    ) -> list[ReduceChunk]:
        """Divide the slots into chunks that are summed at once; with `whole_keys`, chunks end at the end of a key.

        Args:
            by_rows: Keys that are updated by rows and ignored here; rows of other keys are a gradient with zeros
                elsewhere.
            are_whole: Whether nothing has to be summed, so that all adjacent slots can be one chunk.
        """
        named: list[Any] = [tuple(by_rows), whole_keys, are_whole]
        for one in contributions:
            named.append((tuple(map(_bounds_of, one.runs)), one.absent, frozenset(one.rows)))
        return self._chunks.get(tuple(named), self._divide, *named)

    def part(self, slot: int, begin: int, end: int, contributions: Sequence[RankContribution]) -> ReduceChunk:
        """Return a chunk of whole lines of a slot, to which dense elements are contributed."""
        one = self._storage.slots[slot]
        given = [SpanInput(number, 0, 0) for number, own in enumerate(contributions) if own.runs]
        used = min(end, one.slice.used) - begin
        place = slice(one.start + begin, one.start + end)
        ends = one.block.ends
        # An empty segment belongs to the part at whose end it is; those at the start of the slot, to its first part.
        first = bisect_right(ends, place.start, one.first, one.last) if begin else one.first
        last = bisect_left(ends, place.stop, first, one.last - 1) + 1
        last = max(last, bisect_right(ends, place.stop, first, one.last))
        span = Span(slot, slot + 1, given, (), 0, used, end - begin)
        return ReduceChunk(slot, slot + 1, [span], one.block, place, range(first, last), None, [])

    def _divide(
        self, by_rows: tuple[int, ...], whole_keys: bool, are_whole: bool, *given: tuple[Any, ...]
    ) -> list[ReduceChunk]:
        slots, ends, chunks = self._storage.slots, self._storage.ends, []
        shapes = [ContributionShape(*one) for one in given]
        for spans in self._span_groups(shapes, by_rows, whole_keys, are_whole):
            first, last = slots[spans[0].first], slots[spans[-1].end - 1]
            # A segment is present unless it is updated by rows, or all ranks left its key out.
            absent = [[shapes[source.number].absent for source in span.given] for span in spans]
            found: list[bool] = []
            if by_rows or any(all(some) for some in absent):
                for span, some in zip(spans, absent, strict=True):
                    found += [
                        key not in by_rows and any(key not in keys for keys in some)
                        for key in first.block.keys[slots[span.first].first : slots[span.end - 1].last]
                    ]
            place = slice(first.start, ends[spans[-1].end - 1])
            present = None if all(found) else np.array(found)
            placed = [self._placed(span, first.start) for span in spans]
            segments = range(first.first, last.last)
            chunks.append(
                ReduceChunk(spans[0].first, spans[-1].end, placed, first.block, place, segments, present, [])
            )
        return chunks

    def _placed(self, span: Span, begin: int) -> Span:
        last, stop = self._storage.slots[span.end - 1], self._storage.ends[span.end - 1] - begin
        start, used = self._storage.slots[span.first].start - begin, last.start + last.slice.used - begin
        return span._replace(start=start, used=used, stop=stop)

    def _span_groups(
        self, shapes: Sequence[ContributionShape], by_rows: Collection[int], whole_keys: bool, are_whole: bool
    ) -> Iterator[list[Span]]:
        """Yield groups of spans, cut and merged to what is summed at once."""
        group: list[Span] = []
        begin, storage = 0, self._storage
        for span in self._spans(shapes, by_rows):
            first, weights = span.first, storage.slots[span.first].block.weights
            is_cut = weights.device.type == "cpu" and not (are_whole and weights.dtype not in _HALF)
            at_once = CACHED if is_cut else sys.maxsize
            while first < span.end:
                is_next = bool(group) and storage.is_next(group[-1].end - 1, first)
                # With whole keys a chunk grows beyond the limit until a key ends.
                is_bound = is_next and whole_keys and storage.continues_key(first)
                if group and not is_bound and not (is_next and storage.ends[first] - begin <= at_once):
                    yield group
                    group = []
                if not group:
                    begin = storage.slots[first].start
                end = bisect_right(storage.ends, begin + at_once, first + 1, span.end)
                while whole_keys and end < span.end and storage.continues_key(end):
                    end += 1
                skipped = storage.slots[first].start - storage.slots[span.first].start
                given = [source._replace(at=source.at + skipped) for source in span.given]
                group.append(Span(first, end, given, span.sparse))
                first = end
        if group:
            yield group

    def _spans(self, shapes: Sequence[ContributionShape], by_rows: Collection[int]) -> Iterator[Span]:
        """Split what was given at every change of ranks, runs or keys with rows."""
        keys = frozenset().union(*(one.rows for one in shapes))
        layouts, slots = (
            [self._storage.layouts[key] for key in sorted(keys.difference(by_rows))],
            self._storage.slots,
        )
        pairs = [(layout.slot, layout.end_slot) for layout in layouts]
        pairs += [pair for one in shapes for pair in one.bounds]
        cuts = sorted({edge for pair in pairs for edge in pair})
        at = [0] * len(shapes)
        for first, end in pairwise(cuts):
            sparse = [layout for layout in layouts if layout.slot <= first < layout.end_slot]
            given: list[SpanInput] = []
            for number, one in enumerate(shapes):
                while at[number] < len(one.bounds) and one.bounds[at[number]][1] <= first:
                    at[number] += 1
                begin = one.bounds[at[number]][0] if at[number] < len(one.bounds) else end
                if begin <= first:
                    given.append(SpanInput(number, at[number], slots[first].start - slots[begin].start))
                elif any(layout.key in one.rows for layout in sparse):
                    given.append(SpanInput(number, -1, 0))
            if given:
                yield Span(first, end, given, sparse)

    def alone(
        self, chunk: ReduceChunk, contributions: Sequence[RankContribution]
    ) -> tuple[Tensor, float] | None:
        """Return one rank's scratch memory and factor for a chunk if they can replace its sum; otherwise None."""
        length = chunk.place.stop - chunk.place.start
        [span, *others], [source, *more] = chunk.spans, chunk.spans[0].given
        one = contributions[source.number]
        if others or more or span.sparse or not one.is_scratch or source.run < 0:
            return None
        payload = one.runs[source.run].payload
        if not isinstance(payload, Tensor) or payload.dtype != compute_dtype(chunk.block.dtype):
            return None
        own = part_of(payload, source.at, source.at + length)
        return (own, one.scale) if len(own) == length else None

    def total(
        self, chunk: ReduceChunk, contributions: Sequence[RankContribution], out: Tensor | None = None
    ) -> Tensor:
        """Return the sum of scale * elements of a chunk over ranks, in the compute dtype, with zero padding.

        Equal scales, the usual case, are applied once to the sum, so that summing ranks and summing the replicas of
        one process give the same bits. The result is `out`, or scratch memory that the next call overwrites.
        """
        views = self._views(chunk) if out is None else _divide_scratch(chunk, out, out)
        for span, (padding, body) in zip(chunk.spans, views.spans, strict=True):
            if padding is not None:
                padding.zero_()
            total, scale, is_common = None, contributions[span.given[0].number].scale, True
            for source in span.given:
                is_common &= contributions[source.number].scale == scale
            for source in span.given:
                one = contributions[source.number]
                values = self._numbers(body, span, one, source, total is not None)
                values = values if is_common else values * one.scale
                total = values if total is None else torch.add(total, values, out=body)
            if total is not None and total is not body:
                body.copy_(total)
            if is_common and scale != 1.0:
                body.mul_(scale)
        return views.out

    def _views(self, chunk: ReduceChunk) -> ScratchViews:
        weights, dtype = chunk.block.weights, compute_dtype(chunk.block.dtype)
        if not chunk.scratch or chunk.scratch[0].memory is not self._memory.get((weights.device, dtype, 0)):
            out = self._scratch(weights, dtype, chunk.place.stop - chunk.place.start)
            memory = self._memory[weights.device, dtype, 0]
            chunk.scratch[:] = [_divide_scratch(chunk, memory, out)]
        return chunk.scratch[0]

    def _scratch(self, like: Tensor, dtype: torch.dtype, numel: int, number: int = 0) -> Tensor:
        """Return flat scratch memory on the device of `like`; the next call with the same `number` overwrites it."""
        kept = self._memory.get((like.device, dtype, number))
        room = 0 if kept is None else kept.numel()
        if kept is None or room < numel:
            kept = self._memory[like.device, dtype, number] = torch.empty(
                numel, dtype=dtype, device=like.device
            )
            room = numel
        return kept if room == numel else kept[:numel]

    def _numbers(
        self, body: Tensor, span: Span, one: RankContribution, source: SpanInput, is_further: bool
    ) -> Tensor:
        """Return what a rank gave to a span, in the dtype of `body`, possibly in `body` itself for the first rank."""
        # 1. Plain elements without rows are used in place.
        slot, payload = self._storage.slots[span.first], None
        run = one.runs[source.run] if source.run >= 0 else None
        if run is not None and isinstance(run.payload, Tensor):
            payload = part_of(run.payload, source.at, source.at + span.used - span.start)
            if not span.sparse:
                return payload if payload.dtype == body.dtype else payload.to(body.dtype)
        # 2. Otherwise assemble them: plain, zero, or decoded.
        values = self._scratch(body, body.dtype, len(body), 1) if is_further else body
        if payload is not None:
            values.copy_(payload)
        elif run is None:
            values.zero_()
        else:
            assert isinstance(run.payload, CompressedPayload)
            run.payload.codec.decode(run.payload.data, slot.block.dtype, values)
            # Some codecs cannot represent zero, and a residual may add something where the rank gave nothing.
            end = 0
            for segment in slot.slice.segments:
                values[end : segment.start].zero_()
                end = segment.start + segment.numel
                if slot.unit.first_key + segment.key in one.absent:
                    values[segment.start : end].zero_()
        # 3. Replace the keys that the rank gave as rows.
        for layout in span.sparse:
            found = one.rows.get(layout.key)
            low, high = max(layout.part.start, slot.start), min(layout.part.stop, slot.start + len(body))
            if found is not None and low < high:
                edges = [
                    (edge - layout.part.start) // layout.width for edge in (layout.part.start, low, high)
                ]
                [_, (ids, rows), _] = cut_rows(found, edges)
                part = values[low - slot.start : high - slot.start].zero_()
                part.view(-1, layout.width)[ids] = rows.to(body.dtype)
        return values


def _join_reduced_keys(parts: Sequence[RowSet], starts: Sequence[int]) -> RowSet:
    """Concatenate rows of several keys, with ids shifted by each key's start."""
    ids = [part.ids + start for part, start in zip(parts, starts, strict=True)]
    return RowSet(torch.cat(ids), torch.cat([part.values for part in parts]))
