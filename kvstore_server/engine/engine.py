"""Request handling for one server, without sockets or a clock.

`Engine.handle` takes one request and the time and returns the messages to send; `server.py` moves the bytes. `Engine`
owns the namespaces (one per job), their sessions and members, and through them tables and rounds:

- `rounds` counts contributions and says when a round is complete.
- `Namespace` and `Table` keep the weights and apply completed rounds.
- `pipelined` applies single slices of a round before all of it has arrived.
- This module maps messages to those parts, and what they return to replies.

Invariants:

- Nothing blocks. A request that cannot be answered yet is answered while a later message is handled, or by `tick`.
- Errors are isolated. Whatever a request raises goes back as `Failed` to its sender, and other requests are
  unaffected. Only an interrupt (`KeyboardInterrupt`, say) in the middle of a request stops the engine: its state may
  be changed in part, so every later request is refused.
- Every wait ends: with an answer, at its deadline, or when a rank that it needs is lost.
"""

from __future__ import annotations

import logging
import math
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np

from kvstore_server.budget import Budget
from kvstore_server.commands import CommandAnswer, CommandContext, Commands, repeated_answer
from kvstore_server.debug_log import Peer
from kvstore_server.durable.snapshot_folder import SnapshotName, StoredSnapshot
from kvstore_server.durable.spill_folder import SpillFolder
from kvstore_server.engine import pipelined
from kvstore_server.engine.captured import Captures
from kvstore_server.engine.cut import StoredSpace, read_spaces, restore_space
from kvstore_server.engine.durability import Durability, Head
from kvstore_server.engine.elastic import (
    MemberChanges,
    adopt,
    check_view,
    check_worker_counts,
    finished_error,
    follow,
    is_left_out,
    tell_closed,
    tell_members,
)
from kvstore_server.engine.facts import FRESH, MAX_JOBS, read_report
from kvstore_server.engine.image import members_of_image
from kvstore_server.engine.membership import RankSession, Sessions, random_token
from kvstore_server.engine.namespace import BatchUpdate, EngineConfig, Lineage, Namespace, TableBatch
from kvstore_server.engine.regrouping import regroup
from kvstore_server.engine.rounds import (
    CommitStatus,
    DelayedRequest,
    Ints,
    Mode,
    RankInputs,
    RoundTracker,
    Waiter,
)
from kvstore_server.engine.snapshots import Snapshots, job_of, spaces_of_job
from kvstore_server.engine.stored_reads import StoredJob, StoredReads
from kvstore_server.engine.table import ALL, RankCommit, Table
from kvstore_server.engine.views import MemberView, Views
from kvstore_server.errors import (
    ConfigurationError,
    DeadlineError,
    FencedError,
    KeyNotFoundError,
    KVStoreError,
    PlanMismatchError,
    ProtocolError,
    RecoveryError,
    RepeatedRoundError,
    RoundAbortedError,
    ServerLostState,
    ServerStoppingError,
    UnknownNameError,
    from_wire,
    to_wire,
)
from kvstore_server.failpoints import failpoint
from kvstore_server.optimizer.state import pack_states, unpack_states
from kvstore_server.plan import check_name
from kvstore_server.processes import FINAL_MESSAGE_TIME, Processes, ProcessState
from kvstore_server.protocol import messages as m
from kvstore_server.protocol.frames import Frame
from kvstore_server.shard.norms import Decision
from kvstore_server.shard.shard import Leases, Partial, Updater
from kvstore_server.tracing import ROUND_LANE, ROUNDS, Clock, handle_and_trace

_log = logging.getLogger(__name__)

_READING = "the server reads a snapshot"

_SMALL, _CHECK_PER_ITEM = 1000, 5e-5
"""A namespace with more than `_SMALL` tables, waits and ranks is checked every `_CHECK_PER_ITEM` seconds per item, so
that the checks take a bounded share of the time.
"""
_MAPS = m.WANTS_WEIGHTS | m.MAPS_WEIGHTS
_COMMON_ANSWERS = (0, m.WANTS_WEIGHTS, _MAPS, _MAPS | m.LOCATIONS_CACHED)
"""Commit flags with which one message answers all tables of a request: that they are done, weights, or their locations.
"""
_RECLAIMABLE_AFTER = 0.25
"""A namespace without weights may be reclaimed once it has been silent for this fraction of `dead_after`."""
_MISSING_NAMED = 64
"""How many missing ranks a message to a waiting worker names."""

MAX_WORKERS = 1 << 16
MAX_ADDRESS = 512
"""Longest description of its location and CPU that a worker may send, in characters."""
MAX_REASON = 2000
"""Longest reason for leaving or aborting a round that is stored, in characters."""


_LEFT_KEPT = 8
"""How many namespaces without tables are kept for each job after all workers have left them."""
_FINISHED_KEPT = 1024
"""How many namespaces are remembered whose workers have all finished."""


class Sender(NamedTuple):
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
    """The reply to one request of a rank when rounds end."""

    rank: int
    waiter: Waiter
    flags: int | None
    """Those of all commits of the request, if they are in `_COMMON_ANSWERS`. None: see `commits`."""
    commits: list[Committed]
    timeout: float


class RankWait(NamedTuple):
    what: str
    since: float
    deadline: float
    missing: list[int]
    """Ranks that have not arrived yet."""
    fail: Callable[[KVStoreError], list[m.Outgoing]]
    table: Table | None = None


