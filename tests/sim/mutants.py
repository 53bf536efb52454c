"""Ways in which a server or a worker can be wrong, each as a small change of the real classes.

The simulation must find every one of them; if it does not, it proves nothing about the real code. A mistake that shows
in what an engine hears or says is made there: only what cannot be said so reaches deeper.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import torch

from kvstore_server.engine import pipelined
from kvstore_server.engine.agreed_options import AgreedOptions
from kvstore_server.engine.engine import Engine
from kvstore_server.engine.membership import Membership, RankSession, Sessions
from kvstore_server.engine.rounds import (
    _ARRIVED,
    CommitStatus,
    DelayedRequests,
    NamespaceRounds,
    RankInputs,
    RoundTracker,
)
from kvstore_server.engine.table import ALL, Table
from kvstore_server.processes import ProcessState
from kvstore_server.protocol import messages as m
from kvstore_server.shard import reduction
from kvstore_server.shard.norms import Decision
from kvstore_server.shard.reduction import Reduction
from kvstore_server.shard.shard import Shard
from kvtrainer.client.tables import Compressor

Wrong = Callable[..., Any]
Mutants = dict[str, list[tuple[Any, str, Wrong]]]
SYNC: Mutants = {}
ASYNC: Mutants = {}
"""Mutant → (class or module, attribute, what stands there instead; it is given what stood there before)."""
SHOWN_BY = {
    "applied_before_it_was_replaced": 87,
    "assign_that_forgets": 21,
    "begun_by_one_process_and_ended_by_another": 13,
    "empty_rows_do_not_take_part": 22,
    "expected_instead_of_known": 22,
    "generations_unnamed": 87,
    "held_for_ever": 76,
    "held_for_some": 15,
    "kept_with_other_terms": 22,
    "left_out_and_summed": 61,
    "no_time_for_a_successor": 27,
    "repeating_extends": 8,
    "residual_that_stays": 16,
    "state_not_taken_back": 28,
    "taken_back_in_silence": 28,
    "undoes_what_others_gave": 11,
}
"""A schedule in which a mutant shows that few of them show: others are tried where it does not show it any more."""


def replaces(where: Any, attribute: str, among: Mutants = SYNC, of: str = "") -> Callable[[Wrong], Wrong]:
    """Make a function a mutant, or a part of the one of that name."""

    def register(wrong: Wrong) -> Wrong:
        among.setdefault(of or wrong.__name__, []).append((where, attribute, wrong))
        return wrong

    return register


@contextmanager
def mutated(mutant: list[tuple[Any, str, Wrong]]) -> Iterator[None]:
    """Put a mutant in the place of the real code for a while.

    Raises:
        AssertionError: the mutant does not fit the real code any more: it raised an error of its own.
    """
    unfit: list[Exception] = []
    with ExitStack() as stack:
        for where, attribute, wrong in mutant:
            real = getattr(where, attribute)

            def instead(*args: Any, real: Any = real, wrong: Any = wrong, **options: Any) -> Any:
                try:
                    return wrong(real, *args, **options)
                except Exception as error:
                    if _begins_in(error, wrong.__code__.co_filename):
                        unfit.append(error)
                    raise

            stack.enter_context(mock.patch.object(where, attribute, instead))
        yield
    assert not unfit, unfit[0]


def _begins_in(error: Exception, file: str) -> bool:
    """Whether an error was raised by code of a file itself, or by a call of it that did not fit."""
    *_, (last, _) = traceback.walk_tb(error.__traceback__)
    return last.f_code.co_filename in (file, __file__)


# ---------------------------------------------------------------- servers that see processes wrongly


@replaces(RankSession, "is_dead")
def dead_before_its_last_words(_: Any, self: Any, now: float) -> bool:
    """A process is given up the moment that it has ended, whatever it has said is on its way."""
    return self.state is ProcessState.ENDED


@replaces(RankSession, "is_dead")
def dead_by_silence_alone(*_: Any) -> bool:
    """Nobody minds that a process has ended."""
    return False


@replaces(Engine, "check_processes")
def successor_taken_for_the_dead(real: Any, self: Any, processes: Any, now: float) -> None:
    """The end of a process is held against the one in its place."""
    real(self, processes, now)
    for _, token in processes.ended():
        if token in self._sessions._ended:
            rank = self._sessions._ended[token][0].hello.rank
            for session in self._sessions:
                if session.hello.rank == rank and session.state is not ProcessState.ENDED:
                    session.state, session.seen_at = ProcessState.ENDED, now


@replaces(Membership, "lost", ASYNC)
def no_time_for_a_successor(real: Any, self: Any, now: float, dead_after: float) -> list[int]:
    """A rank whose process is dead is lost at once, although another process may go on in its place."""
    dead = [rank for rank, member in self.members.items() if member.is_dead(now)]
    return sorted({*real(self, now, dead_after), *dead})


# ---------------------------------------------------------------- servers that hear something else


def hears(among: Mutants) -> Callable[[Wrong], Wrong]:
    """Make a mutant of an engine to which something else is said than what came."""

    def register(change: Wrong) -> Wrong:
        def handle(real: Any, self: Any, peer: bytes, request: m.Request, now: float) -> Any:
            return real(self, peer, request._replace(body=change(self, request.body)), now)

        return replaces(Engine, "handle", among, change.__name__)(handle)

    return register


@hears(SYNC)
def veto_ignored_by_one_server(self: Any, body: Any) -> Any:
    """One of the servers applies a round although a rank has vetoed it."""
    if not isinstance(body, m.Contribute) or not self.config.server:
        return body
    commits = body.commits.copy()
    commits[:, m.COMMIT_FLAGS] &= ~m.VETOES
    return replace(body, commits=commits)


@hears(SYNC)
def applied_without_a_decision(self: Any, body: Any) -> Any:
    """A round that is to be held is applied at once."""
    return replace(body, hold=0.0) if isinstance(body, m.Contribute) else body


@hears(SYNC)
def held_for_some(self: Any, body: Any) -> Any:
    """Where ranks differ in whether a round is held, it is."""
    if not isinstance(body, m.Contribute) or not len(body.commits):
        return body
    [[table, round_, *_, flags]] = body.commits.tolist()
    if not round_ or flags & (m.HAS_JOINED | m.ASSIGNS):
        return body
    holds = self.__dict__.setdefault("holds", {})
    holds[table, round_] = max(body.hold, holds.get((table, round_), 0.0))
    return replace(body, hold=holds[table, round_])


@hears(SYNC)
def skipped_all_the_same(self: Any, body: Any) -> Any:
    """A round that is to be skipped is applied."""
    return replace(body, skip=False) if isinstance(body, m.Resolve) else body


@hears(SYNC)
def clipped_on_one_server(self: Any, body: Any) -> Any:
    """One of the servers applies the sum as it is."""
    is_deaf = isinstance(body, m.Resolve) and self.config.server == 0
    return replace(body, coef=1.0, clip_value=None) if is_deaf else body


@hears(SYNC)
def hello_discards_contributions(self: Any, body: Any) -> Any:
    """A process that says hello twice fences itself."""
    self.said = getattr(self, "said", 0) + 1
    return replace(body, nonce=b"%d" % self.said) if isinstance(body, m.Hello) else body


@hears(ASYNC)
def bound_off_by_one(self: Any, body: Any) -> Any:
    """A rank may read one contribution too far ahead."""
    is_bound = isinstance(body, m.Hello) and body.mode == "ssp"
    return replace(body, staleness=body.staleness + 1) if is_bound else body


# ---------------------------------------------------------------- servers that say something else


def says(among: Mutants) -> Callable[[Wrong], Wrong]:
    """Make a mutant of an engine that answers something else than it should."""

    def register(change: Wrong) -> Wrong:
        def handle(real: Any, self: Any, peer: bytes, request: m.Request, now: float) -> Any:
            return change(self, peer, request, real(self, peer, request, now))

        return replaces(Engine, "handle", among, change.__name__)(handle)

    return register


Out = list[m.Outgoing]


def _said(out: m.Outgoing, body: Any) -> m.Outgoing:
    return out._replace(reply=out.reply._replace(body=body))


def _is(out: m.Outgoing, *kinds: type) -> bool:
    return isinstance(out.reply.body, kinds)


@says(SYNC)
def silent_veto(self: Any, peer: bytes, request: m.Request, out: Out) -> Out:
    """A round that was vetoed is answered as if it had been applied."""
    return [one for one in out if not _is(one, m.Vetoed)]


@says(SYNC)
def join_without_an_end(self: Any, peer: bytes, request: m.Request, out: Out) -> Out:
    """Ranks that have joined are never told that all have."""
    return [
        _said(one, replace(one.reply.body, is_over=False)) if _is(one, m.EffectiveOptions) else one
        for one in out
    ]


@says(SYNC)
def forgotten_failure(self: Any, peer: bytes, request: m.Request, out: Out) -> Out:
    """A rank that comes late to a failed round is told that it was applied."""
    known = self.__dict__.setdefault("failed", set())
    failed = {(one.reply.body.table, one.reply.body.round) for one in out if _is(one, m.Failed)}
    if isinstance(request.body, m.Contribute) and failed & known:
        return [_said(one, m.Done(m.matrix([(*failed.pop(), 0)], 3))) for one in out]
    known |= failed
    return out


@says(SYNC)
def lost_answer_stays_lost(self: Any, peer: bytes, request: m.Request, out: Out) -> Out:
    """Who asks again is told that the round waits, but not for what."""
    told = self.__dict__.setdefault("told", set())
    held = {(one.peer, one.reply.number) for one in out if _is(one, m.Held)}
    is_again = len(out) == 1 and held <= told
    told |= held
    return [_said(one, m.Pending(())) if _is(one, m.Held) and is_again else one for one in out]


@says(SYNC)
def lost_answer_is_gone_when_it_is_over(self: Any, peer: bytes, request: m.Request, out: Out) -> Out:
    """Who asks again when the round is over is not told what was measured."""
    is_over = any(_is(one, m.Done, m.Weights) for one in out)
    return [one for one in out if not (is_over and _is(one, m.Held))]


@says(SYNC)
def partials_of_other_slices(self: Any, peer: bytes, request: m.Request, out: Out) -> Out:
    """The partial norms come in the wrong order."""

    def turned(held: Any) -> Any:
        slices, norms = [slice_ for slice_, _ in held.partials], [norm for _, norm in held.partials]
        return replace(held, partials=tuple(zip(reversed(slices), norms, strict=True)))

    return [_said(one, turned(one.reply.body)) if _is(one, m.Held) else one for one in out]


@says(SYNC)
def joined_ranks_are_asked(self: Any, peer: bytes, request: m.Request, out: Out) -> Out:
    """Ranks without data are told what there is to decide about, too."""
    joined = self.__dict__.setdefault("joined", {})
    for table, round_, *_, flags in (
        request.body.commits.tolist() if isinstance(request.body, m.Contribute) else ()
    ):
        if flags & m.HAS_JOINED:
            joined.setdefault((table, round_), []).append((peer, request.number))
    asked = [one.reply.body for one in out if _is(one, m.Held)][:1]
    return out + [
        m.Outgoing(other, m.Reply(number, held))
        for held in asked
        for other, number in joined.pop((held.table, held.round), ())
    ]


@says(ASYNC)
def abort_of_a_wait_unheard(self: Any, peer: bytes, request: m.Request, out: Out) -> Out:
    """Who waits goes on waiting although it has given up."""
    return [one for one in out if not (isinstance(request.body, m.Abort) and _is(one, m.Failed))]


# ---------------------------------------------------------------- servers that do something else


@replaces(Engine, "handle")
def lost_abort(real: Any, self: Any, peer: bytes, request: m.Request, now: float) -> Any:
    """An abort is acknowledged, but the round stays open."""
    if not isinstance(request.body, m.Abort):
        return real(self, peer, request, now)
    [told] = real(self, peer, request._replace(body=m.Stats()), now)
    if (
        not _is(told, m.Status)
        or told.reply.body.values["tables"][request.body.table]["round"] != request.body.round
    ):
        return real(self, peer, request, now)
    return [_said(told, m.Status({"applied": False}))]


@replaces(Sessions, "end")
def no_fencing(real: Any, self: Any, *_: Any) -> None:
    """A process that was replaced may go on."""


@replaces(Sessions, "find")
def whoever_has_the_token(real: Any, self: Any, peer: bytes, token: int) -> Any:
    """A token is good from every socket."""
    [peer] = [session.peer for session in self if session.token == token] or [peer]
    return real(self, peer, token)


@replaces(RoundTracker, "commit")
def count_based_round(real: Any, self: Any, rank: int, commits: m.Matrix, *args: Any) -> Any:
    """A round is complete when as many commits as workers came, whoever sent them."""
    verdicts = real(self, rank, commits, *args)
    if verdicts is not None:
        repeated = commits[verdicts == CommitStatus.REPEATED]
        self.num_committed[repeated[repeated[:, 1] > 0, 0]] += 1
    return verdicts


@replaces(RoundTracker, "commit")
def mixed_generation(real: Any, self: Any, rank: int, commits: m.Matrix, *args: Any) -> Any:
    """A commit is accepted with whatever generation of a slice is there."""
    commits = commits.copy()
    commits[:, m.COMMIT_GENERATIONS] = (
        self.of(rank).sums[commits[:, m.COMMIT_TABLE]] - commits[:, m.COMMIT_COUNT] * _ARRIVED
    )
    return real(self, rank, commits, *args)


@replaces(RankInputs, "discard_eager")
def left_out_and_summed(real: Any, self: Any, table: int) -> None:
    """What a rank pushed, and then left out, counts all the same."""
    marks, buffers = self.arrivals.copy(), [*self._buffers]
    real(self, table)
    self.arrivals, self._buffers = marks, buffers


@replaces(RankInputs, "discard_eager")
def all_forgotten(real: Any, self: Any, table: int) -> None:
    """A rank that begins anew has to push again what it pushed after that."""
    self.clear(np.array([table]), self._slots.of(np.array([table])))


@replaces(RoundTracker, "push")
def no_dedup(real: Any, self: Any, rank: int, pushes: m.Matrix, sources: Any, which: Any, starts: Any) -> Any:
    """A slice that arrives twice counts twice."""
    given = self.of(rank)
    for row, source, start in zip(pushes.tolist(), which, starts, strict=True):
        slot, round_, generation, size = row
        is_open = round_ == self.number(self._slots.table[slot])
        if is_open and given.arrivals[slot] == generation + _ARRIVED and torch.is_tensor(sources[source]):
            known, at = given.payload(slot)
            mine = known[at : at + size].view(torch.float32)
            mine += sources[source][start : start + size].view(torch.float32)
    real(self, rank, pushes, sources, which, starts)


@replaces(RoundTracker, "commit")
def arrival_order_sum(real: Any, self: Any, rank: int, *args: Any) -> Any:
    """Contributions are summed as they came."""
    verdicts = real(self, rank, *args)
    if self.number(0) and self.number(1):
        self.inputs[rank] = self.inputs.pop(rank)
    return verdicts


@replaces(RoundTracker, "commit")
def early_apply(real: Any, self: Any, rank: int, commits: m.Matrix, *args: Any) -> Any:
    """A round does not wait for the slowest worker."""
    verdicts = real(self, rank, commits, *args)
    is_accepted = True if verdicts is None else verdicts == CommitStatus.ACCEPTED
    tables = commits[is_accepted & (commits[:, m.COMMIT_ROUND] > 0), m.COMMIT_TABLE]
    self.num_committed[tables[self.num_committed[tables] == self.num_members - 1]] += 1
    return verdicts


@replaces(RoundTracker, "replace_process")
def slices_of_the_dead(real: Any, self: Any, rank: int) -> None:
    """What a process had pushed and not committed is left for its successor's commit."""
    given = self.of(rank)
    given.waiters = [None] * len(given.waiters)


