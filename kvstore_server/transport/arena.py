"""Shared memory: mapped segments, the allocator of ranges in them, and leases on buffers that are being read."""

from __future__ import annotations

import bisect
import fcntl
import mmap
import os
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Bytes = npt.NDArray[np.uint8]
PORTION = 16 << 20
"""The most data in one message: little enough that copying it delays no one, enough to make the overhead small."""
_LINE = 64
_POPULATE_WRITE = 23


class SharedArena:
    """A mapping of a descriptor's memory. The descriptor is closed if the memory is ours; the mapping keeps the
    memory.

    Args:
        number: Identifies it among other memories.
        is_ours: True: writable, and the other side sees the writes. False: private.
    """

    def __init__(self, fd: int, number: int = 0, is_ours: bool = True) -> None:
        self.fd = fd
        """Open as long as this object exists, if the memory is not ours."""
        try:
            self.nbytes = os.fstat(fd).st_size
            self._map = mmap.mmap(fd, self.nbytes, mmap.MAP_SHARED if is_ours else mmap.MAP_PRIVATE)
        except BaseException:
            os.close(fd)
            raise
        if is_ours:
            os.close(fd)
        else:
            weakref.finalize(self, os.close, fd).atexit = False
        self.number = number
        self.bytes: Bytes = np.frombuffer(self._map, np.uint8)
        self.data = torch.from_numpy(self.bytes)
        """The same memory as a tensor."""

    def populate(self) -> None:
        """Fault in the pages of the first half, which will be written soon; no effect on older kernels."""
        end = self.nbytes // 2 // mmap.PAGESIZE * mmap.PAGESIZE
        with suppress(OSError):
            for at in range(0, end, PORTION):  # the GIL is released in between
                self._map.madvise(_POPULATE_WRITE, at, min(PORTION, end - at))

    def expect_random_access(self) -> None:
        """Let the kernel read single pages of the file that is mapped, and not those around them."""
        with suppress(OSError):
            self._map.madvise(mmap.MADV_RANDOM)

    def trim(self) -> None:
        """Return all pages to the system: the contents are lost and read as zeros."""
        with suppress(OSError):  # not supported: the pages stay
            self._map.madvise(mmap.MADV_REMOVE)


def make_shared_memory(nbytes: int) -> int:
    """Return a descriptor of anonymous memory with a sealed size. Raises OSError if the system has no memfd."""
    fd = os.memfd_create("kvstore", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, nbytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    except OSError:
        os.close(fd)
        raise
    return fd


class ArenaPlaces:
    """An allocator of ranges in a memory. It returns the lowest free range, so that pages are reused."""

    def __init__(self, nbytes: int) -> None:
        self.used = 0
        """Bytes allocated."""
        self._given: dict[int, int] = {}
        """Begin → end."""
        self._free = [(0, nbytes)]
        """(begin, end), ascending; adjacent ranges are merged."""

    def take(self, nbytes: int) -> int | None:
        """Return the begin of a new range of `nbytes` bytes; None if none is large enough."""
        size = -(-nbytes // _LINE) * _LINE
        for at, (begin, end) in enumerate(self._free):
            if begin + size <= end:
                self._free[at : at + 1] = [(begin + size, end)] if begin + size < end else []
                self._given[begin] = begin + size
                self.used += size
                return begin
        return None

    def release(self, begin: int) -> None:
        """Free a range; unknown ones are ignored, because a peer sends them."""
        end = self._given.pop(begin, None)
        if end is None:
            return
        self.used -= end - begin
        # Merge it with free neighbours.
        at = bisect.bisect(self._free, (begin, end))
        if at < len(self._free) and self._free[at][0] == end:
            end = self._free.pop(at)[1]
        if at and self._free[at - 1][1] == begin:
            at, begin = at - 1, self._free.pop(at - 1)[0]
        self._free.insert(at, (begin, end))


def find_arena_extent(pieces: Sequence[Tensor]) -> tuple[int, int]:
    """Return the begin and end address of pieces that are contiguous in memory; otherwise the end is 0."""
    first = end = pieces[0].data_ptr()
    for piece in pieces:
        if piece.data_ptr() != end:
            return first, 0
        end += piece.nbytes
    return first, end


class Leases:
    """Buffers that a queue or a peer still reads, by address. They wait to be sent without a copy, so they must not
    change.

    Attributes:
        held: Address → how many messages with that buffer are queued, or are being read in place by a peer.
    """

    def __init__(self) -> None:
        self.held: dict[int, int] = {}
        self.shared: Callable[[int], Tensor | None] = lambda _: None
        """Allocates zeroed memory that peers can map; None if that is not possible."""
        self.export: Callable[[int, int, Bytes], object] = lambda _number, _fd, _memory: None
        """Lets peers map memory that exists already: its number, descriptor and bytes."""
        self.location_of: Callable[[Tensor], int | None] = lambda _: None
        """Returns the location of a buffer in such memory; None if it is not there."""

    def hold(self, buffer: Tensor) -> None:
        """Record that a message with this buffer is queued or read; calls are counted."""
        self.held[buffer.data_ptr()] = self.held.get(buffer.data_ptr(), 0) + 1

    def release(self, buffer: Tensor) -> None:
        """Undo one `hold`."""
        self.held[buffer.data_ptr()] -= 1
        if not self.held[buffer.data_ptr()]:
            del self.held[buffer.data_ptr()]

    def is_busy(self, buffer: Tensor) -> bool:
        """Return whether the buffer is still being read, so that it must not be written."""
        return buffer.data_ptr() in self.held
