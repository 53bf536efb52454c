"""Host files, and which process of a job runs on which host.

Workers: every host, in the order of the file, takes as many consecutive ranks as it has slots (1 unless the file says
otherwise); when all slots are taken, the first host is next again. Servers: one per host in the order of the file,
whatever its slots, then again from the first.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Sequence
from dataclasses import dataclass

from kvstore_server.errors import ConfigurationError

MAX_SLOTS = 4096
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
        """What ssh is told."""
        return f"{self.user}@{self.name}" if self.user else self.name

    @property
    def is_loopback(self) -> bool:
        """Whether this is the launcher's own machine by the name that only that machine has for itself."""
        return _is_loopback(self.name) if _is_numeric(self.name) else self.name.lower() == "localhost"


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
    """The host of each rank."""
    slots = [host for host in hosts for _ in range(host.slots)]
    return [slots[rank % len(slots)] for rank in range(count)]


def place_servers(hosts: Sequence[Host], count: int) -> list[Host]:
    """The host of each server, by its index."""
    return [hosts[index % len(hosts)] for index in range(count)]


def bind_addresses(servers: Sequence[Host], is_public: bool) -> list[str]:
    """Where each server listens, as tcp://address:0, so that all hosts of the job reach it.

    Args:
        servers: Their hosts.
        is_public: Whether any process of the job runs on another machine than the launcher's.

    Raises:
        ConfigurationError: the address of a host cannot be found, or is one that other hosts cannot reach.
    """
    return [f"tcp://{_bracketed(_address_of(host) if is_public else '127.0.0.1')}:0" for host in servers]


def _address_of(host: Host) -> str:
    try:
        address = str(socket.getaddrinfo(host.name, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        raise ConfigurationError(
            f"cannot find the address of host {host.name}: {error}; write its address into the host file"
        ) from None
    if _is_loopback(address):
        raise ConfigurationError(
            f"host {host.name} has the address {address} here, which other hosts cannot reach; write the address into "
            "the host file under which they do"
        )
    return address


def _is_numeric(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def _bracketed(address: str) -> str:
    return f"[{address}]" if ":" in address else address
