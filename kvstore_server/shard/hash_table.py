"""Rows of a hash table: a row-sparse key without a number of rows, whose rows are found by ids of 64 bits.

Rows come when they are updated first (or for the nth time, see `HashTableOptions`), and go when they have not been
updated for long, or when there are too many. A row that is not there reads as its initial value, which is a function
of its id alone (`initial_rows`), so it may be read anywhere, in any order, before or after it has come.

Each row has a *slot*. All arrays (weights, optimizer state, row numbers, when it was updated last and how often) have
as many slots as could ever be needed; the system provides their pages as they are written, so the table grows without
copying anything.

Invariants:

- What happens to a row depends on the updates of the table alone, never on its slot, on the time, or on what else is
  on this server: a table has the same rows, with the same bits, on any number of servers. The clock counts updates.
- A slot that is taken is initialised completely, so nothing of a former row can be seen.
"""

from __future__ import annotations

import hashlib
import mmap
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeGuard

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvstore_server.codec import compute_dtype, torch_dtype
from kvstore_server.errors import ConfigurationError, OptimizerError
from kvstore_server.optimizer.apply import (
    applies_to_rows_alone,
    apply_update,
    create_state_of_rows,
    is_half,
    update_rows_with_state,
)
from kvstore_server.optimizer.base import Hyper, Optimizer, Values
from kvstore_server.optimizer.rows import gather_rows, scatter_rows
from kvstore_server.optimizer.state import State
from kvstore_server.plan import HASH_SLICES, HashTableOptions, slices_of_hashes
from kvstore_server.protocol.rows import RowSet
from kvstore_server.shard.id_index import MAX_SLOTS, IdIndex, Ints

Counts = npt.NDArray[np.int32]
AllocateTable = Callable[[str, int], Tensor]
"""(name, bytes) → that much memory as uint8, zero, whose pages are provided as they are written."""

_NO_RESERVE = 0x4000
"""MAP_NORESERVE: memory of the mapping is not counted before it is used."""
_SMALLEST = 1 << 30
"""Bytes of the smallest array that is tried."""
_SWEPT = 4
"""Slots that are searched for expired rows for each row of an update."""
_SWEPT_AT_LEAST = 4096
_CROWDED = 0.9
"""The part of a full slice that stays."""
_BLOCK = 1 << 16
"""Rows whose state is created at once."""


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
    return torch.from_numpy(np.frombuffer(room, np.uint8))


