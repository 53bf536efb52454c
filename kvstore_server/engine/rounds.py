"""The round state machine of one namespace: which contributions count. No clock, socket or arithmetic on gradients.

Every rank gives exactly one contribution to every round of every table. Ranks are counted, not requests, so one worker
can never complete a round alone. The state of a rank in the open round of a table:

    state              event                                        next
    -----------------  -------------------------------------------  ------------------------------------------------
    provisional        new slice, or one of a higher generation     provisional (stored)
    provisional        slice of the same or a lower generation      provisional (other bytes are counted as a mismatch)
    provisional        part of a slice                              provisional (complete with its last part)
    provisional        declared intent                              provisional (recorded; pipelining may begin)
    provisional        commit, slices are missing                   provisional (refused; the missing slices are named)
    provisional        commit, all slices have arrived              committed
    provisional        commit that discards eager slices            provisional, without slices of generation 0
    provisional        another process takes the rank over          provisional, with nothing
    committed          slice, commit                                committed (repeated, no effect)
    committed          another process takes the rank over          committed; it is answered if it commits again

The state of a table's round:

    open               every rank's intent is known, and they agree begun: slices that all have given are applied
    begun              a rank changes its intent, or its process    open: applied slices that no longer fit are rolled
                       ends                                         back
    open, begun        every member has committed                   complete: applied, or held if ranks want that
    open, begun, held  deadline, lost rank, abort, error            failed, with one error for all; the next one opens
    complete, held     applied, vetoed, or skipped by a decision    applied, perhaps to no effect; the next one opens
    last applied       undone: another server failed the round      failed

Slices of past rounds are ignored and slices of future rounds refused; a commit of a past round is told how that ended.
`pipelined` decides when a round is begun and what is rolled back.

In synchronous mode every round has all ranks as members, or those of the present view if members may change (`views`).
In the other modes only a table's first round does, which sets its values; from then on each rank has a *lane*: a
tracker of its own with one member. A process that takes a rank over begins a new lane, unless it continues where the
former one has ended. A rank's clock counts the rounds of its lane, however they ended, so all servers agree on it. With
a bound, a rank whose clock is c may read only when every rank's clock is at least c − bound (stale synchronous
parallel). A rank that joined (has no more data), or that left because it was done, holds nothing up.

State is kept in NumPy arrays with one element per table or slice, so that a commit of thousands of tables costs a few
vectorised calls. `Slots` numbers the slices of all tables consecutively, and these numbers index the arrays.
"""

from __future__ import annotations

import functools
import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvstore_server import check
from kvstore_server.engine.partial_slice import PartialSlice, SlicePart
from kvstore_server.engine.views import Views
from kvstore_server.errors import ConfigurationError, KVStoreError, ProtocolError
from kvstore_server.memo import BoundedCache
from kvstore_server.plan import SIZES
from kvstore_server.protocol import messages as m
from kvstore_server.protocol.rows import CompressedPayload, same_payload

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
_NEVER = np.iinfo(np.int64).max
_FAILURES_KEPT = 16
"""How many failed rounds in a row keep their error, per table."""
_ARRIVED = 1 << 40
"""Added to the generation of a slice that has arrived: the sum over a table then encodes both how many slices have
arrived and their generations.
"""
_BUFFER, _BUFFERS = 1 << 40, 1 << 22
"""Buffers are this far apart in the space of offsets, in bytes (more than any buffer has); and how many are told
apart.
"""
_ANSWER = m.WANTS_WEIGHTS | m.WANTS_DELTA | m.WANTS_HALF | m.MAPS_WEIGHTS | m.LOCATIONS_CACHED
"""Commit flags that only say how the rank wants to be answered."""
_SPECIAL = ~(
    m.WANTS_WEIGHTS | m.WANTS_DELTA | m.WANTS_HALF | m.DISCARD_EAGER | m.MAPS_WEIGHTS | m.LOCATIONS_CACHED
)
"""Commit flags that exclude a table from a batched update."""


SYNC, ASYNC, SSP = "sync", "async", "ssp"


@dataclass(frozen=True)
class Mode:
    """The consistency mode of a namespace.

    Args:
        name: "sync": a round takes one contribution of every rank. "async": a contribution is applied when it arrives.
            "ssp": as async, but no rank reads weights that lack more than `staleness` contributions of another rank
            (stale synchronous parallel; Ho et al., 2013).
        staleness: For "ssp": by how many contributions a reader may be ahead of the slowest rank.
        slow_down: Not for "sync": divide a contribution's learning rate by its staleness, the number of updates since
            the weights that it was computed with (Zhang, Gupta, Lian, Liu: Staleness-aware Async-SGD, 2016).
        by_host: For "sync": one rank of a host may give the sum of all its ranks, and the others nothing.
    """

    name: str = SYNC
    staleness: int = 0
    slow_down: bool = False
    by_host: bool = False

    @functools.cached_property
    def is_sync(self) -> bool:
        return self.name == SYNC

    @property
    def bound(self) -> int | None:
        """By how many contributions a reader may be ahead of the slowest rank; None: no limit."""
        return self.staleness if self.name == SSP else None

    def check(self) -> None:
        """Raise ConfigurationError unless the fields fit together."""
        check.one_of("the mode of a namespace", self.name, (SYNC, ASYNC, SSP))
        if self.staleness < 0 or (self.staleness and self.name != SSP):
            raise ConfigurationError(
                f"staleness={self.staleness} does not go with mode {self.name!r}; only {SSP!r} takes one, of 0 or more"
            )
        if self.slow_down and self.is_sync:
            raise ConfigurationError(
                "synchronous contributions are never stale: slow_down does not go with 'sync'"
            )
        if self.by_host and not self.is_sync:
            raise ConfigurationError(
                f"by_host does not go with {self.name!r}: it sums the ranks of a host in synchronous rounds"
            )

    def __str__(self) -> str:
        parts = [self.name]
        parts += [f"staleness={self.staleness}"] if self.name == SSP else []
        parts += ["slow_down"] if self.slow_down else []
        parts += ["by_host"] if self.by_host else []
        return " ".join(parts)


SYNCHRONOUS = Mode()


