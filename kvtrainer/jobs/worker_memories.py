"""A file in memory for each worker of this host, which outlives the worker's processes; see `SurvivingMemory`."""

from __future__ import annotations

import os
from collections.abc import Sequence

from kvtrainer.common.env import WORKER_MEMORY


class WorkerMemories:
    """Files without a name, by rank. They are empty, and cost nothing, until a worker writes to them.

    Args:
        count: How many workers there are; 0 if none of them is started again.
    """

    def __init__(self, count: int) -> None:
        self._fds = [os.memfd_create("kvtrainer-worker") for _ in range(count)]

    def environment(self, rank: int) -> dict[str, str]:
        """Return the variables by which a worker finds its memory, if it inherits `descriptors`."""
        return {WORKER_MEMORY: f"/proc/self/fd/{self._fds[rank]}"} if self._fds else {}

    def descriptors(self, rank: int) -> Sequence[int]:
        return self._fds[rank : rank + 1]

    def close(self) -> None:
        for fd in self._fds:
            os.close(fd)
        self._fds = []
