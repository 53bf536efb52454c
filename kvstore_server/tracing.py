"""Recordings of a process as events of the Chrome trace format, for chrome://tracing and ui.perfetto.dev.

Times are seconds of a clock that the caller provides, and microseconds in the file. The format: "Trace Event Format",
Google, complete events ("ph": "X") and metadata events ("ph": "M").
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, NamedTuple

from kvstore_server.errors import ConfigurationError, ProtocolError
from kvstore_server.protocol import messages as m
from kvstore_server.protocol.frames import pack_control, unpack_control

CALLS = "calls"
"""Category of handled requests on a server, and of requests and waits on a worker."""
ROUNDS = "rounds"
"""Category of gradient sums and optimizer updates."""
CATEGORIES = (CALLS, ROUNDS)
ROUND_LANE = 0
"""The lane of a server's rounds; requests of rank r are in lane r + 1. A lane is Chrome's `tid`."""
LIMIT = 100_000
"""How many events are stored, about 50 MB; later ones are only counted."""
_LONGEST_NAME = 200
_PAGE_SIZE = 512 * 1024
"""Bytes of events in one message. The last event may exceed it: a frame has room for one more."""

Clock = Callable[[], float]


class Event(NamedTuple):
    name: str
    category: str
    start: float
    """Seconds."""
    duration: float
    """Seconds."""
    lane: int
    """Events of one lane are disjoint or nested; viewers draw each lane as a thread."""
    args: Mapping[str, Any]
    """Plain numbers and strings."""


class Trace:
    """The events of one process, oldest first, up to a limit.

    Args:
        clock: Returns seconds.
        limit: How many events are stored.
    """

    def __init__(self, clock: Clock, limit: int = LIMIT) -> None:
        self.clock = clock
        self.categories = frozenset(CATEGORIES)
        """The recorded categories."""
        self.events: list[Event] = []
        self.dropped = 0
        """Events after the limit was reached."""
        self._limit = limit

    def add(self, name: str, category: str, start: float, lane: int, args: Mapping[str, Any]) -> None:
        """Record an event that ends now."""
        self.append(Event(name[:_LONGEST_NAME], category, start, self.clock() - start, lane, args))

    def append(self, event: Event) -> None:
        """Record an event that has ended."""
        if event.category not in self.categories:
            return
        if len(self.events) >= self._limit:
            self.dropped += 1
            return
        self.events.append(event)


class Recording:
    """A trace that can be started, paused and finished: a worker's, or a server's for one namespace."""

    def __init__(self) -> None:
        self.trace: Trace | None = None
        self.active: Trace | None = None
        """The trace to record into; None while recording is off. Hot paths only test this attribute."""
        self._is_running = self._is_paused = False

    def switch(self, action: str, categories: Collection[str], clock: Clock | None) -> None:
        """Apply an action of MXNet's profiler; repeating it has no effect.

        Events are recorded between "run" and "stop", except between "pause" and "resume", which do not depend on them.
        Another "run" continues the same trace, with the categories that it names; "finish" discards the trace.

        Args:
            action: "run", "stop", "pause", "resume" or "finish".
            categories: What a "run" records.

        Raises:
            ConfigurationError: There is no clock.
            ProtocolError: There is no such action or category.
        """
        if action == "run":
            if clock is None:
                raise ConfigurationError("there is no clock here, so nothing can be profiled")
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
            raise ProtocolError(f"profiling has no action {action!r:.80}")
        self.active = self.trace if self._is_running and not self._is_paused else None

    def page(self, start: int) -> dict[str, Any]:
        """Return as many packed events as fit into a message, from number `start` on; see `unpack_events`."""
        trace = self.trace
        if trace is None:
            return {"events": [], "total": 0, "dropped": 0}
        packed: list[bytes] = []
        size = 0
        for event in trace.events[start:]:
            packed.append(pack_control(list(event)))
            size += len(packed[-1])
            if size >= _PAGE_SIZE:
                break
        return {"events": packed, "total": len(trace.events), "dropped": trace.dropped}

    def handle(self, body: m.Profile, clock: Clock | None) -> dict[str, Any]:
        """Apply the action of a message; return the values of the answer. Raises like `switch`."""
        if body.action == "fetch":
            return self.page(body.start)
        self.switch(body.action, body.categories, clock)
        return {}


def handle_and_trace(
    trace: Trace, body: m.RequestBody, rank: int, handle: Callable[[], list[m.Outgoing]]
) -> list[m.Outgoing]:
    """Handle a rank's message, and record how long that took and its payload bytes."""
    start = trace.clock()
    replies = handle()
    nbytes = {"bytes_in": payload_in(body), "bytes_out": sum(payload_out(out.reply.body) for out in replies)}
    trace.add(type(body).__name__, CALLS, start, rank + 1, nbytes)
    return replies


def payload_in(body: m.RequestBody) -> int:
    return int(body.pushes[:, m.PUSH_NBYTES].sum()) if isinstance(body, m.Contribute) else 0


def payload_out(body: m.ReplyBody) -> int:
    return int(body.parts[:, m.PART_NBYTES].sum()) if isinstance(body, m.Weights) else 0


def unpack_events(packed: Iterable[bytes]) -> list[Event]:
    """Decode the events of a `Recording.page`. Raises ProtocolError if these are not events."""
    return [_read_trace_event(unpack_control(one)) for one in packed]


def _read_trace_event(values: Any) -> Event:
    kinds = (str, str, int | float, int | float, int | float, dict)
    if not (isinstance(values, list) and len(values) == len(kinds) and all(map(isinstance, values, kinds))):
        raise ProtocolError(f"this is not an event of a trace: {values!r:.80}")
    name, category, start, duration, lane, args = values
    return Event(name, category, float(start), float(duration), int(lane), args)


def chrome_trace(
    events: Iterable[Event], pid: int, process: str, lanes: Callable[[int], str], dropped: int
) -> dict[str, Any]:
    """Return a trace file as plain values.

    Args:
        pid: A number that is unique in the job, so that files can be merged.
        process: The name of the process.
        lanes: Returns the name of a lane.
        dropped: How many events are missing at the end.
    """
    rows: list[dict[str, Any]] = [_metadata_event("process_name", pid, 0, process)]
    named: set[int] = set()
    for name, category, start, duration, lane, args in events:
        if lane not in named:
            named.add(lane)
            rows.append(_metadata_event("thread_name", pid, lane, lanes(lane)))
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


def _metadata_event(what: str, pid: int, lane: int, name: str) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": pid, "tid": lane, "args": {"name": name}}
