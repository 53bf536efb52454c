"""Configurations as MMCV and mmengine write them, and the arguments of a Trainer that they stand for."""

from __future__ import annotations

import sys
from collections import UserDict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kvstore_server.optimizer import create
from kvtrainer import Trainer, kvstore
from kvtrainer.config import (
    DefaultOptimizerConstructor,
    merge_config,
    optimizer_arguments,
    trainer_arguments,
    wrapper_arguments,
)
from kvtrainer.detectron import detectron_arguments
from kvtrainer.errors import ConfigurationError, UnregisteredNameError
from kvtrainer.options.paramwise import ParamGroups, Rule, apply_paramwise
from kvtrainer.parallel import DataParallel
from tests.support.strategies import ConfigObject

SGD = {"type": "SGD", "lr": 0.5, "momentum": 0.9}


def arguments(**cfg: Any) -> dict[str, Any]:
    """What a configuration adds to the model and the optimizer."""
    made = trainer_arguments(nn.Linear(1, 1), {"optimizer": SGD, **cfg})
    return {key: made[key] for key in made if key not in ("params", "optimizer", "optimizer_params")}


def test_gluons_optimizers_are_there_under_a_prefix_or_a_name_that_torch_lacks() -> None:
    for kind in ("gluon:sgd", "signum"):
        made = optimizer_arguments(nn.Linear(1, 1), {"type": kind, "learning_rate": 0.1})
        assert made["optimizer"] is type(create(kind.removeprefix("gluon:")))
        assert Trainer(**made, kvstore=None).learning_rate == 0.1


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
def test_optimizer_config_and_fp16_are_one_hook(cfg: dict[str, Any], expected: dict[str, Any]) -> None:
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


def test_of_a_runner_its_length_is_read_and_the_rest_is_named(caplog: pytest.LogCaptureFixture) -> None:
    runner = {"type": "DynamicIterBasedRunner", "is_dynamic_ddp": True, "max_iters": 9, "max_steps": 2}
    [schedule] = arguments(lr_config={"policy": "poly"}, runner=runner)["schedules"]
    assert schedule["max_iters"] == 9
    [record] = caplog.records
    assert record.args == ("runner.is_dynamic_ddp, runner.max_steps",)


def test_arguments_of_a_trainer_are_passed_on_by_their_own_names() -> None:
    own = {
        "kvstore": "dist_sync",
        "update_on_kvstore": False,
        "on_nonfinite": "skip",
        "accumulate": 2,
        "overlap": True,
        "overlap_pull": False,
        "hierarchy": False,
    }
    assert arguments(**own) == own


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
    with pytest.raises(ConfigurationError, match="SGD instance"):
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
def test_optim_wrapper_becomes_a_trainers_options(cfg: dict[str, Any], expected: dict[str, Any]) -> None:
    optimizer = {**SGD, "weight_decay": 0.1}
    made = trainer_arguments(nn.Linear(1, 1), {"optim_wrapper": {"optimizer": optimizer, **cfg}})
    assert made.pop("optimizer_params") == {"lr": 0.5, "momentum": 0.9, "weight_decay": 0.1}
    assert (made.pop("optimizer"), made.pop("params") is None) == (torch.optim.SGD, False)
    assert made == expected


HELPERS = [
    "num_epochs", "n_epochs", "epochs", "train_epochs", "max_steps", "num_last_epochs", "runner_cfg", "schedule_cfg",
    "optimizer_cfgs", "optimizer_cfg", "optimizer_g", "paramwise_cfg", "train_img", "train_config", "base_lr", "map",
]  # fmt: skip


@pytest.mark.parametrize("name", HELPERS)
def test_a_variable_of_the_user_is_no_typo(name: str, caplog: pytest.LogCaptureFixture) -> None:
    assert arguments(**{name: 3}) == {}
    assert caplog.records[0].args == (name,)


