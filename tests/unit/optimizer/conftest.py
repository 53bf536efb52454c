"""What a test of optimizers registers is forgotten after it."""

from __future__ import annotations

import pytest

from kvstore_server.optimizer import registry
from kvtrainer.registry import OPTIMIZERS


@pytest.fixture(autouse=True)
def _own_registries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_registry", dict(registry._registry))
    monkeypatch.setattr(registry, "_declared", set(registry._declared))
    monkeypatch.setattr(OPTIMIZERS, "_entries", dict(OPTIMIZERS._entries))