class Waiter(NamedTuple):
    peer: bytes
    number: int


class CommitInfo(NamedTuple):
    """What a rank said when it committed a round, without the payloads of the message."""

    rescale: float | None
    timeout: float
    hold: float
    is_plain: bool
    """The rank wants an immediate update, nothing held or checked."""
    since: float
    """When the rank committed, in seconds."""


class Intent(NamedTuple):
    """The intent that a rank declared for the open round of a table, before it gives its slices."""

    packed: bytes
    """The expected value of `RankInputs.arrivals` for each slice; all 0 if the rank gives none."""
    flags: int
    rescale: float | None
    hyper: bytes
    waiter: Waiter
    is_firm: bool
    """False if the intent may still change."""

    @property
    def arrivals(self) -> Ints:
        return np.frombuffer(self.packed, np.int64)


class CommitStatus(IntEnum):
    ACCEPTED = 0
    """The contribution counts."""
    REPEATED = 1
    """It was accepted before, and the round is still open."""
    REFUSED = 2
    """Some of its slices have not arrived."""
    APPLIED = 3
    """It repeats a commit of a round that was applied."""
    FAILED = 4
    """Its round failed."""
    AHEAD = 5
    """Its round is not open yet."""


class Slots:
    """Consecutive numbers for the slices that a server has of a namespace's tables.

    Attributes:
        first: First slot of each table, with the next free slot at the end.
        table: Table of each slot.
        nbytes: Size of each slot in bytes, padding included.
        is_next: For each slot, whether its memory directly follows that of the slot before.
    """

    def __init__(self) -> None:
        self.num_tables = 0
        # Capacity doubles, so that declaring thousands of keys one by one takes linear time.
        self._first, self._table, self._nbytes = (np.zeros(1, np.int64) for _ in range(3))
        self._is_next = np.zeros(1, np.bool_)
        self.first, self.table, self.nbytes = self._first[:1], self._table[:0], self._nbytes[:0]
        self.is_next = self._is_next[:0]
        self.ranges = BoundedCache[list[tuple[int, int, int]]](self)
        """Ranges by slots and offsets; see `divide`."""

    def __len__(self) -> int:
        return len(self.table)

    def add(self, sizes: Sequence[int], are_next: Sequence[bool]) -> None:
        """Add the slices of a new table, given their sizes in bytes; see `is_next`."""
        begin, end = len(self.table), len(self.table) + len(sizes)
        self._first = _grow_array(self._first, self.num_tables + 2, 0)
        self._table, self._nbytes = _grow_array(self._table, end, 0), _grow_array(self._nbytes, end, 0)
        self._is_next = _grow_array(self._is_next, end, False)
        self._table[begin:end], self._nbytes[begin:end] = self.num_tables, sizes
        self._is_next[begin:end] = are_next
        self.num_tables += 1
        self._first[self.num_tables] = end
        self.first, self.table = self._first[: self.num_tables + 1], self._table[:end]
        self.nbytes, self.is_next = self._nbytes[:end], self._is_next[:end]

    def of(self, tables: Ints) -> Ints:
        """Return the slots of some tables, in the order of the tables."""
        counts = self.first[tables + 1] - self.first[tables]
        starts = np.cumsum(counts) - counts
        return np.asarray(np.repeat(self.first[tables] - starts, counts) + np.arange(counts.sum()), np.int64)

    def divide(self, slots: Ints, offsets: Ints) -> list[tuple[int, int, int]]:
        """Split ascending slots into ranges (first slot, end, bytes), contiguous in memory and in their buffers."""
        ends = offsets + self.nbytes[slots]
        is_cut = (np.diff(slots) != 1) | ~self.is_next[slots[1:]] | (offsets[1:] != ends[:-1])
        first = np.flatnonzero(np.append(True, is_cut))[: len(slots)]
        last = np.append(first[1:], len(slots))[: len(first)] - 1
        rows = np.stack((slots[first], slots[last] + 1, ends[last] - offsets[first]), axis=1)
        return list(map(tuple, rows.tolist()))


BufferRange = tuple[int, int, Any, int, int]
"""A contiguous range: first slot, end, source buffer, and the begin and end of its bytes there."""