@replaces(Table, "_assign")
def assign_that_sums(real: Any, self: Any, round_: int, parts: Any, is_lane: bool) -> None:
    """Values that are to replace the weights are summed over ranks."""
    real(self, round_, parts, is_lane)
    if round_:
        self.shard.assign_sum([part.contribution._replace(scale=1.0) for part in parts.values()])


@replaces(Table, "_assign")
def assign_that_forgets(real: Any, self: Any, *args: Any) -> None:
    """Replacing the weights drops the optimizer's state."""
    real(self, *args)
    self.shard.reset_states()


@replaces(Table, "apply")
def joined_rank_still_gives(real: Any, self: Any, whose: int, round_: int, parts: Any, *args: Any) -> None:
    """The values of a rank without data replace the weights, where it is the lowest."""
    if round_ and 1 < len(parts) < self.num_workers:
        parts = dict(list(parts.items())[1:])
    real(self, whose, round_, parts, *args)


@replaces(AgreedOptions, "common")
def hyper_of_the_joined(real: Any, self: Any, ranks: Any, *args: Any) -> bytes:
    """What a rank believed before it ran out of data must still agree."""
    return bytes(real(self, {*ranks, *self._sent}, *args))


@replaces(reduction, "coalesce_rows")
def rows_overwrite(real: Any, ids: torch.Tensor, values: torch.Tensor, num_rows: int) -> Any:
    """Of two ranks that give the same row, the last one counts."""
    kept = {int(row): at for at, row in enumerate(ids)}
    rows = sorted(kept)
    return torch.tensor(rows, dtype=torch.int64), values[[kept[row] for row in rows]]


