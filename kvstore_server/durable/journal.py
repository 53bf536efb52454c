"""An undo journal for memory that outlives the process.

Each region that is written has a *shadow*, a region of the same size. Before bytes are changed, their present values
are copied to the same place in the shadow, and a record in the log says so (`protect`, `protect_rows`). When the log
says that the change is complete (`commit`), these records have no meaning any more. A process that finds records after
the last commit copies the shadow back (`undo`), and so the memory is as it was at that commit.

Invariants:

- A byte is copied to the shadow once between two commits: its value at the last commit.
- The record follows the copy, and the change follows the record.
- A change that is made again and again in the same parts of memory has a `JournalPlan`, which is recorded once. How
  many of its parts are copied is a number in memory (`JournalProgress`), so that copying a part takes no record.
- A commit does not clear the shadow: until these bytes change again, it has the values before the last change, and for
  a matrix it is known which rows these are (`former`, `former_rows`).
- What is held (`hold`) stays protected over commits, until it is released: a change that is made in several commits is
  undone as a whole.
"""

from __future__ import annotations

import itertools
import struct
from bisect import bisect_left
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvstore_server.durable.memory import DurableMemory, DurableRegion
from kvstore_server.errors import RecoveryError
from kvstore_server.failpoints import failpoint
from kvstore_server.transport.arena import Bytes

Ids = npt.NDArray[np.int64]
Matrix = tuple[int, int, int]
"""Region, begin, and bytes of a row."""
ProtectedRows = tuple[int, int, int, Ids]
"""The same, and which rows."""
_RANGE, _ROWS, _PLAN, _COUNT = (struct.Struct(f"<{number}q") for number in (3, 4, 2, 1))
RANGES, ROWS, PLAN = range(3)
"""What a record says: ranges or rows that are protected, or a plan."""
OWN = "journal."
"""Begin of the keys of memory that belongs to the journal, and not to a namespace."""
PROGRESS = OWN + "progress"
"""Key of the memory of `JournalProgress`."""
NO_CHANGE = -1
_ID = 8
SHADOW = ".shadow"
"""End of the key of a region's shadow."""


class JournalRows(NamedTuple):
    """Rows that a change has protected."""

    change: int
    ids: Ids


class JournaledRanges:
    """Disjoint ranges of integers, ascending, merged where they touch."""

    def __init__(self) -> None:
        self._begins: list[int] = []
        self._ends: list[int] = []

    def add(self, begin: int, end: int) -> list[tuple[int, int]]:
        """Add a range; return the parts of it that were not there."""
        # The first range that touches it, and the end of those that do.
        first = bisect_left(self._ends, begin)
        last = first
        new, at = [], begin
        while last < len(self._begins) and self._begins[last] <= end:
            if at < self._begins[last]:
                new.append((at, self._begins[last]))
            at = max(at, self._ends[last])
            last += 1
        if at < end:
            new.append((at, end))
        if first < last:
            begin, end = min(begin, self._begins[first]), max(end, self._ends[last - 1])
        self._begins[first:last], self._ends[first:last] = [begin], [end]
        return new

    def parts(self) -> list[tuple[int, int]]:
        return list(zip(self._begins, self._ends, strict=True))


class JournalPlan:
    """Parts of durable memory that are changed one after the other, made by `Journal.plan`.

    Attributes:
        copies: For each part, (target in a shadow, source) of what is copied before it is changed.
        ranges: For each part, (region, begin, end) of the same.
        recorded_in: The generation of the log that has it, under `number`; -1: none has.
    """

    def __init__(self) -> None:
        self.copies: list[list[tuple[Bytes, Bytes]]] = []
        self.ranges: list[list[tuple[int, int, int]]] = []
        self.number = 0
        self.recorded_in = -1

    def packed(self) -> bytes:
        data = [_PLAN.pack(self.number, len(self.ranges))]
        for ranges in self.ranges:
            data.append(_COUNT.pack(len(ranges)))
            data += [_RANGE.pack(*one) for one in ranges]
        return b"".join(data)


