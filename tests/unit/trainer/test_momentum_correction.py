"""Momentum with the learning rate inside, where the rate changes: Detectron's numbers, and torch's form beside it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from kvstore_server.errors import ConfigurationError
from kvstore_server.optimizer import create, create_optimizer_from_spec
from kvtrainer import Trainer
from tests.support.scalar_training import IN_STORE, trainer_of, zeros

GRADIENTS = (0.5, 0.5, -0.25, 0.1, 0.5)
CONSTANT = (0.02,) * 5
JUMP = (0.02, 0.02, 0.002, 0.002, 0.002)
KINDS: dict[str, tuple[float, float]] = {"weight": (1.0, 1e-4), "bias": (2.0, 0.0), "scale": (1.0, 0.01)}
"""Factor of the learning rate and weight decay."""

DETECTRON = {
    ("weight", CONSTANT): (0.98999798, 0.97099423, 0.95888889, 0.94599217, 0.92438322),
    ("bias", CONSTANT): (0.98000002, 0.94200003, 0.91780001, 0.89201999, 0.84881800),
    ("scale", CONSTANT): (0.98979998, 0.97042203, 0.95778775, 0.94422537, 0.92183036),
    ("weight", JUMP): (0.98999798, 0.97099423, 0.96978372, 0.96849406, 0.96633315),
    ("bias", JUMP): (0.98000002, 0.94200003, 0.93958002, 0.93700200, 0.93268180),
    ("scale", JUMP): (0.98979998, 0.97042203, 0.96915859, 0.96780211, 0.96556193),
}
"""The weight after each step, from 1, momentum 0.9, computed with caffe2's operators."""
WITHOUT = {
    "weight": (0.98999798, 0.97099423, 0.95439065, 0.93924719, 0.92461795),
    "bias": (0.98, 0.942, 0.90880001, 0.87852001, 0.84926802),
}


def one(value: float = 1.0, dtype: torch.dtype = torch.float32) -> Parameter:
    return Parameter(torch.full((3,), value, dtype=dtype))


def run(
    trainer: Any, parameter: Parameter, rates: Sequence[float], gradients: Sequence[float] = GRADIENTS
) -> list[float]:
    """The weight after each step with these rates; of a Trainer or of torch's optimizer."""
    seen = []
    for rate, gradient in zip(rates, gradients, strict=True):
        for group in trainer.param_groups:
            group["lr"] = rate
        parameter.grad = torch.full_like(parameter, gradient)
        trainer.step()
        seen.append(parameter[0].item())
    return seen


def trained(
    rates: Sequence[float],
    correction: Any = True,
    kind: str = "weight",
    in_store: bool = False,
    dtype: torch.dtype = torch.float32,
    gradients: Sequence[float] = GRADIENTS,
) -> list[float]:
    (factor, decay), parameter = KINDS[kind], one(dtype=dtype)
    parameter.lr_mult = factor  # type: ignore[attr-defined]
    options = {"learning_rate": 0.0, "momentum": 0.9, "wd": decay, "momentum_correction": correction}
    return run(trainer_of([parameter], "sgd", options, in_store), parameter, rates, gradients)


def is_close(a: Sequence[float], b: Sequence[float], bound: float = 1e-6) -> bool:
    return all(abs(x - y) <= bound + bound * abs(y) for x, y in zip(a, b, strict=True))


@IN_STORE
@pytest.mark.parametrize(("kind", "rates"), DETECTRON)
def test_corrected_steps_are_detectrons(kind: str, rates: tuple[float, ...], in_store: bool) -> None:
    assert is_close(trained(rates, True, kind, in_store), DETECTRON[kind, rates])


@pytest.mark.parametrize("off", [None, False])
@pytest.mark.parametrize("kind", WITHOUT)
def test_without_correction_former_gradients_keep_the_rate_that_they_came_with(kind: str, off: Any) -> None:
    assert is_close(trained(JUMP, off, kind), WITHOUT[kind])


def test_changes_below_the_threshold_are_not_corrected() -> None:
    rates = [0.02 * (1 - (1 - i / 500) * (1 - 1 / 3)) for i in range(4)]
    expected = (0.99666601, 0.99031806, 0.98124427, 0.96970385)
    for correction in (True, None):
        assert is_close(trained(rates, correction, gradients=(0.5,) * 4), expected)
    always = trained(rates, {"threshold": 1.0}, gradients=(0.5,) * 4)
    assert is_close(always, (0.99666600, 0.99030606, 0.98119865, 0.96959546))


def test_a_rate_of_zero_empties_the_momentum_and_the_way_back_leaves_it() -> None:
    seen = trained((0.02, 0.0, 0.02), gradients=(0.5, 0.5, 0.5), dtype=torch.float64)
    first = 1 - 0.02 * (0.5 + 1e-4)
    assert is_close(seen, (first, first, first - 0.02 * (0.5 + 1e-4 * first)), 1e-9)


def test_rates_up_to_min_lr_are_not_corrected_from() -> None:
    # Both rates are tiny, so what the second step moves by is what is left of the momentum.
    rates, gradients = (1e-3, 1e-6), (1.0, 0.0)
    corrected = trained(rates, {"min_lr": 1e-4}, dtype=torch.float64, gradients=gradients)
    spared = trained(rates, {"min_lr": 1e-3}, dtype=torch.float64, gradients=gradients)
    assert corrected[0] - corrected[1] == pytest.approx(0.9 * 1e-6, rel=1e-3)
    assert spared[0] - spared[1] == pytest.approx(0.9 * 1e-3, rel=1e-3)


