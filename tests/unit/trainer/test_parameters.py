"""The forms in which parameters may be given, what they are called, and kinds that are frozen and stay outside."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import Parameter

from kvtrainer import Trainer
from kvtrainer.errors import ConfigurationError, MemoryFormatWarning, ParameterMovedError
from kvtrainer.trainer.groups import collect_groups
from tests.support.ways_to_train import STORES, backward, trainer_of

A, B, C = (Parameter(torch.zeros(1)) for _ in range(3))


def names_of(params: Any, taken: Collection[str] = ()) -> list[dict[str, int]]:
    """Per group: name → which of A, B and C it is."""
    numbers = {id(p): i for i, p in enumerate((A, B, C))}
    return [
        {
            name: numbers[id(p)]
            for name, p in zip(group["param_names"], group["params"], strict=True)
        }
        for group in collect_groups(params, taken)[0]
    ]  # fmt: skip


def module() -> nn.Module:
    net = nn.Module()
    net.b, net.a = B, A
    return net


FORMS: dict[str, tuple[Callable[[], Any], list[dict[str, int]]]] = {
    "list": (lambda: [B, A], [{"0": 1, "1": 0}]),
    "generator": (lambda: (p for p in (B, A)), [{"0": 1, "1": 0}]),
    "dict in sorted order of its keys": (lambda: {"b": B, "a": A, "c": C}, [{"a": 0, "b": 1, "c": 2}]),
    "ordered dict": (lambda: OrderedDict(b=B, a=A), [{"a": 0, "b": 1}]),
    "named parameters": (lambda: [("b", B), ("a", A)], [{"b": 1, "a": 0}]),
    "module": (module, [{"b": 1, "a": 0}]),
    "parameters of a module": (lambda: module().parameters(), [{"0": 1, "1": 0}]),
    "groups": (lambda: [{"params": [B]}, {"params": A}], [{"0": 1}, {"1": 0}]),
    "group of a module": (lambda: [{"params": module()}], [{"b": 1, "a": 0}]),
    "group of a dict": (lambda: [{"params": {"b": B, "a": A}}], [{"a": 0, "b": 1}]),
    "group with names": (lambda: [{"params": [B, A], "param_names": ["x", "y"]}], [{"x": 1, "y": 0}]),
    "shared parameter": (lambda: [B, A, B, C], [{"0": 1, "1": 0, "2": 2}]),
    "shared under two names": (lambda: {"z": A, "b": B, "c": A}, [{"b": 1, "c": 0}]),
    "shared by two groups": (lambda: [{"params": [A]}, {"params": [A, B]}], [{"0": 0}, {"1": 1}]),
}


@pytest.mark.parametrize("form", FORMS)
def test_parameters_are_found_named_and_ordered(form: str) -> None:
    make, expected = FORMS[form]
    found = names_of(make())
    assert [list(group.items()) for group in found] == [list(group.items()) for group in expected]


def test_options_of_a_group_are_kept_and_the_given_group_is_not_changed() -> None:
    given = {"params": [A], "lr": 0.5, "wd": 0.1}
    ([group], _) = collect_groups([given])
    assert {name: group[name] for name in ("lr", "wd")} == {"lr": 0.5, "wd": 0.1}
    assert given == {"params": [A], "lr": 0.5, "wd": 0.1}


def test_unnamed_parameters_are_counted_behind_others_and_take_no_name_of_theirs() -> None:
    assert names_of([{"params": [A, B]}], taken={"0", "2", "3"}) == [{"4": 0, "5": 1}]


ERRORS: dict[str, tuple[Callable[[], Any], str]] = {
    "number": (lambda: 3, "expected a Module, or a list or dict of parameters, got int"),
    "text": (lambda: "weights", "got str"),
    "none": (lambda: None, "got NoneType"),
    "single tensor": (lambda: A, "got a single tensor, put it in a list"),
    "set": (lambda: {A, B}, "set of parameters has no order"),
    "set in a group": (lambda: [{"params": {A, B}}], "set of parameters has no order"),
    "list of numbers": (lambda: [1, 2], "got int for a parameter"),
    "dict of numbers": (lambda: {"a": 1}, "got int for 'a'"),
    "nothing": (lambda: [], "no parameters to train"),
    "empty module": (nn.ReLU, "no parameters to train"),
    "groups of nothing": (lambda: [{"params": []}], "no parameters to train"),
    "group without params": (lambda: [{"lr": 1}], "needs 'params'; got only lr"),
    "fewer names than parameters": (
        lambda: [{"params": [A, B], "param_names": ["x"]}],
        "2 parameters but 1 param_names",
    ),
    "one name twice": (lambda: [("w", A), ("w", B)], "two parameters .*'w'"),
    "name that is a position": (
        lambda: [{"params": [("1", A)]}, {"params": [B]}],
        "two parameters .*'1'",
    ),
    "computed tensor": (lambda: {"w": A * 2}, "'w' is the result of a computation"),
}


@pytest.mark.parametrize("case", ERRORS)
def test_what_cannot_be_trained_is_refused(case: str) -> None:
    make, message = ERRORS[case]
    with pytest.raises(ConfigurationError, match=message):
        collect_groups(make())


@pytest.mark.parametrize(
    "case", ["number", "text", "none", "single tensor", "set in a group", "list of numbers"]
)
def test_what_torch_refuses_by_a_type_error_is_a_type_error_here(case: str) -> None:
    make, _ = ERRORS[case]
    for train in (collect_groups, lambda params: torch.optim.SGD(params, lr=0.1)):
        with pytest.raises(TypeError):
            train(make())


def test_rates_and_momenta_are_listed_by_group() -> None:
    p, q = Parameter(torch.zeros(1)), Parameter(torch.zeros(1))
    groups = [{"params": [p]}, {"params": [q], "lr": 0.5, "momentum": 0.3}]
    trainer = Trainer(groups, "torch:SGD", {"lr": 0.1, "momentum": 0.9}, None)
    assert trainer.get_lr() == {"lr": [0.1, 0.5]}
    assert trainer.get_momentum() == {"momentum": [0.9, 0.3]}
    assert trainer.defaults["lr"] == 0.1
    assert Trainer([p], "torch:Adam", {"betas": (0.7, 0.9)}, None).get_momentum() == {"momentum": [0.7]}
    assert Trainer([p], "torch:Adagrad", None, None).get_momentum() == {"momentum": [0.0]}


def convolution() -> torch.nn.Conv2d:
    return torch.nn.Conv2d(3, 4, 3)


def test_a_memory_format_that_is_lost_is_warned_of_once_and_inputs_decide() -> None:
    net = torch.nn.Sequential(convolution(), torch.nn.Flatten()).to(memory_format=torch.channels_last)
    x = torch.rand(2, 3, 5, 5).to(memory_format=torch.channels_last)
    before = net[0](x).detach()
    with pytest.warns(MemoryFormatWarning, match=r"1 of 2 parameters .*: 0\.weight;") as caught:
        trainer = Trainer(net, "torch:SGD", {"lr": 0.0})
    assert caught[0].filename == __file__
    assert torch.allclose(net[0](x), before, atol=1e-6)
    assert net[0](x).is_contiguous(memory_format=torch.channels_last)
    net(x).sum().backward()
    assert trainer.step().updated


def test_a_memory_format_after_construction_is_refused_with_advice_that_holds() -> None:
    net = convolution()
    x = torch.rand(2, 3, 5, 5)
    trainer = Trainer(net, "torch:SGD", {"lr": 0.0})
    net(x).sum().backward()
    net.to(memory_format=torch.channels_last)
    with pytest.raises(ParameterMovedError, match=r"x\.to\(memory_format=torch\.channels_last\)"):
        trainer.step()
    net.to(torch.float64)
    with pytest.raises(ParameterMovedError, match="before building the Trainer"):
        trainer.step()


def test_parameters_without_a_memory_format_of_their_own_are_not_warned_of() -> None:
    net = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 1), torch.nn.Linear(3, 1))
    Trainer(net.to(memory_format=torch.channels_last), "sgd")


class Quantised(Tensor):
    """As those of bitsandbytes and torchao: a class of their own."""


KINDS: dict[str, Callable[[], Tensor]] = {
    "int8": lambda: torch.arange(3, dtype=torch.int8),
    "int64": lambda: torch.arange(3),
    "bool": lambda: torch.tensor([True, False]),
    "complex": lambda: torch.tensor([1 + 2j]),
    "float8": lambda: torch.ones(3).to(torch.float8_e4m3fn),
    "class of its own": lambda: torch.ones(3).as_subclass(Quantised),
    "rows alone": lambda: torch.eye(3).to_sparse(),
    "repeated": lambda: torch.ones(1).expand(3),
    "elsewhere": lambda: torch.empty(3, device="meta"),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("uok", STORES)
def test_frozen_parameter_of_any_kind_stays_beside_trained_ones(uok: bool | None, kind: str) -> None:
    frozen = Parameter(KINDS[kind](), requires_grad=False)
    data, before = frozen.data, None if frozen.is_meta else frozen.detach().to_dense().tolist()
    trained, last = (Parameter(torch.zeros(2)) for _ in range(2))
    with trainer_of([frozen, trained, last], uok, options={"learning_rate": 1.0, "momentum": 0.5}) as trainer:
        for _ in range(2):
            backward(trained)
            backward(last)
            trainer.step(1)
        trainer.set_data()
        other = trainer_of([frozen, trained, last], uok, options={"learning_rate": 1.0, "momentum": 0.5})
        other.load_state_dict(trainer.state_dict())
        other.close()
        with pytest.raises(ConfigurationError):
            trainer.set_data({"0": data})
    assert [p.tolist() for p in (trained, last)] == [[-2.5, -2.5]] * 2
    assert frozen.layout is data.layout
    assert before is None or frozen.detach().to_dense().tolist() == before


@pytest.mark.parametrize("dtype", [torch.complex64, torch.float8_e4m3fn])
def test_parameter_of_another_dtype_is_refused_by_name_when_it_is_to_be_trained(dtype: torch.dtype) -> None:
    other = Parameter(torch.ones(2).to(dtype))
    with pytest.raises(ConfigurationError, match=r"'other' \(.*requires_grad_\(False\)"):
        Trainer({"other": other}, "sgd", kvstore=None)
    a = Parameter(torch.zeros(1))
    trainer = Trainer({"a": a, "other": other.requires_grad_(False)}, "sgd", kvstore=None)
    other.requires_grad_(True)
    backward(a)
    for _ in range(2):
        with pytest.raises(ConfigurationError, match="'other'"):
            trainer.step()
    other.requires_grad_(False)
    trainer.step()
    assert a.item() == pytest.approx(-0.1)


def test_frozen_parameter_that_becomes_one_that_can_be_held_is_trained_from_then_on() -> None:
    a, b = Parameter(torch.zeros(1)), Parameter(torch.ones(2).to(torch.float8_e4m3fn), requires_grad=False)
    trainer = Trainer([b, a], "sgd", {"learning_rate": 1.0}, kvstore=None)
    backward(a)
    trainer.step(1)
    b.data = b.float()
    b.requires_grad_(True)
    for p in (a, b):
        backward(p)
    trainer.step(1)
    assert (a.tolist(), b.tolist()) == ([-2.0], [0.0, 0.0])
