"""The safetensors format, written without a copy of the tensors, with equal bytes for equal contents."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

# The header of a safetensors file is padded to a multiple of this many bytes.
_ALIGNED = 8
# Dtypes that the format supports, and their names in it.
_DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16", torch.uint8: "U8",
    torch.bool: "BOOL", torch.complex64: "C64", torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip


class WritableTensorFile(Protocol):
    def write(self, data: Any, /) -> object: ...


def write_tensors(
    file: WritableTensorFile, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]
) -> None:
    """Write contiguous CPU tensors in the safetensors format, in a fixed order. Raises ValueError for other dtypes."""
    header, names = encode_header(tensors, metadata)
    file.write(header)
    for name in names:
        file.write(tensors[name].view(-1).view(torch.uint8).numpy().data)


def encode_header(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> tuple[bytes, list[str]]:
    """Return what a file begins with, and the order in which the bytes of the tensors follow.

    Only dtypes and shapes count, so tensors may be on the meta device. Raises ValueError for other dtypes.
    """
    # Largest item size first, so that all tensors are aligned; safetensors writes them in the same order.
    names = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    at = 0
    for name in names:
        tensor = tensors[name]
        if tensor.dtype not in _DTYPES:
            raise ValueError(f"{name!r} is {tensor.dtype}, which the safetensors format does not have")
        place = [at, at + tensor.nbytes]
        header[name] = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": place}
        at += tensor.nbytes
    text = json.dumps(header, sort_keys=True, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNED)
    return len(text).to_bytes(8, "little") + text, names
