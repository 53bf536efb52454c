"""A worker's sessions with all servers: numbered requests, their replies, and waiting.

`Session` sends requests under numbers and passes each reply to the handler of its number. It does not know whether
its `Transport` is made of sockets or calls an engine in this process.

Every wait has a deadline. A request whose server is silent is sent again, which the protocol makes harmless, until
the server counts as unreachable: after `dead_after` seconds without a message or a heartbeat, or at once if its
process on this host has ended. A server on this host that is seen to run is waited for longer.

A server whose state outlives its process says so in its `Welcome`. It is no error if such a server is gone: the worker
connects again and waits until another process answers at the same address. What is sent in the meantime is dropped,
as a network would lose it. When the server is back, everything that is not answered yet is sent again (`on_reconnect`).

`call_all` is for control requests: it blocks for all answers and raises what a server answered. Rounds use `send`
and `wait`. `SessionTrace` records requests for the profiler, and `Report` the figures that heartbeats carry to those
who watch the job. Not thread-safe, except for `Report`.
"""

from __future__ import annotations

import logging
import math
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeVar

from torch import Tensor

from kvstore_server.debug_log import Peer, debug_log
from kvstore_server.engine.rounds import SYNCHRONOUS, Mode
from kvstore_server.engine.snapshots import SnapshotPeriod
from kvstore_server.errors import (
    ConnectTimeoutError,
    DeadlineError,
    KVStoreError,
    ServerLostState,
    ServerStoppingError,
    ServerUnreachableError,
    describe,
    from_wire,
)
from kvstore_server.failpoints import failpoint
from kvstore_server.log_limit import SLOW_AFTER, SlowReports
from kvstore_server.plan import check_name
from kvstore_server.processes import DEAD_AFTER, FINAL_MESSAGE_TIME, ProcessState
from kvstore_server.protocol import messages as m
from kvstore_server.protocol.frames import Frame, decode_frames, pack_control
from kvstore_server.protocol.messages import SECRET_BYTES
from kvstore_server.tracing import CALLS, ROUNDS, Event, Trace, payload_in, payload_out
from kvstore_server.transport.arena import SharedArena
from kvstore_server.transport.channel import Channel
from kvtrainer.client.absences import SETTLE_TIME, Absences
from kvtrainer.client.snapshot_schedule import read_answer
from kvtrainer.client.snapshots import SnapshotOffer, choose_cut, common_rounds, read_offer

_log = logging.getLogger(__name__)

REPEAT_AFTER = 2.0
"""Seconds without an answer after which a request is sent again; sooner where `dead_after` is short."""

SUSPENDED_AFTER = 1.0
"""Seconds. A wait that takes this much longer than it should means that this process was suspended."""
_NO_SESSION = (0, 0)
"""Stands for (run_id, session) of a server that has not welcomed this worker yet."""
_WAITING = 0
"""The trace lane of waits. Requests have the lowest free lane above it."""

SessionIds = Sequence[tuple[int, int]]
"""(run_id, session) of each server: the ids of its process and of this worker's session, both from `Welcome`."""
MakeReport = Callable[[], bytes]
"""Returns what each `Heartbeat` carries; called by another thread."""
Handler = Callable[[int, m.ReplyBody], None]
"""Takes (server, reply) of a request that was sent."""


class Transport(ABC):
    """Carries requests to servers and their replies back: over sockets, in shared memory, or by function calls."""

    num_servers: int

    @abstractmethod
    def send(self, server: int, request: m.Request, priority: int = 0) -> None:
        """Send or queue a request without blocking. Its payload memory must not change until it is answered.

        A queued request of higher priority overtakes those of lower priority.
        """

    @abstractmethod
    def receive(self, timeout: float) -> tuple[int, m.Reply] | None:
        """Wait up to `timeout` seconds for a reply of any server."""

    def can_post(self, server: int) -> bool:
        """Return whether `post` and `receive_frames` work with a server."""
        return False

    def post(self, server: int, head: Frame, payloads: Sequence[Tensor]) -> bool:
        """Send an encoded request through shared memory, if that is possible at once; return whether it was sent."""
        return False

    def receive_frames(self, timeout: float) -> tuple[int, Sequence[Frame]] | None:
        """Wait up to `timeout` seconds for a message in shared memory, and look at nothing else; return its frames."""
        return None

    @abstractmethod
    def describe(self, server: int) -> str:
        """Return the server's name in error messages."""

    @abstractmethod
    def sockets(self, server: int) -> tuple[bytes, ...]:
        """Routing ids of all sockets from which a server hears this process."""

    def begin(
        self, sessions: SessionIds, report: MakeReport = bytes, restartable: Collection[int] = ()
    ) -> None:
        """Start what needs open sessions, such as heartbeats.

        Args:
            restartable: Servers that are started again when their processes end: `disconnected` tells about these.
        """
        return None

    disconnected: Collection[int] = ()
    """Restartable servers whose connections were closed. `receive` detects that, and then returns."""

    def reconnect(self, server: int) -> None:
        """Drop the connection to a restartable server with everything that is on its way, and connect again.

        The server is then neither in `ended` nor in `disconnected`, and messages that come are of the new connection.
        """
        raise AssertionError("servers behind this transport are not restarted")

    def reopen(self, server: int, run_id: int, session: int) -> bool:
        """Share memory with a server that answers again, and watch its process, as `begin` did.

        Returns False if that has to be tried later.
        """
        raise AssertionError("servers behind this transport are not restarted")

    @abstractmethod
    def last_heartbeat(self, server: int) -> float:
        """Return when a server last answered a heartbeat, on the session's clock; 0 if it never did."""

    def is_remote(self, server: int) -> bool:
        return False

    ended: Collection[int] = ()
    """Servers of this host whose processes have ended. `receive` detects the end of a process, and then returns."""

    def process(self, server: int) -> ProcessState:
        return ProcessState.UNKNOWN

    def how_ended(self, server: int) -> str:
        return ""

    def why_refused(self, server: int) -> str:
        """Return why a server that has not answered may refuse this process; empty if nothing is known."""
        return ""

    def channel(self, server: int) -> Channel | None:
        """Return the channel to a server that shares memory; None without one, or after it broke."""
        return None

    @abstractmethod
    def close(self) -> None:
        """Send what is queued, for a short while, and free all resources."""


