"""What peers that talk nonsense, or are no members of a job, can do to it and to the server: nothing.

And what a member whose connections are cut still can, because it comes back as itself.
"""

from __future__ import annotations

import os
import random
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import torch
import zmq

import kvtrainer
from kvstore_server.optimizer.base import capability
from kvstore_server.probe import HEADER
from kvstore_server.protocol import messages as m
from kvstore_server.protocol.frames import MAX_FRAME, decode_frames, encode_frames
from kvstore_server.server import ServerOptions, make_server
from kvtrainer.client import connection, session
from kvtrainer.errors import FencedError
from kvtrainer.kvstore import DistKVStore
from tests.support.lossy import LinkProxy
from tests.support.messages import contribution
from tests.support.processes import (
    LIMIT,
    Members,
    Process,
    Processes,
    assert_serve,
    config_of_server,
    eventually,
    new_name,
    round_of,
    serving,
    together,
)
from tests.support.reachable import resident_bytes

SERVER_FLAGS = "--log", "debug"
HEARTBEAT_MS = 20
"""As often as this, a ZeroMQ heartbeat would be due in the server that is flooded here, if it had any."""
UNREAD = f"""
import secrets, signal, sys, zmq
real = zmq.Socket.setsockopt
def quick(socket, option, value):
    real(socket, option, {HEARTBEAT_MS} if option == zmq.HEARTBEAT_IVL else value)
zmq.Socket.setsockopt = quick
from kvstore_server.engine.namespace import EngineConfig
from kvstore_server.optimizer.base import capability
from kvstore_server.server import ServerOptions, make_server
server = make_server(EngineConfig(run_id=secrets.randbits(62) | 1, capability=capability()), ServerOptions())
signal.signal(signal.SIGTERM, lambda *_: server.request_stop())
print(server.endpoint, flush=True)
sys.stdin.readline()
server.run()
server.close()
"""
"""A server that reads nothing before it is told to, as one that is busy with a large update."""


@pytest.fixture
def context() -> Iterator[Any]:
    with zmq.Context() as opened:
        yield opened


def test_a_peer_that_fills_the_receive_limit_and_dies_does_not_take_the_server_along(context: Any) -> None:
    with Processes() as processes:
        server = processes.start([sys.executable, "-c", UNREAD])
        address = server.line()
        peer = context.socket(zmq.DEALER)
        peer.setsockopt(zmq.SNDHWM, 10)
        peer.connect(address)
        while peer.poll(300, zmq.POLLOUT):  # until neither the server nor the system takes any more
            peer.send(bytes(1 << 14))
        peer.close(linger=0)
        assert not eventually(lambda: server.popen.poll() is not None, 30 * HEARTBEAT_MS / 1000)
        server.go()
        assert_serve([address])
        server.signal(signal.SIGTERM)
        assert server.end()[0] == 0


def test_no_socket_has_heartbeats_of_zeromq_and_the_system_watches_both_ends_of_every_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: dict[Any, set[int]] = {}
    real = zmq.Socket.setsockopt

    def noting(one: Any, option: int, value: Any) -> None:
        made.setdefault(one, set()).add(option)
        real(one, option, value)

    monkeypatch.setattr(zmq.Socket, "setsockopt", noting)
    server = make_server(config_of_server(), ServerOptions())
    worker = connection.Connection([server.endpoint])
    worker.begin([(1, 1)])
    ports = {urlsplit(server.endpoint).port}

    def are_all_limited() -> bool:  # ZeroMQ sets them a moment after it has accepted a connection
        limits = _limits_of_connections(ports)
        return len(limits) == 2 * 2 and all(0 < seconds <= 60 for end in limits for seconds in end)

    try:
        assert eventually(are_all_limited)
    finally:
        worker.close()
        server.close()
    assert len(made) == 3
    assert not set().union(*made.values()) & {zmq.HEARTBEAT_IVL, zmq.HEARTBEAT_TIMEOUT, zmq.HEARTBEAT_TTL}


def _limits_of_connections(ports: set[int | None]) -> list[tuple[float, float]]:
    """Seconds after which this system ends connections of this process to those ports, or from them.

    The first where nothing is on its way, the second where something is; 0 for never.
    """
    limits = []
    for path in Path("/proc/self/fd").iterdir():
        try:
            if not os.readlink(path).startswith("socket:"):
                continue
            end = socket.socket(fileno=os.dup(int(path.name)))
        except OSError:  # closed by now
            continue
        with end, suppress(OSError):  # not connected
            is_tcp = end.family in (socket.AF_INET, socket.AF_INET6)
            if is_tcp and {end.getsockname()[1], end.getpeername()[1]} & ports:
                names = (
                    socket.TCP_KEEPIDLE,
                    socket.TCP_KEEPINTVL,
                    socket.TCP_KEEPCNT,
                    socket.TCP_USER_TIMEOUT,
                )
                idle, between, count, limit = (end.getsockopt(socket.IPPROTO_TCP, name) for name in names)
                is_watched = end.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
                limits.append((is_watched * (idle + between * count), limit / 1000))
    return limits


