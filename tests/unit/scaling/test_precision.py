"""float32 copies of half-precision parameters, a precision that a Trainer was asked for, and compression beside it."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import Parameter

from kvtrainer import Trainer, amp, kvstore
from kvtrainer.errors import ArgumentTypeError, ConfigurationError, ShapeMismatchError
from kvtrainer.precision import copy_grads_to_fp32, copy_params_to_fp16


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.ones(2, dtype=torch.float16))
        self.b = nn.Parameter(torch.ones(3, dtype=torch.float16))


def masters(net: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().float() for name, p in net.named_parameters()}


def test_small_updates_get_lost_in_half_precision_and_not_in_a_float32_copy() -> None:
    half = torch.ones((), dtype=torch.float16)
    net = nn.ParameterDict({"p": nn.Parameter(torch.ones((), dtype=torch.float16))})
    master = torch.ones(())
    optimizer = torch.optim.SGD([master], 1.0)
    for _ in range(10):
        half -= torch.tensor(1e-4, dtype=torch.float16)
        net["p"].grad = torch.tensor(1e-4, dtype=torch.float16)
        copy_grads_to_fp32(net, {"p": master})
        optimizer.step()
        copy_params_to_fp16(net, {"p": master})
    assert half.item() == 1.0
    assert master.item() == pytest.approx(0.99899983, abs=1e-6)
    assert net["p"].item() == pytest.approx(0.99902344, abs=1e-8)


def test_weights_are_matched_by_name_whatever_their_order() -> None:
    net = Net()
    net.a.grad, net.b.grad = torch.full((2,), 2.0).half(), torch.full((3,), 3.0).half()
    weights = dict(reversed(masters(net).items()))
    copy_grads_to_fp32(net, weights)
    assert [w.grad.tolist() for w in weights.values() if w.grad is not None] == [[3, 3, 3], [2, 2]]
    assert all(w.grad is not None and w.grad.dtype == torch.float32 for w in weights.values())
    weights["b"].fill_(7.0)
    copy_params_to_fp16(net, weights)
    assert (net.a.tolist(), net.b.tolist()) == ([1, 1], [7, 7, 7])


def test_list_of_weights_goes_by_order_and_must_be_complete() -> None:
    net = Net()
    net.b.grad = torch.ones(3).half()
    weights = list(masters(net).values())
    copy_grads_to_fp32(net, weights)
    assert weights[0].grad is None
    assert weights[1].grad is not None
    with pytest.raises(ConfigurationError, match="1 float32 weights were given for 2 parameters"):
        copy_grads_to_fp32(net, weights[:1])


def test_gradient_of_an_earlier_step_does_not_stay_on_the_weight() -> None:
    net = Net()
    weights = masters(net)
    weights["a"].grad = torch.ones(2)
    copy_grads_to_fp32(net, weights)
    assert weights["a"].grad is None


def test_sparse_gradients_stay_sparse_and_are_copies() -> None:
    table = nn.Embedding(4, 2, sparse=True).half()
    grad = torch.sparse_coo_tensor(
        torch.tensor([[1]]), torch.ones(1, 2).half(), (4, 2), check_invariants=True
    )
    table.weight.grad = grad
    master = torch.zeros(4, 2)
    copy_grads_to_fp32(table, {"weight": master})
    assert master.grad is not None
    assert master.grad.is_sparse
    assert master.grad.dtype == torch.float32
    assert master.grad.to_dense().sum() == 2


def test_weights_that_do_not_fit_are_refused_before_anything_changes() -> None:
    net = Net()
    net.a.grad = torch.ones(2).half()
    weights = masters(net)
    with pytest.raises(ConfigurationError, match=r"missing \['b'\], unknown \['c'\]"):
        copy_grads_to_fp32(net, {"a": weights["a"], "c": weights["b"]})
    with pytest.raises(ShapeMismatchError, match=r"'b' has shape \[3\]"):
        copy_grads_to_fp32(net, {"a": weights["a"], "b": torch.zeros(4)})
    with pytest.raises(ArgumentTypeError, match="not a tensor"):
        copy_params_to_fp16(net, {"a": weights["a"], "b": 1.0})  # type: ignore[arg-type]
    assert weights["a"].grad is None


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
    with pytest.raises(ConfigurationError, match=rf"amp=dict\(dtype='{dtype}'\)"):
        Trainer(torch.nn.Linear(2, 1), "torch:SGD", {"lr": 0.1}, None, amp=dtype)


@pytest.mark.parametrize("call", ["step", "update", "allreduce_grads"])
@pytest.mark.parametrize(
    ("option", "said"),
    [
        ({"amp": "dynamic"}, r"the option amp works in trainer\.backward"),
        ({"amp": {"dtype": "bfloat16"}}, r"trainer\.context\(\), which was never entered"),
        ({"detect_anomalous_params": "raise"}, "the option detect_anomalous_params works in"),
    ],
)
def test_a_step_and_its_halves_ask_for_the_backward_pass_or_the_context_that_an_option_needs(
    option: dict[str, Any], said: str, call: str
) -> None:
    p = torch.nn.Parameter(torch.zeros(1))
    trainer = Trainer({"p": p}, "sgd", {}, kvstore.create("local"), update_on_kvstore=False, **option)
    p.sum().backward()
    with pytest.raises(ConfigurationError, match=said):
        getattr(trainer, call)(*([] if call == "allreduce_grads" else [1]))
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
def test_small_scaled_half_gradients_count_in_full(uok: bool | None, drives: bool) -> None:
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


TWO_BIT = {"type": "2bit", "threshold": 0.5}


def trainer_of(copies: list[Parameter], **options: Any) -> Trainer:
    return Trainer({"p": copies}, "sgd", {"learning_rate": 1.0}, "device", TWO_BIT, **options)


def losses(copies: list[Parameter], slope: float) -> list[torch.Tensor]:
    return [(p * slope).sum() for p in copies]


def zeros() -> list[Parameter]:
    return [Parameter(torch.zeros(1)) for _ in range(2)]


def test_what_is_held_back_survives_a_change_of_the_loss_scale() -> None:
    copies = zeros()
    trainer = trainer_of(copies, amp={"init_scale": 8.0})
    for slope in (0.7, math.inf, 0.3):
        result = trainer.update_params(losses(copies, slope))
    assert result.loss_scale == 4.0
    # 0.7 is said as 0.5, and the 0.2 held back with 0.3 as 0.5 once more.
    assert copies[0].item() == pytest.approx(-1.0)


def test_halves_of_a_step_compress_the_gradient_without_its_loss_scale() -> None:
    copies = zeros()
    trainer = trainer_of(copies, amp=8, update_on_kvstore=False)
    for _ in range(2):
        trainer.backward(losses(copies, 0.7))
        trainer.allreduce_grads()
        assert copies[0].grad is not None
        assert copies[0].grad.item() == pytest.approx(2 * 8 * 0.5)  # still scaled, for amp.unscale
        trainer.update()
    assert copies[0].item() == pytest.approx(-1.0)
