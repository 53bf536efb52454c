"""MMCV's paramwise_cfg: which options parameters get from it, and what it refuses. Numbers are MMCV 1.7.2's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import Parameter

from kvtrainer.errors import (
    ConfigurationError,
    DuplicateParameterWarning,
    NotInitializedError,
)
from kvtrainer.paramwise import apply_paramwise

LR, WD = 0.01, 1e-4
BASE = {"lr": LR, "weight_decay": WD}
Table = dict[str, tuple[float, float]]


class Detector(nn.Module):
    """A convolution, a norm and a depthwise convolution; a head; and two parameters at the top."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = Parameter(torch.ones(1))
        self.bias = Parameter(torch.ones(1))
        layers = (nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 3, groups=4))
        self.backbone = nn.Sequential(*layers)
        self.cls_head = nn.Linear(4, 2)


def table(cfg: Any, model: nn.Module | None = None, base: Any = None) -> Table:
    made = apply_paramwise(
        model or Detector(), cfg, BASE if base is None else base, {"lr": 0.5, "weight_decay": 0.0}
    )
    return {row.name: (row.lr, row.weight_decay) for row in made.report.rows}


def assert_table(got: Table, expected: Table) -> None:
    assert list(got) == list(expected)
    for name, pair in expected.items():
        assert got[name] == pytest.approx(pair, rel=1e-12, abs=1e-18), name


KINDS: Table = {
    "scale": (LR, WD),
    "bias": (0.02, 5e-5),
    "backbone.0.weight": (LR, WD),
    "backbone.0.bias": (0.02, 5e-5),
    "backbone.1.weight": (LR, 0.0),
    "backbone.1.bias": (LR, 0.0),
    "backbone.2.weight": (LR, 1e-5),
    "backbone.2.bias": (0.02, 1e-5),
    "cls_head.weight": (LR, WD),
    "cls_head.bias": (0.02, 5e-5),
}
ALL_KINDS = {"bias_lr_mult": 2, "bias_decay_mult": 0.5, "norm_decay_mult": 0, "dwconv_decay_mult": 0.1}


def test_multipliers_by_kind_take_norms_before_depthwise_convolutions_before_biases() -> None:
    assert_table(table(ALL_KINDS), KINDS)


def test_mmengines_order_takes_biases_before_depthwise_convolutions() -> None:
    assert_table(table({**ALL_KINDS, "precedence": "mmengine"}), {**KINDS, "backbone.2.bias": (0.02, 5e-5)})


@pytest.mark.parametrize(
    ("precedence", "norm_bias", "depthwise_bias"), [("mmcv", WD, WD), ("mmengine", 5e-5, 5e-5)]
)
def test_decay_of_biases_alone_spares_norms_and_depthwise_convolutions_in_mmcvs_order(
    precedence: str, norm_bias: float, depthwise_bias: float
) -> None:
    got = table({"bias_decay_mult": 0.5, "precedence": precedence})
    assert got["cls_head.bias"] == (LR, 5e-5)
    assert (got["backbone.1.bias"][1], got["backbone.2.bias"][1]) == (norm_bias, depthwise_bias)


def test_flat_decay_is_that_of_one_dimensional_parameters_of_which_no_other_rule_speaks() -> None:
    got = table({"flat_decay_mult": 0.0, "bias_decay_mult": 0.5})
    flat = {name for name, (_, decay) in got.items() if decay == 0.0}
    assert flat == {"scale", "backbone.1.weight", "backbone.1.bias", "backbone.2.bias"}
    assert got["cls_head.bias"] == (LR, 5e-5)


def test_longest_custom_key_decides_and_all_other_rules_are_ignored() -> None:
    custom = {
        "backbone": {"lr_mult": 0.1, "decay_mult": 0.9},
        "backbone.0": {"lr_mult": 0.5},
        "cls": {"decay_mult": 0},
    }
    expected: Table = {
        "scale": (LR, WD),
        "bias": (LR, WD),
        **{f"backbone.0.{name}": (0.005, WD) for name in ("weight", "bias")},
        **{f"backbone.{i}.{name}": (0.001, 9e-5) for i in (1, 2) for name in ("weight", "bias")},
        **{f"cls_head.{name}": (LR, 0.0) for name in ("weight", "bias")},
    }
    assert_table(table({"custom_keys": custom, "norm_decay_mult": 0}), expected)


def test_custom_keys_of_equal_length_count_in_alphabetical_order() -> None:
    custom = {key: {"lr_mult": mult} for key, mult in (("head", 2.0), ("_hea", 3.0), ("cls_", 4.0))}
    assert table({"custom_keys": custom})["cls_head.weight"] == (LR * 3, WD)


