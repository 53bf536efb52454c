"""The process's side of systemd's file descriptor store: memory that is handed to the next start of this server.

A supervisor (systemd with FileDescriptorStoreMax=, or kvlaunch) keeps duplicates of descriptors that it is sent, and
passes them to the process when it starts again (sd_notify(3), sd_listen_fds(3)). Descriptors may come back in any
order, and a name may occur twice, so the contents decide what they are.
"""

from __future__ import annotations

import fcntl
import os
import select
from collections.abc import Iterable, Mapping, MutableMapping
from contextlib import suppress
from typing import NamedTuple, Protocol

from kvstore_server.errors import RecoveryError
from kvstore_server.notify import connect_notify_socket, notify_socket_address, send_notification

PREFIX = "kvstore-"
"""Names of our descriptors begin with this; others are left alone."""
_PROCESSED = 10.0
"""Seconds that the supervisor gets to read what it was sent."""


class FdStoreDescriptor(NamedTuple):
    """A descriptor that an earlier process of this server has stored."""

    name: str
    fd: int


class FdStore(Protocol):
    """Keeps descriptors for the next process of this server."""

    def store(self, name: str, fd: int) -> None:
        """Keep a duplicate of a descriptor; when this returns, it outlives the process. Raises RecoveryError."""

    def remove(self, name: str) -> None:
        """Close what is kept under a name; without effect if the store cannot be reached."""


def descriptors_from_fd_store(
    environ: MutableMapping[str, str], pid: int, first: int = 3
) -> list[FdStoreDescriptor]:
    """Return our descriptors among those passed to the process `pid`, and remove the variables that name them.

    Args:
        first: The first descriptor that a supervisor passes.

    Raises RecoveryError if the variables contradict each other.
    """
    told = {name: environ.pop(name, "") for name in ("LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES")}
    if told["LISTEN_PID"] != str(pid) or not told["LISTEN_FDS"]:
        return []
    names = told["LISTEN_FDNAMES"].split(":")
    if not told["LISTEN_FDS"].isdecimal() or int(told["LISTEN_FDS"]) != len(names):
        raise RecoveryError(
            f"LISTEN_FDS={told['LISTEN_FDS']} does not fit the {len(names)} names in LISTEN_FDNAMES"
        )
    kept = [FdStoreDescriptor(name, fd) for fd, name in enumerate(names, first) if name.startswith(PREFIX)]
    for one in kept:
        try:
            fcntl.fcntl(one.fd, fcntl.F_SETFD, fcntl.FD_CLOEXEC)
        except OSError as error:
            raise RecoveryError(
                f"descriptor {one.fd}, {one.name!r} in LISTEN_FDNAMES, is not open: {error}"
            ) from None
    return kept


class SupervisorFdStore:
    """The store of the supervisor at NOTIFY_SOCKET. Calls block until it has read what it was sent.

    Args:
        address: A path, or a name in the abstract namespace that begins with "@".
        most: How many descriptors it keeps. It would drop further ones without a word.
        names: Of what it keeps already.

    Raises:
        RecoveryError: Nothing listens there.
    """

    def __init__(self, address: str, most: int, names: Iterable[str] = ()) -> None:
        self._address = address
        self._most = most
        self._names = list(names)
        try:
            self._socket = connect_notify_socket(address, _PROCESSED)
        except OSError as error:
            raise self._unreachable(error) from None

    def store(self, name: str, fd: int) -> None:
        if len(self._names) >= self._most:
            raise RecoveryError(
                f"the supervisor at {self._address} keeps {self._most} descriptors (FDSTORE), and this server has as "
                "many; allow more (FileDescriptorStoreMax= of systemd)"
            )
        self._names.append(name)
        self._send(f"FDSTORE=1\nFDPOLL=0\nFDNAME={name}", fd)
        self._wait_until_read()

    def remove(self, name: str) -> None:
        self._names = [one for one in self._names if one != name]
        with suppress(RecoveryError):
            self._send(f"FDSTOREREMOVE=1\nFDNAME={name}")

    def close(self) -> None:
        self._socket.close()

    def _send(self, message: str, *fds: int) -> None:
        try:
            send_notification(self._socket, message, fds)
        except OSError as error:
            raise self._unreachable(error) from None

    def _wait_until_read(self) -> None:
        """Wait until the supervisor has handled all messages so far, as sd_notify_barrier(3) does.

        systemd finds the service of a message by its sender's process id, which must still exist by then.
        """
        end, passed = os.pipe()
        try:
            self._send("BARRIER=1", passed)
            os.close(passed)
            passed = -1
            poll = select.poll()
            poll.register(end, 0)  # reports only that the supervisor has closed the other end
            if not poll.poll(1000 * _PROCESSED):
                raise RecoveryError(
                    f"the supervisor at {self._address} has not read what it was sent for {_PROCESSED:g} s"
                )
        finally:
            os.close(end)
            if passed >= 0:
                os.close(passed)

    def _unreachable(self, error: OSError) -> RecoveryError:
        return RecoveryError(f"the supervisor at {self._address} (NOTIFY_SOCKET) cannot be reached: {error}")


def fd_store_address(environ: Mapping[str, str]) -> tuple[str, int] | None:
    """Return where a supervisor listens and how many descriptors it keeps; None if it keeps none.

    It says so in FDSTORE, as systemd 254 and newer do. A supervisor without it may drop what it is sent.
    """
    address, room = notify_socket_address(environ), environ.get("FDSTORE", "")
    if address is not None and room.isdecimal() and int(room):
        return address, int(room)
    return None
