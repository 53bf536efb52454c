"""The learning rate of an optimizer with a scheduler, its counters, and their descriptions."""

from __future__ import annotations

import logging
import math
from typing import Any

import msgpack
import pytest
import torch

from kvstore_server.errors import ConfigurationError, SchedulerInUseError
from kvstore_server.lr_scheduler import FactorScheduler
from kvstore_server.optimizer import Optimizer, create, create_from_spec, gluon


def travel(optimizer: Optimizer) -> Optimizer:
    return create_from_spec(msgpack.unpackb(msgpack.packb(optimizer.spec())))


def halving(base_lr: float = 1.0) -> FactorScheduler:
    return FactorScheduler(step=2, factor=0.5, base_lr=base_lr)


def test_the_learning_rate_follows_the_scheduler_as_updates_are_counted() -> None:
    optimizer = create("sgd", lr_scheduler=halving())
    trace = []
    for optimizer.num_update in range(6):
        trace.append(optimizer.learning_rate)
    assert trace == [1.0, 1.0, 1.0, 0.5, 0.5, 0.25]


def test_a_scheduler_alone_keeps_its_own_base(caplog: pytest.LogCaptureFixture) -> None:
    for options in ({}, dict(learning_rate=None), dict(learning_rate=0.25)):
        assert create("adam", lr_scheduler=halving(0.25), **options).learning_rate == 0.25
    assert caplog.records == []


def test_a_learning_rate_beside_a_scheduler_becomes_its_base_with_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    scheduler = halving(1.0)
    with caplog.at_level(logging.WARNING):
        optimizer = create("sgd", learning_rate=0.5, lr_scheduler=scheduler)
    assert scheduler.base_lr == 0.5
    optimizer.num_update = 3
    assert optimizer.learning_rate == 0.25
    assert "learning_rate 0.5 of sgd replaces base_lr 1" in caplog.text


def test_setting_the_learning_rate_beside_a_scheduler_raises_what_gluon_raises() -> None:
    optimizer = create("sgd", lr_scheduler=halving())
    with pytest.raises(
        UserWarning, match=r"takes its learning rate from FactorScheduler\(.*set .*base_lr"
    ) as caught:
        optimizer.set_learning_rate(0.1)
    assert isinstance(caught.value, SchedulerInUseError)
    with pytest.raises(SchedulerInUseError):
        optimizer.lr = 0.1
    assert optimizer.learning_rate == 1.0


def test_a_function_of_the_number_of_updates_is_a_scheduler_that_cannot_travel() -> None:
    optimizer = create("sgd", lr_scheduler=lambda num_update: 1.0 / (1 + num_update))
    optimizer.num_update = 3
    assert optimizer.learning_rate == 0.25
    with pytest.raises(ConfigurationError, match="neither sent to a server nor saved"):
        optimizer.spec()
    assert optimizer.plain_hyper()["momentum"] == 0.0


def test_a_wrong_option_leaves_the_scheduler_as_it_was() -> None:
    scheduler = halving(1.0)
    for wrong in (
        dict(momentum=-1.0),
        dict(begin_num_update=-1),
        dict(aggregate_num=0),
        dict(learning_rate="x"),
    ):
        with pytest.raises(ConfigurationError, match=next(iter(wrong))):
            create("sgd", **{"learning_rate": 0.5, "lr_scheduler": scheduler, **wrong})
    assert scheduler.base_lr == 1.0


@pytest.mark.parametrize("wrong", [0.1, "factor", FactorScheduler])
def test_something_that_is_no_scheduler_is_refused(wrong: object) -> None:
    with pytest.raises(ConfigurationError, match="lr_scheduler must be"):
        create("sgd", lr_scheduler=wrong)


def test_an_optimizer_arrives_with_its_scheduler_and_its_counters() -> None:
    optimizer = create("nag", lr_scheduler=halving(0.5), begin_num_update=4, aggregate_num=math.inf)
    arrived = travel(optimizer)
    assert arrived.spec() == optimizer.spec()
    assert (arrived.begin_num_update, arrived.num_update, arrived.aggregate_num) == (4, 4, math.inf)
    assert arrived.learning_rate == optimizer.learning_rate == 0.25


def test_the_learning_rate_of_a_group_does_not_replace_the_base_of_a_scheduler_that_travels() -> None:
    optimizer = create("sgd", lr_scheduler=halving(1.0))
    optimizer.hyper["lr"] = 0.125
    arrived = travel(optimizer)
    assert (arrived.hyper["lr"], arrived.learning_rate) == (0.125, 1.0)


