"""When the servers of a job take snapshots: the worker with rank 0 asks for them, between two of its rounds.

No round ends without that worker. So what all servers hold at that moment is the state after the same round, whatever
else has arrived from other workers, and a period in seconds needs one clock only.

A server keeps the snapshots that the request names, and removes the others: those that all servers have, and the last
one that all have begun to write. So there is always one that all have, although one server may write more slowly than
the others, or fail to.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from kvstore_server.engine.snapshots import SnapshotPeriod
from kvstore_server.errors import ProtocolError
from kvstore_server.protocol import messages as m

_log = logging.getLogger(__name__)


class CutAnswer(NamedTuple):
    """What a server answers to the request for a snapshot.

    Args:
        state: "none": it has no tables of the job. "taken". "busy": it still writes the one before. "uneven": not all
            tables of the job have ended as many rounds. "useless": nobody could go on from it; its log says why.
        rounds: The snapshots that it has written.
    """

    state: str
    rounds: frozenset[int]


def read_answer(answer: m.ReplyBody) -> CutAnswer:
    """Return what a server has answered. Raises ProtocolError if it cannot be that."""
    try:
        if isinstance(answer, m.Status):
            return CutAnswer(str(answer.values["state"]), frozenset(map(int, answer.values["rounds"])))
    except (LookupError, TypeError, ValueError):
        pass
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
        """Set the rounds of the snapshots that all servers have, when another client has asked them."""
        self._common = sorted(rounds)

    def is_due(self, namespace: str, number: int) -> bool:
        """Return whether a client is to ask for one before it begins a round."""
        if not number or number == self._asked or self._tried.get(namespace) == number:
            return False
        if self._period.seconds:
            return self._clock() >= self._next_at
        return number % self._period.rounds == 0

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

    def record(self, namespace: str, number: int, answers: Mapping[int, CutAnswer]) -> None:
        """Record what servers have answered to a request before a round.

        Args:
            answers: By server.
        """
        self._tried[namespace] = number
        holders = {server: one for server, one in answers.items() if one.state != "none"}
        states = {one.state for one in holders.values()}
        if not holders or "uneven" in states:
            return  # another Trainer of this worker may come to the same round
        self._asked, self._next_at = number, self._clock() + self._period.seconds
        self._common = sorted(frozenset.intersection(*(one.rounds for one in holders.values())))
        if states == {"taken"}:
            self._begun = number
        elif busy := [server for server, one in holders.items() if one.state == "busy"]:
            _log.warning(
                "no snapshot after round %d: servers %s are still writing the one before; let them be rarer "
                "(--snapshot-every), or the disk faster",
                number,
                ", ".join(map(str, busy)),
            )
