"""Ways in which a server can be wrong about rounds that are held; see `sim_mutants`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvstore_server import engine, table
from kvstore_server.engine import Engine
from kvstore_server.norms import UNCHANGED, Decision
from kvstore_server.protocol import messages as m
from kvstore_server.shard import Shard
from kvstore_server.table import ALL, Table
from tests.support.sim_mutants import Patch


def _applied_without_a_decision() -> list[Patch]:
    """A round that is to be held is applied at once."""

    def never(self: Any, *_: Any) -> bool:
        return False

    return [(Table, "hold", never)]


def _applied_twice() -> list[Patch]:
    """The sum that was held is applied two times."""
    apply_held = Table.apply_held

    def twice(self: Any, decision: Decision) -> None:
        held = self.held
        apply_held(self, decision)
        if not decision.skip:
            end = self.ends[ALL]
            self.held = held
            apply_held(self, Decision())
            self.ends[ALL], self.version = end, end.version

    return [(Table, "apply_held", twice)]


def _second_decision_counts() -> list[Patch]:
    """A decision about the round before, which comes late, is applied as well."""
    apply_held, resolve = Table.apply_held, Engine._resolve

    def remembering(self: Any, decision: Decision) -> None:
        self.last_held = self.held
        apply_held(self, decision)

    def again(self: Any, space: Any, rank: int, body: m.Resolve, now: float) -> list[m.Outgoing]:
        where = space.tables[body.table]
        if body.round == space.rounds.shared.number(body.table) - 1 and hasattr(where, "last_held"):
            open_, where.held = where.held, where.last_held
            apply_held(where, Decision(body.coef, body.clip_value, body.skip))
            where.held = open_
        return resolve(self, space, rank, body, now)

    return [(Table, "apply_held", remembering), (Engine, "_resolve", again)]


def _lost_answer_stays_lost() -> list[Patch]:
    """Who asks again is told that the round waits, but not for what."""
    answer = Engine._answer_others

    def forgetful(self: Any, space: Any, book: Any, rank: int, commits: Any, *args: Any) -> list[m.Outgoing]:
        was_held = any(space.tables[number].held is not None for number in commits[:, 0])
        out = answer(self, space, book, rank, commits, *args)
        if not was_held:
            return out
        pending = m.Pending(())
        return [o._replace(reply=o.reply._replace(body=pending)) if _is_held(o) else o for o in out]

    return [(Engine, "_answer_others", forgetful)]


def _lost_answer_is_gone_when_it_is_over() -> list[Patch]:
    """Who asks again when the round is over is not told what was measured."""
    answer = Engine._answer_others

    def silent(self: Any, space: Any, book: Any, rank: int, commits: Any, *args: Any) -> list[m.Outgoing]:
        is_past = any(round_ < book.number(number) for number, round_ in commits[:, :2].tolist())
        out = answer(self, space, book, rank, commits, *args)
        return [o for o in out if not (is_past and _is_held(o))]

    return [(Engine, "_answer_others", silent)]


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
    apply_held = Table.apply_held

    def stubborn(self: Any, decision: Decision) -> None:
        apply_held(self, decision._replace(skip=False))

    return [(Table, "apply_held", stubborn)]


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
        fail(self, *args)
        self.held = held

    return [(Table, "fail", keeping)]


def _held_for_some() -> list[Patch]:
    """Where ranks differ in whether a round is held, it is."""

    def any_of(parts: Any) -> float:
        return float(max(part.hold for part in parts.values()))

    return [(table, "norm_to_hold", any_of)]


def _joined_ranks_are_asked() -> list[Patch]:
    """Ranks without data are told what there is to decide about, too."""

    def everybody(space: Any, where: Any) -> list[m.Outgoing]:
        shared, out = space.rounds.shared, []
        for _, given in shared.members():
            if (waiter := given.waiter(where.number)) is not None:
                out += engine._held(where, shared.number(where.number), waiter, where.held.sum.partials)
        return out

    return [(engine, "_tell_held", everybody)]


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
