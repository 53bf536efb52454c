"""state_dict and load_state_dict: between Trainers, with torch's optimizers, and where the state is in a store."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Adam

from kvtrainer import Trainer
from kvtrainer.errors import ConfigurationError, StateMismatchError
from tests.support.saved_training import PLACES, Net, same, train, trainer_of, weights


def test_loaded_state_is_a_copy_and_is_readable_before_the_store_has_it() -> None:
    net = Net()
    plain = Adam(net.parameters())
    train(net, plain, 0, 1)
    trainer = trainer_of(net, "torch:Adam", True)
    trainer.load_state_dict(plain.state_dict())
    expected = plain.state[net.outer.bias]["exp_avg"].clone()
    plain.state[net.outer.bias]["exp_avg"].zero_()
    assert trainer.state_dict()["state"][4]["exp_avg"].equal(expected)
    assert trainer.kvstore is not None
    assert trainer.server_stats() == []


def test_options_and_their_scheduler_come_back_and_missing_ones_keep_their_value() -> None:
    net = Net()
    trainer = trainer_of(net, "adam", wd=0.5)
    train(net, trainer, 0, 1)
    trainer.set_learning_rate(0.25)
    saved = trainer.state_dict()
    assert saved["param_groups"][0]["param_names"][0] == "scale"
    other = trainer_of(Net(), "adam", clip_gradient=2.0)
    schedule = torch.optim.lr_scheduler.StepLR(other, 1, 0.5)
    del saved["param_groups"][0]["clip_gradient"]
    other.load_state_dict(saved)
    assert other.learning_rate == other.optimizer.learning_rate == 0.25
    assert (other.optimizer.wd, other.optimizer.clip_gradient) == (0.5, 2.0)
    other.step(ignore_stale_grad=True)
    schedule.step()
    assert other.learning_rate == 0.125


def test_hooks_of_the_user_see_the_whole_state_dict_first() -> None:
    net = Net()
    trainer = trainer_of(net, "adam")
    train(net, trainer, 0, 1)
    saved = trainer.state_dict()
    moved = {**saved, "state": {key + 100: state for key, state in saved["state"].items()}}

    def renumber(_: Any, given: dict[str, Any]) -> dict[str, Any]:
        return {**given, "state": {key - 100: state for key, state in given["state"].items()}}

    other = trainer_of(Net(), "adam")
    other.register_load_state_dict_pre_hook(renumber)
    other.load_state_dict(moved)
    assert set(other.state_dict()["state"]) == set(saved["state"])


@PLACES
def test_state_of_another_model_is_refused_and_nothing_changes(uok: bool | None) -> None:
    net = Net()
    trainer = trainer_of(net, "adam", uok)
    train(net, trainer, 0, 1)
    saved = trainer.state_dict()
    wrong_shape = copy.deepcopy(saved)
    wrong_shape["state"][1]["exp_avg"] = torch.zeros(3)
    wrong_shape["param_groups"][0]["lr"] = 9.0
    fewer = copy.deepcopy(saved)
    fewer["param_groups"][0]["params"].pop()
    more_groups = {**saved, "param_groups": saved["param_groups"] * 2}
    for wrong, message in (
        (wrong_shape, r"'exp_avg' of 'inner.weight' has shape \[3\], the parameter has \[900, 7\]"),
        (fewer, r"1 parameter groups of \[4\] parameters, this Trainer has 1 of \[5\]"),
        (more_groups, r"2 parameter groups of \[5, 5\] parameters, this Trainer has 1 of \[5\]"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            trainer.load_state_dict(wrong)
    after = trainer.state_dict()
    assert after["param_groups"] == saved["param_groups"]
    assert all(after["state"][i]["exp_avg"].equal(saved["state"][i]["exp_avg"]) for i in range(5))


@pytest.mark.parametrize(("mine", "theirs"), [("sgd", "torch:SGD"), ("torch:SGD", "sgd")])
def test_momentum_of_the_other_sgd_is_refused(mine: str, theirs: str) -> None:
    net = Net()
    trainer = trainer_of(net, theirs)
    train(net, trainer, 0, 1)
    with pytest.raises(ConfigurationError, match="their momentum differs by a factor of the learning rate"):
        trainer_of(Net(), mine).load_state_dict(trainer.state_dict())


@pytest.mark.parametrize("copier", [copy.deepcopy, pickle.dumps])
def test_trainer_cannot_be_copied_and_says_what_to_do(copier: Any) -> None:
    trainer = trainer_of(Net(), "adam")
    with pytest.raises(ConfigurationError, match=r"cannot be copied or pickled.*state_dict\(\)"):
        copier(trainer)


@PLACES
def test_state_shows_what_torchs_optimizer_shows_by_parameter(uok: bool | None) -> None:
    net, reference = Net().double(), Net().double()
    trainer, oracle = trainer_of(net, "torch:Adam", uok), Adam(reference.parameters(), lr=0.1, amsgrad=True)
    train(net, trainer, 0, 2)
    train(reference, oracle, 0, 2)
    assert len(trainer.state) == len(oracle.state)
    for mine, theirs in zip(net.parameters(), reference.parameters(), strict=True):
        assert (mine in trainer.state) == (theirs in oracle.state)
        shown = trainer.state[mine]
        assert shown.keys() == oracle.state[theirs].keys()
        for name, value in oracle.state[theirs].items():
            torch.testing.assert_close(shown[name], value, rtol=0, atol=1e-12)
    assert [id(p) for p in trainer.state] == [id(p) for p, _ in trainer.state.items()]
    assert trainer.state.get(torch.zeros(1), "none") == "none"
    assert trainer.state[torch.zeros(1)] == {}


@pytest.mark.parametrize("kind", ["adam", "lamb", "torch:SGD"])
@PLACES
def test_state_before_the_first_update_has_the_entries_of_state_dict(uok: bool | None, kind: str) -> None:
    net = Net()
    trainer = trainer_of(net, kind, uok)
    saved = trainer.state_dict()["state"]
    for at, p in enumerate(net.parameters()):
        assert (p in trainer.state) == (at in saved)
        assert trainer.state[p].keys() == saved.get(at, {}).keys()
    assert trainer.state
    for p, state in trainer.state.items():
        trainer.state[p] = state
    train(net, trainer, 0, 1)
    counts = [one.state["step"] for one in trainer.export_saved_states().parameters.values()]
    assert counts == [1] * len(counts)


@pytest.mark.parametrize("kind", ["adam", "lamb"])
@PLACES
def test_state_that_is_assigned_by_parameter_counts_as_if_it_were_loaded(uok: bool | None, kind: str) -> None:
    """As tools do that move an optimizer's state to a device."""
    nets = [Net(), Net()]
    one, other = (trainer_of(net, kind, uok) for net in nets)
    for net, trainer in zip(nets, (one, other), strict=True):
        train(net, trainer, 0, 2)
    changed = other.state_dict()
    for state in changed["state"].values():
        state["mean" if "mean" in state else "exp_avg"].mul_(2)
        state["step"] += 3
    other.load_state_dict(changed)
    for p, state in one.state.items():
        state["mean" if "mean" in state else "exp_avg"].mul_(2)
        assert not state.keys() - one.state[p].keys()
        one.state[p] = {**state, "step": state["step"] + 3}
    for net, trainer in zip(nets, (one, other), strict=True):
        train(net, trainer, 2, 2)
    assert same(weights(nets[0]), weights(nets[1]))
    assert one.optimizer.num_update == other.optimizer.num_update == 7


