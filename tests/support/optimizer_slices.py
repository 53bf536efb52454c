"""Slices, and optimizers to update them with: every built-in one, and one of a user."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from kvstore_server.optimizer import Optimizer, SliceState, create
from kvstore_server.optimizer.gluon import FAMILY
from kvstore_server.optimizer.torch_family import ELEMENTWISE
from kvstore_server.plan import Segment, Slice, TensorSpec, make_plan

SHAPES = [(30,), (0,), (5, 7), (1,), (64,)]
GLUONS = [cls.name for cls in FAMILY if not cls.positioned]
BUILT_IN: list[Any] = [*GLUONS, *(f"torch:{cls.__name__}" for cls in ELEMENTWISE)]


class Curved(Optimizer):
    """A user's optimizer out of operations whose vectorised and scalar versions round differently."""

    defaults: ClassVar[dict[str, Any]] = {"power": 0.33}

    def create_state(self, weight: Tensor) -> dict[str, Any]:
        return {"seen": torch.zeros_like(weight), "count": 0.0}

    def update(self, weight: Tensor, grad: Tensor, state: dict[str, Any], hyper: Any) -> None:
        state["count"] += 1.0
        state["seen"] = (state["seen"] + grad.abs() + state["count"]) ** hyper["power"]
        weight.copy_(torch.atan2(weight, state["seen"]).sigmoid())


def make(name: str | type[Optimizer], **options: Any) -> Optimizer:
    """An optimizer with momentum and weight decay where there is an option for it."""
    rate = 5.0 if name in ("adadelta", "torch:Adadelta") else 0.05
    extra = {"momentum": 0.9, "weight_decay": 0.01}
    return create(name, lr=rate, **{k: v for k, v in extra.items() if k in create(name).hyper}, **options)


def small_slice(dtype: str = "float32") -> Slice:
    return make_plan([TensorSpec(str(i), shape, dtype) for i, shape in enumerate(SHAPES)], 1).slices[0]


def big_slice(numel: int) -> Slice:
    length = -(-numel // 16) * 16
    return Slice(0, "float32", 0, length, numel, (Segment(0, 0, 0, numel),), 0)


def filled(piece: Slice, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Random numbers in the segments, zero in the padding."""
    generator = torch.Generator().manual_seed(seed)
    flat = torch.zeros(piece.length, dtype=dtype)
    for s in piece.segments:
        flat[s.start : s.start + s.numel] = torch.randn(s.numel, generator=generator, dtype=dtype)
    return flat


def padding(piece: Slice, flat: Tensor) -> Tensor:
    used = torch.zeros(piece.length, dtype=torch.bool)
    for s in piece.segments:
        used[s.start : s.start + s.numel] = True
    return flat[~used]


def same_bits(a: SliceState, b: SliceState) -> bool:
    return (
        a.steps == b.steps
        and a.scalars == b.scalars
        and all(map(torch.equal, a.tensors.values(), b.tensors.values()))
    )
