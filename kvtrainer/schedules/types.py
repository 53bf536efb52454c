"""Schedules under mmengine's `type` names, in closed form, and torch's schedulers under theirs.

mmengine multiplies the present value step by step. Here each schedule gives a value from where it starts and from how
far it is, and schedules of one value build on one another; where their windows do not overlap, or they are factors,
both come to the same numbers. Where OneCycle, CosineRestart, or a minimum other than 0 overlaps another schedule, they
do not: there mmengine's numbers depend on the order of the steps, and may exceed those of either schedule.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch.optim
from torch.optim import lr_scheduler

from kvstore_server.errors import did_you_mean
from kvtrainer.errors import ConfigurationError, GroupValueError, UnregisteredNameError
from kvtrainer.registry import SCHEDULES
from kvtrainer.schedules import policies
from kvtrainer.schedules.bound_torch import PlateauSchedule
from kvtrainer.schedules.policies import FromInitial
from kvtrainer.schedules.policy_names import make_policy
from kvtrainer.schedules.spec import ScheduleSpec

_INFINITE = 10**9
"""What mmengine calls INF: an end that never comes."""
_BY_LENGTH = ("step_size", "T_max", "total_steps")
_BY_LENGTHS = ("milestones", "periods")
"""Options that count epochs, one or several."""
_WHEN = (
    "begin",
    "end",
    "by_epoch",
    "convert_to_iter_based",
    "epoch_length",
    "last_step",
    "verbose",
    "groups",
)


def from_type(
    cfg: Mapping[str, Any], run: Mapping[str, Any]
) -> tuple[ScheduleSpec | Callable[..., Any], str]:
    """Read a dict with a `type`; returns a schedule, or what makes one of an optimizer, and what torch's goes by.

    A class or function as `type`, or what is registered in `SCHEDULES` under that name, is called with the optimizer
    and the options.

    Args:
        cfg: `type`, options, and when it holds: begin, end, by_epoch (True), convert_to_iter_based; `last_step`, after
            which step of its window it goes on. `verbose` does nothing.
        run: max_epochs, max_iters, epoch_length, where known; max_epochs or max_iters is the default of `end`.

    Raises:
        UnregisteredNameError: there is no such type.
        ConfigurationError: an option is unknown, missing or impossible.
    """
    by_epoch = bool(cfg.get("by_epoch", True))
    if (made := _others(cfg["type"])) is not None:
        given = {key: value for key, value in cfg.items() if key not in ("type", "by_epoch")}
        return _calling(made, given), "epoch" if by_epoch else "step"
    kind, name = _kind_and_name(cfg)
    last_step = cfg.get("last_step", -1)
    if isinstance(last_step, bool) or not isinstance(last_step, int) or last_step < -1:
        raise ConfigurationError(f"last_step must be an integer of at least -1, got {last_step!r:.80}")
    options = {key: value for key, value in cfg.items() if key not in ("type", "param_name", *_WHEN)}
    begin, end = cfg.get("begin", 0), cfg.get("end")
    if end is None:
        limit = "max_epochs" if by_epoch else "max_iters"
        end = run.get(limit)
        if end is None and kind != "ReduceOnPlateau":
            raise ConfigurationError(
                f"{limit} must be specified in default_args (dispatch_kwargs of a strategy), or `end` in the schedule "
                f"{dict(cfg)!r:.120}"
            )
    end = None if end is None or end >= _INFINITE else end
    if end is not None and end <= begin:
        raise ConfigurationError(f"end should be larger than begin, but got begin={begin}, end={end}")
    if kind == "ReduceOnPlateau":
        return _plateau(cfg, name, begin, end, options), "epoch"
    if cfg.get("convert_to_iter_based"):
        begin, end = _converted(cfg, run, options, begin, end)
        by_epoch = False
    policy, is_open = _TYPES[kind](options, (_INFINITE if end is None else end) - begin, name)
    if options:
        raise ConfigurationError(
            f"a schedule of type {cfg['type']!r} has no option {', '.join(map(repr, options))}"
        )
    if isinstance(policy, tuple):
        policy, options = policy
    unit, last = "epoch" if by_epoch else "step", None if is_open else end
    spec = ScheduleSpec(
        name,
        policy,
        unit,
        begin,
        last,
        groups=cfg.get("groups"),
        passed=0 if last_step == -1 else begin + last_step + 1,
        options=options,
    )
    return (spec if last_step == -1 else partial(_resumed, spec)), unit


def _resumed(spec: ScheduleSpec, optimizer: torch.optim.Optimizer) -> ScheduleSpec:
    """Check that the groups still know what they started from."""
    for index, group in enumerate(getattr(optimizer, "param_groups", ())):
        if f"initial_{spec.name}" not in group:
            raise GroupValueError(
                f"last_step goes on from a former run, but parameter group {index} has no 'initial_{spec.name}', "
                "which it started from; load the optimizer's state before"
            )
    return spec


def _others(given: object) -> Callable[..., Any] | None:
    """What makes a schedule that is none of ours: a class or function, a registered one, or a scheduler of torch."""
    if callable(given):
        return given
    if not isinstance(given, str):
        raise ConfigurationError(f"the type of a schedule is a name or what makes one, got {given!r:.80}")
    if given in SCHEDULES:
        return SCHEDULES.get(given)  # type: ignore[no-any-return]
    if given.startswith("torch:") or _kind_of(given) is None:
        return getattr(lr_scheduler, given.removeprefix("torch:"), None)
    return None


def _calling(made: Callable[..., Any], options: dict[str, Any]) -> Callable[[torch.optim.Optimizer], Any]:
    def make(optimizer: torch.optim.Optimizer) -> Any:
        try:
            return made(optimizer, **options)
        except (TypeError, ValueError) as error:
            name = getattr(made, "__name__", repr(made))
            raise ConfigurationError(f"the schedule {name} cannot be made: {error}") from error

    return make


def _kind_of(given: str) -> tuple[str, str] | None:
    """The kind and the ending of one of our names."""
    for ending in ("LR", "Momentum", "ParamScheduler"):
        kind = given.removesuffix(ending)
        if kind != given and kind in (*_TYPES, "ReduceOnPlateau"):
            return kind, ending
    return None


def _kind_and_name(cfg: Mapping[str, Any]) -> tuple[str, str]:
    """Which schedule a type means, and of which value."""
    if (found := _kind_of(cfg["type"])) is None:
        known = ", ".join(f"{kind}LR" for kind in (*_TYPES, "ReduceOnPlateau"))
        raise UnregisteredNameError(
            f"there is no schedule of type {cfg['type']!r}; there are {known}, the same with Momentum, torch's "
            "schedulers, and what is registered in SCHEDULES"
            f"{did_you_mean(cfg['type'], known.split(', '))}"
        )
    kind, ending = found
    name = {"LR": "lr", "Momentum": "momentum"}.get(ending, cfg.get("param_name"))
    if not isinstance(name, str):
        raise ConfigurationError(f"a {cfg['type']} needs param_name, the key of the groups that it schedules")
    return kind, name


def _converted(
    cfg: Mapping[str, Any], run: Mapping[str, Any], options: dict[str, Any], begin: Any, end: Any
) -> tuple[int, int | None]:
    """Turn what counts epochs into steps."""
    length = cfg.get("epoch_length", run.get("epoch_length"))
    if not cfg.get("by_epoch", True):
        raise ConfigurationError("only a schedule with by_epoch=True can be converted to go by step")
    if isinstance(length, bool) or not isinstance(length, int) or length < 1:
        raise ConfigurationError(
            f"convert_to_iter_based needs epoch_length, the updates in an epoch, a positive integer; got {length!r}"
        )
    for key in _BY_LENGTH:
        if options.get(key) is not None:
            options[key] = options[key] * length
    for key in _BY_LENGTHS:
        if options.get(key) is not None:
            options[key] = [one * length for one in options[key]]
    return int(begin * length), None if end is None else int(end * length)


Made = tuple[Any, bool]
"""A policy, or its name with options, and whether it goes on past the end of the window by itself."""


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _number(options: dict[str, Any], key: str, default: float) -> float:
    value = options.pop(key, default)
    if not _is_number(value):
        raise ConfigurationError(f"{key} must be a number, got {value!r:.80}")
    return float(value)


def _factor(options: dict[str, Any], key: str, default: float) -> float:
    value = _number(options, key, default)
    if not 0 <= value <= 1:
        raise ConfigurationError(f"{key} must be a number from 0 to 1, got {value!r}")
    return value


def _minimum(options: dict[str, Any]) -> Callable[[float], float]:
    """Return the function from a value to its minimum: `eta_min` (0), or `eta_min_ratio` of it."""
    given = [key for key in ("eta_min", "eta_min_ratio") if options.get(key) is not None]
    if len(given) == 2:
        raise ConfigurationError("give one of eta_min and eta_min_ratio")
    number = _number(options, given[0], 0.0) if given else 0.0
    for key in ("eta_min", "eta_min_ratio"):
        options.pop(key, None)
    return (lambda value: value * number) if given == ["eta_min_ratio"] else (lambda value: number)


def _needed(options: dict[str, Any], key: str) -> Any:
    if options.get(key) is None:
        raise ConfigurationError(f"this type of schedule needs {key}")
    return options.pop(key)


def _constant(options: dict[str, Any], span: int, name: str) -> Made:
    """The factor up to the last step of the window, from which on the value is the former one again.

    In mmengine a window of one step never ends; here the factor holds for that step.
    """
    factor, held = _factor(options, "factor", 1.0 / 3.0), max(span - 1, 1)
    return (lambda base, at, _: base * factor if at < held else base), span == 1


def _linear(options: dict[str, Any], span: int, name: str) -> Made:
    """From a factor to another one, which is reached in the last step of the window; of one step, after it."""
    first, last = _factor(options, "start_factor", 1.0 / 3.0), _factor(options, "end_factor", 1.0)
    length = max(span - 1, 1)
    return (lambda base, at, _: base * (first + (last - first) * min(at, length) / length)), span == 1


def _step(options: dict[str, Any], span: int, name: str) -> Made:
    every, gamma = _needed(options, "step_size"), options.pop("gamma", 0.1)
    return ("step", {"every": every, "gamma": gamma}), False


def _multi_step(options: dict[str, Any], span: int, name: str) -> Made:
    """A milestone counts as often as it is given, and may be the begin."""
    moments, gamma = _needed(options, "milestones"), _number(options, "gamma", 0.1)
    if not isinstance(moments, list | tuple) or not all(isinstance(one, int) and one >= 0 for one in moments):
        raise ConfigurationError(f"milestones must be a list of integers of at least 0, got {moments!r:.80}")
    return (lambda base, at, _: base * gamma ** sum(at >= one for one in moments)), False


def _exponential(options: dict[str, Any], span: int, name: str) -> Made:
    return ("exp", {"gamma": _needed(options, "gamma")}), False


def _cosine(options: dict[str, Any], span: int, name: str) -> Made:
    """A period of 2 * T_max, whose minimum may be passed; from there it rises to the group's initial value."""
    length, minimum = options.pop("T_max", None) or span, _minimum(options)
    if not _is_number(length) or length < 1:
        raise ConfigurationError(f"T_max must be a number of at least 1, got {length!r:.80}")

    def value(start: float, initial: float, at: int) -> float:
        return policies.half_cosine(start if at <= length else initial, minimum(initial), at / length)

    return FromInitial(value), False


