"""The process side of a server: its socket, its clock and its main loop, around a service that answers requests.

`Server` owns one ZeroMQ ROUTER socket and one thread. Each turn of `run` receives for a bounded time, lets the service
answer, ticks the service every TICK seconds, and retries replies that slow peers have not accepted yet. Workers on the
same host may use a shared-memory channel instead of the socket (`transport.channel`). This file and `transport.tcp`
are the only ones that know ZeroMQ.

Invariants:

- Sends never block. What a peer does not accept is queued in its `ReplyBacklog`, so a stopped worker delays no other.
- Queued weights are not copied. `Leases` records them, and the service does not write weights that are leased.
- No peer gets all of the server's time or memory: turns, frames and the backlog are bounded.
- If the server itself was stopped for a while, silent workers are not blamed for it (`reset_liveness`).
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from functools import partial
from itertools import zip_longest
from operator import attrgetter
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
import zmq
from torch import Tensor

from kvstore_server.access import AccessControl
from kvstore_server.client_rates import ClientRates
from kvstore_server.debug_log import Peer, debug_log
from kvstore_server.durable.fd_store import SupervisorFdStore, descriptors_from_fd_store, fd_store_address
from kvstore_server.durable.snapshot_folder import SnapshotFolder
from kvstore_server.durable.spill_folder import SpillFolder
from kvstore_server.engine.captured import Captures
from kvstore_server.engine.durability import Durability, DurabilityContents, Head, read_durability
from kvstore_server.engine.engine import Engine
from kvstore_server.engine.memory import available_memory, return_free_memory
from kvstore_server.engine.namespace import EngineConfig
from kvstore_server.engine.snapshots import DEFAULT_PERIOD, SnapshotPeriod, Snapshots
from kvstore_server.errors import AccessDeniedError, ConfigurationError, KVStoreError, to_wire
from kvstore_server.keys import ClientTable, KeyHolder, ServerKeys
from kvstore_server.protocol import messages as m
from kvstore_server.protocol.frames import (
    KEYS_PER_MESSAGE,
    MAX_FRAME,
    MAX_FRAMES,
    MAX_PAYLOAD,
    SENT_ALONE,
    Frame,
    LongMessage,
    decode_frames,
    divided,
    encode_frames,
    encode_frames_and_payloads,
)
from kvstore_server.protocol.rows import PACKED_ROWS
from kvstore_server.shard.shard import Leases
from kvstore_server.transport.channel import ChannelListener
from kvstore_server.transport.connections import ConnectionLimits
from kvstore_server.transport.tcp import (
    Admission,
    check_refuses_unknown_keys,
    drain_monitor,
    prepare_tcp_socket,
    secure_server_socket,
)

_log = logging.getLogger(__name__)

TICK = 0.1
"""Seconds between checks of deadlines."""
SUSPENDED_AFTER = 1.0
"""If a turn of the loop takes longer than this (seconds), the server itself was stopped or very busy."""
TURN = 0.005
"""Seconds after which a turn receives no more messages; a single message does not take much longer."""
_BURST = 1024
"""Frames of one message that are received between two checks of the clock."""
_PORTION = 64 << 20
"""Bytes sent in one turn; the rest is queued."""
_MUCH = 32 << 20
"""After this many bytes of refused messages, free memory is returned to the system, which takes a moment."""
_FREED_WITHIN = 2.0
"""Seconds after the end of a connection in which free memory is returned again and again."""
_NOW = int(zmq.NOBLOCK)
_MORE = _NOW | int(zmq.SNDMORE)
"""Plain ints; ZeroMQ's enum members take several times as long to combine."""
_MAX_COPIES = 4
_MESSAGE_COST, _PART_COST = 4096, 256
"""The fixed cost of a message, and of each of its parts, expressed in bytes."""
_nbytes_of: Callable[[Tensor], int] = attrgetter("nbytes")
OFF, PROCESS = "off", "process"
_NOBODY = Peer()
_MIN_LINGER = 1.0
"""The least time in seconds for queued replies to leave when the server ends."""


