"""From what a configuration or a script says to schedules of an optimizer.

A schedule may be given as a ParamSchedule or its spec, as a scheduler of torch or a function that makes one, and as a
dict in one of the forms that MMCV (`policy`) and mmengine (`type`) use.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch.optim

from kvstore_server.errors import did_you_mean
from kvtrainer.errors import ArgumentTypeError, ConfigurationError, UnknownNameError, UnregisteredNameError
from kvtrainer.schedules.bound_torch import PlateauSchedule, TorchSchedule
from kvtrainer.schedules.checks import check_owner, fit_together, is_bound, kept_on_error
from kvtrainer.schedules.param_schedule import BoundSchedule, ParamSchedule, WarmupClock
from kvtrainer.schedules.spec import ScheduleSpec
from kvtrainer.schedules.types import from_type

__all__ = [
    "bind_schedules",
    "build_param_schedules",
    "detectron_schedule",
    "schedule_from_lr_config",
    "schedule_from_momentum_config",
]

_RUN = ("max_epochs", "max_iters", "epoch_length")
_WARMUP = ("warmup", "warmup_iters", "warmup_ratio", "warmup_by_epoch")
_WARMUP_OF_MOMENTUM = 0.9
"""Where a warm-up of momentum begins unless it is said otherwise."""
_STEPWISE = ("cyclic", "onecycle")
"""Policies that MMCV has by iteration only."""
_DETECTRON = ("step", "steps_with_decay", "steps_with_lrs", "cosine_decay", "exp_decay")


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
    run = _run_of(default_args)
    bound: list[BoundSchedule] = []
    last = {one.name: one for one in bound_before if isinstance(one, ParamSchedule)}
    made: list[BoundSchedule] = []
    with kept_on_error(optimizer, made):
        for one in given:
            schedule = _bind(one, optimizer, run, last)
            if schedule is not one:
                made.append(schedule)
            _check_by(one, schedule)
            bound.append(schedule)
            if isinstance(schedule, ParamSchedule):
                last[schedule.name] = schedule
                clock = schedule.warmup_clock
                if clock is not None and not any(other is clock for other in given):
                    bound.append(clock)
        fit_together([*bound_before, *bound])
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
        return _bind_more(cfg, optimizer, default_args)
    if not isinstance(optimizer, Mapping) or not optimizer:
        raise ArgumentTypeError(
            f"schedules need an optimizer or a mapping of several by name, got {type(optimizer).__name__}"
        )
    is_by_name = isinstance(cfg, Mapping) and not {"type", "policy", "scheduler"} & set(cfg)
    if is_by_name and (unknown := sorted(set(cfg) - set(optimizer))):
        raise UnknownNameError(
            f"there are schedules for {', '.join(map(repr, unknown))}, but the optimizers are "
            f"{', '.join(map(repr, optimizer))}"
        )
    if is_by_name:
        return {name: _bind_more(one, optimizer[name], default_args) for name, one in cfg.items()}
    return {name: _bind_more(cfg, one, default_args) for name, one in optimizer.items()}


def schedule_from_lr_config(
    cfg: Mapping[str, Any],
    *,
    max_epochs: int | None = None,
    max_iters: int | None = None,
    epoch_length: int | None = None,
) -> ScheduleSpec:
    """MMCV's lr_config: `policy`, its options, `by_epoch` (True), and the warm-up.

    Args:
        cfg: Read only. `end` in it stands for max_epochs or max_iters.
        max_epochs, max_iters: How long training will be, as `by_epoch` says.
        epoch_length: Updates in an epoch, for `warmup_by_epoch`: the warm-up then goes on within an epoch, as in MMCV.
            Without it that warm-up goes from epoch to epoch.

    Raises:
        ConfigurationError: an option is unknown or wrong, or the policy needs an end that is not known.
    """
    run = {"max_epochs": max_epochs, "max_iters": max_iters, "epoch_length": epoch_length}
    return _from_policy({**cfg, "name": "lr"}, run)


def schedule_from_momentum_config(
    cfg: Mapping[str, Any],
    *,
    max_epochs: int | None = None,
    max_iters: int | None = None,
    epoch_length: int | None = None,
) -> ScheduleSpec:
    """MMCV's momentum_config; everything as in `schedule_from_lr_config`."""
    run = {"max_epochs": max_epochs, "max_iters": max_iters, "epoch_length": epoch_length}
    return _from_policy({**cfg, "name": "momentum"}, run)


