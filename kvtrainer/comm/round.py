"""Rounds as a worker drives them: slices and commits out, new weights in; repeated, refused, held or failed.

A round of any number of tables goes to all servers that hold them, one leg each. It ends in the same way for every
worker. If it fails on one server, this worker gives it up on all of them.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from kvstore_server.codec import torch_dtype
from kvstore_server.errors import KVStoreError, ProtocolError, RoundAbortedError, describe, from_wire
from kvstore_server.norms import Decision, Guard, Measured, combine
from kvstore_server.optimizer.gathering import put_rows
from kvstore_server.plan import LONG, Slice, row_numel
from kvstore_server.protocol import messages as m
from kvstore_server.protocol.frames import SENT_ALONE
from kvstore_server.rounds import Ints
from kvstore_server.rows import PACKED_ROWS, RowSet, cut_rows, decode_rows, num_slices, pack_rows
from kvtrainer.comm.ahead import Ahead, same_bits
from kvtrainer.comm.mapped import MappedWeights
from kvtrainer.comm.mapped_rows import MappedRows, Shown
from kvtrainer.comm.session import Calls, Session
from kvtrainer.comm.tables import RemoteTable, Tables

_log = logging.getLogger(__name__)

Arenas = Mapping[str, Tensor]
"""dtype name → flat tensor laid out as the Plan says; padding behind the last key may be missing. Row-sparse keys are
not in it."""
Source = Callable[[int, int], Tensor]
"""(first element, number of elements) → these values of a key, flat, on the CPU."""

GIVE_UP_TIMEOUT = 5.0
"""Seconds to wait for servers to confirm that a round was given up."""
_TOGETHER = 1024
"""So many tables have their slices and commits in messages of their own, so that the servers begin with the first ones
while this worker still sends the last."""
_LAYOUTS_KEPT = 16


class Contribution(NamedTuple):
    """One worker's part in a round of some tables.

    Args:
        tables: The tables, in any order.
        values: The values that this rank gives to each table; None gives nothing but takes part, as with `veto` and
            `joined`.
        outs: Where the new weights of each table are written; None means that they are not wanted.
        rescale: Factor of the contribution; None means the optimizer's own.
        hyper: The hyper-parameters that go with the commits; empty when nothing changed.
        absent: Keys (by index) of every table that are left out; a slice of which all keys are absent is not sent.
        rows: (position of the table, key by index) → rows of it, of which this rank has only those; `values` do not
            count there.
        sources: Row-sparse key (by index) → its values, in the first round or with `assign`.
        lent: Key (by index) → its values, flat, which are not in `values`; of the only table.
        born: Slice (by index) of those → its values in memory of its server, which reads them there.
        veto: The values are not finite: they are not sent, and the round changes nothing for anybody.
        assign: The lowest rank's values replace the weights; every rank must say so.
        joined: This rank has no more data: it gives nothing, until all ranks have said so.
        is_kept: `outs` still hold what the tables' last round with this mark left there: rows that have not changed
            since then need not come again.
        guard: The sum is measured, and decided about, before it is used; every rank must want that.
        unread: Keys (by index) of which the new weights do not matter; slices that hold nothing else are not written.
        mapped: Maps `outs` of the only table, as far as servers show their memory.
        priority: Where messages have to queue, those of a higher one go first.
    """

    tables: Sequence[RemoteTable]
    values: Sequence[Arenas] | None
    outs: Sequence[Arenas] | None
    rescale: float | None = None
    hyper: bytes = b""
    absent: frozenset[int] = frozenset()
    rows: Mapping[tuple[int, int], RowSet] = {}
    sources: Mapping[int, Source] = {}
    lent: Mapping[int, Tensor] = {}
    born: Mapping[int, Tensor] = {}
    veto: bool = False
    assign: bool = False
    joined: bool = False
    is_kept: bool = False
    guard: Guard | None = None
    unread: frozenset[int] = frozenset()
    mapped: MappedWeights | None = None
    priority: int = 0

    def gives(self, table: int, piece: Slice) -> bool:
        """Whether this rank gives the numbers of a slice of a table (by position), or of some of its keys."""
        first = piece.segments[0].key
        if (table, first) in self.rows and len(self.tables[table].plan.slices_with(first)) > 1:
            return False  # rows go with the first of several slices
        if first not in self.sources and not self.tables[table].plan.is_resident(piece):
            return False
        return not self.absent or any(segment.key not in self.absent for segment in piece.segments)

    def of(self, positions: Sequence[int]) -> Contribution:
        """The part in a round of some of the tables, which have no rows."""
        return self._replace(
            tables=[self.tables[at] for at in positions],
            values=None if self.values is None else [self.values[at] for at in positions],
            outs=None if self.outs is None else [self.outs[at] for at in positions],
        )


RowsWanted = tuple[RemoteTable, int, Tensor]
"""Some rows of one key: its table, its index in the plan, and ids (int64, distinct and ascending). Its slices hold
whole rows."""


class RowsAsked(NamedTuple):
    """Rows of keys that servers were asked for."""

    calls: Calls
    places: list[tuple[RemoteTable, Tensor, Ints]]
    """Of each request its table, and where its rows go."""
    outs: list[Tensor]


class _Encoded(NamedTuple):
    """A slice as it is sent."""

    form: bytes
    """As of Contribute."""
    data: Tensor


class _Where(NamedTuple):
    """A large slice, by position; or where in the layout's memory neighbouring ones are gathered."""

    slice: int
    begin: int = -1
    end: int = -1


