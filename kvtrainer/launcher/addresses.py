"""Where the servers of a launched job listen, as they report it when they are ready."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from kvstore_server.errors import ConfigurationError
from kvtrainer.env import parse_address
from kvtrainer.launcher.events import Events

_MAX_READY_LINE = 1024


class Addresses:
    """The addresses of a number of servers; `fail` is called with what is wrong with a report."""

    def __init__(self, count: int, events: Events, fail: Callable[[str], None]) -> None:
        self._count = count
        self._events = events
        self._fail = fail
        self._known: dict[int, str] = {}
        self._unread: set[int] = set()
        """Pipes of servers that have not reported an address yet."""

    def __contains__(self, index: int) -> bool:
        return index in self._known

    def are_complete(self) -> bool:
        return len(self._known) == self._count

    def missing(self) -> list[int]:
        return [index for index in range(self._count) if index not in self._known]

    def in_order(self) -> list[str]:
        """All of them, by index; complete ones only."""
        return [self._known[index] for index in range(self._count)]

    @contextmanager
    def pipe_to(self, index: int) -> Iterator[int]:
        """A file descriptor for one server, which writes its address and a newline; open within the block."""
        reading, writing = os.pipe()
        try:
            yield writing
        finally:
            os.close(writing)
        self._unread.add(reading)
        received = bytearray()
        self._events.add_reader(reading, lambda: self._read(index, reading, received), pausable=False)

    def note(self, index: int, text: str) -> None:
        """Take down what one server reported."""
        try:
            self._known[index] = parse_address(text)
        except ConfigurationError as error:
            self._fail(f"server {index} did not report its address: {error}")

    def close(self) -> None:
        for fd in list(self._unread):
            self._close_pipe(fd)

    def _read(self, index: int, fd: int, received: bytearray) -> None:
        data = os.read(fd, _MAX_READY_LINE)
        received += data
        if data and b"\n" not in received and len(received) < _MAX_READY_LINE:
            return
        self._close_pipe(fd)
        if received:  # else it has exited, which is reported as that
            self.note(index, received.decode(errors="replace").partition("\n")[0])

    def _close_pipe(self, fd: int) -> None:
        self._unread.discard(fd)
        self._events.remove_reader(fd)
        os.close(fd)
