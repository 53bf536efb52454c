"""Rounds as a worker drives them: slices and commits out, new weights in; repeated, refused, held or failed.

A round of any number of tables goes to all servers that hold them, one leg each. It ends in the same way for every
worker. If it fails on one server, this worker gives it up on all of them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from kvstore_server.errors import (
    DeadlineError,
    KVStoreError,
    ProtocolError,
    RoundAbortedError,
    describe,
    from_wire,
)
from kvstore_server.norms import Decision, Guard, Measured, combine
from kvstore_server.plan import Slice
from kvstore_server.protocol import messages as m
from kvstore_server.protocol.buffers import SENT_ALONE, groups, located
from kvstore_server.reduction import RowSet, torch_dtype
from kvstore_server.rounds import Ints
from kvstore_server.rows import PACKED_ROWS, decode_rows, encode_rows, split_rows
from kvtrainer.comm.row_pulls import RowsWanted, pull_rows
from kvtrainer.comm.session import Session
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


class RoundItem(NamedTuple):
    """One table's part in a round.

    Args:
        table: Which table.
        values: What this rank contributes; None contributes nothing but takes part.
        out: Where the new weights are written; None means that they are not wanted.
        rescale: Factor of the contribution; None means the optimizer's own. The same for all items of a round.
        absent: Keys (by index) that are left out; a slice of which all keys are absent is not sent.
        veto: The values are not finite: they are not sent, and the round changes nothing for anybody.
        assign: The lowest rank's values replace the weights; every rank must say so.
        joined: This rank has no more data: it gives nothing, until all ranks have said so.
        rows: Key (by index) → rows of it, of which this rank has only those; `values` do not count there.
        tables: Row-sparse key (by index) → its values, in the first round or with `assign`.
        is_kept: `out` still holds what the table's last item with this mark left there: rows that have not changed
            since then need not come again.
        guard: The sum is measured, and decided about, before it is used; every rank must want that. The same for all
            items of a round.
    """

    table: RemoteTable
    values: Arenas | None
    out: Arenas | None
    rescale: float | None = None
    absent: frozenset[int] = frozenset()
    veto: bool = False
    assign: bool = False
    rows: Mapping[int, RowSet] | None = None
    joined: bool = False
    tables: Mapping[int, Source] | None = None
    is_kept: bool = False
    guard: Guard | None = None

    @property
    def gives_nothing(self) -> bool:
        return self.values is None or self.veto or self.joined

    def gives(self, piece: Slice) -> bool:
        """Whether this rank gives a slice, of an item that gives something."""
        plan = self.table.plan
        if not plan.is_resident(piece) and piece.segments[0].key not in {
            *(self.rows or ()),
            *(self.tables or ()),
        }:
            return False
        return not self.absent or any(segment.key not in self.absent for segment in piece.segments)

    @property
    def gives_all(self) -> bool:
        """Whether this rank gives all slices."""
        return not self.absent and not self.table.plan.has_row_sparse


class Encoded(NamedTuple):
    """A slice as it is sent."""

    form: bytes
    """As of Contribute."""
    data: Tensor


class _Place:
    """Where the slices of some tables lie on one server, in the order of their slots, and in memory of this worker.

    Large slices are sent from and written to where they are; all others are gathered in one piece of memory.
    """

    def __init__(self, server: int, tables: Sequence[RemoteTable], book: Tables) -> None:
        self.server = server
        index = np.array([table.index for table in tables], np.int64)
        here = np.flatnonzero(book.number[server, index] >= 0)
        self.at = here[np.argsort(book.number[server, index[here]])]
        """The position in the round of each table that is here."""
        self.index = index[self.at]
        self.numbers = book.number[server, self.index]
        by_table = [tables[at].plan.slices_of(server) for at in self.at.tolist()]
        self.pieces = [piece for pieces in by_table for piece in pieces]
        counts = np.array([len(pieces) for pieces in by_table], np.int64)
        self.table = np.repeat(np.arange(len(by_table)), counts)
        """The table of each slot, by its position in `at`."""
        starts = np.cumsum(counts) - counts
        self.slots = np.arange(len(self.pieces)) + np.repeat(book.slot[server, self.index] - starts, counts)
        plans = [tables[at].plan for at in self.at.tolist()]
        pairs = [(plan, piece) for plan, pieces in zip(plans, by_table, strict=True) for piece in pieces]
        self.resident = np.array([plan.is_resident(piece) for plan, piece in pairs], np.bool_)
        self.nbytes = np.array([p.length * torch_dtype(p.dtype).itemsize for p in self.pieces], np.int64)
        self.is_gathered = (self.nbytes < SENT_ALONE) & self.resident
        sizes = np.where(self.is_gathered, self.nbytes, 0)
        self.begin = np.cumsum(sizes) - sizes
        """Where a gathered slice begins in memory."""
        self.size = int(sizes.sum())
        self._free: list[_Memory] = []

    def take_memory(self) -> _Memory:
        """Memory that nobody uses."""
        return self._free.pop() if self._free else _Memory(self)

    def give_back(self, memory: _Memory) -> None:
        """Memory of a round that is over."""
        self._free = [memory]


class _Memory:
    """The gathered slices of a place, and a view of the numbers of each."""

    def __init__(self, place: _Place) -> None:
        self.raw = torch.zeros(place.size, dtype=torch.uint8)
        self.views: list[Tensor | None] = []
        for piece, begin, nbytes, is_here in zip(
            place.pieces, place.begin.tolist(), place.nbytes.tolist(), place.is_gathered.tolist(), strict=True
        ):
            whole = self.raw[begin : begin + nbytes]
            self.views.append(whole.view(torch_dtype(piece.dtype))[: piece.used] if is_here else None)


class _Leg:
    """The part of a round that is on one server: what it has said, by table (position in the place) and slice."""

    def __init__(self, place: _Place, items: Sequence[RoundItem]) -> None:
        self.place = place
        self.server = place.server
        self.number = 0
        """Of the request."""
        self.items = [items[at] for at in place.at.tolist()]
        self.memory = place.take_memory()
        self.wants = np.array([item.out is not None for item in self.items], np.bool_)
        """Whether the new weights of the table are wanted."""
        self.is_kept = np.array([item.is_kept for item in self.items], np.bool_)
        self.is_given = np.array([not item.gives_nothing for item in self.items], np.bool_)[place.table]
        """Whether this rank gives the slice."""
        for at in [at for at, item in enumerate(self.items) if not item.gives_all]:
            for slot in np.flatnonzero(self.is_given & (place.table == at)).tolist():
                self.is_given[slot] = self.items[at].gives(place.pieces[slot])
        self.is_open = np.ones(len(place.at), np.bool_)
        """Whether the server has not said yet how the round of the table ended."""
        self.is_coming = place.resident & self.wants[place.table]
        """Whether the weights of the slice are still to come."""
        self.coming = np.bincount(place.table[self.is_coming], minlength=len(place.at))
        """How many slices of the table are still to come; with none, a plain acknowledgement is."""
        self.wanted = self.coming.copy()
        self.came = np.full(len(place.at), -1)
        """The version of the weights that came."""
        self.applied = np.full(len(place.at), -1)
        """The version right after this worker's contribution."""
        self.failed: dict[int, int] = {}
        """Table → the next round after the one that failed; -1 when the server did not say."""
        self.skipped: set[int] = set()
        """Tables whose round was not applied because of a veto or a decision."""
        self.held: dict[int, m.Held] = {}
        """Table → what the server measured of a sum that it holds."""
        self.complete: set[int] = set()
        """Tables of which all has come, except for what was measured."""
        self.staged: dict[int, tuple[int, Tensor]] = {}
        """Slice → (kind, bytes) of new weights that are not gathered, and wait for those of the other servers."""

    def find(self, number: int) -> int | None:
        """The position of the table of that number; None where it is none of this round."""
        at = int(np.searchsorted(self.place.numbers, number))
        return at if at < len(self.place.numbers) and self.place.numbers[at] == number else None


