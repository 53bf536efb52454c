"""MXNet's own closed-form results, exactly, on real servers and workers.

The numbers are those of MXNet's nightly tests (dist_sync_kvstore.py, test_gluon_trainer.py) and of runs of MXNet
1.9.1. MXNet's optimizer "test" adds the rescaled gradient; ours is that of 2.x, `w -= lr · g`, so lr is −1.
S is the sum of what the workers push, 1 + 2 + … + W.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from kvstore_server.plan import TensorSpec, make_plan
from tests.support.jobs import Job, PartOfJob
from tests.support.sizes import FAST, sizes
from tests.support.workers.closed_forms import HALF_PUSHED, MODES, PUSHED, RATES, REPEATS, TRAINED


@pytest.fixture(scope="module", params=sizes(*FAST, servers=(1, 2, 3, 7)))
def job(request: pytest.FixtureRequest, part_of_job: PartOfJob) -> Job:
    return part_of_job("closed_forms", *request.param)


def total(job: Job) -> int:
    return job.workers * (job.workers + 1) // 2


def all_equal(values: Iterable[float], keys: int) -> list[list[tuple[float, float]]]:
    """What a worker sees in `keys` tensors when all their elements are one value, for a row of such moments."""
    return [[(value, value)] * keys for value in values]


def assert_everywhere(seen: list[Any], expected: Any) -> None:
    for rank, one in enumerate(seen):
        assert one == expected, f"rank {rank}"


def test_pushes_add_their_rescaled_sum(job: Job) -> None:
    expected = [1 + 2 * total(job) * (i + 1) for i in range(REPEATS)]
    assert_everywhere(job["constant lr"], all_equal(expected, len(PUSHED)))


@pytest.mark.parametrize("is_exact", [True, False])
def test_pushes_of_float16_add_up_exactly_with_and_without_multi_precision(job: Job, is_exact: bool) -> None:
    # Up to 393, with seven workers, every whole number is one of float16.
    expected = [1 + 2 * total(job) * (i + 1) for i in range(REPEATS)]
    seen = [one[is_exact] for one in job["half pushes"]]
    assert_everywhere(seen, all_equal(expected, len(HALF_PUSHED)))


def test_a_learning_rate_that_changes_at_every_push_reaches_every_server(job: Job) -> None:
    start = 1 + 2 * total(job) * REPEATS
    expected = [start + total(job) * (i + 1) * (i + 2) for i in range(REPEATS)]
    assert_everywhere(job["changing lr"], all_equal(expected, len(PUSHED)))


def test_a_big_key_is_updated_by_all_servers_and_a_small_one_by_one(job: Job) -> None:
    for applied in job["rounds applied"]:
        assert [counts.get("99") for counts in applied] == [2 * REPEATS] * job.servers
        assert [counts["3"] for counts in applied if "3" in counts] == [2 * REPEATS]


def test_every_server_holds_a_piece_of_the_sliced_parameter(job: Job) -> None:
    plan = make_plan([TensorSpec(name, shape, "float32") for name, shape in TRAINED.items()], job.servers)
    sliced = list(TRAINED).index("sliced")
    holders = {piece.server for piece in plan.slices for segment in piece.segments if segment.key == sliced}
    assert holders == set(range(job.servers))


def test_verbs_without_an_optimizer_replace_and_never_accumulate(job: Job) -> None:
    s = total(job)
    expected = [(float(value),) * 2 for value in (5, s, s, 3 * s, s, s, 2)]
    assert_everywhere(job["verbs"], {"small": expected, "sliced": expected})


def test_two_hundred_keys_are_initialised_to_their_own_number(job: Job) -> None:
    assert_everywhere(job["init"], [(float(j), float(j)) for j in range(200)])


@pytest.mark.parametrize("mode", MODES)
def test_step_subtracts_the_sum_from_rank_0s_weights_at_each_learning_rate(job: Job, mode: str) -> None:
    expected = [1 - total(job) * sum(RATES[: i + 1]) for i in range(len(RATES))]
    assert_everywhere(job[f"rates {mode}"], all_equal(expected, len(TRAINED)))


@pytest.mark.parametrize("mode", MODES)
def test_momentum_with_rescale_and_batch_size_follows_mxnets_trajectory(job: Job, mode: str) -> None:
    expected = [-job.workers * value for value in (0.5, 1.25, 2.125)]
    assert_everywhere(job[f"momentum {mode}"], all_equal(expected, len(TRAINED)))


@pytest.mark.parametrize("mode", MODES)
def test_each_gradient_is_divided_by_the_batch_size_of_its_own_worker(job: Job, mode: str) -> None:
    uneven = -sum((rank + 1) / 2**rank for rank in range(job.workers))
    for first, then in job[f"batch sizes {mode}"]:
        assert first == [(uneven, uneven)] * len(TRAINED)
        # Without a batch size the mean over workers is taken; a third or a seventh is rounded.
        assert then == [pytest.approx((uneven - (job.workers + 1) / 2,) * 2, rel=1e-6)] * len(TRAINED)


@pytest.mark.parametrize("mode", MODES)
def test_a_learning_rate_multiplier_set_between_steps_is_live(job: Job, mode: str) -> None:
    expected = [-job.workers * value for value in (1.0, 2.0)]
    assert_everywhere(job[f"multiplier {mode}"], all_equal(expected, len(TRAINED)))


@pytest.mark.parametrize(("mode", "in_store"), [("default", True), ("store", True), ("worker", False)])
def test_the_optimizer_runs_where_it_was_asked_to(job: Job, mode: str, in_store: bool) -> None:
    [weights] = all_equal([1.0 - total(job)], len(TRAINED))
    [grads] = all_equal([float(total(job))], len(TRAINED))
    expected = {"in store": in_store, "weights": weights, **({} if in_store else {"grads": grads})}
    assert_everywhere(job[f"split step {mode}"], expected)
