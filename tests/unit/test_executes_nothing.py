"""Nothing in the product executes what comes from a file or a peer: a walk over the syntax trees of all its files."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = sorted(
    path.relative_to(ROOT) for top in ("kvtrainer", "kvstore_server") for path in (ROOT / top).rglob("*.py")
)
PICKLES = {"pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"}
MAY_PICKLE = {Path("kvtrainer/jobs/cluster.py")}
"""Functions travel from a program to its own children, through memory that no other process can open."""
BUILTINS = {"eval", "exec", "compile", "__import__"}
METHODS = {"recv_pyobj", "send_pyobj", "unsafe_load", "full_load"}
WATCHED = {*BUILTINS, *METHODS, "load"}


def dangers(path: Path, tree: ast.AST) -> Iterator[str]:
    """What a file does that could execute code from a file or a message."""
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [one.name for one in node.names]
        elif isinstance(node, ast.ImportFrom) and [one.name for one in node.names] != ["UnpicklingError"]:
            names = [node.module or ""]
        for name in names:
            if name.partition(".")[0] in PICKLES and path not in MAY_PICKLE:
                yield f"imports {name}"
        if not isinstance(node, ast.Call):
            continue
        last = getattr(node.func, "attr", getattr(node.func, "id", ""))
        if last not in WATCHED and not {"allow_pickle", "shell"} & {one.arg for one in node.keywords}:
            continue
        called = ast.unparse(node.func)
        given = {one.arg: ast.unparse(one.value) for one in node.keywords}
        if called in BUILTINS or called.rpartition(".")[2] in METHODS:
            yield f"calls {called}"
        elif called == "torch.load" and given.get("weights_only") != "True":
            yield "calls torch.load without weights_only=True"
        elif called == "yaml.load" and given.get("Loader") not in ("yaml.SafeLoader", "yaml.CSafeLoader"):
            yield "calls yaml.load without a safe loader"
        elif given.get("allow_pickle", "False") != "False":
            yield f"calls {called} with allow_pickle"
        elif given.get("shell", "False") != "False":
            yield f"calls {called} with a shell"


def test_no_file_executes_anything_from_outside() -> None:
    found = {path: list(dangers(path, ast.parse((ROOT / path).read_text()))) for path in FILES}
    assert {path: some for path, some in found.items() if some} == {}


@pytest.mark.parametrize(
    "code",
    ["import pickle", "from dill import loads", "eval(x)", "torch.load(f)", "torch.load(f, weights_only=False)",
     "yaml.load(f)", "numpy.load(f, allow_pickle=True)", "s.recv_pyobj()", "subprocess.run(x, shell=True)"],
)  # fmt: skip
def test_what_would_execute_something_is_found(code: str) -> None:
    assert list(dangers(Path("kvtrainer/a.py"), ast.parse(code)))


def test_what_executes_nothing_is_not() -> None:
    code = (
        "torch.load(f, weights_only=True)\nre.compile(x)\nmodel.eval()\nyaml.load(f, Loader=yaml.SafeLoader)"
    )
    assert not list(dangers(Path("kvtrainer/a.py"), ast.parse(code)))
