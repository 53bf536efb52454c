"""Counter-based noise, and SGLD, whose noise it is."""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from kvstore_server.optimizer import Optimizer, create
from kvstore_server.optimizer.gluon import gluon_normal
from kvstore_server.plan import Plan, Segment, Slice, TensorSpec, make_plan
from tests.support.optimizer_slices import empty, update_slice

MANY = 1 << 20
WORD = 2**64


@pytest.fixture
def three_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def one_by_hand(stream: tuple[object, ...], place: int) -> float:
    """The same element in Python's unbounded integers."""

    def mixed(z: int) -> int:
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % WORD
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB % WORD
        return z ^ (z >> 31)

    digest = hashlib.blake2b(repr(stream).encode(), digest_size=16).digest()
    a, b = (int.from_bytes(digest[i : i + 8], "little") for i in (0, 8))
    word = mixed((mixed((place * 0x9E3779B97F4A7C15 + a) % WORD) + b) % WORD)
    radius = math.sqrt(-2.0 * math.log(((word >> 24) + 1) / 2**40))
    return radius * math.cos(2.0 * math.pi * (word % 2**24) / 2**24)


def test_an_element_is_a_fixed_function_of_stream_and_place() -> None:
    for stream, first in (((0, "w", 1), 0), ((7, "layer.bias", 123), 2**33 + 5)):
        drawn = gluon_normal(stream, first, 200)
        by_hand = torch.tensor([one_by_hand(stream, first + i) for i in range(200)], dtype=torch.float64)
        torch.testing.assert_close(drawn, by_hand, rtol=1e-13, atol=1e-14)


def test_the_moments_and_the_distribution_are_those_of_a_normal() -> None:
    drawn = gluon_normal((0, "w", 1), 0, MANY)
    for power, moment, variance in ((1, 0.0, 1.0), (2, 1.0, 2.0), (3, 0.0, 15.0), (4, 3.0, 96.0)):
        assert abs(drawn.pow(power).mean().item() - moment) < 4 * math.sqrt(variance / MANY), power
    expected = torch.arange(1, MANY + 1, dtype=torch.float64) / MANY
    distance = (torch.special.ndtr(drawn.sort().values) - expected).abs().max().item()
    assert distance < 1.95 / math.sqrt(MANY)  # Kolmogorov and Smirnov, at one in a thousand
    assert 4.4 < drawn.abs().max().item() < 7.5


@pytest.mark.parametrize(
    "other", [(1, "w", 1), (0, "v", 1), (0, "w", 2), (0, "w1", 1)], ids=["seed", "key", "step", "longer key"]
)
def test_other_streams_are_independent(other: tuple[object, ...]) -> None:
    one, two = gluon_normal((0, "w", 1), 0, MANY), gluon_normal(other, 0, MANY)
    for a, b in ((one, two), (one[1:], two[:-1]), (one.square() - 1, two.square() - 1)):
        assert abs((a * b).mean().item()) < 4 * 2 / math.sqrt(MANY)


def test_neighbouring_elements_are_independent() -> None:
    drawn = gluon_normal((0, "w", 1), 0, MANY)
    for lag in (1, 2, 64, 16384):
        assert abs((drawn[lag:] * drawn[:-lag]).mean().item()) < 4 / math.sqrt(MANY - lag)


@pytest.mark.usefixtures("three_threads")
def test_bits_do_not_depend_on_how_a_stream_is_cut() -> None:
    whole = gluon_normal((3, "w", 9), 0, 70_000)
    cuts = [0, 1, 8, 24, 63, 64, 65, 1000, 16_384, 16_392, 50_001, 70_000]
    parts = [gluon_normal((3, "w", 9), a, b - a) for a, b in itertools.pairwise(cuts)]
    assert torch.equal(torch.cat(parts), whole)
    assert gluon_normal((3, "w", 9), 5, 0).shape == (0,)


NAMES = ["a", "bias", "big"]


