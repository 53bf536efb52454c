"""Memory that outlives the process of a worker: what only that worker has, in versions that belong to rounds.

The memory is a file in memory (a memfd that the launcher holds, or a file of a tmpfs), named by KVSTORE_WORKER_MEMORY.
Its sections are independent; each has two versions, which are written by turns. A version is marked with the number of
the round before which it holds. While a version is written it has no mark, and the other one stays as it is, so a
process that is killed between any two instructions leaves at least one whole version.

A round moves on in three steps: `write` stores what holds after it, before anything of the round is irrevocable;
`accept` says that the round counts, `drop` that it changed nothing. A successor that knows which round counts finds
what holds after it with `find`.

Only one process works with the memory at a time. The kernel's lock ends with it and with the children that it has
forked, for which a successor waits. Not thread-safe.
"""

from __future__ import annotations

import fcntl
import itertools
import mmap
import os
import secrets
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from kvstore_server.codec import torch_dtype
from kvstore_server.failpoints import failpoint
from kvstore_server.protocol.frames import pack_control, unpack_control
from kvtrainer.common.env import WORKER_MEMORY
from kvtrainer.errors import ConfigurationError

SECTIONS = 2
_HEAD = 4096
_MAGIC = b"kvmemory"
_ID_BYTES = 16
_OWNER = 3
"""Where the process that works with the memory is named in the head, in words of 8 bytes."""
_SLOTS = 8
"""Where the slots begin in the head, in words of 8 bytes."""
_MARK, _OFFSET, _CAPACITY, _SUMMARY, _WORDS = range(5)
"""Words of a slot: mark, place and size in the file, length of the summary; and how many there are."""
_NONE = -1
_ALIGN = 64
_LOCK_TIMEOUT, _LOCK_INTERVAL = 10.0, 0.02


class Version(NamedTuple):
    mark: int
    tensors: Mapping[str, Tensor]
    extra: bytes


class SurvivingMemory:
    """The memory of one worker. Blocks while another process works with it.

    Args:
        timeout: Seconds to wait for that process, which may be about to end.

    Raises:
        ConfigurationError: It cannot be opened, is something else, or another process, or another Trainer of this one,
            works with it.
    """

    def __init__(self, path: str, timeout: float = _LOCK_TIMEOUT) -> None:
        self._path = path
        with self._naming_errors():
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            with self._naming_errors():
                self._lock(time.monotonic() + timeout)
                self._head = self._open_head(path)
        except BaseException:
            os.close(self._fd)
            raise
        self._map: mmap.mmap | None = None
        self._data: Tensor | None = None
        self.sections = [SurvivingVersions(self, at) for at in range(SECTIONS)]

    @contextmanager
    def _naming_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise ConfigurationError(
                f"cannot use {WORKER_MEMORY}={self._path!r}, which has to keep what this worker needs to be continued: "
                f"{error.strerror}. Name a file of a tmpfs with enough room, such as /dev/shm, and give the host more "
                "memory if there is none"
            ) from None

    def _lock(self, deadline: float) -> None:
        """Wait until no other process works with the memory; one that was killed may have left children."""
        while True:
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                owner = os.pread(self._fd, 8, 8 * _OWNER)
            if int.from_bytes(owner, "little") == os.getpid() or time.monotonic() >= deadline:
                raise ConfigurationError(
                    f"another process, or another Trainer of this one, works with {WORKER_MEMORY}={self._path!r}; give "
                    "each worker its own, and let only one Trainer of a process have something to keep"
                )
            time.sleep(_LOCK_INTERVAL)

    def _open_head(self, path: str) -> mmap.mmap:
        if os.fstat(self._fd).st_size == 0:
            os.posix_fallocate(self._fd, 0, _HEAD)
        head = mmap.mmap(self._fd, _HEAD)
        is_new = head[: len(_MAGIC)] == bytes(
            len(_MAGIC)
        )  # also if a process was killed before it wrote anything
        if not is_new and head[: len(_MAGIC)] != _MAGIC:
            raise ConfigurationError(f"{WORKER_MEMORY}={path!r} is a file of something else; name a new one")
        self._words = np.frombuffer(memoryview(head), np.int64)
        if is_new:
            self._words[_SLOTS:] = _NONE
            head[: len(_MAGIC)] = _MAGIC
        self._words[_OWNER] = os.getpid()
        return head

    @property
    def id(self) -> bytes:
        """A random number that `begin` has drawn, by which a successor knows that the memory is that of its rank."""
        return self._head[len(_MAGIC) : len(_MAGIC) + _ID_BYTES]

    def begin(self) -> None:
        """Drop what an earlier job has left."""
        for section in self.sections:
            section.clear()
        self._head[len(_MAGIC) : len(_MAGIC) + _ID_BYTES] = secrets.token_bytes(_ID_BYTES)

    def slot(self, number: int) -> np.ndarray:
        return self._words[_SLOTS + number * _WORDS : _SLOTS + (number + 1) * _WORDS]

    def bytes_of(self, slot: np.ndarray) -> Tensor:
        """Return the bytes of a slot."""
        offset, capacity = slot[_OFFSET : _CAPACITY + 1].tolist()
        if self._data is None or len(self._data) < offset + capacity:
            with self._naming_errors():
                self._map = mmap.mmap(self._fd, offset + capacity)
            self._data = torch.frombuffer(self._map, dtype=torch.uint8)
        return self._data[offset : offset + capacity]

    def make_room(self, slot: np.ndarray, nbytes: int) -> None:
        """Give a slot a place of at least `nbytes` bytes at the end of the file, in whole pages; free its former one.

        Raises ConfigurationError without memory.
        """
        former, size = slot[_OFFSET : _CAPACITY + 1].tolist()
        if size > 0:
            self.bytes_of(slot)  # maps it
        offset = _aligned_in_surviving_memory(os.fstat(self._fd).st_size, mmap.PAGESIZE)
        nbytes = _aligned_in_surviving_memory(nbytes, mmap.PAGESIZE)
        with self._naming_errors():
            os.posix_fallocate(self._fd, offset, nbytes)
        slot[_OFFSET], slot[_CAPACITY] = offset, nbytes
        if size > 0 and self._map is not None:
            with suppress(
                OSError
            ):  # a file system that cannot do it keeps the bytes until the file is removed
                self._map.madvise(mmap.MADV_REMOVE, former, size)

    def close(self) -> None:
        """Let another Trainer or process work with the memory. Idempotent."""
        if self._fd >= 0:
            fcntl.flock(self._fd, fcntl.LOCK_UN)  # mmap has duplicates of the descriptor
            os.close(self._fd)
            self._fd = -1


