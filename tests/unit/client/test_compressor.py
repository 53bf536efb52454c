"""A rank's compressor: slices in, residuals that follow what was applied."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kvstore_server.codec import make_codec
from kvstore_server.plan import Plan, TensorSpec, make_plan
from kvtrainer.client.tables import Compressor
from kvtrainer.errors import NonFiniteGradientError
from tests.support.engines import filled

PLAN = make_plan(
    [
        TensorSpec("a", (3,), "float32"),
        TensorSpec("big", (130, 300), "float32"),
        TensorSpec("h", (5,), "float16"),
    ],
    1,
)
NOTHING: frozenset[int] = frozenset()


def compressor(kind: str = "2bit", plan: Plan = PLAN, **options: Any) -> Compressor:
    return Compressor(make_codec({"type": kind, **options}), plan)


def constant(value: float, plan: Plan = PLAN) -> dict[str, Tensor]:
    kinds = {spec.key: getattr(torch, spec.dtype) for spec in plan.specs}
    return filled(plan, {s.key: torch.full(s.shape, value, dtype=kinds[s.key]) for s in plan.specs})


def distinct(residuals: dict[int, Tensor]) -> dict[int, list[float]]:
    return {key: [round(v, 3) for v in residual.unique().tolist()] for key, residual in residuals.items()}


def test_residuals_move_only_when_the_round_was_accepted() -> None:
    one = compressor()
    one.encode(constant(0.75), PLAN.slices, NOTHING)
    assert one.residuals() == {}
    one.accept()
    assert distinct(one.residuals()) == {0: [0.25], 1: [0.25], 2: [0.25]}
    one.encode(constant(0.75), PLAN.slices, NOTHING)
    one.encode(constant(0.125), PLAN.slices, NOTHING)
    one.accept()
    assert distinct(one.residuals()) == {0: [0.375], 1: [0.375], 2: [0.375]}


def test_encoding_twice_without_accepting_gives_the_same_bytes() -> None:
    one = compressor("1bit", threshold=0)
    first, second = (one.encode(constant(0.3), PLAN.slices, NOTHING) for _ in range(2))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[index], second[index]) for index in first)


def test_slices_that_are_not_sent_keep_their_residuals() -> None:
    one = compressor()
    one.encode(constant(0.25), PLAN.slices, NOTHING)
    one.accept()
    [only] = [slice_ for slice_ in PLAN.slices if any(s.key == 0 for s in slice_.segments)]
    one.encode(constant(0.125), [only], NOTHING)
    one.accept()
    assert distinct(one.residuals()) == {0: [0.375], 1: [0.25], 2: [0.25]}


def test_a_gradient_that_is_not_finite_in_the_last_slice_changes_nothing() -> None:
    one = compressor()
    one.encode(constant(0.25), PLAN.slices, NOTHING)
    one.accept()
    before = distinct(one.residuals())
    wrong = constant(0.25)
    wrong["float32"][PLAN.key_offsets[1] + 38_000] = float("nan")
    with pytest.raises(NonFiniteGradientError):
        one.encode(wrong, PLAN.slices, NOTHING)
    assert distinct(one.residuals()) == before


@pytest.mark.parametrize("kind", ["2bit", "1bit", "int8", "fp16", "bf16", "topk"])
def test_residuals_carry_over_into_another_compressor(kind: str) -> None:
    generator = torch.Generator().manual_seed(5)
    grads = [
        {
            name: torch.randn(flat.shape, generator=generator).to(flat.dtype)
            for name, flat in constant(0).items()
        }
        for _ in range(3)
    ]
    one, other = compressor(kind), compressor(kind)
    for grad in grads[:2]:
        one.encode(grad, PLAN.slices, NOTHING)
        one.accept()
    other.set_residuals(one.residuals())
    expected, got = (c.encode(grads[2], PLAN.slices, NOTHING) for c in (one, other))
    for slice_ in PLAN.slices:
        values = [torch.zeros(slice_.used) for _ in range(2)]
        for data, out in zip((expected[slice_.index], got[slice_.index]), values, strict=True):
            one.codec.decode(data, slice_.dtype, out)
        for segment in slice_.segments:  # padding may differ: it belongs to nobody
            part = slice(segment.start, segment.start + segment.numel)
            assert torch.equal(values[0][part], values[1][part])


def test_setting_residuals_of_some_keys_starts_the_others_at_zero() -> None:
    one = compressor()
    one.encode(constant(0.25), PLAN.slices, NOTHING)
    one.accept()
    one.set_residuals({0: torch.full((3,), 0.125)})
    assert distinct(one.residuals()) == {0: [0.125], 1: [0.0], 2: [0.0]}


def test_a_dtype_that_the_codec_sends_exactly_has_no_residual() -> None:
    one = compressor("fp16")
    one.encode(constant(0.3), PLAN.slices, NOTHING)
    one.accept()
    assert set(one.residuals()) == {0, 1}
    one.set_residuals({2: torch.ones(5)})
    assert 2 not in one.residuals()


def test_residuals_are_copies() -> None:
    one = compressor()
    one.encode(constant(0.25), PLAN.slices, NOTHING)
    one.accept()
    one.residuals()[0].fill_(9)
    assert distinct(one.residuals())[0] == [0.25]
