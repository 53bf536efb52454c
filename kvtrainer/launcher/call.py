"""A function that runs in another process of this host, and what comes of it: packed, called, and told.

    python -m kvtrainer.launcher.call CODE OUTCOME

Both are descriptors of memory without a name, which a process hands to its own children and to nobody else. That is
why pickle may be used here, and nowhere between peers: whoever could write to this memory could run code as this user
anyway. Functions of a notebook or of `__main__`, and lambdas, are packed with cloudpickle, where that is installed.
"""

from __future__ import annotations

import os
import pickle
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any, NamedTuple

from kvtrainer.errors import ArgumentTypeError, ClusterError, ConfigurationError
from kvtrainer.launcher.guardian import end_with_parent

_SIZE = 8


class Outcome(NamedTuple):
    """How a call ended."""

    at: float
    """The monotonic clock of the host, in seconds."""
    value: Any
    error: BaseException | None
    """None also where it is no Exception, as in sys.exit(), or would not come back as itself."""
    trace: str
    """The traceback of the exception; empty where the call has returned."""


class Paper:
    """Memory without a name, to which one process writes once and which another reads."""

    def __init__(self, fd: int | None = None) -> None:
        self.fd = os.memfd_create("kvtrainer") if fd is None else fd

    def write(self, data: bytes) -> None:
        """Write all; its size comes last, so that what a killed process has begun counts as nothing."""
        with open(self.fd, "wb", closefd=False) as file:
            file.seek(_SIZE)
            file.write(data)
            file.flush()
            file.seek(0)
            file.write(len(data).to_bytes(_SIZE, "little"))

    @property
    def is_written(self) -> bool:
        return any(os.pread(self.fd, _SIZE, 0))

    def read(self) -> bytes:
        """Return what was written; empty if nothing was."""
        # Processes that have inherited the descriptor share its position, too: each says where it reads.
        left = int.from_bytes(os.pread(self.fd, _SIZE, 0), "little")
        data, end = bytearray(), _SIZE + left
        while left and (part := os.pread(self.fd, left, end - left)):
            data += part
            left -= len(part)
        return bytes(data)

    def close(self) -> None:
        os.close(self.fd)


def pack(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    """Return a call as bytes that `main` understands.

    Raises:
        ArgumentTypeError: `function` cannot be called.
        ConfigurationError: it, or an argument, cannot be packed, or not without cloudpickle.
    """
    if not callable(function):
        raise ArgumentTypeError(f"workers run a function, got {function!r:.80}")
    dumps = _cloud()
    name = getattr(function, "__qualname__", "")
    if dumps is None and (getattr(function, "__module__", "") == "__main__" or "<" in name):
        raise ConfigurationError(
            f"{name} is a function of a notebook, a script or another function, which workers cannot import: pip "
            "install 'kvtrainer[notebook]', or put it into a module"
        )
    try:
        call = (dumps or pickle.dumps)((function, args, kwargs))
    except Exception as error:
        raise ConfigurationError(
            f"{name or function!r:.80} or an argument cannot be packed: {error}"
        ) from None
    return pickle.dumps((sys.path, call))


def unpack(told: bytes) -> Outcome | None:
    """Return what a worker has told; None if nothing.

    Raises:
        ClusterError: this program cannot make it, such as an object of a module that only workers can import.
    """
    try:
        return Outcome(*pickle.loads(told)) if told else None
    except Exception as error:
        raise ClusterError(f"what a worker returned cannot be unpacked here: {error!r}") from error


def _cloud() -> Callable[[Any], bytes] | None:
    try:
        import cloudpickle
    except ImportError:
        return None
    dumps: Callable[[Any], bytes] = cloudpickle.dumps
    return dumps


def main(code: int, outcome: int) -> int:
    """Run the packed call of one descriptor, and write its outcome to the other; return an exit code."""
    end_with_parent(os.getppid())()
    told, value, failure, trace = Paper(outcome), None, None, ""
    try:
        sys.path[:], call = pickle.loads(Paper(code).read())
        function, args, kwargs = pickle.loads(call)
        value = function(*args, **kwargs)
    except BaseException as error:
        # Stores tell the servers why their process ends.
        sys.last_value = failure = error
        trace = "".join(traceback.format_exception(error))
    at = time.monotonic()
    try:
        told.write(_packed(Outcome(at, value, failure, trace)))
    except Exception as error:
        text = f"what the worker returned cannot be packed: {error}"
        told.write(pickle.dumps(tuple(Outcome(at, None, None, text))))
        return 1
    return 1 if trace else 0


def _packed(outcome: Outcome) -> bytes:
    """Return an outcome as bytes; see `Outcome.error` for what is left out."""
    dumps = _cloud() or pickle.dumps
    error = outcome.error
    try:
        is_whole = isinstance(error, Exception) and type(pickle.loads(dumps(error))) is type(error)
    except Exception:
        is_whole = False
    return dumps(tuple(outcome if is_whole else outcome._replace(error=None)))


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
