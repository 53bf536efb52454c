"""Optimizers on parts of keys and on whole keys: the same bits, however keys are cut, and how updates are counted."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kvstore_server.codec import torch_dtype
from kvstore_server.engine.agreed_options import effective_hypers
from kvstore_server.optimizer import Optimizer, create
from kvstore_server.optimizer.base import StateValue
from kvstore_server.plan import TensorSpec, make_plan
from kvstore_server.shard.reduction import RankContribution, Run, left_out_of_reduction
from kvstore_server.shard.shard import Shard, Unit
from kvtrainer.errors import ProtocolError
from kvtrainer.states.format import export_states
from kvtrainer.sync.exchange import StoreExchange
from tests.support.engines import client_of, filled, plan_of, run_round, views
from tests.support.optimizer_slices import given_to

SHAPES = {"bias": (1, 5), "big": (150, 200), "odd": (7, 13), "second": (40, 300)}
""""big" and "second" have several slices each, the others share a bucket."""
WHOLE = ("lamb", "lans", "lars", "groupadagrad", "rowadam")
STEPS = 4


def normal(step: int, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {key: torch.randn(shape, generator=generator).to(dtype) for key, shape in SHAPES.items()}


def weights_after(
    optimizer: Optimizer, num_servers: int, dtype: str = "float32", absent: Sequence[frozenset[int]] = ()
) -> list[Tensor]:
    """The keys after `STEPS` rounds of random gradients; `absent` says what is left out of the first rounds."""
    kind = getattr(torch, dtype)
    plan = plan_of(SHAPES, dtype)
    exchange = StoreExchange(client_of(num_servers), plan, optimizer)
    weights = filled(plan, normal(0, kind))
    exchange.init(weights)
    for step in range(1, STEPS + 1):
        left_out = absent[step - 1] if step <= len(absent) else frozenset()
        run_round(exchange, filled(plan, normal(step, kind)), weights, 0.5, left_out)
    return views(plan, weights)


def alone(optimizer: Optimizer, steps: Sequence[int]) -> list[Tensor]:
    """The same by one call of the optimizer for each key, without any store."""
    weights = normal(0)
    for key, weight in weights.items():
        state: dict[str, StateValue] = optimizer.create_state(weight)
        for number, step in enumerate(steps, 1):
            optimizer.update(
                weight, normal(step)[key] * 0.5, state, {**optimizer.hyper, "step": number, "key": key}
            )
    return list(weights.values())


def assert_same(got: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    for one, other, key in zip(got, expected, SHAPES, strict=True):
        assert torch.equal(one, other), key


def test_the_biggest_keys_have_several_slices_and_lie_on_one_server_each() -> None:
    client = client_of(3)
    [table] = client.register({"t": plan_of(SHAPES).specs}, whole_keys=True)
    slices = {key: table.plan.slices_with(key) for key in (1, 3)}
    assert all(len(of_key) >= 3 for of_key in slices.values())
    assert all(len({slice_.server for slice_ in of_key}) == 1 for of_key in slices.values())
    assert set(table.plan.servers) == {0, 1, 2}


@pytest.mark.parametrize("name", WHOLE)
@pytest.mark.parametrize("num_servers", [1, 2, 3])
def test_every_number_of_servers_gives_the_bits_of_the_optimizer_on_whole_keys(
    name: str, num_servers: int
) -> None:
    optimizer = create(name, learning_rate=0.1)
    assert_same(weights_after(optimizer, num_servers), alone(optimizer, range(1, STEPS + 1)))


@pytest.mark.parametrize("num_servers", [1, 3])
def test_a_key_that_is_left_out_keeps_its_weights_and_its_step_count(num_servers: int) -> None:
    optimizer = create("lamb", learning_rate=0.1)
    got = weights_after(optimizer, num_servers, absent=[frozenset({1}), frozenset(), frozenset({0, 1})])
    for key, steps in enumerate([(1, 2, 4), (2, 4), (1, 2, 3, 4), (1, 2, 3, 4)]):
        assert torch.equal(got[key], alone(optimizer, steps)[key]), key


def test_a_state_of_another_shape_is_refused_and_changes_nothing() -> None:
    optimizer = create("lamb", learning_rate=0.1, multi_precision=True)
    plan = plan_of(SHAPES, "float16")
    exchange = StoreExchange(client_of(2), plan, optimizer)
    weights = filled(plan, normal(0, torch.float16))
    exchange.init(weights)
    run_round(exchange, filled(plan, normal(1, torch.float16)), weights, 0.5)
    bucket, other = plan.slices_with(2)[0], plan.slices_with(1)[0]
    with pytest.raises(ProtocolError):
        exchange.put_state(bucket, *exchange.get_states([other], [0]))
    assert export_states(plan, exchange)[2]["exp_avg"].shape == (7, 13)


PART_SHAPES = [(0, 3), (5_000,), (3,), (0,), (70_001,), (9, 31), (40_000,), (0,)]
STEP = 4096


def make_shard(dtype: str) -> tuple[Shard, Unit]:
    shard = Shard()
    unit = shard.add(
        make_plan([TensorSpec(str(at), shape, dtype) for at, shape in enumerate(PART_SHAPES)], 1)
    )
    gen = torch.Generator().manual_seed(1)
    values = {p.index: torch.randn(p.used, generator=gen).to(torch_dtype(dtype)) for p in unit.slices}
    shard.assign_sum([given_to(shard, values)])
    return shard, unit


def gradients(unit: Unit, seed: int) -> list[dict[int, torch.Tensor]]:
    """What each of two ranks gives to the slots, with zeros as padding."""
    gen, found = torch.Generator().manual_seed(seed), []
    for _ in range(2):
        found.append({})
        for slot, slice_ in enumerate(unit.slices):
            values = torch.zeros(slice_.length)
            for segment in slice_.segments:
                values[segment.start : segment.start + segment.numel] = torch.randn(
                    segment.numel, generator=gen
                )
            found[-1][slot] = values.to(torch_dtype(slice_.dtype))
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
    (whole, unit), (parted, other) = make_shard(dtype), make_shard(dtype)
    hypers = [effective_hypers(unit.plan, one, {}) for one in optimizers]
    for round_ in range(3):
        grads = gradients(unit, round_)
        scale = [0.5, 0.5 + 0.25 * (round_ == 2)]
        whole.update(
            [
                RankContribution([Run(s, s + 1, v) for s, v in one.items()], f)
                for one, f in zip(grads, scale, strict=True)
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
                    for one, f in zip(grads, scale, strict=True)
                ]
                parted.update_part(some, optimizers[1], hypers[1], other, slot, begin, end)
        parted.count([other])
        for slot, slice_ in enumerate(unit.slices):
            assert torch.equal(whole.storage.padded[slot], parted.storage.padded[slot])
            mine, theirs = whole.get_state(unit, slice_.index), parted.get_state(other, slice_.index)
            assert mine.steps.tolist() == theirs.steps.tolist() == [round_ + 1] * len(slice_.segments)
            assert mine.tensors.keys() == theirs.tensors.keys()
            assert all(torch.equal(values, theirs.tensors[key]) for key, values in mine.tensors.items())


KEYS = 5
COUNTED = make_plan([TensorSpec(str(key), (4000,), "float32") for key in range(KEYS)], 2)


def contribution_to(shard: Shard, absent: frozenset[int]) -> RankContribution:
    unit = shard.units[-1]
    here = [p for p in unit.slices if any(s.key not in absent for s in p.segments)]
    return given_to(shard, {p.index: torch.ones(p.used) for p in here}, absent=absent)


@pytest.mark.parametrize("server", [0, 1])
@given(rounds=st.lists(st.frozensets(st.integers(0, KEYS - 1)), min_size=1, max_size=20))
def test_the_count_is_that_of_the_key_with_most_updates_on_any_server(
    server: int, rounds: list[frozenset[int]]
) -> None:
    """Each round leaves some keys out."""
    shard, optimizer = Shard(), create("test")
    shard.add(COUNTED, 0)
    unit, every = shard.add(COUNTED, server), [0] * KEYS
    for left_out in rounds:
        every = [n + (key not in left_out) for key, n in enumerate(every)]
        contributions = [contribution_to(shard, left_out)]
        assert shard.updates_after(unit, contributions) == max(every)
        shard.update(contributions, optimizer, [[optimizer.hyper] * KEYS], [unit])


def test_only_what_no_contribution_has_is_left_out() -> None:
    contributions = [RankContribution([], 1.0, frozenset(absent)) for absent in ({0, 2}, {2, 3}, set[int]())]
    assert left_out_of_reduction(contributions[:2]) == {2}
    assert left_out_of_reduction(contributions) == frozenset()
