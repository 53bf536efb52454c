"""An undo journal for memory that outlives the process.

Each region that is written has a *shadow*, a region of the same size. Before bytes are changed, their present values
are copied to the same place in the shadow, and a record in the log says so (`protect`, `protect_rows`). When the log
says that the change is complete (`commit`), these records have no meaning any more. A process that finds records after
the last commit copies the shadow back (`undo`), and so the memory is as it was at that commit.

Invariants:

- A byte is copied to the shadow once between two commits: its value at the last commit.
- The record follows the copy, and the change follows the record.
- The shadow keeps what it has until the next change of these bytes: the values before the last change. Which rows a
  change has protected is known as long as no later change protects rows of the same matrix (`former_rows`).
- What is held (`hold`) stays protected over commits, until it is released: a change that is made in several commits is
  undone as a whole.
"""

from __future__ import annotations

import struct
from bisect import bisect_left
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvstore_server.durable.memory import DurableMemory, Region
from kvstore_server.errors import RecoveryError
from kvstore_server.failpoints import failpoint
from kvstore_server.transport.arena import Bytes

Ids = npt.NDArray[np.int64]
Matrix = tuple[int, int, int]
"""Region, begin, and bytes of a row."""
ProtectedRows = tuple[int, int, int, Ids]
"""The same, and which rows."""
_RANGE, _ROWS = struct.Struct("<qqq"), struct.Struct("<qqqq")
_ID = 8
SHADOW = ".shadow"
"""End of the key of a region's shadow."""


class RowsBefore(NamedTuple):
    """Rows that a change has protected."""

    change: int
    ids: Ids


class Ranges:
    """Disjoint ranges of integers, ascending, merged where they touch."""

    def __init__(self) -> None:
        self._begins: list[int] = []
        self._ends: list[int] = []

    def add(self, begin: int, end: int) -> list[tuple[int, int]]:
        """Add a range; return the parts of it that were not there."""
        # The first range that touches it, and the end of those that do.
        first = bisect_left(self._ends, begin)
        last = first
        news, at = [], begin
        while last < len(self._begins) and self._begins[last] <= end:
            if at < self._begins[last]:
                news.append((at, self._begins[last]))
            at = max(at, self._ends[last])
            last += 1
        if at < end:
            news.append((at, end))
        if first < last:
            begin, end = min(begin, self._begins[first]), max(end, self._ends[last - 1])
        self._begins[first:last], self._ends[first:last] = [begin], [end]
        return news

    def parts(self) -> list[tuple[int, int]]:
        return list(zip(self._begins, self._ends, strict=True))