@replaces(Reduction, "given_as_rows")
def empty_rows_do_not_take_part(real: Any, self: Any, contributions: Any) -> Any:
    """A rank that has no row of a key makes the others' sum a dense one."""
    found = real(self, contributions)
    return [k for k in found if all(k not in c.rows or len(c.rows[k].ids) for c in contributions)]


@replaces(Compressor, "encode")
def residual_moves_at_once(real: Any, self: Any, *args: Any) -> Any:
    """A worker's residual moves as soon as its gradient is compressed, whether or not the round is applied."""
    encoded = real(self, *args)
    self.accept()
    return encoded


@replaces(Compressor, "accept")
def residual_that_stays(real: Any, self: Any) -> None:
    """What a compressed gradient does not say is lost."""
    self._next = {}


# ---------------------------------------------------------------- rounds that are held


@replaces(Table, "apply_held")
def applied_twice(real: Any, self: Any, decision: Decision) -> None:
    """The sum that was held is applied two times."""
    held = self.held
    real(self, decision)
    if not decision.skip:
        end = self.ends[ALL]
        self.held = held
        real(self, Decision())
        self.ends[ALL], self.version = end, end.version


@replaces(Table, "apply_held", of="second_decision_counts")
def _remember(real: Any, self: Any, decision: Decision) -> None:
    self.last_held = self.held
    real(self, decision)


