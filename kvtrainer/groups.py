"""Parameter groups: made of what the Trainer was given, and the numbers that are read from them at every step."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.optim

from kvstore_server.optimizer import Optimizer, create_from_spec
from kvstore_server.optimizer.base import canonical_options
from kvstore_server.optimizer.torch_family import TorchOptimizer, is_plain
from kvtrainer.errors import ConfigurationError, UnknownNameError
from kvtrainer.memory.memory import DeviceMemory, Memory
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


class ParameterGroups:
    """The groups of a Trainer, which say the truth about options, and the optimizer that the options are for.

    Args:
        names: of the parameters of each group, without replicas.
        optimizer: its numbers are the defaults of the groups.
        instance: the torch optimizer that shares the groups, if there is one.
    """

    live: list[Group]
    """The groups as torch has them, with replicas; for an instance, its own."""

    def __init__(
        self, names: list[list[str]], optimizer: Optimizer, instance: torch.optim.Optimizer | None
    ) -> None:
        self.names = names
        self.optimizer = optimizer
        self.instance = instance
        self.made: torch.optim.Optimizer | None = None
        """The torch optimizer that was made for an update of all parameters together."""
        self.defaults = dict(optimizer.hyper)
        self._option_names = None if is_foreign(optimizer) else option_names(optimizer)
        """None of a torch class that we do not know, whose groups may have any entries."""
        self._checked: dict[str, Any] = {}
        """The options that were checked last."""

    def bind(self, live: list[Group]) -> None:
        """Go on with this list of groups, everywhere."""
        self.live = live
        for shown in (self.instance, self.made):
            if shown is not None:
                shown.param_groups = live
        # With several groups the optimizer shows the defaults.
        self.optimizer.hyper = live[0] if len(live) == 1 else dict(self.defaults)

    def follow_instance(self) -> None:
        """Take over the groups of the torch instance, if there is one, which loading a state_dict replaces.

        Raises:
            ConfigurationError: they have other parameters.
        """
        if self.instance is None:
            return
        if self.instance.param_groups is not self.live:
            self.bind(self.instance.param_groups)
        if [len(group["params"]) for group in self.live] != [len(names) for names in self.names]:
            raise ConfigurationError(
                f"parameters were added to the {type(self.instance).__name__} instance behind the Trainer's back; "
                "use trainer.add_param_group"
            )

    def options(self, memory: Memory) -> dict[str, Any]:
        """Read the numbers that hold now: per group its options, per parameter `lr_mult` and `wd_mult` where not 1.

        Those that have changed are checked. The form is the one of `kvstore_server.hyper`.

        Raises:
            ConfigurationError: a number is not one that the optimizer takes, or there is nothing that a multiplier
                could multiply.
        """
        lr_mult = _multipliers(memory, "lr_mult")
        if lr_mult and not any("lr" in group for group in self.live):
            raise ConfigurationError(
                f"lr_mult of {memory.names[next(iter(lr_mult))]!r} would have no effect: "
                f"{self.optimizer.registered_name} has no learning rate"
            )
        options: dict[str, Any] = {
            "groups": [self._options_of(group) for group in self.live],
            "lr_mult": lr_mult,
            "wd_mult": _multipliers(memory, "wd_mult"),
        }
        if options != self._checked:
            for group in options["groups"]:
                check_options(self.optimizer, group)
            self._checked = options
        return options

    def named(self) -> list[Group]:
        """The groups with the names of their parameters, which those of an instance lack."""
        rows = zip(self.live, self.names, strict=True)
        return [{"param_names": names, **group} for group, names in rows]

    def over(self, device: DeviceMemory) -> list[Group]:
        """The groups with the parameters of one device alone."""
        members: list[list[Any]] = [[] for _ in self.live]
        for spec, parameter in zip(device.plan.specs, device.parameters, strict=True):
            members[spec.group].append(parameter)
        return [
            {**{name: value for name, value in group.items() if name not in _LISTS}, "params": its}
            for group, its in zip(self.live, members, strict=True)
        ]

    @contextmanager
    def without_replicas(self) -> Iterator[None]:
        """While it is open the groups have the first replicas alone, whose state stands for that of all."""
        kept = [{name: group[name] for name in _LISTS & group.keys()} for group in self.live]
        for group, names in zip(self.live, self.names, strict=True):
            group.update({name: group[name][: len(names)] for name in _LISTS & group.keys()})
        try:
            yield
        finally:
            # Loading puts new groups in the place of these.
            for group, lists in zip(self.live, kept, strict=True):
                group.update(lists)

    def _options_of(self, group: Mapping[str, Any]) -> dict[str, Any]:
        """The options of a group that travel with every round, as plain numbers; of a foreign class all plain ones."""
        if self._option_names is not None:
            return {name: _plain(group[name]) for name in self._option_names}
        found = {
            name: _plain(value) for name, value in group.items() if name not in _LISTS and name not in NOTES
        }
        return {name: value for name, value in found.items() if is_plain(value)}


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


def _plain(value: Any) -> Any:
    """A number for a 0-d tensor or a NumPy number: what can travel."""
    if isinstance(value, tuple | list):
        return tuple(_plain(item) for item in value)
    return value.item() if hasattr(value, "item") and not getattr(value, "shape", ()) else value


def _multipliers(memory: Memory, attribute: str) -> Mapping[int, float]:
    found = {}
    for i, parameter in enumerate(memory.parameters):
        value = getattr(parameter, attribute, None)
        if value is not None and value != 1:
            try:
                found[i] = float(value)
            except (TypeError, ValueError):
                found[i] = math.nan
            if not math.isfinite(found[i]):
                raise ConfigurationError(
                    f"{attribute} of {memory.names[i]!r} must be a finite number, got {value!r:.80}"
                )
    return found
