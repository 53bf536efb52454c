"""A connection in which few messages may be on their way: urgent ones overtake others."""

from __future__ import annotations

import errno
import logging
import secrets
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import zmq

from kvstore_server.budget import Budget
from kvstore_server.errors import KVStoreError, ServerStoppingError, to_wire
from kvstore_server.protocol import messages as m
from kvstore_server.protocol.frames import decode_frames, encode_frames
from kvstore_server.transport.arena import Leases
from kvstore_server.transport.channel import ChannelListener
from kvtrainer.client import connection as connections
from kvtrainer.client.connection import Connection
from tests.support.messages import contribution
from tests.support.processes import Call, eventually


@pytest.fixture
def listener() -> Iterator[Any]:
    """A server's socket that takes few messages while nobody reads."""
    with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
        socket.setsockopt(zmq.RCVHWM, 1)
        socket.setsockopt(zmq.RCVBUF, 1 << 16)
        socket.setsockopt(zmq.LINGER, 0)
        socket.bind("tcp://127.0.0.1:0")
        yield socket


def numbers_read(socket: Any, connection: Connection, count: int) -> list[int]:
    numbers = []
    while len(numbers) < count:
        connection.receive(0.0)  # lets what queues go out
        if socket.poll(1000):
            numbers.append(decode_frames(socket.recv_multipart(copy=False)[1:])[2])
    return numbers


@pytest.mark.parametrize(("water_mark", "overtakes"), [(1, True), (0, False)])
def test_an_urgent_push_overtakes_others_only_where_they_queue(
    listener: Any, water_mark: int, overtakes: bool
) -> None:
    connection = Connection([listener.getsockopt_string(zmq.LAST_ENDPOINT)], water_mark)
    large = torch.zeros(1 << 18)
    try:
        for number in range(1, 41):
            connection.send(
                0, m.Request(1, 1, number, contribution([(0, large)], 1)), priority=-(number // 20)
            )
        for number in (98, 99):
            connection.send(0, m.Request(1, 1, number, m.Heartbeat()), priority=5)
        order = numbers_read(listener, connection, 42)
    finally:
        connection.close()
    # Messages of one priority keep their order.
    assert [n for n in order if n < 98] == list(range(1, 41))
    assert order.index(98) + 1 == order.index(99)
    assert (order.index(98) < 20) == overtakes


RUN, TOKEN = secrets.randbits(60), 7


@pytest.mark.parametrize("says_farewell", [True, False])
def test_to_close_after_a_server_has_ended_warns_of_nothing(
    listener: Any, caplog: pytest.LogCaptureFixture, says_farewell: bool
) -> None:
    connection = Connection([listener.getsockopt_string(zmq.LAST_ENDPOINT)])
    memory = ChannelListener(
        RUN, lambda _peer, token: token == TOKEN, Budget(0, 0, lambda: 1 << 30), Leases()
    )
    beginning = Call(lambda: connection.begin([(RUN, TOKEN)]))
    assert eventually(lambda: bool(memory.receive(lambda *_: None) or memory.channels))
    assert beginning.outcome() is None
    [channel] = memory.channels.values()
    assert channel.send(encode_frames(m.Reply(1, m.Status({}))))
    assert connection.receive(1.0) is not None
    if says_farewell:
        farewell = m.Failed(*to_wire(ServerStoppingError("stopped")))
        assert channel.send(encode_frames(m.Reply(0, farewell)))
    memory.close()
    caplog.set_level(logging.INFO)
    connection.send(0, m.Request(RUN, TOKEN, 2, m.Leave("", True)))
    connection.close()
    assert not caplog.records


NOBODY = ConnectionRefusedError(errno.ECONNREFUSED, "nobody listens")


@pytest.mark.parametrize(
    ("address", "error", "is_said"),
    [
        ("tcp://127.0.0.1:5555", NOBODY, True),
        ("tcp://[::1]:5555", NOBODY, True),
        ("tcp://localhost:5555", NOBODY, True),
        ("tcp://192.0.2.1:5555", NOBODY, False),
        ("tcp://192.0.2.1:5555", OSError(errno.ENOSYS, "no such memory"), False),
        ("tcp://192.0.2.1:5555", PermissionError("another user"), True),
        ("tcp://192.0.2.1:5555", OSError(errno.ENOMEM, "no memory"), True),
    ],
)
def test_a_worker_says_why_it_shares_no_memory_with_a_server_of_its_host_whatever_its_address(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    address: str,
    error: OSError,
    is_said: bool,
) -> None:
    def refuse(*_: object) -> None:
        raise error

    monkeypatch.setattr(connections, "connect_channel", refuse)
    connection = Connection([address])
    connection.begin([(RUN, TOKEN)])
    connection.close()
    assert [record.levelno for record in caplog.records] == [logging.WARNING] * is_said


@pytest.mark.parametrize(
    ("host", "is_remote"),
    [("127.0.0.1", False), ("[::1]", False), ("localhost", False), ("192.0.2.1", True), ("node7", True)],
)
def test_a_network_lies_between_a_worker_and_servers_that_are_not_on_loopback(
    host: str, is_remote: bool
) -> None:
    connection = Connection([f"tcp://{host}:5555"], transport="tcp")
    assert connection.is_remote(0) == is_remote
    connection.close()


@pytest.fixture
def collected(listener: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Connection, list[Any]]]:
    """A connection that the thread of its heartbeats closes once it has begun, and what came of the call."""
    monkeypatch.setattr(connections, "HEARTBEAT_INTERVAL", 0.01)
    connection = Connection([listener.getsockopt_string(zmq.LAST_ENDPOINT)], transport="tcp")
    outcomes: list[Any] = []

    def collect() -> bytes:
        if not outcomes:
            try:
                outcomes.append(connection.close())
            except Exception as error:
                outcomes.append(error)
        return b""

    begin = connection.begin
    monkeypatch.setattr(connection, "begin", lambda: begin([(RUN, TOKEN)], collect))
    yield connection, outcomes
    connection.close()


def test_the_end_of_the_thread_of_heartbeats_is_said_and_raised_where_the_worker_waits(
    listener: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> bytes:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(connections, "HEARTBEAT_INTERVAL", 0.01)
    connection = Connection([listener.getsockopt_string(zmq.LAST_ENDPOINT)], transport="tcp")
    assert connection.receive(0.0) is None
    connection.begin([(RUN, TOKEN)], fail)
    assert eventually(lambda: connection._heartbeats is not None and connection._heartbeats.error is not None)
    with pytest.raises(KVStoreError, match=r"that it is alive.*Too many open files"):
        connection.receive(0.0)
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    connection.close()


def test_the_thread_of_its_heartbeats_may_close_a_connection_when_it_collects_its_store(
    collected: Any,
) -> None:
    connection, outcomes = collected
    connection.begin()
    assert eventually(lambda: outcomes != [])
    assert outcomes == [None]
    assert eventually(lambda: connection._context.closed)


def test_a_process_that_ends_waits_until_a_connection_is_closed_that_its_heartbeats_have_collected(
    collected: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    connection, _ = collected
    threads: list[threading.Thread] = []
    monkeypatch.setattr(connection, "_drain", lambda server: threads.append(threading.current_thread()))
    connection._answered.add(0)
    connection.begin()
    assert eventually(lambda: threads != [])
    assert not threads[0].daemon
