"""Ways in which a server can be wrong about rounds that are held; see `sim_mutants`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvstore_server import round_keeper, table
from kvstore_server.norms import UNCHANGED, Decision
from kvstore_server.protocol import messages as m
from kvstore_server.round_keeper import RoundKeeper
from kvstore_server.shard import Shard
from kvstore_server.table import Table
from tests.support.sim_mutants import Patch


def _applied_without_a_decision() -> list[Patch]:
    """A round that is to be held is applied at once."""

    def never(self: Any, *_: Any) -> bool:
        return False

    return [(Table, "hold", never)]


def _applied_twice() -> list[Patch]:
    """The sum that was held is applied two times."""
    apply_held = Table._apply_held

    def twice(self: Any, held: Any, decision: Decision) -> Any:
        end = apply_held(self, held, decision)
        return end if decision.skip else apply_held(self, held, Decision())._replace(version=end.version)

    return [(Table, "_apply_held", twice)]


def _second_decision_counts() -> list[Patch]:
    """A decision about the round before, which comes late, is applied as well."""
    apply_held, resolve = Table._apply_held, RoundKeeper.resolve

    def remembering(self: Any, held: Any, decision: Decision) -> Any:
        self.last_held = held
        return apply_held(self, held, decision)

    def again(self: Any, space: Any, rank: int, body: m.Resolve, now: float) -> list[m.Outgoing]:
        where = space.table(body.table)
        if body.round == where.rounds.number - 1 and hasattr(where, "last_held"):
            apply_held(where, where.last_held, Decision(body.coef, body.clip_value, body.skip))
        return resolve(self, space, rank, body, now)

    return [(Table, "_apply_held", remembering), (RoundKeeper, "resolve", again)]


def _lost_answer_stays_lost() -> list[Patch]:
    """Who asks again is told that the round waits, but not for what."""
    commit = RoundKeeper._commit

    def forgetful(self: Any, space: Any, where: Any, rank: int, *args: Any) -> list[m.Outgoing]:
        was_held = where.held is not None
        out = commit(self, space, where, rank, *args)
        if not was_held:
            return out
        pending = m.Pending(())
        return [o._replace(reply=o.reply._replace(body=pending)) if _is_held(o) else o for o in out]

    return [(RoundKeeper, "_commit", forgetful)]


def _lost_answer_is_gone_when_it_is_over() -> list[Patch]:
    """Who asks again when the round is over is not told what was measured."""
    commit = RoundKeeper._commit

    def silent(self: Any, space: Any, where: Any, rank: int, batch: Any, body: m.Commit, *args: Any) -> Any:
        is_past = body.round < where.rounds.number
        out = commit(self, space, where, rank, batch, body, *args)
        return [o for o in out if not (is_past and _is_held(o))]

    return [(RoundKeeper, "_commit", silent)]


def _partials_of_other_slices() -> list[Patch]:
    """The partial norms come in the wrong order."""
    hold = Shard.hold

    def turned(self: Any, *args: Any) -> Any:
        held = hold(self, *args)
        slices = [partial.slice for partial in held.partials]
        turned = zip(held.partials, reversed(slices), strict=True)
        return held._replace(partials=tuple(one._replace(slice=slice_) for one, slice_ in turned))

    return [(Shard, "hold", turned)]


def _norm_of_one_rank() -> list[Patch]:
    """What is measured is the gradient of the first rank alone."""
    hold = Shard.hold

    def alone(self: Any, contributions: Any, *args: Any) -> Any:
        told = hold(self, contributions[:1], *args).partials
        return hold(self, contributions, *args)._replace(partials=told)

    return [(Shard, "hold", alone)]


def _skipped_all_the_same() -> list[Patch]:
    """A round that is to be skipped is applied."""
    apply_held = Table._apply_held

    def stubborn(self: Any, held: Any, decision: Decision) -> Any:
        return apply_held(self, held, decision._replace(skip=False))

    return [(Table, "_apply_held", stubborn)]


def _clipped_on_one_server() -> list[Patch]:
    """One of the servers applies the sum as it is."""
    update = Shard.update

    def partly(self: Any, *args: Any, decision: Decision) -> None:
        update(self, *args, decision=UNCHANGED if self.units[0].server == 0 else decision)

    return [(Shard, "update", partly)]


def _held_for_ever() -> list[Patch]:
    """A round that was given up while it was held is still held when the next one is open."""
    fail = Table.fail

    def keeping(self: Any, *args: Any) -> Any:
        held = self.held
        waiters = fail(self, *args)
        self.held = held
        return waiters

    return [(Table, "fail", keeping)]


def _held_for_some() -> list[Patch]:
    """Where ranks differ in whether a round is held, it is."""

    def any_of(commits: Any) -> float:
        return max(commit.hold for commit in commits.values())

    return [(table, "norm_to_hold", any_of)]


def _joined_ranks_are_asked() -> list[Patch]:
    """Ranks without data are told what there is to decide about, too."""

    def everybody(where: Any) -> list[m.Outgoing]:
        waiters = [mine.waiter for _, mine in where.rounds.contributions() if mine.waiter is not None]
        partials = where.held.sum.partials
        return [o for w in waiters for o in round_keeper.held(where, where.rounds.number, w, partials)]

    return [(round_keeper, "_tell_held", everybody)]


def _is_held(out: m.Outgoing) -> bool:
    return isinstance(out.reply.body, m.Held)


HELD_MUTANTS: dict[str, Callable[[], list[Patch]]] = {
    "applied_without_a_decision": _applied_without_a_decision,
    "applied_twice": _applied_twice,
    "second_decision_counts": _second_decision_counts,
    "lost_answer_stays_lost": _lost_answer_stays_lost,
    "lost_answer_is_gone_when_it_is_over": _lost_answer_is_gone_when_it_is_over,
    "partials_of_other_slices": _partials_of_other_slices,
    "norm_of_one_rank": _norm_of_one_rank,
    "skipped_all_the_same": _skipped_all_the_same,
    "clipped_on_one_server": _clipped_on_one_server,
    "held_for_ever": _held_for_ever,
    "held_for_some": _held_for_some,
    "joined_ranks_are_asked": _joined_ranks_are_asked,
}
