"""Ways in which a server can be wrong about contributions that count one by one; see `sim_mutants`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvstore_server.consistency import Contribution, SyncRounds, Verdict
from kvstore_server.lanes import Lanes
from kvstore_server.protocol import messages as m
from kvstore_server.table import Table
from kvstore_server.waits import Wait, Waits
from tests.support.sim_mutants import Patch


def _bound_off_by_one() -> list[Patch]:
    """A rank may read one contribution too far ahead."""
    behind = Lanes.behind

    def lenient(self: Any, rank: int) -> list[int]:
        self.clocks[rank] -= 1
        try:
            return behind(self, rank)
        finally:
            self.clocks[rank] += 1

    return [(Lanes, "behind", lenient)]


def _bound_of_the_fastest() -> list[Patch]:
    """A rank waits only while all of the others are too far behind."""
    behind = Lanes.behind

    def any_will_do(self: Any, rank: int) -> list[int]:
        found = behind(self, rank)
        return found if len(found) == len(self.clocks) - 1 else []

    return [(Lanes, "behind", any_will_do)]


def _applied_twice() -> list[Patch]:
    """A contribution that is repeated is applied again."""
    finish, commit = SyncRounds.finish, SyncRounds.commit

    def keeping(self: Any) -> list[tuple[int, Contribution[Any]]]:
        self.last = dict(self._open)
        return finish(self)

    def again(self: Any, rank: int, body: m.Commit, waiter: Any, now: float) -> Verdict:
        last = getattr(self, "last", {}) if self.num_workers == 1 else {}
        if (
            rank in last
            and body.round == self.number - 1
            and not body.joined
            and self.was_applied(body.round)
        ):
            self.number -= 1
            self._open = {rank: Contribution(last[rank].slices)}
        return commit(self, rank, body, waiter, now)

    return [(SyncRounds, "finish", keeping), (SyncRounds, "commit", again)]


def _shared_lane() -> list[Patch]:
    """Two ranks share a sequence."""
    of = Lanes.of

    def shared(self: Any, rank: int, number: int = -1) -> SyncRounds[Any]:
        return of(self, max(rank, 1), number)

    return [(Lanes, "of", shared)]


def _lane_of_the_dead() -> list[Patch]:
    """A new process goes on in the sequence of the one that it replaces."""

    def keeping(self: Any, rank: int) -> None:
        self.joined.discard(rank)
        self.left.discard(rank)

    return [(Lanes, "begin", keeping)]


def _joined_is_needed() -> list[Patch]:
    """A rank that has no more data holds the others back."""

    def takes_part(self: Any, rank: int) -> bool:
        return rank not in self.left

    def missing(self: Any) -> list[int]:
        return [r for r in range(len(self.clocks)) if r not in self.joined and r not in self.left]

    return [(Lanes, "_takes_part", takes_part), (Lanes, "missing_from_join", missing)]


def _left_is_needed() -> list[Patch]:
    """A rank that left because it was done holds the others back."""

    def takes_part(self: Any, rank: int) -> bool:
        return rank not in self.joined

    return [(Lanes, "_takes_part", takes_part)]


def _one_wakes_up() -> list[Patch]:
    """Of those that waited for one another only the first is told."""
    take_ready = Waits.take_ready

    def first(self: Any) -> list[Wait]:
        return take_ready(self)[:1]

    return [(Waits, "take_ready", first)]


def _read_not_released() -> list[Patch]:
    """Who waits to read is not told when the others have come."""
    take_ready = Waits.take_ready

    def only_joins(self: Any) -> list[Wait]:
        ready = take_ready(self)
        for wait in ready:
            if not wait.is_join:
                self.add(wait)
        return [wait for wait in ready if wait.is_join]

    return [(Waits, "take_ready", only_joins)]


def _undoes_what_others_gave() -> list[Patch]:
    """A rank that takes its contribution back takes back whatever came last."""
    abort = Table.abort

    def careless(self: Any, rank: int, number: int, *args: Any) -> Any:
        self._last_rank = self._whose(rank, number)
        return abort(self, rank, number, *args)

    return [(Table, "abort", careless)]


def _each_server_has_its_clock() -> list[Patch]:
    """A new process begins on each server where that server's slowest rank is."""
    of = Lanes.of

    def alone(self: Any, rank: int, number: int = -1) -> SyncRounds[Any]:
        if rank not in self._lanes:
            self.clocks[rank] = max(self.clocks[rank], self.proposed(rank) - 1)
            lane = of(self, rank)
            lane.number = max(1, number)
        return of(self, rank, number)

    return [(Lanes, "of", alone)]


def _repeating_extends() -> list[Patch]:
    """Who asks again waits from then on."""

    def extending(self: Any, wait: Wait) -> None:
        self._waits[(wait.table.number, wait.rank, *wait.waiter)] = wait

    return [(Waits, "add", extending)]


def _failed_join_forgotten() -> list[Patch]:
    """Who joined in vain, and asks again, is told that all have joined."""

    def forgetting(self: Any, rank: int, *_: Any) -> None:
        self.lanes.joined.discard(rank)

    return [(Table, "fail_join", forgetting)]


def _join_that_stays() -> list[Patch]:
    """After all have joined they still count as ranks without data."""

    def staying(self: Any) -> None:
        self.clocks = [max(self.clocks)] * len(self.clocks)

    return [(Lanes, "part_again", staying)]


def _abort_of_a_wait_unheard() -> list[Patch]:
    """Who waits goes on waiting although it has given up."""
    take = Waits.take

    def deaf(self: Any, is_over: Callable[[Wait], bool]) -> list[Wait]:
        return [] if "abort" in is_over.__qualname__ else take(self, is_over)

    return [(Waits, "take", deaf)]


ASYNC_MUTANTS: dict[str, Callable[[], list[Patch]]] = {
    "bound_off_by_one": _bound_off_by_one,
    "bound_of_the_fastest": _bound_of_the_fastest,
    "applied_twice": _applied_twice,
    "shared_lane": _shared_lane,
    "lane_of_the_dead": _lane_of_the_dead,
    "joined_is_needed": _joined_is_needed,
    "left_is_needed": _left_is_needed,
    "one_wakes_up": _one_wakes_up,
    "read_not_released": _read_not_released,
    "undoes_what_others_gave": _undoes_what_others_gave,
    "each_server_has_its_clock": _each_server_has_its_clock,
    "repeating_extends": _repeating_extends,
    "failed_join_forgotten": _failed_join_forgotten,
    "join_that_stays": _join_that_stays,
    "abort_of_a_wait_unheard": _abort_of_a_wait_unheard,
}
