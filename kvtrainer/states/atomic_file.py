"""Writes files completely or not at all, with equal bytes for equal contents.

A file is written under a temporary name in the same directory, and renamed at the end. Its process holds a lock on it
while it writes, which the system releases when the process dies, on whatever host. So an unlocked temporary file
belongs to a dead process, and the next save in that directory removes it.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import BinaryIO

import torch
from torch import Tensor

_TEMPORARY = re.compile(r"\.states-[0-9a-f]{16}\.tmp")
# The header of a safetensors file is padded to a multiple of this many bytes.
_ALIGNED = 8
# Dtypes that the format supports, and their names in it.
_DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16", torch.uint8: "U8",
    torch.bool: "BOOL", torch.complex64: "C64", torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip


@contextmanager
def replace_atomically(path: str) -> Iterator[BinaryIO]:
    """Yield a new file that atomically replaces the one at `path`. Blocks until it is on the disk."""
    folder = os.path.dirname(path) or "."
    _remove_abandoned(folder)
    temporary, file = _locked_file(folder)
    with file:
        try:
            yield file
            file.flush()
            os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            with suppress(OSError):
                os.unlink(temporary)
            raise
    # The rename is durable only once the directory is on the disk, too.
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_tensors(file: BinaryIO, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write contiguous CPU tensors in the safetensors format, in a fixed order. Raises ValueError for other dtypes."""
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
    file.write(len(text).to_bytes(8, "little") + text)
    for name in names:
        file.write(tensors[name].view(-1).view(torch.uint8).numpy().data)


def _locked_file(folder: str) -> tuple[str, BinaryIO]:
    while True:
        temporary = os.path.join(folder, f".states-{secrets.token_hex(8)}.tmp")
        file = open(temporary, "xb")  # noqa: SIM115  (the caller closes it)
        with suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        if os.path.exists(temporary):
            return temporary, file
        # Another process removed it before it was locked.
        file.close()


def _remove_abandoned(folder: str) -> None:
    with suppress(OSError), os.scandir(folder) as entries:
        names = [entry.path for entry in entries if _TEMPORARY.fullmatch(entry.name)]
        for name in names:
            # OSError: it is in use, already gone, or must not be removed. None of these prevents saving.
            with suppress(OSError), open(name, "rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.unlink(name)
