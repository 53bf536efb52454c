"""Row-sparse gradients in a Trainer of one process, of one copy of each parameter and of replicas."""

from __future__ import annotations

import mmap
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Embedding, Parameter

import kvtrainer
from kvstore_server.optimizer import state as state_module
from kvtrainer import RowSparseParameter, Trainer, kvstore
from kvtrainer.errors import ConfigurationError, RowSparseError, SparseGradientWarning
from kvtrainer.parallel import DataParallel
from tests.support.capabilities import SumStore
from tests.support.pairwise import pairwise
from tests.support.replica_training import backward, embedding, replicas, values

STORES: list[dict[str, Any]] = [{"kvstore": None}, {"kvstore": "local", "update_on_kvstore": True}]


def places() -> list[dict[str, Any]]:
    """Those, and a store that the Trainer updates beside."""
    return [*STORES, {"kvstore": kvstore.create("local"), "update_on_kvstore": False}]


class Model(torch.nn.Module):
    """A big table of several slices, a small one in a bucket, and a dense layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.big = Embedding(6_000, 9, sparse=True)
        self.small = Embedding(5, 4, sparse=True)
        self.head = torch.nn.Linear(13, 1)

    def forward(self, big: Tensor, small: Tensor) -> Tensor:
        joined = torch.cat([self.big(big), self.small(small)], dim=1)
        result: Tensor = self.head(joined)
        return result


def batches(count: int) -> list[tuple[Tensor, Tensor]]:
    gen = torch.Generator().manual_seed(7)
    return [
        (torch.randint(6_000, (32,), generator=gen) // 50 * 50, torch.randint(4, (32,), generator=gen))
        for _ in range(count)
    ]


def weights_after(model: Model, optimizer: Any, steps: int = 4) -> list[Tensor]:
    for big, small in batches(steps):
        optimizer.zero_grad()
        (model(big, small) - 1).square().mean().backward()
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


def trained_of(model: Model, name: str) -> list[Parameter]:
    """All parameters, or those with sparse gradients for SparseAdam, which takes no others."""
    return [model.big.weight, model.small.weight] if name == "SparseAdam" else [*model.parameters()]


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("SGD", {"lr": 0.1}), ("SGD", {"lr": 0.1, "momentum": 0.9}), ("Adagrad", {"lr": 0.1}),
        ("SparseAdam", {"lr": 0.05}),
    ],
)  # fmt: skip
def test_torchs_sparse_capable_optimizers_train_as_torch_does(
    name: str, options: dict[str, float], store: dict[str, Any]
) -> None:
    plain, ours = Model(), Model()
    expected = weights_after(plain, getattr(torch.optim, name)(trained_of(plain, name), **options))
    found = weights_after(ours, Trainer(trained_of(ours, name), f"torch:{name}", options, **store))
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_allreduce_leaves_sparse_gradients_sparse() -> None:
    table = Embedding(3, 1, sparse=True)
    torch.nn.init.zeros_(table.weight)
    store = kvtrainer.kvstore.create("local")
    trainer = Trainer(table, "sgd", {"learning_rate": 1.0}, store, update_on_kvstore=False)
    table(torch.tensor([1, 1])).sum().backward()
    trainer.allreduce_grads()
    assert table.weight.grad is not None
    assert table.weight.grad.is_sparse
    trainer.update(2)
    assert table.weight.flatten().tolist() == [0, -1, 0]


def test_sparse_in_two_dimensions_is_refused_by_name() -> None:
    p = Parameter(torch.zeros(3, 2))
    trainer = Trainer({"table": p}, "sgd", kvstore=None)
    p.grad = torch.sparse_coo_tensor([[0], [1]], [1.0], (3, 2))
    with pytest.raises(ConfigurationError, match=r"'table'.*sparse_dim 2"):
        trainer.step(1)


def test_rows_that_are_too_long_to_travel_are_refused_by_name() -> None:
    p = Parameter(torch.zeros(3, 300_000))
    trainer = Trainer({"table": p}, "sgd", kvstore=None)
    p.grad = torch.sparse_coo_tensor([[1]], torch.ones(1, 300_000), (3, 300_000))
    with pytest.raises(ConfigurationError, match=r"'table' .* 300000 float32"):
        trainer.step(1)


@pytest.mark.parametrize(
    ("lazy", "store", "dtype"), pairwise([True, False], places(), [torch.float16, torch.float32])
)
def test_rows_are_divided_and_rescaled(lazy: bool, store: dict[str, Any], dtype: torch.dtype) -> None:
    table = Embedding(3, 1, sparse=True, dtype=dtype)
    torch.nn.init.zeros_(table.weight)
    options = {"learning_rate": 1.0, "rescale_grad": 2.0, "lazy_update": lazy}
    trainer = Trainer(table, "sgd", options, **store)
    table(torch.tensor([1])).sum().backward()
    trainer.step(4)
    assert table.weight.flatten().tolist() == [0.0, -0.5, 0.0]


@pytest.mark.parametrize("store", STORES)
def test_rows_without_elements_do_no_harm(store: dict[str, Any]) -> None:
    empty, other = Embedding(5, 0, sparse=True), Parameter(torch.zeros(2))
    trainer = Trainer([empty.weight, other], "sgd", {"learning_rate": 1.0}, **store)
    (empty(torch.tensor([1])).sum() + other.sum()).backward()
    trainer.step(1)
    assert other.tolist() == [-1.0, -1.0]


@pytest.mark.parametrize("name", ["sgd", "torch:SGD", "torch:Adagrad", "torch:SparseAdam"])
def test_single_row_of_one_element_with_an_expanded_gradient_is_updated(name: str) -> None:
    layer = torch.nn.Embedding.from_pretrained(torch.zeros(9, 1), freeze=False, sparse=True)
    trainer = Trainer({"w": layer.weight}, name, {"lr": 1.0}, None)
    layer(torch.tensor([4])).sum().backward()  # whose gradient has strides of 0
    trainer.step(1)
    assert layer.weight[4].item() == pytest.approx(-1.0)
    assert layer.weight.count_nonzero() == 1


REFUSING: list[tuple[str, dict[str, Any]]] = [
    *[
        (name, {})
        for name in ("Adam", "AdamW", "Adamax", "Adadelta", "NAdam", "RAdam", "RMSprop", "Rprop", "ASGD")
    ],
    ("Adafactor", {}),
    ("Muon", {}),
    ("SGD", {"weight_decay": 0.1}),
    ("Adagrad", {"weight_decay": 0.1}),
]
"""Optimizers of torch that raise for a sparse gradient."""
TAKING: list[tuple[str, dict[str, Any]]] = [("SGD", {"momentum": 0.9}), ("Adagrad", {}), ("SparseAdam", {})]


def backward_of_a_row(table: Embedding, row: int) -> None:
    table(torch.tensor([row])).sum().backward()


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize(("name", "options"), REFUSING, ids=str)
@pytest.mark.parametrize("store", STORES, ids=str)
def test_sparse_gradients_that_torch_refuses_are_warned_of_once(
    name: str, options: dict[str, Any], store: dict[str, Any]
) -> None:
    theirs, ours = Embedding(4, 3, sparse=True), Embedding(4, 3, sparse=True)
    plain = getattr(torch.optim, name)(theirs.parameters(), lr=0.1, **options)
    trainer = Trainer(ours, f"torch:{name}", {"lr": 0.1, **options}, **store)
    backward_of_a_row(theirs, 1)
    with pytest.raises(RuntimeError):
        plain.step()
    backward_of_a_row(ours, 1)
    with pytest.warns(SparseGradientWarning, match="weight") as caught:
        trainer.step()
    assert caught[0].filename == __file__
    backward_of_a_row(ours, 2)
    trainer.step()


@pytest.mark.parametrize(("name", "options"), TAKING, ids=str)
def test_sparse_gradients_that_torch_takes_are_not_warned_of(name: str, options: dict[str, Any]) -> None:
    table = Embedding(4, 3, sparse=True)
    trainer = Trainer(table, f"torch:{name}", {"lr": 0.1, **options})
    backward_of_a_row(table, 1)
    assert trainer.step().updated


@pytest.mark.filterwarnings("ignore::kvtrainer.errors.SparseGradientWarning")
def test_rows_without_a_gradient_move_with_their_momentum_as_with_a_dense_gradient() -> None:
    sparse, dense = Embedding(4, 3, sparse=True), Embedding(4, 3)
    dense.load_state_dict(sparse.state_dict())
    plain, trainer = torch.optim.Adam(dense.parameters(), lr=0.1), Trainer(sparse, "torch:Adam", {"lr": 0.1})
    for row in (1, 2):
        plain.zero_grad()
        backward_of_a_row(dense, row)
        plain.step()
        before = sparse.weight[1].tolist()
        backward_of_a_row(sparse, row)
        trainer.step()
    assert sparse.weight[1].tolist() != before
    assert torch.allclose(sparse.weight, dense.weight, atol=1e-6)


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
        with pytest.raises(ConfigurationError, match="allreduce_grads"):
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


@pytest.mark.parametrize("optimizer", ["rowadam", "groupadagrad"])
def test_an_update_of_rows_does_not_copy_the_state_of_all(
    optimizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    table, copied, copy = RowSparseParameter((1000, 4), 1.0), list[Any](), state_module.own_state_value
    monkeypatch.setattr(state_module, "own_state_value", lambda one: copied.append(one) or copy(one))
    with Trainer({"table": table}, optimizer, {"learning_rate": 0.1}, kvstore="local") as trainer:
        for step in range(4):
            table.row_sparse_data([step, 7]).sum().backward()
            trainer.step(1)
            table.grad = None
        assert not copied
        values = trainer.export_saved_states().parameters["table"].state
        untouched = table.row_sparse_data(torch.arange(8, 1000))
    assert bool((untouched == 1).all())
    entries = [one for one in values.values() if isinstance(one, Tensor)]
    assert entries
    assert all(one[7].all() and not one[8:].any() for one in entries)


@pytest.mark.parametrize("optimizer", ["sgd", "adagrad", "adam", "ftrl", "rowwise_adagrad", "rowadam"])
def test_an_update_of_rows_leaves_a_gradient_with_distinct_rows_as_it_was(optimizer: str) -> None:
    table = Embedding(4, 2, sparse=True)
    trainer = Trainer([table.weight], optimizer, {"learning_rate": 0.5}, kvstore=None)
    values = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    table.weight.grad = torch.sparse_coo_tensor(
        torch.tensor([[0, 2]]), values.clone(), (4, 2), is_coalesced=True
    )
    trainer.step(1)
    assert torch.equal(table.weight.grad._values(), values)


@pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="the system has no huge pages")
def test_a_large_table_asks_for_huge_pages_and_a_small_one_does_not() -> None:
    assert [_asks_for_huge_pages(rows) for rows in (1_000, 100_000)] == [False, True]


def _asks_for_huge_pages(rows: int) -> bool:
    table = Embedding(rows, 64, sparse=True)
    trainer = Trainer([table.weight], "sgd", kvstore=None)
    address, is_there = table.weight.data_ptr(), False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, _, rest = line.partition(" ")
        begin, _, end = name.partition("-")
        if end:
            is_there = int(begin, 16) <= address < int(end, 16)
        elif is_there and name == "VmFlags:":
            del trainer
            return "hg" in rest.split()
    raise AssertionError("the table is in no mapping")
