"""The Python code of the documents runs as it stands, and the README's set-up commands exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
WITH_CODE = ("README.md", "docs/migrating_from_mxnet.md", "docs/training_systems.md")
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


def test_the_readme_is_no_longer_than_170_lines() -> None:
    assert len(README.splitlines()) <= 170


def test_the_two_setup_commands_are_make_targets() -> None:
    commands = re.findall(r"^make (\w+)", README, re.MULTILINE)
    makefile = (ROOT / "Makefile").read_text()
    assert commands == ["demo", "test"]
    assert all(f"\n{command}:" in makefile for command in commands)
