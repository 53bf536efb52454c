"""The kvstore verbs on the local store, by MXNet's own expectations."""

from __future__ import annotations

from collections.abc import Callable
from linecache import getline
from typing import Any

import pytest
import torch
from torch import Tensor

from kvstore_server.plan import TensorSpec
from kvtrainer import optimizer
from kvtrainer.errors import ConfigurationError, OptimizerError
from kvtrainer.kvstore import LocalKVStore
from kvtrainer.kvstore.verbs import KVStoreVerbs
from tests.support.engines import client_of
from tests.support.interrupts import Interrupt, lines_of
from tests.support.local_stores import SHAPE, full, local, pulled

STR_KEYS, INT_KEYS = ["b", "c", "d"], [5, 7, 11]
KEYS = pytest.mark.parametrize("keys", [STR_KEYS, INT_KEYS], ids=["str", "int"])
VERBS = ["push+pull", "pushpull", "pushpull in place"]


@KEYS
def test_push_without_optimizer_replaces_the_value(keys: list[Any]) -> None:
    store = local(keys)
    for value in (1.0, 5.0):
        store.push(keys[0], full(value))
        assert pulled(store, keys[0]).equal(full(value))
    assert pulled(store, keys[1]).equal(full(0))


@KEYS
@pytest.mark.parametrize("sequence", [list, tuple])
def test_list_of_keys_takes_a_list_of_values(keys: list[Any], sequence: Any) -> None:
    store = local(keys)
    store.push(sequence(keys), sequence([full(4)] * 3))
    store.push(sequence(), sequence())
    outs = [torch.empty(SHAPE) for _ in keys]
    store.pull(sequence(keys), out=sequence(outs))
    assert all(out.equal(full(4)) for out in outs)


@pytest.mark.parametrize("key", [2**63 - 1, -(2**63), "", "\0", "schlüssel", "鍵", "🔑", "k" * 1024])
def test_keys_of_64_bits_and_of_any_text_are_taken(key: Any) -> None:
    store = local([key], 2.0)
    assert pulled(store, key).equal(full(2))


@KEYS
@pytest.mark.parametrize("verb", VERBS)
def test_four_replicas_are_summed_and_all_get_the_sum(keys: list[Any], verb: str) -> None:
    store = local(keys)
    for key, factor in ((keys[0], 1.0), (keys, 2.0)):
        replicas = [full(factor) for _ in range(4)]
        value: Any = [list(map(torch.clone, replicas)) for _ in keys] if isinstance(key, list) else replicas
        out: Any = (
            [[torch.empty(SHAPE) for _ in range(4)] for _ in keys] if isinstance(key, list) else replicas
        )
        if verb == "push+pull":
            store.push(key, value)
            store.pull(key, out)
        elif verb == "pushpull":
            store.pushpull(key, value, out=out)
        else:
            store.pushpull(key, value)
            out = value
        flat = [one for per_key in out for one in per_key] if isinstance(key, list) else out
        assert all(one.equal(full(4 * factor)) for one in flat)


@pytest.mark.parametrize("verb", ["push", "pushpull"])
def test_values_of_a_repeated_key_are_summed_and_every_out_of_it_is_written(verb: str) -> None:
    store = local(STR_KEYS)
    keys, value = ["b", "c", "b"], [full(1), full(5), [full(2), full(4)]]
    outs = [torch.empty(SHAPE) for _ in keys]
    if verb == "push":
        store.push(keys, value)
        store.pull(keys, outs)
    else:
        store.pushpull(keys, value, out=outs)
    assert [out[0, 0].item() for out in outs] == [7, 5, 7]


def test_updater_changes_the_stored_value_in_place() -> None:
    """MXNet's updater test: four pushes of four ones with `stored += merged` make 16."""
    store = local(INT_KEYS)
    seen: list[Any] = []

    def add(key: Any, merged: Tensor, stored: Tensor) -> None:
        seen.append(key)
        stored += merged

    store.set_updater(add)
    for _ in range(4):
        store.push(INT_KEYS, [[full(1)] * 4] * 3)
    assert all(pulled(store, key).equal(full(16)) for key in INT_KEYS)
    assert seen == INT_KEYS * 4


