"""Jobs whose processes die and are started again, in the same place; and what is left when they may not be."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kvstore_server.restarts import REPLACED
from kvtrainer import local_cluster
from tests.integration.launch.test_hosts import HostJobs
from tests.support.cluster_work import fail_until, kill_the_server
from tests.support.jobs import run_program
from tests.support.launch_jobs import ROOT, STUBBORN, Jobs, line_of, resuming
from tests.support.limits import FOREVER, LIMIT
from tests.support.processes import eventually

# Workers.


def test_a_killed_worker_is_started_again_in_its_place_until_it_is_done(jobs: Jobs) -> None:
    place = "$KVSTORE_RANK/$KVSTORE_NUM_WORKERS $KVSTORE_LOCAL_RANK $KVSTORE_SERVERS"
    script = f'echo "{place} $KVSTORE_RESTARTS"; [ $KVSTORE_RANK$KVSTORE_RESTARTS -lt 12 ] && [ $KVSTORE_RANK = 1 ] '
    code, out, err = jobs.run(f"{script} && kill -9 $$; exit 0", 2, servers=1, restarts=2)
    assert code == 0, err
    lines = [line for line in out.splitlines() if line.startswith("[w")]
    assert sorted(lines) == [
        "[w0] 0/2 0 tcp://127.0.0.1:5000 0",
        *[f"[w1] 1/2 1 tcp://127.0.0.1:5000 {restarts}" for restarts in range(3)],
    ]
    deaths = [line for line in err.splitlines() if "worker" in line]
    assert [line.partition(" after ")[0] for line in deaths] == [
        "kvlaunch: worker 1 was killed by signal 9 (SIGKILL)"
    ] * 2
    assert [line.partition("; ")[2] for line in deaths] == ["restart 1 of 2", "restart 2 of 2 in 0.5 s"]
    assert jobs.alive() == []


def test_a_worker_that_fails_is_started_again_and_the_job_ends_well(jobs: Jobs) -> None:
    assert jobs.run("[ $KVSTORE_RESTARTS = 1 ] || exit 3", 3, restarts=1)[0] == 0


def test_used_up_restarts_end_the_job_with_the_first_error(jobs: Jobs) -> None:
    script = f"[ $KVSTORE_RANK = 0 ] && exit $((40 + KVSTORE_RESTARTS)); {STUBBORN}"
    code, _, err = jobs.run(script, 2, restarts=2, grace=0.3)
    assert code == 40
    last = err.splitlines()[-1]
    assert "worker 0 exited with code 42 after" in last
    assert last.endswith("and there is no restart left of 2; stopping the others")
    assert jobs.alive() == []


def test_a_worker_that_was_replaced_is_not_started_again(jobs: Jobs) -> None:
    code, out, err = jobs.run(f"echo once; exit {REPLACED}", restarts=5)
    assert (code, out) == (REPLACED, "[w0] once\n")
    assert err == f"kvlaunch: worker 0 exited with code {REPLACED}\n"


def test_a_job_with_a_range_of_workers_goes_on_without_those_that_die(jobs: Jobs, tmp_path: Path) -> None:
    may_end = tmp_path / "may end"
    script = f"""
echo $KVSTORE_ELASTIC
[ $KVSTORE_RANK = 2 ] && kill -9 $$
[ $KVSTORE_RANK = 1 ] && exit 75
until [ -e "{may_end}" ]; do sleep 0.02; done
"""
    process = jobs.start(script, 4, elastic=(2, 4))
    assert process.stderr is not None
    lines = sorted(process.stderr.readline().decode() for _ in range(2))
    may_end.touch()
    code, out, err = jobs.finish(process)
    assert (code, err) == (0, "")
    assert sorted(out.splitlines()) == [f"[w{rank}] 2..4" for rank in range(4)]
    assert [line.split()[2] for line in lines] == ["1", "2"]
    assert sorted(line.partition("; ")[2] for line in lines) == [
        "the job goes on with 2 workers\n",
        "the job goes on with 3 workers\n",
    ]


def test_a_worker_that_is_done_neither_trains_nor_is_missing(jobs: Jobs, tmp_path: Path) -> None:
    done, may_end = tmp_path / "done", tmp_path / "may end"
    script = f"""
