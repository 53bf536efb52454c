"""When a contribution counts: the rounds of all tables of one namespace, as arrays. No clock, socket or arithmetic.

Every rank gives exactly one contribution to every round of every table. Ranks, not requests, are counted, so one worker
can never complete a round alone. Where a rank stands in the open round of a table:

    state              event                                        next
    -----------------  -------------------------------------------  -----------------------------------------------
    given              slice that is not here, higher generation    given (the slice is kept, and does not count)
    given              slice of the same or a lower generation      given (other bytes are counted as a mismatch)
    given              commit, slices lack                          given (refused, and the slices are named)
    given              commit, all slices are here                  committed
    given              another process stands for the rank          given nothing
    committed          slice, commit                                committed (repeated: without effect)
    committed          another process stands for the rank          committed, and nobody waits for the answer

and where the round of a table stands:

    open               every member has committed                   complete: it is applied, or held if ranks want that
    open, held         fails: deadline, lost rank, abort, error     failed, with one error for all; the next one is open
    complete, held     applied                                      applied; the next one is open
    applied, the last  undone: another server has failed it         failed

Slices of rounds that are over are ignored, of rounds to come refused; a commit of a round that is over hears its end.

Synchronous rounds have all ranks as members. Without them only the first round of a table, which gives it its values,
is for all; from then on each rank has a *lane*, the same arrays with one member. A process that takes a rank over
begins a new lane. A rank's clock counts the rounds of its lane, however they ended, so it is the same on all servers.
With a bound, a rank whose clock is c may read only when every rank's clock is at least c − bound (stale synchronous
parallel). A rank that has joined, because it has no more data, holds nobody back, nor does one that has left because
it was done.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvstore_server.errors import KVStoreError, ProtocolError
from kvstore_server.protocol import messages as m

Ints = npt.NDArray[np.int64]
_NEVER = np.iinfo(np.int64).max
_FAILURES_KEPT = 16
"""Of how many failed rounds of a table in a row the reason is remembered."""
_TABLE = np.dtype(
    [
        ("number", "i8"),
        ("committed", "i8"),
        ("deadline", "f8"),
        ("since", "f8"),
        ("decides", "?"),
        ("failed", "i8"),
    ]
)
"""Of a table: its open round; how many members have committed that; when the first one that waits loses its patience,
and since when it has waited; whether one wants the sum held; the first failed round that nobody has gone beyond."""
_NEW_TABLE = np.array((0, 0, math.inf, math.inf, False, _NEVER), _TABLE)
_GIVEN = np.dtype(
    [("committed", "?"), ("slices", "i8"), ("generations", "i8"), ("version", "i8"), ("flags", "i8"), ("hold", "f8"),
     ("rescale", "f8"), ("timeout", "f8"), ("waits", "?"), ("peer", "i8"), ("request", "u8")]
)  # fmt: skip
"""Of a rank and a table: whether it has committed the open round, how many slices are here, and the sum of their
generations; what it said when it committed; and whom to answer when the round is over."""
_NOTHING = np.zeros((), _GIVEN)
_SLOT = np.dtype([("generation", "i8"), ("source", "i8"), ("start", "i8")])
"""Of a rank and a slot: the generation that is here, -1 for none; in which buffer, and where its bytes begin."""
_EMPTY = np.array((-1, 0, 0), _SLOT)


class Waiter(NamedTuple):
    """The request that is answered when a round is over."""

    peer: bytes
    number: int


class Verdict(IntEnum):
    """What became of a commit."""

    ACCEPTED = 0
    """It counts."""
    REPEATED = 1
    """It had counted before, and its round is open still."""
    REFUSED = 2
    """Slices of it are not here."""
    APPLIED = 3
    """It repeats one of a round that was applied."""
    FAILED = 4
    """Its round has failed."""
    AHEAD = 5
    """Its round is not open yet."""


class Slots:
    """The slices that a server holds of the tables of a namespace, numbered one after the other."""

    def __init__(self) -> None:
        self.num_tables = 0
        self._num_slots = 0
        # With room for more, so that declaring thousands of keys one by one takes time in proportion to their number.
        self._first, self._table, self._nbytes = (np.zeros(1, np.int64) for _ in range(3))

    @property
    def first(self) -> Ints:
        """The first slot of each table, and the next one that is free."""
        return self._first[: self.num_tables + 1]

    @property
    def table(self) -> Ints:
        """The table of each slot."""
        return self._table[: self._num_slots]

    @property
    def nbytes(self) -> Ints:
        """The size of each slot, padding included."""
        return self._nbytes[: self._num_slots]

    def add(self, sizes: Sequence[int]) -> None:
        """Number the slices of the next table, of so many bytes each."""
        begin, end = self._num_slots, self._num_slots + len(sizes)
        self._first = _grown(self._first, self.num_tables + 2, 0)
        self._table, self._nbytes = _grown(self._table, end, 0), _grown(self._nbytes, end, 0)
        self._table[begin:end], self._nbytes[begin:end] = self.num_tables, sizes
        self.num_tables, self._num_slots = self.num_tables + 1, end
        self._first[self.num_tables] = end

    def of(self, tables: Ints) -> Ints:
        """The slots of some tables, in their order."""
        first = self.first
        counts = first[tables + 1] - first[tables]
        starts = np.cumsum(counts) - counts
        return np.asarray(np.repeat(first[tables] - starts, counts) + np.arange(counts.sum()), np.int64)


class Given:
    """What one rank has given to the open rounds of all tables."""

    def __init__(self, slots: Slots) -> None:
        self._slots = slots
        self.tables = np.zeros(0, _GIVEN)
        self.slots = np.zeros(0, _SLOT)
        self._peers: list[bytes] = []
        self._sources: dict[int, Any] = {}
        """Buffers by number; with the number of slots that are kept in each of them."""
        self._uses: dict[int, int] = {}
        self._next_source = 0

    def fit(self) -> None:
        """Make room for tables that were added."""
        self.tables = _grown(self.tables, self._slots.num_tables, _NOTHING)
        self.slots = _grown(self.slots, len(self._slots.table), _EMPTY)

    def keep(self, slots: Ints, generations: Ints, sources: Sequence[Any], which: Ints, starts: Ints) -> None:
        """Keep slices: those that are here in a lower generation are replaced."""
        before = self.slots[slots]
        self._release(before)
        self.slots["generation"][slots] = generations
        self.slots["source"][slots] = which + self._next_source
        self.slots["start"][slots] = starts
        for number, uses in enumerate(np.bincount(which).tolist()):
            if uses:
                self._sources[self._next_source + number] = sources[number]
                self._uses[self._next_source + number] = uses
        self._next_source += len(sources)
        tables = self._slots.table[slots]
        is_new = before["generation"] < 0
        np.add.at(self.tables["slices"], tables, is_new)
        np.add.at(
            self.tables["generations"],
            tables,
            np.where(is_new, generations, generations - before["generation"]),
        )

    def here(self, table: int) -> Iterator[tuple[int, Any, int]]:
        """The slices of a table that are here: (slot, buffer, where its bytes begin)."""
        first, end = self._slots.first[table : table + 2].tolist()
        for slot, (generation, source, start) in enumerate(self.slots[first:end].tolist(), first):
            if generation >= 0:
                yield slot, self._sources[source], start

    def runs(self, slots: Ints, is_next: npt.NDArray[np.bool_]) -> Iterator[tuple[int, int, Any, int, int]]:
        """Of some slots, which ascend, those that are here: neighbours whose bytes are neighbours, too, together.

        Args:
            is_next: Of every slot, whether it may go on with the one before it.

        Yields:
            The first slot and the end, the buffer, and where in it their bytes begin and end.
        """
        rows = self.slots[slots]
        here = rows["generation"] >= 0
        slots, sources, starts = slots[here], rows["source"][here], rows["start"][here]
        ends = starts + self._slots.nbytes[slots]
        is_cut = (
            (np.diff(slots) != 1) | ~is_next[slots[1:]] | (np.diff(sources) != 0) | (starts[1:] != ends[:-1])
        )
        cuts = np.flatnonzero(is_cut) + 1
        for first, last in (
            zip([0, *cuts.tolist()], [*cuts.tolist(), len(slots)], strict=True) if len(slots) else ()
        ):
            source, begin = self._sources[int(sources[first])], int(starts[first])
            yield int(slots[first]), int(slots[last - 1]) + 1, source, begin, int(ends[last - 1])

    def has_only(self, kind: type) -> bool:
        """Whether all buffers are of one kind."""
        return all(isinstance(source, kind) for source in self._sources.values())

    def payload(self, slot: int) -> tuple[Any, int]:
        """The buffer of a slice that is here, and where in it its bytes begin."""
        _, source, start = self.slots[slot].tolist()
        return self._sources[source], start

    def wait(self, tables: Ints, waiter: Waiter) -> None:
        """Answer a request when the rounds of some tables are over."""
        if waiter.peer not in self._peers:
            self._peers.append(waiter.peer)
        self.tables["waits"][tables] = True
        self.tables["peer"][tables] = self._peers.index(waiter.peer)
        self.tables["request"][tables] = waiter.number

    def waiter(self, table: int) -> Waiter | None:
        """The request that waits for the round of a table."""
        row = self.tables[table]
        return Waiter(self._peers[row["peer"]], int(row["request"])) if row["waits"] else None

    def waiters(self, tables: Ints) -> Iterator[tuple[Waiter, Ints]]:
        """The requests that wait for any of some tables, and for which of them, by position."""
        rows = self.tables[tables]
        waiting = np.flatnonzero(rows["waits"])
        if not len(waiting):
            return
        requests, peers = rows["request"][waiting], rows["peer"][waiting]
        starts = np.flatnonzero(np.append(True, (np.diff(requests) != 0) | (np.diff(peers) != 0)))
        for start, some in zip(starts, np.split(waiting, starts[1:]), strict=True):
            yield Waiter(self._peers[peers[start]], int(requests[start])), some

    def clear(self, tables: Ints, slots: Ints) -> None:
        """Forget what was given to rounds that are over, or by a process that is."""
        if self._sources:
            self._release(self.slots[slots])
            self.slots[slots] = _EMPTY
        self.tables[tables] = _NOTHING

    def replace_process(self) -> None:
        """Another process stands for the rank: drop what the former one had not committed."""
        num_tables = self._slots.num_tables
        self.fit()
        dropped = np.flatnonzero(~self.tables["committed"][:num_tables])
        self.clear(dropped, self._slots.of(dropped))
        self.tables["waits"] = False
        self._peers.clear()

    def _release(self, former: Any) -> None:
        used = former["source"][former["generation"] >= 0]
        if not len(used):
            return
        for number, uses in zip(*np.unique(used, return_counts=True), strict=True):
            self._uses[int(number)] -= int(uses)
            if not self._uses[int(number)]:
                del self._uses[int(number)], self._sources[int(number)]


class Book:
    """Where the rounds of all tables stand, for the same members: which are open, who gave what, which failed."""

    def __init__(
        self, num_members: int, slots: Slots, same_payload: Callable[[int, Any, int, Any, int], bool]
    ) -> None:
        self.num_members = num_members
        self.mismatches: dict[int, int] = {}
        """Table → different payloads that arrived under an identity that had one already."""
        self.given: dict[int, Given] = {}
        """Rank → what it has given to the open rounds."""
        self._slots = slots
        self._same_payload = same_payload
        self._tables = np.zeros(0, _TABLE)
        self._failures: dict[int, dict[int, KVStoreError]] = {}
        """Table → failed round → why."""

    @property
    def tables(self) -> Any:
        """A record for each table."""
        if len(self._tables) < self._slots.num_tables:
            self._tables = _grown(self._tables, self._slots.num_tables, _NEW_TABLE)
        return self._tables

    def of(self, rank: int) -> Given:
        """What a rank has given."""
        given = self.given.get(rank)
        if given is None:
            given = self.given[rank] = Given(self._slots)
        given.fit()
        return given

    def number(self, table: int) -> int:
        """The open round of a table; every lower one is over."""
        return int(self.tables["number"][table])

    def push(self, rank: int, pushes: m.Matrix, sources: Sequence[Any], which: Ints, starts: Ints) -> None:
        """Take provisional slices; a duplicate or one of a past round changes nothing.

        Args:
            pushes: As of a Contribute; no slot twice.
            sources, which, starts: The buffers, and of each slice which one it is in, and where.

        Raises:
            ProtocolError: a slice belongs to a round that is not open yet; nothing was taken.
        """
        slots, rounds, generations = pushes[:, 0], pushes[:, 1], pushes[:, 2]
        tables = self._slots.table[slots]
        number = self.tables["number"][tables]
        early = np.flatnonzero(rounds > number)
        if len(early):
            at = int(early[0])
            raise ProtocolError(f"rank {rank} pushed to round {rounds[at]} while round {number[at]} is open")
        given = self.of(rank)
        is_open = rounds == number
        here = given.slots[slots]
        for at in np.flatnonzero(is_open & (here["generation"] == generations) & (generations >= 0)).tolist():
            table, slot = int(tables[at]), int(slots[at])
            nbytes, known = int(self._slots.nbytes[slot]), given.payload(slot)
            same = self._same_payload(nbytes, *known, sources[which[at]], int(starts[at]))
            self.mismatches[table] = self.mismatches.get(table, 0) + (not same)
        news = is_open & ~given.tables["committed"][tables] & (here["generation"] < generations)
        if news.all():
            given.keep(slots, generations, sources, which, starts)
        elif news.any():
            used, kept = np.unique(which[news], return_inverse=True)
            given.keep(slots[news], generations[news], [sources[at] for at in used], kept, starts[news])

    def commit(self, rank: int, commits: m.Matrix, said: m.Contribute, waiter: Waiter, now: float) -> Ints:
        """Make a rank's contributions to some rounds final; returns a Verdict for each."""
        given = self.of(rank)
        tables, rounds = commits[:, 0], commits[:, 1]
        here, mine = self.tables[tables], given.tables[tables]
        verdicts = np.full(len(commits), Verdict.ACCEPTED, np.int64)
        verdicts[(mine["slices"] != commits[:, 2]) | (mine["generations"] != commits[:, 3])] = Verdict.REFUSED
        verdicts[mine["committed"]] = Verdict.REPEATED
        verdicts[rounds < here["number"]] = Verdict.APPLIED
        verdicts[(rounds < here["number"]) & (rounds >= here["failed"])] = Verdict.FAILED
        verdicts[rounds > here["number"]] = Verdict.AHEAD
        given.wait(tables[verdicts <= Verdict.REPEATED], waiter)
        is_new = verdicts == Verdict.ACCEPTED
        fresh = tables[is_new]
        given.tables["committed"][fresh] = True
        given.tables["version"][fresh] = commits[is_new, 4]
        given.tables["flags"][fresh] = commits[is_new, 5]
        given.tables["hold"][fresh] = said.hold
        given.tables["rescale"][fresh] = math.nan if said.rescale is None else said.rescale
        given.tables["timeout"][fresh] = said.timeout
        self.tables["committed"][fresh] += 1
        self.tables["since"][fresh] = np.minimum(self.tables["since"][fresh], now)
        self.tables["deadline"][fresh] = np.minimum(self.tables["deadline"][fresh], now + said.timeout)
        self.tables["decides"][fresh] |= said.hold != 0.0
        return verdicts

    def missing_slots(self, rank: int, table: int, count: int) -> tuple[int, ...]:
        """The slots of a table that a rank must send again, which wants to commit `count` slices of it.

        Those of which nothing is here; all, where as many are here and one of them in a lower generation.
        """
        first, end = self._slots.first[table : table + 2].tolist()
        missing = np.flatnonzero(self.of(rank).slots["generation"][first:end] < 0) + first
        is_short = end - first - len(missing) < count
        return tuple(missing.tolist()) if is_short else tuple(range(first, end))

    def why_failed(self, table: int, round_: int) -> KVStoreError:
        """The error of a round that failed."""
        known = self._failures.get(table, {}).get(round_)
        return KVStoreError(f"round {round_} failed") if known is None else known

    def missing_ranks(self, table: int) -> list[int]:
        """The ranks that have not committed the open round of a table."""
        return [rank for rank in range(self.num_members) if not self.has_committed(rank, table)]

    def has_committed(self, rank: int, table: int) -> bool:
        given = self.given.get(rank)
        return given is not None and len(given.tables) > table and bool(given.tables["committed"][table])

    def complete(self, tables: Ints) -> npt.NDArray[np.bool_]:
        """Whether every member has committed the open round, for each of some tables."""
        return np.asarray(self.tables["committed"][tables] == self.num_members, np.bool_)

    def waiting(self) -> Ints:
        """The tables of which at least one rank has committed the open round."""
        return np.flatnonzero(self.tables["committed"])

    def is_waiting(self, table: int) -> bool:
        """Whether at least one rank has committed the open round of a table."""
        return bool(self.tables["committed"][table])

    def members(self) -> list[tuple[int, Given]]:
        """What each rank has given, in rank order, the order in which contributions are summed."""
        return sorted(self.given.items())

    def finish(self, tables: Ints) -> None:
        """End the open rounds of some tables as applied."""
        for table in self._failures.keys() & set(tables.tolist()) if self._failures else ():
            del self._failures[table]
        self.tables["failed"][tables] = _NEVER
        self._begin_next(tables)

    def fail(self, table: int, error: KVStoreError) -> list[Waiter]:
        """End an open round as failed; return whom to tell now. The others are told when they come."""
        found = [given.waiter(table) for _, given in self.members() if len(given.tables) > table]
        self._note_failure(table, self.number(table), error)
        self._begin_next(np.array([table]))
        return [waiter for waiter in found if waiter is not None]

    def undo(self, table: int, error: KVStoreError) -> None:
        """Turn the last applied round into a failed one; the weights have been restored."""
        self._note_failure(table, self.number(table) - 1, error)

    def was_applied(self, table: int, round_: int) -> bool:
        """Whether a past round was applied and stands."""
        return round_ < min(self.number(table), int(self.tables["failed"][table]))

    def replace_process(self, rank: int) -> None:
        """A newer process took the rank over: drop what the older one had not committed."""
        given = self.given.get(rank)
        if given is not None:
            given.replace_process()

    def _note_failure(self, table: int, round_: int, error: KVStoreError) -> None:
        self.tables["failed"][table] = min(self.tables["failed"][table], round_)
        failures = self._failures.setdefault(table, {})
        failures[round_] = error
        if len(failures) > _FAILURES_KEPT:
            del failures[min(failures)]

    def _begin_next(self, tables: Ints) -> None:
        slots = self._slots.of(tables)
        for given in self.given.values():
            given.fit()
            given.clear(tables, slots)
        number, failed = self.tables["number"][tables], self.tables["failed"][tables]
        self.tables[tables] = _NEW_TABLE
        self.tables["number"][tables] = number + 1
        self.tables["failed"][tables] = failed


