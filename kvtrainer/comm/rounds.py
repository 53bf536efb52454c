"""Rounds as a worker drives them: slices out, commit, new weights in; repeated, refused or failed.

An exchange carries one round of any number of tables to all servers that hold them. It ends in the same way for
every worker. If it fails on one server, this worker gives the round up on all of them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvstore_server.errors import KVStoreError, ProtocolError, from_wire
from kvstore_server.plan import Plan, Slice
from kvstore_server.protocol import messages as m
from kvstore_server.protocol.frames import MAX_PAYLOAD
from kvtrainer.comm.session import Session

_log = logging.getLogger(__name__)

Arenas = Mapping[str, Tensor]
"""dtype name → flat tensor laid out as the Plan says; padding behind the last key may be missing."""

GIVE_UP_TIMEOUT = 2.0
"""Seconds to wait for servers to confirm that a round was given up."""


@dataclass
class RemoteTable:
    """A table as this worker sees it."""

    name: str
    plan: Plan
    numbers: dict[int, int]
    """Server → the table's number there."""
    round: int = 0
    """The next round."""
    ticket: Ticket | None = None
    """The exchange in flight."""
    broken: KVStoreError | None = None
    """Set when servers no longer agree on the last round."""


@dataclass(frozen=True)
class RoundItem:
    """One table's part in an exchange.

    Args:
        table: Which table.
        values: What this rank contributes; None contributes nothing but takes part.
        out: Where the new weights are written; None means that they are not wanted.
        rescale: Factor of the contribution; None means the optimizer's own.
        absent: Keys (by index) that are left out; a slice of which all keys are absent is not sent.
    """

    table: RemoteTable
    values: Arenas | None
    out: Arenas | None
    rescale: float | None = None
    absent: frozenset[int] = frozenset()

    def sent_slices(self, server: int) -> list[Slice]:
        if self.values is None:
            return []
        pieces = self.table.plan.slices_of(server)
        if not self.absent:
            return list(pieces)
        return [p for p in pieces if any(segment.key not in self.absent for segment in p.segments)]


@dataclass
class Ticket:
    """An exchange in flight."""

    items: list[RoundItem]
    started: float
    deadline: float
    requests: dict[int, tuple[int, m.CommitBatch]] = field(default_factory=dict)
    """Server → (request number, what is committed there)."""
    outstanding: dict[tuple[int, int], set[int]] = field(default_factory=dict)
    """(server, table number there) → slices still to come; an empty set waits for a plain acknowledgement."""
    tables: dict[tuple[int, int], RoundItem] = field(default_factory=dict)
    error: KVStoreError | None = None
    absent: dict[str, set[int]] = field(default_factory=dict)
    """Table → keys that no worker contributed to."""
    failed: dict[str, int] = field(default_factory=dict)
    """Table → the round that is next after the one that failed, as far as a server said."""
    staged: dict[str, list[m.WeightsPart]] = field(default_factory=dict)
    """Table → new weights that wait for those of the other servers."""
    is_over: bool = False


