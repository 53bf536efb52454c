"""Where the servers of a job are: from arguments, launchers and DMLC's variables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvtrainer.common.env import ROLE, Topology, read_topology, text_of
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
    """Return the topology as `read_topology` does, or as the scheduler says it. MXNet's launcher starts that one.

    The scheduler is asked where DMLC_ROLE is set and nothing else names the servers; this blocks until all processes
    are there, up to `connect_timeout` seconds. In a scheduler or a server this does not return: see `serve_role`.

    Raises:
        ConfigurationError: something is missing, wrong or contradictory; says what.
        ConnectTimeoutError: a process, or the scheduler, is missing.
        SystemExit: this process was the scheduler or a server, and its job is over.
    """
    if not text_of(environ, ROLE):
        return read_topology(environ, rank=rank, num_workers=num_workers, servers=servers)
    return dmlc.find_topology(environ, rank, num_workers, servers, connect_timeout, dead_after)


def serve_role(environ: Mapping[str, str]) -> None:
    """Serve until the job is over where DMLC_ROLE is scheduler or server; in other processes return at once.

    A process that is given a rank, by argument or KVSTORE_RANK, is a worker whatever DMLC_ROLE says.

    Raises:
        SystemExit: the job is over; the code is 0, or a server's if that has failed.
        ConfigurationError: the role cannot be played; says why.
        ConnectTimeoutError: a process of the job is missing.
    """
    if text_of(environ, ROLE):
        dmlc.serve_role(environ)
