"""Benchmarks start, and one that runs finds the weights of torch in one process. Nothing here asserts a time."""

from __future__ import annotations

import json
import re
import subprocess
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
    "regress",
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
for text in sys.argv[1:]:
    try:
        print(suite.grid(text))
    except SystemExit as error:
        print(type(error.code).__name__)  # a text is printed, and the status is 1
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
REGRESS = """
import sys
from pathlib import Path
sys.path.insert(0, ".")
import regress
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


def test_a_grid_is_numbers_of_workers_and_servers() -> None:
    found = run(GRID, "2x2,1x1", "10x3", "2x0", "2", "2x2,").splitlines()
    assert found == ["[(2, 2), (1, 1)]", "[(10, 3)]", "str", "str", "str"]


def test_calls_of_python_functions_are_counted() -> None:
    assert run(COUNT).strip() == "7"


def test_a_case_is_slower_if_two_of_three_runs_take_at_least_5_percent_longer() -> None:
    slower = [[0.95, 0.95, 1.5], [0.5, 1.5, 0.5], [0.9, 0.9, 0.9]]  # 1 / 0.95 is 1.053
    others = [[0.5, 1.0, 1.0], [0.96, 0.96, 0.96], [1.1, 1.1, 1.1]]
    decide = f"{REGRESS}print(*[regress.is_slower(ratios) for ratios in {slower + others}])"
    assert run(decide).split() == ["True"] * 3 + ["False"] * 3


def test_ratios_and_medians_of_both_revisions_are_in_the_table() -> None:
    found = {
        "one": [{"former": 0.001, "today": 0.002}] * 3,
        "two": [
            {"former": 0.003, "today": 0.002},
            {"former": 0.001, "today": 0.002},
            {"former": 1, "today": 1},
        ],
    }
    *_, one, two = run(f"{REGRESS}print(regress.table({found}))").splitlines()
    assert one == "| one | 1.00 (1.00 to 1.00) | 2.00 (2.00 to 2.00) | 0.500 | 0.500 | 0.500 | slower |"
    assert two == "| two | 3.00 (1.00 to 1000) | 2.00 (2.00 to 1000) | 1.500 | 0.500 | 1.000 |  |"


FIND = """
for wanted in sys.argv[2:]:
    try:
        print(regress.find_revision(Path(sys.argv[1]), wanted))
    except SystemExit as error:
        print(type(error.code).__name__)  # a text is printed, and the status is 1
"""


def git(repository: Path, *arguments: str) -> None:
    author = ["-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", "-C", str(repository), *author, *arguments], check=True, capture_output=True)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository with one commit, which has the file `committed`."""
    made = tmp_path / "repository"
    made.mkdir()
    git(made, "init")
    (made / "committed").write_text("former")
    (made / ".gitignore").write_text("ignored")
    git(made, "add", ".")
    git(made, "commit", "-m", "first")
    return made


def test_what_is_compared_with_is_the_last_tag_unless_a_revision_is_named(repository: Path) -> None:
    find = f"{REGRESS}{FIND}"
    assert run(find, str(repository), "", "HEAD", "v1", "--all").split() == ["str", "HEAD", "str", "str"]
    git(repository, "tag", "v1")
    git(repository, "commit", "--allow-empty", "-m", "second")
    assert run(find, str(repository), "", "HEAD", "v1").split() == ["v1", "HEAD", "v1"]


def test_the_wheel_of_today_has_what_is_not_committed_and_the_former_one_what_was(
    repository: Path, tmp_path: Path
) -> None:
    (repository / "committed").write_text("today")
    for name in ("folder", "ignored"):
        (repository / name).mkdir()
        (repository / name / "new").touch()
    copy = f"{REGRESS}regress.copy_sources(*map(Path, sys.argv[1:3]), *sys.argv[3:])"
    run(copy, str(repository), str(tmp_path / "today"))
    run(copy, str(repository), str(tmp_path / "former"), "HEAD")
    assert (tmp_path / "today" / "committed").read_text() == "today"
    assert (tmp_path / "former" / "committed").read_text() == "former"
    names = {
        one: {str(path.relative_to(tmp_path / one)) for path in (tmp_path / one).rglob("*") if path.is_file()}
        for one in ("today", "former")
    }
    assert names["today"] == {".gitignore", "committed", "folder/new"}
    assert names["former"] == {".gitignore", "committed"}


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
