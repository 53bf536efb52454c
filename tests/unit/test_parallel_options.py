"""What a Trainer's stages do to replicas of a model is what they do to the model on one device."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Linear, Module, Sequential, Tanh

from kvtrainer import DataParallel, Trainer
from kvtrainer.errors import NonFiniteGradientError
from tests.support.replica_training import STORES

OPTIONS: dict[str, Any] = {
    "paramwise": {"bias_lr_mult": 2.0, "norm_decay_mult": 0.0},
    "clip_grad": {"max_norm": 0.05},
    "accumulate": 2,
    "detect_anomalous_params": "raise",
    "on_nonfinite": "raise",
}


def net() -> Sequential:
    torch.manual_seed(1)
    return Sequential(Linear(3, 5), Tanh(), Linear(5, 2)).double()


def squares(module: Module, x: Tensor) -> Tensor:
    result: Tensor = module(x).pow(2).mean()
    return result


@STORES
@pytest.mark.filterwarnings("ignore::kvtrainer.errors.UnmatchedRuleWarning")
def test_norm_clipping_accumulation_and_rules_count_replicas_once(name: str, in_store: bool | None) -> None:
    single = net()
    model = DataParallel(copy.deepcopy(single), ["cpu"] * 3, reducer="tree")
    options = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}
    trainers = [
        Trainer(one, torch.optim.SGD, options, name, update_on_kvstore=in_store, **OPTIONS)
        for one in (single, model)
    ]
    for _ in range(6):
        x = torch.randn(7, 3, dtype=torch.float64)
        expected = trainers[0].update_params(squares(single, x))
        found = trainers[1].update_params(model.forward_losses(x, squares))
        assert found.updated == expected.updated
        if found.updated:
            assert found.grad_norm == pytest.approx(expected.grad_norm, abs=1e-12)
            assert found.clip_coef == pytest.approx(expected.clip_coef, abs=1e-12)
            assert found.clip_coef < 1.0
    for p, replicas in zip(single.parameters(), model.params, strict=True):
        assert torch.allclose(replicas[0], p, rtol=0, atol=1e-12)
        assert all(torch.equal(replicas[0], one) for one in replicas)


@STORES
def test_loss_that_is_not_finite_on_any_replica_stops_the_step_for_all(
    name: str, in_store: bool | None
) -> None:
    model = DataParallel(net(), ["cpu"] * 2)
    before = [p.clone() for p in model.parameters()]
    trainer = Trainer(model, "sgd", {"lr": 0.1}, name, update_on_kvstore=in_store, on_nonfinite="raise")
    x = torch.ones(4, 3, dtype=torch.float64)
    x[3] = float("nan")
    with pytest.raises(NonFiniteGradientError):
        trainer.update_params(model.forward_losses(x, squares))
    for p, replicas in zip(before, model.params, strict=True):
        assert all(torch.equal(p, one) for one in replicas)
