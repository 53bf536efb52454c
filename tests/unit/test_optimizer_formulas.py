"""Gluon's elementwise optimizers against their published formulas, written here in float64 NumPy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from kvstore_server.optimizer import SliceState, create, gluon, update_slice
from kvstore_server.plan import TensorSpec, make_plan

NUMEL = 77
RATES = [0.05, 0.02, 0.1, 0.005, 0.07, 0.01, 0.03]
BOUND = 0.8
Numbers = Any
Step = Callable[[Numbers, Numbers, dict[str, Numbers], int, float, float, dict[str, Any]], Numbers]
"""(w, rescaled g, state, t, lr, wd, options) -> new w; a missing entry of the state is 0."""


class Zeros(dict[str, Any]):
    """A state whose missing entries are 0."""

    def __missing__(self, name: str) -> float:
        return 0.0


def clip(g: Numbers, bound: float | None) -> Numbers:
    return g if bound is None else np.clip(g, -bound, bound)


def average(s: dict[str, Any], name: str, beta: float, value: Numbers) -> Numbers:
    s[name] = beta * s[name] + (1 - beta) * value
    return s[name]


def sgd(w: Numbers, g: Numbers, s: Any, t: int, lr: float, wd: float, o: Any) -> Numbers:
    g = clip(g, o["clip"]) + wd * w
    s["m"] = o.get("momentum", 0.0) * s["m"] - lr * g
    return w + s["m"]


def nag(w: Numbers, g: Numbers, s: Any, t: int, lr: float, wd: float, o: Any) -> Numbers:
    g = clip(g, o["clip"]) + wd * w
    s["m"] = o["momentum"] * s["m"] - lr * g
    return w + o["momentum"] * s["m"] - lr * g


def signum(w: Numbers, g: Numbers, s: Any, t: int, lr: float, wd: float, o: Any) -> Numbers:
    if o["momentum"] == 0:
        return (1 - lr * (wd + o["wd_lh"])) * w - lr * np.sign(g)
    s["m"] = o["momentum"] * s["m"] - (1 - o["momentum"]) * (clip(g, o["clip"]) + wd * w)
    return (1 - lr * o["wd_lh"]) * w + lr * np.sign(s["m"])


def dcasgd(w: Numbers, g: Numbers, s: Any, t: int, lr: float, wd: float, o: Any) -> Numbers:
    g = clip(g, o["clip"]) + wd * w
    before = s["before"] if t > 1 else w
    d = g + o["lamda"] * g**2 * (w - before)
    s["m"] = o["momentum"] * s["m"] - lr * d
    s["before"] = w
    return w + s["m"]


def ftml(w: Numbers, g: Numbers, s: Any, t: int, lr: float, wd: float, o: Any) -> Numbers:
    g, beta1, beta2 = clip(g, o["clip"]) + wd * w, o["beta1"], o["beta2"]
    v = average(s, "v", beta2, g**2)
    d = (1 - beta1**t) / lr * (np.sqrt(v / (1 - beta2**t)) + o["epsilon"])
    s["z"] = beta1 * s["z"] + (1 - beta1) * g - (d - beta1 * s["d"]) * w
    s["d"] = d
    return -s["z"] / d


def corrected(t: int, lr: float, o: Any) -> float:
    on = o.get("correct_bias", True)
    return lr * np.sqrt(1 - o["beta2"] ** t) / (1 - o["beta1"] ** t) if on else lr


def adam(w: Numbers, g: Numbers, s: Any, t: int, lr: float, wd: float, o: Any) -> Numbers:
    g = clip(g, o["clip"]) + wd * w
    m, v = average(s, "m", o["beta1"], g), average(s, "v", o["beta2"], g**2)
    return w - corrected(t, lr, o) * m / (np.sqrt(v) + o["epsilon"])


def adamw(w: Numbers, g: Numbers, s: Any, t: int, lr: float, wd: float, o: Any) -> Numbers:
    g = clip(g, o["clip"])
    m, v = average(s, "m", o["beta1"], g), average(s, "v", o["beta2"], g**2)
    return w - corrected(t, lr, o) * (m / (np.sqrt(v) + o["epsilon"]) + wd * w)


def adabelief(w: Numbers, g: Numbers, s: Any, t: int, lr: float, wd: float, o: Any) -> Numbers:
    g = clip(g + wd * w, o["clip"])
    m = average(s, "m", o["beta1"], g)
    s["v"] = o["beta2"] * s["v"] + (1 - o["beta2"]) * (g - m) ** 2 + o["epsilon"]
    return w - corrected(t, lr, o) * m / (np.sqrt(s["v"]) + o["epsilon"])


def adamax(w: Numbers, g: Numbers, s: Any, t: int, lr: float, wd: float, o: Any) -> Numbers:
    g = clip(g, o["clip"]) + wd * w
    m = average(s, "m", o["beta1"], g)
    s["u"] = np.maximum(o["beta2"] * s["u"], np.abs(g))
    return w - lr / (1 - o["beta1"] ** t) * m / (s["u"] + 1e-8)


def nadam(w: Numbers, g: Numbers, s: Any, t: int, lr: float, wd: float, o: Any) -> Numbers:
    g = clip(g, o["clip"]) + wd * w
    rate, following = (o["beta1"] * (1 - 0.5 * 0.96 ** (n * o["schedule_decay"])) for n in (t, t + 1))
    product = rate * (s["product"] if t > 1 else 1.0)
    s["product"] = product
    m, v = average(s, "m", o["beta1"], g), average(s, "v", o["beta2"], g**2)
    blend = following * m / (1 - product * following) + (1 - rate) * g / (1 - product)
    return w - lr * blend / (np.sqrt(v / (1 - o["beta2"] ** t)) + o["epsilon"])


def adadelta(w: Numbers, g: Numbers, s: Any, t: int, lr: float, wd: float, o: Any) -> Numbers:
    g = clip(g, o["clip"]) + wd * w
    a = average(s, "a", o["rho"], g**2)
    d = g * np.sqrt(s["b"] + o["epsilon"]) / np.sqrt(a + o["epsilon"])
    average(s, "b", o["rho"], d**2)
    return w - lr * d


def adagrad(w: Numbers, g: Numbers, s: Any, t: int, lr: float, wd: float, o: Any) -> Numbers:
    g = clip(g, o["clip"]) + wd * w
    s["h"] = s["h"] + g**2
    return w - lr * g / (np.sqrt(s["h"]) + o["epsilon"])


def rmsprop(w: Numbers, g: Numbers, s: Any, t: int, lr: float, wd: float, o: Any) -> Numbers:
    g = clip(g, o["clip"]) + wd * w
    v = average(s, "v", o["rho"], g**2)
    if not o["centered"]:
        return clip(w - lr * g / (np.sqrt(v) + o["epsilon"]), o["clip_weights"])
    m = average(s, "m", o["rho"], g)
    s["d"] = o["momentum"] * s["d"] - lr * g / np.sqrt(v - m**2 + o["epsilon"])
    return clip(w + s["d"], o["clip_weights"])


def ftrl(w: Numbers, g: Numbers, s: Any, t: int, lr: float, wd: float, o: Any) -> Numbers:
    g = clip(g, o["clip"])
    s["z"] = s["z"] + g - (np.sqrt(s["n"] + g**2) - np.sqrt(s["n"])) / lr * w
    s["n"] = s["n"] + g**2
    shrunk = np.sign(s["z"]) * np.maximum(np.abs(s["z"]) - o["lamda1"], 0)
    return -shrunk / ((np.sqrt(s["n"]) + o["beta"]) / lr + wd)


def plain(w: Numbers, g: Numbers, s: Any, t: int, lr: float, wd: float, o: Any) -> Numbers:
    return w - lr * (g + wd * w)


BETAS = dict(beta1=0.8, beta2=0.95, epsilon=1e-3)
CASES: list[tuple[str, Step, dict[str, Any]]] = [
    ("sgd", sgd, {}),
    ("sgd", sgd, dict(momentum=0.7)),
    ("nag", nag, dict(momentum=0.7)),
    ("nag", nag, dict(momentum=0.0)),
    ("signum", signum, dict(momentum=0.7, wd_lh=0.05)),
    ("signum", signum, dict(momentum=0.0, wd_lh=0.05)),
    ("dcasgd", dcasgd, dict(momentum=0.7, lamda=0.5)),
    ("dcasgd", dcasgd, dict(momentum=0.0, lamda=0.5)),
    ("ftml", ftml, BETAS),
    ("adam", adam, BETAS),
    ("adamw", adamw, BETAS),
    ("adamw", adamw, dict(BETAS, correct_bias=False)),
    ("adabelief", adabelief, BETAS),
    ("adabelief", adabelief, dict(BETAS, correct_bias=False)),
    ("adamax", adamax, dict(beta1=0.8, beta2=0.95)),
    ("nadam", nadam, dict(BETAS, schedule_decay=0.3)),
    ("adadelta", adadelta, dict(rho=0.8, epsilon=1e-3)),
    ("adagrad", adagrad, dict(epsilon=1e-3)),
    ("rmsprop", rmsprop, dict(rho=0.8, epsilon=1e-3, centered=False, clip_weights=1.1)),
    ("rmsprop", rmsprop, dict(rho=0.8, epsilon=1e-2, centered=True, clip_weights=None, momentum=0.7)),
    ("ftrl", ftrl, dict(lamda1=0.2, beta=0.5)),
    ("test", plain, {}),
]
each_case = pytest.mark.parametrize(
    ("name", "step", "options"), CASES, ids=[f"{name}-{i}" for i, (name, _, _) in enumerate(CASES)]
)


def gradients(steps: int) -> list[Numbers]:
    """Multiples of 2**-7, some beyond the bound, with few changes of sign: exact in every dtype."""
    generator = np.random.default_rng(3)
    return [np.round((generator.random(NUMEL) * 1.2 + 0.1) * 128) / 128 for _ in range(steps)]


def start() -> Numbers:
    """Multiples of 2**-6 in [-1, 1]: exact in every dtype."""
    return np.round(np.random.default_rng(4).uniform(-1, 1, NUMEL) * 64) / 64


def by_formula(step: Step, options: dict[str, Any], wd: float) -> Numbers:
    w, state = start(), Zeros()
    for t, (g, lr) in enumerate(zip(gradients(len(RATES)), RATES, strict=True), 1):
        w = step(w, 0.5 * g, state, t, lr, wd, {**options, "clip": BOUND / 2})
    return w


def by_slice(
    name: str, options: dict[str, Any], wd: float, dtype: torch.dtype, master: bool = False
) -> Numbers:
    """The weights in float64 after as many updates of one slice as there are RATES."""
    optimizer = create(name, wd=wd, clip_gradient=BOUND / 2, multi_precision=master, **options)
    piece = make_plan([TensorSpec("w", (NUMEL,), str(dtype)[6:])], 1).slices[0]
    weight, state = torch.zeros(piece.length, dtype=dtype), SliceState.empty(piece)
    weight[:NUMEL] = torch.from_numpy(start()).to(dtype)
    compute = torch.float64 if dtype == torch.float64 else torch.float32
    for g, lr in zip(gradients(len(RATES)), RATES, strict=True):
        optimizer.lr = lr
        grad = torch.zeros(piece.length, dtype=compute)
        grad[:NUMEL] = torch.from_numpy(0.5 * g)
        update_slice(optimizer, piece, weight, grad, state, [optimizer.hyper])
    assert not weight[NUMEL:].any()
    return weight[:NUMEL].double().numpy()


def relative(result: Numbers, reference: Numbers) -> float:
    return float(np.max(np.abs(result - reference) / np.maximum(np.abs(reference), 1.0)))


def test_every_optimizer_without_noise_has_its_formula_here() -> None:
    assert {name for name, _, _ in CASES} == {cls.name for cls in gluon.FAMILY} - {"sgld"}


@each_case
@pytest.mark.parametrize(
    ("dtype", "bound"), [(torch.float64, 1e-11), (torch.float32, 5e-6)], ids=["f64", "f32"]
)
def test_a_changing_learning_rate_follows_the_formula(
    name: str, step: Step, options: dict[str, Any], dtype: torch.dtype, bound: float
) -> None:
    assert relative(by_slice(name, options, 0.1, dtype), by_formula(step, options, 0.1)) <= bound


@each_case
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["f16", "bf16"])
def test_half_precision_with_a_master_ends_at_the_rounded_weights_of_float64(
    name: str, step: Step, options: dict[str, Any], dtype: torch.dtype
) -> None:
    result = by_slice(name, options, 0.1, dtype, master=True)
    assert relative(result, by_formula(step, options, 0.1)) <= torch.finfo(dtype).eps
    assert np.any(result != start())


@each_case
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["f16", "bf16"])
def test_half_precision_without_a_master_stays_within_one_rounding_per_update(
    name: str, step: Step, options: dict[str, Any], dtype: torch.dtype
) -> None:
    result = by_slice(name, options, 0.1, dtype)
    assert relative(result, by_formula(step, options, 0.1)) <= len(RATES) * torch.finfo(dtype).eps
    assert np.any(result != start())


@pytest.mark.parametrize(
    "name", ["sgd", "nag", "dcasgd", "adam", "adamw", "adamax", "rmsprop", "ftml", "test"]
)
def test_a_negative_learning_rate_climbs(name: str) -> None:
    formulas = {case_name: (step, options) for case_name, step, options in CASES}
    step, options = formulas[name]
    optimizer = create(name, lr=-0.05, **options)
    piece = make_plan([TensorSpec("w", (NUMEL,), "float64")], 1).slices[0]
    weight = torch.zeros(piece.length, dtype=torch.float64)
    weight[:NUMEL] = torch.from_numpy(start())
    grad = torch.zeros(piece.length, dtype=torch.float64)
    grad[:NUMEL] = torch.from_numpy(gradients(1)[0])
    update_slice(optimizer, piece, weight, grad, SliceState.empty(piece), [optimizer.hyper])
    expected = step(start(), gradients(1)[0], Zeros(), 1, -0.05, 0.0, {**options, "clip": None})
    assert relative(weight[:NUMEL].numpy(), expected) <= 1e-12


@pytest.mark.parametrize(
    ("name", "step", "options"), [CASES[8], CASES[9], CASES[15]], ids=["ftml", "adam", "nadam"]
)
def test_begin_num_update_counts_as_updates_that_came_before(
    name: str, step: Step, options: dict[str, Any]
) -> None:
    optimizer = create(name, lr=0.05, begin_num_update=6, **options)
    piece = make_plan([TensorSpec("w", (NUMEL,), "float64")], 1).slices[0]
    weight, state = torch.zeros(piece.length, dtype=torch.float64), SliceState.empty(piece)
    weight[:NUMEL] = torch.from_numpy(start())
    expected, reference = start(), Zeros(product=1.0)
    for t in (7, 8, 9):
        grad = torch.zeros(piece.length, dtype=torch.float64)
        grad[:NUMEL] = torch.from_numpy(gradients(9)[t - 1])
        update_slice(optimizer, piece, weight, grad, state, [optimizer.hyper])
        expected = step(expected, gradients(9)[t - 1], reference, t, 0.05, 0.0, {**options, "clip": None})
    assert relative(weight[:NUMEL].numpy(), expected) <= 1e-11
    assert state.steps == [3]
