"""Benchmarks start, and one that runs finds the weights of torch in one process. Nothing here asserts a time."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

from tests.support.limits import LIMIT

FOLDER = Path(__file__).parent.parent / "benchmarks"
QUESTIONS = (
    "bandwidth",
    "compression",
    "ctr",
    "dense_sync",
    "end_to_end",
    "key_scaling",
    "latency",
    "scaling",
    "sparse",
    "straggler",
    "trainer_step",
    "transport",
    "watching",
)
HELP = """
import contextlib, io, runpy, sys
for name in sys.argv[1:]:
    sys.argv, said = [name, "--help"], io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.suppress(SystemExit):
        runpy.run_path(name + ".py", run_name="__main__")
    print(said.getvalue().split()[1])
"""


def test_every_question_has_a_help() -> None:
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, '.')\n{HELP}", *QUESTIONS]
    done = subprocess.run(command, cwd=FOLDER, capture_output=True, text=True, timeout=LIMIT)
    assert done.stdout.split() == [f"{name}.py" for name in QUESTIONS], done.stderr


def test_a_tiny_run_checks_weights_names_a_missing_peer_and_writes_three_files(tmp_path: Path) -> None:
    command = [sys.executable, str(FOLDER / "dense_sync.py"), "--out", str(tmp_path / "found")]
    command += ["--systems", "kvtrainer,mpich", "--mpi-env", str(tmp_path / "none"), "--starts", "step"]
    command += ["--servers", "1", "--mib", "0.25", "--rounds", "2", "--repetitions", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 0, done.stderr
    [sample] = json.loads((tmp_path / "found.json").read_text())["samples"]
    assert (sample["system"], len(sample["rounds"])) == ("kvtrainer", 2)
    assert sample["usage"]["peak_rss"] > sample["usage"]["pss"] > 0
    assert "| mpich | missing: there is no" in (tmp_path / "found.md").read_text()
    assert ElementTree.parse(tmp_path / "found.svg").getroot().tag.endswith("svg")
