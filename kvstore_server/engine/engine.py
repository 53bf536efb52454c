"""The store without its sockets: a message and the time go in, replies come out.

The engine owns namespaces, their members and their tables. It never waits: a request that cannot be answered yet
is answered later, out of the handling of another message or out of `tick`. Errors of one request never harm
another: whatever a request raises goes back as `Failed`, and the engine goes on.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np

from kvstore_server.budget import Budget
from kvstore_server.commands import CommandContext, Commands
from kvstore_server.debug_log import Peer
from kvstore_server.engine import pipelined
from kvstore_server.engine.facts import FRESH, MOST_JOBS, read_report
from kvstore_server.engine.membership import Sessions, random_token
from kvstore_server.engine.namespace import EngineConfig, Namespace, TableBatch
from kvstore_server.engine.rounds import CommitStatus, DelayedRequest, Given, Ints, Mode, RoundTracker, Waiter
from kvstore_server.engine.table import ALL, RankCommit, Table
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
from kvstore_server.optimizer.state import pack_states, unpack_states
from kvstore_server.plan import check_name
from kvstore_server.processes import LAST_WORDS, Processes, ProcessState
from kvstore_server.protocol import messages as m
from kvstore_server.shard.norms import Decision
from kvstore_server.shard.shard import Leases, Partial, Updater
from kvstore_server.tracing import ROUND_LANE, ROUNDS, Clock, handled

_log = logging.getLogger(__name__)

_SMALL, _LOOK_PER_ITEM = 1000, 5e-5
"""A namespace with more tables, waits and ranks than this is looked at every so many seconds for each of them."""
_MAPS = m.WANTS_WEIGHTS | m.MAPS_WEIGHTS
_WHOLE = (0, m.WANTS_WEIGHTS, _MAPS, _MAPS | m.KNOWS_PLACES)
"""Flags of commits of which all tables are answered alike: that they are over, by their weights, by where these are."""
_IDLE = 0.25
"""After this part of the silence that makes a worker count as lost, a namespace without weights may have to go."""
_TOLD = 64
"""How many of the ranks that are missing a worker is told."""

MAX_WORKERS = 1 << 16
MAX_ADDRESS = 512
"""Characters in which a worker may say where it runs."""
MAX_REASON = 2000
"""Characters that are kept of the reason why a worker leaves, or gives a round up."""


class Sender(NamedTuple):
    """Who sends a request, and when."""

    space: Namespace
    rank: int
    waiter: Waiter
    session: int
    now: float


class Committed(NamedTuple):
    """A rank's commit of a round that is over."""

    table: int
    round: int
    version: int
    flags: int


class Answer(NamedTuple):
    """What a request of a rank hears of rounds that have ended."""

    rank: int
    waiter: Waiter
    wanted: int | None
    """The same of all: the flags of a worker that wants or maps their weights, or neither. None: see `commits`."""
    commits: list[Committed]
    timeout: float


class RankWait(NamedTuple):
    """Something that ranks wait for."""

    what: str
    since: float
    deadline: float
    missing: list[int]
    """The ranks that have yet to come."""
    fail: Callable[[KVStoreError], list[m.Outgoing]]
    table: Table | None = None


