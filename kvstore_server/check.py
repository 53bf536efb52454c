"""Checks of arguments: each returns the value, or raises an error that says what is expected and what was given.

A bool is not a number. NumPy's numbers and integers are numbers and integers.
"""

from __future__ import annotations

import argparse
import difflib
import ipaddress
import math
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from numbers import Integral, Real
from typing import Any, TypeGuard, TypeVar

from kvstore_server.errors import ConfigurationError, did_you_mean

_Choice = TypeVar("_Choice")


class RemovedFlag(argparse.Action):
    """Refuses a flag that an earlier version had; `const` says what to do instead."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: object,
        values: object,
        option_string: str | None = None,
    ) -> None:
        parser.error(f"{option_string} is gone: {self.const}")


def is_number(value: object) -> TypeGuard[float]:
    """Return whether this is a real number, infinities and NaN included."""
    return isinstance(value, Real) and not isinstance(value, bool)


def rounds_or_seconds(text: str) -> tuple[int, float]:
    """Return a period of snapshots as rounds and seconds, one of which is 0. Raises ValueError if it is none.

    "50" is a number of rounds, "30s" one of seconds, and "0" is none at all.
    """
    if text.endswith("s"):
        seconds = float(text[:-1])
        if not 0 < seconds < math.inf:
            raise ValueError(f"{text!r} is not a positive number of seconds")
        return 0, seconds
    rounds = int(text)
    if rounds < 0:
        raise ValueError(f"{text!r} is not a number of rounds")
    return rounds, 0.0


def is_integer(value: object, least: int | None = None, most: int | None = None) -> TypeGuard[int]:
    """Return whether this is a whole number, at least `least` and at most `most`."""
    if not isinstance(value, Integral) or isinstance(value, bool):
        return False
    return (least is None or int(value) >= least) and (most is None or int(value) <= most)


def is_loopback(host: str) -> bool:
    """Return whether a name or a numeric address means the local machine."""
    try:
        return ipaddress.ip_address(host.strip("[]").partition("%")[0]).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def number(
    name: str,
    value: object,
    least: float | None = None,
    most: float | None = None,
    *,
    above: float | None = None,
    below: float | None = None,
    finite: bool = True,
) -> float:
    """Return a number as a float; `least` and `most` are inclusive bounds, `above` and `below` exclusive ones.

    Raises:
        ConfigurationError: It is not a number, NaN, out of bounds, or infinite (unless `finite` is False).
    """
    found = math.nan
    if is_number(value):
        with suppress(OverflowError):  # an integer too large for a float
            found = float(value)
    is_fit = (
        not math.isnan(found)
        and (not finite or math.isfinite(found))
        and (least is None or found >= least)
        and (most is None or found <= most)
        and (above is None or found > above)
        and (below is None or found < below)
    )
    if not is_fit:
        wanted = _describe_checked_range(
            "a finite number" if finite else "a number", least, most, above, below
        )
        raise ConfigurationError(f"{name} must be {wanted}, got {value!r:.80}")
    return found


def integer(name: str, value: object, least: int | None = None, most: int | None = None) -> int:
    """Return a whole number as an int. Raises ConfigurationError if it is not an integer, or out of bounds."""
    if not is_integer(value, least, most):
        raise ConfigurationError(
            f"{name} must be {_describe_checked_range('an integer', least, most)}, got {value!r:.80}"
        )
    return int(value)


def boolean(name: str, value: object, *, error: type[ConfigurationError] = ConfigurationError) -> bool:
    """Return a bool. Raises ConfigurationError if it is something else."""
    if not isinstance(value, bool):
        raise error(f"{name} must be True or False, got {value!r:.80}")
    return value


def as_mapping(value: Any) -> Any:
    """Return the dict of a configuration object such as mmengine's Config; anything else, a Mapping too, unchanged."""
    is_one = hasattr(value, "to_dict") and not isinstance(value, Mapping) and not callable(value)
    return value.to_dict() if is_one else value


