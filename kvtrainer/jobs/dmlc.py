"""Jobs of MXNet's launcher: the same script runs as scheduler, server or worker, depending on DMLC_ROLE.

A scheduler or server does its work at the point where the script creates its store, and then exits; the rest of the
script is for workers. Importing this module has no effect.

A worker or server asks the scheduler again and again until the answer is no longer Pending (`DmlcSchedulerClient.ask`);
the rules of this exchange are in `kvtrainer.jobs.scheduler`. It uses the protocol of the servers. A worker then opens a
session with every server, in a namespace that only shows which worker processes are alive. A server runs as the command
line does, and stops once all workers of that namespace have left or are silent for too long.

Invariants: a process joins a job once, for all of its stores. If a step fails in any process, that process tells the
scheduler, so that all others fail with the reason instead of waiting.
"""

from __future__ import annotations

import os
import socket
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import urlsplit

from kvstore_server import cli
from kvstore_server.check import is_loopback
from kvstore_server.debug_log import Peer
from kvstore_server.engine.engine import Engine
from kvstore_server.errors import (
    ConfigurationError,
    ConnectTimeoutError,
    FencedError,
    KVStoreError,
    ProtocolError,
    ServerLostState,
    describe,
    from_wire,
)
from kvstore_server.keys import KEYS, OFF, client_keys_from_env, read_server_keys
from kvstore_server.log_limit import limited_log
from kvstore_server.optimizer.base import capability
from kvstore_server.protocol import messages as m
from kvstore_server.server import Server, ServerOptions
from kvstore_server.transport.tcp import tcp_routing_id
from kvtrainer.client.connection import Connection
from kvtrainer.client.session import Session, SessionOptions
from kvtrainer.common import env
from kvtrainer.jobs.scheduler import SERVER, WORKER, Scheduler

SCHEDULER = "scheduler"
ALLOW_UNAUTHENTICATED = "KVSTORE_ALLOW_UNAUTHENTICATED_BIND"
MAX_PROCESSES = 4096
"""The most processes of one role in a job."""
# Variables with the rank within the role. The first one that is set counts.
_RANKS = {WORKER: ("DMLC_WORKER_ID", "DMLC_RANK"), SERVER: ("DMLC_SERVER_ID", "DMLC_RANK"), SCHEDULER: ()}
_TASK = "DMLC_TASK_ID"
# The namespace that shows servers which workers are alive. Stores have other namespaces.
_GROUP = "workers of the job"
_ASK_EVERY = 0.1


@dataclass(frozen=True)
class DmlcJob:
    """One process of a job, as its launcher started it.

    Args:
        role: SCHEDULER, SERVER or WORKER.
        root: Address of the scheduler, as tcp://host:port.
        rank: Rank within the role, or None if the launcher does not set it.
        task: A number that orders the processes of a role, with gaps, or None.
        node_host: Address under which others reach this host, or an empty string.
    """

    role: str
    root: str
    num_workers: int
    num_servers: int
    rank: int | None
    task: int | None
    node_host: str


def read_dmlc(environ: Mapping[str, str]) -> DmlcJob | None:
    """Return the values of the DMLC_* variables, None without DMLC_ROLE. Raises ConfigurationError."""
    role = env.text_of(environ, env.ROLE)
    if not role:
        return None
    if role not in _RANKS:
        raise ConfigurationError(f"{env.ROLE} is {role!r}; it must be {SCHEDULER}, {SERVER} or {WORKER}")
    host, port = (
        _read_dmlc_variable(environ, "DMLC_PS_ROOT_URI"),
        _read_dmlc_variable(environ, "DMLC_PS_ROOT_PORT"),
    )
    root = env.parse_address(f"{host}:{port}")
    counts = {
        WORKER: _read_dmlc_count(environ, "DMLC_NUM_WORKER"),
        SERVER: _read_dmlc_count(environ, "DMLC_NUM_SERVER"),
    }
    rank = _read_first_dmlc_number(environ, _RANKS[role])
    if rank is not None and not 0 <= rank[1] < counts[role]:
        raise ConfigurationError(
            f"{rank[0]} is {rank[1]}; a job with {counts[role]} {role}s numbers them 0..{counts[role] - 1}"
        )
    task = _read_first_dmlc_number(environ, (_TASK,)) if role != SCHEDULER else None
    numbers = rank and rank[1], task and task[1]
    node_host = env.text_of(environ, "DMLC_NODE_HOST")
    return DmlcJob(role, root, counts[WORKER], counts[SERVER], *numbers, node_host)


