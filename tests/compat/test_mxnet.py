"""Every one of Gluon's optimizers and schedulers against live MXNet, on random runs."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import kvtrainer.lr_scheduler
from kvstore_server.optimizer import gluon, layerwise
from kvtrainer import Trainer
from tests.compat.conftest import Ask
from tests.compat.random_cases import OWN, STEPS, random_case

pytestmark = pytest.mark.compat

RUNS = 30
OF_WEIGHT = 2e-5
"""Largest difference after any step, relative to the largest weight of the key."""
OF_CHANGE = 1e-4
"""Largest difference at the end, relative to how far a weight of the key has moved: small steps show, too."""


def our_trajectory(case: dict[str, Any]) -> list[list[np.ndarray]]:
    keys, options = case["keys"], {"learning_rate": case["steps"][0]["lr"], **case["options"]}
    weights = [torch.nn.Parameter(torch.tensor(key["weight"]).view(key["shape"])) for key in keys]
    groups = [
        {"params": [p], "param_names": [key["name"]], "weight_decay": options.get("wd", 0.0) * key["wd_mult"]}
        for p, key in zip(weights, keys, strict=True)
    ]
    trainer = Trainer(groups, case["name"], options, kvstore=None)
    after = []
    for step in case["steps"]:
        for group, p, key, grad in zip(trainer.param_groups, weights, keys, step["grads"], strict=True):
            group["lr"] = step["lr"] * key["lr_mult"]
            p.grad = torch.tensor(grad).view(p.shape)
        trainer.step(1 / step["rescale"])
        after.append([p.detach().reshape(-1).numpy().copy() for p in weights])
    return after


def assert_same(ours: list[list[np.ndarray]], theirs: list[list[list[float]]], case: dict[str, Any]) -> None:
    assert len(ours) == len(theirs) == STEPS
    for step, (after, expected) in enumerate(zip(ours, theirs, strict=True)):
        for mine, other, key in zip(after, map(np.array, expected), case["keys"], strict=True):
            error, moved = np.abs(mine - other).max(), np.abs(other - key["weight"]).max()
            # Written so that nan fails.
            assert error <= OF_WEIGHT * np.abs(other).max(), (step, key["name"], case["options"])
            assert step < STEPS - 1 or error <= OF_CHANGE * moved, (moved, key["name"], case["options"])


def one_deviation(stream: object, first: int, count: int, device: torch.device) -> Tensor:
    return torch.ones(count, dtype=torch.float64, device=device)


@pytest.fixture(scope="module")
def runs(ask_mxnet: Ask) -> dict[str, list[tuple[dict[str, Any], list[Any]]]]:
    """By name of the optimizer, the random runs and where they went in MXNet."""
    cases = [random_case(name, seed) for name in OWN for seed in range(RUNS)]
    answers = iter(ask_mxnet({"optimizers": cases})["optimizers"])
    return {name: [(case, next(answers)) for case in cases if case["name"] == name] for name in OWN}


@pytest.mark.parametrize("name", OWN)
def test_random_runs_go_where_mxnet_goes(
    name: str, runs: dict[str, list[tuple[dict[str, Any], list[Any]]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    # SGLD's noise differs, of course; with one standard deviation everywhere there is something to compare.
    monkeypatch.setattr(gluon, "normal", one_deviation)
    assert len(runs[name]) == RUNS
    for case, expected in runs[name]:
        assert_same(our_trajectory(case), expected, case)


def test_every_optimizer_of_gluon_is_compared() -> None:
    gluons = {cls.name for cls in (*gluon.FAMILY, *layerwise.FAMILY)}
    assert set(OWN) == gluons


NAMES = ["FactorScheduler", "MultiFactorScheduler", "PolyScheduler", "CosineScheduler"]
UPDATES = list(range(60))


def random_arguments(name: str, draw: random.Random) -> dict[str, Any]:
    warmup = draw.choice([0, draw.randint(1, 12)])
    arguments: dict[str, Any] = {
        "base_lr": draw.uniform(0.5, 2),
        "warmup_steps": warmup,
        "warmup_begin_lr": draw.choice([0, draw.uniform(0, 0.5)]),
        "warmup_mode": draw.choice(["linear", "constant"]),
    }
    if name == "FactorScheduler":
        stop = draw.choice([1e-8, draw.uniform(0, 0.4)])
        return {
            **arguments,
            "step": draw.randint(1, 12),
            "factor": draw.uniform(0, 1),
            "stop_factor_lr": stop,
        }
    if name == "MultiFactorScheduler":
        steps = sorted(draw.sample(range(1, 50), draw.randint(1, 8)))
        return {**arguments, "step": steps, "factor": draw.uniform(0, 1)}
    arguments |= {"max_update": warmup + draw.randint(1, 50), "final_lr": draw.uniform(0, 0.5)}
    return {**arguments, "pwr": draw.choice([1, 2, 3])} if name == "PolyScheduler" else arguments


@pytest.mark.parametrize("name", NAMES)
def test_random_schedules_are_those_of_mxnet(name: str, ask_mxnet: Ask) -> None:
    draw = random.Random(name)
    cases: list[dict[str, Any]] = [
        {"name": name, "arguments": random_arguments(name, draw), "updates": UPDATES} for _ in range(40)
    ]
    theirs = ask_mxnet({"schedulers": cases})["schedulers"]
    for case, expected in zip(cases, theirs, strict=True):
        ours = getattr(kvtrainer.lr_scheduler, name)(**case["arguments"])
        assert [ours(n) for n in UPDATES] == expected, case