def is_same(one: object, other: object) -> bool:
    """Return whether two values are equal, arrays in all elements; False if they cannot be compared."""
    try:
        equal: Any = one is other or one == other
        return bool(equal.all() if hasattr(equal, "all") else equal)
    except (RuntimeError, TypeError, ValueError):
        return False


def mapping(
    name: str, value: object, *, error: type[ConfigurationError] = ConfigurationError
) -> Mapping[Any, Any]:
    """Return a dict or another Mapping; see `as_mapping` for other objects. Raises ConfigurationError for the rest."""
    found = as_mapping(value)
    if not isinstance(found, Mapping):
        raise error(f"{name} must be a dict, got {type(value).__name__}: {value!r:.80}")
    return found


def one_of(
    name: str,
    value: object,
    choices: Collection[_Choice],
    *,
    error: type[ConfigurationError] = ConfigurationError,
) -> _Choice:
    """Return the choice that equals `value`. Raises ConfigurationError, with similar choices, if none does."""
    for choice in choices:
        if isinstance(value, type(choice)) and choice == value:
            return choice
    hint = did_you_mean(value, [one for one in choices if isinstance(one, str)])
    raise error(f"{name} must be {_format_checked_choices(choices)}, got {value!r:.80}{hint}")


def known(
    what: str,
    given: Iterable[object],
    names: Iterable[str],
    *,
    error: type[ConfigurationError] = ConfigurationError,
) -> None:
    """Raise an error that lists the known names unless all given names are known. `what` is for the message."""
    right = list(names)
    wrong = [one for one in given if one not in right]
    if wrong:
        listing = ", ".join(right) or "none"
        raise error(
            f"{what} has no option {', '.join(map(repr, wrong))}; its options are {listing}{did_you_mean(wrong, right)}"
        )


def others(
    what: str,
    given: Iterable[object],
    names: Iterable[str],
    *,
    error: type[ConfigurationError] = ConfigurationError,
) -> list[str]:
    """Return those of the given names that are not known. Raises ConfigurationError for a misspelt known name."""
    right = list(names)
    rest = [str(one) for one in given if one not in right]
    known(what, [one for one in rest if _is_misspelt(one, right)], right, error=error)
    return rest


def _is_misspelt(name: str, known: Iterable[str]) -> bool:
    """Return whether a name is a misspelt known name rather than a user's own variable."""

    # Compared word by word, because an additional or another word, as in num_epochs, optimizer_g or lr_cfg, is no
    # misspelling.
    def is_near(one: str) -> bool:
        if len(one) > 3 and sorted(name.replace("_", "")) == sorted(one.replace("_", "")):
            return True
        pairs = list(zip(name.split("_"), one.split("_"), strict=False))
        is_even = name.count("_") == one.count("_")
        return is_even and all(difflib.SequenceMatcher(None, *pair).ratio() >= 0.75 for pair in pairs)

    return any(map(is_near, known))


def _format_checked_choices(choices: Collection[object]) -> str:
    shown = [repr(one) for one in choices]
    return f"{', '.join(shown[:-1])} or {shown[-1]}" if len(shown) < 4 else f"one of {', '.join(shown)}"


def _describe_checked_range(
    kind: str,
    least: float | None,
    most: float | None,
    above: float | None = None,
    below: float | None = None,
) -> str:
    if least is not None and most is not None:
        return f"{kind} from {_format_checked_bound(least)} to {_format_checked_bound(most)}"
    bounds = [("of at least", least), ("above", above), ("at most", most), ("below", below)]
    said = [f"{word} {_format_checked_bound(bound)}" for word, bound in bounds if bound is not None]
    return f"{kind} {' and '.join(said)}".rstrip()


def _format_checked_bound(bound: float) -> str:
    return f"{bound:g}" if isinstance(bound, float) else str(bound)
