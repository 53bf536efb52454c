"""The same training in four dtypes at once, and where float64 says that each ends; nothing of ours.

Weights at the start, gradients and their sums over two workers are exact in every dtype, bfloat16's eight bits
included, so that only the update rounds.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch

from tests.support.gluon_cases import CASES, Case
from tests.support.gluon_formulas import Numbers, Reference

RATES = (0.05, 0.02, 0.1, 0.03, 0.08, 0.04)
BATCH = 4.0
WD = 0.05
COMMON: dict[str, Any] = {"clip_gradient": 0.4}
ROWS = {"float16": 400, "bfloat16": 400, "float32": 200, "float64": 100}
"""Rows of 50 of the big parameter of each dtype: as many bytes in all, more than one slice."""
HALF = ("float16", "bfloat16")

LABELS = ("sgd with momentum", "adam", "lamb", "groupadagrad")
"""Elementwise and whole keys; tests/unit/optimizer plays all in every dtype."""
SGLD = Case("sgld", {"seed": 3})
OPTIMIZERS = {**{label: CASES[label] for label in LABELS}, "sgld": SGLD}


def shapes(dtype: str) -> dict[str, tuple[int, int]]:
    """The parameters of a dtype."""
    return {f"{dtype} big": (ROWS[dtype], 50), f"{dtype} small": (7, 3)}


def decay_of(name: str) -> float:
    """The weight decay of an optimizer: GroupAdaGrad has none."""
    return 0.0 if name == "groupadagrad" else WD


@functools.cache
def start_weight(key: str, shape: tuple[int, int]) -> Numbers:
    """Odd multiples of 1/64 up to 2: none is 0, all are exact in bfloat16."""
    return (2 * _generator(key).integers(-64, 64, size=shape) + 1) / 64


@functools.cache
def gradient(key: str, shape: tuple[int, int], step: int, rank: int) -> Numbers:
    """A worker's gradient: multiples of 1/16 up to 2, so that those of two workers add up exactly."""
    return _generator(key, step + 1, rank).integers(-32, 33, size=shape) / 16


@functools.cache
def reference(label: str, dtype: str, is_rounded: bool, workers: int) -> dict[str, Numbers]:
    """The weights of a dtype at the end; `is_rounded` rounds them to the dtype after every step."""
    case = CASES[label]
    oracle = Reference(
        case.name,
        {**COMMON, **case.options},
        functools.partial(rounded, dtype=dtype) if is_rounded else _same,
    )
    weights = {key: start_weight(key, shape) for key, shape in shapes(dtype).items()}
    for step, lr in enumerate(RATES):
        for key, weight in weights.items():
            g = sum(gradient(key, weight.shape, step, rank) for rank in range(workers)) / BATCH
            weights[key] = oracle.update(key, weight, g, lr, decay_of(case.name))
    return weights


def sgld_moments(dtype: str, workers: int) -> dict[str, tuple[Numbers, float]]:
    """By key the means of SGLD's weights at the end, and the variance that its noise gives to each.

    One step is `w = (1 - lr wd / 2) w - lr / 2 g + N(0, lr)`, linear in w.
    """
    moments = {key: (start_weight(key, shape), 0.0) for key, shape in shapes(dtype).items()}
    bound = COMMON["clip_gradient"]
    for step, lr in enumerate(RATES):
        for key, (mean, variance) in moments.items():
            g = sum(gradient(key, mean.shape, step, rank) for rank in range(workers)) / BATCH
            decay = 1 - lr * WD / 2
            moments[key] = (decay * mean - lr / 2 * np.clip(g, -bound, bound), decay**2 * variance + lr)
    return moments


def rounded(values: Numbers, dtype: str) -> Numbers:
    """The nearest numbers of a dtype, in float64."""
    return torch.from_numpy(np.asarray(values)).to(getattr(torch, dtype)).double().numpy()


def _same(values: Numbers) -> Numbers:
    return values


def _generator(key: str, *seed: int) -> np.random.Generator:
    return np.random.default_rng([*key.encode(), *seed])
