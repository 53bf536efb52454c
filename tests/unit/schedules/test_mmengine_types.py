"""Schedules under mmengine's type names, compared with torch's schedulers, whose numbers they share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

from kvtrainer.errors import ConfigurationError, UnknownNameError
from kvtrainer.registry import SCHEDULES
from kvtrainer.schedules.config import bind_schedules, build_param_schedules
from tests.support.scalar_training import scheduled, sgd, zeros


def torchs(made: Sequence[Callable[[Any], Any]], count: int) -> list[float]:
    optimizer, seen = sgd(), []
    schedulers = [make(optimizer) for make in made]
    optimizer.step()
    for _ in range(count):
        seen.append(optimizer.param_groups[0]["lr"])
        for scheduler in schedulers:
            scheduler.step()
    return seen


PAIRS: dict[str, tuple[dict[str, Any], Callable[[Any], Any]]] = {
    "Step": ({"type": "StepLR", "step_size": 3}, lambda o: lr_scheduler.StepLR(o, 3)),
    "MultiStep": (
        {"type": "MultiStepLR", "milestones": [6, 2, 6], "gamma": 0.5},
        lambda o: lr_scheduler.MultiStepLR(o, [2, 6, 6], 0.5),
    ),
    "Exponential": ({"type": "ExponentialLR", "gamma": 0.8}, lambda o: lr_scheduler.ExponentialLR(o, 0.8)),
    "Cosine": (
        {"type": "CosineAnnealingLR", "T_max": 4, "eta_min": 0.02},
        lambda o: lr_scheduler.CosineAnnealingLR(o, 4, 0.02),
    ),
    "Poly": ({"type": "PolyLR", "power": 2.0}, lambda o: lr_scheduler.PolynomialLR(o, 9, 2.0)),
    "Linear": (
        {"type": "LinearLR", "start_factor": 0.1, "end_factor": 0.5},
        lambda o: lr_scheduler.LinearLR(o, 0.1, 0.5, 9),
    ),
    "Constant": ({"type": "ConstantLR", "factor": 0.5}, lambda o: lr_scheduler.ConstantLR(o, 0.5, 9)),
    "OneCycle": (
        {"type": "OneCycleLR", "eta_max": 0.3},
        lambda o: lr_scheduler.OneCycleLR(o, 0.3, 10, cycle_momentum=False),
    ),
}


@pytest.mark.parametrize("name", PAIRS)
def test_values_are_those_of_torch(name: str) -> None:
    cfg, make = PAIRS[name]
    assert scheduled([{**cfg, "end": 10}], 10) == pytest.approx(torchs([make], 10), rel=1e-9)


def test_constant_gives_the_rate_back_also_after_a_window_of_one_step() -> None:
    assert scheduled([{"type": "ConstantLR", "factor": 0.5, "end": 1}], 3) == pytest.approx([0.05, 0.1, 0.1])


INF = 10**9
RESTART: dict[str, Any] = {"type": "CosineRestartLR", "eta_min": 0.0}
COSINE: dict[str, Any] = {"type": "CosineAnnealingLR"}
MMENGINE: dict[str, tuple[list[dict[str, Any]], Sequence[float]]] = {
    "a period begins at its weight and comes down to the minimum, and after all of them the value stays": (
        [{**RESTART, "periods": [4, 3], "restart_weights": [1, 0.5], "eta_min": 0.01, "end": INF}],
        (0.1, 0.0868198051534, 0.055, 0.0231801948466, 0.05, 0.04, 0.02, 0.02, 0.02),
    ),
    "a minimum may be a share of the initial value, and periods longer than the window": (
        [{**RESTART, "periods": [2, 9], "restart_weights": [0.5, 1], "eta_min": None, "eta_min_ratio": 0.1, "end": 4}],
        (0.05, 0.03, 0.1, 0.0972861679354, 0.0972861679354),
    ),
    "a restart forgets what ended before": (
        [
            {"type": "ConstantLR", "factor": 0.5, "end": 2},
            {"type": "ExponentialLR", "gamma": 0.5, "begin": 2, "end": 4},
            {**RESTART, "begin": 4, "end": 7, "periods": [3]},
        ],
        (0.05, 0.1, 0.1, 0.05, 0.1, 0.075, 0.025, 0.025),
    ),
    "the minimum of a cosine is a share of the initial value, also after decays": (
        [
            {"type": "MultiStepLR", "milestones": [0, 2], "gamma": 0.5, "end": 4},
            {**COSINE, "begin": 4, "end": 8, "eta_min_ratio": 0.1},
        ],
        (0.05, 0.05, 0.025, 0.025, 0.025, 0.0228033008589, 0.0175, 0.0121966991411, 0.0121966991411),
    ),
    "a cosine rises from its minimum to the initial value": (
        [
            {"type": "StepLR", "step_size": 2, "gamma": 0.5, "end": 3},
            {**COSINE, "begin": 3, "T_max": 2, "eta_min": 0.01, "end": 9},
        ],
        (0.1, 0.1, 0.05, 0.05, 0.03, 0.01, 0.055, 0.1, 0.055, 0.055),
    ),
    "what comes first in time may come last in the list": (
        [
            {**COSINE, "begin": 3, "end": 6, "eta_min": 0.01},
            {"type": "LinearLR", "start_factor": 0.1, "end_factor": 0.5, "end": 3},
        ],
        (0.01, 0.03, 0.05, 0.05, 0.04, 0.02, 0.02),
    ),
    "a polynomial without an end": (
        [{"type": "PolyLR", "begin": 2, "end": INF, "power": 2.0}],
        (0.1, 0.1, 0.1, 0.0999999998, 0.0999999996),
    ),
    "a line without an end": (
        [{"type": "LinearLR", "start_factor": 0.25, "end": INF}],
        (0.025, 0.025000000075, 0.02500000015),
    ),
}  # fmt: skip
"""Schedules, and the learning rate that mmengine 0.10.7 has with them, of a group that starts from 0.1."""


@pytest.mark.parametrize("name", MMENGINE)
def test_values_are_those_of_mmengine(name: str) -> None:
    given, expected = MMENGINE[name]
    assert scheduled(given, len(expected)) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("warm_up_first", [True, False])
def test_warm_up_that_overlaps_a_restart_or_a_cycle_multiplies_in_either_order(warm_up_first: bool) -> None:
    warm_up = {"type": "LinearLR", "start_factor": 0.2, "end": 5}
    restart = {**RESTART, "periods": [4, 4], "restart_weights": [1, 1], "end": 8}
    alone = scheduled([restart], 8)
    both = scheduled([warm_up, restart] if warm_up_first else [restart, warm_up], 8)
    assert both == pytest.approx([v * min(0.2 * (at + 1), 1) for at, v in enumerate(alone)])
    cycle = {"type": "OneCycleLR", "eta_max": 0.3, "end": 8}
    both = scheduled([warm_up, cycle] if warm_up_first else [cycle, warm_up], 8)
    factors = [1.0] * 8 if warm_up_first else [min(0.2 * (at + 1), 1) for at in range(8)]
    assert both == pytest.approx([f * v for f, v in zip(factors, scheduled([cycle], 8), strict=True)])


@pytest.mark.parametrize("kind", ["Step", "Exponential", "CosineAnnealing", "Linear", "Constant", "Poly"])
def test_momentum_follows_the_same_types(kind: str) -> None:
    options = {"Step": {"step_size": 2}, "Exponential": {"gamma": 0.5}}.get(kind, {})
    rates = scheduled([{"type": f"{kind}LR", **options, "end": 6}], 6)
    momenta = scheduled([{"type": f"{kind}Momentum", **options, "end": 6}], 6, "momentum")
    general = {"type": f"{kind}ParamScheduler", "param_name": "momentum", **options, "end": 6}
    assert [9 * rate for rate in rates] == pytest.approx(momenta)
    assert scheduled([general], 6, "momentum") == momenta


@pytest.mark.parametrize("begin", [0, 2])
def test_last_step_goes_on_without_a_state_where_the_groups_know_their_start(begin: int) -> None:
    cfg = {"type": "ExponentialLR", "gamma": 0.9, "begin": begin, "end": 12}
    with pytest.raises(KeyError, match="initial_lr"):
        scheduled([{**cfg, "last_step": 4}], 1)
    optimizer = sgd()
    bind_schedules([cfg], optimizer)  # remembers the start
    [resumed] = bind_schedules([{**cfg, "last_step": 4}], optimizer)
    seen = []
    for _ in range(3):
        seen.append(optimizer.param_groups[0]["lr"])
        resumed.step()
    assert seen == pytest.approx([0.1 * 0.9**count for count in (5, 6, 7)])


def test_one_cycle_of_momentum_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="learning rate only"):
        scheduled([{"type": "OneCycleMomentum", "eta_max": 0.9, "end": 4}], 1)


def test_end_is_the_end_of_training_where_it_is_not_said() -> None:
    by_epoch, by_step = ({"type": "PolyLR", "by_epoch": is_by} for is_by in (True, False))
    assert scheduled([by_epoch], 5, max_epochs=5, max_iters=50)[4] == pytest.approx(0.0)
    assert scheduled([by_step], 5, max_epochs=50, max_iters=5)[4] == pytest.approx(0.0)
    assert scheduled([{**by_epoch, "end": 3}], 3, max_epochs=5)[2] == pytest.approx(0.0)
    for cfg, missing in ((by_epoch, "max_epochs"), (by_step, "max_iters")):
        with pytest.raises(ConfigurationError, match=f"{missing} must be specified in default_args"):
            scheduled([cfg], 1)


@pytest.mark.parametrize(
    ("cfg", "by_hand"),
    [
        ({"type": "MultiStepLR", "milestones": [2, 3]}, {"milestones": [8, 12]}),
        ({"type": "StepLR", "step_size": 2}, {"step_size": 8}),
        ({"type": "CosineAnnealingLR"}, {}),
        ({"type": "CosineAnnealingLR", "T_max": 3}, {"T_max": 12}),
        ({"type": "CosineRestartLR", "periods": [5], "eta_min": 0}, {"periods": [20]}),
        ({"type": "LinearLR", "begin": 1, "end": 3}, {"begin": 4, "end": 12}),
        ({"type": "LinearLR", "begin": 0.5, "end": 2.75}, {"begin": 2, "end": 11}),
    ],
)
def test_schedule_by_epoch_can_be_converted_to_steps(cfg: dict[str, Any], by_hand: dict[str, Any]) -> None:
    run = {"max_epochs": 5, "max_iters": 20, "epoch_length": 4}
    optimizer = sgd()
    [bound] = bind_schedules([{**cfg, "convert_to_iter_based": True}], optimizer, run)
    assert bound.by == "step"
    converted = scheduled([{**cfg, "convert_to_iter_based": True}], 20, **run)
    assert converted == pytest.approx(scheduled([{**cfg, **by_hand, "by_epoch": False}], 20, **run))


@pytest.mark.parametrize(
    ("cfg", "run", "message"),
    [
        ({"convert_to_iter_based": True}, {}, "epoch_length"),
        ({"convert_to_iter_based": True, "by_epoch": False}, {"epoch_length": 3}, "by_epoch=True"),
        ({"begin": 5}, {}, "end should be larger than begin, but got begin=5, end=5"),
        ({"gama": 0.1}, {}, "no option 'gama'"),
        ({"last_step": 1.5}, {}, "last_step"),
        ({"last_step": -2}, {}, "last_step"),
        ({"milestones": [-1]}, {}, "milestones"),
        ({"milestones": 3}, {}, "milestones"),
        ({"gamma": "0.1"}, {}, "gamma"),
        ({"type": "LinearLR", "end_factor": 1.5}, {}, r"end_factor of .*from 0 to 1, got 1\.5"),
    ],
)
def test_impossible_schedules_are_refused(cfg: dict[str, Any], run: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        scheduled(
            [{"type": "MultiStepLR", **({} if "type" in cfg else {"milestones": [2]}), "end": 5, **cfg}],
            1,
            **run,
        )


def test_schedulers_of_torch_are_known_by_their_names() -> None:
    seen = scheduled([{"type": "CosineAnnealingWarmRestarts", "T_0": 3, "by_epoch": False}], 7)
    assert seen == pytest.approx(torchs([lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3)], 7))
    own = scheduled([{"type": "torch:LinearLR", "start_factor": 0.1, "total_iters": 5}], 6)
    assert own == pytest.approx([0.01, 0.028, 0.046, 0.064, 0.082, 0.1])
    with pytest.raises(ConfigurationError, match="cannot be made"):
        scheduled([{"type": "torch:LinearLR", "start": 0.1}], 1)


def test_own_schedules_are_given_by_name_or_class(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SCHEDULES, "_entries", dict(SCHEDULES._entries))

    def halving(optimizer: Any, gamma: float) -> Any:
        return lr_scheduler.ExponentialLR(optimizer, gamma)

    SCHEDULES.register("HalvingForTest")(halving)
    for kind in (halving, lr_scheduler.ExponentialLR, "HalvingForTest"):
        assert scheduled([{"type": kind, "gamma": 0.5}], 3) == pytest.approx([0.1, 0.05, 0.025])


METRICS = (1.0, 0.5, 0.5, 0.6, 0.4, 0.9, 0.9, 0.9)


@pytest.mark.parametrize(
    ("key", "name"), [("lr", "ReduceOnPlateauLR"), ("momentum", "ReduceOnPlateauMomentum")]
)
def test_value_is_lowered_when_a_metric_stops_improving(key: str, name: str) -> None:
    optimizer = sgd()
    cfg = {"type": name, "monitor": "loss", "factor": 0.5, "patience": 1, "cooldown": 1, "min_value": 0.01}
    [schedule] = bind_schedules([cfg], optimizer)
    assert schedule.by == "metric"
    reference = torch.optim.SGD(zeros(1), lr=optimizer.param_groups[0][key])
    theirs = lr_scheduler.ReduceLROnPlateau(reference, factor=0.5, patience=1, cooldown=1, min_lr=0.01)
    for metric in METRICS:
        schedule.step(metric)  # type: ignore[call-arg]
        theirs.step(metric)
        assert optimizer.param_groups[0][key] == reference.param_groups[0]["lr"]
    assert optimizer.param_groups[0][key] < sgd().param_groups[0][key]


def test_metric_schedule_resumes_and_keeps_to_its_window() -> None:
    cfg = {"type": "ReduceOnPlateauLR", "patience": 0, "factor": 0.5, "begin": 2, "end": 4}
    first = sgd()
    [schedule] = bind_schedules([cfg], first)
    for _ in range(2):
        schedule.step(1.0)  # type: ignore[call-arg]
    assert first.param_groups[0]["lr"] == 0.1
    second = sgd()
    [resumed] = bind_schedules([cfg], second)
    resumed.load_state_dict(schedule.state_dict())
    for expected in (0.05, 0.05):
        resumed.step(1.0)  # type: ignore[call-arg]
        assert second.param_groups[0]["lr"] == expected
    with pytest.raises(ConfigurationError, match="metric"):
        resumed.step()


@pytest.mark.parametrize(
    "wrong",
    [{"threshold": -1.0}, {"threshold": "0"}, {"factor": 1.0}, {"min_value": [0.1, 0.1]}, {"rule": "min"}],
)
def test_impossible_metric_schedules_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError):
        bind_schedules([{"type": "ReduceOnPlateauLR", **wrong}], sgd())


def test_what_is_not_there_is_a_key_error_too() -> None:
    with pytest.raises(KeyError, match="CosineAnnealingLR"):
        scheduled([{"type": "CosineLR", "end": 4}], 1)
    with pytest.raises(KeyError):
        scheduled([{"policy": "nosuch"}], 1)
    with pytest.raises(KeyError) as caught:
        scheduled([{"type": "StepParamScheduler", "param_name": "nosuch", "step_size": 2, "end": 4}], 1)
    assert isinstance(caught.value, ConfigurationError)


def test_one_configuration_serves_several_optimizers() -> None:
    optimizers = {"generator": sgd(0.1), "critic": sgd(0.4)}
    cfg, run = [{"type": "PolyLR"}, {"type": "StepMomentum", "step_size": 1}], {"max_epochs": 3}
    made = build_param_schedules(cfg, optimizers, run)
    assert isinstance(made, dict)
    assert list(made) == ["generator", "critic"]
    for bound in made.values():
        for schedule in bound:
            schedule.step()
    assert [o.param_groups[0]["lr"] for o in optimizers.values()] == pytest.approx([0.05, 0.2])
    assert run == {"max_epochs": 3}


def test_optimizers_may_have_schedules_of_their_own() -> None:
    optimizers = {"generator": sgd(), "critic": sgd()}
    cfg = {"critic": {"type": "PolyLR", "end": 3}}
    made = build_param_schedules(cfg, optimizers)
    assert isinstance(made, dict)
    assert list(made) == ["critic"]
    with pytest.raises(UnknownNameError, match="schedules for 'discriminator'"):
        build_param_schedules({"discriminator": cfg["critic"]}, optimizers)


def test_one_schedule_makes_a_list_of_one_and_the_configuration_is_left_as_it_is() -> None:
    cfg = {"type": "CosineRestartLR", "periods": [3], "eta_min": 0.0, "convert_to_iter_based": True}
    before = dict(cfg)
    made = build_param_schedules(cfg, sgd(), {"max_epochs": 3, "epoch_length": 2})
    assert isinstance(made, list)
    assert len(made) == 1
    assert cfg == before


def test_schedules_need_an_optimizer() -> None:
    with pytest.raises(TypeError, match="an optimizer or a mapping"):
        build_param_schedules({"type": "PolyLR", "end": 3}, [sgd()])


def test_each_group_may_have_a_maximum_of_its_own() -> None:
    groups = [{"params": zeros(1)} for _ in range(2)]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    bind_schedules([{"type": "OneCycleLR", "eta_max": [0.8, 0.4], "by_epoch": False, "end": 10}], optimizer)
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.8 / 25, 0.4 / 25])
