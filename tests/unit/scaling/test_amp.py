"""Loss scaling under a Trainer: the numbers of a step, and that a step that overflows changes nothing anywhere."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

import kvtrainer
from kvtrainer import Trainer, amp, kvstore
from kvtrainer.amp import LossScaler
from kvtrainer.errors import AmpNotInitializedError, ArgumentTypeError, ConfigurationError
from tests.support import ways_to_train
from tests.support.ways_to_train import STORES, zeros


def trainer_of(
    parameters: Any, uok: bool | None = None, scale: float | None = 2.0**16, **options: Any
) -> Trainer:
    trainer = ways_to_train.trainer_of(
        parameters, uok, options={"learning_rate": 1.0, "momentum": 0.5, **options}
    )
    if scale is not None:
        amp.init_trainer(trainer, amp.LossScaler(scale))
    return trainer


def backward(trainer: Trainer, p: Parameter, slope: float = 1.0) -> None:
    """A scaled backward pass whose unscaled gradient is `slope` everywhere."""
    with amp.scale_loss((p * slope).sum(), trainer) as scaled:
        scaled.backward()


@pytest.mark.parametrize("uok", STORES)
def test_scaled_steps_equal_unscaled_ones(uok: bool | None) -> None:
    p, q = zeros(), zeros()
    trainer, plain = trainer_of([p], uok, rescale_grad=2.0), trainer_of([q], uok, None, rescale_grad=2.0)
    for slope in (1.0, 3.0, -2.0):
        backward(trainer, p, slope)
        assert p.grad is not None
        assert p.grad.tolist() == [slope * 2.0**16] * 2
        trainer.step(4)
        (q * slope).sum().backward()
        plain.step(4)
        assert p.tolist() == q.tolist()


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("uok", STORES)
def test_step_that_overflows_is_skipped_for_every_parameter(uok: bool | None, bad: float) -> None:
    """MXNet's servers apply it: the weights are -inf then."""
    a, b = zeros(), zeros(3)
    trainer = trainer_of([a, b], uok)
    backward(trainer, a)
    backward(trainer, b)
    trainer.step(1)
    before = trainer.state_dict()["state"]
    backward(trainer, a)
    backward(trainer, b, bad)
    trainer.step(1)
    assert (a.tolist(), b.tolist()) == ([-1, -1], [-1, -1, -1])
    after = trainer.state_dict()["state"]
    assert [float(state["step"]) for state in after.values()] == [1, 1]
    assert all(after[i]["momentum_buffer"].equal(before[i]["momentum_buffer"]) for i in range(2))
    assert (trainer.amp_loss_scale, trainer.optimizer.num_update) == (2.0**15, 1)
    # The gradients are used up, and the next ones start afresh with the new scale.
    with pytest.raises(UserWarning, match="2 of 2 parameters got no gradient"):
        trainer.step(1)
    backward(trainer, a)
    backward(trainer, b)
    trainer.step(1)
    assert (a.tolist(), b.tolist()) == ([-2.5, -2.5], [-2.5, -2.5, -2.5])


@pytest.mark.parametrize("uok", STORES)
def test_scale_is_halved_at_once_and_once(uok: bool | None) -> None:
    """A gradient that overflows at 65536 and not at 32768; MXNet would go down to 16384."""
    p = zeros(1, dtype=torch.float16)
    trainer = trainer_of([p], uok, momentum=0.0)
    scales = []
    for _ in range(4):
        backward(trainer, p)
        scales.append(trainer.amp_loss_scale)
        trainer.step(1)
    assert scales == [65536, 32768, 32768, 32768]
    assert p.item() == -3


@pytest.mark.parametrize("uok", STORES)
def test_without_a_scaler_gradients_that_are_not_finite_are_applied_as_in_torch(uok: bool | None) -> None:
    p = zeros()
    trainer = trainer_of([p], uok, None)
    (p * math.inf).sum().backward()
    trainer.step(1)
    assert p.isinf().all()


@pytest.mark.parametrize("uok", STORES)
def test_loss_that_is_not_scaled_is_not_divided(uok: bool | None) -> None:
    p = zeros()
    trainer = trainer_of([p], uok, momentum=0.0)
    backward(trainer, p)
    trainer.step(1)
    p.sum().backward()
    trainer.step(1)
    assert p.tolist() == [-2, -2]


def test_several_losses_and_backward_passes_add_up() -> None:
    p = zeros()
    trainer = trainer_of([p], momentum=0.0)
    for _ in range(2):
        with amp.scale_loss([p.sum(), (p * 3).sum()], trainer) as scaled:
            for one in scaled:
                one.backward()
    trainer.step(2)
    assert p.tolist() == [-4, -4]


@pytest.mark.parametrize("uok", [None, False])
def test_gradients_may_be_unscaled_and_clipped_between_reduction_and_update(uok: bool | None) -> None:
    p = zeros(1)
    trainer = trainer_of([p], uok, momentum=0.0)
    backward(trainer, p, 8.0)
    trainer.allreduce_grads()
    amp.unscale(trainer)
    amp.unscale(trainer)
    assert p.grad is not None
    assert p.grad.item() == 8
    assert kvtrainer.utils.clip_global_norm([p.grad], 2.0) == 8
    with pytest.raises(ConfigurationError, match="unscaled already"), amp.scale_loss(p.sum(), trainer):
        pass
    trainer.update(1)
    assert p.item() == pytest.approx(-2)
    for slope, expected in ((math.inf, -2), (1.0, -3)):
        backward(trainer, p, slope)
        trainer.allreduce_grads()
        amp.unscale(trainer)
        trainer.update(1)
        assert p.item() == pytest.approx(expected)
    assert trainer.amp_loss_scale == 2.0**15


