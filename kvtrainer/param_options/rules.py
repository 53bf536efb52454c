"""Rules that give parameters options of their own, and the parameter groups that follow from them.

Every front-end (`paramwise`, `detectron`) makes a list of rules; this module applies it. For each option of a parameter
the first rule in the list counts that matches the parameter and says something about the option; a rule with `stop` is
the last one that is asked. Parameters with the same options share a group, because a group of their own for all of them
makes every step several times slower.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from numbers import Real
from typing import Any, Literal, NamedTuple

from torch.nn import Module

from kvstore_server.optimizer.options import ALIASES
from kvtrainer.errors import (
    ArgumentTypeError,
    ConfigurationError,
    DuplicateParameterWarning,
    UnmatchedRuleWarning,
)
from kvtrainer.param_options.places import Place
from kvtrainer.param_options.report import ParamReport, ParamRow

__all__ = [
    "Base",
    "Duplicates",
    "ParamGroups",
    "ParamReport",
    "Place",
    "Rule",
    "apply_rules",
    "check_number",
]

Duplicates = Literal["refuse", "warn", "first"]
"""What happens to a parameter that appears again: an error, a warning, or nothing; it counts where it appears first."""


Match = str | type[Module] | tuple[type[Module], ...] | Callable[[Place], bool]


@dataclass(frozen=True)
class Rule:
    """Options for the parameters that match.

    Args:
        match: A part of "." and the full name, so that ".bias" is what ends in a part "bias"; a class of modules, or
            several, that hold the parameter; or a function of its Place.
        name: What reports call it; by default what it matches.
        lr_mult: The learning rate is that of the optimizer times this.
        decay_mult: The weight decay is that of the optimizer times this.
        weight_decay: The weight decay itself.
        extra: Other options of the optimizer, such as {"momentum": 0.5}; also an absolute "lr", and a "name" for the
            group, by which schedules find it.
        stop: Whether no later rule counts for what matches. Otherwise later ones may set what this one leaves open.
        warn_unmatched: Whether to warn if no parameter matches.

    Raises:
        ConfigurationError: a number is none, or an option is given twice.
    """

    match: Match
    _: KW_ONLY
    name: str = ""
    lr_mult: float | None = None
    decay_mult: float | None = None
    weight_decay: float | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)
    stop: bool = True
    warn_unmatched: bool = True

    def __post_init__(self) -> None:
        is_class = isinstance(self.match, tuple) and all(isinstance(one, type) for one in self.match)
        if not (isinstance(self.match, str) or callable(self.match) or is_class):
            raise ArgumentTypeError(
                f"a rule matches a part of a name, a class of modules or a function, got {self.match!r:.80}"
            )
        if not self.name:
            object.__setattr__(self, "name", _name_of(self.match))
        for what in ("lr_mult", "decay_mult", "weight_decay"):
            check_number(f"{what} of {self.name}", getattr(self, what))
        if not isinstance(self.extra, Mapping):
            raise ArgumentTypeError(f"extra of {self.name} must be a dict of options, got {self.extra!r:.80}")
        object.__setattr__(self, "extra", {ALIASES.get(key, key): value for key, value in self.extra.items()})
        given = [*self.extra, *(["lr"] if self.lr_mult is not None else [])]
        given += ["weight_decay" for value in (self.decay_mult, self.weight_decay) if value is not None]
        twice = sorted({option for option in given if given.count(option) > 1})
        if twice:
            raise ConfigurationError(
                f"{self.name} says twice what {' and '.join(twice)} shall be; say it once"
            )

    def matches(self, place: Place) -> bool:
        """Whether it says something about a parameter. Raises ConfigurationError if that cannot be known."""
        if isinstance(self.match, str):
            return self.match in f".{place.name}"
        if isinstance(self.match, type | tuple):
            return isinstance(place.module, self.match)
        return bool(self.match(place))


class ParamGroups(NamedTuple):
    """Parameter groups for an optimizer, and how they came about."""

    groups: list[dict[str, Any]]
    """torch's form, with "param_names"; options that are those of the optimizer are left out."""
    report: ParamReport


