"""Row-sparse gradients, and third-party stores, of parameters with replicas."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kvtrainer import RowSparseParameter, Trainer
from kvtrainer.errors import ConfigurationError, RowSparseError
from kvtrainer.parallel import DataParallel
from tests.support.capabilities import SumStore
from tests.support.replica_training import backward, embedding, replicas, values


@pytest.mark.parametrize("in_store", [None, True, False])
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_row_sparse_gradients_of_replicas_are_summed_by_row(optimizer: str, in_store: bool | None) -> None:
    nets = embedding(3)
    [oracle] = embedding(1)
    options = {"learning_rate": 0.1}
    trainer = Trainer([[net.weight for net in nets]], optimizer, options, update_on_kvstore=in_store)
    single = Trainer([oracle.weight], optimizer, options, kvstore=None)
    for step in range(3):
        ids = [torch.tensor([step, 1, 1]), torch.tensor([7, 1 + step]), torch.tensor([19])]
        for net, own in zip(nets, ids, strict=True):
            net(own).square().sum().backward()
        oracle(torch.cat(ids)).square().sum().backward()
        trainer.step(2)
        single.step(2)
        assert all(torch.equal(net.weight, nets[0].weight) for net in nets)
        assert torch.allclose(nets[0].weight, oracle.weight, atol=1e-6)


class Table(torch.nn.Module):
    """MXNet's test of layers that get their values late: rows of a table, then a dense layer of ones."""

    def __init__(self) -> None:
        super().__init__()
        self.table = RowSparseParameter((4, 3), 1.0)
        self.dense = torch.nn.Linear(3, 2)
        for parameter in self.dense.parameters():
            torch.nn.init.ones_(parameter)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.dense(self.table.row_sparse_data(ids))
        return out


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("type", ["local", "device"])
def test_a_row_sparse_weight_on_several_devices_trains_as_mxnets(type: str, count: int) -> None:
    nets = [Table() for _ in range(count)]
    parameters = [list(copies) for copies in zip(*(net.parameters() for net in nets), strict=True)]
    trainer = Trainer(parameters, "sgd", {"learning_rate": 1}, kvstore=type)
    for net, ids in zip(nets, torch.tensor([[0, 2], [1, 2]]).chunk(count), strict=True):
        net(ids).sum().backward()
    trainer.step(1)
    for net in nets:
        # Each use of a row adds 1 for each of the two outputs.
        assert net.table.row_sparse_data(torch.arange(4)).tolist() == [[-1] * 3, [-1] * 3, [-3] * 3, [1] * 3]
        assert torch.equal(net.dense.weight, nets[0].dense.weight)


def test_a_row_sparse_weight_in_a_data_parallel_model_has_replicas() -> None:
    net = Table()
    model = DataParallel(net, ["cpu", "cpu"])
    trainer = Trainer(model, "sgd", {"learning_rate": 1})
    for out in model(torch.tensor([[0, 2], [1, 2]])):
        out.sum().backward()
    trainer.step(1)
    assert net.table.row_sparse_data(torch.arange(4))[:, 0].tolist() == [-1, -1, -3, 1]


def test_a_row_sparse_weight_of_one_dimension_has_replicas_and_survives_its_files(tmp_path: Path) -> None:
    tables = [RowSparseParameter((10,), 0.0) for _ in range(2)]
    options = {"learning_rate": 0.125, "momentum": 0.5}
    trainer = Trainer([tables], "sgd", options, kvstore="local")

    def step() -> None:
        for table in tables:
            (table.row_sparse_data(torch.arange(10)) + 1).sum().backward()
        trainer.step(1)

    step()
    assert [table.row_sparse_data([3, 9]).tolist() for table in tables] == [[-0.25, -0.25]] * 2
    trainer.save_states(tmp_path / "states")
    trainer.load_states(tmp_path / "states")
    tables[0].lr_mult = 2.0  # type: ignore[attr-defined]
    step()
    assert tables[1].row_sparse_data([0]).item() == -0.25 - 0.125 - 0.5
    trainer.set_data({"0": torch.full((10,), 7.0)})
    assert [table.detach().tolist() for table in tables] == [[7.0] * 10] * 2
    with pytest.raises(RowSparseError, match="more than one trainer"):
        Trainer([tables[1]], "sgd", kvstore="local")
    with pytest.raises(ConfigurationError, match="update_on_kvstore=False when sparse weights"):
        Trainer([[RowSparseParameter(3), RowSparseParameter(3)]], "sgd", update_on_kvstore=False)


