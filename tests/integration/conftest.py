"""Processes that a test starts, and workers in its own process; both end with it."""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator

import pytest

from kvtrainer.client.connection import Connection
from kvtrainer.common.env import TRANSPORT
from tests.support.forked_clusters import fork_clusters
from tests.support.processes import Members, Process, Processes

WAYS = "auto", "tcp"


@pytest.fixture(autouse=True)
def transport(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have each test use one way to servers, in every run the same one, unless its module or the environment says."""
    if way := getattr(request.module, "WAY", ""):
        monkeypatch.setenv(TRANSPORT, way)
    elif TRANSPORT not in os.environ:
        monkeypatch.setenv(TRANSPORT, way_of(request.node))


def way_of(test: pytest.Function) -> str:
    """Choose the way to servers of a test: those of a module take each in turn, and so do the cases of a test.

    So each module meets every way, and each value of a parameter does where another parameter has two. Both ways of
    all tests (`make test-transports`) would take twice as long. What counts is where the test and its values stand in
    the module, not which tests run, or in which process: so a test that fails does so when it runs alone.
    """
    name = test.originalname if test.cls is None else test.cls.__name__
    tests = [one for one in vars(test.module) if one.lower().startswith("test")]
    case = sum(test.callspec.indices.values()) if hasattr(test, "callspec") else 0
    return WAYS[(zlib.crc32(test.module.__name__.encode()) + tests.index(name) + case) % len(WAYS)]


@pytest.fixture
def processes() -> Iterator[Processes]:
    with Processes() as started:
        yield started


@pytest.fixture(scope="module")
def servers(request: pytest.FixtureRequest) -> Iterator[list[Process]]:
    """Two servers of the module's own, with its SERVER_FLAGS if it has any."""
    with Processes() as started:
        yield started.servers(2, *getattr(request.module, "SERVER_FLAGS", ()))


@pytest.fixture
def members() -> Iterator[Members]:
    with Members() as joined:
        yield joined


@pytest.fixture
def forked_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the processes of a `local_cluster` forked."""
    fork_clusters(monkeypatch)


@pytest.fixture
def unseen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let workers of this process and servers not see each other's processes, as where a network lies between them."""
    monkeypatch.setenv(TRANSPORT, "tcp")
    monkeypatch.setattr(Connection, "_watch", lambda *_: None)


@pytest.fixture
def far(monkeypatch: pytest.MonkeyPatch) -> None:
    """A network lies between workers and servers, as far as they know."""
    monkeypatch.setenv(TRANSPORT, "tcp")
    monkeypatch.setattr(Connection, "is_remote", lambda *_: True)
