"""The transport to an engine in this process: no socket, no bytes, no waiting."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from kvstore_server.engine import Engine
from kvstore_server.protocol import messages as m
from kvstore_server.protocol.messages import SECRET_BYTES


class Loopback:
    """Hands requests to engines by a function call. Payloads are passed by reference."""

    def __init__(
        self, engines: Sequence[Engine], clock: Callable[[], float], peer: bytes = bytes(SECRET_BYTES)
    ) -> None:
        self.num_servers = len(engines)
        self._engines = list(engines)
        self._clock = clock
        self._peer = peer
        self._replies: deque[tuple[int, m.Reply]] = deque()

    def send(self, server: int, request: m.Request, priority: int = 0) -> None:
        for out in self._engines[server].handle(self._peer, request, self._clock()):
            if out.peer == self._peer:
                self._replies.append((server, out.reply))

    def receive(self, timeout: float) -> tuple[int, m.Reply] | None:
        return self._replies.popleft() if self._replies else None

    def describe(self, server: int) -> str:
        return f"in-process server {server}"

    def sockets(self, server: int) -> tuple[bytes, ...]:
        return (self._peer,)

    def start_heartbeats(self, sessions: Sequence[tuple[int, int]]) -> None:
        """Not needed: this process cannot outlive itself."""

    def last_sign(self, server: int) -> float:
        return self._clock()

    def close(self) -> None:
        self._replies.clear()
