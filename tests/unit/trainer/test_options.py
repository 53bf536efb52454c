"""Where the Trainer's numbers come from: groups, attributes, the optimizer; groups that are added; removed options."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import Parameter

from kvtrainer import RowSparseParameter, Trainer, optimizer
from kvtrainer.errors import ConfigurationError, WeightsWrittenError
from kvtrainer.kvstore import create
from tests.support.capabilities import SumStore
from tests.support.scalar_training import IN_STORE, step, trainer_of, values, zeros


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


@pytest.mark.parametrize("kind", ["torch:SGD", "TORCH:sgd", torch.optim.SGD])
def test_torch_optimizer_by_name_or_class_has_torchs_momentum(kind: Any) -> None:
    """torch multiplies the whole momentum by the rate of the step; Gluon, each gradient by the rate of its own."""
    for name, expected in ((kind, -1.0 - 0.5 * (0.5 + 1)), ("sgd", -1.0 - (0.5 + 0.5))):
        [p] = zeros(1)
        trainer = trainer_of([p], name, {"lr": 1.0, "momentum": 0.5})
        step(trainer)
        trainer.set_learning_rate(0.5)
        step(trainer)
        assert p.item() == expected


@pytest.mark.parametrize("lr", [True, None, "1", float("nan"), float("inf")])
def test_learning_rate_that_is_no_number_is_refused(lr: Any) -> None:
    trainer = trainer_of(zeros(), "sgd", {"learning_rate": 1.0})
    with pytest.raises(ConfigurationError, match="learning rate must be a finite number"):
        trainer.set_learning_rate(lr)
    assert trainer.learning_rate == 1.0


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


@pytest.mark.parametrize("value", ["fast", float("nan")])
@pytest.mark.parametrize("name", ["lr_mult", "wd_mult"])
def test_multiplier_that_is_no_finite_number_is_refused(name: str, value: Any) -> None:
    [p] = zeros(1)
    trainer = trainer_of({"bias": p}, "sgd")
    setattr(p, name, value)
    with pytest.raises(ConfigurationError, match=rf"{name} of 'bias' must be a finite number, got {value!r}"):
        step(trainer)
    assert p.item() == 0


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


@IN_STORE
def test_group_added_while_training_keeps_momentum_and_used_gradients_used(in_store: bool) -> None:
    a, b = parameters = zeros()
    trainer = trainer_of({"a": a}, "sgd", {"learning_rate": 1.0, "momentum": 0.5}, in_store)
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
    wrong: list[Any] = [
        {"params": [b], "lrr": 2.0},
        {"params": [b], "lr": "fast"},
        {"params": [Parameter(torch.zeros(1, dtype=torch.complex64))]},
        {"params": [a]},
        {"params": []},
        [b],
    ]
    for group in wrong:
        with pytest.raises(ConfigurationError):
            trainer.add_param_group(group)
    assert len(trainer.param_groups) == 1
    step(trainer)
    assert (a.item(), b.item()) == (-1.0, 0.0)


def test_several_groups_may_be_added_to_a_store_between_two_steps() -> None:
    parameters = zeros(4)
    trainer = trainer_of(parameters[:1], "adam", {"learning_rate": 1.0}, in_store=True)
    oracle = torch.optim.Adam(twins := zeros(1), lr=1.0)
    for at in (0, 1, 0, 2, 0):
        for p in parameters[len(twins) : len(twins) + at]:
            trainer.add_param_group({"params": [p], "lr": 0.5})
            twins.append(Parameter(torch.zeros(1)))
            oracle.add_param_group({"params": twins[-1:], "lr": 0.5})
        for p in (*parameters[: len(twins)], *twins):
            p.grad = torch.full((1,), float(trainer.version + 2))
        trainer.step(1)
        oracle.step()
    assert trainer.version == 5
    assert len(trainer.state) == 4
    torch.testing.assert_close(parameters, twins)


@pytest.mark.parametrize("case", ["row-sparse", "third-party"])
def test_group_is_refused_once_a_store_has_parameters_that_it_cannot_lay_out_again(case: str) -> None:
    [p] = zeros(1)
    first = RowSparseParameter((2, 1)) if case == "row-sparse" else Parameter(torch.zeros(1))
    trainer = Trainer([first], "sgd", kvstore=create("local") if case == "row-sparse" else SumStore())
    trainer.set_data()
    with pytest.raises(ConfigurationError, match="before the first step"):
        trainer.add_param_group({"params": [p]})
    assert len(trainer.param_groups) == 1


def test_parameter_that_is_added_again_is_called_as_it_was_at_first() -> None:
    a, b = zeros()
    trainer = Trainer({"first": a}, "sgd", kvstore=None)
    with pytest.raises(ConfigurationError, match=r"^first: "):
        trainer.add_param_group({"params": [b, a]})
    assert len(trainer.param_groups) == 1


def test_group_is_refused_while_weights_are_written_that_the_store_does_not_have() -> None:
    a, b = zeros()
    trainer = trainer_of({"a": a}, "sgd", None, in_store=True)
    step(trainer)
    a.data.fill_(5.0)
    with pytest.raises(WeightsWrittenError, match="a"):
        trainer.add_param_group({"params": [b]})
    assert len(trainer.param_groups) == 1


def test_defaults_and_repr_show_the_numbers() -> None:
    trainer = trainer_of(zeros(), "adam", {"beta1": 0.5, "epsilon": 1e-3})
    assert trainer.defaults["betas"] == (0.5, 0.999)
    assert "eps: 0.001" in repr(trainer)


class Unknown(torch.optim.Optimizer):
    """A class of which nothing is known here."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    def step(self, closure: Any = None) -> None:
        """Do nothing."""


