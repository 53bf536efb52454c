"""Weights of every dtype move as float64 says, in process and on servers, of whatever kind the optimizer is.

Half precision with a float32 master ends at the rounded weights of float64; without one it follows a float64 run
whose weights are rounded after every step. Weights at the start, gradients and their sums over two workers are exact in
every dtype, bfloat16's eight bits included, so that only the update rounds.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import kvtrainer
from kvstore_server.plan import TensorSpec, make_plan
from kvtrainer.kvstore import DistKVStore
from tests.support.gluon_cases import CASES
from tests.support.gluon_formulas import Numbers, Reference
from tests.support.scalar_training import set_gradients
from tests.support.stores import Servers

RATES = (0.05, 0.02, 0.1, 0.03, 0.08, 0.04)
BATCH = 4.0
WD = 0.05
COMMON: dict[str, Any] = {"clip_gradient": 0.4}
ROWS = {"float16": 400, "bfloat16": 400, "float32": 200, "float64": 100}
"""Rows of 50 of the big parameter of each dtype: as many bytes in all, more than one slice."""
HALF = ("float16", "bfloat16")
LABELS = ("adam", "lamb")
"""Elementwise and whole keys; tests/unit/optimizer plays all in every dtype."""
EXACT = {"float32": 2e-6, "float64": 1e-13}
"""Tolerances, absolute and relative; for half precision float32's, and what its weights round."""
TINY, TIMES = 2e-4, 200

each_label = pytest.mark.parametrize("label", LABELS)
each_precision = pytest.mark.parametrize("has_master", [True, False], ids=["master", "no master"])


def shapes(dtype: str) -> dict[str, tuple[int, int]]:
    """The parameters of a dtype."""
    return {f"{dtype} big": (ROWS[dtype], 50), f"{dtype} small": (7, 3)}


@functools.cache
def start_weight(key: str, shape: tuple[int, int]) -> Numbers:
    """Odd multiples of 1/64 up to 2: none is 0, all are exact in bfloat16."""
    return (2 * np.random.default_rng([*key.encode()]).integers(-64, 64, size=shape) + 1) / 64


@functools.cache
def gradient(key: str, shape: tuple[int, int], step: int, rank: int) -> Numbers:
    """A worker's gradient: multiples of 1/16 up to 2, so that those of two workers add up exactly."""
    return np.random.default_rng([*key.encode(), step + 1, rank]).integers(-32, 33, size=shape) / 16


@functools.cache
def reference(label: str, dtype: str, is_rounded: bool, workers: int) -> dict[str, Numbers]:
    """The weights of a dtype at the end; `is_rounded` rounds them to the dtype after every step."""
    case = CASES[label]
    stored = functools.partial(rounded, dtype=dtype if is_rounded else "float64")
    oracle = Reference(case.name, {**COMMON, **case.options}, stored)
    weights = {key: start_weight(key, shape) for key, shape in shapes(dtype).items()}
    for step, lr in enumerate(RATES):
        for key, weight in weights.items():
            g = sum(gradient(key, weight.shape, step, rank) for rank in range(workers)) / BATCH
            weights[key] = oracle.update(key, weight, g, lr, WD)
    return weights


def rounded(values: Numbers, dtype: str) -> Numbers:
    """The nearest numbers of a dtype, in float64."""
    return torch.from_numpy(np.asarray(values)).to(getattr(torch, dtype)).double().numpy()


def play(label: str, has_master: bool, rank: int, kvstore: Any, in_store: bool | None) -> dict[str, Tensor]:
    """The weights at the end of one run, each in its dtype."""
    parameters: dict[str, Tensor] = {}
    for dtype in ROWS:
        for key, shape in shapes(dtype).items():
            start = torch.from_numpy(start_weight(key, shape))
            parameters[key] = start.to(getattr(torch, dtype)).requires_grad_()
    case = CASES[label]
    options = {**COMMON, **case.options, "wd": WD, "multi_precision": has_master}
    trainer = kvtrainer.Trainer(parameters, case.name, options, kvstore, update_on_kvstore=in_store)
    for step, lr in enumerate(RATES):
        trainer.set_learning_rate(lr)
        grads = {key: gradient(key, tuple(p.shape), step, rank) for key, p in parameters.items()}
        set_gradients(parameters, grads)
        trainer.step(BATCH)
    return {key: parameter.detach().clone() for key, parameter in parameters.items()}


