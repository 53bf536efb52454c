"""A GradScaler that the script drives: torch's with torch's optimizers, and with a Trainer one that votes."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from kvtrainer import Trainer, amp
from kvtrainer.amp import GradScaler
from kvtrainer.errors import ConfigurationError, NonFiniteGradientError
from kvtrainer.options.loss_scaler import plain_scaling
from tests.support.ways_to_train import STORES, trainer_of, zeros


def scaler(scale: float = 8.0, interval: int = 3) -> Any:
    return GradScaler("cpu", init_scale=scale, growth_interval=interval)


def train(step_with: Any, optimizer: Any, p: Any, slopes: list[float]) -> list[tuple[float, float]]:
    """The weight and the scale after each step of a loss with these slopes."""
    seen = []
    for slope in slopes:
        step_with.scale((p * slope).sum()).backward()
        step_with.step(optimizer)
        step_with.update()
        seen.append((p[0].item(), step_with.get_scale()))
    return seen


@pytest.mark.parametrize("uok", STORES)
def test_result_of_a_step_has_the_scale_that_the_loss_carried(uok: bool | None) -> None:
    p = zeros()
    trainer, said = trainer_of([p], uok), []
    own = scaler()
    for slope in (1, math.inf, 1):
        own.scale((p * slope).sum()).backward()
        said.append(own.step(trainer).loss_scale)
        own.update()
    assert said == [8, 8, 4]
    p.sum().backward()
    trainer.step(1)
    assert trainer.last is not None
    assert trainer.last.loss_scale == 1


@pytest.mark.parametrize("unscales", [False, True])
@pytest.mark.parametrize("uok", STORES)
def test_a_parameter_that_a_script_has_put_into_a_group_is_unscaled_and_its_overflow_is_seen(
    uok: bool | None, unscales: bool
) -> None:
    p, q = zeros(), zeros()
    trainer, own = trainer_of([p], uok), scaler()
    trainer.param_groups[0]["params"].append(q)
    seen = []
    for slope in (1.0, math.inf):
        own.scale(p.sum()).backward()
        own.scale((q * slope).sum()).backward()
        if unscales:
            own.unscale_(trainer)
        own.step(trainer)
        own.update()
        seen.append((p[0].item(), q[0].item(), own.get_scale()))
    assert seen == [(-1.0, -1.0, 8.0), (-1.0, -1.0, 4.0)]


@pytest.mark.parametrize("uok", STORES)
def test_torchs_own_grad_scaler_is_honoured_in_a_single_process(uok: bool | None) -> None:
    p, q = zeros(), zeros()
    slopes = [1, 2, math.nan, 1, 1, 1]
    plain = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=3)
    assert train(plain, trainer_of([q], uok), q, slopes) == train(scaler(), trainer_of([p], uok), p, slopes)


def test_torchs_own_grad_scaler_may_unscale_first() -> None:
    p = zeros()
    trainer = trainer_of([p])
    plain: Any = torch.amp.GradScaler("cpu", init_scale=8.0)
    plain.scale((p * 3).sum()).backward()
    plain.unscale_(trainer)
    assert p.grad is not None
    p.grad.clamp_(max=2)
    plain.step(trainer)
    plain.update()
    assert p.tolist() == [-2, -2]


def test_with_one_of_torchs_optimizers_it_is_torchs() -> None:
    slopes = [1, math.inf, 2, 2, 2, math.nan, 1]
    ends = []
    for kind in (GradScaler, torch.amp.GradScaler):
        p = zeros()
        optimizer = torch.optim.SGD([p], 1.0)
        one = kind("cpu", init_scale=8.0, growth_interval=2)
        seen = []
        for slope in slopes:
            optimizer.zero_grad()
            seen += train(one, optimizer, p, [slope])
        ends.append((seen, one.state_dict()))
    assert ends[0] == ends[1]


def test_gradients_can_be_looked_at_unscaled_before_the_step() -> None:
    p = zeros()
    trainer, one = trainer_of([p]), scaler()
    one.scale((p * 3).sum()).backward()
    one.unscale_(trainer)
    assert p.grad is not None
    assert p.grad.tolist() == [3, 3]
    with pytest.raises(RuntimeError, match="already been called"):
        one.unscale_(trainer)
    one.step(trainer)
    assert p.tolist() == [-3, -3]
    with pytest.raises(RuntimeError, match="already been called since the last update"):
        one.step(trainer)


def test_scale_in_the_loss_is_taken_out_of_every_replica() -> None:
    first, second = zeros(), zeros()
    trainer = Trainer({"p": [first, second]}, "sgd", {"learning_rate": 1.0}, kvstore="device")
    one = scaler()
    for slope in (1.0, math.inf, 2.0):
        one.scale(first.sum() + (second * slope).sum()).backward()
        one.step(trainer, 1)
        one.update()
    assert (first.tolist(), second.tolist(), one.get_scale()) == ([-5, -5], [-5, -5], 4.0)


def test_sparse_gradients_are_unscaled() -> None:
    table = torch.nn.Embedding(4, 2, sparse=True)
    torch.nn.init.zeros_(table.weight)
    trainer, one = trainer_of([table.weight]), scaler()
    one.scale(table(torch.tensor([1, 1, 2])).sum()).backward()
    one.step(trainer, 1)
    assert table.weight[:, 0].tolist() == [0, -2, -1, 0]


def test_infinity_among_used_up_gradients_does_not_count_again() -> None:
    p, q = zeros(), zeros()
    trainer, one = trainer_of([p, q]), scaler()
    one.scale((p * math.inf).sum()).backward()
    one.step(trainer)
    one.update()
    one.scale(q.sum()).backward()
    assert p.grad is None or not p.grad.isfinite().any()
    assert not one.step(trainer).skipped
    assert q.tolist() == [-1, -1]


def test_step_that_raises_because_of_an_overflow_counts_as_skipped() -> None:
    p = zeros()
    trainer, one = trainer_of([p], on_nonfinite="raise"), scaler()
    one.scale((p * math.inf).sum()).backward()
    with pytest.raises(NonFiniteGradientError):
        one.step(trainer)
    one.update()
    assert (p.tolist(), one.get_scale()) == ([0, 0], 4.0)


def test_two_trainers_share_a_scale() -> None:
    p, q = zeros(), zeros()
    first, second, one = trainer_of([p]), trainer_of([q]), scaler()
    one.scale(p.sum()).backward()
    one.scale((q * math.nan).sum()).backward()
    one.step(first)
    one.step(second)
    one.update()
    assert (p.tolist(), q.tolist(), one.get_scale()) == ([-1, -1], [0, 0], 4.0)


def test_worker_without_a_gradient_takes_part() -> None:
    p = zeros()
    trainer, one = trainer_of([p]), scaler()
    assert not one.step(trainer, ignore_stale_grad=True).skipped
    one.update()
    assert one.get_scale() == 8


def test_disabled_scaler_leaves_everything_to_the_trainer() -> None:
    p = zeros()
    trainer, one = trainer_of([p]), GradScaler("cpu", enabled=False)
    one.scale(p.sum()).backward()  # type: ignore[no-untyped-call]
    one.unscale_(trainer)
    assert one.step(trainer).updated
    one.update()
    assert p.tolist() == [-1, -1]


def test_state_of_a_disabled_scaler_is_tolerated() -> None:
    one = scaler()
    one.load_state_dict({})
    assert one.get_scale() == 8
    one.load_state_dict(scaler(32.0).state_dict())
    assert one.get_scale() == 32


def test_loss_that_was_not_scaled_is_noticed() -> None:
    p: Any = zeros()
    p.sum().backward()
    with pytest.raises(AssertionError, match=r"did not use scaler\.scale"):
        scaler().step(trainer_of([p]))


def test_closure_is_refused() -> None:
    with pytest.raises(RuntimeError, match="closure"):
        scaler().step(trainer_of([zeros()]), lambda: 0.0)


def test_two_loss_scales_are_refused() -> None:
    p = zeros()
    trainer, one = trainer_of([p]), scaler()
    amp.init_trainer(trainer)
    one.scale(p.sum()).backward()
    with pytest.raises(ConfigurationError, match="the Trainer scales losses itself"):
        one.step(trainer)
    plain: Any = torch.amp.GradScaler("cpu")
    plain.scale(p.sum()).backward()
    with pytest.raises(ConfigurationError, match="the Trainer scales losses itself"):
        plain.step(trainer)


def test_accumulating_trainer_is_refused() -> None:
    p = zeros()
    one = scaler()
    trainer = trainer_of([p], accumulate=2)
    one.scale(p.sum()).backward()
    with pytest.raises(ConfigurationError, match="accumulates 2 backward passes"):
        one.step(trainer)


def test_float16_gradients_are_refused_because_unscaling_them_loses_bits() -> None:
    p = zeros(dtype=torch.float16)
    one = scaler()
    one.scale(p.float().sum()).backward()
    with pytest.raises(ConfigurationError, match="amp='dynamic'"):
        one.step(trainer_of({"weight": p}))


def test_plain_scaler_in_a_job_of_several_workers_is_refused_by_name_and_leaves_nothing_behind() -> None:
    trainer: Any = trainer_of([zeros()])
    trainer.grad_scale, trainer.found_inf = torch.tensor(8.0), torch.tensor(0.0)
    assert plain_scaling(trainer, 1) == (False, 0.125)
    with pytest.raises(ConfigurationError, match=r"kvtrainer\.amp\.GradScaler"):
        plain_scaling(trainer, 2)
    assert not {"grad_scale", "found_inf"} & set(vars(trainer))
