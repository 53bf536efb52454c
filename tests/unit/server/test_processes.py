"""What can be seen of another process: it runs, is stopped, or has ended, and how."""

from __future__ import annotations

import os
import platform
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from kvstore_server.processes import Process, Processes, ProcessState, describe_exit
from tests.support.processes import eventually

KERNEL = tuple(int(part) for part in platform.release().split("-")[0].split(".")[:2])


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    """A process that waits to be ended."""
    with subprocess.Popen(["sleep", "infinity"]) as process:
        yield process
        process.kill()


@pytest.fixture
def process(child: subprocess.Popen[bytes]) -> Iterator[Process]:
    seen = Process(child.pid)
    yield seen
    seen.close()


def test_a_process_that_sleeps_runs(process: Process) -> None:
    assert process.state() is ProcessState.RUNS


def test_a_stopped_process_is_seen_to_be_stopped_until_it_goes_on(
    child: subprocess.Popen[bytes], process: Process
) -> None:
    child.send_signal(signal.SIGSTOP)
    assert eventually(lambda: process.state() is ProcessState.STOPPED)
    child.send_signal(signal.SIGCONT)
    assert eventually(lambda: process.state() is ProcessState.RUNS)


def test_a_killed_process_has_ended_before_anybody_has_reaped_it_and_after(
    child: subprocess.Popen[bytes], process: Process
) -> None:
    child.kill()
    assert eventually(lambda: process.state() is ProcessState.ENDED)
    child.wait()
    assert process.state() is ProcessState.ENDED


@pytest.mark.parametrize(
    ("script", "how"),
    [
        ("import os; os.kill(os.getpid(), 9)", "was killed by signal 9 (SIGKILL)"),
        ("raise SystemExit(7)", "exited with code 7"),
    ],
)
def test_what_has_ended_a_process_is_known_where_the_system_says_it_once_its_parent_knows(
    script: str, how: str
) -> None:
    with subprocess.Popen([sys.executable, "-S", "-c", script]) as child:
        process = Process(child.pid)
        child.wait()
    assert process.how_ended() == (how if KERNEL >= (6, 15) else "")
    process.close()


def test_of_itself_a_process_does_not_know_from_its_number_that_it_works() -> None:
    process = Process(os.getpid())
    assert process.state() is ProcessState.UNKNOWN
    assert process.how_ended() == ""
    process.close()


def test_a_process_that_is_not_there_cannot_be_watched(child: subprocess.Popen[bytes]) -> None:
    child.kill()
    child.wait()
    with pytest.raises(OSError, match="process"):
        Process(child.pid)


def test_the_processes_of_sessions_are_told_when_they_have_ended_until_they_are_removed(
    child: subprocess.Popen[bytes],
) -> None:
    processes, key, own = Processes(), (b"worker", 7), (b"this one", 8)
    processes.add(key, child.pid)
    processes.add(own, os.getpid())
    assert (list(processes), processes.ended(), processes.state(key)) == ([key, own], {}, ProcessState.RUNS)
    child.kill()
    assert eventually(lambda: list(processes.ended()) == [key])
    processes.remove(key)
    processes.remove(key)
    assert (list(processes), processes.ended(), processes.state(key)) == ([own], {}, ProcessState.UNKNOWN)
    processes.close()
    assert list(processes) == []


@pytest.mark.parametrize(
    ("code", "text"),
    [
        (0, "exited with code 0"),
        (3, "exited with code 3"),
        (-11, "was killed by signal 11 (SIGSEGV)"),
        (-40, "was killed by signal 40"),
    ],
)
def test_an_end_is_described_by_its_code_or_its_signal(code: int, text: str) -> None:
    assert describe_exit(code) == text
