"""Parameters with replicas on several devices of one process: their groups, checks, and reducers.

A reducer replaces the first of several equally long tensors by their sum. Its name selects the library and the order of
additions, and therefore the bits of the result.
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
"""The names of reducers."""

_BUFFER = 10 * 1024 * 1024
"""Bytes that `coalesced` sums at a time; torch's own value."""
_TREE_SIZES = (2, 4, 8)

COPIES = "_copies"
"""Key of a group, before it has torch's form: lists of parameters, one per device but the first."""

MEMBERSHIP = "_kvtrainer_membership"
"""Attribute of a parameter that is a replica in a DataParallel."""


class ReplicaPolicy(NamedTuple):
    reducer: str = AUTO
    are_scaled: bool = False
    """Whether each gradient is already weighted with its replica's share, so that their sum is a mean."""
    may_lack: bool = False
    """Whether a parameter may have a gradient on only some devices."""
    must_agree: bool = False
    """Whether it is an error to update replicas separately."""


LISTS = ReplicaPolicy()
"""The policy for lists of replicas that a user passes."""


class ReplicaInfo:
    """Marks a parameter as a replica in a DataParallel. Copies and pickles of the parameter lose the mark."""

    def __init__(self, data_parallel: object, policy: ReplicaPolicy) -> None:
        self._data_parallel = weakref.ref(data_parallel)
        self._policy = policy

    @property
    def policy(self) -> ReplicaPolicy | None:
        """The policy of the DataParallel; None if it no longer exists."""
        return None if self._data_parallel() is None else self._policy

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()


def policy_of(groups: Sequence[Mapping[str, Any]]) -> ReplicaPolicy:
    """Return the policy for the replicas in these groups, which may still have COPIES, or torch's form."""
    replicas = (p for group in groups for p in group["params"] if hasattr(p, MEMBERSHIP))
    return next(filter(None, map(_replica_policy_of_parameter, replicas)), LISTS)


def _replica_policy_of_parameter(parameter: Tensor) -> ReplicaPolicy | None:
    membership: ReplicaInfo | None = getattr(parameter, MEMBERSHIP, None)
    return None if membership is None else membership.policy


def check_replicas(parameters: Mapping[str, Sequence[Tensor]]) -> None:
    """Raise ConfigurationError unless all replicas are distinct, of equal shape and dtype, on the same devices."""
    # 1. The usual case: no replicas at all.
    are_alone = {*map(len, parameters.values())} == {1}
    if are_alone and not any([hasattr(p, MEMBERSHIP) for (p,) in parameters.values()]):
        return
    # 2. The replicas of each parameter: not shared, and equal in form.
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
        if len(replicas) == 1 and _replica_policy_of_parameter(replicas[0]) is not None:
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
    # 3. All parameters must have the same devices, in the same order.
    lists = {name: [str(p.device) for p in replicas] for name, replicas in parameters.items()}
    (first, expected), *others = lists.items()
    for name, devices in others:
        if devices != expected:
            there, here = ", ".join(devices), ", ".join(expected)
            raise ConfigurationError(f"parameter {name!r} is on [{there}] while {first!r} is on [{here}]")


def devices_of(groups: Sequence[Mapping[str, Any]]) -> list[torch.device]:
    """Return the device of each replica, from groups that still have COPIES."""
    group = next(group for group in groups if group["params"])
    return [of_device[0].device for of_device in [group["params"], *group.get(COPIES, ())]]


def replica_device_names(devices: Sequence[torch.device]) -> list[str]:
    """Return a name for each replica: its device, with the replica's number if devices occur twice."""
    if len(set(devices)) == len(devices):
        return [str(device) for device in devices]
    return [f"{device} (replica {at})" for at, device in enumerate(devices)]


