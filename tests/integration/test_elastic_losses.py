"""Jobs that go on without workers that are lost, and refuse what is not possible while members may change."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import kvtrainer
from kvstore_server.protocol import messages as m
from kvtrainer.client import round as round_module
from kvtrainer.client.connection import Connection
from kvtrainer.client.session import Session
from kvtrainer.common.env import TRANSPORT
from kvtrainer.errors import ConfigurationError, FencedError, WorkerLostError
from kvtrainer.kvstore import DistKVStore
from tests.integration import registered_optimizer
from tests.integration.test_elastic import KEYS, first_weights, gradient, plain_loop, sgd
from tests.support.forks import ROOT, Fork, fork_server, inherited
from tests.support.processes import Processes, new_name, together

LOST_AT = 3
LARGE = 5000, 40
"""The shape of a key whose rounds are pipelined between hosts."""
SCHEDULE = [(0, 1, 2)] * LOST_AT + [(0, 2)] * 3


LIMITS = "--spread-from", "1", "--rejoin-timeout", "0.5", "--dead-after", "1.5"


@pytest.fixture(scope="module")
def two_servers() -> Iterator[list[str]]:
    with Processes() as started:
        yield [one.address for one in started.servers(2, *LIMITS, "--import", registered_optimizer.__name__)]


@pytest.fixture(scope="module")
def durable_servers() -> Iterator[list[str]]:
    with Processes() as started:
        yield [one.address for one in started.servers(2, *LIMITS, "--supervise", "--durability", "process")]


def open_store(addresses: Sequence[str], rank: int, name: str, **options: Any) -> DistKVStore:
    more = {"num_workers": 3, "elastic": "1..4", "timeout": 60.0, **options}
    return DistKVStore("dist_sync", rank=rank, servers=list(addresses), namespace=name, **more)


SGD = "torch:SGD", {"lr": 0.1, "momentum": 0.9}
SHIFT = registered_optimizer.Shift, {"a": 0.1, "b": 0.01, "note": ""}
"""An optimizer that may raise, so that servers keep the former values for it."""


def train(
    store: DistKVStore, rank: int, end: int, optimizer: tuple[Any, dict[str, Any]] = SGD, **options: Any
) -> tuple[kvtrainer.Trainer, dict[str, torch.nn.Parameter]]:
    weights = {key: torch.nn.Parameter(value) for key, value in first_weights().items()}
    trainer = kvtrainer.Trainer(weights, *optimizer, kvstore=store, **options)
    for step in range(trainer.resume().round, end):
        give(weights, rank, step)
        trainer.step()
    return trainer, weights


def train_to_the_end(
    store: DistKVStore, rank: int, end: int = len(SCHEDULE), **options: Any
) -> tuple[tuple[int, ...], dict[str, torch.Tensor]]:
    """Return the members of the last step, which can change as soon as one of them has made it, and the weights."""
    trainer, weights = train(store, rank, end - 1, **options)
    members = trainer.members
    give(weights, rank, end - 1)
    trainer.step()
    trainer.close()
    return members, {key: weight.detach() for key, weight in weights.items()}


def give(weights: dict[str, torch.nn.Parameter], rank: int, step: int) -> None:
    for key, grad in gradient({k: w.detach() for k, w in weights.items()}, rank, step).items():
        weights[key].grad = grad


def test_the_others_go_on_without_a_worker_that_fails(two_servers: list[str]) -> None:
    name = new_name()

    def failing_worker() -> None:
        trainer, _ = train(open_store(two_servers, 1, name), 1, LOST_AT)
        trainer.__exit__(ValueError, ValueError("it fails here"), None)

    def work(rank: int) -> tuple[tuple[int, ...], dict[str, torch.Tensor]]:
        return train_to_the_end(open_store(two_servers, rank, name), rank)

    _, *found = together(failing_worker, lambda: work(0), lambda: work(2))
    are_those_of_the_others(found, sgd)


def are_those_of_the_others(found: Sequence[Any], make: Callable[[Any], torch.optim.Optimizer]) -> None:
    """Check what `train_to_the_end` has returned to ranks 0 and 2."""
    expected = plain_loop(SCHEDULE, make, None)[-1]
    for one in found:
        if isinstance(one, BaseException):
            raise one
        members, weights = one
        assert members == (0, 2)
        assert all(torch.equal(weights[key], expected[key]) for key in expected)


@contextmanager
def rank_1(body: Callable[..., None], output: Path, *arguments: str) -> Iterator[Fork]:
    """Run a function of this module in a process of its own."""
    with output.open("wb") as out, open(os.devnull, "rb") as nothing:
        streams = [nothing.fileno(), out.fileno(), out.fileno()]
        command = ["-m", "tests.integration.test_elastic_losses", body.__name__, *arguments]
        process = fork_server().start(command, inherited(), ROOT, streams)
        try:
            yield process
        finally:
            process.kill()
            process.wait()


def die_between_commits(kind: str, reached: str, name: str, *addresses: str) -> None:
    """Be rank 1, and die when the server `reached` has applied a step whose commit the other one never got."""
    optimizer, more = (SHIFT, {"update_on_kvstore": True}) if kind == "shift" else (SGD, {})
    if kind == "far":
        os.environ[TRANSPORT] = "tcp"
        Connection.is_remote = lambda *_: True  # type: ignore[method-assign]
        KEYS["a"] = LARGE
    store = open_store(addresses, 1, name)
    trainer, weights = train(store, 1, LOST_AT, optimizer, **more)
    session = store._clients[-1]._session
    send = session.send

    def send_one_commit(server: int, number: int, body: m.RequestBody, priority: int = 0) -> None:
        if server == int(reached) or not isinstance(body, m.Contribute) or not len(body.commits):
            send(server, number, body, priority)

    def die_when_it_has_answered(point: str) -> None:
        if point == "worker.round.answered":
            os.kill(os.getpid(), signal.SIGKILL)

    session.send = send_one_commit  # type: ignore[method-assign]
    round_module.failpoint = die_when_it_has_answered  # type: ignore[attr-defined]
    give(weights, 1, LOST_AT)
    trainer.step()


def goes_on_after_a_partial_commit(
    addresses: Sequence[str], reached: int, kind: str, output: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Check that the others make the step again without the worker that has died in it."""
    name = new_name()
    optimizer, more = (SHIFT, {"update_on_kvstore": True}) if kind == "shift" else (SGD, {})

    def plain(parameters: Any) -> torch.optim.Optimizer:
        return registered_optimizer.Shift(parameters, **SHIFT[1]) if kind == "shift" else sgd(parameters)

    def work(rank: int) -> tuple[tuple[int, ...], dict[str, torch.Tensor]]:
        return train_to_the_end(open_store(addresses, rank, name), rank, optimizer=optimizer, **more)

    with rank_1(die_between_commits, output, kind, str(reached), name, *addresses) as dead:
        found = together(lambda: work(0), lambda: work(2))
        assert dead.wait(60.0) == -signal.SIGKILL
    assert "made again" in caplog.text
    are_those_of_the_others(found, plain)


