"""Rules that give parameters options of their own, the groups that follow from them, and a report of what they did.

Every front-end (`paramwise`, `detectron`) makes a list of rules; this module applies it. For each option of a parameter
the first rule in the list counts that matches the parameter and says something about the option; a rule with `stop` is
the last one that is asked. Parameters with the same options share a group, because a group of their own for all of them
makes every step several times slower.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any, Literal, NamedTuple

from torch import Tensor
from torch.nn import Module
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.parameter import is_lazy

from kvstore_server import check
from kvstore_server.optimizer.base import ALIASES
from kvtrainer.errors import (
    ArgumentTypeError,
    ConfigurationError,
    DuplicateParameterWarning,
    UnmatchedRuleWarning,
    level_of_user,
)

_ALWAYS = ("lr", "weight_decay")
"""Options that the table of a report always shows."""


@dataclass(frozen=True)
class Place:
    """A parameter, and where in its model it is.

    `given` goes into a group's "params": the parameter, or the list of its replicas.
    """

    name: str
    parameter: Tensor
    given: Any
    holder: Module | None = None
    parent: Module | None = None
    """The module around the one that holds it; None at the top."""

    @property
    def own_name(self) -> str:
        """The last part of the name, such as "bias"."""
        return self.name.rpartition(".")[2]

    @property
    def module_name(self) -> str:
        """The name of the module that holds it; empty at the top."""
        return self.name.rpartition(".")[0]

    @property
    def module(self) -> Module:
        """The module that holds it.

        Raises:
            ConfigurationError: only names and parameters are known.
        """
        if self.holder is None:
            raise ConfigurationError(
                f"a rule asks what kind of module {self.name!r} belongs to, and only names and parameters were given; "
                "give the Module itself"
            )
        return self.holder


def places_in(model: Any) -> list[Place]:
    """List the parameters of a model as often as modules hold them, in the model's order.

    Takes a Module, one with replicas (`kvtrainer.DataParallel`), a dict, or pairs of names and parameters; in place of
    a parameter there may be a list of replicas.

    Raises:
        ConfigurationError: it is something else, in which parameters have no names.
    """
    if hasattr(model, "named_replicas"):
        rows_of = {id(replicas[0]): replicas for _, replicas in model.named_replicas()}
        return [replace(place, given=rows_of[id(place.parameter)]) for place in _walk(model.module, "", None)]
    if isinstance(model, Module):
        return list(_walk(model, "", None))
    rows: Iterable[Any] = model.items() if isinstance(model, Mapping) else model
    named: list[Any] = list(rows) if isinstance(rows, Iterable) and not isinstance(rows, Tensor) else []
    if not named or not all(
        isinstance(row, tuple) and len(row) == 2 and isinstance(row[0], str) for row in named
    ):
        raise ConfigurationError(
            "rules find parameters by name and by the kind of their module; give a Module, named_parameters() or a "
            f"dict of parameters, not {type(model).__name__}"
        )
    if isinstance(model, Mapping):
        named.sort(key=lambda row: str(row[0]))  # as the Trainer takes them
    return [Place(name, given[0] if isinstance(given, Sequence) else given, given) for name, given in named]


def unwrapped(model: Any) -> Any:
    """Take a module out of DataParallel, DistributedDataParallel, or a wrapper that has nothing but `module`."""
    while isinstance(model, Module) and not hasattr(model, "named_replicas"):
        inner = model._modules.get("module")
        is_wrapper = isinstance(model, DataParallel | DistributedDataParallel) or (
            set(model._modules) == {"module"} and not any(True for _ in model.parameters(recurse=False))
        )
        if inner is None or not is_wrapper:
            break
        model = inner
    return model


def _walk(module: Module, prefix: str, parent: Module | None) -> Iterator[Place]:
    for name, parameter in module.named_parameters(recurse=False):
        yield Place(f"{prefix}{name}", parameter, parameter, module, parent)
    for name, child in module.named_children():
        yield from _walk(child, f"{prefix}{name}.", module)


@dataclass(frozen=True)
class ParamRow:
    """One parameter; `options` are all that hold for it, `rules` the names of those that decided some."""

    name: str
    parameter: Tensor
    options: Mapping[str, Any]
    rules: tuple[str, ...] = ()

    @property
    def lr(self) -> Any:
        return self.options.get("lr")

    @property
    def weight_decay(self) -> Any:
        return self.options.get("weight_decay")


@dataclass(frozen=True)
class ParamReport:
    """All parameters in the model's order, and the rules that matched none. As a str it is a table."""

    rows: tuple[ParamRow, ...]
    unmatched: tuple[str, ...] = ()

    def __getitem__(self, name: str) -> ParamRow:
        """The row of a parameter. Raises KeyError if there is none of that name."""
        for row in self.rows:
            if row.name == name:
                return row
        raise KeyError(name)

    def __str__(self) -> str:
        lines = [_table(self.rows)]
        if self.unmatched:
            lines.append(f"no parameter matches {', '.join(self.unmatched)}")
        return "\n".join(lines)

    def with_groups(self, groups: Iterable[Mapping[str, Any]]) -> ParamReport:
        """Return the same with the options that groups have now, of the parameters that are in them.

        Replicas, which a Trainer calls "NAME on DEVICE", come after all others, with the rules of NAME.
        """
        rules = {row.name: row.rules for row in self.rows}
        rows = {row.name: row for row in rows_of(groups)}
        order = [name for name in rules if name in rows] + [name for name in rows if name not in rules]
        decided = [rules.get(name, rules.get(name.rpartition(" on ")[0], ())) for name in order]
        found = (replace(rows[name], rules=by) for name, by in zip(order, decided, strict=True))
        return ParamReport(tuple(found), self.unmatched)


