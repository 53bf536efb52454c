"""Parameter groups: made out of what the Trainer was given, and the numbers read from them at every step."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.optim

from kvstore_server.optimizer import Optimizer, create_from_spec
from kvstore_server.optimizer.base import canonical_options
from kvstore_server.optimizer.torch_family import TorchOptimizer, is_plain
from kvtrainer.errors import ConfigurationError, UnknownNameError
from kvtrainer.memory.memory import Memory
from kvtrainer.parallel.policy import COPIES
from kvtrainer.parameters import collect
from kvtrainer.types import Group

NOTES = frozenset(
    {"name", "initial_lr", "initial_momentum", "max_lr", "min_lr", "base_momentum", "max_momentum", "swa_lr"}
)
"""Keys of a group that are no options: a label, and what torch's schedulers keep there."""
_LISTS = frozenset({"params", "param_names", COPIES})
_NUMBERS = frozenset({"lr", "weight_decay", "momentum", "betas"})
"""What must be finite in the groups of any optimizer."""


def is_foreign(optimizer: Optimizer) -> bool:
    """Whether it is a torch class that we do not know, whose groups may have any entries."""
    return isinstance(optimizer, TorchOptimizer) and optimizer.is_foreign


def make_groups(params: Any, optimizer: Optimizer, given: object, first: int = 0) -> list[Group]:
    """Return torch parameter groups with names, and options under torch's keys, checked.

    Args:
        params: As `parameters.collect` takes them, `first` too.
        optimizer: What the options are for.
        given: What the user gave as the optimizer. A torch instance brings its own groups, of the same parameters.

    Raises:
        ConfigurationError: parameters or options are wrong.
    """
    groups = collect(params, first)
    if isinstance(given, torch.optim.Optimizer):
        return _groups_of(given, groups)
    return [_with_checked_options(group, optimizer) for group in groups]


def read_options(groups: Sequence[Group], optimizer: Optimizer, layout: Memory) -> dict[str, Any]:
    """The numbers that hold now: per group its options, per parameter `lr_mult` and `wd_mult` where not 1.

    The form is the one of `kvstore_server.hyper`.

    Raises:
        ConfigurationError: a multiplier is not a number, or there is nothing that it could multiply.
    """
    lr_mult = _multipliers(layout, "lr_mult")
    if lr_mult and not any("lr" in group for group in groups):
        raise ConfigurationError(
            f"lr_mult of {layout.names[next(iter(lr_mult))]!r} would have no effect: {optimizer.registered_name} has "
            "no learning rate"
        )
    return {
        "groups": [options_of(group, optimizer) for group in groups],
        "lr_mult": lr_mult,
        "wd_mult": _multipliers(layout, "wd_mult"),
    }


def _groups_of(instance: torch.optim.Optimizer, groups: Sequence[Group]) -> list[Group]:
    kind = type(instance).__name__
    if any(COPIES in group for group in groups):
        raise ConfigurationError(
            f"a {kind} instance cannot train replicas, because its groups say nothing of devices; give the Trainer the "
            "class and its options instead"
        )
    if any(set(group) != {"params", "param_names"} for group in groups):
        raise ConfigurationError(
            f"the {kind} instance brings the options of its groups; give the Trainer the parameters without options"
        )
    names = {
        id(p): name for group in groups for p, name in zip(group["params"], group["param_names"], strict=True)
    }
    its = [p for group in instance.param_groups for p in group["params"]]
    if {id(p) for p in its} != set(names):
        raise ConfigurationError(
            f"the {kind} instance trains {len(its)} parameters, the Trainer was given {len(names)}, and they are not "
            "the same ones; give both the same parameters"
        )
    return [
        {**group, "param_names": [names[id(p)] for p in group["params"]]} for group in instance.param_groups
    ]


def _with_checked_options(group: Group, optimizer: Optimizer) -> Group:
    notes = {name: value for name, value in group.items() if name in NOTES}
    kept = {name: group[name] for name in ("params", "param_names", COPIES) if name in group}
    options = {name: value for name, value in group.items() if name not in notes and name not in kept}
    if isinstance(optimizer, TorchOptimizer) and optimizer.is_foreign:
        optimizer.check_foreign(options)
        return {**kept, **notes, **check_options(optimizer, options)}
    # Of the optimizer's own numbers only the names count here, and the pair of betas, of which one may be given.
    known = {name: optimizer.hyper[name] if name == "betas" else None for name in option_names(optimizer)}
    options = canonical_options(options, known, optimizer.registered_name)
    if optimizer.lr_scheduler is not None and "lr" in options:
        raise ConfigurationError(
            f"a parameter group has lr={options['lr']!r}, but {optimizer.lr_scheduler!r} decides the learning rate of "
            "every group; leave it out, and give parameters a lr_mult where theirs shall differ"
        )
    return {**kept, **notes, **check_options(optimizer, options)}


def option_names(optimizer: Optimizer) -> tuple[str, ...]:
    """The options that every group has."""
    return tuple(name for name in optimizer.plain_hyper() if name not in NOTES)


def options_of(group: Mapping[str, Any], optimizer: Optimizer) -> dict[str, Any]:
    """The options of a group that travel with every round, as plain numbers; of a foreign class all that are plain."""
    if not is_foreign(optimizer):
        return {name: _plain(group[name]) for name in option_names(optimizer)}
    found = {name: _plain(value) for name, value in group.items() if name not in _LISTS and name not in NOTES}
    return {name: value for name, value in found.items() if is_plain(value)}


def kept_entries(group: Mapping[str, Any], optimizer: Optimizer) -> dict[str, Any]:
    """What is saved of a group: options, and plain marks of schedules and scripts; of a foreign class all else too."""
    found = {name: value for name, value in group.items() if name not in _LISTS}
    if is_foreign(optimizer):
        return found
    known = {*option_names(optimizer), *NOTES}
    return {name: value for name, value in found.items() if name in known or is_plain(_plain(value))}


def check_options(optimizer: Optimizer, options: dict[str, Any]) -> dict[str, Any]:
    """Let the optimizer's own constructor look at the options of a group; return them as it takes them.

    Raises:
        ConfigurationError: it does not accept one, or one is not finite.
    """
    if not options:
        return {}
    for name, value in options.items():
        if is_foreign(optimizer) and name not in _NUMBERS:
            continue
        numbers = value if isinstance(value, tuple) else (value,)
        if any(isinstance(number, float) and not math.isfinite(number) for number in numbers):
            raise ConfigurationError(f"{optimizer.registered_name}: {name} must be finite, got {value!r}")
    if is_foreign(optimizer):
        return options
    spec = {"name": optimizer.registered_name, "hyper": {**optimizer.plain_hyper(), **options}}
    try:
        built = create_from_spec(spec)
    except UnknownNameError:  # an instance of a class that was never registered
        return options
    return {name: built.hyper[name] for name in options}


def _multipliers(layout: Memory, attribute: str) -> Mapping[int, float]:
    found = {}
    for i, parameter in enumerate(layout.parameters):
        value = getattr(parameter, attribute, None)
        if value is not None and value != 1:
            try:
                found[i] = float(value)
            except (TypeError, ValueError):
                found[i] = math.nan
            if not math.isfinite(found[i]):
                raise ConfigurationError(
                    f"{attribute} of {layout.names[i]!r} must be a finite number, got {value!r:.80}"
                )
    return found


def _plain(value: Any) -> Any:
    """A number for a 0-d tensor or a NumPy number: what can travel."""
    if isinstance(value, tuple | list):
        return tuple(_plain(item) for item in value)
    return value.item() if hasattr(value, "item") and not getattr(value, "shape", ()) else value
