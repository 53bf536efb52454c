"""Between a Trainer and its saved states: what is taken out of it, whether states fit, and how they are taken over.

Beside options and the optimizer's state these are the loss scaler, schedules, the count of backward passes and what
compression has held back.
"""

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
from kvtrainer.scaling import scaler_from_state
from kvtrainer.states.convert import State, momentum_problems, state_problems
from kvtrainer.states.file import SavedParameter, SavedStates
from kvtrainer.step import StepPipeline
from kvtrainer.sync.binding import Residuals
from kvtrainer.types import Group

_log = logging.getLogger(__name__)

_OPTIMIZER, _SCALER, _RESIDUALS, _SCHEDULES, _PASSES = (
    "optimizer", "loss_scaler", "residuals", "schedules", "backward_passes"
)  # fmt: skip
"""The parts of saved states; `optimizer` is what its own state_dict has beside groups and the state of parameters."""
_CODE = "code"
"""What a description has instead of the scheduler's if that is a function, which cannot be saved."""
_ON_SERVERS = ("multi_precision", "begin_num_update")
"""Numbers of the optimizer that a store learns once, with the optimizer."""


def export_own_states(pipeline: StepPipeline) -> SavedStates:
    """Take out what is of this worker alone; nothing is fetched."""
    extra: dict[str, Any] = {}
    tensors: dict[str, dict[str, Tensor]] = {}
    if pipeline.loss_scaler is not None:
        extra[_SCALER] = pipeline.loss_scaler.state_dict()
    if pipeline.schedules:
        extra[_SCHEDULES] = [schedule.state_dict() for schedule in pipeline.schedules]
    if pipeline.accumulation.counts > 1:
        extra[_PASSES] = pipeline.accumulation.done
    residuals = pipeline.link.residuals()
    if residuals is not None:
        extra[_RESIDUALS] = {"rank": residuals.rank, "num_workers": residuals.num_workers}
        if residuals.copies:
            extra[_RESIDUALS]["devices"] = 1 + len(residuals.copies)
        for at, values in enumerate([residuals.values, *residuals.copies]):
            tensors[_section(at)] = {pipeline.memory.names[key]: value for key, value in values.items()}
    return SavedStates({}, 0, [], {}, extra, tensors)


def export_states(pipeline: StepPipeline) -> SavedStates:
    """Take out all that is to be saved; blocks while state is fetched."""
    own, groups, memory = export_own_states(pipeline), pipeline.groups, pipeline.memory
    extra, tensors = own.extra, own.tensors
    if (joint := pipeline.states.joint) is not None and any(shared := joint.shared()):
        extra, tensors = {**extra, _OPTIMIZER: shared[0]}, {**tensors, _OPTIMIZER: shared[1]}
    options = [
        {n: _plain(value) for n, value in kept_entries(group, groups.optimizer).items()}
        for group in groups.live
    ]
    states = pipeline.states.current()
    parameters = {
        spec.key: SavedParameter(spec.shape, spec.dtype, spec.group, _counted(states.get(key, {})))
        for key, spec in enumerate(memory.plan.specs)
    }
    described, num_update = _description(groups.optimizer), groups.optimizer.num_update
    return SavedStates(described, num_update, options, parameters, extra, tensors)


def check_fit(saved: SavedStates, pipeline: StepPipeline) -> None:
    """Raise StateMismatchError, which names every difference, unless the states fit this Trainer."""
    groups, optimizer, memory = pipeline.groups.live, pipeline.groups.optimizer, pipeline.memory
    problems = [
        *_optimizer_problems(saved.optimizer, optimizer, pipeline.states.is_in_store),
        *_parameter_problems(saved, memory),
        *_group_problems(saved, groups, memory, optimizer),
    ]
    # Entries mean something only where the parameters agree.
    common = {
        key: saved.parameters[spec.key].state
        for key, spec in enumerate(memory.plan.specs)
        if spec.key in saved.parameters and saved.parameters[spec.key].shape == spec.shape
    }
    states = {key: state for key, state in common.items() if state}
    rows = [saved.groups[p.group] if p else {} for p in map(saved.parameters.get, memory.names)]
    problems += momentum_problems(states, saved.groups, optimizer)
    problems += state_problems(states, rows, memory.plan, optimizer)
    problems += [*_scaler_problems(saved, pipeline), *_schedule_problems(saved, pipeline)]
    problems += _residual_problems(saved, memory)
    if problems:
        raise StateMismatchError(
            f"the saved states do not fit this Trainer, which is unchanged: {'; '.join(problems)}. Load the states of "
            "the same model, groups and optimizer"
        )


def as_state_dict(saved: SavedStates, names: Sequence[str]) -> dict[str, Any]:
    """The options and states in the form of torch's state_dict; parameters are numbered in the order of `names`."""
    groups: list[dict[str, Any]] = [{**options, "params": []} for options in saved.groups]
    for at, name in enumerate(names):
        groups[saved.parameters[name].group]["params"].append(at)
    states = {at: saved.parameters[name].state for at, name in enumerate(names)}
    # The count is the store's: a class that keeps one of its own has that under another name, unless it keeps none.
    return {
        "state": {at: {OWN_COUNT: None, **state} for at, state in states.items() if state},
        "param_groups": groups,
        **saved.extra.get(_OPTIMIZER, {}),
        **saved.tensors.get(_OPTIMIZER, {}),
    }


