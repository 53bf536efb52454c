"""A small parent that starts a server again when it dies, and holds its memory meanwhile.

    kvstore-server --supervise [--restarts N] ...

The parent imports neither torch nor ZeroMQ. It does three things that the server itself cannot: it keeps the
descriptors of the server's memory (`DescriptorStore`), it holds the port, and it starts the server again, with the
same address and the same descriptors. All flags but its own two go to the server.

Invariants: the server dies with this process, however that dies. It leads a process group of its own, of which nothing
is left when its successor starts. Signals are sent through a pidfd, so never to a process that was reaped. What the
server has sent to the store is read before the server is reaped.
"""

from __future__ import annotations

import argparse
import ctypes
import fcntl
import os
import re
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from types import FrameType

from kvstore_server.descriptor_store import FIRST, DescriptorStore
from kvstore_server.descriptors import allow_descriptors
from kvstore_server.restarts import RESTARTS, Restarts, is_restart_useless, shell_code

DURABILITY = "KVSTORE_DURABILITY"
"""Environment variable that says whether a server's memory outlives it; here it does unless it is set."""
DURABILITIES = ("process", "off")
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
SLACK = 5.0
"""Seconds that a server gets beyond its drain timeout to end after SIGTERM, before it is killed."""
_CANNOT_START = 127
_PR_SET_PDEATHSIG = 1
_ADDRESS = re.compile(r"tcp://(?P<host>\[[0-9A-Fa-f:.]+\]|[^:/\[\]]+):(?P<port>[0-9]{1,5})")


