"""Joins, leaves and losses of workers in a job whose number of workers may change; `views` has the rules.

The messages about it are `Members`: after each applied round the coordinator tells the members of the next one, before
the new weights. A worker whose commit names another view is told the present one, and commits again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from functools import partial

from kvstore_server.engine import pipelined
from kvstore_server.engine.namespace import EngineConfig, Namespace
from kvstore_server.engine.rounds import DelayedRequest, Waiter
from kvstore_server.engine.table import ALL
from kvstore_server.engine.views import MemberView, Views
from kvstore_server.errors import (
    ConfigurationError,
    FencedError,
    KVStoreError,
    ProtocolError,
    RepeatedRoundError,
    WorkerLostError,
    to_wire,
)
from kvstore_server.protocol import messages as m

_log = logging.getLogger(__name__)


class MemberChanges:
    """Makes new views on the coordinator, and lets rounds follow them on every server.

    Args:
        fence: Ends a session, by token, for a reason.
    """

    def __init__(self, config: EngineConfig, fence: Callable[[int, str], None]) -> None:
        self._config = config
        self._fence = fence

    def join(
        self, space: Namespace, rank: int, waiter: Waiter, body: m.JoinRounds, now: float
    ) -> DelayedRequest | list[m.Outgoing]:
        """Let a rank become a member after the open round; return the answer for one that is, or who waits for it.

        Raises FencedError if all members have finished, and as `_views_of`.
        """
        views = _views_of(space, body.table, rank)
        answer = partial(_welcome, space, rank, waiter)
        if rank in views.current.ranks:
            return answer()
        if space.membership.finished.issuperset(views.current.ranks):
            raise finished_error(space, rank)
        views.joining.add(rank)
        return DelayedRequest(
            body.table,
            rank,
            waiter,
            now + body.timeout,
            body.timeout,
            is_join=False,
            answer=answer,
            is_entry=True,
        )

    def leave(self, space: Namespace, rank: int, table: int) -> list[m.Outgoing]:
        """Let the others go on without a rank, which has not committed the open round.

        A server that is not the coordinator notes that the rank will not commit that round any more.

        Raises ConfigurationError if too few would be left, and as `_views_of`.
        """
        if space.views is not None and not space.is_coordinator:
            space.table(table)
            if rank in space.views.current.ranks and not space.rounds.shared.has_committed(rank, table):
                space.views.leaving.add(rank)
            return []
        views = _views_of(space, table, rank)
        if rank not in views.current.ranks:
            return []
        if not views.may_leave():
            raise ConfigurationError(
                f"rank {rank} cannot leave: at least {views.min_workers} workers must be left, and there are "
                f"{len(views.current.ranks)}; end the job instead"
            )
        if space.rounds.shared.has_committed(rank, table):
            raise ProtocolError(
                f"rank {rank} leaves within {space.open_round(table)}, which it has committed"
            )
        views.leaving.add(rank)
        return self.remove_leaving(space)

    def end_process(self, space: Namespace, rank: int) -> list[m.Outgoing]:
        """After the process of a rank has left for good: let the others go on without it, if it was a member."""
        if space.views is None or rank in space.membership.members:
            return []
        if rank in space.views.current.ranks:
            space.views.leaving.add(rank)
        return self.remove_leaving(space)

    def drop_lost(self, space: Namespace, now: float) -> list[m.Outgoing]:
        """Let the others go on without members whose processes are lost, and whose successors have not come."""
        if space.views is None or not space.is_coordinator:
            return []
        members, views = space.membership, space.views
        lost = set(members.lost(now, self._config.dead_after)).intersection(views.current.ranks)
        for rank in sorted(lost - views.leaving):
            if views.may_leave():
                _log.warning(
                    "namespace %r goes on without rank %d: %s", space.name, rank, members.describe(rank, now)
                )
                views.leaving.add(rank)
                views.lost.add(rank)
        return self.remove_leaving(space)

    def remove_leaving(self, space: Namespace) -> list[m.Outgoing]:
        """On the coordinator: go on without the ranks that leave, in the open round if they have not committed it."""
        if space.views is None or not space.views.leaving or not space.is_coordinator:
            return []
        [table], shared = space.tables, space.rounds.shared
        committed = [rank for rank in shared.members if shared.has_committed(rank, table.number)]
        gone = space.views.remove(committed)
        if not gone:
            return []
        self._fence_lost(space, gone)
        _follow_view(space, gone)
        return [out for _, waiter in _forget_commits(space) for out in tell_members(space, waiter)]

    def end_round(self, space: Namespace, waiters: Iterable[Waiter]) -> list[m.Outgoing]:
        """After a round was applied: the coordinator decides about the members of the next one, and tells them."""
        assert space.views is not None
        [table], before = space.tables, (space.views.current, space.views.ended)
        gone = space.views.end_round(space.rounds.shared.number(table.number), space.is_coordinator)
        if (space.views.current, space.views.ended) != before:
            self._fence_lost(space, gone)
            _follow_view(space, gone)
        if not space.is_coordinator:
            return []
        return [out for waiter in waiters for out in tell_members(space, waiter)]

    def _fence_lost(self, space: Namespace, gone: Iterable[int]) -> None:
        """Fence the processes of ranks that are gone because they were lost; one that comes back has to join."""
        assert space.views is not None
        for rank in space.views.lost.intersection(gone):
            space.views.lost.discard(rank)
            reason = f"the others went on without rank {rank}, because its process did not answer"
            member = space.membership.members.get(rank)
            if member is None:
                continue  # it has left in the meantime
            if not member.has_left:
                self._fence(member.token, f"{reason}; start the worker again, so that it joins")
            space.membership.give_up(rank, reason)
            space.end_process(rank, is_done=False)


def check_terms(space: Namespace, hello: m.Hello) -> None:
    """Raise ConfigurationError if a process expects other limits of the number of members than the ones before it."""
    known = (0, 0) if space.views is None else space.views.terms[1:]
    if (hello.initial_workers, hello.min_workers) != known:
        raise ConfigurationError(
            f"rank {hello.rank} ({hello.address}) expects a job that begins with {hello.initial_workers} workers and "
            f"needs {hello.min_workers}, the ranks before it {known[0]} and {known[1]} (0: the number never changes); "
            "start all workers of a job with the same KVSTORE_NUM_WORKERS and KVSTORE_ELASTIC"
        )


def finished_error(space: Namespace, rank: int) -> FencedError:
    return FencedError(
        f"all workers of namespace {space.name!r} have finished, so rank {rank} has nothing left to do"
    )


def _views_of(space: Namespace, table: int, rank: int) -> Views:
    """Return the views of a namespace for a request to its coordinator.

    Raises ConfigurationError if its members do not change, and ProtocolError if another server is the coordinator.
    """
    if space.views is None:
        raise ConfigurationError(
            f"the members of namespace {space.name!r} do not change; start all workers with KVSTORE_ELASTIC"
        )
    space.table(table)
    if not space.is_coordinator:
        raise ProtocolError(
            f"rank {rank} asks server {space.config.server} about members, about which server "
            f"{space.tables[0].plan.servers[0]} decides"
        )
    return space.views


def check_view(space: Namespace, rank: int, waiter: Waiter, body: m.Contribute) -> list[m.Outgoing] | None:
    """Compare the view of a commit with the present one; adopt a later one that the coordinator has made.

    Returns the answer if the commit does not count; None if it does, as far as its view is concerned.

    Raises ProtocolError if there cannot be such a view.
    """
    views, shared, view = space.views, space.rounds.shared, MemberView(body.view, body.members)
    assert views is not None
    number, round_ = body.commits[0, :2].tolist()
    opened = shared.number(number)
    # 1. The round is over. Under an earlier view it cannot be the same round for all members.
    if round_ < opened:
        is_last = round_ == opened - 1 and shared.was_applied(number, round_)
        if not (is_last and views.is_conflict(view.number)):
            return None
        failed = m.Failed(*to_wire(_undo_partial_round(space, number)), number, round_, round_ + 1)
        return [m.Outgoing(waiter.peer, m.Reply(waiter.number, failed))]
    # 2. It is open, or will be: its members are those of the present view.
    if view.number < views.current.number or (space.is_coordinator and view.number > views.current.number):
        return tell_members(space, waiter)
    views.check(rank, view)
    if view.number > views.current.number and round_ == opened:
        _follow_view(space, views.adopt(view))
        _forget_commits(space)
    return None


def _undo_partial_round(space: Namespace, number: int) -> KVStoreError:
    """Take the last round back, which the coordinator ends under a later view; return the error of its members.

    No worker has finished it: the coordinator had not applied it when it made that view, and who has committed under it
    waits for the answers to that.
    """
    table, shared = space.tables[number], space.rounds.shared
    what = (
        f"round {shared.number(number) - 1} of {table.name!r} was applied on server {space.config.server} with a "
        "contribution that other servers never got, because its worker was lost in between"
    )
    error = RepeatedRoundError(f"{what}; it is undone")
    if space.undo_last_round(shared, table, ALL, error):
        return error
    return WorkerLostError(
        f"{what}; the servers are one round apart. Restart the job from its last saved states"
    )


def _follow_view(space: Namespace, gone: Iterable[int]) -> None:
    """Let rounds have the members of the present view, and forget what the ranks have left that are gone."""
    assert space.views is not None
    view, shared = space.views.current, space.rounds.shared
    _log.info("namespace %r: view %d has ranks %s", space.name, view.number, list(view.ranks))
    shared.members = view.ranks
    space.count_members()
    for rank in gone:
        space.forget_member(rank)
    space.note_members()


def _forget_commits(space: Namespace) -> list[tuple[int, Waiter]]:
    [table] = space.tables
    pipelined.roll_back(space, table)
    table.held = None  # the round before may still have to be undone
    space.forget_absent([table.number])
    assert space.views is not None
    return space.rounds.shared.change_members(table.number, space.views.current.ranks)


def tell_members(space: Namespace, waiter: Waiter) -> list[m.Outgoing]:
    """Tell who takes part in the open round."""
    assert space.views is not None
    [table], (number, ranks) = space.tables, space.views.current
    members = m.Members(table.number, space.rounds.shared.number(table.number), number, ranks)
    return [m.Outgoing(waiter.peer, m.Reply(waiter.number, members))]


def _welcome(space: Namespace, rank: int, waiter: Waiter) -> list[m.Outgoing]:
    """Tell a member since when it is one, and what it needs to begin where the others were then."""
    assert space.views is not None
    [table], (number, ranks) = space.tables, space.views.current
    since = space.views.since.get(rank, 0)
    states: list[bytes] = []
    for other in ranks:
        of_other = [state for at, state in space.client_states.get((table.number, other), ()) if at < since]
        if of_other and other != rank:
            states = of_other
            break
    opened = space.rounds.shared.number(table.number)
    members = m.Members(table.number, opened, number, ranks, since, tuple(states))
    return [m.Outgoing(waiter.peer, m.Reply(waiter.number, members))]
