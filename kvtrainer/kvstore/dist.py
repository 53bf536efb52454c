"""The store on parameter servers: this process is one worker of a job."""

from __future__ import annotations

import itertools
import logging
import os
import socket
import sys
import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace

from kvstore_server import check
from kvstore_server.engine.engine import MAX_WORKERS
from kvstore_server.engine.rounds import ASYNC, SSP, SYNCHRONOUS, Mode
from kvstore_server.optimizer.base import capability
from kvtrainer.client.client import Client
from kvtrainer.client.connection import Connection
from kvtrainer.client.session import SessionOptions
from kvtrainer.common import env
from kvtrainer.common.uncompiled import uncompiled
from kvtrainer.errors import ConfigurationError
from kvtrainer.jobs.topology import find_topology
from kvtrainer.kvstore.agreement import Agreement, OverServers
from kvtrainer.kvstore.base import ASYNC_NAMES, P3, SSP_NAMES, SYNC_NAMES, register
from kvtrainer.kvstore.values import check_text
from kvtrainer.kvstore.verbs import TableKVStore

STALENESS = "KVSTORE_STALENESS"
"""The environment variable with the default of `staleness`."""
DEFAULT_STALENESS = 1
VAN_TYPE, WATER_MARK = "DMLC_PS_VAN_TYPE", "DMLC_PS_WATER_MARK"
"""MXNet's variables: "p3" lets urgent messages overtake others that wait here; how many may be on their way."""
DEFAULT_WATER_MARK = 10

_created = itertools.count()
"""Counts the stores of this process: the n-th store of every worker meets the n-th of the others."""


@register(*SYNC_NAMES, *ASYNC_NAMES, *SSP_NAMES)
@uncompiled
class DistKVStore(TableKVStore):
    """Keys on servers, and this process one of the workers that push to them.

    "dist_sync": rounds, each of which takes one part from every worker. "dist_async": each push is applied by itself
    when it comes, by the optimizer, which must be set first. "dist_ssp" (stale synchronous parallel): as async, but a
    read waits while another worker is too far behind. A pull sees this worker's own pushes in any of them.

    Names with "device" mean the same: replicas are always summed before they are pushed. "p3" is "dist_sync"
    in which pushes of higher `priority` overtake others that still wait to be sent; DMLC_PS_VAN_TYPE=p3 gives that to
    the others.

    Args:
        type: The name under which it was created.
        rank, num_workers, servers: The topology; read from the environment when absent, see
            `kvtrainer.jobs.topology.find_topology`.
        timeout: Seconds to wait for the other workers (KVSTORE_TIMEOUT, 600).
        connect_timeout: Seconds to wait for the servers at first (KVSTORE_CONNECT_TIMEOUT, 30).
        dead_after: Seconds of silence after which a server counts as gone (KVSTORE_DEAD_AFTER, 60).
        slow_after: Seconds of waiting for other workers, or a server, after which the log names them; then it does so
            ever more rarely (KVSTORE_SLOW_AFTER, 10).
        staleness: For "dist_ssp": how many pushes of a key a worker that reads it may be ahead of the slowest worker
            (KVSTORE_STALENESS, 1).
        scale_lr_by_staleness: For "dist_async" and "dist_ssp": divide the learning rate of a push by the number of
            updates since the weights that it was computed with.
        namespace: Stores of equal namespaces work together; by default the n-th store that each worker creates,
            in the same attempt of the job where its launcher counts restarts (KVSTORE_ATTEMPT, torchrun's, Slurm's).

    Raises:
        ConfigurationError: an argument, or the variable in its place, is missing or wrong; nothing has been sent.
        ConnectTimeoutError: a server did not answer in time.
        SystemExit: DMLC_ROLE made this process the scheduler or a server of its job, and the job is over.
    """

    def __init__(
        self,
        type: str = "dist_sync",
        *,
        rank: int | None = None,
        num_workers: int | None = None,
        servers: str | Sequence[str] | None = None,
        timeout: float | None = None,
        connect_timeout: float | None = None,
        dead_after: float | None = None,
        slow_after: float | None = None,
        namespace: str | None = None,
        staleness: int | None = None,
        scale_lr_by_staleness: bool = False,
    ) -> None:
        self.mode = mode_of(type, staleness, scale_lr_by_staleness, os.environ)
        """When pushes count."""
        self._water_mark = water_mark_of(type, os.environ)
        self._transport = env.transport_of(os.environ)
        is_debugging = env.shows_debug_log(os.environ)
        topology = find_topology(
            os.environ,
            rank=rank,
            num_workers=num_workers,
            servers=servers,
            connect_timeout=connect_timeout,
            dead_after=dead_after,
        )
        if topology.num_workers > MAX_WORKERS:
            raise ConfigurationError(
                f"num_workers is {topology.num_workers}; a server takes up to {MAX_WORKERS} workers"
            )
        if namespace is not None and not isinstance(namespace, str):
            raise ConfigurationError(
                f"namespace must be a str, got {namespace!r:.80}; pass for example 'job-5'"
            )
        check_text("namespace", namespace or "")
        self._options = SessionOptions(
            rank=topology.rank,
            num_workers=topology.num_workers,
            timeout=env.read_timeout(os.environ, env.TIMEOUT, value=timeout),
            connect_timeout=env.read_timeout(os.environ, env.CONNECT_TIMEOUT, value=connect_timeout),
            dead_after=env.read_timeout(os.environ, env.DEAD_AFTER, value=dead_after),
            capability=capability(),
            address=f"{socket.gethostname()}:{os.getpid()}",
            mode=self.mode,
            slow_after=env.read_timeout(os.environ, env.SLOW_AFTER, value=slow_after),
            # The last: a store that is refused does not count.
            namespace=_next_namespace(os.environ) if namespace is None else namespace,
        )
        if is_debugging:
            _show_debug_log(topology.rank)
        self.servers = topology.servers
        """Where the servers listen, by their index."""
        self._clients: list[Client] = []
        weakref.finalize(self, _leave, self._clients)
        self._sides = 0
        super().__init__(type, self._connect(""))

    def open_client(self, by_host: bool = False) -> Client:
        name = f"/trainer{len(self._for_trainers) + 1}"
        return self._borrow(self._connect(name, replace(self.mode, by_host=by_host)))

    def open_agreement(self) -> Agreement:
        """As `TableKVStore.open_agreement`, over synchronous rounds of a new client.

        It has a namespace of its own. As with `open_client`, the n-th one of every worker meets the n-th of the others;
        blocks until all workers have come.
        """
        if self.num_workers == 1:
            return Agreement()
        self._sides += 1
        client = self._connect(f"/side{self._sides}", SYNCHRONOUS)
        # Servers forget a namespace that its only worker has left: one that comes later would wait for that worker.
        try:
            client.barrier()
        except BaseException as error:
            client.close(error)
            raise
        return OverServers(client)

    def close(self) -> None:
        try:
            super().close()
        finally:
            for client in self._clients:
                client.close()

    def _connect(self, name: str, mode: Mode | None = None) -> Client:
        """Connect a client with the store's namespace, or one beside it."""
        options = replace(self._options, namespace=self._options.namespace + name, mode=mode or self.mode)
        client = Client(Connection(self.servers, self._water_mark, self._transport), options, time.monotonic)
        self._clients[:] = [known for known in self._clients if not known.is_closed] + [client]
        try:
            client.connect()
        except BaseException as error:
            client.close(error)
            raise
        return client