def adopt_rest(saved: SavedStates, pipeline: StepPipeline) -> None:
    """Take over what is not in a state_dict: numbers of the optimizer as a whole, and what other parts have saved."""
    _adopt_numbers(pipeline.groups.optimizer, saved)
    if _SCALER in saved.extra:
        scaler = scaler_from_state(saved.extra[_SCALER])
        if scaler is not None and pipeline.loss_scaler is not None:
            # It knows which scale the present gradients carry, and the script may hold on to it.
            pipeline.loss_scaler.load_state_dict(saved.extra[_SCALER])
        elif scaler is not None:
            pipeline.loss_scaler = scaler
    for schedule, state in zip(pipeline.schedules, saved.extra.get(_SCHEDULES, ()), strict=False):
        schedule.load_state_dict(state)
    passes, accumulation = saved.extra.get(_PASSES), pipeline.accumulation
    if passes is not None and accumulation.counts > 1:
        accumulation.set_progress(passes, accumulation.total)
    pipeline.link.take_residuals(saved_residuals(saved, pipeline.memory.names))


def saved_residuals(saved: SavedStates, names: Sequence[str]) -> Residuals | None:
    """The residuals that were saved; None if there were none."""
    place = saved.extra.get(_RESIDUALS)
    if place is None:
        return None
    sections = [saved.tensors.get(_section(at), {}) for at in range(place.get("devices", 1))]
    first, *others = [
        {key: values[name] for key, name in enumerate(names) if name in values} for values in sections
    ]
    return Residuals(place["rank"], place["num_workers"], first, others)


def _adopt_numbers(optimizer: Optimizer, saved: SavedStates) -> None:
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


def _parameter_problems(saved: SavedStates, memory: Memory) -> Iterator[str]:
    specs = {spec.key: spec for spec in memory.plan.specs}
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
    saved: SavedStates, groups: Sequence[Group], memory: Memory, optimizer: Optimizer
) -> Iterator[str]:
    if len(saved.groups) != len(groups):
        yield f"the file has {len(saved.groups)} parameter groups, this Trainer has {len(groups)}"
    for spec in memory.plan.specs:
        parameter = saved.parameters.get(spec.key)
        if parameter is not None and parameter.group != spec.group:
            yield f"{spec.key!r} is in group {parameter.group} in the file and in group {spec.group} here"
    for at, options in enumerate(saved.groups):
        known = {name: options[name] for name in option_names(optimizer) if name in options}
        try:
            check_options(_without_scheduler(optimizer), known)
        except ConfigurationError as error:
            yield f"the options of group {at} are not valid here: {error}"


def _scaler_problems(saved: SavedStates, pipeline: StepPipeline) -> Iterator[str]:
    mine = pipeline.loss_scaler
    try:
        if _SCALER in saved.extra and scaler_from_state(saved.extra[_SCALER]) and mine is not None:
            copy.deepcopy(mine).load_state_dict(saved.extra[_SCALER])
    except ConfigurationError as error:
        yield f"{'the saved loss scaler' if mine is None else type(mine).__name__}: {error}"


def _schedule_problems(saved: SavedStates, pipeline: StepPipeline) -> Iterator[str]:
    """Differences of what counts steps and passes."""
    schedules, accumulation = pipeline.schedules, pipeline.accumulation
    has = saved.extra.get(_SCHEDULES, [])
    if not isinstance(has, list) or not all(isinstance(state, dict) for state in has):
        yield f"schedules must be a list of states, the file has {has!r:.80}"
    elif has and len(has) != len(schedules):
        yield f"the file has the state of {len(has)} schedules, this Trainer has {len(schedules)}"
    else:
        for schedule, state in zip(schedules, has, strict=False):
            try:
                schedule.check_state_dict(state)
            except StateMismatchError as error:
                yield str(error)
    passes = saved.extra.get(_PASSES, 0)
    if not isinstance(passes, int) or passes < 0:
        yield f"backward_passes must be a count, the file has {passes!r:.80}"
    elif accumulation.counts > 1 and passes > (accumulation.total or passes):
        yield f"the file was saved after {passes} backward passes, this Trainer has {accumulation.total} in all"


def _residual_problems(saved: SavedStates, memory: Memory) -> Iterator[str]:
    place = saved.extra.get(_RESIDUALS, {"rank": 0, "num_workers": 0})
    if not isinstance(place, dict) or set(place) - {"devices"} != {"rank", "num_workers"}:
        yield f"residuals need the rank and num_workers of their worker, the file has {place!r:.80}"
    shapes = {spec.key: spec.shape for spec in memory.plan.specs}
    sections = [members for part, members in saved.tensors.items() if part.startswith(_RESIDUALS)]
    for name, value in (item for members in sections for item in members.items()):
        if name not in shapes:
            yield f"the file has a residual of {name!r}, which is no parameter here"
        elif tuple(value.shape) != shapes[name]:
            here = list(shapes[name])
            yield f"the residual of {name!r} has shape {list(value.shape)} in the file and {here} here"


def _section(device: int) -> str:
    """Where the residuals of the replicas on a device (by position) are kept."""
    return f"{_RESIDUALS} {device}" if device else _RESIDUALS


def _counted(state: Mapping[str, Any]) -> State:
    """The step count as a number, so that the file lists it with the parameter."""
    return {**state, "step": int(state["step"])} if state else {}


def _plain(value: Any) -> Any:
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    return value.item() if hasattr(value, "item") else value
