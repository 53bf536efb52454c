"""Ties schedules to an optimizer: in which forms they come, which go together, and taking back what was in vain.

A schedule may be given as a ParamSchedule or its spec, as a scheduler of torch or a function that makes one, and as a
dict in one of the forms that MMCV (`policy`) and mmengine (`type`) use.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch.optim
from torch import Tensor

from kvtrainer.errors import ArgumentTypeError, ConfigurationError, UnknownNameError
from kvtrainer.schedules.config import read_schedule
from kvtrainer.schedules.param_schedule import BoundSchedule, ParamSchedule, ScheduleSpec
from kvtrainer.schedules.torch_schedule import PlateauSchedule, TorchSchedule, bound_by, is_scheduler


def bind_schedules(
    given: Sequence[Any],
    optimizer: torch.optim.Optimizer,
    default_args: Mapping[str, Any] | None = None,
    bound_before: Sequence[BoundSchedule] = (),
) -> list[BoundSchedule]:
    """Tie schedules to an optimizer, in their order; those of the same value build on one another.

    Args:
        given: Each a ScheduleSpec (`ParamSchedule.unbound`), a dict with 'policy' or 'type', a function
            optimizer → scheduler, or something bound to this optimizer: a ParamSchedule or a scheduler of torch, or
            one that is used alike.
            `dict(scheduler=…, by='epoch')` says of a scheduler of torch that it goes by epoch, and not by step.
        optimizer: A torch.optim.Optimizer, so also a Trainer.
        default_args: max_epochs, max_iters and epoch_length, for dicts that do not say where they end.
        bound_before: What the optimizer has already; those of the same value are built on.

    Returns:
        What is to be advanced; a schedule by epoch whose warm-up goes by step is followed by the clock of that,
        unless that is given too, as by whoever binds what this returned.

    Raises:
        ArgumentTypeError: one is nothing of this.
        ConfigurationError: one does not fit the optimizer, or would undo what another one writes. In either case the
            groups are as before.
    """
    if isinstance(given, str) or not isinstance(given, Sequence):
        raise ArgumentTypeError(f"schedules must be a list of schedules, got {given!r:.80}")
    bound: list[BoundSchedule] = []
    made: list[BoundSchedule] = []
    last = {one.name: one for one in bound_before if isinstance(one, ParamSchedule)}
    with _kept_on_error(optimizer, made):
        for one in given:
            schedule = _bind(one, optimizer, default_args or {}, last)
            if schedule is not one:
                made.append(schedule)
            bound.append(schedule)
            if isinstance(schedule, ParamSchedule):
                last[schedule.name] = schedule
                clock = schedule.warmup_clock
                if clock is not None and not any(other is clock for other in given):
                    bound.append(clock)
        _fit_together([*bound_before, *bound])
    return bound


def build_param_schedules(
    cfg: Any, optimizer: Any, default_args: Mapping[str, Any] | None = None
) -> list[BoundSchedule] | dict[str, list[BoundSchedule]]:
    """Make the schedules of one optimizer, or of several by name, as mmengine's build_param_scheduler does.

    Args:
        cfg: One schedule or a list, as `bind_schedules` takes them. For several optimizers also a dict of these by the
            name of the optimizer; otherwise all get the same.
        optimizer: A torch.optim.Optimizer or a mapping of several by name.
        default_args: max_epochs, max_iters, epoch_length; read only.

    Raises:
        ArgumentTypeError: `optimizer` or a schedule is of a wrong type.
        ConfigurationError: an end is known neither from the schedule nor from `default_args`, or as `bind_schedules`.
    """
    if isinstance(optimizer, torch.optim.Optimizer):
        given = list(cfg) if isinstance(cfg, Sequence) and not isinstance(cfg, str) else [cfg]
        return bind_schedules(given, optimizer, default_args, getattr(optimizer, "schedules", ()))
    if not isinstance(optimizer, Mapping) or not optimizer:
        raise ArgumentTypeError(
            f"schedules need an optimizer or a mapping of several by name, got {type(optimizer).__name__}"
        )
    if not isinstance(cfg, Mapping) or {"type", "policy", "scheduler"} & set(cfg):
        cfg = dict.fromkeys(optimizer, cfg)
    if unknown := sorted(set(cfg) - set(optimizer)):
        raise UnknownNameError(
            f"there are schedules for {', '.join(map(repr, unknown))}, but the optimizers are "
            f"{', '.join(map(repr, optimizer))}"
        )
    made: dict[str, Any] = {
        name: build_param_schedules(one, optimizer[name], default_args) for name, one in cfg.items()
    }
    return made


def _bind(
    given: Any, optimizer: torch.optim.Optimizer, run: Mapping[str, Any], last: Mapping[str, ParamSchedule]
) -> BoundSchedule:
    one, by = given, None
    if isinstance(given, Mapping) and "scheduler" in given:
        one, by = given["scheduler"], given.get("by")
        if set(given) - {"scheduler", "by"} or given.get("by", "step") not in ("step", "epoch"):
            raise ConfigurationError(
                f"a dict with a scheduler has that and by='step' or 'epoch', got {given!r:.120}"
            )
    if isinstance(one, Mapping):
        one = read_schedule(one, run)
    if callable(one) and not is_scheduler(one):
        one = one(optimizer)
    if isinstance(one, ScheduleSpec):
        one = ParamSchedule(optimizer, one, after=last.get(one.name))
    if not is_scheduler(one):
        raise ArgumentTypeError(
            "a schedule is a ParamSchedule, a dict with 'policy' or 'type', a scheduler of torch or a function that "
            f"makes one of an optimizer; got {type(one).__name__}"
        )
    kind = type(one.scheduler if isinstance(one, TorchSchedule) else one).__name__
    if one.optimizer is not optimizer and one.optimizer.param_groups is not optimizer.param_groups:
        raise ConfigurationError(
            f"this {kind} is bound to another optimizer, a {type(one.optimizer).__name__}; give a function that makes "
            "it, or bind it to this one"
        )
    bound: BoundSchedule = bound_by(one, by or "step")
    if by not in (None, bound.by):
        raise ConfigurationError(f"by={by!r} is said of a {kind}, which goes by {bound.by!r} itself")
    return bound


def _fit_together(schedules: Sequence[BoundSchedule]) -> None:
    """Let what goes by a metric lower what schedules of the same value write.

    Raises:
        ConfigurationError: two would undo what the other one writes.
    """
    ours = [one for one in schedules if isinstance(one, ParamSchedule)]
    for at, one in enumerate(ours):
        if any(one.writes_beside(other) for other in ours[:at]):
            raise ConfigurationError(
                f"two schedules of {one.name!r} would each undo what the other one writes; give ParamSchedule.unbound("
                "…), or after=…, so that one builds on the other"
            )
    by_name = {one.name: one for one in reversed(ours)}
    for other in schedules:
        if isinstance(other, PlateauSchedule) and other.name in by_name:
            other.target = by_name[other.name].target
        if isinstance(other, TorchSchedule) and (both := sorted(other.names & set(by_name))):
            raise ConfigurationError(
                f"{type(other.scheduler).__name__} and a schedule of ours would each undo what the other one writes "
                f"as {both[0]!r}; give both as dicts or ParamSchedules, or both as schedulers of torch"
            )


@contextmanager
def _kept_on_error(optimizer: torch.optim.Optimizer, made: Sequence[BoundSchedule]) -> Iterator[None]:
    """Let a block bind schedules, and add them to `made`; if it raises, groups and former schedules are as before."""
    groups = list(getattr(optimizer, "param_groups", ()))
    before = [
        {key: value.clone() if isinstance(value, Tensor) else value for key, value in group.items()}
        for group in groups
    ]
    try:
        yield
    except BaseException:
        for one in made:
            if isinstance(one, ParamSchedule):
                one.unbind()
        for group, values in zip(groups, before, strict=True):
            for key in set(group) - set(values):
                del group[key]
            for key, value in values.items():
                if isinstance(value, Tensor) and isinstance(group.get(key), Tensor):
                    group[key].copy_(value)  # others may hold on to it
                else:
                    group[key] = value
        raise
