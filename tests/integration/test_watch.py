"""A job that somebody looks at while it runs: real servers, their workers, and kvtop."""

from __future__ import annotations

import json
import signal
import socket
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from http.client import HTTPException
from threading import Thread
from typing import Any

import pytest
import torch
from torch.nn import Parameter

import kvtrainer
from kvstore_server.probe import probe_servers
from kvtrainer.errors import ConfigurationError
from kvtrainer.kvstore import DistKVStore
from kvtrainer.watch import top
from tests.support.limits import LIMIT
from tests.support.processes import Members, Process, Processes, eventually, together


def addresses(servers: Sequence[Process]) -> list[str]:
    return [server.address for server in servers]


def seen(servers: Sequence[Process], found: Callable[[Mapping[str, Any]], bool]) -> Mapping[str, Any]:
    """Look at the one job of the first server until that is true of it."""
    kept: list[Mapping[str, Any]] = []

    def is_there() -> bool:
        [facts] = probe_servers(addresses(servers)[:1], LIMIT)
        assert facts is not None
        kept.extend(facts["jobs"])
        return bool(kept) and found(kept[-1])

    assert eventually(is_there)
    return kept[-1]


def test_who_is_waited_for_is_seen_and_then_that_it_was_late(
    processes: Processes, members: Members, capsys: pytest.CaptureFixture[str]
) -> None:
    servers = processes.servers(1)
    pair = members.pair(servers)
    together(*(lambda kv=kv: kv.init("w", torch.zeros(4)) for kv in pair))
    first = Thread(target=pair[0].push, args=("w", torch.ones(4)))
    first.start()
    waiting = seen(servers, lambda job: bool(job["waits"]))
    assert waiting["waits"][0]["missing"] == [1]
    assert top.main(["--json", "--interval", "0.1", servers[0].address]) == 0
    [job] = json.loads(capsys.readouterr().out)["jobs"]
    assert job["waits"][0]["missing"] == [1]
    pair[1].push("w", torch.ones(4))
    first.join(LIMIT)
    over = seen(servers, lambda job: job["rounds"] == 2 and not job["waits"])
    late = [worker["late"] for worker in over["workers"]]
    assert late[0] < late[1]


def test_what_a_worker_tells_of_itself_comes_with_its_signs_of_life(
    processes: Processes, members: Members
) -> None:
    servers = processes.servers(2)
    weights = Parameter(torch.zeros(8))
    trainer = kvtrainer.Trainer([weights], "sgd", kvstore=members.join(servers, 0, 1, "alone"))
    for _ in range(3):
        weights.grad = torch.ones(8)
        trainer.step(1)
        trainer.report(samples=5, loss=0.25)

    def told() -> Mapping[str, float]:
        """What is told of the worker on the server that holds its weights."""
        jobs = [job for facts in probe_servers(addresses(servers), LIMIT) if facts for job in facts["jobs"]]
        found: Mapping[str, float] = next(job["workers"][0]["says"] for job in jobs if job["keys"])
        return found

    assert eventually(lambda: told().get("samples") == 15)
    says = told()
    assert (says["steps"], says["loss"]) == (3, 0.25)
    assert says["step_seconds"] >= says["wait_seconds"] > 0


def test_workers_know_their_rank_before_the_first_step_and_only_the_first_one_writes(
    processes: Processes, members: Members
) -> None:
    class Writer:
        def __init__(self) -> None:
            self.steps: list[int] = []

        def add_scalar(self, tag: str, value: float, step: int) -> None:
            self.steps += [step] if tag == "train/lr" else []

    def train(store: DistKVStore) -> tuple[int, int, list[int]]:
        weights, writer = Parameter(torch.zeros(8)), Writer()
        trainer = kvtrainer.Trainer([weights], "sgd", kvstore=store)
        place = trainer.rank, trainer.num_workers
        trainer.log_to(writer)
        for _ in range(2):
            weights.grad = torch.ones(8)
            trainer.step(1)
        return *place, writer.steps

    pair = members.pair(processes.servers(1))
    assert together(*(lambda kv=kv: train(kv) for kv in pair)) == [(0, 2, [1, 2]), (1, 2, [])]


def test_a_server_shows_itself_on_a_page_which_ends_with_it_however_it_ends(processes: Processes) -> None:
    [server] = processes.servers(1, "--http", "127.0.0.1:0")
    page = server.line().rpartition(" ")[2]

    def view() -> list[Mapping[str, Any]] | None:
        """Return what the page has seen; None if there is no page."""
        try:
            with urllib.request.urlopen(page + "view.json", timeout=LIMIT) as answer:
                found: list[Mapping[str, Any]] = json.load(answer)
                return found
        except (OSError, HTTPException):  # the latter if it ends in the middle of an answer
            return None

    assert eventually(lambda: bool(view()))
    assert [one["address"] for one in (view() or [])[-1]["servers"]] == [server.address]
    server.signal(signal.SIGKILL)
    assert eventually(lambda: view() is None)


def test_a_server_serves_its_job_where_its_page_cannot_be(processes: Processes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        [server] = processes.servers(1, "--http", f"127.0.0.1:{other.getsockname()[1]}")
        assert eventually(lambda: "cannot serve the page" in server.stderr())
        assert probe_servers([server.address], LIMIT) != [None]
        server.signal(signal.SIGTERM)
        assert server.end()[0] == 0


def test_servers_that_are_gone_or_stopped_do_not_hide_the_others(
    processes: Processes, capsys: pytest.CaptureFixture[str]
) -> None:
    servers = processes.servers(3)
    servers[0].signal(signal.SIGKILL)
    servers[0].end()
    servers[1].freeze()
    assert top.main(["--json", "--interval", "0.5", *addresses(servers)]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [one["is_there"] for one in told["servers"]] == [False, False, True]


def test_a_report_of_what_is_no_number_is_refused_and_changes_nothing() -> None:
    trainer = kvtrainer.Trainer([Parameter(torch.zeros(2))], "sgd", kvstore=None)
    for wrong in (
        {"samples": -1},
        {"samples": 1.5},
        {"samples": True},
        {"loss": torch.zeros(1)},
        {"loss": "0"},
    ):
        with pytest.raises(ConfigurationError):
            trainer.report(**wrong)
    trainer.report(samples=2)
    trainer.report(loss=float("nan"))