class Base:
    """The options of the optimizer, from which rules start.

    Args:
        given: As the user gave them, under torch's or Gluon's names; None counts as not given.
        defaults: Those of the optimizer, all of them; empty if they are not known.
    """

    def __init__(self, given: Mapping[str, Any], defaults: Mapping[str, Any] | None = None) -> None:
        self.given = {ALIASES.get(k, k): v for k, v in given.items() if v is not None}
        self._defaults = dict(defaults or {})

    @property
    def options(self) -> dict[str, Any]:
        """What holds for a parameter of which no rule speaks, as far as a group may say it."""
        known = self._defaults or self.given
        return {**self._defaults, **{key: value for key, value in self.given.items() if key in known}}

    def number(self, option: str, rule: str) -> float:
        """What a rule multiplies. Raises ConfigurationError if the optimizer has no such option."""
        value = self.options.get(option)
        if value is None:
            raise ConfigurationError(
                f"{rule} multiplies the optimizer's {option}, which has no value; give the optimizer one"
            )
        return float(value)

    def check_known(self, option: str, rule: str) -> None:
        if self._defaults and option not in self._defaults and option != "name":
            raise ConfigurationError(
                f"{rule} sets {option!r}, which is no option of the optimizer; its options are "
                f"{', '.join(self._defaults)}"
            )


def apply_rules(
    places: Sequence[Place], rules: Sequence[Rule], base: Base, duplicates: Duplicates = "first"
) -> ParamGroups:
    """Make groups of parameters by rules.

    Raises:
        ConfigurationError: a rule sets or multiplies an option that the optimizer does not have, or parameters appear
            twice and that is refused.

    Warns:
        UnmatchedRuleWarning: rules match nothing.
        DuplicateParameterWarning: parameters appear twice, and that is to be warned of.
    """
    matched: set[int] = set()
    groups: list[tuple[dict[str, Any], list[Place]]] = []
    rows = []
    for place in _distinct(places, duplicates):
        hits = [rule for rule in rules if rule.matches(place)]
        matched |= {id(rule) for rule in hits}
        options, names = _decide(hits, base)
        rows.append(ParamRow(place.name, place.parameter, {**base.options, **options}, names))
        own = {key: value for key, value in options.items() if base.options.get(key) != value}
        for shared, members in groups:
            if shared == own:
                members.append(place)
                break
        else:
            groups.append((own, [place]))
    unmatched = [rule.name for rule in rules if rule.warn_unmatched and id(rule) not in matched]
    if unmatched:
        warnings.warn(
            f"{', '.join(unmatched)}: no parameter matches, so this has no effect; describe_params() shows all names",
            UnmatchedRuleWarning,
            stacklevel=2,
        )
    made = [
        {"params": [one.given for one in members], "param_names": [one.name for one in members], **own}
        for own, members in groups
    ]
    return ParamGroups(made, ParamReport(tuple(rows), tuple(unmatched)))


def check_number(what: str, value: Any) -> None:
    """Raise ConfigurationError unless it is None or a finite number."""
    if value is not None and (
        isinstance(value, bool) or not isinstance(value, Real) or not math.isfinite(value)
    ):
        raise ConfigurationError(f"{what} must be a finite number, got {value!r:.80}")


def _decide(hits: Sequence[Rule], base: Base) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The options that the rules which match a parameter give it, and the names of those that counted."""
    options: dict[str, Any] = {}
    names = []
    for rule in hits:
        said = {key: value for key, value in _said(rule, base).items() if key not in options}
        options |= said
        if said or rule.stop:
            names.append(rule.name)
        if rule.stop:
            break
    return options, tuple(names)


def _said(rule: Rule, base: Base) -> dict[str, Any]:
    said = dict(rule.extra)
    if rule.weight_decay is not None:
        said["weight_decay"] = float(rule.weight_decay)
    if rule.lr_mult is not None:
        said["lr"] = base.number("lr", rule.name) * rule.lr_mult
    if rule.decay_mult is not None:
        said["weight_decay"] = base.number("weight_decay", rule.name) * rule.decay_mult
    for option in said:
        base.check_known(option, rule.name)
    return said


def _distinct(places: Sequence[Place], duplicates: Duplicates) -> list[Place]:
    first: dict[int, Place] = {}
    again = []
    for place in places:
        before = first.setdefault(id(place.parameter), place)
        if before is not place:
            again.append(f"{place.name!r} is {before.name!r}")
    if again and duplicates == "refuse":
        raise ConfigurationError(
            f"some parameters appear in more than one parameter group: {', '.join(again)}; with bypass_duplicate=True "
            "each has the options of the place where it appears first"
        )
    if again and duplicates == "warn":
        warnings.warn(
            f"{', '.join(again)}: skipped where they appear again, since bypass_duplicate=True",
            DuplicateParameterWarning,
            stacklevel=3,
        )
    return list(first.values())


def _name_of(match: Match) -> str:
    if isinstance(match, str):
        return repr(match)
    if isinstance(match, tuple):
        return " or ".join(one.__name__ for one in match)
    return getattr(match, "__name__", repr(match))
