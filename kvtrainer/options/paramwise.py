"""Options per parameter: MMCV's `paramwise_cfg`, rules, or a function; the resulting groups, and a report of them.

    Trainer(model, "torch:SGD", {"lr": 0.01, "weight_decay": 1e-4}, paramwise=dict(
        custom_keys={"backbone": dict(lr_mult=0.1), ".head.": dict(decay_mult=0.0)}, norm_decay_mult=0.0))

`param_places_in` lists the parameters with the modules that hold them. A `paramwise_cfg` becomes a list of `Rule`s, so
there is one mechanism: for each option of a parameter, the first rule counts that matches the parameter and sets the
option; after a rule with `stop` no further rule is asked. Parameters with the same options share a group, because one
group per parameter would make every step several times slower.

Nothing is changed in the model, and no option is dropped in silence: an unknown option raises, a rule without a match
warns. `ParamReport` shows what each parameter got, and from which rules.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any, NamedTuple

from torch import Tensor
from torch.nn import Conv2d, GroupNorm, LayerNorm, Module, RMSNorm
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.parameter import is_lazy

from kvstore_server import check
from kvstore_server.optimizer.base import ALIASES
from kvtrainer.errors import (
    ArgumentTypeError,
    ConfigurationError,
    DuplicateParameterWarning,
    NotInitializedError,
    UnmatchedRuleWarning,
    level_of_user,
)

_log = logging.getLogger(__name__)

_LISTS = ("params", "param_names")
_ALWAYS = ("lr", "weight_decay")
"""Options that the table of a report always shows."""
_NORMS = (_BatchNorm, _InstanceNorm, GroupNorm, LayerNorm, RMSNorm)
_DEFORMABLE = frozenset({"DeformConv2d", "ModulatedDeformConv2d"})
_MULTIPLIERS = (
    "bias_lr_mult", "dcn_offset_lr_mult", "norm_decay_mult", "dwconv_decay_mult", "bias_decay_mult", "flat_decay_mult",
)  # fmt: skip
_ORDERS = {
    "mmcv": _MULTIPLIERS,
    "mmengine": tuple(_MULTIPLIERS[at] for at in (0, 1, 2, 4, 3, 5)),
}
"""The order in which kinds of parameters are tried. mmengine tries biases before depthwise convolutions."""
CFG_KEYS = ("custom_keys", *_MULTIPLIERS, "bypass_duplicate", "custom_keys_merge", "precedence")
"""The keys of a paramwise_cfg."""


@dataclass(frozen=True)
class ModuleParameter:
    """A parameter and its place in the model. Groups get `given`: the parameter, or the list of its replicas."""

    name: str
    parameter: Tensor
    given: Any
    holder: Module | None = None
    parent: Module | None = None
    """The module that contains `holder`; None at the top."""

    @property
    def own_name(self) -> str:
        return self.name.rpartition(".")[2]

    @property
    def module_name(self) -> str:
        return self.name.rpartition(".")[0]

    @property
    def module(self) -> Module:
        """The module that holds it."""
        if self.holder is None:
            raise ConfigurationError(
                f"a rule needs the module that holds {self.name!r}; pass the Module itself"
            )
        return self.holder


def param_places_in(model: Any) -> list[ModuleParameter]:
    """Return a model's parameters in order, each once for every module that holds it.

    The model is a Module, one with replicas (`kvtrainer.DataParallel`), a dict, or (name, parameter) pairs. A list of
    replicas may stand for a parameter.
    """
    if hasattr(model, "named_replicas"):
        rows_of = {id(replicas[0]): replicas for _, replicas in model.named_replicas()}
        return [
            replace(place, given=rows_of[id(place.parameter)])
            for place in _walk_paramwise_places(model.module, "", None)
        ]
    if isinstance(model, Module):
        return list(_walk_paramwise_places(model, "", None))
    rows: Iterable[Any] = model.items() if isinstance(model, Mapping) else model
    named: list[Any] = list(rows) if isinstance(rows, Iterable) and not isinstance(rows, Tensor) else []
    if not named or not all(
        isinstance(row, tuple) and len(row) == 2 and isinstance(row[0], str) for row in named
    ):
        kind = type(model).__name__
        raise ConfigurationError(f"rules need names: give a Module, named_parameters() or a dict, not {kind}")
    if isinstance(model, Mapping):
        named.sort(key=lambda row: str(row[0]))  # the Trainer sorts them, too
    return [
        ModuleParameter(name, given[0] if isinstance(given, Sequence) else given, given)
        for name, given in named
    ]


def walk_wrappers(model: Module, names: Collection[str] = ("module",)) -> Iterator[Module]:
    """Yield a model, the model that it wraps, and so on. A wrapper has nothing but one submodule of these names."""
    inner: Module | None = model
    while inner is not None:
        yield inner
        is_bare = len(inner._modules) == 1 and not inner._parameters and not inner._buffers
        inner = next((part for name, part in inner._modules.items() if is_bare and name in names), None)


def unwrap_model(model: Any, names: Collection[str] = ("module",)) -> Any:
    """Return the model inside wrappers such as DistributedDataParallel. It may be one with replicas."""
    if not isinstance(model, Module):
        return model
    inside = list(walk_wrappers(model, names))
    return next((one for one in inside if hasattr(one, "named_replicas")), inside[-1])


def _walk_paramwise_places(module: Module, prefix: str, parent: Module | None) -> Iterator[ModuleParameter]:
    for name, parameter in module.named_parameters(recurse=False):
        yield ModuleParameter(f"{prefix}{name}", parameter, parameter, module, parent)
    for name, child in module.named_children():
        yield from _walk_paramwise_places(child, f"{prefix}{name}.", module)


@dataclass(frozen=True)
class ParamRow:
    """One parameter. `options` has all its options, `rules` the names of the rules that set some of them."""

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
    """All parameters in the model's order, and the rules that matched none. str() gives a table."""

    rows: tuple[ParamRow, ...]
    unmatched: tuple[str, ...] = ()

    def __getitem__(self, name: str) -> ParamRow:
        """Return the row of a parameter. Raises KeyError if the name is unknown."""
        for row in self.rows:
            if row.name == name:
                return row
        raise KeyError(name)

    def __str__(self) -> str:
        lines = [_format_param_table(self.rows)]
        if self.unmatched:
            lines.append(f"no parameter matches {', '.join(self.unmatched)}")
        return "\n".join(lines)

    def with_groups(self, groups: Iterable[Mapping[str, Any]]) -> ParamReport:
        """Return the report with the groups' present options. Replicas ("NAME on DEVICE") follow, with NAME's rules."""
        decided = {row.name: row.rules for row in self.rows}
        now = {row.name: row for row in rows_of(groups)}
        found = [
            replace(now[name], rules=decided.get(name, decided.get(name.rpartition(" on ")[0], ())))
            for name in dict.fromkeys([*decided, *now])
            if name in now
        ]
        return ParamReport(tuple(found), self.unmatched)


