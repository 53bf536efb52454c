"""Memory that outlives a process: whole versions, that of the right round, and one owner."""

from __future__ import annotations

import errno
import mmap
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kvtrainer.errors import ConfigurationError
from kvtrainer.states.surviving_memory import SurvivingMemory, SurvivingVersions, Version
from tests.support.limits import LIMIT


def value(number: float, size: int = 5) -> dict[str, Tensor]:
    return {"a": torch.full((size,), number), "b": torch.full((1, 3), int(number), dtype=torch.int64)}


def opened(path: Path) -> SurvivingMemory:
    return SurvivingMemory(str(path))


def successor(path: Path, memory: SurvivingMemory) -> SurvivingVersions:
    """The first section as the next process sees it; the present one ends without a word."""
    memory.close()
    return opened(path).sections[0]


def numbers(found: Version | None) -> tuple[int, float] | None:
    return None if found is None else (found.mark, float(found.tensors["a"][0]))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "memory"


@pytest.fixture
def memory(path: Path) -> SurvivingMemory:
    memory = opened(path)
    memory.begin()
    memory.sections[0].begin(1, value(0.0))
    return memory


def test_what_was_written_before_a_round_that_counts_holds_after_it(
    path: Path, memory: SurvivingMemory
) -> None:
    memory.sections[0].write(1, value(1.0), b"more")
    found = successor(path, memory).find(2)
    assert found is not None
    assert (found.mark, found.extra) == (2, b"more")
    assert torch.equal(found.tensors["a"], torch.full((5,), 1.0))
    assert torch.equal(found.tensors["b"], torch.full((1, 3), 1))


def test_what_held_before_a_round_holds_if_that_is_repeated_or_changed_nothing(
    path: Path, memory: SurvivingMemory
) -> None:
    memory.sections[0].write(1, value(1.0))
    section = successor(path, memory)
    assert numbers(section.find(1)) == (1, 0.0)
    assert numbers(section.find(2, last_counts=False)) == (1, 0.0)


def test_a_round_that_changed_nothing_keeps_what_held_before_it_for_the_next_one(
    path: Path, memory: SurvivingMemory
) -> None:
    section = memory.sections[0]
    section.write(1, value(1.0))
    section.drop()
    section.write(2, value(2.0))  # round 2 is on its way; round 1 was skipped
    section = successor(path, memory)
    assert numbers(section.find(2, last_counts=False)) == (2, 0.0)
    section.write(2, value(3.0))
    section.accept()
    section.write(3, value(4.0))
    assert numbers(section.find(3)) == (3, 3.0)


def test_rounds_without_a_word_of_this_rank_change_nothing(path: Path, memory: SurvivingMemory) -> None:
    section = memory.sections[0]
    section.write(1, value(1.0))
    section.accept()
    assert numbers(successor(path, memory).find(7)) == (2, 1.0)


def test_rounds_go_on_for_long_in_the_same_memory_and_a_longer_version_finds_its_place(
    path: Path, memory: SurvivingMemory
) -> None:
    section = memory.sections[0]
    for round_ in range(1, 20):
        section.write(round_, value(float(round_)))
        section.accept()
    size = path.stat().st_size
    section.write(20, value(20.0, size=9000))
    section.accept()
    assert size <= 3 * mmap.PAGESIZE < 36_000 < path.stat().st_size
    found = successor(path, memory).find(21)
    assert found is not None
    assert torch.equal(found.tensors["a"], torch.full((9000,), 20.0))


def test_versions_that_have_outgrown_their_places_leave_no_bytes_behind() -> None:
    fd = os.memfd_create("test")
    try:
        memory = SurvivingMemory(f"/proc/self/fd/{fd}")
        memory.begin()
        section = memory.sections[0]
        section.begin(1, value(0.0, size=1000))
        for round_ in range(1, 40):
            section.write(round_, value(float(round_), size=1000 * round_))
            section.accept()
        latest = 2 * (4 * 1000 * 39 + 4096)
        assert os.fstat(fd).st_blocks * 512 <= 4096 + latest
        memory.close()
        again = SurvivingMemory(f"/proc/self/fd/{fd}")
        assert numbers(again.sections[0].find(40)) == (40, 39.0)
        again.sections[0].write(
            40, value(40.0, size=100_000)
        )  # a successor frees what it has not mapped itself, too
        assert os.fstat(fd).st_blocks * 512 <= 4096 + latest // 2 + 4 * 100_000 + 4096
        again.close()
    finally:
        os.close(fd)


