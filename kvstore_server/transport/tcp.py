"""Options and routing ids of ZeroMQ sockets: dead peers are detected, and routing ids cannot be guessed.

With keys, sockets encrypt what they carry (CURVE), and a server asks for each new connection whether it knows the
client's key (`Admission`), before it reads anything else from it. libzmq accepts every key where nobody answers that
question, unless it is told to insist; `check_refuses_unknown_keys` tries it out.

Detection uses TCP keepalive, not ZeroMQ heartbeats: libzmq aborts the process if a heartbeat is due on a connection
that broke while its queue was full and unread (`Assertion failed: !_io_error`, zeromq/libzmq#3937). Whether the
program at the other end still works is known from our own heartbeats.
"""

from __future__ import annotations

import logging
import math
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from enum import Enum, auto
from typing import Any

import zmq
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from kvstore_server.errors import ConfigurationError
from kvstore_server.keys import ClientKeys, KeyHolder, KeyPair, make_pair
from kvstore_server.protocol.messages import SECRET_BYTES
from kvstore_server.transport.connections import ConnectionLimits

_log = logging.getLogger(__name__)

_GONE_AFTER = 30
"""Seconds without an acknowledgement after which a connection counts as broken and is opened again."""
_PROBES = 4


def prepare_tcp_socket(socket: Any, address: str) -> None:
    """Configure a ZeroMQ socket for an address, with detection of dead hosts. Call it before `bind` or `connect`."""
    socket.setsockopt(zmq.IPV6, "[" in address)
    idle, between = _GONE_AFTER // 3, _GONE_AFTER * 2 // 3 // _PROBES
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
    socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, idle)
    socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, between)
    socket.setsockopt(zmq.TCP_KEEPALIVE_CNT, _PROBES)
    # Probes are sent on idle connections only; this limits connections with data in flight.
    socket.setsockopt(zmq.TCP_MAXRT, 1000 * _GONE_AFTER)


def tcp_routing_id() -> bytes:
    """Return a random routing id. A process that knows it can take the socket's place, so only its server is told."""
    first = 1 + secrets.randbelow(255)  # generated ids of ZeroMQ begin with 0
    return bytes([first]) + secrets.token_bytes(SECRET_BYTES - 1)


# ---------------------------------------------------------------- what becomes of a connection

CLOSED = int(zmq.EVENT_DISCONNECTED)
FAILED = int(
    zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)
"""Events for a monitor that `read_monitor` reads: the end of a connection, and a server that does not let one in."""


class ConnectionEvent(Enum):
    UNKNOWN_KEY = auto()
    """The server does not know the key of this side. ZeroMQ does not connect again."""
    NO_KEYS = auto()
    """One side uses keys, and the other one does not. ZeroMQ does not connect again."""
    OTHER_KEY = auto()
    """The other side has ended the handshake: perhaps its key is another one."""
    GONE = auto()
    """Any other event that was asked for."""


def read_monitor(monitor: Any) -> Iterator[ConnectionEvent]:
    """Yield the events that a monitor's socket has. Does not block."""
    while True:
        try:
            told = recv_monitor_message(monitor, zmq.NOBLOCK)
        except zmq.Again:
            return
        event = told["event"]
        if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            yield ConnectionEvent.UNKNOWN_KEY
        elif event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
            is_mismatch = told["value"] == zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH
            yield ConnectionEvent.NO_KEYS if is_mismatch else ConnectionEvent.OTHER_KEY
        elif event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
            yield ConnectionEvent.OTHER_KEY
        elif event != zmq.EVENT_MONITOR_STOPPED:
            yield ConnectionEvent.GONE


def drain_monitor(monitor: Any) -> None:
    """Read the events that a monitor's socket has; only their arrival matters."""
    for _ in read_monitor(monitor):
        pass


# ---------------------------------------------------------------- keys

_ZAP = "inproc://zeromq.zap.01"
"""Where libzmq asks about new connections (rfc.zeromq.org/spec/27)."""
_ZAP_FRAMES = 7
_DOMAIN = b"kvstore"
_ACCEPTED, _LATER, _REFUSED = b"200", b"300", b"400"
_SELF_TEST_TIME = 10.0
_OUTCOMES = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_HANDSHAKE_FAILED_AUTH


