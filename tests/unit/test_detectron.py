"""Detectron's rules for parameters, its configuration keys, and its recipe for several devices."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import Parameter

from kvtrainer import DataParallel, Trainer
from kvtrainer.detectron import detectron_arguments, detectron_devices, detectron_rules, linear_scaling
from kvtrainer.errors import ConfigurationError
from kvtrainer.options.paramwise import apply_paramwise
from kvtrainer.schedules.config import bind_schedules


class Scalars(nn.Module):
    """A weight and a bias, and those of a GroupNorm, each one number."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(1, 1)
        self.norm = nn.GroupNorm(1, 1)
        for p in self.parameters():
            nn.init.ones_(p)


def options(model: nn.Module, **arguments: float) -> dict[str, tuple[float, float]]:
    made = apply_paramwise(model, detectron_rules(**arguments), {"lr": 0.5, "weight_decay": 0.25})
    return {row.name: (row.lr, row.weight_decay) for row in made.report.rows}


def test_biases_of_all_kinds_learn_twice_as_fast_without_decay_and_norm_scales_decay_by_themselves() -> None:
    assert options(Scalars(), weight_decay_gn=0.125) == {
        "body.weight": (0.5, 0.25),
        "body.bias": (1.0, 0.0),
        "norm.weight": (0.5, 0.125),
        "norm.bias": (1.0, 0.0),
    }


def test_biases_of_attention_and_recurrent_layers_count_as_biases() -> None:
    model = nn.ModuleDict({"attention": nn.MultiheadAttention(2, 1), "memory": nn.LSTM(1, 1)})
    fast = {name for name, (lr, _) in options(model).items() if lr == 1.0}
    assert fast == {name for name, _ in model.named_parameters() if "bias" in name}


SOLVER = {"BASE_LR": 0.02, "WEIGHT_DECAY": 1e-4, "WEIGHT_DECAY_GN": 0.125, "WARM_UP_ITERS": 5, "MAX_ITER": 90}


@pytest.mark.parametrize("is_flat", [False, True])
def test_configuration_keys_become_arguments_of_a_trainer(is_flat: bool) -> None:
    cfg = {f"SOLVER.{k}": v for k, v in SOLVER.items()} if is_flat else {"SOLVER": SOLVER}
    model = Scalars()
    arguments = detectron_arguments(model, {**cfg, "NUM_GPUS": 1})
    assert (arguments["params"], arguments["optimizer"]) == (model, "sgd")
    correction = {"momentum_correction": {"threshold": 1.1, "min_lr": 1e-7}}
    assert arguments["optimizer_params"] == {"learning_rate": 0.02, "momentum": 0.9, "wd": 1e-4, **correction}
    made = apply_paramwise(model, arguments["paramwise"], arguments["optimizer_params"])
    assert made.report["norm.weight"].weight_decay == 0.125
    optimizer = torch.optim.SGD([Parameter(torch.ones(1))], lr=0.02)
    [schedule] = bind_schedules(arguments["schedules"], optimizer)
    assert schedule.by == "step"
    rates = []
    for _ in range(6):
        rates.append(optimizer.param_groups[0]["lr"])
        schedule.step()
    warm_up = [0.0066666668, 0.0093333330, 0.0120000001, 0.0146666663, 0.0173333324, 0.02]
    assert rates == pytest.approx(warm_up, rel=1e-6)


def test_parameters_to_update_are_named_at_debug_level(caplog: pytest.LogCaptureFixture) -> None:
    net = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    net[0].bias.requires_grad_(False)
    trainer = Trainer(**detectron_arguments(net, {}))
    with caplog.at_level(logging.DEBUG, logger="kvtrainer"):
        for _ in range(2):
            trainer.update_params(net(torch.ones(1, 1)).sum())
    named = [record.args for record in caplog.records if "will be updated" in record.msg]
    assert named == [("0.weight",), ("1.weight",), ("1.bias",)]


def test_defaults_are_detectrons() -> None:
    arguments = detectron_arguments(None, {"SOLVER": {"SCALE_MOMENTUM": False}})
    assert arguments["optimizer_params"] == {"learning_rate": 0.001, "momentum": 0.9, "wd": 0.0005}
    assert [rule.weight_decay for rule in arguments["paramwise"]] == [0.0, 0.0]