[ $KVSTORE_RANK = 0 ] && echo $$ > "{done}" && exit 0
until [ -s "{done}" ]; do sleep 0.02; done
while [ -e /proc/$(cat "{done}") ]; do sleep 0.02; done  # until the launcher knows
[ $KVSTORE_RANK = 1 ] && kill -9 $$
until [ -e "{may_end}" ]; do sleep 0.02; done
"""
    process = jobs.start(script, 3, elastic=(2, 3))
    assert process.stderr is not None
    line = process.stderr.readline().decode()
    may_end.touch()
    assert jobs.finish(process)[0] == 0
    assert line.partition("; ")[2] == "the job goes on with 1 workers, 1 are done\n"


def test_a_job_ends_when_fewer_workers_than_the_least_are_left(jobs: Jobs) -> None:
    code, _, err = jobs.run("[ $KVSTORE_RANK = 2 ] || exit 7; sleep 1; exit 0", 3, elastic=(2, 3))
    assert code == 7
    assert [("goes on" in line) for line in err.splitlines() if "exited" in line] == [True, False]


def test_without_restarts_the_first_death_ends_the_job_and_no_variable_speaks_of_them(jobs: Jobs) -> None:
    code, out, err = jobs.run("echo ${KVSTORE_RESTARTS-unset}; exit 3", environ={"KVSTORE_RESTARTS": "7"})
    assert (code, out, err) == (3, "[w0] unset\n", "kvlaunch: worker 0 exited with code 3\n")


def test_what_a_dead_worker_left_running_is_gone_before_its_successor_starts(
    jobs: Jobs, tmp_path: Path
) -> None:
    left = tmp_path / "left"
    script = f"""
if [ $KVSTORE_RESTARTS = 0 ]; then
    sh -c "{STUBBORN}" & echo $! > {left}
    kill -9 $$
fi
grep -q . /proc/$(cat {left})/cmdline && echo it is there || echo it is gone  # a zombie has none
"""
    assert jobs.run(script, restarts=1)[1] == "[w0] it is gone\n"


def test_a_signal_ends_a_job_whose_worker_waits_for_its_restart(jobs: Jobs) -> None:
    # The fourth restart in a row comes after two seconds.
    process = jobs.start("[ $KVSTORE_RANK = 0 ] && exit 3; exec sleep 3600", 2, restarts=9)
    assert process.stderr is not None
    while b"in 2 s" not in process.stderr.readline():
        pass
    process.send_signal(signal.SIGTERM)
    assert jobs.finish(process)[0] == 128 + signal.SIGTERM
    assert jobs.alive() == []


def test_a_failure_for_good_ends_the_job_while_another_worker_waits_for_its_restart(
    jobs: Jobs, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    wait = f"until grep -q 'in 2 s' {log}; do sleep 0.05; done"
    with log.open("wb") as file:
        script = f"[ $KVSTORE_RANK = 0 ] && exit 3; {wait}; exit {REPLACED}"
        assert jobs.finish(jobs.start(script, 2, restarts=9, stderr=file))[0] == REPLACED
    assert jobs.alive() == []


def test_kill_9_of_the_launcher_ends_a_worker_that_was_started_again(jobs: Jobs) -> None:
    process = jobs.start(
        f"[ $KVSTORE_RESTARTS = 1 ] || kill -9 $$; echo up; {STUBBORN}", restarts=1, grace=0.3
    )
    assert line_of(process) == "[w0] up"
    process.kill()
    process.wait()
    assert eventually(lambda: jobs.alive() == []), jobs.alive()


RESUMING = resuming('os.environ.get("KVSTORE_RESTARTS") == "0"')


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The weights that both workers of a job without a death say; nobody starts them again, so none kills itself."""
    said = run_program(["-c", RESUMING], tmp_path_factory.mktemp("undisturbed"), 2, 1)
    first, second = [line for line in said.splitlines() if line.startswith("[[")]
    assert first == second
    return first


@pytest.mark.full
def test_a_killed_worker_resumes_and_all_end_with_the_bits_of_a_job_without_a_death(jobs: Jobs) -> None:
    said = []
    for flags in ([], ["--restart", "1"]):
        code, out, err = jobs.finish(launch(jobs, RESUMING, "-n", "2", "-s", "2", *flags))
        assert code == 0, err
        assert err.count("restart 1 of 1") == len(flags) // 2
        said += [line[5:] for line in out.splitlines() if line.startswith("[w")]
    assert len(said) == 4
    assert len(set(said)) == 1


# Servers, and other hosts.

FIND = """
import os, signal, sys, time
from pathlib import Path
from kvstore_server import probe
def pid_of_server():
    "The server of this job that is no supervisor."
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes().split(b"\\0")
            ours = os.environ["LAUNCH_TEST"].encode() in (folder / "environ").read_bytes()
        except OSError:
            continue
        if ours and b"kvstore_server" in words and b"--supervise" not in words:
            return int(folder.name)
    return None
def wait_for(condition):
    while not (found := condition()):
        time.sleep(0.1)
    return found
server = os.environ["KVSTORE_SERVERS"]
"""


def launch(jobs: Jobs, script: str, *flags: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "kvtrainer.jobs.kvlaunch", "-n", "1", "-s", "1", "--linger=0", *flags]
    process = subprocess.Popen(
        [*command, "--", sys.executable, "-c", script],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, **jobs.variable, "OMP_NUM_THREADS": "1"},
        cwd=ROOT,
    )
    jobs._started.append(process)
    return process


