"""Detects weights that were written by others than the Trainer.

Two signals are combined. Torch raises `_version` of a tensor with every in-place write that it knows of:
`load_state_dict`, `nn.init`, `p.clamp_()` under no_grad. Reads and backward passes do not change it. A write through
`p.data`, NumPy or another library raises no counter, so checksums of the bits are compared as well, but only for
weights that a store will overwrite, and only for memory whose writes the page map does not show (`check_written`).

Checksums of a large arena are compared in turns: every step reads a fraction of it. A large table that only changes by
rows is not read as a whole: `WatchedRowChecksums` updates the checksums of the rows that the Trainer writes.
"""

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

SHORT = 4 << 10
"""Bytes. Of a memory that is not longer all bytes are kept."""
WHOLE = 8 << 20
"""Bytes. A larger arena is checked in EVERY turns, one block of each EVERY at a time."""
EVERY = 8
_BLOCK = 8 << 10
# Bytes per checksum. The remainder behind the last complete group of blocks has one for each 64 bytes.
_SUMMED = 1 << 10
_WORD = 8
TURNS = 64
"""Steps within which a write to a table with kept checksums is detected."""
_KEPT_SHIFT = 8
# Bytes per kept checksum. The remainder behind the last complete group has one for each 64 bytes.
_KEPT = 1 << _KEPT_SHIFT
# Number of adjacent kept checksums that are compared in one turn.
_NEIGHBOURS = 4
NOTHING: Mapping[int, Tensor | None] = MappingProxyType({})
_version_of = attrgetter("_version")