@pytest.mark.parametrize(
    ("optimizer", "options", "name", "place"),
    [
        ("sgd", {"kvstore": None}, "sgd", ("None", False)),
        ("torch:Adam", {"kvstore": "dist_sync", "accumulate": 3}, "torch:Adam", ("dist_sync", True)),
        ("sgd", {"kvstore": "dist_sync", "update_on_kvstore": False}, "sgd", ("dist_sync", False)),
        (Unknown, {"kvstore": None}, "Unknown", ("None", False)),
    ],
)
def test_repr_names_the_parts(
    optimizer: Any, options: dict[str, Any], name: str, place: tuple[str, bool]
) -> None:
    shown = repr(Trainer(zeros(), optimizer, **options)).splitlines()
    assert shown[0] == "Trainer ("
    assert shown[1].startswith("optimizer: ")
    assert name in shown[1]
    assert shown[2:4] == [f"kvstore: {place[0]}", f"update_on_kvstore: {place[1]}"]
    assert shown[4] == f"accumulate: {options.get('accumulate', 1)}"
    assert shown[5] == "Parameter Group 0"


@pytest.mark.parametrize("is_named", [True, False])
def test_a_lone_trainer_in_a_job_is_warned(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, is_named: bool
) -> None:
    monkeypatch.setenv("KVSTORE_RANK", "0")
    monkeypatch.setenv("KVSTORE_NUM_WORKERS", "2")
    Trainer(zeros(), "sgd", kvstore="device" if is_named else create("device"))
    assert "'device' keeps gradients in this process, although the job has 2 workers" in caplog.text


@pytest.mark.parametrize("given", [True, 1, "yes"])
def test_overlap_pull_is_refused_and_overlap_is_named(given: Any) -> None:
    net = nn.Linear(2, 1)
    before = net.weight.data_ptr()
    with pytest.raises(ConfigurationError, match="overlap=True"):
        Trainer(net, "sgd", kvstore="dist_sync", overlap_pull=given)
    assert net.weight.data_ptr() == before


@pytest.mark.parametrize("section", ["", "optim_wrapper"])
def test_overlap_pull_is_refused_in_a_configuration_too(section: str) -> None:
    own = {"optimizer": {"type": "SGD", "lr": 0.1}, "overlap_pull": True}
    cfg = {section: own} if section else own
    with pytest.raises(ConfigurationError, match="overlap=True"):
        Trainer.from_config(nn.Linear(2, 1), cfg)


@pytest.mark.parametrize("given", [False, None])
def test_overlap_pull_may_be_said_to_be_off(given: bool | None, recwarn: pytest.WarningsRecorder) -> None:
    net = nn.Linear(2, 1)
    trainer = Trainer(net, "sgd", {"lr": 1.0}, overlap_pull=given)
    before = net.weight.detach().clone()
    net(torch.ones(1, 2)).sum().backward()
    trainer.step(1)
    assert torch.equal(net.weight, before - 1)
    assert not recwarn.list


def test_wait_says_that_there_is_nothing_to_wait_for() -> None:
    with pytest.raises(ConfigurationError, match=r"step\(\)"):
        Trainer(nn.Linear(2, 1), "sgd").wait()


def test_snapshot_says_how_weights_are_copied() -> None:
    with pytest.raises(ConfigurationError, match=r"p\.detach\(\)\.clone\(\)"):
        Trainer(nn.Linear(2, 1), "sgd").snapshot()
