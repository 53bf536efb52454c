"""When a contribution counts without synchronous rounds: each rank's own sequence, and how far ranks may drift apart.

The first round of a table, which gives it its values, is for all ranks together. From then on every rank has a lane: a
sequence of rounds with one member, so that sending a contribution twice has no further effect and a gap is refused, by
the same state machine. A process that takes a rank over begins a new lane; its session has shut out the older one.

A rank's clock counts the rounds of its lane, however they ended, so it is the same on all servers. With a bound, a rank
whose clock is c may read only when every rank's clock is at least c − bound (stale synchronous parallel). A rank that
has joined, because it has no more data, holds nobody back, nor does one that has left because it was done.

This module holds no clock that tells the time, no socket and no arithmetic on payloads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic

from kvstore_server.consistency import SyncRounds, WaiterT
from kvstore_server.protocol.messages import Payload


class Lanes(Generic[WaiterT]):
    """The lanes of one table on one server, and the clocks of its ranks.

    Args:
        num_workers: How many ranks there are.
        bound: By how many contributions a reader may be ahead of the slowest rank; None: any number.
        same_payload: As of SyncRounds.
    """

    def __init__(
        self, num_workers: int, bound: int | None, same_payload: Callable[[Payload, Payload], bool]
    ) -> None:
        self.bound = bound
        self.clocks = [0] * num_workers
        self.joined: set[int] = set()
        """The ranks that have no more data until all have joined."""
        self.left: set[int] = set()
        """The ranks whose processes left because they were done."""
        self._same_payload = same_payload
        self._lanes: dict[int, SyncRounds[WaiterT]] = {}

    def of(self, rank: int, number: int = -1) -> SyncRounds[WaiterT]:
        """The lane of a rank, in which it means the round of that number.

        The first one that a process means is its first, and sets its clock. With several servers it takes the greatest
        that one of them has proposed: if they differed in who is ahead of whom, ranks could wait in a circle.
        """
        lane = self._lanes.get(rank)
        if lane is None:
            lane = self._lanes[rank] = SyncRounds(1, self._same_payload)
            lane.number = max(1, number)
            self.clocks[rank] = max(self.clocks[rank], number - 1)
        return lane

    def proposed(self, rank: int) -> int:
        """The next round of a rank; that of a new process is at the side of the slowest of the others, or ahead."""
        if rank in self._lanes:
            return self._lanes[rank].number
        others = [clock for r, clock in enumerate(self.clocks) if r != rank and self._takes_part(r)]
        return 1 + max(self.clocks[rank], min(others, default=0))

    @property
    def mismatches(self) -> int:
        """Different payloads that arrived under an identity that had one already."""
        return sum(lane.mismatches for lane in self._lanes.values())

    def advance(self, rank: int) -> None:
        """A round of the rank's lane is over; if the rank had joined, it is back."""
        self.joined.discard(rank)
        self.clocks[rank] += 1

    def behind(self, rank: int) -> list[int]:
        """The ranks because of which this one may not read now."""
        if self.bound is None:
            return []
        least = self.clocks[rank] - self.bound
        return [r for r, clock in enumerate(self.clocks) if clock < least and self._takes_part(r)]

    def join(self, rank: int) -> None:
        """A rank has no more data."""
        self.joined.add(rank)

    def missing_from_join(self) -> list[int]:
        """The ranks that still have data."""
        return list(filter(self._takes_part, range(len(self.clocks))))

    def part_again(self) -> None:
        """All ranks have joined: from now on all take part again, side by side."""
        self.joined.clear()
        self.clocks = [max(self.clocks)] * len(self.clocks)

    def begin(self, rank: int) -> None:
        """A process begins to stand for a rank: it takes part, in a new lane."""
        self._lanes.pop(rank, None)
        self.joined.discard(rank)
        self.left.discard(rank)

    def leave(self, rank: int, is_done: bool) -> None:
        """The process of a rank has ended; where it was done, nobody needs what it will not give."""
        self._lanes.pop(rank, None)
        if is_done:
            self.left.add(rank)

    def _takes_part(self, rank: int) -> bool:
        return rank not in self.joined and rank not in self.left