@PLACES
def test_state_of_another_shape_or_parameter_is_refused_and_nothing_changes(uok: bool | None) -> None:
    net = Net()
    trainer = trainer_of(net, "adam", uok)
    train(net, trainer, 0, 1)
    before = trainer.state_dict()
    state = trainer.state[net.outer.bias]
    wrong = {**state, "exp_avg": torch.zeros(99)}
    with pytest.raises(StateMismatchError, match=r"exp_avg.* has shape \[99\]"):
        trainer.state[net.outer.bias] = wrong
    with pytest.raises(ConfigurationError, match="does not have"):
        trainer.state[torch.zeros(1)] = state
    with pytest.raises(ConfigurationError, match="load_state_dict"):
        trainer.state = {}
    state["exp_avg"].zero_()
    after = trainer.state_dict()
    assert all(
        torch.equal(after["state"][at][name], value)
        for at in before["state"]
        for name, value in before["state"][at].items()
    )


def test_state_of_a_class_that_runs_as_torch_runs_it_is_its_own() -> None:
    class Counting(torch.optim.Optimizer):
        def __init__(self, params: Any, a: float) -> None:
            super().__init__(params, {"a": a})

        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for p in self.param_groups[0]["params"]:
                self.state[p]["count"] = self.state[p].get("count", 0) + 1

    net = Net()
    trainer = Trainer(net, Counting, {"a": 1.0}, kvstore=None)
    assert trainer.state
    assert len(trainer.state) == 0
    train(net, trainer, 0, 2)
    assert [state for _, state in trainer.state.items()] == [{"count": 2}] * len(trainer.state)
    trainer.state[net.outer.bias] = {"count": 7}
    train(net, trainer, 2, 1)
    assert (trainer.state[net.outer.bias], trainer.state[torch.zeros(1)]) == ({"count": 8}, {})


