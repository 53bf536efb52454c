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
from kvstore_server.plan import Slice
from kvstore_server.protocol.messages import Payload


class Encoded(NamedTuple):
    """A compressed payload and how to read it."""

    codec: Codec
    data: Tensor
    """uint8, as long as the codec says."""


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
    return torch.float32 if dtype.itemsize < 4 else dtype


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
        if common is not None and len(payloads) > 1 and not any(isinstance(p, Encoded) for p in payloads):
            if payloads[0].dtype != body.dtype:
                payloads = [payload.to(body.dtype) for payload in payloads]
            torch.add(payloads[0], payloads[1], out=body)
            for payload in payloads[2:]:
                body.add_(payload)
        else:
            self._fold(body, piece, given, common is None)
        if common is not None and common != 1.0:
            body.mul_(common)

    def _fold(self, body: Tensor, piece: Slice, given: Sequence[Addend], is_scaled: bool) -> None:
        """The same sum, one rank after the other, for payloads that must be brought into form first."""
        for rank, addend in enumerate(given):
            payload = addend.slices[piece.index]
            if isinstance(payload, Encoded):
                values = self._decoded(payload, piece, addend.absent, body.dtype)
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