def detectron_schedule(solver: Mapping[str, Any]) -> ScheduleSpec:
    """The learning rate that Detectron's SOLVER keys say, by step; its defaults where they are missing.

    Args:
        solver: LR_POLICY, BASE_LR, GAMMA, STEP_SIZE, STEPS, LRS, MAX_ITER, WARM_UP_ITERS, WARM_UP_FACTOR,
            WARM_UP_METHOD; other keys are for others.

    Raises:
        UnregisteredNameError: the policy or the warm-up is none of Detectron's.
        ConfigurationError: a value is missing or impossible, such as STEPS that do not begin at 0.
    """
    policy = solver.get("LR_POLICY", "step")
    if policy not in _DETECTRON:
        hint = did_you_mean(policy, _DETECTRON)
        raise UnregisteredNameError(f"LR_POLICY must be one of {', '.join(_DETECTRON)}, got {policy!r}{hint}")
    gamma = solver.get("GAMMA", 0.1)
    steps = list(solver.get("STEPS", ()))
    if policy in ("steps_with_decay", "steps_with_lrs") and (not steps or steps[0] != 0):
        raise ConfigurationError(f"STEPS must begin at 0, got {steps!r}")
    choices: dict[str, Callable[[], tuple[str, dict[str, Any]]]] = {
        "step": lambda: ("step", {"every": solver.get("STEP_SIZE", 30000), "gamma": gamma}),
        "steps_with_decay": lambda: (
            ("step", {"every": steps[1:], "gamma": gamma}) if steps[1:] else ("fixed", {})
        ),
        "steps_with_lrs": lambda: (
            "steps_with_lrs",
            {
                "steps": steps,
                "values": list(solver.get("LRS", ())),
                "reference": solver.get("BASE_LR", 0.001),
            },
        ),
        "cosine_decay": lambda: ("CosineAnnealing", {"minimum": 0.0}),
        "exp_decay": lambda: ("exp_decay", {"gamma": gamma}),
    }
    name, options = choices[policy]()
    method, iterations = solver.get("WARM_UP_METHOD", "linear"), solver.get("WARM_UP_ITERS", 500)
    if iterations and method not in ("constant", "linear"):
        raise UnregisteredNameError(f"WARM_UP_METHOD must be 'constant' or 'linear', got {method!r}")
    warm = {
        "warmup": method,
        "warmup_iters": iterations,
        "warmup_ratio": solver.get("WARM_UP_FACTOR", 1.0 / 3.0),
    }
    return ParamSchedule.unbound(
        "lr", name, by="step", end=solver.get("MAX_ITER", 40000), **(warm if iterations else {}), **options
    )


def _bind(
    one: Any, optimizer: torch.optim.Optimizer, run: Mapping[str, Any], last: Mapping[str, ParamSchedule]
) -> BoundSchedule:
    by = "step"
    if isinstance(one, Mapping) and "scheduler" in one:
        if set(one) - {"scheduler", "by"} or one.get("by", "step") not in ("step", "epoch"):
            raise ConfigurationError(
                f"a dict with a scheduler has that and by='step' or 'epoch', got {dict(one)!r:.120}"
            )
        one, by = one["scheduler"], one.get("by", "step")
    if isinstance(one, Mapping):
        one, by = _read(one, run)
    if isinstance(one, ScheduleSpec):
        return ParamSchedule.bound(one, optimizer, after=last.get(one.name))
    if callable(one) and not is_bound(one):
        one = one(optimizer)
    if isinstance(one, ScheduleSpec):
        return ParamSchedule.bound(one, optimizer, after=last.get(one.name))
    if not is_bound(one):
        raise ArgumentTypeError(
            "a schedule is a ParamSchedule, a dict with 'policy' or 'type', a scheduler of torch or a function that "
            f"makes one of an optimizer; got {type(one).__name__}"
        )
    check_owner(one, optimizer)
    if isinstance(one, ParamSchedule | PlateauSchedule | TorchSchedule | WarmupClock):
        return one
    return TorchSchedule(one, "epoch" if getattr(one, "by_epoch", False) is True else by)


