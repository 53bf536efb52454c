"""Runs a function in a thread of its own, with a low priority: files are written while the server serves."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

from kvstore_server.errors import KVStoreError

_NICE = 10
"""How much the thread lowers its priority, so that it takes idle time first."""


class Task(Protocol):
    """A function that runs, or has run."""

    error: BaseException | None
    """What it has raised."""

    def is_over(self, seconds: float = 0.0) -> bool:
        """Wait up to some seconds for its end; return whether it has ended."""
        ...


class BackgroundPublication:
    """Either what a task has written is published, or it is cancelled before; never both."""

    def __init__(self) -> None:
        self.is_cancelled = False
        self._lock = threading.Lock()

    def cancel(self) -> None:
        """Have nothing published from now on; what was published before stays."""
        with self._lock:
            self.is_cancelled = True

    def publish(self, function: Callable[[], None]) -> None:
        """Call a function that publishes. Raises KVStoreError if that was cancelled."""
        with self._lock:
            if self.is_cancelled:
                raise KVStoreError("it is not needed any more")
            function()


class BackgroundTask:
    """Starts a function in a thread. The process may end before it does."""

    def __init__(self, function: Callable[[], None]) -> None:
        self.error: BaseException | None = None
        self._function = function
        self._thread = threading.Thread(target=self._run, name="background", daemon=True)
        self._thread.start()

    def is_over(self, seconds: float = 0.0) -> bool:
        if seconds:
            self._thread.join(seconds)
        return not self._thread.is_alive()

    def _run(self) -> None:
        with suppress(OSError):  # on Linux it concerns this thread only
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
        try:
            self._function()
        except BaseException as error:
            self.error = error