def test_memory_that_is_full_is_named_with_its_variable_and_keeps_what_held(
    path: Path, memory: SurvivingMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(fd: int, offset: int, size: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(ConfigurationError, match=f"KVSTORE_WORKER_MEMORY={str(path)!r}.*No space left"):
        memory.sections[0].write(1, value(1.0, size=9000))
    monkeypatch.undo()
    assert numbers(successor(path, memory).find(1)) == (1, 0.0)


def test_sections_do_not_touch_each_other(path: Path, memory: SurvivingMemory) -> None:
    memory.sections[1].begin(4, value(9.0))
    memory.sections[0].write(1, value(1.0))
    memory.close()
    again = opened(path)
    assert numbers(again.sections[1].find(4)) == (4, 9.0)
    assert numbers(again.sections[0].find(2)) == (2, 1.0)


def test_each_beginning_has_a_number_of_its_own_and_finds_nothing_of_former_ones(
    path: Path, memory: SurvivingMemory
) -> None:
    first = memory.id
    memory.close()
    again = opened(path)
    assert again.id == first
    again.begin()
    assert again.id != first
    assert again.sections[0].find(100) is None


def test_a_second_trainer_and_another_process_are_refused_until_the_first_one_is_done(
    path: Path, memory: SurvivingMemory
) -> None:
    with pytest.raises(ConfigurationError):
        opened(path)  # at once, because it is this process
    code = (
        f"from kvtrainer.states.surviving_memory import SurvivingMemory; SurvivingMemory({str(path)!r}, 0.1)"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=LIMIT, check=False
    )
    assert "ConfigurationError" in ended.stderr
    memory.close()
    opened(path).close()


def test_a_successor_waits_for_a_child_that_the_former_process_has_left(path: Path) -> None:
    """A child that was forked has the lock, too: it ends with the last of them."""
    code = f"""
import os, signal, sys
from kvtrainer.states.surviving_memory import SurvivingMemory
memory = SurvivingMemory({str(path)!r})
if os.fork() == 0:
    sys.stdin.read(1)
    os._exit(0)
print("locked", flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as former:
        assert former.stdin is not None
        assert former.stdout is not None
        assert former.stdout.readline() == b"locked\n"
        former.wait()
        with pytest.raises(ConfigurationError):
            SurvivingMemory(str(path), 0.0)
        threading.Timer(0.1, former.stdin.close).start()
        SurvivingMemory(str(path), LIMIT).close()


@pytest.mark.parametrize("content", [b"something else", None])
def test_a_file_of_something_else_and_one_that_cannot_be_opened_are_refused(path: Path, content: Any) -> None:
    path = path if content else path / "missing" / "file"
    if content:
        path.write_bytes(content * 1000)
    with pytest.raises(ConfigurationError):
        opened(path)
    assert not content or path.read_bytes() == content * 1000


def test_a_writer_that_is_killed_leaves_one_whole_version(path: Path, memory: SurvivingMemory) -> None:
    """A version that is being written has no mark, so nothing is found of it."""
    section, slot = memory.sections[0], memory.sections[0]._slots[1]
    section.write(1, value(1.0))
    section.accept()
    words = slot.tolist()
    section.write(2, value(2.0))
    section._slots[0][0] = -1  # as in the middle of that write
    assert words[0] == 2
    assert numbers(successor(path, memory).find(2)) == (2, 1.0)
    assert os.path.exists(path)


def test_a_file_that_a_killed_process_left_empty_is_used_like_a_new_one(path: Path) -> None:
    path.write_bytes(bytes(4096))
    memory = opened(path)
    memory.begin()
    memory.sections[0].begin(1, value(3.0))
    assert numbers(successor(path, memory).find(1)) == (1, 3.0)


def test_what_held_remains_until_what_replaces_it_is_whole(
    path: Path, memory: SurvivingMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(name: str) -> None:
        raise KeyboardInterrupt(name)

    monkeypatch.setattr("kvtrainer.states.surviving_memory.failpoint", killed)
    with pytest.raises(KeyboardInterrupt):
        memory.sections[0].begin(1, value(8.0))
    assert numbers(successor(path, memory).find(1)) == (1, 0.0)
