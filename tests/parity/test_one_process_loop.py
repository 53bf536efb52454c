"""W workers with batch b train as one process with batch W · b does, for every optimizer and both update sites.

The oracle is a plain float64 torch loop (tests/support/float64_loop.py). Its sums are the same sums in another
order, so after 25 steps weights differ by rounding alone.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import kvtrainer
from kvstore_server.optimizer.torch_family import ELEMENTWISE
from kvstore_server.plan import TensorSpec, make_plan
from tests.support import float64_loop
from tests.support.coupled_model import (
    BATCH,
    BIAS_RATE,
    BIASES,
    CASES,
    MULTIPLIERS,
    SHAPES,
    STEPS,
    Case,
    batch_of,
    loss_of,
    rate_factor,
    start_weights,
)
from tests.support.jobs import Job, PartOfJob, Results
from tests.support.sizes import sizes


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


TOLERANCE = 1e-11
SITES = [pytest.param(True, id="store"), pytest.param(False, id="worker")]


@pytest.fixture(scope="module", params=sizes((2, 2), workers=(2, 3), servers=(2,)))
def job(request: pytest.FixtureRequest, part_of_job: PartOfJob) -> Job:
    return part_of_job("one_problem", *request.param)


def farthest(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    """The greatest difference of any element."""
    return max(float((a[name] - b[name]).abs().max()) for name in SHAPES)


@pytest.mark.parametrize("in_store", SITES)
@pytest.mark.parametrize("case", CASES)
def test_workers_and_servers_train_as_one_process_does(job: Job, case: str, in_store: bool) -> None:
    expected = float64_loop.train(CASES[case], job.workers)
    assert farthest(start_weights(), expected) > 0.01
    for rank, seen in enumerate(job[f"{case} {in_store}"]):
        assert farthest(seen["weights"], expected) <= TOLERANCE, f"rank {rank}"


def test_every_server_took_part_in_every_round(job: Job) -> None:
    specs = [TensorSpec(name, SHAPES[name], "float64") for name in (*(SHAPES.keys() - {*BIASES}), *BIASES)]
    plan = make_plan(specs, job.servers)
    key = [spec.key for spec in specs].index("W2")
    holders = {piece.server for piece in plan.slices for segment in piece.segments if segment.key == key}
    assert holders == set(range(job.servers))
    assert job["sgd True"][0]["applied"] == [[STEPS]] * job.servers


def test_every_elementwise_optimizer_of_torch_has_a_case() -> None:
    assert {f"torch:{cls.__name__}" for cls in ELEMENTWISE} <= {case.optimizer for case in CASES.values()}


@pytest.mark.parametrize("case", CASES)
def test_the_problem_depends_on_every_worker_and_stays_bounded(case: str) -> None:
    # A run that blows up would amplify rounding without limit, and prove nothing.
    two, three = (float64_loop.train(CASES[case], workers) for workers in (2, 3))
    assert farthest(two, three) > 1e-4
    assert all(weight.abs().max() < 3 for weights in (two, three) for weight in weights.values())
