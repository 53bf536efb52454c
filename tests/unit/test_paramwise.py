"""Options by parameter: which rule counts, which groups follow, what is reported, and what MMCV's paramwise_cfg means.

Numbers of paramwise_cfg are MMCV 1.7.2's.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import Parameter

from kvtrainer import Trainer
from kvtrainer.errors import (
    ArgumentTypeError,
    ConfigurationError,
    DuplicateParameterWarning,
    NotInitializedError,
    UnmatchedRuleWarning,
)
from kvtrainer.options.paramwise import ParamGroups, Rule, apply_paramwise, unwrap_model

BASE = {"lr": 0.5, "weight_decay": 0.25}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2), nn.Linear(2, 2))
        self.head = nn.Linear(2, 1)


def options(made: ParamGroups) -> dict[str, tuple[float, float]]:
    return {row.name: (row.lr, row.weight_decay) for row in made.report.rows}


def names(made: ParamGroups) -> list[list[str]]:
    return [group["param_names"] for group in made.groups]


def test_first_rule_that_matches_counts_and_stops_the_others() -> None:
    rules = [Rule("bias", lr_mult=2), Rule(nn.Linear, lr_mult=4, decay_mult=0)]
    made = apply_paramwise(nn.Linear(2, 2), rules, BASE)
    assert options(made) == {"weight": (2.0, 0.0), "bias": (1.0, 0.25)}


def test_rule_that_does_not_stop_leaves_open_options_to_later_ones() -> None:
    rules = [Rule("bias", lr_mult=2, stop=False), Rule(nn.Linear, lr_mult=4, decay_mult=0)]
    made = apply_paramwise(nn.Linear(2, 2), rules, BASE)
    assert options(made) == {"weight": (2.0, 0.0), "bias": (1.0, 0.0)}
    assert made.report["bias"].rules == ("'bias'", "Linear")


@pytest.mark.parametrize(
    ("match", "hit"),
    [
        (".body", ["body.0.weight", "body.0.bias", "body.1.weight", "body.1.bias", "body.2.weight", "body.2.bias"]),
        (".bias", ["body.0.bias", "body.1.bias", "body.2.bias", "head.bias"]),
        (nn.LayerNorm, ["body.1.weight", "body.1.bias"]),
        ((nn.LayerNorm, nn.Sequential), ["body.1.weight", "body.1.bias"]),
        (lambda place: place.module_name == "head" and place.parameter.ndim == 2, ["head.weight"]),
    ],
)  # fmt: skip
def test_rule_matches_names_kinds_of_modules_or_whatever_a_function_says(match: Any, hit: list[str]) -> None:
    made = apply_paramwise(Net(), [Rule(match, lr_mult=0)], BASE)
    assert [row.name for row in made.report.rows if row.lr == 0.0] == hit


def test_parameters_with_equal_options_share_a_group() -> None:
    rules = [Rule(".body.0", lr_mult=2), Rule(".bias", extra={"lr": 1.0}), Rule(".head", decay_mult=1)]
    model = Net()
    made = apply_paramwise(model, rules, BASE)
    assert names(made) == [
        ["body.0.weight", "body.0.bias", "body.1.bias", "body.2.bias", "head.bias"],
        ["body.1.weight", "body.2.weight", "head.weight"],
    ]
    parameters = dict(model.named_parameters())
    for group in made.groups:
        assert list(map(id, group["params"])) == [id(parameters[name]) for name in group["param_names"]]
    assert torch.optim.SGD(made.groups, **BASE).param_groups[0]["lr"] == 1.0


def test_weight_decay_may_be_absolute_and_other_options_travel_along() -> None:
    rules = [Rule(".head", weight_decay=3.0, extra={"momentum": 0.5, "learning_rate": 2.0})]
    made = apply_paramwise(Net(), rules, BASE, {"lr": 1.0, "weight_decay": 0.0, "momentum": 0.9})
    assert made.groups[1] == {
        "params": made.groups[1]["params"], "param_names": ["head.weight", "head.bias"],
        "weight_decay": 3.0, "momentum": 0.5, "lr": 2.0,
    }  # fmt: skip
    assert made.report["body.0.bias"].options["momentum"] == 0.9


def test_options_that_no_group_can_have_do_not_disturb_rules() -> None:
    options = {"learning_rate": 0.5, "rescale_grad": 0.25, "multi_precision": True}
    trainer = Trainer(nn.Linear(1, 1), "sgd", options, None, paramwise={"bias_lr_mult": 2.0})
    assert [group["lr"] for group in trainer.param_groups] == [0.5, 1.0]
    scheduled = {"lr_scheduler": lambda count: 0.5, "wd": 0.5}
    trainer = Trainer(nn.Linear(1, 1), "sgd", scheduled, None, paramwise={"bias_decay_mult": 0.0})
    assert [group["weight_decay"] for group in trainer.param_groups] == [0.5, 0.0]
    with pytest.raises(ConfigurationError):
        Trainer(nn.Linear(1, 1), "sgd", scheduled, None, paramwise={"bias_lr_mult": 2.0})


def test_names_suffice_where_no_rule_asks_for_modules() -> None:
    named = dict(Net().named_parameters())
    made = apply_paramwise(named, {"custom_keys": {".body": {"lr_mult": 0.0}}}, BASE)
    assert names(made)[0] == [name for name in sorted(named) if name.startswith("body")]
    for rule in ({"norm_decay_mult": 0.0}, [Rule(nn.Linear)]):
        with pytest.raises(ConfigurationError):
            apply_paramwise(named, rule, BASE)


def test_function_of_the_model_makes_its_own_groups_which_get_the_models_names() -> None:
    def halves(model: nn.Module) -> list[dict[str, Any]]:
        first, *rest = model.parameters()
        return [{"params": first, "lr": 2.0}, {"params": rest}]

    rows = apply_paramwise(Net().named_parameters(), lambda rows: [{"params": [p for _, p in rows]}], BASE)
    assert len(rows.groups[0]["param_names"]) == 8
    made = apply_paramwise(nn.Linear(1, 1), halves, BASE)
    assert names(made) == [["weight"], ["bias"]]
    assert options(made) == {"weight": (2.0, 0.25), "bias": (0.5, 0.25)}
    assert made.report["bias"].rules == ("halves",)
    with pytest.raises(ArgumentTypeError, match=r"nothing\(model\)"):
        apply_paramwise(nn.Linear(1, 1), nothing, BASE)


def nothing(model: nn.Module) -> None:
    return None


def test_shared_parameters_count_where_they_appear_first() -> None:
    model = Net()
    model.head.weight = model.body[0].weight
    made = apply_paramwise(model, [Rule(".head", lr_mult=2)], BASE)
    assert options(made)["body.0.weight"] == (0.5, 0.25)
    assert names(made)[1] == ["head.bias"]


def test_wrappers_are_taken_off_but_a_part_called_module_stays() -> None:
    inner = Net()
    wrapper = nn.Module()
    wrapper.module = inner
    assert unwrap_model(wrapper) is inner
    assert unwrap_model(nn.DataParallel(inner)) is inner
    [own] = names(apply_paramwise(nn.DataParallel(inner), None, BASE))
    assert own == [name for name, _ in inner.named_parameters()]
    wrapper.scale = Parameter(torch.ones(1))
    assert unwrap_model(wrapper) is wrapper


LR, WD = 0.01, 1e-4
MMCV_BASE = {"lr": LR, "weight_decay": WD}
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
    defaults = {"lr": 0.5, "weight_decay": 0.0}
    return options(apply_paramwise(model or Detector(), cfg, base or MMCV_BASE, defaults))


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
    assert_table(table(ALL_KINDS, base={"learning_rate": LR, "wd": WD}), KINDS)  # as Gluon spells them


def test_mmengines_order_takes_biases_before_depthwise_convolutions_and_norms() -> None:
    cfg = {**ALL_KINDS, "precedence": "mmengine"}
    assert_table(table(cfg), {**KINDS, "backbone.2.bias": (0.02, 5e-5)})
    names = ("cls_head.bias", "backbone.1.bias", "backbone.2.bias")
    for precedence, decays in (("mmcv", [5e-5, WD, WD]), ("mmengine", [5e-5] * 3)):
        got = table({"bias_decay_mult": 0.5, "precedence": precedence})
        assert [got[name][1] for name in names] == decays


def test_flat_decay_is_that_of_one_dimensional_parameters_of_which_no_other_rule_speaks() -> None:
    got = table({"flat_decay_mult": 0.0, "bias_decay_mult": 0.5})
    flat = {name for name, (_, decay) in got.items() if decay == 0.0}
    assert flat == {"scale", "backbone.1.weight", "backbone.1.bias", "backbone.2.bias"}
    assert got["cls_head.bias"] == (LR, 5e-5)


BACKBONE = {"backbone": {"lr_mult": 0.1, "decay_mult": 0.9}, "backbone.0": {"lr_mult": 0.5}}


def test_longest_custom_key_decides_and_all_other_rules_are_ignored() -> None:
    custom = {**BACKBONE, "cls": {"decay_mult": 0}}
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
    custom = {**BACKBONE, "cls_head": {"lr_mult": 3.0}}
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


def test_in_mmengines_order_frozen_parameters_are_in_no_group(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    model[0].weight.requires_grad_(False)
    groups, _ = apply_paramwise(model, {"precedence": "mmengine", "bias_lr_mult": 2.0}, {"lr": LR})
    assert [group["param_names"] for group in groups] == [["0.bias", "1.bias"], ["1.weight"]]
    assert [record.args for record in caplog.records] == [("0.weight",)]


def test_frozen_parameters_keep_the_options_of_the_optimizer() -> None:
    model = Detector()
    model.backbone.requires_grad_(False)
    made = apply_paramwise(model, {**ALL_KINDS, "custom_keys": {"backbone": {"lr_mult": 0.0}}}, MMCV_BASE)
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
    with pytest.warns(DuplicateParameterWarning, match=r"'b.0.bias'.*'a.0.bias'"):
        got = table({"bias_lr_mult": 2.0, "bypass_duplicate": True}, shared())
    assert_table(got, {"a.0.weight": (LR, WD), "a.0.bias": (0.02, WD)})
    assert len(table(None, shared())) == 2


@pytest.mark.parametrize("key", ["dwconv_decay_mult", "flat_decay_mult"])
def test_rule_about_the_form_of_a_lazy_parameter_asks_for_a_forward_pass(key: str) -> None:
    model = nn.LazyConv2d(2, 1, groups=2)
    with pytest.raises(NotInitializedError, match=r"depends on the shape of 'weight'|the shape of 'weight'"):
        table({key: 0.5}, model)
    assert table({"bias_lr_mult": 2.0}, model)["bias"] == (0.02, WD)


def test_missing_learning_rate_is_that_of_the_optimizer() -> None:
    rules = [Rule("bias", lr_mult=2)]
    assert apply_paramwise(nn.Linear(1, 1), rules, {}, {"lr": 0.125}).report["bias"].lr == 0.25
    with pytest.raises(ConfigurationError, match="optimizer's lr"):
        apply_paramwise(nn.Linear(1, 1), rules, {})


def test_rule_that_matches_nothing_is_reported() -> None:
    rules = [Rule(".nowhere", lr_mult=2), Rule(nn.Conv2d, lr_mult=2), Rule(".bias", lr_mult=2)]
    with pytest.warns(UnmatchedRuleWarning, match=r"'\.nowhere', Conv2d"):
        made = apply_paramwise(Net(), rules, BASE)
    assert made.report.unmatched == ("'.nowhere'", "Conv2d")
    assert "'.nowhere', Conv2d" in str(made.report)
    with pytest.warns(UnmatchedRuleWarning, match=r"custom_keys\['bdy'\]"):
        apply_paramwise(Net(), {"custom_keys": {"bdy": {"lr_mult": 0.1}, "head": {"lr_mult": 2.0}}}, BASE)


@pytest.mark.parametrize("cfg", [None, {}])
def test_without_options_there_is_one_group(cfg: Any) -> None:
    [group] = apply_paramwise(Detector(), cfg, BASE).groups
    assert len(group["params"]) == 10
    assert set(group) == {"params", "param_names"}


NORMS = (
    nn.BatchNorm1d(2),
    nn.SyncBatchNorm(2),
    nn.InstanceNorm2d(2, affine=True),
    nn.GroupNorm(1, 2),
    nn.LayerNorm(2),
)


@pytest.mark.parametrize("norm", NORMS)
def test_weights_and_biases_of_every_norm_have_the_norms_decay_and_no_rate_of_biases(norm: nn.Module) -> None:
    got = table({"bias_lr_mult": 2.0, "norm_decay_mult": 0.0, "bias_decay_mult": 0.5}, norm)
    assert_table(got, {"weight": (LR, 0.0), "bias": (LR, 0.0)})


def test_an_rms_norm_is_a_norm() -> None:
    got = table({"norm_decay_mult": 0.0, "bias_decay_mult": 0.5}, nn.RMSNorm(2))
    assert_table(got, {"weight": (LR, 0.0)})


def test_custom_key_may_set_any_option_of_the_optimizer() -> None:
    custom = {"cls_head": {"lr_mult": 2.0, "momentum": 0.5}}
    made = apply_paramwise(Detector(), {"custom_keys": custom}, MMCV_BASE, {**MMCV_BASE, "momentum": 0.9})
    assert made.report["cls_head.bias"].options == {"lr": 0.02, "weight_decay": WD, "momentum": 0.5}


def test_option_that_the_optimizer_does_not_have_is_refused_by_name() -> None:
    for given in ([Rule("bias", extra={"lr_mul": 2})], {"custom_keys": {"bias": {"lr_mul": 2.0}}}):
        with pytest.raises(ConfigurationError, match="'lr_mul'"):
            apply_paramwise(nn.Linear(1, 1), given, BASE, BASE)
    groups: Any = lambda model: [{"params": model.parameters(), "lr_mul": 2}]  # noqa: E731
    with pytest.raises(ConfigurationError, match="'lr_mul'"):
        Trainer(nn.Linear(1, 1), "sgd", paramwise=groups)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"match": 3}, TypeError, "got 3"),
        ({"match": "a", "lr_mult": "2"}, ValueError, "lr_mult of 'a'.* got '2'"),
        ({"match": "a", "decay_mult": float("nan")}, ValueError, "decay_mult of 'a'"),
        ({"match": "a", "decay_mult": 2, "weight_decay": 1}, ValueError, "weight_decay"),
        ({"match": "a", "lr_mult": 2, "extra": {"learning_rate": 1}}, ValueError, "lr"),
        ({"match": "a", "extra": 3}, TypeError, "extra of 'a'"),
    ],
)
def test_rule_that_cannot_be_meant_is_refused(arguments: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message) as caught:
        Rule(**arguments)
    assert isinstance(caught.value, ConfigurationError)


@pytest.mark.parametrize(
    ("paramwise", "error", "message"),
    [
        *((one, TypeError, "paramwise must be") for one in (3, "bias", nn.Linear, [Rule("bias"), 3])),
        ({"custom_keys": []}, TypeError, "custom_keys.* list"),
        ({"custom_keys": {"a": 0.1}}, TypeError, "'a': 0.1"),
        ({"norm_decay": 0.1}, ValueError, "'norm_decay'"),
        ({"bias_lr_mult": None}, ValueError, "bias_lr_mult.* None"),
        ({"bias_lr_mult": "2"}, ValueError, "bias_lr_mult.* '2'"),
        ({"custom_keys": {"bias": {"lr_mult": "2"}}}, ValueError, r"lr_mult of custom_keys\['bias'\]"),
        ({"bypass_duplicate": 1}, ValueError, "bypass_duplicate.* 1"),
        ({"precedence": "torch"}, ValueError, "precedence"),
        *(
            ({f"{kind}_decay_mult": 0.5}, ValueError, f"base_wd.* {kind}_decay_mult")
            for kind in ("bias", "norm", "dwconv", "flat")
        ),
        ({"custom_keys": {"cls": {"decay_mult": 0.5}}}, ValueError, r"base_wd.* custom_keys\['cls'\]"),
    ],
)
def test_paramwise_that_cannot_be_meant_is_refused(paramwise: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message) as caught:
        apply_paramwise(nn.Linear(1, 1), paramwise, {"lr": LR})
    assert isinstance(caught.value, ConfigurationError)


@pytest.mark.parametrize("model", [[Parameter(torch.ones(1))], [{"params": []}], Parameter(torch.ones(1)), 3])
def test_parameters_without_names_are_refused(model: Any) -> None:
    with pytest.raises(ConfigurationError, match="need names"):
        apply_paramwise(model, {"custom_keys": {"0": {"lr_mult": 2.0}}}, BASE)
