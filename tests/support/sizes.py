"""The sizes of jobs: how many workers and how many servers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

FAST = ((1, 1), (2, 3), (3, 2), (7, 1))
"""Each number of workers and each of servers at least once: what `make test` runs."""


def sizes(
    *fast: tuple[int, int], workers: Iterable[int] = (1, 2, 3, 7), servers: Iterable[int] = (1, 2, 3)
) -> list[Any]:
    """Give the whole grid as parameters of a test, of which all but `fast` are left to `make test-full`."""
    grid = [(w, s) for w in workers for s in servers]
    return [
        pytest.param(size, id=f"{size[0]}x{size[1]}", marks=() if size in fast else pytest.mark.full)
        for size in grid
    ]
