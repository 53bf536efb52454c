"""What a worker's session does, as events of a trace: its requests, and when it waits for them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from kvstore_server.protocol import messages as m
from kvstore_server.tracing import CALLS, ROUNDS, Event, Trace, payload_in, payload_out

_WAITING = 0
"""The lane of waits; requests have those above, the lowest that is free."""


@dataclass
class _Open:
    """A request that is not over."""

    lane: int
    start: float
    last: float
    name: str = ""
    args: dict[str, Any] = field(default_factory=dict)


class SessionTrace:
    """Notes what one session sends and gets.

    A request lasts from when it was sent to its last answer; what it sends again counts for its bytes alone.
    """

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self._open: dict[int, _Open] = {}

    def sent(self, server: int, number: int, body: m.RequestBody) -> None:
        """A request, or a part of it, goes out."""
        known = self._open.get(number)
        if known is None:
            now = self.trace.clock()
            taken = {one.lane for one in self._open.values()}
            lane = next(lane for lane in range(1, len(taken) + 2) if lane not in taken)
            known = self._open[number] = _Open(lane, now, now)
            known.args.update(server=server, bytes_out=0, bytes_in=0)
        known.args["bytes_out"] += payload_in(body)
        known.name = known.name or type(body).__name__
        if isinstance(body, m.Contribute) and len(body.commits):
            table, round_ = body.commits[0, :2].tolist()
            known.args.setdefault("rounds", len(body.commits))
            known.args.setdefault("first_table", table)
            known.args.setdefault("first_round", round_)

    def received(self, reply: m.Reply) -> None:
        """A server answers."""
        known = self._open.get(reply.number)
        if known is not None:
            known.last = self.trace.clock()
            known.args["bytes_in"] += payload_out(reply.body)

    def ended(self, number: int) -> None:
        """Nobody waits for answers to a request any more."""
        known = self._open.pop(number, None)
        if known is not None:
            category = ROUNDS if "rounds" in known.args else CALLS
            self.trace.add_past(
                Event(known.name, category, known.start, known.last - known.start, known.lane, known.args)
            )

    def waited(self, start: float) -> None:
        """The session has waited since `start`."""
        self.trace.add("wait", CALLS, start, _WAITING, {})


def lane_name(lane: int) -> str:
    """What a lane of a worker's trace shows."""
    return "waiting" if lane == _WAITING else f"requests ({lane})"
