"""A file descriptor store: keeps descriptors for a process that may die, and hands them to its next start.

It speaks systemd's protocol (sd_notify(3), sd_listen_fds(3)), so a server that runs under a `Supervisor` and one that
runs as a service with FileDescriptorStoreMax= do the same. The process sends datagrams to the Unix socket that
NOTIFY_SOCKET names:

- FDSTORE=1, with descriptors: keep duplicates of them under the name FDNAME=, by default "stored".
- FDSTOREREMOVE=1: close all that are kept under the name FDNAME=.
- READY=1: it has started.

It finds what is kept from descriptor 3 on when it starts: LISTEN_FDS says how many there are, LISTEN_FDNAMES their
names, and LISTEN_PID for which process. A datagram that was sent is as good as kept, even if its sender dies the next
moment, because the kernel holds it and its descriptors until the store reads them.

Anybody in the same network namespace can send to the socket. Each datagram carries its sender's pid and user, from the
kernel, and only those of one process group of our user count. Descriptors are not polled, as if each datagram said
FDPOLL=0: what is kept stays until it is removed.
"""

from __future__ import annotations

import array
import os
import secrets
import socket
import stat
import struct
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

FIRST = 3
"""The first descriptor that a process finds at its start."""
MAX_DESCRIPTORS = 4096
"""The most descriptors that a store keeps."""
_LONGEST = 4096
"""Bytes of the longest datagram."""
_MAX_AT_ONCE = 253
"""Descriptors that Linux passes in one datagram."""
_CREDENTIALS = struct.Struct("3i")
"""ucred of unix(7): pid, user, group."""
_LONGEST_NAME = 255


class KeptDescriptor(NamedTuple):
    """A descriptor that a store keeps."""

    name: str
    fd: int
    file: tuple[int, int] | None
    """Device and inode of a file; None for what no inode identifies."""


class DescriptorStore:
    """Descriptors with names, and the socket that a process sends them to.

    Args:
        limit: The most descriptors to keep. Those beyond it are closed at once.
        warn: Is told of descriptors that were not kept.
    """

    def __init__(self, limit: int = MAX_DESCRIPTORS, warn: Callable[[str], None] = lambda _: None) -> None:
        self._limit = limit
        self._warn = warn
        self._kept: list[KeptDescriptor] = []
        self._has_warned = False
        self.is_ready = False
        """Whether the process has said that it has started."""
        name = f"kvstore-{secrets.token_hex(16)}"
        self.address = f"@{name}"
        """The value of NOTIFY_SOCKET."""
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self._socket.bind(f"\0{name}")

    def fileno(self) -> int:
        """Return a descriptor that is readable when `receive` has something to do."""
        return self._socket.fileno()

    @property
    def names(self) -> list[str]:
        return [one.name for one in self._kept]

    @property
    def descriptors(self) -> list[int]:
        """What is kept, in the order of `names`."""
        return [one.fd for one in self._kept]

    def environment(self, inherited: Mapping[str, str]) -> dict[str, str]:
        """Return the environment of the next start, without LISTEN_PID, which only the new process knows."""
        kept = {name: value for name, value in inherited.items() if not name.startswith("LISTEN_")}
        told = {"NOTIFY_SOCKET": self.address, "FDSTORE": str(self._limit)}
        if self._kept:
            told |= {"LISTEN_FDS": str(len(self._kept)), "LISTEN_FDNAMES": ":".join(self.names)}
        return {**kept, **told}

    def receive(self, group: int) -> None:
        """Do what the datagrams ask that have come from processes of a group. Does not block.

        Call it before the leader of the group is reaped, or what it sent last may count as a stranger's.
        """
        while True:
            space = socket.CMSG_SPACE(_CREDENTIALS.size) + socket.CMSG_SPACE(4 * _MAX_AT_ONCE)
            try:
                data, parts, flags, _ = self._socket.recvmsg(_LONGEST, space, socket.MSG_CMSG_CLOEXEC)
            except BlockingIOError:
                return
            pid, user, descriptors = _unpack_descriptors(parts)
            is_whole = not flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC)
            if is_whole and user == os.getuid() and _is_sender_in_group(pid, group):
                self._obey(_parse_store_message(data), descriptors)
            else:
                _close_descriptors(descriptors)

    def close(self) -> None:
        """Close the socket and all that is kept."""
        self._socket.close()
        while self._kept:
            os.close(self._kept.pop().fd)

    def _obey(self, fields: Mapping[str, str], descriptors: list[int]) -> None:
        name = fields.get("FDNAME", "")
        if fields.get("READY") == "1":
            self.is_ready = True
        if fields.get("FDSTOREREMOVE") == "1":
            _close_descriptors(one.fd for one in self._kept if one.name == name)
            self._kept = [one for one in self._kept if one.name != name]
        if fields.get("FDSTORE") == "1" and "FDSTOREREMOVE" not in fields:
            for fd in descriptors:
                self._keep(name if _is_descriptor_name(name) else "stored", fd)
        else:
            _close_descriptors(descriptors)

    def _keep(self, name: str, fd: int) -> None:
        """Keep a descriptor, unless the store is full or has one of the same file, whose name stays as it was."""
        file = _file_of_descriptor(fd)
        is_full = len(self._kept) >= self._limit
        if is_full or (file is not None and any(one.file == file for one in self._kept)):
            os.close(fd)
        else:
            self._kept.append(KeptDescriptor(name, fd, file))
        if is_full and not self._has_warned:
            self._has_warned = True
            self._warn(
                f"the descriptor {name!r} is not kept, because the store has {self._limit} already; what it refers to "
                "would be lost with its process"
            )


def _unpack_descriptors(parts: Iterable[tuple[int, int, bytes]]) -> tuple[int, int, list[int]]:
    """Return pid and user of a datagram's sender (-1 if unknown), and its descriptors."""
    pid, user, descriptors = -1, -1, array.array("i")
    for level, kind, data in parts:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_CREDENTIALS) and len(data) >= _CREDENTIALS.size:
            pid, user, _ = _CREDENTIALS.unpack_from(data)
        elif (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            descriptors.frombytes(data[: len(data) // descriptors.itemsize * descriptors.itemsize])
    return pid, user, descriptors.tolist()


def _is_sender_in_group(pid: int, group: int) -> bool:
    try:
        return pid > 0 and os.getpgid(pid) == group
    except ProcessLookupError:
        return False


def _parse_store_message(data: bytes) -> dict[str, str]:
    """Return the assignments of a datagram; lines that are none are ignored."""
    lines = [line.partition("=") for line in data.decode(errors="replace").split("\n")]
    return {name: value for name, equals, value in lines if equals}


def _is_descriptor_name(text: str) -> bool:
    return 0 < len(text) <= _LONGEST_NAME and text.isascii() and text.isprintable() and ":" not in text


def _file_of_descriptor(fd: int) -> tuple[int, int] | None:
    found = os.fstat(fd)
    return (found.st_dev, found.st_ino) if stat.S_ISREG(found.st_mode) else None


def _close_descriptors(descriptors: Iterable[int]) -> None:
    for fd in descriptors:
        os.close(fd)
