"""Sums of equally long tensors on several devices of one process: in which order, and with which library."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.cuda import nccl
from torch.nn.parallel import comm

from kvstore_server import check
from kvstore_server.errors import ConfigurationError

AUTO = "auto"
FLAT = "flat"
REDUCERS = (AUTO, "nccl", "tree", FLAT, "coalesced")
"""Names of reducers."""

_BUFFER = 10 * 1024 * 1024
"""Bytes that are summed at a time by `coalesced`; torch's own number."""
_TREE_SIZES = (2, 4, 8)


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
    """Copy with torch.cuda.comm between distinct CUDA devices, elsewhere to one target after the other."""
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
    """Return whether a reducer of that name always adds on the CPU from left to right, as without a choice."""
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