TYPOS = {
    "optimiser": "optimizer", "fp61": "fp16", "lr_confg": "lr_config", "param_schedulers": "param_scheduler",
    "max_epoch": "max_epochs", "train_cgf": "train_cfg", "lrconfig": "lr_config", "schedule": "schedules",
    "total_epcohs": "total_epochs",
}  # fmt: skip


@pytest.mark.parametrize(("typo", "meant"), TYPOS.items())
def test_a_typo_is_refused_with_what_was_meant(typo: str, meant: str) -> None:
    with pytest.raises(ConfigurationError, match=f"'{typo}'.* '{meant}'"):
        arguments(**{typo: {}})


@pytest.mark.parametrize(
    ("cfg", "error", "message"),
    [
        ({"optimizer": None}, ValueError, "needs an 'optimizer'"),
        ({"optimizer": [SGD]}, TypeError, "optimizer.* list"),
        ({"optimizer": {"lr": 0.5}}, KeyError, "'type'"),
        ({"optimizer": {"type": "SDG", "lr": 1}}, KeyError, "'SDG'"),
        ({"optimizer": {**SGD, "constructor": "Mine"}}, KeyError, "'Mine'"),
        ({"optimizer": {**SGD, "paramwise_cfg": 3}}, TypeError, "paramwise_cfg"),
        ({"optimizer_config": 3}, TypeError, "optimizer_config.* int"),
        ({"optimizer_config": {"grad_clips": 1}}, ValueError, "'grad_clips'"),
        ({"optimizer_config": {"type": "MyHook"}}, ValueError, "'MyHook'"),
        ({"optimizer_config": {"cumulative_iters": 2}}, ValueError, "'cumulative_iters'"),
        ({"optimizer_config": {"loss_scale": 2}}, ValueError, "'loss_scale'"),
        ({"fp16": {"loss_scales": 1}}, ValueError, "fp16.* 'loss_scales'"),
        ({"fp16": {"loss_scale": None}}, ValueError, "loss_scale.* None"),
        ({"fp16": {"coalesce": 1}}, ValueError, "coalesce.* 1"),
        ({"fp16": {"distributed": 1}}, ValueError, "distributed"),
        ({"fp16": 512.0}, TypeError, "fp16.* float"),
        ({"runner": {"max_epoch": 3}, "lr_config": {}}, ValueError, "runner.* 'max_epoch'"),
        ({"fp16": {}, "amp": "dynamic"}, ValueError, "amp: given twice"),
        ({"optimizer": {**SGD, "paramwise_cfg": {}}, "paramwise": []}, ValueError, "paramwise: given twice"),
        ({"lr_config": {}, "max_iters": 3, "runner": {"max_iters": 4}}, ValueError, "max_iters: given twice"),
        ({"schedules": {"policy": "step"}}, TypeError, "a list of schedules"),
        ({"custom_imports": {"import": "a"}}, ValueError, "custom_imports.* 'import'"),
        ({"custom_imports": {"imports": ["no_such_module"]}}, ImportError, "'no_such_module' of custom_imports"),
        ({"optim_wrapper": {"optimizer": SGD}}, ValueError, "optim_wrapper.* optimizer"),
    ],
    ids=str,
)  # fmt: skip
def test_what_no_trainer_reads_is_refused_by_name(cfg: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message) as caught:
        arguments(**cfg)
    assert isinstance(caught.value, ConfigurationError)


def test_override_that_no_trainer_takes_is_refused_by_name() -> None:
    with pytest.raises(ConfigurationError, match=r"from_config.* 'clip_gard'"):
        Trainer.from_config(nn.Linear(1, 1), {"optimizer": SGD}, clip_gard={"max_norm": 1.0})


