"""A slice of a gradient that arrives in parts. No clock, socket or round."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kvstore_server.codec import Codec
from kvstore_server.plan import SIZES
from kvstore_server.protocol.rows import CompressedPayload

NO_BYTES = torch.empty(0, dtype=torch.uint8, device="cpu")


class SlicePart(NamedTuple):
    """A part of a slice, as it was sent."""

    data: Tensor
    begin: int
    """Offset of the part's bytes in the slice."""
    end: int
    """The element of the slice at which the part ends (exclusive)."""
    nbytes: int
    """Size of the whole slice in bytes."""
    codec: Codec | None
    """The encoding of the bytes; None: plain numbers."""

    def payload(self, data: Tensor) -> Tensor | CompressedPayload:
        return data if self.codec is None else CompressedPayload(self.codec, data)


class PartialSlice:
    """A slice that has arrived in part, to be summed and answered while the rest is on its way.

    The first bytes win: a repeated part has no effect. A part that leaves a gap is dropped, because the one that
    should fill the gap was lost; the commit detects that, and the worker sends the slice as a whole. Parts are stored
    separately, since most are summed one by one.

    Args:
        arrival: What `RankInputs.arrivals` holds of the slice once all of it has arrived.
        part: Any one of its parts.
    """

    def __init__(self, arrival: int, part: SlicePart) -> None:
        self.arrival = arrival
        self.level = 0
        """How many bytes have arrived without a gap."""
        self.end = 0
        """The number of elements in those bytes."""
        self._codec, self._nbytes = part.codec, part.nbytes
        self._parts: list[tuple[int, Tensor]] = []
        """The offset of each part in the slice, and its bytes."""

    @property
    def is_whole(self) -> bool:
        return self.level == self._nbytes

    def take(self, part: SlicePart) -> bool:
        """Store a part; return whether bytes that had arrived before are the same, in the same encoding."""
        data, begin = part.data, part.begin
        if part.codec != self._codec or begin > self.level:
            return part.codec == self._codec
        known, end = self.level - begin, begin + data.numel()
        is_same = known == 0 or torch.equal(self._bytes(begin, min(self.level, end)), data[:known])
        if end > self.level:
            self._parts.append((self.level, data[known:].clone() if known else data))
            self.level, self.end = end, part.end
        return is_same

    def payload(self) -> Tensor | CompressedPayload:
        data = self._bytes(0, self.level)
        return data if self._codec is None else CompressedPayload(self._codec, data)

    def elements(self, dtype: str, begin: int, end: int) -> Tensor | None:
        """Return the decoded bytes of some elements; None if the encoding does not have single elements."""
        codec = self._codec
        size = SIZES[dtype] if codec is None else codec.itemsize(dtype)
        if size is None:
            return None
        data = self._bytes(begin * size, end * size)
        return data if codec is None else CompressedPayload(codec, data).elements(dtype, 0, end - begin)

    def _bytes(self, begin: int, end: int) -> Tensor:
        found = [
            data[max(begin - first, 0) : end - first]
            for first, data in self._parts
            if first < end and begin < first + data.numel()
        ]
        return found[0] if len(found) == 1 else torch.cat(found or [NO_BYTES])
