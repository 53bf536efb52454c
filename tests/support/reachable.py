"""How much hangs on an object: what must not grow with the number of messages is found by counting all of it."""

from __future__ import annotations

import gc
import types
from collections import Counter, deque
from pathlib import Path
from typing import Any

_OF_CODE = (type, types.ModuleType, types.BuiltinFunctionType, types.CodeType, types.FrameType)
_BY_CHANCE = (int, float, str, bytes)
"""Whether two places share one of these is chance; the containers count what they hold."""


def reachable(*roots: object) -> Counter[str]:
    """How many objects of each type are reachable from the roots, and how many entries the containers have.

    Without what belongs to code rather than to data.
    """
    found: Counter[str] = Counter()
    seen: set[int] = set()
    left: list[Any] = list(roots)
    while left:
        one = left.pop()
        if id(one) in seen or isinstance(one, _OF_CODE):
            continue
        seen.add(id(one))
        if not isinstance(one, _BY_CHANCE):
            found[type(one).__name__] += 1
        if isinstance(one, dict | list | tuple | set | frozenset | deque):
            found[f"entries of {type(one).__name__}"] += len(one)
        # Of a function what it encloses, but not the names of its module.
        left += one.__closure__ or () if isinstance(one, types.FunctionType) else gc.get_referents(one)
    return found


def resident_bytes(pid: int) -> int:
    """The memory that a process occupies now."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith("VmRSS:")).split()[1])
