"""Runs the replicas of a model: at once on distinct CUDA devices, elsewhere one after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch.nn import Module
from torch.nn.parallel import parallel_apply

from kvtrainer.parallel.reducers import are_distinct_cuda

_ResultT = TypeVar("_ResultT")


def call_all(
    call: Callable[[Module, Any], _ResultT], given: Sequence[tuple[Module, Any, torch.device]]
) -> list[_ResultT]:
    """The results of `call(replica, part)`, in order. The first error in that order is raised.

    Args:
        given: replica, part and device.
    """
    devices = [device for _, _, device in given]
    calls = [partial(call, replica, part) for replica, part, _ in given]
    if len(given) < 2 or not are_distinct_cuda(devices):
        return [one() for one in calls]
    is_on, dtype = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")

    def with_autocast(one: Callable[[], _ResultT]) -> _ResultT:
        # parallel_apply's threads take over whether autocast is on, but not to which dtype.
        with torch.autocast("cuda", dtype, enabled=is_on):
            return one()

    threaded: Any = [partial(with_autocast, one) for one in calls]
    return parallel_apply(threaded, [()] * len(calls), devices=devices)


def call_with(replica: Module, part: Any) -> Any:
    """The replica of what is in its part: positional arguments of a tuple or list, keywords of a dict."""
    if isinstance(part, dict):
        return replica(**part)
    return replica(*part) if isinstance(part, tuple | list) else replica(part)
