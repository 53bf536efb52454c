"""Benchmarks start, and one that runs finds the weights of torch in one process. Nothing here asserts a time."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.support.processes import Processes

FOLDER = Path(__file__).parent.parent / "benchmarks"
QUESTIONS = (
    "bandwidth",
    "compression",
    "ctr",
    "dense_sync",
    "durability",
    "embeddings",
    "end_to_end",
    "key_scaling",
    "large_tables",
    "latency",
    "merging",
    "recovery",
    "scaling",
    "sparse",
    "straggler",
    "trainer_step",
    "transport",
    "watching",
)
HELP = """
import contextlib, io, runpy, sys
sys.path.insert(0, ".")
for name in sys.argv[1:]:
    sys.argv, said = [name, "--help"], io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.suppress(SystemExit):
        runpy.run_path(name + ".py", run_name="__main__")
    print(said.getvalue().split()[1])
"""

GRID = """
import sys
sys.path.insert(0, ".")
import suite
try:
    print(suite.grid(sys.argv[1]))
except SystemExit as error:
    print(type(error.code).__name__)
"""
COUNT = """
import sys
sys.path.insert(0, ".")
import calls
def called(): len("a function of C")
before = int(calls.calls_so_far())
for _ in range(7):
    called()
print(int(calls.calls_so_far()) - before - 1)  # but for the last call of calls_so_far
"""
TINY = """
import sys
sys.path.insert(0, ".")
import dense_sync, limits, suite
suite.measure_limits = lambda: limits.Limits(*[1e9] * 7)  # of the machine: seconds of copying
sys.exit(dense_sync.main())
"""


def run(script: str, *arguments: str) -> str:
    """Run a script among the benchmarks to its end; what it printed."""
    with Processes() as processes:
        process = processes.start([sys.executable, "-c", script, *arguments], cwd=FOLDER)
        code, errors = process.end()
        assert code == 0, errors
        assert process.popen.stdout is not None
        return process.popen.stdout.read().decode()


def test_every_question_has_a_help() -> None:
    assert run(HELP, *QUESTIONS).split() == [f"{name}.py" for name in QUESTIONS]


@pytest.mark.parametrize(
    ("text", "found"),
    [("2x2,1x1", "[(2, 2), (1, 1)]"), ("10x3", "[(10, 3)]"), ("2x0", "str"), ("2", "str"), ("2x2,", "str")],
)
def test_a_grid_is_numbers_of_workers_and_servers(text: str, found: str) -> None:
    assert run(GRID, text).strip() == found


def test_calls_of_python_functions_are_counted() -> None:
    assert run(COUNT).strip() == "7"


@pytest.mark.full
def test_a_tiny_run_checks_weights_names_a_missing_peer_and_writes_three_files(tmp_path: Path) -> None:
    systems = "kvtrainer,mpich,bare shared memory"
    options = ["--out", str(tmp_path / "found"), "--systems", systems, "--starts", "step"]
    options += ["--mpi-env", str(tmp_path / "none"), "--servers", "1", "--mib", "0.25", "--rounds", "2"]
    run(TINY, *options, "--repetitions", "1")
    document = json.loads((tmp_path / "found.json").read_text())
    samples = document["samples"]
    assert [one["system"] for one in samples] == ["kvtrainer", "bare shared memory"]
    for sample in samples:
        assert len(sample["rounds"]) == 2
        assert sample["usage"]["peak_rss"] > sample["usage"]["pss"] > 0
    table = (tmp_path / "found.md").read_text()
    assert "| mpich | missing: there is no" in table
    assert re.search(r"^- took: \d+ s, ", table, re.MULTILINE)
    assert f"- took: {document['machine']['took']}\n" in table
    assert ElementTree.parse(tmp_path / "found.svg").getroot().tag.endswith("svg")
