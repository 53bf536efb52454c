"""The update of one slice.

A slice holds several segments. Neighbouring segments that are updated alike (same numbers, same number of
updates so far) form a run, which one kernel call updates, padding included. For an optimizer that must know where
elements belong every segment is a run of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvstore_server.errors import OptimizerError
from kvstore_server.optimizer.base import Optimizer, StateValue
from kvstore_server.optimizer.half import follow, is_half
from kvstore_server.optimizer.slice_state import RESERVED, SliceState, cloned
from kvstore_server.plan import Slice

__all__ = ["SliceState", "update_slice"]

Hyper = Mapping[str, Any]

_BLOCK = 32768
"""Elements up to which torch does not share an elementwise operation among threads (its grain size). Where it
does, the shares end anywhere, and operations such as pow or sigmoid round the end of a share differently."""
_UNIT = 64
"""Elements whose multiples torch's vector loops cover without a rest, which is rounded like the end of a share."""


@dataclass(frozen=True, slots=True)
class _Run:
    """Neighbouring segments that are updated together, and their elements up to the end of their padding."""

    members: Sequence[int]
    start: int
    end: int
    hyper: Hyper
    """The segments' numbers and 'step', for a positioned optimizer also 'key' and 'first'; see Optimizer.update."""
    fresh: bool
    """Whether these segments were never updated."""


