"""Row-sparse gradients in a Trainer of one process: the rows they have move, as torch and MXNet say."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Embedding, Parameter

import kvtrainer
from kvtrainer import Trainer, kvstore
from kvtrainer.errors import ConfigurationError, SparseGradientWarning
from tests.support.pairwise import pairwise

STORES: list[dict[str, Any]] = [
    {"kvstore": None},
    {"kvstore": "local", "update_on_kvstore": True},
]


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


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize(
    ("name", "options"),
    [("SGD", {"lr": 0.1}), ("SGD", {"lr": 0.1, "momentum": 0.9}), ("Adagrad", {"lr": 0.1})],
)
def test_torchs_sparse_capable_optimizers_train_as_torch_does(
    name: str, options: dict[str, float], store: dict[str, Any]
) -> None:
    plain, ours = Model(), Model()
    expected = weights_after(plain, getattr(torch.optim, name)(plain.parameters(), **options))
    found = weights_after(ours, Trainer(ours, f"torch:{name}", options, **store))
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("store", STORES)
def test_sparse_adam_trains_as_torch_does(store: dict[str, Any]) -> None:
    plain, ours = Model(), Model()
    tables = [plain.big.weight, plain.small.weight]
    oracle = torch.optim.SparseAdam(tables, lr=0.05)
    trainer = Trainer([ours.big.weight, ours.small.weight], "torch:SparseAdam", {"lr": 0.05}, **store)
    for big, small in batches(4):
        for model, optimizer in ((plain, oracle), (ours, trainer)):
            optimizer.zero_grad()
            model(big, small).square().sum().backward()
            optimizer.step()
    # torch adds the rows of one id in an order of its own.
    torch.testing.assert_close(ours.big.weight, plain.big.weight)
    torch.testing.assert_close(ours.small.weight, plain.small.weight)


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
    with pytest.raises(
        ConfigurationError, match=r"'table' is sparse, but its rows of 300000 float32 elements"
    ):
        trainer.step(1)


@pytest.mark.parametrize(
    ("lazy", "store", "dtype"), pairwise([True, False], places(), [torch.float16, torch.float32])
)
def test_rows_are_divided_by_the_batch_size_and_multiplied_by_rescale_grad(
    lazy: bool, store: dict[str, Any], dtype: torch.dtype
) -> None:
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
