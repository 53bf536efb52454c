"""The guardian: a small process that ends the processes of a job if its launcher dies, however that happens.

On the launcher's machine it watches sessions that the launcher names. It reads a pipe whose writing end only the
launcher holds, so it sees the end of the pipe as soon as the launcher has exited or was killed. Then it sends SIGTERM
to every process of the job, and SIGKILL to the rest after a while. A process belongs to the job if it is in one of
these sessions, or has the job's mark in its environment, as a grandchild in another session has.

    python guardian.py --grace SEC --mark MARK [--remove DIR]

On another host (`kvlaunch -H`) it runs one process of the job. Its standard input comes from the launcher through ssh:
a byte asks for a signal. At its end, when launcher, ssh or network is gone, it ends the process, all of its
descendants, and itself. With --keys the first line has the files of a directory of keys, which it makes for the
process and removes at the end.

    python -m kvtrainer.jobs.guardian --grace SEC [--share N] [--keys] -- COMMAND [ARG ...]

The file is run by its path, so it imports only the standard library.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import secrets
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from types import FrameType

KEYS = "KVSTORE_KEYS"
"""The environment variable with a process's directory of keys."""
MARK = "KVLAUNCH_MARK"
"""Environment variable that marks every process of a job. Nested jobs append their marks."""
KILL_WAIT = 5.0
"""Seconds to wait for processes to vanish after SIGKILL. Only one stuck in the kernel takes longer."""
TERMINATE, KILL = b"T", b"K"
"""Bytes that ask a guardian on another host to send a signal."""
GUARDIAN_DIES = (
    "the guardian process keeps dying, and this program, when killed, would leave processes behind"
)
_KEYS_TIMEOUT = 60.0
"""Seconds in which the launcher has to send the keys of the job."""
_MAX_RESTARTS = 3
_POLL = 0.02
_PR_SET_PDEATHSIG = 1