@pytest.mark.parametrize(
    ("cfg", "message"),
    [
        ({"type": dict, "optimizer": SGD}, "dict"),
        ({"type": "ApexOptimWrapper", "optimizer": SGD}, "'ApexOptimWrapper'"),
        ({"optimizer": SGD, "loss_scale": 8}, r"OptimWrapper\).* 'loss_scale'"),
        ({"clip_grad": {}}, "optim_wrapper needs an 'optimizer'"),
        ({"type": "AmpOptimWrapper", "optimizer": SGD, "amp": 8, "loss_scale": 9}, "amp: given twice"),
        ({"optimizer": SGD, "paramwise": {"bias_lr_mult": 2}, "paramwise_cfg": {}}, "paramwise: given twice"),
        ({"optimizer": SGD, "accumulate": 2, "accumulative_counts": 3}, "accumulate: given twice"),
        ({"optimizer": SGD, "clip_gard": {}}, "Did you mean 'clip_grad'"),
    ],
)
def test_optim_wrapper_that_no_trainer_is_like_is_refused(cfg: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        wrapper_arguments(nn.Linear(1, 1), cfg)


@pytest.mark.parametrize(
    ("wrapper", "expected"),
    [
        ({"type": "AmpOptimWrapper", "amp": 8, "loss_scale": 8}, {"amp": 8}),
        ({"type": "AmpOptimWrapper", "amp": 8}, {"amp": 8}),
        ({"accumulate": 2, "accumulative_counts": 2}, {"accumulate": 2}),
    ],
)
def test_option_of_a_wrapper_may_be_said_twice_alike(wrapper: Any, expected: dict[str, Any]) -> None:
    made = wrapper_arguments(nn.Linear(1, 1), {**wrapper, "optimizer": SGD})
    assert {name: made[name] for name in expected} == expected


def test_argument_may_be_said_by_its_own_name_and_by_a_hooks_alike() -> None:
    half = {"loss_scale": 512.0, "distributed": False}
    trainer = Trainer.from_config(
        nn.Linear(1, 1), {"optimizer": SGD, "fp16": half, "kvstore": None, "amp": 512}
    )
    assert (trainer.amp_loss_scale, trainer.kvstore) == (512, None)
    with pytest.raises(ConfigurationError, match="kvstore: given twice"):
        arguments(fp16=half, kvstore="local")


def test_every_part_of_a_configuration_may_be_an_object_or_a_mapping() -> None:
    for kind in (ConfigObject, UserDict):
        trainer = Trainer(
            nn.Linear(1, 1), "sgd", kind(learning_rate=0.5), None, clip_grad=kind(max_norm=1.0),
            amp=kind(init_scale=8.0), paramwise=kind(bias_lr_mult=2.0), schedules=[kind(policy="fixed")],
        )  # fmt: skip
        assert (trainer.get_lr()["lr"], trainer.amp_loss_scale) == ([0.5, 1.0], 8)
        cfg = kind(optimizer=kind(**SGD), lr_config=kind(policy="fixed"), optimizer_config=kind())
        assert len(Trainer.from_config(nn.Linear(1, 1), cfg, kvstore=None).schedules) == 1
        constructor = DefaultOptimizerConstructor(kind(**SGD), kind(bias_lr_mult=2.0))
        assert len(constructor(nn.Linear(1, 1)).param_groups) == 2
        assert merge_config(kind(a=kind(b=1)), kind(a=kind(c=2))) == {"a": {"b": 1, "c": 2}}


def test_a_length_that_is_said_twice_alike_is_no_contradiction() -> None:
    own = {"max_epochs": 300}
    lengths = {"total_epochs": 300, "max_epochs": 300, "runner": own, "train_cfg": own}
    for left_out in (
        (),
        ("total_epochs", "train_cfg"),
        ("total_epochs", "runner"),
        ("max_epochs", "train_cfg"),
    ):
        cfg = {name: length for name, length in lengths.items() if name not in left_out}
        [schedule] = arguments(lr_config={"policy": "poly"}, **cfg)["schedules"]
        assert schedule == {"policy": "poly", "name": "lr", "max_epochs": 300}


REST = [
    "default_scope", "default_hooks", "env_cfg", "vis_backends", "visualizer", "log_processor", "log_level",
    "load_from", "resume", "train_dataloader", "val_dataloader", "test_dataloader", "val_evaluator",
    "test_evaluator", "val_cfg", "test_cfg", "auto_scale_lr", "model", "launcher", "backend_args", "work_dir",
    "experiment_name", "randomness", "custom_hooks", "strategy", "runner_type", "checkpoint_config", "log_config",
    "dist_params", "resume_from", "workflow", "opencv_num_threads", "mp_start_method", "dataset_type", "data_root",
    "img_norm_cfg", "train_pipeline", "test_pipeline", "data", "evaluation", "gpu_ids", "seed", "device",
    "find_unused_parameters", "cudnn_benchmark",
]  # fmt: skip
"""Sections of MMCV and mmengine that are of other parts of a program."""


def test_of_mmengines_configuration_the_rest_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    rest = dict.fromkeys(REST)
    model = nn.Linear(1, 1)
    steps = [{"type": "LinearLR", "start_factor": 0.5, "by_epoch": False, "end": 2}, {"type": "PolyLR"}]

    cfg: Any = ConfigObject(
        **rest,
        optim_wrapper={"type": "OptimWrapper", "optimizer": SGD},
        param_scheduler=steps,
        train_cfg={"type": "EpochBasedTrainLoop", "max_epochs": 4, "val_interval": 1},
    )
    trainer = Trainer.from_config(model, cfg)
    [record] = caplog.records
    assert set(str(record.args[0]).split(", ")) == set(rest)  # type: ignore[index]
    assert trainer.param_groups[0]["lr"] == SGD["lr"] / 2
    for _ in range(2):
        trainer.update_params(model(torch.ones(1, 1)).sum())
    assert trainer.param_groups[0]["lr"] == SGD["lr"]
    trainer.end_epoch()
    # A polynomial of power 1 that is 0 in the last of four epochs.
    assert trainer.param_groups[0]["lr"] == pytest.approx(SGD["lr"] * 2 / 3)


def test_custom_imports_come_before_registered_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "constructors_of_mine.py").write_text(
        "import torch\n"
        "from kvtrainer.registry import OPTIMIZER_BUILDERS\n"
        "@OPTIMIZER_BUILDERS.register_module()\n"
        "def Halving(optimizer_cfg, paramwise_cfg=None):\n"
        "    lr = optimizer_cfg['lr'] / paramwise_cfg['by']\n"
        "    return lambda model: torch.optim.SGD([{'params': [model.weight], 'lr': lr}], lr=1)\n"
    )
    optimizer = {**SGD, "constructor": "Halving", "paramwise_cfg": {"by": 2}}
    with pytest.raises(UnregisteredNameError):
        arguments(optimizer=optimizer)
    model = nn.Linear(1, 1)
    cfg = {"custom_imports": {"imports": ["constructors_of_mine"], "allow_failed_imports": False}}
    made = trainer_arguments(model, {**cfg, "optimizer": optimizer})
    assert [name for name, _ in made["params"]] == ["weight"]
    [group] = Trainer(**made, kvstore=None).param_groups
    assert (group["lr"], group["params"]) == (0.25, [model.weight])
    del sys.modules["constructors_of_mine"]


