"""The policies under the names and options of MMCV and Detectron; options are checked before they are used."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from numbers import Integral, Real
from typing import Any

from kvstore_server.errors import did_you_mean
from kvtrainer.errors import ArgumentTypeError, ConfigurationError, UnregisteredNameError
from kvtrainer.schedules import policies
from kvtrainer.schedules.policies import Policy

_POLICIES: Mapping[str, Callable[..., float]] = {
    "fixed": policies.fixed,
    "step": policies.step,
    "exp": policies.exponential,
    "poly": policies.poly,
    "inv": policies.inverse,
    "CosineAnnealing": policies.cosine,
    "LinearAnnealing": policies.linear,
    "FlatCosineAnnealing": policies.flat_cosine,
    "CosineRestart": policies.cosine_restart,
    "cyclic": policies.cyclic,
    "OneCycle": policies.one_cycle,
    "steps_with_lrs": policies.steps_with_values,
    "exp_decay": policies.exponential_over,
}
_SHORTER = {"flatcosine": "FlatCosineAnnealing"}
"""Other names of policies, plainly."""
_NEEDS_MINIMUM = frozenset({"CosineAnnealing", "LinearAnnealing", "FlatCosineAnnealing", "CosineRestart"})
_NEEDS_END = frozenset(
    {"poly", "CosineAnnealing", "LinearAnnealing", "FlatCosineAnnealing", "cyclic", "OneCycle", "exp_decay"}
)
_ALIASES = {
    "min_lr": "minimum",
    "min_momentum": "minimum",
    "min_lr_ratio": "minimum_ratio",
    "min_momentum_ratio": "minimum_ratio",
    "step": "every",
    "step_size": "every",
    "max_lr": "maximum",
    "lrs": "values",
}
"""Spellings that others have for an option → ours."""
_FRACTIONS = ("start_percent", "pct_start")
_COUNTS = ("cyclic_times", "total_steps")
_LISTS_OF_COUNTS = ("periods", "steps")
_LISTS = ("restart_weights", "values", "target_ratio")


def make_policy(
    policy: str | Policy, options: Mapping[str, Any], name: str = "lr", span: int | None = None
) -> Policy:
    """Return the policy that a name, in any case and with or without underscores, and its options mean.

    Args:
        policy: A name; or a function (base, at, span) → value, which takes no options.
        options: Under our names or those of the source.
        name: What is scheduled: momentum has other defaults.
        span: How many steps or epochs there will be; None where that is open.

    Raises:
        UnregisteredNameError: there is no such policy; lists them.
        ConfigurationError: an option is unknown, missing or impossible, or the policy needs an end.
    """
    if not isinstance(policy, str):
        if not callable(policy):
            raise ArgumentTypeError(f"a policy is a name or a function (base, at, span), got {policy!r:.80}")
        if options:
            raise ConfigurationError(f"a function takes no options, got {', '.join(options)}")
        return policy
    kind, function, given = check_options(policy, options, name)
    if kind in _NEEDS_END and span is None and given.get("total_steps") is None:
        raise ConfigurationError(
            f"the policy {kind!r} leads to an end, which is not known; give `end`, or max_epochs or max_iters in a "
            "configuration"
        )
    _check_span(kind, given, span)
    return partial(function, **given)


def check_options(
    policy: str, options: Mapping[str, Any], name: str = "lr"
) -> tuple[str, Callable[..., float], dict[str, Any]]:
    """Return a policy's own name, its function, and the options under our names.

    Raises:
        UnregisteredNameError: there is no such policy; lists them.
        ConfigurationError: an option is unknown, missing or impossible.
    """
    known = {_plainly(one): one for one in _POLICIES} | _SHORTER
    if _plainly(policy) not in known:
        raise UnregisteredNameError(
            f"there is no schedule policy {policy!r}; the policies are {', '.join(_POLICIES)}"
            f"{did_you_mean(policy, _POLICIES)}"
        )
    kind = known[_plainly(policy)]
    function = _POLICIES[kind]
    is_momentum = name == "momentum"
    if kind == "OneCycle" and is_momentum:
        function = policies.one_cycle_momentum
    given = _canonical(kind, function, options)
    if kind == "step" and is_momentum:
        given.setdefault("gamma", 0.5)
    if kind == "cyclic" and is_momentum:
        given.setdefault("target_ratio", (0.85 / 0.95, 1.0))
    _check(kind, given)
    return kind, function, given


def spread_over_groups(
    policy: str | Policy, options: Mapping[str, Any], num_groups: int, name: str, span: int | None
) -> list[Policy]:
    """One policy for each group; a list as OneCycle's maximum has one for each.

    Raises:
        ConfigurationError: as `make_policy`, or there are not as many maxima as groups.
    """
    peaks = options.get("max_lr", options.get("maximum"))
    if not isinstance(peaks, list | tuple):
        return [make_policy(policy, options, name, span)] * num_groups
    if len(peaks) != num_groups:
        raise ConfigurationError(
            f"max_lr has {len(peaks)} values, but there are {num_groups} parameter groups; give one for each, or a "
            "number"
        )
    rest = {key: value for key, value in options.items() if key not in ("max_lr", "maximum")}
    return [make_policy(policy, {**rest, "maximum": peak}, name, span) for peak in peaks]


def _plainly(name: str) -> str:
    return name.replace("_", "").lower()


def _with_aliases(option: str) -> str:
    others = [alias for alias, own in _ALIASES.items() if own == option]
    return f"{option} (or {', '.join(others)})" if others else option


def _canonical(kind: str, function: Callable[..., float], options: Mapping[str, Any]) -> dict[str, Any]:
    """The options under our names, lists as tuples, all of them known and none missing."""
    parameters = {
        key: one
        for key, one in inspect.signature(function).parameters.items()
        if one.kind is inspect.Parameter.KEYWORD_ONLY
    }
    given: dict[str, Any] = {}
    for key, value in options.items():
        own = key if key in parameters else _ALIASES.get(key, key)
        if own not in parameters:
            known = ", ".join(_with_aliases(one) for one in parameters) or "none"
            raise ConfigurationError(f"the policy {kind!r} has no option {key!r}; its options are {known}")
        if own in given:
            raise ConfigurationError(f"the policy {kind!r} was given {own!r} under two spellings")
        given[own] = tuple(value) if isinstance(value, list | tuple) else value
    given = {
        key: value for key, value in given.items() if value is not None or parameters[key].default is not None
    }
    missing = [
        key for key, one in parameters.items() if one.default is inspect.Parameter.empty and key not in given
    ]
    if missing:
        raise ConfigurationError(f"the policy {kind!r} needs {', '.join(missing)}")
    minima = [key for key in ("minimum", "minimum_ratio") if given.get(key) is not None]
    if len(minima) > 1 or (kind in _NEEDS_MINIMUM and not minima):
        raise ConfigurationError(
            f"the policy {kind!r} needs exactly one of a minimum (min_lr, min_momentum) and its ratio to the base "
            f"(min_lr_ratio, min_momentum_ratio), got {' and '.join(minima) or 'neither'}"
        )
    return given


def _check(kind: str, given: dict[str, Any]) -> None:
    """Raise ConfigurationError for an impossible option; a single target_ratio is completed."""
    if isinstance(given.get("target_ratio"), Real):
        given["target_ratio"] = (given["target_ratio"], given["target_ratio"] / 1e5)
    elif len(given.get("target_ratio", ())) == 1:
        given["target_ratio"] = (given["target_ratio"][0], given["target_ratio"][0] / 1e5)
    for key, value in given.items():
        if key in _LISTS_OF_COUNTS or key in _LISTS:
            is_fine = isinstance(value, tuple) and bool(value)
            is_fine = is_fine and all(
                _is_count(v, 0) if key in _LISTS_OF_COUNTS else _is_number(v) for v in value
            )
            wanted = "a list of numbers" if key in _LISTS else "a list of integers"
        elif key == "every":
            moments = value if isinstance(value, tuple) else (value,)
            is_fine = bool(moments) and all(_is_count(moment, 1) for moment in moments)
            is_fine = is_fine and list(moments) == sorted(moments)
            wanted = "an integer above 0 or an ascending list of such"
        elif key == "anneal_strategy":
            is_fine, wanted = value in ("cos", "linear"), "'cos' or 'linear'"
        elif key == "three_phase":
            is_fine, wanted = isinstance(value, bool), "True or False"
        elif kind == "cyclic" and key == "gamma":
            is_fine, wanted = _is_number(value) and 0 < value <= 1, "a number above 0 and at most 1"
        elif kind == "cyclic" and key == "step_ratio_up":
            is_fine, wanted = _is_number(value) and 0 <= value < 1, "a number from 0 to below 1"
        elif key in _COUNTS:
            is_fine, wanted = _is_count(value, 1), "an integer above 0"
        elif key in _FRACTIONS:
            is_fine, wanted = _is_number(value) and 0 <= value <= 1, "a number from 0 to 1"
        else:
            is_fine, wanted = _is_number(value), "a finite number"
        if not is_fine:
            raise ConfigurationError(f"{key} of the policy {kind!r} must be {wanted}, got {value!r:.80}")
    _check_together(kind, given)


def _check_together(kind: str, given: Mapping[str, Any]) -> None:
    if kind == "cyclic" and len(given.get("target_ratio", (1, 1))) != 2:
        raise ConfigurationError(f"target_ratio must be one or two numbers, got {given['target_ratio']!r}")
    if kind == "CosineRestart" and len(given["periods"]) != len(given.get("restart_weights", (1.0,))):
        raise ConfigurationError(
            f"periods and restart_weights must be equally long, got {given['periods']!r} and "
            f"{given.get('restart_weights', (1.0,))!r}"
        )
    if kind == "CosineRestart" and not all(given["periods"]):
        raise ConfigurationError(f"a period must be at least 1, got {given['periods']!r}")
    if kind == "steps_with_lrs":
        steps: Sequence[int] = given["steps"]
        if steps[0] != 0 or list(steps) != sorted(steps) or len(steps) != len(given["values"]):
            raise ConfigurationError(
                f"steps must ascend from 0, with one value for each; got {steps!r} and {given['values']!r}"
            )
    if given.get("div_factor") == 0 or given.get("final_div_factor") == 0 or given.get("reference") == 0:
        raise ConfigurationError(
            f"the policy {kind!r} divides by its factors and its reference, so none may be 0"
        )


def _check_span(kind: str, given: Mapping[str, Any], span: int | None) -> None:
    if span is None:
        return
    if kind == "cyclic" and given.get("cyclic_times", 1) > span:
        raise ConfigurationError(f"{given['cyclic_times']} cycles do not fit in {span} steps")
    total = given.get("total_steps")
    if kind == "OneCycle" and total is not None and total < span:
        raise ConfigurationError(f"total_steps is {total}, but there are {span} steps")
    if kind == "CosineRestart" and sum(given["periods"]) < span:
        raise ConfigurationError(
            f"the periods {list(given['periods'])} are over after {sum(given['periods'])}, but there are {span} steps "
            "or epochs; give more periods"
        )


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)


def _is_count(value: object, least: int) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= least
