"""How schedulers travel: descriptions, names that users add, and functions, which cannot."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from typing import Any

import msgpack
import pytest

from kvstore_server import lr_scheduler as base
from kvstore_server.lr_scheduler import as_scheduler, create_from_spec
from kvtrainer.errors import ConfigurationError, UnknownNameError
from kvtrainer.lr_scheduler import (
    CosineScheduler,
    FactorScheduler,
    LRScheduler,
    MultiFactorScheduler,
    PolyScheduler,
    register,
)


@pytest.fixture(autouse=True)
def _restore_registry() -> Iterator[None]:
    before = dict(base._registry)
    yield
    base._registry.clear()
    base._registry.update(before)


class InverseRoot(LRScheduler):
    """A user's scheduler that passes what it does not know to its base."""

    def __init__(self, scale: float, **options: Any) -> None:
        super().__init__(**options)
        self.scale = scale

    def after_warmup(self, num_update: int) -> float:
        return self.base_lr / math.sqrt(1 + self.scale * num_update)


def travel(scheduler: LRScheduler) -> LRScheduler:
    return create_from_spec(msgpack.unpackb(msgpack.packb(scheduler.spec())))


@pytest.mark.parametrize(
    "scheduler",
    [
        FactorScheduler(3, 0.7, 0.01, base_lr=1, warmup_steps=2, warmup_begin_lr=0.1, warmup_mode="constant"),
        MultiFactorScheduler([2, 5], 0.7, base_lr=1, warmup_steps=2),
        PolyScheduler(12, 0.4, pwr=3, final_lr=0.1, warmup_steps=4),
        CosineScheduler(12, 0.4, final_lr=0.1, warmup_steps=4, warmup_begin_lr=0.2),
    ],
    ids=lambda s: type(s).__name__,
)
def test_a_scheduler_that_travelled_gives_the_same_learning_rates(scheduler: LRScheduler) -> None:
    scheduler.base_lr = 0.3
    assert type(travel(scheduler)) is type(scheduler)
    assert [travel(scheduler)(n) for n in range(20)] == [scheduler(n) for n in range(20)]


def test_a_description_names_the_scheduler_and_its_arguments() -> None:
    assert MultiFactorScheduler((2, 5), 0.5, base_lr=1).spec() == {
        "name": "multifactor",
        "step": [2, 5],
        "factor": 0.5,
        "base_lr": 1.0,
        "warmup_steps": 0,
        "warmup_begin_lr": 0.0,
        "warmup_mode": "linear",
    }


def test_a_registered_scheduler_of_a_user_travels_with_the_arguments_of_its_bases() -> None:
    register(InverseRoot)
    there = travel(InverseRoot(0.5, base_lr=2, warmup_steps=1))
    assert isinstance(there, InverseRoot)
    assert [there(0), there(6)] == [0.0, 1.0]


def test_a_scheduler_that_defines_call_as_gluons_do_is_used_as_it_is() -> None:
    class Halved(LRScheduler):
        def __call__(self, num_update: int) -> float:
            return self.base_lr / 2

    assert as_scheduler(Halved(0.5))(3) == 0.25


def test_a_scheduler_that_is_not_registered_is_not_described() -> None:
    with pytest.raises(ConfigurationError, match=r"InverseRoot.*'inverseroot'.*register.*--import"):
        InverseRoot(0.5).spec()


def test_a_subclass_is_not_mistaken_for_its_registered_base() -> None:
    class Slower(FactorScheduler):
        pass

    with pytest.raises(ConfigurationError, match="'slower' does not stand for its class"):
        Slower(2).spec()


def test_an_argument_that_was_not_kept_is_named() -> None:
    @register
    class Forgetful(LRScheduler):
        def __init__(self, period: int) -> None:
            super().__init__()

    with pytest.raises(ConfigurationError, match="argument 'period' must be kept"):
        Forgetful(3).spec()


@pytest.mark.parametrize("scale", [{1: 2}, [object()], print])
def test_an_argument_that_is_no_plain_value_is_named(scale: Any) -> None:
    register(InverseRoot)
    with pytest.raises(ConfigurationError, match=r"scale is .*only numbers, strings and lists"):
        InverseRoot(scale).spec()


def test_a_name_that_is_registered_again_is_replaced_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    class Other(InverseRoot):
        name = "InverseRoot"

    register(InverseRoot)
    with caplog.at_level(logging.WARNING):
        register(Other)
    assert "'inverseroot' is now" in caplog.text
    assert type(travel(Other(0.5))) is Other


def test_only_a_scheduler_class_can_be_registered() -> None:
    with pytest.raises(ConfigurationError, match="only a subclass of LRScheduler"):
        register(dict)  # type: ignore[type-var]


def test_an_unknown_name_is_answered_with_the_known_ones() -> None:
    with pytest.raises(UnknownNameError, match=r"'triangle'.*cosine, factor, multifactor, poly.*--import"):
        create_from_spec({"name": "triangle"})


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (None, "needs a name"),
        ({}, "needs a name"),
        ({"name": 3}, "needs a name"),
        ({"name": "factor"}, "'factor' cannot be rebuilt.*step"),
        ({"name": "factor", "step": 2, "speed": 3}, "'factor' cannot be rebuilt.*speed"),
        ({"name": "factor", "step": 0}, "step must be an integer of at least 1"),
    ],
)
def test_a_malformed_description_is_refused(spec: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        create_from_spec(spec)


def halving(num_update: int) -> float:
    return 0.5**num_update


def test_a_function_is_a_scheduler_in_its_own_process() -> None:
    scheduler = as_scheduler(halving)
    assert [scheduler(n) for n in range(3)] == [1.0, 0.5, 0.25]
    assert scheduler.base_lr == 1.0


@pytest.mark.parametrize("attempt", [lambda s: s.spec(), lambda s: setattr(s, "base_lr", 0.1)])
def test_a_function_neither_travels_nor_takes_a_learning_rate_beside_it(
    attempt: Callable[[LRScheduler], object],
) -> None:
    with pytest.raises(ConfigurationError, match=r"halving.*(neither sent|no effect)|no effect.*halving"):
        attempt(as_scheduler(halving))


@pytest.mark.parametrize("result", [None, float("nan"), "0.1", True])
def test_a_function_that_returns_no_learning_rate_is_named(result: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"returns for 3 must be a finite number"):
        as_scheduler(lambda num_update: result)(3)


@pytest.mark.parametrize("value", [0.1, "cosine", CosineScheduler])
def test_what_is_neither_scheduler_nor_function_is_refused(value: Any) -> None:
    with pytest.raises(ConfigurationError, match="lr_scheduler must be a scheduler"):
        as_scheduler(value)


def test_a_scheduler_stays_the_object_it_is() -> None:
    scheduler = PolyScheduler(5)
    assert as_scheduler(scheduler) is scheduler
