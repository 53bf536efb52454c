"""Sessions with scripted servers: who is asked, how often and how long, and what is raised when nobody answers."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

from kvstore_server.engine.engine import Engine
from kvstore_server.engine.namespace import EngineConfig
from kvstore_server.plan import TensorSpec
from kvstore_server.processes import FINAL_MESSAGE_TIME, ProcessState
from kvstore_server.protocol import messages as m
from kvstore_server.protocol.frames import KEYS_PER_MESSAGE, MAX_FRAME, encode_frames
from kvtrainer.client.client import Client, LoopbackTransport
from kvtrainer.client.session import REPEAT_AFTER, Session, SessionOptions
from kvtrainer.errors import (
    ConfigurationError,
    ConnectTimeoutError,
    FencedError,
    KVStoreError,
    ServerLostState,
    ServerStoppingError,
    ServerUnreachableError,
    VersionMismatchError,
)
from tests.support.scripted import Scripted


def _connecting(servers: Scripted, **options: float) -> Session:
    return Session(servers, SessionOptions("job", 1, 3, **options), servers.clock)  # type: ignore[arg-type]


def test_every_request_carries_what_its_server_gave_at_the_welcome() -> None:
    servers = Scripted(2)
    session = servers.session()
    session.send(1, session.next_number(), m.Stats())
    [(to, request)] = servers.sent
    assert (to, request.run_id, request.session) == (1, 1001, 11)
    assert servers.heartbeats == [(1000, 10), (1001, 11)]


def test_a_hello_says_who_the_worker_is_and_which_server_it_expects() -> None:
    servers = Scripted(2)
    _connecting(servers).connect()
    hellos = servers.bodies(m.Hello)
    assert [(h.rank, h.num_workers, h.server, h.num_servers) for h in hellos] == [(1, 3, 0, 2), (1, 3, 1, 2)]


def test_a_server_that_does_not_answer_hello_is_named_at_the_end_of_the_time_to_connect() -> None:
    servers = Scripted(2, lambda server, request: [] if server == 1 else None)
    with pytest.raises(ConnectTimeoutError, match=r"server 1 \(here\).*within 7"):
        _connecting(servers, connect_timeout=7.0).connect()
    assert servers.now == 107.0
    assert not servers.heartbeats


def test_a_hello_that_gets_lost_is_repeated_word_for_word_until_it_is_answered() -> None:
    servers = Scripted(1, lambda server, request: [] if servers.now < 120.0 else None)
    session = _connecting(
        servers, connect_timeout=30.0, dead_after=8.0
    )  # dead_after is for who was there once
    session.connect()
    assert servers.heartbeats == [(1000, 10)]
    assert len(servers.sent) > 5
    assert len({(request.number, request.body) for _, request in servers.sent}) == 1


def test_hellos_of_two_sessions_of_a_process_are_told_apart() -> None:
    servers = Scripted(1)
    for _ in range(2):
        _connecting(servers).connect()
    assert len({hello.nonce for hello in servers.bodies(m.Hello)}) == 2  # type: ignore[union-attr]


def test_all_servers_are_asked_even_when_one_refuses_and_the_first_refusal_is_raised() -> None:
    servers = Scripted(
        3, lambda server, request: [m.Failed("ConfigurationError", f"no {server}")] if server else None
    )
    session = _connecting(servers)
    with pytest.raises(ConfigurationError, match="no 1"):
        session.connect()
    assert [to for to, _ in servers.sent] == [0, 1, 2]
    session.close("refused", is_clean=False)
    assert [to for to, request in servers.sent if isinstance(request.body, m.Leave)] == [0]


def test_a_call_returns_the_answer_and_raises_a_failure_as_its_class() -> None:
    servers = Scripted(1)
    session = servers.session()
    servers.answer = lambda server, request: [m.Status({"a": 1})]
    assert session.call(0, m.Stats()) == m.Status({"a": 1})
    servers.answer = lambda server, request: [m.Failed("FencedError", "taken over")]
    with pytest.raises(FencedError, match="taken over"):
        session.call(0, m.Stats())


def test_an_unknown_code_of_a_failure_is_still_one_of_our_errors() -> None:
    servers = Scripted(1)
    session = servers.session()
    servers.answer = lambda server, request: [m.Failed("NewerError", "from the future")]
    with pytest.raises(KVStoreError, match="from the future"):
        session.call(0, m.Stats())


def test_an_unanswered_call_is_repeated_under_its_number_until_the_server_counts_as_gone() -> None:
    servers = Scripted(1)
    session = servers.session(dead_after=9.0)
    with pytest.raises(ServerUnreachableError, match=r"server 0 \(here\)"):
        session.call(0, m.Stats())
    assert len({request.number for _, request in servers.sent}) == 1
    assert len(servers.sent) >= 9.0 / REPEAT_AFTER
    assert servers.now == pytest.approx(109.0, abs=REPEAT_AFTER)


def test_a_long_wait_names_the_silent_server_not_one_that_gives_signs_of_life(
    caplog: pytest.LogCaptureFixture,
) -> None:
    servers = Scripted(2)
    session = servers.session(dead_after=20.0)
    servers.signs[0] = servers.now + 20.0
    with pytest.raises(ServerUnreachableError, match="server 1"):
        session.call(1, m.Stats())
    assert "server 1 (here) was last heard" in caplog.text
    assert "server 0" not in caplog.text
    assert "more)" not in caplog.text


def test_a_server_is_asked_again_before_it_counts_as_gone_however_short_the_patience() -> None:
    servers = Scripted(1)
    session = servers.session(dead_after=0.5)
    with pytest.raises(ServerUnreachableError):
        session.call(0, m.Stats())
    assert len(servers.sent) > 1


def test_pending_is_no_answer_but_shows_that_the_server_lives() -> None:
    servers = Scripted(1)
    session = servers.session(dead_after=5.0)
    servers.answer = lambda server, request: [m.Pending((1,))] if servers.now < 150 else [m.Status()]
    assert session.call(0, m.Gather(0, 60.0), timeout=60.0) == m.Status()


def _asked(server: int) -> SimpleNamespace:
    return SimpleNamespace(server=server)


def test_a_server_that_has_just_been_heard_is_not_asked_again() -> None:
    servers = Scripted(2)
    session = servers.session()
    servers.reply(0, 0, m.Status(), after=3.0)
    again: list[int] = []
    assert not session.wait([_asked(0), _asked(1)], lambda one: again.append(one.server), 100.0, 3.5)
    assert again == [0, 1, 1]  # after 2 s both, and at the end one of them alone


def test_a_server_that_answers_heartbeats_is_alive_however_long_an_answer_takes() -> None:
    servers = Scripted(1)
    session = servers.session(dead_after=5.0)
    receive = servers.receive

    def alive(timeout: float) -> tuple[int, m.Reply] | None:
        servers.signs[0] = servers.now
        return receive(timeout)

    servers.receive = alive  # type: ignore[method-assign]
    servers.answer = lambda server, request: [m.Status()] if servers.now > 130.0 else []
    assert session.call(0, m.Stats(), timeout=60.0) == m.Status()
    assert len(servers.sent) > 10  # but a request that may be lost is repeated all the same


def test_a_process_that_stood_still_does_not_blame_the_servers() -> None:
    servers = Scripted(1)
    session = servers.session(dead_after=5.0)
    receive = servers.receive

    def stopped_once(timeout: float) -> tuple[int, m.Reply] | None:
        # What a process sees that was stopped and goes on: time is over, and what has come is yet to be read.
        servers.receive = receive  # type: ignore[method-assign]
        servers.now += 60.0
        return None

    servers.receive = stopped_once  # type: ignore[method-assign]
    servers.answer = lambda server, request: [m.Status()]
    assert session.call(0, m.Stats()) == m.Status()


def test_a_wait_ends_at_its_deadline_even_while_something_keeps_coming() -> None:
    servers = Scripted(1)
    session = servers.session()
    for i in range(1000):
        servers.reply(0, 0, m.Status(), after=0.1 * i)
    assert not session.wait([_asked(0)], lambda one: None, servers.now, 5.0)
    assert servers.now == pytest.approx(105.0, abs=0.2)


def test_what_a_server_could_not_even_read_is_raised_where_somebody_waits() -> None:
    servers = Scripted(1)
    session = servers.session()
    servers.reply(0, 0, m.Failed("VersionMismatchError", "another version"))
    with pytest.raises(VersionMismatchError, match="another version"):
        session.call(0, m.Stats())


def test_a_late_answer_to_an_earlier_call_is_not_taken_for_the_next_one() -> None:
    servers = Scripted(1)
    session = servers.session(dead_after=3.0)
    with pytest.raises(ServerUnreachableError):
        session.call(0, m.Stats())
    servers.reply(0, servers.sent[0][1].number, m.Status({"late": True}))
    servers.answer = lambda server, request: [m.Status({"late": False})]
    assert session.call(0, m.Stats()) == m.Status({"late": False})


def test_many_calls_share_one_wait_and_return_what_came() -> None:
    def answer(server: int, request: m.Request) -> list[m.ReplyBody] | None:
        if isinstance(request.body, m.Abort):
            return [[m.Status({"applied": True})], [m.Failed("FencedError", "no")], []][server]
        return None

    servers = Scripted(3, answer)
    session = servers.session()
    aborts = [(server, m.Abort(0, 1, "why", False)) for server in (2, 0, 1, 2)]
    before = servers.now
    answers = session.ask_all(aborts, timeout=5.0)
    assert answers == [None, m.Status({"applied": True}), m.Failed("FencedError", "no"), None]
    assert servers.now == before + 5.0


def test_a_server_known_to_be_gone_is_told_but_not_waited_for() -> None:
    servers = Scripted(2)
    session = servers.session(dead_after=3.0)
    servers.answer = lambda server, request: [] if server == 1 else None
    with pytest.raises(ServerUnreachableError):
        session.call(1, m.Stats())
    before = servers.now
    abort = m.Abort(0, 1, "why", False)
    assert session.ask_all([(0, abort), (1, abort)], timeout=5.0) == [m.Status({"applied": False}), None]
    assert servers.now == before
    assert servers.bodies(m.Abort, server=1) == [abort]


def test_a_server_whose_process_has_ended_is_named_without_waiting_for_its_silence() -> None:
    servers = Scripted(2, lambda server, request: [] if isinstance(request.body, m.Stats) else None)
    session = servers.session(dead_after=60.0)
    servers.ended.add(1)
    with pytest.raises(ServerUnreachableError, match=r"server 1 \(here\) was killed by signal 9"):
        session.call(1, m.Stats())
    assert servers.now <= 100.0 + 3 * FINAL_MESSAGE_TIME
    assert session.ask_all([(1, m.Stats())], timeout=5.0) == [None]
    assert servers.now <= 100.0 + 3 * FINAL_MESSAGE_TIME


def test_a_server_in_the_place_of_a_dead_one_is_heard_by_later_calls() -> None:
    servers = Scripted(1, lambda server, request: [] if isinstance(request.body, m.Stats) else None)
    session = servers.session(dead_after=60.0)
    servers.ended.add(0)
    with pytest.raises(ServerUnreachableError):
        session.call(0, m.Stats())
    servers.reply(0, session._last_number + 1, m.Failed("ServerLostState", "restarted"), after=1.0)
    with pytest.raises(ServerLostState):
        session.call(0, m.Stats())
    with pytest.raises(ServerUnreachableError):
        session.call(0, m.Stats())


def test_the_end_of_a_server_that_nobody_waits_for_is_no_error() -> None:
    servers = Scripted(2, lambda server, request: [] if isinstance(request.body, m.Stats) else None)
    session = servers.session(dead_after=60.0)
    servers.ended.add(1)
    servers.reply(0, session._last_number + 1, m.Status(), after=30.0)
    assert session.call(0, m.Stats()) == m.Status()


def test_what_a_server_has_said_before_its_process_ended_is_heard_first() -> None:
    servers = Scripted(1, lambda server, request: [] if isinstance(request.body, m.Stats) else None)
    session = servers.session(dead_after=60.0)
    servers.ended.add(0)
    servers.reply(0, session._last_number + 1, m.Status(), after=0.8 * FINAL_MESSAGE_TIME)
    assert session.call(0, m.Stats()) == m.Status()
    servers.reply(0, 0, FAREWELL, after=0.8 * FINAL_MESSAGE_TIME)
    with pytest.raises(ServerStoppingError):
        session.call(0, m.Stats())


def test_a_silent_server_that_is_seen_to_work_has_as_long_as_in_a_round() -> None:
    servers = Scripted(1, lambda server, request: [] if isinstance(request.body, m.Stats) else None)
    session = servers.session(dead_after=8.0, timeout=100.0)
    servers.states[0] = ProcessState.RUNS
    servers.reply(0, session._last_number + 1, m.Status(), after=90.0)
    assert session.call(0, m.Stats()) == m.Status()
    with pytest.raises(ServerUnreachableError, match="within 100 s"):
        session.call(0, m.Stats())
    assert servers.now == pytest.approx(290.0)


def test_a_silent_server_that_is_stopped_counts_as_gone_and_the_error_says_so() -> None:
    servers = Scripted(1, lambda server, request: [] if isinstance(request.body, m.Gather) else None)
    session = servers.session(dead_after=8.0, timeout=100.0)
    servers.states[0] = ProcessState.STOPPED
    with pytest.raises(ServerUnreachableError, match="its process is paused"):
        session.call(0, m.Gather(0, 100.0), timeout=100.0)
    assert servers.now == pytest.approx(108.0, abs=REPEAT_AFTER)


FAREWELL = m.Failed("ServerStoppingError", "server 1 was stopped")


def test_a_server_that_says_farewell_is_named_at_once_by_the_call_that_waits_for_it_and_by_later_ones() -> (
    None
):
    servers = Scripted(2)
    session = servers.session(dead_after=60.0)
    servers.reply(1, 0, FAREWELL, after=3.0)
    for _ in range(2):
        with pytest.raises(ServerStoppingError, match=r"server 1 \(here\)"):
            session.call(1, m.Stats())
        assert servers.now == 103.0


def test_a_farewell_does_not_disturb_what_another_server_is_asked() -> None:
    servers = Scripted(2, lambda server, request: [m.Status()] if isinstance(request.body, m.Stats) else None)
    session = servers.session(dead_after=60.0)
    servers.reply(1, 0, FAREWELL)
    assert session.call(0, m.Stats()) == m.Status()
    assert session.ask_all([(0, m.Stats()), (1, m.Stats())], timeout=5.0) == [m.Status(), None]
    assert servers.now == 100.0


def test_a_farewell_ends_the_wait_for_the_answers_of_all_servers_only_where_it_must() -> None:
    servers = Scripted(2, lambda server, request: [] if isinstance(request.body, m.Stats) else None)
    session = servers.session(dead_after=60.0)
    servers.reply(1, 0, FAREWELL, after=1.0)
    servers.reply(0, session._last_number + 1, m.Status(), after=2.0)
    assert session.ask_all([(0, m.Stats()), (1, m.Stats())], timeout=30.0) == [m.Status(), None]
    assert servers.now == 102.0


def test_closing_says_goodbye_once_to_every_server_and_refuses_later_requests() -> None:
    servers = Scripted(2)
    session = servers.session()
    session.close("it is done", is_clean=True)
    session.close("again", is_clean=True)
    assert servers.bodies(m.Leave) == [m.Leave("it is done", True)] * 2
    assert servers.is_closed
    with pytest.raises(KVStoreError):
        session.call(0, m.Stats())


def test_who_has_heard_that_a_server_lost_the_job_leaves_for_that_reason_however_its_loop_ends() -> None:
    servers = Scripted(2)
    sessions = [servers.session() for _ in range(2)]
    servers.answer = lambda server, request: [m.Failed("ServerLostState", "restarted")] if server else None
    for session, is_clean in zip(sessions, (True, False), strict=True):
        with pytest.raises(ServerLostState):
            session.call(1, m.Stats())
        session.close("ValueError: nan", is_clean)
    reasons = [("ServerLostState: restarted", False), ("ValueError: nan", False)]
    assert servers.bodies(m.Leave, 0) == [m.Leave(*reason) for reason in reasons]


@pytest.mark.parametrize(("holders", "is_clean"), [(None, False), ({0, 1}, False), ({0}, True)])
def test_a_server_that_holds_nothing_of_the_job_has_lost_nothing(
    holders: set[int] | None, is_clean: bool
) -> None:
    servers = Scripted(2)
    session = servers.session()
    servers.answer = lambda server, request: [m.Failed("ServerLostState", "restarted")] if server else None
    with pytest.raises(ServerLostState):
        session.call(1, m.Stats())
    session.close("it is done", True, holders)
    assert [leave.is_clean for leave in servers.bodies(m.Leave, 0)] == [is_clean]


def test_a_table_of_very_many_keys_is_declared_in_portions_and_by_the_next_worker_at_a_glance() -> None:
    engine = Engine(EngineConfig())
    specs = [TensorSpec(f"layer.{i}.weight", (2,), "float32") for i in range(2 * KEYS_PER_MESSAGE + 1)]
    sent: list[int] = []
    for rank in range(2):
        transport = LoopbackTransport([engine], time.monotonic, b"%d" % rank)
        client = Client(transport, SessionOptions("job", rank, 2), time.monotonic)
        client.connect()
        send = transport.send

        def counting(server: int, request: m.Request, priority: int = 0, send: Any = send) -> None:
            if isinstance(request.body, m.Register):
                sent.append(len(request.body.specs))
                encode_frames(request)
            send(server, request, priority)

        transport.send = counting  # type: ignore[method-assign]
        [table] = client.register({"w": specs})
        assert table.numbers == {0: 0}
    assert sent == [KEYS_PER_MESSAGE, KEYS_PER_MESSAGE, 1, KEYS_PER_MESSAGE]


def test_a_table_with_very_long_names_is_declared_in_messages_that_servers_take() -> None:
    specs = [TensorSpec(f"{i:01024d}", (2,), "float32") for i in range(1500)]
    transport = LoopbackTransport([Engine(EngineConfig())], time.monotonic)
    send = transport.send
    sizes: list[int] = []

    def encoding(server: int, request: m.Request, priority: int = 0) -> None:
        sizes.append(sum(map(len, encode_frames(request))))
        send(server, request, priority)

    transport.send = encoding  # type: ignore[method-assign]
    client = Client(transport, SessionOptions("job", 0, 1), time.monotonic)
    client.connect()
    client.register({"w": specs})
    assert sum(sizes) > MAX_FRAME


def test_a_namespace_with_a_name_that_is_too_long_is_refused_before_anything_is_sent() -> None:
    servers = Scripted()
    session = Session(servers, SessionOptions("n" * 1025, 0, 1), servers.clock)
    with pytest.raises(ConfigurationError, match="of 1025"):
        session.connect()
    assert servers.sent == []


@pytest.mark.parametrize(("table", "key"), [("w", "k" * 70_000), ("w" * 70_000, "k")])
def test_a_key_or_table_with_a_name_that_is_too_long_is_refused_before_anything_is_sent(
    table: str, key: str
) -> None:
    servers = Scripted()
    client = Client(servers, SessionOptions("job", 0, 1), servers.clock)
    client.connect()
    servers.sent.clear()
    with pytest.raises(ConfigurationError, match="of 70000"):
        client.register({table: [TensorSpec(key, (2,), "float32")]})
    assert servers.sent == []