class Engine:
    """All state of one server. Not thread-safe: one caller at a time.

    Attributes:
        updaters: Namespace → a user's function that replaces the optimizer; in-process use only.
        is_stopping: True once `stop` was called; new rounds are refused.
        is_inconsistent: True if a request was interrupted midway (Ctrl-C where the engine runs in a script's own
            process). What it changed is unknown, so every later request is refused.
        num_ended: How many namespaces have ended and freed their memory.
    """

    def __init__(
        self,
        config: EngineConfig,
        leases: Leases | None = None,
        clock: Clock | None = None,
        tokens: Callable[[], int] = random_token,
        durability: Durability | None = None,
        snapshots: Callable[[Budget], Snapshots] | None = None,
        spill: SpillFolder | None = None,
    ) -> None:
        """
        Args:
            clock: Times requests while a job is profiled.
            tokens: Returns secret 64-bit tokens for sessions.
            durability: Lets the state outlive the process; None: it does not. See `restore` and `begin_log`.
            snapshots: Makes what writes snapshots, given the memory account; None: there are none.
            spill: Where rows of hash tables are; None: in memory.
        """
        # 1. What it works on, and with.
        self.config = config
        self._clock = clock
        self._commands = Commands(CommandContext(config.server, config.num_servers))
        self.namespaces: dict[str, Namespace] = {}
        self.budget = Budget(config.max_memory, config.server)
        self.updaters: dict[str, Updater] = {}
        self.is_stopping = self.is_inconsistent = False
        self.num_ended = 0
        # 2. What is known of jobs beyond their namespaces.
        self._facts: tuple[float, Mapping[str, Any]] = (-math.inf, {})
        """When the server was last described for `GetStatus`, and the description."""
        self._resumable: dict[str, set[int]] = {}
        """Job (what its namespaces begin with, up to "/") → the ranks that another process can take over."""
        self._left: dict[str, str] = {}
        """Namespace that all workers have left, but that a successor may still join → its job; oldest first."""
        self._finished: OrderedDict[str, None] = OrderedDict()
        """The latest namespaces that have ended because all workers had finished."""
        # 3. Its parts.
        self._leases = leases
        self._sessions = Sessions(config.server, tokens)
        self._durability, self._spill = durability, spill
        self._changes = MemberChanges(config, self._fence)
        self.snapshots = None if snapshots is None else snapshots(self.budget)
        self._reads = None if self.snapshots is None else StoredReads(self.snapshots.run)
        """Snapshots that are being read to go back to them."""
        self.captures: Captures | None = None
        """Rounds whose messages repeat; None: each message takes the general path."""
        self.num_handled = 0
        """How many requests and ticks the general path has handled: captured rounds look then if all is as before."""
        self._from_stop: list[m.Outgoing] = []
        """Answers of `stop`, which the next tick returns."""
        self._lineages: dict[str, Lineage] = {}
        """Job → from what it has continued here; none if it began here."""
        # 4. What handles each message.
        self._handlers: dict[type[Any], Callable[[Sender, Any], list[m.Outgoing]]] = {
            m.Contribute: self._contribute,
            m.Resolve: self._resolve,
            m.Abort: self._abort,
            m.Pull: self._read,
            m.PullRows: self._read,
            m.MapRows: self._map_rows,
            m.Heartbeat: self._heartbeat,
            m.Gather: self._gather,
            m.Register: self._register,
            m.SetOptimizer: self._set_optimizer,
            m.GetState: self._get_state,
            m.SliceState: self._put_state,
            m.Snapshot: self._snapshot,
            m.Stats: lambda sender, _: _make_status(sender, sender.space.stats(sender.now)),
            m.Profile: lambda sender, body: _make_status(sender, sender.space.recording.handle(body, clock)),
            m.Command: self._command,
            m.Leave: self._leave,
            m.JoinRounds: self._join_rounds,
            m.LeaveRounds: self._leave_rounds,
            m.CloseRound: self._close_round,
        }

    def restore(self, now: float) -> None:
        """Continue with what an earlier process of this server has stored. Call it before the first `handle`.

        Raises RecoveryError if that contradicts itself, and other errors as for the requests that made it.
        """
        assert self._durability is not None
        self._durability.undo()

        def make_space(
            name: str, num_workers: int, mode: Mode, number: int, limits: tuple[int, int, int]
        ) -> Namespace:
            space = self._make_space(name, num_workers, mode, now, limits, number)
            space.begin()
            return space

        self._finished = OrderedDict.fromkeys(self._durability.finished)
        self.namespaces = self._durability.restore(make_space, self._sessions, now)
        for name, space in self.namespaces.items():
            job = _job_of(name)
            self._lineages[job] = max(self._lineages.get(job, Lineage()), space.lineage)
            lost = space.membership.lost(now, self.config.dead_after)
            if not space.tables and space.membership.is_over(lost):
                self._left[name] = _job_of(name)

    def begin_log(self, head: Head) -> None:
        """Log the present state, and from now on everything that changes, before it is answered."""
        assert self._durability is not None
        self._durability.start(head, self.namespaces, self._sessions, self._finished)

    def is_session(self, peer: bytes, token: int) -> bool:
        """Return whether the socket `peer` belongs to the open session with this token."""
        try:
            return self._sessions.find(peer, token).token == token
        except KVStoreError:
            return False

    def name_of(self, peer: bytes) -> Peer:
        """Return who sends from the socket `peer`, for the debug log; empty for a process without a session."""
        session = self._sessions.of_socket(peer)
        return Peer() if session is None else Peer(f"worker:{session.hello.rank}", session.hello.namespace)

    def hellos(self) -> list[m.Hello]:
        """Return what the open sessions have begun with, the oldest first."""
        return [session.hello for session in self._sessions]

    def claimed_memory(self) -> dict[str, int]:
        """Return how many bytes each namespace has claimed."""
        return {name: space.claimed for name, space in self.namespaces.items()}

    def handle(self, peer: bytes, request: m.Request, now: float) -> list[m.Outgoing]:
        """Handle one request of `peer` at time `now` (seconds, monotonic).

        Returns the messages to send: replies to this request, and to others that it completes. An error of the request
        is a reply as well; it is never raised.
        """
        # A sign of life does not depend on what is unread.
        out = [] if isinstance(request.body, m.Heartbeat) else self._read_unread()
        out += self._handle(peer, request, now)
        if self._durability is not None:
            self._durability.commit(self.namespaces, self._sessions, self._finished)
        return out

    def take(self, peer: bytes, frames: Sequence[Frame], now: float) -> list[m.Outgoing] | None:
        """Handle the frames of a request that repeats, without decoding them; otherwise like `handle`.

        Returns None, and has done nothing, if they are not what was captured: `handle` takes them then.
        """
        captures = self.captures
        found = None if captures is None else captures.find(peer, frames)
        if captures is None or found is None or self.is_inconsistent or self.is_stopping:
            return None
        # 1. Is it the message of a rank of this session, for the open round?
        round_, message = found
        space = round_.space
        if any([other.space is space and other is not round_ for other in captures.unread]):
            return None  # messages of a namespace are handled in the order in which they have come
        if not message.take(frames, space.rounds.shared.numbers, now):
            return None
        try:
            session = self._sessions.find(peer, message.session)
        except KVStoreError:
            message.frames = None
            return None
        session.last_heard, session.peer = now, peer
        round_.unread.append(message)
        if round_ not in captures.unread:
            captures.unread.append(round_)
        # 2. Those of all ranks are here.
        if len(round_.unread) < len(round_.messages):
            return []
        try:
            out = None if space.name in self.updaters else round_.finish(self.num_handled)
        except BaseException:
            self.is_inconsistent = True
            raise
        if out is None:
            out = self._read_unread()
        else:
            captures.unread.remove(round_)
        if self._durability is not None:
            self._durability.commit(self.namespaces, self._sessions, self._finished)
        return out

    def _read_unread(self) -> list[m.Outgoing]:
        """Handle on the general path what was kept unread."""
        out: list[m.Outgoing] = []
        while self.captures is not None and self.captures.unread:
            for one, (waiter, body) in self.captures.unread.pop(0).take_unread():
                request = m.Request(self.config.run_id, one.session, waiter.number, body)
                out += self._handle(one.peer, request, one.since)
        return out

    def _handle(self, peer: bytes, request: m.Request, now: float) -> list[m.Outgoing]:
        waiter, body = Waiter(peer, request.number), request.body
        self.num_handled += 1
        try:
            # 1. Messages that need no session: hello and status queries.
            if self.is_inconsistent:
                raise KVStoreError(
                    f"server {self.config.server} was interrupted in the middle of a request, so what it holds may be "
                    "changed in part; restart the job from its last saved states"
                )
            answer = self._handlers.get(type(body))
            if answer is None and isinstance(body, m.Hello):
                return _make_reply(waiter, self._hello(peer, body, now))
            if answer is None and isinstance(body, m.GetStatus):
                return _make_reply(waiter, m.Status(self._facts_at(now)))
            # 2. Everything else must come from an open session of this run of the server.
            if request.run_id != self.config.run_id:
                raise self._lost_state()
            session = self._sessions.find(peer, request.session)
            space, rank = self.namespaces[session.hello.namespace], session.hello.rank
            session.last_heard = now
            if not isinstance(body, m.Heartbeat):
                session.peer = peer  # a worker that has connected again uses another one of its sockets
            # 3. Dispatch to the handler, timed if the job is being profiled.
            if answer is None:
                raise ProtocolError(f"{type(body).__name__} is not a request")
            space.messages_in += not isinstance(body, m.Heartbeat)
            sender = Sender(space, rank, waiter, session.token, now)
            if space.recording.active is None:
                return answer(sender, body)
            return handle_and_trace(space.recording.active, body, rank, partial(answer, sender, body))
        except KVStoreError as error:
            return [_make_failed(waiter, error)]
        except Exception as error:
            _log.exception("request %s failed", type(body).__name__)
            return [_make_failed(waiter, self._internal_error(error))]
        except BaseException:
            self.is_inconsistent = True
            raise

    def _internal_error(self, error: Exception) -> KVStoreError:
        return KVStoreError(f"server {self.config.server} failed with {type(error).__name__}: {error}")

    def _lost_state(self) -> ServerLostState:
        latest = 0 if self.snapshots is None else self.snapshots.latest
        if latest:
            return ServerLostState(
                f"server {self.config.server} was restarted and no longer holds this job's weights; start its workers "
                "again, and Trainer.resume() goes back to the latest snapshot that all servers have (here that is one "
                f"of round {latest})"
            )
        return ServerLostState(
            f"server {self.config.server} was restarted and no longer holds this job's weights; "
            "restart the job from its last saved states"
        )

    def tick(self, now: float) -> list[m.Outgoing]:
        """Fail waits that cannot succeed, log those that take long, and free namespaces whose workers are gone."""
        out = self._from_stop + self._read_unread()
        self._from_stop = []
        self.num_handled += 1
        for space in list(self.namespaces.values()):
            if now < space.next_check:
                continue
            # What is large is looked at more rarely, so that it takes no more of the time.
            size = len(space.tables) + len(space.waits.all) + space.membership.num_workers
            space.next_check = now + _CHECK_PER_ITEM * size if size > _SMALL else now
            if space.is_waiting():
                out += self._fail_stuck_waits(space, now)
            silence = now - space.membership.last_heartbeat(now)
            members, is_long = space.membership, silence > self.config.rejoin_timeout
            if is_long and members.is_over(members.lost(now, self.config.dead_after)):
                self._end(space)  # all workers have failed, and none came back
            elif silence > min(self.config.forget_after, self.config.dead_after):
                self._forget_if_silent(space, silence)
        if self.snapshots is not None:
            self.snapshots.settle()
        if self._reads is not None:
            out += self._reads.resume(now)
        if self._durability is not None:
            self._durability.commit(self.namespaces, self._sessions, self._finished)
        return out

    def _fail_stuck_waits(self, space: Namespace, now: float) -> list[m.Outgoing]:
        """Fail waits that need a lost rank or have passed their deadline; answer those whose condition now holds."""
        members, shared = space.membership, space.rounds.shared
        # 1. Rounds of all ranks. Only those past their deadline are checked, unless a rank is lost.
        late = shared.late(now)
        is_any_gone = members.departed or (space.views is not None and space.views.leaving)
        if is_any_gone or members.lost(now, self.config.dead_after):
            late = np.flatnonzero(shared.num_committed).tolist()
        self._changes.begin(space, now)
        out = self._changes.drop_lost(space, now)
        for pending in [self._open_round(space, number) for number in late]:
            error = self._why_stuck(space, pending, now)
            out += pending.fail(error) if error is not None else ()
        # 2. Delayed reads, joins and barriers. All errors are collected before any is reported: a rank whose join
        # fails takes part again, and the other joins would then seem to wait for it.
        out += self._release(space)
        errors = [(pending, self._why_stuck(space, pending, now)) for pending in self._pending(space, ())]
        for pending, error in errors:
            if error is not None:
                out += pending.fail(error)
        # 3. Log the longest wait. Of the rounds only the oldest counts: thousands of tables may each have one open.
        oldest = shared.oldest()
        waits = sorted(self._pending(space, oldest), key=lambda one: one.since)
        if waits and space.slow_reports.is_due(now - waits[0].since, now):
            others = len(waits) - len(oldest) + int(np.count_nonzero(shared.num_committed)) - 1
            more = f", and {others} more waits," if others else ""
            who = _describe_missing(space, waits[0].missing, now)
            _log.warning(
                "namespace %r: %s%s has waited %.0f s: %s",
                space.name,
                waits[0].what,
                more,
                now - waits[0].since,
                who,
            )
        return out

    def check_processes(self, processes: Processes, now: float) -> None:
        """Record whether the processes of workers on this host are running."""
        # A worker whose process has ended is dead shortly after, even if it never said goodbye.
        for (peer, token), how in processes.ended().items():
            if self.is_session(peer, token):
                session = self._sessions.find(peer, token)
                session.how_ended = session.how_ended or how
                hello = session.hello
                if session.state is not ProcessState.ENDED:
                    session.state, session.seen_at = ProcessState.ENDED, now
                    space = self.namespaces[hello.namespace]  # checked rarely if large
                    space.next_check = min(space.next_check, now + FINAL_MESSAGE_TIME)
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
                session.state = ProcessState.UNKNOWN  # it is alive
            elif now - session.last_heartbeat > patience:
                session.state = processes.state((session.peer, session.token))
                if session.state is ProcessState.RUNS:
                    session.seen_at = now

    def reset_liveness(self, now: float) -> None:
        """Reset the silence of every worker; used when it was this server that could not receive."""
        for space in self.namespaces.values():
            for member in space.membership.members.values():
                member.last_heard = now

    def stop(self) -> None:
        """Start draining: rounds that have begun may complete, new ones are refused."""
        self._from_stop += self._read_unread()  # they have begun
        self.is_stopping = True

    def abandon(self, now: float) -> list[m.Outgoing]:
        """Fail every wait because the server ends now, and notify every member; nothing is kept for a next process."""
        durability, self._durability = self._durability, None
        if durability is not None:
            durability.erase()
        out = self._read_unread()
        for space in self.namespaces.values():
            for pending in list(self._pending(space)):
                who = space.membership.describe_all(pending.missing, now)
                out += pending.fail(
                    ServerStoppingError(
                        f"server {self.config.server} was shut down while {pending.what} waited: "
                        f"{who or 'no rank had decided about its sum yet'}; "
                        "restart the job from its last saved states"
                    )
                )
        notice = ServerStoppingError(f"server {self.config.server} was shut down")
        if self.snapshots is not None:
            self.snapshots.close()
        return out + [_make_failed(Waiter(session.peer, 0), notice) for session in self._sessions]

    def is_idle(self) -> bool:
        has_unread = self.captures is not None and self.captures.unread
        return not (
            has_unread or self._from_stop or any(space.is_waiting() for space in self.namespaces.values())
        )

    # ---------------------------------------------------------------- rounds

    def _contribute(self, sender: Sender, body: m.Contribute) -> list[m.Outgoing]:
        """Store slices, then count commits; every round that becomes complete is applied or held."""
        space, commits = sender.space, body.commits
        has_pushes = len(body.pushes) > 0
        batch = space.batch_of(commits[:, m.COMMIT_TABLE]) if len(commits) else None
        out: list[m.Outgoing] = []
        if batch is not None and space.views is not None and not commits[0, m.COMMIT_FLAGS] & m.REPEATS:
            is_follower = bool(commits[0, m.COMMIT_FLAGS] & m.FOLLOWS)
            check = follow if is_follower else check_view
            refusal = check(space, sender.rank, sender.waiter, body, sender.now)
            if isinstance(refusal, DelayedRequest):
                refusal = _delay_request(space, refusal, sender.now)
            if refusal is not None:
                out, batch = refusal, None
        # 1. An intent declared ahead of the slices. It is optional: without it the round is applied after all commits.
        if batch is not None and commits[0, m.COMMIT_FLAGS] & m.DECLARES_INTENT:
            has_backup = space.views is not None and space.views.backup_workers > 0
            if self.is_stopping or space.name in self.updaters or has_backup:
                return []
            return pipelined.declare_intent(space, sender.rank, body, sender.waiter)
        # 2. Slices. They are provisional until their rank commits.
        if has_pushes:
            space.push(sender.rank, body)
            space.note_begun()
        if space.rounds.pipelined and has_pushes:
            out += pipelined.advance(
                space, [m.unpack_slot(word)[0] for word in body.pushes[:, m.PUSH_SLOT].tolist()]
            )
        if batch is None:
            return out
        if self.captures is not None and space.views is None and space.mode.is_sync:
            request = m.Request(self.config.run_id, sender.session, sender.waiter.number, body)
            self.captures.note(space, sender.rank, sender.waiter.peer, request)
        # 3. Commits. With asynchronous contributions tables may be in different trackers: the first round is shared.
        for tracker, mine in space.rounds.trackers(sender.rank, batch.numbers, commits[:, m.COMMIT_ROUND]):
            if mine is not None:
                commits, batch = body.commits[mine], space.batch_of(body.commits[mine, m.COMMIT_TABLE])
            out += self._commit(sender, tracker, commits, batch, body)
        return out

    def _commit(
        self, sender: Sender, tracker: RoundTracker, commits: m.Matrix, batch: TableBatch, body: m.Contribute
    ) -> list[m.Outgoing]:
        space, rank, now = sender.space, sender.rank, sender.now
        out: list[m.Outgoing] = []
        # 1. Refuse what cannot count, table by table, before anything is recorded.
        if self.is_stopping or body.hyper or any([table.conflict is not None for table in batch.tables]):
            rounds = commits[:, m.COMMIT_ROUND].tolist()
            errors = [
                self._why_refused(tracker, *one, body.hyper) for one in zip(batch.tables, rounds, strict=True)
            ]
            for table, round_, error in zip(batch.tables, rounds, errors, strict=True):
                if error is not None:
                    out.append(_make_failed(sender.waiter, error, table.number, round_))
            commits = commits[[error is None for error in errors]]
            batch = space.batch_of(commits[:, m.COMMIT_TABLE])
        # 2. Record the commits. `statuses` is None if all were accepted, which is the common case.
        statuses = tracker.commit(rank, commits, body, sender.waiter, now)
        space.note_begun()
        if statuses is not None:
            batch = space.batch_of(batch.numbers[statuses == CommitStatus.ACCEPTED])
            out += self._answer_uncounted(sender, tracker, commits, statuses, body)
        space.log_rounds("committed", tracker, batch.tables, rank)
        # 3. Store what the rank said with them: keys it leaves out, hyper-parameters, what its successor gets.
        if body.client_state:
            space.keep_client_state(rank, batch.tables, tracker, body.client_state)
        if body.hyper and space.changes is not None:
            space.changes.note_hypers(batch.number_list)
        for table in batch.tables if body.absent or body.hyper else ():
            left_out = frozenset(key for number, key in body.absent if number == table.number)
            if left_out:
                space.absent[table.number, rank] = left_out
            if body.hyper:
                table.hyper.set(rank, body.hyper)
                space.num_option_changes += 1
        # 4. End the rounds that are complete now.
        if space.views is not None:
            out += self._changes.close_round(space, now)
            return out + self._finish_if_complete(space, now)
        committed = tracker.num_committed[batch.numbers]
        num_complete = committed.tolist().count(tracker.num_members)
        if 0 < num_complete < len(committed):
            batch = space.batch_of(batch.numbers[committed == tracker.num_members])
        if num_complete:
            out += self._finish(space, tracker, batch, now)
        return out

    def _finish_if_complete(self, space: Namespace, now: float) -> list[m.Outgoing]:
        """End the open round of a table whose members may change, if it has the commits of all of them."""
        [table], shared, views = space.tables, space.rounds.shared, space.views
        assert views is not None
        round_, num_committed = shared.number(table.number), int(shared.num_committed[table.number])
        if table.held is not None or not views.is_complete(round_, num_committed):
            return []
        shared.forget_others()
        return self._finish(space, shared, space.batch_of(np.array([table.number])), now)

    def _close_round(self, sender: Sender, body: m.CloseRound) -> list[m.Outgoing]:
        """Let the open round have the members with which the coordinator has closed it."""
        space, table = sender.space, sender.space.table(body.table)
        view, views = MemberView(body.view, body.ranks, 0, body.round), space.views
        if views is None or not views.backup_workers:
            raise ProtocolError(
                f"rank {sender.rank} closes a round of namespace {space.name!r}, which has no backup workers"
            )
        is_open = body.round == space.rounds.shared.number(table.number)
        if not is_open or space.is_coordinator or view.number <= views.current.number:
            return []  # it is known already
        views.check(body.ranks[0] if body.ranks else sender.rank, view)
        adopt(space, view, sender.now)
        return self._finish_if_complete(space, sender.now)

    def _why_refused(
        self, tracker: RoundTracker, table: Table, round_: int, hyper: bytes
    ) -> KVStoreError | None:
        if table.conflict is not None:
            return _copy_error(table.conflict)
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

    def _answer_uncounted(
        self, sender: Sender, tracker: RoundTracker, commits: m.Matrix, statuses: Ints, body: m.Contribute
    ) -> list[m.Outgoing]:
        """Answer the commits that were not accepted: repeated ones, and those of other rounds or without slices."""
        space, rank, waiter, now = sender.space, sender.rank, sender.waiter, sender.now
        out: list[m.Outgoing] = []
        waiting: list[int] = []
        again: list[Committed] = []
        whose = ALL if tracker is space.rounds.shared else rank
        for (number, round_, count, _, version, flags), status in zip(
            commits.tolist(), statuses.tolist(), strict=True
        ):
            table = space.tables[number]
            # Of a round that is held: the first `Held` may have been lost.
            if status == CommitStatus.REPEATED and table.held is not None and body.hold:
                out += _answer_norms(table, round_, waiter, table.held.sum.partials)
            elif status == CommitStatus.REPEATED:
                waiting.append(number)
            elif status == CommitStatus.REFUSED and flags & m.REPEATS and rank not in tracker.members:
                # A rank that becomes a member with the next round asks how this one ends.
                commit, deadline = Committed(number, round_, version, flags), now + body.timeout
                answer = partial(_answer_ended, space, tracker, whose, rank, waiter, commit)
                wait = DelayedRequest(number, rank, waiter, deadline, body.timeout, False, answer, round_)
                wait.opens = round_ + 1
                out += _delay_request(space, wait, now)
            elif status == CommitStatus.REFUSED:
                out += _make_reply(
                    waiter, m.Missing(number, round_, tracker.missing_slots(rank, number, count))
                )
            elif status == CommitStatus.FAILED:
                out.append(_answer_failed(tracker, waiter, number, round_))
            elif status == CommitStatus.AHEAD:
                what = f"rank {rank} committed round {round_} while round {tracker.number(number)} is open"
                out.append(_make_failed(waiter, ProtocolError(what), number, round_))
            elif status == CommitStatus.APPLIED:
                again.append(Committed(number, round_, version, flags))
                if body.hold and not table.ends[whose].vetoes:
                    # The first `Held` may have been lost, so it is sent again before the outcome.
                    out += _answer_norms(table, round_, waiter, table.ends[whose].partials)
        views = space.views
        if views is not None and space.is_coordinator and (waiting or again):
            # Of a round that was closed with this rank; the first message may have been lost.
            closed = views.current if waiting else views.ended
            if closed.closes >= 0 and closed.closes in (one[1] for one in commits.tolist()):
                out += tell_closed(space, waiter, closed)
        if waiting:
            missing = tracker.missing_ranks(waiting[0])
            out += _still_waiting(space, waiter, space.open_round(waiting[0]), missing, now)
        if again and space.is_coordinator:
            out += tell_members(space, waiter)
        return out + _answer_commits(space, whose, rank, waiter, again, (now, body.timeout))

    def _finish(
        self,
        space: Namespace,
        tracker: RoundTracker,
        batch: TableBatch,
        now: float,
        decision: Decision | None = None,
    ) -> list[m.Outgoing]:
        """Apply complete rounds and answer, fail them for all members, or hold them for a decision."""
        out: list[m.Outgoing] = []
        # 1. Apply: tables that can share one update first, the others one by one.
        is_shared = tracker is space.rounds.shared
        ended, others, update = None, batch.number_list, None
        if is_shared and decision is None:
            ended, others, update = self._apply_batch(space, tracker, batch, out)
        applied: list[int] = []
        for number in others:
            if self._finish_one(space, tracker, space.tables[number], decision, out):
                applied.append(number)
        if applied or ended is None:
            before = [] if ended is None else ended.number_list
            ended = space.batch_of(np.array(before + applied, np.int64))
        # 2. Collect the answers, one for each waiting request, before the trackers forget the requests.
        answers: list[Answer] = []
        is_full = space.shard.hash_tables and any([table.full for table in ended.tables])
        is_plain = not applied and not is_full
        for rank, inputs in tracker.inputs.items():
            answers += _list_answers(tracker, rank, inputs, ended, is_plain)
        if space.absent:
            space.forget_absent(ended.number_list)
        space.note_tables(ended.number_list)
        # 3. Close the rounds, and advance the clocks of asynchronous ranks.
        space.log_rounds("applied", tracker, ended.tables)
        space.shard.storage.end_change(ended.all_slots)
        tracker.finish(ended.numbers, ended.all_slots)
        for rank, inputs in tracker.inputs.items() if not is_shared else ():
            for number, flag in zip(ended.number_list, inputs.flags[ended.numbers].tolist(), strict=True):
                space.rounds.advance(rank, number)
                space.waits.contributed(number, rank, now)
                if flag & m.HAS_JOINED:
                    space.rounds.joined(number).add(rank)
        # 4. Reply. Ranks that want the same weights of the same tables share one message body.
        if space.views is not None and len(ended.numbers):
            out += self._changes.end_round(space, [answer.waiter for answer in answers])
        asked = [(one.rank, one.flags, one.waiter) for one in answers if one.flags]
        out += space.answer_plainly(ended, asked)
        for rank, waiter, flags, commits, timeout in answers:
            if flags is None:
                out += _answer_commits(
                    space, ALL if is_shared else rank, rank, waiter, commits, (now, timeout)
                )
            elif not flags:
                versions = [table.version for table in ended.tables]
                rows = np.array((ended.number_list, tracker.numbers[ended.numbers] - 1, versions)).T
                out.append(m.Outgoing(waiter.peer, m.Reply(waiter.number, m.Done(rows))))
        if self.captures is not None and update is not None and all([one.flags for one in answers]):
            self.captures.capture(space, ended, update)
        return out + self._release(space) if space.waits.all else out

    def _finish_one(
        self,
        space: Namespace,
        tracker: RoundTracker,
        table: Table,
        decision: Decision | None,
        out: list[m.Outgoing],
    ) -> bool:
        """Apply the open round of one table; return whether it was. If not, `out` receives the messages to send."""
        number = table.number
        try:
            rest = pipelined.finish(space, table) if table.pipelined is not None else None
            if rest is not None or self._apply(space, tracker, table, decision):
                out += rest or ()
                return True
            space.log_rounds("held", tracker, [table])
            for inputs in tracker.inputs.values():  # those that have data and want to decide
                waiter, info = inputs.waiters[number], inputs.commit_infos[number]
                if waiter is not None and info is not None and info.hold and table.held:
                    out += _answer_norms(table, tracker.number(number), waiter, table.held.sum.partials)
        except KVStoreError as error:
            out += self._fail(space, tracker, table, error)
        except Exception as error:
            _log.exception("round %d of table %r failed", tracker.number(number), table.name)
            out += self._fail(space, tracker, table, self._internal_error(error))
        return False

    def _apply_batch(
        self, space: Namespace, tracker: RoundTracker, batch: TableBatch, out: list[m.Outgoing]
    ) -> tuple[TableBatch | None, list[int], BatchUpdate | None]:
        """Sum and update all batchable tables in one call; `out` receives the messages of rounds that fail.

        Returns the tables that were updated, or None, the numbers of tables that must be updated one by one, and how
        those were updated, if it was all of them.
        """
        num_tables = len(batch.tables)
        # 1. Which tables can share one call. A user's updater is called table by table.
        try:
            optimizer = space.optimizer.agreed()
        except KVStoreError:
            return None, batch.number_list, None
        can_batch, others = space.can_batch(tracker, batch, optimizer), list[int]()
        if True not in can_batch or space.name in self.updaters:
            return None, batch.number_list, None
        if False in can_batch or not batch.is_ascending:
            others = [
                n for n, is_batchable in zip(batch.number_list, can_batch, strict=True) if not is_batchable
            ]
            batch = space.batch_of(np.sort(batch.numbers[can_batch]))
        # 2. Agree on the hyper-parameters of each table. Ranks that disagree make only that table's round fail.
        packed: list[bytes] = []
        hypers: list[Sequence[Mapping[str, Any]]] = []
        agreed: list[int] = []
        for table in batch.tables:
            try:
                hyper = table.hyper.common(tracker.inputs)
                hypers.append(() if optimizer is None else table.hypers((), optimizer, hyper))
            except KVStoreError as error:
                out += self._fail(space, tracker, table, error)
            else:
                packed.append(hyper)
                agreed.append(table.number)
        if not agreed:
            return None, others, None
        if len(agreed) < len(batch.number_list):
            batch = space.batch_of(np.array(agreed))
        # 3. Sum and update all of them at once.
        try:
            first = batch.number_list[0]  # in a batch each rank's terms are the same for all tables
            ranks = tracker.inputs.values()
            contributions = [
                space.contribution(one.commit_infos[first], optimizer, one.ranges(batch.all_slots))
                for one in ranks
            ]
            update = BatchUpdate(optimizer, hypers, packed)
            space.update_tables(batch, contributions, update)
        except KVStoreError as error:  # nothing has changed
            for table in batch.tables:
                out += self._fail(space, tracker, table, error)
            return None, others, None
        except Exception as error:
            _log.exception("the update of %d tables failed", len(batch.tables))
            for table in batch.tables:
                out += self._fail(space, tracker, table, table.break_off(error))
            return None, others, None
        is_whole = not others and len(batch.tables) == num_tables
        return batch, others, update if is_whole else None

    def _apply(
        self, space: Namespace, tracker: RoundTracker, table: Table, decision: Decision | None
    ) -> bool:
        trace = space.recording.active
        start = 0.0 if trace is None else trace.clock()
        round_, is_shared = tracker.number(table.number), tracker is space.rounds.shared
        parts: dict[int, RankCommit] = {}
        if decision is not None:
            # The sums were kept when the round was held; only the decision is new.
            table.apply_held(decision)
        else:
            optimizer = space.optimizer.agreed()
            found = [(rank, space.rank_commit(rank, tracker, table, optimizer)) for rank in tracker.inputs]
            parts = {rank: part for rank, part in found if part is not None}
            updater = self.updaters.get(space.name)
            if table.hold(parts, optimizer, updater):
                return False
            # Ranks without data have no say in hyper-parameters.
            without = space.rounds.joined(table.number) | space.rounds.left
            whose = ALL if is_shared else found[0][0]
            table.apply(whose, round_, parts, optimizer, updater, without)
        if trace is not None:
            nbytes = sum(part.contribution.nbytes for part in parts.values())
            described = {"round": round_, "ranks": tracker.num_members, "bytes": nbytes}
            trace.add(table.name, ROUNDS, start, ROUND_LANE, described)
        return True

    def _fail(
        self, space: Namespace, tracker: RoundTracker, table: Table, error: KVStoreError
    ) -> list[m.Outgoing]:
        number = tracker.number(table.number)
        space.record_failure(error)
        space.note_tables([table.number])
        space.log_rounds("failed", tracker, [table], error=error)
        space.forget_absent([table.number])
        if tracker is space.rounds.shared:
            pipelined.roll_back(space, table)
            table.fail(ALL)
        else:
            [rank] = tracker.inputs
            table.fail(rank)
            space.rounds.advance(rank, table.number)
        waiters = tracker.fail(table.number, error)
        self._changes.reopen(space)
        told = self._changes.remove_leaving(space)
        return told + [_make_failed(waiter, error, table.number, number, number + 1) for waiter in waiters]

    def _abort(self, sender: Sender, abort: m.Abort) -> list[m.Outgoing]:
        space, rank, table = sender.space, sender.rank, sender.space.table(abort.table)
        kind = RepeatedRoundError if abort.is_repeated else RoundAbortedError
        error = kind(
            f"rank {rank} aborted round {abort.round} of {table.name!r}: {abort.reason[:MAX_REASON]}"
        )
        tracker = space.rounds.tracker(rank, table.number, abort.round)
        tracker.of(rank)
        whose = ALL if tracker is space.rounds.shared else rank
        number, out = tracker.number(table.number), list[m.Outgoing]()
        if abort.round == number and is_left_out(space, rank, number):
            lost = space.membership.lost(sender.now, self.config.dead_after)
            gone = {*lost, *space.membership.departed, *(space.views.leaving if space.views else ())}
            if gone.isdisjoint(tracker.missing_ranks(table.number)):
                return _make_status(sender, {"applied": True})  # it has no part in it
        if abort.round == number:
            out += self._fail(space, tracker, table, error)
        # Another server failed the round that this one has applied: undo it while no slice of the next has arrived.
        elif abort.undo and abort.round == number - 1:
            space.undo_last_round(tracker, table, whose, error, rank)
        for wait in space.waits.take(
            lambda wait: (wait.table, wait.rank, wait.round) == (table.number, rank, abort.round)
        ):
            out += _fail_wait(space, wait, error)
        return out + _make_status(sender, {"applied": tracker.was_applied(table.number, abort.round)})

    def _resolve(self, sender: Sender, resolve: m.Resolve) -> list[m.Outgoing]:
        """Apply a held round as a rank decided. A round that is already over stays as it is."""
        space, table = sender.space, sender.space.table(resolve.table)
        shared, rank = space.rounds.shared, sender.rank
        number = shared.number(table.number)
        decision = Decision(resolve.coef, resolve.clip_value, resolve.skip)
        # Over already, as a rule because another rank decided first. Its decision must have been the same.
        if resolve.round < number:
            is_last = resolve.round == number - 1 and shared.was_applied(table.number, resolve.round)
            space.note_tables([table.number])
            if is_last and not table.record_decision(decision):
                _log.warning("rank %d decided differently about round %d of %r than the rank before it: %s", rank,
                             resolve.round, table.name, decision)  # fmt: skip
            return []
        if resolve.round > number:
            raise ProtocolError(
                f"rank {rank} decides about round {resolve.round} of {table.name!r}, but round {number} is open"
            )
        # An earlier process of this server held the sum. The commits come again, and then the decision.
        if table.held is None:
            return []
        batch = space.batch_of(np.array([table.number]))
        return self._finish(space, shared, batch, sender.now, decision)

    # ---------------------------------------------------------------- reads

    def _read(self, sender: Sender, wanted: m.Pull | m.PullRows) -> list[m.Outgoing]:
        space, rank, waiter, timeout = sender.space, sender.rank, sender.waiter, wanted.timeout
        numbers = list(wanted.tables) if isinstance(wanted, m.Pull) else [space.table(wanted.table).number]
        if isinstance(wanted, m.PullRows):
            space.check_named("pull of rows", range(len(wanted.keys)))
        for table in space.batch_of(np.array(numbers, np.int64)).tables:
            if table.conflict is not None:
                raise _copy_error(table.conflict)
            if not table.is_initialised:
                raise KeyNotFoundError(
                    f"table {table.name!r} has not been initialised yet; call init on every worker first"
                )
        behind = list[int]()
        # A partly applied round must not be read, and a bounded rank may be too far ahead: those tables wait.
        if space.rounds.pipelined or space.rounds.bound is not None:
            pipelined.roll_back_for_read(space, rank, numbers)
            behind = [number for number in numbers if space.rounds.behind(rank, number)]
        out = _answer_pull(
            space, rank, waiter, wanted, [number for number in numbers if number not in behind]
        )
        for number in behind:
            answer = partial(_answer_pull, space, rank, waiter, wanted, [number])
            out += _delay_request(
                space,
                DelayedRequest(number, rank, waiter, sender.now + timeout, timeout, False, answer),
                sender.now,
            )
        return out

    def _map_rows(self, sender: Sender, body: m.MapRows) -> list[m.Outgoing]:
        return _make_reply(sender.waiter, sender.space.mapped_rows(sender.space.table(body.table)))

    def _release(self, space: Namespace) -> list[m.Outgoing]:
        ready = space.waits.take_ready()
        for number in dict.fromkeys(wait.table for wait in ready if wait.is_join):
            space.rounds.end_join(number)
            space.note_tables([number])
        return [out for wait in ready for out in wait.answer()]

    # ---------------------------------------------------------------- what takes too long

    def _open_round(self, space: Namespace, number: int) -> RankWait:
        shared, table = space.rounds.shared, space.tables[number]
        fail = partial(self._fail, space, shared, table)
        return RankWait(
            space.open_round(number), *shared.times(number), shared.missing_ranks(number), fail, table
        )

    def _pending(self, space: Namespace, tables: Iterable[int] | None = None) -> Iterator[RankWait]:
        """Iterate over what ranks wait for: open rounds (of `tables`; None: all), delayed requests, the barrier."""
        members = space.membership
        waiting = np.flatnonzero(space.rounds.shared.num_committed).tolist() if tables is None else tables
        for number in waiting:
            yield self._open_round(space, number)
        for wait in list(space.waits.all.values()):

            def fail(error: KVStoreError, wait: DelayedRequest = wait) -> list[m.Outgoing]:
                space.waits.remove(wait)
                return _fail_wait(space, wait, error)

            missing = wait.missing(space.rounds)
            if wait.is_entry:  # the others may all be about to finish
                missing = [rank for rank in missing if rank not in members.finished]
            yield RankWait(
                space.describe_wait(wait), wait.since, wait.deadline, missing, fail, space.tables[wait.table]
            )
        if members.barrier:
            since = min(wait.since for wait in members.barrier.values())
            deadline = min(wait.deadline for wait in members.barrier.values())

            def end(error: KVStoreError) -> list[m.Outgoing]:
                return [_make_failed(waiter, error) for waiter in members.take_barrier()]

            yield RankWait(
                f"barrier {members.barrier_sequence}", since, deadline, members.absent_from_barrier(), end
            )

    def _why_stuck(self, space: Namespace, pending: RankWait, now: float) -> KVStoreError | None:
        table, what = pending.table, pending.what
        if table is not None and table.conflict is not None:
            return _copy_error(table.conflict)
        lost = None
        if not self._awaits_coordinator(space, pending, now):
            lost = space.membership.lost_error(pending.missing, what, now, self.config.dead_after)
            leaving = None if space.views is None or space.is_coordinator else space.views.leaving
            if leaving is not None and (lost is not None or leaving.intersection(pending.missing)):
                # The coordinator has not gone on without the rank, so it has the rank's commit.
                who = space.membership.describe_all(pending.missing, now)
                return RepeatedRoundError(
                    f"{what} lacks a contribution on server {self.config.server} that other servers have, because its "
                    f"worker was lost in between: {who}"
                )
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

    def _awaits_coordinator(self, space: Namespace, pending: RankWait, now: float) -> bool:
        """Return whether the coordinator may still decide to go on without the ranks that are missing here."""
        if space.views is None or space.is_coordinator:
            return space.views is not None and not space.views.current.ranks
        return now - pending.since < 2 * self.config.rejoin_timeout + self.config.dead_after

    # ---------------------------------------------------------------- members and tables

    def _heartbeat(self, sender: Sender, body: m.Heartbeat) -> list[m.Outgoing]:
        if body.report:
            sender.space.membership.members[sender.rank].report = read_report(body.report)
        return _make_reply(sender.waiter, m.Pending(()))

    def _facts_at(self, now: float) -> Mapping[str, Any]:
        """Return the status shown to people; built again only once the last one is older than `FRESH`."""
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
                    "jobs": [space.facts(self._pending(space), now) for space in spaces[:MAX_JOBS]],
                    **({} if self.snapshots is None else {"snapshots": self.snapshots.facts()}),
                },
            )
        return self._facts[1]

    def _register(self, sender: Sender, register: m.Register) -> list[m.Outgoing]:
        space, shared = sender.space, sender.space.rounds.shared
        try:
            space.check_named("declaration", range(len(register.specs)))
            table = space.register(sender.rank, register)
        except PlanMismatchError as error:
            answers = [_make_failed(sender.waiter, error)]
            for table in space.tables:
                if table.conflict is error:
                    space.note_tables([table.number])
                if table.conflict is error and shared.num_committed[table.number]:
                    answers += self._fail(space, shared, table, error)
            return answers
        if isinstance(table, int):
            return _make_status(sender, {"keys": table})
        slot, number = int(space.rounds.slots.first[table.number]), table.number
        following = space.rounds.next_round(sender.rank, number, sender.rank in space.membership.resumable)
        has_committed = shared.has_committed(sender.rank, number)
        states = tuple([state for _, state in space.client_states.get((number, sender.rank), ())])
        is_member = sender.rank in shared.members
        told = m.Registered(number, slot, following, has_committed, states, is_member)
        return _make_reply(sender.waiter, told)

    def _set_optimizer(self, sender: Sender, body: m.SetOptimizer) -> list[m.Outgoing]:
        sender.space.check_restored(body.spec)
        # A pipelined round was begun with the former optimizer.
        for number in (
            () if sender.space.optimizer.is_known(body.spec) else list(sender.space.rounds.pipelined)
        ):
            pipelined.roll_back(sender.space, sender.space.tables[number])
        try:
            sender.space.set_optimizer(sender.rank, body.spec)
        except UnknownNameError as error:
            raise UnknownNameError(f"server {self.config.server} cannot run the optimizer: {error}") from None
        return _make_status(sender)

    def _get_state(self, sender: Sender, body: m.GetState) -> list[m.Outgoing]:
        table = sender.space.table(body.table)
        pipelined.roll_back_for_read(sender.space, sender.rank, [table.number])
        packed = pack_states(table.shard.get_state(table.unit, body.index, since=body.since))
        history = table.shard.history(table.unit, body.index)
        return _make_reply(sender.waiter, m.SliceState(body.table, body.index, *packed, history))

    def _put_state(self, sender: Sender, body: m.SliceState) -> list[m.Outgoing]:
        table = sender.space.table(body.table)
        pipelined.roll_back_for_read(sender.space, sender.rank, [table.number])
        table.shard.slot_of(table.unit, body.index)
        slice_ = table.plan.slices[body.index]
        states = unpack_states(slice_, body.summary, body.data)
        table.shard.put_state(table.unit, body.index, states, body.history)
        sender.space.note_tables([table.number])
        return _make_status(sender)

    def _command(self, sender: Sender, command: m.Command) -> list[m.Outgoing]:
        session, number = self._sessions.known(sender.session), sender.waiter.number
        assert session is not None
        answer = repeated_answer(session.command, number, command)
        if answer is None:
            if self._durability is not None:
                # A next process must know that it has begun, because what it did before a kill is unknown.
                session.command = CommandAnswer(number, self._commands.interrupted(command))
                self._note_session(session.token)
                self._durability.commit(self.namespaces, self._sessions, self._finished)
            answer = self._commands.run(command)
            session.command = CommandAnswer(number, answer)
            self._note_session(session.token)
        return _make_reply(sender.waiter, answer)

    def _gather(self, sender: Sender, gather: m.Gather) -> list[m.Outgoing]:
        space, members = sender.space, sender.space.membership
        if space.views is not None:
            raise ConfigurationError(
                "workers cannot meet at a barrier, nor exchange anything beside their rounds, in a job whose members "
                "may change"
            )
        released = members.enter_barrier(sender.rank, gather, sender.waiter, sender.now)
        if not released:
            what = f"barrier {gather.sequence}"
            return _still_waiting(space, sender.waiter, what, members.absent_from_barrier(), sender.now)
        space.note_members()
        return [out for one, parts in released for out in _make_reply(one, m.Gathered(parts))]

    def _hello(self, peer: bytes, hello: m.Hello, now: float) -> m.Welcome:
        # 1. A repeated hello: the first answer may be lost or still on its way.
        known = self._sessions.repeated(peer, hello)
        if known is not None:
            known.last_heard = now
            return self._welcome(known.token)
        space = self.namespaces.get(hello.namespace)
        session = self._sessions.new(peer, hello, now)
        # 2. Check everything before anything changes. A refusal is recorded, so that ranks that wait are told why.
        try:
            if self.is_stopping:
                raise ServerStoppingError(f"server {self.config.server} is stopping and takes no new workers")
            _check_hello(self.config, hello)
            mode = Mode(hello.mode, hello.staleness, hello.slow_down, hello.by_host)
            mode.check()
            if space is None and hello.restarts and hello.namespace in self._finished:
                raise FencedError(
                    f"all workers of namespace {hello.namespace!r} have finished, so the process that rank "
                    f"{hello.rank} was started again for has nothing left to do"
                )
            if space is None:
                space = self._new_namespace(hello, mode, now)
            elif mode != space.mode:
                raise ConfigurationError(
                    f"rank {hello.rank} ({hello.address}) wants mode {mode}, the ranks before it {space.mode}; create "
                    "the same kvstore on every worker"
                )
            self._check_is_latest(space, hello)
            check_worker_counts(space, hello)
            replaced = space.membership.join(session)
        except ConfigurationError as error:
            if space is not None:
                space.membership.refuse(hello.rank, f"it was refused: {error}")
                space.note_members()
            raise
        # 3. The rank is in. A former process of the same rank is fenced, and what it had not committed is dropped.
        if hello.namespace not in self.namespaces:
            self.namespaces[hello.namespace] = space
            space.begin()
        self._left.pop(hello.namespace, None)
        self._sessions.open(session)
        self._note_session(session.token)
        if space.views is not None:
            space.views.keep_returned(hello.rank)
        if replaced is not None and not replaced.has_left:
            self._fence(
                replaced.token,
                f"rank {hello.rank} was taken over by {hello.address}; if that is another job on the same servers, "
                "give each its own namespace=…",
            )
        space.begin_process(hello.rank, hello.resumes)
        pipelined.roll_back_broken(space)
        return self._welcome(session.token)

    def _check_is_latest(self, space: Namespace, hello: m.Hello) -> None:
        """Refuse a process that was held up at its start, so that its successor, which lives, came first."""
        known = space.membership.members.get(hello.rank)
        if known is None or known.state is ProcessState.ENDED or hello.restarts >= known.hello.restarts:
            return
        raise FencedError(
            f"rank {hello.rank} was taken over by {known.hello.address}, which was started after this process "
            f"({known.hello.restarts} restarts, here {hello.restarts})"
        )

    def _welcome(self, token: int) -> m.Welcome:
        config = self.config
        has_snapshots = self.snapshots is not None
        return m.Welcome(config.run_id, token, config.spread_from, config.restart_timeout, has_snapshots)

    def _note_session(self, token: int) -> None:
        session = self._sessions.known(token)
        space = None if session is None else self.namespaces.get(session.hello.namespace)
        if space is not None and space.changes is not None:
            space.changes.note_session(token)

    def _new_namespace(self, hello: m.Hello, mode: Mode, now: float) -> Namespace:
        config = self.config
        if len(self.namespaces) >= config.max_namespaces and not self._reclaim(now):
            raise ConfigurationError(
                f"server {config.server} has {len(self.namespaces)} namespaces and accepts up to "
                f"{config.max_namespaces} (--max-namespaces); a namespace ends with its last worker, or when none of "
                f"its workers was heard from for {config.forget_after:g} s (--forget-after), without weights for "
                f"{config.dead_after:g} s (--dead-after), or earlier if another one needs its place"
            )
        space = self._make_space(
            hello.namespace,
            hello.num_workers,
            mode,
            now,
            (hello.initial_workers, hello.min_workers, hello.backup_workers),
        )
        self.budget.check(space.least_memory, f"namespace {hello.namespace!r}")
        return space

    def _make_space(
        self,
        name: str,
        num_workers: int,
        mode: Mode,
        now: float,
        limits: tuple[int, int, int],
        number: int | None = None,
    ) -> Namespace:
        """`limits`: how many ranks begin, how many must be left, and how many a round leaves out, if members may
        change; otherwise zeros.
        """
        if limits != (0, 0, 0) and (not mode.is_sync or mode.by_host):
            raise ConfigurationError(
                f"the members of namespace {name!r} may change, which is possible with synchronous rounds of single "
                f"workers only; its mode is {mode}"
            )
        views = None if limits == (0, 0, 0) else Views(num_workers, *limits)
        durable = None if self._durability is None else self._durability.begin(name, number)
        resumable = self._resumable.setdefault(_job_of(name), set())
        space = Namespace(
            name,
            num_workers,
            mode,
            self.config,
            self.budget,
            self._leases,
            now,
            resumable,
            durable,
            views,
            self._spill,
        )
        space.membership.is_used_again = name in self._finished
        space.lineage = self._lineages.get(_job_of(name), Lineage())
        return space

    def _forget_if_silent(self, space: Namespace, silence: float) -> None:
        if space.has_values and silence > self.config.forget_after:
            self._free(space, silence, "--forget-after")
        elif not space.has_values and silence > self.config.dead_after:
            self._free(space, silence, "--dead-after")

    def _reclaim(self, now: float) -> bool:
        """Free the longest silent namespace without weights if it missed some heartbeats; return whether it did."""
        empty = [space for space in self.namespaces.values() if not space.has_values]
        heard, space = min(
            [(one.membership.last_heartbeat(now), one) for one in empty],
            key=itemgetter(0),
            default=(now, None),
        )
        if space is None or now - heard <= self.config.dead_after * _RECLAIMABLE_AFTER:
            return False
        self._free(space, now - heard, "--max-namespaces")
        return True

    def _free(self, space: Namespace, silence: float, option: str) -> None:
        _log.warning(
            "namespace %r is freed: none of its workers was heard from for %.0f s", space.name, silence
        )
        for member in [one for one in space.membership.members.values() if not one.has_left]:
            self._fence(
                member.token,
                f"no worker of namespace {space.name!r} was heard from for {silence:.0f} s, so it was freed "
                f"({option}); restart the job from its last saved states",
            )
        self._end(space)

    def _end_or_keep(self, space: Namespace, lost: Collection[int]) -> None:
        """End a namespace that all workers have left; keep what was gathered there for successors that repeat it.

        Only a few that have no tables are kept, and only while the job has others. `lost`: as for `_end`.
        """
        job = _job_of(space.name)
        if (
            space.tables
            or not self._resumable.get(job)
            or not self._open_namespaces(job).difference([space.name])
        ):
            self._end(space, lost)
            return
        self._left[space.name] = job
        of_job = [name for name, other in self._left.items() if other == job]
        if len(of_job) > _LEFT_KEPT:
            self._end(self.namespaces[of_job[0]])

    def _open_namespaces(self, job: str) -> set[str]:
        return {name for name in self.namespaces if _job_of(name) == job and name not in self._left}

    def _end(self, space: Namespace, lost: Collection[int] = ()) -> None:
        """End a namespace. `lost`: the members without which the others have gone on."""
        del self.namespaces[space.name]
        if self._durability is not None:
            self._durability.end(space.name)
        space.end()
        if self.captures is not None:
            self.captures.forget(space)
        self.num_ended += 1
        job = _job_of(space.name)
        self._left.pop(space.name, None)
        if not self._open_namespaces(job):
            self._resumable.pop(job, None)
            self._lineages.pop(job, None)
            if self.snapshots is not None:
                self.snapshots.end(job_of(job))
            kept = [name for name, other in self._left.items() if other == job]
            self._left = {name: other for name, other in self._left.items() if other != job}
            for name in kept:
                self._end(self.namespaces[name])
        self._finished.pop(space.name, None)
        if self._has_finished(space, lost):
            self._finished[space.name] = None
            if self.snapshots is not None and not self._open_namespaces(job):
                self.snapshots.forget(job_of(job))
            if len(self._finished) > _FINISHED_KEPT:
                self._finished.popitem(last=False)

    def _has_finished(self, space: Namespace, lost: Collection[int]) -> bool:
        """Return whether all workers of a namespace that ends were done, except for lost members."""
        if space.views is None or space.tables:
            return space.have_members_finished(lost)
        return any(
            _job_of(name) == _job_of(space.name) for name in self._finished
        )  # only tables have members

    # ---------------------------------------------------------------- snapshots

    def _snapshot(self, sender: Sender, body: m.Snapshot) -> list[m.Outgoing]:
        job, snapshots = _job_of(sender.space.name), self.snapshots
        if body.action == "list":
            if snapshots is not None and not sender.space.mode.is_sync:
                snapshots.warn_of_asynchronous(job_of(job))
            return _make_status(sender, self._offer(job))
        if snapshots is None:
            raise ConfigurationError(
                f"server {self.config.server} has no --state-dir, so it can neither save anything nor go back"
            )
        if body.action == "restore":
            return self._go_back(sender, job, snapshots, body)
        name = SnapshotName(job_of(job), body.round, body.tag, body.save)
        if body.action == "find":
            return _make_status(sender, self._offer_saves(job, snapshots, body.tag))
        if body.action in ("save", "cut"):
            spaces = spaces_of_job(job, self.namespaces)
            for space in spaces:
                pipelined.roll_back_for_read(space, sender.rank, range(len(space.tables)))
            if body.action == "save":
                return _make_status(sender, {"is_saved": snapshots.save(name, spaces)})
            state = snapshots.cut(SnapshotName(name.job, name.round), spaces, body.keep)
            return _make_status(sender, {"state": state})
        if body.action == "check":
            is_read = self._read_stored(sender, job_of(job), snapshots, body) is not None
            return _make_status(sender) if is_read else _make_reply(sender.waiter, m.Pending((), _READING))
        if body.action not in ("keep", "drop"):
            raise ProtocolError(f"{body.action!r:.80} is no action of a Snapshot message")
        (snapshots.keep if body.action == "keep" else snapshots.drop)(name)
        return _make_status(sender)

    def _offer_saves(self, job: str, snapshots: Snapshots, tag: str) -> Mapping[str, Any]:
        """Return what this server can read of what was saved under a tag, and what the job has loaded already."""
        parts = [
            [
                one.facts["server"],
                one.facts["num_servers"],
                one.name.save,
                one.name.round,
                one.facts["holders"],
            ]
            for one in snapshots.saved(job_of(job), tag)
        ]
        lineage = self._lineages.get(job, Lineage())
        return {
            "parts": parts,
            "tags": snapshots.tags(job_of(job)),
            "generation": lineage.generation,
            "is_loaded": tag in lineage.loaded,
        }

    def _offer(self, job: str) -> Mapping[str, Any]:
        """Return what this server holds of a job, and to which rounds it can go back."""
        spaces = spaces_of_job(job, self.namespaces)
        rounds = [int(n) for one in spaces for n in one.rounds.shared.numbers[: len(one.tables)]]
        known = () if self.snapshots is None else self.snapshots.of_job(job_of(job))
        counts = {int(one.facts["num_servers"]) for one in known} - {self.config.num_servers}
        if counts and not rounds:
            raise ConfigurationError(
                f"the snapshots of job {job_of(job)!r} are of {max(counts)} servers, and this job has "
                f"{self.config.num_servers}; start it with as many, or with another --state-dir. To "
                "begin with what was saved by hand, remove the directories round-… in server-0, server-1, … there"
            )
        lineage = self._lineages.get(job, Lineage())
        begun = max(rounds, default=0) - (lineage.round if lineage.tag else 0)
        return {
            "round": max(rounds, default=-1),
            "holders": sorted({s for one in spaces for table in one.tables for s in table.plan.servers}),
            "cuts": [
                [one.name.round, list(one.facts["holders"]), int(one.facts["ordinal"])] for one in known
            ],
            "generation": lineage.generation,
            "restored": lineage.round,
            "tag": lineage.tag,
            "save": lineage.save,
            "every": 0 if self.snapshots is None else self.snapshots.every.rounds,
            "seconds": 0.0 if self.snapshots is None else self.snapshots.every.seconds,
            "due": 0 if self.snapshots is None or not rounds else self.snapshots.num_due(job_of(job), begun),
        }

    def _go_back(self, sender: Sender, job: str, snapshots: Snapshots, body: m.Snapshot) -> list[m.Outgoing]:
        """Replace the tables of a job by those of a snapshot, and end the sessions of processes that had used them."""
        if sender.space.tables:
            raise ProtocolError("only a process that has not used the tables of a job yet may let it go back")
        former = self._lineages.get(job, Lineage())
        if body.generation <= former.generation:
            asked = body.generation, body.round, body.tag, body.save
            if asked != (former.generation, former.round, former.tag, former.save):
                raise ServerLostState(
                    f"job {job!r} has gone back to round {former.round} of server {self.config.server} in the "
                    "meantime; start this process again"
                )
            return _make_status(sender)
        # 1. Read it completely, so that nothing is given up for one that is damaged.
        failpoint("server.snapshot.load")
        stored = self._read_stored(sender, job_of(job), snapshots, body)
        if stored is None:
            return _make_reply(sender.waiter, m.Pending((), _READING))
        lineage = Lineage(body.generation, body.round, stored.loaded, body.tag, body.save)
        _check_members(sender.space, stored.spaces)
        # 2. Give up what is here.
        why = f"rank {sender.rank} has loaded {body.tag!r}" if body.tag else "a server has lost what it held"
        error = ServerLostState(
            f"{why}, so this job goes back to round {body.round}; start this process again, and it goes on from there "
            "by Trainer.resume()"
        )
        out = self._give_up(job, error, sender)
        # 3. Continue with what was stored.
        snapshots.go_back(job_of(job), body.round)
        try:
            for one in stored.spaces:
                self._restore_space(job, one, sender)
        except Exception:
            for space in spaces_of_job(job, self.namespaces):
                self._end(space)  # what is there in part would be taken for the job's state
            raise
        if job in self.namespaces:
            self.namespaces[job].membership.may_skip_barriers = True
        self._lineages[job] = lineage
        snapshots.note_restored(job_of(job), stored.ordinal, body.round)
        for space in spaces_of_job(job, self.namespaces):
            space.lineage = lineage
        failpoint("server.snapshot.restored")
        _log.warning("job %r goes back to %s", job, SnapshotName(job, body.round, body.tag, body.save))
        return out + _make_status(sender)

    def _read_stored(
        self, sender: Sender, job: str, snapshots: Snapshots, body: m.Snapshot
    ) -> StoredJob | None:
        """Return what this server holds after going back; None while it is being read, then `tick` goes on.

        Raises:
            RecoveryError: What is on the disk is damaged, or contradicts itself.
            ConfigurationError: It is not there.
        """
        if not body.tag and not (body.round and body.has_tables):
            return StoredJob()
        snapshot = None if body.tag else snapshots.find(job, body.round)
        if snapshot is None:
            read = self._read_of_tag(snapshots.saved(job, body.tag), body)
        else:
            read = partial(_read_own, snapshot)
        request = m.Request(self.config.run_id, sender.session, sender.waiter.number, body)
        again = partial(self._handle, sender.waiter.peer, request)
        assert self._reads is not None
        try:
            key = job, body.round, body.tag, body.save, body.has_tables
            return self._reads.result(key, read, sender.waiter, again)
        except RecoveryError as why:
            if snapshot is not None:
                snapshots.quarantine(snapshot)
                _log.error("%s; it is put aside, and the next start goes back to an earlier one", why)
            raise

    def _read_of_tag(self, saved: Sequence[StoredSnapshot], body: m.Snapshot) -> Callable[[], StoredJob]:
        """Return what reads this server's part of what was saved under a tag, by as many servers or by others."""
        own, count = self.config.server, self.config.num_servers
        parts = {one.facts["server"]: one for one in saved if one.name.save == body.save}
        first = next(iter(parts.values()), None)
        has_moved = first is not None and first.facts["num_servers"] != count
        needed = set() if first is None else set(first.facts["holders"])
        needed = needed if has_moved else needed.intersection([own])
        if (first is None and body.has_tables) or not needed.issubset(parts):
            raise ConfigurationError(
                f"server {own} does not find what servers {sorted(needed.difference(parts)) or own} have saved as "
                f"{body.tag!r} in its --state-dir"
            )
        loaded = tuple(sorted({body.tag, *(() if first is None else first.facts["loaded"])}))

        def read() -> StoredJob:
            spaces = [space for at in sorted(needed) for space in read_spaces(parts[at])]
            return StoredJob(regroup(spaces, own, count) if has_moved else spaces, loaded)

        return read

    def _give_up(self, job: str, error: KVStoreError, sender: Sender) -> list[m.Outgoing]:
        """End the namespaces of a job that have tables, and all sessions of processes that used them."""
        spaces = spaces_of_job(job, self.namespaces)
        sessions = [one for one in self._sessions if _job_of(one.hello.namespace) == job]
        # A process that has come since a server was lost has no session in these namespaces.
        names = {space.name for space in spaces}
        users = {_process_of(one) for one in sessions if one.hello.namespace in names}
        out: list[m.Outgoing] = []
        for space in [one for name, one in self.namespaces.items() if _job_of(name) == job]:
            is_awaited = any(_process_of(one) in users for one in space.membership.members.values())
            for pending in list(self._pending(space)) if is_awaited else ():
                out += pending.fail(error)
        for one in sessions:
            if _process_of(one) in users and one.token != sender.session:
                self._fence(one.token, f"{type(error).__name__}: {error}")
        for space in spaces:
            self._end(space)
        return out

    def _restore_space(self, job: str, stored: StoredSpace, sender: Sender) -> None:
        former, num_workers, *mode = stored.image["space"]
        name = job + former[len(former.partition("/")[0]) :]
        limits, views = (0, 0, 0), sender.space.views
        if views is not None:
            num_workers, *terms = (
                views.terms
            )  # of the job that goes on; who was a member is what counts of the former
            limits = terms[0], terms[1], terms[2]
        space = self._make_space(name, num_workers, Mode(*mode), sender.now, limits)
        space.begin()
        self.namespaces[name] = space
        restore_space(space, stored, self._sessions)
        if space.views is not None:
            space.views.go_back(members_of_image(stored.image))
            space.rounds.shared.members = space.views.current.ranks
            space.count_members()
        # All ranks had called resume(), and the processes that come now take their places.
        space.membership.resumable.update(range(num_workers))
        if space.changes is not None:
            space.changes.note_all(space)
            space.changes.mark()

    def _fence(self, session: int, reason: str) -> None:
        self._sessions.end(session, reason)
        self._note_session(session)

    def _leave(self, sender: Sender, leave: m.Leave) -> list[m.Outgoing]:
        space, rank = sender.space, sender.rank
        # First the session, so that no later message of it counts; then the rounds that still need the rank.
        self._fence(sender.session, "it has left")
        space.membership.leave(rank, leave.reason[:MAX_REASON], leave.is_clean, sender.now)
        space.end_process(rank, leave.is_clean)
        pipelined.roll_back_broken(space)
        # Where members may change, the others have gone on without those that are lost.
        may_be_lost = space.views is not None and leave.is_clean
        lost = space.membership.lost(sender.now, self.config.dead_after)
        if space.membership.is_over(lost, may_be_lost):
            for other, member in space.membership.members.items():
                if not member.has_left:
                    why = f"the others have finished without rank {other}, because its process did not answer"
                    self._fence(member.token, why)
            self._end_or_keep(space, lost if may_be_lost else ())
            return []
        out = self._changes.end_process(space, rank)
        if space.views is not None and space.have_members_finished():
            for wait in space.waits.take(lambda wait: wait.is_entry):
                out += _fail_wait(space, wait, finished_error(space, wait.rank))
        return out + self._fail_stuck_waits(space, sender.now)

    def _join_rounds(self, sender: Sender, body: m.JoinRounds) -> list[m.Outgoing]:
        space = sender.space
        answer = self._changes.join(space, sender.rank, sender.waiter, body, sender.now)
        if not isinstance(answer, DelayedRequest):
            return answer
        out = _delay_request(space, answer, sender.now)
        return out + self._release(space) if self._changes.begin(space, sender.now) else out

    def _leave_rounds(self, sender: Sender, body: m.LeaveRounds) -> list[m.Outgoing]:
        return self._changes.leave(sender.space, sender.rank, body.table) + _make_status(sender)


