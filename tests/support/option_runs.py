"""A few steps of training each, in which an option of a Trainer shows; `option_probes` says what they have to give."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from kvtrainer.errors import AnomalousParametersError, NonFiniteGradientError
from kvtrainer.lr_scheduler import FactorScheduler
from tests.support.option_bench import Bench

Run = Callable[[Bench, Mapping[str, Any]], Any]
"""Builds the Trainer with the options given, trains, and returns what was seen."""


def steps(*pushes: tuple[float, ...]) -> Run:
    """The weights after these gradients."""

    def run(bench: Bench, options: Mapping[str, Any]) -> Any:
        bench.build(**options)
        for slopes in pushes:
            bench.push(*slopes)
        return bench.weights()

    return run


def norms(bench: Bench, options: Mapping[str, Any]) -> Any:
    bench.build(**options)
    result = bench.push(3.0, 4.0)
    return [result.grad_norm, result.clip_coef, *bench.weights()]


def overflow(bench: Bench, options: Mapping[str, Any]) -> Any:
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


def autocast(bench: Bench, options: Mapping[str, Any]) -> Any:
    """1 + 2^-8 is 1 in bfloat16."""
    bench.build(**options)
    with bench.trainer.context():
        x = torch.tensor([[1.00390625, 0.0]])
        losses = [torch.nn.functional.linear(x, w.unsqueeze(0)).sum() for w in bench.w]
    bench.trainer.update_params(losses)
    return bench.weights()


def accumulated(bench: Bench, options: Mapping[str, Any]) -> Any:
    bench.build(**options)
    seen = []
    for slope in (1.0, 3.0):
        result = bench.push(slope)
        seen += [result.updated, bench.weights()[0]]
    return seen


def epochs(bench: Bench, options: Mapping[str, Any]) -> Any:
    bench.build(**options)
    for _ in range(2):
        bench.push(1.0)
        bench.push(1.0)
        bench.trainer.end_epoch()
    return bench.weights()


def metrics(bench: Bench, options: Mapping[str, Any]) -> Any:
    """Three epochs of one update, after each of which a metric is what it was."""
    bench.build(**options)
    for _ in range(3):
        bench.push(1.0)
        bench.trainer.end_epoch(1.0)
    return bench.weights()


def anomalies(bench: Bench, options: Mapping[str, Any]) -> Any:
    bench.build(**options)
    try:
        bench.trainer.update_params(bench.losses(1.0, leaves_out_bias=True))
    except AnomalousParametersError:
        return ["raises", bench.weights()[0]]
    return [sum("bias with shape" in text for text in bench.logged), bench.weights()[0]]


def corrected(bench: Bench, options: Mapping[str, Any]) -> Any:
    """The learning rate falls to a tenth after the first step."""
    bench.build(**options)
    bench.push(1.0)
    bench.trainer.set_learning_rate(0.1)
    bench.push(1.0)
    return bench.weights()


def half(bench: Bench, options: Mapping[str, Any]) -> Any:
    """Two steps of 2e-4 from 1.0: neither shows in float16 by itself, both together do."""
    bench.build(start=1.0, dtype=torch.float16, **options)
    for _ in range(2):
        bench.push(1.0)
    return bench.weights()


def existing(bench: Bench, options: Mapping[str, Any]) -> Any:
    """The optimizer is an instance of torch's class, whose groups are what is trained."""
    bench.build(optimizer=torch.optim.SGD([torch.zeros(1)], 1.0), **options)
    return bench.weights()


def collectives(bench: Bench, options: Mapping[str, Any]) -> Any:
    """How many sums over the ranks one step takes."""
    bench.build(**options)
    bench.push(1.0, 0.0, 1.0)
    with mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as called:
        bench.push(1.0, 0.0, 1.0)
    return [called.call_count, *bench.weights()]


def rate_of(name: str, factor: float) -> dict[str, Any]:
    return {"policy": "step", "step": [1], "gamma": factor, "by_epoch": False, "name": name}


def factors() -> FactorScheduler:
    return FactorScheduler(step=1, factor=0.5, base_lr=1.0)


def plateau(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)


def halving(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)


def torchs(**options: Any) -> dict[str, Any]:
    return {"optimizer": torch.optim.SGD, "optimizer_params": options}


NORM = {"clip_grad": {"max_norm": 1.0}}
MOMENTUM: dict[str, Any] = {"momentum": 0.9}
TWO_BIT: dict[str, Any] = {"compression_params": {"type": "2bit", "threshold": 0.5}}
SAME = (1.0, 0.0, 1.0)