def _show_debug_log(rank: int) -> None:
    """Have messages and rounds logged: by the handlers of the script if it has any, otherwise on standard error."""
    logger = logging.getLogger("kvtrainer.debug")
    logger.setLevel(logging.DEBUG)
    if not logger.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter(f"%(asctime)s worker {rank} %(levelname)s %(message)s"))
        logger.addHandler(handler)
        logger.propagate = False  # else each line comes twice once the script sets up handlers


def _leave(clients: Sequence[Client]) -> None:
    """Tell servers that the store is dropped or the process ends, and why. Nobody is to wait for it."""
    for client in clients:
        client.close(getattr(sys, "last_value", None))


def mode_of(
    type: str, staleness: int | None, scale_lr_by_staleness: bool, environ: Mapping[str, str]
) -> Mode:
    """Choose the mode of a store of that name.

    Raises:
        ConfigurationError: an option does not go with the name, or is no whole number of 0 or more.
    """
    name = type.lower()
    if name not in SSP_NAMES and staleness is not None:
        raise ConfigurationError(f"kvstore {type!r} takes no staleness, got {staleness!r}; 'dist_ssp' does")
    check.boolean("scale_lr_by_staleness", scale_lr_by_staleness)
    if name in ASYNC_NAMES:
        return Mode(ASYNC, 0, scale_lr_by_staleness)
    if name in SSP_NAMES:
        return Mode(SSP, _staleness(staleness, environ), scale_lr_by_staleness)
    if scale_lr_by_staleness:
        raise ConfigurationError(
            f"scale_lr_by_staleness has no meaning for kvstore {type!r}, whose gradients are never stale; use "
            "'dist_async' or 'dist_ssp'"
        )
    return SYNCHRONOUS


def water_mark_of(type: str, environ: Mapping[str, str]) -> int:
    """Read how many messages may be under way to one server. Others queue by priority.

    0 stands for all: nothing queues.

    Raises:
        ConfigurationError: a variable has no value that is known.
    """
    van = environ.get(VAN_TYPE, "").strip().lower()
    if van not in ("", "zmq", P3):
        raise ConfigurationError(f"{VAN_TYPE} is {van!r}; this library knows 'zmq' and 'p3'")
    if P3 not in (type.lower(), van):
        return 0
    given = environ.get(WATER_MARK, "").strip() or str(DEFAULT_WATER_MARK)
    return check.integer(WATER_MARK, int(given) if given.isdecimal() else given, 1, (1 << 31) - 1)


def _next_namespace(environ: Mapping[str, str]) -> str:
    """Name what the next store of each worker shares. Servers may still wait for the workers of an attempt before."""
    attempt = env.attempt_of_job(environ)
    name = f"store{next(_created)}"
    return f"{name}, attempt {attempt}" if attempt else name


def _staleness(given: int | None, environ: Mapping[str, str]) -> int:
    value: object = given
    if given is None:
        text = environ.get(STALENESS, "").strip()
        value = int(text) if text.isdecimal() and len(text) < 10 else text or DEFAULT_STALENESS
    return check.integer(f"staleness ({STALENESS})", value, 0)
