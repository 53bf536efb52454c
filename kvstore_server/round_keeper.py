"""Commits and reads on a server: what they still wait for, how they end, and who is told what.

The arithmetic is the table's, the counting is `consistency`'s and `lanes`'; here they meet the members of a namespace.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from kvstore_server.admission import MAX_REASON
from kvstore_server.consistency import Accepted, Applied, Lost, Refused
from kvstore_server.errors import (
    KVStoreError,
    ProtocolError,
    RoundAbortedError,
    ServerStoppingError,
    from_wire,
    to_wire,
)
from kvstore_server.hopeless import open_round, still_waiting, why_read_cannot_end, why_round_cannot_end
from kvstore_server.namespace import Namespace
from kvstore_server.norms import Decision
from kvstore_server.protocol import messages as m
from kvstore_server.protocol.buffers import payload_size
from kvstore_server.replies import failed, held, outcome, outcomes, reply, tell
from kvstore_server.shard import Updater
from kvstore_server.table import Given, Table, Waiter
from kvstore_server.tracing import ROUND_LANE, ROUNDS
from kvstore_server.waits import Wait

_log = logging.getLogger(__name__)


class RoundKeeper:
    """Takes commits, aborts and reads, and ends rounds.

    Args:
        server: Index of this server, for messages.
        dead_after: Seconds of silence after which a worker counts as lost.
    """

    def __init__(self, server: int, dead_after: float) -> None:
        self.updaters: dict[str, Updater] = {}
        """Namespace → a user's function in place of an optimizer; in-process use only."""
        self.is_stopping = False
        """Whether new rounds are refused."""
        self._server = server
        self._dead_after = dead_after

    def commits(
        self, space: Namespace, rank: int, batch: m.CommitBatch, waiter: Waiter, now: float
    ) -> list[m.Outgoing]:
        """Take a rank's commits; each round that they complete, or that has no hope any more, ends."""
        out: list[m.Outgoing] = []
        # Asked once: a batch may hold a thousand commits, and as a rule nobody is lost.
        anyone_lost = bool(space.membership.departed or space.membership.silent(now, self._dead_after))
        for commit in batch.commits:
            try:
                table = space.table(commit.table)
                out += self._commit(space, table, rank, batch, commit, waiter, now)
                is_open = table.rounds.is_waiting() and table.held is None
                if is_open and (anyone_lost or now >= table.rounds.earliest_deadline()):
                    out += self.fail_if_hopeless(space, table, now)
            except KVStoreError as error:
                out.append(failed(waiter.peer, waiter.number, error, commit.table, commit.round))
        return out

    def read(
        self,
        space: Namespace,
        table: Table,
        rank: int,
        waiter: Waiter,
        now: float,
        timeout: float,
        answer: Callable[[], list[m.Outgoing]],
        number: int = -1,
    ) -> list[m.Outgoing]:
        """Answer a request for weights; later, where the rank is too far ahead of others to read now.

        `number` is that of the round, if a commit wants them.
        """
        wait = Wait(table, rank, waiter, now + timeout, timeout, False, answer, number)
        missing = wait.missing()
        if not missing:
            return answer()
        space.waits.add(wait)
        return reply(waiter, still_waiting(space, wait.what, missing, now))

    def release(self, space: Namespace) -> list[m.Outgoing]:
        """Answer the requests that have waited for other ranks long enough."""
        if not space.waits:
            return []
        ready = space.waits.take_ready()
        for table in {wait.table.number: wait.table for wait in ready if wait.is_join}.values():
            table.lanes.part_again()
        return [out for wait in ready for out in wait.answer()]

    def fail_hopeless_waits(self, space: Namespace, now: float) -> list[m.Outgoing]:
        """Fail the requests that have waited for other ranks too long, or wait for one that is lost."""
        if not space.waits:
            return []
        out = []
        for wait in space.waits.take(
            lambda wait: why_read_cannot_end(space, wait, now, self._dead_after) is not None
        ):
            error = why_read_cannot_end(space, wait, now, self._dead_after)
            assert error is not None
            out += self._fail_wait(wait, error)
        return out

    def fail_if_hopeless(self, space: Namespace, table: Table, now: float) -> list[m.Outgoing]:
        """Fail the open round of all ranks if its deadline has passed, or if it needs a rank that is lost."""
        error = why_round_cannot_end(space, table, now, self._dead_after)
        return [] if error is None else self.fail(table, error)

    def fail(self, table: Table, error: KVStoreError) -> list[m.Outgoing]:
        """Fail the open round of all ranks, and tell those who wait for it."""
        number = table.rounds.number
        waiters = table.fail(_ANYONE, error)
        return tell(table, number, number + 1, waiters, error)

    def abort(self, space: Namespace, rank: int, abort: m.Abort, waiter: Waiter) -> list[m.Outgoing]:
        """A rank gives a round up; tells those who wait for it, and the rank whether it stands all the same."""
        table = space.table(abort.table)
        error = RoundAbortedError(
            f"rank {rank} aborted round {abort.round} of {table.name!r}: {abort.reason[:MAX_REASON]}"
        )
        waiters = table.abort(rank, abort.round, error, abort.undo)
        rounds = table.rounds_of(rank, abort.round)
        out = tell(table, abort.round, rounds.number, waiters, error)
        for wait in space.waits.take(
            lambda wait: wait.table is table and wait.rank == rank and wait.round == abort.round
        ):
            out += self._fail_wait(wait, error)
        return out + reply(waiter, m.Info({"applied": rounds.was_applied(abort.round)}))

    def resolve(self, space: Namespace, rank: int, resolve: m.Resolve, now: float) -> list[m.Outgoing]:
        """Apply a round that is held as a rank says; a round that is over stays as it is.

        Raises:
            ProtocolError: the round is not held.
        """
        table = space.table(resolve.table)
        rounds = table.rounds
        decision = Decision(resolve.coef, resolve.clip_value, resolve.skip)
        if resolve.round < rounds.number:
            if not table.note_decision(resolve.round, decision):
                _log.warning("rank %d decided otherwise about round %d of %r than the rank before it: %s", rank,
                             resolve.round, table.name, decision)  # fmt: skip
            return []
        if resolve.round > rounds.number or table.held is None:
            raise ProtocolError(
                f"rank {rank} decides about round {resolve.round} of {table.name!r}, which is not held: round "
                f"{rounds.number} is open"
            )
        return self._finish(space, table, rank, now, decision)

    def _fail_wait(self, wait: Wait, error: KVStoreError) -> list[m.Outgoing]:
        # Without the number of a next round: what a rank has contributed before it reads stands all the same.
        following = -1
        if wait.is_join:
            wait.table.fail_join(wait.rank, wait.round, error)
            following = wait.round + 1
        return tell(wait.table, wait.round, following, [wait.waiter], error)

    def _commit(
        self,
        space: Namespace,
        table: Table,
        rank: int,
        batch: m.CommitBatch,
        commit: m.Commit,
        waiter: Waiter,
        now: float,
    ) -> list[m.Outgoing]:
        rounds = table.rounds_of(rank, commit.round)
        if self.is_stopping and commit.round == rounds.number and not rounds.is_waiting():
            raise ServerStoppingError(f"server {self._server} is stopping and takes no new round")
        if table.conflict is not None:
            # A new one each time: a raised error collects tracebacks.
            raise from_wire(*to_wire(table.conflict))
        if batch.hyper:
            table.hyper.check(batch.hyper)
        verdict = rounds.commit(rank, commit, waiter, now)
        if isinstance(verdict, Applied):
            end = table.end_of(rank, commit.round)
            # What was told before it was applied may have been lost as well.
            is_asked = commit.hold and not end.vetoes
            before = held(table, commit.round, waiter, end.partials) if is_asked else []
            return before + self._answer(space, table, rank, commit, waiter, now)
        if isinstance(verdict, Lost):
            return [
                failed(waiter.peer, waiter.number, verdict.error, table.number, commit.round, rounds.number)
            ]
        if isinstance(verdict, Refused):
            return reply(waiter, m.Missing(table.number, commit.round, verdict.slices))
        assert isinstance(verdict, Accepted)
        if verdict.repeated and table.held is not None and commit.hold:
            return held(table, commit.round, waiter, table.held.sum.partials)
        if verdict.repeated:
            return reply(waiter, still_waiting(space, open_round(table), rounds.missing_ranks(), now))
        table.absent[rank] = frozenset(batch.absent)
        if batch.hyper:
            table.hyper.set(rank, batch.hyper)
        return self._finish(space, table, rank, now) if rounds.is_complete() else []

    def _finish(
        self, space: Namespace, table: Table, rank: int, now: float, decision: Decision | None = None
    ) -> list[m.Outgoing]:
        """All that the round of a rank needs have committed: apply it and answer them, or fail it for them all.

        One that wants a decision is held until there is one.
        """
        rounds = table.rounds_of(rank)
        number = rounds.number
        trace = space.profiling.active
        start = 0.0 if trace is None else trace.clock()
        try:
            optimizer = space.optimizer.agreed(table.mode.is_sync) if decision is None else None
            updater = self.updaters.get(space.name)
            if decision is None and table.hold(rank, optimizer, updater):
                return _tell_held(table)
            ended = table.apply(rank, optimizer, updater, decision)
        except KVStoreError as error:
            return tell(table, number, number + 1, table.fail(rank, error), error)
        except Exception as error:
            _log.exception("round %d of table %r failed", number, table.name)
            fault = KVStoreError(f"server {self._server} failed with {type(error).__name__}: {error}")
            return tell(table, number, number + 1, table.fail(rank, fault), fault)
        if trace is not None:
            trace.add(table.name, ROUNDS, start, ROUND_LANE, _described(number, ended))
        return self._tell_end(space, table, ended, now)

    def _tell_end(self, space: Namespace, table: Table, ended: Given, now: float) -> list[m.Outgoing]:
        """Answer the commits of a round that was applied, and whoever has waited for them."""
        if table.mode.is_sync:
            return outcomes(table, ended) + self.release(space)
        out = []
        for rank, mine in ended:
            if mine.commit is None:
                continue
            space.waits.contributed(table, rank, now)
            if mine.commit.joined and mine.commit.round:
                table.lanes.join(rank)
            if mine.waiter is not None:
                out += self._answer(space, table, rank, mine.commit, mine.waiter, now)
        return out + self.release(space)

    def _answer(
        self, space: Namespace, table: Table, rank: int, commit: m.Commit, waiter: Waiter, now: float
    ) -> list[m.Outgoing]:
        """Answer a commit of a round that was applied, at once or when the rank may read."""
        end = table.end_of(rank, commit.round)
        if table.mode.is_sync:
            return outcome(table, rank, commit, waiter, end)

        def answer() -> list[m.Outgoing]:
            return outcome(table, rank, commit, waiter, end)

        if commit.joined and rank in table.lanes.joined:
            limit = commit.timeout
            wait = Wait(table, rank, waiter, now + limit, limit, True, answer, commit.round)
            space.waits.add(wait)
            return reply(waiter, still_waiting(space, wait.what, wait.missing(), now))
        if not commit.want_weights or end.is_skipped:
            return answer()
        return self.read(space, table, rank, waiter, now, commit.timeout, answer, commit.round)


_ANYONE = 0
"""Of the rounds of all ranks any rank will do."""


def _tell_held(table: Table) -> list[m.Outgoing]:
    """Tell the ranks that wait for a decision, and have data, what there is to decide about."""
    assert table.held is not None
    out = []
    for _, mine in table.rounds.contributions():
        if mine.waiter is not None and mine.commit is not None and mine.commit.hold:
            out += held(table, table.rounds.number, mine.waiter, table.held.sum.partials)
    return out


def _described(number: int, given: Given) -> dict[str, int]:
    """What a trace says about a round."""
    nbytes = sum(payload_size(payload) for _, mine in given for _, payload in mine.slices.values())
    return {"round": number, "ranks": len(given), "bytes": nbytes}
