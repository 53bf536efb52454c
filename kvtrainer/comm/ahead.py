"""Slices that a worker sends ahead of its commit, while a backward pass still computes the others.

They have generation 0. If any has changed since, what is sent with the commit has generation 1: those that have changed
and slices that were not complete before. If none is to be given as it was sent, or one not at all, it begins anew.

Over a network servers are told before the first slice that the round will be like the last one. So they apply and
answer slices as soon as all workers have sent them, and new weights come during the backward pass. What a worker then
commits counts, be it as expected or not: servers take back what does not fit. That costs time, so after a round that
came otherwise nothing is expected of some.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from kvstore_server.codec import torch_dtype
from kvstore_server.plan import Slice
from kvtrainer.comm.contribution import Contribution
from kvtrainer.comm.parts import Backoff
from kvtrainer.comm.round import Round

_log = logging.getLogger(__name__)

_IN_VAIN = 3
"""After so many rounds in a row in which all that was sent ahead had changed, the log says so."""


class InVain:
    """Notices that a loop changes all that goes ahead of its steps, and says so once."""

    def __init__(self) -> None:
        self._rounds = 0

    def count(self, was_useful: bool) -> None:
        """A round is committed, in which some of what was sent counts, or nothing."""
        self._rounds = 0 if was_useful else self._rounds + 1
        if self._rounds == _IN_VAIN:
            _log.warning(
                "overlap=True has sent every gradient twice in the last %d steps: they were changed between the "
                "backward pass and step(). The options clip_grad and amp of the Trainer clip and unscale without that. "
                "This is said once",
                _IN_VAIN,
            )


class Ahead:
    """What a worker has sent ahead to the open round of one table, and what servers were told of that round before."""

    def __init__(self) -> None:
        self.expected: Contribution | None = None
        """What the next round will be like; None where nothing is expected of it."""
        self.early: Round | None = None
        """The open round as servers were told of it, with what they have said since; None where they were not."""
        self.round = -1
        self.sent: dict[int, Tensor] = {}
        """Slices (by index) that were sent to it, and their numbers."""
        self._memory: dict[int, Tensor] = {}
        """Slice (by index) → its numbers, with padding."""
        self._vain = InVain()
        self._surprises = Backoff()
        """Rounds of which nothing is expected, because earlier ones came otherwise."""

    def begin(self, round_: int) -> None:
        """Begin a round, of which nothing was sent or told yet."""
        self.round, self.sent, self.early = round_, {}, None

    def copy(self, piece: Slice, parts: Sequence[Tensor]) -> Tensor:
        """Put a slice together from the numbers of each of its keys; returns it with its padding."""
        numbers = self._memory.get(piece.index)
        if numbers is None:
            numbers = torch.zeros(piece.length, dtype=torch_dtype(piece.dtype))
            self._memory[piece.index] = numbers
        places = [numbers[one.start : one.start + one.numel] for one in piece.segments]
        torch._foreach_copy_(places, list(parts))
        return numbers

    def note(self, piece: Slice) -> None:
        """The slice that was put together last goes out."""
        self.sent[piece.index] = self._memory[piece.index][: piece.used]

    def end(self, kept: Collection[int]) -> None:
        """The round is committed, with some of the slices that were sent."""
        self._vain.count(bool(kept))

    def expect(self, contribution: Contribution | None, was_right: bool) -> None:
        """Expect the next round to be like the one that begins, or nothing where that cannot be expected again.

        Args:
            was_right: What servers were told of this one holds; also where it was nothing.
        """
        if not was_right:
            self._surprises.fail()
        elif self.early is not None and self.early.legs:
            self._surprises.succeed()
        self.early = None
        self.expected = None
        if not self._surprises.skips() and contribution is not None:
            # The gradients themselves are not kept alive.
            self.expected = contribution._replace(lent={}, born={})
