"""Messages, files of keys and connections that somebody has made to break a server; `make fuzz` plays a million."""

from __future__ import annotations

import pytest

from tests.support.fuzzing import KINDS, fuzz

FEWER = {"keys": 5, "connections": 5}


@pytest.mark.parametrize("kind", KINDS)
def test_hostile_input_meets_typed_errors_only(kind: str) -> None:
    fuzz(kind, 5000 // FEWER.get(kind, 1), seed=1)
