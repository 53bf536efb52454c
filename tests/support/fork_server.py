"""A process that has imported torch and this library, and makes copies of itself that run Python programs.

A fresh interpreter needs some four seconds of CPU time for these imports, more than most tests need for all the rest.
One such process serves a whole run of tests, whose processes are its clients. It imports nothing before the first of
them has come. Run as `python -m tests.support.fork_server FD`, with a socket that listens, it ends with its standard
input; `tests.support.forks` starts it and talks to it.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import gc
import importlib
import itertools
import json
import os
import random
import runpy
import select
import signal
import socket
import sys
import threading
import traceback
import types
import warnings
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

PRELOADED = (
    "numpy",
    "pytest",
    "torch._dynamo",  # torch's optimizers import it when they are first used
    "kvstore_server.cli",
    "kvtrainer.amp",
    "kvtrainer.strategy",
    "kvtrainer.trainer.trainer",
)
EXEC = "KVTRAINER_TESTS_EXEC"
"""Environment variable of a child: be a new interpreter, whose memory is its own."""
LARGEST = 1 << 20
"""Bytes of a request."""
_ABOVE_ALL = 500
"""File descriptors from here on are nobody's."""


class Client:
    """A process of the tests, and the children that it has started."""

    def __init__(self, channel: socket.socket) -> None:
        self.channel = channel
        self.running: set[int] = set()

    def receive(self) -> tuple[bytes, Sequence[int]]:
        """A request with its file descriptors; empty once the client has gone."""
        try:
            return socket.recv_fds(self.channel, LARGEST, 64)[:2]
        except ConnectionError:
            return b"", ()

    def answer(self, number: int) -> None:
        with contextlib.suppress(ConnectionError):  # the next receive finds that it has gone
            self.channel.send(b"%d" % number)

    def close(self) -> None:
        """End the children."""
        for pid in self.running:
            os.kill(pid, signal.SIGKILL)  # it is there as long as it is not reaped
        for pid in self.running:
            os.waitpid(pid, 0)
        self.channel.close()


def main(listener: socket.socket) -> None:
    """Start children, and say how they ended, until standard input ends; those of a client end with it."""
    if 0 in select.select([0, listener], [], [])[0]:
        return
    _preload()
    clients: dict[int, Client] = {}
    while True:
        ready, _, _ = select.select([0, listener, *clients], [], [])
        if 0 in ready:
            break
        if listener in ready:
            client = Client(listener.accept()[0])
            clients[client.channel.fileno()] = client
        for fd in clients.keys() & set(ready):
            message, descriptors = clients[fd].receive()
            if message:
                sockets = [listener, *(client.channel for client in clients.values())]
                _serve(clients[fd], json.loads(message), descriptors, sockets)
            else:
                clients.pop(fd).close()
    for client in clients.values():
        client.close()


def _preload() -> None:
    """Import what children need; they share it, and the garbage collector passes over it."""
    gc.disable()
    for name in PRELOADED:
        importlib.import_module(name)
    with contextlib.suppress(ModuleNotFoundError):
        importlib.import_module("sklearn.datasets")  # examples read it where it is installed
    supervisor: Any = importlib.import_module("kvstore_server.supervisor")
    supervisor._start_supervised = _start_supervised
    # torch's take its libraries of operators apart, which costs a child 50 ms at its end.
    for one in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        one.atexit = False
    gc.freeze()
    gc.enable()


def _serve(
    client: Client, request: Mapping[str, Any], descriptors: Sequence[int], sockets: Sequence[socket.socket]
) -> None:
    """Do what a client asks for; `sockets` are not for children."""
    if "reap" in request:
        _, status = os.waitpid(request["reap"], 0)
        client.running.discard(request["reap"])
        client.answer(os.waitstatus_to_exitcode(status))
        return
    has_begun, begins = os.pipe()
    pid = os.fork()
    if pid == 0:
        if request["session"]:
            os.setsid()
        os.close(has_begun)
        os.close(begins)
        for one in sockets:
            one.close()
        _become(request, descriptors)
    for descriptor in (*descriptors, begins):
        os.close(descriptor)
    os.read(has_begun, 1)  # it ends once the child leads its session
    os.close(has_begun)
    client.running.add(pid)
    client.answer(pid)


def _become(request: Mapping[str, Any], descriptors: Sequence[int]) -> NoReturn:
    """In a child: be what `python ARGUMENTS` would be, and end as it would but without taking modules apart.

    That takes half a second of CPU time, because the child gets a copy of all memory that it touches. Where the program
    raises Python ends it.
    """
    _take_descriptors(descriptors, request["targets"])
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    if "LISTEN_FDS" in os.environ:
        os.environ["LISTEN_PID"] = str(os.getpid())
    if os.environ.pop(EXEC, ""):
        os.execve(sys.executable, [sys.executable, *request["arguments"]], os.environ)
    if os.environ.get("PYTHONWARNINGS"):
        warnings.simplefilter(os.environ["PYTHONWARNINGS"])  # type: ignore[arg-type]
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    random.seed()
    sys.modules["numpy"].random.seed()
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


def _start_supervised(command: Sequence[str], environ: Mapping[str, str], descriptors: Sequence[int]) -> int:
    """In a child that is a supervisor: start its server as it would, but as a copy of this process."""
    supervisor: Any = sys.modules["kvstore_server.supervisor"]
    pid: int = supervisor.fork_group()
    if pid:
        return pid
    try:
        # 1. Keep nothing but what is passed on. Objects that hold the rest live as long as this process.
        signal.set_wakeup_fd(-1)
        _, *arguments = command
        ready = [int(fd) for flag, fd in itertools.pairwise(arguments) if flag == "--ready-fd"]
        passed = [0, 1, 2, *descriptors, *ready]
        for fd in {int(name) for name in os.listdir("/proc/self/fd")} - {*passed}:
            with contextlib.suppress(OSError):  # the one that has listed them
                os.close(fd)
        # 2. Become the program.
        targets = [0, 1, 2, *range(3, 3 + len(descriptors)), *ready]
        request = {"arguments": arguments, "env": {**environ}, "cwd": os.getcwd(), "targets": targets}
        _become(request, passed)
    except BaseException:
        traceback.print_exc()
    os._exit(1)


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
