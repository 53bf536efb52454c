"""Which parameters were written to by anybody but the Trainer, by torch's version counters and by sums of their bits.

Every write in place that torch knows of raises `_version` of a tensor by one or more: `load_state_dict`, `nn.init`,
`p.clamp_()` under no_grad. Reads, gradients and backward passes do not. A write through `p.data`, NumPy or another
library raises nothing, but changes bits.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

from kvstore_server.plan import ALIGNMENT, Plan

WHOLE = 8 << 20
"""Bytes. An arena of up to this size is looked at as a whole; of a bigger one every EVERY-th block, in turn."""
EVERY = 8
_BLOCK = 8 << 10
_SUMMED = 1 << 10
"""The bytes in one sum; behind the last whole row of blocks it is a line of 64."""
_WORD = 8


class WriteWatch:
    """Compares the parameters with what the Trainer's own updates made of them.

    Counters cost a few dozen ns per parameter. Bits are summed only where a store has the weights too and will put its
    own in the place of what is written; that takes two passes over what is looked at.

    Args:
        parameters: in the order of `plan.specs`.
        weights: the arena that they lie in.
    """

    def __init__(self, parameters: Sequence[Parameter], weights: Mapping[str, Tensor], plan: Plan) -> None:
        self._parameters = list(parameters)
        self._weights = weights
        self._plan = plan
        self._accepted: list[int] = []
        self._total = 0
        self._own = 0
        self._is_in_store = False
        self._turn = 0
        self._sums: dict[str, Tensor] = {}

    def accept(self, is_in_store: bool) -> None:
        """From now on look for writes that come later; for unseen ones too if the weights are in a store as well."""
        self._accepted = [p._version for p in self._parameters]
        self._total = sum(self._accepted)
        self._own, self._is_in_store = 0, is_in_store
        self._take_sums()

    def count_own(self) -> None:
        """The Trainer has written to the weights, and raised each counter by one."""
        self._own += 1
        self._take_sums()

    def by_others(self) -> list[int]:
        """The parameters (by position) that somebody else has written to since `accept`, or that lie beside one."""
        found = {key for dtype in self._sums for key in self._changed(dtype)}
        # Counters only rise, so the sum tells whether any has: on most steps none.
        if sum([p._version for p in self._parameters]) != self._total + self._own * len(self._parameters):
            rows = zip(self._parameters, self._accepted, strict=True)
            found.update(i for i, (p, version) in enumerate(rows) if p._version != version + self._own)
        return sorted(found)

    def _take_sums(self) -> None:
        self._turn += 1
        self._sums = {dtype: self._sum(dtype) for dtype in self._weights if self._is_in_store}

    def _sum(self, dtype: str) -> Tensor:
        words = self._weights[dtype].view(torch.int64)
        return torch.cat([part.sum(-1).flatten() for part in self._looked_at(words)])

    def _looked_at(self, words: Tensor) -> tuple[Tensor, Tensor]:
        """The blocks whose turn it is and the rest behind all blocks, cut into what is summed."""
        every = 1 if words.numel() * _WORD <= WHOLE else EVERY
        body = words.numel() // (every * _BLOCK // _WORD) * (every * _BLOCK // _WORD)
        blocks = words[:body].view(-1, every, _BLOCK // _SUMMED, _SUMMED // _WORD)
        return blocks[:, self._turn % every], words[body:].view(-1, ALIGNMENT // _WORD)

    def _changed(self, dtype: str) -> list[int]:
        """The keys of a dtype that have bytes in what has another sum now."""
        differs = self._sum(dtype) != self._sums[dtype]
        if not differs.any():
            return []
        flat, differs = self._weights[dtype], differs.cpu()
        size = flat.element_size()
        parts = self._looked_at(torch.arange(0, flat.numel() * size, _WORD))
        firsts = torch.cat([part[..., 0].flatten() for part in parts])[differs].tolist()
        ends = torch.cat([part[..., -1].flatten() for part in parts])[differs].add(_WORD).tolist()
        rows = zip(self._plan.specs, self._plan.key_offsets, strict=True)
        return [
            key
            for key, (spec, at) in enumerate(rows)
            if spec.dtype == dtype
            and not spec.row_sparse
            and bisect_right(ends, at * size) < bisect_left(firsts, (at + spec.numel) * size)
        ]
