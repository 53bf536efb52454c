"""kvlaunch's command line, with nothing that it starts: what a launcher is given, wrong usage, help, version."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvstore_server import __version__, cli
from kvtrainer.common.env import PROGRESS
from kvtrainer.jobs import kvlaunch
from kvtrainer.jobs.job import JobTimeouts


def said(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 2) -> str:
    """What kvlaunch says before it exits with that code."""
    with pytest.raises(SystemExit) as caught:
        kvlaunch.main(list(arguments))
    assert caught.value.code == code
    return "".join(capsys.readouterr())


Call = Callable[..., tuple[list[str], dict[str, str], JobTimeouts]]


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What launchers are given, which run nothing."""
    arguments: list[tuple[Any, ...]] = []

    class Noted:
        def __init__(self, *given: Any, keys: Any) -> None:
            arguments.append(given)

        def run(self) -> int:
            return 0

    monkeypatch.setattr(kvlaunch, "JobLauncher", Noted)
    return arguments


@pytest.fixture
def launched(given: list[tuple[Any, ...]]) -> Call:
    """Runs kvlaunch as far as a launcher; what that is given: the workers' command, environment and limits."""

    def run(*arguments: str) -> tuple[list[str], dict[str, str], JobTimeouts]:
        assert kvlaunch.main(list(arguments)) == 0
        command, _, _, environ, limits, *_ = given[-1]
        return command, environ, limits

    return run


@pytest.mark.parametrize(
    "command",
    [["-s", "3"], ["-n", "5", "--", "-s"], ["--version"], ["--help"], ["--", "-n"], ["--bogus=1", "x"]],
)
@pytest.mark.parametrize("separator", [[], ["--"]])
def test_what_follows_the_command_is_its(launched: Call, separator: list[str], command: list[str]) -> None:
    assert launched("-n1", "--servers", "0", *separator, "printf", "<%s>", *command)[0] == [
        "printf",
        "<%s>",
        *command,
    ]


