"""Counts calls of Python functions in this process from its import on. Servers load it with --import."""

from __future__ import annotations

import sys
import threading
from types import FrameType

from kvstore_server import commands

COUNT = 1
"""The command that a server answers with its calls up to now."""
_calls = 0


def _count(frame: FrameType, event: str, argument: object) -> None:
    global _calls
    if event == "call":  # not "c_call", which is a function of C
        _calls += 1


@commands.register(COUNT)
def calls_so_far(body: str = "", context: commands.CommandContext | None = None) -> str:
    """The calls in this process up to now, as the answer to a command."""
    return str(_calls)


threading.setprofile(_count)  # of threads that are yet to start
sys.setprofile(_count)