class _Layout:
    """The slices of some tables on one server, in the order of their slots, and where they lie in memory here.

    It is made once for calls of the same tables. Large slices are sent from and written to where they are; all others
    are gathered in one piece of memory.

    Args:
        tables: Tables, of which some may have no slices on the server.
        first: The position of the first one in the round.
    """

    def __init__(self, server: int, tables: Sequence[RemoteTable], first: int, book: Tables) -> None:
        self.server = server
        index = np.array([table.index for table in tables], np.int64)
        numbers = book.number[server, index]
        here = np.flatnonzero(numbers >= 0)
        here = here[np.argsort(numbers[here])]
        self.at: list[int] = (first + here).tolist()
        """The position in the round of each table that is here."""
        self.tables = [tables[at] for at in here.tolist()]
        self.index = index[here]
        self.position = {number: at for at, number in enumerate(numbers[here].tolist())}
        """Number of the table on the server → its position here."""
        by_table = [table.plan.slices_of(server) for table in self.tables]
        self.takes_half = any([table.takes_half for table in self.tables])
        """As of the tables, which are alike in that."""
        self.pieces = [piece for pieces in by_table for piece in pieces]
        self.table = [at for at, pieces in enumerate(by_table) for _ in pieces]
        """The position of each slice's table."""
        self.is_resident = bytes(
            [t.plan.is_resident(p) for t, pieces in zip(self.tables, by_table, strict=True) for p in pieces]
        )
        self.resident = [at for at, is_resident in enumerate(self.is_resident) if is_resident]
        self.num_resident = np.bincount(
            np.array(self.table, np.int64)[self.resident], minlength=len(self.tables)
        )
        """How many slices of each table travel whole."""
        self.nbytes = [piece.length * torch_dtype(piece.dtype).itemsize for piece in self.pieces]
        self.begin: list[int] = []
        """Where a gathered slice begins in memory; -1 for others."""
        self.size = 0
        for is_resident, nbytes in zip(self.is_resident, self.nbytes, strict=True):
            is_gathered = is_resident and nbytes < SENT_ALONE
            self.begin.append(self.size if is_gathered else -1)
            self.size += nbytes if is_gathered else 0
        starts = book.slot[server, self.index].tolist()
        slots = [
            start + at for start, pieces in zip(starts, by_table, strict=True) for at in range(len(pieces))
        ]
        self.slots = {slot: at for at, slot in enumerate(slots)}
        self.pushes = np.zeros((len(slots), m.PUSH_WORDS), np.int64)
        self.pushes[:, 0], self.pushes[:, 3] = slots, self.nbytes
        self.push_table = np.array(self.table, np.int64)
        self.commits = np.zeros((len(self.tables), m.COMMIT_WORDS), np.int64)
        self.commits[:, 0], self.commits[:, 2] = numbers[here], self.num_resident
        self.commits[:, 5] = m.WANTS_WEIGHTS * (self.num_resident > 0)
        self.spare: _Memory | None = None
        """Memory of a round that is over."""
        self.mapped: Ints | None = None
        """The slices that are mapped: all that ever have a place on the server. None if some may be missing."""
        self.runs = self.runs_of(self.resident)
        """Where all slices lie, if all are given."""
        self._plain: tuple[tuple[frozenset[object], ...], set[int]] | None = None
        """What a rank left out last, and the slices, by position, that it gave all the same."""

    @cached_property
    def _stack_ends(self) -> list[int]:
        """Of each slice, where those end that its key has for itself; otherwise the next one."""
        where = [(of, piece.segments[0].key) for of, piece in zip(self.table, self.pieces, strict=True)]
        return _ends(where)

    @cached_property
    def _run_ends(self) -> list[int]:
        """The same, of keys that lie side by side together."""
        runs = [table.plan.run_of for table in self.tables]
        keys = [(of, piece.segments[0].key) for of, piece in zip(self.table, self.pieces, strict=True)]
        return _ends([(of, runs[of].get(key, key)) for of, key in keys])

    @cached_property
    def _place(self) -> dict[tuple[int, int], int]:
        """Table (index) and slice → its position."""
        index = self.index.tolist()
        return {
            (index[of], p.index): at for at, (of, p) in enumerate(zip(self.table, self.pieces, strict=True))
        }

    def place_of(self, table: RemoteTable, piece: Slice) -> int:
        """Find the position of a slice of one of the tables."""
        return self._place[table.index, piece.index]

    def given(self, contribution: Contribution, encoded: Mapping[int, Mapping[int, _Encoded]]) -> list[int]:
        """The slices, by position, that a rank gives which leaves some out or has some encoded."""
        of = contribution.absent, frozenset(contribution.rows), frozenset(contribution.sources)
        if self._plain is None or self._plain[0] != of:
            pairs = enumerate(zip(self.table, self.pieces, strict=True))
            self._plain = of, {at for at, (n, piece) in pairs if contribution.gives(self.at[n], piece)}
        places = [self._place.get((index, piece)) for index, pieces in encoded.items() for piece in pieces]
        return sorted(self._plain[1].union([at for at in places if at is not None]))

    def end_of_rows(self, at: int, raw: Tensor) -> int:
        """Where the slices end that rows are of, which came back for one: without any, all of the key."""
        return min(at + num_slices(raw), self._run_ends[at]) if len(raw) else self._stack_ends[at]

    def runs_of(self, given: Sequence[int]) -> list[_Where]:
        """List where slices, by position, lie, one behind the other."""
        runs: list[_Where] = []
        for at in given:
            begin, end, before = self.begin[at], self.begin[at] + self.nbytes[at], runs[-1:]
            if begin < 0:
                runs.append(_Where(at))
            elif before and before[0].end == begin:
                runs[-1] = before[0]._replace(end=end)
            else:
                runs.append(_Where(-1, begin, end))
        return runs


class _Memory:
    """The gathered slices of a layout, and a view of the numbers of each."""

    def __init__(self, layout: _Layout) -> None:
        self.raw = torch.zeros(layout.size, dtype=torch.uint8)
        self.views = [
            self.raw[begin : begin + nbytes].view(torch_dtype(piece.dtype))[: piece.used]
            if begin >= 0
            else self.raw
            for piece, begin, nbytes in zip(layout.pieces, layout.begin, layout.nbytes, strict=True)
        ]


class _Leg:
    """The part of a round that is on one server: what it has said, by position of table and slice in the layout."""

    def __init__(self, layout: _Layout, round_: Round, book: Tables) -> None:
        contribution = round_.contribution
        self.layout = layout
        self.server = layout.server
        self.number = 0
        """Of the request."""
        self.memory = layout.spare or _Memory(layout)
        layout.spare = None
        self.given: list[int] = [] if contribution.values is None else layout.resident
        """The slices that this rank gives."""
        self.kept: frozenset[int] = frozenset()
        """Those of them that were sent ahead, and have not changed since."""
        self.generation = 0
        """Of the others."""
        self.is_announced = False
        """New weights may come before all slices are sent, so they must not come to where those are."""
        if self.given is layout.resident and (
            contribution.absent or contribution.rows or contribution.sources
        ):
            self.given = layout.given(contribution, round_.encoded)
        wants = contribution.outs is not None
        self.is_coming = bytearray(layout.is_resident if wants else len(layout.pieces))
        """Whether the weights of each slice are still to come."""
        self.coming: list[int] = layout.num_resident.tolist() if wants else [0] * len(layout.tables)
        """How many slices of each table are still to come; with none, a plain acknowledgement is."""
        self.open = {at for at, coming in enumerate(self.coming) if coming or not round_.is_read}
        """Tables of which the server has not said yet how the round ended."""
        self.rounds = book.round[layout.index]
        self.commits = layout.commits.copy()
        """A row for each table, as of Contribute."""
        self.commits[:, 1] = self.rounds
        if self.given is not layout.resident:
            self.commits[:, 2] = np.bincount(layout.push_table[self.given], minlength=len(layout.tables))
        self.commits[:, 4] = (book.held if contribution.is_kept else book.version)[self.server][layout.index]
        flags = m.VETOES * contribution.veto | m.ASSIGNS * contribution.assign
        flags |= m.HAS_JOINED * contribution.joined | m.WANTS_DELTA * contribution.is_kept
        flags |= m.WANTS_HALF * layout.takes_half
        if (
            wants
            and contribution.mapped is not None
            and contribution.mapped.is_on
            and round_.shares_memory(self.server)
        ):
            flags |= m.MAPS_WEIGHTS | m.KNOWS_PLACES * (layout.mapped is not None)
        if flags or not wants:
            self.commits[:, 5] = (layout.commits[:, 5] if wants else 0) | flags
        self.came = [-1] * len(layout.tables)
        """The version of the weights that came."""
        self.gathered: list[int] = []
        """Slices whose new weights are in memory."""
        self.staged: list[tuple[int, int, Tensor]] = []
        """(slice, kind, bytes) of other new weights, which wait for those of the other servers."""
        self.shown: list[tuple[int, int]] = []
        """(slice, place) of those that can be read in their place."""
        self.applied: dict[int, int] = {}
        """Table → the version right after this worker's contribution."""
        self.failed: dict[int, int] = {}
        """Table → the next round after the one that failed; -1 when the server did not say."""
        self.skipped: set[int] = set()
        """Tables whose round was not applied because of a veto or a decision."""
        self.held: dict[int, m.Held] = {}
        """Table → what the server measured of a sum that it holds."""
        self.complete: set[int] = set()
        """Tables of which all has come, except for what was measured."""

    def follow(self, kept: Collection[int], are_all: bool) -> None:
        """Come after slices of the only table that were sent ahead; with none (by index) of them, begin anew.

        Args:
            are_all: All that were sent count as they are, so the others need no other generation.
        """
        self.kept = frozenset([at for at in self.given if self.layout.pieces[at].index in kept])
        self.generation = int(not are_all)
        self.commits[:, 3] = self.generation * (len(self.given) - len(self.kept))
        self.commits[:, 5] |= m.ANEW * (not kept)

    def drop_former(self, table: int) -> None:
        """What has come of new weights of a table was taken back: they all come again."""
        layout = self.layout
        self.coming[table], self.came[table] = int(layout.num_resident[table]), -1
        for at in layout.resident:
            self.is_coming[at] |= layout.table[at] == table
        self.gathered = [at for at in self.gathered if layout.table[at] != table]
        self.staged = [one for one in self.staged if layout.table[one[0]] != table]
        self.shown = [one for one in self.shown if layout.table[one[0]] != table]


