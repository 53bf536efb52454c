"""The update of a key by a row-sparse gradient: the rows it has, and nothing for the others.

Three ways, chosen by the optimizer: torch's sparse-capable classes get a sparse tensor; a lazy update runs on the
rows that are present alone; for all other optimizers the gradient counts as a dense one that is zero elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from kvstore_server.errors import OptimizerError, ShapeMismatchError
from kvstore_server.optimizer.base import Optimizer, StateValue
from kvstore_server.optimizer.half import is_half
from kvstore_server.optimizer.torch_family import TorchOptimizer
from kvstore_server.optimizer.whole import KeyState, own_values, update_key


def coalesce_rows(ids: Tensor, values: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    """Return the distinct ids in ascending order, and for each the sum of its values in the order given.

    torch's own coalesce adds the values of one id in an order that it does not promise. Ids that are distinct
    and ascending already are returned as they are, not copied.

    Args:
        ids: int64, one dimension, each from 0 up to `num_rows`.
        values: one row for each id; half precision should have been converted, for it is summed as it is.

    Raises:
        ShapeMismatchError: the numbers of ids and of rows differ, or an id is outside the key.
    """
    if ids.dim() != 1 or values.dim() < 1 or len(ids) != len(values):
        raise ShapeMismatchError(
            f"a row-sparse gradient needs one row of values for each id, got ids of shape {tuple(ids.shape)} and "
            f"values of shape {tuple(values.shape)}"
        )
    if not len(ids):
        return ids, values
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= num_rows:
        wrong = low if low < 0 else high
        raise ShapeMismatchError(f"a row-sparse gradient has row {wrong}, but its key has {num_rows} rows")
    if bool((ids[1:] > ids[:-1]).all()):
        return ids, values
    distinct, place = torch.unique(ids, return_inverse=True)
    return distinct, values.new_zeros(len(distinct), *values.shape[1:]).index_add_(0, place, values)


@torch.no_grad()
def update_rows(
    optimizer: Optimizer,
    weight: Tensor,
    rows: Tensor,
    grad_rows: Tensor,
    state: KeyState,
    hyper: Mapping[str, Any],
) -> None:
    """Apply one update to a key whose gradient is zero outside `rows`.

    Args:
        weight: the key, of at least one dimension, contiguous, updated in place.
        rows: distinct, ascending ids of rows, int64; as `coalesce_rows` returns them. None at all still count
            as an update.
        grad_rows: one row for each id, of any shape with the elements of a row; float64 for float64 weights, else
            float32; rescaled. It may be overwritten.
        state: of this key, updated in place; also what `update_key` uses, so the two may alternate.
        hyper: as for `update_key`.

    Raises:
        ConfigurationError, OptimizerError, Exception: as `update_key` does.
    """
    grad_rows = grad_rows.reshape(len(rows), *weight.shape[1:])
    if 1 in grad_rows.shape:
        # A dimension of size 1 may have any stride, as in an expanded gradient, and torch's addition of sparse tensors
        # goes wrong with those.
        grad_rows = torch.empty(grad_rows.shape, dtype=grad_rows.dtype, device=grad_rows.device).copy_(
            grad_rows
        )
    if optimizer.takes_sparse(hyper):
        sparse = torch.sparse_coo_tensor(
            rows[None], grad_rows, weight.shape, is_coalesced=True, check_invariants=False
        )
        update_key(optimizer, weight, sparse, state, hyper)
    elif optimizer.updates_rows(hyper) and not optimizer.positioned:
        _update_lazily(optimizer, weight, rows, grad_rows, state, hyper)
    else:
        dense = grad_rows.new_zeros(weight.shape)
        dense[rows] = grad_rows
        update_key(optimizer, weight, dense, state, hyper)


def moves_only_rows(optimizer: Optimizer, hyper: Mapping[str, Any]) -> bool:
    """Whether `update_rows` is sure to leave the weights of all other rows as they are."""
    if optimizer.takes_sparse(hyper):
        # The momentum of torch's SGD moves all rows that ever had a gradient.
        return isinstance(optimizer, TorchOptimizer) and not hyper.get("momentum")
    return optimizer.updates_rows(hyper) and not optimizer.positioned


def _update_lazily(
    optimizer: Optimizer,
    weight: Tensor,
    rows: Tensor,
    grad_rows: Tensor,
    state: KeyState,
    hyper: Mapping[str, Any],
) -> None:
    """Gather the rows of the weights and of the state, update them as a key of their own, and put them back."""
    optimizer.check_key(str(hyper.get("key", "")), weight.shape, hyper)
    if not state.step:
        _begin(optimizer, weight, state)
    kept = {name: _by_row(value, weight) for name, value in state.values.items()}
    part = KeyState(
        {name: value[rows] if _has_rows(value) else value for name, value in kept.items()},
        state.step,
        None if state.master is None else state.master[rows],
    )
    piece = weight[rows]
    if len(rows):
        live = optimizer.hyper_for_rows(weight if state.master is None else state.master, grad_rows, hyper)
        update_key(optimizer, piece, grad_rows, part, live)
    else:
        part.step += 1
    weight[rows] = piece
    if state.master is not None and part.master is not None:
        state.master[rows] = part.master
    state.values = {
        name: _put_back(optimizer, name, kept.get(name), value, rows, weight)
        for name, value in part.values.items()
    }
    state.step = part.step


def _begin(optimizer: Optimizer, weight: Tensor, state: KeyState) -> None:
    """Make the state before the first update, of all rows."""
    whole = weight.float() if is_half(weight) else weight
    if optimizer.multi_precision and whole is not weight and state.master is None:
        state.master = whole
    values = optimizer.create_state(whole.reshape(-1) if optimizer.elementwise else whole)
    state.values = own_values(optimizer, values, (whole,))


def _has_rows(value: StateValue | None) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0


def _by_row(value: StateValue, weight: Tensor) -> Any:
    """An entry of state with the rows of the key as its first dimension."""
    if isinstance(value, Tensor) and value.numel() == weight.numel() and value.dim() == 1:
        return value.view(weight.shape)
    return value


def _put_back(
    optimizer: Optimizer, name: str, kept: Any, value: StateValue, rows: Tensor, weight: Tensor
) -> StateValue:
    """Put the rows of an entry back; a new entry is zero in the rows that were not updated."""
    if not isinstance(value, Tensor) or not value.dim():
        return value
    if len(value) != len(rows):
        raise OptimizerError(
            f"optimizer {optimizer.registered_name} put a tensor of shape {tuple(value.shape)} into its state as "
            f"{name!r} in an update of {len(rows)} rows; an entry of a lazy update is a number or has one row for each"
        )
    if not _has_rows(kept):
        kept = value.new_zeros(weight.shape[0], *value.shape[1:])
    kept[rows] = value
    result: Tensor = kept
    return result
