"""Formulas of scheduled values, as pure functions with the names and options of MMCV, Detectron and mmengine.

A formula gets a `FormulaPoint` (the value it starts from, and how many steps or epochs have passed) and its options by
keyword. It has no state, so a value does not depend on how training came there, and a resumed run gets the same values.
Systems that differ only in names share a formula.

`_NAMED` maps the name of a policy to its formula. mmengine's names have the prefix "mmengine:", because some mean other
values in MMCV. `make_formula` returns a `Formula`, whose options have our names (`_ALIASES`), have defaults, and are
checked: each by itself (`_CHECKS`), and against each other and the length of the run (`_formula_option_problem`). So a
formula that was made cannot fail while training, except where it says so.

To add a policy: write the function, add it to `_NAMED`, and add checks for options that are not plain numbers.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

from kvstore_server import check
from kvstore_server.errors import did_you_mean
from kvtrainer.errors import ArgumentTypeError, ConfigurationError, UnregisteredNameError

Policy = Callable[[float, int, int | None], float]
"""(base, at, span) → value."""
MMENGINE = "mmengine:"
"""Prefix of mmengine's formulas; MMCV has other values under some of these names."""


class FormulaPoint(NamedTuple):
    """The arguments of a formula that change while training."""

    base: float
    """The value that the schedule starts from."""
    at: int
    """How many steps or epochs have passed."""
    span: int | None
    """How many there are in total; None if open-ended."""
    initial: float
    """The value of the group before all schedules."""
    group: int
    """Index of the group."""

    @property
    def total(self) -> int:
        """The span. Raises ConfigurationError if the schedule is open-ended."""
        if self.span is None:
            raise ConfigurationError("this policy leads to an end, so it must be given one")
        return self.span

    @property
    def share(self) -> float:
        """The fraction of the span that has passed, at most 1."""
        return min(self.at, self.total) / self.total


class FormulaMinimum(NamedTuple):
    """A schedule's minimum: the same for all groups, or a fraction of what each group starts from."""

    minimum: float | None = None
    ratio: float | None = None

    def of(self, base: float) -> float:
        if self.ratio is not None:
            return base * self.ratio
        return 0.0 if self.minimum is None else self.minimum


def fixed(point: FormulaPoint) -> float:
    return point.base


def step(
    point: FormulaPoint, *, every: int | Sequence[int], gamma: float = 0.1, minimum: float | None = None
) -> float:
    """Return `base * gamma**k`, at least `minimum`; k is `at // every`, or how many moments of a list have come."""
    base, at = point.base, point.at
    decays: int = at // every if isinstance(every, int) else sum(at >= moment for moment in every)
    value = float(base * gamma**decays)
    return value if minimum is None else max(value, minimum)


def multi_step(point: FormulaPoint, *, milestones: Sequence[int], gamma: float = 0.1) -> float:
    """Return `base * gamma**k` after k milestones. A milestone that is listed twice counts twice."""
    return step(point, every=milestones, gamma=gamma)


def exponential(point: FormulaPoint, *, gamma: float) -> float:
    return float(point.base * gamma**point.at)


def exponential_over(point: FormulaPoint, *, gamma: float) -> float:
    """Return `base * gamma**(at / span)`: Detectron's exp_decay."""
    return float(point.base * gamma**point.share)


def inverse(point: FormulaPoint, *, gamma: float, power: float = 1.0) -> float:
    """Return `base * (1 + gamma * at)**-power`."""
    return float(point.base * (1.0 + gamma * point.at) ** -power)


def constant_then_base(point: FormulaPoint, *, length: int, factor: float = 1.0 / 3.0) -> float:
    """Return `base * factor` before `length`, then `base`."""
    return point.base * factor if point.at < length else point.base


def between_factors(
    point: FormulaPoint, *, length: int, start_factor: float = 1.0 / 3.0, end_factor: float = 1.0
) -> float:
    """Return `base` times a factor that changes linearly from `start_factor` to `end_factor`, reached at `length`."""
    return point.base * (start_factor + (end_factor - start_factor) * min(point.at, length) / length)


