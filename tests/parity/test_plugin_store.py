"""A third-party all-reduce store over real processes: by name and by object, with MXNet's numbers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.jobs import Job, run_job
from tests.support.workers.allreduce import KEYS, REPLICAS, run


@pytest.fixture(scope="module", params=[2, 3])
def job(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Job:
    folder: Path = tmp_path_factory.mktemp("allreduce")
    return run_job(run, folder, request.param, 0, in_group=True)


def test_it_is_known_by_the_name_of_its_class_in_lower_case(job: Job) -> None:
    assert job["type"] == ["allreduce"] * job.workers


def test_every_worker_starts_with_the_values_of_rank_0(job: Job) -> None:
    for first in job["first"]:
        assert [value.unique().tolist() for value in first] == [[float(key)] for key in range(KEYS)]


def test_sums_in_place_are_those_of_all_workers_and_replicas_and_do_not_add_up(job: Job) -> None:
    expected = job.workers * (job.workers + 1) * REPLICAS / 2
    for rounds in job["sums"]:
        assert [[value.unique().tolist() for value in values] for values in rounds] == [
            [[expected]] * REPLICAS
        ] * 3


@pytest.mark.parametrize("how", ["by_name", "by_object"])
def test_a_trainer_with_one_device_per_process_sums_over_the_processes(job: Job, how: str) -> None:
    total = job.workers * (job.workers + 1) / 2
    for weights in job[how]:
        assert torch.equal(weights[0], torch.full((10, 1), 1.0 - total))
        assert torch.equal(weights[1], torch.full((10, 1), 1.0 - 2 * total))


def test_what_such_a_store_cannot_do_is_refused(job: Job) -> None:
    for said in job["refusals"]:
        assert "'allreduce' cannot run a Trainer's optimizer" in said["update_on_kvstore"]
        assert "not supported for this type of kvstore: 'allreduce'" in said["compression"]
        assert "row-sparse, but kvstore 'allreduce' sums dense gradients only" in said["sparse"]
