"""The end of a launched job with real processes: drain, signals, kill -9, deaths that nobody could announce."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.launch_jobs import READY, ROOT, STUBBORN, TELLS_WHERE, Jobs, command_line, line_of
from tests.support.limits import DEAD_AFTER, FOREVER, LIMIT
from tests.support.processes import eventually

# The orderly end.


def test_servers_are_drained_when_all_workers_are_done(jobs: Jobs) -> None:
    code, out, err = jobs.run("echo done", 2, servers=2)
    assert (code, err) == (0, TELLS_WHERE)
    assert sorted(out.splitlines()) == ["[s0] drained", "[s1] drained", "[w0] done", "[w1] done"]
    assert jobs.alive() == []


def test_server_that_fails_in_its_drain_gives_its_code(jobs: Jobs) -> None:
    server = READY + 'on_term(lambda: sys.exit(9))\nreport("tcp://127.0.0.1:5000")\nstay()'
    code, _, err = jobs.run("true", servers=1, server=server)
    assert code == 9
    assert "server 0 exited with code 9 while it was stopping" in err


def test_server_that_does_not_drain_within_the_grace_is_killed(jobs: Jobs) -> None:
    server = READY + 'on_term(int)\nreport("tcp://127.0.0.1:5000")\nstay()'
    code, _, err = jobs.run("true", servers=1, server=server, grace=0.3)
    assert code == 137
    assert "server 0 was killed by signal 9 (SIGKILL) while it was stopping" in err


def test_process_that_a_worker_left_behind_is_ended_with_the_job(jobs: Jobs) -> None:
    code, out, _ = jobs.run("setsid sleep 3600 & sleep 3600 & echo bye; exit 0")
    assert (code, out) == (0, "[w0] bye\n")
    assert jobs.alive() == []


def test_process_that_has_hidden_from_the_launcher_does_not_keep_it_waiting(
    jobs: Jobs, tmp_path: Path
) -> None:
    os.mkfifo(tmp_path / "go")
    script = (
        f"env -i setsid sh -c 'printf $$; echo > {tmp_path}/go; exec sleep 3600' & read x < {tmp_path}/go"
    )
    code, out, _ = jobs.run(script)
    hidden = int(out.removeprefix("[w0] "))
    os.kill(hidden, signal.SIGKILL)
    assert code == 0


# Signals to the launcher.


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signal_to_the_launcher_reaches_everybody_as_sigterm(jobs: Jobs, number: signal.Signals) -> None:
    script = "trap 'echo term; exit 0' TERM; echo up; while :; do sleep 0.05; done"
    process = jobs.start(script, servers=1)
    assert line_of(process) == "[w0] up"
    process.send_signal(number)
    code, out, err = jobs.finish(process)
    assert code == 128 + number
    assert sorted(out.splitlines()) == ["[s0] drained", "[w0] term"]
    assert f"kvlaunch: received {number.name}; stopping the others" in err
    assert jobs.alive() == []


def test_second_ctrl_c_does_not_wait_for_the_grace(jobs: Jobs) -> None:
    process = jobs.start(f"echo up; {STUBBORN}", grace=FOREVER)
    assert line_of(process) == "[w0] up"
    process.send_signal(signal.SIGINT)
    assert process.stderr is not None
    assert b"received SIGINT" in process.stderr.readline()
    process.send_signal(signal.SIGINT)
    assert jobs.finish(process)[0] == 128 + signal.SIGINT
    assert jobs.alive() == []


def test_signal_that_was_ignored_from_the_start_stays_ignored(jobs: Jobs) -> None:
    nohup = ["sh", "-c", "trap '' HUP; exec \"$@\"", "sh"]
    process = jobs.start("echo up; sleep 3600", prefix=nohup)
    assert line_of(process) == "[w0] up"
    process.send_signal(signal.SIGHUP)
    process.send_signal(signal.SIGTERM)
    assert jobs.finish(process)[0] == 128 + signal.SIGTERM


def test_kill_9_of_the_launcher_leaves_no_process(jobs: Jobs) -> None:
    script = f'(sleep 3600) & setsid sh -c "{STUBBORN}" & echo up; wait'
    process = jobs.start(script, 2, servers=1, grace=0.3)
    assert {line_of(process), line_of(process)} == {"[w0] up", "[w1] up"}
    process.kill()
    process.wait()
    assert eventually(lambda: jobs.alive() == []), jobs.alive()


def test_kill_9_of_the_launcher_ends_a_grandchild_with_an_empty_environment(jobs: Jobs) -> None:
    process = jobs.start("env -i sleep 3600 & echo $!; wait")
    grandchild = int(line_of(process).removeprefix("[w0] "))
    assert eventually(lambda: command_line(grandchild).startswith("sleep"))
    process.kill()
    process.wait()
    assert eventually(lambda: command_line(grandchild) == "")


def test_kill_9_of_the_launcher_ends_its_children_even_when_the_guardian_hangs(jobs: Jobs) -> None:
    process = jobs.start("echo up; exec sleep 3600", 2)
    line_of(process)
    (guardian,) = jobs.pids("jobs/guardian.py")
    os.kill(guardian, signal.SIGSTOP)
    process.kill()
    process.wait()
    assert eventually(lambda: jobs.pids() == [guardian]), jobs.alive()


def test_guardian_that_was_killed_is_replaced(jobs: Jobs) -> None:
    process = jobs.start("setsid sleep 3600 & echo up; wait")
    assert line_of(process) == "[w0] up"
    (first,) = jobs.pids("jobs/guardian.py")
    os.kill(first, signal.SIGKILL)
    assert eventually(lambda: jobs.pids("jobs/guardian.py") not in ([], [first]))
    process.kill()
    process.wait()
    assert eventually(lambda: jobs.alive() == []), jobs.alive()


def test_launcher_obeys_a_signal_while_its_reader_is_paused(jobs: Jobs) -> None:
    process = jobs.start("while :; do echo line; done")
    assert process.stdout is not None
    fd = process.stdout.fileno()
    assert select.select([fd], [], [], LIMIT)[0]
    (worker,) = (pid for pid in jobs.pids("echo line") if command_line(pid).startswith("sh "))
    assert eventually(lambda: pipe_is_full(process.pid) and pipe_is_full(worker))
    process.send_signal(signal.SIGTERM)
    assert process.wait(LIMIT) == 128 + signal.SIGTERM
    assert jobs.alive() == []


def pipe_is_full(pid: int) -> bool:
    """Whether standard output of a process, a pipe, takes nothing more."""
    fd = os.open(f"/proc/{pid}/fd/1", os.O_WRONLY | os.O_NONBLOCK)
    try:
        return not select.select([], [fd], [], 0)[1]
    finally:
        os.close(fd)


TRAINING = """
import os, signal, sys, torch, kvtrainer
torch.set_num_threads(1)
kv = kvtrainer.kvstore.create("dist_sync")
kv.init("w", torch.zeros(3))
kv.barrier()
if kv.rank == 1:
    os.kill({victim}, signal.SIGKILL)
