"""Grids of parameters of which each pair is tried out, where a whole product would only try the same again."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any


def pairwise(*axes: Iterable[Any]) -> list[tuple[Any, ...]]:
    """Give combinations of one value of each axis, such that any two values of different axes meet in one of them."""
    values = [list(axis) for axis in axes]
    whole = list(itertools.product(*(range(len(axis)) for axis in values)))
    pairs = {places: set(itertools.combinations(enumerate(places), 2)) for places in whole}
    missing, chosen = set[Any]().union(*pairs.values()), []
    while missing:
        chosen.append(max(whole, key=lambda places: len(pairs[places] & missing)))
        missing -= pairs[chosen[-1]]
    return [tuple(axis[at] for axis, at in zip(values, places, strict=True)) for places in sorted(chosen)]
