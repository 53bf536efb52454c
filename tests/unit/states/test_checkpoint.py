"""torch.distributed.checkpoint: what it saves of a Trainer comes back into a new one, which has had no step yet."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from kvtrainer import Trainer
from kvtrainer.states.file import read_state_file
from tests.support.saved_training import MATRICES_ONLY, PLACES, Net, same, train, trainer_of, weights

KINDS = ["sgd", "adam", "torch:NAdam", "torch:Rprop", "torch:AdamW"]
WHOLE = ["lamb", "groupadagrad", "torch:Adafactor", "torch:Muon"]


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """It warns that there is no process group, and of its own use of deprecated functions."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def by_state_dict(net: nn.Module, trainer: Trainer, folder: Path, is_load: bool) -> None:
    content = {"net": net.state_dict(), "trainer": trainer.state_dict()}
    if not is_load:
        save(content, checkpoint_id=folder)
        return
    load(content, checkpoint_id=folder)
    trainer.load_state_dict(content["trainer"])


def by_object(net: nn.Module, trainer: Trainer, folder: Path, is_load: bool) -> None:
    content = {"net": net, "trainer": trainer}
    if is_load:
        load(content, checkpoint_id=folder)
    else:
        save(content, checkpoint_id=folder)


def by_parameter_name(net: nn.Module, trainer: Trainer, folder: Path, is_load: bool) -> None:
    content: dict[str, Any] = {"net": net.state_dict(), "trainer": get_optimizer_state_dict(net, trainer)}
    if not is_load:
        save(content, checkpoint_id=folder)
        return
    load(content, checkpoint_id=folder)
    set_optimizer_state_dict(net, trainer, content["trainer"])


def goes_on(way: Any, kind: str, uok: bool | None, folder: Path) -> bool:
    net = Net(kind not in MATRICES_ONLY)
    trainer = trainer_of(net, kind, uok)
    train(net, trainer, 0, 3)
    trainer.zero_grad()
    way(net, trainer, folder, False)
    train(net, trainer, 3, 3)
    again = Net(kind not in MATRICES_ONLY)
    with torch.no_grad():
        for p in again.parameters():
            p.add_(1.0)
    other = trainer_of(again, kind, uok)
    way(again, other, folder, True)
    train(again, other, 3, 3)
    return same(weights(again), weights(net))


@PLACES
@pytest.mark.parametrize("way", [by_state_dict, by_object, by_parameter_name])
def test_new_trainer_goes_on_from_a_checkpoint(way: Any, uok: bool | None, tmp_path: Path) -> None:
    assert goes_on(way, "adam", uok, tmp_path)


@pytest.mark.parametrize("kind", [*KINDS, *WHOLE])
def test_new_trainer_goes_on_from_a_checkpoint_with_any_optimizer(kind: str, tmp_path: Path) -> None:
    assert goes_on(by_state_dict, kind, None, tmp_path)


def test_room_to_load_into_counts_as_no_state() -> None:
    runs = []
    for is_loaded in (False, True):
        net = Net()
        trainer = trainer_of(net, "torch:NAdam")
        if is_loaded:
            trainer.load_state_dict(trainer.state_dict())
        train(net, trainer, 0, 2)
        runs.append(weights(net))
    assert same(*runs)


@pytest.mark.parametrize("kind", ["adam", "lamb"])
def test_loaded_room_is_not_saved_as_state(kind: str, tmp_path: Path) -> None:
    trainer = trainer_of(Net(), kind)
    trainer.load_state_dict(trainer.state_dict())
    trainer.save_states(tmp_path / "states")
    assert not any(row.state for row in read_state_file(tmp_path / "states").parameters.values())


def test_parameters_that_are_frozen_get_no_room() -> None:
    net = Net()
    net.inner.weight.requires_grad_(False)
    trainer = Trainer(net, "adam")
    assert set(trainer.state_dict()["state"]) == {0, 2, 3, 4}
