"""Weights on their way to a worker that needs only some rows: those that it asked for, or those that have changed."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from kvstore_server.errors import ProtocolError
from kvstore_server.plan import Plan, Slice, row_numel
from kvstore_server.protocol import messages as m
from kvstore_server.reduction import RowSet
from kvstore_server.rows import Rows, encode_rows
from kvstore_server.shard import Shard, Unit


class RowPart(NamedTuple):
    """What a worker is sent of one slice."""

    slice: int
    payload: Tensor
    kind: int
    """WHOLE, ROWS or VALUES."""


_NOTHING = torch.empty(0, dtype=torch.uint8)


def changed_parts(shard: Shard, unit: Unit, version: int, held: int) -> list[RowPart]:
    """What a worker that holds version `held` of all its slices here must be sent to have `version`, the present one.

    A slice in which nothing has changed has an empty part of kind ROWS.

    """
    parts = []
    for piece in unit.plan.resident_slices_of(unit.server):
        rows = shard.changed_since(unit, piece.index, held, version)
        payload, kind = _NOTHING, m.ROWS
        if rows is None or _bytes_of(unit.plan, piece, rows) >= piece.nbytes:
            payload, kind = shard.visible(unit, piece.index), m.WHOLE
        elif rows:
            payload = _pack(shard, unit, piece, rows)
        parts.append(RowPart(piece.index, payload, kind))
    return parts


def pulled_parts(shard: Shard, unit: Unit, pull: m.PullRows) -> list[RowPart]:
    """The values of the rows that were asked for, one part for each slice, flat.

    Raises:
        ProtocolError: a slice is not here, or its segment has no such rows.
    """
    counts = [count for _, _, count in pull.wanted]
    if min(counts, default=0) < 0 or 4 * sum(counts) != len(pull.ids):
        raise ProtocolError(f"a pull of {sum(counts)} rows brings {len(pull.ids)} bytes of ids")
    ids = torch.from_numpy(np.frombuffer(pull.ids, "<i4").astype(np.int64))
    parts = []
    for (index, position, _), some in zip(pull.wanted, torch.split(ids, counts), strict=True):
        rows = shard.rows_of(unit, index, position)
        if len(some) and not 0 <= int(some[0]) <= int(some[-1]) < len(rows):
            raise ProtocolError(
                f"a pull names rows {some[0]} to {some[-1]} of the {len(rows)} of slice {index}"
            )
        if not bool((some[1:] > some[:-1]).all()):
            raise ProtocolError(f"a pull names rows of slice {index} twice, or not in ascending order")
        parts.append(RowPart(index, rows[some].view(-1), m.VALUES))
    return parts


def _pack(shard: Shard, unit: Unit, piece: Slice, rows: Rows) -> Tensor:
    parts: dict[int, RowSet | Tensor] = {}
    for position, ids in rows.items():
        segment = piece.segments[position]
        if ids is None:
            parts[position] = shard.visible(unit, piece.index)[segment.start : segment.start + segment.numel]
        else:
            parts[position] = RowSet(ids, shard.rows_of(unit, piece.index, position)[ids])
    return encode_rows(unit.plan, piece, parts)


def _bytes_of(plan: Plan, piece: Slice, rows: Rows) -> int:
    """About as many as the rows and their ids have when they are sent."""
    size = piece.nbytes // max(piece.used, 1)
    total = 0
    for position, ids in rows.items():
        segment = piece.segments[position]
        if ids is None:
            total += segment.numel * size
        else:
            total += len(ids) * (row_numel(plan.specs[segment.key]) * size + 4)
    return total