kv.pushpull("w", torch.ones(3))
"""
SERVER_OF_JOB = "next(int(p) for p in os.listdir('/proc') if p.isdigit() and is_server(p))"
FIND_SERVER = """
import os
def is_server(pid):
    try:
        return (b"kvstore_server\\0" in open(f"/proc/{pid}/cmdline", "rb").read()
                and os.environ["KVLAUNCH_MARK"].encode() in open(f"/proc/{pid}/environ", "rb").read())
    except OSError:
        return False
"""


def launched(script: str) -> tuple[int, str]:
    """The exit code and standard error of a job of two workers and one server, in which nobody is stopped."""
    kvlaunch = [
        sys.executable,
        "-m",
        "kvtrainer.jobs.kvlaunch",
        "-n",
        "2",
        "-s",
        "1",
        f"--linger={LIMIT}",
        "--",
    ]
    command = [*kvlaunch, sys.executable, "-c", script]
    environ = {**os.environ, "KVSTORE_DEAD_AFTER": str(DEAD_AFTER), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=LIMIT, check=False
    )
    return done.returncode, done.stderr


@pytest.mark.full
def test_a_survivor_of_a_killed_worker_raises_its_own_error_before_it_is_stopped() -> None:
    code, err = launched(TRAINING.format(victim="os.getpid()"))
    assert code == 137
    assert "worker 1 was killed by signal 9 (SIGKILL); stopping the others" in err
    [error] = [line for line in err.splitlines() if "WorkerLostError" in line]
    assert error.startswith("[w0] ")
    assert "rank 1" in error


@pytest.mark.full
def test_survivors_of_a_killed_server_raise_their_own_errors_before_they_are_stopped() -> None:
    code, err = launched(FIND_SERVER + TRAINING.format(victim=SERVER_OF_JOB))
    assert code == 137
    assert "server 0 was killed by signal 9 (SIGKILL) before the workers were done" in err
    assert {line[:4] for line in err.splitlines() if "ServerUnreachableError" in line} == {"[w0]", "[w1]"}


@pytest.mark.parametrize("death", ["kill -9 $$", "exit 137"])
def test_after_a_death_by_a_signal_the_others_get_the_longer_time(jobs: Jobs, death: str) -> None:
    script = f"[ $KVSTORE_RANK = 1 ] && {death}; sleep 0.5; echo rank 1 is lost >&2"
    code, _, err = jobs.run(script, 2, linger_unheard=FOREVER)
    assert code == 137
    first, *others = err.splitlines()
    assert first.endswith(f"stopping the others, which get up to {FOREVER:g} s to notice")
    assert others == ["[w0] rank 1 is lost"]


def test_after_the_end_of_a_server_the_workers_get_the_longer_time(jobs: Jobs, tmp_path: Path) -> None:
    fifo = tmp_path / "the worker is up"
    os.mkfifo(fifo)
    server = READY + f'report("tcp://127.0.0.1:5000")\nopen({str(fifo)!r}).read()\nsys.exit(6)'
    script = f"echo > '{fifo}'; sleep 0.5; echo the server is lost >&2"
    code, _, err = jobs.run(script, servers=1, server=server, linger_unheard=FOREVER)
    assert code == 6
    assert "[w0] the server is lost" in err.splitlines()
