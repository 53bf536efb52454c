"""Forwarding the output of many processes: whole lines, each with the tag of its process, in bounded memory.

`LineSplitter` turns what one stream of one process wrote into lines. `Output` holds lines until they can be
written to the launcher's own standard output and error without blocking, so that a paused terminal cannot
make the launcher deaf to signals and exits.
"""

from __future__ import annotations

import os
import re
import time
from collections import deque
from collections.abc import Callable

MAX_LINE = 64 * 1024
"""A longer line is cut into pieces of about this many bytes, each printed as a line."""
PROGRESS_INTERVAL = 1.0
"""Seconds between two states of a progress bar that are shown; the state in which its line ends always is."""
HIGH_WATER = 256 * 1024
"""Above this many waiting bytes the launcher stops reading, and writers wait, as at a slow terminal."""

# poll() reports a pipe as writable only when this much can be written at once.
_CHUNK = 4096
# A carriage return that ends the data so far is left alone, because a newline may follow it.
_LINE_END = re.compile(rb"\r*\n|\r+(?=[^\r\n])")


class LineSplitter:
    """Cuts the bytes of one stream into lines, without their ends.

    Text that a carriage return has overwritten is a progress bar: of these states only one per
    PROGRESS_INTERVAL comes out.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._buffer = bytearray()
        self._shown = -PROGRESS_INTERVAL

    def feed(self, data: bytes) -> list[bytes]:
        """Add bytes; return the lines that are now complete."""
        scanned = len(self._buffer)
        if self._buffer.endswith(b"\r"):
            scanned -= 1
        self._buffer += data
        lines: list[bytes] = []
        start = 0
        for end in _LINE_END.finditer(self._buffer, scanned):
            text = bytes(self._buffer[start : end.start()]).rstrip(b"\r")
            if end.group().endswith(b"\n") or self._due(text):
                lines += _cut(text)
            start = end.end()
        del self._buffer[:start]
        if len(self._buffer) > MAX_LINE:
            *whole, rest = _cut(bytes(self._buffer))
            lines += whole
            self._buffer[:] = rest
        return lines

    def finish(self) -> list[bytes]:
        """Return the last line if it had no end; the stream is over."""
        text = bytes(self._buffer).rstrip(b"\r")
        self._buffer.clear()
        return _cut(text) if text else []

    def _due(self, text: bytes) -> bool:
        now = self._clock()
        if not text.strip() or now - self._shown < PROGRESS_INTERVAL:
            return False
        self._shown = now
        return True


class Output:
    """Lines on their way to file descriptors, written in the order in which they came.

    One queue serves all descriptors: two of them may be one terminal, where a line must be over before the
    next begins.
    """

    def __init__(self) -> None:
        self._queue: deque[tuple[int, bytearray]] = deque()
        self._waiting = 0
        self._broken: set[int] = set()

    @property
    def full(self) -> bool:
        return self._waiting >= HIGH_WATER

    @property
    def target(self) -> int | None:
        """The descriptor to which the next bytes go, None when nothing waits."""
        return self._queue[0][0] if self._queue else None

    def put(self, fd: int, tag: str, line: bytes) -> None:
        """Append `tag` and `line`; bytes that are not UTF-8 become replacement characters."""
        if fd in self._broken:
            return
        data = f"{tag}{line.decode(errors='replace')}\n".encode()
        if not self._queue or self._queue[-1][0] != fd:
            self._queue.append((fd, bytearray()))
        self._queue[-1][1].extend(data)
        self._waiting += len(data)

    def write_some(self) -> OSError | None:
        """Write what surely fits to `target`, which poll() has reported as writable.

        An error is returned once; from then on everything for that descriptor is dropped.
        """
        fd, data = self._queue[0]
        try:
            written = os.write(fd, data[:_CHUNK])
        except OSError as error:
            self._broken.add(fd)
            self._queue = deque(item for item in self._queue if item[0] != fd)
            self._waiting = sum(len(item[1]) for item in self._queue)
            return error
        del data[:written]
        self._waiting -= written
        if not data:
            self._queue.popleft()
        return None


def _cut(text: bytes) -> list[bytes]:
    """Cut into pieces of at most MAX_LINE bytes, not inside a UTF-8 character; at least one piece."""
    pieces: list[bytes] = []
    while len(text) > MAX_LINE:
        end = MAX_LINE
        while end > MAX_LINE - 3 and text[end] & 0xC0 == 0x80:
            end -= 1
        pieces.append(text[:end])
        text = text[end:]
    return [*pieces, text]
