"""A Shard: sums of contributions, and bits that do not depend on what is updated together or on how many servers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from kvstore_server.codec import make_codec
from kvstore_server.errors import ConfigurationError
from kvstore_server.optimizer import Optimizer, create
from kvstore_server.plan import Plan, Slice, TensorSpec, make_plan
from kvstore_server.protocol.rows import CompressedPayload, RowSet, same_payload, split_rows
from kvstore_server.shard.norms import Decision
from kvstore_server.shard.reduction import RankContribution, Run
from kvstore_server.shard.shard import Leases, Shard, Unit
from tests.support.optimizer_slices import BUILT_IN, Curved, given_to, make

SIZES = (1, 10, 33, 100, 4097, 16, 0, 301)
ALL = range(len(SIZES))


def filled(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def plan_of(size: int, name: str = "w") -> Plan:
    return make_plan([TensorSpec(name, (size,), "float32")], 1)


def give(unit: Unit, rank: int, step: int) -> dict[int, Any]:
    return {p.index: filled(p.used, seed=1000 * rank + 10 * step + p.used) for p in unit.slices}


def weights(shard: Shard, unit: Unit) -> Tensor:
    return torch.cat([shard.visible(unit, slice_.index) for slice_ in unit.slices])


def one_run(shard: Shard, units: Sequence[Unit], given: Sequence[Mapping[int, Tensor]]) -> list[Run]:
    """What a rank gives to neighbouring units: one tensor for those that are neighbours in memory, padding included."""
    runs: list[Run] = []
    for unit, payloads in zip(units, given, strict=True):
        for slice_ in unit.slices:
            slot = unit.slots[slice_.index]
            padded = torch.nn.functional.pad(payloads[slice_.index], (0, slice_.length - slice_.used))
            if runs and runs[-1].end == slot and shard.storage.is_next(slot - 1, slot):
                assert isinstance(runs[-1].payload, Tensor)
                runs[-1] = Run(runs[-1].first, slot + 1, torch.cat([runs[-1].payload, padded]))
            else:
                runs.append(Run(slot, slot + 1, padded))
    return runs


@pytest.mark.parametrize("name", [*BUILT_IN, Curved])
def test_units_that_are_updated_together_have_the_bits_that_each_has_alone(name: Any) -> None:
    optimizer, batch_of = make(name), Shard()
    units = [batch_of.add(plan_of(size)) for size in SIZES]
    alone = [Shard() for _ in SIZES]
    own = [shard.add(plan_of(size)) for shard, size in zip(alone, SIZES, strict=True)]
    hypers = [optimizer.hyper]
    for step, some in enumerate([ALL, (1, 2, 3, 7), ALL, (0, 4)]):
        parts = []
        for rank in range(2):
            given = [give(own[at], rank, step) for at in some]
            runs = one_run(batch_of, [units[at] for at in some], given)
            parts.append(RankContribution(runs, 0.5))
        batch_of.update(parts, optimizer, [hypers] * len(some), [units[at] for at in some])
        for at in some:
            apart = [given_to(alone[at], give(own[at], rank, step), 0.5) for rank in range(2)]
            alone[at].update(apart, optimizer, [hypers])
    for unit, shard, other in zip(units, alone, own, strict=True):
        assert torch.equal(weights(batch_of, unit), weights(shard, other))


def test_one_kernel_call_updates_many_units() -> None:
    sizes: list[int] = []

    class Counting(Optimizer):
        verified = True

        def update(self, weight: Tensor, grad: Tensor, state: dict[str, Any], hyper: Any) -> None:
            sizes.append(weight.numel())

    shard, optimizer = Shard(), Counting()
    memory = torch.zeros(4 * 112)
    plan = make_plan([TensorSpec(str(at), (100,), "float32") for at in range(4)], 1)
    unit = shard.add(plan, 0, {"float32": memory})
    shard.update([RankContribution([Run(0, 1, torch.ones(436))])], optimizer, [[optimizer.hyper] * 4])
    more = [shard.add(plan_of(100)) for _ in range(100)]
    last = more[60:]  # of one block, whatever room was made for those before
    shard.update(
        [RankContribution(one_run(shard, last, [{0: torch.ones(100)}] * 40))],
        optimizer,
        [[optimizer.hyper]] * 40,
        last,
    )
    assert unit.end == 1
    assert sizes[0] == 4 * 112
    assert sum(sizes[1:]) == 40 * 112
    assert len(sizes) <= 3


LAZY: list[tuple[str, dict[str, Any]]] = [
    ("sgd", {"lazy_update": True, "momentum": 0.9}),
    ("adam", {"lazy_update": True}),
    ("adagrad", {}),
    ("ftrl", {}),
    ("torch:SGD", {"lr": 0.1}),
    ("torch:Adagrad", {"lr": 0.1}),
]


@pytest.mark.parametrize(("name", "options"), LAZY)
@pytest.mark.parametrize("width", [1, 10, 33])
def test_rows_have_the_same_bits_on_any_number_of_servers(
    name: str, options: dict[str, Any], width: int
) -> None:
    rows, optimizer = 2001, create(name, **options)
    spec = TensorSpec("table", (rows, width), "float32", row_sparse=True)
    ends = []
    for servers in (1, 2, 3):
        plan = make_plan([spec], servers)
        shards = [Shard() for _ in range(servers)]
        units = [shard.add(plan, server) for server, shard in enumerate(shards)]
        for step in range(3):
            given = []
            for rank in range(2):
                ids = torch.randperm(rows, generator=torch.Generator().manual_seed(7 * step + rank))[:57]
                given.append(
                    split_rows(plan, {0: RowSet(ids.sort().values, filled(57, width, seed=9 * step + rank))})
                )
            for shard, unit in zip(shards, units, strict=True):
                parts = [given_to(shard, {index: one[index] for index in unit.slots}, 0.3) for one in given]
                shard.update(parts, optimizer, [[optimizer.hyper]])
        slices = {p.index: shards[p.server].visible(units[p.server], p.index) for p in plan.slices}
        ends.append(torch.cat([slices[slice_.index] for slice_ in plan.slices]))
    assert torch.equal(ends[0], ends[1])
    assert torch.equal(ends[0], ends[2])
    assert ends[0].any()


def tables_of(sizes: Sequence[int], name: str = "") -> Plan:
    """Tables of rows of whole lines, so that each begins where the one before ends."""
    specs = [TensorSpec(f"{name}{size}", (size, 16), "float32", row_sparse=True) for size in sizes]
    return make_plan(specs, 1)


def some_rows(size: int, seed: int) -> RowSet:
    ids = torch.randperm(size, generator=torch.Generator().manual_seed(seed))[:31].sort().values
    return RowSet(ids, filled(31, 16, seed=seed))


@pytest.mark.parametrize(("name", "options"), LAZY)
def test_tables_that_lie_side_by_side_have_the_bits_that_each_has_alone(
    name: str, options: dict[str, Any]
) -> None:
    sizes, optimizer = (4001, 500, 90), create(name, **options)
    batch_of, plan = Shard(), tables_of(sizes)
    unit = batch_of.add(plan)
    alone = [Shard() for _ in sizes]
    own = [shard.add(tables_of([size])) for shard, size in zip(alone, sizes, strict=True)]
    slow = {**optimizer.hyper, "lr": 0.03125}
    for step, (absent, scales) in enumerate(
        [((), (0.3, 0.3, 0.3)), ((1,), (0.3, 0.3, 0.7)), ((), (0.5, 1, 1))]
    ):
        hypers = [optimizer.hyper, slow if step else optimizer.hyper, optimizer.hyper]
        parts, apart = [], [list[RankContribution]() for _ in sizes]
        for rank, scale in enumerate(scales):
            here = [key for key in range(3) if rank < 2 or key not in absent]
            rows = {key: some_rows(sizes[key], seed=100 * step + 10 * rank + key) for key in here}
            payloads = split_rows(plan, rows)
            parts.append(given_to(batch_of, payloads, scale, frozenset({0, 1, 2}.difference(here))))
            for key in here:
                payloads = split_rows(own[key].plan, {0: rows[key]})
                apart[key].append(given_to(alone[key], payloads, scale))
        batch_of.update(parts, optimizer, [hypers])
        for key, shard in enumerate(alone):
            shard.update(apart[key], optimizer, [[hypers[key]]])
    for key, (shard, other) in enumerate(zip(alone, own, strict=True)):
        assert torch.equal(batch_of.rows_of(unit, key), shard.rows_of(other, 0))
        assert batch_of.rows_of(unit, key).any()


def test_one_kernel_call_updates_rows_of_tables_that_lie_side_by_side() -> None:
    sizes: list[int] = []

    class Counting(Optimizer):
        verified = True

        def updates_rows(self, hyper: Any) -> bool:
            return True

        def update(self, weight: Tensor, grad: Tensor, state: dict[str, Any], hyper: Any) -> None:
            sizes.append(weight.numel())

    shard, optimizer, plan = Shard(), Counting(), tables_of((4001, 500, 90))
    shard.add(plan)
    payloads = split_rows(plan, {key: some_rows(plan.specs[key].shape[0], seed=key) for key in range(3)})
    given = given_to(shard, payloads)
    shard.update([given], optimizer, [[optimizer.hyper] * 3])
    assert sizes == [3 * 31 * 16]


def test_weights_that_are_being_sent_are_left_alone_and_taken_back_later() -> None:
    leases, optimizer = Leases(), create("test", learning_rate=1.0)
    shard = Shard(leases)
    unit = shard.add(make_plan([TensorSpec(str(at), (5000,), "float32") for at in range(3)], 1))
    first = unit.slices[0]
    sent = shard.visible(unit, first.index)
    layout, before = sent.data_ptr(), sent.clone()

    def step() -> None:
        ones = {p.index: torch.ones(p.used) for p in unit.slices}
        shard.update([given_to(shard, ones)], optimizer, [[optimizer.hyper] * 3])

    leases.hold(sent)
    step()
    assert torch.equal(sent, before)
    moved = shard.visible(unit, first.index)
    assert moved.data_ptr() != layout
    leases.hold(moved)
    step()
    assert (moved == -1).all()
    assert weights(shard, unit).unique().tolist() == [-2.0]
    leases.release(sent)
    leases.release(moved)
    step()
    assert shard.visible(unit, first.index).data_ptr() == layout
    assert weights(shard, unit).unique().tolist() == [-3.0]


def test_a_sum_that_was_held_is_clipped_as_decided_and_a_key_without_a_gradient_stays() -> None:
    shard, optimizer = Shard(), create("test", learning_rate=1.0)
    unit = shard.add(make_plan([TensorSpec("a", (3,), "float32"), TensorSpec("b", (4,), "float32")], 1))
    gradient = torch.zeros(20)
    gradient[:3] = 8.0
    given = [RankContribution([Run(0, 1, gradient.clone())], 0.5, frozenset({1})) for _ in range(2)]
    held = shard.hold(given, optimizer, [optimizer.hyper] * 2, 1.0, unit)
    assert [tuple(partial) for partial in held.partials] == [(0, 24.0, True)]
    shard.update([held.total], optimizer, [[optimizer.hyper] * 2], decision=Decision(0.5, 3.0))
    assert weights(shard, unit)[:3].tolist() == [-3.0] * 3
    assert not weights(shard, unit)[3:].any()


def test_integers_take_no_factor_and_stay_as_they_are() -> None:
    shard = Shard()
    unit = shard.add(make_plan([TensorSpec("k", (3,), "int64")], 1, allow_integers=True))
    given = given_to(shard, {0: torch.tensor([1, 2, 3])}, 0.5)
    with pytest.raises(ConfigurationError):
        shard.assign_sum([given])
    assert shard.visible(unit, 0).tolist() == [0, 0, 0]
    shard.assign_sum([given._replace(scale=1.0)])
    assert shard.visible(unit, 0).tolist() == [1, 2, 3]


NOTHING: frozenset[int] = frozenset()
SPECS = [
    TensorSpec("a", (3,), "float32"),
    TensorSpec("b", (18,), "float32"),
    TensorSpec("c", (4,), "float32"),
]
PLAN = make_plan(SPECS, 1)
[SLICE] = PLAN.slices
"""A bucket with padding between its keys: a ends at 3, b begins at 16."""


def encoded_by(kind: str, values: Tensor, slice_: Slice = SLICE, **options: Any) -> CompressedPayload:
    codec = make_codec({"type": kind, **options})
    data = torch.empty(codec.encoded_nbytes(slice_.used, slice_.dtype), dtype=torch.uint8)
    kind = codec.residual_dtype(slice_.dtype)
    kept, following = (None, None) if kind is None else torch.zeros(2, slice_.used, dtype=kind)
    codec.encode(values, kept, data, following)
    return CompressedPayload(codec, data)


def contribution(
    payload: Tensor | CompressedPayload, scale: float = 1.0, absent: frozenset[int] = NOTHING
) -> RankContribution:
    return RankContribution([Run(0, 1, payload)], scale, absent)


def total(parts: list[RankContribution]) -> Tensor:
    """The sum, padding included, as it takes the place of weights."""
    memory = torch.zeros(SLICE.length)
    shard = Shard()
    shard.add(PLAN, 0, {"float32": memory})
    shard.assign_sum(parts)
    return memory


def by_key(total: Tensor) -> Mapping[str, list[float]]:
    return {SPECS[s.key].key: total[s.start : s.start + s.numel].unique().tolist() for s in SLICE.segments}


def padding(total: Tensor) -> Tensor:
    mask = torch.ones(SLICE.length, dtype=torch.bool)
    for s in SLICE.segments:
        mask[s.start : s.start + s.numel] = False
    return total[mask]


def ones(value: float = 1.0) -> Tensor:
    return torch.full((SLICE.used,), value)


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 1, 0], [1, 0, 2]])
def test_compressed_and_plain_contributions_add_up_in_any_order(order: list[int]) -> None:
    parts = [
        contribution(encoded_by("2bit", ones(0.75))),
        contribution(ones(0.25)),
        contribution(encoded_by("fp16", ones(2.0))),
    ]
    summed = total([parts[i] for i in order])
    assert by_key(summed) == {"a": [2.75], "b": [2.75], "c": [2.75]}


def test_one_bit_says_nothing_of_keys_that_the_rank_left_out() -> None:
    parts = [
        contribution(encoded_by("1bit", ones(1.0)), absent=frozenset({1})),
        contribution(encoded_by("1bit", ones(1.0))),
    ]
    assert by_key(total(parts)) == {"a": [2.0], "b": [1.0], "c": [2.0]}


def test_one_bit_leaves_the_padding_zero() -> None:
    summed = total([contribution(encoded_by("1bit", ones(1.0)))] * 2)
    assert len(padding(summed)) > 0
    assert padding(summed).unique().tolist() == [0.0]


def test_equal_factors_are_applied_once_to_the_sum_and_others_to_each_part() -> None:
    parts = [encoded_by("2bit", ones(0.75), threshold=0.7), encoded_by("2bit", ones(0.75), threshold=0.1)]
    low, high = torch.tensor(0.1), torch.tensor(0.7)
    equal = total([contribution(part, 1 / 3) for part in parts])
    assert by_key(equal)["b"] == [((high + low) * (1 / 3)).item()]
    other = total([contribution(parts[0], 0.3), contribution(parts[1], 0.6)])
    assert by_key(other)["b"] == [(high * 0.3 + low * 0.6).item()]


def test_a_single_contribution_is_decoded_and_scaled() -> None:
    summed = total([contribution(encoded_by("2bit", ones(-0.75)), 0.5)])
    assert by_key(summed) == {"a": [-0.25], "b": [-0.25], "c": [-0.25]}


def test_a_sum_does_not_see_what_the_one_before_left_in_memory() -> None:
    shard = Shard()
    unit = shard.add(PLAN)
    shard.assign_sum([contribution(encoded_by("1bit", ones(9.0)))] * 3)
    shard.assign_sum([contribution(encoded_by("2bit", ones(0.0)))])
    assert not shard.visible(unit, 0).any()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_is_decoded_and_summed_in_float32(dtype: str) -> None:
    plan = make_plan([TensorSpec("h", (8,), dtype)], 1)
    [slice_], shard, optimizer = plan.slices, Shard(), create("test")
    values = torch.full((8,), 1000.0, dtype=getattr(torch, dtype))
    small = encoded_by("2bit", values, slice_, threshold=0.001)
    unit, parts = shard.add(plan), [contribution(payload) for payload in (values, small, small)]
    held = shard.hold(parts, optimizer, [optimizer.hyper], math.inf, unit)
    step = torch.tensor(0.001)
    assert held.partials[0].value == (torch.tensor(values[0].item()) + step + step).item()


def test_payloads_are_the_same_if_codec_and_bytes_are() -> None:
    one = encoded_by("2bit", ones(0.75))
    assert same_payload(one, encoded_by("2bit", ones(0.75)))
    assert not same_payload(one, encoded_by("2bit", ones(-0.75)))
    assert not same_payload(one, encoded_by("2bit", ones(0.75), threshold=0.25))
    assert not same_payload(one, ones(0.75))