class Supervisor:
    """Runs one process, and starts it again when it dies.

    Args:
        name: What log lines call the process.
        command: Its command.
        environ: Its environment, to which the store's variables and KVSTORE_RESTARTS are added.
        restarts: How often it is started again.
        stop_after: Seconds between a signal that ends this program and SIGKILL.
        say: Writes a line of the log.
        ready_fd: A descriptor that the process gets as its --ready-fd until it has been ready once; then it is closed.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        environ: Mapping[str, str],
        restarts: Restarts,
        stop_after: float,
        say: Callable[[str], None],
        ready_fd: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._name = name
        self._command = command
        self._environ = environ
        self._restarts = restarts
        self._stop_after = stop_after
        self._say = say
        self._ready_fd = ready_fd
        self._clock = clock
        self._store = DescriptorStore(warn=say)
        self._pidfd = -1
        self._stop_by: float | None = None
        """When the process is killed, once a signal has asked it to end."""

    def run(self) -> int:
        """Run until the process ends for good. Return its exit code, as a shell does. Main thread only.

        The code of several deaths in a row is that of the first one. A process that fails before it has ever been
        ready is not started again: its flags are wrong, or its address is in use.
        """
        with _forward_supervisor_signals(self._forward) as wake:
            try:
                while True:
                    code, lived = self._live(wake)
                    has_begun = self._store.is_ready or code < 0
                    if is_restart_useless(code) or self._is_stopping or not has_begun:
                        return shell_code(code)
                    delay = self._restarts.after(code, lived)
                    self._say(self._restarts.describe(self._name, code, lived, delay))
                    if delay is None or not self._pause(delay, wake):
                        return shell_code(self._restarts.first_code)
            finally:
                self._store.close()

    @property
    def _is_stopping(self) -> bool:
        return self._stop_by is not None

    def _forward(self, number: signal.Signals) -> None:
        """Pass a signal on to the process. Called by the signal's handler."""
        if self._stop_by is None:
            self._stop_by = self._clock() + self._stop_after
        self._signal(number)

    def _signal(self, number: signal.Signals) -> None:
        if self._pidfd >= 0:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, number)

    def _live(self, wake: int) -> tuple[int, float]:
        """Start the process and wait for its end. Return its exit code, or minus a signal, and how long it lived."""
        began = self._clock()
        # 1. Start it with what the store keeps.
        environ = {**self._store.environment(self._environ), RESTARTS: str(self._restarts.used)}
        with self._passed_ready_fd() as flag:
            pid = _start_supervised([*self._command, *flag], environ, self._store.descriptors)
        self._pidfd = os.pidfd_open(pid)
        if self._is_stopping:
            self._signal(signal.SIGTERM)  # the signal came before there was a pidfd to forward it to
        # 2. Take what it hands over, until it ends.
        self._follow(pid, wake)
        # 3. End the rest of its group, whose number stays its own until the leader is reaped.
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)
        self._receive(pid)
        ended, self._pidfd = self._pidfd, -1
        os.close(ended)
        _, status = os.waitpid(pid, 0)
        return os.waitstatus_to_exitcode(status), self._clock() - began

    @contextmanager
    def _passed_ready_fd(self) -> Iterator[list[str]]:
        """Give the flag for a duplicate of ready_fd, which lies beyond the descriptors that the process finds."""
        if self._ready_fd is None:
            yield []
            return
        try:
            os.set_inheritable(self._ready_fd, False)
            passed = fcntl.fcntl(self._ready_fd, fcntl.F_DUPFD, FIRST + len(self._store.descriptors))
        except OSError:
            yield ["--ready-fd", str(self._ready_fd)]  # it is not open, and the process will say so
            return
        try:
            yield ["--ready-fd", str(passed)]
        finally:
            os.close(passed)

    def _follow(self, pid: int, wake: int) -> None:
        """Fill the store until the process ends. Kill it if it was asked to end and does not."""
        poll = select.poll()
        for fd in (self._pidfd, self._store.fileno(), wake):
            poll.register(fd, select.POLLIN)
        was_killed = False
        while True:
            left = None
            if self._stop_by is not None and not was_killed:
                left = self._stop_by - self._clock()
                if left <= 0:
                    self._signal(signal.SIGKILL)
                    left, was_killed = None, True
            ready = [fd for fd, _ in poll.poll(None if left is None else 1000 * left)]
            if wake in ready:
                os.read(wake, 4096)
            if self._pidfd in ready:
                return
            self._receive(pid)

    def _receive(self, pid: int) -> None:
        """Do what the process has asked the store for, and close ready_fd once it has been ready."""
        self._store.receive(pid)
        if self._store.is_ready and self._ready_fd is not None:
            with suppress(OSError):
                os.close(self._ready_fd)
            self._ready_fd = None

    def _pause(self, seconds: float, wake: int) -> bool:
        """Wait before a restart. Return False if a signal asks this program to end meanwhile."""
        poll = select.poll()
        poll.register(wake, select.POLLIN)
        deadline = self._clock() + seconds
        while not self._is_stopping and (left := deadline - self._clock()) > 0:
            if poll.poll(1000 * left):
                os.read(wake, 4096)
        return not self._is_stopping


@contextmanager
def _forward_supervisor_signals(forward: Callable[[signal.Signals], None]) -> Iterator[int]:
    """Call `forward` for signals that ask this program to end. Gives a descriptor that is readable after each."""
    wake, writer = os.pipe()
    os.set_blocking(writer, False)

    def handle(number: int, _frame: FrameType | None) -> None:
        forward(signal.Signals(number))

    before = {number: signal.signal(number, handle) for number in STOP_SIGNALS}
    wakeup = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    try:
        yield wake
    finally:
        signal.set_wakeup_fd(wakeup)
        for number, handler in before.items():
            signal.signal(number, handler)
        os.close(wake)
        os.close(writer)


def fork_group() -> int:
    """Fork a process that leads a group of its own and dies with this one. Return its pid; in the child, 0."""
    parent, prctl = os.getpid(), ctypes.CDLL(None).prctl
    pid = os.fork()
    if pid:
        with suppress(PermissionError):  # it did so itself, and runs its program by now
            os.setpgid(pid, pid)
        return pid
    os.setpgid(0, 0)
    prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:  # it is dead already
        os._exit(1)
    return 0