@dataclass(frozen=True)
class SessionOptions:
    """Who this worker is and how long it waits.

    Args:
        namespace: Workers with equal names form one group on the servers.
        rank: 0 … num_workers − 1.
        num_workers: How many workers take part in every round.
        timeout: Seconds to wait for the other workers in a round or at a barrier.
        connect_timeout: Seconds to wait for a server to answer the first time.
        dead_after: Seconds of silence after which a server that must answer counts as unreachable.
        capability: Instruction set of this CPU.
        address: `host:pid`, for error messages on the other side.
        mode: When contributions count; the same for all workers of the namespace.
        slow_after: Seconds of waiting after which the log names those who are waited for.
        resumes: Whether another process can take this rank over, so that the other workers wait for it.
        restarts: How often this process was started again, as far as its launcher says.
        initial_workers: Above 0: the members may change. The ranks below this begin, others may join.
        min_workers: If the members may change: how many at least must be left.
        backup_workers: How many of them a round leaves out, the slowest ones.
        captures: Whether rounds that repeat are captured.
    """

    namespace: str
    rank: int
    num_workers: int
    timeout: float = 600.0
    connect_timeout: float = 30.0
    dead_after: float = DEAD_AFTER
    capability: str = ""
    address: str = ""
    mode: Mode = SYNCHRONOUS
    slow_after: float = SLOW_AFTER
    resumes: bool = False
    restarts: int = 0
    initial_workers: int = 0
    min_workers: int = 0
    backup_workers: int = 0
    captures: bool = True

    @property
    def is_elastic(self) -> bool:
        return self.initial_workers > 0


class HasServer(Protocol):
    """A request, or a part of a round, that one server has to answer."""

    @property
    def server(self) -> int: ...


class _ControlCall(NamedTuple):
    server: int
    number: int
    body: m.RequestBody


class Calls:
    """Control requests, (server, body) each, and their answers so far."""

    def __init__(self, requests: Sequence[tuple[int, m.RequestBody]]) -> None:
        self.requests = requests
        self.answers: list[m.ReplyBody | None] = [None] * len(requests)
        self.numbers: list[int] = []
        self.waiting: dict[int, _ControlCall] = {}
        """Those that are not answered yet, by position."""

    def __repr__(self) -> str:
        waiting = [
            f"server {one.server} ({type(one.body).__name__} {one.number})" for one in self.waiting.values()
        ]
        more = f" and {len(waiting) - 3} more" if len(waiting) > 3 else ""
        state = f"awaits {', '.join(waiting[:3])}{more}" if waiting else "nothing is awaited"
        return f"<{type(self).__name__}, {len(self.requests)} requests: {state}>"

    def take(self, position: int, _server: int, reply: m.ReplyBody) -> None:
        """Store the answer to the request at a position. With the position bound, a `Handler`."""
        if not isinstance(reply, m.Pending):
            self.answers[position] = reply
            self.waiting.pop(position, None)


HasServerT = TypeVar("HasServerT", bound=HasServer)


