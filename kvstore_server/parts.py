"""A slice that comes in parts, one behind the other, so that it can be summed and answered while the rest comes.

The bytes that came first count: a part that comes again changes nothing. One that leaves a gap is dropped, for what was
to fill it is lost; the commit finds out, and the worker sends the slice as a whole.
"""

from __future__ import annotations

import torch
from torch import Tensor


class Growing:
    """What has come of a slice so far.

    Args:
        mark: Of its generation; see `Given.marks`.
        nbytes: Of the whole slice.
    """

    def __init__(self, mark: int, nbytes: int) -> None:
        self.mark = mark
        self.bytes = torch.empty(nbytes, dtype=torch.uint8)
        self.level = 0
        """So many bytes are here, from the first one on."""

    @property
    def is_whole(self) -> bool:
        """Whether all of it is here."""
        return self.level == len(self.bytes)

    def take(self, begin: int, data: Tensor) -> bool:
        """Take bytes from one on; return whether those of them that were here already are the same."""
        if begin > self.level:
            return True
        known, end = self.level - begin, begin + len(data)
        is_same = known <= 0 or torch.equal(self.bytes[begin : self.level][: len(data)], data[:known])
        if end > self.level:
            self.bytes[self.level : end] = data[known:]
            self.level = end
        return is_same
