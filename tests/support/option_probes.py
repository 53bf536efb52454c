"""For every option of a Trainer: a few steps whose result differs from those without it, and what it has to be.

What is expected is worked out by hand, or is what plain torch gives; see each probe.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from kvtrainer.errors import AnomalousParametersError, NonFiniteGradientError
from kvtrainer.lr_scheduler import FactorScheduler
from kvtrainer.param_schedule import ParamSchedule
from tests.support.option_bench import Bench

Run = Callable[[Bench, Mapping[str, Any]], Any]
"""Builds the Trainer with the options given, trains, and returns what was seen."""


@dataclass(frozen=True)
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


def _steps(*pushes: tuple[float, ...]) -> Run:
    """The weights after these gradients."""

    def run(bench: Bench, options: Mapping[str, Any]) -> Any:
        bench.build(**options)
        for slopes in pushes:
            bench.push(*slopes)
        return bench.weights()

    return run


def _norms(bench: Bench, options: Mapping[str, Any]) -> Any:
    bench.build(**options)
    result = bench.push(3.0, 4.0)
    return [result.grad_norm, result.clip_coef, *bench.weights()]


def _overflow(bench: Bench, options: Mapping[str, Any]) -> Any:
    """What becomes of the second of three steps, whose gradient is infinite on one worker."""
    bench.build(**options)
    seen: list[Any] = []
    for bad in (False, True, False):
        try:
            result = bench.push(1.0, bad=bad)
            seen.append([result.skipped, result.loss_scale])
        except NonFiniteGradientError:
            seen.append("raises")
    return [*seen, *bench.weights()]


def _autocast(bench: Bench, options: Mapping[str, Any]) -> Any:
    """1 + 2^-8 is 1 in bfloat16."""
    bench.build(**options)
    with bench.trainer.context():
        x = torch.tensor([[1.00390625, 0.0]])
        losses = [torch.nn.functional.linear(x, w.unsqueeze(0)).sum() for w in bench.w]
    bench.trainer.update_params(losses)
    return bench.weights()


def _accumulated(bench: Bench, options: Mapping[str, Any]) -> Any:
    bench.build(**options)
    seen = []
    for slope in (1.0, 3.0):
        result = bench.push(slope)
        seen += [result.updated, bench.weights()[0]]
    return seen


def _epochs(bench: Bench, options: Mapping[str, Any]) -> Any:
    bench.build(**options)
    for _ in range(2):
        bench.push(1.0)
        bench.push(1.0)
        bench.trainer.end_epoch()
    return bench.weights()


def _anomalies(bench: Bench, options: Mapping[str, Any]) -> Any:
    bench.build(**options)
    try:
        bench.trainer.update_params(bench.losses(1.0, leaves_out_bias=True))
    except AnomalousParametersError:
        return ["raises", bench.weights()[0]]
    return [sum("bias with shape" in text for text in bench.logged), bench.weights()[0]]


def _corrected(bench: Bench, options: Mapping[str, Any]) -> Any:
    """The learning rate falls to a tenth after the first step."""
    bench.build(**options)
    bench.push(1.0)
    bench.trainer.set_learning_rate(0.1)
    bench.push(1.0)
    return bench.weights()


def _half(bench: Bench, options: Mapping[str, Any]) -> Any:
    """Two steps of 2e-4 from 1.0: neither shows in float16 by itself, both together do."""
    bench.build(start=1.0, dtype=torch.float16, **options)
    for _ in range(2):
        bench.push(1.0)
    return bench.weights()


def _existing(bench: Bench, options: Mapping[str, Any]) -> Any:
    """The optimizer is an instance of torch's class, whose groups are what is trained."""
    bench.build(optimizer=torch.optim.SGD([torch.zeros(1)], 1.0), **options)
    return bench.weights()


def _collectives(bench: Bench, options: Mapping[str, Any]) -> Any:
    """How many sums over the ranks one step takes."""
    bench.build(**options)
    bench.push(1.0, 0.0, 1.0)
    with mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as called:
        bench.push(1.0, 0.0, 1.0)
    return [called.call_count, *bench.weights()]


def _rate_of(name: str, factor: float) -> dict[str, Any]:
    return {"policy": "step", "step": [1], "gamma": factor, "by_epoch": False, "name": name}


def _factors() -> FactorScheduler:
    return FactorScheduler(step=1, factor=0.5, base_lr=1.0)


def _halving(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)


def _torchs(**options: Any) -> dict[str, Any]:
    return {"optimizer": torch.optim.SGD, "optimizer_params": options}


_NORM = {"clip_grad": {"max_norm": 1.0}}
_MOMENTUM: dict[str, Any] = {"momentum": 0.9}
_TWO_BIT: dict[str, Any] = {"compression_params": {"type": "2bit", "threshold": 0.5}}
_SAME = (1.0, 0.0, 1.0)
_WITH_SCALE = [[False, 8.0], [True, 8.0], [False, 4.0], -2.0, 0.0, 0.0]