def plan(dtype: str, servers: int = 1) -> Plan:
    shapes = [(30,), (5,), (20_000,)]
    return make_plan([TensorSpec(n, s, dtype) for n, s in zip(NAMES, shapes, strict=True)], servers)


def run(optimizer: Optimizer, layout: Plan, steps: int, together: bool = True) -> list[Tensor]:
    """Weights per key after updates with a gradient of 0.5, from weights of 1."""
    keys = [torch.ones(spec.numel, dtype=getattr(torch, spec.dtype)) for spec in layout.specs]
    for slice_ in reversed(layout.slices):
        dtype = getattr(torch, slice_.dtype)
        weight, state = torch.zeros(slice_.length, dtype=dtype), empty(slice_)
        for s in slice_.segments:
            weight[s.start : s.start + s.numel] = 1.0
        names = [NAMES[s.key] for s in slice_.segments]
        everyone = [True] * len(names)
        alone = [[i == j for j in range(len(names))] for i in range(len(names))]
        for _ in range(steps):
            for present in [everyone] if together else alone:
                grad = torch.zeros(slice_.length, dtype=torch.promote_types(dtype, torch.float32))
                grad[weight != 0] = 0.5
                hypers = [optimizer.hyper] * len(names)
                update_slice(optimizer, slice_, weight, grad, state, hypers, present, names)
        for s in slice_.segments:
            keys[s.key][s.key_start : s.key_start + s.numel] = weight[s.start : s.start + s.numel]
            weight[s.start : s.start + s.numel] = 0.0
        assert not weight.any()
    return keys


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("master", [True, False], ids=["master", "rounded"])
def test_sgld_moves_every_element_as_in_float64(dtype: str, master: bool) -> None:
    got = run(create("sgld", lr=0.04, wd=0.1, multi_precision=master), plan(dtype), 3)
    for key, weights in zip(NAMES, got, strict=True):
        expected = torch.ones(weights.numel(), dtype=torch.float64)
        for step in (1, 2, 3):
            expected -= 0.02 * (0.5 + 0.1 * expected)
            expected += 0.2 * gluon_normal((0, key, step), 0, expected.numel())
        bound = 3 * torch.finfo(weights.dtype).eps
        torch.testing.assert_close(weights.double(), expected, rtol=bound, atol=bound)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_sgld_has_the_same_bits_on_any_number_of_servers_and_in_any_order(dtype: str) -> None:
    reference = run(create("sgld", lr=0.04), plan(dtype), 2)
    for servers in (1, 2, 3):
        for together in (True, False):
            got = run(create("sgld", lr=0.04), plan(dtype, servers), 2, together)
            assert all(map(torch.equal, got, reference))


def test_sgld_has_the_same_bits_where_a_long_key_is_cut() -> None:
    optimizer, numel, ends = create("sgld", lr=0.04), 80_000, []
    for cuts in ([0, numel], [0, 16, 40_000, numel]):
        parts = []
        for start, end in itertools.pairwise(cuts):
            slice_ = Slice(
                0, "float32", start, end - start, end - start, (Segment(0, 0, start, end - start),), 0
            )
            weight, grad = torch.ones(slice_.length), torch.full((slice_.length,), 0.5)
            update_slice(optimizer, slice_, weight, grad, empty(slice_), [optimizer.hyper], names=["w"])
            parts.append(weight)
        ends.append(torch.cat(parts))
    assert torch.equal(*ends)


def test_sgld_repeats_itself_with_a_seed_and_differs_with_another() -> None:
    one, same, other = (run(create("sgld", lr=0.04, seed=seed), plan("float32"), 1)[2] for seed in (5, 5, 6))
    assert torch.equal(one, same)
    assert (one != other).float().mean() > 0.99


def test_sgld_continues_its_noise_after_begin_num_update() -> None:
    weights = run(create("sgld", lr=0.04, begin_num_update=3), plan("float64"), 1)[0]
    torch.testing.assert_close(weights, 0.99 + 0.2 * gluon_normal((0, "a", 4), 0, 30), rtol=1e-12, atol=0.0)