def poly(point: FormulaPoint, *, low: FormulaMinimum, power: float = 1.0) -> float:
    """Decay from `base` to the minimum as `(1 - at / span)**power`."""
    end = low.of(point.base)
    return float(end + (point.base - end) * (1.0 - point.share) ** power)


def poly_over(point: FormulaPoint, *, length: int, low: FormulaMinimum, power: float = 1.0) -> float:
    """Decay as `poly`, but reach the minimum at `length`."""
    return poly(point._replace(span=length), low=low, power=power)


def linear(point: FormulaPoint, *, low: FormulaMinimum) -> float:
    """Decay linearly from `base` to the minimum."""
    return _interpolate(point.base, low.of(point.base), point.share)


def cosine(point: FormulaPoint, *, low: FormulaMinimum) -> float:
    """Decay from `base` to the minimum along half a cosine. With minimum 0 it is Detectron's cosine_decay."""
    return _half_cosine(point.base, low.of(point.base), point.share)


def cosine_up_and_down(point: FormulaPoint, *, T_max: float, low: FormulaMinimum) -> float:
    """Go from `base` to the minimum in `T_max`, then back up, and so on, as torch's CosineAnnealingLR."""
    start = point.base if point.at <= T_max else point.initial
    return _half_cosine(start, low.of(point.initial), point.at / T_max)


def flat_cosine(point: FormulaPoint, *, low: FormulaMinimum, start_percent: float = 0.75) -> float:
    """Stay at `base` for the fraction `start_percent` of the span, then decay along half a cosine."""
    start = round(point.total * start_percent)
    if point.at < start or start >= point.total:
        return point.base
    return cosine(point._replace(at=point.at - start, span=point.total - start), low=low)


def cosine_restart(
    point: FormulaPoint,
    *,
    low: FormulaMinimum,
    periods: Sequence[int],
    restart_weights: Sequence[float] = (1.0,),
) -> float:
    """Repeat half a cosine, one for each period; the height above the minimum is multiplied by the period's weight."""
    index, share = _period_at(point.at, periods)
    end = low.of(point.base)
    return end + restart_weights[index] * (_half_cosine(point.base, end, share) - end)


def cosine_restart_from_weights(
    point: FormulaPoint,
    *,
    low: FormulaMinimum,
    periods: Sequence[int],
    restart_weights: Sequence[float] = (1.0,),
) -> float:
    """Repeat half a cosine that starts at `base` times the period's weight; stay at the end of the last one."""
    index, share = _period_at(min(point.at, sum(periods) - 1), periods)
    return _half_cosine(point.base * restart_weights[index], low.of(point.initial), share)


def cyclic(
    point: FormulaPoint,
    *,
    target_ratio: Sequence[float] = (10.0, 1e-4),
    cyclic_times: int = 1,
    step_ratio_up: float = 0.4,
    anneal_strategy: str = "cos",
    gamma: float = 1.0,
) -> float:
    """Cycle `cyclic_times` from `base` up to `target_ratio[0] * base`, then down to `target_ratio[1] * base`.

    The way up takes the fraction `step_ratio_up` of a cycle. With `gamma` below 1 the peak approaches `base` from cycle
    to cycle.
    """
    length = point.total // cyclic_times
    cycle, inside = divmod(point.at, length)
    scale = gamma**cycle
    peak = point.base * (1.0 - scale + target_ratio[0] * scale)
    up = int(step_ratio_up * length)
    anneal = _ANNEAL[anneal_strategy]
    if inside < up:
        return anneal(point.base, peak, inside / up)
    return anneal(peak, point.base * target_ratio[1], (inside - up) / (length - up))


