"""Two ranks of torch.distributed: what they sum in one collective, and replicas that each of them has."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.jobs import Job, run_job


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    folder = tmp_path_factory.mktemp("buckets")
    return run_job("replicas_and_buckets", folder, 2, 1, str(folder))


def bucket(job: Job, name: str) -> Any:
    first, second = (found[name] for found in job["buckets"])
    assert first == second
    return first


def test_gradients_of_a_dtype_are_summed_in_one_bucket_if_they_fit(job: Job) -> None:
    assert len(bucket(job, "default")["sizes"]) == 1
    assert bucket(job, "one") == bucket(job, "default")


def test_buckets_are_no_larger_than_asked_for_and_the_sum_is_the_same(job: Job) -> None:
    whole, small = bucket(job, "default"), bucket(job, "small")
    assert small["weights"] == whole["weights"] == [[-(6.0 * 2**k) - 2] for k in range(3)]
    assert max(small["sizes"]) == 512
    assert sum(small["sizes"]) == sum(whole["sizes"])
    assert bucket(job, "set before") == small


def test_half_precision_is_counted_as_the_float32_that_travels(job: Job) -> None:
    assert max(bucket(job, "half")["sizes"]) == 512
    assert bucket(job, "half")["weights"] == bucket(job, "default")["weights"]


def test_without_coalescing_every_parameter_has_a_collective(job: Job) -> None:
    each = bucket(job, "each")
    assert each["weights"] == bucket(job, "default")["weights"]
    assert len(each["sizes"]) == 3


def test_bucket_size_stays_after_the_first_step(job: Job) -> None:
    assert "cannot change after the first step" in bucket(job, "set after")


@pytest.mark.parametrize("name", ["bucket_size_mb", "coalesce"])
def test_ranks_that_sum_in_different_pieces_are_told_so(job: Job, name: str) -> None:
    said = bucket(job, f"different {name}")
    assert said.startswith("PlanMismatchError")
    assert f"{name} is {'1' if name == 'bucket_size_mb' else 'True'} on rank 0" in said


def test_ranks_that_push_in_different_pieces_are_told_so(job: Job) -> None:
    assert "different bucket sizes: bucket_size_mb is 1 on rank 0 and 2 on rank 1" in bucket(
        job, "different in a push"
    )


@pytest.mark.parametrize("in_store", [True, False])
@pytest.mark.parametrize("name", ["device", "dist_sync"])
def test_replicas_on_several_ranks_train_as_one_device_does_on_the_whole_batch(
    job: Job, name: str, in_store: bool
) -> None:
    assert all(found[f"{name} {in_store}"] < 1e-12 for found in job["errors"])
