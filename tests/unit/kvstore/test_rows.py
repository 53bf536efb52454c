"""Row-sparse values in the kvstore verbs: pushes and pulls of some rows, in process and on engines, and their bytes."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import kvtrainer
from kvstore_server.protocol import messages as m
from kvstore_server.protocol.frames import decode_frames, encode_frames
from kvstore_server.server import pack_replies
from kvtrainer import RowSparseParameter, Trainer
from kvtrainer.client.client import Client, LoopbackTransport
from kvtrainer.client.session import SessionOptions
from kvtrainer.errors import (
    ConfigurationError,
    KeyNotFoundError,
    RowIdError,
    ShapeMismatchError,
    SparsePullWarning,
)
from kvtrainer.kvstore import LocalKVStore
from kvtrainer.kvstore.verbs import KVStoreVerbs
from tests.support.engines import client_of

Make = Callable[[], KVStoreVerbs]
STORES = [
    pytest.param(LocalKVStore, id="local"),
    pytest.param(lambda: KVStoreVerbs("engines", client_of(3)), id="3-servers"),
]
BIG = (1200, 120)
"""Some slices of 64 KiB."""


def rows(shape: tuple[int, ...], ids: list[int], values: Any, dtype: torch.dtype = torch.float32) -> Tensor:
    """A sparse tensor, not coalesced; `values` are broadcast over the rows."""
    full = torch.zeros(len(ids), *shape[1:], dtype=dtype) + torch.as_tensor(values, dtype=dtype)
    return torch.sparse_coo_tensor(torch.tensor([ids], dtype=torch.int64), full, shape, check_invariants=True)


def store_with(make: Make, **values: Tensor) -> KVStoreVerbs:
    kv = make()
    kv.init(list(values), list(values.values()))
    return kv


def everything(
    kv: KVStoreVerbs, key: str, shape: tuple[int, ...], dtype: torch.dtype = torch.float32
) -> Tensor:
    out = torch.full(shape, float("nan"), dtype=dtype)
    kv.pull(key, out=out)
    return out


@pytest.mark.parametrize(("make", "others"), [(LocalKVStore, 0.0), (STORES[1].values[0], 1.0)])
@pytest.mark.parametrize("shape", [(4, 4), BIG, (5, 2, 3)])
def test_without_an_optimizer_rows_that_are_not_pushed_stay_on_servers_and_become_zero_in_process(
    make: Make, others: float, shape: tuple[int, ...]
) -> None:
    """As in MXNet 1.9.1 and 2.0.0b1."""
    kv = store_with(make, w=torch.ones(shape))
    kv.push("w", rows(shape, [2, 0, 2], 3.0))
    expected = torch.full(shape, others)
    expected[0], expected[2] = 3.0, 6.0
    assert torch.equal(everything(kv, "w", shape), expected)
    assert torch.equal(kv.row_sparse_pull("w", row_ids=[1, 2]).to_dense()[1:3], expected[1:3])


def test_a_push_of_rows_that_a_server_cannot_tell_apart_is_refused_without_an_optimizer() -> None:
    shape = (3, 300_001)
    kv = store_with(STORES[1].values[0], w=torch.ones(shape))
    with pytest.raises(ConfigurationError, match="1 MiB"):
        kv.push("w", rows(shape, [2], 3.0))
    assert torch.equal(everything(kv, "w", shape), torch.ones(shape))
    kv.set_optimizer(kvtrainer.optimizer.create("test", learning_rate=-1.0))
    kv.push("w", rows(shape, [2], 3.0))
    assert everything(kv, "w", shape)[:, 0].tolist() == [1, 1, 4]


@pytest.mark.parametrize("make", STORES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_an_optimizer_adds_the_rows_of_every_push(make: Make, dtype: torch.dtype) -> None:
    kv = store_with(make, w=torch.ones(BIG, dtype=dtype))
    kv.set_optimizer(kvtrainer.optimizer.create("test", learning_rate=-1.0, rescale_grad=2.0))
    for _ in range(3):
        kv.push("w", rows(BIG, [7, 7, 1199], 1.0, dtype))
    expected = torch.ones(BIG, dtype=dtype)
    expected[7] += 3 * 2 * 2
    expected[1199] += 3 * 2
    assert torch.equal(everything(kv, "w", BIG, dtype), expected)


@pytest.mark.parametrize("make", STORES)
def test_replicas_dense_and_sparse_are_summed(make: Make) -> None:
    kv = store_with(make, a=torch.zeros(4, 2), b=torch.zeros(4, 2))
    kv.push(
        ["a", "b"],
        [[rows((4, 2), [1, 1], 1.0), rows((4, 2), [3], 5.0)], [rows((4, 2), [1], 1.0), torch.ones(4, 2)]],
    )
    assert everything(kv, "a", (4, 2))[:, 0].tolist() == [0, 2, 0, 5]
    assert everything(kv, "b", (4, 2))[:, 0].tolist() == [1, 2, 1, 1]


def test_half_precision_is_summed_in_float32() -> None:
    kv = store_with(LocalKVStore, w=torch.zeros(2, 1, dtype=torch.float16))
    # 2048 + 1 is 2048 in float16; eight ones are not lost when they are added up first, or exactly.
    kv.push("w", rows((2, 1), [0] * 9, torch.tensor([[2048.0]] + [[1.0]] * 8), torch.float16))
    assert everything(kv, "w", (2, 1), torch.float16).flatten().tolist() == [2056, 0]


@pytest.mark.parametrize("make", STORES)
def test_no_rows_at_all_are_a_contribution_too(make: Make) -> None:
    kv = store_with(make, w=torch.ones(BIG))
    kv.set_optimizer(kvtrainer.optimizer.create("sgd", learning_rate=0.5, wd=1.0))
    kv.push("w", rows(BIG, [], 1.0))
    assert torch.equal(everything(kv, "w", BIG), torch.full(BIG, 0.5))


def test_a_key_is_initialised_by_a_sparse_value_also_by_zeros() -> None:
    kv = store_with(LocalKVStore, w=rows((3, 2), [1, 1], 2.0), zero=rows((3, 2), [], 0.0))
    assert everything(kv, "w", (3, 2)).tolist() == [[0, 0], [4, 4], [0, 0]]
    assert everything(kv, "zero", (3, 2)).count_nonzero() == 0


@pytest.mark.parametrize("make", STORES)
def test_pushpull_of_rows_writes_the_whole_value(make: Make) -> None:
    kv = store_with(make, w=torch.ones(BIG))
    kv.set_optimizer(kvtrainer.optimizer.create("test", learning_rate=-1.0))
    out = torch.empty(BIG)
    kv.pushpull("w", rows(BIG, [3], 4.0), out=out)
    assert out[:, 0].tolist() == [1, 1, 1, 5] + [1] * 1196
    with pytest.raises(ConfigurationError):
        kv.pushpull("w", rows(BIG, [3], 4.0))


def test_an_updater_is_given_the_rows_as_a_dense_sum() -> None:
    kv = store_with(LocalKVStore, w=torch.ones(4, 2))
    kv.set_updater(lambda key, merged, stored: stored.add_(merged, alpha=10))
    kv.push("w", rows((4, 2), [2], 1.0))
    assert everything(kv, "w", (4, 2))[:, 0].tolist() == [1, 1, 11, 1]


def test_sparse_replicas_are_not_compressed() -> None:
    kv = LocalKVStore("device")
    kv.set_gradient_compression({"type": "2bit", "threshold": 0.5})
    kv.init("w", torch.zeros(4, 1))
    kv.push("w", [rows((4, 1), [1], 0.3), rows((4, 1), [2], 0.2)])
    assert everything(kv, "w", (4, 1)).flatten().tolist() == pytest.approx([0, 0.3, 0.2, 0])


ID_FORMS = {
    "int64": torch.tensor([5, 1, 5]),
    "2-d int16": torch.tensor([[5], [1]], dtype=torch.int16),
    "uint8": torch.tensor([1, 5], dtype=torch.uint8),
    "whole floats": torch.tensor([5.0, 1.0, 1.0]),
    "a list": [5, 1],
    "numpy": np.array([[1, 5]], dtype=np.uint32),
}


@pytest.mark.parametrize("make", STORES)
@pytest.mark.parametrize("form", ID_FORMS)
def test_row_sparse_pull_gives_the_unique_rows(make: Make, form: str) -> None:
    value = torch.arange(24.0).view(6, 4)
    kv = store_with(make, w=value)
    found = kv.row_sparse_pull("w", row_ids=ID_FORMS[form])
    assert isinstance(found, Tensor)
    assert found.is_coalesced()
    assert found.shape == value.shape
    assert found.indices().tolist() == [[1, 5]]
    assert torch.equal(found.values(), value[[1, 5]])


@pytest.mark.parametrize("make", STORES)
@pytest.mark.parametrize("shape", [BIG, (40, 7, 301), (3, 300_001)])
def test_rows_of_every_slice_come_from_where_they_are(make: Make, shape: tuple[int, ...]) -> None:
    value = torch.rand(shape)
    kv = store_with(make, w=value)
    ids = torch.randint(shape[0], (200,), generator=torch.Generator().manual_seed(0))
    dense, sparse = torch.full(shape, 9.0), rows(shape, [0], 1.0)
    kv.row_sparse_pull("w", out=[dense, sparse], row_ids=ids)
    expected = torch.zeros(shape)
    expected[ids] = value[ids]
    assert torch.equal(dense, expected)
    assert torch.equal(sparse.to_dense(), expected)


@pytest.mark.parametrize("make", STORES)
def test_no_ids_give_no_rows_and_zeros(make: Make) -> None:
    kv = store_with(make, w=torch.ones(4, 2))
    out = torch.ones(4, 2)
    found = kv.row_sparse_pull("w", out=out, row_ids=[])
    assert isinstance(found, Tensor)
    assert found.values().shape == (0, 2)
    assert out.count_nonzero() == 0


def test_each_out_may_have_ids_of_its_own() -> None:
    kv = store_with(LocalKVStore, w=torch.arange(4.0).view(4, 1))
    outs = [torch.zeros(4, 1, dtype=torch.float64), torch.zeros(4, 1)]
    found = kv.row_sparse_pull("w", out=outs, row_ids=[torch.tensor([1]), torch.tensor([3, 2])])
    assert [out.flatten().tolist() for out in outs] == [[0, 1, 0, 0], [0, 0, 2, 3]]
    assert [one.indices().tolist() for one in found] == [[[1]], [[2, 3]]]


def test_a_list_of_keys_gives_a_list_with_one_set_of_ids_or_one_each() -> None:
    kv = store_with(LocalKVStore, a=torch.arange(3.0).view(3, 1), b=torch.arange(3.0).view(3, 1) + 10)
    shared = kv.row_sparse_pull(["a", "b"], row_ids=torch.tensor([2]))
    assert [one.values().item() for one in shared] == [2, 12]
    outs = [torch.zeros(3, 1), torch.zeros(3, 1)]
    kv.row_sparse_pull(["a", "b"], out=outs, row_ids=[torch.tensor([1]), torch.tensor([0])])
    assert [out.flatten().tolist() for out in outs] == [[0, 1, 0], [10, 0, 0]]


@pytest.mark.parametrize("make", STORES)
def test_a_vector_has_rows_of_one_number(make: Make) -> None:
    """The numbers are those of MXNet 1.9.1."""
    kv = store_with(make, w=torch.tensor([1.0, 2.0, 3.0, 4.0]))
    out = torch.empty(4)
    assert kv.row_sparse_pull("w", out=out, row_ids=[1, 3]).coalesce().values().tolist() == [2, 4]
    assert out.tolist() == [0, 2, 0, 4]
    kv.set_optimizer(kvtrainer.optimizer.create("sgd", learning_rate=1.0))
    kv.push("w", torch.sparse_coo_tensor([[1]], [3.0], (4,), check_invariants=True))
    assert everything(kv, "w", (4,)).tolist() == [1, -1, 3, 4]


def test_pull_leaves_sparse_tensors_alone_and_warns_once() -> None:
    kv = store_with(LocalKVStore, w=torch.ones(4, 1), x=torch.ones(2, 1))
    sparse, dense = rows((4, 1), [0], 2.0), torch.zeros(2, 1)
    with pytest.warns(SparsePullWarning, match=r"'w'.*row_sparse_pull") as warned:
        kv.pull(["w", "x"], out=[sparse, dense])
    assert warned[0].filename == __file__
    assert sparse.to_dense().flatten().tolist() == [2, 0, 0, 0]
    assert dense.flatten().tolist() == [1, 1]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kv.pull("w", out=sparse)


def test_pull_that_does_not_ignore_sparse_tensors_copies_in_process_as_mxnet_does() -> None:
    kv = store_with(LocalKVStore, w=torch.tensor([[1.0, 2.0], [0.0, 0.0], [3.0, 4.0]]), x=torch.ones(2, 1))
    sparse, half, dense = rows((3, 2), [1], 9.0), rows((3, 2), [], 0.0, torch.float16), torch.zeros(2, 1)
    kv.pull(["w", "x"], out=[[sparse, half], dense], ignore_sparse=False)
    for out in (sparse, half):
        assert out.coalesce().indices().tolist() == [[0, 2]]
        assert out.coalesce().values().tolist() == [[1, 2], [3, 4]]
    assert dense.flatten().tolist() == [1, 1]
    with pytest.raises(ShapeMismatchError):
        kv.pull("x", out=sparse, ignore_sparse=False)


def test_pull_from_servers_that_does_not_ignore_sparse_tensors_is_refused() -> None:
    kv = store_with(STORES[1].values[0], w=torch.ones(4, 1))
    with pytest.raises(ConfigurationError, match="row_sparse_pull"):
        kv.pull("w", out=rows((4, 1), [0], 2.0), ignore_sparse=False)


WRONG: dict[str, tuple[Callable[[KVStoreVerbs], object], type[Exception], str]] = {
    "id too high": (lambda kv: kv.row_sparse_pull("w", row_ids=[3, 4, 9, 1]), RowIdError, r"rows 0 to 3.* 4, 9$"),
    "negative id": (lambda kv: kv.row_sparse_pull("w", row_ids=torch.tensor([-1])), RowIdError, "-1"),
    "a broken id": (lambda kv: kv.row_sparse_pull("w", row_ids=torch.tensor([0.5])), ConfigurationError, "whole"),
    "booleans": (lambda kv: kv.row_sparse_pull("w", row_ids=torch.tensor([True])), ConfigurationError, "whole"),
    "no ids": (lambda kv: kv.row_sparse_pull("w"), ConfigurationError, "row_ids=…"),
    "text": (lambda kv: kv.row_sparse_pull("w", row_ids="12"), ConfigurationError, "whole numbers"),
    "unknown key": (lambda kv: kv.row_sparse_pull("no", row_ids=[0]), KeyNotFoundError, "'no'"),
    "other kind of key": (lambda kv: kv.row_sparse_pull(3, row_ids=[0]), ConfigurationError, "str keys"),
    "number": (lambda kv: kv.row_sparse_pull("v", row_ids=[0]), ShapeMismatchError, "no dimension"),
    "wrong out": (
        lambda kv: kv.row_sparse_pull("w", out=torch.zeros(2, 4), row_ids=[0]), ShapeMismatchError, r"\[4, 2\]"),
    "outs and ids": (
        lambda kv: kv.row_sparse_pull("w", out=[torch.zeros(4, 2)], row_ids=[torch.tensor([0])] * 2),
        ConfigurationError, "1 outs but 2 row_ids"),
    "keys and ids": (
        lambda kv: kv.row_sparse_pull(["w"], row_ids=[torch.tensor([0])] * 2), ConfigurationError, "1 row_ids, got 2"),
    "push of another shape": (lambda kv: kv.push("w", rows((5, 2), [4], 1.0)), ShapeMismatchError, r"\[5, 2\]"),
    "push of another dtype": (
        lambda kv: kv.push("w", rows((4, 2), [1], 1, torch.int64)), ShapeMismatchError, "int64"),
    "push of elements": (lambda kv: kv.push("w", torch.ones(4, 2).to_sparse()), ConfigurationError, "sparse_dim 2"),
    "push of csr": (lambda kv: kv.push("w", torch.eye(4, 2).to_sparse_csr()), ConfigurationError, "sparse_csr"),
    "init of integers": (lambda kv: kv.init("i", rows((4, 2), [1], 1, torch.bool)), ConfigurationError, "bool"),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state:UserWarning")
@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_call_is_explained_and_changes_nothing(case: str) -> None:
    call, error, said = WRONG[case]
    kv = store_with(LocalKVStore, w=torch.ones(4, 2), v=torch.ones(()))
    with pytest.raises(error, match=said):
        call(kv)
    assert torch.equal(everything(kv, "w", (4, 2)), torch.ones(4, 2))
    kv.push("w", torch.full((4, 2), 2.0))
    assert everything(kv, "w", (4, 2))[0, 0] == 2


WIDTH = 64


class Counting(LoopbackTransport):
    """Turns every message into bytes and back, and counts them."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.nbytes = 0

    def send(self, server: int, request: m.Request, priority: int = 0) -> None:
        frames = [bytes(frame) for frame in encode_frames(request)]
        self.nbytes += sum(map(len, frames))
        super().send(server, m.Request(*decode_frames([bytearray(frame) for frame in frames])), priority)
        told = [m.Outgoing(b"", reply) for _, reply in self._replies]
        self._replies.clear()
        self._replies.extend((server, out.reply) for out in pack_replies(told))  # as the server's loop does

    def receive(self, timeout: float) -> tuple[int, m.Reply] | None:
        got = super().receive(timeout)
        if got is None:
            return None
        frames = [bytes(frame) for frame in encode_frames(got[1])]
        self.nbytes += sum(map(len, frames))
        return got[0], m.Reply(*decode_frames([bytearray(frame) for frame in frames])[2:])


