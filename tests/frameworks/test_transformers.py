"""The Trainer of Transformers over a kvstore, two workers and two servers, beside the same job in one process."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.frameworks.jobs import (
    EPOCHS,
    EXAMPLES,
    ROOT,
    Job,
    assert_that_a_failed_worker_ends_the_job,
    launch,
    need,
)
from tests.support.limits import LIMIT

need("transformers")
SCRIPT = Path(__file__).with_name("transformers_job.py")
CLOSE = {"rel": 1e-4, "abs": 1e-5}


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    return Job(SCRIPT, tmp_path_factory.mktemp("transformers"))


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What transformers.Trainer does in one process with batches of twice the size."""
    folder = tmp_path_factory.mktemp("alone")
    command = [sys.executable, str(SCRIPT), str(folder), "alone"]
    env = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HOME": str(folder)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, env=env, check=False)
    found = json.loads((folder / "0.json").read_text())
    assert all("value" in one for one in found.values()), done.stderr[-4000:]
    return {name: one["value"] for name, one in found.items()}


@pytest.mark.parametrize("case", ["whole_run", "accumulated", "without_a_limit"])
def test_two_workers_train_as_one_process_does(job: Job, alone: dict[str, Any], case: str) -> None:
    first, second = job.of(case)
    assert first["optimizer"] == "Trainer"
    assert first["weights"] == second["weights"]
    for name in ("weights", "losses", "norms", "rates"):
        assert first[name] == pytest.approx(alone[case][name], **CLOSE)


def test_mixed_precision_in_bfloat16_is_that_of_one_process(job: Job, alone: dict[str, Any]) -> None:
    first, second = job.of("in_bfloat16")
    assert first["weights"] == second["weights"]
    assert first["losses"] == pytest.approx(alone["in_bfloat16"]["losses"], rel=1e-2)


def test_an_overflow_in_float16_on_one_worker_skips_the_step_of_all_as_that_of_one_process(
    job: Job, alone: dict[str, Any]
) -> None:
    first, second = job.of("in_float16")
    expected = alone["in_float16"]
    assert first["weights"] == second["weights"]
    assert first["kinds"] == expected["kinds"] == ["torch.float16"]
    assert first["scale"] == second["scale"] == expected["scale"] == 2.0**7
    assert first["rates"] == pytest.approx(expected["rates"])
    assert first["rates"][0] == first["rates"][1]
    assert first["losses"][1:] == pytest.approx(expected["losses"][1:], rel=1e-2)
    assert first["norms"][1:] == pytest.approx(expected["norms"][1:], rel=5e-2)


def test_each_example_is_seen_once_in_every_epoch_by_one_of_the_workers(job: Job) -> None:
    own = [found["seen"] for found in job.of("whole_run")]
    half = EXAMPLES // 2
    for epoch in range(EPOCHS):
        parts = [seen[epoch * half : (epoch + 1) * half] for seen in own]
        assert sorted(parts[0] + parts[1]) == list(range(EXAMPLES))


def test_metrics_and_predictions_are_of_each_example_once(job: Job, alone: dict[str, Any]) -> None:
    first, second = job.of("whole_run")
    expected = alone["whole_run"]
    assert first["evaluated"] == second["evaluated"]
    assert first["evaluated"]["eval_examples"] == 16
    assert first["evaluated"] == pytest.approx(expected["evaluated"], rel=1e-3)
    assert len(first["predicted"]) == 13
    for found, wanted in zip(_flat(first["predicted"]), _flat(expected["predicted"]), strict=True):
        assert found == pytest.approx(wanted, rel=1e-3, abs=1e-4)


def _flat(predicted: list[Any]) -> list[float]:
    return [one for sentence in predicted for word in sentence for one in word]


def test_a_checkpoint_is_written_once_and_a_run_goes_on_from_it_to_the_same_bits(job: Job) -> None:
    folder = job.folder / "whole_run"
    assert sorted(one.name for one in folder.iterdir()) == ["checkpoint-4", "checkpoint-8"]
    names = sorted(one.name for one in (folder / "checkpoint-4").iterdir())
    assert [name for name in names if name.startswith(("model", "optimizer"))] == [
        "model.safetensors",
        "optimizer.pt",
    ]
    assert [name for name in names if name.startswith("rng")] == ["rng_state_0.pth", "rng_state_1.pth"]
    whole = job.of("whole_run")[0]["weights"]
    assert job.of("resumed") == [whole, whole]


def test_training_goes_on_from_the_best_weights_on_all_workers(job: Job, alone: dict[str, Any]) -> None:
    first, second = job.of("from_the_best_on")
    assert first == second
    for found, wanted in zip(first, alone["from_the_best_on"], strict=True):
        assert found == pytest.approx(wanted, rel=1e-2, abs=1e-3)


def test_only_rank_0_logs(job: Job) -> None:
    printed = [line for line in job.done.stdout.splitlines() if "'grad_norm'" in line]
    assert printed
    assert all(line.startswith("[w0]") for line in printed)


def test_all_workers_evaluate_with_rank_0s_buffers(job: Job) -> None:
    first, second = job.of("with_a_buffer")
    assert first == second == [0.0]


def test_a_worker_that_fails_ends_the_job_with_its_error(tmp_path: Path) -> None:
    assert_that_a_failed_worker_ends_the_job(SCRIPT, tmp_path, "fails")


def test_training_arguments_that_know_of_one_process_are_refused(tmp_path: Path) -> None:
    done = launch(SCRIPT, tmp_path, "late")
    said = [line for line in done.stdout.splitlines() if "refused: " in line]
    assert len(said) == 2, done.stderr[-4000:]
    assert all("1 processes" in line and "2 workers" in line for line in said)