class Journal:
    """Protects what is changed in durable memory. Not thread-safe.

    Args:
        record: Writes what is protected to the log: whether it is rows, and the data.

    Attributes:
        number: Counts commits, and so identifies the present change.
        is_open: Whether something was protected since the last commit.
    """

    def __init__(self, memory: DurableMemory, record: Callable[[bool, bytes], object]) -> None:
        self.memory = memory
        self.number = 0
        self.is_open = False
        self._record = record
        self._shadows: dict[int, Region] = {}
        self._ranges: dict[int, Ranges] = {}
        """Region → what is protected since the last commit, or held."""
        self._rows: dict[int, list[tuple[int, int, Ids]]] = {}
        """Region → (begin, bytes of a row, ids) of rows that are protected since the last commit."""
        self.rows_before: dict[Matrix, RowsBefore] = {}
        """Matrix → the rows that the last complete change of it has protected."""
        self._held: dict[Hashable, list[tuple[int, int, int]]] = {}
        """Owner → (region, begin, end) of what stays protected until it is released."""

    def shadow(self, region: Region) -> Region:
        found = self._shadows.get(region.number)
        if found is None:
            found = self.memory.take(region.key + SHADOW, region.nbytes)
            self._shadows[region.number] = found
        return found

    def protect(self, tensors: Iterable[Tensor]) -> None:
        """Keep the present values of contiguous tensors, which are changed next, until the next commit.

        What is not in durable memory is ignored: it does not outlive the process.
        """
        records = []
        for tensor in tensors:
            place = self.memory.find(tensor) if tensor.nbytes else None
            if place is None:
                continue
            region, begin, end = place
            ranges = self._ranges.get(region.number)
            if ranges is None:
                ranges = self._ranges[region.number] = Ranges()
            for first, last in ranges.add(begin, end):
                self._copy(region, first, last)
                records.append(_RANGE.pack(region.number, first, last))
        if records:
            self.is_open = True
            failpoint("server.journal.copied")
            self._record(False, b"".join(records))
            failpoint("server.journal.recorded")

    def _copy(self, region: Region, begin: int, end: int) -> None:
        """Copy a range to the shadow, except rows that are there already."""
        shadow = self.shadow(region)
        kept = []
        for start, width, ids in self._rows.get(region.number, ()):
            rows = _rows_in(shadow.bytes, start, width, ids)
            kept.append((rows, ids, rows[ids].copy()))
        np.copyto(shadow.bytes[begin:end], region.bytes[begin:end])
        for rows, ids, values in kept:
            rows[ids] = values

    def protect_rows(self, rows: Tensor, ids: Tensor) -> None:
        """Like `protect`, for distinct rows of a contiguous matrix."""
        place = self.memory.find(rows) if rows.nbytes and len(ids) else None
        if place is None:
            return
        region, begin, end = place
        # 1. Leave out what is protected already: by rows of the same matrix, or with all of it.
        width, news = rows.nbytes // len(rows), ids.numpy()
        for first, last in self._ranges[region.number].parts() if region.number in self._ranges else ():
            low, high = begin + news * width, begin + (news + 1) * width
            is_cut = (low < last) & (high > first) & ~((low >= first) & (high <= last))
            if is_cut.any():  # some rows in part: protect all of the matrix
                self.protect([rows])
                return
            news = news[(low >= last) | (high <= first)]
        others = self._rows.setdefault(region.number, [])
        for start, other_width, known in others:
            if (start, other_width) == (begin, width):
                news = np.setdiff1d(news, known, assume_unique=True)
            elif start < end and start + (int(known.max()) + 1) * other_width > begin:
                self.protect([rows])  # another matrix in the same memory
                return
        if not len(news):
            return
        # 2. Copy the others, and record them.
        shadow = self.shadow(region)
        _rows_in(shadow.bytes, begin, width, news)[news] = _rows_in(region.bytes, begin, width, news)[news]
        others.append((begin, width, news.copy()))
        self.is_open = True
        failpoint("server.journal.rows_copied")
        self._record(True, pack_rows(region.number, begin, width, news))

    def former_rows(self, rows: Tensor, change: int) -> tuple[Ids, Tensor] | None:
        """Return which rows of a contiguous matrix were protected before a change, and copies of their values then.

        The change may have protected them as rows of a larger matrix. None: that is not known any more.
        """
        place = self.memory.find(rows)
        if place is None or not len(rows):
            return None
        region, begin, _ = place
        for (number, start, width), before in self.rows_before.items():
            first, rest = divmod(begin - start, width)
            if number != region.number or before.change != change or width != rows.nbytes // len(rows):
                continue
            if start > begin or rest:
                continue
            ids = before.ids[(before.ids >= first) & (before.ids < first + len(rows))]
            values = torch.empty(len(ids), *rows.shape[1:], dtype=rows.dtype, device="cpu")
            if len(ids):
                former = _rows_in(self.shadow(region).bytes, start, width, ids)[ids]
                values.view(-1).view(torch.uint8).numpy()[:] = former.view(np.uint8)
            return ids - first, values
        return None

    def forget_others(self, regions: Collection[int]) -> None:
        """Forget rows before the last change in all but these regions."""
        self.rows_before = {matrix: one for matrix, one in self.rows_before.items() if matrix[0] in regions}

    def former(self, tensor: Tensor) -> Tensor | None:
        """Return the shadow of a contiguous tensor: its values before the last change of all of it."""
        place = self.memory.find(tensor) if tensor.nbytes else None
        if place is None:
            return None
        region, begin, end = place
        return self.shadow(region).data[begin:end].view(tensor.dtype).view(tensor.shape)

    def hold(self, owner: Hashable, tensors: Sequence[Tensor]) -> None:
        """Protect tensors, and keep that over commits until `release`."""
        self.protect(tensors)
        places = [place for one in tensors if one.nbytes and (place := self.memory.find(one)) is not None]
        self._held[owner] = [(region.number, begin, end) for region, begin, end in places]

    def release(self, owner: Hashable) -> None:
        """Hold no more; what was held stays protected until the next commit."""
        self.is_open |= self._held.pop(owner, None) is not None

    def held(self) -> bytes:
        """Return what is held, as a commit contains it; see `undo_ranges`."""
        return b"".join(_RANGE.pack(*one) for held in self._held.values() for one in held)

    def commit(self) -> None:
        """Note that the log has a commit with what is `held`: all other changes are complete."""
        self.rows_before |= join_rows(
            self.number, [(number, *one) for number, own in self._rows.items() for one in own]
        )
        self.number += 1
        self.is_open = False
        self._ranges, self._rows = {}, {}
        for number, begin, end in [one for held in self._held.values() for one in held]:
            self._ranges.setdefault(number, Ranges()).add(begin, end)


