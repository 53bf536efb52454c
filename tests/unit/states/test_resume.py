"""Training goes on from a file of states as if it had never been interrupted, within one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kvstore_server.optimizer import Optimizer
from kvtrainer import Trainer, kvstore
from kvtrainer.states.file import read_state_file
from tests.support.saved_training import (
    ELEMENTWISE,
    MATRICES_ONLY,
    PLACES,
    WHOLE,
    Net,
    same,
    train,
    trainer_of,
    weights,
)


def goes_on_as_if_never_interrupted(
    path: Path, kind: str, places: tuple[bool | None, bool | None], **options: Any
) -> bool:
    """Train 3 steps, save, and 3 more; load into a new Trainer, of weights as they were saved, and compare."""
    dtype = options.pop("dtype", torch.float32)
    net = Net(kind not in MATRICES_ONLY, dtype)
    trainer = trainer_of(net, kind, places[0], **options)
    train(net, trainer, 0, 3)
    trainer.save_states(path)
    again = Net(kind not in MATRICES_ONLY, dtype)
    again.load_state_dict(net.state_dict())
    train(net, trainer, 3, 3)
    other = trainer_of(again, kind, places[1], **options)
    other.load_states(path)
    train(again, other, 3, 3)
    return same(weights(again), weights(net))


@PLACES
@pytest.mark.parametrize("kind", [*ELEMENTWISE, *WHOLE])
def test_training_goes_on_bit_for_bit_from_a_file(kind: str, uok: bool | None, tmp_path: Path) -> None:
    assert goes_on_as_if_never_interrupted(tmp_path / "states", kind, (uok, uok))


@pytest.mark.parametrize("kind", ["adam", "lamb"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_float32_masters_of_half_precision_weights_are_saved(
    dtype: torch.dtype, kind: str, tmp_path: Path
) -> None:
    assert goes_on_as_if_never_interrupted(
        tmp_path / "states", kind, (None, None), dtype=dtype, multi_precision=True
    )
    master = read_state_file(tmp_path / "states").parameters["inner.weight"].state["master"]
    assert (master.dtype, master.shape) == (torch.float32, (900, 7))


@PLACES
def test_half_precision_key_without_updates_beside_others_is_no_obstacle(
    uok: bool | None, tmp_path: Path
) -> None:
    """It shares a slice with them, and so has a master."""
    net = Net(dtype=torch.float16)
    net.outer.bias.requires_grad_(False)
    trainer = Trainer(
        net,
        "adam",
        {"multi_precision": True},
        kvstore=None if uok is None else kvstore.create("local"),
        update_on_kvstore=uok,
    )
    train(net, trainer, 0, 2)
    trainer.save_states(tmp_path / "states")
    assert read_state_file(tmp_path / "states").parameters["outer.bias"].state == {}
    trainer.load_states(tmp_path / "states")
    assert set(trainer.state_dict()["state"]) == {0, 1, 2, 3}


def test_states_of_half_precision_weights_go_on_in_float32(tmp_path: Path) -> None:
    net, again = Net(dtype=torch.bfloat16), Net()
    trainer = trainer_of(net, "adam", multi_precision=True)
    train(net, trainer, 0, 2)
    trainer.save_states(tmp_path / "states")
    other = trainer_of(again, "adam")
    other.load_states(tmp_path / "states")
    shown, expected = other.state_dict()["state"][1], trainer.state_dict()["state"][1]
    assert shown.keys() == expected.keys() - {"master"}
    assert shown["exp_avg"].equal(expected["exp_avg"])
    train(again, other, 2, 1)
    assert other.state_dict()["state"][1]["step"] == 3


def test_order_of_parameters_does_not_matter(tmp_path: Path) -> None:
    net = Net()
    trainer = Trainer(dict(net.named_parameters()), "adam")
    train(net, trainer, 0, 2)
    trainer.save_states(tmp_path / "states")
    again = Net()
    again.load_state_dict(net.state_dict())
    other = Trainer(list(again.named_parameters())[::-1], "adam")
    other.load_states(tmp_path / "states")
    train(net, trainer, 2, 2)
    train(again, other, 2, 2)
    assert same(weights(again), weights(net))


def test_optimizer_that_cannot_be_tried_on_zeros_is_saved_all_the_same(tmp_path: Path) -> None:
    class Picky(Optimizer):
        def update(self, weight: Tensor, grad: Tensor, state: dict[str, Any], hyper: Any) -> None:
            if not grad.any():
                raise ArithmeticError("nothing to do")
            state["seen"] = state.get("seen", torch.zeros_like(grad)) + grad
            weight.sub_(state["seen"])

    runs = []
    for is_interrupted in (False, True):
        net = nn.Linear(2, 1)
        nn.init.ones_(net.weight)
        nn.init.ones_(net.bias)
        trainer = Trainer(net, Picky())
        for i in range(4):
            if is_interrupted and i == 2:
                trainer.save_states(tmp_path / "states")
                trainer = Trainer(net, Picky())
                trainer.load_states(tmp_path / "states")
            trainer.zero_grad()
            net(torch.full((1, 2), 1.0 + i)).sum().backward()
            trainer.step()
        runs.append(weights(net))
    assert same(*runs)
