"""Sums of what ranks contributed to a Shard, some neighbouring slots at a time."""

from __future__ import annotations

import sys
from bisect import bisect_right
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from kvstore_server.reduction import (
    Contribution,
    Part,
    RowSet,
    Run,
    Scratch,
    compute_dtype,
    sum_into,
    sum_rows_of,
)
from kvstore_server.storage import Block, Home, Storage

Present = np.ndarray[Any, np.dtype[np.bool_]] | None
"""Of neighbouring segments, which are updated; None: all."""

_AT_ONCE = 256 * 1024
"""Elements that are summed before they are updated, so that the sum is still in the cache."""


class Span(NamedTuple):
    """Neighbouring slots to which the same ranks contribute."""

    first: int
    end: int
    given: list[tuple[Contribution, Run | None]]
    """None: the rank has only rows."""
    sparse: Sequence[Home] = ()
    """The keys of which a rank gave rows that count as dense numbers."""


class Chunk(NamedTuple):
    """Neighbouring slots that are summed at once."""

    spans: list[Span]
    block: Block
    place: slice
    """Their elements in the block."""
    segments: range
    """In the block."""
    present: Present


class Sums:
    """Sums contributions to the slots of a storage."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._scratch = Scratch()

    def given_as_rows(self, contributions: Sequence[Contribution]) -> list[int]:
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
        slot = self._storage.homes[key].slot
        at = bisect_right(given.runs, slot, key=lambda run: run.first) - 1
        return at >= 0 and slot < given.runs[at].end

    def sum_of_rows(self, key: int, contributions: Sequence[Contribution]) -> RowSet:
        """The sum of rows, in memory that may be overwritten."""
        home = self._storage.homes[key]
        given = [(one.rows[key], one.scale) for one in contributions if key in one.rows]
        num_rows = (home.part.stop - home.part.start) // home.width
        total = sum_rows_of(given, home.block.dtype, num_rows)
        if total.values is given[0][0].values and not contributions[0].is_scratch:
            return total._replace(values=total.values.clone())
        return total

    def by_slot(self, rows: Mapping[int, RowSet]) -> dict[int, dict[int, RowSet]]:
        """Slot → position of a segment → its rows."""
        found: dict[int, dict[int, RowSet]] = {}
        for key, (ids, values) in rows.items():
            home, width = self._storage.homes[key], self._storage.homes[key].width
            segments = home.block.states.segments[home.first : home.last]
            edges = [(start - home.part.start) // width for start, _ in segments]
            cuts = torch.searchsorted(
                ids, torch.tensor([*edges, edges[-1] + segments[-1][1] // width])
            ).tolist()
            for at, slot in enumerate(range(home.slot, home.end_slot)):
                part = slice(cuts[at], cuts[at + 1])
                position = home.first + at - self._storage.slots[slot].first
                found.setdefault(slot, {})[position] = RowSet(ids[part] - edges[at], values[part])
        return found

    def _spans(self, contributions: Sequence[Contribution], homes: Sequence[Home]) -> Iterator[Span]:
        """Cut what was given where the ranks that give it, or their runs, change; `homes` are of keys with rows."""
        bounds = [[(run.first, run.end) for run in given.runs] for given in contributions]
        if not homes and all(own == bounds[0] for own in bounds[1:]):
            for runs in zip(*(given.runs for given in contributions), strict=True):
                yield Span(runs[0].first, runs[0].end, list(zip(contributions, runs, strict=True)))
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
                yield Span(first, end, given, sparse)

    def chunks(
        self, contributions: Sequence[Contribution], by_rows: Collection[int], whole_keys: bool
    ) -> Iterator[Chunk]:
        """Neighbouring slots, as many as are summed at once; with `whole_keys` none ends within a key.

        Args:
            by_rows: The keys that are updated by rows, and do not count here; rows of others are a gradient that is
                zero elsewhere.
        """
        chunk: list[Span] = []
        begin = 0
        keys = {key for given in contributions for key in given.rows}
        homes = [self._storage.homes[key] for key in sorted(keys.difference(by_rows))] if keys else []
        for span in self._spans(contributions, homes):
            first = span.first
            while first < span.end:
                is_next = bool(chunk) and self._storage.is_next(chunk[-1].end - 1, first)
                is_bound = is_next and whole_keys and self._storage.continues_key(first)
                at_once = (
                    _AT_ONCE if self._storage.slots[first].block.weights.device.type == "cpu" else sys.maxsize
                )
                if chunk and not is_bound and not (is_next and self._storage.ends[first] - begin <= at_once):
                    yield self._chunk(chunk, by_rows)
                    chunk = []
                if not chunk:
                    begin = self._storage.slots[first].start
                end = bisect_right(self._storage.ends, begin + at_once, first + 1, span.end)
                while whole_keys and end < span.end and self._storage.continues_key(end):
                    end += 1
                chunk.append(span._replace(first=first, end=end))
                first = end
        if chunk:
            yield self._chunk(chunk, by_rows)

    def _chunk(self, spans: list[Span], by_rows: Collection[int]) -> Chunk:
        slots = self._storage.slots
        first, last = slots[spans[0].first], slots[spans[-1].end - 1]
        place = slice(first.start, self._storage.ends[spans[-1].end - 1])
        found: list[bool] = []
        if by_rows or not all(any(not one.absent for one, _ in span.given) for span in spans):
            for span in spans:
                is_full = any(not one.absent for one, _ in span.given)
                found += [
                    key not in by_rows and (is_full or any(key not in one.absent for one, _ in span.given))
                    for key in first.block.keys[slots[span.first].first : slots[span.end - 1].last]
                ]
        present = None if all(found) else np.array(found)
        return Chunk(spans, first.block, place, range(first.first, last.last), present)

    def total(self, chunk: Chunk, out: Tensor | None = None) -> Tensor:
        """The sum over ranks of a chunk with zeros as padding, in the dtype to compute in.

        The result is `out`, scratch memory that the next call overwrites, or what a rank gave as scratch.
        """
        place, slots = chunk.place, self._storage.slots
        dtype, length = compute_dtype(chunk.block.dtype), place.stop - place.start
        [span, *others], [(one, run), *more] = chunk.spans, chunk.spans[0].given
        is_alone = not others and not more and not span.sparse and one.is_scratch
        if out is None and is_alone and run is not None and isinstance(run.payload, Tensor):
            own = run.payload[place.start - slots[run.first].start :][:length]
            if own.dtype == dtype and len(own) == length:
                return own.mul_(one.scale) if one.scale != 1.0 else own
        if out is None:
            out = self._scratch.get(chunk.block.weights, dtype, length)
        for span in chunk.spans:
            last = slots[span.end - 1]
            start, used = slots[span.first].start - place.start, last.start + last.piece.used - place.start
            out[used : self._storage.ends[span.end - 1] - place.start].zero_()
            parts = [self._part(span, one, run, used - start) for one, run in span.given]
            sum_into(out[start:used], chunk.block.dtype, parts, self._scratch)
        return out

    def _part(self, span: Span, one: Contribution, run: Run | None, numel: int) -> Part:
        """What one rank gave to the first `numel` elements of a span."""
        slot = self._storage.slots[span.first]
        if run is not None and isinstance(run.payload, Tensor) and not span.sparse:
            start = slot.start - self._storage.slots[run.first].start
            return Part(run.payload[start : start + numel], one.scale)
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
            start = slot.start - self._storage.slots[run.first].start
            return Part(run.payload[start : start + numel], one.scale, rows)
        # One bit cannot say zero, and a residual may speak up where the rank gave nothing.
        zeros, end = [], 0
        for segment in slot.piece.segments:
            zeros.append(slice(end, segment.start))
            end = segment.start + segment.numel
            if slot.unit.first_key + segment.key in one.absent:
                zeros.append(slice(segment.start, end))
        return Part(run.payload, one.scale, rows, [gap for gap in zeros if gap.start < gap.stop])
