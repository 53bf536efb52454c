"""Options of a Trainer that meet: what becomes of both, or that they are refused together."""

from __future__ import annotations

from tests.support.option_probes import Probe
from tests.support.option_runs import (
    MOMENTUM,
    NORM,
    SAME,
    TWO_BIT,
    accumulated,
    existing,
    factors,
    halving,
    overflow,
    rate_of,
    steps,
    torchs,
)

PAIRS = (
    Probe(
        "clip_grad, value, and compression_params", "what was compressed is summed, then limited; without rounds "
        "limited, then compressed",
        steps((0.7,), (0.7,)), lambda: {"clip_grad": {"type": "value", "clip_value": 0.3}, **TWO_BIT},
        [-0.6, 0.0, 0.0], without=TWO_BIT, without_rounds=[-0.5, 0.0, 0.0],
    ),
    Probe(
        "on_nonfinite, skip, and compression_params", "one worker's infinity skips the step on all, uncompressed",
        overflow, lambda: {"on_nonfinite": "skip", **TWO_BIT},
        [[False, 1.0], [True, 1.0], [False, 1.0], -1.0, 0.0, 0.0],
    ),
    Probe(
        "paramwise and schedules", "the schedule moves the rate of a bias in proportion",
        steps(SAME, SAME),
        lambda: {"paramwise": {"custom_keys": {"bias": {"lr_mult": 2.0}}}, "schedules": [rate_of("lr", 0.5)]},
        [-1.5, 0.0, -3.0],
    ),
    Probe(
        "amp and compression_params", "the threshold and the residual are of the gradient without the loss scale",
        steps((0.7,), (0.7,)), lambda: {"amp": 8, **TWO_BIT}, [-1.0, 0.0, 0.0],
    ),
    Probe(
        "amp, clip_grad and accumulate", "the mean of two gradients is unscaled, then limited",
        accumulated, lambda: {"amp": 8, "accumulate": 2, **NORM}, [False, 0.0, True, -1.0],
        without={"amp": 8, "accumulate": 2},
    ),
    Probe(
        "schedules, and amp", "a step that was skipped advances no schedule",
        overflow, lambda: {"amp": 8, "schedules": [rate_of("lr", 0.5)]},
        [[False, 8.0], [True, 8.0], [False, 8.0], -1.5, 0.0, 0.0], without={"amp": 8},
    ),
    Probe(
        "schedules of the learning rate, and lr_scheduler", "", steps(SAME),
        lambda: {"optimizer_params": {"lr_scheduler": factors()},
                 "schedules": [rate_of("lr", 0.5)]}, None,
    ),
    Probe(
        "schedules of torch, and lr_scheduler", "", steps(SAME),
        lambda: {"optimizer_params": {"lr_scheduler": factors()},
                 "schedules": [halving]}, None,
    ),
    Probe(
        "schedules of momentum, and an optimizer without", "", steps(SAME),
        lambda: {"optimizer": "adagrad", "schedules": [rate_of("momentum", 0.5)]}, None,
    ),
    Probe(
        "momentum_correction, and torch's SGD", "", steps(SAME),
        lambda: torchs(momentum=0.9, momentum_correction=True), None,
    ),
    Probe(
        "momentum_correction and lazy_update", "", steps(SAME),
        lambda: {"optimizer_params": {**MOMENTUM, "momentum_correction": True, "lazy_update": True}}, None,
    ),
    Probe(
        "paramwise, and an optimizer that exists", "", existing,
        lambda: {"paramwise": {"custom_keys": {"bias": {"lr_mult": 2.0}}}}, None,
    ),
    Probe(
        "amp, dynamic, and on_nonfinite='raise'", "", steps(SAME),
        lambda: {"amp": "dynamic", "on_nonfinite": "raise"}, None,
    ),
    Probe(
        "amp and on_nonfinite='ignore'", "", steps(SAME), lambda: {"amp": 8, "on_nonfinite": "ignore"}, None
    ),
    Probe(
        "amp, bfloat16, and a loss scale", "", steps(SAME),
        lambda: {"amp": {"dtype": "bfloat16", "loss_scale": 8}}, None,
    ),
)  # fmt: skip
"""Options that meet; those without an expected result are refused everywhere."""