def test_new_configuration_is_laid_over_the_base() -> None:
    base = {"optimizer": {"type": "SGD", "lr": 0.1, "nested": {"a": 1}}, "other": 1}
    new = {"optimizer": {"lr": 0.2, "nested": {"b": 2}}, "third": {"c": 3}}
    copies = [repr(base), repr(new)]
    expected = {"type": "SGD", "lr": 0.2, "nested": {"a": 1, "b": 2}}
    assert merge_config(base, new) == {"optimizer": expected, "other": 1, "third": {"c": 3}}
    assert [repr(base), repr(new)] == copies


def test_delete_replaces_what_would_be_inherited_and_is_needed_over_what_is_no_dict() -> None:
    clip: dict[str, Any] = {"grad_clip": {"max_norm": 35}}
    new = {"optimizer_config": {"_delete_": True, **clip}}
    for before in ({"optimizer_config": {"type": "Fp16OptimizerHook"}}, {}, {"optimizer_config": 3}):
        assert merge_config(before, new) == {"optimizer_config": clip}
    assert new["optimizer_config"]["_delete_"] is True
    nothing = {"optimizer_config": {"grad_clip": None}}
    assert merge_config(nothing, {"optimizer_config": clip}) == {"optimizer_config": clip}
    with pytest.raises(TypeError, match=r"fp16.* float"):
        merge_config({"fp16": 512.0}, {"fp16": {"loss_scale": 512.0}})


