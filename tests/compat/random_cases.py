"""Random training runs for every one of Gluon's optimizers: numbers only, so that two systems can play them."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import numpy as np

STEPS = 12
SHAPES = {"body_weight": (9, 5), "head_weight": (3, 4), "norm_gamma": (1, 6)}
"""Keys of a run; LARS treats the last one differently, for its name."""

Draw = Callable[[random.Random], Any]


def between(low: float, high: float) -> Draw:
    return lambda draw: draw.uniform(low, high)


def tiny(low: int, high: int) -> Draw:
    """A power of ten whose exponent lies between two negative ones."""
    return lambda draw: 10 ** draw.uniform(low, high)


def either(value: Any, other: Draw) -> Draw:
    return lambda draw: other(draw) if draw.random() < 0.5 else value


FLAG: Draw = lambda draw: draw.random() < 0.5  # noqa: E731
MOMENTUM = {"momentum": either(0.0, between(0.3, 0.95))}
BETAS = {"beta1": between(0.3, 0.95), "beta2": between(0.8, 0.999), "epsilon": tiny(-8, -2)}
BOUNDS = {"lower_bound": either(None, between(0.5, 3)), "upper_bound": either(None, between(3, 9))}

COMMON: dict[str, Draw] = {
    "wd": either(0.0, between(0.001, 0.1)),
    "clip_gradient": either(None, between(0.2, 1)),
    "begin_num_update": either(0, lambda draw: draw.randint(1, 30)),
}

OWN: dict[str, dict[str, Draw]] = {
    "sgd": MOMENTUM,
    "nag": MOMENTUM,
    "sgld": {},
    "signum": {**MOMENTUM, "wd_lh": either(0.0, between(0.001, 0.1))},
    "ftml": BETAS,
    "dcasgd": {**MOMENTUM, "lamda": between(0.01, 0.5)},
    "adam": BETAS,
    "adamw": {**BETAS, "correct_bias": FLAG},
    "adabelief": {**BETAS, "correct_bias": FLAG},
    "adamax": BETAS,
    "nadam": {**BETAS, "schedule_decay": between(0.001, 0.1)},
    "adadelta": {"rho": between(0.5, 0.99), "epsilon": tiny(-4, -1)},
    "adagrad": {"epsilon": tiny(-8, -2)},
    "rmsprop": {
        "rho": between(0.5, 0.99),
        "momentum": between(0.3, 0.95),
        "epsilon": tiny(-6, -2),
        "centered": FLAG,
        "clip_weights": either(None, between(0.5, 2)),
    },
    "ftrl": {"lamda1": between(0, 0.3), "beta": between(0.2, 2)},
    "lamb": {**BETAS, **BOUNDS, "bias_correction": FLAG},
    "lans": {**BETAS, **BOUNDS},
    "lars": {**MOMENTUM, "eta": tiny(-2, 0), "epsilon": tiny(-3, 0)},
    "groupadagrad": {"epsilon": tiny(-8, -2), "wd": lambda draw: 0.0},
    "test": {},
}
"""What each optimizer has beside the learning rate and `COMMON`."""


_NO_EPSILON = {"beta1": BETAS["beta1"], "beta2": BETAS["beta2"]}

OWN_OF_1: dict[str, dict[str, Draw]] = {
    **{name: OWN[name] for name in ("sgd", "nag", "sgld", "signum", "ftml", "adam", "nadam", "ftrl", "lamb")},
    # Its momentum is broken in 1.9.1.
    "dcasgd": {"lamda": OWN["dcasgd"]["lamda"]},
    "adamax": _NO_EPSILON,
    "adadelta": OWN["adadelta"],
    "adagrad": {"eps": tiny(-8, -1)},
    "rmsprop": {
        "gamma1": OWN["rmsprop"]["rho"],
        "gamma2": OWN["rmsprop"]["momentum"],
        "epsilon": tiny(-6, -1),
        "centered": FLAG,
        "clip_weights": OWN["rmsprop"]["clip_weights"],
    },
    "lars": {**MOMENTUM, "eta": tiny(-2, 0), "eps": either(0.0, tiny(-3, 0)), "momentum_correction": FLAG},
    "groupadagrad": {"eps": tiny(-8, -1), "wd": lambda draw: 0.0},
    "test": {},
}
"""The same for MXNet 1.9.1, under its own words."""


def random_case(name: str, seed: int, own: dict[str, dict[str, Draw]] = OWN) -> dict[str, Any]:
    """A run of `STEPS` steps as `mxnet_trajectories.py` wants it; learning rate and batch size change midway."""
    draw, numbers = random.Random(f"{name} {seed}"), np.random.default_rng(seed)
    options = {key: sample(draw) for key, sample in {**COMMON, **own[name]}.items()}
    if own is OWN_OF_1 and options.get("momentum") == 0.0:
        options.pop("wd_lh", None)  # which its kernel without momentum does not take
    # MXNet's NAdam multiplies one product for all keys, so only a run of a single key has a meaning there.
    shapes = dict(list(SHAPES.items())[:1]) if name == "nadam" else SHAPES
    keys = [
        {
            "name": key,
            "shape": shape,
            "weight": floats(numbers.normal(size=math.prod(shape))),
            "lr_mult": draw.choice([1.0, draw.uniform(0.2, 2)]),
            "wd_mult": draw.choice([1.0, 0.0, draw.uniform(0.2, 2)]),
        }
        for key, shape in shapes.items()
    ]
    rate, batch = draw.uniform(0.02, 0.2), draw.choice([1, 4, 10])
    steps = []
    for step in range(STEPS):
        if step and draw.random() < 0.4:
            rate, batch = rate * draw.uniform(0.3, 1.5), draw.choice([1, 4, 10])
        scale = batch * draw.uniform(0.3, 1.5)
        grads = [floats(numbers.normal(scale=scale, size=math.prod(shape))) for shape in shapes.values()]
        steps.append({"lr": rate, "rescale": 1 / batch, "grads": grads})
    return {
        "name": name,
        "options": options,
        "keys": keys,
        "steps": steps,
        "dtype": "float32",
        "knows_names": True,
        "has_multipliers": True,
    }


def random_rows(name: str, seed: int, own: dict[str, dict[str, Draw]] = OWN) -> dict[str, Any]:
    """A run of a single key with row-sparse gradients."""
    case, numbers = random_case(name, seed, own), np.random.default_rng(seed)
    shape = SHAPES["body_weight"]
    case["keys"] = case["keys"][:1]
    for step in case["steps"]:
        step["rows"] = sorted(
            numbers.choice(shape[0], size=int(numbers.integers(1, 5)), replace=False).tolist()
        )
        scale = numbers.uniform(0.3, 1.5) / step["rescale"]
        step["grads"] = [floats(numbers.normal(scale=scale, size=len(step["rows"]) * shape[1]))]
    return case


def floats(values: np.ndarray) -> list[float]:
    """float32 values as exact numbers."""
    return [float(v) for v in values.astype(np.float32)]
