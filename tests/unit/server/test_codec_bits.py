"""Every codec against a reference written element by element in plain Python, and against closed forms."""

from __future__ import annotations

import math
import random
import struct
from collections.abc import Callable

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


def reference(
    kind: str, threshold: float, grads: list[float], residual: list[float], is_float64: bool
) -> tuple[bytes, list[float], list[float]]:
    """Return the bytes, the decoded numbers and the new residual; every operation rounds to the compute type."""
    rounded: Callable[[float], float] = float if is_float64 else float32
    t = rounded(threshold)
    bits, decoded, after = "", [], []
    for g, r in zip(grads, residual, strict=True):
        r = rounded(r + g)
        if kind == "1bit":
            code, value = ("1", 1.0) if r > t else ("0", -1.0)
        elif r >= t:
            code, value = "11", t
        elif r <= -t:
            code, value = "10", -t
        else:
            code, value = "00", 0.0
        bits += code
        decoded.append(value)
        after.append(rounded(r - value))
    bits += "0" * (-len(bits) % 8)
    return bytes(int(bits[at : at + 8], 2) for at in range(0, len(bits), 8)), decoded, after


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


LONG = [(501, "float32"), (64 * 5 + 7, "float64")]


@pytest.mark.parametrize(
    ("kind", "threshold", "sizes"),
    [
        *((kind, threshold, LONG) for kind in ("1bit", "2bit") for threshold in (0.5, 2.5)),
        *(("2bit", threshold, LONG) for threshold in (1e-3, 1.0)),
        *(("1bit", threshold, LONG) for threshold in (-1.7, 0.0)),
        *(
            (kind, threshold, [(numel, dtype) for numel in LENGTHS])
            for kind, threshold in (("2bit", 0.3), ("1bit", 0.1))
            for dtype in DTYPES
        ),
    ],
    ids=str,
)
def test_bits_are_the_reference_for_every_length_dtype_and_threshold(
    kind: str, threshold: float, sizes: list[tuple[int, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(codec_module, "BLOCK", 64)  # so that the long ones have several
    for numel, dtype in sizes:
        seeded = random.Random(f"{kind}{threshold}{numel}{dtype}")
        sender = Sender(make_codec({"type": kind, "threshold": threshold}), numel, dtype)
        residual = [0.0] * numel
        for _ in range(6):
            # Every fourth number sits on the threshold, where ≥ and > differ.
            numbers = [
                seeded.choice((threshold, -threshold, 0.0)) if i % 4 == 3 else seeded.gauss(0, 0.6)
                for i in range(numel)
            ]
            grad = torch.tensor(numbers, dtype=getattr(torch, dtype))
            data, decoded, residual = reference(kind, threshold, grad.tolist(), residual, dtype == "float64")
            assert sender.push(grad).tolist() == decoded
            assert bytes(sender.payload.tolist()) == data
            assert sender.residual.tolist() == residual


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


@pytest.mark.parametrize("kind", ["fp16", "bf16"])
@pytest.mark.parametrize("numel", LENGTHS)
def test_elements_are_rounded_to_nearest_and_the_residual_keeps_the_error(kind: str, numel: int) -> None:
    generator = torch.Generator().manual_seed(numel)
    sender, kept = Sender(make_codec({"type": kind}), numel), [0.0] * numel
    for _ in range(4):
        grad = torch.randn(numel, generator=generator)
        decoded = sender.push(grad)
        totals = [float32(r + g) for r, g in zip(kept, grad.tolist(), strict=True)]
        expected = [ROUNDED[kind](total) for total in totals]
        kept = [total - value for total, (_, value) in zip(totals, expected, strict=True)]
        assert bytes(sender.payload.tolist()) == b"".join(data for data, _ in expected)
        assert decoded.tolist() == [value for _, value in expected]
        assert sender.residual.tolist() == kept


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


def unit_of_int8(numbers: list[float]) -> tuple[bytes, list[float]]:
    """The bytes of elements whose largest is 127, so that the scale is 1, and what they say."""
    assert max(map(abs, numbers)) == 127
    whole = [round(number) for number in numbers]  # ties to even
    return struct.pack(f"<f{len(whole)}b", 1.0, *whole), [float(number) for number in whole]


@pytest.mark.parametrize("numel", [1, 5, 1023, 1024, 1025, 3000])
@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
def test_int8_sends_whole_numbers_of_a_scale_for_each_1024_elements(numel: int, dtype: str) -> None:
    seeded = random.Random(numel)
    sender, kept = Sender(make_codec({"type": "int8"}), numel, dtype), [0.0] * numel
    for _ in range(3):
        # Quarters, a third of them halfway between two whole numbers; the largest of each unit makes up 127.
        numbers = [seeded.choice((-3.5, 0.5, 1.5, 2.5, -0.25, 7, 0)) for _ in range(numel)]
        for start in range(0, numel, 1024):
            numbers[start] = seeded.choice((-127, 127)) - kept[start]
        data, said = b"", list[float]()
        totals = [g + r for g, r in zip(numbers, kept, strict=True)]
        for start in range(0, numel, 1024):
            one, values = unit_of_int8(totals[start : start + 1024])
            data, said = data + one, said + values
        kept = [total - value for total, value in zip(totals, said, strict=True)]
        assert sender.push(torch.tensor(numbers, dtype=getattr(torch, dtype))).tolist() == said
        assert bytes(sender.payload.tolist()) == data
        assert sender.residual.tolist() == kept


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


def unit_of_ternary(numbers: list[float]) -> tuple[bytes, list[float]]:
    """The bytes of up to 1,024 elements, whose magnitudes add up exactly, and what they say."""
    limit = 0.7 * sum(map(abs, numbers)) / len(numbers)
    sent = [abs(number) for number in numbers if abs(number) > limit]
    [scale] = struct.unpack("<f", struct.pack("<f", sum(sent) / max(len(sent), 1)))
    said = [math.copysign(scale, number) if abs(number) > limit else 0.0 for number in numbers]
    codes = "".join({1: "11", -1: "10", 0: "00"}[(value > 0) - (value < 0)] for value in said)
    codes += "0" * (-len(codes) % 8)
    data = bytes(int(codes[at : at + 8], 2) for at in range(0, len(codes), 8))
    return struct.pack("<f", scale) + data, said


@pytest.mark.parametrize("numel", [1, 2, 5, 1023, 1024, 1025, 3000])
@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
def test_ternary_sends_the_sign_of_what_is_large_for_each_1024_elements(numel: int, dtype: str) -> None:
    seeded = random.Random(numel)
    sender = Sender(make_codec({"type": "ternary"}), numel, dtype)
    numbers = [seeded.choice((-3.5, 0.5, 1.5, -2.5, -0.25, 7, 0)) for _ in range(numel)]
    data, said = b"", list[float]()
    for start in range(0, numel, 1024):
        one, values = unit_of_ternary(numbers[start : start + 1024])
        data, said = data + one, said + values
    arrived = sender.push(torch.tensor(numbers, dtype=getattr(torch, dtype)))
    assert arrived.tolist() == said
    assert bytes(sender.payload.tolist()) == data
    assert torch.equal(sender.residual, torch.tensor(numbers, dtype=arrived.dtype) - arrived)


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


def largest(numbers: list[float], ratio: float) -> list[int]:
    """Positions of the largest share, ascending; of equal magnitudes the first."""
    count = math.ceil(ratio * len(numbers))
    return sorted(sorted(range(len(numbers)), key=lambda at: (-abs(numbers[at]), at))[:count])


MOSTLY_ZERO = [0.0] * 500 + [1.0, -3.0]
TOP_K_GRADIENTS: dict[str, Callable[[random.Random], float]] = {
    "random": lambda seeded: seeded.gauss(0, 1),
    "of few magnitudes": lambda seeded: seeded.choice((-2.0, -1.0, 0.5, 1.0)),
    "mostly zero": lambda seeded: seeded.choice(MOSTLY_ZERO),
    "constant": lambda seeded: 0.25,
}


@pytest.mark.parametrize("kind", TOP_K_GRADIENTS)
@pytest.mark.parametrize(
    ("ratio", "dtype", "numel"),
    [(0.01, "float32", 65536 + 100), (0.25, "float64", 1000), (0.1, "bfloat16", 64), (0.25, "float32", 1)],
)
def test_topk_sends_the_largest_of_each_65536_elements_and_keeps_the_others(
    ratio: float, dtype: str, numel: int, kind: str
) -> None:
    seeded = random.Random(numel)
    sender, kept = Sender(make_codec({"type": "topk", "ratio": ratio}), numel, dtype), torch.zeros(numel)
    for _ in range(2):
        grad = torch.tensor(
            [TOP_K_GRADIENTS[kind](seeded) for _ in range(numel)], dtype=getattr(torch, dtype)
        )
        total = kept.to(sender.residual.dtype) + grad
        data, said = b"", torch.zeros_like(total)
        for start in range(0, numel, 65536):
            unit = total[start : start + 65536].tolist()
            chosen = largest(unit, ratio)
            numbers = [unit[at] for at in chosen]
            data += struct.pack(f"<{len(chosen)}{'d' if dtype == 'float64' else 'f'}", *numbers)
            data += struct.pack(f"<{len(chosen)}H", *chosen)
            said[[start + at for at in chosen]] = torch.tensor(numbers, dtype=said.dtype)
        kept = total - said
        assert torch.equal(sender.push(grad), said)
        assert bytes(sender.payload.tolist()) == data
        assert torch.equal(sender.residual, kept)


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
