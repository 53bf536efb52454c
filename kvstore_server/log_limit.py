"""A log that nobody can fill: of what is said at one place in the code only so much, of long waits ever less."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

SLOW_AFTER = 10.0
"""Seconds of waiting before the first line, unless the user says otherwise."""
_LONGEST_GAP = 600.0

_log = logging.getLogger(__name__)


@contextmanager
def limited_log() -> Iterator[None]:
    """Limit what this process logs while the block runs. Say at its end how many lines were left out."""
    limit, handlers = LogLimit(), list(logging.getLogger().handlers)
    if not handlers and logging.lastResort is not None:  # what writes where nothing was set up
        handlers.append(logging.lastResort)
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
    """Lines of one place in the code, counted."""

    since: float
    lines: int = 0
    left_out: int = 0


class LogLimit(logging.Filter):
    """A filter of lines above `lines` in `seconds` seconds of one place. It says how many it left out.

    Add it to a handler. It touches what this package logs, and nothing else. Debug lines all pass: who asks for them
    wants every one.
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
        if not record.name.startswith(__package__ or "") or record.levelno <= logging.DEBUG:
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


class SlowReports:
    """Space the lines about waits that take long.

    The first one is due after `slow_after` seconds of waiting. The gap to the next doubles from one to the next, up to
    ten minutes, and over the waits that follow, too: a job whose every round is slow does not fill its log. After a
    gap's time without a slow wait it starts anew.

    Args:
        slow_after: Seconds of waiting before the first line, and the first gap.
    """

    def __init__(self, slow_after: float) -> None:
        self._slow_after = slow_after
        self._gap = slow_after
        self._next = -math.inf

    def is_due(self, waited: float, now: float) -> bool:
        """Say if a wait of so many seconds is to be reported at time `now`; if so, the next one is due later."""
        if waited < self._slow_after or now < self._next:
            return False
        was_quiet = now > self._next + self._gap
        self._gap = self._slow_after if was_quiet else min(2 * self._gap, _LONGEST_GAP)
        self._next = now + self._gap
        return True
