"""Ranks of torch.distributed with different numbers of batches, in join() blocks with kvstore 'device'."""

from __future__ import annotations

import pytest

from tests.support.jobs import Job, run_job


@pytest.fixture(scope="module", params=[2, 3], ids=["2-ranks", "3-ranks"])
def job(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Job:
    folder = tmp_path_factory.mktemp("group_join")
    return run_job("group_join", folder, request.param, 1, str(folder))


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
