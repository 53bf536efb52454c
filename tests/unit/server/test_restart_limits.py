"""When a process that died is started again: pure arithmetic over exit codes and how long each life was."""

from __future__ import annotations

import pytest

from kvstore_server.restarts import CRASH_LOOP, REPLACED, STEADY, Restarts, is_restart_useless, shell_code

KILLED = -9


def delays(restarts: Restarts, *lives: float) -> list[float | None]:
    return [restarts.after(KILLED, lived) for lived in lives]


def test_waits_grow_while_the_process_dies_soon_after_its_start() -> None:
    assert delays(Restarts(), *[0.1] * 8) == [0.0, 0.5, 1.0, 2.0, 5.0, 10.0, 10.0, 10.0]


def test_waits_begin_anew_once_the_process_has_run_for_a_while() -> None:
    assert delays(Restarts(), 0.1, 0.1, 0.1, STEADY, 0.1) == [0.0, 0.5, 1.0, 0.0, 0.5]


def test_there_are_as_many_restarts_as_were_allowed_however_long_the_process_ran() -> None:
    restarts = Restarts(3)
    assert delays(restarts, *[100 * STEADY] * 4) == [0.0, 0.0, 0.0, None]
    assert restarts.used == 3


def test_without_a_limit_a_process_that_runs_for_a_while_comes_back_every_time() -> None:
    assert delays(Restarts(), *[STEADY] * 100) == [0.0] * 100


@pytest.mark.parametrize("limit", [None, 1000])
def test_a_crash_loop_ends_whatever_the_limit(limit: int | None) -> None:
    restarts = Restarts(limit)
    assert None not in delays(restarts, *[0.1] * (CRASH_LOOP - 1))
    assert delays(restarts, 0.1) == [None]


def test_a_long_life_in_between_is_no_crash_loop() -> None:
    lives = ([0.1] * (CRASH_LOOP - 2) + [STEADY]) * 3
    assert None not in delays(Restarts(), *lives)


def test_the_first_death_in_a_row_gives_the_code() -> None:
    restarts = Restarts(2)
    restarts.after(3, 0.1)
    restarts.after(4, 0.1)
    assert (restarts.after(5, 0.1), restarts.first_code) == (None, 3)


def test_a_death_after_a_long_life_is_the_first_one_again() -> None:
    restarts = Restarts(2)
    restarts.after(3, 0.1)
    restarts.after(4, STEADY)
    assert (restarts.after(5, 0.1), restarts.first_code) == (None, 4)


@pytest.mark.parametrize(
    ("code", "final"), [(0, True), (REPLACED, True), (1, False), (2, False), (KILLED, False)]
)
def test_a_process_that_is_done_or_replaced_does_not_come_back(code: int, final: bool) -> None:
    assert is_restart_useless(code) == final


def test_a_signal_becomes_the_code_that_a_shell_gives() -> None:
    assert (shell_code(7), shell_code(KILLED)) == (7, 137)


def test_each_line_says_who_died_how_and_what_follows() -> None:
    restarts = Restarts(2)

    def line(code: int, lived: float) -> str:
        return restarts.describe("server 0", code, lived, restarts.after(code, lived))

    assert line(KILLED, 12.34) == "server 0 was killed by signal 9 (SIGKILL) after 12.3 s; restart 1 of 2"
    assert line(1, 0.2) == "server 0 exited with code 1 after 0.2 s; restart 2 of 2 in 0.5 s"
    assert line(1, 0.2) == "server 0 exited with code 1 after 0.2 s, and there is no restart left of 2"
