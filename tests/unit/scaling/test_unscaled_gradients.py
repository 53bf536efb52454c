"""After a step gradients are readable without the loss scale, whoever scaled the loss, as under torch's GradScaler."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import Parameter

from kvtrainer import Trainer, amp
from tests.support.ways_to_train import STORES, trainer_of, zeros

SCALE = 1024.0


def step_by_torchs_scaler(trainer: Any, p: Parameter, slope: Any) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
    scaler.scale((p * slope).sum()).backward()
    scaler.step(trainer)
    scaler.update()


def step_by_our_scaler(trainer: Any, p: Parameter, slope: Any) -> None:
    scaler = amp.GradScaler("cpu", init_scale=SCALE)
    scaler.scale((p * slope).sum()).backward()
    scaler.step(trainer)
    scaler.update()


def step_by_gluons_scaler(trainer: Any, p: Parameter, slope: Any) -> None:
    amp.init_trainer(trainer, amp.LossScaler(SCALE))
    with amp.scale_loss((p * slope).sum(), trainer) as scaled:
        scaled.backward()
    trainer.step()


def step_by_the_option(trainer: Any, p: Parameter, slope: Any) -> None:
    trainer.configure(amp={"init_scale": SCALE})
    trainer.backward((p * slope).sum())
    trainer.step()


def step_in_two_halves(trainer: Any, p: Parameter, slope: Any) -> None:
    trainer.configure(amp={"init_scale": SCALE})
    trainer.backward((p * slope).sum())
    trainer.allreduce_grads()
    assert p.grad is not None
    assert p.grad[0] == slope * SCALE
    trainer.update()


WAYS = [step_by_torchs_scaler, step_by_our_scaler, step_by_gluons_scaler, step_by_the_option]


def norm_by_torch(slope: float) -> float:
    """What a loop that logs the norm after the step sees with torch's optimizer."""
    p = zeros()
    step_by_torchs_scaler(torch.optim.SGD([p], lr=1.0), p, slope)
    return float(nn.utils.get_total_norm([p.grad]))  # type: ignore[list-item]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("uok", STORES)
def test_the_norm_that_is_logged_after_a_step_is_torchs(uok: bool | None, way: Any) -> None:
    p = zeros()
    trainer = trainer_of([p], uok, options={"learning_rate": 1.0})
    way(trainer, p, 3.0)
    assert float(nn.utils.get_total_norm([p.grad])) == norm_by_torch(3.0)  # type: ignore[list-item]
    assert p.tolist() == [-3.0, -3.0]
    (p * 2.0).sum().backward()  # drops it, as any gradient that was used up
    assert p.grad is not None
    assert p.grad.tolist() == [2.0, 2.0]


def test_sums_are_unscaled_by_the_update() -> None:
    p = zeros()
    trainer = trainer_of([p], False, options={"learning_rate": 1.0})
    step_in_two_halves(trainer, p, 3.0)
    assert p.grad is not None
    assert (p.grad.tolist(), p.tolist()) == ([3.0, 3.0], [-3.0, -3.0])


def test_a_step_that_is_skipped_shows_the_gradient_that_overflowed() -> None:
    p = zeros()
    trainer = trainer_of([p], options={"learning_rate": 1.0})
    step_by_the_option(trainer, p, torch.tensor([math.inf, 2.0]))
    assert p.grad is not None
    assert (p.grad.tolist(), p.tolist()) == ([math.inf, 2.0], [0.0, 0.0])


def test_what_a_loop_unscales_itself_is_unscaled_once() -> None:
    p = zeros()
    trainer = trainer_of([p], options={"learning_rate": 1.0})
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
    scaler.scale(p.sum()).backward()
    scaler.unscale_(trainer)
    scaler.step(trainer)
    assert p.grad is not None
    assert p.grad.tolist() == [1.0, 1.0]


def test_accumulated_gradients_are_unscaled_when_they_are_used() -> None:
    p = zeros()
    trainer = trainer_of([p], options={"learning_rate": 1.0})
    trainer.configure(amp={"init_scale": SCALE}, accumulate=2)
    seen = []
    for _ in range(4):
        trainer.update_params(p.sum())
        assert p.grad is not None
        seen.append(p.grad.tolist()[0])
    assert seen == [SCALE / 2, 1.0, SCALE / 2, 1.0]


def test_a_gradient_that_was_used_before_is_left_as_it_is() -> None:
    p, q = zeros(), zeros()
    trainer = trainer_of([p, q], options={"learning_rate": 1.0})
    trainer.configure(amp={"init_scale": SCALE})
    q.grad_req = "add"  # type: ignore[attr-defined]
    trainer.backward(p.sum() + q.sum())
    trainer.step()
    trainer.backward(p.sum())
    trainer.step()
    assert [x.grad.tolist() for x in (p, q) if x.grad is not None] == [[1.0, 1.0], [1.0, 1.0]]


@pytest.mark.parametrize("kind", ["expanded", "shared", "inference"])
def test_gradients_of_odd_memory_do_not_stay_scaled(kind: str) -> None:
    p, q = zeros(), zeros()
    trainer = trainer_of([p, q], options={"learning_rate": 1.0})
    amp.init_trainer(trainer, amp.LossScaler(SCALE))
    with amp.scale_loss((p + q).sum(), trainer) as scaled:
        scaled.backward()
    if kind == "inference":
        with torch.inference_mode():
            p.grad = q.grad = torch.full((2,), SCALE)
    else:
        p.grad = q.grad = torch.full((1,), SCALE).expand(2) if kind == "expanded" else torch.full((2,), SCALE)
    trainer.step()
    expected: list[Tensor | None] = [None, None] if kind == "inference" else [torch.ones(2)] * 2
    for x, grad in zip((p, q), expected, strict=True):
        assert x.tolist() == [-1.0, -1.0]
        assert (x.grad is None) if grad is None else torch.equal(x.grad, grad)  # type: ignore[arg-type]
    trainer.step(ignore_stale_grad=True)  # and nothing new is there
    assert p.tolist() == [-1.0, -1.0]


def test_sparse_gradients_are_unscaled_too() -> None:
    table = nn.Embedding(5, 2, sparse=True)
    trainer = Trainer(table, "sgd", amp={"init_scale": SCALE})
    trainer.update_params(table(torch.tensor([1, 3, 3])).sum())
    grad = table.weight.grad
    assert grad is not None
    assert grad.is_sparse
    assert grad.to_dense()[:, 0].tolist() == [0.0, 1.0, 0.0, 2.0, 0.0]


@pytest.mark.parametrize("store", [None, "local", "device"])
def test_every_replica_shows_its_own_gradient(store: str | None) -> None:
    p, q = zeros(), zeros()
    trainer = Trainer([[p, q]], "sgd", {"learning_rate": 1.0}, kvstore=store)
    amp.init_trainer(trainer, amp.LossScaler(SCALE))
    with amp.scale_loss(p.sum() + 2 * q.sum(), trainer) as scaled:
        scaled.backward()
    trainer.step(1)
    assert [x.grad.tolist() for x in (p, q) if x.grad is not None] == [[1.0, 1.0], [2.0, 2.0]]
