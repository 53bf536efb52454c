"""How long the launcher of a job waits for what."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvtrainer.env import DEAD_AFTER, read_timeout

_TO_REPORT = 5.0
"""Seconds that processes need to end with a traceback, once they know that another one is dead."""


@dataclass(frozen=True)
class Limits:
    """How long the launcher waits, in seconds."""

    start: float = 60.0
    """For all servers to be ready."""
    linger: float = 2.0
    """After the first failure, for the others to report it in their own words."""
    linger_unheard: float = 2.0
    """The same where the others can only find out by silence: a server is gone, or a worker that could say nothing."""
    grace: float = 5.0
    """Between SIGTERM and SIGKILL."""


def until_noticed(environ: Mapping[str, str]) -> float:
    """Seconds in which processes notice a silent death and say so, with the `dead_after` of this environment.

    Raises:
        ConfigurationError: KVSTORE_DEAD_AFTER is not a number above 0.
    """
    return read_timeout(environ, DEAD_AFTER) + _TO_REPORT
