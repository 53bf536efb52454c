"""For every option of a Trainer: steps whose result differs from those without it, and what it has to be.

What is expected is worked out by hand, or is what plain torch gives; see each run. A run trains a small model in front
of one store and one site of the update.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

import kvtrainer
from kvtrainer.errors import AnomalousParametersError, NonFiniteGradientError
from kvtrainer.kvstore import KVStoreBase
from kvtrainer.lr_scheduler import FactorScheduler
from kvtrainer.schedules.param_schedule import ParamSchedule
from kvtrainer.types import StepResult


@dataclass(frozen=True)
class Place:
    """A store, and how many copies of each parameter the process has."""

    title: str
    make: Callable[[], Any]
    copies: int = 1
    is_sync: bool = True
    """False where every contribution is an update of its own."""


class Bench:
    """Trains `w`, of two elements, and `bias`, of one; both start at zero unless told otherwise.

    All numbers are means over workers and copies, so every place gives the same.
    """

    def __init__(self, place: Place, site: bool | None) -> None:
        self.place, self.site = place, site
        self.is_built = False
        """Whether the Trainer was made and configured."""
        self.logged: list[str] = []
        self._open: list[Any] = []
        self.w: list[Tensor] = []
        self.bias: list[Tensor] = []
        self.trainer: Any = None
        self._rank = dist.get_rank() if dist.is_initialized() else 0

    def build(
        self,
        optimizer: Any = "sgd",
        optimizer_params: dict[str, Any] | None = None,
        configure: dict[str, Any] | None = None,
        start: float = 0.0,
        dtype: torch.dtype = torch.float32,
        **options: Any,
    ) -> None:
        """Make the Trainer; any error of the library is one at construction then."""
        copies = range(self.place.copies)
        self.w = [nn.Parameter(torch.full((2,), start, dtype=dtype)) for _ in copies]
        self.bias = [nn.Parameter(torch.full((1,), start, dtype=dtype)) for _ in copies]
        store = self.place.make()
        if isinstance(store, KVStoreBase):
            self._open.append(store)
        params = (
            {"w": self.w, "bias": self.bias} if len(copies) > 1 else {"w": self.w[0], "bias": self.bias[0]}
        )
        rate = {"lr": 1.0} if isinstance(optimizer, type) else {"learning_rate": 1.0}
        given = {**rate, **(optimizer_params or {})} if isinstance(optimizer, str | type) else None
        made = kvtrainer.Trainer(
            params, optimizer, given, store, options.pop("compression_params", None), self.site, **options
        )
        self._open.insert(0, made)
        self.trainer = made
        if configure:
            made.configure(**configure)
        self.is_built = True

    def losses(self, *slopes: float, bad: bool = False, leaves_out_bias: bool = False) -> list[Tensor]:
        """Losses with these gradients of w[0], w[1] and bias; `bad`: infinite on the first worker."""
        first = math.inf if bad and self._rank == 0 else 1.0
        a, b, c = (*slopes, 0.0, 0.0)[:3]
        made = []
        for w, bias in zip(self.w, self.bias, strict=True):
            loss = (w * torch.tensor([a * first, b], dtype=w.dtype)).sum()
            made.append(loss if leaves_out_bias else loss + c * bias.sum())
        return made

    def push(self, *slopes: float, bad: bool = False) -> StepResult:
        """One update of the Trainer."""
        result = self.trainer.update_params(self.losses(*slopes, bad=bad))
        assert isinstance(result, StepResult)
        return result

    def weights(self) -> list[float]:
        """w[0], w[1], bias; the same in every copy."""
        found = [[*w.tolist(), *bias.tolist()] for w, bias in zip(self.w, self.bias, strict=True)]
        assert all(str(one) == str(found[0]) for one in found), f"copies differ: {found}"
        return found[0]

    def close(self) -> None:
        for one in self._open:
            one.close()
        self._open = []


@contextmanager
def bench_at(place: Place, site: bool | None) -> Iterator[Bench]:
    """A bench whose `logged` gets what the library logs as a warning or an error; closed with the block."""
    bench = Bench(place, site)
    logger, handler = logging.getLogger("kvtrainer"), _Keeper(bench.logged)
    propagates, logger.propagate = logger.propagate, False
    logger.addHandler(handler)
    try:
        yield bench
    finally:
        bench.close()
        logger.removeHandler(handler)
        logger.propagate = propagates


class _Keeper(logging.Handler):
    def __init__(self, kept: list[str]) -> None:
        super().__init__(logging.WARNING)
        self._kept = kept

    def emit(self, record: logging.LogRecord) -> None:
        self._kept.append(record.getMessage())


# ---------------------------------------------------------------- a few steps each, in which an option shows

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


def overlapped(bench: Bench, options: Mapping[str, Any]) -> Any:
    """Whether gradients went before the third step, and in it; the first ones make the store, and learn their order."""
    with mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as called:

        def gone() -> int:
            """The bytes that came to servers, or the sums over ranks."""
            rows = [row for one in bench.trainer.server_stats() for row in one["tables"]]
            return called.call_count + sum(row["bytes_in"] for row in rows)

        bench.build(**options)
        bench.push(1.0)
        bench.push(1.0)
        before = gone()
        bench.trainer.backward(bench.losses(1.0))
        ahead = gone()
        bench.trainer.step()
        return [ahead > before, gone() == ahead, *bench.weights()]


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


# ---------------------------------------------------------------- what they have to give


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
        "paramwise", "the update of a bias is twice as large",
        steps(SAME), lambda: {"paramwise": {"custom_keys": {"bias": {"lr_mult": 2.0}}}}, [-1.0, 0.0, -2.0],
    ),
    Probe(
        "clip_grad, norm", "the norm before clipping, the coefficient, and clipped weights",
        norms, lambda: NORM, [5.0, 0.2, -0.6, -0.8, 0.0],
    ),
    Probe(
        "clip_grad, value", "clipped weights",
        steps((2.0, -0.25)), lambda: {"clip_grad": {"type": "value", "clip_value": 0.5}}, [-0.5, 0.25, 0.0],
    ),
    Probe(
        "clip_grad, error_if_nonfinite", "one worker's infinite gradient raises on all workers; nothing changes",
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
        "amp, bfloat16", "the forward pass computes in bfloat16",
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
        "schedules, by a metric", "the update after the metric stopped improving is half as large",
        metrics, lambda: {"schedules": [plateau]}, [-2.5, 0.0, 0.0],
    ),
    Probe(
        "detect_anomalous_params, log", "a parameter that does not contribute to the loss is logged as an error",
        anomalies, lambda: {"detect_anomalous_params": True}, [1, -1.0],
    ),
    Probe(
        "detect_anomalous_params, raise", "such a parameter raises before anything changes",
        anomalies, lambda: {"detect_anomalous_params": "raise"}, ["raises", 0.0],
    ),
    Probe(
        "on_nonfinite, raise", "one worker's infinite gradient raises on all workers; nothing changes",
        overflow, lambda: {"on_nonfinite": "raise"}, [[False, 1.0], "raises", [False, 1.0], -2.0, 0.0, 0.0],
    ),
    Probe(
        "on_nonfinite, skip", "one worker's infinite gradient skips the step on all workers",
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
        "compression_params", "2-bit threshold: each of two gradients of 0.7 arrives as 0.5",
        steps((0.7,), (0.7,)), lambda: TWO_BIT, [-1.0, 0.0, 0.0],
    ),
    Probe(
        "compression_params: pull",
        "two updates accumulate that bfloat16 would each round away: 1 + 2⁻⁹ + 2⁻⁸, rounded",
        steps((1.0,), (2.0**-9,), (2.0**-8,)), lambda: {"compression_params": {"pull": "bf16"}},
        [-1.0 - 2.0**-7, 0.0, 0.0],
    ),
    Probe(
        "compression_params: pull, changes", "2-bit threshold: each of two updates of 0.7 comes back as 0.5",
        steps((0.7,), (0.7,)), lambda: {"compression_params": {"pull": TWO_BIT["compression_params"]}},
        [-1.0, 0.0, 0.0],
    ),
    Probe(
        "overlap", "the whole gradient is sent before the step, and not again in it",
        overlapped, lambda: {"overlap": True}, [True, True, -3.0, 0.0, 0.0],
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
        "optimizer_params: multi_precision", "two updates accumulate that float16 would each round away",
        half, lambda: {"optimizer_params": {"learning_rate": 2e-4, "multi_precision": True}},
        [0.99951171875, 1.0, 1.0], without={"optimizer_params": {"learning_rate": 2e-4}},
    ),
    Probe(
        "optimizer_params: multi_precision, torch's SGD", "two updates accumulate that float16 would each round away",
        half, lambda: torchs(lr=2e-4, multi_precision=True),
        [0.99951171875, 1.0, 1.0], without=torchs(lr=2e-4),
    ),
    Probe(
        "configure(coalesce=False)", "every parameter is summed separately",
        collectives, lambda: {"configure": {"coalesce": False}}, [2, -2.0, 0.0, -2.0],
    ),
    Probe(
        "configure(bucket_size_mb=…)", "buckets of at most that size",
        collectives, lambda: {"configure": {"bucket_size_mb": 64 / 2**20}}, [2, -2.0, 0.0, -2.0],
    ),
)  # fmt: skip


# ---------------------------------------------------------------- options that meet

PAIRS = (
    Probe(
        "clip_grad, value, and compression_params", "the decoded gradients are summed, then clipped; without "
        "rounds clipped, then compressed",
        steps((0.7,), (0.7,)), lambda: {"clip_grad": {"type": "value", "clip_value": 0.3}, **TWO_BIT},
        [-0.6, 0.0, 0.0], without=TWO_BIT, without_rounds=[-0.5, 0.0, 0.0],
    ),
    Probe(
        "on_nonfinite, skip, and compression_params",
        "one worker's infinite gradient skips the step on all workers, and is not compressed",
        overflow, lambda: {"on_nonfinite": "skip", **TWO_BIT},
        [[False, 1.0], [True, 1.0], [False, 1.0], -1.0, 0.0, 0.0],
    ),
    Probe(
        "paramwise and schedules", "the schedule scales the learning rate of a bias in proportion",
        steps(SAME, SAME),
        lambda: {"paramwise": {"custom_keys": {"bias": {"lr_mult": 2.0}}}, "schedules": [rate_of("lr", 0.5)]},
        [-1.5, 0.0, -3.0],
    ),
    Probe(
        "amp and compression_params", "threshold and residual apply to the gradient without the loss scale",
        steps((0.7,), (0.7,)), lambda: {"amp": 8, **TWO_BIT}, [-1.0, 0.0, 0.0],
    ),
    Probe(
        "amp, clip_grad and accumulate", "the mean of two gradients is unscaled, then clipped",
        accumulated, lambda: {"amp": 8, "accumulate": 2, **NORM}, [False, 0.0, True, -1.0],
        without={"amp": 8, "accumulate": 2},
    ),
    Probe(
        "schedules, and amp", "a skipped step advances no schedule",
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
