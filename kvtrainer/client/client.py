"""All that a worker can ask of the store: tables, rounds, optimizer, barrier, counters, commands.

A `Client` is one worker's connection. It works over any `Transport`: sockets and shared memory to servers
(`connection.py`), or `LoopbackTransport`, which calls engines in this process and holds what local stores hold.

Rounds and pulls of rows go through `rounds` and `rows`. The methods here are control requests: each blocks until all
servers that it concerns have answered. A request that depends on the weights waits for this worker's open rounds first.
Tables are registered once, under the same names and layouts on every worker.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from kvstore_server.codec import Codec
from kvstore_server.engine.engine import Engine
from kvstore_server.engine.namespace import EngineConfig
from kvstore_server.errors import ConfigurationError, describe
from kvstore_server.failpoints import failpoint
from kvstore_server.optimizer.state import States, pack_states, unpack_states
from kvstore_server.plan import Plan, Slice, TensorSpec, check_name, make_plan
from kvstore_server.protocol import messages as m
from kvstore_server.protocol.frames import KEYS_PER_MESSAGE, MAX_PAYLOAD, divided, pack_control
from kvstore_server.protocol.messages import SECRET_BYTES
from kvstore_server.tracing import Event, Trace, unpack_events
from kvtrainer.client.rounds import Rounds
from kvtrainer.client.row_reads import RowPulls
from kvtrainer.client.saves import load, save
from kvtrainer.client.session import Calls, Report, Session, SessionOptions, SessionTrace, Transport
from kvtrainer.client.shared_gradients import SharedGradients
from kvtrainer.client.snapshot_schedule import SnapshotSchedule
from kvtrainer.client.tables import RemoteTable

_TABLES_PER_REGISTER = 64
"""Requests under way at once: more would only wait in the queues."""
_STATES_IN_ADVANCE = 2
"""Slices of each server whose state is requested before it is needed."""


class Client:
    """One worker's connection to the store. Not thread-safe.

    Args:
        holders: Collects the servers that hold tables of this client or of others of the same job.
    """

    def __init__(
        self,
        transport: Transport,
        options: SessionOptions,
        clock: Callable[[], float],
        holders: set[int] | None = None,
    ) -> None:
        self.options = options
        self._holders = set[int]() if holders is None else holders
        self._session = Session(transport, options, clock)
        self.rounds = Rounds(self._session)
        self.rows = RowPulls(self._session, self.rounds)
        self._tables: dict[str, RemoteTable] = {}
        self.num_barriers = 0
        """How many barriers this rank has passed."""

    @property
    def num_servers(self) -> int:
        return self._session.num_servers

    @property
    def shares_memory(self) -> bool:
        return any(map(self._session.transport.channel, range(self.num_servers)))

    def tell(self, report: Report) -> None:
        """Send a report with each heartbeat, and count in it how long this worker waits."""
        self._session.report = report

    def shared_gradients(
        self, table: RemoteTable, keys: Collection[int], allocates: bool, gathers: bool
    ) -> SharedGradients:
        return SharedGradients(table.plan, keys, self._session.transport.channel, allocates, gathers)

    @property
    def shares_all_memory(self) -> bool:
        return all(map(self._session.transport.channel, range(self.num_servers)))

    @property
    def is_closed(self) -> bool:
        return self._session.is_closed

    def connect(self) -> None:
        """Say hello to every server; blocks up to `connect_timeout`. Raises as `Session.connect`."""
        self._session.connect()

    def register(
        self,
        tables: Mapping[str, Plan | Sequence[TensorSpec]],
        whole_keys: bool = False,
        allow_single_server: bool = False,
        delta_codec: Codec | None = None,
        resumes: bool = False,
    ) -> list[RemoteTable]:
        """Declare tables on every server that holds a part of them; round 0 of each must follow on every worker.

        Args:
            tables: Name → keys, or a plan of them, which is laid over this job's servers.
            whole_keys: No key is spread over servers.
            allow_single_server: Tables that are small for these servers, and stay so, are placed on one of them.
            delta_codec: New weights come back as changes, encoded by it.
            resumes: Servers may hold the tables already: this process goes on where an earlier one of its rank has
                ended, see `RemoteTable.takeover`.

        Raises:
            PlanMismatchError: another worker declared other keys under one of the names, or another codec.
            ConfigurationError: a table is registered, or the servers hold it from an earlier run.
            ServerUnreachableError: a server did not answer.
        """
        least = self._session.spread_from if allow_single_server else 0
        declared = {name: self._declare(name, specs, whole_keys, least) for name, specs in tables.items()}
        for table in declared.values():
            table.delta_codec = delta_codec
        requests = [(server, table) for table in declared.values() for server in table.plan.servers]
        self._holders.update([server for server, _ in requests])
        failpoint("worker.register.begin")
        for at in range(0, len(requests), _TABLES_PER_REGISTER):
            self._register(requests[at : at + _TABLES_PER_REGISTER], resumes)
        failpoint("worker.register.end")
        for table in declared.values() if self.options.is_elastic else ():
            self._join(table)
        for table in declared.values() if resumes else ():
            table.take_over(self.options.mode.is_sync)
        self._tables.update(declared)
        return list(declared.values())

    def _declare(
        self, name: str, given: Plan | Sequence[TensorSpec], whole_keys: bool, spread_from: int
    ) -> RemoteTable:
        known = self._tables.get(name)
        if known is not None:
            state = "is registered already" if known.is_initialised else "could not be initialised before"
            raise ConfigurationError(f"table {name!r} {state}; restart the job, or give another namespace=…")
        check_name("a table", name)
        plan = given if isinstance(given, Plan) else make_plan(given, 1, allow_integers=True)
        # A hash table grows, however small the plan says that it is.
        one_server = plan.nbytes < spread_from and all(one.hash_table is None for one in plan.specs)
        return self.rounds.tables.add(name, plan.over(self.num_servers, whole_keys, one_server))

    def _register(self, requests: Sequence[tuple[int, RemoteTable]], resumes: bool) -> None:
        # 1. Declare all tables at once: one round trip for each of a thousand keys would take long.
        bodies = [(server, _register_message(table, 0)) for server, table in requests]
        for (server, table), reply in zip(requests, self._session.call_all(bodies), strict=True):
            # 2. A table with more keys than fit into a message is declared in several.
            while isinstance(reply, m.Status):
                reply = self._session.call(server, _register_message(table, int(reply.values["keys"])))
            assert isinstance(reply, m.Registered)
            # 3. The server may know the table already.
            is_known = len(table.numbers) > 0
            goes_on = reply.next_round > 0
            if resumes:
                table.record_takeover(server, reply)
                # `take_over` follows, once all servers have answered.
            elif not self.options.mode.is_sync and (not is_known or table.is_initialised == goes_on):
                # The others may have gone on without a process of this rank, and it goes on beside them.
                table.resume(max(table.round, reply.next_round), goes_on)
            elif reply.next_round and self._session.restored_round:
                raise ConfigurationError(
                    f"the job goes on from the snapshot of round {self._session.restored_round} in --state-dir, and "
                    f"this script does not ask where: call trainer.resume() before the first step, or start the "
                    "servers with an empty --state-dir"
                )
            elif reply.next_round or table.round:
                raise ConfigurationError(
                    f"{self._session.describe(server)} is at round {reply.next_round} of "
                    f"{table.name!r} already: the other workers' init of it has ended without this worker, perhaps "
                    f"because its own was refused, or an earlier run of namespace {self.options.namespace!r} has left "
                    "it there. Restart the job and its servers, or give another namespace=…"
                )
            table.register(server, reply)
            if server == table.coordinator:
                table.is_member = reply.is_member
            failpoint("worker.register.next")

    def _join(self, table: RemoteTable) -> None:
        """Wait until this rank is a member; at once for those that begin, and for a new process of one that is."""
        failpoint("worker.members.join")
        if not table.is_member:
            # Other servers may have an open round that still waits for this rank, and not know that it was given up.
            others = [server for server in table.plan.servers if server != table.coordinator]
            self._session.call_all([(server, m.LeaveRounds(table.numbers[server])) for server in others])
        timeout = self.options.timeout
        body = m.JoinRounds(table.numbers[table.coordinator], timeout)
        told = self._session.call(table.coordinator, body, timeout + self.options.dead_after)
        assert isinstance(told, m.Members)
        table.record_membership(told)
        assert table.takeover is not None
        committed = table.takeover.committed
        lagging = [server for server, one in committed.items() if one < committed[table.coordinator]]
        if self.options.backup_workers and lagging:
            # The others do not wait for this process to repeat what the former one has not sent there.
            self._session.call_all([(server, m.LeaveRounds(table.numbers[server])) for server in lagging])
        failpoint("worker.members.joined")

    def leave_rounds(self, table: RemoteTable) -> None:
        """Have the others go on without this rank; blocks until that is recorded.

        Raises ConfigurationError if the members of the job do not change, or too few would be left.
        """
        self.rounds.wait_pending(table)
        failpoint("worker.members.leave")
        self._session.call(table.coordinator, m.LeaveRounds(table.numbers[table.coordinator]))

    def set_optimizer(self, spec: Mapping[str, Any]) -> None:
        """Name the optimizer on every server; naming the same one again changes nothing there.

        Raises:
            UnknownNameError: a server does not know it.
            ConfigurationError: a server does not accept its numbers.
        """
        packed = pack_control(dict(spec))
        self.wait_pending()
        for server in range(self.num_servers):
            self._session.call(server, m.SetOptimizer(packed))
            failpoint("worker.optimizer.next")

    def get_states(
        self, table: RemoteTable, slices: Sequence[Slice], since: Sequence[int]
    ) -> Iterator[States]:
        """Yield the optimizer state of slices, after this worker's last round; some are requested in advance.

        Args:
            since: For each slice of a hash table a step; rows that were not updated after it are left out, except for
                their numbers.
        """
        self.rounds.wait_pending(table)
        session, open_calls = self._session, deque[Calls]()
        rest = iter(zip(slices, since, strict=True))
        try:
            for slice_ in slices:
                most = _STATES_IN_ADVANCE * len(table.plan.servers)
                for one, step in itertools.islice(rest, most - len(open_calls)):
                    number = table.numbers[one.server]
                    open_calls.append(session.begin([(one.server, m.GetState(number, one.index, step))]))
                [reply] = session.finish(open_calls.popleft())
                assert isinstance(reply, m.SliceState)
                found = unpack_states(slice_, reply.summary, reply.data)
                found.history = reply.history
                yield found
        finally:
            for calls in open_calls:
                session.drop(calls)

    def put_state(self, table: RemoteTable, slice_: Slice, state: States) -> None:
        self.rounds.wait_pending(table)
        number = table.numbers[slice_.server]
        body = m.SliceState(number, slice_.index, *pack_states(state), state.history)
        self._session.call(slice_.server, body)

    def check_fixed(self, what: str, instead: str) -> None:
        """Raise ConfigurationError for what is not possible if the number of workers may change."""
        if self.options.is_elastic:
            raise ConfigurationError(
                f"{what} not possible in a job whose number of workers may change (KVSTORE_ELASTIC); {instead}, or "
                "start the job with a fixed number of workers"
            )

    def barrier(self) -> None:
        """Block until every worker of the namespace has reached the same barrier.

        Raises:
            ConfigurationError: the number of workers may change.
            DeadlineError: some did not in time; names them.
            WorkerLostError: one of them is gone.
        """
        self.gather(b"", reads=False)

    def gather(self, data: bytes, reads: bool = True) -> list[bytes]:
        """Wait at a barrier, and return what all workers passed to it, by rank; empty unless `reads`.

        All bytes together must fit into one message, of `MAX_PAYLOAD`. Blocks, and raises, as `barrier`.
        """
        self.check_fixed(
            "barriers, and what needs them, such as a Strategy or saved states by all workers together, are",
            "a step waits for all of its members, so do before a step what the others need after it",
        )
        self.wait_pending()
        failpoint("worker.barrier.begin")
        timeout = self.options.timeout + self.options.dead_after
        answer = self._session.call(
            0, m.Gather(self.num_barriers, self.options.timeout, data, reads), timeout
        )
        assert isinstance(answer, m.Gathered)
        parts = list(answer.parts)
        # Last: a barrier that is repeated after an interrupt has been passed, and is answered at once.
        self.num_barriers += 1
        failpoint("worker.barrier.end")
        return parts

    def stats(self) -> list[dict[str, Any]]:
        replies = [self._session.call(server, m.Stats()) for server in range(self.num_servers)]
        return [dict(reply.values) for reply in replies if isinstance(reply, m.Status)]

    def schedule_snapshots(self, schedule: SnapshotSchedule | None) -> SnapshotSchedule | None:
        """Ask for snapshots before rounds of this client, if servers take some and this rank may have to.

        Args:
            schedule: That of other clients of this worker.

        Returns what `schedule` is for the next client; None if there are no snapshots, or always another rank asks.
        """
        session = self._session
        may_have_to = self.options.rank == 0 or self.options.is_elastic
        if may_have_to and self.options.mode.is_sync and session.snapshot_period:
            if schedule is None:
                schedule = SnapshotSchedule(session.snapshot_period, session.clock)
            self.rounds.snapshots = schedule
        return schedule

    @property
    def rounds_ended(self) -> frozenset[int]:
        """How many rounds the tables of this client have ended, as far as it knows."""
        return frozenset([table.round for table in self.rounds.tables.all])

    def save(self, tag: str, round_: int) -> None:
        """Let servers save the job's state after a round under a tag; blocks. Raises as `saves.save`."""
        save(self._session, tag, round_)

    def load(self, tag: str) -> None:
        """Let servers go back to what was saved under a tag; blocks. Raises as `saves.load`."""
        load(self._session, tag)

    def command(self, head: int, body: bytes) -> list[bytes]:
        """Have every server run a command; blocks until all have. Returns the answers, in server order.

        Raises:
            CommandError: a server has no handler for it, or the handler raised; the first of them.
            ServerUnreachableError: a server did not answer.
        """
        replies = self._session.call_all([(s, m.Command(head, body)) for s in range(self.num_servers)])
        return [bytes(reply.values["answer"]) for reply in replies if isinstance(reply, m.Status)]

    def profile(self, action: str, categories: Sequence[str] = ()) -> None:
        """Have every server start or stop recording for this namespace; see `messages.Profile`."""
        body = m.Profile(action, tuple(categories))
        self._session.call_all([(server, body) for server in range(self.num_servers)])

    def recorded(self, server: int) -> tuple[list[Event], int]:
        """Return a server's recorded events in order, and how many later ones it dropped."""
        events: list[Event] = []
        total, dropped = 1, 0
        while len(events) < total:
            reply = self._session.call(server, m.Profile("fetch", (), len(events)))
            assert isinstance(reply, m.Status)
            if not events:
                total = int(reply.values["total"])  # what is added meanwhile may wait for the next time
            more = unpack_events(reply.values["events"])
            dropped = int(reply.values["dropped"])
            if not more:
                break
            events += more
        return events, dropped

    def trace_into(self, trace: Trace | None) -> None:
        """Record what this client does into a trace from now on; None stops that."""
        self._session.trace = None if trace is None else SessionTrace(trace)

    def poll(self) -> list[dict[str, Any] | None]:
        """Return what `stats` does, but None for servers that are silent or have lost this worker; does not raise.

        Blocks up to `dead_after` seconds if there are any.
        """
        requests = [(server, m.Stats()) for server in range(self.num_servers)]
        answers = self._session.ask_all(requests, self.options.dead_after)
        return [dict(answer.values) if isinstance(answer, m.Status) else None for answer in answers]

    def wait_pending(self) -> None:
        self.rounds.wait_all_pending()

    def close(self, error: BaseException | None = None) -> None:
        """Leave the job; idempotent. Open rounds that still need this worker fail on the others.

        Args:
            error: What ended this worker, which then counts as dead for that reason; None for a clean end.
        """
        reason = "it closed its kvstore or its program ended"
        if error is not None:
            reason = describe(error)
        self._holders.update([server for table in self._tables.values() for server in table.plan.servers])
        self._session.close(reason, error is None, self._holders or None)