def _list_answers(
    tracker: RoundTracker, rank: int, inputs: RankInputs, ended: TableBatch, is_plain: bool
) -> list[Answer]:
    """List a rank's answers about ended rounds; `is_plain` if all of them were applied in one batch."""
    flags = inputs.flags[ended.numbers].tolist()
    waiters = list(map(inputs.waiters.__getitem__, ended.number_list))
    first = waiters[0] if is_plain and flags and flags[0] in _COMMON_ANSWERS else None
    if first is not None and flags.count(flags[0]) == len(flags) == waiters.count(first):
        return [Answer(rank, first, flags[0], [], 0.0)]
    rounds, versions = tracker.numbers[ended.numbers].tolist(), inputs.version[ended.numbers].tolist()
    found: dict[Waiter, Answer] = {}
    for waiter, *row in zip(waiters, ended.number_list, rounds, versions, flags, strict=True):
        info = inputs.commit_infos[row[0]]
        if waiter is not None and info is not None:
            own = found.setdefault(waiter, Answer(rank, waiter, None, [], info.timeout))
            own.commits.append(Committed(*row))
    return list(found.values())


def _answer_failed(tracker: RoundTracker, waiter: Waiter, number: int, round_: int) -> m.Outgoing:
    return _make_failed(waiter, tracker.why_failed(number, round_), number, round_, tracker.number(number))


