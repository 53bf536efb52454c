"""A process that has imported torch and this library, and makes copies of itself that run Python programs.

A fresh interpreter needs some two seconds of CPU time for these imports, more than most tests need for all the rest.
Run as `python -m tests.support.fork_server FD`; `tests.support.forks` talks to it over that socket.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import gc
import json
import os
import random
import runpy
import signal
import socket
import sys
import threading
import types
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import numpy
import pytest
import torch._dynamo  # torch's optimizers import it when they are first used

import kvstore_server.cli
import kvtrainer.amp
import kvtrainer.strategy
import kvtrainer.trainer

PRELOADED = (numpy, pytest, torch, kvstore_server, kvtrainer)
LARGEST = 1 << 20
"""Bytes of a request."""
_ABOVE_ALL = 500
"""File descriptors from here on are nobody's."""


def main(channel: socket.socket) -> None:
    """Start children, and say how they ended, until the other side closes the channel; then end them all."""
    running: set[int] = set()
    gc.collect()
    gc.freeze()
    while True:
        message, descriptors, _, _ = socket.recv_fds(channel, LARGEST, 64)
        if not message:
            break
        request = json.loads(message)
        if "reap" in request:
            _, status = os.waitpid(request["reap"], 0)
            running.discard(request["reap"])
            channel.send(str(os.waitstatus_to_exitcode(status)).encode())
            continue
        pid = os.fork()
        if pid == 0:
            channel.close()
            _become(request, descriptors)
        for descriptor in descriptors:
            os.close(descriptor)
        running.add(pid)
        channel.send(str(pid).encode())
    for pid in running:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _become(request: Mapping[str, Any], descriptors: Sequence[int]) -> NoReturn:
    """In a child: be what `python ARGUMENTS` would be, and end as it would but without taking modules apart.

    That takes half a second of CPU time, because the child gets a copy of all memory that it touches. Where the program
    raises Python ends it.
    """
    _take_descriptors(descriptors, request["targets"])
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    if os.environ.get("PYTHONWARNINGS"):
        warnings.simplefilter(os.environ["PYTHONWARNINGS"])  # type: ignore[arg-type]
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    random.seed()
    numpy.random.seed()
    kind, what, *rest = request["arguments"]
    sys.path[0] = "" if kind == "-c" else os.getcwd()
    code = _run(kind, what, rest)
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def _run(kind: str, what: str, rest: Sequence[str]) -> int:
    """Run a program; its exit code."""
    try:
        _execute(kind, what, rest)
    except SystemExit as end:
        if not isinstance(end.code, int | None):
            raise
        return end.code or 0
    return 0


def _execute(kind: str, what: str, rest: Sequence[str]) -> None:
    if kind == "-m":
        sys.argv = [what, *rest]
        runpy.run_module(what, run_name="__main__", alter_sys=True)
    else:
        sys.argv = [kind, *rest]
        module = types.ModuleType("__main__")
        sys.modules["__main__"] = module
        exec(compile(what, "<string>", "exec"), module.__dict__)


def _take_descriptors(descriptors: Sequence[int], targets: Sequence[int]) -> None:
    """Have descriptors under the numbers of `targets`, of which the first three are standard streams."""
    aside = [fcntl.fcntl(one, fcntl.F_DUPFD, _ABOVE_ALL) for one in descriptors]
    for one in descriptors:
        os.close(one)
    for one, target in zip(aside, targets, strict=True):
        os.dup2(one, target)
        os.close(one)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])))
