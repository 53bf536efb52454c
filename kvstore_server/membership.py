"""Who takes part: the ranks of one namespace, their sessions, when they were last heard, and their barriers.

A session is one process in the place of one rank. A newer process of the same rank fences the older one. All
times are given by the caller, in seconds of one monotonic clock.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kvstore_server.errors import (
    ConfigurationError,
    ProtocolError,
    WorkerLostError,
)
from kvstore_server.protocol.messages import Gather, Hello
from kvstore_server.rounds import Waiter

_NAMED = 8
"""Of how many ranks a message tells more than their number."""


@dataclass
class Member:
    """The process that now stands for a rank."""

    rank: int
    session: int
    address: str
    last_heard: float


@dataclass
class BarrierWait:
    """One rank that waits at a barrier."""

    since: float
    deadline: float
    waiter: Waiter
    data: bytes
    reads: bool


class Membership:
    """The members of one namespace. Membership is static: ranks 0 … num_workers − 1."""

    def __init__(self, namespace: str, num_workers: int) -> None:
        self.namespace = namespace
        self.num_workers = num_workers
        self.members: dict[int, Member] = {}
        self.departed: dict[int, str] = {}
        """Rank → why it left."""
        self.failed: set[int] = set()
        """The departed ranks that did not leave because they were done."""
        self.finished: set[int] = set()
        """Those that did."""
        self.barrier_sequence = 0
        self.barrier: dict[int, BarrierWait] = {}
        self._gathered: tuple[bytes, ...] = ()
        """What the ranks gave at the last barrier."""

    def join(self, hello: Hello, session: int, now: float) -> Member | None:
        """Let a process stand for its rank; return the member that it replaces, if any.

        Raises:
            ConfigurationError: the process disagrees about the number of workers, or its rank is out of range.
        """
        if hello.num_workers != self.num_workers:
            raise ConfigurationError(
                f"rank {hello.rank} ({hello.address}) believes in {hello.num_workers} workers, the ranks before it "
                f"in {self.num_workers}; start all workers of a job with the same number"
            )
        if not 0 <= hello.rank < self.num_workers:
            raise ConfigurationError(f"rank {hello.rank} is not in 0 … {self.num_workers - 1}")
        replaced = self.members.get(hello.rank)
        self.members[hello.rank] = Member(hello.rank, session, hello.address, now)
        self.barrier.pop(hello.rank, None)
        self.departed.pop(hello.rank, None)
        self.failed.discard(hello.rank)
        self.finished.discard(hello.rank)
        return replaced

    def refuse(self, rank: int, reason: str) -> None:
        """A process that would stand for a rank cannot; whoever waits for that rank is told why."""
        if rank not in self.members and 0 <= rank < self.num_workers:
            self.departed[rank] = reason

    def leave(self, rank: int, reason: str, is_clean: bool) -> None:
        """Let a rank go; whoever still needs it is told the reason."""
        self.members.pop(rank, None)
        self.barrier.pop(rank, None)
        self.departed[rank] = reason
        (self.finished if is_clean else self.failed).add(rank)

    def is_over(self) -> bool:
        """Whether every rank that ever came has left."""
        return not self.members

    def silent(self, now: float, dead_after: float) -> list[int]:
        """Members that were not heard from for longer than `dead_after` seconds."""
        return [rank for rank, m in sorted(self.members.items()) if now - m.last_heard > dead_after]

    def silence(self, now: float) -> float:
        """Seconds since any member was heard from; 0 where there is none."""
        return min((now - member.last_heard for member in self.members.values()), default=0.0)

    def num_dead(self, now: float, dead_after: float) -> int:
        """How many ranks came and then failed or fell silent."""
        return len(self.failed) + len(self.silent(now, dead_after))

    def lost_error(
        self, waiting_for: list[int], what: str, now: float, dead_after: float
    ) -> WorkerLostError | None:
        """The error of a wait that can never end because a rank it needs is gone, or None."""
        for rank in waiting_for:
            if rank in self.departed:
                uneven = (
                    "if it had fewer batches than the others, let every worker train in a block "
                    "`with trainer.join():`, and otherwise "
                )
                return WorkerLostError(
                    f"{what} cannot complete: rank {rank} has left ({self.departed[rank]}); "
                    f"{uneven if rank in self.finished else ''}restart the job from its last saved states"
                )
        silent = set(self.silent(now, dead_after))
        for rank in waiting_for:
            if rank in silent:
                return WorkerLostError(
                    f"{what} cannot complete: {self.describe(rank, now)}; "
                    f"a worker counts as lost after {dead_after:g} s of silence (--dead-after). Look for its own last "
                    "words, and restart the job from its last saved states"
                )
        return None

    def enter_barrier(
        self, rank: int, gather: Gather, waiter: Waiter, now: float, dead_after: float
    ) -> list[tuple[Waiter, tuple[bytes, ...]]]:
        """Let a rank wait; return whom to release with what all have given; nobody while somebody is missing.

        Raises:
            WorkerLostError: a rank that the barrier needs is gone.
            ProtocolError: the rank is at another barrier than the others.
        """
        if gather.sequence < self.barrier_sequence:
            is_last = gather.sequence == self.barrier_sequence - 1
            return [(waiter, self._gathered if is_last and gather.reads else ())]
        if gather.sequence > self.barrier_sequence:
            raise ProtocolError(
                f"rank {rank} is at barrier {gather.sequence} while barrier {self.barrier_sequence} is open"
            )
        known = self.barrier.get(rank)
        since = now if known is None else known.since  # one that is repeated has no more time than it had
        self.barrier[rank] = BarrierWait(since, since + gather.timeout, waiter, gather.data, gather.reads)
        absent = self.absent_from_barrier()
        if absent:
            lost = self.lost_error(absent, f"barrier {gather.sequence}", now, dead_after)
            if lost is not None:
                del self.barrier[rank]
                raise lost
            return []
        self._gathered = tuple(self.barrier[each].data for each in range(self.num_workers))
        self.barrier_sequence += 1
        released = [(wait.waiter, self._gathered if wait.reads else ()) for wait in self.barrier.values()]
        self.barrier.clear()
        return released

    def absent_from_barrier(self) -> list[int]:
        """The ranks that have not come to the barrier."""
        return [rank for rank in range(self.num_workers) if rank not in self.barrier]

    def take_barrier(self) -> list[Waiter]:
        """Take out those that wait at the barrier."""
        waiters = [wait.waiter for wait in self.barrier.values()]
        self.barrier.clear()
        return waiters

    def describe_all(self, ranks: Iterable[int], now: float) -> str:
        """Name some ranks for a message; of very many the first ones."""
        listed = list(ranks)
        named = [self.describe(rank, now) for rank in listed[:_NAMED]]
        more = len(listed) - len(named)
        return "; ".join(named) + (f"; and {more} more" if more else "")

    def describe(self, rank: int, now: float) -> str:
        """Name a rank for an error message: where it runs and when it was last heard."""
        member = self.members.get(rank)
        if member is not None:
            return f"rank {rank} ({member.address}) was last heard {now - member.last_heard:.1f} s ago"
        if rank in self.departed:
            return f"rank {rank} has left ({self.departed[rank]})"
        return f"rank {rank} never connected"
