"""Options, learning rates, names and descriptions of optimizers."""

from __future__ import annotations

import logging
import math
import warnings
from typing import Any, ClassVar

import msgpack
import pytest
import torch

import kvtrainer.optimizer as facade
from kvstore_server.errors import ConfigurationError, SchedulerInUseError, UnknownNameError
from kvstore_server.optimizer import Optimizer, create, create_optimizer_from_spec, gluon, layerwise, register
from kvstore_server.optimizer.lr_scheduler import FactorScheduler
from kvstore_server.optimizer.torch_family import ELEMENTWISE
from kvtrainer import Trainer
from kvtrainer.errors import TorchNameWarning
from tests.support.optimizer_slices import Key


def travel(optimizer: Optimizer) -> Optimizer:
    return create_optimizer_from_spec(msgpack.unpackb(msgpack.packb(optimizer.spec())))


def halving(base_lr: float = 1.0) -> FactorScheduler:
    return FactorScheduler(step=2, factor=0.5, base_lr=base_lr)


@pytest.mark.parametrize(
    ("gluons", "torchs"),
    [
        (dict(learning_rate=0.3, wd=0.2), dict(lr=0.3, weight_decay=0.2)),
        (dict(beta1=0.8, beta2=0.9, epsilon=1e-4), dict(betas=(0.8, 0.9), eps=1e-4)),
        (dict(beta2=0.5), dict(betas=(0.9, 0.5))),
    ],
)
@pytest.mark.parametrize("name", ["adam", "torch:Adam"])
def test_both_spellings_mean_the_same(name: str, gluons: dict[str, Any], torchs: dict[str, Any]) -> None:
    assert create(name, **gluons).hyper == create(name, **torchs).hyper


@pytest.mark.parametrize(
    "options",
    [dict(lr=1.0, learning_rate=2.0), dict(wd=0.1, weight_decay=0.2), dict(beta1=0.8, betas=(0.9, 0.99))],
)
@pytest.mark.parametrize("name", ["adam", "torch:Adam"])
def test_two_values_under_two_spellings_are_an_error(name: str, options: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match="|".join(options)):
        create(name, **options)


@pytest.mark.parametrize("name", ["adam", "torch:Adam"])
def test_one_value_under_two_spellings_is_that_value(name: str) -> None:
    both = dict(lr=1.0, learning_rate=1.0, wd=0.1, weight_decay=0.1, beta1=0.8, betas=(0.8, 0.9))
    assert create(name, **both).hyper == create(name, lr=1.0, wd=0.1, betas=(0.8, 0.9)).hyper


@pytest.mark.parametrize("name", ["sgd", "torch:SGD"])
def test_an_unknown_option_is_named_beside_the_valid_ones(name: str) -> None:
    with pytest.raises(ConfigurationError, match=r"momentun.*multi_precision"):
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
        ("adam", dict(lazy_update=1)),
        ("adamw", dict(correct_bias="no")),
        ("adadelta", dict(rho=-0.1)),
        ("rmsprop", dict(rho=1.0)),
        ("rmsprop", dict(clip_weights=-1.0)),
        ("rmsprop", dict(centered=1)),
        ("signum", dict(wd_lh=-0.1)),
        ("nadam", dict(schedule_decay=-0.1)),
        ("ftml", dict(beta2=1.0)),
        ("ftrl", dict(lr=-0.1)),
        ("ftrl", dict(lamda1=-0.1)),
        ("ftrl", dict(beta=-1.0)),
        ("lamb", dict(lower_bound=-1.0)),
        ("lans", dict(upper_bound=-1.0)),
        ("sgld", dict(lr=-0.1)),
        *(("sgld", dict(seed=wrong)) for wrong in (-1, 0.5, True, "x", 2**63)),
        *(("sgd", dict(begin_num_update=wrong)) for wrong in (-1, 1.5, True)),
        *(("sgd", dict(aggregate_num=wrong)) for wrong in (0, 1.5, "inf")),
        *(("sgd", dict(lr_scheduler=wrong)) for wrong in (0.1, "factor", FactorScheduler)),
        ("torch:SGD", dict(lr_scheduler=FactorScheduler(2))),
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


def test_a_wrong_option_leaves_the_scheduler_as_it_was() -> None:
    for wrong in (dict(momentum=-1.0), dict(begin_num_update=-1), dict(aggregate_num=0)):
        scheduler = halving(1.0)
        with pytest.raises(ConfigurationError):
            create("sgd", learning_rate=0.5, lr_scheduler=scheduler, **wrong)
        assert scheduler.base_lr == 1.0