class JournalProgress:
    """How far a change by a plan has got: three numbers in durable memory, each of which is stored at once.

    They count only if the first one is that of the present change, so it is written last.
    """

    NBYTES = 24

    def __init__(self, region: DurableRegion) -> None:
        self.region = region
        self.numbers = region.bytes[: self.NBYTES].view(np.int64)

    def begin(self, change: int, plan: int) -> None:
        self.numbers[2] = 0
        self.numbers[1] = plan
        self.numbers[0] = change

    def count(self, parts: int) -> None:
        self.numbers[2] = parts

    def read(self, change: int) -> tuple[int, int] | None:
        """Return the plan's number, and how many of its parts may have changed; None: the change has no plan."""
        found, plan, parts = self.numbers.tolist()
        return (plan, parts) if found == change else None


class Journal:
    """Protects what is changed in durable memory. Not thread-safe.

    Args:
        record: Writes to the log: one of `RANGES`, `ROWS` and `PLAN`, and the data.

    Attributes:
        number: Counts the commits of this process.
        generation: Of the log.
        change: The id of the present change that the next process finds in the log; `NO_CHANGE` without a log.
        is_open: Whether something was protected since the last commit.
    """

    def __init__(self, memory: DurableMemory, record: Callable[[int, bytes], object]) -> None:
        self.memory = memory
        self.number = 0
        self.generation = 0
        self.change = NO_CHANGE
        self.is_open = False
        self._last_plan = 0
        self._plan: JournalPlan | None = None
        """The plan by which the present change is made, if it is by one."""
        self._parts = 0
        """How many parts of it are protected."""
        self._progress: JournalProgress | None = None
        self._record = record
        self._shadows: dict[int, DurableRegion] = {}
        self._ranges: dict[int, JournaledRanges] = {}
        """Region → what is protected since the last commit, or held."""
        self._rows: dict[int, list[tuple[int, int, Ids]]] = {}
        """Region → (begin, bytes of a row, ids) of rows that are protected since the last commit."""
        self.rows_before: dict[Matrix, JournalRows] = {}
        """Matrix → the rows that the last complete change of it has protected."""
        self._held: dict[Hashable, list[tuple[int, int, int]]] = {}
        """Owner → (region, begin, end) of what stays protected until it is released."""

    def shadow(self, region: DurableRegion) -> DurableRegion:
        found = self._shadows.get(region.number)
        if found is None:
            found = self.memory.take(region.key + SHADOW, region.nbytes)
            self._shadows[region.number] = found
        return found

    def plan(self, parts: Iterable[Iterable[Tensor]]) -> JournalPlan:
        """Return a plan for a change that is made part by part, each of some contiguous tensors, all of them disjoint.

        What is not in durable memory is ignored.
        """
        found = JournalPlan()
        self._last_plan += 1
        found.number = self._last_plan
        for tensors in parts:
            places = [place for one in tensors if one.nbytes and (place := self.memory.find(one)) is not None]
            found.ranges.append([(region.number, begin, end) for region, begin, end in places])
            found.copies.append([
                (self.shadow(region).bytes[begin:end], region.bytes[begin:end]) for region, begin, end in places
            ])  # fmt: skip
        return found

    def begin_plan(self, plan: JournalPlan) -> bool:
        """Begin a change by a plan; return False if that is not possible, because other things are protected already.

        Then nothing was done, and `protect` has to be used.
        """
        if self.is_open or self._held or self.change == NO_CHANGE:
            return False
        if plan.recorded_in != self.generation:
            self._record(PLAN, plan.packed())
            plan.recorded_in = self.generation
        region = self.memory.take(PROGRESS, JournalProgress.NBYTES)
        if self._progress is None or self._progress.region is not region:
            self._progress = JournalProgress(region)
        self._progress.begin(self.change, plan.number)
        self._plan, self._parts, self.is_open = plan, 0, True
        return True

    def protect_part(self, plan: JournalPlan, part: int) -> None:
        """Keep the present values of a part, which is changed next; parts that are left out before it are kept, too."""
        progress = self._progress
        assert plan is self._plan
        assert progress is not None
        for copies in plan.copies[self._parts : part + 1]:
            for target, source in copies:
                np.copyto(target, source)
        self._parts = part + 1
        failpoint("server.journal.copied")
        progress.count(part + 1)
        failpoint("server.journal.recorded")

    def _end_plan(self) -> None:
        """Note what was protected by the plan like what is protected by ranges, because that may overlap it."""
        plan, self._plan = self._plan, None
        for number, begin, end in itertools.chain(*plan.ranges[: self._parts]) if plan is not None else ():
            self._ranges.setdefault(number, JournaledRanges()).add(begin, end)

    def protect(self, tensors: Iterable[Tensor]) -> None:
        """Keep the present values of contiguous tensors, which are changed next, until the next commit.

        What is not in durable memory is ignored: it does not outlive the process.
        """
        if self._plan is not None:
            self._end_plan()
        records = []
        for tensor in tensors:
            place = self.memory.find(tensor) if tensor.nbytes else None
            if place is None:
                continue
            region, begin, end = place
            ranges = self._ranges.get(region.number)
            if ranges is None:
                ranges = self._ranges[region.number] = JournaledRanges()
            for first, last in ranges.add(begin, end):
                self._copy(region, first, last)
                records.append(_RANGE.pack(region.number, first, last))
        if records:
            self.is_open = True
            failpoint("server.journal.ranges_copied")
            self._record(RANGES, b"".join(records))

    def _copy(self, region: DurableRegion, begin: int, end: int) -> None:
        """Copy a range to the shadow, except rows that are there already."""
        shadow = self.shadow(region)
        kept = []
        for start, width, ids in self._rows.get(region.number, ()):
            rows = _view_journal_rows(shadow.bytes, start, width, ids)
            kept.append((rows, ids, rows[ids].copy()))
        np.copyto(shadow.bytes[begin:end], region.bytes[begin:end])
        for rows, ids, values in kept:
            rows[ids] = values

    def protect_rows(self, rows: Tensor, ids: Tensor) -> None:
        """Like `protect`, for distinct rows of a contiguous matrix."""
        if self._plan is not None:
            self._end_plan()
        place = self.memory.find(rows) if rows.nbytes and len(ids) else None
        if place is None:
            return
        region, begin, end = place
        # 1. Leave out what is protected already: by rows of the same matrix, or with all of it.
        width, new = rows.nbytes // len(rows), ids.numpy()
        for first, last in self._ranges[region.number].parts() if region.number in self._ranges else ():
            low, high = begin + new * width, begin + (new + 1) * width
            is_cut = (low < last) & (high > first) & ~((low >= first) & (high <= last))
            if is_cut.any():  # some rows in part: protect all of the matrix
                self.protect([rows])
                return
            new = new[(low >= last) | (high <= first)]
        others = self._rows.setdefault(region.number, [])
        for start, other_width, known in others:
            if (start, other_width) == (begin, width):
                new = np.setdiff1d(new, known, assume_unique=True)
            elif start < end and start + (int(known.max()) + 1) * other_width > begin:
                self.protect([rows])  # another matrix in the same memory
                return
        if not len(new):
            return
        # 2. Copy the others, and record them.
        shadow = self.shadow(region)
        _view_journal_rows(shadow.bytes, begin, width, new)[new] = _view_journal_rows(
            region.bytes, begin, width, new
        )[new]
        others.append((begin, width, new.copy()))
        self.is_open = True
        failpoint("server.journal.rows_copied")
        self._record(ROWS, pack_journal_rows(region.number, begin, width, new))

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
                former = _view_journal_rows(self.shadow(region).bytes, start, width, ids)[ids]
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
        """Return what is held, as a commit contains it; see `undo_journal_ranges`."""
        return b"".join(_RANGE.pack(*one) for held in self._held.values() for one in held)

    def begin_log(self, generation: int, change: int) -> None:
        """Note that there is a new log, without what was recorded; nothing is protected, except what is held."""
        self.generation, self.change = generation, change

    def commit(self, change: int) -> None:
        """Note that the log has a commit with what is `held`: all other changes are complete.

        Args:
            change: Identifies what changes next.
        """
        self.rows_before |= join_journal_rows(
            self.number, [(number, *one) for number, own in self._rows.items() for one in own]
        )
        self.number += 1
        self.change = change
        self.is_open = False
        self._plan = None
        self._ranges, self._rows = {}, {}
        for number, begin, end in [one for held in self._held.values() for one in held]:
            self._ranges.setdefault(number, JournaledRanges()).add(begin, end)


