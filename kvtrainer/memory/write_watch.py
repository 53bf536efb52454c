"""Finds weights that a loop has written: by version counters and by sums of bits."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from operator import attrgetter
from types import MappingProxyType

import numpy as np
import torch
from torch import Tensor
from torch.nn import Parameter

from kvstore_server.plan import ALIGNMENT, SIZES, Plan

WHOLE = 8 << 20
"""Bytes. An arena of up to this size is looked at as a whole; of a bigger one every EVERY-th block, in turn."""
EVERY = 8
_BLOCK = 8 << 10
# The bytes in one sum; behind the last whole row of blocks it is a line of 64.
_SUMMED = 1 << 10
_WORD = 8
TURNS = 64
"""Steps within which a write to a table with kept sums is found."""
_KEPT_SHIFT = 8
# The bytes in one kept sum; behind the last whole round of turns it is a line of 64.
_KEPT = 1 << _KEPT_SHIFT
# Neighbouring kept sums that are compared in one turn.
_NEIGHBOURS = 4
NOTHING: Mapping[int, Tensor | None] = MappingProxyType({})
_version_of = attrgetter("_version")


class WriteWatch:
    """Compares the parameters with what the Trainer's own updates made of them.

    Counters cost a few dozen ns per parameter. Bits are summed only where a store has the weights too and will put its
    own in the place of what is written; that takes two passes over what is looked at. Of large tables of which rows
    alone come from the store sums are kept.

    Args:
        parameters: in the order of `plan.specs`.
        weights: the arena that they lie in.
    """

    def __init__(self, parameters: Sequence[Parameter], weights: Mapping[str, Tensor], plan: Plan) -> None:
        self._parameters = parameters
        self._weights = weights
        self._plan = plan
        self._accepted: list[int] = []
        self._total = 0
        self._own = 0
        self._turn = 0
        self._sums: dict[str, Tensor] = {}
        # Dtype → for each stretch and turn, what is summed in it, if the weights are in a store as well.
        self._looked_at: dict[str, list[list[list[Tensor]]]] = {}
        # Key (by index) → its sums; it lies between the stretches.
        self._tables: dict[int, KeptSums] = {}
        # Dtype → where to look, as (begin, end) in bytes; without an entry everywhere.
        self._parts: Mapping[str, Sequence[tuple[int, int]]] = {}

    def accept(self, is_in_store: bool) -> None:
        """From now on look for writes that come later; for unseen ones too if the weights are in a store as well."""
        self._accepted = list(map(_version_of, self._parameters))
        self._total, self._own = sum(self._accepted), -1
        if not is_in_store:
            self._looked_at, self._tables = {}, {}
        elif self._tables or not self._looked_at:
            self._tables = {}
            self._lay_out()
        self.count_own()

    def look_at(self, parts: Mapping[str, Sequence[tuple[int, int]]]) -> None:
        """From now on sum some parts alone, as (begin, end) in bytes, whole lines; of others somebody else tells."""
        self._parts = parts
        if self._looked_at:
            self._looked_at = {}
            self.accept(is_in_store=True)

    def count_own(self, written: Mapping[int, Tensor | None] = NOTHING) -> None:
        """Note that the Trainer has written to weights, raising each counter by one.

        Args:
            written: Long key (by index) → ids of the rows that it has written; None: all. No other rows of such keys.
        """
        self._own += 1
        self._turn += 1
        for key, ids in written.items() if self._looked_at else ():
            if key in self._tables and ids is not None:
                self._tables[key].note(ids)
            elif key in self._tables:
                del self._tables[key]
                self._lay_out()
            elif ids is not None and self._parameters[key].nbytes >= WHOLE and not self._parts:
                begin, end = self._place_of(key)
                words = self._weights[self._plan.specs[key].dtype].view(torch.int64)[begin:end]
                self._tables[key] = KeptSums(words, self._parameters[key][0].nbytes)
                self._lay_out()
        self._sums = self._sums_now()

    def _place_of(self, key: int) -> tuple[int, int]:
        """Say where a key alone on its lines begins and ends in the words of its dtype."""
        begin = self._plan.key_offsets[key] * SIZES[self._plan.specs[key].dtype]
        end = begin + self._parameters[key].nbytes
        return begin // _WORD, -(-end // ALIGNMENT) * ALIGNMENT // _WORD

    def _lay_out(self) -> None:
        """Cut what is looked at into turns."""
        flats = self._weights.items()
        self._looked_at = {dtype: self._stretches(dtype, flat.view(torch.int64)) for dtype, flat in flats}

    def _stretches(self, dtype: str, words: Tensor) -> list[list[list[Tensor]]]:
        """Cut words of a dtype that are looked at and lie between tables into turns."""
        every = 1 if words.numel() * _WORD <= WHOLE else EVERY
        tables = sorted([self._place_of(key) for key in self._tables if self._plan.specs[key].dtype == dtype])
        begins, ends = [0, *(end for _, end in tables)], [*(begin for begin, _ in tables), words.numel()]
        parts = self._parts.get(dtype, ((0, words.numel() * _WORD),))
        between = [(a, b) for a, b in zip(begins, ends, strict=True) if a < b]
        cut = [(max(a, x // _WORD), min(b, y // _WORD)) for a, b in between for x, y in parts]
        return [_turns(words[a:b], every) for a, b in cut if a < b]

    def by_others(self) -> list[int]:
        """List positions of parameters that others wrote to since `accept`. Some only lie beside one."""
        found: set[int] = set()
        for dtype, now in self._sums_now().items():
            if not torch.equal(now, self._sums[dtype]):
                found.update(self._keys_in(dtype, now != self._sums[dtype]))
        found.update([key for key, sums in self._tables.items() if not sums.is_same(self._turn)])
        # Counters only rise, so the sum tells whether any has: on most steps none.
        if sum(map(_version_of, self._parameters)) != self._total + self._own * len(self._parameters):
            rows = zip(self._parameters, self._accepted, strict=True)
            found.update(i for i, (p, version) in enumerate(rows) if p._version != version + self._own)
        return sorted(found)

    def _sums_now(self) -> dict[str, Tensor]:
        """Sum the bits of what is looked at in this turn."""
        found = {}
        for dtype, stretches in self._looked_at.items():
            # What has one word in each is copied: for a few kilobytes that takes a third of the time of a sum.
            parts = [
                part.sum(-1).flatten() if part.shape[-1] > 1 else part[..., 0].clone()
                for turns in stretches
                for part in turns[self._turn % len(turns)]
            ]
            if parts:
                found[dtype] = parts[0] if len(parts) == 1 else torch.cat(parts)
        return found

    def _keys_in(self, dtype: str, differs: Tensor) -> list[int]:
        """Find the keys of a dtype that have bytes in the sums that differ."""
        flat, differs = self._weights[dtype], differs.cpu()
        size = flat.element_size()
        stretches = self._stretches(dtype, torch.arange(0, flat.numel() * size, _WORD, device="cpu"))
        parts = [part for turns in stretches for part in turns[self._turn % len(turns)]]
        firsts = torch.cat([part[..., 0].flatten() for part in parts])[differs].tolist()
        ends = torch.cat([part[..., -1].flatten() for part in parts])[differs].add(_WORD).tolist()
        rows = zip(self._plan.specs, self._plan.key_offsets, strict=True)
        return [
            key
            for key, (spec, at) in enumerate(rows)
            if spec.dtype == dtype
            and not spec.row_sparse
            and key not in self._tables
            and bisect_right(ends, at * size) < bisect_left(firsts, (at + spec.numel) * size)
        ]


def _turns(words: Tensor, every: int) -> list[list[Tensor]]:
    """Cut the blocks of each turn, and the rest behind all, into what is summed."""
    body = words.numel() // (every * _BLOCK // _WORD) * (every * _BLOCK // _WORD)
    if not body:
        return [[words.view(-1, 1)]]
    rest = words[body:].view(-1, ALIGNMENT // _WORD)
    blocks = words[:body].view(-1, every, _BLOCK // _SUMMED, _SUMMED // _WORD)
    return [[blocks[:, at], rest] for at in range(every)]


class KeptSums:
    """Sums of bits of a table of which rows alone are written, kept from step to step.

    A look at all of a large table would take longer than a step by a few of its rows. So the sums of what the Trainer
    writes are made anew as it writes, and a step compares some of the others: with the turns, all.

    Args:
        words: The memory of the table as int64, whole lines.
        row_nbytes: Bytes of a row.
    """

    def __init__(self, words: Tensor, row_nbytes: int) -> None:
        unit = _KEPT // _WORD
        size = words.numel() // (TURNS * _NEIGHBOURS * unit) * (TURNS * _NEIGHBOURS * unit)
        self._row_nbytes = row_nbytes
        self._units = words[:size].view(-1, unit)
        self._rest = words[size:].view(-1, ALIGNMENT // _WORD)
        self._blocks = words[:size].view(-1, TURNS, _NEIGHBOURS * unit)
        self._sums, self._rest_sums = self._units.sum(-1), self._rest.sum(-1)
        self._by_turn = self._sums.view(-1, TURNS, _NEIGHBOURS)

    def is_same(self, turn: int) -> bool:
        """Tell whether nobody has written to what this turn looks at: a part of 1 KiB in each 64, and the rest."""
        at = turn % TURNS
        # A sum of all that is looked at in a block takes a third of the time that sums of its parts take.
        kept = torch.stack(self._by_turn[:, at].unbind(-1)).sum(0)
        is_same = torch.equal(self._blocks[:, at].sum(-1), kept)
        return is_same and torch.equal(self._rest.sum(-1), self._rest_sums)

    def note(self, ids: Tensor) -> None:
        """Note that the Trainer has written these rows."""
        begins = ids.cpu().numpy() * self._row_nbytes
        first, last = begins >> _KEPT_SHIFT, (begins + (self._row_nbytes - 1)) >> _KEPT_SHIFT
        span = int((last - first).max(initial=0)) + 1
        if span > 1:
            first = np.minimum(first[:, None] + np.arange(span), last[:, None]).reshape(-1)
        if first.max(initial=0) >= len(self._units):
            first = first[first < len(self._units)]
            self._rest_sums = self._rest.sum(-1)
        places = torch.from_numpy(first).to(self._units.device)
        self._sums[places] = self._units.index_select(0, places).sum(-1)
