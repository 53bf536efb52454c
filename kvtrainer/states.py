"""Optimizer state between two forms: per slice, as it is kept, and per parameter, as torch's state_dict has it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from kvstore_server.optimizer import Optimizer, SliceState
from kvstore_server.plan import Plan, Slice
from kvtrainer.errors import ConfigurationError
from kvtrainer.parameters import Group

State = dict[str, Any]
"""Name → tensor of the parameter's shape, or 0-d tensor or number."""


class StateHolder(Protocol):
    """Keeps the optimizer state of every slice, here or on a server."""

    def get_state(self, piece: Slice) -> SliceState: ...
    def put_state(self, piece: Slice, state: SliceState) -> None: ...


class StateElsewhere(defaultdict[Tensor, Any]):
    """What a Trainer shows as `state`: no entries, because the state lies in slices; see `Trainer.state_dict`.

    It counts as true: torch.distributed.checkpoint would otherwise take a step with zero gradients to make some.
    """

    def __bool__(self) -> bool:
        return True


def export_states(plan: Plan, holder: StateHolder) -> dict[int, State]:
    """The state of every key that was updated, by index; copies."""
    pieces: dict[int, list[tuple[int, State]]] = {}
    for piece in plan.slices:
        kept = holder.get_state(piece)
        for at, segment in enumerate(piece.segments):
            state = kept.state_of(piece, at)
            if len(state) > 1 or float(state["step"]):
                pieces.setdefault(segment.key, []).append((segment.key_start, state))
    return {key: _join(plan, key, parts) for key, parts in sorted(pieces.items())}


def read_states(
    state_dict: Mapping[str, Any], groups: Sequence[Group], plan: Plan, optimizer: Optimizer
) -> dict[int, State]:
    """Take the optimizer state out of a torch state_dict, by index of the key; copies, in their own dtypes.

    Raises:
        ConfigurationError: the state belongs to another model or to another kind of optimizer.
    """
    saved = state_dict["param_groups"]
    mine, theirs = ([len(group["params"]) for group in given] for given in (groups, saved))
    if mine != theirs:
        raise ConfigurationError(
            f"the state has {len(theirs)} parameter groups of {theirs} parameters, this Trainer has {len(mine)} of "
            f"{mine}; load the states of the same model with the same groups"
        )
    ids = [parameter_id for group in saved for parameter_id in group["params"]]
    states = {
        key: {name: _copied(value) for name, value in state_dict["state"][parameter_id].items()}
        for key, parameter_id in enumerate(ids)
        if state_dict["state"].get(parameter_id)
    }
    check_states(states, plan)
    _check_momentum(states, saved, optimizer)
    _check_names(states, saved, optimizer)
    return states


def check_states(states: Mapping[int, State], plan: Plan) -> None:
    """Raise ConfigurationError if a tensor does not have the shape of its parameter."""
    for key, state in states.items():
        spec = plan.specs[key]
        for name, value in state.items():
            if isinstance(value, Tensor) and value.dim() and tuple(value.shape) != spec.shape:
                raise ConfigurationError(
                    f"state {name!r} of {spec.key!r} has shape {list(value.shape)}, the parameter has "
                    f"{list(spec.shape)}; load the states of the same model"
                )


def import_states(
    plan: Plan, holder: StateHolder, states: Mapping[int, State], optimizer: Optimizer, device: torch.device
) -> None:
    """Replace the state of every key; one without an entry starts afresh. `states` fit the plan (`check_states`)."""
    per_element = _per_element(optimizer) if any(not plan.specs[key].shape for key in states) else frozenset()
    for piece in plan.slices:
        kept = SliceState.empty(piece)
        for at, segment in enumerate(piece.segments):
            state = states.get(segment.key)
            if state:
                part = slice(segment.key_start, segment.key_start + segment.numel)
                is_scalar = not plan.specs[segment.key].shape
                flat = per_element if is_scalar else frozenset[str]()
                values = {n: _cut(v, part, n in flat, device) for n, v in _counted(state).items()}
                kept.set_state(piece, at, values)
        holder.put_state(piece, kept)


def _join(plan: Plan, key: int, parts: list[tuple[int, State]]) -> State:
    shape = plan.specs[key].shape
    ordered = [state for _, state in sorted(parts, key=lambda part: part[0])]
    joined: State = {"step": torch.tensor(float(ordered[0]["step"]))}
    for name, value in ordered[0].items():
        if name == "step":
            continue
        is_flat = isinstance(value, Tensor) and value.dim() == 1
        joined[name] = torch.cat([state[name] for state in ordered]).view(shape) if is_flat else value
    return joined


def _counted(state: State) -> State:
    """State as some torch optimizers keep it has no step count; it has been updated all the same."""
    return state if "step" in state else {"step": 1.0, **state}


def _cut(value: Any, part: slice, is_per_element: bool, device: torch.device) -> Any:
    if not isinstance(value, Tensor) or not (value.dim() or is_per_element):
        return value
    return value.reshape(-1)[part].to(device)


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value


def _per_element(optimizer: Optimizer) -> frozenset[str]:
    """The entries of state that have one number per element; a 0-d parameter's look like the optimizer's scalars."""
    weight = torch.zeros(2)
    state = optimizer.create_state(weight)
    optimizer.update(weight, torch.zeros(2), state, {**optimizer.hyper, "step": 1})
    shaped = {
        name for name, value in state.items() if isinstance(value, Tensor) and value.shape == weight.shape
    }
    return frozenset(shaped | {"master"})


def _check_names(states: Mapping[int, State], saved: Sequence[Group], optimizer: Optimizer) -> None:
    """Refuse the state of another kind of optimizer. Momentum is optional: its use may change while training."""
    optional = {"step", "master", "momentum_buffer"}
    groups = [at for at, group in enumerate(saved) for _ in group["params"]]
    expected = {at: _names_of(optimizer, saved[at]) - optional for at in {groups[key] for key in states}}
    for key, state in states.items():
        found = {name for name, value in state.items() if value is not None} - optional
        if found != expected[groups[key]]:
            raise ConfigurationError(
                f"the state of parameter {key} has {_listed(found)}, {optimizer.registered_name} keeps "
                f"{_listed(expected[groups[key]])}; load the states of the same optimizer"
            )


def _names_of(optimizer: Optimizer, group: Group) -> set[str]:
    """The names under which the optimizer keeps state with a group's options, found by an update of nothing."""
    options = {**optimizer.hyper, **{name: group[name] for name in optimizer.hyper if name in group}}
    weight = torch.zeros(2)
    state = optimizer.create_state(weight)
    optimizer.update(weight, torch.zeros(2), state, {**options, "step": 1})
    return {name for name, value in state.items() if value is not None}


def _listed(names: set[str]) -> str:
    return ", ".join(sorted(names)) or "nothing beside the step count"


def _check_momentum(states: Mapping[int, State], saved: Sequence[Group], optimizer: Optimizer) -> None:
    """Tell Gluon's momentum from torch's by a group's 'dampening', which only torch has."""
    is_torch, is_theirs_torch = "dampening" in optimizer.hyper, any("dampening" in group for group in saved)
    if is_torch != is_theirs_torch and any("momentum_buffer" in state for state in states.values()):
        theirs, mine = ("torch's", "Gluon's") if is_theirs_torch else ("Gluon's", "torch's")
        raise ConfigurationError(
            f"the state was saved with {theirs} SGD, this Trainer runs {mine}: their momentum differs by a factor of "
            "the learning rate. Build the Trainer with 'sgd' for Gluon's, 'torch:SGD' for torch's"
        )
