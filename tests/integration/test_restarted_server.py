"""Real servers that are killed and started again with the memory that their supervisor keeps."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
import torch
import zmq

import kvtrainer
from kvstore_server.optimizer import create
from kvstore_server.optimizer.base import capability
from kvstore_server.protocol import messages as m
from kvstore_server.protocol.frames import decode_frames, encode_frames, pack_control
from tests.support.forks import Fork
from tests.support.limits import LIMIT
from tests.support.messages import contribution
from tests.support.processes import ROOT, Members, Processes, eventually, new_name
from tests.support.supervising import Supervisor, supervising


@contextmanager
def started(supervisor: Supervisor, *flags: str) -> Iterator[tuple[Fork, str]]:
    server, address = supervisor.start(*flags)
    try:
        yield server, address
    finally:
        server.kill()
        server.wait(LIMIT)


class Peer:
    """A worker's messages over a socket that reconnects by itself."""

    def __init__(self, address: str) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.ROUTING_ID, bytes([1]) * 16)
        self._socket.connect(address)
        self._number = 0
        self.welcome = m.Welcome(0, 0)
        hello = m.Hello("job", 0, 1, 0, 1, capability(), "host:1", bytes(16), (bytes([1]) * 16,))
        welcome = self.ask(hello)
        assert isinstance(welcome, m.Welcome)
        self.welcome = welcome

    def ask(self, body: m.RequestBody) -> m.ReplyBody:
        """The last answer to a request, which is sent again while there is none."""
        self._number += 1
        request = m.Request(self.welcome.run_id, self.welcome.session, self._number, body)
        for _ in range(int(LIMIT)):
            self._socket.send_multipart(encode_frames(request))
            while self._socket.poll(1000):
                _, _, number, reply = decode_frames(self._socket.recv_multipart(copy=False))
                if number == self._number:
                    found: m.ReplyBody = reply
                    return found
        raise AssertionError("the server has not answered")

    def step(self, round_: int) -> m.ReplyBody:
        slices = [(0, torch.full((4_096,), 1.5 * round_))]
        return self.ask(contribution(slices, round_, 0, 1, flags=m.WANTS_WEIGHTS))

    def close(self) -> None:
        self._socket.close(linger=0)
        self._context.term()


def test_a_server_that_is_killed_and_started_again_continues_with_its_sessions_and_weights() -> None:
    with (
        supervising() as supervisor,
        started(supervisor) as (server, address),
        closing(Peer(address)) as peer,
    ):
        assert peer.welcome.restart_timeout == 60.0
        peer.ask(m.SetOptimizer(pack_control(create("sgd", learning_rate=0.1, momentum=0.9).spec())))
        peer.ask(m.Register("t", (("k", (4_096,), "float32", 0, False),), False))
        peer.step(0)
        first = peer.step(1)
        server.kill()
        server.wait(LIMIT)
        with started(supervisor) as (_, there):
            assert there == address
            again = peer.step(1)
            assert isinstance(first, m.Weights)
            assert isinstance(again, m.Weights)
            assert torch.equal(again.payloads[0], first.payloads[0])
            later = peer.step(2)
            assert isinstance(later, m.Weights)
            # Gradients 1.5 and 3 with momentum: the rate times (1.5 + 0.9 * 1.5 + 3) below 0 from the first values.
            assert later.payloads[0].view(torch.float32).unique().tolist() == pytest.approx(
                [-0.1 * (1.5 + 1.35 + 3)]
            )


def test_a_server_under_our_own_supervisor_continues_each_time_it_is_killed() -> None:
    end, ready = os.pipe()
    supervisor = subprocess.Popen(
        [sys.executable, "-m", "kvstore_server", "--supervise", "--ready-fd", str(ready)],
        pass_fds=[ready],
        cwd=ROOT,
        stderr=subprocess.PIPE,
    )
    os.close(ready)
    with os.fdopen(end) as lines:
        address = lines.readline().strip()
    try:
        with closing(Peer(address)) as peer:
            peer.ask(m.SetOptimizer(pack_control(create("sgd", learning_rate=1.0).spec())))
            peer.ask(m.Register("t", (("k", (4_096,), "float32", 0, False),), False))
            peer.step(0)
            for round_ in (1, 2):
                children = Path(f"/proc/{supervisor.pid}/task/{supervisor.pid}/children").read_text().split()
                os.kill(int(children[0]), signal.SIGKILL)
                weights = peer.step(round_)
                assert isinstance(weights, m.Weights)
            assert weights.payloads[0].view(torch.float32).unique().tolist() == [-4.5]
    finally:
        supervisor.terminate()
        _, said = supervisor.communicate(timeout=LIMIT)
    assert supervisor.returncode == 0
    assert said.count(b"continues at") == 2


def test_rows_that_were_loaded_before_the_first_step_outlive_a_server_that_is_killed() -> None:
    with supervising() as supervisor, started(supervisor) as (server, address), Members() as members:
        table, rows = kvtrainer.Embedding(4), torch.arange(1200.0).view(300, 4)
        store = members.join([address], 0, 1, new_name())
        with kvtrainer.Trainer(
            [("t", table.weight)], "adagrad", {"learning_rate": 1.0}, kvstore=store
        ) as trainer:
            table.load_rows(torch.arange(300), rows)
            server.kill()
            server.wait(LIMIT)
            with started(supervisor):
                assert torch.equal(table(torch.arange(300)), rows)
                table(torch.arange(300)).sum().backward()
                trainer.step(1)
                assert torch.allclose(table(torch.arange(300)), rows - 1, atol=1e-4)


def test_a_server_that_is_stopped_leaves_nothing_with_its_supervisor() -> None:
    with supervising() as supervisor, started(supervisor) as (server, _):
        assert supervisor.names == ["kvstore-log-1"]
        server.send_signal(signal.SIGTERM)
        assert server.wait(LIMIT) == 0
        assert eventually(lambda: supervisor.names == [])


def test_a_server_whose_log_is_damaged_says_so_and_does_not_start() -> None:
    with supervising() as supervisor, started(supervisor) as (server, _):
        server.kill()
        server.wait(LIMIT)
        [(_, log)] = supervisor.kept
        os.pwrite(log, b"\xff", 40)
        again, address = supervisor.start()
        assert (again.wait(LIMIT), address) == (1, "")
        assert "damaged" in supervisor.said()


def test_a_server_with_another_index_does_not_take_the_state_of_the_former_one() -> None:
    with supervising() as supervisor, started(supervisor, "--num-servers", "2") as (server, _):
        server.kill()
        server.wait(LIMIT)
        again, address = supervisor.start("--num-servers", "2", "--index", "1")
        assert (again.wait(LIMIT), address) == (1, "")
        assert "--index was 0 and is 1" in supervisor.said()


@pytest.mark.parametrize("environment", [{}, {"NOTIFY_SOCKET": "/run/no-store"}])
def test_without_a_store_a_server_warns_and_goes_on(
    environment: dict[str, str], processes: Processes, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("NOTIFY_SOCKET", "FDSTORE"):
        monkeypatch.delenv(name, raising=False)
    command = [sys.executable, "-m", "kvstore_server", "--durability", "process"]
    server = processes.start(command, environment)
    assert server.address.startswith("tcp://")
    server.signal(signal.SIGTERM)
    code, said = server.end()
    assert code == 0
    assert "nothing holds this server's memory" in said
