"""What carries a worker's messages, and who the worker is: what a session is built on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from kvstore_server.log_limit import SLOW_AFTER
from kvstore_server.modes import SYNCHRONOUS, Mode
from kvstore_server.protocol import messages as m


class Transport(Protocol):
    """Carries requests to servers and replies back."""

    num_servers: int

    def send(self, server: int, request: m.Request, priority: int = 0) -> None:
        """Hand a request over without blocking; payload memory must not change until it is answered.

        Where requests have to queue, one of higher priority overtakes those of lower ones.
        """

    def receive(self, timeout: float) -> tuple[int, m.Reply] | None:
        """Wait up to `timeout` seconds for a reply of any server."""

    def describe(self, server: int) -> str:
        """The server's name in error messages."""

    def sockets(self, server: int) -> tuple[bytes, ...]:
        """Routing ids of all sockets from which a server hears this process."""

    def start_heartbeats(self, sessions: Sequence[tuple[int, int]]) -> None:
        """Begin to tell every server, from time to time, that this process is alive: (run, session) each."""

    def last_sign(self, server: int) -> float:
        """When a server last answered such a message; on the clock of the session, 0 if it never did."""

    def close(self) -> None:
        """Send what is queued, for a short while, and give all resources back."""


@dataclass(frozen=True)
class SessionOptions:
    """Who this worker is and how long it waits.

    Args:
        namespace: Workers with equal names form one group on the servers.
        rank: 0 … num_workers − 1.
        num_workers: How many workers take part in every round.
        timeout: Seconds to wait for the other workers in a round or at a barrier.
        connect_timeout: Seconds to wait for a server to answer the first time.
        dead_after: Seconds of silence after which a server that must answer counts as unreachable.
        capability: Instruction set of this CPU.
        address: `host:pid`, for error messages on the other side.
        mode: When contributions count; the same for all workers of the namespace.
        slow_after: Seconds of waiting after which the log says for whom.
    """

    namespace: str
    rank: int
    num_workers: int
    timeout: float = 600.0
    connect_timeout: float = 30.0
    dead_after: float = 20.0
    capability: str = ""
    address: str = ""
    mode: Mode = SYNCHRONOUS
    slow_after: float = SLOW_AFTER
