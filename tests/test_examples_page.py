"""The page of the examples names each of them, shows figures that exist, and says what the committed results say."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "examples.md").read_text()
TEXT = " ".join(PAGE.split())
"""The page in one line."""

MAKEFILE = (ROOT / "Makefile").read_text()
SCRIPTS = sorted((ROOT / "examples").glob("*.py"))


def found(name: str) -> dict[str, Any]:
    """What a run of an example has found."""
    return json.loads((ROOT / "examples" / "results" / f"{name}.json").read_text())  # type: ignore[no-any-return]


@pytest.mark.parametrize("script", SCRIPTS, ids=[script.stem for script in SCRIPTS])
def test_a_script_has_at_most_120_lines(script: Path) -> None:
    assert len(script.read_text().splitlines()) <= 120


def test_every_example_is_on_the_page() -> None:
    programs = [script.name for script in SCRIPTS if "kvtrainer.Trainer" in script.read_text()]
    assert len(programs) >= 6
    assert [name for name in programs if f"examples/{name}" not in PAGE] == []


def test_every_example_takes_the_store_that_it_is_given() -> None:
    given = {script.name: script.read_text() for script in SCRIPTS if "common.parser(" in script.read_text()}
    assert len(given) >= 6
    assert [name for name, text in given.items() if "options.kvstore" not in text] == []


def test_the_figures_and_targets_of_the_page_exist() -> None:
    figures = re.findall(r"\((figures/\w+\.svg)\)", PAGE)
    assert [name for name in figures if not (ROOT / "docs" / name).exists()] == []
    assert sorted(figures) == sorted(f"figures/{path.name}" for path in (ROOT / "docs/figures").glob("*.svg"))
    targets = re.findall(r"^make (\w+)$", PAGE, re.MULTILINE)
    assert [name for name in targets if f"\n{name}: " not in MAKEFILE] == []


def test_each_make_target_of_an_example_is_on_the_page() -> None:
    targets = re.search(r"^examples: (.*)$", MAKEFILE, re.MULTILINE)
    assert targets is not None
    assert [name for name in targets[1].split() if f"\nmake {name}\n" not in PAGE] == []


def test_the_page_says_what_was_found() -> None:
    digits, characters, gan = found("digits"), found("characters"), found("gan")["seen"]
    assert digits["accuracy"] == pytest.approx(digits["plain_pytorch"], abs=0.01)
    assert found("ray")["accuracy"] == pytest.approx(digits["plain_pytorch"], abs=0.01)
    assert found("ray")["starts"] == [0, 12]
    assert "After twelve epochs," in TEXT
    assert f"Both reach {digits['accuracy'][-1]:.1%}".replace("%", " %") in TEXT
    assert f"accuracy reaches {found('cnn')['accuracy'][-1]:.1%}".replace("%", " %") in TEXT
    assert f"costs {characters['held_out']:.2f} bits" in TEXT
    assert f"costs {characters['by_counts']:.2f}." in TEXT
    assert f"{gan[-1][1]:.0%}".replace("%", " %") in TEXT
    assert f"falls from {gan[0][2]:.0f} to {gan[-1][2]:.0f}." in TEXT


def test_the_page_says_what_word_vectors_cost() -> None:
    words = found("embeddings")
    assert words["loss"] == pytest.approx(words["plain_pytorch"], abs=1e-4)
    assert f"touches {words['touched']:.0f} of them" in TEXT
    assert f"the loss is {words['loss'][-1]:.2f};" in TEXT
    assert f"costs {words['by_frequency']:.2f}." in TEXT


def test_the_page_says_how_many_bytes_rows_save() -> None:
    dense, sparse = found("flights_dense"), found("flights_sparse")
    times = (dense["received"] + dense["sent"]) // (sparse["received"] + sparse["sent"])
    assert f"sends {times} times fewer bytes" in TEXT
    assert f"AUC of {sparse['auc']:.3f} compared with {dense['auc']:.3f}" in TEXT


def test_the_page_says_what_tables_of_a_stream_have_and_how_well_they_predict() -> None:
    stream = found("stream")
    tables, [_, rows] = stream["tables"], stream["rows"][-1]
    said = re.search(r"## The same flights as a stream(.*?)## ", PAGE, re.DOTALL)
    assert said is not None
    cells = [line.split("|")[2:-1] for line in said[1].splitlines() if re.match(r"\| .*\d \|$", line)]
    sizes = [*rows, *[int(name.partition("_")[2]) for name in tables if name.startswith("fixed")]]
    expected = [
        [f"{size:,}", f"{one['nbytes'] / 1e6:.1f}", f"{one['auc']:.3f}", f"{one['later']:.3f}"]
        for size, one in zip(sizes, tables.values(), strict=True)
    ]
    assert [[cell.strip() for cell in row] for row in cells] == expected
    keep, expire, admit, fixed = (round(one["later"], 3) for one in list(tables.values())[:4])
    assert expire == keep
    assert f"the AUC in the second half is lower by {expire - admit:.3f}." in TEXT
    assert f"as many bytes is worse than that by {admit - fixed:.3f}:" in TEXT
    assert f"{tables['keep']['nbytes'] / rows[0]:.0f} bytes for a row without rules, 64 for one" in TEXT
    assert round(rows[1] / rows[0], 1) == 0.1


def test_the_page_says_how_many_steps_uneven_workers_made() -> None:
    steps = [
        found(f"uneven_{slow}_dist_{kvstore}.0")["steps"]
        for slow in ("one", "turns")
        for kvstore in ("sync", "ssp", "async")
    ]
    said = re.search(r"## Uneven workers(.*?)So bounded", TEXT)
    assert said is not None
    numbers = re.findall(r"makes (\d+) steps", said[1])
    assert [int(number) for number in numbers] == steps
