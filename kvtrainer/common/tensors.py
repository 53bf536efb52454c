"""Reads row ids, dtypes and layouts of tensors that users pass."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvstore_server.errors import ConfigurationError
from kvstore_server.optimizer.rows import sort_row_ids
from kvtrainer.errors import RowIdError

# The most ids that a message lists.
_NAMED = 8


@functools.cache
def tensor_dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def is_sparse_tensor(value: Tensor) -> bool:
    return value.layout is not torch.strided


def separate_sparse_gradients(parameters: Iterable[Tensor]) -> None:
    """Give each sparse gradient its own values, so that it can be changed in place.

    The gradients of two `torch.nn.Embedding(sparse=True)` whose results were added share them.
    """
    known = set()
    for parameter in parameters:
        if parameter.grad is not None and parameter.grad.is_sparse:
            place = parameter.grad._values().data_ptr()
            if place in known:
                parameter.grad = parameter.grad.clone()
            known.add(place)


def read_id_tensor(key: str, row_ids: Any, num_rows: int) -> Tensor:
    """Return row ids as distinct, ascending int64 on the CPU. Arguments and errors are those of `flatten_id_tensor`."""
    return sort_row_ids(flatten_id_tensor(key, row_ids, num_rows)[0].numpy(), num_rows).ids


def flatten_id_tensor(key: str, row_ids: Any, num_rows: int) -> tuple[Tensor, torch.Size]:
    """Return row ids as flat int64 on the CPU, in their order, and the shape that they were given in.

    Any tensor, array or list of integers is accepted, of floating-point numbers only if they are whole. A hash table
    (`num_rows` is 0) has rows of any id, unsigned ones by their bits, but takes no floating-point number: it may have
    been rounded.

    Args:
        key: Its name, as messages show it.

    Raises:
        ConfigurationError: A value is not an integer.
        RowIdError: The key has no such rows; names them.
    """
    try:
        listed = _as_id_array(row_ids) if isinstance(row_ids, list | tuple | int) else row_ids
        if isinstance(listed, np.ndarray):
            # torch takes neither all kinds of unsigned integers nor, without a warning, read-only arrays.
            listed = np.require(listed, requirements=["C", "W"])
            listed = listed.view(np.int64) if listed.dtype == np.uint64 else listed
        given = torch.as_tensor(listed, device="cpu")
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigurationError(f"row_ids of key {key} must be whole numbers: {error}") from None
    flat = given.detach().reshape(-1)
    is_whole = not flat.dtype.is_floating_point or bool(num_rows and (flat == flat.to(torch.int64)).all())
    is_whole |= not flat.numel()
    if flat.dtype in (torch.bool, torch.complex64, torch.complex128) or not is_whole:
        raise ConfigurationError(
            f"row_ids of key {key} must be whole numbers, got {flat.dtype}{list(given.shape)}: "
            f"{flat[:_NAMED].tolist()}"
        )
    ids = flat.to(torch.int64).numpy()
    # Viewed as unsigned, a negative id is a huge one: a single comparison finds both kinds of errors.
    if num_rows and len(ids) and ids.view(np.uint64).max() >= num_rows:
        wrong = np.unique(ids[(ids < 0) | (ids >= num_rows)]).tolist()
        named = ", ".join(map(str, wrong[:_NAMED])) + (", …" if len(wrong) > _NAMED else "")
        raise RowIdError(f"key {key} has rows 0 to {num_rows - 1}, but row_ids has {named}")
    return torch.from_numpy(ids), given.shape


def _as_id_array(row_ids: Any) -> np.ndarray[Any, Any]:
    """Return an array of integers, as exact as Python has them; NumPy makes floating-point numbers of mixed ones."""
    listed = np.asarray(row_ids)
    if listed.dtype.kind in "fO" and listed.size:
        exact = np.asarray(row_ids, dtype=object)
        flat = exact.reshape(-1).tolist()
        if all([type(one) is int and -(2**63) <= one < 2**64 for one in flat]):
            return np.array([one % 2**64 for one in flat], np.uint64).reshape(exact.shape)
    return listed


def is_one_id_tensor(row_ids: Any) -> bool:
    """Return whether this is one set of ids rather than a list of several."""
    if isinstance(row_ids, list | tuple):
        return all(isinstance(one, int | float | np.number) for one in row_ids)
    return True
