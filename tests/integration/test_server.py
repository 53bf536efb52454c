"""The server process: how it serves, how it ends, and what slow peers get."""

from __future__ import annotations

import itertools
import signal
import socket
import struct
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import zmq

from kvstore_server.optimizer.base import capability
from kvstore_server.optimizer.registry import create, registered_optimizers
from kvstore_server.probe import probe_servers
from kvstore_server.protocol import messages as m
from kvstore_server.protocol.frames import decode_frames, encode_frames, pack_control
from kvstore_server.server import Server, ServerOptions, make_server
from kvstore_server.transport.tcp import tcp_routing_id
from kvtrainer.errors import ServerStoppingError
from kvtrainer.kvstore import DistKVStore
from tests.support.limits import FOREVER, LIMIT
from tests.support.messages import contribution
from tests.support.processes import (
    Call,
    Members,
    Processes,
    config_of_server,
    eventually,
    new_name,
    raised,
    round_of,
    serving,
    together,
)
from tests.support.reachable import resident_bytes

# ---------------------------------------------------------------- serving


def test_a_server_that_is_ready_imports_nothing_more_whatever_optimizer_is_named_and_used(
    processes: Processes, members: Members
) -> None:
    # "-u" keeps it from being forked from a process that has imported everything already.
    command = [sys.executable, "-u", "-m", "kvstore_server", "--import", "tests.support.server_commands"]
    server = processes.start(command)

    def imported(kv: DistKVStore) -> set[str]:
        return set(kv.send_command_to_servers(9, "")[0].split())

    before = imported(members.join([server], 0, 1, new_name()))
    # Other tests of this process may have registered some of their own.
    for name in sorted(
        n
        for n, cls in registered_optimizers().items()
        if cls.__module__.startswith(("kvstore_server.", "torch."))
    ):
        kv = members.join([server], 0, 1, new_name())
        kv.set_optimizer(create(name, lr=0.1))
        kv.init("w", torch.ones(4, 4))
        gradient = torch.ones(4, 4)
        kv.push("w", gradient.to_sparse(1) if name == "torch:sparseadam" else gradient)
        out = torch.ones(4, 4)
        kv.pull("w", out=out)
        assert not out.eq(1).all(), name
    assert imported(kv) == before
    assert "torch._dynamo" not in before


def has_ipv6_loopback() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


@pytest.mark.skipif(not has_ipv6_loopback(), reason="this machine has no IPv6 loopback address")
def test_a_server_may_listen_on_an_address_of_ipv6(members: Members) -> None:
    out = torch.zeros(2)
    with serving(make_server(config_of_server(), ServerOptions("tcp://[::1]:0"))) as server:
        worker = members.join([server.endpoint], 0, 1, new_name())
        worker.init("w", torch.ones(2))
        worker.pull("w", out=out)
    assert out.tolist() == [1.0, 1.0]


# ---------------------------------------------------------------- draining


def test_an_idle_server_ends_with_code_0_on_sigterm(processes: Processes, members: Members) -> None:
    [server] = processes.servers(1, "--drain-timeout", str(FOREVER))
    pair = members.pair([server])
    together(*(lambda s=s: s.init("w", torch.zeros(3)) for s in pair))
    server.signal(signal.SIGTERM)
    code, stderr = server.end()
    assert (code, stderr) == (0, "")


def test_a_server_that_has_stopped_runs_exit_handlers_and_does_not_take_its_modules_apart(
    processes: Processes, tmp_path: Path
) -> None:
    (tmp_path / "last_words.py").write_text(
        "import atexit, os\n"
        "kept = open(2, 'w', closefd=False)\n"
        "kept.write('taken apart')\n"
        "atexit.register(os.write, 2, b'farewell')\n"
    )
    flags = ("--num-servers", "1", "--index", "0", "--import", "last_words")
    server = processes.start([sys.executable, "-B", "-m", "kvstore_server", *flags], cwd=tmp_path)
    assert server.address
    server.signal(signal.SIGTERM)
    assert server.end() == (0, "farewell")


def test_a_server_may_have_as_many_files_open_as_the_system_allows(processes: Processes) -> None:
    script = (
        "import resource, sys\n"
        "from kvstore_server import cli\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (200, 300))\n"
        "sys.exit(cli.main(sys.argv[1:]))\n"
    )
    server = processes.start([sys.executable, "-c", script, "--num-servers", "1", "--index", "0"])
    assert server.address
    limits = Path(f"/proc/{server.pid}/limits").read_text().splitlines()
    [files] = [line.split()[3:5] for line in limits if line.startswith("Max open files")]
    assert files == ["300", "300"]


