"""Optimizer state between two forms: per slice, as it is kept, and per parameter, as torch's state_dict has it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from kvstore_server.optimizer import SliceState
from kvstore_server.plan import Plan, Slice
from kvtrainer.errors import ConfigurationError

State = dict[str, Any]
"""Name → tensor of the parameter's shape, or 0-d tensor or number."""


class StateHolder(Protocol):
    """Keeps the optimizer state of every slice, here or on a server."""

    def get_state(self, piece: Slice) -> SliceState: ...
    def put_state(self, piece: Slice, state: SliceState) -> None: ...


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


def import_states(plan: Plan, holder: StateHolder, states: Mapping[int, State], weights: Mapping[str, Tensor]) -> None:
    """Replace the state of every key; one without an entry starts afresh.

    Raises:
        ConfigurationError: a tensor does not have the shape of its parameter; nothing has changed then.
    """
    for key, state in states.items():
        _check(plan, key, state)
    for piece in plan.slices:
        kept = SliceState.empty(piece)
        weight = weights[piece.dtype][piece.offset : piece.offset + piece.length]
        for at, segment in enumerate(piece.segments):
            state = states.get(segment.key)
            if state:
                part = slice(segment.key_start, segment.key_start + segment.numel)
                kept.set_state(piece, at, {name: _cut(value, part) for name, value in _counted(state).items()}, weight)
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


def _cut(value: Any, part: slice) -> Any:
    return value.detach().reshape(-1)[part] if isinstance(value, Tensor) and value.dim() else value


def _check(plan: Plan, key: int, state: State) -> None:
    spec = plan.specs[key]
    for name, value in state.items():
        if isinstance(value, Tensor) and value.dim() and tuple(value.shape) != spec.shape:
            raise ConfigurationError(
                f"state {name!r} of {spec.key!r} has shape {list(value.shape)}, the parameter has {list(spec.shape)}; "
                "load the states of the same model"
            )
