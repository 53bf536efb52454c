"""Lightning's Trainer over a kvstore, two workers and two servers, beside plain torch loops over the same batches."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.frameworks.jobs import (
    EPOCHS,
    EXAMPLES,
    Examples,
    Job,
    assert_that_a_failed_worker_ends_the_job,
    make_net,
    need,
    numbers,
    train_plainly,
    union_batches,
)

need("lightning")
SCRIPT = Path(__file__).with_name("lightning_job.py")
CLOSE = {"rel": 1e-5, "abs": 1e-6}


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    return Job(SCRIPT, tmp_path_factory.mktemp("lightning"))


def adam(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(net.parameters(), lr=0.05)


def sgd(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)


def test_the_former_name_of_the_strategy_is_the_same_class() -> None:
    from kvtrainer.integrations.lightning import KVStoreStrategy, LightningStrategy

    assert KVStoreStrategy is LightningStrategy


def test_two_workers_end_with_the_weights_of_one_process_over_all_batches(job: Job) -> None:
    expected = train_plainly(adam, lr_factor=0.5)
    first, second = job.of("whole_run")
    assert first["weights"] == second["weights"]
    assert first["weights"] == pytest.approx(expected, **CLOSE)
    assert first["optimizer"] == "Trainer"
    assert (first["place"], second["place"]) == ([0, 2], [1, 2])
    assert first["steps"] == [EPOCHS * len(union_batches(0))]


def test_each_example_is_seen_once_in_every_epoch_by_one_of_the_workers(job: Job) -> None:
    own = [found["seen"] for found in job.of("whole_run")]
    half = EXAMPLES // 2
    for epoch in range(EPOCHS):
        parts = [seen[epoch * half : (epoch + 1) * half] for seen in own]
        assert sorted(parts[0] + parts[1]) == list(range(EXAMPLES))
    assert own[0][:half] != own[0][half:]


def test_of_an_uneven_number_of_examples_none_is_left_out_and_each_is_predicted_once(job: Job) -> None:
    found = job.of("uneven")
    seen = [at for one in found for at in one["seen"]]
    assert set(seen) == set(range(13))
    assert len(seen) == 14
    assert sorted(at for one in found for at in one["predicted"]) == list(range(13))


def test_logged_values_and_metrics_are_those_of_all_workers_together(job: Job) -> None:
    first, second = (found["metrics"] for found in job.of("whole_run"))
    assert first == second
    net, data = make_net(), Examples(32)
    with torch.no_grad():
        for own, value in zip(net.parameters(), _split(job.of("whole_run")[0]["weights"], net), strict=True):
            own.copy_(value)
        expected = float(nn.functional.mse_loss(net(data.x), data.y))
    assert first["val"] == pytest.approx(expected, **CLOSE)
    assert first["metric"] == pytest.approx(expected, **CLOSE)


def _split(weights: list[float], net: nn.Module) -> list[torch.Tensor]:
    parts = torch.tensor(weights).split([p.numel() for p in net.parameters()])
    return [part.reshape(p.shape) for part, p in zip(parts, net.parameters(), strict=True)]


def test_one_log_and_one_checkpoint_are_written(job: Job) -> None:
    folder = job.folder / "whole_run"
    [log] = folder.rglob("metrics.csv")
    rows = [row for row in csv.DictReader(log.read_text().splitlines()) if row["train"]]
    assert len(rows) == EPOCHS
    names = sorted(str(one.relative_to(folder)) for one in folder.rglob("*.ckpt"))
    assert names == ["end.ckpt", "saved/epoch=1-step=8.ckpt", "saved/last.ckpt"]


def test_a_run_that_goes_on_from_a_checkpoint_ends_with_the_bits_of_one_without_a_break(job: Job) -> None:
    whole = job.of("whole_run")[0]["weights"]
    assert job.of("two_runs") == [whole, whole]


def test_a_checkpoint_has_the_form_that_one_process_writes(job: Job) -> None:
    saved = torch.load(job.folder / "whole_run" / "end.ckpt", weights_only=False)
    net = make_net()
    net.load_state_dict(
        {name.removeprefix("net."): v for name, v in saved["state_dict"].items() if "net." in name}
    )
    assert numbers(net) == job.of("whole_run")[0]["weights"]
    adam(net).load_state_dict(saved["optimizer_states"][0])


@pytest.mark.parametrize(
    ("case", "limit"),
    [
        ("clipped_by_norm", lambda net: nn.utils.clip_grad_norm_(net.parameters(), 0.3)),
        ("clipped_by_value", lambda net: nn.utils.clip_grad_value_(net.parameters(), 0.05)),
    ],
)
def test_the_gradient_of_all_workers_together_is_limited(job: Job, case: str, limit: object) -> None:
    expected = train_plainly(sgd, before_step=limit)  # type: ignore[arg-type]
    assert expected != pytest.approx(train_plainly(sgd), rel=1e-2)
    for weights in job.of(case):
        assert weights == pytest.approx(expected, **CLOSE)


def test_accumulated_batches_make_one_step(job: Job) -> None:
    for weights in job.of("accumulated"):
        assert weights == pytest.approx(train_plainly(sgd, accumulate=2), **CLOSE)


def test_mixed_precision_in_bfloat16_is_that_of_one_process(job: Job) -> None:
    for weights in job.of("in_bfloat16"):
        assert weights == pytest.approx(train_plainly(sgd, autocast=torch.bfloat16), rel=1e-3, abs=1e-4)


@pytest.mark.parametrize("case", ["with_a_trainer", "by_hand"])
def test_a_trainer_of_the_module_and_manual_steps_train_alike(job: Job, case: str) -> None:
    for weights in job.of(case):
        assert weights == pytest.approx(train_plainly(sgd), **CLOSE)


def test_a_trainer_of_the_module_serves_several_fits(job: Job) -> None:
    for weights in job.of("with_one_trainer_in_two_fits"):
        assert weights == pytest.approx(train_plainly(sgd), **CLOSE)


def test_an_overflow_on_one_worker_skips_the_step_of_all(job: Job) -> None:
    first, second = job.of("overflowing")
    assert first == second
    assert first["scale"] == 2.0**7
    assert all(abs(one) < 100 for one in first["weights"])


def test_all_workers_end_validate_and_test_with_rank_0s_buffers(job: Job) -> None:
    first, second = job.of("with_buffers")
    assert first == second
    assert [one[2] for one in first] == [[3.0], [4.0], [4.0]], "in validation, after training, in a test"


def test_a_trainer_that_would_train_alone_is_refused(job: Job) -> None:
    for said in job.of("alone_by_mistake"):
        assert all(word in said for word in ("1 workers", "has 2", "dist_sync"))


def test_a_limit_that_changes_between_steps_is_refused(job: Job) -> None:
    for said in job.of("another_limit_later"):
        assert "clip_grad" in said


def test_a_worker_that_fails_ends_the_job_with_its_error(tmp_path: Path) -> None:
    assert_that_a_failed_worker_ends_the_job(SCRIPT, tmp_path, "fails")