PROBES = (
    Probe(
        "paramwise", "a bias moves twice as far",
        _steps(_SAME), lambda: {"paramwise": {"custom_keys": {"bias": {"lr_mult": 2.0}}}}, [-1.0, 0.0, -2.0],
    ),
    Probe(
        "clip_grad, norm", "the norm before clipping, the coefficient, the clipped weights",
        _norms, lambda: _NORM, [5.0, 0.2, -0.6, -0.8, 0.0],
    ),
    Probe(
        "clip_grad, value", "clipped weights",
        _steps((2.0, -0.25)), lambda: {"clip_grad": {"type": "value", "clip_value": 0.5}}, [-0.5, 0.25, 0.0],
    ),
    Probe(
        "clip_grad, error_if_nonfinite", "one worker's infinite gradient raises on all; nothing changes",
        _overflow, lambda: {"clip_grad": {"max_norm": 9.0, "error_if_nonfinite": True}},
        [[False, 1.0], "raises", [False, 1.0], -2.0, 0.0, 0.0], without={"clip_grad": {"max_norm": 9.0}},
    ),
    Probe(
        "amp, dynamic", "an overflow skips the step on all workers and halves the scale",
        _overflow, lambda: {"amp": {"init_scale": 8.0}}, _WITH_SCALE,
    ),
    Probe(
        "amp, a number", "the scale stays, an overflow skips the step on all workers",
        _overflow, lambda: {"amp": 8}, [[False, 8.0], [True, 8.0], [False, 8.0], -2.0, 0.0, 0.0],
    ),
    Probe(
        "amp, bfloat16", "the forward pass is rounded",
        _autocast, lambda: {"amp": {"dtype": "bfloat16"}}, [-1.0, 0.0, 0.0],
    ),
    Probe(
        "accumulate", "two backward passes make one update of the mean",
        _accumulated, lambda: {"accumulate": 2}, [False, 0.0, True, -2.0],
    ),
    Probe(
        "schedules, learning rate by step", "each update is half of the last one",
        _steps(_SAME, _SAME), lambda: {"schedules": [_rate_of("lr", 0.5)]}, [-1.5, 0.0, -1.5],
    ),
    Probe(
        "schedules, learning rate by epoch", "updates of the second epoch are half as large",
        _epochs, lambda: {"schedules": [{"policy": "step", "step": [1], "gamma": 0.5}]}, [-3.0, 0.0, 0.0],
    ),
    Probe(
        "schedules, momentum", "the second update has no momentum",
        _steps(_SAME, _SAME),
        lambda: {"optimizer_params": _MOMENTUM, "schedules": [
            ParamSchedule.unbound("momentum", lambda base, at, span: base if at < 1 else 0.0, by="step")]},
        [-2.0, 0.0, -2.0], without={"optimizer_params": _MOMENTUM},
    ),
    Probe(
        "schedules, weight decay", "decay falls to a tenth after the first step: 0.5 · 0.95",
        lambda bench, options: _steps((0.0,), (0.0,))(bench, {"start": 1.0, **options}),
        lambda: {"optimizer_params": {"wd": 0.5}, "schedules": [_rate_of("weight_decay", 0.1)]},
        [0.475, 0.475, 0.475], without={"optimizer_params": {"wd": 0.5}},
    ),
    Probe(
        "schedules, torch's scheduler", "each update is half of the last one",
        _steps(_SAME, _SAME), lambda: {"schedules": [_halving]}, [-1.5, 0.0, -1.5],
    ),
    Probe(
        "detect_anomalous_params, log", "a parameter outside of the loss is logged as an error",
        _anomalies, lambda: {"detect_anomalous_params": True}, [1, -1.0],
    ),
    Probe(
        "detect_anomalous_params, raise", "such a parameter raises before anything changes",
        _anomalies, lambda: {"detect_anomalous_params": "raise"}, ["raises", 0.0],
    ),
    Probe(
        "on_nonfinite, raise", "one worker's infinite gradient raises on all; nothing changes",
        _overflow, lambda: {"on_nonfinite": "raise"}, [[False, 1.0], "raises", [False, 1.0], -2.0, 0.0, 0.0],
    ),
    Probe(
        "on_nonfinite, skip", "one worker's infinite gradient skips the step on all",
        _overflow, lambda: {"on_nonfinite": "skip"},
        [[False, 1.0], [True, 1.0], [False, 1.0], -2.0, 0.0, 0.0],
    ),
    Probe(
        "on_nonfinite, ignore", "an infinite gradient reaches the weights, where clip_grad would skip it",
        _overflow, lambda: {"clip_grad": {"max_norm": 9.0}, "on_nonfinite": "ignore"},
        [[False, 1.0], [False, 1.0], [False, 1.0], -math.inf, 0.0, 0.0],
        without={"clip_grad": {"max_norm": 9.0}},
    ),
    Probe(
        "compression_params", "of two gradients of 0.7, 0.5 arrives each time",
        _steps((0.7,), (0.7,)), lambda: _TWO_BIT, [-1.0, 0.0, 0.0],
    ),
    Probe(
        "optimizer_params: lr_scheduler", "each update is half of the last one",
        _steps(_SAME, _SAME, _SAME),
        lambda: {"optimizer_params": {"lr_scheduler": _factors()}}, [-1.75, 0.0, -1.75],
    ),
    Probe(
        "optimizer_params: momentum_correction", "momentum falls with the learning rate: 1 + 0.1·1.9",
        _corrected, lambda: {"optimizer_params": {**_MOMENTUM, "momentum_correction": True}}, [-1.19, 0.0, 0.0],
        without={"optimizer_params": _MOMENTUM},
    ),
    Probe(
        "optimizer_params: multi_precision", "two updates that float16 rounds away one by one",
        _half, lambda: {"optimizer_params": {"learning_rate": 2e-4, "multi_precision": True}},
        [0.99951171875, 1.0, 1.0], without={"optimizer_params": {"learning_rate": 2e-4}},
    ),
    Probe(
        "optimizer_params: multi_precision, torch's SGD", "two updates that float16 rounds away one by one",
        _half, lambda: _torchs(lr=2e-4, multi_precision=True),
        [0.99951171875, 1.0, 1.0], without=_torchs(lr=2e-4),
    ),
    Probe(
        "configure(coalesce=False)", "every parameter is summed by itself",
        _collectives, lambda: {"configure": {"coalesce": False}}, [2, -2.0, 0.0, -2.0],
    ),
    Probe(
        "configure(bucket_size_mb=…)", "sums of no more than that",
        _collectives, lambda: {"configure": {"bucket_size_mb": 64 / 2**20}}, [2, -2.0, 0.0, -2.0],
    ),
)  # fmt: skip

