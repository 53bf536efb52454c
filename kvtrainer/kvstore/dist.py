"""The store on parameter servers. This process is one worker of a job.

`DistKVStore` finds its rank and the servers (arguments, or the environment that a launcher has set), connects at once,
and leaves the verbs to `KVStoreVerbs`, which speaks to servers through a `Client`. A Trainer that is given such a store
opens a client of its own (`open_client`), in another namespace.

Invariant: the n-th store that each worker of a job creates meets the n-th of the others, in one namespace, so all
workers create their stores in the same order.
"""

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
from typing import NamedTuple

from kvstore_server import check
from kvstore_server.durable.snapshot_folder import check_snapshot_tag
from kvstore_server.engine.engine import MAX_WORKERS
from kvstore_server.engine.rounds import ASYNC, SSP, SYNCHRONOUS, Mode
from kvstore_server.failpoints import arm_failpoints
from kvstore_server.keys import KEYS, client_keys_from_env
from kvstore_server.optimizer.base import capability
from kvtrainer.client.client import Client
from kvtrainer.client.connection import Connection
from kvtrainer.client.message_faults import FAULTS, FaultyTransport, parse_message_faults
from kvtrainer.client.session import SessionOptions, Transport
from kvtrainer.client.snapshot_schedule import SnapshotSchedule
from kvtrainer.common import env
from kvtrainer.common.exit_code import exit_when_fenced
from kvtrainer.common.thread_guard import exclusive
from kvtrainer.common.uncompiled import uncompiled
from kvtrainer.errors import ConfigurationError, DeadlineError
from kvtrainer.jobs.topology import find_topology
from kvtrainer.kvstore.agreement import Agreement, ServerAgreement
from kvtrainer.kvstore.base import ASYNC_NAMES, P3, SSP_NAMES, SYNC_NAMES, register
from kvtrainer.kvstore.values import check_text
from kvtrainer.kvstore.verbs import KVStoreVerbs

STALENESS = "KVSTORE_STALENESS"
"""Environment variable with the default of `staleness`."""
DEFAULT_STALENESS = 1
VAN_TYPE, WATER_MARK = "DMLC_PS_VAN_TYPE", "DMLC_PS_WATER_MARK"
"""MXNet's variables. "p3" sends urgent messages first; ZeroMQ's water mark limits the messages queued for a server."""
DEFAULT_WATER_MARK = 10

# Numbers the stores of this process. The n-th store of each worker shares a namespace with the others' n-th.
_created = itertools.count()


