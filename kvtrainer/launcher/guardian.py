"""The guardian: a small process that ends a launched job when its launcher is gone, however it went.

The launcher holds the writing end of a pipe and nobody else does, so the guardian, which reads it, sees its
end as soon as the launcher has exited or was killed. It then sends SIGTERM to every process of the job, and
SIGKILL to what is left after a while. A process belongs to the job when it is in one of the sessions that the
launcher told about, or carries the job's mark in its environment: a grandchild in a session of its own does.

This file is also run as a program, by its path, and so imports nothing outside the standard library.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Collection

MARK = "KVLAUNCH_MARK"
"""Environment variable that marks every process of a job; nested jobs append theirs."""
KILL_WAIT = 5.0
"""Seconds to wait for processes to vanish after SIGKILL, which only one stuck in the kernel does not do."""
MAX_RESTARTS = 3
_POLL = 0.02


class Guardian:
    """The launcher's handle on its guardian process; the process runs from construction to `close`."""

    def __init__(self, mark: str, grace: float) -> None:
        self._mark = mark
        self._grace = grace
        self._sessions: set[int] = set()
        self._restarts = 0
        self._pipe = -1
        self._start()

    def watch(self, session: int) -> None:
        """Hand a session, named by its leader's pid, to the guardian."""
        self._sessions.add(session)
        self._tell(f"+{session}\n")

    def forget_if_empty(self, session: int) -> None:
        """Let go of a session whose leader has exited, unless the leader left processes behind.

        The kernel may give the number of an empty session to a stranger.
        """
        if not survivors("", {session}):
            self._sessions.discard(session)
            self._tell(f"-{session}\n")

    def ensure(self) -> bool:
        """Start another guardian if this one has died; False when it has died too often to go on."""
        if self._process.poll() is None:
            return True
        if self._restarts == MAX_RESTARTS:
            return False
        self._restarts += 1
        os.close(self._pipe)
        self._start()
        return True

    def close(self) -> None:
        """Let the guardian end what is left of the job, and then itself; returns at once, see `closed`."""
        if self._pipe >= 0:
            os.close(self._pipe)
            self._pipe = -1

    def closed(self) -> bool:
        """Whether the guardian process has exited, which means that nothing is left of the job."""
        return self._process.poll() is not None

    def _start(self) -> None:
        reading, self._pipe = os.pipe()
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", os.path.abspath(__file__), self._mark, str(self._grace)],
                stdin=reading,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                cwd="/",
                start_new_session=True,
            )
        finally:
            os.close(reading)
        for session in self._sessions:
            self._tell(f"+{session}\n")

    def _tell(self, line: str) -> None:
        # A dead guardian is replaced by `ensure`, and the new one is told everything.
        with contextlib.suppress(BrokenPipeError):
            os.write(self._pipe, line.encode())


def survivors(mark: str, sessions: Collection[int]) -> list[int]:
    """Return the pids of all processes in one of `sessions` or with `mark` in their environment.

    Zombies are left out. An empty mark matches nothing. Reads /proc.
    """
    needle = mark.encode()
    return [int(name) for name in os.listdir("/proc") if name.isdigit() and _belongs(name, needle, sessions)]


def _belongs(pid: str, mark: bytes, sessions: Collection[int]) -> bool:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # "pid (name) state ppid pgrp session ..."; the name may hold anything, a parenthesis too.
            fields = file.read().rpartition(b")")[2].split()
        if fields[0] in (b"Z", b"X"):
            return False
        if int(fields[3]) in sessions:
            return True
        if not mark:
            return False
        with open(f"/proc/{pid}/environ", "rb") as file:
            return mark in file.read()
    except OSError:
        return False  # it has just exited, or belongs to another user


def end_all(mark: str, sessions: Collection[int], grace: float) -> None:
    """SIGTERM each survivor once; after `grace` seconds SIGKILL until none is left or KILL_WAIT is over."""
    asked: set[int] = set()
    deadline = time.monotonic() + grace
    while (left := survivors(mark, sessions)) and time.monotonic() < deadline:
        _send([pid for pid in left if pid not in asked], signal.SIGTERM)
        asked.update(left)
        time.sleep(_POLL)
    deadline = time.monotonic() + KILL_WAIT
    # Looked up anew each time: a process may have been forked between a look and a kill.
    while (left := survivors(mark, sessions)) and time.monotonic() < deadline:
        _send(left, signal.SIGKILL)
        time.sleep(_POLL)


def _send(pids: Collection[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def _stand_guard(mark: str, grace: float) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    sessions: set[int] = set()
    for line in sys.stdin:
        (sessions.add if line[0] == "+" else sessions.discard)(int(line[1:]))
    end_all(mark, sessions, grace)


if __name__ == "__main__":
    _stand_guard(sys.argv[1], float(sys.argv[2]))
