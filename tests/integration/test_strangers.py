"""What somebody who is no member of a job cannot do to it, nor to the server: read, push, end it, or take it down."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import zmq

from kvstore_server.admission import EngineConfig
from kvstore_server.server import Server, ServerOptions
from kvtrainer.comm.connection import Connection
from kvtrainer.rendezvous.sockets import Asking, Desk, Presence
from tests.support.processes import Processes, assert_serve, eventually

HEARTBEAT_MS = 20
"""As often as this, a ZeroMQ heartbeat would be due in the server that is flooded here, if it had any."""
UNREAD = f"""
import signal, sys, zmq
real = zmq.Socket.setsockopt
def quick(socket, option, value):
    real(socket, option, {HEARTBEAT_MS} if option == zmq.HEARTBEAT_IVL else value)
zmq.Socket.setsockopt = quick
from kvstore_server.admission import EngineConfig
from kvstore_server.cpu import capability
from kvstore_server.server import Server, ServerOptions
server = Server(EngineConfig(capability=capability()), ServerOptions())
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
            peer.send(bytes(1 << 16))
        peer.close(linger=0)
        assert not eventually(lambda: server.popen.poll() is not None, 30 * HEARTBEAT_MS / 1000)
        server.go()
        assert_serve([address])
        server.signal(signal.SIGTERM)
        assert server.end()[0] == 0


def test_no_socket_has_heartbeats_of_zeromq_and_every_one_notices_a_host_that_is_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: dict[Any, dict[int, Any]] = {}
    real = zmq.Socket.setsockopt

    def noting(socket: Any, option: int, value: Any) -> None:
        made.setdefault(socket, {})[option] = value
        real(socket, option, value)

    monkeypatch.setattr(zmq.Socket, "setsockopt", noting)
    server, desk = Server(EngineConfig(), ServerOptions()), Desk("127.0.0.1")
    connection = Connection([server.endpoint])
    connection.start_heartbeats([(1, 1)])
    asking, presence = Asking(desk.address, "token"), Presence("token", [desk.address])
    try:
        assert eventually(lambda: len(made) == 6)
    finally:
        for one in (presence, asking, desk, connection, server):
            one.close()
    for options in made.values():
        assert not options.keys() & {zmq.HEARTBEAT_IVL, zmq.HEARTBEAT_TIMEOUT, zmq.HEARTBEAT_TTL}
        assert options[zmq.TCP_KEEPALIVE] == 1
        idle = options[zmq.TCP_KEEPALIVE_IDLE]
        assert idle + options[zmq.TCP_KEEPALIVE_INTVL] * options[zmq.TCP_KEEPALIVE_CNT] <= 60
        assert 0 < options[zmq.TCP_MAXRT] <= 60_000
