"""The processes of a job, their output, and a single-threaded event loop that waits for all of them.

`ProcessGroup` follows processes from start to end: `kvlaunch` has one for its job, a local cluster one for its servers
and one for each run. `ProcessEvents` is the loop, built on poll() and, in the main thread, signal handlers.
`ProcessStream` splits the output of one pipe into lines. `ProcessOutput` queues lines for the launcher's own standard
output and error.

Invariants: the loop never blocks in a write, so a paused terminal cannot keep the launcher from noticing signals and
exits; if the queue is full it stops reading, and the processes wait. A process that was reaped is never signalled,
because its pid may be reused. When a `ProcessGroup` has ended, no process of it is left, not even its guardian.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import select
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import FrameType

from kvstore_server.processes import describe_exit
from kvstore_server.restarts import shell_code
from kvtrainer.common.env import PLACES
from kvtrainer.jobs.guardian import KILL_WAIT, Guardian, end_all_guarded

MAX_LINE = 64 * 1024
"""A longer line is split into pieces of about this many bytes."""
PROGRESS_INTERVAL = 1.0
"""Seconds between states of a progress bar that are shown. The final state always is."""
HIGH_WATER = 256 * 1024
"""With this many bytes waiting the launcher stops reading, and processes block, as on a slow terminal."""
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
LISTENS = b"kvstore-server: listening on "
"""What a server prints before its address."""
LAST_OUTPUT_WAIT = 1.0
"""Seconds to wait for the end of a pipe that a hidden process keeps open after all known ones have ended."""

# Added to the environment of a job's processes unless it has other values.
_DEFAULTS = {
    "PYTHONUNBUFFERED": "1",
    # Gradients and buffers are allocated and freed in every step. By default malloc returns such memory to the system,
    # and faulting the pages in again takes longer than filling them.
    "MALLOC_MMAP_THRESHOLD_": str(1 << 30),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 30),
    "MALLOC_TOP_PAD_": str(64 << 20),
}
_MAX_WAIT = 1.0
_READ_SIZE = 64 * 1024
_MAX_DRAIN_READS = 64
# poll() reports a pipe as writable only if this many bytes can be written without blocking.
_CHUNK = 4096
# A carriage return at the end of the data is kept, because a newline may follow.
_LINE_END = re.compile(rb"\r*\n|\r+(?=[^\r\n])")

Put = Callable[[int, str, bytes], None]
"""Receives a line: the descriptor to write it to, the tag of its process, and its bytes without the line end."""
Wait = Callable[[Callable[[], bool], float], object]
"""Waits until a condition holds, at most the given seconds, while the loop runs."""


def inherited_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment that a job's processes inherit, without what names this process's place in another job."""
    kept = {name: value for name, value in environ.items() if name not in PLACES}
    return {**_DEFAULTS, **kept}


def server_command(
    index: int, count: int, grace: float, flags: Sequence[str], restarts: int = 0
) -> list[str]:
    """Return the command of a server. It stops waiting for a dead worker's round before `grace` seconds are over.

    With `restarts`, its supervisor starts it again, up to that many times.
    """
    supervised = ["--supervise", "--restarts", str(restarts)] if restarts else []
    place = ["--index", str(index), "--num-servers", str(count)]
    drain = ["--drain-timeout", f"{max(0.8 * grace, 0.1):g}"]
    return [sys.executable, "-m", "kvstore_server", *supervised, *place, *drain, *flags]


