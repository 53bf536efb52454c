"""Every optimizer of Gluon follows its float64 formula while rates, batch sizes and multipliers change, on any store.

The bits do not depend on the number of servers nor on where the update runs, SGLD's noise included. Every worker has
gradients, and divides them by batch sizes, of its own; the problem is the same for all.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import kvtrainer
from kvstore_server.optimizer import gluon, layerwise
from kvstore_server.plan import Slice, TensorSpec, make_plan
from kvtrainer.kvstore import DistKVStore, KVStoreBase
from tests.support.gluon_cases import CASES, Case
from tests.support.gluon_formulas import Numbers, Reference
from tests.support.scalar_training import set_gradients
from tests.support.stores import Servers

STEPS = 12
SHAPES = {
    "sliced_weight": (131, 107),
    "body_weight": (80, 60),
    "tall_weight": (61, 2),
    "norm_gamma": (1, 37),
    "single": (1, 1),
}
"""Matrices all, for GroupAdaGrad; LARS treats the gamma differently, for its name."""
WD = 0.05
COMMON: dict[str, Any] = {"rescale_grad": 0.5, "clip_gradient": 0.4}

RATES = (0.05, 0.02, 0.1, 0.3, 0.08, 0.01, 0.2, 0.04, 0.07, 0.15, 0.03, 0.06)
BATCHES = (4.0, 3.0, 8.0, 1.0, 5.0)
MULTIPLIERS: dict[int, dict[str, dict[str, float]]] = {
    0: {"lr_mult": {"body_weight": 0.5, "norm_gamma": 2.0}, "wd_mult": {"sliced_weight": 3.0}},
    4: {"lr_mult": {"sliced_weight": 1.5}, "wd_mult": {"body_weight": 0.0, "single": 4.0}},
    8: {"lr_mult": {"body_weight": 1.0, "tall_weight": 0.3}, "wd_mult": {"sliced_weight": 0.5}},
}
"""From which step on which key has which multiplier; others have 1."""

CHANGES = frozenset(["learning rate", "batch sizes", "multipliers"])
"""What changes from step to step."""
OPTIMIZERS = {**CASES, "sgld": Case("sgld", {"seed": 3})}


def rate(step: int, changes: frozenset[str] = CHANGES) -> float:
    """The learning rate of a step."""
    return RATES[step if "learning rate" in changes else 0]


def batch_size(step: int, rank: int, changes: frozenset[str] = CHANGES) -> float:
    """What a worker passes to a step."""
    return BATCHES[(step + 2 * rank) % len(BATCHES) if "batch sizes" in changes else 0]


def multipliers(step: int, changes: frozenset[str] = CHANGES) -> dict[str, dict[str, float]]:
    """The multipliers that change before a step: by attribute and key."""
    return MULTIPLIERS.get(step, {}) if "multipliers" in changes else {}


def options_of(label: str) -> dict[str, Any]:
    """A case's options for a Trainer, but for the learning rate."""
    case = OPTIMIZERS[label]
    return {**COMMON, "wd": decay_of(case.name), **case.options}


def decay_of(name: str) -> float:
    """The weight decay of an optimizer: GroupAdaGrad has none."""
    return 0.0 if name == "groupadagrad" else WD


@functools.cache
def start_weights() -> dict[str, Numbers]:
    """float32 values; rows of very unequal lengths, so that a norm of a part is not that of the whole."""
    return {key: _drawn(shape, index) for index, (key, shape) in enumerate(SHAPES.items())}


@functools.cache
def gradients(step: int, rank: int) -> dict[str, Numbers]:
    """A worker's gradients, float32 values."""
    rows = enumerate(SHAPES.items())
    return {key: _drawn(shape, index, step + 1, rank) for index, (key, shape) in rows}


@functools.cache
def reference(label: str, workers: int, changes: frozenset[str] = CHANGES) -> dict[str, Numbers]:
    """The weights after STEPS steps."""
    case, weights = CASES[label], dict(start_weights())
    oracle = Reference(case.name, {**COMMON, **case.options})
    for step in range(STEPS):
        for key, (lr, wd) in numbers(step, decay_of(case.name), changes).items():
            gradient = summed_gradient(step, workers, key, changes)
            weights[key] = oracle.update(key, weights[key], gradient, lr, wd)
    return weights


