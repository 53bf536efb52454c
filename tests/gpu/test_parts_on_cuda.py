"""Parts of a Trainer, and a Strategy, with tensors on a CUDA device."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import Parameter

import kvtrainer
from kvstore_server.plan import TensorSpec, make_plan
from kvtrainer.memory.arena import Arena
from kvtrainer.strategy.environment import rng_state, set_rng_state
from kvtrainer.utils import clip_global_norm

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device"),
]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_parameters_alias_the_arena_with_storages_of_their_own(dtype: torch.dtype) -> None:
    shapes = [(3, 5), (), (0, 4), (70, 30)]
    parameters = [Parameter(torch.randn(shape, device="cuda").to(dtype)) for shape in shapes]
    names, name = [f"p{at}" for at in range(len(shapes))], str(dtype).removeprefix("torch.")
    before = [p.detach().clone() for p in parameters]
    specs = [TensorSpec(key, shape, name) for key, shape in zip(names, shapes, strict=True)]
    arena = Arena(parameters, names, make_plan(specs, 1))
    assert all(torch.equal(p, value) for p, value in zip(parameters, before, strict=True))
    assert [p.untyped_storage().nbytes() for p in parameters] == [p.nbytes for p in parameters]
    for p in parameters:
        p.grad = torch.ones_like(p)
    arena.gather_grads([p.grad for p in parameters], [True] * len(parameters))
    (flat,) = arena.grads.values()
    assert flat.float().sum().item() == sum(map(math.prod, shapes))
    (weights,) = arena.weights.values()
    weights.fill_(2)
    assert all(bool((p == 2).all()) for p in parameters)
    arena.check_in_place()


@pytest.mark.parametrize("check", [True, False])
def test_gradients_on_several_devices_have_one_norm(check: bool) -> None:
    arrays = [torch.ones(3, 3, device="cuda"), torch.ones(4, 4)]
    assert float(clip_global_norm(arrays, 1.0, check)) == pytest.approx(5.0)
    assert all(torch.allclose(array.cpu(), torch.tensor(0.2)) for array in arrays)


def test_random_numbers_go_on_where_they_were_saved() -> None:
    device = torch.device("cuda", 0)
    state = rng_state([device])
    expected = torch.rand(3, device=device)
    set_rng_state(state, [device])
    assert torch.equal(torch.rand(3, device=device), expected)


def test_a_strategy_goes_on_to_the_bits_of_a_run_without_a_break(tmp_path: Path) -> None:
    """The model is moved to the device, and its dropout has the device's random numbers."""

    def begin() -> tuple[kvtrainer.Strategy, nn.Module, kvtrainer.Trainer]:
        strategy = kvtrainer.Strategy(
            "device", work_dir=str(tmp_path), env_kwargs={"randomness": {"seed": 3}}
        )
        net = nn.Sequential(nn.Linear(6, 40), nn.Dropout(0.5), nn.Linear(40, 1))
        wrapper = {"optimizer": {"type": "Adam", "lr": 0.01}, "clip_grad": {"max_norm": 1.0}}
        model, trainer = strategy.prepare(net, optim_wrapper=wrapper)
        assert {p.device.type for p in model.parameters()} == {"cuda"}
        return strategy, model, trainer

    def train(model: nn.Module, trainer: kvtrainer.Trainer) -> None:
        for _ in range(5):
            model(torch.ones(8, 6, device="cuda")).square().sum().backward()
            trainer.step(8)
            trainer.zero_grad()

    strategy, model, trainer = begin()
    train(model, trainer)
    strategy.save_checkpoint(str(tmp_path / "middle.pt"))
    train(model, trainer)
    expected = [p.detach().cpu() for p in model.parameters()]
    strategy.close()
    strategy, model, trainer = begin()
    strategy.resume(str(tmp_path / "middle.pt"))
    train(model, trainer)
    strategy.close()
    assert all(p.detach().cpu().equal(value) for p, value in zip(model.parameters(), expected, strict=True))
