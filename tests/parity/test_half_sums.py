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
from kvtrainer.kvstore import KVStoreBase
from kvtrainer.kvstore.verbs import TableKVStore
from tests.support.jobs import Job, PartOfJob, Results

LARGE = {"float16": 2048.0, "bfloat16": 256.0}
"""The number n of each dtype."""
SHAPES = {"sliced": (300, 101), "small": (7,)}
SITES = (True, False)
"""Of update_on_kvstore."""

Range = tuple[float, float]


def run(rank: int, workers: int) -> Results:
    results: dict[str, Any] = {}
    for dtype in LARGE:
        shares = addends(dtype)
        for name, given in (("workers", shares[rank]), ("replicas", shares if rank == 0 else [0.0])):
            kv = kvtrainer.kvstore.create("dist_sync")
            values = given if isinstance(given, list) else [given]
            results[f"{dtype} verbs, {name}"] = verbs(kv, dtype, values)
        for in_store in SITES:
            results[f"{dtype} trainer {in_store}"] = trainer(dtype, shares[rank], in_store)
    return results


def addends(dtype: str) -> list[float]:
    """What the three workers, or the three replicas of one, give."""
    return [LARGE[dtype], 1.0, 1.0]


def verbs(kv: KVStoreBase, dtype: str, values: list[float]) -> dict[str, list[Range]]:
    """The sums after push and pull and after pushpull, and n minus the sum as an optimizer on the store has it."""
    assert isinstance(kv, TableKVStore)
    seen: dict[str, list[Range]] = {"pushed": [], "pushpulled": [], "updated": []}
    with kv:
        for key, shape in SHAPES.items():
            kv.init(key, _full(shape, dtype, LARGE[dtype]))
            kv.push(key, [_full(shape, dtype, value) for value in values])
            seen["pushed"].append(_pulled(kv, key, shape, dtype))
            out = torch.empty(shape, dtype=getattr(torch, dtype))
            kv.pushpull(key, [_full(shape, dtype, value) for value in values], out=out)
            seen["pushpulled"].append(_range(out))
        for key, shape in SHAPES.items():
            kv.init(f"{key} weight", _full(shape, dtype, LARGE[dtype]))
        kv.set_optimizer(kvtrainer.optimizer.create("sgd", learning_rate=1.0, multi_precision=True))
        for key, shape in SHAPES.items():
            kv.push(f"{key} weight", [_full(shape, dtype, value) for value in values])
            seen["updated"].append(_pulled(kv, f"{key} weight", shape, dtype))
    return seen


def trainer(dtype: str, slope: float, in_store: bool) -> list[Range]:
    """n minus the sum of all workers' slopes, by a step of the Trainer."""
    parameters = {key: _full(shape, dtype, LARGE[dtype]).requires_grad_() for key, shape in SHAPES.items()}
    options = {"learning_rate": 1.0, "multi_precision": True}
    with kvtrainer.Trainer(
        parameters, "sgd", options, kvstore="dist_sync", update_on_kvstore=in_store
    ) as trainer:
        for parameter in parameters.values():
            (slope * parameter).sum().backward()  # type: ignore[no-untyped-call]
        trainer.step(1)
    return [_range(parameters[key]) for key in SHAPES]


def _full(shape: tuple[int, ...], dtype: str, value: float) -> Tensor:
    return torch.full(shape, value, dtype=getattr(torch, dtype))


def _pulled(kv: TableKVStore, key: str, shape: tuple[int, ...], dtype: str) -> Range:
    out = torch.empty(shape, dtype=getattr(torch, dtype))
    kv.pull(key, out=out)
    return _range(out)


def _range(tensor: Tensor) -> Range:
    least, greatest = tensor.detach().float().aminmax()
    return float(least), float(greatest)


each_dtype = pytest.mark.parametrize("dtype", LARGE)


@pytest.fixture(scope="module")
def job(part_of_job: PartOfJob) -> Job:
    return part_of_job("half_sums", 3, 2)


def in_all_keys(value: float) -> list[tuple[float, float]]:
    return [(value, value)] * len(SHAPES)


def assert_summed_in_float32(seen: dict[str, list[tuple[float, float]]], dtype: str) -> None:
    total = in_all_keys(LARGE[dtype] + 2)
    assert seen == {"pushed": total, "pushpulled": total, "updated": in_all_keys(-2.0)}


@each_dtype
def test_half_precision_would_lose_both_small_addends(dtype: str) -> None:
    large, one, other = (torch.tensor(value, dtype=getattr(torch, dtype)) for value in addends(dtype))
    assert (large + one) + other == large
    assert torch.tensor(LARGE[dtype] + 2).to(large.dtype) == LARGE[dtype] + 2


@each_dtype
@pytest.mark.parametrize("given_by", ["workers", "replicas"])
def test_servers_sum_in_float32(job: Job, dtype: str, given_by: str) -> None:
    for seen in job[f"{dtype} verbs, {given_by}"]:
        assert_summed_in_float32(seen, dtype)


@each_dtype
@pytest.mark.parametrize("kvstore", ["local", "device"])
def test_stores_of_one_process_sum_replicas_in_float32(kvstore: str, dtype: str) -> None:
    assert_summed_in_float32(verbs(kvtrainer.kvstore.create(kvstore), dtype, addends(dtype)), dtype)


@each_dtype
@pytest.mark.parametrize("in_store", SITES)
def test_a_trainers_step_sums_in_float32_at_either_site_of_the_update(
    job: Job, dtype: str, in_store: bool
) -> None:
    for seen in job[f"{dtype} trainer {in_store}"]:
        assert seen == in_all_keys(-2.0)


@each_dtype
def test_the_big_key_lies_on_both_servers(dtype: str) -> None:
    plan = make_plan([TensorSpec("sliced", SHAPES["sliced"], dtype)], 2)
    assert {piece.server for piece in plan.slices} == {0, 1}