def test_a_stranger_can_neither_read_nor_push_nor_end_a_job_that_is_not_his(
    servers: list[Process], members: Members
) -> None:
    numel = 200_000  # on both servers
    pair = members.pair(servers)
    together(*(lambda s=s: s.init("w", torch.zeros(numel)) for s in pair))
    stranger = members.join(servers, 0, 1, new_name())
    stranger.init("w", torch.zeros(numel))
    table = stranger._entries["w"].table
    # Even one who has seen the tokens, which nobody is shown, has not got the sockets that they are good from.
    seen = {token for store in pair for _, token in store._client._session._tokens}
    for token in {*range(1, 50), *seen}:
        for server in range(2):
            at, slices = table.numbers[server], table.plan.slices_of(server)
            values = [(table.slot_of(slice_), torch.full((slice_.length,), 1e9)) for slice_ in slices]
            pushes = [contribution([value], 1) for value in values]
            commit = contribution([], 1, at, len(values), flags=m.WANTS_WEIGHTS, timeout=20.0)
            attacks = [m.Pull((at,)), *pushes, commit, m.Leave("over", True)]
            for body in attacks if token in seen else attacks[-1:]:
                assert _answer(stranger, server, token, body) == FencedError.__name__
    outcomes = together(*(lambda s=s: round_of(s, "w", torch.ones(numel)) for s in pair))
    assert [out.unique().tolist() for out in outcomes] == [[2.0]] * 2
    assert round_of(stranger, "w", torch.ones(numel)).unique().tolist() == [1.0]
    ids = [own for store in pair for at in range(2) for own in store._client._session.transport.sockets(at)]
    for secret in [
        *map(str, seen),
        *(form(own) for own in ids for form in (bytes.hex, lambda own: repr(own)[2:-1])),
    ]:
        assert not any(secret in server.stderr() for server in servers)


def _answer(store: DistKVStore, server: int, token: int, body: m.RequestBody) -> str:
    """The code with which a server refuses what a store's own socket says in that session."""
    transport = store._client._session.transport
    run, _ = store._client._session._tokens[server]
    transport.send(server, m.Request(run, token, 1 << 40, body))
    deadline = time.monotonic() + LIMIT
    while time.monotonic() < deadline:
        got = transport.receive(1.0)
        if got is not None and got[1].number == 1 << 40:
            assert isinstance(got[1].body, m.Failed), got
            return got[1].body.code
    raise AssertionError("the server did not answer")


@pytest.mark.parametrize("type", ["dist_sync", "dist_async"])
def test_training_ends_with_the_same_bits_although_connections_are_cut(
    servers: list[Process], members: Members, monkeypatch: pytest.MonkeyPatch, type: str
) -> None:
    monkeypatch.setattr(session, "REPEAT_AFTER", 0.1)
    monkeypatch.setenv("KVSTORE_TRANSPORT", "tcp")
    proxies = [LinkProxy(server.address) for server in servers]
    name, numel = new_name(), 200_000
    stores = [members.join([p.address for p in proxies], rank, 2, name, type=type) for rank in range(2)]
    cuts = threading.Barrier(2, timeout=LIMIT)

    def body(kv: DistKVStore, rank: int) -> list[float]:
        kv.set_optimizer(kvtrainer.optimizer.create("test", learning_rate=-1.0))
        kv.init("w", torch.zeros(numel))
        out = torch.empty(numel)
        for at in range(12):
            kv.push("w", torch.full((numel,), (rank + 1.0) * (at + 1)))
            if at % 3 == rank:
                proxies[at % 2].cut()
            kv.pull("w", out)
        cuts.wait()
        kv.barrier()
        kv.pull("w", out)
        return out.unique().tolist()

    try:
        total = 3.0 * sum(range(1, 13))
        assert together(*(lambda s=s, r=r: body(s, r) for r, s in enumerate(stores))) == [[total]] * 2
        assert all(proxy.made > 4 for proxy in proxies)
        together(*(store.close for store in stores))
    finally:
        for proxy in proxies:
            proxy.close()


