"""The launcher with real processes: what they find, how their output comes out, and what a failure does."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from kvtrainer.common.env import read_topology_from_env
from kvtrainer.jobs import kvlaunch
from tests.support.launch_jobs import READY, ROOT, STUBBORN, TELLS_WHERE, Jobs, line_of
from tests.support.limits import FOREVER, LIMIT, SOON
from tests.support.processes import Members, Processes, eventually, new_name, round_of, together

# What workers find.


def test_each_worker_finds_its_rank_the_number_of_workers_and_the_servers_by_their_index(jobs: Jobs) -> None:
    code, out, _ = jobs.run("echo $KVSTORE_RANK of $KVSTORE_NUM_WORKERS, $KVSTORE_SERVERS", 3, servers=2)
    assert code == 0
    servers = "tcp://127.0.0.1:5000,tcp://127.0.0.1:5001"
    said = [line for line in out.splitlines() if line.startswith("[w")]
    assert sorted(said) == [f"[w{rank}] {rank} of 3, {servers}" for rank in range(3)]


def test_topology_of_the_launchers_own_environment_does_not_reach_a_job_without_servers(jobs: Jobs) -> None:
    stale = {"KVSTORE_SERVERS": "tcp://elsewhere:1", "KVSTORE_RANK": "7"}
    _, out, _ = jobs.run("echo ${KVSTORE_SERVERS-unset} $KVSTORE_RANK", environ=stale)
    assert out == "[w0] unset 0\n"


def test_each_worker_has_another_place_on_the_host_whatever_another_launcher_said_of_kvlaunch(
    jobs: Jobs,
) -> None:
    names = ("LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID")
    code = f"""
