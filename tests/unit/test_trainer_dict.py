"""Several Trainers under names."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from kvtrainer import Trainer, TrainerDict
from kvtrainer.errors import ArgumentTypeError, ConfigurationError, KVStoreError, StateMismatchError


def trainers() -> tuple[nn.ModuleDict, TrainerDict]:
    parts = nn.ModuleDict({"g": nn.Linear(1, 1), "d": nn.Linear(1, 1)})
    g = Trainer(parts["g"], "torch:SGD", {"lr": 0.1, "momentum": 0.5})
    d = Trainer(parts["d"], "torch:Adam", {"lr": 0.2, "betas": (0.7, 0.9)})
    return parts, TrainerDict(g=g, d=d)


def test_it_is_a_mapping_of_names_to_trainers() -> None:
    _, both = trainers()
    assert list(both) == list(both.keys()) == ["g", "d"]
    assert len(both) == 2
    assert "g" in both
    assert dict(both.items())["d"] is both["d"] is list(both.values())[1]
    with pytest.raises(KeyError, match="no Trainer is named 'e', only g, d"):
        both["e"]


@pytest.mark.parametrize("method", ["update_params", "backward", "step"])
def test_what_only_one_of_them_can_do_is_refused_and_says_where_to_go(method: str) -> None:
    _, both = trainers()
    message = f"You should access the Trainer of the TrainerDict and call its `{method}`; it has g, d"
    with pytest.raises(NotImplementedError, match=message):
        getattr(both, method)(torch.ones(()))


def test_values_of_groups_are_given_by_name() -> None:
    _, both = trainers()
    assert both.get_lr() == {"g.lr": [0.1], "d.lr": [0.2]}
    assert both.get_momentum() == {"g.momentum": [0.5], "d.momentum": [0.7]}
    assert both.param_groups["g"] is both["g"].param_groups


def test_a_metric_reaches_schedules_that_go_by_one_and_is_missed_before_anything_changes() -> None:
    _, both = trainers()
    both["g"].configure(schedules=[{"policy": "exp", "gamma": 0.5}])
    both["d"].configure(schedules=[{"type": "ReduceOnPlateauLR", "factor": 0.5, "patience": 0}])
    with pytest.raises(ConfigurationError, match=r"of d\b"):
        both.end_epoch()
    assert both.get_lr() == {"g.lr": [0.1], "d.lr": [0.2]}
    both.end_epoch(1.0)
    both.end_epoch(1.0)
    assert both.get_lr() == {"g.lr": [0.025], "d.lr": [0.1]}


def test_gradients_of_all_are_reset() -> None:
    parts, both = trainers()
    sum(part(torch.ones(1, 1)).sum() for part in parts.values()).backward()
    both.zero_grad()
    assert all(p.grad is None for p in parts.parameters())


def test_state_is_kept_by_name() -> None:
    parts, both = trainers()
    for name, trainer in both.items():
        trainer.update_params(parts[name](torch.ones(1, 1)).sum())
    _, other = trainers()
    other.load_state_dict(both.state_dict())
    for name in both:
        for key, state in both[name].state_dict()["state"].items():
            for entry, value in state.items():
                assert torch.equal(other[name].state_dict()["state"][key][entry], value)


def test_state_of_others_is_refused() -> None:
    _, both = trainers()
    with pytest.raises(StateMismatchError, match=r"\bg, .*\bd, g"):
        both.load_state_dict({"g": both["g"].state_dict()})


def test_it_needs_trainers() -> None:
    with pytest.raises(ConfigurationError):
        TrainerDict()
    with pytest.raises(ArgumentTypeError, match="g=SGD"):
        TrainerDict(g=torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1))  # type: ignore[arg-type]


def test_it_shows_the_name_the_type_and_the_optimizer_of_each() -> None:
    class Mine(Trainer):
        """A Trainer of one's own."""

    trainers = TrainerDict(
        first=Trainer(nn.Linear(1, 1), "torch:SGD", {"lr": 0.5}), second=Mine(nn.Linear(1, 1), "adam")
    )
    shown = repr(trainers)
    for part in (
        "name: first\ntype: Trainer\noptimizer: torch:SGD",
        "lr: 0.5",
        "name: second\ntype: Mine",
        "adam",
    ):
        assert part in shown


def test_all_are_closed_also_where_the_first_one_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    _, both = trainers()
    closed: list[str] = []

    def fail() -> None:
        closed.append("g")
        raise KVStoreError("the round of the last step has failed")

    monkeypatch.setattr(both["g"], "close", fail)
    monkeypatch.setattr(both["d"], "close", lambda: closed.append("d"))
    with pytest.raises(KVStoreError, match="last step"):
        both.close()
    assert closed == ["g", "d"]