@dataclass(frozen=True)
class ServerOptions:
    """Where a server listens, and how much it queues for slow peers.

    Args:
        bind: Address to listen on; port 0 lets the system choose.
        drain_timeout: Seconds that open rounds get to finish after SIGTERM.
        max_backlog: Bytes that may be queued for one slow peer. If more are queued when another reply comes, they are
            dropped.
        max_message_bytes: Largest message of those kinds that may have many frames.
        durability: "process": the state outlives the process if a supervisor keeps its memory; "off": it ends with it.
        restart_timeout: Seconds that workers wait for a restart of a server whose state outlives its process, in memory
            or in snapshots.
        state_dir: The directory of snapshots; empty: there are none.
        snapshot_every: How often snapshots are taken.
        keys: The server's key, and its clients; None: it serves everybody who connects.
        spill_dir: The directory for rows of hash tables; empty: they are in memory.
        captures: Whether messages of rounds that repeat are compared with former ones instead of decoded.
    """

    bind: str = "tcp://127.0.0.1:0"
    drain_timeout: float = 10.0
    max_backlog: int = 4 << 30
    max_message_bytes: int = 4 << 30
    durability: str = OFF
    restart_timeout: float = 60.0
    state_dir: str = ""
    snapshot_every: SnapshotPeriod = DEFAULT_PERIOD
    keys: ServerKeys | None = None
    spill_dir: str = ""
    captures: bool = True


class Service(Protocol):
    """Answers requests, given the time: the engine of a store, or the scheduler of a job."""

    @property
    def is_stopping(self) -> bool: ...
    @property
    def num_ended(self) -> int: ...
    def handle(self, peer: bytes, request: m.Request, now: float) -> list[m.Outgoing]: ...
    def tick(self, now: float) -> list[m.Outgoing]: ...
    def reset_liveness(self, now: float) -> None: ...
    def stop(self) -> None: ...
    def is_idle(self) -> bool: ...
    def abandon(self, now: float) -> list[m.Outgoing]: ...


def make_server(
    config: EngineConfig,
    options: ServerOptions,
    clock: Callable[[], float] = time.monotonic,
    environ: MutableMapping[str, str] | None = None,
) -> Server:
    """Return a server of a store that listens already.

    With durability "process" it continues with what an earlier process of it has left with its supervisor: under the
    same address and run, with the same tables and weights.

    Args:
        environ: Says where the supervisor is; the variables that say what it passed are removed.

    Raises:
        ConfigurationError: Like `Server`; or the directory of snapshots, or that of rows, cannot be used.
        RecoveryError: What was left is damaged, is of another server, or cannot be kept further.
    """
    # 1. What an earlier process has left, and the directories.
    spill = SpillFolder(options.spill_dir) if options.spill_dir else None
    config, options, durability, stored = _open_server_durability(
        config, options, {} if environ is None else environ
    )
    folder = None
    if options.state_dir:
        folder = SnapshotFolder(options.state_dir, config.server)
        config = replace(config, restart_timeout=options.restart_timeout)
    # 2. The engine, which workers of this host find by the run.
    identity = {name: getattr(config, name) for name in ("server", "num_servers", "capability")}
    snapshots = None if folder is None else partial(Snapshots, folder, options.snapshot_every, identity)
    leases = Leases()
    engine = Engine(config, leases, clock, durability=durability, snapshots=snapshots, spill=spill)
    engine.budget.available = available_memory
    try:
        listener = ChannelListener(
            config.run_id, engine.is_session, engine.budget, leases, engine.check_processes
        )
    except OSError as error:
        _log.warning("workers of this host cannot share memory with this server: %s", error)
        listener = None
    if stored is not None:
        engine.restore(clock())
    if options.captures and listener is not None:
        engine.captures = Captures()
    server = Server(
        engine,
        options,
        leases,
        clock,
        listener,
        engine.name_of,
        engine.hellos,
        engine.claimed_memory,
        engine.take,
    )
    access = server.access
    if access is not None:
        engine.budget.client_memory = access.memory_of
    # 3. From here on everything is logged.
    if durability is not None:
        engine.begin_log(
            Head(config.server, config.num_servers, config.capability, config.run_id, server.endpoint)
        )
    if stored is not None:
        _log.warning(
            "continues at %s after a restart, with %d namespaces and %d tables that the process before it held in "
            "memory",
            server.endpoint,
            len(engine.namespaces),
            sum([len(space.tables) for space in engine.namespaces.values()]),
        )
    return server


def _open_server_durability(
    config: EngineConfig, options: ServerOptions, environ: MutableMapping[str, str]
) -> tuple[EngineConfig, ServerOptions, Durability | None, DurabilityContents | None]:
    """Read what an earlier process has left with the supervisor, and let this one store what it does.

    Returns the configuration and options with which the server continues. Without durability, or without a supervisor,
    there is nothing; the latter is logged.
    """
    if options.durability != PROCESS:
        return config, options, None, None
    kept = descriptors_from_fd_store(environ, os.getpid())
    address = fd_store_address(environ)
    if address is None:
        _log.warning(
            "nothing holds this server's memory when it ends (no NOTIFY_SOCKET and FDSTORE in the environment), so "
            "it goes on as with --durability off; start it with --supervise, with kvlaunch, or by systemd 254 or "
            "newer with FileDescriptorStoreMax="
        )
        return config, options, None, None
    stored = read_durability(kept)
    durability = Durability(SupervisorFdStore(*address, [one.name for one in kept]), stored)
    config = replace(config, restart_timeout=options.restart_timeout)
    if stored is not None:
        stored.head.check(config.server, config.num_servers, config.capability)
        config = replace(config, run_id=stored.head.run_id)
        options = replace(options, bind=stored.head.endpoint)
    return config, options, durability, stored


