"""Lines on a terminal about long work: when they come, and what they count."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator

import pytest

from kvtrainer.common.env import PROGRESS
from kvtrainer.common.progress import LARGE, print_duration, track_progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def clock_of(seconds: float) -> Callable[[], float]:
    """Return a clock on which so many seconds pass between two looks."""
    ticks: Iterator[float] = iter(seconds * tick for tick in range(1000))
    return lambda: next(ticks)


def test_all_items_come_in_order_on_any_stream() -> None:
    for stream in (io.StringIO(), Terminal()):
        assert list(track_progress(range(5), "work", stream, clock_of(1.0), {})) == [0, 1, 2, 3, 4]


def test_slow_work_is_counted_on_a_terminal_and_its_line_ends() -> None:
    terminal = Terminal()
    list(track_progress(range(4), "loading", terminal, clock_of(1.0), {}))
    shown = terminal.getvalue().split("\r")
    assert shown[1:] == [
        "loading: 1 of 4 parts", "loading: 2 of 4 parts", "loading: 3 of 4 parts", "loading: 4 of 4 parts",
        "loading: 4 parts in 5 s\n",
    ]  # fmt: skip


def test_quick_work_says_nothing() -> None:
    terminal = Terminal()
    list(track_progress(range(4), "loading", terminal, clock_of(0.1), {}))
    with print_duration("writing", LARGE - 1, terminal, clock_of(0.1), {}):
        pass
    assert terminal.getvalue() == ""


@pytest.mark.parametrize(("environ", "is_told"), [({}, False), ({PROGRESS: "1"}, True)])
def test_without_a_terminal_the_launcher_decides(environ: dict[str, str], is_told: bool) -> None:
    pipe = io.StringIO()
    list(track_progress(range(4), "loading", pipe, clock_of(1.0), environ))
    with print_duration("writing", LARGE, pipe, clock_of(1.0), environ):
        pass
    assert bool(pipe.getvalue()) == is_told


def test_work_that_cannot_be_counted_says_how_much_it_is_and_how_long_it_took() -> None:
    terminal = Terminal()
    with print_duration("writing a.states", 3 << 30, terminal, clock_of(7.0), {}):
        assert terminal.getvalue() == "writing a.states: 3.0 GiB …\n"
    assert terminal.getvalue().endswith("writing a.states: took 7 s\n")
