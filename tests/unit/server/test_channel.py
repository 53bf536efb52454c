"""Messages in shared memory: what arrives, how long it stays readable, and what happens where memory runs out."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import random
import secrets
import select
import socket
import struct
import subprocess
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvstore_server.budget import Budget
from kvstore_server.errors import ConfigurationError, ProtocolError
from kvstore_server.protocol.frames import MAX_FRAME
from kvstore_server.transport import channel
from kvstore_server.transport.arena import ArenaPlaces, Leases, SharedArena, make_shared_memory
from kvstore_server.transport.channel import (
    _ROOM,
    MIN_MEMORY,
    Channel,
    ChannelListener,
    connect_channel,
    watch_over_channel,
)
from kvstore_server.transport.exports import WeightExports
from tests.support.processes import Call

RUN, TOKEN, OWN = secrets.randbits(60), 5, b"worker's socket!"
MIB, GIB = 1 << 20, 1 << 30


Pair = Callable[..., tuple[Channel, Channel]]


@pytest.fixture
def ends() -> Iterator[Pair]:
    """Makes a worker's end and a server's; `make` gives the server's memory, `memory` is that of the requests,
    `exports` that of weights."""
    opened: list[Channel] = []

    def connected(
        make: Callable[[int], int | None] = lambda nbytes: (
            make_shared_memory(nbytes) if nbytes < GIB else None
        ),
        memory: int | None = None,
        exports: WeightExports | None = None,
    ) -> tuple[Channel, Channel]:
        a, b = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        requests, replies = (
            make_shared_memory(MIN_MEMORY) if memory is None else memory,
            make_shared_memory(MIN_MEMORY),
        )
        worker = Channel(a, SharedArena(os.dup(requests)), SharedArena(os.dup(replies)))

        def made(nbytes: int, number: int) -> tuple[SharedArena, int] | None:
            fd = make(nbytes)
            return None if fd is None else (SharedArena(os.dup(fd), number), fd)

        opened.extend([worker, Channel(b, SharedArena(replies), SharedArena(requests), made, exports)])
        return worker, opened[-1]

    yield connected
    for end in opened:
        end.close()


def bytes_of(frames: list[Any] | None) -> list[bytes] | None:
    return None if frames is None else [bytes(frame) for frame in frames]


@pytest.fixture
def listener() -> Iterator[ChannelListener]:
    """A server's side that knows one session."""
    found = ChannelListener(
        RUN, lambda peer, token: (peer, token) == (OWN, TOKEN), Budget(0, 0, lambda: 1 << 40), Leases()
    )
    yield found
    found.close()


def test_a_frame_keeps_its_bytes_after_its_channel_was_closed(ends: Pair) -> None:
    worker, server = ends()
    worker.send([b"head", b"body", b"x" * 5000])
    frames = server.receive()
    for end in (worker, server):
        end.close()
    del worker, server
    assert frames is not None
    assert bytes(frames[2]) == b"x" * 5000


@pytest.mark.parametrize("is_workers", [True, False])
def test_a_sender_without_room_gets_more_memory_while_the_other_side_keeps_everything(
    ends: Pair, is_workers: bool
) -> None:
    worker, server = ends()
    sender, receiver = (worker, server) if is_workers else (server, worker)
    kept = []
    for at in range(12):
        frames = [b"head", b"body", bytes([at]) * MIB]
        while not sender.send(frames):
            sender.make_room(MIB)
            if is_workers:
                assert server.receive() is None  # it has given memory
                assert worker.receive() is None
        found = receiver.receive()
        assert found is not None
        kept.append(found[2])
    assert [bytes(frame) for frame in kept] == [bytes([at]) * MIB for at in range(12)]


def test_a_sender_whose_socket_is_full_waits_for_the_reader_and_takes_no_more_memory(ends: Pair) -> None:
    made: list[int] = []
    worker, server = ends(made.append)
    for sender, receiver in ((worker, server), (server, worker)):
        num_sent = 0
        while sender.send([b"%d" % num_sent]):
            num_sent += 1
        assert sender.is_full
        assert not sender.make_room(MIB)
        assert [bytes_of(receiver.receive()) for _ in range(num_sent)] == [
            [b"%d" % at] for at in range(num_sent)
        ]
        assert sender.send([b"more"])
        assert not sender.is_full
    assert made == []


