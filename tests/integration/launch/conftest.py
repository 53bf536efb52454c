"""What the tests of launched jobs share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.launch_jobs import Jobs


@pytest.fixture
def jobs() -> Iterator[Jobs]:
    started = Jobs()
    yield started
    started.close()