class SurvivingVersions:
    """One section of the memory: what holds before a round, and what holds after it."""

    def __init__(self, memory: SurvivingMemory, section: int) -> None:
        self._memory = memory
        self._slots = [memory.slot(2 * section + at) for at in range(2)]
        self._present = 0
        """Which slot holds what counts; the other one is for what follows."""

    def clear(self) -> None:
        for slot in self._slots:
            slot[_MARK] = _NONE

    def begin(self, round_: int, tensors: Mapping[str, Tensor], extra: bytes = b"") -> None:
        """Store what holds before a round, and nothing else; until that is done, what was there remains."""
        self.drop()
        former = self._slots[self._present]
        if former[_MARK] != _NONE:
            self.accept()
        self._store(self._slots[self._present], round_, tensors, extra)
        self.drop()

    def write(self, round_: int, tensors: Mapping[str, Tensor], extra: bytes = b"") -> None:
        """Store what will hold after a round, beside what holds before it. Raises ConfigurationError without memory."""
        present, next_ = self._slots[self._present], self._slots[1 - self._present]
        next_[_MARK] = _NONE
        if present[_MARK] != _NONE:
            present[_MARK] = round_  # rounds since the last `write` have changed nothing
        self._store(next_, round_ + 1, tensors, extra)

    def accept(self) -> None:
        """Let what was written last hold, because its round counts."""
        self._present = 1 - self._present

    def drop(self) -> None:
        """Forget what was written last, because its round changed nothing."""
        self._slots[1 - self._present][_MARK] = _NONE

    def find(self, round_: int, last_counts: bool = True) -> Version | None:
        """Return what holds before a round, as an earlier process has left it, and go on from there.

        Args:
            last_counts: Whether the round before it counts, so that what was written in it holds.
        """
        marks = [int(slot[_MARK]) for slot in self._slots]
        fit = [mark for mark in marks if 0 <= mark <= round_]
        if not last_counts and any(mark < round_ for mark in fit):
            fit = [mark for mark in fit if mark < round_]
        if not fit:
            return None
        self._present = marks.index(max(fit))
        self.drop()
        return self._read(self._slots[self._present])

    def _store(self, slot: np.ndarray, mark: int, tensors: Mapping[str, Tensor], extra: bytes) -> None:
        # 1. Where everything lies.
        flats = {name: one.detach().reshape(-1) for name, one in tensors.items()}
        forms = [
            [name, str(one.dtype).removeprefix("torch."), list(tensors[name].shape)]
            for name, one in flats.items()
        ]
        summary = pack_control([forms, extra])
        sizes = [one.numel() * one.element_size() for one in flats.values()]
        places = list(
            itertools.accumulate(
                map(_aligned_in_surviving_memory, sizes), initial=_aligned_in_surviving_memory(len(summary))
            )
        )
        if slot[_CAPACITY] < places[-1]:
            self._memory.make_room(slot, places[-1])
        # 2. Copy it, and mark it at last.
        raw = self._memory.bytes_of(slot)
        raw[: len(summary)] = torch.frombuffer(bytearray(summary), dtype=torch.uint8)
        for flat, place, size in zip(flats.values(), places, sizes, strict=False):
            if size:
                raw[place : place + size].view(flat.dtype).copy_(flat)
        slot[_SUMMARY] = len(summary)
        failpoint("worker.memory.written")
        slot[_MARK] = mark

    def _read(self, slot: np.ndarray) -> Version:
        raw = self._memory.bytes_of(slot)
        forms, extra = unpack_control(raw[: int(slot[_SUMMARY])].numpy().tobytes())
        place, found = _aligned_in_surviving_memory(int(slot[_SUMMARY])), dict[str, Tensor]()
        for name, dtype, shape in forms:
            kind = torch_dtype(dtype)
            size = int(np.prod(shape, dtype=np.int64)) * kind.itemsize
            found[name] = raw[place : place + size].clone().view(kind).reshape(shape)
            place += _aligned_in_surviving_memory(size)
        return Version(int(slot[_MARK]), found, extra)


def _aligned_in_surviving_memory(nbytes: int, to: int = _ALIGN) -> int:
    return -(-nbytes // to) * to