@replaces(Engine, "handle")
def second_decision_counts(real: Any, self: Any, peer: bytes, request: m.Request, now: float) -> Any:
    """A decision about a round that is over is applied as well."""
    out, body = real(self, peer, request, now), request.body
    if isinstance(body, m.Resolve) and not out:
        table = self.namespaces["sim"].tables[body.table]
        open_, table.held = table.held, getattr(table, "last_held", None)
        if table.held is not None:
            table.apply_held(Decision(body.coef, body.clip_value, body.skip))
        table.held = open_
    return out


@replaces(Table, "fail")
def held_for_ever(real: Any, self: Any, *args: Any) -> None:
    """A round that was given up while it was held is still held when the next one is open."""
    held = self.held
    real(self, *args)
    self.held = held


@replaces(Shard, "hold")
def norm_of_one_rank(real: Any, self: Any, contributions: Any, *args: Any) -> Any:
    """What is measured is the gradient of the first rank alone."""
    told = real(self, contributions[:1], *args).partials
    return real(self, contributions, *args)._replace(partials=told)


# ---------------------------------------------------------------- contributions one by one


@replaces(pipelined, "roll_back")
def taken_back_in_silence(real: Any, space: Any, table: Any) -> None:
    """Weights that were sent of a round that is taken back are not superseded."""
    was_changed = table.pipelined is not None and table.pipelined.undo is not None
    real(space, table)
    table.version -= was_changed


