"""The store without its sockets: a message and the time go in, replies come out.

The engine owns namespaces, their members and their tables. It never waits: a request that cannot be answered yet
is answered later, out of the handling of another message or out of `tick`. Errors of one request never harm
another: whatever a request raises goes back as `Failed`, and the engine goes on.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from kvstore_server.commands import CommandContext, Commands
from kvstore_server.errors import (
    ConfigurationError,
    DeadlineError,
    KeyNotFoundError,
    KVStoreError,
    PlanMismatchError,
    ProtocolError,
    RoundAbortedError,
    ServerLostState,
    ServerStoppingError,
    UnknownNameError,
    from_wire,
    to_wire,
)
from kvstore_server.memory import Budget
from kvstore_server.modes import Mode
from kvstore_server.namespace import EngineConfig, Namespace
from kvstore_server.norms import Decision
from kvstore_server.optimizer.state import pack_states, unpack_states
from kvstore_server.plan import check_name
from kvstore_server.protocol import messages as m
from kvstore_server.protocol.buffers import payload_size
from kvstore_server.rounds import Book, Ints, Verdict, Wait, Waiter
from kvstore_server.row_replies import changed_parts, pulled_parts
from kvstore_server.sessions import Session, Sessions, random_token
from kvstore_server.shard import Leases, Partial, Updater
from kvstore_server.table import ALL, Part, Table
from kvstore_server.tracing import ROUND_LANE, ROUNDS, Clock, handled

_log = logging.getLogger(__name__)

_SMALL, _LOOK_PER_ITEM = 1000, 5e-5
"""A namespace with more tables, waits and ranks than this is looked at every so many seconds for each of them."""
_TOLD = 64
"""How many of the ranks that are missing a worker is told."""

MAX_WORKERS = 1 << 16
MAX_ADDRESS = 512
"""Characters in which a worker may say where it runs."""
MAX_REASON = 2000
"""Characters that are kept of the reason why a worker leaves, or gives a round up."""


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
        self.updaters: dict[str, Updater] = {}
        """Namespace → a user's function in place of an optimizer; in-process use only."""
        self.is_stopping = False
        """Whether `stop` was called, so that new rounds are refused."""
        self._leases = leases
        self._sessions = Sessions(config.server, tokens)

    @property
    def memory_used(self) -> int:
        """Bytes that are promised to namespaces."""
        return self.budget.used

    def handle(self, peer: bytes, request: m.Request, now: float) -> list[m.Outgoing]:
        """Take one request of `peer` at time `now` (seconds, monotonic); return what to send, to whom."""
        waiter = Waiter(peer, request.number)
        try:
            return self._dispatch(waiter, request, now)
        except KVStoreError as error:
            return [_failed(waiter, error)]
        except Exception as error:
            _log.exception("request %s failed", type(request.body).__name__)
            fault = KVStoreError(f"server {self.config.server} failed with {type(error).__name__}: {error}")
            return [_failed(waiter, fault)]

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
        members = space.membership
        out = self._fail_if_hopeless(space, space.rounds.shared.waiting(), now)
        out += self._release(space)
        out += self._fail_hopeless_waits(space, now)
        error = members.why_barrier_cannot_end(now, self.config.dead_after)
        if error is not None:
            out += [_failed(waiter, error) for waiter in members.take_barrier()]
        slow = _report_slow_waits(space, now)
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
        self.is_stopping = True

    def abandon(self, now: float) -> list[m.Outgoing]:
        """Fail every wait, because the server ends now, and tell every member."""
        out: list[m.Outgoing] = []
        for space in self.namespaces.values():
            members, shared = space.membership, space.rounds.shared
            for number in shared.waiting().tolist():
                missing = shared.missing_ranks(number)
                error = self._ended(space.open_round(number), space, missing, now)
                out += self._fail(space, shared, space.tables[number], error)
            for wait in space.waits.take(lambda wait: True):
                what = f"a read of {space.tables[wait.table].name!r}"
                error = self._ended(what, space, wait.missing(space.rounds), now)
                out.append(_failed(wait.waiter, error, wait.table))
            what = f"barrier {members.barrier_sequence}"
            error = self._ended(what, space, members.absent_from_barrier(), now)
            out += [_failed(waiter, error) for waiter in members.take_barrier()]
        farewell = ServerStoppingError(f"server {self.config.server} was stopped")
        return out + [_failed(Waiter(session.peer, 0), farewell) for session in self._sessions]

    def _ended(self, what: str, space: Namespace, missing: list[int], now: float) -> ServerStoppingError:
        who = space.membership.describe_all(missing, now) or "nobody had decided yet what becomes of it"
        return ServerStoppingError(
            f"server {self.config.server} was stopped while {what} waited: {who}; "
            "restart the job from its last saved states"
        )

    def is_idle(self) -> bool:
        """Whether no rank waits for an answer."""
        return not any(space.is_waiting() for space in self.namespaces.values())

    def _dispatch(self, waiter: Waiter, request: m.Request, now: float) -> list[m.Outgoing]:
        body = request.body
        if isinstance(body, m.Hello):
            return _reply(waiter, self._hello(waiter.peer, body, now))
        session = self._session(waiter.peer, request)
        session.space.membership.members[session.rank].last_heard = now
        trace = session.space.recording.active
        if trace is None:
            return self._answer(session, request, waiter, now)
        return handled(trace, body, session.rank, lambda: self._answer(session, request, waiter, now))

    def _answer(self, session: Session, request: m.Request, waiter: Waiter, now: float) -> list[m.Outgoing]:
        body, space, rank = request.body, session.space, session.rank
        space.messages_in += not isinstance(body, m.Heartbeat)
        if isinstance(body, m.Contribute):
            return self._contribute(space, rank, body, waiter, now)
        if isinstance(body, m.Resolve):
            return self._resolve(space, rank, body, now)
        if isinstance(body, m.Abort):
            return self._abort(space, rank, body, waiter)
        if isinstance(body, m.Gather):
            return self._gather(space, rank, body, waiter, now)
        if isinstance(body, m.Leave):
            return self._leave(space, rank, body, session.token, now)
        if isinstance(body, m.Register):
            return self._register(space, rank, body, waiter)
        if isinstance(body, m.Pull):
            return self._pull(space, rank, body, waiter, now)
        if isinstance(body, m.PullRows):
            return self._pull_rows(space, rank, body, waiter, now)
        return _reply(waiter, self._control(session, request, now))

    def _control(self, session: Session, request: m.Request, now: float) -> m.ReplyBody:
        """Do what is answered at once. Raises KVStoreError if it cannot be done; nothing has changed then."""
        body, space = request.body, session.space
        if isinstance(body, m.Heartbeat):
            return m.Pending(())
        if isinstance(body, m.SetOptimizer):
            try:
                space.set_optimizer(session.rank, body.spec)
            except UnknownNameError as error:
                server = self.config.server
                raise UnknownNameError(f"server {server} cannot run the optimizer: {error}") from None
            return m.Info()
        if isinstance(body, m.GetState):
            table = space.table(body.table)
            return m.State(
                body.table, body.index, *pack_states(table.shard.get_state(table.unit, body.index))
            )
        if isinstance(body, m.State):
            table = space.table(body.table)
            table.shard.slot_of(table.unit, body.index)
            piece = table.plan.slices[body.index]
            table.shard.put_state(table.unit, body.index, unpack_states(piece, body.summary, body.data))
            return m.Info()
        if isinstance(body, m.Stats):
            return m.Info(space.stats(now, self.config))
        if isinstance(body, m.Profile):
            return m.Info(space.recording.answer(body, self._clock))
        if isinstance(body, m.Command):
            return self._commands.answer(session.token, request.number, body)
        raise ProtocolError(f"{type(body).__name__} is not a request")

    # ---------------------------------------------------------------- rounds

    def _contribute(
        self, space: Namespace, rank: int, body: m.Contribute, waiter: Waiter, now: float
    ) -> list[m.Outgoing]:
        """Take slices, and commits; each round that they complete, or that has no hope any more, ends."""
        tables, rounds = body.commits[:, 0], body.commits[:, 1]
        _check_named(self.config, "contribution", body.pushes[:, 0].tolist())
        _check_named(self.config, "commit", tables.tolist())
        space.check_tables(tables)
        if len(body.pushes):
            space.push(rank, body)
        if not len(tables):
            return []
        shared = space.rounds.is_shared(tables, rounds)
        out: list[m.Outgoing] = []
        if shared.any():
            commits = body.commits[shared]
            out += self._commit(space, space.rounds.shared, rank, commits, body, waiter, now)
        if not shared.all():
            lane = space.rounds.lane(rank, tables[~shared], rounds[~shared])
            out += self._commit(space, lane, rank, body.commits[~shared], body, waiter, now)
        return out

    def _commit(
        self,
        space: Namespace,
        book: Book,
        rank: int,
        commits: m.Matrix,
        body: m.Contribute,
        waiter: Waiter,
        now: float,
    ) -> list[m.Outgoing]:
        out = []
        errors = [self._why_refused(space, book, row, body.hyper) for row in commits[:, :2].tolist()]
        if any(errors):
            for (number, round_), error in zip(commits[:, :2].tolist(), errors, strict=True):
                if error is not None:
                    out.append(_failed(waiter, error, number, round_))
            commits = commits[[error is None for error in errors]]
        verdicts = book.commit(rank, commits, body, waiter, now)
        accepted = commits[:, 0][verdicts == Verdict.ACCEPTED]
        if len(accepted) < len(commits):
            out += self._answer_others(space, book, rank, commits, verdicts, body, waiter, now)
        for number in accepted.tolist() if body.absent or body.hyper else ():
            left_out = frozenset(key for table, key in body.absent if table == number)
            if left_out:
                space.absent[number, rank] = left_out
            if body.hyper:
                space.tables[number].hyper.set(rank, body.hyper)
        complete = book.complete(accepted)
        if complete.any():
            out += self._finish(space, book, accepted[complete], now)
        if book is space.rounds.shared and not complete.all():
            out += self._fail_if_hopeless(space, accepted[~complete], now)
        return out

    def _why_refused(self, space: Namespace, book: Book, row: list[int], hyper: bytes) -> KVStoreError | None:
        """Why a commit is not even looked at; None where it is."""
        number, round_ = row
        table = space.tables[number]
        if table.conflict is not None:
            # A new one each time: a raised error collects tracebacks.
            return from_wire(*to_wire(table.conflict))
        if self.is_stopping and round_ == book.number(number) and not book.is_waiting(number):
            return ServerStoppingError(f"server {self.config.server} is stopping and takes no new round")
        if hyper:
            try:
                table.hyper.check(hyper)
            except KVStoreError as error:
                return error
        return None

    def _answer_others(
        self,
        space: Namespace,
        book: Book,
        rank: int,
        commits: m.Matrix,
        verdicts: Ints,
        body: m.Contribute,
        waiter: Waiter,
        now: float,
    ) -> list[m.Outgoing]:
        """Answer the commits that were not accepted now: repeated ones, and those that cannot count."""
        out: list[m.Outgoing] = []
        waiting: list[int] = []
        for row, verdict in zip(commits.tolist(), verdicts.tolist(), strict=True):
            table, round_ = space.tables[row[0]], row[1]
            if verdict == Verdict.REPEATED and table.held is not None and body.hold:
                out += _held(table, round_, waiter, table.held.sum.partials)
            elif verdict == Verdict.REPEATED:
                waiting.append(table.number)
            elif verdict == Verdict.REFUSED:
                lacking = book.missing_slots(rank, table.number, row[2])
                out += _reply(waiter, m.Missing(table.number, round_, lacking))
            elif verdict == Verdict.FAILED:
                why, following = book.why_failed(table.number, round_), book.number(table.number)
                out.append(_failed(waiter, why, table.number, round_, following))
            elif verdict == Verdict.AHEAD:
                what = f"rank {rank} committed round {round_} while round {book.number(table.number)} is open"
                out.append(_failed(waiter, ProtocolError(what), table.number, round_))
        if waiting:
            missing = book.missing_ranks(waiting[0])
            out += _still_waiting(space, waiter, space.open_round(waiting[0]), missing, now)
            out += self._fail_if_hopeless(space, np.array(waiting), now)
        again = commits[verdicts == Verdict.APPLIED]
        whose = ALL if book is space.rounds.shared else rank
        for number, round_ in again[:, :2].tolist() if body.hold else ():
            end = space.tables[number].ends[whose]
            if not end.vetoes:  # what was told before it was applied may have been lost as well
                out += _held(space.tables[number], round_, waiter, end.partials)
        return out + self._tell(space, whose, rank, waiter, again, body.timeout, now)

    def _finish(
        self, space: Namespace, book: Book, tables: Ints, now: float, decision: Decision | None = None
    ) -> list[m.Outgoing]:
        """All that some rounds need have committed: apply them and answer, or fail them for all members.

        Those that want a decision are held until there is one.
        """
        out: list[m.Outgoing] = []
        applied: list[int] = []
        if decision is None and book is space.rounds.shared:
            applied, others = self._change(space, book, tables, out)
        else:
            others = tables
        for number in others.tolist():
            table = space.tables[number]
            try:
                if self._apply(space, book, table, decision):
                    applied.append(number)
                else:
                    out += _tell_held(space, table)
            except KVStoreError as error:
                out += self._fail(space, book, table, error)
            except Exception as error:
                _log.exception("round %d of table %r failed", book.number(number), table.name)
                fault = KVStoreError(
                    f"server {self.config.server} failed with {type(error).__name__}: {error}"
                )
                out += self._fail(space, book, table, fault)
        ended = np.array(applied, np.int64)
        numbers = book.tables["number"][ended]
        said = [(rank, list(given.waiters(ended)), given.tables[ended]) for rank, given in book.members()]
        space.forget_absent(applied)
        book.finish(ended)
        is_shared = book is space.rounds.shared
        for rank, waiters, rows in said:
            for number, flags in zip(applied, rows["flags"].tolist(), strict=True) if not is_shared else ():
                space.rounds.advance(rank, number)
                space.waits.contributed(number, rank, now)
                if flags & m.HAS_JOINED:
                    space.rounds.joined(number).add(rank)
            for waiter, at in waiters:
                mine = rows[at]
                commits = np.stack((ended[at], numbers[at], at, at, mine["version"], mine["flags"]), axis=1)
                timeout, whose = float(mine["timeout"][0]), ALL if is_shared else rank
                out += self._tell(space, whose, rank, waiter, commits, timeout, now)
        return out + self._release(space)

    def _change(
        self, space: Namespace, book: Book, tables: Ints, out: list[m.Outgoing]
    ) -> tuple[list[int], Ints]:
        """Sum and update all tables together that are alike; returns those, and the others.

        Args:
            out: Takes what is told of rounds that fail.
        """
        try:
            optimizer = space.optimizer.agreed()
        except KVStoreError:
            return [], tables
        alike = space.alike(book, tables, optimizer)
        if not alike.any() or space.name in self.updaters:
            return [], tables
        ranks = [rank for rank, _ in book.members()]
        changed: dict[int, tuple[bytes, Sequence[Mapping[str, Any]]]] = {}
        for number in np.sort(tables[alike]).tolist():
            try:
                changed[number] = space.tables[number].agreed(ranks, optimizer)
            except KVStoreError as error:
                out += self._fail(space, book, space.tables[number], error)
        if not changed:
            return [], tables[~alike]
        together = [space.tables[number] for number in changed]
        scale = 1.0 if optimizer is None else optimizer.rescale_grad
        given = space.contributions(book, np.array(list(changed)), scale)
        try:
            if optimizer is None:
                together[0].shard.assign_sum(given)
            else:
                units = [table.unit for table in together]
                together[0].shard.update(given, optimizer, [hypers for _, hypers in changed.values()], units)
        except Exception as error:
            _log.exception("the update of %d tables failed", len(together))
            for table in together:
                out += self._fail(space, book, table, table.break_off(error))
            return [], tables[~alike]
        for number, (hyper, _) in changed.items():
            space.tables[number].changed(hyper)
        return list(changed), tables[~alike]

    def _apply(self, space: Namespace, book: Book, table: Table, decision: Decision | None) -> bool:
        """Apply the open round of a table; returns False where it is held instead."""
        trace = space.recording.active
        start = 0.0 if trace is None else trace.clock()
        round_, is_shared = book.number(table.number), book is space.rounds.shared
        parts: dict[int, Part] = {}
        if decision is not None:
            table.apply_held(decision)
        else:
            found = [(rank, space.given(rank, book, table.number)) for rank, _ in book.members()]
            parts = {rank: part for rank, part in found if part is not None}
            optimizer = space.optimizer.agreed(table.mode.is_sync)
            updater = self.updaters.get(space.name)
            if table.hold(parts, optimizer, updater):
                return False
            without = space.rounds.joined(table.number) | space.rounds.left
            whose = ALL if is_shared else found[0][0]
            table.apply(whose, round_, parts, optimizer, updater, without)
        if trace is not None:
            sizes = [payload_size(payload) for part in parts.values() for payload in part.slices.values()]
            described = {"round": round_, "ranks": book.num_members, "bytes": sum(sizes)}
            trace.add(table.name, ROUNDS, start, ROUND_LANE, described)
        return True

    def _tell(
        self,
        space: Namespace,
        whose: int,
        rank: int,
        waiter: Waiter,
        commits: m.Matrix,
        timeout: float,
        now: float,
    ) -> list[m.Outgoing]:
        """Answer commits of rounds that were applied, at once or, without synchronous rounds, when it may read."""
        if space.mode.is_sync:
            return _outcomes(space, whose, rank, waiter, commits)
        out: list[m.Outgoing] = []
        at_once = np.ones(len(commits), np.bool_)
        for at, (number, round_, _, _, _, flags) in enumerate(commits.tolist()):
            is_join = bool(flags & m.HAS_JOINED) and rank in space.rounds.joined(number)
            wants = flags & m.WANTS_WEIGHTS and not space.tables[number].ends[whose].is_skipped
            if is_join or (wants and space.rounds.behind(rank, number)):
                at_once[at] = False
                answer = partial(_outcomes, space, whose, rank, waiter, commits[at : at + 1])
                wait = Wait(number, rank, waiter, now + timeout, timeout, is_join, answer, round_)
                out += _park(space, wait, now)
        return out + _outcomes(space, whose, rank, waiter, commits[at_once])

    def _fail_if_hopeless(self, space: Namespace, tables: Ints, now: float) -> list[m.Outgoing]:
        """Fail the open rounds of all ranks whose deadline has passed, or that need a rank that is lost."""
        members, shared = space.membership, space.rounds.shared
        here = shared.tables[tables]
        late = (here["committed"] > 0) & (now >= here["deadline"])
        if members.departed or members.silent(now, self.config.dead_after):  # as a rule nobody is lost
            late = here["committed"] > 0
        out = []
        for number in tables[late].tolist():
            error = self._why_stuck(space, space.tables[number], now)
            if error is not None:
                out += self._fail(space, shared, space.tables[number], error)
        return out

    def _why_stuck(self, space: Namespace, table: Table, now: float) -> KVStoreError | None:
        """The error with which the open round of all ranks ends for those who wait; None while it may go well."""
        shared, what = space.rounds.shared, space.open_round(table.number)
        missing = shared.missing_ranks(table.number)
        lost = space.membership.lost_error(missing, what, now, self.config.dead_after)
        if lost is not None or now < shared.tables["deadline"][table.number]:
            return lost
        if table.held is not None:
            return DeadlineError(
                f"{what} reached its deadline while it was held: every rank has given its gradient, but none has "
                "decided what becomes of the sum; look at what stopped them"
            )
        return _too_late(space, what, missing, now)

    def _fail(self, space: Namespace, book: Book, table: Table, error: KVStoreError) -> list[m.Outgoing]:
        """Fail the open round of a table for its members, and tell those who wait for it."""
        number = book.number(table.number)
        space.forget_absent([table.number])
        if book is space.rounds.shared:
            table.fail(ALL)
        else:
            [rank] = book.given
            table.fail(rank)
            space.rounds.advance(rank, table.number)
        waiters = book.fail(table.number, error)
        return [_failed(waiter, error, table.number, number, number + 1) for waiter in waiters]

    def _abort(self, space: Namespace, rank: int, abort: m.Abort, waiter: Waiter) -> list[m.Outgoing]:
        """A rank gives a round up; tells those who wait for it, and the rank whether it stands all the same."""
        table = space.table(abort.table)
        error = RoundAbortedError(
            f"rank {rank} aborted round {abort.round} of {table.name!r}: {abort.reason[:MAX_REASON]}"
        )
        book = space.rounds.book(rank, table.number, abort.round)
        book.of(rank)
        whose = ALL if book is space.rounds.shared else rank
        number, stands = book.number(table.number), book.was_applied(table.number, abort.round)
        out = []
        if abort.round == number:
            out += self._fail(space, book, table, error)
        elif abort.undo and abort.round == number - 1 and stands and table.undo(whose):
            book.undo(table.number, error)
        for wait in space.waits.take(
            lambda wait: (wait.table, wait.rank, wait.round) == (table.number, rank, abort.round)
        ):
            out += _fail_wait(space, wait, error)
        return out + _reply(waiter, m.Info({"applied": book.was_applied(table.number, abort.round)}))

    def _resolve(self, space: Namespace, rank: int, resolve: m.Resolve, now: float) -> list[m.Outgoing]:
        """Apply a round that is held as a rank says; a round that is over stays as it is.

        Raises:
            ProtocolError: the round is not held.
        """
        table, shared = space.table(resolve.table), space.rounds.shared
        number = shared.number(table.number)
        decision = Decision(resolve.coef, resolve.clip_value, resolve.skip)
        if resolve.round < number:
            is_last = resolve.round == number - 1 and shared.was_applied(table.number, resolve.round)
            if is_last and not table.note_decision(decision):
                _log.warning("rank %d decided otherwise about round %d of %r than the rank before it: %s", rank,
                             resolve.round, table.name, decision)  # fmt: skip
            return []
        if resolve.round > number or table.held is None:
            raise ProtocolError(
                f"rank {rank} decides about round {resolve.round} of {table.name!r}, which is not held: round "
                f"{number} is open"
            )
        return self._finish(space, shared, np.array([table.number]), now, decision)

    # ---------------------------------------------------------------- reads

    def _pull(
        self, space: Namespace, rank: int, pull: m.Pull, waiter: Waiter, now: float
    ) -> list[m.Outgoing]:
        """Answer with the weights of each table, as soon as the rank may read it."""
        _check_named(self.config, "pull", pull.tables)
        space.check_tables(np.array(pull.tables, np.int64))
        for number in pull.tables:
            _check_ready(space.tables[number])
        behind = [number for number in pull.tables if space.rounds.behind(rank, number)]
        out = _weights(space, rank, waiter, [number for number in pull.tables if number not in behind])
        for number in behind:
            answer = partial(_weights, space, rank, waiter, [number])
            wait = Wait(number, rank, waiter, now + pull.timeout, pull.timeout, False, answer)
            out += _park(space, wait, now)
        return out

    def _pull_rows(
        self, space: Namespace, rank: int, pull: m.PullRows, waiter: Waiter, now: float
    ) -> list[m.Outgoing]:
        _check_named(self.config, "pull", [(index, position) for index, position, _ in pull.wanted])
        table = space.table(pull.table)
        _check_ready(table)
        answer = partial(_rows, space, table, rank, pull, waiter)
        if not space.rounds.behind(rank, table.number):
            return answer()
        wait = Wait(table.number, rank, waiter, now + pull.timeout, pull.timeout, False, answer)
        return _park(space, wait, now)

    def _release(self, space: Namespace) -> list[m.Outgoing]:
        """Answer the requests that have waited for other ranks long enough."""
        if not len(space.waits):
            return []
        ready = space.waits.take_ready()
        for number in dict.fromkeys(wait.table for wait in ready if wait.is_join):
            space.rounds.part_again(number)
        return [out for wait in ready for out in wait.answer()]

    def _fail_hopeless_waits(self, space: Namespace, now: float) -> list[m.Outgoing]:
        """Fail the requests that have waited for other ranks too long, or wait for one that is lost."""
        errors = {id(wait): self._why_wait_stuck(space, wait, now) for wait in space.waits}
        out = []
        for wait in space.waits.take(lambda wait: errors[id(wait)] is not None):
            error = errors[id(wait)]
            assert error is not None
            out += _fail_wait(space, wait, error)
        return out

    def _why_wait_stuck(self, space: Namespace, wait: Wait, now: float) -> KVStoreError | None:
        """The error with which a read, or the end of a join, fails; None while it may go well."""
        conflict = space.tables[wait.table].conflict
        if conflict is not None:
            return from_wire(*to_wire(conflict))
        what, missing = space.describe_wait(wait), wait.missing(space.rounds)
        lost = space.membership.lost_error(missing, what, now, self.config.dead_after)
        if lost is not None or now < wait.deadline:
            return lost
        return _too_late(space, what, missing, now)

    # ---------------------------------------------------------------- members and tables

    def _register(
        self, space: Namespace, rank: int, register: m.Register, waiter: Waiter
    ) -> list[m.Outgoing]:
        shared = space.rounds.shared
        try:
            _check_number(self.config, "declaration", len(register.specs))
            table = space.register(rank, register, self.config, self._leases)
        except PlanMismatchError as error:
            told = [_failed(waiter, error)]
            for table in space.tables:
                if table.conflict is error and shared.is_waiting(table.number):
                    told += self._fail(space, shared, table, error)
            return told
        if isinstance(table, int):
            return _reply(waiter, m.Info({"keys": table}))
        slot = int(space.rounds.slots.first[table.number])
        return _reply(waiter, m.Registered(table.number, slot, space.rounds.next_round(rank, table.number)))

    def _gather(
        self, space: Namespace, rank: int, gather: m.Gather, waiter: Waiter, now: float
    ) -> list[m.Outgoing]:
        members = space.membership
        released = members.enter_barrier(rank, gather, waiter, now, self.config.dead_after)
        if not released:
            what = f"barrier {gather.sequence}"
            return _still_waiting(space, waiter, what, members.absent_from_barrier(), now)
        return [out for one, parts in released for out in _reply(one, m.Gathered(parts))]

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
            _check_hello(self.config, hello)
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
        space.begin_process(hello.rank)
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

    def _leave(
        self, space: Namespace, rank: int, leave: m.Leave, session: int, now: float
    ) -> list[m.Outgoing]:
        self._shut_out(session, "it has left")
        space.membership.leave(rank, leave.reason[:MAX_REASON], leave.is_clean)
        space.end_process(rank, leave.is_clean)
        if space.membership.is_over():
            self._end(space)
            return []
        return self._fail_hopeless(space, now)


