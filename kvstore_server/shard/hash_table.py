"""Rows of a hash table: a row-sparse key without a number of rows, whose rows are found by ids of 64 bits.

Rows come when they are updated first (or for the nth time, see `HashTableOptions`), and go when they have not been
updated for long, or when there are too many. A row that is not there reads as its initial value, which is a function
of its id alone (`initial_rows`), so it may be read anywhere, in any order, before or after it has come.

Each row has a *slot*. All arrays (weights, optimizer state, and `RowSlots`: row numbers, when a row was updated last
and how often) have as many slots as could ever be needed; the system provides their pages as they are written, so the
table grows without copying anything. Rows that may not come yet are counted in slots of their own.

With a `Journal`, the arrays are in memory that outlives the process, and rows are protected before they are written. A
process that finds the arrays of a former one rebuilds only the index (`restore`).

Weight decay is lazy: `_DECAY` is the sum of the logarithms of the factors of all rounds so far, and each row has what
that was when the row was multiplied last. Each read or update of a row multiplies it by what has come since.

Momentum is lazy, too, if the optimizer moves rows without gradient by it (`row_momentum`): a read or update
of a row moves it as the rounds since its last gradient would have (`move_rows`). When the factor of momentum changes,
all rows are moved first.

With `SpilledMemory`, weights and optimizer state are in files on a disk, and a table may be larger than memory.
`RowSlots` are in memory, because they are searched all the time. Before an update changes anything, blocks of the disk
are allocated for all rows that may come, also in arrays of the state that this update creates.

Invariants:

- What happens to a row depends on the updates of the table alone, never on its slot, on the time, or on what else is
  on this server: a table has the same rows, with the same bits, on any number of servers. The clock counts updates.
- A slot that is taken is initialised completely, so nothing of a former row can be seen.
- While a slice keeps its history (`history`), updates alone have changed it: a row that has changed since some step was
  touched after it. Whatever else changes rows (slices that are put or cleared, another optimizer, a process that goes
  on with the memory of a former one or with a snapshot) gives the slice a history that no other slice ever had.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, TypeGuard

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvstore_server.codec import compute_dtype, torch_dtype
from kvstore_server.durable.spill_folder import SpilledMemory
from kvstore_server.errors import ConfigurationError, OptimizerError, ProtocolError
from kvstore_server.failpoints import failpoint
from kvstore_server.optimizer.apply import (
    apply_update,
    create_row_state,
    is_half,
    update_rows_with_state,
)
from kvstore_server.optimizer.base import Hyper, Optimizer, StateValue, Values
from kvstore_server.optimizer.rows import gather_rows, scatter_rows
from kvstore_server.optimizer.state import State
from kvstore_server.optimizer.trees import decode_tree_entry, encode_tree_entry
from kvstore_server.plan import HASH_SLICES, HashTableOptions, slices_of_hashes
from kvstore_server.protocol.rows import INITIAL, SAME, SENT, HeldRows, RowSet, new_pulled_rows
from kvstore_server.shard.id_index import MAX_SLOTS, IdIndex, Ints
from kvstore_server.shard.row_values import initial_rows, limit_norms, move_rows, multiply_rows
from kvstore_server.shard.table_optimizer import own_table_optimizer, row_momentum

Counts = npt.NDArray[np.int32]
AllocateTable = Callable[[str, int], Tensor]
"""(name, bytes) → that much memory as uint8, zero, whose pages are provided as they are written."""
Claim = Callable[[int, str], object]
"""(bytes, what needs them) claims memory before it is used. Raises ConfigurationError if there is too little."""
FormerRows = Callable[[Tensor], tuple[Ints, Tensor] | None]
ProtectRows = Callable[[Tensor, Ints], object]
"""Keeps these rows of an array, which are changed next, until the change is complete."""

_NO_RESERVE = 0x4000
"""MAP_NORESERVE: memory of the mapping is not counted before it is used."""
_SMALLEST = 1 << 30
"""Bytes of the smallest array that is tried."""
_SMALL_PAGES = 4 << 20
"""Bytes at the beginning of an array that are in small pages, so that a small table takes little memory."""
_SWEPT = 4
"""Slots that are searched for expired rows for each row of an update."""
_SWEPT_AT_LEAST = 4096
_CROWDED = 10
"""A tenth of a full slice goes."""
_INDEXED = 32
"""Bytes of the index for a row, at most: 8 to 22, and up to 11 of the former one while it grows."""
_CLAIMED_AHEAD = 16
"""A sixteenth of the memory in use is claimed in advance."""
_BLOCK = 1 << 16
"""Rows whose state is created at once."""


def new_history() -> int:
    """Return a number of 62 bits that no slice has had before."""
    return 1 + secrets.randbits(62)


def no_claim(_nbytes: int, _what: str) -> None:
    """Claim nothing."""


class HashTableStats(NamedTuple):
    """Figures of a table, or of its part on one server."""

    rows: int
    """Rows that are there and have not expired."""
    admitted: int
    """How many rows have ever come, those that came again included."""
    refused: int
    """How many gradients of rows were ignored because the rows are not admitted yet."""
    evicted: int
    """How many rows have gone."""
    nbytes: int
    """Bytes that are in use for rows, their state, and what it takes to find them."""
    hottest: Sequence[tuple[int, int]]
    """(row number, gradients) of the rows that were updated most often, most first."""


def table_memory(_name: str, nbytes: int) -> Tensor:
    """Reserve memory of this process. Raises MemoryError."""
    try:
        room = mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE)
    except (OSError, ValueError, OverflowError) as error:
        raise MemoryError(f"the system has no addresses for {nbytes} bytes: {error}") from None
    if hasattr(mmap, "MADV_HUGEPAGE") and nbytes > _SMALL_PAGES:
        with suppress(OSError):  # rows are read at random, which small pages would slow down
            room.madvise(mmap.MADV_HUGEPAGE, _SMALL_PAGES)
    return torch.from_numpy(np.frombuffer(room, np.uint8))


def slots_that_fit(row_nbytes: int) -> int:
    """Return for how many slots to reserve arrays: no more can fit into the memory of this machine."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min(max(memory, _SMALLEST) // (row_nbytes + _SLOT.itemsize + _INDEXED), MAX_SLOTS)


def slots_in_files(row_nbytes: int, room: int) -> int:
    """Return for how many slots to reserve arrays in files of up to `room` bytes; what finds rows is in memory."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min(room // row_nbytes, max(memory, _SMALLEST) // (_SLOT.itemsize + _INDEXED), MAX_SLOTS)


_SLOT = np.dtype([("row", "<i8"), ("touched", "<i4"), ("count", "<i4")])
_STEP, _HAS_STATE, _END, _SWEPT, _CANDIDATES_END, _CANDIDATES_SWEPT, _ROOM, _DECAY = range(8)
_MOMENTUM, _SINCE, _ADMITTED = range(8, 11)
_REFUSED, _EVICTED = _ADMITTED + HASH_SLICES, _ADMITTED + 2 * HASH_SLICES
_HEAD = _ADMITTED + 3 * HASH_SLICES
"""Numbers of a table; those of what has happened are kept by slice."""
_ENTRIES = 4096
"""Bytes for the names of the arrays of the optimizer's state, and for its numbers."""
_ONLY: Ints = np.zeros(1, np.int64)
"""The only row of a matrix."""
_NONE: Ints = np.zeros(0, np.int64)


