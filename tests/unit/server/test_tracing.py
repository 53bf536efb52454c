"""Traces: what a server records while it is told to, how that travels, and what the file looks like."""

from __future__ import annotations

import itertools
import time
from typing import Any

import pytest
import torch

from kvstore_server.engine.engine import Engine
from kvstore_server.engine.namespace import EngineConfig
from kvstore_server.plan import TensorSpec
from kvstore_server.protocol import messages as m
from kvstore_server.protocol.frames import MAX_FRAME, encode, pack_control
from kvstore_server.tracing import CALLS, CATEGORIES, ROUNDS, Event, Recording, Trace, chrome_trace, events_of
from kvtrainer.client.client import Client, Loopback
from kvtrainer.client.contribution import Contribution
from kvtrainer.client.session import SessionOptions
from kvtrainer.client.tables import RemoteTable
from kvtrainer.errors import ConfigurationError, ProtocolError
from tests.support.engines import client_of

NUMEL = 100
NBYTES = 4 * NUMEL
PADDED = 4 * (-(-NUMEL // 16) * 16)


class Ticking:
    """A clock that is half a second later at each look."""

    def __init__(self) -> None:
        self._looks = itertools.count()

    def __call__(self) -> float:
        return next(self._looks) * 0.5


def profiled(categories: tuple[str, ...] = CATEGORIES) -> tuple[Client, RemoteTable, Engine]:
    """The only worker of a job whose one server records, with a table that has its values."""
    engine = Engine(EngineConfig(), clock=Ticking())
    client = client_of(1, [engine])
    [table] = client.register({"w": [TensorSpec("w", (NUMEL,), "float32")]})
    one_round(client, table)
    client.profile("run", categories)
    return client, table, engine


def one_round(client: Client, table: RemoteTable) -> None:
    value = {"float32": torch.ones(NUMEL)}
    client.rounds.wait(client.rounds.start(Contribution([table], [value], [value])))


def names(client: Client) -> list[str]:
    return [event.name for event in client.recorded(0)[0]]


def test_messages_and_rounds_are_recorded_with_their_bytes_and_times() -> None:
    client, table, _ = profiled()
    one_round(client, table)
    events, dropped = client.recorded(0)
    # Each look at the clock takes half a second: the message is looked at around the round, which is in it.
    # The first message's lane is that of rank 0.
    round_, commit = events[-2:]
    assert (round_.name, round_.category, round_.lane, round_.duration) == ("w", ROUNDS, 0, 0.5)
    assert round_.args == {"round": 1, "ranks": 1, "bytes": PADDED}
    assert (commit.name, commit.category, commit.lane, commit.duration) == ("Contribute", CALLS, 1, 1.5)
    assert commit.args == {"bytes_in": PADDED, "bytes_out": PADDED}
    assert commit.start < round_.start < round_.start + round_.duration < commit.start + commit.duration
    assert dropped == 0


def test_nothing_is_recorded_before_run_while_paused_after_stop_or_after_finish() -> None:
    client, table, engine = profiled()
    one_round(client, table)
    counts = [names(client).count("w")]
    for action in ("pause", "resume", "stop", "run", "pause", "finish", "run"):
        client.profile(action, CATEGORIES)
        one_round(client, table)
        counts.append(names(client).count("w"))
    # A run after a finish begins afresh, and is not paused any more.
    assert counts == [1, 1, 2, 2, 3, 3, 0, 1]
    client.profile("finish")
    assert engine.namespaces["job"].recording.active is None


@pytest.mark.parametrize(("categories", "kinds"), [((), set()), ((ROUNDS,), {ROUNDS}), ((CALLS,), {CALLS})])
def test_only_the_wanted_categories_are_recorded(categories: tuple[str, ...], kinds: set[str]) -> None:
    client, table, _ = profiled(categories)
    one_round(client, table)
    assert {event.category for event in client.recorded(0)[0]} == kinds


def test_namespaces_of_one_server_are_profiled_by_themselves() -> None:
    _, _, engine = profiled()
    other = Client(Loopback([engine], time.monotonic), SessionOptions("other job", 0, 1), time.monotonic)
    other.connect()
    [table] = other.register({"theirs": [TensorSpec("theirs", (NUMEL,), "float32")]})
    one_round(other, table)
    assert other.recorded(0) == ([], 0)
    trace = engine.namespaces["job"].recording.active
    assert trace is not None
    assert "theirs" not in [event.name for event in trace.events]


def test_an_engine_without_a_clock_says_that_it_cannot_measure() -> None:
    with pytest.raises(ConfigurationError):
        client_of(1).profile("run", CATEGORIES)


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (m.Profile("explode"), "no action 'explode'"),
        (m.Profile("run", ("calls", "secrets")), "no such categories"),
        (m.Profile("run", ({"a": 1},)), "no such categories"),  # type: ignore[arg-type]
    ],
)
def test_what_profiling_does_not_know_is_a_protocol_error(body: m.Profile, text: str) -> None:
    with pytest.raises(ProtocolError, match=text):
        Recording().answer(body, Ticking())


