"""Parameters on several devices of one process, here all the CPU: forms, sums, steps, state and residuals."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import Parameter

from kvtrainer import Trainer, amp
from kvtrainer.errors import (
    ConfigurationError,
    NonFiniteGradientError,
    StaleGradientError,
    WeightsWrittenError,
)
from tests.support.replica_training import STORES, backward, replicas, values


@STORES
@pytest.mark.parametrize(
    ("count", "expected"), [(1, (-0.5, -1.25, -2.125)), (2, (-1, -2.5, -4.25)), (3, (-1.5, -3.75, -6.375))]
)
def test_rescaled_sums_with_momentum_follow_the_closed_form(
    name: str, in_store: bool | None, count: int, expected: Sequence[float]
) -> None:
    w = replicas(count)
    options = {"learning_rate": 1.0, "momentum": 0.5, "rescale_grad": 2.0}
    trainer = Trainer([w], "sgd", options, kvstore=name, update_on_kvstore=in_store)
    for value in expected:
        backward(w)
        trainer.step(4)
        assert values(w) == [value] * count


def test_without_a_kvstore_each_replica_has_its_own_update_and_state() -> None:
    w = replicas()
    trainer = Trainer([w], "sgd", {"learning_rate": 1.0, "momentum": 0.5}, kvstore=None)
    backward(w, [1.0, 3.0])
    trainer.step(1)
    assert values(w) == [-1.0, -3.0]
    backward(w, [1.0, None])
    trainer.step(1, ignore_stale_grad=True)
    assert values(w) == [-2.5, -3.0]
    backward(w, [1.0, 3.0])
    trainer.step(1)
    assert values(w) == [-4.25, -7.5]


def test_update_of_replicas_that_were_not_summed_is_refused() -> None:
    w = replicas()
    trainer = Trainer([w], "sgd", {"learning_rate": 1.0}, update_on_kvstore=False)
    backward(w)
    with pytest.raises(ConfigurationError, match=r"2 replicas .* allreduce_grads\(\)"):
        trainer.update(1)
    trainer.step(1)
    assert values(w) == [-2.0, -2.0]


@STORES
def test_stale_replica_is_named_with_its_device(name: str, in_store: bool | None) -> None:
    w, b = replicas(), replicas()
    trainer = Trainer({"w": w, "b": b}, "sgd", {"lr": 1.0}, kvstore=name, update_on_kvstore=in_store)
    for _ in range(2):  # in MXNet only the first backward pass was looked for
        before = values([*w, *b])
        backward(w, [1.0, None])
        backward(b)
        with pytest.raises(StaleGradientError, match=r"1 of 4 .*: w on cpu \(replica 1\)\."):
            trainer.step(1)
        assert values([*w, *b]) == before
        trainer.step(1, ignore_stale_grad=True)
        assert values(w) == [before[0] - 1] * 2
        assert values(b) == [before[2] - 2] * 2


@pytest.mark.parametrize("in_store", [True, False])
@pytest.mark.parametrize("bad", [0, 1])
def test_overflow_on_any_replica_skips_the_step_for_all(bad: int, in_store: bool) -> None:
    w = replicas()
    trainer = Trainer([w], "sgd", {"lr": 1.0}, update_on_kvstore=in_store)
    amp.init_trainer(trainer, amp.LossScaler(8.0))
    slopes: list[float] = [1.0, 1.0]
    slopes[bad] = float("inf")
    for given, scale, after in ((slopes, 4.0, 0.0), ([1.0, 1.0], 4.0, -2.0)):
        with amp.scale_loss([(p * s).sum() for p, s in zip(w, given, strict=True)], trainer) as losses:
            for loss in losses:
                loss.backward()
        trainer.step(1)
        assert (trainer.amp_loss_scale, values(w)) == (scale, [after, after])


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


@pytest.mark.parametrize("is_seen_by_torch", [True, False])
@pytest.mark.parametrize("written", [0, 1])
def test_write_to_any_replica_in_the_store_is_noticed(written: int, is_seen_by_torch: bool) -> None:
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
    with pytest.raises(ConfigurationError, match=r"\[cpu\] .*\[cpu, cpu\]"):
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


@STORES
def test_state_moves_between_one_device_and_several(name: str, in_store: bool | None, tmp_path: Path) -> None:
    def trainer_of(parameters: list[Parameter], given: Any, uok: bool | None) -> Trainer:
        options = {"learning_rate": 1.0, "momentum": 0.5}
        return Trainer({"w": parameters}, "sgd", options, kvstore=given, update_on_kvstore=uok)

    w, one, again = replicas(), replicas(1), replicas()
    trainer = trainer_of(w, name, in_store)
    backward(w)
    trainer.step(1)
    state = trainer.state_dict()
    assert list(state["state"]) == [0]
    assert state["param_groups"][0]["params"] == [0]
    assert len(trainer.param_groups[0]["params"]) == 2
    trainer.save_states(tmp_path / "states")
    single = trainer_of(one, None, None)
    single.load_state_dict(state)
    backward(one)
    single.step(1)
    assert values(one) == [-2.0]  # 0.5 · 2 from before, 1 now
    single.save_states(tmp_path / "single")
    other = trainer_of(again, name, in_store)
    other.load_states(tmp_path / "single")
    assert len(other.param_groups[0]["params"]) == 2
    backward(again)
    other.step(1)
    assert values(again) == [-3.0, -3.0]  # 0.5 · 2 from before, 2 now
    other.load_states(tmp_path / "states")
    backward(again)
    other.step(1)
    assert values(again) == [-6.0, -6.0]


def test_loaded_state_reaches_every_replica_without_a_store() -> None:
    w, one = replicas(), replicas(1)
    single = Trainer([one], "sgd", {"lr": 1.0, "momentum": 0.5}, kvstore=None)
    backward(one)
    single.step(1)
    trainer = Trainer([w], "sgd", {"lr": 1.0, "momentum": 0.5}, kvstore=None)
    trainer.load_state_dict(single.state_dict())
    backward(w)
    trainer.step(1)
    assert values(w) == [-1.5, -1.5]


@pytest.mark.parametrize("before_first_step", [True, False])
def test_residuals_of_replicas_are_saved(before_first_step: bool, tmp_path: Path) -> None:
    def trainer_of(parameters: list[Parameter]) -> Trainer:
        params = {"type": "2bit", "threshold": 0.5}
        return Trainer([parameters], "sgd", {"lr": 1.0}, kvstore="device", compression_params=params)

    w, again = replicas(), replicas()
    trainer, other = trainer_of(w), trainer_of(again)
    backward(w, [0.3, 0.1])
    trainer.step(1)
    trainer.save_states(tmp_path / "states")
    if not before_first_step:
        backward(again, [0.4, 0.4])
        other.step(1)
    other.load_states(tmp_path / "states")
    backward(again, [0.3, 0.3])
    other.step(1)
    assert values(again) == [-0.5, -0.5]  # the first said .5 of .6, the second nothing of .4
    backward(again, [0.0, 0.1])
    other.step(1)
    assert values(again) == [-1.0, -1.0]


def test_stale_replica_keeps_its_residual() -> None:
    w = replicas()
    params = {"type": "2bit", "threshold": 0.5}
    trainer = Trainer([w], "sgd", {"lr": 1.0}, kvstore="device", compression_params=params)
    for slopes, expected in (([0.3, 0.3], 0.0), ([0.3, None], -0.5), ([0.0, 0.3], -1.0)):
        backward(w, slopes)
        trainer.step(1, ignore_stale_grad=True)
        assert values(w) == [expected] * 2


def test_replica_that_cannot_be_compressed_raises_and_changes_nothing() -> None:
    w = replicas()
    params = {"type": "2bit", "threshold": 0.5}
    trainer = Trainer([w], "sgd", {"lr": 1.0}, kvstore="device", compression_params=params)
    backward(w, [0.3, float("inf")])
    with pytest.raises(NonFiniteGradientError):
        trainer.step(1)
    for expected in (0.0, -1.0):
        w[0].grad = w[1].grad = None
        backward(w, 0.3)
        trainer.step(1)
        assert values(w) == [expected] * 2