def _outcomes(space: Namespace, whose: int, rank: int, waiter: Waiter, commits: m.Matrix) -> list[m.Outgoing]:
    """How rounds ended that did not fail: first what was special about each, then the weights.

    They are those of all slices, or what has changed since those that the worker holds.
    """
    out: list[m.Outgoing] = []
    done: list[tuple[int, int, int]] = []
    wanted: list[int] = []
    changed: list[m.Weights] = []
    for number, round_, _, _, version, flags in commits.tolist():
        table = space.tables[number]
        end = table.ends[whose]
        if flags & m.HAS_JOINED:
            out += _reply(waiter, m.InForce(number, round_, end.hyper, end.is_over))
        if end.left_out:
            out += _reply(waiter, m.Absent(number, round_, end.left_out))
        if end.is_skipped:
            out += _reply(waiter, m.Vetoed(number, round_, end.vetoes))
        wants = flags & m.WANTS_WEIGHTS and not end.is_skipped
        if not wants or not space.mode.is_sync:  # by the time that weights may be read they can be newer
            done.append((number, round_, end.version))
        if wants and flags & m.WANTS_DELTA:
            table.note_read(rank)
            changed.append(space.rows(table, changed_parts(table.shard, table.unit, table.version, version)))
        elif wants:
            wanted.append(number)
    if done:
        out += _reply(waiter, m.Done(m.matrix(done, 3)))
    for weights in changed:
        out += _reply(waiter, weights)
    return out + _weights(space, rank, waiter, wanted)


