"""The example of word vectors learns on 2 workers and 2 servers what a plain PyTorch loop learns."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.examples import example, run_with_servers


def test_two_workers_and_two_servers_learn_what_a_plain_loop_learns(tmp_path: Path) -> None:
    out, embeddings = tmp_path / "found.json", example("embeddings")
    run_with_servers("embeddings", tmp_path, "--out", str(out))
    found = json.loads(out.read_text())
    _, losses = embeddings.plain(*embeddings.load())
    assert found["loss"] == pytest.approx(losses, abs=1e-4)
    assert 0 < found["touched"] < embeddings.ROWS / 50