def join_journal_rows(change: int, parts: Iterable[ProtectedRows]) -> dict[Matrix, JournalRows]:
    """Return what a change has protected of each matrix, perhaps in several parts."""
    found: dict[Matrix, list[Ids]] = {}
    for region, begin, width, ids in parts:
        found.setdefault((region, begin, width), []).append(ids)
    return {matrix: JournalRows(change, np.sort(np.concatenate(own))) for matrix, own in found.items()}


def pack_journal_rows(region: int, begin: int, width: int, ids: Ids) -> bytes:
    """Encode rows of a matrix as a record has them."""
    return _ROWS.pack(region, begin, width, len(ids)) + ids.tobytes()


def unpack_journal_rows(data: bytes) -> ProtectedRows:
    """Decode what `pack_journal_rows` has encoded. Raises RecoveryError if it contradicts itself."""
    if len(data) < _ROWS.size or len(data) % _ID:
        raise RecoveryError(f"the log has a record of rows of {len(data)} bytes")
    number, begin, width, count = _ROWS.unpack_from(data)
    ids = np.frombuffer(data, np.int64, offset=_ROWS.size)
    if len(ids) != count or width < 1 or begin < 0 or not count or ids.min() < 0:
        raise RecoveryError(
            f"the log names {count} rows of {width} bytes of memory {number} and contains {len(ids)}"
        )
    return number, begin, width, ids


