"""Hosts of a launched job, and how its output is passed on line by line."""

from __future__ import annotations

import ast
import os
import shlex
import subprocess
from pathlib import Path

import pytest

from kvstore_server import check
from kvstore_server.errors import ConfigurationError
from kvtrainer.jobs.job import JobHost, Remote, bind_addresses, parse_hosts, place_servers, place_workers
from kvtrainer.jobs.processes import HIGH_WATER, MAX_LINE, PROGRESS_INTERVAL, ProcessOutput, ProcessStream

A, B = JobHost("", "a", 2), JobHost("", "b", 1)


def names(hosts: list[JobHost]) -> str:
    return "".join(host.name for host in hosts)


def test_every_form_of_a_line_is_read() -> None:
    text = "# all of them\n\na\n b slots=3 # three\nme@c-1.example.org:4\n192.0.2.1 slots = 2\n"
    text += "[::1]:5\n[2001:db8::1]\na\n"
    assert parse_hosts(text, "file") == [
        JobHost("", "a", 1),
        JobHost("", "b", 3),
        JobHost("me", "c-1.example.org", 4),
        JobHost("", "192.0.2.1", 2),
        JobHost("", "::1", 5),
        JobHost("", "2001:db8::1", 1),
        JobHost("", "a", 1),
    ]


@pytest.mark.parametrize(
    "line",
    [
        "-oProxyCommand=x", "a b", "a slots=0", "a slots=-1", "a:", "a:x", "a;b", "a slots=99999", "$(x)", "me@-a",
        "::1", "a,b",
    ],
)  # fmt: skip
def test_a_bad_line_is_refused_with_its_number(line: str) -> None:
    with pytest.raises(ConfigurationError, match=r"^file, line 2: "):
        parse_hosts(f"fine\n{line}\n", "file")


def test_a_file_without_hosts_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="names no host"):
        parse_hosts("# none\n", "file")


def test_workers_fill_the_slots_of_each_host_and_start_over() -> None:
    assert names(place_workers([A, B], 7)) == "aabaaba"
    assert names(place_workers([A, B], 1)) == "a"


def test_servers_go_to_one_host_after_the_other() -> None:
    assert names(place_servers([A, B], 5)) == "ababa"
    assert place_servers([A, B], 0) == []


@pytest.mark.parametrize(
    ("name", "is_loopback"),
    [
        ("localhost", True),
        ("127.0.0.2", True),
        ("::1", True),
        ("192.0.2.1", False),
        ("localhost.example.org", False),
    ],
)
def test_only_addresses_of_the_machine_itself_are_loopback(name: str, is_loopback: bool) -> None:
    assert check.is_loopback(name) is is_loopback


def test_servers_listen_on_loopback_or_on_the_address_of_their_host() -> None:
    hosts = [JobHost("me", "192.0.2.1", 1), JobHost("", "2001:db8::1", 1)]
    assert bind_addresses(hosts, True) == ["tcp://192.0.2.1:0", "tcp://[2001:db8::1]:0"]
    assert bind_addresses(hosts[:1], False) == ["tcp://127.0.0.1:0"]


def test_a_host_that_others_cannot_reach_under_its_name_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="host localhost has the address"):
        bind_addresses([JobHost("", "localhost", 1)], True)


def remote(**given: object) -> Remote:
    options = {"workers": [A, A, B], "servers": [B], "grace": 2.5, "directory": "/a dir", **given}
    return Remote(**options)  # type: ignore[arg-type]


def test_ssh_never_asks_and_never_hangs_and_is_told_the_host_before_the_command() -> None:
    command = remote().command("worker", 0, ["true"], {})
    assert command[0] == "ssh"
    assert {"BatchMode=yes", "ConnectTimeout=10"} <= set(command[2:-2:2])
    assert command[1:-2:2] == ["-o"] * 4
    assert command[-2] == "a"


def test_the_shell_there_gives_back_every_value_as_it_was(tmp_path: Path) -> None:
    nasty = 'it\'s "$HOME" `x` \\ *\n;'
    place = tmp_path / "a 'dir'"
    place.mkdir()
    environ = {"KVSTORE_X": nasty, "OTHER": "no", "MINE": nasty, "OMP_NUM_THREADS": "3"}
    line = remote(names=("MINE",), directory=str(place)).command(
        "worker", 0, ["printf", "%s", nasty], environ
    )[-1]
    # What would run under the guardian is shown instead of being run.
    shown = line.replace(
        " -m kvtrainer.jobs.guardian",
        " -c 'import os, sys; print(repr((os.getcwd(), dict(os.environ), sys.argv)))'",
    )
    done = subprocess.run(
        ["env", "-i", f"PATH={os.environ['PATH']}", "sh", "-c", shown], capture_output=True, check=True
    )
    directory, found, arguments = ast.literal_eval(done.stdout.decode())
    assert directory == str(place)
    assert {k: v for k, v in found.items() if k in environ} == {
        k: v for k, v in environ.items() if k != "OTHER"
    }
    assert arguments[arguments.index("--") :] == ["--", "printf", "%s", nasty]


def test_cores_are_shared_by_the_workers_of_one_host() -> None:
    shares = []
    for rank in range(3):
        words = shlex.split(remote().command("worker", rank, ["true"], {})[-1])
        shares.append(words[words.index("--share") + 1])
    assert shares == ["2", "2", "1"]


def split(*chunks: bytes, step: float = 0.0) -> list[bytes]:
    """All lines that `chunks` give, when the clock moves on by `step` seconds at each look."""
    now = iter(i * step for i in range(1_000_000))
    lines: list[bytes] = []
    stream = ProcessStream(-1, lines.append, lambda: next(now))
    for chunk in chunks:
        stream.feed(chunk)
    stream.flush()
    return lines


def drain(output: ProcessOutput) -> None:
    while output.target is not None:
        assert output.write_some() is None


def test_lines_come_out_the_same_however_the_bytes_arrive() -> None:
    text = b"one\n\ntwo\r\nthree\r\r\nlast"
    expected = [b"one", b"", b"two", b"three", b"last"]
    assert split(text) == expected
    assert split(*(text[i : i + 1] for i in range(len(text)))) == expected


def test_nothing_comes_out_before_the_end_of_the_line() -> None:
    lines: list[bytes] = []
    stream = ProcessStream(-1, lines.append)
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
    output = ProcessOutput()
    output.put(writing, "[w0] ", b"a\xff\xfeb")
    drain(output)
    assert os.read(reading, 100).decode() == "[w0] a\ufffd\ufffdb\n"
    os.close(reading)
    os.close(writing)


def test_a_line_is_over_before_another_descriptor_gets_its_turn() -> None:
    reading, writing = os.pipe()
    alias = os.dup(writing)  # standard output and error of one terminal
    output = ProcessOutput()
    output.put(writing, "", b"a" * 10_000)
    output.put(alias, "", b"b" * 10_000)
    output.put(writing, "", b"c")
    drain(output)
    assert os.read(reading, 65536) == b"a" * 10_000 + b"\n" + b"b" * 10_000 + b"\nc\n"
    for fd in (reading, writing, alias):
        os.close(fd)


def test_output_is_full_until_waiting_bytes_are_written() -> None:
    null = os.open(os.devnull, os.O_WRONLY)
    output = ProcessOutput()
    output.put(null, "", b"x" * HIGH_WATER)
    assert output.full
    drain(output)
    assert not output.full
    os.close(null)


def test_broken_descriptor_is_reported_once_and_the_other_one_goes_on() -> None:
    reading, broken = os.pipe()
    os.close(reading)
    reading, writing = os.pipe()
    output = ProcessOutput()
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
