"""Modules that a configuration asks to import, because they register what it names."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Sequence

from kvtrainer.errors import ArgumentTypeError, CustomImportError, FailedImportWarning


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
