"""Memory that outlives the process: files without a name, in memory (memfd) or on a disk, whose descriptors a
supervisor keeps.

A `DurableRegion` is one such file, mapped shared and writable. It has a number, which is part of its name in the store,
and a key that says what it is for; the log contains both. Nothing here says whether the contents are consistent: that
is the log's and the journal's work.

`DurableMemory.find` answers in which region a tensor lies, so callers protect what they write without knowing where it
was allocated.
"""

from __future__ import annotations

import fcntl
import os
import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from kvstore_server.durable.fd_store import PREFIX, FdStore
from kvstore_server.errors import RecoveryError
from kvstore_server.failpoints import failpoint
from kvstore_server.transport.arena import Bytes, SharedArena

REGION = PREFIX + "memory-"
_OWNER_READS = 0o400


class DurableRegion:
    """One file.

    Attributes:
        number: Identifies it among all regions that a server ever had.
        key: What it is for.
        fd: Open as long as the region exists, or until `close`.
        arena: The mapping.
        bytes: The memory; `data` is the same memory as a tensor. It stays mapped as long as one of them is referenced.
    """

    def __init__(self, number: int, key: str, fd: int) -> None:
        self.number, self.key, self.fd = number, key, fd
        self.close = weakref.finalize(self, os.close, fd)
        self.close.atexit = False
        self.arena = SharedArena(os.dup(fd), number)
        self.bytes: Bytes = self.arena.bytes
        self.data: Tensor = self.arena.data
        self.nbytes = self.arena.nbytes
        self.address = self.data.data_ptr()


class DurablePlace(NamedTuple):
    """Bytes of a region."""

    region: DurableRegion
    begin: int
    end: int


class DurableMemory:
    """All regions of one server. Not thread-safe.

    Args:
        store: Keeps their descriptors.
        record: Writes (number, size, key) of a new region to the log, after its descriptor was stored.
    """

    def __init__(self, store: FdStore, record: Callable[[int, int, str], object]) -> None:
        self._store = store
        self._record = record
        self.regions: dict[int, DurableRegion] = {}
        """Number → region."""
        self._by_key: dict[str, DurableRegion] = {}
        self._addresses: list[int] = []
        """Of all regions, ascending."""
        self._by_address: list[DurableRegion] = []
        self.last = 0
        """The highest number so far."""

    def take(self, key: str, nbytes: int, make_file: Callable[[int], int] | None = None) -> DurableRegion:
        """Return the region with that key; a new one, of zeros, if it does not exist.

        Args:
            make_file: Makes the file of a new one, given its size, and returns the descriptor; None: it is in memory.

        Raises:
            RecoveryError: It has another size.
            MemoryError: There is no memory, or the supervisor does not keep it.
        """
        found = self._by_key.get(key)
        if found is None:
            return self._make(key, nbytes, make_file or _make_memory_file)
        if found.nbytes != nbytes:
            raise RecoveryError(
                f"memory {found.number} of this server ({key}) has {found.nbytes} bytes, {nbytes} are needed"
            )
        return found

    def known(self, key: str) -> DurableRegion | None:
        return self._by_key.get(key)

    def _make(self, key: str, nbytes: int, make_file: Callable[[int], int]) -> DurableRegion:
        self.last += 1
        try:
            region = DurableRegion(self.last, key, make_file(max(nbytes, 1)))
        except (OSError, ValueError) as error:
            raise MemoryError(f"there is no memory of {nbytes} bytes for {key}: {error}") from None
        failpoint("server.memory.made")
        try:
            self._store.store(f"{REGION}{region.number}", region.fd)
        except RecoveryError as error:
            raise MemoryError(f"{nbytes} bytes for {key} cannot be kept: {error}") from None
        failpoint("server.memory.stored")
        self._record(region.number, region.nbytes, key)
        self.add(region)
        return region

    def add(self, region: DurableRegion) -> None:
        """Add a region that exists already."""
        self.regions[region.number] = self._by_key[region.key] = region
        self.last = max(self.last, region.number)
        at = bisect_right(self._addresses, region.address)
        self._addresses.insert(at, region.address)
        self._by_address.insert(at, region)

    def find(self, tensor: Tensor) -> DurablePlace | None:
        """Return where a contiguous tensor lies; None if it is not in a region."""
        address = tensor.data_ptr()
        at = bisect_right(self._addresses, address) - 1
        if at < 0:
            return None
        region = self._by_address[at]
        begin = address - region.address
        end = begin + tensor.nbytes
        return DurablePlace(region, begin, end) if end <= region.nbytes and begin < region.nbytes else None

    def drop_others(self, kept: Iterable[int]) -> None:
        """Drop all regions but those with these numbers; nothing in the log refers to the others."""
        for number in self.regions.keys() - set(kept):
            region = self.regions.pop(number)
            if self._by_key.get(region.key) is region:
                del self._by_key[region.key]
            at = self._by_address.index(region)
            del self._addresses[at], self._by_address[at]
            failpoint("server.memory.drop")
            self._store.remove(f"{REGION}{number}")
            region.close()


def _make_memory_file(nbytes: int) -> int:
    fd = os.memfd_create("kvstore-durable", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, nbytes)
        # No seal against later writable mappings: the next process needs one. Workers get a descriptor that is
        # open for reading only, and the mode keeps them from opening it again by mistake.
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        os.fchmod(fd, _OWNER_READS)
    except OSError:
        os.close(fd)
        raise
    return fd


def typed_durable_memory(memory: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
    """Return the first `numel` numbers of a region's bytes."""
    return memory[: numel * dtype.itemsize].view(dtype)