def _poly(options: dict[str, Any], span: int, name: str) -> Made:
    """The minimum is reached in the last step of the window."""
    power, length, minimum = _number(options, "power", 1.0), max(span - 1, 1), _minimum(options)
    return (lambda base, at, _: policies.poly(base, at, length, power=power, minimum=minimum(base))), False


def _one_cycle(options: dict[str, Any], span: int, name: str) -> Made:
    if name != "lr":
        raise ConfigurationError(
            "OneCycle of this form schedules the learning rate only; for momentum use a policy"
        )
    given = {("maximum" if key == "eta_max" else key): options.pop(key) for key in tuple(options)}
    return ("OneCycle", {"total_steps": span, **given}), False


def _cosine_restart(options: dict[str, Any], span: int, name: str) -> Made:
    """Each period begins at the group's initial value times its weight; after the last one the value stays."""
    periods, weights = _needed(options, "periods"), options.pop("restart_weights", (1.0,))
    if options.get("eta_min") is None and options.get("eta_min_ratio") is None:
        raise ConfigurationError("this type of schedule needs eta_min or eta_min_ratio")
    minimum = _minimum(options)
    make_policy(
        "CosineRestart", {"periods": periods, "restart_weights": weights, "minimum": 0.0}
    )  # checks them
    last = sum(periods) - 1

    def value(start: float, initial: float, at: int) -> float:
        index, share = policies.period_at(min(at, last), periods)
        return policies.half_cosine(start * weights[index], minimum(initial), share)

    return FromInitial(value, restarts=True), False


