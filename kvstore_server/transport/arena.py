"""Shared memory: segments, and the ranges of them that are in use."""

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
_PORTION = 16 << 20
"""Bytes of data in a message: so few that copying them delays nobody, so many that all else is little beside that."""
_LINE = 64
_POPULATE_WRITE = 23


class SharedArena:
    """Memory of a descriptor, which is closed where the memory is ours; the mapping keeps the memory.

    Args:
        number: Tells it from other memory.
        is_ours: It may be written, and the other side sees that.
    """

    def __init__(self, fd: int, number: int = 0, is_ours: bool = True) -> None:
        self.fd = fd
        """Open as long as this object is there, if the memory is not ours."""
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
        self.numbers = torch.from_numpy(self.bytes)
        """The same memory."""

    def populate(self) -> None:
        """Take the pages of the first half now, which will be written; older systems take them as they are."""
        end = self.nbytes // 2 // mmap.PAGESIZE * mmap.PAGESIZE
        with suppress(OSError):
            for at in range(0, end, _PORTION):  # between two of them other threads go on
                self._map.madvise(_POPULATE_WRITE, at, min(_PORTION, end - at))

    def trim(self) -> None:
        """Give all pages back: what is there is lost, and reads as zeros."""
        with suppress(OSError):  # of a system that cannot, they stay
            self._map.madvise(mmap.MADV_REMOVE)


def make_memory(nbytes: int) -> int:
    """Return a descriptor of memory whose size nobody can change. Raises OSError where the system has none."""
    fd = os.memfd_create("kvstore", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, nbytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    except OSError:
        os.close(fd)
        raise
    return fd


class Places:
    """An allocator of places in a memory. It gives the lowest free one, so that what was used is used again."""

    def __init__(self, nbytes: int) -> None:
        self.used = 0
        """Bytes that are given."""
        self._given: dict[int, int] = {}
        """Begin → end."""
        self._free = [(0, nbytes)]
        """(begin, end), ascending, no two of them neighbours."""

    def take(self, nbytes: int) -> int | None:
        """Return where a place of so many bytes begins; None where there is none."""
        size = -(-nbytes // _LINE) * _LINE
        for at, (begin, end) in enumerate(self._free):
            if begin + size <= end:
                self._free[at : at + 1] = [(begin + size, end)] if begin + size < end else []
                self._given[begin] = begin + size
                self.used += size
                return begin
        return None

    def give_back(self, begin: int) -> None:
        """Note that a place is not read any more; what is none is ignored."""
        end = self._given.pop(begin, None)
        if end is None:
            return
        self.used -= end - begin
        at = bisect.bisect(self._free, (begin, end))
        if at < len(self._free) and self._free[at][0] == end:
            end = self._free.pop(at)[1]
        if at and self._free[at - 1][1] == begin:
            at, begin = at - 1, self._free.pop(at - 1)[0]
        self._free.insert(at, (begin, end))


def _extent(pieces: Sequence[Tensor]) -> tuple[int, int]:
    """Say where pieces begin and end in memory that lie one behind the other; of others the end is 0."""
    first = end = pieces[0].data_ptr()
    for piece in pieces:
        if piece.data_ptr() != end:
            return first, 0
        end += piece.nbytes
    return first, end


class Leases:
    """Buffers that a queue or a peer still reads from, by address: what waits to be sent is no copy.

    Attributes:
        held: How many messages with a buffer wait in a queue of ours, or are with a peer that reads it in its place.
    """

    def __init__(self) -> None:
        self.held: dict[int, int] = {}
        self.shared: Callable[[int], Tensor | None] = lambda _: None
        """Makes memory of so many bytes, zero, that peers can read in its place; None where there is none."""
        self.place_of: Callable[[Tensor], int | None] = lambda _: None
        """Names the place of a buffer in such memory; None where it is not there."""

    def hold(self, buffer: Tensor) -> None:
        """Note that a message with this buffer waits, or is read; may be called several times."""
        self.held[buffer.data_ptr()] = self.held.get(buffer.data_ptr(), 0) + 1

    def release(self, buffer: Tensor) -> None:
        """Note that one of the messages with this buffer has left its queue, or was read."""
        self.held[buffer.data_ptr()] -= 1
        if not self.held[buffer.data_ptr()]:
            del self.held[buffer.data_ptr()]

    def is_busy(self, buffer: Tensor) -> bool:
        """Tell whether somebody still reads from the buffer. It must not be written then."""
        return buffer.data_ptr() in self.held