@functools.cache
def sgld_moments(workers: int) -> dict[str, tuple[Numbers, float]]:
    """By key the means of SGLD's weights after STEPS steps, and the variance that its noise gives to each.

    One step is `w = (1 - lr wd / 2) w - lr / 2 g + N(0, lr)`, linear in w.
    """
    moments = {key: (weight, 0.0) for key, weight in start_weights().items()}
    bound = COMMON["clip_gradient"]
    for step in range(STEPS):
        for key, (lr, wd) in numbers(step, WD).items():
            (mean, variance), decay = moments[key], 1 - lr * wd / 2
            gradient = np.clip(summed_gradient(step, workers, key), -bound, bound)
            moments[key] = (decay * mean - lr / 2 * gradient, decay**2 * variance + lr)
    return moments


def numbers(step: int, wd: float, changes: frozenset[str] = CHANGES) -> dict[str, tuple[float, float]]:
    """Learning rate and weight decay of every key in a step."""
    factors: dict[str, dict[str, float]] = {"lr_mult": {}, "wd_mult": {}}
    for earlier in range(step + 1):
        for kind, changed in multipliers(earlier, changes).items():
            factors[kind] |= changed
    return {
        key: (
            rate(step, changes) * factors["lr_mult"].get(key, 1.0),
            wd * factors["wd_mult"].get(key, 1.0),
        )
        for key in SHAPES
    }


@functools.cache
def summed_gradient(step: int, workers: int, key: str, changes: frozenset[str] = CHANGES) -> Numbers:
    """The rescaled sum over workers of one key."""
    return sum(
        gradients(step, rank)[key] * COMMON["rescale_grad"] / batch_size(step, rank, changes)
        for rank in range(workers)
    )


def distance(weights: dict[str, Numbers], expected: dict[str, Numbers]) -> float:
    """The greatest difference in any key, as a part of the key's greatest weight at the start or the end."""
    start = start_weights()
    scales = {key: max(np.abs(start[key]).max(), np.abs(expected[key]).max()) for key in expected}
    return max(float(np.abs(weights[key] - expected[key]).max() / scales[key]) for key in expected)


def _drawn(shape: tuple[int, int], *seed: int) -> Numbers:
    generator = np.random.default_rng(seed)
    values = generator.normal(size=shape) * 2.0 ** generator.integers(-3, 3, size=(shape[0], 1))
    return values.astype(np.float32).astype(np.float64)


SITES = (True, False)
"""Of update_on_kvstore."""


def play(
    label: str, rank: int, kvstore: str | KVStoreBase | None, in_store: bool | None
) -> dict[str, Tensor]:
    """The weights at the end of one run, in float32."""
    parameters = {
        key: torch.from_numpy(weight).float().requires_grad_() for key, weight in start_weights().items()
    }
    options = {"learning_rate": rate(0), **options_of(label)}
    with kvtrainer.Trainer(
        parameters, OPTIMIZERS[label].name, options, kvstore=kvstore, update_on_kvstore=in_store
    ) as trainer:
        for step in range(STEPS):
            trainer.set_learning_rate(rate(step))
            for kind, changed in multipliers(step).items():
                for key, value in changed.items():
                    setattr(parameters[key], kind, value)
            set_gradients(parameters, gradients(step, rank))
            trainer.step(batch_size(step, rank))
    return {key: parameter.detach().clone() for key, parameter in parameters.items()}


TOLERANCE = 2e-6
SERVERS = (1, 2, 3)
SIZES = [
    pytest.param(1, (1, 3), id="1x1,3"),
    pytest.param(2, (3,), id="2x3"),
    pytest.param(1, SERVERS, id="1x1,2,3", marks=pytest.mark.full),
    pytest.param(2, SERVERS, id="2x1,2,3", marks=pytest.mark.full),
]

Weights = dict[str, Tensor]


def everywhere(jobs: Servers, workers: int, servers: Sequence[int], label: str) -> dict[str, Weights]:
    """What every worker ended with, whatever the servers and the site of the update; one, also in one process."""
    found: dict[str, Weights] = {}
    for count, in_store in itertools.product(servers, SITES):

        def body(kv: DistKVStore, rank: int, in_store: bool = in_store) -> Weights:
            return play(label, rank, kv, in_store)

        for rank, weights in enumerate(jobs.results(workers, count, body)):
            found[f"{count} servers, rank {rank}, in store: {in_store}"] = weights
    if workers == 1:
        found["no store"] = play(label, 0, None, False)
        found |= {f"local, in store: {site}": play(label, 0, "local", site) for site in SITES}
    return found


