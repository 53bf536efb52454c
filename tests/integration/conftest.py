"""Processes that a test starts, and workers in its own process; both end with it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.processes import Members, Processes


@pytest.fixture
def processes() -> Iterator[Processes]:
    with Processes() as started:
        yield started


@pytest.fixture
def members() -> Iterator[Members]:
    with Members() as joined:
        yield joined
