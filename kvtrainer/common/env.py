"""A job's topology and time limits, read from options and environment variables.

A worker needs three things: its rank, the number of workers, and the servers' addresses. Options given in code override
the environment. What neither gives is an error, never a guess. Only a job of MXNet's launcher has to ask a scheduler
over a socket; see `kvtrainer.jobs.dmlc`.

Rank and number of workers always come from the same launcher: SOURCES lists launchers by precedence, and the first one
with any variable set gives both. A job may run inside another one (kvlaunch inside a Slurm step, for example), and
mixing their numbers would go wrong silently.

Invariants: the environment is an argument and nothing is read on import. An empty variable counts as unset.
"""

from __future__ import annotations

import math
import os
import re
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from kvstore_server import log_limit, processes
from kvstore_server.engine.views import check_backup_workers
from kvstore_server.restarts import RESTARTS
from kvtrainer.errors import ConfigurationError, file_error

RANK = "KVSTORE_RANK"
NUM_WORKERS = "KVSTORE_NUM_WORKERS"
ELASTIC = "KVSTORE_ELASTIC"
"""MIN..MAX: how many workers a job may have after it has begun with KVSTORE_NUM_WORKERS."""
BACKUP_WORKERS = "KVSTORE_BACKUP_WORKERS"
"""How many workers each step may do without, the slowest ones; with KVSTORE_ELASTIC."""
SERVERS = "KVSTORE_SERVERS"
LOCAL_RANK = "KVSTORE_LOCAL_RANK"
"""Rank of this worker among those of its host."""
ATTEMPT = "KVSTORE_ATTEMPT"
"""How often the job was restarted. Servers may still wait for workers of the previous attempt."""
ROLE = "DMLC_ROLE"
"""Set by MXNet's launcher, which also starts a scheduler and servers."""

TIMEOUT = "KVSTORE_TIMEOUT"
"""Longest wait for a round, a pull or a barrier."""
CONNECT_TIMEOUT = "KVSTORE_CONNECT_TIMEOUT"
"""Longest wait for a server's first answer."""
DEAD_AFTER = "KVSTORE_DEAD_AFTER"
"""A peer that is silent for this long counts as dead."""

REJOIN_TIMEOUT = "KVSTORE_REJOIN_TIMEOUT"
"""A process that takes over the rank of a lost worker is awaited for so long; servers read it."""

STATE_DIR, SNAPSHOT_EVERY = "KVSTORE_STATE_DIR", "KVSTORE_SNAPSHOT_EVERY"
"""The directory of snapshots, and after how many rounds one is taken; servers read them."""

SLOW_AFTER = "KVSTORE_SLOW_AFTER"
"""Waits for other workers that take longer than this are logged, with their names."""

TRANSPORT = "KVSTORE_TRANSPORT"
"""How data travel to servers and ranks of the same host: one of TRANSPORTS."""
TRANSPORTS = ("auto", "shm", "tcp")
"""Shared memory where possible; always; never."""

CAPTURE = "KVSTORE_CAPTURE"
"""0: rounds that repeat are not captured; each takes the general path, to the same bits."""

PROGRESS = "KVSTORE_PROGRESS"
"""1: show progress although standard error is not a terminal. kvlaunch sets it if its own is one."""

WORKER_MEMORY = "KVSTORE_WORKER_MEMORY"
"""Path of a file in memory that outlives the processes of a worker."""
LOG = "KVSTORE_LOG"
"""debug: one line for each message and each transition of a round. Servers know more levels."""
LOG_LEVELS = ("debug", "info", "warning", "error")

DEFAULT_SECONDS = {
    TIMEOUT: 600.0,
    CONNECT_TIMEOUT: 30.0,
    DEAD_AFTER: processes.DEAD_AFTER,
    SLOW_AFTER: log_limit.SLOW_AFTER,
}

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
"""Identifies the running kernel until the next boot."""

_ADDRESS = re.compile(r"(?:tcp://)?(?P<host>[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.%A-Za-z]+\]):(?P<port>[0-9]{1,5})")


