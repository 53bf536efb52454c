"""When does a contribution count? The state machine of synchronous rounds of one table on one server.

Every rank gives exactly one contribution to every round. Slices may arrive early and in any order, each with
a generation: until the rank commits, a higher generation of a slice replaces a lower one, and nothing counts.
The commit names each (slice, generation); it is refused while one of them has not arrived, and from then on
the first one wins: whatever else arrives for that round from that rank is a duplicate without effect. A round
is complete when every rank has committed. It then ends in one of two ways, the same for all: it is applied,
or it fails and leaves no trace. Either way the next round begins; a rank that comes late to a failed round is
told of the failure.

Ranks, not requests, are counted, so one worker can never complete a round alone. This module holds no clock,
no socket and no arithmetic on payloads.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from kvstore_server.errors import KVStoreError, ProtocolError
from kvstore_server.protocol.messages import Commit, Payload, Push

WaiterT = TypeVar("WaiterT")

_FAILURES_KEPT = 16
"""Of how many failed rounds in a row the reason is remembered."""


@dataclass
class Contribution(Generic[WaiterT]):
    """What one rank has given to the present round so far."""

    slices: dict[int, tuple[int, Payload]] = field(default_factory=dict)
    """Slice → (generation, payload)."""
    commit: Commit | None = None
    waiter: WaiterT | None = None
    """Whom to answer when the round is over; None after the process that waited was replaced."""


@dataclass(frozen=True)
class Applied:
    """The commit repeats one of a round that was applied."""


@dataclass(frozen=True)
class Lost:
    """The commit belongs to a round that failed."""

    error: KVStoreError


@dataclass(frozen=True)
class Refused:
    """The commit names slices that have not arrived in that generation."""

    slices: tuple[int, ...]


@dataclass(frozen=True)
class Accepted:
    """The commit counts; `repeated` when it had counted before."""

    repeated: bool


Verdict = Applied | Lost | Refused | Accepted


class SyncRounds(Generic[WaiterT]):
    """The rounds of one table: which is open, who has given what to it, which of the past ones failed."""

    def __init__(self, num_workers: int, same_payload: Callable[[Payload, Payload], bool]) -> None:
        self.num_workers = num_workers
        self.number = 0
        """The open round; every lower one is over."""
        self.mismatches = 0
        """Different payloads that arrived under an identity that had one already."""
        self._same_payload = same_payload
        self._open: dict[int, Contribution[WaiterT]] = {}
        self._committed: set[int] = set()
        self._deadline = math.inf
        self.waiting_since = math.inf
        """When the first rank committed the open round; infinity when none has."""
        self.wants_decision = False
        """Whether a rank has committed the open round with the wish that it be held."""
        self._failed_since = math.inf
        """The first failed round; forgotten when a later one is applied, since every rank then knew how it ended."""
        self._failures: dict[int, KVStoreError] = {}
        """Why the last ones of them failed."""

    def push(self, rank: int, push: Push) -> None:
        """Take one provisional slice; a duplicate or one of a past round changes nothing.

        Raises:
            ProtocolError: the slice belongs to a round that is not open yet.
        """
        if push.round > self.number:
            raise ProtocolError(f"rank {rank} pushed to round {push.round} while round {self.number} is open")
        if push.round < self.number:
            return
        mine = self._open.setdefault(rank, Contribution())
        known = mine.slices.get(push.slice)
        if known is not None and known[0] == push.generation:
            self.mismatches += not self._same_payload(known[1], push.payload)
        elif mine.commit is None and (known is None or known[0] < push.generation):
            mine.slices[push.slice] = (push.generation, push.payload)

    def commit(self, rank: int, commit: Commit, waiter: WaiterT, now: float) -> Verdict:
        """Make a rank's contribution final, or say why it is not.

        Raises:
            ProtocolError: the commit belongs to a round that is not open yet.
        """
        if commit.round > self.number:
            raise ProtocolError(
                f"rank {rank} committed round {commit.round} while round {self.number} is open"
            )
        if commit.round < self.number:
            if commit.round < self._failed_since:
                return Applied()
            return Lost(self._failures.get(commit.round, KVStoreError(f"round {commit.round} failed")))
        mine = self._open.setdefault(rank, Contribution())
        if mine.commit is not None:
            mine.waiter = waiter
            return Accepted(repeated=True)
        missing = [s for s, g in commit.manifest if mine.slices.get(s, (None,))[0] != g]
        if missing:
            return Refused(tuple(missing))
        if len(mine.slices) > len(commit.manifest):
            mine.slices = {s: mine.slices[s] for s, _ in commit.manifest}
        mine.commit, mine.waiter = commit, waiter
        self._committed.add(rank)
        self.waiting_since = min(self.waiting_since, now)
        self._deadline = min(self._deadline, now + commit.timeout)
        self.wants_decision = self.wants_decision or commit.hold != 0.0
        return Accepted(repeated=False)

    def missing_ranks(self) -> list[int]:
        """The ranks that have not committed the open round."""
        return [rank for rank in range(self.num_workers) if rank not in self._committed]

    def is_complete(self) -> bool:
        """Whether every rank has committed the open round."""
        return len(self._committed) == self.num_workers

    def is_waiting(self) -> bool:
        """Whether at least one rank has committed the open round."""
        return bool(self._committed)

    def has_committed(self, rank: int) -> bool:
        return rank in self._committed

    def earliest_deadline(self) -> float:
        """When the first rank that waits loses its patience; infinity when none waits."""
        return self._deadline

    def contributions(self) -> list[tuple[int, Contribution[WaiterT]]]:
        """The contributions to the open round in rank order, the order in which they are summed."""
        return sorted(self._open.items())

    def finish(self) -> list[tuple[int, Contribution[WaiterT]]]:
        """End the open round as applied and return its contributions in rank order."""
        ended = self.contributions()
        self._failures.clear()
        self._failed_since = math.inf
        self._begin_next()
        return ended

    def fail(self, error: KVStoreError) -> list[WaiterT]:
        """End the open round as failed; return whom to tell now. The others are told when they come."""
        waiters = [mine.waiter for mine in self._open.values() if mine.waiter is not None]
        self._note_failure(self.number, error)
        self._begin_next()
        return waiters

    def undo(self, error: KVStoreError) -> None:
        """Turn the last applied round into a failed one; the weights have been restored."""
        self._note_failure(self.number - 1, error)

    def was_applied(self, number: int) -> bool:
        """Whether a past round was applied and stands."""
        return number < min(self.number, self._failed_since)

    def replace_process(self, rank: int) -> None:
        """A newer process took the rank over: drop what the older one had not committed."""
        mine = self._open.get(rank)
        if mine is None:
            return
        if mine.commit is None:
            del self._open[rank]
        else:
            mine.waiter = None

    def _note_failure(self, number: int, error: KVStoreError) -> None:
        self._failed_since = min(self._failed_since, number)
        self._failures[number] = error
        if len(self._failures) > _FAILURES_KEPT:
            del self._failures[min(self._failures)]

    def _begin_next(self) -> None:
        self._open = {}
        self._committed = set()
        self._deadline = self.waiting_since = math.inf
        self.wants_decision = False
        self.number += 1