_MAX_STEP = (1 << 31) - (1 << 20)
"""More updates than a table ever has: they are counted in 32 bits."""
_MOST_STATES, _LONGEST = 16, 64
"""The most entries of an optimizer's state, and the longest name of one."""
_BUFFER = "momentum_buffer"
"""The momentum of rows in the optimizer's state."""
_CANDIDATE, _STATE = "candidate ", "state "
"""Begin of the names of what `slice_state` has of rows that may not come yet, and of the optimizer's state."""
_PRESENT = "present rows"
"""The name of the numbers of all rows that are there, where `slice_state` has only rows that have changed."""


def _checked_rows(name: str, given: Mapping[str, StateValue], begin: str, number: int, step: int) -> Ints:
    """Return the row numbers that `slice_state` has returned. Raises ProtocolError if they cannot be that."""
    found = [given.get(begin + entry) for entry in ("rows", "touched", "counts")]
    dtypes = [one.dtype if isinstance(one, Tensor) and one.dim() == 1 else None for one in found]
    if dtypes == [torch.int64, torch.int32, torch.int32]:
        rows, touched, _ = map(np.asarray, found)
        is_here = bool((slices_of_hashes(rows) == number).all() and (rows[1:] > rows[:-1]).all())
        if (
            is_here
            and len({len(one) for one in found if isinstance(one, Tensor)}) == 1
            and ((touched > 0) & (touched <= max(step, 1))).all()
        ):
            checked: Ints = rows.astype(np.int64, copy=False)
            return checked
    raise ProtocolError(
        f"the {begin}rows of slice {number} of hash table {name!r} are not distinct, ascending and of that slice"
    )


class RowSlots:
    """Which row is in which slot, when it was updated last, and how often. Not thread-safe.

    Args:
        memory: Of 16 bytes a slot.
        head: Numbers of the table; `end` and `swept` are two of them.
        at: Where these are.
        protect: Is called before slots are changed.
    """

    def __init__(self, memory: Tensor, head: Ints, at: int, protect: ProtectRows) -> None:
        self.memory = memory.view(-1, _SLOT.itemsize)
        slots = memory.reshape(-1).numpy().view(_SLOT)
        self.rows: Ints = slots["row"]
        """The row number of each slot."""
        self.touched: Counts = slots["touched"]
        """The step in which each row was updated last, counted from 1; 0: the slot is free."""
        self.counts: Counts = slots["count"]
        """How many gradients of each row there were."""
        self._head, self._at, self._protect = head, at, protect
        self._index = IdIndex(self.rows)
        self._free: list[Ints] = []
        self._num_free = 0
        self._found: tuple[Ints, Ints] | None = None
        """The rows that were looked for last, and their slots; None after a change. Those of a batch are looked for
        twice: when they are read, and when they are updated.
        """
        self._by_slice: list[Ints] | None = None
        """The slots of each slice, in the order of their rows; None after a change."""

    def __len__(self) -> int:
        return self.end - self._num_free

    @property
    def end(self) -> int:
        """Slots from here on have never been taken."""
        return int(self._head[self._at])

    @property
    def nbytes(self) -> int:
        return self.end * _SLOT.itemsize + self._index.nbytes

    def restore(self) -> None:
        """Find the rows of a former process again."""
        self._found = self._by_slice = None
        is_live = self.touched[: self.end] > 0
        self._index = IdIndex(self.rows)
        self._index.insert(np.flatnonzero(is_live))
        self._free = [np.flatnonzero(~is_live)]
        self._num_free = len(self._free[0])

    def find(self, rows: Ints) -> Ints:
        """Return the slot of each row; -1: it has none."""
        if self._found is None or not np.array_equal(self._found[0], rows):
            self._found = rows.copy(), self._index.find(rows)
        return self._found[1].copy()

    def live(self) -> Ints:
        return np.flatnonzero(self.touched[: self.end])

    def take(self, rows: Ints) -> Ints:
        """Give slots to rows (distinct) that have none; the caller touches them."""
        found: list[Ints] = []
        count = len(rows)
        while count and self._free:
            part = self._free.pop()
            if len(part) > count:
                self._free.append(part[count:])
                part = part[:count]
            found.append(part)
            count -= len(part)
            self._num_free -= len(part)
        found.append(np.arange(self.end, self.end + count))
        self._head[self._at] += count
        slots = np.concatenate(found)
        self.protect(slots)
        self.rows[slots], self.counts[slots] = rows, 0
        self._index.insert(slots)
        self._found = self._by_slice = None
        return slots

    def of_slice(self, number: int) -> Ints:
        """Return the slots of a slice's rows, in the order of their rows."""
        return self._slices()[number]

    def replace_slice(self, number: int, rows: Ints) -> Ints:
        """Remove the rows of a slice, and give slots to others (distinct, ascending); the caller touches them."""
        slices = self._slices()
        self.remove(slices[number])
        taken = self.take(rows)
        # The other slices have not changed; to sort all rows again for each of many slices would take long.
        slices[number], self._by_slice = taken, slices
        return taken

    def _slices(self) -> list[Ints]:
        if self._by_slice is None:
            live = self.live()
            rows = self.rows[live]
            order = rows.argsort()
            # The slice of a row is its highest bits, so slices follow each other.
            ends = slices_of_hashes(rows[order]).searchsorted(np.arange(1, HASH_SLICES))
            self._by_slice = np.split(live[order], ends)
        return self._by_slice

    def touch(self, slots: Ints, step: int, times: Ints) -> None:
        self._by_slice = None  # it takes memory
        self.touched[slots] = step
        self.counts[slots] += times.astype(np.int32)

    def protect(self, slots: Ints) -> None:
        self._protect(self.memory, slots)

    def remove(self, slots: Ints) -> None:
        if len(slots):
            self.protect(slots)
            self._index.remove(slots)
            self._found = self._by_slice = None
            self.touched[slots] = 0
            self._free.append(slots)
            self._num_free += len(slots)

    def next(self, count: int) -> Ints:
        """Return the next slots of a round over all; after the last one comes the first."""
        if not self.end:
            return np.zeros(0, np.int64)
        slots: Ints = (np.arange(min(count, self.end)) + self._head[self._at + 1]) % self.end
        self._head[self._at + 1] = slots[-1] + 1
        return slots