class RankInputs:
    """What one rank has given to the open rounds of all tables.

    Attributes:
        committed: For each table, whether the rank has committed its open round.
        version, flags: From the commit of each table.
        infos: The info of the commit of each table; None before it.
        waiters: The request to answer when the round of each table is over.
    """

    def __init__(self, slots: Slots) -> None:
        self._slots = slots
        self.committed = np.zeros(0, np.bool_)
        self.version, self.flags = np.zeros(0, np.int64), np.zeros(0, np.int64)
        self.commit_infos: list[CommitInfo | None] = []
        self.waiters: list[Waiter | None] = []
        self.intents: dict[int, Intent] = {}
        """Table → the intent declared for its open round."""
        self.sums = np.zeros(0, np.int64)
        """For each table, the sum of the arrivals of its slots."""
        self.arrivals = np.zeros(0, np.int64)
        """For each slot, `_ARRIVED` + generation of the slice that has arrived; 0 for none."""
        self.partial: dict[int, PartialSlice] = {}
        """Slot → a slice that has arrived in part."""
        self._offsets = np.zeros(0, np.int64)
        """For each slot, the offset of its bytes in the concatenation of all buffers, each counted as `_BUFFER`
        bytes.
        """
        self._buffers: list[Any] = []
        self._num_buffers = 0
        self.grow()

    def __repr__(self) -> str:
        committed = np.flatnonzero(self.committed[: self._slots.num_tables]).tolist()
        here, partial = int(np.count_nonzero(self.arrivals)), len(self.partial)
        return f"<{type(self).__name__}: committed tables {committed}, {here} slices are here, {partial} in part>"

    def grow(self) -> None:
        tables, slots = self._slots.num_tables, len(self._slots.table)
        self.committed = _grow_array(self.committed, tables, False)
        self.version, self.flags = _grow_array(self.version, tables, 0), _grow_array(self.flags, tables, 0)
        self.sums = _grow_array(self.sums, tables, 0)
        self.arrivals, self._offsets = (
            _grow_array(self.arrivals, slots, 0),
            _grow_array(self._offsets, slots, 0),
        )
        self.commit_infos += [None] * (tables - len(self.commit_infos))
        self.waiters += [None] * (tables - len(self.waiters))
        self._buffers += [None] * (slots - len(self._buffers))

    def store(self, slots: Any, arrivals: Any, sources: Sequence[Any], which: Any, starts: Any) -> None:
        """Store slices (or one, with scalar arguments). Those of a lower generation are replaced."""
        tables, added = self._slots.table[slots], arrivals - self.arrivals[slots]
        if isinstance(slots, int):
            self.sums[tables] += added
            self._buffers[slots] = sources[which]
        else:
            np.add.at(self.sums, tables, added)
            for slot, at in zip(slots.tolist(), which.tolist(), strict=True):
                self._buffers[slot] = sources[at]
        self.arrivals[slots] = arrivals
        self._offsets[slots] = starts + (which + self._num_buffers) * _BUFFER
        # Wraps around, so that offsets fit into 64 bits.
        self._num_buffers = (self._num_buffers + len(sources)) % _BUFFERS

    def payload(self, slot: int) -> tuple[Any, int]:
        """Return the buffer of a slice that has arrived, and the offset of its bytes."""
        source = self._buffers[slot]
        if isinstance(source, PartialSlice):
            source = self._buffers[slot] = source.payload()
        return source, int(self._offsets[slot] % _BUFFER)

    def ranges(self, slots: Ints) -> list[BufferRange]:
        """List the given slots (ascending) that have arrived, as contiguous ranges."""
        here = slots[self.arrivals[slots].nonzero()]
        offsets = self._offsets[here]
        offsets = offsets - offsets[:1]  # relative, so that the cache hits in every round
        key, found = (here.tobytes(), offsets.tobytes()), list[BufferRange]()
        # How slots group into ranges depends on offsets only, so it is cached over rounds.
        for first, end, nbytes in self._slots.ranges.get(key, self._slots.divide, here, offsets):
            source, begin = self._buffers[first], int(self._offsets[first] % _BUFFER)
            if isinstance(source, PartialSlice):
                source = source.payload()
            found.append((first, end, source, begin, begin + nbytes))
        return found

    def part(self, slot: int, arrival: int, dtype: str, begin: int, end: int) -> list[BufferRange]:
        """Return elements of a possibly incomplete slot. Raises ProtocolError if they cannot be decoded singly."""
        if not arrival:
            return []
        source = self._buffers[slot] if self.arrivals[slot] == arrival else self.partial[slot]
        if isinstance(source, Tensor):
            size, start = SIZES[dtype], int(self._offsets[slot] % _BUFFER)
            return [(slot, slot + 1, source, start + begin * size, start + end * size)]
        numbers = (
            source.elements(dtype, begin, end)
            if isinstance(source, CompressedPayload | PartialSlice)
            else None
        )
        if numbers is None:
            raise ProtocolError(f"slice {slot} came in parts, and then in another form")
        return [(slot, slot + 1, numbers, 0, len(numbers))]

    def discard_eager(self, table: int) -> None:
        """Forget the slices of a table that were pushed eagerly (generation 0)."""
        first, end = self._slots.first[table : table + 2].tolist()
        for slot in (first + np.flatnonzero(self.arrivals[first:end] == _ARRIVED)).tolist():
            self.sums[table] -= _ARRIVED
            self.arrivals[slot], self._buffers[slot] = 0, None
        for slot in [
            slot for slot, own in self.partial.items() if first <= slot < end and own.arrival == _ARRIVED
        ]:
            del self.partial[slot]

    def clear(self, tables: Ints, slots: Ints) -> None:
        self.committed[tables] = False
        self.sums[tables] = self.arrivals[slots] = 0
        for slot in slots.tolist():
            self._buffers[slot] = None
        for slot in self.partial.keys() & set(slots.tolist()) if self.partial else ():
            del self.partial[slot]
        for table in tables.tolist():
            self.commit_infos[table] = self.waiters[table] = None
        for table in self.intents.keys() & set(tables.tolist()) if self.intents else ():
            del self.intents[table]


ROUND_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
"""Upper bounds of the buckets for durations of rounds, in seconds."""


class Histogram:
    """Counts of values by bucket.

    Attributes:
        bounds: Upper bounds of the buckets, ascending and inclusive; one more bucket holds larger values.
        counts: One for each bucket.
        total: The sum of the values.
    """

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def add(self, value: float) -> None:
        """Count a value; NaN is ignored."""
        if not math.isnan(value):
            self.counts[bisect_left(self.bounds, value)] += 1
            self.total += value


