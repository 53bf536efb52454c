"""Sums of what ranks contributed to a Shard, some neighbouring slots at a time.

Sums are left folds in rank order, so their bits do not depend on the order of arrival. Half precision accumulates in
float32. Compressed payloads are decoded as they are added.
"""

from __future__ import annotations

import sys
from bisect import bisect_right
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from kvstore_server.codec import compute_dtype
from kvstore_server.optimizer import coalesce_rows
from kvstore_server.optimizer.base import CACHED
from kvstore_server.rows import Encoded, RowSet, cut_rows
from kvstore_server.storage import Block, Home, Storage

NO_KEYS: frozenset[int] = frozenset()

Present = np.ndarray[Any, np.dtype[np.bool_]] | None
"""Of neighbouring segments, which are updated; None: all."""

_HALF = (torch.float16, torch.bfloat16)


class Run(NamedTuple):
    """What a rank gives to neighbouring slices of a Shard, the slots from `first` up to `end`."""

    first: int
    end: int
    payload: Tensor | Encoded
    """Plain numbers of whole slots with zeros as padding, which may be missing behind the last; encoded, one slot."""


class Contribution(NamedTuple):
    """One rank's part in a sum.

    Args:
        runs: In ascending order, without overlaps.
        scale: Factor of all of it.
        absent: The keys (as the Shard numbers them) that this rank leaves out.
        rows: Key → the rows of its block of which the rank has only those; runs do not count there.
        is_scratch: Whether the memory may be overwritten.
        lent: Key → its numbers, flat and of whole lines, which are not to be overwritten; runs do not count there. Only
            of a rank that gives scratch alone.
    """

    runs: Sequence[Run]
    scale: float = 1.0
    absent: frozenset[int] = NO_KEYS
    rows: Mapping[int, RowSet] = {}
    is_scratch: bool = False
    lent: Mapping[int, Tensor] = {}


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


def left_out_by_all(contributions: Sequence[Contribution]) -> frozenset[int]:
    """The keys that none of the contributions has."""
    if any(not given.absent for given in contributions):
        return NO_KEYS
    return frozenset.intersection(*(given.absent for given in contributions)) if contributions else NO_KEYS


