"""Weights of every dtype move as float64 says, in process and on servers, of whatever kind the optimizer is.

Half precision with a float32 master ends at the rounded weights of float64; without one it follows a float64 run
whose weights are rounded after every step.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import kvtrainer
from kvstore_server.plan import TensorSpec, make_plan
from kvtrainer.kvstore import KVStoreBase
from kvtrainer.kvstore.verbs import TableKVStore
from tests.support.dtype_runs import (
    BATCH,
    COMMON,
    HALF,
    LABELS,
    OPTIMIZERS,
    RATES,
    ROWS,
    decay_of,
    gradient,
    reference,
    rounded,
    sgld_moments,
    shapes,
    start_weight,
)
from tests.support.jobs import Job, PartOfJob, Results
from tests.support.scalar_training import set_gradients

TINY, TIMES = 2e-4, 200


def run(rank: int, workers: int) -> Results:
    results: dict[str, Any] = {}
    for has_master in (True, False):
        if workers == 1:
            results[f"tiny {has_master}"] = tiny_steps("dist_sync", True, has_master)
            continue
        for label in OPTIMIZERS:
            for in_store in sites(has_master):
                name = name_of(label, has_master, in_store)
                results[name] = play(label, has_master, rank, "dist_sync", in_store)
    return results


def sites(has_master: bool) -> tuple[bool, ...]:
    """The values of update_on_kvstore that are played."""
    return (True, False) if has_master else (True,)


def name_of(label: str, has_master: bool, in_store: bool) -> str:
    """Under which name a run's weights are delivered."""
    return f"{label}, multi_precision {has_master}, {in_store}"


def play(
    label: str, has_master: bool, rank: int, kvstore: str | KVStoreBase | None, in_store: bool | None
) -> dict[str, Tensor]:
    """The weights at the end of one run, each in its dtype."""
    parameters: dict[str, Tensor] = {}
    for dtype in ROWS:
        for key, shape in shapes(dtype).items():
            start = torch.from_numpy(start_weight(key, shape))
            parameters[key] = start.to(getattr(torch, dtype)).requires_grad_()
    case = OPTIMIZERS[label]
    options = {**COMMON, **case.options, "wd": decay_of(case.name), "multi_precision": has_master}
    with kvtrainer.Trainer(
        parameters, case.name, options, kvstore=kvstore, update_on_kvstore=in_store
    ) as trainer:
        for step, lr in enumerate(RATES):
            trainer.set_learning_rate(lr)
            grads = {key: gradient(key, tuple(p.shape), step, rank) for key, p in parameters.items()}
            set_gradients(parameters, grads)
            trainer.step(BATCH)
    return {key: parameter.detach().clone() for key, parameter in parameters.items()}


def tiny_steps(
    kvstore: str | KVStoreBase | None, in_store: bool | None, has_master: bool
) -> dict[str, float]:
    """Weights of 1.0, one of each half dtype, after TIMES steps of sgd with the gradient TINY and lr 1."""
    weights = {dtype: torch.ones(1, dtype=getattr(torch, dtype), requires_grad=True) for dtype in HALF}
    options = {"learning_rate": 1.0, "multi_precision": has_master}
    with kvtrainer.Trainer(weights, "sgd", options, kvstore=kvstore, update_on_kvstore=in_store) as trainer:
        for _ in range(TIMES):
            for weight in weights.values():
                (weight * TINY).sum().backward()  # type: ignore[no-untyped-call]
            trainer.step(1)
    return {dtype: weight.item() for dtype, weight in weights.items()}


EXACT = {"float32": 2e-6, "float64": 1e-13}
"""Tolerances, absolute and relative; for half precision float32's, and what its weights round."""

Weights = dict[str, Tensor]
each_dtype = pytest.mark.parametrize("dtype", ROWS)
each_label = pytest.mark.parametrize("label", LABELS)
each_precision = pytest.mark.parametrize("has_master", [True, False], ids=["master", "no master"])


@pytest.fixture(scope="module")
def job(part_of_job: PartOfJob) -> Job:
    return part_of_job("dtypes", 2, 2)


@pytest.fixture(scope="module")
def alone() -> dict[tuple[str, bool], list[Weights]]:
    """What one process ends with, by case and multi_precision: without a store, and in the engine of 'local'."""
    return {
        (label, has_master): [play(label, has_master, 0, *store) for store in ((None, None), ("local", True))]
        for label in OPTIMIZERS
        for has_master in (True, False)
    }