class RoundTracker:
    """Round state of all tables for one set of members: open rounds, contributions, failures.

    Attributes:
        inputs: Rank → its contributions to the open rounds, in rank order, which is the order of summation.
        num_committed: For each table, how many members have committed its open round.
        mismatches: Table → how many payloads differed from an earlier one with the same identity.
        num_ended: Applied rounds; those that end together count once.
        lateness: Rank → seconds that it committed after the first rank, summed. `waited` sums the lateness of the last
            rank of each round. For lanes see `DelayedRequests.contributed`.
        durations: Seconds from the end of one round of a table to the end of its next.
    """

    def __init__(self, num_members: int, slots: Slots, durations: Histogram) -> None:
        self.members: Sequence[int] = range(num_members)
        self.durations = durations
        self.inputs: dict[int, RankInputs] = {}
        self.mismatches: dict[int, int] = {}
        self.num_ended, self.waited = 0, 0.0
        self.lateness: defaultdict[int, float] = defaultdict(float)
        self._slots = slots
        self.numbers, self.num_committed = np.zeros(0, np.int64), np.zeros(0, np.int64)
        self._patience = math.inf
        """No deadline is earlier than this."""
        self._ended_at = np.zeros(0)
        """For each table, when its last round ended (seconds); NaN before the first."""
        self._failed = np.zeros(0, np.int64)
        """For each table, the first failed round since the last applied one."""
        self._failures: dict[int, dict[int, KVStoreError]] = {}
        """Table → failed round → its error."""
        self.grow()

    def __repr__(self) -> str:
        waiting = np.flatnonzero(self.num_committed[: self._slots.num_tables]).tolist()
        rounds = [
            f"round {self.number(t)} of table {t} waits for ranks {self.missing_ranks(t)}"
            for t in waiting[:3]
        ]
        rounds += [f"{len(waiting) - 3} more wait"] if len(waiting) > 3 else []
        return (
            f"<{type(self).__name__} of {self.num_members} members: {', '.join(rounds) or 'nothing waits'}>"
        )

    @property
    def num_members(self) -> int:
        return len(self.members)

    def grow(self) -> None:
        size = self._slots.num_tables
        self.numbers, self.num_committed = (
            _grow_array(self.numbers, size, 0),
            _grow_array(self.num_committed, size, 0),
        )
        self._failed = _grow_array(self._failed, size, _NEVER)
        self._ended_at = _grow_array(self._ended_at, size, math.nan)
        for inputs in self.inputs.values():
            inputs.grow()

    def of(self, rank: int) -> RankInputs:
        """Return what a rank has given; created at its first contribution."""
        if rank not in self.inputs:
            self.inputs = dict(sorted({**self.inputs, rank: RankInputs(self._slots)}.items()))
        return self.inputs[rank]

    def number(self, table: int) -> int:
        """Return the number of a table's open round; all lower ones are over."""
        return int(self.numbers[table])

    def push(self, rank: int, pushes: m.Matrix, sources: Sequence[Any], which: Ints, starts: Ints) -> None:
        """Store provisional slices. Duplicates, and slices of past rounds, have no effect.

        Args:
            pushes: The rows of a `Contribute`; no slot occurs twice.
            sources, which, starts: The buffers, and for each slice the index of its buffer and its offset there.

        Raises:
            ProtocolError: A slice belongs to a round that is not open yet; nothing was stored.
        """
        inputs = self.of(rank)
        if inputs.partial:
            self._drop_parts(inputs, pushes, sources, which, starts)
        # The common case is one new slice of generation 0. Scalars take a tenth of the time of arrays.
        if len(pushes) == 1:
            slot, round_, generation, _ = pushes[0].tolist()
            table = self._slots.table[slot]
            is_awaited = round_ == self.numbers[table] and not inputs.committed[table]
            if is_awaited and not generation and not inputs.arrivals[slot]:
                inputs.store(slot, _ARRIVED, sources, int(which[0]), int(starts[0]))
                return
        # The general case, vectorised. A slice is stored if its round is open, its rank has not committed, and its
        # generation is higher than the stored one.
        slots, rounds, generations, _ = pushes.T
        tables = self._slots.table[slots]
        numbers, here, arrivals = self.numbers[tables], inputs.arrivals[slots], generations + _ARRIVED
        is_new_slice = (rounds == numbers) & (here < arrivals) & ~inputs.committed[tables]
        if np.count_nonzero(is_new_slice) < len(slots):
            early = np.flatnonzero(rounds > numbers)
            if len(early):
                at = int(early[0])
                raise ProtocolError(
                    f"rank {rank} pushed to round {rounds[at]} while round {numbers[at]} is open"
                )
            # Slices that repeat a generation must have the same bytes; if not, that is counted.
            is_repeated = (rounds == numbers) & (here == arrivals)
            for at in np.flatnonzero(is_repeated).tolist():
                table, slot = int(tables[at]), int(slots[at])
                nbytes, known = int(self._slots.nbytes[slot]), inputs.payload(slot)
                same = _same_payload(nbytes, *known, sources[which[at]], int(starts[at]))
                self.mismatches[table] = self.mismatches.get(table, 0) + (not same)
            slots, arrivals, which, starts = (a[is_new_slice] for a in (slots, arrivals, which, starts))
        if len(slots):
            inputs.store(slots, arrivals, sources, which, starts)

    def push_part(self, rank: int, push: Sequence[int], part: SlicePart) -> None:
        """Store a provisional part of a slice, given its (slot, round, generation); otherwise as `push`."""
        inputs, (slot, round_, generation) = self.of(rank), push
        table, arrival = int(self._slots.table[slot]), generation + _ARRIVED
        if round_ > self.number(table):
            raise ProtocolError(
                f"rank {rank} pushed to round {round_} while round {self.number(table)} is open"
            )
        partial, is_open = inputs.partial.get(slot), round_ == self.number(table)
        if (
            not is_open
            or inputs.committed[table]
            or max(inputs.arrivals[slot], partial.arrival if partial else 0) > arrival
        ):
            return
        # A part of a complete slice can only be a repetition; otherwise it extends what has arrived.
        if inputs.arrivals[slot] == arrival:
            known, start = inputs.payload(slot)
            nbytes, theirs = part.data.numel(), part.payload(part.data)
            is_same = _same_payload(nbytes, known, start + part.begin, theirs, 0)
        else:
            if partial is None or partial.arrival < arrival:
                partial = inputs.partial[slot] = PartialSlice(arrival, part)
            is_same = partial.take(part)
            if partial.is_whole:
                del inputs.partial[slot]
                inputs.store(slot, arrival, [partial], 0, 0)
        self.mismatches[table] = self.mismatches.get(table, 0) + (not is_same)

    def _drop_parts(
        self, inputs: RankInputs, pushes: m.Matrix, sources: Sequence[Any], which: Ints, starts: Ints
    ) -> None:
        """Forget partial slices that now arrive whole. Bytes that differ from the parts are counted as mismatches."""
        for at, (slot, round_, generation, _) in enumerate(pushes.tolist()):
            partial, table = inputs.partial.get(slot), int(self._slots.table[slot])
            if partial is None or round_ != self.number(table) or generation + _ARRIVED < partial.arrival:
                continue
            del inputs.partial[slot]
            if generation + _ARRIVED == partial.arrival:
                same = _same_payload(partial.level, partial.payload(), 0, sources[which[at]], int(starts[at]))
                self.mismatches[table] = self.mismatches.get(table, 0) + (not same)

    def commit(
        self, rank: int, commits: m.Matrix, body: m.Contribute, waiter: Waiter, now: float
    ) -> Ints | None:
        """Make contributions final; return a `CommitStatus` for each commit, or None if all were accepted."""
        # 1. Unpack. A single commit is handled with scalars, as in `push`.
        inputs, statuses, is_single = self.of(rank), None, len(commits) == 1
        columns: Any = commits[0].tolist() if is_single else commits.T
        tables, rounds, counts, generations, versions, flags = columns
        any_flags = flags if is_single else int(np.bitwise_or.reduce(flags))
        if any_flags & m.DISCARD_EAGER:
            self._discard_eager(inputs, commits)
        # 2. A commit counts if its round is open and the sum of arrivals shows that all slices arrived, in the
        # generations that the rank believes it sent.
        is_whole = inputs.sums[tables] == counts * _ARRIVED + generations
        if any_flags & m.REPEATS:
            is_whole = is_whole & False
        is_new = (rounds == self.numbers[tables]) & is_whole & ~inputs.committed[tables]
        fresh = waiting = [tables] if is_single else tables.tolist()
        # 3. In the rare case that some do not count, find out why, and continue with those that do.
        if not (is_new if is_single else is_new.all()):
            statuses = self._statuses_of(inputs, commits)
            of_each = statuses.tolist()
            fresh = [
                table for table, one in zip(waiting, of_each, strict=True) if one == CommitStatus.ACCEPTED
            ]
            waiting = [
                table for table, one in zip(waiting, of_each, strict=True) if one <= CommitStatus.REPEATED
            ]
            tables, _, _, _, versions, flags = commits[statuses == CommitStatus.ACCEPTED].T
        # 4. Record the commits. A repeated one only replaces the request that is answered, and how it is answered: it
        # may come from a process that has taken the rank over.
        for table in waiting:
            inputs.waiters[table] = waiter
        if statuses is not None and len(waiting) > len(fresh):
            repeated = commits[statuses == CommitStatus.REPEATED]
            stored = inputs.flags[repeated[:, m.COMMIT_TABLE]] & ~_ANSWER
            inputs.flags[repeated[:, m.COMMIT_TABLE]] = stored | (repeated[:, m.COMMIT_FLAGS] & _ANSWER)
        is_plain = not (body.hold or any_flags & _SPECIAL)
        info = CommitInfo(body.rescale, body.timeout, body.hold, is_plain, now)
        for table in fresh:
            inputs.commit_infos[table] = info
        inputs.committed[tables] = True
        inputs.version[tables], inputs.flags[tables] = versions, flags
        self.num_committed[tables] += 1
        self._patience = min(self._patience, now + body.timeout)
        return statuses

    def declare_intent(self, rank: int, commit: Sequence[int], body: m.Contribute, waiter: Waiter) -> bool:
        """Record a rank's intent for a table's open round. The rank has not committed yet.

        Returns whether it has changed. A tentative intent has no effect beside a firm one. Raises ProtocolError if it
        names slices that the table does not have on this server, or contains payloads.
        """
        table, _, count, generations, _, flags = commit
        first, end = self._slots.first[table : table + 2].tolist()
        slots, named = body.pushes[:, m.PUSH_SLOT], body.pushes[:, m.PUSH_GENERATION]
        if len(slots) and (slots.min() < first or slots.max() >= end or body.pushes[:, m.PUSH_NBYTES].any()):
            raise ProtocolError(
                f"a declared intent names slices {slots.min()} to {slots.max()} and contains "
                f"{body.pushes[:, m.PUSH_NBYTES].sum()} bytes; table {table} has slices {first} to {end - 1} on this "
                "server"
            )
        # The slices that are named have generations of their own; all others share the rest of the sum equally.
        arrivals = np.zeros(end - first, np.int64)
        if count:
            arrivals[:] = _ARRIVED + (generations - int(named.sum())) // max(count - len(named), 1)
            arrivals[slots - first] = _ARRIVED + named
        is_firm = not flags & m.TENTATIVE
        intent = Intent(arrivals.tobytes(), flags & ~m.TENTATIVE, body.rescale, body.hyper, waiter, is_firm)
        known = self.of(rank).intents.get(table)
        if known == intent or (known is not None and known.is_firm and not is_firm):
            return False
        self.of(rank).intents[table] = intent
        return True

    def _discard_eager(self, inputs: RankInputs, commits: m.Matrix) -> None:
        for table, round_, *_, flags in commits.tolist():
            if flags & m.DISCARD_EAGER and round_ == self.numbers[table] and not inputs.committed[table]:
                inputs.discard_eager(table)

    def _statuses_of(self, inputs: RankInputs, commits: m.Matrix) -> Ints:
        tables, rounds, counts, generations, _, _ = commits.T
        numbers, statuses = self.numbers[tables], np.zeros(len(commits), np.int64)
        # In ascending precedence: the state of a round outweighs what the rank has given to it.
        are_missing = inputs.sums[tables] != counts * _ARRIVED + generations
        statuses[are_missing | (commits[:, m.COMMIT_FLAGS] & m.REPEATS > 0)] = CommitStatus.REFUSED
        statuses[inputs.committed[tables]] = CommitStatus.REPEATED
        statuses[rounds < numbers] = CommitStatus.APPLIED
        statuses[(rounds < numbers) & (rounds >= self._failed[tables])] = CommitStatus.FAILED
        statuses[rounds > numbers] = CommitStatus.AHEAD
        return statuses

    def times(self, table: int) -> tuple[float, float]:
        """Return since when the open round is waited for, and the earliest deadline of its waiters, or inf."""
        infos = [info for inputs in self.inputs.values() if (info := inputs.commit_infos[table]) is not None]
        since = min((info.since for info in infos), default=math.inf)
        return since, min((info.since + info.timeout for info in infos), default=math.inf)

    def oldest(self) -> list[int]:
        """Return the table whose open round has been waited for longest; an empty list if no rank waits."""
        every = [enumerate(inputs.commit_infos) for inputs in self.inputs.values()]
        infos = [(info.since, table) for of_rank in every for table, info in of_rank if info is not None]
        return [min(infos)[1]] if infos else []

    def late(self, now: float) -> list[int]:
        """Return the tables whose open round has a waiter past its deadline."""
        if now < self._patience:
            return []
        deadlines = {table: self.times(table)[1] for table in np.flatnonzero(self.num_committed).tolist()}
        self._patience = min(deadlines.values(), default=math.inf)
        return [table for table, deadline in deadlines.items() if deadline <= now]

    def missing_slots(self, rank: int, table: int, count: int) -> tuple[int, ...]:
        """Return the slots that a rank must send again: those missing, or all if one arrived in a lower generation."""
        first, end = self._slots.first[table : table + 2].tolist()
        missing = np.flatnonzero(self.of(rank).arrivals[first:end] == 0) + first
        # If enough slices are here, a generation is too low, and it is not known which.
        is_short = end - first - len(missing) < count
        return tuple(missing.tolist()) if is_short else tuple(range(first, end))

    def why_failed(self, table: int, round_: int) -> KVStoreError:
        known = self._failures.get(table, {}).get(round_)
        return KVStoreError(f"round {round_} failed") if known is None else known

    def missing_ranks(self, table: int) -> list[int]:
        return [rank for rank in self.members if not self.has_committed(rank, table)]

    def has_committed(self, rank: int, table: int) -> bool:
        inputs = self.inputs.get(rank)
        return inputs is not None and bool(inputs.committed[table])

    def finish(self, tables: Ints, slots: Ints) -> None:
        """Close the open rounds of some tables, which have these slots, as applied; measure lateness on the first."""
        if not len(tables):
            return
        one = tables[0]
        since = {
            rank: info.since for rank, inputs in self.inputs.items() if (info := inputs.commit_infos[one])
        }
        for inputs in self.inputs.values():
            inputs.clear(tables, slots)
        self.advance(tables, since)

    def advance(self, tables: Ints, since: Mapping[int, float]) -> None:
        """Open the next rounds of some tables; `since`: when each rank has committed that of the first one."""
        one = int(tables[0])
        # Numpy is slow with an index of one element.
        index: Any = one if len(tables) == 1 else tables
        first, last = min(since.values(), default=0.0), max(since.values(), default=0.0)
        for rank, at in since.items():
            self.lateness[rank] += at - first
        if since:
            self.num_ended += 1
            self.waited += last - first
            self.durations.add(last - float(self._ended_at[one]))
            self._ended_at[index] = last
        for table in self._failures.keys() & set(tables.tolist()) if self._failures else ():
            del self._failures[table]
        self._failed[index] = _NEVER
        self.numbers[index] += 1
        self.num_committed[index] = 0

    def fail(self, table: int, error: KVStoreError) -> list[Waiter]:
        """Close an open round as failed; return the waiters to notify now. The others are told when they ask."""
        found = [waiter for inputs in self.inputs.values() if (waiter := inputs.waiters[table]) is not None]
        self._record_failure(table, self.number(table), error)
        tables = np.array([table])
        # What was given is dropped, also by ranks that have not committed.
        for inputs in self.inputs.values():
            inputs.clear(tables, self._slots.of(tables))
        self.numbers[table] += 1
        self.num_committed[table] = 0
        return found

    def change_members(self, table: int, members: Sequence[int]) -> list[tuple[int, Waiter]]:
        """Continue the open round of the only table with other members; return (rank, waiter) of earlier commits.

        These must be repeated. Slices stay, as they were given before the commits.
        """
        self.members, waiting = members, list[tuple[int, Waiter]]()
        for rank, inputs in self.inputs.items():
            if inputs.committed[table] and (waiter := inputs.waiters[table]) is not None:
                waiting.append((rank, waiter))
            inputs.committed[table] = False
            inputs.commit_infos[table] = inputs.waiters[table] = None
            inputs.intents.pop(table, None)
        self.num_committed[table] = 0
        return waiting

    def close(
        self, table: int, members: Sequence[int]
    ) -> list[tuple[int, Waiter, CommitInfo, tuple[int, int]]]:
        """Continue the open round of the only table with some of its members, whose commits stay.

        Returns what others have committed, to be answered when it is over: (rank, waiter, info, (version, flags)).
        """
        self.members, others = members, list[tuple[int, Waiter, CommitInfo, tuple[int, int]]]()
        for rank, inputs in self.inputs.items():
            waiter, info = inputs.waiters[table], inputs.commit_infos[table]
            if rank not in members and waiter is not None and info is not None:
                flags = int(inputs.version[table]), int(inputs.flags[table])
                others.append((rank, waiter, info, flags))
        self.forget_others()
        self.num_committed[table] = sum([bool(inputs.committed[table]) for inputs in self.inputs.values()])
        return others

    def forget_others(self) -> None:
        """Drop what ranks have given that are no members of the open round."""
        self.inputs = {rank: inputs for rank, inputs in self.inputs.items() if rank in self.members}

    def undo(self, table: int, error: KVStoreError) -> None:
        """Turn the last applied round into a failed one, after its weights were restored."""
        self._record_failure(table, self.number(table) - 1, error)

    def was_applied(self, table: int, round_: int) -> bool:
        """Return whether a past round was applied and not undone."""
        return 0 <= round_ < min(self.number(table), int(self._failed[table]))

    def first_failed(self, tables: Ints) -> Ints:
        """Return for some tables the first failed round since the last applied one."""
        return np.asarray(self._failed[tables])

    def failures(self, table: int) -> Mapping[int, KVStoreError]:
        """Return the errors of the last failed rounds of a table, by round."""
        return self._failures.get(table, {})

    def restore(
        self,
        tables: Ints,
        numbers: Ints,
        failed: Ints,
        failures: Mapping[int, Mapping[int, KVStoreError]],
    ) -> None:
        """Set which rounds are open and which failed, for tables to whose open rounds no rank has given anything."""
        self.numbers[tables], self._failed[tables] = numbers, failed
        for table in tables.tolist():
            self._failures.pop(table, None)
        self._failures |= {table: dict(of_table) for table, of_table in failures.items()}

    def replace_process(self, rank: int) -> None:
        """Drop what a rank has not committed, when its process is replaced."""
        if rank in self.inputs:
            inputs = self.of(rank)
            dropped = np.flatnonzero(~inputs.committed[: self._slots.num_tables])
            inputs.clear(dropped, self._slots.of(dropped))
            inputs.waiters = [None] * len(inputs.waiters)

    def _record_failure(self, table: int, round_: int, error: KVStoreError) -> None:
        self._failed[table] = min(self._failed[table], round_)
        failures = self._failures.setdefault(table, {})
        failures[round_] = error
        if len(failures) > _FAILURES_KEPT:
            del failures[min(failures)]


