"""A worker's sockets, and its shared memory with servers of the same host.

There are two DEALER sockets for each server: one for requests, and one for heartbeats, which a thread of their own
sends because ZeroMQ sockets belong to one thread. Once a session is open, messages to a server of the same host go
through a `Channel` in shared memory instead, except for optimizer states, which are too long. If there is no channel,
or it breaks, they go over ZeroMQ; what was lost with it is requested again by the session.

A server that is restarted when its process ends gets new sockets and a new channel (`reconnect`, `reopen`), so nothing
of the old process is mixed with what its successor sends. Over TCP the end of a connection is known from ZeroMQ's
monitor of the socket, and so is that a server refuses this process's key: ZeroMQ would not connect again, and say
nothing.

Requests wait in one heap per server, by priority, until the channel or the socket takes them. Over ZeroMQ a
`FlowWindow` limits how much of a round is on its way. All sockets, channels and process descriptors are in one poller.

A process that was forked from the owner (a DataLoader's worker, say) must leave the connection alone: sending raises
there, and closing does nothing. No other file of the trainer imports ZeroMQ.
"""

from __future__ import annotations

import errno
import heapq
import logging
import math
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from typing import Any

import zmq
from torch import Tensor

from kvstore_server.check import is_loopback
from kvstore_server.descriptors import allow_descriptors, check_descriptors, too_many_descriptors_error
from kvstore_server.engine.memory import keep_free_memory
from kvstore_server.errors import AccessDeniedError, ConfigurationError, KVStoreError, ProtocolError, describe
from kvstore_server.keys import ClientKeys
from kvstore_server.processes import Process, ProcessState
from kvstore_server.protocol import messages as m
from kvstore_server.protocol.frames import (
    MAX_FRAME,
    MAX_PAYLOAD,
    Frame,
    decode_frames,
    divided,
    encode_frames,
    encode_frames_and_payloads,
)
from kvstore_server.protocol.messages import MAX_SOCKETS
from kvstore_server.transport.channel import Channel, connect_channel, watch_over_channel
from kvstore_server.transport.tcp import (
    CLOSED,
    FAILED,
    ConnectionEvent,
    prepare_tcp_socket,
    read_monitor,
    secure_client_socket,
    tcp_routing_id,
)
from kvtrainer.client.flow_control import FlowWindow
from kvtrainer.client.session import MakeReport, SessionIds, Transport

_log = logging.getLogger(__name__)

HEARTBEAT_INTERVAL = 1.0
"""Seconds between two heartbeats to every server."""
_LINGER_MS = 2000
_IN, _OUT = int(zmq.POLLIN), int(zmq.POLLOUT)
"""Events as plain numbers, as polls return them."""
_NOW = int(zmq.NOBLOCK)
_MORE = _NOW | int(zmq.SNDMORE)
_COPIED = 512 << 10
"""Frames of at least this many bytes are sent without a copy; shorter ones are copied, which is faster."""
_FILES, _FILES_PER_SERVER = 8, 14
"""Files that a connection opens at most, and those for each server: sockets with their wake-up descriptors and a
monitor, and on the same host a channel with its memory and the server's process."""
_RETRY_MS = 50
"""The time between two attempts to connect; it doubles up to `_MAX_RETRY_MS` where no server is expected soon."""
_MAX_RETRY_MS = 1000
_KEY_PAUSE = 0.1
"""Seconds between two attempts with another public key of a server."""
_REDIRECTED = (errno.ECONNREFUSED, errno.ENOSYS)
"""Errors which mean that the server is not on this host, or which leave that open."""


