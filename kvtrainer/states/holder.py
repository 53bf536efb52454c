"""Optimizer state in two forms: per slice or key, as it is kept, and per parameter, as torch's state_dict has it."""

from __future__ import annotations

from collections.abc import ItemsView, Iterator, Mapping, Sequence, ValuesView
from typing import Any, Protocol

import torch
from torch import Tensor

from kvstore_server.optimizer import KeyState, Optimizer, SliceState
from kvstore_server.optimizer.torch_family import OWN_COUNT, TorchOptimizer
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


class StateOwner(Protocol):
    """What has the states that a StateView shows: a Trainer."""

    def _parameter_states(self) -> Mapping[Tensor, State]: ...
    def _state_of(self, parameter: Tensor) -> State: ...
    def _replace_state(self, parameter: Tensor, state: Mapping[str, Any]) -> None: ...


class StateView(Mapping[Tensor, State]):
    """The optimizer state as torch's optimizers show it, by parameter: fetched when it is read, as copies.

    A parameter without state has an empty one. To assign one replaces that parameter's, on a server too: do it on every
    worker. So does `del`, after which the parameter starts afresh, and `clear`, of all of them. It counts as true:
    torch.distributed.checkpoint would otherwise make some by a step of zeros.
    """

    def __init__(self, owner: StateOwner) -> None:
        self._owner = owner

    def __bool__(self) -> bool:
        return True

    def __getitem__(self, parameter: Tensor) -> State:
        return self._owner._state_of(parameter)

    def __setitem__(self, parameter: Tensor, state: Mapping[str, Any]) -> None:
        self._owner._replace_state(parameter, state)

    def __delitem__(self, parameter: Tensor) -> None:
        self._owner._replace_state(parameter, {})

    def clear(self) -> None:
        for parameter in list(self):
            del self[parameter]

    def __contains__(self, parameter: object) -> bool:
        return isinstance(parameter, Tensor) and bool(self[parameter])

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self._owner._parameter_states())

    def __len__(self) -> int:
        return len(self._owner._parameter_states())

    def items(self) -> ItemsView[Tensor, State]:
        return self._owner._parameter_states().items()

    def values(self) -> ValuesView[State]:
        return self._owner._parameter_states().values()

    def get(self, parameter: Tensor, default: Any = None) -> Any:
        return self[parameter] or default

    def __repr__(self) -> str:
        return repr(dict(self.items()))


def export_state(plan: Plan, holder: StateHolder, optimizer: Optimizer, key: int) -> State:
    """The state of one key, by index, as `export_states` has it; empty if it was not updated."""
    if not optimizer.elementwise:
        whole = holder.get_key_state(key).state_of()
        return _with_step(whole) if _is_updated(whole) else {}
    parts = [
        (segment.key_start, kept.state_of(piece, at))
        for piece in plan.slices_with(key)
        for kept in [holder.get_state(piece)]
        for at, segment in enumerate(piece.segments)
        if segment.key == key
    ]
    parts = [(start, state) for start, state in parts if _is_updated(state)]
    return _join(plan, key, parts) if parts else {}


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


def read_state(
    given: Mapping[str, Any], options: Mapping[str, Any], plan: Plan, key: int, optimizer: Optimizer
) -> State:
    """Check the state of one key (by index), of a group with these options; a copy, or empty if it says no more.

    Raises:
        StateMismatchError: it belongs to another shape or to another kind of optimizer.
    """
    state = _copied(given) if given and _is_updated(given) else {}
    if state:
        _name_own_count(state, given, options, plan.specs[key], optimizer)
    _refuse(state_problems({key: state}, {key: options}, plan, optimizer) if state else [])
    return state


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
    options = [group for group in saved for _ in group["params"]]
    for key, state in states.items():
        _name_own_count(state, state_dict["state"][ids[key]], options[key], plan.specs[key], optimizer)
        if plan.specs[key].dtype not in _HALF:
            state.pop("master", None)  # the weights were of half precision then
    _refuse(momentum_problems(states, saved, optimizer) + state_problems(states, options, plan, optimizer))
    return states


def import_states(
    plan: Plan, holder: StateHolder, states: Mapping[int, State], optimizer: Optimizer, device: torch.device
) -> None:
    """Replace the state of every key; one without an entry starts afresh. `states` fit the plan, see `read_states`."""
    if not optimizer.elementwise:
        for key in range(len(plan.specs)):
            _put_whole(plan, holder, key, states.get(key, {}), device)
        return
    per_element = _per_element(optimizer) if any(not plan.specs[key].shape for key in states) else set()
    for piece in plan.slices:
        kept = SliceState.empty(piece)
        for at, segment in enumerate(piece.segments):
            if states.get(segment.key):
                _fill(plan, piece, kept, at, states[segment.key], per_element, device)
        holder.put_state(piece, kept)


def import_state(
    plan: Plan, holder: StateHolder, key: int, state: State, optimizer: Optimizer, device: torch.device
) -> None:
    """Replace the state of one key, by index; the state fits the plan, see `read_state`."""
    if not optimizer.elementwise:
        _put_whole(plan, holder, key, state, device)
        return
    per_element = set() if plan.specs[key].shape else _per_element(optimizer)
    for piece in plan.slices_with(key):
        kept = holder.get_state(piece)
        for at, segment in enumerate(piece.segments):
            if segment.key == key:
                _fill(plan, piece, kept, at, state, per_element, device)
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


def _refuse(problems: Sequence[str]) -> None:
    if problems:
        raise StateMismatchError(
            f"the state does not fit this Trainer, which is unchanged: {'; '.join(problems)}. Load the states of the "
            "same model and the same optimizer"
        )


def _put_whole(plan: Plan, holder: StateHolder, key: int, state: State, device: torch.device) -> None:
    whole = KeyState()
    if state:
        whole.set_state({name: _on(value, device) for name, value in state.items()}, plan.specs[key].shape)
    holder.put_key_state(key, whole)


def _fill(
    plan: Plan,
    piece: Slice,
    kept: SliceState,
    at: int,
    state: State,
    per_element: set[str],
    device: torch.device,
) -> None:
    """Put a key's state into the part of a slice that is its own."""
    segment = piece.segments[at]
    part = slice(segment.key_start, segment.key_start + segment.numel)
    flat = set() if plan.specs[segment.key].shape else per_element
    kept.set_state(piece, at, {n: _cut(v, part, n in flat, device) for n, v in state.items()})


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


def _name_own_count(
    state: State, given: Mapping[str, Any], options: Mapping[str, Any], spec: TensorSpec, optimizer: Optimizer
) -> None:
    """Put the count that a foreign class keeps, which torch's form has as 'step', under its name in a store.

    A class that keeps none has a 'step' from this form of the state alone.
    """
    if OWN_COUNT in given or "step" not in given:
        return
    if isinstance(optimizer, TorchOptimizer) and optimizer.is_foreign:
        found = trial_state(optimizer, options, spec)
        if found is None or OWN_COUNT in found:
            state[OWN_COUNT] = given["step"]


def _per_element(optimizer: Optimizer) -> set[str]:
    """The entries of state that have one number per element; a 0-d parameter's look like the optimizer's scalars."""
    state = trial_state(optimizer, {}, TensorSpec("", (2,), "float32")) or {}
    shaped = {name for name, value in state.items() if isinstance(value, Tensor) and value.shape == (2,)}
    return shaped | {"master"}
