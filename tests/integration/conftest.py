"""Processes that a test starts, and workers in its own process; both end with it."""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator

import pytest

from kvtrainer.comm.connection import Connection
from kvtrainer.env import TRANSPORT
from tests.support.processes import Members, Processes


@pytest.fixture(autouse=True)
def transport(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have each test use one way to servers, in every run the same one, unless its module or the environment says."""
    if way := getattr(request.module, "WAY", ""):
        monkeypatch.setenv(TRANSPORT, way)
    elif TRANSPORT not in os.environ:
        ways = ("auto", "ipc", "auto", "tcp")
        monkeypatch.setenv(TRANSPORT, ways[zlib.crc32(request.node.nodeid.encode()) % len(ways)])


@pytest.fixture
def processes() -> Iterator[Processes]:
    with Processes() as started:
        yield started


@pytest.fixture
def members() -> Iterator[Members]:
    with Members() as joined:
        yield joined


@pytest.fixture
def far(monkeypatch: pytest.MonkeyPatch) -> None:
    """A network lies between workers and servers, as far as they know."""
    monkeypatch.setenv(TRANSPORT, "tcp")
    monkeypatch.setattr(Connection, "is_far", lambda *_: True)