def _register_message(table: RemoteTable, first: int) -> m.Register:
    """Declare as many keys of a table as fit into a message, from the first one given."""
    plan = table.plan
    specs = plan.specs[first : first + KEYS_PER_MESSAGE]
    ends = itertools.accumulate([4 * len(s.key) + 9 * len(s.shape) + 32 for s in specs])
    fit = max(sum([end <= MAX_PAYLOAD for end in ends]), 1)
    total = len(plan.specs)
    form = b"" if table.delta_codec is None else pack_control(table.delta_codec.spec())
    return m.Register(
        table.name,
        tuple([spec.fields for spec in specs[:fit]]),
        plan.whole_keys,
        first,
        total,
        plan.digest,
        plan.one_server,
        form,
    )


# ---------------------------------------------------------------- the engine in this process

_KEYS = "keys"
"""The namespace of a store's own keys. Each Trainer has a namespace of its own."""


class LoopbackTransport(Transport):
    """Passes requests to engines by a function call. Payloads are passed by reference."""

    def __init__(
        self, engines: Sequence[Engine], clock: Callable[[], float], peer: bytes = bytes(SECRET_BYTES)
    ) -> None:
        self.num_servers = len(engines)
        self._sending: FrameType | None = None
        """The frame of the `send` that runs now; it may also be one that was interrupted."""
        self._engines = list(engines)
        self._clock = clock
        self._peer = peer
        self._replies: deque[tuple[int, m.Reply]] = deque()

    @property
    def is_busy(self) -> bool:
        """Whether the caller was called by a request that an engine runs."""
        # A flag could stay set after an interrupt, so look for the frame of `send` on the stack.
        caller = None if self._sending is None else sys._getframe()
        while caller is not None and caller is not self._sending:
            caller = caller.f_back
        return caller is not None

    def send(self, server: int, request: m.Request, priority: int = 0) -> None:
        if torch.is_inference_mode_enabled():
            # The engine goes on to change what it makes now.
            with torch.inference_mode(False), torch.no_grad():
                self.send(server, request, priority)
            return
        self._sending = sys._getframe()
        try:
            for body in divided(request.body, sys.maxsize):
                one = request._replace(body=body)
                for out in self._engines[server].handle(self._peer, one, self._clock()):
                    if out.peer == self._peer:
                        self._replies.append((server, out.reply))
        finally:
            self._sending = None

    def receive(self, timeout: float) -> tuple[int, m.Reply] | None:
        return self._replies.popleft() if self._replies else None

    def describe(self, server: int) -> str:
        return f"in-process server {server}"

    def sockets(self, server: int) -> tuple[bytes, ...]:
        return (self._peer,)

    def last_heartbeat(self, server: int) -> float:
        return self._clock()

    def close(self) -> None:
        self._replies.clear()


class LocalEngine:
    """One engine in this process, and the clients over it; it may hold integers. `client` is the store's own."""

    def __init__(self) -> None:
        self._engine = Engine(EngineConfig(allow_integers=True), clock=time.monotonic)
        self._transport = LoopbackTransport([self._engine], time.monotonic)
        self.client = self._connect_client(self._transport, _KEYS)

    @property
    def is_busy(self) -> bool:
        return self._transport.is_busy

    @property
    def has_updater(self) -> bool:
        return _KEYS in self._engine.updaters

    def set_updater(self, updater: Callable[[str, Tensor, Tensor], None] | None) -> None:
        """Let a function update the store's keys; None gives that back to the optimizer."""
        if updater is None:
            self._engine.updaters.pop(_KEYS, None)
        else:
            self._engine.updaters[_KEYS] = updater

    def open_client(self, namespace: str) -> Client:
        return self._connect_client(LoopbackTransport([self._engine], time.monotonic), namespace)

    def _connect_client(self, transport: LoopbackTransport, namespace: str) -> Client:
        client = Client(transport, SessionOptions(namespace, rank=0, num_workers=1), time.monotonic)
        client.connect()
        return client
