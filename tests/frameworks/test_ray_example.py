"""The example of Ray loses an actor, goes on, and ends with the weights of a plain loop."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.frameworks.jobs import ROOT, need
from tests.support.examples import example
from tests.support.limits import LIMIT

need("ray", "test-ray")
pytest.importorskip("sklearn", reason="the data are not installed: pip install scikit-learn")
EPOCHS = 4


def test_digits_are_read_as_by_a_plain_loop_although_an_actor_is_killed(tmp_path: Path) -> None:
    script, out = ROOT / "examples/ray_digits.py", tmp_path / "found.json"
    command = [sys.executable, str(script), "--epochs", str(EPOCHS), "--kill-after", "2", "--out", str(out)]
    wait = {"RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": str(LIMIT)}
    env = {**os.environ, **wait, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=3 * LIMIT, env=env, cwd=tmp_path, check=False
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    found = json.loads(out.read_text())
    _, expected = example("digits_plain").train(EPOCHS)
    assert found["accuracy"] == pytest.approx(expected, abs=2 / 360)
    first, again = found["starts"]
    assert first == 0
    assert 1 <= again <= 2
