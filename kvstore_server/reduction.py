"""Sums of contributions: left folds in rank order, so that the bits do not depend on arrival order.

Half precision accumulates in float32. Compressed payloads are decoded as they are added.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kvstore_server.codec import Codec
from kvstore_server.optimizer import coalesce_rows
from kvstore_server.plan import Slice
from kvstore_server.protocol.messages import Payload


class Encoded(NamedTuple):
    """A compressed payload and how to read it."""

    codec: Codec
    data: Tensor
    """uint8, as long as the codec says."""


class RowSet(NamedTuple):
    """Some rows of the part of a key that lies in one slice."""

    ids: Tensor
    """int64, distinct and ascending, counted from the first row of that part."""
    values: Tensor
    """(number of ids, elements of a row)."""


class SparsePayload(NamedTuple):
    """What a rank gives to a slice of which it has only some rows of some keys."""

    rows: Mapping[int, RowSet]
    """Position of a segment in the slice → its rows."""
    dense: Tensor | None
    """The other segments, `used` elements; None where there are none."""


class Addend(NamedTuple):
    """One rank's part in the sum of a round."""

    slices: Mapping[int, Payload]
    scale: float
    absent: frozenset[int]
    """Keys (by index) that this rank left out."""


@functools.cache
def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype of a dtype name of the Plan."""
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def compute_dtype(name: str) -> torch.dtype:
    """The dtype in which gradients of a dtype of the Plan are summed."""
    dtype = torch_dtype(name)
    return torch.float32 if dtype.is_floating_point and dtype.itemsize < 4 else dtype


class Reducer:
    """Sums slices into memory that is used again and again."""

    def __init__(self) -> None:
        self._scratch: dict[tuple[torch.dtype, int], Tensor] = {}

    def total(self, piece: Slice, addends: Sequence[Addend], out: Tensor | None = None) -> Tensor:
        """Σ over ranks of scale · payload with zero padding, `piece.length` long, in the dtype to compute in.

        The result is `out`, or else scratch memory that the next call overwrites.
        """
        if out is None:
            out = self._memory(compute_dtype(piece.dtype), piece.length, 0)
        out[piece.used :].zero_()
        self.sum_into(out[: piece.used], piece, addends)
        return out

    def sum_into(self, body: Tensor, piece: Slice, addends: Sequence[Addend]) -> None:
        """`total` without the padding at the end, into `body`, whose dtype is the one to compute in.

        Equal scales, the usual case, are applied once to the sum: then the result has the same bits whether ranks
        or the replicas of one process were summed.
        """
        given = [a for a in addends if piece.index in a.slices]
        common = given[0].scale if len({a.scale for a in given}) == 1 else None
        payloads = [a.slices[piece.index] for a in given]
        if common is not None and len(payloads) > 1 and all(isinstance(p, Tensor) for p in payloads):
            if payloads[0].dtype != body.dtype:
                payloads = [payload.to(body.dtype) for payload in payloads]
            torch.add(payloads[0], payloads[1], out=body)
            for payload in payloads[2:]:
                body.add_(payload)
        else:
            self._fold(body, piece, given, common is None)
        if common is not None and common != 1.0:
            body.mul_(common)

    def rows(self, piece: Slice, position: int, addends: Sequence[Addend]) -> RowSet | None:
        """The sum of a segment of which all ranks gave only some rows; None where one gave all of it.

        As dense sums, it is a left fold in rank order with equal scales applied once.
        """
        key = piece.segments[position].key
        given = [a for a in addends if piece.index in a.slices and key not in a.absent]
        parts: list[RowSet] = []
        for addend in given:
            payload = addend.slices[piece.index]
            if not isinstance(payload, SparsePayload) or position not in payload.rows:
                return None
            parts.append(payload.rows[position])
        if not parts:
            return None
        common = given[0].scale if len({a.scale for a in given}) == 1 else None
        values = [part.values.to(compute_dtype(piece.dtype)) for part in parts]
        if common is None:
            values = [value * a.scale for value, a in zip(values, given, strict=True)]
        num_rows = piece.segments[position].numel // parts[0].values.shape[1]
        ids, total = coalesce_rows(torch.cat([part.ids for part in parts]), torch.cat(values), num_rows)
        return RowSet(ids, total if common in (None, 1.0) else total * common)

    def _fold(self, body: Tensor, piece: Slice, given: Sequence[Addend], is_scaled: bool) -> None:
        """The same sum, one rank after the other, for payloads that must be brought into form first."""
        for rank, addend in enumerate(given):
            payload = addend.slices[piece.index]
            if isinstance(payload, Encoded):
                values = self._decoded(payload, piece, addend.absent, body.dtype)
            elif isinstance(payload, SparsePayload):
                values = _densified(payload, piece, self._memory(body.dtype, piece.used, 1))
            else:
                values = payload.to(body.dtype)
            if is_scaled:
                values = values * addend.scale
            if rank:
                body.add_(values)
            else:
                body.copy_(values)

    def _decoded(self, payload: Encoded, piece: Slice, absent: frozenset[int], dtype: torch.dtype) -> Tensor:
        values = self._memory(dtype, piece.used, 1)
        payload.codec.decode(payload.data, piece.dtype, values)
        # One bit cannot say zero, and a residual may speak up where the rank gave nothing.
        end = 0
        for segment in piece.segments:
            values[end : segment.start].zero_()
            end = segment.start + segment.numel
            if segment.key in absent:
                values[segment.start : end].zero_()
        return values

    def _memory(self, dtype: torch.dtype, numel: int, number: int) -> Tensor:
        scratch = self._scratch.get((dtype, number))
        if scratch is None or scratch.numel() < numel:
            scratch = self._scratch[dtype, number] = torch.empty(numel, dtype=dtype)
        return scratch[:numel]


def same_payload(a: Payload, b: Payload) -> bool:
    """Whether two payloads of one slice are the same contribution."""
    if isinstance(a, Encoded) and isinstance(b, Encoded):
        return a.codec == b.codec and torch.equal(a.data, b.data)
    if isinstance(a, SparsePayload) and isinstance(b, SparsePayload):
        return a.rows.keys() == b.rows.keys() and all(
            _same_bits(x, y) for x, y in zip(_tensors_of(a), _tensors_of(b), strict=True)
        )
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a is b or _same_bits(a, b)
    return False


def _tensors_of(payload: SparsePayload) -> list[Tensor | None]:
    return [payload.dense, *(tensor for _, rows in sorted(payload.rows.items()) for tensor in rows)]


def _same_bits(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    if a.shape != b.shape or not a.numel():  # an empty tensor may have strides that no view as bytes allows
        return a.shape == b.shape
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def _densified(payload: SparsePayload, piece: Slice, out: Tensor) -> Tensor:
    """Write what a payload stands for into `out`, `used` elements: zero outside the rows that it has."""
    if payload.dense is None:
        out.zero_()
    else:
        out.copy_(payload.dense)
    for position, (ids, values) in payload.rows.items():
        segment = piece.segments[position]
        part = out[segment.start : segment.start + segment.numel]
        part.zero_()
        part.view(-1, values.shape[1])[ids] = values.to(out.dtype)
    return out
