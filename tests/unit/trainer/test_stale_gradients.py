"""Gradients that are missing, used up or zero; and arguments that are named where they are wrong."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import Parameter

from kvtrainer import Trainer
from kvtrainer.errors import ConfigurationError, GradientWriteWarning, StaleGradientError, UnknownNameError
from tests.support.ways_to_train import STORES, backward, trainer_of, zeros


@pytest.mark.parametrize("uok", STORES)
def test_stale_parameters_are_all_named_and_nothing_changes(uok: bool | None) -> None:
    used, *rest = parameters = [zeros(), zeros(), zeros()]
    trainer = trainer_of(
        {"a": used, "b": rest[0], "c": rest[1]}, uok, options={"learning_rate": 1.0, "momentum": 0.5}
    )
    for p in parameters:
        backward(p)
    trainer.step(1)
    backward(used, 5)
    grads = [p.grad for p in parameters]
    before = trainer.state_dict()["state"]
    with pytest.raises(UserWarning, match=r"2 of 3 parameters got no gradient .*: b, c\.") as caught:
        trainer.step(1)
    assert isinstance(caught.value, StaleGradientError)
    assert [p.tolist() for p in parameters] == [[-1, -1]] * 3
    assert all(p.grad is grad for p, grad in zip(parameters, grads, strict=True))
    after = trainer.state_dict()["state"]
    assert [float(state["step"]) for state in after.values()] == [1, 1, 1]
    assert all(after[i]["momentum_buffer"].equal(before[i]["momentum_buffer"]) for i in range(3))


def test_gradients_that_a_refused_step_has_seen_are_freed_when_the_loop_drops_them() -> None:
    used, missing = zeros(), zeros()
    trainer = trainer_of({"a": used, "b": missing}, None)
    backward(used)
    assert used.grad is not None
    gradient = weakref.ref(used.grad)
    with pytest.raises(StaleGradientError):
        trainer.step(1)
    trainer.zero_grad()
    assert gradient() is None


@pytest.mark.parametrize("uok", STORES)
def test_a_gradient_that_is_assigned_after_a_refused_step_is_the_one_that_counts(uok: bool | None) -> None:
    used, other = zeros(), zeros()
    trainer = trainer_of({"a": used, "b": other}, uok)
    backward(used, 5)
    with pytest.raises(StaleGradientError):
        trainer.step(1)
    used.grad, other.grad = torch.ones(2), torch.ones(2)
    trainer.step(1)
    assert [used.tolist(), other.tolist()] == [[-1, -1]] * 2


def test_stale_first_step_opens_no_store() -> None:
    trainer = Trainer([zeros()], "sgd", kvstore="local", update_on_kvstore=True)
    with pytest.raises(StaleGradientError):
        trainer.step(1)
    assert trainer.kvstore is None


@pytest.mark.parametrize("how", ["ignore_stale_grad", "no batch size"])
@pytest.mark.parametrize("uok", STORES)
def test_stale_parameter_feels_neither_decay_nor_momentum(uok: bool | None, how: str) -> None:
    a, b = Parameter(torch.ones(2)), Parameter(torch.ones(2))
    trainer = trainer_of([a, b], uok, options={"lr": 0.5, "momentum": 0.5, "wd": 0.5})
    for p in (a, b):
        backward(p)
    trainer.step(1)
    kept = b.tolist()
    assert kept == [0.25, 0.25]
    backward(a)
    trainer.step(1, ignore_stale_grad=True) if how == "ignore_stale_grad" else trainer.step()
    assert b.tolist() == kept
    # m = .5 · (−.75) − .5 · (1 + .5 · .25); w = .25 + m
    assert a.tolist() == [0.25 - 0.375 - 0.5625] * 2


@pytest.mark.parametrize("uok", STORES)
def test_gradient_is_used_once_and_stays_readable(uok: bool | None) -> None:
    p = zeros()
    trainer = trainer_of([p], uok)
    backward(p, 3)
    trainer.step(1)
    assert p.grad is not None
    assert p.grad.tolist() == [3, 3]
    backward(p, 5)
    backward(p, 7)
    trainer.step(1)
    assert p.tolist() == [-15, -15]


@pytest.mark.parametrize(
    ("grad_req", "expected"), [("write", -1 - 5), ("add", -1 - (1 + 3 + 5)), ("null", 0)]
)
def test_grad_req_attribute_decides_what_a_second_step_sees(grad_req: str, expected: float) -> None:
    p, other = zeros(), zeros()
    p.grad_req = grad_req  # type: ignore[attr-defined]
    trainer = trainer_of([p, other])
    for slopes in ([1], [3, 5]):
        for slope in slopes:
            backward(p, slope)
        backward(other)
        trainer.step(1)
    assert p.tolist() == [expected] * 2
    assert other.tolist() == [-2, -2]


def test_zero_grad_drops_gradients_so_that_the_next_step_has_none() -> None:
    p = zeros()
    trainer = trainer_of([p])
    backward(p)
    trainer.zero_grad()
    assert p.grad is None
    with pytest.raises(StaleGradientError):
        trainer.step(1)


@pytest.mark.parametrize("uok", STORES)
def test_parameter_frozen_at_first_trains_from_when_it_is_unfrozen(uok: bool | None) -> None:
    frozen, other = zeros(), zeros()
    frozen.requires_grad_(False)
    trainer = trainer_of([frozen, other], uok)
    backward(other)
    trainer.step(1)
    assert frozen.tolist() == [0, 0]
    frozen.requires_grad_(True)
    for p in (frozen, other):
        backward(p)
    trainer.step(1)
    backward(frozen)
    backward(other)
    trainer.step(1)
    assert frozen.tolist() == [-2, -2]
    assert other.tolist() == [-3, -3]


@pytest.mark.parametrize("owner", ["trainer", "module"])
@pytest.mark.parametrize("uok", STORES)
def test_zeros_in_place_of_gradients_count_as_for_torch(uok: bool | None, owner: str) -> None:
    options = {"lr": 0.5, "momentum": 0.5, "weight_decay": 0.5}
    mine, twin = (nn.ParameterList([torch.ones(2), torch.ones(2)]) for _ in range(2))
    trainer = trainer_of(mine, uok, "torch:SGD", options=options)
    rows = [(mine, trainer), (twin, torch.optim.SGD(twin.parameters(), **options))]
    for parameters, optimizer in rows:
        for used in (2, 1, 1):
            what = optimizer if owner == "trainer" else parameters
            what.zero_grad(set_to_none=False)
            for p in list(parameters)[:used]:
                backward(p)
            optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        backward(parameters[0], 3)
        assert [p.grad.tolist() for p in parameters] == [[3, 3], [0, 0]]  # type: ignore[union-attr]
    torch.testing.assert_close(list(mine.parameters()), list(twin.parameters()))
    with pytest.raises(StaleGradientError):
        trainer.step(1)


Loop = Callable[[Any, Parameter, Parameter], None]
"""What comes before each step: a gets a gradient by a backward pass, if any, and b one that is written in place."""


def written_after_zero_grad(optimizer: Any, a: Parameter, b: Parameter) -> None:
    optimizer.zero_grad(set_to_none=False)
    backward(a)
    b.grad.copy_(torch.ones(2))  # type: ignore[union-attr]


def written_before_the_backward_pass(optimizer: Any, a: Parameter, b: Parameter) -> None:
    optimizer.zero_grad(set_to_none=False)
    for p in (a, b):
        p.grad.add_(3.0)  # type: ignore[union-attr]
    backward(a)


def written_after_zeros_of_the_loop(optimizer: Any, a: Parameter, b: Parameter) -> None:
    for p in (a, b):
        p.grad.zero_()  # type: ignore[union-attr]
    backward(a)
    b.grad.sub_(2.0)  # type: ignore[union-attr]


def written_without_zeros(optimizer: Any, a: Parameter, b: Parameter) -> None:
    b.grad.copy_(torch.ones(2))  # type: ignore[union-attr]
    a.grad = None
    backward(a)


def written_without_a_backward_pass(optimizer: Any, a: Parameter, b: Parameter) -> None:
    for p in (a, b):
        p.grad.add_(1.0)  # type: ignore[union-attr]


def trained_by(loop: Loop, trains: Callable[[list[Parameter]], Any], **arguments: Any) -> list[list[float]]:
    given = [zeros(), zeros()]
    optimizer = trains(given)
    for p in given:
        p.grad = torch.zeros(2)
    for _ in range(4):
        loop(optimizer, *given)
        optimizer.step(**arguments)
    return [p.tolist() for p in given]


OPTIONS = {"lr": 1.0, "momentum": 0.5}
CLEAR = [written_after_zero_grad, written_before_the_backward_pass, written_after_zeros_of_the_loop]


@pytest.mark.parametrize("loop", CLEAR, ids=lambda loop: loop.__name__)
@pytest.mark.parametrize("arguments", [{}, {"batch_size": 1}], ids=["step()", "step(1)"])
@pytest.mark.parametrize("uok", STORES)
def test_what_is_written_over_zeros_is_new(uok: bool | None, arguments: dict[str, Any], loop: Loop) -> None:
    mine = trained_by(loop, lambda given: trainer_of(given, uok, "torch:SGD", OPTIONS), **arguments)
    assert mine == trained_by(loop, lambda given: torch.optim.SGD(given, **OPTIONS))


@pytest.mark.parametrize("loop", [written_without_zeros, written_without_a_backward_pass])
@pytest.mark.parametrize("uok", STORES)
def test_writes_over_used_gradients_count_as_for_torch_with_one_warning(uok: bool | None, loop: Loop) -> None:
    with pytest.warns(GradientWriteWarning) as caught:
        mine = trained_by(
            loop, lambda given: trainer_of(dict(zip("ab", given, strict=True)), uok, "torch:SGD", OPTIONS)
        )
    assert mine == trained_by(loop, lambda given: torch.optim.SGD(given, **OPTIONS))
    assert len(caught) == 1
    assert ("parameters 'b':" if loop is written_without_zeros else "parameters 'a', 'b':") in str(
        caught[0].message
    )
    assert caught[0].filename == __file__


@pytest.mark.parametrize("uok", STORES)
def test_what_is_written_over_used_gradients_is_stale_for_a_step_with_a_batch_size(uok: bool | None) -> None:
    a, b = zeros(), zeros()
    trainer = trainer_of({"a": a, "b": b}, uok)
    for p in (a, b):
        backward(p)
    trainer.step(1)
    b.grad.mul_(0.5)  # type: ignore[union-attr]
    backward(a)
    with pytest.raises(StaleGradientError, match="Those of b were used"):
        trainer.step(1)
    with pytest.warns(GradientWriteWarning, match="leaves out .* of parameters 'b':"):
        trainer.step(1, ignore_stale_grad=True)
    assert [a.tolist(), b.tolist()] == [[-2, -2], [-1, -1]]
    backward(a)
    assert b.grad is None  # as any other that is old, so that clipping does not measure it


def test_write_to_a_used_gradient_that_the_next_backward_pass_replaces_is_named_once() -> None:
    a, b = zeros(), zeros()
    trainer = trainer_of({"a": a, "b": b})

    def run(is_written: bool) -> None:
        if is_written:
            b.grad.mul_(2.0)  # type: ignore[union-attr]
        for p in (a, b):
            backward(p)
        trainer.step(1)

    run(is_written=False)
    with pytest.warns(GradientWriteWarning, match="has dropped .* of parameters 'b':"):
        run(is_written=True)
    run(is_written=True)
    assert [a.tolist(), b.tolist()] == [[-3, -3]] * 2


def test_gradients_that_are_clipped_between_the_backward_pass_and_the_step_are_never_named() -> None:
    a, b = zeros(), zeros()
    trainer = trainer_of([a, b])
    for used in ([a, b], [a], [b], [a, b]):
        for p in used:
            backward(p, 4)
        torch.nn.utils.clip_grad_norm_([a, b], 1.0)
        trainer.step()
    assert trainer.last is not None


WRONG: dict[str, tuple[Callable[[nn.Module], dict[str, Any]], type[Exception], str]] = {
    "no such optimizer": (lambda net: {"optimizer": "sdg"}, UnknownNameError, r"'sdg'.*adam"),
    "no such option": (lambda net: {"optimizer_params": {"lrr": 1}}, ConfigurationError, r"'lrr'.*learning_rate"),
    "options beside an instance": (
        lambda net: {"optimizer": torch.optim.SGD(net.parameters()), "optimizer_params": {"lr": 1}},
        ConfigurationError,
        "must be None if optimizer is an instance",
    ),
    "not for a store": (
        lambda net: {"optimizer": torch.optim.LBFGS, "kvstore": "local", "update_on_kvstore": True},
        ConfigurationError,
        "LBFGS",
    ),
    "no such store": (lambda net: {"kvstore": "bogus"}, UnknownNameError, r"'bogus'.*dist_sync.*local"),
    "store of a wrong type": (lambda net: {"kvstore": 3}, ConfigurationError, "a kvstore or None, got int"),
    "update on no store": (lambda net: {"kvstore": None, "update_on_kvstore": True}, ConfigurationError, "needs a kvs"),
    "update on something": (lambda net: {"update_on_kvstore": "yes"}, ConfigurationError, "or None, got 'yes'"),
    "compression": (
        lambda net: {"kvstore": "local", "compression_params": {"type": "2bit"}},
        ConfigurationError,
        "not supported for this type of kvstore",
    ),
    "kind of compression": (lambda net: {"compression_params": {"type": "3bit"}}, UnknownNameError, "'3bit'.*2bit"),
    "parameters of a wrong type": (lambda net: {"params": 3}, ConfigurationError, "list or dict of .*, got int"),
    "parameter of a wrong type": (lambda net: {"params": [3]}, ConfigurationError, "got int for a parameter"),
    "two devices": (
        lambda net: {"params": [*net.parameters(), Parameter(torch.zeros(1, device="meta"))]},
        ConfigurationError,
        "'2' is on meta but '0' is on cpu",
    ),
    "options that are no dict": (lambda net: {"optimizer_params": [("lr", 1)]}, TypeError, "must be a dict of options"),
    "update with aggregation": (
        lambda net: {"optimizer_params": {"aggregate_num": 4}, "update_on_kvstore": True},
        ConfigurationError,
        "aggregate_num is above 1",
    ),
    "scheduler that is none": (
        lambda net: {"optimizer_params": {"lr_scheduler": 0.1}},
        ConfigurationError,
        "must be a scheduler",
    ),
    "no parameters": (lambda net: {"params": []}, ConfigurationError, "no parameters"),
    "option of a group": (
        lambda net: {"params": [{"params": net.parameters(), "momentumm": 1}]},
        ConfigurationError,
        "'momentumm'",
    ),
    "value of a group": (
        lambda net: {"params": [{"params": net.parameters(), "momentum": -1}]},
        ConfigurationError,
        "momentum must be .*got -1",
    ),
    "dtype": (
        lambda net: {"params": [*net.parameters(), Parameter(torch.zeros(1, dtype=torch.complex64))]},
        ConfigurationError,
        "'2' .torch.complex64",
    ),
    "overlap": (
        lambda net: {"params": [*net.parameters(), Parameter(net.weight.data[0])]},  # type: ignore[operator, union-attr, index]
        ConfigurationError,
        "'0' shares memory with '2'",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_wrong_argument_is_named_and_leaves_the_model_as_it_was(case: str) -> None:
    make, error, message = WRONG[case]
    net = nn.Linear(3, 2)
    before = [(p.data_ptr(), p.untyped_storage().data_ptr(), p._version) for p in net.parameters()]
    arguments = {"params": net.parameters(), "optimizer": "sgd", **make(net)}
    with pytest.raises(error, match=message):
        Trainer(**arguments)
    assert [(p.data_ptr(), p.untyped_storage().data_ptr(), p._version) for p in net.parameters()] == before
    for _ in range(2):
        net(torch.ones(1, 3)).sum().backward()
    bias: Tensor | None = net.bias.grad
    # No hook is left behind that would drop a gradient.
    assert bias is not None
    assert bias.tolist() == [2, 2]
