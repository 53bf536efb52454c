"""A worker or a server dies, ends, stops, or is something else: what the others get to know."""

from __future__ import annotations

import gc
import os
import re
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from unittest import mock

import pytest
import torch
import zmq

from kvstore_server.protocol import frames
from kvstore_server.protocol import messages as m
from kvstore_server.restarts import REPLACED, RESTARTS
from kvstore_server.transport.tcp import tcp_routing_id
from kvtrainer import Trainer
from kvtrainer.client import connection
from kvtrainer.errors import (
    ConnectTimeoutError,
    ProtocolError,
    RoundAbortedError,
    ServerUnreachableError,
    VersionMismatchError,
    WorkerLostError,
)
from kvtrainer.kvstore import DistKVStore
from tests.support.limits import DEAD_AFTER, LIMIT, SOON
from tests.support.messages import contribution
from tests.support.pages import blocks_of
from tests.support.processes import (
    FORGETFUL,
    ROOT,
    Call,
    Members,
    Process,
    Processes,
    assert_serve,
    eventually,
    new_name,
    raised,
    round_of,
    together,
)

READY = 'kv.init("w", torch.zeros(3)); at("ready")\n'
PUSHPULL = 'out = torch.empty(3); kv.pushpull("w", torch.ones(3), out=out); print(out.tolist(), flush=True)\n'
# Raises from inside the wait for the other workers, as Ctrl-C does.
INTERRUPT = """
connection = kv._client._session.transport
receive = connection.receive
def interrupted(timeout):
    connection.receive = receive
    {raising}
connection.receive = interrupted
"""
DIES_AT_ITS_SECOND_DECISION = """
from kvtrainer.options import stages
decide, seen = stages.GradientLimits.decide, []
def dying(limits, measured):
    seen.append(measured)
    if len(seen) == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return decide(limits, measured)
stages.GradientLimits.decide = dying
v = torch.zeros(3, requires_grad=True)
options = {"learning_rate": 1.0}
trainer = kvtrainer.Trainer({"v": v}, "sgd", options, kvstore=kv, clip_grad={"max_norm": 1.0})
for _ in range(2):
    v.sum().backward()
    trainer.step(1)
"""


@dataclass
class Job:
    """Rank 1 of three is a process, which has reported "ready"; ranks 0 and 2 are stores here."""

    worker: Process
    others: tuple[DistKVStore, DistKVStore]

    def rounds(self) -> list[Call]:
        """Let ranks 0 and 2 begin a round."""
        return [Call(lambda store=store: round_of(store, "w", torch.ones(3))) for store in self.others]

    def outcomes(self) -> list[object]:
        return [call.outcome() for call in self.rounds()]

    def weights(self) -> list[float]:
        out = torch.empty(3)
        self.others[0].pull("w", out=out)
        return out.tolist()


STORES = ROOT / "docs" / "kvstores.md"

Start = Callable[..., Job]
"""Starts a job of that script, on servers of its own if flags for them are given."""


@pytest.fixture
def start(servers: list[Process]) -> Iterator[Start]:
    with Processes() as processes, Members() as members:

        def job(script: str, *flags: str) -> Job:
            name, own = new_name(), processes.servers(2, *flags) if flags else servers
            worker = processes.worker(READY + script, own, 1, 3, name)
            others = members.join(own, 0, 3, name), members.join(own, 2, 3, name)
            assert together(*(lambda s=s: s.init("w", torch.zeros(3)) for s in others)) == [None, None]
            assert worker.line() == "ready"
            return Job(worker, others)

        yield job
        assert_serve(servers)


