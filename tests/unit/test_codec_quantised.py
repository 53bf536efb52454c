"""2bit and 1bit against a reference written element by element in plain Python, and against closed forms."""

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
        self.codec.encode(grad, self.residual, self.payload)
        self.codec.decode(self.payload, self.dtype, self.decoded)
        return self.decoded


def two_bit(threshold: float = 0.5) -> Codec:
    return make_codec({"type": "2bit", "threshold": threshold})


def one_bit(threshold: float) -> Codec:
    return make_codec({"type": "1bit", "threshold": threshold})


def assert_follows_reference(kind: str, threshold: float, numel: int, dtype: str, rounds: int) -> None:
    seeded = random.Random(f"{kind}{threshold}{numel}{dtype}")
    sender = Sender(make_codec({"type": kind, "threshold": threshold}), numel, dtype)
    expected_residual = [0.0] * numel
    for _ in range(rounds):
        # Every fourth number sits on the threshold, where ≥ and > differ.
        numbers = [
            seeded.choice((threshold, -threshold, 0.0)) if i % 4 == 3 else seeded.gauss(0, 0.6)
            for i in range(numel)
        ]
        grad = torch.tensor(numbers, dtype=getattr(torch, dtype))
        expected = reference(kind, threshold, grad.tolist(), expected_residual, dtype == "float64")
        decoded = sender.push(grad)
        expected_residual = expected[2]
        assert bytes(sender.payload.tolist()) == expected[0]
        assert decoded.tolist() == expected[1]
        assert sender.residual.tolist() == expected_residual


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("numel", LENGTHS)
def test_two_bits_are_the_reference_for_every_length_and_dtype(numel: int, dtype: str) -> None:
    assert_follows_reference("2bit", 0.3, numel, dtype, rounds=6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("numel", LENGTHS)
def test_one_bit_is_the_reference_for_every_length_and_dtype(numel: int, dtype: str) -> None:
    assert_follows_reference("1bit", 0.1, numel, dtype, rounds=6)


@pytest.mark.parametrize("threshold", [1e-3, 0.1, 0.5, 1.0, 3.7])
def test_two_bits_are_the_reference_for_every_threshold(threshold: float) -> None:
    assert_follows_reference("2bit", threshold, 501, "float32", rounds=5)


@pytest.mark.parametrize("threshold", [-1.7, -0.5, 0.0, 0.5, 2.5])
def test_one_bit_is_the_reference_for_every_threshold(threshold: float) -> None:
    assert_follows_reference("1bit", threshold, 501, "float32", rounds=5)


@pytest.mark.parametrize("kind", ["1bit", "2bit"])
def test_several_blocks_are_the_reference(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec_module, "BLOCK", 64)
    assert_follows_reference(kind, 0.25, 64 * 5 + 7, "float32", rounds=3)


def test_the_first_element_of_two_bits_is_the_most_significant() -> None:
    sender = Sender(two_bit(), 5)
    sender.push(torch.tensor([0.5, -0.5, 0.0, 0.7, -9.0]))
    assert [f"{byte:08b}" for byte in sender.payload.tolist()] == ["11100011", "10000000"]


def test_the_first_element_of_one_bit_is_the_most_significant() -> None:
    sender = Sender(one_bit(0.0), 10)
    sender.push(torch.tensor([1.0, -1, -1, -1, 1, 1, 0, 2, 3, -3]))
    assert [f"{byte:08b}" for byte in sender.payload.tolist()] == ["10001101", "10000000"]


@pytest.mark.parametrize(("kind", "numbers"), [("2bit", 16), ("1bit", 32)])
def test_sixteen_or_thirty_two_elements_take_four_bytes(kind: str, numbers: int) -> None:
    codec = make_codec({"type": kind})
    assert codec.encoded_nbytes(numbers, "float32") == 4
    assert codec.encoded_nbytes(numbers + 1, "float64") == 5


def test_two_bits_reach_exactly_the_threshold() -> None:
    sender = Sender(two_bit(0.3), 1)
    assert sender.push(0.3).tolist() == [float32(0.3)]
    assert sender.residual.tolist() == [0.0]


def test_one_bit_needs_more_than_the_threshold() -> None:
    sender = Sender(one_bit(0.3), 1)
    assert sender.push(0.3).tolist() == [-1.0]
    assert sender.residual.tolist() == [float32(float32(0.3) + 1.0)]


def test_values_are_decoded_in_double_precision_for_double_gradients() -> None:
    assert Sender(two_bit(0.3), 1, "float64").push(1.0).tolist() == [0.3]


def test_half_precision_gradients_arrive_in_half_precision_too() -> None:
    sender = Sender(two_bit(0.3), 3, "float16")
    sender.push(torch.tensor([1.0, -1.0, 0.0], dtype=torch.float16))
    out = torch.ones(3, dtype=torch.float16)
    sender.codec.decode_add(sender.payload, "float16", out)
    assert torch.equal(out, torch.tensor([1.3, 0.7, 1.0], dtype=torch.float16))


@pytest.mark.parametrize("kind", ["1bit", "2bit"])
def test_what_was_sent_and_what_is_kept_make_up_the_gradients(kind: str) -> None:
    # Multiples of 1/64 below 64: every sum is exact in float32.
    generator = torch.Generator().manual_seed(3)
    sender = Sender(make_codec({"type": kind, "threshold": 0.5}), 1000)
    given, arrived = torch.zeros(1000), torch.zeros(1000)
    for _ in range(20):
        grad = torch.randint(-128, 129, (1000,), generator=generator) / 64
        given += grad
        arrived += sender.push(grad)
        assert torch.equal(arrived + sender.residual, given)


@pytest.mark.parametrize("shift", range(0, 8, 2))
def test_the_code_that_nobody_sends_is_refused(shift: int) -> None:
    out = torch.ones(8)
    payload = torch.tensor([0b11100011, 1 << shift], dtype=torch.uint8)
    with pytest.raises(ProtocolError, match="byte 1 of a payload holds the code 01"):
        two_bit().decode(payload, "float32", out)
    assert out.tolist() == [1.0] * 8


# What follows are the numbers of MXNet's own tests: its `test` optimizer, w += rate · Σ gradients, on `workers`.

RATE = 2.0


class Job:
    """Workers that push alike into one weight."""

    def __init__(self, codec: Codec, workers: int, numel: int = 6, initial: float = 0.0) -> None:
        self.senders = [Sender(codec, numel) for _ in range(workers)]
        self.weight = torch.full((numel,), initial)

    def push(self, grad: Tensor | float) -> Tensor:
        for sender in self.senders:
            self.weight += RATE * sender.push(grad)
        return self.weight

    def push_gives(self, grad: float, expected: float) -> None:
        assert (self.push(grad) == expected).all(), (grad, expected, self.weight)


JOBS = [(1, 6), (2, 6), (3, 6), (7, 6), (1, 1211 * 1211)]


@pytest.mark.parametrize("initial", [0.0, 1.0])
@pytest.mark.parametrize(("workers", "numel"), JOBS)
def test_one_bit_with_threshold_zero_gives_the_upstream_numbers(
    workers: int, numel: int, initial: float
) -> None:
    job = Job(one_bit(0.0), workers, numel, initial)
    unit = RATE * workers
    job.push_gives(1.0, initial + unit)
    job.push_gives(-1.0, initial)
    job.push_gives(2.0, initial + unit)
    job.push_gives(0.0, initial + 2 * unit)
    job.push_gives(-2.0, initial + unit)


@pytest.mark.parametrize("initial", [0.0, 1.0])
@pytest.mark.parametrize(("workers", "numel"), JOBS)
def test_two_bits_with_threshold_a_half_give_the_upstream_numbers(
    workers: int, numel: int, initial: float
) -> None:
    job = Job(two_bit(0.5), workers, numel, initial)
    unit = 0.5 * RATE * workers
    job.push_gives(0.0, initial)
    job.push_gives(0.4, initial)
    job.push_gives(0.5 - 0.4, initial + unit)
    job.push_gives(0.2, initial + unit)
    job.push_gives(0.5 - 0.2, initial + 2 * unit)
    assert all(not sender.residual.any() for sender in job.senders)
    job.push_gives(0.5, initial + 3 * unit)


@pytest.mark.parametrize("codec", [one_bit(0.0), two_bit(0.5)], ids=["1bit", "2bit"])
@pytest.mark.parametrize("workers", [1, 2, 3, 7])
def test_random_gradients_give_the_upstream_numbers(codec: Codec, workers: int) -> None:
    generator = torch.Generator().manual_seed(123)
    job = Job(codec, workers)
    residual, threshold = [0.0] * 6, codec.spec()["threshold"]
    for _ in range(7):
        grad = torch.rand(6, generator=generator)
        before = job.weight.clone()
        _, decoded, residual = reference(codec.name, threshold, grad.tolist(), residual, False)
        change = job.push(grad) - before
        assert change.tolist() == [value * RATE * workers for value in decoded]


@pytest.mark.parametrize("threshold", [-0.5, 0.0, 0.5])
def test_one_bit_on_four_devices_gives_the_upstream_numbers(threshold: float) -> None:
    job = Job(one_bit(threshold), 4)
    unit = RATE * 4
    for i in range(10):
        job.push_gives(1.0, (i + 1) * unit)
    for i in range(10):
        job.push_gives(-1.0, (10 - i - 1) * unit)


def test_two_bits_on_four_devices_give_the_upstream_numbers() -> None:
    job = Job(two_bit(0.5), 4)
    unit = 0.5 * RATE * 4
    for grad, fired in ((0.4, 0), (0.5 - 0.3, 1), (0.2, 1), (0.2, 2)):
        job.push_gives(grad, fired * unit)
    for i in range(10):
        job.push_gives(-0.5, (2 - i - 1) * unit)


def test_two_devices_that_push_less_than_the_threshold_move_every_other_step_or_so() -> None:
    # MXNet, observed: 2bit, threshold .5, gradients .3, sgd with learning rate 1: 0, −1, −1, −2.
    senders = [Sender(two_bit(0.5), 1) for _ in range(2)]
    weight, seen = 0.0, []
    for _ in range(4):
        weight -= sum(sender.push(0.3).item() for sender in senders)
        seen.append(weight)
    assert seen == [0.0, -1.0, -1.0, -2.0]
    assert math.isclose(senders[0].residual.item(), 4 * 0.3 - 2 * 0.5, abs_tol=1e-6)