def rows_of(groups: Iterable[Mapping[str, Any]]) -> list[ParamRow]:
    """Return a row for each parameter of torch's groups. Without "param_names" its name is its position."""
    rows: list[ParamRow] = []
    for group in groups:
        names = group.get("param_names") or [str(len(rows) + i) for i in range(len(group["params"]))]
        options = {key: value for key, value in group.items() if key not in _LISTS}
        for name, given in zip(names, group["params"], strict=True):
            parameter = given[0] if isinstance(given, list | tuple) else given
            rows.append(ParamRow(name, parameter, options))
    return rows


def _format_param_table(rows: Sequence[ParamRow]) -> str:
    others = dict.fromkeys(key for row in rows for key in row.options if key not in _ALWAYS)
    differing = [
        key
        for key in others
        if any(_format_param_option(row, key) != _format_param_option(rows[0], key) for row in rows)
    ]
    columns = [key for key in _ALWAYS if any(key in row.options for row in rows)] + differing
    lines = [["parameter", "shape", *columns, "rules"]]
    for row in rows:
        shape = "?" if is_lazy(row.parameter) else "x".join(map(str, row.parameter.shape)) or "scalar"
        lines.append(
            [
                row.name,
                shape,
                *(_format_param_option(row, key) for key in columns),
                ", ".join(row.rules) or "-",
            ]
        )
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def _format_param_option(row: ParamRow, key: str) -> str:
    value = row.options.get(key)
    return "-" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


