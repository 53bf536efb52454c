"""The table of docs/migrating_from_mxnet.md that sets the numbers of MXNet 1.9.1 beside those of 2.x."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

_PAGE = Path(__file__).parents[2] / "docs" / "migrating_from_mxnet.md"
_ROW = re.compile(
    r"^\| `(\w+)` \| (?:`([^`]*)`|defaults) \| (-?\d+) \| (-?[\d.]+) \| (-?[\d.]+) \|$", re.MULTILINE
)


class Row(NamedTuple):
    """Where a weight of 1 ends after two updates with one gradient, in both releases."""

    name: str
    options: dict[str, Any]
    gradient: float
    of_1: float
    of_2: float


def _rows() -> Iterator[Row]:
    for name, options, gradient, of_1, of_2 in _ROW.findall(_PAGE.read_text()):
        call = ast.parse(f"f({options})", mode="eval").body
        assert isinstance(call, ast.Call)
        given = {str(word.arg): ast.literal_eval(word.value) for word in call.keywords}
        yield Row(name, given, float(gradient), float(of_1), float(of_2))


ROWS = list(_rows())