class NamespaceRounds:
    """All rounds of a namespace: the shared ones, and in asynchronous modes each rank's lane."""

    def __init__(self, num_workers: int, mode: Mode, views: Views | None = None) -> None:
        self.num_workers = num_workers
        self.views = views
        """Which ranks are members, if that may change; None: all ranks, always."""
        self.slots = Slots()
        self.durations = Histogram(ROUND_SECONDS)
        self.shared = RoundTracker(num_workers, self.slots, self.durations)
        if views is not None:
            self.shared.members = views.current.ranks
        self.left: set[int] = set()
        """Ranks whose processes left because they were done."""
        self.pipelined: set[int] = set()
        """Tables whose open round is partly applied. No rank may read them until it is over."""
        self.begun: set[int] = set()
        """Tables for which a lane has begun; emptied by who stores that."""
        self._is_sync, self.bound = mode.is_sync, mode.bound
        self.lanes: dict[int, RoundTracker] = {}
        self._clocks: dict[int, list[int]] = {}
        """Table → the clock of each rank."""
        self._joined: dict[int, set[int]] = {}
        """Table → the ranks that have no more data until all have joined."""

    def add(self, sizes: Sequence[int], are_next: Sequence[bool]) -> None:
        """Open the first round of a new table, given the sizes of its slices in bytes; see `Slots.is_next`."""
        self.slots.add(sizes, are_next)
        for tracker in (self.shared, *self.lanes.values()):
            tracker.grow()

    def trackers(self, rank: int, tables: Ints, rounds: Ints) -> list[tuple[RoundTracker, Bools | None]]:
        """Group a rank's rounds of some tables by tracker, each with a mask of its rounds; None: all."""
        if self._is_sync:
            return [(self.shared, None)]
        # The first round of a table is always shared by all ranks.
        is_shared = (rounds == 0) | (self.shared.numbers[tables] == 0)
        found: list[tuple[RoundTracker, Bools | None]] = [(self.shared, is_shared)] if is_shared.any() else []
        if not is_shared.all():
            found.append((self.lane(rank, tables[~is_shared], rounds[~is_shared]), ~is_shared))
        return found

    def tracker(self, rank: int, table: int, round_: int = -1) -> RoundTracker:
        """Return the tracker of one round of a table, or of the rank's current one."""
        [(tracker, _)] = self.trackers(rank, np.array([table]), np.array([round_]))
        return tracker

    def lane(self, rank: int, tables: Ints, rounds: Ints) -> RoundTracker:
        """Return the lane of a rank that contains these rounds of some tables."""
        # The first round that a process names is where its lane begins, and sets its clock. With several servers a
        # worker takes the largest round that one of them proposed: if servers disagreed on who is ahead, ranks could
        # deadlock.
        lane = self.new_lane(rank)
        # Round 0 was shared, so number 0 means that the lane has not begun for a table.
        for at in np.flatnonzero(lane.numbers[tables] == 0):
            table, number = int(tables[at]), int(rounds[at])
            lane.numbers[table] = max(1, number)
            self.begun.add(table)
            self.clocks(table)[rank] = max(self.clocks(table)[rank], number - 1)
        return lane

    def new_lane(self, rank: int) -> RoundTracker:
        """Return the lane of a rank; one that has begun for no table if it has none."""
        if rank not in self.lanes:
            self.lanes[rank] = RoundTracker(1, self.slots, self.durations)
        return self.lanes[rank]

    def clocks(self, table: int) -> list[int]:
        return self._clocks.setdefault(table, [0] * self.num_workers)

    def joined(self, table: int) -> set[int]:
        """Return the ranks that have no more data until all have joined."""
        return self._joined.setdefault(table, set())

    def next_round(self, rank: int, table: int, resumes: bool = False) -> int:
        """Return the round at which a rank should begin; a new process is not behind the slowest of the others.

        With `resumes`, it is the one after the last that this server has of the rank: the process gives all others.
        """
        if self._is_sync or not self.shared.number(table):
            return self.shared.number(table)
        lane = self.lanes.get(rank)
        if lane is not None and lane.number(table):
            return lane.number(table)
        clocks = self.clocks(table)
        if resumes:
            return 1 + clocks[rank]
        others = [clock for r, clock in enumerate(clocks) if r != rank and self._takes_part(r, table)]
        return 1 + max(clocks[rank], min(others, default=0))

    @property
    def num_ended(self) -> int:
        """Applied rounds; those that end together count once."""
        return self.shared.num_ended + sum([lane.num_ended for lane in self.lanes.values()])

    def mismatches(self, table: int) -> int:
        return sum(tracker.mismatches.get(table, 0) for tracker in (self.shared, *self.lanes.values()))

    def advance(self, rank: int, table: int) -> None:
        """Advance the clock of a rank whose lane ended a round; if it had joined, it takes part again."""
        self.joined(table).discard(rank)
        self.clocks(table)[rank] += 1

    def behind(self, rank: int, table: int) -> list[int]:
        """Return the ranks that this one must wait for before it may read."""
        if table in self.pipelined:
            return self.shared.missing_ranks(table)
        if self.bound is None:
            return []
        clocks = self.clocks(table)
        least = clocks[rank] - self.bound
        return [r for r, clock in enumerate(clocks) if clock < least and self._takes_part(r, table)]

    def missing_from_join(self, table: int) -> list[int]:
        return [rank for rank in range(self.num_workers) if self._takes_part(rank, table)]

    def end_join(self, table: int) -> None:
        """After all ranks have joined, let them take part again with equal clocks."""
        self.joined(table).clear()
        self._clocks[table] = [max(self.clocks(table))] * self.num_workers

    def fail_join(self, rank: int, table: int, round_: int, error: KVStoreError) -> None:
        """Fail the join of a rank that will not see all others join: it takes part as before."""
        self.joined(table).discard(rank)
        lane = self.tracker(rank, table)
        if round_ == lane.number(table) - 1:
            lane.undo(table, error)

    def begin_process(self, rank: int, resumes: bool) -> None:
        """Let a new process of a rank take part, in a new lane; one that resumes goes on in that of the former one."""
        # Commits of the former process stay; it can no longer be answered.
        self.shared.replace_process(rank)
        if resumes and rank in self.lanes:
            self.lanes[rank].replace_process(rank)
        else:
            self.lanes.pop(rank, None)
        for joined in self._joined.values():
            joined.discard(rank)
        self.left.discard(rank)
        if self.views is not None:
            for ranks in (self.views.leaving, self.views.lost, self.views.joining):
                ranks.discard(rank)

    def end_process(self, rank: int, is_done: bool, is_resumable: bool) -> None:
        """End the process of a rank; if it was done, no rank waits for it any more."""
        self.shared.replace_process(rank)
        if not is_resumable:
            self.lanes.pop(rank, None)
        if is_done:
            self.left.add(rank)
        if self.views is not None:
            self.views.joining.discard(rank)

    def _takes_part(self, rank: int, table: int) -> bool:
        return rank not in self.joined(table) and rank not in self.left


