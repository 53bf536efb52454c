"""Ctrl-C at a line of ours that a test chooses."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import kvstore_server.plan
import kvtrainer

OURS = tuple(os.path.dirname(one.__file__) for one in (kvtrainer, kvstore_server.plan))
Line = tuple[str, int]
"""File and number."""


class Interrupt(KeyboardInterrupt):
    """What a signal handler raises."""


def lines_of(call: Callable[[], Any], before: int | Line | None = None) -> list[Line]:
    """Run a call, and list the lines of ours that it reaches.

    Args:
        before: Raise Interrupt before this line, or before that of this position in the list; None, or -1: nowhere.
    """
    reached: list[Line] = []

    def look(frame: FrameType, event: str, _: Any) -> Any:
        if event == "line":
            here = frame.f_code.co_filename, frame.f_lineno
            reached.append(here)
            if before in (len(reached) - 1, here):
                sys.settrace(None)
                raise Interrupt
        return look

    # The collector would run finalizers of other objects within the call, where an interrupt is lost.
    former, was_enabled = sys.gettrace(), gc.isenabled()
    gc.disable()
    sys.settrace(lambda frame, *_: look if frame.f_code.co_filename.startswith(OURS) else None)
    try:
        call()
    finally:
        sys.settrace(former)
        if was_enabled:
            gc.enable()
    return reached
