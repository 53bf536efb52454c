"""Tables whose rows are in files on a disk of the servers (`--spill-dir`): larger than memory, with the same bits."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import kvtrainer
from kvtrainer.errors import OptimizerError
from tests.integration.test_hash_tables import Worker
from tests.support.limits import LIMIT
from tests.support.processes import Members, Process, Processes, eventually, new_name, raised, together
from tests.support.supervising import supervising

SMALL = str(32 << 20)
"""Bytes of memory for servers whose tables are larger."""


def train_and_load(servers: Sequence[Process], members: Members, states: Path) -> list[Any]:
    """What workers have at three moments of a job that saves and loads a table whose rows expire and are evicted."""
    name = new_name()

    def one(rank: int) -> tuple[list[Tensor], int]:
        worker = Worker(members.join(servers, rank, 2, name), rank, 2, expire_after=2)
        with worker.trainer:
            found = [worker.train(0, 9)]
            if rank == 0:
                worker.trainer.save_states(states)
            found.append(worker.train(9, 14))
            worker.trainer.load_states(states)
            found.append(worker.train(9, 14))
            return found, worker.bags.stats()["evicted"] * worker.table.stats()["evicted"]

    return together(lambda: one(0), lambda: one(1))


def test_a_job_has_the_same_bits_whether_rows_are_in_files_or_in_memory(
    processes: Processes, members: Members, tmp_path: Path
) -> None:
    folder = tmp_path / "rows"
    folder.mkdir()
    plain = train_and_load(processes.servers(2), members, tmp_path / "plain")
    spilled = train_and_load(processes.servers(2, "--spill-dir", str(folder)), members, tmp_path / "spilled")
    for (found, evicted), (expected, _) in zip(spilled, plain, strict=True):
        assert evicted > 0
        assert all(map(torch.equal, found, expected))
    assert os.listdir(folder) == []
    # A process without servers loads what the servers have saved from files.
    for states in ("plain", "spilled"):
        worker = Worker("local", expire_after=2)
        with worker.trainer:
            worker.trainer.load_states(tmp_path / states)
            worker.table.export(tmp_path / f"{states}.safetensors")
    first, second = (kvtrainer.RowFile(tmp_path / f"{states}.safetensors") for states in ("plain", "spilled"))
    assert torch.equal(first.ids, second.ids)
    assert torch.equal(first.weights, second.weights)


class OneTable:
    """A worker whose gradient is -1 for each element of the rows that it updates, which begin with zeros."""

    def __init__(self, store: Any, optimizer: str = "sgd") -> None:
        self.table = kvtrainer.Embedding(1000, init="constant", scale=0.0)
        options = {"learning_rate": 1.0}
        self.trainer = kvtrainer.Trainer([("t", self.table.weight)], optimizer, options, kvstore=store)

    def step(self, first: int, last: int, at_once: int = 500) -> None:
        for begin in range(first, last, at_once):
            self.table.weight.grad = None
            (-self.table(torch.arange(begin, min(begin + at_once, last)))).sum().backward()
            self.trainer.step(1)

    def rows(self, first: int, last: int) -> Tensor:
        return self.table(torch.arange(first, last)).detach()


def test_a_table_that_is_larger_than_the_memory_of_its_server_is_trained(
    processes: Processes, members: Members, tmp_path: Path
) -> None:
    [server] = processes.servers(1, "--max-memory", SMALL, "--spill-dir", str(tmp_path))
    worker = OneTable(members.join([server], 0, 1, new_name()))
    with worker.trainer:
        for _ in range(2):
            worker.step(0, 40_000)  # 160 MB
        for begin in range(0, 40_000, 5000):
            assert bool((worker.rows(begin, begin + 5000) == 2).all())
        assert worker.table.stats()["nbytes"] > 4 * int(SMALL)


def test_the_same_table_is_refused_where_rows_are_in_memory(processes: Processes, members: Members) -> None:
    worker = OneTable(members.join(processes.servers(1, "--max-memory", SMALL), 0, 1, new_name()))
    with worker.trainer, pytest.raises(OptimizerError, match="--max-memory"):
        worker.step(0, 40_000)


def test_rows_in_files_take_no_memory_that_the_system_cannot_take_back(
    processes: Processes, members: Members, tmp_path: Path
) -> None:
    grown = []
    for flags in (["--spill-dir", str(tmp_path)], []):
        [server] = processes.servers(1, *flags)
        worker = OneTable(members.join([server], 0, 1, new_name()))
        with worker.trainer:
            worker.step(0, 5000)
            before = anonymous_memory_of(server)
            worker.step(5000, 45_000)  # 160 MB
            grown.append(anonymous_memory_of(server) - before)
    assert grown[0] < 80 << 20 < 150 << 20 < grown[1]


def anonymous_memory_of(process: Process) -> int:
    """Bytes that have no file behind them, and can only stay in memory without swap."""
    lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
    return 1024 * int(next(line.split()[1] for line in lines if line.startswith("RssAnon:")))


ON_SMALL_DISK = (
    "mount -t tmpfs -o size=24m none {0} && exec {1} -m kvstore_server --num-servers 1 --spill-dir {0}"
)


def can_mount() -> bool:
    try:
        done = subprocess.run(
            ["unshare", "-rm", "mount", "-t", "tmpfs", "none", "/mnt"], capture_output=True, check=False
        )
    except OSError:
        return False
    return done.returncode == 0


@pytest.mark.skipif(not can_mount(), reason="this user may not mount a small file system")
def test_a_disk_that_is_full_is_an_error_on_every_worker_and_the_job_goes_on(
    processes: Processes, members: Members, tmp_path: Path
) -> None:
    script = ON_SMALL_DISK.format(shlex.quote(str(tmp_path)), shlex.quote(sys.executable))
    server = processes.start(["unshare", "-rm", "sh", "-c", script])
    assert server.address
    name = new_name()
    workers = [OneTable(members.join([server], rank, 2, name), "adagrad") for rank in range(2)]
    with workers[0].trainer, workers[1].trainer:
        both(workers, 0, 2000)  # 16 MB with the optimizer's state
        before = workers[0].rows(0, 6000)
        texts = raised(both(workers, 2000, 6000, 4000), OptimizerError)
        assert all([f"{tmp_path} (--spill-dir)" in text for text in texts])
        assert all([torch.equal(worker.rows(0, 6000), before) for worker in workers])
        # Rows that are there, and some new ones, are trained. Adagrad's steps: 2 / sqrt(4), and then 2 / sqrt(8).
        assert both(workers, 0, 2500) == [None, None]
        for worker in workers:
            rows = worker.rows(0, 6000)
            assert torch.allclose(rows[:2000], torch.tensor(1 + 0.5**0.5))
            assert torch.allclose(rows[2000:2500], torch.tensor(1.0))
            assert bool((rows[2500:] == 0).all())
        assert workers[0].table.stats()["rows"] == 2500


def both(workers: Sequence[OneTable], first: int, last: int, at_once: int = 500) -> list[Any]:
    return together(*(lambda worker=worker: worker.step(first, last, at_once) for worker in workers))


def test_a_killed_server_goes_on_with_the_rows_on_its_disk(members: Members, tmp_path: Path) -> None:
    def train(address: str, name: str, kill: Any) -> list[Tensor]:
        worker = Worker(members.join([address], 0, 1, name))
        with worker.trainer:
            found = []
            for first in (0, 4, 8):
                found.append(worker.train(first, first + 4))
                kill()
            return [*found, worker.weights()]

    with supervising() as supervisor:
        on_disk: list[int] = []
        started = [supervisor.start("--spill-dir", str(tmp_path))]

        def kill() -> None:
            server, address = started[-1]
            on_disk.append([os.fstat(fd).st_dev for _, fd in supervisor.kept].count(os.stat(tmp_path).st_dev))
            server.kill()
            server.wait(LIMIT)
            assert os.listdir(tmp_path) == []
            # Another process of this machine may have the port for a moment.
            for _ in range(5):
                started.append(supervisor.start("--spill-dir", str(tmp_path)))
                again, there = started[-1]
                if there:
                    break
                again.wait(LIMIT)
                assert "in use" in supervisor.said(), supervisor.said()
            assert there == address

        try:
            found = train(started[0][1], new_name(), kill)
        finally:
            server, _ = started[-1]
            server.terminate()
            server.wait(LIMIT)
        # Weights of two tables, one and three arrays of their state, the decay of one, and what protects each of them.
        assert on_disk == [2 * (2 + 1 + 3 + 1)] * 3
        assert eventually(lambda: supervisor.names == [])
    with Processes() as processes:
        [server] = processes.servers(1)
        expected = train(server.address, new_name(), lambda: None)
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("name", ["missing", "file"])
def test_a_server_does_not_start_with_a_directory_that_it_cannot_use(
    name: str, processes: Processes, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    command = [sys.executable, "-m", "kvstore_server", "--spill-dir", str(tmp_path / name)]
    code, said = processes.start(command).end()
    assert code == 1
    assert "--spill-dir" in said
    assert name in said


@pytest.mark.usefixtures("forked_cluster")
def test_servers_of_a_cluster_take_the_directory_from_their_flags_or_from_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVSTORE_SPREAD_FROM", "1")
    files = []
    for server_args in (["--spill-dir", str(tmp_path)], []):
        if not server_args:
            monkeypatch.setenv("KVSTORE_SPILL_DIR", str(tmp_path))
        with kvtrainer.local_cluster(workers=1, servers=2, server_args=server_args) as cluster:
            files += cluster.run(mapped_files_while_training, str(tmp_path))
    assert files == [2 * 2, 2 * 2]  # weights and the optimizer's state on each server
    assert os.listdir(tmp_path) == []


def mapped_files_while_training(folder: str) -> int:
    """How many files in a directory processes have mapped while there is a table with one array of state."""
    table = kvtrainer.Embedding(4)
    options = {"learning_rate": 0.1}
    with kvtrainer.Trainer([("t", table.weight)], "adagrad", options, kvstore="dist_sync") as trainer:
        table(torch.arange(100)).sum().backward()
        trainer.step(1)
        found = 0
        for maps in Path("/proc").glob("[0-9]*/maps"):
            with suppress(OSError):
                found += maps.read_text().count(folder)
        return found
