"""Schedules under mmengine's `type` names, in closed form, and torch's schedulers under theirs.

mmengine multiplies the present value step by step. Here each schedule gives a value from where it starts and from how
far it is, and schedules of one value build on one another; where their windows do not overlap, or they are factors,
both come to the same numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch.optim
from torch.optim import lr_scheduler

from kvstore_server.errors import did_you_mean
from kvtrainer.errors import ConfigurationError, UnknownNameError
from kvtrainer.registry import SCHEDULES
from kvtrainer.schedules import policies
from kvtrainer.schedules.bound_torch import PlateauSchedule
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
        cfg: `type`, options, and when it holds: begin, end, by_epoch (True), convert_to_iter_based. `verbose` does
            nothing.
        run: max_epochs, max_iters, epoch_length, where known; max_epochs or max_iters is the default of `end`.

    Raises:
        UnknownNameError: there is no such type.
        ConfigurationError: an option is unknown, missing or impossible.
    """
    by_epoch = bool(cfg.get("by_epoch", True))
    if (made := _others(cfg["type"])) is not None:
        given = {key: value for key, value in cfg.items() if key not in ("type", "by_epoch")}
        return _calling(made, given), "epoch" if by_epoch else "step"
    kind, name = _kind_and_name(cfg)
    if cfg.get("last_step", -1) != -1:
        raise ConfigurationError(
            "last_step is not needed: load the state of the schedule, or call step(count)"
        )
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
    policy, is_open = _TYPES[kind](options, None if end is None else end - begin, name)
    if options:
        raise ConfigurationError(
            f"a schedule of type {cfg['type']!r} has no option {', '.join(map(repr, options))}"
        )
    if isinstance(policy, tuple):
        policy, options = policy
    unit, last = "epoch" if by_epoch else "step", None if is_open else end
    return ScheduleSpec(name, policy, unit, begin, last, groups=cfg.get("groups"), options=options), unit


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
        raise UnknownNameError(
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


def _factor(options: dict[str, Any], key: str, default: float) -> float:
    value = options.pop(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        raise ConfigurationError(f"{key} must be a number from 0 to 1, got {value!r}")
    return float(value)


def _needed(options: dict[str, Any], key: str) -> Any:
    if options.get(key) is None:
        raise ConfigurationError(f"this type of schedule needs {key}")
    return options.pop(key)


def _constant(options: dict[str, Any], span: int | None, name: str) -> Made:
    """The factor up to the last step of the window, from which on the value is the former one again.

    In mmengine a window of one step never ends; here the factor holds for that step.
    """
    factor = _factor(options, "factor", 1.0 / 3.0)
    held = math.inf if span is None else max(span - 1, 1)
    return (lambda base, at, _: base * factor if at < held else base), True


def _linear(options: dict[str, Any], span: int | None, name: str) -> Made:
    """From a factor to another one, which is reached in the last step of the window; of one step, after it."""
    first, last = _factor(options, "start_factor", 1.0 / 3.0), _factor(options, "end_factor", 1.0)
    if span is None:
        raise ConfigurationError("a linear schedule leads to an end, which is not known; give `end`")
    length = max(span - 1, 1)
    return (lambda base, at, _: base * (first + (last - first) * min(at, length) / length)), True


def _step(options: dict[str, Any], span: int | None, name: str) -> Made:
    every, gamma = _needed(options, "step_size"), options.pop("gamma", 0.1)
    return ("step", {"every": every, "gamma": gamma}), False


def _multi_step(options: dict[str, Any], span: int | None, name: str) -> Made:
    moments, gamma = sorted(_needed(options, "milestones")), options.pop("gamma", 0.1)
    return ("step", {"every": moments, "gamma": gamma}), False


def _exponential(options: dict[str, Any], span: int | None, name: str) -> Made:
    return ("exp", {"gamma": _needed(options, "gamma")}), False


def _cosine(options: dict[str, Any], span: int | None, name: str) -> Made:
    """torch's and mmengine's: a period of 2 * T_max, whose minimum may be passed."""
    given = options.pop("T_max", None)
    length = span if given is None else given
    low, ratio = options.pop("eta_min", None), options.pop("eta_min_ratio", None)
    if length is None or isinstance(length, bool) or length < 1:
        raise ConfigurationError(f"a cosine needs T_max or an end, a number above 0, got {length!r}")
    if low is not None and ratio is not None:
        raise ConfigurationError("give one of eta_min and eta_min_ratio")

    def value(base: float, at: int, _: int | None) -> float:
        lowest = base * ratio if ratio is not None else float(low or 0.0)
        return lowest + 0.5 * (base - lowest) * (math.cos(math.pi * at / length) + 1.0)

    return value, False


def _poly(options: dict[str, Any], span: int | None, name: str) -> Made:
    """The minimum is reached in the last step of the window."""
    if span is None:
        raise ConfigurationError("a polynomial schedule leads to an end, which is not known; give `end`")
    low, ratio = options.pop("eta_min", None), options.pop("eta_min_ratio", None)
    power, length = options.pop("power", 1.0), max(span - 1, 1)
    formula = partial(policies.poly, power=power, minimum=low, minimum_ratio=ratio)
    return (lambda base, at, _: formula(base, at, length)), False


def _one_cycle(options: dict[str, Any], span: int | None, name: str) -> Made:
    if name != "lr":
        raise ConfigurationError(
            "OneCycle of this form schedules the learning rate only; for momentum use a policy"
        )
    given = {("maximum" if key == "eta_max" else key): options.pop(key) for key in tuple(options)}
    return ("OneCycle", given), False


def _cosine_restart(options: dict[str, Any], span: int | None, name: str) -> Made:
    """After its periods the value stays."""
    given = {
        "periods": _needed(options, "periods"),
        "restart_weights": options.pop("restart_weights", (1.0,)),
    }
    given |= {"minimum": options.pop("eta_min", None), "minimum_ratio": options.pop("eta_min_ratio", None)}
    total = sum(given["periods"])
    if span is None or span <= total:
        return ("CosineRestart", given), False
    formula = make_policy("CosineRestart", given)
    return (lambda base, at, _: formula(base, min(at, total - 1), None)), False


_TYPES: Mapping[str, Callable[[dict[str, Any], int | None, str], Made]] = {
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
    mode = options.pop("threshold_rule", "rel")
    made = {"mode": rules[rule], "threshold_mode": mode, "minimum": options.pop("min_value", 0.0), **options}
    window: dict[str, Any] = {"begin": begin, "end": end, "groups": cfg.get("groups")}
    return lambda optimizer: PlateauSchedule(optimizer, name, **window, **made)
