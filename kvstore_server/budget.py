"""The memory of a server: what its namespaces have claimed, and what it shares with workers.

Shared memory only makes a job faster, so it gets what tables leave and yields to them: a table is refused only if it
does not fit beside other tables. If that leaves too much claimed, the server closes channels of workers, whose
messages then go over TCP.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import NamedTuple

from kvstore_server.errors import ConfigurationError

_log = logging.getLogger(__name__)

_MUCH = 1 << 20
"""Claims from this size are compared with available memory; finding that out takes longer than a small claim."""


class ClientMemory(NamedTuple):
    """What the tables of one client take, in bytes, and what they may take."""

    client: str
    limit: int
    used: int


class Budget:
    """The memory that a server may use for its namespaces and for workers on its host.

    Args:
        limit: In bytes; 0: unlimited.
        server: Index of the server, for messages.
        available: Returns the bytes that are available on the machine now; 0: unknown.
    """

    def __init__(self, limit: int, server: int, available: Callable[[], int] = lambda: 0) -> None:
        self.used = 0
        """Bytes claimed by namespaces."""
        self.shared = 0
        """Bytes of memory shared with workers, without exported weights."""
        self.available = available
        self.client_memory: Callable[[str], ClientMemory | None] = lambda _: None
        """Returns the memory of the client whose namespace has this name; None: it has no limit of its own."""
        self._limit = limit
        self._server = server

    def check(self, nbytes: int, what: str, namespace: str = "") -> None:
        """Raise ConfigurationError if there is not enough left, for all or for the client whose namespace it is."""
        own = self.client_memory(namespace) if namespace else None
        if own is not None and own.used + nbytes > own.limit:
            raise ConfigurationError(
                f"{what} needs about {nbytes} bytes on server {self._server}, where client {own.client!r} has "
                f"{own.limit - own.used} left of the {own.limit} that its key allows (limits in clients.json); raise "
                "that limit, use more servers, or end other jobs of this client"
            )
        if self._limit and self.used + nbytes > self._limit:
            raise ConfigurationError(
                f"{what} needs about {nbytes} bytes on server {self._server}, which has {self._limit - self.used} left "
                f"of the {self._limit} that it may use (--max-memory); use more servers, or end jobs that still hold "
                "memory there"
            )

    def claim(self, nbytes: int, what: str, namespace: str = "") -> None:
        """Claim memory. Raises like `check`."""
        self.check(nbytes, what, namespace)
        # Not refused: pages are allocated as they are written, other processes may end until then, and swap and the
        # file cache do not count as available.
        self.used += nbytes
        if nbytes >= _MUCH and 0 < (available := self.available()) < nbytes:
            _log.warning(
                "%s needs about %d bytes on server %d, where %d are available now; without swap the system may end "
                "this process as they fill: use more servers, or end what else needs memory there",
                what, nbytes, self._server, available,
            )  # fmt: skip

    def release(self, nbytes: int) -> None:
        self.used -= nbytes

    def claim_shared(self, nbytes: int) -> bool:
        """Claim memory that is shared with a worker; return whether it fits."""
        # All of it counts, although a worker usually writes only half: it could write all, and that could not be
        # prevented.
        is_left = not self._limit or self.used + self.shared + nbytes <= self._limit
        self.shared += nbytes * is_left
        return is_left

    def release_shared(self, nbytes: int) -> None:
        self.shared -= nbytes

    def excess(self, shared: int) -> int:
        """Return by how many bytes the limit is exceeded if `shared` bytes are shared; 0 or less if it is not."""
        return self.used + shared - self._limit if self._limit else 0
