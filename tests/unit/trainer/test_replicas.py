"""Parameters that are on several devices of one process; here the devices are all the CPU."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch.nn import Parameter

from kvtrainer import Trainer, amp
from kvtrainer.errors import (
    ConfigurationError,
    StaleGradientError,
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


@STORES
def test_multiplier_of_the_first_replica_counts(name: str, in_store: bool | None) -> None:
    w = replicas()
    options = {"learning_rate": 1.0, "momentum": 0.5}
    trainer = Trainer([("w", w)], "sgd", options, kvstore=name, update_on_kvstore=in_store)
    backward(w)
    trainer.step(1)
    assert values(w) == [-2.0, -2.0]
    w[0].lr_mult = 0.5  # type: ignore[attr-defined]
    backward(w)
    trainer.step(1)
    assert values(w) == [-4.0, -4.0]


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


def test_without_a_batch_size_gradients_are_averaged_over_replicas() -> None:
    w = replicas(4)
    trainer = Trainer([w], "sgd", {"learning_rate": 1.0})
    backward(w, [1.0, 2.0, 3.0, 6.0])
    trainer.step()
    assert values(w) == [-3.0] * 4


@STORES
def test_first_replica_decides_the_initial_weights(name: str, in_store: bool | None) -> None:
    w = [*replicas(1, 5.0), *replicas(2, 7.0)]
    trainer = Trainer([w], "sgd", {"learning_rate": 1.0}, kvstore=name, update_on_kvstore=in_store)
    backward(w)
    trainer.step(3)
    assert values(w) == [4.0] * 3


def test_float32_sums_are_left_folds_and_all_replicas_have_the_same_bits() -> None:
    torch.manual_seed(1)
    w, oracle = replicas(3, shape=(40, 7)), Parameter(torch.zeros(40, 7))
    trainer = Trainer([w], "sgd", {"learning_rate": 0.1})
    for _ in range(3):
        grads = [torch.randn(40, 7) for _ in w]
        for p, grad in zip(w, grads, strict=True):
            p.grad = grad
        trainer.step(1)
        with torch.no_grad():
            oracle -= 0.1 * (grads[0] + grads[1] + grads[2])
        assert all(torch.equal(p, w[0]) for p in w)
        assert torch.allclose(w[0], oracle, atol=1e-6)


def test_half_gradients_are_summed_in_float32_and_rounded_once() -> None:
    """2048 + 1 is 2048 in half precision; 2048 + 1 + 1 is 2050."""
    w = replicas(3, dtype=torch.float16)
    trainer = Trainer([w], "sgd", {"learning_rate": 1.0}, update_on_kvstore=False)
    backward(w, [2048.0, 1.0, 1.0])
    trainer.allreduce_grads()
    assert [p.grad[0].item() for p in w if p.grad is not None] == [2050.0] * 3


def test_gradients_are_equal_after_their_sum_and_may_be_clipped() -> None:
    w = replicas()
    trainer = Trainer([w], "sgd", {"learning_rate": 1.0}, update_on_kvstore=False)
    backward(w, [1.0, 2.0])
    trainer.allreduce_grads()
    for p in w:
        assert p.grad is not None
        assert p.grad.tolist() == [3.0] * 3
        p.grad.mul_(0.5)
    trainer.update(1)
    assert values(w) == [-1.5, -1.5]


def test_update_of_replicas_that_were_not_summed_is_refused() -> None:
    w = replicas()
    trainer = Trainer([w], "sgd", {"learning_rate": 1.0}, update_on_kvstore=False)
    backward(w)
    with pytest.raises(
        ConfigurationError, match=r"2 replicas that were not summed; call allreduce_grads\(\)"
    ):
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


def test_key_that_every_replica_leaves_out_is_not_touched() -> None:
    w, b = replicas(value=1.0), replicas(value=1.0)
    trainer = Trainer([w, b], "sgd", {"lr": 1.0, "wd": 0.5})
    backward(w)
    trainer.step(1, ignore_stale_grad=True)
    assert (values(w), values(b)) == ([-1.5, -1.5], [1.0, 1.0])


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


@pytest.mark.parametrize("bad", [0, 1])
def test_overflow_is_seen_on_any_replica_without_a_store(bad: int) -> None:
    w = replicas()
    trainer = Trainer([w], "sgd", {"lr": 1.0}, kvstore=None)
    amp.init_trainer(trainer)
    slopes: list[float] = [1.0, 1.0]
    slopes[bad] = float("nan")
    backward(w, slopes)
    trainer.step(1)
    assert values(w) == [0.0, 0.0]
