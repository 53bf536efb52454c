"""Rejects concurrent calls on objects that only one thread may use at a time."""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable
from typing import Concatenate, ParamSpec, TypeVar

from kvtrainer.errors import ConcurrentCallError

_Self = TypeVar("_Self")
_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")

# Attribute of an object with its current outermost call.
_CALL = "_call_under_way"


class _GuardedCall:
    __slots__ = ("__weakref__", "method", "thread")
    method: str
    thread: int


def exclusive(
    method: Callable[Concatenate[_Self, _Arguments], _Result],
) -> Callable[Concatenate[_Self, _Arguments], _Result]:
    """Raise ConcurrentCallError from a method while another thread is in a guarded method of the same object.

    The first thread is not affected, and calls may be nested in one thread.
    """
    name = method.__name__

    @functools.wraps(method)
    def call(self: _Self, /, *args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        mine = _GuardedCall()
        mine.method, mine.thread = name, threading.get_ident()
        # setdefault is atomic: of two threads only one finds its own entry. The reference is weak, because a signal
        # handler may raise just before or after the block; what is left behind then dies with this frame.
        entry = weakref.ref(mine)
        found = self.__dict__.setdefault(_CALL, entry)()
        if found is None:
            self.__dict__[_CALL], found = entry, mine
        if found is mine:
            try:
                return method(self, *args, **kwargs)
            finally:
                self.__dict__.pop(_CALL, None)
        thread, other = found.thread, found.method
        del found  # a traceback of the error below would keep it
        if thread != mine.thread:
            who = type(self).__name__
            raise ConcurrentCallError(
                f"{name}() of a {who} was called by thread {threading.current_thread().name!r} while another thread is "
                f"in its {other}(); a {who} may be used by one thread at a time: call it from one thread, or "
                "put a lock around its calls. This call has changed nothing"
            )
        return method(self, *args, **kwargs)

    return call