def join_rows(change: int, parts: Iterable[ProtectedRows]) -> dict[Matrix, RowsBefore]:
    """Return what a change has protected of each matrix, perhaps in several parts."""
    found: dict[Matrix, list[Ids]] = {}
    for region, begin, width, ids in parts:
        found.setdefault((region, begin, width), []).append(ids)
    return {
        matrix: RowsBefore(change, own[0] if len(own) == 1 else np.sort(np.concatenate(own)))
        for matrix, own in found.items()
    }


def pack_rows(region: int, begin: int, width: int, ids: Ids) -> bytes:
    """Encode rows of a matrix as a record has them."""
    return _ROWS.pack(region, begin, width, len(ids)) + ids.tobytes()


def unpack_rows(data: bytes) -> ProtectedRows:
    """Decode what `pack_rows` has encoded. Raises RecoveryError if it contradicts itself."""
    if len(data) < _ROWS.size or len(data) % _ID:
        raise RecoveryError(f"the log has a record of rows of {len(data)} bytes")
    number, begin, width, count = _ROWS.unpack_from(data)
    ids = np.frombuffer(data, np.int64, offset=_ROWS.size)
    if len(ids) != count or width < 1 or begin < 0 or not count or ids.min() < 0:
        raise RecoveryError(
            f"the log names {count} rows of {width} bytes of memory {number} and contains {len(ids)}"
        )
    return number, begin, width, ids


def undo_ranges(
    memory: DurableMemory, data: bytes, without: Collection[int] = ()
) -> list[tuple[int, int, int]]:
    """Copy back what `protect` has recorded, or what was `held`; return (region, begin, end) of it.

    Args:
        without: Regions that do not exist any more.

    Raises RecoveryError for unknown memory.
    """
    ranges = [one for one in _RANGE.iter_unpack(data) if one[0] not in without]
    for number, begin, end in ranges:
        region, shadow = _with_shadow(memory, number)
        if not 0 <= begin <= end <= region.nbytes:
            raise RecoveryError(
                f"the log names bytes {begin} to {end} of the {region.nbytes} of memory {number}"
            )
        np.copyto(region.bytes[begin:end], shadow.bytes[begin:end])
        failpoint("server.recovery.undone")
    return ranges


def undo_rows(
    memory: DurableMemory, data: bytes, without: Collection[int] = ()
) -> list[tuple[int, int, int]]:
    """Like `undo_ranges`, for what `protect_rows` has recorded."""
    number, begin, width, ids = unpack_rows(data)
    if number in without:
        return []
    region, shadow = _with_shadow(memory, number)
    if begin + (int(ids.max()) + 1) * width > region.nbytes:
        raise RecoveryError(f"the log names rows beyond the {region.nbytes} bytes of memory {number}")
    _rows_in(region.bytes, begin, width, ids)[ids] = _rows_in(shadow.bytes, begin, width, ids)[ids]
    return [(number, begin, begin + (int(ids.max()) + 1) * width)]


def _with_shadow(memory: DurableMemory, number: int) -> tuple[Region, Region]:
    region = memory.regions.get(number)
    if region is None:
        raise RecoveryError(f"the log names memory {number}, which is not in the store")
    shadow = memory.known(region.key + SHADOW)
    if shadow is None or shadow.nbytes != region.nbytes:
        raise RecoveryError(
            f"the former contents of memory {number}, to which the log returns, are not in the store"
        )
    return region, shadow


def _rows_in(memory: Bytes, begin: int, width: int, ids: Ids) -> npt.NDArray[np.void]:
    """Return rows of `width` bytes as single elements, which numpy copies fastest; enough for all ids."""
    end = begin + (int(ids.max()) + 1) * width
    return memory[begin:end].view(f"V{width}")
