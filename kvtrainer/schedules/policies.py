"""What a scheduled value is at each moment, as pure functions.

A policy takes the value to start from, how many steps or epochs have passed, and how many there are in all (None where
that is open), and its options by name. It keeps nothing, so a value never depends on how training came there.

The formulas are those of MMCV's learning-rate and momentum hooks and of Detectron's policies; where two differ in their
names alone there is one function. `policy_names` knows them under their names.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvtrainer.errors import ConfigurationError

Policy = Callable[[float, int, int | None], float]
"""(base, at, span) → value."""


@dataclass(frozen=True)
class FromInitial:
    """A policy that also knows what the group started from before all schedules.

    Args:
        formula: (start, initial, at) → value, with what the schedules before this one give as `start`.
        restarts: Whether `start` is without those that had ended before this one begins, as if they had never been.
    """

    formula: Callable[[float, float, int], float]
    restarts: bool = False

    def __call__(self, base: float, at: int, span: int | None) -> float:
        """The value where no other schedule comes before."""
        return self.formula(base, base, at)


MOST_MOMENTUM = 0.999
"""What a warm-up, which raises momentum, stays below, unless the momentum to come to is greater itself."""


def fixed(base: float, at: int, span: int | None) -> float:
    """`base`, always."""
    return base


def step(
    base: float,
    at: int,
    span: int | None,
    *,
    every: int | Sequence[int],
    gamma: float = 0.1,
    minimum: float | None = None,
) -> float:
    """`base * gamma**k`, at least `minimum`; k is how often `every` went by, or how many of these moments came."""
    decays: int = at // every if isinstance(every, int) else sum(at >= moment for moment in every)
    value = float(base * gamma**decays)
    return value if minimum is None else max(value, minimum)


def exponential(base: float, at: int, span: int | None, *, gamma: float) -> float:
    """`base * gamma**at`."""
    return float(base * gamma**at)


def exponential_over(base: float, at: int, span: int | None, *, gamma: float) -> float:
    """`base * gamma**(at / span)`: Detectron's exp_decay."""
    return float(base * gamma ** _share(at, _known(span)))


def poly(
    base: float,
    at: int,
    span: int | None,
    *,
    power: float = 1.0,
    minimum: float | None = None,
    minimum_ratio: float | None = None,
) -> float:
    """From `base` to the minimum (0 by default) as `(1 - at / span)**power`."""
    low = _target(base, minimum, minimum_ratio)
    return float(low + (base - low) * (1.0 - _share(at, _known(span))) ** power)


def inverse(base: float, at: int, span: int | None, *, gamma: float, power: float = 1.0) -> float:
    """`base * (1 + gamma * at)**-power`."""
    return float(base * (1.0 + gamma * at) ** -power)


def linear(
    base: float,
    at: int,
    span: int | None,
    *,
    minimum: float | None = None,
    minimum_ratio: float | None = None,
) -> float:
    """From `base` to the minimum in a straight line."""
    return _linear(base, _target(base, minimum, minimum_ratio), _share(at, _known(span)))


def cosine(
    base: float,
    at: int,
    span: int | None,
    *,
    minimum: float | None = None,
    minimum_ratio: float | None = None,
) -> float:
    """From `base` to the minimum on half a period of the cosine. Detectron's cosine_decay where the minimum is 0."""
    return half_cosine(base, _target(base, minimum, minimum_ratio), _share(at, _known(span)))


def flat_cosine(
    base: float,
    at: int,
    span: int | None,
    *,
    start_percent: float = 0.75,
    minimum: float | None = None,
    minimum_ratio: float | None = None,
) -> float:
    """`base` for a share of the time, then on half a period of the cosine to the minimum."""
    total = _known(span)
    start = round(total * start_percent)
    if at < start or start >= total:
        return base
    return half_cosine(base, _target(base, minimum, minimum_ratio), _share(at - start, total - start))


def cosine_restart(
    base: float,
    at: int,
    span: int | None,
    *,
    periods: Sequence[int],
    restart_weights: Sequence[float] = (1.0,),
    minimum: float | None = None,
    minimum_ratio: float | None = None,
) -> float:
    """One cosine after another, each of its period, whose way down from `base` is multiplied by its weight.

    Raises:
        ConfigurationError: all periods are over.
    """
    low, (index, share) = _target(base, minimum, minimum_ratio), period_at(at, periods)
    return low + restart_weights[index] * (half_cosine(base, low, share) - low)


def period_at(at: int, periods: Sequence[int]) -> tuple[int, float]:
    """Find in which of some consecutive periods `at` is, and the share of it that is over.

    Raises:
        ConfigurationError: all periods are over.
    """
    start = 0
    for index, period in enumerate(periods):
        if at < start + period:
            return index, (at - start) / period
        start += period
    raise ConfigurationError(
        f"the periods {list(periods)} are over after {start}, so there is no value at {at}; give more periods"
    )