class Sums:
    """Sums contributions to the slots of a storage."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._memory: dict[tuple[torch.device, torch.dtype, int], Tensor] = {}

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
        """The sum of rows, in memory that may be overwritten; as dense sums, equal scales are applied once."""
        home, parts = self._storage.homes[key], [one for one in contributions if key in one.rows]
        common = parts[0].scale if len({one.scale for one in parts}) == 1 else None
        values = [one.rows[key].values.to(compute_dtype(home.block.dtype)) for one in parts]
        if common is None:
            values = [value * one.scale for value, one in zip(values, parts, strict=True)]
        ids, total = parts[0].rows[key].ids, values[0]
        if len(parts) > 1:
            ids, total = torch.cat([one.rows[key].ids for one in parts]), torch.cat(values)
        ids, total = coalesce_rows(ids, total, (home.part.stop - home.part.start) // home.width)
        if common not in (None, 1.0):
            total = total * common
        is_given = total is parts[0].rows[key].values and not parts[0].is_scratch
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
        contributions: Sequence[Contribution],
        by_rows: Collection[int],
        whole_keys: bool,
        are_whole: bool = False,
    ) -> Iterator[Chunk]:
        """Neighbouring slots, as many as are summed at once; with `whole_keys` none ends within a key.

        Args:
            by_rows: The keys that are updated by rows, and do not count here; rows of others are a gradient that is
                zero elsewhere.
            are_whole: Whether nothing is summed, so that all neighbours may come at once.
        """
        slots, ends = self._storage.slots, self._storage.ends
        for spans in self._together(contributions, by_rows, whole_keys, are_whole):
            first, last = slots[spans[0].first], slots[spans[-1].end - 1]
            found: list[bool] = []
            if by_rows or not all(any(not one.absent for one, _ in span.given) for span in spans):
                for span in spans:
                    is_full = any(not one.absent for one, _ in span.given)
                    found += [
                        key not in by_rows
                        and (is_full or any(key not in one.absent for one, _ in span.given))
                        for key in first.block.keys[slots[span.first].first : slots[span.end - 1].last]
                    ]
            place = slice(first.start, ends[spans[-1].end - 1])
            present = None if all(found) else np.array(found)
            yield Chunk(spans, first.block, place, range(first.first, last.last), present)

    def _together(
        self,
        contributions: Sequence[Contribution],
        by_rows: Collection[int],
        whole_keys: bool,
        are_whole: bool,
    ) -> Iterator[list[Span]]:
        """Spans cut and joined to what is summed at once."""
        together: list[Span] = []
        begin, storage = 0, self._storage
        for span in self._spans(contributions, by_rows):
            first, weights = span.first, storage.slots[span.first].block.weights
            is_cut = weights.device.type == "cpu" and not (are_whole and weights.dtype not in _HALF)
            at_once = CACHED if is_cut else sys.maxsize
            while first < span.end:
                is_next = bool(together) and storage.is_next(together[-1].end - 1, first)
                is_bound = is_next and whole_keys and storage.continues_key(first)
                if together and not is_bound and not (is_next and storage.ends[first] - begin <= at_once):
                    yield together
                    together = []
                if not together:
                    begin = storage.slots[first].start
                end = bisect_right(storage.ends, begin + at_once, first + 1, span.end)
                while whole_keys and end < span.end and storage.continues_key(end):
                    end += 1
                together.append(span._replace(first=first, end=end))
                first = end
        if together:
            yield together

    def _spans(self, contributions: Sequence[Contribution], by_rows: Collection[int]) -> Iterator[Span]:
        """Cut what was given where the ranks that give it, or their runs, or the keys with rows, change."""
        keys = {key for given in contributions for key in given.rows}
        homes = [self._storage.homes[key] for key in sorted(keys.difference(by_rows))] if keys else []
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

    def alone(self, chunk: Chunk) -> tuple[Tensor, float] | None:
        """What a single rank gave to a chunk as scratch, in the dtype to compute in, and its factor; None if that is
        not all."""
        place, slots = chunk.place, self._storage.slots
        [span, *others], [(one, run), *more] = chunk.spans, chunk.spans[0].given
        if others or more or span.sparse or not one.is_scratch or run is None:
            return None
        if not isinstance(run.payload, Tensor) or run.payload.dtype != compute_dtype(chunk.block.dtype):
            return None
        own = run.payload[place.start - slots[run.first].start :][: place.stop - place.start]
        return (own, one.scale) if len(own) == place.stop - place.start else None

    def total(self, chunk: Chunk, out: Tensor | None = None) -> Tensor:
        """The sum over ranks of scale · numbers of a chunk with zeros as padding, in the dtype to compute in.

        Equal scales, the usual case, are applied once to the sum: then the result has the same bits whether ranks or
        the replicas of one process were summed. The result is `out`, or scratch memory that the next call overwrites.
        """
        place, slots = chunk.place, self._storage.slots
        dtype, length = compute_dtype(chunk.block.dtype), place.stop - place.start
        out = self._scratch(chunk.block.weights, dtype, length) if out is None else out
        for span in chunk.spans:
            last = slots[span.end - 1]
            start, used = slots[span.first].start - place.start, last.start + last.piece.used - place.start
            out[used : self._storage.ends[span.end - 1] - place.start].zero_()
            body, total = out[start:used], out[:0]
            common = span.given[0][0].scale if len({one.scale for one, _ in span.given}) == 1 else None
            for number, (one, run) in enumerate(span.given):
                values = self._numbers(body, span, one, run, number)
                values = values * one.scale if common is None else values
                total = torch.add(total, values, out=body) if number else values
            if total is not body:
                body.copy_(total)
            if common not in (None, 1.0):
                body.mul_(common)
        return out

    def _scratch(self, like: Tensor, dtype: torch.dtype, numel: int, number: int = 0) -> Tensor:
        """Flat memory on the device of `like`; the next call with the same number overwrites it."""
        kept = self._memory.get((like.device, dtype, number))
        if kept is None or kept.numel() < numel:
            kept = torch.empty(numel, dtype=dtype, device=like.device)
            self._memory[like.device, dtype, number] = kept
        return kept[:numel]

    def _numbers(self, body: Tensor, span: Span, one: Contribution, run: Run | None, number: int) -> Tensor:
        """What a rank gave to the elements of a span, in the dtype of `body`; that of the first rank may lie there."""
        slot, payload = self._storage.slots[span.first], None
        if run is not None and isinstance(run.payload, Tensor):
            payload = run.payload[slot.start - self._storage.slots[run.first].start :][: len(body)]
            if not span.sparse:
                return payload if payload.dtype == body.dtype else payload.to(body.dtype)
        values = self._scratch(body, body.dtype, len(body), 1) if number else body
        if payload is not None:
            values.copy_(payload)
        elif run is None:
            values.zero_()
        else:
            assert isinstance(run.payload, Encoded)
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
