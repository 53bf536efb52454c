"""Optimizer state in two forms: per slice or key, as it is kept, and per parameter, as torch's state_dict has it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from kvstore_server.optimizer import KeyState, Optimizer, SliceState
from kvstore_server.optimizer.torch_family import TorchOptimizer
from kvstore_server.plan import Plan, Slice, TensorSpec
from kvtrainer.errors import StateMismatchError
from kvtrainer.states.entries import State, state_problems, trial_state
from kvtrainer.types import Group

_HALF = ("float16", "bfloat16")


class StateHolder(Protocol):
    """Keeps optimizer state, here or on a server: of every slice, or, if not `elementwise`, of every key."""

    def get_state(self, piece: Slice) -> SliceState: ...
    def put_state(self, piece: Slice, state: SliceState) -> None: ...
    def get_key_state(self, key: int) -> KeyState: ...
    def put_key_state(self, key: int, state: KeyState) -> None: ...


class StateElsewhere(defaultdict[Tensor, Any]):
    """What a Trainer shows as `state`: no entries, because the state lies in slices; see `Trainer.state_dict`.

    It counts as true: torch.distributed.checkpoint would otherwise take a step with zero gradients to make some.
    """

    def __bool__(self) -> bool:
        return True


def export_states(plan: Plan, holder: StateHolder, optimizer: Optimizer) -> dict[int, State]:
    """The state of every key that was updated, by index; copies."""
    if not optimizer.elementwise:
        whole = {key: holder.get_key_state(key).state_of() for key in range(len(plan.specs))}
        return {key: _with_step(state) for key, state in whole.items() if _is_updated(state)}
    pieces: dict[int, list[tuple[int, State]]] = {}
    for piece in plan.slices:
        kept = holder.get_state(piece)
        for at, segment in enumerate(piece.segments):
            state = kept.state_of(piece, at)
            if _is_updated(state):
                pieces.setdefault(segment.key, []).append((segment.key_start, state))
    return {key: _join(plan, key, parts) for key, parts in sorted(pieces.items())}


def read_states(
    state_dict: Mapping[str, Any], groups: Sequence[Group], plan: Plan, optimizer: Optimizer
) -> dict[int, State]:
    """Take the optimizer state out of a torch state_dict, by index of the key; copies, in their own dtypes.

    Raises:
        StateMismatchError: the state belongs to another model or to another kind of optimizer.
    """
    saved = state_dict["param_groups"]
    mine, theirs = ([len(group["params"]) for group in given] for given in (groups, saved))
    if mine != theirs:
        raise StateMismatchError(
            f"the state has {len(theirs)} parameter groups of {theirs} parameters, this Trainer has {len(mine)} of "
            f"{mine}; load the states of the same model with the same groups"
        )
    ids = [parameter_id for group in saved for parameter_id in group["params"]]
    found = (state_dict["state"].get(parameter_id) for parameter_id in ids)
    states = {key: _copied(state) for key, state in enumerate(found) if state and _is_updated(state)}
    if isinstance(optimizer, TorchOptimizer) and optimizer.is_foreign:
        # Its own count goes under a name of its own, beside that of a store.
        for key, state in states.items():
            own = state_dict["state"][ids[key]]
            if "step" in own:
                state.setdefault("torch_step", own["step"])
    for key, state in states.items():
        if plan.specs[key].dtype not in _HALF:
            state.pop("master", None)  # the weights were of half precision then
    options = [group for group in saved for _ in group["params"]]
    problems = momentum_problems(states, saved, optimizer) + state_problems(states, options, plan, optimizer)
    if problems:
        raise StateMismatchError(
            f"the state does not fit this Trainer, which is unchanged: {'; '.join(problems)}. Load the states of the "
            "same model and the same optimizer"
        )
    return states


def import_states(
    plan: Plan, holder: StateHolder, states: Mapping[int, State], optimizer: Optimizer, device: torch.device
) -> None:
    """Replace the state of every key; one without an entry starts afresh. `states` fit the plan, see `read_states`."""
    if not optimizer.elementwise:
        for key, spec in enumerate(plan.specs):
            whole = KeyState()
            if states.get(key):
                moved = {name: _on(value, device) for name, value in states[key].items()}
                whole.set_state(moved, spec.shape)
            holder.put_key_state(key, whole)
        return
    per_element = _per_element(optimizer) if any(not plan.specs[key].shape for key in states) else set()
    for piece in plan.slices:
        kept = SliceState.empty(piece)
        for at, segment in enumerate(piece.segments):
            state = states.get(segment.key)
            if state:
                part = slice(segment.key_start, segment.key_start + segment.numel)
                is_scalar = not plan.specs[segment.key].shape
                flat = per_element if is_scalar else set()
                values = {n: _cut(v, part, n in flat, device) for n, v in state.items()}
                kept.set_state(piece, at, values)
        holder.put_state(piece, kept)


def momentum_problems(
    states: Mapping[int, State], saved: Sequence[Mapping[str, Any]], optimizer: Optimizer
) -> list[str]:
    """Tell Gluon's momentum from torch's by a group's 'dampening', which only torch has."""
    is_torch, is_theirs_torch = "dampening" in optimizer.hyper, any("dampening" in group for group in saved)
    if is_torch == is_theirs_torch or not any("momentum_buffer" in state for state in states.values()):
        return []
    theirs, mine = ("torch's", "Gluon's") if is_theirs_torch else ("Gluon's", "torch's")
    return [
        f"the state was saved with {theirs} SGD, this Trainer runs {mine}: their momentum differs by a factor of "
        "the learning rate. Build the Trainer with 'sgd' for Gluon's, 'torch:SGD' for torch's"
    ]


