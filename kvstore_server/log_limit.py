"""Rate limits for logs: for lines of one place in the code, and for reports of long waits."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

SLOW_AFTER = 10.0
"""Seconds of waiting before the first report, unless the user configures it."""
_LONGEST_GAP = 600.0

_log = logging.getLogger(__name__)


@contextmanager
def limited_log() -> Iterator[None]:
    """Limit what this process logs inside the block; log at its end how many lines were suppressed."""
    limit, handlers = LogLimit(), list(logging.getLogger().handlers)
    if not handlers and logging.lastResort is not None:  # the handler that Python uses if none is configured
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
class _LogPlace:
    since: float
    lines: int = 0
    left_out: int = 0


class LogLimit(logging.Filter):
    """A filter that passes `lines` lines in `seconds` seconds from each place in the code, and reports how many it
    suppressed.

    Add it to a handler. It only affects what this package logs, and not debug lines, which are all wanted if enabled.
    """

    def __init__(
        self, lines: int = 20, seconds: float = 10.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__()
        self._lines = lines
        self._seconds = seconds
        self._clock = clock
        self._places: dict[tuple[str, int], _LogPlace] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Pass a line, or suppress and count it; the next line that passes says how many were suppressed."""
        if not record.name.startswith(__package__ or "") or record.levelno <= logging.DEBUG:
            return True
        now = self._clock()
        place = self._places.setdefault((record.pathname, record.lineno), _LogPlace(now))
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
        """Suppressed lines that no line has reported yet."""
        return sum(place.left_out for place in self._places.values())


class SlowReports:
    """Spaces out the reports of long waits.

    The first is due after `slow_after` seconds of waiting. The gap doubles from report to report, up to ten minutes,
    also across waits, so that a job whose every round is slow does not fill its log. After a gap without a slow wait
    it starts again.

    Args:
        slow_after: Seconds of waiting before the first report, and the first gap.
    """

    def __init__(self, slow_after: float) -> None:
        self._slow_after = slow_after
        self._gap = slow_after
        self._next = -math.inf

    def is_due(self, waited: float, now: float) -> bool:
        """Return whether a wait of `waited` seconds is to be reported at time `now`; the next one is due later."""
        if waited < self._slow_after or now < self._next:
            return False
        was_quiet = now > self._next + self._gap
        self._gap = self._slow_after if was_quiet else min(2 * self._gap, _LONGEST_GAP)
        self._next = now + self._gap
        return True