def assert_moved(weights: Weights, label: str, dtype: str, has_master: bool, workers: int) -> None:
    is_half = dtype in HALF
    expected = reference(label, dtype, is_half and not has_master, workers)
    for key, shape in shapes(dtype).items():
        start, result, wanted = start_weight(key, shape), weights[key].double().numpy(), expected[key]
        assert weights[key].dtype == getattr(torch, dtype)
        assert np.abs(wanted - start).mean() > 0.01
        error = np.abs(result - wanted)
        tolerance = EXACT["float32" if is_half else dtype] * (1 + np.abs(wanted))
        if is_half:
            # float32's error may decide where a number between two others goes: with a master once, at the end, else
            # at any step, when the weight may still have been greater.
            among = np.abs(wanted) if has_master else 4 * np.maximum(np.abs(start), np.abs(wanted))
            tolerance += torch.finfo(getattr(torch, dtype)).eps / 2 * among
            assert (result == rounded(wanted, dtype)).mean() > 0.98
        assert (error <= tolerance).all(), float((error / tolerance).max())


@each_dtype
@each_label
@each_precision
def test_two_workers_and_two_servers_move_weights_as_float64_does(
    job: Job, label: str, dtype: str, has_master: bool
) -> None:
    for in_store in sites(has_master):
        for weights in job[name_of(label, has_master, in_store)]:
            assert_moved(weights, label, dtype, has_master, job.workers)


@each_dtype
@each_label
@each_precision
def test_one_process_moves_weights_as_float64_does(
    alone: dict[tuple[str, bool], list[Weights]], label: str, dtype: str, has_master: bool
) -> None:
    for weights in alone[label, has_master]:
        assert_moved(weights, label, dtype, has_master, 1)


@each_dtype
@each_precision
def test_sglds_noise_has_the_mean_and_the_variance_of_its_formula(
    job: Job, alone: dict[tuple[str, bool], list[Weights]], dtype: str, has_master: bool
) -> None:
    [key, _] = shapes(dtype)
    for workers, runs in ((1, alone["sgld", has_master]), (2, job[name_of("sgld", has_master, True)])):
        mean, variance = sgld_moments(dtype, workers)[key]
        for weights in runs:
            noise = (weights[key].double().numpy() - mean) / np.sqrt(variance)
            assert abs(noise.mean()) < 4 / np.sqrt(noise.size)
            assert abs(noise.var() - 1) < 4 * np.sqrt(2 / noise.size)


@pytest.mark.parametrize("dtype", HALF)
@each_label
def test_a_master_makes_a_difference(label: str, dtype: str) -> None:
    with_master, without = (reference(label, dtype, is_rounded, 2) for is_rounded in (False, True))
    for key in shapes(dtype):
        assert (rounded(with_master[key], dtype) != without[key]).mean() > 0.02


def assert_tiny_steps_add_up_only_with_a_master(seen: dict[str, float], has_master: bool) -> None:
    for dtype in HALF:
        gradient = float(rounded(np.array(TINY), dtype))
        expected = 1 - TIMES * gradient if has_master else 1.0
        assert seen[dtype] == pytest.approx(expected, abs=torch.finfo(getattr(torch, dtype)).eps / 2 + 1e-5)


@each_precision
def test_two_hundred_tiny_steps_on_a_server_add_up_only_with_a_master(
    part_of_job: PartOfJob, has_master: bool
) -> None:
    [seen] = part_of_job("dtypes", 1, 1)[f"tiny {has_master}"]
    assert_tiny_steps_add_up_only_with_a_master(seen, has_master)


@each_precision
@pytest.mark.parametrize(("kvstore", "in_store"), [(None, None), ("local", True)])
def test_two_hundred_tiny_steps_in_one_process_add_up_only_with_a_master(
    kvstore: str | None, in_store: bool | None, has_master: bool
) -> None:
    assert_tiny_steps_add_up_only_with_a_master(tiny_steps(kvstore, in_store, has_master), has_master)


def test_a_thousand_tiny_pushes_to_a_local_store_give_mxnets_numbers() -> None:
    for has_master, expected in ((True, 0.8), (False, 1.0)):
        kv = kvtrainer.kvstore.create("local")
        assert isinstance(kv, TableKVStore)
        kv.init("w", torch.ones(2, dtype=torch.float16))
        kv.set_optimizer(kvtrainer.optimizer.create("sgd", learning_rate=1.0, multi_precision=has_master))
        for _ in range(1000):
            kv.push("w", torch.full((2,), 2e-4, dtype=torch.float16))
        out = torch.empty(2, dtype=torch.float16)
        kv.pull("w", out=out)
        assert out.tolist() == pytest.approx([expected, expected], abs=5e-4 * has_master)


def test_the_big_parameter_of_every_dtype_lies_on_both_servers() -> None:
    specs = [TensorSpec(key, shape, dtype) for dtype in ROWS for key, shape in shapes(dtype).items()]
    specs.sort(key=lambda spec: spec.key)
    plan = make_plan(specs, 2)
    for dtype in ROWS:
        key = [spec.key for spec in specs].index(f"{dtype} big")
        pieces = [piece for piece in plan.slices if piece.segments[0].key == key]
        assert {piece.server for piece in pieces} == {0, 1}, dtype
