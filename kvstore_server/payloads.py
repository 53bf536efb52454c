"""Payloads as they came, viewed as what they stand for."""

from __future__ import annotations

import torch
from torch import Tensor

from kvstore_server.codec import Codec
from kvstore_server.errors import ShapeMismatchError
from kvstore_server.plan import Plan, Slice
from kvstore_server.protocol.buffers import payload_bytes
from kvstore_server.protocol.messages import Payload
from kvstore_server.reduction import Encoded, torch_dtype
from kvstore_server.row_payload import RowForm, as_contribution, decode_rows


def view_payload(plan: Plan, piece: Slice, payload: Payload, form: Codec | RowForm | None) -> Payload:
    """A flat tensor of the slice's numbers; or what a codec reads; or some rows. Nothing large is copied.

    Raises:
        ProtocolError: rows are malformed, or no codec of that kind wrote the bytes.
        ShapeMismatchError: the payload has another size or dtype than the slice.
    """
    if isinstance(form, RowForm):
        return as_contribution(piece, decode_rows(plan, piece, payload_bytes(payload)))
    if form is not None:
        return _encoded(plan, piece, payload, form)
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
