"""Jobs that go on without workers that are lost, and refuse what is not possible while members may change."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import kvtrainer
from kvtrainer.errors import ConfigurationError, FencedError
from kvtrainer.kvstore import DistKVStore
from tests.integration.test_elastic import first_weights, gradient, plain_loop
from tests.support.forks import ROOT, fork_server, inherited
from tests.support.processes import Processes, new_name, together

LOST_AT = 3
SCHEDULE = [(0, 1, 2)] * LOST_AT + [(0, 2)] * 3


@pytest.fixture(scope="module")
def two_servers() -> Iterator[list[str]]:
    with Processes() as started:
        servers = started.servers(2, "--spread-from", "1", "--rejoin-timeout", "0.5", "--dead-after", "3")
        yield [one.address for one in servers]


def open_store(addresses: Sequence[str], rank: int, name: str, **options: Any) -> DistKVStore:
    more = {"num_workers": 3, "elastic": "1..4", "timeout": 60.0, **options}
    return DistKVStore("dist_sync", rank=rank, servers=list(addresses), namespace=name, **more)


def train(store: DistKVStore, rank: int, end: int) -> tuple[kvtrainer.Trainer, dict[str, torch.nn.Parameter]]:
    weights = {key: torch.nn.Parameter(value) for key, value in first_weights().items()}
    options = {"learning_rate": 0.1, "momentum": 0.9}
    trainer = kvtrainer.Trainer(weights, "torch:SGD", options, kvstore=store)
    for step in range(trainer.resume().round, end):
        for key, grad in gradient({k: w.detach() for k, w in weights.items()}, rank, step).items():
            weights[key].grad = grad
        trainer.step()
    return trainer, weights


def test_the_others_go_on_without_a_worker_that_fails(two_servers: list[str]) -> None:
    name = new_name()

    def work(rank: int) -> dict[str, torch.Tensor]:
        store = open_store(two_servers, rank, name)
        trainer, weights = train(store, rank, LOST_AT if rank == 1 else len(SCHEDULE))
        if rank == 1:
            trainer.__exit__(ValueError, ValueError("it fails here"), None)
        else:
            assert trainer.members == (0, 2)
            trainer.close()
        return {key: weight.detach() for key, weight in weights.items()}

    found = together(*[lambda rank=rank: work(rank) for rank in range(3)])
    expected = plain_loop(SCHEDULE, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), None)
    for rank in (0, 2):
        for key, value in expected[-1].items():
            assert torch.equal(found[rank][key], value)


def pause(name: str, *addresses: str) -> None:
    """In a process of its own: be rank 1, stop after two steps, and go on."""
    trainer, weights = train(open_store(addresses, 1, name), 1, 2)
    os.kill(os.getpid(), signal.SIGSTOP)
    for weight in weights.values():
        weight.grad = weight.detach()
    trainer.step()


def test_a_worker_that_was_paused_for_too_long_is_fenced(two_servers: list[str], tmp_path: Path) -> None:
    name, output = new_name(), tmp_path / "output"
    with output.open("wb") as out, open(os.devnull, "rb") as nothing:
        streams = [nothing.fileno(), out.fileno(), out.fileno()]
        command = ["-m", "tests.integration.test_elastic_losses", name, *two_servers]
        paused = fork_server().start(command, inherited(), ROOT, streams)
        try:

            def work(rank: int) -> tuple[int, ...]:
                trainer, _ = train(open_store(two_servers, rank, name), rank, 5)
                members = trainer.members
                trainer.close()
                return members

            assert together(lambda: work(0), lambda: work(2)) == [(0, 2), (0, 2)]
            os.kill(paused.pid, signal.SIGCONT)
            assert paused.wait(60.0) == 75
        finally:
            paused.kill()
            paused.wait()
    assert FencedError.__name__ in output.read_text()


def test_what_is_not_possible_is_refused(two_servers: list[str]) -> None:
    name = new_name()
    store = open_store(two_servers, 0, name, num_workers=1)
    with pytest.raises(ConfigurationError, match="resume"):
        store.init("k", torch.zeros(3))
    with pytest.raises(ConfigurationError, match="barrier"):
        store.barrier()
    trainer = kvtrainer.Trainer([torch.nn.Parameter(torch.zeros(2))], "sgd", kvstore=store)
    trainer.resume()
    with pytest.raises(ConfigurationError, match="at least 1"):
        trainer.leave()
    with pytest.raises(ConfigurationError, match="KVSTORE_ELASTIC"):
        open_store(two_servers, 1, name, num_workers=2)
    with pytest.raises(ConfigurationError, match="dist_sync"):
        DistKVStore("dist_async", rank=0, num_workers=1, servers=two_servers, elastic="1..2")
    trainer.close()
    store.close()


@pytest.mark.parametrize(
    "options", [{"update_on_kvstore": False}, {"compression_params": {"type": "2bit", "threshold": 0.5}}]
)
def test_what_would_end_with_a_worker_that_leaves_is_refused(
    two_servers: list[str], options: dict[str, Any]
) -> None:
    store = open_store(two_servers, 0, new_name(), num_workers=1)
    trainer = kvtrainer.Trainer([torch.nn.Parameter(torch.zeros(2000))], "sgd", kvstore=store, **options)
    with pytest.raises(ConfigurationError):
        trainer.resume()
    trainer.close()
    store.close()


def test_leave_is_refused_where_the_number_of_workers_is_fixed(two_servers: list[str]) -> None:
    store = open_store(two_servers, 0, new_name(), num_workers=1, elastic=None)
    trainer = kvtrainer.Trainer([torch.nn.Parameter(torch.zeros(2))], "sgd", kvstore=store)
    trainer.resume()
    assert trainer.members == (0,)
    with pytest.raises(ConfigurationError, match="MIN"):
        trainer.leave()
    trainer.close()
    store.close()


if __name__ == "__main__":
    pause(*sys.argv[1:])
