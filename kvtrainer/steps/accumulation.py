"""Which backward passes end in an update, and what their losses are divided by."""

from __future__ import annotations

import logging
from numbers import Integral
from typing import Any

from kvtrainer.errors import ConfigurationError

_log = logging.getLogger(__name__)


class Accumulation:
    """Counts backward passes in windows of `counts`, each of which ends in one update.

    The sum of a window's gradients is that of the mean loss. With the total known, the last window may be shorter: its
    losses are divided by how many there are, and the last pass of all ends it.

    Args:
        counts: backward passes per update.

    Raises:
        ConfigurationError: it is not an int of at least 1.
    """

    def __init__(self, counts: Any = 1) -> None:
        if isinstance(counts, bool) or not isinstance(counts, Integral) or counts < 1:
            raise ConfigurationError(f"accumulate must be an int of at least 1, got {counts!r}")
        self.counts = int(counts)
        self.done = 0
        """Backward passes so far."""
        self.total: int | None = None
        """How many there will be in all, if that is known."""
        self._in_window = 0

    def set_progress(self, done: int, total: int | None) -> None:
        """Go on after `done` backward passes of `total`; a window that was begun then begins anew.

        Raises:
            ConfigurationError: the numbers are impossible.
        """
        for name, number in (("done", done), ("in all", 0 if total is None else total)):
            if isinstance(number, bool) or not isinstance(number, Integral):
                raise ConfigurationError(f"backward passes {name} must be an int, got {number!r}")
        if done < 0 or (total is not None and total < max(done, 1)):
            raise ConfigurationError(f"{done} backward passes of {total} cannot have been made")
        if done % self.counts:
            _log.warning(
                "going on after %d backward passes, which is within a window of %d: the gradients of the first %d are "
                "not there",
                done,
                self.counts,
                done % self.counts,
            )
        self.done, self.total, self._in_window = done, total, 0

    @property
    def divisor(self) -> int:
        """What the loss of the next backward pass is divided by: the length of its window."""
        if self.total is None:
            return self.counts
        rest = self.total % self.counts
        return rest if rest and self.total - rest <= self.done < self.total else self.counts

    def count(self) -> None:
        """Note a backward pass."""
        self.done += 1
        self._in_window += 1

    @property
    def has_begun(self) -> bool:
        """Whether there was a backward pass since the last update."""
        return self._in_window > 0

    @property
    def pending(self) -> int:
        """Backward passes of a window that is not full."""
        return 0 if self.is_boundary else self._in_window

    @property
    def is_boundary(self) -> bool:
        """Whether the window is full."""
        return self.counts == 1 or self.done % self.counts == 0 or self.done == self.total

    def end(self) -> None:
        """Note an update."""
        self._in_window = 0

    def end_early(self) -> int:
        """Let the next backward pass begin a window; returns how many there were in the one that was begun."""
        if not self.is_boundary:
            self.done += -self.done % self.counts
        passes, self._in_window = self._in_window, 0
        return passes
