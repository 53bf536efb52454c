"""A precision that a Trainer was asked for is not ignored in silence."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvtrainer import Trainer, amp, kvstore
from kvtrainer.errors import ConfigurationError


def test_bfloat16_without_the_context_raises_and_changes_nothing() -> None:
    layer = torch.nn.Linear(2, 1)
    before = layer.weight.detach().clone()
    trainer = Trainer(layer, "torch:SGD", {"lr": 0.1}, None, amp={"dtype": "bfloat16"})
    loss = layer(torch.ones(1, 2)).sum()
    with pytest.raises(ConfigurationError, match=r"trainer\.context\(\), which was never entered"):
        trainer.update_params(loss)
    with pytest.raises(ConfigurationError, match=r"trainer\.context\(\), which was never entered"):
        trainer.step(1)
    assert torch.equal(layer.weight, before)


def test_own_backward_pass_of_a_loss_in_bfloat16_needs_the_context_only() -> None:
    layer = torch.nn.Linear(2, 1)
    trainer = Trainer(layer, "torch:SGD", {"lr": 0.1}, None, amp={"dtype": "bfloat16"})
    with trainer.context():
        loss = layer(torch.ones(1, 2)).sum()
    loss.backward()
    result = trainer.step(1)
    assert result is not None
    assert result.updated


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_dtype_in_place_of_the_options_says_where_it_belongs(dtype: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"give it as amp=dict\(dtype='{dtype}'\)"):
        Trainer(torch.nn.Linear(2, 1), "torch:SGD", {"lr": 0.1}, None, amp=dtype)


@pytest.mark.parametrize("sums", [True, False], ids=["summed", "not summed"])
@pytest.mark.parametrize(
    ("option", "said"),
    [
        ({"amp": "dynamic"}, r"the option amp works in trainer\.backward"),
        ({"amp": {"dtype": "bfloat16"}}, r"trainer\.context\(\), which was never entered"),
        ({"detect_anomalous_params": "raise"}, "the option detect_anomalous_params works in"),
    ],
)
def test_halves_of_a_step_ask_for_the_backward_pass_that_an_option_needs_as_a_step_does(
    option: dict[str, Any], said: str, sums: bool
) -> None:
    p = torch.nn.Parameter(torch.zeros(1))
    trainer = Trainer({"p": p}, "sgd", {}, kvstore.create("local"), update_on_kvstore=False, **option)
    p.sum().backward()
    with pytest.raises(ConfigurationError, match=said):
        trainer.allreduce_grads() if sums else trainer.update(1)
    assert p.item() == 0


def test_amp_takes_gradients_that_were_scaled_by_scale_loss_and_unscaled() -> None:
    p = torch.nn.Parameter(torch.zeros(1))
    trainer = Trainer({"p": p}, "sgd", {"learning_rate": 1.0}, None, amp=8)
    with amp.scale_loss(p.sum(), trainer) as scaled:
        scaled.backward()
    amp.unscale(trainer)
    trainer.step(1)
    assert p.item() == -1


@pytest.mark.parametrize("is_unscaled", [False, True])
def test_gradients_that_were_zeroed_take_their_loss_scale_along(is_unscaled: bool) -> None:
    p: Any = torch.nn.Parameter(torch.zeros(1))
    trainer = Trainer({"p": p}, "sgd", {"learning_rate": 1.0}, None)
    amp.init_trainer(trainer)
    with amp.scale_loss(p.sum(), trainer) as scaled:
        scaled.backward()
    if is_unscaled:
        amp.unscale(trainer)
    trainer.zero_grad()
    if is_unscaled:
        with amp.scale_loss(p.sum(), trainer) as scaled:
            scaled.backward()
    else:
        p.sum().backward()
    trainer.step(1)
    assert p.item() == -1


@pytest.mark.parametrize("uok", [None, False, True], ids=["in-process", "reduced", "in-store"])
@pytest.mark.parametrize("drives", [False, True], ids=["amp", "torch's scaler"])
def test_gradients_that_half_precision_holds_only_scaled_count_in_full_wherever_the_update_is(
    uok: bool | None, drives: bool
) -> None:
    p = torch.nn.Parameter(torch.zeros(2, dtype=torch.float16))
    numbers = {"learning_rate": 1e6, "multi_precision": True}
    store = None if uok is None else kvstore.create("local")
    trainer = Trainer({"p": p}, "sgd", numbers, store, None, uok, amp=None if drives else 2**16)
    loss = (p.float() * torch.tensor([2e-8, 1.3e-7])).sum()
    if drives:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
        scaler.scale(loss).backward()
        scaler.step(trainer)
    else:
        trainer.update_params(loss)
    assert p.tolist() == pytest.approx([-0.02, -0.13], rel=1e-3)