@dataclass(repr=False)
class DelayedRequest:
    """A request that waits until other ranks have caught up: a read that is too far ahead, or a join."""

    table: int
    rank: int
    waiter: Waiter
    deadline: float
    timeout: float
    is_join: bool
    """True if it waits for all ranks to have no more data, False if for weights that are recent enough or a round."""
    answer: Callable[[], list[m.Outgoing]]
    round: int = -1
    """The round of the waiting commit; -1 for a read."""
    late: Sequence[int] = ()
    """The ranks that a read had to wait for when it was delayed."""
    opens: int = -1
    """If the members may change: it waits until this round is open."""
    is_entry: bool = False
    """It waits until its rank is a member."""

    def __repr__(self) -> str:
        what = "the end of joining" if self.is_join else "a read" if self.round < 0 else f"round {self.round}"
        what = "membership" if self.is_entry else f"round {self.opens}" if self.opens >= 0 else what
        request = f"request {self.waiter.number} of rank {self.rank}"  # the waiter's routing id is secret
        return f"<{type(self).__name__} of {request} for {what} of table {self.table}, until {self.deadline:.3f}>"

    @property
    def since(self) -> float:
        return self.deadline - self.timeout

    def missing(self, rounds: NamespaceRounds) -> list[int]:
        """Return the ranks that it waits for; empty once it can be answered."""
        shared, views = rounds.shared, rounds.views
        if self.is_entry and views is not None and not shared.members:
            return views.absent() or [self.rank]  # the job has gone back, and has no members yet
        if self.is_entry or self.opens >= 0:
            is_over = (
                self.rank in shared.members if self.is_entry else shared.number(self.table) >= self.opens
            )
            # All may have committed while the sum waits for a decision, which any of them may make.
            return [] if is_over else shared.missing_ranks(self.table) or list(shared.members)
        return rounds.missing_from_join(self.table) if self.is_join else rounds.behind(self.rank, self.table)


