"""All that a worker can ask of its servers, in one object: tables, rounds, optimizer, barrier, counters."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvstore_server.errors import ConfigurationError, describe
from kvstore_server.optimizer import SliceState
from kvstore_server.plan import Plan, Slice, TensorSpec, make_plan
from kvstore_server.protocol import messages as m
from kvstore_server.protocol.frames import pack_control
from kvstore_server.state_blob import pack_state, unpack_state
from kvtrainer.comm.rounds import Rounds
from kvtrainer.comm.session import Session, SessionOptions, Transport
from kvtrainer.comm.tickets import RemoteTable

_REGISTERED_TOGETHER = 64
"""Requests under way at once: more would only wait in the queues."""


class Client:
    """One worker's connection to the store, wherever the store is. Not thread-safe.

    `rounds` runs exchanges and pulls; the methods here are control requests, each blocking until it is answered.
    """

    def __init__(self, transport: Transport, options: SessionOptions, clock: Callable[[], float]) -> None:
        self.options = options
        self._session = Session(transport, options, clock)
        self.rounds = Rounds(self._session)
        self._tables: dict[str, RemoteTable] = {}
        self._barriers = 0

    @property
    def num_servers(self) -> int:
        return self._session.num_servers

    @property
    def is_closed(self) -> bool:
        return self._session.is_closed

    def connect(self) -> None:
        """Say hello to every server; blocks up to `connect_timeout`. Raises as `Session.connect`."""
        self._session.connect()

    def register(self, tables: Mapping[str, Sequence[TensorSpec]]) -> list[RemoteTable]:
        """Declare tables on every server that holds a part of them; round 0 of each must follow on every worker.

        Raises:
            PlanMismatchError: another worker declared other keys under one of the names.
            ConfigurationError: a table is registered, or the servers hold it from an earlier run.
            ServerUnreachableError: a server did not answer.
        """
        declared = {name: self._declare(name, specs) for name, specs in tables.items()}
        requests = [(server, table) for table in declared.values() for server in table.plan.servers]
        for at in range(0, len(requests), _REGISTERED_TOGETHER):
            self._register(requests[at : at + _REGISTERED_TOGETHER])
        self._tables.update(declared)
        return list(declared.values())

    def _declare(self, name: str, specs: Sequence[TensorSpec]) -> RemoteTable:
        known = self._tables.get(name)
        if known is not None:
            state = "is registered already" if known.is_initialised else "could not be initialised before"
            raise ConfigurationError(f"table {name!r} {state}; restart the job, or give another namespace=…")
        return RemoteTable(name, make_plan(specs, self.num_servers), {})

    def _register(self, requests: Sequence[tuple[int, RemoteTable]]) -> None:
        """Declare (server, table) pairs in one go: asking for a thousand keys one after the other takes long."""
        bodies = [(server, m.Register(table.name, _wire_specs(table.plan))) for server, table in requests]
        for (server, table), reply in zip(requests, self._session.call_all(bodies), strict=True):
            assert isinstance(reply, m.Registered)
            if reply.next_round:
                raise ConfigurationError(
                    f"{self._session.describe(server)} holds {table.name!r} at round {reply.next_round} from an "
                    f"earlier run of namespace {self.options.namespace!r}; restart the servers, or give another "
                    "namespace=…"
                )
            table.numbers[server] = reply.table

    def set_optimizer(self, spec: Mapping[str, Any]) -> None:
        """Name the optimizer on every server; naming the same one again changes nothing there.

        Raises:
            UnknownNameError: a server does not know it.
            ConfigurationError: a server does not accept its numbers.
        """
        packed = pack_control(dict(spec))
        self.settle()
        for server in range(self.num_servers):
            self._session.call(server, m.SetOptimizer(packed))

    def get_state(self, table: RemoteTable, piece: Slice) -> SliceState:
        """Fetch the optimizer state of one slice, as of this worker's last round."""
        self.rounds.settle(table)
        reply = self._session.call(piece.server, m.GetState(table.numbers[piece.server], piece.index))
        assert isinstance(reply, m.State)
        return unpack_state(piece, reply.summary, reply.data)

    def put_state(self, table: RemoteTable, piece: Slice, state: SliceState) -> None:
        """Replace the optimizer state of one slice."""
        self.rounds.settle(table)
        summary, data = pack_state(state)
        self._session.call(piece.server, m.State(table.numbers[piece.server], piece.index, summary, data))

    def barrier(self) -> None:
        """Block until every worker of the namespace has come to the same barrier.

        Raises:
            DeadlineError: some did not come in time; names them.
            WorkerLostError: one of them is gone.
        """
        self.settle()
        timeout = self.options.timeout + self.options.dead_after
        self._session.call(0, m.Barrier(self._barriers, self.options.timeout), timeout)
        self._barriers += 1

    def stats(self) -> list[dict[str, Any]]:
        """Each server's counters for this namespace, in server order."""
        replies = [self._session.call(server, m.Stats()) for server in range(self.num_servers)]
        return [dict(reply.values) for reply in replies if isinstance(reply, m.Info)]

    def settle(self) -> None:
        """Wait for every round in flight; raises what the first failed one raises."""
        for table in list(self._tables.values()):
            if table.ticket is not None:
                self.rounds.wait(table.ticket)

    def close(self, error: BaseException | None = None) -> None:
        """Leave the job; idempotent. Rounds of others that still need this worker fail.

        With the error that ends this worker, it counts as dead from now on, for that reason.
        """
        reason = "it closed its kvstore or its program ended"
        if error is not None:
            reason = describe(error)
        self._session.close(reason, is_clean=error is None)


def _wire_specs(plan: Plan) -> tuple[tuple[str, tuple[int, ...], str, int], ...]:
    return tuple((spec.key, tuple(spec.shape), spec.dtype, spec.group) for spec in plan.specs)