def pieces_of(key: str, servers: int = 1, whole_keys: bool = False) -> list[Slice]:
    """The slices of a key; a Trainer takes a dict in the order of its names."""
    names = sorted(SHAPES)
    plan = make_plan([TensorSpec(name, SHAPES[name], "float32") for name in names], servers, whole_keys)
    return [piece for piece in plan.slices if piece.segments[0].key == names.index(key)]


def in_float64(weights: Weights) -> dict[str, Any]:
    return {key: weight.double().numpy() for key, weight in weights.items()}


@pytest.mark.parametrize("label", OPTIMIZERS)
@pytest.mark.parametrize(("workers", "servers"), SIZES)
def test_every_store_follows_the_formula_with_the_same_bits(
    jobs: Servers, workers: int, servers: Sequence[int], label: str
) -> None:
    runs = everywhere(jobs, workers, servers, label)
    first = next(iter(runs.values()))
    for who, weights in runs.items():
        assert all(torch.equal(weights[key], first[key]) for key in SHAPES), who
    if label != "sgld":
        assert distance(in_float64(first), reference(label, workers)) <= TOLERANCE


@pytest.mark.parametrize("workers", [1, 2])
def test_sglds_noise_has_the_mean_and_the_variance_of_its_formula(jobs: Servers, workers: int) -> None:
    weights = in_float64(everywhere(jobs, workers, (3,), "sgld")["3 servers, rank 0, in store: True"])
    moments = sgld_moments(workers)
    for key in ("sliced_weight", "body_weight"):
        mean, variance = moments[key]
        noise = (weights[key] - mean) / np.sqrt(variance)
        assert abs(noise.mean()) < 4 / np.sqrt(noise.size)
        assert abs(noise.var() - 1) < 4 * np.sqrt(2 / noise.size)
        # Nor does a slice repeat the noise of the one before it.
        begin = pieces_of(key)[1].segments[0].key_start
        before, after = noise.reshape(-1)[:-begin], noise.reshape(-1)[begin:]
        assert abs((before * after).mean()) < 4 / np.sqrt(after.size)


@pytest.mark.parametrize("label", ["signum", "lamb", "ftrl", "nadam"])
@pytest.mark.parametrize("change", sorted(CHANGES))
def test_a_change_that_did_not_arrive_would_be_seen(label: str, change: str) -> None:
    assert distance(reference(label, 2, CHANGES - {change}), reference(label, 2)) > 1e4 * TOLERANCE


@pytest.mark.parametrize("label", ["lamb", "lans", "lars"])
def test_the_norm_of_one_servers_part_would_be_seen(label: str) -> None:
    case = OPTIMIZERS[label]
    weight, gradient = start_weights()["sliced_weight"], summed_gradient(0, 1, "sliced_weight")
    ends = []
    for cuts in ([], [len(weight) // 2]):
        parts = zip(np.split(weight, cuts), np.split(gradient, cuts), strict=True)
        oracle = Reference(case.name, case.options)
        ends.append(np.concatenate([oracle.update(str(i), *part, 0.1, 0.05) for i, part in enumerate(parts)]))
    assert np.abs(ends[0] - ends[1]).max() > 1e3 * TOLERANCE


@pytest.mark.parametrize("label", CASES)
def test_the_weights_move_and_stay_bounded(label: str) -> None:
    # A run that blows up would amplify rounding without limit, and prove nothing.
    expected = reference(label, 2)
    start = start_weights()
    for key, weight in expected.items():
        assert 1e3 * TOLERANCE < np.abs(weight - start[key]).max() < 30, key


def test_every_optimizer_of_gluon_is_played() -> None:
    ours = {cls.name for cls in (*gluon.FAMILY, *layerwise.FAMILY)}
    assert {case.name for case in OPTIMIZERS.values()} == ours


@pytest.mark.parametrize("servers", SERVERS)
@pytest.mark.parametrize("whole_keys", [False, True])
def test_the_biggest_parameter_lies_on_all_servers_or_whole_on_one(servers: int, whole_keys: bool) -> None:
    pieces = pieces_of("sliced_weight", servers, whole_keys)
    assert len(pieces) > 3
    assert len({piece.server for piece in pieces}) == (1 if whole_keys else servers)