class Server:
    """Serves one service until it is told to stop.

    Args:
        leases: Is told which buffers of the service are queued.
        listener: Accepts shared-memory channels of workers on this host.
        name_of: Returns the worker that has a routing id, for the debug log.
        hellos: Returns what the open sessions have begun with, the oldest first.
        namespaces: Returns the namespaces that exist, and the bytes that each of them has claimed.
        take: Handles the frames of a message in shared memory that repeats; see `Engine.take`.

    Raises:
        ConfigurationError: The address is in use, or does not belong to this machine; the keys cannot be used, or would
            not keep unknown clients out.
    """

    def __init__(
        self,
        service: Service,
        options: ServerOptions,
        leases: Leases | None = None,
        clock: Callable[[], float] = time.monotonic,
        listener: ChannelListener | None = None,
        name_of: Callable[[bytes], Peer] = lambda _: Peer(),
        hellos: Callable[[], Iterable[m.Hello]] = tuple,
        namespaces: Callable[[], Mapping[str, int]] = dict,
        take: Callable[[bytes, Sequence[Frame], float], list[m.Outgoing] | None] | None = None,
    ) -> None:
        # 1. What is served, and to whom.
        self.service = service
        self._options = options
        self._clock = clock
        self._started_at = clock()
        self._leases = Leases() if leases is None else leases
        self._listener = listener
        self._channels = {} if listener is None else listener.channels
        self._debug_log = debug_log("kvstore_server.debug")
        """The debug log for messages; None unless that logger shows debug lines."""
        self._name_of = name_of
        self._take = take if self._debug_log is None else None
        # 2. Outgoing: what is queued, and how much this turn may still send.
        self._backlog: dict[bytes, ReplyBacklog] = {}
        self._budget = _PORTION
        """Bytes that may still be sent in this turn."""
        self._copies: dict[tuple[int, int], tuple[Tensor, zmq.Frame]] = {}
        """(address, size) of a payload that several workers get → the payload, and the frame with a copy for the
        socket.
        """
        # 3. Incoming: the frames received so far. The socket delivers nothing else before a message is complete.
        self._frames: list[zmq.Frame] = []
        """Frames of the message being received, its sender's routing id first."""
        self._long: LongMessage | None = None
        """That message, once it has more frames than most kinds may have."""
        self._incoming_since = 0.0
        self._refused = 0
        """Bytes of refused messages since the last time that free memory was returned."""
        self._returns_memory_until = -math.inf
        """Until then free memory is returned at each tick."""
        self.is_stop_requested = False
        # 4. Stopping, and the socket itself.
        self._until: Callable[[float], bool] = lambda _now: False
        self._drain_until = float("inf")
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._set_options()
        self._poller = zmq.Poller()
        # 5. Who is served, if clients have keys, and what the others may use up.
        self._limits = ConnectionLimits(options.keys is not None)
        self._accepted: Any = None
        """Tells when a connection was accepted."""
        self._clients: ClientTable | None = None
        self._access: AccessControl | None = None
        self._admission: Admission | None = None
        self._rates = ClientRates[_Waiting]()
        if options.keys is not None:
            clients = self._clients = ClientTable(options.keys)
            self._access = AccessControl(lambda: clients.by_key, hellos, namespaces)
            self._admission = Admission(self._context, lambda: clients.by_key, self._limits, clock)
            self._poller.register(self._admission.socket, zmq.POLLIN)
            secure_server_socket(self._socket, options.keys.pair)
        if listener is not None:
            self._poller.register(listener.fileno(), zmq.POLLIN)
        self._poller.register(self._socket, zmq.POLLIN)
        try:
            self._socket.bind(options.bind)
            if options.keys is not None and self._admission is not None:
                check_refuses_unknown_keys(
                    self._context, self.endpoint, self._admission, options.keys.pair.public
                )
        except ConfigurationError:
            self.close()
            raise
        except zmq.ZMQError as error:
            self.close()
            raise ConfigurationError(
                f"cannot listen on {options.bind}: {error}; is another process there, or is this not an address of "
                "this machine?"
            ) from None
        port = self.endpoint.rpartition(":")[2]
        self._limits.port = int(port) if port.isdecimal() else 0
        # A new connection wakes the loop, so that it is looked at before much has come over it.
        self._accepted = self._socket.get_monitor_socket(zmq.EVENT_ACCEPTED)
        self._poller.register(self._accepted, zmq.POLLIN)

    @property
    def endpoint(self) -> str:
        """The address on which the server listens, with the actual port."""
        return str(self._socket.getsockopt_string(zmq.LAST_ENDPOINT))

    @property
    def access(self) -> AccessControl | None:
        """What checks each message; None if clients have no keys."""
        return self._access

    def request_stop(self) -> None:
        """Ask the server to drain and return from `run`; may be called from a signal handler."""
        self.is_stop_requested = True

    def stop_when(self, condition: Callable[[float], bool]) -> None:
        """Stop the server once `condition(now)` is true at a tick."""
        self._until = condition

    @torch.no_grad()
    def run(self) -> None:
        """Serve until `request_stop`, then until open rounds have ended and replies were sent.

        Rounds that are still open after the drain timeout fail with ServerStoppingError; so do later requests of
        workers.
        """
        next_tick = looked = self._clock()
        num_ended = 0
        # 1. When stopping, leave as soon as the service is idle, or at the drain deadline.
        while True:
            if self.service.is_stopping:
                is_drained = self.service.is_idle() and not self._backlog
                if is_drained or self._clock() >= self._drain_until:
                    break
            # 2. Receive. If replies are queued, poll only briefly before trying them again.
            idle = min(TICK, self._limits.interval)
            if self._rates.num_waiting:
                idle = min(idle, self._rates.next_due(self._clock()))
            timeout = (0.005 if self._budget > 0 else 0.0) if self._backlog else idle
            self._budget = _PORTION
            is_drained = True
            for ready, _ in self._poller.poll(math.ceil(timeout * 1000)):
                if ready is self._socket:
                    is_drained = self._receive()
                elif ready is self._accepted:
                    drain_monitor(self._accepted)
                    self._limits.accepted()
                elif self._admission is not None and ready is self._admission.socket:
                    self._admission.receive()
                elif self._listener is not None:
                    self._listener.receive(self._answer)
            if self._rates.num_waiting:
                self._handle_waiting()
            # 3. If this turn took very long, the workers' messages have not been read yet: do not call them silent.
            now = self._clock()
            if now - looked > SUSPENDED_AFTER or (
                self._frames and now - self._incoming_since > SUSPENDED_AFTER
            ):
                self.service.reset_liveness(now)
                self._limits.excuse(now)
                next_tick = now + SUSPENDED_AFTER  # what the workers said meanwhile has yet to be read
            # 4. Housekeeping: channels, deadlines, and memory of namespaces that have ended.
            looked = now
            num_ended_before = self._limits.num_ended
            if is_drained:
                self._limits.check(now)
            if self._limits.num_ended > num_ended_before:
                # libzmq frees what it has kept of them a moment later.
                self._returns_memory_until = now + _FREED_WITHIN
            if now >= next_tick:
                if self._listener is not None:
                    self._listener.reap_and_flush(now)
                self._send_all(self.service.tick(now))
                next_tick = now + TICK
                if self._clients is not None:
                    self._clients.refresh()
                is_much = self._refused >= _MUCH or now < self._returns_memory_until
                if self.service.num_ended > num_ended or is_much:
                    num_ended, self._refused = self.service.num_ended, 0
                    return_free_memory()
                self.is_stop_requested |= self._until(now)
            # 5. Send what is queued, and begin to stop if asked to.
            if self._backlog:
                self._retry_backlog()
            if self.is_stop_requested and not self.service.is_stopping:
                _log.info(
                    "stopping; waiting up to %g s for rounds that have begun", self._options.drain_timeout
                )
                self.service.stop()
                self._drain_until = self._clock() + self._options.drain_timeout
        self._budget = _PORTION
        self._send_all(self.service.abandon(self._clock()))

    def close(self) -> None:
        """Close the socket. Queued replies get the rest of the drain timeout, at least a second, to leave."""
        left = self._drain_until - self._clock() if self.service.is_stopping else 0.0
        if self._accepted is not None and not self._socket.closed:
            self._socket.disable_monitor()
        self._socket.close(linger=int(1000 * max(left, _MIN_LINGER)))
        if self._admission is not None:
            self._admission.socket.close()
        self._limits.close()
        if self._accepted is not None:
            self._accepted.close(linger=0)
        if self._listener is not None:
            self._listener.close()
        self._context.term()

    def _set_options(self) -> None:
        socket = self._socket
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        socket.setsockopt(zmq.ROUTER_HANDOVER, 1)  # a reconnecting peer keeps its routing id
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME)
        socket.setsockopt(zmq.RCVHWM, 1000)
        socket.setsockopt(zmq.SNDHWM, 32)  # copies, of up to 1 MiB each
        socket.setsockopt(zmq.HANDSHAKE_IVL, 2000)
        prepare_tcp_socket(socket, self._options.bind)
        socket.setsockopt(zmq.BACKLOG, 512)

    def _receive(self) -> bool:
        """Receive messages until the turn is over. Of a long message, a bounded number of frames at a time.

        Returns whether all that have come were received.
        """
        now = self._clock()
        end = now + TURN
        while now < end:
            for _ in range(_BURST):
                try:
                    frame = self._socket.recv(_NOW, copy=False)
                except zmq.Again:
                    return True
                if self._long is not None:
                    self._long.take(frame)
                elif len(self._frames) > MAX_FRAMES:
                    self._long = LongMessage([*self._frames[1:], frame], self._options.max_message_bytes)
                else:
                    self._frames.append(frame)
                if not frame.more:
                    peer, key = self._frames[0].bytes, ""
                    if self._access is not None:
                        key = str(frame.get("User-Id"))
                    message = self._long or self._frames[1:]
                    size, fd = _nbytes_of_message(message), _descriptor_of(frame)
                    is_valid = self._answer(peer, message, False, key)
                    self._limits.heard(fd, size, is_valid and self._name_of(peer) != _NOBODY, key)
                    self._frames, self._long = [], None
                    break
                if len(self._frames) == 1:
                    self._incoming_since = now
            now = self._clock()
        return False

    def _answer(
        self, peer: bytes, message: Sequence[Frame] | LongMessage, is_shared: bool = True, key: str = ""
    ) -> bool:
        """Let the service answer a message of the socket or of shared memory; send or queue the replies.

        Args:
            key: The sender's public key, if clients have keys.

        Returns:
            Whether it was a message that its sender may send.
        """
        # A message that repeats is compared with the one before, and not decoded.
        if self._take is not None and is_shared and isinstance(message, list) and self._is_known(peer):
            taken = self._take(peer, message, self._clock()) if len(message) == MAX_FRAMES else None
            if taken is not None:
                message.clear()
                self._send_all(taken)
                return True
        nbytes = _nbytes_of_message(message)
        number, holder = 0, None
        began = 0.0 if self._access is None else self._clock()
        try:
            request = m.Request(
                *(message.decode() if isinstance(message, LongMessage) else decode_frames(message))
            )
            number = request.number
            if self._access is not None:
                holder = self._access.check(peer, key, request.body)
                if self._rates.concerns(holder):
                    waiting = _Waiting(peer, request, nbytes, is_shared, key)
                    if self._holds_back(waiting, holder):
                        return True
                    del waiting
        except KVStoreError as error:
            self._refused += nbytes
            if self._access is not None:
                sender, now = self._access.holder_of(peer, key), self._clock()
                if sender is not None and self._rates.drops_refused(sender, now, nbytes, now - began):
                    return False
            _log.warning("refused a message: %s", error)
            self._send_all([m.Outgoing(peer, m.Reply(number, m.Failed(*to_wire(error))))])
            return False
        if isinstance(message, list):
            message.clear()
        if self._debug_log is not None:
            self._debug_log.message("received", self._name_of(peer), number, request.body)
        replies = self._handle(peer, request, nbytes, is_shared, holder)
        # Drop the reference first, so that a reply over the channel already returns the message's memory to the
        # worker.
        del request
        if replies:
            self._send_all(replies)
        return True

    def _is_known(self, peer: bytes) -> bool:
        """Return whether gradients of a peer may be taken at once: it is allowed to send them, and has no rates."""
        if self._access is None:
            return True
        holder = self._access.known_sender(peer, m.Contribute)
        return holder is not None and not self._rates.concerns(holder)

    def _handle(
        self, peer: bytes, request: m.Request, nbytes: int, is_shared: bool, holder: KeyHolder | None
    ) -> list[m.Outgoing]:
        """Let the service answer a message, at the expense of the client whose it is."""
        body = request.body
        if is_shared and isinstance(body, m.Contribute) and body.encoding not in (b"", PACKED_ROWS):
            # The sender could still change its memory. What a codec reads must stay as it was checked, so it is
            # copied; of rows only the ids matter, which are copied when they are read.
            own = tuple(payload.clone() for payload in body.payloads)
            request = request._replace(body=replace(body, payloads=own))
        began = self._clock()
        replies = self.service.handle(peer, request, began)
        if holder is not None and not isinstance(body, m.Heartbeat) and self._rates.concerns(holder):
            now = self._clock()
            self._rates.charge(holder, now, 1, nbytes, now - began)
        if any([isinstance(one.reply.body, m.Failed) for one in replies]):
            self._refused += nbytes
        if isinstance(body, m.GetStatus):
            replies = [self._with_own_facts(one) for one in replies]
        return replies

    def _holds_back(self, waiting: _Waiting, holder: KeyHolder) -> bool:
        """Return whether a message is not handled now because its client has used up its rates."""
        now = self._clock()
        if isinstance(waiting.request.body, m.Heartbeat):
            return self._rates.drops_heartbeat(holder, now)
        return self._rates.holds_back(holder, waiting, waiting.nbytes, now)

    def _handle_waiting(self) -> None:
        """Handle the messages that have waited long enough."""
        now = self._clock()
        for peer, request, nbytes, is_shared, key in self._rates.due(now):
            replies: list[m.Outgoing]
            try:
                holder = None if self._access is None else self._access.check(peer, key, request.body)
            except AccessDeniedError as error:  # it was removed meanwhile
                replies = [m.Outgoing(peer, m.Reply(request.number, m.Failed(*to_wire(error))))]
            else:
                replies = self._handle(peer, request, nbytes, is_shared, holder)
            del request
            self._send_all(replies)
            if self._clock() - now > TURN:
                break  # the others have their turn

    def _with_own_facts(self, out: m.Outgoing) -> m.Outgoing:
        if not isinstance(out.reply.body, m.Status):
            return out
        queued = sum([one.nbytes for one in self._backlog.values()])
        own = {
            "queued": queued,
            "uptime": self._clock() - self._started_at,
            "cpu_seconds": time.process_time(),
            "is_authenticated": self._access is not None,
            "refused": self._num_refused(),
        }
        return out._replace(reply=m.Reply(out.reply.number, m.Status({**out.reply.body.values, **own})))

    def _num_refused(self) -> int:
        """How many connections and messages were refused, or ended before they had a session."""
        if self._access is None or self._admission is None:
            return self._limits.num_ended
        return self._limits.num_ended + self._admission.num_refused + self._access.refused.total()

    def _send_all(self, replies: Iterable[m.Outgoing]) -> None:
        """Send replies, or queue them: for a slow peer, behind other replies, or because this turn has sent enough."""
        self._copies.clear()
        for peer, reply in pack_replies(
            self._without_queued(replies) if self._backlog else replies, self._portion
        ):
            waiting = self._backlog.get(peer)
            if waiting is None:
                if self._budget > 0 and self._try_send(peer, reply) is not _Sent.LATER:
                    continue
                waiting = self._backlog[peer] = ReplyBacklog()
            for payload in _reply_payloads(reply):
                self._leases.hold(payload)
            waiting.append(reply)
            if self._debug_log is not None:
                self._debug_log.message("queued", self._name_of(peer), reply.number, reply.body)

    def _without_queued(self, replies: Iterable[m.Outgoing]) -> list[m.Outgoing]:
        """Remove weights that are queued for their peer already, because the request was repeated."""
        found = []
        for out in replies:
            waiting = self._backlog.get(out.peer)
            if waiting is not None and waiting.has_state and isinstance(out.reply.body, m.SliceState):
                continue  # a worker that still needs this copy asks again
            if waiting is not None and waiting.nbytes > self._options.max_backlog:
                _log.error("a peer does not read; %d bytes for it are dropped", waiting.nbytes)
                self._drop_backlog(out.peer)
            elif waiting is not None:
                out = m.Outgoing(out.peer, waiting.without_coming(out.reply))
            found.append(out)
        return found

    def _portion(self, peer: bytes) -> int:
        channel = self._channels.get(peer)
        return MAX_PAYLOAD if channel is None else channel.portion

    def _try_send(self, peer: bytes, reply: m.Reply, waiting: ReplyBacklog | None = None) -> _Sent:
        """Try to send one reply, which may be the oldest of `waiting`."""
        body = reply.body
        channel = None if isinstance(body, m.SliceState) else self._channels.get(peer)
        try:
            if channel is not None:
                if (
                    isinstance(body, m.Weights)
                    and len(body.locations)
                    and not channel.show(body.locations[:, m.LOCATION_PLACE])
                ):
                    return _Sent.LATER
                head, payloads = encode_frames_and_payloads(reply)
                if not channel.send(head, payloads, isinstance(body, m.Weights) and body.zero_copy):
                    return _Sent.LATER
            else:
                frames = encode_frames(reply) if waiting is None else waiting.frames()
                self._hand_over(peer, frames, _reply_payloads(reply))
        except zmq.Again:
            return _Sent.LATER
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            _log.info("a peer went away before its reply")
            return _Sent.NEVER
        except (BrokenPipeError, ConnectionResetError):
            return _Sent.LATER  # its messages before the break are still to be read
        except OSError:
            if channel is None or self._listener is None:
                raise
            self._listener.drop(peer)  # the worker closed it; it may have others
            return _Sent.LATER
        size = _reply_size(reply)
        self._budget -= size
        if self._access is not None:
            self._charge_reply(self._access, peer, size)
        if self._debug_log is not None:
            self._debug_log.message("sent", self._name_of(peer), reply.number, body)
        return _Sent.NOW

    def _charge_reply(self, access: AccessControl, peer: bytes, size: int) -> None:
        holder = access.holder_of(peer)
        if holder is not None and self._rates.concerns(holder):
            self._rates.charge(holder, self._clock(), nbytes=size)

    def _hand_over(self, peer: bytes, frames: Sequence[Frame], payloads: Sequence[Tensor]) -> None:
        """Pass a message to the socket. A long payload is copied once for all workers that get it in a row."""
        *head, last = frames
        is_long = len(payloads) == 1 == len(head) and payloads[0].nbytes >= SENT_ALONE
        if is_long:
            last = self._copy_of(payloads[0], last)
        send = self._socket.send
        send(peer, _MORE, copy=True)
        for frame in head:
            send(frame, _MORE, copy=True)
        send(last, _NOW, copy=not is_long)

    def _copy_of(self, payload: Tensor, frame: Frame) -> zmq.Frame:
        """Copy the frame of a payload, unless it was copied just before."""
        where = payload.data_ptr(), payload.nbytes
        if where not in self._copies:
            if len(self._copies) == _MAX_COPIES:
                self._copies.clear()
            self._copies[where] = payload, zmq.Frame(frame, copy=True)
        return self._copies[where][1]

    def _retry_backlog(self) -> None:
        self._copies.clear()
        peers = list(self._backlog)
        while peers and self._budget > 0:
            peers = [peer for peer in peers if self._budget > 0 and self._retry(peer)]

    def _retry(self, peer: bytes) -> bool:
        """Send the oldest reply queued for a peer, and move the peer to the end; return whether to go on with it."""
        waiting = self._backlog[peer]
        waiting.divide(self._portion(peer))
        reply = waiting.replies[0]
        sent = self._try_send(peer, reply, waiting)
        if sent is _Sent.LATER:
            channel = self._channels.get(peer)
            is_state = isinstance(reply.body, m.SliceState)  # state is sent over ZeroMQ
            return channel is not None and not is_state and channel.make_room(waiting.nbytes)
        if sent is _Sent.NEVER:
            self._drop_backlog(peer)
            return False
        for payload in _reply_payloads(waiting.popleft()):
            self._leases.release(payload)
        del self._backlog[peer]
        if waiting.replies:
            self._backlog[peer] = waiting
        return bool(waiting.replies)

    def _drop_backlog(self, peer: bytes) -> None:
        for reply in self._backlog.pop(peer).replies:
            for payload in _reply_payloads(reply):
                self._leases.release(payload)


