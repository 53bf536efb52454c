"""Rounds as a worker drives them: slices out, commit, new weights in; repeated, refused or failed.

An exchange carries one round of any number of tables to all servers that hold them. It ends in the same way for
every worker. If it fails on one server, this worker gives the round up on all of them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence

from torch import Tensor

from kvstore_server.errors import DeadlineError, describe
from kvstore_server.plan import Slice
from kvstore_server.protocol import messages as m
from kvtrainer.comm.deciding import disagreement
from kvtrainer.comm.giving_up import give_up
from kvtrainer.comm.pushes import encode, push_batches
from kvtrainer.comm.replies import Replies
from kvtrainer.comm.row_pulls import RowsWanted, pull_rows
from kvtrainer.comm.session import Session
from kvtrainer.comm.tickets import Arenas, RemoteTable, RoundItem, Ticket, write_parts

_log = logging.getLogger(__name__)

_COMMITS_PER_MESSAGE = 128
"""So many fit into one frame, whatever their number of slices; few enough for the servers to begin with the first
tables while this worker still sends the last."""
_TABLES_PER_PULL = 1024
"""So many are answered in a few milliseconds if they are small, after which a server looks at other messages."""


class Rounds:
    """Runs exchanges over a session."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._replies = Replies(session, self._send_again)

    def start(self, items: Sequence[RoundItem], hyper: bytes = b"", priority: int = 0) -> Ticket:
        """Send one round of every item's table and return at once.

        `values` must not change before the ticket was waited for. A table has one round in flight: an earlier one
        is waited for first, so an error of it is raised here. `hyper` goes with the commit of all items. With a store
        that queues, an exchange of higher `priority` overtakes earlier ones.
        """
        for item in items:
            self.settle(item.table)
        ticket = self._open(items, hyper)
        ticket.priority = priority
        try:
            for server, members in self._by_server(items):
                self._request(ticket, server, members)
            for item in items:
                item.table.ticket = ticket
            ticket.encoded = encode(items)
            for at in range(0, len(items), _COMMITS_PER_MESSAGE):
                self._send_round(ticket, items[at : at + _COMMITS_PER_MESSAGE])
        except BaseException as error:
            self._end(ticket, error)
            raise
        return ticket

    def initialise(self, items: Sequence[RoundItem]) -> None:
        """Give tables rank 0's values, on all ranks together; blocks.

        A table that has values already, because the others have gone on without a process of this rank, is read.
        """
        known = [item for item in items if item.table.is_initialised]
        fresh = [item for item in items if not item.table.is_initialised]
        if fresh:
            self.wait(self.start(fresh))
        self.pull([(item.table, item.out) for item in known if item.out is not None])

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
        for failure in [ticket.error, *(item.table.broken for item in ticket.items)]:
            if failure is not None:
                raise failure

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
        ticket = self._open(items, None)
        try:
            for server, members in self._by_server(items, to_read=True):
                self._request(ticket, server, members)
                self._send_pulls(ticket, server)
            self._await(ticket, lambda server: self._send_pulls(ticket, server))
        finally:
            self._close(ticket)
        if ticket.error is not None:
            raise ticket.error
        for item in items:
            write_parts(item, ticket.staged.pop(item.table.name, ()))
            _note_versions(ticket, item.table)

    def pull_rows(self, wanted: Sequence[RowsWanted]) -> list[Tensor]:
        """The present values of some rows of keys, after this worker's own rounds of their tables; see `row_pulls`."""
        for table, _, _ in wanted:
            self.settle(table)
        return pull_rows(self._session, wanted)

    # ---------------------------------------------------------------- sending

    def _open(self, items: Sequence[RoundItem], hyper: bytes | None) -> Ticket:
        now = self._session.clock()
        return Ticket(list(items), now, now + self._session.options.timeout, hyper)

    def _by_server(
        self, items: Sequence[RoundItem], to_read: bool = False
    ) -> Iterable[tuple[int, list[RoundItem]]]:
        """The items of which a server has a part; or `to_read`, a part that is sent as a whole."""
        for server in range(self._session.num_servers):
            members = [item for item in items if server in item.table.numbers]
            if to_read:
                members = [item for item in members if item.table.plan.resident_slices_of(server)]
            if members:
                yield server, members

    def _request(self, ticket: Ticket, server: int, members: Sequence[RoundItem]) -> int:
        number = self._session.next_number(lambda s, reply: self._replies.take(ticket, s, reply))
        ticket.numbers[server] = number
        for item in members:
            where = (server, item.table.numbers[server])
            wanted = item.table.plan.resident_slices_of(server) if item.out is not None else ()
            ticket.outstanding[where] = {piece.index for piece in wanted}
            ticket.tables[where] = item
        return number

    def _commit(self, item: RoundItem, server: int) -> m.Commit:
        table, timeout = item.table, self._session.options.timeout
        manifest = tuple([(piece.index, 0) for piece in item.sent_slices(server)])
        wants_weights = item.out is not None and bool(table.plan.resident_slices_of(server))
        hold = item.guard.norm_type if item.guard is not None else 0.0
        return m.Commit(
            table.numbers[server], table.round, manifest, item.rescale, wants_weights, timeout, item.veto,
            item.assign, item.joined, item.is_kept, (table.held if item.is_kept else table.versions).get(server, -1),
            hold,
        )  # fmt: skip

    def _send_pushes(
        self, ticket: Ticket, server: int, work: Iterable[tuple[RoundItem, Sequence[Slice]]]
    ) -> None:
        # Under the number of the commit that follows: should a server refuse a slice, this exchange is told.
        for batch in push_batches(work, ticket.encoded, server):
            self._session.send(server, ticket.numbers[server], batch, ticket.priority)

    def _send_round(self, ticket: Ticket, items: Sequence[RoundItem]) -> None:
        """All slices of some tables to all servers, and only then their commits: who dies before has begun nothing."""
        by_server = dict(self._by_server(items))
        for server, members in by_server.items():
            self._send_pushes(ticket, server, ((item, item.sent_slices(server)) for item in members))
        for server, members in by_server.items():
            self._send_commits(ticket, server, members)

    def _send_commit(self, ticket: Ticket, server: int) -> None:
        """Commit again what is not over yet."""
        still_open = [item for where, item in ticket.tables.items()
                      if where[0] == server and where in ticket.outstanding]  # fmt: skip
        for at in range(0, len(still_open), _COMMITS_PER_MESSAGE):
            self._send_commits(ticket, server, still_open[at : at + _COMMITS_PER_MESSAGE])

    def _send_pulls(self, ticket: Ticket, server: int) -> None:
        """Ask for what has not come yet."""
        tables = [table for at, table in ticket.outstanding if at == server]
        for at in range(0, len(tables), _TABLES_PER_PULL):
            pull = m.Pull(tuple(tables[at : at + _TABLES_PER_PULL]), self._session.options.timeout)
            self._session.send(server, ticket.numbers[server], pull)

    def _send_commits(self, ticket: Ticket, server: int, members: Sequence[RoundItem]) -> None:
        assert ticket.hyper is not None
        commits = tuple([self._commit(item, server) for item in members])
        batch = m.CommitBatch(commits, ticket.hyper, tuple(sorted(members[0].absent)))
        self._session.send(server, ticket.numbers[server], batch, ticket.priority)

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
        try:
            self._session.wait(is_over, limit, again, lambda: {server for server, _ in ticket.outstanding})
        except DeadlineError as error:
            raise error if type(error) is not DeadlineError else self._too_late(ticket) from None

    def _too_late(self, ticket: Ticket) -> DeadlineError:
        open_on = {server for server, _ in ticket.outstanding}
        tables = sorted({ticket.tables[where].table.name for where in ticket.outstanding})
        named = ", ".join(map(repr, tables[:3])) + (", …" if len(tables) > 3 else "")
        return DeadlineError(
            f"{', '.join(self._session.describe(server) for server in sorted(open_on))} did not finish with {named} "
            f"within {ticket.deadline - ticket.started:g} s; is it overloaded? (timeout=… of the kvstore or "
            "KVSTORE_TIMEOUT raises the limit)"
        )

    def _send_again(self, ticket: Ticket, server: int, missing: m.Missing) -> None:
        item = ticket.tables.get((server, missing.table))
        if item is None or item.table.round != missing.round:
            return
        wanted = set(missing.slices)
        _log.warning("%s lost %d slices of round %d; sending them again", self._session.describe(server), len(wanted),
                     missing.round)  # fmt: skip
        pieces = [piece for piece in item.sent_slices(server) if piece.index in wanted]
        self._send_pushes(ticket, server, [(item, pieces)])
        self._send_commit(ticket, server)

    # ---------------------------------------------------------------- ending

    def _end(self, ticket: Ticket, error: BaseException | None) -> None:
        """Count the rounds that were applied, and give up those that were not, on all servers."""
        self._close(ticket)
        lost = []
        for item in ticket.items:
            if ticket.is_lost(item.table):
                lost.append(item.table)
                continue
            item.table.broken = disagreement(ticket, item.table)
            if item.table.broken is not None:
                continue
            write_parts(item, ticket.staged.pop(item.table.name, ()))
            was_encoded = item.table.name in ticket.encoded and item.table.name not in ticket.vetoes
            if was_encoded and item.table.compressor is not None:
                item.table.compressor.accept()
            item.table.round += 1
            item.table.is_initialised = True
            _note_versions(ticket, item.table)
        if lost:
            give_up(self._session, ticket, lost, describe(error))

    def _close(self, ticket: Ticket) -> None:
        ticket.is_over = True
        for number in ticket.numbers.values():
            self._session.forget(number)
        for item in ticket.items:
            if item.table.ticket is ticket:
                item.table.ticket = None


def _note_versions(ticket: Ticket, table: RemoteTable) -> None:
    """Note how old the weights were that this worker contributed with, and which ones it has now."""
    own: int | None = None
    for server, number in table.numbers.items():
        where = (server, number)
        before, applied, came = (
            table.versions.get(server),
            ticket.applied.get(where),
            ticket.versions.get(where),
        )
        if applied is not None and before is not None:
            own = applied - 1 - before if own is None else max(own, applied - 1 - before)
        if came is not None:
            table.versions[server] = came
    if own is not None:
        table.staleness = own
