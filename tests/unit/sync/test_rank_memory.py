"""Memory that ranks of one host share is of its size for ever, or is not mapped."""

from __future__ import annotations

import os
import select
import socket
from collections.abc import Iterator

import pytest

from kvstore_server.transport.arena import make_shared_memory
from kvtrainer.ranks import shared_memory
from kvtrainer.ranks.shared_memory import PLACE

NBYTES = shared_memory._ROOMS * 2 * PLACE


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    first, second = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with first, second:
        yield first, second


def memory_from(ends: tuple[socket.socket, socket.socket], fd: int) -> int:
    """Have rank 1 take memory that rank 0 gives; return its size."""
    socket.send_fds(ends[0], [shared_memory._GREETING.pack(0)], [fd])
    os.close(fd)
    return shared_memory._share_memory_arena(
        1, [shared_memory._MemoryPeer(0, ends[1], -1, select.poll())]
    ).nbytes


def test_memory_of_the_lowest_rank_is_mapped(ends: tuple[socket.socket, socket.socket]) -> None:
    assert memory_from(ends, make_shared_memory(NBYTES)) == NBYTES


def test_memory_of_another_size_is_refused(ends: tuple[socket.socket, socket.socket]) -> None:
    with pytest.raises(ConnectionError):
        memory_from(ends, make_shared_memory(NBYTES - 4096))


def test_memory_that_may_become_shorter_is_refused(ends: tuple[socket.socket, socket.socket]) -> None:
    fd = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, NBYTES)
    with pytest.raises(ConnectionError):
        memory_from(ends, fd)
