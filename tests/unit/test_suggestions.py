"""A name with a slip of the pen is answered with the one that was meant."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import nn

from kvstore_server.errors import did_you_mean
from kvstore_server.optimizer import lr_scheduler
from kvtrainer import DataParallel, Trainer, kvstore, optimizer
from kvtrainer.errors import KVStoreError
from kvtrainer.schedules import ParamSchedule, detectron_schedule
from tests.support.strategies import Make, Net, make

__all__ = ["make"]


def trainer(**options: Any) -> Trainer:
    return Trainer(nn.Linear(2, 1), "sgd", **options)


def from_config(cfg: Mapping[str, Any]) -> Trainer:
    return Trainer.from_config(nn.Linear(2, 1), cfg)


SLIPS: dict[str, tuple[Callable[[], object], str]] = {
    "store": (lambda: kvstore.create("dist_snyc"), "dist_sync"),
    "store of a Trainer": (lambda: trainer(kvstore="Locl"), "local"),
    "capability": (lambda: kvstore.create("local").is_capable("optimiser"), "optimizer"),
    "optimizer": (lambda: optimizer.create("adma"), "adam"),
    "torch's optimizer": (lambda: optimizer.create("torch:AdmaW"), "torch:adamw"),
    "option of an optimizer": (lambda: optimizer.create("sgd", learnin_rate=1), "learning_rate"),
    "scheduler": (lambda: lr_scheduler.create_from_spec({"name": "multifacto"}), "multifactor"),
    "compression": (lambda: trainer(compression_params={"type": "2bits"}), "2bit"),
    "policy": (lambda: ParamSchedule(trainer(), "lr", "CosineAnealing"), "CosineAnnealing"),
    "schedule": (lambda: trainer(schedules=[{"type": "StepLr"}]), "StepLR"),
    "Detectron's policy": (lambda: detectron_schedule({"LR_POLICY": "step_with_decay"}), "steps_with_decay"),
    "section": (lambda: from_config({"optimiser": SGD}), "optimizer"),
    "registered class": (lambda: from_config({"optimizer": {"type": "SDG", "lr": 1}}), "SGD"),
    "paramwise": (lambda: trainer(paramwise={"norm_decay": 0}), "norm_decay_mult"),
    "reducer": (lambda: DataParallel(nn.Linear(2, 2), ["cpu", "cpu"], reducer="tre"), "tree"),
}
SGD = {"type": "SGD", "lr": 1}


@pytest.mark.parametrize(("call", "meant"), SLIPS.values(), ids=SLIPS)
def test_the_name_that_was_meant_is_in_the_message(call: Callable[[], object], meant: str) -> None:
    with pytest.raises(KVStoreError) as raised:
        call()
    question = str(raised.value).lower().partition("did you mean ")[2]
    assert repr(meant).lower() in question.partition("?")[0]


def test_a_strategys_options_are_compared_too(make: Make) -> None:
    with pytest.raises(KVStoreError, match="'clip_grad'"):
        make().prepare(Net(), optim_wrapper={"optimizer": SGD, "clip_gard": {"max_norm": 1}})


def test_nothing_is_asked_where_nothing_is_similar() -> None:
    assert did_you_mean("bogus", ["local", "device"]) == ""
    assert did_you_mean(torch.zeros(1), ["local"]) == did_you_mean(None, ["local"]) == ""


def test_several_wrong_names_are_compared_with_all_right_ones() -> None:
    assert did_you_mean(["lcoal", 3, "devise"], ["local", "device"]) == ". Did you mean 'local' or 'device'?"