def test_torchs_own_text_explains_a_refused_value() -> None:
    with pytest.raises(ConfigurationError, match=r"rate: -1.*lr, momentum"):
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
    with pytest.raises(UnknownNameError, match=r"'zzz'.*--import MODULE.*adam, .*sgd, .*test, "):
        create("zzz")


def test_an_instance_is_returned_as_it_is_and_takes_no_options() -> None:
    optimizer = create("sgd")
    assert create(optimizer) is optimizer
    with pytest.raises(ConfigurationError, match="SGD"):
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
    "lamb": dict(lower_bound=0.5, bias_correction=False),
    "lans": dict(upper_bound=0.5),
    "lars": dict(eta=0.5, momentum=0.5),
    "groupadagrad": dict(epsilon=0.5),
}


@pytest.mark.parametrize("cls", [*gluon.FAMILY, *layerwise.FAMILY], ids=lambda cls: cls.name)
def test_every_gluon_description_survives_the_wire(cls: type[Optimizer]) -> None:
    options = {"learning_rate": 0.5, "clip_gradient": 3.0, "rescale_grad": 0.25, "begin_num_update": 4}
    decay = {} if cls is layerwise.GroupAdaGrad else {"wd": 0.125}
    optimizer = create(cls, **options, **decay, **UNUSUAL[cls.name])
    arrived = travel(optimizer)
    assert type(arrived) is cls
    assert arrived.hyper == optimizer.hyper != create(cls).hyper
    assert arrived.spec() == optimizer.spec()


def test_a_description_leaves_out_what_only_the_trainer_put_into_the_group() -> None:
    optimizer = create("torch:AdamW")
    optimizer.hyper = {**optimizer.hyper, "lr": 0.5, "params": [torch.zeros(1)], "initial_lr": 1.0}
    assert travel(optimizer).learning_rate == 0.5


def test_a_malformed_description_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="sgd"):
        create_optimizer_from_spec({"name": "sgd"})


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
    register(type("Mine", (gluon.SGD,), {}))
    assert caplog.records == []
    assert type(create("sgd")) is gluon.SGD
    assert create("mine").registered_name == "mine"


def test_a_class_may_have_another_base_that_takes_arguments_of_its_own() -> None:
    class Labelled:
        label: ClassVar[str]

        def __init_subclass__(cls, label: str = "") -> None:
            cls.label = label

    class Named(Optimizer, Labelled, label="mine"):
        """Nothing of its own."""

    assert (Named.label, Named.name) == ("mine", "named")


def test_registering_a_name_again_warns_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    register(type("Twice", (Optimizer,), {}))
    with caplog.at_level(logging.WARNING):
        register(type("Twice", (Optimizer,), {}))
    assert "optimizer 'twice' is now" in caplog.text


def test_an_optimizer_without_update_says_what_is_missing() -> None:
    weight = torch.zeros(1)
    with pytest.raises(NotImplementedError, match="update"):
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

    key = Key(facade.create("averagedsign", wd=0.01), torch.tensor([1.0, -2.0, 0.5, 3.0]))
    for t in range(1, 6):
        key.update(torch.tensor([0.1 * t, -0.2, 0.3 * (-1) ** t, 0.05]))
    # MXNet's signum ends here, up to the decay wd_lh of 0.001 that it was given.
    assert (key.weight - torch.tensor([0.949951, -1.949901, 0.5099747, 2.9498508])).abs().max() < 2e-4


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
    with pytest.raises(UserWarning, match=r"FactorScheduler\(.*base_lr") as caught:
        optimizer.set_learning_rate(0.1)
    assert isinstance(caught.value, SchedulerInUseError)
    with pytest.raises(SchedulerInUseError):
        optimizer.lr = 0.1
    assert optimizer.learning_rate == 1.0


def test_a_function_of_the_number_of_updates_is_a_scheduler_that_cannot_travel() -> None:
    optimizer = create("sgd", lr_scheduler=lambda num_update: 1.0 / (1 + num_update))
    optimizer.num_update = 3
    assert optimizer.learning_rate == 0.25
    with pytest.raises(ConfigurationError, match="lambda"):
        optimizer.spec()
    assert optimizer.plain_hyper()["momentum"] == 0.0


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


def test_a_rate_that_must_not_be_negative_stays_as_it_was() -> None:
    optimizer = create("ftrl", lr=0.5)
    with pytest.raises(ConfigurationError, match=r"-0\.5"):
        optimizer.set_learning_rate(-0.5)
    assert optimizer.learning_rate == 0.5
    assert torch.tensor(optimizer.hyper["lr"]) == 0.5


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
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        facade.create(name, **options)
        trainer_of(name, options)
    assert caught == []


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