def one_cycle(
    point: FormulaPoint,
    *,
    maximum: float | Sequence[float],
    total_steps: int | None = None,
    pct_start: float = 0.3,
    anneal_strategy: str = "cos",
    div_factor: float = 25.0,
    final_div_factor: float = 1e4,
    three_phase: bool = False,
) -> float:
    """Return the 1cycle learning rate (https://arxiv.org/abs/1708.07120), which does not depend on `base`.

    It goes from `maximum / div_factor` up to `maximum`, then down to where it began divided by `final_div_factor`; with
    three phases it returns to where it began in between. `maximum` may have a value for each group.
    """
    peak = maximum[min(point.group, len(maximum) - 1)] if isinstance(maximum, Sequence) else maximum
    first = peak / div_factor
    stops = [first, peak, *([first] if three_phase else []), first / final_div_factor]
    return _interpolate_in_phases(point.at, total_steps or point.total, pct_start, stops, anneal_strategy)


def one_cycle_momentum(
    point: FormulaPoint,
    *,
    base_momentum: float = 0.85,
    max_momentum: float = 0.95,
    total_steps: int | None = None,
    pct_start: float = 0.3,
    anneal_strategy: str = "cos",
    three_phase: bool = False,
) -> float:
    """Return the 1cycle momentum: from `max_momentum` to `base_momentum` and back, independent of `base`."""
    stops = [max_momentum, base_momentum, max_momentum, *([max_momentum] if three_phase else [])]
    return _interpolate_in_phases(point.at, total_steps or point.total, pct_start, stops, anneal_strategy)


def steps_with_values(
    point: FormulaPoint, *, steps: Sequence[int], values: Sequence[float], reference: float | None = None
) -> float:
    """Return `values[i]` from `steps[i]` on: Detectron's steps_with_lrs.

    With a `reference` the values are for groups whose base equals it; other groups' values are proportional.
    """
    value = values[max(sum(point.at >= moment for moment in steps) - 1, 0)]
    return value if reference is None else value * (point.base / reference)


def warmup_factor(kind: str, at: int, length: int, ratio: float) -> float:
    """Return the factor for the learning rate in a warm-up that starts at `ratio`; 1 from `length` on.

    constant: `ratio`; linear: a straight line to 1; exp: `ratio**(1 - at / length)`. Detectron's warm-ups are the first
    two.
    """
    if at >= length:
        return 1.0
    if kind == "constant":
        return ratio
    rest = 1.0 - at / length
    return 1.0 - rest * (1.0 - ratio) if kind == "linear" else float(ratio**rest)


def _half_cosine(start: float, end: float, share: float) -> float:
    return end + 0.5 * (start - end) * (math.cos(math.pi * share) + 1.0)


def _interpolate(start: float, end: float, share: float) -> float:
    return start + (end - start) * share


_ANNEAL = {"cos": _half_cosine, "linear": _interpolate}


def _period_at(at: int, periods: Sequence[int]) -> tuple[int, float]:
    start = 0
    for index, period in enumerate(periods):
        if at < start + period:
            return index, (at - start) / period
        start += period
    raise ConfigurationError(
        f"the periods {list(periods)} are over after {start}, so there is no value at {at}; give more periods"
    )


def _interpolate_in_phases(
    at: int, total: int, pct_start: float, stops: Sequence[float], strategy: str
) -> float:
    """Interpolate between stops. The first phase takes `pct_start` of the time; the second of three, the same time."""
    ways = list(pairwise(stops))
    # As in torch's OneCycleLR, phases end one step early: the first value is at step 0.
    ends = [(i + 1) * (pct_start * total - 1.0) for i in range(len(ways) - 1)] + [total - 1.0]
    begin = 0.0
    for end, (first, last) in zip(ends, ways, strict=True):
        if at <= end:
            return _ANNEAL[strategy](first, last, (at - begin) / (end - begin) if end > begin else 1.0)
        begin = end
    return stops[-1]


