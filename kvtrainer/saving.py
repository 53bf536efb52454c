"""Between a Trainer and its saved states: what is taken out of it, whether states fit, and how they are taken over."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from kvstore_server import lr_scheduler
from kvstore_server.optimizer import Optimizer
from kvstore_server.optimizer.torch_family import OWN_COUNT
from kvtrainer.errors import ConfigurationError, StateMismatchError
from kvtrainer.groups import check_options, kept_entries, option_names
from kvtrainer.memory.memory import Memory
from kvtrainer.states.entries import State, state_problems
from kvtrainer.states.holder import momentum_problems
from kvtrainer.states.saved import SavedParameter, SavedStates
from kvtrainer.types import Group

_log = logging.getLogger(__name__)

_CODE = "code"
"""What a description has instead of the scheduler's if that is a function, which cannot be saved."""
_ON_SERVERS = ("multi_precision", "begin_num_update")
"""Numbers of the optimizer that a store learns once, with the optimizer."""


def take_out(
    groups: Sequence[Group],
    layout: Memory,
    optimizer: Optimizer,
    states: Mapping[int, State],
    extra: Mapping[str, Any],
    tensors: Mapping[str, dict[str, Tensor]],
) -> SavedStates:
    """Put together what is to be saved; `states` by index of the key, `extra` and `tensors` from other parts."""
    options = [{n: _plain(value) for n, value in kept_entries(group, optimizer).items()} for group in groups]
    parameters = {
        spec.key: SavedParameter(spec.shape, spec.dtype, spec.group, _counted(states.get(key, {})))
        for key, spec in enumerate(layout.plan.specs)
    }
    return SavedStates(
        _description(optimizer), optimizer.num_update, options, parameters, dict(extra), dict(tensors)
    )


def check_fit(
    saved: SavedStates,
    groups: Sequence[Group],
    layout: Memory,
    optimizer: Optimizer,
    is_in_store: bool,
    more: Sequence[str] = (),
) -> None:
    """Raise StateMismatchError, which names every difference, unless the states fit this Trainer.

    Args:
        is_in_store: Whether a store has been told of the optimizer already.
        more: Differences that others found.
    """
    problems = [
        *_optimizer_problems(saved.optimizer, optimizer, is_in_store),
        *_parameter_problems(saved, layout),
        *_group_problems(saved, groups, layout, optimizer),
    ]
    # Entries mean something only where the parameters agree.
    common = {
        key: saved.parameters[spec.key].state
        for key, spec in enumerate(layout.plan.specs)
        if spec.key in saved.parameters and saved.parameters[spec.key].shape == spec.shape
    }
    states = {key: state for key, state in common.items() if state}
    rows = [saved.groups[p.group] if p else {} for p in map(saved.parameters.get, layout.names)]
    problems += momentum_problems(states, saved.groups, optimizer)
    problems += [*state_problems(states, rows, layout.plan, optimizer), *more]
    if problems:
        raise StateMismatchError(
            f"the saved states do not fit this Trainer, which is unchanged: {'; '.join(problems)}. Load the states of "
            "the same model, groups and optimizer"
        )


def as_state_dict(saved: SavedStates, layout: Memory) -> dict[str, Any]:
    """The options and states in the form of torch's state_dict; parameters are numbered as in `layout`."""
    groups: list[dict[str, Any]] = [{**options, "params": []} for options in saved.groups]
    for at, name in enumerate(layout.names):
        groups[saved.parameters[name].group]["params"].append(at)
    states = {at: saved.parameters[name].state for at, name in enumerate(layout.names)}
    # The count is the store's: a class that keeps one of its own has that under another name, unless it keeps none.
    return {
        "state": {at: {OWN_COUNT: None, **state} for at, state in states.items() if state},
        "param_groups": groups,
    }


