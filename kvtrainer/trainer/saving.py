"""Saved states of a Trainer: collect them, check whether they fit, and restore them."""

from __future__ import annotations

import copy
import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from kvstore_server.check import is_number
from kvstore_server.optimizer import Optimizer, lr_scheduler
from kvstore_server.optimizer.torch_family import OWN_COUNT, is_plain_torch_option
from kvstore_server.optimizer.trees import decode_tree_entry, unflatten_trees
from kvtrainer.errors import ConfigurationError, StateMismatchError
from kvtrainer.options.loss_scaler import loss_scaler_from_state
from kvtrainer.states.format import (
    HISTORY,
    SavedParameter,
    SavedStates,
    TableMark,
    encode_state_entry,
    history_of_file,
    saved_state_problems,
)
from kvtrainer.sync.binding import WorkerResiduals
from kvtrainer.trainer.groups import group_option_problems, kept_entries, plain_number
from kvtrainer.trainer.step import StepPipeline

_log = logging.getLogger(__name__)

_OPTIMIZER, _SCALER, _RESIDUALS, _SCHEDULES, _PASSES = (
    "optimizer", "loss_scaler", "residuals", "schedules", "backward_passes"
)  # fmt: skip
"""Parts of saved states. `optimizer` has what its own state_dict contains beside groups and the state of parameters."""
_CODE = "code"
"""Stands for a scheduler that is a function, which cannot be saved."""
_ON_SERVERS = ("multi_precision", "begin_num_update")
"""Options that a store gets once, with the optimizer."""


def export_own_states(pipeline: StepPipeline) -> SavedStates:
    """Return the states that only this worker has; nothing is fetched."""
    extra = export_parts(pipeline)
    tensors: dict[str, dict[str, Tensor]] = {}
    residuals = pipeline.binding.residuals()
    if residuals is not None:
        extra[_RESIDUALS] = {"rank": residuals.rank, "num_workers": residuals.num_workers}
        if len(residuals.values) > 1:
            extra[_RESIDUALS]["devices"] = len(residuals.values)
        for at, values in enumerate(residuals.values):
            tensors[_saved_residual_section(at)] = {
                pipeline.memory.names[key]: value for key, value in values.items()
            }
    return SavedStates({}, 0, [], {}, extra, tensors)


def export_parts(pipeline: StepPipeline) -> dict[str, Any]:
    """Return the loss scaler, the schedules, and the count of backward passes, for `SavedStates.extra`."""
    extra: dict[str, Any] = {}
    if pipeline.loss_scaler is not None:
        extra[_SCALER] = pipeline.loss_scaler.state_dict()
    if pipeline.schedules:
        extra[_SCHEDULES] = [schedule.state_dict() for schedule in pipeline.schedules]
    if pipeline.accumulation.counts > 1:
        extra[_PASSES] = pipeline.accumulation.done
    return extra


def export_trainer_states(pipeline: StepPipeline, since: Mapping[str, int] | None = None) -> SavedStates:
    """Collect what `save_states` writes: optimizer, options, state by parameter, loss scale, schedules and counts.

    The tensors are those in use, not copies.

    Args:
        since: Hash table → a step: only rows that were updated after it, and the numbers of all rows.
    """
    own, optimizer = export_own_states(pipeline), pipeline.groups.optimizer
    if (joint := pipeline.states.joint) is not None and any(shared := joint.shared()):
        plain_values, own.tensors[_OPTIMIZER] = shared
        of = f"{type(joint.instance).__name__}.state_dict()"
        own.extra[_OPTIMIZER] = {
            name: encode_state_entry(of, name, value) for name, value in plain_values.items()
        }
    options = [
        {name: plain_number(value) for name, value in kept_entries(group, optimizer).items()}
        for group in pipeline.groups.live
    ]
    specs, marks = pipeline.memory.plan.specs, dict[int, TableMark]()
    steps = {key: since[spec.key] for key, spec in enumerate(specs) if since and spec.key in since}
    states, parameters = pipeline.states.current(None, steps, marks), {}
    for key, spec in enumerate(specs):
        # A plain number, so that the file's header lists the step count with the parameter.
        state = {**states[key], "step": int(states[key]["step"])} if key in states else {}
        table = None if spec.hash_table is None else spec.hash_table._asdict()
        parameters[spec.key] = SavedParameter(spec.shape, spec.dtype, spec.group, state, table)
    described, num_update = _describe_saved_optimizer(optimizer), optimizer.num_update
    return SavedStates(
        described,
        num_update,
        options,
        parameters,
        own.extra,
        own.tensors,
        marks={specs[key].key: mark for key, mark in marks.items()},
    )


