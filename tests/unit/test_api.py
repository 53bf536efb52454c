"""The public names and signatures, which nobody changes by accident, and what `import kvtrainer` brings with it."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

import kvstore_server
import kvtrainer
from tests.support import api
from tests.support.processes import ROOT

BY_NAME = {
    ("kvtrainer/__init__.py", "kvtrainer."),
}
"""Modules of ours that are imported by name: what a user reads of the package."""

MAKERS = (
    "arange as_tensor asarray empty empty_strided eye full linspace ones rand randint randn randperm scalar_tensor "
    "sparse_coo_tensor tensor zeros"
)
"""The functions of torch that make tensors on the default device."""


@pytest.fixture(scope="module")
def nodes() -> Sequence[tuple[Path, ast.AST]]:
    """The syntax of all modules of the packages, with their files."""
    packages = [Path(one.__file__).parent for one in (kvtrainer, kvstore_server)]
    paths = [path for package in packages for path in package.rglob("*.py")]
    return [(path, node) for path in paths for node in ast.walk(ast.parse(path.read_text()))]


def test_public_names_and_signatures_are_those_of_the_list() -> None:
    listed = (ROOT / "tests" / "data" / "api.txt").read_text().splitlines()
    found = api.lines()
    gone, new = sorted(set(listed) - set(found)), sorted(set(found) - set(listed))
    assert (gone, new) == ([], []), "if it is wanted: python -m tests.support.api > tests/data/api.txt"


def test_dir_of_the_package_lists_what_is_loaded_on_first_use() -> None:
    script = "import kvtrainer; print(*dir(kvtrainer))"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, check=True)
    assert set(kvtrainer.__all__) | {"__name__"} <= set(run.stdout.split())


def test_the_package_is_imported_without_torch_and_numpy() -> None:
    script = (
        "import json, sys, kvtrainer; print(json.dumps([name.partition('.')[0] for name in sys.modules]))"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, check=True)
    assert not {"torch", "numpy", "zmq", "msgpack", "safetensors"} & set(json.loads(run.stdout))


def test_no_other_import_of_ours_is_hidden_from_the_linter_of_imports(
    nodes: Sequence[tuple[Path, ast.AST]],
) -> None:
    found = set()
    for path, node in nodes:
        is_call = isinstance(node, ast.Call) and ast.unparse(node.func).endswith(
            ("import_module", "__import__")
        )
        texts = [one.value for one in ast.walk(node) if isinstance(one, ast.Constant)] if is_call else []
        ours = [text for text in texts if str(text).startswith(("kvtrainer", "kvstore_server"))]
        found.update((str(path.relative_to(ROOT)), text) for text in ours)
    assert found == BY_NAME


def test_no_module_imports_a_private_name_of_another(
    nodes: Sequence[tuple[Path, ast.AST]],
) -> None:
    found = []
    for path, node in nodes:
        is_ours = isinstance(node, ast.ImportFrom) and str(node.module).startswith(
            ("kvtrainer", "kvstore_server")
        )
        names = [one.name for one in node.names] if is_ours else []
        found += [(path.name, name) for name in names if name.startswith("_") and name != "__version__"]
    assert found == []


def test_a_tensor_that_is_made_from_nothing_names_its_device(
    nodes: Sequence[tuple[Path, ast.AST]],
) -> None:
    """Otherwise it goes wherever the user's `torch.set_default_device` says."""
    unnamed = []
    for path, node in nodes:
        match node:
            case ast.Call(ast.Attribute(ast.Name("torch"), name), _, options) if name in MAKERS.split():
                if not {"device", None} & {one.arg for one in options}:
                    unnamed.append(f"{path}:{node.lineno}: torch.{name}")
    assert unnamed == []


def test_every_argument_that_a_docstring_explains_exists(
    nodes: Sequence[tuple[Path, ast.AST]],
) -> None:
    classes = {node.name: node for _, node in nodes if isinstance(node, ast.ClassDef)}
    unknown, count = [], 0
    for path, node in nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            explained, known = _explained(ast.get_docstring(node) or ""), _parameters(node, classes)
            count += len(explained)
            unknown += [f"{path}:{node.lineno}: {name}" for name in explained if not {name, "**"} & known]
    assert (unknown, count > 500) == ([], True)


def _explained(docstring: str) -> list[str]:
    """The names under "Args:" of a docstring; of `*args` and `**kwargs` any may be meant."""
    section = re.search(r"^Args:\n((?: .*\n|\n)*)", docstring + "\n", re.MULTILINE)
    entries = re.findall(r"^ {4}(\w+(?:, \w+)*):", section[1] if section else "", re.MULTILINE)
    return [name for entry in entries for name in entry.split(", ")]


def _parameters(node: ast.AST, classes: Mapping[str, ast.ClassDef]) -> set[str]:
    """The parameters of a function, or those and the fields of a class and its bases; "**" if it takes any."""
    match node:
        case ast.FunctionDef(args=args) | ast.AsyncFunctionDef(args=args):
            named = {one.arg for one in (*args.posonlyargs, *args.args, *args.kwonlyargs)}
            return named | ({"**"} if args.kwarg is not None else set())
        case ast.ClassDef(_, bases, _, body):
            named = {
                one.target.id
                for one in body
                if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name)
            }
            makers = [
                one
                for one in body
                if isinstance(one, ast.FunctionDef) and one.name in ("__init__", "__new__")
            ]
            ours = [classes[one.id] for one in bases if isinstance(one, ast.Name) and one.id in classes]
            return named.union(*[_parameters(one, classes) for one in (*makers, *ours)])
    return set()
