"""The names and checks of an optimizer's options.

An option has the name of its group key, which is torch's; Gluon's spelling is accepted beside it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from numbers import Integral, Real
from typing import Any

from kvstore_server.errors import ConfigurationError, did_you_mean

ALIASES = {"learning_rate": "lr", "wd": "weight_decay", "epsilon": "eps"}
"""Gluon's spelling of an option -> the name of the group key, which is torch's."""

_GLUONS = {key: gluon for gluon, key in ALIASES.items()} | {"betas": "beta1 and beta2"}
_NEVER_NEGATIVE = frozenset({"weight_decay", "clip_gradient", "momentum", "eps"})


def canonical_options(
    options: Mapping[str, Any],
    valid: Mapping[str, Any],
    who: str,
    others: Sequence[str] = ("rescale_grad", "multi_precision"),
) -> dict[str, Any]:
    """Return `options` under the names of group keys; `others` are no group keys and only listed.

    Raises:
        ConfigurationError: an option is unknown, or given under two spellings.
    """
    result: dict[str, Any] = {}
    betas: dict[int, Any] = {}
    for given, value in options.items():
        name = given if given in valid else ALIASES.get(given, given)
        if given in ("beta1", "beta2") and "betas" in valid and given not in valid:
            betas[0 if given == "beta1" else 1] = value
        elif name not in valid:
            listing = ", ".join([*map(_both_spellings, valid), *others])
            hint = did_you_mean(given, [*valid, *ALIASES, *others])
            raise ConfigurationError(f"{who} has no option {given!r}; its options are {listing}{hint}")
        elif name in result:
            raise ConfigurationError(f"{who} was given {name!r} under two spellings; give it once")
        else:
            result[name] = value
    if betas and "betas" in result:
        raise ConfigurationError(f"{who} was given betas and beta1 or beta2; give one of the two spellings")
    if betas:
        result["betas"] = tuple(betas.get(i, valid["betas"][i]) for i in (0, 1))
    return result


def checked_option(who: str, name: str, value: Any, default: Any) -> Any:
    """Return `value` as the type of `default`.

    Raises:
        ConfigurationError: it has another type, or is out of the range that options of this name have.
    """
    if isinstance(default, tuple):
        if not isinstance(value, Sequence) or isinstance(value, str) or len(value) != len(default):
            raise ConfigurationError(f"{who}: {name} must be {len(default)} numbers, got {value!r}")
        return tuple(checked_option(who, name, v, d) for v, d in zip(value, default, strict=True))
    if isinstance(default, bool | str):
        if not isinstance(value, type(default)):
            raise ConfigurationError(f"{who}: {name} must be a {type(default).__name__}, got {value!r}")
        return value
    if value is None and default is None:
        return None
    label = f"{who}: {_both_spellings(name)}"
    if isinstance(value, bool) or not isinstance(value, Real) or not math.isfinite(value):
        raise ConfigurationError(f"{label} must be a finite number, got {value!r}")
    if name in _NEVER_NEGATIVE:
        check_not_negative(who, name, float(value))
    if name == "betas":
        check_fraction(who, name, float(value))
    return int(value) if isinstance(default, int) and isinstance(value, Integral) else float(value)


def checked_count(who: str, name: str, value: Any, least: int) -> int:
    """Return `value` as an int; raise ConfigurationError unless it is one, and `least` or more."""
    if isinstance(value, bool) or not isinstance(value, Integral) or not least <= int(value) < 2**63:
        raise ConfigurationError(f"{who}: {name} must be an integer of at least {least}, got {value!r}")
    return int(value)


def check_not_negative(who: str, name: str, value: float) -> None:
    """Raise ConfigurationError for a number below zero."""
    if value < 0:
        raise ConfigurationError(f"{who}: {_both_spellings(name)} must not be negative, got {value!r}")


def check_fraction(who: str, name: str, value: float) -> None:
    """Raise ConfigurationError unless the number is at least 0 and less than 1, as a decay rate is."""
    if not 0 <= value < 1:
        raise ConfigurationError(
            f"{who}: {_both_spellings(name)} must be at least 0 and less than 1, got {value!r}"
        )


def _both_spellings(key: str) -> str:
    return f"{key} (or {_GLUONS[key]})" if key in _GLUONS else key