class Round:
    """A round under way, and how it ended."""

    def __init__(
        self,
        contribution: Contribution,
        started: float,
        is_read: bool = False,
        shares_memory: Callable[[int], bool] = lambda _: False,
    ) -> None:
        self.contribution = contribution
        self.shares_memory = shares_memory
        """Whether a server may show its memory instead of sending new weights."""
        self.started = started
        self.is_read = is_read
        """Whether weights are only read."""
        self.legs: list[_Leg] = []
        self.open: list[_Leg] = []
        """The legs on which something is still to be said."""
        self.error: KVStoreError | None = None
        self.absent: dict[str, set[int]] = {}
        """Table → keys that no worker contributed to."""
        self.in_force: dict[str, m.InForce] = {}
        """Table → what holds for those that have joined."""
        self.vetoes: dict[str, tuple[int, ...]] = {}
        """Table → ranks because of which its round was not applied; none, where that was decided."""
        self.decided: dict[str, tuple[Measured | None, Decision]] = {}
        """Table → all that was measured, and what is made of it."""
        self.encoded: dict[int, dict[int, _Encoded]] = {}
        """Table (index) → its slices as they are sent, where that is not as plain numbers."""
        self.kept: frozenset[int] | None = None
        """The slices (by index) of the only table that were sent ahead and count as they are; None: nothing was."""
        self.aborted: set[str] = set()
        """Tables whose round was given up as soon as one server had failed it."""
        self.is_over = False
        self.early: set[int] = set()
        """Slices (by index) of the only table whose new weights were written before the round was over."""
        self.rows: dict[tuple[int, int], list[Tensor | None]] = {}
        """(position of the table, first key of a slice) → ids of its rows that came, by server; None for a whole slice.
        Only where workers keep what they have."""

    def written(self) -> dict[tuple[int, int], Tensor | None]:
        """Tell which rows of each key, or of the first key of each slice, came; None: all."""
        found: dict[tuple[int, int], Tensor | None] = {}
        for key, all_ids in self.rows.items():
            some = [ids for ids in all_ids if ids is not None]
            found[key] = torch.cat(some) if len(some) == len(all_ids) else None
        return found

    def legs_of(self, table: RemoteTable) -> Iterator[tuple[_Leg, int]]:
        """The legs that a table has, and its position there."""
        for leg in self.legs:
            at = leg.layout.position.get(table.numbers.get(leg.server, -1))
            if at is not None:
                yield leg, at

    def describe_end(self) -> str:
        """Say what servers have yet to do."""
        tables = sorted({leg.layout.tables[at].name for leg in self.open for at in leg.open})
        return f"finish with {', '.join(map(repr, tables[:3]))}{', …' if len(tables) > 3 else ''}"

    def note(self, error: BaseException) -> None:
        """Keep the error that has ended the round here, for those who ask later."""
        if self.error is None and isinstance(error, KVStoreError):
            self.error = error

    def is_lost(self, table: RemoteTable) -> bool:
        """Whether the round of a table, which is over, was not applied on every server, as far as is known here."""
        return any(at in leg.open or at in leg.failed for leg, at in self.legs_of(table))


