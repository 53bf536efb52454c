"""Ties to libraries that need not be there."""

from __future__ import annotations

import configparser
import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from kvtrainer import hooks
from kvtrainer.registry import Registry
from tests.extra_uses import USES


def test_each_extra_has_a_use_that_is_tested_with_it_alone() -> None:
    read = configparser.ConfigParser(interpolation=None)
    read.read(Path(__file__).parents[2] / "setup.cfg")
    assert set(USES) == set(read["options.extras_require"])


def test_without_mmengine_its_integration_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mmengine", None)
    with pytest.raises(ImportError, match=r"pip install 'kvtrainer\[mmengine\]'"):
        importlib.import_module("kvtrainer.integrations.mmengine")


def test_without_mmcv_its_integration_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mmcv.runner", None)
    monkeypatch.delitem(sys.modules, "kvtrainer.integrations.mmcv", raising=False)
    with pytest.raises(ImportError, match="'mmcv<2'"):
        importlib.import_module("kvtrainer.integrations.mmcv")


def test_hooks_are_such_as_mmcvs_runner_registers(monkeypatch: pytest.MonkeyPatch) -> None:
    class MmcvHook:
        """What the runner asks a hook to be; it sets the priority, and refuses hooks that have one."""

    mmcv, registry = ModuleType("mmcv.runner"), Registry("hook")
    mmcv.HOOKS, mmcv.Hook = registry, MmcvHook  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "mmcv", ModuleType("mmcv"))
    monkeypatch.setitem(sys.modules, "mmcv.runner", mmcv)
    monkeypatch.delitem(sys.modules, "kvtrainer.integrations.mmcv", raising=False)
    try:
        importlib.import_module("kvtrainer.integrations.mmcv")
    finally:
        sys.modules.pop("kvtrainer.integrations.mmcv", None)
    hook: Any = registry.build({"type": "KVFp16OptimizerHook", "grad_clip": {"max_norm": 1.0}})
    assert isinstance(hook, MmcvHook)
    assert isinstance(hook, hooks.Fp16OptimizerHook)
    assert not hasattr(hook, "priority")
    own: Any = registry.get("KVOptimizerHook")
    registry.register_module(module=type("OwnHook", (own,), {"clip_grads": lambda self, params: None}))
    assert isinstance(derived := registry.build({"type": "OwnHook"}), MmcvHook)
    assert not hasattr(derived, "priority")
    hook.priority = 40
    assert hook.priority == 40


def test_without_ray_or_with_an_old_one_its_integration_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    old = ModuleType("ray")
    old.__version__ = "2.9.3"  # type: ignore[attr-defined]
    for found, told in ((None, "None in sys.modules"), (old, "this is Ray 2.9.3")):
        monkeypatch.setitem(sys.modules, "ray", found)
        with pytest.raises(
            ImportError, match=rf"needs Ray Train 2\.60 .*{told}.* pip install 'kvtrainer\[ray\]'"
        ):
            importlib.import_module("kvtrainer.integrations.ray")