def test_updater_that_raises_is_reported_by_the_push_and_leaves_the_value() -> None:
    store = local(["w"], 2.0)

    def fail(key: Any, merged: Tensor, stored: Tensor) -> None:
        stored += 100
        raise ArithmeticError("no good")

    store.set_updater(fail)
    with pytest.raises(OptimizerError, match="ArithmeticError"):
        store.push("w", full(1))
    assert pulled(store, "w").equal(full(2))
    store.set_updater(lambda key, merged, stored: stored.add_(merged))
    store.push("w", full(1))
    assert pulled(store, "w").equal(full(3))


REENTRANT: dict[str, Callable[[LocalKVStore], object]] = {
    "push": lambda kv: kv.push("w", full(1)),
    "push of another key": lambda kv: kv.push("v", full(1)),
    "pull": lambda kv: kv.pull("w", out=full(0)),
    "pushpull": lambda kv: kv.pushpull("v", full(1)),
    "init": lambda kv: kv.init("x", full(1)),
    "set_optimizer": lambda kv: kv.set_optimizer("sgd"),
    "barrier": lambda kv: kv.barrier(),
    "server_stats": lambda kv: kv.server_stats(),
    "close": lambda kv: kv.close(),
}


@pytest.mark.parametrize("case", REENTRANT)
def test_updater_that_calls_its_own_store_is_told_of_re_entrance_and_leaves_the_values(case: str) -> None:
    store = local(["w", "v"], 2.0)

    def call_store(key: Any, merged: Tensor, stored: Tensor) -> None:
        stored += 100
        REENTRANT[case](store)

    store.set_updater(call_store)
    with pytest.raises(OptimizerError, match="'local'"):
        store.push("w", full(1))
    assert all(pulled(store, key).equal(full(2)) for key in ("w", "v"))
    store.set_updater(lambda key, merged, stored: stored.add_(merged))
    store.push("w", full(1))
    assert pulled(store, "w").equal(full(3))


def test_updater_may_ask_which_store_it_serves_and_use_another_one() -> None:
    store, other = local(["w"]), local(["w"])

    def forward(key: Any, merged: Tensor, stored: Tensor) -> None:
        other.push(key, merged * (store.rank + store.num_workers))

    store.set_updater(forward)
    store.push("w", full(5))
    assert pulled(other, "w").equal(full(5))


def test_later_of_updater_and_optimizer_is_in_force() -> None:
    store = local(["w"])
    store.set_optimizer("test")
    store.set_updater(lambda key, merged, stored: stored.fill_(7))
    store.push("w", full(1))
    assert pulled(store, "w").equal(full(7))
    store.set_optimizer(optimizer.create("test", learning_rate=1.0))
    store.push("w", full(1))
    assert pulled(store, "w").equal(full(6))


def test_updater_must_be_a_function() -> None:
    with pytest.raises(ConfigurationError):
        local().set_updater("sgd")  # type: ignore[arg-type]


def test_naming_the_optimizer_again_keeps_its_momentum_and_takes_its_numbers() -> None:
    """MXNet starts afresh: -3.9 after the third push. Here momentum goes on: m = .9 · (-1.9) - .5 · 1."""
    store = local(["w"])
    for lr, expected in ((1.0, -1.0), (1.0, -2.9), (0.5, -2.9 - 2.21)):
        store.set_optimizer(optimizer.create("sgd", learning_rate=lr, momentum=0.9))
        store.push("w", full(1))
        torch.testing.assert_close(pulled(store, "w"), full(expected))


def test_rate_set_on_the_optimizer_object_reaches_the_next_push() -> None:
    store = local(["w"])
    mine = optimizer.create("sgd", learning_rate=1.0, rescale_grad=2.0)
    store.set_optimizer(mine)
    store.push("w", full(1))
    mine.set_learning_rate(0.25)
    store.push("w", full(1))
    assert pulled(store, "w").equal(full(-2.5))