class Rounds:
    """Runs rounds over a session."""

    def __init__(self, session: Session) -> None:
        self.tables = Tables(session.num_servers)
        self._session = session
        self.open: dict[int, Round] = {}
        """Table (index) → its round that is under way."""
        self._layouts: dict[tuple[int, ...], list[_Layout]] = {}
        """Tables (by index, in the order of a call) → their layouts, for the same calls come again and again."""
        self._several: list[tuple[int, ...]] = []
        """Those of several tables, oldest first."""
        self._mapped_rows: dict[tuple[int, int], MappedRows | None] = {}
        """Table and key (by index) → its rows in its servers' memory; None where they have to be asked for."""

    def start(self, contribution: Contribution, is_read: bool = False) -> Round:
        """Send one round of some tables and return at once; or, to have weights only read, ask for those.

        What is given must not change before the round was waited for. A table has one round under way: an earlier one
        is waited for first, so an error of it is raised here. With a store that queues, a round of higher priority
        overtakes earlier ones.
        """
        for table in contribution.tables:
            if table.index in self.open or self.tables.broken:
                self.settle(table)
        session, tables = self._session, contribution.tables
        round_ = Round(contribution, session.clock(), is_read, session.shares_memory)
        self.open.update(dict.fromkeys([table.index for table in tables], round_))
        try:
            ahead = tables[0].ahead if len(tables) == 1 and not is_read else None
            if ahead is not None and (sent := ahead.sent(tables[0].round)):
                round_.kept = _kept(contribution, sent)
                if contribution.values is not None:
                    ahead.end(round_.kept)
            if contribution.rows or any([table.compressor for table in tables]):
                round_.encoded = _encode(contribution, round_.kept or ())
            key = tuple([table.index for table in tables])
            for layout in self._layouts.get(key) or self._lay_out(key, tables):
                leg = _Leg(layout, round_, self.tables)
                leg.number = session.next_number(partial(self._take, round_, leg))
                if round_.kept is not None:
                    leg.follow(round_.kept, len(round_.kept) == len(sent))
                round_.legs.append(leg)
            round_.open = [leg for leg in round_.legs if leg.open]
            if session.is_far and len(tables) == 1 and _is_plain(contribution):
                self._announce(round_)
            for first in range(0, len(round_.open), session.num_servers):
                last = []
                for leg in round_.open[first : first + session.num_servers]:
                    given = [at for at in leg.given if at not in leg.kept] if leg.kept else leg.given
                    *others, final = self._messages(round_, leg, given)
                    for body in others:
                        session.send(leg.server, leg.number, body, contribution.priority)
                    last.append((leg, final))
                # The commits go with the last slices for all servers: who dies before has begun nothing.
                for leg, final in last:
                    session.send(leg.server, leg.number, final, contribution.priority)
        except BaseException as error:
            self._end(round_, error)
            raise
        return round_

    def send_ahead(self, table: RemoteTable, piece: Slice, parts: Sequence[Tensor]) -> None:
        """Send a slice of the open round before its commit, without which it does not count; returns at once.

        The round takes it as it was, if it still holds the same bits when the round is started. Nothing happens where
        it was sent already.

        Args:
            parts: The numbers of each of its keys, flat; copied.

        Raises:
            KVStoreError: it cannot be sent, or not be compressed: it goes with the commit.
        """
        ahead = table.ahead = table.ahead or Ahead()
        sent = ahead.sent(table.round)
        if table.index in self.open or piece.index in sent:
            return
        numbers, form = ahead.copy(piece, parts), b""
        if table.compressor is not None:
            if not sent:
                table.compressor.begin()
            form = table.compressor.packed_codec
            numbers = table.compressor.encode_ahead(numbers[: piece.used], piece)
        # From here on it counts as sent: if it does not get there, the server will ask for it.
        ahead.note(piece, table.round)
        pushes = m.matrix([(table.slot_of(piece), table.round, 0, numbers.nbytes)], m.PUSH_WORDS)
        body = m.Contribute(pushes, (numbers,), _NO_COMMITS, form, timeout=self._session.options.timeout)
        self._session.send(piece.server, self._session.next_number(), body)

    def initialise(self, contribution: Contribution) -> None:
        """Give tables rank 0's values, on all ranks together; blocks.

        A table that has values already, because the others have gone on without a process of this rank, is read.
        """
        fresh: list[int] = []
        known: list[int] = []
        for at, table in enumerate(contribution.tables):
            (known if table.is_initialised else fresh).append(at)
        if fresh:
            self.wait(self.start(contribution.of(fresh)))
        if known and contribution.outs is not None:
            read = contribution.of(known)
            self.pull(read.tables, read.outs or ())

    def wait(self, round_: Round, anew: bool = False) -> None:
        """Block until the round is over; new weights are then in `outs`.

        Args:
            anew: Servers have their time from now on, not since the start: nobody has listened to them meanwhile.

        Raises:
            KVStoreError: what the servers reported, the same on every worker of the round.
            DeadlineError, ServerUnreachableError: they reported nothing in time.
        """
        if round_.is_over:
            return
        if anew:
            round_.started = self._session.clock()
        try:
            again = partial(self._send_again, round_, given=())
            if not self._session.wait(round_.open, again, round_.started):
                raise self._session.late(round_.open, round_.describe_end())
        except BaseException as error:
            self._end(round_, error)
            round_.note(error)
            raise
        self._end(round_, round_.error)
        if round_.error is not None:
            raise round_.error
        for table in round_.contribution.tables if self.tables.broken else ():
            if table.broken is not None:
                raise table.broken

    def send_off(self, round_: Round) -> None:
        """Block until all that this worker gives to a round has left its queues. Raises as `wait`."""
        self._listen_while(round_, partial(_is_queueing, self._session))

    def wait_for(self, round_: Round, keys: Collection[int]) -> None:
        """Block until new weights of some keys (by index) of the only table are in `outs`; the round may go on.

        Those of others that are here are written as well, although the round may still fail. For rounds of which all
        weights come as whole slices to where they are copied.

        Raises:
            KVStoreError: as `wait`; the round is over then.
        """
        [table] = round_.contribution.tables
        layouts = {leg.server: leg.layout for leg in round_.legs}
        places: dict[int, list[int]] = {server: [] for server in layouts}
        for piece in [piece for key in keys for piece in table.plan.slices_with(key)]:
            places[piece.server].append(layouts[piece.server].place_of(table, piece))
        self._listen_while(round_, partial(_lacks, places))
        if round_.error is not None or not round_.open:
            self.wait(round_)
            return
        for leg in round_.legs:
            self._write_early(round_, leg)

    def _listen_while(self, round_: Round, holds: Callable[[_Leg], bool]) -> None:
        """Take answers to a round while something holds of a leg on which something is still to be said."""
        if round_.is_over:
            return
        waiting = _Those(round_.open, holds)
        try:
            again = partial(self._send_again, round_, given=())
            if not self._session.wait(waiting, again, self._session.clock()):
                raise self._session.late(waiting, round_.describe_end())
        except BaseException as error:
            self._end(round_, error)
            round_.note(error)
            raise

    def settle(self, table: RemoteTable) -> None:
        """Wait for the round of a table that is under way, if there is one.

        Raises:
            KVStoreError: that round failed, or an earlier failure left the servers apart.
        """
        round_ = self.open.get(table.index)
        if round_ is not None:
            self.wait(round_)
        if table.index in self.tables.broken:
            raise self.tables.broken[table.index]

    def settle_all(self) -> None:
        """Wait for every round under way; raises what the first failed one raises."""
        while self.open:
            self.wait(next(iter(self.open.values())))

    def pull(self, tables: Sequence[RemoteTable], outs: Sequence[Arenas]) -> None:
        """Write the present weights of whole tables into arenas, after this worker's own rounds of them."""
        self.wait(self.start(Contribution(tables, None, outs), is_read=True))

    def pull_rows(self, wanted: Sequence[RowsWanted]) -> list[Tensor]:
        """Fetch the present values of some rows of keys, after this worker's own rounds of their tables; blocks.

        Returns (number of ids, elements of a row) each, on the CPU.

        Raises:
            KVStoreError: what a server answered.
            DeadlineError, ServerUnreachableError: a server did not answer in time.
        """
        return self.take_rows(self.ask_rows(wanted))

    def ask_rows(self, wanted: Sequence[RowsWanted]) -> RowsAsked:
        """Ask for rows as `pull_rows` does, and return at once; then `take_rows`, or `drop_rows`."""
        timeout = self._session.options.timeout
        outs: list[Tensor] = []
        requests: list[tuple[int, m.PullRows]] = []
        places: list[tuple[RemoteTable, Tensor, Ints]] = []
        for table, keys, ids in _side_by_side(wanted):
            self.settle(table)
            spec, lengths = table.plan.specs[keys[0]], list(map(len, ids))
            rows = table.plan.rows(keys[0])
            given = ids[0]
            if len(keys) > 1:
                rows = table.plan.joined_rows(keys[0])
                starts = dict(zip(rows.keys, rows.bounds, strict=True))
                given = torch.cat([own + starts[key] for key, own in zip(keys, ids, strict=True)])
            out = torch.empty(sum(lengths), row_numel(spec), dtype=torch_dtype(spec.dtype))
            outs += torch.split(out, lengths)
            for block, where, own in rows.by_server(given.numpy()):
                where = np.arange(len(given))[where]
                for at in range(0, len(own), block.most):
                    some = own[at : at + block.most].astype("<i8").tobytes()
                    first = block.pieces[0].segments[block.position].key
                    body = m.PullRows(table.numbers[block.server], first, some, timeout)
                    requests.append((block.server, body))
                    places.append((table, out, where[at : at + block.most]))
        return RowsAsked(self._session.begin(requests), places, outs)

    def read_rows(self, table: RemoteTable, key: int, ids: Tensor) -> Tensor | None:
        """Copy rows (any int64 ids that the key has) of a key out of its servers' memory, after this worker's rounds.

        Only in synchronous rounds. None where they cannot be read there: then they have to be asked for.
        """
        self.settle(table)
        where = table.index, key
        if where not in self._mapped_rows:
            self._mapped_rows[where] = self._map_rows(table, key)
        mapped, servers = self._mapped_rows[where], list(table.plan.rows(key).blocks)
        versions = self.tables.newest[servers, table.index]
        rows = mapped.take(ids) if mapped is not None and (versions >= 0).all() else None
        if rows is not None:
            self.tables.version[servers, table.index] = versions
        return rows

    def _map_rows(self, table: RemoteTable, key: int) -> MappedRows | None:
        """Map the slices of a key; None where that is impossible."""
        session, servers, shown = self._session, list(table.plan.rows(key).blocks), dict[int, Shown]()
        if not all(map(session.shares_memory, servers)):
            return None
        answers = session.call_all([(server, m.ShowRows(table.numbers[server])) for server in servers])
        for server, answer in zip(servers, answers, strict=True):
            assert isinstance(answer, m.Shown)
            pieces = {
                table.slot_of(piece): piece for piece in table.plan.slices_with(key) if piece.server == server
            }
            for slot, _, place in answer.parts.tolist():
                memory = session.memory_at(server, place) if slot in pieces else None
                if memory is not None:
                    shown[pieces[slot].index] = Shown(*memory)
        try:
            return MappedRows(table.plan, key, shown)
        except OSError as error:
            _log.debug("rows of %s are asked for: %s", table.plan.specs[key].key, error)
            return None

    def drop_rows(self, asked: RowsAsked) -> None:
        """Have no use for rows that were asked for."""
        self._session.drop(asked.calls)

    def take_rows(self, asked: RowsAsked) -> list[Tensor]:
        """Block for rows that were asked for; result and errors as of `pull_rows`."""
        options = self._session.options
        answers = self._session.finish(asked.calls, options.timeout + options.dead_after)
        read: dict[tuple[int, int], int] = {}
        rows = zip(asked.calls.requests, asked.places, answers, strict=True)
        for (server, _), (table, out, where), answer in rows:
            assert isinstance(answer, m.Weights)
            [(_, version, _, source, start, nbytes)] = _pieces(answer)
            values = source[start : start + nbytes].view(out.dtype)
            put_rows(out, torch.from_numpy(where), values.view(-1, out.shape[1]))
            read[server, table.index] = min(version, read.get((server, table.index), version))
        for (server, index), version in read.items():
            self.tables.version[server, index] = version
        return asked.outs

    # ---------------------------------------------------------------- sending

    def _lay_out(self, key: tuple[int, ...], tables: Sequence[RemoteTable]) -> list[_Layout]:
        """Lay out what goes to each server in calls of these tables, and keep that for the next ones."""
        if len(key) > 1:
            self._several.append(key)
            if len(self._several) > _LAYOUTS_KEPT:
                del self._layouts[self._several.pop(0)]
        every = [
            _Layout(server, tables[first : first + _TOGETHER], first, self.tables)
            for first in range(0, len(tables), _TOGETHER)
            for server in range(self._session.num_servers)
        ]
        self._layouts[key] = [layout for layout in every if layout.tables]
        return self._layouts[key]

    def _messages(self, round_: Round, leg: _Leg, given: Sequence[int]) -> Iterator[m.Contribute | m.Pull]:
        """The messages that carry some slices of a leg, and with the last of them the commits of what is not over."""
        layout, contribution, timeout = leg.layout, round_.contribution, self._session.options.timeout
        commits = leg.commits if len(leg.open) == len(leg.commits) else leg.commits[sorted(leg.open)]
        if round_.is_read:
            yield m.Pull(tuple(commits[:, 0].tolist()), timeout)
            return
        batches: list[tuple[bytes, Ints, tuple[Tensor, ...]]] = []
        plain: Sequence[int] = given
        if round_.encoded:
            plain = []
            forms: dict[bytes, list[tuple[int, Tensor]]] = {}
            for at in given:
                of = int(layout.index[layout.table[at]])
                found = round_.encoded.get(of, {}).get(layout.pieces[at].index)
                if found is None:
                    plain.append(at)
                else:
                    forms.setdefault(found.form, []).append((at, found.data))
            for form, encoded in forms.items():
                some, data = zip(*encoded, strict=True)
                batches.append((form, np.array(some, np.int64), data))
        small = [at for at in plain if layout.begin[at] >= 0]
        if small and contribution.values is not None:
            sources = [_given(contribution, layout, at) for at in small]
            torch._foreach_copy_([leg.memory.views[at] for at in small], sources)
        groups: Sequence[Sequence[int]] = [plain] if plain else []
        if contribution.born:
            groups = _apart(contribution, layout, plain)
        for own in groups:
            runs = layout.runs if own is layout.resident else layout.runs_of(own)
            payloads = [
                _whole(contribution, layout, at) if at >= 0 else leg.memory.raw[begin:end]
                for at, begin, end in runs
            ]
            batches.append((b"", np.array(own, np.int64), tuple(payloads)))
        if (
            len(given) > 1
            and sum([data.nbytes for _, _, payloads in batches for data in payloads]) > SENT_ALONE
        ):
            batches.append((b"", _NONE, ()))  # commits go when the slices are on their way to all servers
        last = len(batches) - 1
        for number, (form, where, data) in enumerate(batches or [(b"", _NONE, ())]):
            pushes = layout.pushes[where]
            pushes[:, 1] = leg.rounds[layout.push_table[where]]
            if leg.generation:
                pushes[:, 2] = [at not in leg.kept for at in where.tolist()]
            if form:
                pushes[:, 3] = [one.nbytes for one in data]
            if number < last:
                yield m.Contribute(pushes, data, _NO_COMMITS, form, timeout=timeout)
                continue
            numbers = commits[:, 0].tolist() if contribution.absent else ()
            absent = tuple([(number, key) for number in numbers for key in sorted(contribution.absent)])
            hold = contribution.guard.norm_type if contribution.guard is not None else 0.0
            yield m.Contribute(
                pushes, data, commits, form, contribution.hyper, absent, contribution.rescale, timeout, hold
            )

    def _send_again(self, round_: Round, leg: _Leg, given: Sequence[int]) -> None:
        """Send slices that were lost, and commit again what is not over yet."""
        for body in self._messages(round_, leg, given):
            self._session.send(leg.server, leg.number, body, round_.contribution.priority)

    def _announce(self, round_: Round) -> None:
        """Tell servers what the commits will say, before they get the slices that they can use one by one."""
        contribution, timeout = round_.contribution, self._session.options.timeout
        for leg in round_.open:
            num_kept, size = len(leg.kept) if leg.generation else 0, len(leg.layout.resident)
            if len(leg.given) in (0, size) and size > 1 and not num_kept:
                leg.is_announced = True
                commits = leg.commits.copy()
                commits[:, 5] |= m.ANNOUNCES
                body = m.Contribute(
                    leg.layout.pushes[_NONE],
                    (),
                    commits,
                    hyper=contribution.hyper,
                    rescale=contribution.rescale,
                    timeout=timeout,
                )
                self._session.send(leg.server, leg.number, body, contribution.priority)

    # ---------------------------------------------------------------- receiving

    def _take(self, round_: Round, leg: _Leg, _: int, reply: m.ReplyBody) -> None:
        """Note what a server says about a round under way."""
        position = leg.layout.position
        if isinstance(reply, m.Weights):
            self._take_weights(round_, leg, reply)
        elif isinstance(reply, m.Shown):
            self._take_places(round_, leg, reply)
        elif isinstance(reply, m.Done):
            known = [(position[n], version) for n, _, version in reply.rounds.tolist() if n in position]
            leg.applied.update(known)
            self._finish(round_, leg, [at for at, _ in known if not leg.coming[at]])
        elif isinstance(reply, m.Failed):
            self._take_failure(round_, leg, reply)
        elif (
            isinstance(reply, m.Held | m.Absent | m.Vetoed | m.InForce | m.Missing)
            and reply.table in position
        ):
            at = position[reply.table]
            table = leg.layout.tables[at]
            if isinstance(reply, m.Held):
                self._take_held(round_, leg, at, reply)
            elif isinstance(reply, m.Absent):
                round_.absent.setdefault(table.name, set()).update(reply.keys)
            elif isinstance(reply, m.InForce):
                round_.in_force[table.name] = reply
            elif isinstance(reply, m.Vetoed):
                self._take_veto(round_, leg, at, reply)
            elif table.round == reply.round:
                asked = [leg.layout.slots.get(slot) for slot in reply.slots]
                lost = sorted(set(leg.given).intersection(asked))
                _log.warning("%s lost %d slices of round %d; sending them again",
                             self._session.describe(leg.server), len(lost), reply.round)  # fmt: skip
                self._send_again(round_, leg, lost)

    def _take_weights(self, round_: Round, leg: _Leg, weights: m.Weights) -> None:
        """Keep new weights until all have come: until then the round may still fail, or be taken back."""
        layout = leg.layout
        finished = []
        runs: list[tuple[Tensor, int, int, int]] = []
        """(source, where it begins there and ends, where it begins in memory): neighbours here and there together."""
        for slot, version, kind, source, start, nbytes in _pieces(weights):
            at = layout.slots.get(slot)
            if at is None:
                continue
            if -1 < leg.came[layout.table[at]] < version and layout.table[at] in leg.open:
                leg.drop_former(layout.table[at])
            end = at + 1 if kind != m.ROWS else layout.end_of_rows(at, source[start : start + nbytes])
            news = leg.is_coming.count(1, at, end)
            if not news:
                continue
            if kind == m.WHOLE and nbytes != layout.nbytes[at]:
                raise ProtocolError(f"a slice of {layout.nbytes[at]} bytes came back with {nbytes} bytes")
            if kind == m.HALF and nbytes != layout.pieces[at].length * torch.bfloat16.itemsize:
                raise ProtocolError(
                    f"a slice of {layout.nbytes[at]} bytes came back rounded, with {nbytes} bytes"
                )
            begin = layout.begin[at]
            if kind != m.WHOLE or begin < 0 or layout.takes_half or leg.is_announced:
                leg.staged += [(at, kind, source[start : start + nbytes])] if nbytes else []
            else:
                leg.gathered.append(at)
                same, first, last, to = runs[-1] if runs else (None, 0, 0, 0)
                if same is source and last == start and to + last - first == begin:
                    runs[-1] = source, first, last + nbytes, to
                else:
                    runs.append((source, start, start + nbytes, begin))
            leg.is_coming[at:end] = bytes(end - at)
            table = layout.table[at]
            leg.came[table] = version
            leg.coming[table] -= news
            if not leg.coming[table]:
                finished.append(table)
        for source, first, end, to in runs:
            leg.memory.raw[to : to + end - first].copy_(source[first:end])
        self._finish(round_, leg, finished)

    def _take_places(self, round_: Round, leg: _Leg, shown: m.Shown) -> None:
        """Note where new weights are."""
        finished = []
        for slot, version, place in shown.parts.tolist():
            at = leg.layout.slots.get(slot)
            if at is not None and place == m.STILL and leg.layout.mapped is not None:
                finished += self._take_still(leg, leg.layout.table[at], version)
            elif at is not None and leg.is_coming[at]:
                table = leg.layout.table[at]
                leg.shown.append((at, place))
                leg.is_coming[at] = 0
                leg.came[table] = version
                leg.coming[table] -= 1
                if not leg.coming[table]:
                    finished.append(table)
        self._finish(round_, leg, finished)

    def _take_still(self, leg: _Leg, table: int, version: int) -> list[int]:
        """Note that new weights of the only table are where they were; returns it if they are all."""
        coming, mapped = np.frombuffer(leg.is_coming, np.uint8), leg.layout.mapped
        leg.came[table] = version
        leg.coming[table] -= int(coming[mapped].sum())
        coming[mapped] = 0
        return [] if leg.coming[table] else [table]

    def _finish(self, round_: Round, leg: _Leg, tables: Iterable[int]) -> None:
        """All answers of a server to commits are here, unless what it measured is still to come."""
        if round_.contribution.guard is None:
            leg.open.difference_update(tables)
        else:
            for at in tables:
                if at in leg.held or round_.vetoes.get(leg.layout.tables[at].name):
                    leg.open.discard(at)
                elif at in leg.open:
                    leg.complete.add(at)
        if not leg.open and leg in round_.open:
            round_.open.remove(leg)

    def _take_failure(self, round_: Round, leg: _Leg, failure: m.Failed) -> None:
        """One round, or with table -1 all that was asked of a server, has failed; the other tables go on."""
        error = from_wire(failure.code, failure.text)
        # That somebody gave up is not the cause where another one is known, least of all that this worker did.
        if round_.error is None or (
            isinstance(round_.error, RoundAbortedError) and not isinstance(error, RoundAbortedError)
        ):
            round_.error = error
        named = {leg.layout.position.get(failure.table)}
        failed = sorted(leg.open if failure.table == -1 else leg.open.intersection(named))
        for at in failed:
            leg.failed[at] = failure.next_round
            leg.open.discard(at)
            table = leg.layout.tables[at]
            if round_.is_read or table.name in round_.aborted:
                continue
            # It can no longer be applied everywhere: do not wait for those who would only now begin it.
            round_.aborted.add(table.name)
            for other, here in round_.legs_of(table):
                if here in other.open:
                    number = int(other.layout.commits[here, 0])
                    abort = m.Abort(number, table.round, describe(error), undo=False)
                    self._session.send(other.server, self._session.next_number(), abort)
        self._finish(round_, leg, ())

    # ---------------------------------------------------------------- deciding

    def _take_held(self, round_: Round, leg: _Leg, at: int, held: m.Held) -> None:
        """Note what a server measured of a sum that it holds; once all have, decide what becomes of it.

        All workers make the same of it, so whose answer comes first does not matter, and one is enough. Whatever the
        guard raises goes through: the round is then given up.
        """
        table, guard = leg.layout.tables[at], round_.contribution.guard
        if guard is None or table.name in round_.aborted:
            return
        leg.held[at] = held
        places = list(round_.legs_of(table))
        if table.name in round_.decided:
            self._resolve(round_, table, [(leg, at)])  # it has not heard it
        elif round_.vetoes.get(table.name):
            self._skip(round_, table)
        elif all(where in one.held for one, where in places):
            said = [one.held[where] for one, where in places]
            partials = sorted(partial for one in said for partial in one.partials)
            norm = combine((value for _, value in partials), guard.norm_type)
            measured = Measured(norm, all(one.is_finite for one in said))
            round_.decided[table.name] = (measured, guard.decide(measured))
            self._resolve(round_, table, places)
        if at in leg.complete:
            self._finish(round_, leg, [at])

    def _take_veto(self, round_: Round, leg: _Leg, at: int, veto: m.Vetoed) -> None:
        """Some ranks have vetoed the round, or its sum was decided against: no weights will come."""
        table = leg.layout.tables[at]
        round_.vetoes[table.name] = veto.ranks
        leg.skipped.add(at)
        leg.coming[at] = 0
        for slice_, of in enumerate(leg.layout.table):
            if of == at:
                leg.is_coming[slice_] = 0
        if veto.ranks:
            self._skip(round_, table)

    def _skip(self, round_: Round, table: RemoteTable) -> None:
        """A rank has vetoed the round on one server; where another one holds it, it is to end in the same way.

        That takes a rank of which one process has vetoed and died, and another one has stepped in for it.
        """
        held = [(leg, at) for leg, at in round_.legs_of(table) if at in leg.held]
        if held and table.name not in round_.decided:
            round_.decided[table.name] = (None, Decision(skip=True))
            self._resolve(round_, table, held)

    def _resolve(self, round_: Round, table: RemoteTable, places: Iterable[tuple[_Leg, int]]) -> None:
        _, (coef, clip_value, skip) = round_.decided[table.name]
        for leg, at in places:
            if at in leg.open and at not in leg.complete:
                resolve = m.Resolve(int(leg.layout.commits[at, 0]), table.round, coef, clip_value, skip)
                self._session.send(leg.server, leg.number, resolve, round_.contribution.priority)

    # ---------------------------------------------------------------- ending

    def _end(self, round_: Round, error: BaseException | None) -> None:
        """Count the rounds that were applied, and give up those that were not, on all servers."""
        tables, book = round_.contribution.tables, self.tables
        round_.is_over = True
        for leg in round_.legs:
            self._session.forget(leg.number)
            if round_.error is None and not leg.open:  # else a message may still be on its way out of it
                leg.layout.spare = leg.memory
        for table in tables:
            if self.open.get(table.index) is round_:
                del self.open[table.index]
        if round_.is_read:
            for leg in round_.legs if error is None else ():
                self._write(round_, leg, frozenset())
            return
        lost = {int(leg.layout.index[at]) for leg in round_.legs for at in (*leg.open, *leg.failed)}
        if not round_.legs:  # it was not even prepared
            lost.update(table.index for table in tables)
        for table in tables if round_.decided else ():
            differs = None if table.index in lost else _disagreement(round_, table)
            if differs is not None:
                book.broken[table.index] = differs
        gone = lost.union(book.broken)
        ages: dict[int, int] = {}
        """Table (index) → how many updates of others this contribution had missed, on any server."""
        for leg in round_.legs:
            for at, version in leg.applied.items():
                index = int(leg.layout.index[at])
                before = int(book.version[leg.server, index])
                if index not in gone:
                    book.newest[leg.server, index] = version
                if index not in gone and version >= 0 and before >= 0:
                    ages[index] = max(version - 1 - before, ages.get(index, version - 1 - before))
            self._write(round_, leg, gone)
        if round_.contribution.mapped is not None and not gone:
            round_.contribution.mapped.refresh()
        if ages:
            book.staleness[list(ages)] = list(ages.values())
        applied = np.array([table.index for table in tables if table.index not in gone], np.int64)
        book.round[applied] += 1
        book.is_initialised[applied] = True
        for table in tables if round_.encoded else ():
            was_sent = table.index in round_.encoded and table.name not in round_.vetoes
            if was_sent and table.index not in gone and table.compressor is not None:
                table.compressor.accept()
        if lost:
            self._give_up(round_, [table for table in tables if table.index in lost], describe(error))

    def _write(self, round_: Round, leg: _Leg, gone: Collection[int]) -> None:
        """Bring new weights to their places, except those of some tables (by index), and note their versions.

        Raises:
            ProtocolError: a part does not fit its slice.
        """
        layout, outs, unread = leg.layout, round_.contribution.outs, round_.contribution.unread
        if outs is None:
            return
        kept = [layout.index[at] not in gone for at in layout.table] if gone else None
        if unread:
            pairs = zip(kept or [True] * len(layout.pieces), layout.pieces, strict=True)
            kept = [is_kept and any(s.key not in unread for s in piece.segments) for is_kept, piece in pairs]
        ready = leg.gathered if kept is None else [at for at in leg.gathered if kept[at]]
        if ready:
            targets = [_part(outs[layout.at[layout.table[at]]], layout.pieces[at]) for at in ready]
            torch._foreach_copy_(targets, [leg.memory.views[at] for at in ready])
        notes = round_.contribution.is_kept
        for at in ready if notes else ():
            round_.rows[layout.at[layout.table[at]], layout.pieces[at].segments[0].key] = [None]
        for at, kind, raw in leg.staged:
            if kept is None or kept[at]:
                of, piece = layout.table[at], layout.pieces[at]
                written = _write_staged(layout.tables[of], outs[layout.at[of]], piece, kind, raw)
                for key, ids in written.items() if notes else ():
                    round_.rows.setdefault((layout.at[of], key), []).append(ids)
        if round_.contribution.mapped is not None:
            self._map(round_.contribution.mapped, leg, gone)
        leg.staged.clear()
        came = np.array(leg.came)
        read = came >= 0
        if gone:
            read &= ~np.isin(layout.index, list(gone))
        self.tables.version[leg.server, layout.index[read]] = came[read]
        self.tables.newest[leg.server, layout.index[read]] = came[read]
        if round_.contribution.is_kept:
            self.tables.held[leg.server, layout.index[read]] = came[read]

    def _write_early(self, round_: Round, leg: _Leg) -> None:
        """Bring those new weights to their places that are here while the round goes on."""
        layout, outs = leg.layout, round_.contribution.outs
        assert outs is not None
        for at in leg.gathered:
            _part(outs[layout.at[layout.table[at]]], layout.pieces[at]).copy_(leg.memory.views[at])
        for at, kind, raw in leg.staged:
            of = layout.table[at]
            _write_staged(layout.tables[of], outs[layout.at[of]], layout.pieces[at], kind, raw)
        round_.early.update([layout.pieces[at].index for at in leg.gathered])
        round_.early.update([layout.pieces[at].index for at, _, _ in leg.staged])
        leg.gathered.clear()
        leg.staged.clear()

    def _map(self, mapped: MappedWeights, leg: _Leg, gone: Collection[int]) -> None:
        """Map what a server has shown, and note what came as bytes in its place."""
        pieces = leg.layout.pieces
        copied = [*leg.gathered, *[at for at, _, _ in leg.staged]]
        for at in copied:
            mapped.leave(pieces[at])
        if leg.shown or any([pieces[at].nbytes >= LONG for at in copied]):
            leg.layout.mapped = None
        for at, place in leg.shown if not gone else ():
            if mapped.shows(pieces[at], leg.server, place):
                continue
            memory = self._session.memory_at(leg.server, place)
            try:
                if memory is None:
                    raise OSError("the channel to its server was lost")
                mapped.show(pieces[at], leg.server, place, *memory)
            except OSError as error:
                mapped.problem = error
        # A long slice that came as bytes may only have been read by somebody, and have a place the next time.
        if (
            leg.shown
            and not gone
            and mapped.problem is None
            and all([pieces[at].nbytes < LONG for at in copied])
        ):
            leg.layout.mapped = np.array([at for at, _ in leg.shown])

    def _give_up(self, round_: Round, tables: Sequence[RemoteTable], reason: str) -> None:
        """Fail rounds for everybody; where one server has applied and another failed it, have it taken back."""
        pairs = [(table, server) for table in tables for server in table.numbers]
        fates: dict[tuple[str, int], bool | None] = {}
        following: dict[str, list[int]] = {}
        for leg in round_.legs:
            for at, next_round in leg.failed.items():
                table = leg.layout.tables[at]
                following.setdefault(table.name, []).append(next_round)
                if next_round > table.round:
                    fates[table.name, leg.server] = False  # the server has said so already
        fates |= self._abort([p for p in pairs if (p[0].name, p[1]) not in fates], reason, undo=False)
        # Only a round that another server has surely failed may be taken back: then nobody can have finished it.
        lost = {name for (name, _), fate in fates.items() if fate is False}
        torn = [p for p in pairs if fates[p[0].name, p[1]] and p[0].name in lost]
        fates |= self._abort(torn, reason, undo=True)
        for table in tables:
            outcome = {self._session.describe(server): fates[table.name, server] for server in table.numbers}
            error = _torn(table, outcome, reason)
            if error is not None:
                self.tables.broken[table.index] = error
            self.tables.round[table.index] = max(table.round + 1, *following.get(table.name, ()), -1)

    def _abort(
        self, rounds: Sequence[tuple[RemoteTable, int]], reason: str, undo: bool
    ) -> dict[tuple[str, int], bool | None]:
        """Give up the present rounds of (table, server) pairs.

        Returns for each whether the server keeps it as applied; None where it did not answer.
        """
        requests = [(server, m.Abort(t.numbers[server], t.round, reason, undo)) for t, server in rounds]
        answers = self._session.ask_all(requests, GIVE_UP_TIMEOUT)
        # A server that refuses this worker keeps nothing of it.
        return {
            (table.name, server): None
            if answer is None
            else isinstance(answer, m.Info) and bool(answer.values.get("applied"))
            for (table, server), answer in zip(rounds, answers, strict=True)
        }