def _check_by(given: Any, schedule: BoundSchedule) -> None:
    """Raise ConfigurationError if it was said of it that it goes by something else than it does."""
    if isinstance(given, Mapping) and "scheduler" in given and given.get("by", schedule.by) != schedule.by:
        raise ConfigurationError(
            f"by={given['by']!r} is said of a {type(given['scheduler']).__name__}, which goes by {schedule.by!r} itself"
        )


def _read(cfg: Mapping[str, Any], run: Mapping[str, Any]) -> tuple[ScheduleSpec | Callable[..., Any], str]:
    if "run" in cfg:  # a configuration's own length
        run = {**run, **cfg["run"]}
        cfg = {key: value for key, value in cfg.items() if key != "run"}
    if "policy" in cfg:
        return _from_policy(cfg, run), "step"
    if "type" in cfg:
        return from_type(cfg, run)
    raise ConfigurationError(f"a schedule as a dict has 'policy' or 'type', got {dict(cfg)!r:.120}")


def _from_policy(cfg: Mapping[str, Any], run: Mapping[str, Any]) -> ScheduleSpec:
    """MMCV's form: everything that is neither about when nor about the warm-up is an option of the policy."""
    rest = dict(cfg)
    policy, name = rest.pop("policy", None), rest.pop("name", "lr")
    if not isinstance(policy, str):
        raise ConfigurationError(f"a schedule needs the name of its policy, got {policy!r}")
    known = {key: rest.pop(key, run.get(key)) for key in _RUN}
    is_stepwise = policy.replace("_", "").lower() in _STEPWISE
    by_epoch = _goes_by_epoch(rest, not is_stepwise)
    if by_epoch and is_stepwise:
        raise ConfigurationError(f"the policy {policy!r} goes by step; leave by_epoch out, or give False")
    of_run = known["max_epochs"] if by_epoch else _max_iters(known)
    end = of_run if (given := rest.pop("end", None)) is None else given
    when = {key: rest.pop(key) for key in ("begin", "groups") if key in rest}
    warm = {key: rest.pop(key) for key in _WARMUP if key in rest}
    if name == "momentum" and "warmup" in warm:
        warm.setdefault("warmup_ratio", _WARMUP_OF_MOMENTUM)
    length = known["epoch_length"]
    if length is not None and warm.get("warmup_by_epoch"):
        warm |= {"warmup_iters": warm.get("warmup_iters", 0) * length, "warmup_by_epoch": False}
    # Epochs may differ in length, so they are counted wherever that will do.
    if not (by_epoch and warm.get("warmup") and when.get("begin")):
        length = None
    return ScheduleSpec(
        name,
        policy,
        "epoch" if by_epoch else "step",
        end=end,
        epoch_length=length,
        **when,
        **warm,
        options=rest,
    )


def _goes_by_epoch(cfg: dict[str, Any], default: bool) -> bool:
    """Take `by_epoch`, or `by`, out of a configuration."""
    by = cfg.pop("by", None)
    by_epoch = cfg.pop("by_epoch", default if by is None else by == "epoch")
    if by not in (None, "epoch" if by_epoch else "step"):
        raise ConfigurationError(f"a schedule goes by='epoch' or by='step', like its by_epoch; got {by!r}")
    return bool(by_epoch)


def _max_iters(run: Mapping[str, Any]) -> int | None:
    if run.get("max_iters") is None and run.get("max_epochs") and run.get("epoch_length"):
        return int(run["max_epochs"] * run["epoch_length"])
    return run.get("max_iters")


def _run_of(default_args: Mapping[str, Any] | None) -> dict[str, Any]:
    return {key: (default_args or {}).get(key) for key in _RUN}


def _bind_more(
    cfg: Any, optimizer: torch.optim.Optimizer, default_args: Mapping[str, Any] | None
) -> list[BoundSchedule]:
    """One schedule or a list, bound; they build on those that a Trainer has."""
    given = list(cfg) if isinstance(cfg, Sequence) and not isinstance(cfg, str) else [cfg]
    return bind_schedules(given, optimizer, default_args, getattr(optimizer, "_schedules", ()))
