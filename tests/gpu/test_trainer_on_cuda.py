"""A Trainer whose parameters are on a CUDA device, beside one with the same parameters on the CPU.

Gradients are exact in both places. So weights are equal to the bit where servers update, which do it on the CPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import kvtrainer
from kvtrainer.errors import ConfigurationError
from kvtrainer.kvstore import DistKVStore
from tests.support.stores import Servers

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device"),
]
STEPS = 4
OPTIMIZERS = [
    "sgd", "nag", "adam", "adamw", "adamax", "nadam", "adagrad", "adadelta", "rmsprop", "lamb", "lars", "ftrl", "signum"
]  # fmt: skip
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "in workers": {"update_on_kvstore": False},
    "clipped by norm": {"clip_grad": {"max_norm": 0.5}},
    "clipped by value": {"clip_grad": {"type": "value", "clip_value": 0.1}},
    "fp16": {"compression_params": {"type": "fp16"}},
    "bf16": {"compression_params": {"type": "bf16"}},
    "int8": {"compression_params": {"type": "int8"}},
    "2bit": {"compression_params": {"type": "2bit", "threshold": 0.1}},
    "1bit": {"compression_params": {"type": "1bit"}},
    "topk": {"compression_params": {"type": "topk", "ratio": 0.1}},
    "copied": {"zero_copy": False},
    "hierarchy": {"hierarchy": True},
}


class Net(nn.Module):
    """Parameters of many sizes and one table; each gradient is exact on every device."""

    def __init__(self, device: str, sparse: bool = False, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        sizes = (3, 70_000, 500, 300_000, 1)
        self.dense = nn.ParameterList(
            [nn.Parameter(torch.linspace(-1, 1, size, dtype=dtype).to(device)) for size in sizes]
        )
        self.scale = nn.Parameter(torch.tensor(0.5).to(device))
        rows = torch.arange(80.0).view(20, 4) / 64
        self.table = nn.Embedding.from_pretrained(rows.to(device), freeze=False, sparse=sparse)

    def forward(self, rank: int, step: int) -> Tensor:
        ids = torch.tensor([rank, step, step + 3, 5, 5], device=self.table.weight.device)
        loss: Tensor = self.table(ids).sum() * 0.25 + self.scale * float(rank + 1)
        for at, p in enumerate(self.dense):
            loss = loss + (p.float() * float(rank + step + at + 1)).sum() / 8
        return loss


def train(net: Net, trainer: kvtrainer.Trainer, rank: int = 0, first: int = 0) -> list[Tensor]:
    for step in range(first, first + STEPS):
        trainer.backward(net(rank, step))
        trainer.step(4)
        trainer.zero_grad()
    return [p.detach().cpu() for p in net.parameters()]


def check_close(found: list[Tensor], expected: list[Tensor], exactly: bool = False) -> None:
    for mine, other in zip(found, expected, strict=True):
        bound = 0.0 if exactly else 2e-6
        torch.testing.assert_close(mine, other, rtol=bound, atol=bound)


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    """A group of torch.distributed with this one rank."""
    dist.init_process_group(
        "cpu:gloo,cuda:nccl", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1
    )
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("store", [None, "local", "device"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_optimizers_of_one_process_do_there_what_they_do_here(optimizer: str, store: str | None) -> None:
    found = []
    for device in ("cuda", "cpu"):
        net = Net(device)
        found.append(train(net, kvtrainer.Trainer(net, optimizer, {"lr": 0.01}, store)))
    check_close(*found)


@pytest.mark.parametrize(
    "name", [torch.optim.Adam, torch.optim.RMSprop, torch.optim.SGD, torch.optim.Adagrad]
)
def test_optimizers_of_torch_do_what_they_do_alone(name: Any) -> None:
    net, other = Net("cuda"), Net("cuda")
    trainer, optimizer = kvtrainer.Trainer(net, name, {"lr": 0.01}, None), name(other.parameters(), lr=0.01)
    found = train(net, trainer)
    for step in range(STEPS):
        (other(0, step) / 4).backward()
        optimizer.step()
        optimizer.zero_grad()
    check_close(found, [p.detach().cpu() for p in other.parameters()])


@pytest.mark.parametrize("optimizer", ["sgd", "adagrad", "adam"])
@pytest.mark.parametrize("store", [None, "local"])
def test_rows_are_updated_in_one_process(optimizer: str, store: str | None) -> None:
    found = []
    for device in ("cuda", "cpu"):
        net = Net(device, sparse=True)
        found.append(train(net, kvtrainer.Trainer(net, optimizer, {"lr": 0.01}, store)))
    check_close(*found)


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_rows_of_a_table_that_is_watched_for_writes_are_updated(optimizer: str) -> None:
    """One that is so large that sums of its parts are kept."""
    found = []
    for device in ("cuda", "cpu"):
        table = nn.Embedding.from_pretrained(torch.zeros(2**17, 32).to(device), freeze=False, sparse=True)
        params = {"lr": 1.0, "lazy_update": True}
        trainer = kvtrainer.Trainer(table, optimizer, params, "local")
        for step in range(STEPS):
            table(torch.tensor([0, step, 2**17 - 1, 70_000], device=device)).sum().backward()
            trainer.step(1)
            trainer.zero_grad()
        found.append([table.weight.detach().cpu()])
    check_close(*found)


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("name", OPTIONS)
def test_servers_update_what_is_there_to_the_bit(name: str, sparse: bool, jobs: Servers) -> None:
    options = OPTIONS[name]
    if sparse and (name in ("in workers", "hierarchy") or "compression_params" in options):
        sparse = False

    def body(kv: DistKVStore, rank: int, device: str) -> list[Tensor]:
        net = Net(device, sparse)
        return train(net, kvtrainer.Trainer(net, "adam", {"lr": 0.01}, kv, **options), rank)

    found = [jobs.results(2, 2, lambda kv, rank, on=on: body(kv, rank, on)) for on in ("cuda", "cpu")]
    check_close(found[0][0], found[0][1], exactly=True)
    check_close(found[0][0], found[1][0], exactly="by norm" not in name and name != "in workers")


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_half_weights_have_masters_on_servers(optimizer: str, jobs: Servers) -> None:
    def body(kv: DistKVStore, rank: int, device: str) -> list[Tensor]:
        net = Net(device, dtype=torch.bfloat16)
        params = {"lr": 0.01, "multi_precision": True}
        return train(net, kvtrainer.Trainer(net, optimizer, params, kv), rank)

    found = [jobs.results(2, 2, lambda kv, rank, on=on: body(kv, rank, on))[0] for on in ("cuda", "cpu")]
    check_close(*found, exactly=True)


def test_a_row_sparse_parameter_gives_rows_to_the_device(jobs: Servers) -> None:
    def body(kv: DistKVStore, rank: int) -> list[Any]:
        table = kvtrainer.RowSparseParameter((100, 4), init=1.0, device="cuda")
        trainer = kvtrainer.Trainer([("table", table)], "sgd", {"lr": 1.0}, kv)
        ids = torch.tensor([[3, rank], [3, 7]], device="cuda")
        trainer.prefetch({table: ids})
        rows = table.row_sparse_data(ids)
        rows.sum().backward()
        trainer.step(1)
        after = table.row_sparse_data(torch.tensor([0, 1, 3, 7, 50], device="cuda"))
        return [str(rows.device), list(rows.shape), after[:, 0].tolist()]

    for found in jobs.results(2, 2, body):
        assert found == ["cuda:0", [2, 2, 4], [0.0, 0.0, -3.0, -1.0, 1.0]]


@pytest.mark.parametrize("store", [None, "local"])
@pytest.mark.parametrize("devices", [("cuda", "cpu"), ("cpu", "cuda"), ("cuda", "cuda")], ids=str)
def test_saved_states_go_on_on_another_device(
    devices: tuple[str, str], store: str | None, tmp_path: Path
) -> None:
    def resumed(first: str, second: str) -> list[Tensor]:
        nets = [Net(first), Net(second)]
        trainers = [kvtrainer.Trainer(net, "adam", {"lr": 0.01}, store) for net in nets]
        train(nets[0], trainers[0])
        trainers[0].save_states(tmp_path / "states")
        nets[1].load_state_dict({name: value.cpu() for name, value in nets[0].state_dict().items()})
        trainers[1].set_data()
        trainers[1].load_states(tmp_path / "states")
        return train(nets[1], trainers[1], first=STEPS)

    check_close(resumed(*devices), resumed("cpu", "cpu"))


def test_states_of_a_fused_optimizer_of_torch_come_from_the_cpu(tmp_path: Path) -> None:
    found = []
    for device in ("cuda", "cpu"):
        net, other = Net("cpu"), Net(device)
        first, second = [
            kvtrainer.Trainer(one, torch.optim.Adam(one.parameters(), 0.01, fused=True), kvstore=None)
            for one in (net, other)
        ]
        train(net, first)
        first.save_states(tmp_path / "states")
        other.load_state_dict(net.state_dict())
        second.load_states(tmp_path / "states")
        found.append(train(other, second, first=STEPS))
    check_close(*found)


def test_loss_scaling_skips_a_step_whose_gradient_overflows() -> None:
    w = nn.Parameter(torch.ones(1000, device="cuda"))
    trainer = kvtrainer.Trainer([w], "sgd", {"lr": 1.0}, None, amp={"init_scale": 2.0**4})
    for number, expected in ((1.0, 0.0), (torch.inf, 0.0), (1.0, -1.0)):
        with torch.autocast("cuda", torch.float16):
            loss = (w * number).sum()
        trainer.backward(loss)
        trainer.step(1)
        trainer.zero_grad()
        assert w.unique().tolist() == [expected]


def test_one_rank_over_nccl_trains_as_without_a_group(group: None) -> None:
    found = []
    for store in ("nccl", None):
        net = Net("cuda")
        found.append(train(net, kvtrainer.Trainer(net, "adam", {"lr": 0.01}, store)))
    check_close(*found)


@pytest.mark.parametrize("name", ["plain", "in workers", "int8", "clipped by norm"])
def test_a_default_device_of_cuda_changes_nothing(name: str, jobs: Servers) -> None:

    def body(kv: DistKVStore, rank: int, default: str) -> list[Tensor]:
        net = Net("cuda")
        with torch.device(default):
            return train(net, kvtrainer.Trainer(net, "adam", {"lr": 0.01}, kv, **OPTIONS[name]), rank)

    found = [jobs.results(2, 2, lambda kv, rank, on=on: body(kv, rank, on))[0] for on in ("cuda", "cpu")]
    check_close(*found, exactly=True)


def test_overlap_with_servers_is_refused_with_the_reason(jobs: Servers) -> None:
    def body(kv: DistKVStore, rank: int) -> None:
        with pytest.raises(ConfigurationError, match="overlap=True needs all parameters on one CPU device"):
            kvtrainer.Trainer(Net("cuda"), "sgd", {"lr": 0.1}, kv, overlap=True)

    jobs.results(1, 1, body)


def test_new_weights_given_to_the_store_reach_every_worker(jobs: Servers) -> None:
    def body(kv: DistKVStore, rank: int) -> list[float]:
        w = nn.Parameter(torch.zeros(70_000, device="cuda"))
        trainer = kvtrainer.Trainer([w], "sgd", {"lr": 1.0}, kv)
        w.sum().backward()
        trainer.step(2)
        with torch.no_grad():
            w.fill_(5.0 + rank)
        trainer.set_data()
        return w.detach().unique().tolist()

    assert jobs.results(2, 2, body) == [[5.0], [5.0]]
