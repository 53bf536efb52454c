"""The roles of a job that was written for MXNet's launcher, which starts one command in all of its processes.

The role of a process is in DMLC_ROLE. A scheduler or a server does its work where the script creates its store, and
the process ends there; the script behind it is for workers. Nothing happens on import. See `kvtrainer.rendezvous`.
"""

from __future__ import annotations

import os
import secrets
import socket
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn
from urllib.parse import urlsplit

from kvstore_server import cli
from kvstore_server.errors import ConfigurationError
from kvstore_server.server import Server
from kvtrainer.dmlc import ROLE, SCHEDULER, WORKER, DmlcJob, read_dmlc
from kvtrainer.env import (
    CONNECT_TIMEOUT,
    DEAD_AFTER,
    NUM_WORKERS,
    RANK,
    SERVERS,
    Topology,
    read_place,
    read_timeout,
    read_topology,
)
from kvtrainer.rendezvous import messages as m
from kvtrainer.rendezvous import sockets as s
from kvtrainer.rendezvous.attendance import Attendance
from kvtrainer.rendezvous.table import Rendezvous

ALLOW_PUBLIC = "KVSTORE_ALLOW_PUBLIC_BIND"


class Joined:
    """A worker that has met the others; its process says so until it ends."""

    def __init__(self, topology: Topology, presence: s.Presence) -> None:
        self.topology = topology
        # The stores of this process, which are younger, leave the servers before this is called.
        weakref.finalize(self, presence.close)


_joined: dict[tuple[int, str], Joined] = {}
"""A process joins a job once, for all of its stores: by process id, since forks inherit this, and scheduler."""


def find_topology(
    environ: Mapping[str, str],
    *,
    rank: int | None = None,
    num_workers: int | None = None,
    servers: str | Sequence[str] | None = None,
    connect_timeout: float | None = None,
    dead_after: float | None = None,
) -> Topology:
    """Return the topology as `env.read_topology` does, or as the scheduler of a job for MXNet's launcher says it.

    The scheduler is asked where DMLC_ROLE is set and nothing else names the servers; this blocks until all processes
    are there, up to `connect_timeout` seconds. In a scheduler or a server this does not return: see `serve_role`.

    Raises:
        ConfigurationError: something is missing, wrong or contradictory; says what.
        ConnectTimeoutError: a process, or the scheduler, is missing.
        SystemExit: this process was the scheduler or a server, and its job is over.
    """
    serve_role(environ, rank=rank, servers=servers, connect_timeout=connect_timeout, dead_after=dead_after)
    job = read_dmlc(environ) if _asks_for_servers(environ, servers) else None
    if job is None or job.role != WORKER:
        return read_topology(environ, rank=rank, num_workers=num_workers, servers=servers)
    own = _claimed_rank(environ, job, rank, num_workers)
    known = _joined.get((os.getpid(), job.root))
    if known is None:
        known = _join(job, own, _limits(environ, connect_timeout, dead_after)[0])
        _joined[os.getpid(), job.root] = known
    if own is not None and own != known.topology.rank:
        raise ConfigurationError(
            f"this process is worker {known.topology.rank} of its job and cannot be worker {own} as well"
        )
    return known.topology


def serve_role(
    environ: Mapping[str, str],
    *,
    rank: int | None = None,
    servers: str | Sequence[str] | None = None,
    connect_timeout: float | None = None,
    dead_after: float | None = None,
) -> None:
    """In a process whose DMLC_ROLE is scheduler or server, serve until the job is over; in others return at once.

    A process that is given a rank, by argument or KVSTORE_RANK, is a worker whatever DMLC_ROLE says.

    Raises:
        SystemExit: the job is over; the code is 0, or a server's if that has failed.
        ConfigurationError: the role cannot be played; says why.
        ConnectTimeoutError: a process of the job is missing.
    """
    if rank is not None or environ.get(RANK, "").strip() or environ.get(ROLE, "").strip() in ("", WORKER):
        return
    job = read_dmlc(environ)
    assert job is not None
    if not _asks_for_servers(environ, servers):
        raise ConfigurationError(
            f"{ROLE} is {job.role!r}, but {SERVERS} or servers= names servers that run already; unset one of them"
        )
    limits = _limits(environ, connect_timeout, dead_after)
    if job.role == SCHEDULER:
        _be_scheduler(job, *limits)
    _be_server(environ, job, *limits)


def _be_scheduler(job: DmlcJob, timeout: float, dead_after: float) -> NoReturn:
    parts = urlsplit(job.root)
    assert parts.hostname is not None
    # Where other hosts shall come, the launcher has said so by giving an address that they can reach.
    desk = s.Desk(s.resolve(parts.hostname), parts.port or 0)
    try:
        meeting = Rendezvous(job.num_workers, job.num_servers, dead_after)
        s.keep_the_meeting(desk, meeting, timeout, dead_after)
    finally:
        desk.close()
    raise SystemExit(0)


