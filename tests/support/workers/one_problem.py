"""Part of a job: trains the coupled model with every optimizer at both update sites, one Trainer after another.

Returns the weights that it ends with, and how many rounds each server applied.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import kvtrainer
from tests.support.coupled_model import (
    BATCH,
    BIAS_RATE,
    BIASES,
    CASES,
    MULTIPLIERS,
    STEPS,
    Case,
    batch_of,
    loss_of,
    rate_factor,
    start_weights,
)
from tests.support.jobs import Results


def run(rank: int, workers: int) -> Results:
    results: dict[str, Any] = {}
    for name, case in CASES.items():
        for in_store in (True, False):
            results[f"{name} {in_store}"] = train(case, in_store, rank, workers)
    return results


def train(case: Case, in_store: bool, rank: int, workers: int) -> dict[str, Any]:
    weights = {name: weight.requires_grad_() for name, weight in start_weights().items()}
    with _trainer(case, weights, in_store) as trainer:
        schedule = torch.optim.lr_scheduler.LambdaLR(trainer, rate_factor)
        for step in range(STEPS):
            for kind, changed in MULTIPLIERS.get(step, {}).items():
                for name, value in changed.items():
                    setattr(weights[name], kind, value)
            loss_of(weights, *batch_of(step, rank)).backward()  # type: ignore[no-untyped-call]
            trainer.step(workers * BATCH)
            schedule.step()
        applied = [[row["rounds_applied"] for row in stats["tables"]] for stats in trainer.server_stats()]
    return {
        "weights": {name: weight.detach().clone() for name, weight in weights.items()},
        "applied": applied,
    }


def _trainer(case: Case, weights: dict[str, Tensor], in_store: bool) -> kvtrainer.Trainer:
    groups = [
        {"params": [(name, weight) for name, weight in weights.items() if name not in BIASES]},
        {"params": [(name, weights[name]) for name in BIASES], "lr": case.lr * BIAS_RATE},
    ]
    options = {"lr": case.lr, **case.options}
    return kvtrainer.Trainer(groups, case.optimizer, options, kvstore="dist_sync", update_on_kvstore=in_store)
