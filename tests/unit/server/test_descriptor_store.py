"""The descriptor store alone: datagrams in, descriptors and variables out."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from kvstore_server.descriptor_store import DescriptorStore
from kvstore_server.notify import READY, notify
from tests.support.limits import LIMIT

ROOT = Path(__file__).parents[3]


@pytest.fixture
def store() -> Iterator[DescriptorStore]:
    made = DescriptorStore()
    yield made
    made.close()


def memory(text: bytes = b"") -> int:
    fd = os.memfd_create("test")
    os.write(fd, text)
    return fd


def send(store: DescriptorStore, message: str, *descriptors: int) -> None:
    """Send a message of this process, and let the store obey it."""
    assert notify({"NOTIFY_SOCKET": store.address}, message, descriptors)
    store.receive(os.getpgrp())


def contents(store: DescriptorStore) -> dict[str, bytes]:
    return {name: os.pread(fd, 100, 0) for name, fd in zip(store.names, store.descriptors, strict=True)}


def num_open() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_memory_is_kept_under_its_name_when_its_sender_has_closed_it(store: DescriptorStore) -> None:
    fd = memory(b"weights")
    send(store, "FDSTORE=1\nFDNAME=arena-0", fd)
    os.close(fd)
    assert contents(store) == {"arena-0": b"weights"}


def test_the_next_start_is_told_how_many_descriptors_there_are_and_their_names(
    store: DescriptorStore,
) -> None:
    for name in ("log", "arena"):
        send(store, f"FDSTORE=1\nFDNAME={name}", memory())
    told = store.environment({"PATH": "/bin"})
    assert told["NOTIFY_SOCKET"] == store.address
    assert (told["LISTEN_FDS"], told["LISTEN_FDNAMES"], told["PATH"]) == ("2", "log:arena", "/bin")


def test_a_first_start_is_not_told_of_descriptors_that_another_program_was_given(
    store: DescriptorStore,
) -> None:
    told = store.environment({"LISTEN_FDS": "1", "LISTEN_PID": "1", "NOTIFY_SOCKET": "/run/systemd/notify"})
    assert {name for name in told if name.startswith("LISTEN_")} == set()
    assert told["NOTIFY_SOCKET"] == store.address


def test_what_is_removed_is_closed_under_all_descriptors_of_the_name(store: DescriptorStore) -> None:
    ends = [os.pipe() for _ in range(2)]
    before = num_open()
    send(store, "FDSTORE=1\nFDNAME=pipe", *(writer for _, writer in ends))
    send(store, "FDSTORE=1\nFDNAME=other", memory())
    assert num_open() == before + 4  # a memfd of ours, too
    send(store, "FDSTOREREMOVE=1\nFDNAME=pipe")
    assert store.names == ["other"]
    for reader, writer in ends:
        os.close(writer)
        assert os.read(reader, 1) == b"", "the store holds the other end"


def test_the_same_memory_is_kept_once_and_under_its_first_name(store: DescriptorStore) -> None:
    fd = memory(b"one")
    before = num_open()
    send(store, "FDSTORE=1\nFDNAME=first", fd)
    send(store, "FDSTORE=1\nFDNAME=second", os.dup(fd))
    assert store.names == ["first"]
    assert num_open() == before + 2  # our duplicate, and the store's


def test_a_name_may_stand_for_several_descriptors(store: DescriptorStore) -> None:
    send(store, "FDSTORE=1\nFDNAME=arena", memory(b"a"), memory(b"b"))
    assert store.names == ["arena", "arena"]


@pytest.mark.parametrize("name", ["", "a:b", "é", "x" * 256, "tab\there"])
def test_what_has_no_good_name_is_called_stored(store: DescriptorStore, name: str) -> None:
    send(store, f"FDSTORE=1\nFDNAME={name}", memory())
    send(store, "FDSTORE=1", memory())
    assert store.names == ["stored", "stored"]


def test_a_full_store_closes_what_comes_and_warns_once() -> None:
    said: list[str] = []
    store = DescriptorStore(2, said.append)
    for number in range(4):
        fd = memory()
        send(store, f"FDSTORE=1\nFDNAME={number}", fd)
        os.close(fd)
    assert store.names == ["0", "1"]
    assert len(said) == 1
    store.close()


def test_a_message_says_that_the_process_is_ready(store: DescriptorStore) -> None:
    assert not store.is_ready
    send(store, READY)
    assert store.is_ready


@pytest.mark.parametrize("message", ["", "FDNAME=x", "FDSTORE=0\nFDNAME=x", "STATUS=1", "\xff\x00=\n=="])
def test_descriptors_of_other_messages_are_closed(store: DescriptorStore, message: str) -> None:
    fd, before = memory(), num_open()
    send(store, message or "\n", fd)
    assert (store.names, num_open()) == ([], before)


def test_a_barrier_is_lifted_once_what_came_before_it_is_kept(store: DescriptorStore) -> None:
    end, passed = os.pipe()
    assert notify({"NOTIFY_SOCKET": store.address}, "FDSTORE=1\nFDNAME=arena", [memory()])
    assert notify({"NOTIFY_SOCKET": store.address}, "BARRIER=1", [passed])
    os.close(passed)
    os.set_blocking(end, False)
    with pytest.raises(BlockingIOError):
        os.read(end, 1)
    store.receive(os.getpgrp())
    assert (os.read(end, 1), store.names) == (b"", ["arena"])
    os.close(end)


def test_messages_of_another_process_group_count_for_nothing(store: DescriptorStore) -> None:
    before = num_open()
    program = """
