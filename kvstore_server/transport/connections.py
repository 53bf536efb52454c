"""Bounds on connections that have no session: how long they may be silent, and what they may cost.

libzmq keeps all frames of a message until it is complete, in any number, and shows none of them before; and it accepts
any number of connections. So a process that has not said hello, and perhaps never will, could use up a server's memory
and its descriptors. This looks at the connections themselves, through the descriptors of this process: how many bytes
have come over each one, as the kernel counts them, and how many of these were read as messages. The rest is *unread*.

A worker that connects again may at once send a whole message, so up to `MAX_UNREAD` bytes may be unread. But short
frames take many times their length in memory, and nobody needs those in such numbers: if this process grows by much
more than all of them have unread, the connection with the most is ended. So are those over which nothing has come for
`HELLO_TIME` seconds, and the oldest if they are too many. A connection with a session is left alone, and where clients
have keys only silence and number count. A worker whose connection was ended connects again. The clock is an argument.

Looking takes a descriptor now and then. One is held in reserve, for the moment when all others are used up.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import math
import os
import resource
import socket
import stat
import struct
import termios
from collections import deque
from contextlib import suppress
from dataclasses import dataclass

from kvstore_server.protocol.frames import MAX_FRAME, MAX_PAYLOAD

_log = logging.getLogger(__name__)

HELLO_TIME = 10.0
"""Seconds in which something has to come over a connection, again and again."""
MAX_UNREAD = MAX_PAYLOAD + 2 * MAX_FRAME
"""Bytes that may be unread of one connection: a message of a worker."""
_SUSPICIOUS = 64 << 10
"""Bytes unread of a connection from which on this process's memory is watched; hellos and questions are shorter."""
_GROWTH, _COST = 32 << 20, 2
"""This process may grow by so many bytes, and by so many for each unread byte of connections without a session."""
MAX_WITHOUT_SESSION = 4096
"""Connections without a session, unless a quarter of the descriptors is less."""
_INTERVAL, _INTERVAL_PER_FD = 0.02, 1e-4
"""Seconds between two looks, and what each descriptor adds, so that looking takes no more than a few per cent."""
_WHOLE = 10
"""Looks until all descriptors are looked through again."""
_ALERT = 0.1
"""The same is multiplied by this while something unread comes over a connection without a session, or one is new: a
process of this host sends a gigabyte in a second."""
_NEW = 0.2
"""Seconds in which a connection counts as new."""
_TCP_INFO_BYTES, _RECEIVED_AT = 136, 128
"""Of `struct tcp_info` of Linux: where the number of bytes that were received ends, and begins."""


@dataclass
class _Connection:
    inode: int
    accepted_at: float
    """When it was accepted, or when this process has looked again after a pause."""
    heard_at: float
    """When it was accepted, or when something has come over it for the last time."""
    num_received: int = 0
    """Bytes that have come over it, as the kernel counts them."""
    num_read: int = 0
    """Bytes of the messages that it has brought."""
    has_session: bool = False
    suspected_at: int = -1
    """How many bytes were read when too many were unread at the last look; -1: they were not."""
    key: str = ""
    """With which it has been made, once a message has come over it."""


