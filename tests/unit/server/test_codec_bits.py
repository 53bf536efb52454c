"""Every codec against a reference written element by element in plain Python, and against closed forms."""

from __future__ import annotations

import math
import random
import struct
from collections.abc import Callable, Iterable

import pytest
import torch
from torch import Tensor

from kvstore_server import codec as codec_module
from kvstore_server.codec import Codec, make_codec
from kvstore_server.errors import ProtocolError

LENGTHS = (0, 1, 3, 4, 5, 15, 16, 17, 63, 64, 65)
DTYPES = ("float16", "bfloat16", "float32", "float64")


def float32(value: float) -> float:
    return float(struct.unpack("f", struct.pack("f", value))[0])


def packed(codes: Iterable[str]) -> bytes:
    """Codes of a few bits, from the highest bit of each byte on."""
    bits = "".join(codes)
    bits += "0" * (-len(bits) % 8)
    return bytes(int(bits[at : at + 8], 2) for at in range(0, len(bits), 8))


Said = tuple[bytes, list[float]]
"""The bytes of some elements, and what they say."""


def one_bit(totals: list[float], threshold: float) -> Said:
    said = [1.0 if total > threshold else -1.0 for total in totals]
    return packed("1" if value > 0 else "0" for value in said), said


def two_bits(totals: list[float], threshold: float) -> Said:
    said = [threshold * ((total >= threshold) - (total <= -threshold)) for total in totals]
    return packed({1: "11", -1: "10", 0: "00"}[(value > 0) - (value < 0)] for value in said), said


def as_fp16(totals: list[float]) -> Said:
    data = struct.pack(f"<{len(totals)}e", *totals)
    return data, list(struct.unpack(f"<{len(totals)}e", data))


def as_bf16(totals: list[float]) -> Said:
    """Rounded to the nearest, ties to even."""
    words = struct.unpack(f"<{len(totals)}I", struct.pack(f"<{len(totals)}f", *totals))
    upper = [(word + 0x7FFF + (word >> 16 & 1)) >> 16 for word in words]
    said = struct.unpack(f"<{len(upper)}f", struct.pack(f"<{len(upper)}I", *(word << 16 for word in upper)))
    return struct.pack(f"<{len(upper)}H", *upper), list(said)


def as_int8(totals: list[float]) -> Said:
    """Elements whose largest is 127, so that the scale is 1; ties go to even."""
    assert max(map(abs, totals)) == 127
    return struct.pack(f"<f{len(totals)}b", 1.0, *map(round, totals)), [float(round(one)) for one in totals]


def as_ternary(totals: list[float]) -> Said:
    """Elements whose magnitudes add up exactly."""
    limit = 0.7 * sum(map(abs, totals)) / len(totals)
    sent = [abs(total) for total in totals if abs(total) > limit]
    scale = float32(sum(sent) / max(len(sent), 1))
    said = [math.copysign(scale, total) if abs(total) > limit else 0.0 for total in totals]
    codes = packed({1: "11", -1: "10", 0: "00"}[(value > 0) - (value < 0)] for value in said)
    return struct.pack("<f", scale) + codes, said


def as_topk(totals: list[float], ratio: float, form: str) -> Said:
    """The largest share; of equal magnitudes the first."""
    count = math.ceil(ratio * len(totals))
    order = sorted(range(len(totals)), key=lambda at: (-abs(totals[at]), at))
    chosen = sorted(order[:count])
    data = struct.pack(f"<{count}{form}{count}H", *(totals[at] for at in chosen), *chosen)
    said = [0.0] * len(totals)
    for at in chosen:
        said[at] = totals[at]
    return data, said


class Sender:
    """One sender of one tensor, and what a receiver that adds up its pushes holds."""

    def __init__(self, codec: Codec, numel: int, dtype: str = "float32") -> None:
        self.codec, self.dtype = codec, dtype
        kind = codec.residual_dtype(dtype)
        self.residual = torch.zeros(numel, dtype=kind)
        self.payload = torch.full((codec.encoded_nbytes(numel, dtype),), 0xAA, dtype=torch.uint8)
        self.decoded = torch.full((numel,), 7.0, dtype=kind)

    def push(self, grad: Tensor | float) -> Tensor:
        """Encode and decode one gradient, or one number for all elements; return what arrives."""
        if not isinstance(grad, Tensor):
            grad = torch.full(self.residual.shape, grad, dtype=getattr(torch, self.dtype))
        following = torch.full_like(self.residual, 7)
        self.codec.encode(grad, self.residual, self.payload, following)
        self.residual = following
        self.codec.decode(self.payload, self.dtype, self.decoded)
        return self.decoded


