"""What every codec promises, how bad input is named, and which codec compression_params mean."""

from __future__ import annotations

import itertools
import json
import math
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from kvstore_server import codec as codec_module
from kvstore_server.codec import Codec, make_codec
from kvstore_server.errors import ConfigurationError, NonFiniteGradientError, ProtocolError, UnknownNameError
from kvstore_server.plan import ALIGNMENT, ITEM_SIZE

KINDS = ("none", "1bit", "2bit", "ternary", "int8", "fp16", "bf16", "topk")
LOSSY = KINDS[1:]
ROUNDING = [
    (kind, dtype) for kind in LOSSY for dtype in ITEM_SIZE if not make_codec({"type": kind}).is_exact(dtype)
]


def codec_of(kind: str) -> Codec:
    return make_codec({"type": kind})


def random_grad(numel: int, dtype: str = "float32", seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(numel, generator=generator, dtype=torch.float64).to(getattr(torch, dtype))


def new_residual(codec: Codec, numel: int, dtype: str) -> Tensor | None:
    kind = codec.residual_dtype(dtype)
    return None if kind is None else torch.zeros(numel, dtype=kind)


def encoded(
    codec: Codec, grad: Tensor, residual: Tensor | None = None, out: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """The bytes of a gradient, and the residual that follows one of zeros or another."""
    dtype = str(grad.dtype).removeprefix("torch.")
    residual = new_residual(codec, len(grad), dtype) if residual is None else residual
    following = None if residual is None else torch.full_like(residual, 7)
    payload = new_payload(codec, len(grad), dtype) if out is None else out
    codec.encode(grad, residual, payload, following)
    return payload, following


def new_payload(codec: Codec, numel: int, dtype: str = "float32") -> Tensor:
    return torch.full((codec.encoded_nbytes(numel, dtype),), 0xAA, dtype=torch.uint8)


@pytest.mark.parametrize("dtype", ITEM_SIZE)
@pytest.mark.parametrize("kind", KINDS)
def test_slice_by_slice_gives_the_bytes_and_the_residual_of_the_whole(kind: str, dtype: str) -> None:
    codec = codec_of(kind)
    unit = max(codec.unit, ALIGNMENT // ITEM_SIZE[dtype])
    cuts = [0, unit, 4 * unit, 5 * unit, 5 * unit + 11]
    whole = new_residual(codec, cuts[-1], dtype)
    for seed in range(3):
        grad, parts = random_grad(cuts[-1], dtype, seed), []
        for start, end in itertools.pairwise(cuts):
            parts.append(encoded(codec, grad[start:end], None if whole is None else whole[start:end]))
        payload, whole = encoded(codec, grad, whole)
        assert torch.equal(torch.cat([part for part, _ in parts]), payload)
        if whole is not None:
            assert torch.equal(torch.cat([kept for _, kept in parts if kept is not None]), whole)


@pytest.mark.parametrize("kind", KINDS)
def test_a_block_more_or_less_changes_nothing(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    codec, results = codec_of(kind), []
    grad = random_grad(3 * codec.unit + 13)
    for block in (codec.unit, 2 * codec.unit, 1 << 30):
        monkeypatch.setattr(codec_module, "BLOCK", block)
        out = torch.zeros(len(grad))
        payload, residual = encoded(codec, grad)
        codec.decode(payload, "float32", out)
        results.append(torch.cat([payload.float(), out, out if residual is None else residual]))
    assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.parametrize("kind", KINDS)
def test_only_the_given_bytes_are_written(kind: str) -> None:
    codec = codec_of(kind)
    size = codec.encoded_nbytes(13, "float32")
    buffer = torch.full((size + 3,), 0x55, dtype=torch.uint8)
    encoded(codec, random_grad(13), out=buffer[1 : 1 + size])
    assert buffer[0].item() == 0x55
    assert buffer[1 + size :].tolist() == [0x55] * 2


@pytest.mark.parametrize("kind", KINDS)
def test_bytes_may_begin_at_an_odd_address(kind: str) -> None:
    codec, out, moved = codec_of(kind), torch.zeros(13), torch.zeros(13)
    payload, _ = encoded(codec, random_grad(13))
    codec.decode(payload, "float32", out)
    codec.decode(torch.cat([torch.zeros(1, dtype=torch.uint8), payload])[1:], "float32", moved)
    assert torch.equal(out, moved)


@pytest.mark.parametrize("dtype", ITEM_SIZE)
@pytest.mark.parametrize("kind", KINDS)
def test_adding_is_decoding_and_then_adding(kind: str, dtype: str) -> None:
    codec = codec_of(kind)
    payload, _ = encoded(codec, random_grad(70, dtype))
    out = torch.empty(70, dtype=codec_module.compute_dtype(dtype))
    codec.decode(payload, dtype, out)
    total = random_grad(70, dtype, seed=2).to(out.dtype)
    expected = total + out
    codec.decode_add(payload, dtype, total)
    assert torch.equal(total, expected)


@pytest.mark.parametrize("kind", KINDS)
def test_the_gradient_is_not_changed(kind: str) -> None:
    grad, residual = random_grad(33), random_grad(33, seed=2)
    encoded(codec_of(kind), grad, None if kind == "none" else residual)
    assert torch.equal(grad, random_grad(33))
    assert torch.equal(residual, random_grad(33, seed=2))


@pytest.mark.parametrize("kind", LOSSY)
def test_two_threads_may_encode_with_one_codec(kind: str) -> None:
    codec, grads = codec_of(kind), [random_grad(100_000, seed=seed) for seed in range(2)] * 8
    with ThreadPoolExecutor(2) as pool:
        for grad, (payload, residual) in zip(grads, pool.map(partial(encoded, codec), grads), strict=True):
            expected = encoded(codec_of(kind), grad)
            assert torch.equal(payload, expected[0])
            assert torch.equal(residual, expected[1])  # type: ignore[arg-type]


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(("kind", "dtype"), ROUNDING)
def test_a_gradient_that_is_not_finite_raises_and_leaves_the_residual(
    kind: str, dtype: str, wrong: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(codec_module, "BLOCK", 8)
    codec = codec_of(kind)
    at, numel = codec.unit + 37, codec.unit + 40
    grad, residual = random_grad(numel, dtype), new_residual(codec, numel, dtype)
    grad[at] = wrong
    with pytest.raises(NonFiniteGradientError, match=f"{wrong} at element {at} of {numel}"):
        encoded(codec, grad, residual)
    assert residual is not None
    assert not residual.any()


@pytest.mark.parametrize("kind", LOSSY)
def test_finite_gradients_whose_sum_overflows_raise(kind: str) -> None:
    grad = torch.tensor([3e38])
    residual = torch.tensor([3e38])
    with pytest.raises(NonFiniteGradientError, match=r"element 0 of 1.*3"):
        encoded(codec_of(kind), grad, residual)
    assert torch.equal(residual, grad)


@pytest.mark.parametrize("change", [-1, 1, 100])
@pytest.mark.parametrize("kind", KINDS)
def test_a_payload_of_another_length_is_refused(kind: str, change: int) -> None:
    codec = codec_of(kind)
    size = codec.encoded_nbytes(65, "float32")
    with pytest.raises(ProtocolError, match=rf"65 .*{size} bytes .*'{kind}'"):
        codec.check_payload(torch.zeros(size + change, dtype=torch.uint8), "float32", 65)


def test_a_payload_that_is_not_bytes_is_refused() -> None:
    with pytest.raises(ProtocolError, match=r"torch.int8\[1\]"):
        codec_of("2bit").check_payload(torch.zeros(1, dtype=torch.int8), "float32", 4)


@pytest.mark.parametrize("kind", LOSSY)
def test_a_dtype_that_no_store_holds_is_refused(kind: str) -> None:
    with pytest.raises(ConfigurationError, match=r"float16.*got 'int32'"):
        codec_of(kind).residual_dtype("int32")


@pytest.mark.parametrize("kind", KINDS)
def test_every_type_is_made_by_its_name_in_any_case(kind: str) -> None:
    assert make_codec({"type": kind.upper()}).spec()["type"] == kind


def test_no_params_mean_no_compression() -> None:
    assert make_codec(None).spec() == {"type": "none"}


@pytest.mark.parametrize("kind", ["1bit", "2bit"])
def test_the_threshold_is_a_half_unless_given(kind: str) -> None:
    assert make_codec({"type": kind}).spec() == {"type": kind, "threshold": 0.5}


@pytest.mark.parametrize(
    "params",
    [
        None,
        {"type": "fp16"},
        {"type": "2bit", "threshold": 0.1},
        {"type": "1bit", "threshold": -3},
        {"type": "topk", "ratio": 0.25},
    ],
)
def test_a_spec_survives_json_and_rebuilds_the_codec(params: dict[str, Any] | None) -> None:
    codec = make_codec(params)
    assert make_codec(json.loads(json.dumps(codec.spec()))) == codec


def test_params_are_not_changed() -> None:
    params = {"type": "2bit", "threshold": 0.1}
    make_codec(params)
    assert params == {"type": "2bit", "threshold": 0.1}


@pytest.mark.parametrize("threshold", [-2.5, -0.0, 0, 1e30])
def test_one_bit_takes_any_real_threshold(threshold: float) -> None:
    assert make_codec({"type": "1bit", "threshold": threshold}).spec()["threshold"] == threshold


def test_an_unknown_type_lists_the_valid_ones() -> None:
    with pytest.raises(UnknownNameError, match=", ".join(map(repr, KINDS)) + ", got '4bit'"):
        make_codec({"type": "4bit"})


BAD_PARAMS: list[tuple[Any, str]] = [
    *((params, "'type'.*none, 1bit") for params in ({}, {"threshold": 0.5}, {"type": None}, {"type": 2})),
    *((params, "dict") for params in ("2bit", ["type", "2bit"], 2)),
    ({"type": "2bit", "treshold": 0.5}, "'2bit' .*'treshold'.*type, threshold"),
    *(
        ({"type": kind, "threshold": 0.5}, f"'{kind}' .*'threshold'.*type")
        for kind in ("none", "ternary", "int8", "fp16", "bf16", "topk")
    ),
    *(({"type": "2bit", "threshold": value}, f"threshold .*got {value}") for value in (0, 0.0, -0.5, 1e-50)),
    *(
        ({"type": kind, "threshold": value}, f"'{kind}': threshold .*finite")
        for kind in ("1bit", "2bit")
        for value in (None, "0.5", True, math.nan, math.inf, 1j)
    ),
    *(({"type": "topk", "ratio": value}, f"ratio .*got {value}") for value in (0, -0.5, 1e-9, 0.5)),
    *(
        ({"type": "topk", "ratio": value}, "'topk': ratio .*finite")
        for value in (None, "0.5", True, math.nan)
    ),
    *(({"type": kind, "threshold": 1e300}, "threshold .*got 1e") for kind in ("1bit", "2bit")),
]


@pytest.mark.parametrize(("params", "said"), BAD_PARAMS, ids=str)
def test_wrong_params_are_refused_with_what_is_wrong_about_them(params: Any, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        make_codec(params)


@pytest.mark.parametrize(
    ("name", "sizes"), [("none", [2, 4, 8]), ("bf16", [2] * 3), ("fp16", [2] * 3), ("int8", [None] * 3)]
)
def test_elements_that_are_encoded_one_by_one_have_a_size_and_integers_none(
    name: str, sizes: list[int | None]
) -> None:
    codec = make_codec({"type": name})
    assert [codec.itemsize(dtype) for dtype in ("bfloat16", "float32", "float64")] == sizes
    assert codec.itemsize("int64") is None