def flatten_replicas(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return a group in torch's form: the first replicas of all its parameters, then those on the other devices."""
    spread = {name: value for name, value in group.items() if name != COPIES}
    if copies := group.get(COPIES, ()):
        names, labels = group["param_names"], replica_device_names(devices_of([group]))
        spread["params"] = [*group["params"], *(p for of_device in copies for p in of_device)]
        spread["param_names"] = [*names, *(f"{name} on {label}" for label in labels[1:] for name in names)]
    return spread


@torch.no_grad()
def flat_replica_sum(parts: Sequence[Tensor]) -> None:
    """Add from left to right on the first device, in the order of devices."""
    total = _widen_replica(parts[0])
    for other in parts[1:]:
        total.add_(other.to(total.device, total.dtype))
    _write_replica_total(total, parts[0])


@torch.no_grad()
def tree_replica_sum(parts: Sequence[Tensor]) -> None:
    """Add pairs, then pairs of pairs, on 2, 4 or 8 devices; from left to right for other numbers.

    On four devices, 0 adds 1 and 2 adds 3, then 0 adds 2. The order is the same if only these pairs can access each
    other's memory. Source: caffe2's muji.
    """
    if len(parts) not in _TREE_SIZES:
        flat_replica_sum(parts)
        return
    wide = [_widen_replica(part) for part in parts]
    distance = 1
    while distance < len(wide):
        for at in range(0, len(wide), 2 * distance):
            wide[at].add_(wide[at + distance].to(wide[at].device))
        distance *= 2
    _write_replica_total(wide[0], parts[0])


@torch.no_grad()
def coalesced_replica_sum(parts: Sequence[Tensor]) -> None:
    """Add with torch.cuda.comm on distinct CUDA devices; elsewhere from left to right, one buffer at a time."""
    if are_distinct_cuda_replicas([part.device for part in parts]):
        wide = [[_widen_replica(part)] for part in parts]
        [total] = comm.reduce_add_coalesced(wide, parts[0].device.index, _BUFFER)  # type: ignore[no-untyped-call]
        _write_replica_total(total, parts[0])
        return
    step = _BUFFER // _widen_replica(parts[0][:0]).itemsize
    for start in range(0, parts[0].numel(), step):
        flat_replica_sum([part[start : start + step] for part in parts])


@torch.no_grad()
def nccl_replica_sum(parts: Sequence[Tensor]) -> None:
    """Add with NCCL's all-reduce between distinct CUDA devices of this process, in an order that NCCL chooses."""
    wide = [_widen_replica(part) for part in parts]
    nccl.all_reduce(wide)  # type: ignore[no-untyped-call]
    _write_replica_total(wide[0], parts[0])


def copy_to_each_replica(source: Tensor, targets: Sequence[Tensor]) -> None:
    for target in targets:
        target.copy_(source)


@torch.no_grad()
def copy_to_all_replicas(source: Tensor, targets: Sequence[Tensor]) -> None:
    """Copy with torch.cuda.comm between distinct CUDA devices; elsewhere to one target after another."""
    if are_distinct_cuda_replicas([source.device, *(target.device for target in targets)]):
        comm.broadcast(source, out=list(targets))  # type: ignore[no-untyped-call]
    else:
        copy_to_each_replica(source, targets)


class ReplicaReducer(NamedTuple):
    """Sums and broadcasts over devices. Half precision accumulates in float32."""

    sum: Callable[[Sequence[Tensor]], None]
    """Replaces the first of several contiguous 1-d tensors by the sum of all; the values of the others are lost."""
    broadcast: Callable[[Tensor, Sequence[Tensor]], None]
    """Copies a tensor to several others of its shape and dtype."""


_KINDS = {
    FLAT: ReplicaReducer(flat_replica_sum, copy_to_each_replica),
    "tree": ReplicaReducer(tree_replica_sum, copy_to_each_replica),
    "coalesced": ReplicaReducer(coalesced_replica_sum, copy_to_all_replicas),
    "nccl": ReplicaReducer(nccl_replica_sum, copy_to_all_replicas),
}


def check_replica_reducer(name: object) -> str:
    return check.one_of("the reducer", name, REDUCERS)


def make_replica_reducer(
    name: str,
    devices: Sequence[torch.device],
    can_access: Callable[[int, int], bool] = torch.cuda.can_device_access_peer,
) -> ReplicaReducer:
    """Return the reducer of that name. "auto" is the tree if CUDA devices can access each other's memory in the way
    that caffe2's muji requires (`can_access`, by indices), else "flat".
    """
    check_replica_reducer(name)
    if name == "nccl" and not are_distinct_cuda_replicas(devices):
        places = ", ".join(map(str, devices))
        raise ConfigurationError(
            f"reducer='nccl' needs a separate CUDA device for every replica, got {places}; use 'tree' or 'flat'"
        )
    if name == "nccl" and not hasattr(torch._C, "_nccl_all_reduce"):
        raise ConfigurationError("reducer='nccl' needs a torch that was built with NCCL; use 'coalesced'")
    if name == AUTO:
        name = "tree" if _is_replica_tree_direct(devices, can_access) else FLAT
    return _KINDS[name]


def is_left_fold(name: str) -> bool:
    """Return whether this reducer always adds from left to right on the CPU; "auto" does."""
    return name in (AUTO, FLAT)


def are_distinct_cuda_replicas(devices: Sequence[torch.device]) -> bool:
    return all(device.type == "cuda" for device in devices) and len(set(devices)) == len(devices)


def _is_replica_tree_direct(devices: Sequence[torch.device], can_access: Callable[[int, int], bool]) -> bool:
    """Return whether every addition of the tree can read the other device's memory."""
    if len(devices) not in _TREE_SIZES or any(device.type != "cuda" for device in devices):
        return False
    places = [torch.cuda.current_device() if d.index is None else d.index for d in devices]

    def reach(group: Sequence[int]) -> bool:
        return all(a == b or can_access(a, b) for a in group for b in group)

    return reach(places) or (len(places) == 4 and reach(places[:2]) and reach(places[2:]))


def _widen_replica(part: Tensor) -> Tensor:
    # Half-precision sums are accumulated in float32.
    return part.float() if part.dtype.itemsize < 4 else part


def _write_replica_total(total: Tensor, target: Tensor) -> None:
    if total is not target:
        target.copy_(total)