def secure_server_socket(socket: Any, pair: KeyPair) -> None:
    """Let a socket serve only clients that an `Admission` of its context accepts. Call it before `bind`."""
    socket.curve_server = True
    socket.curve_publickey, socket.curve_secretkey = pair
    socket.setsockopt(zmq.ZAP_DOMAIN, _DOMAIN)
    socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # without an answer no client is accepted


def secure_client_socket(socket: Any, keys: ClientKeys, at: int = 0) -> None:
    """Let a socket talk only to the server with the `at`-th of its public keys. Call it before `connect`."""
    socket.curve_publickey, socket.curve_secretkey = keys.pair
    socket.curve_serverkey = keys.servers[at % len(keys.servers)]


class Admission:
    """Answers libzmq's question whether a client may connect.

    Its socket is polled by the loop that also serves the clients: a server that hangs accepts no client.

    Args:
        clients: Returns the present clients by public key.
        connections: Knows how many connections each of them has.
    """

    def __init__(
        self,
        context: Any,
        clients: Callable[[], Mapping[bytes, KeyHolder]],
        connections: ConnectionLimits,
        clock: Callable[[], float],
    ) -> None:
        self._clients, self._connections, self._clock = clients, connections, clock
        self.num_refused = 0
        self.tested = b""
        """The key with which the server itself tries whether it is refused."""
        self.socket = context.socket(zmq.REP)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.bind(_ZAP)

    def receive(self) -> None:
        """Answer all questions that have come. Does not block."""
        while True:
            try:
                frames = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            version, number, *rest = [*frames, b"", b""][: max(2, len(frames))]
            known = self._key_of(rest) if len(frames) == _ZAP_FRAMES and version == b"1.0" else b""
            status = _REFUSED if not known else _ACCEPTED if self._is_within(known) else _LATER
            self.socket.send_multipart([b"1.0", number, status, b"", known, b""])

    def _is_within(self, public: bytes) -> bool:
        """Return whether a client may have one more connection. If not, libzmq closes it, and it connects again."""
        client = self._clients()[public]
        if client.limits.connections == math.inf:
            return True
        key, now = public.decode(), self._clock()
        if self._connections.num_connections(key, now) >= client.limits.connections:
            self.num_refused += 1
            _log.warning(
                "refused a connection of client %r, which may have %g", client.name, client.limits.connections
            )
            return False
        self._connections.admitted(key, now)
        return True

    def _key_of(self, question: list[bytes]) -> bytes:
        """Return the public key of the client that asks; empty if it is not known, which is counted and logged.

        The key goes with each message that comes over the connection, and not the name, which another key may get.
        """
        domain, address, _routing_id, mechanism, key = question
        if mechanism == b"CURVE" and domain == _DOMAIN and len(key) == 32:
            public = z85.encode(key)
            if public in self._clients():
                return public
            if public == self.tested:
                return b""
        self.num_refused += 1
        _log.warning("refused a connection from %s: its key is not known", address.decode(errors="replace"))
        return b""


def check_refuses_unknown_keys(context: Any, endpoint: str, admission: Admission, server: bytes) -> None:
    """Connect with a key that no server knows; blocks until the server's socket refuses it.

    Raises:
        ConfigurationError: It does not; then it must not serve.
    """
    unknown = ClientKeys("unknown", make_pair(), (server,))
    admission.tested = unknown.pair.public
    socket = context.socket(zmq.DEALER)
    monitor = socket.get_monitor_socket(_OUTCOMES)
    told = 0
    try:
        socket.setsockopt(zmq.LINGER, 0)
        secure_client_socket(socket, unknown)
        prepare_tcp_socket(socket, endpoint)
        socket.connect(endpoint.replace("//0.0.0.0:", "//127.0.0.1:").replace("//[::]:", "//[::1]:"))
        deadline = time.monotonic() + _SELF_TEST_TIME
        while not told and time.monotonic() < deadline:
            admission.receive()
            if monitor.poll(5):
                told = int(recv_monitor_message(monitor)["event"])
    finally:
        socket.disable_monitor()
        monitor.close(linger=0)
        socket.close(linger=0)
    if told != zmq.EVENT_HANDSHAKE_FAILED_AUTH:
        found = (
            "accepts any key" if told else f"has not answered its own question within {_SELF_TEST_TIME:g} s"
        )
        raise ConfigurationError(
            f"the server at {endpoint} {found}, so it would not keep unknown clients out; is libzmq "
            f"({zmq.zmq_version()}) the one of pyzmq's wheel?"
        )
