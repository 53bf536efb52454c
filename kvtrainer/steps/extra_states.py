"""What a Trainer saves beside options and optimizer state: loss scaler, schedules, counts, residuals."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from kvtrainer.errors import ConfigurationError, StateMismatchError
from kvtrainer.memory.memory import Memory
from kvtrainer.scaling import LossScaler, scaler_from_state
from kvtrainer.schedules.param_schedule import BoundSchedule
from kvtrainer.states.saved import SavedStates
from kvtrainer.steps.accumulation import Accumulation
from kvtrainer.sync.binding import Residuals

_SCALER, _RESIDUALS, _SCHEDULES, _PASSES = "loss_scaler", "residuals", "schedules", "backward_passes"
"""The parts of saved states."""


def extra_states(
    scaler: LossScaler | None,
    residuals: Residuals | None,
    names: Sequence[str],
    schedules: Sequence[BoundSchedule] = (),
    passes: int | None = None,
) -> tuple[dict[str, Any], dict[str, dict[str, Tensor]]]:
    """Plain values and tensors by part, as SavedStates keeps them.

    Args:
        names: of the parameters.
        passes: backward passes so far, where they are accumulated; else None.
    """
    extra: dict[str, Any] = {}
    tensors: dict[str, dict[str, Tensor]] = {}
    if scaler is not None:
        extra[_SCALER] = scaler.state_dict()
    if schedules:
        extra[_SCHEDULES] = [schedule.state_dict() for schedule in schedules]
    if passes is not None:
        extra[_PASSES] = passes
    if residuals is not None:
        extra[_RESIDUALS] = {"rank": residuals.rank, "num_workers": residuals.num_workers}
        if residuals.copies:
            extra[_RESIDUALS]["devices"] = 1 + len(residuals.copies)
        for at, values in enumerate([residuals.values, *residuals.copies]):
            tensors[_section(at)] = {names[key]: value for key, value in values.items()}
    return extra, tensors


def extra_problems(
    saved: SavedStates,
    layout: Memory,
    schedules: Sequence[BoundSchedule] = (),
    scaler: LossScaler | None = None,
    accumulation: Accumulation | None = None,
) -> list[str]:
    """Why these parts could not be taken over; nothing changes."""
    problems = []
    try:
        if saved_scaler(saved) is not None and scaler is not None:
            copy.deepcopy(scaler).load_state_dict(saved_scaler_state(saved))
    except ConfigurationError as error:
        problems.append(f"{'the saved loss scaler' if scaler is None else type(scaler).__name__}: {error}")
    has = saved.extra.get(_SCHEDULES, [])
    if not isinstance(has, list) or not all(isinstance(state, dict) for state in has):
        problems.append(f"schedules must be a list of states, the file has {has!r:.80}")
    elif has and len(has) != len(schedules):
        problems.append(f"the file has the state of {len(has)} schedules, this Trainer has {len(schedules)}")
    else:
        for schedule, state in zip(schedules, has, strict=False):
            try:
                schedule.check_state_dict(state)
            except StateMismatchError as error:
                problems.append(str(error))
    passes = saved.extra.get(_PASSES, 0)
    if not isinstance(passes, int) or passes < 0:
        problems.append(f"backward_passes must be a count, the file has {passes!r:.80}")
    elif accumulation is not None and accumulation.counts > 1 and passes > (accumulation.total or passes):
        problems.append(
            f"the file was saved after {passes} backward passes, this Trainer has {accumulation.total} in all"
        )
    place = saved.extra.get(_RESIDUALS, {"rank": 0, "num_workers": 0})
    if not isinstance(place, dict) or set(place) - {"devices"} != {"rank", "num_workers"}:
        problems.append(
            f"residuals need the rank and num_workers of their worker, the file has {place!r:.80}"
        )
    shapes = {spec.key: spec.shape for spec in layout.plan.specs}
    sections = [members for part, members in saved.tensors.items() if part.startswith(_RESIDUALS)]
    for name, value in (item for members in sections for item in members.items()):
        if name not in shapes:
            problems.append(f"the file has a residual of {name!r}, which is no parameter here")
        elif tuple(value.shape) != shapes[name]:
            problems.append(
                f"the residual of {name!r} has shape {list(value.shape)} in the file and {list(shapes[name])} here"
            )
    return problems


def saved_scaler(saved: SavedStates) -> LossScaler | None:
    """The loss scaler as it was saved; None if there was none.

    Raises:
        ConfigurationError: its numbers are impossible.
    """
    if _SCALER not in saved.extra:
        return None
    return scaler_from_state(saved.extra[_SCALER])


def saved_scaler_state(saved: SavedStates) -> Mapping[str, Any]:
    """The numbers of the loss scaler as they were saved."""
    state: Mapping[str, Any] = saved.extra[_SCALER]
    return state


def saved_schedules(saved: SavedStates) -> list[dict[str, Any]]:
    """The states of the schedules that were saved; empty if there were none."""
    return list(saved.extra.get(_SCHEDULES, []))


def saved_passes(saved: SavedStates) -> int | None:
    """How many backward passes there had been; None where they were not accumulated."""
    passes: int | None = saved.extra.get(_PASSES)
    return passes


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


def _section(device: int) -> str:
    """Where the residuals of the replicas on a device (by position) are kept."""
    return f"{_RESIDUALS} {device}" if device else _RESIDUALS