@replaces(pipelined, "roll_back_broken")
def begun_by_one_process_and_ended_by_another(real: Any, space: Any) -> None:
    """Slices that were applied stay so when the process of a rank is replaced that has not committed."""


@replaces(pipelined, "finish")
def applied_again_with_the_commits(real: Any, space: Any, table: Any) -> Any:
    """With the commits all of a round is applied, also what had been."""
    if table.pipelined.undo is not None:
        unit = table.unit
        table.pipelined.left = dict.fromkeys(range(unit.first, unit.end), 0)
    return real(space, table)


@replaces(pipelined, "_fits_pipelined_intent")
def applied_before_it_was_replaced(real: Any, *_: Any) -> bool:
    """What was applied stays when a rank says, or commits, another generation of it."""
    return True


@replaces(pipelined, "_check_revised_pipelined_intent")
def kept_with_other_terms(real: Any, space: Any, table: Any, rank: int) -> None:
    """What was applied stays when a rank announces the same slices with another factor, or other numbers."""
    if table.pipelined is not None:
        intent = space.rounds.shared.inputs[rank].intents[table.number]
        table.pipelined.intents = {**table.pipelined.intents, rank: intent}
        if not pipelined._fits_pipelined_intent(
            table, table.pipelined, table.pipelined.intents[rank], intent.arrivals
        ):
            pipelined.roll_back(space, table)


