"""What integrations of frameworks share, where no framework is needed."""

from __future__ import annotations

import ast
import configparser
import importlib
import sys
from pathlib import Path

import pytest

from kvtrainer.errors import ConfigurationError
from kvtrainer.integrations import workers
from kvtrainer.integrations.workers import Workers, check_version
from kvtrainer.kvstore import create

ROOT = Path(__file__).parents[2]
FRAMEWORKS = ("lightning", "accelerate", "transformers", "skorch")


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_without_a_framework_its_integration_says_what_to_install(
    framework: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"kvtrainer.integrations.{framework}"
    monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, framework, None)
    with pytest.raises(ImportError, match=rf"pip install 'kvtrainer\[{framework}\]'"):
        importlib.import_module(name)


@pytest.mark.parametrize("found", ["2.4.9", "1.9", "2.7.0", "3.0.0rc1"])
def test_a_framework_of_another_version_is_named_with_the_versions_that_work(
    found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "version", lambda package: found)
    with pytest.raises(ConfigurationError) as caught:
        check_version("lightning", (2, 5), (2, 7))
    for told in (found, "2.5", "2.7", "kvtrainer[lightning]"):
        assert told in str(caught.value)


@pytest.mark.parametrize("found", ["2.5.0", "2.6.6", "2.6.0.post1"])
def test_a_framework_of_a_version_within_the_range_is_taken(
    found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "version", lambda package: found)
    check_version("lightning", (2, 5), (2, 7))


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_the_extra_of_a_framework_installs_the_versions_that_its_integration_takes(framework: str) -> None:
    source = (ROOT / "kvtrainer/integrations" / f"{framework}.py").read_text()
    line = next(one for one in source.splitlines() if one.startswith("AT_LEAST, BELOW ="))
    low, high = ast.literal_eval(line.partition("=")[2].strip())
    read = configparser.ConfigParser(interpolation=None)
    read.read(ROOT / "setup.cfg")
    wanted = f"{framework}>={low[0]}.{low[1]},<{high[0]}.{high[1]}"
    assert wanted in read["options.extras_require"][framework].split()


def test_a_store_that_keeps_to_one_of_several_processes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVSTORE_RANK", "1")
    monkeypatch.setenv("KVSTORE_NUM_WORKERS", "3")
    with pytest.raises(ConfigurationError, match=r"3 processes.*'local'"):
        Workers("local")


def test_a_process_alone_is_one_worker() -> None:
    alone = Workers(create("local"))
    assert (alone.rank, alone.size) == (0, 1)
