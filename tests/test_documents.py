"""The pages of the site: what they tell the reader to do is done here, from top to end, and all of them are found."""

from __future__ import annotations

import ast
import functools
import re
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import kvtrainer
from kvstore_server import cli
from kvstore_server import errors as server_errors
from kvstore_server.engine.memory import size_of_table
from kvstore_server.engine.rounds import SYNCHRONOUS
from kvstore_server.plan import SIZES, TensorSpec, make_plan
from kvstore_server.server import Server
from kvtrainer import errors
from kvtrainer.client.connection import Connection
from kvtrainer.jobs import kvlaunch
from kvtrainer.optimizer import create
from kvtrainer.watch import top
from kvtrainer.watch.top import format_metrics
from tests.support.limits import LIMIT
from tests.support.pages import Block, blocks_of, run_page
from tests.support.public_examples import names_used, without_example
from tests.support.variables import named_in_sources, page
from tests.test_readme import WITH_CODE
from tests.unit.watch.test_job import job, seen, server, worker

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
SITE = (ROOT / "mkdocs.yml").read_text()
PAGES = sorted(str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md"))
PARSERS = {
    "kvlaunch": kvlaunch._make_parser,
    "kvstore-server": partial(cli.build_server_parser, {}),
    "kvtop": top._make_top_parser,
}
ELSEWHERE = {"frameworks.md": "tests/frameworks/test_documents.py"}
"""Pages whose code needs packages of its own, and the test that runs it."""


def _code(name: str) -> list[Block]:
    return [block for block in blocks_of(DOCS / name) if block.language in ("python", "sh")]


FOLLOWED = [
    (name, "torchrun" if name == "start.md" else "")
    for name in PAGES
    if f"docs/{name}" not in WITH_CODE and name not in ELSEWHERE and _code(name)
]
"""Pages, and the commands that are left to the full run: those of torch alone, whose processes take long to start."""


LONG = "recovery.md", "fault_injection.md", "debugging.md"
"""Pages of jobs whose processes die or wait, which takes seconds: what they show is tested in many other ways."""


@pytest.mark.parametrize(
    ("name", "left"),
    [
        *[
            pytest.param(name, left, marks=pytest.mark.full if name in LONG else ())
            for name, left in FOLLOWED
        ],
        pytest.param("start.md", "", marks=pytest.mark.full),
    ],
)
def test_a_page_can_be_followed_from_its_top_to_its_end(
    name: str, left: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_page(DOCS / name, tmp_path, left) == len(_code(name))


def test_all_pages_are_in_the_navigation() -> None:
    listed = re.findall(r": ([\w/]+\.md)$", SITE, re.MULTILINE)
    assert sorted(listed) == PAGES


def test_the_tests_of_pages_that_run_elsewhere_exist() -> None:
    assert [name for name, place in ELSEWHERE.items() if not (ROOT / place).exists()] == []


@pytest.mark.parametrize("command", PARSERS)
def test_the_flags_of_commands_that_pages_show_exist(command: str) -> None:
    # What follows the name of a subcommand is its own.
    known = {option for action in PARSERS[command]()._actions for option in action.option_strings}
    text = "\n".join((DOCS / name).read_text() for name in [*PAGES, "../README.md"])
    shown = re.findall(rf"(?<![\w-]){command}((?: +[\w./:@=,'\[\]-]+)+)", text)
    own = [
        re.split(r" python| -- | keygen", one)[0] for one in shown
    ]  # what comes after that is the script's
    flags = {flag.partition("=")[0] for one in own for flag in re.findall(r"(?<= )--?[a-zA-Z][\w=-]*", one)}
    assert flags
    assert flags - known == set()


def test_the_page_of_variables_and_flags_is_current() -> None:
    made = page()
    assert (DOCS / "variables.md").read_text() == made, (
        "run: python -m tests.support.variables > docs/variables.md"
    )


def test_every_variable_that_the_sources_name_is_on_that_page() -> None:
    on_page = set(re.findall(r"`(\w+)(?:=1)?`", (DOCS / "variables.md").read_text()))
    named = named_in_sources()
    assert len(named) > 50
    assert named - on_page == set()


def _sources() -> str:
    """All of the product, with strings that go over several lines put together, and quotes of one kind."""
    files = [
        path for package in ("kvtrainer", "kvstore_server") for path in sorted((ROOT / package).rglob("*.py"))
    ]
    return re.sub(r'"\s*\n\s*f?"', "", "\n".join(path.read_text() for path in files))


def _trees() -> list[ast.AST]:
    return [
        ast.parse(one.read_text())
        for top in ("kvtrainer", "kvstore_server")
        for one in (ROOT / top).rglob("*.py")
    ]


_NAMED = frozenset(["name", "id", "attr", "arg", "value"])


def _names_in(tree: ast.AST) -> set[str]:
    """What is defined, read, given as a keyword or said as a word in a piece of source."""
    found = set[str]()
    for node in ast.walk(tree):
        for field in _NAMED.intersection(node._fields):
            value = getattr(node, field)
            if not isinstance(value, (ast.AST, list)):
                found.add(str(value))
    return found


@functools.cache
def _names_in_sources() -> tuple[set[str], set[str]]:
    """All names in the product, and those within classes with their classes."""
    trees = _trees()
    classes = [one for tree in trees for one in ast.walk(tree) if isinstance(one, ast.ClassDef)]
    members = {f"{one.name}.{member}" for one in classes for member in _names_in(one)}
    return set[str]().union(*map(_names_in, trees)), members


INSIDE = ["architecture.md", *(name for name in PAGES if name.startswith("protocol/"))]
"""Pages that name parts of the code."""


@pytest.mark.parametrize("name", INSIDE)
def test_pages_about_the_inside_name_only_what_there_is(name: str) -> None:
    names, members = _names_in_sources()
    quoted = set(re.findall("`([^`]+)`", (DOCS / name).read_text()))
    files = {one for one in quoted if re.fullmatch(r"[\w/]+(\.py|/)", one)}
    words = {one.split("=")[0] for one in quoted if re.fullmatch(r"\w+(=\w+)?", one)}
    dotted = {one for one in quoted if re.fullmatch(r"[A-Z]\w+\.\w+", one)}
    assert dotted | files | words
    assert {one for one in files if not [*ROOT.glob(f"kv*/**/{one}"), *ROOT.glob(one)]} == set()
    assert dotted - members == set()
    assert words - names - {"userfaultfd", "create_graph"} == set()


def test_the_path_of_a_gradient_is_the_one_that_it_takes_in_at_most_fifteen_lines() -> None:
    way = (
        (DOCS / "architecture.md")
        .read_text()
        .split("## The path of a gradient\n")[1]
        .split("\n## ")[0]
        .strip()
    )
    named = set(re.findall(r"`(?:(\w+)\.)?(\w+)`", way)) - {("", "Contribute"), ("", "RoundTracker")}
    called = set[tuple[str, str]]()

    def note(frame: FrameType, event: str, _: object) -> None:
        owner = type(frame.f_locals.get("self")).__name__
        called.update([(owner, frame.f_code.co_name), ("", frame.f_code.co_name)] if event == "call" else ())

    weight = torch.nn.Parameter(torch.zeros(100))
    with kvtrainer.Trainer([weight], "sgd", kvstore="local", update_on_kvstore=True) as trainer:
        for round_ in range(3):
            weight.grad = torch.ones(100)
            sys.setprofile(note if round_ == 2 else None)
            trainer.step(1)
            sys.setprofile(None)
    sockets = {("Connection", "send"): Connection.send, ("Server", "_answer"): Server._answer}
    sockets[("Server", "_send_all")] = Server._send_all
    assert len(way.splitlines()) <= 15
    assert named - called == set(sockets)


def test_every_public_error_and_warning_has_its_place_in_troubleshooting() -> None:
    text = (DOCS / "troubleshooting.md").read_text()
    placed = set(re.findall(r"^(?:### |\| `)(\w+)", text, re.MULTILINE))
    classes = {
        name for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, Exception)
    }
    classes |= {name for name, kind in vars(server_errors).items() if isinstance(kind, type)}
    assert {name for name in classes if re.search("Error$|Warning$|State$", name)} == placed


@pytest.mark.parametrize(
    ("name", "least"), [("troubleshooting.md", 50), ("operations.md", 20), ("debugging.md", 1)]
)
def test_the_messages_that_a_page_quotes_are_those_of_the_product(name: str, least: int) -> None:
    text = (DOCS / name).read_text()
    quoted = re.findall(r"^ *(?:> |\| `\w+` \| )`(.*?)`(?:$| \|)", text, re.MULTILINE)
    sources = re.sub("%(d|s|r|g|[.]0f)", "…", _sources())
    parts = [part.strip(" ;:().?,") for quote in quoted for part in quote.split("…")]
    assert len(quoted) >= least
    assert [part for part in parts if len(part) > 3 and part not in sources] == []


def test_no_line_of_code_is_wider_than_the_site_shows_on_a_screen_of_1280_pixels() -> None:
    wide = [
        (name, line)
        for name in PAGES
        for block in blocks_of(DOCS / name)
        for line in block.code.splitlines()
        if len(line) > 115
    ]
    assert wide == []


def test_every_metric_is_explained() -> None:
    explained = set(re.findall(r"^\| `(kvstore_\w+)` \|", (DOCS / "operations.md").read_text(), re.MULTILINE))
    facts = server(job([worker(0)]))
    told = format_metrics(seen([facts], [facts])).decode()
    there = {line.split()[2] for line in told.splitlines() if "# TYPE" in line}
    assert len(there) > 10
    assert there == explained


def test_every_public_name_has_its_place_in_the_api_reference() -> None:
    """Modules too, or what is in them; members stand where their class does, and another name where the first does."""
    listed = (ROOT / "tests" / "data" / "api.txt").read_text()
    listed = re.sub(r"^[\w.]+ = .*\n", "", listed, flags=re.MULTILINE)
    classes = set(re.findall(r"^([\w.]+) class\(", listed, re.MULTILINE))
    names = set(re.findall(r"^(?:\w+\.)+[a-zA-Z]\w*", listed, re.MULTILINE))
    pages = "\n".join(one.read_text() for one in (DOCS / "api").glob("*.md"))
    entries = set(re.findall(r"^::: ([\w.]+)", pages, re.MULTILINE))
    modules = {entry.rpartition(".")[0] for entry in entries}

    def has_place(name: str) -> bool:
        parent, _, own = name.rpartition(".")
        return parent in classes | entries or not {name, f"kvtrainer.{own}"}.isdisjoint(entries | modules)

    assert len(names) > 300
    assert sorted(name for name in names if not has_place(name)) == []


def test_what_pages_import_of_integrations_has_its_place_in_the_api_reference() -> None:
    pages = [DOCS / "frameworks.md", DOCS / "deployment.md"]
    lines = "\n".join(block.code for page in pages for block in blocks_of(page))
    imports = re.findall(r"^from kvtrainer\.integrations\.\w+ import (.+)$", lines, re.MULTILINE)
    names = {name for listed in imports for name in listed.split(", ")}
    reference = (DOCS / "api" / "integrations.md").read_text()
    shown = set(re.findall(r"^::: kvtrainer\.integrations\.\w+\.(\w+)$", reference, re.MULTILINE))
    assert len(names) >= 6
    assert names - shown == set()


def test_every_public_name_is_in_an_example_that_is_run() -> None:
    listed = (ROOT / "tests" / "data" / "api.txt").read_text()
    pages = [DOCS / name for name in PAGES if name not in ELSEWHERE]
    assert without_example(listed, [*pages, ROOT / "README.md"]) == []


@pytest.mark.parametrize(
    "code", ["other.name()", "f(name=1)", "import name", "from name import f", "def name(): ..."]
)
def test_an_example_uses_a_name_that_it_reads_gives_imports_or_defines(code: str) -> None:
    assert "name" in names_used(code)


@pytest.mark.parametrize("code", ["f('name')", "f()  # name", "renamed = 1"])
def test_an_example_does_not_use_what_it_only_speaks_of(code: str) -> None:
    assert "name" not in names_used(code)


def test_a_member_is_in_an_example_only_where_its_class_is(tmp_path: Path) -> None:
    listed = "m.A class()\nm.A.step(self)\nm.B class()\nm.B.step(self)\nm.B.__init__()"
    for name, code in (("a.md", "A().step()"), ("b.md", "B()")):
        (tmp_path / name).write_text(f"```python\n{code}\n```\n")
    assert without_example(listed, sorted(tmp_path.iterdir())) == ["m.B.step"]


def test_a_block_that_shows_an_error_fails_where_none_is_raised(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "```python\nfor one in 'x3':\n    try:\n        int(one)\n    except ValueError:\n        pass\n```\n"
    )
    with pytest.raises(AssertionError, match="line 2 of this block raised nothing"):
        run_page(page, tmp_path)


def test_the_pictures_are_what_their_script_draws(tmp_path: Path) -> None:
    script = shutil.copy(DOCS / "pictures" / "draw.py", tmp_path)
    subprocess.run([sys.executable, script], check=True, timeout=LIMIT)
    drawn = {one.name: one.read_text() for one in tmp_path.glob("*.svg")}
    assert drawn == {one.name: one.read_text() for one in (DOCS / "pictures").glob("*.svg")}


@pytest.mark.parametrize(
    ("name", "options", "dtype", "state"),
    [
        ("sgd", {}, "float32", 0),
        ("sgd", {"momentum": 0.9}, "float32", 1),
        ("adagrad", {}, "float32", 1),
        ("rmsprop", {}, "float32", 1),
        ("adam", {}, "float32", 2),
        ("adamw", {}, "float32", 2),
        ("sgd", {"momentum": 0.9, "multi_precision": True}, "bfloat16", 2 + 2),
        ("adam", {"multi_precision": True}, "float16", 2 + 4),
    ],
)
def test_the_formula_of_sizing_is_what_servers_promise(
    name: str, options: dict[str, Any], dtype: str, state: float
) -> None:
    names: dict[str, Any] = {}
    exec(next(block.code for block in _code("sizing.md")), names)
    plan = make_plan([TensorSpec(f"w{at}", (1024, 1024), dtype) for at in range(16)], 2, False)
    promised = size_of_table(plan, 0, 2, SYNCHRONOUS, create(name, learning_rate=0.1, **options))
    weights = 16 * plan.specs[0].numel * SIZES[dtype]
    assert promised == pytest.approx(names["server_bytes"](weights, state, servers=2), rel=0.02)
