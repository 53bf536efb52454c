"""float32 copies of half-precision parameters: kept by whoever updates, or driven by the script."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

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
