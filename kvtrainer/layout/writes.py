"""Which parameters were written to by anybody but the Trainer, by torch's version counters.

Every write in place that torch knows of raises `_version` of a tensor by one or more: `load_state_dict`, `nn.init`,
`p.clamp_()` under no_grad. Reads, gradients and backward passes do not. A write through `p.data` goes unseen.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch.nn import Parameter


class WriteWatch:
    """Compares version counters with what the Trainer's own updates made of them; a few dozen ns per parameter."""

    def __init__(self, parameters: Sequence[Parameter]) -> None:
        self._parameters = list(parameters)
        self._accepted: list[int] = []
        self._total = 0
        self._own = 0

    def accept(self) -> None:
        """From now on look for writes that come later."""
        self._accepted = [p._version for p in self._parameters]
        self._total = sum(self._accepted)
        self._own = 0

    def count_own(self) -> None:
        """The Trainer has raised each counter by one."""
        self._own += 1

    def by_others(self) -> list[int]:
        """The parameters (by position) that somebody else has written to since `accept`."""
        # Counters only rise, so the sum tells whether any has: on most steps none.
        if sum([p._version for p in self._parameters]) == self._total + self._own * len(self._parameters):
            return []
        rows = zip(self._parameters, self._accepted, strict=True)
        return [i for i, (p, version) in enumerate(rows) if p._version != version + self._own]
