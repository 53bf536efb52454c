"""Sums of contributions: left folds in rank order, so that the bits do not depend on arrival order.

Half precision accumulates in float32. Compressed payloads are decoded as they are added.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kvstore_server.codec import Codec
from kvstore_server.errors import ShapeMismatchError
from kvstore_server.optimizer import coalesce_rows
from kvstore_server.plan import Plan, Slice
from kvstore_server.protocol.messages import Payload

NO_KEYS: frozenset[int] = frozenset()


class Encoded(NamedTuple):
    """A compressed payload and how to read it."""

    codec: Codec
    data: Tensor
    """uint8, as long as the codec says."""


class RowSet(NamedTuple):
    """Some rows of a key, or of a block of its rows."""

    ids: Tensor
    """int64, distinct and ascending, counted from the first row of the block."""
    values: Tensor
    """(number of ids, elements of a row)."""


class SparsePayload(NamedTuple):
    """What a rank gives to a slice of which it has only some rows of some keys."""

    rows: Mapping[int, RowSet]
    """Position of a segment in the slice → its rows."""
    dense: Tensor | None
    """The other segments, `used` elements; None where there are none."""


class Run(NamedTuple):
    """What a rank gives to neighbouring slices of a Shard, the slots from `first` up to `end`."""

    first: int
    end: int
    payload: Tensor | Encoded
    """Plain numbers of whole slots with zeros as padding, which may be missing behind the last; encoded, one slot."""


class Contribution(NamedTuple):
    """One rank's part in a sum.

    Args:
        runs: In ascending order, without overlaps.
        scale: Factor of all of it.
        absent: The keys (as the Shard numbers them) that this rank leaves out.
        rows: Key → the rows of its block of which the rank has only those; runs do not count there.
        is_scratch: Whether the memory may be overwritten.
    """

    runs: Sequence[Run]
    scale: float = 1.0
    absent: frozenset[int] = NO_KEYS
    rows: Mapping[int, RowSet] = {}
    is_scratch: bool = False


class Part(NamedTuple):
    """One rank's numbers on their way into a sum."""

    payload: Tensor | Encoded | None
    """None: zeros."""
    scale: float
    rows: Sequence[tuple[slice, RowSet]] = ()
    """Rows of which a rank has only those, and the elements in place of which they are given."""
    zeros: Sequence[slice] = ()
    """Where a compressed payload counts as zero."""


def left_out_by_all(contributions: Sequence[Contribution]) -> frozenset[int]:
    """The keys that none of the contributions has."""
    if any(not given.absent for given in contributions):
        return NO_KEYS
    return frozenset.intersection(*(given.absent for given in contributions)) if contributions else NO_KEYS