def test_signs_of_life_go_on_after_a_connection_was_cut(
    members: Members, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "HEARTBEAT_INTERVAL", 0.05)
    with serving(make_server(config_of_server(), ServerOptions())) as server:
        proxy, name = LinkProxy(server.endpoint), new_name()
        try:
            store = members.join([proxy.address], 0, 1, name)
            [member] = server.service.namespaces[name].membership.members.values()
            assert eventually(lambda: proxy.made == 2)
            proxy.cut()
            assert eventually(lambda: proxy.made == 4)  # both sockets have come back
            again = time.monotonic()
            assert eventually(lambda: member.last_heard > again)
            store.close()
        finally:
            proxy.close()


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
        reply = m.Reply(*decode_frames(_answer_of(peer))[2:])
        assert isinstance(reply.body, m.Failed)
        assert reply.body.code in ("ProtocolError", "VersionMismatchError")
    assert_serve([server])


def test_damaged_messages_of_this_protocol_do_not_disturb_a_server(
    server: Process, peer: zmq.Socket[bytes]
) -> None:
    rng = random.Random(1)
    valid = [list(map(bytes, encode_frames(m.Request(0, 0, 1, body)))) for body in _bodies()]
    for _ in range(500):
        frames = [bytearray(frame) for frame in rng.choice(valid)]
        damaged = rng.choice(frames)
        at = rng.randrange(HEADER.size if damaged is frames[0] else 0, len(damaged) + 1)
        damaged[at : at + 8] = rng.choice([b"", b"\xff" * 8, struct.pack("<q", 1 << 62), rng.randbytes(8)])
        peer.send_multipart([bytes(frame) for frame in frames])
    answered = [decode_frames(_answer_of(peer))[3] for _ in range(500)]
    assert all(isinstance(body, m.Failed | m.Welcome) for body in answered)
    assert any(isinstance(body, m.Failed) and body.code == "ProtocolError" for body in answered)
    assert_serve([server])


def test_the_memory_of_a_message_that_was_refused_is_given_back(
    server: Process, peer: zmq.Socket[bytes]
) -> None:
    hello = m.Hello(new_name(), 0, 1, 0, 1, capability(), "peer:1", bytes(m.SECRET_BYTES), (OWN,))
    peer.send_multipart(encode_frames(m.Request(0, 0, 1, hello)))
    welcome = decode_frames(_answer_of(peer))[3]
    assert isinstance(welcome, m.Welcome)
    before = resident_bytes(server.pid)
    state = m.SliceState(0, 0, {}, bytes(256 << 20))
    peer.send_multipart(encode_frames(m.Request(welcome.run_id, welcome.session, 5, state)))
    assert isinstance(decode_frames(_answer_of(peer))[3], m.Failed)
    assert eventually(lambda: resident_bytes(server.pid) - before < 32 << 20)


def test_a_long_message_without_a_session_ends_its_connection_and_is_not_kept(
    server: Process, peer: zmq.Socket[bytes]
) -> None:
    before = resident_bytes(server.pid)
    state = m.SliceState(0, 0, {}, bytes(256 << 20))
    peer.send_multipart(encode_frames(m.Request(run_id=1, session=1, number=5, body=state)))
    assert eventually(lambda: "no whole message" in server.stderr())
    assert eventually(lambda: resident_bytes(server.pid) - before < 32 << 20)


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
        _answer_of(peer)
    # 20 in ten seconds, and this takes minutes on no machine.
    assert server.stderr().count("refused a message") - before < 1000


def test_bytes_that_are_not_zeromq_do_not_disturb_a_server(server: Process) -> None:
    where = urlsplit(server.address)
    for data in (b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 64, b""):
        with socket.create_connection((where.hostname, where.port)) as connection:
            connection.sendall(data)
    assert_serve([server])


def _answer_of(peer: zmq.Socket[bytes]) -> list[bytes]:
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
        m.MapRows(0),
        m.GetState(0, 0),
        m.SliceState(0, 0, {"a": 1}, b"data"),
        m.Leave("bye", True),
        m.Stats(),
    ]


def test_requests_without_a_session_are_refused_whatever_they_ask(
    server: Process, peer: zmq.Socket[bytes]
) -> None:
    for body in _bodies()[1:]:
        peer.send_multipart(encode_frames(m.Request(run_id=1, session=1, number=5, body=body)))
        reply = m.Reply(*decode_frames(_answer_of(peer))[2:])
        assert reply.number == 5
        assert isinstance(reply.body, m.Failed)
        assert reply.body.code == "ServerLostState"
