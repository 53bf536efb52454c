"""The log of a server: a peer that makes it write the same line again and again cannot fill a disk."""

from __future__ import annotations

import io
import logging

import pytest

from kvstore_server.log_limit import LogLimit, limited_log


def logged(
    times: list[float], *, name: str = "kvstore_server.test", level: int = logging.WARNING
) -> tuple[list[str], LogLimit]:
    """What a handler writes when one line is logged at these times, and the limit, of three lines in ten seconds."""
    now = 0.0
    limit = LogLimit(3, 10.0, lambda: now)
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.addFilter(limit)
    log = logging.Logger(name)
    log.addHandler(handler)
    for now in times:  # noqa: B007
        log.log(level, "refused %s", "it")
    return stream.getvalue().splitlines(), limit


def test_of_many_lines_the_first_ones_are_written_and_the_others_counted() -> None:
    lines, limit = logged([0.01 * i for i in range(50)])
    assert lines == ["refused it"] * 3
    assert limit.left_out == 47


def test_the_next_line_after_a_while_says_how_many_were_left_out() -> None:
    lines, limit = logged([0.0] * 8 + [11.0, 12.0])
    assert lines[3:] == ["refused it (5 more like this were left out before)", "refused it"]
    assert limit.left_out == 0


def test_lines_at_a_reasonable_distance_are_all_written() -> None:
    assert logged([5.0 * i for i in range(20)])[0] == ["refused it"] * 20


def test_lines_of_others_are_not_touched() -> None:
    assert len(logged([0.0] * 50, name="mine")[0]) == 50


def test_debug_lines_are_all_written() -> None:
    assert len(logged([0.0] * 50, level=logging.DEBUG)[0]) == 50


@pytest.mark.parametrize("is_set_up", [True, False])
def test_the_log_of_a_process_is_limited_while_it_serves_and_not_afterwards(
    is_set_up: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    handler = logging.NullHandler()
    monkeypatch.setattr(logging.getLogger(), "handlers", [handler] if is_set_up else [])
    monkeypatch.setattr(logging, "lastResort", handler)
    with limited_log():
        assert [type(one) for one in handler.filters] == [LogLimit]
    assert handler.filters == []
