"""torch.distributed.checkpoint with two ranks whose optimizer runs on two servers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.jobs import Job, run_job


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    folder: Path = tmp_path_factory.mktemp("job")
    return run_job("states_checkpoint", folder, 2, 2, str(tmp_path_factory.mktemp("checkpoints")))


@pytest.mark.parametrize("way", [False, True], ids=["state_dict", "get_optimizer_state_dict"])
@pytest.mark.parametrize("kind", ["adam", "lamb"])
def test_ranks_go_on_from_their_common_checkpoint(job: Job, kind: str, way: bool) -> None:
    for results in job[f"{kind} {way}"]:
        for a, b in zip(results["resumed"], results["uninterrupted"], strict=True):
            assert torch.equal(a, b)
