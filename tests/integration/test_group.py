"""Two and three ranks of torch.distributed over gloo train with kvstore 'device', as one process or dist_sync would."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvtrainer import Trainer
from tests.support.jobs import Job, run_job
from tests.support.replica_training import random_gradients, random_parameters
from tests.support.sparse_model import CASES, Embeddings, batches
from tests.support.workers import group


@pytest.fixture(scope="module", params=[2, 3], ids=["2-ranks", "3-ranks"])
def job(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Job:
    folder = tmp_path_factory.mktemp("group")
    return run_job(group.run, folder, request.param, 1, str(folder))


def everywhere(job: Job, part: str, name: str) -> Any:
    """What all ranks found, which must be the same."""
    found = [result[name] for result in job[part]]
    assert all(one == found[0] for one in found)
    return found[0]


def total(job: Job) -> float:
    """The sum of rank + 1."""
    return job.workers * (job.workers + 1) / 2


@pytest.mark.parametrize("in_store", [None, True, False])
def test_sums_with_momentum_follow_the_closed_form_from_rank_0s_weights(
    job: Job, in_store: bool | None
) -> None:
    w, v, expected = 5.0, 0.0, []
    for slope, rate in ((total(job) / 2, 1.0),) * 3 + ((0.0, 0.5),):
        v = 0.5 * v - rate * slope
        w += v
        expected.append(w)
    assert everywhere(job, "closed_forms", f"momentum {in_store}") == expected


def test_step_without_batch_size_averages_and_each_ranks_own_batch_size_counts(job: Job) -> None:
    mean = -total(job) / job.workers
    assert everywhere(job, "closed_forms", "mean") == [mean]
    after = mean - sum(2.0**-rank for rank in range(job.workers))
    assert everywhere(job, "closed_forms", "own batch sizes") == [after]


def test_sums_may_be_changed_between_the_halves_of_a_step(job: Job) -> None:
    assert everywhere(job, "closed_forms", "sums") == [total(job)]
    [before], [after] = (everywhere(job, "closed_forms", name) for name in ("own batch sizes", "clipped"))
    assert after == before - total(job) / 2
    assert "allreduce_grads() has no meaning" in everywhere(job, "closed_forms", "halves")


def test_store_knows_ranks(job: Job) -> None:
    assert [found["place"] for found in job["closed_forms"]] == [
        [rank, job.workers] for rank in range(job.workers)
    ]


def test_replicas_are_summed_before_ranks_and_count_in_the_mean(job: Job) -> None:
    assert everywhere(job, "replicas", "summed") == [-2 * total(job)] * 2
    assert everywhere(job, "replicas", "over servers") == [-2 * total(job)] * 2
    assert everywhere(job, "replicas", "averaged") == [-2 * total(job) - 2] * 2


def test_weights_are_those_of_dist_sync(job: Job) -> None:
    """Two addends have one sum; the order of three is gloo's. A half-precision sum is rounded before the update."""
    for found in job["random"]:
        for mine, first, other in zip(
            found["device"], job["random"][0]["device"], found["dist_sync"], strict=True
        ):
            assert torch.equal(mine, first)
            if mine.dtype == torch.float16:
                assert torch.allclose(mine, other, atol=2e-3)
            elif job.workers == 2:
                assert torch.equal(mine, other)
            else:
                assert torch.allclose(mine, other, rtol=0, atol=1e-6)


def test_replicas_in_one_process_have_the_bits_of_as_many_workers_over_servers(job: Job) -> None:
    """Except in half precision, of which replicas have a sum that is rounded before the update."""
    w = [random_parameters() for _ in range(job.workers)]
    options = {"lr": 0.01, "multi_precision": True}
    trainer = Trainer([list(of_key) for of_key in zip(*w, strict=True)], "adam", options)
    for _ in zip(*(random_gradients(rank, of_rank) for rank, of_rank in enumerate(w)), strict=True):
        trainer.step(8)
    for own in w:
        for mine, other in zip(own, job["random"][0]["dist_sync"], strict=True):
            if mine.dtype == torch.float16:
                assert torch.allclose(mine, other, atol=2e-3)
            else:
                assert torch.equal(mine, other)


def test_key_that_a_rank_leaves_out_has_the_sum_of_the_others_and_of_none_is_not_touched(job: Job) -> None:
    assert everywhere(job, "left_out", "weights") == [1 - job.workers - 0.5, -0.5, 1.0]
    assert everywhere(job, "left_out", "updates") == [0, 1]


def test_overflow_on_one_rank_skips_the_step_on_all(job: Job) -> None:
    assert everywhere(job, "veto", "steps") == [([0.0], 4.0), ([-float(job.workers)], 4.0)]


@pytest.mark.parametrize(
    ("what", "error", "message"),
    [
        ("rate", "PlanMismatchError", "group 0 has lr=1.0 on rank 0 and 0.5 on rank 1"),
        (
            "model",
            "PlanMismatchError",
            "key 1 is '1' float32[2, 3] in group 0 on rank 1 but missing on rank 0",
        ),
        ("optimizer", "PlanMismatchError", "name is 'sgd' on rank 0 and 'adam' on rank 1"),
        ("calls", "ProtocolError", "step on rank 0, set_data on rank 1"),
        ("calls", "ProtocolError", "add_param_group"),
    ],
)
def test_ranks_that_disagree_raise_the_same_error(job: Job, what: str, error: str, message: str) -> None:
    found = everywhere(job, "disagreement", what)
    assert found.startswith(f"{error}: ")
    assert message in found