def test_merged_custom_keys_leave_to_other_rules_what_they_do_not_say() -> None:
    custom = {
        "backbone": {"lr_mult": 0.1, "decay_mult": 0.9},
        "backbone.0": {"lr_mult": 0.5},
        "cls_head": {"lr_mult": 3.0},
    }
    cfg = {"custom_keys": custom, "custom_keys_merge": True, "bias_lr_mult": 2.0, "bias_decay_mult": 0.0}
    got = table(cfg)
    assert got["backbone.0.weight"] == (0.005, 9e-5)
    assert got["backbone.2.bias"] == (0.001, 9e-5)
    assert got["cls_head.bias"] == (LR * 3, 0.0)
    assert got["bias"] == (0.02, 0.0)
    assert table({**cfg, "custom_keys_merge": False})["cls_head.bias"] == (LR * 3, WD)


def test_custom_key_with_a_leading_dot_matches_from_the_beginning_of_a_part_of_the_name() -> None:
    """MMCV's documented example, which does nothing in MMCV itself."""
    model = nn.Module()
    model.backbone, model.cls_head = nn.Linear(1, 1), nn.Linear(1, 1)
    model.my_backbone = nn.Linear(1, 1)
    custom = {".backbone": {"lr_mult": 0.1, "decay_mult": 0.9}}
    made = apply_paramwise(model, {"custom_keys": custom}, {"lr": LR, "weight_decay": 0.95})
    assert made.report["backbone.weight"].lr == pytest.approx(0.001, rel=1e-12)
    assert made.report["backbone.bias"].weight_decay == pytest.approx(0.855, rel=1e-12)
    for name in ("cls_head.weight", "my_backbone.weight"):
        assert (made.report[name].lr, made.report[name].weight_decay) == (LR, 0.95)


def test_custom_key_may_set_any_option_of_the_optimizer() -> None:
    custom = {"cls_head": {"lr_mult": 2.0, "momentum": 0.5}}
    made = apply_paramwise(Detector(), {"custom_keys": custom}, BASE, {**BASE, "momentum": 0.9})
    assert made.report["cls_head.bias"].options == {"lr": 0.02, "weight_decay": WD, "momentum": 0.5}
    with pytest.raises(
        ConfigurationError, match=r"custom_keys\['cls_head'\] sets 'lr_mul', which is no option"
    ):
        apply_paramwise(Detector(), {"custom_keys": {"cls_head": {"lr_mul": 2.0}}}, BASE, BASE)


@pytest.mark.parametrize("cfg", [None, {}])
def test_without_options_there_is_one_group(cfg: Any) -> None:
    model = Detector()
    made = apply_paramwise(model, cfg, BASE)
    assert [len(group["params"]) for group in made.groups] == [len(list(model.parameters()))]
    assert set(made.groups[0]) == {"params", "param_names"}


def test_documented_example_of_a_convolution_without_norms() -> None:
    assert_table(table({"norm_decay_mult": 0.0}, nn.Conv1d(1, 1, 1)), {"weight": (LR, WD), "bias": (LR, WD)})


@pytest.mark.parametrize(
    "norm",
    [
        nn.BatchNorm1d(2),
        nn.SyncBatchNorm(2),
        nn.InstanceNorm2d(2, affine=True),
        nn.GroupNorm(1, 2),
        nn.LayerNorm(2),
    ],
    ids=lambda norm: type(norm).__name__,
)
def test_weights_and_biases_of_every_norm_have_the_norms_decay_and_no_rate_of_biases(norm: nn.Module) -> None:
    got = table({"bias_lr_mult": 2.0, "norm_decay_mult": 0.0, "bias_decay_mult": 0.5}, norm)
    assert_table(got, {"weight": (LR, 0.0), "bias": (LR, 0.0)})


