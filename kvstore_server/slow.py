"""When a wait for others has become long enough for a line in the log: soon at first, then ever more rarely."""

from __future__ import annotations

import math

SLOW_AFTER = 10.0
"""Seconds of waiting before the first line, unless the user says otherwise."""
_LONGEST_GAP = 600.0


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
