"""Options, names and descriptions of optimizers."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any, ClassVar

import msgpack
import pytest
import torch

import kvtrainer.optimizer as facade
from kvstore_server.errors import ConfigurationError, UnknownNameError
from kvstore_server.lr_scheduler import FactorScheduler
from kvstore_server.optimizer import (
    Optimizer,
    create,
    create_from_spec,
    register,
    registry,
)
from kvstore_server.optimizer.torch_family import ELEMENTWISE
from kvstore_server.plan import TensorSpec, make_plan
from kvtrainer import Trainer
from kvtrainer.errors import TorchNameWarning
from tests.support.optimizer_slices import empty, update_slice


@pytest.fixture(autouse=True)
def _restore_registry() -> Iterator[None]:
    before = dict(registry._registry)
    yield
    registry._registry.clear()
    registry._registry.update(before)


def travel(optimizer: Optimizer) -> Optimizer:
    return create_from_spec(msgpack.unpackb(msgpack.packb(optimizer.spec())))


@pytest.mark.parametrize(
    ("gluon", "torchs"),
    [
        (dict(learning_rate=0.3, wd=0.2), dict(lr=0.3, weight_decay=0.2)),
        (dict(beta1=0.8, beta2=0.9, epsilon=1e-4), dict(betas=(0.8, 0.9), eps=1e-4)),
        (dict(beta2=0.5), dict(betas=(0.9, 0.5))),
    ],
)
@pytest.mark.parametrize("name", ["adam", "torch:Adam"])
def test_both_spellings_mean_the_same(name: str, gluon: dict[str, Any], torchs: dict[str, Any]) -> None:
    assert create(name, **gluon).hyper == create(name, **torchs).hyper


@pytest.mark.parametrize(
    "options",
    [dict(lr=1.0, learning_rate=1.0), dict(wd=0.1, weight_decay=0.1), dict(beta1=0.9, betas=(0.9, 0.99))],
)
@pytest.mark.parametrize("name", ["adam", "torch:Adam"])
def test_one_option_under_two_spellings_is_an_error(name: str, options: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match="two spellings"):
        create(name, **options)


@pytest.mark.parametrize("name", ["sgd", "torch:SGD"])
def test_an_unknown_option_is_named_beside_the_valid_ones(name: str) -> None:
    with pytest.raises(ConfigurationError, match=r"momentun.*momentum.*multi_precision"):
        create(name, momentun=0.9)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("sgd", dict(learning_rate="fast")),
        ("sgd", dict(learning_rate=float("nan"))),
        ("sgd", dict(momentum=-0.1)),
        ("sgd", dict(momentum=True)),
        ("sgd", dict(wd=-1.0)),
        ("sgd", dict(clip_gradient=-1.0)),
        ("sgd", dict(multi_precision="yes")),
        ("sgd", dict(rescale_grad=None)),
        ("adam", dict(betas=(0.9, 1.0))),
        ("adam", dict(betas=0.9)),
        ("adam", dict(betas=(0.9,))),
        ("adam", dict(betas="ab")),
        ("adam", dict(epsilon=-1e-8)),
        ("torch:Adam", dict(betas=(0.9, 1.0))),
        ("torch:SGD", dict(lr=-1.0)),
        ("torch:SGD", dict(nesterov=True)),
        ("torch:SGD", dict(lr="fast")),
        ("torch:Adam", dict(differentiable=True)),
    ],
)
def test_an_impossible_value_is_refused(name: str, options: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=next(iter(options))):
        create(name, **options)


def test_gluon_accepts_a_negative_learning_rate() -> None:
    assert create("sgd", learning_rate=-0.5).learning_rate == -0.5


def test_torchs_own_text_explains_a_refused_value() -> None:
    with pytest.raises(ConfigurationError, match=r"Invalid learning rate: -1.*options are lr, momentum"):
        create(torch.optim.SGD, lr=-1)


def test_the_numbers_are_read_through_a_replaced_group() -> None:
    optimizer = create("sgd", learning_rate=0.1)
    group = {"params": [], "lr": 0.5, "weight_decay": 0.25, "momentum": 0.0, "clip_gradient": 2.0}
    optimizer.hyper = group
    optimizer.lr = 0.75
    assert (group["lr"], optimizer.learning_rate) == (0.75, 0.75)
    assert (optimizer.wd, optimizer.clip_gradient) == (0.25, 2.0)


@pytest.mark.parametrize("name", ["SGD", "sgd", "Sgd"])
def test_names_are_case_insensitive(name: str) -> None:
    assert create(name).registered_name == "sgd"
    assert create(f"Torch:{name}").registered_name == "torch:SGD"


def test_an_unknown_name_lists_the_valid_ones_and_how_a_server_learns_more() -> None:
    with pytest.raises(
        UnknownNameError, match=r"'zzz'.*--import MODULE.*adam, .*sgd, .*test, .*torch:adadelta"
    ):
        create("zzz")


def test_an_instance_is_returned_as_it_is_and_takes_no_options() -> None:
    optimizer = create("sgd")
    assert create(optimizer) is optimizer
    with pytest.raises(ConfigurationError, match="optimizer_params must be None if optimizer is an instance"):
        create(optimizer, lr=1.0)


def test_something_that_is_no_optimizer_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="got 3"):
        create(3)  # type: ignore[arg-type]


@pytest.mark.parametrize("cls", ELEMENTWISE, ids=lambda cls: cls.__name__)
def test_a_torch_description_survives_the_wire(cls: type[torch.optim.Optimizer]) -> None:
    optimizer = create(cls, lr=0.25, maximize=True, multi_precision=True)
    arrived = travel(optimizer)
    assert arrived.hyper == optimizer.hyper
    assert arrived.multi_precision
    assert arrived.spec() == optimizer.spec()


def test_a_gluon_description_survives_the_wire() -> None:
    arrived = travel(create("adam", beta1=0.5, rescale_grad=0.125, clip_gradient=3.0))
    assert (arrived.hyper["betas"], arrived.rescale_grad, arrived.clip_gradient) == ((0.5, 0.999), 0.125, 3.0)


def test_a_description_leaves_out_what_only_the_trainer_put_into_the_group() -> None:
    optimizer = create("torch:AdamW")
    optimizer.hyper = {**optimizer.hyper, "lr": 0.5, "params": [torch.zeros(1)], "initial_lr": 1.0}
    assert travel(optimizer).learning_rate == 0.5


def test_a_malformed_description_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="needs a name and its numbers"):
        create_from_spec({"name": "sgd"})


def test_a_registered_optimizer_is_found_by_its_class_name_and_inherits_options() -> None:
    @register
    class Heavy(Optimizer):
        defaults: ClassVar[dict[str, Any]] = {"learning_rate": 0.2, "mass": 3, "kind": "a"}

    @facade.register
    class Heavier(Heavy):
        defaults: ClassVar[dict[str, Any]] = {"mass": 4}

    optimizer = facade.create("HEAVIER", kind="b")
    assert isinstance(travel(optimizer), Heavier)
    assert {"lr": 0.2, "mass": 4, "kind": "b"}.items() <= optimizer.hyper.items()


def test_a_subclass_of_a_built_in_does_not_take_its_name(caplog: pytest.LogCaptureFixture) -> None:
    register(type("Mine", (registry.gluon.SGD,), {}))
    assert caplog.records == []
    assert type(create("sgd")) is registry.gluon.SGD
    assert create("mine").registered_name == "mine"


def test_registering_a_name_again_warns_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    register(type("Twice", (Optimizer,), {}))
    with caplog.at_level(logging.WARNING):
        register(type("Twice", (Optimizer,), {}))
    assert "optimizer 'twice' is now" in caplog.text


def test_an_optimizer_without_update_says_what_is_missing() -> None:
    weight = torch.zeros(1)
    with pytest.raises(NotImplementedError, match="Optimizer must define update"):
        Optimizer().update(weight, weight, {}, {})


def test_the_example_of_the_documentation_follows_the_sign_of_the_averaged_gradient() -> None:
    @facade.register
    class AveragedSign(facade.Optimizer):
        defaults: ClassVar[dict[str, Any]] = {"learning_rate": 0.01, "momentum": 0.9}

        def create_state(self, weight: torch.Tensor) -> dict[str, Any]:
            return {"momentum_buffer": torch.zeros_like(weight)}

        def update(self, weight: torch.Tensor, grad: torch.Tensor, state: dict[str, Any], hyper: Any) -> None:
            grad.add_(weight, alpha=hyper["weight_decay"])
            state["momentum_buffer"].lerp_(grad, 1 - hyper["momentum"])
            weight.sub_(state["momentum_buffer"].sign(), alpha=hyper["lr"])

    piece = make_plan([TensorSpec("w", (4,), "float32")], 1).slices[0]
    optimizer, state, weight = (
        facade.create("averagedsign", wd=0.01),
        empty(piece),
        torch.zeros(16),
    )
    weight[:4] = torch.tensor([1.0, -2.0, 0.5, 3.0])
    for t in range(1, 6):
        grad = torch.zeros(16)
        grad[:4] = torch.tensor([0.1 * t, -0.2, 0.3 * (-1) ** t, 0.05])
        update_slice(optimizer, piece, weight, grad, state, [optimizer.hyper])
    # MXNet's signum ends here, up to the decay wd_lh of 0.001 that it was given.
    assert (weight[:4] - torch.tensor([0.949951, -1.949901, 0.5099747, 2.9498508])).abs().max() < 2e-4


TORCHS_NAMES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "AdamW": ({"lr": 1e-3}, ["weight_decay=0.0 (torch: 0.01)", "eps=1e-06 (torch: 1e-08)", "'torch:AdamW'"]),
    "RMSprop": ({"learning_rate": 0.1, "momentum": 0.5}, ["rho=0.9 (torch: alpha=0.99)"]),
    "SGD": ({"momentum": 0.9}, ["lr=0.1 (torch: 0.001)"]),
    "Adagrad": ({"lr": 0.1}, ["eps=1e-06 (torch: 1e-10)"]),
    "NAdam": ({"wd": 0.1}, ["lr=0.001 (torch: 0.002)"]),
}
"""Numbers of MXNet 2.0 and of torch 2.13."""


@pytest.mark.parametrize("name", TORCHS_NAMES)
def test_a_name_as_torch_spells_it_is_warned_of_once_with_the_numbers_that_differ(name: str) -> None:
    options, said = TORCHS_NAMES[name]
    for build in (lambda: facade.create(name, **options), lambda: trainer_of(name, options)):
        with pytest.warns(TorchNameWarning) as caught:
            build()
        [warning] = caught
        assert all(text in str(warning.message) for text in said)
        assert warning.filename == __file__
        assert "lr=" not in str(warning.message) or not {"lr", "learning_rate"} & options.keys()


QUIET: dict[str, tuple[str, dict[str, Any]]] = {
    "lower case": ("adamw", {"lr": 1e-3}),
    "upper case": ("ADAMW", {"lr": 1e-3}),
    "torch's": ("torch:AdamW", {"lr": 1e-3}),
    "all that differ are given": ("AdamW", {"wd": 0.0, "epsilon": 1e-6}),
    "equal numbers": ("Adam", {}),
    "a schedule decides the learning rate": ("SGD", {"lr_scheduler": FactorScheduler(2)}),
    "no class of torch": ("Signum", {}),
}


@pytest.mark.parametrize("case", QUIET)
def test_other_names_are_not_warned_of(case: str) -> None:
    name, options = QUIET[case]
    trainer_of(name, options)


def test_a_users_class_under_a_name_of_torchs_is_not_warned_of() -> None:
    class Adagrad(Optimizer):
        defaults: ClassVar[dict[str, Any]] = {"learning_rate": 7.0}

    register(Adagrad)
    assert trainer_of("Adagrad", {}).learning_rate == 7


def test_the_word_of_a_configuration_is_torchs_and_not_warned_of() -> None:
    net = torch.nn.Linear(1, 1)
    for name in ("AdamW", "torch:AdamW", "gluon:adamw"):
        Trainer.from_config(net, {"optimizer": {"type": name, "lr": 0.1}, "kvstore": None})
        net = torch.nn.Linear(1, 1)


def trainer_of(name: str, options: dict[str, Any]) -> Trainer:
    return Trainer([torch.nn.Parameter(torch.zeros(1))], name, options, kvstore=None)
