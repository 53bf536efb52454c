"""The exit code of a worker whose rank another process has taken over, by which launchers do not start it again."""

from __future__ import annotations

import atexit
import os
import sys
from types import TracebackType

from kvstore_server.restarts import REPLACED
from kvtrainer.errors import FencedError


def exit_when_fenced() -> None:
    """Let this process end with exit code 75 if nothing catches a FencedError."""
    former = sys.excepthook
    if getattr(former, "ends_fenced", False):
        return

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        former(kind, error, trace)
        if isinstance(error, FencedError):
            atexit._run_exitfuncs()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(REPLACED)  # a hook cannot set the exit code otherwise

    hook.ends_fenced = True  # type: ignore[attr-defined]
    sys.excepthook = hook