def test_late_starting_key_is_corrected_from_its_own_rate() -> None:
    early, late = one(dtype=torch.float64), one(dtype=torch.float64)
    options = {"learning_rate": 0.02, "momentum": 0.9, "momentum_correction": True}
    trainer = trainer_of({"a": early, "b": late}, "sgd", options)
    for i, rate in enumerate((0.02, 0.002, 0.002, 0.02)):
        trainer.param_groups[0]["lr"] = rate
        early.grad = torch.ones_like(early)
        if i >= 2:
            late.grad = torch.ones_like(late)
        trainer.step(1, ignore_stale_grad=True)
    expected = []
    for rates in ((0.02, 0.002, 0.002, 0.02), (0.002, 0.02)):
        p = one(dtype=torch.float64)
        expected.append(run(torch.optim.SGD([p], lr=0.0, momentum=0.9), p, rates, (1.0,) * len(rates))[-1])
    assert is_close([early[0].item(), late[0].item()], expected, 1e-9)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_momentum_of_a_float32_copy_is_corrected(dtype: torch.dtype) -> None:
    parameter, reference = one(dtype=dtype), one()
    options = {"momentum": 0.9, "multi_precision": True, "momentum_correction": True}
    ours = run(trainer_of([parameter], "sgd", options), parameter, JUMP)
    theirs = run(torch.optim.SGD([reference], lr=0.0, momentum=0.9), reference, JUMP)
    assert ours == torch.tensor(theirs).to(dtype).tolist()


@IN_STORE
def test_loaded_momentum_is_corrected_for_the_rate_of_its_file(in_store: bool, tmp_path: Path) -> None:
    options = {"momentum": 0.9, "wd": 1e-4, "momentum_correction": True}
    parameter = one()
    trainer = trainer_of({"w": parameter}, "sgd", options, in_store)
    run(trainer, parameter, JUMP[:2], GRADIENTS[:2])
    trainer.save_states(tmp_path / "states")
    resumed = Parameter(parameter.detach().clone())
    fresh = trainer_of({"w": resumed}, "sgd", {**options, "learning_rate": 5.0}, in_store)
    fresh.load_states(tmp_path / "states")
    assert is_close(run(fresh, resumed, JUMP[2:], GRADIENTS[2:]), DETECTRON["weight", JUMP][2:])


def test_states_that_were_saved_without_correction_are_taken_over(tmp_path: Path) -> None:
    parameter = one()
    trainer = trainer_of({"w": parameter}, "sgd", {"momentum": 0.9})
    run(trainer, parameter, JUMP[:2], GRADIENTS[:2])
    trainer.save_states(tmp_path / "states")
    fresh = trainer_of({"w": parameter}, "sgd", {"momentum": 0.9, "momentum_correction": True})
    fresh.load_states(tmp_path / "states")
    fresh.param_groups[0]["momentum_correction"] = True
    before = parameter[0].item()
    # Nobody knows the rate that this momentum has inside, so it stays.
    after = run(fresh, parameter, [0.002], [0.0])[0]
    assert before - after == pytest.approx(0.9 * (0.9 * 0.01 + 0.01), rel=1e-4)


def test_correction_that_was_off_for_a_while_forgets_the_rate() -> None:
    parameter = one(dtype=torch.float64)
    trainer = trainer_of([parameter], "sgd", {"momentum": 0.5, "momentum_correction": True})
    seen = [1.0]
    for rate, correction in ((1.0, True), (0.1, None), (0.1, True)):
        trainer.param_groups[0]["momentum_correction"] = correction
        seen += run(trainer, parameter, [rate], [1.0])
    moves = [a - b for a, b in itertools.pairwise(seen)]
    assert moves == pytest.approx([1.0, 0.6, 0.4])


def test_options_travel_as_plain_numbers() -> None:
    optimizer = create("sgd", momentum=0.9, momentum_correction={"threshold": 2})
    described = optimizer.spec()
    assert described["hyper"]["momentum_correction"] == [2.0, 1e-7]
    assert create_optimizer_from_spec(described).hyper == optimizer.hyper
    assert create("sgd").spec()["hyper"]["momentum_correction"] is None


@pytest.mark.parametrize(
    "wrong",
    [
        "yes",
        1.1,
        {"treshold": 1.1},
        {"threshold": 0.5},
        {"min_lr": -1.0},
        {"threshold": True},
        {"min_lr": "0"},
        [1.1],
    ],
)
def test_what_is_no_correction_is_refused(wrong: Any) -> None:
    with pytest.raises(ConfigurationError, match="momentum_correction"):
        create("sgd", momentum_correction=wrong)
    trainer = trainer_of(zeros(1), "sgd")
    trainer.param_groups[0]["momentum_correction"] = wrong
    with pytest.raises(ConfigurationError, match="momentum_correction"):
        run_once(trainer)


def run_once(trainer: Trainer) -> Tensor:
    [parameter] = trainer.param_groups[0]["params"]
    parameter.grad = torch.ones_like(parameter)
    trainer.step(1)
    result: Tensor = parameter
    return result
