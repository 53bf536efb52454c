"""Who plays which role: what is refused at once, and what a role does not touch."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

import kvtrainer
from kvstore_server.errors import ConfigurationError, ConnectTimeoutError, ProtocolError
from kvtrainer import roles
from kvtrainer.rendezvous import messages as m
from kvtrainer.rendezvous import sockets
from kvtrainer.rendezvous.table import Rendezvous
from tests.support.dmlc import free_port
from tests.support.limits import LIMIT, SOON
from tests.support.processes import Call, eventually, raised

DMLC = {
    "DMLC_PS_ROOT_URI": "127.0.0.1",
    "DMLC_PS_ROOT_PORT": "9",
    "DMLC_NUM_WORKER": "2",
    "DMLC_NUM_SERVER": "1",
}


def in_role(role: str, **more: str) -> dict[str, str]:
    return {**DMLC, "DMLC_ROLE": role, **more}


# Roles.


@pytest.mark.parametrize("role", ["scheduler", "server"])
def test_a_local_store_is_made_in_every_role(role: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in in_role(role).items():
        monkeypatch.setenv(name, value)
    kv = kvtrainer.kvstore.create("local")
    kv.init("w", torch.ones(2))
    parameter = torch.nn.Parameter(torch.zeros(2))
    kvtrainer.Trainer([parameter], "sgd", kvstore=None)


@pytest.mark.parametrize("role", ["scheduler", "server"])
def test_a_role_beside_servers_that_run_already_is_a_contradiction(role: str) -> None:
    with pytest.raises(ConfigurationError, match=f"DMLC_ROLE is '{role}', but KVSTORE_SERVERS"):
        roles.find_topology(in_role(role, KVSTORE_SERVERS="h:1"))
    with pytest.raises(ConfigurationError, match="unset one of them"):
        roles.find_topology(in_role(role), servers=["h:1"])


def test_a_process_with_a_rank_is_a_worker_whatever_its_role() -> None:
    environ = in_role("server", KVSTORE_RANK="1", KVSTORE_NUM_WORKERS="2", KVSTORE_SERVERS="h:1")
    assert roles.find_topology(environ).rank == 1


def test_a_worker_with_a_list_of_servers_does_not_ask_the_scheduler() -> None:
    environ = in_role("worker", DMLC_WORKER_ID="1", KVSTORE_SERVERS="h:1")
    topology = roles.find_topology(environ)
    assert (topology.rank, topology.num_workers, topology.servers) == (1, 2, ("tcp://h:1",))


def test_a_worker_that_is_given_another_number_of_workers_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="num_workers is 3, but DMLC_NUM_WORKER is 2"):
        roles.find_topology(in_role("worker"), num_workers=3)


@pytest.mark.parametrize(
    ("environ", "rank", "expected"),
    [
        ({}, None, None),
        ({"DMLC_WORKER_ID": "1"}, None, 1),
        ({"DMLC_WORKER_ID": "1", "KVSTORE_RANK": "0"}, None, 0),
        ({"DMLC_WORKER_ID": "1", "KVSTORE_RANK": "1"}, 0, 0),
        ({"KVSTORE_NUM_WORKERS": "2"}, None, None),
        ({"RANK": "1", "WORLD_SIZE": "2"}, None, None),
    ],
)
def test_a_worker_claims_the_rank_that_is_said_first(
    environ: dict[str, str], rank: int | None, expected: int | None
) -> None:
    given = in_role("worker", **environ)
    job = roles.read_dmlc(given)
    assert job is not None
    assert roles._claimed_rank(given, job, rank, None) == expected


def test_a_worker_without_a_scheduler_says_where_it_looked_and_gives_up() -> None:
    environ = in_role("worker", DMLC_PS_ROOT_PORT=str(free_port()))
    with pytest.raises(
        ConnectTimeoutError, match=r"the scheduler at tcp://127.0.0.1:\d+ did not answer within 0.3 s"
    ):
        roles.find_topology(environ, connect_timeout=0.3)


def test_a_scheduler_whose_port_is_taken_says_so() -> None:
    desk = sockets.Desk("127.0.0.1")
    port = desk.address.rpartition(":")[2]
    try:
        with pytest.raises(
            ConfigurationError, match=f"cannot listen on 127.0.0.1, port {port}: Address already in use"
        ):
            roles.find_topology(in_role("scheduler", DMLC_PS_ROOT_PORT=port))
    finally:
        desk.close()


def test_servers_listen_on_loopback_where_all_are_on_one_machine() -> None:
    job = roles.read_dmlc(in_role("server", DMLC_NODE_HOST="192.0.2.7"))
    assert job is not None
    assert roles._host_of_server({}, job, True) == "127.0.0.1"


def test_servers_for_other_machines_need_permission() -> None:
    job = roles.read_dmlc(in_role("server", DMLC_NODE_HOST="192.0.2.7"))
    assert job is not None
    with pytest.raises(ConfigurationError, match=r"192\.0\.2\.7 .* set KVSTORE_ALLOW_PUBLIC_BIND=1 for all"):
        roles._host_of_server({}, job, False)
    assert roles._host_of_server({"KVSTORE_ALLOW_PUBLIC_BIND": "1"}, job, False) == "192.0.2.7"


def test_without_a_host_name_servers_listen_where_the_way_to_the_scheduler_begins() -> None:
    job = roles.read_dmlc(in_role("server"))
    assert job is not None
    assert roles._host_of_server({}, job, False) == "127.0.0.1"


@pytest.mark.parametrize(
    "environ",
    [
        {"RANK": "0", "WORLD_SIZE": "3"},
        {"SLURM_PROCID": "0", "SLURM_NTASKS": "3"},
        {"KVSTORE_RANK": "0", "KVSTORE_NUM_WORKERS": "3"},
    ],
)
def test_a_worker_that_is_about_to_train_alone_is_warned_under_every_launcher(
    environ: dict[str, str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    with caplog.at_level(logging.WARNING):
        kvtrainer.Trainer([torch.nn.Parameter(torch.zeros(2))], "sgd", kvstore="local")
    assert "keeps gradients in this process, although the job has 3 workers" in caplog.text
    assert list(environ)[1] in caplog.text


# The talk with a scheduler, over sockets.


class Scheduler:
    """A scheduler in a thread; as a context manager it ends with the block."""

    def __init__(self, timeout: float, workers: int = 1, servers: int = 1, patience: float = LIMIT) -> None:
        self._desk = sockets.Desk("127.0.0.1")
        self.address = self._desk.address
        self.heard: list[m.Question] = []
        turn = self._desk.turn
        self._desk.turn = lambda answer: turn(lambda q, now: self.heard.append(q) or answer(q, now))  # type: ignore[method-assign, func-returns-value]
        meeting = Rendezvous(workers, servers, patience)
        self.call = Call(lambda: sockets.keep_the_meeting(self._desk, meeting, timeout, patience))

    def __enter__(self) -> Scheduler:
        return self

    def __exit__(self, *_: object) -> None:
        self.call.outcome()
        self._desk.close()


def join(role: str, token: str, rank: int = -1) -> m.Join:
    return m.Join(token, role, 1, 1, rank, -1, "h", 0, ord(token), "m")


def asking(
    scheduler: Scheduler | sockets.Desk, question: m.Question, wanted: type[m.Answer], token: str
) -> Call:
    def ask() -> m.Answer:
        side = sockets.Asking(scheduler.address, token)
        try:
            return side.ask(question, wanted, LIMIT)
        finally:
            side.close()

    return Call(ask)


def keep_desk(
    desk: sockets.Desk, answer: Callable[[m.Question, float], Any], is_over: Callable[[], bool]
) -> None:
    """Answer questions until there is nothing more to wait for."""
    assert eventually(lambda: (desk.turn(answer), is_over())[1])


def test_all_meet_and_the_scheduler_ends_when_the_worker_says_that_it_is_done() -> None:
    with Scheduler(LIMIT) as scheduler:
        worker = asking(scheduler, join("worker", "w"), m.Table, "w")
        assert asking(scheduler, join("server", "s"), m.Assigned, "s").outcome() == m.Assigned(0, True)
        ready = m.Ready("s", "tcp://h:1", "tcp://h:2")
        table = m.Table(0, ("tcp://h:1",), ("tcp://h:2",), ())
        server = asking(scheduler, ready, m.Table, "s")
        assert worker.outcome() == table
        assert server.outcome() == replace(table, workers=("w",))
        presence = sockets.Presence("w", [scheduler.address])
        assert eventually(lambda: m.Alive("w") in scheduler.heard)
        presence.close()
        assert scheduler.call.outcome() is None


def test_two_that_claim_one_rank_and_the_scheduler_all_raise() -> None:
    with Scheduler(LIMIT) as scheduler:
        calls = [asking(scheduler, join("worker", token, rank=0), m.Table, token) for token in "ab"]
        texts = raised([call.outcome() for call in (*calls, scheduler.call)], ConfigurationError)
        assert all("both have rank 0" in text for text in texts)


def test_at_the_deadline_all_that_are_there_are_told_who_is_missing() -> None:
    desk, meeting, came = sockets.Desk("127.0.0.1"), Rendezvous(1, 1, LIMIT), list[m.Question]()
    try:
        side = asking(desk, join("worker", "w"), m.Table, "w")
        keep_desk(desk, lambda q, now: came.append(q) or meeting.handle(q, now), lambda: bool(came))
        keeping = Call(lambda: sockets.keep_the_meeting(desk, meeting, SOON, LIMIT))
        texts = raised([side.outcome(), keeping.outcome()], ConnectTimeoutError)
        assert texts == [f"after {SOON:g} s there is no server but 0 of 1 (nobody)"] * 2
    finally:
        desk.close()


def test_nonsense_at_the_desk_is_answered_and_changes_nothing() -> None:
    desk, meeting = sockets.Desk("127.0.0.1"), Rendezvous(1, 1, LIMIT)
    context = sockets.zmq.Context()
    socket = context.socket(sockets.zmq.DEALER)
    try:
        socket.connect(desk.address)
        socket.send_multipart([b"\xc1", b"", b"nonsense"])
        keep_desk(desk, meeting.handle, lambda: bool(socket.poll(0)))
        answer = m.decode_answer(socket.recv())
        assert isinstance(answer, m.Refused)
        assert type(answer.error()) is ProtocolError
        assert not meeting.is_complete
        assert meeting.failure is None
    finally:
        socket.close()
        context.term()
        desk.close()


def test_a_presence_ends_quickly_when_nobody_listens() -> None:
    presence = sockets.Presence("w", [f"tcp://127.0.0.1:{free_port()}"])
    presence.close()
    assert eventually(lambda: "kvstore-presence" not in [thread.name for thread in threading.enumerate()])