class Engine:
    """All state of one server. Not thread-safe: one caller at a time.

    Attributes:
        updaters: Namespace → a user's function in place of an optimizer; in-process use only.
        is_stopping: Whether `stop` was called, so that new rounds are refused.
        is_inconsistent: Whether a request was interrupted in its middle, as by Ctrl-C where the engine runs in a
            script's own process. What it has changed is unknown, so nothing is answered any more.
        num_ended: The namespaces that have ended so far, and given their memory back.
    """

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
        self.is_stopping = self.is_inconsistent = False
        self.num_ended = 0
        self._facts: tuple[float, Mapping[str, Any]] = (-math.inf, {})
        """What was told last about this server, and when."""
        self._leases = leases
        self._sessions = Sessions(config.server, tokens)
        self._handlers: dict[type[Any], Callable[[Sender, Any], list[m.Outgoing]]] = {
            m.Contribute: self._contribute,
            m.Resolve: self._resolve,
            m.Abort: self._abort,
            m.Pull: self._read,
            m.PullRows: self._read,
            m.ShowRows: self._show_rows,
            m.Heartbeat: self._heartbeat,
            m.Gather: self._gather,
            m.Register: self._register,
            m.SetOptimizer: self._set_optimizer,
            m.GetState: self._get_state,
            m.SliceState: self._put_state,
            m.Stats: lambda sender, _: _info(sender, sender.space.stats(sender.now)),
            m.Profile: lambda sender, body: _info(sender, sender.space.recording.answer(body, clock)),
            m.Command: lambda sender, body: _reply(
                sender.waiter, self._commands.answer(sender.session, sender.waiter.number, body)
            ),
            m.Leave: self._leave,
        }

    def is_session(self, peer: bytes, token: int) -> bool:
        """Tell whether the socket `peer` belongs to the open session of that token."""
        try:
            return self._sessions.find(peer, token).token == token
        except KVStoreError:
            return False

    def name_of(self, peer: bytes) -> Peer:
        """Return who sends from the socket `peer`, for the debug log; a process without a session has no name."""
        session = self._sessions.of_socket(peer)
        return Peer() if session is None else Peer(f"worker:{session.hello.rank}", session.hello.namespace)

    def handle(self, peer: bytes, request: m.Request, now: float) -> list[m.Outgoing]:
        """Take one request of `peer` at time `now` (seconds, monotonic); return what to send, to whom."""
        waiter, body = Waiter(peer, request.number), request.body
        try:
            if self.is_inconsistent:
                raise KVStoreError(
                    f"server {self.config.server} was interrupted in the middle of a request, so what it holds may be "
                    "changed in part; restart the job from its last saved states"
                )
            answer = self._handlers.get(type(body))
            if answer is None and isinstance(body, m.Hello):
                return _reply(waiter, self._hello(peer, body, now))
            if answer is None and isinstance(body, m.GetStatus):
                return _reply(waiter, m.Status(self._facts_at(now)))
            if request.run != self.config.run:
                raise ServerLostState(
                    f"server {self.config.server} was restarted and no longer holds this job's weights; "
                    "restart the job from its last saved states"
                )
            session = self._sessions.find(peer, request.session)
            space, rank = self.namespaces[session.hello.namespace], session.hello.rank
            session.last_heard = now
            if answer is None:
                raise ProtocolError(f"{type(body).__name__} is not a request")
            space.messages_in += not isinstance(body, m.Heartbeat)
            sender = Sender(space, rank, waiter, session.token, now)
            if space.recording.active is None:
                return answer(sender, body)
            return handled(space.recording.active, body, rank, partial(answer, sender, body))
        except KVStoreError as error:
            return [_failed(waiter, error)]
        except Exception as error:
            _log.exception("request %s failed", type(body).__name__)
            return [_failed(waiter, self._fault(error))]
        except BaseException:
            self.is_inconsistent = True
            raise

    def _fault(self, error: Exception) -> KVStoreError:
        return KVStoreError(f"server {self.config.server} failed with {type(error).__name__}: {error}")

    def tick(self, now: float) -> list[m.Outgoing]:
        """Fail the waits whose deadline has passed, or that need a rank which is lost; log those that take long.

        Namespaces whose workers are all gone are freed.
        """
        out: list[m.Outgoing] = []
        for space in list(self.namespaces.values()):
            if now < space.next_look:
                continue
            # What is large is looked at more rarely, so that it takes no more of the time.
            size = len(space.tables) + len(space.waits.all) + space.membership.num_workers
            space.next_look = now + _LOOK_PER_ITEM * size if size > _SMALL else now
            if space.is_waiting():
                out += self._fail_hopeless(space, now)
            silence = now - space.membership.last_sign(now)
            if silence > min(self.config.forget_after, self.config.dead_after):
                self._forget_if_silent(space, silence)
        return out

    def _fail_hopeless(self, space: Namespace, now: float) -> list[m.Outgoing]:
        """Fail what waits for lost ranks, or has waited too long. Answer what need not wait any more."""
        members, shared = space.membership, space.rounds.shared
        late = shared.late(now)  # as a rule nobody is lost
        if members.departed or members.lost(now, self.config.dead_after):
            late = np.flatnonzero(shared.num_committed).tolist()
        out: list[m.Outgoing] = []
        for pending in [self._open_round(space, number) for number in late]:
            error = self._why_stuck(space, pending, now)
            out += pending.fail(error) if error is not None else ()
        out += self._release(space)
        # All errors first: whose join fails takes part again, and then the others seem to wait for it.
        errors = [(pending, self._why_stuck(space, pending, now)) for pending in self._pending(space, ())]
        for pending, error in errors:
            if error is not None:
                out += pending.fail(error)
        # Of rounds only the one that has waited longest: there may be one of each of thousands of tables.
        oldest = shared.oldest()
        waits = sorted(self._pending(space, oldest), key=lambda one: one.since)
        if waits and space.slow_reports.is_due(now - waits[0].since, now):
            others = len(waits) - len(oldest) + int(np.count_nonzero(shared.num_committed)) - 1
            more = f", and {others} more waits," if others else ""
            who = _who(space, waits[0].missing, now)
            _log.warning(
                "namespace %r: %s%s has waited %.0f s: %s",
                space.name,
                waits[0].what,
                more,
                now - waits[0].since,
                who,
            )
        return out

    def look_at(self, processes: Processes, now: float) -> None:
        """Take note of what workers' processes do, where they are of this host.

        One that has ended is dead soon, whatever it has left undone; one that runs is alive, whatever keeps it from
        saying so, and is waited for as long as for one that is slow.
        """
        for (peer, token), how in processes.ended().items():
            if self.is_session(peer, token):
                session = self._sessions.find(peer, token)
                session.how_ended = session.how_ended or how
                hello = session.hello
                if session.state is not ProcessState.ENDED:
                    session.state, session.seen_at = ProcessState.ENDED, now
                    space = self.namespaces[hello.namespace]  # a large one is looked at rarely
                    space.next_look = min(space.next_look, now + LAST_WORDS)
                elif session.is_dead(now) and not session.is_logged:
                    session.is_logged = True
                    what = session.how_ended or "has ended"
                    who = hello.namespace, hello.rank, hello.address, what
                    _log.warning("namespace %r: the process of rank %d (%s) %s", *who)
        patience = self.config.dead_after / 2
        for session in self._sessions:
            if session.state is ProcessState.ENDED:
                continue
            if now - session.last_heard <= patience:
                session.state = ProcessState.UNKNOWN  # nobody needs to look
            elif now - session.last_sign > patience:
                session.state = processes.state((session.peer, session.token))
                if session.state is ProcessState.RUNS:
                    session.seen_at = now

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
            for pending in list(self._pending(space)):
                who = space.membership.describe_all(pending.missing, now)
                out += pending.fail(
                    ServerStoppingError(
                        f"server {self.config.server} was stopped while {pending.what} waited: "
                        f"{who or 'nobody had decided yet what becomes of it'}; "
                        "restart the job from its last saved states"
                    )
                )
        notice = ServerStoppingError(f"server {self.config.server} was stopped")
        return out + [_failed(Waiter(session.peer, 0), notice) for session in self._sessions]

    def is_idle(self) -> bool:
        """Tell whether no rank waits for an answer."""
        return not any(space.is_waiting() for space in self.namespaces.values())

    # ---------------------------------------------------------------- rounds

    def _contribute(self, sender: Sender, body: m.Contribute) -> list[m.Outgoing]:
        """Take slices, and commits; each round that they complete ends."""
        space, commits = sender.space, body.commits
        has_pushes = len(body.pushes) > 0
        some = space.batch_of(commits[:, 0]) if len(commits) else None
        if some is not None and commits[0, 5] & m.ANNOUNCES:
            if self.is_stopping or space.name in self.updaters:
                return []
            return pipelined.announce(space, sender.rank, body, sender.waiter)
        if has_pushes:
            space.push(sender.rank, body)
        out: list[m.Outgoing] = []
        if space.rounds.begun and has_pushes:
            out += pipelined.advance(space, [m.place_of(word)[0] for word in body.pushes[:, 0].tolist()])
        if some is None:
            return out
        for tracker, mine in space.rounds.trackers(sender.rank, some.tables, commits[:, 1]):
            if mine is not None:
                commits, some = body.commits[mine], space.batch_of(body.commits[mine, 0])
            out += self._commit(sender, tracker, commits, some, body)
        return out

    def _commit(
        self, sender: Sender, tracker: RoundTracker, commits: m.Matrix, some: TableBatch, body: m.Contribute
    ) -> list[m.Outgoing]:
        space, rank, now = sender.space, sender.rank, sender.now
        out: list[m.Outgoing] = []
        if self.is_stopping or body.hyper or any([table.conflict is not None for table in some.named]):
            rounds = commits[:, 1].tolist()
            errors = [
                self._why_refused(tracker, *one, body.hyper) for one in zip(some.named, rounds, strict=True)
            ]
            for table, round_, error in zip(some.named, rounds, errors, strict=True):
                if error is not None:
                    out.append(_failed(sender.waiter, error, table.number, round_))
            commits = commits[[error is None for error in errors]]
            some = space.batch_of(commits[:, 0])
        verdicts = tracker.commit(rank, commits, body, sender.waiter, now)
        if verdicts is not None:
            some = space.batch_of(some.tables[verdicts == CommitStatus.ACCEPTED])
            out += self._answer_others(sender, tracker, commits, verdicts, body)
        space.log_rounds("committed", tracker, some.named, rank)
        for table in some.named if body.absent or body.hyper else ():
            left_out = frozenset(key for number, key in body.absent if number == table.number)
            if left_out:
                space.absent[table.number, rank] = left_out
            if body.hyper:
                table.hyper.set(rank, body.hyper)
        committed = tracker.num_committed[some.tables]
        num_complete = committed.tolist().count(tracker.num_members)
        if 0 < num_complete < len(committed):
            some = space.batch_of(some.tables[committed == tracker.num_members])
        if num_complete:
            out += self._finish(space, tracker, some, now)
        return out

    def _why_refused(
        self, tracker: RoundTracker, table: Table, round_: int, hyper: bytes
    ) -> KVStoreError | None:
        """Say why a commit is not even looked at; None where it is."""
        if table.conflict is not None:
            return _again(table.conflict)
        if (
            self.is_stopping
            and round_ == tracker.number(table.number)
            and not tracker.num_committed[table.number]
        ):
            return ServerStoppingError(f"server {self.config.server} is stopping and takes no new round")
        if hyper:
            try:
                table.hyper.check(hyper)
            except KVStoreError as error:
                return error
        return None

    def _answer_others(
        self, sender: Sender, tracker: RoundTracker, commits: m.Matrix, verdicts: Ints, body: m.Contribute
    ) -> list[m.Outgoing]:
        """Answer the commits that were not accepted now: repeated ones, and those that cannot count."""
        space, rank, waiter, now = sender.space, sender.rank, sender.waiter, sender.now
        out: list[m.Outgoing] = []
        waiting: list[int] = []
        again: list[Committed] = []
        whose = ALL if tracker is space.rounds.shared else rank
        for (number, round_, count, _, version, flags), verdict in zip(
            commits.tolist(), verdicts.tolist(), strict=True
        ):
            table = space.tables[number]
            if verdict == CommitStatus.REPEATED and table.held is not None and body.hold:
                out += _held(table, round_, waiter, table.held.sum.partials)
            elif verdict == CommitStatus.REPEATED:
                waiting.append(number)
            elif verdict == CommitStatus.REFUSED:
                out += _reply(waiter, m.Missing(number, round_, tracker.missing_slots(rank, number, count)))
            elif verdict == CommitStatus.FAILED:
                why, following = tracker.why_failed(number, round_), tracker.number(number)
                out.append(_failed(waiter, why, number, round_, following))
            elif verdict == CommitStatus.AHEAD:
                what = f"rank {rank} committed round {round_} while round {tracker.number(number)} is open"
                out.append(_failed(waiter, ProtocolError(what), number, round_))
            elif verdict == CommitStatus.APPLIED:
                again.append(Committed(number, round_, version, flags))
                if body.hold and not table.ends[whose].vetoes:
                    # What was told before it was applied may have been lost as well.
                    out += _held(table, round_, waiter, table.ends[whose].partials)
        if waiting:
            missing = tracker.missing_ranks(waiting[0])
            out += _still_waiting(space, waiter, space.open_round(waiting[0]), missing, now)
        return out + _outcomes(space, whose, rank, waiter, again, (now, body.timeout))

    def _finish(
        self,
        space: Namespace,
        tracker: RoundTracker,
        some: TableBatch,
        now: float,
        decision: Decision | None = None,
    ) -> list[m.Outgoing]:
        """Apply rounds that all have committed, and answer; or fail them for all members.

        Those that want a decision are held until there is one.
        """
        out: list[m.Outgoing] = []
        is_shared = tracker is space.rounds.shared
        ended, others = None, some.numbers
        if is_shared and decision is None:
            ended, others = self._change(space, tracker, some, out)
        applied: list[int] = []
        for number in others:
            if self._finish_alone(space, tracker, space.tables[number], decision, out):
                applied.append(number)
        if applied or ended is None:
            before = [] if ended is None else ended.numbers
            ended = space.batch_of(np.array(before + applied, np.int64))
        answers: list[Answer] = []
        for rank, given in tracker.given.items():
            answers += _answers(tracker, rank, given, ended, is_plain=not applied)
        if space.absent:
            space.forget_absent(ended.numbers)
        space.log_rounds("applied", tracker, ended.named)
        tracker.finish(ended.tables, ended.slots)
        for rank, given in tracker.given.items() if not is_shared else ():
            for number, flag in zip(ended.numbers, given.flags[ended.tables].tolist(), strict=True):
                space.rounds.advance(rank, number)
                space.waits.contributed(number, rank, now)
                if flag & m.HAS_JOINED:
                    space.rounds.joined(number).add(rank)
        weights: dict[int, m.Weights] = {}
        for rank, waiter, wanted, commits, timeout in answers:
            if wanted is None:
                out += _outcomes(space, ALL if is_shared else rank, rank, waiter, commits, (now, timeout))
            elif wanted:
                if wanted not in weights:
                    ranks = [one.rank for one in answers if one.wanted == wanted]
                    if wanted == m.WANTS_WEIGHTS:
                        weights[wanted] = space.weights(ended, *ranks)
                    else:
                        weights[wanted] = space.shown(ended, len(ranks), bool(wanted & m.KNOWS_PLACES))
                out.append(m.Outgoing(waiter.peer, m.Reply(waiter.number, weights[wanted])))
            else:
                versions = [table.version for table in ended.named]
                rows = np.array((ended.numbers, tracker.numbers[ended.tables] - 1, versions)).T
                out.append(m.Outgoing(waiter.peer, m.Reply(waiter.number, m.Done(rows))))
        return out + self._release(space) if space.waits.all else out

    def _finish_alone(
        self,
        space: Namespace,
        tracker: RoundTracker,
        table: Table,
        decision: Decision | None,
        out: list[m.Outgoing],
    ) -> bool:
        """Apply the open round of one table; return whether it was.

        Args:
            out: Takes what is told where it was not: it failed, or is held.
        """
        number = table.number
        try:
            rest = pipelined.finish(space, table) if table.begun is not None else None
            if rest is not None or self._apply(space, tracker, table, decision):
                out += rest or ()
                return True
            space.log_rounds("held", tracker, [table])
            for given in tracker.given.values():  # those that wait for a decision, and have data
                waiter, said = given.waiters[number], given.said[number]
                if waiter is not None and said is not None and said.hold and table.held:
                    out += _held(table, tracker.number(number), waiter, table.held.sum.partials)
        except KVStoreError as error:
            out += self._fail(space, tracker, table, error)
        except Exception as error:
            _log.exception("round %d of table %r failed", tracker.number(number), table.name)
            out += self._fail(space, tracker, table, self._fault(error))
        return False

    def _change(
        self, space: Namespace, tracker: RoundTracker, some: TableBatch, out: list[m.Outgoing]
    ) -> tuple[TableBatch | None, list[int]]:
        """Sum and update all tables together that are alike; returns those, if there are some, and the others.

        Args:
            out: Takes what is told of rounds that fail.
        """
        try:
            optimizer = space.optimizer.agreed()
        except KVStoreError:
            return None, some.numbers
        can_batch, others = space.can_batch(tracker, some, optimizer), list[int]()
        if True not in can_batch or space.name in self.updaters:
            return None, some.numbers
        if False in can_batch or not some.is_ascending:
            others = [n for n, is_batchable in zip(some.numbers, can_batch, strict=True) if not is_batchable]
            some = space.batch_of(np.sort(some.tables[can_batch]))
        packed: list[bytes] = []
        hypers: list[Sequence[Mapping[str, Any]]] = []
        left: list[int] = []
        for table in some.named:
            try:
                hyper = table.hyper.common(tracker.given)
                hypers.append(() if optimizer is None else table.hypers((), optimizer, hyper))
            except KVStoreError as error:
                out += self._fail(space, tracker, table, error)
            else:
                packed.append(hyper)
                left.append(table.number)
        if not left:
            return None, others
        if len(left) < len(some.numbers):
            some = space.batch_of(np.array(left))
        try:
            first = some.numbers[0]  # of all of them a rank has said the same
            ranks = tracker.given.values()
            given = [space.contribution(one.said[first], optimizer, one.runs(some.slots)) for one in ranks]
            if optimizer is None:
                space.shard.assign_sum(given)
            else:
                space.shard.update(given, optimizer, hypers, [table.unit for table in some.named])
        except KVStoreError as error:  # nothing has changed
            for table in some.named:
                out += self._fail(space, tracker, table, error)
            return None, others
        except Exception as error:
            _log.exception("the update of %d tables failed", len(some.named))
            for table in some.named:
                out += self._fail(space, tracker, table, table.break_off(error))
            return None, others
        end = None
        for table, hyper in zip(some.named, packed, strict=True):
            end = table.changed(hyper, end)
        return some, others

    def _apply(
        self, space: Namespace, tracker: RoundTracker, table: Table, decision: Decision | None
    ) -> bool:
        """Apply the open round of a table; returns False where it is held instead."""
        trace = space.recording.active
        start = 0.0 if trace is None else trace.clock()
        round_, is_shared = tracker.number(table.number), tracker is space.rounds.shared
        parts: dict[int, RankCommit] = {}
        if decision is not None:
            table.apply_held(decision)
        else:
            optimizer = space.optimizer.agreed()
            found = [(rank, space.given(rank, tracker, table, optimizer)) for rank in tracker.given]
            parts = {rank: part for rank, part in found if part is not None}
            updater = self.updaters.get(space.name)
            if table.hold(parts, optimizer, updater):
                return False
            without = space.rounds.joined(table.number) | space.rounds.left
            whose = ALL if is_shared else found[0][0]
            table.apply(whose, round_, parts, optimizer, updater, without)
        if trace is not None:
            nbytes = sum(part.given.nbytes for part in parts.values())
            described = {"round": round_, "ranks": tracker.num_members, "bytes": nbytes}
            trace.add(table.name, ROUNDS, start, ROUND_LANE, described)
        return True

    def _fail(
        self, space: Namespace, tracker: RoundTracker, table: Table, error: KVStoreError
    ) -> list[m.Outgoing]:
        """Fail the open round of a table for its members, and tell those who wait for it."""
        number = tracker.number(table.number)
        space.note_failure(error)
        space.log_rounds("failed", tracker, [table], error=error)
        space.forget_absent([table.number])
        if tracker is space.rounds.shared:
            pipelined.roll_back(space, table)
            table.fail(ALL)
        else:
            [rank] = tracker.given
            table.fail(rank)
            space.rounds.advance(rank, table.number)
        waiters = tracker.fail(table.number, error)
        return [_failed(waiter, error, table.number, number, number + 1) for waiter in waiters]

    def _abort(self, sender: Sender, abort: m.Abort) -> list[m.Outgoing]:
        """Give a round up for a rank; tell those who wait, and the rank whether it stands all the same."""
        space, rank, table = sender.space, sender.rank, sender.space.table(abort.table)
        error = RoundAbortedError(
            f"rank {rank} aborted round {abort.round} of {table.name!r}: {abort.reason[:MAX_REASON]}"
        )
        tracker = space.rounds.tracker(rank, table.number, abort.round)
        tracker.of(rank)
        whose = ALL if tracker is space.rounds.shared else rank
        number, stands = tracker.number(table.number), tracker.was_applied(table.number, abort.round)
        out = []
        if abort.round == number:
            out += self._fail(space, tracker, table, error)
        elif abort.undo and abort.round == number - 1 and stands and table.undo(whose):
            tracker.undo(table.number, error)
            space.log_rounds("undone", tracker, [table], rank, error, back=1)
        for wait in space.waits.take(
            lambda wait: (wait.table, wait.rank, wait.round) == (table.number, rank, abort.round)
        ):
            out += _fail_wait(space, wait, error)
        return out + _info(sender, {"applied": tracker.was_applied(table.number, abort.round)})

    def _resolve(self, sender: Sender, resolve: m.Resolve) -> list[m.Outgoing]:
        """Apply a round that is held as a rank says; a round that is over stays as it is.

        Raises:
            ProtocolError: the round is not held.
        """
        space, table = sender.space, sender.space.table(resolve.table)
        shared, rank = space.rounds.shared, sender.rank
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
        some = space.batch_of(np.array([table.number]))
        return self._finish(space, shared, some, sender.now, decision)

    # ---------------------------------------------------------------- reads

    def _read(self, sender: Sender, wanted: m.Pull | m.PullRows) -> list[m.Outgoing]:
        """Answer with weights of each table, as soon as the rank may read it."""
        space, rank, waiter, timeout = sender.space, sender.rank, sender.waiter, wanted.timeout
        numbers = list(wanted.tables) if isinstance(wanted, m.Pull) else [space.table(wanted.table).number]
        for table in space.batch_of(np.array(numbers, np.int64)).named:
            if table.conflict is not None:
                raise _again(table.conflict)
            if not table.is_initialised:
                raise KeyNotFoundError(
                    f"table {table.name!r} has not been initialised yet; call init on every worker first"
                )
        behind = list[int]()
        if space.rounds.begun or space.rounds.bound is not None:
            pipelined.let_read(space, rank, numbers)
            behind = [number for number in numbers if space.rounds.behind(rank, number)]
        out = _present(space, rank, waiter, wanted, [number for number in numbers if number not in behind])
        for number in behind:
            answer = partial(_present, space, rank, waiter, wanted, [number])
            out += _park(
                space,
                DelayedRequest(number, rank, waiter, sender.now + timeout, timeout, False, answer),
                sender.now,
            )
        return out

    def _show_rows(self, sender: Sender, show: m.ShowRows) -> list[m.Outgoing]:
        return _reply(sender.waiter, sender.space.shown_rows(sender.space.table(show.table)))

    def _release(self, space: Namespace) -> list[m.Outgoing]:
        """Answer the requests that have waited for other ranks long enough."""
        ready = space.waits.take_ready()
        for number in dict.fromkeys(wait.table for wait in ready if wait.is_join):
            space.rounds.part_again(number)
        return [out for wait in ready for out in wait.answer()]

    # ---------------------------------------------------------------- what takes too long

    def _open_round(self, space: Namespace, number: int) -> RankWait:
        shared, table = space.rounds.shared, space.tables[number]
        fail = partial(self._fail, space, shared, table)
        return RankWait(
            space.open_round(number), *shared.times(number), shared.missing_ranks(number), fail, table
        )

    def _pending(self, space: Namespace, tables: Iterable[int] | None = None) -> Iterator[RankWait]:
        """List what ranks wait for: rounds (of those tables; None: of all), ranks that are behind, a barrier."""
        members = space.membership
        waiting = np.flatnonzero(space.rounds.shared.num_committed).tolist() if tables is None else tables
        for number in waiting:
            yield self._open_round(space, number)
        for wait in list(space.waits.all.values()):

            def fail(error: KVStoreError, wait: DelayedRequest = wait) -> list[m.Outgoing]:
                space.waits.remove(wait)
                return _fail_wait(space, wait, error)

            missing = wait.missing(space.rounds)
            yield RankWait(
                space.describe_wait(wait), wait.since, wait.deadline, missing, fail, space.tables[wait.table]
            )
        if members.barrier:
            since = min(wait.since for wait in members.barrier.values())
            deadline = min(wait.deadline for wait in members.barrier.values())

            def end(error: KVStoreError) -> list[m.Outgoing]:
                return [_failed(waiter, error) for waiter in members.take_barrier()]

            yield RankWait(
                f"barrier {members.barrier_sequence}", since, deadline, members.absent_from_barrier(), end
            )

    def _why_stuck(self, space: Namespace, pending: RankWait, now: float) -> KVStoreError | None:
        """Return the error with which a wait ends; None while it may go well."""
        table, what = pending.table, pending.what
        if table is not None and table.conflict is not None:
            return _again(table.conflict)
        lost = space.membership.lost_error(pending.missing, what, now, self.config.dead_after)
        if lost is not None or now < pending.deadline:
            return lost
        who = space.membership.describe_all(pending.missing, now)
        if not who:
            return DeadlineError(
                f"{what} reached its deadline while it was held: every rank has given its gradient, but none has "
                "decided what becomes of the sum; look at what stopped them"
            )
        if table is None:
            return DeadlineError(f"{what} reached its deadline while waiting for {who}")
        return DeadlineError(
            f"{what} reached its deadline while waiting for {who}; is it stuck, or only slow? (timeout=… of the "
            "kvstore or KVSTORE_TIMEOUT raises the limit.) Workers with different numbers of batches train in "
            "`with trainer.join():`"
        )

    # ---------------------------------------------------------------- members and tables

    def _heartbeat(self, sender: Sender, body: m.Heartbeat) -> list[m.Outgoing]:
        if body.report:
            sender.space.membership.members[sender.rank].report = read_report(body.report)
        return _reply(sender.waiter, m.Pending(()))

    def _facts_at(self, now: float) -> Mapping[str, Any]:
        """Describe the server for people, anew only when the last description is old."""
        if now - self._facts[0] >= FRESH:
            spaces = list(self.namespaces.values())
            self._facts = (
                now,
                {
                    "server": self.config.server,
                    "num_servers": self.config.num_servers,
                    "memory": self.budget.used + self.budget.shared,
                    "max_memory": self.config.max_memory,
                    "is_stopping": self.is_stopping,
                    "clock": now,
                    "num_jobs": len(spaces),
                    "jobs": [space.facts(self._pending(space), now) for space in spaces[:MOST_JOBS]],
                },
            )
        return self._facts[1]

    def _register(self, sender: Sender, register: m.Register) -> list[m.Outgoing]:
        space, shared = sender.space, sender.space.rounds.shared
        try:
            space.check_named("declaration", range(len(register.specs)))
            table = space.register(sender.rank, register)
        except PlanMismatchError as error:
            told = [_failed(sender.waiter, error)]
            for table in space.tables:
                if table.conflict is error and shared.num_committed[table.number]:
                    told += self._fail(space, shared, table, error)
            return told
        if isinstance(table, int):
            return _info(sender, {"keys": table})
        slot, following = (
            int(space.rounds.slots.first[table.number]),
            space.rounds.next_round(sender.rank, table.number),
        )
        return _reply(sender.waiter, m.Registered(table.number, slot, following))

    def _set_optimizer(self, sender: Sender, body: m.SetOptimizer) -> list[m.Outgoing]:
        for number in () if sender.space.optimizer.is_known(body.spec) else list(sender.space.rounds.begun):
            pipelined.roll_back(sender.space, sender.space.tables[number])
        try:
            sender.space.set_optimizer(sender.rank, body.spec)
        except UnknownNameError as error:
            raise UnknownNameError(f"server {self.config.server} cannot run the optimizer: {error}") from None
        return _info(sender)

    def _get_state(self, sender: Sender, body: m.GetState) -> list[m.Outgoing]:
        table = sender.space.table(body.table)
        pipelined.let_read(sender.space, sender.rank, [table.number])
        packed = pack_states(table.shard.get_state(table.unit, body.index))
        return _reply(sender.waiter, m.SliceState(body.table, body.index, *packed))

    def _put_state(self, sender: Sender, body: m.SliceState) -> list[m.Outgoing]:
        table = sender.space.table(body.table)
        pipelined.let_read(sender.space, sender.rank, [table.number])
        table.shard.slot_of(table.unit, body.index)
        piece = table.plan.slices[body.index]
        table.shard.put_state(table.unit, body.index, unpack_states(piece, body.summary, body.data))
        return _info(sender)

    def _gather(self, sender: Sender, gather: m.Gather) -> list[m.Outgoing]:
        space, members = sender.space, sender.space.membership
        released = members.enter_barrier(sender.rank, gather, sender.waiter, sender.now)
        if not released:
            what = f"barrier {gather.sequence}"
            return _still_waiting(space, sender.waiter, what, members.absent_from_barrier(), sender.now)
        return [out for one, parts in released for out in _reply(one, m.Gathered(parts))]

    def _hello(self, peer: bytes, hello: m.Hello, now: float) -> m.Welcome:
        known = self._sessions.repeated(peer, hello)
        if known is not None:  # the answer to the first one may be lost, or still on its way
            known.last_heard = now
            return m.Welcome(self.config.run, known.token, self.config.spread_from)
        space = self.namespaces.get(hello.namespace)
        session = self._sessions.new(peer, hello, now)
        try:
            if self.is_stopping:
                raise ServerStoppingError(f"server {self.config.server} is stopping and takes no new workers")
            _check_hello(self.config, hello)
            mode = Mode(hello.mode, hello.staleness, hello.slow_down, hello.by_host)
            mode.check()
            if space is None:
                space = self._new_namespace(hello, mode, now)
            elif mode != space.mode:
                raise ConfigurationError(
                    f"rank {hello.rank} ({hello.address}) wants mode {mode}, the ranks before it {space.mode}; create "
                    "the same kvstore on every worker"
                )
            replaced = space.membership.join(session)
        except ConfigurationError as error:
            if space is not None:
                space.membership.refuse(hello.rank, f"it was refused: {error}")
            raise
        if hello.namespace not in self.namespaces:
            self.namespaces[hello.namespace] = space
            space.begin()
        self._sessions.open(session)
        if replaced is not None:
            self._shut_out(
                replaced.token,
                f"rank {hello.rank} was taken over by {hello.address}; if that is another job on the same servers, "
                "give each its own namespace=…",
            )
        space.begin_process(hello.rank)
        pipelined.take_back_broken(space)
        return m.Welcome(self.config.run, session.token, self.config.spread_from)

    def _new_namespace(self, hello: m.Hello, mode: Mode, now: float) -> Namespace:
        """Make a namespace for the first worker that names it. Raises ConfigurationError if there are too many."""
        config = self.config
        if len(self.namespaces) >= config.max_namespaces and not self._reclaim(now):
            raise ConfigurationError(
                f"server {config.server} has {len(self.namespaces)} namespaces and accepts up to "
                f"{config.max_namespaces} (--max-namespaces); one ends with its last worker, or when none of its "
                f"workers was heard from for {config.forget_after:g} s (--forget-after), without weights for "
                f"{config.dead_after:g} s (--dead-after), or less where another one needs its place"
            )
        space = Namespace(
            hello.namespace, hello.num_workers, mode, self.config, self.budget, self._leases, now
        )
        self.budget.check(space.least_memory, f"namespace {hello.namespace!r}")
        return space

    def _forget_if_silent(self, space: Namespace, silence: float) -> None:
        """Free a namespace of which no worker was heard for so long that none comes back."""
        if space.has_values and silence > self.config.forget_after:
            self._free(space, silence, "--forget-after")
        elif not space.has_values and silence > self.config.dead_after:
            self._free(space, silence, "--dead-after")

    def _reclaim(self, now: float) -> bool:
        """Free the namespace without weights whose workers are silent longest.

        Return whether there was one of which no worker was heard for a few of its heartbeats.
        """
        empty = [space for space in self.namespaces.values() if not space.has_values]
        heard, space = min(
            [(one.membership.last_sign(now), one) for one in empty], key=itemgetter(0), default=(now, None)
        )
        if space is None or now - heard <= self.config.dead_after * _IDLE:
            return False
        self._free(space, now - heard, "--max-namespaces")
        return True

    def _free(self, space: Namespace, silence: float, option: str) -> None:
        """End a namespace whose workers are silent; should one come again, it is told why."""
        _log.warning(
            "namespace %r is freed: none of its workers was heard from for %.0f s", space.name, silence
        )
        for member in space.membership.members.values():
            self._shut_out(
                member.token,
                f"no worker of namespace {space.name!r} was heard from for {silence:.0f} s, so it was freed "
                f"({option}); restart the job from its last saved states",
            )
        self._end(space)

    def _end(self, space: Namespace) -> None:
        """Free a namespace that has no members any more."""
        del self.namespaces[space.name]
        space.end()
        self.num_ended += 1

    def _shut_out(self, session: int, reason: str) -> None:
        """End a session, whose process is told why when it comes again."""
        self._commands.forget(session)
        self._sessions.end(session, reason)

    def _leave(self, sender: Sender, leave: m.Leave) -> list[m.Outgoing]:
        space, rank = sender.space, sender.rank
        self._shut_out(sender.session, "it has left")
        space.membership.leave(rank, leave.reason[:MAX_REASON], leave.is_clean)
        space.end_process(rank, leave.is_clean)
        pipelined.take_back_broken(space)
        if space.membership.is_over():
            self._end(space)
            return []
        return self._fail_hopeless(space, sender.now)