@dataclass(eq=False)
class Round:
    """A round under way."""

    items: Sequence[RoundItem]
    started: float
    deadline: float
    hyper: bytes | None
    """The hyper-parameters that go with the commits; None when weights are only read."""
    priority: int = 0
    """Where messages have to queue, those of a higher one go first."""
    legs: list[_Leg] = field(default_factory=list)
    error: KVStoreError | None = None
    absent: dict[str, set[int]] = field(default_factory=dict)
    """Table → keys that no worker contributed to."""
    in_force: dict[str, m.InForce] = field(default_factory=dict)
    """Table → what holds for those that have joined."""
    vetoes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Table → ranks because of which its round was not applied; none, where that was decided."""
    decided: dict[str, tuple[Measured | None, Decision]] = field(default_factory=dict)
    """Table → all that was measured, and what is made of it."""
    encoded: dict[int, dict[int, Encoded]] = field(default_factory=dict)
    """Table (index) → its slices as they are sent, where that is not as plain numbers."""
    aborted: set[str] = field(default_factory=set)
    """Tables whose round was given up as soon as one server had failed it."""
    is_over: bool = False

    @property
    def open_legs(self) -> list[_Leg]:
        """The legs on which something is still to be said."""
        return [leg for leg in self.legs if leg.is_open.any()]

    def legs_of(self, table: RemoteTable) -> Iterator[tuple[_Leg, int]]:
        """The legs that a table has, and its position there."""
        for leg in self.legs:
            for at in np.flatnonzero(leg.place.index == table.index).tolist():
                yield leg, at

    def is_lost(self, table: RemoteTable) -> bool:
        """Whether the round of a table, which is over, was not applied on every server, as far as is known here."""
        return any(leg.is_open[at] or at in leg.failed for leg, at in self.legs_of(table))


class Rounds:
    """Runs rounds over a session."""

    def __init__(self, session: Session) -> None:
        self.tables = Tables(session.num_servers)
        self._session = session
        self.open: dict[int, Round] = {}
        """Table (index) → its round that is under way."""
        self._places_known: dict[tuple[int, ...], list[_Place]] = {}

    def start(self, items: Sequence[RoundItem], hyper: bytes = b"", priority: int = 0) -> Round:
        """Send one round of every item's table and return at once.

        `values` must not change before the round was waited for. A table has one round under way: an earlier one
        is waited for first, so an error of it is raised here. `hyper` goes with the commit of all items. With a store
        that queues, a round of higher `priority` overtakes earlier ones.
        """
        for item in items:
            self.settle(item.table)
        round_ = self._open(items, hyper)
        round_.priority = priority
        try:
            self._add_legs(round_)
            self.open.update(dict.fromkeys([item.table.index for item in items], round_))
            round_.encoded = _encode(items)
            for at in range(0, len(round_.legs), self._session.num_servers):
                self._send_round(round_, round_.legs[at : at + self._session.num_servers])
        except BaseException as error:
            self._end(round_, error)
            raise
        return round_

    def initialise(self, items: Sequence[RoundItem]) -> None:
        """Give tables rank 0's values, on all ranks together; blocks.

        A table that has values already, because the others have gone on without a process of this rank, is read.
        """
        known = [item for item in items if item.table.is_initialised]
        fresh = [item for item in items if not item.table.is_initialised]
        if fresh:
            self.wait(self.start(fresh))
        self.pull([(item.table, item.out) for item in known if item.out is not None])

    def wait(self, round_: Round) -> None:
        """Block until the round is over; new weights are then in `out`.

        Raises:
            KVStoreError: what the servers reported, the same on every worker of the round.
            DeadlineError, ServerUnreachableError: they reported nothing in time.
        """
        if round_.is_over:
            return
        try:
            self._await(round_, lambda leg: self._send_commits(round_, leg))
        except BaseException as error:
            self._end(round_, error)
            raise
        self._end(round_, round_.error)
        if round_.error is not None:
            raise round_.error
        for item in round_.items if self.tables.broken else ():
            if item.table.broken is not None:
                raise item.table.broken

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

    def pull(self, wanted: Sequence[tuple[RemoteTable, Arenas]]) -> None:
        """Write the present weights of whole tables into arenas, after this worker's own rounds of them."""
        for table, _ in wanted:
            self.settle(table)
        round_ = self._open([RoundItem(table, None, out) for table, out in wanted], None)
        try:
            self._add_legs(round_)
            for leg in round_.legs:
                leg.is_open &= leg.coming > 0  # else it has nothing that is sent as a whole
                self._send_pull(leg)
            self._await(round_, self._send_pull)
            if round_.error is not None:
                raise round_.error
            for leg in round_.legs:
                self._write(round_, leg, np.ones(len(leg.place.at), np.bool_))
                self._note_versions(leg, np.ones(len(leg.place.at), np.bool_))
        finally:
            self._close(round_)

    def pull_rows(self, wanted: Sequence[RowsWanted]) -> list[Tensor]:
        """The present values of some rows of keys, after this worker's own rounds of their tables; see `row_pulls`."""
        for table, _, _ in wanted:
            self.settle(table)
        return pull_rows(self._session, wanted)

    # ---------------------------------------------------------------- sending

    def _open(self, items: Sequence[RoundItem], hyper: bytes | None) -> Round:
        now = self._session.clock()
        return Round(items, now, now + self._session.options.timeout, hyper)

    def _add_legs(self, round_: Round) -> None:
        """Prepare what goes to each server: what is given, what is wanted, and where that lies."""
        items = round_.items
        for first in range(0, len(items), _TOGETHER):
            some = items[first : first + _TOGETHER]
            for place in self._places([item.table for item in some]):
                leg = _Leg(place, some)
                leg.number = self._session.next_number(partial(self._take, round_, leg))
                round_.legs.append(leg)

    def _places(self, tables: Sequence[RemoteTable]) -> list[_Place]:
        """Where the slices of some tables lie; remembered, for the same calls come again and again."""
        key = tuple([table.index for table in tables])
        known = self._places_known.get(key)
        if known is None:
            several = [one for one in self._places_known if len(one) > 1]
            if len(key) > 1 and len(several) == _LAYOUTS_KEPT:
                del self._places_known[several[0]]
            places = [_Place(server, tables, self.tables) for server in range(self._session.num_servers)]
            known = self._places_known[key] = [place for place in places if len(place.at)]
        return known

    def _send_round(self, round_: Round, legs: Sequence[_Leg]) -> None:
        """The slices of some tables to all servers, and the commits with the last of them.

        So who dies before has begun nothing.
        """
        last = []
        for leg in legs:
            *others, final = self._contributions(round_, leg, leg.is_given, leg.is_open)
            for body in others:
                self._session.send(leg.server, leg.number, body, round_.priority)
            last.append((leg, final))
        for leg, final in last:
            self._session.send(leg.server, leg.number, final, round_.priority)

    def _contributions(self, round_: Round, leg: _Leg, given: Any, committed: Any) -> Iterator[m.Contribute]:
        """The messages that carry some slices of a leg, and commits of some tables with the last of them."""
        place = leg.place
        rounds = self.tables.round[place.index]
        batches: list[tuple[bytes, Ints, tuple[Tensor, ...]]] = []
        plain = np.flatnonzero(given)
        if round_.encoded:
            forms: dict[bytes, list[int]] = {}
            for at in plain.tolist():
                one = _encoded(round_, leg, at)
                forms.setdefault(b"" if one is None else one.form, []).append(at)
            plain = np.array(forms.pop(b"", []), np.int64)
            for form, of_form in forms.items():
                data = [one.data for at in of_form if (one := _encoded(round_, leg, at)) is not None]
                for group in groups([payload.nbytes for payload in data]):
                    batches.append((form, np.array(of_form[group], np.int64), tuple(data[group])))
        for group in groups(place.nbytes[plain].tolist()):
            batches.append((b"", plain[group], _plain(leg, plain[group])))
        batches = batches or [(b"", plain, ())]
        for number, (form, some, payloads) in enumerate(batches):
            sizes = place.nbytes[some] if not form else [payload.nbytes for payload in payloads]
            pushes = np.zeros((len(some), m.PUSH_WORDS), np.int64)
            pushes[:, 0], pushes[:, 1], pushes[:, 3] = place.slots[some], rounds[place.table[some]], sizes
            is_last = number == len(batches) - 1
            yield self._contribution(round_, leg, pushes, payloads, form, committed if is_last else None)

    def _contribution(
        self,
        round_: Round,
        leg: _Leg,
        pushes: m.Matrix,
        payloads: tuple[Tensor, ...],
        form: bytes,
        committed: Any,
    ) -> m.Contribute:
        """One message, with the commits of some tables."""
        place, timeout = leg.place, self._session.options.timeout
        if committed is None:
            return m.Contribute(pushes, payloads, m.matrix((), m.COMMIT_WORDS), form, timeout=timeout)
        at = np.flatnonzero(committed)
        index = place.index[at]
        commits = np.zeros((len(at), m.COMMIT_WORDS), np.int64)
        commits[:, 0], commits[:, 1] = place.numbers[at], self.tables.round[index]
        commits[:, 2] = np.bincount(place.table[leg.is_given], minlength=len(place.at))[at]
        commits[:, 4] = np.where(
            leg.is_kept[at], self.tables.held[place.server, index], self.tables.version[place.server, index]
        )
        said = [leg.items[one] for one in at.tolist()]
        commits[:, 5] = [
            m.VETOES * i.veto | m.ASSIGNS * i.assign | m.HAS_JOINED * i.joined | m.WANTS_DELTA * i.is_kept
            for i in said
        ]
        commits[:, 5] |= m.WANTS_WEIGHTS * (leg.wanted[at] > 0)
        absent = [
            (number, key) for number, i in zip(commits[:, 0].tolist(), said, strict=True) for key in i.absent
        ]
        first = round_.items[0]
        hold = first.guard.norm_type if first.guard is not None else 0.0
        assert round_.hyper is not None
        return m.Contribute(
            pushes, payloads, commits, form, round_.hyper, tuple(sorted(absent)), first.rescale, timeout, hold
        )

    def _send_commits(self, round_: Round, leg: _Leg, given: Any = None) -> None:
        """Commit again what is not over yet, with some slices that were lost."""
        nothing = np.zeros(len(leg.is_given), np.bool_)
        for body in self._contributions(round_, leg, nothing if given is None else given, leg.is_open):
            self._session.send(leg.server, leg.number, body, round_.priority)

    def _send_pull(self, leg: _Leg) -> None:
        """Ask for what has not come yet."""
        wanted = leg.place.numbers[leg.is_open].tolist()
        if wanted:
            pull = m.Pull(tuple(wanted), self._session.options.timeout)
            self._session.send(leg.server, leg.number, pull)

    # ---------------------------------------------------------------- receiving

    def _await(self, round_: Round, repeat: Callable[[_Leg], None]) -> None:
        def again(now: float) -> None:
            silent: dict[int, bool] = {}
            for leg in round_.open_legs:
                if leg.server not in silent:
                    silent[leg.server] = self._session.is_silent(leg.server, round_.started, now)
                if silent[leg.server]:
                    repeat(leg)

        # The server fails the round at the deadline, naming who was missing; the worker leaves it time to say so.
        limit = round_.deadline + self._session.options.dead_after
        try:
            self._session.wait(
                lambda: not round_.open_legs, limit, again, lambda: {leg.server for leg in round_.open_legs}
            )
        except DeadlineError as error:
            raise error if type(error) is not DeadlineError else self._too_late(round_) from None

    def _too_late(self, round_: Round) -> DeadlineError:
        legs = round_.open_legs
        tables = sorted(
            {leg.items[at].table.name for leg in legs for at in np.flatnonzero(leg.is_open).tolist()}
        )
        named = ", ".join(map(repr, tables[:3])) + (", …" if len(tables) > 3 else "")
        return DeadlineError(
            f"{', '.join(self._session.describe(server) for server in sorted({leg.server for leg in legs}))} did not "
            f"finish with {named} within {round_.deadline - round_.started:g} s; is it overloaded? (timeout=… of the "
            "kvstore or KVSTORE_TIMEOUT raises the limit)"
        )

    def _take(self, round_: Round, leg: _Leg, _: int, reply: m.ReplyBody) -> None:
        """Note what a server says about a round under way."""
        if isinstance(reply, m.Weights):
            self._take_weights(round_, leg, reply)
        elif isinstance(reply, m.Done):
            done = _positions(leg.place.numbers, reply.rounds[:, 0])
            known = done >= 0
            leg.applied[done[known]] = reply.rounds[known, 2]
            self._complete(round_, leg, done[known & (leg.coming[done] == 0)])
        elif isinstance(reply, m.Failed):
            self._take_failure(round_, leg, reply)
        elif isinstance(reply, m.Held | m.Absent | m.Vetoed | m.InForce | m.Missing):
            at = leg.find(reply.table)
            if at is not None:
                self._take_remark(round_, leg, at, reply)

    def _take_remark(
        self, round_: Round, leg: _Leg, at: int, reply: m.Held | m.Absent | m.Vetoed | m.InForce | m.Missing
    ) -> None:
        """Note something special about the round of one table."""
        table = leg.items[at].table
        if isinstance(reply, m.Held):
            self._take_held(round_, leg, at, reply)
        elif isinstance(reply, m.Absent):
            round_.absent.setdefault(table.name, set()).update(reply.keys)
        elif isinstance(reply, m.InForce):
            round_.in_force[table.name] = reply
        elif isinstance(reply, m.Vetoed):
            round_.vetoes[table.name] = reply.ranks
            leg.skipped.add(at)
            leg.is_coming[leg.place.table == at] = False  # no weights will come
            leg.coming[at] = 0
            if reply.ranks:
                self._skip(round_, table)
        elif table.round == reply.round:
            lost = leg.is_given & np.isin(leg.place.slots, reply.slots)
            _log.warning("%s lost %d slices of round %d; sending them again", self._session.describe(leg.server),
                         lost.sum(), reply.round)  # fmt: skip
            self._send_commits(round_, leg, lost)

    def _take_weights(self, round_: Round, leg: _Leg, weights: m.Weights) -> None:
        """Keep new weights until all have come: until then the round may still fail, or be taken back."""
        place = leg.place
        at = _positions(place.slots, weights.parts[:, 0])
        sources, which, starts = located(weights.payloads, weights.parts[:, 3])
        news = np.flatnonzero((at >= 0) & leg.is_coming[at])
        at, kinds, which, starts = at[news], weights.parts[news, 2], which[news], starts[news]
        sizes = weights.parts[news, 3]
        is_whole = kinds == m.WHOLE
        if (is_whole & (sizes != place.nbytes[at])).any():
            wrong = int(np.flatnonzero(is_whole & (sizes != place.nbytes[at]))[0])
            raise ProtocolError(
                f"a slice of {place.nbytes[at[wrong]]} bytes came back with {sizes[wrong]} bytes"
            )
        gathered = is_whole & place.is_gathered[at]
        # Neighbours there and here are copied in one go.
        ends = np.flatnonzero(
            ~gathered[1:] | ~gathered[:-1] | (np.diff(at) != 1) | (np.diff(which) != 0)
            | (starts[1:] != starts[:-1] + sizes[:-1]) | (place.begin[at[1:]] != place.begin[at[:-1]] + sizes[:-1])
        )  # fmt: skip
        for run in np.split(np.arange(len(at)), ends + 1) if len(at) else ():
            first, size = int(run[0]), int(sizes[run].sum())
            raw = sources[which[first]][starts[first] : starts[first] + size]
            if gathered[first]:
                begin = int(place.begin[at[first]])
                leg.memory.raw[begin : begin + size].copy_(raw)
            else:
                leg.staged[int(at[first])] = int(kinds[first]), raw
        leg.is_coming[at] = False
        tables = place.table[at]
        leg.coming -= np.bincount(tables, minlength=len(place.at))
        leg.came[tables] = weights.parts[news, 1]
        touched = np.unique(tables)
        self._complete(round_, leg, touched[leg.coming[touched] == 0])

    def _complete(self, round_: Round, leg: _Leg, tables: Ints) -> None:
        """All answers of a server to commits are here, unless what it measured is still to come."""
        if not len(tables):
            return
        if round_.items[0].guard is None:
            leg.is_open[tables] = False
            return
        for at in tables.tolist():
            if at in leg.held or round_.vetoes.get(leg.items[at].table.name):
                leg.is_open[at] = False
            elif leg.is_open[at]:
                leg.complete.add(at)

    def _take_failure(self, round_: Round, leg: _Leg, failure: m.Failed) -> None:
        """One round, or with table -1 all that was asked of a server, has failed; the other tables go on."""
        error = from_wire(failure.code, failure.text)
        # That somebody gave up is not the cause where another one is known, least of all that this worker did.
        if round_.error is None or (
            isinstance(round_.error, RoundAbortedError) and not isinstance(error, RoundAbortedError)
        ):
            round_.error = error
        found = leg.find(failure.table)
        failed = (
            np.flatnonzero(leg.is_open).tolist() if failure.table == -1 else [] if found is None else [found]
        )
        for at in failed:
            if leg.is_open[at]:
                leg.failed[at] = failure.next_round
                leg.is_open[at] = False
                if round_.hyper is not None:
                    self._abort_elsewhere(round_, leg.items[at].table, error)

    def _abort_elsewhere(self, round_: Round, table: RemoteTable, error: KVStoreError) -> None:
        """The round can no longer be applied everywhere: do not wait for those who would only now begin it."""
        reason = describe(error)
        for leg, at in round_.legs_of(table) if table.name not in round_.aborted else ():
            if leg.is_open[at]:
                abort = m.Abort(int(leg.place.numbers[at]), table.round, reason, undo=False)
                self._session.send(leg.server, self._session.next_number(), abort)
        round_.aborted.add(table.name)

    # ---------------------------------------------------------------- deciding

    def _take_held(self, round_: Round, leg: _Leg, at: int, held: m.Held) -> None:
        """Note what a server measured of a sum that it holds; once all have, decide what becomes of it.

        All workers make the same of it, so whose answer comes first does not matter, and one is enough. Whatever the
        guard raises goes through: the round is then given up.
        """
        item = leg.items[at]
        table, guard = item.table, item.guard
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
            leg.is_open[at] = False

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
            if leg.is_open[at] and at not in leg.complete:
                resolve = m.Resolve(int(leg.place.numbers[at]), table.round, coef, clip_value, skip)
                self._session.send(leg.server, leg.number, resolve, round_.priority)

    # ---------------------------------------------------------------- ending

    def _end(self, round_: Round, error: BaseException | None) -> None:
        """Count the rounds that were applied, and give up those that were not, on all servers."""
        lost_tables: set[int] = set()
        for leg in round_.legs:
            gone = leg.is_open.copy()
            gone[list(leg.failed)] = True
            lost_tables.update(leg.place.index[gone].tolist())
        if not round_.legs:  # it was not even prepared
            lost_tables.update(item.table.index for item in round_.items)
        for item in round_.items if round_.decided else ():
            differs = None if item.table.index in lost_tables else _disagreement(round_, item.table)
            if differs is not None:
                self.tables.broken[item.table.index] = differs
        kept = np.ones(len(self.tables.all), np.bool_)
        kept[[*lost_tables, *self.tables.broken]] = False
        for leg in round_.legs:
            self._write(round_, leg, kept[leg.place.index])
            self._note_staleness(leg, kept[leg.place.index], leg is round_.legs[0])
            self._note_versions(leg, kept[leg.place.index])
        index = np.array([item.table.index for item in round_.items], np.int64)
        index = index[kept[index]]
        self.tables.round[index] += 1
        self.tables.is_initialised[index] = True
        for item in round_.items if round_.encoded else ():
            table = item.table
            was_sent = kept[table.index] and table.index in round_.encoded and table.name not in round_.vetoes
            if was_sent and table.compressor is not None:
                table.compressor.accept()
        self._close(round_)
        if lost_tables:
            lost = [item.table for item in round_.items if item.table.index in lost_tables]
            self._give_up(round_, lost, describe(error))

    def _write(self, round_: Round, leg: _Leg, kept: Any) -> None:
        """Bring the new weights of some tables to their places.

        Raises:
            ProtocolError: a part does not fit its slice.
        """
        place = leg.place
        came = np.flatnonzero(place.is_gathered & ~leg.is_coming & (leg.wants & kept)[place.table])
        if leg.staged:
            came = came[[at not in leg.staged for at in came.tolist()]]
        came = came[(leg.came[place.table[came]] >= 0)]
        targets, sources = [], []
        for at in came.tolist():
            view = leg.memory.views[at]
            assert view is not None
            targets.append(_part(leg.items[place.table[at]].out, place.pieces[at]))
            sources.append(view)
        if targets:
            torch._foreach_copy_(targets, sources)
        for at, (kind, raw) in leg.staged.items():
            if kept[place.table[at]]:
                _write_staged(leg.items[place.table[at]], place.pieces[at], kind, raw)
        leg.staged.clear()
        held = leg.is_kept & kept & (leg.came >= 0)
        self.tables.held[place.server, place.index[held]] = leg.came[held]

    def _note_staleness(self, leg: _Leg, kept: Any, is_first: bool) -> None:
        """Note how old the weights were that this worker contributed with."""
        place = leg.place
        before = self.tables.version[place.server, place.index]
        known = kept & (leg.applied >= 0) & (before >= 0)
        own = (leg.applied - 1 - before)[known]
        index = place.index[known]
        self.tables.staleness[index] = own if is_first else np.maximum(own, self.tables.staleness[index])

    def _note_versions(self, leg: _Leg, kept: Any) -> None:
        """Note which weights this worker has now."""
        came = kept & (leg.came >= 0)
        self.tables.version[leg.server, leg.place.index[came]] = leg.came[came]

    def _close(self, round_: Round) -> None:
        round_.is_over = True
        for leg in round_.legs:
            self._session.forget(leg.number)
            if (
                round_.error is None and not leg.is_open.any()
            ):  # else a message may still be on its way out of it
                leg.place.give_back(leg.memory)
        for item in round_.items:
            if self.open.get(item.table.index) is round_:
                del self.open[item.table.index]

    def _give_up(self, round_: Round, tables: Sequence[RemoteTable], reason: str) -> None:
        """Fail rounds for everybody; where one server has applied and another failed it, have it taken back."""
        pairs = [(table, server) for table in tables for server in table.numbers]
        fates: dict[tuple[str, int], bool | None] = {}
        following: dict[str, list[int]] = {}
        for leg in round_.legs:
            for at, next_round in leg.failed.items():
                table = leg.items[at].table
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