import os
from kvtrainer.common.env import local_rank_from_env
print(local_rank_from_env(os.environ), *(os.environ.get(name, "-") for name in {names}))
"""
    stale = dict.fromkeys((*names, "RANK", "SLURM_PROCID"), "0")
    _, out, _ = jobs.run(f"{sys.executable} -c '{code.replace(chr(39), chr(34))}'", 2, environ=stale)
    assert sorted(out.splitlines()) == ["[w0] 0 - - - -", "[w1] 1 - - - -"]


@pytest.mark.parametrize("given", [None, "17"])
def test_cores_are_divided_among_workers_as_threads_unless_the_user_has_said_how_many(
    jobs: Jobs, given: str | None
) -> None:
    environ = {} if given is None else {"OMP_NUM_THREADS": given}
    _, out, _ = jobs.run("echo $OMP_NUM_THREADS $PYTHONUNBUFFERED", 2, environ=environ)
    assert out.splitlines()[0][5:] == f"{given or max(1, len(os.sched_getaffinity(0)) // 2)} 1"


# Views.


def test_a_viewer_is_told_of_the_servers_and_ends_with_the_job(jobs: Jobs, tmp_path: Path) -> None:
    seen = tmp_path / "seen"
    code, out, err = jobs.run(
        f"until [ -e {seen} ]; do :; done",
        servers=2,
        viewer=f"echo $1 and $2; touch {seen}; exec sleep {FOREVER}",
    )
    assert code == 0, err
    assert "[v0] tcp://127.0.0.1:5000 and tcp://127.0.0.1:5001" in out.splitlines()
    assert eventually(lambda: jobs.alive() == [])


def test_a_viewer_that_fails_leaves_the_job_alone(jobs: Jobs, tmp_path: Path) -> None:
    seen = tmp_path / "seen"
    viewer = f"trap 'touch {seen}' EXIT; echo no such port >&2; exit 1"
    code, _, err = jobs.run(f"until [ -e {seen} ]; do :; done", servers=1, viewer=viewer)
    assert (code, err.splitlines()[1:]) == (0, ["[v0] no such port"])


def test_the_page_of_a_job_shows_its_workers(
    processes: Processes, members: Members, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = ["-n", "1", "-s", "1", "--dashboard", "0"]
    worker = ["sh", "-c", f'echo "to $KVSTORE_KEYS $KVSTORE_SERVERS"; exec sleep {FOREVER}']
    job = processes.start([sys.executable, "-m", "kvtrainer.jobs.kvlaunch", *flags, "--", *worker])
    said: dict[str, str] = {}
    keys = ""
    while len(said) < 2:
        line = job.line()
        keys = line.split()[2] if "] to " in line else keys
        said |= {line[:4]: line.rpartition(" ")[2]} if "the page is at " in line or "] to " in line else {}
    monkeypatch.setenv("KVSTORE_KEYS", keys)
    members.join([said["[w0]"]], 0, 1, new_name())

    def workers() -> list[str]:
        with urllib.request.urlopen(f"{said['[v0]']}view.json", timeout=LIMIT) as answer:
            views = json.load(answer)
        return [one["state"] for job in (views[-1]["jobs"] if views else ()) for one in job["workers"]]

    assert eventually(lambda: workers() == ["here"])
    job.signal(signal.SIGTERM)
    assert job.end()[0] == 128 + signal.SIGTERM


# Output.


def test_where_the_servers_listen_is_said_also_without_a_terminal(jobs: Jobs) -> None:
    code, _, err = jobs.run("true", servers=2)
    assert (code, err) == (0, TELLS_WHERE)


def test_streams_stay_apart_and_a_last_line_without_end_is_printed(jobs: Jobs) -> None:
    code, out, err = jobs.run("printf 'a\\nb'; printf 'c\\nd' >&2")
    assert (code, out, err) == (0, "[w0] a\n[w0] b\n", "[w0] c\n[w0] d\n")


def test_lines_of_different_processes_never_mix(jobs: Jobs) -> None:
    script = (
        "i=0; while [ $i -lt 300 ]; do printf '<%s ' $i; printf '%0500d' 0; echo ' end>'; i=$((i+1)); done"
    )
    code, out, _ = jobs.run(script, 3)
    lines = out.splitlines()
    assert code == 0
    for rank in range(3):
        own = [line for line in lines if line.startswith(f"[w{rank}] ")]
        assert own == [f"[w{rank}] <{i} {0:0500d} end>" for i in range(300)]
    assert len(lines) == 900


def test_reader_that_goes_away_ends_the_job(jobs: Jobs) -> None:
    process = jobs.start("while :; do echo line; done")
    line_of(process)
    assert process.stdout is not None
    process.stdout.close()
    assert process.wait(LIMIT) == 128 + signal.SIGPIPE
    assert process.stderr is not None
    assert b"cannot write the output: Broken pipe" in process.stderr.read()


def test_slow_reader_gets_all_output_although_the_job_is_over(jobs: Jobs) -> None:
    process = jobs.start("head -c 20000 /dev/zero | tr '\\0' '\\n'; echo last")
    assert eventually(lambda: jobs.pids() == [process.pid])  # only the launcher is left
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(timeout=1.5)
    code, out, _ = jobs.finish(process)
    assert (code, out) == (0, "[w0] \n" * 20_000 + "[w0] last\n")


# Failures.


def test_first_failure_gives_the_exit_code_and_ends_the_others(jobs: Jobs) -> None:
    # A worker that could say why it failed does not prolong the job.
    code, _, err = jobs.run("[ $KVSTORE_RANK = 1 ] && exit 3; sleep 3600", 3, linger_unheard=FOREVER)
    assert code == 3
    assert err == "kvlaunch: worker 1 exited with code 3; stopping the others\n"
    assert jobs.alive() == []


def test_others_get_a_moment_to_report_a_failure_in_their_own_words(jobs: Jobs) -> None:
    script = "[ $KVSTORE_RANK = 1 ] && exit 3; sleep 0.3; echo worker 1 is lost >&2; exit 4"
    code, _, err = jobs.run(script, 2, linger=FOREVER)  # not all of it is waited for, since no worker is left
    assert code == 3
    assert err.splitlines()[1:] == ["[w0] worker 1 is lost"]


def test_verdict_comes_after_the_last_words_even_when_the_reader_is_slow(jobs: Jobs) -> None:
    # The worker leaves its pipe full, at a time when the launcher does not read because its own reader does not.
    fill = """
