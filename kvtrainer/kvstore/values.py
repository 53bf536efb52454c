"""Keys and values of the kvstore methods, brought into one form: pairs of (key, list of replicas)."""

from __future__ import annotations

import functools
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from kvstore_server.errors import ConfigurationError, ShapeMismatchError
from kvstore_server.plan import ITEM_SIZE, TensorSpec
from kvstore_server.reduction import compute_dtype
from kvtrainer.kvstore.base import Key
from kvtrainer.kvstore.row_values import check_rows, is_sparse

_INT_LIMIT = 1 << 63


def pair(key: Any, value: Any, what: str) -> list[tuple[Key, list[Tensor]]]:
    """Bring (key, value) or (keys, values) into a list of pairs; a key may appear more than once.

    Raises:
        ConfigurationError: keys of an unexpected or mixed type, or lists of different lengths.
    """
    if not isinstance(key, list | tuple):
        return [(check_key(key), _replicas(key, value, what))]
    keys = [check_key(one) for one in key]
    if len({type(one) for one in keys}) > 1:
        raise ConfigurationError(f"the keys of one call must all be int or all be str, got {keys!r}")
    if not isinstance(value, list | tuple) or len(value) != len(keys):
        got = f"{len(value)} values" if isinstance(value, list | tuple) else f"{type(value).__name__}"
        raise ConfigurationError(f"{len(keys)} keys need a list of {len(keys)} values in {what}, got {got}")
    return [(one, _replicas(one, item, what)) for one, item in zip(keys, value, strict=True)]


def check_key(key: Any) -> Key:
    """Return the key if it is an int of 64 bits or a str, the two types that a key can have."""
    if isinstance(key, bool) or not isinstance(key, int | str):
        raise ConfigurationError(f"a key must be an int or a str, got {key!r} of type {type(key).__name__}")
    if isinstance(key, str):
        check_text("key", key)
    elif not -_INT_LIMIT <= key < _INT_LIMIT:
        raise ConfigurationError(
            f"a key that is an int has up to 64 bits, got one of {key.bit_length()} bits"
        )
    return key


def check_text(what: str, text: str) -> None:
    """Raise ConfigurationError unless this key or name can be sent: it must be text that UTF-8 can express."""
    if text.isascii():
        return
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ConfigurationError(
            f"{what} {text!a:.80} has the surrogate {text[error.start]!a} at position {error.start}, which is no "
            "character; decode the bytes that it came from with their true encoding"
        ) from None


@functools.cache
def dtype_name(dtype: torch.dtype) -> str:
    """torch.float32 → "float32"."""
    return str(dtype).removeprefix("torch.")


def spec_of(key: Key, value: Tensor, others: Collection[str] = ()) -> TensorSpec:
    """The spec under which a key of this first value is stored, in a store that takes `others` beside ITEM_SIZE.

    Raises:
        ConfigurationError: the dtype cannot be stored.
    """
    name = dtype_name(value.dtype)
    if name not in ITEM_SIZE and name not in others:
        named = ", ".join((*ITEM_SIZE, *others))
        raise ConfigurationError(f"key {key!r} has dtype {name}; this store holds {named} only")
    return TensorSpec(str(key), tuple(value.shape), name)


def check_fits(spec: TensorSpec, value: Tensor, any_dtype: bool = False) -> None:
    """Raise ShapeMismatchError unless a value has the shape (and dtype) of its key."""
    same_dtype = any_dtype or dtype_name(value.dtype) == spec.dtype
    if tuple(value.shape) != spec.shape or not same_dtype:
        raise ShapeMismatchError(
            f"key {spec.key!r} holds {spec.dtype}{list(spec.shape)}, got {dtype_name(value.dtype)}{list(value.shape)}"
        )


def check_out(spec: TensorSpec, out: Tensor) -> None:
    """Raise ShapeMismatchError unless a key's values can be written to `out`; any dtype that torch converts will do."""
    check_fits(spec, out, any_dtype=True)
    if is_sparse(out):
        raise ConfigurationError(
            f"out of key {spec.key!r} is sparse, but all of the key is written to it; give a dense tensor, or call "
            "row_sparse_pull for some rows"
        )
    if any(stride == 0 and size > 1 for stride, size in zip(out.stride(), out.shape, strict=True)):
        raise ShapeMismatchError(
            f"out of key {spec.key!r} has shape {list(out.shape)} but strides {list(out.stride())}: several of its "
            "elements are one place in memory, as after expand(); give a tensor of its own, as clone() returns"
        )


def merge(replicas: Sequence[Tensor]) -> tuple[Tensor, bool]:
    """Sum replicas from left to right on the CPU; half precision accumulates in float32.

    Returns the flat sum, and whether it is a tensor of its own rather than the caller's memory.
    """
    first = replicas[0].detach()
    if len(replicas) == 1:
        flat = first.to("cpu").contiguous().view(-1)
        return flat, flat.untyped_storage().data_ptr() != first.untyped_storage().data_ptr()
    compute = compute_dtype(dtype_name(first.dtype))
    total = first.to("cpu", compute, copy=True, memory_format=torch.contiguous_format)
    for other in replicas[1:]:
        total += other.detach().to("cpu", compute)
    return total.to(first.dtype).view(-1), True


def _replicas(key: Key, value: Any, what: str) -> list[Tensor]:
    if isinstance(value, Tensor) and value.layout == torch.strided and not value.is_meta:
        return [value]  # what it nearly always is
    tensors = list(value) if isinstance(value, list | tuple) else [value]
    if not tensors or not all(isinstance(one, Tensor) for one in tensors):
        raise ConfigurationError(
            f"{what} of key {key!r} must be a tensor or a list of tensors, got {value!r:.80}"
        )
    for one in tensors:
        if is_sparse(one):
            check_rows(what, key, one)
    if any(one.is_meta for one in tensors):
        raise ConfigurationError(
            f"{what} of key {key!r} is on the meta device and has no values; make it on a real device first"
        )
    return tensors
