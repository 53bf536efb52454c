"""Sums of the bits of a table of which rows alone are written, kept from step to step.

A look at all of a large table would take longer than a step by a few of its rows. So the sums of what the Trainer
writes are made anew as it writes, and a step compares some of the others: with the turns, all.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from kvstore_server.plan import ALIGNMENT

TURNS = 64
"""Steps within which a write is found."""
_WORD = 8
_SHIFT = 8
_SUMMED = 1 << _SHIFT
"""The bytes in one sum; behind the last whole round of turns it is a line of 64."""
_AT_ONCE = 4
"""Neighbouring sums that are compared in one turn."""


class KeptSums:
    """The sums of one table.

    Args:
        words: The memory of the table as int64, whole lines.
        row_nbytes: Bytes of a row.
    """

    def __init__(self, words: Tensor, row_nbytes: int) -> None:
        unit = _SUMMED // _WORD
        size = words.numel() // (TURNS * _AT_ONCE * unit) * (TURNS * _AT_ONCE * unit)
        self._row_nbytes = row_nbytes
        self._units = words[:size].view(-1, unit)
        self._rest = words[size:].view(-1, ALIGNMENT // _WORD)
        self._blocks = words[:size].view(-1, TURNS, _AT_ONCE * unit)
        self._sums, self._rest_sums = self._units.sum(-1), self._rest.sum(-1)
        self._by_turn = self._sums.view(-1, TURNS, _AT_ONCE)

    def is_same(self, turn: int) -> bool:
        """Whether nobody has written to what is looked at in this turn: a part of 1 KiB in each 64, and the rest."""
        at = turn % TURNS
        # A sum of all that is looked at in a block takes a third of the time that sums of its parts take.
        kept = torch.stack(self._by_turn[:, at].unbind(-1)).sum(0)
        is_same = torch.equal(self._blocks[:, at].sum(-1), kept)
        return is_same and torch.equal(self._rest.sum(-1), self._rest_sums)

    def note(self, ids: Tensor) -> None:
        """The Trainer has written these rows."""
        begins = ids.numpy() * self._row_nbytes
        first, last = begins >> _SHIFT, (begins + (self._row_nbytes - 1)) >> _SHIFT
        span = int((last - first).max(initial=0)) + 1
        if span > 1:
            first = np.minimum(first[:, None] + np.arange(span), last[:, None]).reshape(-1)
        if first.max(initial=0) >= len(self._units):
            first = first[first < len(self._units)]
            self._rest_sums = self._rest.sum(-1)
        sums = self._units.index_select(0, torch.from_numpy(first)).sum(-1)
        self._sums.numpy()[first] = sums.numpy()
