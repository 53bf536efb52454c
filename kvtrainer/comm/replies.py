"""What servers say about an exchange, noted in its ticket."""

from __future__ import annotations

from collections.abc import Callable

from kvstore_server.errors import KVStoreError, RoundAbortedError, describe, from_wire
from kvstore_server.protocol import messages as m
from kvtrainer.comm.deciding import Decisions
from kvtrainer.comm.session import Session
from kvtrainer.comm.tickets import RemoteTable, Ticket


class Replies:
    """Takes the replies to exchanges and pulls.

    Args:
        session: For telling servers that a round has failed elsewhere.
        send_again: Called with slices that a server lacks.
    """

    def __init__(self, session: Session, send_again: Callable[[Ticket, int, m.Missing], None]) -> None:
        self._session = session
        self._send_again = send_again
        self._decisions = Decisions(session)

    def take(self, ticket: Ticket, server: int, reply: m.ReplyBody) -> None:
        """Note what a server says about an exchange in flight."""
        if isinstance(reply, m.Weights):
            for part in reply.parts:
                self._take_part(ticket, server, part)
        elif isinstance(reply, m.Done):
            for table, _, version in reply.rounds:
                ticket.applied[server, table] = version
                if not ticket.outstanding.get((server, table)):
                    _complete(ticket, (server, table))
        elif isinstance(reply, m.Held):
            self._decisions.take(ticket, server, reply)
        elif isinstance(reply, m.Absent):
            item = ticket.tables[server, reply.table]
            ticket.absent.setdefault(item.table.name, set()).update(reply.keys)
        elif isinstance(reply, m.Vetoed):
            ticket.vetoes[ticket.tables[server, reply.table].table.name] = reply.ranks
            ticket.skipped.add((server, reply.table))
            if (server, reply.table) in ticket.outstanding:
                ticket.outstanding[server, reply.table] = set()  # no weights will come
            if reply.ranks:
                self._decisions.vetoed(ticket, ticket.tables[server, reply.table].table)
        elif isinstance(reply, m.InForce):
            ticket.in_force[ticket.tables[server, reply.table].table.name] = reply
        elif isinstance(reply, m.Missing):
            self._send_again(ticket, server, reply)
        elif isinstance(reply, m.Failed):
            self._take_failure(ticket, server, reply)

    def _take_failure(self, ticket: Ticket, server: int, failure: m.Failed) -> None:
        """One round, or with table -1 all that was asked of a server, has failed; the other tables go on."""
        error = from_wire(failure.code, failure.text)
        # That somebody gave up is not the cause where another one is known, least of all that this worker did.
        if ticket.error is None or (
            isinstance(ticket.error, RoundAbortedError) and not isinstance(error, RoundAbortedError)
        ):
            ticket.error = error
        for where in [w for w in ticket.outstanding if w[0] == server and failure.table in (-1, w[1])]:
            ticket.failed[where] = failure.next_round
            del ticket.outstanding[where]
            if ticket.hyper is not None:
                self._abort_elsewhere(ticket, ticket.tables[where].table, error)

    def _abort_elsewhere(self, ticket: Ticket, table: RemoteTable, error: KVStoreError) -> None:
        """The round can no longer be applied everywhere: do not wait for those who would only now begin it."""
        reason = describe(error)
        for server, number in table.numbers.items():
            if (server, number) in ticket.outstanding and table.name not in ticket.aborted:
                abort = m.Abort(number, table.round, reason, undo=False)
                self._session.send(server, self._session.next_number(), abort)
        ticket.aborted.add(table.name)

    def _take_part(self, ticket: Ticket, server: int, part: m.WeightsPart) -> None:
        where = (server, part.table)
        waiting = ticket.outstanding.get(where)
        if waiting is None or part.slice not in waiting:
            return
        ticket.versions[where] = part.version
        # Written when all parts are here: until then the round may still fail, or be taken back.
        ticket.staged.setdefault(ticket.tables[where].table.name, []).append(part)
        waiting.discard(part.slice)
        if not waiting:
            _complete(ticket, where)


def _complete(ticket: Ticket, where: tuple[int, int]) -> None:
    """All answers of a server to a commit are here; of one that was to be held, also what it measured, or will be."""
    item = ticket.tables[where]
    if item.guard is None or where in ticket.held or ticket.vetoes.get(item.table.name):
        ticket.outstanding.pop(where, None)
    elif where in ticket.outstanding:
        ticket.complete.add(where)
