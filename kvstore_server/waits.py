"""Requests that wait for other ranks outside of a round: reads that are too far ahead, and ranks that have joined."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from kvstore_server.protocol.messages import Outgoing
from kvstore_server.table import Table, Waiter


@dataclass
class Wait:
    """One request that is answered when the other ranks have come far enough."""

    table: Table
    rank: int
    waiter: Waiter
    deadline: float
    timeout: float
    is_join: bool
    """Whether it waits for all ranks to join, rather than for weights that are recent enough."""
    answer: Callable[[], list[Outgoing]]
    round: int = -1
    """The round of the commit that waits; -1: it is a request to read."""

    @property
    def what(self) -> str:
        """Name the wait in messages."""
        return f"{'the end' if self.is_join else 'a read'} of {self.table.name!r} by rank {self.rank}"

    @property
    def since(self) -> float:
        """When its time began to run."""
        return self.deadline - self.timeout

    def missing(self) -> list[int]:
        """The ranks that it waits for; none when it can be answered."""
        lanes = self.table.lanes
        return lanes.missing_from_join() if self.is_join else lanes.behind(self.rank)


class Waits:
    """The waits of one namespace; a repeated request takes the place of the former one."""

    def __init__(self) -> None:
        self._waits: dict[tuple[int, int, bytes, int], Wait] = {}

    def __bool__(self) -> bool:
        return bool(self._waits)

    def __len__(self) -> int:
        return len(self._waits)

    def __iter__(self) -> Iterator[Wait]:
        return iter(self._waits.values())

    def add(self, wait: Wait) -> None:
        """Keep a request until it can be answered; one that is repeated has no more time than it had."""
        key = (wait.table.number, wait.rank, *wait.waiter)
        known = self._waits.get(key)
        if known is not None:
            wait.deadline = known.deadline
        self._waits[key] = wait

    def contributed(self, table: Table, rank: int, now: float) -> None:
        """A contribution came: its rank waits no more for all to join, and whoever does may wait as long as before."""
        for key, wait in list(self._waits.items()):
            if wait.is_join and wait.table is table:
                if wait.rank == rank:
                    del self._waits[key]
                wait.deadline = now + wait.timeout

    def take_ready(self) -> list[Wait]:
        """Take out the waits that are over."""
        ready = [key for key, wait in self._waits.items() if not wait.missing()]
        return [self._waits.pop(key) for key in ready]

    def take(self, is_over: Callable[[Wait], bool]) -> list[Wait]:
        """Take out the waits of which that is true."""
        found = [key for key, wait in self._waits.items() if is_over(wait)]
        return [self._waits.pop(key) for key in found]
