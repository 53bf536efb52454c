"""Part of a job: trains parameters of four dtypes together with every optimizer; and takes many tiny steps.

Returns the weights at the end of each run. `play` and `tiny_steps` take any store, so that the tests run the same in
their own process.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import kvtrainer
from kvtrainer.kvstore import KVStoreBase
from tests.support.dtype_runs import (
    BATCH,
    COMMON,
    HALF,
    OPTIMIZERS,
    ROWS,
    decay_of,
    gradient,
    rates,
    shapes,
    start_weight,
)
from tests.support.jobs import Results
from tests.support.workers.trajectories import set_gradients

TINY, TIMES = 2e-4, 200


def run(rank: int, workers: int) -> Results:
    results: dict[str, Any] = {}
    for has_master in (True, False):
        if workers == 1:
            results[f"tiny {has_master}"] = tiny_steps("dist_sync", True, has_master)
            continue
        for label in OPTIMIZERS:
            for in_store in sites(has_master):
                name = name_of(label, has_master, in_store)
                results[name] = play(label, has_master, rank, "dist_sync", in_store)
    return results


def sites(has_master: bool) -> tuple[bool, ...]:
    """The values of update_on_kvstore that are played."""
    return (True, False) if has_master else (True,)


def name_of(label: str, has_master: bool, in_store: bool) -> str:
    """Under which name a run's weights are delivered."""
    return f"{label}, multi_precision {has_master}, {in_store}"


def play(
    label: str, has_master: bool, rank: int, kvstore: str | KVStoreBase | None, in_store: bool | None
) -> dict[str, Tensor]:
    """The weights at the end of one run, each in its dtype."""
    parameters: dict[str, Tensor] = {}
    for dtype in ROWS:
        for key, shape in shapes(dtype).items():
            start = torch.from_numpy(start_weight(key, shape))
            parameters[key] = start.to(getattr(torch, dtype)).requires_grad_()
    case = OPTIMIZERS[label]
    options = {**COMMON, **case.options, "wd": decay_of(case.name), "multi_precision": has_master}
    with kvtrainer.Trainer(
        parameters, case.name, options, kvstore=kvstore, update_on_kvstore=in_store
    ) as trainer:
        for step, lr in enumerate(rates(case.name)):
            trainer.set_learning_rate(lr)
            grads = {key: gradient(key, tuple(p.shape), step, rank) for key, p in parameters.items()}
            set_gradients(parameters, grads)
            trainer.step(BATCH)
    return {key: parameter.detach().clone() for key, parameter in parameters.items()}


def tiny_steps(
    kvstore: str | KVStoreBase | None, in_store: bool | None, has_master: bool
) -> dict[str, float]:
    """Weights of 1.0, one of each half dtype, after TIMES steps of sgd with the gradient TINY and lr 1."""
    weights = {dtype: torch.ones(1, dtype=getattr(torch, dtype), requires_grad=True) for dtype in HALF}
    options = {"learning_rate": 1.0, "multi_precision": has_master}
    with kvtrainer.Trainer(weights, "sgd", options, kvstore=kvstore, update_on_kvstore=in_store) as trainer:
        for _ in range(TIMES):
            for weight in weights.values():
                (weight * TINY).sum().backward()  # type: ignore[no-untyped-call]
            trainer.step(1)
    return {dtype: weight.item() for dtype, weight in weights.items()}
