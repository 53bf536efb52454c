"""Shared memory of a server that its workers map: exported weights and staging buffers."""

from __future__ import annotations

import fcntl
import logging
import os
import weakref
from collections.abc import Collection, Sequence

from torch import Tensor

from kvstore_server.transport.arena import Leases, SharedArena, _extent

_log = logging.getLogger(__name__)
_NUMBER = 40
"""A place is named by its offset and, from this bit on, the number of the memory in which it is."""
_FIRST_WEIGHTS = 1 << 20
"""The first number of memory that is not a channel's own, but holds weights, or is a staging buffer."""
_SEAL_FUTURE_WRITE = 0x10


class WeightExports:
    """A server's weights in memory that all its workers can read and none can change.

    They count as what the tables need, wherever they lie, so nothing is claimed for their memory.

    Args:
        leases: Is told which weights somebody reads.
    """

    def __init__(self, leases: Leases) -> None:
        self.leases = leases
        self.fds: dict[int, int] = {}
        """Number of a memory → its descriptor."""
        self._places: dict[int, tuple[int, int]] = {}
        """The number → its address and size."""
        self._last = _FIRST_WEIGHTS
        self._has_said_why = False

    def make(self, nbytes: int) -> Tensor | None:
        """Make memory for weights, zero, which is forgotten when nobody refers to it; None where that is impossible."""
        try:
            fd = os.memfd_create("kvstore-weights", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        except OSError as error:
            self._say_why(error)
            return None
        try:
            os.ftruncate(fd, nbytes)
            arena = SharedArena(os.dup(fd))
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS,
                        fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | _SEAL_FUTURE_WRITE | fcntl.F_SEAL_SEAL)  # fmt: skip
        except (OSError, ValueError) as error:  # an older system, or not so much memory
            os.close(fd)
            self._say_why(error)
            return None
        self._last += 1
        self.fds[self._last] = fd
        self._places[self._last] = arena.numbers.data_ptr(), nbytes
        weakref.finalize(arena.bytes, self._forget, self._last).atexit = False
        return arena.numbers

    def _say_why(self, error: Exception) -> None:
        """Say once why workers are sent weights that they could have read in their place."""
        if not self._has_said_why:
            _log.warning("workers of this host are sent weights, and cannot map them: %s", error)
        self._has_said_why = True

    def find(self, pieces: Sequence[Tensor]) -> int | None:
        """Return the place of pieces that lie here one behind the other; None where they do not."""
        first, end = _extent(pieces)
        for number, (address, nbytes) in self._places.copy().items():  # one may be forgotten meanwhile
            if address <= first <= end <= address + nbytes:
                return first - address | number << _NUMBER
        return None

    def close(self) -> None:
        """Close the descriptors; the memory stays for those who have it."""
        for number in list(self.fds):
            self._forget(number)

    def _forget(self, number: int) -> None:
        if number in self.fds:
            os.close(self.fds.pop(number))
            del self._places[number]


class StagingBuffer:
    """A server's memory in which a worker makes what the server reads in its place.

    Args:
        reads: Has a place for each message of which the server may still read.
    """

    def __init__(self, fd: int, number: int, reads: Collection[int]) -> None:
        self.fd = fd
        """Open as long as this object is there."""
        weakref.finalize(self, os.close, fd).atexit = False
        self.arena = SharedArena(os.dup(fd), number)
        self._reads = reads
        self.is_lost = False
        """Nobody tells any more what the server still reads."""

    @property
    def is_free(self) -> bool:
        """Whether the server has read all that it was sent, so that it may be written."""
        return not (self._reads or self.is_lost)

    def find(self, pieces: Sequence[Tensor]) -> int | None:
        """Return the place of pieces that lie here one behind the other; None where they do not."""
        first, end = _extent(pieces)
        begin = first - self.arena.numbers.data_ptr()
        if not 0 <= begin <= begin + end - first <= self.arena.nbytes:
            return None
        return begin | self.arena.number << _NUMBER


class StagingBufferRequest:
    """A staging buffer that a worker has asked for."""

    def __init__(self) -> None:
        self.staging_buffer: StagingBuffer | None = None
        """Set once the server has made it; stays None where it has no memory, or another was asked for meanwhile."""
        self.is_sent = False
        """Whether the server will hear of it."""
