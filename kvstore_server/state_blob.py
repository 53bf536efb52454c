"""The optimizer state of one slice as a summary of plain numbers and one block of bytes; no pickle."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from kvstore_server.errors import ProtocolError
from kvstore_server.optimizer import SliceState
from kvstore_server.plan import Slice

_DTYPES = ("float32", "float64", "float16", "bfloat16", "int64", "int32", "uint8", "bool")
_MASTER = "master"


def pack_state(state: SliceState) -> tuple[dict[str, Any], bytes]:
    """Return (summary, data): tensors lie in `data` in the order in which the summary names them."""
    tensors = dict(state.tensors)
    if state.master is not None:
        tensors[_MASTER] = state.master
    parts = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    summary = {
        "steps": list(state.steps),
        "scalars": [{name: _pack_scalar(value) for name, value in row.items()} for row in state.scalars],
        "tensors": [
            [name, str(part.dtype).removeprefix("torch."), part.numel()] for name, part in parts.items()
        ],
    }
    return summary, b"".join(part.view(torch.uint8).numpy().tobytes() for part in parts.values())


def unpack_state(piece: Slice, summary: Mapping[str, Any], data: bytes) -> SliceState:
    """Rebuild the state of `piece`.

    Raises:
        ProtocolError: summary and data do not describe the state of a slice of this shape.
    """
    try:
        return _unpack(piece, summary, data)
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise ProtocolError(f"this is no optimizer state of slice {piece.index}: {error}") from None


def _unpack(piece: Slice, summary: Mapping[str, Any], data: bytes) -> SliceState:
    count = len(piece.segments)
    steps = [int(step) for step in summary["steps"]]
    scalars = [
        {str(name): _unpack_scalar(value) for name, value in row.items()} for row in summary["scalars"]
    ]
    if len(steps) != count or len(scalars) != count:
        raise ValueError(f"it has {len(steps)} segments, the slice has {count}")
    tensors: dict[str, Tensor] = {}
    at = 0
    for name, dtype, numel in summary["tensors"]:
        if dtype not in _DTYPES or numel != piece.length:
            raise ValueError(f"{name!r} is {dtype}[{numel}], the slice has {piece.length} elements")
        kind: torch.dtype = getattr(torch, dtype)
        tensors[name] = torch.zeros(numel, dtype=kind)
        part = data[at : at + tensors[name].nbytes]
        tensors[name].view(torch.uint8).copy_(torch.frombuffer(bytearray(part), dtype=torch.uint8))
        at += tensors[name].nbytes
    if at != len(data):
        raise ValueError(f"it has {len(data)} bytes, its tensors need {at}")
    master = tensors.pop(_MASTER, None)
    return SliceState(tensors, scalars, steps, master)


def _pack_scalar(value: Tensor | float) -> list[Any]:
    if isinstance(value, Tensor):
        return [value.item(), str(value.dtype).removeprefix("torch.")]
    return [value, ""]


def _unpack_scalar(value: Any) -> Tensor | float:
    number, dtype = value
    if not isinstance(number, int | float) or (dtype and dtype not in _DTYPES):
        raise ValueError(f"{value!r} is no number")
    return torch.tensor(number, dtype=getattr(torch, dtype)) if dtype else number
