"""Memory does not grow with the number of messages, of jobs, or of processes that stood for a rank."""

from __future__ import annotations

import os
import sys
import time
from collections import Counter
from collections.abc import Sequence

import pytest
import torch

import kvtrainer
from kvstore_server.engine import membership
from kvstore_server.engine.engine import Engine
from kvstore_server.engine.namespace import EngineConfig
from kvstore_server.engine.rounds import ASYNC, SSP, SYNCHRONOUS, Mode
from kvtrainer.client.client import Client
from kvtrainer.client.session import SessionOptions
from kvtrainer.kvstore.verbs import KVStoreVerbs
from tests.support.limits import LIMIT
from tests.support.processes import WORKER, Members, Processes, new_name
from tests.support.reachable import reachable, resident_bytes
from tests.support.switchboard import Line

MODES = [SYNCHRONOUS, Mode(ASYNC), Mode(ASYNC, slow_down=True), Mode(SSP, 1)]
SMALL = torch.ones(3)
MEBIBYTE = 1 << 20
FRAMES = """
import resource, sys, threading, torch
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
def rounds(number):
    for _ in range(number):
        frames = [torch.ones(1 << 20, dtype=torch.uint8) for _ in range(100)]
        del frames
def look():
    rounds(3)
    before = faults()
    rounds(5)
    print(faults() - before, flush=True)
def count():
    thread = threading.Thread(target=look)  # as that of ZeroMQ, which makes the frames
    thread.start()
    thread.join()
"""
"""Python that prints the page faults of five rounds of a hundred frames of 1 MiB."""
SERVER = """
from kvstore_server.cli import main
def announce(server):
    count()
    server.request_stop()
sys.exit(main(["--num-servers", "1", "--bind", "tcp://127.0.0.1:0"], announce))
"""


def new_engines() -> list[Engine]:
    return [Engine(EngineConfig(server=server, num_servers=2, run_id=1)) for server in range(2)]


def joined(
    engines: Sequence[Engine], lines: dict[bytes, Line], mode: Mode, rank: int, name: bytes
) -> KVStoreVerbs:
    """A worker of a job of two, which has named its optimizer and not yet made its key."""
    options = SessionOptions("job", rank, 2, timeout=LIMIT, mode=mode)
    client = Client(Line(engines, lines, name), options, time.monotonic)
    client.connect()
    kv = KVStoreVerbs("in a test", client)
    kv.set_optimizer(kvtrainer.optimizer.create("sgd", learning_rate=0.1, momentum=0.9))
    return kv


def job(engines: Sequence[Engine], lines: dict[bytes, Line], mode: Mode) -> list[KVStoreVerbs]:
    """Both workers of a job, with a key "w"."""
    stores = [joined(engines, lines, mode, rank, b"worker %d" % rank) for rank in range(2)]
    # In one thread neither can wait for the other's first values: the second one's end the round of both.
    waiting = stores[0]._client.rounds.wait
    stores[0]._client.rounds.wait = lambda ticket: None  # type: ignore[method-assign]
    stores[0].init("w", torch.zeros(3))
    stores[0]._client.rounds.wait = waiting  # type: ignore[method-assign]
    stores[1].init("w", torch.zeros(3))
    return stores


def push_often(stores: Sequence[KVStoreVerbs], count: int) -> None:
    """So many pushes of every worker, some of them read back."""
    out = torch.empty(3)
    for at in range(count):
        for kv in stores:
            kv.push("w", SMALL)
        if at % 7 == 0:
            for kv in stores:
                kv.pull("w", out)
        if at % 50 == 0:
            stores[0].server_stats()


@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize(
    "count", [100, pytest.param(500_000, marks=[pytest.mark.full, pytest.mark.timeout(1800)])]
)
def test_pushes_leave_nothing_behind_on_workers_or_servers(mode: Mode, count: int) -> None:
    engines, lines = new_engines(), dict[bytes, Line]()
    stores = job(engines, lines, mode)
    push_often(stores, 200)
    before = reachable(engines, stores, lines)
    push_often(stores, count)
    push_often(stores, 200)  # so that both looks come at the same point of a turn
    assert grown(before, reachable(engines, stores, lines)) == {}


def grown(before: Counter[str], after: Counter[str]) -> dict[str, int]:
    """By how much there is more of anything."""
    return {kind: n - before[kind] for kind, n in after.items() if n > before[kind]}


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_jobs_that_come_and_go_leave_nothing_behind_but_the_names_of_a_thousand(
    mode: Mode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(membership, "_ENDED_KEPT", 6)
    engines = new_engines()

    def come_and_go(times: int) -> None:
        for _ in range(times):
            stores = job(engines, {}, mode)
            push_often(stores, 2)
            for kv in stores:
                kv._client.wait_pending()
            for kv in stores:
                kv.close()

    come_and_go(3)
    before = reachable(engines)
    come_and_go(50)
    assert grown(before, reachable(engines)) == {}


@pytest.mark.parametrize("type", ["dist_sync", "dist_async"])
@pytest.mark.parametrize(
    ("first", "second"),
    [
        pytest.param(2_000, 8_000),
        pytest.param(100_000, 1_000_000, marks=[pytest.mark.full, pytest.mark.timeout(1800)]),
    ],
)
def test_a_servers_process_does_not_grow_with_the_pushes(
    processes: Processes, type: str, first: int, second: int
) -> None:
    keys = [str(number) for number in range(100)]
    [server] = processes.servers(1)
    with Members() as members:
        kv = members.join([server], 0, 1, new_name(), type=type)
        kv.set_optimizer(kvtrainer.optimizer.create("sgd", learning_rate=0.1, momentum=0.9))
        kv.init(keys, [torch.zeros(3)] * len(keys))

        def push(count: int) -> None:
            """Pushes of small keys: mostly a hundred in a call, some alone; some are read back."""
            outs = [torch.empty(3) for _ in keys]
            for at in range(count // 100):
                if at % 20 == 0:
                    for key in keys:
                        kv.push(key, SMALL)
                elif at % 5 == 0:
                    kv.pushpull(keys, [SMALL] * 100, outs)
                else:
                    kv.push(keys, [SMALL] * 100)
            kv.server_stats()

        push(first)
        before = resident_bytes(server.pid)
        push(second - first)
        applied = sum(row["rounds_applied"] for row in kv.server_stats()[0]["tables"])
        assert applied == second
        assert resident_bytes(server.pid) - before < 4 * MEBIBYTE


@pytest.fixture
def plain_malloc(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the C library do what it does where nobody tells it anything."""
    for name in [name for name in os.environ if name.startswith(("MALLOC_", "GLIBC_"))]:
        monkeypatch.delenv(name)


@pytest.mark.usefixtures("plain_malloc")
def test_frames_come_to_memory_that_a_server_has_already(processes: Processes) -> None:
    server = processes.start([sys.executable, "-c", FRAMES + SERVER])
    assert int(server.line()) < 600


@pytest.mark.usefixtures("plain_malloc")
def test_frames_over_tcp_come_to_memory_that_a_worker_has_already(processes: Processes) -> None:
    [server] = processes.servers(1)
    place = {"KVSTORE_RANK": "0", "KVSTORE_NUM_WORKERS": "1", "KVSTORE_SERVERS": server.address}
    script = WORKER + FRAMES + "count(); kv.close()"
    command = [sys.executable, "-c", script, new_name(), str(LIMIT), str(LIMIT)]
    worker = processes.start(command, {**place, "KVSTORE_TRANSPORT": "tcp"})
    assert int(worker.line()) < 600
