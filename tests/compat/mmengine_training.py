"""A small training with mmengine's FlexibleRunner; run by the tests in mmengine's own environment.

    python mmengine_training.py '{"strategy": {"type": "MMEngineStrategy"}, "work_dir": ..., "out": ...}'

Every worker of a job runs it; rank 0 writes weights, logged values and what else tests ask for to `out`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, ClassVar

import torch
from mmengine.evaluator import BaseMetric
from mmengine.model import BaseModel
from mmengine.runner import FlexibleRunner
from torch import Tensor, nn
from torch.utils.data import Dataset

import kvtrainer.integrations.mmengine  # noqa: F401

SAMPLES, BATCH = 24, 8
PARAMWISE = {
    "norm_decay_mult": 0.0,
    "bias_lr_mult": 2.0,
    "bias_decay_mult": 0.5,
    "custom_keys": {"head": {"lr_mult": 0.5, "decay_mult": 2.0}},
}
SCHEDULES = [
    {"type": "LinearLR", "start_factor": 0.5, "by_epoch": False, "begin": 0, "end": 4},
    {"type": "MultiStepLR", "milestones": [1, 2], "gamma": 0.3},
    {"type": "LinearMomentum", "start_factor": 0.5, "by_epoch": False, "begin": 0, "end": 6},
]


class Samples(Dataset):  # type: ignore[type-arg]
    """Points whose class depends on their sum."""

    metainfo: ClassVar = {"classes": ("low", "high")}

    def __init__(self) -> None:
        self.points = torch.randn(SAMPLES, 6, generator=torch.Generator().manual_seed(3))

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, at: int) -> tuple[Tensor, Tensor]:
        return self.points[at], (self.points[at].sum() > 0).long()


class Net(BaseModel):  # type: ignore[misc]
    """A layer that is normalised, dropout and a head."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.backbone = nn.Linear(6, 8)
        self.norm = nn.LayerNorm(8)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(8, 2)

    def forward(self, points: Tensor, classes: Tensor, mode: str = "tensor") -> Any:
        found = self.head(self.dropout(torch.relu(self.norm(self.backbone(points)))))
        if mode == "loss":
            return {"loss": nn.functional.cross_entropy(found, classes)}
        return list(zip(found.argmax(1), classes, strict=True))


class Accuracy(BaseMetric):  # type: ignore[misc]
    """How many points are in the class that the model says, and how many points there were."""

    def process(self, data_batch: Any, data_samples: Any) -> None:
        self.results.extend(bool(said == true) for said, true in data_samples)

    def compute_metrics(self, results: list[bool]) -> dict[str, float]:
        return {"accuracy": sum(results) / len(results), "count": float(len(results))}


def train(question: dict[str, Any]) -> FlexibleRunner:
    """Train as asked for and return the runner."""
    world = question.get("world", 1)
    data = Samples()

    def loader(shuffle: bool) -> dict[str, Any]:
        # The runner makes it, once it is known which worker this is.
        return {
            "dataset": data,
            "batch_size": BATCH // world,
            "sampler": {"type": "DefaultSampler", "shuffle": shuffle},
            "collate_fn": {"type": "default_collate"},
        }

    optimizer = question.get("optimizer", {"type": "SGD", "lr": 0.2, "momentum": 0.9, "weight_decay": 0.01})
    wrapper = {"optimizer": optimizer, "clip_grad": {"max_norm": 0.5}, "paramwise_cfg": PARAMWISE}
    runner = FlexibleRunner(
        Net(question.get("dropout", 0.0)),
        work_dir=question["work_dir"],
        strategy=question["strategy"],
        train_dataloader=loader(shuffle=True),
        # Validation draws random numbers, which a run that is resumed after it would not draw.
        train_cfg={"by_epoch": True, "max_epochs": question["epochs"], "val_interval": 9},
        val_dataloader=loader(shuffle=False),
        val_cfg={},
        val_evaluator=[Accuracy(prefix="all")],
        optim_wrapper={**wrapper, **question.get("wrapper", {})},
        param_scheduler=question.get("schedules", SCHEDULES),
        default_hooks={"checkpoint": {"type": "CheckpointHook", "interval": 1}},
        resume=question.get("resume", False),
        randomness={"seed": 7},
        log_level="WARNING",
        **question.get("runner", {}),
    )
    runner.train()
    return runner


def main() -> None:
    question = json.loads(sys.argv[1])
    runner = train(question)
    hub = runner.message_hub
    answer = {
        "rank": runner.rank,
        "world": runner.world_size,
        "lr": runner.optim_wrapper.get_lr()["lr"],
        "momentum": runner.optim_wrapper.get_momentum()["momentum"],
        "logged": {
            name: [float(v) for v in hub.get_scalar(name).data[0]]
            for name in ("train/grad_norm", "train/lr")
            if name in hub.log_scalars
        },
        "count": hub.get_scalar("val/all/count").current(),
        "trainer": type(runner.optim_wrapper.optimizer).__name__,
        "wrapper": type(runner.optim_wrapper).__name__,
    }
    stats = getattr(runner.optim_wrapper.optimizer, "server_stats", list)()
    answer["servers"] = len(stats)
    if runner.rank == 0:
        weights = {name: value.detach().clone() for name, value in runner.model.state_dict().items()}
        torch.save({"weights": weights, "answer": json.dumps(answer)}, Path(question["out"]))
    if hasattr(runner.strategy, "close"):
        runner.strategy.close()


if __name__ == "__main__":
    main()