class Rounds:
    """The rounds of a namespace: those of all ranks together, and without synchronous rounds each rank's own.

    Args:
        num_workers: How many ranks there are.
        is_sync: Whether all rounds are for all ranks.
        bound: By how many contributions a reader may be ahead of the slowest rank; None: any number.
        same_payload: Says of (bytes of a slot, buffer, start, other buffer, start there) if both hold the same.
    """

    def __init__(
        self,
        num_workers: int,
        is_sync: bool,
        bound: int | None,
        same_payload: Callable[[int, Any, int, Any, int], bool],
    ) -> None:
        self.num_workers = num_workers
        self.slots = Slots()
        self.shared = Book(num_workers, self.slots, same_payload)
        self.left: set[int] = set()
        """The ranks whose processes left because they were done."""
        self._is_sync = is_sync
        self._bound = bound
        self._same_payload = same_payload
        self._lanes: dict[int, Book] = {}
        self._clocks: dict[int, list[int]] = {}
        """Table → the clock of each rank."""
        self._joined: dict[int, set[int]] = {}
        """Table → the ranks that have no more data until all have joined."""

    def is_shared(self, tables: Ints, rounds: Ints) -> npt.NDArray[np.bool_]:
        """Whether some rounds are those of all ranks together, as the first one of a table always is."""
        if self._is_sync:
            return np.ones(len(tables), np.bool_)
        return np.asarray((rounds == 0) | (self.shared.tables["number"][tables] == 0), np.bool_)

    def book(self, rank: int, table: int, round_: int = -1) -> Book:
        """The book of which a rank means that round of a table, or its present one."""
        if self._is_sync or not round_ or not self.shared.number(table):
            return self.shared
        return self.lane(rank, np.array([table]), np.array([round_]))

    def lane(self, rank: int, tables: Ints, rounds: Ints) -> Book:
        """The lane of a rank, in which it means those rounds of some tables.

        The first one that a process means is its first, and sets its clock. With several servers it takes the greatest
        that one of them has proposed: if they differed in who is ahead of whom, ranks could wait in a circle.
        """
        lane = self._lanes.get(rank)
        if lane is None:
            lane = self._lanes[rank] = Book(1, self.slots, self._same_payload)
        for at in np.flatnonzero(lane.tables["number"][tables] == 0):
            table, number = int(tables[at]), int(rounds[at])
            lane.tables["number"][table] = max(1, number)
            self.clocks(table)[rank] = max(self.clocks(table)[rank], number - 1)
        return lane

    def clocks(self, table: int) -> list[int]:
        """The clock of each rank."""
        return self._clocks.setdefault(table, [0] * self.num_workers)

    def joined(self, table: int) -> set[int]:
        """The ranks that have no more data until all have joined."""
        return self._joined.setdefault(table, set())

    def next_round(self, rank: int, table: int) -> int:
        """The round with which a rank should begin; a new process is beside the slowest of the others, or ahead."""
        if self._is_sync or not self.shared.number(table):
            return self.shared.number(table)
        lane = self._lanes.get(rank)
        if lane is not None and lane.number(table):
            return lane.number(table)
        clocks = self.clocks(table)
        others = [clock for r, clock in enumerate(clocks) if r != rank and self._takes_part(r, table)]
        return 1 + max(clocks[rank], min(others, default=0))

    def mismatches(self, table: int) -> int:
        """Different payloads that arrived under an identity that had one already."""
        return sum(book.mismatches.get(table, 0) for book in (self.shared, *self._lanes.values()))

    def advance(self, rank: int, table: int) -> None:
        """A round of the rank's lane is over; if the rank had joined, it is back."""
        self.joined(table).discard(rank)
        self.clocks(table)[rank] += 1

    def behind(self, rank: int, table: int) -> list[int]:
        """The ranks because of which this one may not read now."""
        if self._bound is None or self._is_sync:
            return []
        clocks = self.clocks(table)
        least = clocks[rank] - self._bound
        return [r for r, clock in enumerate(clocks) if clock < least and self._takes_part(r, table)]

    def missing_from_join(self, table: int) -> list[int]:
        """The ranks that still have data."""
        return [rank for rank in range(self.num_workers) if self._takes_part(rank, table)]

    def part_again(self, table: int) -> None:
        """All ranks have joined: from now on all take part again, side by side."""
        self.joined(table).clear()
        self._clocks[table] = [max(self.clocks(table))] * self.num_workers

    def fail_join(self, rank: int, table: int, round_: int, error: KVStoreError) -> None:
        """A rank that waits for all to join will not see that: it takes part as before, and its joining has failed."""
        self.joined(table).discard(rank)
        lane = self.book(rank, table)
        if round_ == lane.number(table) - 1:
            lane.undo(table, error)

    def begin_process(self, rank: int) -> None:
        """A process begins to stand for a rank: it takes part, in new lanes."""
        self.shared.replace_process(rank)
        self._lanes.pop(rank, None)
        for joined in self._joined.values():
            joined.discard(rank)
        self.left.discard(rank)

    def end_process(self, rank: int, is_done: bool) -> None:
        """The process of a rank has ended; where it was done, nobody needs what it will not give."""
        self.shared.replace_process(rank)
        self._lanes.pop(rank, None)
        if is_done:
            self.left.add(rank)

    def _takes_part(self, rank: int, table: int) -> bool:
        return rank not in self.joined(table) and rank not in self.left


