"""Ties to libraries that need not be there."""

from __future__ import annotations

import importlib
import sys

import pytest


def test_without_mmengine_its_integration_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mmengine", None)
    with pytest.raises(ImportError, match=r"pip install 'kvtrainer\[mmengine\]'"):
        importlib.import_module("kvtrainer.integrations.mmengine")
