"""The servers' engine in this process: a transport without sockets, and what the stores of one process hold."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Sequence

from torch import Tensor

from kvstore_server.engine import Engine
from kvstore_server.namespace import EngineConfig
from kvstore_server.protocol import messages as m
from kvstore_server.protocol.frames import divided
from kvstore_server.protocol.messages import SECRET_BYTES
from kvtrainer.comm.client import Client
from kvtrainer.comm.session import SessionOptions, Transport

_KEYS = "keys"
"""The namespace of a store's own keys; each Trainer has another."""


class Loopback(Transport):
    """Hands requests to engines by a function call. Payloads are passed by reference."""

    def __init__(
        self, engines: Sequence[Engine], clock: Callable[[], float], peer: bytes = bytes(SECRET_BYTES)
    ) -> None:
        self.num_servers = len(engines)
        self.is_busy = False
        """Whether an engine runs a request; who asks is then called by that request."""
        self._engines = list(engines)
        self._clock = clock
        self._peer = peer
        self._replies: deque[tuple[int, m.Reply]] = deque()

    def send(self, server: int, request: m.Request, priority: int = 0) -> None:
        self.is_busy = True
        try:
            for body in divided(request.body, sys.maxsize):
                one = request._replace(body=body)
                for out in self._engines[server].handle(self._peer, one, self._clock()):
                    if out.peer == self._peer:
                        self._replies.append((server, out.reply))
        finally:
            self.is_busy = False

    def receive(self, timeout: float) -> tuple[int, m.Reply] | None:
        return self._replies.popleft() if self._replies else None

    def describe(self, server: int) -> str:
        return f"in-process server {server}"

    def sockets(self, server: int) -> tuple[bytes, ...]:
        return (self._peer,)

    def last_sign(self, server: int) -> float:
        return self._clock()

    def close(self) -> None:
        self._replies.clear()


class LocalEngine:
    """One engine, called in place of a server, and the clients over it; integers may be kept in it.

    Attributes:
        client: The store's own client.
    """

    def __init__(self) -> None:
        self._engine = Engine(EngineConfig(integers=True), clock=time.monotonic)
        self._transport = Loopback([self._engine], time.monotonic)
        self.client = self._connected(self._transport, _KEYS)

    @property
    def is_busy(self) -> bool:
        """Whether it runs a request of the store; who asks is then called by that request."""
        return self._transport.is_busy

    @property
    def has_updater(self) -> bool:
        """Whether a function updates the store's keys."""
        return _KEYS in self._engine.updaters

    def set_updater(self, updater: Callable[[str, Tensor, Tensor], None] | None) -> None:
        """Let a function update the store's keys, or the optimizer again."""
        if updater is None:
            self._engine.updaters.pop(_KEYS, None)
        else:
            self._engine.updaters[_KEYS] = updater

    def open_client(self, namespace: str) -> Client:
        """Connect a client with a namespace of its own."""
        return self._connected(Loopback([self._engine], time.monotonic), namespace)

    def _connected(self, transport: Loopback, namespace: str) -> Client:
        client = Client(transport, SessionOptions(namespace, rank=0, num_workers=1), time.monotonic)
        client.connect()
        return client