Match = str | type[Module] | tuple[type[Module], ...] | Callable[[ModuleParameter], bool]


@dataclass(frozen=True)
class Rule:
    """Options for the parameters that match.

    Args:
        match: A part of "." + the full name, so that ".bias" matches a component that begins with "bias"; a class of
            modules that hold the parameter, or several; or a function of its ModuleParameter.
        name: The name in reports; by default derived from `match`.
        lr_mult: Factor for the optimizer's learning rate.
        decay_mult: Factor for the optimizer's weight decay.
        weight_decay: The weight decay itself.
        extra: Other options of the optimizer, such as {"momentum": 0.5}; also an absolute "lr", and a "name" for the
            group, through which schedules find it.
        stop: Whether later rules are ignored for matching parameters. Otherwise they may set what this one does not.
        warn_unmatched: Whether to warn if no parameter matches.

    Raises:
        ConfigurationError: A value is not a number, or an option is set twice.
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
        # 1. The match, and a name for reports.
        is_class = isinstance(self.match, tuple) and all(isinstance(one, type) for one in self.match)
        if not (isinstance(self.match, str) or callable(self.match) or is_class):
            raise ArgumentTypeError(
                f"a rule matches text, a class of modules or a function, got {self.match!r:.80}"
            )
        if not self.name:
            object.__setattr__(self, "name", _name_of_paramwise_match(self.match))
        # 2. The values. `extra` may use Gluon's names, such as "wd".
        for what in ("lr_mult", "decay_mult", "weight_decay"):
            if getattr(self, what) is not None:
                check.number(f"{what} of {self.name}", getattr(self, what))
        extra = check.mapping(f"extra of {self.name}", self.extra, error=ArgumentTypeError)
        object.__setattr__(self, "extra", {ALIASES.get(key, key): value for key, value in extra.items()})
        # 3. No option may be set in two ways.
        given = [*self.extra, *(["lr"] if self.lr_mult is not None else [])]
        given += ["weight_decay" for value in (self.decay_mult, self.weight_decay) if value is not None]
        twice = sorted({option for option in given if given.count(option) > 1})
        if twice:
            raise ConfigurationError(f"{self.name} sets {' and '.join(twice)} twice")

    def matches(self, place: ModuleParameter) -> bool:
        """Return whether the rule applies to this parameter. Raises ConfigurationError if that cannot be known."""
        if isinstance(self.match, str):
            return self.match in f".{place.name}"
        if isinstance(self.match, type | tuple):
            return isinstance(place.module, self.match)
        return bool(self.match(place))


class ParamGroups(NamedTuple):
    groups: list[dict[str, Any]]
    """torch's form, with "param_names". Options equal to the optimizer's are left out."""
    report: ParamReport


def apply_paramwise(
    model: Any, paramwise: Any, base: Mapping[str, Any], defaults: Mapping[str, Any] | None = None
) -> ParamGroups:
    """Return parameter groups for an optimizer.

    Args:
        model: A Module, or named parameters if no rule needs modules. A list of replicas may stand for a parameter.
        paramwise: MMCV's paramwise_cfg, see `paramwise_rules`; a list of Rules; a function of the model that returns
            groups; or None for one group.
        base: The options that the user gave the optimizer.
        defaults: The optimizer's options with its own defaults. Without them, `base` must contain the learning rate if
            a rule multiplies it, and options that do not exist are not noticed.

    Raises ConfigurationError if `paramwise` is wrong or sets options that do not exist, or if a parameter appears twice
    without bypass_duplicate (with it: DuplicateParameterWarning). A rule without a match warns (UnmatchedRuleWarning).
    """
    model = unwrap_model(model)
    if not isinstance(model, Module | Mapping) and isinstance(model, Iterable):
        model = list(model)  # an iterator can only be read once
    options, is_complete = _paramwise_base_options(base, defaults), bool(defaults)
    paramwise = check.as_mapping(paramwise)
    # 1. Nothing to do: one group.
    if not paramwise and isinstance(paramwise, Mapping | None):
        return _apply_paramwise_rules(
            _distinct_paramwise_places(param_places_in(model)), [], options, is_complete
        )
    # 2. MMCV's dict becomes rules.
    if isinstance(paramwise, Mapping):
        rules, places = paramwise_rules(paramwise, base), param_places_in(model)
        if paramwise.get("precedence") == "mmengine":
            frozen = [place.name for place in places if _is_frozen_param(place)]
            places = [place for place in places if not _is_frozen_param(place)]
            if frozen:
                _log.warning("left out of all groups, because they are frozen: %s", ", ".join(frozen))
        once = _distinct_paramwise_places(places, paramwise.get("bypass_duplicate", False))
        return _apply_paramwise_rules(once, rules, options, is_complete)
    # 3. Rules, or a function that returns groups.
    if isinstance(paramwise, Sequence) and all(isinstance(rule, Rule) for rule in paramwise):
        return _apply_paramwise_rules(
            _distinct_paramwise_places(param_places_in(model)), paramwise, options, is_complete
        )
    if callable(paramwise) and not isinstance(paramwise, type):
        return _paramwise_groups_by_function(paramwise, model, options)
    raise ArgumentTypeError(f"paramwise must be a dict, a list of Rules or a function, got {paramwise!r:.80}")


def paramwise_rules(cfg: Any, base: Mapping[str, Any]) -> list[Rule]:
    """Turn MMCV's paramwise_cfg into rules.

    Keys:

    - custom_keys: {part of "." + name: {lr_mult, decay_mult, and options of the optimizer}}. The longest matching key
      counts; of equally long ones the first in alphabetical order. It excludes all other rules, unless
      custom_keys_merge=True: then shorter keys, and after them the other rules, set what longer keys do not.
    - bias_lr_mult: biases, except those of norms.
    - norm_decay_mult: batch, instance, group, layer and RMS norms.
    - dwconv_decay_mult: Conv2d with in_channels == groups.
    - bias_decay_mult: biases of neither norms nor such convolutions.
    - flat_decay_mult: other one-dimensional parameters.
    - dcn_offset_lr_mult: conv_offset of MMCV's deformable convolutions.
    - bypass_duplicate: warn, instead of raising, about parameters that appear twice.
    - precedence: with "mmengine", bias_decay_mult also applies to depthwise convolutions, before dwconv_decay_mult, and
      to norms without norm_decay_mult; frozen parameters are in no group. Otherwise frozen ones have no rules.

    Raises:
        ArgumentTypeError: `cfg` or its custom_keys is not a dict.
        ConfigurationError: A key is unknown, or a value is not a number; or there is no weight_decay to multiply.
    """
    # 1. Check the keys and switches.
    cfg = check.mapping("paramwise_cfg", cfg, error=ArgumentTypeError)
    check.known("paramwise_cfg", cfg, CFG_KEYS)
    merges = check.boolean("custom_keys_merge", cfg.get("custom_keys_merge", False))
    check.boolean("bypass_duplicate", cfg.get("bypass_duplicate", False))
    precedence = check.one_of("precedence", cfg.get("precedence", "mmcv"), tuple(_ORDERS))
    custom = check.mapping("custom_keys", cfg.get("custom_keys", {}), error=ArgumentTypeError)
    for key, entry in custom.items():
        if not isinstance(key, str) or not isinstance(entry, Mapping):
            got = f"{key!r:.80}: {entry!r:.80}"
            raise ArgumentTypeError(
                f"custom_keys are parts of names, and dicts as dict(lr_mult=0.1), got {got}"
            )
    # 2. Custom keys, the longest first.
    rules = []
    for key in sorted(custom, key=lambda k: (-len(k), k)):
        own = {name: custom[key][name] for name in ("lr_mult", "decay_mult") if name in custom[key]}
        extra = {option: value for option, value in custom[key].items() if option not in own}
        rules.append(Rule(key, name=f"custom_keys[{key!r}]", extra=extra, stop=not merges, **own))
    # 3. Kinds of parameters. Each sets one option, so later rules may set others.
    for key in (one for one in _ORDERS[precedence] if one in cfg):
        match = _is_bias_param if (key, precedence) == ("bias_decay_mult", "mmengine") else _KINDS[key]
        multiplier: dict[str, Any] = {
            "lr_mult" if key.endswith("lr_mult") else "decay_mult": check.number(key, cfg[key])
        }
        rules.append(Rule(match, name=key, stop=False, warn_unmatched=False, **multiplier))
    # 4. As MMCV does, insist on a weight decay that can be multiplied.
    wanted = [rule.name for rule in rules if rule.decay_mult is not None]
    if wanted and all(base.get(key) is None for key in ("weight_decay", "wd")):
        raise ConfigurationError(f"base_wd should not be None: {', '.join(wanted)} multiplies weight_decay")
    return [Rule(_is_frozen_param, name="frozen", warn_unmatched=False), *rules] if rules else []


def _is_frozen_param(place: ModuleParameter) -> bool:
    return not place.parameter.requires_grad


def _is_norm_param(place: ModuleParameter) -> bool:
    return isinstance(place.module, _NORMS)


def _is_depthwise_param(place: ModuleParameter) -> bool:
    module = place.module
    if isinstance(module, Conv2d) and is_lazy(place.parameter):
        raise _param_not_initialized_error("whether a convolution is depthwise", place)
    return isinstance(module, Conv2d) and module.in_channels == module.groups


def _is_deformable_param(place: ModuleParameter) -> bool:
    return any(cls.__name__ in _DEFORMABLE for cls in type(place.parent).__mro__)


def _is_offset_param(place: ModuleParameter) -> bool:
    is_convolution = isinstance(place.module, Conv2d)
    return is_convolution and "conv_offset" in place.module_name and _is_deformable_param(place)


def _is_bias_param(place: ModuleParameter) -> bool:
    return place.own_name == "bias" and not _is_deformable_param(place)


def _is_flat_param(place: ModuleParameter) -> bool:
    if is_lazy(place.parameter):
        raise _param_not_initialized_error("flat_decay_mult", place)
    return place.parameter.ndim == 1 and not _is_deformable_param(place)


def _param_not_initialized_error(key: str, place: ModuleParameter) -> NotInitializedError:
    return NotInitializedError(f"{key} depends on the shape of {place.name!r}; run a forward pass first")


_KINDS: Mapping[str, Callable[[ModuleParameter], bool]] = {
    "bias_lr_mult": lambda place: _is_bias_param(place) and not _is_norm_param(place),
    "dcn_offset_lr_mult": _is_offset_param,
    "norm_decay_mult": _is_norm_param,
    "dwconv_decay_mult": _is_depthwise_param,
    "bias_decay_mult": lambda place: (
        _is_bias_param(place) and not (_is_norm_param(place) or _is_depthwise_param(place))
    ),
    "flat_decay_mult": _is_flat_param,
}


def _paramwise_base_options(given: Mapping[str, Any], defaults: Mapping[str, Any] | None) -> dict[str, Any]:
    own = {ALIASES.get(key, key): value for key, value in given.items() if value is not None}
    known = defaults or own
    return {**(defaults or {}), **{key: value for key, value in own.items() if key in known}}


def _apply_paramwise_rules(
    places: Iterable[ModuleParameter], rules: Sequence[Rule], base: Mapping[str, Any], is_complete: bool
) -> ParamGroups:
    """Group parameters by rules. `base` has the options before rules; with `is_complete`, all that exist."""
    matched: set[int] = set()
    groups: list[dict[str, Any]] = []
    rows = []
    for place in places:
        # 1. Which rules match, and what each of them adds.
        hits = [rule for rule in rules if rule.matches(place)]
        matched |= {id(rule) for rule in hits}
        options: dict[str, Any] = {}
        names = []
        for rule in hits:
            said = {
                key: value
                for key, value in _options_of_param_rule(rule, base, is_complete).items()
                if key not in options
            }
            options |= said
            if said or rule.stop:
                names.append(rule.name)
            if rule.stop:
                break
        rows.append(ParamRow(place.name, place.parameter, {**base, **options}, tuple(names)))
        # 2. Add the parameter to the group with the same options.
        own = {key: value for key, value in options.items() if base.get(key) != value}
        for group in groups:
            if {key: value for key, value in group.items() if key not in _LISTS} == own:
                break
        else:
            group = {"params": [], "param_names": [], **own}
            groups.append(group)
        group["params"].append(place.given)
        group["param_names"].append(place.name)
    # 3. A rule without a match is probably a typo.
    unmatched = [rule.name for rule in rules if rule.warn_unmatched and id(rule) not in matched]
    if unmatched:
        warnings.warn(
            f"{', '.join(unmatched)}: no parameter matches, so this has no effect; describe_params() shows all names",
            UnmatchedRuleWarning,
            stacklevel=level_of_user(),
        )
    return ParamGroups(groups, ParamReport(tuple(rows), tuple(unmatched)))


def _options_of_param_rule(rule: Rule, base: Mapping[str, Any], is_complete: bool) -> dict[str, Any]:
    said = dict(rule.extra)
    if rule.weight_decay is not None:
        said["weight_decay"] = float(rule.weight_decay)
    for option, factor in (("lr", rule.lr_mult), ("weight_decay", rule.decay_mult)):
        if factor is not None:
            if base.get(option) is None:
                raise ConfigurationError(
                    f"{rule.name} multiplies the optimizer's {option}, which is None; give it a value"
                )
            said[option] = float(base[option]) * factor
    unknown = [option for option in said if option not in (*base, "name")]
    if is_complete and unknown:
        raise ConfigurationError(
            f"{rule.name} sets {unknown[0]!r}; the optimizer's options are {', '.join(base)}"
        )
    return said


def _distinct_paramwise_places(
    places: Iterable[ModuleParameter], bypass: bool | None = None
) -> list[ModuleParameter]:
    """Return the first place of each parameter. If one appears again: None allows it, True warns, False raises."""
    first: dict[int, ModuleParameter] = {}
    again = []
    for place in places:
        before = first.setdefault(id(place.parameter), place)
        if before is not place:
            again.append(f"{place.name!r} is {before.name!r}")
    if again and bypass is False:
        text = f"some parameters appear in more than one parameter group: {', '.join(again)}"
        raise ConfigurationError(f"{text}; bypass_duplicate=True uses only the first place of each")
    if again and bypass:
        warnings.warn(
            f"{', '.join(again)}: skipped where they appear again, since bypass_duplicate=True",
            DuplicateParameterWarning,
            stacklevel=level_of_user(),
        )
    return list(first.values())


def _paramwise_groups_by_function(
    function: Callable[[Any], Any], model: Any, base: Mapping[str, Any]
) -> ParamGroups:
    label = getattr(function, "__name__", repr(function))
    made = function(model)
    if not isinstance(made, Sequence) or not all(isinstance(g, Mapping) and "params" in g for g in made):
        raise ArgumentTypeError(f"{label}(model) must return a list of dicts with 'params'; got {made!r:.80}")
    names = {id(place.parameter): place.name for place in reversed(param_places_in(model))}
    groups = []
    for given in made:
        its = given["params"]
        group = {**given, "params": [its] if hasattr(its, "dtype") else list(its)}
        first = [one[0] if isinstance(one, list | tuple) else one for one in group["params"]]
        if "param_names" not in group and all(id(one) in names for one in first):
            group["param_names"] = [names[id(one)] for one in first]
        groups.append(group)
    rows = rows_of([{**base, **_paramwise_base_options(group, None)} for group in groups])
    return ParamGroups(groups, ParamReport(tuple(replace(row, rules=(label,)) for row in rows)))


def _name_of_paramwise_match(match: Match) -> str:
    if isinstance(match, str):
        return repr(match)
    if isinstance(match, tuple):
        return " or ".join(one.__name__ for one in match)
    return getattr(match, "__name__", repr(match))
