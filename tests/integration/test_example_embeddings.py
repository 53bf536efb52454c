"""The example of word vectors learns on 2 workers and 2 servers what a plain PyTorch loop learns."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.examples import example, run_with_servers


def test_two_workers_and_two_servers_learn_what_a_plain_loop_learns(tmp_path: Path) -> None:
    """The example trains the plain loop beside it, and fails where weights differ by more than rounding."""
    out = tmp_path / "found.json"
    said = run_with_servers("embeddings", tmp_path, "--out", str(out), EVERY=100)
    found = json.loads(out.read_text())
    assert "all checks passed" in said
    assert found["loss"] == pytest.approx(found["plain_pytorch"], abs=1e-4)
    assert 0 < found["touched"] < example("embeddings").ROWS / 50
