"""Parameters that are on several devices of one process: how replicas must agree, and what they are called."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from kvtrainer.errors import ConfigurationError
from kvtrainer.parallel.reducers import AUTO

COPIES = "_copies"
"""The key of a group, until it becomes one of torch's, for lists of parameters: one for each device but the first."""

MEMBERSHIP = "_kvtrainer_membership"
"""The attribute of a parameter that is a replica in a DataParallel."""


class ReplicaPolicy(NamedTuple):
    """How the replicas of a Trainer's parameters are treated."""

    reducer: str = AUTO
    are_scaled: bool = False
    """Whether each gradient carries its replica's share, so that their sum is a mean already."""
    may_lack: bool = False
    """Whether a parameter may have a gradient on some devices only."""
    must_agree: bool = False
    """Whether replicas that have updates of their own are a mistake."""


LISTS = ReplicaPolicy()
"""Of lists of replicas."""


class Membership:
    """Mark a parameter as one replica of several in a DataParallel. Copies and pickles of the parameter lose it."""

    def __init__(self, data_parallel: object, policy: ReplicaPolicy) -> None:
        self._data_parallel = weakref.ref(data_parallel)
        self._policy = policy

    @property
    def policy(self) -> ReplicaPolicy | None:
        """The policy of the DataParallel; None when that is gone."""
        return None if self._data_parallel() is None else self._policy

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()


def policy_of(groups: Sequence[Mapping[str, Any]]) -> ReplicaPolicy:
    """Return the policy of the replicas in these groups, which may have COPIES yet, or be torch's."""
    replicas = (p for group in groups for p in group["params"] if hasattr(p, MEMBERSHIP))
    return next(filter(None, map(_policy, replicas)), LISTS)


def _policy(parameter: Tensor) -> ReplicaPolicy | None:
    membership: Membership | None = getattr(parameter, MEMBERSHIP, None)
    return None if membership is None else membership.policy


def check_replicas(parameters: Mapping[str, Sequence[Tensor]]) -> None:
    """Raise ConfigurationError unless the replicas of all parameters are distinct, alike, and on the same devices.

    Args:
        parameters: by name, the replicas of each.
    """
    flat = [p for replicas in parameters.values() for p in replicas]
    are_distinct, are_alone = len(set(map(id, flat))) == len(flat), {*map(len, parameters.values())} == {1}
    if are_distinct and are_alone and not any([hasattr(p, MEMBERSHIP) for p in flat]):
        return
    seen: set[int] = set()
    for name, replicas in parameters.items():
        ids = {id(p) for p in replicas}
        if not replicas:
            raise ConfigurationError(f"parameter {name!r} is an empty list; give one replica for each device")
        if len(ids) < len(replicas) or ids & seen:
            raise ConfigurationError(
                f"a replica of {name!r} is also another replica or parameter; give each device its own"
            )
        seen |= ids
        if len(replicas) == 1 and _policy(replicas[0]) is not None:
            raise ConfigurationError(
                f"parameter {name!r} is one replica of several in a DataParallel; give the Trainer that itself, or "
                "groups made by its with_replicas()"
            )
        if len(replicas) > 1 and any(is_lazy(p) for p in replicas):
            raise ConfigurationError(f"replicas of {name!r} have no shape yet; run a forward pass on each")
        forms = [] if len(replicas) == 1 else [f"{str(p.dtype)[6:]}{list(p.shape)}" for p in replicas]
        if len(set(forms)) > 1:
            raise ConfigurationError(f"the replicas of parameter {name!r} differ: {', '.join(forms)}")
    if are_alone:
        return
    lists = {name: [str(p.device) for p in replicas] for name, replicas in parameters.items()}
    (first, expected), *others = lists.items()
    for name, devices in others:
        if devices != expected:
            there, here = ", ".join(devices), ", ".join(expected)
            raise ConfigurationError(f"parameter {name!r} is on [{there}] while {first!r} is on [{here}]")


def devices_of(groups: Sequence[Mapping[str, Any]]) -> list[torch.device]:
    """List the device of each replica, of groups that have COPIES yet."""
    group = next(group for group in groups if group["params"])
    return [of_device[0].device for of_device in [group["params"], *group.get(COPIES, ())]]


def device_names(devices: Sequence[torch.device]) -> list[str]:
    """Name each place in a list of replicas by its device, with its number where that is not enough."""
    if len(set(devices)) == len(devices):
        return [str(device) for device in devices]
    return [f"{device} (replica {at})" for at, device in enumerate(devices)]


def spread(group: Mapping[str, Any]) -> dict[str, Any]:
    """Turn a group into torch's form: the first replicas of all its parameters, then those on the other devices."""
    spread = {name: value for name, value in group.items() if name != COPIES}
    if copies := group.get(COPIES, ()):
        names, labels = group["param_names"], device_names(devices_of([group]))
        spread["params"] = [*group["params"], *(p for of_device in copies for p in of_device)]
        spread["param_names"] = [*names, *(f"{name} on {label}" for label in labels[1:] for name in names)]
    return spread
