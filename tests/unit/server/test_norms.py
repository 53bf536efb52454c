"""The norm of a gradient: against closed forms and numpy's long doubles, and the same bits wherever it is measured."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import pytest
import torch
from torch import Tensor

from kvstore_server.errors import ConfigurationError
from kvstore_server.plan import Plan
from kvstore_server.protocol.rows import RowSet
from kvstore_server.shard.norms import (
    Decision,
    Guard,
    Measured,
    apply_decision,
    combine,
    is_finite,
    measure,
    partial_norm,
    same_decision,
)
from tests.support.engines import filled, plan_of
from tests.support.pairwise import pairwise

INF = math.inf


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def norm_of(values: Tensor, p: float) -> float:
    """In long doubles, by numpy."""
    wide = np.abs(values.double().numpy().astype(np.longdouble)).reshape(-1)
    return float(wide.max()) if p == INF else float((wide**p).sum() ** (np.longdouble(1) / np.longdouble(p)))


@pytest.mark.parametrize("p", [1.0, 2.0, 3.0, 0.5, INF])
@pytest.mark.parametrize("numel", [1, 7, 16384, 16385, 300_001])
def test_a_norm_is_that_of_long_doubles(p: float, numel: int) -> None:
    values = randn(numel)
    got = combine([partial_norm(values, p)], p)
    assert got == pytest.approx(norm_of(values, p), rel=1e-12)


@pytest.mark.parametrize(
    ("p", "bad", "at"), pairwise([1.0, 2.0, 3.0, INF], [math.nan, INF, -INF], [0, 40_000])
)
def test_what_is_not_finite_stays_so_in_the_norm(p: float, bad: float, at: int) -> None:
    values = randn(50_000)
    values[at] = bad
    partial = partial_norm(values, p)
    for partials in ([partial, 1.0], [1.0, partial]):
        total = combine(partials, p)
        assert math.isnan(total) if math.isnan(bad) else total == INF
    assert not is_finite(values, partial)


@pytest.mark.parametrize("magnitude", [1e200, 1e-200])
@pytest.mark.parametrize("p", [1.0, 2.0, 3.0, 9.0, 0.5, INF])
def test_powers_that_float64_cannot_hold_do_not_spoil_a_norm(p: float, magnitude: float) -> None:
    values = torch.tensor([3.0, -4.0, 0.0, 1.0], dtype=torch.float64) * magnitude
    partials = [partial_norm(values[:2], p), partial_norm(values[2:], p)]
    assert combine(partials, p) / magnitude == pytest.approx(norm_of(values / magnitude, p), rel=1e-12)


@pytest.mark.parametrize(
    ("values", "p"), [(torch.full((4,), 1e308, dtype=torch.float64), 2.0), (torch.ones(20_000), 0.01)]
)
def test_a_norm_too_large_for_float64_is_infinite_though_the_numbers_are_finite(
    values: Tensor, p: float
) -> None:
    partial = partial_norm(values, p)
    assert partial == INF
    assert is_finite(values, partial)
    assert combine([partial, 1.0], p) == INF


def test_the_greatest_magnitude_forgets_no_nan_that_came_before_it() -> None:
    assert math.isnan(combine([math.nan, 5.0, 1.0], INF))


@pytest.mark.parametrize("p", [1.0, 2.0, 3.0, INF])
def test_the_number_of_threads_changes_no_bit(p: float) -> None:
    values = randn(1 << 18)
    before = torch.get_num_threads()
    found = set()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.add(partial_norm(values, p))
    finally:
        torch.set_num_threads(before)
    assert len(found) == 1


@pytest.mark.parametrize("wrong", [0, -1.0, math.nan, True, "2", None])
def test_a_norm_type_that_is_no_number_above_zero_is_refused(wrong: object) -> None:
    with pytest.raises(ConfigurationError, match=r"norm_type.*above 0"):
        Guard(wrong, lambda measured: Decision())  # type: ignore[arg-type]


def test_decisions_are_the_same_when_they_have_the_same_effect() -> None:
    assert same_decision(Decision(math.nan), Decision(math.nan))
    assert same_decision(Decision(0.1, skip=True), Decision(0.2, 3.0, skip=True))
    assert not same_decision(Decision(0.1), Decision(0.2))
    assert not same_decision(Decision(), Decision(skip=True))
    assert not same_decision(Decision(clip_value=1.0), Decision())


SHAPES = {"small": (7,), "big": (500, 300), "bias": (3, 3)}


def gradients() -> tuple[Plan, dict[str, Tensor], dict[str, Tensor]]:
    plan = plan_of(SHAPES)
    values = {key: randn(*shape, seed=at) for at, (key, shape) in enumerate(SHAPES.items())}
    return plan, values, filled(plan, values)


def batch_of(values: Mapping[str, Tensor], *keys: str) -> Tensor:
    return torch.cat([values[key].reshape(-1) for key in keys])


@pytest.mark.parametrize("p", [1.0, 2.0, 3.0, INF])
def test_all_parameters_are_measured_together(p: float) -> None:
    plan, values, arenas = gradients()
    norm, finite = measure(plan, arenas, {}, [True] * 3, p)
    assert norm == pytest.approx(norm_of(batch_of(values, *SHAPES), p), rel=1e-12)
    assert finite


def test_what_is_left_out_does_not_count_even_if_it_is_not_finite() -> None:
    plan, values, arenas = gradients()
    begin = plan.key_offsets[2]
    arenas["float32"][begin : begin + 9] = math.nan
    norm, finite = measure(plan, arenas, {}, [True, True, False], 2.0)
    assert norm == pytest.approx(norm_of(batch_of(values, "small", "big"), 2.0), rel=1e-12)
    assert finite
    assert measure(plan, arenas, {}, [True] * 3, 2.0).is_finite is False
    assert measure(plan, arenas, {}, [False] * 3, 2.0) == Measured(0.0, True)


def test_rows_count_in_place_of_what_is_in_the_arena() -> None:
    plan, values, arenas = gradients()
    rows = RowSet(torch.tensor([2, 499]), randn(2, 300, seed=9))
    expected = torch.cat([batch_of(values, "small", "bias"), rows.values.reshape(-1)])
    norm, _ = measure(plan, arenas, {1: rows}, [True] * 3, 2.0)
    assert norm == pytest.approx(norm_of(expected, 2.0), rel=1e-12)
    assert measure(plan, arenas, {1: rows}, [False] * 3, 2.0).norm == 0.0


def test_a_scale_that_is_still_to_come_is_counted() -> None:
    plan, _, arenas = gradients()
    scaled = {dtype: flat * 0.3 for dtype, flat in arenas.items()}
    assert measure(plan, arenas, {}, [True] * 3, 2.0, 0.3) == measure(plan, scaled, {}, [True] * 3, 2.0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_a_limit_of_the_elements_may_be_more_than_their_dtype_holds(dtype: torch.dtype) -> None:
    values = torch.tensor([1.0, -2.0], dtype=dtype)
    apply_decision(values, Decision(clip_value=1e300))
    assert values.tolist() == [1.0, -2.0]
