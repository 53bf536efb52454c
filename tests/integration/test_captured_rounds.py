"""Rounds that repeat are captured: they end with the bits, the errors and the waits of the general path."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from kvtrainer import Trainer
from kvtrainer.client import rounds
from kvtrainer.client.captured import CapturedRound
from kvtrainer.errors import KVStoreError, ServerUnreachableError
from kvtrainer.kvstore import DistKVStore
from tests.support.processes import (
    Members,
    Process,
    Processes,
    eventually,
    new_name,
    together,
)
from tests.support.stores import Servers

WAY = "auto"
"""Rounds are captured where all servers share memory with the worker."""
STEPS = 6
SHAPES = {
    "one of 16 numbers": [(16,)],
    "many small ones": [(100,)] * 40,
    "gathered in the servers' memory": [(1000,)] * 400,
    "small and long, in two dtypes": [(3,), (700, 600), (16, 3), (512, 1024)],
}


def num_captured(trainer: Trainer) -> int:
    holder: Any = trainer._pipeline.binding.holder
    return int(holder._client.rounds.num_captured)


def trained(
    servers: list[Process],
    shapes: list[tuple[int, ...]],
    optimizer: str = "adam",
    change: Callable[[Trainer, int], None] = lambda *_: None,
) -> tuple[list[Tensor], int]:
    """The weights after some steps of two workers, and how many of these were captured by the first."""

    def train(kv: DistKVStore, rank: int) -> tuple[list[Tensor], int]:
        draw = torch.Generator().manual_seed(rank)
        dtypes = [
            torch.float64 if len(shape) == 2 and at % 2 else torch.float32 for at, shape in enumerate(shapes)
        ]
        weights = [Parameter(torch.ones(s, dtype=d)) for s, d in zip(shapes, dtypes, strict=True)]
        trainer = Trainer(weights, optimizer, {"learning_rate": 0.1}, kvstore=kv)
        for step in range(STEPS):
            change(trainer, step)
            for p in weights:
                (p * torch.randn(p.shape, generator=draw, dtype=p.dtype)).sum().backward()
            trainer.step(1 + step)
        return [p.detach().clone() for p in weights], num_captured(trainer)

    with Members() as members:
        pair = members.pair(servers)
        (first, count), (second, _) = together(
            *(lambda kv=kv, r=r: train(kv, r) for r, kv in enumerate(pair))
        )
    assert all(map(torch.equal, first, second))
    return first, count


def both_ways(
    jobs: Servers,
    monkeypatch: pytest.MonkeyPatch,
    shapes: list[tuple[int, ...]],
    optimizer: str = "adam",
    change: Callable[[Trainer, int], None] = lambda *_: None,
) -> int:
    """Check that captured steps end with the bits of others; return how many were captured."""
    captured, count = trained(jobs.of(2), shapes, optimizer, change)
    monkeypatch.setenv("KVSTORE_CAPTURE", "0")
    general, none = trained(jobs.of(2), shapes, optimizer, change)
    assert all(map(torch.equal, captured, general))
    assert none == 0
    return count


@pytest.mark.parametrize("name", SHAPES)
def test_captured_steps_have_the_bits_of_the_general_path(
    jobs: Servers, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    assert both_ways(jobs, monkeypatch, SHAPES[name]) >= STEPS - 4


def test_options_that_change_with_each_step_travel_with_captured_rounds(
    jobs: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    def set_rate(trainer: Trainer, step: int) -> None:
        trainer.set_learning_rate(0.5**step)

    assert both_ways(jobs, monkeypatch, [(16,), (100,)], "sgd", set_rate) >= STEPS - 2


def test_a_step_without_some_gradients_is_not_captured(jobs: Servers, members: Members) -> None:
    store = members.join(jobs.of(1), 0, 1, new_name())
    weights = [Parameter(torch.zeros(4)), Parameter(torch.zeros(4))]
    trainer = Trainer(weights, "sgd", {"learning_rate": 1.0}, kvstore=store)
    counts = []
    for step in range(8):
        weights[0].grad = torch.ones(4)
        weights[1].grad = None if step == 4 else torch.ones(4)
        trainer.step(1, ignore_stale_grad=True)
        counts.append(num_captured(trainer))
    assert [weights[0].tolist(), weights[1].tolist()] == [[-8.0] * 4, [-7.0] * 4]
    # What was captured is of use again afterwards.
    assert (counts[4], counts[5], counts[7]) == (counts[3], counts[3] + 1, counts[3] + 3)


def test_captured_verbs_return_the_sums(jobs: Servers) -> None:
    def push(kv: DistKVStore, rank: int) -> list[float]:
        keys = [str(at) for at in range(30)]
        kv.init(keys, [torch.zeros(10)] * 30)
        outs = [torch.zeros(10) for _ in keys]
        for step in range(5):
            values = [torch.full((10,), 1.0 + at + step + rank) for at in range(30)]
            kv.pushpull(keys, values, out=outs)
        assert kv._client.rounds.num_captured >= 2
        return [float(out[3]) for out in outs]

    with Members() as members:
        pair = members.pair(jobs.of(2))
        found = together(*(lambda kv=kv, r=r: push(kv, r) for r, kv in enumerate(pair)))
    assert found[0] == found[1] == [2 * (5.0 + at) + 1 for at in range(30)]


class Lonely:
    """One worker with a captured step, on servers of its own."""

    def __init__(self, processes: Processes, members: Members, servers: int = 1, **options: Any) -> None:
        self.servers = processes.servers(servers)
        self.store = members.join(self.servers, 0, 1, new_name(), **options)
        self.weight = Parameter(torch.zeros(1000))
        self.trainer = Trainer(
            [self.weight], "sgd", {"learning_rate": 1.0}, kvstore=self.store, zero_copy=False
        )
        self.step()
        while num_captured(self.trainer) < 2:
            self.step()

    def step(self) -> None:
        self.weight.grad = torch.ones(1000)
        self.trainer.step(1)

    @property
    def num_steps(self) -> float:
        """How many have changed the weights."""
        [value] = set((-self.weight).tolist())
        return value


def test_a_captured_step_waits_for_a_server_that_is_late(processes: Processes, members: Members) -> None:
    lonely = Lonely(processes, members)
    before, captured = lonely.num_steps, num_captured(lonely.trainer)
    lonely.servers[0].freeze()

    def go_on() -> None:
        assert eventually(lambda: is_waiting(lonely.trainer))
        lonely.servers[0].signal(signal.SIGCONT)

    together(lonely.step, go_on)
    assert lonely.num_steps == before + 1
    lonely.step()
    assert num_captured(lonely.trainer) == captured + 2
    assert lonely.num_steps == before + 2


def is_waiting(trainer: Trainer) -> bool:
    """Whether the general path waits for the end of its round."""
    holder: Any = trainer._pipeline.binding.holder
    return any(not round_.is_over for round_ in list(holder._client.rounds.open.values()))


def test_a_server_that_dies_in_a_captured_step_is_reported_as_on_the_general_path(
    processes: Processes, members: Members
) -> None:
    lonely = Lonely(processes, members)
    lonely.servers[0].freeze()

    def kill() -> None:
        assert eventually(lambda: is_waiting(lonely.trainer))
        lonely.servers[0].signal(signal.SIGKILL)

    def step() -> None:
        with pytest.raises(ServerUnreachableError):
            lonely.step()

    together(step, kill)


def after_an_interrupt(
    jobs: Servers, members: Members, monkeypatch: pytest.MonkeyPatch
) -> type[BaseException] | float:
    """What the step raises that follows one which was interrupted while it waited, or the sum of the weights."""
    store = members.join(jobs.of(1), 0, 1, new_name())
    weight = Parameter(torch.zeros(16))
    trainer = Trainer([weight], "sgd", {"learning_rate": 1.0}, kvstore=store)

    def step() -> None:
        weight.grad = torch.ones(16)
        trainer.step(1)

    for _ in range(4):
        step()
    holder: Any = trainer._pipeline.binding.holder
    transport = holder._client._session.transport

    def interrupt(timeout: float) -> None:
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(transport, "receive_frames", interrupt)
    monkeypatch.setattr(transport, "receive", interrupt)
    with pytest.raises(KeyboardInterrupt):
        step()
    try:
        step()
    except KVStoreError as error:
        return type(error)
    return float(weight.sum())


def test_an_interrupt_in_a_captured_step_has_the_effect_that_it_has_on_the_general_path(
    jobs: Servers, members: Members, monkeypatch: pytest.MonkeyPatch
) -> None:
    captured = after_an_interrupt(jobs, members, monkeypatch)
    monkeypatch.setenv("KVSTORE_CAPTURE", "0")
    assert after_an_interrupt(jobs, members, monkeypatch) == captured


def test_rounds_that_never_fit_are_captured_less_and_less_often(
    jobs: Servers, members: Members, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []

    class Counted(CapturedRound):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            made.append(self)

        def fits(self, *_: Any) -> bool:
            return False

    monkeypatch.setattr(rounds, "CapturedRound", Counted)
    weight = Parameter(torch.zeros(16))
    store = members.join(jobs.of(1), 0, 1, new_name())
    trainer = Trainer([weight], "sgd", {"learning_rate": 1.0}, kvstore=store)
    for _ in range(20):
        weight.grad = torch.ones(16)
        trainer.step(1)
    assert weight.tolist() == [-20.0] * 16
    assert len(made) == 5  # after the rounds 1, 2, 4, 7 and 12: each skips twice as many as the one before


def test_compression_that_is_switched_on_holds_from_the_next_captured_round_on(
    jobs: Servers, members: Members, monkeypatch: pytest.MonkeyPatch
) -> None:
    def pushed() -> list[list[float]]:
        store = members.join(jobs.of(1), 0, 1, new_name())
        keys, found = ["a", "b"], []
        store.init(keys, [torch.zeros(20)] * 2)
        outs = [torch.zeros(20), torch.zeros(20)]
        for step in range(8):
            if step == 4:
                store.set_gradient_compression({"type": "2bit", "threshold": 0.5})
            store.pushpull(keys, [torch.full((20,), 0.3)] * 2, out=outs)
            found.append(outs[0][:1].tolist())
        return found

    captured = pushed()
    monkeypatch.setenv("KVSTORE_CAPTURE", "0")
    assert captured == pushed()
    assert captured[4:] != captured[:4]


def test_only_the_latest_sets_of_keys_are_captured(jobs: Servers, members: Members) -> None:
    store = members.join(jobs.of(1), 0, 1, new_name())
    keys = [str(at) for at in range(40)]
    store.init(keys, [torch.zeros(3)] * 40)
    for at in range(39):
        for _ in range(2):
            store.pushpull(keys[at : at + 2], [torch.ones(3)] * 2)
    kept = store._client.rounds
    assert len(kept._captured) <= len(kept._layouts) <= 17
    assert len(kept._backoffs) <= len(kept._layouts)


@pytest.mark.parametrize("method", ["post", "receive_frames"])
def test_an_error_of_a_server_does_not_replace_an_interrupt_of_a_captured_step(
    processes: Processes, members: Members, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    lonely = Lonely(processes, members)
    holder: Any = lonely.trainer._pipeline.binding.holder
    transport = holder._client._session.transport

    def interrupt(*_: object) -> None:
        lonely.servers[0].signal(signal.SIGKILL)
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(transport, method, interrupt)
    with pytest.raises(KeyboardInterrupt):
        lonely.step()
