"""How replicas may be given to a Trainer, which store they get, and writes to them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import Parameter

from kvtrainer import Trainer
from kvtrainer.errors import (
    ConfigurationError,
    WeightsWrittenError,
)
from kvtrainer.sync.select import LARGE, select_store
from tests.support.replica_training import backward, replicas, values

TWO = [torch.device("cpu")] * 2


def test_every_replica_is_in_the_parameter_groups_and_zeroed() -> None:
    w, b = replicas(), replicas()
    trainer = Trainer([{"params": [("w", w)]}, {"params": [b], "lr": 0.5}], "sgd", {"lr": 1.0})
    assert [[id(p) for p in group["params"]] for group in trainer.param_groups] == [
        [id(p) for p in one] for one in (w, b)
    ]
    assert trainer.param_groups[0]["param_names"] == ["w", "w on cpu (replica 1)"]
    backward(w)
    backward(b)
    trainer.step(1)
    assert (values(w), values(b)) == ([-2.0, -2.0], [-1.0, -1.0])
    trainer.zero_grad()
    assert all(p.grad is None for p in (*w, *b))


@pytest.mark.parametrize(
    ("name", "asked", "environ", "largest", "aggregate", "updates"),
    [
        ("device", None, "1", 0, 1, True),
        ("local", None, "1", 0, 1, True),
        ("device", None, "0", 0, 1, False),
        ("device", True, "0", 0, 1, True),
        ("device", False, "1", 0, 1, False),
        ("local", None, "1", LARGE + 1, 1, False),
        ("device", None, "1", LARGE + 1, 1, True),
        ("device", None, "1", 0, 4, False),
    ],
)
def test_with_two_devices_there_is_a_store_and_the_table_says_who_updates(
    name: str,
    asked: bool | None,
    environ: str,
    largest: int,
    aggregate: int,
    updates: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MXNET_UPDATE_ON_KVSTORE", environ)
    selection = select_store(name, asked, None, aggregate, largest, devices=TWO)
    assert (selection.kvstore, selection.updates_weights) == (name, updates)


@pytest.mark.parametrize("is_seen_by_torch", [True, False])
@pytest.mark.parametrize("written", [0, 1])
def test_write_to_any_replica_is_noticed_while_the_store_has_the_weights(
    written: int, is_seen_by_torch: bool
) -> None:
    w = replicas()
    trainer = Trainer({"w": w}, "sgd", {"lr": 1.0}, kvstore="device")
    backward(w)
    trainer.step(1)
    backward(w)
    with torch.no_grad():
        (w[written] if is_seen_by_torch else w[written].data).fill_(9.0)
    with pytest.raises(WeightsWrittenError, match=r": w( on cpu \(replica 1\))?\. Call"):
        trainer.step(1)
    with torch.no_grad():
        w[0].fill_(9.0)
    trainer.set_data()
    assert values(w) == [9.0, 9.0]
    trainer.step(1)
    assert values(w) == [7.0, 7.0]


@pytest.mark.parametrize("given", [None, "device"])
def test_new_weights_reach_every_replica_and_state_stays(given: str | None) -> None:
    w = replicas()
    trainer = Trainer({"w": w}, "sgd", {"lr": 1.0, "momentum": 0.5}, kvstore=given)
    backward(w)
    trainer.step(2)
    trainer.set_data({"w": torch.full((3,), 10.0)})
    assert values(w) == [10.0, 10.0]
    backward(w)
    trainer.step(2)
    own = 0.5 if given is None else 1.0
    assert values(w) == [10.0 - 1.5 * own] * 2


def test_groups_of_replicas_can_be_added_before_the_first_step() -> None:
    w, b = replicas(), replicas()
    trainer = Trainer([w], "sgd", {"lr": 1.0})
    with pytest.raises(
        ConfigurationError, match=r"new group are on \[cpu\] while the others are on \[cpu, cpu\]"
    ):
        trainer.add_param_group({"params": [Parameter(torch.zeros(1))]})
    with pytest.raises(ConfigurationError, match="already"):
        trainer.add_param_group({"params": [[w[1], Parameter(torch.zeros(3))]]})
    trainer.add_param_group({"params": [b], "lr": 0.5})
    backward(w)
    backward(b)
    trainer.step(1)
    assert (values(w), values(b)) == ([-2.0, -2.0], [-1.0, -1.0])


def wrong_forms() -> dict[str, tuple[Any, str]]:
    w, b = replicas(), replicas(3)
    return {
        "devices": ({"x": b, "a": w}, r"'x' is on \[cpu, cpu, cpu\] while 'a' is on \[cpu, cpu\]"),
        "single beside replicas": ([w, b[0]], r"'1' is on \[cpu\] while '0' is on \[cpu, cpu\]"),
        "shape": (
            [[w[0], Parameter(torch.zeros(4))]],
            r"replicas of parameter '0' differ: float32\[3\], float32\[4\]",
        ),
        "dtype": ([[w[0], Parameter(torch.zeros(3).half())]], r"differ: float32\[3\], float16\[3\]"),
        "twice": ([[w[0], w[0]]], "also another replica"),
        "shared": ([w, [b[0], w[1]]], "also another replica"),
        "empty": ([w, []], "'1' is an empty list"),
        "lazy": (
            [[torch.nn.LazyLinear(2).weight, torch.nn.LazyLinear(2).weight]],
            "run a forward pass on each",
        ),
        "no tensor": ([["w", 3]], "got str"),
    }


@pytest.mark.parametrize("case", list(wrong_forms()))
def test_replicas_that_do_not_go_together_are_refused(case: str) -> None:
    given, message = wrong_forms()[case]
    with pytest.raises(ConfigurationError, match=message):
        Trainer(given, "sgd")


def test_torch_instance_cannot_train_replicas() -> None:
    w = replicas()
    with pytest.raises(ConfigurationError, match="a SGD instance cannot train replicas"):
        Trainer([w], torch.optim.SGD(w, lr=1.0))


def test_nccl_takes_cuda_parameters_only() -> None:
    with pytest.raises(ConfigurationError, match=r"'nccl' takes CUDA tensors only, but .* are on cpu"):
        Trainer([replicas()], "sgd", kvstore="nccl")
    with pytest.raises(ConfigurationError, match=r"gradient compression is not supported for .*'nccl'"):
        Trainer([replicas()], "sgd", kvstore="nccl", compression_params={"type": "2bit"})
