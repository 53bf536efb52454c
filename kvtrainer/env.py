"""The topology of a job, and its time limits, as read from options and environment variables.

A worker has to know three things: which worker it is, how many there are, and where the servers listen. An
option given in code wins over the environment; what neither of them says is an error, never a guess. Nothing
here opens a socket, and the environment is an argument, so nothing is read on import.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from kvstore_server.errors import ConfigurationError

RANK = "KVSTORE_RANK"
NUM_WORKERS = "KVSTORE_NUM_WORKERS"
SERVERS = "KVSTORE_SERVERS"

TIMEOUT = "KVSTORE_TIMEOUT"
"""Longest wait for a round, a pull or a barrier."""
CONNECT_TIMEOUT = "KVSTORE_CONNECT_TIMEOUT"
"""Longest wait for the first answer of a server."""
DEAD_AFTER = "KVSTORE_DEAD_AFTER"
"""A peer that was not heard from for this long counts as dead."""

DEFAULT_SECONDS = {TIMEOUT: 600.0, CONNECT_TIMEOUT: 30.0, DEAD_AFTER: 20.0}

_Given = TypeVar("_Given")
_ADDRESS = re.compile(r"(?:tcp://)?(?P<host>[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.%A-Za-z]+\]):(?P<port>[0-9]{1,5})")


@dataclass(frozen=True)
class Topology:
    """Which worker this process is, among how many, and the addresses of the servers by their index."""

    rank: int
    num_workers: int
    servers: tuple[str, ...]


def read_topology(
    environ: Mapping[str, str],
    *,
    rank: int | None = None,
    num_workers: int | None = None,
    servers: str | Sequence[str] | None = None,
) -> Topology:
    """Return the topology; each part comes from its argument if given, else from `environ`.

    The variables are KVSTORE_RANK, KVSTORE_NUM_WORKERS and KVSTORE_SERVERS (comma-separated `tcp://host:port`;
    a bare `host:port` means tcp). An empty variable counts as missing.

    Raises:
        ConfigurationError: a part is missing, no number or out of range, or an address malformed or repeated.
    """
    own = _read_int(environ, RANK, "rank", rank)
    count = _read_int(environ, NUM_WORKERS, "num_workers", num_workers)
    if count < 1:
        raise ConfigurationError(f"num_workers ({NUM_WORKERS}) is {count}; a job has at least 1 worker")
    if not 0 <= own < count:
        raise ConfigurationError(
            f"rank ({RANK}) is {own}; with num_workers ({NUM_WORKERS}) {count} it must lie in 0..{count - 1}"
        )
    listed = _pick(environ, SERVERS, "servers", servers)
    return Topology(own, count, _parse_servers(listed))


def parse_address(text: str) -> str:
    """Return `text`, a `tcp://host:port` or bare `host:port`, as `tcp://host:port` with a lower-case host.

    Raises:
        ConfigurationError: any other scheme, no host, or no port in 1..65535. An IPv6 host needs brackets.
    """
    match = _ADDRESS.fullmatch(text.strip()) if isinstance(text, str) else None
    if match is None or not 1 <= int(match["port"]) <= 65535:
        raise ConfigurationError(
            f"{text!r} is not the address of a server; write tcp://HOST:PORT with a port in 1..65535, "
            "and an IPv6 host in brackets, as in tcp://[::1]:5555"
        )
    return f"tcp://{match['host'].lower()}:{int(match['port'])}"


def read_timeout(
    environ: Mapping[str, str], name: str, default: float | None = None, *, value: float | None = None
) -> float:
    """Return a time limit in seconds: `value` if given, else the variable `name`, else `default`.

    Without `default`, that of DEFAULT_SECONDS holds; `name` must be listed there then.

    Raises:
        ConfigurationError: the limit is not a finite number above 0.
    """
    source: object = value if value is not None else environ.get(name, "").strip()
    if source == "":
        return DEFAULT_SECONDS[name] if default is None else default
    try:
        seconds = float(source)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise ConfigurationError(f"{name} is {source!r}; it must be a number of seconds above 0")
    return seconds


def _parse_servers(listed: str | Sequence[str]) -> tuple[str, ...]:
    if not isinstance(listed, Sequence):
        raise ConfigurationError(
            f"servers ({SERVERS}) is {listed!r:.80}; it must be a list of tcp://HOST:PORT, or a string with commas "
            "between them"
        )
    parts = listed.split(",") if isinstance(listed, str) else list(listed)
    addresses = tuple(parse_address(part) for part in parts)
    if not addresses:
        raise ConfigurationError(
            f"the list of servers ({SERVERS}) is empty; it needs at least one tcp://HOST:PORT"
        )
    for i, address in enumerate(addresses):
        first = addresses.index(address)
        if first != i:
            raise ConfigurationError(f"servers {first} and {i} ({SERVERS}) have the same address {address}")
    return addresses


def _read_int(environ: Mapping[str, str], variable: str, option: str, given: int | None) -> int:
    value = _pick(environ, variable, option, given)
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if isinstance(value, str) and re.fullmatch(r"-?[0-9]{1,18}", value):
        return int(value)
    raise ConfigurationError(f"{option} ({variable}) is {value!r:.80}; it must be a whole number")


def _pick(environ: Mapping[str, str], variable: str, option: str, given: _Given | None) -> _Given | str:
    if given is not None:
        return given
    text = environ.get(variable, "").strip()
    if not text:
        raise ConfigurationError(
            f"{variable} is not set and no {option} was given. Either start the workers with "
            f"'kvlaunch -n WORKERS -s SERVERS -- COMMAND', which sets it, or set {RANK}, {NUM_WORKERS} and "
            f"{SERVERS} yourself or pass rank=, num_workers= and servers="
        )
    return text
