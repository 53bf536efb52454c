"""Rates of clients: messages, bytes and time that one client may use in a second, if its key limits them.

ZeroMQ reads all connections of a socket in turn, and no single one can be left unread. So a message of a client that
has used up its rates is received, and waits here until it may be handled, behind the client's earlier ones. Other
clients go on meanwhile. Heartbeats do not wait, since a slow client is not a dead one; those beyond the rate of
messages are dropped.

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
"""Bytes of messages of one client that may wait, unless it has a limit for its memory."""
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
        self.num_delayed = 0
        """How many messages had to wait."""

    def holds_back(self, holder: KeyHolder, message: _Message, nbytes: int, now: float) -> bool:
        """Return whether a message has to wait; then it is kept until `due` returns it.

        Raises:
            AccessDeniedError: Too much of this client waits already.
        """
        client = self._refilled(holder, now)
        if client is None or (not client.waiting and client.wait_time() <= 0.0):
            return False
        most = min(holder.limits.memory, MAX_WAITING)
        if client.num_bytes + nbytes + _MESSAGE_COST > most:
            raise AccessDeniedError(
                f"client {holder.name!r} sends more than its key allows: {client.num_bytes} bytes of its messages "
                f"wait already, and {most:.0f} may; send less at a time, or raise its limits in clients.json"
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
        self.num_delayed += 1
        return True

    def drops_heartbeat(self, holder: KeyHolder, now: float) -> bool:
        """Return whether a heartbeat is one of too many, and count it otherwise."""
        client = self._refilled(holder, now)
        if client is None or "requests" not in client.levels:
            return False
        if client.levels["requests"] < -BURST * holder.limits.requests:
            return True
        client.levels["requests"] -= 1.0
        return False

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
        """Yield the messages that may be handled now. Charge each one before the next is taken."""
        for client in [one for one in self._clients.values() if one.waiting]:
            client.refill(client.holder, now)
            while client.waiting and client.wait_time() <= 0.0:
                nbytes, message = client.waiting.popleft()
                client.num_bytes -= nbytes + _MESSAGE_COST
                yield message

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
        return client
