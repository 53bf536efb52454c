"""Rows of a table that lives on servers of this host, which a worker reads where they are.

The slices of a key are mapped one below the other, whichever server has them, so rows are picked by one call. In
synchronous rounds nobody writes to them between the rounds of a worker; servers mark what they write all the same, and
rows that were being written are not used.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from kvstore_server.channel import Arena
from kvstore_server.codec import torch_dtype
from kvstore_server.plan import LONG, PAGE, SIZES, Plan
from kvstore_server.storage import marks_in
from kvtrainer.comm.mapped import put_pages

_NO_RESERVE = 0x4000
"""Of a mapping: its memory is not counted before it is used."""


class Shown(NamedTuple):
    """Where a slice begins in a server's memory."""

    memory: Arena
    begin: int


class MappedRows:
    """All rows of a key, to be read alone; not for forked processes.

    Args:
        shown: Slice (by index) → where it is.

    Raises:
        OSError: the slices do not fill pages, are not all shown, or the system refuses.
    """

    def __init__(self, plan: Plan, key: int, shown: Mapping[int, Shown]) -> None:
        spec, size, pieces = plan.specs[key], SIZES[plan.specs[key].dtype], plan.slices_with(key)
        if mmap.PAGESIZE != PAGE or not pieces or not plan.rows(key).blocks:
            raise OSError(f"key {spec.key!r} has no rows in whole pages")
        self._room = mmap.mmap(-1, -(-spec.nbytes // PAGE) * PAGE, mmap.MAP_PRIVATE | _NO_RESERVE)
        room = np.frombuffer(self._room, np.uint8)
        spans: dict[int, tuple[Arena, int, int]] = {}
        """Of each memory, where the slices there begin, and end; they are neighbours."""
        for piece in pieces:
            at, nbytes = piece.segments[0].key_start * size, piece.nbytes
            memory, begin = shown.get(piece.index, (None, 0))
            if memory is None or at % PAGE or begin % PAGE or begin + nbytes > memory.nbytes:
                raise OSError(f"slice {piece.index} of key {spec.key!r} cannot be mapped")
            put_pages(room.ctypes.data + at, -(-nbytes // PAGE) * PAGE, memory.fd, begin, mmap.PROT_READ)
            _, first, end = spans.get(id(memory), (memory, begin, 0))
            spans[id(memory)] = memory, min(first, begin), max(end, begin + nbytes)
        self._marks = [
            marks_in(memory.numbers)[:, first // LONG : -(-end // LONG)]
            for memory, first, end in spans.values()
        ]
        """Of each memory, how often writing of these slices was begun, and ended."""
        width = plan.rows(key).width
        [self._deal] = plan.rows(key).deals
        self._rows = torch.from_numpy(room).view(torch_dtype(spec.dtype))[: spec.numel].view(-1, width)
        self._process = os.getpid()

    def take(self, ids: Tensor) -> Tensor | None:
        """Copy rows (int64 ids, each of the table), in this order; None where some may be being written."""
        if os.getpid() != self._process:
            return None
        ended = [marks[1].copy() for marks in self._marks]
        rows = self._rows.index_select(0, torch.from_numpy(self._deal.places(ids.numpy())))
        is_still = [(marks[0] == own).all() for marks, own in zip(self._marks, ended, strict=True)]
        return rows if all(is_still) else None