@hears(SYNC)
def generations_unnamed(self: Any, body: Any) -> Any:
    """Of an announcement the slices that it names are not looked at."""
    is_announcement = (
        isinstance(body, m.Contribute) and (body.commits[:, m.COMMIT_FLAGS] & m.DECLARES_INTENT).any()
    )
    return replace(body, pushes=body.pushes[:0]) if is_announcement else body


@replaces(RoundTracker, "declare_intent")
def expected_instead_of_known(real: Any, self: Any, rank: int, commit: Any, said: Any, waiter: Any) -> Any:
    """What a rank expected and what it knows count alike, whichever came last."""
    known = self.of(rank).intents.get(commit[0])
    if known is not None:
        self.of(rank).intents[commit[0]] = known._replace(is_firm=False)
    return real(self, rank, commit, said, waiter)


@replaces(Shard, "restore")
def state_not_taken_back(real: Any, self: Any, unit: Any, former: Any) -> None:
    """What is taken back leaves its traces in the optimizer's state."""
    real(
        self, unit, former._replace(states=[self._copied_state(slot) for slot in range(unit.first, unit.end)])
    )


@replaces(Table, "apply", ASYNC, of="applied_again")
def _keep(real: Any, self: Any, whose: int, *args: Any) -> None:
    self.__dict__.setdefault("applied", {})[whose] = args
    real(self, whose, *args)


@replaces(Engine, "handle", ASYNC)
def applied_again(real: Any, self: Any, peer: bytes, request: m.Request, now: float) -> Any:
    """A contribution that is repeated is applied again."""
    body, known = request.body, self.__dict__.setdefault("counted", set())
    out = real(self, peer, request, now)
    for table, round_, *_, flags in body.commits.tolist() if isinstance(body, m.Contribute) else ():
        where = (request.session, table, round_)
        if where in known and not flags & m.HAS_JOINED and round_:
            rank = next(session.hello.rank for session in self._sessions if session.token == request.session)
            applied = self.namespaces["sim"].tables[table]
            applied.apply(rank, *applied.applied[rank])
        if not any(_is(one, m.Failed, m.Missing) for one in out):
            known.add(where)
    return out


