"""Clusters for notebooks and tests: functions on workers, their results and failures, and that nothing is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvtrainer import local_cluster
from kvtrainer.errors import (
    ArgumentTypeError,
    ClusterError,
    ConcurrentCallError,
    ConfigurationError,
    ConnectTimeoutError,
    WorkerLostError,
    WorkerTraceback,
)
from kvtrainer.jobs.cluster import ClusterMemFile, LocalCluster, unpack_cluster_outcome
from tests.support.cluster_work import fail, place, place_on_host, say, sum_and_fail, train_without_rank_1
from tests.support.launch_jobs import ROOT, Jobs
from tests.support.limits import LIMIT
from tests.support.one_in import one_in
from tests.support.processes import Call, eventually


@pytest.fixture
def pair() -> Iterator[LocalCluster]:
    """Two workers without servers."""
    with local_cluster(workers=2, servers=0, linger=LIMIT) as cluster:
        yield cluster


@pytest.fixture
def own_jobs(jobs: Jobs, monkeypatch: pytest.MonkeyPatch) -> Jobs:
    """Finds the processes that this one starts."""
    for name, value in jobs.variable.items():
        monkeypatch.setenv(name, value)
    return jobs


# What comes back.


def test_each_worker_is_given_the_arguments_and_finds_its_rank_and_what_it_returns_comes_back_in_order(
    pair: LocalCluster,
) -> None:
    assert pair.run(place, 1, key="word") == [
        (str(rank), "2", None, (1,), {"key": "word"}) for rank in range(2)
    ]


def test_each_worker_has_another_place_on_the_host_whatever_a_launcher_said_of_this_program(
    pair: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK"):
        monkeypatch.setenv(name, "0")
    assert pair.run(place_on_host) == [0, 1]


def test_lines_of_workers_come_out_of_sys_stdout_and_stderr_with_the_rank_before_them(
    pair: LocalCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    for stream in ("stdout", "stderr"):
        assert pair.run(say, stream) == [None, None]
    seen = capsys.readouterr()
    assert [sorted(text.splitlines()) for text in seen] == [["[w0] it is 0", "[w1] it is 1"]] * 2


def test_an_output_that_takes_nothing_more_does_not_keep_the_workers_waiting(
    pair: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdout", None)  # as of a program without a console
    assert pair.run(say, "stdout") == [None, None]


def test_a_long_result_comes_back_whole(pair: LocalCluster) -> None:
    assert pair.run(bytes, 3_000_000) == [bytes(3_000_000)] * 2


def test_a_lambda_travels_with_what_it_needs(pair: LocalCluster) -> None:
    pytest.importorskip("cloudpickle")
    addend = 3
    assert pair.run(lambda x: x + addend, 4) == [7, 7]


def test_without_cloudpickle_a_lambda_is_refused_with_what_to_install(
    pair: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    with pytest.raises(ConfigurationError, match=r"pip install 'kvtrainer\[notebook\]'"):
        pair.run(lambda: 1)
    assert len(pair.run(place)) == 2


def test_runs_of_one_cluster_meet_on_its_servers_and_a_failed_one_leaves_nothing_for_the_next() -> None:
    with local_cluster(workers=2, servers=1, linger=LIMIT) as cluster:
        before = cluster.servers
        assert repr(cluster) == f"<LocalCluster workers=2 servers=['{before[0]}']>"
        for _ in range(2):
            assert [found[2] for found in cluster.run(place)] == [*before] * 2
        assert cluster.servers == before
        with pytest.raises(LookupError, match=r"on purpose, after \[11.0, 11.0\]") as caught:
            cluster.run(sum_and_fail)
        cause = caught.value.__cause__
        assert isinstance(cause, WorkerTraceback)
        assert cause.rank == 1
        assert f"then rank 0: {WorkerLostError.__module__}.{WorkerLostError.__name__}: " in cause.text
        assert [found[2] for found in cluster.run(place)] == [*cluster.servers] * 2
        assert not {*cluster.servers} & {*before}
    assert repr(cluster) == "<LocalCluster workers=2 closed>"


# Failures.


def test_an_exception_is_raised_as_itself_with_the_workers_traceback_as_its_cause() -> None:
    with local_cluster(workers=2, servers=0, linger=0.0) as cluster, pytest.raises(KeyError) as caught:
        cluster.run(fail, "raise")
    assert caught.value.args == ("no such thing",)
    cause = caught.value.__cause__
    assert isinstance(cause, WorkerTraceback)
    assert cause.rank == 1
    assert 'raise KeyError("no such thing")' in cause.text
    assert str(cause).startswith("on rank 1:\nTraceback")


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ("kill", r"worker 1 was killed by signal 9 \(SIGKILL\)"),
        ("leave", "worker 1 exited with code 0 before its work was done"),
        ("no more data", "worker 1: SystemExit: no more data"),
        ("refuse", "worker 1: .*RefusedError: 3"),
    ],
)
def test_a_worker_that_ends_otherwise_gives_an_error_that_names_it(how: str, told: str) -> None:
    with local_cluster(workers=2, servers=0, linger=0.0) as cluster, pytest.raises(ClusterError, match=told):
        cluster.run(fail, how)


@pytest.mark.usefixtures("forked_cluster")
@pytest.mark.parametrize("how", one_in(3, ["kill", "raise", "leave"]))
def test_a_run_of_a_range_of_workers_goes_on_without_one_that_fails(
    how: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with local_cluster(workers="2..3", linger=0.0) as cluster:
        assert cluster.num_workers == 3
        assert cluster.run(train_without_rank_1, how) == [(0, 2)] * 2
        assert [found[0] for found in cluster.run(place)] == ["0", "1", "2"]
    assert "the run goes on with 2 workers" in capsys.readouterr().err


@pytest.mark.usefixtures("forked_cluster")
def test_a_run_that_has_too_few_workers_left_fails_as_one_of_a_fixed_number() -> None:
    with local_cluster(workers="3..3", linger=0.0) as cluster, pytest.raises(KeyError, match="no such thing"):
        cluster.run(train_without_rank_1, "raise")


def test_a_result_that_cannot_be_packed_is_said_to_be_so(pair: LocalCluster) -> None:
    with pytest.raises(ClusterError, match=r"what the worker returned cannot be packed: .*lock"):
        pair.run(threading.Lock)


def test_a_server_that_ends_in_a_run_gives_an_error_that_names_it() -> None:
    with local_cluster(workers=1, linger=0.0) as cluster:
        assert cluster._group is not None
        server = cluster._group.children[0].process
        run = Call(lambda: cluster.run(signal.pause))
        assert eventually(cluster._running.locked)
        server.kill()
        outcome = run.outcome()
    assert type(outcome) is ClusterError
    assert "server 0 was killed by signal 9" in str(outcome)


def test_a_server_that_has_ended_between_two_runs_fails_the_next_and_another_takes_its_place() -> None:
    with local_cluster(workers=1, linger=0.0) as cluster:
        assert cluster._group is not None
        [server] = cluster._group.children
        server.process.kill()
        with pytest.raises(ClusterError, match="server 0 was killed by signal 9"):
            cluster.run(signal.pause)
        assert [found[2] for found in cluster.run(place)] == [*cluster.servers]


def test_closing_a_cluster_ends_the_run_of_another_thread(own_jobs: Jobs, tmp_path: Path) -> None:
    fifo = tmp_path / "the worker is up"
    os.mkfifo(fifo)
    cluster = local_cluster(workers=1, linger=0.0)
    run = Call(lambda: cluster.run(subprocess.call, ["sh", "-c", f"echo > '{fifo}'; exec sleep 3600"]))
    fifo.read_text()
    cluster.close()
    outcome = run.outcome()
    assert type(outcome) is ClusterError
    assert "server 0 exited with code 0 before its work was done" in str(outcome)
    assert own_jobs.alive() == []


def test_a_second_run_at_the_same_time_is_refused(tmp_path: Path) -> None:
    fifo = tmp_path / "go"
    os.mkfifo(fifo)
    with local_cluster(workers=1, servers=0) as cluster:
        first = Call(lambda: cluster.run(Path.read_text, fifo))
        assert eventually(cluster._running.locked)
        with pytest.raises(ConcurrentCallError):
            cluster.run(place)
        fifo.write_text("go")
        assert first.outcome() == ["go"]


def test_guardians_that_are_killed_in_a_run_are_replaced(own_jobs: Jobs, tmp_path: Path) -> None:
    fifo = tmp_path / "go"
    os.mkfifo(fifo)

    def guardians() -> set[int]:
        return set(own_jobs.pids("jobs/guardian.py"))

    with local_cluster(workers=1, servers=0) as cluster:
        run = Call(lambda: cluster.run(Path.read_text, fifo))
        assert eventually(lambda: len(guardians()) == 2), "one for the servers, one for the workers"
        killed = guardians()
        for one in killed:
            os.kill(one, signal.SIGKILL)
        assert eventually(lambda: len(guardians() - killed) == 2)
        fifo.write_text("go")
        assert run.outcome() == ["go"]
    assert eventually(lambda: own_jobs.alive() == [])


# Wrong use.


@pytest.mark.parametrize(
    "numbers",
    [
        {"workers": 0},
        {"workers": "two"},
        {"workers": "3..2"},
        {"workers": 1, "servers": -1},
        {"workers": "1..2", "servers": 0},
    ],
)
def test_a_number_of_processes_that_cannot_be_is_refused(numbers: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=r"workers|servers"):
        local_cluster(**numbers)


def test_what_cannot_be_called_or_packed_is_refused_before_a_process_is_started(pair: LocalCluster) -> None:
    with pytest.raises(ArgumentTypeError, match="'train'"):
        pair.run("train")  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="cannot be packed"):
        pair.run(print, threading.Lock())


def test_a_closed_cluster_runs_nothing(pair: LocalCluster) -> None:
    pair.close()
    with pytest.raises(ConfigurationError, match="closed"):
        pair.run(place)


def test_servers_that_cannot_start_or_are_late_leave_nothing_behind(
    own_jobs: Jobs, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ClusterError, match="server 0 exited with code 2 before it listened"):
        local_cluster(workers=1, server_args=["--no-such-flag"])
    assert "[s0] " in capsys.readouterr().err
    with pytest.raises(ConnectTimeoutError, match=r"server 0 did not listen in time"):
        local_cluster(workers=1, start_timeout=0.01)
    assert own_jobs.alive() == []


# Programs without a file, and their end.

MAIN = """
import subprocess, sys, kvtrainer
class OwnError(Exception):
    pass