@pytest.mark.parametrize("reached", [0, 1])
def test_a_commit_that_only_some_servers_have_counts_nowhere(
    reached: int, durable_servers: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    goes_on_after_a_partial_commit(durable_servers, reached, "sgd", tmp_path / "output", caplog)


@pytest.mark.parametrize("reached", [0, 1])
def test_it_counts_nowhere_if_the_optimizer_is_user_defined(
    reached: int, two_servers: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    goes_on_after_a_partial_commit(two_servers, reached, "shift", tmp_path / "output", caplog)


@pytest.mark.full
@pytest.mark.usefixtures("far")
def test_it_counts_nowhere_if_rounds_are_pipelined(
    durable_servers: list[str],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(KEYS, "a", LARGE)
    goes_on_after_a_partial_commit(durable_servers, 1, "far", tmp_path / "output", caplog)


@pytest.mark.parametrize("reached", [0, 1])
def test_servers_that_cannot_take_it_back_end_the_job(
    reached: int, two_servers: list[str], tmp_path: Path
) -> None:
    name = new_name()

    def work(rank: int) -> str:
        with pytest.raises(WorkerLostError) as caught:
            train(open_store(two_servers, rank, name), rank, len(SCHEDULE))
        return str(caught.value)

    arguments = "sgd", str(reached), name, *two_servers
    with rank_1(die_between_commits, tmp_path / "output", *arguments):
        texts = together(lambda: work(0), lambda: work(2))
    assert all("saved states" in str(text) for text in texts), texts


def test_the_others_go_on_without_a_worker_that_raises_in_the_middle_of_a_step(
    durable_servers: list[str],
) -> None:
    name = new_name()

    def raising_worker() -> None:
        store = open_store(durable_servers, 1, name)
        trainer, weights = train(store, 1, LOST_AT)
        session = store._clients[-1]._session
        send = session.send

        def send_half(server: int, number: int, body: m.RequestBody, priority: int = 0) -> None:
            if server == 0 and isinstance(body, m.Contribute) and len(body.commits):
                raise ValueError("it fails between its two commits")
            send(server, number, body, priority)

        session.send = send_half  # type: ignore[method-assign]
        give(weights, 1, LOST_AT)
        with pytest.raises(ValueError, match="two commits"), trainer:
            trainer.step()

    def work(rank: int) -> tuple[tuple[int, ...], dict[str, torch.Tensor]]:
        return train_to_the_end(open_store(durable_servers, rank, name), rank)

    _, *found = together(raising_worker, lambda: work(0), lambda: work(2))
    are_those_of_the_others(found, sgd)


def pause(name: str, *addresses: str) -> None:
    """Be rank 1, stop after two steps, and go on."""
    trainer, weights = train(open_store(addresses, 1, name), 1, 2)
    os.kill(os.getpid(), signal.SIGSTOP)
    for weight in weights.values():
        weight.grad = weight.detach()
    trainer.step()


def test_a_worker_that_was_paused_for_too_long_is_fenced(two_servers: list[str], tmp_path: Path) -> None:
    name, output = new_name(), tmp_path / "output"

    def work(rank: int) -> tuple[int, ...]:
        return train_to_the_end(open_store(two_servers, rank, name), rank, 5)[0]

    with rank_1(pause, output, name, *two_servers) as paused:
        assert together(lambda: work(0), lambda: work(2)) == [(0, 2), (0, 2)]
        os.kill(paused.pid, signal.SIGCONT)
        assert paused.wait(60.0) == 75
    assert FencedError.__name__ in output.read_text()


def test_barriers_and_keys_of_a_store_are_refused_before_anything_is_sent(
    two_servers: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    store, sent, value = open_store(two_servers, 0, new_name(), num_workers=1), list[Any](), torch.zeros(3)
    trainer = kvtrainer.Trainer([torch.nn.Parameter(torch.zeros(2))], "sgd", kvstore=store)
    trainer.resume()
    calls: list[Callable[[], object]] = [
        store.barrier,
        lambda: store.init("k", value),
        lambda: store.init(["k", "l"], [value, value]),
        lambda: store.broadcast("k", value, value),
        lambda: store.push("k", value),
        lambda: store.pull("k", value),
        lambda: store.set_optimizer("sgd"),
    ]
    with monkeypatch.context() as patch:
        patch.setattr(Session, "send", lambda *of_request: sent.append(of_request))
        for call in calls:
            with pytest.raises(ConfigurationError, match="KVSTORE_ELASTIC"):
                call()
    assert not sent
    trainer.step(1, ignore_stale_grad=True)
    trainer.close()
    store.close()


def test_a_trainer_that_does_not_resume_or_adds_parameters_is_refused(two_servers: list[str]) -> None:
    store = open_store(two_servers, 0, new_name(), num_workers=1)
    parameter = torch.nn.Parameter(torch.zeros(2))
    trainer = kvtrainer.Trainer([parameter], "sgd", kvstore=store)
    with pytest.raises(ConfigurationError, match="resume"):
        trainer.step(1, ignore_stale_grad=True)
    trainer.close()
    trainer = kvtrainer.Trainer([parameter], "sgd", kvstore=store)
    trainer.resume()
    trainer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(3))]})
    with pytest.raises(ConfigurationError, match="added"):
        trainer.step(1, ignore_stale_grad=True)
    trainer.close()
    store.close()


def test_a_second_trainer_is_refused_while_the_first_one_is_open(two_servers: list[str]) -> None:
    store = open_store(two_servers, 0, new_name(), num_workers=1)

    def make() -> kvtrainer.Trainer:
        return kvtrainer.Trainer([torch.nn.Parameter(torch.zeros(2))], "sgd", kvstore=store)

    first, second = make(), make()
    first.resume()
    with pytest.raises(ConfigurationError, match="one Trainer"):
        second.resume()
    first.step(1, ignore_stale_grad=True)
    first.close()
    with make() as third:
        assert third.resume().round == 0
    second.close()
    store.close()


def test_what_is_not_possible_is_refused(two_servers: list[str]) -> None:
    name = new_name()
    store = open_store(two_servers, 0, name, num_workers=1)
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
    {one.__name__: one for one in (pause, die_between_commits)}[sys.argv[1]](*sys.argv[2:])
