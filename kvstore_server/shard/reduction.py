"""Sums of what ranks contributed to a Shard, some neighbouring slots at a time.

Sums are left folds in rank order, so their bits do not depend on the order of arrival. Half precision accumulates in
float32. Compressed payloads are decoded as they are added.
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
from kvstore_server.protocol.rows import CompressedPayload, Payload, RowSet, cut_rows, payload_nbytes
from kvstore_server.shard.storage import Block, Home, Storage

NO_KEYS: frozenset[int] = frozenset()

Present = np.ndarray[Any, np.dtype[np.bool_]] | None
"""Of neighbouring segments, which are updated; None: all."""

_HALF = (torch.float16, torch.bfloat16)
_bounds_of = itemgetter(0, 1)


class Run(NamedTuple):
    """What a rank gives to neighbouring slots of a Shard, from `first` up to `end`."""

    first: int
    end: int
    payload: Payload
    """Plain numbers of whole slots with zeros as padding, which may be missing behind the last; otherwise one slot's. A
    sum is not given parts."""


class RankContribution(NamedTuple):
    """One rank's part in a sum.

    Args:
        runs: In ascending order, without overlaps.
        scale: Factor of all of it.
        absent: The keys (as the Shard numbers them) that this rank leaves out.
        rows: Key → the rows of its block of which the rank has only those; runs do not count there.
        is_scratch: Whether the memory may be overwritten.
        borrowed: Key → its numbers, contiguous, of whole lines, not to be overwritten; runs do not count there. Only of
            a rank that gives scratch alone.
    """

    runs: Sequence[Run]
    scale: float = 1.0
    absent: frozenset[int] = NO_KEYS
    rows: Mapping[int, RowSet] = {}
    is_scratch: bool = False
    borrowed: Mapping[int, Tensor] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of what the rank gave."""
        return sum([payload_nbytes(run.payload) for run in self.runs]) + payload_nbytes(self.rows)


class Outline(NamedTuple):
    """To what a rank contributes, without the numbers."""

    bounds: tuple[tuple[int, int], ...]
    """First slot and end of each run."""
    absent: frozenset[int]
    rows: frozenset[int]
    """The keys of which it gives rows."""


class SpanSource(NamedTuple):
    """Where the numbers of a span are in a contribution."""

    number: int
    """Of the contribution."""
    run: int
    """The number of its run; -1: it has only rows."""
    at: int
    """Where the span begins in the run, in elements."""


class Span(NamedTuple):
    """Neighbouring slots to which the same ranks contribute."""

    first: int
    end: int
    given: list[SpanSource]
    sparse: Sequence[Home] = ()
    """The keys of which a rank gave rows that count as dense numbers."""
    start: int = 0
    """Where it begins in its chunk, in elements."""
    used: int = 0
    """Where the padding of its last slot begins there."""
    stop: int = 0
    """Where that ends."""


class Chunk(NamedTuple):
    """Neighbouring slots that are summed at once, from `first` up to `end`."""

    first: int
    end: int
    spans: list[Span]
    block: Block
    place: slice
    """Their elements in the block."""
    segments: range
    """In the block."""
    present: Present


def part_of(flat: Tensor, start: int, stop: int) -> Tensor:
    """Return a part of a vector; all of it as it is, for a view takes as long as the sum of 10,000 numbers."""
    return flat if not start and stop >= flat.numel() else flat[start:stop]


def left_out_by_all(contributions: Sequence[RankContribution]) -> frozenset[int]:
    """Return the keys that none of the contributions has."""
    left_out = contributions[0].absent if contributions else NO_KEYS
    for given in contributions:
        left_out &= given.absent
    return left_out


