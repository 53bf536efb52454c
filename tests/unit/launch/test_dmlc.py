"""Jobs for MXNet's launcher: which variables count, what is refused at once, and the talk with a scheduler."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable

import pytest
import torch

import kvtrainer
from kvstore_server.engine.engine import Engine
from kvstore_server.engine.namespace import EngineConfig
from kvstore_server.errors import ConfigurationError, ConnectTimeoutError, ProtocolError, RoundAbortedError
from kvstore_server.protocol import messages as m
from kvstore_server.server import Server, ServerOptions, make_server
from kvtrainer.jobs import dmlc
from kvtrainer.jobs.dmlc import DmlcJob, DmlcSchedulerClient, read_dmlc
from kvtrainer.jobs.scheduler import Scheduler
from kvtrainer.jobs.topology import find_topology
from tests.support.limits import FOREVER, LIMIT
from tests.support.processes import Call, config_of_server, held_port, raised, serving

DMLC = {
    "DMLC_PS_ROOT_URI": "127.0.0.1",
    "DMLC_PS_ROOT_PORT": "9",
    "DMLC_NUM_WORKER": "4",
    "DMLC_NUM_SERVER": "2",
}


def in_role(role: str, **more: str) -> dict[str, str]:
    return {**DMLC, "DMLC_ROLE": role, **more}


def job_of(role: str, **more: str) -> DmlcJob:
    job = read_dmlc(in_role(role, **more))
    assert job is not None
    return job


# What the variables say.


def test_without_a_role_there_is_no_job_of_mxnets_launcher() -> None:
    assert read_dmlc(DMLC) is None


def test_what_mxnets_launcher_says_is_read() -> None:
    job = job_of("worker", DMLC_TASK_ID="7", DMLC_NODE_HOST="n1")
    assert (job.role, job.root, job.num_workers, job.num_servers) == ("worker", "tcp://127.0.0.1:9", 4, 2)
    assert (job.rank, job.task, job.node_host) == (None, 7, "n1")


@pytest.mark.parametrize(
    ("role", "extra", "rank"),
    [
        ("worker", {"DMLC_WORKER_ID": "3"}, 3),
        ("worker", {"DMLC_RANK": "2"}, 2),
        ("worker", {"DMLC_WORKER_ID": "3", "DMLC_RANK": "2"}, 3),
        ("worker", {"DMLC_SERVER_ID": "1"}, None),
        ("server", {"DMLC_SERVER_ID": "1"}, 1),
        ("server", {"DMLC_WORKER_ID": "3"}, None),
        ("scheduler", {"DMLC_RANK": "5"}, None),
    ],
)
def test_a_rank_is_that_of_the_processs_own_role(role: str, extra: dict[str, str], rank: int | None) -> None:
    assert job_of(role, **extra).rank == rank


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"DMLC_ROLE": "joint"}, "DMLC_ROLE is 'joint'"),
        ({"DMLC_PS_ROOT_URI": ""}, "DMLC_PS_ROOT_URI is not set"),
        ({"DMLC_PS_ROOT_PORT": ""}, "DMLC_PS_ROOT_PORT is not set"),
        ({"DMLC_NUM_WORKER": ""}, "DMLC_NUM_WORKER is not set"),
        ({"DMLC_NUM_SERVER": "0"}, "DMLC_NUM_SERVER is 0"),
        ({"DMLC_PS_ROOT_PORT": "0"}, "127.0.0.1:0"),
        ({"DMLC_WORKER_ID": "4"}, "DMLC_WORKER_ID is 4; a job with 4 workers"),
        ({"DMLC_TASK_ID": "x"}, "DMLC_TASK_ID is 'x'"),
    ],
)
def test_what_mxnets_launcher_must_say_is_checked(extra: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        read_dmlc({**in_role("worker"), **extra})


# Roles.


@pytest.mark.parametrize("role", ["scheduler", "server"])
def test_a_local_store_is_made_in_every_role(role: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in in_role(role).items():
        monkeypatch.setenv(name, value)
    kv = kvtrainer.kvstore.create("local")
    kv.init("w", torch.ones(2))
    parameter, out = torch.nn.Parameter(torch.zeros(2)), torch.zeros(2)
    kv.pull("w", out=out)
    trainer = kvtrainer.Trainer([parameter], "sgd", {"learning_rate": 1.0}, kvstore=None)
    parameter.sum().backward()
    trainer.step(1)
    assert (out.tolist(), parameter.tolist()) == ([1, 1], [-1, -1])


@pytest.mark.parametrize("role", ["scheduler", "server"])
def test_a_role_beside_servers_that_run_already_is_a_contradiction(role: str) -> None:
    with pytest.raises(ConfigurationError, match=f"DMLC_ROLE is '{role}', but KVSTORE_SERVERS"):
        find_topology(in_role(role, KVSTORE_SERVERS="h:1"))
    with pytest.raises(ConfigurationError, match="unset one of them"):
        find_topology(in_role(role), servers=["h:1"])


@pytest.mark.parametrize(
    ("role", "own"),
    [("server", {"KVSTORE_RANK": "1", "KVSTORE_NUM_WORKERS": "4"}), ("worker", {"DMLC_WORKER_ID": "1"})],
)
def test_a_process_that_knows_rank_and_servers_asks_no_scheduler(role: str, own: dict[str, str]) -> None:
    topology = find_topology(in_role(role, KVSTORE_SERVERS="h:1", **own))
    assert (topology.rank, topology.num_workers, topology.servers) == (1, 4, ("tcp://h:1",))


def test_a_worker_that_is_given_another_number_of_workers_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="num_workers is 3, but DMLC_NUM_WORKER is 4"):
        find_topology(in_role("worker"), num_workers=3)


@pytest.mark.parametrize(
    ("environ", "rank", "expected"),
    [
        ({}, None, None),
        ({"DMLC_WORKER_ID": "1"}, None, 1),
        ({"DMLC_WORKER_ID": "1", "KVSTORE_RANK": "0"}, None, 0),
        ({"DMLC_WORKER_ID": "1", "KVSTORE_RANK": "1"}, 0, 0),
        ({"KVSTORE_NUM_WORKERS": "4"}, None, None),
        ({"RANK": "1", "WORLD_SIZE": "2"}, None, None),
    ],
)
def test_a_worker_claims_one_rank(environ: dict[str, str], rank: int | None, expected: int | None) -> None:
    given = in_role("worker", **environ)
    assert dmlc._claimed_dmlc_rank(given, job_of("worker", **environ), rank, None) == expected


def test_a_worker_without_a_scheduler_says_where_it_looked_and_gives_up() -> None:
    environ = in_role("worker", DMLC_PS_ROOT_PORT=str(held_port()))
    with pytest.raises(ConnectTimeoutError, match=r"tcp://127.0.0.1:\d+ .* 0.3 s"):
        find_topology(environ, connect_timeout=0.3)


def test_servers_listen_on_loopback_where_all_are_on_one_machine() -> None:
    job = job_of("server", DMLC_NODE_HOST="192.0.2.7")
    assert dmlc._dmlc_server_host({}, job, True) == "127.0.0.1"


def test_servers_for_other_machines_need_permission() -> None:
    job = job_of("server", DMLC_NODE_HOST="192.0.2.7")
    with pytest.raises(
        ConfigurationError, match=r"192\.0\.2\.7 .* KVSTORE_KEYS=DIR .* KVSTORE_ALLOW_UNAUTHENTICATED_BIND=1"
    ):
        dmlc._dmlc_server_host({}, job, False)
    assert dmlc._dmlc_server_host({"KVSTORE_KEYS": "keys"}, job, False) == "192.0.2.7"
    assert dmlc._dmlc_server_host({"KVSTORE_ALLOW_UNAUTHENTICATED_BIND": "1"}, job, False) == "192.0.2.7"


def test_without_a_host_name_servers_listen_where_the_way_to_the_scheduler_begins() -> None:
    job = job_of("server")
    assert dmlc._dmlc_server_host({}, job, False) == "127.0.0.1"


# When a server ends.


class Group:
    """A server of a job of two workers, as it sees them: 20 s of silence are death."""

    def __init__(self) -> None:
        self._engine = Engine(EngineConfig(dead_after=20.0))
        self._workers = dmlc._DmlcWorkers(self._engine, 2, 20.0, 0.0)
        self._sessions: dict[int, m.Welcome] = {}

    def come(self, rank: int, now: float) -> None:
        own = bytes([rank]) * 16
        hello = m.Hello(dmlc._GROUP, rank, 3, 0, 1, "", "h", own, (own,))
        [out] = self._engine.handle(own, m.Request(0, 0, 1, hello), now)
        assert isinstance(out.reply.body, m.Welcome)
        self._sessions[rank] = out.reply.body

    def say(self, rank: int, body: m.RequestBody, now: float) -> None:
        session = self._sessions[rank]
        self._engine.handle(bytes([rank]) * 16, m.Request(session.run_id, session.session, 2, body), now)

    def are_gone(self, now: float) -> bool:
        self._engine.tick(now)
        return self._workers.are_gone(now)


def test_a_server_ends_when_every_worker_has_left_even_one_by_one() -> None:
    group = Group()
    group.come(0, 1.0)
    group.say(0, m.Leave("done", True), 2.0)
    assert not group.are_gone(3.0)
    group.come(1, 4.0)
    assert not group.are_gone(5.0)
    group.say(1, m.Leave("done", True), 6.0)
    assert group.are_gone(6.0)


def test_a_server_ends_when_those_who_have_not_left_are_silent_or_never_came() -> None:
    group = Group()
    group.come(0, 1.0)
    for now in range(2, 30):
        assert not group.are_gone(now)
        group.say(0, m.Heartbeat(), now)
    assert not group.are_gone(29.0 + 20.0)
    assert group.are_gone(29.1 + 20.0)


# The talk with a scheduler, over sockets.


def scheduler(workers: int, servers: int) -> Server:
    service = Scheduler(workers, servers, FOREVER, LIMIT, time.monotonic())
    server = Server(service, ServerOptions(drain_timeout=LIMIT))
    server.stop_when(service.is_over)
    return server


def ask(root: str, question: m.RequestBody, cancelled: Callable[[], bool] = lambda: False) -> object:
    client = DmlcSchedulerClient(root)
    try:
        return client.ask(question, LIMIT, cancelled)
    finally:
        client.close()


def test_two_that_claim_one_rank_both_raise_what_the_scheduler_found() -> None:
    question = m.JoinJob("worker", 2, 1, 0, -1, "h", 0, 1, "m")
    with serving(scheduler(2, 1)) as server:
        calls = [Call(lambda: ask(server.endpoint, question)) for _ in "ab"]
        texts = raised([call.outcome() for call in calls], ConfigurationError)
        assert texts == [str(server.service.failure)] * 2


def test_one_that_cannot_go_on_tells_the_others_through_the_scheduler() -> None:
    """As a server that gets SIGTERM while it waits for the other servers."""
    first, second = (m.JoinJob("worker", 3, 1, rank, -1, "h", 0, rank, "m") for rank in range(2))
    with serving(scheduler(3, 1)) as server:
        waiting = Call(lambda: ask(server.endpoint, first))
        polls = itertools.count()
        with pytest.raises(ConnectTimeoutError, match="no server but 0 of 1"):
            ask(server.endpoint, second, lambda: next(polls) > 10)
        [text] = raised([waiting.outcome()], RoundAbortedError)
        assert "(process 1) gave up: ConnectTimeoutError: " in text


def test_a_server_in_the_place_of_the_scheduler_is_told_apart() -> None:
    with serving(make_server(config_of_server(), ServerOptions())) as server:
        environ = in_role("worker", DMLC_PS_ROOT_PORT=server.endpoint.rpartition(":")[2])
        with pytest.raises(ProtocolError, match=server.endpoint):
            find_topology(environ, connect_timeout=LIMIT)