class CountingStore(LocalKVStore):
    """Its Trainers' messages are counted."""

    transport: Counting

    def open_client(self, by_host: bool = False, resumes: bool = False) -> Client:
        self.transport = Counting([self._engine._engine], time.monotonic)
        client = Client(self.transport, SessionOptions("trainer", 0, 1), time.monotonic)
        client.connect()
        return client


def embedding(num_rows: int) -> tuple[nn.Parameter, Callable[[Tensor], Tensor]]:
    module = nn.Embedding(num_rows, WIDTH, sparse=True)
    return module.weight, module


def row_sparse(num_rows: int) -> tuple[nn.Parameter, Callable[[Tensor], Tensor]]:
    table = RowSparseParameter((num_rows, WIDTH))
    return table, table.row_sparse_data


def bytes_of_a_step(
    make: Callable[[int], Any], num_rows: int, touched: int, dense: int = 0, **options: Any
) -> int:
    """Bytes of the third step and the pull of its rows; the first ones make the store and begin to keep weights."""
    table, look_up = make(num_rows)
    others = [nn.Parameter(torch.ones(10)) for _ in range(dense)]
    store = CountingStore()
    options = {"learning_rate": 0.1, **options}
    trainer = Trainer([*others, table], "sgd", options, kvstore=store, update_on_kvstore=True)
    before = 0
    for _ in range(3):
        before = store.transport.nbytes if hasattr(store, "transport") else 0
        look_up(torch.arange(touched) * (num_rows // touched)).sum().backward()
        trainer.step(1, ignore_stale_grad=True)
    return store.transport.nbytes - before


@pytest.mark.parametrize("make", [embedding, row_sparse])
def test_a_table_of_twice_as_many_rows_costs_nothing_more(make: Callable[[int], Any]) -> None:
    small, large = (bytes_of_a_step(make, num_rows, 40) for num_rows in (8_000, 16_000))
    assert large == small


@pytest.mark.parametrize("make", [embedding, row_sparse])
def test_twice_as_many_rows_that_are_touched_cost_twice_as_much(make: Callable[[int], Any]) -> None:
    none, few, many = (bytes_of_a_step(make, 16_000, touched) for touched in (1, 81, 161))
    assert many - few == pytest.approx(few - none, rel=0.02)
    # Gradients go up and values come down, of 64 numbers of 4 bytes, each with an id of 4 bytes.
    assert (many - few) / 80 == pytest.approx(2 * (WIDTH + 1) * 4, rel=0.02)


@pytest.mark.parametrize("options", [{}, {"momentum": 0.9, "lazy_update": True}])
def test_the_whole_table_would_cost_a_hundred_times_as_much(options: dict[str, Any]) -> None:
    assert bytes_of_a_step(embedding, 16_000, 40, **options) < 2 * 16_000 * WIDTH * 4 / 100


def test_keys_that_are_left_out_cost_nothing_beside_rows() -> None:
    # One bucket holds the table and the vectors, which have no gradient.
    alone, beside = (bytes_of_a_step(embedding, 60, 4, dense) for dense in (0, 50))
    assert beside < alone + 50 * 10


def test_a_store_pulls_only_the_rows_that_are_asked_for() -> None:
    store = CountingStore()
    client = store.open_client()
    store._connected = client
    store.init("w", torch.ones(16_000, WIDTH))
    costs = []
    for count in (1, 101, 201):
        before = store.transport.nbytes
        store.row_sparse_pull("w", row_ids=torch.arange(count) * 79)
        costs.append(store.transport.nbytes - before)
    assert costs[2] - costs[1] == pytest.approx(100 * (WIDTH + 1) * 4, rel=0.02)
    assert costs[1] - costs[0] == pytest.approx(100 * (WIDTH + 1) * 4, rel=0.05)
