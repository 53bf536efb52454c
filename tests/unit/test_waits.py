"""Requests that wait for other ranks outside of a round: who is ready, and how long one waits."""

from __future__ import annotations

from kvstore_server.modes import Mode
from kvstore_server.plan import TensorSpec, make_plan
from kvstore_server.table import Table, Waiter
from kvstore_server.waits import Wait, Waits

PLAN = make_plan([TensorSpec("k", (4,), "float32")], 1)


def table_at(*clocks: int) -> Table:
    table = Table(0, "t", PLAN, 0, len(clocks), None, Mode("ssp", 1))
    table.lanes.clocks = list(clocks)
    return table


def wait(table: Table, rank: int, deadline: float = 60.0, *, number: int = 1, is_join: bool = False) -> Wait:
    return Wait(table, rank, Waiter(b"p%d" % rank, number), deadline, 60.0, is_join, list)


def deadlines(waits: Waits) -> list[float]:
    return [one.deadline for one in waits.take(lambda _: True)]


def test_a_read_is_ready_when_nobody_is_too_far_behind() -> None:
    table, waits = table_at(3, 1), Waits()
    read = wait(table, 0)
    waits.add(read)
    assert (read.missing(), waits.take_ready()) == ([1], [])
    table.lanes.advance(1)
    assert waits.take_ready() == [read]
    assert not waits


def test_a_join_is_ready_when_nobody_has_data() -> None:
    table, waits = table_at(3, 1), Waits()
    join = wait(table, 0, is_join=True)
    waits.add(join)
    table.lanes.join(0)
    assert (join.missing(), waits.take_ready()) == ([1], [])
    table.lanes.join(1)
    assert waits.take_ready() == [join]


def test_a_repeated_request_takes_the_place_of_the_former_one_but_has_no_more_time() -> None:
    table, waits = table_at(3, 1), Waits()
    waits.add(wait(table, 0, 60.0))
    waits.add(wait(table, 0, 90.0))
    assert deadlines(waits) == [60.0]


def test_another_request_of_the_same_rank_waits_for_itself() -> None:
    table, waits = table_at(3, 1), Waits()
    waits.add(wait(table, 0, 60.0))
    waits.add(wait(table, 0, 90.0, number=2))
    assert deadlines(waits) == [60.0, 90.0]


def test_a_contribution_gives_joined_ranks_more_time_and_readers_none() -> None:
    table, waits = table_at(3, 1, 1), Waits()
    waits.add(wait(table, 0, 60.0))
    waits.add(wait(table, 1, 60.0, is_join=True))
    waits.contributed(table, 2, now=50.0)
    assert deadlines(waits) == [60.0, 110.0]


def test_a_contribution_to_another_table_changes_nothing() -> None:
    waits = Waits()
    waits.add(wait(table_at(3, 1), 1, 60.0, is_join=True))
    waits.contributed(table_at(3, 1), 0, now=50.0)
    assert deadlines(waits) == [60.0]


def test_a_rank_that_contributes_no_longer_waits_for_the_others_to_join() -> None:
    table, waits = table_at(3, 1), Waits()
    waits.add(wait(table, 1, is_join=True))
    waits.contributed(table, 1, now=0.0)
    assert not waits


def test_only_the_waits_in_question_are_taken_out() -> None:
    table, waits = table_at(5, 4, 1), Waits()
    for rank in range(2):
        waits.add(wait(table, rank))
    assert [one.rank for one in waits.take(lambda w: w.rank == 1)] == [1]
    assert [one.rank for one in waits.take(lambda _: True)] == [0]
