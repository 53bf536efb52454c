"""Options and routing ids of ZeroMQ sockets: dead peers are detected, and routing ids cannot be guessed.

Detection uses TCP keepalive, not ZeroMQ heartbeats: libzmq aborts the process if a heartbeat is due on a connection
that broke while its queue was full and unread (`Assertion failed: !_io_error`, zeromq/libzmq#3937). Whether the
program at the other end still works is known from our own heartbeats.
"""

from __future__ import annotations

import secrets
from typing import Any

import zmq

from kvstore_server.protocol.messages import SECRET_BYTES

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