def _nbytes_of_message(message: Sequence[Frame] | LongMessage) -> int:
    return message.nbytes if isinstance(message, LongMessage) else sum(map(len, message))


def _descriptor_of(frame: zmq.Frame) -> int:
    """Return the descriptor of the connection over which a frame came; -1 if ZeroMQ does not know it.

    It does not for peers that speak a version of ZMTP before 3.0.
    """
    try:
        return int(frame.get(zmq.SRCFD))
    except zmq.ZMQError:
        return -1


class _Waiting(NamedTuple):
    peer: bytes
    request: m.Request
    nbytes: int
    is_shared: bool
    key: str


class _Sent(Enum):
    """The result of trying to send: sent, the peer is slow, or the peer is gone."""

    NOW = auto()
    LATER = auto()
    NEVER = auto()


@dataclass
class ReplyBacklog:
    """Replies queued for one peer, oldest first. Each is encoded when it is about to be sent."""

    replies: deque[m.Reply] = field(default_factory=deque)
    nbytes: int = 0
    _coming: set[tuple[int, int, int]] = field(default_factory=set)
    """(request number, slot, version) of queued weights."""
    _frames: list[Any] | None = None
    _num_states: int = 0

    @property
    def has_state(self) -> bool:
        return self._num_states > 0

    def append(self, reply: m.Reply) -> None:
        self.replies.append(reply)
        self._num_states += isinstance(reply.body, m.SliceState)
        self.nbytes += _reply_size(reply)
        self._coming.update(_reply_keys(reply))

    def divide(self, most: int) -> None:
        """Split the oldest reply into messages of at most `most` bytes of data."""
        first = self.replies[0]
        bodies = divided(first.body, most)
        if len(bodies) > 1:
            self.replies.popleft()
            self.replies.extendleft([m.Reply(first.number, body) for body in reversed(bodies)])
            self.nbytes += _MESSAGE_COST * (len(bodies) - 1)
            self._frames = None

    def frames(self) -> Sequence[Any]:
        if self._frames is None:
            self._frames = encode_frames(self.replies[0])
        return self._frames

    def popleft(self) -> m.Reply:
        reply, self._frames = self.replies.popleft(), None
        self._num_states -= isinstance(reply.body, m.SliceState)
        self.nbytes -= _reply_size(reply)
        self._coming.difference_update(_reply_keys(reply))
        return reply

    def without_coming(self, reply: m.Reply) -> m.Reply:
        """Return the reply without weights that are queued already, because its request was repeated."""
        if not isinstance(reply.body, m.Weights):
            return reply
        missing = [at for at, key in enumerate(_reply_keys(reply)) if key not in self._coming]
        payloads = tuple([reply.body.payloads[at] for at in missing])
        parts, zero_copy = reply.body.parts[missing], reply.body.zero_copy
        return m.Reply(reply.number, m.Weights(parts, payloads, zero_copy, reply.body.locations))


