"""How much memory this process may use at most, and what of it a server has promised."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

from kvstore_server.errors import ConfigurationError

_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")


def memory_limit(cgroup_limit: Path = _CGROUP_LIMIT) -> int:
    """Bytes of the machine's memory, or of the container's share of it if that is less."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        return min(total, int(cgroup_limit.read_text()))
    except (OSError, ValueError):  # not in a container, or one without a limit: "max"
        return total


def return_free_memory() -> None:
    """Give memory that is free, but that the C library keeps for later, back to the system, where it can do that."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


class Budget:
    """The memory that the namespaces of a server may have together.

    Args:
        limit: In bytes; 0: any amount.
        server: Index of the server, for messages.
    """

    def __init__(self, limit: int, server: int) -> None:
        self.used = 0
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
        """Promise memory. Raises as `check`."""
        self.check(nbytes, what)
        self.used += nbytes

    def give_back(self, nbytes: int) -> None:
        """What was promised is not needed any more."""
        self.used -= nbytes