def rows_of(groups: Iterable[Mapping[str, Any]]) -> list[ParamRow]:
    """Make a row for each parameter of torch's groups; without "param_names" it is called by its position."""
    rows: list[ParamRow] = []
    for group in groups:
        names = group.get("param_names") or [str(len(rows) + i) for i in range(len(group["params"]))]
        options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        for name, given in zip(names, group["params"], strict=True):
            parameter = given[0] if isinstance(given, list | tuple) else given
            rows.append(ParamRow(name, parameter, options))
    return rows


def _table(rows: Sequence[ParamRow]) -> str:
    """Show the learning rate, weight decay, and what else is not the same for all, in columns."""
    others = dict.fromkeys(key for row in rows for key in row.options if key not in _ALWAYS)
    differing = [key for key in others if any(_of(row, key) != _of(rows[0], key) for row in rows)]
    columns = [key for key in _ALWAYS if any(key in row.options for row in rows)] + differing
    lines = [["parameter", "shape", *columns, "rules"]]
    for row in rows:
        shape = "?" if is_lazy(row.parameter) else "x".join(map(str, row.parameter.shape)) or "scalar"
        lines.append([row.name, shape, *(_of(row, key) for key in columns), ", ".join(row.rules) or "-"])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def _of(row: ParamRow, key: str) -> str:
    value = row.options.get(key)
    return "-" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


Duplicates = Literal["refuse", "warn", "first"]
"""What a parameter that appears again brings: an error, a warning, or nothing; it counts where it appears first."""

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
            if getattr(self, what) is not None:
                check.number(f"{what} of {self.name}", getattr(self, what))
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
        """Return whether it is about this parameter. Raises ConfigurationError if that cannot be known."""
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
        """The options of a parameter of which no rule speaks, as far as a group may say them."""
        known = self._defaults or self.given
        return {**self._defaults, **{key: value for key, value in self.given.items() if key in known}}

    def number(self, option: str, rule: str) -> float:
        """Return what a rule multiplies. Raises ConfigurationError if the optimizer has no such option."""
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
            stacklevel=level_of_user(),
        )
    made = [
        {"params": [one.given for one in members], "param_names": [one.name for one in members], **own}
        for own, members in groups
    ]
    return ParamGroups(made, ParamReport(tuple(rows), tuple(unmatched)))


def _decide(hits: Sequence[Rule], base: Base) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the options that matching rules give a parameter, and the names of the rules that counted."""
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
            stacklevel=level_of_user(),
        )
    return list(first.values())


def _name_of(match: Match) -> str:
    if isinstance(match, str):
        return repr(match)
    if isinstance(match, tuple):
        return " or ".join(one.__name__ for one in match)
    return getattr(match, "__name__", repr(match))
