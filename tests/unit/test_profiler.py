"""The profiler of a store and of a Trainer: its settings, what it writes where, and what it refuses."""

from __future__ import annotations

import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvstore_server.protocol import messages as m
from kvstore_server.tracing import Trace
from kvtrainer import Trainer, kvstore, optimizer
from kvtrainer.client.profiler import Profiler
from kvtrainer.client.session import SessionOptions, SessionTrace
from kvtrainer.errors import ConfigurationError, KVStoreError, TraceFileError, WorkerLostError
from kvtrainer.kvstore import LocalKVStore
from tests.support.local_stores import full, local
from tests.support.scripted import Scripted


def written(path: Path) -> list[dict[str, Any]]:
    """The events of a trace file, without the names of processes and lanes."""
    return [event for event in json.loads(path.read_text())["traceEvents"] if event["ph"] == "X"]


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def running(folder: Path, *processes: str, **options: Any) -> LocalKVStore:
    """A store with key 3 whose profiler runs."""
    store = local([3])
    for process in processes:
        store.profiler.set_config(
            filename=str(folder / f"{process}.json"), profile_process=process, **options
        )
        store.profiler.set_state("run", profile_process=process)
    return store


def test_stop_writes_the_files_of_servers_and_workers_under_their_numbers(tmp_path: Path) -> None:
    store = running(tmp_path, "server", "worker")
    store.push(3, full(1.0))
    store.profiler.set_state("stop", "server")
    store.profiler.set_state("stop", "worker")
    assert files(tmp_path) == ["rank0_server.json", "rank0_worker.json"]
    names = [event["name"] for event in written(tmp_path / "rank0_server.json")]
    assert names[:2] == ["3", "Contribute"]
    [commit] = [e for e in written(tmp_path / "rank0_worker.json") if e["name"] == "Contribute"]
    assert (commit["args"]["bytes_out"], commit["args"]["server"]) == (4 * 16, 0)


def test_a_server_records_what_was_given_of_some_rows_with_its_bytes(tmp_path: Path) -> None:
    store = kvstore.create("local")
    store.init("rows", torch.zeros(100, 3))
    store.set_optimizer(optimizer.create("sgd", learning_rate=1.0))
    store.profiler.set_config(filename=str(tmp_path / "server.json"), profile_process="server")
    store.profiler.set_state("run", "server")
    ids = torch.tensor([[1, 5]])
    store.push("rows", torch.sparse_coo_tensor(ids, torch.ones(2, 3), (100, 3), check_invariants=True))
    store.profiler.set_state("stop", "server")
    [update] = [event for event in written(tmp_path / "rank0_server.json") if event["name"] == "rows"]
    assert update["args"]["bytes"] == 2 * 8 + 2 * 3 * 4  # two ids, and two rows of three floats


def test_a_worker_does_not_put_its_number_before_a_name_that_has_it(tmp_path: Path) -> None:
    store = local()
    store.profiler.set_config(filename=tmp_path / "rank0_mine.json")
    store.profiler.dump()
    assert files(tmp_path) == ["rank0_mine.json"]


def test_pause_and_resume_leave_out_what_is_between_them(tmp_path: Path) -> None:
    store = running(tmp_path, "server", "worker")
    for process in ("server", "worker"):
        store.profiler.pause(process)
    store.push(3, full(1.0))
    for process in ("server", "worker"):
        store.profiler.resume(process)
    store.pull(3, out=full(0.0))
    for process in ("server", "worker"):
        store.profiler.dump(profile_process=process)
        names = {event["name"] for event in written(tmp_path / f"rank0_{process}.json")}
        assert "Pull" in names
        assert "Contribute" not in names


def test_a_finished_dump_ends_recording_and_another_one_goes_on(tmp_path: Path) -> None:
    store = running(tmp_path, "worker", profile_api=False)
    counts = []
    for finished in (False, True, False):
        store.push(3, full(1.0))
        store.profiler.dump(finished)
        counts.append(len(written(tmp_path / "rank0_worker.json")))
    assert counts == [1, 2, 0]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"filenam": "x"}, "no option 'filenam'"),
        ({"filename": ""}, "filename must be the path of a file, got ''"),
        ({"filename": "/no such folder/x.json"}, "no folder /no such folder"),
        ({"profile_all": 1}, "profile_all must be True or False, got 1"),
        ({"dump_period": 0}, "dump_period, in seconds, must be a finite number above 0, got 0"),
        ({"dump_period": float("nan")}, "dump_period"),
        ({"gpu_memory_profile_filename_prefix": 1}, "must be a str"),
    ],
)
def test_improper_settings_are_refused_by_name(options: dict[str, Any], text: str, tmp_path: Path) -> None:
    profiler = local().profiler
    profiler.set_config(filename=tmp_path / "old.json")
    with pytest.raises(ConfigurationError, match=f"(?i)improper profiler config passed from worker.*{text}"):
        profiler.set_config(**options)
    profiler.dump()
    assert files(tmp_path) == ["rank0_old.json"]


