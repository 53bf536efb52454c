"""Options and methods that were removed say what to use instead; the argument's default is still taken."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from kvtrainer import Trainer
from kvtrainer.errors import ConfigurationError


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
