"""Which entries of state an optimizer keeps, found out by an update of nothing, and whether given ones fit."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from kvstore_server.optimizer import Optimizer
from kvstore_server.optimizer.torch_family import OWN_COUNT
from kvstore_server.plan import Plan, TensorSpec

State = dict[str, Any]
"""Name → tensor of the parameter's shape (for an optimizer of whole keys: of any shape), 0-d tensor or number."""

_OPTIONAL = frozenset({"step", "master", "momentum_buffer", "last_lr"})
"""Entries that may be there or not: whether momentum is used, and corrected, may change while training."""


def trial_state(optimizer: Optimizer, options: Mapping[str, Any], spec: TensorSpec) -> State | None:
    """The entries of one parameter after an update of zeros by zero; None if the optimizer cannot say.

    Args:
        options: The numbers of the parameter's group; the optimizer's own stand in for missing ones.

    An optimizer of whole keys is given a key of the real shape; what another one does to an element does not depend
    on the others, so it is given two.
    """
    shape = (2,) if optimizer.elementwise else spec.shape
    weight = torch.zeros(shape, dtype=torch.float64 if spec.dtype == "float64" else torch.float32)
    numbers = {name: options.get(name, value) for name, value in optimizer.hyper.items()}
    hyper = {**numbers, "step": 1 + optimizer.begin_num_update, "key": spec.key, "first": 0}
    try:
        state: State = dict(optimizer.create_state(weight))
        with torch.no_grad():
            optimizer.update(weight, torch.zeros_like(weight), state, hyper)
    except Exception:
        # A user's optimizer, which may refuse zeros: it is not this question that it should fail at.
        return None
    if optimizer.elementwise:
        state = {name: _spread(value, spec.shape) for name, value in state.items()}
    return {name: value for name, value in state.items() if value is not None}


def initial_state(optimizer: Optimizer, options: Mapping[str, Any], spec: TensorSpec) -> State:
    """Entries as they will be, with a step count of 0: room to load into, which itself counts as no state at all."""
    found = trial_state(optimizer, options, spec) or {}
    return {"step": torch.tensor(0.0), **{name: _own(value) for name, value in found.items()}}


def state_problems(
    states: Mapping[int, State],
    options: Sequence[Mapping[str, Any]] | Mapping[int, Mapping[str, Any]],
    plan: Plan,
    optimizer: Optimizer,
) -> list[str]:
    """Say how state differs from what the optimizer keeps; one sentence for each kind of difference.

    Args:
        states: By index of the key.
        options: Of the group of every key, with which the state was made.
    """
    found: dict[str, list[str]] = {}
    for key, state in states.items():
        spec = plan.specs[key]
        expected = _expected_shapes(optimizer, options[key], spec)
        for problem in _differences(state, expected, spec, optimizer):
            found.setdefault(problem, []).append(repr(spec.key))
    return [problem.replace("PARAMETERS", ", ".join(names)) for problem, names in found.items()]


def _differences(
    state: State, expected: Mapping[str, tuple[int, ...]] | None, spec: TensorSpec, optimizer: Optimizer
) -> Iterable[str]:
    shape = list(spec.shape)
    if expected is not None and spec.numel:
        for name in sorted(expected.keys() - state.keys() - _OPTIONAL):
            yield f"state {name!r} of PARAMETERS is missing"
        for name in sorted(state.keys() - expected.keys() - _OPTIONAL - {OWN_COUNT}):
            yield f"state {name!r} of PARAMETERS is not one that {optimizer.registered_name} keeps"
    known = {**(expected or {}), "master": spec.shape, "step": ()}
    for name, value in state.items():
        is_tensor = isinstance(value, Tensor)
        wanted = known.get(name, spec.shape if is_tensor and value.dim() and optimizer.elementwise else None)
        got = tuple(value.shape) if is_tensor else ()
        if wanted is not None and got != wanted:
            fits = "the parameter has" if wanted == spec.shape else f"the parameter has {shape} and the entry"
            yield f"state {name!r} of PARAMETERS has shape {list(got)}, {fits} {list(wanted)}"


def _expected_shapes(
    optimizer: Optimizer, options: Mapping[str, Any], spec: TensorSpec
) -> dict[str, tuple[int, ...]] | None:
    state = trial_state(optimizer, options, spec)
    if state is None:
        return None
    return {name: tuple(v.shape) if isinstance(v, Tensor) else () for name, v in state.items()}


def _spread(value: Any, shape: tuple[int, ...]) -> Any:
    """A value per element, of which two were made, for all elements of a parameter; takes no memory."""
    if isinstance(value, Tensor) and value.shape == (2,):
        return value[0].expand(shape)
    return value


def _own(value: Any) -> Any:
    return value.detach().clone(memory_format=torch.contiguous_format) if isinstance(value, Tensor) else value