class HashTable:
    """The rows of a hash table on one server, with their optimizer state. Not thread-safe.

    Args:
        name: The name of the key.
        width: Elements of a row.
        dtype: Of the weights, as named in plans.
        allocate: Memory of the arrays. What a former process has left there is found by `restore`.
        protect: Is called before rows of an array are changed.
        room: Slots to reserve; 0: as many as can fit into the memory of this machine, or into `spilled`.
        spilled: Files for weights and optimizer state; None: they are in memory.

    Raises:
        ConfigurationError, UnknownNameError: Its own optimizer cannot be built in this process.
    """

    def __init__(
        self,
        name: str,
        width: int,
        dtype: str,
        options: HashTableOptions,
        allocate: AllocateTable = table_memory,
        protect: ProtectRows = lambda _array, _slots: None,
        room: int = 0,
        spilled: SpilledMemory | None = None,
    ) -> None:
        self._own_optimizer = own_table_optimizer(options.optimizer)[0] if options.optimizer else None
        self.name, self.width, self.dtype, self.options = name, width, torch_dtype(dtype), options
        self._allocate, self._protect, self._spilled = allocate, protect, spilled
        self._claimed = 0
        """Bytes that are claimed."""
        self.full = ""
        """Why there may be no room for the rows of the next update; empty: there is."""
        self._most_given = 0
        """The most row numbers that an update has had, of all ranks."""
        self.epoch = int.from_bytes(os.urandom(7), "little")
        """Changes when rows are replaced otherwise than by updates; another process has another one."""
        memory = allocate("head", 8 * _HEAD + _ENTRIES)[: 8 * _HEAD + _ENTRIES]
        self._head_memory = memory[: 8 * _HEAD].view(1, -1)
        self._head: Ints = memory[: 8 * _HEAD].view(torch.int64).numpy()
        self.room = room or int(self._head[_ROOM]) or self._room_for_slots()
        self._head[_ROOM] = self.room
        self._entries = memory[8 * _HEAD :].view(1, -1)
        """What the optimizer's state consists of."""
        self.slots = RowSlots(
            self._reserve("slots", torch.uint8, (_SLOT.itemsize,), allocate), self._head, _END, protect
        )
        candidates = self.slots.memory[:0]
        if options.admit_after > 1:
            candidates = self._reserve("candidates", torch.uint8, (_SLOT.itemsize,), allocate)
        self._candidates = RowSlots(candidates.view(-1), self._head, _CANDIDATES_END, protect)
        self.weights = self._reserve("weights", self.dtype, (width,))
        self.values: Values = {}
        """The optimizer's state: numbers, and arrays with a row for each slot."""
        self.master: Tensor | None = None
        """float32 copies of half-precision weights."""
        self._decay = self._head[_DECAY : _DECAY + 1].view(np.float64)
        self._decayed: Tensor | None = None
        """For each row, what `_decay` was when the row was multiplied last; None without weight decay."""
        if options.weight_decay:
            self._decayed = self._reserve("decayed", torch.float64, (1,))
        self._momentum = self._head[_MOMENTUM : _MOMENTUM + 1].view(np.float64)
        """The factor of momentum that moves rows without gradient; 0: nothing moves them. Since the step `_SINCE`."""
        self._coming: list[Tensor] = []
        """Arrays of the state that the next update may create; in memory a row of each, which is not used."""
        self._tried: tuple[Optimizer, Hyper] | None = None
        """The optimizer and the options that these belong to."""
        self._in_slice = np.zeros(HASH_SLICES, np.int64)
        self._histories = [new_history()] * HASH_SLICES

    def restore(self) -> None:
        """Go on with what a former process had."""
        self.epoch += 1
        data = bytes(self._entries.numpy()).rstrip(b"\0")
        for name, (value, dtype, shape) in (json.loads(data) if data and self.has_state else {}).items():
            entry = value if dtype is None else self._reserve(f"state.{name}", torch_dtype(dtype), shape)
            if name == "master":
                self.master = entry
            else:
                self.values[name] = entry if dtype is not None else decode_tree_entry(value)
        for slots in (self.slots, self._candidates):
            slots.restore()
        self._in_slice[:] = self._count_by_slice(self.slots.rows[self.slots.live()])

    # ---------------------------------------------------------------- reading

    def __len__(self) -> int:
        """Return how many rows there are, those included that have expired but have not been removed."""
        return len(self.slots)

    @property
    def step(self) -> int:
        """Updates of the table: the clock of its rules."""
        return int(self._head[_STEP])

    @property
    def has_state(self) -> bool:
        return bool(self._head[_HAS_STATE])

    def read(self, rows: Ints) -> Tensor:
        """Copy rows, in this order; those that are not there have their initial values."""
        slots = self.slots.find(rows)
        slots[(slots >= 0) & self._have_expired(self.slots, slots)] = -1
        return self._read_slots(rows, slots)

    def pull(self, rows: Ints, held: HeldRows | None = None) -> Tensor:
        """Return rows as `PulledRows`: without those that the worker has, and those that are not in the table."""
        slots = self.slots.find(rows)
        slots[(slots >= 0) & self._have_expired(self.slots, slots)] = -1
        forms = np.where(slots < 0, INITIAL, SENT).astype(np.uint8)
        if held is not None and held.epoch == self.epoch:
            # A row that is there has not changed since it was updated last, and came with an update, too.
            changes = self._decayed is not None or self._momentum[0]
            touched = self.step if changes else self.slots.touched[np.maximum(slots, 0)]
            forms[(slots >= 0) & (held.steps >= touched) & (held.steps <= self.step)] = SAME
        sent = torch.from_numpy(slots[forms == SENT])
        data, values = new_pulled_rows(self.step, self.epoch, forms, self.width, self.dtype)
        torch.index_select(self.weights, 0, sent, out=values)
        self._bring_up(values, sent)
        return data

    def read_former(self, rows: Ints, former: FormerRows) -> Tensor:
        """Copy rows as the last change found them.

        Args:
            former: Returns which rows of an array the change has protected, ascending, and their values; None: none.
        """
        head = former(self._head_memory)
        if head is None:
            return self.read(rows)  # the table has not changed
        step, end = head[1].view(torch.int64)[0, [_STEP, _END]].tolist()
        decay, mu = head[1].view(torch.float64)[0, [_DECAY, _MOMENTUM]].tolist()
        # 1. The slots that were changed: which rows they had, and when these were updated.
        found = former(self.slots.memory)
        changed, slots = (np.zeros(0, np.int64), np.zeros(0, _SLOT))
        if found is not None:
            is_old = found[0] < end
            changed, slots = found[0][is_old], found[1].reshape(-1).numpy().view(_SLOT)[is_old]
        order = slots["row"].argsort(kind="stable")
        order = order[slots["touched"][order] > 0]
        # 2. The slot of each row then: a changed one that had it, or one that has not changed.
        at = self.slots.find(rows)
        touched = self.slots.touched[np.maximum(at, 0)]
        at[np.isin(at, changed) | (at >= end)] = -1
        place = np.minimum(slots["row"][order].searchsorted(rows), max(len(order) - 1, 0))
        for where in np.flatnonzero(slots["row"][order][place] == rows) if len(order) else ():
            at[where], touched[where] = changed[order[place[where]]], slots["touched"][order[place[where]]]
        if self.options.expire_after:
            at[touched < step + 1 - self.options.expire_after] = -1
        # 3. Their weights then.
        values = _former_rows(self.weights, at, former)
        decayed = None if self._decayed is None else _former_rows(self._decayed, at, former)
        logarithms = _logarithms(decay, decayed, len(at))
        buffer = self.values.get(_BUFFER)
        if mu and _is_array(buffer):
            since = int(head[1].view(torch.int64)[0, _SINCE])
            missed = _missed_rounds(step, touched, since)
            move_rows(values, _former_rows(buffer, at, former), mu, missed, logarithms)
        else:
            multiply_rows(values, logarithms)
        return self._with_initial(rows, at, values)

    def _read_slots(self, rows: Ints, slots: Ints) -> Tensor:
        where = torch.from_numpy(np.maximum(slots, 0))
        found = self.weights.index_select(0, where)
        self._bring_up(found, where)
        return self._with_initial(rows, slots, found)

    def _bring_up(self, values: Tensor, slots: Tensor) -> None:
        """Change copies of rows as weight decay and momentum have changed the rows since they were trained last."""
        decayed = None if self._decayed is None else self._decayed.index_select(0, slots)
        logarithms = _logarithms(float(self._decay[0]), decayed, len(slots))
        buffer = self.values.get(_BUFFER)
        if self._momentum[0] and _is_array(buffer):
            missed = self._missed(slots)
            move_rows(values, buffer.index_select(0, slots), float(self._momentum[0]), missed, logarithms)
        else:
            multiply_rows(values, logarithms)

    def _missed(self, slots: Tensor) -> Ints:
        """Return for how many rounds momentum has moved rows that are still to be moved."""
        return _missed_rounds(self.step, self.slots.touched[slots.numpy()], int(self._head[_SINCE]))

    def _with_initial(self, rows: Ints, slots: Ints, values: Tensor) -> Tensor:
        """Replace the values of rows that have no slot by their initial values."""
        missing = np.flatnonzero(slots < 0)
        if len(missing):
            values[torch.from_numpy(missing)] = self._initial(rows[missing])
        return values

    def _have_expired(self, slots: RowSlots, which: Ints) -> npt.NDArray[np.bool_]:
        """Return whether rows are gone for the next update."""
        after = self.options.expire_after
        if not after:
            return np.zeros(len(which), bool)
        return np.asarray(slots.touched[which] < self.step + 1 - after)

    def _initial(self, rows: Ints) -> Tensor:
        return initial_rows(self.options, self.name, rows, self.width, self.dtype)

    # ---------------------------------------------------------------- updates

    def update(self, rows: RowSet, times: Ints, optimizer: Optimizer, hyper: Hyper) -> None:
        """Update rows once, and let rows come and go. There must be room for them (`check_room`).

        Args:
            rows: Row numbers, distinct and ascending, and the sum of their gradients.
            times: How many gradients each row got.
            optimizer: That of all keys; not used if the table has its own.
        """
        optimizer = self._own_optimizer or optimizer
        numbers, now = rows.ids.numpy(), self.step + 1
        self._protect(self._head_memory, _ONLY)
        if not self.has_state:
            self._create_state(optimizer)
        self._set_momentum(row_momentum(optimizer, hyper))
        # 1. Rows that have expired are new again, rows that are not there may come.
        slots = self.slots.find(numbers)
        known = np.flatnonzero(slots >= 0)
        expired = known[self._have_expired(self.slots, slots[known])]
        self._remove(slots[expired])
        slots[expired] = -1
        missing = np.flatnonzero(slots < 0)
        if len(missing):
            missing, former = self._admit(numbers, missing, times)
            slots[missing] = self._take(numbers[missing], former, optimizer)
        failpoint("server.hash_table.taken")
        # 2. Update those that are there.
        here, values = np.flatnonzero(slots >= 0), rows.values
        if len(here) < len(slots):
            slots, times, values = slots[here], times[here], values.index_select(0, torch.from_numpy(here))
        self._protect_rows(slots)
        self._catch_up(torch.from_numpy(slots), hyper["lr"])
        self.slots.touch(slots, now, times)
        self._apply(optimizer, torch.from_numpy(slots), values, hyper)
        if self.options.max_norm:
            self._limit_norms(torch.from_numpy(slots))
        self._head[_STEP] = now
        failpoint("server.hash_table.updated")
        # 3. Rows that were not updated for long go bit by bit; slices with too many rows lose some.
        if self.options.expire_after:
            self._sweep(max(_SWEPT * len(numbers), _SWEPT_AT_LEAST))
        if self.options.max_rows:
            self._evict_from(np.unique(slices_of_hashes(numbers)))

    def _protect_rows(self, slots: Ints) -> None:
        self.slots.protect(slots)
        for array in self._arrays():
            self._protect(array, slots)

    def _arrays(self) -> list[Tensor]:
        own = [one for one in (self.master, self._decayed) if one is not None]
        return [self.weights, *filter(_is_array, self.values.values()), *own]

    def _apply(self, optimizer: Optimizer, slots: Tensor, grads: Tensor, hyper: Hyper) -> None:
        hyper = {**hyper, "key": self.name}
        state = State(self.values, self.step, self.master)
        if optimizer.takes_sparse(hyper):
            self._apply_sparse(optimizer, slots, grads, state, hyper)
        else:
            update_rows_with_state(optimizer, self.weights, slots, grads, state, hyper, self._new_entry)
            self.values = state.values
        self._keep_entries()

    def _catch_up(self, slots: Tensor, lr: float = 0.0) -> None:
        """Change rows as the rounds since they were trained last do, and as the weight decay of this round does."""
        buffer = self.values.get(_BUFFER) if self._momentum[0] else None
        if self._decayed is None and not _is_array(buffer):
            return
        last = math.log1p(-lr * self.options.weight_decay) if self._decayed is not None else 0.0
        self._decay += last
        decayed = None if self._decayed is None else gather_rows(self._decayed, slots, 0)
        logarithms = _logarithms(float(self._decay[0]), decayed, len(slots))
        rows = gather_rows(self.weights if self.master is None else self.master, slots, 0)
        if _is_array(buffer):
            momentum = gather_rows(buffer, slots, 0)
            move_rows(rows, momentum, float(self._momentum[0]), self._missed(slots), logarithms, last)
            scatter_rows(buffer, slots, momentum)
        else:
            multiply_rows(rows, logarithms)
        if self.master is not None:
            scatter_rows(self.master, slots, rows)
        scatter_rows(self.weights, slots, rows.to(self.dtype))
        if self._decayed is not None:
            now = torch.full((len(slots), 1), float(self._decay[0]), dtype=torch.float64, device="cpu")
            scatter_rows(self._decayed, slots, now)

    def _set_momentum(self, mu: float) -> None:
        """Let momentum move rows by another factor from the next round on."""
        if mu == self._momentum[0]:
            return
        self._move_all_rows()
        self._momentum[0], self._head[_SINCE] = mu, self.step

    def _move_all_rows(self) -> None:
        """Change all rows as the rounds have since they were trained last."""
        if not _is_array(self.values.get(_BUFFER)):
            return  # nothing has a momentum yet
        live = self.slots.live()
        for first in range(0, len(live), _BLOCK):
            slots = live[first : first + _BLOCK]
            self._protect_rows(slots)
            self._catch_up(torch.from_numpy(slots))
        # Rows have changed that no update has touched.
        self.epoch += 1
        self._histories = [new_history()] * HASH_SLICES

    def _limit_norms(self, slots: Tensor) -> None:
        """Limit the norms of rows that were updated."""
        for array in (self.weights,) if self.master is None else (self.master, self.weights):
            rows = gather_rows(array, slots, 0)
            changed = torch.from_numpy(limit_norms(rows, self.options.max_norm))
            scatter_rows(array, slots[changed], rows[changed])

    def _keep_entries(self) -> None:
        """Write down what the optimizer's state consists of, if that has changed."""
        named = self.values if self.master is None else {**self.values, "master": self.master}
        found: dict[str, tuple[Any, str | None, Sequence[int]]] = {}
        for name, value in named.items():
            if _is_array(value):
                found[name] = None, _name_of(value.dtype), value.shape[1:]
            else:
                found[name] = encode_tree_entry(value), None, ()
        data = json.dumps(found).encode().ljust(_ENTRIES, b"\0") if found else bytes(_ENTRIES)
        if data != bytes(self._entries.numpy()):
            self._protect(self._entries, _ONLY)
            self._entries.view(-1).numpy()[:] = np.frombuffer(data, np.uint8)

    def _apply_sparse(
        self, optimizer: Optimizer, slots: Tensor, grads: Tensor, state: State, hyper: Hyper
    ) -> None:
        """Let one of torch's classes that take sparse gradients update the rows, as if there were no others."""
        weight = gather_rows(self.weights, slots, 0)
        arrays = {name: value for name, value in state.values.items() if _is_array(value)}
        own: Values = {name: gather_rows(value, slots, 0) for name, value in arrays.items()}
        master = None if self.master is None else gather_rows(self.master, slots, 0)
        part = State({**state.values, **own}, state.step, master)
        every = torch.arange(len(slots), device="cpu")[None]
        sparse = torch.sparse_coo_tensor(
            every, grads, weight.shape, is_coalesced=True, check_invariants=False, device=grads.device
        )
        apply_update(optimizer, weight, sparse, part, hyper)
        for name, value in part.values.items():
            if _is_array(value):
                entry = arrays[name] if name in arrays else self._new_entry(name, value)
                scatter_rows(entry, slots, value)
                self.values[name] = entry
            else:
                self.values[name] = value
        scatter_rows(self.weights, slots, weight)
        if self.master is not None and part.master is not None:
            scatter_rows(self.master, slots, part.master)

    def forget_state(self) -> None:
        """Forget the optimizer's state, because another optimizer follows. The clock restarts at 0."""
        self._protect(self._head_memory, _ONLY)
        self._set_momentum(0.0)
        for slots in (self.slots, self._candidates):
            live = slots.live()
            slots.protect(live)
            slots.touched[live] = 1
        self._head[_STEP] = self._head[_HAS_STATE] = self._head[_SINCE] = 0
        self.values, self.master = {}, None
        self.epoch += 1
        self._coming, self._tried = [], None
        self._histories = [new_history()] * HASH_SLICES

    # ---------------------------------------------------------------- rows that come

    def check_update(
        self, given: Sequence[Ints], claim: Claim, optimizer: Optimizer, hyper: Hyper | None
    ) -> None:
        """Raise OptimizerError if there is no room for the rows that come with an update.

        Other servers do not know that, and apply their part. So room is claimed for two more updates with as many rows.
        As soon as there is too little, `full` says so, and workers do not begin a round that might fail here alone.

        Args:
            given: Their row numbers, of several ranks.
            optimizer, hyper: As for `update`; no options: the table is not updated.
        """
        if hyper is not None and (self._spilled is not None or not self.has_state):
            self._reserve_new_state(self._own_optimizer or optimizer, hyper)
        count, problem = sum(map(len, given)), ""
        most_given = max(self._most_given, count)
        most = count + most_given
        if count and (self._needs(most) > self._claimed or self._is_full(most) or self._lacks_blocks(most)):
            # Count only those that are not there.
            rows = np.unique(np.concatenate(given))
            count = int(np.count_nonzero(self.slots.find(rows) < 0))
            try:
                self.check_room(count + 2 * most_given, claim)
            except OptimizerError as error:
                problem = str(error) if count else ""
                self.check_room(count, claim)
        else:
            self.check_room(count, claim)
        self._most_given, self.full = most_given, self.full or problem

    def _is_full(self, count: int) -> bool:
        return max(len(self.slots), len(self._candidates)) + count > self.room

    def _needs(self, count: int) -> int:
        """Return the bytes of memory that the table takes with `count` more rows."""
        arrays: list[Tensor] = []
        if self._spilled is None:
            arrays = [*self._arrays(), *(() if self.has_state else self._coming)]
        used = max(self.slots.end, len(self) + count) * sum([array[:1].nbytes for array in arrays])
        return used + (self.slots.end + self._candidates.end + count) * (_SLOT.itemsize + _INDEXED)

    def _with_rows(self, count: int) -> list[Tensor]:
        """Return the parts of spilled arrays that are in use with `count` more rows."""
        end = max(self.slots.end, len(self) + count)
        return [array[:end] for array in (*self._arrays(), *self._coming)]

    def _lacks_blocks(self, count: int) -> bool:
        return self._spilled is not None and not self._spilled.has_blocks(self._with_rows(count))

    def _reserve_new_state(self, optimizer: Optimizer, hyper: Hyper) -> None:
        """Find the arrays of the state that an update creates, and reserve spilled ones. Raises OptimizerError."""
        hyper_for_state = {name: value for name, value in hyper.items() if name != "lr"}
        if self._tried == (optimizer, hyper_for_state):
            return
        # Another table, of a single row, shows which they are.
        options = HashTableOptions(optimizer=self.options.optimizer)
        tried = HashTable(self.name, self.width, _name_of(self.dtype), options, room=1)
        zeros = torch.zeros(1, self.width, dtype=compute_dtype(_name_of(self.dtype)), device="cpu")
        tried.update(RowSet(torch.from_numpy(_ONLY), zeros), np.ones(1, np.int64), optimizer, hyper)
        self._reserve_ahead(tried.values, tried.master)
        self._tried = optimizer, hyper_for_state

    def _reserve_ahead(self, values: Mapping[str, StateValue], master: Tensor | None) -> None:
        """Note the arrays for entries of the state like these, and reserve spilled ones. Raises OptimizerError."""
        named = {name: value for name, value in values.items() if _is_array(value)}
        named |= {} if master is None else {"master": master}
        self._tried = None
        try:
            if self._spilled is None:
                forms = map(self._form_of_entry, named.values())
                self._coming = [torch.empty(1, *shape, dtype=dtype, device="cpu") for dtype, shape in forms]
            else:
                self._coming = [self._reserve_entry(name, like) for name, like in named.items()]
        except MemoryError as error:
            raise OptimizerError(f"the hash table {self.name!r} needs {error}") from None

    def check_room(self, count: int, claim: Claim) -> None:
        """Raise OptimizerError if there is no room for `count` more rows."""
        if self._is_full(count):
            where = (
                "memory" if self._spilled is None else f"room in {self._spilled.folder.path} (--spill-dir)"
            )
            raise OptimizerError(
                f"the hash table {self.name!r} has {len(self)} rows on this server, which has {where} for {self.room}; "
                "use more servers, or let rows expire (expire_after) or be evicted (max_rows)"
            )
        used, what = self._needs(count), f"the hash table {self.name!r}, which has {len(self)} rows,"
        try:
            if self._spilled is not None:
                self._spilled.extend(self._with_rows(count), what)
            if used > self._claimed:
                more = used + used // _CLAIMED_AHEAD - self._claimed
                claim(more, what)
                self._claimed += more
        except ConfigurationError as error:
            raise OptimizerError(str(error)) from None

    def _admit(self, numbers: Ints, missing: Ints, times: Ints) -> tuple[Ints, Ints]:
        """Count the gradients of rows that are not there.

        Returns which of `missing` come now, and how many gradients they had before.
        """
        if self.options.admit_after == 1:
            return missing, np.zeros(len(missing), np.int64)
        candidates, rows, own = self._candidates, numbers[missing], times[missing]
        slots = candidates.find(rows)
        known = np.flatnonzero(slots >= 0)
        old = known[self._have_expired(candidates, slots[known])]
        new = np.flatnonzero(slots < 0)
        slots[new] = candidates.take(rows[new])
        candidates.protect(slots)
        candidates.counts[slots[old]] = 0
        candidates.touch(slots, self.step + 1, own)
        counts = candidates.counts[slots].astype(np.int64)
        is_in = counts >= self.options.admit_after
        candidates.remove(slots[is_in])
        np.add.at(self._head, _REFUSED + slices_of_hashes(rows[~is_in]), own[~is_in])
        return missing[is_in], counts[is_in] - own[is_in]

    def _take(self, rows: Ints, counts: Ints, optimizer: Optimizer) -> Ints:
        """Give slots to rows that are not there; they have their initial values then."""
        slots, weights = self.slots.take(rows), self._initial(rows)
        self._protect_rows(slots)
        self.slots.counts[slots] = counts
        where = torch.from_numpy(slots)
        scatter_rows(self.weights, where, weights)
        if self._decayed is not None:
            decay = torch.full((len(slots), 1), float(self._decay[0]), dtype=torch.float64, device="cpu")
            scatter_rows(self._decayed, where, decay)
        self._initialise(optimizer, where, weights)
        coming = self._count_by_slice(rows)
        self._in_slice += coming
        self._head[_ADMITTED:_REFUSED] += coming
        return slots

    def _create_state(self, optimizer: Optimizer) -> None:
        """Create the optimizer's state of all rows."""
        self._head[_HAS_STATE] = 1
        if is_half(self.weights) and optimizer.multi_precision:
            self.master = self._reserve("state.master", torch.float32, (self.width,))
        for first in range(0, max(self.slots.end, 1), _BLOCK):
            slots = np.arange(first, min(first + _BLOCK, self.slots.end))
            self._initialise(optimizer, torch.from_numpy(slots), self.weights[first : first + len(slots)])

    def _initialise(self, optimizer: Optimizer, slots: Tensor, weights: Tensor) -> None:
        """Give rows the state before their first update."""
        wide = weights.float() if is_half(weights) else weights
        if self.master is not None:
            self._protect(self.master, slots.numpy())
            scatter_rows(self.master, slots, wide)
        created = create_row_state(optimizer, wide)
        for name, value in created.items():
            if not _is_array(value):
                self.values.setdefault(name, value)
                continue
            entry = self.values.get(name)
            if entry is None:
                entry = self.values[name] = self._new_entry(name, value)
            self._protect(entry, slots.numpy())
            scatter_rows(entry, slots, value.to(entry.dtype))
        # Entries that came with a later update are zero before it.
        for name, entry in self.values.items():
            if name not in created and _is_array(entry):
                scatter_rows(entry, slots, entry.new_zeros(len(slots), *entry.shape[1:]))

    def _new_entry(self, name: str, like: Tensor) -> Tensor:
        """Reserve an array of the state: a row for each slot, of the form of those of `like`, zero where rows are."""
        entry = self._reserve_entry(name, like)
        # Memory that outlives a process may have what an optimizer, or an update that was undone, has left there.
        entry[: self.slots.end].zero_()
        return entry

    def _reserve_entry(self, name: str, like: Tensor) -> Tensor:
        return self._reserve(f"state.{name}", *self._form_of_entry(like))

    def _form_of_entry(self, like: Tensor) -> tuple[torch.dtype, Sequence[int]]:
        """Return the dtype of an array of the state, and the shape of its rows."""
        shape = like.shape[1:] if like.dim() > 1 else (self.width,)
        return compute_dtype(_name_of(self.dtype)) if like.is_floating_point() else like.dtype, shape

    def _room_for_slots(self) -> int:
        if self._spilled is None:
            return slots_that_fit(self.width * self.dtype.itemsize)
        widest = self.width * max(self.dtype.itemsize, compute_dtype(_name_of(self.dtype)).itemsize)
        return slots_in_files(widest, self._spilled.folder.room)

    def _reserve(
        self, name: str, dtype: torch.dtype, shape: Sequence[int], allocate: AllocateTable | None = None
    ) -> Tensor:
        """Reserve an array with a row for each slot; by default where all rows are."""
        if allocate is None:
            allocate = self._allocate if self._spilled is None else self._spilled.take
        count = math.prod((self.room, *shape))
        memory = allocate(f"{name}.{_name_of(dtype)}.{'x'.join(map(str, shape))}", count * dtype.itemsize)
        return memory[: count * dtype.itemsize].view(dtype).view(self.room, *shape)

    # ---------------------------------------------------------------- rows that go

    def _remove(self, slots: Ints) -> None:
        if len(slots):
            going = self._count_by_slice(self.slots.rows[slots])
            self._in_slice -= going
            self._head[_EVICTED:] += going
            self.slots.remove(slots)

    @staticmethod
    def _count_by_slice(rows: Ints) -> Ints:
        return np.bincount(slices_of_hashes(rows), minlength=HASH_SLICES)

    def _sweep(self, count: int) -> None:
        """Remove rows that have expired from the next slots."""
        which = self.slots.next(count)
        self._remove(which[(self.slots.touched[which] > 0) & self._have_expired(self.slots, which)])
        which = self._candidates.next(count)
        has_expired = self._have_expired(self._candidates, which)
        self._candidates.remove(which[(self._candidates.touched[which] > 0) & has_expired])

    def _evict_from(self, slices: Ints) -> None:
        """Remove rows of slices that have too many: those least recently, or least often, updated; then by number."""
        most = -(-self.options.max_rows // HASH_SLICES)
        crowded = slices[self._in_slice[slices] > most]
        if not len(crowded):
            return
        slots = self.slots
        live = slots.live()
        of_slice = slices_of_hashes(slots.rows[live])
        for slice_ in crowded.tolist():
            own = live[of_slice == slice_]
            # Rows that have expired do not count, whether they have been removed yet or not.
            has_expired = self._have_expired(slots, own)
            self._remove(own[has_expired])
            own = own[~has_expired]
            if len(own) <= most:
                continue
            order = self._order_of_eviction(own)
            self._remove(own[order[: len(own) - (most - most // _CROWDED)]])

    def _order_of_eviction(self, slots: Ints) -> Ints:
        """Return the order in which rows go; ties by the other counts, and then by row number."""
        rows, ages, counts = self.slots.rows[slots], self.slots.touched[slots], self.slots.counts[slots]
        if self.options.evict == "lru":
            return np.lexsort((rows, counts, ages))
        if self.options.evict == "lfu":
            return np.lexsort((rows, ages, counts))
        norms = torch.linalg.vector_norm(self._read_slots(rows, slots).double(), dim=1).numpy()
        return np.lexsort((rows, norms))

    # ---------------------------------------------------------------- slices, to be moved and saved

    def history(self, number: int) -> int:
        """Return a number that a slice keeps as long as nothing but updates changes it."""
        return self._histories[number]

    def slice_state(self, number: int, since: int = 0) -> dict[str, StateValue]:
        """Copy all of a slice: its rows, ascending, their state, and the rows that may not come yet.

        Args:
            since: A step; rows that were not updated after it are left out, and the numbers of all rows that are there
                are added. 0: all rows.
        """
        found: dict[str, StateValue] = {}
        for begin, slots in (("", self.slots), (_CANDIDATE, self._candidates)):
            which = slots.of_slice(number)
            which = which[~self._have_expired(slots, which)]
            if since:
                found[f"{begin}{_PRESENT}"] = _copied_numbers(slots.rows, which)
                which = which[slots.touched[which] > since]
            for name, column in (("rows", slots.rows), ("touched", slots.touched), ("counts", slots.counts)):
                found[f"{begin}{name}"] = _copied_numbers(column, which)
            if slots is self.slots:
                for name, array in self._named_arrays().items():
                    found[name] = array.index_select(0, torch.from_numpy(which))
        if self._decayed is not None:
            found["decay"] = float(self._decay[0])
        if self._momentum[0]:
            found |= {"momentum": float(self._momentum[0]), "momentum since": int(self._head[_SINCE])}
        figures = self._head[[_ADMITTED + number, _REFUSED + number, _EVICTED + number]]
        found["figures"] = torch.from_numpy(figures)[None]
        found |= {f"{_STATE}{name}": value for name, value in self.values.items() if not _is_array(value)}
        return found

    def _named_arrays(self) -> dict[str, Tensor]:
        own = {} if self.master is None else {"wide weights": self.master}
        own |= {} if self._decayed is None else {"decayed": self._decayed}
        state = {f"{_STATE}{name}": value for name, value in self.values.items() if _is_array(value)}
        return {"weights": self.weights, **own, **state}

    def clear_slice(self, number: int) -> None:
        """Forget all of a slice."""
        self.epoch += 1
        self._protect(self._head_memory, _ONLY)
        self._head[[_ADMITTED + number, _REFUSED + number, _EVICTED + number]] = self._in_slice[number] = 0
        self._head[_STEP] = 0
        self._histories[number] = new_history()
        for slots in (self.slots, self._candidates):
            slots.replace_slice(number, _NONE)

    def put_slice_state(
        self,
        number: int,
        step: int,
        given: Mapping[str, StateValue],
        claim: Claim = no_claim,
        history: int = 0,
    ) -> None:
        """Replace all of a slice by what `slice_state` has returned.

        Args:
            step: How many updates the table had then. Rows that are there before the first one have no state.
            history: What `history` returns from now on; 0: a new one.

        Raises:
            ProtocolError: It does not fit this table; nothing has changed.
            OptimizerError: There is no room for it; nothing has changed.
        """
        # 1. Check it.
        rows = {begin: _checked_rows(self.name, given, begin, number, step) for begin in ("", _CANDIDATE)}
        arrays = {
            name: value for name, value in given.items()
            if _is_array(value) and (name in ("weights", "wide weights", "decayed") or name.startswith(_STATE))
        }  # fmt: skip
        self._check_arrays(arrays, given, len(rows[""]))
        figures = given.get("figures")
        is_figures = (
            isinstance(figures, Tensor) and figures.dtype is torch.int64 and tuple(figures.shape) == (1, 3)
        )
        is_known = type(history) is int and 0 <= history < 1 << 63
        if not is_figures or not is_known or not 0 <= step < _MAX_STEP or _PRESENT in given:
            raise ProtocolError(f"this is not a slice of hash table {self.name!r} after a number of updates")
        places = (("", self.slots), (_CANDIDATE, self._candidates))
        if not len(self._candidates.memory):
            rows[_CANDIDATE] = rows[_CANDIDATE][:0]  # all rows may come now
        if self._spilled is not None:
            state = {
                name.removeprefix(_STATE): one for name, one in arrays.items() if name.startswith(_STATE)
            }
            self._reserve_ahead(state, arrays.get("wide weights"))
        self.check_room(max(len(rows[begin]) - len(slots.of_slice(number)) for begin, slots in places), claim)
        # 2. Replace the rows.
        self.epoch += 1
        self._protect(self._head_memory, _ONLY)
        if not step and not self._has_state_of(given):
            # The first update creates the state of all rows.
            self._head[_HAS_STATE], self.values, self.master = 0, {}, None
        for begin, slots in places:
            taken, count = slots.replace_slice(number, rows[begin]), len(rows[begin])
            slots.touched[taken] = np.asarray(given[f"{begin}touched"])[:count]
            slots.counts[taken] = np.asarray(given[f"{begin}counts"])[:count]
            if slots is self.slots:
                self._put_arrays(taken, arrays, given)
        # 3. The numbers of the slice and of the table.
        self._in_slice[number] = len(rows[""])
        self._head[[_ADMITTED + number, _REFUSED + number, _EVICTED + number]] = np.asarray(figures)[0]
        self._head[_STEP] = step
        self._decay[0] = given.get("decay", 0.0)
        self._momentum[0] = given.get("momentum", 0.0)
        self._head[_SINCE] = given.get("momentum since", 0)
        self._histories[number] = history or new_history()
        self._keep_entries()
        # 4. It may come from a table that was allowed more rows.
        if self.options.max_rows:
            self._evict_from(np.array([number]))

    def _check_arrays(
        self, arrays: Mapping[str, Tensor], given: Mapping[str, StateValue], count: int
    ) -> None:
        """Raise ProtocolError unless the values of a slice's rows have the forms of this table."""
        shapes = {name: tuple(array.shape[1:]) for name, array in self._named_arrays().items()}
        shapes["wide weights"] = (self.width,)
        fits = "weights" in arrays and arrays["weights"].dtype == self.dtype
        fits &= is_half(self.weights) or "wide weights" not in arrays
        fits &= _is_decay(given.get("decay", 0.0), arrays.get("decayed"))
        fits &= self._decayed is not None or "decayed" not in arrays
        mu, since = given.get("momentum", 0.0), given.get("momentum since", 0)
        fits &= isinstance(mu, float) and 0.0 <= mu < 1.0 and type(since) is int and 0 <= since < _MAX_STEP
        for name, value in arrays.items():
            shape = tuple(value.shape[1:])
            fits &= (
                len(value) == count and shape == shapes.get(name, shape) and math.prod(shape) <= self.width
            )
        state = {name: value for name, value in given.items() if name.startswith(_STATE)}
        fits &= len(state) <= _MOST_STATES and all([len(name) <= _LONGEST for name in state])
        for value in state.values():
            fits &= isinstance(value, bool | int | float | Tensor)
        if not fits:
            raise ProtocolError(
                f"this is not a slice of hash table {self.name!r}, whose rows have {self.width} elements"
            )

    @staticmethod
    def _has_state_of(given: Mapping[str, StateValue]) -> bool:
        return "wide weights" in given or any([name.startswith(_STATE) for name in given])

    def _put_arrays(self, slots: Ints, arrays: Mapping[str, Tensor], given: Mapping[str, StateValue]) -> None:
        state = {name.removeprefix(_STATE): value for name, value in given.items() if name.startswith(_STATE)}
        for name, value in state.items():
            if not _is_array(value):
                self.values[name] = value
            elif name not in self.values:
                self.values[name] = self._new_entry(name, value)
        if "wide weights" in arrays and self.master is None:
            self.master = self._reserve("state.master", torch.float32, (self.width,))
        self._head[_HAS_STATE] |= self._has_state_of(given)
        for name, array in self._named_arrays().items():
            self._protect(array, slots)
            value = arrays.get(name)
            if value is None:
                value = array.new_zeros(len(slots), *array.shape[1:])
            scatter_rows(array, torch.from_numpy(slots), value.to(array.dtype))

    # ---------------------------------------------------------------- figures

    def stats(self, hottest: int = 10) -> HashTableStats:
        slots = self.slots
        live = slots.live()
        live = live[~self._have_expired(slots, live)]
        counts = slots.counts[live]
        most = np.lexsort((slots.rows[live], -counts.astype(np.int64)))[:hottest]
        admitted, refused, evicted = self._head[_ADMITTED:].reshape(3, HASH_SLICES).sum(1).tolist()
        return HashTableStats(
            rows=len(live),
            admitted=admitted,
            refused=refused,
            evicted=evicted,
            nbytes=sum([array[: slots.end].nbytes for array in self._arrays()])
            + slots.nbytes
            + self._candidates.nbytes,
            hottest=list(zip(slots.rows[live[most]].tolist(), counts[most].tolist(), strict=True)),
        )


def _copied_numbers(column: npt.NDArray[Any], which: Ints) -> Tensor:
    # Not `from_numpy`: an empty part of an array of records has strides that torch cannot view as bytes.
    dtype = torch.int64 if column.itemsize == 8 else torch.int32
    found = torch.empty(len(which), dtype=dtype, device="cpu")
    found.numpy()[:] = column[which]
    return found


def _former_rows(array: Tensor, slots: Ints, former: FormerRows) -> Tensor:
    """Copy rows as the last change found them; any for a slot of -1."""
    found, before = array.index_select(0, torch.from_numpy(np.maximum(slots, 0))), former(array)
    if before is not None and len(before[0]):
        place = np.minimum(before[0].searchsorted(slots), len(before[0]) - 1)
        were_changed = (before[0][place] == slots) & (slots >= 0)
        found[torch.from_numpy(were_changed)] = before[1][torch.from_numpy(place[were_changed])]
    return found


def weights_of_slice(given: Mapping[str, StateValue], step: int) -> Tensor:
    """Return the weights of what `slice_state` has returned after `step` updates, as `read` does. Changes them."""
    weights, decayed, buffer = given["weights"], given.get("decayed"), given.get(f"{_STATE}{_BUFFER}")
    mu, since, decay = given.get("momentum", 0.0), given.get("momentum since", 0), given.get("decay", 0.0)
    assert isinstance(weights, Tensor)
    assert decayed is None or isinstance(decayed, Tensor)
    assert isinstance(mu, float)
    assert isinstance(since, int)
    assert isinstance(decay, float)
    logarithms = _logarithms(decay, decayed, len(weights))
    if mu and _is_array(buffer):
        missed = _missed_rounds(step, np.asarray(given["touched"]), since)
        move_rows(weights, buffer, mu, missed, logarithms)
    else:
        multiply_rows(weights, logarithms)
    return weights


def _logarithms(decay: float, decayed: Tensor | None, count: int) -> npt.NDArray[np.float64]:
    """Return the logarithms of the factors of weight decay by which rows are still to be multiplied."""
    return np.zeros(count) if decayed is None else decay - decayed[:, 0].numpy()


def _missed_rounds(step: int, touched: Counts, since: int) -> Ints:
    missed: Ints = np.maximum(step - np.maximum(touched.astype(np.int64), since), 0)
    return missed


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _is_decay(decay: object, decayed: Tensor | None) -> bool:
    """Return whether these can be the logarithms of a table's and its rows' factors: the table's is the smallest."""
    if not isinstance(decay, float) or not -math.inf < decay <= 0:
        return False
    is_float = decayed is None or decayed.dtype is torch.float64
    return is_float and (decayed is None or bool(((decayed >= decay) & (decayed <= 0)).all()))


def _is_array(value: object) -> TypeGuard[Tensor]:
    return isinstance(value, Tensor) and value.dim() > 0
