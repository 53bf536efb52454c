"""Jobs on several hosts: host files, which process runs on which host, and how it is started there over ssh.

Workers: every host, in the order of the file, takes as many consecutive ranks as it has slots (1 unless the file says
otherwise); when all slots are taken, the first host is next again. Servers: one per host in the order of the file,
whatever its slots, then again from the first.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from kvstore_server.check import is_loopback
from kvstore_server.errors import ConfigurationError
from kvtrainer.env import numeric_host, tcp_address
from kvtrainer.launcher.guardian import KILL, TERMINATE
from kvtrainer.launcher.processes import Child

MAX_SLOTS = 4096
_OPTIONS = ("BatchMode=yes", "ConnectTimeout=10", "ServerAliveInterval=15", "ServerAliveCountMax=3")
_PASSED = ("KVSTORE_", "MALLOC_")
_PASSED_NAMES = ("OMP_NUM_THREADS", "PYTHONUNBUFFERED")
# A name never begins with a dash, which ssh would take for an option.
_LINE = re.compile(
    r"(?P<user>[A-Za-z0-9_][A-Za-z0-9_.-]*@)?(?P<name>[A-Za-z0-9_][A-Za-z0-9_.-]*|\[[0-9A-Fa-f:.]+\])"
    r"(?:\s+slots\s*=\s*(?P<slots>[0-9]+)|:(?P<number>[0-9]+))?"
)


@dataclass(frozen=True)
class Host:
    """One line of a host file: the user to log in as, if any is named, the host, and its slots for workers."""

    user: str
    name: str
    slots: int

    @property
    def target(self) -> str:
        """The destination, as ssh is given it."""
        return f"{self.user}@{self.name}" if self.user else self.name


def parse_hosts(text: str, path: str) -> list[Host]:
    """Return the hosts of a file of `path` that has this text, in order; a host may have several lines.

    Each line is `HOST`, `HOST slots=N` or `HOST:N`, where HOST may be `USER@HOST` and an IPv6 address is in brackets;
    `#` begins a comment.

    Raises:
        ConfigurationError: a line is none of these, or there is no host at all.
    """
    hosts = []
    for number, line in enumerate(text.splitlines(), 1):
        stripped = line.partition("#")[0].strip()
        if not stripped:
            continue
        match = _LINE.fullmatch(stripped)
        slots = int((match["slots"] or match["number"] or "1")[:9]) if match else 0
        if match is None or not 1 <= slots <= MAX_SLOTS:
            raise ConfigurationError(
                f"{path}, line {number}: {stripped!r:.80} is not HOST, HOST slots=N or HOST:N with N in 1..{MAX_SLOTS}"
            )
        hosts.append(Host((match["user"] or "").rstrip("@"), match["name"].strip("[]"), slots))
    if not hosts:
        raise ConfigurationError(f"{path} names no host; write one per line")
    return hosts


def place_workers(hosts: Sequence[Host], count: int) -> list[Host]:
    """Return the host of each rank."""
    slots = [host for host in hosts for _ in range(host.slots)]
    return [slots[rank % len(slots)] for rank in range(count)]


def place_servers(hosts: Sequence[Host], count: int) -> list[Host]:
    """Return the host of each server, by its index."""
    return [hosts[index % len(hosts)] for index in range(count)]


def bind_addresses(servers: Sequence[Host], is_public: bool) -> list[str]:
    """Return the address on which each server listens, tcp://host:0, so that all hosts of the job reach it.

    Args:
        servers: Their hosts.
        is_public: Whether any process of the job runs on another machine than the launcher's.

    Raises:
        ConfigurationError: the address of a host cannot be found, or is one that other hosts cannot reach.
    """
    addresses = [numeric_host(host.name) if is_public else "127.0.0.1" for host in servers]
    for host, address in zip(servers, addresses, strict=True):
        if is_public and is_loopback(address):
            raise ConfigurationError(
                f"host {host.name} has the address {address} here, which other hosts cannot reach; write the address "
                "into the host file under which they do"
            )
    return [tcp_address(address, 0) for address in addresses]


@dataclass(frozen=True)
class Remote:
    """The hosts of a job's processes, and the commands that start them there.

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
    ssh: Sequence[str] = ("ssh",)
    names: Sequence[str] = ()
    directory: str = field(default_factory=os.getcwd)

    def host_of(self, role: str, index: int) -> Host:
        """Return the host of a worker or server."""
        return (self.workers if role == "worker" else self.servers)[index]

    def command(self, role: str, index: int, command: Sequence[str], environ: Mapping[str, str]) -> list[str]:
        """Return the ssh command that runs a worker or server; cores are divided among the workers of a host."""
        host = self.host_of(role, index)
        share = sum(other.target == host.target for other in self.workers) if role == "worker" else 0
        passed = [
            f"{name}={value}"
            for name, value in environ.items()
            if name.startswith(_PASSED) or name in _PASSED_NAMES or name in self.names
        ]
        program = [sys.executable, "-m", "kvtrainer.launcher.guardian"]
        guardian = [*program, "--grace", f"{self.grace:g}", "--share", str(share), "--"]
        line = shlex.join(["env", *passed, *guardian, *command])
        options = [part for option in _OPTIONS for part in ("-o", option)]
        return [*self.ssh, *options, host.target, f"cd {shlex.quote(self.directory)} && exec {line}"]


class RemoteChild(Child):
    """The local end of a process on another host: signals travel over its standard input."""

    stdin_kind = subprocess.PIPE
    _was_killed = False

    def signal(self, number: signal.Signals) -> None:
        """Pass SIGTERM or SIGKILL on; where SIGKILL was passed on before, end the connection itself."""
        if self.returncode is None and number == signal.SIGKILL and self._was_killed:
            super().signal(number)
        elif self.returncode is None:
            self._was_killed = number == signal.SIGKILL
            assert self.process.stdin is not None
            with suppress(OSError):  # the connection has ended
                os.write(self.process.stdin.fileno(), KILL if number == signal.SIGKILL else TERMINATE)

    def describe_exit(self) -> str:
        text = super().describe_exit()
        return f"{text} (which ssh also uses if it cannot connect)" if self.returncode == 255 else text
