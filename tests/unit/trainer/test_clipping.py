"""What clip_grad and on_nonfinite mean, and what is decided of a gradient."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.nn import Parameter

from kvstore_server.norms import Decision, Measured
from kvtrainer.errors import ArgumentTypeError, ConfigurationError
from kvtrainer.stages import Limits, make_limits

FINITE, BROKEN = Measured(5.0, True), Measured(math.nan, False)


def limits(clip: dict[str, Any] | None = None, on_nonfinite: str | None = None) -> Limits:
    return make_limits(clip, on_nonfinite)


@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, math.inf])
@pytest.mark.parametrize("max_norm", [0.5, 4.0, 35.0])
def test_coefficient_is_that_of_torch(norm_type: float, max_norm: float) -> None:
    p = Parameter(torch.zeros(4, dtype=torch.float64))
    p.grad = torch.tensor([3.0, -4.0, 0.5, 0.0], dtype=torch.float64)
    unclipped = p.grad.clone()
    norm = torch.nn.utils.clip_grad_norm_([p], max_norm, norm_type)
    coef = limits({"max_norm": max_norm, "norm_type": norm_type}).decide(Measured(norm.item(), True)).coef
    torch.testing.assert_close(unclipped * coef, p.grad, rtol=1e-12, atol=0.0)


def test_norm_that_is_no_number_skips_the_step_unless_it_is_to_be_ignored() -> None:
    assert limits({"max_norm": 1}).decide(BROKEN) == Decision(skip=True)
    assert limits({"max_norm": 1}, "skip").decide(BROKEN) == Decision(skip=True)
    assert limits({"max_norm": 1}, "ignore").decide(BROKEN) == Decision()


def test_finite_gradient_whose_norm_overflows_becomes_zero_as_with_torch() -> None:
    assert limits({"max_norm": 1}).decide(Measured(math.inf, True)) == Decision(coef=0.0)


def test_nothing_is_measured_without_a_limit() -> None:
    assert limits().guard is None
    assert limits(None, "ignore").guard is None
    assert limits(None, "skip").guard is not None
    assert limits().with_scaler.guard is not None


def test_loss_scaler_makes_overflow_skip_the_step() -> None:
    assert limits().with_scaler.decide(BROKEN) == Decision(skip=True)
    assert limits().with_scaler.decide(FINITE) == Decision()


def test_error_if_nonfinite_means_raise() -> None:
    assert limits({"max_norm": 1, "error_if_nonfinite": True}).on_nonfinite == "raise"
    with pytest.raises(ConfigurationError, match="error_if_nonfinite=True, but on_nonfinite is 'skip'"):
        limits({"max_norm": 1, "error_if_nonfinite": True}, "skip")


def test_norm_type_may_be_infinite_under_either_spelling() -> None:
    for given in (math.inf, "inf"):
        assert make_limits({"max_norm": 2, "norm_type": given}) == Limits(2.0, math.inf)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "needs max_norm"),
        ({"type": "value"}, "needs clip_value"),
        ({"type": "norms", "max_norm": 1}, "type must be 'norm' or 'value', got 'norms'"),
        ({"max_norm": 1, "foreach": True}, "no option 'foreach'"),
        ({"type": "value", "clip_value": 1, "max_norm": 1}, "no option 'max_norm'"),
        ({"max_norm": 0}, "max_norm of .*above 0, got 0"),
        ({"max_norm": math.nan}, "got nan"),
        ({"max_norm": math.inf}, "got inf"),
        ({"max_norm": True}, "got True"),
        ({"max_norm": "1"}, "got '1'"),
        ({"max_norm": 1, "norm_type": -2}, "norm_type of .*above 0, got -2"),
        ({"max_norm": 1, "error_if_nonfinite": 1}, "must be True or False, got 1"),
    ],
)
def test_wrong_entries_are_named(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        make_limits(given)


def test_a_number_is_no_limit() -> None:
    with pytest.raises(ArgumentTypeError, match="must be a dict such as"):
        make_limits(35)


def test_unknown_way_out_is_named() -> None:
    with pytest.raises(ConfigurationError, match=r"on_nonfinite .*got 'stop'"):
        make_limits(None, "stop")


def test_workers_compare_all_that_decides() -> None:
    one = limits({"max_norm": 1}).summary
    assert one == {"max_norm": 1.0, "norm_type": 2.0, "clip_value": None, "checks_finite": True}
    assert limits({"max_norm": 2}).summary != one
    assert limits({"max_norm": 1}, "ignore").summary != one
    assert limits().summary is None
