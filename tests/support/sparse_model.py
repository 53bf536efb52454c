"""A model of two embedding tables with row-sparse gradients, its batches, and the optimizers that train it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import Embedding

ROWS = 6_000

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "sgd": ("sgd", {"learning_rate": 0.1, "momentum": 0.9}),
    "lazy sgd": ("sgd", {"learning_rate": 0.1, "momentum": 0.9, "wd": 0.1, "lazy_update": True}),
    "lazy adam": ("adam", {"learning_rate": 0.1, "lazy_update": True}),
    "adagrad": ("adagrad", {"learning_rate": 0.1}),
    "groupadagrad": ("groupadagrad", {"learning_rate": 0.1}),
    "rowadam": ("rowadam", {"learning_rate": 0.1, "wd": 0.1}),
    "torch:SGD": ("torch:SGD", {"lr": 0.1, "momentum": 0.9}),
    "torch:Adagrad": ("torch:Adagrad", {"lr": 0.1}),
    "torch:SparseAdam": ("torch:SparseAdam", {"lr": 0.1}),
}


class Embeddings(torch.nn.Module):
    """A table that lies in several slices, and one in a bucket."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.big = Embedding(ROWS, 9, sparse=True)
        self.small = Embedding(5, 4, sparse=True)

    def forward(self, big: Tensor, small: Tensor) -> Tensor:
        return self.big(big).square().sum() + self.small(small).square().sum()


def batches(rank: int) -> list[tuple[Tensor, Tensor]]:
    """The rows of each step; in the third, this rank has none of the big table if it is not rank 0."""
    gen = torch.Generator().manual_seed(10 + rank)
    found = []
    for step in range(5):
        count = 0 if step == 2 and rank else 32
        big = torch.randint(ROWS, (count,), generator=gen) // 500 * 500
        found.append((big, torch.randint(4, (8,), generator=gen)))
    return found
