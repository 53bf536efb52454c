"""Schedules of a Trainer: ours, torch's, Gluon's with its count of updates, and instances of torch's optimizers."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import Parameter
from torch.optim import lr_scheduler

from kvstore_server.optimizer import create
from kvtrainer import Trainer
from kvtrainer.errors import ConfigurationError, OptimizerError, SchedulerInUseError
from kvtrainer.lr_scheduler import CosineScheduler, FactorScheduler, PolyScheduler
from kvtrainer.schedules.param_schedule import ParamSchedule
from kvtrainer.trainer.groups import UpdateCounter
from kvtrainer.types import Group
from tests.support import ways_to_train
from tests.support.scalar_training import IN_STORE, step, trainer_of, values, zeros
from tests.support.ways_to_train import STORES

RATES = {"learning_rate": 1.0, "momentum": 0.5}


def trainer_with(
    schedules: list[Any], in_store: bool = False, kind: str = "sgd"
) -> tuple[list[Any], Trainer]:
    parameters = zeros(1)
    given = {"w": parameters[0]}
    options = dict(RATES)
    trainer = Trainer(given, kind, options, kvstore="local", update_on_kvstore=in_store, schedules=schedules)
    return parameters, trainer


@IN_STORE
def test_step_without_any_gradient_updates_nothing_and_advances_no_schedule(in_store: bool) -> None:
    _, trainer = trainer_with([{"policy": "exp", "gamma": 0.5, "by_epoch": False}], in_store)
    result = trainer.step(ignore_stale_grad=True)
    assert result is not None
    assert (result.updated, result.skipped, trainer.learning_rate) == (False, False, 1.0)
    step(trainer)
    assert trainer.last is not None
    assert trainer.last.updated
    assert trainer.learning_rate == 0.5


@IN_STORE
@pytest.mark.parametrize("gamma", [0.5, 0.8])
def test_saved_states_resume_schedules(tmp_path: Path, in_store: bool, gamma: float) -> None:
    course = {"policy": "exp", "gamma": 0.5, "by_epoch": False}
    _, first = trainer_with([course], in_store)
    for _ in range(3):
        step(first)
    first.save_states(tmp_path / "states")
    _, second = trainer_with([{**course, "gamma": gamma}], in_store)
    second.load_states(tmp_path / "states")
    assert second.get_lr()["lr"] == pytest.approx([gamma**3])
    step(second)
    assert second.get_lr()["lr"] == pytest.approx([gamma**4])


def test_groups_with_remembered_values_are_taken_again() -> None:
    _, trainer = trainer_with([{"policy": "step", "step": [1], "name": "momentum", "by_epoch": False}])
    step(trainer)
    [group] = trainer.param_groups
    assert group["initial_momentum"] == 0.5
    again = {name: value for name, value in group.items() if name not in ("params", "param_names")}
    built = Trainer([{**again, "params": [torch.nn.Parameter(torch.zeros(1))]}], "sgd", kvstore=None)
    ParamSchedule(built, "momentum", "fixed")
    assert built.get_momentum()["momentum"] == [0.5]


@pytest.mark.parametrize(
    "schedule",
    [
        {"policy": "exp", "gamma": 0.5},
        {"scheduler": partial(lr_scheduler.StepLR, step_size=1, gamma=0.5), "by": "epoch"},
    ],
    ids=["ours", "torch's"],
)
@pytest.mark.parametrize("epochs", [0, 1])
def test_schedule_by_epoch_without_epochs_is_logged(
    schedule: dict[str, Any], epochs: int, caplog: pytest.LogCaptureFixture
) -> None:
    _, trainer = trainer_with([schedule])
    with trainer:
        step(trainer)
        for _ in range(epochs):
            trainer.end_epoch()
    assert ("1 schedules by epoch" in caplog.text) is (epochs == 0)


def test_scheduler_may_resume_from_the_initial_rate_that_a_group_carries() -> None:
    groups: list[list[dict[str, Any]]] = [
        [{"params": zeros(1), "lr": 0.5, "initial_lr": 1.0}] for _ in range(2)
    ]
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
        (lambda p: [p], "trains 2 parameters, .* given 1"),
        (lambda p: [{"params": [p], "lr": 1.0}], "SGD instance"),
    ],
)
def test_torch_instance_must_train_what_the_trainer_trains(parameters: Any, message: str) -> None:
    a, b = zeros()
    with pytest.raises(ConfigurationError, match=message):
        trainer_of(parameters(a), torch.optim.SGD([a, b], lr=1.0))


def test_parameters_added_to_the_instance_are_trained_and_scheduled() -> None:
    a, b = zeros()
    instance = torch.optim.SGD([a], lr=1.0)
    trainer = trainer_of([a], instance)
    instance.add_param_group({"params": [b], "lr": 0.5})
    schedule = torch.optim.lr_scheduler.ExponentialLR(instance, 0.5)
    step(trainer)
    schedule.step()
    step(trainer)
    assert values([a, b]) == [-1.5, -0.75]


def scheduled(parameters: Any, uok: bool | None = None, kind: str = "sgd", **options: Any) -> Trainer:
    return ways_to_train.trainer_of(parameters, uok, kind, options)


def step_with(trainer: Trainer, *parameters: Parameter) -> None:
    for p in parameters:
        p.grad = torch.ones_like(p)
    trainer.step(1, ignore_stale_grad=True)


def moves(trainer: Trainer, p: Parameter, steps: int) -> list[float]:
    """By how much each step_with with a gradient of 1 lowers `p`: with plain SGD, the learning rate."""
    seen = []
    for _ in range(steps):
        before = p.item()
        step_with(trainer, p)
        seen.append(before - p.item())
    return seen


@pytest.mark.parametrize("uok", STORES)
def test_update_n_has_the_rate_that_the_scheduler_gives_for_n_and_says_so(uok: bool | None) -> None:
    scheduler = CosineScheduler(10, base_lr=1, warmup_steps=4)
    trace = [0.25, 0.5, 0.75, 1, 0.9330127, 0.75, 0.5]  # MXNet's for num_update 1, 2, 3, …
    [p] = zeros(1)
    trainer = scheduled([p], uok, lr_scheduler=scheduler)
    for rate in trace:
        assert moves(trainer, p, 1) == pytest.approx([rate], abs=1e-6)
        assert trainer.last is not None
        assert trainer.last.lr == pytest.approx(rate)


@pytest.mark.parametrize("uok", STORES)
def test_learning_rate_is_that_of_the_last_update_and_holds_for_all_groups(uok: bool | None) -> None:
    a, b = zeros(2)
    b.lr_mult = 2.0  # type: ignore[attr-defined]
    trainer = scheduled(
        [{"params": [a]}, {"params": [b], "momentum": 0.0}], uok, lr_scheduler=lambda n: n / 8
    )
    assert trainer.learning_rate == 0
    for n in (1, 2, 3):
        step_with(trainer, a, b)
        assert trainer.learning_rate == trainer.optimizer.learning_rate == n / 8
        assert [group["lr"] for group in trainer.param_groups] == [n / 8] * 2
    assert (a.item(), b.item()) == (-6 / 8, -12 / 8)


@pytest.mark.parametrize("uok", STORES)
def test_updates_count_from_begin_num_update(uok: bool | None) -> None:
    [p] = zeros(1)
    trainer = scheduled([p], uok, lr_scheduler=lambda n: n / 8, begin_num_update=4)
    assert trainer.learning_rate == 4 / 8
    assert moves(trainer, p, 2) == [5 / 8, 6 / 8]


@pytest.mark.parametrize("uok", STORES)
def test_update_count_is_the_greatest_of_all_keys_as_in_mxnet(uok: bool | None) -> None:
    a, b = zeros(2)
    trainer = scheduled([a, b], uok, lr_scheduler=lambda n: float(n))
    seen = []
    for keys in ([a], [b], [b], [a], [a, b], []):
        step_with(trainer, *keys)
        seen.append(trainer.optimizer.num_update)
    # a's updates are 1, 2, 3, b's are 1, 2, 3; num_update never falls.
    assert seen == [1, 1, 2, 2, 3, 3]
    assert (a.item(), b.item()) == (-(1 + 2 + 3), -(1 + 2 + 3))


def test_setting_the_rate_beside_a_scheduler_is_an_error_and_a_user_warning() -> None:
    [p] = zeros(1)
    trainer = scheduled([p], lr_scheduler=FactorScheduler(2, 0.5, base_lr=1))
    with pytest.raises(SchedulerInUseError, match="takes its learning rate from FactorScheduler") as caught:
        trainer.set_learning_rate(0.1)
    assert isinstance(caught.value, UserWarning)
    trainer.optimizer.lr_scheduler.base_lr = 0.25  # type: ignore[union-attr]
    assert moves(trainer, p, 1) == [0.25]


def test_rate_of_a_group_that_other_code_sets_is_noticed() -> None:
    [p] = zeros(1)
    trainer = scheduled([p], lr_scheduler=lambda n: 0.5)
    step_with(trainer, p)
    trainer.param_groups[0]["lr"] = 0.1
    with pytest.raises(SchedulerInUseError, match=r"was set to 0\.1, but .* decides it"):
        step_with(trainer, p)
    assert p.item() == -0.5


def test_rate_of_a_single_group_is_refused_beside_a_scheduler() -> None:
    [p] = zeros(1)
    with pytest.raises(ConfigurationError, match=r"group has lr=0\.5, but FactorScheduler.*lr_mult"):
        scheduled([{"params": [p], "learning_rate": 0.5}], lr_scheduler=FactorScheduler(2))


@pytest.mark.parametrize("uok", STORES)
def test_failed_step_is_not_counted(uok: bool | None) -> None:
    [p] = zeros(1)
    failing = [3]

    def schedule(n: int) -> float:
        if failing and n == failing[0]:
            raise OptimizerError("no rate for this one")
        return float(n)

    trainer = scheduled([p], uok, lr_scheduler=schedule)
    assert moves(trainer, p, 2) == [1, 2]
    with pytest.raises(OptimizerError):
        step_with(trainer, p)
    failing.clear()
    assert moves(trainer, p, 2) == [3, 4]


@pytest.mark.parametrize("how", ["state_dict", "file"])
@pytest.mark.parametrize("uok", STORES)
def test_count_goes_on_after_loading(how: str, uok: bool | None, tmp_path: Path) -> None:
    [p], [q] = zeros(1), zeros(1)
    trainer, other = (
        scheduled([one], uok, lr_scheduler=PolyScheduler(8, base_lr=8, pwr=1)) for one in (p, q)
    )
    assert moves(trainer, p, 3) == [7, 6, 5]
    if how == "file":
        trainer.save_states(tmp_path / "states")
        other.load_states(tmp_path / "states")
    else:
        other.load_state_dict(trainer.state_dict())
    assert other.optimizer.num_update == 3
    assert moves(other, q, 2) == [4, 3]


def test_count_goes_on_with_a_group_that_is_added() -> None:
    a, b = zeros(2)
    trainer = scheduled([a], lr_scheduler=lambda n: float(n))
    assert moves(trainer, a, 3) == [1, 2, 3]
    trainer.add_param_group({"params": [b]})
    step_with(trainer, b)
    assert (b.item(), trainer.optimizer.num_update) == (-3, 3)
    assert moves(trainer, a, 1) == [4]


def test_frozen_parameter_does_not_hold_the_count_up() -> None:
    a, b = zeros(2)
    trainer = scheduled([a, b], lr_scheduler=lambda n: float(n))
    b.requires_grad_(False)
    assert moves(trainer, a, 3) == [1, 2, 3]
    b.requires_grad_(True)
    step_with(trainer, a, b)
    assert (b.item(), trainer.optimizer.num_update) == (-4, 4)


KEYS = 4


class PerKey:
    """MXNet's rule: a count per key, from begin_num_update; num_update is the greatest that ever was."""

    def __init__(self, begin: int) -> None:
        self.counts = [begin] * KEYS
        self.num_update = begin

    def update(self, keys: list[bool]) -> None:
        self.counts = [count + is_in for count, is_in in zip(self.counts, keys, strict=True)]
        self.num_update = max(self.num_update, *self.counts)


@given(
    st.sampled_from([0, 7]),
    st.lists(st.tuples(st.lists(st.booleans(), min_size=KEYS, max_size=KEYS), st.booleans())),
)
def test_rate_follows_the_greatest_count_of_any_key(begin: int, steps: list[tuple[list[bool], bool]]) -> None:
    """A step updates some keys; after some steps the counts go through a file."""
    optimizer = create("sgd", lr_scheduler=lambda n: float(n), begin_num_update=begin)
    schedule, expected = UpdateCounter(optimizer), PerKey(begin)
    groups: list[Group] = [{"lr": 0.0}, {"lr": 0.0}]
    for keys, is_saved in steps:
        schedule.apply(groups, keys)
        schedule.count(keys)
        expected.update(keys)
        assert optimizer.num_update == expected.num_update
        if any(keys):
            assert [group["lr"] for group in groups] == [expected.num_update] * 2
        if is_saved:
            updates = {key: count - begin for key, count in enumerate(expected.counts) if count > begin}
            schedule = UpdateCounter(optimizer)
            schedule.restore(updates, KEYS)
            assert optimizer.num_update == expected.num_update