def test_with_mmengines_precedence_frozen_parameters_are_in_no_group(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    model[0].weight.requires_grad_(False)
    groups, _ = apply_paramwise(model, {"precedence": "mmengine", "bias_lr_mult": 2.0}, {"lr": LR})
    assert [group["param_names"] for group in groups] == [["0.bias", "1.bias"], ["1.weight"]]
    assert [record.args for record in caplog.records] == [("0.weight",)]


def test_frozen_parameters_keep_the_options_of_the_optimizer() -> None:
    model = Detector()
    model.backbone.requires_grad_(False)
    made = apply_paramwise(model, {**ALL_KINDS, "custom_keys": {"backbone": {"lr_mult": 0.0}}}, BASE)
    row = made.report["backbone.2.bias"]
    assert (row.lr, row.weight_decay, row.rules) == (LR, WD, ("frozen",))
    assert sum(len(group["params"]) for group in made.groups) == 10


class ModulatedDeformConv2d(nn.Module):
    """Named as MMCV's; what counts is the convolution of its offsets."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = Parameter(torch.ones(2, 2))
        self.conv_offset = nn.Conv2d(2, 2, 1)


def test_offsets_of_deformable_convolutions_have_a_rate_of_their_own() -> None:
    cfg = {"dcn_offset_lr_mult": 0.1, "bias_lr_mult": 2.0, "bias_decay_mult": 0.0}
    got = table(cfg, nn.Sequential(ModulatedDeformConv2d()))
    expected = {"0.weight": (LR, WD), "0.conv_offset.weight": (0.001, WD), "0.conv_offset.bias": (0.001, WD)}
    assert_table(got, expected)
    plain = nn.Module()
    plain.conv_offset = nn.Conv2d(2, 2, 1)
    assert table({"dcn_offset_lr_mult": 0.1}, plain)["conv_offset.weight"] == (LR, WD)


def shared() -> nn.Module:
    model = nn.Module()
    model.a, model.b = nn.Sequential(nn.Linear(1, 1)), nn.Sequential(nn.Linear(1, 1))
    model.b[0] = model.a[0]
    return model


def test_shared_module_is_refused_by_name_unless_bypassed() -> None:
    message = "some parameters appear in more than one parameter group: 'b.0.weight' is 'a.0.weight'"
    with pytest.raises(ValueError, match=message):
        table({"bias_lr_mult": 2.0}, shared())
    with pytest.warns(DuplicateParameterWarning, match="'b.0.bias' is 'a.0.bias'"):
        got = table({"bias_lr_mult": 2.0, "bypass_duplicate": True}, shared())
    assert_table(got, {"a.0.weight": (LR, WD), "a.0.bias": (0.02, WD)})
    assert len(table(None, shared())) == 2


def test_gluons_spelling_of_the_options_counts() -> None:
    got = table({"bias_lr_mult": 2.0, "bias_decay_mult": 0.5}, base={"learning_rate": LR, "wd": WD})
    assert got["bias"] == (0.02, 5e-5)


@pytest.mark.parametrize(
    ("cfg", "error", "message"),
    [
        ({"custom_keys": []}, TypeError, "If specified, custom_keys must be a dict, but got list"),
        ({"custom_keys": {"a": 0.1}}, TypeError, "an entry of custom_keys is a part of a name and a dict"),
        (
            {"norm_decay": 0.1},
            ValueError,
            "paramwise_cfg has no option 'norm_decay'; its options are custom_keys",
        ),
        ({"bias_lr_mult": None}, ValueError, "bias_lr_mult must be a finite number, got None"),
        ({"bias_lr_mult": "2"}, ValueError, "bias_lr_mult must be a finite number, got '2'"),
        (
            {"custom_keys": {"bias": {"lr_mult": "2"}}},
            ValueError,
            r"lr_mult of custom_keys\['bias'\] must be a finite",
        ),
        ({"bypass_duplicate": 1}, ValueError, "bypass_duplicate must be True or False, got 1"),
        ({"precedence": "torch"}, ValueError, "precedence must be 'mmcv' or 'mmengine'"),
    ],
)
def test_what_cannot_be_meant_is_refused(cfg: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message) as caught:
        table(cfg)
    assert isinstance(caught.value, ConfigurationError)


@pytest.mark.parametrize(
    "cfg",
    [
        {"bias_decay_mult": 0.5},
        {"norm_decay_mult": 0.5},
        {"dwconv_decay_mult": 0.5},
        {"flat_decay_mult": 0.5},
        {"custom_keys": {"cls": {"decay_mult": 0.5}}},
    ],
    ids=str,
)
def test_decay_multiplier_needs_a_weight_decay_that_is_given(cfg: dict[str, Any]) -> None:
    with pytest.raises(
        ValueError, match=r"base_wd should not be None: .*decay_mult|base_wd.*custom_keys\['cls'\]"
    ):
        table(cfg, base={"lr": LR})


@pytest.mark.parametrize("key", ["dwconv_decay_mult", "flat_decay_mult"])
def test_rule_about_the_form_of_a_lazy_parameter_asks_for_a_forward_pass(key: str) -> None:
    model = nn.LazyConv2d(2, 1, groups=2)
    with pytest.raises(NotInitializedError, match=r"depends on the shape of 'weight'|the shape of 'weight'"):
        table({key: 0.5}, model)
    assert table({"bias_lr_mult": 2.0}, model)["bias"] == (0.02, WD)
