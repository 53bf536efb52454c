"""What a job may ask of its real servers: commands, profiles, counters of bytes, and who of it is dead."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from kvtrainer.kvstore import DistKVStore
from tests.support.processes import FORGETFUL, Members, Processes, eventually, new_name, together
from tests.support.stores import Servers, servers

SHAPE = (1200, 1200)
NBYTES = 4 * 1200 * 1200


@pytest.fixture(scope="module")
def jobs() -> Iterator[Servers]:
    with servers("--import", "tests.support.server_commands") as started:
        yield started


def test_every_server_runs_each_command_of_each_worker_once(jobs: Servers) -> None:
    def body(kv: DistKVStore, rank: int) -> list[str]:
        answers = [kv.send_command_to_servers(7, f"{rank}.{i}") for i in range(5)]
        kv.barrier()
        return [*answers[-1], *(kv.send_command_to_servers(7, "last") if rank == 0 else [])]

    first, *others = jobs.results(3, 2, body)
    # Three workers sent five each before the last one.
    assert first[2:] == ["0/2 16", "1/2 16"]
    assert all(other[0].startswith("0/2 ") and other[1].startswith("1/2 ") for other in others)


def _profiled_job(kv: DistKVStore, folder: Path) -> list[float]:
    """What MXNet's own test of server profiling does, with its names of files."""
    rank = kv.rank
    kv.profiler.set_config(
        filename=folder / "test_profile_server.json", profile_all=True, profile_process="server"
    )
    worker_file = folder / f"rank{rank}_test_profile_worker.json"
    kv.profiler.set_config(filename=worker_file, profile_all=True, profile_process="worker")
    kv.profiler.set_state(state="run", profile_process="server")
    kv.profiler.set_state(state="run", profile_process="worker")
    kv.init("99", torch.ones(SHAPE))
    out = torch.zeros(SHAPE)
    for _ in range(10):
        kv.push("99", torch.ones(SHAPE) * (rank + 1))
        kv.pull("99", out=out)
    kv.profiler.set_state(state="stop", profile_process="server")
    kv.profiler.set_state(state="stop", profile_process="worker")
    return out.unique().tolist()


def _events(path: Path) -> list[dict[str, Any]]:
    """The events of a trace after checking that each has what the format asks for."""
    events = [event for event in json.loads(path.read_text())["traceEvents"] if event["ph"] != "M"]
    for event in events:
        assert event["ph"] == "X"
        assert event["ts"] > 0
        assert event["dur"] >= 0
        assert {"name", "cat", "pid", "tid", "args"} <= event.keys()
    return events


@pytest.mark.usefixtures("sent_once")
def test_profiles_of_all_servers_and_workers_are_written_and_hold_every_round(
    jobs: Servers, tmp_path: Path
) -> None:
    # Without an optimizer the sum replaces the value: 1 + 2 + 3.
    assert jobs.results(3, 2, lambda kv, rank: _profiled_job(kv, tmp_path)) == [[6.0]] * 3
    names = [f"rank{r}_test_profile_worker.json" for r in range(3)]
    names += [f"rank{r}_test_profile_server.json" for r in range(2)]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(names)
    rounds = [
        event
        for index in range(2)
        for event in _events(tmp_path / f"rank{index}_test_profile_server.json")
        if event["cat"] == "rounds"
    ]
    # One key is a table, of which each server has a part. Rank 0 alone may have begun before the others came.
    assert {event["name"] for event in rounds} == {"99"}
    last = [event for event in rounds if event["args"]["round"] in range(1, 11)]
    assert len(last) == 20
    assert sum(event["args"]["bytes"] for event in last) == 10 * 3 * NBYTES
    for rank in range(3):
        events = _events(tmp_path / f"rank{rank}_test_profile_worker.json")
        commits = [event for event in events if event["name"] == "Contribute"]
        assert sum(event["args"]["bytes_out"] for event in commits) == (10 + (rank == 0)) * NBYTES
        pulls = [event for event in events if event["name"] == "Pull"]
        assert sum(event["args"]["bytes_in"] for event in pulls) == 10 * NBYTES


def test_profiles_of_servers_count_the_bytes_that_compressed_gradients_have(
    jobs: Servers, tmp_path: Path
) -> None:
    def body(kv: DistKVStore, rank: int) -> None:
        kv.set_gradient_compression({"type": "2bit", "threshold": 0.5})
        kv.init("w", torch.zeros(1000))
        kv.profiler.set_config(filename=tmp_path / "x.json", profile_process="server")
        kv.profiler.set_state("run", "server")
        kv.barrier()
        kv.push("w", torch.ones(1000))
        kv.barrier()
        kv.profiler.set_state("stop", "server")

    jobs.results(2, 1, body)
    [update] = [event for event in _events(tmp_path / "rank0_x.json") if event["name"] == "w"]
    assert update["args"]["bytes"] == 2 * 1000 * 2 // 8  # two ranks, two bits for each number


def test_rank_0_alone_can_profile_the_servers_and_waits_for_nobody(jobs: Servers, tmp_path: Path) -> None:
    with Members() as members:
        kv = members.join(jobs.of(2), 0, 2, new_name())  # rank 1 never comes
        kv.profiler.set_config(filename=tmp_path / "x.json", profile_process="server")
        kv.profiler.set_state("run", "server")
        kv.server_stats()
        kv.profiler.dump(profile_process="server")
    assert _events(tmp_path / "rank1_x.json")[0]["name"] == "Stats"


@pytest.mark.usefixtures("sent_once")
def test_counters_say_how_many_bytes_of_each_table_came_and_went(jobs: Servers) -> None:
    def body(kv: DistKVStore, rank: int) -> list[dict[str, Any]]:
        kv.init("w", torch.zeros(SHAPE))
        out = torch.empty(SHAPE)
        for _ in range(3):
            kv.push("w", torch.ones(SHAPE))
        kv.pull("w", out=out)
        kv.barrier()
        return kv.server_stats() if rank == 0 else []

    stats = jobs.results(2, 2, body)[0]
    tables = [table for server in stats for table in server["tables"]]
    # Rank 0's first values, then three pushes of two workers; each worker pulled once.
    assert sum(table["bytes_in"] for table in tables) == (1 + 3 * 2) * NBYTES
    assert sum(table["bytes_out"] for table in tables) == 2 * NBYTES
    assert all(server["messages_in"] > 0 for server in stats)


STAYS = 'kv.init("w", torch.zeros(3)); at("ready")\n'


def test_a_killed_worker_is_counted_as_dead_by_all_others_and_one_that_closed_is_not() -> None:
    with Processes() as processes, Members() as members:
        started = processes.servers(2, *FORGETFUL)
        name = new_name()
        worker = processes.worker(STAYS, started, 1, 3, name)
        first, last = members.join(started, 0, 3, name), members.join(started, 2, 3, name)
        together(*(lambda s=s: s.init("w", torch.zeros(3)) for s in (first, last)))
        assert worker.line() == "ready"
        assert [store.num_dead_nodes() for store in (first, last)] == [0, 0]
        worker.signal(signal.SIGKILL)
        assert eventually(lambda: first.num_dead_nodes() == 1)
        assert [last.num_dead_nodes(4), last.num_dead_nodes(2), last.num_dead_nodes(6)] == [1, 0, 1]
        last.close()
        assert first.num_dead_nodes() == 1
