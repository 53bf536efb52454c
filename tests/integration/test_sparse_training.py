"""Two workers train embeddings by rows on one and on three servers, as one process that has all rows would."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kvtrainer import Trainer
from tests.support.jobs import Job, Results, run_job
from tests.support.sparse_model import CASES, Embeddings, batches


def trained(name: str, rank: int) -> Results:
    """The weights after each worker's own batches; a rank may have no rows of a table at all."""
    optimizer, options = CASES[name]
    model = Embeddings()
    with Trainer(model, optimizer, options, "dist_sync") as trainer:
        for big, small in batches(rank):
            model(big, small).backward()
            trainer.step(1)
    return {"weights": [p.detach().clone() for p in model.parameters()]}


def train_embeddings(rank: int, workers: int) -> Results:
    return {name: trained(name, rank) for name in CASES}


@pytest.fixture(scope="module", params=[1, 3], ids=["1-server", "3-servers"])
def job(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Job:
    return run_job(train_embeddings, tmp_path_factory.mktemp("sparse"), 2, request.param)


def in_one_process(optimizer: Any, model: Embeddings) -> list[Tensor]:
    for (big_0, small_0), (big_1, small_1) in zip(batches(0), batches(1), strict=True):
        optimizer.zero_grad()
        (model(big_0, small_0) + model(big_1, small_1)).backward()
        optimizer.step()
    return [p.detach() for p in model.parameters()]


@pytest.mark.parametrize("name", ["torch:SGD", "torch:Adagrad", "torch:SparseAdam"])
def test_torchs_optimizers_give_the_weights_of_plain_torch(job: Job, name: str) -> None:
    model = Embeddings()
    options = CASES[name][1]
    expected = in_one_process(
        getattr(torch.optim, name.removeprefix("torch:"))(model.parameters(), **options), model
    )
    for result in job[name]:
        for found, one in zip(result["weights"], expected, strict=True):
            torch.testing.assert_close(found, one, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", [name for name in CASES if not name.startswith("torch")])
def test_gluons_optimizers_give_the_weights_of_one_process(job: Job, name: str) -> None:
    model = Embeddings()
    optimizer, options = CASES[name]
    trainer = Trainer(model, optimizer, options, kvstore=None)
    for (big_0, small_0), (big_1, small_1) in zip(batches(0), batches(1), strict=True):
        (model(big_0, small_0) + model(big_1, small_1)).backward()
        trainer.step(1)
    for result in job[name]:
        for found, one in zip(result["weights"], [p.detach() for p in model.parameters()], strict=True):
            torch.testing.assert_close(found, one, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", CASES)
def test_all_workers_have_the_same_weights(job: Job, name: str) -> None:
    first, second = (result["weights"] for result in job[name])
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