import os, sys, time
os.set_blocking(2, False)
os.write(1, b"up\\n")
refused = 0
while refused < 20:
    try:
        os.write(2, b"x" * 99 + b"\\n")
        refused = 0
    except BlockingIOError:
        refused += 1
        time.sleep(0.01)
sys.exit(5)
"""
    process = jobs.start(f"exec {sys.executable} -I -S -c '{fill}'")
    assert line_of(process) == "[w0] up"
    assert eventually(lambda: jobs.pids("refused") == [process.pid])
    _, _, err = jobs.finish(process)
    assert err.splitlines()[-1] == "kvlaunch: worker 0 exited with code 5"


def test_worker_that_ignores_sigterm_is_killed_after_the_grace(jobs: Jobs) -> None:
    code, _, _ = jobs.run(f"[ $KVSTORE_RANK = 1 ] && exit 3; {STUBBORN}", 2, grace=0.3)
    assert code == 3
    assert jobs.alive() == []


@pytest.mark.parametrize(("own", "expected"), [(6, 6), (0, 1)])
def test_server_that_exits_early_fails_the_job(jobs: Jobs, tmp_path: Path, own: int, expected: int) -> None:
    fifo = tmp_path / "a worker is up"
    os.mkfifo(fifo)
    server = READY + f'report("tcp://127.0.0.1:5000")\nopen({str(fifo)!r}).read()\nsys.exit({own})'
    code, _, err = jobs.run(f"echo > '{fifo}'; sleep 3600", servers=1, server=server)
    assert code == expected
    assert f"server 0 exited with code {own} before the workers were done; stopping the others" in err


@pytest.mark.parametrize(
    ("server", "start", "told"),
    [
        ("os._exit(2)", LIMIT, "server 0 exited with code 2 before it was ready"),
        ('report("nonsense")', LIMIT, "server 0 did not report its address: 'nonsense' is not the address"),
        ("", SOON, f"server 0 did not report an address within {SOON:g} s; allow more with --start-timeout"),
    ],
)  # fmt: skip
def test_server_that_does_not_get_ready_fails_the_job_before_any_worker_starts(
    jobs: Jobs, server: str, start: float, told: str
) -> None:
    server = READY + f'os.write(2, b"last words\\n")\n{server}\nstay()'
    code, out, err = jobs.run("echo never", servers=1, server=server, start=start)
    assert (code, "never" in out) == (1, False)
    assert err.splitlines()[0] == "[s0] last words"
    assert told in err
    assert jobs.alive() == []


@pytest.mark.parametrize(("command", "code"), [("/no/such/program", 127), ("/etc/passwd", 126)])
def test_command_that_cannot_be_started_gives_the_code_of_a_shell(
    command: str, code: int, capfd: pytest.CaptureFixture[str]
) -> None:
    assert kvlaunch.main(["-n", "1", "-s", "0", "--", command]) == code
    assert f"kvlaunch: cannot start worker 0: [Errno {2 if code == 127 else 13}]" in capfd.readouterr().err


# The command line.


@pytest.mark.parametrize("module", ["kvtrainer", "kvtrainer.jobs.kvlaunch"])
def test_module_runs_as_a_program_and_passes_arguments_after_the_separator_untouched(module: str) -> None:
    command = [sys.executable, "-m", module, "-n", "1", "-s", "0", "--", "echo", "-n", "--", "-s"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT, check=False)
    assert (done.returncode, done.stdout) == (0, "[w0] -- -s\n")


# Which Python a worker is.


def on_path(folder: Path, prefix: str) -> str:
    """A PATH on which `python3` is a program that says it is of that environment, and otherwise does nothing."""
    program = folder / "python3"
    program.write_text(f'#!/bin/sh\ncase "$*" in *sys.prefix*) echo "{prefix}";; *) echo ran;; esac\n')
    program.chmod(0o755)
    return f"{folder}:{os.environ['PATH']}"


def test_a_python_of_another_environment_is_pointed_out_in_one_line(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = on_path(tmp_path, "/elsewhere")
    assert kvlaunch.main(["-n", "2", "-s", "0", "--env", f"PATH={path}", "python3", "train.py"]) == 0
    out, err = capfd.readouterr()
    assert sorted(out.splitlines()) == ["[w0] ran", "[w1] ran"]
    assert err.count("\n") == 1
    assert f"{tmp_path}/python3" in err
    assert sys.executable in err


@pytest.mark.parametrize("prefix", [sys.prefix, ""])
def test_a_python_of_the_same_environment_or_one_that_says_nothing_is_no_news(
    prefix: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """As pyenv's, which are scripts in a place of their own."""
    path = on_path(tmp_path, prefix)
    assert kvlaunch.main(["-n", "1", "-s", "0", "--env", f"PATH={path}", "python3", "train.py"]) == 0
    assert capfd.readouterr().err == ""