@pytest.mark.parametrize("cfg", [[], "norm", 3])
def test_constructor_refuses_a_configuration_that_is_no_dict(cfg: Any) -> None:
    for given, name in (((SGD, cfg), "paramwise_cfg"), ((cfg, {}), "optimizer_cfg")):
        with pytest.raises(TypeError, match=name):
            DefaultOptimizerConstructor(*given)


def test_constructor_takes_the_classes_default_for_what_is_missing_and_refuses_unknown_options() -> None:
    optimizer = DefaultOptimizerConstructor({"type": "Adam"}, {"bias_lr_mult": 2.0})(nn.Linear(1, 1))
    assert [group["lr"] for group in optimizer.param_groups] == [0.001, 0.002]
    with pytest.raises(ConfigurationError, match="'lr_mul'"):
        DefaultOptimizerConstructor(SGD, {"custom_keys": {"bias": {"lr_mul": 2.0}}})(nn.Linear(1, 1))
    made = optimizer_arguments(nn.Linear(1, 1), {**SGD, "constructor": "DefaultOptimizerConstructor"})
    assert made["optimizer"] is torch.optim.SGD


DECAYING = {**SGD, "weight_decay": 0.25}


def test_it_makes_a_torch_optimizer_with_merged_groups_and_names() -> None:
    constructor = DefaultOptimizerConstructor(DECAYING, {"bias_lr_mult": 2.0})
    model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    optimizer = constructor(model)
    assert type(optimizer) is torch.optim.SGD
    found = [(group["param_names"], group["lr"], group["momentum"]) for group in optimizer.param_groups]
    assert found == [(["0.weight", "1.weight"], 0.5, 0.9), (["0.bias", "1.bias"], 1.0, 0.9)]
    assert constructor.report is not None
    assert constructor.report["1.bias"].rules == ("bias_lr_mult",)


def test_optimizer_that_is_not_torchs_is_left_to_the_trainer() -> None:
    with pytest.raises(ConfigurationError, match="'signum'"):
        DefaultOptimizerConstructor({"type": "signum"})(nn.Linear(1, 1))
    with pytest.raises(ConfigurationError, match="got 3"):
        DefaultOptimizerConstructor({"type": lambda params: 3})(nn.Linear(1, 1))


