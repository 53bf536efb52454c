"""Options by parameter as a user gives them: MMCV's `paramwise_cfg`, rules, or a function.

Trainer(model, "torch:SGD", {"lr": 0.01, "weight_decay": 1e-4}, paramwise=dict(
    custom_keys={"backbone": dict(lr_mult=0.1), ".head.": dict(decay_mult=0.0)}, norm_decay_mult=0.0))
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch.nn import Conv2d, GroupNorm, LayerNorm, Module
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.parameter import is_lazy

from kvstore_server import check
from kvtrainer.errors import ArgumentTypeError, ConfigurationError, NotInitializedError
from kvtrainer.param_rules import (
    Base,
    Duplicates,
    ParamGroups,
    ParamReport,
    Place,
    Rule,
    apply_rules,
    places_in,
    rows_of,
    unwrapped,
)

__all__ = ["apply_paramwise", "paramwise_rules"]

_log = logging.getLogger(__name__)

_NORMS = (_BatchNorm, _InstanceNorm, GroupNorm, LayerNorm)
_DEFORMABLE = frozenset({"DeformConv2d", "ModulatedDeformConv2d"})
_DECAYS = ("norm_decay_mult", "dwconv_decay_mult", "bias_decay_mult", "flat_decay_mult")
_MULTIPLIERS = ("bias_lr_mult", "dcn_offset_lr_mult", *_DECAYS)
_SWITCHES = ("bypass_duplicate", "custom_keys_merge")
_KEYS = ("custom_keys", *_MULTIPLIERS, *_SWITCHES, "precedence")
_ORDERS = {
    "mmcv": _MULTIPLIERS,
    "mmengine": (
        "bias_lr_mult", "dcn_offset_lr_mult", "norm_decay_mult", "bias_decay_mult", "dwconv_decay_mult",
        "flat_decay_mult",
    ),
}  # fmt: skip
"""The order in which the kinds of parameters are asked for."""


def apply_paramwise(
    model: Any, paramwise: Any, base: Mapping[str, Any], defaults: Mapping[str, Any] | None = None
) -> ParamGroups:
    """Make parameter groups for an optimizer.

    Args:
        model: A Module, or named parameters where no rule asks for modules. In place of a parameter there may be a
            list of replicas.
        paramwise: MMCV's paramwise_cfg, see `paramwise_rules`; a list of Rules, of which for each option the first
            counts; a function of the model that returns groups; None for one group.
        base: The options that the user gave the optimizer.
        defaults: Those that the optimizer has, with its own defaults. Without them the learning rate must be in `base`
            if anything multiplies it, and options that do not exist go unseen.

    Raises:
        ConfigurationError: `paramwise` is wrong, names an option that the optimizer does not have, or decays without a
            weight_decay in `base`; or a parameter appears twice, without bypass_duplicate.
        NotInitializedError: a rule asks for the form of a lazy parameter.

    Warns:
        UnmatchedRuleWarning: a rule or custom key matches no parameter.
        DuplicateParameterWarning: with bypass_duplicate, parameters that appear more than once.
    """
    model = unwrapped(model)
    if not isinstance(model, Module | Mapping) and isinstance(model, Iterable):
        model = list(model)  # an iterator is good for one pass only
    if paramwise is None or isinstance(paramwise, Mapping):
        cfg = dict(paramwise or {})
        rules = paramwise_rules(cfg, base)
        duplicates: Duplicates = "first" if not cfg else "warn" if cfg.get("bypass_duplicate") else "refuse"
        places = places_in(model)
        if cfg.get("precedence") == "mmengine":
            frozen = [place.name for place in places if _is_frozen(place)]
            places = [place for place in places if not _is_frozen(place)]
            if frozen:
                _log.warning("not in any group, because they are frozen: %s", ", ".join(frozen))
        return apply_rules(places, rules, Base(base, defaults), duplicates)
    if isinstance(paramwise, Sequence) and all(isinstance(rule, Rule) for rule in paramwise):
        return apply_rules(places_in(model), paramwise, Base(base, defaults))
    if callable(paramwise) and not isinstance(paramwise, type):
        return _made_by(paramwise, model, base, defaults)
    raise ArgumentTypeError(
        "paramwise must be a dict as MMCV's paramwise_cfg, a list of Rules or a function of the model, got "
        f"{paramwise!r:.80}"
    )


def paramwise_rules(cfg: Any, base: Mapping[str, Any]) -> list[Rule]:
    """Turn MMCV's paramwise_cfg into rules.

    Keys: custom_keys, {part of "." + name: {lr_mult, decay_mult, and options of the optimizer}}, of which the longest
    counts, in case of a tie the first in the alphabet; bias_lr_mult (not of norms); norm_decay_mult (batch, instance,
    group and layer norms); dwconv_decay_mult (Conv2d with in_channels == groups); bias_decay_mult (neither norms nor
    those convolutions); flat_decay_mult (what is one-dimensional otherwise); dcn_offset_lr_mult (conv_offset of a
    deformable convolution of MMCV); bypass_duplicate. A custom key takes its parameters out of all other rules, unless
    custom_keys_merge=True: then shorter keys, and after them the other rules, decide what longer ones leave open.
    precedence="mmengine" has bias_decay_mult count for depthwise convolutions too, before dwconv_decay_mult, and for
    norms without a norm_decay_mult, and frozen parameters are in no group; otherwise those have no rules.

    Raises:
        ArgumentTypeError: `cfg` or its custom_keys is no dict.
        ConfigurationError: a key is unknown, or a number none; or a decay multiplier has no weight_decay to multiply.
    """
    if not isinstance(cfg, Mapping):
        raise ArgumentTypeError(
            f"paramwise_cfg should be None or a dict, but got {type(cfg).__name__}: {cfg!r:.80}"
        )
    _check(cfg)
    has_decay = any(base.get(key) is not None for key in ("weight_decay", "wd"))
    custom = cfg.get("custom_keys") or {}
    wanted = [key for key in _DECAYS if key in cfg]
    wanted += [f"custom_keys[{key!r}]" for key, entry in custom.items() if "decay_mult" in entry]
    if wanted and not has_decay:
        raise ConfigurationError(
            f"base_wd should not be None: {', '.join(wanted)} multiplies the weight_decay of the optimizer, "
            "which is not given"
        )
    kinds = [key for key in _ORDERS[cfg.get("precedence", "mmcv")] if key in cfg]
    if not custom and not kinds:
        return []
    merges = bool(cfg.get("custom_keys_merge", False))
    rules = [Rule(_is_frozen, name="frozen", warn_unmatched=False)]
    rules += [
        _custom_rule(key, custom[key], stop=not merges) for key in sorted(custom, key=lambda k: (-len(k), k))
    ]
    return rules + [_kind_rule(key, cfg) for key in kinds]


def _check(cfg: Mapping[str, Any]) -> None:
    check.known("paramwise_cfg", cfg, _KEYS)
    for key in _MULTIPLIERS:
        if key in cfg:
            check.number(key, cfg[key])
    for key in _SWITCHES:
        check.boolean(key, cfg.get(key, False))
    check.one_of("precedence", cfg.get("precedence", "mmcv"), tuple(_ORDERS))
    custom = cfg.get("custom_keys", {})
    if not isinstance(custom, Mapping):
        raise ArgumentTypeError(
            f"If specified, custom_keys must be a dict, but got {type(custom).__name__}: {custom!r:.80}"
        )
    for key, entry in custom.items():
        if not isinstance(key, str) or not isinstance(entry, Mapping):
            raise ArgumentTypeError(
                "an entry of custom_keys is a part of a name and a dict such as dict(lr_mult=0.1), got "
                f"{key!r:.80}: {entry!r:.80}"
            )


def _custom_rule(key: str, entry: Mapping[str, Any], stop: bool) -> Rule:
    extra = {option: value for option, value in entry.items() if option not in ("lr_mult", "decay_mult")}
    return Rule(
        key,
        name=f"custom_keys[{key!r}]",
        lr_mult=entry.get("lr_mult"),
        decay_mult=entry.get("decay_mult"),
        extra=extra,
        stop=stop,
    )


def _kind_rule(key: str, cfg: Mapping[str, Any]) -> Rule:
    match = _KINDS[key]
    if key == "bias_decay_mult" and cfg.get("precedence") == "mmengine":
        match = _is_bias
    multiplier: dict[str, Any] = {"lr_mult" if key.endswith("lr_mult") else "decay_mult": cfg[key]}
    return Rule(match, name=key, stop=False, warn_unmatched=False, **multiplier)


def _is_frozen(place: Place) -> bool:
    return not place.parameter.requires_grad


def _is_norm(place: Place) -> bool:
    return isinstance(place.module, _NORMS)


def _is_depthwise(place: Place) -> bool:
    module = place.module
    if isinstance(module, Conv2d) and is_lazy(place.parameter):
        raise _too_early("whether a convolution is depthwise", place)
    return isinstance(module, Conv2d) and module.in_channels == module.groups


def _in_deformable(place: Place) -> bool:
    return any(cls.__name__ in _DEFORMABLE for cls in type(place.parent).__mro__)


def _is_offset(place: Place) -> bool:
    is_convolution = isinstance(place.module, Conv2d)
    return is_convolution and "conv_offset" in place.module_name and _in_deformable(place)


def _is_bias(place: Place) -> bool:
    return place.own_name == "bias" and not _in_deformable(place)


def _is_bias_with_rate(place: Place) -> bool:
    return _is_bias(place) and not _is_norm(place)


def _is_bias_with_decay(place: Place) -> bool:
    return _is_bias_with_rate(place) and not _is_depthwise(place)


def _is_flat(place: Place) -> bool:
    if is_lazy(place.parameter):
        raise _too_early("flat_decay_mult", place)
    return place.parameter.ndim == 1 and not _in_deformable(place)


def _too_early(key: str, place: Place) -> NotInitializedError:
    return NotInitializedError(
        f"{key} depends on the shape of {place.name!r}, which has none yet; run a forward pass before building the "
        "Trainer"
    )


_KINDS: Mapping[str, Callable[[Place], bool]] = {
    "bias_lr_mult": _is_bias_with_rate,
    "dcn_offset_lr_mult": _is_offset,
    "norm_decay_mult": _is_norm,
    "dwconv_decay_mult": _is_depthwise,
    "bias_decay_mult": _is_bias_with_decay,
    "flat_decay_mult": _is_flat,
}


def _made_by(
    function: Callable[[Any], Any], model: Any, base: Mapping[str, Any], defaults: Mapping[str, Any] | None
) -> ParamGroups:
    """Call a user's function for groups, and give their parameters the names that the model has."""
    label = getattr(function, "__name__", repr(function))
    made = function(model)
    if not isinstance(made, Sequence) or not all(
        isinstance(group, Mapping) and "params" in group for group in made
    ):
        raise ArgumentTypeError(
            f"{label}(model) must return a list of parameter groups, dicts with 'params'; got {made!r:.80}"
        )
    names = {id(place.parameter): place.name for place in reversed(places_in(model))}
    groups = []
    for given in made:
        group = {
            **given,
            "params": [given["params"]] if hasattr(given["params"], "dtype") else list(given["params"]),
        }
        first = [one[0] if isinstance(one, list | tuple) else one for one in group["params"]]
        if "param_names" not in group and all(id(one) in names for one in first):
            group["param_names"] = [names[id(one)] for one in first]
        groups.append(group)
    options = Base(base, defaults).options
    rows = rows_of([{**options, **Base(group).given} for group in groups])
    return ParamGroups(groups, ParamReport(tuple(replace(row, rules=(label,)) for row in rows)))