class Connection(Transport):
    """A transport over ZeroMQ to the servers at `addresses`, in index order. Payloads must not change until the answer.

    Args:
        addresses: One per server.
        water_mark: How many messages to a server may be in ZeroMQ's queue; others wait here, sorted by priority. 0:
            all are passed to ZeroMQ at once, in order.
        transport: One of `env.TRANSPORTS`.
        keys: This process's key and those of the servers; None: neither has any.

    Raises:
        ConfigurationError: this process has too many files open.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        water_mark: int = 0,
        transport: str = "auto",
        keys: ClientKeys | None = None,
    ) -> None:
        self.num_servers = len(addresses)
        self._addresses = list(addresses)
        # 1. Sockets.
        self._pid = os.getpid()
        allow_descriptors()
        check_descriptors(
            _FILES + _FILES_PER_SERVER * len(addresses), f"a store over {len(addresses)} servers"
        )
        self._context = zmq.Context()
        self._ids = [tuple([tcp_routing_id() for _ in range(MAX_SOCKETS)]) for _ in addresses]
        """Routing ids by server: that of the socket for heartbeats, and those that sockets for requests have in turn. A
        new socket with the id of the one before could be taken for that one, which may still be about to connect."""
        self._num_sockets = [0] * len(addresses)
        """How many sockets for requests there were before the present one, by server."""
        self._keys = keys
        self._key_at = [0] * len(addresses)
        """By server: which of the servers' public keys it has. Another one is tried when it does not fit."""
        self._sockets: list[Any] = []
        self._heartbeat_sockets: list[Any] = []
        self._poller, self._channel_poll = zmq.Poller(), select.poll()
        self._monitors: dict[Any, int] = {}
        """Socket that tells what happens to the connection to a server → this server."""
        self._num_monitors = 0
        try:
            for server, address in enumerate(addresses):
                self._sockets.append(self._make_socket(server, water_mark))
                self._monitor(server, FAILED)  # before it connects, or a refusal could come before
                self._sockets[server].connect(address)
                self._heartbeat_sockets.append(self._connect_heartbeat(server))
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            if error.errno not in (errno.EMFILE, errno.ENFILE):
                raise
            raise too_many_descriptors_error(f"no socket to a server can be made: {error}") from None
        # 2. Channels, and what waits to be sent.
        self._transport = transport
        self._channels: dict[int, Channel] = {}
        """Of the servers on this host."""
        self._queues: list[list[tuple[int, tuple[int, ...], m.Request]]] = [[] for _ in addresses]
        """By server, a heap of (-priority, number, request) that wait to be sent."""
        self._windows = [FlowWindow() for _ in addresses]
        """By server, for requests over ZeroMQ."""
        self._num_sent = 0
        # 3. What `receive` polls.
        self._index: dict[Any, int] = {socket: server for server, socket in enumerate(self._sockets)}
        """Socket, or a channel's descriptor → server."""
        for socket in self._sockets:
            self._poller.register(socket, _IN)
        self._next_key_at = 0.0
        """Not before this time another key is tried."""
        self._refusals: dict[int, str] = {}
        """Server → why it does not let this process in, as far as that can be seen."""
        self._polls_only = False
        """The caller polls instead of blocking."""
        self._is_watching = False
        """The poller also waits for room to send."""
        self._ready: deque[Any] = deque()
        # 4. What is known of the servers.
        self._answered: set[int] = set()
        self._leaving: set[int] = set()
        """Servers that sent a message without a request number, as they do when they shut down."""
        self._processes: dict[int, Process] = {}
        """By server, if it is on this host and its process is visible."""
        self._ends: dict[int, int] = {}
        """Descriptor of a process that runs → its server."""
        self.ended: set[int] = set()
        self._restartable: Collection[int] = ()
        self.disconnected: set[int] = set()
        self._water_mark = water_mark
        self._heartbeats: _ConnectionHeartbeats | None = None
        self._is_closed = False

    def send(self, server: int, request: m.Request, priority: int = 0) -> None:
        """Queue a request without blocking. Raises KVStoreError in a process that was forked from the owner."""
        if os.getpid() != self._pid:
            raise KVStoreError(
                f"this connection belongs to process {self._pid}; process {os.getpid()} was forked from it and "
                "must make its own"
            )
        self._num_sent += 1
        heapq.heappush(self._queues[server], (-priority, (self._num_sent,), request))
        self._flush(server)

    def can_post(self, server: int) -> bool:
        return server in self._channels

    def post(self, server: int, head: Frame, payloads: Sequence[Tensor]) -> bool:
        channel = self._channels.get(server)
        if channel is None or not channel.is_usable or self._queues[server] or os.getpid() != self._pid:
            return False
        try:
            return channel.send([head], payloads, zero_copy=True)
        except OSError:  # the server has ended the channel; what it has said before has yet to be read
            return False

    def receive_frames(self, timeout: float) -> tuple[int, Sequence[Frame]] | None:
        for fd, _ in self._channel_poll.poll(max(0.0, 1000 * timeout)):
            server = self._index[fd]
            try:
                frames = self._channels[server].receive()
            except (OSError, ProtocolError) as error:
                self._lose_channel(server, error)
                return None
            if frames is not None:
                return server, frames
        return None

    def _flush(self, server: int) -> None:
        queue = self._queues[server]
        if self._may_be_gone(server):
            return
        while queue:
            # The most urgent first, through shared memory if there is any.
            urgency, number, request = queue[0]
            channel = self._channels.get(server)
            if channel is not None and (not channel.is_usable or isinstance(request.body, m.SliceState)):
                channel = None
            # A request that is too long for one message goes back as several.
            portions = divided(request.body, MAX_PAYLOAD if channel is None else channel.portion)
            if len(portions) > 1:
                heapq.heappop(queue)
                for at, body in enumerate(portions):
                    heapq.heappush(queue, (urgency, (*number, at), request._replace(body=body)))
                continue
            if channel is None:
                is_sent = self._send_far(server, request, -urgency)
            else:
                frames, payloads = encode_frames_and_payloads(request)
                try:
                    is_sent = channel.send(frames, payloads, zero_copy=True)
                except OSError:  # what the server has said before it ended the channel has yet to be read
                    break
            if not is_sent:
                break
            heapq.heappop(queue)

    def _may_be_gone(self, server: int) -> bool:
        """Return whether requests are held back, because a restartable server is gone, or was shut down."""
        has_ended = server in self.disconnected or (server in self.ended and server in self._restartable)
        return has_ended and not self._is_closed

    def _send_far(self, server: int, request: m.Request, priority: int) -> bool:
        window = self._windows[server]
        if window.must_hold(request.body, priority, time.monotonic()) and not self._is_closed:
            return False
        frames = encode_frames(request)
        is_copied, send = len(frames[-1]) < _COPIED, self._sockets[server].send
        try:
            for frame in frames[:-1]:
                send(frame, _MORE)
            send(frames[-1], _NOW, copy=is_copied)
        except zmq.Again:
            return False
        window.sent(request.body, priority)
        return True

    def receive(self, timeout: float) -> tuple[int, m.Reply] | None:
        """Wait up to `timeout` seconds for a reply of any server; queued requests are sent meanwhile.

        Raises:
            KVStoreError: the heartbeat thread has failed, so servers will take this process for dead.
            AccessDeniedError: a server does not accept this process's key, or its lack of one.
        """
        if self._is_closed or os.getpid() != self._pid:
            return None
        if self._heartbeats is not None and self._heartbeats.error is not None:
            raise KVStoreError(
                "this worker cannot tell servers any more that it is alive, and would be lost to the others: "
                f"{describe(self._heartbeats.error)}"
            )
        if self._polls_only != (timeout <= 0):
            self._set_polling(timeout <= 0)
        # 1. Return what is here already. One message of each server in turn, so that none is starved.
        deadline, has_ended = time.monotonic() + timeout, False
        while True:
            while self._ready:
                ready = self._ready.popleft()
                server = self._index.get(ready)
                reply = None if server is None else self._reply_of(server, ready)
                if server is not None and reply is not None:
                    return server, reply
            # 2. Poll until a message comes, there is room to send, a send window stalls, or the time is over.
            now, stall = time.monotonic(), math.inf
            if self._is_watching or any(self._queues):
                self._watch_queues()
                stall = min(
                    [one.release_at for one in self._windows if one.release_at is not None], default=math.inf
                )
            until = now if has_ended else min(deadline, stall)
            for ready, event in self._poller.poll(max(0, int(1000 * (until - now)))):
                if ready in self._ends:
                    self._poller.unregister(ready)
                    self.ended.add(self._ends.pop(ready))
                    has_ended = True
                    continue
                if ready in self._monitors:
                    has_ended |= self._take_events(self._monitors[ready], ready)
                    continue
                if event & _OUT and ready in self._index:
                    self._flush(self._index[ready])
                if event & ~_OUT:
                    self._ready.append(ready)
            # 3. Nothing more came: whatever a stalled window holds back goes now.
            if not self._ready and stall < math.inf:
                for server, window in enumerate(self._windows):
                    if window.end_if_stalled(time.monotonic()):
                        self._flush(server)
            # 4. The time is over, or a server's process has ended, which the caller wants to know at once.
            if not self._ready and (has_ended or now >= deadline):
                for channel in self._channels.values():
                    channel.tell()
                return None

    def _set_polling(self, polls_only: bool) -> None:
        """Switch between blocking and polling. A caller that polls computes meanwhile, so more may be on its way."""
        self._polls_only = polls_only
        for server, window in enumerate(self._windows):
            window.polls_only = polls_only
            if polls_only and window.release_at is not None:
                self._flush(server)

    def _reply_of(self, server: int, ready: Any) -> m.Reply | None:
        """Return one message of a server from its socket, or from the channel with this descriptor."""
        frames: list[Any] | None = None
        if isinstance(ready, int):
            channel = self._channels[server]
            was_usable = channel.is_usable
            try:
                frames = channel.receive()
            except (OSError, ProtocolError) as error:
                self._lose_channel(server, error)
            if was_usable and channel.is_tight:
                _log.warning("requests to %s go over tcp: it has no memory to share", self.describe(server))
            if frames is None:
                self._flush(server)  # the server may have freed memory
            else:
                self._ready.append(ready)  # there may be more
        else:
            with suppress(zmq.Again):
                frames = ready.recv_multipart(_NOW, copy=False)
        if frames is None:
            return None
        self._answered.add(server)
        _, _, number, body = decode_frames(frames)
        if not number:
            self._leaving.add(server)
        if not isinstance(ready, int):
            self._windows[server].answered(body)
            if self._queues[server]:
                self._flush(server)
        return m.Reply(number, body)

    def _watch_queues(self) -> None:
        """Poll for room to send, and ask servers for more shared memory if requests lack it."""
        self._is_watching = any(self._queues)
        for server, queue in enumerate(self._queues):
            channel = self._channels.get(server)
            waits_for_socket = bool(queue) and self._windows[server].release_at is None
            waits_for_socket &= not self._may_be_gone(server)
            if channel is not None:
                if queue and channel.is_usable and not isinstance(queue[0][2].body, m.SliceState):
                    channel.make_room(sum([_room_for(request) for _, _, request in queue]))
                    waits_for_socket = False
                is_full = bool(queue) and channel.is_usable and channel.is_full
                self._poller.modify(channel.fileno(), _IN | (_OUT if is_full else 0))
            self._poller.modify(self._sockets[server], _IN | (_OUT if waits_for_socket else 0))

    def _take_events(self, server: int, monitor: Any) -> bool:
        """Read what a monitor tells; return whether a restartable server is gone."""
        is_gone = False
        for event in read_monitor(monitor):
            if event is ConnectionEvent.UNKNOWN_KEY:
                name = "" if self._keys is None else self._keys.name
                raise AccessDeniedError(
                    f"{self.describe(server)} does not know the key of client {name!r}; add it to the server's "
                    "clients.json (kvstore-server keygen --client), or use another key (KVSTORE_KEYS, KVSTORE_KEY_NAME)"
                )
            if event is ConnectionEvent.NO_KEYS:
                raise AccessDeniedError(
                    f"{self.describe(server)} takes only clients with a key: name the directory that has one in "
                    "KVSTORE_KEYS"
                    if self._keys is None
                    else f"{self.describe(server)} has no key, and this process accepts only servers that have one "
                    "(KVSTORE_KEYS); start it with --keys"
                )
            if event is ConnectionEvent.OTHER_KEY and self._keys is not None:
                self._refusals[server] = (
                    "it broke the connection off before it said anything, as a server does that is too busy, or whose "
                    "key is none of those in server.public"
                )
                is_first = server not in self._answered and time.monotonic() >= self._next_key_at
                if len(self._keys.servers) > 1 and is_first:
                    self._next_key_at = time.monotonic() + _KEY_PAUSE
                    self._key_at[server] += 1
                    self._replace_socket(server)
                    break
            is_gone |= event is ConnectionEvent.GONE
        if is_gone and server in self._restartable:
            self.disconnected.add(server)
            return True
        return False

    def why_refused(self, server: int) -> str:
        return self._refusals.get(server, "")

    def describe(self, server: int) -> str:
        return f"server {server} ({self._addresses[server]})"

    def last_heartbeat(self, server: int) -> float:
        return self._heartbeats.heard[server] if self._heartbeats is not None else 0.0

    def process(self, server: int) -> ProcessState:
        process = self._processes.get(server)
        return ProcessState.UNKNOWN if process is None else process.state()

    def how_ended(self, server: int) -> str:
        process = self._processes.get(server)
        return "" if process is None else process.how_ended()

    def is_remote(self, server: int) -> bool:
        return server not in self._channels and not self._is_loopback(server)

    def _is_loopback(self, server: int) -> bool:
        return is_loopback(self._addresses[server].rpartition("/")[2].rpartition(":")[0])

    def channel(self, server: int) -> Channel | None:
        return self._channels.get(server)

    def sockets(self, server: int) -> tuple[bytes, ...]:
        return self._ids[server]

    def _own_id(self, server: int) -> bytes:
        """Return the routing id of the present socket for requests."""
        return self._ids[server][1 + self._num_sockets[server] % (MAX_SOCKETS - 1)]

    def begin(
        self, sessions: SessionIds, report: MakeReport = bytes, restartable: Collection[int] = ()
    ) -> None:
        """Share memory with servers of this host and watch them; begin to send signs of life to all.

        Raises:
            ConfigurationError: the transport is "shm", and some server is not on this host.
        """
        self._restartable = restartable
        for server in range(self.num_servers):
            self._end_monitor(server)
        for server in restartable:
            # A connection that is made only now is one to another process than the one that has welcomed this worker.
            self._monitor(server, CLOSED | FAILED | zmq.EVENT_HANDSHAKE_SUCCEEDED)
        for server, (run_id, session) in enumerate(sessions):
            if self._transport != "tcp":
                self._share_memory(server, run_id, session)
            self._watch(server, run_id, session)
        if len(self._channels) < self.num_servers:
            keep_free_memory()
        self._heartbeats = _ConnectionHeartbeats(
            self._heartbeat_sockets, sessions, report, self._key_at, self._connect_heartbeat
        )

    def _monitor(self, server: int, events: int) -> None:
        with suppress(
            zmq.ZMQError
        ):  # too many open files: requests that are not answered are repeated all the same
            self._num_monitors += 1
            monitor = self._sockets[server].get_monitor_socket(events, f"inproc://{self._num_monitors}")
            self._monitors[monitor] = server
            self._poller.register(monitor, _IN)

    def _end_monitor(self, server: int) -> None:
        for monitor in [one for one, of in self._monitors.items() if of == server]:
            del self._monitors[monitor]
            self._poller.unregister(monitor)
            self._sockets[server].disable_monitor()
            monitor.close(linger=0)

    def reconnect(self, server: int) -> None:
        """Replace channel and socket of a server that is started again, without blocking; see `Transport`."""
        # 1. The old process's channel, socket and monitor, with all that is on its way.
        if server in self._channels:
            self._lose_channel(server, ConnectionResetError("it is restarted"))
        for fd in [one for one, of in self._ends.items() if of == server]:
            self._poller.unregister(fd)
            del self._ends[fd]
        # 2. What is known of it; how its process ended may still be asked.
        self._queues[server].clear()
        self._windows[server] = FlowWindow()
        self._windows[server].polls_only = self._polls_only
        for known in (self._answered, self._leaving, self.ended, self.disconnected):
            known.discard(server)
        # 3. A new socket, which tries to connect at short intervals.
        self._replace_socket(server)

    def _replace_socket(self, server: int) -> None:
        """Connect again with a new socket; what the former one still had to send or receive is lost."""
        self._end_monitor(server)
        former = self._sockets[server]
        self._poller.unregister(former)
        del self._index[former]
        former.close(linger=0)
        self._num_sockets[server] += 1
        socket = self._make_socket(server, self._water_mark, max_retry_ms=0)
        self._sockets[server] = socket
        self._index[socket] = server
        self._poller.register(socket, _IN)
        self._monitor(server, CLOSED | FAILED)
        socket.connect(self._addresses[server])

    def _make_socket(self, server: int, sent: int, max_retry_ms: int = _MAX_RETRY_MS) -> Any:
        """Make a socket for requests, which is yet to be connected."""
        address, own = self._addresses[server], self._own_id(server)
        return _make_dealer(
            self._context, address, own, self._keys, self._key_at[server], sent, max_retry_ms=max_retry_ms
        )

    def _connect_heartbeat(self, server: int) -> Any:
        """Connect a socket for heartbeats. Also called by the thread that sends them."""
        address, own, at = self._addresses[server], self._ids[server][0], self._key_at[server]
        socket = _make_dealer(self._context, address, own, self._keys, at, sent=2, received=2)
        socket.connect(address)
        return socket

    def reopen(self, server: int, run_id: int, session: int) -> bool:
        if self._transport != "tcp":
            try:
                self._share_memory(server, run_id, session)
            except ConfigurationError:
                return False  # only "shm" is allowed, and it may be possible later
        former = self._processes.pop(server, None)
        if former is not None:
            former.close()
        self._watch(server, run_id, session)
        return True

    def _share_memory(self, server: int, run_id: int, session: int) -> None:
        try:
            channel = connect_channel(run_id, session, self._own_id(server))
        except OSError as error:
            self._go_without_memory(server, error)
        else:
            self._channels[server] = channel
            self._index[channel.fileno()] = server
            self._poller.register(channel.fileno(), _IN)
            self._channel_poll.register(channel.fileno(), select.POLLIN)

    def _watch(self, server: int, run_id: int, session: int) -> None:
        """Detect the end of a server's process from now on, and let it detect ours, if both are on one host."""
        channel = self._channels.get(server)
        with suppress(OSError):
            process = (
                watch_over_channel(run_id, session, self._own_id(server))
                if channel is None
                else channel.process()
            )
            self._processes[server] = process
            self._ends[process.fileno()] = server
            self._poller.register(process.fileno(), _IN)

    def _go_without_memory(self, server: int, error: OSError) -> None:
        """Use TCP for a server that shares no memory. Raises ConfigurationError if only "shm" is allowed."""
        if self._transport == "shm":
            raise ConfigurationError(
                f"{self.describe(server)} cannot share memory with this process: {error}; is it on this host, and does "
                "it belong to the same user? (KVSTORE_TRANSPORT=auto goes over tcp where it cannot)"
            )
        is_here = self._is_loopback(server) or error.errno not in _REDIRECTED
        level = logging.WARNING if is_here else logging.DEBUG
        _log.log(level, "messages to %s go over tcp, not through memory: %s", self.describe(server), error)

    def _lose_channel(self, server: int, error: Exception) -> None:
        channel = self._channels.pop(server)
        is_over = self._is_closed or self._is_going(server) or server in self._restartable
        level = logging.DEBUG if is_over else logging.WARNING
        _log.log(level, "messages to %s go over tcp from now on: %s", self.describe(server), error)
        del self._index[channel.fileno()]
        self._poller.unregister(channel.fileno())
        self._channel_poll.unregister(channel.fileno())
        channel.close()

    def close(self) -> None:
        """Send what is queued, for a short while, and give all sockets back; idempotent."""
        if self._is_closed or os.getpid() != self._pid:
            return
        if self._heartbeats is not None and self._heartbeats.is_this_thread():
            # The heartbeat thread has collected a store as garbage. It would wait for itself, so another thread closes.
            # That one is no daemon: if the process is about to end, servers should hear of it first.
            threading.Thread(target=self.close, name="kvstore-close", daemon=False).start()
            return
        self._is_closed = True
        if self._heartbeats is not None:
            self._heartbeats.stop()
        else:
            for socket in self._heartbeat_sockets:
                socket.close(linger=0)
        for fd in self._ends:
            self._poller.unregister(fd)
        for server in list(self._monitors.values()):
            self._end_monitor(server)
        for server, socket in enumerate(self._sockets):
            if server in self._answered:
                self._drain(server)
            # Do not wait for servers that never answered or that end.
            is_there = server in self._answered and not self._is_going(server)
            socket.close(linger=_LINGER_MS if is_there else 0)
        for channel in self._channels.values():
            channel.close()
        for process in self._processes.values():
            process.close()
        self._context.term()

    def _is_going(self, server: int) -> bool:
        return server in self._leaving or server in self.ended

    def _drain(self, server: int) -> None:
        deadline = time.monotonic() + _LINGER_MS / 1000
        while self._queues[server] and not self._is_going(server) and time.monotonic() < deadline:
            self._watch_queues()
            for ready, event in self._poller.poll(50):
                if event & ~_OUT and ready in self._index:
                    with suppress(ProtocolError):
                        self._reply_of(self._index[ready], ready)
            self._flush(server)