class _Those(Collection[_Leg]):
    """Those of some legs, which may become fewer, of which something holds at the moment."""

    def __init__(self, legs: Collection[_Leg], holds: Callable[[_Leg], bool]) -> None:
        self._legs, self._holds = legs, holds

    def __iter__(self) -> Iterator[_Leg]:
        return filter(self._holds, self._legs)

    def __len__(self) -> int:
        return sum(map(self._holds, self._legs))

    def __contains__(self, leg: object) -> bool:
        return any(one is leg for one in self)


def _is_queueing(session: Session, leg: _Leg) -> bool:
    return session.is_queueing(leg.server)


def _lacks(places: Mapping[int, Sequence[int]], leg: _Leg) -> bool:
    """Tell whether new weights of some slices, by server and position there, are still to come."""
    return any([leg.is_coming[at] for at in places[leg.server]])


_NONE = np.zeros(0, np.int64)
_NO_COMMITS = m.matrix((), m.COMMIT_WORDS)
_NO_BYTES = torch.empty(0, dtype=torch.uint8)


def _pieces(weights: m.Weights) -> Iterator[tuple[int, int, int, Tensor, int, int]]:
    """Yield (slot, version, kind, buffer of bytes, where in it, how many) of each part.

    Raises:
        ProtocolError: the parts are not the buffers.
    """
    payloads = iter(weights.payloads)
    source, start, left = _NO_BYTES, 0, 0
    for slot, version, kind, nbytes in weights.parts.tolist():
        while nbytes and not left and (payload := next(payloads, None)) is not None:
            source = payload.view(torch.uint8)
            start, left = 0, len(source)
        if not 0 <= nbytes <= left:
            raise ProtocolError(f"{nbytes} bytes of slot {slot} are not all in one payload")
        yield slot, version, kind, source, start, nbytes
        start += nbytes
        left -= nbytes