def test_a_description_names_only_what_differs_from_the_usual() -> None:
    assert create("sgd").spec().keys() == {"name", "hyper", "rescale_grad", "multi_precision"}


def test_counters_start_from_zero_and_one_tensor_at_a_time() -> None:
    optimizer = create("adamw")
    assert (optimizer.begin_num_update, optimizer.num_update, optimizer.aggregate_num) == (0, 0, 1)
    assert create("sgd", begin_num_update=5).num_update == 5


@pytest.mark.parametrize(
    "wrong",
    [
        dict(begin_num_update=1.5),
        dict(begin_num_update=True),
        dict(aggregate_num=1.5),
        dict(aggregate_num="inf"),
    ],
)
def test_counters_are_integers(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=f"{next(iter(wrong))} must be an integer of at least"):
        create("sgd", **wrong)


def test_a_torch_optimizer_has_no_gluon_scheduler() -> None:
    with pytest.raises(ConfigurationError, match="lr_scheduler"):
        create("torch:SGD", lr_scheduler=halving())
    assert create("torch:SGD", lr=0.5).learning_rate == 0.5


UNUSUAL: dict[str, dict[str, Any]] = {
    "sgd": dict(momentum=0.5, lazy_update=True),
    "nag": dict(momentum=0.5),
    "sgld": dict(seed=2**40),
    "signum": dict(momentum=0.5, wd_lh=0.25),
    "dcasgd": dict(momentum=0.5, lamda=0.25),
    "test": dict(multi_precision=True),
    "adam": dict(beta1=0.5, lazy_update=True),
    "adamw": dict(beta2=0.5, correct_bias=False),
    "adabelief": dict(epsilon=0.5, correct_bias=False),
    "adamax": dict(epsilon=0.5),
    "nadam": dict(schedule_decay=0.5),
    "ftml": dict(betas=(0.5, 0.25)),
    "adadelta": dict(rho=0.5),
    "adagrad": dict(epsilon=0.5),
    "rmsprop": dict(rho=0.5, momentum=0.25, centered=True, clip_weights=2.0),
    "ftrl": dict(lamda1=0.5, beta=0.25),
}


@pytest.mark.parametrize("cls", gluon.FAMILY, ids=lambda cls: cls.name)
def test_every_gluon_description_survives_the_wire(cls: type[Optimizer]) -> None:
    optimizer = create(
        cls, learning_rate=0.5, wd=0.125, clip_gradient=3.0, rescale_grad=0.25, **UNUSUAL[cls.name]
    )
    arrived = travel(optimizer)
    assert type(arrived) is cls
    assert arrived.hyper == optimizer.hyper != create(cls).hyper
    assert arrived.spec() == optimizer.spec()


@pytest.mark.parametrize(
    ("name", "default"),
    [
        ("sgd", 0.1), ("nag", 0.1), ("sgld", 0.1), ("signum", 0.01), ("ftml", 0.0025), ("dcasgd", 0.1),
        ("adam", 0.001), ("adamw", 0.001), ("adabelief", 0.001), ("adamax", 0.002), ("nadam", 0.001),
        ("adadelta", 1.0), ("adagrad", 0.01), ("rmsprop", 0.001), ("ftrl", 0.1), ("test", 0.01),
    ],
)  # fmt: skip
def test_learning_rates_are_gluons_where_none_is_given(name: str, default: float) -> None:
    assert create(name).learning_rate == default


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("sgld", dict(learning_rate=-0.1)),
        ("ftrl", dict(learning_rate=-0.1)),
        ("ftrl", dict(lamda1=-0.1)),
        ("ftrl", dict(beta=-1.0)),
        ("rmsprop", dict(rho=1.0)),
        ("rmsprop", dict(clip_weights=-1.0)),
        ("rmsprop", dict(centered=1)),
        ("adadelta", dict(rho=-0.1)),
        ("signum", dict(wd_lh=-0.1)),
        ("nadam", dict(schedule_decay=-0.1)),
        ("adamw", dict(correct_bias="no")),
        ("adam", dict(lazy_update=1)),
        ("ftml", dict(beta2=1.0)),
    ],
)
def test_an_option_of_its_own_is_checked(name: str, options: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=next(iter(options)).removeprefix("learning_")):
        create(name, **options)


def test_a_rate_that_must_not_be_negative_stays_as_it_was() -> None:
    optimizer = create("ftrl", lr=0.5)
    with pytest.raises(ConfigurationError, match=r"lr .* must not be negative"):
        optimizer.set_learning_rate(-0.5)
    assert optimizer.learning_rate == 0.5
    assert torch.tensor(optimizer.hyper["lr"]) == 0.5
