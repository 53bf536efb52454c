"""Refuses parameters of torch's DistributedDataParallel, which sums gradients itself: a store would do so again."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from typing import Any

import torch.distributed
from torch import Tensor

from kvtrainer.errors import ConfigurationError


def refuse_ddp(params: Any) -> None:
    """Raise ConfigurationError if a Trainer with a store is given a DistributedDataParallel module."""
    given = params["params"] if isinstance(params, dict) and "params" in params else params
    if _is_ddp(given):
        raise _error("the module is wrapped in DistributedDataParallel")
    if isinstance(given, list | tuple):
        for item in given:
            if isinstance(item, dict) and _is_ddp(item.get("params")):
                raise _error("the module of a parameter group is wrapped in DistributedDataParallel")


def refuse_parameters_of_ddp(parameters: Sequence[Tensor]) -> None:
    """Raise ConfigurationError if some of a Trainer's parameters belong to a DistributedDataParallel module.

    Nothing in a parameter tells. All objects of the process are looked through, but only where there is a process
    group, without which nobody can have wrapped anything.
    """
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return
    ids = {id(p) for p in parameters}
    if _wrapped(ids):
        gc.collect()  # a wrapper that nobody uses any more does not count
    if found := _wrapped(ids):
        raise _error(
            f"{found} of the {len(parameters)} parameters belong to a DistributedDataParallel module"
        )


def _wrapped(ids: set[int]) -> int:
    """How many of these tensors are parameters of a wrapped module."""
    kind = torch.nn.parallel.DistributedDataParallel
    things = gc.get_objects()
    # By type, not by isinstance: some objects run code when they are asked for their class. And by distinct types,
    # because there are hundreds of thousands of things.
    kinds = {found for found in set(map(type, things)) if kind in found.__mro__}
    wrappers = [thing for thing in things if type(thing) in kinds] if kinds else []
    return len(ids & {id(p) for wrapper in wrappers for p in wrapper.module.parameters()})


def _is_ddp(thing: object) -> bool:
    return torch.distributed.is_available() and isinstance(thing, torch.nn.parallel.DistributedDataParallel)


def _error(what: str) -> ConfigurationError:
    return ConfigurationError(
        f"{what}, which averages gradients over ranks in every backward pass, and the kvstore would sum them once "
        "more; give the Trainer kvstore=None, or the module without the wrapper"
    )