def test_step_that_ranks_disagreed_on_was_not_taken_and_the_next_one_is(job: Job) -> None:
    assert everywhere(job, "disagreement", "unchanged") == [0.0]
    assert everywhere(job, "disagreement", "after") == [-0.25 * job.workers]


def test_saved_states_go_on_as_if_never_interrupted(job: Job) -> None:
    for found in job["states"]:
        for uninterrupted, resumed in zip(found["uninterrupted"], found["resumed"], strict=True):
            assert torch.equal(uninterrupted, resumed)


@pytest.mark.parametrize("name", ["sgd", "torch:SGD", "torch:Adagrad"])
def test_row_sparse_gradients_give_the_weights_of_a_dense_float64_loop(job: Job, name: str) -> None:
    model = Embeddings().double()
    model.big.sparse = model.small.sparse = False
    parameters = list(model.parameters())
    optimizer: torch.optim.Optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    if name == "torch:Adagrad":
        optimizer = torch.optim.Adagrad(parameters, lr=0.1)
    for of_ranks in zip(*(batches(rank) for rank in range(job.workers)), strict=True):
        optimizer.zero_grad()
        sum((model(big, small) for big, small in of_ranks), torch.zeros(())).backward()
        optimizer.step()
    for found, expected in zip(job["sparse"][0][name], parameters, strict=True):
        assert torch.allclose(found.double(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", CASES)
def test_row_sparse_gradients_leave_the_same_bits_on_every_rank(job: Job, name: str) -> None:
    first = job["sparse"][0][name]
    for found in job["sparse"]:
        assert all(torch.equal(mine, one) for mine, one in zip(found[name], first, strict=True))


def test_rows_of_some_ranks_and_a_dense_gradient_of_another_are_summed(job: Job) -> None:
    expected = torch.full((6, 2), -0.5)
    expected[1 : job.workers] -= 2.0
    for found in job["sparse"]:
        assert torch.equal(found["mixed"], expected)
        after = expected.clone()
        after[5] -= 1.0
        assert torch.equal(found["one rank only"], after)
        assert found["sums"][:, 0].tolist() == [job.workers, 0, 0, 0, 0, 0]


def test_rows_of_ranks_with_data_reach_those_that_have_joined(job: Job) -> None:
    moved = -sum((rank + 1.0) ** 2 for rank in range(job.workers))
    assert everywhere(job, "sparse", "in a block") == [0.0, moved, 0.0, moved, 0.0]


def test_verbs_follow_the_closed_forms(job: Job) -> None:
    s = total(job)
    expected = {"init": 5.0, "push": s, "replicas": 3 * s, "pushpull": s, "broadcast": 2.0}
    assert {name: everywhere(job, "verbs", name) for name in expected} == expected
    assert everywhere(job, "verbs", "optimizer") == [2 * 2 * s * (i + 1) + 2 for i in range(3)]
    assert [found["place"] for found in job["verbs"]] == [
        [r, job.workers, "device"] for r in range(job.workers)
    ]


def test_pushed_rows_are_summed_over_replicas_and_ranks(job: Job) -> None:
    n = job.workers
    first = [float(n), 0.0, 0.0, float(n)]
    for rank in range(n):
        first[rank] += 1.0
    second = [first[0], first[1] + 2, first[2], first[3]]
    third = [second[0] + n - 1, second[1] + n - 1, second[2] + n, second[3] + n - 1]
    assert everywhere(job, "verbs", "rows") == [first, second, third]


def test_verbs_that_cannot_be_done_raise_on_every_rank_and_change_nothing(job: Job) -> None:
    heard = [
        "KeyNotFoundError: key 8",
        "ProtocolError: rank 0 calls push(['4']) and rank 1 push(['3'])",
        "RoundAbortedError: rank 1 raised in push: ShapeMismatchError: key '3' holds float32[2], got float32[3]",
        "PlanMismatchError: workers have different models: key 0 is '9' float32[3] in group 0 on rank 1",
        "RoundAbortedError: rank 1 raised in init: ConfigurationError: key 4 is initialised already",
        "ProtocolError: rank 0 calls push(['3']) and rank 1 barrier()",
        "ConfigurationError: gradient compression is not supported between the ranks",
    ]
    found = job["verbs"][0]["refused"]
    assert [one.startswith(text) for one, text in zip(found, heard, strict=True)] == [True] * len(heard), (
        found
    )
    assert not any(one == "nothing" for result in job["verbs"] for one in result["refused"])
    assert "ranks set different optimizers" in everywhere(job, "verbs", "optimizers")


def test_module_under_ddp_is_refused_with_any_kvstore_but_none(job: Job) -> None:
    [found] = [job["refusals"][0]]
    for what in ("module", "group", "parameters", "inner"):
        assert "DistributedDataParallel" in found[what]
        assert "kvstore=None" in found[what]
    assert (found["none"], found["other"], found["dropped"]) == ("nothing", "nothing", "nothing")
    assert "does not compress what the ranks" in found["compression"]


def test_what_was_built_before_the_group_says_so(job: Job) -> None:
    for name in ("trainer", "updating trainer"):
        assert "initialised after the Trainer was built" in everywhere(job, "late", name)
    assert "initialised after the kvstore was created" in everywhere(job, "late", "store")


def test_rank_that_does_not_come_is_a_deadline_error_within_the_groups_timeout(job: Job) -> None:
    found = job["absence"][0]
    assert found["error"].startswith(f"DeadlineError: rank 0 of {job.workers} waited for the other ranks")
    assert "trainer.join()" in found["error"]
    assert found["weights"] == [0.0]