@PLACES
@pytest.mark.parametrize("kind", ["torch:Adam", "adam"])
def test_a_cleared_state_starts_afresh(kind: str, uok: bool | None) -> None:
    net, fresh = Net(), Net()
    with trainer_of(net, kind, uok) as trainer:
        train(net, trainer, 0, 2)
        fresh.load_state_dict(net.state_dict())
        trainer.state.clear()
        assert not any(float(state["step"]) for state in trainer.state.values())
        train(net, trainer, 2, 2)
    with trainer_of(fresh, kind, uok) as other:
        train(fresh, other, 2, 2)
    assert all(map(torch.equal, net.parameters(), fresh.parameters()))


@PLACES
def test_a_parameters_state_is_deleted_alone(uok: bool | None) -> None:
    net = Net()
    with trainer_of(net, "torch:Adam", uok) as trainer:
        train(net, trainer, 0, 2)
        del trainer.state[net.scale]
        steps = {name: float(trainer.state[p].get("step", 0)) for name, p in net.named_parameters()}
        with pytest.raises(ConfigurationError):
            del trainer.state[nn.Parameter(torch.zeros(1))]
    assert steps.pop("scale") == 0
    assert set(steps.values()) == {2}


def replaced(given: Any, path: tuple[Any, ...], value: Any) -> Any:
    """A copy of nested dicts and lists with another value at one place."""
    if not path:
        return value
    copied = copy.copy(given)
    copied[path[0]] = replaced(given[path[0]], path[1:], value)
    return copied


MALFORMED: list[tuple[tuple[Any, ...], Any]] = [
    (("param_groups",), None),
    (("param_groups", 0), 3),
    (("param_groups", 0), {"lr": 0.1}),
    (("param_groups", 0, "params"), torch.zeros(())),
    (("param_groups", 0, "params", 0), [1]),
    (("param_groups", 0, "lr"), "fast"),
    (("param_groups", 0, "betas"), (0.9, 7.0)),
    (("state",), [1]),
    (("state", 1), "x"),
    (("state", 1, "step"), [1]),
    (("state", 1, "step"), "x"),
    (("state", 1, "step"), float("inf")),
    (("state", 1, "step"), -1),
    (("state", 1, "step"), 0.5),
    (("state", 1, "step"), 2**70),
    (("state", 1, "step"), torch.zeros(2)),
]


@pytest.mark.parametrize(("path", "value"), MALFORMED, ids=str)
@PLACES
def test_a_state_dict_with_a_part_that_makes_no_sense_is_refused_and_nothing_changes(
    path: tuple[Any, ...], value: Any, uok: bool | None
) -> None:
    net = Net()
    trainer = trainer_of(net, "adam", uok)
    train(net, trainer, 0, 1)
    before = trainer.state_dict()
    wrong = replaced(before, ("state", 0, "exp_avg"), torch.ones_like(before["state"][0]["exp_avg"]))
    with pytest.raises(StateMismatchError):
        trainer.load_state_dict(replaced(wrong, path, value))
    assert repr(trainer.state_dict()) == repr(before)
    assert trainer.optimizer.num_update == 1
