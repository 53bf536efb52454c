"""Parameter groups: built from what a Trainer was given, and read at every step.

`collect_groups` brings any form of parameters (module, dict, list, torch groups, replicas) into torch's form;
`make_groups` adds options, checked by the optimizer's own constructor, under torch's names. `ParameterGroups` then owns
the live list.

- The groups are the source of truth for options. Each step reads them (`options`) and sends them to the store if they
  have changed; an unchanged result is the same object, which makes the comparison cheap.
- One list serves everyone: a torch instance, the optimizer made for joint updates, and the Trainer share it (`bind`),
  so that schedulers bound to any of them work.
- `trained` is the layout in memory. Where the live lists differ, `group_edits.py` checks the edits first.
- `UpdateCounter` counts updates per key, as MXNet does, for schedulers and bias corrections.
- Replicas follow the first replicas of all parameters in "params"; until a group has torch's form they are in COPIES.
"""

from __future__ import annotations

import gc
import math
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from operator import is_
from typing import Any, NamedTuple

import torch
import torch.distributed
import torch.optim
from torch import Tensor
from torch.nn import Module

from kvstore_server.optimizer import Optimizer, create_optimizer_from_spec
from kvstore_server.optimizer.base import canonical_options
from kvstore_server.optimizer.torch_family import TorchOptimizer, is_plain_torch_option
from kvtrainer.errors import ArgumentTypeError, ConfigurationError, SchedulerInUseError, UnknownNameError
from kvtrainer.memory.memory import DeviceMemory, Memory
from kvtrainer.parallel import DataParallel
from kvtrainer.parallel.replicas import COPIES, check_replicas
from kvtrainer.types import Group

NOTES = frozenset(
    {"name", "initial_lr", "initial_momentum", "max_lr", "min_lr", "base_momentum", "max_momentum", "swa_lr"}
)
"""Keys of a group that are not options: a label, and values that torch's schedulers store there."""
_LISTS = frozenset({"params", "param_names", COPIES})
_NUMBERS = frozenset({"lr", "weight_decay", "momentum", "betas"})
"""Options that must be finite for every optimizer."""
_GREATEST = torch.finfo(torch.float32).max
_AS_IT_IS = frozenset({bool, int, float, str, type(None)})
"""Types of options that are sent unchanged."""


class NamedParameters(NamedTuple):
    names: Sequence[str | None]
    parameters: Sequence[Tensor | Sequence[Tensor]]
    """Each is a parameter, or a list of its replicas."""
    are_given: bool
    """Whether the caller gave the names, as to torch's optimizers; a module's own do not count."""