def _positions(known: Ints, wanted: Ints) -> Ints:
    """Where each wanted number is among known ones, which ascend; -1 where it is not."""
    at = np.minimum(np.searchsorted(known, wanted), len(known) - 1)
    return np.where(known[at] == wanted, at, -1)


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


def _part(arenas: Arenas | None, piece: Slice) -> Tensor:
    """The numbers of a slice in arenas that the Plan has laid out."""
    assert arenas is not None
    flat = arenas[piece.dtype]
    return flat if piece.used == flat.numel() else flat[piece.offset : piece.offset + piece.used]


def _plain(leg: _Leg, at: Ints) -> tuple[Tensor, ...]:
    """The bytes of some slices, which go together: gathered in memory, or one that is alone."""
    place = leg.place
    if place.is_gathered[at].all():
        sources, targets = [], []
        for one in at.tolist():
            view = leg.memory.views[one]
            assert view is not None
            sources.append(_part(leg.items[place.table[one]].values, place.pieces[one]))
            targets.append(view)
        torch._foreach_copy_(targets, sources)
        ends = place.begin[at] + place.nbytes[at]
        if (place.begin[at[1:]] == ends[:-1]).all():
            return (leg.memory.raw[int(place.begin[at[0]]) : int(ends[-1])],)
        return tuple(
            [leg.memory.raw[b:e] for b, e in zip(place.begin[at].tolist(), ends.tolist(), strict=True)]
        )
    return tuple([_whole(leg.items[place.table[one]], place.pieces[one]) for one in at.tolist()])