class ChildProcess:
    """A process in its own session, started by the constructor, with its output in pipes.

    Args:
        pass_fds: Descriptors that it inherits.
        prepare: Runs in the child before exec. Only safe if the parent has no other threads.

    Raises:
        OSError: The command cannot be started.
    """

    stdin_kind = subprocess.DEVNULL

    def __init__(
        self,
        name: str,
        tag: str,
        command: Sequence[str],
        environ: Mapping[str, str],
        put: Put,
        pass_fds: Sequence[int] = (),
        prepare: Callable[[], None] | None = None,
    ) -> None:
        self.name = name
        self.began = time.monotonic()
        self.process = subprocess.Popen(
            command,
            env=dict(environ),
            stdin=self.stdin_kind,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
            pass_fds=pass_fds,
            preexec_fn=prepare,
        )
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        self._pipes = {pipe.fileno(): pipe for pipe in (self.process.stdout, self.process.stderr)}
        self.streams = {
            fd: ProcessStream(fd, partial(put, target, f"[{tag}] "))
            for target, fd in enumerate(self._pipes, 1)
        }

    @property
    def returncode(self) -> int | None:
        """The exit code, or minus the signal that killed it; None until it is reaped."""
        return self.process.returncode

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the process group, unless the process was reaped."""
        # The pid of a reaped process may belong to another one.
        if self.process.returncode is None:
            # PermissionError: it runs as another user now.
            with contextlib.suppress(PermissionError):
                os.killpg(self.process.pid, number)

    def close_stream(self, fd: int) -> None:
        self.streams.pop(fd).flush()
        self._pipes[fd].close()

    def describe_exit(self) -> str:
        return f"{self.name} {describe_exit(self.process.returncode)}"

    def shell_code(self) -> int:
        return shell_code(self.process.returncode)

    def end_session(self) -> None:
        """Kill what it has left running in its session, after it was reaped. Blocks for a moment."""
        end_all_guarded("", {self.process.pid}, grace=0.0)


class ProcessGroup:
    """Processes of one program, in starting order, and a guardian that ends them if the program dies.

    One thread runs `events` and calls `reap` after every turn. The other methods may be called in another thread.

    Args:
        events: The loop that reads their output.
        grace: Seconds between SIGTERM and SIGKILL.
        remove: A directory that the guardian removes at the end; empty: none.
    """

    def __init__(self, events: ProcessEvents, grace: float, remove: str = "") -> None:
        self._events = events
        self._grace = grace
        self.mark = secrets.token_hex(16)
        """Marks the environment of every process; see `guarded_environment`."""
        self.guardian = Guardian(self.mark, grace, remove)
        self.children: list[ChildProcess] = []
        # Protects the guardian, and keeps a process from being reaped while it is signalled.
        self._lock = threading.Lock()

    @property
    def alive(self) -> list[ChildProcess]:
        return [child for child in self.children if child.returncode is None]

    def add(self, child: ChildProcess) -> None:
        with self._lock:
            self.guardian.watch(child.process.pid)
        for fd in list(child.streams):
            self._events.add_reader(fd, partial(self._read, child, fd), pausable=True)
        self.children.append(child)

    def reap(self) -> list[ChildProcess]:
        """Return the processes that have exited since the last call, after emitting the rest of their output."""
        if not self._events.child_changed:
            return []
        self._events.child_changed = False
        with self._lock:
            gone = [child for child in self.alive if child.process.poll() is not None]
            for child in gone:
                self.guardian.forget_if_empty(child.process.pid)
        for child in gone:
            for fd, stream in list(child.streams.items()):
                if not stream.drain():
                    self._close_stream(child, fd)
        return gone

    def ensure_guardian(self) -> bool:
        """Replace the guardian if it has died. Return False if it has died too often."""
        with self._lock:
            return self.guardian.ensure()

    def end(self, wait: Wait, in_a_hurry: Callable[[], bool] = lambda: False) -> None:
        """End all processes and their descendants. Returns when none is left, not even the guardian."""
        # SIGTERM first, SIGKILL after the grace period. The guardian then does the same with descendants.
        try:
            self._signal(signal.SIGTERM)
            wait(lambda: not self.alive or in_a_hurry(), self._grace)
            self._signal(signal.SIGKILL)
            wait(lambda: not self.alive, KILL_WAIT)
        finally:
            with self._lock:
                self.guardian.close()
        wait(self.guardian.closed, self._grace + KILL_WAIT + 1.0)
        wait(lambda: not any(child.streams for child in self.children), LAST_OUTPUT_WAIT)

    def close_streams(self) -> None:
        for child in self.children:
            for fd in list(child.streams):
                self._close_stream(child, fd)

    def _signal(self, number: signal.Signals) -> None:
        with self._lock:
            for child in self.alive:
                child.signal(number)

    def _read(self, child: ChildProcess, fd: int) -> None:
        if not child.streams[fd].read():
            self._close_stream(child, fd)

    def _close_stream(self, child: ChildProcess, fd: int) -> None:
        self._events.remove_reader(fd)
        child.close_stream(fd)


class ProcessAddresses:
    """Extracts the servers' addresses from their output. Other lines go to `put`."""

    def __init__(self, put: Put) -> None:
        self._put = put
        self.found: dict[int, str] = {}
        """Index of a server → its address."""

    def put_of(self, index: int) -> Put:
        return partial(self._take, index)

    def put_again(self, target: int, tag: str, line: bytes) -> None:
        """Pass on the output of a server that is started again at its address."""
        before, said, _ = line.partition(LISTENS)
        if before or not said:
            self._put(target, tag, before if said else line)

    def _take(self, index: int, target: int, tag: str, line: bytes) -> None:
        before, said, address = line.partition(LISTENS)
        if not said or index in self.found:
            self._put(target, tag, line)
            return
        if before:
            self._put(target, tag, before)
        self.found[index] = address.decode(errors="replace")


