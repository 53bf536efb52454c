"""Which rows of a table have changed since a worker was sent its weights.

The table notes every change as it is made; changes get the table's version when somebody asks. Row ids count for as
long as sending rows is cheaper than sending the slice; for what is older, and for changes of all rows, a slice is sent
whole. More than what has changed may be named, never less.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from kvstore_server.plan import Slice

Rows = Mapping[int, Tensor | None]
"""Position of a segment in a slice → ids of rows, from the first row there, distinct and ascending; None: all."""

VERSIONS_KEPT = 256
"""Changes of a slice that are remembered one by one."""


class RowChanges:
    """The log of one table. It costs nothing until `since` is called for the first time."""

    def __init__(self, slices: Sequence[Slice]) -> None:
        self._slices = {piece.index: piece for piece in slices}
        self._is_wanted = False
        self._pending: dict[int, list[Rows] | None] = {}
        """Slice → changes that have no version yet; None: all of it."""
        self._entries: dict[int, deque[tuple[int, Rows]]] = {}
        """Slice → versions, ascending, and what has changed since the one before."""
        self._kept: dict[int, int] = {}
        """Slice → the number of ids in its entries."""
        self._floors: dict[int, int] = {}
        """Slice → the version up to which nothing is known."""

    def note(self, index: int, position: int | None = None, ids: Tensor | None = None) -> None:
        """Some rows of a segment of a slice have changed, `ids` as in `Rows`; without a position all of the slice."""
        if self._is_wanted:
            before = self._pending.setdefault(index, [])
            if position is None or before is None:
                self._pending[index] = None
            elif ids is None or len(ids):
                before.append({position: ids})

    def note_segments(self, index: int, changed: Sequence[bool]) -> None:
        """All of some segments of a slice has changed."""
        if all(changed):
            self.note(index)
            return
        for position, is_changed in enumerate(changed):
            if is_changed:
                self.note(index, position)

    def note_all(self) -> None:
        """All slices have changed."""
        for index in self._slices:
            self.note(index)

    def since(self, index: int, held: int, version: int) -> Rows | None:
        """What a worker that holds version `held` of a slice must be sent to have `version`, which is the present one.

        Empty where nothing has changed; None where the slice must be sent whole.
        """
        if not self._is_wanted:
            self._is_wanted = True
            self._floors = dict.fromkeys(self._slices, version)
        self._stamp(version)
        if held == version:
            return {}
        if held < self._floors[index]:
            return None
        newest_first = reversed(self._entries.get(index, ()))
        return _union([rows for _, rows in itertools.takewhile(lambda entry: entry[0] > held, newest_first)])

    def _stamp(self, version: int) -> None:
        """What was noted since the last time has happened by now."""
        for index, noted in self._pending.items():
            entries = self._entries.setdefault(index, deque())
            if noted is None:
                entries.clear()
                self._kept[index] = 0
                self._floors[index] = version
            elif noted:
                entries.append((version, _union(noted)))
                self._kept[index] = self._kept.get(index, 0) + _count(entries[-1][1])
                self._forget_old(index, entries)
        self._pending.clear()

    def _forget_old(self, index: int, entries: deque[tuple[int, Rows]]) -> None:
        """Keep no more ids than the slice has elements."""
        room = self._slices[index].used
        while self._kept[index] > room or len(entries) > VERSIONS_KEPT:
            self._floors[index], oldest = entries.popleft()
            self._kept[index] -= _count(oldest)


def _count(rows: Rows) -> int:
    return sum(1 if ids is None else len(ids) for ids in rows.values())


def _union(parts: Sequence[Rows]) -> Rows:
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