class Report:
    """Figures of a worker since its start. Heartbeats carry them to the tools that show the job.

    The training thread writes them, and the heartbeat thread reads them.

    Attributes:
        steps: How many steps the worker has made.
        step_seconds: Seconds spent in these steps; the remaining time is that of forward and backward passes.
        wait_seconds: Seconds spent waiting for servers, and so for other workers.
        samples: How many examples the worker has trained on, if the script reports it.
        loss: The last loss that the script has reported; infinity and NaN are not sent.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began = clock()
        self.steps = 0
        self.step_seconds = self.wait_seconds = 0.0
        self.samples = 0
        self.loss = math.nan

    def pack(self) -> bytes:
        facts = {
            "seconds": self._clock() - self._began,
            "steps": self.steps,
            "step_seconds": self.step_seconds,
            "wait_seconds": self.wait_seconds,
        }
        if self.samples:
            facts["samples"] = self.samples
        if math.isfinite(loss := self.loss):
            facts["loss"] = loss
        return pack_control(facts)


class Session:
    """Sends requests and passes replies to their handlers."""

    def __init__(self, transport: Transport, options: SessionOptions, clock: Callable[[], float]) -> None:
        self.options = options
        self.clock = clock
        self.num_servers = transport.num_servers
        self.is_closed = False
        self.is_remote = False
        """Whether there is a network between the workers of synchronous rounds and some of their servers."""
        self.restored_round = 0
        """The round to which the job has gone back by a snapshot, since its servers have started; 0: it has not."""
        self.snapshot_period = SnapshotPeriod()
        """How often snapshots are taken, as the servers say."""
        self.spread_from = 0
        """Bytes. A Trainer's table of at least this size is spread over all servers; a smaller one lies on one of them.
        Each server says a value when its session opens, and the smallest counts."""
        self.trace: SessionTrace | None = None
        """Where to record requests while the profiler runs."""
        self.log = debug_log("kvtrainer.debug")
        """Where to log messages and rounds; None unless the logger shows debug lines."""
        self.report = Report(clock)
        """What heartbeats tell servers about this worker."""
        # 1. Sessions.
        self.transport = transport
        self._peers = [Peer(f"server:{at}", options.namespace) for at in range(transport.num_servers)]
        self._have_snapshots = False
        """Whether some servers write snapshots."""
        self._nonce = secrets.token_bytes(SECRET_BYTES)
        self._tokens = [_NO_SESSION] * transport.num_servers
        """(run_id, session) of each server: the ids of its process and of this worker's session, from `Welcome`."""
        # 2. What is known of the servers.
        self._heard = [clock()] * transport.num_servers
        """When each server's last message came."""
        self._unreachable: set[int] = set()
        """Servers that did not answer, whose process has ended, or that were shut down. A message removes them."""
        self._shut_down: set[int] = set()
        """Servers that have sent their shutdown notice. Nothing more comes from them."""
        self._process_ended_at: dict[int, float] = {}
        """Server → when the end of its process was detected."""
        self._lost_state_errors: dict[int, KVStoreError] = {}
        """The error of a server that was restarted and has lost the state of this job."""
        self._absences = Absences()
        self.on_reconnect: list[Callable[[int], None]] = []
        """Called with a server that is back after it was gone: all messages to it and from it were lost."""
        self.num_reconnects = 0
        """How often a server has come back."""
        # 3. Requests under way.
        self._handlers: dict[int, Handler] = {}
        self._open_calls: set[Calls] = set()
        """Control requests that are not finished or dropped."""
        self._last_number = 0
        self._repeat_after = min(REPEAT_AFTER, options.dead_after / 4)
        self._slow_reports = SlowReports(options.slow_after)
        self._reasons: list[str] = []
        """Why the answers are late, as the servers say since requests were last repeated."""
        self._has_repeated = False
        """Requests were repeated, so the next reason that comes replaces the earlier ones."""

    def __repr__(self) -> str:
        o, open_ = self.options, sorted(self._handlers)
        shown = f"{', '.join(map(str, open_[:5]))}{f' and {len(open_) - 5} more' if len(open_) > 5 else ''}"
        state = "closed" if self.is_closed else f"awaits answers to requests {shown}" if open_ else "idle"
        servers = sorted(self._unreachable.union(self._absences.gone))
        gone = "".join([f", {self.describe(server)} is gone" for server in servers])
        return (
            f"<Session of rank {o.rank} of {o.num_workers} in {o.namespace!r} with {self.num_servers} servers: "
            f"{state}{gone}>"
        )

    def connect(self) -> None:
        """Open a session with every server; blocks up to `connect_timeout`.

        Raises:
            ConnectTimeoutError: a server did not answer.
            ConfigurationError: the namespace has too long a name.
            KVStoreError: a server refused this worker.
        """
        check_name("a namespace", self.options.namespace)
        refusals: list[KVStoreError] = []
        for server in range(self.num_servers):
            try:
                self._say_hello(server)
            except DeadlineError:
                raise
            except KVStoreError as error:
                # Ask the others anyway: each tells the workers that wait there why this one is missing.
                refusals.append(error)
        if refusals:
            raise refusals[0]
        if self._have_snapshots:
            self._agree_on_snapshot()
        self.transport.begin(self._tokens, lambda: self.report.pack(), self._absences.timeouts)
        failpoint("worker.connect.open")
        is_shared = self.options.num_workers > 1 and self.options.mode.is_sync
        self.is_remote = is_shared and any(map(self.transport.is_remote, range(self.num_servers)))

    def _say_hello(self, server: int) -> None:
        o = self.options
        hello = m.Hello(
            o.namespace, o.rank, o.num_workers, server, self.num_servers, o.capability, o.address, self._nonce,
            self.transport.sockets(server), o.mode.name, o.mode.staleness, o.mode.slow_down,
            o.mode.by_host, o.resumes, o.restarts, o.initial_workers, o.min_workers, o.backup_workers,
        )  # fmt: skip
        failpoint("worker.connect.hello")
        welcome = self.call(server, hello, o.connect_timeout)
        failpoint("worker.connect.welcome")
        assert isinstance(welcome, m.Welcome)
        self._tokens[server] = (welcome.run_id, welcome.session)
        self.spread_from = min(self.spread_from, welcome.spread_from) if server else welcome.spread_from
        self._have_snapshots |= welcome.has_snapshots
        if welcome.restart_timeout > 0:
            self._absences.timeouts[server] = welcome.restart_timeout

    def _agree_on_snapshot(self) -> None:
        """Let the job go back to the latest snapshot that all servers have, if one of them has lost its state."""
        offers = self._ask_for_offers(self.options.connect_timeout)
        self.restored_round = max(one.restored for one in offers)
        self.snapshot_period = min(one.period for one in offers)
        without = [server for server, one in enumerate(offers) if not one.period]
        if without and len(without) < len(offers):
            _log.warning(
                "no snapshots are taken, because servers %s take none; start all servers with --state-dir, and with "
                "the same --snapshot-every",
                ", ".join(map(str, without)),
            )
        chosen = choose_cut(offers)
        if chosen is None:
            return
        if "/" in self.options.namespace:
            raise ServerLostState(
                "a server was restarted and has lost the state of this job; start this process again"
            )
        cut, generation, tag, save = chosen
        self.go_back(cut.round, generation, cut.holders, tag, save)

    def _ask_for_offers(self, timeout: float | None = None) -> list[SnapshotOffer]:
        asked = [(server, m.Snapshot("list")) for server in range(self.num_servers)]
        return [read_offer(one) for one in self.call_all(asked, timeout)]

    def common_snapshots(self) -> list[int]:
        """Ask the servers for the rounds of the snapshots that all of them have; blocks."""
        return common_rounds(self._ask_for_offers())

    def take_snapshot(self, round_: int, kept: Sequence[int]) -> dict[int, str]:
        """Let all servers take a snapshot of their present state, after a round; blocks until they have copied it.

        Returns their answers, by server, see `read_answer`.

        Args:
            kept: The rounds of those that they keep.
        """
        body = m.Snapshot("cut", round_, keep=tuple(kept))
        answers = self.call_all([(server, body) for server in range(self.num_servers)])
        failpoint("worker.snapshot.taken")
        return {server: read_answer(answer) for server, answer in enumerate(answers)}

    def go_back(
        self, round_: int, generation: int, holders: Collection[int], tag: str = "", save: str = ""
    ) -> None:
        """Let all servers go back to a snapshot; blocks.

        Args:
            round_: 0: to the beginning.
            generation: How often the job has gone back then.
            holders: The servers that have a part of it.
            tag, save: What is loaded, if that is what was saved by hand.
        """
        timeout = self.options.connect_timeout + self.options.timeout
        for server in range(self.num_servers):
            # Reading it takes long, and is done before the answer.
            body = m.Snapshot("restore", round_, generation, server in holders, tag, save)
            self.call(server, body, timeout)
            failpoint("worker.connect.next_return")
        self.restored_round = round_

    def describe(self, server: int) -> str:
        return self.transport.describe(server)

    def memory_at(self, server: int, location: int) -> tuple[SharedArena, int] | None:
        """Return the arena and the offset in it of a location that a `Weights` message of the server names.

        Returns None without a shared-memory channel to the server, or if the arena is unknown here.
        """
        channel = self.transport.channel(server)
        return None if channel is None else channel.weights_at(location)

    def next_number(self, handler: Handler | None = None) -> int:
        """Return a new request number; replies go to `handler` until `forget` is called."""
        self._last_number += 1
        if handler is not None:
            self._handlers[self._last_number] = handler
        return self._last_number

    def listen(self, number: int, handler: Handler) -> None:
        self._handlers[number] = handler

    def forget(self, number: int) -> None:
        self._handlers.pop(number, None)
        if self.trace is not None:
            self.trace.ended(number)

    def send(self, server: int, number: int, body: m.RequestBody, priority: int = 0) -> None:
        """Pass a request to the transport without blocking; one of higher priority may overtake queued ones."""
        if self.is_closed:
            raise KVStoreError("this kvstore is closed; create a new one")
        if server in self._absences.gone:
            return  # it is sent again when the server is back
        if self.trace is not None and number in self._handlers:
            self.trace.sent(server, number, body)
        if self.log is not None:
            self.log.message("sent", self._peers[server], number, body)
        run_id, session = self._tokens[server]
        self.transport.send(server, m.Request(run_id, session, number, body), priority)

    @property
    def is_quiet(self) -> bool:
        """Whether all servers are there, as far as this worker knows, and messages are neither logged nor traced."""
        transport = self.transport
        return not (
            self.is_closed or self.trace or self.log or self._absences.gone or self._shut_down
            or transport.ended or transport.disconnected
        )  # fmt: skip

    def ids_of(self, server: int) -> tuple[int, int]:
        """Return the ids of a server's process and of the session with it, as requests name them."""
        return self._tokens[server]

    def heard(self, server: int, now: float) -> None:
        """Record that a server has answered in a round that waits by itself."""
        self._heard[server] = now
        self._unreachable.discard(server)

    def process(self, server: int, frames: Sequence[Frame]) -> None:
        """Process a message that came in a round that waits by itself. Raises as a wait does."""
        _, _, number, body = decode_frames(frames)
        self._dispatch(server, m.Reply(number, body), self.clock())

    def call(self, server: int, body: m.RequestBody, timeout: float | None = None) -> m.ReplyBody:
        return self.call_all([(server, body)], timeout)[0]

    def call_all(
        self, requests: Sequence[tuple[int, m.RequestBody]], timeout: float | None = None
    ) -> list[m.ReplyBody]:
        """Send control requests, (server, body) each, and block for all answers.

        Args:
            timeout: Seconds to wait; by default `dead_after`, and as long as in a round for servers of this host that
                are seen to work.

        Raises:
            KVStoreError: what a server answered to the first request that failed.
            ServerUnreachableError, ConnectTimeoutError: a server did not answer.
        """
        return self.finish(self.begin(requests), timeout)

    def begin(self, requests: Sequence[tuple[int, m.RequestBody]]) -> Calls:
        """Send control requests, (server, body) each, and return at once; then `finish` or `drop` them."""
        calls = Calls(requests)
        self._open_calls.add(calls)
        try:
            for at, (server, body) in enumerate(requests):
                calls.numbers.append(self.next_number(partial(calls.take, at)))
                calls.waiting[at] = _ControlCall(server, calls.numbers[at], body)
                self._send_call(calls.waiting[at])
        except BaseException:
            self.drop(calls)
            raise
        return calls

    def finish(self, calls: Calls, timeout: float | None = None) -> list[m.ReplyBody]:
        """Block for the answers to the requests of `begin`. `timeout` counts from this call; raises as `call_all`."""
        limit = self.options.dead_after if timeout is None else timeout
        asked_at, waiting = self.clock(), calls.waiting
        try:
            is_over = self.wait(waiting.values(), self._send_call, asked_at, limit)
            if (
                not is_over
                and timeout is None
                and all(map(self._runs, {one.server for one in waiting.values()}))
            ):
                # Servers on this host that are seen to run may only be slow.
                limit = max(limit, self.options.timeout)
                self.wait(waiting.values(), self._send_call, asked_at, limit)
        finally:
            self.drop(calls)
        # The first answer that is missing or an error is raised, in the order of the requests.
        found: list[m.ReplyBody] = []
        for (server, body), answer in zip(calls.requests, calls.answers, strict=True):
            if answer is None:
                raise self._no_answer_error(server, body, limit)
            if isinstance(answer, m.Failed):
                raise from_wire(answer.code, answer.text)
            found.append(answer)
        return found

    def ask_all(
        self, requests: Sequence[tuple[int, m.RequestBody]], timeout: float, awaits_restarts: bool = False
    ) -> list[m.ReplyBody | None]:
        """Send control requests, (server, body) each, and block up to `timeout` seconds for all answers together.

        Does not raise. Returns one answer per request: failures as they came, None if none came in time. Servers
        that are known to be unreachable are sent the request but not waited for. Neither are those that are being
        restarted, unless `awaits_restarts`: then the time that they take is not counted.
        """
        calls = Calls(())
        try:
            calls = self.begin(requests)
            waiting = calls.waiting.values()
            self.wait(waiting, self._send_call, self.clock(), timeout, False, awaits_restarts)
        except KVStoreError as error:
            # If sending failed, `calls` is still the empty one, and no request was answered.
            answered = len(calls.answers) - calls.answers.count(None)
            missing = len(requests) - answered
            _log.info("%d of %d requests were not answered: %s", missing, len(requests), error)
        finally:
            self.drop(calls)
        return calls.answers or [None] * len(requests)

    def drop(self, calls: Calls) -> None:
        self._open_calls.discard(calls)
        for number in calls.numbers:
            self.forget(number)

    def _send_call(self, call: _ControlCall) -> None:
        self.send(call.server, call.number, call.body)

    def process_received(self) -> None:
        """Process the replies that have arrived, without blocking."""
        while (got := self.transport.receive(0.0)) is not None:
            self._dispatch(*got, self.clock())
        if self._absences.timeouts:
            self._look_for_restarts(self.clock())

    def wait(
        self,
        waiting: Collection[HasServerT],
        ask: Callable[[HasServerT], None],
        asked_at: float,
        timeout: float | None = None,
        raise_if_gone: bool = True,
        awaits_restarts: bool = True,
    ) -> bool:
        """Process replies until handlers have emptied `waiting`. Calls `ask` again for servers that fall silent.

        A long wait is logged, with the reasons that the servers give. The time in which one of the servers is being
        restarted does not count.

        Args:
            asked_at: When the servers were first asked, on the session's clock.
            timeout: Seconds from `asked_at` until the wait gives up. By default the timeout of a round, when a server
                fails the round and names the missing workers, plus `dead_after` for that error to arrive.
            raise_if_gone: If True, a server that does not answer raises; if False, stop waiting for servers known to
                be gone.
            awaits_restarts: If False, servers that are being restarted count as gone; only without `raise_if_gone`.

        Returns:
            False if the time was over before `waiting` was empty.

        Raises:
            ServerStoppingError: a server in `waiting` was shut down. One that has given its answers to a round before
                does not raise: the wait for the other servers goes on, because the round may have ended everywhere.
            ServerUnreachableError: a server in `waiting` is unreachable (`check_silence`), or its process has ended,
                and it has not been restarted in time.
        """
        if timeout is None:
            timeout = self.options.timeout + self.options.dead_after
        trace, deadline, absences = self.trace, asked_at + timeout, self._absences
        wait_began = now = self.clock()
        idle = 0.0
        """Seconds since the last reply, or since silent servers were last asked again."""
        self._reasons.clear()
        trace_start = 0.0 if trace is None else trace.trace.clock()
        while waiting and (raise_if_gone or self._is_any_there(waiting, awaits_restarts)):
            # 1. Nothing more comes from servers that were shut down.
            if raise_if_gone and self._shut_down:
                self._check_shut_down(waiting)
            if now >= deadline:
                return False
            # 2. Wait for one reply, but not longer than until requests or probes have to be repeated.
            receive_began, pause = now, min(self._repeat_after, deadline - now)
            if self.transport.ended or self.transport.disconnected:
                pause = min(pause, SETTLE_TIME if absences.timeouts else FINAL_MESSAGE_TIME)
            if absences.gone:
                pause = min(pause, absences.next_check(now))
            got = self.transport.receive(pause)
            now = self.clock()
            idle = 0.0 if got is not None else idle + now - receive_began
            if now - receive_began > pause + SUSPENDED_AFTER:
                # This process was suspended. What the servers sent meanwhile has yet to be read, so they get more time.
                self._heard = [now] * self.num_servers
                deadline = max(deadline, now + SUSPENDED_AFTER)
                absences.extend(now - receive_began - pause)
            # 3. Process it, or see which servers are silent. Those that are gone are probed instead.
            if got is not None:
                self._dispatch(*got, now)
            elif not absences.gone or idle >= self._repeat_after:
                self._has_repeated, idle = True, 0.0
                for one in list(waiting):
                    if one.server in absences.gone:
                        continue
                    if self._has_process_ended(one.server, wait_began, now):
                        self._unreachable.add(one.server)
                        if raise_if_gone:
                            raise self._process_ended_error(one.server)
                    elif not raise_if_gone or self.check_silence(one.server, asked_at, now):
                        ask(one)
            # 4. Servers that are restarted: the wait stands still, until it has taken too long.
            if absences.timeouts:
                self._look_for_restarts(now)
                if not absences.gone.keys().isdisjoint(one.server for one in waiting):
                    deadline += now - receive_began
                    self._check_absences(waiting, wait_began, now, raise_if_gone)
            if now - wait_began >= self.options.slow_after:
                self._report_slow(now - wait_began, now)
        self.report.wait_seconds += now - wait_began
        if trace is not None:
            trace.waited(trace_start)
        return True

    def _is_any_there(self, waiting: Collection[HasServer], awaits_restarts: bool) -> bool:
        """Return whether any server in `waiting` may still answer."""
        gone = self._unreachable if awaits_restarts else self._unreachable.union(self._absences.gone)
        return any(one.server not in gone for one in waiting)

    def _look_for_restarts(self, now: float) -> None:
        """Record which restartable servers are gone, after their last messages have had time to arrive; probe them."""
        absences, transport = self._absences, self.transport
        for server in absences.timeouts.keys() & {*transport.ended, *transport.disconnected}:
            detected_at = self._process_ended_at.setdefault(server, now)
            if server not in self._shut_down and (server in absences or now - detected_at >= SETTLE_TIME):
                if server in transport.ended:
                    self._begin_absence(
                        server, transport.how_ended(server) or "has ended without giving a reason", now
                    )
                else:
                    self._begin_absence(server, "has closed the connection", now)
        for server in absences.take_due(now):
            transport.reconnect(server)
            self._probe(server)

    def _begin_absence(self, server: int, why: str, now: float) -> None:
        """Connect again to a restartable server that is gone, and wait for its next process."""
        if self._absences.begin(server, why, now):
            timeout = self._absences.timeouts[server]
            _log.warning("%s %s; waiting up to %g s for it to come back", self.describe(server), why, timeout)
        self.transport.reconnect(server)
        self._process_ended_at.pop(server, None)
        self._probe(server)

    def _probe(self, server: int) -> None:
        probe = m.Request(*self._tokens[server], self.next_number(), m.Heartbeat())
        self.transport.send(server, probe)
        if self.log is not None:
            self.log.message("sent", self._peers[server], probe.number, probe.body)

    def _check_absences(
        self, waiting: Collection[HasServer], wait_began: float, now: float, raise_if_gone: bool
    ) -> None:
        """Count servers as unreachable that were not restarted in time. Raises ServerUnreachableError."""
        for one in waiting:
            if self._absences.is_hopeless(one.server, wait_began, now):
                self._unreachable.add(one.server)
                if raise_if_gone:
                    raise self._absence_error(one.server)

    def _absence_error(self, server: int) -> ServerUnreachableError:
        # How a process has ended is known for certain only when its parent has asked for that.
        absence = self._absences.gone[server]
        why = self.transport.how_ended(server) or absence.why
        return ServerUnreachableError(
            f"{self.describe(server)} {why}, and did not come back within {absence.timeout:g} s. Look at what should "
            "have started it again, or restart the job from its last saved states"
        )

    def _end_absence(self, server: int, has_state: bool, now: float) -> None:
        """Go on with a server that answers again: send it everything that is not answered yet."""
        if has_state and not self.transport.reopen(server, *self._tokens[server]):
            return
        absence = self._absences.gone.pop(server)
        self.num_reconnects += 1
        _log.warning("%s is back after %.1f s", self.describe(server), now - absence.since)
        for recover in self.on_reconnect:
            recover(server)
        for calls in list(self._open_calls):
            for call in list(calls.waiting.values()):
                if call.server == server:
                    self._send_call(call)

    def _check_shut_down(self, waiting: Collection[HasServer]) -> None:
        shut_down = sorted(self._shut_down.intersection(one.server for one in waiting))
        if shut_down:
            names = ", ".join(map(self.describe, shut_down))
            raise ServerStoppingError(f"{names} was shut down; restart the job from its last saved states")

    def deadline_error(self, waiting: Collection[HasServer], what: str) -> DeadlineError:
        names = ", ".join(map(self.describe, sorted({one.server for one in waiting})))
        return DeadlineError(
            f"{names} did not {what} within {self.options.timeout:g} s; is it overloaded? (timeout=… of the kvstore or "
            "KVSTORE_TIMEOUT raises the limit)"
        )

    def _report_slow(self, waited: float, now: float) -> None:
        """If a line is due, log which workers the servers wait for, or else which servers are silent."""
        # A server that has answered is sent no further requests, so only its heartbeats show that it is alive.
        heard = [max(at, self.transport.last_heartbeat(server)) for server, at in enumerate(self._heard)]
        reasons = self._reasons or [
            f"{self.describe(server)} was last heard {now - at:.1f} s ago"
            for server, at in enumerate(heard)
            if now - at > 2 * self._repeat_after  # it has been asked why, and had time to say
        ]
        if reasons and self._slow_reports.is_due(waited, now):
            more = f" (and {len(reasons) - 1} more)" if len(reasons) > 1 else ""
            _log.warning("rank %d has waited %.0f s: %s%s", self.options.rank, waited, reasons[0], more)

    def check_silence(self, server: int, since: float, now: float) -> bool:
        """Return whether a server, asked at `since`, has sent nothing for so long that the request must be repeated.

        A server that is still sending a large answer is not asked again, because it would send the answer twice.

        Raises:
            ServerUnreachableError: the server has sent neither messages nor heartbeats for `dead_after` seconds, is
                not seen to run, and is not restarted.
        """
        unanswered = now - max(self._heard[server], since)
        # While a large push is still on its way, the server has nothing to answer yet, but it answers heartbeats.
        silence = min(unanswered, now - self.transport.last_heartbeat(server))
        is_lost = silence >= self.options.dead_after and self._tokens[server] != _NO_SESSION
        if is_lost and not self._runs(server):
            where, is_paused = self.describe(server), self.transport.process(server) is ProcessState.STOPPED
            paused = " (its process is paused by a signal or a debugger)" if is_paused else ""
            if server in self._absences.timeouts:
                self._begin_absence(server, f"has not answered for {silence:.1f} s{paused}", now)
                return False
            self._unreachable.add(server)
            where += paused
            raise ServerUnreachableError(
                f"{where} has not answered for {silence:.1f} s; is it still running? Restart the job from its last "
                "saved states (KVSTORE_DEAD_AFTER raises the limit)"
            )
        return unanswered >= self._repeat_after

    def _runs(self, server: int) -> bool:
        """Return whether a server's process is seen to run, or has just ended, which is detected elsewhere."""
        return self.transport.process(server) in (ProcessState.RUNS, ProcessState.ENDED)

    def _has_process_ended(self, server: int, wait_began: float, now: float) -> bool:
        """Return whether a server's process has ended, and its last messages have had time to arrive.

        After the end was reported once, a new process may serve at the same address. Each later wait therefore gives
        the server a while to answer.
        """
        if server not in self.transport.ended or server in self._absences.timeouts:
            return False
        detected_at = self._process_ended_at.setdefault(server, now)
        if server in self._unreachable:
            return now - max(wait_began, self._heard[server]) >= min(REPEAT_AFTER, self.options.dead_after)
        return now - max(detected_at, self._heard[server]) >= FINAL_MESSAGE_TIME

    def _process_ended_error(self, server: int) -> ServerUnreachableError:
        how = self.transport.how_ended(server) or "has ended without giving a reason"
        return ServerUnreachableError(
            f"the process of {self.describe(server)} {how}. Restart the job from its last saved states"
        )

    def close(self, reason: str, is_clean: bool, holders: Collection[int] | None = None) -> None:
        """Leave the job on every server and close the transport. Idempotent.

        If a server has lost the state of the job, the servers are given that as the reason even if `is_clean`, because
        the loop of this worker may have caught the error.

        Args:
            holders: Servers that hold something of the job; others have lost nothing of it. None: all may.
        """
        if self.is_closed:
            return
        errors = [
            one for server, one in self._lost_state_errors.items() if holders is None or server in holders
        ]
        if errors and is_clean:
            reason, is_clean = describe(errors[-1]), False
        failpoint("worker.close")
        for server, (run_id, session) in enumerate(self._tokens):
            if session and server not in self._shut_down and server not in self._absences:
                leave = m.Request(run_id, session, self.next_number(), m.Leave(reason, is_clean))
                with suppress(KVStoreError):  # a forked process has no session of its own
                    self.transport.send(server, leave)
                    if self.log is not None:
                        self.log.message("sent", self._peers[server], leave.number, leave.body)
                failpoint("worker.close.next")
        failpoint("worker.close.left")
        self.is_closed = True
        self.transport.close()

    def _no_answer_error(self, server: int, body: m.RequestBody, timeout: float) -> KVStoreError:
        if isinstance(body, m.Hello):
            why = self.transport.why_refused(server)
            return ConnectTimeoutError(
                f"{self.describe(server)} did not answer within {timeout:g} s{why and f': {why}'}; is it running, and "
                "is KVSTORE_SERVERS right? (connect_timeout=… or KVSTORE_CONNECT_TIMEOUT raises the limit)"
            )
        if isinstance(body, m.PullRows):
            return self.deadline_error([_ControlCall(server, 0, body)], "send rows")
        self._unreachable.add(server)
        return ServerUnreachableError(
            f"{self.describe(server)} did not answer {type(body).__name__} within {timeout:g} s; is it still running?"
        )

    def _dispatch(self, server: int, reply: m.Reply, now: float) -> None:
        self._heard[server] = now
        self._unreachable.discard(server)
        if server in self._absences.gone:
            self._end_absence(server, not isinstance(reply.body, m.Failed), now)
        if self.trace is not None:
            self.trace.received(reply)
        if self.log is not None:
            self.log.message("received", self._peers[server], reply.number, reply.body)
        # 1. A message that answers no request: the server shuts down, or could not read a request at all.
        if reply.number == 0 and isinstance(reply.body, m.Failed):
            error = from_wire(reply.body.code, reply.body.text)
            if not isinstance(error, ServerStoppingError):
                raise error
            self._unreachable.add(server)
            self._shut_down.add(server)
        # 2. Why the answer is late, or that the server has lost the state of the job.
        if isinstance(reply.body, m.Pending) and reply.body.why:
            if self._has_repeated:
                self._reasons.clear()
                self._has_repeated = False
            self._reasons.append(reply.body.why)
        elif isinstance(reply.body, m.Failed) and reply.body.code == ServerLostState.__name__:
            self._lost_state_errors[server] = from_wire(reply.body.code, reply.body.text)
        # 3. The reply itself.
        handler = self._handlers.get(reply.number)
        if handler is not None:
            handler(server, reply.body)


