"""A worker that trains by a Strategy, saves, and is resumed by another job."""

from __future__ import annotations

import logging
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from kvtrainer.strategy import Strategy
from tests.support.jobs import deliver, own_place

RANK, SIZE = own_place()
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
        experiment_name=f"experiment of rank {RANK}",
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


if __name__ == "__main__":
    phase, base = sys.argv[1], Path(sys.argv[2])
    torch.use_deterministic_algorithms(True)
    deliver({kind: (first if phase == "first" else again)(kind, base) for kind in KINDS})