def undo_journal_plan(
    memory: DurableMemory, change: int, plans: Iterable[bytes], without: Collection[int] = ()
) -> list[tuple[int, int, int]]:
    """Copy back what was protected by a plan in the change that is not complete, if it is made by one.

    Args:
        plans: The records of all plans.

    Returns, raises: like `undo_journal_ranges`.
    """
    region = memory.known(PROGRESS)
    progress = None if region is None else JournalProgress(region).read(change)
    if progress is None:
        return []
    number, count = progress
    data = next((one for one in plans if _PLAN.unpack_from(one)[0] == number), None)
    if data is None or not 0 <= count <= _PLAN.unpack_from(data)[1]:
        raise RecoveryError(
            f"memory was changed by a plan {number} of which {count} parts are not in the log"
        )
    undone, at = [], _PLAN.size
    for _ in range(count):
        [size] = _COUNT.unpack_from(data, at)
        at += _COUNT.size
        undone += undo_journal_ranges(memory, data[at : at + size * _RANGE.size], without)
        at += size * _RANGE.size
    return undone


def undo_journal_ranges(
    memory: DurableMemory, data: bytes, without: Collection[int] = ()
) -> list[tuple[int, int, int]]:
    """Copy back what `protect` has recorded, or what was `held`; return (region, begin, end) of it.

    Args:
        without: Regions that do not exist any more.

    Raises RecoveryError for unknown memory.
    """
    ranges = [one for one in _RANGE.iter_unpack(data) if one[0] not in without]
    for number, begin, end in ranges:
        region, shadow = _journal_region_and_shadow(memory, number)
        if not 0 <= begin <= end <= region.nbytes:
            raise RecoveryError(
                f"the log names bytes {begin} to {end} of the {region.nbytes} of memory {number}"
            )
        np.copyto(region.bytes[begin:end], shadow.bytes[begin:end])
        failpoint("server.recovery.undone")
    return ranges


def undo_journal_rows(
    memory: DurableMemory, data: bytes, without: Collection[int] = ()
) -> list[tuple[int, int, int]]:
    """Like `undo_journal_ranges`, for what `protect_rows` has recorded."""
    number, begin, width, ids = unpack_journal_rows(data)
    if number in without:
        return []
    region, shadow = _journal_region_and_shadow(memory, number)
    if begin + (int(ids.max()) + 1) * width > region.nbytes:
        raise RecoveryError(f"the log names rows beyond the {region.nbytes} bytes of memory {number}")
    _view_journal_rows(region.bytes, begin, width, ids)[ids] = _view_journal_rows(
        shadow.bytes, begin, width, ids
    )[ids]
    return [(number, begin, begin + (int(ids.max()) + 1) * width)]


def _journal_region_and_shadow(memory: DurableMemory, number: int) -> tuple[DurableRegion, DurableRegion]:
    region = memory.regions.get(number)
    if region is None:
        raise RecoveryError(f"the log names memory {number}, which is not in the store")
    shadow = memory.known(region.key + SHADOW)
    if shadow is None or shadow.nbytes != region.nbytes:
        raise RecoveryError(
            f"the former contents of memory {number}, to which the log returns, are not in the store"
        )
    return region, shadow


def _view_journal_rows(memory: Bytes, begin: int, width: int, ids: Ids) -> npt.NDArray[np.void]:
    """Return rows of `width` bytes as single elements, which numpy copies fastest; enough for all ids."""
    end = begin + (int(ids.max()) + 1) * width
    return memory[begin:end].view(f"V{width}")
