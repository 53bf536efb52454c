"""Resuming from a checkpoint that lacks something, or that is another model's or optimizer's."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from kvtrainer.errors import ConfigurationError, StateFileError, StateMismatchError
from kvtrainer.strategy import Strategy
from tests.support.strategies import SGD, Make, Net, make, same, steps, weights

__all__ = ["make"]
LINEAR = {"type": "LinearLR", "start_factor": 0.5, "end": 8, "by_epoch": False}


def prepared(make: Make, net: nn.Module | None = None, **given: Any) -> Strategy:
    strategy = make()
    strategy.prepare(net or Net(), **{"optim_wrapper": SGD, **given})
    return strategy


def test_a_run_without_schedules_goes_on_from_a_file_without_them(make: Make, tmp_path: Path) -> None:
    """Such as a loop of plain torch has saved."""
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.25)
    content = {"state_dict": net.state_dict(), "optimizer": optimizer.state_dict(), "meta": {"iter": 3}}
    torch.save(content, tmp_path / "a.pt")
    strategy = prepared(make)
    strategy.load_or_resume(load_from=str(tmp_path / "a.pt"), resume=True)
    assert strategy.optim_wrapper.get_lr() == {"lr": [0.25]}
    assert same(weights(strategy.model), weights(net))


def test_weights_under_another_name_are_said_where_to_go(make: Make, tmp_path: Path) -> None:
    torch.save({"model": Net().state_dict(), "epoch": 3}, tmp_path / "a.pt")
    with pytest.raises(StateFileError, match=r"but model, epoch; .* load_model_state_dict\(\)"):
        prepared(make).load_checkpoint(str(tmp_path / "a.pt"))


def test_nothing_has_changed_where_there_is_no_trainer(make: Make, tmp_path: Path) -> None:
    prepared(make).save_checkpoint(str(tmp_path / "a.pt"))
    net = Net()
    before = weights(net)
    with pytest.raises(ConfigurationError, match="has no Trainer"):
        prepared(make, net, optim_wrapper=None).resume(str(tmp_path / "a.pt"))
    assert same(weights(net), before)


def test_what_does_not_fit_stays_as_it_is_where_that_is_tolerated(
    make: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A larger model with another optimizer and no schedule takes the weights that it has in common."""
    first = prepared(make, param_scheduler=LINEAR)
    steps(first.model, first.optim_wrapper, 2)
    first.save_checkpoint(str(tmp_path / "a.pt"))

    class Larger(Net):
        def __init__(self) -> None:
            super().__init__()
            self.more = nn.Linear(1, 1)

    second = prepared(make, Larger(), optim_wrapper={"optimizer": {"type": "Adam", "lr": 0.3}})
    with pytest.raises(StateMismatchError):
        second.resume(str(tmp_path / "a.pt"))
    second.resume(str(tmp_path / "a.pt"), missing="warn")
    mine, theirs = (one.model.get_parameter("head.weight") for one in (second, first))
    assert torch.equal(mine, theirs)
    assert second.optim_wrapper.get_lr()["lr"] == [0.3]
    said = capsys.readouterr().err
    assert "'optimizer' is not resumed" in said
    assert "'param_schedulers' is not resumed" in said


def test_passes_are_counted_from_the_iteration_where_the_file_does_not_count_them(
    make: Make, tmp_path: Path
) -> None:
    """Saved without accumulation: with four of seven passes made, the seventh is a window of its own."""
    path = str(tmp_path / "a.pt")
    prepared(make).save_checkpoint(path, extra_ckpt={"meta": {"iter": 4}})
    prepared(make).save_checkpoint(path + "w", save_optimizer=False, extra_ckpt={"meta": {"iter": 4}})
    for name, missing in ((path, "error"), (path + "w", "warn")):
        run = {"max_iters": 7}
        strategy = prepared(make, optim_wrapper={**SGD, "accumulative_counts": 2}, dispatch_kwargs=run)
        strategy.resume(name, missing=missing)
        trainer = strategy.optim_wrapper
        found = [trainer.update_params(strategy.model(torch.ones(1, 2)).sum()).updated for _ in range(3)]
        assert found == [False, True, True]


@pytest.mark.parametrize("name", ["s3://bucket/a.pt", "https://example.com/a.pt"])
def test_checkpoints_are_not_written_to_addresses(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    strategy = prepared(make)
    before = sorted(os.listdir(tmp_path))
    with pytest.raises(ConfigurationError, match="written to files"):
        strategy.save_checkpoint(name)
    assert sorted(os.listdir(tmp_path)) == before


def test_an_address_of_a_file_is_written_where_it_is_read(make: Make, tmp_path: Path) -> None:
    name = f"file://{tmp_path}/a.pt"
    strategy = prepared(make)
    strategy.save_checkpoint(name)
    assert (tmp_path / "a.pt").exists()
    assert strategy.load_or_resume(resume=True) is not None