@dataclass
class Wait:
    """A request that is answered when other ranks have come far enough: a read that is too far ahead, or a join."""

    table: int
    rank: int
    waiter: Waiter
    deadline: float
    timeout: float
    is_join: bool
    """Whether it waits for all ranks to join, rather than for weights that are recent enough."""
    answer: Callable[[], list[m.Outgoing]]
    round: int = -1
    """The round of the commit that waits; -1: it is a request to read."""

    @property
    def since(self) -> float:
        """When its time began to run."""
        return self.deadline - self.timeout

    def missing(self, rounds: Rounds) -> list[int]:
        """The ranks that it waits for; none when it can be answered."""
        return rounds.missing_from_join(self.table) if self.is_join else rounds.behind(self.rank, self.table)


class Waits:
    """The waits of one namespace; a repeated request takes the place of the former one."""

    def __init__(self, rounds: Rounds) -> None:
        self._rounds = rounds
        self._waits: dict[tuple[int, int, bytes, int], Wait] = {}

    def __len__(self) -> int:
        return len(self._waits)

    def __iter__(self) -> Iterator[Wait]:
        return iter(self._waits.values())

    def add(self, wait: Wait) -> None:
        """Keep a request until it can be answered; one that is repeated has no more time than it had."""
        key = (wait.table, wait.rank, *wait.waiter)
        known = self._waits.get(key)
        if known is not None:
            wait.deadline = known.deadline
        self._waits[key] = wait

    def contributed(self, table: int, rank: int, now: float) -> None:
        """A contribution came: its rank waits no more for all to join, and whoever does may wait as long as before."""
        for key, wait in list(self._waits.items()):
            if wait.is_join and wait.table == table:
                if wait.rank == rank:
                    del self._waits[key]
                wait.deadline = now + wait.timeout

    def take_ready(self) -> list[Wait]:
        """Take out the waits that are over."""
        return self.take(lambda wait: not wait.missing(self._rounds))

    def take(self, is_over: Callable[[Wait], bool]) -> list[Wait]:
        """Take out the waits of which that is true."""
        found = [key for key, wait in self._waits.items() if is_over(wait)]
        return [self._waits.pop(key) for key in found]


def _grown(array: Any, size: int, fill: Any) -> Any:
    """The array with room for so many records; new ones are like `fill`."""
    if len(array) >= size:
        return array
    more = np.full(max(size, 2 * len(array)), fill, array.dtype)
    more[: len(array)] = array
    return more
