"""A Trainer's files of states; those of something else are refused with every difference, and nothing changes."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from kvtrainer import Trainer, kvstore
from kvtrainer.errors import ConfigurationError, StateMismatchError
from kvtrainer.lr_scheduler import FactorScheduler, LRScheduler, register
from kvtrainer.states.format import SavedStates, read_state_file, write_state_file
from tests.support.saved_training import PLACES, Net, same, train, trainer_of, weights

SHAPES: dict[str, tuple[int, ...]] = {"a": (2, 3), "b": (3,), "c": ()}


def parameters(**shapes: tuple[int, ...]) -> dict[str, nn.Parameter]:
    return {name: nn.Parameter(torch.ones(shape)) for name, shape in (shapes or SHAPES).items()}


def stepped(params: Any, kind: str = "adam", **options: Any) -> Trainer:
    """A Trainer after one step."""
    trainer = Trainer(params, kind, options)
    for group in trainer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.ones_like(parameter)
    trainer.step()
    return trainer


def refusal(trainer: Trainer, path: Path) -> str:
    """What the Trainer says; checks that it is as it was."""
    before = trainer.state_dict()
    numbers = (trainer.optimizer.rescale_grad, trainer.optimizer.num_update, trainer.optimizer.lr_scheduler)
    with pytest.raises(StateMismatchError) as caught:
        trainer.load_states(path)
    after = trainer.state_dict()
    assert after["param_groups"] == before["param_groups"]
    assert after["state"].keys() == before["state"].keys()
    for key, state in before["state"].items():
        assert all(torch.equal(state[name], after["state"][key][name]) for name in state)
    optimizer = trainer.optimizer
    assert (optimizer.rescale_grad, optimizer.num_update, optimizer.lr_scheduler) == numbers
    message = str(caught.value)
    assert isinstance(caught.value, ConfigurationError)
    return message


def changed(path: Path, change: Callable[[SavedStates], SavedStates]) -> Path:
    """The file, with its contents changed by hand."""
    write_state_file(path, change(read_state_file(path)))
    return path


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """The states of adam over SHAPES."""
    stepped(parameters()).save_states(tmp_path / "states")
    return tmp_path / "states"


def test_every_missing_unexpected_and_wrong_shaped_parameter_is_named(path: Path) -> None:
    trainer = stepped(parameters(a=(3, 2), b=(4,), x=(1,), y=(2,)), rescale_grad=0.5)
    message = refusal(trainer, path)
    for part in (
        "the file lacks the parameters 'x', 'y'",
        "the file has the parameters 'c', which this Trainer does not have",
        "'a' has shape [2, 3] in the file and [3, 2] here",
        "'b' has shape [3] in the file and [4] here",
    ):
        assert part in message


def test_every_missing_unexpected_and_wrong_shaped_entry_is_named(path: Path) -> None:
    def change(saved: SavedStates) -> SavedStates:
        del saved.parameters["a"].state["exp_avg"]
        del saved.parameters["b"].state["exp_avg"]
        saved.parameters["b"].state["more"] = torch.zeros(3)
        saved.parameters["b"].state["exp_avg_sq"] = torch.zeros(5)
        saved.parameters["c"].state["exp_avg"] = torch.zeros(2)
        saved.parameters["c"].state["more"] = 1.0
        saved.parameters["a"].state["exp_avg_sq"] = 0.5
        return saved

    message = refusal(stepped(parameters()), changed(path, change))
    for part in (
        "state 'exp_avg' of 'a', 'b' is missing",
        "state 'more' of 'b', 'c' is not one that adam keeps",
        "state 'exp_avg_sq' of 'b' has shape [5], the parameter has [3]",
        "state 'exp_avg' of 'c' has shape [2], the parameter has []",
        "state 'exp_avg_sq' of 'a' has shape [], the parameter has [2, 3]",
    ):
        assert part in message


def test_entries_of_whole_keys_have_shapes_of_their_own_and_must_have_them(tmp_path: Path) -> None:
    path = tmp_path / "states"
    stepped(parameters(), "torch:Adafactor").save_states(path)

    def change(saved: SavedStates) -> SavedStates:
        assert saved.parameters["a"].state["row_var"].shape == (2, 1)
        saved.parameters["a"].state["row_var"] = torch.zeros(2, 3)
        return saved

    message = refusal(stepped(parameters(), "torch:Adafactor"), changed(path, change))
    assert "state 'row_var' of 'a' has shape [2, 3], the parameter has [2, 3] and the entry [2, 1]" in message


def test_another_kind_of_optimizer_is_named_with_what_it_lacks(path: Path) -> None:
    message = refusal(stepped(parameters(), "rmsprop"), path)
    assert "the optimizer is 'adam' in the file and 'rmsprop' here" in message
    assert "state 'exp_avg' of 'a', 'b', 'c' is not one that rmsprop keeps" in message
    # The name tells them apart where the entries are the same.
    assert "the optimizer is 'adam' in the file and 'adamw' here" in refusal(
        stepped(parameters(), "adamw"), path
    )


def test_other_groups_are_named_parameter_by_parameter(tmp_path: Path) -> None:
    p, q = parameters(), parameters()
    stepped([{"params": {"a": p["a"]}}, {"params": {"b": p["b"], "c": p["c"]}}]).save_states(tmp_path / "s")
    message = refusal(
        stepped([{"params": {"a": q["a"], "b": q["b"]}}, {"params": {"c": q["c"]}}]), tmp_path / "s"
    )
    assert "'b' is in group 1 in the file and in group 0 here" in message
    assert "'c' is" not in message
    message = refusal(stepped(parameters()), tmp_path / "s")
    assert "the file has 2 parameter groups, this Trainer has 1" in message
    assert "'c' is in group 1 in the file and in group 0 here" in message


def test_options_that_the_optimizer_does_not_take_are_refused(path: Path) -> None:
    def change(saved: SavedStates) -> SavedStates:
        return replace(saved, groups=[{**saved.groups[0], "betas": (0.9, 7.0)}])

    message = refusal(stepped(parameters()), changed(path, change))
    assert "the options of group 0 are not valid here: " in message
    assert "7.0" in message


def test_number_that_the_store_was_told_cannot_change_after_the_first_step(tmp_path: Path) -> None:
    stepped(parameters(), begin_num_update=5).save_states(tmp_path / "states")

    def in_store() -> tuple[dict[str, nn.Parameter], Trainer]:
        params = parameters()
        return params, Trainer(params, "adam", kvstore=kvstore.create("local"), update_on_kvstore=True)

    params, trainer = in_store()
    trainer.load_states(tmp_path / "states")
    assert trainer.optimizer.begin_num_update == 5
    params, trainer = in_store()
    for p in params.values():
        p.grad = torch.ones_like(p)
    trainer.step()
    message = refusal(trainer, tmp_path / "states")
    assert "begin_num_update is 5 in the file and 0 here" in message


def test_scheduler_that_is_a_function_must_be_given_again(tmp_path: Path) -> None:
    def schedule(num_update: int) -> float:
        return 0.5**num_update

    trainer = Trainer(parameters(), "adam")
    trainer.optimizer.lr_scheduler = FactorScheduler(step=1)
    other = Trainer(parameters(), "adam")
    other.save_states(tmp_path / "states")

    def change(saved: SavedStates) -> SavedStates:
        return replace(saved, optimizer={**saved.optimizer, "lr_scheduler": "code"})

    message = refusal(other, changed(tmp_path / "states", change))
    assert "the lr_scheduler was a function, which is not saved, so give the Trainer the same" in message
    trainer.load_states(tmp_path / "states")
    assert isinstance(trainer.optimizer.lr_scheduler, FactorScheduler)


def test_scheduler_that_is_not_known_here_is_refused(path: Path) -> None:
    def change(saved: SavedStates) -> SavedStates:
        return replace(saved, optimizer={**saved.optimizer, "lr_scheduler": {"name": "tuesdays"}})

    message = refusal(stepped(parameters()), changed(path, change))
    assert "the lr_scheduler cannot be made here: " in message
    assert "'tuesdays'" in message


def test_user_defined_scheduler_comes_back_where_it_is_registered(tmp_path: Path) -> None:
    @register
    class Halving(LRScheduler):
        name = "halving-for-saved-states"

        def after_warmup(self, num_update: int) -> float:
            return self.base_lr * 0.5**num_update

    Trainer(parameters(), "adam", {"lr_scheduler": Halving(2.0)}).save_states(tmp_path / "states")
    other = Trainer(parameters(), "adam", {"lr_scheduler": FactorScheduler(step=1)})
    other.load_states(tmp_path / "states")
    assert isinstance(other.optimizer.lr_scheduler, Halving)
    assert other.optimizer.lr_scheduler(3) == 0.25


def test_file_has_state_by_parameter_name_and_the_step_of_each(tmp_path: Path) -> None:
    net = Net()
    trainer = trainer_of(net, "adam")
    train(net, trainer, 0, 2)
    net.scale.requires_grad_(False)
    train(net, trainer, 2, 1)
    trainer.save_states(tmp_path / "states")
    saved = read_state_file(tmp_path / "states")
    assert {name: row.state["step"] for name, row in saved.parameters.items()} == {
        "scale": 2,
        **dict.fromkeys(["inner.weight", "inner.bias", "outer.weight", "outer.bias"], 3),
    }
    row = saved.parameters["inner.weight"]
    assert (row.shape, row.dtype, row.group) == ((900, 7), "float32", 0)
    shown = trainer.state_dict()["state"][1]
    assert row.state["exp_avg"].equal(shown["exp_avg"])
    assert row.state["exp_avg_sq"].equal(shown["exp_avg_sq"])


@PLACES
def test_numbers_in_the_file_win_and_multipliers_stay_the_live_ones(uok: bool | None, tmp_path: Path) -> None:
    net = Net()
    trainer = trainer_of(net, "sgd", uok, wd=0.5, rescale_grad=0.25)
    trainer.set_learning_rate(0.125)
    net.scale.lr_mult = 3.0  # type: ignore[attr-defined]
    trainer.save_states(tmp_path / "states")
    again = Net()
    other = trainer_of(again, "sgd", uok, wd=0.25, momentum=0.0, clip_gradient=2.0)
    again.scale.lr_mult = 5.0  # type: ignore[attr-defined]
    other.load_states(tmp_path / "states")
    optimizer = other.optimizer
    assert (other.learning_rate, optimizer.wd, optimizer.hyper["momentum"]) == (0.125, 0.5, 0.9)
    assert (optimizer.clip_gradient, optimizer.rescale_grad) == (None, 0.25)
    before = again.scale.detach().clone()
    x = torch.ones(1, 7)
    again(x).sum().backward()
    grad = again.scale.grad
    assert grad is not None
    other.step(1)
    change = 5.0 * 0.125 * (0.25 * grad + 0.5 * before)
    torch.testing.assert_close(again.scale.detach(), before - change, rtol=0, atol=1e-6)


def test_groups_come_back_with_what_torchs_schedulers_keep_in_them(tmp_path: Path) -> None:
    def build(net: Net) -> Trainer:
        groups = [{"params": [net.scale], "lr": 0.5}, {"params": list(net.outer.parameters())}]
        return Trainer(groups, "torch:AdamW", {"lr": 0.1, "betas": (0.8, 0.9)})

    trainer = build(Net())
    torch.optim.lr_scheduler.StepLR(trainer, 1, 0.5)
    trainer.param_groups[1]["betas"] = (0.7, 0.95)
    trainer.param_groups[1]["lr"] = 0.05
    trainer.save_states(tmp_path / "states")
    other = build(Net())
    other.load_states(tmp_path / "states")
    for name in ("lr", "betas", "initial_lr"):
        assert [g[name] for g in other.param_groups] == [g[name] for g in trainer.param_groups]


def test_states_before_the_first_step_can_be_saved_and_reset_a_trainer(tmp_path: Path) -> None:
    fresh, net, reference = trainer_of(Net(), "adam"), Net(), Net()
    fresh.save_states(tmp_path / "states")
    trainer = trainer_of(net, "adam")
    train(net, trainer, 0, 2)
    trainer.load_states(tmp_path / "states")
    reference.load_state_dict(net.state_dict())
    train(net, trainer, 2, 2)
    train(reference, trainer_of(reference, "adam"), 2, 2)
    assert same(weights(net), weights(reference))


def test_count_of_updates_goes_on_for_the_scheduler(tmp_path: Path) -> None:
    schedule = FactorScheduler(step=2, factor=0.5, base_lr=1.0)
    trainer = trainer_of(Net(), "adam", lr_scheduler=schedule)
    trainer.optimizer.num_update = 5
    trainer.save_states(tmp_path / "states")
    other = trainer_of(Net(), "adam", lr_scheduler=FactorScheduler(step=9, factor=0.1, base_lr=2.0))
    other.load_states(tmp_path / "states")
    assert other.optimizer.num_update == 5
    assert other.optimizer.lr_scheduler is not None
    assert other.optimizer.lr_scheduler.spec() == schedule.spec()
    assert other.optimizer.learning_rate == schedule(5)


def test_equal_scheduler_stays_the_object_that_the_user_has(tmp_path: Path) -> None:
    trainer = trainer_of(Net(), "adam", lr_scheduler=FactorScheduler(step=2, factor=0.5, base_lr=1.0))
    trainer.save_states(tmp_path / "states")
    mine = FactorScheduler(step=2, factor=0.5, base_lr=1.0)
    other = trainer_of(Net(), "adam", lr_scheduler=mine)
    other.load_states(tmp_path / "states")
    assert other.optimizer.lr_scheduler is mine


def test_file_without_a_scheduler_removes_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trainer_of(Net(), "adam", learning_rate=0.25).save_states(tmp_path / "states")
    other = trainer_of(Net(), "adam", lr_scheduler=FactorScheduler(step=2, base_lr=1.0))
    with caplog.at_level(logging.WARNING):
        other.load_states(tmp_path / "states")
    assert other.optimizer.lr_scheduler is None
    assert other.learning_rate == 0.25
    assert "without lr_scheduler" in caplog.text


def test_subclass_saves_and_restores_parts_of_its_own(tmp_path: Path) -> None:
    class Extended(Trainer):
        restored: Any = None

        def export_saved_states(self) -> SavedStates:
            saved = super().export_saved_states()
            tensors = {**saved.tensors, "mine": {"w": torch.ones(2)}}
            return replace(saved, extra={**saved.extra, "mine": {"scale": 2.0}}, tensors=tensors)

        def adopt_saved_states(self, saved: SavedStates) -> None:
            super().adopt_saved_states(saved)
            self.restored = saved.extra["mine"], saved.tensors["mine"]["w"].tolist()

    trainer = Extended(Net().trained(), "sgd")
    trainer.save_states(tmp_path / "states")
    trainer.load_states(tmp_path / "states")
    assert trainer.restored == ({"scale": 2.0}, [1.0, 1.0])


@pytest.mark.parametrize("given", [{"model": {}, "optimizer": {}}, {"param_groups": []}, {}])
def test_a_dict_that_is_no_state_of_an_optimizer_is_refused_with_what_it_has(given: dict[str, Any]) -> None:
    trainer = stepped(parameters())
    before = trainer.state_dict()
    with pytest.raises(StateMismatchError, match="'param_groups' and 'state'") as caught:
        trainer.load_state_dict(given)
    assert all(repr(key) in str(caught.value) for key in given)
    assert repr(trainer.state_dict()) == repr(before)


@pytest.mark.parametrize("step", [float("inf"), 2**70, -1, "x", [1]])
def test_a_count_of_updates_that_is_none_is_refused(path: Path, step: Any) -> None:
    def change(saved: SavedStates) -> SavedStates:
        saved.parameters["b"].state["step"] = step
        return saved

    assert "state 'step' of 'b'" in refusal(stepped(parameters()), changed(path, change))


@pytest.mark.parametrize("factor", [None, "x", float("nan"), 10**400])
def test_a_factor_of_gradients_that_is_no_number_is_refused(path: Path, factor: Any) -> None:
    def change(saved: SavedStates) -> SavedStates:
        return replace(saved, optimizer={**saved.optimizer, "rescale_grad": factor})

    assert "rescale_grad" in refusal(stepped(parameters()), changed(path, change))


@pytest.mark.parametrize(
    ("part", "value"),
    [
        ("optimizer", None),
        ("optimizer", []),
        ("optimizer", {"rest": {"$tree": ["os.system", ["x"]]}}),
        ("backward_passes", True),
    ],
)
def test_a_part_of_a_file_that_makes_no_sense_is_refused(path: Path, part: str, value: Any) -> None:
    def change(saved: SavedStates) -> SavedStates:
        return replace(saved, extra={**saved.extra, part: value})

    assert part in refusal(stepped(parameters()), changed(path, change))
