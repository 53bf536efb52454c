"""Checkpoints that mmengine's own strategies wrote: what they hold, and what they end with, was run with 0.10.7."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from kvtrainer.errors import StateMismatchError
from tests.support.strategies import Make

SCHEDULES: list[dict[str, Any]] = [
    {"type": "LinearLR", "start_factor": 0.1, "by_epoch": False, "begin": 0, "end": 4},
    {"type": "MultiStepLR", "by_epoch": False, "milestones": [6, 8], "gamma": 0.5},
    {"type": "CosineAnnealingLR", "by_epoch": True, "T_max": 4, "end": 4},
]
RUN = {"max_iters": 20, "max_epochs": 4, "epoch_length": 5}


def states(present: float = 0.04267766952966369) -> list[dict[str, Any]]:
    """What its schedulers had saved after 7 of the iterations, in the second epoch."""
    common = {
        "param_name": "lr",
        "begin": 0,
        "base_values": [0.1],
        "verbose": False,
        "_last_value": [present],
    }
    return [
        {**common, "start_factor": 0.1, "end_factor": 1.0, "total_iters": 3, "end": 4, "by_epoch": False,
         "last_step": 3, "_global_step": 7},
        {**common, "milestones": Counter({6: 1, 8: 1}), "gamma": 0.5, "end": 20, "by_epoch": False, "last_step": 7,
         "_global_step": 7},
        {**common, "T_max": 4, "eta_min": 0.0, "eta_min_ratio": None, "end": 4, "by_epoch": True, "last_step": 1,
         "_global_step": 1, "_last_value": [0.08535533905932738]},
    ]  # fmt: skip


def optimizer(**more: Any) -> dict[str, Any]:
    group = {"lr": 0.04267766952966369, "initial_lr": 0.1, "momentum": 0.9, "dampening": 0, "weight_decay": 0}
    group |= {"nesterov": False, "maximize": False, "foreach": None, "differentiable": False, "fused": None}
    state = {0: {"momentum_buffer": torch.full((1, 3), 1.5)}, 1: {"momentum_buffer": torch.tensor([1.5])}}
    return {"state": state, "param_groups": [{**group, "params": [0, 1]}], **more}


def written(folder: Path, **parts: Any) -> str:
    path = folder / "mmengine.pth"
    weights = {"weight": torch.full((1, 3), 0.25), "bias": torch.zeros(1)}
    meta = {"iter": 7, "epoch": 1, "seed": 3, "mmengine": "0.10.7"}
    torch.save({"state_dict": weights, "optimizer": optimizer(), **parts, "meta": meta}, path)
    return str(path)


SGD = {"optimizer": {"type": "SGD", "lr": 0.1, "momentum": 0.9}}


def test_a_run_goes_on_with_the_weights_momentum_and_rates_of_mmengine(make: Make, tmp_path: Path) -> None:
    strategy = make(kvstore=None)
    model, trainer, _ = strategy.prepare(
        nn.Linear(3, 1), optim_wrapper=SGD, param_scheduler=SCHEDULES, dispatch_kwargs=RUN
    )
    strategy.resume(written(tmp_path, param_schedulers=states()))
    assert trainer.get_lr()["lr"] == pytest.approx([0.04267766952966369])
    for done in range(8, 16):
        trainer.update_params(model(torch.ones(2, 3)).square().mean())
        if done % 5 == 0:
            trainer.end_epoch()
    assert trainer.get_lr()["lr"] == pytest.approx([0.0036611652351681567])
    assert model.weight.tolist()[0] == pytest.approx([-0.015871254727244377] * 3, abs=1e-6)


def test_schedules_by_step_count_updates_where_mmengine_counts_passes(make: Make, tmp_path: Path) -> None:
    strategy = make(kvstore=None)
    _, trainer, _ = strategy.prepare(
        nn.Linear(3, 1),
        optim_wrapper={**SGD, "accumulative_counts": 2},
        param_scheduler={"type": "MultiStepLR", "by_epoch": False, "milestones": [3, 4], "gamma": 0.5},
        dispatch_kwargs=RUN,
    )
    strategy.resume(written(tmp_path, param_schedulers=states()[1:2]))
    assert trainer.schedules[0].state_dict()["count"] == 3
    assert trainer.get_lr()["lr"] == [0.05]


@pytest.mark.parametrize(
    ("schedules", "message"),
    [
        ([SCHEDULES[0]], "3 states for 1 schedules"),
        (SCHEDULES[::-1], "'lr' by iteration, .* 'lr' by epoch"),
        (
            [{**SCHEDULES[0], "type": "LinearMomentum"}, *SCHEDULES[1:]],
            "'lr' by iteration, .* 'momentum' by step",
        ),
    ],
)
def test_other_schedules_are_refused(make: Make, tmp_path: Path, schedules: list[Any], message: str) -> None:
    strategy = make(kvstore=None)
    model, trainer, _ = strategy.prepare(
        nn.Linear(3, 1), optim_wrapper=SGD, param_scheduler=schedules, dispatch_kwargs=RUN
    )
    before = model.weight.clone(), trainer.get_lr()
    with pytest.raises(StateMismatchError, match=message):
        strategy.resume(written(tmp_path, param_schedulers=states()))
    assert torch.equal(before[0], model.weight)
    assert trainer.get_lr() == before[1]


PLATEAU = {
    "param_name": "lr", "begin": 0, "end": 10**9, "by_epoch": True, "last_step": 2, "_global_step": 3, "verbose": False,
    "factor": 0.1, "min_values": [0.0], "patience": 1, "cooldown": 0, "cooldown_counter": 0, "rule_worse": float("inf"),
    "best": 1.0, "num_bad_epochs": 1, "eps": 1e-8, "monitor": "loss", "rule": "less", "threshold": 1e-4,
    "threshold_rule": "rel", "_last_value": [0.04267766952966369],
}  # fmt: skip


def test_a_metric_schedule_resumes_its_best_value_and_patience(make: Make, tmp_path: Path) -> None:
    strategy = make(kvstore=None)
    plateau = {"type": "ReduceOnPlateauLR", "patience": 1, "monitor": "loss", "end": 9}
    _, trainer, _ = strategy.prepare(
        nn.Linear(3, 1), optim_wrapper=SGD, param_scheduler=plateau, dispatch_kwargs=RUN
    )
    strategy.resume(written(tmp_path, param_schedulers=[PLATEAU]))
    assert trainer.get_lr()["lr"] == [0.04267766952966369]
    trainer.end_epoch(1.0)  # the second bad epoch, after a patience of one
    assert trainer.get_lr()["lr"] == pytest.approx([0.004267766952966369])
    both = make(kvstore=None)
    both.prepare(
        nn.Linear(3, 1), optim_wrapper=SGD, param_scheduler=[SCHEDULES[0], plateau], dispatch_kwargs=RUN
    )
    with pytest.raises(StateMismatchError, match="by how much"):
        both.resume(written(tmp_path, param_schedulers=[states()[0], PLATEAU]))


def test_the_loss_scale_of_mmengines_mixed_precision_goes_on(make: Make, tmp_path: Path) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    amp = {"type": "AmpOptimWrapper", "loss_scale": "dynamic", **SGD}
    for saved, is_fit in ((scaler.state_dict(), True), ({"scale": 1.0}, False)):
        strategy = make(kvstore=None)
        _, trainer = strategy.prepare(nn.Linear(3, 1), optim_wrapper=amp)
        path = written(tmp_path, optimizer=optimizer(loss_scaler=saved))
        if is_fit:
            strategy.resume(path)
            assert trainer.amp_loss_scale == 1024
        else:
            with pytest.raises(StateMismatchError, match="loss scale"):
                strategy.resume(path)
            assert trainer.amp_loss_scale == 2.0**16
