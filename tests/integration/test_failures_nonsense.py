"""What a server makes of peers that talk nonsense: it answers what it can and serves everybody else."""

from __future__ import annotations

import random
import socket
import struct
from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest
import zmq

from kvstore_server.optimizer.base import capability
from kvstore_server.protocol import messages as m
from kvstore_server.protocol.frames import MAX_FRAME, decode_reply, encode_request
from tests.support.messages import contribution
from tests.support.processes import Process, Processes, assert_serve

OWN = b"socket of a test"
"""The routing id of `peer`."""


@pytest.fixture(scope="module")
def server() -> Iterator[Process]:
    """A server that all tests here may talk nonsense to."""
    with Processes() as processes:
        yield processes.servers(1)[0]


@pytest.fixture
def peer(server: Process) -> Iterator[zmq.Socket[bytes]]:
    """A raw ZeroMQ connection to the server."""
    context = zmq.Context()
    raw = context.socket(zmq.DEALER)
    raw.setsockopt(zmq.ROUTING_ID, OWN)
    raw.connect(server.address)
    try:
        yield raw
    finally:
        raw.close(linger=1000)
        context.term()


def test_random_messages_do_not_disturb_a_server(server: Process, peer: zmq.Socket[bytes]) -> None:
    rng = random.Random(0)
    for _ in range(300):
        peer.send_multipart(
            [rng.randbytes(rng.choice([0, 1, 31, 32, 33, 200])) for _ in range(rng.randint(1, 5))]
        )
    for _ in range(300):
        reply = decode_reply(_answer(peer))
        assert isinstance(reply.body, m.Failed)
        assert reply.body.code in ("ProtocolError", "VersionMismatchError")
    assert_serve([server])


def test_damaged_messages_of_this_protocol_do_not_disturb_a_server(
    server: Process, peer: zmq.Socket[bytes]
) -> None:
    rng = random.Random(1)
    valid = [list(map(bytes, encode_request(m.Request(0, 0, 1, body)))) for body in _bodies()]
    for _ in range(500):
        frames = [bytearray(frame) for frame in rng.choice(valid)]
        damaged = rng.choice(frames[1:])
        at = rng.randrange(len(damaged) + 1)
        damaged[at : at + 8] = rng.choice([b"", b"\xff" * 8, struct.pack("<q", 1 << 62), rng.randbytes(8)])
        peer.send_multipart([bytes(frame) for frame in frames])
    answered = [decode_reply(_answer(peer)).body for _ in range(500)]
    assert all(isinstance(body, m.Failed | m.Welcome) for body in answered)
    assert any(isinstance(body, m.Failed) and body.code == "ProtocolError" for body in answered)
    assert_serve([server])


def test_requests_without_a_session_are_refused_whatever_they_ask(
    server: Process, peer: zmq.Socket[bytes]
) -> None:
    for body in _bodies()[1:]:
        peer.send_multipart(encode_request(m.Request(run=1, session=1, number=5, body=body)))
        reply = decode_reply(_answer(peer))
        assert reply.number == 5
        assert isinstance(reply.body, m.Failed)
        assert reply.body.code == "ServerLostState"


def test_a_frame_above_the_limit_costs_only_its_sender_the_connection(
    server: Process, peer: zmq.Socket[bytes]
) -> None:
    peer.send(bytes(MAX_FRAME + 1))
    assert_serve([server])


def test_refused_messages_do_not_fill_the_log(server: Process, peer: zmq.Socket[bytes]) -> None:
    before = server.stderr().count("refused a message")
    for _ in range(2000):
        peer.send(b"nonsense")
    for _ in range(2000):
        _answer(peer)
    # 20 in ten seconds, and this takes minutes on no machine.
    assert server.stderr().count("refused a message") - before < 1000


def test_bytes_that_are_not_zeromq_do_not_disturb_a_server(server: Process) -> None:
    where = urlsplit(server.address)
    for data in (b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 64, b""):
        with socket.create_connection((where.hostname, where.port)) as connection:
            connection.sendall(data)
    assert_serve([server])


def _answer(peer: zmq.Socket[bytes]) -> list[bytes]:
    assert peer.poll(10_000), "the server did not answer"
    return peer.recv_multipart()


def _bodies() -> list[m.RequestBody]:
    """One request of each kind."""
    return [
        m.Hello("nonsense", 0, 1, 0, 1, capability(), "here:1", bytes(16), (OWN,)),
        m.Register("w", (("w", (16,), "float32", 0, False),), False),
        contribution([(0, b"\0" * 64), (1, b"\0" * 64)], 0, table=0, given=1, absent=((0, 1), (0, 2))),
        m.Abort(0, 0, "because", False),
        m.Pull((0,)),
        m.SetOptimizer(b"\x80"),
        m.Gather(0, 1.0),
        m.GetState(0, 0),
        m.State(0, 0, {"a": 1}, b"data"),
        m.Leave("bye", True),
        m.Stats(),
    ]
