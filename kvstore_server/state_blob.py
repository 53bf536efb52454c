"""The optimizer state of a slice or a whole key as a summary of plain numbers and one block of bytes; no pickle."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from kvstore_server.errors import ProtocolError
from kvstore_server.optimizer import KeyState, SliceState
from kvstore_server.plan import Slice, TensorSpec

_DTYPES = ("float32", "float64", "float16", "bfloat16", "int64", "int32", "uint8", "bool")
_MASTER = "master"


def pack_state(state: SliceState) -> tuple[dict[str, Any], bytes]:
    """Return (summary, data): tensors lie in `data` in the order in which the summary names them."""
    tensors, data = _pack_tensors(state.tensors, state.master)
    summary = {
        "steps": list(state.steps),
        "scalars": [{name: _pack_scalar(value) for name, value in row.items()} for row in state.scalars],
        "tensors": tensors,
    }
    return summary, data


def pack_key_state(state: KeyState) -> tuple[dict[str, Any], bytes]:
    """As `pack_state`, of one whole key."""
    shaped = {name: v for name, v in state.values.items() if isinstance(v, Tensor) and v.dim()}
    tensors, data = _pack_tensors(shaped, state.master)
    scalars = {name: _pack_scalar(value) for name, value in state.values.items() if name not in shaped}
    return {"step": state.step, "scalars": scalars, "tensors": tensors}, data


def unpack_state(piece: Slice, summary: Mapping[str, Any], data: bytes) -> SliceState:
    """Rebuild the state of `piece`.

    Raises:
        ProtocolError: summary and data do not describe the state of a slice of this shape.
    """
    try:
        return _unpack(piece, summary, data)
    except (KeyError, TypeError, ValueError, IndexError, RuntimeError) as error:
        raise ProtocolError(f"this is no optimizer state of slice {piece.index}: {error}") from None


def unpack_key_state(spec: TensorSpec, summary: Mapping[str, Any], data: bytes) -> KeyState:
    """Rebuild the state of a whole key.

    Raises:
        ProtocolError: summary and data do not describe the state of a key of this shape.
    """
    try:
        tensors = _unpack_tensors(summary["tensors"], data)
        master = tensors.pop(_MASTER, None)
        if master is not None and tuple(master.shape) != spec.shape:
            raise ValueError(f"its master has the shape {list(master.shape)}, the key has {list(spec.shape)}")
        scalars = {str(name): _unpack_scalar(value) for name, value in summary["scalars"].items()}
        return KeyState({**scalars, **tensors}, int(summary["step"]), master)
    except (KeyError, TypeError, ValueError, IndexError, RuntimeError) as error:
        raise ProtocolError(f"this is no optimizer state of key {spec.key!r}: {error}") from None


def _unpack(piece: Slice, summary: Mapping[str, Any], data: bytes) -> SliceState:
    count = len(piece.segments)
    steps = [int(step) for step in summary["steps"]]
    scalars = [
        {str(name): _unpack_scalar(value) for name, value in row.items()} for row in summary["scalars"]
    ]
    if len(steps) != count or len(scalars) != count:
        raise ValueError(f"it has {len(steps)} segments, the slice has {count}")
    tensors = _unpack_tensors(summary["tensors"], data)
    for name, tensor in tensors.items():
        if tuple(tensor.shape) != (piece.length,):
            raise ValueError(
                f"{name!r} has the shape {list(tensor.shape)}, the slice {piece.length} elements"
            )
    master = tensors.pop(_MASTER, None)
    return SliceState(tensors, scalars, steps, master)


def _pack_tensors(tensors: Mapping[str, Tensor], master: Tensor | None) -> tuple[list[Any], bytes]:
    named = dict(tensors) if master is None else {**tensors, _MASTER: master}
    parts = {name: tensor.detach().cpu().contiguous() for name, tensor in named.items()}
    table = [[name, str(part.dtype).removeprefix("torch."), list(part.shape)] for name, part in parts.items()]
    return table, b"".join(part.reshape(-1).view(torch.uint8).numpy().tobytes() for part in parts.values())


def _unpack_tensors(table: Any, data: bytes) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    at = 0
    for name, dtype, shape in table:
        if dtype not in _DTYPES or not all(type(size) is int and size >= 0 for size in shape):
            raise ValueError(f"{name!r} is {dtype}{shape}")
        kind: torch.dtype = getattr(torch, dtype)
        size = math.prod(shape) * kind.itemsize
        if size > len(data) - at:
            raise ValueError(f"{name!r} needs {size} bytes, {len(data) - at} are left")
        # Copied: the message's memory is not ours, nor aligned.
        flat = (
            torch.frombuffer(bytearray(data[at : at + size]), dtype=kind)
            if size
            else torch.empty(0, dtype=kind)
        )
        tensors[str(name)] = flat.reshape(shape)
        at += size
    if at != len(data):
        raise ValueError(f"it has {len(data)} bytes, its tensors need {at}")
    return tensors


def _pack_scalar(value: Tensor | float) -> list[Any]:
    if isinstance(value, Tensor):
        return [value.item(), str(value.dtype).removeprefix("torch.")]
    return [value, ""]


def _unpack_scalar(value: Any) -> Tensor | float:
    number, dtype = value
    if not isinstance(number, int | float) or (dtype and dtype not in _DTYPES):
        raise ValueError(f"{value!r} is no number")
    return torch.tensor(number, dtype=getattr(torch, dtype)) if dtype else number
