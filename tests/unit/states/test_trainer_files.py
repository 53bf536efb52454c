"""`save_states` and `load_states` of a Trainer in one process: what is saved, and what wins."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kvtrainer import Trainer
from kvtrainer.lr_scheduler import FactorScheduler
from kvtrainer.states.file import SavedStates, read_state_file
from tests.support.saved_training import (
    PLACES,
    Net,
    same,
    train,
    trainer_of,
    weights,
)


def test_file_has_state_by_parameter_name_and_the_step_of_each(tmp_path: Path) -> None:
    net = Net()
    trainer = trainer_of(net, "adam")
    train(net, trainer, 0, 2)
    net.scale.requires_grad_(False)
    train(net, trainer, 2, 1)
    trainer.save_states(tmp_path / "states")
    saved = read_state_file(tmp_path / "states")
    assert {name: row.state["step"] for name, row in saved.parameters.items()} == {
        "scale": 2,
        **dict.fromkeys(["inner.weight", "inner.bias", "outer.weight", "outer.bias"], 3),
    }
    row = saved.parameters["inner.weight"]
    assert (row.shape, row.dtype, row.group) == ((900, 7), "float32", 0)
    shown = trainer.state_dict()["state"][1]
    assert row.state["exp_avg"].equal(shown["exp_avg"])
    assert row.state["exp_avg_sq"].equal(shown["exp_avg_sq"])


@PLACES
def test_numbers_in_the_file_win_and_multipliers_stay_the_live_ones(uok: bool | None, tmp_path: Path) -> None:
    net = Net()
    trainer = trainer_of(net, "sgd", uok, wd=0.5, rescale_grad=0.25)
    trainer.set_learning_rate(0.125)
    net.scale.lr_mult = 3.0  # type: ignore[attr-defined]
    trainer.save_states(tmp_path / "states")
    again = Net()
    other = trainer_of(again, "sgd", uok, wd=0.25, momentum=0.0, clip_gradient=2.0)
    again.scale.lr_mult = 5.0  # type: ignore[attr-defined]
    other.load_states(tmp_path / "states")
    optimizer = other.optimizer
    assert (other.learning_rate, optimizer.wd, optimizer.hyper["momentum"]) == (0.125, 0.5, 0.9)
    assert (optimizer.clip_gradient, optimizer.rescale_grad) == (None, 0.25)
    before = again.scale.detach().clone()
    x = torch.ones(1, 7)
    again(x).sum().backward()
    grad = again.scale.grad
    assert grad is not None
    other.step(1)
    change = 5.0 * 0.125 * (0.25 * grad + 0.5 * before)
    torch.testing.assert_close(again.scale.detach(), before - change, rtol=0, atol=1e-6)


def test_groups_come_back_with_what_torchs_schedulers_keep_in_them(tmp_path: Path) -> None:
    def build(net: Net) -> Trainer:
        groups = [{"params": [net.scale], "lr": 0.5}, {"params": list(net.outer.parameters())}]
        return Trainer(groups, "torch:AdamW", {"lr": 0.1, "betas": (0.8, 0.9)})

    trainer = build(Net())
    torch.optim.lr_scheduler.StepLR(trainer, 1, 0.5)
    trainer.param_groups[1]["betas"] = (0.7, 0.95)
    trainer.param_groups[1]["lr"] = 0.05
    trainer.save_states(tmp_path / "states")
    other = build(Net())
    other.load_states(tmp_path / "states")
    for name in ("lr", "betas", "initial_lr"):
        assert [g[name] for g in other.param_groups] == [g[name] for g in trainer.param_groups]


def test_states_before_the_first_step_can_be_saved_and_reset_a_trainer(tmp_path: Path) -> None:
    fresh, net, reference = trainer_of(Net(), "adam"), Net(), Net()
    fresh.save_states(tmp_path / "states")
    trainer = trainer_of(net, "adam")
    train(net, trainer, 0, 2)
    trainer.load_states(tmp_path / "states")
    reference.load_state_dict(net.state_dict())
    train(net, trainer, 2, 2)
    train(reference, trainer_of(reference, "adam"), 2, 2)
    assert same(weights(net), weights(reference))


def test_count_of_updates_goes_on_for_the_scheduler(tmp_path: Path) -> None:
    schedule = FactorScheduler(step=2, factor=0.5, base_lr=1.0)
    trainer = trainer_of(Net(), "adam", lr_scheduler=schedule)
    trainer.optimizer.num_update = 5
    trainer.save_states(tmp_path / "states")
    other = trainer_of(Net(), "adam", lr_scheduler=FactorScheduler(step=9, factor=0.1, base_lr=2.0))
    other.load_states(tmp_path / "states")
    assert other.optimizer.num_update == 5
    assert other.optimizer.lr_scheduler is not None
    assert other.optimizer.lr_scheduler.spec() == schedule.spec()
    assert other.optimizer.learning_rate == schedule(5)


def test_equal_scheduler_stays_the_object_that_the_user_has(tmp_path: Path) -> None:
    trainer = trainer_of(Net(), "adam", lr_scheduler=FactorScheduler(step=2, factor=0.5, base_lr=1.0))
    trainer.save_states(tmp_path / "states")
    mine = FactorScheduler(step=2, factor=0.5, base_lr=1.0)
    other = trainer_of(Net(), "adam", lr_scheduler=mine)
    other.load_states(tmp_path / "states")
    assert other.optimizer.lr_scheduler is mine


def test_file_made_without_a_scheduler_takes_it_away_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer_of(Net(), "adam", learning_rate=0.25).save_states(tmp_path / "states")
    other = trainer_of(Net(), "adam", lr_scheduler=FactorScheduler(step=2, base_lr=1.0))
    with caplog.at_level(logging.WARNING):
        other.load_states(tmp_path / "states")
    assert other.optimizer.lr_scheduler is None
    assert other.learning_rate == 0.25
    assert "made without lr_scheduler" in caplog.text


def test_subclass_saves_and_restores_parts_of_its_own(tmp_path: Path) -> None:
    class Extended(Trainer):
        restored: Any = None

        def export_saved_states(self) -> SavedStates:
            saved = super().export_saved_states()
            tensors = {**saved.tensors, "mine": {"w": torch.ones(2)}}
            return replace(saved, extra={**saved.extra, "mine": {"scale": 2.0}}, tensors=tensors)

        def adopt_saved_states(self, saved: SavedStates) -> None:
            super().adopt_saved_states(saved)
            self.restored = saved.extra["mine"], saved.tensors["mine"]["w"].tolist()

    trainer = Extended(Net().trained(), "sgd")
    trainer.save_states(tmp_path / "states")
    trainer.load_states(tmp_path / "states")
    assert trainer.restored == ({"scale": 2.0}, [1.0, 1.0])
