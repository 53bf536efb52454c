"""Which workers of a job have died and are started again, and when. Pure; the clock is an argument."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kvstore_server.restarts import RESTARTS, Restarts, is_restart_useless, shell_code


class RankDeath(NamedTuple):
    """The death of a worker that was counted."""

    text: str
    """Who died, how, after how long, and what follows."""
    is_last: bool
    """Whether the worker is not started again."""
    code: int
    """The exit code for the job if it is not: that of the first of several deaths in a row, as a shell gives it."""


class RestartedRanks:
    """The restarts of each rank.

    Args:
        count: How many ranks there are.
        limit: The most restarts of each; with 0, no death is counted.
    """

    def __init__(self, count: int, limit: int) -> None:
        self._limit = limit
        self._restarts: Sequence[Restarts] = [Restarts(limit) for _ in range(count)]
        self._due: dict[int, float] = {}

    def environment(self, rank: int) -> dict[str, str]:
        """Return what the environment of a worker says about restarts; nothing if there are none."""
        return {RESTARTS: str(self._restarts[rank].used)} if self._limit else {}

    def count(self, rank: int, name: str, code: int, lived: float, now: float) -> RankDeath | None:
        """Count the death of a worker; None if the worker is done or replaced, or there are no restarts."""
        if not self._limit or is_restart_useless(code):
            return None
        restarts = self._restarts[rank]
        delay = restarts.after(code, lived)
        if delay is not None:
            self._due[rank] = now + delay
        text = restarts.describe(name, code, lived, delay)
        return RankDeath(text, delay is None, shell_code(restarts.first_code))

    @property
    def are_awaited(self) -> bool:
        """Whether ranks are about to be started again."""
        return bool(self._due)

    def is_awaited(self, rank: int) -> bool:
        return rank in self._due

    def seconds_left(self, now: float) -> float:
        """Return the seconds until the next rank is due; infinity if none is."""
        return max(0.0, min(self._due.values(), default=float("inf")) - now)

    def take_due(self, now: float) -> list[int]:
        """Return the ranks to start now, which are no longer awaited then."""
        due = sorted(rank for rank, at in self._due.items() if at <= now)
        for rank in due:
            del self._due[rank]
        return due
