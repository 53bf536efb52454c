"""The schedulers against live MXNet, with random arguments."""

from __future__ import annotations

import random
from typing import Any

import pytest

import kvtrainer.lr_scheduler
from tests.compat.conftest import Ask

pytestmark = pytest.mark.compat

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
