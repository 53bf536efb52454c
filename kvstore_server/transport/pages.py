"""Find the pages of a mapping that a process has written, by the kernel's page map or by userfaultfd.

Workers map weights privately (copy-on-write) from files, so a page that the process wrote is no longer the file's
page: the page map shows that. userfaultfd's asynchronous write protection finds such pages faster, on newer kernels.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import struct
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np

from kvstore_server.plan import PAGE

_FIXED = getattr(mmap, "MAP_FIXED", 0x10)
_DONTNEED, _POPULATE_READ = 4, 22
_FROM_FILE = 1 << 61
_IS_THERE = 3 << 62
"""The page is in memory, or in swap."""
MOVED_AT_ONCE = 64 << 20
"""Bytes moved at a time."""
_PAGE_MAP = "/proc/self/pagemap"
_ENTRY = 8
_SYSCALL = {"x86_64": 323, "aarch64": 282}
_USER_MODE_ONLY = 1
_API, _REGISTER, _PROTECT = (
    3 << 30 | size << 16 | 0xAA << 8 | number for number, size in ((63, 24), (0, 32), (6, 24))
)
_VERSION = 0xAA
_PASSES_WRITES = 1 << 15
"""Asynchronous mode: a write to a protected page is recorded and does not block."""
_MODE_OF_WRITES = 2
_IS_PROTECTED = 1
_SCAN = 3 << 30 | 96 << 16 | ord("f") << 8 | 16
_WRITTEN = 2
_AT_ONCE = 512


def split_neighbouring_pages(pages: Any) -> list[Any]:
    return np.split(pages, np.flatnonzero(np.diff(pages) != 1) + 1) if len(pages) else []


def put_pages(
    address: int, nbytes: int, fd: int, offset: int, protection: int, is_shared: bool = False
) -> None:
    """Map pages of a file, or empty ones if `fd` is -1, over existing pages. Raises OSError if the system refuses."""
    library: Any = ctypes.CDLL(None, use_errno=True)
    library.mmap.restype = ctypes.c_void_p
    library.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    flags = (
        _FIXED | (mmap.MAP_SHARED if is_shared else mmap.MAP_PRIVATE) | (mmap.MAP_ANONYMOUS if fd < 0 else 0)
    )
    if library.mmap(address, nbytes, protection, flags, fd, offset) != address:
        raise OSError(ctypes.get_errno(), f"{nbytes} bytes cannot be mapped")


class PageSystem:
    """System calls that Python's `mmap` lacks. Raises OSError if they do not work here."""

    def __init__(self) -> None:
        if mmap.PAGESIZE != PAGE:
            raise OSError(f"pages have {mmap.PAGESIZE} bytes here")
        library: Any = ctypes.CDLL(None, use_errno=True)
        self._madvise: Callable[..., int] = library.madvise
        library.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        self._page_map = os.open(_PAGE_MAP, os.O_RDONLY)
        weakref.finalize(self, os.close, self._page_map).atexit = False
        self._written: WrittenPages | None = None
        """Finds written pages faster than the page map; None if it is not available."""
        try:
            self._written = WrittenPages(self._page_map)
            self._check()
        except OSError:
            self._written = None
            self._check()

    def map(self, address: int, nbytes: int, fd: int, offset: int) -> None:
        """Map pages of a file, or empty ones if `fd` is -1, over existing pages, privately."""
        if nbytes <= 0:
            return
        put_pages(address, nbytes, fd, offset, mmap.PROT_READ | mmap.PROT_WRITE)
        if fd >= 0:
            self._watch(address, nbytes)

    def _watch(self, address: int, nbytes: int) -> None:
        """Fault in pages of a file, and record writes to them from now on."""
        self._madvise(address, nbytes, _POPULATE_READ)  # older kernels ignore it
        try:
            if self._written is not None:
                self._written.watch(address, nbytes)
        except OSError:  # out of memory, or too many mappings
            self._written = None

    def forget(self, address: int, nbytes: int) -> None:
        """Replace this process's private pages by those of the file."""
        if self._madvise(address, nbytes, _DONTNEED):
            raise OSError(ctypes.get_errno(), f"{nbytes} bytes cannot be discarded")
        self._watch(address, nbytes)

    def own_pages(self, address: int, nbytes: int) -> Any:
        """List the pages from an address on that may differ from the file's."""
        if self._written is not None:
            return self._written.among(address, nbytes)
        data = os.pread(self._page_map, nbytes // PAGE * _ENTRY, address // PAGE * _ENTRY)
        if len(data) != nbytes // PAGE * _ENTRY:
            raise OSError(f"{_PAGE_MAP} has {len(data)} bytes for {nbytes // PAGE} pages")
        entries = np.frombuffer(data, np.uint64)
        return np.flatnonzero((entries & np.uint64(_IS_THERE) != 0) & (entries & np.uint64(_FROM_FILE) == 0))

    def _check(self) -> None:
        """Verify with two pages that writes are detected, and that others' writes are visible."""
        fd = os.memfd_create("kvtrainer-probe", os.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, 2 * PAGE)
            with mmap.mmap(fd, 2 * PAGE, mmap.MAP_PRIVATE) as probe:
                address = np.frombuffer(probe, np.uint8).ctypes.data
                self._watch(address, 2 * PAGE)
                probe[PAGE] = 1
                os.pwrite(fd, b"\1", 0)
                is_shown = probe[0] == 1  # False if memory is locked (mlockall), which copies pages at once
                seen = self.own_pages(address, 2 * PAGE).tolist()
        finally:
            os.close(fd)
        if seen != [1] or not is_shown:
            raise OSError(f"{_PAGE_MAP} does not tell which pages were written")


class WrittenPages:
    """Records which pages a process has written since they were last protected.

    Reading the page map inspects every page. With userfaultfd write protection in asynchronous mode (Linux 6.7 or
    newer, and a process that may use it), written pages are found in a twentieth of the time.

    Args:
        page_map: Descriptor of this process's page map.

    Raises:
        OSError: The kernel does not support it, or the process may not use it.
    """

    def __init__(self, page_map: int) -> None:
        number = _SYSCALL.get(os.uname().machine)
        if number is None:
            raise OSError("the number of the userfaultfd system call is not known on this machine")
        library: Any = ctypes.CDLL(None, use_errno=True)
        self._guard: int = library.syscall(number, _USER_MODE_ONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        if self._guard < 0:
            raise OSError(ctypes.get_errno(), "userfaultfd is not available")
        weakref.finalize(self, os.close, self._guard).atexit = False
        self._page_map = page_map
        self._found = np.empty((_AT_ONCE, 3), np.uint64)
        """(address, end, kind) of contiguous pages."""
        self._call(_API, "3Q", _VERSION, _PASSES_WRITES, 0)

    def watch(self, address: int, nbytes: int) -> None:
        """Record writes to the pages of a mapping from now on; forget earlier ones."""
        self._call(_REGISTER, "4Q", address, nbytes, _MODE_OF_WRITES, 0)
        self._call(_PROTECT, "3Q", address, nbytes, _IS_PROTECTED)

    def among(self, address: int, nbytes: int) -> Any:
        """List the pages from an address on that were written."""
        found: list[Any] = []
        at, end = address, address + nbytes
        while at < end:
            asked = bytearray(struct.pack(
                "12Q", 96, 0, at, end, 0, self._found.ctypes.data, _AT_ONCE, 0, 0, _WRITTEN, 0, _WRITTEN
            ))  # fmt: skip
            count = fcntl.ioctl(self._page_map, _SCAN, asked)
            parts = (self._found[:count, :2].astype(np.int64) - address) // PAGE
            found.append(_all_pages_of(parts[:, 0], parts[:, 1] - parts[:, 0]))
            [at] = struct.unpack_from("Q", asked, 32)
        return found[0] if len(found) == 1 else np.concatenate(found)

    def _call(self, what: int, form: str, *words: int) -> None:
        fcntl.ioctl(self._guard, what, bytearray(struct.pack(form, *words)))


def _all_pages_of(firsts: Any, counts: Any) -> Any:
    ends = np.cumsum(counts)
    return np.repeat(firsts - (ends - counts), counts) + np.arange(ends[-1] if len(ends) else 0)
