"""Sums of half precision accumulate in float32, in every store and wherever the update runs.

A number n whose neighbour is n + 2, and 1 twice: n + 1 rounds back to n, so half precision would add up to n, and
float32 adds up to n + 2, which half precision holds.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import kvtrainer
from kvstore_server.plan import TensorSpec, make_plan
from kvtrainer.kvstore import DistKVStore
from tests.support.stores import Servers

LARGE = {torch.float16: 2048.0, torch.bfloat16: 256.0}
"""The number n of each dtype."""
SHAPES = {"sliced": (300, 101), "small": (7,)}
DTYPES = pytest.mark.parametrize("dtype", LARGE, ids=str)


def addends(dtype: torch.dtype) -> list[float]:
    """What the three workers, or the three replicas of one, give."""
    return [LARGE[dtype], 1.0, 1.0]


def full(dtype: torch.dtype, value: float) -> list[Tensor]:
    return [torch.full(shape, value, dtype=dtype) for shape in SHAPES.values()]


def seen(tensors: list[Tensor]) -> list[float]:
    """The one value of all elements, or all values that there are."""
    return sorted({value for tensor in tensors for value in tensor.detach().unique().tolist()})  # type: ignore[no-untyped-call]


def verbs(kv: Any, dtype: torch.dtype, values: list[float]) -> dict[str, list[float]]:
    """The sums after push and pull and after pushpull, and n minus the sum as an optimizer on the store has it."""
    keys, outs, given = (
        list(SHAPES),
        full(dtype, 0.0),
        list(zip(*(full(dtype, v) for v in values), strict=True)),
    )
    found = {}
    kv.init(keys, full(dtype, LARGE[dtype]))
    kv.push(keys, [list(one) for one in given])
    kv.pull(keys, out=outs)
    found["pushed"] = seen(outs)
    kv.pushpull(keys, [list(one) for one in given], out=outs)
    found["pushpulled"] = seen(outs)
    weights = [f"{key} weight" for key in keys]
    kv.init(weights, full(dtype, LARGE[dtype]))
    kv.set_optimizer(kvtrainer.optimizer.create("sgd", learning_rate=1.0, multi_precision=True))
    kv.pushpull(weights, [list(one) for one in given], out=outs)
    found["updated"] = seen(outs)
    return found


def in_float32(dtype: torch.dtype) -> dict[str, list[float]]:
    return {"pushed": [LARGE[dtype] + 2], "pushpulled": [LARGE[dtype] + 2], "updated": [-2.0]}


@DTYPES
def test_half_precision_would_lose_both_small_addends(dtype: torch.dtype) -> None:
    large, one, other = (torch.tensor(value, dtype=dtype) for value in addends(dtype))
    assert (large + one) + other == large
    assert torch.tensor(LARGE[dtype] + 2).to(dtype) == LARGE[dtype] + 2


@DTYPES
@pytest.mark.parametrize("given_by", ["workers", "replicas"])
def test_servers_sum_in_float32(jobs: Servers, dtype: torch.dtype, given_by: str) -> None:
    def body(kv: DistKVStore, rank: int) -> dict[str, list[float]]:
        own = [addends(dtype)[rank]]
        return verbs(kv, dtype, own if given_by == "workers" else addends(dtype) if rank == 0 else [0.0])

    assert jobs.results(3, 2, body) == [in_float32(dtype)] * 3


@DTYPES
@pytest.mark.parametrize("kvstore", ["local", "device"])
def test_stores_of_one_process_sum_replicas_in_float32(kvstore: str, dtype: torch.dtype) -> None:
    assert verbs(kvtrainer.kvstore.create(kvstore), dtype, addends(dtype)) == in_float32(dtype)


@DTYPES
@pytest.mark.parametrize("in_store", [True, False])
def test_a_trainers_step_sums_in_float32_at_either_site_of_the_update(
    jobs: Servers, dtype: torch.dtype, in_store: bool
) -> None:
    def body(kv: DistKVStore, rank: int) -> list[float]:
        parameters = [one.requires_grad_() for one in full(dtype, LARGE[dtype])]
        options = {"learning_rate": 1.0, "multi_precision": True}
        trainer = kvtrainer.Trainer(parameters, "sgd", options, kvstore=kv, update_on_kvstore=in_store)
        for parameter in parameters:
            (addends(dtype)[rank] * parameter).sum().backward()  # type: ignore[no-untyped-call]
        trainer.step(1)
        return seen(parameters)

    assert jobs.results(3, 2, body) == [[-2.0]] * 3


@DTYPES
def test_the_big_key_lies_on_both_servers(dtype: torch.dtype) -> None:
    plan = make_plan([TensorSpec("sliced", SHAPES["sliced"], str(dtype).removeprefix("torch."))], 2)
    assert {piece.server for piece in plan.slices} == {0, 1}
