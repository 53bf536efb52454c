"""Replicas and models on several CUDA devices."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor
from torch.nn import Linear, Module, Parameter, Sequential, Tanh

from kvtrainer import DataParallel, Trainer, build_data_parallel_model, kvstore
from kvtrainer.errors import ConfigurationError
from kvtrainer.parallel.replicas import make_replica_reducer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device"),
]
TWO_GPUS = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
PLACES = pytest.mark.parametrize(
    "devices",
    [["cuda:0", "cuda:0"], ["cuda:0", "cpu"], pytest.param(["cuda:0", "cuda:1"], marks=TWO_GPUS)],
    ids=str,
)


def replicas(devices: Sequence[str]) -> list[Parameter]:
    return [Parameter(torch.zeros(300, device=device)) for device in devices]


def backward(parameters: Sequence[Parameter], slopes: Sequence[float]) -> None:
    for p, slope in zip(parameters, slopes, strict=True):
        (p * slope).sum().backward()


@PLACES
@pytest.mark.parametrize("in_store", [True, False])
def test_replicas_are_summed_and_updated_alike(devices: list[str], in_store: bool) -> None:
    w = replicas(devices)
    options = {"learning_rate": 1.0, "momentum": 0.5}
    trainer = Trainer([w], "sgd", options, kvstore="device", update_on_kvstore=in_store)
    for expected in (-3.0, -7.5):
        backward(w, [1.0, 2.0])
        trainer.step(1)
        assert [p.unique().tolist() for p in w] == [[expected]] * 2
    assert [str(p.device) for p in w] == devices


@PLACES
def test_replicas_are_compressed_one_by_one(devices: list[str]) -> None:
    w = replicas(devices)
    params = {"type": "2bit", "threshold": 0.5}
    trainer = Trainer([w], "sgd", {"lr": 1.0}, kvstore="device", compression_params=params)
    for expected in (0.0, -1.0, -1.0, -2.0):
        backward(w, [0.3, 0.3])
        trainer.step(1)
        assert [p.unique().tolist() for p in w] == [[expected]] * 2


@PLACES
@pytest.mark.parametrize("in_store", [True, False])
def test_rows_of_replicas_are_summed(devices: list[str], in_store: bool) -> None:
    nets = [torch.nn.Embedding.from_pretrained(torch.zeros(6, 2), freeze=False, sparse=True) for _ in devices]
    nets = [net.to(device) for net, device in zip(nets, devices, strict=True)]
    trainer = Trainer([[net.weight for net in nets]], "sgd", {"lr": 1.0}, update_on_kvstore=in_store)
    for net, ids in zip(nets, ([1, 1, 2], [2, 5]), strict=True):
        net(torch.tensor(ids, device=net.weight.device)).sum().backward()
    trainer.step(1)
    for net in nets:
        assert net.weight[:, 0].tolist() == [0, -2, -2, 0, 0, -1]


def test_nccl_sums_replicas_and_refuses_what_it_cannot() -> None:
    w = replicas(["cuda:0", "cuda:0"])
    trainer = Trainer([w], "sgd", {"lr": 1.0}, kvstore="nccl")
    backward(w, [1.0, 2.0])
    trainer.step(1)
    assert [p.unique().tolist() for p in w] == [[-3.0]] * 2
    kv: Any = kvstore.create("nccl")
    kv.init("w", torch.zeros(2))
    with pytest.raises(ConfigurationError, match="CUDA tensors only"):
        kv.push("w", torch.zeros(2))
    with pytest.raises(ConfigurationError, match="compression is not supported"):
        kv.set_gradient_compression({"type": "2bit"})


def rank_of_group(rank: int, meeting: str, folder: str) -> None:
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method=meeting, rank=rank, world_size=2)
    found: dict[str, Any] = {}
    for name in ("device", "nccl"):
        w = [Parameter(torch.full((300,), float(rank), device="cuda"))]
        trainer = Trainer(w, "sgd", {"lr": 1.0}, kvstore=name)
        backward(w, [rank + 1.0])
        trainer.step(1)
        found[name] = w[0].detach().cpu().unique()
    net = torch.nn.Embedding.from_pretrained(torch.zeros(6, 2), freeze=False, sparse=True).cuda()
    trainer = Trainer(net.parameters(), "sgd", {"lr": 1.0})
    net(torch.tensor([rank, 5], device="cuda")).sum().backward()
    trainer.step(1)
    found["rows"] = net.weight[:, 0].detach().cpu()
    torch.save(found, Path(folder) / f"{rank}.pt")
    dist.destroy_process_group()


@TWO_GPUS
def test_ranks_of_an_nccl_group_train_alike(tmp_path: Path) -> None:
    mp.spawn(rank_of_group, (f"file://{tmp_path}/meeting", str(tmp_path)), nprocs=2)
    for rank in range(2):
        found = torch.load(tmp_path / f"{rank}.pt")
        assert found["device"].tolist() == found["nccl"].tolist() == [-3.0]
        assert found["rows"].tolist() == [-1, -1, 0, 0, 0, -2]


COUNT = torch.cuda.device_count()
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
    make_replica_reducer(name, [part.device for part in parts]).sum(parts)
    assert parts[0].tolist() == [expected] * 3


def test_automatic_choice_asks_which_devices_reach_each_other() -> None:
    parts = [torch.full((3,), float(at), device="cuda:0") for at in range(4)]
    make_replica_reducer("auto", [part.device for part in parts]).sum(parts)
    assert parts[0].tolist() == [6.0] * 3


@TWO_GPUS
@pytest.mark.parametrize("name", ["coalesced", "nccl"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_libraries_sum_and_broadcast_between_devices(name: str, dtype: torch.dtype) -> None:
    devices = [torch.device("cuda", at) for at in range(2)]
    reducer = make_replica_reducer(name, devices)
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
