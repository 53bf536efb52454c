"""Ways in which a server can be wrong about contributions that count one by one; see `sim_mutants`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from kvstore_server.protocol import messages as m
from kvstore_server.rounds import Book, Ints, Rounds, Wait, Waits
from kvstore_server.table import Table
from tests.support.sim_mutants import Patch


def _bound_off_by_one() -> list[Patch]:
    """A rank may read one contribution too far ahead."""
    behind = Rounds.behind

    def lenient(self: Any, rank: int, table: int) -> list[int]:
        self.clocks(table)[rank] -= 1
        try:
            return behind(self, rank, table)
        finally:
            self.clocks(table)[rank] += 1

    return [(Rounds, "behind", lenient)]


def _bound_of_the_fastest() -> list[Patch]:
    """A rank waits only while all of the others are too far behind."""
    behind = Rounds.behind

    def any_will_do(self: Any, rank: int, table: int) -> list[int]:
        found = behind(self, rank, table)
        return found if len(found) == self.num_workers - 1 else []

    return [(Rounds, "behind", any_will_do)]


def _applied_twice() -> list[Patch]:
    """A contribution that is repeated is applied again."""
    finish, commit = Book.finish, Book.commit

    def keeping(self: Any, tables: Ints) -> None:
        if self.num_members == 1:
            self.last = getattr(self, "last", {})
            for table in tables.tolist():
                slots = self._slots.of(np.array([table]))
                [given] = self.given.values()
                sources = {slot: given.payload(slot) for slot in slots.tolist() if given.slots[slot][0] >= 0}
                self.last[table] = given.slots["generation"][slots].copy(), sources
        finish(self, tables)

    def again(self: Any, rank: int, commits: m.Matrix, *args: Any) -> Ints:
        for table, round_, _, _, _, flags in commits.tolist():
            is_last = round_ == self.number(table) - 1 and self.was_applied(table, round_)
            if table in getattr(self, "last", {}) and is_last and not flags & m.HAS_JOINED:
                generations, sources = self.last[table]
                self.tables["number"][table] -= 1
                slots, given = self._slots.of(np.array([table])), self.of(rank)
                given.clear(np.array([table]), slots)
                kept = slots[generations >= 0]
                found = [sources[slot] for slot in kept.tolist()]
                given.keep(
                    kept, generations[generations >= 0], [source for source, _ in found], np.arange(len(kept)),
                    np.array([start for _, start in found], np.int64),
                )  # fmt: skip
        return commit(self, rank, commits, *args)

    return [(Book, "finish", keeping), (Book, "commit", again)]


def _shared_lane() -> list[Patch]:
    """Two ranks share a sequence."""
    lane = Rounds.lane

    def shared(self: Any, rank: int, *args: Any) -> Book:
        return lane(self, max(rank, 1), *args)

    return [(Rounds, "lane", shared)]


def _lane_of_the_dead() -> list[Patch]:
    """A new process goes on in the sequence of the one that it replaces."""
    begin = Rounds.begin_process

    def keeping(self: Any, rank: int) -> None:
        lanes = dict(self._lanes)
        begin(self, rank)
        self._lanes = lanes

    return [(Rounds, "begin_process", keeping)]


def _joined_is_needed() -> list[Patch]:
    """A rank that has no more data holds the others back."""
    takes_part = Rounds._takes_part

    def all_but_the_left(self: Any, rank: int, table: int) -> bool:
        return rank not in self.left

    def missing(self: Any, table: int) -> list[int]:
        return [rank for rank in range(self.num_workers) if takes_part(self, rank, table)]

    return [(Rounds, "_takes_part", all_but_the_left), (Rounds, "missing_from_join", missing)]


def _left_is_needed() -> list[Patch]:
    """A rank that left because it was done holds the others back."""

    def takes_part(self: Any, rank: int, table: int) -> bool:
        return rank not in self.joined(table)

    return [(Rounds, "_takes_part", takes_part)]


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
    undo = Table.undo

    def careless(self: Any, whose: int) -> bool:
        self._last_rank = whose
        return undo(self, whose)

    return [(Table, "undo", careless)]


def _each_server_has_its_clock() -> list[Patch]:
    """A new process begins on each server where that server's slowest rank is."""
    lane = Rounds.lane

    def alone(self: Any, rank: int, tables: Ints, rounds: Ints) -> Book:
        for table in tables.tolist():
            clocks = self.clocks(table)
            clocks[rank] = max(clocks[rank], self.next_round(rank, table) - 1)
        mine = {table: list(self.clocks(table)) for table in tables.tolist()}
        found = lane(self, rank, tables, rounds)
        for table, clocks in mine.items():
            self.clocks(table)[rank] = clocks[rank]
        return found

    return [(Rounds, "lane", alone)]


def _repeating_extends() -> list[Patch]:
    """Who asks again waits from then on."""

    def extending(self: Any, wait: Wait) -> None:
        self._waits[(wait.table, wait.rank, *wait.waiter)] = wait

    return [(Waits, "add", extending)]


def _failed_join_forgotten() -> list[Patch]:
    """Who joined in vain, and asks again, is told that all have joined."""

    def forgetting(self: Any, rank: int, table: int, *_: Any) -> None:
        self.joined(table).discard(rank)

    return [(Rounds, "fail_join", forgetting)]


def _join_that_stays() -> list[Patch]:
    """After all have joined they still count as ranks without data."""

    def staying(self: Any, table: int) -> None:
        self._clocks[table] = [max(self.clocks(table))] * self.num_workers

    return [(Rounds, "part_again", staying)]


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
