"""The pages of the site: what they tell the reader to do is done here, from top to end, and all of them are found."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.pages import Block, blocks_of, run_page
from tests.test_readme import WITH_CODE

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
SITE = (ROOT / "mkdocs.yml").read_text()
PAGES = sorted(str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md"))
ELSEWHERE: dict[str, str] = {}
"""Pages whose code needs packages of its own, and the test that runs it."""


def _code(name: str) -> list[Block]:
    return [block for block in blocks_of(DOCS / name) if block.language in ("python", "sh")]


@pytest.mark.parametrize(
    "name",
    [name for name in PAGES if f"docs/{name}" not in WITH_CODE and name not in ELSEWHERE and _code(name)],
)
def test_a_page_can_be_followed_from_its_top_to_its_end(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run_page(DOCS / name, tmp_path)


def test_all_pages_are_in_the_navigation() -> None:
    listed = re.findall(r": ([\w/]+\.md)$", SITE, re.MULTILINE)
    assert sorted(listed) == PAGES


def test_the_tests_of_pages_that_run_elsewhere_exist() -> None:
    assert [name for name, place in ELSEWHERE.items() if not (ROOT / place).exists()] == []
