"""Cutting streams into lines and writing them out whole."""

from __future__ import annotations

import os

import pytest

from kvtrainer.launcher.processes import HIGH_WATER, MAX_LINE, PROGRESS_INTERVAL, Output, Stream


def split(*chunks: bytes, step: float = 0.0) -> list[bytes]:
    """All lines that `chunks` give, when the clock moves on by `step` seconds at each look."""
    now = iter(i * step for i in range(1_000_000))
    lines: list[bytes] = []
    stream = Stream(-1, lines.append, lambda: next(now))
    for chunk in chunks:
        stream.feed(chunk)
    stream.flush()
    return lines


def drain(output: Output) -> None:
    while output.target is not None:
        assert output.write_some() is None


def test_lines_come_out_the_same_however_the_bytes_arrive() -> None:
    text = b"one\n\ntwo\r\nthree\r\r\nlast"
    expected = [b"one", b"", b"two", b"three", b"last"]
    assert split(text) == expected
    assert split(*(text[i : i + 1] for i in range(len(text)))) == expected


def test_nothing_comes_out_before_the_end_of_the_line() -> None:
    lines: list[bytes] = []
    stream = Stream(-1, lines.append)
    stream.feed(b"half")
    assert lines == []
    stream.feed(b" done\nnext")
    assert lines == [b"half done"]


def test_progress_bar_within_the_interval_shows_its_first_and_last_state() -> None:
    bar = b"".join(b"\r%d%%" % i for i in range(101)) + b"\ndone\n"
    assert split(bar) == [b"0%", b"100%", b"done"]


def test_progress_bar_shows_a_state_per_interval() -> None:
    bar = b"".join(b"\r%d%%" % i for i in range(6)) + b"\n"
    assert split(bar, step=PROGRESS_INTERVAL / 2) == [b"0%", b"2%", b"4%", b"5%"]


def test_progress_bar_that_ends_each_state_with_a_return_keeps_its_last_state() -> None:
    assert split(b"1%\r", b"2%\r", b"3%\r") == [b"1%", b"3%"]


def test_very_long_line_is_cut_so_that_memory_stays_bounded() -> None:
    lines = split(*[b"x" * 10_000] * 50)
    assert b"".join(lines) == b"x" * 500_000
    assert max(map(len, lines)) <= MAX_LINE


def test_long_line_is_not_cut_inside_a_character() -> None:
    text = "é€🙂" * 20_000
    lines = split(b"a" + text.encode() + b"\n")
    assert len(lines) > 1
    assert "".join(line.decode() for line in lines) == "a" + text


def test_bytes_that_are_not_text_become_replacement_characters() -> None:
    reading, writing = os.pipe()
    output = Output()
    output.put(writing, "[w0] ", b"a\xff\xfeb")
    drain(output)
    assert os.read(reading, 100).decode() == "[w0] a\ufffd\ufffdb\n"
    os.close(reading)
    os.close(writing)


def test_a_line_is_over_before_another_descriptor_gets_its_turn() -> None:
    reading, writing = os.pipe()
    alias = os.dup(writing)  # standard output and error of one terminal
    output = Output()
    output.put(writing, "", b"a" * 10_000)
    output.put(alias, "", b"b" * 10_000)
    output.put(writing, "", b"c")
    drain(output)
    assert os.read(reading, 65536) == b"a" * 10_000 + b"\n" + b"b" * 10_000 + b"\nc\n"
    for fd in (reading, writing, alias):
        os.close(fd)


def test_output_is_full_until_waiting_bytes_are_written() -> None:
    null = os.open(os.devnull, os.O_WRONLY)
    output = Output()
    output.put(null, "", b"x" * HIGH_WATER)
    assert output.full
    drain(output)
    assert not output.full
    os.close(null)


def test_broken_descriptor_is_reported_once_and_the_other_one_goes_on() -> None:
    reading, broken = os.pipe()
    os.close(reading)
    reading, writing = os.pipe()
    output = Output()
    output.put(broken, "", b"lost")
    output.put(writing, "", b"kept")
    assert isinstance(output.write_some(), BrokenPipeError)
    output.put(broken, "", b"lost too")
    drain(output)
    assert os.read(reading, 100) == b"kept\n"
    for fd in (reading, writing, broken):
        os.close(fd)


@pytest.mark.parametrize("text", [b"", b"\r", b"\r\r"])
def test_stream_without_text_gives_no_line(text: bytes) -> None:
    assert split(text) == []
