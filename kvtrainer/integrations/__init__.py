"""Ties to other libraries, each an optional extra; nothing here is imported by the rest of the package."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version

from kvtrainer.errors import ConfigurationError


@contextmanager
def needing(
    library: str, at_least: tuple[int, int] = (0, 0), below: tuple[int, int] | None = None, install: str = ""
) -> Iterator[None]:
    """Let a block import a library that may be missing here, or have another version.

    Args:
        at_least, below: The versions that will do, (major, minor): from the one, before the other.
        install: What brings the library; by default our extra of its name.

    Raises:
        ConfigurationError: it has another version.
        ImportError: it is not installed.
    """
    install = install or f"kvtrainer[{library}]"
    try:
        if below is not None:
            _check_version(library, at_least, below, install)
        yield
    except ImportError as error:
        raise ImportError(
            f"kvtrainer.integrations.{library} needs {library} ({error}); install it with pip install {install!r}"
        ) from error


def _check_version(library: str, at_least: tuple[int, int], below: tuple[int, int], install: str) -> None:
    found = version(library)
    if not at_least <= tuple(map(int, re.findall("[0-9]+", found)[:2])) < below:
        low, high = (".".join(map(str, one)) for one in (at_least, below))
        raise ConfigurationError(
            f"kvtrainer.integrations.{library} works with {library} from {low} up to, but not including, {high}, and "
            f"found {found}; pip install {install!r} brings one that fits"
        )
