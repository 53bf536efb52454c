"""The release of MXNet that a Gluon optimizer follows.

MXNet 2.x is the default. 1.9.1, the last stable release, has other defaults and, in some optimizers, another formula.
An optimizer that follows 1.9.1 is sent and saved under its name with a prefix, "mxnet1:sgd", so that two workers, or a
file and a Trainer, that disagree are detected.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from kvstore_server import check
from kvstore_server.errors import ConfigurationError

MXNET1 = "mxnet1"
MXNET2 = "mxnet2"
RELEASES = (MXNET1, MXNET2)
PREFIX = f"{MXNET1}:"
VARIABLE = "KVSTORE_COMPAT"


def compat_release(given: Any, environ: Mapping[str, str]) -> str:
    """Return the release to follow: `given`, or else the environment variable's, or else MXNet 2.x.

    Raises ConfigurationError if there is no such release.
    """
    if given is not None:
        return check.one_of("compat", given, RELEASES)
    text = environ.get(VARIABLE, "").strip().lower()
    return check.one_of(VARIABLE, text, RELEASES) if text else MXNET2


def compat_release_of_process(given: Any) -> str:
    return compat_release(given, os.environ)


def split_compat_prefix(name: str) -> tuple[str, str | None]:
    """Return an optimizer's name without its prefix, and the release that the prefix means."""
    is_prefixed = name.lower().startswith(PREFIX)
    return (name[len(PREFIX) :], MXNET1) if is_prefixed else (name, None)


def compat_parameter_names(given: Any, who: str) -> dict[str, str]:
    """Check MXNet's `param_idx2name` and return it with text keys. Raises ConfigurationError unless it is such
    a dict.
    """
    is_fit = isinstance(given, Mapping) and all(
        (check.is_integer(key) or isinstance(key, str)) and isinstance(name, str)
        for key, name in given.items()
    )
    if not is_fit:
        raise ConfigurationError(
            f"{who}: param_idx2name must be a dict of keys and names, such as {{0: 'fc_weight'}}, got {given!r:.80}"
        )
    return {str(key): name for key, name in given.items()}
