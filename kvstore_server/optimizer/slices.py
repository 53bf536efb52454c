"""The optimizer state of one slice, and the update of one slice.

A slice holds several segments. Neighbouring segments that are updated alike (same numbers, same number of
updates so far) form a run, which one kernel call updates, padding included.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kvstore_server.errors import OptimizerError, ShapeMismatchError
from kvstore_server.optimizer.base import Optimizer, StateValue
from kvstore_server.plan import Slice

Hyper = Mapping[str, Any]

_RESERVED = ("step", "master")
"""Names that `SliceState.state_of` gives to what is no state of the optimizer's own."""

_BLOCK = 32768
"""Elements up to which torch does not share an elementwise operation among threads (its grain size). Where it
does, the shares end anywhere, and operations such as pow or sigmoid round the end of a share differently."""


@dataclass
class SliceState:
    """Optimizer state of one slice; `empty` makes the state before the first update."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    """Flat, one element per element of the slice, in the dtype that the update computes in."""
    scalars: list[dict[str, StateValue]] = field(default_factory=list)
    """Per segment: 0-d values. A dict may be shared by segments and is replaced, never changed."""
    steps: list[int] = field(default_factory=list)
    """Per segment: the number of updates applied."""
    master: Tensor | None = None
    """float32 weights of a half-precision slice (multi_precision); they follow weights that are replaced."""

    @classmethod
    def empty(cls, piece: Slice) -> SliceState:
        """The state of a slice that was never updated."""
        count = len(piece.segments)
        return cls(scalars=[{}] * count, steps=[0] * count)

    def copy(self) -> SliceState:
        """A deep copy, to roll back to."""
        return SliceState(
            {name: tensor.clone() for name, tensor in self.tensors.items()},
            [_cloned(scalars) for scalars in self.scalars],
            list(self.steps),
            None if self.master is None else self.master.clone(),
        )

    def state_of(self, piece: Slice, index: int) -> dict[str, StateValue]:
        """Copy out the state of one segment: 'step', its scalars, its flat tensors and, if kept, 'master'.

        A segment that was never updated has only 'step' (0.0), and 'master' if kept.
        """
        segment = piece.segments[index]
        part = slice(segment.start, segment.start + segment.numel)
        state: dict[str, StateValue] = {"step": float(self.steps[index])}
        if self.steps[index]:
            state.update(_cloned(self.scalars[index]))
            state.update({name: tensor[part].clone() for name, tensor in self.tensors.items()})
        if self.master is not None:
            state["master"] = self.master[part].clone()
        return state

    def set_state(self, piece: Slice, index: int, values: Mapping[str, StateValue]) -> None:
        """Replace the state of one segment by what `state_of` returned, there or elsewhere.

        Tensors are flattened, and belong on the device of the weights; a 0-d tensor or a number is a scalar,
        unless the slice has a tensor of that name. Without 'step' the segment counts as never updated.

        Raises:
            ShapeMismatchError: a tensor has another number of elements than the segment.
        """
        segment = piece.segments[index]
        part = slice(segment.start, segment.start + segment.numel)
        for tensor in self.tensors.values():
            tensor[part].zero_()
        scalars: dict[str, StateValue] = {}
        self.steps[index] = int(values.get("step", 0))
        for name, value in values.items():
            if name == "step":
                continue
            if name not in self.tensors and (not isinstance(value, Tensor) or value.dim() == 0):
                scalars[name] = value.clone() if isinstance(value, Tensor) else float(value)
            else:
                flat = torch.as_tensor(value).detach().reshape(-1)
                if flat.numel() != segment.numel:
                    raise ShapeMismatchError(
                        f"state {name!r} has {flat.numel()} elements, but its segment has {segment.numel}; "
                        "load the state of the same model"
                    )
                self.tensor(name, piece, flat)[part].copy_(flat)
        self.scalars[index] = scalars

    def tensor(self, name: str, piece: Slice, like: Tensor) -> Tensor:
        """The slice's tensor of that name; a missing one is made, zero, in the dtype to compute in."""
        compute = torch.float64 if piece.dtype == "float64" else torch.float32
        dtype = compute if like.is_floating_point() else like.dtype
        if name == "master":
            if self.master is None:
                self.master = torch.zeros(piece.length, dtype=dtype, device=like.device)
            return self.master
        if name not in self.tensors:
            self.tensors[name] = torch.zeros(piece.length, dtype=dtype, device=like.device)
        return self.tensors[name]


@dataclass(frozen=True, slots=True)
class _Run:
    """Neighbouring segments that are updated together, and their elements up to the end of their padding."""

    members: Sequence[int]
    start: int
    end: int
    hyper: Hyper
    """The segments' numbers, and 'step': which update this is, from 1."""


@torch.no_grad()
def update_slice(
    optimizer: Optimizer,
    piece: Slice,
    weight: Tensor,
    grad: Tensor,
    state: SliceState,
    hypers: Sequence[Hyper],
    present: Sequence[bool] | None = None,
) -> int:
    """Apply one update to the present segments of a slice; return how many there were.

    Args:
        weight: flat, `piece.length` elements, updated in place; its padding is zero and stays so.
        grad: flat, as long, float64 for float64 weights, else float32; rescaled; its padding is zero. It may
            be overwritten.
        state: of this slice, updated in place.
        hypers: per segment the optimizer's numbers with multipliers applied; no tensors.
        present: per segment whether it has a gradient; None: all. Absent ones stay as they are: no weight
            decay, no momentum, no step.

    Raises:
        OptimizerError: the optimizer put something else than flat tensors and numbers into the state.
        Exception: whatever a user-defined optimizer raises; weights and state are then half updated.
    """
    updated = 0
    for members in _alike_segments(state, hypers, present):
        run = _run_of(piece, members, {**hypers[members[0]], "step": state.steps[members[0]] + 1})
        scalars = _update_run(optimizer, piece, run, weight, grad, state) if run.end > run.start else {}
        for i in members:
            state.steps[i] += 1
            state.scalars[i] = scalars
        updated += len(members)
    return updated