class ConnectionLimits:
    """Watches the connections that were accepted at one port.

    Args:
        has_keys: Whether clients have keys, so that nothing is read from one that is not known.
    """

    def __init__(self, has_keys: bool = False) -> None:
        self.port, self._has_keys = 0, has_keys
        self._reserve = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        self._connections: dict[int, _Connection] = {}
        """By descriptor. Those of other sockets are in `_others`."""
        self._others: dict[int, int] = {}
        """Descriptor of anything else → its inode."""
        self._heard: dict[tuple[int, int], tuple[int, bool, str]] = {}
        """(descriptor, inode) → bytes of messages since the last look, whether their sender has a session, and its
        key."""
        self._admitted: dict[str, deque[float]] = {}
        """Key → when connections were let in with it over which nothing has come yet."""
        self._next_check, self._next_find = 0.0, 0.0
        self._most = min(MAX_WITHOUT_SESSION, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4)
        self._resident = 0
        """Bytes that this process took when no connection was suspicious."""
        self.interval = math.inf
        """Seconds after which `check` should be called again; infinity: there are no connections without a session."""
        self.num_ended = 0
        """How many connections were ended."""

    def admitted(self, key: str, now: float) -> None:
        """Note that a connection is let in with a key."""
        self._admitted.setdefault(key, deque()).append(now)

    def num_connections(self, key: str, now: float) -> int:
        """Return how many connections there are with a key."""
        waiting = self._admitted.get(key, deque())
        while waiting and now - waiting[0] > HELLO_TIME:
            waiting.popleft()  # it is closed by now, since it has been silent
        if not waiting:
            self._admitted.pop(key, None)
        known = {(fd, one.inode) for fd, one in self._connections.items() if one.key == key}
        known.update(where for where, (_, _, sender) in self._heard.items() if sender == key)
        return len(waiting) + sum(_is_open(fd, inode) for fd, inode in known)

    def heard(self, fd: int, nbytes: int, has_session: bool, sender: str = "") -> None:
        """Count a message that came over a connection, from a client with the public key `sender`."""
        try:
            key = fd, os.fstat(fd).st_ino
        except OSError:
            return  # it is closed by now
        if key not in self._heard:
            known = self._connections.get(fd)
            is_first = known is None or known.inode != key[1] or not known.key
            if is_first and self._admitted.get(sender):
                self._admitted[sender].popleft()
        before = self._heard.get(key, (0,))[0]
        self._heard[key] = before + nbytes, has_session, sender

    def accepted(self) -> None:
        """There is a new connection: look at once, unless nothing is read from it before its key is known."""
        if self._has_keys:
            self.interval = min(self.interval, _INTERVAL)
        else:
            self._next_check = self._next_find = self.interval = 0.0

    def excuse(self, now: float) -> None:
        """Begin the time of silence again, because it was this process that did not look."""
        for one in self._connections.values():
            one.heard_at = one.accepted_at = now

    def close(self) -> None:
        if self._reserve >= 0:
            os.close(self._reserve)
            self._reserve = -1

    def check(self, now: float) -> None:
        """End the connections that go beyond the limits, if it is time to look.

        Call it when all messages that have come were read: what a busy server has yet to read is nobody's offence.
        """
        if now < self._next_check:
            return
        self.close()
        try:
            self._check(now)
        except OSError as error:  # something else has taken the last descriptor
            _log.warning("cannot look at the connections: %s", error)
        finally:
            with suppress(OSError):
                self._reserve = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)

    def _check(self, now: float) -> None:
        # Looking through all descriptors takes most of the time. For a new connection it is done at once.
        is_whole = now >= self._next_find
        if is_whole:
            self._find(now)
        self._count_heard(now, is_whole)
        watched = {fd: one for fd, one in self._connections.items() if not one.has_session}
        unknown = {fd: one for fd, one in watched.items() if is_whole or _is_open(fd, one.inode)}
        unread = {fd: self._note_received(fd, one, now) - one.num_read for fd, one in unknown.items()}
        # 1. Those that are too silent, or too many.
        by_age = sorted(unknown, key=lambda fd: unknown[fd].heard_at)
        for fd in by_age[: max(0, len(by_age) - self._most)]:
            self._end(fd, f"is one of {len(unknown)} without a session, and {self._most} are allowed")
        for fd, one in unknown.items():
            # With a key it has to send a message: others that it sends, such as pings, keep nothing open.
            since = one.accepted_at if self._has_keys and not one.key else one.heard_at
            if now - since > HELLO_TIME:
                # A worker that still waits for another server is silent, too; its socket connects again.
                self._end(fd, f"has been silent for {HELLO_TIME:g} s", logging.INFO)
            elif unread[fd] <= MAX_UNREAD or self._has_keys:
                one.suspected_at = -1
            elif one.suspected_at < one.num_read:
                # What has come since the last message was read may be a whole one; the next look shows it.
                one.suspected_at = one.num_read
            else:
                self._end(fd, f"has sent {unread[fd]} bytes that are no whole message")
        # 2. Does this process grow more than what they have sent?
        if max(unread.values(), default=0) <= _SUSPICIOUS or self._has_keys:
            self._resident = _resident_bytes()
        elif _resident_bytes() - self._resident > _GROWTH + _COST * sum(unread.values()):
            worst = max(unread, key=lambda fd: unread[fd])
            self._end(worst, f"has sent {unread[worst]} bytes of short frames that are no whole message")
        # 3. When to look again.
        is_alert = not self._has_keys and (
            max(unread.values(), default=0) > _SUSPICIOUS
            or any(now - one.accepted_at < _NEW for one in unknown.values())
        )
        interval = _INTERVAL + _INTERVAL_PER_FD * (len(self._connections) + len(self._others))
        self._next_find = now + _WHOLE * interval if is_whole else self._next_find
        interval *= _ALERT if is_alert else 1.0
        self._next_check = now + interval
        self.interval = interval if unknown else math.inf

    def _find(self, now: float) -> None:
        """Note which connections there are."""
        connections: dict[int, _Connection] = {}
        others: dict[int, int] = {}
        for name in os.listdir("/proc/self/fd"):
            fd = int(name)
            try:
                found = os.fstat(fd)
            except OSError:
                continue  # it is closed by now
            known = self._connections.get(fd)
            if known is None or known.inode != found.st_ino:
                try:
                    is_other = self._others.get(fd) == found.st_ino or not self._is_ours(fd, found)
                except OSError as error:
                    if error.errno in (errno.EMFILE, errno.ENFILE):
                        raise
                    is_other = True  # it listens, or is closed by now
                if is_other:
                    others[fd] = found.st_ino
                    continue
                known = _Connection(found.st_ino, now, now)
            connections[fd] = known
        # Only now, so that nothing is forgotten if there is no descriptor to look with.
        self._connections, self._others = connections, others

    def _count_heard(self, now: float, are_all_known: bool) -> None:
        """Count what has come; over connections that are not known yet, later."""
        unknown = {}
        for (fd, inode), what in self._heard.items():
            one = self._connections.get(fd)
            if one is not None and one.inode == inode:
                one.num_read += what[0]
                one.heard_at, one.has_session, one.key = now, what[1], what[2]
            elif not are_all_known:
                unknown[fd, inode] = what
        self._heard = unknown

    def _is_ours(self, fd: int, found: os.stat_result) -> bool:
        if not stat.S_ISSOCK(found.st_mode):
            return False
        with socket.socket(fileno=os.dup(fd)) as end:
            if end.family not in (socket.AF_INET, socket.AF_INET6) or end.type != socket.SOCK_STREAM:
                return False
            end.getpeername()
            return bool(end.getsockname()[1] == self.port)

    def _note_received(self, fd: int, known: _Connection, now: float) -> int:
        received, queued = self._num_received(fd)
        if received > known.num_received:
            known.num_received, known.heard_at = received, now
        return received - queued

    def _num_received(self, fd: int) -> tuple[int, int]:
        """Return how many bytes have come over a connection, and how many of them the kernel still has."""
        try:
            # Python asks the kernel for what is not given. What is told is the same for IPv6.
            with socket.socket(socket.AF_INET, socket.SOCK_STREAM, 0, os.dup(fd)) as end:
                told = end.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
                [queued] = struct.unpack("i", fcntl.ioctl(end, termios.FIONREAD, bytes(4)))
        except OSError:
            return 0, 0
        if len(told) < _TCP_INFO_BYTES:
            return 0, 0
        return int(struct.unpack_from("Q", told, _RECEIVED_AT)[0]), queued

    def _end(self, fd: int, why: str, level: int = logging.WARNING) -> None:
        """Shut a connection down; its socket belongs to libzmq, which then closes it and forgets what it has sent."""
        # The duplicate keeps the number from being used again between the check and the end.
        known = self._connections.pop(fd, None)
        with suppress(OSError), socket.socket(fileno=os.dup(fd)) as end:
            if known is not None and os.fstat(end.fileno()).st_ino == known.inode:
                peer = end.getpeername()[0]
                end.setsockopt(
                    socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
                )  # what comes is refused
                end.shutdown(socket.SHUT_RDWR)
                self.num_ended += 1
                _log.log(level, "ended a connection from %s: it %s", peer, why)


def _is_open(fd: int, inode: int) -> bool:
    try:
        return os.fstat(fd).st_ino == inode
    except OSError:
        return False


def _resident_bytes() -> int:
    with open("/proc/self/statm", "rb") as file:
        return int(file.read().split()[1]) * resource.getpagesize()