def test_a_python_that_is_given_by_its_path_is_meant(capfd: pytest.CaptureFixture[str]) -> None:
    base = Path(sys.executable).resolve()
    assert kvlaunch.main(["-n", "1", "-s", "0", str(base), "-c", "pass"]) == 0
    assert capfd.readouterr().err == ""


TORCHRUN = (
    sys.executable,
    "-m",
    "torch.distributed.run",
    "--standalone",
    "--nproc-per-node",
    "2",
    "--no-python",
)
MPIEXEC = ("mpiexec", "-n", "2", "--oversubscribe")
AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


ATTEMPT = """
import os, signal, torch
from kvtrainer import kvstore
kv = kvstore.create("dist_sync")
kv.init("w", torch.zeros(1))
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and kv.rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
kv.push("w", torch.ones(1))
kv.pull("w", out=(w := torch.zeros(1)))
line = f"attempt {os.environ['TORCHELASTIC_RESTART_COUNT']} has {w.item()}\\n"
os.write(1, line.encode())  # at once: both workers write to one pipe
"""


@pytest.mark.full
def test_under_torchrun_a_death_takes_one_restart_beside_servers_that_go_on(processes: Processes) -> None:
    [server] = processes.servers(1)
    launcher = [*TORCHRUN[:-1], "--max-restarts", "1", "--no-python"]
    environ = {"KVSTORE_SERVERS": server.address}
    code, err = (job := processes.start([*launcher, sys.executable, "-c", ATTEMPT], env=environ)).end()
    assert code == 0, err
    assert [job.line(), job.line()] == ["attempt 1 has 2.0"] * 2


@pytest.mark.parametrize(
    "launcher", [pytest.param(TORCHRUN, id="torchrun"), pytest.param(MPIEXEC, id="mpiexec")]
)
def test_workers_of_another_launcher_join_the_servers_of_a_list(
    processes: Processes, members: Members, tmp_path: Path, launcher: Sequence[str]
) -> None:
    if shutil.which(launcher[0]) is None:
        pytest.skip(f"there is no {launcher[0]}")
    servers = processes.servers(2)
    listed = {"KVSTORE_SERVERS": ",".join(server.address for server in servers), **AS_ROOT}
    job = processes.start([*launcher, "sh", "-c", f"env > $(mktemp {tmp_path}/XXXXXX)"], env=listed)
    code, err = job.end()
    assert code == 0, err
    found = [
        dict(line.partition("=")[::2] for line in one.read_text().splitlines()) for one in tmp_path.iterdir()
    ]
    places = sorted([read_topology_from_env(environ) for environ in found], key=lambda place: place.rank)
    assert [place.rank for place in places] == [0, 1]
    stores = [members.join(place.servers, place.rank, place.num_workers, "launched") for place in places]
    together(*(lambda kv=kv: kv.init("w", torch.zeros(3)) for kv in stores))
    sums = together(*(lambda kv=kv: round_of(kv, "w", torch.full((3,), 10.0**kv.rank)) for kv in stores))
    assert [one.tolist() for one in sums] == [[11.0, 11.0, 11.0]] * 2