class ProcessStream:
    """Splits a child's pipe into lines for `put`. Of a progress bar, one state per PROGRESS_INTERVAL is emitted."""

    def __init__(
        self, fd: int, put: Callable[[bytes], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._fd, self._put, self._clock = fd, put, clock
        self._buffer = bytearray()
        self._shown = -PROGRESS_INTERVAL

    def read(self) -> bool:
        """Read available data, or block until there is some, and emit complete lines. Return False at the end."""
        data = os.read(self._fd, _READ_SIZE)
        self.feed(data)
        return bool(data)

    def drain(self) -> bool:
        """Read what is left without blocking, but at most some MiB. Return False at the end."""
        poll = select.poll()
        poll.register(self._fd, select.POLLIN)
        for _ in range(_MAX_DRAIN_READS):
            if not poll.poll(0):
                break
            if not self.read():
                return False
        return True

    def feed(self, data: bytes) -> None:
        """Add data, and emit the lines that it completes; of a line that gets too long, its parts so far."""
        scanned = len(self._buffer)
        if self._buffer.endswith(b"\r"):
            scanned -= 1
        self._buffer += data
        start = 0
        for end in _LINE_END.finditer(self._buffer, scanned):
            text = bytes(self._buffer[start : end.start()]).rstrip(b"\r")
            # Lines that end in a newline are all emitted, states of a progress bar only now and then.
            if end.group().endswith(b"\n") or self._due(text):
                self._put_all(_split_output_line(text))
            start = end.end()
        del self._buffer[:start]
        if len(self._buffer) > MAX_LINE:
            *whole, rest = _split_output_line(bytes(self._buffer))
            self._put_all(whole)
            self._buffer[:] = rest

    def flush(self) -> None:
        text = bytes(self._buffer).rstrip(b"\r")
        self._buffer.clear()
        if text:
            self._put_all(_split_output_line(text))

    def _put_all(self, lines: Sequence[bytes]) -> None:
        for line in lines:
            self._put(line)

    def _due(self, text: bytes) -> bool:
        now = self._clock()
        if not text.strip() or now - self._shown < PROGRESS_INTERVAL:
            return False
        self._shown = now
        return True


class ProcessOutput:
    """Lines waiting to be written. All descriptors share a queue, because they may be one terminal."""

    def __init__(self) -> None:
        self._queue: deque[tuple[int, bytearray]] = deque()
        self._waiting = 0
        self._broken: set[int] = set()

    @property
    def full(self) -> bool:
        return self._waiting >= HIGH_WATER

    @property
    def target(self) -> int | None:
        return self._queue[0][0] if self._queue else None

    def put(self, fd: int, tag: str, line: bytes) -> None:
        """Append a tagged line. Bytes that are not UTF-8 are replaced."""
        if fd in self._broken:
            return
        data = f"{tag}{line.decode(errors='replace')}\n".encode()
        if not self._queue or self._queue[-1][0] != fd:
            self._queue.append((fd, bytearray()))
        self._queue[-1][1].extend(data)
        self._waiting += len(data)

    def write_some(self) -> OSError | None:
        """Write some bytes to `target`, which poll() has reported as writable, without blocking.

        Returns an error once. From then on everything for that descriptor is dropped.
        """
        fd, data = self._queue[0]
        try:
            written = os.write(fd, data[:_CHUNK])
        except OSError as error:
            self._broken.add(fd)
            self._queue = deque(item for item in self._queue if item[0] != fd)
            self._waiting = sum(len(item[1]) for item in self._queue)
            return error
        del data[:written]
        self._waiting -= written
        if not data:
            self._queue.popleft()
        return None


class ProcessEvents:
    """The event loop. As a context manager it also handles signals (main thread only)."""

    def __init__(self) -> None:
        self.output = ProcessOutput()
        self.stop_signals: list[signal.Signals] = []
        """All SIGINT, SIGTERM and SIGHUP received, in order."""
        self.child_changed = True
        """True if a child may have exited since the last `ProcessGroup.reap`."""
        self.write_error: OSError | None = None
        """The first error in writing output."""
        self._readers: dict[int, tuple[Callable[[], None], bool]] = {}
        self._previous: dict[int, Callable[[int, FrameType | None], object] | int | None] = {}
        self._wake, self._wake_writer = os.pipe()
        os.set_blocking(self._wake, False)
        os.set_blocking(self._wake_writer, False)
        self.add_reader(self._wake, self._read_signals, pausable=False)

    def __enter__(self) -> ProcessEvents:
        self._previous_wakeup = signal.set_wakeup_fd(self._wake_writer, warn_on_full_buffer=False)
        for number in (signal.SIGCHLD, *STOP_SIGNALS):
            # Signals are ignored on purpose under nohup and in background jobs of a shell.
            if number == signal.SIGCHLD or signal.getsignal(number) is not signal.SIG_IGN:
                self._previous[number] = signal.signal(number, lambda _number, _frame: None)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._previous_wakeup)
        self.close()

    def close(self) -> None:
        os.close(self._wake)
        os.close(self._wake_writer)
        self._wake_writer = -1

    def wake(self) -> None:
        """Make `turn` return in another thread, so that it sees new readers. Raises OSError after `close`."""
        os.write(self._wake_writer, b"\0")

    def add_reader(self, fd: int, callback: Callable[[], None], *, pausable: bool) -> None:
        """Call a function when `fd` is readable or at its end; if `pausable`, not while output is full."""
        self._readers[fd] = callback, pausable

    def remove_reader(self, fd: int) -> None:
        del self._readers[fd]

    def turn(self, seconds: float) -> None:
        """Wait for events, at most `seconds` and at most one second, and handle them."""
        poll = select.poll()
        for fd, (_, pausable) in list(self._readers.items()):
            if not (pausable and self.output.full):
                poll.register(fd, select.POLLIN)
        target = self.output.target
        if target is not None:
            poll.register(target, select.POLLOUT)
        ready = [fd for fd, _ in poll.poll(1000 * max(0.0, min(seconds, _MAX_WAIT)))]
        if not ready:
            # Check anyway, in case SIGCHLD is blocked in this process.
            self.child_changed = True
        for fd in ready:
            if fd == target:
                error = self.output.write_some()
                self.write_error = self.write_error or error
            elif fd in self._readers:
                callback, _ = self._readers[fd]
                callback()

    def _read_signals(self) -> None:
        for number in os.read(self._wake, 4096):
            if number == signal.SIGCHLD:
                self.child_changed = True
            elif number in STOP_SIGNALS:
                self.stop_signals.append(signal.Signals(number))


def _split_output_line(text: bytes) -> list[bytes]:
    """Split into pieces of at most MAX_LINE bytes, not inside a UTF-8 character. At least one piece."""
    pieces: list[bytes] = []
    while len(text) > MAX_LINE:
        end = MAX_LINE
        while end > MAX_LINE - 3 and text[end] & 0xC0 == 0x80:
            end -= 1
        pieces.append(text[:end])
        text = text[end:]
    return [*pieces, text]
