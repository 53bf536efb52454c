"""Messages that wait for their turn on the way to one server, the most important ones first."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any

Frames = list[Any]


class SendQueue:
    """Orders messages by priority, and messages of one priority as they came.

    Args:
        is_ordered: Whether messages may have to wait here. If not, `send` takes every one at once.
        send: Hands a message to the network and says whether it took it; does not block.
    """

    def __init__(self, is_ordered: bool, send: Callable[[Frames], bool]) -> None:
        self._is_ordered = is_ordered
        self._send = send
        self._waiting: list[tuple[int, int, Frames]] = []
        self._count = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, frames: Frames, priority: int) -> None:
        """Send a message, now or when it is its turn."""
        if not self._is_ordered:
            taken = self._send(frames)
            assert taken, "a network that takes everything has refused a message"
            return
        self._count += 1
        heapq.heappush(self._waiting, (-priority, self._count, frames))
        self.flush()

    def flush(self) -> None:
        """Send what the network takes now."""
        while self._waiting and self._send(self._waiting[0][2]):
            heapq.heappop(self._waiting)
