"""MXNet 1.9.1's numbers on servers, and what a store over servers says to its `_set_updater`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import kvtrainer
from kvtrainer.errors import ConfigurationError
from kvtrainer.kvstore import DistKVStore
from tests.support.stores import Servers


def trained(kv: DistKVStore, options: dict[str, Any], updates: int = 2) -> float:
    """Where a weight of 1 ends after equal gradients of 1 per worker."""
    weight = torch.nn.Parameter(torch.ones(1))
    with kvtrainer.Trainer({"w": weight}, "nag", options, kvstore=kv, update_on_kvstore=True) as trainer:
        for _ in range(updates):
            weight.grad = torch.ones(1)
            trainer.step(2)
    return weight.item()


def test_servers_take_the_release_from_the_variable_of_the_workers(
    jobs: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"learning_rate": 0.1, "momentum": 0.9, "wd": 0.1}
    monkeypatch.setenv("KVSTORE_COMPAT", "mxnet1")
    ends = jobs.results(2, 1, lambda kv, rank: trained(kv, options))
    # What MXNet 1.9.1 and 2.0.0b1 give.
    assert ends == pytest.approx([0.498564] * 2, abs=1e-6)
    ends = jobs.results(2, 1, lambda kv, rank: trained(kv, {**options, "compat": "mxnet2"}))
    assert ends == pytest.approx([0.496871] * 2, abs=1e-6)


def test_a_function_does_not_travel_to_servers(jobs: Servers) -> None:
    def updater(key: object, merged: Tensor, stored: Tensor) -> None:
        stored.add_(merged)

    def body(kv: DistKVStore, rank: int) -> None:
        for verb in (kv.set_updater, kv._set_updater):
            with pytest.raises(ConfigurationError, match=r"(?s)on servers.*--import"):
                verb(updater)
        # The store works on, without.
        kv.init("w", torch.zeros(1))
        kv.push("w", torch.ones(1))
        kv.pull("w", out=(pulled := torch.empty(1)))
        assert pulled.item() == 1.0

    jobs.results(1, 1, body)
