"""Recordings of a process, as events of the Chrome trace format. See chrome://tracing and ui.perfetto.dev.

Times are seconds of a clock that the caller gives; a trace has them in microseconds. The format: "Trace Event Format",
Google, complete events ("ph": "X") and metadata events ("ph": "M").
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, NamedTuple

from kvstore_server.errors import ConfigurationError, ProtocolError
from kvstore_server.protocol import messages as m
from kvstore_server.protocol.frames import pack_control, unpack_control

CALLS = "calls"
"""Category: messages on a server, requests and waits on a worker."""
ROUNDS = "rounds"
"""Category: sums and updates."""
CATEGORIES = (CALLS, ROUNDS)
ROUND_LANE = 0
"""The lane of a server's rounds; requests of rank r are in lane r + 1."""
LIMIT = 100_000
"""Events that are kept, about 50 MB; later ones are only counted."""
_LONGEST_NAME = 200
_PIECE = 512 * 1024
"""Bytes of events in one message; with one event more it still fits a frame."""

Clock = Callable[[], float]


class Event(NamedTuple):
    """One span of time on a lane."""

    name: str
    category: str
    start: float
    """Seconds."""
    duration: float
    """Seconds."""
    lane: int
    """Events of one lane do not overlap unless one lies in the other; a viewer draws each lane as a thread."""
    args: Mapping[str, Any]
    """Plain numbers and strings."""


class Trace:
    """Events of one process, oldest first, up to a limit.

    Args:
        clock: Seconds.
        limit: How many events are kept.
    """

    def __init__(self, clock: Clock, limit: int = LIMIT) -> None:
        self.clock = clock
        self.categories = frozenset(CATEGORIES)
        """What is recorded."""
        self.events: list[Event] = []
        self.dropped = 0
        """Events that came when the limit was reached."""
        self._limit = limit

    def add(self, name: str, category: str, start: float, lane: int, args: Mapping[str, Any]) -> None:
        """Note what began at `start` and is over now."""
        self.add_past(Event(name[:_LONGEST_NAME], category, start, self.clock() - start, lane, args))

    def add_past(self, event: Event) -> None:
        """Note what is over, perhaps for longer."""
        if event.category not in self.categories:
            return
        if len(self.events) >= self._limit:
            self.dropped += 1
            return
        self.events.append(event)


class Recording:
    """A trace that is begun, paused and finished. It is a worker's or, of one namespace, a server's."""

    def __init__(self) -> None:
        self.trace: Trace | None = None
        self.active: Trace | None = None
        """The trace that takes events now; None while nothing is recorded: the rest looks at nothing else."""
        self._is_running = self._is_paused = False

    def switch(self, action: str, categories: Collection[str], clock: Clock | None) -> None:
        """Do an action; repeating it has no further effect.

        Args:
            action: run, stop, pause, resume, or finish, after which "run" begins afresh.
            categories: What is recorded from a "run" on.

        Raises:
            ConfigurationError: there is no clock to measure with.
            ProtocolError: there is no such action or category.
        """
        if action == "run":
            if clock is None:
                raise ConfigurationError("this engine has no clock, so it cannot be profiled")
            if any(name not in CATEGORIES for name in categories):
                raise ProtocolError(f"no such categories of events: {categories!r:.80}")
            self.trace = self.trace or Trace(clock)
            self.trace.categories = frozenset(categories)
            self._is_running = True
        elif action == "stop":
            self._is_running = False
        elif action in ("pause", "resume"):
            self._is_paused = action == "pause"
        elif action == "finish":
            self._is_running = self._is_paused = False
            self.trace = None
        else:
            raise ProtocolError(f"profiling knows no action {action!r:.80}")
        self.active = self.trace if self._is_running and not self._is_paused else None

    def piece(self, start: int) -> dict[str, Any]:
        """Return events from number `start` on, as many as fit a message. `events_of` reads them."""
        trace = self.trace
        if trace is None:
            return {"events": [], "total": 0, "dropped": 0}
        packed: list[bytes] = []
        size = 0
        for event in trace.events[start:]:
            packed.append(pack_control(list(event)))
            size += len(packed[-1])
            if size >= _PIECE:
                break
        return {"events": packed, "total": len(trace.events), "dropped": trace.dropped}

    def answer(self, body: m.Profile, clock: Clock | None) -> dict[str, Any]:
        """Do what a message asks for; return the answer's values. Raises as `switch`."""
        if body.action == "fetch":
            return self.piece(body.start)
        self.switch(body.action, body.categories, clock)
        return {}


def handled(
    trace: Trace, body: m.RequestBody, rank: int, answer: Callable[[], list[m.Outgoing]]
) -> list[m.Outgoing]:
    """Answer a message of a rank. Note how long it took, and the payload bytes in and out."""
    start = trace.clock()
    replies = answer()
    nbytes = {"bytes_in": payload_in(body), "bytes_out": sum(payload_out(out.reply.body) for out in replies)}
    trace.add(type(body).__name__, CALLS, start, rank + 1, nbytes)
    return replies


def payload_in(body: m.RequestBody) -> int:
    """Bytes of the slices that a request brings."""
    return int(body.pushes[:, 3].sum()) if isinstance(body, m.Contribute) else 0


def payload_out(body: m.ReplyBody) -> int:
    """Bytes of the weights that a reply brings."""
    return int(body.parts[:, 3].sum()) if isinstance(body, m.Weights) else 0


def events_of(packed: Iterable[bytes]) -> list[Event]:
    """Inverse of the packing in `Trace.piece`.

    Raises:
        ProtocolError: these are no events.
    """
    return [_event(unpack_control(one)) for one in packed]


def _event(values: Any) -> Event:
    kinds = (str, str, int | float, int | float, int | float, dict)
    if not (isinstance(values, list) and len(values) == len(kinds) and all(map(isinstance, values, kinds))):
        raise ProtocolError(f"this is no event of a trace: {values!r:.80}")
    name, category, start, duration, lane, args = values
    return Event(name, category, float(start), float(duration), int(lane), args)


def chrome_trace(
    events: Iterable[Event], pid: int, process: str, lanes: Callable[[int], str], dropped: int
) -> dict[str, Any]:
    """Return a whole trace file as plain values.

    Args:
        events: What happened.
        pid: A number that no other process of the job has, so that files may be put together.
        process: The name of the process.
        lanes: The name of each lane.
        dropped: How many events are missing at the end.
    """
    rows: list[dict[str, Any]] = [_named("process_name", pid, 0, process)]
    named: set[int] = set()
    for name, category, start, duration, lane, args in events:
        if lane not in named:
            named.add(lane)
            rows.append(_named("thread_name", pid, lane, lanes(lane)))
        rows.append(
            {
                "name": name,
                "cat": category,
                "ph": "X",
                "ts": start * 1e6,
                "dur": duration * 1e6,
                "pid": pid,
                "tid": lane,
                "args": dict(args),
            }
        )
    return {
        "traceEvents": rows,
        "displayTimeUnit": "ms",
        "otherData": {
            "process": process,
            "dropped_events": dropped,
            "clock": "monotonic, of the process's host",
        },
    }


def _named(what: str, pid: int, lane: int, name: str) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": pid, "tid": lane, "args": {"name": name}}