def test_broadcast_initialises_and_writes_every_out() -> None:
    store, outs = local(), [[torch.zeros(SHAPE) for _ in range(2)] for _ in STR_KEYS]
    store.broadcast(STR_KEYS, [full(i) for i in range(3)], out=outs)
    assert [[out[0, 0].item() for out in per_key] for per_key in outs] == [[0, 0], [1, 1], [2, 2]]
    with pytest.raises(ConfigurationError, match="'c'"):
        store.broadcast("c", full(9), out=torch.zeros(SHAPE))
    assert pulled(store, "c").equal(full(1))


def test_change_of_a_value_after_init_or_push_is_not_seen() -> None:
    store, value = local(), full(1)
    store.init("w", value)
    value.fill_(9)
    assert pulled(store, "w").equal(full(1))
    store.push("w", value)
    value.fill_(5)
    assert pulled(store, "w").equal(full(9))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16, torch.int32])
def test_pull_casts_to_the_dtype_of_each_out(dtype: torch.dtype) -> None:
    store = local(["w"], 2.5)
    outs = [torch.zeros(SHAPE, dtype=dtype), torch.zeros(SHAPE)]
    store.pull("w", out=outs)
    assert outs[0].equal(full(2.5).to(dtype))
    assert outs[1].equal(full(2.5))


INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]


@pytest.mark.parametrize("dtype", INTEGERS)
def test_integers_are_kept_summed_and_replaced_as_they_are(dtype: torch.dtype) -> None:
    """Of numbers that float32 cannot tell from their neighbours, where the dtype has them."""
    store, most = LocalKVStore(), torch.iinfo(dtype).max
    store.init("w", torch.tensor([1, 2, most], dtype=dtype))
    out, as_float = torch.zeros(3, dtype=dtype), torch.zeros(3)
    store.pull("w", out=[out, as_float])
    assert out.tolist() == [1, 2, most]
    assert as_float.tolist()[:2] == [1, 2]
    store.push("w", [torch.tensor([5, 6, most - 1], dtype=dtype), torch.tensor([5, 6, 1], dtype=dtype)])
    store.pull("w", out=out)
    assert out.tolist() == [10, 12, most]
    store.pushpull("w", torch.tensor([7, 0, 1], dtype=dtype), out=out)
    assert out.tolist() == [7, 0, 1]


def test_an_updater_changes_integers_and_an_optimizer_refuses_them() -> None:
    store = LocalKVStore()
    store.init(["w", "x"], [torch.tensor([1, 2, 3]), torch.ones(2)])
    store.set_updater(lambda key, merged, stored: stored.add_(merged))
    store.push("w", torch.tensor([1, 1, 1]))
    out = torch.zeros(3, dtype=torch.int64)
    store.pull("w", out=out)
    assert out.tolist() == [2, 3, 4]
    store.set_optimizer("sgd")
    with pytest.raises(ConfigurationError, match=r"'w'.*int64"):
        store.push(["x", "w"], [torch.ones(2), torch.tensor([1, 1, 1])])
    store.pull("w", out=out)
    assert out.tolist() == [2, 3, 4]
    assert pulled(store, "x", (2,)).tolist() == [1, 1]


def test_servers_refuse_integers_from_every_caller() -> None:
    with pytest.raises(ConfigurationError, match=r"'w'.*int32"):
        KVStoreVerbs("engines", client_of(1)).init("w", torch.tensor([1], dtype=torch.int32))
    with pytest.raises(ConfigurationError, match=r"'w'.*int32"):
        client_of(1).register({"w": [TensorSpec("w", (1,), "int32")]})


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_values_keep_their_dtype_and_half_precision_sums_in_float32(dtype: torch.dtype) -> None:
    """In the dtype itself the small addends, of a quarter of a spacing each, would be lost one by one."""
    store, small = LocalKVStore(), torch.finfo(dtype).eps / 4
    store.init("w", torch.zeros(3, dtype=dtype))
    store.push("w", [torch.full((3,), value, dtype=dtype) for value in (1.0, *[small] * 8)])
    out = torch.zeros(3, dtype=dtype)
    store.pull("w", out)
    expected = 1 + 8 * small if dtype.itemsize < 4 else 1.0
    assert out.tolist() == [expected] * 3


