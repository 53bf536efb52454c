"""Apply optimizer updates to ranges of elements, to some rows of a key, and to whole keys.

A range is contiguous flat memory that is updated with the same options and begins and ends on a 64-byte boundary.
`apply_update` is the one place where an optimizer is called. It prepares what the optimizer's class needs (float32
weights for half-precision ones, clipping, scaling, trees in the state), calls `Optimizer.update`, and checks what an
unknown optimizer left in the state.

Results are bitwise independent of how keys are sharded. Vectorized kernels may round the elements of their remainder
loop differently from those of the main loop, so ranges have whole 64-byte lines, and gathered rows are copied to
scratch memory that is padded with zeros. That is enough for optimizers that are `verified`: tests show it. All others,
such as those of users, get blocks that torch does not split between threads (`_apply_update_in_blocks`).

Callers have turned autograd off.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeGuard

import torch
from torch import Tensor

from kvstore_server.errors import OptimizerError
from kvstore_server.optimizer.base import Hyper, Optimizer, StateValue, Values
from kvstore_server.optimizer.rows import (
    CACHED,
    GradFragments,
    Gradient,
    append_zeros,
    bound_of,
    gather_rows,
    joined,
    put_rows,
)
from kvstore_server.optimizer.state import RESERVED, State, own_state_value
from kvstore_server.optimizer.torch_family import TorchOptimizer
from kvstore_server.optimizer.trees import (
    flatten_trees,
    is_composed_tensor,
    is_plain_tree_leaf,
    unflatten_trees,
)
from kvstore_server.plan import ALIGNMENT

EntryAllocator = Callable[[str, Tensor], Tensor]
"""(name, a tensor of the dtype) → a new entry of the state: flat zeros for all elements of a key."""

_HALF = (torch.float16, torch.bfloat16)
_BLOCK = 32768
"""Up to this many elements (torch's grain size) an elementwise operation runs on one thread. Longer ones are split
anywhere, and operations such as pow or sigmoid round the end of a share differently.
"""
_VECTORS = 64
"""torch's vector loops cover multiples of this without a remainder, which would be rounded differently."""


def is_half(weight: Tensor) -> bool:
    return weight.dtype in _HALF


def refresh_master(master: Tensor, weight: Tensor) -> Tensor:
    """Return the float32 master weights, updated where the half-precision weight is not the rounded master any more.

    Such weights were replaced by something else than an update.
    """
    replaced = master.to(weight.dtype) != weight
    if replaced.any():
        master.copy_(torch.where(replaced, weight.to(master.dtype), master))
    return master


def apply_update(
    optimizer: Optimizer,
    weight: Tensor,
    grad: Gradient,
    state: State,
    hyper: Hyper,
    padding: Callable[[], Iterable[slice]] = tuple,
    scale: float = 1.0,
) -> None:
    """Apply one update to a range of elements, or to a whole key (if the optimizer needs that, or the gradient is
    sparse).

    Args:
        weight: Updated in place. For an elementwise optimizer: flat, in whole lines, with zero padding that stays
            zero. A key has its own shape, is contiguous, and was accepted by `optimizer.check_key`.
        grad: Of the same shape, with zero padding; float64 for float64 weights, otherwise float32. May be
            overwritten, unless the optimizer `takes_pieces` and nothing is clipped. May be a coalesced sparse tensor
            with one sparse dimension if `optimizer.takes_sparse(hyper)`, and `GradFragments` if it `takes_pieces`.
        state: Of these elements or this key, updated in place: plain values, and tensors with one number per element,
            or of any shape for a key. Trees are stored as by `flatten_trees`.
        hyper: The options with multipliers applied; no tensors. Optimizers of whole keys also find the key's name as
            'key', those that are `positioned` 'key' and 'first', the position of the first element in the key.
        padding: Returns the parts of `weight` that are padding.
        scale: The factor of the gradient that is still to be applied; 1 for a sparse one.

    Raises:
        OptimizerError: The optimizer put something else than such tensors and plain values into the state.
        Exception: Whatever a user-defined optimizer raises; weights and state are then half updated.
    """
    if weight.numel():  # torch's matrix classes fail on empty keys
        # 1. Prepare weights, step number and clipping.
        is_sparse = isinstance(grad, Tensor) and grad.is_sparse
        target, is_flat = weight, optimizer.elementwise and not is_sparse
        if weight.dtype in _HALF:
            target = _wide_weights(optimizer, weight, state)
        step_hyper = {**hyper, "step": optimizer.begin_num_update + state.step + 1}
        bound = None
        if hyper.get("clip_gradient") is not None:
            # `clips` means that the gradient is clipped before `update`. Others clip there, by the option.
            clip_value = step_hyper["clip_gradient"] = bound_of(hyper["clip_gradient"], target)
            bound = clip_value if optimizer.clips else None
        if (
            bound is not None
            and optimizer.mxnet1_clips_decay
            and optimizer.is_mxnet1
            and hyper["weight_decay"]
        ):
            grad, scale = joined(grad, scale).add_(target, alpha=hyper["weight_decay"]), 1.0
            step_hyper["weight_decay"] = 0.0
        is_ready = scale == 1.0 and bound is None
        # 2. Update: in one call if the optimizer cuts blocks itself (it takes the gradient in fragments), or reads
        # everything only once (by a one-pass kernel, from a gradient that is ready). Else in blocks if on the CPU.
        is_flat_on_cpu = is_flat and weight.device.type == "cpu"
        update_grad: Any = grad
        if is_flat_on_cpu and not (optimizer.takes_pieces or (optimizer.one_pass and is_ready)):
            _apply_update_in_blocks(optimizer, target, update_grad, state, step_hyper, scale, bound)
        else:
            if is_flat_on_cpu and optimizer.takes_pieces:
                tensors, cuts = (
                    (grad.tensors, grad.cuts) if isinstance(grad, GradFragments) else ([grad], None)
                )
                update_grad = GradFragments(tensors, scale, bound, cuts)
            else:
                update_grad = update_grad if scale == 1.0 else update_grad * scale
                if bound is not None:
                    (update_grad.values() if is_sparse else update_grad).clamp_(-bound, bound)
            values = optimizer.create_state(target) if state.is_new else state.values
            if not optimizer.verified:
                values = unflatten_trees(values)
            optimizer.update(target, update_grad, values, step_hyper)
            if not optimizer.verified:
                shape, values = target.shape if is_flat else None, flatten_trees(values)
                values = {
                    n: _checked_entry(optimizer, n, v, (target, update_grad), shape)
                    for n, v in values.items()
                }
            state.values = values
        # 3. Clear the padding, which an unverified optimizer, or 0 / 0 if eps is 0, may have changed.
        if is_flat and (not optimizer.verified or hyper.get("eps") == 0):
            for part in padding():
                target[part].zero_()
        if target is not weight:
            weight.copy_(target)
    state.step += 1


def _wide_weights(optimizer: Optimizer, weight: Tensor, state: State) -> Tensor:
    if not optimizer.multi_precision:
        optimizer.warn_of_low_precision(weight.dtype)
        return weight.float()
    state.master = weight.float() if state.master is None else refresh_master(state.master, weight)
    return state.master


def _apply_update_in_blocks(
    optimizer: Optimizer,
    weight: Tensor,
    grad: Tensor,
    state: State,
    step_hyper: dict[str, Any],
    scale: float,
    bound: float | None,
) -> None:
    """Update a range in blocks that stay in the cache, or that have the same bits wherever a vector is cut."""
    # Bits of an unverified optimizer could depend on where a vector ends, so it gets blocks without a remainder that
    # torch does not split between threads, padded with zeros.
    length = CACHED if optimizer.verified else _BLOCK
    former = state.values
    result: Values = {}
    for offset in range(0, weight.numel(), length):
        # 1. Cut the block out of weights, gradient and state.
        part = slice(offset, offset + length)
        count = weight[part].numel()
        spare = 0 if optimizer.verified else -count % _VECTORS
        padded, padded_grad = append_zeros(weight[part], spare), append_zeros(grad[part], spare)
        padded_grad = padded_grad if scale == 1.0 else padded_grad * scale
        if bound is not None:
            padded_grad = padded_grad.clamp(-bound, bound)
        if not state.is_new:
            values = {
                n: append_zeros(v[part], spare) if _is_array(v) else own_state_value(v)
                for n, v in former.items()
            }
        else:
            values = optimizer.create_state(padded)
        block_hyper = step_hyper
        if optimizer.positioned:
            block_hyper = {**step_hyper, "first": step_hyper["first"] + offset}
        if not optimizer.verified:
            values = unflatten_trees(values)
        # 2. Update it.
        optimizer.update(padded, padded_grad, values, block_hyper)
        if not optimizer.verified:
            values = flatten_trees(values)
        # 3. Copy back what is not a view: padded weights, and entries of the state.
        if spare:
            weight[part].copy_(padded[:count])
        for name, value in values.items():
            entry = value if optimizer.verified else _checked_entry(optimizer, name, value, (), padded.shape)
            if _is_array(entry):
                whole = result.get(name, former.get(name))
                if not isinstance(whole, Tensor):
                    whole = entry.new_zeros(weight.numel())
                if whole[part].data_ptr() != entry.data_ptr():
                    whole[part].copy_(entry[:count])
                entry = whole
            result[name] = entry
    state.values = result


def _checked_entry(
    optimizer: Optimizer, name: str, value: object, arguments: Sequence[Tensor], shape: torch.Size | None
) -> StateValue:
    """Return what an optimizer has put into its state, copied if it shares memory with an argument of `update`.

    Raises OptimizerError if it cannot be an entry.
    """
    fits = is_plain_tree_leaf(value)
    got = type(value).__name__
    if isinstance(value, Tensor) and is_composed_tensor(value):
        raise OptimizerError(
            f"optimizer {optimizer.registered_name} put a tensor of class {got} into its state as {name!r}, which "
            "consists of several tensors and cannot be kept in a store; give the Trainer update_on_kvstore=False"
        )
    if isinstance(value, Tensor):
        fits = not value.is_sparse and (not value.dim() or shape in (None, value.shape))
        got = "sparse tensor" if value.is_sparse else f"tensor of shape {tuple(value.shape)}"
    if not fits or name in RESERVED:
        wanted = (
            "dense tensor" if shape is None else f"tensor of the weights' shape {tuple(shape)}, a 0-d one"
        )
        raise OptimizerError(
            f"optimizer {optimizer.registered_name} put a {got} into its state as {name!r}; an entry is a {wanted}, "
            "a number, a text, bytes, None, or a dict, list or tuple of these, and not called "
            f"{' or '.join(RESERVED)}"
        )
    if isinstance(value, Tensor):
        dense = [other.values() if other.is_sparse else other for other in arguments]
        memory = {other.untyped_storage().data_ptr() for other in dense}
        return value.clone() if value.untyped_storage().data_ptr() in memory else value
    return value


def apply_update_to_rows(
    optimizer: Optimizer,
    weight: Tensor,
    rows: Tensor,
    grad_rows: Tensor,
    state: State,
    hyper: Hyper,
    allocate: EntryAllocator,
) -> None:
    """Update a key, or a block of its rows, once. The gradient is zero outside `rows`.

    The optimizer decides how: torch's sparse-capable classes get a sparse tensor; a lazy update runs only on the rows
    present; other optimizers of whole keys get a dense gradient.

    Args:
        weight: Of at least one dimension, contiguous, updated in place.
        rows: Distinct, ascending ids, int64, as from `coalesce_rows`. No rows still count as an update.
        grad_rows: One row for each id, rescaled; float64 for float64 weights, otherwise float32. May be overwritten.
        state: Of this key, updated in place; entries with a number per element have the shape of the key.
        hyper: As for `apply_update`.
        allocate: Makes the entries that a lazy update adds.

    Raises:
        OptimizerError, Exception: Like `apply_update`.
    """
    grad_rows = grad_rows.reshape(len(rows), *weight.shape[1:])
    if optimizer.takes_sparse(hyper):
        apply_update(optimizer, weight, _sparse_tensor(rows, grad_rows, weight.shape), state, hyper)
    elif needs_row_sparse(optimizer, hyper):
        _update_rows_lazily(optimizer, weight, rows, grad_rows, state, hyper, allocate)
    else:
        dense = grad_rows.new_zeros(weight.shape)
        dense[rows] = grad_rows
        apply_update(optimizer, weight, dense, state, hyper)


def _only_adds(optimizer: Optimizer, hyper: Hyper) -> bool:
    """Return whether an update is `w -= lr * grad`."""
    is_plain = not hyper.get("momentum") and not hyper["weight_decay"] and hyper.get("clip_gradient") is None
    return optimizer._is_sgd and optimizer.verified and is_plain


def _sparse_tensor(rows: Tensor, values: Tensor, shape: tuple[int, ...]) -> Tensor:
    if 1 in values.shape:
        # A dimension of size 1 may have any stride, as in an expanded gradient, for which torch's addition of sparse
        # tensors gives wrong results.
        values = torch.empty(values.shape, dtype=values.dtype, device=values.device).copy_(values)
    return torch.sparse_coo_tensor(
        rows[None], values, shape, is_coalesced=True, check_invariants=False, device=values.device
    )


def needs_row_sparse(optimizer: Optimizer, hyper: Hyper) -> bool:
    """Return whether a row-sparse gradient must stay one: with zeros in all other rows the result would differ."""
    # Gathered rows are not adjacent, so a positioned optimizer could not know their positions: it gets zeros, too.
    return optimizer.takes_sparse(hyper) or (optimizer.updates_rows(hyper) and not optimizer.positioned)


def leaves_other_rows(optimizer: Optimizer, hyper: Hyper) -> bool:
    """Return whether `apply_update_to_rows` is known to leave the weights of all other rows unchanged."""
    if optimizer.takes_sparse(hyper):
        # The momentum of torch's SGD moves all rows that ever had a gradient.
        return isinstance(optimizer, TorchOptimizer) and not hyper.get("momentum")
    return needs_row_sparse(optimizer, hyper)


def _update_rows_lazily(
    optimizer: Optimizer,
    weight: Tensor,
    rows: Tensor,
    grad_rows: Tensor,
    state: State,
    hyper: Hyper,
    allocate: EntryAllocator,
) -> None:
    """Update the rows present as if they were a whole key."""
    # The state is made of the whole key. Then there are values before the first step, so `apply_update` makes none.
    if not state.step:
        wide = weight.float() if is_half(weight) else weight
        if optimizer.multi_precision and wide is not weight and state.master is None:
            state.master = wide
        state.values.update(create_row_state(optimizer, wide))
    update_rows_with_state(optimizer, weight, rows, grad_rows, state, hyper, allocate)


def create_row_state(optimizer: Optimizer, weight: Tensor) -> Values:
    """Return the state of rows before their first update: numbers, and tensors with as many rows as `weight`."""
    values = optimizer.create_state(weight.reshape(-1) if optimizer.elementwise else weight)
    found: Values = {}
    for name, value in flatten_trees(values).items():
        entry = _checked_entry(optimizer, name, value, (weight,), None)
        is_flat = optimizer.elementwise and _is_array(entry)
        found[name] = torch.as_tensor(entry, device=weight.device).view(weight.shape) if is_flat else entry
    return found


def update_rows_with_state(
    optimizer: Optimizer,
    weight: Tensor,
    rows: Tensor,
    grad_rows: Tensor,
    state: State,
    hyper: Hyper,
    allocate: EntryAllocator,
) -> None:
    """Update rows that have a state already, which counts as one update; see `apply_update_to_rows`.

    Args:
        rows: Distinct, in any order.
    """
    count = rows.numel()
    if count and weight.is_cpu and not is_half(weight) and _only_adds(optimizer, hyper):
        # The same bits as below, without gathering and scattering. As a matrix: with one number in a row torch rounds
        # the product first.
        grad = _sparse_tensor(
            rows, grad_rows.reshape(count, -1), (weight.shape[0], grad_rows.numel() // count)
        )
        weight.view(grad.shape).add_(grad, alpha=-hyper["lr"])
    elif count:
        hyper = optimizer.hyper_for_rows(weight if state.master is None else state.master, grad_rows, hyper)
        at_once = count
        if optimizer.verified:  # in blocks that stay in the cache
            at_once = max(CACHED // max(weight.numel() // weight.shape[0], 1), 1)
        for first in range(0, count, at_once):
            own, grad = rows, grad_rows
            if count > at_once:
                part = slice(first, first + at_once)
                own, grad = rows[part], grad_rows[part]
            _update_block_of_rows(optimizer, weight, own, grad, state, hyper, allocate)
    state.step += 1


def _update_block_of_rows(
    optimizer: Optimizer,
    weight: Tensor,
    rows: Tensor,
    grad_rows: Tensor,
    state: State,
    hyper: Hyper,
    allocate: EntryAllocator,
) -> None:
    """Gather some rows, update them and scatter them back, without counting the update."""
    kept, master = state.values, state.master
    count, line = grad_rows.numel(), ALIGNMENT // weight.element_size()
    length = -(-count // line) * line if optimizer.elementwise else 0
    grad = append_zeros(grad_rows.reshape(-1), length - count) if length else grad_rows
    piece = gather_rows(weight, rows, length)
    values = {name: gather_rows(v, rows, length) if _is_array(v) else v for name, v in kept.items()}
    part = State(values, state.step, None if master is None else gather_rows(master, rows, length))
    apply_update(optimizer, piece, grad, part, hyper, lambda: [slice(count, None)])
    for name, value in part.values.items():
        if not _is_array(value):
            continue
        entry = kept.get(name, 0)
        if not _is_array(entry):
            entry = _new_entry(optimizer, name, value, weight, rows.numel(), allocate)
        put_rows(entry, rows, value)
        part.values[name] = entry
    put_rows(weight, rows, piece)
    if master is not None and part.master is not None:
        put_rows(master, rows, part.master)
    state.values = part.values


def _is_array(value: object) -> TypeGuard[Tensor]:
    """Return whether an entry of the state has numbers for elements or rows; 0-d tensors are single numbers."""
    return isinstance(value, Tensor) and value.dim() > 0


def _new_entry(
    optimizer: Optimizer, name: str, value: Tensor, weight: Tensor, count: int, allocate: EntryAllocator
) -> Tensor:
    if optimizer.elementwise:
        return allocate(name, value).view(weight.shape)
    if len(value) != count:
        raise OptimizerError(
            f"optimizer {optimizer.registered_name} put a tensor of shape {tuple(value.shape)} into its state as "
            f"{name!r} in an update of {count} rows; an entry of a lazy update is a number or has one row for each"
        )
    return value.new_zeros(weight.shape[0], *value.shape[1:])