def train(x):
    subprocess.Popen(["sleep", "3600"])
    if x:
        raise OwnError(x)
    print("up", flush=True)
    import signal
    signal.pause()
if __name__ == "__main__":
    assert "torch" not in sys.modules
    with kvtrainer.local_cluster(workers=2, servers=0, grace=300) as cluster:
        try:
            cluster.run(train, 5)
        except OwnError as error:
            print(repr(error), flush=True)
        cluster.run(train, 0)
"""
"""As typed into a REPL: no worker can import it. The first run raises the class that this program knows."""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_functions_of_a_program_without_a_file_run_and_nothing_outlives_it_however_it_ends(
    jobs: Jobs, number: signal.Signals
) -> None:
    pytest.importorskip("cloudpickle")
    with subprocess.Popen(
        [sys.executable, "-c", MAIN],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT), **jobs.variable},
    ) as program:
        assert program.stdout is not None
        lines = sorted([program.stdout.readline() for _ in range(3)])
        assert lines == [b"OwnError(5)\n", b"[w0] up\n", b"[w1] up\n"]
        program.send_signal(number)
        _, err = program.communicate(timeout=LIMIT)
    assert program.returncode == -number
    assert (b"KeyboardInterrupt" in err) == (number == signal.SIGINT)
    assert eventually(lambda: jobs.alive() == []), jobs.alive()


# What a call is on its way.


def test_what_was_begun_but_not_finished_counts_as_nothing() -> None:
    paper = ClusterMemFile()
    assert unpack_cluster_outcome(paper.read()) is None
    os.pwrite(paper.fd, b"begun", 0)
    assert paper.read() == b""
    paper.write(b"the whole")
    assert paper.read() == b"the whole"
    paper.close()


def test_a_result_of_a_class_that_only_workers_know_is_said_to_be_so() -> None:
    with pytest.raises(ClusterError, match="cannot be unpacked here"):
        unpack_cluster_outcome(b"cno_such_module\nThing\n.")


def test_several_readers_that_share_a_descriptor_all_get_the_whole() -> None:
    paper, data = ClusterMemFile(), bytes(range(256)) * 4096
    try:
        paper.write(data)
        readers = [Call(lambda: [paper.read() == data for _ in range(50)]) for _ in range(3)]
        assert [reader.outcome() for reader in readers] == [[True] * 50] * 3
    finally:
        paper.close()