@dataclass
class _Open:
    lane: int
    start: float
    last: float
    name: str = ""
    args: dict[str, Any] = field(default_factory=dict)


class SessionTrace:
    """Records what one session sends and receives.

    A request lasts from its first message to its last answer; messages that are sent again only add bytes.
    """

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self._open: dict[int, _Open] = {}

    def sent(self, server: int, number: int, body: m.RequestBody) -> None:
        """Record a message of a request; the first one begins it, on the lowest free lane."""
        known = self._open.get(number)
        if known is None:
            now = self.trace.clock()
            taken = {one.lane for one in self._open.values()}
            lane = next(lane for lane in range(1, len(taken) + 2) if lane not in taken)
            known = self._open[number] = _Open(lane, now, now)
            known.args.update(server=server, bytes_out=0, bytes_in=0)
        known.args["bytes_out"] += payload_in(body)
        known.name = known.name or type(body).__name__
        if isinstance(body, m.Contribute) and len(body.commits):
            table, round_ = body.commits[0, :2].tolist()
            known.args.setdefault("rounds", len(body.commits))
            known.args.setdefault("first_table", table)
            known.args.setdefault("first_round", round_)

    def received(self, reply: m.Reply) -> None:
        known = self._open.get(reply.number)
        if known is not None:
            known.last = self.trace.clock()
            known.args["bytes_in"] += payload_out(reply.body)

    def ended(self, number: int) -> None:
        known = self._open.pop(number, None)
        if known is not None:
            category = ROUNDS if "rounds" in known.args else CALLS
            self.trace.append(
                Event(known.name, category, known.start, known.last - known.start, known.lane, known.args)
            )

    def waited(self, start: float) -> None:
        self.trace.add("wait", CALLS, start, _WAITING, {})


def lane_name(lane: int) -> str:
    return "waiting" if lane == _WAITING else f"requests ({lane})"
