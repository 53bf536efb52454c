"""Merge, copy and check dicts of configurations, and import the modules that they name."""

from __future__ import annotations

import importlib
import inspect
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from kvstore_server.errors import did_you_mean
from kvtrainer.errors import (
    ArgumentTypeError,
    ConfigurationError,
    CustomImportError,
    FailedImportWarning,
    UnknownNameError,
)

_DELETE = "_delete_"


def merge_config(base: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """Return `base` overlaid with `new`, dicts within dicts too; neither is changed.

    A dict of `new` with `_delete_=True` replaces what `base` has instead; without a dict there, or None, it must.

    Raises:
        ArgumentTypeError: a dict would be laid over something else.
    """
    merged = copied(base, "the base configuration")
    for key, value in _checked(new, "the new configuration").items():
        if key == _DELETE:
            continue
        before = merged.get(key)
        if not isinstance(value, Mapping):
            merged[key] = value
        elif before is None or value.get(_DELETE, False):
            merged[key] = copied(value, key)
        elif isinstance(before, Mapping):
            merged[key] = merge_config(before, value)
        else:
            raise ArgumentTypeError(
                f"{key} is a dict in the new configuration but {type(before).__name__} in the base; to replace it, add "
                f"{_DELETE}=True"
            )
    return merged


def joined(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Put the entries of several dicts together. Raises ConfigurationError if two have the same key."""
    entries: dict[str, Any] = {}
    for part in parts:
        twice = sorted(set(part) & set(entries))
        if twice:
            raise ConfigurationError(f"{', '.join(twice)}: given twice in the configuration; give it once")
        entries |= part
    return entries


def section(cfg: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return a copy of the dict under a key, empty where there is none. Raises ArgumentTypeError if it is no dict."""
    return {} if cfg.get(name) is None else copied(cfg[name], name)


def check_keys(what: str, given: Mapping[str, Any], known: Collection[str]) -> None:
    """Raise UnknownNameError, naming them and what is similar, if there are keys that are not known."""
    unknown = [key for key in given if key not in known]
    if unknown:
        raise UnknownNameError(
            f"{what} has {', '.join(map(repr, unknown))}, which no Trainer reads; what it reads is "
            f"{', '.join(sorted(known))}{did_you_mean(unknown, known)}"
        )


def check_arguments(what: str, function: Callable[..., Any], given: Mapping[str, Any]) -> None:
    """Raise ArgumentTypeError unless this is a dict whose keys a function takes by name; says what is similar."""
    takes = inspect.signature(function).parameters.values()
    known = [one.name for one in takes if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)]
    unknown = [name for name in _checked(given, what) if name not in known]
    if unknown and not any(one.kind is one.VAR_KEYWORD for one in takes):
        raise ArgumentTypeError(
            f"{what} has no {', '.join(map(repr, unknown))}; it has {', '.join(known)}{did_you_mean(unknown, known)}"
        )


def _checked(given: Any, what: str) -> Mapping[str, Any]:
    if not isinstance(given, Mapping):
        raise ArgumentTypeError(f"{what} must be a dict, got {type(given).__name__}: {given!r:.80}")
    return given


def copied(given: Any, what: str) -> dict[str, Any]:
    """Copy a dict, called `what`, into plain dicts without marks of merging. Raises ArgumentTypeError if it is none."""
    return {key: _copy(value) for key, value in _checked(given, what).items() if key != _DELETE}


def _copy(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _copy(inner) for key, inner in value.items() if key != _DELETE}
    return [_copy(inner) for inner in value] if type(value) is list else value


def import_modules(imports: str | Sequence[str], allow_failed_imports: bool = False) -> None:
    """Import modules by name.

    Args:
        imports: One name or several.
        allow_failed_imports: Whether a module that cannot be found or imported is only warned of (FailedImportWarning).

    Raises:
        ArgumentTypeError: something is no name.
        CustomImportError: an import failed; also an ImportError.
    """
    names = [imports] if isinstance(imports, str) else imports
    if not isinstance(names, Sequence) or not all(isinstance(name, str) for name in names):
        raise ArgumentTypeError(f"custom_imports takes a list of module names, got {imports!r:.80}")
    if not isinstance(allow_failed_imports, bool):
        raise ArgumentTypeError(
            f"allow_failed_imports must be True or False, got {allow_failed_imports!r:.80}"
        )
    for name in names:
        try:
            importlib.import_module(name)
        except ImportError as error:
            if not allow_failed_imports:
                raise CustomImportError(
                    f"module {name!r} of custom_imports cannot be imported: {error}; is its folder on PYTHONPATH?"
                ) from error
            warnings.warn(
                f"module {name!r} of custom_imports cannot be imported and is left out: {error}",
                FailedImportWarning,
                stacklevel=2,
            )
