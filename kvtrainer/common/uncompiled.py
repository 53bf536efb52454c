"""Excludes our calls and hooks from torch.compile: they use sockets, threads and memory, which no graph can hold."""

from __future__ import annotations

from collections.abc import Iterator
from types import FunctionType
from typing import Any, TypeVar

from torch._C._dynamo import eval_frame

_T = TypeVar("_T", bound=Any)


def uncompiled(target: _T) -> _T:
    """Make torch.compile break its graph at a function and run it uncompiled, with everything that it calls.

    `torch.compiler.disable` does the same with a wrapper, which slows down eager calls and imports the compiler. This
    marks the code object instead, which only the compiler looks at. A torch without such marks still breaks the graph.

    Args:
        target: A function, or a class whose own methods and properties are meant.
    """
    for function in _functions_to_uncompile(target):
        function._torchdynamo_disable = True
        # Functions wrapped by one decorator share a code object, as with contextlib; a mark must affect only this one.
        function.__code__ = function.__code__.replace()
        if hasattr(eval_frame, "set_code_exec_strategy"):
            skip = eval_frame._FrameAction.SKIP
            eval_frame.set_code_exec_strategy(function.__code__, eval_frame._FrameExecStrategy(skip, skip))
    return target


def _functions_to_uncompile(target: Any) -> Iterator[Any]:
    if isinstance(target, FunctionType):
        yield target
        yield from _functions_to_uncompile(getattr(target, "__wrapped__", None))
    elif isinstance(target, staticmethod | classmethod):
        yield from _functions_to_uncompile(target.__func__)
    elif isinstance(target, property):
        for accessor in (target.fget, target.fset, target.fdel):
            yield from _functions_to_uncompile(accessor)
    elif isinstance(target, type):
        for name, member in vars(target).items():
            if not isinstance(member, type) and name != "__annotate__":
                yield from _functions_to_uncompile(member)