def _is_updated(state: Mapping[str, Any]) -> bool:
    """Whether there is more than an initial state; where torch keeps no count, there is a state after an update only.

    A master without updates, which a key may have from its neighbours in a slice, only repeats the weights.
    """
    return float(state.get("step", 1.0)) > 0


def _with_step(state: State) -> State:
    return {**state, "step": torch.tensor(float(state["step"]))}


def _join(plan: Plan, key: int, parts: list[tuple[int, State]]) -> State:
    shape = plan.specs[key].shape
    ordered = [state for _, state in sorted(parts, key=lambda part: part[0])]
    joined: State = _with_step(ordered[0])
    for name, value in ordered[0].items():
        if isinstance(value, Tensor) and value.dim() == 1:
            joined[name] = torch.cat([state[name] for state in ordered]).view(shape)
    return joined


def _cut(value: Any, part: slice, is_per_element: bool, device: torch.device) -> Any:
    if not isinstance(value, Tensor) or not (value.dim() or is_per_element):
        return value
    return value.reshape(-1)[part].to(device)


def _on(value: Any, device: torch.device) -> Any:
    """Tensors go to the device of the weights; scalars stay where they are."""
    return value.to(device) if isinstance(value, Tensor) and value.dim() else value


def _copied(state: Mapping[str, Any]) -> State:
    """A copy with a step count, which some torch optimizers do not keep, and without what they do not use."""
    used = {name: value for name, value in state.items() if value is not None and name != "step"}
    copies = {name: v.detach().clone() if isinstance(v, Tensor) else v for name, v in used.items()}
    return {"step": torch.tensor(float(state.get("step", 1.0))), **copies}


def _per_element(optimizer: Optimizer) -> set[str]:
    """The entries of state that have one number per element; a 0-d parameter's look like the optimizer's scalars."""
    state = trial_state(optimizer, {}, TensorSpec("", (2,), "float32")) or {}
    shaped = {name for name, value in state.items() if isinstance(value, Tensor) and value.shape == (2,)}
    return shaped | {"master"}