@pytest.mark.parametrize(
    ("paramwise", "error"),
    [
        ({"custom_keys": 3}, TypeError),
        ({"custom_keys": {"bias": {"decay_mult": 2.0}}}, ValueError),
        ({"norm_decay_mult": 0.0}, ValueError),
        ({"bias_decay_mult": 0.0}, ValueError),
        ({"dwconv_decay_mult": 0.0}, ValueError),
        ({"bias_lr_mul": 2.0}, ConfigurationError),
    ],
)
def test_constructor_validates_as_mmcvs_does(paramwise: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        DefaultOptimizerConstructor(SGD, paramwise)
    if "bias_lr_mul" not in paramwise:
        with pytest.raises(error):
            ByLayer(SGD, {"layer_decay": 0.5, **paramwise})


class ByLayer(DefaultOptimizerConstructor):
    """Halves the rate of each layer before the last."""

    def param_groups(self, model: nn.Module) -> ParamGroups:
        decay = self.paramwise_cfg["layer_decay"]
        rules = [Rule(f".{i}.", lr_mult=decay ** (2 - i)) for i in range(3)]
        return apply_paramwise(model, rules, self.optimizer_cfg)


def test_subclass_may_make_other_groups() -> None:
    model = nn.Sequential(*(nn.Linear(1, 1) for _ in range(3)))
    optimizer = ByLayer(DECAYING, {"layer_decay": 0.5})(model)
    assert [group["lr"] for group in optimizer.param_groups] == [0.125, 0.25, 0.5]


class LayerDecay(DefaultOptimizerConstructor):
    """As MMCV's subclasses are written: it overrides add_params, with base_lr and base_wd."""

    def add_params(self, params: list[Any], module: nn.Module, **others: Any) -> None:  # type: ignore[override]
        for name, parameter in module.named_parameters():
            scale = self.paramwise_cfg.get("layer_decay", 1.0) ** (2 - int(name[0]))
            group = {"params": [parameter], "lr": self.base_lr * scale, "lr_scale": scale}
            params.append({**group, "weight_decay": 0.0 if name.endswith("bias") else self.base_wd})


def test_subclass_may_append_groups_as_mmcvs_do() -> None:
    model = nn.Sequential(*(nn.Linear(1, 1) for _ in range(3)))
    optimizer = LayerDecay(DECAYING, {"layer_decay": 0.5})(model)
    found = [(g["lr"], g["weight_decay"], g["lr_scale"], g["param_names"]) for g in optimizer.param_groups]
    assert found == [
        (0.5 * scale, decay, scale, [f"{at}.{name}"])
        for at, scale in enumerate((0.25, 0.5, 1.0))
        for name, decay in (("weight", 0.25), ("bias", 0.0))
    ]
    cfg = {"optimizer": {**DECAYING, "constructor": LayerDecay, "paramwise_cfg": {}}}
    trainer = Trainer.from_config(model, cfg)
    trainer.update_params(model(torch.ones(1, 1)).sum())
    assert trainer.param_groups[0]["lr_scale"] == 1.0


def test_subclass_may_add_to_the_groups_of_the_rules() -> None:
    class Marking(DefaultOptimizerConstructor):
        def add_params(self, params: list[dict[str, Any]], module: nn.Module, *given: Any) -> None:  # type: ignore[override]
            super().add_params(params, module)
            for group in params:
                group["lr"] = group.get("lr", self.base_lr) / 2

    optimizer = Marking(DECAYING, {"bias_lr_mult": 2.0})(nn.Linear(1, 1))
    assert [group["lr"] for group in optimizer.param_groups] == [0.25, 0.5]
    with pytest.raises(ConfigurationError, match="'head'"):
        DefaultOptimizerConstructor(DECAYING).add_params([], nn.Linear(1, 1), prefix="head")


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
    cfg = {"SOLVER.WEIGHT_DECAY_GN": 0.5, "SOLVER.WARM_UP_ITERS": 0}
    report = Trainer(**detectron_arguments(model, cfg)).describe_params()
    assert len(report.rows) == 8
    for name, rules in {"0.bias": ("bias",), "1.weight": ("GroupNorm scale",), "0.weight": ()}.items():
        both = [row for row in report.rows if row.name.partition(" ")[0] == name]
        assert [row.rules for row in both] == [rules, rules]
        assert len({(row.lr, row.weight_decay) for row in both}) == 1


def test_table_has_the_names_of_parameters_also_where_an_instance_brings_the_groups() -> None:
    model = nn.Linear(2, 1)
    trainer = Trainer(model, torch.optim.SGD(model.parameters(), lr=0.5), kvstore=None)
    assert [row.name for row in trainer.describe_params().rows] == ["weight", "bias"]
