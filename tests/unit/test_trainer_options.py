"""Where the Trainer's numbers come from: groups, attributes, schedulers, torch instances; and wrong arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import lr_scheduler

from kvtrainer import Trainer, optimizer
from kvtrainer.errors import ConfigurationError, UnknownNameError

IN_STORE = pytest.mark.parametrize("in_store", [False, True], ids=["in-process", "in-store"])


def trainer_of(
    parameters: Any, kind: Any, options: dict[str, Any] | None = None, in_store: bool = False
) -> Trainer:
    return Trainer(parameters, kind, options, kvstore="local", update_on_kvstore=in_store)


def zeros(count: int = 2) -> list[Parameter]:
    return [Parameter(torch.zeros(1)) for _ in range(count)]


def step(trainer: Trainer, slope: float = 1.0) -> None:
    """One step with a gradient of `slope` everywhere."""
    for group in trainer.param_groups:
        for p in group["params"]:
            p.grad = torch.full_like(p, slope)
    trainer.step(1)


def values(parameters: list[Parameter]) -> list[float]:
    return [p.item() for p in parameters]


@IN_STORE
@pytest.mark.parametrize("spelling", ["lr", "learning_rate"])
def test_group_has_its_own_options_under_either_spelling(in_store: bool, spelling: str) -> None:
    a, b = parameters = zeros()
    groups = [{"params": [a], spelling: 0.5}, {"params": b, "wd": 0.5}]
    trainer = trainer_of(groups, "sgd", {"learning_rate": 2.0}, in_store)
    step(trainer)
    step(trainer)
    assert values(parameters) == [-1.0, -2.0 - 2 * (1 - 0.5 * 2)]
    assert [(group["lr"], group["weight_decay"]) for group in trainer.param_groups] == [
        (0.5, 0.0),
        (2.0, 0.5),
    ]


@IN_STORE
def test_learning_rate_is_that_of_the_groups_and_setting_it_reaches_all(in_store: bool) -> None:
    a, b = parameters = zeros()
    trainer = trainer_of(
        [{"params": [a]}, {"params": [b], "lr": 3.0}], "sgd", {"learning_rate": 1.0}, in_store
    )
    assert trainer.learning_rate == 1.0
    step(trainer)
    trainer.set_learning_rate(0.5)
    step(trainer)
    assert values(parameters) == [-1.5, -3.5]
    trainer.param_groups[0]["lr"] = 0.25
    assert trainer.learning_rate == 0.25


@IN_STORE
def test_optimizer_shows_and_sets_the_numbers_of_the_one_group(in_store: bool) -> None:
    [p] = parameters = zeros(1)
    mine = optimizer.create("sgd", learning_rate=1.0)
    trainer = trainer_of([p], mine, None, in_store)
    assert trainer.optimizer is mine
    trainer.param_groups[0]["lr"] = 2.0
    assert mine.learning_rate == 2.0
    trainer.load_state_dict(trainer.state_dict())
    trainer.set_learning_rate(4.0)
    assert mine.learning_rate == 4.0
    mine.set_learning_rate(8.0)
    step(trainer)
    assert values(parameters) == [-8.0]


@pytest.mark.parametrize("lr", [True, None, "1", float("nan"), float("inf")])
def test_learning_rate_that_is_no_number_is_refused(lr: Any) -> None:
    trainer = trainer_of(zeros(), "sgd", {"learning_rate": 1.0})
    with pytest.raises(ConfigurationError, match="learning rate must be a finite number"):
        trainer.set_learning_rate(lr)
    assert trainer.learning_rate == 1.0


@IN_STORE
def test_learning_rate_may_be_a_tensor_or_a_numpy_number(in_store: bool) -> None:
    [p] = parameters = zeros(1)
    trainer = trainer_of([p], "torch:SGD", {"lr": torch.tensor(0.5)}, in_store)
    step(trainer)
    trainer.param_groups[0]["lr"] = torch.tensor(0.25)
    step(trainer)
    trainer.param_groups[0]["lr"] = torch.tensor([0.125]).numpy()[0]
    step(trainer)
    assert values(parameters) == [-0.875]


@IN_STORE
def test_multipliers_are_read_from_the_parameters_at_every_step(in_store: bool) -> None:
    a, b = parameters = [Parameter(torch.ones(1)) for _ in range(2)]
    a.lr_mult = 0.5  # type: ignore[attr-defined]
    b.wd_mult = 0.0  # type: ignore[attr-defined]
    trainer = trainer_of(parameters, "sgd", {"learning_rate": 1.0, "wd": 1.0}, in_store)
    step(trainer)
    assert values(parameters) == [1 - 0.5 * 2, 0.0]
    a.lr_mult = 2.0  # type: ignore[attr-defined]
    del b.wd_mult  # type: ignore[attr-defined]
    step(trainer)
    assert values(parameters) == [-2.0, -1.0]


def test_multiplier_that_is_no_number_is_refused() -> None:
    [p] = zeros(1)
    trainer = trainer_of({"bias": p}, "sgd")
    p.lr_mult = "fast"  # type: ignore[attr-defined]
    with pytest.raises(ConfigurationError, match=r"lr_mult of 'bias' must be a number, got 'fast'"):
        step(trainer)
    assert p.item() == 0


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2, 0.1),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 5),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 1.0, total_steps=10),
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda epoch: 1 / (1 + epoch)),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.1, 1.0, step_size_up=3),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o, 0.1, 2), lr_scheduler.ExponentialLR(o, 0.5)], [3]
    ),
}
KINDS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "SGD": (torch.optim.SGD, {"lr": 0.5, "momentum": 0.9}),
    "Adam": (torch.optim.Adam, {"lr": 0.5}),
}


@IN_STORE
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers_of_torch_bind_and_reach_the_update(name: str, kind: str, in_store: bool) -> None:
    cls, options = KINDS[kind]
    [ours], [theirs] = zeros(1), zeros(1)
    trainer, reference = trainer_of([ours], f"torch:{kind}", options, in_store), cls([theirs], **options)
    schedules = SCHEDULERS[name](trainer), SCHEDULERS[name](reference)
    for i in range(9):
        step(trainer, slope=i - 3.5)
        theirs.grad = torch.full_like(theirs, i - 3.5)
        reference.step()
        for schedule in schedules:
            schedule.step()
        assert trainer.learning_rate == reference.param_groups[0]["lr"]
        assert ours.item() == pytest.approx(theirs.item(), abs=1e-6)


@IN_STORE
def test_plateau_scheduler_lowers_the_rate(in_store: bool) -> None:
    [p] = zeros(1)
    trainer = trainer_of([p], "sgd", {"learning_rate": 1.0}, in_store)
    schedule = lr_scheduler.ReduceLROnPlateau(trainer, factor=0.5, patience=0)
    for _ in range(3):
        step(trainer)
        schedule.step(1.0)
    assert p.item() == -(1 + 1 + 0.5)


def test_scheduler_may_resume_from_the_initial_rate_that_a_group_carries() -> None:
    groups = [[{"params": zeros(1), "lr": 0.5, "initial_lr": 1.0}] for _ in range(2)]
    trainer, reference = trainer_of(groups[0], "torch:SGD"), torch.optim.SGD(groups[1])
    for one in (trainer, reference):
        lr_scheduler.CosineAnnealingLR(one, 8, last_epoch=3)
    assert trainer.learning_rate == reference.param_groups[0]["lr"]


@IN_STORE
def test_torch_instance_brings_its_groups_and_its_scheduler(in_store: bool) -> None:
    a, b = parameters = zeros()
    instance = torch.optim.SGD([{"params": [a]}, {"params": [b], "lr": 2.0}], lr=1.0)
    schedule = lr_scheduler.StepLR(instance, 1, 0.5)
    trainer = trainer_of(parameters, instance, None, in_store)
    for _ in range(2):
        step(trainer)
        schedule.step()
    assert values(parameters) == [-1.5, -3.0]
    instance.zero_grad()
    assert a.grad is None
    assert trainer.param_groups is instance.param_groups


def test_torch_instance_keeps_its_order_and_the_names_that_the_trainer_was_given() -> None:
    a, b = zeros()
    trainer = trainer_of({"a": a, "b": b}, torch.optim.SGD([b, a], lr=1.0))
    b.grad = torch.ones(1)
    with pytest.raises(UserWarning, match=r": a\."):
        trainer.step(1)


@IN_STORE
def test_torch_instance_hands_over_the_momentum_that_it_has(in_store: bool) -> None:
    [ours], [theirs] = zeros(1), zeros(1)
    instance, reference = (torch.optim.SGD([p], lr=1.0, momentum=0.5) for p in (ours, theirs))
    for p in (ours, theirs):
        p.grad = torch.ones(1)
    instance.step()
    reference.step()
    trainer = trainer_of([ours], instance, None, in_store)
    step(trainer)
    reference.step()
    instance.load_state_dict(
        {**reference.state_dict(), "state": {0: {"momentum_buffer": torch.full((1,), 4.0)}}}
    )
    instance.param_groups[0]["lr"] = 0.5
    step(trainer)
    assert ours.item() == theirs.item() - 0.5 * (0.5 * 4 + 1)


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        (lambda p: [p], "trains 2 parameters, the Trainer was given 1"),
        (lambda p: [{"params": [p], "lr": 1.0}], "brings the options of its groups"),
    ],
)
def test_torch_instance_must_train_what_the_trainer_trains(parameters: Any, message: str) -> None:
    a, b = zeros()
    with pytest.raises(ConfigurationError, match=message):
        trainer_of(parameters(a), torch.optim.SGD([a, b], lr=1.0))


def test_parameters_added_to_the_instance_behind_the_trainers_back_are_noticed() -> None:
    a, b = zeros()
    instance = torch.optim.SGD([a], lr=1.0)
    trainer = trainer_of([a], instance)
    instance.add_param_group({"params": [b]})
    with pytest.raises(ConfigurationError, match=r"use trainer\.add_param_group"):
        step(trainer)


@IN_STORE
def test_group_added_before_the_first_step_is_trained(in_store: bool) -> None:
    a, b = parameters = zeros()
    trainer = trainer_of([a], "sgd", {"learning_rate": 1.0}, in_store)
    a.grad = torch.ones(1)
    trainer.add_param_group({"params": [b], "learning_rate": 2.0})
    b.grad = torch.ones(1)
    trainer.step(1)
    assert values(parameters) == [-1.0, -2.0]
    trainer.set_learning_rate(4.0)
    step(trainer)
    assert values(parameters) == [-5.0, -6.0]


def test_group_added_while_training_keeps_momentum_and_used_gradients_used() -> None:
    a, b = parameters = zeros()
    trainer = trainer_of({"a": a}, "sgd", {"learning_rate": 1.0, "momentum": 0.5})
    step(trainer)
    trainer.add_param_group({"params": {"b": b}})
    b.grad = torch.ones(1)
    with pytest.raises(UserWarning, match=r": a\."):
        trainer.step(1)
    step(trainer)
    assert values(parameters) == [-1 - 1.5, -1.0]


def test_group_that_does_not_fit_is_refused_and_leaves_the_trainer_as_it_was() -> None:
    a, b = zeros()
    trainer = trainer_of([a], "sgd", {"learning_rate": 1.0})
    for group in (
        {"params": [b], "lrr": 2.0},
        {"params": [b], "lr": "fast"},
        {"params": [Parameter(torch.zeros(1, dtype=torch.complex64))]},
        {"params": [a]},
        {"params": []},
        [b],
    ):
        with pytest.raises(ConfigurationError):
            trainer.add_param_group(group)  # type: ignore[arg-type]
    assert len(trainer.param_groups) == 1
    step(trainer)
    assert (a.item(), b.item()) == (-1.0, 0.0)


def test_group_is_refused_once_the_parameters_are_in_a_store() -> None:
    a, b = zeros()
    trainer = trainer_of([a], "sgd", None, in_store=True)
    step(trainer)
    with pytest.raises(ConfigurationError, match="before the first step"):
        trainer.add_param_group({"params": [b]})


def test_defaults_and_repr_show_the_numbers() -> None:
    trainer = trainer_of(zeros(), "adam", {"beta1": 0.5, "epsilon": 1e-3})
    assert trainer.defaults["betas"] == (0.5, 0.999)
    assert "eps: 0.001" in repr(trainer)


WRONG: dict[str, tuple[Callable[[nn.Module], dict[str, Any]], type[Exception], str]] = {
    "no such optimizer": (lambda net: {"optimizer": "sdg"}, UnknownNameError, r"'sdg'.*adam"),
    "no such option": (lambda net: {"optimizer_params": {"lrr": 1}}, ConfigurationError, r"'lrr'.*learning_rate"),
    "options beside an instance": (
        lambda net: {"optimizer": torch.optim.SGD(net.parameters()), "optimizer_params": {"lr": 1}},
        ConfigurationError,
        "must be None if optimizer is an instance",
    ),
    "not elementwise": (lambda net: {"optimizer": torch.optim.LBFGS}, ConfigurationError, "LBFGS"),
    "no such store": (lambda net: {"kvstore": "bogus"}, UnknownNameError, r"'bogus'.*dist_sync.*local"),
    "store of a wrong type": (lambda net: {"kvstore": 3}, ConfigurationError, "a kvstore or None, got int"),
    "update on no store": (lambda net: {"kvstore": None, "update_on_kvstore": True}, ConfigurationError, "needs a kvs"),
    "update on something": (lambda net: {"update_on_kvstore": "yes"}, ConfigurationError, "or None, got 'yes'"),
    "compression": (lambda net: {"compression_params": {"type": "2bit"}}, ConfigurationError, "does not compress"),
    "no parameters": (lambda net: {"params": []}, ConfigurationError, "no parameters"),
    "option of a group": (
        lambda net: {"params": [{"params": net.parameters(), "momentumm": 1}]},
        ConfigurationError,
        "'momentumm'",
    ),
    "value of a group": (
        lambda net: {"params": [{"params": net.parameters(), "momentum": -1}]},
        ConfigurationError,
        "momentum must not be negative",
    ),
    "dtype": (
        lambda net: {"params": [*net.parameters(), Parameter(torch.zeros(1, dtype=torch.complex64))]},
        ConfigurationError,
        "'2' has dtype complex64",
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
