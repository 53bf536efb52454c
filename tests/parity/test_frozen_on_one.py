"""A parameter that only some workers train stays the same on all of them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import kvtrainer
from tests.support.jobs import Job, Results, run_job


def train(rank: int, update_on_kvstore: bool) -> list[torch.Tensor]:
    """Three steps in which only rank 0 trains the bias."""
    torch.manual_seed(0)
    net = torch.nn.Linear(3, 2)
    net.bias.requires_grad_(rank == 0)
    options = {"learning_rate": 0.5, "momentum": 0.5, "wd": 0.125}
    with (
        kvtrainer.kvstore.create("dist_sync") as kv,
        kvtrainer.Trainer(
            net.named_parameters(), "sgd", options, kvstore=kv, update_on_kvstore=update_on_kvstore
        ) as trainer,
    ):
        for step in range(3):
            net(torch.full((1, 3), float(rank + step))).sum().backward()
            trainer.step(1)
        kv.barrier()
    return [p.detach().clone() for p in net.parameters()]


def train_at_both_sites(rank: int, workers: int) -> Results:
    return {"in_store": train(rank, True), "in_worker": train(rank, False)}


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    folder: Path = tmp_path_factory.mktemp("frozen")
    return run_job(train_at_both_sites, folder, 2, 1)


@pytest.mark.parametrize("site", ["in_store", "in_worker"])
def test_weights_stay_equal_when_a_parameter_is_frozen_on_one_worker(job: Job, site: str) -> None:
    first, second = job[site]
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("site", ["in_store", "in_worker"])
def test_the_bias_follows_the_gradient_of_the_one_worker_that_trains_it(job: Job, site: str) -> None:
    # Plain float64 arithmetic of Gluon's rule, m = μ m − lr (g + wd w); w += m, with g = 1 from rank 0 alone.
    torch.manual_seed(0)
    expected = torch.nn.Linear(3, 2).bias.detach().double()
    momentum = torch.zeros(2, dtype=torch.float64)
    for _ in range(3):
        momentum = 0.5 * momentum - 0.5 * (1.0 + 0.125 * expected)
        expected = expected + momentum
    torch.testing.assert_close(job[site][0][1].double(), expected, rtol=0, atol=1e-6)