def check_fit(saved: SavedStates, pipeline: StepPipeline) -> None:
    """Raise StateMismatchError unless the states fit this Trainer; the message names every difference."""
    problems = [
        *_saved_optimizer_problems(saved.optimizer, pipeline),
        *_saved_parameter_problems(saved, pipeline),
        *_saved_part_problems(saved, pipeline),
    ]
    if problems:
        raise StateMismatchError(
            f"the saved states do not fit this Trainer, which is unchanged: {'; '.join(problems)}. Load the states of "
            "the same model, groups and optimizer"
        )


def as_state_dict(saved: SavedStates, names: Sequence[str]) -> dict[str, Any]:
    """Return options and states in the form of torch's state_dict; parameters are numbered in order of `names`."""
    groups: list[dict[str, Any]] = [{**options, "params": []} for options in saved.groups]
    for at, name in enumerate(names):
        groups[saved.parameters[name].group]["params"].append(at)
    states = {at: saved.parameters[name].state for at, name in enumerate(names)}
    if saved.identity:
        history = history_of_file(saved.identity)
        tables = [at for at, name in enumerate(names) if name in saved.hash_tables and states[at]]
        states |= {at: {**states[at], HISTORY: history} for at in tables}
    saved_rest = {name: decode_tree_entry(value) for name, value in saved.extra.get(_OPTIMIZER, {}).items()}
    # "step" is the store's count. A torch class's own count is saved as OWN_COUNT; None if it keeps none.
    return {
        "state": {at: {OWN_COUNT: None, **state} for at, state in states.items() if state},
        "param_groups": groups,
        **unflatten_trees({**saved_rest, **saved.tensors.get(_OPTIMIZER, {})}),
    }


def adopt_other_saved_states(saved: SavedStates, pipeline: StepPipeline) -> None:
    """Restore what is not in a state_dict: options of the optimizer as a whole, and other parts of the Trainer."""
    # 1. The optimizer, and its scheduler.
    optimizer = pipeline.groups.optimizer
    for name in ("rescale_grad", "aggregate_num", *_ON_SERVERS):
        setattr(optimizer, name, saved.optimizer.get(name, getattr(Optimizer, name, None)))
    optimizer.num_update = saved.num_update
    theirs = saved.optimizer.get("lr_scheduler")
    if theirs is None and optimizer.lr_scheduler is not None:
        _log.warning(
            "the states were saved without lr_scheduler, so %r is not used any more", optimizer.lr_scheduler
        )
        optimizer.lr_scheduler = None
    elif theirs not in (None, _CODE, _describe_saved_optimizer(optimizer).get("lr_scheduler")):
        optimizer.lr_scheduler = lr_scheduler.create_scheduler_from_spec(theirs)
    # 2. The loss scaler, schedules and counts; residuals.
    adopt_parts(saved.extra, pipeline)
    pipeline.binding.take_residuals(saved_residuals(saved, pipeline.memory.names))


def adopt_parts(extra: Mapping[str, Any], pipeline: StepPipeline) -> None:
    """Restore the loss scaler, the schedules, and the count of backward passes, as in `SavedStates.extra`."""
    if _SCALER in extra:
        if pipeline.loss_scaler is None:
            pipeline.loss_scaler = loss_scaler_from_state(extra[_SCALER])
        else:
            # Keep the object: it knows the scale of the present gradients, and the script may have a reference.
            pipeline.loss_scaler.load_state_dict(extra[_SCALER])
    for schedule, state in zip(pipeline.schedules, extra.get(_SCHEDULES, ()), strict=False):
        schedule.load_state_dict(state)
    passes, accumulation = extra.get(_PASSES), pipeline.accumulation
    if passes is not None and accumulation.counts > 1:
        accumulation.set_progress(passes, accumulation.total)


def saved_residuals(saved: SavedStates, names: Sequence[str]) -> WorkerResiduals | None:
    place = saved.extra.get(_RESIDUALS)
    if place is None:
        return None
    sections = [saved.tensors.get(_saved_residual_section(at), {}) for at in range(place.get("devices", 1))]
    found = [{key: values[name] for key, name in enumerate(names) if name in values} for values in sections]
    return WorkerResiduals(place["rank"], place["num_workers"], found)


def _saved_residual_section(device: int) -> str:
    return f"{_RESIDUALS} {device}" if device else _RESIDUALS


