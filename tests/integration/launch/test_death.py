"""Deaths that nobody could announce: the survivors of a launched job find out, and say so before they are stopped."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvtrainer import launch
from tests.support.launch_jobs import READY, ROOT, Jobs
from tests.support.limits import DEAD_AFTER, FOREVER, LIMIT

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
        return (b"kvstore_server" in open(f"/proc/{pid}/cmdline", "rb").read()
                and os.environ["KVLAUNCH_MARK"].encode() in open(f"/proc/{pid}/environ", "rb").read())
    except OSError:
        return False
"""


def launched(script: str, *flags: str) -> tuple[int, str]:
    """The exit code and standard error of a job of two workers and one server."""
    kvlaunch = [sys.executable, "-m", "kvtrainer.launch", "-n", "2", "-s", "1", *flags, "--"]
    command = [*kvlaunch, sys.executable, "-c", script]
    environ = {**os.environ, "KVSTORE_DEAD_AFTER": str(DEAD_AFTER), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=LIMIT, check=False
    )
    return done.returncode, done.stderr


def test_a_survivor_of_a_killed_worker_raises_its_own_error_before_it_is_stopped() -> None:
    code, err = launched(TRAINING.format(victim="os.getpid()"))
    assert code == 137
    assert (
        "worker 1 was killed by signal 9 (SIGKILL); stopping the others, which get up to 8 s to notice" in err
    )
    [error] = [line for line in err.splitlines() if "WorkerLostError" in line]
    assert error.startswith("[w0] ")
    assert "rank 1" in error
    assert "Look for its own last words, and restart the job from its last saved states" in error


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
    assert err.splitlines()[1:] == ["[w0] rank 1 is lost"]


def test_after_the_end_of_a_server_the_workers_get_the_longer_time(jobs: Jobs, tmp_path: Path) -> None:
    fifo = tmp_path / "the worker is up"
    os.mkfifo(fifo)
    server = READY + f'report("tcp://127.0.0.1:5000")\nopen({str(fifo)!r}).read()\nsys.exit(6)'
    script = f"echo > '{fifo}'; sleep 0.5; echo the server is lost >&2"
    code, _, err = jobs.run(script, servers=1, server=server, linger_unheard=FOREVER)
    assert code == 6
    assert "[w0] the server is lost" in err.splitlines()


def test_a_linger_that_is_given_holds_after_every_failure() -> None:
    code, err = launched(
        "import os, time\nos.environ['KVSTORE_RANK'] == '1' and os.abort()\ntime.sleep(3600)", "--linger=0"
    )
    assert code == 134
    assert "to notice" not in err


def test_a_bad_dead_after_is_wrong_usage(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KVSTORE_DEAD_AFTER", "-1")
    with pytest.raises(SystemExit) as caught:
        launch.main(["-n", "1", "--", "true"])
    assert caught.value.code == 2
    assert "KVSTORE_DEAD_AFTER is '-1'; it must be a number of seconds above 0" in capsys.readouterr().err
