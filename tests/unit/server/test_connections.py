"""Connections without a session: which are ended, and how many a client has; with real sockets and a clock by hand."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator

import pytest

from kvstore_server.transport.connections import HELLO_TIME, MAX_UNREAD, ConnectionLimits
from tests.support.limits import LIMIT


class Port:
    """A port of this process; the accepted ends belong to the server that is watched."""

    def __init__(self, has_keys: bool) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.limits = ConnectionLimits(has_keys)
        self.limits.port = self._listener.getsockname()[1]
        self._ends: list[socket.socket] = [self._listener]

    def connect(self) -> tuple[socket.socket, socket.socket]:
        peer = socket.create_connection(self._listener.getsockname(), LIMIT)
        accepted, _ = self._listener.accept()
        accepted.settimeout(LIMIT)
        self._ends += [peer, accepted]
        return peer, accepted

    def close(self) -> None:
        self.limits.close()
        for end in self._ends:
            end.close()


@pytest.fixture
def port(request: pytest.FixtureRequest) -> Iterator[Port]:
    made = Port(getattr(request, "param", False))
    yield made
    made.close()


with_keys = pytest.mark.parametrize("port", [True], indirect=True)


def pass_on(peer: socket.socket, accepted: socket.socket, nbytes: int) -> None:
    """Send bytes, which the process takes from the kernel without having read a message."""
    sender = threading.Thread(target=peer.sendall, args=(bytes(nbytes),))
    sender.start()
    while nbytes:
        nbytes -= len(accepted.recv(nbytes))
    sender.join()


def is_ended(peer: socket.socket) -> bool:
    peer.settimeout(0.0)
    try:
        return peer.recv(1) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


def test_a_silent_connection_is_ended_and_one_over_which_something_comes_is_not(port: Port) -> None:
    (silent, _), (talks, _) = port.connect(), port.connect()
    port.limits.check(0.0)
    talks.sendall(b"x")
    port.limits.check(HELLO_TIME / 2)
    port.limits.check(HELLO_TIME + 1.0)
    assert is_ended(silent)
    assert not is_ended(talks)
    assert port.limits.num_ended == 1


@with_keys
def test_with_keys_a_connection_has_to_bring_a_message_in_time_whatever_else_comes_over_it(
    port: Port,
) -> None:
    (pings, _), (asks, accepted) = port.connect(), port.connect()
    port.limits.check(0.0)
    port.limits.heard(accepted.fileno(), 10, False, "key")
    for now in (HELLO_TIME / 2, HELLO_TIME + 1.0):
        for peer in (pings, asks):
            peer.sendall(b"x")
        port.limits.check(now)
    assert is_ended(pings)
    assert not is_ended(asks)


def test_more_than_a_message_that_is_not_read_ends_a_connection_at_the_second_look(port: Port) -> None:
    peer, accepted = port.connect()
    port.limits.check(0.0)
    pass_on(peer, accepted, MAX_UNREAD + 1)
    port.limits.check(1.0)
    assert not is_ended(peer)
    port.limits.check(2.0)
    assert is_ended(peer)


def test_a_message_that_was_read_between_two_looks_clears_a_connection(port: Port) -> None:
    peer, accepted = port.connect()
    port.limits.check(0.0)
    for now in (1.0, 3.0, 5.0):
        pass_on(peer, accepted, MAX_UNREAD + 1)
        port.limits.check(now)
        port.limits.heard(accepted.fileno(), MAX_UNREAD + 1, False)
        port.limits.check(now + 1.0)
    assert not is_ended(peer)


def test_what_came_over_a_connection_before_it_was_found_counts_once_it_is(port: Port) -> None:
    port.connect()
    port.limits.check(0.0)
    peer, accepted = port.connect()
    pass_on(peer, accepted, MAX_UNREAD + 1)
    port.limits.heard(accepted.fileno(), MAX_UNREAD + 1, False)
    port.limits.check(0.004)  # looks only at the connection that it knows, which is new
    for now in (1.0, 2.0, 3.0):
        port.limits.check(now)
    assert not is_ended(peer)


def test_what_the_kernel_still_has_is_not_counted(port: Port) -> None:
    peer, accepted = port.connect()
    port.limits.check(0.0)
    pass_on(peer, accepted, MAX_UNREAD - 1000)
    peer.sendall(bytes(50_000))
    for now in (1.0, 2.0, 3.0):
        port.limits.check(now)
    assert not is_ended(peer)


def test_a_connection_with_a_session_is_left_alone(port: Port) -> None:
    peer, accepted = port.connect()
    port.limits.heard(accepted.fileno(), 10, True)
    for now in (0.0, 2 * HELLO_TIME, 4 * HELLO_TIME):
        port.limits.check(now)
    assert not is_ended(peer)
    assert port.limits.num_ended == 0


def test_after_a_pause_of_the_server_the_time_of_silence_begins_again(port: Port) -> None:
    peer, _ = port.connect()
    port.limits.check(0.0)
    port.limits.excuse(5 * HELLO_TIME)
    port.limits.check(5 * HELLO_TIME + 1.0)
    assert not is_ended(peer)


@with_keys
def test_the_connections_of_a_client_are_those_let_in_and_those_that_have_spoken_until_they_close(
    port: Port,
) -> None:
    _, accepted = port.connect()
    port.limits.admitted("alice", 0.0)
    port.limits.admitted("alice", 0.0)
    assert port.limits.num_connections("alice", 1.0) == 2
    port.limits.heard(accepted.fileno(), 10, False, "alice")
    assert port.limits.num_connections("alice", 1.0) == 2
    port.limits.check(1.0)
    assert port.limits.num_connections("alice", 1.0) == 2
    assert port.limits.num_connections("bob", 1.0) == 0
    accepted.close()
    assert port.limits.num_connections("alice", 1.0) == 1
    assert port.limits.num_connections("alice", HELLO_TIME + 1.0) == 0


def test_the_descriptor_in_reserve_is_taken_and_given_back() -> None:
    before = len(os.listdir("/proc/self/fd"))
    limits = ConnectionLimits()
    limits.check(0.0)
    assert len(os.listdir("/proc/self/fd")) == before + 1
    limits.close()
    assert len(os.listdir("/proc/self/fd")) == before
