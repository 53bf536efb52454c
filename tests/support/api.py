"""The public names of the package and their signatures, a line each.

    python -m tests.support.api > tests/data/api.txt

writes them anew, after a change that is wanted and told in CHANGELOG.md.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from enum import Enum
from types import ModuleType
from typing import Any

import kvtrainer

_OURS = ("kvtrainer", "kvstore_server")


def lines() -> list[str]:
    """Describe every public module, function and class, and the members of classes that are not torch's, in order."""
    names: dict[str, Any] = dict(_names("kvtrainer", kvtrainer))
    first: dict[Any, str] = {}
    """Class → the first of its public names."""
    for full, value in names.items():
        if inspect.isclass(value):
            first.setdefault(value, full)
    found = []
    for full, value in names.items():
        if inspect.ismodule(value):
            found.append(f"{full} module" if value.__name__ == full else f"{full} = {value.__name__}")
        elif not inspect.isclass(value):
            found.append(
                f"{full}{_signature(value)}" if callable(value) else f"{full}: {type(value).__name__}"
            )
        elif first[value] != full:
            found.append(f"{full} = {first[value]}")
        else:
            found += _of_class(full, value, set(first))
    return sorted(found)


def _names(path: str, module: ModuleType) -> Iterator[tuple[str, Any]]:
    for name in getattr(module, "__all__", None) or [name for name in vars(module) if _is_own(module, name)]:
        value, full = getattr(module, name), f"{path}.{name}"
        yield full, value
        if inspect.ismodule(value) and value.__name__ == full:
            yield from _names(full, value)


def _is_own(module: ModuleType, name: str) -> bool:
    """Tell whether a public name of a module without __all__ is its own, or an error that it passes on."""
    value = getattr(module, name)
    home = getattr(value, "__module__", None) or ""
    is_error = module.__name__.endswith(".errors") and inspect.isclass(value) and home.startswith(_OURS)
    is_below = hasattr(module, "__path__") and home.startswith(f"{module.__name__}.")
    return not name.startswith("_") and (home == module.__name__ or is_error or is_below)


def _of_class(path: str, kind: type, public: set[Any]) -> Iterator[str]:
    """Describe a class with the members that it does not have from another public one."""
    yield f"{path} class({', '.join(base.__name__ for base in kind.__bases__ if base is not object)})"
    makers = [base for base in kind.__mro__ if {"__init__", "__new__"} & vars(base).keys()]
    # An enumeration has the same members on each Python, but another constructor.
    if makers and makers[0].__module__.startswith(_OURS) and not issubclass(kind, Enum):
        yield f"{path}.__init__{_signature(kind)}"
    told = set()
    for base in kind.__mro__:
        if base is not kind and (base in public or not base.__module__.startswith(_OURS)):
            continue
        for name, value in vars(base).items():
            if not name.startswith("_") and name not in told:
                told.add(name)
                yield f"{path}.{name}{_member(kind, name, value)}"


def _member(kind: type, name: str, value: Any) -> str:
    if isinstance(value, property):
        return " property" if value.fset is None else " property, can be set"
    return _signature(getattr(kind, name)) if callable(getattr(kind, name, None)) else ""


def _signature(value: Any) -> str:
    try:
        return str(inspect.signature(value))
    except (TypeError, ValueError):
        return "(...)"


if __name__ == "__main__":
    print("\n".join(lines()))
