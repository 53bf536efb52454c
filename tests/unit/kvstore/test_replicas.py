"""Replicas within one process: their sums; and their compression, with a residual for each of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from kvtrainer import kvstore, optimizer
from kvtrainer.client.replica_sums import merge_replicas
from kvtrainer.errors import ConfigurationError, NonFiniteGradientError, OptimizerError
from kvtrainer.kvstore import DeviceKVStore, LocalKVStore

TWO_BIT = {"type": "2bit", "threshold": 0.5}
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def device(params: Any = TWO_BIT, dtype: torch.dtype = torch.float32, name: str = "device") -> DeviceKVStore:
    store = kvstore.create(name)
    assert isinstance(store, DeviceKVStore)
    store.set_gradient_compression(params)
    store.init("w", torch.zeros(5, dtype=dtype))
    return store


def pushed(store: DeviceKVStore, *values: float, dtype: torch.dtype = torch.float32) -> float:
    """Push a replica for each value; the one distinct number that is in the store then."""
    store.push("w", [torch.full((5,), value, dtype=dtype) for value in values])
    out = torch.empty(5, dtype=dtype)
    store.pull("w", out=out)
    [value] = out.unique().tolist()
    return float(value)


def test_a_single_value_is_copied_only_where_it_is_not_contiguous() -> None:
    value = torch.arange(6.0).view(2, 3)
    assert merge_replicas([value]).data_ptr() == value.data_ptr()
    assert merge_replicas([value.t()]).tolist() == [0, 3, 1, 4, 2, 5]


def test_sum_is_a_left_fold_and_leaves_the_replicas_alone() -> None:
    replicas = [torch.tensor([value]) for value in (1e8, 1.0, -1e8)]
    total = merge_replicas(replicas)
    # In float32 1e8 + 1 is 1e8; any other order would give 1.
    assert total.tolist() == [0]
    assert [replica.item() for replica in replicas] == [1e8, 1, -1e8]


def test_replicas_of_different_memory_order_are_summed_by_position() -> None:
    value = torch.arange(6.0).view(2, 3)
    total = merge_replicas([value, value.t().contiguous().t()])
    assert total.tolist() == (2 * value).flatten().tolist()


@pytest.mark.parametrize("name", ["device", "local_allreduce_device"])
@pytest.mark.parametrize("verb", ["push", "pushpull"])
def test_two_replicas_of_0_3_fire_in_every_second_step_but_one(name: str, verb: str) -> None:
    store = device(name=name)
    store.set_optimizer(optimizer.create("sgd", learning_rate=1.0))
    seen = []
    out = torch.empty(5)
    for _ in range(4):
        replicas = [torch.full((5,), 0.3)] * 2
        if verb == "push":
            store.push("w", replicas)
            store.pull("w", out=out)
        else:
            store.pushpull("w", replicas, out=out)
        seen += out.unique().tolist()
    assert seen == [0, -1, -1, -2]


def test_a_replica_that_is_missing_for_once_keeps_its_residual() -> None:
    store = device()
    assert [pushed(store, 0.0, 0.3), pushed(store, 0.0), pushed(store, 0.0, 0.3)] == [0.0, 0.0, 0.5]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "params",
    [
        TWO_BIT,
        {"type": "1bit", "threshold": 0.25},
        {"type": "int8"},
        {"type": "fp16"},
        {"type": "bf16"},
        {"type": "topk", "ratio": 0.25},
    ],
)
def test_every_dtype_follows_one_rule_with_a_residual(dtype: torch.dtype, params: dict[str, Any]) -> None:
    store = device(params, dtype)
    generator = torch.Generator().manual_seed(3)
    compute = np.float64 if dtype == torch.float64 else np.float32
    residuals = [np.zeros(5, compute) for _ in range(3)]
    for _ in range(5):
        replicas = [torch.randn(5, generator=generator).to(dtype) for _ in residuals]
        store.push("w", replicas)
        total = np.zeros(5, compute)
        for residual, replica in zip(residuals, replicas, strict=True):
            residual += replica.to(torch.float64 if compute is np.float64 else torch.float32).numpy()
            said = quantised(params, residual, dtype)
            residual -= said
            total += said
        out = torch.empty(5, dtype=dtype)
        store.pull("w", out=out)
        assert torch.equal(out, torch.from_numpy(total).to(dtype))


def quantised(params: dict[str, Any], total: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    """What is said of residual plus gradient, by the formulas."""
    t = params.get("threshold")
    if params["type"] == "2bit":
        return np.where(total >= t, t, np.where(total <= -t, -t, 0)).astype(total.dtype)
    if params["type"] == "1bit":
        return np.where(total > t, 1, -1).astype(total.dtype)
    if params["type"] == "int8":
        scale = np.float32(np.abs(total).max() / 127)
        return np.rint(total * (np.float32(1) / scale)) * scale
    if params["type"] == "topk":
        is_sent = np.isin(np.arange(5), np.argsort(-np.abs(total), kind="stable")[:2])
        return np.where(is_sent, total, 0).astype(total.dtype)
    wire = {"fp16": torch.float16, "bf16": torch.bfloat16}[params["type"]]
    exact = torch.from_numpy(total)
    rounded = exact if wire == dtype else exact.to(torch.float32).to(wire)
    return rounded.to(exact.dtype).numpy().copy()


def test_a_round_that_fails_leaves_the_residuals_of_its_keys_alone() -> None:
    store = device()
    store.init("v", torch.zeros(5))

    def updater(key: Any, merged: Tensor, stored: Tensor) -> None:
        if key == "v" and store_fails:
            raise ValueError("not now")
        stored.copy_(merged)

    store.set_updater(updater)
    store_fails = True
    with pytest.raises(OptimizerError, match="not now"):
        store.push(["v", "w"], [torch.full((5,), 0.3)] * 2)
    store_fails = False
    store.push(["v", "w"], [torch.full((5,), 0.3)] * 2)
    outs = [torch.empty(5), torch.empty(5)]
    store.pull(["v", "w"], out=outs)
    assert [out.unique().tolist() for out in outs] == [[0.0], [0.5]]


def test_a_replica_that_is_not_finite_changes_nothing() -> None:
    store = device()
    assert pushed(store, 0.3, 0.3) == 0.0
    with pytest.raises(NonFiniteGradientError):
        pushed(store, 0.3, float("inf"))
    assert pushed(store, 0.2, 0.2) == 1.0


def test_initial_values_are_never_compressed() -> None:
    store = kvstore.create("device")
    assert isinstance(store, DeviceKVStore)
    store.set_gradient_compression(TWO_BIT)
    store.init("w", torch.full((5,), 0.3))
    out = torch.empty(5)
    store.pull("w", out=out)
    assert torch.equal(out, torch.full((5,), 0.3))


def test_another_compression_starts_with_fresh_residuals_and_none_ends_it() -> None:
    store = device()
    assert pushed(store, 0.4) == 0.0
    store.set_gradient_compression(TWO_BIT)
    assert pushed(store, 0.4) == 0.0
    store.set_gradient_compression({"type": "none"})
    assert pushed(store, 0.25) == 0.25


def test_the_callers_replicas_stay_as_they_were() -> None:
    store = device()
    replicas = [torch.full((5,), 0.7), torch.full((5,), 0.3)]
    store.push("w", replicas)
    assert [replica.unique().item() for replica in replicas] == pytest.approx([0.7, 0.3])


@pytest.mark.parametrize("name", ["local", "local_update_cpu", "local_allreduce_cpu"])
def test_local_refuses_compression_and_says_so(name: str) -> None:
    store = LocalKVStore(name)
    assert not store.is_capable("gradient_compression")
    with pytest.raises(ConfigurationError, match=f"not supported for kvstore '{name}'"):
        store.set_gradient_compression(TWO_BIT)