def _weights(space: Namespace, rank: int, waiter: Waiter, tables: Sequence[int]) -> list[m.Outgoing]:
    """The weights of some tables, for a rank."""
    for number in tables:
        space.tables[number].note_read(rank)
    return _reply(waiter, space.weights(tables)) if tables else []


def _rows(space: Namespace, table: Table, rank: int, pull: m.PullRows, waiter: Waiter) -> list[m.Outgoing]:
    try:
        found = pulled_parts(table.shard, table.unit, pull)
    except ProtocolError as error:
        return [_failed(waiter, error)]
    table.note_read(rank)
    return _reply(waiter, space.rows(table, found))


def _tell_held(space: Namespace, table: Table) -> list[m.Outgoing]:
    """Tell the ranks that wait for a decision, and have data, what there is to decide about."""
    assert table.held is not None
    shared = space.rounds.shared
    out = []
    for _, given in shared.members():
        waiter = given.waiter(table.number)
        if waiter is not None and given.tables["hold"][table.number]:
            out += _held(table, shared.number(table.number), waiter, table.held.sum.partials)
    return out


def _held(table: Table, round_: int, waiter: Waiter, partials: Sequence[Partial]) -> list[m.Outgoing]:
    """What there is to decide about in a round."""
    told = tuple([(one.slice, one.value) for one in partials])
    return _reply(waiter, m.Held(table.number, round_, told, all(one.is_finite for one in partials)))


