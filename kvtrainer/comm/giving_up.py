"""Giving a round up on all servers, and finding out whether they agree about how it ended."""

from __future__ import annotations

from collections.abc import Sequence

from kvstore_server.errors import KVStoreError
from kvstore_server.protocol import messages as m
from kvtrainer.comm.session import Session
from kvtrainer.comm.tickets import RemoteTable, Ticket

GIVE_UP_TIMEOUT = 5.0
"""Seconds to wait for servers to confirm that a round was given up."""


def give_up(session: Session, ticket: Ticket, tables: Sequence[RemoteTable], reason: str) -> None:
    """Fail rounds for everybody; where one server has applied and another failed it, have it taken back."""
    pairs = [(table, server) for table in tables for server in table.numbers]
    fates: dict[tuple[str, int], bool | None] = {}
    for table, server in pairs:
        if ticket.failed.get((server, table.numbers[server]), -1) > table.round:
            fates[table.name, server] = False  # the server has said so already
    fates |= _abort(session, [p for p in pairs if (p[0].name, p[1]) not in fates], reason, undo=False)
    # Only a round that another server has surely failed may be taken back: then nobody can have finished it.
    lost = {name for (name, _), fate in fates.items() if fate is False}
    torn = [p for p in pairs if fates[p[0].name, p[1]] and p[0].name in lost]
    fates |= _abort(session, torn, reason, undo=True)
    for table in tables:
        outcome = {session.describe(server): fates[table.name, server] for server in table.numbers}
        table.broken = _disagreement(table, outcome, reason)
        said = (ticket.failed.get(place, -1) for place in table.numbers.items())
        table.round = max(table.round + 1, *said)


def _abort(
    session: Session, rounds: Sequence[tuple[RemoteTable, int]], reason: str, undo: bool
) -> dict[tuple[str, int], bool | None]:
    """Give up the present rounds of (table, server) pairs.

    Returns for each whether the server keeps it as applied; None where it did not answer.
    """
    requests = [(server, m.Abort(t.numbers[server], t.round, reason, undo)) for t, server in rounds]
    answers = session.ask_all(requests, GIVE_UP_TIMEOUT)
    return {
        (table.name, server): None if answer is None else _is_applied(answer)
        for (table, server), answer in zip(rounds, answers, strict=True)
    }


def _disagreement(table: RemoteTable, outcome: dict[str, bool | None], reason: str) -> KVStoreError | None:
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


def _is_applied(answer: m.ReplyBody) -> bool:
    """Whether a server keeps a round that was to be given up; one that refuses this worker keeps nothing of it."""
    return isinstance(answer, m.Info) and bool(answer.values.get("applied"))
