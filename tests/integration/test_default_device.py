"""Scripts that call `torch.set_default_device`: the tensors that the library makes for itself stay on the host.

The default here is 'meta', whose tensors hold nothing: what is made there by mistake fails, or loses its numbers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import kvtrainer
from kvtrainer import kvstore
from kvtrainer.client.connection import Connection
from kvtrainer.common.env import TRANSPORT
from kvtrainer.kvstore import DistKVStore
from tests.support.jobs import Results, run_job
from tests.support.one_in import one_in
from tests.support.stores import Servers

CPU = torch.device("cpu")
STEPS = 3
DENSE: dict[str, tuple[Any, dict[str, Any]]] = {
    "lamb": ("lamb", {}),
    "adam in workers": ("adam", {"update_on_kvstore": False}),
    "torch's": (torch.optim.RMSprop, {}),
    "2bit": ("sgd", {"compression_params": {"type": "2bit", "threshold": 0.1}}),
    "int8": ("sgd", {"compression_params": {"type": "int8"}}),
    "topk": ("sgd", {"compression_params": {"type": "topk", "ratio": 0.1}}),
    "overlap": ("adam", {"overlap": True}),
    "copied": ("adam", {"zero_copy": False}),
    "hierarchy": ("adam", {"hierarchy": True}),
}
"""Name → optimizer and options of the Trainer."""
SPARSE: dict[str, tuple[Any, dict[str, Any]]] = {
    "sgd": ("sgd", {}),
    "adam": ("adam", {}),
    "clipped": ("adagrad", {"clip_grad": {"max_norm": 0.1}, "detect_anomalous_params": True}),
}
IN_PROCESS = [name for name in DENSE if name not in ("overlap", "hierarchy")]


class Net(nn.Module):
    """A table and a layer on the CPU, whatever the default is."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(20, 4, sparse=sparse, device=CPU)
        self.layer = nn.Linear(4, 3, device=CPU)
        with torch.no_grad():
            for p in self.parameters():
                p.copy_(torch.linspace(-1, 1, p.numel(), device=CPU).view(p.shape))

    def forward(self, ids: Tensor) -> Tensor:
        found: Tensor = self.layer(self.table(ids)).square().sum()
        return found


def train(store: Any, rank: int, default: str, name: str, folder: Path) -> list[Tensor]:
    """Weights after some steps under a default device, half of which follow a load of saved states."""
    optimizer, options = (DENSE | SPARSE)[name]
    net, file = Net(name in SPARSE), folder / f"states{rank}{default}"
    with torch.device(default):
        trainer = kvtrainer.Trainer(net, optimizer, {"lr": 0.1}, store, **options)
        for step in range(2 * STEPS):
            ids = torch.tensor([rank, step, step + 3, 5], device=CPU)
            trainer.backward(net(ids))
            trainer.step(2)
            trainer.zero_grad()
            if step == STEPS - 1:
                trainer.save_states(file)
                trainer.load_states(file)
        return [p.detach().clone() for p in net.parameters()]


def with_verbs(kv: Any, default: str) -> list[Tensor]:
    """What the verbs give under a default device, each written to a place on the CPU."""
    with torch.device(default):
        dense, sparse = torch.zeros(5, device=CPU), torch.zeros(6, 2, device=CPU)
        kv.init(["dense", "sparse"], [dense, sparse.to_sparse(1)])
        ids = torch.tensor([1, 4], device=CPU)
        rows = torch.sparse_coo_tensor(ids[None], torch.ones(2, 2, device=CPU), (6, 2), device=CPU)
        kv.push("sparse", rows)
        kv.row_sparse_pull("sparse", out=sparse, row_ids=[1, 2, 1])
        kv.pushpull("dense", torch.ones(5, device=CPU), out=dense)
        return [dense, sparse]


@pytest.mark.parametrize("name", [*IN_PROCESS, *SPARSE])
def test_a_trainer_in_one_process_is_not_moved_by_a_default_device(name: str, tmp_path: Path) -> None:
    found, expected = [train("device", 0, default, name, tmp_path) for default in ("meta", "cpu")]
    for mine, other in zip(found, expected, strict=True):
        assert mine.equal(other)


@pytest.mark.parametrize(("name", "way"), one_in(2, [*DENSE, *SPARSE], ["auto", "tcp"]))
def test_workers_of_servers_are_not_moved_by_a_default_device(
    name: str, way: str, jobs: Servers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(TRANSPORT, way)
    monkeypatch.setattr(Connection, "is_remote", lambda *_: way == "tcp")

    def body(kv: DistKVStore, rank: int, default: str) -> list[Tensor]:
        return train(kv, rank, default, name, tmp_path)

    found, expected = [
        jobs.results(2, 2, lambda kv, rank, on=on: body(kv, rank, on))[0] for on in ("meta", "cpu")
    ]
    for mine, other in zip(found, expected, strict=True):
        assert mine.equal(other)


def test_verbs_are_not_moved_by_a_default_device(jobs: Servers) -> None:
    def body(kv: DistKVStore, rank: int) -> list[list[Tensor]]:
        return [with_verbs(kv, "meta"), with_verbs(kvstore.create("local"), "meta")]

    for dense, sparse in jobs.results(1, 2, body)[0]:
        assert dense.tolist() == [1] * 5
        assert sparse.tolist() == [[0, 0], [1, 1], *[[0, 0]] * 4]


def ranks(rank: int, workers: int, folder: str) -> Results:
    return {
        name: [
            [p.tolist() for p in train("device", rank, default, name, Path(folder))]
            for default in ("meta", "cpu")
        ]
        for name in ("lamb", "torch's", "overlap", *SPARSE)
    }


def test_ranks_are_not_moved_by_a_default_device(tmp_path: Path) -> None:
    job = run_job(ranks, tmp_path, 2, 0, str(tmp_path), in_group=True)
    for name, (found, expected) in job.results[0].items():
        assert found == expected, name
