"""Rates of clients: messages, bytes and time that one client may use in a second, if its key limits them.

ZeroMQ reads all connections of a socket in turn, and no single one can be left unread. So a message of a client that
has used up its rates is received, and waits here until it may be handled, behind the client's earlier ones. Other
clients go on meanwhile. Heartbeats do not wait, since a slow client is not a dead one; a flood of them is dropped.

Each rate is a token bucket that holds what is allowed in `BURST` seconds. A message is handled if no bucket is
overdrawn, and then overdraws it by what it takes, so the average holds also for messages that are larger than a bucket.

Invariants: the messages of a client stay in order; what waits of a client is bounded. No sockets; the time is an
argument.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from kvstore_server.errors import AccessDeniedError
from kvstore_server.keys import KeyHolder

_log = logging.getLogger(__name__)

BURST = 1.0
"""Seconds for which a client that was idle may use all at once what its rates allow."""
MAX_WAITING = 1 << 30
"""Bytes of messages of one client that may wait."""
_HEARTBEATS = 100.0
"""Heartbeats a second that a client may send at least; each of its workers sends about one to each server."""
_MESSAGE_COST = 4096
"""What a waiting message takes beside its own bytes."""
_LOGGED_EVERY = 60.0
_LEAST_WAIT = 1e-6
"""A shorter wait is a rounding error of the levels."""
_RATES = "requests", "bytes", "time"

_Message = TypeVar("_Message")


@dataclass
class _Client(Generic[_Message]):
    holder: KeyHolder
    at: float
    """When the levels were brought up to date."""
    levels: dict[str, float] = field(default_factory=dict)
    """Of each bucket: what is left in it; negative: it is overdrawn."""
    waiting: deque[tuple[int, _Message]] = field(default_factory=deque)
    num_bytes: int = 0
    """Of the messages that wait."""
    logged_at: float = -math.inf
    heartbeats: float = 0.0
    """How many heartbeats are left of what may be sent at once."""
    heartbeat_at: float = -math.inf

    def refill(self, holder: KeyHolder, now: float) -> None:
        """Add what the time since then allows; the limits may have changed meanwhile."""
        self.holder, passed, self.at = holder, now - self.at, now
        for name in _RATES:
            rate = getattr(holder.limits, name)
            if rate < math.inf:
                full = rate * BURST
                self.levels[name] = min(full, self.levels.get(name, full) + rate * passed)
            else:
                self.levels.pop(name, None)

    def wait_time(self) -> float:
        """Seconds until no bucket is overdrawn, from the last `refill` on."""
        limits = self.holder.limits
        wait = max((-level / getattr(limits, name) for name, level in self.levels.items()), default=0.0)
        return wait if wait > _LEAST_WAIT else 0.0


class ClientRates(Generic[_Message]):
    """Holds back the messages of clients that have used up their rates."""

    def __init__(self) -> None:
        self._clients: dict[bytes, _Client[_Message]] = {}
        """By public key; only clients whose rates are limited."""
        self.num_waiting = 0
        """How many messages wait."""

    def concerns(self, holder: KeyHolder) -> bool:
        """Return whether a client has rates, or messages of it wait still."""
        limits = holder.limits
        return min(limits.requests, limits.bytes, limits.time) < math.inf or holder.public in self._clients

    def holds_back(self, holder: KeyHolder, message: _Message, nbytes: int, now: float) -> bool:
        """Return whether a message has to wait; then it is kept until `due` returns it.

        Raises:
            AccessDeniedError: Too much of this client waits already.
        """
        client = self._refilled(holder, now)
        if client is None or (not client.waiting and client.wait_time() <= 0.0):
            return False
        if client.num_bytes + nbytes + _MESSAGE_COST > MAX_WAITING:
            raise AccessDeniedError(
                f"client {holder.name!r} sends more than its key allows: {client.num_bytes} bytes of its messages "
                f"wait already, and {MAX_WAITING} may; send less at a time, or raise its limits in clients.json"
            )
        if now - client.logged_at > _LOGGED_EVERY:
            client.logged_at = now
            used_up = [name for name, level in client.levels.items() if level < 0.0]
            _log.warning(
                "messages of client %r wait: it uses more than its key allows (%s)",
                holder.name,
                ", ".join(used_up),
            )
        client.waiting.append((nbytes, message))
        client.num_bytes += nbytes + _MESSAGE_COST
        self.num_waiting += 1
        return True

    def drops_heartbeat(self, holder: KeyHolder, now: float) -> bool:
        """Return whether a heartbeat is one of too many, and count it otherwise."""
        client = self._refilled(holder, now)
        if client is None:
            return False
        rate = max(_HEARTBEATS, holder.limits.requests)
        passed, client.heartbeat_at = now - client.heartbeat_at, now
        client.heartbeats = min(rate * BURST, client.heartbeats + rate * passed)
        if client.heartbeats < 1.0:
            return True
        client.heartbeats -= 1.0
        return False

    def drops_refused(self, holder: KeyHolder, now: float, nbytes: int, time: float) -> bool:
        """Charge a message that was refused; return whether its client has sent so many that it gets no answer."""
        self.charge(holder, now, 1, nbytes, time)
        client = self._clients.get(holder.public)
        return client is not None and client.wait_time() > BURST

    def charge(
        self, holder: KeyHolder, now: float, requests: int = 0, nbytes: int = 0, time: float = 0.0
    ) -> None:
        """Take from the buckets of a client what it has used."""
        client = self._refilled(holder, now)
        if client is not None:
            for name, used in zip(_RATES, (requests, nbytes, time), strict=True):
                if name in client.levels:
                    client.levels[name] -= used

    def due(self, now: float) -> Iterator[_Message]:
        """Yield the messages that may be handled now, of all clients in turn.

        Charge each one before the next is taken. The caller may stop at any time.
        """
        clients = [one for one in self._clients.values() if one.waiting]
        for client in clients:
            client.refill(client.holder, now)
        while clients := [one for one in clients if one.waiting and one.wait_time() <= 0.0]:
            for client in clients:
                yield self._take(client)

    def _take(self, client: _Client[_Message]) -> _Message:
        nbytes, message = client.waiting.popleft()
        client.num_bytes -= nbytes + _MESSAGE_COST
        self.num_waiting -= 1
        return message

    def next_due(self, now: float) -> float:
        """Return the seconds until the next message may be handled; infinity if none waits."""
        waits = [one.wait_time() - (now - one.at) for one in self._clients.values() if one.waiting]
        return max(0.0, min(waits, default=math.inf))

    def _refilled(self, holder: KeyHolder, now: float) -> _Client[_Message] | None:
        client = self._clients.get(holder.public)
        limits = holder.limits
        if client is None:
            if min(limits.requests, limits.bytes, limits.time) == math.inf:
                return None
            client = self._clients[holder.public] = _Client(holder, now)
        client.refill(holder, now)
        if not client.levels and not client.waiting:  # its limits were removed
            del self._clients[holder.public]
            return None
        return client