def two_bit(threshold: float = 0.5) -> Codec:
    return make_codec({"type": "2bit", "threshold": threshold})


DRAW: dict[str, Callable[[random.Random, float, bool], float]] = {
    # Every fourth number sits on the threshold, where ≥ and > differ.
    "1bit": lambda drawn, limit, is_edge: (
        drawn.choice((limit, -limit, 0.0)) if is_edge else drawn.gauss(0, 0.6)
    ),
    "fp16": lambda drawn, limit, is_edge: drawn.gauss(0, 1),
    # Quarters, a third of them halfway between two whole numbers.
    "int8": lambda drawn, limit, is_edge: drawn.choice((-3.5, 0.5, 1.5, 2.5, -0.25, 7, 0)),
    "of few magnitudes": lambda drawn, limit, is_edge: drawn.choice((-2.0, -1.0, 0.5, 1.0)),
    "mostly zero": lambda drawn, limit, is_edge: drawn.choice((0.0,) * 500 + (1.0, -3.0)),
    "constant": lambda drawn, limit, is_edge: 0.25,
}
DRAW |= {"2bit": DRAW["1bit"], "bf16": DRAW["fp16"], "topk": DRAW["fp16"], "ternary": DRAW["int8"]}
LONG = [(501, "float32"), (64 * 5 + 7, "float64")]
OF_1024 = [
    (numel, dtype) for numel in (1, 5, 1023, 1024, 1025, 3000) for dtype in ("float32", "float64", "bfloat16")
]
OF_65536 = [
    (65536 + 100, "float32", 0.01),
    (1000, "float64", 0.25),
    (64, "bfloat16", 0.1),
    (1, "float32", 0.25),
]
CASES: list[tuple[str, float, str, list[tuple[int, str]]]] = [
    *((kind, limit, kind, LONG) for kind in ("1bit", "2bit") for limit in (0.5, 2.5)),
    *(("2bit", limit, "2bit", LONG) for limit in (1e-3, 1.0)),
    *(("1bit", limit, "1bit", LONG) for limit in (-1.7, 0.0)),
    *(
        (kind, limit, kind, [(numel, dtype) for numel in LENGTHS])
        for kind, limit in (("2bit", 0.3), ("1bit", 0.1))
        for dtype in DTYPES
    ),
    *((kind, 0.0, kind, [(numel, "float32") for numel in LENGTHS]) for kind in ("fp16", "bf16")),
    *((kind, 0.0, kind, OF_1024) for kind in ("int8", "ternary")),
    *(
        ("topk", ratio, drawn, [(numel, dtype)])
        for numel, dtype, ratio in OF_65536
        for drawn in ("topk", "of few magnitudes", "mostly zero", "constant")
    ),
]
"""Codec, its threshold or ratio, how numbers are drawn, and (elements, dtype)."""
UNITS = {"int8": 1024, "ternary": 1024, "topk": 65536}
ROUNDS = {"1bit": 6, "2bit": 6, "fp16": 4, "bf16": 4, "int8": 3, "ternary": 1, "topk": 2}


def said_of(kind: str, limit: float, dtype: str, totals: list[float]) -> Said:
    """The bytes of a gradient by the reference, unit by unit, and what they say."""
    is_double = dtype == "float64"
    threshold = limit if is_double else float32(limit)
    encode: dict[str, Callable[[list[float]], Said]] = {
        "1bit": lambda some: one_bit(some, threshold),
        "2bit": lambda some: two_bits(some, threshold),
        "fp16": as_fp16,
        "bf16": as_bf16,
        "int8": as_int8,
        "ternary": as_ternary,
        "topk": lambda some: as_topk(some, limit, "d" if is_double else "f"),
    }
    size = UNITS.get(kind, 1 << 30)
    found = [encode[kind](totals[start : start + size]) for start in range(0, len(totals), size)]
    return b"".join(data for data, _ in found), [value for _, said in found for value in said]


