"""Sums of half precision accumulate in float32, in every store and wherever the update runs.

The numbers, and why they tell, are in tests/support/workers/half_sums.py.
"""

from __future__ import annotations

import pytest
import torch

import kvtrainer
from kvstore_server.plan import TensorSpec, make_plan
from tests.support.jobs import Job, PartOfJob
from tests.support.workers.half_sums import LARGE, SHAPES, SITES, addends, verbs

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
