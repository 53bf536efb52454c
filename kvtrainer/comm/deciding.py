"""A worker's part in rounds that are held: what the servers measured, and what is to become of their sums."""

from __future__ import annotations

from kvstore_server.errors import KVStoreError
from kvstore_server.norms import Decision, Guard, Measured, combine
from kvstore_server.protocol import messages as m
from kvtrainer.comm.session import Session
from kvtrainer.comm.tickets import RemoteTable, Ticket


class Decisions:
    """Takes what servers say about sums that they hold, and tells them what this worker makes of that.

    All workers make the same of it, so whose answer comes first does not matter, and one is enough.
    """

    def __init__(self, session: Session) -> None:
        self._session = session

    def take(self, ticket: Ticket, server: int, held: m.Held) -> None:
        """Note what a server says; once all of them have, decide.

        Whatever the guard raises goes through: the round is then given up.
        """
        where = (server, held.table)
        item = ticket.tables.get(where)
        if item is None or item.guard is None or item.table.name in ticket.aborted:
            return
        ticket.held[where] = held
        table = item.table
        places = list(table.numbers.items())
        if table.name in ticket.decided:
            self._tell(ticket, table, [where])  # it has not heard it
        elif ticket.vetoes.get(table.name):
            self.vetoed(ticket, table)
        elif all(place in ticket.held for place in places):
            measured = _measured(ticket, table, item.guard)
            ticket.decided[table.name] = (measured, item.guard.decide(measured))
            self._tell(ticket, table, places)
        if where in ticket.complete:
            ticket.outstanding.pop(where, None)

    def vetoed(self, ticket: Ticket, table: RemoteTable) -> None:
        """A rank has vetoed the round on one server; where another one holds it, it is to end in the same way.

        That takes a rank of which one process has vetoed and died, and another one has stepped in for it.
        """
        held = [place for place in table.numbers.items() if place in ticket.held]
        if held and table.name not in ticket.decided:
            ticket.decided[table.name] = (None, Decision(skip=True))
            self._tell(ticket, table, held)

    def _tell(self, ticket: Ticket, table: RemoteTable, places: list[tuple[int, int]]) -> None:
        _, (coef, clip_value, skip) = ticket.decided[table.name]
        for server, number in places:
            if (server, number) in ticket.outstanding and (server, number) not in ticket.complete:
                resolve = m.Resolve(number, table.round, coef, clip_value, skip)
                self._session.send(server, ticket.numbers[server], resolve, ticket.priority)


def disagreement(ticket: Ticket, table: RemoteTable) -> KVStoreError | None:
    """Why one cannot go on with a table of which the servers were told otherwise than this worker decided."""
    if table.name not in ticket.decided:
        return None
    _, decision = ticket.decided[table.name]
    skipped = [place in ticket.skipped for place in table.numbers.items()]
    if all(was == decision.skip for was in skipped):
        return None
    return KVStoreError(
        f"workers decided differently about round {table.round} of {table.name!r}: this one "
        f"{_described(decision)}, another one did not. What decides may depend on nothing in which workers differ. "
        "Restart the job from its last saved states"
    )


def _measured(ticket: Ticket, table: RemoteTable, guard: Guard) -> Measured:
    said = [ticket.held[place] for place in table.numbers.items()]
    partials = sorted(partial for held in said for partial in held.partials)
    norm = combine((value for _, value in partials), guard.norm_type)
    return Measured(norm, all(held.is_finite for held in said))


def _described(decision: Decision) -> str:
    return "wanted it to be skipped" if decision.skip else "wanted it to be applied"