def _answers(
    tracker: RoundTracker, rank: int, given: Given, ended: TableBatch, is_plain: bool
) -> list[Answer]:
    """List what the requests of a rank hear of rounds that end.

    Args:
        is_plain: All of them have been applied together, so there is nothing special about any.
    """
    flags = given.flags[ended.tables].tolist()
    waiters = list(map(given.waiters.__getitem__, ended.numbers))
    first = waiters[0] if is_plain and flags and flags[0] in _WHOLE else None
    if first is not None and flags.count(flags[0]) == len(flags) == waiters.count(first):
        return [Answer(rank, first, flags[0], [], 0.0)]
    rounds, versions = tracker.numbers[ended.tables].tolist(), given.version[ended.tables].tolist()
    found: dict[Waiter, Answer] = {}
    for waiter, *row in zip(waiters, ended.numbers, rounds, versions, flags, strict=True):
        said = given.said[row[0]]
        if waiter is not None and said is not None:
            own = found.setdefault(waiter, Answer(rank, waiter, None, [], said.timeout))
            own.commits.append(Committed(*row))
    return list(found.values())


def _outcomes(
    space: Namespace,
    whose: int,
    rank: int,
    waiter: Waiter,
    commits: Sequence[Committed],
    may_wait: tuple[float, float] | None,
) -> list[m.Outgoing]:
    """Tell how rounds ended that did not fail: first what was special about each, then the weights.

    They are those of all slices, or what has changed since those that the worker holds.

    Args:
        may_wait: The time, and for how long those that may not be read yet wait; None: all may be read.
    """
    out: list[m.Outgoing] = []
    done: list[tuple[int, int, int]] = []
    wanted: dict[bool, list[int]] = {}
    """Tables, by whether they may come as bfloat16."""
    mapped: dict[bool, list[int]] = {}
    """Those whose weights the worker maps, by whether it knows their places."""
    changed: list[m.Weights] = []
    for one in commits:
        number, round_, version, flags = one
        table = space.tables[number]
        end = table.ends[whose]
        is_skipped = end.is_skipped
        wants = flags & m.WANTS_WEIGHTS and not is_skipped
        if may_wait is not None and not space.mode.is_sync:
            is_join = bool(flags & m.HAS_JOINED) and rank in space.rounds.joined(number)
            if is_join or (wants and space.rounds.behind(rank, number)):
                now, timeout = may_wait
                answer = partial(_outcomes, space, whose, rank, waiter, [one], None)
                out += _park(
                    space,
                    DelayedRequest(number, rank, waiter, now + timeout, timeout, is_join, answer, round_),
                    now,
                )
                continue
        if flags & m.HAS_JOINED:
            out += _reply(waiter, m.InForce(number, round_, end.hyper, end.is_over))
        if end.left_out:
            out += _reply(waiter, m.Absent(number, round_, end.left_out))
        if is_skipped:
            out += _reply(waiter, m.Vetoed(number, round_, end.vetoes))
        if not wants or not space.mode.is_sync:  # by the time that weights may be read they can be newer
            done.append((number, round_, end.version))
        if wants and table.deltas is not None:
            changed.append(space.rows(rank, table, table.changed_parts(version)))
        elif wants and flags & m.MAPS_WEIGHTS and space.mode.is_sync:
            mapped.setdefault(bool(flags & m.KNOWS_PLACES), []).append(number)
        elif wants and flags & m.WANTS_DELTA:
            changed.append(space.rows(rank, table, table.changed_parts(version)))
        elif wants:
            wanted.setdefault(bool(flags & m.WANTS_HALF), []).append(number)
    if done:
        out += _reply(waiter, m.Done(m.matrix(done, 3)))
    bodies: list[m.ReplyBody] = list(changed)
    for are_known, numbers in mapped.items():
        bodies.append(space.shown(space.batch_of(np.array(numbers)), 1, are_known))
    for half, numbers in wanted.items():
        bodies.append(space.weights(space.batch_of(np.array(numbers)), rank, half=half))
    return out + [one for body in bodies for one in _reply(waiter, body)]