def test_variables_of_the_command_line_are_set(launched: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVTRAINER_Y", "kept")
    _, environ, _ = launched("-n", "1", "--env", "KVTRAINER_X=a=b", "--env", "KVTRAINER_Y", "true")
    assert (environ["KVTRAINER_X"], environ["KVTRAINER_Y"]) == ("a=b", "kept")


@pytest.mark.parametrize(("flags", "seconds"), [([], 8.0), (["--linger=0.5"], 0.5), (["-s", "0"], 2.0)])
def test_after_an_unannounced_death_the_others_get_the_time_of_silence_unless_one_is_given(
    launched: Call, monkeypatch: pytest.MonkeyPatch, flags: list[str], seconds: float
) -> None:
    monkeypatch.setenv("KVSTORE_DEAD_AFTER", "3")
    *_, limits = launched("-n", "1", *flags, "true")
    assert limits.linger_unheard == seconds


@pytest.mark.parametrize(
    ("flags", "supervised"),
    [([], False), (["--restart", "3"], True), (["--restart", "3", "--durability", "off"], False)],
)
def test_servers_are_supervised_where_they_come_back_with_their_weights(
    given: list[tuple[Any, ...]], flags: list[str], supervised: bool
) -> None:
    assert kvlaunch.main(["-n", "1", "-s", "2", *flags, "true"]) == 0
    _, _, servers, *_, restarts, restarts_of_lost, _, _ = given[-1]
    assert restarts == (3 if flags else 0)
    assert restarts_of_lost == 0
    for command in servers:
        parsed = cli.build_server_parser({}).parse_args(command[command.index("kvstore_server") + 1 :])
        assert (parsed.supervise, parsed.restarts) == ((True, 3) if supervised else (False, None))


def test_lost_servers_are_started_again_where_they_write_snapshots(given: list[tuple[Any, ...]]) -> None:
    flags = ["--restart", "3", "--state-dir", "there", "--snapshot-every", "7"]
    assert kvlaunch.main(["-n", "1", *flags, "true"]) == 0
    _, _, _, environ, *_, restarts_of_lost, _, _ = given[-1]
    assert restarts_of_lost == 3
    assert (environ["KVSTORE_STATE_DIR"], environ["KVSTORE_SNAPSHOT_EVERY"]) == ("there", "7")


@pytest.mark.parametrize(("text", "expected"), [("7", (7, 0.0)), ("2.5s", (0, 2.5)), ("0", (0, 0.0))])
def test_a_period_of_snapshots_is_a_number_of_rounds_or_of_seconds(
    text: str, expected: tuple[int, float], launched: Call
) -> None:
    _, environ, _ = launched("-n", "1", "--state-dir", "there", "--snapshot-every", text, "true")
    assert environ["KVSTORE_SNAPSHOT_EVERY"] == text
    assert cli.build_server_parser(environ).parse_args([]).snapshot_every == expected


@pytest.mark.parametrize("text", ["-1", "0s", "infs", "s", "soon", "1m", "2.5"])
def test_what_is_no_period_of_snapshots_is_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    for main, arguments in (
        (kvlaunch.main, ["-n", "1", "--state-dir", "there"]),
        (cli.main, ["--index", "0"]),
    ):
        with pytest.raises(SystemExit):
            main([*arguments, f"--snapshot-every={text}", "true"])
        assert "like 30s" in capsys.readouterr().err


def test_what_servers_and_workers_read_for_themselves_is_passed_on(launched: Call) -> None:
    _, environ, _ = launched("-n", "1", "--durability", "process", "--rejoin-timeout", "2.5", "true")
    assert (environ["KVSTORE_DURABILITY"], environ["KVSTORE_REJOIN_TIMEOUT"]) == ("process", "2.5")


def test_a_job_does_not_inherit_the_supervisor_of_its_launcher(
    launched: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("NOTIFY_SOCKET", "FDSTORE", "LISTEN_FDS", "LISTEN_FDNAMES", "LISTEN_PID", "KVSTORE_RESTARTS")
    for name in names:
        monkeypatch.setenv(name, "1")
    _, environ, _ = launched("-n", "1", "true")
    assert environ.keys() & set(names) == set()


def test_a_terminal_is_told_what_starts(
    launched: Call, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    _, environ, _ = launched("-n", "2", "-s", "0", "--", "true", "a b")
    assert capsys.readouterr().err == "kvlaunch: starts no servers, then 2 times: true 'a b'\n"
    assert environ[PROGRESS] == "1"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-n", "2"], "no command for the workers"),
        (["-n", "2", "--"], "no command for the workers"),
        (["-n", "2", "--worker", "3", "true"], "unknown arguments: --worker; .* come after its name"),
        (["--start", "-n", "2", "--", "true"], "unknown arguments: --start"),
        (["true", "-n", "2"], "required: -n"),
        (["-n", "2", "train.py", "-x"], "train.py is no program that can be started; say: python train.py"),
        (["--", "true"], "required: -n"),
        (["-n", "0", "true"], "'0' is not a whole number of at least 1"),
        (["-n", "two", "true"], "'two' is not"),
        (["-n", "1", "-s", "-1", "true"], "'-1' is not a whole number of at least 0"),
        (["-n", "1", "--grace", "nan", "true"], "'nan' is not a number of seconds"),
        (["-n", "1", "--start-timeout=-5", "true"], "'-5' is not a number of seconds"),
        (["-n", "1", "--restart", "-1", "true"], "'-1' is not a whole number of at least 0"),
        (["-n", "1", "--durability", "disk", "true"], "invalid choice: 'disk'"),
        (["-n", "1", "-s", "0", "--dashboard", "0", "true"], "--dashboard shows what servers say"),
        (["-n", "1", "--dashboard", "a:b", "true"], r"'a:b' is not \[HOST:\]PORT"),
        (["-n", "1", "-H", "/no/such/file", "true"], "cannot read the host file /no/such/file"),
        *(
            (["-n", "1", f"--env={one}", "true"], "is not NAME=VALUE, or the NAME of a variable that is set")
            for one in ("KVTRAINER_NOT_SET", "=x", "a b=c", "")
        ),
    ],
)
def test_wrong_usage_exits_with_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert re.search(message, said(capsys, *arguments))


def test_a_range_starts_the_most_workers_and_waits_for_none_that_nobody_restarts(
    given: list[tuple[Any, ...]],
) -> None:
    kvlaunch.main(["-n", "2..8", "--env", "KVSTORE_REJOIN_TIMEOUT=9", "python", "train.py"])
    assert given.pop()[3]["KVSTORE_REJOIN_TIMEOUT"] == "9"
    kvlaunch.main(["-n", "2..8", "python", "train.py"])
    kvlaunch.main(["-n", "2..8", "--restart", "1", "python", "train.py"])
    kvlaunch.main(["-n", "8", "python", "train.py"])
    assert [(one[1], one[-2]) for one in given] == [(8, (2, 8)), (8, (2, 8)), (8, None)]
    timeouts = [one[3].get("KVSTORE_REJOIN_TIMEOUT") for one in given]
    assert timeouts == ["0.001", None, None]


@pytest.mark.parametrize("text", ["8..2", "0..3", "2..", "..4", "a..b", "2...4"])
def test_a_range_that_cannot_be_is_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert "2..8" in said(capsys, "-n", text, "python", "train.py")


def test_servers_on_other_hosts_need_permission(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "hosts").write_text("localhost\n192.0.2.1\n")
    told = said(capsys, "-n", "2", "-H", str(tmp_path / "hosts"), "--keys", "off", "true")
    assert "with 192.0.2.1 in the job, servers must listen where other hosts reach them" in told
    assert "add --allow-unauthenticated-bind" in told


def test_a_bad_dead_after_fails(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("KVSTORE_DEAD_AFTER", "-1")
    told = said(capsys, "-n", "1", "true")
    assert "KVSTORE_DEAD_AFTER is '-1'; it must be a number of seconds above 0" in told


def test_help_names_every_variable_that_is_set(capsys: pytest.CaptureFixture[str]) -> None:
    text = said(capsys, "--help", code=0)
    for name in (
        "KVSTORE_RANK ",
        "KVSTORE_NUM_WORKERS ",
        "KVSTORE_SERVERS ",
        "OMP_NUM_THREADS",
        "PYTHONUNBUFFERED",
    ):
        assert name in text


@pytest.mark.parametrize("main", [kvlaunch.main, cli.main])
def test_commands_say_a_version(main: Callable[[list[str]], int], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert (caught.value.code, *capsys.readouterr()) == (0, f"{__version__}\n", "")


def test_backup_workers_go_to_the_launcher(given: list[tuple[Any, ...]]) -> None:
    kvlaunch.main(["-n", "2..4", "--backup-workers", "1", "python", "train.py"])
    kvlaunch.main(["-n", "2..4", "python", "train.py"])
    assert [one[-1] for one in given] == [1, 0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-n", "4", "--backup-workers", "1"], "-n MIN..MAX"),
        (["-n", "2..4", "--backup-workers", "4"], "leaves none of 4"),
        (["-n", "2..4", "--backup-workers", "-1"], "backup-workers"),
    ],
)
def test_backup_workers_that_cannot_be_are_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in said(capsys, *arguments, "python", "train.py")
