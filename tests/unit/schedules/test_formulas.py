"""The values that policies have: numbers from MMCV 1.7.2 and Detectron, and closed forms."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from kvtrainer.errors import ConfigurationError, UnknownNameError
from kvtrainer.schedules import ParamSchedule, detectron_schedule
from kvtrainer.schedules.formulas import make_formula

CYCLE = (
    0.001, 0.00231801948, 0.0055, 0.00868198052, 0.01, 0.00933013372, 0.007500025, 0.00500005, 0.002500075,
    0.000669966282,
)  # fmt: skip
CYCLE_MOMENTUM = (.95, .935355339, .9, .864644661, .85, .85669873, .875, .9, .925, .94330127)  # fmt: skip
ONE_CYCLE = (.004, .052, .1, .0950485, .0811746, .0611262, .0388742, .0188258, .00495194, 4e-7)  # fmt: skip
ONE_CYCLE_MOMENTUM = (.95, .9, .85, .854952, .868826, .888874, .911126, .931174, .945048, .95)  # fmt: skip
MMCV: list[tuple[str, str, dict[str, Any], float, Sequence[float]]] = [
    ("fixed", "lr", {}, 0.1, (0.1,) * 3),
    ("step", "lr", {"step": [2, 4]}, 0.1, (0.1, 0.1, 0.01, 0.01, 0.001, 0.001)),
    ("step", "lr", {"step": 2, "gamma": 0.5, "min_lr": 0.03}, 0.1, (0.1, 0.1, 0.05, 0.05, 0.03, 0.03)),
    ("step", "momentum", {"step": 2, "min_momentum": 0.3}, 0.9, (0.9, 0.9, 0.45, 0.45, 0.3, 0.3)),
    ("exp", "lr", {"gamma": 0.5}, 0.1, (0.1, 0.05, 0.025, 0.0125)),
    ("poly", "lr", {"power": 0.9, "min_lr": 1e-4}, 0.1, (0.1, 0.0818234, 0.0631814, 0.0438945, 0.0235689)),
    ("inv", "lr", {"gamma": 0.5, "power": 2}, 0.1, (0.1, 0.0444444, 0.025, 0.016, 0.0111111)),
    ("CosineAnnealing", "lr", {"min_lr": 0.0}, 0.1, (0.1, 0.0904508, 0.0654508, 0.0345492, 0.00954915)),
    ("CosineAnnealing", "momentum", {"min_momentum_ratio": 0.5}, 0.9, (0.9, 0.675)),
    ("LinearAnnealing", "lr", {"min_lr_ratio": 0.1}, 0.1, (0.1, 0.0775, 0.055, 0.0325)),
    ("LinearAnnealing", "momentum", {"min_momentum": 0.5}, 0.9, (0.9, 0.8, 0.7, 0.6)),
    ("FlatCosineAnnealing", "lr", {"start_percent": 0.5, "min_lr": 0.0}, 0.1, (*[0.1] * 5, 0.0853553, 0.05, 0.0146447)),
    (
        "CosineRestart", "lr", {"periods": [4, 4], "restart_weights": [1, 0.5], "min_lr": 0.0}, 0.1,
        (0.1, 0.0853553, 0.05, 0.0146447, 0.05, 0.0426777, 0.025, 0.00732233),
    ),
    ("cyclic", "lr", {}, 0.001, CYCLE),
    ("cyclic", "momentum", {}, 0.95, CYCLE_MOMENTUM),
    ("OneCycle", "lr", {"max_lr": 0.1}, 0.7, ONE_CYCLE),
    ("OneCycle", "momentum", {}, 0.7, ONE_CYCLE_MOMENTUM),
]  # fmt: skip


def test_cycles_come_down_from_a_peak_that_gamma_brings_nearer_to_the_base() -> None:
    value = make_formula("cyclic", {"gamma": 0.5, "cyclic_times": 2}, "lr", 20)
    first, second = ([value(0.1, at, 20) for at in cycle] for cycle in (range(10), range(10, 20)))
    assert (max(first), max(second)) == pytest.approx((1.0, 0.55))


@pytest.mark.parametrize("ratio", [[10, 1e-4], (10, 1e-4), [10], 10, 10.0])
def test_target_ratio_may_be_a_list_a_tuple_or_a_number(ratio: Any) -> None:
    value = make_formula("cyclic", {"target_ratio": ratio}, "lr", 10)
    assert [value(0.001, at, 10) for at in range(10)] == pytest.approx(CYCLE, rel=1e-6)


def test_one_cycle_of_three_phases_comes_back_to_its_start() -> None:
    value = make_formula(
        "OneCycle", {"max_lr": 0.1, "three_phase": True, "anneal_strategy": "linear"}, "lr", 10
    )
    seen = [value(0.1, at, 10) for at in range(10)]
    # Up until 2, down until 4, then on to the end.
    assert seen[:5] == pytest.approx([0.004, 0.052, 0.1, 0.052, 0.004])
    assert seen[9] == pytest.approx(4e-7)
    assert seen[7] == pytest.approx(0.004 + (4e-7 - 0.004) * 3 / 5)


def test_cosine_restarts_have_no_value_after_their_periods() -> None:
    value = make_formula("CosineRestart", {"periods": [4, 4], "restart_weights": [1, 0.5], "min_lr": 0})
    with pytest.raises(ConfigurationError, match="over after 8"):
        value(0.1, 8, None)


@pytest.mark.parametrize("policy", ["poly", "CosineAnnealing", "LinearAnnealing"])
def test_policies_that_lead_to_an_end_stay_there(policy: str) -> None:
    value = make_formula(policy, {"min_lr": 0.02}, "lr", 4)
    assert value(0.1, 4, 4) == value(0.1, 9, 4) == pytest.approx(0.02)


@pytest.mark.parametrize(
    ("name", "middle"),
    [
        ("cosineannealing", 0.5), ("CosineAnnealing", 0.5), ("cosine_annealing", 0.5), ("COSINEANNEALING", 0.5),
        ("FlatCosineAnnealing", 1.0), ("FlatCosine", 1.0),
    ],
)  # fmt: skip
def test_names_are_found_in_any_case(name: str, middle: float) -> None:
    assert make_formula(name, {"min_lr": 0}, "lr", 2)(1.0, 1, 2) == pytest.approx(middle)


@pytest.mark.parametrize(
    ("policy", "options", "message"),
    [
        ("cosine", {}, "policies are fixed"),
        ("step", {}, "needs step"),
        ("step", {"step": [4, 2]}, "ascending"),
        ("step", {"step": 0}, "above 0"),
        ("step", {"step": 2.5}, "above 0"),
        ("step", {"step": 2, "gama": 1}, "no option 'gama'"),
        ("step", {"step": 2, "step_size": 3}, "two spellings"),
        ("exp", {"gamma": math.nan}, "finite"),
        ("CosineAnnealing", {}, "neither"),
        ("CosineAnnealing", {"min_lr": 0, "min_lr_ratio": 0.1}, "minimum and minimum_ratio"),
        ("FlatCosine", {"min_lr": 0, "start_percent": 1.5}, "from 0 to 1"),
        ("CosineRestart", {"periods": [4, 4], "min_lr": 0}, "equally long"),
        ("CosineRestart", {"periods": [4], "min_lr": 0}, "over after 4"),
        ("cyclic", {"target_ratio": (1, 2, 3)}, "one or two"),
        ("cyclic", {"anneal_strategy": "tri"}, "'cos' or 'linear'"),
        ("cyclic", {"cyclic_times": 11}, "do not fit"),
        *[("cyclic", {"gamma": gamma}, "above 0 and at most 1") for gamma in (0, -1, 5)],
        ("cyclic", {"step_ratio_up": 1.0}, "below 1"),
        ("OneCycle", {}, "needs max_lr"),
        ("OneCycle", {"max_lr": 1, "total_steps": 5}, "total_steps is 5"),
        ("OneCycle", {"max_lr": 1, "three_phase": 1}, "True or False"),
    ],
)
def test_impossible_options_are_refused(policy: str, options: dict[str, Any], message: str) -> None:
    error = UnknownNameError if policy == "cosine" else ConfigurationError
    with pytest.raises(error, match=message):
        make_formula(policy, options, "lr", 10)


SOLVER = {
    "BASE_LR": 0.02, "GAMMA": 0.1, "STEPS": [0, 60, 80], "LRS": [0.02, 0.002, 0.0002], "STEP_SIZE": 30,
    "MAX_ITER": 90, "WARM_UP_ITERS": 5, "WARM_UP_FACTOR": 1 / 3, "WARM_UP_METHOD": "linear",
}  # fmt: skip
AT = (5, 29, 30, 59, 60, 79, 80, 89)
DETECTRON = {
    "steps_with_decay": (0.02, 0.02, 0.02, 0.02, 0.002, 0.002, 0.0002, 0.0002),
    "steps_with_lrs": (0.02, 0.02, 0.02, 0.02, 0.002, 0.002, 0.0002, 0.0002),
    "step": (0.02, 0.02, 0.002, 0.002, 0.0002, 0.0002, 0.0002, 0.0002),
    "cosine_decay": (0.019848077, 0.015299193, 0.015, 0.0053052842, 0.005, 0.00072816, 0.00060307, 6.0917e-6),
}
WARM = (0.0066666668, 0.0093333330, 0.0120000001, 0.0146666663, 0.0173333324)


def value_of(solver: dict[str, Any], at: int, base: float = 0.02) -> float:
    """The rate after so many steps, of a group that starts from `base`."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=base)
    schedule = ParamSchedule(optimizer, detectron_schedule(solver))
    schedule.step(at)
    return schedule.last_values()[0]


