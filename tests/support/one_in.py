"""Which combinations of a large grid `make test` tries; all others are left to `make test-full`."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import pytest


def one_in(count: int, *values: Iterable[object]) -> list[Any]:
    """Give all combinations as parameters of a test, all but one in `count` for the full run.

    Those that stay lie on diagonals of the grid, so each value of a list that is not shorter than `count` is among
    them. Of a single list of tuples each is a combination.
    """
    lists = [list(one) for one in values]
    places = itertools.product(*[range(len(one)) for one in lists])
    found = []
    for at in places:
        combination = [one[i] for one, i in zip(lists, at, strict=True)]
        if len(lists) == 1 and isinstance(combination[0], tuple):
            combination = list(combination[0])
        found.append(pytest.param(*combination, marks=pytest.mark.full if sum(at) % count else ()))
    return found