def _describe_saved_optimizer(optimizer: Optimizer) -> dict[str, Any]:
    """Return `Optimizer.spec`, also if the scheduler is code."""
    described = optimizer.without_scheduler().spec()
    # Options that are not plain are left out: the groups, which are saved separately, have them.
    described["hyper"] = {
        name: value for name, value in described["hyper"].items() if is_plain_torch_option(value)
    }
    if optimizer.lr_scheduler is not None:
        try:
            described["lr_scheduler"] = optimizer.lr_scheduler.spec()
        except ConfigurationError:
            described["lr_scheduler"] = _CODE
    return described


def _saved_optimizer_problems(saved: Mapping[str, Any], pipeline: StepPipeline) -> Iterator[str]:
    optimizer = pipeline.groups.optimizer
    mine = _describe_saved_optimizer(optimizer)
    for name in _ON_SERVERS if pipeline.states.is_in_store else ():
        default = getattr(Optimizer, name, None)
        theirs, ours = saved.get(name, default), mine.get(name, default)
        if theirs != ours:
            yield (
                f"{name} is {theirs} in the file and {ours} here, but the kvstore already has the optimizer; load "
                "before the first step"
            )
    factor = saved.get("rescale_grad")
    if not (is_number(factor) and abs(factor) <= sys.float_info.max):  # an int may be beyond floats
        yield f"rescale_grad must be a finite number, the file has {factor!r:.80}"
    scheduler = saved.get("lr_scheduler")
    if scheduler == _CODE and optimizer.lr_scheduler is None:
        yield "the lr_scheduler was a function, which is not saved, so give the Trainer the same lr_scheduler"
    elif scheduler not in (None, _CODE):
        try:
            lr_scheduler.create_scheduler_from_spec(scheduler)
        except ConfigurationError as error:
            yield f"the lr_scheduler cannot be made here: {error}"


def _saved_parameter_problems(saved: SavedStates, pipeline: StepPipeline) -> Iterator[str]:
    groups, optimizer, plan = pipeline.groups.live, pipeline.groups.optimizer, pipeline.memory.plan
    if len(saved.groups) != len(groups):
        yield f"the file has {len(saved.groups)} parameter groups, this Trainer has {len(groups)}"
    for spec in plan.specs:
        theirs = saved.parameters.get(spec.key)
        if theirs is not None and theirs.group != spec.group:
            yield f"{spec.key!r} is in group {theirs.group} in the file and in group {spec.group} here"
    yield from group_option_problems(saved.groups, optimizer)
    yield from saved_state_problems(saved, plan.specs, optimizer, "parameters", "this Trainer")


def _saved_part_problems(saved: SavedStates, pipeline: StepPipeline) -> Iterator[str]:
    # 1. The loss scaler, tried on a copy.
    scaler, schedules, accumulation = pipeline.loss_scaler, pipeline.schedules, pipeline.accumulation
    try:
        if _SCALER in saved.extra and loss_scaler_from_state(saved.extra[_SCALER]) and scaler is not None:
            copy.deepcopy(scaler).load_state_dict(saved.extra[_SCALER])
    except ConfigurationError as error:
        yield f"{'the saved loss scaler' if scaler is None else type(scaler).__name__}: {error}"
    # 2. Schedules.
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
    try:
        own = {name: decode_tree_entry(value) for name, value in saved.extra.get(_OPTIMIZER, {}).items()}
        unflatten_trees({**own, **saved.tensors.get(_OPTIMIZER, {})})
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
        yield f"the optimizer's own saved values cannot be read ({type(error).__name__}: {error})"
    # 3. The count of backward passes.
    passes = saved.extra.get(_PASSES, 0)
    if type(passes) is not int or passes < 0:
        yield f"backward_passes must be a count, the file has {passes!r:.80}"
    elif accumulation.counts > 1 and passes > (accumulation.total or passes):
        yield f"the file was saved after {passes} backward passes, this Trainer has {accumulation.total} in all"
    # 4. Residuals.
    place = saved.extra.get(_RESIDUALS, {"rank": 0, "num_workers": 0})
    if not isinstance(place, dict) or set(place) - {"devices"} != {"rank", "num_workers"}:
        yield f"residuals need the rank and num_workers of their worker, the file has {place!r:.80}"
    shapes = {spec.key: spec.shape for spec in pipeline.memory.plan.specs}
    sections = [members for part, members in saved.tensors.items() if part.startswith(_RESIDUALS)]
    for name, value in (item for members in sections for item in members.items()):
        if name not in shapes:
            yield f"the file has a residual of {name!r}, which is not a parameter here"
        elif tuple(value.shape) != shapes[name]:
            here = list(shapes[name])
            yield f"the residual of {name!r} has shape {list(value.shape)} in the file and {here} here"
