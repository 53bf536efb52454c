"""Jobs whose workers and servers share memory: equal results, nothing left behind, and the way without it."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import kvtrainer
from kvtrainer.client import connection
from kvtrainer.errors import ConfigurationError, ServerStoppingError, WorkerLostError
from kvtrainer.kvstore import DistKVStore
from tests.support.limits import FOREVER
from tests.support.processes import Members, Process, Processes, eventually, new_name, round_of, together
from tests.support.stores import Servers

SIZES = (3, 1000, 3_000_000)
"""The last one needs more memory than a channel has at first, on either of two servers."""
WAY = "auto"
"""Messages go as they go by themselves; a test may choose another way."""


def trained(servers: Sequence[Process], steps: int = 3) -> list[torch.Tensor]:
    """The weights after some steps of two workers, by which both were given the same."""

    def train(kv: DistKVStore, rank: int) -> list[torch.Tensor]:
        draw = torch.Generator().manual_seed(rank)
        params = [torch.nn.Parameter(torch.ones(size)) for size in SIZES]
        trainer = kvtrainer.Trainer(params, "adam", {"learning_rate": 0.1}, kvstore=kv)
        for _ in range(steps):
            for param in params:
                param.grad = torch.randn(param.shape, generator=draw)
            trainer.step(2)
        return [param.detach().clone() for param in params]

    with Members() as members:
        pair = members.pair(servers)
        first, second = together(*(lambda kv=kv, r=r: train(kv, r) for r, kv in enumerate(pair)))
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b)
    return list(first)


def channels_of(store: DistKVStore) -> Any:
    """The channels of a store's own client, by server."""
    transport: Any = store._client._session.transport
    return transport._channels