def test_who_waits_for_a_slow_worker_and_its_server_say_so_while_they_wait(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with Processes() as processes, Members() as members:
        servers = processes.servers(1, "--slow-after", "0.5")
        name = new_name()
        slow = processes.worker(READY + PUSHPULL, servers, 1, 2, name)
        waiting = members.join(servers, 0, 2, name, slow_after=0.5)
        waiting.init("w", torch.zeros(3))
        assert slow.line() == "ready"
        call = Call(lambda: round_of(waiting, "w", torch.ones(3)))
        round_1 = f"round 1 of 'w'.* rank 1 \\(.*:{slow.pid}\\) was last heard"
        assert eventually(lambda: re.search(f"rank 0 has waited .*{round_1}", caplog.text) is not None)
        assert eventually(lambda: re.search(f"WARNING .*{round_1}", servers[0].stderr()) is not None)
        slow.go()
        assert torch.equal(call.outcome(), torch.full((3,), 2.0))
        [line] = [one.code for one in blocks_of(STORES) if "has waited" in one.code]
        assert form_of(line.rstrip()) in [form_of(record.getMessage()) for record in caplog.records]


def form_of(line: str) -> str:
    """A line of a log without what is another one in each job."""
    for pattern, word in ((r"\(\S+:\d+\)", "(PLACE)"), ("'[^']+'", "NAME"), (r"\d+([.]\d+)?", "NUMBER")):
        line = re.sub(pattern, word, line)
    return line


@pytest.mark.parametrize("script", ["", "with kv:\n    "])
def test_the_error_that_ends_a_worker_is_told_to_the_others_at_once(start: Start, script: str) -> None:
    job = start(script + 'raise ValueError("sample 17 is broken")')
    waiting = job.rounds()
    job.worker.go()
    texts = raised([call.outcome() for call in waiting], WorkerLostError)
    # "has left", not "was last heard": nobody waited for its silence.
    assert all("rank 1 has left (ValueError: sample 17 is broken)" in text for text in texts)
    code, stderr = job.worker.end()
    assert code == 1
    assert "ValueError: sample 17 is broken" in stderr


def test_a_worker_that_ends_while_others_go_on_is_lost_to_them(start: Start) -> None:
    job = start("")
    job.worker.go()
    assert job.worker.end()[0] == 0
    texts = raised(job.outcomes(), WorkerLostError)
    assert all("rank 1 has left (it closed its kvstore or its program ended)" in text for text in texts)
    assert all("trainer.join()" in text for text in texts)


@pytest.mark.parametrize(
    ("raising", "named"),
    [
        ("signal.raise_signal(signal.SIGINT)", "KeyboardInterrupt"),
        ('raise MemoryError("no room")', "MemoryError: no room"),
    ],
)
def test_a_worker_that_raises_inside_a_round_aborts_it_for_all(
    start: Start, raising: str, named: str
) -> None:
    job = start(INTERRUPT.format(raising=raising) + PUSHPULL)
    job.worker.go()
    assert job.worker.end()[0] != 0
    texts = raised(job.outcomes(), RoundAbortedError)
    assert all(f"rank 1 aborted round 1 of 'w': {named}" in text for text in texts)
    assert job.weights() == [0.0, 0.0, 0.0]


def test_after_an_aborted_round_the_next_one_works(start: Start) -> None:
    attempt = 'try:\n    kv.pushpull("w", torch.ones(3))\nexcept MemoryError:\n    at("aborted")\n'
    job = start(INTERRUPT.format(raising="raise MemoryError()") + attempt + PUSHPULL)
    job.worker.go()
    assert job.worker.line() == "aborted"
    raised(job.outcomes(), RoundAbortedError)
    job.worker.go()
    assert [outcome.tolist() for outcome in job.outcomes()] == [[3.0] * 3] * 2
    assert job.worker.line() == "[3.0, 3.0, 3.0]"


def test_a_worker_that_dies_before_it_has_decided_about_a_sum_does_not_undo_the_round(start: Start) -> None:
    def limited(kv: DistKVStore) -> list[float]:
        v = torch.zeros(3, requires_grad=True)
        trainer = Trainer({"v": v}, "sgd", {"learning_rate": 1.0}, kvstore=kv, clip_grad={"max_norm": 1.0})
        for _ in range(2):
            v.sum().backward()  # type: ignore[no-untyped-call]
            trainer.step(1)
        seen: list[float] = v.tolist()
        v.sum().backward()  # type: ignore[no-untyped-call]
        with pytest.raises(WorkerLostError, match="rank 1"):
            trainer.step(1)
        return seen

    job = start(DIES_AT_ITS_SECOND_DECISION, *FORGETFUL)
    job.worker.go()
    for seen in together(*(lambda kv=kv: limited(kv) for kv in job.others)):
        assert seen == pytest.approx([-2.0 / 3**0.5] * 3, rel=1e-5)
    assert job.worker.end()[0] == -signal.SIGKILL


def test_a_stopped_worker_delays_its_own_job_only() -> None:
    with Processes() as processes, Members() as members:
        servers, name = processes.servers(2), new_name()
        worker = processes.worker(READY + PUSHPULL, servers, 1, 2, name)
        other, pair = members.join(servers, 0, 2, name), members.pair(servers)
        other.init("w", torch.zeros(3))
        together(*(lambda s=s: s.init("w", torch.zeros(3)) for s in pair))
        assert worker.line() == "ready"
        worker.freeze()
        stopped = Call(lambda: round_of(other, "w", torch.ones(3)))
        for _ in range(20):
            assert [out.tolist() for out in together(*_rounds(pair))] == [[2.0] * 3] * 2
        assert stopped.is_running
        worker.signal(signal.SIGCONT)
        worker.go()
        assert stopped.outcome().tolist() == [2.0] * 3


def _rounds(pair: tuple[DistKVStore, DistKVStore]) -> list[Callable[[], torch.Tensor]]:
    return [lambda store=store: round_of(store, "w", torch.ones(3)) for store in pair]


@pytest.fixture
def silent_port() -> Iterator[socket.socket]:
    """A port at which connections are taken, and nothing is ever said."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener


def _address(listener: socket.socket) -> str:
    return f"tcp://127.0.0.1:{listener.getsockname()[1]}"


def test_an_address_without_a_server_is_named_when_the_time_to_connect_is_over(members: Members) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # bound, but nobody listens
        with pytest.raises(ConnectTimeoutError) as caught:
            members.join([_address(unused)], 0, 1, new_name(), connect_timeout=SOON)
        text = str(caught.value)
        assert _address(unused) in text
        assert f"did not answer within {SOON:g} s" in text
        assert "KVSTORE_SERVERS" in text


@pytest.mark.parametrize(
    "says", [b"", b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n"], ids=["nothing", "http"]
)
def test_a_listener_of_another_kind_is_named_like_a_missing_server(
    members: Members, silent_port: socket.socket, says: bytes
) -> None:
    def answer() -> None:
        connection, _ = silent_port.accept()
        with connection:
            connection.sendall(says)

    if says:
        threading.Thread(target=answer, daemon=True).start()
    with pytest.raises(ConnectTimeoutError, match=_address(silent_port)):
        members.join([_address(silent_port)], 0, 1, new_name(), connect_timeout=SOON)


def test_a_zeromq_socket_of_another_program_is_no_server(members: Members) -> None:
    context = zmq.Context()
    other = context.socket(zmq.ROUTER)
    try:
        other.bind("tcp://127.0.0.1:0")
        address = other.getsockopt_string(zmq.LAST_ENDPOINT)
        connecting = Call(lambda: members.join([address], 0, 1, new_name()))
        peer = other.recv_multipart()[0]
        other.send_multipart([peer, b"hello, world"])
        [text] = raised([connecting.outcome()], ProtocolError)
        assert "is the peer a kvtrainer worker or server?" in text
    finally:
        other.close(linger=0)
        context.term()


def test_workers_of_another_protocol_version_are_refused_and_told_both_versions(
    processes: Processes, members: Members, monkeypatch: pytest.MonkeyPatch
) -> None:
    servers = processes.servers(2)
    own = frames.PROTOCOL_VERSION
    for other in (own - 1, own + 1):
        with monkeypatch.context() as patch:
            patch.setattr(frames, "PROTOCOL_VERSION", other)
            with pytest.raises(VersionMismatchError) as caught:
                members.join(servers, 0, 1, new_name())
        # The server's own words cannot be read by another version: this side knows from the header.
        assert f"speaks protocol version {own}, this side speaks {other}" in str(caught.value)
        assert "install the same release" in str(caught.value)
    assert_serve(servers)


def test_workers_do_not_leave_open_files_behind_when_they_cannot_connect(
    members: Members, silent_port: socket.socket
) -> None:
    def attempt() -> int:
        with pytest.raises(ConnectTimeoutError):
            members.join([_address(silent_port)], 0, 1, new_name(), connect_timeout=0.05)
        gc.collect()  # or what earlier tests left would go meanwhile
        return len(os.listdir("/proc/self/fd"))

    attempt()
    assert attempt() == attempt()


def _contribute(
    impostor: connection.Connection,
    tokens: list[tuple[int, ...]],
    store: DistKVStore,
    value: torch.Tensor,
    number: int,
) -> None:
    """Give a whole round of key "w" in the name of the session that the tokens stand for; wants no weights back."""
    table = store._entries["w"].table
    for server, (run, session) in enumerate(tokens):
        at = table.numbers[server]
        slices = table.plan.slices_of(server)
        for slice_ in slices:
            whole = torch.zeros(slice_.length)
            whole[: slice_.used] = value[slice_.offset : slice_.offset + slice_.used]
            push = contribution([(table.slot_of(slice_), whole)], number)
            impostor.send(server, m.Request(run, session, 1, push))
        body = contribution([], number, at, len(slices), timeout=LIMIT)
        impostor.send(server, m.Request(run, session, 1, body))


def _waiting_for(store: DistKVStore) -> list[list[int]]:
    """Per server: the ranks that have not committed the open round, of which another one waits."""
    return [stats["tables"][0]["waiting_for"] for stats in store.server_stats()]


def test_an_error_inside_a_with_block_is_told_to_the_others(start: Start) -> None:
    job = start('with kv:\n    raise ValueError("sample 17 is broken")')
    job.worker.go()
    texts = raised(job.outcomes(), WorkerLostError)
    assert all("rank 1 has left (ValueError: sample 17 is broken)" in text for text in texts)


def test_a_worker_that_reads_no_reply_neither_blocks_the_servers_nor_changes_what_others_get(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    numel, name = 8_000_000, new_name()  # replies larger than what sockets hold
    script = f"""
kv.init("w", torch.zeros({numel}))
session = kv._client._session
for (run, token), (own, *_) in zip(session._tokens, session.transport._ids): print(run, token, own.hex(), flush=True)
out = torch.empty({numel})
kv.pushpull("w", torch.ones({numel}), out=out)
print(out.unique().tolist(), flush=True)
"""
    with Processes() as processes, Members() as members:
        servers = processes.servers(2)
        worker = processes.worker(script, servers, 1, 2, name)
        store = members.join(servers, 0, 2, name)
        store.init("w", torch.zeros(numel))
        tokens, ids = [], []
        for _ in servers:
            run, session, own = worker.line().split()
            tokens.append((int(run), int(session)))
            # A connection's first socket is for heartbeats, and the second for requests.
            ids += [
                tcp_routing_id(),
                bytes.fromhex(own),
                *[tcp_routing_id() for _ in range(m.MAX_SOCKETS - 2)],
            ]
        assert eventually(lambda: _waiting_for(store) == [[0]] * 2)
        worker.freeze()
        assert round_of(store, "w", torch.full((numel,), 2.0)).unique().tolist() == [3.0]
        # The replies to the stopped worker are still on their way while its weights change: somebody who has its
        # session, and the name of one of its sockets, gives its part to the next round.
        monkeypatch.setattr(connection, "tcp_routing_id", iter(ids).__next__)
        impostor = connection.Connection([server.address for server in servers])
        monkeypatch.undo()
        try:
            _contribute(impostor, tokens, store, torch.full((numel,), 10.0), 2)
            assert round_of(store, "w", torch.full((numel,), 20.0)).unique().tolist() == [30.0]
            assert_serve(servers)
        finally:
            impostor.close()
        worker.signal(signal.SIGCONT)
        assert worker.line() == "[3.0]"


def test_the_servers_forget_a_job_when_all_its_workers_have_left(servers: list[Process]) -> None:
    name = new_name()
    for value in (1.0, 2.0):
        with Members() as members:
            pair = [members.join(servers, rank, 2, name) for rank in range(2)]
            together(*(lambda s=s, v=value: s.init("w", torch.full((3,), v)) for s in pair))
            out = torch.empty(3)
            pair[1].pull("w", out=out)
            assert out.tolist() == [value] * 3
            assert pair[0].num_dead_nodes() == 0
            together(*(store.close for store in pair))
        with Members() as members:
            assert eventually(lambda m=members: not m.join(servers, 0, 2, name).num_dead_nodes())


def test_a_server_that_died_between_rounds_is_named_at_the_next_one_however_many_keys_it_held(
    processes: Processes, members: Members
) -> None:
    servers = processes.servers(1)
    pair = members.pair(servers, dead_after=DEAD_AFTER)
    keys = [str(i) for i in range(40)]
    assert together(*(lambda s=s: s.init(keys, [torch.zeros(2)] * 40) for s in pair)) == [None, None]
    servers[0].signal(signal.SIGKILL)
    servers[0].end()
    outcomes = together(*(lambda s=s: s.pushpull(keys, [torch.ones(2)] * 40) for s in pair))
    texts = raised(outcomes, ServerUnreachableError)
    assert all(servers[0].address in text and "Restart the job" in text for text in texts)


def test_a_worker_that_is_replaced_ends_with_the_code_that_keeps_launchers_from_starting_it_again(
    members: Members,
) -> None:
    """Also before its loop begins: here a process that was held up at its start comes after its successor."""
    script = "import kvtrainer\nkvtrainer.kvstore.create('dist_sync')\n"
    with Processes() as processes:
        [server] = processes.servers(1)
        with mock.patch.dict(os.environ, {RESTARTS: "1"}):
            members.join([server], 0, 2, "store0")
        place = {"KVSTORE_RANK": "0", "KVSTORE_NUM_WORKERS": "2", "KVSTORE_SERVERS": server.address}
        late = processes.start([sys.executable, "-c", script], place)
        code, stderr = late.end()
    assert code == REPLACED
    assert "FencedError" in stderr