class Sums:
    """Sums contributions to the slots of a storage."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._chunks = BoundedCache[list[Chunk]](storage.slots)
        self._memory: dict[tuple[torch.device, torch.dtype, int], Tensor] = {}

    def given_as_rows(self, contributions: Sequence[RankContribution]) -> list[int]:
        """Return the keys of which all ranks that have them gave only rows."""
        keys = sorted({key for given in contributions for key in given.rows})
        for given in contributions:
            known = {*given.rows, *given.absent}
            keys = [key for key in keys if key in known or not self._has_run(given, key)]
        return keys

    def _has_run(self, given: RankContribution, key: int) -> bool:
        """Tell whether a rank gave numbers to the first slot of a key."""
        slot = self._storage.homes[key].slot
        at = bisect_right(given.runs, slot, key=lambda run: run.first) - 1
        return at >= 0 and slot < given.runs[at].end

    def side_by_side(
        self, keys: Sequence[int], contributions: Sequence[RankContribution]
    ) -> list[list[Home]]:
        """Join (ascending) keys whose rows, from the same ranks, lie as those of one key.

        Rows that no key has may lie between them.
        """
        joined: list[list[Home]] = []
        for home in map(self._storage.homes.__getitem__, keys):
            before = joined[-1][-1] if joined else home
            is_next = before.block is home.block and before.last == home.first
            is_next = is_next and before.width == home.width
            is_next = is_next and not (home.part.start - before.part.stop) % home.width
            if is_next and all((home.key in one.rows) == (before.key in one.rows) for one in contributions):
                joined[-1].append(home)
            else:
                joined.append([home])
        return joined

    def sum_of_rows(self, homes: Sequence[Home], contributions: Sequence[RankContribution]) -> RowSet:
        """Sum rows; as in dense sums, equal scales are applied once. It may be the rows of a scratch contribution.

        Args:
            homes: Of one key, or of keys that are `side_by_side`: ids count from the first row of the first one.
        """
        home, parts = homes[0], [one for one in contributions if homes[0].key in one.rows]
        common = parts[0].scale if len({one.scale for one in parts}) == 1 else None
        of_keys = [one.rows[home.key] for one in parts]
        if len(homes) > 1:
            starts = [(one.part.start - home.part.start) // home.width for one in homes]
            of_keys = [_joined([one.rows[here.key] for here in homes], starts) for one in parts]
        values = [rows.values.to(compute_dtype(home.block.dtype)) for rows in of_keys]
        if common is None:
            values = [value * one.scale for value, one in zip(values, parts, strict=True)]
        ids, total = of_keys[0].ids, values[0]
        if len(parts) > 1:
            ids, total = torch.cat([rows.ids for rows in of_keys]), torch.cat(values)
        ids, total = coalesce_rows(ids, total, (homes[-1].part.stop - home.part.start) // home.width)
        if common not in (None, 1.0):
            total = total * common
        is_given = len(homes) == 1 and total is of_keys[0].values and not parts[0].is_scratch
        return RowSet(ids, total.clone() if is_given else total)

    def by_slot(self, rows: Mapping[int, RowSet]) -> dict[int, dict[int, RowSet]]:
        """Slot → position of a segment → its rows."""
        found: dict[int, dict[int, RowSet]] = {}
        for key, own in rows.items():
            home = self._storage.homes[key]
            segments = home.block.states.segments[home.first : home.last]
            parts = cut_rows(own, [(start - home.part.start) // home.width for start, _ in segments])
            for at, (slot, part) in enumerate(zip(range(home.slot, home.end_slot), parts, strict=True)):
                found.setdefault(slot, {})[home.first + at - self._storage.slots[slot].first] = part
        return found

    def chunks(
        self,
        contributions: Sequence[RankContribution],
        by_rows: Sequence[int],
        whole_keys: bool,
        are_whole: bool = False,
    ) -> list[Chunk]:
        """Neighbouring slots, as many as are summed at once; with `whole_keys` none ends within a key.

        Args:
            by_rows: The keys that are updated by rows, and do not count here; rows of others are a gradient that is
                zero elsewhere.
            are_whole: Whether nothing is summed, so that all neighbours may come at once.
        """
        named: list[Any] = [tuple(by_rows), whole_keys, are_whole]
        for one in contributions:
            named.append((tuple(map(_bounds_of, one.runs)), one.absent, frozenset(one.rows)))
        return self._chunks.get(tuple(named), self._divide, *named)

    def part(self, slot: int, begin: int, end: int, contributions: Sequence[RankContribution]) -> Chunk:
        """Return a chunk of a slot, whole lines, to which dense numbers are contributed."""
        one = self._storage.slots[slot]
        given = [SpanSource(number, 0, 0) for number, own in enumerate(contributions) if own.runs]
        used = min(end, one.piece.used) - begin
        place = slice(one.start + begin, one.start + end)
        ends = one.block.ends
        # Of segments without elements those at its end belong to it, and those at the beginning of the slot.
        first = bisect_right(ends, place.start, one.first, one.last) if begin else one.first
        last = bisect_left(ends, place.stop, first, one.last - 1) + 1
        last = max(last, bisect_right(ends, place.stop, first, one.last))
        span = Span(slot, slot + 1, given, (), 0, used, end - begin)
        return Chunk(slot, slot + 1, [span], one.block, place, range(first, last), None)

    def _divide(
        self, by_rows: tuple[int, ...], whole_keys: bool, are_whole: bool, *given: tuple[Any, ...]
    ) -> list[Chunk]:
        slots, ends, chunks = self._storage.slots, self._storage.ends, []
        outlines = [Outline(*one) for one in given]
        for spans in self._span_groups(outlines, by_rows, whole_keys, are_whole):
            first, last = slots[spans[0].first], slots[spans[-1].end - 1]
            absent = [[outlines[source.number].absent for source in span.given] for span in spans]
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
            chunks.append(Chunk(spans[0].first, spans[-1].end, placed, first.block, place, segments, present))
        return chunks

    def _placed(self, span: Span, begin: int) -> Span:
        """Note where a span lies in a chunk that begins there in its block."""
        last, stop = self._storage.slots[span.end - 1], self._storage.ends[span.end - 1] - begin
        start, used = self._storage.slots[span.first].start - begin, last.start + last.piece.used - begin
        return span._replace(start=start, used=used, stop=stop)

    def _span_groups(
        self, outlines: Sequence[Outline], by_rows: Collection[int], whole_keys: bool, are_whole: bool
    ) -> Iterator[list[Span]]:
        """Spans cut and joined to what is summed at once."""
        group: list[Span] = []
        begin, storage = 0, self._storage
        for span in self._spans(outlines, by_rows):
            first, weights = span.first, storage.slots[span.first].block.weights
            is_cut = weights.device.type == "cpu" and not (are_whole and weights.dtype not in _HALF)
            at_once = CACHED if is_cut else sys.maxsize
            while first < span.end:
                is_next = bool(group) and storage.is_next(group[-1].end - 1, first)
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

    def _spans(self, outlines: Sequence[Outline], by_rows: Collection[int]) -> Iterator[Span]:
        """Cut what was given where its ranks, their runs or the keys with rows change."""
        keys = frozenset().union(*(one.rows for one in outlines))
        homes, slots = (
            [self._storage.homes[key] for key in sorted(keys.difference(by_rows))],
            self._storage.slots,
        )
        pairs = [(home.slot, home.end_slot) for home in homes]
        pairs += [pair for one in outlines for pair in one.bounds]
        cuts = sorted({edge for pair in pairs for edge in pair})
        at = [0] * len(outlines)
        for first, end in pairwise(cuts):
            sparse = [home for home in homes if home.slot <= first < home.end_slot]
            given: list[SpanSource] = []
            for number, one in enumerate(outlines):
                while at[number] < len(one.bounds) and one.bounds[at[number]][1] <= first:
                    at[number] += 1
                begin = one.bounds[at[number]][0] if at[number] < len(one.bounds) else end
                if begin <= first:
                    given.append(SpanSource(number, at[number], slots[first].start - slots[begin].start))
                elif any(home.key in one.rows for home in sparse):
                    given.append(SpanSource(number, -1, 0))
            if given:
                yield Span(first, end, given, sparse)

    def alone(self, chunk: Chunk, contributions: Sequence[RankContribution]) -> tuple[Tensor, float] | None:
        """Return what one rank gave to a chunk, scratch to compute with, and its factor; None if it is not all."""
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
        self, chunk: Chunk, contributions: Sequence[RankContribution], out: Tensor | None = None
    ) -> Tensor:
        """Sum scale · numbers of a chunk over ranks, in the compute dtype. Padding is zero.

        Equal scales, the usual case, are applied once to the sum: then the result has the same bits whether ranks or
        the replicas of one process were summed. The result is `out`, or scratch memory that the next call overwrites.
        """
        length = chunk.place.stop - chunk.place.start
        if out is None:
            out = self._scratch(chunk.block.weights, compute_dtype(chunk.block.dtype), length)
        for span in chunk.spans:
            if span.used < span.stop:
                out[span.used : span.stop].zero_()
            body = out if span.used - span.start == length else out[span.start : span.used]
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
        return out

    def _scratch(self, like: Tensor, dtype: torch.dtype, numel: int, number: int = 0) -> Tensor:
        """Flat memory on the device of `like`; the next call with the same number overwrites it."""
        kept = self._memory.get((like.device, dtype, number))
        room = 0 if kept is None else kept.numel()
        if kept is None or room < numel:
            kept = self._memory[like.device, dtype, number] = torch.empty(
                numel, dtype=dtype, device=like.device
            )
            room = numel
        return kept if room == numel else kept[:numel]

    def _numbers(
        self, body: Tensor, span: Span, one: RankContribution, source: SpanSource, is_further: bool
    ) -> Tensor:
        """Return what a rank gave to a span, in the dtype of `body`; that of the first rank may lie there."""
        slot, payload = self._storage.slots[span.first], None
        run = one.runs[source.run] if source.run >= 0 else None
        if run is not None and isinstance(run.payload, Tensor):
            payload = part_of(run.payload, source.at, source.at + span.used - span.start)
            if not span.sparse:
                return payload if payload.dtype == body.dtype else payload.to(body.dtype)
        values = self._scratch(body, body.dtype, len(body), 1) if is_further else body
        if payload is not None:
            values.copy_(payload)
        elif run is None:
            values.zero_()
        else:
            assert isinstance(run.payload, CompressedPayload)
            run.payload.codec.decode(run.payload.data, slot.block.dtype, values)
            # One bit cannot say zero, and a residual may speak up where the rank gave nothing.
            end = 0
            for segment in slot.piece.segments:
                values[end : segment.start].zero_()
                end = segment.start + segment.numel
                if slot.unit.first_key + segment.key in one.absent:
                    values[segment.start : end].zero_()
        for home in span.sparse:
            found = one.rows.get(home.key)
            low, high = max(home.part.start, slot.start), min(home.part.stop, slot.start + len(body))
            if found is not None and low < high:
                edges = [(edge - home.part.start) // home.width for edge in (home.part.start, low, high)]
                [_, (ids, rows), _] = cut_rows(found, edges)
                part = values[low - slot.start : high - slot.start].zero_()
                part.view(-1, home.width)[ids] = rows.to(body.dtype)
        return values


def _joined(parts: Sequence[RowSet], starts: Sequence[int]) -> RowSet:
    """Put rows of several keys together, whose ids count from other starts."""
    ids = [part.ids + start for part, start in zip(parts, starts, strict=True)]
    return RowSet(torch.cat(ids), torch.cat([part.values for part in parts]))