def assert_moved(weights: dict[str, Tensor], label: str, has_master: bool, workers: int) -> None:
    for dtype in ROWS:
        is_half = dtype in HALF
        expected = reference(label, dtype, is_half and not has_master, workers)
        for key, shape in shapes(dtype).items():
            start, result, wanted = start_weight(key, shape), weights[key].double().numpy(), expected[key]
            assert weights[key].dtype == getattr(torch, dtype)
            assert np.abs(wanted - start).mean() > 0.01
            error = np.abs(result - wanted)
            tolerance = EXACT["float32" if is_half else dtype] * (1 + np.abs(wanted))
            if is_half:
                # float32's error may decide where a number between two others goes: with a master once, at the end,
                # else at any step, when the weight may still have been greater.
                among = np.abs(wanted) if has_master else 4 * np.maximum(np.abs(start), np.abs(wanted))
                tolerance += torch.finfo(getattr(torch, dtype)).eps / 2 * among
                assert (result == rounded(wanted, dtype)).mean() > 0.98
            assert (error <= tolerance).all(), (key, float((error / tolerance).max()))


@each_label
@each_precision
@pytest.mark.parametrize("in_store", [True, False])
def test_two_workers_and_two_servers_move_weights_as_float64_does(
    jobs: Servers, label: str, has_master: bool, in_store: bool
) -> None:
    def body(kv: DistKVStore, rank: int) -> dict[str, Tensor]:
        return play(label, has_master, rank, kv, in_store)

    for weights in jobs.results(2, 2, body):
        assert_moved(weights, label, has_master, 2)


@each_label
@each_precision
@pytest.mark.parametrize(("kvstore", "in_store"), [(None, None), ("local", True)])
def test_one_process_moves_weights_as_float64_does(
    label: str, has_master: bool, kvstore: str | None, in_store: bool | None
) -> None:
    assert_moved(play(label, has_master, 0, kvstore, in_store), label, has_master, 1)


@pytest.mark.parametrize("dtype", HALF)
@each_label
def test_a_master_makes_a_difference(label: str, dtype: str) -> None:
    with_master, without = (reference(label, dtype, is_rounded, 2) for is_rounded in (False, True))
    for key in shapes(dtype):
        assert (rounded(with_master[key], dtype) != without[key]).mean() > 0.02


def check_tiny_steps(kvstore: Any, in_store: bool | None, has_master: bool) -> None:
    """Weights of 1.0, one of each half dtype, after TIMES steps of sgd with the gradient TINY and lr 1."""
    weights = {dtype: torch.ones(1, dtype=getattr(torch, dtype), requires_grad=True) for dtype in HALF}
    options = {"learning_rate": 1.0, "multi_precision": has_master}
    trainer = kvtrainer.Trainer(weights, "sgd", options, kvstore, update_on_kvstore=in_store)
    for _ in range(TIMES):
        for weight in weights.values():
            (weight * TINY).sum().backward()  # type: ignore[no-untyped-call]
        trainer.step(1)
    for dtype in HALF:
        expected = 1 - TIMES * float(rounded(np.array(TINY), dtype)) if has_master else 1.0
        tolerance = torch.finfo(getattr(torch, dtype)).eps / 2 + 1e-5
        assert weights[dtype].item() == pytest.approx(expected, abs=tolerance)


@each_precision
def test_two_hundred_tiny_steps_on_a_server_add_up_only_with_a_master(
    jobs: Servers, has_master: bool
) -> None:
    jobs.results(1, 1, lambda kv, _: check_tiny_steps(kv, True, has_master))


@each_precision
@pytest.mark.parametrize(("kvstore", "in_store"), [(None, None), ("local", True)])
def test_two_hundred_tiny_steps_in_one_process_add_up_only_with_a_master(
    kvstore: str | None, in_store: bool | None, has_master: bool
) -> None:
    check_tiny_steps(kvstore, in_store, has_master)


def test_the_big_parameter_of_every_dtype_lies_on_both_servers() -> None:
    specs = [TensorSpec(key, shape, dtype) for dtype in ROWS for key, shape in shapes(dtype).items()]
    specs.sort(key=lambda spec: spec.key)
    plan = make_plan(specs, 2)
    for dtype in ROWS:
        key = [spec.key for spec in specs].index(f"{dtype} big")
        pieces = [piece for piece in plan.slices if piece.segments[0].key == key]
        assert {piece.server for piece in pieces} == {0, 1}, dtype