def cyclic(
    base: float,
    at: int,
    span: int | None,
    *,
    target_ratio: Sequence[float] = (10.0, 1e-4),
    cyclic_times: int = 1,
    step_ratio_up: float = 0.4,
    anneal_strategy: str = "cos",
    gamma: float = 1.0,
) -> float:
    """In each of `cyclic_times` cycles from `base` to `target_ratio[0] * base`, then on to `target_ratio[1] * base`.

    The way up takes a share `step_ratio_up` of the cycle. With a `gamma` of less than 1 the peak comes nearer to
    `base` from cycle to cycle.
    """
    length = _known(span) // cyclic_times
    cycle, inside = divmod(at, length)
    scale = gamma**cycle
    peak = base * (1.0 - scale + target_ratio[0] * scale)
    up = int(step_ratio_up * length)
    anneal = _ANNEAL[anneal_strategy]
    if inside < up:
        return anneal(base, peak, inside / up)
    return anneal(peak, base * target_ratio[1], (inside - up) / (length - up))


def one_cycle(
    base: float,
    at: int,
    span: int | None,
    *,
    maximum: float,
    total_steps: int | None = None,
    pct_start: float = 0.3,
    anneal_strategy: str = "cos",
    div_factor: float = 25.0,
    final_div_factor: float = 1e4,
    three_phase: bool = False,
) -> float:
    """The 1cycle learning rate: from `maximum / div_factor` up to `maximum`, then down to where it began, divided by
    `final_div_factor`; with three phases it comes back to where it began in between. `base` does not count."""
    total = _known(span if total_steps is None else total_steps)
    first = maximum / div_factor
    ways = (
        [(first, maximum), (maximum, first), (first, first / final_div_factor)]
        if three_phase
        else [(first, maximum), (maximum, first / final_div_factor)]
    )
    return _in_phases(at, total, pct_start, ways, anneal_strategy)


def one_cycle_momentum(
    base: float,
    at: int,
    span: int | None,
    *,
    base_momentum: float = 0.85,
    max_momentum: float = 0.95,
    total_steps: int | None = None,
    pct_start: float = 0.3,
    anneal_strategy: str = "cos",
    three_phase: bool = False,
) -> float:
    """The 1cycle momentum: from `max_momentum` down to `base_momentum` and back. `base` does not count."""
    total = _known(span if total_steps is None else total_steps)
    ways = [(max_momentum, base_momentum), (base_momentum, max_momentum)]
    if three_phase:
        ways.append((max_momentum, max_momentum))
    return _in_phases(at, total, pct_start, ways, anneal_strategy)


def steps_with_values(
    base: float,
    at: int,
    span: int | None,
    *,
    steps: Sequence[int],
    values: Sequence[float],
    reference: float | None = None,
) -> float:
    """`values[i]` from `steps[i]` on: Detectron's steps_with_lrs.

    With a `reference` the values are meant for groups whose base it is, and those of others are in proportion.
    """
    value = values[max(sum(at >= moment for moment in steps) - 1, 0)]
    return value if reference is None else value * (base / reference)


def warmup_factor(kind: str, at: int, length: int, ratio: float) -> float:
    """What the learning rate is multiplied by during a warm-up of `length` that begins at `ratio`; 1 after it.

    constant: `ratio`; linear: in a straight line to 1; exp: `ratio**(1 - at / length)`. Detectron's warm-ups are the
    first two.
    """
    if at >= length:
        return 1.0
    if kind == "constant":
        return ratio
    rest = 1.0 - at / length
    return 1.0 - rest * (1.0 - ratio) if kind == "linear" else float(ratio**rest)


def warmed_momentum(momentum: float, factor: float) -> float:
    """Momentum in a warm-up, which divides it by what the learning rate is multiplied by; kept below 1."""
    return (
        min(momentum / factor, max(momentum, MOST_MOMENTUM)) if factor > 0.0 else max(momentum, MOST_MOMENTUM)
    )


def _known(span: int | None) -> int:
    if span is None:
        raise ConfigurationError("this policy leads to an end, so it must be given one")
    return span


def _share(at: int, total: int) -> float:
    """How much of the way is done; what is past the end stays there."""
    return min(at, total) / total


def _target(base: float, minimum: float | None, ratio: float | None) -> float:
    if ratio is not None:
        return base * ratio
    return 0.0 if minimum is None else minimum


def half_cosine(start: float, end: float, share: float) -> float:
    """Follow half a period of the cosine from `start` to `end`, of which `share` is over."""
    return end + 0.5 * (start - end) * (math.cos(math.pi * share) + 1.0)


def _linear(start: float, end: float, share: float) -> float:
    return start + (end - start) * share


_ANNEAL = {"cos": half_cosine, "linear": _linear}


def _in_phases(
    at: int, total: int, pct_start: float, ways: Sequence[tuple[float, float]], strategy: str
) -> float:
    """The first phase takes `pct_start` of the time, of three the second as much; the last one takes the rest."""
    ends = [(i + 1) * (pct_start * total - 1.0) for i in range(len(ways) - 1)] + [total - 1.0]
    begin = 0.0
    for end, (first, last) in zip(ends, ways, strict=True):
        if at <= end:
            return _ANNEAL[strategy](first, last, (at - begin) / (end - begin) if end > begin else 1.0)
        begin = end
    return ways[-1][1]