def _whole(item: RoundItem, piece: Slice) -> Tensor:
    """A slice with its padding: out of the arena or, of a row-sparse key, from where its values are."""
    key = piece.segments[0].key
    if item.tables is not None and key in item.tables:
        found = item.tables[key](piece.segments[0].key_start, piece.segments[0].numel)
    else:
        assert item.values is not None
        found = item.values[piece.dtype][piece.offset : piece.offset + piece.length]
    if len(found) == piece.length:
        return found
    padded = torch.zeros(piece.length, dtype=found.dtype)
    padded[: len(found)] = found
    return padded


def _write_staged(item: RoundItem, piece: Slice, kind: int, raw: Tensor) -> None:
    out = _part(item.out, piece)
    if kind == m.WHOLE:
        out.copy_(raw.view(out.dtype)[: piece.used])
    elif kind != m.ROWS:
        raise ProtocolError(f"slice {piece.index} of {item.table.name!r} came back as kind {kind}")
    elif len(raw):
        for position, values in decode_rows(item.table.plan, piece, raw.numpy().data).items():
            segment = piece.segments[position]
            mine = out[segment.start : segment.start + segment.numel]
            if isinstance(values, Tensor):
                mine.copy_(values)
            else:
                mine.view(-1, values.values.shape[1])[values.ids] = values.values


