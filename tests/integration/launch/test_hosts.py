"""Jobs over ssh, with a program in its place that runs the command here, in another session and a bare environment."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.launch_jobs import ROOT, STUBBORN, Jobs, line_of
from tests.support.limits import LIMIT
from tests.support.processes import assert_serve, eventually

# Like the far end of a connection: another session, nothing of our environment, and standard input is the only tie.
FAKE_SSH = """#!/bin/sh
while [ "$1" = -o ]; do shift 2; done
host=$1; shift
[ "$host" = 127.0.0.9 ] && { echo "no route to $host" >&2; exit 255; }
exec setsid -w env -i PATH="$PATH" ON="$host" sh -c "$*"
"""


class HostJobs(Jobs):
    """Launched jobs on hosts that are all this machine."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._ssh, self._hosts = folder / "fake ssh", folder / "hosts"
        self._ssh.write_text(FAKE_SSH)
        self._ssh.chmod(0o755)
        self.hosts("127.0.0.1", "localhost")

    def hosts(self, *lines: str) -> None:
        self._hosts.write_text("\n".join(lines))

    def launch(
        self, script: str, workers: int = 2, servers: int = 0, *flags: str, grace: float = LIMIT
    ) -> subprocess.Popen[bytes]:
        counts = ["-n", str(workers), "-s", str(servers), "-H", str(self._hosts), "--ssh", f"'{self._ssh}'"]
        process = subprocess.Popen(
            [
                *[
                    sys.executable,
                    "-m",
                    "kvtrainer.jobs.kvlaunch",
                    *counts,
                    "--env",
                    *self.variable,
                    "--linger=0",
                ],
                *[f"--grace={grace}", *flags, "--", "sh", "-c", script],
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={
                **os.environ,
                **self.variable,
                "PYTHONPATH": str(ROOT),
                "NOT_PASSED": "1",
                "KVSTORE_X": "a b",
            },
            cwd=ROOT,
        )
        self._started.append(process)
        return process


@pytest.fixture
def jobs(tmp_path: Path) -> Iterator[HostJobs]:
    started = HostJobs(tmp_path)
    yield started
    started.close()


def test_workers_find_their_place_their_host_and_what_was_passed_on(jobs: HostJobs) -> None:
    jobs.hosts("127.0.0.1 slots=2", "localhost")
    place = "$KVSTORE_RANK/$KVSTORE_NUM_WORKERS $KVSTORE_LOCAL_RANK"
    script = f'echo "{place} $ON $MINE $KVSTORE_X ${{NOT_PASSED-unset}} $PWD"; echo e >&2'
    code, out, err = jobs.finish(jobs.launch(script, 3, 0, "--env", "MINE=it's $mine"))
    assert code == 0
    hosts = ["0 127.0.0.1", "1 127.0.0.1", "0 localhost"]
    assert sorted(out.splitlines()) == [
        f"[w{rank}] {rank}/3 {host} it's $mine a b unset {ROOT}" for rank, host in enumerate(hosts)
    ]
    assert sorted(err.splitlines()) == ["[w0] e", "[w1] e", "[w2] e"]
    assert jobs.alive() == []


def test_servers_on_hosts_serve_the_workers_that_are_told_their_addresses(
    jobs: HostJobs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = f"echo $KVSTORE_SERVERS $KVSTORE_KEYS; until [ -e {tmp_path}/done ]; do sleep 0.05; done"
    process = jobs.launch(script, 2, 2)
    told = [line_of(process)[5:].split() for _ in range(2)]
    assert told[0][0] == told[1][0]
    # Each process has the keys of the job in a directory of its own, which is gone with it.
    assert told[0][1] != told[1][1]
    monkeypatch.setenv("KVSTORE_KEYS", told[0][1])
    assert_serve(told[0][0].split(","))
    (tmp_path / "done").touch()
    assert jobs.finish(process)[0] == 0
    assert not any(Path(directory).exists() for _, directory in told)
    assert jobs.alive() == []


def test_the_first_failure_gives_the_exit_code_and_ends_all_hosts(jobs: HostJobs) -> None:
    code, _, err = jobs.finish(
        jobs.launch(f"[ $KVSTORE_RANK = 1 ] && exit 3; setsid sleep 3600 & {STUBBORN}", grace=0.5)
    )
    assert code == 3
    assert err == "kvlaunch: worker 1 on localhost exited with code 3; stopping the others\n"
    assert jobs.alive() == []


def test_a_signal_that_killed_a_process_there_is_reported_as_a_shell_does(jobs: HostJobs) -> None:
    code, _, err = jobs.finish(jobs.launch("kill -9 $$", 1))
    assert code == 137
    assert "worker 0 on 127.0.0.1 exited with code 137" in err


def test_a_host_that_cannot_be_reached_is_named(jobs: HostJobs) -> None:
    jobs.hosts("127.0.0.9")
    code, _, err = jobs.finish(jobs.launch("true", 1))
    assert code == 255
    assert err.splitlines()[0] == "[w0] no route to 127.0.0.9"
    assert "worker 0 on 127.0.0.9 exited with code 255 (which ssh also uses if it cannot connect)" in err


def test_a_command_that_does_not_exist_there_gives_the_code_of_a_shell(jobs: HostJobs) -> None:
    assert jobs.finish(jobs.launch("exec /no/such/program", 1))[0] == 127


def test_a_signal_to_the_launcher_reaches_the_processes_there_as_sigterm(jobs: HostJobs) -> None:
    process = jobs.launch("trap 'echo term; exit 0' TERM; echo up; while :; do sleep 0.05; done", 1)
    assert line_of(process) == "[w0] up"
    process.send_signal(signal.SIGTERM)
    code, out, _ = jobs.finish(process)
    assert (code, out) == (128 + signal.SIGTERM, "[w0] term\n")
    assert jobs.alive() == []


def test_kill_9_of_the_launcher_leaves_nothing_on_any_host(jobs: HostJobs) -> None:
    process = jobs.launch(
        f'setsid sleep 3600 & setsid sh -c "{STUBBORN}" & echo up; {STUBBORN}', 2, grace=0.3
    )
    assert [line_of(process)[5:], line_of(process)[5:]] == ["up", "up"]
    process.kill()
    process.wait()
    assert eventually(lambda: jobs.alive() == []), jobs.alive()


def test_kill_9_of_a_guardian_there_ends_its_process(jobs: HostJobs) -> None:
    process = jobs.launch("echo up; exec sleep 3600", 1)
    assert line_of(process) == "[w0] up"
    [guardian] = [pid for pid in jobs.pids("kvtrainer.jobs.guardian") if b"python" in program(pid)]
    os.kill(guardian, signal.SIGKILL)
    assert jobs.finish(process)[0] != 0
    assert eventually(lambda: jobs.alive() == []), jobs.alive()


def program(pid: int) -> bytes:
    """The program of the guardian, but not of the launcher, the shell and `setsid`, which have it as an argument."""
    words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    return words[0] if b"kvtrainer.jobs.guardian" in words else b""