def test_a_worker_asks_for_no_more_memory_while_what_it_got_waits_for_its_socket(ends: Pair) -> None:
    worker, server = ends()
    large = [b"head", b"body", b"x" * MIB]
    while worker.send(large):
        pass
    worker.make_room(8 * MIB)
    while server.receive() is not None:  # and it gives the memory
        pass
    assert server.send([b"head", b"body", b"y" * MIB])
    while worker.send([b"small"]):
        pass
    assert worker.receive() is not None
    assert not worker.send(large)
    assert server.receive() is not None
    worker.tell()  # that nobody reads the message any more, for which there is room now
    assert server.receive() is not None
    worker.make_room(32 * MIB)
    while server.receive() is not None:
        pass
    assert worker.send(large)
    assert bytes_of(server.receive()) == large


def test_the_worker_takes_the_pages_of_memory_that_it_will_write_and_not_the_server_that_others_wait_for(
    ends: Pair, listener: ChannelListener
) -> None:
    made: list[int] = []

    def make(nbytes: int) -> int | None:
        found = listener.make(nbytes, 1)
        assert found is not None
        made.append(os.dup(found[1]))
        return found[1]

    worker, server = ends(make)
    worker.make_room(64 * MIB)
    worker.ask_for_staging_buffer(32 * MIB)
    assert server.receive() is None
    sizes = [os.fstat(fd).st_size for fd in made]
    assert sizes == [128 * MIB, 32 * MIB]
    assert [os.fstat(fd).st_blocks for fd in made] == [0, 0]
    assert worker.receive() is None
    taken = [512 * os.fstat(fd).st_blocks for fd in made]
    for fd in made:
        os.close(fd)
    assert taken in (
        [size // 2 for size in sizes],
        [0, 0],
    )  # Linux before 5.14 takes them as they are written


def test_a_worker_that_asks_for_memory_again_and_again_is_cut_off(ends: Pair) -> None:
    worker, server = ends()
    room = struct.pack("<HHIQ", 2, 0, 0, MIB)
    for _ in range(2):
        os.write(worker.fileno(), room)
    with pytest.raises(ProtocolError):
        server.receive()


@pytest.mark.parametrize("is_workers", [True, False])
def test_where_no_memory_can_be_had_frames_are_copied_and_their_places_used_again(
    ends: Pair, is_workers: bool, caplog: pytest.LogCaptureFixture
) -> None:
    worker, server = ends(lambda _: None)
    sender, receiver = (worker, server) if is_workers else (server, worker)
    kept = []
    for at in range(12):
        frames = [b"head", b"body", bytes([at]) * MIB]
        for _ in range(4):
            if sender.send(frames):
                break
            sender.make_room(MIB)
            while (found := receiver.receive()) is not None:
                kept.append(found[2])
            assert sender.receive() is None
        else:
            pytest.fail("no place is given back")
    while (found := receiver.receive()) is not None:
        kept.append(found[2])
    assert [bytes(frame) for frame in kept] == [bytes([at]) * MIB for at in range(12)]
    assert len(caplog.messages) == (
        0 if is_workers else 1
    )  # a server says so once; a worker goes over tcp, and says that


def test_only_the_numbers_of_a_message_can_change_after_it_was_received(ends: Pair) -> None:
    memory = make_shared_memory(MIN_MEMORY)
    hostile = SharedArena(os.dup(memory))
    worker, server = ends(memory=memory)
    worker.send([b"h" * 3000, b"b" * 3000, b"e" * 3000, b"p" * 3000])
    frames = server.receive()
    hostile.bytes[:] = 0
    assert frames is not None
    assert bytes_of(frames) == [b"h" * 3000, b"b" * 3000, b"e" * 3000, bytes(3000)]


def test_nobody_can_change_the_size_of_the_memory() -> None:
    fd = make_shared_memory(MIN_MEMORY)
    for size in (0, 2 * MIN_MEMORY):
        with pytest.raises(PermissionError):
            os.ftruncate(fd, size)
    os.close(fd)


def test_whatever_a_worker_sends_is_a_message_or_a_protocol_error(ends: Pair) -> None:
    draw = random.Random(11)
    for _ in range(300):
        worker, server = ends()
        numbers = [draw.choice([0, 1, 64, -1, MAX_FRAME, MAX_FRAME + 1, MIN_MEMORY - 3, 1 << 40, -(1 << 63)])
                   for _ in range(draw.randrange(12))]  # fmt: skip
        head = struct.pack(
            "<BBHIQ", draw.randrange(7), draw.randrange(3), draw.randrange(6), draw.randrange(4), 9
        )
        start = draw.choice([head, head[: draw.randrange(1, 16)], draw.randbytes(50)])
        os.write(worker.fileno(), start + struct.pack(f"<{len(numbers)}q", *numbers))
        try:
            found = server.receive()
        except ProtocolError:
            continue
        assert found is None or all(len(frame) <= MAX_FRAME for frame in found)


@given(st.lists(st.tuples(st.integers(1, 9000), st.booleans(), st.integers(0, 100)), max_size=300))
def test_places_never_overlap_and_all_of_them_can_be_had_again_in_any_order(
    turns: list[tuple[int, bool, int]],
) -> None:
    """Of each turn: how much is taken, and whether an earlier place is given back, and which."""
    places, given_out = ArenaPlaces(100_000), dict[int, int]()
    for nbytes, gives_back, which in turns:
        begin = places.take(nbytes)
        if begin is not None:
            others = given_out.items()
            assert all(begin + nbytes <= other or other + size <= begin for other, size in others)
            given_out[begin] = nbytes
        if given_out and (begin is None or gives_back):
            begin = list(given_out)[which % len(given_out)]
            del given_out[begin]
            for _ in range(2):  # once more does no harm, and neither does one that was never given
                places.release(begin)
                places.release(7)
    for begin in given_out:
        places.release(begin)
    assert (places.used, places.take(100_000 // 64 * 64)) == (0, 0)


def test_an_end_that_was_closed_is_an_error_on_the_other_side_after_what_it_said(ends: Pair) -> None:
    worker, server = ends()
    server.send([b"farewell"])
    server.close()
    with pytest.raises(BrokenPipeError):
        worker.send([b"hello"])
    assert not worker.is_usable
    assert bytes_of(worker.receive()) == [b"farewell"]
    with pytest.raises(ConnectionError):
        worker.receive()


def taken(listener: ChannelListener) -> list[tuple[bytes, Any]]:
    """The messages that have come, each with the name of its sender."""
    found: list[tuple[bytes, Any]] = []
    listener.receive(lambda peer, frames: found.append((peer, bytes_of(frames))))
    return found


def answered(listener: ChannelListener, call: Callable[[], object]) -> Any:
    """What a call returns or raises while the listener looks after its descriptors."""
    running = Call(call)
    while running.is_running:
        assert taken(listener) == []
    return running.outcome()


def test_a_worker_with_a_session_gets_a_channel_and_is_heard_under_its_name(
    listener: ChannelListener,
) -> None:
    worker = answered(listener, lambda: connect_channel(RUN, TOKEN, OWN))
    worker.send([b"head", b"body"])
    assert taken(listener) == [(OWN, [b"head", b"body"])]
    assert listener.channels[OWN].send([b"answer"])
    assert bytes_of(worker.receive()) == [b"answer"]
    worker.close()
    assert taken(listener) == []
    assert listener.channels == {}


@pytest.mark.parametrize(("token", "own"), [(TOKEN + 1, OWN), (TOKEN, b"another"), (0, b"")])
def test_who_has_no_session_gets_no_memory(listener: ChannelListener, token: int, own: bytes) -> None:
    assert isinstance(answered(listener, lambda: connect_channel(RUN, token, own)), ConnectionError)
    assert listener.channels == {}


def test_a_process_of_another_user_is_refused(
    listener: ChannelListener, monkeypatch: pytest.MonkeyPatch
) -> None:
    user = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    assert isinstance(answered(listener, lambda: connect_channel(RUN, TOKEN, OWN)), OSError)


def test_a_worker_that_asks_for_no_bytes_is_cut_off_before_a_descriptor_is_opened(
    listener: ChannelListener, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = answered(listener, lambda: connect_channel(RUN, TOKEN, OWN))
    made: list[int] = []
    monkeypatch.setattr(channel, "make_shared_memory", made.append)
    worker._put(_ROOM, (), (), 0)
    assert taken(listener) == []
    assert (listener.channels, made) == ({}, [])
    worker.close()


def test_a_server_that_has_memory_for_one_direction_only_leaves_no_descriptor(
    listener: ChannelListener, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []

    def make_once(nbytes: int) -> int:
        if made:
            raise OSError(errno.EMFILE, "too many open files")
        made.append(make_shared_memory(nbytes))
        return made[0]

    monkeypatch.setattr(channel, "make_shared_memory", make_once)
    assert isinstance(answered(listener, lambda: connect_channel(RUN, TOKEN, OWN)), ConnectionError)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(made[0])


def test_without_a_server_of_that_run_on_this_host_there_is_no_channel() -> None:
    with pytest.raises(ConnectionRefusedError):
        connect_channel(RUN + 1, TOKEN, OWN)


@pytest.mark.parametrize("is_workers", [True, False])
def test_the_last_words_of_an_end_that_leaves_without_reading_arrive(ends: Pair, is_workers: bool) -> None:
    worker, server = ends()
    leaves, stays = (worker, server) if is_workers else (server, worker)
    stays.send([b"unread"])
    leaves.send([b"farewell"])
    leaves.close()
    assert bytes_of(stays.receive()) == [b"farewell"]
    with pytest.raises(ConnectionError):
        stays.receive()


def test_an_end_that_is_gone_is_found_out_by_receiving_not_by_asking_for_room(ends: Pair) -> None:
    worker, server = ends()
    worker.close()
    assert not server.make_room(MIB)
    assert not server.is_usable
    with pytest.raises(ConnectionError):
        server.receive()


def test_a_forked_child_does_not_keep_a_closed_channel_open(ends: Pair) -> None:
    worker, server = ends()
    in_child = os.dup(worker.fileno())
    worker.close()
    with pytest.raises(ConnectionError):
        server.receive()
    os.close(in_child)


def test_a_channel_under_a_high_number_gives_memory_later_as_any_other(ends: Pair) -> None:
    worker, server = ends()
    high = fcntl.fcntl(server.fileno(), fcntl.F_DUPFD, 1500)
    server._end.close()
    server._end = socket.socket(fileno=high)
    server._wish = MIN_MEMORY
    server.tell()
    assert server._wish == 0
    assert worker.receive() is None


def test_a_session_that_has_ended_loses_its_channel() -> None:
    sessions = {OWN: TOKEN}
    listener = ChannelListener(
        RUN + 2, lambda peer, token: sessions.get(peer) == token, Budget(0, 0, lambda: 1 << 40), Leases()
    )
    worker = answered(listener, lambda: connect_channel(RUN + 2, TOKEN, OWN))
    sessions.clear()
    listener.reap_and_flush(0.0)
    with pytest.raises(ConnectionError):
        worker.receive()
    assert listener.channels == {}
    worker.close()
    listener.close()


def test_a_process_that_has_ended_loses_its_channel_once_it_was_heard_whoever_has_it_open(
    listener: ChannelListener,
) -> None:
    worker = answered(listener, lambda: connect_channel(RUN, TOKEN, OWN))
    ended = subprocess.Popen(["true"])
    [process] = listener.processes._found.values()
    other = os.pidfd_open(ended.pid)
    os.dup2(other, process.fileno())
    os.close(other)
    ended.wait()
    worker.send([b"farewell"])
    listener.reap_and_flush(0.0)
    assert taken(listener) == [(OWN, [b"farewell"])]
    listener.reap_and_flush(0.0)
    assert listener.channels == {}
    worker.close()


def test_a_worker_that_lives_keeps_its_channel(listener: ChannelListener) -> None:
    worker = answered(listener, lambda: connect_channel(RUN, TOKEN, OWN))
    listener.reap_and_flush(0.0)
    assert (list(listener.channels), list(listener.processes)) == ([OWN], [(OWN, TOKEN)])
    worker.close()


def test_a_worker_without_a_channel_is_watched_as_one_with_it_until_its_session_ends() -> None:
    sessions, seen = {OWN: TOKEN}, []
    listener = ChannelListener(
        RUN + 3,
        lambda peer, token: sessions.get(peer) == token,
        Budget(0, 0, lambda: 1 << 40),
        Leases(),
        lambda processes, now: seen.append((list(processes), now)),
    )
    process = answered(listener, lambda: watch_over_channel(RUN + 3, TOKEN, OWN))
    listener.reap_and_flush(1.0)
    sessions.clear()
    listener.reap_and_flush(2.0)
    assert (listener.channels, seen) == ({}, [([(OWN, TOKEN)], 1.0), ([], 2.0)])
    assert select.select([process], [], [], 0.0)[0] == []  # a descriptor of the server, which is this process
    process.close()
    listener.close()


def test_nobody_is_watched_who_has_no_session(listener: ChannelListener) -> None:
    assert isinstance(answered(listener, lambda: watch_over_channel(RUN, TOKEN + 1, OWN)), ConnectionError)
    assert list(listener.processes) == []


@pytest.fixture
def exports() -> Iterator[WeightExports]:
    found = WeightExports(Leases())
    yield found
    found.close()


def weights_on(exports: WeightExports, *sizes: int) -> list[torch.Tensor]:
    """Weights of so many floats each, one behind the other: 0, 1, 2, …"""
    memory = exports.make(4 * sum(sizes))
    assert memory is not None
    numbers = memory.view(torch.float32)
    numbers.copy_(torch.arange(sum(sizes)))
    return list(numbers.split(sizes))


def test_weights_are_read_where_they_lie_and_held_until_the_reader_lets_them_go(
    ends: Pair, exports: WeightExports
) -> None:
    worker, server = ends(exports=exports)
    a, b = weights_on(exports, 50_000, 30_000)
    for _ in range(2):  # the second time the worker knows the memory
        assert server.send([b"head", b"body"], [a, b], zero_copy=True)
        frames = worker.receive()
        assert frames is not None
        found = torch.frombuffer(frames.pop(), dtype=torch.float32)
        assert torch.equal(found, torch.arange(80_000, dtype=torch.float32))
        assert exports.leases.is_busy(a)
        assert exports.leases.is_busy(b)
        del found
        assert worker.send([b"next"])
        assert bytes_of(server.receive()) == [b"next"]
        assert not exports.leases.is_busy(a)
        assert not exports.leases.is_busy(b)


def test_a_worker_cannot_change_the_weights_of_a_server(ends: Pair, exports: WeightExports) -> None:
    worker, server = ends(exports=exports)
    [weights] = weights_on(exports, 50_000)
    server.send([b"head", b"body"], [weights], zero_copy=True)
    frames = worker.receive()
    assert frames is not None
    frames[2][:] = 0
    assert torch.equal(weights, torch.arange(50_000, dtype=torch.float32))
    [fd] = exports.fds.values()
    with pytest.raises(PermissionError):
        mmap.mmap(fd, 4096)
    for size in (0, 1 << 20):
        with pytest.raises(PermissionError):
            os.ftruncate(fd, size)


def test_weights_that_lie_apart_may_change_or_are_small_are_copied(
    ends: Pair, exports: WeightExports
) -> None:
    worker, server = ends(exports=exports)
    a, between, b, small = weights_on(exports, 50_000, 16, 50_000, 1000)
    for pieces, zero_copy in (([a, b], True), ([a, between, b], False), ([small], True), ([a.clone()], True)):
        assert server.send([b"head", b"body"], pieces, zero_copy)
        frames = worker.receive()
        assert frames is not None
        assert bytes(frames[2]) == b"".join(piece.numpy().tobytes() for piece in pieces)
        assert not any(map(exports.leases.is_busy, pieces))


def test_weights_that_are_gone_by_now_are_shown_without_their_memory(
    ends: Pair, exports: WeightExports
) -> None:
    worker, server = ends(exports=exports)
    [weights] = weights_on(exports, 50_000)
    place = exports.find([weights])
    assert place is not None
    del weights  # as a table that ends while an answer waits for its turn
    assert server.show(np.array([place]))
    assert worker.receive() is None
    assert worker.weights_at(place) is None


@pytest.mark.parametrize("call", ["memfd_create", "ftruncate"])
def test_a_server_that_can_make_no_memory_for_weights_says_why_once(
    exports: WeightExports, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, call: str
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOMEM, "no memory at all")

    monkeypatch.setattr(os, call, refuse)
    assert [exports.make(MIB), exports.make(MIB)] == [None, None]
    assert ["no memory at all" in record.getMessage() for record in caplog.records] == [True]


def test_weights_are_found_while_others_are_forgotten(exports: WeightExports) -> None:
    others, weights = weights_on(exports, 100), weights_on(exports, 100)

    class Address(int):
        def __le__(self, _: int) -> bool:
            others.clear()
            return False

    number, (address, nbytes) = next(iter(exports._memories.items()))
    exports._memories[number] = Address(address), nbytes
    assert exports.find(weights) is not None
    assert len(exports.fds) == 1


def test_what_a_worker_puts_into_its_staging_buffer_is_read_there_and_the_staging_buffer_is_free_afterwards(
    ends: Pair,
) -> None:
    worker, server = ends()
    worker.ask_for_staging_buffer(MIB)
    assert server.receive() is None
    assert worker.receive() is None
    staging_buffer = worker.staging_buffer
    assert staging_buffer is not None
    gradient = staging_buffer.arena.data[4096 : 4096 + 200_000].fill_(3)
    assert worker.send([b"head", b"body"], [gradient[:100_000], gradient[100_000:]], zero_copy=True)
    frames = server.receive()
    assert frames is not None
    gradient.fill_(5)  # which the server sees, so it has no copy
    assert set(bytes(frames[2])) == {5}
    assert not staging_buffer.is_free
    del frames
    server.send([b"done"])
    assert bytes_of(worker.receive()) == [b"done"]
    assert staging_buffer.is_free
    worker.close()
    assert not staging_buffer.is_free


def test_of_two_who_ask_for_a_staging_buffer_one_after_the_other_the_last_has_it(ends: Pair) -> None:
    worker, server = ends()
    first = worker.ask_for_staging_buffer(MIB)
    second = worker.ask_for_staging_buffer(2 * MIB)
    assert server.receive() is None
    assert worker.receive() is None
    assert first.staging_buffer is None
    assert second.staging_buffer is not None
    assert second.staging_buffer.arena.nbytes == 2 * MIB
    assert worker.send(
        [b"head", b"body"], [second.staging_buffer.arena.data[:200_000].fill_(3)], zero_copy=True
    )
    frames = server.receive()
    assert frames is not None
    assert set(bytes(frames[2])) == {3}
    third = worker.ask_for_staging_buffer(MIB)
    assert second.staging_buffer.is_lost
    assert server.receive() is None
    assert worker.receive() is None
    assert third.staging_buffer is not None
    assert set(bytes(frames[2])) == {3}  # the server has that memory as long as it reads there


def test_a_worker_gets_no_staging_buffer_where_the_server_has_no_memory(ends: Pair) -> None:
    worker, server = ends()
    worker.ask_for_staging_buffer(2 * GIB)
    assert server.receive() is None
    assert worker.receive() is None
    assert worker.staging_buffer is None
    assert server.send([b"on"])
    assert bytes_of(worker.receive()) == [b"on"]


@pytest.fixture
def budget() -> Budget:
    return Budget(64 * MIB, 0, lambda: GIB)


@pytest.fixture
def bounded(budget: Budget) -> Iterator[ChannelListener]:
    """A server's side of workers of any name that has a limit of its memory."""
    found = ChannelListener(RUN + 3, lambda _peer, token: token == TOKEN, budget, Leases())
    yield found
    found.close()


def joined(listener: ChannelListener, own: bytes = OWN) -> Channel:
    """The end of a worker that has been given a channel."""
    found = answered(listener, lambda: connect_channel(RUN + 3, TOKEN, own))
    assert isinstance(found, Channel)
    return found


def test_all_memory_of_a_channel_counts_from_before_it_is_made_until_the_channel_ends(
    bounded: ChannelListener, budget: Budget
) -> None:
    worker = joined(bounded)
    assert budget.shared == 2 * MIN_MEMORY
    worker.make_room(8 * MIB)
    asked = worker.ask_for_staging_buffer(12 * MIB)
    assert taken(bounded) == []
    assert worker.receive() is None
    assert asked.staging_buffer is not None
    assert budget.shared == 2 * MIN_MEMORY + (16 + 12) * MIB
    assert worker.send([b"head", b"body", b"x" * MIB])
    assert taken(bounded)[0][1][2] == b"x" * MIB
    assert budget.shared == MIN_MEMORY + (16 + 12) * MIB  # the first memory for requests is not used again
    worker.ask_for_staging_buffer(5 * MIB)
    assert taken(bounded) == []
    assert budget.shared == MIN_MEMORY + (16 + 5) * MIB
    assert bounded.channels[OWN].make_room(3 * MIB)
    assert budget.shared == (6 + 16 + 5) * MIB
    assert budget.used == 0
    worker.close()
    assert taken(bounded) == []
    assert budget.shared == 0


def test_memory_counts_until_the_last_frame_of_it_was_read(bounded: ChannelListener, budget: Budget) -> None:
    worker = joined(bounded)
    worker.send([b"head", b"body", b"x" * MIB])
    kept: list[Any] = []
    bounded.receive(lambda _peer, frames: kept.extend(frames))
    worker.close()
    assert taken(bounded) == []
    assert budget.shared == MIN_MEMORY
    assert bytes(kept[2]) == b"x" * MIB
    kept.clear()
    assert budget.shared == 0


def test_what_a_server_may_not_use_is_not_made_and_the_worker_goes_on_without(
    bounded: ChannelListener, budget: Budget, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker, made = joined(bounded), list[int]()
    monkeypatch.setattr(channel, "make_shared_memory", made.append)
    asked = worker.ask_for_staging_buffer(56 * MIB + 1)
    worker.make_room(32 * MIB)
    assert taken(bounded) == []
    assert worker.receive() is None
    assert (asked.staging_buffer, worker.is_tight, made, budget.shared) == (None, True, [], 2 * MIN_MEMORY)
    assert worker.send([b"head", b"body", b"x" * MIB])
    assert not bounded.channels[OWN].make_room(32 * MIB)
    assert bounded.channels[OWN].send([b"answer"])
    assert bytes_of(worker.receive()) == [b"answer"]
    worker.close()


def test_a_worker_that_a_server_has_no_memory_for_is_told_that(
    bounded: ChannelListener, budget: Budget
) -> None:
    budget.claim(60 * MIB, "a table")
    told = answered(bounded, lambda: connect_channel(RUN + 3, TOKEN, OWN))
    assert isinstance(told, ConnectionRefusedError)
    assert "memory" in str(told)
    assert (bounded.channels, budget.shared) == ({}, 0)


def test_memory_that_cannot_be_made_does_not_count(
    bounded: ChannelListener, budget: Budget, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> int:
        raise OSError(errno.EMFILE, "too many open files")

    for name in ("make_shared_memory", "SharedArena"):
        with monkeypatch.context() as patch:
            patch.setattr(channel, name, fail)
            assert bounded.make(MIB, 1) is None
        assert budget.shared == 0


def test_tables_are_not_refused_for_shared_memory_and_the_largest_channels_make_way_for_them(
    bounded: ChannelListener, budget: Budget
) -> None:
    small, large = joined(bounded, b"small"), joined(bounded, b"large")
    large.ask_for_staging_buffer(40 * MIB)
    assert taken(bounded) == []
    bounded.reap_and_flush(0.0)
    assert list(bounded.channels) == [b"small", b"large"]
    budget.claim(50 * MIB, "a table")
    bounded.reap_and_flush(0.0)
    assert list(bounded.channels) == [b"small"]
    assert budget.shared == 2 * MIN_MEMORY
    with pytest.raises(ConnectionError):
        large.receive()
    with pytest.raises(ConfigurationError):
        budget.claim(15 * MIB, "another one")
    for worker in (small, large):
        worker.close()


def test_weights_that_workers_read_where_they_lie_count_once_as_those_of_their_table() -> None:
    budget, leases = Budget(0, 0, lambda: GIB), Leases()
    listener = ChannelListener(RUN + 3, lambda *_: True, budget, leases)
    assert leases.shared(8 * MIB) is not None
    assert budget.shared == 0
    listener.close()