def _disagreement(round_: Round, table: RemoteTable) -> KVStoreError | None:
    """Why one cannot go on with a table of which the servers were told otherwise than this worker decided."""
    if table.name not in round_.decided:
        return None
    _, decision = round_.decided[table.name]
    if all((at in leg.skipped) == decision.skip for leg, at in round_.legs_of(table)):
        return None
    wanted = "wanted it to be skipped" if decision.skip else "wanted it to be applied"
    return KVStoreError(
        f"workers decided differently about round {table.round} of {table.name!r}: this one {wanted}, another one did "
        "not. What decides may depend on nothing in which workers differ. Restart the job from its last saved states"
    )


def _torn(table: RemoteTable, outcome: dict[str, bool | None], reason: str) -> KVStoreError | None:
    """Why one cannot go on with a table, if its servers are not known to agree about the round."""
    if len(set(outcome.values())) == 1 and None not in outcome.values():
        return None
    applied = [server for server, fate in outcome.items() if fate]
    silent = [server for server, fate in outcome.items() if fate is None]
    told = [f"{', '.join(applied)} had applied it"] if applied else []
    told += [f"{', '.join(silent)} did not say whether it had been applied"] if silent else []
    return KVStoreError(
        f"round {table.round} of {table.name!r} failed ({reason}), but {' and '.join(told)}: the servers may be "
        "one round apart. Restart the job from its last saved states"
    )


