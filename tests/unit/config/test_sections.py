"""Configurations as MMCV and mmengine write them, and the arguments of a Trainer that they stand for."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from kvstore_server.optimizer import create
from kvtrainer import Trainer
from kvtrainer.config import merge_config, optimizer_arguments, trainer_arguments, wrapper_arguments
from kvtrainer.errors import ConfigurationError, UnregisteredNameError

SGD = {"type": "SGD", "lr": 0.5, "momentum": 0.9}


def arguments(**cfg: Any) -> dict[str, Any]:
    """What a configuration adds to the model and the optimizer."""
    made = trainer_arguments(nn.Linear(1, 1), {"optimizer": SGD, **cfg})
    return {
        key: value for key, value in made.items() if key not in ("params", "optimizer", "optimizer_params")
    }


@pytest.mark.parametrize(
    ("kind", "cls"),
    [("Adam", torch.optim.Adam), ("adam", torch.optim.Adam), ("AdamW", torch.optim.AdamW)],
)
def test_optimizer_is_torchs_with_the_options_of_the_configuration(kind: str, cls: type) -> None:
    model = nn.Linear(1, 1)
    cfg = {"optimizer": {"type": kind, "lr": 0.0003, "weight_decay": 0.0001}}
    made = trainer_arguments(model, cfg)
    assert made == {
        "params": model,
        "optimizer": cls,
        "optimizer_params": {"lr": 0.0003, "weight_decay": 0.0001},
    }
    assert cfg == {"optimizer": {"type": kind, "lr": 0.0003, "weight_decay": 0.0001}}


def test_gluons_optimizers_are_there_under_a_prefix_or_a_name_that_torch_lacks() -> None:
    for kind in ("gluon:sgd", "signum"):
        made = optimizer_arguments(nn.Linear(1, 1), {"type": kind, "learning_rate": 0.1})
        assert made["optimizer"] is type(create(kind.removeprefix("gluon:")))
        assert Trainer(**made, kvstore=None).learning_rate == 0.1


def test_paramwise_cfg_is_the_trainers_paramwise() -> None:
    paramwise = {"bias_lr_mult": 2.0}
    assert arguments(optimizer={**SGD, "paramwise_cfg": paramwise}) == {"paramwise": paramwise}
    assert arguments(paramwise=paramwise) == {"paramwise": paramwise}


@pytest.mark.parametrize(
    ("cfg", "expected"),
    [
        ({"optimizer_config": {"grad_clip": None}}, {}),
        ({"optimizer_config": {}}, {}),
        ({"optimizer_config": None, "fp16": None}, {}),
        ({"optimizer_config": {"_delete_": True, "grad_clip": {"max_norm": 35, "norm_type": 2}}},
         {"clip_grad": {"max_norm": 35, "norm_type": 2}}),
        ({"optimizer_config": {"type": "OptimizerHook", "detect_anomalous_params": True}},
         {"detect_anomalous_params": True}),
        ({"optimizer_config": {"type": "GradientCumulativeOptimizerHook", "cumulative_iters": 4}}, {"accumulate": 4}),
        ({"optimizer_config": {"type": "Fp16OptimizerHook", "loss_scale": "dynamic"}}, {"amp": "dynamic"}),
        ({"optimizer_config": {"type": "GradientCumulativeFp16OptimizerHook", "cumulative_iters": 2}},
         {"amp": 512.0, "accumulate": 2}),
        ({"fp16": {}}, {"amp": 512.0}),
        ({"fp16": {"loss_scale": 512}}, {"amp": 512}),
        ({"fp16": {"loss_scale": {"init_scale": 8.0}, "coalesce": True, "bucket_size_mb": -1, "distributed": True}},
         {"amp": {"init_scale": 8.0}}),
        ({"fp16": {"distributed": False}}, {"amp": 512.0, "kvstore": None}),
        ({"fp16": {"bucket_size_mb": 4}}, {"amp": 512.0, "bucket_size_mb": 4}),
        ({"fp16": {"coalesce": False}}, {"amp": 512.0, "coalesce": False}),
        ({"fp16": {"loss_scale": "dynamic"}, "optimizer_config": {"grad_clip": {"max_norm": 1}}},
         {"amp": "dynamic", "clip_grad": {"max_norm": 1}}),
        ({"fp16": {}, "optimizer_config": {"type": "GradientCumulativeOptimizerHook", "cumulative_iters": 2}},
         {"amp": 512.0, "accumulate": 2}),
    ],
    ids=str,
)  # fmt: skip
def test_optimizer_config_and_fp16_are_the_options_of_one_hook(
    cfg: dict[str, Any], expected: dict[str, Any]
) -> None:
    assert arguments(**cfg) == expected


def test_schedules_are_lr_config_and_momentum_config_beside_others() -> None:
    def other(optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.StepLR(optimizer, 1)

    lr, momentum = {"policy": "step", "step": [8, 11]}, {"policy": "cyclic"}
    made = arguments(lr_config=lr, momentum_config=momentum, schedules=[other], runner={"max_epochs": 12})
    assert made == {
        "schedules": [
            other,
            {"policy": "step", "step": [8, 11], "name": "lr", "max_epochs": 12},
            {"policy": "cyclic", "name": "momentum", "max_epochs": 12},
        ]
    }
    assert "schedules" not in arguments(lr_config=None, schedules=None)
    with pytest.raises(TypeError, match="a list of schedules, got"):
        arguments(schedules=lr)
    with pytest.raises(ConfigurationError, match="max_iters: given twice"):
        arguments(lr_config=lr, max_iters=3, runner={"type": "IterBasedRunner", "max_iters": 4})


@pytest.mark.parametrize(
    "cfg",
    [
        {"max_epochs": 300, "runner": {"type": "EpochBasedRunner", "max_epochs": 300}},
        {"max_epochs": 300, "train_cfg": {"max_epochs": 300}},
        {"total_epochs": 300, "runner": {"max_epochs": 300}},
        {"total_epochs": 300, "max_epochs": 300, "runner": {"max_epochs": 300}, "train_cfg": {"max_epochs": 300}},
    ],
    ids=str,
)  # fmt: skip
def test_a_length_that_is_said_twice_alike_is_no_contradiction(cfg: dict[str, Any]) -> None:
    [schedule] = arguments(lr_config={"policy": "poly"}, **cfg)["schedules"]
    assert schedule == {"policy": "poly", "name": "lr", "max_epochs": 300}


HELPERS = [
    "num_epochs", "n_epochs", "epochs", "train_epochs", "max_steps", "num_last_epochs", "runner_cfg", "schedule_cfg",
    "optimizer_cfgs", "optimizer_cfg", "optimizer_g", "paramwise_cfg", "train_img", "train_config", "base_lr", "map",
]  # fmt: skip


@pytest.mark.parametrize("name", HELPERS)
def test_a_variable_of_the_users_own_is_no_slip_of_the_pen(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert arguments(**{name: 3}) == {}
    assert caplog.records[0].args == (name,)


@pytest.mark.parametrize(
    ("slip", "meant"),
    [
        ("optimzer", "optimizer"), ("optimizer_confg", "optimizer_config"), ("lr_confg", "lr_config"),
        ("param_schedulers", "param_scheduler"), ("max_epoch", "max_epochs"), ("train_cgf", "train_cfg"),
        ("lrconfig", "lr_config"), ("schedule", "schedules"), ("total_epcohs", "total_epochs"),
    ],
)  # fmt: skip
def test_a_slip_of_the_pen_is_refused_with_what_was_meant(slip: str, meant: str) -> None:
    with pytest.raises(ConfigurationError, match=f"'{slip}'.*{meant}'"):
        arguments(**{slip: {}})


def test_of_a_runner_its_length_is_read_and_the_rest_is_named(caplog: pytest.LogCaptureFixture) -> None:
    runner = {"type": "DynamicIterBasedRunner", "is_dynamic_ddp": True, "max_iters": 9, "max_steps": 2}
    [schedule] = arguments(lr_config={"policy": "poly"}, runner=runner)["schedules"]
    assert schedule["max_iters"] == 9
    [record] = caplog.records
    assert record.args == ("runner.is_dynamic_ddp, runner.max_steps",)


def test_arguments_of_a_trainer_are_passed_on_by_their_own_names() -> None:
    own = {"kvstore": "dist_sync", "update_on_kvstore": False, "on_nonfinite": "skip", "accumulate": 2}
    assert arguments(**own) == own


@pytest.mark.parametrize(
    ("cfg", "error", "message"),
    [
        ({"optimiser": SGD}, ValueError, "'optimiser'"),
        ({"fp61": {}}, ValueError, "'fp61'.* 'fp16'"),
        ({"lr_confg": {}, "data": {}}, ValueError, "'lr_confg'.* 'lr_config'"),
        ({"optimizer": None}, ValueError, "needs an 'optimizer'"),
        ({"optimizer": [SGD]}, TypeError, "optimizer.* got list"),
        ({"optimizer": {"lr": 0.5}}, KeyError, "needs a 'type'"),
        ({"optimizer": {"type": "SDG", "lr": 1}}, KeyError, "'SDG' is not in the optimizer registry"),
        ({"optimizer": {**SGD, "constructor": "Mine"}}, KeyError, "'Mine' is not in the optimizer constructor"),
        ({"optimizer": {**SGD, "paramwise_cfg": 3}}, TypeError, "paramwise_cfg"),
        ({"optimizer_config": 3}, TypeError, "optimizer_config must be a dict, got int"),
        ({"optimizer_config": {"grad_clips": 1}}, ValueError, "'grad_clips'"),
        ({"optimizer_config": {"type": "MyHook"}}, ValueError, "'MyHook' is no hook whose options a Trainer has"),
        ({"optimizer_config": {"cumulative_iters": 2}}, ValueError, "'cumulative_iters'"),
        ({"optimizer_config": {"loss_scale": 2}}, ValueError, "'loss_scale'"),
        ({"fp16": {"loss_scales": 1}}, ValueError, "fp16.* 'loss_scales'"),
        ({"fp16": {"loss_scale": None}}, ValueError, "loss_scale must be 'dynamic', a number or a dict; got None"),
        ({"fp16": {"coalesce": 1}}, ValueError, "coalesce must be True or False, got 1"),
        ({"fp16": {"distributed": 1}}, ValueError, "distributed must be True or False"),
        ({"fp16": 512.0}, TypeError, "fp16 must be a dict, got float"),
        ({"runner": {"max_epoch": 3}, "lr_config": {}}, ValueError, "runner.* 'max_epoch'"),
        ({"fp16": {}, "amp": "dynamic"}, ValueError, "amp: given twice in the configuration"),
        ({"optimizer": {**SGD, "paramwise_cfg": {}}, "paramwise": {}}, ValueError, "paramwise: given twice"),
        ({"custom_imports": {"import": "a"}}, ValueError, "custom_imports.* 'import'"),
        ({"custom_imports": {"imports": ["no_such_module"]}}, ImportError, "'no_such_module' of custom_imports"),
        ({"optim_wrapper": {"optimizer": SGD}}, ValueError, "optim_wrapper says what optimizer would say"),
    ],
    ids=str,
)  # fmt: skip
def test_what_no_trainer_reads_is_refused_by_name(
    cfg: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message) as caught:
        arguments(**cfg)
    assert isinstance(caught.value, ConfigurationError)


def test_of_a_whole_configuration_of_mmcv_the_rest_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    rest = {
        "checkpoint_config": {"interval": 1}, "log_config": {}, "custom_hooks": [], "dist_params": {},
        "log_level": "INFO", "load_from": None, "resume_from": None, "workflow": [("train", 1)],
        "opencv_num_threads": 0,
        "mp_start_method": "fork", "auto_scale_lr": {}, "model": {}, "dataset_type": "CocoDataset",
        "data_root": "data/", "img_norm_cfg": {}, "train_pipeline": [], "test_pipeline": [], "data": {},
        "evaluation": {}, "work_dir": "w",
        "gpu_ids": [0], "seed": 0, "device": "cuda", "find_unused_parameters": True, "cudnn_benchmark": True,
    }  # fmt: skip
    made = arguments(fp16={}, lr_config={"policy": "poly"}, total_epochs=12, **rest)
    assert made == {"amp": 512.0, "schedules": [{"policy": "poly", "max_epochs": 12, "name": "lr"}]}
    [record] = caplog.records
    assert set(str(record.args[0]).split(", ")) == set(rest)  # type: ignore[index]


def test_of_a_whole_configuration_of_mmengine_the_rest_is_named_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    rest = {
        "default_scope": "mmdet", "default_hooks": {}, "env_cfg": {}, "vis_backends": [], "visualizer": {},
        "log_processor": {}, "log_level": "INFO", "load_from": None, "resume": False, "train_dataloader": {},
        "val_dataloader": {}, "test_dataloader": {}, "val_evaluator": {}, "test_evaluator": {}, "val_cfg": {},
        "test_cfg": {}, "auto_scale_lr": {}, "model": {}, "launcher": "none", "backend_args": None, "work_dir": "w",
        "experiment_name": "e", "randomness": {}, "custom_hooks": [], "strategy": {}, "runner_type": "Runner",
    }  # fmt: skip
    model = nn.Linear(1, 1)
    cfg = {
        **rest,
        "optim_wrapper": {"type": "OptimWrapper", "optimizer": SGD},
        "param_scheduler": [
            {"type": "LinearLR", "start_factor": 0.5, "by_epoch": False, "end": 2},
            {"type": "PolyLR"},
        ],
        "train_cfg": {"type": "EpochBasedTrainLoop", "max_epochs": 4, "val_interval": 1},
    }
    trainer = Trainer.from_config(model, cfg)
    assert set(str(caplog.records[0].args[0]).split(", ")) == set(rest)  # type: ignore[index]
    assert trainer.param_groups[0]["lr"] == SGD["lr"] / 2
    for _ in range(2):
        trainer.update_params(model(torch.ones(1, 1)).sum())
    assert trainer.param_groups[0]["lr"] == SGD["lr"]
    trainer.end_epoch()
    # A polynomial of power 1 that is 0 in the last of four epochs.
    assert trainer.param_groups[0]["lr"] == pytest.approx(SGD["lr"] * 2 / 3)


def test_custom_imports_come_before_the_names_that_they_register(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "constructors_of_mine.py").write_text(
        "import torch\n"
        "from kvtrainer.registry import OPTIMIZER_BUILDERS\n"
        "@OPTIMIZER_BUILDERS.register_module()\n"
        "class Halving:\n"
        "    def __init__(self, optimizer_cfg, paramwise_cfg=None):\n"
        "        self.lr, self.paramwise_cfg = optimizer_cfg['lr'], paramwise_cfg\n"
        "    def __call__(self, model):\n"
        "        assert self.paramwise_cfg == {'a': 1}\n"
        "        return torch.optim.SGD([{'params': [model.weight], 'lr': self.lr / 2}], lr=self.lr)\n"
    )
    optimizer = {**SGD, "constructor": "Halving", "paramwise_cfg": {"a": 1}}
    with pytest.raises(UnregisteredNameError):
        arguments(optimizer=optimizer)
    model = nn.Linear(1, 1)
    cfg = {"custom_imports": {"imports": ["constructors_of_mine"], "allow_failed_imports": False}}
    made = trainer_arguments(model, {**cfg, "optimizer": optimizer})
    trainer = Trainer(**made, kvstore=None)
    assert [name for name, _ in made["params"]] == ["weight"]
    [group] = trainer.param_groups
    assert (group["lr"], group["params"]) == (0.25, [model.weight])
    del sys.modules["constructors_of_mine"]


def test_constructor_must_make_a_torch_optimizer() -> None:
    def constructor(optimizer_cfg: Any, paramwise_cfg: Any) -> Any:
        return lambda model: None

    with pytest.raises(TypeError, match="must return a torch optimizer"):
        optimizer_arguments(nn.Linear(1, 1), SGD, constructor=constructor)


def test_optimizer_that_is_built_already_is_taken_with_its_groups() -> None:
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD([model.bias], lr=0.5)
    made = trainer_arguments(model, {"optimizer": optimizer})
    assert made["optimizer"] is optimizer
    assert [name for name, _ in made["params"]] == ["bias"]
    assert wrapper_arguments(model, {"optimizer": optimizer, "accumulative_counts": 2})["accumulate"] == 2
    with pytest.raises(ConfigurationError, match="a SGD instance brings its own groups"):
        wrapper_arguments(model, {"optimizer": optimizer, "paramwise_cfg": {}})


def test_optimizer_may_be_made_by_a_function_which_is_given_groups() -> None:
    def make(params: Any, lr: float) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=lr)

    cfg = {"type": make, "lr": 0.5, "paramwise_cfg": {"bias_lr_mult": 2.0}}
    made = optimizer_arguments(nn.Linear(1, 1), cfg)
    assert [group["lr"] for group in made["optimizer"].param_groups] == [0.5, 1.0]


@pytest.mark.parametrize(
    ("cfg", "expected"),
    [
        ({}, {}),
        ({"type": "OptimWrapper", "clip_grad": {"max_norm": 35}, "accumulative_counts": 4},
         {"clip_grad": {"max_norm": 35}, "accumulate": 4}),
        ({"paramwise_cfg": {"norm_decay_mult": 0.0}}, {"paramwise": {"norm_decay_mult": 0.0}}),
        ({"amp": "dynamic", "clip_grad": None}, {"amp": "dynamic"}),
        ({"type": "AmpOptimWrapper"}, {"amp": "dynamic"}),
        ({"type": "AmpOptimWrapper", "loss_scale": 512.0, "dtype": "float16"},
         {"amp": {"loss_scale": 512.0, "dtype": "float16"}}),
        ({"type": "AmpOptimWrapper", "loss_scale": {"init_scale": 8.0}, "dtype": "float16"},
         {"amp": {"init_scale": 8.0, "dtype": "float16"}}),
        ({"type": "AmpOptimWrapper", "dtype": "float16"}, {"amp": {"dtype": "float16", "loss_scale": "dynamic"}}),
        ({"type": "AmpOptimWrapper", "dtype": "bfloat16"}, {"amp": {"dtype": "bfloat16"}}),
        ({"type": "AmpOptimWrapper", "dtype": "bfloat16", "loss_scale": "dynamic"}, {"amp": {"dtype": "bfloat16"}}),
        ({"type": "Trainer", "amp": None, "on_nonfinite": "skip"}, {"on_nonfinite": "skip"}),
    ],
    ids=str,
)  # fmt: skip
def test_optim_wrapper_of_mmengine_becomes_the_options_of_a_trainer(
    cfg: dict[str, Any], expected: dict[str, Any]
) -> None:
    optimizer = {**SGD, "weight_decay": 0.1}
    made = trainer_arguments(nn.Linear(1, 1), {"optim_wrapper": {"optimizer": optimizer, **cfg}})
    assert made.pop("optimizer_params") == {"lr": 0.5, "momentum": 0.9, "weight_decay": 0.1}
    assert (made.pop("optimizer"), made.pop("params") is None) == (torch.optim.SGD, False)
    assert made == expected


@pytest.mark.parametrize(
    ("cfg", "message"),
    [
        ({"type": dict, "optimizer": SGD}, "is none that a Trainer is like"),
        (
            {"type": "ApexOptimWrapper", "optimizer": SGD},
            "'ApexOptimWrapper' is not in the optimizer wrapper reg",
        ),
        ({"optimizer": SGD, "loss_scale": 8}, r"OptimWrapper\).* 'loss_scale'"),
        ({"clip_grad": {}}, "optim_wrapper needs an 'optimizer'"),
        ({"type": "AmpOptimWrapper", "optimizer": SGD, "amp": 8, "loss_scale": 8}, "'loss_scale' and 'amp'"),
        ({"optimizer": SGD, "paramwise": {}, "paramwise_cfg": {}}, "'paramwise_cfg' and 'paramwise'"),
        (
            {"optimizer": SGD, "accumulate": 2, "accumulative_counts": 3},
            "'accumulative_counts' and 'accumulate'",
        ),
        ({"optimizer": SGD, "clip_gard": {}}, "Did you mean 'clip_grad'"),
    ],
)
def test_optim_wrapper_that_no_trainer_is_like_is_refused(cfg: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        wrapper_arguments(nn.Linear(1, 1), cfg)


def test_new_configuration_is_laid_over_the_base() -> None:
    base = {"optimizer": {"type": "SGD", "lr": 0.1, "nested": {"a": 1}}, "other": 1}
    new = {"optimizer": {"lr": 0.2, "nested": {"b": 2}}, "third": {"c": 3}}
    merged = merge_config(base, new)
    expected = {"type": "SGD", "lr": 0.2, "nested": {"a": 1, "b": 2}}
    assert merged == {"optimizer": expected, "other": 1, "third": {"c": 3}}
    assert base == {"optimizer": {"type": "SGD", "lr": 0.1, "nested": {"a": 1}}, "other": 1}
    assert new == {"optimizer": {"lr": 0.2, "nested": {"b": 2}}, "third": {"c": 3}}


def test_delete_replaces_what_would_be_inherited() -> None:
    clip = {"max_norm": 35, "norm_type": 2}
    base = {"optimizer_config": {"type": "Fp16OptimizerHook", "loss_scale": 8.0}}
    new = {"optimizer_config": {"_delete_": True, "grad_clip": clip}}
    assert merge_config(base, new) == {"optimizer_config": {"grad_clip": clip}}
    assert merge_config({}, new) == {"optimizer_config": {"grad_clip": clip}}
    assert new["optimizer_config"]["_delete_"] is True
    assert merge_config(
        {"optimizer_config": {"grad_clip": None}}, {"optimizer_config": {"grad_clip": clip}}
    ) == {"optimizer_config": {"grad_clip": clip}}


def test_dict_over_something_else_needs_delete() -> None:
    with pytest.raises(TypeError, match="fp16 is a dict in the new configuration but float in the base"):
        merge_config({"fp16": 512.0}, {"fp16": {"loss_scale": 512.0}})
    merged = merge_config({"fp16": 512.0}, {"fp16": {"_delete_": True, "loss_scale": 512.0}})
    assert merged == {"fp16": {"loss_scale": 512.0}}


def test_dict_of_options_is_taken_from_objects_that_become_dicts() -> None:
    class Config:
        def to_dict(self) -> dict[str, Any]:
            return {"optimizer": SGD}

    assert trainer_arguments(nn.Linear(1, 1), Config())["optimizer_params"]["lr"] == 0.5  # type: ignore[arg-type]
