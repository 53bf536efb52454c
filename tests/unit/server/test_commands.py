"""What a job may ask of its servers: commands and traces."""

from __future__ import annotations

import contextlib
import itertools
import logging
import time
from typing import Any

import pytest
import torch

from kvstore_server import commands
from kvstore_server.commands import CommandContext
from kvstore_server.engine.engine import Engine
from kvstore_server.engine.namespace import EngineConfig
from kvstore_server.plan import TensorSpec
from kvstore_server.protocol import messages as m
from kvstore_server.protocol.frames import MAX_FRAME, encode_frames, pack_control
from kvstore_server.protocol.messages import SECRET_BYTES
from kvstore_server.tracing import (
    CALLS,
    CATEGORIES,
    ROUNDS,
    Event,
    Recording,
    Trace,
    chrome_trace,
    unpack_events,
)
from kvtrainer.client.client import Client, LoopbackTransport
from kvtrainer.client.contribution import Contribution
from kvtrainer.client.session import SessionOptions
from kvtrainer.client.tables import RemoteTable
from kvtrainer.errors import CommandError, ConfigurationError, ProtocolError
from kvtrainer.kvstore import LocalKVStore
from tests.support.durable import Crash, HeldDescriptors, crash_at, durable_engine
from tests.support.engines import client_of

PEER = b"p" * SECRET_BYTES


