"""Embeddings without a number of rows: lookups, pooling and gradients, beside gradients made by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import kvtrainer
from kvstore_server.shard.id_index import row_numbers
from kvstore_server.shard.row_values import initial_rows
from kvtrainer.errors import ArgumentTypeError, ConfigurationError, RowSparseError
from kvtrainer.memory import hash_table

BIG = 2**63 - 1
IDS = [5, -7, 2**53 + 1, 2**53, 5, BIG, 0, -BIG - 1, 5, 0]


def trained(table: kvtrainer.Embedding, optimizer: str = "sgd", **options: Any) -> kvtrainer.Trainer:
    options = options or {"learning_rate": 1.0}
    return kvtrainer.Trainer([("t", table.weight)], optimizer, options, kvstore="local")


def initial(table: kvtrainer.Embedding, ids: Sequence[int]) -> Tensor:
    rows = row_numbers(np.array(ids, np.int64))
    return initial_rows(table.weight.options, "t", rows, table.weight.shape[1], table.weight.dtype)


def test_ids_of_any_value_have_rows_of_their_own() -> None:
    table = kvtrainer.Embedding(4)
    with trained(table) as trainer:
        ids = torch.tensor(IDS).view(2, 5)
        before = ids.clone()
        out = table(ids)
        assert torch.equal(out.view(-1, 4), initial(table, IDS))
        grads = torch.arange(40.0).view(2, 5, 4)
        out.backward(grads)
        trainer.step(1)
        assert torch.equal(ids, before)
        expected = {id_: row.double() for id_, row in zip(IDS, initial(table, IDS), strict=True)}
        for id_, grad in zip(IDS, grads.view(-1, 4), strict=True):
            expected[id_] -= grad
        after = table(torch.tensor(list(expected)))
        assert torch.allclose(after.double(), torch.stack(list(expected.values())), atol=1e-6)
        assert torch.equal(table(torch.tensor([6, 2**53 - 1])), initial(table, [6, 2**53 - 1]))


@pytest.mark.parametrize(
    "ids",
    [[2**64 - 1, 2**63], [-1, 2**63], np.array([2**64 - 1, 2**63], np.uint64)],
    ids=["list", "mixed list", "array"],
)
def test_unsigned_ids_are_those_with_the_same_bits(ids: Any) -> None:
    table = kvtrainer.Embedding(3)
    with trained(table):
        assert torch.equal(table(ids), initial(table, [-1, -(2**63)]))
        table.load_rows(ids, torch.ones(2, 3))
        assert torch.equal(table([-1, -(2**63)]), torch.ones(2, 3))


def test_gradients_of_several_lookups_and_passes_add_up() -> None:
    table = kvtrainer.Embedding(2)
    with trained(table) as trainer:
        first, second = table(torch.tensor([1, 2])), table(torch.tensor([2, 3, 3]))
        (first.sum() + 10 * second.sum()).backward()
        table(torch.tensor([4, 1])).sum().mul(100.0).backward()
        trainer.step(1)
        change = initial(table, [1, 2, 3, 4]) - table(torch.tensor([1, 2, 3, 4]))
        assert change[:, 0].round().tolist() == [101.0, 11.0, 20.0, 100.0]


def test_a_backward_pass_after_the_rows_have_been_numbered_anew_trains_its_own_rows() -> None:
    table = kvtrainer.Embedding(1, init="constant", scale=0.0)
    with trained(table) as trainer:
        for first in range(0, 40, 4):
            early = table(torch.arange(first, first + 4))
            table(torch.arange(100, 110)).sum().backward()
            early.sum().backward()
            trainer.step(1)
            table.weight.grad = None
        assert table(torch.arange(40)).flatten().tolist() == [-1.0] * 40
        assert table(torch.arange(100, 110)).flatten().tolist() == [-10.0] * 10


def test_a_gradient_that_was_put_aside_trains_its_own_rows() -> None:
    table = kvtrainer.Embedding(1, init="constant", scale=0.0)
    with trained(table) as trainer:
        kept = []
        for first in (100, 150, 500):
            table(torch.arange(first, first + 100)).sum().backward()
            kept.append(table.weight.grad)
            table.weight.grad = None
        table.weight.grad = kept[0] + kept[1] + kept[2]
        trainer.step(1)
        assert table(torch.arange(100, 250)).flatten().tolist() == [-1.0] * 50 + [-2.0] * 50 + [-1.0] * 50
        assert table(torch.arange(500, 600)).flatten().tolist() == [-1.0] * 100


def test_a_gradient_that_is_older_than_all_that_is_kept_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hash_table, "_KEPT", 10)
    table = kvtrainer.Embedding(1, init="constant", scale=0.0)
    with trained(table) as trainer:
        table(torch.arange(10)).sum().backward()
        old, table.weight.grad = table.weight.grad, None
        for _ in range(20):
            table(torch.arange(10)).sum().backward()
            trainer.step(1)
            table.weight.grad = None
        table.weight.grad = old
        with pytest.raises(RowSparseError, match="'t'"):
            trainer.step(1)
        assert table(torch.arange(10)).flatten().tolist() == [-20.0] * 10


def test_handles_take_bounded_memory_however_gradients_are_cleared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hash_table, "_KEPT", 100)
    table = kvtrainer.Embedding(1)
    with trained(table) as trainer:
        for first in range(0, 4000, 100):
            table(torch.arange(first, first + 100)).sum().backward()
            trainer.step(1)
            trainer.zero_grad(set_to_none=first % 200 == 0)
        assert len(table.weight.handles) <= 20 * 100


@pytest.mark.parametrize("mode", ["sum", "mean"])
@pytest.mark.parametrize("has_weights", [False, True])
@pytest.mark.parametrize("padding_idx", [None, 5])
@pytest.mark.parametrize("form", ["offsets", "last offset", "matrix"])
def test_bags_have_the_sums_and_gradients_made_by_hand(
    mode: str, has_weights: bool, padding_idx: int | None, form: str
) -> None:
    table = kvtrainer.EmbeddingBag(
        3, mode=mode, padding_idx=padding_idx, include_last_offset=form == "last offset", dtype=torch.float64
    )
    offsets = [0, 5] if form == "matrix" else [0, 0, 3, 9]
    ends = [*offsets[1:], len(IDS)]
    weights = torch.rand(len(IDS), dtype=torch.float64, requires_grad=True) if has_weights else None
    grads = torch.randn(len(offsets), 3, dtype=torch.float64)
    # 1. By hand, one position after the other.
    factors = [1.0] * len(IDS) if weights is None else weights.tolist()
    rows = dict(zip(IDS, initial(table, IDS), strict=True))
    of_rows = {id_: torch.zeros(3, dtype=torch.float64) for id_ in IDS}
    of_weights = torch.zeros(len(IDS), dtype=torch.float64)
    expected = torch.zeros(len(offsets), 3, dtype=torch.float64)
    for bag, (begin, end) in enumerate(zip(offsets, ends, strict=True)):
        own = [at for at in range(begin, end) if IDS[at] != padding_idx]
        count = max(len(own), 1) if mode == "mean" else 1
        for at in own:
            factor = factors[at] / count
            expected[bag] += rows[IDS[at]] * factor
            of_rows[IDS[at]] += grads[bag] * factor
            of_weights[at] += float(rows[IDS[at]] @ grads[bag]) / count
    # 2. By the table.
    with trained(table) as trainer:
        ids = torch.tensor(IDS)
        if form == "matrix":
            out = table(ids.view(2, 5), per_sample_weights=None if weights is None else weights.view(2, 5))
        else:
            given = [*offsets, len(IDS)] if form == "last offset" else offsets
            out = table(ids, torch.tensor(given), weights)
        assert torch.allclose(out, expected)
        out.backward(grads)
        if weights is not None:
            assert weights.grad is not None
            assert torch.allclose(weights.grad, of_weights)
        trainer.step(1)
        every = list(rows)
        change = initial(table, every) - torch.stack(
            [table(torch.tensor([[id_]]))[0] if id_ != padding_idx else rows[id_] for id_ in every]
        )
        assert torch.allclose(change, torch.stack([of_rows[id_] for id_ in every]))


def test_the_padding_row_is_zero_and_stays_so() -> None:
    table = kvtrainer.Embedding(2, padding_idx=3)
    with trained(table) as trainer:
        out = table(torch.tensor([[3, 1], [1, 3]]))
        assert out[0, 0].tolist() == out[1, 1].tolist() == [0.0, 0.0]
        out.sum().backward()
        trainer.step(1)
        assert table(torch.tensor([3])).tolist() == [[0.0, 0.0]]
        assert bool((table(torch.tensor([1])) - initial(table, [1]) + 2.0).abs().max() < 1e-6)
        assert (table.stats()["rows"], table.stats()["hottest"]) == (1, {1: 1})


@pytest.mark.parametrize(
    ("padding", "ids"),
    [
        (-1, torch.tensor([255, 0], dtype=torch.uint8)),
        (-1, torch.tensor([2**16 - 1, 2**16 - 2], dtype=torch.uint16)),
        (2**32, torch.tensor([0, 1], dtype=torch.int32)),
        (256, torch.tensor([0, 1], dtype=torch.uint8)),
    ],
)
@pytest.mark.parametrize("kind", [kvtrainer.Embedding, kvtrainer.EmbeddingBag])
def test_an_id_of_few_bits_is_not_taken_for_the_padding(kind: Any, padding: int, ids: Tensor) -> None:
    table = kind(1, init="constant", padding_idx=padding)
    with trained(table):
        args = (ids, torch.arange(2)) if isinstance(table, kvtrainer.EmbeddingBag) else (ids,)
        assert table(*args).flatten().tolist() == [1.0, 1.0]


def test_unsigned_ids_of_bags_are_those_with_the_same_bits() -> None:
    bags = kvtrainer.EmbeddingBag(1, padding_idx=2**64 - 1, mode="sum")
    with trained(bags):
        assert bags([[2**64 - 1, 3]]).tolist() == initial(bags, [3]).tolist()


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int32], ids=str)
def test_offsets_are_integers_of_any_size(dtype: torch.dtype) -> None:
    bags = kvtrainer.EmbeddingBag(1, init="constant", mode="sum")
    with trained(bags):
        ids = torch.arange(300)
        assert bags(ids, torch.tensor([0, 100], dtype=dtype)).flatten().tolist() == [100.0, 200.0]
        assert bags(ids, [0, 100], [1.0] * 300).flatten().tolist() == [100.0, 200.0]


def test_the_last_offset_is_the_number_of_ids() -> None:
    bags = kvtrainer.EmbeddingBag(1, init="constant", mode="sum", include_last_offset=True)
    with trained(bags):
        assert bags(torch.arange(6), torch.tensor([0, 2, 6])).flatten().tolist() == [2.0, 4.0]
        assert bags(torch.arange(0), torch.tensor([0])).shape == (0, 1)
        for offsets in ([0, 2, 4], [0, 2, 9], [0], []):
            with pytest.raises(ConfigurationError, match="'t'"):
                bags(torch.arange(6), torch.tensor(offsets, dtype=torch.int64))


def test_gradients_of_many_lookups_of_a_row_in_half_precision_are_summed_in_float32() -> None:
    for table in (
        kvtrainer.Embedding(1, init="constant", scale=0.0, dtype=torch.bfloat16),
        kvtrainer.EmbeddingBag(1, mode="sum", init="constant", scale=0.0, dtype=torch.bfloat16),
    ):
        with trained(table) as trainer:
            ids = torch.full((4096,), 9)
            args = (ids, torch.arange(4096)) if isinstance(table, kvtrainer.EmbeddingBag) else (ids,)
            table(*args).sum().backward()
            trainer.step(1)
            with torch.no_grad():
                assert float(table(*[one[:1] for one in args])) == -4096.0


def test_no_ids_are_no_rows() -> None:
    table = kvtrainer.Embedding(3)
    with trained(table) as trainer:
        out = table(torch.zeros(2, 0, dtype=torch.int64))
        assert out.shape == (2, 0, 3)
        out.sum().backward()
        trainer.step(1)
    bags = kvtrainer.EmbeddingBag(3)
    with trained(bags):
        assert bags(torch.zeros(0, dtype=torch.int64), torch.tensor([0, 0])).tolist() == [[0.0] * 3] * 2


@pytest.mark.parametrize(
    "ids", [[1.0], torch.tensor([2.0**24]), torch.tensor([True]), ["a"], torch.ones(1) * 1j]
)
def test_an_id_that_is_no_integer_is_refused(ids: Any) -> None:
    table = kvtrainer.Embedding(3)
    with trained(table), pytest.raises(ConfigurationError):
        table(ids)


@pytest.mark.parametrize(
    ("ids", "offsets", "weights"),
    [
        ([1, 2], None, None),
        ([[1, 2]], [0], None),
        ([[[1]]], None, None),
        ([1, 2], [0, 3], None),
        ([1, 2], [1, 2], None),
        ([1, 2], [0, 2, 1], None),
        ([1, 2], [0.0], None),
        ([1, 2], [0], [1.0]),
        ([[1, 2]], None, [1.0, 2.0]),
        ([1, 2], [], None),
        ([1, 2], [False, True], None),
        ([1, 2], "ab", None),
        ([1, 2], torch.tensor([0, 100], dtype=torch.uint8), None),
        ([1, 2, 3], torch.tensor([0, 2, 1], dtype=torch.uint8), None),
        ([1, 2], [0], ["a", "b"]),
        ([[1, 2], [3]], None, None),
        (None, None, None),
        ("abc", [0], None),
    ],
)
def test_bags_that_do_not_fit_are_refused(ids: Any, offsets: Any, weights: Any) -> None:
    table = kvtrainer.EmbeddingBag(3)
    with trained(table), pytest.raises(ConfigurationError, match="'t'"):
        table(ids, offsets, weights)


@pytest.mark.parametrize(
    "options",
    [
        {"init": "xavier"},
        {"scale": float("nan")},
        {"admit_after": 0},
        {"expire_after": -1},
        {"max_rows": 2**40},
        {"max_rows": 1.5},
        {"seed": None},
        {"seed": 2**64},
        {"init": "constant", "scale": 1e10, "dtype": torch.float16},
        {"scale": 1e39},
        {"scale": "1"},
        {"dim": 0},
        {"dim": 2.0},
        {"evict": "random"},
        {"evict": "random", "max_rows": 1000},
        {"evict": "lru"},
        {"evict": "lfu"},
        {"max_rows": 127},
        {"cache_age": 2},
        {"padding_idx": 1.5},
        {"padding_idx": True},
        {"padding_idx": "a"},
        {"padding_idx": 2**64},
        {"weight_decay": -0.1},
        {"weight_decay": float("inf")},
        {"max_norm": 0.0},
        {"max_norm": float("nan")},
        {"max_norm": "1"},
        {"optimizer": "adagard"},
        {"optimizer": "lamb"},
        {"optimizer": "adam"},
        {"optimizer": "adagrad", "optimizer_params": {"wd": 0.1}},
        {"optimizer": "nag", "optimizer_params": {"momentum": 0.9}},
        {"optimizer": "sgd", "optimizer_params": {"momentum": 0.9}, "max_norm": 1.0},
        {"optimizer": "sgd", "optimizer_params": {"rescale_grad": 0.5}},
        {"optimizer": "sgd", "optimizer_params": {"lr_scheduler": lambda step: 0.1}},
        {"optimizer": "sgd", "optimizer_params": {"begin_num_update": 3}},
        {"optimizer": "sgd", "optimizer_params": 0.1},
        {"optimizer_params": {"learning_rate": 0.1}},
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError):
        kvtrainer.Embedding(**{"dim": 3, **options})


@pytest.mark.parametrize(
    ("optimizer", "options"), [("lars", {}), ("adam", {"lazy_update": False}), ("lamb", {})]
)
def test_an_optimizer_that_needs_all_rows_is_refused_and_nothing_changes(
    optimizer: str, options: dict[str, Any]
) -> None:
    table = kvtrainer.Embedding(3)
    with trained(table, optimizer, learning_rate=0.1, **options) as trainer:
        table(torch.tensor([1])).sum().backward()
        with pytest.raises(ConfigurationError, match="'t'"):
            trainer.step(1)
        assert torch.equal(table(torch.tensor([1])), initial(table, [1]))


def test_a_lookup_alone_trains_nothing_and_brings_no_row() -> None:
    table = kvtrainer.Embedding(3, expire_after=2)
    with trained(table, "adagrad", learning_rate=0.1) as trainer:
        table(torch.tensor([1])).sum().backward()
        trainer.step(1)
        table.eval()
        rows = table(torch.tensor([1, 2]))
        for _ in range(5):
            assert torch.equal(table(torch.tensor([1, 2])), rows)


def test_a_model_with_a_table_has_a_small_state_dict() -> None:
    model = torch.nn.Sequential(kvtrainer.Embedding(1000), torch.nn.Linear(1000, 1))
    state = model.state_dict()
    assert list(state) == ["1.weight", "1.bias"]
    model.load_state_dict(state)
    with pytest.raises(RowSparseError):
        model[0].weight.detach()


def test_a_collection_names_its_parameters_by_its_tables_and_has_a_small_state_dict() -> None:
    shared = kvtrainer.Embedding(2)
    collection = kvtrainer.EmbeddingBagCollection(
        {"users": shared, "words": kvtrainer.EmbeddingBag(3), "friends": shared}
    )
    assert [name for name, _ in collection.named_parameters()] == ["users.weight", "words.weight"]
    assert not collection.state_dict()


def test_a_collection_has_the_rows_and_gradients_made_by_hand() -> None:
    shared = kvtrainer.Embedding(2, dtype=torch.float64)
    bags = kvtrainer.EmbeddingBag(3, mode="mean", seed=1)
    collection = kvtrainer.EmbeddingBagCollection({"users": shared, "words": bags, "friends": shared})
    named = {"t": shared.weight, "w": bags.weight}
    with kvtrainer.Trainer(named, "sgd", {"learning_rate": 1.0}, kvstore="local") as trainer:
        found = collection(
            {
                "friends": torch.tensor([7, 8]),
                "words": (torch.tensor([1, 2, 2]), torch.tensor([0, 1])),
                "users": [[8], [9]],
            }
        )
        assert list(found) == ["friends", "words", "users"]
        users = initial(shared, [7, 8, 9])
        words = initial_rows(bags.weight.options, "w", row_numbers(np.array([1, 2])), 3, torch.float32)
        assert torch.equal(found["friends"], users[:2])
        assert torch.equal(found["users"], users[1:].view(2, 1, 2))
        assert torch.equal(found["words"], words)
        (found["friends"].sum() + 10 * found["users"].sum() + found["words"].sum()).backward()
        trainer.step(1)
        assert torch.allclose(users - shared([7, 8, 9]), torch.tensor([1.0, 11.0, 10.0]).double()[:, None])
        assert torch.allclose(words - bags([[1], [2]]), torch.ones(2, 1))


def test_a_collection_without_ids_asks_for_nothing() -> None:
    collection = kvtrainer.EmbeddingBagCollection({"users": kvtrainer.Embedding(2)})
    assert collection({}) == {}


def test_tables_of_several_trainers_are_looked_up_together() -> None:
    tables = [kvtrainer.Embedding(2, init="constant", scale=scale) for scale in (1.0, 2.0, 3.0)]
    collection = kvtrainer.EmbeddingBagCollection(dict(zip("abc", tables, strict=True)))
    with (
        trained(tables[1]),
        kvtrainer.Trainer({"x": tables[0].weight, "y": tables[2].weight}, "sgd", kvstore="local"),
    ):
        found = collection({name: torch.tensor([5]) for name in "abc"})
        assert [one.tolist() for one in found.values()] == [[[1.0, 1.0]], [[2.0, 2.0]], [[3.0, 3.0]]]


@pytest.mark.parametrize(
    "ids",
    [
        {"usres": [1]},
        {"users": ([1], torch.tensor([0]))},
        {"users": ()},
        {"words": ([1], torch.tensor([0]), None, None)},
        {"users": [1], "words": [1]},
        {"users": [1], "words": [[0.5]]},
        [1, 2],
    ],
)
def test_a_collection_refuses_what_its_tables_do_not_take(ids: Any) -> None:
    users, words = kvtrainer.Embedding(2), kvtrainer.EmbeddingBag(2)
    collection = kvtrainer.EmbeddingBagCollection({"users": users, "words": words})
    with kvtrainer.Trainer(collection, "sgd", kvstore="local"), pytest.raises(ConfigurationError):
        collection(ids)


def test_an_error_in_a_collection_names_the_feature_and_the_table_that_it_shares() -> None:
    users = kvtrainer.Embedding(2)
    collection = kvtrainer.EmbeddingBagCollection({"user": users, "friend": users})
    with (
        kvtrainer.Trainer(collection, "sgd", kvstore="local"),
        pytest.raises(ConfigurationError, match=r"'friend'.*'user\.weight'"),
    ):
        collection({"user": [1], "friend": [0.5]})


def test_what_a_module_will_be_called_with_is_prefetched() -> None:
    users, words = kvtrainer.Embedding(2, padding_idx=9), kvtrainer.EmbeddingBag(2)
    collection = kvtrainer.EmbeddingBagCollection({"user": users, "friend": users, "words": words})
    batch = {"user": [3, 9], "friend": [3, 4], "words": (torch.tensor([6, 5, 6]), torch.tensor([0, 2]))}
    rows = {
        name: set(row_numbers(np.array(ids)).tolist())
        for name, ids in {"user": [3, 4], "words": [5, 6]}.items()
    }
    with kvtrainer.Trainer(collection, "sgd", kvstore="local") as trainer:
        tables = trainer._pipeline.memory.tables
        for given in ({collection: batch}, {users: [3, 9, 4], words: batch["words"]}):
            trainer.prefetch(given)
            assert [set(one.tolist()) for one in tables.wanted.values()] == list(rows.values())


def test_wrong_ids_to_prefetch_are_refused_and_the_former_ones_stay() -> None:
    users, words = kvtrainer.Embedding(2), kvtrainer.EmbeddingBag(2)
    bag = torch.tensor([6, 5]), torch.tensor([0, 1])
    collection = kvtrainer.EmbeddingBagCollection({"user": users, "words": words})
    with kvtrainer.Trainer(collection, "sgd", kvstore="local") as trainer:
        trainer.prefetch({users: [1]})
        before = trainer._pipeline.memory.tables.wanted
        for wrong in ({words.weight: bag}, {"words.weight": bag}, {"user.weight": (1, 2)}):
            with pytest.raises(ArgumentTypeError, match="weight'"):
                trainer.prefetch(wrong)
        others: list[Any] = [
            {collection: bag}, {collection: {"word": bag}}, {users: bag}, {words: [1]}, {"user": [1]},
            {collection: {"user": [1]}, users: [1]}, {kvtrainer.RowSparseParameter((2, 1)): [1]}, bag, {users: {1}},
            {users: None}, {users: "1"},
        ]  # fmt: skip
        for wrong in others:
            with pytest.raises(ConfigurationError):
                trainer.prefetch(wrong)
        assert trainer._pipeline.memory.tables.wanted == before


@pytest.mark.parametrize(
    "tables", [{"users": torch.nn.Embedding(4, 2)}, {"users": None}, [kvtrainer.Embedding(2)]]
)
def test_a_collection_of_other_modules_is_refused(tables: Any) -> None:
    with pytest.raises(ConfigurationError):
        kvtrainer.EmbeddingBagCollection(tables)
    collection = kvtrainer.EmbeddingBagCollection({})
    with pytest.raises(ConfigurationError):
        collection["users"] = torch.nn.Linear(1, 1)


def test_a_table_without_rows_has_no_state() -> None:
    table, linear = kvtrainer.Embedding(3), torch.nn.Linear(3, 1)
    with kvtrainer.Trainer({"table": table, "linear": linear}, "adagrad", kvstore="local") as trainer:
        assert trainer.state[table.weight] == {}
        state = trainer.state_dict()
        assert list(state["state"]) == [0, 1]
        trainer.load_state_dict(state)
        linear(table([5])).sum().backward()
        trainer.step(1)
        assert trainer.state[table.weight]["rows"].tolist() == row_numbers(np.array([5])).tolist()
