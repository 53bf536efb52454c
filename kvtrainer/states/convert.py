"""Optimizer state in two forms: per slice, as it is kept, and per parameter, as torch's state_dict has it.

Which entries an optimizer keeps is found out by an update of nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from kvstore_server import check
from kvstore_server.optimizer import Optimizer, States
from kvstore_server.optimizer.base import MAX_COUNT
from kvstore_server.optimizer.state import joined, spread
from kvstore_server.optimizer.torch_family import OWN_COUNT, TorchOptimizer
from kvstore_server.plan import Plan, Slice, TensorSpec
from kvtrainer.errors import StateMismatchError
from kvtrainer.progress import announced, tracked
from kvtrainer.states.file import SavedStates

State = dict[str, Any]
"""Name → tensor of the parameter's shape (for an optimizer of whole keys: of any shape), 0-d tensor or number."""

_OPTIONAL = frozenset({"step", "master", "momentum_buffer", "max_exp_avg_sq", "grad_avg", "last_lr"})
"""Entries that may be there or not: options that need them, such as momentum, may change while training."""
_HALF = ("float16", "bfloat16")


class StateHolder(Protocol):
    """Keeps optimizer state, here or on a server, by slice."""

    def get_state(self, piece: Slice) -> States: ...
    def put_state(self, piece: Slice, state: States) -> None: ...


def export_states(plan: Plan, holder: StateHolder, keys: Sequence[int] | None = None) -> dict[int, State]:
    """Copy the state of those of the keys (by index; None: of all) that were updated."""
    pieces = plan.slices if keys is None else [piece for key in keys for piece in plan.slices_with(key)]
    kept = {piece.index: holder.get_state(piece) for piece in tracked(pieces, "collecting optimizer states")}
    found = {}
    nbytes = sum([tensor.nbytes for one in kept.values() for tensor in one.tensors.values()])
    with announced("putting optimizer states together", nbytes):
        for key in range(len(plan.specs)) if keys is None else keys:
            parts = _parts(plan, kept, key)
            if parts and parts[0][0].steps[parts[0][1]]:
                state: State = joined(parts, plan.specs[key].shape)
                found[key] = {**_by_row(plan, key, state), "step": torch.tensor(float(state["step"]))}
    return found


def _by_row(plan: Plan, key: int, state: State, is_dealt: bool = True) -> State:
    """Put the rows of what has a number per element in the order of the table, or else in that of its slices."""
    [deal] = plan.rows(key).deals
    if deal.is_plain:
        return state
    shape = plan.specs[key].shape
    every = np.arange(shape[0])
    order = torch.from_numpy(deal.places(every) if is_dealt else deal.rows(every))
    return {
        name: value[order] if isinstance(value, Tensor) and value.shape == shape else value
        for name, value in state.items()
    }


def read_states(
    given: Mapping[int, Mapping[str, Any]],
    options: Mapping[int, Mapping[str, Any]],
    plan: Plan,
    optimizer: Optimizer,
) -> dict[int, State]:
    """Check optimizer state by index of the key; copies, in their own dtypes, of the keys that were updated.

    Args:
        options: of the group of every key, with which the state was made.

    Raises:
        StateMismatchError: the state belongs to another model or to another kind of optimizer.
    """
    odd = {plan.specs[key].key: one for key, one in given.items() if not _is_state(one)}
    if odd:
        found = next(iter(odd.values()))
        raise StateMismatchError(
            f"the state of {', '.join(map(repr, odd))} is no dict of entries with a count of updates as its 'step', "
            f"but {found!r:.120}; nothing has changed. Load the states of the same model and the same optimizer"
        )
    states = {key: _copied(state) for key, state in given.items() if state and _is_updated(state)}
    for key, state in states.items():
        _name_own_count(state, given[key], options[key], plan.specs[key], optimizer)
        if plan.specs[key].dtype not in _HALF:
            state.pop("master", None)  # the weights were of half precision then
    if problems := _state_problems(states, options, plan.specs, optimizer):
        raise StateMismatchError(
            f"the state does not fit this Trainer, which is unchanged: {'; '.join(problems)}. Load the states of the "
            "same model and the same optimizer"
        )
    return states


def import_states(
    plan: Plan,
    holder: StateHolder,
    states: Mapping[int, State],
    optimizer: Optimizer,
    device: torch.device,
    *,
    others_stay: bool = False,
) -> None:
    """Replace the state of every key; one without an entry starts afresh, or stays as it is.

    `states` fit the plan, see `read_states`.
    """
    if others_stay:
        pieces = [piece for key in states for piece in plan.slices_with(key)]
        kept = {piece.index: holder.get_state(piece) for piece in pieces}
    else:
        kept = {piece.index: States.of_slice(piece, device) for piece in plan.slices}
    of_scalars = {"master"}
    if optimizer.elementwise and any(not plan.specs[key].shape for key in states):
        # What has one number per element looks like the optimizer's scalars where there is one element.
        trial = trial_state(optimizer, {}, TensorSpec("", (2,), "float32")) or {}
        of_scalars |= {n for n, value in trial.items() if isinstance(value, Tensor) and value.shape == (2,)}
    nbytes = sum(
        [one.nbytes for state in states.values() for one in state.values() if isinstance(one, Tensor)]
    )
    with announced("dividing optimizer states", nbytes):
        for key, given in states.items():
            state = _by_row(plan, key, given, is_dealt=False)
            entries = {n: v.to(device) if isinstance(v, Tensor) and v.dim() else v for n, v in state.items()}
            per_element = of_scalars
            if optimizer.elementwise and plan.specs[key].shape:
                per_element = {n for n, v in entries.items() if isinstance(v, Tensor) and v.dim()}
            spread(_parts(plan, kept, key), entries, per_element)
    for index, state_of_slice in tracked(list(kept.items()), "giving optimizer states"):
        holder.put_state(plan.slices[index], state_of_slice)


