"""Replicas of a model on CUDA devices, and the libraries that sum them there."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import Linear, Module, Sequential, Tanh

from kvtrainer import DataParallel, Trainer, build_data_parallel_model
from kvtrainer.parallel.reducers import make_reducer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device"),
]
COUNT = torch.cuda.device_count()
TWO_GPUS = pytest.mark.skipif(COUNT < 2, reason="needs two CUDA devices")
SAME, DISTINCT = ["cuda:0", "cuda:0"], pytest.param(["cuda:0", "cuda:1"], marks=TWO_GPUS)
BIG = [1e8, 1.0, -1e8, 1.0]


def net() -> Module:
    torch.manual_seed(1)
    return Sequential(Linear(3, 5), Tanh(), Linear(5, 2)).double()


def squares(module: Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return torch.nn.functional.mse_loss(module(batch[0]), batch[1])


@pytest.mark.parametrize("devices", [SAME, ["cuda:0", "cpu"], DISTINCT], ids=str)
@pytest.mark.parametrize(
    "reducer", ["auto", "tree", "flat", "coalesced", pytest.param("nccl", marks=TWO_GPUS)]
)
def test_replicas_train_as_one_device_does_on_the_whole_batch(devices: list[str], reducer: str) -> None:
    if reducer == "nccl" and devices != ["cuda:0", "cuda:1"]:
        pytest.skip("NCCL needs distinct devices")
    model, single = DataParallel(net(), devices, reducer=reducer), net().cuda()
    options = {"lr": 0.1, "momentum": 0.9}
    trainer = Trainer(model, torch.optim.SGD, options)
    optimizer = torch.optim.SGD(single.parameters(), lr=0.1, momentum=0.9)
    for _ in range(3):
        batch = torch.randn(7, 3).double(), torch.randn(7, 2).double()
        model.forward_losses(batch, squares).backward()
        trainer.step()
        optimizer.zero_grad()
        squares(single, (batch[0].cuda(), batch[1].cuda())).backward()
        optimizer.step()
    for replicas, p in zip(model.params, single.parameters(), strict=True):
        assert [str(one.device) for one in replicas] == devices
        assert all(torch.allclose(one.to(p.device), p, rtol=0, atol=1e-12) for one in replicas)


@pytest.mark.parametrize(("name", "expected"), [("tree", 0.0), ("flat", 1.0), ("coalesced", 1.0)])
def test_order_of_additions_on_one_device_is_that_of_the_cpu(name: str, expected: float) -> None:
    parts = [torch.full((3,), value, device="cuda") for value in BIG]
    make_reducer(name, [part.device for part in parts]).sum(parts)
    assert parts[0].tolist() == [expected] * 3


def test_automatic_choice_asks_which_devices_reach_each_other() -> None:
    parts = [torch.full((3,), float(at), device="cuda:0") for at in range(4)]
    make_reducer("auto", [part.device for part in parts]).sum(parts)
    assert parts[0].tolist() == [6.0] * 3


@TWO_GPUS
@pytest.mark.parametrize("name", ["coalesced", "nccl"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_libraries_sum_and_broadcast_between_devices(name: str, dtype: torch.dtype) -> None:
    devices = [torch.device("cuda", at) for at in range(2)]
    reducer = make_reducer(name, devices)
    parts = [torch.full((5,), at + 1.0, dtype=dtype, device=device) for at, device in enumerate(devices)]
    reducer.sum(parts)
    assert parts[0].tolist() == [3.0] * 5
    reducer.broadcast(parts[0], parts[1:])
    assert parts[1].tolist() == [3.0] * 5


@TWO_GPUS
def test_autocast_of_the_loop_holds_on_every_device() -> None:
    model = DataParallel(Linear(3, 2), ["cuda:0", "cuda:1"])
    with torch.autocast("cuda", torch.bfloat16):
        assert [one.dtype for one in model(torch.randn(4, 3))] == [torch.bfloat16] * 2


def test_number_of_devices_stands_for_the_first_ones() -> None:
    for options in ({"num_gpus": COUNT}, {}):
        model = build_data_parallel_model(net, **options)  # type: ignore[arg-type]
        assert [str(device) for device in model.devices] == [f"cuda:{at}" for at in range(COUNT)]
