"""Exchanges: what a round does to the arenas, over an engine in this process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from kvstore_server.codec import make_codec
from kvstore_server.engine.agreed_options import pack_hypers
from kvstore_server.optimizer import create
from kvstore_server.plan import Plan, TensorSpec, make_plan
from kvstore_server.shard.norms import UNCHANGED
from kvtrainer.client import client as clients
from kvtrainer.errors import ConfigurationError
from kvtrainer.kvstore import LocalKVStore
from kvtrainer.sync import exchange as exchanges
from kvtrainer.sync.exchange import StoreExchange
from kvtrainer.trainer.optimizer_states import ShardUpdate
from tests.support.device_streams import CURRENT, SCHEDULES, OnDevice, Streams
from tests.support.engines import run_round

PLAN = make_plan(
    [TensorSpec("a", (2,), "float32"), TensorSpec("b", (), "float64"), TensorSpec("c", (3,), "float32")], 1
)


def arenas(a: float, b: float, c: float, plan: Plan = PLAN) -> dict[str, Tensor]:
    """One number per key; the padding is zero."""
    result = {name: torch.zeros(size, dtype=getattr(torch, name)) for name, size in plan.arena_sizes.items()}
    for spec, at, value in zip(plan.specs, plan.key_offsets, (a, b, c), strict=True):
        result[spec.dtype][at : at + spec.numel] = value
    return result


def same(got: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> bool:
    """Compares the padding too: kernels run over it."""
    return all(torch.equal(got[name], expected[name]) for name in expected)


def over_store(optimizer: Any = None) -> StoreExchange:
    return StoreExchange(LocalKVStore().open_client(), PLAN, optimizer)


def test_a_table_has_the_layout_of_the_plan_that_was_made_before(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[object] = []
    monkeypatch.setattr(clients, "make_plan", lambda *args, **options: made.append(args))
    assert over_store(create("test")).plan.slices is PLAN.slices
    assert made == []


def test_gradients_are_given_as_they_lie_from_128_kib_on() -> None:
    specs = [TensorSpec(f"{numel}", (numel,), "float32") for numel in (16, 32_752, 32_768, 200_000)]
    assert exchanges.keys_sent_without_copy(make_plan(specs, 1), range(3)) == {2}


def hypers(**options: Any) -> bytes:
    return pack_hypers([options], {}, {}, update_on_kvstore=True)


def test_store_that_updates_writes_new_weights_and_leaves_gradients() -> None:
    exchange = over_store(create("test", learning_rate=1.0))
    weights, grads = arenas(10, 20, 30), arenas(1, 2, 3)
    exchange.init(weights)
    assert same(weights, arenas(10, 20, 30))
    assert run_round(exchange, grads, weights, 0.5).left_out == frozenset()
    assert same(weights, arenas(9.5, 19, 28.5))
    assert same(grads, arenas(1, 2, 3))


def test_options_that_travel_hold_until_others_do() -> None:
    exchange = over_store(create("test", learning_rate=1.0))
    weights = arenas(0, 0, 0)
    exchange.init(weights)
    for packed in (hypers(lr=2.0, weight_decay=0.0, clip_gradient=None), b""):
        run_round(exchange, arenas(1, 1, 1), weights, hyper=packed)
    assert same(weights, arenas(-4, -4, -4))


@pytest.mark.parametrize("absent", [frozenset({1}), frozenset({0}), frozenset({0, 1, 2})])
def test_keys_that_nobody_has_are_named_and_stay(absent: frozenset[int]) -> None:
    exchange = over_store(create("test", learning_rate=1.0, wd=1.0))
    weights = arenas(8, 8, 8)
    exchange.init(weights)
    assert run_round(exchange, arenas(0, 0, 0), weights, absent=absent).left_out == absent
    a, b, c = (8.0 if key in absent else 0.0 for key in range(3))
    assert same(weights, arenas(a, b, c))


def test_store_that_does_not_update_writes_the_sum_to_the_gradients() -> None:
    exchange = over_store()
    weights, grads = arenas(10, 20, 30), arenas(1, 2, 3)
    exchange.init(weights)
    run_round(exchange, grads, weights, 0.5)
    assert same(grads, arenas(0.5, 1, 1.5))
    assert same(weights, arenas(10, 20, 30))


def test_a_veto_sends_nothing_even_if_the_gradient_cannot_be_compressed() -> None:
    codec = make_codec({"type": "2bit"})
    exchange = StoreExchange(LocalKVStore().open_client(), PLAN, create("test"), codec)
    weights, nan = arenas(1, 2, 3), float("nan")
    exchange.init(weights)
    assert run_round(exchange, arenas(nan, nan, nan), weights, veto=True).skipped
    assert same(weights, arenas(1, 2, 3))
    assert not any(one.any() for one in exchange.residuals().values())


def test_state_of_a_slice_goes_to_the_store_and_comes_back() -> None:
    optimizer = create("sgd", learning_rate=1.0, momentum=0.5)
    exchange, local = over_store(optimizer), ShardUpdate(PLAN, optimizer, arenas(0, 0, 0))
    weights = arenas(0, 0, 0)
    exchange.init(weights)
    local.apply(arenas(1, 2, 3), 1.0, [True] * 3, [optimizer.hyper] * 3, {}, UNCHANGED, {})
    for slice_ in PLAN.slices:
        exchange.put_state(slice_, *local.get_states([slice_], [0]))
        [states] = exchange.get_states([slice_], [0])
        assert states.steps.tolist() == [1] * len(slice_.segments)
    run_round(exchange, arenas(0, 0, 0), weights)
    assert same(weights, arenas(-0.5, -1, -1.5))


def test_two_exchanges_over_one_client_would_mix_and_are_refused() -> None:
    client = LocalKVStore().open_client()
    StoreExchange(client, PLAN, None).init(arenas(0, 0, 0))
    with pytest.raises(ConfigurationError, match="registered already"):
        StoreExchange(client, PLAN, None)


def test_counters_of_the_store_tell_what_was_applied() -> None:
    exchange = over_store(create("test"))
    weights = arenas(0, 0, 0)
    exchange.init(weights)
    run_round(exchange, arenas(1, 1, 1), weights, absent=frozenset({2}))
    [[table]] = [stats["tables"] for stats in exchange.stats()]
    assert (table["rounds_applied"], table["keys"], table["keys_applied"]) == (1, 3, 2)


@SCHEDULES
@pytest.mark.parametrize("in_store", [True, False])
def test_what_a_device_computes_goes_to_the_store_and_comes_back_in_time(
    eager: Sequence[str], in_store: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gradients are ready, and the old weights read, only when the device comes to it."""
    streams, seen = Streams(eager), []
    monkeypatch.setattr(exchanges, "StagingStream", lambda device: streams)
    exchange = over_store(create("test", learning_rate=1.0) if in_store else None)
    weights, grads = on_device(arenas(10, 20, 30)), on_device(arenas(0, 0, 0))
    target = weights if in_store else grads

    def read() -> None:
        seen.append([*target["float32"][[0, 16]].tolist(), *target["float64"][:1].tolist()])

    exchange.init(weights)
    for number in range(1, 4):
        streams.compute(lambda number=number: fill(grads, arenas(number, 2, 3)))
        run_round(exchange, grads, weights, 0.5)
        streams.compute(read)
    exchange.assign(weights)
    streams.compute(read)
    streams.run(CURRENT)
    if in_store:
        assert seen == [[9.5, 28.5, 19.0], [8.5, 27.0, 18.0], [7.0, 25.5, 17.0], [7.0, 25.5, 17.0]]
    else:
        assert seen == [[number / 2, 1.5, 1.0] for number in (1, 2, 3, 3)]
    assert streams.num_places == 4


def on_device(arenas: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {dtype: flat.as_subclass(OnDevice) for dtype, flat in arenas.items()}


def fill(arenas: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
    for dtype, flat in arenas.items():
        flat.copy_(values[dtype])