@pytest.mark.parametrize("policy", DETECTRON)
def test_policies_have_the_values_of_detectron(policy: str) -> None:
    seen = [value_of({**SOLVER, "LR_POLICY": policy}, at) for at in AT]
    assert seen == pytest.approx(DETECTRON[policy], rel=1e-6, abs=1e-8)


def test_exponential_decay_reaches_gamma_at_the_end() -> None:
    solver = {**SOLVER, "LR_POLICY": "exp_decay"}
    assert value_of(solver, 5) == pytest.approx(0.01759845, rel=1e-6)
    assert make_formula("exp_decay", {"gamma": 0.1}, "lr", 90)(0.02, 90, 90) == pytest.approx(0.002)


def test_warm_up_multiplies_what_the_policy_says() -> None:
    solver = {**SOLVER, "LR_POLICY": "steps_with_decay"}
    assert [value_of(solver, at) for at in range(6)] == pytest.approx([*WARM, 0.02], rel=1e-6)
    constant = {**solver, "WARM_UP_METHOD": "constant"}
    assert [value_of(constant, at) for at in (0, 4, 5)] == pytest.approx([0.02 / 3, 0.02 / 3, 0.02])


def test_missing_solver_keys_have_the_defaults_of_detectron() -> None:
    spec = detectron_schedule({})
    assert (spec.policy, spec.by, spec.end) == ("step", "step", 40000)
    assert (spec.warmup, spec.warmup_iters, spec.warmup_ratio) == ("linear", 500, pytest.approx(1 / 3))
    assert detectron_schedule({"WARM_UP_ITERS": 0}).warmup is None


def test_listed_rates_keep_the_proportions_of_groups() -> None:
    solver = {**SOLVER, "LR_POLICY": "steps_with_lrs"}
    assert [value_of(solver, at, base=0.04) for at in (10, 70)] == pytest.approx([0.04, 0.004])


@pytest.mark.parametrize(
    ("solver", "error", "message"),
    [
        ({"LR_POLICY": "poly"}, UnknownNameError, "steps_with_decay"),
        ({"WARM_UP_METHOD": "exp"}, UnknownNameError, "'constant' or 'linear'"),
        ({"LR_POLICY": "steps_with_decay", "STEPS": [60, 80]}, ConfigurationError, "begin at 0"),
        (
            {"LR_POLICY": "steps_with_lrs", "STEPS": [0, 60], "LRS": [0.02]},
            ConfigurationError,
            "one value for each",
        ),
    ],
)
def test_impossible_solvers_are_refused(solver: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        detectron_schedule(solver)
