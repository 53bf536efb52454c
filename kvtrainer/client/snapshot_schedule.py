"""When the servers of a job take snapshots: the member with the lowest rank asks for them, between two of its rounds.

No round ends without that worker. So what all servers hold at that moment is the state after the same round, whatever
else has arrived from other workers, and a period in seconds needs one clock only. Where members may change, it may be
another worker the next time.

A server keeps the snapshots that the request names, and removes the others: those that all servers have, of which the
worker asks them just before, and the last one that all have begun to write. So there is always one that all have,
although one server may write more slowly than the others, or fail to.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

from kvstore_server.engine.snapshots import SnapshotPeriod
from kvstore_server.errors import ProtocolError
from kvstore_server.protocol import messages as m

_log = logging.getLogger(__name__)


def read_answer(answer: m.ReplyBody) -> str:
    """Return what a server has answered to the request for a snapshot. Raises ProtocolError if it cannot be that.

    "none": it has no tables of the job. "taken". "busy": it still writes the one before. "uneven": not all tables of
    the job have ended as many rounds. "useless": a job cannot go on from it; its log says why. "failed": there was no
    memory for it.
    """
    state = answer.values.get("state") if isinstance(answer, m.Status) else None
    if isinstance(state, str):
        return state
    raise ProtocolError(f"a server is asked for a snapshot, and answers {answer!r:.200}")


class SnapshotSchedule:
    """Decides before which rounds snapshots are taken. One for all clients of a store.

    Args:
        period: How often.
        clock: Returns seconds.
    """

    def __init__(self, period: SnapshotPeriod, clock: Callable[[], float]) -> None:
        self._period = period
        self._clock = clock
        self._next_at = clock() + period.seconds
        """When the next one is due, if the period is in seconds."""
        self._asked = 0
        """The round of the last one."""
        self._tried: dict[str, int] = {}
        """Namespace → the last round before which it has asked."""
        self._common: list[int] = []
        """The rounds of snapshots that all servers are known to have."""
        self._begun = 0
        """The round of the last one that all servers have begun to write; it may not be complete on all."""

    def set_common(self, rounds: Sequence[int]) -> None:
        """Set the rounds of the snapshots that all servers have now."""
        self._common = sorted(rounds)

    def is_due(self, namespace: str, number: int) -> bool:
        """Return whether a client is to ask for one before it begins a round, as far as this worker knows.

        Before other rounds than multiples of the period it is due if the worker that was to ask before one has left.
        """
        last = max(self._asked, self._tried.get(namespace, 0))
        if self._period.seconds:
            return number > last and self._clock() >= self._next_at
        period = self._period.rounds
        return number // period > max(last, *self._common[-1:], 0) // period

    @property
    def kept(self) -> tuple[int, ...]:
        """The rounds of at most two snapshots that servers keep beside the next one."""
        return tuple(
            sorted({*self._common, self._begun} - {0})[-2:]
            if self._is_newer_snapshot_begun
            else self._common[-2:]
        )

    @property
    def _is_newer_snapshot_begun(self) -> bool:
        return not self._common or self._begun > self._common[-1]

    def record(self, namespace: str, number: int, answers: Mapping[int, str]) -> None:
        """Record what servers have answered to a request before a round.

        Args:
            answers: By server, as `read_answer` returns them.
        """
        self._tried[namespace] = number
        holders = {server: state for server, state in answers.items() if state != "none"}
        states = set(holders.values())
        if not holders or "uneven" in states:
            return  # another Trainer of this worker may come to the same round
        self._asked, self._next_at = number, self._clock() + self._period.seconds
        if states == {"taken"}:
            self._begun = number
        elif busy := [server for server, state in holders.items() if state == "busy"]:
            _log.warning(
                "no snapshot after round %d: servers %s are still writing the one before; let them be rarer "
                "(--snapshot-every), or the disk faster",
                number,
                ", ".join(map(str, busy)),
            )
