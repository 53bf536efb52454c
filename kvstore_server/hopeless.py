"""Why a round or a read cannot end any more: somebody whom it needs is lost, or its deadline has passed."""

from __future__ import annotations

from collections.abc import Iterable

from kvstore_server.errors import DeadlineError, KVStoreError, from_wire, to_wire
from kvstore_server.namespace import Namespace
from kvstore_server.table import Table
from kvstore_server.waits import Wait


def why_round_cannot_end(
    space: Namespace, table: Table, now: float, dead_after: float
) -> KVStoreError | None:
    """The error with which the open round of all ranks ends for those who wait for it; None while it may go well.

    `dead_after` are the seconds of silence after which a worker counts as lost.
    """
    missing = table.rounds.missing_ranks()
    what = f"round {table.rounds.number} of {table.name!r}"
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
    what = f"{'the end' if wait.is_join else 'a read'} of {wait.table.name!r} by rank {wait.rank}"
    lost = space.membership.lost_error(missing, what, now, dead_after)
    if lost is not None or now < wait.deadline:
        return lost
    return _too_late(space, what, missing, now)


def _too_late(space: Namespace, what: str, missing: Iterable[int], now: float) -> DeadlineError:
    who = "; ".join(space.membership.describe(rank, now) for rank in missing)
    return DeadlineError(
        f"{what} reached its deadline while waiting for {who}; is it stuck or only slow? "
        "(timeout=… of the kvstore or KVSTORE_TIMEOUT raises the limit)"
    )
