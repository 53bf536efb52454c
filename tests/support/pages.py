"""The blocks of code in a page, and how to run them as its reader would."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from tests.support.limits import LIMIT

ROOT = Path(__file__).parents[2]
_FENCE = re.compile(r"^```(\w*)(?: title=\"([\w.]+)\")?\n(.*?)^```$", re.MULTILINE | re.DOTALL)

_ENDS = {"ddp.py": "import os, sys\nsys.stdout.flush()\nos._exit(0)\n"}
"""What is added to files that a page shows. A thread of gloo may still hold what torch keeps of the last backward
pass, a Python object among it, and abort a process that ends in the ordinary way."""


@dataclass(frozen=True)
class Block:
    """One fenced block: its language, the name of the file that it shows, if any, and what stands in it."""

    language: str
    file: str | None
    code: str


def blocks_of(page: Path) -> list[Block]:
    """All fenced blocks of a page, in order."""
    return [Block(language, file or None, code) for language, file, code in _FENCE.findall(page.read_text())]


def run_page(page: Path, folder: Path, left: str = "") -> int:
    """Do in `folder`, which is the working directory, what the page says, from its top to its end.

    Blocks of Python share one namespace; those with a title are files. One that tries something, to show an error, must
    meet one. Blocks of `sh` are run, and the `text` after one must be among the lines that it printed. Other blocks
    have tests of their own, `tests/test_console.py` names them.

    Args:
        left: Commands that begin so are not run.

    Returns how many blocks of Python and of `sh` it has done.
    """
    done = 0
    names: dict[str, object] = {"__name__": "__main__"}
    printed: list[str] | None = None
    for block in blocks_of(page):
        done += block.language in ("python", "sh")
        if block.language == "python" and block.file is not None:
            (folder / block.file).write_text(block.code + _ENDS.get(block.file, ""))
        elif block.language == "python":
            exec(compile(_insisting(block.code), f"a block of {page.name}", "exec"), names)
        elif block.language == "sh" and not (left and block.code.startswith(left)):
            printed = shell(block.code, folder).splitlines()
            continue
        elif block.language == "text" and printed is not None:
            missing = [line for line in block.code.splitlines() if line not in printed]
            assert not missing, f"{missing} not among {printed}"
        printed = None
    return done


def _insisting(code: str) -> ast.Module:
    """Parse a block; what follows a `try`, unless it is in a function, becomes a failure to raise an error."""
    tree = ast.parse(code)
    left: list[ast.AST] = [tree]
    while left:
        node = left.pop()
        if isinstance(node, ast.Try) and node.handlers and not node.orelse:
            node.orelse = ast.parse(
                f"raise AssertionError('line {node.lineno} of this block raised nothing')"
            ).body
        if not isinstance(node, ast.FunctionDef | ast.Lambda):
            left += ast.iter_child_nodes(node)
    return tree


def commands_of(block: Block) -> list[str]:
    """The commands of a block of a shell, one a line, without comments."""
    lines = (re.sub(r"(^|\s+)#.*", "", line).rstrip() for line in block.code.splitlines())
    return [line for line in lines if line]


def shell(code: str, folder: Path, limit: float = LIMIT, **variables: str) -> str:
    """Run commands of a reader who has this environment activated; gives what they wrote to standard output.

    Args:
        variables: More variables of the environment.
    """
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", code],
        cwd=folder,
        env={**os.environ, "PATH": path, **variables},
        capture_output=True,
        text=True,
        timeout=limit,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def link_checkout(folder: Path) -> None:
    """Let a folder look like the project to `make`, pip and examples, which may leave files there."""
    for entry in ROOT.iterdir():
        if not (entry.name.startswith(".") or entry.name in ("build", "dist") or entry.suffix == ".egg-info"):
            (folder / entry.name).symlink_to(entry)