def _answer_ended(
    space: Namespace, tracker: RoundTracker, whose: int, rank: int, waiter: Waiter, commit: Committed
) -> list[m.Outgoing]:
    """Answer a commit of a round that has ended since it came."""
    if tracker.was_applied(commit.table, commit.round):
        return _answer_commits(space, whose, rank, waiter, [commit], None)
    return [_answer_failed(tracker, waiter, commit.table, commit.round)]


def _answer_commits(
    space: Namespace,
    whose: int,
    rank: int,
    waiter: Waiter,
    commits: Sequence[Committed],
    may_wait: tuple[float, float] | None,
) -> list[m.Outgoing]:
    """Answer commits of rounds that did not fail: what was special about each, then the weights.

    `may_wait`: the time, and for how long a read may be delayed until other ranks catch up; None: never delay.
    """
    out: list[m.Outgoing] = []
    done: list[tuple[int, int, int]] = []
    as_bytes: dict[bool, list[int]] = {}
    """Tables to send as bytes, by whether bfloat16 is allowed."""
    mapped: dict[bool, list[int]] = {}
    """Tables whose weights the worker maps, by whether it already knows their locations."""
    changed: list[m.Weights] = []
    for one in commits:
        number, round_, version, flags = one
        table = space.tables[number]
        end = table.ends[whose]
        is_skipped = end.is_skipped
        wants = flags & m.WANTS_WEIGHTS and not is_skipped
        # 1. A bounded or joined rank may have to wait for others: park this commit and answer it later.
        if may_wait is not None and not space.mode.is_sync:
            is_join = bool(flags & m.HAS_JOINED) and rank in space.rounds.joined(number)
            if is_join or (wants and space.rounds.behind(rank, number)):
                now, timeout = may_wait
                answer = partial(_answer_commits, space, whose, rank, waiter, [one], None)
                out += _delay_request(
                    space,
                    DelayedRequest(number, rank, waiter, now + timeout, timeout, is_join, answer, round_),
                    now,
                )
                continue
        # 2. What is special about the round.
        if flags & m.HAS_JOINED:
            out += _make_reply(waiter, m.EffectiveOptions(number, round_, end.hyper, end.is_over))
        if end.left_out:
            out += _make_reply(waiter, m.Absent(number, round_, end.left_out))
        if is_skipped:
            out += _make_reply(waiter, m.Vetoed(number, round_, end.vetoes))
        if full := table.full:
            out += _make_reply(waiter, m.Full(number, round_, full))
        if not wants or not space.mode.is_sync:  # by the time it may read, the weights can be newer
            done.append((number, round_, end.version))
        # 3. Choose the form of the weights: encoded changes, a mapping, changed rows, or whole slices.
        if wants and table.deltas is not None:
            changed.append(space.rows(rank, table, table.changed_parts(version)))
        elif wants and flags & m.MAPS_WEIGHTS and space.mode.is_sync:
            mapped.setdefault(bool(flags & m.LOCATIONS_CACHED), []).append(number)
        elif wants and flags & m.WANTS_DELTA:
            changed.append(space.rows(rank, table, table.changed_parts(version)))
        elif wants:
            as_bytes.setdefault(bool(flags & m.WANTS_HALF), []).append(number)
    # 4. One message for each form, for all tables together.
    if done:
        out += _make_reply(waiter, m.Done(m.matrix(done, 3)))
    bodies: list[m.ReplyBody] = list(changed)
    for are_known, numbers in mapped.items():
        bodies.append(space.weights_to_map(space.batch_of(np.array(numbers)), 1, are_known))
    for half, numbers in as_bytes.items():
        bodies.append(space.weights(space.batch_of(np.array(numbers)), rank, half=half))
    return out + [one for body in bodies for one in _make_reply(waiter, body)]


