"""A third-party all-reduce store over real processes: by name and by object, with MXNet's numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import kvtrainer
from tests.support.allreduce import AllReduce
from tests.support.jobs import Job, Results, run_job

KEYS = 20
"""MXNet's test has 400; each is a message of its own here."""
REPLICAS = 2


def verbs(rank: int) -> dict[str, Any]:
    """Broadcast of many keys, then in-place pushpull, several times over."""
    store = kvtrainer.kvstore.create("AllReduce")
    first = [torch.empty(2, 3) for _ in range(KEYS)]
    for key, out in enumerate(first):
        store.broadcast(key, torch.full((2, 3), float(key)) * (1 + rank), out)
    sums = [[torch.full((2, 3), rank + 1.0) for _ in range(REPLICAS)] for _ in range(3)]
    for values in sums:
        store.pushpull(0, values)
    return {"type": store.type, "first": first, "sums": sums}


def trained(kvstore: Any, rank: int) -> list[Tensor]:
    """The weights after each of two steps of MXNet's test of Trainers: y = (rank + 1) · w, learning rate 1."""
    weight = torch.nn.Parameter(torch.full((10, 1), 1.0 + rank))  # rank 0's ones count
    seen = []
    with kvtrainer.Trainer([weight], "sgd", {"learning_rate": 1.0}, kvstore=kvstore) as trainer:
        for _ in range(2):
            ((rank + 1) * weight).sum().backward()
            trainer.step(1)
            seen.append(weight.detach().clone())
    return seen


def run(rank: int, workers: int) -> Results:
    return {**verbs(rank), "by_name": trained("allreduce", rank), "by_object": trained(AllReduce(), rank)}


@pytest.fixture(scope="module", params=[2, 3])
def job(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Job:
    return run_job(run, tmp_path_factory.mktemp("allreduce"), request.param, 0, in_group=True)


def test_it_is_known_by_the_name_of_its_class_and_every_worker_starts_with_the_values_of_rank_0(
    job: Job,
) -> None:
    assert job["type"] == ["allreduce"] * job.workers
    for first in job["first"]:
        assert [value.unique().tolist() for value in first] == [[float(key)] for key in range(KEYS)]


def test_sums_in_place_are_those_of_all_workers_and_replicas_and_do_not_add_up(job: Job) -> None:
    expected = [job.workers * (job.workers + 1) * REPLICAS / 2]
    for rounds in job["sums"]:
        assert all(value.unique().tolist() == expected for values in rounds for value in values)


@pytest.mark.parametrize("how", ["by_name", "by_object"])
def test_a_trainer_with_one_device_per_process_sums_over_the_processes(job: Job, how: str) -> None:
    total = job.workers * (job.workers + 1) / 2
    for weights in job[how]:
        assert [one.unique().tolist() for one in weights] == [[1.0 - total], [1.0 - 2 * total]]