@functools.cache
def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype of a dtype name of the Plan."""
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


@functools.cache
def compute_dtype(name: str) -> torch.dtype:
    """The dtype in which gradients of a dtype of the Plan are summed."""
    dtype = torch_dtype(name)
    return torch.float32 if dtype.is_floating_point and dtype.itemsize < 4 else dtype


class Scratch:
    """Memory that is used again and again."""

    def __init__(self) -> None:
        self._memory: dict[tuple[torch.device, torch.dtype, int], Tensor] = {}

    def get(self, like: Tensor, dtype: torch.dtype, numel: int, number: int = 0) -> Tensor:
        """Flat memory on the device of `like`; the next call with the same number overwrites it."""
        kept = self._memory.get((like.device, dtype, number))
        if kept is None or kept.numel() < numel:
            kept = torch.empty(numel, dtype=dtype, device=like.device)
            self._memory[like.device, dtype, number] = kept
        return kept[:numel]


def sum_into(body: Tensor, dtype: str, parts: Sequence[Part], scratch: Scratch) -> None:
    """Write Σ over ranks of scale · numbers to `body`, whose dtype is the one to compute in.

    Equal scales, the usual case, are applied once to the sum: then the result has the same bits whether ranks or the
    replicas of one process were summed.

    Args:
        dtype: Of the weights, as a Plan names it.
    """
    common = parts[0].scale if len({part.scale for part in parts}) == 1 else None
    plain = [p.payload for p in parts if isinstance(p.payload, Tensor) and not p.rows]
    if common is not None and len(plain) == len(parts):
        if plain[0].dtype != body.dtype:
            plain = [payload.to(body.dtype) for payload in plain]
        if len(plain) == 1:
            body.copy_(plain[0])
        else:
            torch.add(plain[0], plain[1], out=body)
            for payload in plain[2:]:
                body.add_(payload)
    else:
        for rank, part in enumerate(parts):
            values = _numbers(body, dtype, part, scratch)
            if common is None:
                values = values * part.scale
            if rank:
                body.add_(values)
            else:
                body.copy_(values)
    if common is not None and common != 1.0:
        body.mul_(common)


def _numbers(body: Tensor, dtype: str, part: Part, scratch: Scratch) -> Tensor:
    """What a part stands for, in the dtype of `body`."""
    if isinstance(part.payload, Tensor) and not part.rows:
        return part.payload.to(body.dtype)
    values = scratch.get(body, body.dtype, body.numel(), 1)
    if isinstance(part.payload, Encoded):
        part.payload.codec.decode(part.payload.data, dtype, values)
    elif part.payload is None:
        values.zero_()
    else:
        values.copy_(part.payload)
    for gap in part.zeros:
        values[gap].zero_()
    for place, (ids, rows) in part.rows:
        values[place].zero_().view(-1, rows.shape[1])[ids] = rows.to(body.dtype)
    return values


def sum_rows_of(given: Sequence[tuple[RowSet, float]], dtype: str, num_rows: int) -> RowSet:
    """Σ over ranks of scale · rows, a left fold in rank order with equal scales applied once, as dense sums.

    Args:
        given: Rows and their scale, at least one.
        dtype: Of the weights, as a Plan names it.
        num_rows: How many rows there are.
    """
    common = given[0][1] if len({scale for _, scale in given}) == 1 else None
    values = [rows.values.to(compute_dtype(dtype)) for rows, _ in given]
    if common is None:
        values = [value * scale for value, (_, scale) in zip(values, given, strict=True)]
    ids, total = given[0][0].ids, values[0]
    if len(given) > 1:
        ids, total = torch.cat([rows.ids for rows, _ in given]), torch.cat(values)
    ids, total = coalesce_rows(ids, total, num_rows)
    return RowSet(ids, total if common in (None, 1.0) else total * common)


def view_payload(plan: Plan, piece: Slice, payload: Payload, codec: Codec | None) -> Tensor | Encoded:
    """View a payload as the plain numbers of a slice, or as what a codec reads; nothing is copied.

    Raises:
        ProtocolError: no codec of that kind wrote the bytes.
        ShapeMismatchError: the payload has another size or dtype than the slice.
    """
    if codec is not None:
        return _encoded(plan, piece, payload, codec)
    if isinstance(payload, Tensor):
        if payload.numel() != piece.used or payload.dtype != torch_dtype(piece.dtype):
            raise ShapeMismatchError(_wrong_size(plan, piece, f"{payload.dtype}[{payload.numel()}]"))
        return payload
    if payload.nbytes != piece.nbytes:
        raise ShapeMismatchError(_wrong_size(plan, piece, f"{payload.nbytes} bytes"))
    if not piece.used:
        return torch.empty(0, dtype=torch_dtype(piece.dtype))
    return torch.frombuffer(payload, dtype=torch_dtype(piece.dtype))


def _encoded(plan: Plan, piece: Slice, payload: Payload, codec: Codec) -> Encoded:
    data = payload
    if not isinstance(payload, Tensor):
        empty = torch.empty(0, dtype=torch.uint8)
        data = torch.frombuffer(payload, dtype=torch.uint8) if len(payload) else empty
    if data.dtype != torch.uint8 or data.numel() != codec.encoded_nbytes(piece.used, piece.dtype):
        got = f"{data.numel()} bytes compressed by {codec.spec()}"
        raise ShapeMismatchError(_wrong_size(plan, piece, got))
    codec.check_payload(data, piece.dtype, piece.used)  # in the middle of an update it would be too late
    return Encoded(codec, data)


def _wrong_size(plan: Plan, piece: Slice, got: str) -> str:
    names = ", ".join(repr(plan.specs[segment.key].key) for segment in piece.segments[:3])
    return f"slice {piece.index} (of {names}) takes {piece.dtype}[{piece.used}], got {got}"


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


def _tensors_of(payload: SparsePayload) -> Iterable[Tensor | None]:
    return [payload.dense, *(tensor for _, rows in sorted(payload.rows.items()) for tensor in rows)]


def _same_bits(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    if a.shape != b.shape or not a.numel():  # an empty tensor may have strides that no view as bytes allows
        return a.shape == b.shape
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
