"""Which ranks take part in the rounds of a namespace whose members may change. No clock, socket or round.

A *view* is a numbered list of ranks (as in group communication): the members of a round and of all later ones, until
the next view. The first server of the table is its *coordinator*: only there ranks ask to join or to leave, and only
there a new view is made. Workers carry it to the other servers with their commits.

- A rank joins at the end of an applied round: it is a member from the next one on.
- A rank that leaves, or is lost for good, is no member of the open round any more, unless it has committed that round
  already; then it counts once more. The others, if they have committed, are told to commit again with the new view:
  what was committed under the former one is forgotten, so no rank of which this is all that is left stays in it.
- A round is complete when all members of one view have committed it under the number of that view.

Some workers may be *backup workers* (Chen, Monga, Bengio, Jozefowicz: Revisiting Distributed Synchronous SGD, 2016): a
view then says how many ranks each of its rounds leaves out, the slowest ones. As soon as all others have committed a
round there, the coordinator *closes* it: it makes a view of this round alone, of those that have committed it, and
applies it. Their commits count as they are, on other servers, too, once a worker has told these the view. After the
round all ranks are members again.

After the job has gone back to a snapshot there are no members at first (`go_back`), and all ranks join. Those that have
come begin together with the open round, as soon as all that were members then are among them, or none waits for the
others any more.

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
    num_backup: int = 0
    """How many of them each round leaves out."""
    closes: int = -1
    """The only round of which these ranks are the members; -1: the members of all rounds up to the next view."""

    @property
    def counted(self) -> int:
        """The contributions of how many ranks a round takes."""
        return len(self.ranks) - self.num_backup


class Views:
    """The present view of one namespace on one server, and what the coordinator will change.

    Args:
        capacity: Ranks are below this.
        initial_workers: Ranks 0 … initial_workers − 1 make up the first view.
        min_workers: No view has fewer ranks.
        backup_workers: How many ranks a round leaves out, as long as `min_workers` are left.

    Attributes:
        current: The view of the open round.
        ended: The view under which the last round has ended; without ranks if there was none.
        since: Rank → the first round of its present membership, for ranks that are not of the first view.
        late: Members that the open round leaves out. They are members of the next one.
        left_out: Rank → how many rounds have ended without it.
        joining: Ranks that wait to become members.
        former: After the job has gone back: who was a member of the open round then, until there is a view again.
        leaving: Members that will not commit any further round; not on the coordinator, only the open one.
        lost: Those of them, or of former members, whose processes have to be fenced.
    """

    def __init__(
        self, capacity: int, initial_workers: int, min_workers: int, backup_workers: int = 0
    ) -> None:
        if not 1 <= min_workers <= initial_workers <= capacity:
            raise ConfigurationError(
                f"a job that begins with {initial_workers} workers and goes on with {min_workers} to {capacity} is not "
                "possible; the first number must lie between the other two, and at least one worker must be left"
            )
        check_backup_workers(backup_workers, initial_workers)
        self.capacity, self.initial_workers, self.min_workers = capacity, initial_workers, min_workers
        self.backup_workers = backup_workers
        # The first round gives the first values, which only one rank has: it takes all.
        self.current = MemberView(0, tuple(range(initial_workers)))
        self.ended = MemberView(0, ())
        self.since: dict[int, int] = {}
        self.late: set[int] = set()
        self.left_out: dict[int, int] = {}
        self.joining: set[int] = set()
        self.former: set[int] = set()
        self.leaving: set[int] = set()
        self.lost: set[int] = set()

    def __repr__(self) -> str:
        changes = [f"{what} {sorted(ranks)}" for what, ranks in (("joining", self.joining), ("leaving", self.leaving))
                   if ranks]  # fmt: skip
        return f"<{type(self).__name__}: {', '.join([str(self.current), *changes])}>"

    @property
    def terms(self) -> tuple[int, int, int, int]:
        """What all processes of a job must agree on."""
        return self.capacity, self.initial_workers, self.min_workers, self.backup_workers

    @property
    def members(self) -> set[int]:
        """The ranks of the open round, and those that it leaves out."""
        return self.late.union(self.current.ranks)

    def go_back(self, former: Collection[int]) -> None:
        """Begin without members, after the job has gone back to a round with these ones."""
        self.former = {rank for rank in former if rank < self.capacity}
        self.current, self.ended = MemberView(0, ()), MemberView(0, tuple(sorted(former)))

    def absent(self) -> list[int]:
        """After the job has gone back: the ranks without which it does not begin yet; empty if it can."""
        absent = self.former - self.joining
        if len(self.joining) < self.min_workers:
            absent = absent or set(range(self.capacity)) - self.joining
        return sorted(absent)

    def begin(self, round_: int) -> list[int]:
        """On the coordinator, after the job has gone back: let the ranks that have come be the members of a round.

        Returns the former members that are not among them.
        """
        gone = sorted(self.former - self.joining)
        self.since = dict.fromkeys(self.joining, round_)
        self._replace(self.joining)
        self.joining.clear()
        self.former.clear()
        return gone

    def may_leave(self) -> bool:
        """Return whether enough ranks would be left if one more left."""
        return len(self.members) - len(self.leaving) > self.min_workers

    def remove(self, committed: Collection[int]) -> list[int]:
        """Make a view without the ranks that leave, unless all of these have committed the open round; return who is
        gone. As many ranks stay as must be left. In a round that is closed nothing changes any more.

        With a new view commits are forgotten, and a rank that is gone cannot commit again.
        """
        if self.leaving.issubset(committed) or self.current.closes >= 0:
            return []
        leaving = [rank for rank in self.current.ranks if rank in self.leaving]
        gone = leaving[: len(self.current.ranks) - self.min_workers]
        if gone:
            self._replace(set(self.current.ranks).difference(gone))
        return gone

    def close(self, round_: int, committed: Collection[int]) -> None:
        """On the coordinator: let a round have those members that have committed it, and no others."""
        self.count_late(committed)
        self.late = set(self.current.ranks).difference(committed)
        self.current = MemberView(self.current.number + 1, tuple(sorted(committed)), 0, round_)

    def count_late(self, counted: Collection[int]) -> None:
        """Count those ranks as left out of the open round whose contributions it does not take."""
        for rank in set(self.current.ranks).difference(counted):
            self.left_out[rank] = self.left_out.get(rank, 0) + 1

    def reopen(self) -> bool:
        """After a closed round has failed: let all ranks be members of the next one; return whether it was closed."""
        is_closed = self.current.closes >= 0
        if is_closed:
            self._replace(self.members)
        return is_closed

    def follows(self, view: MemberView) -> bool:
        """Return whether a view closes a round of the present one, so that commits under this one count there, too."""
        return view.closes >= 0 and view.number == self.current.number + 1 and self.current.closes < 0

    def takes(self, rank: int, number: int, round_: int) -> bool:
        """Return whether a commit of a rank under the view of this number counts in the open round."""
        if self.current.closes < 0:
            return number == self.current.number
        numbers = self.current.number - 1, self.current.number
        return self.current.closes == round_ and rank in self.current.ranks and number in numbers

    def has_counted(self, rank: int, number: int) -> bool:
        """Return whether a commit under the view of this number counts in the last round that has ended."""
        numbers = self.ended.number - (self.ended.closes >= 0), self.ended.number
        return rank in self.ended.ranks and number in numbers

    def is_complete(self, round_: int, num_committed: int) -> bool:
        """Return whether a round is complete that this many ranks have committed."""
        view = self.current
        has_all = bool(view.ranks) and num_committed == len(view.ranks)
        return has_all and not view.num_backup and view.closes in (-1, round_)

    def keep_returned(self, rank: int) -> None:
        """Keep a lost rank as a member, because its next process has connected in time."""
        if rank in self.lost:
            self.lost.discard(rank)
            self.leaving.discard(rank)

    def end_round(self, following: int, is_coordinator: bool) -> list[int]:
        """Record that a round was applied; the coordinator makes the view of the `following` one. Return who is gone.

        Ranks that join at the same time as others leave make room for these.
        """
        self.ended = self.current
        if not is_coordinator:
            return []
        members = self.members
        joined = self.joining.difference(members)
        self.joining.clear()
        for rank in joined:
            self.since[rank] = following
        ranks = members | joined
        gone = sorted(self.leaving & ranks)[: len(ranks) - self.min_workers]
        left = ranks.difference(gone)
        if left != set(self.current.ranks) or self.current.num_backup != self._num_backup(len(left)):
            self._replace(left)
        return gone

    def adopt(self, view: MemberView) -> list[int]:
        """Use a view that the coordinator has made; return the ranks that are gone."""
        if self.follows(view):
            self.count_late(view.ranks)
            self.current = view
            return []
        before = self.former.union(self.current.ranks)
        gone = sorted(before.difference(view.ranks)) if view.closes < 0 else []
        self.current = view
        self.former.clear()
        self.leaving.clear()
        return gone

    def check(self, rank: int, view: MemberView) -> None:
        """Raise ProtocolError unless a rank may commit with a view."""
        ranks = view.ranks
        is_listed = (
            ranks == tuple(sorted(set(ranks))) and ranks and ranks[0] >= 0 and ranks[-1] < self.capacity
        )
        is_possible = 0 <= view.num_backup < max(len(ranks), 1) and not (view.num_backup and view.closes >= 0)
        if view.number < 0 or not is_listed or rank not in ranks or not is_possible:
            raise ProtocolError(
                f"rank {rank} commits with view {view.number} of ranks {ranks!r:.80}, of which a round leaves out "
                f"{view.num_backup}; it must name distinct ranks below {self.capacity} in ascending order, and itself"
            )
        if view.number == self.current.number and view != self.current:
            raise ProtocolError(
                f"rank {rank} has ranks {ranks!r:.80} for view {view.number}, another one has "
                f"{self.current.ranks!r:.80}"
            )

    def is_conflict(self, number: int) -> bool:
        """Return whether a commit under this view finds the last round ended under an earlier one."""
        return number > self.ended.number

    def facts(self) -> dict[str, Any]:
        """Return what people may want to know."""
        return {
            "number": self.current.number,
            "members": list(self.current.ranks),
            "joining": sorted(self.joining),
            "backup": self.current.num_backup,
            "least": self.min_workers,
            "most": self.capacity,
        }

    def export(self) -> list[Any]:
        views = list(self.current), list(self.ended)
        return [*views, self.since, sorted(self.late), self.left_out, sorted(self.former)]

    def restore(self, values: Sequence[Any]) -> None:
        current, ended, since, late, left_out, former = values
        self.current, self.ended = _restore_view(current), _restore_view(ended)
        self.since, self.late, self.left_out = dict(since), set(late), dict(left_out)
        self.former = set(former)

    def _num_backup(self, num_ranks: int) -> int:
        """Return how many of a number of ranks the rounds after the first one leave out."""
        return max(min(self.backup_workers, num_ranks - self.min_workers), 0) if self.ended.ranks else 0

    def _replace(self, ranks: Collection[int]) -> None:
        number, num_backup = self.current.number + 1, self._num_backup(len(ranks))
        self.current = MemberView(number, tuple(sorted(ranks)), num_backup)
        self.late.clear()
        self.leaving.intersection_update(ranks)


def check_backup_workers(number: int, num_workers: int) -> None:
    """Raise ConfigurationError unless a job can do without so many of its workers."""
    if not 0 <= number < num_workers:
        raise ConfigurationError(
            f"{number} backup workers are not possible in a job that begins with {num_workers} workers: a round takes "
            "the gradients of all others, so it must be 0 or more, and fewer than all workers"
        )


def _restore_view(values: Sequence[Any]) -> MemberView:
    number, ranks, num_backup, closes = values
    return MemberView(number, tuple(ranks), num_backup, closes)
