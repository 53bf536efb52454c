"""Several workers in one process whose rounds meet in the same engines: no sockets, no threads, no waiting."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from kvstore_server.engine.engine import Engine
from kvstore_server.engine.rounds import SYNCHRONOUS, Mode
from kvstore_server.protocol import messages as m
from kvtrainer.client.client import Client, LoopbackTransport
from kvtrainer.client.contribution import Contribution
from kvtrainer.client.session import SessionOptions
from tests.support.limits import LIMIT


class Line(LoopbackTransport):
    """One worker's transport; a reply that another worker's message sets off reaches it too.

    Attributes:
        sent: What the worker has sent, with the server to which, since `line_of` was asked for it.
        came: What it was told since.
        loses: Whether a message, which is the last one in `sent`, gets lost; may raise.
    """

    def __init__(self, engines: Sequence[Engine], lines: dict[bytes, Line], name: bytes) -> None:
        super().__init__(engines, time.monotonic, name)
        self.sent: list[tuple[int, m.RequestBody]] = []
        self.came: list[m.ReplyBody] = []
        self.loses: Callable[[m.RequestBody], bool] = lambda _: False
        self.is_noting = False
        self._lines = lines
        lines[name] = self

    def is_remote(self, server: int) -> bool:
        return True

    def send(self, server: int, request: m.Request, priority: int = 0) -> None:
        self.sent += [(server, request.body)] if self.is_noting else []
        if self.loses(request.body):
            return
        for out in self._engines[server].handle(self._peer, request, time.monotonic()):
            self._lines[out.peer]._replies.append((server, out.reply))

    def receive(self, timeout: float) -> tuple[int, m.Reply] | None:
        got = super().receive(timeout)
        self.came += [got[1].body] if got is not None and self.is_noting else []
        return got


def line_of(client: Client) -> Line:
    """The transport of a client that was connected here, which from now on notes what goes and comes."""
    line = client._session.transport
    assert isinstance(line, Line)
    line.is_noting = True
    return line


def connected(
    engines: Sequence[Engine], num_workers: int, timeout: float = LIMIT, mode: Mode = SYNCHRONOUS
) -> list[Client]:
    """The clients of all workers of a job; start a round on each before waiting for one."""
    lines: dict[bytes, Line] = {}
    clients = []
    for rank in range(num_workers):
        options = SessionOptions("job", rank, num_workers, timeout=timeout, mode=mode)
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
