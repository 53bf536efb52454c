"""Replicas of parameters, all on the CPU, with gradients as one wants them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch.nn import Parameter

STORES = pytest.mark.parametrize(
    ("name", "in_store"), [("device", None), ("local", True), ("device", False), ("local", False)]
)


def replicas(
    count: int = 2, value: float = 0.0, shape: Sequence[int] = (3,), **options: Any
) -> list[Parameter]:
    return [Parameter(torch.full(tuple(shape), value, **options)) for _ in range(count)]


def backward(parameters: Sequence[Parameter], slopes: Sequence[float | None] | float = 1.0) -> None:
    given = slopes if isinstance(slopes, Sequence) else [slopes] * len(parameters)
    for p, slope in zip(parameters, given, strict=True):
        if slope is not None:
            (p * slope).sum().backward()


def values(parameters: Sequence[Parameter]) -> list[float]:
    found = []
    for p in parameters:
        assert p.detach().unique().numel() == 1
        found.append(round(p.flatten()[0].item(), 6))
    return found


def embedding(count: int, seed: int = 3) -> list[torch.nn.Embedding]:
    weight = torch.randn(20, 4, generator=torch.Generator().manual_seed(seed))
    return [
        torch.nn.Embedding.from_pretrained(weight.clone(), freeze=False, sparse=True) for _ in range(count)
    ]


def random_parameters() -> list[Parameter]:
    """Of several dtypes and sizes."""
    made = torch.Generator().manual_seed(5)
    kinds = {(300,): torch.float32, (7, 9): torch.float64, (600,): torch.float32, (5,): torch.float16}
    return [Parameter(torch.randn(shape, generator=made).to(kind)) for shape, kind in kinds.items()]


def random_gradients(rank: int, parameters: Sequence[Parameter]) -> Iterator[None]:
    """Set the gradients of a rank, or of a replica, for one step after the other."""
    own = torch.Generator().manual_seed(rank)
    for _ in range(4):
        for p in parameters:
            p.grad = torch.randn(p.shape, generator=own).to(p.dtype)
        yield
