"""The store without its sockets: a message and the time go in, replies come out.

The engine owns namespaces, their members and their tables. It never waits: a request that cannot be answered yet
is answered later, out of the handling of another message or out of `tick`. Errors of one request never harm
another: whatever a request raises goes back as `Failed`, and the engine goes on.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial

from kvstore_server.admission import MAX_REASON, EngineConfig, check_hello, check_named, check_number
from kvstore_server.commands import CommandContext, Commands
from kvstore_server.controls import control
from kvstore_server.errors import (
    ConfigurationError,
    KeyNotFoundError,
    KVStoreError,
    PlanMismatchError,
    ProtocolError,
    ServerLostState,
    ServerStoppingError,
    from_wire,
    to_wire,
)
from kvstore_server.hopeless import report_slow_waits, still_waiting
from kvstore_server.memory import Budget
from kvstore_server.modes import Mode
from kvstore_server.namespace import Namespace
from kvstore_server.protocol import messages as m
from kvstore_server.replies import failed, parts_of, reply, rows_for
from kvstore_server.round_keeper import RoundKeeper
from kvstore_server.sessions import Session, Sessions, random_token
from kvstore_server.shard import Leases, Updater
from kvstore_server.table import Table, Waiter
from kvstore_server.tracing import Clock, handled

_log = logging.getLogger(__name__)

_SMALL, _LOOK_PER_ITEM = 1000, 5e-5
"""A namespace with more tables, waits and ranks than this is looked at every so many seconds for each of them."""


class Engine:
    """All state of one server. Not thread-safe: one caller at a time."""

    def __init__(
        self,
        config: EngineConfig,
        leases: Leases | None = None,
        clock: Clock | None = None,
        tokens: Callable[[], int] = random_token,
    ) -> None:
        """`clock` measures how long things take while a job profiles them; without one it cannot.

        `tokens` gives each session its secret: numbers of 64 bits that nobody can guess.
        """
        self.config = config
        self._clock = clock
        self._commands = Commands(CommandContext(config.server, config.num_servers))
        self.namespaces: dict[str, Namespace] = {}
        self.budget = Budget(config.max_memory, config.server)
        self._rounds = RoundKeeper(config.server, config.dead_after)
        self._leases = leases
        self._sessions = Sessions(config.server, tokens)

    @property
    def updaters(self) -> dict[str, Updater]:
        """Namespace → a user's function in place of an optimizer; in-process use only."""
        return self._rounds.updaters

    @property
    def memory_used(self) -> int:
        """Bytes that are promised to namespaces."""
        return self.budget.used

    @property
    def is_stopping(self) -> bool:
        """Whether `stop` was called."""
        return self._rounds.is_stopping

    def handle(self, peer: bytes, request: m.Request, now: float) -> list[m.Outgoing]:
        """Take one request of `peer` at time `now` (seconds, monotonic); return what to send, to whom."""
        try:
            return self._dispatch(peer, request, now)
        except KVStoreError as error:
            return [failed(peer, request.number, error)]
        except Exception as error:
            _log.exception("request %s failed", type(request.body).__name__)
            fault = KVStoreError(f"server {self.config.server} failed with {type(error).__name__}: {error}")
            return [failed(peer, request.number, fault)]

    def tick(self, now: float) -> list[m.Outgoing]:
        """Fail the waits whose deadline has passed, or that need a rank which is lost; log those that take long.

        Namespaces whose workers are all gone are freed.
        """
        out: list[m.Outgoing] = []
        for space in list(self.namespaces.values()):
            if now < space.next_look:
                continue
            # What is large is looked at more rarely, so that it takes no more of the time.
            size = len(space.tables) + len(space.waits) + space.membership.num_workers
            space.next_look = now + _LOOK_PER_ITEM * size if size > _SMALL else now
            out += self._fail_hopeless(space, now)
            self._forget_if_silent(space, now)
        return out

    def _fail_hopeless(self, space: Namespace, now: float) -> list[m.Outgoing]:
        out: list[m.Outgoing] = []
        for table in space.tables.values():
            if table.rounds.is_waiting():
                out += self._rounds.fail_if_hopeless(space, table, now)
        out += self._rounds.release(space)
        out += self._rounds.fail_hopeless_waits(space, now)
        out += [
            failed(peer, number, error)
            for peer, number, error in space.expired_barriers(now, self.config.dead_after)
        ]
        slow = report_slow_waits(space, now)
        if slow is not None:
            _log.warning("%s", slow)
        return out

    def excuse_silence(self, now: float) -> None:
        """Count every worker as just heard: it was the server that did not listen."""
        for space in self.namespaces.values():
            for member in space.membership.members.values():
                member.last_heard = now

    def stop(self) -> None:
        """Begin to drain: rounds that have begun may end, new ones are refused."""
        self._rounds.is_stopping = True

    def abandon(self, now: float) -> list[m.Outgoing]:
        """Fail every wait, because the server ends now, and tell every member."""
        out: list[m.Outgoing] = []
        for space in self.namespaces.values():
            members = space.membership
            for table in space.tables.values():
                if table.rounds.is_waiting():
                    what = f"round {table.rounds.number} of {table.name!r}"
                    error = self._ended(what, space, table.rounds.missing_ranks(), now)
                    out += self._rounds.fail(table, error)
            for wait in space.waits.take(lambda wait: True):
                error = self._ended(f"a read of {wait.table.name!r}", space, wait.missing(), now)
                out.append(failed(*wait.waiter, error, wait.table.number))
            error = self._ended(
                f"barrier {members.barrier_sequence}", space, space.absent_from_barrier(), now
            )
            out += [failed(wait.peer, wait.number, error) for wait in members.barrier.values()]
            members.barrier.clear()
        farewell = ServerStoppingError(f"server {self.config.server} was stopped")
        return out + [failed(session.peer, 0, farewell) for session in self._sessions]

    def _ended(self, what: str, space: Namespace, missing: list[int], now: float) -> ServerStoppingError:
        who = space.membership.describe_all(missing, now) or "nobody had decided yet what becomes of it"
        return ServerStoppingError(
            f"server {self.config.server} was stopped while {what} waited: {who}; "
            "restart the job from its last saved states"
        )

    def is_idle(self) -> bool:
        """Whether no rank waits for an answer."""
        return not any(space.is_waiting() for space in self.namespaces.values())

    def _dispatch(self, peer: bytes, request: m.Request, now: float) -> list[m.Outgoing]:
        body = request.body
        if isinstance(body, m.Hello):
            return [m.Outgoing(peer, m.Reply(request.number, self._hello(peer, body, now)))]
        session = self._session(peer, request)
        space, rank = session.space, session.rank
        space.membership.members[rank].last_heard = now
        trace = space.profiling.active
        if trace is None:
            return self._answer(space, rank, peer, request, now)
        return handled(trace, request.body, rank, lambda: self._answer(space, rank, peer, request, now))

    def _answer(
        self, space: Namespace, rank: int, peer: bytes, request: m.Request, now: float
    ) -> list[m.Outgoing]:
        body = request.body
        space.messages_in += not isinstance(body, m.Heartbeat)
        if isinstance(body, m.PushBatch):
            check_number(self.config, "push", len(body.pushes))
            form = space.form(body.form) if body.form else None
            for push in body.pushes:
                space.table(push.table).push(rank, push, form)
            return []
        if isinstance(body, m.CommitBatch):
            check_named(self.config, "commit", [commit.table for commit in body.commits])
            return self._rounds.commits(space, rank, body, Waiter(peer, request.number), now)
        if isinstance(body, m.Resolve):
            return self._rounds.resolve(space, rank, body, now)
        if isinstance(body, m.Abort):
            return self._rounds.abort(space, rank, body, Waiter(peer, request.number))
        if isinstance(body, m.Barrier):
            return self._barrier(space, rank, body, peer, request.number, now)
        if isinstance(body, m.Leave):
            return self._leave(space, rank, body, request.session, now)
        if isinstance(body, m.Heartbeat):
            return reply(Waiter(peer, request.number), m.Pending(()))
        if isinstance(body, m.Register):
            return self._register(space, rank, body, Waiter(peer, request.number))
        if isinstance(body, m.Command):
            given = self._commands.answer(request.session, request.number, body)
            return reply(Waiter(peer, request.number), given)
        if isinstance(body, m.Pull):
            return self._pull(space, rank, body, Waiter(peer, request.number), now)
        if isinstance(body, m.PullRows):
            check_named(self.config, "pull", [(index, position) for index, position, _ in body.wanted])
            table, waiter = _ready(space.table(body.table)), Waiter(peer, request.number)
            answer = partial(_rows, table, rank, body, waiter)
            return self._rounds.read(space, table, rank, waiter, now, body.timeout, answer)
        return reply(Waiter(peer, request.number), control(space, rank, body, self.config, self._clock, now))

    def _register(
        self, space: Namespace, rank: int, register: m.Register, waiter: Waiter
    ) -> list[m.Outgoing]:
        try:
            check_number(self.config, "declaration", len(register.specs))
            table = space.register(rank, register, self.config, self._leases)
        except PlanMismatchError as error:
            told = [failed(waiter.peer, waiter.number, error)]
            for table in space.tables.values():
                if table.conflict is error and table.rounds.is_waiting():
                    told += self._rounds.fail(table, error)
            return told
        if isinstance(table, int):
            return reply(waiter, m.Info({"keys": table}))
        return reply(waiter, m.Registered(table.number, table.next_round(rank)))

    def _pull(
        self, space: Namespace, rank: int, pull: m.Pull, waiter: Waiter, now: float
    ) -> list[m.Outgoing]:
        """The weights of each table, as soon as the rank may read it."""
        check_named(self.config, "pull", pull.tables)
        tables = [_ready(space.table(number)) for number in pull.tables]
        out: list[m.Outgoing] = []
        for table in tables:
            answer = partial(_weights, table, rank, waiter)
            out += self._rounds.read(space, table, rank, waiter, now, pull.timeout, answer)
        return out

    def _hello(self, peer: bytes, hello: m.Hello, now: float) -> m.Welcome:
        known = self._sessions.repeated(peer, hello)
        if known is not None:  # the answer to the first one may be lost, or still on its way
            known.space.membership.members[known.rank].last_heard = now
            return m.Welcome(self.config.run, known.token)
        space = self.namespaces.get(hello.namespace)
        token = self._sessions.new_token()
        try:
            if self.is_stopping:
                raise ServerStoppingError(f"server {self.config.server} is stopping and takes no new workers")
            check_hello(self.config, hello)
            mode = Mode(hello.mode, hello.staleness, hello.slow_down)
            mode.check()
            if space is None:
                space = self._new_namespace(hello, mode)
            elif mode != space.mode:
                raise ConfigurationError(
                    f"rank {hello.rank} ({hello.address}) wants mode {mode}, the ranks before it {space.mode}; create "
                    "the same kvstore on every worker"
                )
            replaced = space.membership.join(hello, token, now)
        except ConfigurationError as error:
            if space is not None:
                space.membership.refuse(hello.rank, f"it was refused: {error}")
            raise
        if hello.namespace not in self.namespaces:
            self.namespaces[hello.namespace] = space
            space.begin()
        self._sessions.open(token, peer, hello, space)
        if replaced is not None:
            self._shut_out(
                replaced.session,
                f"rank {hello.rank} was taken over by {hello.address}; if that is another job on the same servers, "
                "give each its own namespace=…",
            )
        space.waits.take(lambda wait: wait.rank == hello.rank)
        space.forget_declaration(hello.rank)
        for table in space.tables.values():
            table.begin_process(hello.rank)
        return m.Welcome(self.config.run, token)

    def _new_namespace(self, hello: m.Hello, mode: Mode) -> Namespace:
        """A namespace for the first worker that names it. Raises ConfigurationError if there are too many."""
        if len(self.namespaces) >= self.config.max_namespaces:
            raise ConfigurationError(
                f"server {self.config.server} has {len(self.namespaces)} namespaces and accepts up to "
                f"{self.config.max_namespaces} (--max-namespaces); one ends with its last worker, or when none of its "
                f"workers was heard from for {self.config.forget_after:g} s (--forget-after)"
            )
        config = self.config
        space = Namespace(hello.namespace, hello.num_workers, mode, config.slow_after, self.budget)
        self.budget.check(space.least_memory, f"namespace {hello.namespace!r}")
        return space

    def _forget_if_silent(self, space: Namespace, now: float) -> None:
        """Free a namespace of which no worker was heard from for so long that none comes back."""
        silence = space.membership.silence(now)
        limit = self.config.forget_after if space.has_values else self.config.dead_after
        if silence <= limit:
            return
        _log.warning(
            "namespace %r is freed: none of its workers was heard from for %.0f s", space.name, silence
        )
        for member in space.membership.members.values():
            self._shut_out(
                member.session,
                f"no worker of namespace {space.name!r} was heard from for {silence:.0f} s, so it was freed "
                "(--forget-after); restart the job from its last saved states",
            )
        self._end(space)

    def _end(self, space: Namespace) -> None:
        """Free a namespace that has no members any more."""
        del self.namespaces[space.name]
        space.end()

    def _shut_out(self, session: int, reason: str) -> None:
        """End a session, whose process is told why when it comes again."""
        self._commands.forget(session)
        self._sessions.end(session, reason)

    def _session(self, peer: bytes, request: m.Request) -> Session:
        if request.run != self.config.run:
            raise ServerLostState(
                f"server {self.config.server} was restarted and no longer holds this job's weights; "
                "restart the job from its last saved states"
            )
        return self._sessions.find(peer, request.session)

    def _barrier(
        self, space: Namespace, rank: int, barrier: m.Barrier, peer: bytes, number: int, now: float
    ) -> list[m.Outgoing]:
        released = space.enter_barrier(rank, barrier, peer, number, now, self.config.dead_after)
        if released is None:
            what = f"barrier {barrier.sequence}"
            return reply(Waiter(peer, number), still_waiting(space, what, space.absent_from_barrier(), now))
        return [m.Outgoing(to, m.Reply(n, m.Info())) for to, n in released]

    def _leave(
        self, space: Namespace, rank: int, leave: m.Leave, session: int, now: float
    ) -> list[m.Outgoing]:
        self._shut_out(session, "it has left")
        space.membership.leave(rank, leave.reason[:MAX_REASON], leave.is_clean)
        space.forget_declaration(rank)
        space.waits.take(lambda wait: wait.rank == rank)
        for table in space.tables.values():
            table.end_process(rank, leave.is_clean)
        if space.membership.is_over():
            self._end(space)
            return []
        return self._fail_hopeless(space, now)


def _weights(table: Table, rank: int, waiter: Waiter) -> list[m.Outgoing]:
    return reply(waiter, m.Weights(parts_of(table, rank)))


def _rows(table: Table, rank: int, pull: m.PullRows, waiter: Waiter) -> list[m.Outgoing]:
    try:
        return reply(waiter, m.Weights(rows_for(table, rank, pull)))
    except ProtocolError as error:
        return [failed(waiter.peer, waiter.number, error)]


def _ready(table: Table) -> Table:
    if table.conflict is not None:
        raise from_wire(*to_wire(table.conflict))
    if not table.is_initialised:
        raise KeyNotFoundError(
            f"table {table.name!r} has not been initialised yet; call init on every worker first"
        )
    return table
