"""A checkpoint of torch.distributed goes from torch's optimizer to a Trainer and back, for each class of torch's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from kvtrainer import Trainer
from tests.support.pairwise import pairwise
from tests.support.saved_training import random_steps, weights

CLASSES: list[tuple[Any, dict[str, Any]]] = [
    (torch.optim.SGD, {"lr": 0.1}),
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.5, "weight_decay": 0.01}),
    (torch.optim.Adam, {"lr": 0.1, "amsgrad": True}),
    (torch.optim.AdamW, {"lr": 0.1}),
    (torch.optim.Adagrad, {"lr": 0.1, "lr_decay": 0.1, "initial_accumulator_value": 0.5}),
    (torch.optim.RMSprop, {"lr": 0.1, "momentum": 0.5, "centered": True}),
    (torch.optim.Adadelta, {"lr": 0.5}),
    (torch.optim.Adamax, {"lr": 0.1}),
    (torch.optim.NAdam, {"lr": 0.1, "momentum_decay": 0.1}),
    (torch.optim.RAdam, {"lr": 0.1}),
    (torch.optim.Rprop, {"lr": 0.1}),
    (torch.optim.ASGD, {"lr": 0.1, "t0": 2, "lambd": 0.1}),
    (torch.optim.Adafactor, {}),
    (torch.optim.Muon, {}),
]
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
IN_STORE = {"kvstore": "local", "update_on_kvstore": True}


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3, bias=False), nn.Linear(3, 2, bias=False)).double()


def go(model: nn.Module, optimizer: Any, *steps: int) -> list[Tensor]:
    random_steps(model, optimizer, *steps)
    return weights(model)


def given(model: nn.Module, form: str, is_ours: bool) -> Any:
    """The parameters as a script gives them. A module goes to a Trainer alone, and to torch as its parameters."""
    if form == "named":
        return model.named_parameters()
    return model if form == "module" and is_ours else model.parameters()


def directly(model: nn.Module, source: Any, again: nn.Module, target: Any, path: Path) -> None:
    target.load_state_dict(source.state_dict())


def raw(model: nn.Module, source: Any, again: nn.Module, target: Any, path: Path) -> None:
    save({"optimizer": source.state_dict()}, checkpoint_id=path)
    if not isinstance(target, Trainer):
        go(again, target, 7)  # it has nothing to load into before its first step
    content = {"optimizer": target.state_dict()}
    load(content, checkpoint_id=path)
    target.load_state_dict(content["optimizer"])


def by_functions(model: nn.Module, source: Any, again: nn.Module, target: Any, path: Path) -> None:
    save({"optimizer": get_optimizer_state_dict(model, source)}, checkpoint_id=path)
    content = {"optimizer": get_optimizer_state_dict(again, target)}
    load(content, checkpoint_id=path)
    set_optimizer_state_dict(again, target, content["optimizer"])


@pytest.mark.parametrize(
    ("kind", "form", "way", "store", "to_us"),
    pairwise(
        range(len(CLASSES)),
        ["module", "list", "named"],
        [directly, raw, by_functions],
        [{}, IN_STORE],
        [True, False],
    ),
)
def test_training_goes_on_from_the_others_state_or_checkpoint(
    kind: int, form: str, way: Any, store: dict[str, Any], to_us: bool, tmp_path: Path
) -> None:
    cls, options = CLASSES[kind]
    first, second = net(), net()

    def made(model: nn.Module, is_ours: bool) -> Any:
        parameters = given(model, form, is_ours)
        return Trainer(parameters, cls, dict(options), **store) if is_ours else cls(parameters, **options)

    source, target = made(first, not to_us), made(second, to_us)
    go(first, source, 0, 1, 2)
    way(first, source, second, target, tmp_path)
    second.load_state_dict(first.state_dict())
    for mine, expected in zip(go(second, target, 3, 4), go(first, source, 3, 4), strict=True):
        # torch's NAdam has a float32 in its state.
        torch.testing.assert_close(mine, expected, rtol=0, atol=1e-9 if cls is torch.optim.NAdam else 1e-10)


@pytest.mark.parametrize("form", ["module", "list", "named"])
def test_groups_have_names_where_torchs_have_them(form: str) -> None:
    model = net()
    ours = Trainer(given(model, form, True), "torch:SGD", {"lr": 0.1}).state_dict()["param_groups"]
    assert ours == torch.optim.SGD(given(model, form, False), lr=0.1).state_dict()["param_groups"]


def test_a_momentum_that_was_never_used_is_none_in_a_checkpoint(tmp_path: Path) -> None:
    """torch's own, which makes a step of zeros first, forgets that dampening does not hold for the first step."""
    first, second, third = net(), net(), net()
    options = {"lr": 0.1, "momentum": 0.9, "dampening": 0.5}
    source, target = (Trainer(model, torch.optim.SGD, dict(options)) for model in (first, second))
    by_functions(first, source, second, target, tmp_path)
    for mine, expected in zip(
        go(second, target, 0, 1), go(third, torch.optim.SGD(third.parameters(), **options), 0, 1), strict=True
    ):
        torch.testing.assert_close(mine, expected)


def test_a_momentum_of_zeros_is_one() -> None:
    model, again = net(), net()
    options = {"lr": 0.1, "momentum": 0.9, "dampening": 0.5}
    trainer, other = (Trainer(one, torch.optim.SGD, dict(options)) for one in (model, again))
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    trainer.step()
    other.load_state_dict(trainer.state_dict())
    for mine, expected in zip(go(again, other, 0), go(model, trainer, 0), strict=True):
        assert torch.equal(mine, expected)