def _alike_segments(
    state: SliceState, hypers: Sequence[Hyper], present: Sequence[bool] | None
) -> list[Sequence[int]]:
    """Group neighbouring segments that are present and updated alike."""
    count = len(state.steps)
    if (present is None or all(present)) and count:
        distinct = {*map(id, hypers)}, {*state.steps}, {*map(id, state.scalars)}
        if all(len(values) == 1 for values in distinct):
            return [range(count)]
    groups: list[list[int]] = []
    for i in range(count):
        if present is not None and not present[i]:
            continue
        if groups and groups[-1][-1] == i - 1 and _alike(state, hypers, i - 1, i):
            groups[-1].append(i)
        else:
            groups.append([i])
    return list(groups)


def _alike(state: SliceState, hypers: Sequence[Hyper], a: int, b: int) -> bool:
    return (
        state.steps[a] == state.steps[b]
        and (hypers[a] is hypers[b] or hypers[a] == hypers[b])
        and (state.scalars[a] is state.scalars[b] or state.scalars[a] == state.scalars[b])
    )


def _run_of(piece: Slice, members: Sequence[int], hyper: Hyper) -> _Run:
    after = members[-1] + 1
    end = piece.segments[after].start if after < len(piece.segments) else piece.length
    return _Run(members, piece.segments[members[0]].start, end, hyper)


def _update_run(
    optimizer: Optimizer, piece: Slice, run: _Run, weight: Tensor, grad: Tensor, state: SliceState
) -> dict[str, StateValue]:
    """Update the run's weights and tensors of state; return its new scalars."""
    stored = weight[run.start : run.end]
    target = stored
    if weight.dtype in (torch.float16, torch.bfloat16):
        target = _master_of(run, weight, state) if optimizer.multi_precision else stored.float()
    change = grad[run.start : run.end]
    bound = run.hyper.get("clip_gradient")
    if bound is not None and optimizer.clips:
        change.clamp_(-bound, bound)
    whole = optimizer.verified or weight.device.type != "cpu"
    size = run.end - run.start if whole else _BLOCK
    for first in range(0, run.end - run.start, size):
        part = slice(first, first + size)
        scalars = _update_block(optimizer, piece, run, target[part], change[part], state, run.start + first)
    if not optimizer.verified or run.hyper.get("eps") == 0:
        _clear_padding(piece, run, target)
    if target is not stored:
        stored.copy_(target)
    return scalars


def _master_of(run: _Run, weight: Tensor, state: SliceState) -> Tensor:
    """The run's part of the master; where the weights are not its rounding, they were replaced and win."""
    if state.master is None:
        state.master = weight.float()
    stored, master = weight[run.start : run.end], state.master[run.start : run.end]
    replaced = master.to(weight.dtype) != stored
    if replaced.any():
        master.copy_(torch.where(replaced, stored.float(), master))
    return master


def _update_block(
    optimizer: Optimizer, piece: Slice, run: _Run, weight: Tensor, grad: Tensor, state: SliceState, start: int
) -> dict[str, StateValue]:
    part = slice(start, start + weight.numel())
    held: dict[str, Tensor] = {}
    if run.hyper["step"] == 1:
        values = optimizer.create_state(weight)
    else:
        held = {name: tensor[part] for name, tensor in state.tensors.items()}
        values = {**_cloned(state.scalars[run.members[0]]), **held}
    optimizer.update(weight, grad, values, run.hyper)
    scalars: dict[str, StateValue] = {}
    for name, value in values.items():
        if value is held.get(name):
            continue
        if isinstance(value, Tensor) and value.shape == weight.shape and name not in _RESERVED:
            state.tensor(name, piece, value)[part].copy_(value)
        elif isinstance(value, int | float) or (isinstance(value, Tensor) and value.dim() == 0):
            scalars[name] = value
        else:
            raise OptimizerError(_bad_state(optimizer, name, value, weight))
    return scalars


def _clear_padding(piece: Slice, run: _Run, target: Tensor) -> None:
    """Zero the padding: an optimizer that is not ours, or 0 / 0 where eps is 0, may have changed it."""
    for i in run.members:
        end = piece.segments[i].start + piece.segments[i].numel
        after = piece.segments[i + 1].start if i + 1 < len(piece.segments) else piece.length
        target[end - run.start : after - run.start].zero_()


def _cloned(values: Mapping[str, StateValue]) -> dict[str, StateValue]:
    return {name: v.clone() if isinstance(v, Tensor) else v for name, v in values.items()}


def _bad_state(optimizer: Optimizer, name: str, value: object, weight: Tensor) -> str:
    got = (
        f"a tensor of shape {tuple(value.shape)}"
        if isinstance(value, Tensor)
        else f"a {type(value).__name__}"
    )
    return (
        f"optimizer {optimizer.registered_name} put {got} into its state as {name!r}; an entry is a tensor "
        f"of the weights' shape {tuple(weight.shape)}, a 0-d tensor or a number, and not called "
        f"{' or '.join(_RESERVED)}"
    )
