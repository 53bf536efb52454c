"""When a process that has died is started again: after which wait, and how often. Pure; the caller measures the time.

The first restart is immediate, because most deaths come from outside: a machine that ran out of memory, a `kill`. A
process that dies again soon after its start gets more and more time. It counts as steady once it has run for STEADY
seconds; then waits are short again. A process that never becomes steady is not started for ever, even without a limit.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvstore_server.processes import describe_exit

RESTARTS = "KVSTORE_RESTARTS"
"""Environment variable of a process that is started again when it dies: how often that has happened."""
REPLACED = 75
"""Exit code of a process whose place another one has taken; it must not come back. EX_TEMPFAIL of sysexits.h."""
STEADY = 5.0
"""Seconds after which a process counts as steady."""
DELAYS = (0.0, 0.5, 1.0, 2.0, 5.0, 10.0)
"""Seconds before the first, second, … restart in a row; the last one also before all others."""
CRASH_LOOP = 10
"""This many deaths in a row, with no steady life between them, are a crash loop."""


def is_restart_useless(code: int) -> bool:
    """Return whether a process that ended with an exit code has nothing left to do here."""
    return code in (0, REPLACED)


def shell_code(code: int) -> int:
    """Return an exit code as a shell gives it: 128 + n for signal n."""
    return code if code >= 0 else 128 - code


@dataclass
class Restarts:
    """The restarts of one process: those that there were, and whether there is another.

    Args:
        limit: The most restarts; None for any number, up to a crash loop.
    """

    limit: int | None = None
    used: int = 0
    first_code: int = 0
    """How the first death since the process was last steady ended it: an exit code, or minus a signal.

    Later deaths in a row may only follow from that one, so it decides the exit code when there are no more restarts.
    """
    _in_a_row: int = 0

    def after(self, code: int, lived: float) -> float | None:
        """Count a death after `lived` seconds. Return the seconds to wait; None if it is not started again."""
        if lived >= STEADY or self._in_a_row == 0:
            self._in_a_row, self.first_code = 0, code
        self._in_a_row += 1
        if self.used == self.limit or self._in_a_row == CRASH_LOOP:
            return None
        self.used += 1
        return DELAYS[min(self._in_a_row, len(DELAYS)) - 1]

    def describe(self, name: str, code: int, lived: float, delay: float | None) -> str:
        """Return the line about a death that was counted, and what follows from it."""
        death = f"{name} {describe_exit(code)} after {lived:.1f} s"
        if delay is not None:
            number = f"{self.used}" if self.limit is None else f"{self.used} of {self.limit}"
            return f"{death}; restart {number}{f' in {delay:g} s' if delay else ''}"
        if self.used == self.limit:
            return f"{death}, and there is no restart left of {self.limit}"
        return f"{death}, the {CRASH_LOOP}th time in a row soon after its start; it is not started again"
