"""Rounds that a worker vetoes, and rounds that replace the weights, on real servers at both sites of the update."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from kvstore_server.codec import make_codec
from kvstore_server.optimizer import create
from kvtrainer.errors import PlanMismatchError
from kvtrainer.kvstore import DistKVStore
from kvtrainer.sync.servers import StoreExchange
from tests.support.engines import filled, plan_of, step
from tests.support.stores import Servers, servers

SHAPES = {"small": (3,), "sliced": (150, 200)}
PLAN = plan_of(SHAPES)
SITES = pytest.mark.parametrize("in_store", [True, False])


@pytest.fixture(scope="module")
def jobs() -> Iterator[Servers]:
    with servers() as started:
        yield started


def constant(value: float, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    plan = plan_of(SHAPES, str(dtype).removeprefix("torch."))
    return filled(plan, {spec.key: torch.full(spec.shape, value, dtype=dtype) for spec in plan.specs})


def distinct(arenas: dict[str, Tensor]) -> list[float]:
    """The distinct numbers in the arenas, padding aside, which is zero; no test here has zeros of its own."""
    return sorted({value for flat in arenas.values() for value in flat.unique().tolist()} - {0.0})


def exchange_of(kv: DistKVStore, in_store: bool, **options: Any) -> StoreExchange:
    optimizer = create("sgd", learning_rate=1.0, momentum=0.5) if in_store else None
    exchange = StoreExchange(kv.open_client(), PLAN, optimizer, **options)
    exchange.init(constant(10.0))
    return exchange


@SITES
@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_veto_of_one_worker_skips_the_round_for_all(jobs: Servers, count: int, in_store: bool) -> None:
    def body(kv: DistKVStore, rank: int) -> list[Any]:
        exchange = exchange_of(kv, in_store)
        seen: list[Any] = []
        for vetoing in (None, 1, 2, None):
            grads, weights = constant(1.0 + rank), constant(-1.0)
            outcome = step(exchange, grads, weights, veto=rank == vetoing)
            seen.append((outcome.skipped, distinct(weights if in_store else grads)))
        return seen

    for rank, seen in enumerate(jobs.results(3, count, body)):
        # Descent by 6, and by 6 + 3 in the next round that counts; a skipped one writes nothing.
        values = [4.0, -5.0] if in_store else [6.0, 6.0]
        before = -1.0 if in_store else 1.0 + rank
        skipped = (True, [before])
        assert seen == [(False, [values[0]]), skipped, skipped, (False, [values[1]])]


def test_a_vetoed_round_moves_no_residual(jobs: Servers) -> None:
    def body(kv: DistKVStore, rank: int) -> list[Any]:
        exchange = exchange_of(kv, False, codec=make_codec({"type": "2bit"}))
        seen: list[Any] = []
        for value, vetoing in ((0.3, None), (0.3, 1), (0.2, None), (0.75, None)):
            grads = constant(float("nan") if rank == vetoing else value)
            step(exchange, grads, grads, veto=rank == vetoing)
            kept = exchange.residuals()
            seen.append([round(kept[key].unique().item(), 3) for key in range(2)])
        return seen

    assert jobs.results(2, 2, body) == [[[0.3] * 2, [0.3] * 2, [0.0] * 2, [0.25] * 2]] * 2


@SITES
@pytest.mark.parametrize("count", [1, 3])
def test_rank_0s_values_replace_everybodys_weights_and_the_state_stays(
    jobs: Servers, count: int, in_store: bool
) -> None:
    def body(kv: DistKVStore, rank: int) -> list[list[float]]:
        exchange = exchange_of(kv, in_store)
        grads, weights = constant(1.0), constant(10.0)
        step(exchange, grads, weights)
        replaced = constant(100.0 + rank)
        exchange.assign(replaced)
        seen = [distinct(replaced)]
        grads, weights = constant(1.0), constant(-1.0)
        step(exchange, grads, weights)
        return [*seen, distinct(weights if in_store else grads)]

    # The buffer is 2 after the first round, and 1 + 2 after the second.
    assert jobs.results(2, count, body) == [[[100.0], [97.0] if in_store else [2.0]]] * 2


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_masters_of_half_precision_follow_replaced_weights(jobs: Servers, dtype: torch.dtype) -> None:
    name = str(dtype).removeprefix("torch.")

    def body(kv: DistKVStore, rank: int) -> list[float]:
        optimizer = create("sgd", learning_rate=2.0**-14, multi_precision=True)
        exchange = StoreExchange(kv.open_client(), plan_of(SHAPES, name), optimizer)
        weights = constant(10.0, dtype)
        exchange.init(weights)
        step(exchange, constant(1.0, dtype), weights)
        weights = constant(1.0 + rank, dtype)
        exchange.assign(weights)
        for _ in range(64):  # each step is far below the resolution at 1
            step(exchange, constant(0.5, dtype), weights)
        return distinct(weights)

    assert jobs.results(2, 2, body) == [[1.0 - 2.0**-8]] * 2


@SITES
def test_a_worker_that_updates_while_others_replace_weights_fails_the_round_for_all(
    jobs: Servers, in_store: bool
) -> None:
    def body(kv: DistKVStore, rank: int) -> list[Any]:
        exchange = exchange_of(kv, in_store)
        weights, grads = constant(-1.0), constant(1.0)
        mine = [lambda: exchange.assign(weights), lambda: step(exchange, grads, weights)][rank]
        with pytest.raises(PlanMismatchError, match=r"rank 1.*'parameters'.*set_data.*add_param_group"):
            mine()
        step(exchange, grads, weights)
        return distinct(weights if in_store else grads)

    assert jobs.results(2, 2, body) == [[8.0] if in_store else [2.0]] * 2
