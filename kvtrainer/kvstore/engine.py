"""The servers' engine in this process, as the stores 'local' and 'device' hold it."""

from __future__ import annotations

import time
from collections.abc import Callable

from torch import Tensor

from kvstore_server.engine import Engine
from kvstore_server.namespace import EngineConfig
from kvstore_server.protocol import messages as m
from kvtrainer.comm.client import Client
from kvtrainer.comm.loopback import Loopback
from kvtrainer.comm.transport import SessionOptions

_KEYS = "keys"
"""The namespace of a store's own keys; each Trainer has another."""


class LocalEngine:
    """One engine, called in place of a server, and the clients over it; integers may be kept in it.

    Attributes:
        client: The store's own client.
    """

    def __init__(self) -> None:
        self._engine = Engine(EngineConfig(integers=True), clock=time.monotonic)
        self._transport = _Direct([self._engine], time.monotonic)
        self.client = _connected(self._transport, _KEYS)

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
        return _connected(Loopback([self._engine], time.monotonic), namespace)


class _Direct(Loopback):
    """A loopback that knows whether the engine runs a request."""

    is_busy = False

    def send(self, server: int, request: m.Request, priority: int = 0) -> None:
        self.is_busy = True
        try:
            super().send(server, request, priority)
        finally:
            self.is_busy = False


def _connected(transport: Loopback, namespace: str) -> Client:
    client = Client(transport, SessionOptions(namespace, rank=0, num_workers=1), time.monotonic)
    client.connect()
    return client
