"""accelerate, and skorch's nets that use it, over a kvstore, two workers and two servers, beside plain torch loops."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.frameworks.jobs import (
    BATCH,
    EPOCHS,
    EXAMPLES,
    Examples,
    Job,
    assert_that_a_failed_worker_ends_the_job,
    make_net,
    need,
    train_plainly,
)

need("accelerate")
need("skorch")
SCRIPT = Path(__file__).with_name("accelerate_job.py")
CLOSE = {"rel": 1e-5, "abs": 1e-6}
Batches = Callable[[int], list[list[list[int]]]]


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    return Job(SCRIPT, tmp_path_factory.mktemp("accelerate"))


def sgd(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)


def batches_of(found: list[dict[str, Any]]) -> Batches:
    """The batches of an epoch by step and worker, as the workers have noted them."""
    half = EXAMPLES // 2

    def of_epoch(epoch: int) -> list[list[list[int]]]:
        own = [one["seen"][epoch * half : (epoch + 1) * half] for one in found]
        return [[one[at : at + BATCH] for one in own] for at in range(0, half, BATCH)]

    return of_epoch


@pytest.mark.parametrize("case", ["whole_run", "by_skorch"])
def test_each_example_is_seen_once_in_every_epoch_by_one_of_the_workers(job: Job, case: str) -> None:
    batches = batches_of(job.of(case))
    for epoch in range(EPOCHS):
        seen = [at for step in batches(epoch) for part in step for at in part]
        assert sorted(seen) == list(range(EXAMPLES))
    assert batches(0) != batches(1)


@pytest.mark.parametrize(
    ("case", "options"),
    [
        ("whole_run", {}),
        ("by_skorch", {}),
        ("measured", {}),
        ("accumulated", {"accumulate": 2}),
        ("clipped_by_norm", {"before_step": lambda net: nn.utils.clip_grad_norm_(net.parameters(), 0.3)}),
        ("clipped_by_value", {"before_step": lambda net: nn.utils.clip_grad_value_(net.parameters(), 0.05)}),
    ],
)
def test_two_workers_end_with_the_weights_of_one_process_over_all_batches(
    job: Job, case: str, options: dict[str, Any]
) -> None:
    found = job.of(case)
    expected = train_plainly(sgd, epoch_batches=batches_of(found), **options)
    assert found[0]["weights"] == found[1]["weights"]
    assert found[0]["weights"] == pytest.approx(expected, **CLOSE)


@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        ("in_bfloat16", torch.bfloat16),
        ("by_skorch_in_bfloat16", torch.bfloat16),
        ("by_skorch_in_float16", torch.float16),
    ],
)
def test_mixed_precision_is_that_of_one_process(job: Job, case: str, dtype: torch.dtype) -> None:
    found = job.of(case)
    expected = train_plainly(sgd, epoch_batches=batches_of(found), autocast=dtype)
    assert found[0]["weights"] == pytest.approx(expected, rel=1e-3, abs=1e-4)


def test_an_overflow_in_float16_on_one_worker_skips_the_step_of_all_and_of_their_schedule(job: Job) -> None:
    found = job.of("in_float16")
    batches = batches_of(found)
    expected = train_plainly(sgd, 1, epoch_batches=lambda epoch: batches(epoch)[1:], autocast=torch.float16)
    for one in found:
        assert one["kinds"] == ["torch.float16"]
        assert one["skipped"] == [True, False, False, False]
        assert one["moved"] == [0, 2, 4, 6]  # accelerate makes a step for each worker
        assert one["scales"] == [2.0**7, 2.0**7]  # at the end, and loaded again
        assert one["weights"] == pytest.approx(expected, rel=1e-3, abs=1e-4)


@pytest.mark.parametrize(("case", "limit"), [("clipped_by_norm", 0.3), ("measured", float("inf"))])
def test_the_norm_is_that_of_the_gradient_of_all_workers_before_it_is_limited(
    job: Job, case: str, limit: float
) -> None:
    found, norms = job.of(case), []
    train_plainly(
        sgd,
        epoch_batches=batches_of(found),
        before_step=lambda net: norms.append(float(nn.utils.clip_grad_norm_(net.parameters(), limit))),
    )
    for one in found:
        assert one["norms"] == pytest.approx(norms, rel=1e-4)


def test_a_run_goes_on_from_a_state_that_was_saved_once_to_the_bits_of_one_without_a_break(job: Job) -> None:
    whole, found = job.of("whole_run"), job.of("two_runs")
    [model] = (job.folder / "two_runs" / "saved").glob("model*")
    assert model.name == "model.safetensors"
    assert found[0] == found[1]
    second, loaded, again = found[0]
    assert second == whole[0]["weights"]
    after_one = train_plainly(sgd, 1, epoch_batches=batches_of(whole))
    assert loaded == pytest.approx(after_one, **CLOSE)
    assert second != loaded
    assert len(again) == len(second)


def test_what_is_gathered_of_an_uneven_number_of_examples_is_each_once(job: Job) -> None:
    for found in job.of("uneven"):
        assert sorted(found["gathered"]) == pytest.approx(sorted(found["expected"]))


def test_limits_of_a_part_and_uneven_inputs_are_refused(job: Job) -> None:
    for part, uneven in job.of("refused"):
        assert "model.parameters()" in part
        assert "even_batches" in uneven


def test_skorch_predicts_all_examples_on_each_worker_and_prints_and_saves_once(job: Job) -> None:
    first, second = job.of("by_skorch")
    net, data = make_net(), Examples()
    parts = torch.tensor(first["weights"]).split([p.numel() for p in net.parameters()])
    with torch.no_grad():
        for own, part in zip(net.parameters(), parts, strict=True):
            own.copy_(part.reshape(own.shape))
        expected = net(data.x[:13]).reshape(-1).tolist()
    for found in (first, second):
        assert found["predicted"] == pytest.approx(expected, **CLOSE)
    assert (first["lines"] > 0, second["lines"]) == (True, 0)
    names = sorted(one.name for one in (job.folder / "by_skorch" / "saved").iterdir())
    assert names == ["criterion.pt", "history.json", "optimizer.pt", "params.pt"]


def test_skorch_goes_on_from_what_it_has_saved_in_a_new_net_and_in_one_that_has_gone_on(job: Job) -> None:
    first, second = job.of("by_skorch_resumed")
    assert first["epochs"] == EPOCHS
    for ended, seen in (("weights", "seen"), ("later", "seen_later")):
        batches = batches_of([{"seen": one[seen]} for one in (first, second)])
        assert first[ended] == second[ended]
        assert first[ended] == pytest.approx(train_plainly(sgd, epoch_batches=batches), **CLOSE)
    after_one = train_plainly(sgd, 1, epoch_batches=batches_of([first, second]))
    assert first["loaded"] == pytest.approx(after_one, **CLOSE)


def test_all_workers_of_skorch_end_and_validate_with_rank_0s_buffers(job: Job) -> None:
    first, second = job.of("with_buffers_by_skorch")
    assert first == second
    for buffers in (first["ended"], *first["noted"]):
        assert any(abs(one) > 1e-3 for one in buffers[0])


@pytest.mark.parametrize("framework", ["accelerate", "skorch"])
def test_a_worker_that_fails_ends_the_job_with_its_error(framework: str, tmp_path: Path) -> None:
    assert_that_a_failed_worker_ends_the_job(SCRIPT, tmp_path, framework)
