"""Which ranks take part in the rounds of a namespace whose members may change. No clock, socket or round.

A *view* is a numbered list of ranks (as in group communication): the members of a round and of all later ones, until
the next view. The first server of the table is its *coordinator*: only there ranks ask to join or to leave, and only
there a new view is made. Workers carry it to the other servers with their commits.

- A rank joins at the end of an applied round: it is a member from the next one on.
- A rank that leaves, or is lost for good, is no member of the open round any more, unless it has committed that round
  already; then it counts once more. The others, if they have committed, are told to commit again with the new view:
  what was committed under the former one is forgotten, so no rank of which this is all that is left stays in it.
- A round is complete when all members of one view have committed it under the number of that view.

View numbers only grow. A server that meets a higher number adopts that view and forgets commits under lower ones; it
refuses commits under lower numbers than its own. Therefore two servers can apply a round with different members only
if a rank is lost between its commits to them; the commits under the new view then find the round over, and it fails
everywhere (`is_conflict`).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

from kvstore_server.errors import ConfigurationError, ProtocolError


class MemberView(NamedTuple):
    number: int
    ranks: tuple[int, ...]
    """Ascending."""


class Views:
    """The present view of one namespace on one server, and what the coordinator will change.

    Args:
        capacity: Ranks are below this.
        initial_workers: Ranks 0 … initial_workers − 1 make up the first view.
        min_workers: No view has fewer ranks.

    Attributes:
        current: The view of the open round.
        ended: The number of the view under which the last round has ended.
        since: Rank → the first round of its present membership, for ranks that are not of the first view.
        joining: Ranks that wait to become members.
        leaving: Members that will not commit any further round; not on the coordinator, only the open one.
        lost: Those of them, or of former members, whose processes have to be fenced.
    """

    def __init__(self, capacity: int, initial_workers: int, min_workers: int) -> None:
        if not 1 <= min_workers <= initial_workers <= capacity:
            raise ConfigurationError(
                f"a job that begins with {initial_workers} workers and goes on with {min_workers} to {capacity} is not "
                "possible; the first number must lie between the other two, and at least one worker must be left"
            )
        self.capacity, self.initial_workers, self.min_workers = capacity, initial_workers, min_workers
        self.current = MemberView(0, tuple(range(initial_workers)))
        self.ended = 0
        self.since: dict[int, int] = {}
        self.joining: set[int] = set()
        self.leaving: set[int] = set()
        self.lost: set[int] = set()

    def __repr__(self) -> str:
        changes = [f"{what} {sorted(ranks)}" for what, ranks in (("joining", self.joining), ("leaving", self.leaving))
                   if ranks]  # fmt: skip
        return f"<{type(self).__name__}: {', '.join([str(self.current), *changes])}>"

    @property
    def terms(self) -> tuple[int, int, int]:
        """What all processes of a job must agree on."""
        return self.capacity, self.initial_workers, self.min_workers

    def may_leave(self) -> bool:
        """Return whether enough ranks would be left if one more left."""
        return len(self.current.ranks) - len(self.leaving) > self.min_workers

    def remove(self, committed: Collection[int]) -> list[int]:
        """Make a view without the ranks that leave, unless all of these have committed the open round; return who is
        gone. As many ranks stay as must be left.

        With a new view commits are forgotten, and a rank that is gone cannot commit again.
        """
        if self.leaving.issubset(committed):
            return []
        leaving = [rank for rank in self.current.ranks if rank in self.leaving]
        gone = leaving[: len(self.current.ranks) - self.min_workers]
        if gone:
            self._replace(set(self.current.ranks).difference(gone))
        return gone

    def keep_returned(self, rank: int) -> None:
        """Keep a lost rank as a member, because its next process has connected in time."""
        if rank in self.lost:
            self.lost.discard(rank)
            self.leaving.discard(rank)

    def end_round(self, following: int, is_coordinator: bool) -> list[int]:
        """Record that a round was applied; the coordinator makes the view of the `following` one. Return who is gone.

        Ranks that join at the same time as others leave make room for these.
        """
        self.ended = self.current.number
        if not is_coordinator or not (self.joining or self.leaving):
            return []
        joined = self.joining.difference(self.current.ranks)
        self.joining.clear()
        for rank in joined:
            self.since[rank] = following
        ranks = set(self.current.ranks) | joined
        gone = sorted(self.leaving & ranks)[: len(ranks) - self.min_workers]
        if joined or gone:
            self._replace(ranks.difference(gone))
        return gone

    def adopt(self, view: MemberView) -> list[int]:
        """Use a view that the coordinator has made; return the ranks that are gone."""
        gone = sorted(set(self.current.ranks).difference(view.ranks))
        self.current = view
        self.leaving.clear()
        return gone

    def check(self, rank: int, view: MemberView) -> None:
        """Raise ProtocolError unless a rank may commit with a view."""
        ranks = view.ranks
        is_listed = (
            ranks == tuple(sorted(set(ranks))) and ranks and ranks[0] >= 0 and ranks[-1] < self.capacity
        )
        if view.number < 0 or not is_listed or rank not in ranks:
            raise ProtocolError(
                f"rank {rank} commits with view {view.number} of ranks {ranks!r:.80}; it must name distinct ranks "
                f"below {self.capacity} in ascending order, and itself"
            )
        if view.number == self.current.number and view != self.current:
            raise ProtocolError(
                f"rank {rank} has ranks {ranks!r:.80} for view {view.number}, another one has "
                f"{self.current.ranks!r:.80}"
            )

    def is_conflict(self, number: int) -> bool:
        """Return whether a commit under this view finds the last round ended under an earlier one."""
        return number > self.ended

    def facts(self) -> dict[str, Any]:
        """Return what people may want to know."""
        return {
            "number": self.current.number,
            "members": list(self.current.ranks),
            "joining": sorted(self.joining),
            "least": self.min_workers,
            "most": self.capacity,
        }

    def export(self) -> list[Any]:
        return [*self.current, self.ended, self.since]

    def restore(self, values: Sequence[Any]) -> None:
        number, ranks, self.ended, since = values
        self.current, self.since = MemberView(number, tuple(ranks)), dict(since)

    def _replace(self, ranks: Collection[int]) -> None:
        self.current = MemberView(self.current.number + 1, tuple(sorted(ranks)))
        self.leaving.intersection_update(ranks)