def _park(space: Namespace, wait: Wait, now: float) -> list[m.Outgoing]:
    """Answer a request later, when other ranks have come far enough."""
    space.waits.add(wait)
    return _still_waiting(space, wait.waiter, space.describe_wait(wait), wait.missing(space.rounds), now)


def _fail_wait(space: Namespace, wait: Wait, error: KVStoreError) -> list[m.Outgoing]:
    # Without the number of a next round: what a rank has contributed before it reads stands all the same.
    following = -1
    if wait.is_join:
        # It will not see that all have joined: it takes part as before, and its joining has failed.
        space.rounds.fail_join(wait.rank, wait.table, wait.round, error)
        following = wait.round + 1
    return [_failed(wait.waiter, error, wait.table, wait.round, following)]


def _still_waiting(
    space: Namespace, waiter: Waiter, what: str, missing: Iterable[int], now: float
) -> list[m.Outgoing]:
    """Tell a rank for whom it still waits, and when they were last heard."""
    ranks = tuple(missing)
    who = space.membership.describe_all(ranks, now) or "nobody has decided about its sum yet"
    return _reply(waiter, m.Pending(ranks[:_TOLD], f"{what} waits: {who}"))


def _too_late(space: Namespace, what: str, missing: Iterable[int], now: float) -> DeadlineError:
    who = space.membership.describe_all(missing, now)
    return DeadlineError(
        f"{what} reached its deadline while waiting for {who}; is it stuck, or only slow? (timeout=… of the kvstore or "
        "KVSTORE_TIMEOUT raises the limit.) Workers with different numbers of batches train in `with trainer.join():`"
    )