# ---------------------------------------------------------------- slices


def _is_plain(one: Contribution) -> bool:
    """Tell whether new weights are wanted for what is given, or nothing for nothing, and all is known before."""
    is_even = (one.values is None) == (one.outs is None) and one.tables[0].is_initialised
    is_special = one.absent or one.rows or one.veto or one.assign or one.joined or one.is_kept or one.guard
    return is_even and not is_special


def _part(arenas: Arenas, piece: Slice) -> Tensor:
    """The numbers of a slice in arenas that the Plan has laid out."""
    flat = arenas[piece.dtype]
    return flat if piece.used == flat.numel() else flat[piece.offset : piece.offset + piece.used]


def _given(contribution: Contribution, layout: _Layout, at: int) -> Tensor:
    """The numbers that this rank gives to a slice, where they are; of some keys that is not the arena."""
    piece = layout.pieces[at]
    key, _, start, numel = piece.segments[0]
    if piece.index in contribution.born:
        return contribution.born[piece.index]
    if key in contribution.sources:
        return contribution.sources[key](start, numel)
    if key in contribution.lent:
        return contribution.lent[key][start : start + numel]
    assert contribution.values is not None
    flat = contribution.values[layout.at[layout.table[at]]][piece.dtype]
    return flat[piece.offset : piece.offset + (piece.used if layout.begin[at] >= 0 else piece.length)]


