"""Ask one server whether it answers, as a container's probe does every few seconds: quickly, and without torch.

    python -m kvstore_server.probe tcp://127.0.0.1:5555

A connection alone says little, because a thread of ZeroMQ accepts it whatever the server does. This asks for the facts
of `kvstore_server.facts`, which the serving loop itself has to answer. Exit codes: 0 it answered, 1 it did not, 2 wrong
usage. The two messages are written out here, since the protocol's module needs torch; a test compares them.
"""

from __future__ import annotations

import argparse
import re
import struct
import sys
from collections.abc import Sequence

import msgpack
import zmq

from kvstore_server.version import PROTOCOL_VERSION

HEADER = struct.Struct("<2sBB4xQQQ")
LOOK, INFO = 25, 18
"""Kinds of these two messages."""


def question() -> list[bytes]:
    """Return the frames of a request for facts, in no session."""
    return [HEADER.pack(b"KV", PROTOCOL_VERSION, LOOK, 0, 1, 0), msgpack.packb([])]


def ask(address: str, seconds: float) -> str:
    """Return why the server at an address does not serve; empty if it does. Blocks up to so many seconds."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.IPV6, "[" in address)
        socket.connect(address)
        socket.send_multipart(question())
        if not socket.poll(int(1000 * seconds)):
            return f"no answer within {seconds:g} s"
        head = socket.recv_multipart()[0]
    if len(head) != HEADER.size or head[:2] != b"KV":
        return "what answers is no kvstore-server"
    _, version, kind, *_ = HEADER.unpack(head)
    if version != PROTOCOL_VERSION or kind != INFO:
        return f"it refuses to tell; it speaks protocol version {version}, this side {PROTOCOL_VERSION}"
    return ""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line (`sys.argv` by default) and return its exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m kvstore_server.probe", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("server", type=_address, help="tcp://HOST:PORT")
    parser.add_argument(
        "--timeout", type=_seconds, default=5.0, help="seconds to wait for the answer (%(default)g)"
    )
    options = parser.parse_args(argv)
    problem = ask(options.server, options.timeout)
    if problem:
        print(f"{options.server}: {problem}", file=sys.stderr)
    return 1 if problem else 0


def _address(text: str) -> str:
    found = re.fullmatch(r"tcp://(\[[0-9A-Fa-f:]+\]|[^:/\[\]]+):([0-9]{1,5})", text)
    if found is None or not 1 <= int(found[2]) <= 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not tcp://HOST:PORT")
    return text


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0 < seconds <= 3600:
        raise argparse.ArgumentTypeError(f"{text} is not a number of seconds from 0 to 3600")
    return seconds


if __name__ == "__main__":
    sys.exit(main())
