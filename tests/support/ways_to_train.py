"""Trainers of one process in the three ways that there are, and parameters with gradients as wanted."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from kvtrainer import Trainer, kvstore

STORES = [
    pytest.param(None, id="in-process"),
    pytest.param(False, id="reduced"),
    pytest.param(True, id="in-store"),
]
"""update_on_kvstore of the three ways in which one process can train; None stands for no store at all."""


def trainer_of(
    parameters: Any,
    uok: bool | None = None,
    optimizer: Any = "sgd",
    options: dict[str, Any] | None = None,
    **more: Any,
) -> Trainer:
    options = {"learning_rate": 1.0} if options is None and isinstance(optimizer, str) else options
    store = None if uok is None else kvstore.create("local")
    return Trainer(parameters, optimizer, options, kvstore=store, update_on_kvstore=uok, **more)


def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Parameter:
    return Parameter(torch.zeros(shape or (2,), dtype=dtype))


def backward(parameter: Tensor, slope: float = 1.0) -> Tensor:
    """One backward pass whose gradient is `slope` in every element; returns the loss."""
    loss = (parameter * slope).sum()
    loss.backward()
    return loss
