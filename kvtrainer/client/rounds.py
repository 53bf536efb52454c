"""Runs a worker's rounds: slices and commits go out, new weights come in.

A round covers any number of tables. `Rounds.start` sends one request to each server that holds any of them and returns;
`wait` blocks until all have answered, and then writes the new weights. A round ends alike on every worker:

- applied on all servers: weights are written, and the table's next round begins;
- failed on one server, by an error or because this worker gave up: it is aborted on all others. If one of them has
  applied it already, it is told to undo that. Where that is not certain, the table is broken: its servers may be one
  round apart, and every later call raises;
- skipped, by a veto or a decision about the sum: nothing changes, and the next round begins.

A table has one open round at a time. Slices of one table may be pushed before their commit (`EagerPush`). Over a
network the worker declares before that what the commit will say (its *intent*), so that servers can apply and answer
slices during the backward pass; until the step itself has begun, the intent is tentative.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import NoReturn

import numpy as np
import torch
from torch import Tensor

from kvstore_server.codec import torch_dtype
from kvstore_server.engine.views import MemberView
from kvstore_server.errors import (
    FencedError,
    KVStoreError,
    OptimizerError,
    RepeatedRoundError,
    RoundAbortedError,
    WorkerLostError,
    describe,
    from_wire,
    to_wire,
)
from kvstore_server.failpoints import failpoint
from kvstore_server.plan import Slice
from kvstore_server.protocol import messages as m
from kvstore_server.shard.norms import Decision, Measured, combine
from kvtrainer.client.captured import CapturedRound
from kvtrainer.client.contribution import Contribution, ContributionLayout, encode_slices, valid_pushes
from kvtrainer.client.flow_control import StallBackoff, cut
from kvtrainer.client.prefetch import Prefetch
from kvtrainer.client.round import Round
from kvtrainer.client.server_request import NO_COMMITS, ServerRequest
from kvtrainer.client.session import Session
from kvtrainer.client.snapshot_schedule import SnapshotSchedule
from kvtrainer.client.tables import RemoteTable, Tables
from kvtrainer.types import Arenas

_log = logging.getLogger(__name__)

GIVE_UP_TIMEOUT = 5.0
"""Seconds to wait for servers to confirm that a round was given up."""
_TABLES_PER_LAYOUT = 1024
"""Each group of this many tables has messages of its own, so that servers start on the first group while this worker
still sends the last."""
_LAYOUTS_KEPT = 16
_CONSEQUENCES = RoundAbortedError, RepeatedRoundError
"""What members are told of a round that another one has given up."""
_WARN_AFTER = 3
"""Warn after this many rounds in a row in which every eagerly pushed gradient had changed."""


class Rounds:
    def __init__(self, session: Session) -> None:
        self.tables = Tables(session.num_servers)
        self._in_flight = [0] * session.num_servers
        """By server, the bytes of its slices in open rounds whose intent was declared."""
        self._session = session
        self.open: dict[int, Round] = {}
        """Table (index) → its open round."""
        self._eager_pushes: dict[int, EagerPush] = {}
        """Table (index) → its eager pushes."""
        self._prefetch = Prefetch()
        self.snapshots: SnapshotSchedule | None = None
        """When servers are asked for snapshots; None: always another worker asks for them, or there are none."""
        self._layouts: dict[tuple[int, ...], list[ContributionLayout]] = {}
        """Tables (by index, in the order of a call) → their layouts. Most calls repeat."""
        self._captured: dict[tuple[int, ...], CapturedRound] = {}
        """Tables, as above → what their last round was like."""
        self._backoffs: dict[tuple[int, ...], StallBackoff] = {}
        """Tables, as above → which rounds are not captured, because former ones were of no use."""
        self.num_captured = 0
        """How many rounds were sent as captured."""
        session.on_reconnect.append(self._resend_after_restart)

    def run(self, contribution: Contribution) -> Round:
        """Run one round of some tables, and return it. Blocks, and raises, as `start` and `wait`.

        Rounds that repeat are captured.
        """
        # 1. The general path. A snapshot comes first, because servers may be restarted while it is taken.
        key = tuple([table.index for table in contribution.tables])
        captured = self._captured.get(key)
        if captured is not None and self.snapshots is not None and self._is_idle(key):
            self._take_snapshot_if_due(self.snapshots, contribution.tables)
        fits = captured is not None and captured.fits(contribution, self._layouts.get(key))
        if captured is None or not fits or not self._is_idle(key):
            round_ = self.start(contribution)
            self.wait(round_)
            self._capture(key, contribution)
            return round_
        # 2. The captured one. A table whose round is neither open nor over refuses all calls.
        self.open.update(dict.fromkeys(key, captured.round))
        error: BaseException | None = None
        try:
            has_ended = captured.replay(contribution)
        except BaseException as interruption:
            if captured.is_writing:
                raise  # its weights may be written in part: the next call is told
            has_ended, error = False, interruption
        self.num_captured += 1
        if has_ended:
            self._close(key)
            return captured.round
        # 3. What else happens is for the general path. A round that is only late may be like the next one.
        for index in key:
            del self.open[index]
        if not captured.has_timed_out:
            del self._captured[key]
            self._backoffs[key].fail()
        if error is not None:
            self._abandon(contribution, captured, error)
        round_ = self.start(contribution, handed_over=captured)
        self.wait(round_)
        return round_

    def _close(self, tables: Iterable[int]) -> None:
        """End the open round of tables (by index)."""
        for index in tables:
            del self.open[index]
        failpoint("worker.round.end")

    def _abandon(self, contribution: Contribution, captured: CapturedRound, error: BaseException) -> NoReturn:
        """Give up a captured round that was interrupted, as the general path does, and raise the error."""
        try:
            self._end(self.start(contribution, handed_over=captured, is_given_up=True), error)
        finally:
            raise error

    def _is_idle(self, key: Sequence[int]) -> bool:
        """Return whether tables (by index) have no open round, and nothing was pushed for the next one."""
        return not (self.open or self.tables.broken or (self._eager_pushes and key[0] in self._eager_pushes))

    def _capture(self, key: tuple[int, ...], contribution: Contribution) -> None:
        """Capture a round that has just ended, if it can be: the next one is probably like it.

        What was captured before stays if this one cannot be. If that was never used, rounds alternate, and some are
        not captured.
        """
        layouts, former = self._layouts.get(key), self._captured.get(key)
        if not layouts or not self._is_idle(key):
            return
        if not CapturedRound.can_capture(contribution, layouts, self._session):
            return
        backoff = self._backoffs.setdefault(key, StallBackoff())
        if backoff.take_skip():
            return
        if former is not None and former.was_replayed:
            backoff.reset()
        elif former is not None:
            backoff.fail()
        self._captured[key] = CapturedRound(contribution, layouts, self._session, self.tables)

    def start(
        self,
        contribution: Contribution,
        is_read: bool = False,
        as_of_round: int = -1,
        repeats_commit: bool = False,
        follows: int = -1,
        handed_over: CapturedRound | None = None,
        is_given_up: bool = False,
    ) -> Round:
        """Send one round of some tables and return at once. Gradients must not change until `wait` returns.

        An open round of one of the tables is waited for first, so an error of it is raised here. With a store that
        queues, a round of higher priority overtakes earlier ones.

        Args:
            is_read: The weights are only pulled.
            as_of_round: As for `pull`.
            repeats_commit: See `repeat_commit`.
            follows: See `follow`.
            handed_over: What has sent a part of the round, or all of it.
            is_given_up: Nothing more is sent.
        """
        # 1. Wait for earlier rounds of these tables.
        session, tables = self._session, contribution.tables
        is_encoded = bool(contribution.rows)
        for table in tables:
            if table.index in self.open or self.tables.broken:
                self.wait_pending(table)
            is_encoded |= table.compressor is not None
            if table.index in self.tables.full and not (is_read or repeats_commit):
                raise OptimizerError(
                    f"a server may have no room for new rows of the next update, which is not begun: "
                    f"{self.tables.full[table.index]}. The update before it is complete on all servers: states that "
                    "are saved now can be loaded into more servers, or into larger ones"
                )
        if self.snapshots is not None and not is_read and handed_over is None:
            self._take_snapshot_if_due(self.snapshots, tables)
        # Over a network request the new weights now if they are likely to be pulled.
        buffers = None
        if session.is_remote and not is_read:
            is_push = contribution.values is not None and contribution.outs is None
            buffers = self._prefetch.begin(tables, is_push and not _is_special(contribution))
        if buffers is not None:
            contribution = contribution._replace(outs=buffers)
        round_ = Round(contribution, session, is_read)
        round_.as_of_round, round_.repeats_commit = as_of_round, repeats_commit
        round_.is_for_training = buffers is None
        if tables and tables[0].view is not None and (repeats_commit or not is_read):
            round_.coordinator = tables[0].coordinator
            round_.needs_closing = tables[0].view.num_backup > 0 and not is_read
            round_.follows, round_.asked = follows >= 0, follows
        # 2. Prepare what each server is sent, using slices that were pushed before.
        key = tuple([table.index for table in tables])
        try:
            self.open.update(dict.fromkeys(key, round_))
            eager = self._eager_pushes.get(key[0]) if len(key) == 1 and not is_read else None
            if eager is not None:
                self._reset_if_over(eager, tables[0])
            if eager is not None and eager.sent:
                round_.valid = valid_pushes(contribution, eager.sent)
                if contribution.values is not None:
                    eager.end(round_.valid)
            if is_encoded:
                round_.encoded = encode_slices(contribution, round_.valid or ())
            for layout in self._layouts.get(key) or self._lay_out(key, tables):
                request = ServerRequest(layout, round_, self.tables)
                number = None if handed_over is None else handed_over.sent.get(layout)
                request.number = session.next_number() if number is None else number
                session.listen(request.number, partial(self._receive, round_, request))
                if round_.follows:
                    request.commits[:, m.COMMIT_ROUND] = follows
                if eager is not None and round_.valid is not None:
                    request.follow(round_.valid, len(round_.valid) == len(eager.sent))
                round_.server_requests.append(request)
                if request.open:
                    round_.open.append(request)
            if handed_over is None:
                failpoint("worker.round.begin")
            # 3. Over a network servers may use slices before the commit, so they are told what it will say.
            if session.is_remote and not is_read and len(tables) == 1 and not session.options.backup_workers:
                self._declare_intent(round_, eager)
            # 4. Send everything.
            round_.log("started")
            sent = {} if handed_over is None else handed_over.sent
            rest = [one for one in round_.open if one.layout not in sent] if not is_given_up else []
            if handed_over is None:
                self._send_round(round_)
            else:
                for request in rest:
                    self._send_again(round_, request, request.given)
            if rest:
                failpoint("worker.round.committed")
            while handed_over is not None and handed_over.answers:
                session.process(*handed_over.answers.pop(0))
        except BaseException as error:
            self._end(round_, error)
            raise
        if buffers is not None:
            session.process_received()  # answers make room for parts that wait
        return round_

    def _send_round(self, round_: Round) -> None:
        """Send the slices to all servers, except for those that were pushed eagerly and are valid, then the commits.

        The commits go last and together, so that a worker that dies before has not begun the round on any server.
        """
        session, priority = self._session, round_.contribution.priority
        for first in range(0, len(round_.open), session.num_servers):
            commits = []
            for request in round_.open[first : first + session.num_servers]:
                given: Sequence[int] = request.given
                if request.valid:
                    given = [at for at in given if at not in request.valid]
                *slices, commit = request.messages(round_, given)
                for body in slices:
                    session.send(request.server, request.number, body, priority)
                commits.append((request, commit))
                failpoint("worker.round.next_slices")
            # If members are lost in between, the others hear it soonest from the server that decides about them.
            commits.sort(key=lambda one: one[0].server == round_.coordinator)
            failpoint("worker.round.commit")
            for request, commit in commits:
                session.send(request.server, request.number, commit, priority)
                failpoint("worker.round.next_commit")

    def _take_snapshot_if_due(self, schedule: SnapshotSchedule, tables: Sequence[RemoteTable]) -> None:
        """Let servers take a snapshot if one is due, before anything of the next round of some tables is sent."""
        session, number = self._session, max([table.round for table in tables], default=0)
        if tables and (view := tables[0].view) is not None and view.ranks[0] != session.options.rank:
            return  # the lowest rank of the round asks
        if schedule.is_due(session.options.namespace, number):
            schedule.set_common(session.common_snapshots())
        if schedule.is_due(session.options.namespace, number):  # perhaps another worker has asked
            answers = session.take_snapshot(number, schedule.kept)
            schedule.record(session.options.namespace, number, answers)

    def _declare_intent(self, round_: Round, eager: EagerPush | None) -> None:
        session, contribution = self._session, round_.contribution
        speculative = None if eager is None else eager.speculative
        is_plain, was_right = _can_declare_intent(contribution), True
        is_equal, declared = False, dict[int, ServerRequest]()
        if speculative is not None:
            expected = speculative.contribution
            is_equal = (
                is_plain and expected.rescale == contribution.rescale and expected.hyper == contribution.hyper
            )
            declared = {request.server: request for request in speculative.server_requests}
        for request in round_.server_requests:
            # 1. Go on with the request of the backward pass, if there was one.
            before = declared.get(request.server)
            if before is not None and contribution.outs is not None:
                session.forget(request.number)
                request.adopt(before)
                session.listen(request.number, partial(self._receive, round_, request))
            elif before is not None:
                session.forget(before.number)
            # 2. Count what is on its way, by which slices are cut.
            intent = request.intent(round_) if is_plain else None
            if request.incoming.has_intent:
                self._in_flight[request.server] += request.layout.total
                request.in_flight = self._in_flight[request.server]
            if (
                before is not None
                and is_equal
                and not request.generation
                and (request.commits == before.commits).all()
            ):
                continue
            # 3. The server was told nothing, or something else.
            was_right &= before is None
            if intent is not None:
                session.send(request.server, request.number, intent, contribution.priority)
        if eager is not None:
            eager.expect(contribution if is_plain else None, was_right)

    def _declare_speculative(
        self, table: RemoteTable, eager: EagerPush, predict_hypers: Callable[[], bytes]
    ) -> None:
        """Tell servers that the open round of a table is expected to be like the last one.

        Not if weights are mapped, because servers would change them while they are in use.
        """
        last = eager.expected
        if last is None or last.sink.maps:
            return
        speculative = Round(last._replace(hyper=predict_hypers()), self._session)
        eager.speculative = (
            speculative  # before anything is sent, so that the step finds it after an interrupt
        )
        for layout in self._layouts[(table.index,)]:
            request = ServerRequest(layout, speculative, self.tables)
            intent = request.intent(speculative, tentative=True)
            layout.spare = request.memory
            if intent is not None:
                request.number = self._session.next_number()
                speculative.server_requests.append(request)
                self._session.listen(request.number, partial(_receive_speculative, request))
                self._session.send(request.server, request.number, intent, len(table.plan.slices) + 1)

    def _reset_if_over(self, eager: EagerPush, table: RemoteTable) -> bool:
        """Reset the eager pushes of a table if their round has ended, committed or not; return whether it has."""
        is_over = eager.round != table.round
        if is_over:
            for request in eager.speculative.server_requests if eager.speculative is not None else ():
                self._session.forget(request.number)
            eager.begin(table.round)
        return is_over

    def push_eagerly(
        self,
        table: RemoteTable,
        slice_: Slice,
        parts: Sequence[Tensor],
        predict_hypers: Callable[[], bytes] = bytes,
    ) -> None:
        """Send a slice of an open round before its commit; returns at once.

        The round uses it if the gradient still has the same bits when the round is started. Does nothing if the
        slice was pushed already. If slices have to queue, those that come first in the plan go first, because the
        next forward pass reads them first; the commit, with priority 0, goes behind all of them.

        Args:
            parts: The values of each of its keys, flat; copied.
            predict_hypers: Packs the hyper-parameters that the commit will bring, as far as they are known.

        Raises:
            KVStoreError: it cannot be sent, or not be compressed: it goes with the commit.
        """
        eager = self._eager_pushes.setdefault(table.index, EagerPush())
        if table.index in self.open or (eager.round == table.round and slice_.index in eager.sent):
            return
        # 1. The first slice of a round: tell servers over a network what to expect.
        if self._reset_if_over(eager, table):
            if self.snapshots is not None:
                self._take_snapshot_if_due(self.snapshots, [table])
            if table.compressor is not None:
                table.compressor.begin()
            if self._session.is_remote and not self._session.options.backup_workers:
                self._declare_speculative(table, eager, predict_hypers)
        # 2. Copy the slice, and compress it.
        values, encoding = eager.copy(slice_, parts), b""
        if table.compressor is not None:
            encoding = table.compressor.packed_codec
            values = table.compressor.encode_eagerly(values[: slice_.used], slice_)
        # 3. Send it. It counts as sent from here on: if it is lost, the server asks for it.
        eager.record(slice_)
        failpoint("worker.round.eager")
        pushes = m.matrix([(table.slot_of(slice_), table.round, 0, values.nbytes)], m.PUSH_WORDS)
        body = m.Contribute(pushes, (values,), NO_COMMITS, encoding, timeout=self._session.options.timeout)
        number, speculative = self._session.next_number(), eager.speculative
        declared = [] if speculative is None else speculative.server_requests
        request = next((one for one in declared if one.server == slice_.server), None)
        urgency = len(table.plan.slices) - slice_.index
        if request is None:
            self._session.send(slice_.server, number, body, urgency)
            return
        self._session.process_received()  # answers make room for parts that wait
        share = request.layout.total * values.nbytes // max(slice_.nbytes, 1)  # an empty key has 0 bytes
        sent = list(cut(body, share, partial(request.layout.itemsize, encoding)))
        # Parts keep the order of the backward pass. No weights of the round may be used before its commit, which comes
        # behind all parts, so sorting them would gain nothing, and leave more slices answered in part.
        for part in sent:
            self._session.send(slice_.server, number, part, urgency if len(sent) == 1 else 0)

    def forget(self, table: RemoteTable) -> None:
        for key in [key for key in self._layouts if table.index in key]:
            self._forget_layouts(key)
        eager = self._eager_pushes.pop(table.index, None)
        for request in (
            () if eager is None or eager.speculative is None else eager.speculative.server_requests
        ):
            self._session.forget(request.number)
        self._prefetch.forget(table.index)

    def _forget_layouts(self, key: tuple[int, ...]) -> None:
        for kept in (self._layouts, self._captured, self._backoffs):
            kept.pop(key, None)

    def initialise(self, contribution: Contribution) -> None:
        """Give tables rank 0's values, on all ranks together; blocks.

        A table that has values already is read instead: the others went on while a process of this rank was replaced.
        """
        fresh: list[int] = []
        known: list[int] = []
        for at, table in enumerate(contribution.tables):
            (known if table.is_initialised else fresh).append(at)
        failpoint("worker.init.begin")
        if fresh:
            self.wait(self.start(contribution.of(fresh)))
        if known and contribution.outs is not None:
            read = contribution.of(known)
            self.pull(read.tables, read.outs or ())
        failpoint("worker.init.end")

    def repeat_commit(self, contribution: Contribution) -> Round | None:
        """Repeat a table's last commit, which an earlier process of this rank has made, for its answer; blocks.

        Returns the round, which has ended, and whose weights are in `outs`. None if a server has lost the commit.
        """
        round_ = self.start(contribution, is_read=True, repeats_commit=True)
        self.wait(round_)
        if round_.is_lost:
            return None
        [table] = contribution.tables
        if contribution.sink.maps:
            contribution.sink.commit()
        table.view = round_.next_views.get(table.name)
        table.resume(table.round + 1, True)
        return round_

    def follow(self, contribution: Contribution, round_: int) -> Round:
        """Get the weights with which the open round has begun, as soon as an earlier one is over; blocks.

        This rank was left out of that one, or an earlier process of it has ended there. Afterwards it is a member of
        the open round, all weights are those before it, and `Round.left_out` says how the last one has ended.

        Raises:
            WorkerLostError: The servers do not agree on how a round has ended.
        """
        followed = self.start(contribution, is_read=True, repeats_commit=True, follows=round_)
        self.wait(followed)
        [table] = contribution.tables
        table.follow(followed.left_out[followed.coordinator])
        return followed

    def wait(self, round_: Round, may_wait_again: bool = False) -> None:
        """Block until the round is over; new weights are then in `outs`.

        Args:
            may_wait_again: An interrupt does not abort the round, because the call that started it has returned.

        Raises:
            KVStoreError: what the servers reported, the same on every worker of the round.
            DeadlineError, ServerUnreachableError: they reported nothing in time.
        """
        if round_.is_over:
            return
        round_.log("waiting")
        try:
            # A silent server is sent the commits again; it asks for slices that it lacks.
            again = partial(self._send_again, round_, given=())
            while True:
                if not self._session.wait(round_.open, again, round_.started):
                    raise self._session.deadline_error(round_.open, round_.describe_end())
                if not self._ask_again_if_late(round_):
                    break
        except BaseException as error:
            if may_wait_again and not isinstance(error, Exception):
                round_.resume()
                raise
            self._end(round_, error)
            raise
        failpoint("worker.round.write")
        self._end(round_, round_.error)
        if round_.error is not None:
            raise round_.error
        for table in round_.contribution.tables if self.tables.broken else ():
            if table.broken is not None:
                raise table.broken

    def wait_pending(self, table: RemoteTable) -> None:
        """Wait for the open round of a table, if there is one.

        Raises:
            KVStoreError: that round failed, its end was interrupted, or an earlier failure broke the table.
        """
        round_ = self.open.get(table.index)
        if round_ is not None:
            if round_.is_over:
                raise KVStoreError(
                    f"the end of a round of {table.name!r} was interrupted, so it may count in part. Restart the job "
                    "from its last saved states"
                )
            self.wait(round_, may_wait_again=True)
        if table.index in self.tables.broken:
            raise self.tables.broken[table.index]

    def wait_all_pending(self) -> None:
        while self.open:
            self.wait_pending(next(iter(self.open.values())).contribution.tables[0])

    def pull(self, tables: Sequence[RemoteTable], outs: Sequence[Arenas], as_of_round: int = -1) -> None:
        """Write the present weights of whole tables into arenas, after this worker's rounds, to compute with them.

        Args:
            as_of_round: Read the weights with which this round began, for a process that repeats it. -1: present ones.
        """
        for table in tables if self._session.is_remote else ():
            self.wait_pending(table)
        if self._session.is_remote and as_of_round < 0 and self._prefetch.pull(tables, outs):
            here = [table.index for table in tables]
            self.tables.version[:, here] = self.tables.newest[:, here]
        else:
            self.wait(self.start(Contribution(tables, None, outs), is_read=True, as_of_round=as_of_round))

    def read(self, table: RemoteTable, out: Arenas) -> dict[int, int]:
        """Write a table's present weights into an arena, to inspect them; what this worker computes with stays.

        Returns their version, by server.
        """
        round_ = self.start(Contribution([table], None, [out]), is_read=True)
        round_.is_for_training = False
        self.wait(round_)
        return {request.server: request.incoming.came[at] for request, at in round_.server_requests_of(table)}

    # ---------------------------------------------------------------- sending

    def _lay_out(self, key: tuple[int, ...], tables: Sequence[RemoteTable]) -> list[ContributionLayout]:
        several = [known for known in self._layouts if len(known) > 1] if len(key) > 1 else []
        if len(several) == _LAYOUTS_KEPT:
            self._forget_layouts(several[0])
        every = [
            ContributionLayout(server, tables[first : first + _TABLES_PER_LAYOUT], first, self.tables)
            for first in range(0, len(tables), _TABLES_PER_LAYOUT)
            for server in range(self._session.num_servers)
        ]
        self._layouts[key] = [layout for layout in every if layout.tables]
        return self._layouts[key]

    def _resend_after_restart(self, server: int) -> None:
        """Send a server that was restarted everything of open rounds again: it knows only of rounds that are over."""
        channel = self._session.transport.channel(server)
        # 1. Where weights are in its memory has to be said again.
        for layout in itertools.chain.from_iterable(self._layouts.values()):
            if layout.server == server:
                layout.mapped = None
        # 2. It does not know what was declared. Slices that were pushed eagerly are asked for after the commit.
        for eager in self._eager_pushes.values():
            declared = [] if eager.speculative is None else eager.speculative.server_requests
            for request in [one for one in declared if one.server == server]:
                self._session.forget(request.number)
                declared.remove(request)
        # 3. Slices and commits of tables whose rounds are open there, as at the start of the round. A round that has
        # failed elsewhere is aborted first, so that it cannot be applied there.
        for round_ in {id(round_): round_ for round_ in self.open.values()}.values():
            for request in [one for one in round_.open if one.server == server and not round_.is_over]:
                request.start_over(channel is not None)
                for at in sorted(request.open):
                    if request.layout.tables[at].name in round_.aborted:
                        self._abort_early(request, at, round_.error)
                table_of, tables = request.layout.table, request.layout.tables
                lost = [
                    at
                    for at in request.given
                    if table_of[at] in request.open and tables[table_of[at]].name not in round_.aborted
                ]
                self._send_again(round_, request, lost)

    def _send_again(self, round_: Round, request: ServerRequest, given: Sequence[int]) -> None:
        self._pass_on_closing(round_, request)
        for body in request.messages(round_, given):
            self._session.send(request.server, request.number, body, round_.contribution.priority)

    # ---------------------------------------------------------------- receiving

    def _receive(self, round_: Round, request: ServerRequest, _: int, reply: m.ReplyBody) -> None:
        position = request.layout.position
        # 1. Weights, or only the end of the round.
        if isinstance(reply, m.Weights):
            round_.finish(request, request.incoming.receive(reply))
        elif isinstance(reply, m.Done):
            known = [(position[n], version) for n, _, version in reply.rounds.tolist() if n in position]
            request.applied.update(known)
            round_.finish(request, [at for at, _ in known if not request.incoming.num_pending[at]])
        elif isinstance(reply, m.Failed):
            self._receive_failure(round_, request, reply)
        elif (
            isinstance(
                reply,
                m.Held
                | m.Absent
                | m.Vetoed
                | m.EffectiveOptions
                | m.Full
                | m.Members
                | m.LeftOut
                | m.Missing,
            )
            and reply.table in position
        ):
            # 2. What the server says about one table.
            at = position[reply.table]
            table = request.layout.tables[at]
            if isinstance(reply, m.Held):
                self._receive_held(round_, request, at, reply)
            elif isinstance(reply, m.Absent):
                round_.absent.setdefault(table.name, set()).update(reply.keys)
            elif isinstance(reply, m.EffectiveOptions):
                round_.in_force[table.name] = reply
            elif isinstance(reply, m.Full):
                self.tables.full.setdefault(table.index, reply.reason)
            elif isinstance(reply, m.Vetoed):
                self._receive_veto(round_, request, at, reply)
            elif isinstance(reply, m.LeftOut):
                self._receive_left_out(round_, request, at, reply)
            elif isinstance(reply, m.Members) and reply.closes:
                self._receive_closing(round_, request, at, reply)
            elif isinstance(reply, m.Members) and reply.round != table.round:
                self._receive_next_members(round_, request, at, reply)
            elif round_.repeats_commit:
                # 3. The commit is lost: what the others answer does not matter any more.
                round_.is_lost = True
                for one in list(round_.open):
                    one.open.clear()
                    round_.finish(one, ())
            elif isinstance(reply, m.Members):
                self._change_members(round_, request, at, reply)
            elif table.round == reply.round and at in request.open:
                # 4. Slices that never arrived, unless weights have overtaken this reply.
                request.gather_again(at)
                asked = [request.layout.slots.get(slot) for slot in reply.slots]
                lost = sorted(set(request.given).intersection(asked))
                _log.warning("%s lost %d slices of round %d; sending them again",
                             self._session.describe(request.server), len(lost), reply.round)  # fmt: skip
                self._send_again(round_, request, lost)

    def _receive_failure(self, round_: Round, request: ServerRequest, failure: m.Failed) -> None:
        """Record that the round of one table, or with table -1 of all, has failed on a server; other tables go on."""
        error = from_wire(failure.code, failure.text)
        # An abort is only a consequence: any other error tells more about the cause.
        if round_.error is None or (
            isinstance(round_.error, _CONSEQUENCES) and not isinstance(error, _CONSEQUENCES)
        ):
            round_.error = error
        if isinstance(error, FencedError):
            # Another process has this rank, so what becomes of the round is not for this one to know, or to abort.
            for one in list(round_.open):
                one.failed |= dict.fromkeys(one.open, failure.next_round)
                one.open.clear()
                round_.finish(one, ())
            return
        named = {request.layout.position.get(failure.table)}
        failed = sorted(request.open if failure.table == -1 else request.open.intersection(named))
        for at in failed:
            request.failed[at] = failure.next_round
            request.open.discard(at)
            table = request.layout.tables[at]
            if round_.is_read or table.name in round_.aborted:
                continue
            # It can no longer be applied everywhere: do not let workers begin it on other servers.
            round_.aborted.add(table.name)
            for other, here in round_.server_requests_of(table) if not _is_fenced(table, error) else ():
                if here in other.open:
                    self._abort_early(other, here, error)
        round_.finish(request, ())

    def _abort_early(self, request: ServerRequest, at: int, error: BaseException | None) -> None:
        """Abort the round of a table on a server that has not answered yet, because another one has failed it."""
        number = int(request.layout.commits[at, m.COMMIT_TABLE])
        is_repeated = isinstance(error, RepeatedRoundError)
        abort = m.Abort(number, request.layout.tables[at].round, describe(error), False, is_repeated)
        self._session.send(request.server, self._session.next_number(), abort)

    # ---------------------------------------------------------------- members that change

    def _receive_next_members(self, round_: Round, request: ServerRequest, at: int, told: m.Members) -> None:
        table = request.layout.tables[at]
        if told.round == table.round + 1 and request.server == round_.coordinator:
            round_.next_views[table.name] = MemberView(told.view, told.ranks, told.num_backup)
            if at in request.complete:
                round_.finish(request, [at])

    def _change_members(self, round_: Round, request: ServerRequest, at: int, told: m.Members) -> None:
        """Commit the open round again, because it has other members than this worker believed.

        The gradients that servers have still count. A mean is now one over the present members.
        """
        table, session = request.layout.tables[at], self._session
        if table.view is None or told.view <= table.view.number:
            return
        # 1. This rank is not a member any more, or a server has ended the round with the former members. Here it is
        # still open then, until it is given up everywhere.
        error: KVStoreError | None = None
        following = told.round + 1
        if session.options.rank not in told.ranks:
            error = FencedError(
                f"the others go on without rank {session.options.rank}: ranks {list(told.ranks)} are left. Start the "
                "worker again, so that it joins"
            )
        elif any(one not in round_.open for one, _ in round_.server_requests_of(table)):
            following = -1
            error = RepeatedRoundError(
                f"round {table.round} of {table.name!r} has ended on a server with ranks {list(table.view.ranks)}, and "
                f"another one goes on with {list(told.ranks)}: a worker was lost between its commits to them"
            )
        if error is not None:
            failed = m.Failed(*to_wire(error), told.table, told.round, following)
            self._receive_failure(round_, request, failed)
            return
        failpoint("worker.members.changed")
        # 2. Answers to the former commits do not count any more.
        table.view = MemberView(told.view, told.ranks, told.num_backup)
        round_.needs_closing = told.num_backup > 0
        round_.contribution = round_.contribution.over(table.view.counted)
        round_.decided.pop(table.name, None)
        for one, _ in round_.server_requests_of(table):
            session.forget(one.number)
            one.number = session.next_number(partial(self._receive, round_, one))
            one.start_over(session.transport.channel(one.server) is not None)
            self._send_again(round_, one, given=())

    # ---------------------------------------------------------------- backup workers

    def _receive_closing(self, round_: Round, request: ServerRequest, at: int, told: m.Members) -> None:
        """Tell the other servers with which ranks the coordinator has closed the open round."""
        table = request.layout.tables[at]
        if told.round != table.round or round_.closed is not None or round_.is_late:
            return
        round_.closed, round_.needs_closing = MemberView(told.view, told.ranks, 0, told.round), False
        for one, _ in round_.server_requests_of(table):
            self._pass_on_closing(round_, one)
        if at in request.complete:
            round_.finish(request, [at])

    def _pass_on_closing(self, round_: Round, request: ServerRequest) -> None:
        """Tell a server that has not answered yet with which ranks the last round was closed, if that is known."""
        told, closed = round_.left_out.get(round_.coordinator), round_.closed
        if told is not None and told.closed_view >= 0:  # those that it names may all have died since
            closed = MemberView(told.closed_view, told.closed_ranks, 0, told.round - 1)
        if closed is None or request.server == round_.coordinator or request not in round_.open:
            return
        number = int(request.layout.commits[0, m.COMMIT_TABLE])
        body = m.CloseRound(number, closed.closes, closed.number, closed.ranks)
        self._session.send(request.server, self._session.next_number(), body)

    def _receive_left_out(self, round_: Round, request: ServerRequest, at: int, told: m.LeftOut) -> None:
        """Record that rounds have ended on a server without this rank; its present weights follow."""
        if at not in request.open:
            return
        table = request.layout.tables[at]
        round_.left_out[request.server] = told
        # No measures of sums come.
        round_.contribution = round_.contribution._replace(guard=None)
        round_.needs_closing = False
        if request.server == round_.coordinator:
            round_.next_views[table.name] = MemberView(told.view, told.members, told.num_backup)
            for one, _ in round_.server_requests_of(table):
                self._pass_on_closing(round_, one)

    def _ask_again_if_late(self, round_: Round) -> bool:
        """If this rank was left out, ask servers again until all have the same round open; return whether it did."""
        error = round_.error
        if not round_.is_late or (error is not None and not isinstance(error, RepeatedRoundError)):
            return False
        [table] = round_.contribution.tables
        if error is None and round_.has_caught_up(self._session.options.rank):
            return False
        # 1. A round that only some servers have applied has to be undone.
        asked, has_failed = round_.asked, True
        if error is None:
            asked, has_failed = round_.next_asked()
        elif asked < 0:
            asked = table.round
        if has_failed:
            self._fail_everywhere(table, asked, error)
        # 2. Ask all, also those that have answered: their weights may be of another round.
        round_.error, round_.asked, round_.started = None, asked, self._session.clock()
        round_.left_out.clear()
        round_.next_views.clear()
        round_.aborted.clear()
        round_.follows = True
        round_.open[:] = round_.server_requests
        for request in round_.server_requests:
            self._session.forget(request.number)
            request.number = self._session.next_number(partial(self._receive, round_, request))
            request.ask(asked, self._session.transport.channel(request.server) is not None)
        for request in list(round_.open):
            self._send_again(round_, request, given=())
        return True

    def _fail_everywhere(self, table: RemoteTable, round_: int, error: BaseException | None) -> None:
        """Have a round undone that a server has failed, or cannot complete. Raises WorkerLostError if one cannot."""
        reason = describe(error) if error is not None else "not all servers have applied it"
        pairs = [(table, server) for server in table.numbers]
        was_applied = self._abort(pairs, reason, True, False, True, round_)
        if False in was_applied.values():
            applied = [pair for pair in pairs if was_applied[table.name, pair[1]]]
            was_applied |= self._abort(applied, reason, True, True, True, round_)
        outcome = {
            self._session.describe(server): was_applied[table.name, server] for server in table.numbers
        }
        differs = _half_applied_error(table, outcome, reason)
        if differs is not None:
            self.tables.broken[table.index] = differs
            raise WorkerLostError(str(differs))

    # ---------------------------------------------------------------- deciding

    def _receive_held(self, round_: Round, request: ServerRequest, at: int, held: m.Held) -> None:
        """Record what a server measured of its part of a sum; when all have, decide what happens to the sum.

        All workers decide alike, so the first decision that arrives at a server is used. An error that the guard raises
        aborts the round.
        """
        table, guard = request.layout.tables[at], round_.contribution.guard
        if guard is None or table.name in round_.aborted:
            return
        request.held[at] = held
        failpoint("worker.round.held")
        parts = list(round_.server_requests_of(table))
        if table.name in round_.decided:
            self._resolve(round_, table, [(request, at)])  # this server was not told yet
        elif round_.vetoes.get(table.name):
            self._skip(round_, table)
        elif all(index in one.held for one, index in parts):
            # The norm of the whole sum, combined in the order of slices, so that all workers get the same bits.
            measurements = [one.held[index] for one, index in parts]
            partials = sorted(partial for one in measurements for partial in one.partials)
            norm = combine((value for _, value in partials), guard.norm_type)
            measured = Measured(norm, all(one.is_finite for one in measurements))
            round_.decided[table.name] = (measured, guard.decide(measured))
            round_.log("decided")
            self._resolve(round_, table, parts)
        if at in request.complete:
            round_.finish(request, [at])

    def _receive_veto(self, round_: Round, request: ServerRequest, at: int, veto: m.Vetoed) -> None:
        table = request.layout.tables[at]
        round_.vetoes[table.name] = veto.ranks
        request.skipped.add(at)
        request.incoming.skip(at)
        if veto.ranks:
            self._skip(round_, table)

    def _skip(self, round_: Round, table: RemoteTable) -> None:
        """Skip a round that was vetoed on one server on those that hold its sum.

        This happens if a process vetoes and dies, and another one of its rank takes its place.
        """
        held = [(request, at) for request, at in round_.server_requests_of(table) if at in request.held]
        if held and table.name not in round_.decided:
            round_.decided[table.name] = (None, Decision(skip=True))
            self._resolve(round_, table, held)

    def _resolve(self, round_: Round, table: RemoteTable, parts: Iterable[tuple[ServerRequest, int]]) -> None:
        _, (coef, clip_value, skip) = round_.decided[table.name]
        for request, at in parts:
            if at in request.open and at not in request.complete:
                resolve = m.Resolve(
                    int(request.layout.commits[at, m.COMMIT_TABLE]), table.round, coef, clip_value, skip
                )
                self._session.send(request.server, request.number, resolve, round_.contribution.priority)
            # Also if another worker was faster, so that the point counts rounds.
            failpoint("worker.round.next_decision")

    # ---------------------------------------------------------------- ending

    def _end(self, round_: Round, error: BaseException | None) -> None:
        """End a round: write its weights, or abort it on all servers, and advance the tables."""
        tables, all_tables = round_.contribution.tables, self.tables
        # 1. No replies are wanted any more. What is still open is lost.
        own_tables = [table.index for table in tables if self.open.get(table.index) is round_]
        for index in own_tables if round_.is_read else ():  # nothing hangs on its end
            del self.open[index]
        round_.is_over = True
        round_.log("applied" if error is None else "failed", error)
        lost: set[int] = set()
        for request in round_.server_requests:
            self._session.forget(request.number)
            self._in_flight[request.server] -= request.layout.total if request.in_flight else 0
            # Otherwise a message may still be sent from this buffer.
            if round_.error is None and not request.open:
                request.layout.spare = request.memory
            if request.open or request.failed:
                lost.update(request.layout.index[[*request.open, *request.failed]].tolist())
        # 2. A pull only writes weights.
        if round_.is_read:
            for request in round_.server_requests if error is None and not round_.is_lost else ():
                round_.write(request, frozenset(), all_tables)
            return
        if not round_.server_requests:  # it was not even prepared
            lost.update(table.index for table in tables)
        if error is not None and round_.is_late and not isinstance(error, FencedError):
            # The others have gone on, so there is nothing to abort. The next round finds out again how far they are.
            for index in own_tables:
                del self.open[index]
            return
        # 3. Tables that did not end alike everywhere.
        for table in tables if round_.decided else ():
            differs = None if table.index in lost else _decision_conflict(round_, table)
            if differs is not None:
                all_tables.broken[table.index] = differs
        not_applied = lost.union(all_tables.broken)
        # 4. Versions and weights.
        self._write_weights(round_, not_applied)
        failpoint("worker.round.written")
        # 5. The next round of the tables that were applied, and what compression carries over to it.
        applied = np.array([table.index for table in tables if table.index not in not_applied], np.int64)
        all_tables.round[applied] += 1
        for table in tables if round_.next_views else ():
            if table.index not in not_applied:
                table.view = round_.next_views.get(table.name, table.view)
                if round_.left_out:
                    table.follow(round_.left_out[round_.coordinator])
        all_tables.is_initialised[applied] = True
        if not round_.is_for_training:
            vetoed = {table.index for table in tables if table.name in round_.vetoes}
            self._prefetch.complete(set(applied.tolist()) - vetoed)
        for table in tables if round_.encoded else ():
            was_sent = table.index in round_.encoded and table.index not in not_applied
            if was_sent and table.compressor is not None and table.name in round_.vetoes:
                table.compressor.reject()
            elif was_sent and table.compressor is not None:
                table.compressor.accept()
        # 6. Free the gradients, although the caller may keep the round.
        round_.contribution = round_.contribution._replace(values=None)
        # 7. Abort what is lost on all servers, unless another process has this rank.
        if lost and isinstance(error, FencedError):
            all_tables.broken.update(dict.fromkeys(lost, error))
        elif lost:
            # Who interrupts does not want to wait for a server that is being restarted.
            awaits_restarts = error is None or isinstance(error, Exception)
            lost_tables = [table for table in tables if table.index in lost]
            self._give_up(round_, lost_tables, error, awaits_restarts)
        self._close(own_tables)  # last: one that is over and open was interrupted as it ended

    def _write_weights(self, round_: Round, not_applied: Collection[int]) -> None:
        """Write the weights of a round and store their versions; tables that were not applied keep the last ones."""
        all_tables, is_sync = self.tables, self._session.options.mode.is_sync
        ages: dict[int, int] = {}
        """Table (index) → how many updates of others this contribution had missed, on any server."""
        for request in round_.server_requests:
            for at, version in request.applied.items():
                index = int(request.layout.index[at])
                if index in not_applied:
                    continue
                before = int(all_tables.version[request.server, index])
                all_tables.newest[request.server, index] = version
                if version >= 0 and before >= 0 and not is_sync:
                    ages[index] = max(version - 1 - before, ages.get(index, version - 1 - before))
            round_.write(request, not_applied, all_tables)
            failpoint("worker.round.next_write")
        if round_.contribution.sink.maps and not not_applied:
            round_.contribution.sink.commit()
        if ages:
            all_tables.staleness[list(ages)] = list(ages.values())

    def _give_up(
        self,
        round_: Round,
        tables: Sequence[RemoteTable],
        error: BaseException | None,
        awaits_restarts: bool,
    ) -> None:
        """Abort rounds on all servers; if one has applied what another has failed, have it undone."""
        # 1. Which servers have failed the round already.
        pairs = [(table, server) for table in tables for server in table.numbers]
        was_applied: dict[tuple[str, int], bool | None] = {}
        following: dict[str, list[int]] = {}
        for request in round_.server_requests:
            for at, next_round in request.failed.items():
                table = request.layout.tables[at]
                following.setdefault(table.name, []).append(next_round)
                if next_round > table.round:
                    was_applied[table.name, request.server] = False  # the server has said so already
        # 2. Abort it on the others, which answer whether they had applied it.
        unknown = [p for p in pairs if (p[0].name, p[1]) not in was_applied]
        # If members may change, the others go on without one that raises; what a server has failed, it has for all.
        is_local = round_.error is None or isinstance(round_.error, RepeatedRoundError)
        why = describe(error), is_local and any(table.view is not None for table in tables)
        was_applied |= self._abort(unknown, *why, False, awaits_restarts)
        # 3. Undo it where it was applied, but only if another server has failed it for certain: then no worker can have
        # finished it.
        lost = {name for (name, _), applied_there in was_applied.items() if applied_there is False}
        half_applied = [p for p in pairs if was_applied[p[0].name, p[1]] and p[0].name in lost]
        was_applied |= self._abort(half_applied, *why, True, awaits_restarts)
        for table in tables:
            # 4. A table whose servers may not agree is broken; all others go on with the next round.
            outcome = {
                self._session.describe(server): was_applied[table.name, server] for server in table.numbers
            }
            differs = _half_applied_error(table, outcome, describe(error))
            if differs is not None:
                self.tables.broken[table.index] = differs
            if not all(outcome.values()):
                self.tables.failed[table.index] = table.round
            self.tables.round[table.index] = max(table.round + 1, *following.get(table.name, ()), -1)

    def _abort(
        self,
        rounds: Sequence[tuple[RemoteTable, int]],
        reason: str,
        is_repeated: bool,
        undo: bool,
        awaits_restarts: bool,
        number: int | None = None,
    ) -> dict[tuple[str, int], bool | None]:
        """Abort the present rounds of (table, server) pairs, or one of this number, and undo them if they were applied.

        Returns for each whether the server still counts it as applied; None if it did not answer.
        """
        requests = [
            (
                server,
                m.Abort(t.numbers[server], t.round if number is None else number, reason, undo, is_repeated),
            )
            for t, server in rounds
        ]
        answers = self._session.ask_all(requests, GIVE_UP_TIMEOUT, awaits_restarts)
        # A server that refuses this worker has nothing of it.
        return {
            (table.name, server): None
            if answer is None
            else isinstance(answer, m.Status) and bool(answer.values.get("applied"))
            for (table, server), answer in zip(rounds, answers, strict=True)
        }


def _receive_speculative(request: ServerRequest, _: int, reply: m.ReplyBody) -> None:
    """Store new weights of a round that this worker has yet to start; other replies come again after its commit."""
    if isinstance(reply, m.Weights):
        request.incoming.receive(reply)


def _is_fenced(table: RemoteTable, error: BaseException | None) -> bool:
    """Return whether the others go on without this rank, so that it must not abort their rounds."""
    return table.view is not None and isinstance(error, FencedError)


def _decision_conflict(round_: Round, table: RemoteTable) -> KVStoreError | None:
    if table.name not in round_.decided:
        return None
    _, decision = round_.decided[table.name]
    if all((at in request.skipped) == decision.skip for request, at in round_.server_requests_of(table)):
        return None
    wanted = "wanted it to be skipped" if decision.skip else "wanted it to be applied"
    return KVStoreError(
        f"workers decided differently about round {table.round} of {table.name!r}: this one {wanted}, another one did "
        "not. What decides may depend on nothing in which workers differ. Restart the job from its last saved states"
    )


def _half_applied_error(
    table: RemoteTable, outcome: dict[str, bool | None], reason: str
) -> KVStoreError | None:
    if len(set(outcome.values())) == 1 and None not in outcome.values():
        return None
    applied = [server for server, applied_there in outcome.items() if applied_there]
    silent = [server for server, applied_there in outcome.items() if applied_there is None]
    facts = [f"{', '.join(applied)} had applied it"] if applied else []
    facts += [f"{', '.join(silent)} did not say whether it had been applied"] if silent else []
    return KVStoreError(
        f"round {table.round} of {table.name!r} failed ({reason}), but {' and '.join(facts)}: the servers may be "
        "one round apart. Restart the job from its last saved states"
    )


def _can_declare_intent(one: Contribution) -> bool:
    """Return whether an intent can be declared for a contribution: all values against all weights, or neither."""
    is_even = (one.values is None) == (one.outs is None) and one.tables[0].is_initialised
    return is_even and not _is_special(one)


def _is_special(one: Contribution) -> bool:
    return bool(
        one.absent or one.rows or one.veto or one.assign or one.joined or one.is_incremental or one.guard
    )


class EagerPushMonitor:
    """Warns once if a loop changes all eagerly pushed gradients before every step."""

    def __init__(self) -> None:
        self._rounds = 0

    def count(self, was_useful: bool) -> None:
        self._rounds = 0 if was_useful else self._rounds + 1
        if self._rounds == _WARN_AFTER:
            _log.warning(
                "overlap=True has sent every gradient twice in the last %d steps: they were changed between the "
                "backward pass and step(). The options clip_grad and amp of the Trainer clip and unscale without that. "
                "This is said once",
                _WARN_AFTER,
            )


class EagerPush:
    """What a worker has pushed to a table's open round before its commit, and the intent that it has declared.

    Pushed slices have generation 0. If some have changed since, what goes with the commit has generation 1: those
    that have changed, and those that were not complete before. If none counts, or one is not given at all, the
    commit tells servers to discard all of them.

    Over a network the worker declares, before its first slice, that the round will be like the last one: servers apply
    and answer slices as soon as all workers have pushed them, so new weights come during the backward pass. What a
    worker commits counts in any case, and servers roll back what does not fit. That costs time, so after a round that
    differed from its declaration none is made for some of the next ones.
    """

    def __init__(self) -> None:
        self.expected: Contribution | None = None
        """What the next round is expected to be like; None if nothing will be declared."""
        self.speculative: Round | None = None
        """The open round as it was declared, with the weights received since; None if nothing was declared."""
        self.round = -1
        self.sent: dict[int, Tensor] = {}
        """Slice (by index) → what was pushed of it."""
        self._memory: dict[int, Tensor] = {}
        """Slice (by index) → a buffer for it, with padding."""
        self._monitor = EagerPushMonitor()
        self._backoff = StallBackoff()
        """Skips some declarations after a round that differed from its own."""

    def begin(self, round_: int) -> None:
        self.round, self.sent, self.speculative = round_, {}, None

    def copy(self, slice_: Slice, parts: Sequence[Tensor]) -> Tensor:
        """Copy a slice together from the values of its keys; returns it with its padding."""
        values = self._memory.get(slice_.index)
        if values is None:
            values = torch.zeros(slice_.length, dtype=torch_dtype(slice_.dtype), device="cpu")
            self._memory[slice_.index] = values
        targets = [values[one.start : one.start + one.numel] for one in slice_.segments]
        torch._foreach_copy_(targets, list(parts))
        return values

    def record(self, slice_: Slice) -> None:
        self.sent[slice_.index] = self._memory[slice_.index][: slice_.used]

    def end(self, valid: Collection[int]) -> None:
        self._monitor.count(bool(valid))

    def expect(self, contribution: Contribution | None, was_right: bool) -> None:
        """Set what the next round is expected to be like; `was_right` unless this one differed from its declaration."""
        if not was_right:
            self._backoff.fail()
        elif self.speculative is not None and self.speculative.server_requests:
            self._backoff.reset()
        self.speculative = None
        self.expected = None
        if not self._backoff.take_skip() and contribution is not None:
            # The gradients themselves are not kept alive.
            self.expected = contribution._replace(borrowed={}, shared_grads={})