def _present(
    space: Namespace, rank: int, waiter: Waiter, wanted: m.Pull | m.PullRows, numbers: Sequence[int]
) -> list[m.Outgoing]:
    """Give a rank the present weights of tables, or rows of the only one; where changes go out, what workers have."""
    try:
        if isinstance(wanted, m.PullRows):
            found = [
                space.rows(rank, table, [table.pulled_part(wanted)], is_pull=True)
                for table in map(space.table, numbers)
            ]
        else:
            tables = [space.tables[number] for number in numbers]
            plain = [table.number for table in tables if table.deltas is None]
            some = space.batch_of(np.array(plain, np.int64))
            found = [space.weights(some, rank, is_pull=True)] if plain else []
            changed = [table for table in tables if table.deltas is not None]
            found += [space.rows(rank, table, table.changed_parts(-1), is_pull=True) for table in changed]
    except ProtocolError as error:
        return [_failed(waiter, error)]
    return [m.Outgoing(waiter.peer, m.Reply(waiter.number, body)) for body in found]


def _held(table: Table, round_: int, waiter: Waiter, partials: Sequence[Partial]) -> list[m.Outgoing]:
    """Return what there is to decide about in a round."""
    told = tuple([(one.slice, one.value) for one in partials])
    return _reply(waiter, m.Held(table.number, round_, told, all(one.is_finite for one in partials)))


