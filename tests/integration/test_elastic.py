"""Jobs whose members change: the same schedule of joins and leaves gives the bits of a plain loop."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import kvtrainer
from kvtrainer.kvstore import DistKVStore
from tests.support.processes import Process, eventually, new_name, together
from tests.support.stores import Servers, servers

KEYS = {"a": (700, 40), "b": (300,)}


def first_weights() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {key: torch.randn(shape, generator=generator) for key, shape in KEYS.items()}


def gradient(weights: Mapping[str, Tensor], rank: int, step: int) -> dict[str, Tensor]:
    """What a rank gives: it depends on the weights, so an error shows in everything that follows."""
    generator = torch.Generator().manual_seed(1000 * rank + step)
    return {
        key: torch.randn(weight.shape, generator=generator) + 0.1 * weight for key, weight in weights.items()
    }


def plain_loop(
    members: Sequence[Sequence[int]],
    optimizer: Callable[..., torch.optim.Optimizer],
    batch_size: float | None,
) -> list[dict[str, Tensor]]:
    """Weights after each step, by torch alone: the sum in rank order, divided by the members or the batch size."""
    weights = {key: torch.nn.Parameter(value) for key, value in first_weights().items()}
    torch_optimizer, found = optimizer(weights.values()), []
    for step, ranks in enumerate(members):
        given = [gradient({k: w.detach() for k, w in weights.items()}, rank, step) for rank in ranks]
        for key, weight in weights.items():
            total = given[0][key].clone()
            for one in given[1:]:
                total += one[key]
            weight.grad = total * (1.0 / (batch_size or len(ranks)))
        torch_optimizer.step()
        found.append({key: weight.detach().clone() for key, weight in weights.items()})
    return found


class ElasticJob:
    """Workers as threads of the test, one Trainer each; a schedule says which ranks take part in which step."""

    def __init__(
        self,
        places: Sequence[Process],
        schedule: Sequence[Sequence[int]],
        kvstore: str = "dist_sync",
        **options: Any,
    ) -> None:
        self.kvstore = kvstore
        self.addresses, self.schedule, self.options = [one.address for one in places], schedule, options
        self.name = new_name()
        self.initial = len(schedule[0])
        self.weights: dict[tuple[int, int], dict[str, Tensor]] = {}
        """(rank, step) → its weights after it."""
        self.members: dict[tuple[int, int], tuple[int, ...]] = {}
        """(rank, step) → the members as it knew them before it."""
        self.rates: dict[tuple[int, int], float] = {}
        """(rank, step) → the learning rate of the step."""
        self.may_join = {step: threading.Event() for step in range(len(schedule))}

    def store(self, rank: int) -> DistKVStore:
        return DistKVStore(
            self.kvstore, rank=rank, num_workers=self.initial, servers=self.addresses, namespace=self.name,
            elastic="1..6", timeout=30.0,
        )  # fmt: skip

    def run(self, optimizer: str, hypers: dict[str, Any], batch_size: float | None) -> None:
        lives = [(rank, *life) for rank in range(6) for life in lives_of(rank, self.schedule)]
        calls = [lambda life=life: self.live(*life, optimizer, hypers, batch_size) for life in lives]
        for outcome in together(*calls):
            if isinstance(outcome, BaseException):
                raise outcome

    def live(
        self,
        rank: int,
        first: int,
        end: int,
        optimizer: str,
        hypers: dict[str, Any],
        batch_size: float | None,
    ) -> None:
        """Take part from one step to another."""
        if first:
            assert self.may_join[first].wait(30.0)
        weights = {key: torch.nn.Parameter(value) for key, value in first_weights().items()}
        store = self.store(rank)
        trainer = kvtrainer.Trainer(weights, optimizer, hypers, kvstore=store, **self.options)
        start = trainer.resume()
        assert start.round == first
        assert start.client_state == (None if first == 0 else {"step": first - 1})
        for step in range(first, end):
            self.members[rank, step] = trainer.members
            self.await_joiners(trainer, step)
            for key, grad in gradient({k: w.detach() for k, w in weights.items()}, rank, step).items():
                weights[key].grad = grad
            trainer.client_state = {"step": step}
            trainer.step(batch_size)
            self.rates[rank, step] = round(float(trainer.last.lr), 9) if trainer.last is not None else 0.0
            self.weights[rank, step] = {key: w.detach().clone() for key, w in weights.items()}
        if end < len(self.schedule):
            trainer.leave()
        trainer.close()
        store.close()

    def await_joiners(self, trainer: kvtrainer.Trainer, step: int) -> None:
        """Before the last step without them, wait until those that join have asked for it."""
        if step + 1 < len(self.schedule) and (
            coming := set(self.schedule[step + 1]) - set(self.schedule[step])
        ):
            self.may_join[step + 1].set()

            def are_waiting() -> bool:
                views = [one["view"] for one in trainer._pipeline.binding.stats() if "view" in one]
                return any(coming <= set(view["joining"]) for view in views)

            assert eventually(are_waiting)


@pytest.fixture(scope="module")
def on_servers() -> Iterator[Servers]:
    with servers("--spread-from", "1") as started:
        yield started


def lives_of(rank: int, schedule: Sequence[Sequence[int]]) -> list[tuple[int, int]]:
    """The (first step, end) of each time that a rank is a member."""
    found, first = [], -1
    for step, ranks in enumerate([*schedule, ()]):
        if rank in ranks and first < 0:
            first = step
        elif rank not in ranks and first >= 0:
            found.append((first, step))
            first = -1
    return found


SCHEDULES = {
    "one joins": [(0, 1)] * 3 + [(0, 1, 2)] * 3,
    "one leaves": [(0, 1, 2)] * 3 + [(0, 2)] * 3,
    "the first rank leaves": [(0, 1)] * 3 + [(1,)] * 2,
    "from one to four and back": [(0,)] * 2 + [(0, 1, 2, 3)] * 2 + [(1, 3)] * 2,
    "a rank comes back": [(0, 1)] * 2 + [(0,)] * 2 + [(0, 1)] * 2,
    "one comes as another goes": [(0, 1)] * 3 + [(0, 1, 4)] + [(1, 4)] * 2,
}


@pytest.mark.parametrize("num_servers", [1, 2])
@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=list(SCHEDULES))
def test_a_schedule_of_members_gives_the_bits_of_a_plain_loop(
    schedule: Sequence[Sequence[int]], num_servers: int, on_servers: Servers
) -> None:
    job = ElasticJob(on_servers.of(num_servers), schedule)
    job.run("torch:SGD", {"learning_rate": 0.1, "momentum": 0.9}, None)
    expected = plain_loop(schedule, sgd, None)
    for step, ranks in enumerate(schedule):
        for rank in ranks:
            # Ranks that leave between two steps are members until the second one begins.
            before = set(schedule[step - 1]) if step else set()
            assert set(ranks) <= set(job.members[rank, step]) <= before.union(ranks)
            for key in KEYS:
                assert torch.equal(job.weights[rank, step][key], expected[step][key]), (rank, step, key)


MIXED = [(0,)] * 2 + [(0, 1, 2, 3)] * 2 + [(1, 3)] * 2


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


@pytest.mark.parametrize("batch_size", [None, 32])
@pytest.mark.parametrize("options", [{}, {"overlap": True}, {"zero_copy": False}], ids=str)
@pytest.mark.usefixtures("far")
def test_the_factor_of_a_batch_size_or_a_mean_holds_between_hosts(
    options: dict[str, Any], batch_size: float | None, on_servers: Servers
) -> None:
    job = ElasticJob(on_servers.of(2), MIXED, **options)
    job.run("torch:SGD", {"learning_rate": 0.1, "momentum": 0.9}, batch_size)
    expected = plain_loop(MIXED, sgd, batch_size)
    for (rank, step), weights in job.weights.items():
        for key in KEYS:
            assert torch.equal(weights[key], expected[step][key]), (rank, step, key)


def test_members_of_p3_change_as_those_of_dist_sync(on_servers: Servers) -> None:
    job = ElasticJob(on_servers.of(2), MIXED, "p3")
    job.run("torch:SGD", {"learning_rate": 0.1, "momentum": 0.9}, None)
    expected = plain_loop(MIXED, sgd, None)
    for (rank, step), weights in job.weights.items():
        assert all([torch.equal(weights[key], expected[step][key]) for key in KEYS]), (rank, step)


def test_counts_schedules_and_clipping_go_over_to_workers_that_join(on_servers: Servers) -> None:
    options = {
        "clip_grad": {"max_norm": 0.5},
        "schedules": [{"policy": "step", "step": [1, 2, 4], "by_epoch": False}],
    }
    found = []
    for _ in range(2):
        job = ElasticJob(on_servers.of(2), MIXED, **options)
        job.run("adam", {"learning_rate": 0.1}, None)
        found.append(job)
    for rank, step in found[0].weights:
        for key in KEYS:
            own = found[0].weights[rank, step][key]
            assert torch.equal(own, found[1].weights[rank, step][key])
            assert torch.equal(own, found[0].weights[min(MIXED[step]), step][key])
    rates = {step: {found[0].rates[rank, step] for rank in ranks} for step, ranks in enumerate(MIXED)}
    assert rates == {0: {0.1}, 1: {0.01}, 2: {0.001}, 3: {0.001}, 4: {0.0001}, 5: {0.0001}}
