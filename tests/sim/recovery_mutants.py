"""Ways in which servers can be wrong about what outlives a process; the simulation of recovery must find every one."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvstore_server.durable.journal import _RANGE, Journal
from kvstore_server.engine import durability, image
from kvstore_server.engine.engine import Engine
from kvstore_server.engine.membership import Membership, Sessions
from kvstore_server.engine.namespace import Namespace
from kvstore_server.engine.rounds import RoundTracker
from kvstore_server.engine.table import Table
from kvstore_server.failpoints import failpoint
from kvstore_server.protocol import messages as m
from kvstore_server.shard.norms import Decision
from kvstore_server.shard.storage import Storage
from tests.sim.mutants import SYNC, Mutants, replaces

RECOVERY: Mutants = {
    name: SYNC[name] for name in ("no_fencing", "count_based_round", "no_dedup", "early_apply")
}
SHOWN_BY = {
    "former_rows_forgotten": 13,
    "images_without_hypers": 5,
    "unchanged_slots_are_those_of_an_earlier_round": 49,
}
"""A seed that shows a mutant which few of them show."""


def wrong(where: Any, attribute: str) -> Any:
    return replaces(where, attribute, RECOVERY)


# ---------------------------------------------------------------- the journal


@wrong(Journal, "_copy")
def record_before_the_copy(real: Any, self: Any, region: Any, begin: int, end: int) -> None:
    """What is protected is recorded before its values are in the shadow."""
    self._record(False, _RANGE.pack(region.number, begin, end))
    failpoint("server.journal.copied")
    real(self, region, begin, end)


@wrong(Journal, "protect")
def changed_before_the_copy(real: Any, self: Any, tensors: Any) -> None:
    """Nothing is protected."""


@wrong(Journal, "former_rows")
def former_rows_forgotten(real: Any, self: Any, *_: Any) -> None:
    """Rows before a round are the present ones."""


# ---------------------------------------------------------------- weights before a round


@wrong(Storage, "former")
def no_previous_version(real: Any, self: Any, slot: int) -> Any:
    """Weights before a round are the present ones."""
    return self.padded[slot]


@wrong(Storage, "end_change")
def unchanged_slots_are_those_of_an_earlier_round(real: Any, self: Any, slots: Any) -> None:
    """Where a round has changed nothing, the weights before it are those before another one."""


@wrong(Namespace, "weights_before")
def present_weights_for_a_repeated_round(real: Any, self: Any, round_: int, table: Any) -> Any:
    return self.weights(self.batch_of(np.array([table.number], np.int64)), is_pull=True)


# ---------------------------------------------------------------- what is logged, and when


@wrong(Engine, "handle")
def answered_before_it_is_logged(real: Any, self: Any, peer: bytes, request: m.Request, now: float) -> Any:
    self._durability.commit(self.namespaces, self._sessions, self._finished)  # what was answered before
    return self._handle(peer, request, now)


def without(part: str) -> None:
    """Make a mutant whose images lack a part."""

    def make_image(real: Any, *args: Any) -> Any:
        found = real(*args)
        if "space" not in found:  # the first one is needed to go on at all
            found.pop(part, None)
        return found

    RECOVERY[f"images_without_{part}"] = [(durability, "make_image", make_image)]


for each in ("hypers", "clients", "sessions", "members", "tables", "optimizer"):
    without(each)


@wrong(image, "_apply_image_shard")
def state_of_keys_not_restored(real: Any, space: Any, values: Any) -> None:
    real(space, {name: value for name, value in values.items() if name not in ("blocks", "entries")})


@wrong(image, "_apply_image_shard")
def update_counts_not_restored(real: Any, space: Any, values: Any) -> None:
    real(space, values)
    space.shard.counts[:] = 0


@wrong(image, "_apply_image_tables")
def rounds_applied_not_restored(real: Any, space: Any, values: Any) -> None:
    real(space, values)
    for table in space.tables:
        table.rounds_applied = 0


@wrong(image, "_apply_image_tables")
def ends_of_rounds_not_restored(real: Any, space: Any, values: Any) -> None:
    """How a round has ended is not known any more to who asks again."""
    real(space, values)
    for table in space.tables:
        table.ends = {}


@wrong(RoundTracker, "restore")
def round_before_the_last(real: Any, self: Any, numbers: Any, rounds: Any, *args: Any) -> None:
    """The last round begins again."""
    real(self, numbers, np.maximum(rounds - 1, 0), *args)


# ---------------------------------------------------------------- who may speak, and what is repeated


@wrong(durability, "restore_image_sessions")
def tokens_not_restored(real: Any, *_: Any) -> None:
    """No session outlives the server."""


@wrong(Sessions, "restore")
def fenced_again_valid(real: Any, self: Any, session: Any, reason: Any) -> None:
    """A process that was replaced may speak again after a restart."""
    real(self, session, None)


@wrong(Engine, "_check_is_latest")
def former_process_replaces_its_successor(real: Any, *_: Any) -> None:
    """Who says hello last has the rank."""


@wrong(Membership, "enter_barrier")
def barrier_counted_again(real: Any, self: Any, rank: int, gather: Any, waiter: Any, now: float) -> Any:
    """A rank that comes to a barrier again waits for the others to do the same."""
    if gather.sequence < self.barrier_sequence:
        self.barrier_sequence = gather.sequence
    return real(self, rank, gather, waiter, now)


@wrong(Engine, "_handle")
def lost_commit_counts_when_repeated(
    real: Any, self: Any, peer: bytes, request: m.Request, now: float
) -> Any:
    """A successor that asks for the end of a round whose commit is lost gives nothing to it."""
    body = request.body
    if isinstance(body, m.Contribute) and len(body.commits):
        commits = body.commits.copy()
        commits[:, m.COMMIT_FLAGS] &= ~m.REPEATS
        body = m.Contribute(
            body.pushes, body.payloads, commits, body.encoding, body.hyper, body.absent, body.rescale, body.timeout,
            body.hold, body.client_state,
        )  # fmt: skip
    return real(self, peer, request._replace(body=body), now)


@wrong(Table, "apply_held")
def decision_forgotten(real: Any, self: Any, decision: Decision) -> None:
    """A sum that was held is applied as it is."""
    real(self, Decision())