@dataclass(frozen=True)
class Formula:
    function: Callable[..., float]
    options: Mapping[str, Any] = field(default_factory=dict)
    restarts: bool = False
    """Whether it starts from a value without the schedules that ended before it began."""

    def __call__(
        self, base: float, at: int, span: int | None, initial: float | None = None, group: int = 0
    ) -> float:
        """Return the value. `initial` is `base` if no other schedule comes before."""
        point = FormulaPoint(base, at, span, base if initial is None else initial, group)
        return float(self.function(point, **self.options))


class _NamedFormula(NamedTuple):
    formula: Callable[..., float]
    needs_end: bool = False
    needs_minimum: bool = False
    restarts: bool = False
    of_momentum: Mapping[str, Any] = {}
    """Defaults that differ when momentum is scheduled."""


_NAMED: Mapping[str, _NamedFormula] = {
    "fixed": _NamedFormula(fixed),
    "step": _NamedFormula(step, of_momentum={"gamma": 0.5}),
    "exp": _NamedFormula(exponential),
    "poly": _NamedFormula(poly, needs_end=True),
    "inv": _NamedFormula(inverse),
    "CosineAnnealing": _NamedFormula(cosine, needs_end=True, needs_minimum=True),
    "LinearAnnealing": _NamedFormula(linear, needs_end=True, needs_minimum=True),
    "FlatCosineAnnealing": _NamedFormula(flat_cosine, needs_end=True, needs_minimum=True),
    "CosineRestart": _NamedFormula(cosine_restart, needs_minimum=True),
    "cyclic": _NamedFormula(cyclic, needs_end=True, of_momentum={"target_ratio": (0.85 / 0.95, 1.0)}),
    "OneCycle": _NamedFormula(one_cycle, needs_end=True),
    "steps_with_lrs": _NamedFormula(steps_with_values),
    "exp_decay": _NamedFormula(exponential_over, needs_end=True),
    "mmengine:Constant": _NamedFormula(constant_then_base),
    "mmengine:Linear": _NamedFormula(between_factors),
    "mmengine:Step": _NamedFormula(step),
    "mmengine:MultiStep": _NamedFormula(multi_step),
    "mmengine:Exponential": _NamedFormula(exponential),
    "mmengine:CosineAnnealing": _NamedFormula(cosine_up_and_down),
    "mmengine:Poly": _NamedFormula(poly_over),
    "mmengine:OneCycle": _NamedFormula(one_cycle),
    "mmengine:CosineRestart": _NamedFormula(cosine_restart_from_weights, needs_minimum=True, restarts=True),
}
OF_MMENGINE = tuple(one.removeprefix(MMENGINE) for one in _NAMED if one.startswith(MMENGINE))
_ALIASES = {
    "min_lr": "minimum",
    "min_momentum": "minimum",
    "min_lr_ratio": "minimum_ratio",
    "min_momentum_ratio": "minimum_ratio",
    "step_size": "every",
    "step": "every",
    "max_lr": "maximum",
    "lrs": "values",
}
"""Option's name in MMCV or Detectron → our name."""
_ALIASES_OF_MMENGINE = {
    "eta_min": "minimum",
    "eta_min_ratio": "minimum_ratio",
    "eta_max": "maximum",
    "step_size": "every",
}


def make_formula(
    policy: str | Policy, options: Mapping[str, Any], name: str = "lr", span: int | None = None
) -> Formula:
    """Return the formula for a policy and its options. Case and underscores in a name do not matter.

    Args:
        policy: A name, or a function (base, at, span) → value, which takes no options.
        options: Under our names or those of the source.
        name: The scheduled value: momentum has other defaults.
        span: The total number of steps or epochs; None if open-ended.
    """
    if not isinstance(policy, str):
        if not callable(policy):
            raise ArgumentTypeError(f"a policy is a name or a function (base, at, span), got {policy!r:.80}")
        if options:
            raise ConfigurationError(f"a function takes no options, got {', '.join(options)}")
        return Formula(lambda point: policy(point.base, point.at, point.span))
    given = check_formula_options(policy, options, name, span)
    kind, function = _find_formula(policy, name)
    if _NAMED[kind].needs_end and span is None and given.get("total_steps") is None:
        raise ConfigurationError(
            f"the policy {kind!r} leads to an end, which is not known; give `end`, or max_epochs or max_iters in a "
            "configuration"
        )
    if "minimum_ratio" in given:
        given["low"] = FormulaMinimum(given.pop("minimum"), given.pop("minimum_ratio"))
    return Formula(function, given, _NAMED[kind].restarts)