@register(*SYNC_NAMES, *ASYNC_NAMES, *SSP_NAMES)
@uncompiled
class DistKVStore(KVStoreVerbs):
    """A store whose keys are on servers, with this process as one of the job's workers.

    "dist_sync" works in rounds with one contribution from every worker. "dist_async" applies each push when it arrives,
    by an optimizer that must be set first. "dist_ssp" (stale synchronous parallel) is asynchronous, but a read waits
    while another worker is too far behind. In each mode a pull sees this worker's own pushes.

    Names with "device" are synonyms: replicas are always summed before they are pushed. "p3" is "dist_sync" where
    queued pushes of higher `priority` are sent first; DMLC_PS_VAN_TYPE=p3 adds that to the other modes.

    Args:
        type: The name under which the store is created.
        rank, num_workers, servers: The topology; read from the environment when absent, see
            `kvtrainer.jobs.topology.find_topology`.
        timeout: Seconds to wait for other workers (KVSTORE_TIMEOUT, 600).
        connect_timeout: Seconds to wait for the servers when connecting (KVSTORE_CONNECT_TIMEOUT, 30).
        dead_after: Seconds of silence after which a server counts as gone (KVSTORE_DEAD_AFTER, 60).
        slow_after: Seconds of waiting after which the log names the workers or servers waited for, and then again at
            growing intervals (KVSTORE_SLOW_AFTER, 10).
        staleness: For "dist_ssp": how many pushes of a key a reading worker may be ahead of the slowest one
            (KVSTORE_STALENESS, 1).
        scale_lr_by_staleness: For "dist_async" and "dist_ssp": divide the learning rate of a push by the number of
            updates since its worker read the weights.
        elastic: "MIN..MAX" for "dist_sync": the number of workers may change while a Trainer trains; the job begins
            with `num_workers` (KVSTORE_ELASTIC). Workers with a rank from `num_workers` on join in `Trainer.resume`.
        backup_workers: With `elastic`: how many workers each step of a Trainer may do without. It leaves the slowest
            out, as long as the least number of workers is left (KVSTORE_BACKUP_WORKERS, 0).
        keys: The directory of keys with which this worker shows servers who it is, or "off" (KVSTORE_KEYS, set by
            kvlaunch; KVSTORE_KEY_NAME says whose). Without keys, everybody who reaches a server may use it.
        namespace: Stores with equal namespaces work together. By default the n-th store of each worker joins the
            others' n-th, within the same attempt of a restarted job (KVSTORE_ATTEMPT, torchrun's, Slurm's).

    Raises:
        ConfigurationError: An argument, or the variable in its place, is missing or wrong. Nothing has been sent.
        ConnectTimeoutError: A server did not answer in time.
        AccessDeniedError: A server does not accept this worker's key, or its lack of one.
        SystemExit: DMLC_ROLE made this process the scheduler or a server, and the job is over.
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
        elastic: str | None = None,
        backup_workers: int | None = None,
        keys: str | None = None,
    ) -> None:
        # 1. Read options that can be refused without contacting anyone.
        self.mode = dist_mode_of(type, staleness, scale_lr_by_staleness, os.environ)
        """When pushes are applied."""
        self._water_mark = dist_water_mark_of(type, os.environ)
        self._transport = env.transport_from_env(os.environ)
        self._faults = parse_message_faults(env.text_of(os.environ, FAULTS))
        is_debugging = env.shows_debug_log(os.environ)
        if keys is not None:
            check_text("keys", keys)
        own_keys = client_keys_from_env(os.environ if keys is None else {**os.environ, KEYS: keys})
        self._keys = own_keys
        # 2. Find the servers. With DMLC_ROLE this asks the scheduler, or serves and does not return.
        given = {} if elastic is None else {env.ELASTIC: elastic}
        given |= {} if backup_workers is None else {env.BACKUP_WORKERS: str(backup_workers)}
        environ = {**os.environ, **given} if given else os.environ
        topology = find_topology(
            environ,
            rank=rank,
            num_workers=num_workers,
            servers=servers,
            connect_timeout=connect_timeout,
            dead_after=dead_after,
        )
        min_workers, max_workers = topology.elastic or (0, topology.num_workers)
        if max_workers > MAX_WORKERS:
            raise ConfigurationError(
                f"num_workers is {max_workers}; a server takes up to {MAX_WORKERS} workers"
            )
        if topology.elastic is not None and not self.mode.is_sync:
            raise ConfigurationError(
                f"{env.ELASTIC} lets the number of workers change, which kvstore {type!r} does not support; use "
                "'dist_sync'"
            )
        arm_failpoints(os.environ, "worker", topology.rank)
        # 3. Check and collect the options of the sessions.
        if namespace is not None and not isinstance(namespace, str):
            raise ConfigurationError(
                f"namespace must be a str, got {namespace!r:.80}; pass for example 'job-5'"
            )
        check_text("namespace", namespace or "")
        self._options = SessionOptions(
            rank=topology.rank,
            num_workers=max_workers,
            initial_workers=0 if topology.elastic is None else topology.num_workers,
            min_workers=min_workers,
            backup_workers=topology.backup_workers,
            timeout=env.read_timeout(os.environ, env.TIMEOUT, value=timeout),
            connect_timeout=env.read_timeout(os.environ, env.CONNECT_TIMEOUT, value=connect_timeout),
            dead_after=env.read_timeout(os.environ, env.DEAD_AFTER, value=dead_after),
            capability=capability(),
            address=f"{socket.gethostname()}:{os.getpid()}",
            mode=self.mode,
            slow_after=env.read_timeout(os.environ, env.SLOW_AFTER, value=slow_after),
            restarts=env.restarts_from_env(os.environ),
            captures=env.captures_rounds(os.environ),
            # Evaluated last, so that a store that is refused does not use up a number.
            namespace=_next_dist_namespace(os.environ) if namespace is None else namespace,
        )
        # 4. Connect. The finalizer leaves the servers even if the store is only dropped.
        exit_when_fenced()
        if is_debugging:
            _show_dist_debug_log(topology.rank)
        self.servers = topology.servers
        """Addresses of the servers, by index."""
        self._clients: list[Client] = []
        self._holders = set[int]()
        """Servers that hold tables of this job; a server without any has nothing to lose."""
        self._agreements: dict[int, Client] = {}
        """Number of an agreement → its client; closed ones are dropped when the next one is opened."""
        weakref.finalize(self, _close_dist_clients, self._clients)
        self._sides = 0
        self._snapshots: SnapshotSchedule | None = None
        super().__init__(type, self._connect(""))

    def open_client(self, by_host: bool = False, resumes: bool = False) -> Client:
        if self._options.is_elastic and self._clients_of_trainers():
            raise ConfigurationError(
                "a store has one Trainer at a time if the number of its workers may change (KVSTORE_ELASTIC), because "
                "a worker that comes would take part in the steps of one before those of the other; give one Trainer "
                "all parameters, in groups, or start the job with a fixed number of workers"
            )
        self._options = replace(self._options, resumes=resumes or self._options.resumes)
        name = f"/trainer{len(self._for_trainers) + 1}"
        return self._borrow(self._connect(name, replace(self.mode, by_host=by_host)))

    def open_agreement(self, what: str = "this call") -> Agreement:
        """Open an exchange over synchronous rounds of a new client. Collective; blocks until all workers have come.

        As with `open_client`, the n-th one of every worker belongs with the others' n-th.

        Args:
            what: For which call it is, for messages.

        Raises:
            DeadlineError: Other workers have not made this call in time; names them.
        """
        if self.num_workers == 1:
            return Agreement()
        self._sides += 1
        client = self._connect(f"/side{self._sides}", SYNCHRONOUS)
        # Servers forget a namespace once its only worker has left, and a worker that comes later would wait for it.
        try:
            client.barrier()
        except BaseException as error:
            client.close(error)
            if isinstance(error, DeadlineError):
                raise DeadlineError(
                    f"{what} is collective: all {self.num_workers} workers call it, between the same steps, but not "
                    f"all have in time; {error}"
                ) from error
            raise
        self._agreements = {n: one for n, one in self._agreements.items() if not one.is_closed}
        self._agreements[self._sides] = client
        return ServerAgreement(client)

    @exclusive
    def save(self, tag: str) -> None:
        """Save the present state of the job on its servers under a tag; blocks until it is on all disks.

        Any single worker may call this between two of its steps, for example rank 0: no round ends without it, so what
        is saved is the state after its own last step, of all Trainers of this store. It has the weights, the
        optimizer's state, and what every worker has left with `client_state`. Each server writes its part to its
        --state-dir. What was saved under the same tag before is removed once the new state is complete; until then it
        stays what `load` finds, whatever fails. Nothing else removes it.

            if kv.rank == 0 and step % 1000 == 0:
                kv.save("last")

        Args:
            tag: 1 to 64 letters, digits, ".", "_" and "-"; the first one is a letter or a digit.

        Raises:
            ConfigurationError: The tag is no tag; a server has no --state-dir; the mode is asynchronous; or no worker
                could continue from this state, for example because not all have called `Trainer.resume`. Nothing has
                changed.
            RecoveryError: A server could not write its part, for example because its disk is full.
            DeadlineError: The servers took longer than `timeout`.
        """
        self._check_saved(tag)
        clients = [client for client in self._clients if not client.is_closed]
        for client in clients:
            client.wait_pending()
        rounds = sorted(frozenset[int]().union(*(client.rounds_ended for client in clients)) or {0})
        if len(rounds) > 1 or not rounds[0]:
            raise ConfigurationError(
                f"the keys and Trainers of this store have made {' and '.join(map(str, rounds))} rounds; a job is "
                "saved after the first step, when all of them have made as many"
            )
        self._client.save(tag, rounds[0])

    @exclusive
    def load(self, tag: str) -> None:
        """Let the job go on from what was saved under a tag; blocks until all servers have read it.

        Call it before the first step, and then `Trainer.resume`, which gives every worker the weights and its
        `client_state` of then. There must be as many workers as when it was saved, with the same parameters; the number
        of servers may be another one, if each of them finds the directories of all servers that have saved it in its
        --state-dir.

        The first worker that calls it has the servers go back; one that has trained already gets ServerLostState, and
        goes on from there if it is started again. A job loads a tag once: where it has been loaded already, this
        returns at once. So a script may call it at each start.

        Raises:
            UnknownNameError: Nothing was saved under the tag.
            ConfigurationError: A part of it is missing, a server has no --state-dir, or this worker has trained
                already.
            RecoveryError: It is damaged. Nothing has changed.
            ServerUnreachableError: A server did not answer.
        """
        self._check_saved(tag)
        if any(client.rounds_ended for client in self._clients if not client.is_closed):
            raise ConfigurationError(
                f"load({tag!r}) comes too late: this store has keys, or a Trainer that has begun. Call it first, on a "
                "new store"
            )
        self._client.load(tag)

    def _check_saved(self, tag: str) -> None:
        check_snapshot_tag(tag)
        if not self.mode.is_sync:
            raise ConfigurationError(
                f"kvstore {self.type!r} is asynchronous, where a round is no state of all workers, so it can be "
                "neither saved nor loaded as a whole; use trainer.save_states(), or 'dist_sync'"
            )

    def close(self) -> None:
        try:
            super().close()
        finally:
            for client in self._clients:
                client.close()

    def _connect(self, name: str, mode: Mode | None = None) -> Client:
        options = replace(self._options, namespace=self._options.namespace + name, mode=mode or self.mode)
        transport: Transport = Connection(self.servers, self._water_mark, self._transport, self._keys)
        if self._faults is not None:
            transport = FaultyTransport(transport, self._faults, time.monotonic, options.rank)
        client = Client(transport, options, time.monotonic, self._holders)
        self._clients[:] = [known for known in self._clients if not known.is_closed] + [client]
        try:
            client.connect()
        except BaseException as error:
            client.close(error)
            raise
        self._snapshots = client.schedule_snapshots(self._snapshots)
        return client


class Collectives(NamedTuple):
    """How many collective calls a worker has made over its store."""

    agreements: int
    """How many agreements it has opened."""
    barriers: int
    """How many barriers of the store it has passed."""
    open: Mapping[int, int]
    """Number of each agreement that is open → how many calls were made over it."""


def count_collectives(store: DistKVStore) -> Collectives:
    open_ = {number: one.num_barriers for number, one in store._agreements.items() if not one.is_closed}
    return Collectives(store._sides, store._client.num_barriers, open_)


def resume_collectives(store: DistKVStore, former: Collectives) -> None:
    """Count on from what an earlier process of this rank has done; those that it did after that are repeated."""
    store._sides, store._client.num_barriers = former.agreements, former.barriers
    for number, count in former.open.items():
        if number in store._agreements:
            store._agreements[number].num_barriers = count


def _show_dist_debug_log(rank: int) -> None:
    """Log messages and rounds through the script's handlers, or to standard error if it has none."""
    logger = logging.getLogger("kvtrainer.debug")
    logger.setLevel(logging.DEBUG)
    if not logger.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter(f"%(asctime)s worker {rank} %(levelname)s %(message)s"))
        logger.addHandler(handler)
        # Otherwise each line would appear twice once the script installs handlers.
        logger.propagate = False