@pytest.mark.parametrize(
    ("cfg", "message"),
    [
        ({"SOLVER": {"BASE_LRS": 1}}, r"'SOLVER\.BASE_LRS'"),
        ({"SOLVRE": {"BASE_LR": 1}}, "'SOLVRE'.* 'SOLVER'"),
        ({"NUM_GPU": 1}, "'NUM_GPU'.* 'NUM_GPUS'"),
        ({"SOLVER": 3}, "'SOLVER'"),
        ({"SOLVER": {"BASE_LR": 1}, "SOLVER.BASE_LR": 2}, r"SOLVER\.BASE_LR: given twice"),
        ({"SOLVER.BASE_LR": None}, r"SOLVER\.BASE_LR must be a finite number, got None"),
        ({"SOLVER.MOMENTUM": "0.9"}, r"SOLVER\.MOMENTUM must be a finite number, got '0\.9'"),
        ({"SOLVER.SCALE_MOMENTUM": 1}, "SCALE_MOMENTUM must be True or False"),
        ({"SOLVER.LOG_LR_CHANGE_THRESHOLD": 2.0}, "LOG_LR_CHANGE_THRESHOLD"),
        ({"NUM_GPUS": 0}, "NUM_GPUS.* 0"),
        ({"NUM_GPUS": True}, "NUM_GPUS.* True"),
        ({"USE_NCCL": 1}, "USE_NCCL must be True or False"),
    ],
)
def test_keys_that_say_nothing_are_refused(cfg: dict[str, Any], message: str) -> None:
    for read in (detectron_devices, lambda cfg: detectron_arguments(nn.Linear(1, 1), cfg)):
        with pytest.raises(ConfigurationError, match=message):
            read(cfg)


OTHERS = (
    "TRAIN", "DATA_LOADER", "TEST", "MODEL", "RETINANET", "FAST_RCNN", "RPN", "FPN", "MRCNN", "KRCNN", "RFCN",
    "RESNETS", "GROUP_NORM", "DEDUP_BOXES", "BBOX_XFORM_CLIP", "PIXEL_MEANS", "RNG_SEED", "EPS", "ROOT_DIR",
    "OUTPUT_DIR", "MATLAB", "VIS", "VIS_TH", "EXPECTED_RESULTS", "EXPECTED_RESULTS_RTOL", "EXPECTED_RESULTS_ATOL",
    "EXPECTED_RESULTS_EMAIL", "EXPECTED_RESULTS_SIGMA_TOL", "DOWNLOAD_CACHE", "CLUSTER", "MEMONGER",
    "MEMONGER_SHARE_ACTIVATIONS",
)  # fmt: skip
"""All sections and keys of Detectron's config.py beside SOLVER, NUM_GPUS and USE_NCCL."""


def test_of_a_whole_configuration_the_rest_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    solver = {"WEIGHT_DECAY": 0.0001, "LR_POLICY": "steps_with_decay", "BASE_LR": 0.02, "GAMMA": 0.1}
    solver |= {"MAX_ITER": 90000, "STEPS": [0, 60000, 80000]}
    rest: dict[str, Any] = dict.fromkeys(OTHERS, 1)
    rest |= {
        "TRAIN": {"SCALES": [800], "MAX_SIZE": 1333},
        "TEST.NMS": 0.5,
        "TEST": {"BBOX_AUG": {"ENABLED": True}},
    }
    cfg = {**rest, "NUM_GPUS": 1, "USE_NCCL": False, "SOLVER": solver, "SOLVER.GAMMA": 0.1}
    assert detectron_devices(cfg) == (1, "auto")
    made = detectron_arguments(nn.Linear(1, 1), cfg)
    assert made["optimizer_params"]["learning_rate"] == 0.02
    assert made["optimizer_params"]["wd"] == 0.0001
    [record] = caplog.records
    assert set(str(record.args[0]).split(", ")) == set(OTHERS)  # type: ignore[index]


@pytest.mark.parametrize(
    ("n", "expected"),
    [
        (1, (0.0025, [0, 30000, 40000], 60000)),
        (2, (0.005, [0, 15000, 20000], 30000)),
        (4, (0.01, [0, 7500, 10000], 15000)),
        (8, (0.02, [0, 3750, 5000], 7500)),
    ],
)
def test_linear_scaling_is_the_recipe_of_detectrons_tutorial(n: int, expected: tuple[Any, ...]) -> None:
    assert linear_scaling(0.0025, [0, 30000, 40000], 60000, n) == expected
    assert linear_scaling(*expected, 1 / n) == linear_scaling(0.0025, [0, 30000, 40000], 60000, 1)


@pytest.mark.parametrize("n", [0, -1, None, float("nan")])
def test_number_of_devices_that_cannot_be_is_refused(n: Any) -> None:
    with pytest.raises(ConfigurationError):
        linear_scaling(0.1, [], 10, n)


def test_devices_and_reducer_come_from_their_keys_and_the_model_has_as_many_replicas() -> None:
    assert detectron_devices({}) == (1, "auto")
    assert detectron_devices({"NUM_GPUS": 8}) == (8, "tree")
    assert detectron_devices({"NUM_GPUS": 2, "USE_NCCL": True}) == (2, "nccl")
    for count, replicas in ((8, 1), (2, 3)):
        model = DataParallel(nn.Linear(1, 1), ["cpu"] * replicas)
        with pytest.raises(ConfigurationError, match=f"{replicas} replicas"):
            detectron_arguments(model, {"NUM_GPUS": count})
    two = DataParallel(nn.Linear(1, 1), ["cpu"] * 2)
    assert isinstance(Trainer(**detectron_arguments(two, {"NUM_GPUS": 2})), Trainer)