def test_events_beyond_the_limit_are_counted_only() -> None:
    trace = Trace(Ticking(), limit=3)
    for number in range(5):
        trace.add(f"event {number}", CALLS, 0.0, 0, {})
    assert [event.name for event in trace.events] == ["event 0", "event 1", "event 2"]
    assert trace.dropped == 2


def test_many_events_travel_in_pieces_that_fit_a_frame_and_arrive_as_they_were() -> None:
    engine = Engine(EngineConfig(), clock=Ticking())
    client = client_of(1, [engine])
    client.profile("run", CATEGORIES)
    trace = engine.namespaces["job"].recording.active
    assert trace is not None
    sent = [Event("n" * 200, CALLS, i * 0.25, 0.5, i, {"bytes_in": i}) for i in range(6000)]
    trace.events[:] = sent
    client.profile("stop")
    events, _ = client.recorded(0)
    assert events[: len(sent)] == sent
    recording = engine.namespaces["job"].recording
    pieces = [
        encode(m.Request(0, 0, 0, m.Status(recording.piece(at))))[1:] for at in (0, 3000, 5999, 6000, 10**9)
    ]
    assert max(len(piece) for piece in pieces) <= MAX_FRAME


def test_a_very_long_name_is_cut_so_that_one_event_never_fills_a_frame() -> None:
    trace = Trace(Ticking())
    trace.add("x" * 10**6, CALLS, 0.0, 0, {})
    assert trace.events[0].name == "x" * 200


@pytest.mark.parametrize(
    "values", [5, [], ["a", "b", "x", 1.0, 0, {}], ["a", "b", 1.0, 1.0, 0, []], {"a": 1}]
)
def test_bytes_that_are_no_event_are_a_protocol_error(values: Any) -> None:
    with pytest.raises(ProtocolError):
        events_of([pack_control(values)])


def test_a_trace_file_has_complete_events_in_microseconds_and_names_for_processes_and_lanes() -> None:
    events = [Event("a", CALLS, 1.5, 0.25, 2, {"bytes_in": 7}), Event("b", ROUNDS, 2.0, 0.5, 2, {})]
    content = chrome_trace(events, pid=9, process="server 1", lanes=lambda lane: f"lane {lane}", dropped=4)
    assert content["traceEvents"] == [
        {"name": "process_name", "ph": "M", "pid": 9, "tid": 0, "args": {"name": "server 1"}},
        {"name": "thread_name", "ph": "M", "pid": 9, "tid": 2, "args": {"name": "lane 2"}},
        {
            "name": "a", "cat": "calls", "ph": "X", "ts": 1.5e6, "dur": 0.25e6, "pid": 9, "tid": 2,
            "args": {"bytes_in": 7},
        },
        {"name": "b", "cat": "rounds", "ph": "X", "ts": 2e6, "dur": 0.5e6, "pid": 9, "tid": 2, "args": {}},
    ]  # fmt: skip
    assert content["otherData"]["dropped_events"] == 4
