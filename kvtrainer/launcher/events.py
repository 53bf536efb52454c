"""The launcher's one loop: readable pipes, output that can be written, and signals, without a thread.

Signals arrive as bytes on a pipe (`signal.set_wakeup_fd`), so nothing happens inside a signal handler.
"""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Callable
from types import FrameType

from kvtrainer.launcher.output import Output

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_MAX_WAIT = 1.0


class Events:
    """Waits for events and hands them out; a context that takes over signal handling (main thread only)."""

    def __init__(self) -> None:
        self.output = Output()
        self.stop_signals: list[signal.Signals] = []
        """Every SIGINT, SIGTERM and SIGHUP so far, in order of arrival."""
        self.child_changed = True
        """Whether a child may have exited since the owner last set this to False."""
        self.write_error: OSError | None = None
        """The first error in writing the output, with the descriptor as its `filename`."""
        self._readers: dict[int, Callable[[], None]] = {}
        self._pausable: set[int] = set()
        self._previous: dict[int, Callable[[int, FrameType | None], object] | int | None] = {}

    def __enter__(self) -> Events:
        self._wake, self._wake_writer = os.pipe()
        os.set_blocking(self._wake, False)
        os.set_blocking(self._wake_writer, False)
        self._previous_wakeup = signal.set_wakeup_fd(self._wake_writer, warn_on_full_buffer=False)
        for number in (signal.SIGCHLD, *STOP_SIGNALS):
            # nohup, and a shell that starts a background job, ask for a signal to be ignored.
            if number == signal.SIGCHLD or signal.getsignal(number) is not signal.SIG_IGN:
                self._previous[number] = signal.signal(number, lambda _number, _frame: None)
        self.add_reader(self._wake, self._read_signals, pausable=False)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._previous_wakeup)
        os.close(self._wake)
        os.close(self._wake_writer)

    def add_reader(self, fd: int, callback: Callable[[], None], *, pausable: bool) -> None:
        """Call `callback` when `fd` is readable or at its end; if `pausable`, not while output is full."""
        self._readers[fd] = callback
        if pausable:
            self._pausable.add(fd)

    def remove_reader(self, fd: int) -> None:
        del self._readers[fd]
        self._pausable.discard(fd)

    def turn(self, seconds: float) -> None:
        """Wait at most `seconds` (and at most one second) for an event, then handle all that is there."""
        poll = select.poll()
        for fd in self._readers:
            if not (fd in self._pausable and self.output.full):
                poll.register(fd, select.POLLIN)
        target = self.output.target
        if target is not None:
            poll.register(target, select.POLLOUT)
        ready = [fd for fd, _ in poll.poll(1000 * max(0.0, min(seconds, _MAX_WAIT)))]
        if not ready:
            self.child_changed = True  # a second look, in case SIGCHLD is blocked in this process
        for fd in ready:
            if fd == target:
                self._write()
            elif fd in self._readers:
                self._readers[fd]()

    def _write(self) -> None:
        target = self.output.target
        error = self.output.write_some()
        if error is not None and self.write_error is None:
            error.filename = target
            self.write_error = error

    def _read_signals(self) -> None:
        for number in os.read(self._wake, 4096):
            if number == signal.SIGCHLD:
                self.child_changed = True
            elif number in STOP_SIGNALS:
                self.stop_signals.append(signal.Signals(number))
