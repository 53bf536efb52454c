"""Pages that were written are found, whoever wrote them, and no others, where the system can note it."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvstore_server.plan import PAGE
from kvstore_server.transport.pages import WrittenPages

_PAGES = 2000
_DONTNEED = 4


class _Watched:
    """A private mapping of a file of zeros that is watched."""

    def __init__(self) -> None:
        fd = os.memfd_create("watched", os.MFD_CLOEXEC)
        os.ftruncate(fd, _PAGES * PAGE)
        self.file = np.frombuffer(mmap.mmap(fd, _PAGES * PAGE), np.uint8)
        self.map = mmap.mmap(fd, _PAGES * PAGE, mmap.MAP_PRIVATE)
        os.close(fd)
        self.bytes = np.frombuffer(self.map, np.uint8)
        self.address = self.bytes.ctypes.data
        self.page_map = os.open("/proc/self/pagemap", os.O_RDONLY)
        try:
            self.pages = WrittenPages(self.page_map)
        except OSError as error:
            pytest.skip(f"this system notes no writes: {error}")
        self.pages.watch(self.address, len(self.bytes))

    def found(self) -> list[int]:
        listed: list[int] = self.pages.among(self.address, len(self.bytes)).tolist()
        return listed


@pytest.fixture
def watched() -> Iterator[_Watched]:
    made = _Watched()
    yield made
    os.close(made.page_map)


def test_nothing_is_found_of_pages_that_were_read(watched: _Watched) -> None:
    assert not watched.bytes.any()
    assert not watched.found()


def test_all_pages_that_were_written_are_found_and_no_others(watched: _Watched) -> None:
    wanted = np.flatnonzero(np.random.default_rng(3).random(_PAGES) < 0.6)
    watched.bytes[wanted * PAGE + 17] = 1
    assert watched.found() == wanted.tolist()


def test_more_parts_are_found_than_the_system_tells_at_once(watched: _Watched) -> None:
    watched.bytes[:: 2 * PAGE] = 1
    assert watched.found() == list(range(0, _PAGES, 2))


def test_pages_of_a_part_are_counted_from_its_beginning(watched: _Watched) -> None:
    watched.bytes[[0, 7 * PAGE, 9 * PAGE]] = 1
    assert watched.pages.among(watched.address + 5 * PAGE, 4 * PAGE).tolist() == [2]


def test_what_the_system_itself_writes_is_found(watched: _Watched, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(range(1, 100)))
    with (tmp_path / "file").open("rb", buffering=0) as file:
        file.readinto(memoryview(watched.map)[3 * PAGE : 3 * PAGE + 99])
    assert watched.found() == [3]


def test_what_others_write_to_the_file_is_not_found(watched: _Watched) -> None:
    watched.file[5 * PAGE] = 9
    assert watched.bytes[5 * PAGE] == 9
    assert not watched.found()


def test_what_a_forked_child_writes_is_not_found_but_what_its_parent_then_writes_is(
    watched: _Watched,
) -> None:
    child = os.fork()
    if not child:
        watched.bytes[6 * PAGE] = 1
        os._exit(0)
    os.waitpid(child, 0)
    assert not watched.found()
    watched.bytes[8 * PAGE] = 1
    assert watched.found() == [8]


def test_pages_that_are_given_up_and_watched_again_are_found_when_they_are_written_again(
    watched: _Watched,
) -> None:
    library = ctypes.CDLL(None, use_errno=True)
    watched.bytes[4 * PAGE] = 1
    for _ in range(2):
        at = watched.address + 4 * PAGE
        assert library.madvise(ctypes.c_void_p(at), ctypes.c_size_t(PAGE), _DONTNEED) == 0
        watched.pages.watch(at, PAGE)
        assert not watched.found()
        watched.bytes[4 * PAGE] = 1
        assert watched.found() == [4]