def _apart(contribution: Contribution, layout: _Layout, given: Sequence[int]) -> list[list[int]]:
    """Separate slices, by position, that lie one behind the other in memory of their server, and all others."""
    others: list[int] = []
    runs: list[list[int]] = []
    end = -1
    for at in given:
        own = contribution.born.get(layout.pieces[at].index)
        if own is None:
            others.append(at)
            continue
        if own.data_ptr() != end:
            runs.append([])
        runs[-1].append(at)
        end = own.data_ptr() + own.nbytes
    return [others, *runs] if others else runs


def _whole(contribution: Contribution, layout: _Layout, at: int) -> Tensor:
    """A slice with its padding, which the end of an arena may lack."""
    length, found = layout.pieces[at].length, _given(contribution, layout, at)
    if len(found) == length:
        return found
    padded = torch.zeros(length, dtype=found.dtype)
    padded[: len(found)] = found
    return padded


def _side_by_side(
    wanted: Sequence[RowsWanted],
) -> Iterator[tuple[RemoteTable, list[int], list[Tensor]]]:
    """Put neighbours together that want rows of keys of one table that lie side by side, in their order."""
    at = 0
    while at < len(wanted):
        table, first, _ = wanted[at]
        following, end = table.plan.joined_rows(first).keys, at + 1
        while end < len(wanted) and wanted[end][0] is table and wanted[end][1] in following:
            if wanted[end][1] <= wanted[end - 1][1]:
                break
            end += 1
        yield table, [key for _, key, _ in wanted[at:end]], [ids for _, _, ids in wanted[at:end]]
        at = end


def _write_staged(
    table: RemoteTable, arenas: Arenas, piece: Slice, kind: int, raw: Tensor
) -> Mapping[int, Tensor | None]:
    """Write one part of new weights: a slice, or rows of it and of its neighbours. Raises as `Rounds._write`.

    Returns which rows were written of each key, or of the first one; None where it was something else.
    """
    plan, out, key = table.plan, _part(arenas, piece), piece.segments[0].key
    if kind in (m.WHOLE, m.HALF):
        given = raw.view(out.dtype if kind == m.WHOLE else torch.bfloat16)[: piece.used]
        out.copy_(_rounded(given) if table.takes_half else given)
        return {key: None}
    if kind != m.ROWS:
        raise ProtocolError(f"slice {piece.index} of {table.name!r} came back as kind {kind}")
    parts, slices = decode_rows(plan, piece, raw.numpy().data, is_joined=True)
    written: Mapping[int, Tensor | None] = {key: None}
    for position, values in parts.items():
        segment = piece.segments[position]
        if isinstance(values, Tensor):
            values = _rounded(values) if table.takes_half else values
            out[segment.start : segment.start + segment.numel].copy_(values)
            continue
        places, start = plan.joined_rows(segment.key), plan.key_offsets[segment.key]
        block = places.blocks[piece.server]
        first = block.order[piece.index]
        ids = torch.from_numpy(block.in_key(values.ids.numpy(), first, first + slices))
        rows = _rounded(values.values) if table.takes_half else values.values
        whole = arenas[piece.dtype][start : start + int(places.starts[-1]) * places.width]
        put_rows(whole.view(-1, places.width), ids, rows)
        if len(piece.segments) == 1:
            own = cut_rows(RowSet(ids, rows), places.bounds)
            written = {key: part.ids for key, part in zip(places.keys, own, strict=True)}
    return written


def _ends(where: Sequence[object]) -> list[int]:
    """Of each item, where those end that are equal to it and beside it."""
    sizes = [len(list(own)) for _, own in itertools.groupby(where)]
    return np.repeat(np.cumsum(sizes), sizes).tolist()


def _rounded(weights: Tensor) -> Tensor:
    """Weights as `Storage.half` would have sent them, of their own dtype."""
    is_wider = weights.dtype.itemsize > torch.bfloat16.itemsize
    return weights.to(torch.bfloat16).to(weights.dtype) if is_wider else weights


def _kept(contribution: Contribution, sent: Mapping[int, Tensor]) -> frozenset[int]:
    """Find the slices (by index) of the only table that are to be given as they were sent ahead.

    None are, where one of those that were sent is not to be given at all.
    """
    [table] = contribution.tables
    pieces = [table.plan.slices[index] for index in sent]
    if (
        contribution.assign
        or contribution.values is None
        or not all(contribution.gives(0, p) for p in pieces)
    ):
        return frozenset()
    others = {*contribution.absent, *contribution.sources, *[key for _, key in contribution.rows]}
    kept = set()
    for piece in pieces:
        key, _, start, numel = piece.segments[0]
        if not others.isdisjoint([segment.key for segment in piece.segments]):
            continue
        lent = contribution.lent.get(key)
        now = _part(contribution.values[0], piece) if lent is None else lent[start : start + numel]
        is_valid = table.compressor is None or table.compressor.has_encoded(piece.index)
        if is_valid and same_bits(now, sent[piece.index]):
            kept.add(piece.index)
    return frozenset(kept)


def _encode(contribution: Contribution, kept: Collection[int]) -> dict[int, dict[int, _Encoded]]:
    """Encode row-sparse slices, and compress the others of tables that are compressed, by index of the table.

    Initial values, and others that replace what the store holds, are neither. Slices that are `kept` were compressed
    when they were sent ahead.

    Raises:
        NonFiniteGradientError: a gradient that is to be compressed is infinite or not a number.
    """
    encoded: dict[int, dict[int, _Encoded]] = {}
    if contribution.values is None or contribution.assign:
        return encoded
    with_rows = {at for at, _ in contribution.rows}
    for at, table in enumerate(contribution.tables):
        if (table.compressor is None and at not in with_rows) or not table.round:
            continue
        values, absent = contribution.values[at], contribution.absent
        rows = {key: rows for (position, key), rows in contribution.rows.items() if position == at}
        packed = pack_rows(table.plan, rows, values, absent)
        found = {index: _Encoded(PACKED_ROWS, data) for index, data in packed.items()}
        if table.compressor is not None:
            plain = [p for p in table.plan.slices if p.index not in found and contribution.gives(at, p)]
            data = table.compressor.encode(values, plain, absent, kept)
            found |= {index: _Encoded(table.compressor.packed_codec, one) for index, one in data.items()}
        if found:
            encoded[table.index] = found
    return encoded