def check_formula_options(
    policy: str, options: Mapping[str, Any], name: str = "lr", span: int | None = None
) -> dict[str, Any]:
    """Return all options of a policy under our names, with defaults. Raises as `make_formula`."""
    # 1. Our names, and defaults.
    kind, function = _find_formula(policy, name)
    label = f"the policy {kind.removeprefix(MMENGINE)!r}"
    aliases = _ALIASES_OF_MMENGINE if kind.startswith(MMENGINE) else _ALIASES
    defaults = _NAMED[kind].of_momentum if name == "momentum" else {}
    given = _rename_formula_options(label, function, options, aliases, defaults)
    # 2. A minimum can be absolute or relative, but not both.
    minima = [key for key in ("minimum", "minimum_ratio") if given.get(key) is not None]
    if len(minima) > 1 or (_NAMED[kind].needs_minimum and not minima):
        spellings = [alias for alias, meant in aliases.items() if meant.startswith("minimum")]
        raise ConfigurationError(
            f"{label} needs exactly one of a minimum and its ratio to the base ({', '.join(spellings)}), got "
            f"{' and '.join(minima) or 'neither'}"
        )
    # 3. As in MMCV, a single ratio implies the second.
    ratio = given.get("target_ratio")
    if check.is_number(ratio) or (isinstance(ratio, tuple) and len(ratio) == 1):
        [peak] = ratio if isinstance(ratio, tuple) else (ratio,)
        given["target_ratio"] = (peak, peak / 1e5)
    # 4. Check each option, then how they fit together.
    for key, value in given.items():
        if value is not None:
            _CHECKS.get(key, check.number)(f"{key} of {label}", value)
    if problem := _formula_option_problem(kind, label, given, span):
        raise ConfigurationError(problem)
    return given


def _find_formula(policy: str, name: str) -> tuple[str, Callable[..., float]]:
    known = {_normalized_formula_name(one): one for one in _NAMED} | {"flatcosine": "FlatCosineAnnealing"}
    kind = known.get(_normalized_formula_name(policy))
    if kind is None:
        there = [one for one in _NAMED if not one.startswith(MMENGINE)]
        raise UnregisteredNameError(
            f"there is no schedule policy {policy!r}; the policies are {', '.join(there)}{did_you_mean(policy, there)}"
        )
    return kind, one_cycle_momentum if (kind, name) == ("OneCycle", "momentum") else _NAMED[kind].formula


def _normalized_formula_name(name: str) -> str:
    return name.replace("_", "").lower()


def _rename_formula_options(
    label: str,
    function: Callable[..., float],
    options: Mapping[str, Any],
    aliases: Mapping[str, str],
    defaults: Mapping[str, Any],
) -> dict[str, Any]:
    """Return all options under our names, lists as tuples; `defaults` take precedence over the function's."""
    _, *parameters = inspect.signature(function).parameters.values()
    given = {one.name: one.default for one in parameters} | dict(defaults)
    # A formula takes its minimum as one object; users give one of two numbers.
    if given.pop("low", None) is not None:
        given |= {"minimum": None, "minimum_ratio": None}
    check.known(label, options, [*given, *(alias for alias, meant in aliases.items() if meant in given)])
    seen: dict[str, Any] = {}
    for key, value in options.items():
        name = key if key in given else aliases[key]
        if not check.is_same(seen.setdefault(name, value), value):
            raise ConfigurationError(f"{label} was given {name!r} under two spellings")
        if value is not None:
            given[name] = tuple(value) if isinstance(value, list | tuple) else value
        elif given[name] not in (None, inspect.Parameter.empty):
            raise ConfigurationError(f"{name} of {label} must not be None; leave it out")
    if missing := [key for key, value in given.items() if value is inspect.Parameter.empty]:
        spelled = {meant: alias for alias, meant in aliases.items()}
        raise ConfigurationError(f"{label} needs {', '.join(spelled.get(key, key) for key in missing)}")
    return given


