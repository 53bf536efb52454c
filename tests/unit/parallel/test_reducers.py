"""In which order replicas are summed, and who may choose it; everything on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import Linear, Parameter

from kvtrainer import DataParallel, Trainer, kvstore
from kvtrainer.errors import ConfigurationError
from kvtrainer.parallel.replicas import REDUCERS, flat_replica_sum, make_replica_reducer, tree_replica_sum
from tests.support.pairwise import pairwise
from tests.support.replica_training import STORES, backward, embedding, replicas, values

CPU = torch.device("cpu")
NAMES = [name for name in REDUCERS if name != "nccl"]
ON_CPU = pytest.mark.parametrize("name", NAMES)
BIG4, BIG8 = [1e8, 1.0, -1e8, 1.0], [1e8, 1.0, -1e8, 1.0, 1.0, 1.0, 1.0, 1.0]


def summed(name: str, parts: list[torch.Tensor]) -> torch.Tensor:
    own = [part.clone() for part in parts]
    make_replica_reducer(name, [part.device for part in parts]).sum(own)
    return own[0]


def numbers(slopes: list[float], dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return [torch.full((3,), slope, dtype=dtype) for slope in slopes]


@pytest.mark.parametrize(
    ("name", "slopes", "expected"),
    [
        ("tree", BIG4, 0.0),
        ("flat", BIG4, 1.0),
        ("coalesced", BIG4, 1.0),
        ("auto", BIG4, 1.0),
        ("tree", BIG8, 4.0),
        ("flat", BIG8, 5.0),
        ("tree", [1e8, 1.0], 1e8),
        ("tree", [1e8, 1.0, -1e8], 0.0),
        ("tree", [1e8, -1e8, 1.0], 1.0),
    ],
)
def test_sums_show_the_order_of_additions(name: str, slopes: list[float], expected: float) -> None:
    assert summed(name, numbers(slopes)).tolist() == [expected] * 3


def test_tree_of_eight_adds_neighbours_then_pairs_then_halves() -> None:
    torch.manual_seed(1)
    a, b, c, d, e, f, g, h = parts = [torch.randn(1000) for _ in range(8)]
    assert torch.equal(summed("tree", parts), ((a + b) + (c + d)) + ((e + f) + (g + h)))


@pytest.mark.parametrize(
    ("name", "count", "dtype"),
    pairwise(NAMES, [2, 3, 4, 7, 8], [torch.float64, torch.float32, torch.float16, torch.bfloat16]),
)
def test_every_reducer_agrees_with_the_sum_in_float64(name: str, count: int, dtype: torch.dtype) -> None:
    torch.manual_seed(count)
    parts = [torch.randn(501).to(dtype) for _ in range(count)]
    exact = torch.stack([part.double() for part in parts]).sum(0)
    found = summed(name, parts)
    assert found.dtype == dtype
    eps = torch.finfo(dtype).eps
    assert torch.allclose(found.double(), exact, rtol=eps, atol=8 * torch.finfo(torch.float32).eps)


@ON_CPU
def test_half_precision_is_summed_in_float32_and_rounded_once(name: str) -> None:
    """2048 + 1 is 2048 in half precision; 2048 + 1 + 1 + 0 is 2050."""
    assert summed(name, numbers([2048.0, 1.0, 1.0, 0.0], torch.float16)).tolist() == [2050.0] * 3


def test_coalesced_sums_more_than_one_buffer() -> None:
    parts = [torch.full((3_000_001,), float(at)) for at in range(3)]
    assert summed("coalesced", parts).unique().tolist() == [3.0]


@ON_CPU
def test_broadcast_gives_everyone_the_first_ones_numbers(name: str) -> None:
    source, targets = torch.arange(5.0), [torch.zeros(5), torch.ones(5)]
    make_replica_reducer(name, [CPU] * 3).broadcast(source, targets)
    assert all(torch.equal(target, source) for target in targets)


@pytest.mark.parametrize(
    ("count", "reach", "kind"),
    [
        (2, lambda a, b: True, tree_replica_sum),
        (2, lambda a, b: False, flat_replica_sum),
        (4, lambda a, b: True, tree_replica_sum),
        (4, lambda a, b: a // 2 == b // 2, tree_replica_sum),
        (4, lambda a, b: a % 2 == b % 2, flat_replica_sum),
        (8, lambda a, b: True, tree_replica_sum),
        (8, lambda a, b: a // 2 == b // 2, flat_replica_sum),
        (3, lambda a, b: True, flat_replica_sum),
    ],
)
def test_automatic_choice_is_the_tree_where_devices_connect(count: int, reach: Any, kind: Any) -> None:
    devices = [torch.device("cuda", at) for at in range(count)]
    assert make_replica_reducer("auto", devices, reach).sum is kind
    assert make_replica_reducer("auto", [CPU] * count, reach).sum is flat_replica_sum


@pytest.mark.parametrize("devices", [[CPU, CPU], [torch.device("cuda", 0)] * 2])
def test_nccl_needs_distinct_cuda_devices(devices: list[torch.device]) -> None:
    with pytest.raises(ConfigurationError, match=r"cpu|cuda"):
        make_replica_reducer("nccl", devices)


@pytest.mark.parametrize("given", ["ring", "TREE", None, 3])
def test_unknown_reducer_is_refused_with_the_known_ones(given: Any) -> None:
    for call in (
        lambda: kvstore.create("device", reducer=given),
        lambda: DataParallel(Linear(1, 1), ["cpu"] * 2, reducer=given),
    ):
        with pytest.raises(ConfigurationError, match="one of 'auto', 'nccl', 'tree', 'flat', 'coalesced'"):
            call()


@pytest.mark.parametrize("in_store", [True, False])
@pytest.mark.parametrize(
    ("name", "slopes", "expected"),
    [("tree", BIG4, 0.0), ("flat", BIG4, -1.0), ("coalesced", BIG4, -1.0), ("tree", BIG8, -4.0)],
)
def test_store_sums_in_its_order(name: str, slopes: list[float], expected: float, in_store: bool) -> None:
    w = replicas(len(slopes))
    store = kvstore.create("device", reducer=name)
    trainer = Trainer([w], "sgd", {"lr": 1.0}, kvstore=store, update_on_kvstore=in_store)
    backward(w, slopes)
    trainer.step(1)
    assert values(w) == [expected] * len(slopes)


def test_pushed_replicas_are_summed_in_the_order_of_the_store() -> None:
    for name, expected in (("tree", 0.0), ("flat", 1.0), ("auto", 1.0)):
        kv: Any = kvstore.create("device", reducer=name)
        kv.init("w", torch.zeros(3))
        given, out = numbers(BIG4), torch.zeros(3)
        kv.push("w", given)
        kv.pull("w", out=out)
        assert out.tolist() == [expected] * 3
        assert [one[0].item() for one in given] == BIG4


@STORES
def test_a_gradient_that_replicas_lack_is_zero_in_the_tree(name: str, in_store: bool | None) -> None:
    model = DataParallel(Linear(3, 1, bias=False), ["cpu"] * 4, reducer="tree")
    model.apply(lambda one: torch.nn.init.zeros_(one.weight) if isinstance(one, Linear) else None)
    trainer = Trainer(model, "sgd", {"lr": 1.0}, kvstore=name, update_on_kvstore=in_store)
    [w] = model.params
    backward(w, [1e8, None, -1e8, 1.0])
    trainer.step(1)
    assert values(w) == [0.0] * 4


@pytest.mark.parametrize("in_store", [True, False])
def test_rows_are_added_from_left_to_right_beside_dense_gradients_in_a_tree(in_store: bool) -> None:
    nets, w = embedding(4), replicas(4)
    before = nets[0].weight.detach().clone()
    store = kvstore.create("device", reducer="tree")
    options: dict[str, Any] = {"lr": 1.0, "lazy_update": True}
    trainer = Trainer(
        {"e": [net.weight for net in nets], "w": w}, "sgd", options, store, update_on_kvstore=in_store
    )
    for net, p, slope in zip(nets, w, BIG4, strict=True):
        (net(torch.tensor([2])).sum() * slope + p.sum() * slope).backward()
    trainer.step(1)
    assert values(w) == [0.0] * 4
    assert torch.allclose(nets[3].weight[2], before[2] - 1.0)


def test_reducer_that_would_have_no_effect_is_refused() -> None:
    tree: Any = kvstore.create("device", reducer="tree")
    with pytest.raises(ConfigurationError, match="'tree' would have no effect: it sums replicas"):
        Trainer([Parameter(torch.zeros(2))], "sgd", kvstore=tree)
    with pytest.raises(ConfigurationError, match="would have no effect"):
        DataParallel(Linear(1, 1), ["cpu"], reducer="tree")
    two = {"type": "2bit"}
    for call in (
        lambda: Trainer([replicas()], "sgd", kvstore=tree, compression_params=two),
        lambda: tree.set_gradient_compression(two),
    ):
        with pytest.raises(ConfigurationError, match="reducer='tree'"):
            call()
    with pytest.raises(ConfigurationError, match="'local' does not take these options"):
        kvstore.create("local", reducer="tree")


def test_left_fold_and_compression_go_together() -> None:
    w = replicas()
    store = kvstore.create("device", reducer="flat")
    params = {"type": "2bit", "threshold": 0.5}
    trainer = Trainer([w], "sgd", {"lr": 1.0}, kvstore=store, compression_params=params)
    backward(w, [0.75, 0.25])
    trainer.step(1)
    assert values(w) == [-0.5, -0.5]


def test_model_and_store_that_ask_for_different_reducers_are_refused() -> None:
    model = DataParallel(Linear(1, 1), ["cpu"] * 2, reducer="flat")
    with pytest.raises(ConfigurationError, match="has reducer='flat' and the kvstore reducer='tree'"):
        Trainer(model, "sgd", kvstore=kvstore.create("device", reducer="tree"))


@pytest.mark.parametrize("given", [0, -2, float("nan"), float("inf"), True, "25"])
def test_bucket_size_must_be_a_positive_number_or_minus_one(given: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"bucket_size_mb .*-1.* must be .*above 0"):
        kvstore.create("device", bucket_size_mb=given)
    store: Any = kvstore.create("device")
    with pytest.raises(ConfigurationError, match=r"bucket_size_mb .* must be"):
        store.bucket_size_mb = given
    assert store.bucket_size_mb is None


def test_bucket_size_beside_a_collective_for_every_parameter_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="no effect with coalesce=False"):
        kvstore.create("device", bucket_size_mb=25, coalesce=False)
    with pytest.raises(ConfigurationError, match="coalesce must be True or False"):
        kvstore.create("device", coalesce=1)
    store: Any = kvstore.create("device", bucket_size_mb=0.5)
    with pytest.raises(ConfigurationError, match="no effect with coalesce=False"):
        store.coalesce = False
    store.bucket_size_mb = -1
    store.coalesce = False
    assert (store.bucket_size_mb, store.coalesce) == (-1, False)