class Pair(kvstore.KVStoreBase):
    """Two workers of which the other one contributes `theirs` to every element."""

    type = "pair"
    rank = 0
    num_workers = 2
    theirs = 0.0

    def broadcast(self, key: Any, value: Any, out: Any, priority: int = 0) -> None:
        out.copy_(value)

    def pushpull(self, key: Any, value: Tensor, out: Any = None, priority: int = 0) -> None:
        value.add_(self.theirs)


@pytest.mark.parametrize("apart", [False, True])
def test_overflow_of_another_worker_of_a_third_party_store_skips_the_step_here(apart: bool) -> None:
    p, store = zeros(), Pair()
    trainer = Trainer([p], "sgd", {"lr": 1.0}, kvstore=store)
    amp.init_trainer(trainer)
    for store.theirs, expected, scale in ((math.inf, 0.0, 2.0**15), (0.0, -1.0, 2.0**15)):
        backward(trainer, p)
        if apart:
            trainer.allreduce_grads()
            trainer.update(1)
        else:
            trainer.step(1)
        assert p.tolist() == [expected] * 2
        assert trainer.amp_loss_scale == scale


def test_overflow_here_reaches_the_other_workers_of_a_third_party_store() -> None:
    pushed: list[Tensor] = []

    class Listening(Pair):
        def pushpull(self, key: Any, value: Tensor, out: Any = None, priority: int = 0) -> None:
            pushed.append(value.clone())

    a, b = zeros(), zeros()
    trainer = Trainer([a, b], "sgd", {"lr": 1.0}, kvstore=Listening())
    amp.init_trainer(trainer)
    backward(trainer, a, math.nan)
    backward(trainer, b)
    trainer.step(1)
    assert not all(value.isfinite().all() for value in pushed)
    assert (a.tolist(), b.tolist(), trainer.amp_loss_scale) == ([0, 0], [0, 0], 2.0**15)


def test_sum_of_finite_halves_that_overflows_is_skipped() -> None:
    p, store = zeros(dtype=torch.float16), Pair()
    store.theirs = 6e4
    trainer = Trainer([p], "sgd", {"lr": 1.0}, kvstore=store)
    amp.init_trainer(trainer, amp.LossScaler(1.0))
    backward(trainer, p, 6e4)
    trainer.step(1)
    assert (p.tolist(), trainer.amp_loss_scale) == ([0, 0], 0.5)


@pytest.mark.parametrize("uok", STORES)
def test_scaler_is_saved_with_the_states(uok: bool | None, tmp_path: Path) -> None:
    p, q, r = zeros(), zeros(), zeros()
    trainer, other, plain = trainer_of([p], uok), trainer_of([q], uok), trainer_of([r], uok, None)
    for slope in (1.0, math.nan, 1.0):
        backward(trainer, p, slope)
        trainer.step(1)
    trainer.save_states(tmp_path / "states")
    for successor in (other, plain):
        successor.load_states(tmp_path / "states")
        assert successor.loss_scaler is not None
        assert type(successor.loss_scaler) is LossScaler
        assert (successor.loss_scaler.loss_scale, successor.loss_scaler.clean_steps) == (2.0**15, 1)
    third = trainer_of([zeros()], uok, None)
    third.save_states(tmp_path / "without")
    other.load_states(tmp_path / "without")
    assert other.amp_loss_scale == 2.0**15


@pytest.mark.parametrize(
    "use", [lambda t: t.amp_loss_scale, amp.unscale, lambda t: amp.scale_loss(1, t).__enter__()]
)
def test_trainer_without_a_scaler_says_how_to_get_one(use: Any) -> None:
    with pytest.raises(AmpNotInitializedError, match=r"call kvtrainer\.amp\.init_trainer\(trainer\)"):
        use(trainer_of([zeros()], None, None))


@pytest.mark.parametrize("given", [kvtrainer.optimizer.create("sgd"), torch.optim.SGD([zeros()]), 3])
def test_only_a_trainer_gets_a_scaler(given: Any) -> None:
    with pytest.raises(ArgumentTypeError, match=f"got {type(given).__name__}: "):
        amp.init_trainer(given)


def test_states_loaded_before_the_step_change_only_the_next_scale(tmp_path: Path) -> None:
    p = Parameter(torch.ones(1))
    trainer = Trainer([p], "sgd", {"learning_rate": 1.0}, kvstore=None)
    own = LossScaler(8.0)
    amp.init_trainer(trainer, own)
    trainer.save_states(tmp_path / "states")
    own.loss_scale = 4.0
    with amp.scale_loss(p.sum(), trainer) as scaled:
        scaled.backward()
    trainer.load_states(tmp_path / "states")
    trainer.step(1)
    assert p.tolist() == [0.0]
    assert trainer.amp_loss_scale == own.loss_scale == 8.0


def test_a_loaded_scale_survives_init_trainer(tmp_path: Path) -> None:
    parameters = [Parameter(torch.ones(1)) for _ in range(2)]
    first, second = (Trainer([p], "sgd", kvstore=None) for p in parameters)
    amp.init_trainer(first, LossScaler(8.0))
    first.save_states(tmp_path / "states")
    second.load_states(tmp_path / "states")
    amp.init_trainer(second)
    assert second.amp_loss_scale == 8.0
    amp.init_trainer(second, LossScaler(2.0))
    assert second.amp_loss_scale == 2.0
