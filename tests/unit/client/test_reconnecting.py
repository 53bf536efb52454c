"""A connection to a server that is restarted: its end is seen at once, and nothing of it is mixed with the next one."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import zmq

from kvstore_server.budget import Budget
from kvstore_server.protocol import messages as m
from kvstore_server.protocol.frames import decode_frames, encode_frames
from kvstore_server.transport.arena import Leases
from kvstore_server.transport.channel import ChannelListener
from kvtrainer.client.connection import Connection
from tests.support.limits import LIMIT
from tests.support.messages import contribution
from tests.support.processes import Call, eventually

RUN, TOKEN = 1 << 40, 7


class _Server:
    """A server's socket that answers what it has read with `Pending`."""

    def __init__(self, address: str) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self._socket.bind(address)
        self.read: list[tuple[bytes, int]] = []
        """(socket of the worker, number) of all requests."""

    def answer(self, count: int = 1, why: str = "") -> None:
        for _ in range(count):
            assert self._socket.poll(1000 * int(LIMIT))
            peer, *frames = self._socket.recv_multipart()
            number = decode_frames(frames)[2]
            self.read.append((peer, number))
            self._socket.send_multipart([peer, *encode_frames(m.Reply(number, m.Pending((), why)))])

    def die(self) -> None:
        self._socket.close(linger=0)
        self._context.term()


@pytest.fixture
def address() -> str:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return f"tcp://127.0.0.1:{free.getsockname()[1]}"


@contextmanager
def serving(address: str) -> Iterator[_Server]:
    server = _Server(address)
    try:
        yield server
    finally:
        server.die()


@pytest.fixture
def connection(address: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Connection]:
    """To a server that is restarted, and whose process cannot be seen."""
    monkeypatch.setattr(Connection, "_watch", lambda *_: None)
    found = Connection([address], transport="tcp")
    yield found
    found.close()


def ask(connection: Connection, number: int) -> None:
    connection.send(0, m.Request(RUN, TOKEN, number, m.Heartbeat()))


def numbers(connection: Connection, seconds: float) -> list[int]:
    """The numbers of all replies that come until nothing comes for so long, or the end of a connection is seen."""
    found = []
    while (got := connection.receive(seconds)) is not None:
        found.append(got[1].number)
    return found


def begin(connection: Connection, server: _Server) -> None:
    ask(connection, 1)
    server.answer()
    connection.begin([(RUN, TOKEN)], restartable={0})


def test_the_end_of_a_connection_ends_a_wait_at_once(address: str, connection: Connection) -> None:
    with serving(address) as server:
        begin(connection, server)
        assert numbers(connection, 0.2) == [1]
    assert connection.receive(LIMIT) is None
    assert connection.disconnected == {0}


def test_the_end_of_a_connection_is_not_missed_beside_messages_that_came_with_it(
    address: str, connection: Connection
) -> None:
    with serving(address) as server:
        begin(connection, server)
        for number in range(2, 50):
            ask(connection, number)
        server.answer(48)
    assert eventually(lambda: connection.receive(0.0) is None and connection.disconnected == {0})


def test_without_a_restart_nobody_monitors_a_connection(address: str) -> None:
    connection = Connection([address], transport="tcp")
    try:
        with serving(address) as server:
            ask(connection, 1)
            server.answer()
            connection.begin([(RUN, TOKEN)])
        assert connection._monitors == {}
        numbers(connection, 0.2)
        assert connection.disconnected == set()
    finally:
        connection.close()


def test_a_new_connection_has_another_id_and_nothing_of_the_old_one_comes_over_it(
    address: str, connection: Connection
) -> None:
    with serving(address) as first:
        begin(connection, first)
        ask(connection, 2)  # its answer is lost with the connection
        first.answer()
    assert eventually(lambda: connection.receive(0.0) is None and connection.disconnected == {0})
    ask(connection, 3)  # held back, and dropped
    connection.reconnect(0)
    assert connection.disconnected == set()
    ask(connection, 4)
    with serving(address) as second:
        second.answer()
        assert [number for _, number in second.read] == [4]
        assert numbers(connection, 0.2) == [4]
    former, new = first.read[0][0], second.read[0][0]
    assert former != new
    assert {former, new} <= set(connection.sockets(0))


def test_a_connection_can_be_replaced_more_often_than_it_has_ids(
    address: str, connection: Connection
) -> None:
    with serving(address) as server:
        begin(connection, server)
        for number in range(2, 22):
            connection.reconnect(0)
            ask(connection, number)
            server.answer()
            assert connection.receive(LIMIT) == (0, m.Reply(number, m.Pending(())))
        assert len({peer for peer, _ in server.read}) == m.MAX_SOCKETS - 1


def test_a_server_that_is_back_shares_memory_again(address: str) -> None:
    connection = Connection([address])
    budget = Budget(0, 0, lambda: 1 << 30)
    try:
        with serving(address) as server:
            ask(connection, 1)
            server.answer()
            memory = ChannelListener(RUN, lambda _, token: token == TOKEN, budget, Leases())
            opening: Any = Call(lambda: connection.begin([(RUN, TOKEN)], restartable={0}))
            assert eventually(lambda: bool(memory.receive(lambda *_: None) or memory.channels))
            opening.outcome()
            first = connection.channel(0)
            assert first is not None
            connection.send(0, m.Request(RUN, TOKEN, 2, contribution([(0, torch.zeros(1 << 20))], 1)))
            memory.close()
        connection.reconnect(0)
        assert connection.channel(0) is None
        with serving(address) as server:
            memory = ChannelListener(RUN, lambda _, token: token == TOKEN, budget, Leases())
            opening = Call(lambda: connection.reopen(0, RUN, TOKEN))
            assert eventually(lambda: bool(memory.receive(lambda *_: None) or memory.channels))
            assert opening.outcome()
            assert connection.channel(0) not in (None, first)
            assert list(memory.channels) == [connection._own_id(0)]
            memory.close()
    finally:
        connection.close()


def test_where_only_memory_is_allowed_a_server_without_it_is_not_back_yet(address: str) -> None:
    connection = Connection([address], transport="shm")
    try:
        connection._restartable = {0}
        assert not connection.reopen(0, RUN, TOKEN)
    finally:
        connection.close()
