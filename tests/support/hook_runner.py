"""A loop that calls one hook, as MMCV's runners do, and a model for it."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import nn

from kvtrainer import Trainer
from kvtrainer.hooks import (
    Hook,
)
from kvtrainer.log_buffer import LogBuffer


class Runner:
    """A loop over batches that calls one hook, as MMCV's runners do."""

    def __init__(self, model: nn.Module, hook: Hook, max_iters: int = 0, **options: Any) -> None:
        self.model, self.hook = model, hook
        self.trainer = Trainer(model, "sgd", {"learning_rate": 1.0}, **{"kvstore": None, **options})
        self.log_buffer = LogBuffer()
        self.meta: dict[str, Any] = {}
        self.logger = logging.getLogger("runner")
        self.iter, self.max_iters = 0, max_iters
        self.outputs: Any = None

    def run(self, batches: list[torch.Tensor]) -> None:
        self.hook.before_run(self)
        for batch in batches:
            self.hook.before_train_iter(self)
            self.outputs = {"loss": self.model(batch).sum(), "num_samples": len(batch)}
            self.hook.after_train_iter(self)
            self.iter += 1
        self.hook.after_run(self)


class Weights(nn.Module):
    """The loss of a batch is its sum, over samples, times the weights; so the gradient is that sum."""

    def __init__(self, count: int = 2) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(count))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return batch * self.w


def batch(*rows: list[float]) -> torch.Tensor:
    return torch.tensor(rows)