def test_replicas_of_which_some_are_row_sparse_are_refused() -> None:
    with pytest.raises(RowSparseError, match="some replicas of '0' are row-sparse"):
        Trainer([[RowSparseParameter(3), torch.nn.Parameter(torch.zeros(3))]], "sgd", kvstore="local")


def test_summed_rows_can_be_clipped_before_the_update() -> None:
    nets = embedding(2)
    before = nets[0].weight.detach().clone()
    trainer = Trainer([[net.weight for net in nets]], "sgd", {"lr": 1.0}, update_on_kvstore=False)
    nets[0](torch.tensor([2, 3])).sum().backward()
    nets[1](torch.tensor([3, 9])).sum().backward()
    trainer.allreduce_grads()
    for net in nets:
        grad = net.weight.grad
        assert grad is not None
        assert grad.is_sparse
        assert grad.to_dense()[:, 0].nonzero().flatten().tolist() == [2, 3, 9]
        assert grad.to_dense()[3].tolist() == [2.0] * 4
        grad.mul_(0.5)
    trainer.update(1)
    expected = before.clone()
    expected[[2, 9]] -= 0.5
    expected[3] -= 1.0
    assert all(torch.allclose(net.weight, expected) for net in nets)


def test_dense_gradient_of_one_replica_makes_the_sum_dense() -> None:
    nets = embedding(2)
    before = nets[0].weight.detach().clone()
    trainer = Trainer([[net.weight for net in nets]], "sgd", {"lr": 1.0})
    nets[0](torch.tensor([2])).sum().backward()
    nets[1].weight.grad = torch.full((20, 4), 0.5)
    trainer.step(1)
    expected = before - 0.5
    expected[2] -= 1.0
    assert all(torch.allclose(net.weight, expected) for net in nets)


@pytest.mark.parametrize(("asked", "updates"), [(None, False), (True, True), (False, False)])
def test_row_sparse_gradients_leave_the_update_to_the_trainer(asked: bool | None, updates: bool) -> None:
    nets = embedding(2)
    trainer = Trainer([[net.weight for net in nets]], "sgd", kvstore="local", update_on_kvstore=asked)
    for net in nets:
        net(torch.tensor([1])).sum().backward()
    trainer.step(1)
    assert trainer.kvstore is not None
    if updates:
        with pytest.raises(ConfigurationError, match="no meaning"):
            trainer.allreduce_grads()
    else:
        trainer.allreduce_grads()


def test_plug_in_gets_sums_of_replicas() -> None:
    w = replicas()
    trainer = Trainer([w], "sgd", {"lr": 1.0}, kvstore=SumStore())
    backward(w)
    trainer.step(1)
    assert values(w) == [-2.0, -2.0]
    with pytest.raises(ConfigurationError, match="cannot run a Trainer's optimizer"):
        Trainer([replicas()], "sgd", kvstore=SumStore(), update_on_kvstore=True)


def test_plug_in_refuses_row_sparse_gradients() -> None:
    nets = embedding(2)
    trainer = Trainer([[net.weight for net in nets]], "sgd", kvstore=SumStore())
    for net in nets:
        net(torch.tensor([1])).sum().backward()
    with pytest.raises(ConfigurationError, match="'thirdparty' sums dense gradients only"):
        trainer.step(1)