def _park(space: Namespace, wait: DelayedRequest, now: float) -> list[m.Outgoing]:
    """Answer a request later, when other ranks have come far enough."""
    space.waits.add(wait)
    return _still_waiting(space, wait.waiter, space.describe_wait(wait), wait.missing(space.rounds), now)


def _fail_wait(space: Namespace, wait: DelayedRequest, error: KVStoreError) -> list[m.Outgoing]:
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
    return _reply(waiter, m.Pending(ranks[:_TOLD], f"{what} waits: {_who(space, ranks, now)}"))


def _who(space: Namespace, missing: Iterable[int], now: float) -> str:
    return space.membership.describe_all(missing, now) or "nobody has decided about its sum yet"


def _again(error: KVStoreError) -> KVStoreError:
    """Return the same error, anew: a raised one collects tracebacks."""
    return from_wire(*to_wire(error))


def _reply(waiter: Waiter, body: m.ReplyBody) -> list[m.Outgoing]:
    return [m.Outgoing(waiter.peer, m.Reply(waiter.number, body))]


def _info(sender: Sender, values: Mapping[str, Any] | None = None) -> list[m.Outgoing]:
    return _reply(sender.waiter, m.Status(values or {}))


def _failed(
    waiter: Waiter, error: KVStoreError, table: int = -1, round_: int = -1, next_round: int = -1
) -> m.Outgoing:
    """Tell that a request, or with a table one round of it, has failed."""
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
