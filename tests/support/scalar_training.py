"""Trainers of parameters of one element, updated in this process or in a local store; gradients as one wants them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from kvtrainer import Trainer

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


def values(parameters: list[Parameter]) -> list[float]:
    return [p.item() for p in parameters]


def set_gradients(parameters: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
    """A backward pass that gives every parameter its gradient, which its dtype must hold exactly."""
    ends = [parameter.view_as(parameter) for parameter in parameters.values()]
    grads = [torch.from_numpy(values[key]).to(end.dtype) for key, end in zip(parameters, ends, strict=True)]
    torch.autograd.backward(ends, grads)
