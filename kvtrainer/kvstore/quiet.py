"""Calls over many keys, without full garbage collections in the middle."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable
from typing import ParamSpec

MANY = 64
"""Keys from which on a call pauses the collector."""

_Arguments = ParamSpec("_Arguments")


def without_collections(method: Callable[_Arguments, None]) -> Callable[_Arguments, None]:
    """Pause the cyclic garbage collector during a kvstore verb (self, key, …) that is given a long list of keys.

    Such a call makes a dozen short-lived objects per key. They set off full collections, each of which walks all that
    torch has loaded: half of the call's time. Reference counting frees them all the same. The collector is process
    wide, so other threads' cycles wait until the call is over.
    """

    @functools.wraps(method)
    def call(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> None:
        key = args[1] if len(args) > 1 else kwargs.get("key")
        pause = isinstance(key, list | tuple) and len(key) >= MANY and gc.isenabled()
        if pause:
            gc.disable()
        try:
            method(*args, **kwargs)
        finally:
            if pause:
                gc.enable()

    return call