@pytest.mark.parametrize("method", ["set_state", "pause", "resume", "dump", "set_config"])
def test_a_process_that_is_neither_worker_nor_server_is_refused(method: str) -> None:
    with pytest.raises(ConfigurationError, match=r"'worker'.*'server'.*'scheduler'"):
        getattr(local().profiler, method)(profile_process="scheduler")


def test_a_state_that_there_is_not_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"'run'.*'stop'.*'walk'"):
        local().profiler.set_state("walk")


def test_settings_of_mxnet_without_a_meaning_here_are_accepted(tmp_path: Path) -> None:
    profiler = local().profiler
    profiler.set_config(
        filename=tmp_path / "x.json", profile_symbolic=True, profile_memory=False, continuous_dump=True,
        aggregate_stats=False, dump_period=1.5, gpu_memory_profile_filename_prefix="gpu",
    )  # fmt: skip
    profiler.dump()
    assert files(tmp_path) == ["rank0_x.json"]


def test_a_file_that_cannot_be_written_is_named_and_leaves_nothing_behind(tmp_path: Path) -> None:
    store = local()
    store.profiler.set_config(filename=tmp_path / "x.json")
    (tmp_path / "rank0_x.json").mkdir()
    with pytest.raises(TraceFileError, match=r"rank0_x\.json") as caught:
        store.profiler.dump()
    assert isinstance(caught.value, IsADirectoryError)
    assert caught.value.filename == str(tmp_path / "rank0_x.json")
    assert files(tmp_path) == ["rank0_x.json"]


def test_only_rank_0_speaks_to_the_servers(tmp_path: Path) -> None:
    servers = Scripted(2)
    profiler = Profiler(_Client(servers, rank=1), time.monotonic)  # type: ignore[arg-type]
    profiler.set_config(filename=tmp_path / "x.json", profile_process="server")
    for state in ("run", "stop"):
        profiler.set_state(state, "server")
    profiler.dump(profile_process="server")
    assert not servers.sent
    assert not files(tmp_path)


class _Client:
    """What a profiler needs of a client, where nothing may be asked of servers."""

    def __init__(self, servers: Scripted, rank: int, error: KVStoreError | None = None) -> None:
        self.options = SessionOptions("job", rank, 2)
        self.num_servers = servers.num_servers
        self._error = error

    def wait_pending(self) -> None:
        if self._error is not None:
            raise self._error

    def trace_into(self, trace: Trace | None) -> None: ...


def test_stop_waits_for_pushes_and_is_done_although_one_of_them_failed(tmp_path: Path) -> None:
    client = _Client(Scripted(1), rank=1, error=WorkerLostError("rank 0 has left"))
    profiler = Profiler(client, time.monotonic)  # type: ignore[arg-type]
    profiler.set_config(filename=tmp_path / "x.json")
    with pytest.raises(WorkerLostError, match="rank 0"):
        profiler.set_state("stop")
    assert files(tmp_path) == ["rank1_x.json"]


def test_requests_last_from_their_sending_to_their_last_answer_in_lanes_of_their_own() -> None:
    servers = Scripted(2)
    session = servers.session()
    trace = Trace(servers.clock)
    session.trace = SessionTrace(trace)
    waiting = [SimpleNamespace(server=0)] * 3
    numbers = [session.next_number(lambda server, reply: waiting.pop()) for _ in range(2)]
    session.send(0, numbers[0], m.Stats())
    session.send(1, numbers[1], m.Gather(0, 1.0))
    servers.reply(0, numbers[0], m.Status(), after=3.0)
    servers.reply(1, numbers[1], m.Status(), after=1.0)
    servers.reply(1, numbers[1], m.Status(), after=2.0)
    assert session.wait(waiting, lambda one: None, servers.now, 60.0)
    for number in numbers:
        session.forget(number)
    seen = {event.name: event for event in trace.events}
    assert (seen["Stats"].start, seen["Stats"].duration, seen["Stats"].lane) == (100.0, 3.0, 1)
    assert (seen["Gather"].duration, seen["Gather"].lane, seen["Gather"].args["server"]) == (2.0, 2, 1)
    assert (seen["wait"].duration, seen["wait"].lane) == (3.0, 0)


def test_a_trainer_profiles_its_own_parameters(tmp_path: Path) -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    with Trainer([weight], "sgd", kvstore=kvstore.create("local")) as trainer:
        trainer.profiler.set_config(filename=tmp_path / "x.json", profile_process="server", profile_api=False)
        trainer.profiler.set_state("run", "server")
        for _ in range(2):
            weight.sum().backward()
            trainer.step(1)
        trainer.profiler.set_state("stop", "server")
    events = written(tmp_path / "rank0_x.json")
    # Round 0 gives the store its values, then there is one of each step.
    assert [(event["name"], event["args"]["round"]) for event in events] == [
        ("parameters", r) for r in range(3)
    ]


def test_a_trainer_without_a_store_says_that_there_is_nothing_to_profile() -> None:
    trainer = Trainer([torch.nn.Parameter(torch.ones(3))], "sgd", kvstore=None)
    with pytest.raises(ConfigurationError, match=r"torch\.profiler"):
        _ = trainer.profiler
    trainer.close()
    with pytest.raises(KVStoreError, match="closed"):
        _ = trainer.profiler