def weights_in(out: str) -> list[str]:
    """What workers say, without the tags of a launcher."""
    return [line[5:] for line in out.splitlines() if line.startswith("[w") and "[[" in line]


@pytest.mark.full
def test_a_killed_server_comes_back_at_its_address_and_the_job_goes_on(jobs: Jobs) -> None:
    script = (
        FIND
        + f"""
for _ in range(2):
    pid = wait_for(pid_of_server)
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: pid_of_server() not in (None, pid) and not probe.probe_server(server, {LIMIT}))
print("it answers at", server)
"""
    )
    code, out, err = jobs.finish(launch(jobs, script, "--restart", "2"))
    assert code == 0, err
    [answer] = [line for line in out.splitlines() if line.startswith("[w0]")]
    address = answer.rpartition(" ")[2]
    again = [line for line in out.splitlines() if line.startswith("[s0]")]
    assert again == [f"[s0] kvstore-server: listening on {address}"] * 2
    deaths = [line for line in err.splitlines() if "SIGKILL" in line]
    assert [line.partition(" after ")[0] for line in deaths] == [
        "[s0] kvstore-server: server 0 was killed by signal 9 (SIGKILL)"
    ] * 2
    assert jobs.alive() == []


def test_a_job_whose_server_and_worker_are_killed_ends_with_the_bits_of_one_without_a_death(
    jobs: Jobs, undisturbed: str
) -> None:
    killing = FIND + RESUMING.replace(
        "    trainer.step()",
        """    if step == 2 and trainer.rank == 1 and os.environ.get("KVSTORE_RESTARTS") == "0":
        print("the server is at", server, flush=True)
        os.kill(wait_for(pid_of_server), signal.SIGKILL)
    trainer.step()""",
    )
    code, out, err = jobs.finish(launch(jobs, killing, "-n", "2", "--restart", "1"))
    assert code == 0, err
    assert err.count("restart 1 of 1") == 2  # of the worker and of the server
    lines = out.splitlines()
    [address] = [line.rpartition(" ")[2] for line in lines if "the server is at" in line]
    assert [line for line in lines if line.startswith("[s0]")] == [
        f"[s0] kvstore-server: listening on {address}"
    ]
    assert weights_in(out) == [undisturbed] * 2
    assert jobs.alive() == []


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param(["--restart", "0"], marks=pytest.mark.full),
        ["--restart", "5", "--durability", "off"],
    ],
)
def test_a_killed_server_whose_memory_is_lost_ends_the_job(jobs: Jobs, flags: list[str]) -> None:
    script = FIND + f"os.kill(wait_for(pid_of_server), signal.SIGKILL); time.sleep({FOREVER})"
    code, _, err = jobs.finish(launch(jobs, script, *flags))
    assert code == 137
    assert "server 0 was killed by signal 9 (SIGKILL) before the workers were done" in err
    assert jobs.alive() == []


@pytest.mark.parametrize("durability", ["off", pytest.param("process", marks=pytest.mark.full)])
def test_a_server_whose_memory_is_lost_is_started_again_if_there_are_snapshots(
    jobs: Jobs, durability: str, tmp_path: Path, undisturbed: str
) -> None:
    killing = FIND + RESUMING.replace(
        "    trainer.step()",
        f"""    if step == 3 and trainer.rank == 1 and os.environ.get("KVSTORE_RESTARTS") == "0":
        pid = wait_for(pid_of_server)
        if {durability == "process"}:
            pid = int(Path(f"/proc/{{pid}}/stat").read_text().rpartition(")")[2].split()[1])  # its supervisor
        os.kill(pid, signal.SIGKILL)
    trainer.step()""",
    )
    flags = [
        "--restart",
        "1",
        "--durability",
        durability,
        "--state-dir",
        str(tmp_path),
        "--snapshot-every",
        "2",
    ]
    code, out, err = jobs.finish(launch(jobs, killing, "-n", "2", *flags))
    assert code == 0, err
    assert weights_in(out) == [undisturbed] * 2
    assert err.count("restart 1 of 1") == 3  # of the server, and of both workers
    assert err.count("ServerLostState: server 0 was restarted") == 2
    assert jobs.alive() == []


