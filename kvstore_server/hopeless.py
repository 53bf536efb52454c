"""For whom ranks wait, and why a wait cannot end any more: somebody is lost, or its deadline has passed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from kvstore_server.errors import DeadlineError, KVStoreError, from_wire, to_wire
from kvstore_server.namespace import Namespace
from kvstore_server.protocol import messages as m
from kvstore_server.table import Table
from kvstore_server.waits import Wait

_TOLD = 64
"""How many of the ranks that are missing a worker is told."""


def why_round_cannot_end(
    space: Namespace, table: Table, now: float, dead_after: float
) -> KVStoreError | None:
    """The error with which the open round of all ranks ends for those who wait for it; None while it may go well.

    `dead_after` are the seconds of silence after which a worker counts as lost.
    """
    missing = table.rounds.missing_ranks()
    what = open_round(table)
    lost = space.membership.lost_error(missing, what, now, dead_after)
    if lost is not None or now < table.rounds.earliest_deadline():
        return lost
    if table.held is not None:
        return DeadlineError(
            f"{what} reached its deadline while it was held: every rank has given its gradient, but none has decided "
            "what becomes of the sum; look at what stopped them"
        )
    return _too_late(space, what, missing, now)


def why_read_cannot_end(space: Namespace, wait: Wait, now: float, dead_after: float) -> KVStoreError | None:
    """The error with which a read, or the end of a join, fails; None while it may go well."""
    if wait.table.conflict is not None:
        return from_wire(*to_wire(wait.table.conflict))
    missing = wait.missing()
    lost = space.membership.lost_error(missing, wait.what, now, dead_after)
    if lost is not None or now < wait.deadline:
        return lost
    return _too_late(space, wait.what, missing, now)


def open_round(table: Table) -> str:
    """Name the open round of all ranks in messages."""
    return f"round {table.rounds.number} of {table.name!r}"


def still_waiting(space: Namespace, what: str, missing: Iterable[int], now: float) -> m.Pending:
    """Tell a rank for whom it still waits, and when they were last heard."""
    ranks = tuple(missing)
    who = space.membership.describe_all(ranks, now) or "nobody has decided about its sum yet"
    return m.Pending(ranks[:_TOLD], f"{what} waits: {who}")


def report_slow_waits(space: Namespace, now: float) -> str | None:
    """Describe the longest wait of a namespace, if it is long enough that a line about it is due."""
    since = min((since for since, _, _ in _waits(space)), default=now)
    if not space.slow_reports.is_due(now - since, now):
        return None
    waits = sorted(_waits(space), key=lambda wait: wait[0])
    _, what, missing = waits[0]
    more = f", and {len(waits) - 1} more waits," if len(waits) > 1 else ""
    who = space.membership.describe_all(missing, now) or "nobody has decided about its sum yet"
    return f"namespace {space.name!r}: {what}{more} has waited {now - since:.0f} s: {who}"


def _waits(space: Namespace) -> Iterator[tuple[float, str, list[int]]]:
    """List what ranks wait for: since when, what it is, and the ranks that are missing."""
    for table in space.tables.values():
        if table.rounds.is_waiting():
            yield table.rounds.waiting_since, open_round(table), table.rounds.missing_ranks()
    for wait in space.waits:
        yield wait.since, wait.what, wait.missing()
    barrier = space.membership.barrier
    if barrier:
        since = min(wait.since for wait in barrier.values())
        yield since, f"barrier {space.membership.barrier_sequence}", space.absent_from_barrier()


def _too_late(space: Namespace, what: str, missing: Iterable[int], now: float) -> DeadlineError:
    who = space.membership.describe_all(missing, now)
    return DeadlineError(
        f"{what} reached its deadline while waiting for {who}; is it stuck, or only slow? (timeout=… of the kvstore or "
        "KVSTORE_TIMEOUT raises the limit.) Workers with different numbers of batches train in `with trainer.join():`"
    )
