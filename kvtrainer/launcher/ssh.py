"""Processes of a job on other hosts: a command over ssh, under a guardian there that ends it with the connection."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from kvtrainer.launcher.child import Child
from kvtrainer.launcher.hosts import Host
from kvtrainer.launcher.remote import KILL, TERMINATE

SSH = ("ssh",)
_OPTIONS = ("BatchMode=yes", "ConnectTimeout=10", "ServerAliveInterval=15", "ServerAliveCountMax=3")
_PASSED = ("KVSTORE_", "MALLOC_")
_PASSED_NAMES = ("OMP_NUM_THREADS", "PYTHONUNBUFFERED")


@dataclass(frozen=True)
class Remote:
    """Where the processes of a job run, and how they are started there.

    Args:
        workers, servers: The host of each.
        grace: Seconds between SIGTERM and SIGKILL for what is left when the connection ends.
        ssh: The program, with arguments of its own.
        names: Environment variables that are passed on beside KVSTORE_… and the number of threads.
        directory: Where commands run on every host.
    """

    workers: Sequence[Host]
    servers: Sequence[Host]
    grace: float
    ssh: Sequence[str] = SSH
    names: Sequence[str] = ()
    directory: str = field(default_factory=os.getcwd)

    def of_worker(self, rank: int, command: Sequence[str], environ: Mapping[str, str]) -> list[str]:
        """The ssh command that runs a worker; cores are divided among the workers of its host."""
        host = self.workers[rank]
        here = sum(other.target == host.target for other in self.workers)
        return self._command(host, ["--share", str(here)], command, environ)

    def of_server(
        self, index: int, command: Sequence[str], environ: Mapping[str, str], word: str
    ) -> list[str]:
        """The ssh command that runs a server; it prints `word` and the address when it listens."""
        return self._command(self.servers[index], ["--ready", word], command, environ)

    def _command(
        self, host: Host, flags: Sequence[str], command: Sequence[str], environ: Mapping[str, str]
    ) -> list[str]:
        passed = [f"{name}={value}" for name, value in environ.items() if self._is_passed(name)]
        guardian = [
            sys.executable,
            "-m",
            "kvtrainer.launcher.remote",
            "--grace",
            f"{self.grace:g}",
            *flags,
            "--",
        ]
        line = shlex.join(["env", *passed, *guardian, *command])
        options = [part for option in _OPTIONS for part in ("-o", option)]
        return [*self.ssh, *options, host.target, f"cd {shlex.quote(self.directory)} && exec {line}"]

    def _is_passed(self, name: str) -> bool:
        return name.startswith(_PASSED) or name in _PASSED_NAMES or name in self.names


class RemoteChild(Child):
    """The local end of a process on another host: signals travel over its standard input."""

    def __init__(
        self,
        name: str,
        tag: str,
        command: Sequence[str],
        environ: Mapping[str, str],
        put: Callable[[int, str, bytes], None],
    ) -> None:
        super().__init__(name, tag, command, environ, put, stdin=subprocess.PIPE)
        self._was_killed = False

    def signal(self, number: signal.Signals) -> None:
        """Pass SIGTERM or SIGKILL on; where SIGKILL was passed on before, end the connection itself."""
        if self.returncode is None and number == signal.SIGKILL and self._was_killed:
            super().signal(number)
        elif self.returncode is None:
            self._was_killed = number == signal.SIGKILL
            with suppress(OSError):  # the connection has ended
                os.write(self.stdin, KILL if number == signal.SIGKILL else TERMINATE)

    def describe_exit(self) -> str:
        text = super().describe_exit()
        return f"{text} (which ssh also uses if it cannot connect)" if self.returncode == 255 else text


def without_address(
    word: str, note: Callable[[str], None], put: Callable[[int, str, bytes], None]
) -> Callable[[int, str, bytes], None]:
    """Return a `put` that hands the line which begins with `word` to `note`, and others to `put`."""

    def sort(target: int, tag: str, line: bytes) -> None:
        if line.startswith(word.encode()):
            note(line[len(word) :].decode(errors="replace"))
        else:
            put(target, tag, line)

    return sort