PAIRS = (
    Probe(
        "clip_grad, value, and compression_params", "what was compressed is summed, then limited; without rounds "
        "limited, then compressed",
        _steps((0.7,), (0.7,)), lambda: {"clip_grad": {"type": "value", "clip_value": 0.3}, **_TWO_BIT},
        [-0.6, 0.0, 0.0], without=_TWO_BIT, without_rounds=[-0.5, 0.0, 0.0],
    ),
    Probe(
        "amp and compression_params", "the threshold and the residual are of the gradient without the loss scale",
        _steps((0.7,), (0.7,)), lambda: {"amp": 8, **_TWO_BIT}, [-1.0, 0.0, 0.0],
    ),
    Probe(
        "amp, clip_grad and accumulate", "the mean of two gradients is unscaled, then limited",
        _accumulated, lambda: {"amp": 8, "accumulate": 2, **_NORM}, [False, 0.0, True, -1.0],
        without={"amp": 8, "accumulate": 2},
    ),
    Probe(
        "schedules, and amp", "a step that was skipped advances no schedule",
        _overflow, lambda: {"amp": 8, "schedules": [_rate_of("lr", 0.5)]},
        [[False, 8.0], [True, 8.0], [False, 8.0], -1.5, 0.0, 0.0], without={"amp": 8},
    ),
    Probe(
        "schedules of the learning rate, and lr_scheduler", "", _steps(_SAME),
        lambda: {"optimizer_params": {"lr_scheduler": _factors()},
                 "schedules": [_rate_of("lr", 0.5)]}, None,
    ),
    Probe(
        "schedules of torch, and lr_scheduler", "", _steps(_SAME),
        lambda: {"optimizer_params": {"lr_scheduler": _factors()},
                 "schedules": [_halving]}, None,
    ),
    Probe(
        "schedules of momentum, and an optimizer without", "", _steps(_SAME),
        lambda: {"optimizer": "adagrad", "schedules": [_rate_of("momentum", 0.5)]}, None,
    ),
    Probe(
        "momentum_correction, and torch's SGD", "", _steps(_SAME),
        lambda: _torchs(momentum=0.9, momentum_correction=True), None,
    ),
    Probe(
        "momentum_correction and lazy_update", "", _steps(_SAME),
        lambda: {"optimizer_params": {**_MOMENTUM, "momentum_correction": True, "lazy_update": True}}, None,
    ),
    Probe(
        "paramwise, and an optimizer that exists", "", _existing,
        lambda: {"paramwise": {"custom_keys": {"bias": {"lr_mult": 2.0}}}}, None,
    ),
    Probe(
        "amp, dynamic, and on_nonfinite='raise'", "", _steps(_SAME),
        lambda: {"amp": "dynamic", "on_nonfinite": "raise"}, None,
    ),
    Probe(
        "amp and on_nonfinite='ignore'", "", _steps(_SAME), lambda: {"amp": 8, "on_nonfinite": "ignore"}, None
    ),
    Probe(
        "amp, bfloat16, and a loss scale", "", _steps(_SAME),
        lambda: {"amp": {"dtype": "bfloat16", "loss_scale": 8}}, None,
    ),
)  # fmt: skip
"""Options that meet; those without an expected result are refused everywhere."""