class Guardian:
    """The launcher's handle on its guardian process, which runs from construction to `close`."""

    def __init__(self, mark: str, grace: float, remove: str = "") -> None:
        """`remove` is a directory that is removed with the job; empty: none."""
        self._mark = mark
        self._remove = ["--remove", remove] if remove else []
        self._grace = grace
        self._sessions: set[int] = set()
        self._restarts = 0
        self._pipe = -1
        self._start()

    def watch(self, session: int) -> None:
        self._sessions.add(session)
        self._tell(f"+{session}\n")

    def forget_if_empty(self, session: int) -> None:
        """Remove a session whose leader has exited, unless it has processes: its number may be reused."""
        if not find_guarded_survivors("", {session}):
            self._sessions.discard(session)
            self._tell(f"-{session}\n")

    def ensure(self) -> bool:
        """Replace the guardian if it died before `close`. Return False if that has happened too often."""
        if self._pipe < 0 or self.process.poll() is None:
            return True
        if self._restarts == _MAX_RESTARTS:
            return False
        self._restarts += 1
        os.close(self._pipe)
        self._start()
        return True

    def close(self) -> None:
        """Let the guardian end what is left of the job, and itself. Returns at once; see `closed`."""
        if self._pipe >= 0:
            os.close(self._pipe)
            self._pipe = -1

    def closed(self) -> bool:
        return self.process.poll() is not None

    def _start(self) -> None:
        program = (sys.executable, "-I", "-S", os.path.abspath(__file__))
        reading, self._pipe = os.pipe()
        try:
            self.process = subprocess.Popen(
                [*program, "--grace", str(self._grace), "--mark", self._mark, *self._remove],
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
        # If the guardian is dead, `ensure` starts another one and sends it all sessions.
        with contextlib.suppress(BrokenPipeError):
            if self._pipe >= 0:
                os.write(self._pipe, line.encode())


def guarded_environment(inherited: Mapping[str, str], mark: str, share: int = 0) -> dict[str, str]:
    """Return an environment with a mark added, and the cores divided among `share` processes, if it is not 0."""
    marks = filter(None, (inherited.get(MARK), mark))
    # Otherwise each process would start one thread per core, and all of them would compete.
    threads = {"OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // share))} if share else {}
    return {**threads, **inherited, MARK: ":".join(marks)}


def end_with_parent(parent: int) -> Callable[[], None]:
    """Return a function that makes a child get SIGTERM when the thread that started it ends.

    A fallback for when launcher and guardian are both killed. It may run before or after exec.
    """
    prctl = ctypes.CDLL(None).prctl

    def set_death_signal() -> None:
        prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)
        # The parent died before the call.
        if os.getppid() != parent:
            os._exit(1)

    return set_death_signal


def find_guarded_survivors(mark: str, sessions: Collection[int]) -> list[int]:
    """Return pids, except zombies, in `sessions` or with `mark` (unless empty) in their environment. Reads /proc."""
    needle = mark.encode()
    return [
        int(name) for name in os.listdir("/proc") if name.isdigit() and _is_guarded(name, needle, sessions)
    ]


def _is_guarded(pid: str, mark: bytes, sessions: Collection[int]) -> bool:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # "pid (name) state ppid pgrp session ...". The name may contain anything, even parentheses.
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
        return False  # it has exited, or belongs to another user


def end_all_guarded(mark: str, sessions: Collection[int], grace: float) -> None:
    """Send SIGTERM to each survivor once, and after `grace` seconds SIGKILL until none is left or KILL_WAIT is over."""
    asked: set[int] = set()
    deadline = time.monotonic() + grace
    while (left := find_guarded_survivors(mark, sessions)) and time.monotonic() < deadline:
        _signal_guarded([pid for pid in left if pid not in asked], signal.SIGTERM)
        asked.update(left)
        time.sleep(_POLL)
    deadline = time.monotonic() + KILL_WAIT
    # List them again each time: a process may have forked between listing and killing.
    while (left := find_guarded_survivors(mark, sessions)) and time.monotonic() < deadline:
        _signal_guarded(left, signal.SIGKILL)
        time.sleep(_POLL)


def _signal_guarded(pids: Collection[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def main(argv: Sequence[str]) -> int:
    """Run the guardian until standard input ends. Return the exit code of the command, as a shell does."""
    parser = argparse.ArgumentParser(prog="guardian", allow_abbrev=False)
    parser.add_argument("--grace", type=float, required=True)
    parser.add_argument("--mark")
    parser.add_argument("--share", type=int, default=0)
    parser.add_argument("--remove", default="")
    parser.add_argument("--keys", action="store_true")
    parser.add_argument("command", nargs="*")
    options = parser.parse_args(argv)
    if options.command:
        with _received_keys() if options.keys else contextlib.nullcontext():
            return _run_guarded_command(options.command, options.grace, options.share)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    sessions: set[int] = set()
    for line in sys.stdin:
        (sessions.add if line[0] == "+" else sessions.discard)(int(line[1:]))
    end_all_guarded(options.mark, sessions, options.grace)
    if options.remove:
        shutil.rmtree(options.remove, ignore_errors=True)
    return 0


@contextlib.contextmanager
def _received_keys() -> Iterator[None]:
    """Write the keys that the launcher sends to a directory of their own, and name it in the environment."""
    line, deadline = bytearray(), time.monotonic() + _KEYS_TIMEOUT
    poll = select.poll()
    poll.register(0, select.POLLIN)
    while not line.endswith(b"\n"):
        # Byte by byte, because requests for signals may follow.
        has_come = poll.poll(max(0.0, 1000 * (deadline - time.monotonic())))
        byte = os.read(0, 1) if has_come else b""
        if not byte:
            sys.exit("the launcher has not sent the keys of the job")
        line += byte
    directory = make_keys_directory(json.loads(line))
    try:
        os.environ[KEYS] = directory
        yield
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def make_keys_directory(files: Mapping[str, str]) -> str:
    """Return a new directory, in memory if possible, that only this user can read, with these files (name → text)."""
    place = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    directory = tempfile.mkdtemp(prefix="kvtrainer-keys-", dir=place)
    for name, text in files.items():
        fd = os.open(os.path.join(directory, os.path.basename(name)), os.O_WRONLY | os.O_CREAT, 0o600)
        with open(fd, "w", encoding="ascii") as file:
            file.write(text)
    return directory


class _GuardianStopped(Exception):
    """A signal asked this program to end."""


def _run_guarded_command(command: Sequence[str], grace: float, share: int) -> int:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _raise_guardian_stopped)
    mark = secrets.token_hex(16)
    try:
        process = subprocess.Popen(
            command,
            env=guarded_environment(os.environ, mark, share),
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=end_with_parent(os.getpid()),
        )
    except (OSError, ValueError) as error:
        print(f"cannot start the command: {error}", file=sys.stderr)
        return 127 if isinstance(error, FileNotFoundError) else 126
    try:
        grace = _wait_for_guarded_end(process, grace)
    except _GuardianStopped:
        pass
    finally:
        end_all_guarded(mark, {process.pid}, grace)
    code = process.wait()
    return code if code >= 0 else 128 - code


def _wait_for_guarded_end(process: subprocess.Popen[bytes], grace: float) -> float:
    """Wait until the process or standard input ends. Return the grace period for what is left."""
    poll = select.poll()
    ended = os.pidfd_open(process.pid)
    for fd in (0, ended):
        poll.register(fd, select.POLLIN)
    while True:
        events = [fd for fd, _ in poll.poll()]
        if 0 in events:
            data = os.read(0, 64)
            if not data or KILL in data:
                return 0.0 if data else grace
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
        if ended in events:
            return grace


def _raise_guardian_stopped(_number: int, _frame: FrameType | None) -> None:
    raise _GuardianStopped


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