class Rounds:
    """Runs exchanges over a session."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def start(self, items: Sequence[RoundItem], hyper: bytes = b"") -> Ticket:
        """Send one round of every item's table and return at once.

        `values` must not change before the ticket was waited for. A table has one round in flight: an earlier one
        is waited for first, so an error of it is raised here. `hyper` goes with the commit of all items.
        """
        for item in items:
            self.settle(item.table)
        ticket = self._open(items)
        for server, members in self._by_server(items):
            batch = tuple(self._commit(item, server) for item in members)
            absent = tuple(sorted(members[0].absent))
            self._request(ticket, server, members, m.CommitBatch(batch, hyper, absent))
            self._send_pushes(ticket, server, ((item, item.sent_slices(server)) for item in members))
        for item in items:
            item.table.ticket = ticket
        for server in ticket.requests:
            self._send_commit(ticket, server)
        return ticket

    def wait(self, ticket: Ticket) -> None:
        """Block until the exchange is over; new weights are then in `out`.

        Raises:
            KVStoreError: what the servers reported, the same on every worker of the round.
            DeadlineError, ServerUnreachableError: they reported nothing in time.
        """
        if ticket.is_over:
            return
        try:
            self._await(ticket, lambda server: self._send_commit(ticket, server))
        except BaseException as error:
            self._end(ticket, error)
            raise
        self._end(ticket, ticket.error)
        if ticket.error is not None:
            raise ticket.error

    def settle(self, table: RemoteTable) -> None:
        """Wait for the round in flight of a table, if there is one.

        Raises:
            KVStoreError: that round failed, or an earlier failure left the servers apart.
        """
        if table.ticket is not None:
            self.wait(table.ticket)
        if table.broken is not None:
            raise table.broken

    def pull(self, wanted: Sequence[tuple[RemoteTable, Arenas]]) -> None:
        """Write the present weights of whole tables into arenas, after this worker's own rounds of them."""
        for table, _ in wanted:
            self.settle(table)
        items = [RoundItem(table, None, out) for table, out in wanted]
        ticket = self._open(items)
        asked: dict[int, m.Pull] = {}
        for server, members in self._by_server(items):
            asked[server] = m.Pull(tuple(item.table.numbers[server] for item in members))
            number = self._request(ticket, server, members, m.CommitBatch(()))
            self._session.send(server, number, asked[server])
        try:
            self._await(
                ticket, lambda server: self._session.send(server, ticket.requests[server][0], asked[server])
            )
        finally:
            self._close(ticket)
        if ticket.error is not None:
            raise ticket.error
        for item in items:
            for part in ticket.staged.pop(item.table.name, ()):
                _write(item, part)

    # ---------------------------------------------------------------- sending

    def _open(self, items: Sequence[RoundItem]) -> Ticket:
        now = self._session.clock()
        return Ticket(list(items), now, now + self._session.options.timeout)

    def _by_server(self, items: Sequence[RoundItem]) -> Iterable[tuple[int, list[RoundItem]]]:
        for server in range(self._session.num_servers):
            members = [item for item in items if server in item.table.numbers]
            if members:
                yield server, members

    def _request(
        self, ticket: Ticket, server: int, members: Sequence[RoundItem], batch: m.CommitBatch
    ) -> int:
        number = self._session.next_number(lambda s, reply: self._take(ticket, s, reply))
        ticket.requests[server] = (number, batch)
        for item in members:
            where = (server, item.table.numbers[server])
            wanted = item.table.plan.slices_of(server) if item.out is not None else ()
            ticket.outstanding[where] = {piece.index for piece in wanted}
            ticket.tables[where] = item
        return number

    def _commit(self, item: RoundItem, server: int) -> m.Commit:
        manifest = tuple((piece.index, 0) for piece in item.sent_slices(server))
        wants = item.out is not None
        number, timeout = item.table.numbers[server], self._session.options.timeout
        return m.Commit(number, item.table.round, manifest, item.rescale, wants, timeout)

    def _send_pushes(
        self, ticket: Ticket, server: int, work: Iterable[tuple[RoundItem, Sequence[Slice]]]
    ) -> None:
        # Under the number of the commit that follows: should a server refuse a slice, this exchange is told.
        request, _ = ticket.requests[server]
        batch: list[m.Push] = []
        size = 0
        for item, pieces in work:
            if item.values is None:
                continue
            number, round_ = item.table.numbers[server], item.table.round
            for piece in pieces:
                if batch and size + piece.nbytes > MAX_PAYLOAD:
                    self._session.send(server, request, m.PushBatch(tuple(batch)))
                    batch, size = [], 0
                payload = item.values[piece.dtype][piece.offset : piece.offset + piece.used]
                batch.append(m.Push(number, piece.index, round_, 0, payload))
                size += piece.nbytes
        if batch:
            self._session.send(server, request, m.PushBatch(tuple(batch)))

    def _send_commit(self, ticket: Ticket, server: int) -> None:
        number, batch = ticket.requests[server]
        still_open = tuple(c for c in batch.commits if (server, c.table) in ticket.outstanding)
        if still_open:
            self._session.send(server, number, m.CommitBatch(still_open, batch.hyper, batch.absent))

    # ---------------------------------------------------------------- receiving

    def _await(self, ticket: Ticket, repeat: Callable[[int], None]) -> None:
        def again(now: float) -> None:
            for server in sorted({server for server, _ in ticket.outstanding}):
                if self._session.is_silent(server, ticket.started, now):
                    repeat(server)

        def is_over() -> bool:
            return not ticket.outstanding

        # The server fails the round at the deadline, naming who was missing; the worker leaves it time to say so.
        limit = ticket.deadline + self._session.options.dead_after
        self._session.wait(is_over, limit, again)

    def _take(self, ticket: Ticket, server: int, reply: m.ReplyBody) -> None:
        if isinstance(reply, m.Weights):
            for part in reply.parts:
                self._take_part(ticket, server, part)
        elif isinstance(reply, m.Done):
            for table, _ in reply.rounds:
                ticket.outstanding.pop((server, table), None)
        elif isinstance(reply, m.Absent):
            item = ticket.tables[server, reply.table]
            ticket.absent.setdefault(item.table.name, set()).update(reply.keys)
        elif isinstance(reply, m.Missing):
            self._send_again(ticket, server, reply)
        elif isinstance(reply, m.Failed):
            self._take_failure(ticket, server, reply)

    def _take_failure(self, ticket: Ticket, server: int, failure: m.Failed) -> None:
        """One round, or with table -1 all that was asked of a server, has failed; the others go on."""
        ticket.error = ticket.error or from_wire(failure.code, failure.text)
        for where in [w for w in ticket.outstanding if w[0] == server and failure.table in (-1, w[1])]:
            name = ticket.tables[where].table.name
            ticket.failed[name] = max(ticket.failed.get(name, 0), failure.next_round)
            del ticket.outstanding[where]

    def _take_part(self, ticket: Ticket, server: int, part: m.WeightsPart) -> None:
        where = (server, part.table)
        waiting = ticket.outstanding.get(where)
        if waiting is None or part.slice not in waiting:
            return
        item = ticket.tables[where]
        if len(item.table.numbers) == 1:
            _write(item, part)
        else:
            # Until the other servers have applied the round too, it may still be taken back.
            ticket.staged.setdefault(item.table.name, []).append(part)
        waiting.discard(part.slice)
        if not waiting:
            del ticket.outstanding[where]

    def _send_again(self, ticket: Ticket, server: int, missing: m.Missing) -> None:
        item = ticket.tables.get((server, missing.table))
        if item is None or item.table.round != missing.round:
            return
        wanted = set(missing.slices)
        _log.warning("%s lost %d slices of round %d; sending them again", self._session.describe(server), len(wanted),
                     missing.round)  # fmt: skip
        self._send_pushes(ticket, server, [(item, [p for p in item.sent_slices(server) if p.index in wanted])])
        self._send_commit(ticket, server)

    # ---------------------------------------------------------------- ending

    def _end(self, ticket: Ticket, error: BaseException | None) -> None:
        """Count the rounds that were applied, and give up those that were not, on all servers."""
        self._close(ticket)
        for item in ticket.items:
            table = item.table
            is_open = any(where in ticket.outstanding for where in table.numbers.items())
            if is_open or table.name in ticket.failed:
                self._give_up(table, f"{type(error).__name__}: {error}")
                table.round = max(table.round + 1, ticket.failed.get(table.name, 0))
                continue
            for part in ticket.staged.pop(table.name, ()):
                _write(item, part)
            table.round += 1

    def _give_up(self, table: RemoteTable, reason: str) -> None:
        """Fail a round for everybody, and find out whether a server has applied it for good all the same."""
        applied = [server for server in table.numbers if self._abort(table, server, reason)]
        if applied and len(applied) < len(table.numbers):
            where = ", ".join(self._session.describe(server) for server in applied)
            table.broken = KVStoreError(
                f"round {table.round} of {table.name!r} failed ({reason}) after it had been applied on {where}: "
                "the servers are one round apart. Restart the job from its last saved states"
            )

    def _abort(self, table: RemoteTable, server: int, reason: str) -> bool:
        """Give a round up on one server; return whether the server keeps it as applied."""
        try:
            reply = self._session.call(
                server, m.Abort(table.numbers[server], table.round, reason), GIVE_UP_TIMEOUT
            )
        except KVStoreError as error:
            _log.info("could not give a round up on %s: %s", self._session.describe(server), error)
            return False
        return isinstance(reply, m.Info) and bool(reply.values.get("applied"))

    def _close(self, ticket: Ticket) -> None:
        ticket.is_over = True
        for number, _ in ticket.requests.values():
            self._session.forget(number)
        for item in ticket.items:
            if item.table.ticket is ticket:
                item.table.ticket = None


def _write(item: RoundItem, part: m.WeightsPart) -> None:
    piece = item.table.plan.slices[part.slice]
    assert item.out is not None
    out = item.out[piece.dtype][piece.offset : piece.offset + piece.used]
    out.copy_(_as_tensor(part.payload, out))


def _as_tensor(payload: m.Payload, like: Tensor) -> Tensor:
    if isinstance(payload, Tensor):
        return payload
    if memoryview(payload).nbytes != like.nbytes:
        raise ProtocolError(
            f"a slice of {like.nbytes} bytes came back with {memoryview(payload).nbytes} bytes"
        )
    return torch.frombuffer(payload, dtype=like.dtype) if like.numel() else like
