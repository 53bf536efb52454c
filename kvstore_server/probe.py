"""Query the status of servers without a session: quickly, and without torch, which takes seconds to import.

    python -m kvstore_server.probe tcp://127.0.0.1:5555

It uses the key of an observer, if KVSTORE_KEYS names a directory that has one.

This checks whether one server answers, as a container's probe does every few seconds. A TCP connection alone would say
little, because a ZeroMQ thread accepts it whatever the server does. So the probe requests the status that
`kvstore_server.engine.facts` describes, which the serving loop itself has to answer. Exit codes: 0 it answered, 1 it
did not, 2 wrong usage. kvtop displays this status. The three messages are encoded here, because the protocol's module
needs torch; a test compares them.
"""

from __future__ import annotations

import argparse
import os
import re
import struct
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import msgpack
import zmq

from kvstore_server import PROTOCOL_VERSION
from kvstore_server.errors import KVStoreError, ProtocolError, VersionMismatchError, from_wire
from kvstore_server.keys import KEYS, ClientKeys, client_keys_from_env, find_job_keys

HEADER = struct.Struct("<2sBB4xQQQ")
LOOK, INFO, FAILED = 24, 17, 15
"""Kinds of these messages."""
MAX_FRAME = 1024 * 1024 + 64 * 1024
"""The largest frame of an answer."""


def read_probe_keys(environ: Mapping[str, str], addresses: Sequence[str] = ()) -> ClientKeys | None:
    """Return the keys with which to ask, those of an observer if there are several. Raises ConfigurationError.

    Without KVSTORE_KEYS they are those that a launcher has made for the job with the servers at `addresses`, if any.
    """
    if not environ.get(KEYS):
        environ = {KEYS: find_job_keys(addresses)}
    return client_keys_from_env(environ, ("observer", "admin", "worker"))


def probe_servers(
    addresses: Sequence[str], timeout: float, keys: ClientKeys | None = None
) -> list[Mapping[str, Any] | None]:
    """Query the status of servers without a session; blocks up to `timeout` seconds.

    Returns the status of each (see `kvstore_server.engine.facts`); None for one that did not answer in time.

    Raises:
        ProtocolError: The answer is not one of a server.
        KVStoreError: A server answered with an error, as one of another version does.
    """
    deadline = time.monotonic() + timeout
    answers: dict[Any, list[bytes]] = {}
    with zmq.Context() as context:
        sockets = [_open_probe_socket(context, address, keys) for address in addresses]
        try:
            # Ask each as soon as there is a connection, then wait for its answer.
            poller = zmq.Poller()
            for socket in sockets:
                poller.register(socket, zmq.POLLOUT)
            while len(answers) < len(sockets) and (left := deadline - time.monotonic()) > 0:
                for socket, event in poller.poll(max(1, int(1000 * left))):
                    if event & zmq.POLLOUT:
                        with suppress(zmq.Again):  # the connection has just been lost
                            socket.send_multipart(probe_question(), zmq.NOBLOCK)
                            poller.modify(socket, zmq.POLLIN)
                    else:
                        answers[socket] = socket.recv_multipart()
                        poller.unregister(socket)
        finally:
            for socket in sockets:
                socket.close()
    return [facts_in_probe_answer(answers[one]) if one in answers else None for one in sockets]


def _open_probe_socket(context: Any, address: str, keys: ClientKeys | None) -> Any:
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME)
    socket.setsockopt(zmq.IPV6, "[" in address)
    socket.setsockopt(zmq.IMMEDIATE, 1)  # the question goes to a connection that is made
    # Of two keys that the server may have each is tried: connections to one address, of which one will do.
    for server in [None] if keys is None else keys.servers:
        if keys is not None:
            socket.curve_publickey, socket.curve_secretkey = keys.pair
            socket.curve_serverkey = server
        socket.connect(address)
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
        [facts] = probe_servers([address], seconds, read_probe_keys(os.environ, [address]))
    except KVStoreError as error:
        return str(error)
    hint = "" if os.environ.get(KEYS) else f", or it wants a key ({KEYS})"
    return f"no answer within {seconds:g} s{hint}" if facts is None else ""


def main(argv: Sequence[str] | None = None) -> int:
    """Ask the server named on the command line whether it serves; blocks up to `--timeout` seconds.

    Returns the exit code: 0 if it does; otherwise 1, and standard error says why not.
    """
    options = build_probe_parser().parse_args(argv)
    problem = probe_server(options.server, options.timeout)
    if problem:
        print(f"{options.server}: {problem}", file=sys.stderr)
    return 1 if problem else 0


def build_probe_parser() -> argparse.ArgumentParser:
    """Return the parser of the flags."""
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
    return parser


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
