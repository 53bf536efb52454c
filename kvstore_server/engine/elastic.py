"""Joins, leaves and losses of workers in a job whose number of workers may change; `views` has the rules.

The messages about it are `Members`: after each applied round the coordinator tells the members of the next one, before
the new weights. A worker whose commit names another view is told the present one, and commits again.

With backup workers the coordinator closes a round with the first that have committed it, and tells them so with
`Members`, too; they pass it on to the other servers (`CloseRound`). A rank that comes too late is told `LeftOut`, with
the present weights, as soon as the round is over.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from functools import partial

import numpy as np

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

        After the job has gone back to a snapshot it becomes one of the open round, see `begin`.

        Raises FencedError if all members have finished, and as `_views_of`.
        """
        views = _views_of(space, body.table, rank)
        answer = partial(_welcome, space, rank, waiter)
        if rank in views.current.ranks:
            return answer()
        if space.have_members_finished():
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

    def begin(self, space: Namespace, now: float) -> bool:
        """After the job has gone back to a snapshot: let the ranks that have come begin with the open round.

        From the first one that comes, those that were members then are awaited for as long as the process of a rank
        that is silent. Returns whether they begin now.
        """
        views = space.views
        if views is None or views.current.ranks or not space.tables or not space.is_coordinator:
            return False
        patience = self._config.rejoin_timeout + self._config.dead_after
        first = min([wait.since for wait in space.waits.all.values() if wait.is_entry], default=now)
        is_awaited = bool(views.absent()) and now - first <= patience
        if is_awaited or len(views.joining) < views.min_workers:
            return False
        [table] = space.tables
        absent = views.begin(space.rounds.shared.number(table.number))
        ranks = views.current.ranks
        if absent:
            _log.warning(
                "namespace %r goes on with ranks %s: ranks %s have not come within %g s",
                space.name, list(ranks), absent, patience,
            )  # fmt: skip
        # If all ranks are new, they begin with what the absent ones have left.
        have_states = any(rank in ranks for _, rank in space.client_states)
        _follow_view(space, absent if have_states else ())
        return True

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
        if rank not in views.members:
            return []
        if not views.may_leave():
            raise ConfigurationError(
                f"rank {rank} cannot leave: at least {views.min_workers} workers must be left, and there are "
                f"{len(views.members)}; end the job instead"
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
        if rank in space.views.members:
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

    def close_round(self, space: Namespace, now: float) -> list[m.Outgoing]:
        """On the coordinator: once enough members have committed the open round, go on without the others."""
        views, shared = space.views, space.rounds.shared
        if views is None or not views.current.num_backup or not space.is_coordinator:
            return []
        [table] = space.tables
        if int(shared.num_committed[table.number]) < views.current.counted:
            return []
        committed = [rank for rank in shared.members if shared.has_committed(rank, table.number)]
        views.close(shared.number(table.number), committed)
        _keep_counted(space, now)
        waiters = [shared.inputs[rank].waiters[table.number] for rank in committed]
        return [out for one in waiters if one is not None for out in tell_closed(space, one, views.current)]

    def reopen(self, space: Namespace) -> None:
        """After a round has failed on the coordinator that it had closed: all are members of the next one."""
        if space.views is not None and space.is_coordinator and space.views.reopen():
            _follow_view(space, ())

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


def check_worker_counts(space: Namespace, hello: m.Hello) -> None:
    """Raise ConfigurationError if a process expects other limits of the number of members than the ones before it."""
    known = (0, 0, 0) if space.views is None else space.views.terms[1:]
    if (hello.initial_workers, hello.min_workers, hello.backup_workers) != known:
        raise ConfigurationError(
            f"rank {hello.rank} ({hello.address}) expects a job that begins with {hello.initial_workers} workers, "
            f"needs {hello.min_workers} and has {hello.backup_workers} backup workers, the ranks before it {known[0]}, "
            f"{known[1]} and {known[2]} (0: the number never changes, or there are none); start all workers of a job "
            "with the same KVSTORE_NUM_WORKERS, KVSTORE_ELASTIC and KVSTORE_BACKUP_WORKERS"
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


def view_of(body: m.Contribute) -> MemberView:
    """Return the view with which a rank commits."""
    closes = int(body.commits[0, m.COMMIT_ROUND]) if body.closes else -1
    return MemberView(body.view, body.members, body.num_backup, closes)


def check_view(
    space: Namespace, rank: int, waiter: Waiter, body: m.Contribute, now: float
) -> DelayedRequest | list[m.Outgoing] | None:
    """Compare the view of a commit with the present one; adopt a later one that the coordinator has made.

    Returns the answer if the commit does not count, or what delays it; None if it counts, as far as its view is
    concerned.

    Raises ProtocolError if there cannot be such a view.
    """
    views, shared, view = space.views, space.rounds.shared, view_of(body)
    assert views is not None
    number, round_ = body.commits[0, :2].tolist()
    opened = shared.number(number)
    # 0. With backup workers a rank may come too late.
    if views.backup_workers and _comes_too_late(space, rank, number, round_, view):
        return follow(space, rank, waiter, body, now)
    # 1. The round is over. Under an earlier view it cannot be the same round for all members.
    if round_ < opened:
        is_last = round_ == opened - 1 and shared.was_applied(number, round_)
        if not (is_last and views.is_conflict(view.number)):
            return None
        failed = m.Failed(*to_wire(_undo_partial_round(space, number)), number, round_, round_ + 1)
        return [m.Outgoing(waiter.peer, m.Reply(waiter.number, failed))]
    # 2. It is open, or will be: its members are those of the present view, or the round was closed with this rank.
    if views.takes(rank, view.number, opened) and view.number < views.current.number:
        return None
    if view.number < views.current.number or (space.is_coordinator and view.number > views.current.number):
        # What closes a round is not the members of the next one; of these the coordinator tells.
        return tell_members(space, waiter) if views.current.closes < 0 else []
    views.check(rank, view)
    if view.number > views.current.number and round_ == opened:
        adopt(space, view, now)
    return None


def adopt(space: Namespace, view: MemberView, now: float) -> None:
    """Let the open round have the members of a view that the coordinator has made.

    If it closes the round, the commits of those that it names stay; otherwise all have to be repeated.
    """
    views = space.views
    assert views is not None
    if views.follows(view):
        views.adopt(view)
        _keep_counted(space, now)
        return
    _follow_view(space, views.adopt(view))
    _forget_commits(space)


def _keep_counted(space: Namespace, now: float) -> None:
    """Go on with those that the closed round takes; others are answered when it is over."""
    [table], shared, views = space.tables, space.rounds.shared, space.views
    assert views is not None
    round_ = shared.number(table.number)
    for rank, waiter, info, (version, flags) in shared.close(table.number, views.current.ranks):
        space.waits.add(_delay(space, rank, waiter, (round_, version, flags), info.timeout, now))
    space.count_members()
    space.note_members()


def _comes_too_late(space: Namespace, rank: int, number: int, round_: int, view: MemberView) -> bool:
    """Return whether a commit can only be told how the rounds up to its own have ended."""
    views, shared = space.views, space.rounds.shared
    assert views is not None
    opened = shared.number(number)
    if round_ >= opened:
        return round_ == opened and is_left_out(space, rank, opened)
    if not shared.was_applied(number, round_):
        return view.num_backup > 0  # others may have been changing the weights while this rank computed
    has_counted = round_ == opened - 1 and views.has_counted(rank, view.number)
    return not has_counted and not (round_ == opened - 1 and views.is_conflict(view.number))


def follow(
    space: Namespace, rank: int, waiter: Waiter, body: m.Contribute, now: float
) -> DelayedRequest | list[m.Outgoing]:
    """Answer a rank that was left out of a round with the weights after it; later, if it is still open.

    Raises ProtocolError if the job has no backup workers.
    """
    if space.views is None or not space.views.backup_workers:
        raise ProtocolError(f"rank {rank} was left out of a round of a job without backup workers")
    number, round_, _, _, version, flags = body.commits[0].tolist()
    if round_ < space.rounds.shared.number(number):
        return _tell_left_out(space, rank, waiter, version, flags)
    return _delay(space, rank, waiter, (round_, version, flags), body.timeout, now)


def _delay(
    space: Namespace, rank: int, waiter: Waiter, commit: tuple[int, int, int], timeout: float, now: float
) -> DelayedRequest:
    [table], (round_, version, flags) = space.tables, commit
    answer = partial(_tell_left_out, space, rank, waiter, version, flags)
    wait = DelayedRequest(table.number, rank, waiter, now + timeout, timeout, False, answer, round_)
    wait.opens = round_ + 1
    return wait


def _tell_left_out(space: Namespace, rank: int, waiter: Waiter, version: int, flags: int) -> list[m.Outgoing]:
    """Tell a rank which round is open, how the last one has ended, and the weights after it."""
    views, shared, [table] = space.views, space.rounds.shared, space.tables
    assert views is not None
    number, view = table.number, views.current
    opened = shared.number(number)
    applied = min(opened, int(shared.first_failed(np.array([number]))[0])) - 1
    end = table.ends.get(ALL)
    states = _latest_states(space, rank, opened) if space.is_coordinator else ()
    is_closed = space.is_coordinator and views.ended.closes == opened - 1
    closed = views.ended if is_closed else MemberView(-1, ())
    left_out = m.LeftOut(
        number, opened, applied, end is not None and end.is_skipped, () if end is None else end.left_out,
        view.ranks, view.number, view.num_backup, closed.number, closed.ranks, states,
    )  # fmt: skip
    replies: list[m.ReplyBody] = [left_out]
    if flags & m.WANTS_WEIGHTS and flags & m.WANTS_DELTA:
        replies.append(space.rows(rank, table, table.changed_parts(version)))
    elif flags & m.WANTS_WEIGHTS:
        batch = space.batch_of(np.array([number], np.int64))
        replies.append(space.weights(batch, rank, half=bool(flags & m.WANTS_HALF)))
    return [m.Outgoing(waiter.peer, m.Reply(waiter.number, body)) for body in replies]


def _latest_states(space: Namespace, rank: int, opened: int) -> tuple[bytes, ...]:
    """Return what the commits of a rank have brought that has made the most rounds; its own, if it has made as many."""
    [table] = space.tables
    best, found = -1, list[tuple[int, bytes]]()
    for other in sorted(range(space.membership.num_workers), key=lambda one: one != rank):
        before = [one for one in space.client_states.get((table.number, other), ()) if one[0] < opened]
        if before and before[-1][0] > best:
            best, found = before[-1][0], before
    return tuple([state for _, state in found])


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


def is_left_out(space: Namespace, rank: int, round_: int) -> bool:
    """Return whether an open round was closed without a rank."""
    return (
        space.views is not None
        and space.views.current.closes == round_
        and rank not in space.views.current.ranks
    )


def tell_closed(space: Namespace, waiter: Waiter, closed: MemberView) -> list[m.Outgoing]:
    """Tell with which ranks a round was closed."""
    [table] = space.tables
    members = m.Members(table.number, closed.closes, closed.number, closed.ranks, closes=True)
    return [m.Outgoing(waiter.peer, m.Reply(waiter.number, members))]


def tell_members(space: Namespace, waiter: Waiter) -> list[m.Outgoing]:
    """Tell who takes part in the open round."""
    assert space.views is not None
    [table], (number, ranks, num_backup, _) = space.tables, space.views.current
    opened = space.rounds.shared.number(table.number)
    members = m.Members(table.number, opened, number, ranks, num_backup=num_backup)
    return [m.Outgoing(waiter.peer, m.Reply(waiter.number, members))]


def _welcome(space: Namespace, rank: int, waiter: Waiter) -> list[m.Outgoing]:
    """Tell a member since when it is one, and what it needs to begin where the others were then."""
    assert space.views is not None
    [table], (number, ranks, num_backup, _) = space.tables, space.views.current
    since = space.views.since.get(rank, 0)
    states: list[bytes] = []
    others = {other for _, other in space.client_states}.difference(ranks)
    for other in (*ranks, *sorted(others)):
        of_other = [state for at, state in space.client_states.get((table.number, other), ()) if at < since]
        if of_other and other != rank:
            states = of_other
            break
    opened = space.rounds.shared.number(table.number)
    members = m.Members(table.number, opened, number, ranks, since, tuple(states), num_backup)
    return [m.Outgoing(waiter.peer, m.Reply(waiter.number, members))]
