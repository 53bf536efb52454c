"""The README's Python code runs as it stands, and its set-up commands exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


@pytest.mark.parametrize("code", BLOCKS, ids=lambda code: code.strip().splitlines()[-1][:40])
def test_every_python_block_of_the_readme_runs(code: str) -> None:
    checked = compile(code, "README.md", "exec")
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