def _read_dmlc_variable(environ: Mapping[str, str], name: str) -> str:
    text = env.text_of(environ, name)
    if not text:
        raise ConfigurationError(
            f"{env.ROLE} is {environ[env.ROLE]!r}, but {name} is not set; MXNet's launcher sets DMLC_PS_ROOT_URI, "
            "DMLC_PS_ROOT_PORT, DMLC_NUM_WORKER and DMLC_NUM_SERVER for every process. Set it, or unset "
            f"{env.ROLE} and use KVSTORE_RANK, KVSTORE_NUM_WORKERS and KVSTORE_SERVERS"
        )
    return text


def _read_dmlc_count(environ: Mapping[str, str], name: str) -> int:
    count = env.as_int(_read_dmlc_variable(environ, name), name)
    if not 1 <= count <= MAX_PROCESSES:
        raise ConfigurationError(f"{name} is {count}; it must lie in 1..{MAX_PROCESSES}")
    return count


def _read_first_dmlc_number(environ: Mapping[str, str], names: tuple[str, ...]) -> tuple[str, int] | None:
    return next(
        ((name, env.as_int(text, name)) for name in names if (text := env.text_of(environ, name))), None
    )


# Roles.


def find_dmlc_topology(
    environ: Mapping[str, str],
    rank: int | None,
    num_workers: int | None,
    servers: str | Sequence[str] | None,
    connect_timeout: float | None,
    dead_after: float | None,
) -> env.Topology:
    """Play the role of this process and return a worker's topology; see `kvtrainer.jobs.topology`."""
    serve_dmlc_role(environ, rank, servers, connect_timeout, dead_after)
    job = read_dmlc(environ) if env.read_servers_from_env(environ, servers) is None else None
    if job is None or job.role != WORKER:
        return env.read_topology_from_env(environ, rank=rank, num_workers=num_workers, servers=servers)
    own = _claimed_dmlc_rank(environ, job, rank, num_workers)
    topology = _joined.get((os.getpid(), job.root))
    if topology is None:
        topology = _join_dmlc_job(job, own, *_read_dmlc_timeouts(environ, connect_timeout, dead_after))
        _joined[os.getpid(), job.root] = topology
    if own is not None and own != topology.rank:
        raise ConfigurationError(
            f"this process is worker {topology.rank} of its job and cannot be worker {own} as well"
        )
    return topology


def serve_dmlc_role(
    environ: Mapping[str, str],
    rank: int | None = None,
    servers: str | Sequence[str] | None = None,
    connect_timeout: float | None = None,
    dead_after: float | None = None,
) -> None:
    """Serve until the job is over, in a scheduler or server; see `kvtrainer.jobs.topology.serve_dmlc_role`."""
    if rank is not None or env.text_of(environ, env.RANK) or env.text_of(environ, env.ROLE) in ("", WORKER):
        return
    job = read_dmlc(environ)
    assert job is not None
    if env.read_servers_from_env(environ, servers) is not None:
        raise ConfigurationError(
            f"{env.ROLE} is {job.role!r}, but {env.SERVERS} or servers= names servers that are running already; unset "
            "one of them"
        )
    limits = _read_dmlc_timeouts(environ, connect_timeout, dead_after)
    if job.role == SCHEDULER:
        _run_dmlc_scheduler(environ, job, *limits)
    _run_dmlc_server(environ, job, *limits)