def _room_for(request: m.Request) -> int:
    frames, payloads = encode_frames_and_payloads(request)
    return sum(map(len, frames)) + sum([payload.nbytes for payload in payloads or ()])


class _ConnectionHeartbeats:
    """The heartbeat thread. It closes the sockets, one per server.

    Args:
        key_at: By server, which of the servers' public keys it has.
        connect: Makes a socket to a server whose key has changed.
    """

    def __init__(
        self,
        sockets: Sequence[Any],
        sessions: SessionIds,
        report: MakeReport,
        key_at: Sequence[int],
        connect: Callable[[int], Any],
    ) -> None:
        self._sockets = list(sockets)
        self._key_at, self._connect, self._used = key_at, connect, [0] * len(self._sockets)
        self._sessions = list(sessions)
        self._report = report
        self.heard = [0.0] * len(self._sockets)
        """When each server last answered, on the monotonic clock."""
        self.error: Exception | None = None
        """Why the thread has ended without `stop`."""
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvstore-heartbeat", daemon=True)
        self._thread.start()

    def is_this_thread(self) -> bool:
        return threading.current_thread() is self._thread

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(timeout=5.0)

    def _run(self) -> None:
        try:
            while not self._stop.wait(HEARTBEAT_INTERVAL):
                self._beat()
        except Exception as error:
            _log.exception("this worker cannot tell servers any more that it is alive")
            self.error = error
        finally:
            for socket in self._sockets:
                socket.close(linger=0)

    def _beat(self) -> None:
        sign = m.Heartbeat(self._report())
        for server, socket in enumerate(self._sockets):
            if self._used[server] != self._key_at[server]:
                self._used[server] = self._key_at[server]
                socket.close(linger=0)
                socket = self._sockets[server] = self._connect(server)
            # Any answer counts. If the server has lost the session, the main thread will find out.
            while socket.poll(0):
                socket.recv_multipart()
                self.heard[server] = time.monotonic()
            with suppress(zmq.Again):  # the server is unreachable: do not let heartbeats pile up
                socket.send_multipart(encode_frames(m.Request(*self._sessions[server], 0, sign)), zmq.NOBLOCK)


def _make_dealer(
    context: Any,
    address: str,
    own: bytes,
    keys: ClientKeys | None = None,
    key_at: int = 0,
    sent: int = 0,
    received: int = 0,
    max_retry_ms: int = _MAX_RETRY_MS,
) -> Any:
    """Make a DEALER socket for an address. It queues at most this many messages each way; 0 means no limit.

    The time between two attempts to connect doubles up to `max_retry_ms`; 0: it stays.
    """
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.ROUTING_ID, own)
    socket.setsockopt(zmq.SNDHWM, sent)
    socket.setsockopt(zmq.RCVHWM, received)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME)
    socket.setsockopt(zmq.RECONNECT_IVL, _RETRY_MS)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, max_retry_ms)
    prepare_tcp_socket(socket, address)
    if keys is not None:
        secure_client_socket(socket, keys, key_at)
    return socket