def _encoded(round_: Round, leg: _Leg, at: int) -> Encoded | None:
    """A slice in the form in which it travels; None where that is as plain numbers."""
    table = int(leg.place.index[leg.place.table[at]])
    return round_.encoded.get(table, {}).get(leg.place.pieces[at].index)


def _encode(items: Iterable[RoundItem]) -> dict[int, dict[int, Encoded]]:
    """Encode row-sparse slices, and compress the others of tables that are compressed, by index of the table.

    Initial values, and others that replace what the store holds, are neither.

    Raises:
        NonFiniteGradientError: a gradient that is to be compressed is infinite or not a number.
    """
    encoded: dict[int, dict[int, Encoded]] = {}
    for item in items:
        compressor = item.table.compressor
        if (
            (compressor is None and not item.rows)
            or item.gives_nothing
            or item.assign
            or not item.table.round
        ):
            continue
        assert item.values is not None
        found = _row_slices(item) if item.rows else {}
        if compressor is not None:
            plain = [p for p in item.table.plan.slices if p.index not in found and item.gives(p)]
            data = compressor.encode(item.values, plain, item.absent)
            found |= {index: Encoded(compressor.packed_codec, one) for index, one in data.items()}
        if found:
            encoded[item.table.index] = found
    return encoded


def _row_slices(item: RoundItem) -> dict[int, Encoded]:
    """The slices that hold a part of a key of which there are only some rows."""
    assert item.values is not None
    plan = item.table.plan
    found: dict[int, dict[int, RowSet | Tensor]] = {}
    for key, (ids, values) in (item.rows or {}).items():
        for index, (position, part) in split_rows(plan, key, ids, values).items():
            found.setdefault(index, {})[position] = part
    for index, parts in found.items():
        piece = plan.slices[index]
        for position, segment in enumerate(piece.segments):
            if position not in parts and segment.key not in item.absent:
                start = piece.offset + segment.start
                parts[position] = item.values[piece.dtype][start : start + segment.numel]
    return {i: Encoded(PACKED_ROWS, encode_rows(plan, plan.slices[i], parts)) for i, parts in found.items()}
