"""A Shard that is updated part by part ends with the bits of one that is updated at once, whatever the optimizer."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from kvstore_server.codec import torch_dtype
from kvstore_server.engine.agreed import effective_hypers
from kvstore_server.optimizer import Optimizer, create
from kvstore_server.plan import TensorSpec, make_plan
from kvstore_server.shard.reduction import RankContribution, Run
from kvstore_server.shard.shard import Shard, Unit
from tests.support.optimizer_slices import given_to

SHAPES = [(0, 3), (5_000,), (3,), (0,), (70_001,), (9, 31), (40_000,), (0,)]
STEP = 4096


def make(dtype: str) -> tuple[Shard, Unit]:
    shard = Shard()
    unit = shard.add(make_plan([TensorSpec(str(at), shape, dtype) for at, shape in enumerate(SHAPES)], 1))
    gen = torch.Generator().manual_seed(1)
    values = {p.index: torch.randn(p.used, generator=gen).to(torch_dtype(dtype)) for p in unit.slices}
    shard.assign_sum([given_to(shard, values)])
    return shard, unit


def gradients(unit: Unit, seed: int) -> list[dict[int, torch.Tensor]]:
    """What each of two ranks gives to the slots, with zeros as padding."""
    gen, found = torch.Generator().manual_seed(seed), []
    for _ in range(2):
        found.append({})
        for slot, piece in enumerate(unit.slices):
            values = torch.zeros(piece.length)
            for segment in piece.segments:
                values[segment.start : segment.start + segment.numel] = torch.randn(
                    segment.numel, generator=gen
                )
            found[-1][slot] = values.to(torch_dtype(piece.dtype))
    return found


def cuts(nbytes: int, seed: int) -> list[int]:
    """Where parts of a slice of so many bytes begin and end."""
    gen = torch.Generator().manual_seed(seed)
    inner = {STEP * int(torch.randint(nbytes // STEP + 1, (), generator=gen)) for _ in range(3)}
    return sorted({0, *inner, nbytes})


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
@pytest.mark.parametrize(
    ("name", "hyper"),
    [
        ("sgd", {"momentum": 0.9, "wd": 0.01}),
        ("adam", {}),
        ("nadam", {}),
        ("rmsprop", {"centered": True, "clip_gradient": 0.5}),
        ("sgld", {}),
        ("ftrl", {}),
    ],
)
def test_parts_are_updated_as_the_whole_is(name: str, hyper: dict[str, float], dtype: str) -> None:
    optimizers: list[Optimizer] = [
        create(name, learning_rate=0.125, multi_precision=True, **hyper) for _ in range(2)
    ]
    (whole, unit), (parted, other) = make(dtype), make(dtype)
    hypers = [effective_hypers(unit.plan, one, {}) for one in optimizers]
    for round_ in range(3):
        given = gradients(unit, round_)
        scale = [0.5, 0.5 + 0.25 * (round_ == 2)]
        whole.update(
            [
                RankContribution([Run(s, s + 1, v) for s, v in one.items()], f)
                for one, f in zip(given, scale, strict=True)
            ],
            optimizers[0],
            [hypers[0]],
        )
        for slot in reversed(range(len(other.slices))):
            edges = cuts(parted.storage.padded[slot].nbytes, 100 * round_ + slot)
            for low, high in pairwise(edges):
                begin, end = (at // torch_dtype(dtype).itemsize for at in (low, high))
                some = [
                    RankContribution([Run(slot, slot + 1, one[slot][begin:end])], f)
                    for one, f in zip(given, scale, strict=True)
                ]
                parted.update_part(some, optimizers[1], hypers[1], other, slot, begin, end)
        parted.count([other])
        for slot, piece in enumerate(unit.slices):
            assert torch.equal(whole.storage.padded[slot], parted.storage.padded[slot])
            mine, theirs = whole.get_state(unit, piece.index), parted.get_state(other, piece.index)
            assert mine.steps.tolist() == theirs.steps.tolist() == [round_ + 1] * len(piece.segments)
            assert mine.tensors.keys() == theirs.tensors.keys()
            assert all(torch.equal(values, theirs.tensors[key]) for key, values in mine.tensors.items())
