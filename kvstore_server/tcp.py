"""How every socket of ours notices a peer that is gone without a word: by TCP itself, on both sides.

Not by heartbeats of ZeroMQ: libzmq aborts the process if one is due on a connection that broke while it was not read,
because as many messages as the socket takes wait already (`Assertion failed: !_io_error`, zeromq/libzmq#3937). Whether
the program at the other end still works is the business of our own heartbeats.
"""

from __future__ import annotations

from typing import Any

import zmq

_GONE_AFTER = 30
"""Seconds without an acknowledgement after which a connection counts as broken; it is then made anew."""
_PROBES = 4


def watch(socket: Any) -> None:
    """Have connections of a ZeroMQ socket end when the peer's host is gone; call it before `bind` or `connect`."""
    idle, between = _GONE_AFTER // 3, _GONE_AFTER * 2 // 3 // _PROBES
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
    socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, idle)
    socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, between)
    socket.setsockopt(zmq.TCP_KEEPALIVE_CNT, _PROBES)
    # Probes are sent on idle connections only; this is the limit where data is on its way.
    socket.setsockopt(zmq.TCP_MAXRT, 1000 * _GONE_AFTER)