def _run_dmlc_scheduler(
    environ: Mapping[str, str], job: DmlcJob, timeout: float, dead_after: float
) -> NoReturn:
    scheduler = Scheduler(job.num_workers, job.num_servers, timeout, dead_after, time.monotonic())
    address = _numeric_dmlc_address(job.root)
    _check_dmlc_bind(environ, urlsplit(address).hostname or "", "the scheduler of this job listens")
    directory = env.text_of(environ, KEYS)
    keys = read_server_keys(directory) if directory not in ("", OFF) else None
    options = ServerOptions(address, drain_timeout=dead_after, keys=keys)
    server = Server(scheduler, options, name_of=lambda _: Peer("process"))
    server.stop_when(scheduler.is_over)
    try:
        with limited_log():
            server.run()
    finally:
        server.close()
    if scheduler.failure is not None:
        raise scheduler.failure
    raise SystemExit(0)


def _run_dmlc_server(environ: Mapping[str, str], job: DmlcJob, timeout: float, dead_after: float) -> NoReturn:
    client = DmlcSchedulerClient(job.root)
    failures: list[KVStoreError] = []

    # Called once the server listens: waits for the other servers, then watches the workers.
    def begin(server: Server) -> None:
        try:
            client.ask(m.Listening(server.endpoint), timeout, lambda: server.is_stop_requested)
        except KVStoreError as error:
            if not server.is_stop_requested:
                failures.append(error)
            server.request_stop()
            return
        assert isinstance(server.service, Engine)
        workers = _DmlcWorkers(server.service, job.num_workers, dead_after, time.monotonic())
        server.stop_when(workers.are_gone)

    # 1. Join the job, which assigns the rank.
    try:
        told = client.ask(_dmlc_join_message(job, job.rank), timeout)
        host = _dmlc_server_host(environ, job, bool(told["is_one_machine"]))
        # 2. Serve until the workers are gone. A server that fails has logged the reason.
        flags = ["--index", str(told["rank"]), "--num-servers", str(job.num_servers)]
        flags += ["--bind", env.tcp_address(host, 0), "--dead-after", str(dead_after)]
        code = cli.main(flags, announce=begin)
        if code:
            client.leave(KVStoreError(f"its server ended with code {code}"))
    except BaseException as error:
        client.leave(error)
        raise
    finally:
        client.close()
    if failures:
        raise failures[0]
    raise SystemExit(code)


class _DmlcWorkers:
    """Watches a job's workers as members of a namespace, in which the server itself takes a seat to keep it alive."""

    def __init__(self, engine: Engine, num_workers: int, dead_after: float, now: float) -> None:
        self._engine = engine
        self._num_workers = num_workers
        self._dead_after = dead_after
        self._began = now
        self._socket = tcp_routing_id()
        config = engine.config
        hello = m.Hello(
            _GROUP, num_workers, num_workers + 1, config.server, config.num_servers, config.capability, "the server",
            tcp_routing_id(), (self._socket,),
        )  # fmt: skip
        [welcome] = engine.handle(self._socket, m.Request(0, 0, 1, hello), now)
        assert isinstance(welcome.reply.body, m.Welcome)
        self._alive = m.Request(welcome.reply.body.run_id, welcome.reply.body.session, 1, m.Heartbeat())

    def are_gone(self, now: float) -> bool:
        self._engine.handle(self._socket, self._alive, now)
        members = self._engine.namespaces[_GROUP].membership
        gone = {*members.departed, *members.lost(now, self._dead_after)}
        if now - self._began > self._dead_after:
            gone |= set(range(self._num_workers)) - members.members.keys()
        return gone >= set(range(self._num_workers))


# (process id, scheduler) → topology. The process id is part of the key because forks inherit this.
_joined: dict[tuple[int, str], env.Topology] = {}


