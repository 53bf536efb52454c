"""What servers are told of a round while its gradients are still being computed: that it will be like the last one.

So they apply and answer the slices that are sent ahead as soon as all workers have sent them, and new weights come
during the backward pass. What a worker then commits counts, be it as expected or not: servers take back what does not
fit. That costs time, so after a round that came otherwise nothing is expected of some.
"""

from __future__ import annotations

from kvtrainer.comm.contribution import Contribution
from kvtrainer.comm.round import Leg

_MOST_SKIPPED = 64


class Expected:
    """What is expected of the open round of one table, and what has come of it."""

    def __init__(self) -> None:
        self.contribution: Contribution | None = None
        """What the next round will be like; None where nothing is expected of it."""
        self.terms: tuple[float | None, bytes] = None, b""
        """Factor and new numbers that servers were told of the open round."""
        self.legs: dict[int, Leg] = {}
        """Server → what it was told of the open round, and has said since."""
        self._skips, self._skipped = 1, 0
        """Rounds of which nothing is expected after the next one that comes otherwise, and those that are left."""

    def note(self, contribution: Contribution | None, is_as_expected: bool) -> None:
        """A round begins that gives this, or nothing that could be expected again; it takes the legs over.

        Args:
            is_as_expected: True also where nothing was.
        """
        if not is_as_expected:
            self._skipped, self._skips = self._skips, min(2 * self._skips, _MOST_SKIPPED)
        elif self.legs:
            self._skips = 1
        is_skipped, self.legs = self._skipped > 0, {}
        self._skipped -= is_skipped
        # The gradients themselves are not kept alive.
        self.contribution = (
            None if contribution is None or is_skipped else contribution._replace(lent={}, born={})
        )
