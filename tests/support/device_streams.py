"""A simulated device: work is queued on two streams, each of which runs at once or not before somebody waits."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

CURRENT, SIDE = "current", "side"
SCHEDULES = pytest.mark.parametrize("eager", [(), (CURRENT,), (SIDE,), (CURRENT, SIDE)], ids=str)
"""The streams that run at once."""


class Streams:
    """Two streams whose work is done in their order, and copies on the second in place of a StagingStream."""

    def __init__(self, eager: Sequence[str]) -> None:
        self._eager = eager
        self._queues: dict[str, list[Callable[[], object]]] = {CURRENT: [], SIDE: []}
        self._done = {CURRENT: 0, SIDE: 0}
        self.num_places = 0
        self.num_pinned = 0

    def compute(self, work: Callable[[], object], on: str = CURRENT) -> None:
        self._queues[on].append(work)
        if on in self._eager:
            self.run(on)

    def run(self, name: str, until: int | None = None) -> None:
        """Do what is queued on a stream, up to a number."""
        while self._done[name] < (len(self._queues[name]) if until is None else until):
            self._done[name] += 1
            self._queues[name][self._done[name] - 1]()

    def _wait_for(self, other: str, on: str) -> None:
        until = len(self._queues[other])
        self.compute(lambda: self.run(other, until), on)

    def place(self, flat: Tensor) -> Tensor:
        self.num_places += 1
        return torch.full(flat.shape, float("nan"), dtype=flat.dtype, device="cpu")

    def pin(self, memory: Tensor, is_read_only: bool) -> Callable[[], None]:
        self.num_pinned += 1

        def unpin() -> None:
            self.num_pinned -= 1

        return unpin

    def after_current(self) -> None:
        self._wait_for(CURRENT, on=SIDE)

    def copy(self, target: Tensor, source: Tensor) -> None:
        self.compute(lambda: target.copy_(source), on=SIDE)

    def before_current(self) -> None:
        self._wait_for(SIDE, on=CURRENT)

    def wait(self) -> None:
        self.run(SIDE)


class OnDevice(Tensor):
    """A tensor that says that it is on a CUDA device."""

    is_cpu = False
    device = torch.device("cuda", 0)