_TYPES: Mapping[str, Callable[[dict[str, Any], int, str], Made]] = {
    "Constant": _constant,
    "Linear": _linear,
    "Step": _step,
    "MultiStep": _multi_step,
    "Exponential": _exponential,
    "CosineAnnealing": _cosine,
    "Poly": _poly,
    "OneCycle": _one_cycle,
    "CosineRestart": _cosine_restart,
}


def _plateau(
    cfg: Mapping[str, Any], name: str, begin: int, end: int | None, options: dict[str, Any]
) -> Callable[[torch.optim.Optimizer], PlateauSchedule]:
    """ReduceOnPlateau under mmengine's options; `monitor` is for whoever has the metric."""
    if not cfg.get("by_epoch", True) or cfg.get("convert_to_iter_based"):
        raise ConfigurationError(
            f"{cfg['type']} goes by the metric that end_epoch(metric) brings; leave out by_epoch=False and "
            "convert_to_iter_based"
        )
    options.pop("monitor", None)
    rules = {"less": "min", "greater": "max"}
    rule = options.pop("rule", "less")
    if rule not in rules:
        raise ConfigurationError(f"rule must be 'less' or 'greater', got {rule!r}")
    if not _is_number(threshold := options.get("threshold", 0)) or threshold < 0:
        raise ConfigurationError(f"threshold must be a number of at least 0, got {threshold!r:.80}")
    mode = options.pop("threshold_rule", "rel")
    made = {"mode": rules[rule], "threshold_mode": mode, "minimum": options.pop("min_value", 0.0), **options}
    window: dict[str, Any] = {"begin": begin, "end": end, "groups": cfg.get("groups")}
    return lambda optimizer: PlateauSchedule(optimizer, name, **window, **made)
