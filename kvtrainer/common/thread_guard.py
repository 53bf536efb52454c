"""Public calls of an object that belongs to one thread at a time: another one is told so, and changes nothing."""

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

# Attribute of the object: who is in which of its calls.
_CALL = "_call_under_way"


class _Call:
    """One call that no other one surrounds."""

    __slots__ = ("__weakref__", "method", "thread")
    method: str
    thread: int


def exclusive(
    method: Callable[Concatenate[_Self, _Arguments], _Result],
) -> Callable[Concatenate[_Self, _Arguments], _Result]:
    """Refuse a call while another thread is in one of the same object. It raises ConcurrentCallError.

    The thread that was first goes on as if nothing had happened. Calls inside of a call are free, and so is a call by
    another thread afterwards.
    """
    name = method.__name__

    @functools.wraps(method)
    def call(self: _Self, /, *args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        """Call the method, unless another thread is in a call of this object."""
        mine = _Call()
        mine.method, mine.thread = name, threading.get_ident()
        # One operation of the interpreter: of two threads only one finds its own call there. Weak, because a signal
        # handler may raise just before or behind the block: what it leaves behind then ends with this frame.
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
                "put a lock around its calls. This one has changed nothing"
            )
        return method(self, *args, **kwargs)

    return call
