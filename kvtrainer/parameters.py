"""Parameters and their names, out of any of the forms in which a Trainer is given them, checked."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any

import torch.distributed
from torch import Tensor
from torch.nn import Module

from kvtrainer.errors import ConfigurationError
from kvtrainer.parallel import DataParallel
from kvtrainer.parallel.policy import COPIES, MEMBERSHIP, check_replicas, same_devices
from kvtrainer.types import Group

Named = list[tuple[str | None, Tensor | Sequence[Tensor]]]
"""Names, and each one's parameter or list of replicas."""


def collect(params: Any, first: int = 0) -> list[Group]:
    """Bring parameters into torch's form: a list of groups with "params", "param_names" and options.

    Takes a Module or DataParallel, a dict of parameters (in sorted order of its keys), `named_parameters()`, a list
    of parameters, or a list of torch parameter groups whose "params" is any of those. A parameter that appears more
    than once counts once, where it appears first. One without a name is called by its position, from `first` on.

    In place of a parameter there may be a list of its replicas, one for each device, in the same order of devices for
    every parameter. "params" then has the first ones, and the group's COPIES those of each further device.

    Raises:
        ConfigurationError: anything else, nothing at all, or a name that stands for two parameters.
    """
    groups = []
    seen: dict[int, tuple[int, ...]] = {}
    found: dict[str, Sequence[Tensor]] = {}
    for options, named in _groups(params):
        names: list[str] = []
        for name, given in named:
            is_alone = isinstance(given, Tensor)
            replicas: Sequence[Any] = (given,)
            if not is_alone and isinstance(given, Sequence):
                replicas = list(given)
            ids = (id(given),) if is_alone else tuple(map(id, replicas))
            if ids and seen.get(ids[0]) == ids:
                continue
            for parameter in replicas:
                if not isinstance(parameter, Tensor) or not parameter.is_leaf:
                    raise _not_trainable(name, parameter)
            label = str(first + len(found)) if name is None else name
            if not is_alone or ids[0] in seen or hasattr(given, MEMBERSHIP):
                check_replicas(label, replicas, seen)
            if label in found:
                raise ConfigurationError(f"two parameters are called {label!r}; give each a name of its own")
            for one in ids:
                seen[one] = ids
            found[label] = replicas
            names.append(label)
        rows = [found[name] for name in names]
        # Those of different lengths are refused below.
        by_device = [[replicas[at] for replicas in rows] for at in range(min(map(len, rows), default=1))]
        group: Group = {**options, "params": by_device[0], "param_names": names}
        groups.append({**group, COPIES: by_device[1:]} if len(by_device) > 1 else group)
    if not found:
        raise ConfigurationError("there are no parameters to train; got an empty list")
    same_devices(found)
    return groups


def _groups(params: Any) -> list[tuple[Group, Named]]:
    """Options and parameters of every group."""
    if isinstance(params, Tensor):
        raise ConfigurationError(
            "parameters must come in a list or a dict; got a single tensor, put it in a list"
        )
    if isinstance(params, Mapping | Module):
        return [({}, _named(params))]
    items = list(_ordered(params))
    if items and all(isinstance(item, dict) for item in items):
        return [_group(item) for item in items]
    return [({}, _named(items))]


def _group(given: Group) -> tuple[Group, Named]:
    if "params" not in given:
        got = ", ".join(map(str, given)) or "nothing"
        raise ConfigurationError(f"a parameter group needs 'params'; got only {got}")
    inner = given["params"]
    options = {name: value for name, value in given.items() if name not in ("params", "param_names")}
    named = _named([inner] if isinstance(inner, Tensor) else inner)
    given_names = given.get("param_names")
    if given_names is None:
        return options, named
    if len(given_names) != len(named):
        raise ConfigurationError(
            f"a parameter group has {len(named)} parameters but {len(given_names)} param_names; give a name to each"
        )
    return options, [(str(name), parameter) for name, (_, parameter) in zip(given_names, named, strict=True)]


def _named(params: Any) -> Named:
    if isinstance(params, DataParallel):
        return list(params.named_replicas())
    if isinstance(params, Module):
        return list(params.named_parameters())
    if isinstance(params, Mapping):
        return [(str(key), params[key]) for key in sorted(params, key=str)]
    named: Named = []
    for item in _ordered(params):
        if isinstance(item, tuple) and len(item) == 2 and isinstance(item[0], str):
            named.append(item)
        else:
            named.append((None, item))
    return named


def _ordered(params: Any) -> Iterable[Any]:
    if isinstance(params, Set):
        raise ConfigurationError(
            "a set of parameters has no order that all workers share; give a list or a dict"
        )
    if not isinstance(params, Iterable) or isinstance(params, str | bytes):
        raise ConfigurationError(_expected(params))
    return params


def _not_trainable(name: str | None, parameter: Any) -> ConfigurationError:
    what = "a parameter" if name is None else f"{name!r}"
    if not isinstance(parameter, Tensor):
        return ConfigurationError(f"{_expected(parameter)} for {what}")
    return ConfigurationError(f"{what} is the result of a computation; only leaf tensors can be trained")


def _expected(got: Any) -> str:
    return f"expected a Module, or a list or dict of parameters, got {type(got).__name__}"


def refuse_ddp(params: Any) -> None:
    """Raise ConfigurationError if a Trainer with a store is given a DistributedDataParallel module."""
    given = params["params"] if isinstance(params, dict) and "params" in params else params
    if _is_ddp(given):
        raise _sums_twice("the module is wrapped in DistributedDataParallel")
    if isinstance(given, list | tuple):
        for item in given:
            if isinstance(item, dict) and _is_ddp(item.get("params")):
                raise _sums_twice("the module of a parameter group is wrapped in DistributedDataParallel")


def refuse_parameters_of_ddp(parameters: Sequence[Tensor]) -> None:
    """Raise ConfigurationError if some of a Trainer's parameters belong to a DistributedDataParallel module.

    Nothing in a parameter tells. All objects of the process are looked through, but only where there is a process
    group, without which nobody can have wrapped anything.
    """
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return
    ids = {id(p) for p in parameters}
    if _wrapped_in_ddp(ids):
        gc.collect()  # a wrapper that nobody uses any more does not count
    if found := _wrapped_in_ddp(ids):
        raise _sums_twice(
            f"{found} of the {len(parameters)} parameters belong to a DistributedDataParallel module"
        )


def _wrapped_in_ddp(ids: set[int]) -> int:
    """Count how many of these tensors are parameters of a DistributedDataParallel module."""
    kind = torch.nn.parallel.DistributedDataParallel
    things = gc.get_objects()
    # By type, not by isinstance: some objects run code when they are asked for their class. And by distinct types,
    # because there are hundreds of thousands of things.
    kinds = {found for found in set(map(type, things)) if kind in found.__mro__}
    wrappers = [thing for thing in things if type(thing) in kinds] if kinds else []
    return len(ids & {id(p) for wrapper in wrappers for p in wrapper.module.parameters()})


def _is_ddp(thing: object) -> bool:
    return torch.distributed.is_available() and isinstance(thing, torch.nn.parallel.DistributedDataParallel)


def _sums_twice(what: str) -> ConfigurationError:
    return ConfigurationError(
        f"{what}, which averages gradients over ranks in every backward pass, and the kvstore would sum them once "
        "more; give the Trainer kvstore=None, or the module without the wrapper"
    )
