"""Training runs whose numbers change while they go on, and where float64 says that they end; nothing of ours.

A scenario says what changes: learning rate, batch sizes, multipliers. Every worker has gradients, and divides them by
batch sizes, of its own; the problem is the same for every optimizer.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from tests.support.gluon_cases import CASES, Case
from tests.support.gluon_formulas import Numbers, Reference

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

RATE, BATCH_SIZE, MULTIPLIER = "learning rate", "batch sizes", "multipliers"
ALL = "all of them"
SCENARIOS: dict[str, frozenset[str]] = {
    **{change: frozenset([change]) for change in (RATE, BATCH_SIZE, MULTIPLIER)},
    ALL: frozenset([RATE, BATCH_SIZE, MULTIPLIER]),
}
SINGLY = ("signum", "lamb", "ftrl", "nadam")
"""The cases that play every scenario; the others play ALL."""
OPTIMIZERS = {**CASES, "sgld": Case("sgld", {"seed": 3})}
RUNS = [(label, ALL) for label in OPTIMIZERS] + [
    (label, scenario) for label in SINGLY for scenario in SCENARIOS if scenario != ALL
]
"""Cases and their scenarios."""


def rate(scenario: str, step: int) -> float:
    """The learning rate of a step."""
    return RATES[step] if RATE in SCENARIOS[scenario] else RATES[0]


def batch_size(scenario: str, step: int, rank: int) -> float:
    """What a worker passes to a step."""
    return BATCHES[(step + 2 * rank) % len(BATCHES)] if BATCH_SIZE in SCENARIOS[scenario] else BATCHES[0]


def multipliers(scenario: str, step: int) -> dict[str, dict[str, float]]:
    """The multipliers that change before a step: by attribute and key."""
    return MULTIPLIERS.get(step, {}) if MULTIPLIER in SCENARIOS[scenario] else {}


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
def reference(label: str, scenario: str, workers: int) -> dict[str, Numbers]:
    """The weights after STEPS steps."""
    case, weights = CASES[label], dict(start_weights())
    oracle = Reference(case.name, {**COMMON, **case.options})
    for step in range(STEPS):
        for key, (lr, wd) in numbers(scenario, step, decay_of(case.name)).items():
            gradient = summed_gradient(scenario, step, workers, key)
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
        for key, (lr, wd) in numbers(ALL, step, WD).items():
            (mean, variance), decay = moments[key], 1 - lr * wd / 2
            gradient = np.clip(summed_gradient(ALL, step, workers, key), -bound, bound)
            moments[key] = (decay * mean - lr / 2 * gradient, decay**2 * variance + lr)
    return moments


def numbers(scenario: str, step: int, wd: float) -> dict[str, tuple[float, float]]:
    """Learning rate and weight decay of every key in a step."""
    factors: dict[str, dict[str, float]] = {"lr_mult": {}, "wd_mult": {}}
    for earlier in range(step + 1):
        for kind, changed in multipliers(scenario, earlier).items():
            factors[kind] |= changed
    return {
        key: (
            rate(scenario, step) * factors["lr_mult"].get(key, 1.0),
            wd * factors["wd_mult"].get(key, 1.0),
        )
        for key in SHAPES
    }


@functools.cache
def summed_gradient(scenario: str, step: int, workers: int, key: str) -> Numbers:
    """The rescaled sum over workers of one key."""
    return sum(
        gradients(step, rank)[key] * COMMON["rescale_grad"] / batch_size(scenario, step, rank)
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
