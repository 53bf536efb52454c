"""A log that no peer can fill: of what is said at one place in the code, only so much in a while."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

_log = logging.getLogger(__name__)


@contextmanager
def limited_log() -> Iterator[None]:
    """Limit what this process logs while the block runs, and say at its end how many lines were left out."""
    limit, handlers = LogLimit(), list(logging.getLogger().handlers)
    for handler in handlers:
        handler.addFilter(limit)
    try:
        yield
    finally:
        for handler in handlers:
            handler.removeFilter(limit)
        if limit.left_out:
            _log.warning("%d more lines were left out of this log", limit.left_out)


@dataclass
class _Place:
    """What was said at one place in the code."""

    since: float
    lines: int = 0
    left_out: int = 0


class LogLimit(logging.Filter):
    """Leaves out what is above `lines` lines in `seconds` seconds of one place, and says how many they were.

    Add it to a handler. It touches what this package logs, and nothing else.
    """

    def __init__(
        self, lines: int = 20, seconds: float = 10.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__()
        self._lines = lines
        self._seconds = seconds
        self._clock = clock
        self._places: dict[tuple[str, int], _Place] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Let a line pass, or leave it out and count it; the next one that passes says how many were."""
        if not record.name.startswith(__package__ or ""):
            return True
        now = self._clock()
        place = self._places.setdefault((record.pathname, record.lineno), _Place(now))
        if now - place.since >= self._seconds:
            place.since, place.lines = now, 0
        place.lines += 1
        if place.lines > self._lines:
            place.left_out += 1
            return False
        if place.left_out:
            record.msg = f"{record.getMessage()} ({place.left_out} more like this were left out before)"
            record.args, place.left_out = (), 0
        return True

    @property
    def left_out(self) -> int:
        """Lines that were left out, of which no line says so yet."""
        return sum(place.left_out for place in self._places.values())
