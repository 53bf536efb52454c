"""Pages that a process has written since they were last protected, as the system itself notes them.

To look at the page map takes the system a look at every page. Pages that are protected by `userfaultfd`, whose first
write it lets pass and notes, are found in a twentieth of the time. That takes Linux 6.7, and a process that may call
it.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import struct
import weakref
from typing import Any

import numpy as np

from kvstore_server.plan import PAGE

_SYSCALL = {"x86_64": 323, "aarch64": 282}
_USER_MODE_ONLY = 1
_API, _REGISTER, _PROTECT = (
    3 << 30 | size << 16 | 0xAA << 8 | number for number, size in ((63, 24), (0, 32), (6, 24))
)
_VERSION = 0xAA
_PASSES_WRITES = 1 << 15
"""A write to a protected page is noted, and waits for nobody."""
_MODE_OF_WRITES = 2
_IS_PROTECTED = 1
_SCAN = 3 << 30 | 96 << 16 | ord("f") << 8 | 16
_WRITTEN = 2
_AT_ONCE = 512


class WrittenPages:
    """Notes which pages of some memory are written.

    Args:
        page_map: Descriptor of this process's page map.

    Raises:
        OSError: this system cannot do it, or this process may not.
    """

    def __init__(self, page_map: int) -> None:
        number = _SYSCALL.get(os.uname().machine)
        if number is None:
            raise OSError("the number of a call of the system is not known here")
        library: Any = ctypes.CDLL(None, use_errno=True)
        self._guard: int = library.syscall(number, _USER_MODE_ONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        if self._guard < 0:
            raise OSError(ctypes.get_errno(), "pages cannot be watched")
        weakref.finalize(self, os.close, self._guard).atexit = False
        self._page_map = page_map
        self._found = np.empty((_AT_ONCE, 3), np.uint64)
        """Address, end and kind of pages that lie side by side."""
        self._call(_API, "3Q", _VERSION, _PASSES_WRITES, 0)

    def watch(self, address: int, nbytes: int) -> None:
        """From now on note what is written to pages of a mapping, and forget what was before."""
        self._call(_REGISTER, "4Q", address, nbytes, _MODE_OF_WRITES, 0)
        self._call(_PROTECT, "3Q", address, nbytes, _IS_PROTECTED)

    def among(self, address: int, nbytes: int) -> Any:
        """List the pages that were written, from an address on."""
        found: list[Any] = []
        at, end = address, address + nbytes
        while at < end:
            asked = bytearray(struct.pack(
                "12Q", 96, 0, at, end, 0, self._found.ctypes.data, _AT_ONCE, 0, 0, _WRITTEN, 0, _WRITTEN
            ))  # fmt: skip
            count = fcntl.ioctl(self._page_map, _SCAN, asked)
            parts = (self._found[:count, :2].astype(np.int64) - address) // PAGE
            found.append(_all_of(parts[:, 0], parts[:, 1] - parts[:, 0]))
            [at] = struct.unpack_from("Q", asked, 32)
        return found[0] if len(found) == 1 else np.concatenate(found)

    def _call(self, what: int, form: str, *words: int) -> None:
        fcntl.ioctl(self._guard, what, bytearray(struct.pack(form, *words)))


def _all_of(firsts: Any, counts: Any) -> Any:
    """List so many numbers from each first one on."""
    ends = np.cumsum(counts)
    return np.repeat(firsts - (ends - counts), counts) + np.arange(ends[-1] if len(ends) else 0)
