"""Processes of this host as another one sees them: one runs, is stopped, or has ended, and what has ended it.

A process is known by a pidfd, which stays its own when its number is used again. It has to do nothing for that: a call
in C that holds Python's interpreter lock (GIL) for minutes, and so keeps heartbeats back, does not look like death.
"""

from __future__ import annotations

import fcntl
import os
import re
import select
import signal
import struct
from collections.abc import Iterator
from contextlib import suppress
from enum import Enum, auto
from pathlib import Path

LAST_WORDS = 0.25
"""Seconds without a message after which a process that has ended counts as dead: what it said last may be on its way,
and with it why it left."""
_PIDFD_GET_INFO = 0xC040FF0B
"""An ioctl of Linux 6.13: fill in a pidfd_info of 64 bytes."""
_INFO = struct.Struct("<QQ11Ii")
"""Mask, control group, ids; and the exit status as of wait(2), from Linux 6.15 on."""
_HAS_EXIT = 1 << 3
"""The bit of the mask that asks for the exit status. It comes back where there is one: the parent has seen the end."""
_PID = re.compile(r"^Pid:\s*(-?\d+)$", re.MULTILINE)


class ProcessState(Enum):
    """What a process does."""

    UNKNOWN = auto()
    """It cannot be seen from here, as from another container."""
    RUNS = auto()
    """It computes or sleeps."""
    STOPPED = auto()
    """By SIGSTOP, or by a debugger."""
    ENDED = auto()


class Process:
    """A process of this host.

    Raises:
        OSError: there is none of that number, it is not seen from here, or the system has no pidfds.
    """

    def __init__(self, pid: int) -> None:
        if not hasattr(os, "pidfd_open"):
            raise OSError("this system has no descriptors of processes")
        self._fd = os.pidfd_open(pid)
        self._is_own = pid == os.getpid()
        self._end = select.poll()  # not `select`, which knows the first 1024 descriptors alone
        self._end.register(self._fd, select.POLLIN)

    def fileno(self) -> int:
        """Return a descriptor that can be read when the process has ended."""
        return self._fd

    def close(self) -> None:
        os.close(self._fd)

    def state(self) -> ProcessState:
        """Look what the process does. Of this process itself it is unknown: who looks is not what it looks for."""
        if self._end.poll(0):
            return ProcessState.ENDED
        if self._is_own:
            return ProcessState.UNKNOWN
        try:
            # The number in the namespace that /proc shows, which need not be the one in ours.
            own = _PID.search(Path(f"/proc/self/fdinfo/{self._fd}").read_text())
            stat = Path(f"/proc/{own[1] if own else -1}/stat").read_text()
        except OSError:
            return ProcessState.ENDED if self._end.poll(0) else ProcessState.UNKNOWN
        letter = stat.rpartition(")")[2].split()[0]
        return ProcessState.STOPPED if letter in "Tt" else ProcessState.RUNS

    def how_ended(self) -> str:
        """Say how an ended process has ended, as "was killed by signal 9 (SIGKILL)"; empty where nobody knows."""
        request = bytearray(_INFO.size)
        _INFO.pack_into(request, 0, _HAS_EXIT, *[0] * 13)
        with suppress(OSError):  # of an older system
            fcntl.ioctl(self._fd, _PIDFD_GET_INFO, request)
            mask, *_, status = _INFO.unpack(request)
            if mask & _HAS_EXIT:
                return describe_exit(os.waitstatus_to_exitcode(status))
        return ""


def describe_exit(code: int) -> str:
    """Say how a process has ended, by its exit code, or minus the killing signal."""
    if code >= 0:
        return f"exited with code {code}"
    with suppress(ValueError):  # a signal without a name
        return f"was killed by signal {-code} ({signal.Signals(-code).name})"
    return f"was killed by signal {-code}"


Key = tuple[bytes, int]
"""Routing id and token of a session."""


class Processes:
    """The processes of sessions that are on this host."""

    def __init__(self) -> None:
        self._found: dict[Key, Process] = {}
        self._by_fd: dict[int, Key] = {}
        self._ends = select.poll()

    def __iter__(self) -> Iterator[Key]:
        return iter(list(self._found))

    def __contains__(self, key: object) -> bool:
        return key in self._found

    def add(self, key: Key, pid: int) -> None:
        """Watch the process of a session from now on, if that can be."""
        if key not in self._found:
            with suppress(OSError):
                process = self._found[key] = Process(pid)
                self._by_fd[process.fileno()] = key
                self._ends.register(process.fileno(), select.POLLIN)

    def remove(self, key: Key) -> None:
        """Watch it no more."""
        process = self._found.pop(key, None)
        if process is not None:
            self._ends.unregister(process.fileno())
            del self._by_fd[process.fileno()]
            process.close()

    def ended(self) -> dict[Key, str]:
        """Return sessions whose processes have ended, and how, where that is known."""
        keys = [self._by_fd[fd] for fd, _ in self._ends.poll(0)]
        return {key: self._found[key].how_ended() for key in keys}

    def state(self, key: Key) -> ProcessState:
        """Look what the process of a session does."""
        process = self._found.get(key)
        return ProcessState.UNKNOWN if process is None else process.state()

    def close(self) -> None:
        for key in self:
            self.remove(key)
