"""Ranks of torch.distributed with different numbers of batches, in join() blocks with kvstore 'device'."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from kvtrainer import Trainer
from tests.support.jobs import Job, Results, run_job

TOUCHED = (1, 3)


def uneven(rank: int, in_store: bool) -> list[float]:
    """Rank r takes 2·r steps, then all take one; momentum and a rate that the last ones change by themselves."""
    weight = nn.Parameter(torch.zeros(3))
    options = {"learning_rate": 1.0, "momentum": 0.5}
    trainer = Trainer([weight], "sgd", options, update_on_kvstore=in_store)
    with trainer.join():
        for at in range(2 * rank):
            if at == 2:
                trainer.set_learning_rate(0.25)
            (weight * (rank + 1.0)).sum().backward()
            trainer.step(1)
    (weight * (rank + 1.0)).sum().backward()
    trainer.step(1)
    return [*weight.unique().tolist(), trainer.learning_rate]


def uneven_rows(rank: int) -> list[float]:
    """As `uneven`, with gradients of some rows, and without momentum."""
    net = nn.Embedding(5, 2, sparse=True)
    nn.init.zeros_(net.weight)
    trainer = Trainer(net, "sgd", {"learning_rate": 1.0}, update_on_kvstore=False)
    with trainer.join():
        for _ in range(rank + 1):
            (net(torch.tensor(TOUCHED)) * (rank + 1.0)).sum().backward()
            trainer.step(1)
    return net.weight[:, 0].tolist()


def uneven_ranks(rank: int, ranks: int) -> Results:
    """On a rank of a group that has its own number of batches."""
    return {**{f"uneven {site}": uneven(rank, site) for site in (True, False)}, "rows": uneven_rows(rank)}


@pytest.fixture(scope="module", params=[2, 3], ids=["2-ranks", "3-ranks"])
def job(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Job:
    folder = tmp_path_factory.mktemp("group_join")
    return run_job(uneven_ranks, folder, request.param, 1, in_group=True)


def expected(ranks: int) -> tuple[float, float]:
    """Rank r gives r + 1 in each of its 2·r steps; from the third on the rate is a quarter; then all give once more."""
    weight = buffer = 0.0
    sums = [sum(r + 1.0 for r in range(ranks) if at < 2 * r) for at in range(2 * ranks - 2)]
    rates = [1.0 if at < 2 else 0.25 for at in range(len(sums))]
    last = rates[-1]
    for total, rate in zip([*sums, sum(r + 1.0 for r in range(ranks))], [*rates, last], strict=True):
        buffer = 0.5 * buffer + rate * total
        weight -= buffer
    return weight, last


@pytest.mark.parametrize("in_store", [True, False])
def test_uneven_ranks_end_with_equal_weights_and_the_last_ones_options(job: Job, in_store: bool) -> None:
    found = job[f"uneven {in_store}"]
    assert found == [list(expected(job.workers))] * job.workers


def test_rows_of_ranks_with_data_reach_those_without(job: Job) -> None:
    moved = -sum((rank + 1.0) ** 2 for rank in range(job.workers))
    assert job["rows"] == [[0.0, moved, 0.0, moved, 0.0]] * job.workers
