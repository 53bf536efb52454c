"""An index of 64-bit row numbers: open addressing over numpy arrays, a call for many rows at once.

Positions of an entry are its row number's low bits and the places after them (linear probing), so row numbers must be
hashed before (`row_numbers`). An entry is the slot of the row plus 1; the row number itself is in an array of the
caller, by slot, and is compared there.

The index grows without a pause: a table of twice the size is allocated, and every insertion moves some entries of the
former one, which lookups search too as long as it has any.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Entries = np.ndarray[Any, np.dtype[np.int32]]

MAX_SLOTS = (1 << 31) - 2
_SMALLEST = 1 << 10
_MOVED = 8
"""Entries of the former table that are moved for each insertion. It has at most eight times as many as there are
insertions before half of the new one is used."""
_MOVED_AT_LEAST = 4096
_REMOVED = -1
_MIX = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_UNMIX = tuple(pow(factor, -1, 1 << 64) for factor in _MIX)


def row_numbers(ids: Ints) -> Ints:
    """Return the row number of each id, int64: a bijection that spreads ids evenly.

    The finaliser of SplitMix64 (Steele, Lea and Flood, Fast Splittable Pseudorandom Number Generators, 2014), which
    can be inverted; 0 is the row number of 0.
    """
    words = ids.view(np.uint64)
    words = (words ^ (words >> np.uint64(30))) * np.uint64(_MIX[0])
    words ^= words >> np.uint64(27)
    words *= np.uint64(_MIX[1])
    words ^= words >> np.uint64(31)
    rows: Ints = words.view(np.int64)
    return rows


def ids_of_rows(rows: Ints) -> Ints:
    """Return the ids of row numbers, the inverse of `row_numbers`."""
    words = rows.view(np.uint64)
    words = (words ^ (words >> np.uint64(31)) ^ (words >> np.uint64(62))) * np.uint64(_UNMIX[1])
    words = (words ^ (words >> np.uint64(27)) ^ (words >> np.uint64(54))) * np.uint64(_UNMIX[0])
    words ^= (words >> np.uint64(30)) ^ (words >> np.uint64(60))
    ids: Ints = words.view(np.int64)
    return ids


class IdIndex:
    """Finds the slots of row numbers. Not thread-safe.

    Args:
        rows: The row number of each slot. Those of slots in the index must not change. The owner replaces the array
            by a longer one as it needs.
    """

    def __init__(self, rows: Ints) -> None:
        self.rows = rows
        self._entries: Entries = np.zeros(_SMALLEST, np.int32)
        self._used = 0
        """Entries that are not empty, removed ones included."""
        self._former: Entries = self._entries[:0]
        self._moved = 0
        """Entries of the former table that have been moved."""

    @property
    def nbytes(self) -> int:
        return self._entries.nbytes + self._former.nbytes

    def find(self, wanted: Ints) -> Ints:
        """Return the slot of each row number; -1: it is not in the index."""
        slots = _probe(self._entries, self.rows, wanted)
        if len(self._former):
            missing = np.flatnonzero(slots < 0)
            if len(missing):
                slots[missing] = _probe(self._former, self.rows, wanted[missing])
        return slots

    def insert(self, slots: Ints) -> None:
        """Add slots, whose row numbers are set, distinct and not in the index."""
        if len(self._former):
            self._move(max(_MOVED * len(slots), _MOVED_AT_LEAST))
        while self._used + len(slots) > len(self._entries) // 2:
            self._move(len(self._former))
            # After many removals the table need not be longer: the new one has no removed entries. It begins at most
            # 3/8 full, so that the former one is empty before half of it is used.
            live = np.count_nonzero(self._entries > 0) + len(slots)
            self._former, self._moved = self._entries, 0
            size = len(self._entries)
            while live > size * 3 // 8:
                size *= 2
            self._entries, self._used = np.zeros(size, np.int32), 0
            self._move(max(_MOVED * len(slots), _MOVED_AT_LEAST))
        self._place(slots)

    def remove(self, slots: Ints) -> None:
        """Remove slots that are in the index; their row numbers are still set."""
        wanted = self.rows[slots]
        for entries in (self._entries, self._former):
            if len(entries):
                at = _positions(entries, self.rows, wanted)
                entries[at[at >= 0]] = _REMOVED

    def _move(self, count: int) -> None:
        """Move the next entries of the former table."""
        if not len(self._former):
            return
        part = self._former[self._moved : self._moved + count]
        live = part[part > 0]
        # Not in both tables at once: a row that is removed has one entry. Empty entries stay, at which a search ends.
        part[part > 0] = _REMOVED
        self._moved += len(part)
        if self._moved == len(self._former):
            self._former = self._former[:0]
        self._place(live.astype(np.int64) - 1)

    def _place(self, slots: Ints) -> None:
        entries, mask = self._entries, len(self._entries) - 1
        at = self.rows[slots] & mask
        values = (slots + 1).astype(np.int32)
        while len(values):
            # Where several rows want a place, the last one gets it; the others go on.
            is_free = entries[at] <= 0
            free = at[is_free]
            self._used += len(np.unique(free[entries[free] == 0]))
            entries[free] = values[is_free]
            goes_on = entries[at] != values
            at, values = (at[goes_on] + 1) & mask, values[goes_on]


def _positions(entries: Entries, rows: Ints, wanted: Ints) -> Ints:
    """Return where row numbers are in a table; -1: they are not."""
    mask = len(entries) - 1
    at, found = wanted & mask, np.full(len(wanted), -1, np.int64)
    open_ = np.arange(len(wanted))
    while len(open_):
        entry = entries[at]
        # Entries without a slot are 0 or -1: any row will do for them.
        is_found = (entry > 0) & (rows[np.maximum(entry, 1) - 1] == wanted)
        found[open_[is_found]] = at[is_found]
        goes_on = ~is_found & (entry != 0)
        open_, wanted, at = open_[goes_on], wanted[goes_on], (at[goes_on] + 1) & mask
    return found


def _probe(entries: Entries, rows: Ints, wanted: Ints) -> Ints:
    """Return the slots of row numbers in a table; -1: they are not there."""
    at = _positions(entries, rows, wanted)
    return np.where(at >= 0, entries[at].astype(np.int64) - 1, -1)