def _start_supervised(command: Sequence[str], environ: Mapping[str, str], descriptors: Sequence[int]) -> int:
    """Start a process that dies with this one, in a group of its own, with descriptors from FIRST on. Return its pid.

    Not subprocess.Popen, because LISTEN_PID is known only after the fork. This program has no other threads.
    """
    pid = fork_group()
    if pid:
        return pid
    try:
        # 1. Move the descriptors out of the way first, because some may lie where others are to go.
        above = FIRST + len(descriptors)
        moved = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, above) for fd in descriptors]
        for target, fd in enumerate(moved, FIRST):
            os.dup2(fd, target)
        # 2. Become the program.
        own = {"LISTEN_PID": str(os.getpid())} if descriptors else {}
        os.execvpe(command[0], list(command), {**environ, **own})
    except BaseException as error:
        os.write(2, f"kvstore-server: cannot start {command[0]}: {error}\n".encode())
    os._exit(_CANNOT_START)


# ---------------------------------------------------------------- the command line


def main(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Run a supervised server, given the flags of `kvstore-server`. Return its exit code. Main thread only."""
    own, flags = _parse_supervisor_flags(argv, environ)

    def say(text: str) -> None:
        print(f"kvstore-server: {text}", file=sys.stderr, flush=True)

    try:
        bind, holder = hold_supervised_address(own.bind)
    except OSError as error:
        say(f"cannot listen on {own.bind}: {error}; give an address of this machine, or a port")
        return 1
    allow_descriptors()
    command = [sys.executable, "-m", "kvstore_server", *flags, "--bind", bind]
    durable = {**environ, DURABILITY: environ.get(DURABILITY) or "process"}
    stop_after = _parse_supervisor_seconds(own.drain_timeout) + SLACK
    with holder or nullcontext():
        name, restarts = f"server {own.index}", Restarts(own.restarts)
        return Supervisor(name, command, durable, restarts, stop_after, say, own.ready_fd).run()


def hold_supervised_address(bind: str) -> tuple[str, socket.socket | None]:
    """Reserve the port of an address tcp://HOST:PORT; for port 0 the system chooses one.

    Returns the address with its port, and a bound socket that does not listen. As long as it is open, the system gives
    the port to no process that does not ask for it, and a server can listen there. None: the port is not free, or this
    is no such address; the server will say so.

    Raises:
        OSError: The system chooses no port, because the host is not one of this machine.
    """
    address = _ADDRESS.fullmatch(bind)
    if address is None:
        return bind, None
    host, port = address["host"], int(address["port"])
    family = socket.AF_INET6 if host.startswith("[") else socket.AF_INET
    holder = socket.socket(family, socket.SOCK_STREAM)
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        holder.bind(("" if host == "*" else host.strip("[]"), port))
    except (OSError, OverflowError):
        holder.close()
        if port == 0:
            raise
        return bind, None
    return f"tcp://{host}:{holder.getsockname()[1]}", holder


def _parse_supervisor_flags(
    argv: Sequence[str], environ: Mapping[str, str]
) -> tuple[argparse.Namespace, list[str]]:
    """Return the flags that a supervisor reads, and those that its server gets. The server checks them."""
    parser = argparse.ArgumentParser(prog="kvstore-server", add_help=False, allow_abbrev=False)
    parser.add_argument("--supervise", action="store_true")
    parser.add_argument("--restarts", type=_parse_restart_count)
    parser.add_argument("--ready-fd", type=_parse_restart_count)
    parser.add_argument("--bind", default=environ.get("KVSTORE_BIND", "tcp://127.0.0.1:0"))
    parser.add_argument("--index", default=environ.get("KVSTORE_SERVER_INDEX", "0"))
    parser.add_argument("--drain-timeout", default=environ.get("KVSTORE_DRAIN_TIMEOUT", "10"))
    own, flags = parser.parse_known_args(argv)
    return own, [*flags, "--index", own.index, "--drain-timeout", own.drain_timeout]


def _parse_restart_count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 0")
    return int(text)


def _parse_supervisor_seconds(text: str) -> float:
    try:
        return max(0.0, float(text))
    except ValueError:
        return 0.0  # the server refuses it
