"""Trainers that are built from configurations do what the configurations say."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kvtrainer import Trainer, kvstore
from kvtrainer.detectron import detectron_arguments
from kvtrainer.errors import ConfigurationError
from kvtrainer.parallel import DataParallel

CONFIG: dict[str, Any] = {
    "optimizer": {
        "type": "SGD", "lr": 0.5, "momentum": 0.8, "weight_decay": 0.1,
        "paramwise_cfg": {
            "custom_keys": {".2": {"lr_mult": 0.1}},
            "bias_lr_mult": 2.0, "bias_decay_mult": 0.0, "norm_decay_mult": 0.5,
        },
    },
    "optimizer_config": {"_delete_": True, "grad_clip": {"max_norm": 0.5, "norm_type": 2}},
    "lr_config": {"policy": "step", "step": [1, 3], "gamma": 0.5},
    "momentum_config": {"policy": "step", "step": [2], "gamma": 0.25},
}  # fmt: skip


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 1)).double()


def batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    draw = {"generator": generator, "dtype": torch.float64}
    return [(torch.randn(5, 3, **draw), torch.randn(5, 1, **draw)) for _ in range(3)]  # type: ignore[call-overload]


def by_hand(epochs: int) -> list[Tensor]:
    net = network()
    first, norm, last = net
    groups = [
        {"params": [first.weight]},
        {"params": [first.bias], "lr": 1.0, "weight_decay": 0.0},
        {"params": list(norm.parameters()), "weight_decay": 0.05},
        {"params": list(last.parameters()), "lr": 0.05},
    ]
    optimizer = torch.optim.SGD(groups, lr=0.5, momentum=0.8, weight_decay=0.1)
    rates = torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 3], 0.5)
    for epoch in range(epochs):
        for group in optimizer.param_groups:
            group["momentum"] = 0.8 if epoch < 2 else 0.2
        for x, y in batches():
            optimizer.zero_grad()
            nn.functional.mse_loss(net(x), y).backward()
            nn.utils.clip_grad_norm_(net.parameters(), 0.5)
            optimizer.step()
        rates.step()
    return [p.detach() for p in net.parameters()]


@pytest.mark.parametrize("in_store", [None, False, True])
def test_whole_configuration_trains_as_torch_does_with_the_same_numbers(in_store: bool | None) -> None:
    net = network()
    store = None if in_store is None else kvstore.create("local")
    trainer = Trainer.from_config(net, CONFIG, kvstore=store, update_on_kvstore=in_store)
    for _ in range(4):
        for x, y in batches():
            assert trainer.update_params(nn.functional.mse_loss(net(x), y)).grad_norm is not None
        trainer.end_epoch()
    for p, expected in zip(net.parameters(), by_hand(4), strict=True):
        torch.testing.assert_close(p.detach(), expected, rtol=1e-9, atol=1e-9)


def test_table_of_a_trainer_shows_rules_and_present_numbers() -> None:
    trainer = Trainer.from_config(network(), CONFIG)
    trainer.end_epoch()
    lines = [line.split() for line in str(trainer.describe_params()).splitlines()]
    assert lines[:6] == [
        ["parameter", "shape", "lr", "weight_decay", "initial_lr", "rules"],
        ["0.weight", "4x3", "0.25", "0.1", "0.5", "-"],
        ["0.bias", "4", "0.5", "0", "1", "bias_lr_mult,", "bias_decay_mult"],
        ["1.weight", "4", "0.25", "0.05", "0.5", "norm_decay_mult"],
        ["1.bias", "4", "0.25", "0.05", "0.5", "norm_decay_mult"],
        ["2.weight", "1x4", "0.025", "0.1", "0.05", "custom_keys['.2']"],
    ]


def test_replicas_have_the_rules_of_their_parameter() -> None:
    model = DataParallel(nn.Sequential(nn.Linear(2, 1), nn.GroupNorm(1, 1)), ["cpu", "cpu"])
    trainer = Trainer(
        **detectron_arguments(model, {"SOLVER.WEIGHT_DECAY_GN": 0.5, "SOLVER.WARM_UP_ITERS": 0})
    )
    report = trainer.describe_params()
    assert len(report.rows) == 8
    for name, rules in {"0.bias": ("bias",), "1.weight": ("GroupNorm scale",), "0.weight": ()}.items():
        both = [row for row in report.rows if row.name.partition(" ")[0] == name]
        assert [row.rules for row in both] == [rules, rules]
        assert len({(row.lr, row.weight_decay) for row in both}) == 1


def test_override_that_no_trainer_takes_is_refused_by_name() -> None:
    with pytest.raises(ConfigurationError, match=r"from_config.* 'clip_gard'"):
        Trainer.from_config(network(), CONFIG, clip_gard={"max_norm": 1.0})


def test_table_has_the_names_of_parameters_also_where_an_instance_brings_the_groups() -> None:
    model = nn.Linear(2, 1)
    trainer = Trainer(model, torch.optim.SGD(model.parameters(), lr=0.5), kvstore=None)
    assert [row.name for row in trainer.describe_params().rows] == ["weight", "bias"]