@dataclass(frozen=True)
class LauncherEnv:
    """A launcher and the variables in which it passes a process's place."""

    launcher: str
    ranks: tuple[str, ...]
    """Variables with the rank. The first one that is set counts."""
    count: str
    """Variable with the number of workers; empty if the launcher has none."""
    local: str = ""
    """Variable with the rank on the host; empty if the launcher has none."""
    attempt: str = ""
    """Variable that counts restarts of the job; empty if the launcher has none."""

    def rank_in(self, environ: Mapping[str, str]) -> tuple[str, str]:
        name = next((name for name in self.ranks if text_of(environ, name)), self.ranks[0])
        return name, text_of(environ, name)

    def found_in(self, environ: Mapping[str, str]) -> str:
        names = [name for name in (*self.ranks, self.count) if text_of(environ, name)]
        return ", ".join(f"{name}={text_of(environ, name)[:40]!r}" for name in names)


SOURCES = (
    LauncherEnv("kvlaunch", (RANK,), NUM_WORKERS, LOCAL_RANK, ATTEMPT),
    LauncherEnv("MXNet's launcher", ("DMLC_WORKER_ID", "DMLC_RANK", "DMLC_TASK_ID"), "DMLC_NUM_WORKER"),
    LauncherEnv("torchrun", ("RANK",), "WORLD_SIZE", "LOCAL_RANK", "TORCHELASTIC_RESTART_COUNT"),
    # Before Slurm, because with mpirun in a batch script all processes inherit the script's place in Slurm.
    LauncherEnv("Open MPI", ("OMPI_COMM_WORLD_RANK",), "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    LauncherEnv("Slurm", ("SLURM_PROCID",), "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_RESTART_COUNT"),
    LauncherEnv("MPI", ("PMI_RANK",), "PMI_SIZE", "MPI_LOCALRANKID"),
    LauncherEnv("PMIx", ("PMIX_RANK",), ""),
)
"""By precedence. The first launcher with any variable set gives both rank and number of workers."""

_MORE_PLACES = (
    "NOTIFY_SOCKET", "FDSTORE", "LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES",
    SERVERS, ROLE, RESTARTS, WORKER_MEMORY, ELASTIC, BACKUP_WORKERS, "DMLC_SERVER_ID",
    "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_WORLD_SIZE",
    "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_USE_AGENT_STORE", "SLURM_NODEID",
    "OMPI_COMM_WORLD_LOCAL_SIZE", "OMPI_COMM_WORLD_NODE_RANK", "MPI_LOCALNRANKS",
)  # fmt: skip
PLACES = frozenset(_MORE_PLACES).union(
    *({*source.ranks, source.count, source.local} - {""} for source in SOURCES)
)
"""Variables with a process's place in a job, and of its supervisor, which processes of another job must not inherit."""


@dataclass(frozen=True)
class Topology:
    """A worker's rank, the number of workers, and the servers' addresses by index.

    `elastic` has the least and the most workers, if the number may change; a job then begins with `num_workers`. Of
    these a step may do without `backup_workers`.
    """

    rank: int
    num_workers: int
    servers: tuple[str, ...]
    elastic: tuple[int, int] | None = None
    backup_workers: int = 0

    def as_variables(self, local_rank: int) -> dict[str, str]:
        """Return it as environment variables of a worker. Without servers, KVSTORE_SERVERS is left out."""
        place = {RANK: self.rank, NUM_WORKERS: self.num_workers, LOCAL_RANK: local_rank}
        servers = {SERVERS: ",".join(self.servers)} if self.servers else {}
        elastic = {ELASTIC: "{}..{}".format(*self.elastic)} if self.elastic is not None else {}
        backup = {BACKUP_WORKERS: str(self.backup_workers)} if self.backup_workers else {}
        return {**{name: str(number) for name, number in place.items()}, **servers, **elastic, **backup}


def read_topology_from_env(
    environ: Mapping[str, str],
    *,
    rank: int | None = None,
    num_workers: int | None = None,
    servers: str | Sequence[str] | None = None,
) -> Topology:
    """Return the topology. Each part comes from its argument if given, else from `environ`.

    Rank and number of workers come from the first launcher of SOURCES with any variable set. KVSTORE_SERVERS has
    comma-separated `tcp://host:port` (`host:port` means tcp), or `@PATH`, a file with one address per line.

    Raises:
        ConfigurationError: A part is missing, not a number or out of range, or an address is malformed or repeated.
    """
    own, count = read_place_from_env(environ, rank, num_workers)
    listed = read_servers_from_env(environ, servers)
    if listed is None:
        raise ConfigurationError(f"{SERVERS} is not set and no servers were given. {_ADVICE}")
    elastic = read_elastic_from_env(environ)
    if elastic is not None and not elastic[0] <= count <= elastic[1]:
        raise ConfigurationError(
            f"num_workers ({NUM_WORKERS}) is {count}; with {ELASTIC} {elastic[0]}..{elastic[1]} a job begins with a "
            "number in between"
        )
    return Topology(own, count, listed, elastic, read_backup_workers(environ, elastic, count))


def read_backup_workers(environ: Mapping[str, str], elastic: tuple[int, int] | None, num_workers: int) -> int:
    """Return how many workers a step may do without (KVSTORE_BACKUP_WORKERS).

    Raises ConfigurationError unless the number of workers may change, and more than as many begin.
    """
    text = text_of(environ, BACKUP_WORKERS)
    number = as_int(text or 0, f"backup_workers ({BACKUP_WORKERS})")
    if number and elastic is None:
        raise ConfigurationError(
            f"backup_workers ({BACKUP_WORKERS}) is {number}, which is for a job whose number of workers may change; "
            f"give that as kvlaunch -n MIN..MAX or {ELASTIC}"
        )
    check_backup_workers(number, num_workers)
    return number


def read_elastic_from_env(environ: Mapping[str, str]) -> tuple[int, int] | None:
    """Return the least and the most workers of a job (KVSTORE_ELASTIC); None if their number does not change."""
    text = text_of(environ, ELASTIC)
    return parse_range(text, ELASTIC) if text else None


def parse_range(text: str, name: str) -> tuple[int, int]:
    """Return MIN and MAX of "MIN..MAX". Raises ConfigurationError if it is no such range."""
    least, dots, most = text.partition("..")
    if not (dots and least.isdecimal() and most.isdecimal() and 1 <= int(least) <= int(most)):
        raise ConfigurationError(f"{name} is {text!r:.80}; it must be MIN..MAX workers, such as 2..8")
    return int(least), int(most)


def read_place_from_env(
    environ: Mapping[str, str], rank: int | None, num_workers: int | None
) -> tuple[int, int]:
    """Return the rank and the number of workers: as given, else from the variables of the launcher that is found.

    Raises:
        ConfigurationError: One of them is missing or not an integer, or the rank is not below the number.
    """
    is_said = rank is not None and num_workers is not None
    source = SOURCES[0] if is_said else _find_launcher(environ) or SOURCES[0]
    (rank_name, rank_text), count_name = source.rank_in(environ), source.count
    count_text = text_of(environ, count_name)
    if rank is None and not rank_text:
        raise ConfigurationError(_missing_variable_message(environ, source, rank_name, "rank"))
    if num_workers is None and not count_text:
        raise ConfigurationError(_missing_variable_message(environ, source, count_name, "num_workers"))
    own = as_int(rank_text if rank is None else rank, f"rank ({rank_name})")
    count = as_int(count_text if num_workers is None else num_workers, f"num_workers ({count_name})")
    if count < 1:
        raise ConfigurationError(f"num_workers ({count_name}) is {count}; a job has at least 1 worker")
    elastic = read_elastic_from_env(environ)
    most, what = (
        (count, f"num_workers ({count_name})") if elastic is None else (elastic[1], f"{ELASTIC} up to")
    )
    if not 0 <= own < most:
        raise ConfigurationError(
            f"rank ({rank_name}) is {own}; with {what} {most} it must lie in 0..{most - 1}"
        )
    return own, count


def read_servers_from_env(
    environ: Mapping[str, str], servers: str | Sequence[str] | None = None
) -> tuple[str, ...] | None:
    """Return the addresses of the servers: as given, else from KVSTORE_SERVERS; None if neither names any.

    Args:
        servers: Addresses, or a string of them, separated by commas; `@FILE` reads one a line from a file.

    Raises:
        ConfigurationError: The list is empty, names a server twice, or has something that is no tcp://HOST:PORT.
    """
    listed = text_of(environ, SERVERS) or None if servers is None else servers
    if listed is None:
        return None
    if not isinstance(listed, Sequence):
        raise ConfigurationError(
            f"servers ({SERVERS}) is {listed!r:.80}; it must be a list of tcp://HOST:PORT, or a comma-separated string"
        )
    if isinstance(listed, str):
        listed = _read_lines(listed[1:]) if listed.startswith("@") else listed.split(",")
    addresses = tuple(map(parse_address, listed))
    if not addresses:
        raise ConfigurationError(
            f"the list of servers ({SERVERS}) is empty; it needs at least one tcp://HOST:PORT"
        )
    for i, address in enumerate(addresses):
        first = addresses.index(address)
        if first != i:
            raise ConfigurationError(f"servers {first} and {i} ({SERVERS}) have the same address {address}")
    return addresses


def workers_from_env(environ: Mapping[str, str]) -> tuple[int, str] | None:
    """Return the number of workers and its variable, if a launcher also gives this process a rank."""
    source = _find_launcher(environ)
    if source is None or not source.rank_in(environ)[1]:
        return None
    text = text_of(environ, source.count)
    return (int(text), source.count) if re.fullmatch("[0-9]{1,18}", text) else None


def local_rank_from_env(environ: Mapping[str, str], rank: int | None = None) -> int:
    """Return this process's rank on its host, preferably from the launcher that gives the rank; else the rank or 0."""
    source = _find_launcher(environ)
    told = [text_of(environ, one.local) for one in ((source,) if source else ()) + SOURCES]
    worker = (source.rank_in(environ)[1] if source else "") if rank is None else str(rank)
    return next((int(text) for text in (*told, worker) if text.isdecimal()), 0)


def attempt_from_env(environ: Mapping[str, str]) -> int:
    """Return how often the job was restarted, by KVSTORE_ATTEMPT or the launcher; else 0. Raises ConfigurationError.

    torchrun on several hosts is ignored: it counts restarts by host, and workers with different numbers would not meet.
    """
    source = _find_launcher(environ) or SOURCES[0]
    name = ATTEMPT if text_of(environ, ATTEMPT) else source.attempt
    if not text_of(environ, name):
        return 0
    if name == "TORCHELASTIC_RESTART_COUNT" and text_of(environ, "GROUP_WORLD_SIZE") not in ("", "1"):
        return 0
    number = as_int(text_of(environ, name), f"the number of the attempt ({name})")
    if number < 0:
        raise ConfigurationError(f"the number of the attempt ({name}) is {number}; it counts restarts from 0")
    return number


def restarts_from_env(environ: Mapping[str, str]) -> int:
    """Return how often this process alone was started again (KVSTORE_RESTARTS). Raises ConfigurationError."""
    text = text_of(environ, RESTARTS)
    number = as_int(text, f"the number of restarts ({RESTARTS})") if text else 0
    if number < 0:
        raise ConfigurationError(f"the number of restarts ({RESTARTS}) is {number}; it counts from 0")
    return number


def parse_address(text: str) -> str:
    """Return an address as `tcp://host:port` in lower case. A bare `host:port` is accepted.

    Raises:
        ConfigurationError: Another scheme, no host, or no port in 1..65535. IPv6 hosts need brackets.
    """
    match = _ADDRESS.fullmatch(text.strip()) if isinstance(text, str) else None
    if match is None or not 1 <= int(match["port"]) <= 65535:
        raise ConfigurationError(
            f"{text!r} is not the address of a server; write tcp://HOST:PORT with a port in 1..65535, "
            "and an IPv6 host in brackets, as in tcp://[::1]:5555"
        )
    return f"tcp://{match['host'].lower()}:{int(match['port'])}"


def tcp_address(host: str, port: int) -> str:
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def read_timeout(environ: Mapping[str, str], name: str, *, value: float | None = None) -> float:
    """Return a timeout in seconds: `value` if given, else the variable `name`, else its entry of DEFAULT_SECONDS.

    Raises:
        ConfigurationError: It is not a finite number above 0.
    """
    source: object = text_of(environ, name) if value is None else value
    if source == "":
        return DEFAULT_SECONDS[name]
    try:
        seconds = float(source)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise ConfigurationError(f"{name} is {source!r}; it must be a number of seconds above 0")
    return seconds


def name_host() -> str:
    """Identify this host by kernel and network namespace, which Unix sockets have to share. Raises OSError."""
    return BOOT_ID.read_text().strip() + os.readlink("/proc/self/ns/net")


def numeric_host(host: str) -> str:
    """Return the numeric address of a host. Raises ConfigurationError if its name cannot be resolved."""
    try:
        return str(socket.getaddrinfo(host.strip("[]"), None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        raise ConfigurationError(
            f"cannot find the address of host {host}: {error}; give its address instead of its name"
        ) from None


def host_towards(address: str) -> str:
    """Return this machine's address on the route to tcp://host:port. Sends nothing. Raises ConfigurationError."""
    parts = urlsplit(address)
    target = numeric_host(parts.hostname or "")
    family = socket.AF_INET6 if ":" in target else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((target, parts.port or 1))
            return str(probe.getsockname()[0])
        except OSError as error:
            raise ConfigurationError(f"there is no route to {address}: {error}") from None


def text_of(environ: Mapping[str, str], name: str) -> str:
    return environ.get(name, "").strip() if name else ""


def transport_from_env(environ: Mapping[str, str]) -> str:
    """Return KVSTORE_TRANSPORT, "auto" by default. Raises ConfigurationError for an unknown value."""
    found = text_of(environ, TRANSPORT) or "auto"
    if found == "ipc":
        raise ConfigurationError(
            f"{TRANSPORT}=ipc is no longer supported; use auto, which sends through shared memory on one host, or tcp"
        )
    if found not in TRANSPORTS:
        raise ConfigurationError(f"{TRANSPORT} is {found!r:.40}; it must be one of {', '.join(TRANSPORTS)}")
    return found


def captures_rounds(environ: Mapping[str, str]) -> bool:
    """Return whether KVSTORE_CAPTURE allows it. Raises ConfigurationError for an unknown value."""
    found = text_of(environ, CAPTURE) or "1"
    if found not in ("0", "1"):
        raise ConfigurationError(f"{CAPTURE} is {found!r:.40}; it must be 1, or 0 for no captured rounds")
    return found == "1"


def shows_debug_log(environ: Mapping[str, str]) -> bool:
    """Return whether KVSTORE_LOG asks for debug lines. Raises ConfigurationError for an unknown level."""
    level = text_of(environ, LOG)
    if level and level.lower() not in LOG_LEVELS:
        raise ConfigurationError(f"{LOG} is {level!r:.40}; it must be one of {', '.join(LOG_LEVELS)}")
    return level.lower() == "debug"


def as_int(value: object, what: str) -> int:
    """Return a number given as int or text. Raises ConfigurationError, in which `what` names the number."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if isinstance(value, str) and re.fullmatch(r"-?[0-9]{1,18}", value):
        return int(value)
    raise ConfigurationError(f"{what} is {value!r:.80}; it must be a whole number")


_ADVICE = (
    f"Either start the workers with 'kvlaunch -n WORKERS -s SERVERS -- COMMAND', which sets it, or set {RANK}, "
    f"{NUM_WORKERS} and {SERVERS} yourself or pass rank=, num_workers= and servers= (torchrun, Slurm and MPI tell "
    "workers the first two only)"
)


def _missing_variable_message(environ: Mapping[str, str], source: LauncherEnv, name: str, option: str) -> str:
    found = source.found_in(environ)
    if not found:
        return f"{name} is not set and no {option} was given. {_ADVICE}"
    absent = f"{name} is not set" if name else f"{source.launcher} does not tell the number of workers"
    text = (
        f"{absent}, although {found} was found ({source.launcher}), and no {option} was given; both numbers come from "
        f"one launcher, so that two are never mixed. Set {RANK} and {NUM_WORKERS}, or pass {option}="
    )
    if source.launcher == "kvlaunch":
        text += ". 'kvlaunch -n WORKERS -s SERVERS -- COMMAND' sets both"
    others = [f"{told} ({s.launcher})" for s in SOURCES if s is not source and (told := s.found_in(environ))]
    return text + (f". Found, but not used: {'; '.join(others)}" if others else "")


def _find_launcher(environ: Mapping[str, str]) -> LauncherEnv | None:
    return next((source for source in SOURCES if source.found_in(environ)), None)


def _read_lines(path: str) -> list[str]:
    """Read the lines of a file, without comments (`#`) and empty lines."""
    try:
        with open(path, encoding="utf-8") as file:
            lines = [line.partition("#")[0].strip() for line in file]
    except (OSError, ValueError) as error:
        text = f"cannot read the list of servers ({SERVERS}) from {path!r}: {error}"
        raise file_error(ConfigurationError, text, error, path) from None
    return [line for line in lines if line]
