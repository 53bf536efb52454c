"""Shared memory of a server that its workers map: exported weights and staging buffers."""

from __future__ import annotations

import fcntl
import logging
import os
import weakref
from collections.abc import Collection, Sequence

from torch import Tensor

from kvstore_server.transport.arena import Bytes, Leases, SharedArena, find_arena_extent

_log = logging.getLogger(__name__)
ARENA_SHIFT = 40
"""A location is an offset with, from this bit on, the number of its memory."""
FIRST_WEIGHTS = 1 << 20
"""First number of memories that do not belong to a channel: exported weights and staging buffers."""
FIRST_DURABLE = 1 << 21
"""First number of memories that outlive the process; the journal's regions are numbered from here."""
_SEAL_FUTURE_WRITE = 0x10


class WeightExports:
    """Shared memory for a server's weights, mapped read-only by its workers.

    It is counted as memory of the tables, so nothing is claimed for it here.

    Args:
        leases: Is told which weights are being read.
    """

    def __init__(self, leases: Leases) -> None:
        self.leases = leases
        self.fds: dict[int, int] = {}
        """Number → the descriptor of the memory."""
        self._memories: dict[int, tuple[int, int]] = {}
        """Number → (address, size)."""
        self._last = FIRST_WEIGHTS
        self._has_said_why = False

    def make(self, nbytes: int) -> Tensor | None:
        """Allocate zeroed memory for weights, freed with the last reference; None if that is not possible."""
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
        except (OSError, ValueError) as error:  # an older kernel, or too little memory
            os.close(fd)
            self._say_why(error)
            return None
        self._last += 1
        self.fds[self._last] = fd
        self._memories[self._last] = arena.data.data_ptr(), nbytes
        weakref.finalize(arena.bytes, self._forget, self._last).atexit = False
        return arena.data

    def add(self, number: int, fd: int, memory: Bytes) -> None:
        """Export memory that outlives this process, under a number that stays the same in the next one.

        Workers get a descriptor that is open for reading only. There is no seal that forbids later writable mappings,
        because the next process needs one.
        """
        try:
            own = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            self._say_why(error)
            return
        number += FIRST_DURABLE
        self.fds[number] = own
        self._memories[number] = memory.ctypes.data, memory.nbytes
        weakref.finalize(memory, self._forget, number).atexit = False

    def _say_why(self, error: Exception) -> None:
        if not self._has_said_why:
            _log.warning("workers of this host are sent weights, and cannot map them: %s", error)
        self._has_said_why = True

    def find(self, pieces: Sequence[Tensor]) -> int | None:
        """Return the location of pieces that are contiguous in exported memory; None if they are not."""
        first, end = find_arena_extent(pieces)
        # A copy, because finalizers may remove entries meanwhile.
        for number, (address, nbytes) in self._memories.copy().items():
            if address <= first <= end <= address + nbytes:
                return first - address | number << ARENA_SHIFT
        return None

    def close(self) -> None:
        for number in list(self.fds):
            self._forget(number)

    def _forget(self, number: int) -> None:
        if number in self.fds:
            os.close(self.fds.pop(number))
            del self._memories[number]


class ExportedStagingBuffer:
    """A shared staging buffer: the worker writes, the server reads in place.

    Args:
        reads: Contains a location for each message that the server may still be reading.
    """

    def __init__(self, fd: int, number: int, reads: Collection[int]) -> None:
        self.fd = fd
        """Open as long as this object exists."""
        weakref.finalize(self, os.close, fd).atexit = False
        self.arena = SharedArena(os.dup(fd), number)
        self._reads = reads
        self.is_lost = False
        """It is no longer known what the server is reading."""

    @property
    def is_free(self) -> bool:
        """Whether the server has read everything it was sent, so that the buffer may be written."""
        return not (self._reads or self.is_lost)

    def find(self, pieces: Sequence[Tensor]) -> int | None:
        """Return the location of pieces that are contiguous in this buffer; None if they are not."""
        first, end = find_arena_extent(pieces)
        begin = first - self.arena.data.data_ptr()
        if not 0 <= begin <= begin + end - first <= self.arena.nbytes:
            return None
        return begin | self.arena.number << ARENA_SHIFT


class ExportedStagingRequest:
    def __init__(self) -> None:
        self.staging_buffer: ExportedStagingBuffer | None = None
        """Set once the server has made it; stays None if it has no memory, or another buffer was requested
        meanwhile.
        """
        self.is_sent = False
        """Whether the request was sent."""
