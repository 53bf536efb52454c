"""The process of a server: its command line, what it refuses before it listens, and what it sees of other processes."""

from __future__ import annotations

import os
import platform
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

from kvstore_server import cli
from kvstore_server.cli import build_server_parser, main
from kvstore_server.engine.namespace import EngineConfig
from kvstore_server.errors import ConfigurationError
from kvstore_server.processes import Process, Processes, ProcessState, describe_exit
from kvtrainer.jobs import kvlaunch
from kvtrainer.watch import top
from tests.support.processes import eventually


def test_help_lists_every_flag_with_its_twin_in_the_environment() -> None:
    text = build_server_parser({}).format_help()
    described = re.split(r"\n  (?=-)", text)[1:]
    flags = {re.search(r"--[a-z-]+", part).group(): part for part in described}  # type: ignore[union-attr]
    assert len(flags) >= 12
    for flag in set(flags) - {"--help", "--version", "--ready-fd", "--supervise", "--restarts"}:
        assert re.search(r"\[KVSTORE_[A-Z_]+(=[01])?\]", flags[flag]), flag


@pytest.mark.parametrize("flag", ["--bind", "--dead-after", "--drain-timeout", "--num-servers", "--threads"])
def test_a_variable_gives_a_flags_default_and_the_flag_wins(flag: str) -> None:
    variable = "KVSTORE_" + flag.strip("-").replace("-", "_").upper()
    name = flag.strip("-").replace("-", "_")
    parser = build_server_parser({variable: "7"})
    assert str(getattr(parser.parse_args([]), name)) in ("7", "7.0")
    assert str(getattr(parser.parse_args([flag, "8"]), name)) in ("8", "8.0")


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--nonsense"], "unrecognized arguments: --nonsense"),
        (["--dead-after", "soon"], "invalid float value: 'soon'"),
        (["--dead-after", "0"], "--dead-after must be above 0"),
        (["--dead-after", "nan"], "--dead-after must be above 0"),
        (["--drain-timeout", "-1"], "--drain-timeout must be above 0"),
        (["--threads", "0"], "--threads must be above 0"),
        (["--index", "2", "--num-servers", "2"], "--index 2 is not one of 2 servers"),
        (["--log", "loud"], "--log must be debug"),
        (["--durability", "disk"], "--durability must be off or process, got 'disk'"),
        (["--restart-timeout", "0"], "--restart-timeout must be above 0"),
        (["--bind", "tcp://0.0.0.0:0"], "add --allow-unauthenticated-bind"),
        (["--bind", "tcp://*:0"], "add --allow-unauthenticated-bind"),
        (["--bind", "tcp://[::]:0"], "add --allow-unauthenticated-bind"),
        (["--bind", "tcp://localhost.example.org:0"], "add --allow-unauthenticated-bind"),
        (["--bind", "tcp://[::1"], "--bind tcp://[::1"),
        (["--bind", "ipc:///tmp/server"], "tcp://HOST:PORT"),
        (["--http", "8000"], "--http 8000 is not HOST:PORT"),
        (["--http", "0.0.0.0:8000"], "add --keys DIR, or --allow-unauthenticated-bind"),
        (["--ready-fd", "777"], "--ready-fd 777 is not open in this process"),
        (["--ready-fd", "-1"], "--ready-fd -1 is not open in this process"),
        (["--ready-fd", "9" * 30], "is not open in this process"),
    ],
)
def test_a_wrong_flag_ends_with_code_2_and_says_why(
    flags: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(flags)
    assert ended.value.code == 2
    assert told in capsys.readouterr().err


@pytest.mark.parametrize(
    "program", [main, kvlaunch.main, top.main], ids=["kvstore-server", "kvlaunch", "kvtop"]
)
def test_the_flag_of_earlier_versions_names_the_present_ones(
    program: Callable[[list[str]], int], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        program(["--allow-public-bind"])
    assert ended.value.code == 2
    told = capsys.readouterr().err
    assert "--allow-unauthenticated-bind" in told
    assert "keys" in told.lower()


def test_a_wrong_variable_is_a_usage_error_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KVSTORE_DEAD_AFTER", "soon")
    with pytest.raises(SystemExit) as ended:
        main([])
    assert ended.value.code == 2
    assert "--dead-after: invalid float value: 'soon'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("bind", "told"),
    [
        ("tcp://127.0.0.1:0", 4096),
        ("tcp://localhost:0", 4096),
        ("tcp://[::1]:0", 4096),
        ("tcp://0.0.0.0:0", 0),
    ],
)
def test_weights_stay_together_where_a_server_listens_for_its_own_host_alone(
    bind: str, told: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    configs: list[EngineConfig] = []

    def refuse(config: EngineConfig, *_: object, **__: object) -> None:
        configs.append(config)
        raise ConfigurationError("this test needs no server")

    monkeypatch.setattr(cli, "make_server", refuse)
    assert main(["--bind", bind, "--spread-from", "4096", "--allow-unauthenticated-bind"]) == 1
    assert [config.spread_from for config in configs] == [told]


def test_an_address_in_use_ends_with_code_1_and_names_it(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        assert main(["--bind", address]) == 1
    assert f"cannot listen on {address}: Address already in use" in capsys.readouterr().err


def test_a_module_that_cannot_be_imported_ends_with_code_1_and_is_named(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["--import", "no_such_module"]) == 1
    text = capsys.readouterr().err
    assert "kvstore-server: No module named 'no_such_module'" in text
    assert "PYTHONPATH" in text


def test_a_ready_descriptor_that_is_only_read_is_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    reading, writing = os.pipe()
    with os.fdopen(reading), os.fdopen(writing, "w"), pytest.raises(SystemExit) as ended:
        main(["--ready-fd", str(reading)])
    assert ended.value.code == 2
    assert f"--ready-fd {reading} is open for reading only" in capsys.readouterr().err


KERNEL = tuple(int(part) for part in platform.release().split("-")[0].split(".")[:2])


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    """A process that waits to be ended."""
    with subprocess.Popen(["sleep", "infinity"]) as process:
        yield process
        process.kill()


@pytest.fixture
def process(child: subprocess.Popen[bytes]) -> Iterator[Process]:
    seen = Process(child.pid)
    yield seen
    seen.close()


def test_a_process_that_sleeps_runs(process: Process) -> None:
    assert process.state() is ProcessState.RUNS


def test_a_stopped_process_is_seen_to_be_stopped_until_it_goes_on(
    child: subprocess.Popen[bytes], process: Process
) -> None:
    child.send_signal(signal.SIGSTOP)
    assert eventually(lambda: process.state() is ProcessState.STOPPED)
    child.send_signal(signal.SIGCONT)
    assert eventually(lambda: process.state() is ProcessState.RUNS)


def test_a_killed_process_has_ended_before_anybody_has_reaped_it_and_after(
    child: subprocess.Popen[bytes], process: Process
) -> None:
    child.kill()
    assert eventually(lambda: process.state() is ProcessState.ENDED)
    child.wait()
    assert process.state() is ProcessState.ENDED


@pytest.mark.parametrize(
    ("script", "how"),
    [
        ("import os; os.kill(os.getpid(), 9)", "was killed by signal 9 (SIGKILL)"),
        ("raise SystemExit(7)", "exited with code 7"),
    ],
)
def test_what_has_ended_a_process_is_known_where_the_system_says_it_once_its_parent_knows(
    script: str, how: str
) -> None:
    with subprocess.Popen([sys.executable, "-S", "-c", script]) as child:
        process = Process(child.pid)
        child.wait()
    assert process.how_ended() == (how if KERNEL >= (6, 15) else "")
    process.close()


def test_of_itself_a_process_does_not_know_from_its_number_that_it_works() -> None:
    process = Process(os.getpid())
    assert process.state() is ProcessState.UNKNOWN
    assert process.how_ended() == ""
    process.close()


def test_a_process_that_is_not_there_cannot_be_watched(child: subprocess.Popen[bytes]) -> None:
    child.kill()
    child.wait()
    with pytest.raises(OSError, match="process"):
        Process(child.pid)


def test_the_processes_of_sessions_are_told_when_they_have_ended_until_they_are_removed(
    child: subprocess.Popen[bytes],
) -> None:
    processes, key, own = Processes(), (b"worker", 7), (b"this one", 8)
    processes.add(key, child.pid)
    processes.add(own, os.getpid())
    assert (list(processes), processes.ended(), processes.state(key)) == ([key, own], {}, ProcessState.RUNS)
    child.kill()
    assert eventually(lambda: list(processes.ended()) == [key])
    processes.remove(key)
    processes.remove(key)
    assert (list(processes), processes.ended(), processes.state(key)) == ([own], {}, ProcessState.UNKNOWN)
    processes.close()
    assert list(processes) == []


@pytest.mark.parametrize(
    ("code", "text"),
    [
        (0, "exited with code 0"),
        (3, "exited with code 3"),
        (-11, "was killed by signal 11 (SIGSEGV)"),
        (-40, "was killed by signal 40"),
    ],
)
def test_an_end_is_described_by_its_code_or_its_signal(code: int, text: str) -> None:
    assert describe_exit(code) == text