def slots_that_fit(row_nbytes: int) -> int:
    """Return for how many slots to reserve arrays: no more can fit into the memory of this machine."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min(max(memory, _SMALLEST) // max(row_nbytes, 1), MAX_SLOTS)


def initial_rows(options: HashTableOptions, name: str, rows: Ints, width: int, dtype: torch.dtype) -> Tensor:
    """Return the initial values of rows: a function of the seed, the table's name, the row number and the column.

    Each number takes one 64-bit word, a counter passed through the finaliser of SplitMix64 (Steele, Lea and Flood,
    2014). Uniform numbers are 24 bits of it. Normal ones are the sum of four uniform 16-bit numbers, which has the
    mean, the variance and (to 3.46 deviations) about the form of a normal distribution, and needs only whole numbers
    and one product: so the bits are the same on every machine.
    """
    found = torch.empty(len(rows), width, dtype=dtype, device="cpu")
    if options.init == "constant":
        return found.fill_(options.scale)
    digest = hashlib.blake2b(f"{options.seed} {name}".encode(), digest_size=8).digest()
    word = np.dtype(np.uint64).type
    key, golden = word(int.from_bytes(digest, "little")), 0x9E3779B97F4A7C15
    columns = np.arange(1, width + 1, dtype=np.uint64) * word(golden)
    words = _mixed(rows.view(np.uint64) ^ key)[:, None] + columns
    words = _mixed(words)
    if options.init == "uniform":
        unit = torch.from_numpy((words >> word(40)).astype(np.int32))
        found.copy_(unit.to(compute_dtype(_name_of(dtype))).mul_(2.0**-23).sub_(1.0).mul_(options.scale))
        return found
    low = word(0xFFFF)
    total = (words & low) + (words >> word(16) & low) + (words >> word(32) & low) + (words >> word(48))
    centered = torch.from_numpy(total.astype(np.int64) - 2 * 0xFFFF)
    factor = options.scale / _DEVIATION
    return found.copy_(centered.to(compute_dtype(_name_of(dtype))).mul_(factor))


_DEVIATION = (4 * (65536.0**2 - 1) / 12) ** 0.5
"""Of the sum of four uniform 16-bit numbers."""


def _mixed(words: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    word = np.dtype(np.uint64).type
    words = (words ^ (words >> word(30))) * word(0xBF58476D1CE4E5B9)
    words ^= words >> word(27)
    words *= word(0x94D049BB133111EB)
    words ^= words >> word(31)
    return words


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def check_hash_table(name: str, optimizer: Optimizer, hyper: Hyper) -> None:
    """Raise ConfigurationError if an optimizer does not update rows one by one, without knowing the others."""
    needs_all = type(optimizer).hyper_for_rows is not Optimizer.hyper_for_rows or optimizer.positioned
    if needs_all or optimizer.may_raise or not applies_to_rows_alone(optimizer, hyper):
        raise ConfigurationError(
            f"optimizer {optimizer.registered_name} with these options cannot update the hash table {name!r}: it "
            "changes rows that have no gradient, needs to see all rows, or may raise in the middle of an update; use "
            "sgd, adagrad, groupadagrad, ftrl, or adam with lazy_update=True"
        )


class HashTable:
    """The rows of a hash table on one server, with their optimizer state. Not thread-safe.

    Args:
        name: The name of the key.
        width: Elements of a row.
        dtype: Of the weights, as named in plans.
        allocate: Memory of the arrays.
        room: Slots to reserve; 0: as many as can fit into the memory of this machine.
    """

    def __init__(
        self,
        name: str,
        width: int,
        dtype: str,
        options: HashTableOptions,
        allocate: AllocateTable = table_memory,
        room: int = 0,
    ) -> None:
        self.name, self.width, self.dtype, self.options = name, width, torch_dtype(dtype), options
        self._allocate_memory = allocate
        self.room = room or slots_that_fit(width * self.dtype.itemsize)
        self.step = 0
        """Updates of the table: the clock of its policies."""
        self.weights = self._reserve("weights", self.dtype, (width,))
        self.values: Values = {}
        """The optimizer's state: numbers, and arrays with a row for each slot."""
        self.has_state = False
        self.master: Tensor | None = None
        """float32 copies of half-precision weights."""
        self.rows: Ints = self._reserve("rows", torch.int64, ()).numpy()
        """The row number of each slot."""
        self.touched: Counts = self._reserve("touched", torch.int32, ()).numpy()
        """The update in which each row was updated last, counted from 1; 0: the slot is free."""
        self.counts: Counts = self._reserve("counts", torch.int32, ()).numpy()
        """How many gradients of each row there were."""
        self.end = 0
        """Slots from here on have never been taken."""
        self._free: list[Ints] = []
        self._num_free = 0
        self._index = IdIndex(self.rows)
        self._candidates = _Candidates(options)
        self._swept = 0
        self._in_slice = np.zeros(HASH_SLICES, np.int64)
        self.num_admitted = self.num_refused = self.num_evicted = 0

    # ---------------------------------------------------------------- reading

    def __len__(self) -> int:
        """Return how many rows there are, those included that have expired but have not been removed."""
        return self.end - self._num_free

    def read(self, rows: Ints) -> Tensor:
        """Copy rows, in this order; those that are not there have their initial values."""
        slots = self._present(rows)
        found = self.weights.index_select(0, torch.from_numpy(np.maximum(slots, 0)))
        missing = np.flatnonzero(slots < 0)
        if len(missing):
            found[torch.from_numpy(missing)] = self._initial(rows[missing])
        return found

    def _present(self, rows: Ints) -> Ints:
        """Return the slots of rows as the next update sees them; -1: the row is not there."""
        slots = self._index.find(rows)
        if self.options.expire_after:
            has_expired = (slots >= 0) & self._have_expired(slots)
            slots[has_expired] = -1
        return slots

    def _have_expired(self, slots: Ints) -> npt.NDArray[np.bool_]:
        after = self.options.expire_after
        return (
            np.asarray(self.touched[slots] < self.step + 1 - after) if after else np.zeros(len(slots), bool)
        )

    def _initial(self, rows: Ints) -> Tensor:
        return initial_rows(self.options, self.name, rows, self.width, self.dtype)

    # ---------------------------------------------------------------- updates

    def update(self, rows: RowSet, times: Ints, optimizer: Optimizer, hyper: Hyper) -> None:
        """Update rows once, and let rows come and go.

        Args:
            rows: Row numbers, distinct and ascending, and the sum of their gradients.
            times: How many gradients each row got.

        There must be room for them (`check_room`).
        """
        numbers = rows.ids.numpy()
        # 1. Rows that have expired are new again, rows that are not there may come.
        slots = self._index.find(numbers)
        known = np.flatnonzero(slots >= 0)
        expired = known[self._have_expired(slots[known])]
        if len(expired):
            self._remove(slots[expired])
            slots[expired] = -1
        missing = np.flatnonzero(slots < 0)
        if len(missing):
            counts = times[missing]
            if self.options.admit_after > 1:
                counts = self._candidates.count(numbers[missing], counts, self.step + 1)
            is_in = counts >= self.options.admit_after
            self.num_refused += int(times[missing[~is_in]].sum())
            missing = missing[is_in]
            if not self.has_state:
                self._create_state(optimizer)
            slots[missing] = self._take(numbers[missing], counts[is_in] - times[missing], optimizer)
        # 2. Update those that are there.
        here = np.flatnonzero(slots >= 0)
        values = rows.values
        if len(here) < len(slots):
            slots, times, values = slots[here], times[here], values.index_select(0, torch.from_numpy(here))
        if not self.has_state:
            self._create_state(optimizer)
        self.touched[slots] = self.step + 1
        self.counts[slots] += times.astype(np.int32)
        self._apply(optimizer, torch.from_numpy(slots), values, hyper)
        # 3. Rows that were not updated for long go bit by bit; slices with too many rows lose some.
        self._sweep(max(_SWEPT * len(numbers), _SWEPT_AT_LEAST))
        if self.options.max_rows:
            self._evict_from(np.unique(slices_of_hashes(numbers)))

    def _apply(self, optimizer: Optimizer, slots: Tensor, grads: Tensor, hyper: Hyper) -> None:
        hyper = {**hyper, "key": self.name}
        state = State(self.values, self.step, self.master)
        if optimizer.takes_sparse(hyper):
            self._apply_sparse(optimizer, slots, grads, state, hyper)
        else:
            update_rows_with_state(optimizer, self.weights, slots, grads, state, hyper, self._new_entry)
            self.values = state.values
        self.step += 1

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
        """Forget the optimizer's state, because another optimizer follows."""
        self.values, self.has_state, self.step = {}, False, 0
        self.touched[: self.end][self.touched[: self.end] > 0] = 1

    # ---------------------------------------------------------------- rows that come

    def check_room(self, count: int) -> None:
        """Raise OptimizerError if there is no room for so many rows more."""
        if self.end - self._num_free + count > self.room:
            raise OptimizerError(
                f"the hash table {self.name!r} has {len(self)} rows on this server, which has memory for {self.room}; "
                "use more servers, or let rows expire (expire_after) or be evicted (max_rows)"
            )

    def _take(self, rows: Ints, counts: Ints, optimizer: Optimizer) -> Ints:
        """Give slots to rows that are not there; they have their initial values then."""
        slots = self._free_slots(len(rows))
        where, weights = torch.from_numpy(slots), self._initial(rows)
        self.rows[slots], self.counts[slots] = rows, counts
        scatter_rows(self.weights, where, weights)
        if self.has_state:
            self._initialise(optimizer, where, weights)
        self._index.insert(slots)
        np.add.at(self._in_slice, slices_of_hashes(rows), 1)
        self.num_admitted += len(rows)
        return slots

    def _free_slots(self, count: int) -> Ints:
        found: list[Ints] = []
        while count and self._free:
            part = self._free.pop()
            if len(part) > count:
                self._free.append(part[count:])
                part = part[:count]
            found.append(part)
            count -= len(part)
            self._num_free -= len(part)
        found.append(np.arange(self.end, self.end + count))
        self.end += count
        return np.concatenate(found)

    def _create_state(self, optimizer: Optimizer) -> None:
        """Create the optimizer's state of all rows."""
        self.has_state = True
        if is_half(self.weights) and optimizer.multi_precision:
            self.master = self._reserve("master", torch.float32, (self.width,))
        if not self.end:
            self._initialise(optimizer, torch.zeros(0, dtype=torch.int64, device="cpu"), self.weights[:0])
        for first in range(0, self.end, _BLOCK):
            slots = torch.arange(first, min(first + _BLOCK, self.end), device="cpu")
            self._initialise(optimizer, slots, self.weights[first : first + _BLOCK])

    def _initialise(self, optimizer: Optimizer, slots: Tensor, weights: Tensor) -> None:
        wide = weights.float() if is_half(weights) else weights
        if self.master is not None:
            scatter_rows(self.master, slots, wide)
        for name, value in create_state_of_rows(optimizer, wide).items():
            if not _is_array(value):
                self.values.setdefault(name, value)
                continue
            entry = self.values.get(name)
            if entry is None:
                entry = self.values[name] = self._new_entry(name, value)
            scatter_rows(entry, slots, value.to(entry.dtype))
        # Entries that came with a later update are zero before it.
        known = create_state_of_rows(optimizer, wide[:0]).keys()
        for name, entry in self.values.items():
            if name not in known and _is_array(entry) and len(slots):
                scatter_rows(entry, slots, entry.new_zeros(len(slots), *entry.shape[1:]))

    def _new_entry(self, name: str, like: Tensor) -> Tensor:
        """Reserve an array of the state: a row for each slot, of the form of those of `like`."""
        shape = like.shape[1:] if like.dim() > 1 else (self.width,)
        dtype = compute_dtype(_name_of(self.dtype)) if like.is_floating_point() else like.dtype
        return self._reserve(f"state.{name}", dtype, shape)

    def _reserve(self, name: str, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
        count = self.room
        for size in shape:
            count *= size
        memory = self._allocate_memory(name, count * dtype.itemsize)
        return memory[: count * dtype.itemsize].view(dtype).view(self.room, *shape)

    # ---------------------------------------------------------------- rows that go

    def _remove(self, slots: Ints) -> None:
        if not len(slots):
            return
        self._index.remove(slots)
        np.subtract.at(self._in_slice, slices_of_hashes(self.rows[slots]), 1)
        self.touched[slots] = 0
        self._free.append(slots)
        self._num_free += len(slots)
        self.num_evicted += len(slots)

    def _sweep(self, count: int) -> None:
        """Remove rows that have expired from the next slots."""
        if not self.options.expire_after or not self.end:
            return
        self._candidates.sweep(count, self.step)
        slots = _next_slots(self._swept, count, self.end)
        self._remove(slots[(self.touched[slots] > 0) & self._have_expired(slots)])
        self._swept = int(slots[-1]) + 1

    def _evict_from(self, slices: Ints) -> None:
        """Remove rows of slices that have too many: those least recently, or least often, updated; then by number."""
        most = -(-self.options.max_rows // HASH_SLICES)
        crowded = slices[self._in_slice[slices] > most]
        if not len(crowded):
            return
        live = np.flatnonzero(self.touched[: self.end])
        of_slice = slices_of_hashes(self.rows[live])
        for slice_ in crowded.tolist():
            own = live[of_slice == slice_]
            # Rows that have expired do not count, whether they have been removed yet or not.
            has_expired = self._have_expired(own)
            self._remove(own[has_expired])
            own = own[~has_expired]
            if len(own) <= most:
                continue
            rows, ages, counts = self.rows[own], self.touched[own], self.counts[own]
            order = np.lexsort((rows, counts, ages) if self.options.evict == "lru" else (rows, ages, counts))
            self._remove(own[order[: len(own) - int(most * _CROWDED)]])

    # ---------------------------------------------------------------- figures

    def stats(self, hottest: int = 10) -> HashTableStats:
        touched = self.touched[: self.end]
        is_live = touched > 0
        if self.options.expire_after:
            is_live &= touched >= self.step + 1 - self.options.expire_after
        live = np.flatnonzero(is_live)
        counts = self.counts[live]
        most = np.lexsort((self.rows[live], -counts.astype(np.int64)))[:hottest] if len(live) else live
        arrays = [self.weights, *filter(_is_array, self.values.values())]
        arrays += [] if self.master is None else [self.master]
        nbytes = sum([array[: self.end].nbytes for array in arrays])
        nbytes += self.end * (8 + 4 + 4) + self._index.nbytes + self._candidates.nbytes
        return HashTableStats(
            rows=len(live),
            admitted=self.num_admitted,
            refused=self.num_refused,
            evicted=self.num_evicted,
            nbytes=nbytes,
            hottest=list(zip(self.rows[live[most]].tolist(), counts[most].tolist(), strict=True)),
        )


class _Candidates:
    """Rows that have not come yet, with the number of their gradients. They expire as rows do.

    Args:
        options: Of the table.
    """

    def __init__(self, options: HashTableOptions) -> None:
        self._after = options.expire_after
        self._admit_after = options.admit_after
        self._rows: Ints = np.zeros(1024, np.int64)
        self._counts: Counts = np.zeros(1024, np.int32)
        self._touched: Counts = np.zeros(1024, np.int32)
        self._index = IdIndex(self._rows)
        self._end = 0
        self._free: list[Ints] = []
        self._swept = 0

    @property
    def nbytes(self) -> int:
        arrays: Sequence[Any] = (self._rows, self._counts, self._touched, self._index)
        return sum([array.nbytes for array in arrays]) if self._admit_after > 1 else 0

    def count(self, rows: Ints, times: Ints, now: int) -> Ints:
        """Count gradients of rows (distinct), and return how many each has had. Rows that are admitted are removed."""
        slots = self._index.find(rows)
        known = np.flatnonzero(slots >= 0)
        if self._after:
            old = slots[known[self._touched[slots[known]] < now - self._after]]
            self._counts[old] = 0
        new = np.flatnonzero(slots < 0)
        if len(new):
            slots[new] = self._take(rows[new])
        self._counts[slots] += times.astype(np.int32)
        self._touched[slots] = now
        counts = self._counts[slots].astype(np.int64)
        self._remove(slots[counts >= self._admit_after])
        return counts

    def _take(self, rows: Ints) -> Ints:
        found = self._free.pop() if self._free else np.zeros(0, np.int64)
        if len(found) > len(rows):
            self._free.append(found[len(rows) :])
            found = found[: len(rows)]
        more = len(rows) - len(found)
        if self._end + more > len(self._rows):
            size = max(2 * len(self._rows), self._end + more)
            self._rows, self._counts, self._touched = (
                np.concatenate([array, np.zeros(size - len(array), array.dtype)])
                for array in (self._rows, self._counts, self._touched)
            )
            self._index.rows = self._rows
        slots = np.concatenate([found, np.arange(self._end, self._end + more)])
        self._end += more
        self._rows[slots], self._counts[slots] = rows, 0
        self._index.insert(slots)
        return slots

    def _remove(self, slots: Ints) -> None:
        if len(slots):
            self._index.remove(slots)
            self._touched[slots] = 0
            self._free.append(slots)

    def sweep(self, count: int, now: int) -> None:
        """Remove candidates that have expired from the next slots."""
        if self._end:
            slots = _next_slots(self._swept, count, self._end)
            touched = self._touched[slots]
            self._remove(slots[(touched > 0) & (touched < now - self._after)])
            self._swept = int(slots[-1]) + 1


def _next_slots(at: int, count: int, end: int) -> Ints:
    """Return the next slots from `at` on, each at most once; after the last one comes the first."""
    return (np.arange(min(count, end)) + at) % end


def _is_array(value: object) -> TypeGuard[Tensor]:
    return isinstance(value, Tensor) and value.dim() > 0


Tables = Mapping[int, HashTable]
"""Key, as a Shard numbers keys → its rows."""
