"""A server is not there, dies, comes back empty, speaks another protocol or is something else."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Iterator

import pytest
import torch
import zmq

from kvstore_server.protocol import frames
from kvtrainer.errors import (
    ConnectTimeoutError,
    ProtocolError,
    ServerUnreachableError,
    VersionMismatchError,
)
from tests.support.limits import DEAD_AFTER, SOON
from tests.support.processes import (
    Call,
    Members,
    Processes,
    assert_serve,
    new_name,
    raised,
    together,
)


@pytest.fixture
def silent_port() -> Iterator[socket.socket]:
    """A port at which connections are taken, and nothing is ever said."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener


def _address(listener: socket.socket) -> str:
    return f"tcp://127.0.0.1:{listener.getsockname()[1]}"


def test_an_address_without_a_server_is_named_when_the_time_to_connect_is_over(members: Members) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # bound, but nobody listens
        with pytest.raises(ConnectTimeoutError) as caught:
            members.join([_address(unused)], 0, 1, new_name(), connect_timeout=SOON)
        text = str(caught.value)
        assert _address(unused) in text
        assert f"did not answer within {SOON:g} s" in text
        assert "KVSTORE_SERVERS" in text


def test_a_listener_that_says_nothing_is_named_like_a_missing_server(
    members: Members, silent_port: socket.socket
) -> None:
    with pytest.raises(ConnectTimeoutError, match=_address(silent_port)):
        members.join([_address(silent_port)], 0, 1, new_name(), connect_timeout=SOON)


def test_a_web_server_at_the_address_is_named_like_a_missing_server(
    members: Members, silent_port: socket.socket
) -> None:
    def answer() -> None:
        connection, _ = silent_port.accept()
        with connection:
            connection.sendall(b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n")

    threading.Thread(target=answer, daemon=True).start()
    with pytest.raises(ConnectTimeoutError, match=_address(silent_port)):
        members.join([_address(silent_port)], 0, 1, new_name(), connect_timeout=SOON)


def test_a_zeromq_socket_of_another_program_is_no_server(members: Members) -> None:
    context = zmq.Context()
    other = context.socket(zmq.ROUTER)
    try:
        other.bind("tcp://127.0.0.1:0")
        address = other.getsockopt_string(zmq.LAST_ENDPOINT)
        connecting = Call(lambda: members.join([address], 0, 1, new_name()))
        peer = other.recv_multipart()[0]
        other.send_multipart([peer, b"hello, world"])
        [text] = raised([connecting.outcome()], ProtocolError)
        assert "is the peer a kvtrainer worker or server?" in text
    finally:
        other.close(linger=0)
        context.term()


def test_workers_of_another_protocol_version_are_refused_and_told_both_versions(
    processes: Processes, members: Members, monkeypatch: pytest.MonkeyPatch
) -> None:
    servers = processes.servers(2)
    own = frames.PROTOCOL_VERSION
    for other in (own - 1, own + 1):
        with monkeypatch.context() as patch:
            patch.setattr(frames, "PROTOCOL_VERSION", other)
            with pytest.raises(VersionMismatchError) as caught:
                members.join(servers, 0, 1, new_name())
        # The server's own words cannot be read by another version: this side knows from the header.
        assert f"speaks protocol version {own}, this side speaks {other}" in str(caught.value)
        assert "install the same release" in str(caught.value)
    assert_serve(servers)


def test_a_server_that_died_between_rounds_is_named_at_the_next_one_however_many_keys_it_held(
    processes: Processes, members: Members
) -> None:
    servers = processes.servers(1)
    pair = members.pair(servers, dead_after=DEAD_AFTER)
    keys = [str(i) for i in range(40)]
    assert together(*(lambda s=s: s.init(keys, [torch.zeros(2)] * 40) for s in pair)) == [None, None]
    servers[0].signal(signal.SIGKILL)
    servers[0].end()
    outcomes = together(*(lambda s=s: s.pushpull(keys, [torch.ones(2)] * 40) for s in pair))
    texts = raised(outcomes, ServerUnreachableError)
    assert all(servers[0].address in text and "Restart the job" in text for text in texts)


def test_workers_do_not_leave_open_files_behind_when_they_cannot_connect(
    members: Members, silent_port: socket.socket
) -> None:
    def attempt() -> int:
        with pytest.raises(ConnectTimeoutError):
            members.join([_address(silent_port)], 0, 1, new_name(), connect_timeout=0.05)
        return len(os.listdir("/proc/self/fd"))

    attempt()
    assert attempt() == attempt()
