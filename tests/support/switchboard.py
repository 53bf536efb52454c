"""Several workers in one process whose rounds meet in the same engines: no sockets, no threads, no waiting."""

from __future__ import annotations

import time
from collections.abc import Sequence

from kvstore_server.engine import Engine
from kvstore_server.protocol import messages as m
from kvtrainer.comm.client import Client
from kvtrainer.comm.contribution import Contribution
from kvtrainer.comm.loopback import Loopback
from kvtrainer.comm.session import SessionOptions
from tests.support.limits import LIMIT


class Line(Loopback):
    """One worker's transport; a reply that another worker's message sets off reaches it too."""

    def __init__(self, engines: Sequence[Engine], lines: dict[bytes, Line], name: bytes) -> None:
        super().__init__(engines, time.monotonic, name)
        self._lines = lines
        lines[name] = self

    def is_far(self, server: int) -> bool:
        return True

    def send(self, server: int, request: m.Request, priority: int = 0) -> None:
        for out in self._engines[server].handle(self._peer, request, time.monotonic()):
            self._lines[out.peer]._replies.append((server, out.reply))


def connected(engines: Sequence[Engine], num_workers: int, timeout: float = LIMIT) -> list[Client]:
    """The clients of all workers of a job; start a round on each before waiting for one."""
    lines: dict[bytes, Line] = {}
    clients = []
    for rank in range(num_workers):
        options = SessionOptions("job", rank, num_workers, timeout=timeout)
        clients.append(Client(Line(engines, lines, b"%d" % rank), options, time.monotonic))
        clients[rank].connect()
    return clients


def play(
    clients: Sequence[Client], contributions: Sequence[Contribution], *caught: type[Exception]
) -> list[Exception | None]:
    """One round: all workers commit, in order, and then wait; their errors, of the classes that are caught."""
    tickets = [client.rounds.start(one) for client, one in zip(clients, contributions, strict=True)]
    outcomes: list[Exception | None] = []
    for client, ticket in zip(clients, tickets, strict=True):
        try:
            client.rounds.wait(ticket)
            outcomes.append(None)
        except caught as error:
            outcomes.append(error)
    return outcomes
