"""MXNet's row-sparse results, exactly, and tables that train as float64 loops do, on real servers and workers.

The numbers are those of MXNet's nightly tests (dist_sync_kvstore.py) and of runs of MXNet 2.0.0b1.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support.jobs import Job, PartOfJob
from tests.support.lazy_runs import GOLDEN, ORACLES
from tests.support.sizes import FAST, sizes
from tests.support.workers.row_sparse import (
    BIG,
    KINDS,
    REPEATS,
    STEPS,
    STORES,
    asked_of,
    batch_of,
    start_of_table,
    touched_of,
)

SPARSE = ("gradient", "weight")


@pytest.fixture(scope="module", params=sizes(*FAST))
def job(request: pytest.FixtureRequest, part_of_job: PartOfJob) -> Job:
    return part_of_job("row_sparse", *request.param)


def total(job: Job) -> int:
    return job.workers * (job.workers + 1) // 2


def assert_everywhere(seen: list[Any], expected: Any) -> None:
    for rank, one in enumerate(seen):
        assert one == expected, f"rank {rank}"


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_rows_that_ranks_share_add_up_and_the_others_are_zero_in_what_is_pulled(job: Job, dtype: str) -> None:
    expected = []
    for i in range(REPEATS):
        row = i % 2
        value = 1.0 + sum(2 * (rank + 1) * (i + 1) for rank in range(job.workers) if rank % 2 == row)
        out = [[value if r == row else 0.0] * 3 for r in range(2)]
        expected.append((out, [[row]], [[value] * 3]))
    assert_everywhere([seen[dtype] for seen in job["few rows"]], expected)


def test_a_push_of_no_rows_takes_part_and_a_pull_of_none_is_zero(job: Job) -> None:
    assert_everywhere(job["zeros"], [(1.0, 1.0, 0)] * 2)


def test_rows_of_a_big_key_add_up_wherever_they_lie(job: Job) -> None:
    step = torch.zeros(BIG[0])
    for rank in range(job.workers):
        step[touched_of(rank)] += 2.0 * (rank + 1)
    for rank, seen in enumerate(job["big"]):
        for i, (column, is_even) in enumerate(seen):
            expected = torch.zeros(BIG[0])
            expected[asked_of(rank)] = (1 + step * (i + 1))[asked_of(rank)]
            assert torch.equal(column, expected), f"rank {rank}, push {i}"
            assert is_even


def test_without_an_optimizer_the_sum_of_rows_replaces_these_rows(job: Job) -> None:
    w = job.workers
    dense = 2 * (w - 1) + 1
    expected = [[1, total(job), 1, 1], [1, 1, 1, dense], [2 * w, 1, w, dense]]
    assert_everywhere(job["replaced"], expected)


def test_invalid_calls_are_refused(job: Job) -> None:
    for said in job["refused"]:
        assert said["pull"].startswith("ConfigurationError: out of key 'k' is sparse")


def test_values_that_are_loaded_become_those_of_the_first_rank_on_all(job: Job) -> None:
    assert_everywhere(job["loaded"], [3.0, 3.0])


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_subtracts_the_sum_or_the_site_of_the_update_is_refused(job: Job, kind: str) -> None:
    weights = [1.0 - total(job)]
    for gates in job["gates"]:
        assert gates[kind]["default"] == gates[kind]["store"] == weights
        if kind == "dense":
            assert gates[kind]["worker"] == weights
        elif kind == "gradient":
            assert "needs update_on_kvstore=True with a dist kvstore" in gates[kind]["worker"]
        else:
            assert (
                "cannot set update_on_kvstore=False when sparse weights are present" in gates[kind]["worker"]
            )


@pytest.mark.parametrize("kind", SPARSE)
@pytest.mark.parametrize("case", GOLDEN)
def test_tables_follow_mxnets_trajectories(job: Job, case: str, kind: str) -> None:
    for store in STORES if job.workers == 1 else STORES[:1]:
        for seen in job[f"golden {store}"]:
            assert seen[kind, case] == pytest.approx(GOLDEN[case][2], abs=2e-6), store


@pytest.mark.parametrize("kind", SPARSE)
@pytest.mark.parametrize("lazy", [False, True])
def test_tables_train_as_one_process_with_all_batches_does_in_float64(
    job: Job, kind: str, lazy: bool
) -> None:
    batches = [torch.cat([batch_of(rank, step) for rank in range(job.workers)]) for step in range(STEPS)]
    expected = ORACLES[lazy](start_of_table(), batches, 0.05, 0.9, 0.1)
    found = [seen[kind][lazy] for seen in job["trained"]]
    for table in found:
        assert torch.equal(table, found[0])
    torch.testing.assert_close(found[0].double(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", SPARSE)
def test_bytes_are_those_of_the_rows_that_were_touched(job: Job, kind: str) -> None:
    for seen in job["bytes"]:
        small, large, twice = (
            seen[kind, n, touched] for n, touched in ((4_000, 40), (8_000, 40), (8_000, 80))
        )
        # Ids of many rows travel as one bit for each row of the slice, if that is shorter.
        assert large == pytest.approx(small, rel=0.01)
        # Every worker gives rows and gets all workers' (of a row-sparse key: only its own) back, 64 numbers and an id.
        back = job.workers if kind == "gradient" else 1
        ids = 4 if kind == "gradient" else 0
        assert twice - large == pytest.approx(40 * job.workers * (260 + back * (256 + ids)), rel=0.05)
