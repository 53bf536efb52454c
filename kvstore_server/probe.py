"""Query the status of servers without a session: quickly, and without torch, which takes seconds to import.

    python -m kvstore_server.probe tcp://127.0.0.1:5555

This checks whether one server answers, as a container's probe does every few seconds. A TCP connection alone would say
little, because a ZeroMQ thread accepts it whatever the server does. So the probe requests the status that
`kvstore_server.engine.facts` describes, which the serving loop itself has to answer. Exit codes: 0 it answered, 1 it
did not, 2 wrong usage. kvtop displays this status. The three messages are encoded here, because the protocol's module
needs torch; a test compares them.
"""

from __future__ import annotations

import argparse
import re
import struct
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgpack
import zmq

from kvstore_server import PROTOCOL_VERSION
from kvstore_server.errors import KVStoreError, ProtocolError, VersionMismatchError, from_wire

HEADER = struct.Struct("<2sBB4xQQQ")
LOOK, INFO, FAILED = 24, 17, 15
"""Kinds of these messages."""
MAX_FRAME = 1024 * 1024 + 64 * 1024
"""The largest frame of an answer."""


def probe_servers(addresses: Sequence[str], timeout: float) -> list[Mapping[str, Any] | None]:
    """Query the status of servers without a session; blocks up to `timeout` seconds.

    Returns the status of each (see `kvstore_server.engine.facts`); None for one that did not answer in time.

    Raises:
        ProtocolError: The answer is not one of a server.
        KVStoreError: A server answered with an error, as one of another version does.
    """
    deadline = time.monotonic() + timeout
    with zmq.Context() as context:
        sockets = [_open_probe_socket(context, address) for address in addresses]
        try:
            found: list[Mapping[str, Any] | None] = []
            for socket in sockets:
                has_answered = socket.poll(max(0, int(1000 * (deadline - time.monotonic()))))
                found.append(facts_in_probe_answer(socket.recv_multipart()) if has_answered else None)
        finally:
            for socket in sockets:
                socket.close()
    return found


def _open_probe_socket(context: Any, address: str) -> Any:
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME)
    socket.setsockopt(zmq.IPV6, "[" in address)
    socket.connect(address)
    socket.send_multipart(probe_question())
    return socket


def probe_question() -> list[bytes]:
    return [HEADER.pack(b"KV", PROTOCOL_VERSION, LOOK, 0, 1, 0) + msgpack.packb([])]


def facts_in_probe_answer(frames: Sequence[bytes]) -> Mapping[str, Any]:
    """Return the status in a server's answer. Raises like `probe_servers`."""
    message = b"".join(frames)
    if len(message) < HEADER.size or message[:2] != b"KV":
        raise ProtocolError("the process at this address is not a kvstore-server")
    _, version, kind, *_ = HEADER.unpack_from(message)
    if version != PROTOCOL_VERSION:
        raise VersionMismatchError(
            f"the server speaks protocol version {version}, this side {PROTOCOL_VERSION}; install the same release of "
            "kvtrainer on both"
        )
    try:
        values = msgpack.unpackb(message[HEADER.size :], max_ext_len=0)
    except Exception as error:  # msgpack raises a family of unrelated classes on hostile input
        raise ProtocolError(f"the answer of {len(message)} bytes cannot be decoded: {error}") from None
    match values:
        case [str(code), str(text), *_] if kind == FAILED:
            raise from_wire(code, text)
        case [dict(facts)] if kind == INFO:
            return facts
    raise ProtocolError(f"a server does not answer with {values!r:.80} in a message of kind {kind}")


def probe_server(address: str, seconds: float) -> str:
    """Return why the server at an address does not serve; empty if it does. Blocks up to `seconds` seconds."""
    try:
        [facts] = probe_servers([address], seconds)
    except KVStoreError as error:
        return str(error)
    return f"no answer within {seconds:g} s" if facts is None else ""


def main(argv: Sequence[str] | None = None) -> int:
    """Ask the server named on the command line whether it serves; blocks up to `--timeout` seconds.

    Returns the exit code: 0 if it does; otherwise 1, and standard error says why not.
    """
    parser = argparse.ArgumentParser(
        prog="python -m kvstore_server.probe", description="Ask one server whether it answers."
    )
    parser.add_argument("server", type=_parse_probed_address, help="tcp://HOST:PORT")
    parser.add_argument(
        "--timeout",
        type=_parse_probe_seconds,
        default=5.0,
        help="seconds to wait for the answer (%(default)g)",
    )
    options = parser.parse_args(argv)
    problem = probe_server(options.server, options.timeout)
    if problem:
        print(f"{options.server}: {problem}", file=sys.stderr)
    return 1 if problem else 0


def _parse_probed_address(text: str) -> str:
    found = re.fullmatch(r"tcp://(\[[0-9A-Fa-f:]+\]|[^:/\[\]]+):([0-9]{1,5})", text)
    if found is None or not 1 <= int(found[2]) <= 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not tcp://HOST:PORT")
    return text


def _parse_probe_seconds(text: str) -> float:
    seconds = float(text)
    if not 0 < seconds <= 3600:
        raise argparse.ArgumentTypeError(f"{text} is not a number of seconds from 0 to 3600")
    return seconds


if __name__ == "__main__":
    sys.exit(main())
