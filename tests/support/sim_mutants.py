"""Ways in which a parameter server or a worker can be wrong, each as a small change of the real classes.

The simulation must find every one of them; if it does not, it proves nothing about the real code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any
from unittest import mock

import numpy as np
import torch

from kvstore_server import engine
from kvstore_server.engine import Engine
from kvstore_server.errors import KVStoreError
from kvstore_server.protocol import messages as m
from kvstore_server.rounds import Book, Given, Ints, Verdict
from kvstore_server.sessions import Session, Sessions
from kvstore_server.table import Table
from kvtrainer.comm.compressor import Compressor

Patch = tuple[type | ModuleType, str, Callable[..., Any]]


def _count_based_round() -> list[Patch]:
    """A round is complete when as many commits as workers came, whoever sent them."""
    commit = Book.commit

    def counting(self: Any, rank: int, commits: m.Matrix, *args: Any) -> Ints:
        verdicts = commit(self, rank, commits, *args)
        repeated = commits[verdicts == Verdict.REPEATED]
        self.tables["committed"][repeated[repeated[:, 1] > 0, 0]] += 1
        return verdicts

    return [(Book, "commit", counting)]


def _no_dedup() -> list[Patch]:
    """A slice that arrives twice counts twice."""
    push = Book.push

    def adding(self: Any, rank: int, pushes: m.Matrix, sources: Any, which: Ints, starts: Ints) -> None:
        given = self.of(rank)
        for (slot, round_, generation, size), source, start in zip(
            pushes.tolist(), which, starts, strict=True
        ):
            is_open = round_ == self.number(self._slots.table[slot])
            if is_open and given.slots["generation"][slot] == generation and torch.is_tensor(sources[source]):
                known, at = given.payload(slot)
                mine = known[at : at + size].view(torch.float32)
                mine += sources[source][start : start + size].view(torch.float32)
        push(self, rank, pushes, sources, which, starts)

    return [(Book, "push", adding)]


def _arrival_order_sum() -> list[Patch]:
    """Contributions are summed as they came."""
    commit = Book.commit

    def last(self: Any, rank: int, *args: Any) -> Ints:
        verdicts = commit(self, rank, *args)
        self.given[rank] = self.given.pop(rank)
        return verdicts

    def as_they_came(self: Any) -> list[tuple[int, Given]]:
        is_begun = self.tables["number"][: self._slots.num_tables].all()
        return list(self.given.items()) if is_begun else sorted(self.given.items())

    return [(Book, "commit", last), (Book, "members", as_they_came)]


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
    commit = Book.commit

    def lenient(self: Any, rank: int, commits: m.Matrix, *args: Any) -> Ints:
        commits = commits.copy()
        commits[:, 3] = self.of(rank).tables["generations"][commits[:, 0]]
        return commit(self, rank, commits, *args)

    return [(Book, "commit", lenient)]


def _early_apply() -> list[Patch]:
    """A round does not wait for the slowest worker."""

    def but_one(self: Any, tables: Ints) -> Any:
        here = self.tables[tables]
        return here["committed"] >= self.num_members - ((here["number"] > 0) & (self.num_members > 1))

    return [(Book, "complete", but_one)]


def _lost_abort() -> list[Patch]:
    """An abort is acknowledged, but the round stays open."""

    def ignoring(self: Any, space: Any, rank: int, abort: m.Abort, waiter: Any) -> list[m.Outgoing]:
        stands = space.rounds.book(rank, abort.table, abort.round).was_applied(abort.table, abort.round)
        return engine._reply(waiter, m.Info({"applied": stands}))

    return [(Engine, "_abort", ignoring)]


def _forgotten_failure() -> list[Patch]:
    """A rank that comes late to a failed round is told that it was applied."""
    fail = Book.fail

    def forgetting(self: Any, table: int, error: KVStoreError) -> list[Any]:
        waiters = fail(self, table, error)
        self.tables["failed"][table] = np.iinfo(np.int64).max
        return waiters

    return [(Book, "fail", forgetting)]


def _slices_of_the_dead() -> list[Patch]:
    """What a process had pushed and not committed is left for its successor's commit."""

    def keeping(self: Any) -> None:
        self.tables["waits"] = False

    return [(Given, "replace_process", keeping)]


def _veto_ignored_by_one_server() -> list[Patch]:
    """One of the servers applies a round although a rank has vetoed it."""
    apply = Table.apply

    def deaf(self: Any, whose: int, round_: int, parts: Any, *args: Any) -> None:
        if self.unit.server == 1:
            parts = {rank: part._replace(flags=part.flags & ~m.VETOES) for rank, part in parts.items()}
        apply(self, whose, round_, parts, *args)

    return [(Table, "apply", deaf)]


def _silent_veto() -> list[Patch]:
    """A round that was vetoed is answered as if it had been applied."""
    told = engine._outcomes

    def silent(*args: Any) -> list[m.Outgoing]:
        return [out for out in told(*args) if not isinstance(out.reply.body, m.Vetoed)]

    return [(engine, "_outcomes", silent)]


def _assign_that_sums() -> list[Patch]:
    """Values that are to replace the weights are summed over ranks."""
    assign = Table._assign

    def summing(self: Any, round_: int, parts: Any, is_lane: bool) -> None:
        assign(self, round_, parts, is_lane)
        if round_:
            self.shard.assign_sum(self._contributions(parts, None))

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
