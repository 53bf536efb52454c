"""Commits on a server: whom a round still waits for, how it ends, and who is told what.

The arithmetic is the table's, the counting is `consistency`'s; here the two meet the members of a namespace.
"""

from __future__ import annotations

import logging

from kvstore_server.consistency import Accepted, Applied, Lost, Refused
from kvstore_server.dense import Updater
from kvstore_server.errors import (
    DeadlineError,
    KVStoreError,
    RoundAbortedError,
    ServerStoppingError,
    from_wire,
    to_wire,
)
from kvstore_server.namespace import Namespace
from kvstore_server.protocol import messages as m
from kvstore_server.replies import failed, outcome, parts_of, reply, tell
from kvstore_server.table import Table, Waiter

_log = logging.getLogger(__name__)


class RoundKeeper:
    """Takes commits and aborts, and ends rounds.

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
                if table.rounds.is_waiting() and (anyone_lost or now >= table.rounds.earliest_deadline()):
                    out += self.fail_if_hopeless(space, table, now)
            except KVStoreError as error:
                out.append(failed(waiter.peer, waiter.number, error, commit.table, commit.round))
        return out

    def fail_if_hopeless(self, space: Namespace, table: Table, now: float) -> list[m.Outgoing]:
        """Fail the open round of a table if its deadline has passed, or if it needs a rank that is lost."""
        error = self._hopeless(space, table, now)
        return [] if error is None else tell(table, table.rounds.number, table.fail(error), error)

    def abort(self, space: Namespace, rank: int, abort: m.Abort, waiter: Waiter) -> list[m.Outgoing]:
        """A rank gives a round up; tells those who wait for it, and the rank whether it stands all the same."""
        table = space.table(abort.table)
        error = RoundAbortedError(
            f"rank {rank} aborted round {abort.round} of {table.name!r}: {abort.reason}"
        )
        out = tell(table, abort.round, table.abort(abort.round, error, abort.undo), error)
        return out + reply(waiter, m.Info({"applied": table.rounds.was_applied(abort.round)}))

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
        if self.is_stopping and commit.round == table.rounds.number and not table.rounds.is_waiting():
            raise ServerStoppingError(f"server {self._server} is stopping and takes no new round")
        if table.conflict is not None:
            # A new one each time: a raised error collects tracebacks.
            raise from_wire(*to_wire(table.conflict))
        if batch.hyper:
            table.hyper.check(batch.hyper)
        verdict = table.rounds.commit(rank, commit, waiter, now)
        if isinstance(verdict, Applied):
            return outcome(table, commit, waiter, m.Weights(parts_of(table)))
        if isinstance(verdict, Lost):
            number = table.rounds.number
            return [failed(waiter.peer, waiter.number, verdict.error, table.number, commit.round, number)]
        if isinstance(verdict, Refused):
            return reply(waiter, m.Missing(table.number, commit.round, verdict.slices))
        assert isinstance(verdict, Accepted)
        if verdict.repeated:
            return reply(waiter, m.Pending(tuple(table.rounds.missing_ranks())))
        table.absent[rank] = frozenset(batch.absent)
        if batch.hyper:
            table.hyper.set(rank, batch.hyper)
        return self._finish(space, table) if table.rounds.is_complete() else []

    def _finish(self, space: Namespace, table: Table) -> list[m.Outgoing]:
        """Every rank has committed: apply the round and answer them all, or fail it for them all."""
        number = table.rounds.number
        try:
            ended = table.apply(space.optimizer.agreed(), self.updaters.get(space.name))
        except KVStoreError as error:
            return tell(table, number, table.fail(error), error)
        except Exception as error:
            _log.exception("round %d of table %r failed", number, table.name)
            fault = KVStoreError(f"server {self._server} failed with {type(error).__name__}: {error}")
            return tell(table, number, table.fail(fault), fault)
        weights = m.Weights(parts_of(table))
        return [
            told
            for _, mine in ended
            if mine.waiter is not None and mine.commit is not None
            for told in outcome(table, mine.commit, mine.waiter, weights)
        ]

    def _hopeless(self, space: Namespace, table: Table, now: float) -> KVStoreError | None:
        missing = table.rounds.missing_ranks()
        what = f"round {table.rounds.number} of {table.name!r}"
        lost = space.membership.lost_error(missing, what, now, self._dead_after)
        if lost is not None:
            return lost
        if now < table.rounds.earliest_deadline():
            return None
        who = "; ".join(space.membership.describe(rank, now) for rank in missing)
        return DeadlineError(
            f"{what} reached its deadline while waiting for {who}; is it stuck or only slow? "
            "(timeout=… of the kvstore or KVSTORE_TIMEOUT raises the limit)"
        )