def _join_dmlc_job(job: DmlcJob, rank: int | None, timeout: float, dead_after: float) -> env.Topology:
    """Join the job, and show the scheduler and servers that this process is alive until it ends."""
    client = DmlcSchedulerClient(job.root)
    servers: Session | None = None
    try:
        told = client.ask(_dmlc_join_message(job, rank), timeout)
        client.start_heartbeats(int(told["session"]))
        topology = env.Topology(
            int(told["rank"]), job.num_workers, tuple(map(env.parse_address, told["servers"]))
        )
        options = SessionOptions(
            _GROUP, topology.rank, job.num_workers + 1, connect_timeout=timeout, dead_after=dead_after,
            capability=capability(), address=f"{socket.gethostname()}:{os.getpid()}",
        )  # fmt: skip
        connection = Connection(topology.servers, transport="tcp", keys=client_keys_from_env(os.environ))
        servers = Session(connection, options, time.monotonic)
        servers.connect()
    except BaseException as error:
        if servers is not None:
            servers.close(describe(error), is_clean=False)
        client.leave(error)
        client.close()
        raise
    # Runs at exit after the stores, which are younger, have left the servers.
    weakref.finalize(servers, _leave_dmlc_job, client, servers)
    return topology


def _leave_dmlc_job(client: DmlcSchedulerClient, servers: Session) -> None:
    servers.close("its process ended", is_clean=True)
    client.leave()
    client.close()


class DmlcSchedulerClient:
    """A process's connection to the scheduler of its job."""

    def __init__(self, root: str) -> None:
        self._root = root
        # The name may become resolvable while this waits.
        with suppress(ConfigurationError):
            root = _numeric_dmlc_address(root)
        self._connection = Connection([root], transport="tcp", keys=client_keys_from_env(os.environ))
        self._number = 0
        self._session = 0

    def ask(
        self, question: m.RequestBody, timeout: float, cancelled: Callable[[], bool] = lambda: False
    ) -> Mapping[str, Any]:
        """Repeat a question until it is answered. Blocks up to `timeout` seconds. On failure the others are told why.

        Raises:
            ConnectTimeoutError: The scheduler did not answer, or the named processes are missing.
            KVStoreError: The job cannot begin, for the reason that the scheduler gives.
        """
        self._number += 1
        now = next_time = time.monotonic()
        deadline = now + timeout
        heard, missing = 0.0, ""
        try:
            while (now := time.monotonic()) < deadline and not cancelled():
                if now >= next_time:
                    self._send(question)
                    next_time = now + _ASK_EVERY
                answer = self._receive(next_time - now)
                if isinstance(answer, m.Status):
                    return answer.values
                if isinstance(answer, m.Failed):
                    error = from_wire(answer.code, answer.text)
                    # A server answers so to a client that it does not know.
                    if isinstance(error, ServerLostState | FencedError):
                        error = ProtocolError(f"{self._root} is the address of a server, not of a scheduler")
                    raise error
                if isinstance(answer, m.Pending):
                    heard, missing = now, answer.why
            raise self._too_late(timeout, heard, now - heard < max(1.0, timeout / 2), missing)
        except BaseException as error:
            self.leave(error)
            raise

    def _too_late(self, timeout: float, heard: float, is_there: bool, missing: str) -> ConnectTimeoutError:
        if is_there:
            text = (
                f"{missing or 'the scheduler was not done'}: waited {timeout:g} s; look at the last lines of the "
                "missing processes' logs"
            )
        else:
            text = (
                f"the scheduler at {self._root} {'fell silent' if heard else 'did not answer'} within "
                f"{timeout:g} s; is the process with DMLC_ROLE=scheduler running, and are DMLC_PS_ROOT_URI and "
                "DMLC_PS_ROOT_PORT right?"
            )
        return ConnectTimeoutError(f"{text} (connect_timeout=… or KVSTORE_CONNECT_TIMEOUT raises the limit)")

    def start_heartbeats(self, session: int) -> None:
        """Send heartbeats from a thread from now on. Call it only after joining."""
        self._session = session
        self._connection.begin([(0, session)])

    def leave(self, error: BaseException | None = None) -> None:
        """Report that this process ends or cannot go on, so that no other process waits for it."""
        self._send(m.Leave("its process ended" if error is None else describe(error), error is None))

    def close(self) -> None:
        self._connection.close()

    def _send(self, body: m.RequestBody) -> None:
        # KVStoreError: a forked process must not send.
        with suppress(KVStoreError):
            self._connection.send(0, m.Request(0, self._session, self._number, body))

    def _receive(self, seconds: float) -> m.ReplyBody | None:
        try:
            got = self._connection.receive(seconds)
        except ProtocolError as error:
            raise type(error)(
                f"{self._root} is not the address of a scheduler of this version: {error}"
            ) from None
        return got[1].body if got is not None and got[1].number in (0, self._number) else None