def _answer_pull(
    space: Namespace, rank: int, waiter: Waiter, wanted: m.Pull | m.PullRows, numbers: Sequence[int]
) -> list[m.Outgoing]:
    try:
        if isinstance(wanted, m.Pull) and wanted.round >= 0:
            found = [space.weights_before(wanted.round, space.tables[number]) for number in numbers]
        elif isinstance(wanted, m.PullRows):
            [table] = [space.table(number) for number in numbers]
            is_former = wanted.round >= 0 and space.is_over(wanted.round, table)
            found = [space.rows(rank, table, [table.pulled_part(wanted, is_former)], is_pull=True)]
        else:
            tables = [space.tables[number] for number in numbers]
            plain = [table.number for table in tables if table.deltas is None]
            batch = space.batch_of(np.array(plain, np.int64))
            found = [space.weights(batch, rank, is_pull=True)] if plain else []
            changed = [table for table in tables if table.deltas is not None]
            found += [space.rows(rank, table, table.changed_parts(-1), is_pull=True) for table in changed]
    except KVStoreError as error:
        return [_make_failed(waiter, error)]
    return [m.Outgoing(waiter.peer, m.Reply(waiter.number, body)) for body in found]


def _answer_norms(table: Table, round_: int, waiter: Waiter, partials: Sequence[Partial]) -> list[m.Outgoing]:
    norms = tuple([(one.slice, one.value) for one in partials])
    return _make_reply(waiter, m.Held(table.number, round_, norms, all(one.is_finite for one in partials)))


