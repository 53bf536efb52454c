"""Optimizers that need whole keys: the same bits for any number of servers, undone and carried over key by key."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from kvstore_server.optimizer import Optimizer, create
from kvstore_server.optimizer.base import StateValue
from kvtrainer.errors import ProtocolError
from kvtrainer.states.format import export_states
from kvtrainer.sync.exchange import StoreExchange
from tests.support.engines import client_of, filled, plan_of, run_round, views

SHAPES = {"bias": (1, 5), "big": (150, 200), "odd": (7, 13), "second": (40, 300)}
""""big" and "second" have several slices each, the others share a bucket."""
WHOLE = ("lamb", "lans", "lars", "groupadagrad")
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
    pieces = {key: table.plan.slices_with(key) for key in (1, 3)}
    assert all(len(of_key) >= 3 for of_key in pieces.values())
    assert all(len({piece.server for piece in of_key}) == 1 for of_key in pieces.values())
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
        exchange.put_state(bucket, exchange.get_state(other))
    assert export_states(plan, exchange)[2]["exp_avg"].shape == (7, 13)
