"""What of its memory a server has promised: to the tables of its namespaces, and to workers that share memory with it.

Shared memory only makes a job faster, so it gets what tables leave, and makes way for them: a table is refused only if
it does not fit beside other tables. A server that has promised too much since then closes channels of workers, whose
messages go over TCP from then on.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from kvstore_server.errors import ConfigurationError

_log = logging.getLogger(__name__)

_MUCH = 1 << 20
"""Bytes from which on it is looked whether they are available, which takes longer than to promise few."""


class Budget:
    """Memory that a server may use for its namespaces and workers of its host.

    Args:
        limit: In bytes; 0: any amount.
        server: Index of the server, for messages.
        available: Returns how many bytes can still be used now; 0: nobody knows.
    """

    def __init__(self, limit: int, server: int, available: Callable[[], int] = lambda: 0) -> None:
        self.used = 0
        """Bytes that namespaces have."""
        self.shared = 0
        """Bytes of the memory that is shared with workers, beside the weights that they read where they lie."""
        self.available = available
        self._limit = limit
        self._server = server

    def check(self, nbytes: int, what: str) -> None:
        """Raise ConfigurationError if there is not so much left."""
        if self._limit and self.used + nbytes > self._limit:
            raise ConfigurationError(
                f"{what} needs about {nbytes} bytes on server {self._server}, which has {self._limit - self.used} left "
                f"of the {self._limit} that it may use (--max-memory); use more servers, or end jobs that still hold "
                "memory there"
            )

    def claim(self, nbytes: int, what: str) -> None:
        """Promise memory. Raises as `check`.

        More than is available gets a line in the log, and is not refused: pages are taken as they are written, until
        then other processes may end, and neither swap nor files that can be read again count as available.
        """
        self.check(nbytes, what)
        self.used += nbytes
        if nbytes >= _MUCH and 0 < (available := self.available()) < nbytes:
            _log.warning(
                "%s needs about %d bytes on server %d, where %d are available now; without swap the system may end "
                "this process as they fill: use more servers, or end what else needs memory there",
                what, nbytes, self._server, available,
            )  # fmt: skip

    def give_back(self, nbytes: int) -> None:
        """Take back a promise of memory that is not needed any more."""
        self.used -= nbytes

    def claim_shared(self, nbytes: int) -> bool:
        """Promise memory that is shared with a worker, if it fits.

        Returns whether it does. All of it counts, although a worker as a rule writes half of most of it: it may write
        all, and nobody could keep it from that.
        """
        is_left = not self._limit or self.used + self.shared + nbytes <= self._limit
        self.shared += nbytes * is_left
        return is_left

    def give_back_shared(self, nbytes: int) -> None:
        """Take back a promise of `claim_shared`."""
        self.shared -= nbytes

    def excess(self, shared: int) -> int:
        """Return the bytes above the limit, if so many are shared; 0 or less: none."""
        return self.used + shared - self._limit if self._limit else 0
