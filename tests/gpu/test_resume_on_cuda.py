"""Workers with parameters on a CUDA device that are killed and started again."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.integration import test_resume as cases
from tests.support.jobs import Results, run_job, run_with_deaths

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device"),
]


def training(rank: int, workers: int) -> Results:
    torch.use_deterministic_algorithms(True)
    torch.set_default_device("cuda")
    return cases.training(rank, workers, "adam", {})


@pytest.mark.parametrize("point", ["worker.round.committed", "worker.round.begin"])
def test_a_worker_on_a_device_comes_back_and_the_run_ends_with_the_same_bits(
    point: str, tmp_path: Path
) -> None:
    environ = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    folder = tmp_path / "disturbed"
    folder.mkdir()
    undisturbed = run_job(training, tmp_path, 2, 2, environ=environ)
    job = run_with_deaths(training, folder, f"{point}@1:5", 2, 2, environ=environ)
    assert job["restarts"] == [0, 1]
    assert job["digest"] == undisturbed["digest"]
