"""The state of other processes on this host: running, stopped or ended, and how they ended.

A process is identified by a pidfd, which stays valid when its pid is reused. The process does not have to do anything:
a C call that holds Python's interpreter lock (GIL) for minutes, and so blocks heartbeats, does not look like death.
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

DEAD_AFTER = 60.0
"""Seconds of silence after which a worker or a server counts as lost, unless an option says otherwise."""
FINAL_MESSAGE_TIME = 0.25
"""An ended process counts as dead after this many seconds without a message, because its last message, which says why
it left, may still be on its way.
"""
_PIDFD_GET_INFO = 0xC040FF0B
"""An ioctl of Linux 6.13: fill in a pidfd_info of 64 bytes."""
_INFO = struct.Struct("<QQ11Ii")
"""Mask, control group and ids; from Linux 6.15 on also the exit status, as in wait(2)."""
_HAS_EXIT = 1 << 3
"""The bit of the mask that requests the exit status. It is set in the answer once the parent has reaped the
process.
"""
_PID = re.compile(r"^Pid:\s*(-?\d+)$", re.MULTILINE)


class ProcessState(Enum):
    UNKNOWN = auto()
    """Not visible from here, for example in another container."""
    RUNS = auto()
    STOPPED = auto()
    """By SIGSTOP or a debugger."""
    ENDED = auto()


class Process:
    """A process on this host.

    Raises OSError if there is no such process, it is not visible from here, or the system has no pidfds.
    """

    def __init__(self, pid: int) -> None:
        if not hasattr(os, "pidfd_open"):
            raise OSError("this system has no process descriptors (pidfd)")
        self._fd = os.pidfd_open(pid)
        self._is_own = pid == os.getpid()
        self._end = select.poll()  # `select` only handles descriptors below 1024
        self._end.register(self._fd, select.POLLIN)

    def fileno(self) -> int:
        """Return a descriptor that becomes readable when the process ends."""
        return self._fd

    def close(self) -> None:
        os.close(self._fd)

    def state(self) -> ProcessState:
        """Return the current state; UNKNOWN for this process itself."""
        if self._end.poll(0):
            return ProcessState.ENDED
        if self._is_own:
            return ProcessState.UNKNOWN
        try:
            # The pid in the namespace of /proc, which may differ from the one in ours.
            own = _PID.search(Path(f"/proc/self/fdinfo/{self._fd}").read_text())
            stat = Path(f"/proc/{own[1] if own else -1}/stat").read_text()
        except OSError:
            return ProcessState.ENDED if self._end.poll(0) else ProcessState.UNKNOWN
        letter = stat.rpartition(")")[2].split()[0]
        return ProcessState.STOPPED if letter in "Tt" else ProcessState.RUNS

    def how_ended(self) -> str:
        """Return how an ended process ended, as "was killed by signal 9 (SIGKILL)"; empty if unknown."""
        request = bytearray(_INFO.size)
        _INFO.pack_into(request, 0, _HAS_EXIT, *[0] * 13)
        with suppress(OSError):  # older kernels
            fcntl.ioctl(self._fd, _PIDFD_GET_INFO, request)
            mask, *_, status = _INFO.unpack(request)
            if mask & _HAS_EXIT:
                return describe_exit(os.waitstatus_to_exitcode(status))
        return ""


def describe_exit(code: int) -> str:
    """Describe the end of a process by its exit code, or minus the signal that killed it."""
    if code >= 0:
        return f"exited with code {code}"
    with suppress(ValueError):  # a signal without a name
        return f"was killed by signal {-code} ({signal.Signals(-code).name})"
    return f"was killed by signal {-code}"


Key = tuple[bytes, int]
"""Routing id and token of a session."""


class Processes:
    def __init__(self) -> None:
        self._found: dict[Key, Process] = {}
        self._by_fd: dict[int, Key] = {}
        self._ends = select.poll()

    def __iter__(self) -> Iterator[Key]:
        return iter(list(self._found))

    def __contains__(self, key: object) -> bool:
        return key in self._found

    def add(self, key: Key, pid: int) -> None:
        """Watch the process of a session from now on, if possible."""
        if key not in self._found:
            with suppress(OSError):
                process = self._found[key] = Process(pid)
                self._by_fd[process.fileno()] = key
                self._ends.register(process.fileno(), select.POLLIN)

    def remove(self, key: Key) -> None:
        process = self._found.pop(key, None)
        if process is not None:
            self._ends.unregister(process.fileno())
            del self._by_fd[process.fileno()]
            process.close()

    def ended(self) -> dict[Key, str]:
        """Return the sessions whose processes have ended, and how, if known."""
        keys = [self._by_fd[fd] for fd, _ in self._ends.poll(0)]
        return {key: self._found[key].how_ended() for key in keys}

    def state(self, key: Key) -> ProcessState:
        process = self._found.get(key)
        return ProcessState.UNKNOWN if process is None else process.state()

    def close(self) -> None:
        for key in self:
            self.remove(key)