@pytest.fixture(autouse=True)
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The bodies with which command 7 was called; the registry is as before afterwards."""
    monkeypatch.setattr(commands, "_handlers", {})
    called: list[str] = []

    @commands.register(7)
    def note(body: str, context: CommandContext) -> str:
        called.append(body)
        return f"{context.server} of {context.num_servers}: {body} #{len(called)}"

    @commands.register(8)
    def broken(body: str, context: CommandContext) -> str:
        called.append(body)
        raise RuntimeError(f"cannot {body}")

    return called


class Losing(LoopbackTransport):
    """Loses the first answer to every command; its clock goes on by a tenth of a second at each look."""

    def __init__(self, engine: Engine) -> None:
        super().__init__([engine], lambda: next(self.seconds))
        self.seconds = itertools.count(100.0, 0.1)
        self._asked: set[int] = set()

    def send(self, server: int, request: m.Request, priority: int = 0) -> None:
        super().send(server, request)
        if isinstance(request.body, m.Command) and request.number not in self._asked:
            self._asked.add(request.number)
            self._replies.clear()


def test_a_function_may_compute_gradients_in_a_server_that_has_turned_them_off() -> None:
    @commands.register(9)
    def slope(body: str, _: CommandContext) -> str:
        x = torch.tensor(float(body), requires_grad=True)
        (x * x).backward()
        return str(x.grad)

    with torch.no_grad():
        assert client_of(1).command(9, b"3") == [b"tensor(6.)"]


def test_every_server_answers_with_what_its_own_function_gave() -> None:
    answers = client_of(3).command(7, "größe".encode())
    assert [answer.decode() for answer in answers] == [f"{at} of 3: größe #{at + 1}" for at in range(3)]


def test_a_local_store_answers_by_what_its_process_has_registered(calls: list[str]) -> None:
    assert LocalKVStore().send_command_to_servers(7, "hello") == ["0 of 1: hello #1"]
    assert calls == ["hello"]


def test_an_unknown_command_names_server_head_and_body_and_those_that_are_known() -> None:
    with pytest.raises(CommandError, match=r"server 0.*command 9 \(body 'x'\).*for: 7, 8"):
        client_of(2).command(9, b"x")


def test_a_function_that_raises_is_an_error_with_its_text_and_the_server_goes_on(calls: list[str]) -> None:
    client = client_of(1)
    with pytest.raises(CommandError, match=r"command 8 \(body 'do'\).*0: RuntimeError"):
        client.command(8, b"do")
    assert client.command(7, b"next") == [b"0 of 1: next #2"]


@pytest.mark.parametrize(
    ("given", "text"), [(None, "gave a NoneType on server 0"), ("ä" * (1 << 20), "gave 2097152 bytes")]
)
def test_an_answer_that_is_no_text_of_reasonable_length_is_an_error(given: Any, text: str) -> None:
    commands.register(9)(lambda body, context: given)
    with pytest.raises(CommandError, match=text):
        client_of(1).command(9, b"")


def test_a_body_that_is_no_text_never_reaches_the_function(calls: list[str]) -> None:
    with pytest.raises(CommandError, match="command 7"):
        client_of(1).command(7, b"\xff")
    assert not calls


def test_a_command_runs_once_although_its_answer_is_lost_and_it_is_sent_again(calls: list[str]) -> None:
    transport = Losing(Engine(EngineConfig()))
    client = Client(transport, SessionOptions("job", 0, 1), lambda: next(transport.seconds))
    client.connect()
    assert client.command(7, b"a") + client.command(7, b"b") == [b"0 of 1: a #1", b"0 of 1: b #2"]
    with pytest.raises(CommandError, match="cannot c"):
        client.command(8, b"c")
    assert calls == ["a", "b", "c"]


def ask(engine: Engine, session: int, number: int, body: str, head: int = 7) -> m.ReplyBody:
    [out] = engine.handle(
        PEER, m.Request(engine.config.run_id, session, number, m.Command(head, body.encode())), 0.0
    )
    return out.reply.body


def session_of(engine: Engine, nonce: bytes = b"nonce") -> int:
    hello = m.Hello("job", 0, 1, 0, 1, "", "host", nonce, (PEER,))
    [out] = engine.handle(PEER, m.Request(0, 0, 1, hello), 0.0)
    assert isinstance(out.reply.body, m.Welcome)
    return out.reply.body.session


def test_a_repetition_that_comes_after_a_later_command_is_not_run(calls: list[str]) -> None:
    engine = Engine(EngineConfig())
    session = session_of(engine)
    answers = [ask(engine, session, number, str(number)) for number in (3, 5, 3, 5)]
    assert calls == ["3", "5"]
    assert answers[1] == answers[3] == m.Status({"answer": b"0 of 1: 5 #2"})
    assert isinstance(answers[2], m.Failed)
    assert isinstance(ask(engine, session_of(engine, b"other"), 3, "other session"), m.Status)


def test_what_a_session_was_answered_is_forgotten_when_it_ends() -> None:
    engine = Engine(EngineConfig())
    client = client_of(1, [engine])
    client.command(7, b"a")
    [session] = engine._sessions
    assert session.command is not None
    client.close()
    assert session.command is None


@pytest.mark.parametrize("is_compacted", [False, True])
def test_a_command_whose_answer_was_lost_with_the_server_is_not_run_again(
    is_compacted: bool, calls: list[str]
) -> None:
    with contextlib.closing(HeldDescriptors()) as store:
        engine = durable_engine(store)
        session = session_of(engine)
        answers = [ask(engine, session, 3, "a"), ask(engine, session, 4, "b", head=8)]
        if is_compacted:
            assert engine._durability is not None
            engine._durability.compact(engine.namespaces, engine._sessions, engine._finished)
        following = durable_engine(store)
        assert ask(following, session, 4, "b", head=8) == answers[1]
        assert isinstance(ask(following, session, 3, "a"), m.Failed)
        assert calls == ["a", "b"]
        assert ask(following, session, 5, "c") == m.Status({"answer": b"0 of 1: c #3"})


@pytest.mark.parametrize("nth", [1, 2])
def test_a_command_whose_server_dies_runs_once_or_fails_and_never_runs_twice(
    nth: int, calls: list[str]
) -> None:
    with contextlib.closing(HeldDescriptors()) as store:
        engine = durable_engine(store)
        session = session_of(engine)
        # Commits of the log: that it has begun, and its answer.
        with pytest.raises(Crash), crash_at(("server.commit.begin", nth)):
            ask(engine, session, 3, "a")
        assert len(calls) == nth - 1
        answer = ask(durable_engine(store), session, 3, "a")
    assert calls == ["a"]
    # Nobody knows whether one that had begun and has no answer has done something.
    assert isinstance(answer, m.Status) if nth == 1 else "was killed while it ran" in answer.text  # type: ignore[union-attr]


def test_a_command_that_was_killed_while_it_ran_fails_and_does_not_run_again(calls: list[str]) -> None:
    @commands.register(9)
    def killed(body: str, _: CommandContext) -> str:
        calls.append(body)
        raise Crash("killed")

    with contextlib.closing(HeldDescriptors()) as store:
        engine = durable_engine(store)
        session = session_of(engine)
        with pytest.raises(Crash):
            ask(engine, session, 3, "a", head=9)
        following = durable_engine(store)
        answers = [ask(following, session, 3, "a", head=9) for _ in range(2)]
    assert calls == ["a"]
    assert [one.code for one in answers if isinstance(one, m.Failed)] == ["CommandError"] * 2


def test_a_number_that_is_registered_again_is_taken_over_with_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        commands.register(7)(lambda body, context: "new")
    assert "the handler of command 7 is replaced" in caplog.text
    assert client_of(1).command(7, b"") == [b"new"]


@pytest.mark.parametrize("head", [-1, 1 << 31, True, "7", None, 1.0])
def test_what_is_no_number_of_a_command_is_refused(head: Any) -> None:
    with pytest.raises(ConfigurationError, match="head"):
        commands.register(head)
    with pytest.raises(ConfigurationError, match="head"):
        LocalKVStore().send_command_to_servers(head, "")


@pytest.mark.parametrize(
    ("body", "text"),
    [(b"x", "must be a str, got bytes"), ("\ud800", "cannot be written as UTF-8"), ("x" * (1 << 20) + "x", "1048577")],
)  # fmt: skip
def test_a_body_that_cannot_travel_is_refused_before_anything_is_sent(
    body: Any, text: str, calls: list[str]
) -> None:
    with pytest.raises(ConfigurationError, match=text):
        LocalKVStore().send_command_to_servers(7, body)
    assert not calls


def test_the_longest_body_and_answer_fit_into_a_frame() -> None:
    text = bytes(commands.LONGEST)
    request = encode_frames(m.Request(1, 2, 3, m.Command((1 << 31) - 1, text)))
    reply = encode_frames(m.Reply(3, m.Status({"answer": text})))
    assert max(len(frame) for frame in (*request, *reply)) <= MAX_FRAME


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
    other = Client(
        LoopbackTransport([engine], time.monotonic), SessionOptions("other job", 0, 1), time.monotonic
    )
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
        Recording().handle(body, Ticking())


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
        encode_frames(m.Request(0, 0, 0, m.Status(recording.page(at))))[1:]
        for at in (0, 3000, 5999, 6000, 10**9)
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
        unpack_events([pack_control(values)])


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