def _report_slow_waits(space: Namespace, now: float) -> str | None:
    """Describe the longest wait of a namespace, if it is long enough that a line about it is due."""
    since = min((since for since, _, _ in _waits(space)), default=now)
    if not space.slow_reports.is_due(now - since, now):
        return None
    waits = sorted(_waits(space), key=lambda wait: wait[0])
    _, what, missing = waits[0]
    more = f", and {len(waits) - 1} more waits," if len(waits) > 1 else ""
    who = space.membership.describe_all(missing, now) or "nobody has decided about its sum yet"
    return f"namespace {space.name!r}: {what}{more} has waited {now - since:.0f} s: {who}"


def _waits(space: Namespace) -> Iterator[tuple[float, str, list[int]]]:
    """List what ranks wait for: since when, what it is, and the ranks that are missing."""
    shared, members = space.rounds.shared, space.membership
    for number in shared.waiting().tolist():
        yield float(shared.tables["since"][number]), space.open_round(number), shared.missing_ranks(number)
    for wait in space.waits:
        yield wait.since, space.describe_wait(wait), wait.missing(space.rounds)
    if members.barrier:
        since = min(wait.since for wait in members.barrier.values())
        yield since, f"barrier {members.barrier_sequence}", members.absent_from_barrier()


def _check_ready(table: Table) -> None:
    """Raise KVStoreError unless a table can be read."""
    if table.conflict is not None:
        raise from_wire(*to_wire(table.conflict))
    if not table.is_initialised:
        raise KeyNotFoundError(
            f"table {table.name!r} has not been initialised yet; call init on every worker first"
        )


