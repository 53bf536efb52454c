"""Writes files completely or not at all, with equal bytes for equal contents.

A file is written under a temporary name in the same directory, and renamed at the end. Its process holds a lock on it
while it writes, which the system releases when the process dies, on whatever host. So an unlocked temporary file
belongs to a dead process, and the next save in that directory removes it.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import BinaryIO

_TEMPORARY = re.compile(r"\.states-[0-9a-f]{16}\.tmp")


@contextmanager
def replace_atomically(path: str) -> Iterator[BinaryIO]:
    """Yield a new file that atomically replaces the one at `path`. Blocks until it is on the disk."""
    folder = os.path.dirname(path) or "."
    _remove_abandoned_files(folder)
    temporary, file = _open_locked_temporary_file(folder)
    with file:
        try:
            yield file
            file.flush()
            os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            with suppress(OSError):
                os.unlink(temporary)
            raise
    # The rename is durable only once the directory is on the disk, too.
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _open_locked_temporary_file(folder: str) -> tuple[str, BinaryIO]:
    while True:
        temporary = os.path.join(folder, f".states-{secrets.token_hex(8)}.tmp")
        file = open(temporary, "xb")  # noqa: SIM115  (the caller closes it)
        with suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        if os.path.exists(temporary):
            return temporary, file
        # Another process removed it before it was locked.
        file.close()


def _remove_abandoned_files(folder: str) -> None:
    with suppress(OSError), os.scandir(folder) as entries:
        names = [entry.path for entry in entries if _TEMPORARY.fullmatch(entry.name)]
        for name in names:
            # OSError: it is in use, already gone, or must not be removed. None of these prevents saving.
            with suppress(OSError), open(name, "rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.unlink(name)