def saved_problems(
    saved: SavedStates, specs: Sequence[TensorSpec], optimizer: Optimizer, what: str, here: str
) -> Iterator[str]:
    """Say how saved states differ from those of keys and an optimizer: in names, shapes and entries.

    Args:
        what, here: Words for the keys and their owner, such as "parameters" of "this Trainer".
    """
    if saved.optimizer["name"] != optimizer.registered_name:
        yield f"the optimizer is {saved.optimizer['name']!r} in the file and {optimizer.registered_name!r} here"
    known = {spec.key: spec.shape for spec in specs}
    if missing := [repr(name) for name in known if name not in saved.parameters]:
        yield f"the file lacks the {what} {', '.join(missing)}"
    if unexpected := [repr(name) for name in saved.parameters if name not in known]:
        yield f"the file has the {what} {', '.join(unexpected)}, which {here} does not have"
    for name, parameter in saved.parameters.items():
        if name in known and parameter.shape != known[name]:
            yield f"{name!r} has shape {list(parameter.shape)} in the file and {list(known[name])} here"
    common = {at: saved.parameters[spec.key] for at, spec in enumerate(specs) if spec.key in saved.parameters}
    # Entries mean something only where the keys agree.
    states = {at: row.state for at, row in common.items() if row.state and row.shape == specs[at].shape}
    options = {at: saved.groups[row.group] for at, row in common.items()}
    yield from _state_problems(states, options, specs, optimizer)


def _is_state(value: Any) -> bool:
    """Tell whether this has the form of one parameter's state; what entries it has is not looked at."""
    return isinstance(value, Mapping) and _is_count(value.get("step", 0))


def _is_count(value: Any) -> bool:
    """Tell whether this is a count of updates: a whole number, or a tensor of one."""
    number = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
    return check.is_number(number) and 0 <= number <= MAX_COUNT // 2 and number == int(number)


def _is_updated(state: Mapping[str, Any]) -> bool:
    """Tell whether there is more than an initial state; where torch keeps no count, it is there after an update only.

    A master without updates, which a key may have from its neighbours in a slice, only repeats the weights.
    """
    return float(state.get("step", 1.0)) > 0


def _parts(plan: Plan, kept: Mapping[int, States], key: int) -> list[tuple[States, int]]:
    """List the segments of a key in order: the state of the slice of each, and its position there."""
    return [
        (kept[piece.index], at)
        for piece in plan.slices_with(key)
        for at, segment in enumerate(piece.segments)
        if segment.key == key
    ]


def _copied(state: Mapping[str, Any]) -> State:
    """Copy state, with a step count, which some torch optimizers do not keep, and without what they do not use."""
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


def trial_state(optimizer: Optimizer, options: Mapping[str, Any], spec: TensorSpec) -> State | None:
    """Find the entries of one parameter after an update of zeros by zero; None if the optimizer cannot say.

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
    for name, value in state.items() if optimizer.elementwise else ():
        if isinstance(value, Tensor) and value.shape == (2,):
            state[name] = value[0].expand(spec.shape)  # for all elements; takes no memory
    return {name: value for name, value in state.items() if value is not None}


def initial_state(optimizer: Optimizer, options: Mapping[str, Any], spec: TensorSpec) -> State:
    """Make entries as they will be, with a step count of 0: room to load into, which itself is no state at all."""
    state: State = {"step": torch.tensor(0.0)}
    for name, value in (trial_state(optimizer, options, spec) or {}).items():
        is_tensor = isinstance(value, Tensor)
        state[name] = value.detach().clone(memory_format=torch.contiguous_format) if is_tensor else value
    return state


def _state_problems(
    states: Mapping[int, State],
    options: Mapping[int, Mapping[str, Any]],
    specs: Sequence[TensorSpec],
    optimizer: Optimizer,
) -> list[str]:
    """Say how state differs from what the optimizer keeps; one sentence for each kind of difference.

    Args:
        states: By index of the key.
        options: Of the group of every key, with which the state was made.
    """
    found: dict[str, list[str]] = {}
    # Only torch's groups have a 'dampening', by which its momentum is known from Gluon's.
    is_torch, is_theirs_torch = (
        "dampening" in optimizer.hyper,
        any("dampening" in o for o in options.values()),
    )
    if is_torch != is_theirs_torch and any("momentum_buffer" in state for state in states.values()):
        theirs, mine = ("torch's", "Gluon's") if is_theirs_torch else ("Gluon's", "torch's")
        found[
            f"the state was saved with {theirs} SGD, here runs {mine}: their momentum differs by a factor of the "
            "learning rate. Name 'sgd' for Gluon's, 'torch:SGD' for torch's"
        ] = []
    for key, state in states.items():
        spec = specs[key]
        trial = trial_state(optimizer, options[key], spec)
        expected = None
        if trial is not None:
            expected = {n: tuple(v.shape) if isinstance(v, Tensor) else () for n, v in trial.items()}
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
        if name == "step" and not _is_count(value):
            yield f"state 'step' of PARAMETERS is no count of updates, but {value!r:.80}"
            continue
        wanted = known.get(name, spec.shape if is_tensor and value.dim() and optimizer.elementwise else None)
        got = tuple(value.shape) if is_tensor else ()
        if wanted is not None and got != wanted:
            fits = "the parameter has" if wanted == spec.shape else f"the parameter has {shape} and the entry"
            yield f"state {name!r} of PARAMETERS has shape {list(got)}, {fits} {list(wanted)}"
