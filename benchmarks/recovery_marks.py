"""Moments of the processes of a job, for `recovery.py`: lines of a file, "role pid event seconds".

The seconds are those of the monotonic clock, which all processes of a host share.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

MARKS = "RECOVERY_MARKS"
"""Environment variable: the file."""
STARTED, READY, RESUMED, ANSWERED, STEPPED = "started", "ready", "resumed", "answered", "stepped"
"""The kernel started the process; its imports are done, and a worker's model is made; it has its rank's place and
weights; a server that was gone has answered it; a step has ended."""


def mark(role: str, event: str, at: float | None = None) -> None:
    """Append a moment, by default now, in one call, so that a kill leaves no half line."""
    seconds = time.monotonic() if at is None else at
    fd = os.open(os.environ[MARKS], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(fd, f"{role} {os.getpid()} {event} {seconds:.6f}\n".encode())
    os.close(fd)


def mark_start(role: str) -> None:
    """Mark when the kernel started this process, to a hundredth of a second, and that it is ready now."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    mark(role, STARTED, time.monotonic() - age)
    mark(role, READY)
