"""A second thread in a call of a Trainer or a store: it is told so at once, and nothing else changes."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

from kvtrainer import Trainer
from kvtrainer.common import thread_guard
from kvtrainer.errors import ConcurrentCallError, KVStoreError
from kvtrainer.kvstore import LocalKVStore, create
from tests.support.limits import LIMIT
from tests.support.processes import Call


class Pause:
    """A place in a call at which the test stops it."""

    def __init__(self) -> None:
        self.reached, self.go_on = threading.Event(), threading.Event()

    def __call__(self, *_: Any) -> None:
        self.reached.set()
        assert self.go_on.wait(LIMIT)


def while_another_is_in(call: Callable[[], Any], pause: Pause, second: Callable[[], Any]) -> tuple[Any, Any]:
    """What the first call, in a thread of its own, and the second one in its middle end with."""
    first = Call(call)
    assert pause.reached.wait(LIMIT)
    try:
        outcome = Call(second).outcome()
    finally:
        pause.go_on.set()
    return first.outcome(), outcome


@pytest.fixture
def net() -> torch.nn.Linear:
    torch.manual_seed(0)
    return torch.nn.Linear(3, 1, bias=False)


SECOND_OF_A_TRAINER: dict[str, Callable[[Trainer], Any]] = {
    "step": lambda trainer: trainer.step(1),
    "allreduce_grads": lambda trainer: trainer.allreduce_grads(),
    "update": lambda trainer: trainer.update(1),
    "set_data": lambda trainer: trainer.set_data(),
    "state_dict": lambda trainer: trainer.state_dict(),
    "save_states": lambda trainer: trainer.save_states("never-written"),
}


@pytest.mark.parametrize("method", SECOND_OF_A_TRAINER)
@pytest.mark.parametrize("store", [None, "local"])
def test_a_trainer_takes_one_thread_at_a_time(net: torch.nn.Linear, method: str, store: str | None) -> None:
    trainer = Trainer(net.parameters(), "sgd", {"learning_rate": 0.5}, kvstore=store)
    before, pause = net.weight.detach().clone(), Pause()

    def loss() -> torch.Tensor:
        value = net(torch.ones(1, 3)).sum()
        value.backward()
        pause()
        return value

    first, second = while_another_is_in(
        lambda: trainer.step(closure=loss), pause, lambda: SECOND_OF_A_TRAINER[method](trainer)
    )
    assert isinstance(second, ConcurrentCallError)
    assert isinstance(second, KVStoreError)
    assert f"{method}() of a Trainer" in str(second)
    assert "another thread is in its step()" in str(second)
    assert isinstance(first, torch.Tensor)
    assert net.weight.tolist() == (before - 0.5).tolist()
    # Whoever comes afterwards is welcome, from any thread.
    net(torch.ones(1, 3)).sum().backward()
    Call(lambda: trainer.step(1)).outcome()
    assert net.weight.tolist() == (before - 0.5 - 0.5).tolist()


SECOND_OF_A_STORE: dict[str, Callable[[LocalKVStore], Any]] = {
    "init": lambda kv: kv.init("v", torch.zeros(2)),
    "push": lambda kv: kv.push("w", torch.ones(2)),
    "pull": lambda kv: kv.pull("w", out=torch.zeros(2)),
    "pushpull": lambda kv: kv.pushpull("w", torch.ones(2)),
    "barrier": lambda kv: kv.barrier(),
    "set_optimizer": lambda kv: kv.set_optimizer("sgd"),
    "server_stats": lambda kv: kv.server_stats(),
}


@pytest.mark.parametrize("method", SECOND_OF_A_STORE)
def test_a_store_takes_one_thread_at_a_time_and_goes_on(method: str) -> None:
    pause = Pause()

    def add(key: Any, merged: torch.Tensor, stored: torch.Tensor) -> None:
        if not pause.go_on.is_set():
            pause()
        stored += merged

    with create("local") as kv:
        kv.init("w", torch.zeros(2))
        kv.set_updater(add)
        first, second = while_another_is_in(
            lambda: kv.push("w", torch.ones(2)), pause, lambda: SECOND_OF_A_STORE[method](kv)
        )
        assert isinstance(second, ConcurrentCallError)
        assert f"{method}() of a LocalKVStore" in str(second)
        assert first is None
        out = torch.zeros(2)
        Call(lambda: kv.pushpull("w", torch.ones(2), out=out)).outcome()
        assert out.tolist() == [2.0, 2.0]


def test_a_call_that_raises_leaves_the_object_free(net: torch.nn.Linear) -> None:
    trainer = Trainer(net.parameters(), "sgd", kvstore=None)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            trainer.step(closure=lambda: 1 // 0)
    net(torch.ones(1, 3)).sum().backward()
    trainer.step(1)


def test_calls_inside_of_a_call_are_free(net: torch.nn.Linear) -> None:
    trainer = Trainer(net.parameters(), "sgd", kvstore=None)

    def loss() -> torch.Tensor:
        trainer.state_dict()
        value = net(torch.ones(1, 3)).sum()
        value.backward()
        return value

    assert isinstance(trainer.step(closure=loss), torch.Tensor)


def test_the_mark_of_an_interrupted_call_blocks_no_later_call(net: torch.nn.Linear) -> None:
    trainer = Trainer(net, "sgd", {"learning_rate": 0.1}, kvstore=None)
    interrupted = thread_guard._GuardedCall()
    interrupted.method, interrupted.thread = "step", threading.get_ident()
    trainer.__dict__[thread_guard._CALL] = weakref.ref(interrupted)
    net(torch.ones(1, 3)).sum().backward()
    assert isinstance(Call(lambda: trainer.step(1)).outcome(), ConcurrentCallError)
    del interrupted
    assert not isinstance(Call(lambda: trainer.step(1)).outcome(), Exception)
    assert thread_guard._CALL not in trainer.__dict__