import os, sys
from kvstore_server.notify import notify
os.setpgid(0, 0)
notify(os.environ, "FDSTORE=1\\nFDNAME=strange", [os.memfd_create("x")])
notify(os.environ, "READY=1")
sys.stdin.read()
"""
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "NOTIFY_SOCKET": store.address}
    stranger = subprocess.Popen([sys.executable, "-S", "-c", program], env=environ, stdin=subprocess.PIPE)
    wait_for(store)
    assert os.getpgid(stranger.pid) == stranger.pid
    store.receive(os.getpgrp())
    stranger.communicate(timeout=LIMIT)
    store.receive(os.getpgrp())
    assert (store.names, store.is_ready, num_open()) == ([], False, before)


def test_what_a_killed_process_sent_last_is_kept(store: DescriptorStore) -> None:
    program = """
import os, signal
from kvstore_server.notify import notify
fd = os.memfd_create("x")
os.write(fd, b"last")
notify(os.environ, "FDSTORE=1\\nFDNAME=arena", [fd])
os.kill(os.getpid(), signal.SIGKILL)
"""
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "NOTIFY_SOCKET": store.address}
    child = subprocess.Popen([sys.executable, "-S", "-c", program], env=environ, start_new_session=True)
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    store.receive(child.pid)
    assert child.wait(LIMIT) == -signal.SIGKILL
    assert contents(store) == {"arena": b"last"}


def test_a_message_that_is_too_long_is_ignored_with_its_descriptors(store: DescriptorStore) -> None:
    fd, before = memory(), num_open()
    send(store, f"FDSTORE=1\nFDNAME=x\nSTATUS={'y' * 10_000}", fd)
    assert (store.names, num_open()) == ([], before)


def test_closing_a_store_closes_all_that_it_keeps() -> None:
    before = num_open()
    store = DescriptorStore()
    fd = memory()
    send(store, "FDSTORE=1", fd)
    os.close(fd)
    store.close()
    assert num_open() == before


@pytest.mark.parametrize("environ", [{}, {"NOTIFY_SOCKET": ""}, {"NOTIFY_SOCKET": "vsock:2:1234"}])
def test_a_process_without_a_supervisor_notifies_nobody(environ: Mapping[str, str]) -> None:
    assert not notify(environ, READY)


def test_a_supervisor_that_is_gone_is_an_error() -> None:
    with pytest.raises(ConnectionRefusedError):
        notify({"NOTIFY_SOCKET": "@kvtrainer-nobody-listens-here"}, READY)


def wait_for(store: DescriptorStore) -> None:
    """Wait until a message has come."""
    with socket.socket(fileno=os.dup(store.fileno())) as waiting:
        waiting.settimeout(LIMIT)
        waiting.recv(1, socket.MSG_PEEK)
        os.set_blocking(store.fileno(), False)
