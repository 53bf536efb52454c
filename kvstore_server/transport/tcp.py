"""Options and names of our sockets: a peer that is gone is noticed, and nobody can guess the name of a socket.

It is TCP that notices, on both sides, not heartbeats of ZeroMQ: libzmq aborts the process if one is due on a connection
that broke while it was not read, because as many messages as the socket takes wait already (`Assertion failed:
!_io_error`, zeromq/libzmq#3937). Whether the program at the other end still works, our own heartbeats tell.
"""

from __future__ import annotations

import secrets
from typing import Any

import zmq

from kvstore_server.protocol.messages import SECRET_BYTES

_GONE_AFTER = 30
"""Seconds without an acknowledgement after which a connection counts as broken; it is then made anew."""
_PROBES = 4


def prepare(socket: Any, address: str) -> None:
    """Have a ZeroMQ socket use that address. End connections when the peer's host is gone.

    Call it before `bind` or `connect`.
    """
    socket.setsockopt(zmq.IPV6, "[" in address)
    idle, between = _GONE_AFTER // 3, _GONE_AFTER * 2 // 3 // _PROBES
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
    socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, idle)
    socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, between)
    socket.setsockopt(zmq.TCP_KEEPALIVE_CNT, _PROBES)
    # Probes are sent on idle connections only; this is the limit where data is on its way.
    socket.setsockopt(zmq.TCP_MAXRT, 1000 * _GONE_AFTER)


def routing_id() -> bytes:
    """Draw a name for one socket; who knows it can take its place, so it is told to its server alone."""
    first = 1 + secrets.randbelow(255)  # those that ZeroMQ gives begin with 0
    return bytes([first]) + secrets.token_bytes(SECRET_BYTES - 1)
