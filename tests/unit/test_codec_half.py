"""fp16, bf16 and no compression against rounding written in plain Python."""

from __future__ import annotations

import math
import struct

import pytest
import torch
from torch import Tensor

from kvstore_server.codec import Codec, make_codec

LENGTHS = (0, 1, 3, 4, 5, 15, 16, 17, 63, 64, 65)


def as_fp16(value: float) -> tuple[bytes, float]:
    """The two bytes of the nearest float16, and its value."""
    data = struct.pack("<e", value)
    return data, struct.unpack("<e", data)[0]


def as_bf16(value: float) -> tuple[bytes, float]:
    """The two bytes of the nearest bfloat16, ties to even, and its value."""
    (word,) = struct.unpack("<I", struct.pack("<f", value))
    upper = (word + 0x7FFF + (word >> 16 & 1)) >> 16
    return struct.pack("<H", upper), struct.unpack("<f", struct.pack("<I", upper << 16))[0]


ROUNDED = {"fp16": as_fp16, "bf16": as_bf16}


def push(codec: Codec, grad: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the bytes, and what they decode to in the type that sums are computed in."""
    dtype = str(grad.dtype).removeprefix("torch.")
    payload = torch.full((codec.encoded_nbytes(grad.numel(), dtype),), 0xAA, dtype=torch.uint8)
    codec.encode(grad, residual, payload)
    out = torch.empty(grad.numel(), dtype=torch.float64 if dtype == "float64" else torch.float32)
    codec.decode(payload, dtype, out)
    return payload, out


@pytest.mark.parametrize("kind", ["fp16", "bf16"])
@pytest.mark.parametrize("numel", LENGTHS)
def test_elements_are_rounded_to_nearest_and_the_residual_keeps_the_error(kind: str, numel: int) -> None:
    generator = torch.Generator().manual_seed(numel)
    codec, residual = make_codec({"type": kind}), torch.zeros(numel)
    kept = [0.0] * numel
    for _ in range(4):
        grad = torch.randn(numel, generator=generator)
        payload, decoded = push(codec, grad, residual)
        totals = [
            struct.unpack("f", struct.pack("f", r + g))[0] for r, g in zip(kept, grad.tolist(), strict=True)
        ]
        expected = [ROUNDED[kind](total) for total in totals]
        kept = [total - value for total, (_, value) in zip(totals, expected, strict=True)]
        assert bytes(payload.tolist()) == b"".join(data for data, _ in expected)
        assert decoded.tolist() == [value for _, value in expected]
        assert residual.tolist() == kept


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", ["fp16", "bf16"])
def test_what_was_sent_and_what_is_kept_make_up_the_gradients(kind: str, dtype: torch.dtype) -> None:
    # Multiples of 2^-16 below 64: sums are exact in float32, but have too many digits for half precision.
    generator = torch.Generator().manual_seed(5)
    codec, residual = make_codec({"type": kind}), torch.zeros(500, dtype=dtype)
    given, arrived = torch.zeros(500, dtype=dtype), torch.zeros(500, dtype=dtype)
    for _ in range(20):
        grad = torch.randint(-(2**16), 2**16, (500,), generator=generator).to(dtype) / 2**16
        given += grad
        arrived += push(codec, grad, residual)[1]
        assert torch.equal(arrived + residual, given)
    assert residual.any()


@pytest.mark.parametrize("kind", ["fp16", "bf16"])
def test_gradients_of_the_other_half_type_have_a_float32_residual(kind: str) -> None:
    other = {"fp16": "bfloat16", "bf16": "float16"}[kind]
    codec = make_codec({"type": kind})
    grad = torch.tensor([1.0 + 2**-7, 1e-6], dtype=getattr(torch, other))
    residual = torch.zeros(2, dtype=codec.residual_dtype(other))
    _, decoded = push(codec, grad, residual)
    assert residual.dtype == torch.float32
    assert torch.equal(decoded + residual, grad.float())


@pytest.mark.parametrize(
    ("kind", "dtype"), [("fp16", "float16"), ("bf16", "bfloat16"), ("none", "float16"), ("none", "float64")]
)
def test_gradients_that_need_no_rounding_travel_as_they_are_with_infinities_and_nans(
    kind: str, dtype: str
) -> None:
    codec = make_codec({"type": kind})
    grad = torch.tensor([1.5, -0.0, math.inf, -math.inf, math.nan], dtype=getattr(torch, dtype))
    assert codec.is_exact(dtype)
    assert codec.residual_dtype(dtype) is None
    payload, decoded = push(codec, grad, None)
    assert torch.equal(payload, grad.view(torch.uint8))
    torch.testing.assert_close(decoded, grad.to(decoded.dtype), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(("kind", "largest"), [("fp16", 65504.0), ("bf16", (2 - 2**-7) * 2.0**127)])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_a_number_beyond_the_range_is_sent_as_the_largest(kind: str, largest: float, sign: float) -> None:
    grad = torch.tensor([sign * torch.finfo(torch.float32).max])
    residual = torch.zeros(1)
    _, decoded = push(make_codec({"type": kind}), grad, residual)
    assert decoded.item() == sign * largest
    assert torch.isfinite(residual).all()


def test_what_is_beyond_the_range_of_float16_arrives_with_the_next_gradients() -> None:
    codec, residual, arrived = make_codec({"type": "fp16"}), torch.zeros(1), 0.0
    for grad in [1e6] + [0.0] * 15:
        arrived += push(codec, torch.tensor([grad]), residual)[1].item()
    assert arrived == 1e6
    assert residual.item() == 0.0


def test_numbers_too_small_for_float16_arrive_once_they_have_added_up() -> None:
    codec, residual, arrived = make_codec({"type": "fp16"}), torch.zeros(1), 0.0
    for _ in range(1024):
        arrived += push(codec, torch.tensor([2.0**-30]), residual)[1].item()
    assert arrived + residual.item() == 2.0**-20
    assert residual.item() <= 2.0**-25
