"""The Python code of the documents runs as it stands, the README's set-up commands exist, and what a package says."""

from __future__ import annotations

import re
import subprocess
import sys
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest

from kvstore_server import __version__
from tests.support.jobs import run_program
from tests.support.limits import LIMIT

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
WITH_CODE = ("README.md", "docs/migrating_from_mxnet.md", "docs/training_systems.md", "docs/watching.md")
BLOCKS = [
    (name, code)
    for name in WITH_CODE
    for code in re.findall(r"```python\n(.*?)```", (ROOT / name).read_text(), re.DOTALL)
]


@pytest.mark.parametrize(
    ("name", "code"), BLOCKS, ids=[f"{name}: {code.strip().splitlines()[-1][:40]}" for name, code in BLOCKS]
)
def test_every_python_block_runs(
    name: str, code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    checked = compile(code, name, "exec")
    names: dict[str, object] = {}
    exec(checked, names)
    assert "kvtrainer" in names


def test_the_readmes_python_blocks_are_also_workers_of_a_job(
    tmp_path: Path,
) -> None:
    """With "dist_sync" in the place of stores of one process, as the README says."""
    blocks = [re.sub('"(local|device)"', '"dist_sync"', code) for name, code in BLOCKS if name == "README.md"]
    assert len(blocks) >= 2
    assert all('"dist_sync"' in code for code in blocks)
    folder = f"import os; os.chdir({str(tmp_path)!r})"
    lines = [f"exec(compile({code!r}, 'block {at}', 'exec'), {{}})" for at, code in enumerate(blocks)]
    output = run_program(["-c", "\n".join([folder, *lines, "print('done')"])], tmp_path, 2, 1)
    assert output.splitlines().count("done") == 2


@pytest.fixture(scope="module")
def metadata(tmp_path_factory: pytest.TempPathFactory) -> Message:
    """What a package that is built now says of itself."""
    folder = tmp_path_factory.mktemp("metadata")
    command = [sys.executable, "setup.py", "-q", "egg_info", "--egg-base", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT, check=False)
    assert done.returncode == 0, done.stderr
    return Parser().parsestr((folder / "kvtrainer.egg-info" / "PKG-INFO").read_text(encoding="utf-8"))


def test_a_package_says_who_made_it_under_which_licence_and_for_which_pythons(metadata: Message) -> None:
    assert (metadata["Name"], metadata["Version"]) == ("kvtrainer", __version__)
    assert metadata["Author"] == "The kvtrainer authors"
    assert "Apache-2.0" in (metadata["License"], metadata["License-Expression"])
    assert "parameter server" in metadata["Keywords"]
    named = [one.rpartition(":: ")[2] for one in metadata.get_all("Classifier", [])]
    assert {"3.10", "3.11", "3.12", "3.13", "Linux"} <= set(named)
    assert metadata["Requires-Python"] == ">=3.10"
    assert metadata.get_all("License-File") == ["LICENSE"]
    text = (ROOT / "LICENSE").read_text()
    assert "Apache License\n                           Version 2.0, January 2004" in text
    assert "END OF TERMS AND CONDITIONS" in text


def test_the_long_description_is_the_readme_without_links_that_lead_nowhere(metadata: Message) -> None:
    text = metadata.get_payload()
    assert isinstance(text, str)
    assert metadata["Description-Content-Type"] == "text/markdown"
    blocks = re.findall(r"```.*?```", text, re.DOTALL)
    assert blocks == re.findall(r"```.*?```", README, re.DOTALL)
    prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    assert re.findall(r"\]\((?!https://)[^)]*\)", prose) == []
    targets = re.findall(r"\]\(([^)]*)\)", re.sub(r"```.*?```", "", README, flags=re.DOTALL))
    assert targets
    assert all(f"`{target}`" in prose for target in targets)


def test_the_readmes_links_lead_to_files() -> None:
    assert all((ROOT / target).exists() for target in re.findall(r"\]\(([\w/.]+\.\w+)\)", README))


def test_the_tests_that_documents_name_exist() -> None:
    named = [
        (place, name)
        for page in (ROOT / "docs").glob("*.md")
        for place, name in re.findall(r"([\w/]+\.py) `(test_\w+)`", page.read_text())
    ]
    assert len(named) > 20
    assert [one for one in named if f"def {one[1]}(" not in (ROOT / "tests" / one[0]).read_text()] == []


def test_the_readme_is_no_longer_than_150_lines() -> None:
    assert len(README.splitlines()) <= 150


def test_the_two_setup_commands_are_make_targets() -> None:
    commands = re.findall(r"^make (\w+)", README, re.MULTILINE)
    makefile = (ROOT / "Makefile").read_text()
    assert commands == ["demo", "test"]
    assert all(f"\n{command}:" in makefile for command in commands)