def test_a_server_that_can_open_no_more_files_sends_long_weights_all_the_same(
    processes: Processes, members: Members, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVSTORE_TRANSPORT", "tcp")
    script = (
        "import os, resource, sys\n"
        "from kvstore_server import cli\n"
        "def announce(server):\n"
        "    resource.setrlimit(resource.RLIMIT_NOFILE, (300, 300))\n"
        "    taken = []\n"
        "    try:\n"
        "        while True:\n"
        "            taken.append(os.open('/dev/null', os.O_RDONLY))\n"
        "    except OSError:\n"
        "        for one in taken[-3:]:\n"
        "            os.close(one)\n"
        "    print(server.endpoint, flush=True)\n"
        "sys.exit(cli.main(sys.argv[1:], announce))\n"
    )
    server = processes.start([sys.executable, "-c", script, "--num-servers", "1", "--index", "0"])
    store = members.join([server], 0, 1, new_name())
    store.init("w", torch.zeros(300_000))
    assert set(round_of(store, "w", torch.ones(300_000)).tolist()) == {1.0}
    keys, ones = [str(at) for at in range(10)], [torch.ones(8000)] * 10
    store.init(keys, [torch.zeros(8000)] * 10)
    store.pushpull(keys, ones, outs := [torch.zeros(8000) for _ in keys])
    assert {number for out in outs for number in out.tolist()} == {1.0}


def test_workers_learn_at_once_that_a_server_was_stopped_while_nobody_waited(
    processes: Processes, members: Members
) -> None:
    servers = processes.servers(2)
    pair = members.pair(servers, dead_after=600.0)
    together(*(lambda s=s: s.init("w", torch.zeros(200_000)) for s in pair))
    servers[1].signal(signal.SIGTERM)
    assert servers[1].end()[0] == 0
    outcomes = together(*(lambda s=s: round_of(s, "w", torch.ones(200_000)) for s in pair))
    texts = raised(outcomes, ServerStoppingError)
    assert all(f"server 1 ({servers[1].address}) was shut down" in text for text in texts)


def test_a_server_has_nothing_to_say_to_workers_that_have_left(
    processes: Processes, members: Members
) -> None:
    [server] = processes.servers(1, "--log", "debug")
    store = members.join([server], 0, 1, new_name())
    store.init("w", torch.zeros(3))
    store.close()
    assert eventually(lambda: "kind=Leave" in server.stderr())
    server.signal(signal.SIGTERM)
    code, stderr = server.end()
    [_, after] = stderr.split("stopping; waiting up to")
    assert (code, after.count("\n")) == (0, 1), after


def test_a_round_that_has_begun_completes_after_sigterm_and_no_new_one_begins(
    processes: Processes, members: Members
) -> None:
    [server] = processes.servers(1, "--log", "info", "--drain-timeout", str(FOREVER))
    pair = members.pair([server])
    together(*(lambda s=s: s.init(["w", "v"], [torch.zeros(3)] * 2) for s in pair))
    waiting = Call(lambda: round_of(pair[0], "w", torch.ones(3)))
    assert eventually(lambda: _waiting_for(pair[1]) == [1])
    server.signal(signal.SIGTERM)
    assert eventually(lambda: "stopping" in server.stderr())
    [text] = raised(together(lambda: round_of(pair[1], "v", torch.ones(3))), ServerStoppingError)
    assert "server 0 is stopping and takes no new round" in text
    [text] = raised(together(lambda: members.join([server], 0, 1, new_name())), ServerStoppingError)
    assert "takes no new workers" in text
    assert waiting.is_running
    assert round_of(pair[1], "w", torch.ones(3)).tolist() == [2.0] * 3
    assert waiting.outcome().tolist() == [2.0] * 3
    assert server.end()[0] == 0


def test_a_round_that_does_not_end_within_the_drain_timeout_fails_for_those_who_wait(
    processes: Processes, members: Members
) -> None:
    [server] = processes.servers(1, "--drain-timeout", "0.5")
    pair = members.pair([server])
    together(*(lambda s=s: s.init("w", torch.zeros(3)) for s in pair))
    waiting = Call(lambda: round_of(pair[0], "w", torch.ones(3)))
    assert eventually(lambda: _waiting_for(pair[1]) == [1])
    at_barrier = Call(pair[1].barrier)
    server.signal(signal.SIGTERM)
    [text] = raised([waiting.outcome()], ServerStoppingError)
    assert "server 0 was shut down while round 1 of 'w' waited: rank 1 (" in text
    raised([at_barrier.outcome()], ServerStoppingError)
    assert server.end()[0] == 0


def test_a_worker_that_reads_nothing_cannot_keep_a_server_from_ending(processes: Processes) -> None:
    [server] = processes.servers(1, "--drain-timeout", "1")
    with _Reader(server.address) as reader:
        reader.pull_without_reading(64 << 20)
        server.signal(signal.SIGTERM)
        assert server.end()[0] == 0


def test_weights_that_wait_for_a_slow_worker_do_not_wait_twice_when_it_asks_again() -> None:
    with _served(drain_timeout=0.1) as served, _Reader(served.server.endpoint) as reader:
        reader.pull_without_reading(200 << 20)
        assert eventually(lambda: served.waiting() > 0)
        once = served.waiting()
        before = served.handled
        for _ in range(10):
            reader.repeat()
        assert eventually(lambda: served.handled == before + 10)
        # What the socket had taken already may come once more, for nobody knows whether it was lost.
        assert served.waiting() <= once + (200 << 20)


def test_a_server_tells_how_many_bytes_wait_for_workers_that_are_slow_to_read() -> None:
    with _served(drain_timeout=0.1) as served, _Reader(served.server.endpoint) as reader:

        def queued() -> int:
            [facts] = probe_servers([served.server.endpoint], LIMIT)
            assert facts is not None
            return int(facts["queued"])

        assert queued() == 0
        reader.pull_without_reading(200 << 20)
        assert eventually(lambda: queued() > 0)


def test_a_reply_larger_than_the_backlog_limit_still_reaches_a_worker_that_reads() -> None:
    with _served(max_backlog=1 << 20) as served, Members() as members:
        store = members.join([served.server.endpoint], 0, 1, new_name())
        numel = 10_000_000
        store.init("w", torch.ones(numel))
        out = torch.zeros(numel)
        store.pull("w", out=out)
        assert out.unique().tolist() == [1.0]


def test_a_long_answer_goes_out_in_portions_of_one_version_while_others_are_served(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvstore_server.server._PORTION", 1)  # a message in each turn
    with _served() as served, _Reader(served.server.endpoint) as reader:
        # Asked for at the same time: all weights before an update, and the update.
        turns = served.turns
        parts = reader.weights_while_they_change(64)
        assert {version for version, _ in parts} == {0}
        assert {payload[:4] for _, payload in parts} == {bytes(4)}
        assert len(parts) == 64
        assert served.turns - turns >= 64


def test_the_memory_of_a_table_is_occupied_when_its_weights_come_and_is_given_back_at_the_end(
    processes: Processes,
) -> None:
    [server] = processes.servers(1)
    with _Reader(server.address) as reader:
        before = resident_bytes(server.pid)
        reader.declare(256)
        assert resident_bytes(server.pid) - before < 32 << 20
    with _Reader(server.address) as reader:
        reader.initialise(256)
        assert resident_bytes(server.pid) - before > 256 << 20
        reader.leave()
        assert eventually(lambda: resident_bytes(server.pid) - before < 32 << 20)


def test_a_server_that_stood_still_does_not_blame_the_workers() -> None:
    offset = 0.0
    config = config_of_server(dead_after=LIMIT)
    server = make_server(config, ServerOptions(), clock=lambda: time.monotonic() + offset)
    ticks: list[float] = []
    tick = server.service.tick
    server.service.tick = lambda now: ticks.append(now) or tick(now)  # type: ignore[func-returns-value,method-assign]
    with serving(server), Members() as members:
        pair = members.pair([server.endpoint], timeout=FOREVER)
        together(*(lambda s=s: s.init("w", torch.zeros(3)) for s in pair))
        waiting = Call(lambda: round_of(pair[0], "w", torch.ones(3)))
        assert eventually(lambda: _waiting_for(pair[1]) == [1])
        before = time.monotonic()
        offset = 2 * LIMIT  # as if the server had been stopped: twice the silence that is allowed
        assert eventually(lambda: ticks[-1] > before + offset)
        assert round_of(pair[1], "w", torch.ones(3)).tolist() == [2.0] * 3
        assert waiting.outcome().tolist() == [2.0] * 3


def test_nobody_counts_as_silent_while_a_message_of_very_many_frames_is_read() -> None:
    looks = itertools.count()
    server = make_server(config_of_server(), ServerOptions(), clock=lambda: 0.05 * next(looks))
    excused: list[float] = []
    server.service.reset_liveness = excused.append  # type: ignore[method-assign]
    server._limits.check = lambda now: None  # type: ignore[method-assign]  # by this clock the peer is too slow
    with serving(server):
        context = zmq.Context()
        peer = context.socket(zmq.DEALER)
        try:
            peer.connect(server.endpoint)
            peer.send_multipart([b""] * 100_000)
            assert peer.poll(LIMIT * 1000), "the message was not refused"
            assert excused
        finally:
            context.destroy(linger=0)


def _waiting_for(store: DistKVStore) -> list[int]:
    """The ranks that the open round of any key waits for."""
    return [rank for stats in store.server_stats() for row in stats["tables"] for rank in row["waiting_for"]]


class _Served:
    """A server that runs in a thread of this process, whose inside can be looked at."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.handled = self.turns = 0
        retry, handle = server._retry_backlog, server.service.handle

        def turning() -> None:
            self.turns += 1
            retry()

        def counting(*arguments: Any) -> list[m.Outgoing]:
            replies = handle(*arguments)
            self.handled += 1
            return replies

        server._retry_backlog = turning  # type: ignore[method-assign]
        server.service.handle = counting  # type: ignore[method-assign]

    def waiting(self) -> int:
        """The bytes that wait for the slowest peer."""
        return max((backlog.nbytes for backlog in list(self.server._backlog.values())), default=0)


@contextmanager
def _served(**options: Any) -> Iterator[_Served]:
    served = _Served(make_server(config_of_server(), ServerOptions(**options)))
    with serving(served.server):
        yield served


class _Reader:
    """A worker, alone in its job, that reads only what it is told to."""

    def __init__(self, address: str) -> None:
        self._context = zmq.Context()
        self._own = tcp_routing_id()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.ROUTING_ID, self._own)
        self._socket.setsockopt(zmq.RCVHWM, 1)
        self._socket.setsockopt(zmq.RCVBUF, 4096)
        self._socket.connect(address)

    def declare(self, slices: int, mode: str = "sync") -> None:
        """Say hello and declare keys of 1 MiB."""
        hello = m.Hello(new_name(), 0, 1, 0, 1, capability(), "here:1", bytes(16), (self._own,), mode)
        welcome = self._ask(m.Request(0, 0, 1, hello))
        assert isinstance(welcome, m.Welcome)
        self._place = welcome.run_id, welcome.session
        specs = tuple((str(i), (1 << 18,), "float32", 0, False) for i in range(slices))
        table = self._ask(m.Request(*self._place, 2, m.Register("w", specs, False)))
        assert isinstance(table, m.Registered)
        self._table = table.table

    def initialise(self, slices: int, mode: str = "sync") -> None:
        """Declare keys, and give them values."""
        self.declare(slices, mode)
        self._send_round(slices, 0, 3, 0.0, want_weights=False)
        assert self._socket.poll(LIMIT * 1000), "the round did not end"
        self._socket.recv_multipart()

    def weights_while_they_change(self, slices: int) -> list[tuple[int, bytes]]:
        """What a pull gives beside which the weights change."""
        self.initialise(slices, "async")
        optimizer = m.SetOptimizer(pack_control(create("sgd", learning_rate=1.0).spec()))
        assert isinstance(self._ask(m.Request(*self._place, 4, optimizer)), m.Status)
        self._socket.send_multipart(encode_frames(m.Request(*self._place, 5, m.Pull((self._table,)))))
        self._send_round(slices, 1, 6, 1.0, want_weights=False)
        parts: list[tuple[int, bytes]] = []
        while True:
            assert self._socket.poll(LIMIT * 1000), "the answer did not come"
            reply = m.Reply(*decode_frames(self._socket.recv_multipart(copy=False))[2:])
            if reply.number == 6:
                assert isinstance(reply.body, m.Done)
                return parts
            assert isinstance(reply.body, m.Weights)
            parts += [
                (row[1], p.numpy().tobytes())
                for row, p in zip(reply.body.parts.tolist(), reply.body.payloads, strict=True)
            ]

    def pull_without_reading(self, nbytes: int) -> None:
        self.declare(nbytes >> 20)
        self._frames = self._send_round(nbytes >> 20, 0, 3, 0.0, want_weights=True)
        assert self._socket.poll(LIMIT * 1000), "no weights came"

    def leave(self) -> None:
        self._socket.send_multipart(encode_frames(m.Request(*self._place, 9, m.Leave("done", True))))

    def _send_round(
        self, slices: int, round_: int, number: int, value: float, want_weights: bool
    ) -> list[Any]:
        """Push all slices and commit them; the frames of the commit."""
        payload = struct.pack("<f", value) * (1 << 18)
        for i in range(slices):
            push = contribution([(i, payload)], round_)
            self._socket.send_multipart(encode_frames(m.Request(*self._place, number, push)))
        flags = m.WANTS_WEIGHTS * want_weights
        commit = contribution([], round_, self._table, slices, flags=flags, timeout=LIMIT)
        frames = encode_frames(m.Request(*self._place, number, commit))
        self._socket.send_multipart(frames)
        return frames

    def repeat(self) -> None:
        """Ask for the same weights, under the same number."""
        self._socket.send_multipart(self._frames)

    def _ask(self, request: m.Request) -> m.ReplyBody:
        self._socket.send_multipart(encode_frames(request))
        assert self._socket.poll(LIMIT * 1000), "the server did not answer"
        return decode_frames(self._socket.recv_multipart(copy=False))[3]

    def __enter__(self) -> _Reader:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close(linger=0)
        self._context.term()
