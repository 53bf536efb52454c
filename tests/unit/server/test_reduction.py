"""Sums of contributions: compressed ones among them, keys that a rank left out, factors."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from kvstore_server.codec import make_codec
from kvstore_server.optimizer import create
from kvstore_server.plan import Slice, TensorSpec, make_plan
from kvstore_server.protocol.rows import CompressedPayload, same_payload
from kvstore_server.shard.reduction import RankContribution, Run
from kvstore_server.shard.shard import Shard

NOTHING: frozenset[int] = frozenset()
SPECS = [
    TensorSpec("a", (3,), "float32"),
    TensorSpec("b", (18,), "float32"),
    TensorSpec("c", (4,), "float32"),
]
PLAN = make_plan(SPECS, 1)
[PIECE] = PLAN.slices
"""A bucket with padding between its keys: a ends at 3, b begins at 16."""


def encoded(kind: str, values: Tensor, piece: Slice = PIECE, **options: Any) -> CompressedPayload:
    codec = make_codec({"type": kind, **options})
    data = torch.empty(codec.encoded_nbytes(piece.used, piece.dtype), dtype=torch.uint8)
    kind = codec.residual_dtype(piece.dtype)
    kept, following = (None, None) if kind is None else torch.zeros(2, piece.used, dtype=kind)
    codec.encode(values, kept, data, following)
    return CompressedPayload(codec, data)


def given(
    payload: Tensor | CompressedPayload, scale: float = 1.0, absent: frozenset[int] = NOTHING
) -> RankContribution:
    return RankContribution([Run(0, 1, payload)], scale, absent)


def total(parts: list[RankContribution]) -> Tensor:
    """The sum, padding included, as it takes the place of weights."""
    memory = torch.zeros(PIECE.length)
    shard = Shard()
    shard.add(PLAN, 0, {"float32": memory})
    shard.assign_sum(parts)
    return memory


def by_key(total: Tensor) -> Mapping[str, list[float]]:
    return {SPECS[s.key].key: total[s.start : s.start + s.numel].unique().tolist() for s in PIECE.segments}


def padding(total: Tensor) -> Tensor:
    mask = torch.ones(PIECE.length, dtype=torch.bool)
    for s in PIECE.segments:
        mask[s.start : s.start + s.numel] = False
    return total[mask]


def ones(value: float = 1.0) -> Tensor:
    return torch.full((PIECE.used,), value)


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 1, 0], [1, 0, 2]])
def test_compressed_and_plain_contributions_add_up_in_any_order(order: list[int]) -> None:
    parts = [given(encoded("2bit", ones(0.75))), given(ones(0.25)), given(encoded("fp16", ones(2.0)))]
    summed = total([parts[i] for i in order])
    assert by_key(summed) == {"a": [2.75], "b": [2.75], "c": [2.75]}


def test_one_bit_says_nothing_of_keys_that_the_rank_left_out() -> None:
    parts = [given(encoded("1bit", ones(1.0)), absent=frozenset({1})), given(encoded("1bit", ones(1.0)))]
    assert by_key(total(parts)) == {"a": [2.0], "b": [1.0], "c": [2.0]}


def test_one_bit_leaves_the_padding_zero() -> None:
    summed = total([given(encoded("1bit", ones(1.0)))] * 2)
    assert len(padding(summed)) > 0
    assert padding(summed).unique().tolist() == [0.0]


def test_equal_factors_are_applied_once_to_the_sum_and_others_to_each_part() -> None:
    parts = [encoded("2bit", ones(0.75), threshold=0.7), encoded("2bit", ones(0.75), threshold=0.1)]
    low, high = torch.tensor(0.1), torch.tensor(0.7)
    equal = total([given(part, 1 / 3) for part in parts])
    assert by_key(equal)["b"] == [((high + low) * (1 / 3)).item()]
    other = total([given(parts[0], 0.3), given(parts[1], 0.6)])
    assert by_key(other)["b"] == [(high * 0.3 + low * 0.6).item()]


def test_a_single_contribution_is_decoded_and_scaled() -> None:
    summed = total([given(encoded("2bit", ones(-0.75)), 0.5)])
    assert by_key(summed) == {"a": [-0.25], "b": [-0.25], "c": [-0.25]}


def test_a_sum_does_not_see_what_the_one_before_left_in_memory() -> None:
    shard = Shard()
    unit = shard.add(PLAN)
    shard.assign_sum([given(encoded("1bit", ones(9.0)))] * 3)
    shard.assign_sum([given(encoded("2bit", ones(0.0)))])
    assert not shard.visible(unit, 0).any()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_is_decoded_and_summed_in_float32(dtype: str) -> None:
    plan = make_plan([TensorSpec("h", (8,), dtype)], 1)
    [piece], shard, optimizer = plan.slices, Shard(), create("test")
    values = torch.full((8,), 1000.0, dtype=getattr(torch, dtype))
    small = encoded("2bit", values, piece, threshold=0.001)
    unit, parts = shard.add(plan), [given(payload) for payload in (values, small, small)]
    held = shard.hold(parts, optimizer, [optimizer.hyper], math.inf, unit)
    step = torch.tensor(0.001)
    assert held.partials[0].value == (torch.tensor(values[0].item()) + step + step).item()


def test_payloads_are_the_same_if_codec_and_bytes_are() -> None:
    one = encoded("2bit", ones(0.75))
    assert same_payload(one, encoded("2bit", ones(0.75)))
    assert not same_payload(one, encoded("2bit", ones(-0.75)))
    assert not same_payload(one, encoded("2bit", ones(0.75), threshold=0.25))
    assert not same_payload(one, ones(0.75))
