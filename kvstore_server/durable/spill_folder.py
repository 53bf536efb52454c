"""Rows of hash tables in files on a local disk (`--spill-dir`), so that a table may be larger than memory.

The files are mapped, so rows are read and written like memory. The kernel keeps pages of them in memory while there is
room, and writes others to the disk. A file has no name: nothing is left of it when the last process that has it open
ends, however that ends.

A write to a mapping cannot fail: where the disk has no block left, the process dies (SIGBUS). So files are as long as
they can ever get, but empty, and blocks are allocated before rows are written there (`SpilledMemory.extend`).
"""

from __future__ import annotations

import errno
import logging
import mmap
import os
import resource
import tempfile
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NamedTuple

from torch import Tensor

from kvstore_server.errors import ConfigurationError
from kvstore_server.transport.arena import SharedArena

_log = logging.getLogger(__name__)

_LARGEST = 1 << 43
"""Bytes of the largest file that is made; ext4 has files of up to 16 TiB."""
_AHEAD = 16
"""A sixteenth more blocks are allocated than needed, within these bounds in bytes."""
_LEAST_AHEAD, _MOST_AHEAD = 1 << 20, 256 << 20
_PAGE = mmap.PAGESIZE
_BLOCK = 512
"""Unit of st_blocks, in bytes."""
_MOUNTS = "/proc/self/mountinfo"


class SpillFolder:
    """A directory of a local disk for the rows of hash tables; several servers may share it.

    Raises:
        ConfigurationError: There is no such directory, or no file can be made in it.
    """

    def __init__(self, path: str) -> None:
        self.path = os.path.abspath(path)
        try:
            fd = self.make_file(_PAGE)
            try:
                os.posix_fallocate(fd, 0, _PAGE)
            finally:
                os.close(fd)
        except OSError as error:
            raise ConfigurationError(
                f"--spill-dir {path} cannot be used: {error.strerror}; give a directory on a local disk that this user "
                "may write to"
            ) from None
        kind = _file_system_of(self.path)
        if kind in ("tmpfs", "ramfs"):
            _log.warning("--spill-dir %s is on %s, which is memory: give a directory on a disk", path, kind)

    @property
    def room(self) -> int:
        """Bytes that one file can ever have."""
        found = os.statvfs(self.path)
        limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
        limits = [_LARGEST, found.f_blocks * found.f_frsize]
        return min(limits if limit == resource.RLIM_INFINITY else [*limits, limit])

    @property
    def free(self) -> int:
        """Bytes that are free on the disk."""
        found = os.statvfs(self.path)
        return found.f_bavail * found.f_frsize

    def make_file(self, nbytes: int) -> int:
        """Return the descriptor of a new file without a name, without blocks. Raises OSError."""
        try:
            fd = os.open(self.path, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
        except OSError as error:
            # Some file systems do not know files without a name.
            if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL):
                raise
            fd, name = tempfile.mkstemp(prefix="kvstore-", dir=self.path)
            os.unlink(name)
        try:
            os.ftruncate(fd, nbytes)
        except OSError:
            os.close(fd)
            raise
        return fd


class SpillFile(NamedTuple):
    """A file of rows that is mapped."""

    arena: SharedArena
    fds: Sequence[int]
    """Its descriptor, and those of files that need as many blocks."""


OpenSpillFile = Callable[[str, int], SpillFile]
"""(name, bytes) → the file of that name, whose descriptors are open as long as its table exists. Raises MemoryError."""


class SpilledMemory:
    """The files of one hash table, one for each array. Not thread-safe.

    Args:
        open_file: Opens or makes a file; None: makes one that ends with this object and its tensors.
    """

    def __init__(self, folder: SpillFolder, open_file: OpenSpillFile | None = None) -> None:
        self.folder = folder
        self._open = open_file
        self._files: dict[str, SpillFile] = {}
        self._names: dict[int, str] = {}
        """Address of each file's memory → its name."""
        self._allocated: dict[str, int] = {}
        """Bytes from the beginning of each file that are known to have blocks."""

    def take(self, name: str, nbytes: int) -> Tensor:
        """Return the memory of a file as uint8, the same one for each call. A new one is zero.

        Only its first page may be used before `extend`.

        Raises:
            MemoryError: No such file can be made or mapped.
        """
        found = self._files.get(name)
        if found is None:
            length = -(-nbytes // _PAGE) * _PAGE
            found = self._make_file(length) if self._open is None else self._open(name, length)
            try:
                for fd in found.fds:
                    os.posix_fallocate(fd, 0, _PAGE)
            except OSError as error:
                raise self._no_file(nbytes, error) from None
            found.arena.expect_random_access()
            self._files[name], self._allocated[name] = found, _PAGE
            self._names[found.arena.data.data_ptr()] = name
        return found.arena.data

    def has_blocks(self, arrays: Sequence[Tensor]) -> bool:
        """Return whether arrays, each from the beginning of its file, can be written."""
        return all([array.nbytes <= self._allocated[self._name(array)] for array in arrays if array.nbytes])

    def extend(self, arrays: Sequence[Tensor], what: str) -> None:
        """Allocate blocks for arrays, each from the beginning of its file. Raises ConfigurationError if that fails."""
        # 1. Which files need more blocks, up to where, and how many bytes that takes.
        ends = {}
        for array in [one for one in arrays if one.nbytes]:
            name = self._name(array)
            if array.nbytes > self._allocated[name]:
                ahead = min(max(array.nbytes // _AHEAD, _LEAST_AHEAD), _MOST_AHEAD)
                end = -(-(array.nbytes + ahead) // _PAGE) * _PAGE
                ends[name] = min(end, self._files[name].arena.nbytes)
        if not ends:
            return
        needed = sum(
            [
                max(end - os.fstat(fd).st_blocks * _BLOCK, 0)
                for name, end in ends.items()
                for fd in self._files[name].fds
            ]
        )
        free = self.folder.free
        # 2. Allocate them. What is certain to fail is not begun, because it would fill the disk.
        try:
            if needed > free:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            for name, end in ends.items():
                for fd in self._files[name].fds:
                    os.posix_fallocate(fd, self._allocated[name], end - self._allocated[name])
                self._allocated[name] = end
        except OSError as error:
            raise ConfigurationError(
                f"{what} needs {needed} more bytes in {self.folder.path} (--spill-dir), where {free} are free: "
                f"{error.strerror}; free disk space there, use more servers, or let rows expire (expire_after) or be "
                "evicted (max_rows)"
            ) from None

    def _name(self, array: Tensor) -> str:
        """Return the name of an array's file. Without elements an array has no address."""
        return self._names[array.data_ptr()]

    def _make_file(self, nbytes: int) -> SpillFile:
        try:
            fd = self.folder.make_file(nbytes)
        except OSError as error:
            raise self._no_file(nbytes, error) from None
        weakref.finalize(self, os.close, fd).atexit = False
        try:
            return SpillFile(SharedArena(os.dup(fd)), (fd,))
        except (OSError, ValueError) as error:
            raise self._no_file(nbytes, error) from None

    def _no_file(self, nbytes: int, error: Exception) -> MemoryError:
        return MemoryError(f"no file of {nbytes} bytes in {self.folder.path} (--spill-dir): {error}")


def _file_system_of(path: str) -> str:
    """Return the kind of a path's file system; empty: unknown."""
    device = os.stat(path).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    with suppress(OSError), open(_MOUNTS, encoding="utf-8", errors="surrogateescape") as mounts:
        for line in mounts:
            mount, _, rest = line.partition(" - ")
            if mount.split()[2] == number:
                return rest.split()[0]
    return ""
