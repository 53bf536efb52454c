"""Slices in the making: the keys of a table, cut and laid out in the arena of their dtype; see `plan`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

ALIGNMENT = 64
MIN_SLICE = 16 * 1024
MAX_SLICE = 1024 * 1024
SLICES_PER_TABLE = 8
"""A table is cut into about this many slices while they stay between MIN_SLICE and MAX_SLICE bytes."""

ITEM_SIZE = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}
"""The dtypes that can be stored and updated, and their size in bytes."""
INTEGERS = {"uint8": 1, "int8": 1, "int16": 2, "int32": 4, "int64": 8}
"""Those that a store of one process takes too, without an optimizer."""
SIZES = {**ITEM_SIZE, **INTEGERS}


class TensorSpec(NamedTuple):
    """Name, shape and dtype of one key, and the index of the parameter group that it belongs to."""

    key: str
    shape: tuple[int, ...]
    dtype: str
    group: int = 0
    row_sparse: bool = False
    """Whether the key lives in the store alone: workers send and fetch rows of it, and hold no copy."""

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * SIZES[self.dtype]


class Segment(NamedTuple):
    """The part of one key that lies in one slice; all numbers count elements."""

    key: int
    """Index of the key in `Plan.specs`."""
    start: int
    """Where the segment begins, from the start of its slice."""
    key_start: int
    """Where the segment begins, from the start of its key."""
    numel: int


@dataclass(frozen=True, slots=True)
class Slice:
    """A contiguous, 64-byte aligned piece of one dtype's arena; the unit of transfer and update."""

    index: int
    dtype: str
    offset: int
    """Start in the arena of this dtype, in elements."""
    length: int
    """Elements including padding up to the next 64-byte boundary."""
    used: int
    """Elements up to the end of the last segment: what is sent."""
    segments: tuple[Segment, ...]
    server: int

    @property
    def nbytes(self) -> int:
        return self.used * SIZES[self.dtype]


def row_numel(spec: TensorSpec) -> int:
    """The elements in one row of a key, which are neighbours in its slices; all of a key without dimensions."""
    return math.prod(spec.shape[1:]) if spec.shape else 1


@dataclass
class Draft:
    """A slice before its number and its server are known."""

    dtype: str
    offset: int
    segments: list[Segment]
    used: int = 0
    length: int = 0
    """`used`, up to the next boundary of 64 bytes."""

    def append(self, key: int, key_start: int, numel: int) -> int:
        """Add a part of a key; where it begins in the slice."""
        start = self.length
        self.segments.append(Segment(key, start, key_start, numel))
        self.used = start + numel
        unit = ALIGNMENT // SIZES[self.dtype]
        self.length = -(-self.used // unit) * unit
        return start

    def freeze(self, index: int, server: int) -> Slice:
        return Slice(index, self.dtype, self.offset, self.length, self.used, tuple(self.segments), server)


class ArenaLayout:
    """Fills the arena of one dtype from front to back: buckets of small keys, then big keys, then row-sparse ones."""

    def __init__(self, dtype: str, piece_bytes: int) -> None:
        self.dtype = dtype
        self.limit = piece_bytes // SIZES[dtype]
        self.drafts: list[Draft] = []
        self.end = 0
        self._bucket: Draft | None = None

    def add_small(self, key: int, numel: int) -> int:
        if self._bucket is not None and self._bucket.length + numel > self.limit:
            self.close()
        if self._bucket is None:
            self._bucket = Draft(self.dtype, self.end, [])
        return self._bucket.offset + self._bucket.append(key, 0, numel)

    def close(self) -> None:
        if self._bucket is not None:
            self._finish(self._bucket)
            self._bucket = None

    def add_big(self, key: int, numel: int, row: int) -> int:
        offset = self.end
        # Whole rows, so that a slice takes rows by itself; unless one is too long for that.
        unit = math.lcm(max(row, 1), ALIGNMENT // SIZES[self.dtype])
        limit = self.limit - self.limit % unit or unit
        if limit * SIZES[self.dtype] > MAX_SLICE:
            limit = self.limit
        for start in range(0, numel, limit):
            draft = Draft(self.dtype, self.end, [])
            draft.append(key, start, min(limit, numel - start))
            self._finish(draft)
        return offset

    def _finish(self, draft: Draft) -> None:
        self.drafts.append(draft)
        self.end += draft.length
