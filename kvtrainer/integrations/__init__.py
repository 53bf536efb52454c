"""Adapters for other libraries. Each is an optional extra, and the rest of the package imports none of them."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from typing import NamedTuple

from kvtrainer.errors import ConfigurationError


class Tested(NamedTuple):
    """The lowest and the newest (major, minor) version that passed the tests."""

    lowest: tuple[int, int]
    newest: tuple[int, int]


TESTED = {
    "accelerate": Tested((1, 10), (1, 15)),
    "lightning": Tested((2, 5), (2, 6)),
    "ray": Tested((2, 60), (2, 60)),
    "skorch": Tested((1, 3), (1, 4)),
    "transformers": Tested((5, 22), (5, 24)),
}
"""By library. `make test-frameworks` runs the versions of tests/frameworks/lowest.txt, and the newest ones."""


@contextmanager
def guard_import(library: str, install: str = "") -> Iterator[None]:
    """Allow a block to import a library that may be missing or too old.

    A version newer than those in `TESTED` only causes a UserWarning.

    Args:
        install: What to pip-install; by default our extra of that name.

    Raises:
        ConfigurationError: The version is lower than those in `TESTED`.
        ImportError: The library is not installed.
    """
    install = install or f"kvtrainer[{library}]"
    try:
        if library in TESTED:
            _check_library_version(library, TESTED[library])
        yield
    except ImportError as error:
        raise ImportError(
            f"kvtrainer.integrations.{library} needs {library} ({error}); install it with pip install {install!r}"
        ) from error


def _check_library_version(library: str, tested: Tested) -> None:
    found = version(library)
    numbers = tuple(map(int, re.findall("[0-9]+", found)[:2]))
    low, high = (".".join(map(str, one)) for one in tested)
    if numbers < tested.lowest:
        raise ConfigurationError(
            f"kvtrainer.integrations.{library} needs {library} {low} or newer, and found {found}; pip install "
            f"--upgrade 'kvtrainer[{library}]' installs one that fits"
        )
    if numbers > tested.newest:
        warnings.warn(
            f"kvtrainer.integrations.{library} was tested with {library} {low} to {high}, and found {found}; if "
            f"something fails, pip install '{library}=={high}.*' installs the newest that was tested",
            stacklevel=4,
        )