class DelayedRequests:
    """The delayed requests of one namespace; a repeated request replaces the former one."""

    def __init__(self, rounds: NamespaceRounds) -> None:
        self._rounds = rounds
        self.all: dict[tuple[int, int, bytes, int], DelayedRequest] = {}
        self._late_until: dict[int, float] = {}
        """Rank → up to when the waiting of others for it is already counted."""

    def add(self, wait: DelayedRequest) -> None:
        """Delay a request. A repeated one keeps its original deadline."""
        key = (wait.table, wait.rank, *wait.waiter)
        known = self.all.get(key)
        if known is not None:
            wait.deadline, wait.late = known.deadline, known.late
        elif not wait.is_join:
            wait.late = wait.missing(self._rounds)
        self.all[key] = wait

    def remove(self, wait: DelayedRequest) -> None:
        del self.all[(wait.table, wait.rank, *wait.waiter)]

    def contributed(self, table: int, rank: int, now: float) -> None:
        """Record a contribution: its rank no longer waits to join, and the deadlines of other joins start again."""
        for key, wait in list(self.all.items()):
            if wait.table != table:
                continue
            if wait.is_join:
                if wait.rank == rank:
                    del self.all[key]
                wait.deadline = now + wait.timeout
            # The rank was late as long as a read waited for it; simultaneous waits count once.
            elif rank in wait.late and rank not in wait.missing(self._rounds):
                # Only time that was not counted before for this rank.
                begin = max(wait.since, self._late_until.get(rank, -math.inf))
                self._rounds.shared.lateness[rank] += max(now - begin, 0.0)
                self._late_until[rank] = now

    def take_ready(self) -> list[DelayedRequest]:
        return self.take(lambda wait: not wait.missing(self._rounds))

    def take(self, is_over: Callable[[DelayedRequest], bool]) -> list[DelayedRequest]:
        found = [key for key, wait in self.all.items() if is_over(wait)]
        return [self.all.pop(key) for key in found]


def _grow_array(array: Any, size: int, fill: Any) -> Any:
    if len(array) >= size:
        return array
    more = np.full(max(size, 2 * len(array)), fill, array.dtype)
    more[: len(array)] = array
    return more


def _same_payload(nbytes: int, mine: Any, start: int, theirs: Any, other: int) -> bool:
    """Return whether two slices are the same contribution: `nbytes` bytes in two buffers, or two encoded payloads."""
    if (
        isinstance(mine, CompressedPayload)
        and isinstance(theirs, CompressedPayload)
        and mine.codec == theirs.codec
    ):
        mine, theirs = mine.data, theirs.data
    if isinstance(mine, Tensor) and isinstance(theirs, Tensor):
        return torch.equal(mine[start : start + nbytes], theirs[other : other + nbytes])
    return same_payload(mine, theirs)
