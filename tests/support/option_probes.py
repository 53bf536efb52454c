"""For every option of a Trainer: steps whose result differs from those without it, and what it has to be.

What is expected is worked out by hand, or is what plain torch gives; see each run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from kvtrainer.schedules.param_schedule import ParamSchedule
from tests.support.option_runs import (
    MOMENTUM,
    NORM,
    SAME,
    TWO_BIT,
    Run,
    accumulated,
    anomalies,
    autocast,
    collectives,
    corrected,
    epochs,
    factors,
    half,
    halving,
    metrics,
    norms,
    overflow,
    plateau,
    rate_of,
    steps,
    torchs,
)


@dataclass(frozen=True, eq=False)
class Probe:
    """One option, or two that meet."""

    option: str
    effect: str
    """What was looked at, for the page."""
    run: Run
    options: Callable[[], Mapping[str, Any]]
    """Made anew each time, because some are bound."""
    expected: Any
    """None: it has to be refused everywhere."""
    without: Mapping[str, Any] = field(default_factory=dict)
    """Options of the run that has to look otherwise."""
    without_rounds: Any = None
    """What is expected where contributions are not summed, if that is something else."""


PROBES = (
    Probe(
        "paramwise", "a bias moves twice as far",
        steps(SAME), lambda: {"paramwise": {"custom_keys": {"bias": {"lr_mult": 2.0}}}}, [-1.0, 0.0, -2.0],
    ),
    Probe(
        "clip_grad, norm", "the norm before clipping, the coefficient, the clipped weights",
        norms, lambda: NORM, [5.0, 0.2, -0.6, -0.8, 0.0],
    ),
    Probe(
        "clip_grad, value", "clipped weights",
        steps((2.0, -0.25)), lambda: {"clip_grad": {"type": "value", "clip_value": 0.5}}, [-0.5, 0.25, 0.0],
    ),
    Probe(
        "clip_grad, error_if_nonfinite", "one worker's infinite gradient raises on all; nothing changes",
        overflow, lambda: {"clip_grad": {"max_norm": 9.0, "error_if_nonfinite": True}},
        [[False, 1.0], "raises", [False, 1.0], -2.0, 0.0, 0.0], without={"clip_grad": {"max_norm": 9.0}},
    ),
    Probe(
        "amp, dynamic", "an overflow skips the step on all workers and halves the scale",
        overflow, lambda: {"amp": {"init_scale": 8.0}},
        [[False, 8.0], [True, 8.0], [False, 4.0], -2.0, 0.0, 0.0],
    ),
    Probe(
        "amp, a number", "the scale stays, an overflow skips the step on all workers",
        overflow, lambda: {"amp": 8}, [[False, 8.0], [True, 8.0], [False, 8.0], -2.0, 0.0, 0.0],
    ),
    Probe(
        "amp, bfloat16", "the forward pass is rounded",
        autocast, lambda: {"amp": {"dtype": "bfloat16"}}, [-1.0, 0.0, 0.0],
    ),
    Probe(
        "accumulate", "two backward passes make one update of the mean",
        accumulated, lambda: {"accumulate": 2}, [False, 0.0, True, -2.0],
    ),
    Probe(
        "schedules, learning rate by step", "each update is half of the last one",
        steps(SAME, SAME), lambda: {"schedules": [rate_of("lr", 0.5)]}, [-1.5, 0.0, -1.5],
    ),
    Probe(
        "schedules, learning rate by epoch", "updates of the second epoch are half as large",
        epochs, lambda: {"schedules": [{"policy": "step", "step": [1], "gamma": 0.5}]}, [-3.0, 0.0, 0.0],
    ),
    Probe(
        "schedules, momentum", "the second update has no momentum",
        steps(SAME, SAME),
        lambda: {"optimizer_params": MOMENTUM, "schedules": [
            ParamSchedule.unbound("momentum", lambda base, at, span: base if at < 1 else 0.0, by="step")]},
        [-2.0, 0.0, -2.0], without={"optimizer_params": MOMENTUM},
    ),
    Probe(
        "schedules, weight decay", "decay falls to a tenth after the first step: 0.5 · 0.95",
        lambda bench, options: steps((0.0,), (0.0,))(bench, {"start": 1.0, **options}),
        lambda: {"optimizer_params": {"wd": 0.5}, "schedules": [rate_of("weight_decay", 0.1)]},
        [0.475, 0.475, 0.475], without={"optimizer_params": {"wd": 0.5}},
    ),
    Probe(
        "schedules, torch's scheduler", "each update is half of the last one",
        steps(SAME, SAME), lambda: {"schedules": [halving]}, [-1.5, 0.0, -1.5],
    ),
    Probe(
        "schedules, by a metric", "the update after the metric stood still is half as large",
        metrics, lambda: {"schedules": [plateau]}, [-2.5, 0.0, 0.0],
    ),
    Probe(
        "detect_anomalous_params, log", "a parameter outside of the loss is logged as an error",
        anomalies, lambda: {"detect_anomalous_params": True}, [1, -1.0],
    ),
    Probe(
        "detect_anomalous_params, raise", "such a parameter raises before anything changes",
        anomalies, lambda: {"detect_anomalous_params": "raise"}, ["raises", 0.0],
    ),
    Probe(
        "on_nonfinite, raise", "one worker's infinite gradient raises on all; nothing changes",
        overflow, lambda: {"on_nonfinite": "raise"}, [[False, 1.0], "raises", [False, 1.0], -2.0, 0.0, 0.0],
    ),
    Probe(
        "on_nonfinite, skip", "one worker's infinite gradient skips the step on all",
        overflow, lambda: {"on_nonfinite": "skip"},
        [[False, 1.0], [True, 1.0], [False, 1.0], -2.0, 0.0, 0.0],
    ),
    Probe(
        "on_nonfinite, ignore", "an infinite gradient reaches the weights, where clip_grad would skip it",
        overflow, lambda: {"clip_grad": {"max_norm": 9.0}, "on_nonfinite": "ignore"},
        [[False, 1.0], [False, 1.0], [False, 1.0], -math.inf, 0.0, 0.0],
        without={"clip_grad": {"max_norm": 9.0}},
    ),
    Probe(
        "compression_params", "of two gradients of 0.7, 0.5 arrives each time",
        steps((0.7,), (0.7,)), lambda: TWO_BIT, [-1.0, 0.0, 0.0],
    ),
    Probe(
        "optimizer_params: lr_scheduler", "each update is half of the last one",
        steps(SAME, SAME, SAME),
        lambda: {"optimizer_params": {"lr_scheduler": factors()}}, [-1.75, 0.0, -1.75],
    ),
    Probe(
        "optimizer_params: momentum_correction", "momentum falls with the learning rate: 1 + 0.1·1.9",
        corrected, lambda: {"optimizer_params": {**MOMENTUM, "momentum_correction": True}}, [-1.19, 0.0, 0.0],
        without={"optimizer_params": MOMENTUM},
    ),
    Probe(
        "optimizer_params: multi_precision", "two updates that float16 rounds away one by one",
        half, lambda: {"optimizer_params": {"learning_rate": 2e-4, "multi_precision": True}},
        [0.99951171875, 1.0, 1.0], without={"optimizer_params": {"learning_rate": 2e-4}},
    ),
    Probe(
        "optimizer_params: multi_precision, torch's SGD", "two updates that float16 rounds away one by one",
        half, lambda: torchs(lr=2e-4, multi_precision=True),
        [0.99951171875, 1.0, 1.0], without=torchs(lr=2e-4),
    ),
    Probe(
        "configure(coalesce=False)", "every parameter is summed by itself",
        collectives, lambda: {"configure": {"coalesce": False}}, [2, -2.0, 0.0, -2.0],
    ),
    Probe(
        "configure(bucket_size_mb=…)", "sums of no more than that",
        collectives, lambda: {"configure": {"bucket_size_mb": 64 / 2**20}}, [2, -2.0, 0.0, -2.0],
    ),
)  # fmt: skip