class ParameterGroups:
    """A Trainer's groups, and the optimizer whose hyper-parameters are their defaults."""

    live: list[Group]
    """The groups in torch's form, with replicas; an instance's own list, if there is one."""

    def __init__(
        self, names: list[list[str]], optimizer: Optimizer, instance: torch.optim.Optimizer | None
    ) -> None:
        self.names = names
        self.optimizer = optimizer
        self.instance = instance
        self.counts = UpdateCounter(optimizer)
        self.made: torch.optim.Optimizer | None = None
        """The torch optimizer that was created for joint updates of all parameters."""
        self.defaults = dict(optimizer.hyper)
        self.trained: list[list[Tensor]] = []
        """The parameters of each group, with replicas, as laid out; scripts may have edited `live` since."""
        self._known: list[Group] = []
        self._option_names: Sequence[str] | None = (
            None if is_foreign_optimizer(optimizer) else group_option_names(optimizer)
        )
        """None for an unknown torch class, whose groups may have any entries."""
        self._last: dict[str, Any] = {}
        """The last result of `options`."""

    def bind(self, live: list[Group]) -> None:
        """Use this list of groups from now on, for every optimizer that shares it."""
        self.live = live
        for shown in (self.instance, self.made):
            if shown is not None:
                shown.param_groups = live
        # With a single group the optimizer shows its values, otherwise the defaults.
        self.optimizer.hyper = live[0] if len(live) == 1 else dict(self.defaults)

    def set_trained(self, names: list[list[str]]) -> None:
        """Record that the present parameters are laid out, under these names."""
        self.names = names
        self.trained = [list(group["params"]) for group in self.live]
        self._known = list(self.live)

    def follow_instance(self) -> None:
        """Adopt the groups of the torch instance, if there is one; its load_state_dict creates a new list."""
        if self.instance is not None and self.instance.param_groups is not self.live:
            self.bind(self.instance.param_groups)

    def are_edited(self) -> bool:
        """Return whether the groups have other parameters than were laid out, or in another order."""
        if len(self.live) != len(self.trained):
            return True
        # This runs in every step: one comparison of identities per parameter, without a Python frame for each.
        for group, trained in zip(self.live, self.trained, strict=True):
            members = group.get("params")
            if (
                type(members) is not list
                or len(members) != len(trained)
                or not all(map(is_, members, trained))
            ):
                return True
        return False

    def is_new(self, group: Group) -> bool:
        return not any(group is known for known in self._known)

    def options(
        self, memory: Memory, coming: Sequence[bool] | None, stages: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Read the hyper-parameters of the coming update: options per group, and multipliers per parameter.

        The form is that of `kvstore_server.engine.agreed_options`. Multipliers of 1 are left out. If nothing has
        changed since the last call the result is the same object, which must not be modified. `stages` are further
        options that must be the same on all workers.
        """
        # 1. The options of each group, as plain values.
        if self.optimizer.lr_scheduler is not None:
            self.counts.apply(self.live, coming)
        options: dict[str, Any] = {"groups": [], "stages": stages}
        for group in self.live:
            names = self._option_names
            if names is None:
                names = [
                    n
                    for n in group
                    if n not in _LISTS | NOTES and is_plain_torch_option(plain_number(group[n]))
                ]
            try:
                found = {
                    n: group[n] if type(group[n]) in _AS_IT_IS else _plain_group_option(n, group[n])
                    for n in names
                }
            except KeyError as error:
                raise ConfigurationError(
                    f"parameter group {len(options['groups'])} no longer has {error}; restore it, or set the default "
                    f"{self.defaults.get(error.args[0])!r}"
                ) from error
            options["groups"].append(found)
        # 2. Multipliers, which scripts set as attributes of parameters.
        has_attributes = any(memory.devices[0].tracker.attributes)
        for name in ("lr_mult", "wd_mult"):
            values = [getattr(p, name, None) for p in memory.parameters] if has_attributes else ()
            given = {i: value for i, value in enumerate(values) if value is not None and value != 1}
            options[name] = _checked_group_multipliers(name, given, memory.names) if given else given
        # 3. Check what has changed.
        if options != self._last:
            if options["lr_mult"] and not any("lr" in group for group in self.live):
                raise ConfigurationError(
                    f"lr_mult of {memory.names[next(iter(options['lr_mult']))]!r} would have no effect: "
                    f"{self.optimizer.registered_name} has no learning rate"
                )
            for group in options["groups"]:
                check_group_options(self.optimizer, group)
            self._last = options
        return self._last

    def over(self, device: DeviceMemory) -> list[Group]:
        members: list[list[Any]] = [[] for _ in self.live]
        for spec, parameter in zip(device.plan.specs, device.parameters, strict=True):
            members[spec.group].append(parameter)
        return [
            {**{name: value for name, value in group.items() if name not in _LISTS}, "params": its}
            for group, its in zip(self.live, members, strict=True)
        ]

    @contextmanager
    def without_replicas(self) -> Iterator[None]:
        """Within the block, groups contain only first replicas, whose state stands for that of all."""
        kept = [{name: group[name] for name in _LISTS & group.keys()} for group in self.live]
        former = self.trained
        self.trained = [members[: len(names)] for members, names in zip(former, self.names, strict=True)]
        for group, names in zip(self.live, self.names, strict=True):
            group.update({name: group[name][: len(names)] for name in _LISTS & group.keys()})
        try:
            yield
        finally:
            self.trained = former
            # torch's load_state_dict may have replaced the groups within the block.
            for group, lists in zip(self.live, kept, strict=True):
                group.update(lists)


class UpdateCounter:
    """Counts updates, and sets the learning rate of all groups if the optimizer has a lr_scheduler.

    As in MXNet, the learning rate of an update is `lr_scheduler(n)`, where n counts from `begin_num_update` and is the
    greatest update count of all keys. Every worker evaluates the scheduler; the counts, and so the rates, are equal.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        optimizer.num_update = optimizer.begin_num_update
        self._behind: dict[int, int] = {}
        """Key → by how many updates it is behind the key with most; others are left out."""
        self._set: float | None = None

    def apply(self, groups: Sequence[Group], coming: Sequence[bool] | None) -> None:
        """Set the learning rate for the update of `coming` keys (None: of any, since other workers decide)."""
        scheduler = self._optimizer.lr_scheduler
        assert scheduler is not None
        foreign = [group["lr"] for group in groups if self._set is not None and group["lr"] != self._set]
        if foreign:
            raise SchedulerInUseError(
                f"the learning rate of a parameter group was set to {foreign[0]!r}, but {scheduler!r} decides it; set "
                "the scheduler's base_lr or a parameter's lr_mult, or build the Trainer without lr_scheduler"
            )
        # The count only rises if a key is updated that has the greatest count already.
        leads = coming is None or any(is_in and key not in self._behind for key, is_in in enumerate(coming))
        rate = float(scheduler(self._optimizer.num_update + leads))
        for group in groups:
            group["lr"] = rate
        self._set = rate

    def count(self, updated: Sequence[bool]) -> None:
        if all(updated):
            self._optimizer.num_update += 1
        elif any(updated):
            for key, was_in in enumerate(updated):
                if not was_in:
                    self._behind[key] = self._behind.get(key, 0) + 1
            # If every key is behind, the greatest count has not risen: subtract what they are all behind by.
            least = min(self._behind.values()) if len(self._behind) == len(updated) else 0
            if least:
                self._behind = {key: count - least for key, count in self._behind.items() if count > least}
            self._optimizer.num_update += 1 - least

    def restore_one(self, key: int, updates: int, num_keys: int) -> None:
        most = self._optimizer.num_update - self._optimizer.begin_num_update
        if updates != most - self._behind.get(key, 0):
            counts = {one: most - self._behind.get(one, 0) for one in range(num_keys)}
            self.restore({**counts, key: updates}, num_keys)

    def export(self) -> tuple[int, dict[int, int]]:
        """Return the greatest update count of all keys, and key → by how many updates it is behind."""
        return self._optimizer.num_update, self._behind

    def adopt(self, num_update: int, behind: Mapping[int, int]) -> None:
        """Restore what `export` returned."""
        self._optimizer.num_update, self._behind, self._set = num_update, dict(behind), None

    def restore(self, updates: Mapping[int, int], num_keys: int) -> None:
        """Set the number of updates per key, without `begin_num_update`; missing keys have had none."""
        counts = [updates.get(key, 0) for key in range(num_keys)]
        most = max(counts)
        self._optimizer.num_update = self._optimizer.begin_num_update + most
        self._behind = {key: most - count for key, count in enumerate(counts) if count < most}
        # The learning rates of the groups come from the state that was loaded.
        self._set = None


def is_foreign_optimizer(optimizer: Optimizer) -> bool:
    """Return whether this is an unknown torch class, whose groups may have any entries."""
    return isinstance(optimizer, TorchOptimizer) and optimizer.is_foreign


def collect_groups(params: Any, taken: Collection[str] = ()) -> tuple[list[Group], bool]:
    """Return groups in torch's form, with "params", "param_names" and options; and whether names were given.

    Takes a Module or DataParallel, a dict of parameters (in sorted order of its keys), `named_parameters()`, a list of
    parameters, or a list of torch parameter groups whose "params" is any of those. A parameter that appears several
    times counts once, at its first place. One without a name is named by its position, after the names in `taken`. A
    list of replicas may stand for a parameter, one per device, in the same order of devices for every parameter:
    "params" then has the first replicas, and the group's COPIES those on each further device.
    """
    groups, are_given = [], False
    seen: dict[int, Sequence[Any]] = {}
    """id of the first replica → all replicas of the parameter."""
    found: dict[str, Sequence[Any]] = {}
    for options, named in _split_groups(params):
        are_given = are_given or named.are_given
        names: list[str] = []
        for name, given in zip(named.names, named.parameters, strict=True):
            # 1. Skip parameters that were seen. Usually this is a plain leaf, and there may be thousands.
            is_leaf = isinstance(given, Tensor) and given.is_leaf
            replicas = (given,) if is_leaf else _checked_group_replicas(name, given)
            first = id(replicas[0]) if replicas else 0
            if first in seen and list(map(id, seen[first])) == list(map(id, replicas)):
                continue
            # 2. Name the parameter.
            at = len(taken) + len(found)
            if name is None:
                name = unused_number(at, taken, found) if taken else str(at)
            if name in found:
                raise ConfigurationError(f"two parameters have the name {name!r}; give each a different name")
            seen[first] = found[name] = replicas
            names.append(name)
        # 3. Regroup replicas by device. Lists of different lengths are refused below.
        num_devices = min([len(found[name]) for name in names], default=0)
        by_device = [[found[name][at] for name in names] for at in range(num_devices)]
        group: Group = {**options, "params": by_device[0] if by_device else [], "param_names": names}
        groups.append({**group, COPIES: by_device[1:]} if len(by_device) > 1 else group)
    if not found:
        raise ConfigurationError("there are no parameters to train; got an empty list")
    check_replicas(found)
    return groups, are_given


def unused_number(at: int, *taken: Collection[str]) -> str:
    """Return the first number from `at` on that is not a name in any of the collections."""
    while any(str(at) in names for names in taken):
        at += 1
    return str(at)


def _checked_group_replicas(name: str | None, given: Any) -> tuple[Any, ...]:
    is_one = isinstance(given, Tensor) or not isinstance(given, Sequence)
    replicas = (given,) if is_one else tuple(given)
    what = "a parameter" if name is None else repr(name)
    for parameter in replicas:
        if not isinstance(parameter, Tensor):
            raise ArgumentTypeError(f"{_group_type_problem(parameter)} for {what}")
        if not parameter.is_leaf:
            raise ConfigurationError(
                f"{what} is the result of a computation; only leaf tensors can be trained"
            )
    return replicas


def _split_groups(params: Any) -> list[tuple[Group, NamedParameters]]:
    if isinstance(params, Tensor):
        raise ArgumentTypeError(
            "parameters must come in a list or a dict; got a single tensor, put it in a list"
        )
    items = [] if isinstance(params, Mapping | Module) else list(_check_group_order(params))
    if not items or not all(isinstance(item, dict) for item in items):
        return [({}, named_group_members(items or params))]
    found: list[tuple[Group, NamedParameters]] = []
    for given in items:
        options = {name: value for name, value in given.items() if name not in ("params", "param_names")}
        if "params" not in given:
            got = ", ".join(map(str, given)) or "nothing"
            raise ConfigurationError(f"a parameter group needs 'params'; got only {got}")
        inner, names = given["params"], given.get("param_names")
        named = named_group_members([inner] if isinstance(inner, Tensor) else inner)
        if names is not None and len(names) != len(named.parameters):
            raise ConfigurationError(
                f"a parameter group has {len(named.parameters)} parameters but {len(names)} param_names; give a name "
                "to each"
            )
        if names is not None:
            named = NamedParameters(list(map(str, names)), named.parameters, True)
        found.append((options, named))
    return found


def named_group_members(params: Any) -> NamedParameters:
    """Return the parameters and their names, if any, of a module, a mapping, or an iterable of parameters or pairs.

    A module that has a name in a pair or mapping stands for its parameters, named as in a module that contains it.

    Raises:
        ConfigurationError: The order is not the same in every process, such as that of a set.
    """
    is_module = isinstance(params, Module)
    if isinstance(params, DataParallel):
        params = params.named_replicas()
    elif isinstance(params, Module):
        params = params.named_parameters()
    elif isinstance(params, Mapping):
        params = [(str(key), params[key]) for key in sorted(params, key=str)]
    names, given = list[str | None](), []
    for item in _check_group_order(params):
        is_named = isinstance(item, tuple) and len(item) == 2 and isinstance(item[0], str)
        name, one = item if is_named else (None, item)
        is_part = is_named and isinstance(one, Module) and not isinstance(one, DataParallel)
        for its_name, parameter in one.named_parameters(prefix=name) if is_part else [(name, one)]:
            names.append(its_name)
            given.append(parameter)
    return NamedParameters(names, given, not is_module and any(name is not None for name in names))


def _check_group_order(params: Any) -> Iterable[Any]:
    if isinstance(params, Set):
        raise ArgumentTypeError(
            "a set of parameters has no order that all workers share; give a list or a dict"
        )
    if not isinstance(params, Iterable) or isinstance(params, str | bytes):
        raise ArgumentTypeError(_group_type_problem(params))
    return params


def _group_type_problem(got: Any) -> str:
    return f"expected a Module, or a list or dict of parameters, got {type(got).__name__}"


def refuse_parameters_of_ddp(parameters: Sequence[Tensor]) -> None:
    """Raise ConfigurationError if DistributedDataParallel wraps any of the parameters. A parameter does not know its
    wrapper, so all objects of the process are searched; but only if there is a process group.
    """
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return
    ids = {id(p) for p in parameters}
    if _wrapped_in_ddp(ids):
        gc.collect()  # unused wrappers do not count
    if found := _wrapped_in_ddp(ids):
        raise ConfigurationError(
            f"{found} of the {len(parameters)} parameters belong to a DistributedDataParallel module, which averages "
            "gradients over ranks in every backward pass; the kvstore would sum them again. Give the Trainer "
            "kvstore=None, or the module without the wrapper"
        )


def _wrapped_in_ddp(ids: set[int]) -> int:
    kind = torch.nn.parallel.DistributedDataParallel
    things = gc.get_objects()
    # type(), because isinstance() runs code of some objects. Distinct types first, because there are hundreds of
    # thousands of objects.
    kinds = {found for found in set(map(type, things)) if kind in found.__mro__}
    wrappers = [thing for thing in things if type(thing) in kinds] if kinds else []
    return len(ids & {id(p) for wrapper in wrappers for p in wrapper.module.parameters()})


def make_groups(
    params: Any, optimizer: Optimizer, given: object, taken: Collection[str] = ()
) -> tuple[list[Group], bool]:
    """Return parameter groups in torch's form, with names and checked options, and whether names were given.

    `given` is what the user passed as optimizer: a torch instance has its own groups, which must have the same
    parameters. The other arguments are those of `collect_groups`.
    """
    groups, are_given = collect_groups(params, taken)
    _check_finite_group_options(optimizer, optimizer.plain_hyper())
    optimizer.try_out(optimizer.hyper)
    if isinstance(given, torch.optim.Optimizer):
        return _groups_of(given, groups), are_given
    return [group_with_checked_options(group, optimizer) for group in groups], are_given


def _groups_of(instance: torch.optim.Optimizer, groups: Sequence[Group]) -> list[Group]:
    kind = type(instance).__name__
    if any(COPIES in group for group in groups):
        raise ConfigurationError(
            f"a {kind} instance cannot train replicas, because its groups do not know about devices; give the Trainer "
            "the class and its options instead"
        )
    if any(set(group) != {"params", "param_names"} for group in groups):
        raise ConfigurationError(
            f"the {kind} instance has the options of its groups; give the Trainer the parameters without options"
        )
    names = {
        id(p): name for group in groups for p, name in zip(group["params"], group["param_names"], strict=True)
    }
    its = [p for group in instance.param_groups for p in group["params"]]
    if {id(p) for p in its} != set(names):
        raise ConfigurationError(
            f"the {kind} instance trains {len(its)} parameters, but the Trainer was given {len(names)}, and they are "
            "not the same; give both the same parameters"
        )
    return [
        {**group, "param_names": [names[id(p)] for p in group["params"]]} for group in instance.param_groups
    ]


def group_with_checked_options(group: Group, optimizer: Optimizer) -> Group:
    """Return a parameter group with its options under their canonical names, checked for the optimizer.

    Raises:
        ConfigurationError: An option is unknown or has a wrong value, or it sets the rate that a scheduler decides.
    """
    kept = {name: group[name] for name in group if name in _LISTS | NOTES}
    options = {name: value for name, value in group.items() if name not in kept}
    if isinstance(optimizer, TorchOptimizer) and optimizer.is_foreign:
        optimizer.check_foreign(options)
        return {**kept, **check_group_options(optimizer, options)}
    # Only the names of the optimizer's options matter here; except for betas, since a group may set one of the two.
    known = {
        name: optimizer.hyper[name] if name == "betas" else None for name in group_option_names(optimizer)
    }
    options = canonical_options(options, known, optimizer.registered_name)
    if optimizer.lr_scheduler is not None and "lr" in options:
        raise ConfigurationError(
            f"a parameter group has lr={options['lr']!r}, but {optimizer.lr_scheduler!r} decides the learning rate of "
            "every group; leave it out, and set lr_mult on parameters whose rate should differ"
        )
    return {**kept, **check_group_options(optimizer, options)}


def group_option_names(optimizer: Optimizer) -> tuple[str, ...]:
    return tuple(name for name in optimizer.plain_hyper() if name not in NOTES)


def kept_entries(group: Mapping[str, Any], optimizer: Optimizer) -> dict[str, Any]:
    """Return the entries of a group that are saved: options and plain marks of schedules; for a foreign class, all."""
    found = {name: value for name, value in group.items() if name not in _LISTS}
    if is_foreign_optimizer(optimizer):
        return found
    known = {*group_option_names(optimizer), *NOTES}
    return {
        name: value
        for name, value in found.items()
        if name in known or is_plain_torch_option(plain_number(value))
    }


def check_group_options(optimizer: Optimizer, options: dict[str, Any]) -> dict[str, Any]:
    """Check options of a group with the optimizer's own constructor; return them as it converts them."""
    _check_finite_group_options(optimizer, options)
    if is_foreign_optimizer(optimizer) or not options:
        return options
    spec = {"name": optimizer.registered_name, "hyper": {**optimizer.plain_hyper(), **options}}
    try:
        built = create_optimizer_from_spec(spec)
    except UnknownNameError:  # an instance of a class that was never registered
        return options
    optimizer.try_out(built.hyper)
    return {name: built.hyper[name] for name in options}


def group_option_problems(groups: Sequence[Mapping[str, Any]], optimizer: Optimizer) -> Iterator[str]:
    """Yield the reasons why the optimizer does not accept options of saved groups. Missing options are accepted."""
    for at, options in enumerate(groups):
        known = {
            name: plain_number(options[name]) for name in group_option_names(optimizer) if name in options
        }
        try:
            check_group_options(optimizer.without_scheduler(), known)
        except ConfigurationError as error:
            yield f"the options of group {at} are not valid here: {error}"
        except Exception as error:  # torch's classes compare values before they check types
            yield f"the options of group {at} cannot be read ({type(error).__name__}: {error})"


def _check_finite_group_options(optimizer: Optimizer, options: Mapping[str, Any]) -> None:
    must_be_finite = _NUMBERS & options.keys() if is_foreign_optimizer(optimizer) else options
    for name in must_be_finite:
        values = options[name] if isinstance(options[name], tuple) else (options[name],)
        # Checked here, because a server that fails in the middle of an update cannot continue.
        most = _GREATEST if name in _NUMBERS else sys.float_info.max
        if any(isinstance(number, float | int) and not abs(number) <= most for number in values):
            bound = "" if most > _GREATEST else " in float32"
            raise ConfigurationError(
                f"{optimizer.registered_name}: {name} must be finite{bound}, got {options[name]!r}"
            )


def plain_number(value: Any) -> Any:
    """Return a plain number for a tensor of one element or a NumPy number; other values are unchanged."""
    if isinstance(value, tuple | list):
        return tuple(plain_number(item) for item in value)
    if isinstance(value, Tensor):  # torch takes a learning rate of shape (1,), too
        return value.item() if value.numel() == 1 else value
    return value.item() if hasattr(value, "item") and not getattr(value, "shape", ()) else value


def _plain_group_option(name: str, value: Any) -> Any:
    found = plain_number(value)
    if getattr(found, "shape", ()):
        raise ConfigurationError(f"{name} must be one value, got {value!r:.80}")
    return found


def _checked_group_multipliers(
    attribute: str, given: dict[int, Any], names: Sequence[str]
) -> dict[int, float]:
    found = dict(given)
    for i, value in given.items():
        try:
            found[i] = float(value)
        except (TypeError, ValueError):
            found[i] = math.nan
        if not math.isfinite(found[i]):
            raise ConfigurationError(
                f"{attribute} of {names[i]!r} must be a finite number, got {value!r:.80}"
            )
    return found
