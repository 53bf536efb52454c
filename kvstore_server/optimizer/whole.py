"""The optimizer state of one whole key, and the update of one whole key.

An optimizer with `elementwise = False` needs more of a key than one element: its norm, the mean of a row, a
product of matrices. It is given the key in its own shape, and the key lies whole on one server, so the result
does not depend on the number of servers. An elementwise optimizer is run here as on a slice that holds the key
alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kvstore_server.errors import OptimizerError, ShapeMismatchError
from kvstore_server.optimizer.base import Optimizer, StateValue
from kvstore_server.optimizer.half import follow, is_half
from kvstore_server.optimizer.slice_state import RESERVED, SliceState, cloned
from kvstore_server.optimizer.slices import update_slice
from kvstore_server.plan import ALIGNMENT, Segment, Slice


@dataclass
class KeyState:
    """Optimizer state of one whole key; a new one is the state before the first update."""

    values: dict[str, StateValue] = field(default_factory=dict)
    """What the optimizer keeps, under its own names: tensors of any shape and numbers."""
    step: int = 0
    """The number of updates applied."""
    master: Tensor | None = None
    """float32 weights of a half-precision key (multi_precision); they follow weights that are replaced."""

    def copy(self) -> KeyState:
        """A deep copy, to roll back to."""
        master = None if self.master is None else self.master.clone()
        return KeyState(cloned(self.values), self.step, master)

    def state_of(self) -> dict[str, StateValue]:
        """Copy the state out: 'step', the optimizer's entries and, if kept, 'master'."""
        state: dict[str, StateValue] = {"step": float(self.step), **cloned(self.values)}
        if self.master is not None:
            state["master"] = self.master.clone()
        return state

    def set_state(self, values: Mapping[str, StateValue], shape: Sequence[int]) -> None:
        """Replace the state by what `state_of` returned, here or elsewhere; `shape` is the key's.

        Tensors belong on the device of the weights. Without 'step' the key counts as never updated.

        Raises:
            ShapeMismatchError: 'master' has another number of elements than the key; nothing has changed.
        """
        entries = cloned(values)
        master = entries.pop("master", None)
        if master is not None:
            master = torch.as_tensor(master)
            if master.numel() != torch.Size(shape).numel():
                raise ShapeMismatchError(
                    f"state 'master' has {master.numel()} elements, but its key has the shape {tuple(shape)}; "
                    "load the state of the same model"
                )
            master = master.reshape(tuple(shape))
        self.step = int(entries.pop("step", 0))
        self.values, self.master = entries, master


@torch.no_grad()
def update_key(
    optimizer: Optimizer, weight: Tensor, grad: Tensor, state: KeyState, hyper: Mapping[str, Any]
) -> None:
    """Apply one update to a whole key.

    Args:
        weight: the key in its own shape, contiguous, updated in place.
        grad: of the same shape, float64 for float64 weights, else float32; rescaled. It may be overwritten.
            Where `optimizer.takes_sparse(hyper)`, it may be a coalesced sparse tensor with one sparse dimension.
        state: of this key, updated in place.
        hyper: the optimizer's numbers with multipliers applied, and 'key', the name of the key.

    Raises:
        ConfigurationError: the optimizer cannot update a key of this shape with these numbers; nothing changed.
        OptimizerError: the optimizer put something else than tensors and numbers into the state.
        Exception: whatever a user-defined optimizer raises; weight and state are then half updated.
    """
    optimizer.check_key(str(hyper.get("key", "")), weight.shape, hyper)
    if not weight.numel():
        state.step += 1  # there is nothing to update, and torch's matrix classes fail on that
        return
    if optimizer.elementwise and not grad.is_sparse:
        _update_alone(optimizer, weight, grad, state, hyper)
        return
    target = weight
    if is_half(weight):
        target = _computed_in(optimizer, weight, state)
    bound = hyper.get("clip_gradient")
    if bound is not None and optimizer.clips:
        (grad.values() if grad.is_sparse else grad).clamp_(-bound, bound)
    values = dict(state.values) if state.step else optimizer.create_state(target)
    live = {**hyper, "step": optimizer.begin_num_update + state.step + 1}
    optimizer.update(target, grad, values, live)
    state.values = own_values(optimizer, values, (target, grad))
    state.step += 1
    if target is not weight:
        weight.copy_(target)


def own_values(
    optimizer: Optimizer, values: Mapping[str, object], lent: Sequence[Tensor]
) -> dict[str, StateValue]:
    """Check the state that an optimizer made; copy what lies in the memory of a tensor that it was lent.

    Raises:
        OptimizerError: an entry is no tensor and no number, or has a reserved name.
    """
    return {name: _entry(optimizer, name, value, lent) for name, value in values.items()}


def _computed_in(optimizer: Optimizer, weight: Tensor, state: KeyState) -> Tensor:
    """The float32 weights to update in place of half-precision ones."""
    if not optimizer.multi_precision:
        optimizer.warn_of_low_precision(weight.dtype)
        return weight.float()
    if state.master is None:
        state.master = weight.float()
    return follow(state.master, weight)


def _entry(optimizer: Optimizer, name: str, value: object, lent: Sequence[Tensor]) -> StateValue:
    kind = "sparse tensor" if isinstance(value, Tensor) and value.is_sparse else type(value).__name__
    if name in RESERVED or not isinstance(value, Tensor | int | float) or kind == "sparse tensor":
        raise OptimizerError(
            f"optimizer {optimizer.registered_name} put a {kind} into its state as {name!r}; "
            f"an entry is a dense tensor or a number, and not called {' or '.join(RESERVED)}"
        )
    if isinstance(value, Tensor) and any(_shares_memory(value, other) for other in lent):
        return value.clone()
    return value


def _shares_memory(a: Tensor, b: Tensor) -> bool:
    if b.is_sparse:
        return _shares_memory(a, b.values())
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


def _update_alone(
    optimizer: Optimizer, weight: Tensor, grad: Tensor, state: KeyState, hyper: Mapping[str, Any]
) -> None:
    """Run an elementwise optimizer on a slice that holds nothing but this key, padding included."""
    numel, unit = weight.numel(), ALIGNMENT // weight.element_size()
    length = -(-numel // unit) * unit
    dtype = str(weight.dtype).removeprefix("torch.")
    piece = Slice(0, dtype, 0, length, numel, (Segment(0, 0, 0, numel),), 0)
    tensors = {n: v for n, v in state.values.items() if isinstance(v, Tensor) and v.dim()}
    flat = SliceState(
        {name: _padded(tensor, length) for name, tensor in tensors.items()},
        [{name: value for name, value in state.values.items() if name not in tensors}],
        [state.step],
        None if state.master is None else _padded(state.master, length),
    )
    body = _padded(weight, length)
    update_slice(
        optimizer, piece, body, _padded(grad, length), flat, [hyper], names=[str(hyper.get("key", ""))]
    )
    if length != numel:
        weight.copy_(body[:numel].view(weight.shape))
    shape = weight.shape or (1,)  # a 0-d entry would be taken for a number
    state.values = {**flat.scalars[0], **{n: v[:numel].view(shape) for n, v in flat.tensors.items()}}
    state.master = None if flat.master is None else flat.master[:numel].view(weight.shape)
    state.step = flat.steps[0]


def _padded(tensor: Tensor, length: int) -> Tensor:
    """The flat tensor with zeros up to `length`; not a copy where it has that length."""
    flat = tensor.reshape(-1)
    if flat.numel() == length:
        return flat
    padded = flat.new_zeros(length)
    padded[: flat.numel()] = flat
    return padded