@replaces(NamespaceRounds, "behind", ASYNC)
def bound_of_the_fastest(real: Any, self: Any, rank: int, table: int) -> list[int]:
    """A rank waits only while all of the others are too far behind."""
    found = list(real(self, rank, table))
    return found if len(found) == self.num_workers - 1 else []


@replaces(NamespaceRounds, "lane", ASYNC)
def shared_lane(real: Any, self: Any, rank: int, *args: Any) -> Any:
    """Two ranks share a sequence."""
    return real(self, max(rank, 1), *args)


@replaces(NamespaceRounds, "begin_process", ASYNC)
def lane_of_the_dead(real: Any, self: Any, rank: int, resumes: bool) -> None:
    """A new process goes on in the sequence of the one that it replaces, although it does not resume."""
    lanes = dict(self.lanes)
    real(self, rank, resumes)
    self.lanes = lanes


@replaces(NamespaceRounds, "behind", ASYNC)
def joined_is_needed(real: Any, self: Any, rank: int, table: int) -> list[int]:
    """A rank that has no more data holds the others back."""
    joined = set(self.joined(table))
    self.joined(table).clear()
    found = list(real(self, rank, table))
    self.joined(table).update(joined)
    return found


@replaces(NamespaceRounds, "end_process", ASYNC)
def left_is_needed(real: Any, self: Any, rank: int, is_done: bool, is_resumable: bool) -> None:
    """A rank that left because it was done holds the others back."""
    real(self, rank, False, is_resumable)


@replaces(DelayedRequests, "take_ready", ASYNC)
def one_wakes_up(real: Any, self: Any) -> Any:
    """Of those that waited for one another only the first is told."""
    return real(self)[:1]


@replaces(DelayedRequests, "take_ready", ASYNC)
def read_not_released(real: Any, self: Any) -> Any:
    """Who waits to read is not told when the others have come."""
    ready = real(self)
    for wait in ready:
        if not wait.is_join:
            self.add(wait)
    return [wait for wait in ready if wait.is_join]


@replaces(Table, "undo", ASYNC)
def undoes_what_others_gave(real: Any, self: Any, whose: int) -> Any:
    """A rank that takes its contribution back takes back whatever came last."""
    self.last_rank = whose
    return real(self, whose)


@replaces(NamespaceRounds, "lane", ASYNC)
def each_server_has_its_clock(real: Any, self: Any, rank: int, tables: Any, rounds: Any) -> Any:
    """A new process begins on each server where that server's slowest rank is."""
    for table in tables.tolist():
        clocks = self.clocks(table)
        clocks[rank] = max(clocks[rank], self.next_round(rank, table) - 1)
    mine = {table: self.clocks(table)[rank] for table in tables.tolist()}
    found = real(self, rank, tables, rounds)
    for table, clock in mine.items():
        self.clocks(table)[rank] = clock
    return found


@replaces(DelayedRequests, "add", ASYNC)
def repeating_extends(real: Any, self: Any, wait: Any) -> None:
    """Who asks again waits from then on."""
    deadline = wait.deadline
    real(self, wait)
    wait.deadline = deadline


@replaces(NamespaceRounds, "fail_join", ASYNC)
def failed_join_forgotten(real: Any, self: Any, rank: int, table: int, *_: Any) -> None:
    """Who joined in vain, and asks again, is told that all have joined."""
    self.joined(table).discard(rank)


@replaces(NamespaceRounds, "end_join", ASYNC)
def join_that_stays(real: Any, self: Any, table: int) -> None:
    """After all have joined they still count as ranks without data."""
    joined = set(self.joined(table))
    real(self, table)
    self.joined(table).update(joined)
