"""Two workers and two servers: loss scaling, published weights, schedulers and numbers that change while training."""

from __future__ import annotations

import pytest

from tests.support.jobs import Job, run_job

SITES = pytest.mark.parametrize("in_store", [True, False], ids=["in-store", "reduced"])


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    return run_job("surface", tmp_path_factory.mktemp("surface"), 2, 2)


@SITES
def test_overflow_on_one_worker_skips_the_step_on_all_and_halves_every_scale_once(
    job: Job, in_store: bool
) -> None:
    for result in job[f"overflow {in_store}"]:
        # m = .5 m - 1 in three steps; the second of four is skipped.
        assert result["weights"] == [[-1.0] * 2, [-1.0] * 2, [-2.5] * 2, [-4.25] * 2]
        assert result["scales"] == [65536, 65536, 32768, 32768]
        assert result["steps"] == [3, 3]
        assert result["num_update"] == 3


@SITES
def test_published_weights_are_rank_0s_everywhere_and_momentum_goes_on(job: Job, in_store: bool) -> None:
    for result in job[f"published {in_store}"]:
        assert result["weights"] == [[10.0, -1.0], [8.5, -2.5]]


@SITES
def test_scheduler_decides_the_rate_of_every_round(job: Job, in_store: bool) -> None:
    for result in job[f"scheduled {in_store}"]:
        assert result["moves"] == [7, 6, 5, 1, 2, 3]


@SITES
def test_rate_multiplier_and_batch_size_reach_the_update_at_once_and_without_a_warning(
    job: Job, in_store: bool
) -> None:
    """MXNet's servers keep the first learning rate, know no multipliers, and refuse another batch size."""
    for result in job[f"live_numbers {in_store}"]:
        rest = 1 / 8 + 1 / 4
        assert result["weights"] == [[-1, -1], [-1, -1], [-1.5, -2], [-1.5 - rest / 2, -2 - rest]]
