"""Slices that a worker sends ahead of its commit, while a backward pass still computes the others.

They have generation 0. If any has changed since, what is sent with the commit has generation 1: those that have changed
and slices that were not complete before. If none is to be given as it was sent, or one not at all, it begins anew.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from kvstore_server.codec import torch_dtype
from kvstore_server.plan import Slice

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
    """What a worker has sent ahead to the open round of one table."""

    def __init__(self) -> None:
        self._round = -1
        self._memory: dict[int, Tensor] = {}
        """Slice (by index) → its numbers, with padding."""
        self._sent: dict[int, Tensor] = {}
        self._vain = InVain()

    def sent(self, round_: int) -> Mapping[int, Tensor]:
        """Slices (by index) that were sent to a round, and their numbers."""
        return self._sent if self._round == round_ else {}

    def copy(self, piece: Slice, parts: Sequence[Tensor]) -> Tensor:
        """Put a slice together from the numbers of each of its keys; returns it with its padding."""
        numbers = self._memory.get(piece.index)
        if numbers is None:
            numbers = torch.zeros(piece.length, dtype=torch_dtype(piece.dtype))
            self._memory[piece.index] = numbers
        places = [numbers[one.start : one.start + one.numel] for one in piece.segments]
        torch._foreach_copy_(places, list(parts))
        return numbers

    def note(self, piece: Slice, round_: int) -> None:
        """The slice that was put together last goes out."""
        if self._round != round_:
            self._round, self._sent = round_, {}
        self._sent[piece.index] = self._memory[piece.index][: piece.used]

    def end(self, kept: Collection[int]) -> None:
        """The round is committed, with some of the slices that were sent."""
        self._vain.count(bool(kept))


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Tell whether two flat tensors hold the same bits."""
    mine, theirs = one.view(torch.uint8).numpy(), other.view(torch.uint8).numpy()
    body = len(mine) // 8 * 8
    return (
        len(mine) == len(theirs)
        and np.array_equal(mine[:body].view(np.int64), theirs[:body].view(np.int64))
        and np.array_equal(mine[body:], theirs[body:])
    )
