"""Trainers of parameters of one element, updated in this process or in a local store; gradients as one wants them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from kvtrainer import Trainer
from kvtrainer.schedules import bind_schedules

IN_STORE = pytest.mark.parametrize("in_store", [False, True], ids=["in-process", "in-store"])


def trainer_of(
    parameters: Any, kind: Any, options: dict[str, Any] | None = None, in_store: bool = False
) -> Trainer:
    return Trainer(parameters, kind, options, kvstore="local", update_on_kvstore=in_store)


def zeros(count: int = 2) -> list[Parameter]:
    return [Parameter(torch.zeros(1)) for _ in range(count)]


def step(trainer: Trainer, slope: float = 1.0) -> None:
    """One step with a gradient of `slope` everywhere."""
    for group in trainer.param_groups:
        for p in group["params"]:
            p.grad = torch.full_like(p, slope)
    trainer.step(1)


def sgd(*rates: float, momentum: float = 0.9, **more: Any) -> torch.optim.SGD:
    """One of torch's with a group of one parameter for each rate; with a rate of 0.1 if none is given."""
    groups = [{"params": zeros(1), "lr": rate, **more} for rate in rates or (0.1,)]
    return torch.optim.SGD(groups, lr=1.0, momentum=momentum)


def scheduled(
    given: Sequence[Any], count: int, key: str = "lr", optimizer: Any = None, **default_args: Any
) -> list[float]:
    """What the first group has before each of so many steps, all schedules being advanced together."""
    optimizer, seen = optimizer or sgd(), []
    bound = bind_schedules(given, optimizer, default_args)
    for _ in range(count):
        seen.append(optimizer.param_groups[0][key])
        for schedule in bound:
            schedule.step()
    return seen


def values(parameters: list[Parameter]) -> list[float]:
    return [p.item() for p in parameters]


def set_gradients(parameters: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
    """A backward pass that gives every parameter its gradient, which its dtype must hold exactly."""
    ends = [parameter.view_as(parameter) for parameter in parameters.values()]
    grads = [torch.from_numpy(values[key]).to(end.dtype) for key, end in zip(parameters, ends, strict=True)]
    torch.autograd.backward(ends, grads)