def _reply(waiter: Waiter, body: m.ReplyBody) -> list[m.Outgoing]:
    return [m.Outgoing(waiter.peer, m.Reply(waiter.number, body))]


def _failed(
    waiter: Waiter, error: KVStoreError, table: int = -1, round_: int = -1, next_round: int = -1
) -> m.Outgoing:
    """A request, or with a table one round of it, has failed."""
    code, text = to_wire(error)
    return m.Outgoing(waiter.peer, m.Reply(waiter.number, m.Failed(code, text, table, round_, next_round)))


def _check_hello(config: EngineConfig, hello: m.Hello) -> None:
    """Raise ConfigurationError unless this server may take that worker."""
    if (hello.server, hello.num_servers) != (config.server, config.num_servers):
        raise ConfigurationError(
            f"this is server {config.server} of {config.num_servers}, but rank {hello.rank} has it as server "
            f"{hello.server} of {hello.num_servers}; start every server with its --index and --num-servers, and give "
            "every worker the same KVSTORE_SERVERS, in index order"
        )
    check_name("a namespace", hello.namespace)
    if max(len(hello.address), len(hello.capability)) > MAX_ADDRESS:
        raise ConfigurationError(
            f"rank {hello.rank} says where it runs in {len(hello.address)} characters, and on what in "
            f"{len(hello.capability)}; {MAX_ADDRESS} are allowed"
        )
    if not 1 <= hello.num_workers <= MAX_WORKERS:
        raise ConfigurationError(f"num_workers must be 1 … {MAX_WORKERS}, got {hello.num_workers}")
    if hello.capability != config.capability and not config.allow_mixed_cpu:
        raise ConfigurationError(
            f"rank {hello.rank} runs on {hello.capability}, server {config.server} on {config.capability}; results "
            "would differ in their last bits. Start the servers with --allow-mixed-cpu to accept that"
        )


def _check_number(config: EngineConfig, message: str, count: int) -> None:
    """Raise ProtocolError where a message names more keys, slices or tables than one may."""
    if count > config.max_message_keys:
        raise ProtocolError(
            f"a {message} names {count} keys, slices or tables, server {config.server} accepts up to "
            f"{config.max_message_keys} in one message (--max-message-keys)"
        )


def _check_named(config: EngineConfig, message: str, named: Collection[Hashable]) -> None:
    """Raise ProtocolError where a message names too much, or the same twice, which would be answered twice."""
    _check_number(config, message, len(named))
    if len(set(named)) < len(named):
        raise ProtocolError(f"a {message} names one of its {len(named)} tables or slices twice")