def _be_server(environ: Mapping[str, str], job: DmlcJob, timeout: float, dead_after: float) -> NoReturn:
    token = secrets.token_hex(16)
    asking = s.Asking(job.root, token)
    try:
        assigned = asking.ask(_join_message(job, job.rank, token), m.Assigned, timeout)
        host = _host_of_server(environ, job, assigned.is_one_machine)
        duty = _Duty(asking, host, timeout, dead_after)
        flags = ["--index", str(assigned.rank), "--num-servers", str(job.num_servers)]
        flags += [
            "--bind",
            f"tcp://{f'[{host}]' if ':' in host else host}:0",
            "--dead-after",
            str(dead_after),
        ]
        try:
            code = cli.main(flags, announce=duty.begin)
        finally:
            duty.end()
    except BaseException as error:
        asking.give_up(error)
        raise
    finally:
        asking.close()
    if duty.error is not None:
        raise duty.error
    raise SystemExit(code)


class _Duty:
    """What a server does for its job beside serving: it says where it is, and ends when no worker is left."""

    def __init__(self, asking: s.Asking, host: str, timeout: float, dead_after: float) -> None:
        self.error: BaseException | None = None
        self._asking = asking
        self._host = host
        self._timeout = timeout
        self._dead_after = dead_after
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def begin(self, server: Server) -> None:
        """Called when the server listens; goes on in a thread."""
        self._thread = threading.Thread(
            target=self._run, args=(server,), name="kvstore-attendance", daemon=True
        )
        self._thread.start()

    def end(self) -> None:
        """Called when the server has ended, for this or another reason."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self, server: Server) -> None:
        try:
            desk = s.Desk(self._host)
            try:
                self._attend(server, desk)
            finally:
                desk.close()
        except BaseException as error:
            # A server that was stopped meanwhile has not failed.
            self.error = None if self._ended.is_set() else error
        finally:
            server.request_stop()

    def _attend(self, server: Server, desk: s.Desk) -> None:
        ready = m.Ready(self._asking.token, server.endpoint, desk.address)
        table = self._asking.ask(ready, m.Table, self._timeout, self._ended.is_set)
        attendance = Attendance(table.workers, self._dead_after, time.monotonic())
        s.until_over(desk, attendance, attendance.handle, self._ended.is_set)


def _join(job: DmlcJob, rank: int | None, timeout: float) -> Joined:
    token = secrets.token_hex(16)
    asking = s.Asking(job.root, token)
    try:
        table = asking.ask(_join_message(job, rank, token), m.Table, timeout)
    finally:
        asking.close()
    presence = s.Presence(token, [job.root, *table.attendance])
    return Joined(Topology(table.rank, job.num_workers, table.servers), presence)


def _join_message(job: DmlcJob, rank: int | None, token: str) -> m.Join:
    return m.Join(
        token,
        job.role,
        job.num_workers,
        job.num_servers,
        -1 if rank is None else rank,
        -1 if job.task is None else job.task,
        (job.node_host or socket.gethostname())[:255],
        _started(),
        os.getpid(),
        _machine(),
    )


def _host_of_server(environ: Mapping[str, str], job: DmlcJob, is_one_machine: bool) -> str:
    """Where a server listens: on loopback if that is enough, else where the launcher says, if that is allowed."""
    if is_one_machine:
        return "127.0.0.1"
    host = s.resolve(job.node_host) if job.node_host else s.host_towards(job.root)
    if not s.is_loopback(host) and environ.get(ALLOW_PUBLIC, "") != "1":
        raise ConfigurationError(
            f"the processes of this job are on several machines, so its servers must listen on an address like {host} "
            f"that other hosts can reach; set {ALLOW_PUBLIC}=1 for all processes if you trust the network, because "
            "traffic is neither authenticated nor encrypted"
        )
    return host


def _asks_for_servers(environ: Mapping[str, str], servers: object) -> bool:
    return servers is None and not environ.get(SERVERS, "").strip()


def _claimed_rank(
    environ: Mapping[str, str], job: DmlcJob, rank: int | None, num_workers: int | None
) -> int | None:
    """The rank that this worker must have; None where the scheduler chooses. Checks what else is given."""
    ours = {k: v for k, v in environ.items() if k in (RANK, NUM_WORKERS) and v.strip()}
    if rank is None and num_workers is None and not ours:
        return job.rank
    numbers = {NUM_WORKERS: str(job.num_workers), **ours}
    if rank is None and RANK not in ours:
        numbers[RANK] = "0" if job.rank is None else str(job.rank)
    own, count = read_place(numbers, rank, num_workers)
    if count != job.num_workers:
        raise ConfigurationError(
            f"num_workers is {count}, but DMLC_NUM_WORKER is {job.num_workers}; give both alike, or one only"
        )
    return own if rank is not None or RANK in ours else job.rank


def _limits(
    environ: Mapping[str, str], connect_timeout: float | None, dead_after: float | None
) -> tuple[float, float]:
    return (
        read_timeout(environ, CONNECT_TIMEOUT, value=connect_timeout),
        read_timeout(environ, DEAD_AFTER, value=dead_after),
    )


def _started() -> int:
    """When this process was started, in ticks since its machine was."""
    return int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])


def _machine() -> str:
    """Equal in processes that reach each other on loopback."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{socket.gethostname()}/{boot}/{os.stat('/proc/self/ns/net').st_ino}"[:255]
