"""One launched process: how it is started, read, signalled and described."""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence

from kvtrainer.launcher.output import LineSplitter

_PR_SET_PDEATHSIG = 1
_READ_SIZE = 64 * 1024
_MAX_DRAIN_READS = 64


class Stream:
    """The reading end of one output pipe of a child, and where its lines go."""

    def __init__(self, fd: int, target: int, tag: str, put: Callable[[int, str, bytes], None]) -> None:
        self.fd = fd
        self._target = target
        self._tag = tag
        self._put = put
        self._splitter = LineSplitter()

    def read(self) -> bool:
        """Read what is there (blocks if nothing is) and pass complete lines on; False at the end."""
        data = os.read(self.fd, _READ_SIZE)
        self._pass_on(self._splitter.feed(data) if data else self._splitter.finish())
        return bool(data)

    def drain(self) -> bool:
        """Read without waiting until nothing is left; False at the end.

        Gives up after a few MiB, because a process that outlives the child may write for ever.
        """
        poll = select.poll()
        poll.register(self.fd, select.POLLIN)
        for _ in range(_MAX_DRAIN_READS):
            if not poll.poll(0):
                break
            if not self.read():
                return False
        return True

    def flush(self) -> None:
        """Pass on a last line that has no end."""
        self._pass_on(self._splitter.finish())

    def _pass_on(self, lines: Sequence[bytes]) -> None:
        for line in lines:
            self._put(self._target, self._tag, line)


class Child:
    """A process in a session of its own, whose output comes back through pipes; it starts on construction.

    Raises:
        OSError: the command cannot be started.
    """

    def __init__(
        self,
        name: str,
        tag: str,
        command: Sequence[str],
        environ: Mapping[str, str],
        put: Callable[[int, str, bytes], None],
        pass_fds: Sequence[int] = (),
        stdin: int = subprocess.DEVNULL,
    ) -> None:
        self.name = name
        # The caller starts children from one thread only, which is what preexec_fn needs.
        self._process = subprocess.Popen(
            command,
            env=dict(environ),
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            pass_fds=pass_fds,
            start_new_session=True,
            preexec_fn=end_with_parent(),
        )
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        self.streams = {
            pipe.fileno(): Stream(pipe.fileno(), target, f"[{tag}] ", put)
            for pipe, target in ((self._process.stdout, 1), (self._process.stderr, 2))
        }

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def stdin(self) -> int:
        """The writing end of its standard input, of a child that was started with a pipe there."""
        assert self._process.stdin is not None
        return self._process.stdin.fileno()

    @property
    def returncode(self) -> int | None:
        """The exit code, or minus the number of the signal that killed it; None until `reap` is True."""
        return self._process.returncode

    def reap(self) -> bool:
        """Whether the process has exited; never waits."""
        return self._process.poll() is not None

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the process and all others of its group, unless it has been reaped."""
        # A reaped leader's number may already be a stranger's.
        if self._process.returncode is None:
            with contextlib.suppress(PermissionError):  # it runs as another user now
                os.killpg(self.pid, number)

    def close_stream(self, fd: int) -> None:
        del self.streams[fd]
        for pipe in (self._process.stdout, self._process.stderr):
            if pipe is not None and not pipe.closed and pipe.fileno() == fd:
                pipe.close()

    def describe_exit(self) -> str:
        code = self._process.returncode
        if code is None:
            return f"{self.name} is running"
        if code >= 0:
            return f"{self.name} exited with code {code}"
        return f"{self.name} was killed by signal {-code} ({signal.Signals(-code).name})"

    def was_killed(self) -> bool:
        """Whether a signal has ended it, or what it ran for us if it is a shell: it could not say why."""
        return self.shell_code() > 128

    def shell_code(self) -> int:
        """The exit code as a shell reports it: 128 + n for signal n."""
        code = self._process.returncode
        assert code is not None
        return code if code >= 0 else 128 - code


def end_with_parent() -> Callable[[], None]:
    """Return a function that runs in the child before exec: SIGTERM it when the launcher dies.

    The guardian does this better, and for grandchildren too; this one still works when both are killed.
    """
    prctl = ctypes.CDLL(None).prctl
    parent = os.getpid()

    def set_death_signal() -> None:
        prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)
        if os.getppid() != parent:  # the launcher died before the call
            os._exit(1)

    return set_death_signal
