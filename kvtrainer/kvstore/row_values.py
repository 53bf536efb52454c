"""Row-sparse values of the kvstore methods: sparse COO tensors with one sparse dimension, and ids of rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvstore_server.errors import ConfigurationError
from kvstore_server.optimizer import coalesce_rows
from kvstore_server.plan import TensorSpec, row_numel
from kvstore_server.reduction import RowSet, compute_dtype, torch_dtype
from kvtrainer.errors import RowIdError

_NAMED = 8
"""Ids that a message lists."""


def is_sparse(value: Tensor) -> bool:
    """Whether a value has only some of the elements, in whatever layout."""
    return value.layout is not torch.strided


def check_rows(what: str, key: object, value: Tensor) -> None:
    """Raise ConfigurationError unless a sparse tensor has whole rows."""
    if value.layout is not torch.sparse_coo or value.sparse_dim() != 1:
        form = f" with sparse_dim {value.sparse_dim()}" if value.layout is torch.sparse_coo else ""
        raise ConfigurationError(
            f"{what} of key {key!r} is sparse, of shape {list(value.shape)} and layout {value.layout}{form}; it must "
            "be a sparse COO tensor with sparse_dim 1, which has whole rows"
        )


def merge_rows(spec: TensorSpec, replicas: Sequence[Tensor]) -> RowSet:
    """The sum of sparse replicas from left to right, on the CPU; half precision accumulates in float32.

    Raises:
        ShapeMismatchError: a replica has a row that the key does not have.
    """
    parts = [_coalesced(spec, one) for one in replicas]
    if len(parts) == 1:
        return RowSet(parts[0].ids, parts[0].values.to(torch_dtype(spec.dtype)))
    ids, values = torch.cat([part.ids for part in parts]), torch.cat([part.values for part in parts])
    ids, values = coalesce_rows(ids, values, spec.shape[0])
    return RowSet(ids, values.to(torch_dtype(spec.dtype)))


def densified(spec: TensorSpec, value: Tensor) -> Tensor:
    """A value as a dense tensor, on the CPU if it is sparse."""
    return dense_sum(spec, [value]) if is_sparse(value) else value


def dense_sum(spec: TensorSpec, replicas: Sequence[Tensor]) -> Tensor:
    """The sum of sparse replicas as `merge_rows` computes it, dense."""
    ids, values = merge_rows(spec, replicas)
    dense = values.new_zeros(spec.shape[0], row_numel(spec))
    dense[ids] = values
    return dense.view(spec.shape)


def read_ids(key: object, row_ids: Any, num_rows: int) -> Tensor:
    """The distinct ids in ascending order, int64 on the CPU, of any tensor, array or list of whole numbers.

    Raises:
        ConfigurationError: these are no whole numbers.
        RowIdError: the key has no such rows; names them.
    """
    try:
        given = torch.as_tensor(np.asarray(row_ids) if isinstance(row_ids, list | tuple) else row_ids)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigurationError(f"row_ids of key {key!r} must be whole numbers: {error}") from None
    flat = given.detach().reshape(-1).cpu()
    ids: Tensor = torch.unique(flat.to(torch.int64))
    is_whole = not flat.dtype.is_floating_point or bool((flat == flat.to(torch.int64)).all())
    if flat.dtype in (torch.bool, torch.complex64, torch.complex128) or not is_whole:
        raise ConfigurationError(
            f"row_ids of key {key!r} must be whole numbers, got {flat.dtype}{list(given.shape)}: "
            f"{flat[:_NAMED].tolist()}"
        )
    wrong = ids[(ids < 0) | (ids >= num_rows)].tolist()
    if wrong:
        named = ", ".join(map(str, wrong[:_NAMED])) + (", …" if len(wrong) > _NAMED else "")
        raise RowIdError(f"key {key!r} has rows 0 to {num_rows - 1}, but row_ids has {named}")
    return ids


def is_ids(row_ids: Any) -> bool:
    """Whether this is one set of ids, rather than a list of several."""
    if isinstance(row_ids, list | tuple):
        return all(isinstance(one, int | float | np.number) for one in row_ids)
    return True


def as_sparse(spec: TensorSpec, ids: Tensor, rows: Tensor) -> Tensor:
    """Rows as a coalesced sparse tensor of the key's shape."""
    values = rows.view(len(ids), *spec.shape[1:])
    return torch.sparse_coo_tensor(ids[None], values, spec.shape, is_coalesced=True, check_invariants=False)


@torch.no_grad()
def write_rows(out: Tensor, rows: Tensor) -> None:
    """Let `out` have the rows of a sparse tensor and, if it is dense, zeros elsewhere."""
    if is_sparse(out):
        out.copy_(rows)  # not through detach(), which has indices of its own
        return
    ids, values = rows._indices()[0], rows._values()
    out.zero_()
    out[ids.to(out.device)] = values.to(out.device, out.dtype)


def _coalesced(spec: TensorSpec, value: Tensor) -> RowSet:
    value = value.detach()
    ids = value._indices()[0].to("cpu")
    values = value._values().to("cpu", compute_dtype(spec.dtype)).reshape(len(ids), row_numel(spec))
    return RowSet(*coalesce_rows(ids, values, spec.shape[0]))