@pytest.mark.full
def test_a_job_leaves_no_snapshots_if_a_server_that_holds_nothing_of_it_was_lost(
    jobs: Jobs, tmp_path: Path
) -> None:
    # Small weights lie on one of two servers. The supervisor of the other one is killed, too, so its memory is lost.
    script = FIND.replace("in words and", "in words and words[words.index(b'--index') + 1] == index and")
    script += resuming("False").replace(
        "    trainer.step()",
        """    if step == 3 and trainer.rank == 1 and os.environ.get("KVSTORE_RESTARTS") == "0":
        [empty] = [at for at, one in enumerate(trainer.server_stats()) if not one["tables"]]
        index = str(empty).encode()
        pid = wait_for(pid_of_server)
        os.kill(int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]), signal.SIGKILL)
    trainer.step()""",
    )
    flags = ["-n", "2", "-s", "2", "--restart", "1", "--state-dir", str(tmp_path), "--snapshot-every", "2"]
    code, _, err = jobs.finish(launch(jobs, script, *flags))
    assert code == 0, err
    assert "restart 1 of 1" in err
    assert list(tmp_path.glob("server-*/round-*")) == []


def test_used_up_restarts_of_a_server_end_the_job_with_its_code(jobs: Jobs) -> None:
    script = (
        FIND
        + """
pid = None
while True:
    pid = wait_for(lambda: (found := pid_of_server()) != pid and found)
    os.kill(pid, signal.SIGKILL)
"""
    )
    code, _, err = jobs.finish(launch(jobs, script, "--restart", "1"))
    assert code == 137
    assert "there is no restart left of 1" in err
    assert "server 0 exited with code 137 before the workers were done" in err
    assert jobs.alive() == []


@pytest.mark.full
def test_servers_are_told_of_durability_and_of_how_long_to_wait(jobs: Jobs) -> None:
    show = (
        FIND
        + """
environ = Path(f"/proc/{wait_for(pid_of_server)}/environ").read_bytes().decode().split(chr(0))
print(*sorted(one for one in environ if one.startswith(("KVSTORE_DUR", "KVSTORE_REJ", "KVSTORE_RES"))))
"""
    )
    flags = ["--restart", "1", "--rejoin-timeout", "17"]
    _, out, _ = jobs.finish(launch(jobs, show, *flags))
    [said] = [line for line in out.splitlines() if line.startswith("[w0]")]
    assert said == "[w0] KVSTORE_DURABILITY=process KVSTORE_REJOIN_TIMEOUT=17.0 KVSTORE_RESTARTS=0"


def test_workers_and_servers_on_hosts_are_started_again_there(tmp_path: Path) -> None:
    jobs = HostJobs(tmp_path)
    worker = tmp_path / "worker.py"
    worker.write_text(
        FIND
        + f"""
if os.environ["KVSTORE_RESTARTS"] == "0" and os.environ["KVSTORE_RANK"] == "1":
    os.kill(wait_for(pid_of_server), signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)
wait_for(lambda: not probe.probe_server(server, {LIMIT}))
print(os.environ["KVSTORE_RANK"], os.environ["ON"], os.environ["KVSTORE_RESTARTS"])
"""
    )
    process = jobs.launch(f"exec {sys.executable} {worker}", 2, 1, "--restart", "1")
    try:
        code, out, err = jobs.finish(process)
        assert code == 0, err
        assert sorted(line for line in out.splitlines() if line.startswith("[w")) == [
            "[w0] 0 127.0.0.1 0",
            "[w1] 1 localhost 1",
        ]
        assert "kvlaunch: worker 1 on localhost exited with code 137 after" in err
        assert "[s0] kvstore-server: server 0 was killed by signal 9 (SIGKILL) after" in err
        assert jobs.alive() == []
    finally:
        jobs.close()


# Clusters of a notebook.


@pytest.mark.parametrize("how", ["kill", "raise"])
def test_a_worker_of_a_cluster_is_started_again_and_its_result_comes_back(
    how: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with local_cluster(workers=2, servers=0, restart=2, linger=LIMIT) as cluster:
        assert cluster.run(fail_until, 2, how) == ["0", "2"]
        assert cluster.run(fail_until, 0, how) == ["0", "0"]  # each run has restarts of its own
    deaths = [
        line for line in capsys.readouterr().err.splitlines() if line.startswith("local_cluster: worker 1 ")
    ]
    assert [line.partition("; ")[2] for line in deaths] == ["restart 1 of 2", "restart 2 of 2 in 0.5 s"]


def test_used_up_restarts_of_a_cluster_raise_the_error() -> None:
    with (
        local_cluster(workers=2, servers=0, restart=1, linger=LIMIT) as cluster,
        pytest.raises(LookupError, match="start 1"),
    ):
        cluster.run(fail_until, 2, "raise")


def test_a_killed_server_of_a_cluster_comes_back_at_its_address(
    jobs: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    [(name, token)] = jobs.variable.items()
    monkeypatch.setenv(name, token)
    with local_cluster(workers=1, servers=1, restart=1, linger=LIMIT) as cluster:
        assert cluster.run(kill_the_server, token) == [*cluster.servers]
    assert jobs.alive() == []