def _dmlc_join_message(job: DmlcJob, rank: int | None) -> m.JoinJob:
    own, task = (-1 if number is None else number for number in (rank, job.task))
    counts = job.num_workers, job.num_servers
    host = (job.node_host or socket.gethostname())[:255]
    return m.JoinJob(job.role, *counts, own, task, host, _process_start_time(), os.getpid(), env.name_host())


def _dmlc_server_host(environ: Mapping[str, str], job: DmlcJob, is_one_machine: bool) -> str:
    """Choose where a server listens: loopback if that is enough, else the launcher's address, if that is allowed."""
    if is_one_machine:
        return "127.0.0.1"
    host = env.numeric_host(job.node_host) if job.node_host else env.host_towards(job.root)
    _check_dmlc_bind(
        environ, host, "the processes of this job are on several machines, so its servers listen"
    )
    return host


def _check_dmlc_bind(environ: Mapping[str, str], host: str, why: str) -> None:
    """Raise ConfigurationError if a process must not listen on an address of this host."""
    has_keys = env.text_of(environ, KEYS) not in ("", OFF)
    if not (has_keys or is_loopback(host) or environ.get(ALLOW_UNAUTHENTICATED, "") == "1"):
        raise ConfigurationError(
            f"{why} on an address like {host} that other hosts can reach, where everybody could read and change all "
            f"weights; make keys (kvstore-server keygen DIR) and set {KEYS}=DIR for all processes, or set "
            f"{ALLOW_UNAUTHENTICATED}=1 on a network that you trust"
        )


def _numeric_dmlc_address(address: str) -> str:
    parts = urlsplit(address)
    return env.tcp_address(env.numeric_host(parts.hostname or ""), parts.port or 0)


def _claimed_dmlc_rank(
    environ: Mapping[str, str], job: DmlcJob, rank: int | None, num_workers: int | None
) -> int | None:
    """Return the rank that this worker must have, or None if the scheduler chooses. Checks for contradictions."""
    ours = {k: v for k, v in environ.items() if k in (env.RANK, env.NUM_WORKERS) and v.strip()}
    if rank is None and num_workers is None and not ours:
        return job.rank
    numbers = {env.NUM_WORKERS: str(job.num_workers), **ours}
    if rank is None and env.RANK not in ours:
        numbers[env.RANK] = "0" if job.rank is None else str(job.rank)
    own, count = env.read_place_from_env(numbers, rank, num_workers)
    if count != job.num_workers:
        raise ConfigurationError(
            f"num_workers is {count}, but DMLC_NUM_WORKER is {job.num_workers}; give both alike, or one only"
        )
    return own if rank is not None or env.RANK in ours else job.rank


def _read_dmlc_timeouts(
    environ: Mapping[str, str], connect_timeout: float | None, dead_after: float | None
) -> tuple[float, float]:
    return (
        env.read_timeout(environ, env.CONNECT_TIMEOUT, value=connect_timeout),
        env.read_timeout(environ, env.DEAD_AFTER, value=dead_after),
    )


def _process_start_time() -> int:
    return int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