def adopt_numbers(optimizer: Optimizer, saved: SavedStates) -> None:
    """Take over what is of the optimizer as a whole: its numbers, its scheduler and the count of updates."""
    for name in ("rescale_grad", "aggregate_num", *_ON_SERVERS):
        setattr(optimizer, name, saved.optimizer.get(name, getattr(Optimizer, name, None)))
    optimizer.num_update = saved.num_update
    mine, theirs = _scheduler_of(_description(optimizer)), _scheduler_of(saved.optimizer)
    if theirs is None and mine is not None:
        _log.warning(
            "the saved states were made without lr_scheduler, so %r is not used", optimizer.lr_scheduler
        )
        optimizer.lr_scheduler = None
    elif theirs is not None and theirs != mine and theirs != _CODE:
        optimizer.lr_scheduler = lr_scheduler.create_from_spec(theirs)


def _description(optimizer: Optimizer) -> dict[str, Any]:
    """As `Optimizer.spec` has it, also where the scheduler is code."""
    described = _without_scheduler(optimizer).spec()
    if optimizer.lr_scheduler is not None:
        try:
            described["lr_scheduler"] = optimizer.lr_scheduler.spec()
        except ConfigurationError:
            described["lr_scheduler"] = _CODE
    return described


def _without_scheduler(optimizer: Optimizer) -> Optimizer:
    alone = copy.copy(optimizer)
    alone.lr_scheduler = None
    return alone


def _scheduler_of(description: Mapping[str, Any]) -> Any:
    return description.get("lr_scheduler")


def _optimizer_problems(saved: Mapping[str, Any], optimizer: Optimizer, is_in_store: bool) -> Iterator[str]:
    mine = _description(optimizer)
    if saved["name"] != mine["name"]:
        yield f"the optimizer is {saved['name']!r} in the file and {mine['name']!r} here"
    for name in _ON_SERVERS if is_in_store else ():
        default = getattr(Optimizer, name, None)
        theirs, ours = saved.get(name, default), mine.get(name, default)
        if theirs != ours:
            yield (
                f"{name} is {theirs} in the file and {ours} here, and the optimizer is in the kvstore already, so load "
                "before the first step"
            )
    theirs = _scheduler_of(saved)
    if theirs == _CODE and optimizer.lr_scheduler is None:
        yield "the lr_scheduler was a function, which is not saved, so give the Trainer the same lr_scheduler"
    elif theirs not in (None, _CODE):
        try:
            lr_scheduler.create_from_spec(theirs)
        except ConfigurationError as error:
            yield f"the lr_scheduler cannot be made here: {error}"


def _parameter_problems(saved: SavedStates, layout: Memory) -> Iterator[str]:
    specs = {spec.key: spec for spec in layout.plan.specs}
    missing = [repr(name) for name in specs if name not in saved.parameters]
    unexpected = [repr(name) for name in saved.parameters if name not in specs]
    if missing:
        yield f"the file lacks the parameters {', '.join(missing)}"
    if unexpected:
        yield f"the file has the parameters {', '.join(unexpected)}, which this Trainer does not have"
    for name, parameter in saved.parameters.items():
        if name in specs and parameter.shape != specs[name].shape:
            yield f"{name!r} has shape {list(parameter.shape)} in the file and {list(specs[name].shape)} here"


def _group_problems(
    saved: SavedStates, groups: Sequence[Group], layout: Memory, optimizer: Optimizer
) -> Iterator[str]:
    if len(saved.groups) != len(groups):
        yield f"the file has {len(saved.groups)} parameter groups, this Trainer has {len(groups)}"
    for spec in layout.plan.specs:
        parameter = saved.parameters.get(spec.key)
        if parameter is not None and parameter.group != spec.group:
            yield f"{spec.key!r} is in group {parameter.group} in the file and in group {spec.group} here"
    for at, options in enumerate(saved.groups):
        known = {name: options[name] for name in option_names(optimizer) if name in options}
        try:
            check_options(_without_scheduler(optimizer), known)
        except ConfigurationError as error:
            yield f"the options of group {at} are not valid here: {error}"


def _counted(state: Mapping[str, Any]) -> State:
    """The step count as a number, so that the file lists it with the parameter."""
    return {**state, "step": int(state["step"])} if state else {}


def _plain(value: Any) -> Any:
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    return value.item() if hasattr(value, "item") else value