def _reply_payloads(reply: m.Reply) -> Sequence[Tensor]:
    return reply.body.payloads if isinstance(reply.body, m.Weights) else ()


def _reply_size(reply: m.Reply) -> int:
    """Estimate the cost of a reply in bytes, with the fixed cost of the message and of each part."""
    body = reply.body
    if isinstance(body, m.Weights):
        return _MESSAGE_COST + _PART_COST * len(body.payloads) + sum(map(_nbytes_of, body.payloads))
    return _MESSAGE_COST + (len(body.data) if isinstance(body, m.SliceState) else 0)


def _reply_keys(reply: m.Reply) -> list[tuple[int, int, int]]:
    parts = reply.body.parts[:, :2].tolist() if isinstance(reply.body, m.Weights) else ()
    return [(reply.number, slot, version) for slot, version in parts]


def pack_replies(
    replies: Iterable[m.Outgoing], portion: Callable[[bytes], int] = lambda _: MAX_PAYLOAD
) -> list[m.Outgoing]:
    """Join replies to the same request into few messages, in order; `portion` is the most data in a peer's message."""
    weights: dict[tuple[bytes, int], list[m.Outgoing]] = {}
    done: dict[tuple[bytes, int], list[m.Matrix]] = {}
    # 1. Sort them by kind. What is said about a round (Absent, Done) goes before its weights.
    found: list[m.Outgoing] = []
    for out in replies:
        body, where = out.reply.body, (out.peer, out.reply.number)
        if isinstance(body, m.Weights):
            weights.setdefault(where, []).append(out)
        elif isinstance(body, m.Done):
            done.setdefault(where, []).append(body.rounds)
        else:
            found.append(out)
    # 2. One Done message for each request, within the limit of keys.
    for (peer, number), several in done.items():
        rounds = np.concatenate(several)
        for at in range(0, len(rounds), KEYS_PER_MESSAGE):
            found.append(m.Outgoing(peer, m.Reply(number, m.Done(rounds[at : at + KEYS_PER_MESSAGE]))))
    # 3. Join weights, and split them to the size that the peer accepts.
    queues: list[list[m.Outgoing]] = []
    for (peer, number), outs in weights.items():
        first: Any = outs[0].reply.body
        is_whole = len(first.payloads) <= 1 or (first.encoded and portion(peer) >= MAX_PAYLOAD)
        if len(outs) == 1 and is_whole:
            queues.append(outs)
            continue
        bodies: list[Any] = [out.reply.body for out in outs]
        parts = np.concatenate([body.parts for body in bodies])
        locations = np.concatenate([body.locations for body in bodies])
        payloads = tuple([payload for body in bodies for payload in body.payloads])
        whole = m.Weights(parts, payloads, all([body.zero_copy for body in bodies]), locations)
        queues.append([m.Outgoing(peer, m.Reply(number, body)) for body in divided(whole, portion(peer))])
    # 4. Interleave the peers: all make progress, and a slice that several get is sent while it is in the cache.
    return found + [one for turn in zip_longest(*queues) for one in turn if one is not None]
