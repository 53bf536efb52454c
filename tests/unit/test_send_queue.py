"""Messages that wait for their turn, and a connection in which urgent ones overtake others."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import zmq

from kvstore_server.protocol import messages as m
from kvstore_server.protocol.frames import decode_request
from kvtrainer.comm.connection import Connection
from kvtrainer.comm.send_queue import SendQueue
from tests.support.said import contribution


class Network:
    """Takes a number of messages at a time."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.taken: list[Any] = []

    def send(self, frames: list[Any]) -> bool:
        if not self.room:
            return False
        self.room -= 1
        self.taken += frames
        return True


def test_urgent_messages_overtake_those_that_wait_and_equal_ones_keep_their_order() -> None:
    network = Network(room=1)
    queue = SendQueue(True, network.send)
    for name, priority in [("a", -3), ("b", -3), ("c", -1), ("d", -3), ("e", -1), ("f", 0)]:
        queue.put([name], priority)
    assert (network.taken, len(queue)) == (["a"], 5)
    network.room = 10
    queue.flush()
    assert (network.taken, len(queue)) == (["a", "f", "c", "e", "b", "d"], 0)


def test_a_message_that_is_put_when_there_is_room_lets_those_before_it_go_first() -> None:
    network = Network(room=0)
    queue = SendQueue(True, network.send)
    queue.put(["a"], 0)
    network.room = 5
    queue.put(["b"], 0)
    assert network.taken == ["a", "b"]


def test_without_an_order_nothing_waits_and_priorities_mean_nothing() -> None:
    network = Network(room=9)
    queue = SendQueue(False, network.send)
    for name, priority in [("a", 0), ("b", 7)]:
        queue.put([name], priority)
    assert (network.taken, len(queue)) == (["a", "b"], 0)


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
            numbers.append(decode_request(socket.recv_multipart()[1:]).number)
    return numbers


def test_an_urgent_push_arrives_before_others_that_were_pushed_first(listener: Any) -> None:
    address = listener.getsockopt_string(zmq.LAST_ENDPOINT)
    connection = Connection([address], water_mark=1)
    large = torch.zeros(1 << 18)
    try:
        for number in range(1, 41):
            connection.send(0, m.Request(1, 1, number, contribution([(0, large)], 1)), priority=-number)
        connection.send(0, m.Request(1, 1, 99, m.Heartbeat()), priority=5)
        order = numbers_read(listener, connection, 41)
    finally:
        connection.close()
    assert sorted(order) == [*range(1, 41), 99]
    assert order.index(99) < 20, "it has waited for its turn behind all others"
    assert [n for n in order if n != 99] == list(range(1, 41))
