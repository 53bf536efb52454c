"""Several workers in one process whose rounds meet in the same engines: no sockets, no threads, no waiting."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence

from kvstore_server.engine import Engine
from kvstore_server.protocol import messages as m
from kvtrainer.comm.client import Client
from kvtrainer.comm.session import SessionOptions
from tests.support.limits import LIMIT


class Line:
    """One worker's transport; a reply that another worker's message sets off reaches it too."""

    def __init__(self, engines: Sequence[Engine], lines: dict[bytes, Line], name: bytes) -> None:
        self.num_servers = len(engines)
        self._engines, self._lines, self._name = list(engines), lines, name
        self._replies: deque[tuple[int, m.Reply]] = deque()
        lines[name] = self

    def send(self, server: int, request: m.Request, priority: int = 0) -> None:
        for out in self._engines[server].handle(self._name, request, time.monotonic()):
            self._lines[out.peer]._replies.append((server, out.reply))

    def receive(self, timeout: float) -> tuple[int, m.Reply] | None:
        return self._replies.popleft() if self._replies else None

    def describe(self, server: int) -> str:
        return f"server {server}"

    def sockets(self, server: int) -> tuple[bytes, ...]:
        return (self._name,)

    def start_heartbeats(self, sessions: Sequence[tuple[int, int]]) -> None:
        """Not needed: all live in one process."""

    def last_sign(self, server: int) -> float:
        return time.monotonic()

    def close(self) -> None:
        self._replies.clear()


def connected(engines: Sequence[Engine], num_workers: int, timeout: float = LIMIT) -> list[Client]:
    """The clients of all workers of a job; start a round on each before waiting for one."""
    lines: dict[bytes, Line] = {}
    clients = []
    for rank in range(num_workers):
        options = SessionOptions("job", rank, num_workers, timeout=timeout)
        clients.append(Client(Line(engines, lines, b"%d" % rank), options, time.monotonic))
        clients[rank].connect()
    return clients