def test_weights_are_the_same_to_the_bit_with_and_without_shared_memory(
    jobs: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    servers = jobs.of(2)
    found = {}
    for transport in ("shm", "tcp"):
        monkeypatch.setenv("KVSTORE_TRANSPORT", transport)
        found[transport] = trained(servers)
    assert all(map(torch.equal, found["shm"], found["tcp"]))


def test_a_long_gradient_may_be_part_of_a_graph_and_stays_as_it_is(jobs: Servers, members: Members) -> None:
    store = members.join(jobs.of(1), 0, 1, new_name())
    param = torch.nn.Parameter(torch.ones(17_000 * 16))  # alone in its slices, of which the last one is short
    trainer = kvtrainer.Trainer([param], "sgd", {"learning_rate": 0.5}, kvstore=store)
    (param.grad,) = torch.autograd.grad((param**2).sum(), [param], create_graph=True)
    trainer.step(1)
    assert (set(param.grad.tolist()), set(param.tolist())) == ({2.0}, {0.0})


def test_a_long_gradient_of_another_type_counts_with_its_values(jobs: Servers, members: Members) -> None:
    store = members.join(jobs.of(1), 0, 1, new_name())
    param = torch.nn.Parameter(torch.ones(17_000 * 16))
    param.grad_dtype = None
    trainer = kvtrainer.Trainer([param], "sgd", {"learning_rate": 0.5}, kvstore=store)
    param.grad = torch.full(param.shape, 2.0, dtype=torch.float64)
    trainer.step(1)
    assert set(param.tolist()) == {0.0}


def test_a_worker_shares_memory_by_itself_with_the_servers_of_its_host(
    jobs: Servers, members: Members, caplog: pytest.LogCaptureFixture
) -> None:
    store = members.join(jobs.of(2), 0, 1, new_name())
    assert sorted(channels_of(store)) == [0, 1]
    assert not caplog.records


def test_a_worker_that_leaves_unread_answers_behind_is_heard_to_leave(processes: Processes) -> None:
    """Its server wrote to a channel that had ended, gave it up, and with it the word that the worker leaves."""
    [server] = processes.servers(1)
    with Members() as members:
        pair = members.pair([server])
        together(*(lambda kv=kv: kv.init("a", torch.zeros(3)) for kv in pair))
        pair[1].push("a", torch.ones(3))
        pair[1]._client.stats()  # the server has read the push
        server.freeze()
        pair[0].push("a", torch.ones(3))
        pair[0]._client.close(ValueError("enough"))
        server.signal(signal.SIGCONT)
        with pytest.raises(WorkerLostError, match="enough"):
            pair[1].pushpull("a", torch.ones(3))


def test_a_job_goes_on_over_tcp_when_its_channel_breaks(
    jobs: Servers, members: Members, caplog: pytest.LogCaptureFixture
) -> None:
    pair = members.pair(jobs.of(2))
    together(*(lambda s=s: s.init("w", torch.zeros(1_000_000)) for s in pair))
    for at in range(4):
        if at == 2:
            channels_of(pair[0])[1]._end.shutdown(socket.SHUT_RDWR)
        outs = together(*(lambda s=s: round_of(s, "w", torch.ones(1_000_000)) for s in pair))
        assert [set(out.tolist()) for out in outs] == [{2.0}] * 2
    assert (len(channels_of(pair[0])), len(channels_of(pair[1]))) == (1, 2)
    assert [record.levelno for record in caplog.records] == [logging.WARNING]


def test_of_a_server_that_was_stopped_workers_do_not_say_that_they_go_on_over_tcp(
    processes: Processes, members: Members, caplog: pytest.LogCaptureFixture
) -> None:
    servers = processes.servers(2)
    store = members.join(servers, 0, 1, new_name())
    store.init("w", torch.zeros(1_000_000))
    servers[1].signal(signal.SIGTERM)
    assert servers[1].end()[0] == 0
    with pytest.raises(ServerStoppingError):
        round_of(store, "w", torch.ones(1_000_000))
    store._client._session.transport.receive(0.0)
    assert (sorted(channels_of(store)), caplog.records) == ([0], [])


POOR = """
import sys
from kvstore_server import cli, server
server.available_memory = lambda: 0
sys.exit(cli.main())
"""


@pytest.fixture
def poor(processes: Processes) -> Process:
    """A server without memory to spare."""
    return processes.start([sys.executable, "-c", POOR, "--num-servers", "1", "--index", "0"])


def test_a_server_without_memory_to_spare_serves_all_the_same(
    processes: Processes, poor: Process, members: Members, caplog: pytest.LogCaptureFixture
) -> None:
    assert all(map(torch.equal, trained(processes.servers(1)), trained([poor])))
    assert any("no memory" in record.getMessage() for record in caplog.records)
    table = torch.nn.Embedding(50_000, 64, sparse=True)
    trainer = kvtrainer.Trainer(
        table.parameters(), "sgd", {"learning_rate": 0.5}, kvstore=members.join([poor], 0, 1, new_name())
    )
    before = table.weight.detach().clone()
    for _ in range(4):
        table(torch.arange(50_000)).sum().backward()
        trainer.step(1)
    torch.testing.assert_close(table.weight.detach(), before - 2.0)


def test_weights_are_shared_with_a_line_where_less_memory_is_available_than_they_need(
    processes: Processes, members: Members
) -> None:
    """Copies of workers would need still more."""
    command = POOR.replace("lambda: 0", "lambda: 10 << 20")
    server = processes.start([sys.executable, "-c", command, "--num-servers", "1", "--index", "0"])
    params = [torch.nn.Parameter(torch.ones(3_000_000))]
    store = members.join([server], 0, 1, new_name())
    trainer = kvtrainer.Trainer(params, "sgd", {"learning_rate": 0.5}, kvstore=store)
    params[0].grad = torch.ones(3_000_000)
    trainer.step(1)
    assert set(params[0].tolist()) == {0.5}
    link: Any = trainer._pipeline.binding
    [rest] = link.holder.sink.unwatched().values()
    assert sum([end - begin for begin, end in rest]) < 1_000_000  # of 12 MB
    store.close()
    server.signal(signal.SIGTERM)
    assert "where 10485760 are available now" in server.end()[1]


def test_what_has_no_room_goes_over_tcp_with_a_line_although_shared_memory_was_asked_for(
    poor: Process, members: Members, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An error in the middle of a round would leave workers with different weights."""
    monkeypatch.setenv("KVSTORE_TRANSPORT", "shm")
    store = members.join([poor], 0, 1, new_name())
    store.init("w", torch.ones(3_000_000))
    assert "has no memory to share" in caplog.text
    found = torch.empty(3_000_000)
    store.pull("w", found)
    assert (found == 1).all()


def test_workers_read_the_weights_of_a_server_where_they_lie_until_the_job_ends(processes: Processes) -> None:
    [server] = processes.servers(1)
    mapped = [Path(f"/proc/{process}/maps") for process in (server.pid, "self")]
    trained([server])
    assert eventually(lambda: "memfd:kvstore-weights" not in mapped[0].read_text())
    with Members() as members:
        pair = members.pair([server])
        together(*(lambda kv=kv: kv.init("w", torch.zeros(3_000_000)) for kv in pair))
        outs = together(*(lambda kv=kv: round_of(kv, "w", torch.ones(3_000_000)) for kv in pair))
        assert [set(out.tolist()) for out in outs] == [{2.0}] * 2
        assert all("memfd:kvstore-weights" in maps.read_text() for maps in mapped)
    assert eventually(lambda: "memfd:kvstore-weights" not in mapped[0].read_text())


BUSY_LOADER = f"""
FOREVER = {FOREVER}
import time
from torch.utils.data import DataLoader, Dataset

class Slow(Dataset):
    def __len__(self):
        return 100
    def __getitem__(self, at):
        time.sleep(FOREVER if at > 3 else 0)
        return at

kv.init('w', torch.zeros(3_000_000))
loader = iter(DataLoader(Slow(), num_workers=2, prefetch_factor=2, multiprocessing_context='fork'))
next(loader)
at(' '.join(str(worker.pid) for worker in loader._workers))
"""
"""A worker that was forked twice while it shared memory. Of its children the one that makes an example does not notice
that it is gone."""


def is_alive(process: int) -> bool:
    """Tell whether a process runs; one that has ended and that nobody has asked about does not."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_the_memory_of_a_killed_worker_is_given_back_while_its_loaders_live_on(processes: Processes) -> None:
    [server] = processes.servers(1)
    mapped = Path(f"/proc/{server.pid}/maps")
    worker = processes.worker(BUSY_LOADER, [server], 0, 1, new_name())
    loaders = [int(pid) for pid in worker.line().split()]
    try:
        assert mapped.read_text().count("memfd:kvstore (") >= 2
        worker.signal(signal.SIGKILL)
        assert eventually(lambda: mapped.read_text().count("memfd:kvstore (") == 0)
        assert any(map(is_alive, loaders))
    finally:
        for pid in loaders:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


UNTRACEABLE = """
import ctypes
PR_SET_DUMPABLE = 4
assert ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0) == 0
weight = torch.nn.Parameter(torch.ones(600_000))
trainer = kvtrainer.Trainer([weight], 'sgd', {'learning_rate': 0.25}, kvstore=kv)
for _ in range(3):
    weight.grad = torch.ones(600_000)
    trainer.step(1)
at(set(weight.tolist()))
"""


def test_a_process_that_nobody_may_trace_trains_as_others_do(processes: Processes) -> None:
    worker = processes.worker(UNTRACEABLE, processes.servers(2), 0, 1, new_name())
    assert worker.line() == "{0.25}"


@pytest.mark.parametrize(("transport", "is_refused"), [("auto", False), ("shm", True)])
def test_a_worker_that_cannot_share_memory_says_why(
    processes: Processes,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    transport: str,
    is_refused: bool,
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError("another user")

    monkeypatch.setattr(connection, "connect_channel", refuse)
    monkeypatch.setenv("KVSTORE_TRANSPORT", transport)
    servers = processes.servers(1)
    with Members() as members:
        if is_refused:
            with pytest.raises(ConfigurationError, match="another user"):
                members.join(servers, 0, 1, new_name())
        else:
            store = members.join(servers, 0, 1, new_name())
            store.init("w", torch.ones(3))
            assert channels_of(store) == {}
            assert ["another user" in record.getMessage() for record in caplog.records] == [True]


def test_the_memory_of_a_worker_that_was_killed_is_given_back(processes: Processes) -> None:
    [server] = processes.servers(1)
    mapped = Path(f"/proc/{server.pid}/maps")
    assert mapped.read_text().count("memfd:kvstore (") == 0
    worker = processes.worker(
        "kv.init('w', torch.zeros(3_000_000))\nat('ready')\n", [server], 0, 1, new_name()
    )
    assert worker.line() == "ready"
    assert mapped.read_text().count("memfd:kvstore (") >= 2
    worker.signal(signal.SIGKILL)
    assert eventually(lambda: mapped.read_text().count("memfd:kvstore (") == 0)