class WriteDetector:
    """Compares the parameters, which are in the arena `weights`, with what the Trainer's own updates left.

    Version counters cost some 10 ns for each parameter. Checksums read memory twice, and are used only where `accept`
    says that a store has the weights.
    """

    def __init__(self, parameters: Sequence[Parameter], weights: Mapping[str, Tensor], plan: Plan) -> None:
        self._parameters = parameters
        self._weights = weights
        self._plan = plan
        self._accepted: list[int] = []
        self._total = 0
        self._own = 0
        self._turn = 0
        self._sums: dict[str, Tensor | bytes] = {}
        # Dtype → all of its memory, if that is short: comparing bytes takes less than any operation on tensors.
        self._short: dict[str, memoryview] = {}
        # Dtype → for each stretch between tables, for each turn, the parts to sum. Empty if no store has the weights.
        self._looked_at: dict[str, list[list[list[Tensor]]]] = {}
        # Key (by index) → checksums of a large table that only changes by rows.
        self._tables: dict[int, WatchedRowChecksums] = {}
        # Dtype → (begin, end) in bytes of what needs checksums. A missing dtype needs them everywhere.
        self._parts: Mapping[str, Sequence[tuple[int, int]]] = {}

    def accept(self, is_in_store: bool) -> None:
        """Take the current weights as the Trainer's own. Checksums are used only if a store has the weights too."""
        self._accepted = list(map(_version_of, self._parameters))
        self._total, self._own = sum(self._accepted), -1
        if not is_in_store:
            self._looked_at, self._tables, self._short = {}, {}, {}
        elif self._tables or not self._looked_at:
            self._tables = {}
            self._lay_out()
        self.count_own()

    def check_written(self, parts: Mapping[str, Sequence[tuple[int, int]]]) -> None:
        """Restrict checksums to these (begin, end) ranges in bytes, multiples of 64; others are watched elsewhere."""
        self._parts = parts
        if self._looked_at:
            self._looked_at = {}
            self.accept(is_in_store=True)

    def count_own(self, written: Mapping[int, Tensor | None] = NOTHING) -> None:
        """Record writes of the Trainer: large key (by index) → ids of the rows written, or None for all rows."""
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
                self._tables[key] = WatchedRowChecksums(words, self._parameters[key][0].nbytes)
                self._lay_out()
        self._sums = self._sums_now()

    def _place_of(self, key: int) -> tuple[int, int]:
        """Return begin and end of a key in 8-byte words of its dtype's memory, rounded up to whole 64-byte lines."""
        begin = self._plan.key_offsets[key] * SIZES[self._plan.specs[key].dtype]
        end = begin + self._parameters[key].nbytes
        return begin // _WORD, -(-end // ALIGNMENT) * ALIGNMENT // _WORD

    def _lay_out(self) -> None:
        flats = self._weights.items()
        self._looked_at = {
            dtype: self._split_stretches(dtype, flat.view(torch.int64)) for dtype, flat in flats
        }
        self._short = {
            dtype: flat.view(torch.int64).numpy().data
            for dtype, flat in flats
            if flat.is_cpu and flat.nbytes <= SHORT and not self._tables and dtype not in self._parts
        }

    def _split_stretches(self, dtype: str, words: Tensor) -> list[list[list[Tensor]]]:
        """Split the memory between tables into stretches, and each stretch into turns."""
        every = 1 if words.numel() * _WORD <= WHOLE else EVERY
        tables = sorted([self._place_of(key) for key in self._tables if self._plan.specs[key].dtype == dtype])
        begins, ends = [0, *(end for _, end in tables)], [*(begin for begin, _ in tables), words.numel()]
        parts = self._parts.get(dtype, ((0, words.numel() * _WORD),))
        between = [(a, b) for a, b in zip(begins, ends, strict=True) if a < b]
        cut = [(max(a, x // _WORD), min(b, y // _WORD)) for a, b in between for x, y in parts]
        return [_split_into_watch_turns(words[a:b], every) for a, b in cut if a < b]

    def written_by_others(self) -> list[int]:
        """Return positions of parameters that others wrote since `accept`, perhaps with neighbours."""
        found: set[int] = set()
        # 1. Checksums of this turn.
        for dtype, now in self._sums_now().items():
            before = self._sums[dtype]
            if isinstance(now, bytes) or isinstance(before, bytes):
                if now != before:
                    found.update(self._keys_in(dtype, _words_of(now) != _words_of(before)))
            elif not torch.equal(now, before):
                found.update(self._keys_in(dtype, now != before))
        found.update([key for key, sums in self._tables.items() if not sums.is_same(self._turn)])
        # 2. Version counters. They only rise, so an unchanged total means that all are unchanged.
        if sum(map(_version_of, self._parameters)) != self._total + self._own * len(self._parameters):
            rows = zip(self._parameters, self._accepted, strict=True)
            found.update(i for i, (p, version) in enumerate(rows) if p._version != version + self._own)
        return sorted(found)

    def _sums_now(self) -> dict[str, Tensor | bytes]:
        found: dict[str, Tensor | bytes] = {}
        for dtype, stretches in self._looked_at.items():
            if dtype in self._short:
                found[dtype] = bytes(self._short[dtype])
                continue
            # Parts of one word each are copied: for a few kilobytes that takes a third of the time of a sum.
            parts = [
                part.sum(-1).flatten() if part.shape[-1] > 1 else part[..., 0].clone()
                for turns in stretches
                for part in turns[self._turn % len(turns)]
            ]
            if parts:
                found[dtype] = parts[0] if len(parts) == 1 else torch.cat(parts)
        return found

    def _keys_in(self, dtype: str, differs: Tensor) -> list[int]:
        # The same cutting, applied to byte offsets instead of weights, gives the range of each checksum.
        flat, differs = self._weights[dtype], differs.cpu()
        size = flat.element_size()
        stretches = self._split_stretches(dtype, torch.arange(0, flat.numel() * size, _WORD, device="cpu"))
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


def _words_of(kept: Tensor | bytes) -> Tensor:
    return torch.frombuffer(bytearray(kept), dtype=torch.int64) if isinstance(kept, bytes) else kept


def _split_into_watch_turns(words: Tensor, every: int) -> list[list[Tensor]]:
    """Split memory into the parts for each turn. The remainder belongs to every turn."""
    body = words.numel() // (every * _BLOCK // _WORD) * (every * _BLOCK // _WORD)
    if not body:
        return [[words.view(-1, 1)]]
    rest = words[body:].view(-1, ALIGNMENT // _WORD)
    blocks = words[:body].view(-1, every, _BLOCK // _SUMMED, _SUMMED // _WORD)
    return [[blocks[:, at], rest] for at in range(every)]


class WatchedRowChecksums:
    """Checksums of a table that changes only by rows, kept from step to step.

    Reading a large table would take longer than updating a few of its rows. So the checksums of rows that the Trainer
    writes are updated at once, and each step verifies a fraction of all: after TURNS steps, every one.

    Args:
        words: The table's memory as int64, in whole 64-byte lines.
        row_nbytes: Size of a row in bytes.
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
        """Return whether what this turn reads is unchanged: 1 KiB of each 64 KiB, and the remainder."""
        at = turn % TURNS
        # One sum over a block takes a third of the time of one for each of its parts.
        kept = torch.stack(self._by_turn[:, at].unbind(-1)).sum(0)
        is_same = torch.equal(self._blocks[:, at].sum(-1), kept)
        return is_same and torch.equal(self._rest.sum(-1), self._rest_sums)

    def note(self, ids: Tensor) -> None:
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