@torch.no_grad()
def update_slice(
    optimizer: Optimizer,
    piece: Slice,
    weight: Tensor,
    grad: Tensor,
    state: SliceState,
    hypers: Sequence[Hyper],
    present: Sequence[bool] | None = None,
    names: Sequence[str] | None = None,
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
        names: per segment the name of its key; an optimizer that is `positioned` needs them.

    Raises:
        OptimizerError: the optimizer put something else than flat tensors and numbers into the state.
        Exception: whatever a user-defined optimizer raises; weights and state are then half updated.
    """
    assert optimizer.elementwise, f"{optimizer.registered_name} needs whole keys; see whole.update_key"
    updated = 0
    for members in _runs(optimizer, state, hypers, present):
        run = _run_of(optimizer, piece, members, state.steps[members[0]], hypers[members[0]], names)
        scalars = _update_run(optimizer, piece, run, weight, grad, state) if run.end > run.start else {}
        for i in members:
            state.steps[i] += 1
            state.scalars[i] = scalars
        updated += len(members)
    return updated


def _runs(
    optimizer: Optimizer, state: SliceState, hypers: Sequence[Hyper], present: Sequence[bool] | None
) -> list[Sequence[int]]:
    """The segments to update, those that one kernel call shall update together in one group."""
    if optimizer.positioned:
        return [[i] for i in range(len(state.steps)) if present is None or present[i]]
    return _alike_segments(state, hypers, present)


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


def _run_of(
    optimizer: Optimizer,
    piece: Slice,
    members: Sequence[int],
    updates: int,
    hyper: Hyper,
    names: Sequence[str] | None,
) -> _Run:
    first, after = piece.segments[members[0]], members[-1] + 1
    end = piece.segments[after].start if after < len(piece.segments) else piece.length
    numbers = {**hyper, "step": optimizer.begin_num_update + updates + 1}
    if optimizer.positioned:
        assert names is not None, f"{optimizer.registered_name} must know the names of the keys"
        numbers |= {"key": names[members[0]], "first": first.key_start}
    return _Run(members, first.start, end, numbers, fresh=updates == 0)


def _update_run(
    optimizer: Optimizer, piece: Slice, run: _Run, weight: Tensor, grad: Tensor, state: SliceState
) -> dict[str, StateValue]:
    """Update the run's weights and tensors of state; return its new scalars."""
    stored = weight[run.start : run.end]
    target = stored
    if is_half(weight):
        if optimizer.multi_precision:
            target = _master_of(run, weight, state)
        else:
            optimizer.warn_of_low_precision(weight.dtype)
            target = stored.float()
    change = grad[run.start : run.end]
    bound = run.hyper.get("clip_gradient")
    if bound is not None and optimizer.clips:
        change.clamp_(-bound, bound)
    size = _BLOCK if _may_round_ends_differently(optimizer, weight) else run.end - run.start
    for offset in range(0, run.end - run.start, size):
        part = slice(offset, offset + size)
        scalars = _update_block(optimizer, piece, run, target[part], change[part], state, offset)
    if not optimizer.verified or run.hyper.get("eps") == 0:
        _clear_padding(piece, run, target)
    if target is not stored:
        stored.copy_(target)
    return scalars


def _may_round_ends_differently(optimizer: Optimizer, weight: Tensor) -> bool:
    """Whether bits could depend on where a vector ends, so that the vectors given to it must end alike."""
    return not optimizer.verified and weight.device.type == "cpu"


def _master_of(run: _Run, weight: Tensor, state: SliceState) -> Tensor:
    """The run's part of the master, as far as the weights were not replaced."""
    if state.master is None:
        state.master = weight.float()
    return follow(state.master[run.start : run.end], weight[run.start : run.end])


def _update_block(
    optimizer: Optimizer,
    piece: Slice,
    run: _Run,
    weight: Tensor,
    grad: Tensor,
    state: SliceState,
    offset: int,
) -> dict[str, StateValue]:
    """Update the elements of the run from `offset` on, as many as `weight` has; return the run's new scalars."""
    count = weight.numel()
    spare = -count % _UNIT if _may_round_ends_differently(optimizer, weight) else 0
    lent, grad = _lengthened(weight, spare), _lengthened(grad, spare)
    part = slice(run.start + offset, run.start + offset + count)
    hyper = {**run.hyper, "first": run.hyper["first"] + offset} if optimizer.positioned else run.hyper
    held: dict[str, Tensor] = {}
    if run.fresh:
        values = optimizer.create_state(lent)
    else:
        held = {name: _lengthened(tensor[part], spare) for name, tensor in state.tensors.items()}
        values = {**cloned(state.scalars[run.members[0]]), **held}
    optimizer.update(lent, grad, values, hyper)
    if spare:
        weight.copy_(lent[:count])
    scalars: dict[str, StateValue] = {}
    for name, value in values.items():
        if value is held.get(name) and not spare:
            continue
        if isinstance(value, Tensor) and value.shape == lent.shape and name not in RESERVED:
            state.tensor(name, piece, value)[part].copy_(value[:count])
        elif isinstance(value, int | float) or (isinstance(value, Tensor) and value.dim() == 0):
            scalars[name] = value
        else:
            raise OptimizerError(_bad_state(optimizer, name, value, lent))
    return scalars


def _lengthened(flat: Tensor, spare: int) -> Tensor:
    """The vector with so many zeros after it; itself, not a copy, where there are none."""
    return torch.nn.functional.pad(flat, (0, spare)) if spare else flat


def _clear_padding(piece: Slice, run: _Run, target: Tensor) -> None:
    """Zero the padding: an optimizer that is not ours, or 0 / 0 where eps is 0, may have changed it."""
    for i in run.members:
        end = piece.segments[i].start + piece.segments[i].numel
        after = piece.segments[i + 1].start if i + 1 < len(piece.segments) else piece.length
        target[end - run.start : after - run.start].zero_()


def _bad_state(optimizer: Optimizer, name: str, value: object, weight: Tensor) -> str:
    got = (
        f"a tensor of shape {tuple(value.shape)}"
        if isinstance(value, Tensor)
        else f"a {type(value).__name__}"
    )
    return (
        f"optimizer {optimizer.registered_name} put {got} into its state as {name!r}; an entry is a tensor "
        f"of the weights' shape {tuple(weight.shape)}, a 0-d tensor or a number, and not called "
        f"{' or '.join(RESERVED)}"
    )
