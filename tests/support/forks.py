"""Python programs as children that need no imports: forked from one process that has done them all.

They are processes like others, with memory, signals and an end of their own; only their parent is the fork server. Its
imports and its hash seed are common to all of them. What is about starting a program, such as the command lines, the
launcher or imports, is tested with real ones.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

from tests.support.fork_server import LARGEST
from tests.support.limits import LIMIT

ROOT = Path(__file__).parents[2]
ADDRESS = "KVTRAINER_TEST_FORKS"
"""The variable that tells processes of a run of tests where their fork server is."""


class Fork:
    """A child, with the methods of subprocess.Popen that tests need."""

    stdin: BinaryIO | None = None
    stdout: BinaryIO | None = None
    stderr: BinaryIO | None = None
    """Our ends of pipes; set by who starts it with some."""

    def __init__(self, server: ForkServer, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._server = server
        self._pidfd = os.pidfd_open(pid)
        self._lock = threading.Lock()

    def fileno(self) -> int:
        """A descriptor that is readable once it has ended, until `poll` or `wait` has said so."""
        return self._pidfd

    def poll(self) -> int | None:
        """The exit code, negative after a signal; None while it runs."""
        with self._lock:
            if self.returncode is None and self._has_ended(0):
                self.returncode = self._server.reap(self.pid)
                os.close(self._pidfd)
            return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """The exit code once it has ended. Raises subprocess.TimeoutExpired."""
        if self.returncode is None:
            self._has_ended(timeout)
        code = self.poll()
        if code is None:
            raise subprocess.TimeoutExpired(f"fork {self.pid}", timeout or 0.0)
        return code

    def _has_ended(self, timeout: float | None) -> bool:
        poll = select.poll()  # select takes no descriptor above 1023
        poll.register(self._pidfd, select.POLLIN)
        return bool(poll.poll(None if timeout is None else 1000 * timeout))

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)


class ForkServer:
    """The one process that forks come from, as one of the processes that use it sees it."""

    def __init__(self, address: str) -> None:
        self._channel = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._channel.connect(f"\0{address}")
        self._lock = threading.Lock()

    def start(
        self,
        arguments: Sequence[str],
        env: Mapping[str, str],
        cwd: Path,
        streams: Sequence[int],
        others: Sequence[int] = (),
        stored: Sequence[int] = (),
        is_session: bool = False,
    ) -> Fork:
        """Start what `python ARGUMENTS` would run; arguments begin with -m or -c.

        Args:
            streams: File descriptors that become its standard input, output and error.
            others: More file descriptors, which it has under the same numbers.
            stored: Those of a file descriptor store, which it has from 3 on.
            is_session: It leads a session of its own.
        """
        targets = [0, 1, 2, *others, *range(3, 3 + len(stored))]
        request = {
            "arguments": [*arguments],
            "env": {**env},
            "cwd": str(cwd),
            "targets": targets,
            "session": is_session,
        }
        message = json.dumps(request).encode()
        assert len(message) < LARGEST, "a request must fit into one message"
        with self._lock:
            socket.send_fds(self._channel, [message], [*streams, *others, *stored])
            return Fork(self, int(self._answer()))

    def reap(self, pid: int) -> int:
        """The exit code of a child that has ended."""
        with self._lock:
            self._channel.send(json.dumps({"reap": pid}).encode())
            return int(self._answer())

    def close(self) -> None:
        """Have the children of this process ended."""
        self._channel.close()

    def _answer(self) -> bytes:
        answer = self._channel.recv(64)
        assert answer, "the fork server ended"
        return answer


def inherited() -> dict[str, str]:
    """The environment of this process for a child, without what it says about a job and about threads.

    Models of tests are small: those that have two servers want both of them at work.
    """
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("KVSTORE_", "OMP_"))}
    return {**kept, "KVSTORE_SPREAD_FROM": "1"}


def serve_forks() -> str:
    """Start a fork server, which ends with this process; returns its address."""
    address = f"kvtrainer-forks-{uuid.uuid4().hex}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(f"\0{address}")
        listener.listen()
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.fork_server", str(listener.fileno())],
            cwd=ROOT,
            env={**inherited(), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            pass_fds=(listener.fileno(),),
            stdin=subprocess.PIPE,
            start_new_session=True,
        )
    atexit.register(process.communicate, timeout=LIMIT)
    return address


@functools.cache
def fork_server() -> ForkServer:
    """The fork server of this run of tests; one of this process where there is none yet."""
    server = ForkServer(os.environ.get(ADDRESS) or serve_forks())
    atexit.register(server.close)
    return server


def piped_fork(arguments: Sequence[str], env: Mapping[str, str], cwd: Path, stderr: int) -> Fork:
    """Start what `python ARGUMENTS` would run, with pipes as its standard input and output."""
    their_input, our_output = os.pipe()
    our_input, their_output = os.pipe()
    child = fork_server().start(arguments, env, cwd, [their_input, their_output, stderr])
    os.close(their_input)
    os.close(their_output)
    child.stdin = open(our_output, "wb")  # noqa: SIM115
    child.stdout = open(our_input, "rb")  # noqa: SIM115
    return child
