"""Two workers train by a Strategy, save, end; new ones go on from the checkpoint as if nothing had been."""

from __future__ import annotations

import logging
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from kvtrainer.strategy import Strategy
from tests.support.jobs import Job, Results, own_place, run_job

STEPS = 3
KINDS: dict[str, dict[str, Any]] = {
    "dist_sync": {"type": "AmpOptimWrapper", "loss_scale": {"init_scale": 2.0**60, "growth_interval": 2}},
    "dist_sync compressed": {"compression_params": {"type": "2bit", "threshold": 0.01}},
    "dist_sync at workers": {"update_on_kvstore": False, "accumulative_counts": 2},
    "device": {},
}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(6, 16)
        self.norm = nn.BatchNorm1d(16)
        self.head = nn.Linear(16, 1)

    def init_weights(self) -> None:
        for p in self.parameters():
            nn.init.uniform_(p, -0.3, 0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(nn.functional.dropout(torch.tanh(self.norm(self.body(x))), 0.3))
        return out


def strategy_of(kind: str, folder: Path, seed: int) -> Strategy:
    env: dict[str, Any] = {"randomness": {"seed": seed, "diff_rank_seed": True}}
    if kind == "device":
        env |= {"dist_cfg": {"init_method": f"file://{folder}/meeting"}}
    return Strategy(
        kvstore=kind.split()[0],
        work_dir=str(folder / kind.replace(" ", "_")),
        experiment_name=f"experiment of rank {own_place()[0]}",
        env_kwargs=env,
        log_kwargs={"log_level": "ERROR"},
    )


def prepared(kind: str, strategy: Strategy) -> tuple[Any, Any]:
    model, trainer, _ = strategy.prepare(
        Net(),
        optim_wrapper={
            "optimizer": {"type": "Adam", "lr": 0.01},
            "paramwise_cfg": {"bias_lr_mult": 2.0, "norm_decay_mult": 0.0, "custom_keys": {"head": {"lr_mult": 0.5}}},
            "clip_grad": {"max_norm": 0.5},
            **KINDS[kind],
        }
        | ({"optimizer": {"type": "Adam", "lr": 0.01, "weight_decay": 0.01}}),
        param_scheduler=[
            {"type": "LinearLR", "start_factor": 0.1, "by_epoch": False, "begin": 0, "end": 4},
            {"type": "StepLR", "step_size": 2, "gamma": 0.5},
        ],
        dispatch_kwargs={"max_epochs": 4, "max_iters": 4 * STEPS, "epoch_length": STEPS},
    )  # fmt: skip
    return model, trainer


def train(model: Any, trainer: Any) -> list[Any]:
    """An epoch with random data, of which every rank draws its own."""
    norms = []
    for _ in range(STEPS):
        x = torch.randn(4, 6) + random.random() + float(np.random.rand())
        with trainer.context():
            loss = model(x).float().square().mean()
        result = trainer.update_params(loss)
        norms.append((result.grad_norm, result.skipped, result.loss_scale))
    trainer.end_epoch()
    return norms


def found(strategy: Strategy, model: Any, trainer: Any, norms: list[Any]) -> dict[str, Any]:
    return {
        "weights": {name: v.clone() for name, v in model.state_dict().items() if "running" not in name},
        "lr": trainer.get_lr()["lr"],
        "norms": norms,
        "draws": [random.random(), float(np.random.rand()), float(torch.rand(()))],
        "place": [strategy.rank, strategy.world_size, strategy.launcher, strategy.distributed],
        "names": [strategy.timestamp, strategy.experiment_name],
        "seed": strategy.seed,
    }


def first(kind: str, folder: Path) -> dict[str, Any]:
    """Two epochs, a checkpoint, and one more."""
    strategy = strategy_of(kind, folder, 5)
    model, trainer = prepared(kind, strategy)
    begun = {name: v.clone() for name, v in model.state_dict().items()}
    norms = train(model, trainer) + train(model, trainer)
    strategy.save_checkpoint(
        f"{strategy.work_dir}/two.pt", extra_ckpt={"meta": {"epoch": 2, "iter": 2 * STEPS}}
    )
    skipped = any(skipped for _, skipped, _ in norms)
    result = found(strategy, model, trainer, train(model, trainer))
    strategy.close()
    return {**result, "begun": begun, "skipped": skipped}


def again(kind: str, folder: Path) -> dict[str, Any]:
    """The one more epoch, in new processes and with new servers."""
    strategy = strategy_of(kind, folder, 77)
    strategy.logger.setLevel(logging.CRITICAL)
    model, trainer = prepared(kind, strategy)
    rest = strategy.load_or_resume(resume=True)
    assert rest is not None
    assert rest["meta"]["epoch"] == 2
    result = found(strategy, model, trainer, train(model, trainer))
    strategy.close()
    return result


def run_all(rank: int, workers: int, phase: str, folder: str) -> Results:
    torch.use_deterministic_algorithms(True)
    return {kind: (first if phase == "first" else again)(kind, Path(folder)) for kind in KINDS}


each_kind = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Job, Job]:
    folder = tmp_path_factory.mktemp("files")
    first = run_job(run_all, tmp_path_factory.mktemp("first"), 2, 2, "first", str(folder))
    (folder / "meeting").unlink(missing_ok=True)
    return first, run_job(run_all, tmp_path_factory.mktemp("again"), 2, 2, "again", str(folder))


@each_kind
def test_a_resumed_job_goes_on_with_the_bits_of_an_uninterrupted_one(
    jobs: tuple[Job, Job], kind: str
) -> None:
    """With clipping, options by parameter, schedules, dropout, random data and a loss scale, whose state is saved."""
    for uninterrupted, resumed in zip(jobs[0][kind], jobs[1][kind], strict=True):
        for name, value in uninterrupted["weights"].items():
            assert torch.equal(resumed["weights"][name], value), name
        for part in ("lr", "norms", "draws"):
            assert resumed[part] == uninterrupted[part]


def test_a_step_overflowed_before_the_checkpoint(jobs: tuple[Job, Job]) -> None:
    assert jobs[0]["dist_sync"][0]["skipped"]


@each_kind
def test_workers_have_the_weights_and_statistics_of_rank_0_from_the_beginning(
    jobs: tuple[Job, Job], kind: str
) -> None:
    """Although each draws its own, from another seed."""
    mine, other = (found["begun"] for found in jobs[0][kind])
    assert all(torch.equal(mine[name], other[name]) for name in mine)


@each_kind
def test_workers_agree_on_names_and_know_their_places_from_the_kvstore(
    jobs: tuple[Job, Job], kind: str
) -> None:
    first, second = jobs[0][kind]
    assert [first["place"], second["place"]] == [[0, 2, "kvlaunch", True], [1, 2, "kvlaunch", True]]
    assert first["names"] == second["names"]
    assert first["names"][1] == f"experiment of rank 0_{first['names'][0]}"


@each_kind
def test_every_rank_has_random_numbers_of_its_own_also_after_resuming(
    jobs: tuple[Job, Job], kind: str
) -> None:
    assert [found["seed"] for found in jobs[1][kind]] == [5, 6]
    first, second = (found["draws"] for found in jobs[1][kind])
    assert all(a != b for a, b in zip(first, second, strict=True))
