"""What MXNet's launcher tells a process of a job: its role, how many of each there are, and where they meet."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvstore_server.errors import ConfigurationError
from kvtrainer.env import as_int, parse_address

ROLE = "DMLC_ROLE"
SCHEDULER, SERVER, WORKER = "scheduler", "server", "worker"
_RANKS = {WORKER: ("DMLC_WORKER_ID", "DMLC_RANK"), SERVER: ("DMLC_SERVER_ID", "DMLC_RANK"), SCHEDULER: ()}
"""Variables that say which process of its role this is; the first that is set counts."""
_TASK = "DMLC_TASK_ID"
MAX_PROCESSES = 4096
"""Processes of one role that a job may have."""


@dataclass(frozen=True)
class DmlcJob:
    """One process of a job, as its launcher started it.

    Args:
        role: SCHEDULER, SERVER or WORKER.
        root: Where the scheduler listens, as tcp://host:port.
        rank: Which process of its role this is; None where the launcher does not say.
        task: A number that orders the processes of a role, with gaps; None where the launcher does not say.
        node_host: The address under which others reach this host; empty where the launcher does not say.
    """

    role: str
    root: str
    num_workers: int
    num_servers: int
    rank: int | None
    task: int | None
    node_host: str


def read_dmlc(environ: Mapping[str, str]) -> DmlcJob | None:
    """Return what DMLC_* variables say, None where DMLC_ROLE is not set.

    Raises:
        ConfigurationError: a variable is missing, no number or out of range; says which.
    """
    role = environ.get(ROLE, "").strip()
    if not role:
        return None
    if role not in _RANKS:
        raise ConfigurationError(f"{ROLE} is {role!r}; it must be {SCHEDULER}, {SERVER} or {WORKER}")
    host, port = _need(environ, "DMLC_PS_ROOT_URI"), _need(environ, "DMLC_PS_ROOT_PORT")
    root = parse_address(f"{host}:{port}")
    counts = {WORKER: _count(environ, "DMLC_NUM_WORKER"), SERVER: _count(environ, "DMLC_NUM_SERVER")}
    rank = _first(environ, _RANKS[role])
    if rank is not None and not 0 <= rank[1] < counts[role]:
        raise ConfigurationError(
            f"{rank[0]} is {rank[1]}; a job with {counts[role]} {role}s numbers them 0..{counts[role] - 1}"
        )
    task = _first(environ, (_TASK,)) if role != SCHEDULER else None
    node_host = environ.get("DMLC_NODE_HOST", "").strip()
    return DmlcJob(role, root, counts[WORKER], counts[SERVER], rank and rank[1], task and task[1], node_host)


def _need(environ: Mapping[str, str], name: str) -> str:
    text = environ.get(name, "").strip()
    if not text:
        raise ConfigurationError(
            f"{ROLE} is {environ[ROLE]!r}, but {name} is not set; MXNet's launcher sets DMLC_PS_ROOT_URI, "
            "DMLC_PS_ROOT_PORT, DMLC_NUM_WORKER and DMLC_NUM_SERVER for every process. Set it, or unset "
            f"{ROLE} and use KVSTORE_RANK, KVSTORE_NUM_WORKERS and KVSTORE_SERVERS"
        )
    return text


def _count(environ: Mapping[str, str], name: str) -> int:
    count = as_int(_need(environ, name), name)
    if not 1 <= count <= MAX_PROCESSES:
        raise ConfigurationError(f"{name} is {count}; it must lie in 1..{MAX_PROCESSES}")
    return count


def _first(environ: Mapping[str, str], names: tuple[str, ...]) -> tuple[str, int] | None:
    for name in names:
        text = environ.get(name, "").strip()
        if text:
            return name, as_int(text, name)
    return None
