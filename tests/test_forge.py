"""Files for a forge and for contributors stay in step with the Makefile, setup.cfg and the sources."""

from __future__ import annotations

import configparser
import datetime
import re
from pathlib import Path

import pytest

from kvstore_server.cli import build_server_parser

ROOT = Path(__file__).parent.parent
WORKFLOW = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
PRE_COMMIT = (ROOT / ".pre-commit-config.yaml").read_text()
CI = (ROOT / ".ci" / "run").read_text()
MAKEFILE = (ROOT / "Makefile").read_text()
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text()
CHANGELOG = (ROOT / "CHANGELOG.md").read_text()
KINDS = ("Added", "Changed", "Deprecated", "Removed", "Fixed", "Security")
"""The headings of Keep a Changelog 1.1.0, in its order."""


def targets() -> set[str]:
    """The targets of the Makefile."""
    return set(re.findall(r"^([a-z][\w-]*)(?: [a-z\w -]+)?:", MAKEFILE, re.MULTILINE))


def metadata() -> configparser.ConfigParser:
    parser = configparser.ConfigParser(interpolation=None)
    parser.read(ROOT / "setup.cfg")
    return parser


def test_the_workflow_runs_what_must_hold_before_a_change_lands() -> None:
    assert re.findall(r"^ +- run: (.+)$", WORKFLOW, re.MULTILINE) == [".ci/run"]
    lines = re.findall(r"^make(?: -j 2 --output-sync=target)? ([a-z -]+)$", CI, re.MULTILINE)
    steps = " ".join(lines).split()
    assert {"lint", "types", "imports", "docs", "test"} <= set(steps)
    assert set(steps) - targets() == set()


def test_the_workflow_takes_each_python_that_the_package_names() -> None:
    [matrix] = re.findall(r"python: \[(.+)\]", WORKFLOW)
    pythons = re.findall(r'"([\d.]+)"', matrix)
    classifiers = metadata()["metadata"]["classifiers"]
    assert pythons == re.findall(r":: Python :: (3\.\d+)", classifiers)
    assert metadata()["options"]["python_requires"] == f">={pythons[0]}"


def test_the_workflow_caches_by_the_files_that_the_makefile_installs_from() -> None:
    [listed] = re.findall(r"cache-dependency-path: \|\n((?: +[\w./]+\n)+)", WORKFLOW)
    assert {"setup.cfg", "constraints.txt"} <= set(listed.split())
    assert all((ROOT / name).exists() for name in listed.split())
    assert re.search(r"^torch==", (ROOT / "constraints.txt").read_text(), re.MULTILINE)


@pytest.mark.parametrize("text", [WORKFLOW, PRE_COMMIT], ids=["workflow", "pre-commit"])
def test_the_files_for_tools_are_yaml(text: str) -> None:
    yaml = pytest.importorskip("yaml", reason="comes with the environment that `make setup` makes")
    assert isinstance(yaml.safe_load(text), dict)


def test_a_commit_is_checked_by_the_tools_of_the_projects_own_environment() -> None:
    entries = re.findall(r"entry: make (\w+)", PRE_COMMIT)
    assert entries == ["lint", "types", "imports"]
    assert set(entries) <= targets()
    assert "rev:" not in PRE_COMMIT  # a hook from elsewhere would have a version of its own


def test_contributing_begins_with_five_commands_that_exist() -> None:
    rows = [line for line in CONTRIBUTING.splitlines()[:10] if line.startswith("| ")][2:]
    commands = [re.findall(r"`([^`]+)` \|$", row)[0] for row in rows]
    assert len(commands) == 5
    made = {name for command in commands if command.startswith("make ") for name in command.split()[1:]}
    assert made == {"setup", "test", "lint", "types", "imports", "docs"}
    assert made <= targets()
    [test] = [command for command in commands if "pytest" in command]
    name, word = re.findall(r"(tests/\S+) -k (\w+)", test)[0]
    assert re.search(rf"def test_\w*{word}", (ROOT / name).read_text())


@pytest.mark.parametrize("name", ["CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md"])
def test_what_pages_for_contributors_name_exists(name: str) -> None:
    text = (ROOT / name).read_text()
    links = {link for link in re.findall(r"\]\(([\w/.]+)", text) if not link.startswith("http")}
    paths = {path for path in re.findall(r"`([\w./]+/[\w./]+)`", text) if not path.startswith(".venv")}
    made = {target for command in re.findall(r"`make ([\w -]+)`", text) for target in command.split()}
    flags = set(re.findall(r"`(--[a-z-]+)`", text)) - {"--pdb", "--http", "--dashboard"}
    known = {option for action in build_server_parser({})._actions for option in action.option_strings}
    assert {one for one in links if not (ROOT / one).exists()} == set()
    assert {one for one in paths if not ([*ROOT.glob(one)] or [*ROOT.glob(f"kv*/{one}")])} == set()
    assert made - targets() == set()
    assert flags - known - {"--json"} == set()


@pytest.mark.parametrize("name", ["CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md"])
def test_no_line_for_contributors_is_longer_than_120_characters(name: str) -> None:
    assert [line for line in (ROOT / name).read_text().splitlines() if len(line) > 120] == []


def test_the_change_log_has_the_form_of_keep_a_changelog() -> None:
    assert CHANGELOG.startswith(
        "# Changelog\n\nAll notable changes to this project will be documented in this file.\n\n"
        "The format is based on [Keep a Changelog](https://keepachangelog.com/en/1.1.0/),\n"
        "and this project adheres to [Semantic Versioning](https://semver.org/spec/v2.0.0.html).\n\n"
        "## [Unreleased]\n"
    )
    versions = re.split(r"^## ", CHANGELOG, flags=re.MULTILINE)[1:]
    dates = []
    for version in versions:
        title, _, rest = version.partition("\n")
        dated = re.fullmatch(r"\[\d+\.\d+\.\d+\] - (\d{4}-\d\d-\d\d)", title)
        assert title == "[Unreleased]" or dated
        dates += [datetime.date.fromisoformat(dated[1])] if dated else []
        kinds = re.findall(r"^### (.+)$", rest, re.MULTILINE)
        assert kinds == [kind for kind in KINDS if kind in kinds]
    assert dates == sorted(dates, reverse=True)
