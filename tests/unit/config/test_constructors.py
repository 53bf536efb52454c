"""The constructor of optimizers that is there already, on its own and as a base of others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from kvtrainer import Trainer
from kvtrainer.config import DefaultOptimizerConstructor, optimizer_arguments
from kvtrainer.errors import ConfigurationError
from kvtrainer.paramwise import ParamGroups, Rule, apply_paramwise

SGD = {"type": "SGD", "lr": 0.5, "weight_decay": 0.25, "momentum": 0.9}


def test_it_makes_a_torch_optimizer_with_merged_groups_and_names() -> None:
    constructor = DefaultOptimizerConstructor(SGD, {"bias_lr_mult": 2.0})
    model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    optimizer = constructor(model)
    assert type(optimizer) is torch.optim.SGD
    found = [(group["param_names"], group["lr"], group["momentum"]) for group in optimizer.param_groups]
    assert found == [(["0.weight", "1.weight"], 0.5, 0.9), (["0.bias", "1.bias"], 1.0, 0.9)]
    assert constructor.report is not None
    assert constructor.report["1.bias"].rules == ("bias_lr_mult",)


def test_missing_learning_rate_is_the_classes_default() -> None:
    optimizer = DefaultOptimizerConstructor({"type": "Adam"}, {"bias_lr_mult": 2.0})(nn.Linear(1, 1))
    assert [group["lr"] for group in optimizer.param_groups] == [0.001, 0.002]


def test_option_that_torch_would_put_into_a_group_unseen_is_refused() -> None:
    constructor = DefaultOptimizerConstructor(SGD, {"custom_keys": {"bias": {"lr_mul": 2.0}}})
    with pytest.raises(ConfigurationError, match="sets 'lr_mul', which is no option of the optimizer"):
        constructor(nn.Linear(1, 1))


def test_optimizer_that_is_not_torchs_is_left_to_the_trainer() -> None:
    with pytest.raises(ConfigurationError, match="'signum' is no torch optimizer"):
        DefaultOptimizerConstructor({"type": "signum"})(nn.Linear(1, 1))
    with pytest.raises(ConfigurationError, match="must make a torch optimizer, got"):
        DefaultOptimizerConstructor({"type": lambda params: 3})(nn.Linear(1, 1))


class ByLayer(DefaultOptimizerConstructor):
    """Halves the rate of each layer before the last."""

    def param_groups(self, model: nn.Module) -> ParamGroups:
        decay = self.paramwise_cfg["layer_decay"]
        rules = [Rule(f".{i}.", lr_mult=decay ** (2 - i)) for i in range(3)]
        return apply_paramwise(model, rules, self.optimizer_cfg)


def test_subclass_may_make_other_groups() -> None:
    model = nn.Sequential(*(nn.Linear(1, 1) for _ in range(3)))
    optimizer = ByLayer(SGD, {"layer_decay": 0.5})(model)
    assert [group["lr"] for group in optimizer.param_groups] == [0.125, 0.25, 0.5]


class LayerDecay(DefaultOptimizerConstructor):
    """As MMCV's subclasses are written: it overrides add_params, with base_lr and base_wd."""

    def add_params(  # type: ignore[override]
        self, params: list[dict[str, Any]], module: nn.Module, **others: Any
    ) -> None:
        for name, parameter in module.named_parameters():
            scale = self.paramwise_cfg.get("layer_decay", 1.0) ** (2 - int(name[0]))
            group = {"params": [parameter], "lr": self.base_lr * scale, "lr_scale": scale}
            params.append({**group, "weight_decay": 0.0 if name.endswith("bias") else self.base_wd})


def test_subclass_may_append_groups_as_mmcvs_do() -> None:
    model = nn.Sequential(*(nn.Linear(1, 1) for _ in range(3)))
    optimizer = LayerDecay(SGD, {"layer_decay": 0.5})(model)
    found = [(g["lr"], g["weight_decay"], g["lr_scale"], g["param_names"]) for g in optimizer.param_groups]
    assert found == [
        (0.125, 0.25, 0.25, ["0.weight"]),
        (0.125, 0.0, 0.25, ["0.bias"]),
        (0.25, 0.25, 0.5, ["1.weight"]),
        (0.25, 0.0, 0.5, ["1.bias"]),
        (0.5, 0.25, 1.0, ["2.weight"]),
        (0.5, 0.0, 1.0, ["2.bias"]),
    ]
    trainer = Trainer.from_config(
        model, {"optimizer": {**SGD, "constructor": LayerDecay, "paramwise_cfg": {}}}
    )
    trainer.update_params(model(torch.ones(1, 1)).sum())
    assert trainer.param_groups[0]["lr_scale"] == 1.0


def test_subclass_may_add_to_the_groups_of_the_rules() -> None:
    class Marking(DefaultOptimizerConstructor):
        def add_params(self, params: list[dict[str, Any]], module: nn.Module, *given: Any) -> None:  # type: ignore[override]
            super().add_params(params, module)
            for group in params:
                group["lr"] = group.get("lr", self.base_lr) / 2

    optimizer = Marking(SGD, {"bias_lr_mult": 2.0})(nn.Linear(1, 1))
    assert [group["lr"] for group in optimizer.param_groups] == [0.25, 0.5]
    with pytest.raises(ConfigurationError, match="'head'"):
        DefaultOptimizerConstructor(SGD).add_params([], nn.Linear(1, 1), prefix="head")


def test_registered_name_is_that_of_the_constructor() -> None:
    made = optimizer_arguments(nn.Linear(1, 1), {**SGD, "constructor": "DefaultOptimizerConstructor"})
    assert made["optimizer"] is torch.optim.SGD


@pytest.mark.parametrize("cfg", [[], "norm", 3])
def test_configuration_that_is_no_dict_is_refused(cfg: Any) -> None:
    with pytest.raises(TypeError, match="paramwise_cfg"):
        DefaultOptimizerConstructor(SGD, cfg)
    with pytest.raises(TypeError, match="optimizer_cfg"):
        DefaultOptimizerConstructor(cfg, {})