@pytest.mark.parametrize(("kind", "limit", "drawn", "sizes"), CASES, ids=str)
def test_bits_are_the_reference_for_every_length_dtype_and_threshold(
    kind: str, limit: float, drawn: str, sizes: list[tuple[int, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(codec_module, "BLOCK", 64)  # so that the long ones have several
    params = {"1bit": {"threshold": limit}, "2bit": {"threshold": limit}, "topk": {"ratio": limit}}.get(
        kind, {}
    )
    for numel, dtype in sizes:
        seeded, rounded = (
            random.Random(f"{drawn}{limit}{numel}{dtype}"),
            float if dtype == "float64" else float32,
        )
        sender, kept = Sender(make_codec({"type": kind, **params}), numel, dtype), [0.0] * numel
        for _ in range(ROUNDS[kind]):
            numbers = [DRAW[drawn](seeded, limit, at % 4 == 3) for at in range(numel)]
            if kind == "int8":  # the largest of each unit makes up 127
                numbers[::1024] = [seeded.choice((-127, 127)) - one for one in kept[::1024]]
            grad = torch.tensor(numbers, dtype=getattr(torch, dtype))
            totals = [rounded(one + given) for one, given in zip(kept, grad.tolist(), strict=True)]
            data, said = said_of(kind, limit, dtype, totals)
            kept = [rounded(total - value) for total, value in zip(totals, said, strict=True)]
            assert sender.push(grad).tolist() == said
            assert bytes(sender.payload.tolist()) == data
            assert sender.residual.tolist() == kept


def test_half_precision_gradients_arrive_in_half_precision_too() -> None:
    sender = Sender(two_bit(0.3), 3, "float16")
    sender.push(torch.tensor([1.0, -1.0, 0.0], dtype=torch.float16))
    out = torch.ones(3, dtype=torch.float16)
    sender.codec.decode_add(sender.payload, "float16", out)
    assert torch.equal(out, torch.tensor([1.3, 0.7, 1.0], dtype=torch.float16))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(
    ("kind", "digits"), [("1bit", 6), ("2bit", 6), ("fp16", 16), ("bf16", 16), ("topk", 6)]
)
def test_what_was_sent_and_what_is_kept_make_up_the_gradients(kind: str, digits: int, dtype: str) -> None:
    # Multiples of 2**-digits below 64: every sum is exact in float32, but has too many digits for half precision.
    generator = torch.Generator().manual_seed(3)
    sender = Sender(make_codec({"type": kind}), 1000, dtype)
    given, arrived = (torch.zeros(1000, dtype=getattr(torch, dtype)) for _ in range(2))
    most = 2 ** min(digits + 1, 16)
    for _ in range(20):
        grad = torch.randint(-most, most + 1, (1000,), generator=generator).to(given.dtype) / 2**digits
        given += grad
        arrived += sender.push(grad)
        assert torch.equal(arrived + sender.residual, given)


@pytest.mark.parametrize("shift", range(0, 8, 2))
def test_the_code_that_nobody_sends_is_refused(shift: int) -> None:
    payload = torch.tensor([0b11100011, 1 << shift], dtype=torch.uint8)
    with pytest.raises(ProtocolError, match=r"byte 1.*01"):
        two_bit().check_payload(payload, "float32", 8)


@pytest.mark.parametrize("kind", ["fp16", "bf16"])
def test_gradients_of_the_other_half_type_have_a_float32_residual(kind: str) -> None:
    other = {"fp16": "bfloat16", "bf16": "float16"}[kind]
    grad = torch.tensor([1.0 + 2**-7, 1e-6], dtype=getattr(torch, other))
    sender = Sender(make_codec({"type": kind}), 2, other)
    decoded = sender.push(grad)
    assert sender.residual.dtype == torch.float32
    assert torch.equal(decoded + sender.residual, grad.float())


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
    payload = torch.empty(grad.nbytes, dtype=torch.uint8)
    decoded = torch.empty(5, dtype=codec_module.compute_dtype(dtype))
    codec.encode(grad, None, payload, None)
    codec.decode(payload, dtype, decoded)
    assert torch.equal(payload, grad.view(torch.uint8))
    torch.testing.assert_close(decoded, grad.to(decoded.dtype), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(("kind", "largest"), [("fp16", 65504.0), ("bf16", (2 - 2**-7) * 2.0**127)])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_a_number_beyond_the_range_is_sent_as_the_largest(kind: str, largest: float, sign: float) -> None:
    grad = torch.tensor([sign * torch.finfo(torch.float32).max])
    sender = Sender(make_codec({"type": kind}), 1)
    assert sender.push(grad).item() == sign * largest
    assert torch.isfinite(sender.residual).all()


@pytest.mark.parametrize(("grads", "total"), [([1e6] + [0.0] * 15, 1e6), ([2.0**-30] * 1024, 2.0**-20)])
def test_what_float16_cannot_say_now_arrives_once_it_can(grads: list[float], total: float) -> None:
    sender = Sender(make_codec({"type": "fp16"}), 1)
    arrived = sum(sender.push(grad).item() for grad in grads)
    assert arrived + sender.residual.item() == total
    assert sender.residual.item() <= 2.0**-25


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_int8_is_wrong_by_half_a_127th_of_the_largest_at_most_and_keeps_that(dtype: str) -> None:
    grad = torch.randn(5000, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    grad = (grad * 2.0 ** torch.arange(-40, 10).repeat_interleave(100)).to(getattr(torch, dtype))
    sender = Sender(make_codec({"type": "int8"}), 5000, dtype)
    said = sender.push(grad).double()
    for got, wanted, kept in zip(
        said.split(1024), grad.split(1024), sender.residual.split(1024), strict=True
    ):
        largest = wanted.abs().max().item()
        assert got.abs().max().item() == pytest.approx(largest, rel=2.0**-22)
        assert kept.abs().max().item() <= largest / 254 * (1 + 2.0**-20)
        assert torch.equal(got + kept.double(), wanted.double())


def test_int8_keeps_back_what_no_scale_can_say() -> None:
    sender = Sender(make_codec({"type": "int8"}), 2)
    assert sender.push(torch.tensor([0.0, 2.0**-120])).tolist() == [0, 0]
    assert sender.residual.tolist() == [0, 2.0**-120]
    assert sender.push(torch.tensor([-3e38, 2e38])).tolist() == pytest.approx(
        [-(2.0**127), 2.0**127], rel=0.01
    )
    assert torch.isfinite(sender.residual).all()


def test_ternary_leaves_about_a_fifth_of_the_energy_of_normal_numbers() -> None:
    """As the paper has it: Li and Liu, Ternary Weight Networks, 2016."""
    grad = torch.randn(1 << 16, generator=torch.Generator().manual_seed(1))
    sender = Sender(make_codec({"type": "ternary"}), len(grad))
    left = (grad - sender.push(grad)).square().sum() / grad.square().sum()
    assert 0.17 < left < 0.22


def test_ternary_keeps_back_what_is_beyond_its_scale() -> None:
    sender = Sender(make_codec({"type": "ternary"}), 2)
    assert sender.push(torch.tensor([-3e38, 2.0**100])).tolist() == [-(2.0**100), 2.0**100]
    assert torch.isfinite(sender.residual).all()


HOSTILE = {
    "a scale that is not a number": ("int8", struct.pack("<f3b", math.nan, 1, 2, 3)),
    "an infinite scale": ("int8", struct.pack("<f3b", math.inf, 1, 2, 3)),
    "a negative scale": ("int8", struct.pack("<f3b", -1.0, 1, 2, 3)),
    "a scale whose multiples overflow": ("int8", struct.pack("<f3b", 3e38, 1, 2, 3)),
    "the number -128": ("int8", struct.pack("<f3b", 1.0, 1, -128, 3)),
    "a negative ternary scale": ("ternary", struct.pack("<fB", -1.0, 0)),
    "an infinite ternary scale": ("ternary", struct.pack("<fB", math.inf, 0)),
    "a code that says nothing": ("ternary", struct.pack("<fB", 1.0, 0b01000000)),
    "a position behind the end": ("topk", struct.pack("<fH", 1.0, 3)),
    "an infinite number": ("topk", struct.pack("<fH", math.inf, 1)),
    "a number that is none": ("topk", struct.pack("<fH", math.nan, 1)),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_bytes_that_no_codec_writes_are_refused(name: str) -> None:
    kind, data = HOSTILE[name]
    with pytest.raises(ProtocolError, match=f"'{kind}'"):
        make_codec({"type": kind}).check_payload(torch.tensor(list(data), dtype=torch.uint8), "float32", 3)


@pytest.mark.parametrize("positions", [(5, 5), (5, 4)])
def test_positions_that_do_not_ascend_are_refused(positions: tuple[int, int]) -> None:
    data = torch.tensor(list(struct.pack("<2f2H", 1.0, 2.0, *positions)), dtype=torch.uint8)
    with pytest.raises(ProtocolError, match="ascending"):
        make_codec({"type": "topk", "ratio": 0.25}).check_payload(data, "float32", 8)
