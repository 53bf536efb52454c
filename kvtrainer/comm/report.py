"""What a worker tells servers about itself with its signs of life, for those who look at the job."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from kvstore_server.protocol.frames import pack_control


class Report:
    """Numbers about a worker since it began, which its own thread counts and the one of signs of life reads.

    Attributes:
        steps: How many steps it has made.
        step_seconds: The time in them, and so the time between two is that of its forward and backward passes.
        wait_seconds: The time in which it waited for servers, and so for the other workers.
        samples: How many examples it has trained on, where the script says so.
        loss: The last loss that the script has told; infinite or not a number counts as none.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began = clock()
        self.steps = 0
        self.step_seconds = self.wait_seconds = 0.0
        self.samples = 0
        self.loss = math.nan

    def pack(self) -> bytes:
        """Return the numbers as a Heartbeat takes them."""
        numbers = {
            "seconds": self._clock() - self._began,
            "steps": self.steps,
            "step_seconds": self.step_seconds,
            "wait_seconds": self.wait_seconds,
        }
        if self.samples:
            numbers["samples"] = self.samples
        if math.isfinite(loss := self.loss):
            numbers["loss"] = loss
        return pack_control(numbers)
