"""The loss scaler's numbers: when it halves, when it doubles, and what of it is saved."""

from __future__ import annotations

from typing import Any

import pytest

from kvtrainer.errors import ConfigurationError
from kvtrainer.scaling import CLEAN_STEPS, FIRST, LARGEST, LEAST, LossScaler


def scales(scaler: LossScaler, *overflows: bool) -> list[float]:
    """The scale that each step uses."""
    seen = []
    for overflow in overflows:
        seen.append(scaler.loss_scale)
        scaler.update(overflow)
    return seen


def test_numbers_are_mxnets() -> None:
    assert (FIRST, LARGEST, CLEAN_STEPS) == (2.0**16, 2.0**24, 2000)


def test_scale_halves_at_once_so_one_large_gradient_halves_it_once() -> None:
    """MXNet uses 65536, 65536, 32768, 16384: the step after an overflow still has the old scale."""
    assert scales(LossScaler(), True, False, False, False) == [65536, 32768, 32768, 32768]


def test_scale_doubles_after_2000_clean_steps_in_a_row_and_not_beyond_its_limit() -> None:
    scaler = LossScaler(2.0**23)
    assert set(scales(scaler, *[False] * 1999)) == {2.0**23}
    scaler.update(True)
    assert set(scales(scaler, *[False] * 2000)) == {2.0**22}
    assert set(scales(scaler, *[False] * 2000)) == {2.0**23}
    assert set(scales(scaler, *[False] * 6000)) == {2.0**24}


def test_endless_overflows_end_at_the_least_scale_and_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    scaler = LossScaler(LEAST * 2)
    assert scales(scaler, True, True, False) == [LEAST * 2, LEAST, LEAST]
    assert "look for an infinity or a NaN" in caplog.text


def test_factor_undoes_the_scale_only_for_gradients_that_carry_it() -> None:
    scaler = LossScaler(4.0)
    assert scaler.factor == 1
    scaler.mark_scaled()
    assert scaler.factor == 0.25
    scaler.mark_unscaled()
    assert scaler.factor == 1
    scaler.update(False)
    scaler.mark_scaled()
    scaler.update(True)
    assert scaler.factor == 1


def test_scaled_gradients_are_not_added_to_unscaled_ones() -> None:
    scaler = LossScaler()
    scaler.mark_unscaled()  # of nothing
    scaler.mark_scaled()
    scaler.mark_unscaled()
    with pytest.raises(ConfigurationError, match=r"call amp\.unscale after the last backward pass"):
        scaler.mark_scaled()
    scaler.update(False)
    scaler.mark_scaled()


def test_state_is_plain_and_goes_on_where_it_was() -> None:
    scaler, other = LossScaler(8.0), LossScaler()
    scales(scaler, True, *[False] * 1500)
    assert scaler.state_dict() == {"loss_scale": 4.0, "clean_steps": 1500}
    other.load_state_dict(scaler.state_dict())
    assert set(scales(other, *[False] * 500)) == {4.0}
    assert other.loss_scale == 8.0


@pytest.mark.parametrize(
    "state",
    [
        {},
        None,
        {"loss_scale": 1.0, "clean_steps": 2000},
        {"loss_scale": 1.0, "clean_steps": 1.5},
        {"loss_scale": float("nan"), "clean_steps": 0},
        {"loss_scale": 2.0**25, "clean_steps": 0},
        {"loss_scale": 1.0, "clean_steps": 0, "more": 1},
    ],
)
def test_state_of_something_else_is_refused_and_changes_nothing(state: Any) -> None:
    scaler = LossScaler(2.0)
    with pytest.raises(ConfigurationError):
        scaler.load_state_dict(state)
    assert scaler.state_dict() == {"loss_scale": 2.0, "clean_steps": 0}


@pytest.mark.parametrize("scale", [0, -1.0, True, "big", float("inf"), 2.0**25])
def test_impossible_scale_is_refused(scale: Any) -> None:
    with pytest.raises(ConfigurationError, match="must be a finite number from"):
        LossScaler(scale)
