"""Host files, the places of processes on hosts, and the commands that start them there."""

from __future__ import annotations

import ast
import os
import shlex
import subprocess
from pathlib import Path

import pytest

from kvstore_server import check
from kvstore_server.errors import ConfigurationError
from kvtrainer import launch
from kvtrainer.launcher.hosts import Host, Remote, bind_addresses, parse_hosts, place_servers, place_workers

A, B = Host("", "a", 2), Host("", "b", 1)


def names(hosts: list[Host]) -> str:
    return "".join(host.name for host in hosts)


def test_every_form_of_a_line_is_read() -> None:
    text = "# all of them\n\na\n b slots=3 # three\nme@c-1.example.org:4\n192.0.2.1 slots = 2\n"
    text += "[::1]:5\n[2001:db8::1]\na\n"
    assert parse_hosts(text, "file") == [
        Host("", "a", 1),
        Host("", "b", 3),
        Host("me", "c-1.example.org", 4),
        Host("", "192.0.2.1", 2),
        Host("", "::1", 5),
        Host("", "2001:db8::1", 1),
        Host("", "a", 1),
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


def test_workers_fill_the_slots_of_each_host_and_begin_anew() -> None:
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
    hosts = [Host("me", "192.0.2.1", 1), Host("", "2001:db8::1", 1)]
    assert bind_addresses(hosts, True) == ["tcp://192.0.2.1:0", "tcp://[2001:db8::1]:0"]
    assert bind_addresses(hosts[:1], False) == ["tcp://127.0.0.1:0"]


def test_a_host_that_others_cannot_reach_under_its_name_is_refused() -> None:
    with pytest.raises(
        ConfigurationError, match=r"host localhost has the address .* which other hosts cannot reach"
    ):
        bind_addresses([Host("", "localhost", 1)], True)


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
        " -m kvtrainer.launcher.guardian",
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


# The command line.


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as caught:
        launch.main([*arguments, "--", "true"])
    assert caught.value.code == 2
    return capsys.readouterr().err


def test_servers_on_other_hosts_need_permission(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "hosts"
    file.write_text("localhost\n192.0.2.1\n")
    err = refused(capsys, "-n", "2", "-H", str(file))
    assert "with 192.0.2.1 in the job, servers must listen where other hosts reach them" in err
    assert "add --allow-public-bind" in err


def test_a_host_file_that_cannot_be_read_is_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert "cannot read the host file /no/such/file" in refused(capsys, "-n", "1", "-H", "/no/such/file")


@pytest.mark.parametrize("value", ["KVTRAINER_NOT_SET", "=x", "a b=c", ""])
def test_a_variable_that_is_none_is_wrong_usage(value: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert "is not NAME=VALUE, or the NAME of a variable that is set" in refused(
        capsys, "-n", "1", f"--env={value}"
    )