def _check_formula_list(
    label: str, value: object, checked: Callable[[str, Any], object], least: int = 1
) -> None:
    if not isinstance(value, tuple) or len(value) < least:
        raise ConfigurationError(f"{label} must be a list of numbers, got {value!r:.80}")
    for one in value:
        checked(f"each of {label}", one)


def _check_formula_maximum(label: str, value: object) -> None:
    for one in value if isinstance(value, tuple) else (value,):
        check.number(label, one)


def _check_formula_step(label: str, value: object) -> None:
    moments = value if isinstance(value, tuple) else (value,)
    is_fit = bool(moments) and all(check.is_integer(moment, 1) for moment in moments)
    if not is_fit or list(moments) != sorted(moments):
        raise ConfigurationError(
            f"{label} must be an integer above 0 or an ascending list of such, got {value!r:.80}"
        )


_count, _share_of_one = partial(check.integer, least=1), partial(check.number, least=0, most=1)
_numbers = partial(_check_formula_list, checked=check.number)
_moments = partial(_check_formula_list, checked=partial(check.integer, least=0))
_CHECKS: Mapping[str, Callable[[str, Any], object]] = {
    "every": _check_formula_step,
    "maximum": _check_formula_maximum,
    "periods": partial(_check_formula_list, checked=_count),
    "steps": _moments,
    "milestones": partial(_moments, least=0),
    "restart_weights": _numbers,
    "values": _numbers,
    "target_ratio": _numbers,
    "cyclic_times": _count,
    "total_steps": _count,
    "length": _count,
    "T_max": partial(check.number, least=1),
    "factor": _share_of_one,
    "start_factor": _share_of_one,
    "end_factor": _share_of_one,
    "start_percent": _share_of_one,
    "pct_start": _share_of_one,
    "step_ratio_up": partial(check.number, least=0, below=1),
    "anneal_strategy": partial(check.one_of, choices=tuple(_ANNEAL)),
    "three_phase": check.boolean,
}
"""Option → its check. All other options must be numbers."""


def _formula_option_problem(kind: str, label: str, given: Mapping[str, Any], span: int | None) -> str:
    """Return what is contradictory among the options, or with the span; '' if nothing is."""
    if "target_ratio" in given:
        check.number(f"gamma of {label}", given["gamma"], above=0, most=1)
        if len(given["target_ratio"]) != 2:
            return f"target_ratio must be one or two numbers, got {given['target_ratio']!r}"
    if "periods" in given and len(given["periods"]) != len(given["restart_weights"]):
        lists = f"{given['periods']!r} and {given['restart_weights']!r}"
        return f"periods and restart_weights must be equally long, got {lists}"
    if "steps" in given:
        steps: Sequence[int] = given["steps"]
        if steps[0] != 0 or list(steps) != sorted(steps) or len(steps) != len(given["values"]):
            return f"steps must ascend from 0, with one value for each; got {steps!r} and {given['values']!r}"
    if any(given.get(key) == 0 for key in ("div_factor", "final_div_factor", "reference")):
        return f"{label} divides by its factors and its reference, so none may be 0"
    if span is None:
        return ""
    if given.get("cyclic_times", 1) > span:
        return f"{given['cyclic_times']} cycles do not fit in {span} steps"
    if (given.get("total_steps") or span) < span:
        return f"total_steps is {given['total_steps']}, but there are {span} steps"
    if kind == "CosineRestart" and (end := sum(given["periods"])) < span:
        lists = f"the periods {list(given['periods'])} are over after {end}"
        return f"{lists}, but there are {span} steps or epochs; give more periods"
    return ""