def _delay_request(space: Namespace, wait: DelayedRequest, now: float) -> list[m.Outgoing]:
    space.waits.add(wait)
    return _still_waiting(space, wait.waiter, space.describe_wait(wait), wait.missing(space.rounds), now)


def _fail_wait(space: Namespace, wait: DelayedRequest, error: KVStoreError) -> list[m.Outgoing]:
    # No next round is named: what the rank contributed before this read stays valid.
    following = -1
    if wait.is_join:
        # The rank will not see all others join: it takes part again, and its join has failed.
        space.rounds.fail_join(wait.rank, wait.table, wait.round, error)
        space.note_tables([wait.table])
        following = wait.round + 1
    return [_make_failed(wait.waiter, error, wait.table, wait.round, following)]


def _still_waiting(
    space: Namespace, waiter: Waiter, what: str, missing: Iterable[int], now: float
) -> list[m.Outgoing]:
    ranks = tuple(missing)
    return _make_reply(
        waiter, m.Pending(ranks[:_MISSING_NAMED], f"{what} waits: {_describe_missing(space, ranks, now)}")
    )


def _describe_missing(space: Namespace, missing: Iterable[int], now: float) -> str:
    return space.membership.describe_all(missing, now) or "no rank has decided about its sum yet"


def _check_members(space: Namespace, stored: Sequence[StoredSpace]) -> None:
    """Raise ConfigurationError if a job cannot go on from what was stored with the members that it may have."""
    if space.views is not None and space.views.backup_workers:
        raise ConfigurationError(
            "a job with backup workers cannot go on from a snapshot, nor from what was saved by hand; start it without "
            "--backup-workers, or with an empty --state-dir"
        )
    changing = [one.name for one in stored if "ranks" in one.image]
    if changing and space.views is None:
        raise ConfigurationError(
            f"{changing[0]!r} was stored by a job whose number of workers may change, and in this one it never does; "
            "start it with KVSTORE_ELASTIC (kvlaunch -n MIN..MAX), too, or with an empty --state-dir"
        )
    several = [one.name for one in stored if space.views is not None and len(one.image["declared"]) > 1]
    if several:
        raise ConfigurationError(
            f"{several[0]!r} was stored with several tables, and in a job whose number of workers may change a Trainer "
            "has one; start it with the fixed number of workers that has stored it, or with an empty --state-dir"
        )


