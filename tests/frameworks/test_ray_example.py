"""Scripts for Ray: the example loses an actor, goes on, and ends as a plain loop; and that of the documents."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.frameworks.jobs import ROOT, need
from tests.support.examples import example
from tests.support.limits import LIMIT
from tests.support.pages import blocks_of, link_checkout

need("ray", "test-ray")
pytest.importorskip("sklearn", reason="the data are not installed: pip install scikit-learn")
EPOCHS = 4


def run(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """Run a script that starts Ray by itself."""
    wait = {"RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": str(LIMIT)}
    env = {**os.environ, **wait, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        command, capture_output=True, text=True, timeout=3 * LIMIT, env=env, cwd=folder, check=False
    )


def test_digits_are_read_as_by_a_plain_loop_although_an_actor_is_killed(tmp_path: Path) -> None:
    script, out = ROOT / "examples/ray_digits.py", tmp_path / "found.json"
    options = ["--epochs", str(EPOCHS), "--kill-after", "1", "--out", str(out)]
    done = run(tmp_path, sys.executable, str(script), *options)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    found = json.loads(out.read_text())
    _, expected = example("digits_plain").train(EPOCHS)
    assert found["accuracy"] == pytest.approx(expected, abs=2 / 360)
    assert found["starts"] == [0, 1]


def test_the_commands_of_the_page_of_examples_go_on_as_the_page_says(tmp_path: Path) -> None:
    """`make ray`, in this environment, runs the other command of the page, as it says."""
    link_checkout(tmp_path)
    (tmp_path / ".venv-ray").symlink_to(Path(sys.executable).parent.parent)
    done = run(tmp_path, *["make", "-o", ".venv-ray/.ready", "ray"])
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    command = "python examples/ray_digits.py --kill-after 12"
    assert f".venv-ray/bin/{command}" in done.stdout.splitlines()
    pattern = r"^begun after epoch 0 and after epoch (\d+); held-out accuracy ([\d.]+)%$"
    [(again, accuracy)] = re.findall(pattern, done.stdout, re.MULTILINE)
    assert int(again) == 12
    [said] = re.findall(r"Both\s+reach\s+([\d.]+)\s+%", (ROOT / "docs/examples.md").read_text())
    assert float(accuracy) == pytest.approx(float(said), abs=1.0)


def test_the_script_of_the_page_runs_as_it_stands(tmp_path: Path) -> None:
    """But for the CPUs: Ray is told that it has as many as the page says."""
    blocks = blocks_of(ROOT / "docs/deployment.md")
    [code] = [one.code for one in blocks if one.file == "on_ray.py"]
    start = "import ray; ray.init(num_cpus=4, include_dashboard=False)\n"
    (tmp_path / "on_ray.py").write_text(start + code)
    done = run(tmp_path, sys.executable, "on_ray.py")
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert float(done.stdout.splitlines()[-1]) > 0
