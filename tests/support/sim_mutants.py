"""Ways in which a parameter server or a worker can be wrong, each as a small change of the real classes.

The simulation must find every one of them; if it does not, it proves nothing about the real code.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any
from unittest import mock

from kvstore_server import replies, round_keeper
from kvstore_server.consistency import Contribution, SyncRounds, Verdict
from kvstore_server.errors import KVStoreError
from kvstore_server.protocol import messages as m
from kvstore_server.sessions import Session, Sessions
from kvstore_server.table import Table
from kvtrainer.comm.compressor import Compressor

Patch = tuple[type | ModuleType, str, Callable[..., Any]]


def _count_based_round() -> list[Patch]:
    """A round is complete when as many commits as workers came, whoever sent them."""
    commit, missing_ranks = SyncRounds.commit, SyncRounds.missing_ranks

    def counting(self: Any, rank: int, body: m.Commit, waiter: Any, now: float) -> Verdict:
        if getattr(self, "counted_round", -1) != self.number:
            self.counted_round, self.count = self.number, 0
        verdict = commit(self, rank, body, waiter, now)
        self.count += body.round == self.number
        return verdict

    def by_count(self: Any) -> list[int]:
        enough = getattr(self, "counted_round", -1) == self.number and self.count >= self.num_workers
        return [] if self.number and enough else missing_ranks(self)

    return [
        (SyncRounds, "commit", counting),
        (SyncRounds, "missing_ranks", by_count),
        (SyncRounds, "is_complete", _nobody_is_missing),
        (SyncRounds, "contributions", _only_committed),
    ]


def _no_dedup() -> list[Patch]:
    """A slice that arrives twice counts twice."""
    push = SyncRounds.push

    def adding(self: Any, rank: int, body: m.Push) -> None:
        mine = self._open.get(rank)
        known = mine.slices.get(body.slice) if mine is not None and body.round == self.number else None
        if known is not None and known[0] == body.generation:
            mine.slices[body.slice] = (body.generation, known[1] + body.payload)
        else:
            push(self, rank, body)

    return [(SyncRounds, "push", adding)]


def _arrival_order_sum() -> list[Patch]:
    """Contributions are summed as they came."""

    contributions = SyncRounds.contributions

    def as_they_came(self: Any) -> list[tuple[int, Contribution[Any]]]:
        return list(self._open.items()) if self.number else contributions(self)

    return [(SyncRounds, "contributions", as_they_came)]


def _no_fencing() -> list[Patch]:
    """A process that was replaced may go on."""

    def ignoring(self: Any, *_: Any) -> None:
        return None

    return [(Sessions, "end", ignoring)]


def _whoever_has_the_token() -> list[Patch]:
    """A token is good from every socket."""

    def lenient(self: Any, peer: bytes, token: int) -> Session:
        session = self._live.get(token)
        return find(self, session.peer if session is not None else peer, token)

    find = Sessions.find
    return [(Sessions, "find", lenient)]


def _hello_begins_anew() -> list[Patch]:
    """A process that says hello twice fences itself."""

    def never(*_: Any) -> None:
        return None

    return [(Sessions, "repeated", never)]


def _mixed_generation() -> list[Patch]:
    """A commit is accepted with whatever generation of a slice is there."""
    commit = SyncRounds.commit

    def lenient(self: Any, rank: int, body: m.Commit, waiter: Any, now: float) -> Verdict:
        mine = self._open.get(rank)
        here = {s: g for s, (g, _) in mine.slices.items()} if mine is not None else {}
        if body.round == self.number:
            manifest = tuple((s, here.get(s, g)) for s, g in body.manifest)
            body = body._replace(manifest=manifest)
        return commit(self, rank, body, waiter, now)

    return [(SyncRounds, "commit", lenient)]


def _early_apply() -> list[Patch]:
    """A round does not wait for the slowest worker."""
    missing_ranks = SyncRounds.missing_ranks

    def but_one(self: Any) -> list[int]:
        missing = missing_ranks(self)
        return [] if self.number and len(missing) == 1 else missing

    return [
        (SyncRounds, "missing_ranks", but_one),
        (SyncRounds, "is_complete", _nobody_is_missing),
        (SyncRounds, "contributions", _only_committed),
    ]


def _lost_abort() -> list[Patch]:
    """An abort is acknowledged, but the round stays open."""

    def ignoring(self: Any, *_: Any) -> list[Any]:
        return []

    return [(Table, "abort", ignoring)]


def _forgotten_failure() -> list[Patch]:
    """A rank that comes late to a failed round is told that it was applied."""
    fail = SyncRounds.fail

    def forgetting(self: Any, error: KVStoreError) -> list[Any]:
        waiters = fail(self, error)
        self._failed_since = math.inf
        return waiters

    return [(SyncRounds, "fail", forgetting)]


def _slices_of_the_dead() -> list[Patch]:
    """What a process had pushed and not committed is left for its successor's commit."""

    def keeping(self: Any, rank: int) -> None:
        if self.has_committed(rank):
            self._open[rank].waiter = None

    return [(SyncRounds, "replace_process", keeping)]


