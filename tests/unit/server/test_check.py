"""Checks of arguments: what they let through, and what they say about the rest."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvstore_server import check
from kvtrainer.errors import ArgumentTypeError, ConfigurationError

NOT_NUMBERS = [None, True, "1", [1.0], 1j]


@pytest.mark.parametrize("value", [2, 2.0, np.float32(2), np.int64(2)])
def test_a_number_of_python_or_numpy_comes_back_as_a_float(value: Any) -> None:
    assert (check.number("it", value), type(check.number("it", value))) == (2.0, float)


@pytest.mark.parametrize("value", [2, np.int64(2)])
def test_an_integer_of_python_or_numpy_comes_back_as_an_int(value: Any) -> None:
    assert (check.integer("it", value), type(check.integer("it", value))) == (2, int)


@pytest.mark.parametrize("value", [*NOT_NUMBERS, math.nan, math.inf])
def test_what_is_no_finite_number_is_refused(value: Any) -> None:
    with pytest.raises(ConfigurationError, match="finite number"):
        check.number("it", value)


def test_an_infinity_passes_where_it_may_and_a_nan_never_does() -> None:
    assert check.number("it", math.inf, finite=False) == math.inf
    with pytest.raises(ConfigurationError, match="nan"):
        check.number("it", math.nan, finite=False)


@pytest.mark.parametrize("value", [*NOT_NUMBERS, 1.0, math.nan])
def test_what_is_no_integer_is_refused(value: Any) -> None:
    with pytest.raises(ConfigurationError, match="integer"):
        check.integer("it", value)


@pytest.mark.parametrize(
    ("bounds", "inside", "outside", "wanted"),
    [
        (dict(least=0, most=1), (0, 0.5, 1), (-0.1, 1.1), "from 0 to 1"),
        (dict(above=0), (1e-9, 7), (0, -1), "above 0"),
        (dict(least=2), (2, 3), (1.9,), "of at least 2"),
        (dict(above=0, most=1), (0.1, 1), (0, 1.1), "above 0 and at most 1"),
        (dict(least=0, below=1), (0, 0.9), (1, -0.1), "of at least 0 and below 1"),
    ],
)
def test_a_number_keeps_its_bounds(
    bounds: Any, inside: tuple[float, ...], outside: tuple[float, ...], wanted: str
) -> None:
    assert [check.number("it", value, **bounds) for value in inside] == list(inside)
    for value in outside:
        with pytest.raises(ConfigurationError, match=f"a finite number {wanted}, got {value}"):
            check.number("it", value, **bounds)


def test_an_integer_keeps_its_bounds() -> None:
    assert [check.integer("it", value, 1, 3) for value in (1, 3)] == [1, 3]
    for value in (0, 4):
        with pytest.raises(ConfigurationError, match=f"an integer from 1 to 3, got {value}"):
            check.integer("it", value, 1, 3)


@pytest.mark.parametrize("value", [0, 1, None, "True", np.bool_(True)])
def test_only_true_and_false_are_booleans(value: Any) -> None:
    assert check.boolean("it", False) is False
    with pytest.raises(ConfigurationError, match="True or False"):
        check.boolean("it", value)


def test_a_choice_that_does_not_exist_is_answered_with_those_that_do() -> None:
    assert check.one_of("it", "tree", ("flat", "tree")) == "tree"
    assert check.one_of("it", None, (None, "tree")) is None
    with pytest.raises(ConfigurationError, match=r"'flat'.*'tree'.*'Tree'.*'tree'"):
        check.one_of("it", "Tree", ("flat", "tree"))
    with pytest.raises(ConfigurationError, match="'a', 'b', 'c', 'd', got 3"):
        check.one_of("it", 3, "abcd")


@pytest.mark.parametrize(
    "call",
    [
        lambda error: check.boolean("it", "1", error=error),
        lambda error: check.one_of("it", "1", ("2",), error=error),
    ],
)
def test_a_caller_chooses_the_class_of_the_error(call: Callable[[Any], object]) -> None:
    with pytest.raises(ArgumentTypeError, match="'1'"):
        call(ArgumentTypeError)
