"""torch.distributed.checkpoint with two ranks whose optimizer runs on two servers."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from tests.support.jobs import Job, Results, run_job
from tests.support.workers.states_matrix import Net, train, trainer_of, weights


def run(base: Path, kind: str, by_name: bool) -> dict[str, Any]:
    folder = base / f"{kind}-{by_name}"
    net = Net()
    with trainer_of(net, kind, "dist") as trainer:
        train(net, trainer, 0, 2)
        trainer.zero_grad()
        states = get_optimizer_state_dict(net, trainer) if by_name else trainer.state_dict()
        save({"net": net.state_dict(), "trainer": states}, checkpoint_id=folder)
        train(net, trainer, 2, 2)
    again = Net()
    with trainer_of(again, kind, "dist") as other:
        content: dict[str, Any] = {"net": again.state_dict()}
        content["trainer"] = get_optimizer_state_dict(again, other) if by_name else other.state_dict()
        load(content, checkpoint_id=folder)
        if by_name:
            set_optimizer_state_dict(again, other, content["trainer"])
        else:
            other.load_state_dict(content["trainer"])
        train(again, other, 2, 2)
    return {"uninterrupted": weights(net), "resumed": weights(again)}


def run_all(rank: int, workers: int, folder: str) -> Results:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of its own use of what it has deprecated
        return {
            f"{kind} {by_name}": run(Path(folder), kind, by_name)
            for kind in ("adam", "lamb")
            for by_name in (False, True)
        }


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    folder: Path = tmp_path_factory.mktemp("job")
    return run_job(run_all, folder, 2, 2, str(tmp_path_factory.mktemp("checkpoints")), in_group=True)


@pytest.mark.parametrize("way", [False, True], ids=["state_dict", "get_optimizer_state_dict"])
@pytest.mark.parametrize("kind", ["adam", "lamb"])
def test_ranks_go_on_from_their_common_checkpoint(job: Job, kind: str, way: bool) -> None:
    for results in job[f"{kind} {way}"]:
        for a, b in zip(results["resumed"], results["uninterrupted"], strict=True):
            assert torch.equal(a, b)