def _veto_ignored_by_one_server() -> list[Patch]:
    """One of the servers applies a round although a rank has vetoed it."""
    apply = Table.apply

    def deaf(self: Any, *args: Any) -> list[tuple[int, Contribution[Any]]]:
        if self.unit.server == 1:
            for _, mine in self.rounds.contributions():
                mine.commit = mine.commit._replace(veto=False)
        return apply(self, *args)

    return [(Table, "apply", deaf)]


def _silent_veto() -> list[Patch]:
    """A round that was vetoed is answered as if it had been applied."""
    told = replies.outcome

    def silent(*args: Any) -> list[m.Outgoing]:
        return [out for out in told(*args) if not isinstance(out.reply.body, m.Vetoed)]

    return [(round_keeper, "outcome", silent)]


def _assign_that_sums() -> list[Patch]:
    """Values that are to replace the weights are summed over ranks."""
    assign = Table._assign

    def summing(self: Any, number: int, given: Any, is_lane: bool) -> None:
        assign(self, number, given, is_lane)
        if number:
            self.shard.assign_sum(self._summands(given, None))

    return [(Table, "_assign", summing)]


def _assign_that_forgets() -> list[Patch]:
    """Replacing the weights drops the optimizer's state."""
    assign = Table._assign

    def forgetting(self: Any, *args: Any) -> None:
        assign(self, *args)
        self.shard.reset_states()

    return [(Table, "_assign", forgetting)]


def _residual_moves_at_once() -> list[Patch]:
    """A worker's residual moves as soon as its gradient is compressed, whether or not the round is applied."""
    encode = Compressor.encode

    def eager(self: Any, *args: Any) -> Any:
        encoded = encode(self, *args)
        self.accept()
        return encoded

    return [(Compressor, "encode", eager)]


def _residual_that_stays() -> list[Patch]:
    """What a compressed gradient does not say is lost."""

    def nothing(self: Any) -> None:
        self._next = {}

    return [(Compressor, "accept", nothing)]


def _nobody_is_missing(self: Any) -> bool:
    return not self.missing_ranks()


def _only_committed(self: Any) -> list[tuple[int, Contribution[Any]]]:
    return [item for item in sorted(self._open.items()) if item[1].commit is not None]


MUTANTS: dict[str, Callable[[], list[Patch]]] = {
    "count_based_round": _count_based_round,
    "no_dedup": _no_dedup,
    "arrival_order_sum": _arrival_order_sum,
    "no_fencing": _no_fencing,
    "whoever_has_the_token": _whoever_has_the_token,
    "hello_begins_anew": _hello_begins_anew,
    "mixed_generation": _mixed_generation,
    "early_apply": _early_apply,
    "lost_abort": _lost_abort,
    "forgotten_failure": _forgotten_failure,
    "slices_of_the_dead": _slices_of_the_dead,
    "veto_ignored_by_one_server": _veto_ignored_by_one_server,
    "silent_veto": _silent_veto,
    "assign_that_sums": _assign_that_sums,
    "assign_that_forgets": _assign_that_forgets,
    "residual_moves_at_once": _residual_moves_at_once,
    "residual_that_stays": _residual_that_stays,
}


@contextmanager
def mutated(mutant: Callable[[], list[Patch]]) -> Iterator[None]:
    """Put a mutant in the place of the real code for a while."""
    patches = [mock.patch.object(cls, attribute, new) for cls, attribute, new in mutant()]
    for patch in patches:
        patch.start()
    try:
        yield
    finally:
        for patch in patches:
            patch.stop()