def _read_own(snapshot: StoredSnapshot) -> StoredJob:
    return StoredJob(read_spaces(snapshot), tuple(snapshot.facts["loaded"]), snapshot.facts["ordinal"])


def _process_of(session: RankSession) -> tuple[int, str]:
    return session.hello.rank, session.hello.address


def _job_of(namespace: str) -> str:
    return namespace.partition("/")[0]


def _copy_error(error: KVStoreError) -> KVStoreError:
    """Copy an error, because raising one instance repeatedly accumulates tracebacks."""
    return from_wire(*to_wire(error))


def _make_reply(waiter: Waiter, body: m.ReplyBody) -> list[m.Outgoing]:
    return [m.Outgoing(waiter.peer, m.Reply(waiter.number, body))]


def _make_status(sender: Sender, values: Mapping[str, Any] | None = None) -> list[m.Outgoing]:
    return _make_reply(sender.waiter, m.Status(values or {}))


def _make_failed(
    waiter: Waiter, error: KVStoreError, table: int = -1, round_: int = -1, next_round: int = -1
) -> m.Outgoing:
    code, text = to_wire(error)
    return m.Outgoing(waiter.peer, m.Reply(waiter.number, m.Failed(code, text, table, round_, next_round)))


def _check_hello(config: EngineConfig, hello: m.Hello) -> None:
    if (hello.server, hello.num_servers) != (config.server, config.num_servers):
        raise ConfigurationError(
            f"this is server {config.server} of {config.num_servers}, but rank {hello.rank} has it as server "
            f"{hello.server} of {hello.num_servers}; start every server with its --index and --num-servers, and give "
            "every worker the same KVSTORE_SERVERS, in index order"
        )
    check_name("a namespace", hello.namespace)
    if max(len(hello.address), len(hello.capability)) > MAX_ADDRESS:
        raise ConfigurationError(
            f"rank {hello.rank} describes where it runs in {len(hello.address)} characters and its CPU in "
            f"{len(hello.capability)}; up to {MAX_ADDRESS} are allowed"
        )
    if not 1 <= hello.num_workers <= MAX_WORKERS:
        raise ConfigurationError(f"num_workers must be 1 … {MAX_WORKERS}, got {hello.num_workers}")
    if hello.capability != config.capability and not config.allow_mixed_cpu:
        raise ConfigurationError(
            f"rank {hello.rank} runs on {hello.capability}, server {config.server} on {config.capability}; results "
            "would differ in their last bits. Start the servers with --allow-mixed-cpu to accept that"
        )
