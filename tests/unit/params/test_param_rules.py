"""Rules for parameters: which one counts, which groups follow, and what is reported."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import Parameter

from kvtrainer import Trainer
from kvtrainer.errors import ArgumentTypeError, ConfigurationError, UnmatchedRuleWarning
from kvtrainer.param_rules import ParamGroups, Rule, unwrapped
from kvtrainer.paramwise import apply_paramwise
from tests.support.scalar_training import IN_STORE, step, trainer_of, values

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
        assert all(
            p is parameters[name] for p, name in zip(group["params"], group["param_names"], strict=True)
        )
    assert torch.optim.SGD(made.groups, **BASE).param_groups[0]["lr"] == 1.0


def test_model_of_many_layers_needs_as_many_groups_as_there_are_settings() -> None:
    model = nn.Sequential(*(layer for _ in range(50) for layer in (nn.Linear(1, 1), nn.LayerNorm(1))))
    cfg = {"bias_lr_mult": 2.0, "norm_decay_mult": 0.0, "custom_keys": {".0.": {"lr_mult": 0.1}}}
    made = apply_paramwise(model, cfg, BASE)
    assert len(made.report.rows) == 200
    assert len(made.groups) == 4


def test_weight_decay_may_be_absolute_and_other_options_travel_along() -> None:
    rules = [Rule(".head", weight_decay=3.0, extra={"momentum": 0.5, "learning_rate": 2.0})]
    made = apply_paramwise(Net(), rules, BASE, {"lr": 1.0, "weight_decay": 0.0, "momentum": 0.9})
    assert made.groups[1] == {
        "params": made.groups[1]["params"], "param_names": ["head.weight", "head.bias"],
        "weight_decay": 3.0, "momentum": 0.5, "lr": 2.0,
    }  # fmt: skip
    assert made.report["body.0.bias"].options["momentum"] == 0.9


def test_missing_learning_rate_is_that_of_the_optimizer() -> None:
    rules = [Rule("bias", lr_mult=2)]
    made = apply_paramwise(nn.Linear(1, 1), rules, {}, {"lr": 0.125})
    assert made.report["bias"].lr == 0.25
    with pytest.raises(ConfigurationError, match="multiplies the optimizer's lr, which has no value"):
        apply_paramwise(nn.Linear(1, 1), rules, {})


def test_option_that_the_optimizer_does_not_have_is_refused_by_name() -> None:
    rules = [Rule("bias", name="mine", extra={"lr_multi": 2})]
    with pytest.raises(ConfigurationError, match="mine sets 'lr_multi', which is no option of the optimizer"):
        apply_paramwise(nn.Linear(1, 1), rules, {}, {"lr": 0.1})
    with pytest.raises(ConfigurationError, match="has no option 'lr_multi'"):
        Trainer(
            nn.Linear(1, 1), "sgd", paramwise=lambda model: [{"params": model.parameters(), "lr_multi": 2}]
        )


def test_options_that_no_group_can_have_do_not_disturb_rules() -> None:
    options = {"learning_rate": 0.5, "rescale_grad": 0.25, "multi_precision": True}
    trainer = Trainer(nn.Linear(1, 1), "sgd", options, None, paramwise={"bias_lr_mult": 2.0})
    assert [group["lr"] for group in trainer.param_groups] == [0.5, 1.0]
    scheduled = {"lr_scheduler": lambda count: 0.5, "wd": 0.5}
    trainer = Trainer(nn.Linear(1, 1), "sgd", scheduled, None, paramwise={"bias_decay_mult": 0.0})
    assert [group["weight_decay"] for group in trainer.param_groups] == [0.5, 0.0]
    with pytest.raises(ConfigurationError, match="decides the learning rate of every group"):
        Trainer(nn.Linear(1, 1), "sgd", scheduled, None, paramwise={"bias_lr_mult": 2.0})


def test_rule_that_matches_nothing_is_reported() -> None:
    custom = {"bdy": {"lr_mult": 0.1}, "head": {"lr_mult": 2.0}}
    with pytest.warns(UnmatchedRuleWarning, match=r"custom_keys\['bdy'\]: no parameter matches"):
        apply_paramwise(Net(), {"custom_keys": custom}, BASE)
    rules = [Rule(".nowhere", lr_mult=2), Rule(nn.Conv2d, lr_mult=2), Rule(".bias", lr_mult=2)]
    with pytest.warns(UnmatchedRuleWarning, match=r"'\.nowhere', Conv2d: no parameter matches"):
        made = apply_paramwise(Net(), rules, BASE)
    assert made.report.unmatched == ("'.nowhere'", "Conv2d")
    assert "no parameter matches '.nowhere', Conv2d" in str(made.report)


def test_table_says_which_rules_decided_each_parameter() -> None:
    rules = [Rule(".bias", name="biases", lr_mult=2), Rule(nn.LayerNorm, weight_decay=0)]
    made = apply_paramwise(Net(), rules, BASE)
    lines = [line.split() for line in str(made.report).splitlines()]
    assert lines[:5] == [
        ["parameter", "shape", "lr", "weight_decay", "rules"],
        ["body.0.weight", "2x2", "0.5", "0.25", "-"],
        ["body.0.bias", "2", "1", "0.25", "biases"],
        ["body.1.weight", "2", "0.5", "0", "LayerNorm"],
        ["body.1.bias", "2", "1", "0.25", "biases"],
    ]


def test_table_shows_what_groups_say_now() -> None:
    made = apply_paramwise(Net(), [Rule(".bias", name="biases", lr_mult=2)], BASE)
    optimizer = torch.optim.SGD(made.groups, **BASE)
    optimizer.param_groups[1]["lr"] = 7.0
    now = made.report.with_groups(optimizer.param_groups)
    assert [row.name for row in now.rows] == [row.name for row in made.report.rows]
    assert (now["head.bias"].lr, now["head.bias"].rules) == (7.0, ("biases",))
    assert made.report["head.bias"].lr == 1.0


def test_names_suffice_where_no_rule_asks_for_modules() -> None:
    named = dict(Net().named_parameters())
    made = apply_paramwise(named, {"custom_keys": {".body": {"lr_mult": 0.0}}}, BASE)
    assert names(made)[0] == [name for name in sorted(named) if name.startswith("body")]
    for rule in ({"norm_decay_mult": 0.0}, [Rule(nn.Linear)]):
        with pytest.raises(ConfigurationError, match="give the Module itself"):
            apply_paramwise(named, rule, BASE)


def test_iterator_of_named_parameters_is_enough() -> None:
    made = apply_paramwise(Net().named_parameters(), lambda rows: [{"params": [p for _, p in rows]}], BASE)
    assert len(made.groups[0]["param_names"]) == 8


@pytest.mark.parametrize(
    "model", [[Parameter(torch.ones(1))], [{"params": []}], Parameter(torch.ones(1)), 3, []]
)
def test_parameters_without_names_are_refused(model: Any) -> None:
    with pytest.raises(ConfigurationError, match="by name and by the kind of their module"):
        apply_paramwise(model, {"custom_keys": {"0": {"lr_mult": 2.0}}}, BASE)


def test_replicas_of_a_parameter_stay_together() -> None:
    replicas = {
        "weight": [Parameter(torch.ones(1)) for _ in range(2)],
        "bias": [Parameter(torch.ones(1))] * 2,
    }
    made = apply_paramwise(replicas, {"custom_keys": {"bias": {"lr_mult": 2.0}}}, BASE)
    assert [group["params"][0] for group in made.groups] == [replicas["bias"], replicas["weight"]]


def test_function_of_the_model_makes_its_own_groups_which_get_the_models_names() -> None:
    def halves(model: nn.Module) -> list[dict[str, Any]]:
        first, *rest = model.parameters()
        return [{"params": first, "lr": 2.0}, {"params": rest}]

    made = apply_paramwise(nn.Linear(1, 1), halves, BASE)
    assert names(made) == [["weight"], ["bias"]]
    assert options(made) == {"weight": (2.0, 0.25), "bias": (0.5, 0.25)}
    assert made.report["bias"].rules == ("halves",)
    with pytest.raises(ArgumentTypeError, match=r"nothing\(model\) must return a list of parameter groups"):
        apply_paramwise(nn.Linear(1, 1), nothing, BASE)


def nothing(model: nn.Module) -> None:
    return None


def test_shared_parameters_count_where_they_appear_first() -> None:
    model = Net()
    model.head.weight = model.body[0].weight
    made = apply_paramwise(model, [Rule(".head", lr_mult=2)], BASE)
    assert options(made)["body.0.weight"] == (0.5, 0.25)
    assert names(made)[1] == ["head.bias"]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"match": 3}, TypeError, "matches a part of a name"),
        ({"match": "a", "lr_mult": "2"}, ValueError, "lr_mult of 'a' must be a finite number, got '2'"),
        ({"match": "a", "decay_mult": float("nan")}, ValueError, "decay_mult of 'a' must be a finite number"),
        (
            {"match": "a", "decay_mult": 2, "weight_decay": 1},
            ValueError,
            "says twice what weight_decay shall be",
        ),
        (
            {"match": "a", "lr_mult": 2, "extra": {"learning_rate": 1}},
            ValueError,
            "says twice what lr shall be",
        ),
        ({"match": "a", "extra": 3}, TypeError, "extra of 'a' must be a dict"),
    ],
)
def test_rule_that_cannot_be_meant_is_refused(
    arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message) as caught:
        Rule(**arguments)
    assert isinstance(caught.value, ConfigurationError)


@pytest.mark.parametrize("paramwise", [3, "bias", nn.Linear, ["bias"], [Rule("bias"), 3]])
def test_paramwise_that_is_nothing_known_is_refused(paramwise: Any) -> None:
    with pytest.raises(TypeError, match="paramwise must be a dict as MMCV's paramwise_cfg, a list of Rules"):
        apply_paramwise(nn.Linear(1, 1), paramwise, BASE)


def test_wrappers_are_taken_off_but_a_part_called_module_stays() -> None:
    inner = Net()
    wrapper = nn.Module()
    wrapper.module = inner
    assert unwrapped(wrapper) is inner
    assert unwrapped(nn.DataParallel(inner)) is inner
    assert names(apply_paramwise(nn.DataParallel(inner), None, BASE)) == [
        [n for n, _ in inner.named_parameters()]
    ]
    wrapper.scale = Parameter(torch.ones(1))
    assert unwrapped(wrapper) is wrapper


@IN_STORE
def test_options_of_groups_reach_the_update(in_store: bool) -> None:
    """w -= lr * (1 + wd * w), each with its own numbers, by hand."""
    model = nn.Module()
    parameters = [Parameter(torch.ones(1, dtype=torch.float64)) for _ in range(3)]
    model.a, model.b, model.bias = parameters
    rules = [Rule(".bias", lr_mult=2, weight_decay=0.0), Rule(".b", decay_mult=0.5)]
    made = apply_paramwise(model, rules, BASE)
    trainer = trainer_of(made.groups, "sgd", {"learning_rate": 0.5, "wd": 0.25}, in_store)
    step(trainer)
    assert values(parameters) == [1 - 0.5 * 1.25, 1 - 0.5 * 1.125, 0.0]
    for group in trainer.param_groups:
        group["lr"] *= 0.5
    step(trainer)
    a, b = 0.375, 0.4375
    assert values(parameters) == [a - 0.25 * (1 + 0.25 * a), b - 0.25 * (1 + 0.125 * b), -0.5]
