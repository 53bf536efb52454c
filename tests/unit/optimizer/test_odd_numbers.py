"""Numbers that make no sense are refused when they are given: none breaks off an update, and so ends a table."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import Parameter

from kvstore_server.errors import ConfigurationError
from kvstore_server.optimizer import Optimizer, gluon, layerwise, registry, torch_family
from kvtrainer import Trainer
from tests.support.scalar_training import IN_STORE, step, trainer_of

ODD: list[Any] = [
    math.nan, math.inf, -math.inf, 1e39, -1e39, 3e38, 1e308, 10**400, 1e-50, -1, 0, "x", None, True,
    torch.tensor(1e39, dtype=torch.float64), torch.ones(2), np.float64(1e39), np.int64(3), np.bool_(True),
    (0.9, math.nan), (0.9, 1.0), (1e39, 0.9),
]  # fmt: skip


GLUONS = (*gluon.FAMILY, *layerwise.FAMILY)
NAMES = [cls.name for cls in GLUONS] + [f"mxnet1:{cls.name}" for cls in GLUONS if cls.mxnet1 is not None]
NAMES += [torch_family.torch_name(cls) for cls in (*torch_family.ELEMENTWISE, *torch_family.WHOLE)]
NAMES.remove("torch:SparseAdam")  # it may raise in any case, so servers take its updates back


def options_of(optimizer: Optimizer) -> Iterator[tuple[str, Any]]:
    """Each option of an optimizer with each odd value."""
    for name in optimizer.hyper:
        for value in ODD:
            yield name, value


@pytest.mark.parametrize("name", NAMES)
def test_an_accepted_number_breaks_off_no_update(name: str) -> None:
    optimizer = registry.create(name)
    accepted = 0
    for option, value in options_of(optimizer):
        try:
            made = registry.create(name, **{option: value})
        except ConfigurationError:
            continue
        accepted += 1
        weight, state = torch.ones(2, 16), dict[str, Any]()
        if made.elementwise:
            weight = weight.view(-1)
        for number in (1, 2, 3):
            numbers = {**made.hyper, "step": number, "key": "w", "first": 0}
            state = state or made.create_state(weight)
            made.update(weight, torch.ones_like(weight), state, numbers)
    assert accepted > len(optimizer.hyper)


@pytest.mark.parametrize(
    ("name", "option", "value"),
    [
        ("dcasgd", "lamda", 1e39), ("adamax", "lr", 3e38), ("torch:SGD", "dampening", "x"),
        ("torch:Muon", "eps", 1e39), ("torch:Muon", "ns_steps", 1e-50), ("sgd", "lr", torch.ones(2)),
        ("adadelta", "lr", 1e39), ("adadelta", "weight_decay", 10**39), ("adam", "betas", (0.9, 1.5)),
        ("sgd", "clip_gradient", "x"), ("sgd", "momentum", None), ("torch:Adam", "betas", (0.9, 1.5)),
        ("sgd", "lr", math.nan), ("torch:SGD", "lr", math.inf),
    ],
)  # fmt: skip
@IN_STORE
def test_an_impossible_number_set_while_training_is_refused(
    name: str, option: str, value: Any, in_store: bool
) -> None:
    parameters = [Parameter(torch.ones(2, 2)) for _ in range(2)]
    options = {"momentum": 0.5} if name == "torch:SGD" else {}
    trainer = trainer_of([{"params": [p]} for p in parameters], name, options, in_store)
    group = trainer.param_groups[1]
    step(trainer)
    usual, group[option] = group[option], value
    before = [p.detach().clone() for p in parameters]
    with pytest.raises(ConfigurationError, match=option):
        step(trainer)
    assert all(map(torch.equal, parameters, before))
    group[option] = usual
    step(trainer)
    assert not any(map(torch.equal, parameters, before))


def test_a_multiplier_with_which_a_number_is_too_great_fails_the_round_and_leaves_the_table() -> None:
    parameter = Parameter(torch.ones(2, 2))
    parameter.lr_mult = 1e39  # type: ignore[attr-defined]
    trainer = Trainer([parameter], "adamax", {"lr": 1.0}, kvstore="local", update_on_kvstore=True)
    parameter.grad = torch.ones(2, 2)
    with pytest.raises(ConfigurationError):
        trainer.step(1)
    parameter.lr_mult = 1.0  # type: ignore[attr-defined]
    trainer.step(1)
    assert not parameter.equal(torch.ones(2, 2))


class Counting(gluon.Adam):
    """What a user has derived from one of ours: each update draws a random number, and counts."""

    calls = 0

    def update(self, weight: torch.Tensor, grad: Any, state: Any, hyper: Any) -> None:
        type(self).calls += 1
        super().update(weight, grad, state, hyper)
        weight.add_(torch.rand(()), alpha=1e-3)


def test_an_optimizer_that_a_user_wrote_updates_nothing_but_what_it_is_given() -> None:
    former, generator = Counting.calls, torch.get_rng_state()
    Trainer([Parameter(torch.ones(2))], registry.create(Counting, lr=1e10), kvstore=None)
    assert Counting.calls == former
    assert torch.get_rng_state().equal(generator)


@pytest.mark.parametrize("name", NAMES)
def test_numbers_are_tried_out_alike_whatever_device_is_the_default(name: str) -> None:
    with torch.device("meta"):
        made = registry.create(name)
    assert made.may_raise or made._tried


@pytest.mark.parametrize("name", NAMES)
def test_numbers_are_tried_out_alike_whatever_dtype_is_the_default(name: str) -> None:
    former = torch.get_default_dtype()
    torch.set_default_dtype(torch.float16)
    try:
        made = registry.create(name, lr=1e6)
    finally:
        torch.set_default_dtype(former)
    assert made.may_raise or made._tried


@pytest.mark.parametrize("name", ["adam", "torch:Adam"])
def test_the_number_of_an_update_is_exact_whatever_dtype_is_the_default(name: str) -> None:
    def updated() -> torch.Tensor:
        made, weight = registry.create(name), torch.ones(16, dtype=torch.float32)
        state: dict[str, Any] = {"exp_avg": weight.clone(), "exp_avg_sq": weight.clone()}
        made.update(weight, weight.clone(), state, {**made.hyper, "step": 299, "key": "w", "first": 0})
        return weight

    former, wanted = torch.get_default_dtype(), updated()
    torch.set_default_dtype(torch.bfloat16)
    try:
        found = updated()
    finally:
        torch.set_default_dtype(former)
    assert found.equal(wanted)


@pytest.mark.parametrize("rate", [torch.tensor(0.5), torch.tensor([0.5]), np.float32(0.5), np.array(0.5)])
@pytest.mark.parametrize("name", ["sgd", "torch:SGD"])
@IN_STORE
def test_a_learning_rate_may_be_whatever_is_one_number(name: str, rate: Any, in_store: bool) -> None:
    parameter = Parameter(torch.ones(2))
    trainer = trainer_of([parameter], name, {"lr": rate if name == "torch:SGD" else 0.5}, in_store)
    step(trainer)
    trainer.param_groups[0]["lr"] = rate / 2
    step(trainer)
    assert parameter.tolist() == [0.25, 0.25]


def test_a_bound_that_no_gradient_reaches_is_taken_for_any_dtype() -> None:
    parameter = Parameter(torch.ones(2, dtype=torch.float64))
    trainer = Trainer([parameter], "adabelief", {"clip_gradient": 1e300}, kvstore=None)
    parameter.grad = torch.ones(2, dtype=torch.float64)
    trainer.step(1)
    assert not parameter.equal(torch.ones(2, dtype=torch.float64))


@pytest.mark.parametrize("store", [None, "local"])
@pytest.mark.parametrize("name", ["sgd", "torch:Adam"])
def test_a_changing_rate_is_not_tried_out_each_step(
    name: str, store: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    parameter = Parameter(torch.ones(2))
    trainer = Trainer([parameter], name, {"lr": 0.5}, kvstore=store)

    def step(rate: float) -> None:
        trainer.param_groups[0]["lr"] = rate
        parameter.grad = torch.ones(2)
        trainer.step(1)

    step(0.5)
    tries = []
    monkeypatch.setattr(Optimizer, "mute", tries.append)
    for number in range(1, 4):
        step(0.5 / number)
    assert tries == []
