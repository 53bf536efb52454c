"""Which weights are still being sent: they are sent without a copy, so nobody may write to them meanwhile."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class Tracker(Protocol):
    """Knows whether the socket still reads from a buffer."""

    @property
    def done(self) -> bool: ...


class Leases:
    """Buffers that the socket or a queue still reads from, by address."""

    def __init__(self) -> None:
        self._trackers: dict[int, list[Tracker]] = {}
        self._held: dict[int, int] = {}

    def hold(self, buffer: Tensor) -> None:
        """A message with this buffer waits in a queue of ours; may be called several times."""
        self._held[buffer.data_ptr()] = self._held.get(buffer.data_ptr(), 0) + 1

    def release(self, buffer: Tensor) -> None:
        """One of the messages with this buffer has left its queue."""
        left = self._held[buffer.data_ptr()] - 1
        if left:
            self._held[buffer.data_ptr()] = left
        else:
            del self._held[buffer.data_ptr()]

    def track(self, buffer: Tensor, tracker: Tracker) -> None:
        """The socket has taken a message with this buffer, and reads it until the tracker is done."""
        known = self._trackers.get(buffer.data_ptr(), [])
        self._trackers[buffer.data_ptr()] = [one for one in known if not one.done] + [tracker]

    def is_busy(self, buffer: Tensor) -> bool:
        """Whether somebody still reads from the buffer, so that it must not be written."""
        address = buffer.data_ptr()
        if address in self._held:
            return True
        trackers = self._trackers.get(address)
        if trackers is None:
            return False
        if all(tracker.done for tracker in trackers):
            del self._trackers[address]
            return False
        return True
