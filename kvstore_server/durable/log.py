"""An append-only log in memory without a name: what it says outlives the process that wrote it.

    bytes 0-7    magic, with the version of the format
    bytes 8-15   the end of the log in the upper 40 bits, and a checksum of it in the lower 24
    bytes 16-31  the generation, and a checksum of it
    from 32      records: length and kind, a checksum (crc32), and the data

A record counts once the end behind it is written, which is one store of eight bytes: a process that dies in the middle
of an append leaves the log as it was before. Everything up to the end must be whole. Checksums cover the generation
and the place of a record, so bytes of another log, or at another place, are not taken for a record.

The log is written through a mapping, which takes a tenth of the time of two system calls. What a process has stored
there before it is killed is all there for the next one, in the order of the program: the caches of its CPU outlive it.
"""

from __future__ import annotations

import mmap
import os
import struct
import weakref
import zlib
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from kvstore_server.errors import RecoveryError
from kvstore_server.failpoints import failpoint

VERSION = 3
"""Of what the log contains; a server reads only its own."""
_MAGIC = b"KVLOG\0" + struct.pack("<H", VERSION)
_END, _GENERATION, _HEAD = struct.Struct("<Q"), struct.Struct("<QII"), struct.Struct("<QII")
_SEED = struct.Struct("<QQQI")
_FIRST = 32
_END_AT, _GENERATION_AT = 8, 16
_SHIFT = 24
_MIN_SIZE = 1 << 16
"""Bytes of the file of a new log."""


class LogRecord(NamedTuple):
    kind: int
    data: bytes


class DurableLog:
    """A log that is being written. Not thread-safe.

    Args:
        fd: An empty memory file; belongs to the log.
        generation: A later log of the same server has a higher one.
    """

    def __init__(self, fd: int, generation: int) -> None:
        self.fd = fd
        self.close = weakref.finalize(self, os.close, fd)
        self.close.atexit = False
        self.generation = generation
        self.end = _FIRST
        self._grow(_MIN_SIZE)
        checksum = zlib.crc32(_MAGIC + _GENERATION.pack(generation, 0, 0))
        _GENERATION.pack_into(self._map, _GENERATION_AT, generation, checksum, 0)
        self._publish()
        self._map[: len(_MAGIC)] = _MAGIC

    def append(self, kind: int, *parts: bytes) -> None:
        """Append a record. When this returns, it outlives the process."""
        data = parts[0] if len(parts) == 1 else b"".join(parts)
        begin, length = self.end + _HEAD.size, len(data)
        if begin + length > self._size:
            self._grow(begin + length)
        checksum = zlib.crc32(data, zlib.crc32(_SEED.pack(self.generation, self.end, length, kind)))
        _HEAD.pack_into(self._map, self.end, length, kind, checksum)
        self._map[begin : begin + length] = data
        failpoint("server.log.unpublished")
        self.end = begin + length
        self._publish()

    def _grow(self, nbytes: int) -> None:
        self._size = 1 << (nbytes - 1).bit_length()
        os.ftruncate(self.fd, self._size)
        self._map = mmap.mmap(self.fd, self._size)
        self._words = np.frombuffer(self._map, np.uint64, _FIRST // _END.size)

    def _publish(self) -> None:
        # numpy stores an aligned number at once: a process that is killed has written all of its bytes or none.
        self._words[_END_AT // _END.size] = _pack_log_end(self.end, self.generation)


def read_log_generation(fd: int) -> int:
    """Return the generation of a log. Raises RecoveryError if it is not a log of this version, or is damaged."""
    head = os.pread(fd, _FIRST, 0)
    if len(head) < _FIRST or head[:6] != _MAGIC[:6]:
        raise RecoveryError("the stored log does not begin like a log of kvstore-server")
    if head[:8] != _MAGIC:
        [version] = struct.unpack_from("<H", head, 6)
        raise RecoveryError(
            f"the stored log has version {version} of its format, this server reads version {VERSION}; restart the job "
            "from its last saved states, or install the release that wrote it"
        )
    generation, checksum, rest = _GENERATION.unpack_from(head, _GENERATION_AT)
    if rest or checksum != zlib.crc32(_MAGIC + _GENERATION.pack(generation, 0, 0)):
        raise _damaged_log_error("the checksum of its head does not fit")
    return int(generation)


def read_log_records(fd: int) -> Iterator[LogRecord]:
    """Yield the records of a log, in order. Raises RecoveryError if any byte up to its end is not as it was written."""
    generation = read_log_generation(fd)
    [word] = _END.unpack(os.pread(fd, _END.size, _END_AT))
    at, end = _FIRST, word >> _SHIFT
    if word != _pack_log_end(end, generation):
        raise _damaged_log_error("the checksum of its end does not fit")
    if os.fstat(fd).st_size < end:
        raise _damaged_log_error(f"it ends at {os.fstat(fd).st_size} of {end} bytes")
    while at < end:
        head = os.pread(fd, _HEAD.size, at)
        if len(head) < _HEAD.size or at + _HEAD.size > end:
            raise _damaged_log_error(f"the record at {at} is cut off at {end}")
        length, kind, checksum = _HEAD.unpack(head)
        if length > end - at - _HEAD.size:
            raise _damaged_log_error(
                f"the record at {at} has {length} bytes, {end - at - _HEAD.size} are left"
            )
        data = _read_log_bytes(fd, length, at + _HEAD.size)
        seed = zlib.crc32(_SEED.pack(generation, at, length, kind))
        if len(data) < length or zlib.crc32(data, seed) != checksum:
            raise _damaged_log_error(f"the checksum of the record at {at} does not fit")
        yield LogRecord(kind, data)
        at += _HEAD.size + length


def _pack_log_end(end: int, generation: int) -> int:
    checksum = zlib.crc32(struct.pack("<QQ", end, generation))
    return int(end << _SHIFT | checksum & (1 << _SHIFT) - 1)


def _read_log_bytes(fd: int, nbytes: int, at: int) -> bytes:
    found: list[bytes] = []
    while nbytes and (data := os.pread(fd, nbytes, at)):
        found.append(data)
        nbytes, at = nbytes - len(data), at + len(data)
    return found[0] if len(found) == 1 else b"".join(found)


def _damaged_log_error(how: str) -> RecoveryError:
    return RecoveryError(
        f"the stored log is damaged: {how}; restart the job from its last saved states, without what is stored"
    )
