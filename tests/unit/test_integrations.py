"""Ties to libraries that need not be there, and what integrations of frameworks share where none is needed."""

from __future__ import annotations

import configparser
import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from kvtrainer import hooks, integrations
from kvtrainer.errors import ConfigurationError
from kvtrainer.integrations import workers
from kvtrainer.integrations.workers import Workers
from kvtrainer.kvstore import KVStoreBase, create
from kvtrainer.registry import Registry
from kvtrainer.strategy import Agreement
from tests.extra_uses import USES

ROOT = Path(__file__).parents[2]
FRAMEWORKS = ("lightning", "accelerate", "transformers", "skorch")


def extras() -> configparser.SectionProxy:
    read = configparser.ConfigParser(interpolation=None)
    read.read(ROOT / "setup.cfg")
    return read["options.extras_require"]


def test_each_extra_has_a_use_that_is_tested_with_it_alone() -> None:
    assert set(USES) == set(extras())


@pytest.mark.parametrize(
    ("library", "found", "told"),
    [
        *((name, None, rf"pip install 'kvtrainer\[{name}\]'") for name in ("mmengine", "ray", *FRAMEWORKS)),
        ("mmcv.runner", None, "'mmcv<2'"),
    ],
)
def test_without_a_library_its_integration_says_what_to_install(
    library: str, found: Any, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"kvtrainer.integrations.{library.partition('.')[0]}"
    monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, library, found)
    with pytest.raises(ImportError, match=told):
        importlib.import_module(name)


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


@pytest.mark.parametrize("found", ["2.4.9", "1.9"])
def test_a_framework_that_is_older_than_the_tests_lowest_is_refused_with_the_command_for_another(
    found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(integrations, "version", lambda package: found)
    with pytest.raises(ConfigurationError) as caught, integrations.guard_import("lightning"):
        raise AssertionError("it must not be imported")
    for told in (found, "2.5 or newer", "--upgrade 'kvtrainer[lightning]'"):
        assert told in str(caught.value)


@pytest.mark.parametrize("found", ["2.5.0", "2.6.6", "2.6.0.post1"])
def test_a_framework_within_the_tested_range_is_taken(found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(integrations, "version", lambda package: found)
    with integrations.guard_import("lightning"):
        pass


@pytest.mark.parametrize("found", ["2.7.0", "3.0.0rc1"])
def test_a_newer_framework_is_taken_with_a_warning(found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(integrations, "version", lambda package: found)
    with (
        pytest.warns(UserWarning, match=rf"2\.5 to 2\.6, .*{found}.*'lightning==2\.6\.\*'"),
        integrations.guard_import("lightning"),
    ):
        pass


@pytest.mark.parametrize("framework", [*FRAMEWORKS, "ray"])
def test_the_extra_of_a_framework_takes_every_version_from_the_tests_lowest_on(framework: str) -> None:
    lowest = ".".join(map(str, integrations.TESTED[framework].lowest))
    wanted = extras()[framework].replace("[train]", "").split()
    assert f"{framework}>={lowest}" in wanted
    assert not [line for line in wanted if "<" in line]


def test_the_environment_of_the_lowest_versions_has_the_lowest_of_each_framework() -> None:
    listed = (Path(__file__).parents[1] / "frameworks" / "lowest.txt").read_text()
    pinned = dict(line.split("==") for line in listed.splitlines() if line and not line.startswith("#"))
    assert pinned.keys() == set(FRAMEWORKS)
    for framework, version in pinned.items():
        assert tuple(map(int, version.split(".")[:2])) == integrations.TESTED[framework].lowest


def test_a_store_that_keeps_to_one_of_several_processes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVSTORE_RANK", "1")
    monkeypatch.setenv("KVSTORE_NUM_WORKERS", "3")
    with pytest.raises(ConfigurationError, match=r"3 processes.*'local'"):
        Workers("local")


def test_workers_meet_at_an_address_towards_their_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    class Asked(Exception):
        """The way to an address is looked for."""

    class First(Agreement):
        size = 2

    class Store(KVStoreBase):
        type, rank, num_workers = "dist_sync", 0, 2
        servers = ("tcp://10.1.2.3:5555",)
        broadcast = pushpull = lambda *_: None

    def look(address: str) -> str:
        raise Asked(address)

    monkeypatch.setattr(workers, "host_towards", look)
    monkeypatch.setenv(
        "KVSTORE_SERVERS", ""
    )  # they were given by an argument, or by the scheduler of the job
    with pytest.raises(Asked, match=r"^tcp://10\.1\.2\.3:5555$"):
        workers.make_workers_ranks(First(), Store(), 2)


def test_a_process_alone_is_one_worker() -> None:
    alone = Workers(create("local"))
    assert (alone.rank, alone.size) == (alone.local_rank, alone.local_size) == (0, 1)


@pytest.mark.parametrize("is_named", [True, False])
def test_workers_know_their_place_on_their_host(is_named: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    class Second(Agreement):
        """Ranks 0 and 2 are on another host, 1 and 3 here."""

        rank, size = 3, 4

        def all_gather(self, mine: bytes) -> list[bytes]:
            return [b"another", mine, b"another", mine]

    def fail() -> str:
        raise OSError

    if not is_named:
        monkeypatch.setattr(workers, "name_host", fail)
    assert workers.place_worker_on_host(Second()) == (1, 2)