def test_outs_and_values_may_have_any_memory_order() -> None:
    store, value = LocalKVStore(), torch.arange(12.0).view(3, 4)
    store.init("w", value.t().contiguous().t())
    whole = torch.zeros(3, 8)
    outs = [torch.zeros(4, 3).t(), whole[:, ::2], torch.zeros(1, 3, 4).expand(1, 3, 4)[0]]
    store.pull("w", out=outs)
    assert all(out.equal(value) for out in outs)
    assert whole[:, 1::2].count_nonzero() == 0
    turned = torch.ones(4, 3).t()
    store.pushpull("w", turned)
    assert turned.equal(torch.ones(3, 4))


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1,), (700, 41)])
def test_values_of_every_shape_come_back(shape: tuple[int, ...]) -> None:
    store, value = LocalKVStore(), torch.randn(shape, generator=torch.Generator().manual_seed(1))
    store.init("w", torch.zeros(shape))
    store.push("w", [value, value])
    out = torch.empty(shape)
    store.pull("w", out=out)
    assert out.equal(2 * value)
    store.set_optimizer(optimizer.create("test", learning_rate=1.0))
    store.pushpull("w", value, out=out)
    assert out.equal(value)


def test_trainable_tensors_may_be_values_and_outs() -> None:
    store, p = LocalKVStore(), torch.nn.Parameter(torch.ones(3))
    store.init("w", p)
    saved = (p * p).sum()
    store.pushpull("w", 2 * p, out=p)
    assert p.requires_grad
    assert p.tolist() == [2, 2, 2]
    with pytest.raises(RuntimeError):
        saved.backward()


def test_counters_tell_the_rounds_of_each_key() -> None:
    store = local(STR_KEYS)
    store.push("b", full(1))
    store.push(["b", "c"], [full(1)] * 2)
    [stats] = store.server_stats()
    assert {table["table"]: table["rounds_applied"] for table in stats["tables"]} == {"b": 2, "c": 1, "d": 0}
    assert store.num_servers == 1
    assert store.num_dead_nodes() == 0
    store.barrier()


def test_a_store_that_was_interrupted_as_a_request_ended_is_not_called_by_that_request() -> None:
    """Its mark of a request under way stayed, so it refused everything as re-entrance."""
    store = local(["w"])
    lines = lines_of(lambda: store.push("w", full(1)))
    ends = [line for line in lines if line[0].endswith("client.py") and "_sending = None" in getline(*line)]
    with pytest.raises(Interrupt) as kept:  # with its traceback, and so the frame of the request
        lines_of(lambda: store.push("w", full(2)), ends[-1])
    assert pulled(store, "w").equal(full(2))
    assert kept.tb is not None


@pytest.mark.parametrize("verb", ["init", "push", "pushpull"])
def test_a_key_that_was_used_in_inference_mode_can_be_updated_outside(verb: str) -> None:
    store = LocalKVStore()
    if verb != "init":
        store.init("a", torch.zeros(3))
    store.set_optimizer(optimizer.create("sgd", learning_rate=1.0, momentum=0.5))
    with torch.inference_mode():
        out = torch.zeros(3)
        if verb == "init":
            store.init("a", torch.zeros(3))
        else:
            getattr(store, verb)("a", torch.ones(3), **({"out": out} if verb == "pushpull" else {}))
        store.pull("a", out=out)
    for _ in range(2):
        store.push("a", torch.ones(3))
    out = torch.zeros(3)
    store.pull("a", out=out)
    assert out.tolist() == [-2.5 if verb == "init" else -4.25] * 3
