"""Reads snapshots in the background, so that a server answers others meanwhile; requests that need them wait."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

from kvstore_server.durable.background import Task
from kvstore_server.engine.cut import StoredSpace
from kvstore_server.engine.rounds import Waiter
from kvstore_server.protocol import messages as m


class StoredJob(NamedTuple):
    """What a server has of a job in a snapshot.

    Args:
        loaded: The tags that it descends from.
        ordinal: How many snapshots were due up to then.
    """

    spaces: Sequence[StoredSpace] = ()
    loaded: tuple[str, ...] = ()
    ordinal: int = 0


Again = Callable[[float], list[m.Outgoing]]
"""Handles a request once more, given the time."""


class StoredReads:
    """The reads that are under way. Not thread-safe.

    Args:
        run: Starts a function, and returns at once.
    """

    def __init__(self, run: Callable[[Callable[[], None]], Task]) -> None:
        self._run = run
        self._open: dict[Hashable, _StoredReading] = {}

    def result(
        self, key: Hashable, read: Callable[[], StoredJob], waiter: Waiter, again: Again
    ) -> StoredJob | None:
        """Return what `read` has returned, or raise what it has raised; None if it has not ended yet.

        Then `again` is called later, by `resume`; it asks for the same result.

        Args:
            key: Equal for equal reads.
            waiter: Whose request it is; one that is repeated waits once.
        """
        reading = self._open.get(key)
        if reading is None:
            reading = self._open[key] = _StoredReading(read, self._run)
        if not reading.task.is_over():
            reading.waiting[waiter] = again
            return None
        if not reading.waiting:
            del self._open[key]
        if reading.task.error is not None:
            raise reading.task.error
        return reading.value

    def resume(self, now: float) -> list[m.Outgoing]:
        """Handle the requests whose reads have ended; return what is to be sent."""
        out: list[m.Outgoing] = []
        for key, reading in list(self._open.items()):
            if reading.task.is_over():
                for again in reading.waiting.values():
                    out += again(now)
                del self._open[key]
        return out


class _StoredReading:
    def __init__(self, read: Callable[[], StoredJob], run: Callable[[Callable[[], None]], Task]) -> None:
        self.value: StoredJob | None = None
        self.waiting: dict[Waiter, Again] = {}
        self._read = read
        self.task = run(self._keep)

    def _keep(self) -> None:
        self.value = self._read()