def _close_dist_clients(clients: Sequence[Client]) -> None:
    for client in clients:
        client.close(getattr(sys, "last_value", None))


def dist_mode_of(
    type: str, staleness: int | None, scale_lr_by_staleness: bool, environ: Mapping[str, str]
) -> Mode:
    """Return the mode of a store of this name.

    Raises:
        ConfigurationError: An option does not apply to this name, or is not an integer of at least 0.
    """
    name = type.lower()
    if name not in SSP_NAMES and staleness is not None:
        raise ConfigurationError(
            f"kvstore {type!r} takes no staleness, got {staleness!r}; use 'dist_ssp' for that"
        )
    check.boolean("scale_lr_by_staleness", scale_lr_by_staleness)
    if name in ASYNC_NAMES:
        return Mode(ASYNC, 0, scale_lr_by_staleness)
    if name in SSP_NAMES:
        return Mode(SSP, _read_dist_staleness(staleness, environ), scale_lr_by_staleness)
    if scale_lr_by_staleness:
        raise ConfigurationError(
            f"scale_lr_by_staleness does not apply to kvstore {type!r}, whose gradients are never stale; use "
            "'dist_async' or 'dist_ssp'"
        )
    return SYNCHRONOUS


def dist_water_mark_of(type: str, environ: Mapping[str, str]) -> int:
    """Return how many messages to a server may be in flight; further ones queue by priority. 0 means no limit.

    Raises:
        ConfigurationError: A variable has an unknown value.
    """
    van = environ.get(VAN_TYPE, "").strip().lower()
    if van not in ("", "zmq", P3):
        raise ConfigurationError(f"{VAN_TYPE} is {van!r}; the supported values are 'zmq' and 'p3'")
    if P3 not in (type.lower(), van):
        return 0
    given = environ.get(WATER_MARK, "").strip() or str(DEFAULT_WATER_MARK)
    return check.integer(WATER_MARK, int(given) if given.isdecimal() else given, 1, (1 << 31) - 1)


def _next_dist_namespace(environ: Mapping[str, str]) -> str:
    """Return a namespace with the attempt, because servers may still wait for workers of an earlier one."""
    attempt = env.attempt_from_env(environ)
    name = f"store{next(_created)}"
    return f"{name}, attempt {attempt}" if attempt else name


def _read_dist_staleness(given: int | None, environ: Mapping[str, str]) -> int:
    value: object = given
    if given is None:
        text = environ.get(STALENESS, "").strip()
        value = int(text) if text.isdecimal() and len(text) < 10 else text or DEFAULT_STALENESS
    return check.integer(f"staleness ({STALENESS})", value, 0)
