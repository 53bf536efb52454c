"""The notebooks run from top to end and check their own results; what is committed has no outputs.

Running them needs packages that other tests do not: `make notebooks`.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.limits import LIMIT

NOTEBOOKS = sorted((Path(__file__).parents[2] / "examples").glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=[path.stem for path in NOTEBOOKS])
def test_a_notebook_runs_from_its_top_to_its_end(path: Path, tmp_path: Path) -> None:
    nbformat = pytest.importorskip("nbformat", reason="needs packages of its own: make notebooks")
    nbclient = pytest.importorskip("nbclient", reason="needs packages of its own: make notebooks")
    book = nbformat.read(path, as_version=4)
    resources = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(book, timeout=LIMIT, kernel_name="python3", resources=resources).execute()
    outputs = [output for cell in book.cells for output in cell.get("outputs", [])]
    said = "".join(output.get("text", "") for output in outputs)
    assert "accuracy" in said or "bytes" in said
    assert not [output for output in outputs if output.get("name") == "stderr"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=[path.stem for path in NOTEBOOKS])
def test_a_notebook_is_kept_without_outputs(path: Path) -> None:
    cells = json.loads(path.read_text())["cells"]
    assert [cell for cell in cells if cell.get("outputs") or cell.get("execution_count")] == []
