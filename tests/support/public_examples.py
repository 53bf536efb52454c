"""Which public names the examples of the documents use, as far as their syntax tells.

A block of Python uses a name that it reads, calls, imports, defines or gives as a keyword. What stands in a string or
in a comment is not used: no public name is only ever a string.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from tests.support.pages import blocks_of


def without_example(listed: str, pages: Iterable[Path]) -> list[str]:
    """Return the public names, as `tests/data/api.txt` lists them, that no block of these pages uses.

    A member of a class counts on a page alone whose blocks use the class as well, so that it can be the one of that
    name. A constructor is called by the name of its class, so it has no example of its own; nor has what only raises,
    as methods that were removed do.
    """
    used = [frozenset().union(*map(names_used, python_of(page))) for page in pages]
    classes = set(re.findall(r"^([\w.]+) class\(", listed, re.MULTILINE))
    missing = []
    for full, rest in re.findall(r"^([\w.]+)(.*)$", listed, re.MULTILINE):
        parent, _, name = full.rpartition(".")
        wanted = {name, parent.rpartition(".")[2]} if parent in classes else {name}
        only_raises = rest.endswith("-> 'NoReturn'")
        if name != "__init__" and not only_raises and not any(wanted <= names for names in used):
            missing.append(full)
    return missing


def python_of(page: Path) -> list[str]:
    """Return the blocks of Python of a page, in order."""
    return [block.code for block in blocks_of(page) if block.language == "python"]


def names_used(code: str) -> frozenset[str]:
    """Return the names that a block uses."""
    return frozenset(_names(ast.parse(code)))


def _names(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.keyword) and node.arg is not None:
            yield node.arg
        elif isinstance(node, ast.ClassDef | ast.FunctionDef):
            yield node.name
        elif isinstance(node, ast.Import | ast.ImportFrom):
            of = getattr(node, "module", None) or ""
            yield from ".".join([of, *(one.name for one in node.names)]).split(".")
