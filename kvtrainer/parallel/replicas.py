"""Parameters that are on several devices of one process: how replicas must agree, what they are called, and their sums.

Equally long tensors of all devices are summed in an order, and with a library, that is chosen by name.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.cuda import nccl
from torch.nn.parallel import comm
from torch.nn.parameter import is_lazy

from kvstore_server import check
from kvtrainer.errors import ConfigurationError

AUTO = "auto"
FLAT = "flat"
REDUCERS = (AUTO, "nccl", "tree", FLAT, "coalesced")
"""Names of reducers."""

_BUFFER = 10 * 1024 * 1024
"""Bytes that are summed at a time by `coalesced`; torch's own number."""
_TREE_SIZES = (2, 4, 8)

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


class ReplicaInfo:
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
    """Return the policy of the replicas in these groups. They may have COPIES yet, or be torch's."""
    replicas = (p for group in groups for p in group["params"] if hasattr(p, MEMBERSHIP))
    return next(filter(None, map(_policy, replicas)), LISTS)


def _policy(parameter: Tensor) -> ReplicaPolicy | None:
    membership: ReplicaInfo | None = getattr(parameter, MEMBERSHIP, None)
    return None if membership is None else membership.policy


def check_replicas(parameters: Mapping[str, Sequence[Tensor]]) -> None:
    """Check that all replicas are distinct, alike, and on the same devices. Raises ConfigurationError otherwise.

    Args:
        parameters: by name, the replicas of each; those that are one are distinct.
    """
    are_alone = {*map(len, parameters.values())} == {1}
    if are_alone and not any([hasattr(p, MEMBERSHIP) for (p,) in parameters.values()]):
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
    """Name the places of replicas by device. Where that is not enough, the place's number is added."""
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


@torch.no_grad()
def flat_sum(parts: Sequence[Tensor]) -> None:
    """Fold from the left: everything is brought to the first device and added there, in the order of devices."""
    total = _wide(parts[0])
    for other in parts[1:]:
        total.add_(other.to(total.device, total.dtype))
    _write(total, parts[0])


@torch.no_grad()
def tree_sum(parts: Sequence[Tensor]) -> None:
    """Add pairs, then pairs of pairs, on 2, 4 or 8 devices; a left fold on any other number of them.

    So device 0 takes 1 while 2 takes 3, and then 0 takes 2. Four devices of which only pairs reach each other add in
    the same order. Source: caffe2's muji.
    """
    if len(parts) not in _TREE_SIZES:
        flat_sum(parts)
        return
    wide = [_wide(part) for part in parts]
    distance = 1
    while distance < len(wide):
        for at in range(0, len(wide), 2 * distance):
            wide[at].add_(wide[at + distance].to(wide[at].device))
        distance *= 2
    _write(wide[0], parts[0])


@torch.no_grad()
def coalesced_sum(parts: Sequence[Tensor]) -> None:
    """Add with torch.cuda.comm on distinct CUDA devices; elsewhere a left fold of one buffer after the other."""
    if are_distinct_cuda([part.device for part in parts]):
        wide = [[_wide(part)] for part in parts]
        [total] = comm.reduce_add_coalesced(wide, parts[0].device.index, _BUFFER)  # type: ignore[no-untyped-call]
        _write(total, parts[0])
        return
    step = _BUFFER // _wide(parts[0][:0]).itemsize
    for start in range(0, parts[0].numel(), step):
        flat_sum([part[start : start + step] for part in parts])


@torch.no_grad()
def nccl_sum(parts: Sequence[Tensor]) -> None:
    """Add with NCCL's all-reduce between distinct CUDA devices of this process; its order is NCCL's own."""
    wide = [_wide(part) for part in parts]
    nccl.all_reduce(wide)  # type: ignore[no-untyped-call]
    _write(wide[0], parts[0])


def copy_each(source: Tensor, targets: Sequence[Tensor]) -> None:
    """Copy to one target after the other."""
    for target in targets:
        target.copy_(source)


@torch.no_grad()
def copy_at_once(source: Tensor, targets: Sequence[Tensor]) -> None:
    """Copy with torch.cuda.comm between distinct CUDA devices. Elsewhere it copies to one after the other."""
    if are_distinct_cuda([source.device, *(target.device for target in targets)]):
        comm.broadcast(source, out=list(targets))  # type: ignore[no-untyped-call]
    else:
        copy_each(source, targets)


class Reducer(NamedTuple):
    """Sums what is on several devices. Half precision accumulates in float32."""

    sum: Callable[[Sequence[Tensor]], None]
    """Replaces the first of several contiguous 1-d tensors by the sum of all; the others' values are lost."""
    broadcast: Callable[[Tensor, Sequence[Tensor]], None]
    """Copies a tensor to several others of its shape and dtype."""


_KINDS = {
    FLAT: Reducer(flat_sum, copy_each),
    "tree": Reducer(tree_sum, copy_each),
    "coalesced": Reducer(coalesced_sum, copy_at_once),
    "nccl": Reducer(nccl_sum, copy_at_once),
}


def check_reducer(name: object) -> str:
    """Return the name if a reducer is called so. Raises ConfigurationError."""
    return check.one_of("the reducer", name, REDUCERS)


def make_reducer(
    name: str,
    devices: Sequence[torch.device],
    can_access: Callable[[int, int], bool] = torch.cuda.can_device_access_peer,
) -> Reducer:
    """Return the reducer of that name for these devices.

    "auto" is the tree where CUDA devices reach each other's memory, as caffe2's muji decides it, and else "flat".

    Args:
        can_access: whether a CUDA device, by index, reaches another one's memory.

    Raises:
        ConfigurationError: no reducer has that name, or "nccl" is asked for where it cannot run.
    """
    check_reducer(name)
    if name == "nccl" and not are_distinct_cuda(devices):
        places = ", ".join(map(str, devices))
        raise ConfigurationError(
            f"reducer='nccl' needs a CUDA device of its own for every replica, not {places}; use 'tree' or 'flat'"
        )
    if name == "nccl" and not hasattr(torch._C, "_nccl_all_reduce"):
        raise ConfigurationError("reducer='nccl' needs a torch that was built with NCCL; use 'coalesced'")
    if name == AUTO:
        name = "tree" if _is_tree_direct(devices, can_access) else FLAT
    return _KINDS[name]


def is_left_fold(name: str) -> bool:
    """Return whether this reducer always adds from left to right on the CPU. Without a choice it does."""
    return name in (AUTO, FLAT)


def are_distinct_cuda(devices: Sequence[torch.device]) -> bool:
    """Return whether all devices are CUDA's, and none occurs twice."""
    return all(device.type == "cuda" for device in devices) and len(set(devices)) == len(devices)


def _is_tree_direct(devices: Sequence[torch.device], can_access: Callable[[int, int], bool]) -> bool:
    """Return whether every addition of the tree can read the other device's memory."""
    if len(devices) not in _TREE_SIZES or any(device.type != "cuda" for device in devices):
        return False
    places = [torch.cuda.current_device() if d.index is None else d.index for d in devices]

    def reach(group: Sequence[int]) -> bool:
        return all(a == b or can_access(a, b) for a in group for b in group)

    return reach(places) or (len(places) == 4 and reach(places[:2]) and reach(places[2:]))


def _wide(part: Tensor) -> Tensor:
    return part.float() if part.dtype.itemsize < 4 else part


def _write(total: Tensor, target: Tensor) -> None:
    if total is not target:
        target.copy_(total)
