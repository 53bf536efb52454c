"""Where the servers of a job are: from arguments, a launcher's variables, or the scheduler of a DMLC job."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvtrainer.common.env import ROLE, Topology, read_topology_from_env, text_of
from kvtrainer.jobs import dmlc


def find_topology(
    environ: Mapping[str, str],
    *,
    rank: int | None = None,
    num_workers: int | None = None,
    servers: str | Sequence[str] | None = None,
    connect_timeout: float | None = None,
    dead_after: float | None = None,
) -> Topology:
    """Return the topology as `read_topology_from_env` does, or ask the scheduler that MXNet's launcher starts.

    The scheduler is asked if DMLC_ROLE is set and nothing else names the servers. Blocks until all processes are there,
    up to `connect_timeout` seconds. In a scheduler or server process this does not return; see `serve_dmlc_role`.

    Raises:
        ConfigurationError: A value is missing, wrong or contradictory.
        ConnectTimeoutError: A process or the scheduler is missing.
        SystemExit: This process was the scheduler or a server, and its job is over.
    """
    if not text_of(environ, ROLE):
        return read_topology_from_env(environ, rank=rank, num_workers=num_workers, servers=servers)
    return dmlc.find_dmlc_topology(environ, rank, num_workers, servers, connect_timeout, dead_after)


def serve_role(environ: Mapping[str, str]) -> None:
    """Serve until the job is over if DMLC_ROLE is scheduler or server. In other processes return at once.

    A process with a rank, by argument or KVSTORE_RANK, is a worker whatever DMLC_ROLE says.

    Raises:
        SystemExit: The job is over. The code is 0, or that of a server that failed.
        ConfigurationError: The process cannot take this role.
        ConnectTimeoutError: A process of the job is missing.
    """
    if text_of(environ, ROLE):
        dmlc.serve_dmlc_role(environ)
