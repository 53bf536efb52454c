"""Processes that attack a server with keys, until standard input ends; each line of output names one that has begun.

    python -m tests.support.attackers ADDRESS KEYS ROUTING_ID

KEYS has a directory of keys for each client; ROUTING_ID, in hexadecimal, belongs to a socket of a worker.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import zmq

from kvstore_server.keys import ClientKeys, make_pair, read_client_keys
from kvstore_server.protocol import messages as m
from kvstore_server.protocol.frames import encode_frames
from kvstore_server.transport.tcp import secure_client_socket

STOP = threading.Event()
PAUSE = 0.005
GREETING = b"\xff" + bytes(8) + b"\x7f" + b"\x03\x00" + b"CURVE".ljust(20, b"\0") + bytes(32)


def raw(address: str) -> socket.socket:
    host, _, port = address.rpartition("/")[2].rpartition(":")
    end = socket.create_connection((host, int(port)), timeout=1.0)
    return end


def silent(address: str) -> None:
    held = [raw(address) for _ in range(20)]
    STOP.wait()
    for end in held:
        end.close()


def send_again_and_again(address: str, first: bytes, data: Callable[[], bytes]) -> None:
    while not STOP.wait(PAUSE):
        with suppress(OSError), raw(address) as end:
            end.sendall(first)
            for _ in range(64):
                end.sendall(data())


def garbage(address: str) -> None:
    send_again_and_again(address, b"", lambda: os.urandom(4096))


def garbage_after_the_greeting(address: str) -> None:
    send_again_and_again(address, GREETING, lambda: os.urandom(4096))


def a_command_without_end(address: str) -> None:
    send_again_and_again(address, GREETING + b"\x06" + (8 << 30).to_bytes(8, "big"), lambda: bytes(1 << 20))


def connection_flood(address: str) -> None:
    while not STOP.wait(PAUSE / 5):
        with suppress(OSError):
            raw(address).close()


def replay(address: str, keys: ClientKeys) -> None:
    """Record what a client with a key sends, and send it again over other connections."""
    with socket.create_server(("127.0.0.1", 0)) as listener, zmq.Context() as context:
        client = context.socket(zmq.DEALER)
        client.setsockopt(zmq.LINGER, 0)
        secure_client_socket(client, keys)
        client.connect(f"tcp://127.0.0.1:{listener.getsockname()[1]}")
        client.send_multipart([bytes(one) for one in encode_frames(m.Request(0, 0, 1, m.GetStatus()))])
        near, _ = listener.accept()
        far, sent = raw(address), bytearray()
        near.settimeout(0.2)
        far.settimeout(0.2)
        for _ in range(4):
            with suppress(OSError):
                sent += (data := near.recv(65536))
                far.sendall(data)
            with suppress(OSError):
                near.sendall(far.recv(65536))
        near.close()
        far.close()
        client.close()
    send_again_and_again(address, bytes(sent), lambda: bytes(sent[64:]))


def ask(
    address: str, keys: ClientKeys | None, bodies: list[m.RequestBody], own: bytes = b"", reads: bool = True
) -> None:
    """Send messages as fast as they are taken."""
    with zmq.Context() as context:
        peer = context.socket(zmq.DEALER)
        peer.setsockopt(zmq.LINGER, 0)
        peer.setsockopt(zmq.SNDHWM, 16)
        peer.setsockopt(zmq.RCVHWM, 0 if reads else 1)
        if own:
            peer.setsockopt(zmq.ROUTING_ID, own)
        if keys is not None:
            secure_client_socket(peer, keys)
        peer.connect(address)
        while not STOP.wait(PAUSE):
            for body in bodies:
                with suppress(zmq.Again):
                    peer.send_multipart(encode_frames(m.Request(0, 0, 1, body)), zmq.NOBLOCK)
            with suppress(zmq.Again):
                while reads:
                    peer.recv_multipart(zmq.NOBLOCK)
        peer.close()


def hello(namespace: str, rank: int) -> m.Hello:
    return m.Hello(namespace, rank, 2, 0, 1, "", "attacker:1", os.urandom(16), (os.urandom(16),))


def main(address: str, folder: Path, stolen: bytes) -> None:
    keys = {
        one.name: read_client_keys(str(one), one.name) for one in folder.iterdir() if one.name != "server"
    }
    unknown = ClientKeys("unknown", make_pair(), keys["worker"].servers)
    in_training = [
        hello("job", 0),
        m.Leave("", False),
        m.Command(0, b""),
        m.Abort(0, 1, "", False),
        m.Pull((0,)),
    ]
    attacks: list[tuple[Callable[..., None], ...]] = [
        (silent, address),
        (garbage, address),
        (garbage_after_the_greeting, address),
        (a_command_without_end, address),
        (connection_flood, address),
        (replay, address, keys["observer"]),
        (ask, address, unknown, in_training),
        (ask, address, None, in_training),
        (ask, address, keys["observer"], in_training),
        (ask, address, keys["observer"], in_training, stolen),
        (ask, address, keys["alice"], [hello("job", 0), hello("job", 1), hello("job-1", 1)]),
        (ask, address, keys["observer"], [m.GetStatus()] * 50, b"", False),
    ]  # type: ignore[list-item]
    threads = [threading.Thread(target=one[0], args=one[1:]) for one in attacks for _ in range(3)]
    for thread in threads[:32]:
        thread.start()
    print(len(threads[:32]), flush=True)
    sys.stdin.read()
    STOP.set()
    for thread in threads[:32]:
        thread.join(20.0)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), bytes.fromhex(sys.argv[3]))
