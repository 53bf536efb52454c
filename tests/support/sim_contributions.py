"""What a process of the simulation sends: plain numbers, what a codec makes of them, or rows."""

from __future__ import annotations

import torch

from kvstore_server.reduction import RowSet
from kvstore_server.rows import PACKED_ROWS, encode_rows
from tests.support.sim_lane import BY_ROWS, Lane, SimOptions
from tests.support.sim_payloads import INTEGERS, POOL, ROWS, payload_at, rows_at

_pool, _integers = torch.from_numpy(POOL), torch.from_numpy(INTEGERS)


class Contributions:
    """The contributions of one process."""

    def __init__(self, process: int, options: SimOptions) -> None:
        self._process = process
        self._options = options

    def encode(self, lane: Lane) -> None:
        """Compress the gradients of the open round in their present generations; values that replace never are."""
        lane.encoded = {}
        if lane.compressor is None or lane.assign or lane.veto or lane.joined or not lane.round:
            return
        arena = torch.zeros(lane.plan.arena_sizes["float32"])
        pieces = [piece for piece in lane.plan.slices if piece.index in lane.generations]
        for piece in pieces:
            values = self._values(lane, piece.index, lane.generations[piece.index])
            arena[piece.offset : piece.offset + piece.used] = values
        lane.encoded = lane.compressor.encode({"float32": arena}, pieces, frozenset())

    def _values(self, lane: Lane, slice_: int, generation: int) -> torch.Tensor:
        numel = lane.plan.slices[slice_].used
        pool = _integers if self._options.integers else _pool
        return pool[payload_at(self._process, lane.table, lane.round, slice_, generation, numel)]

    def payload(self, lane: Lane, slice_: int, generation: int) -> tuple[bytes, torch.Tensor]:
        """How a slice is sent, and what: in the form of a codec, of rows, or as plain numbers."""
        if not lane.encoded:
            return self._by_rows(lane, slice_, generation) or (b"", self._values(lane, slice_, generation))
        if generation == lane.generations[slice_]:
            return self._options.codec, lane.encoded[slice_]
        # Of a generation that must not count.
        return self._options.codec, torch.zeros_like(lane.encoded[slice_])

    def _by_rows(self, lane: Lane, slice_: int, generation: int) -> tuple[bytes, torch.Tensor] | None:
        is_gradient = lane.round > 0 and not lane.assign
        if slice_ not in self._options.by_rows or lane.table != BY_ROWS or not is_gradient:
            return None
        rows = rows_at(self._process, lane.table, lane.round, slice_, generation)
        if rows is None:
            return None
        ids = torch.tensor(rows, dtype=torch.int64)
        values = self._values(lane, slice_, generation).view(ROWS, -1)[ids]
        return PACKED_ROWS, encode_rows(lane.plan, lane.plan.slices[slice_], {0: RowSet(ids, values)})
