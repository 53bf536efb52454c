"""A GradScaler that the script drives, and gradients that are readable without the loss scale after each step."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import Parameter

from kvtrainer import Trainer, amp
from kvtrainer.amp import GradScaler
from kvtrainer.errors import ConfigurationError, NonFiniteGradientError, StaleGradientError
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
def test_a_parameter_added_to_a_group_is_unscaled(uok: bool | None, unscales: bool) -> None:
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


def with_a_scaler_of_its_own(p: Any) -> Trainer:
    trainer = trainer_of([p])
    amp.init_trainer(trainer)
    return trainer


@pytest.mark.parametrize(
    ("trains", "one", "dtype", "message"),
    [
        (with_a_scaler_of_its_own, scaler(), torch.float32, "scales losses itself"),
        (
            with_a_scaler_of_its_own, torch.amp.GradScaler("cpu"), torch.float32, "scales losses itself",
        ),
        (
            lambda p: trainer_of([p], accumulate=2), scaler(), torch.float32, "accumulates 2 backward passes",
        ),
        (lambda p: trainer_of({"w": p}), scaler(), torch.float16, "amp='dynamic'"),
    ],
)  # fmt: skip
def test_a_trainer_it_cannot_serve_is_refused(
    trains: Any, one: Any, dtype: torch.dtype, message: str
) -> None:
    """Unscaling float16 gradients would lose bits."""
    p = zeros(dtype=dtype)
    trainer = trains(p)
    one.scale(p.float().sum()).backward()
    with pytest.raises(ConfigurationError, match=message):
        one.step(trainer)


def test_a_closure_and_a_loss_that_was_not_scaled_are_refused() -> None:
    p: Any = zeros()
    p.sum().backward()
    with pytest.raises(AssertionError, match=r"did not use scaler\.scale"):
        scaler().step(trainer_of([p]))
    with pytest.raises(RuntimeError, match="closure"):
        scaler().step(trainer_of([zeros()]), lambda: 0.0)


def test_plain_scaler_in_a_job_of_several_workers_is_refused_by_name() -> None:
    trainer: Any = trainer_of([zeros()])
    trainer.grad_scale, trainer.found_inf = torch.tensor(8.0), torch.tensor(0.0)
    assert plain_scaling(trainer, 1) == (False, 0.125)
    with pytest.raises(ConfigurationError, match=r"kvtrainer\.amp\.GradScaler"):
        plain_scaling(trainer, 2)


@pytest.mark.parametrize("slope", [1.0, math.inf])
@pytest.mark.parametrize("raising", ["stale", "hook"])
def test_plain_scaler_whose_step_raises_has_no_effect_on_later_steps(raising: str, slope: float) -> None:
    p, unused = zeros(), zeros()
    trainer = trainer_of([p, unused] if raising == "stale" else [p])
    plain = torch.amp.GradScaler("cpu", init_scale=8.0)
    plain.scale((p * slope).sum()).backward()
    if raising == "stale":
        with pytest.raises(StaleGradientError):
            plain.step(trainer, 1)
    else:
        hook = trainer.register_step_pre_hook(lambda *_: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            plain.step(trainer, 1)
        hook.remove()
    trainer.zero_grad()
    p.sum().backward()
    assert not trainer.step(1, ignore_stale_grad=True).skipped
    assert p.tolist() == [-1, -1]


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


@pytest.mark.parametrize("way", ["scaler", "amp.unscale", "amp option"])
def test_gradients_that_share_memory_are_unscaled_once(way: str) -> None:
    users, items = (nn.Embedding(10, 2, sparse=True) for _ in range(2))
    before, ids = users.weight.detach().clone(), torch.tensor([5, 6])
    options = {} if way == "scaler" else {"amp": {"loss_scale": 8.0}}
    trainer = Trainer(
        {"users": users.weight, "items": items.weight}, "sgd", {"lr": 1.0}, kvstore=None, **options
    )
    loss = ((users(ids) + items(ids)) * torch.full((2,), 3.0)).sum()
    if way == "scaler":
        own = scaler()
        own.scale(loss).backward()
        own.unscale_(trainer)
        own.step(trainer)
    else:
        with amp.scale_loss(loss, trainer) as scaled:
            scaled.backward()
        if way == "amp.unscale":
            amp.unscale(trainer)
        trainer.step(1)
    assert (before - users.weight)[5].tolist() == pytest.approx([3.0, 3.0])
    for table in (users, items):
        assert table.weight.grad is not None
        assert table.weight.grad._values().tolist() == [[3.0, 3.0]] * 2
