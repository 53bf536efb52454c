"""Rows of a hash table: beside a table of a fixed size, and beside a dictionary of rows that come and go."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvstore_server.errors import ConfigurationError, OptimizerError, ProtocolError
from kvstore_server.optimizer import Optimizer, State, apply_update_to_rows, create
from kvstore_server.plan import HASH_SLICES, HashTableOptions, hash_table_spec, make_plan
from kvstore_server.protocol.rows import RowSet
from kvstore_server.shard.hash_table import HashTable, no_claim
from kvstore_server.shard.id_index import row_numbers
from kvstore_server.shard.row_values import initial_rows
from kvstore_server.shard.shard import Shard
from kvstore_server.shard.table_optimizer import check_hash_table

WIDTH, IDS = 5, 40
EVERY_OPTIMIZER = [
    ("sgd", {"learning_rate": 0.1}),
    ("sgd", {"learning_rate": 0.1, "momentum": 0.9, "lazy_update": True}),
    ("sgd", {"learning_rate": 0.1, "wd": 0.1, "lazy_update": True}),
    ("nag", {"learning_rate": 0.1, "momentum": 0.0}),
    ("adagrad", {"learning_rate": 0.1}),
    ("adam", {"learning_rate": 0.1, "lazy_update": True}),
    ("ftrl", {"learning_rate": 0.1}),
    ("groupadagrad", {"learning_rate": 0.1}),
    ("rowadam", {"learning_rate": 0.1, "wd": 0.1}),
    ("torch:SGD", {"lr": 0.1}),
    ("torch:Adagrad", {"lr": 0.1, "initial_accumulator_value": 0.5}),
]
MOMENTUM = "sgd", {"learning_rate": 0.1, "momentum": 0.9}
"""Moves rows without gradient, too."""


def optimizer_and_options(name: str, options: dict[str, Any]) -> tuple[Optimizer, dict[str, Any]]:
    made = create(getattr(torch.optim, name.partition(":")[2]) if ":" in name else name, **options)
    return made, dict(made.hyper)


def sorted_rows(ids: Sequence[int]) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Row numbers, ascending, and the order of ids in them."""
    rows = row_numbers(np.array(ids, np.int64))
    order = rows.argsort()
    return rows[order], order


def update(
    table: HashTable,
    ids: Sequence[int],
    grads: Tensor,
    made: tuple[Optimizer, dict[str, Any]],
    times: Sequence[int] = (),
) -> None:
    rows, order = sorted_rows(ids)
    counts = np.array(times or [1] * len(ids), np.int64)[order]
    table.check_room(len(ids), no_claim)
    table.update(RowSet(torch.from_numpy(rows), grads[torch.from_numpy(order)]), counts, *made)


def read(table: HashTable, ids: Sequence[int]) -> Tensor:
    return table.read(row_numbers(np.array(ids, np.int64)))


@pytest.mark.parametrize(("name", "options"), EVERY_OPTIMIZER)
@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
def test_rows_have_the_bits_of_a_table_of_a_fixed_size(
    name: str, options: dict[str, Any], dtype: str
) -> None:
    multi = {"multi_precision": True} if dtype == "bfloat16" and ":" not in name else {}
    made, own = (
        optimizer_and_options(name, {**options, **multi}),
        optimizer_and_options(name, {**options, **multi}),
    )
    table = HashTable("t", WIDTH, dtype, HashTableOptions(seed=3), room=1000)
    every = row_numbers(np.arange(IDS))
    fixed = initial_rows(table.options, "t", every, WIDTH, table.weights.dtype)
    assert torch.equal(table.read(every), fixed)
    state, compute = State(), torch.float64 if dtype == "float64" else torch.float32
    for step in range(6):
        ids = torch.randperm(IDS)[: 3 + 4 * step].sort().values
        grads = torch.randn(len(ids), WIDTH, dtype=compute)
        update(table, ids.tolist(), grads, made)
        apply_update_to_rows(own[0], fixed, ids, grads, state, {**own[1], "key": "t"}, _zeros(fixed))
        assert torch.equal(table.read(every), fixed)
    assert len(table) < IDS


def _zeros(like: Tensor) -> Any:
    return lambda name, value: torch.zeros(like.numel(), dtype=value.dtype)


@pytest.mark.parametrize("init", ["normal", "uniform", "constant"])
def test_an_initial_value_depends_on_seed_name_id_and_column_alone(init: str) -> None:
    options = HashTableOptions(7, init, 0.5)
    rows = row_numbers(np.arange(1000))
    values = initial_rows(options, "t", rows, 8, torch.float32)
    some = np.array([17, 3, 999, 3])
    assert torch.equal(
        initial_rows(options, "t", rows[some], 8, torch.float32), values[torch.from_numpy(some)]
    )
    if init == "constant":
        assert bool((values == 0.5).all())
        return
    for others in (options._replace(seed=8), options):
        other = initial_rows(others, "t" if others is not options else "u", rows, 8, torch.float32)
        assert abs(float(torch.corrcoef(torch.stack([values.flatten(), other.flatten()]))[0, 1])) < 0.05
    assert abs(float(values.mean())) < 0.02
    deviation = 0.5 if init == "normal" else 0.5 / 3**0.5
    assert float(values.std()) == pytest.approx(deviation, rel=0.05)
    assert float(values.abs().max()) <= (0.5 if init == "uniform" else 0.5 * 3.47)
    columns = torch.corrcoef(values.T) - torch.eye(8)
    assert float(columns.abs().max()) < 0.15


class Model:
    """A hash table by the rules of its options, with a dictionary, one row at a time."""

    def __init__(self, options: HashTableOptions, initial: dict[int, float]) -> None:
        self.options, self.initial = options, initial
        self.step = 0
        self.rows: dict[int, list[Any]] = {}
        """id → value, step of its last gradient, number of gradients, momentum."""
        self.waiting: dict[int, tuple[int, int]] = {}
        """id → step of its last gradient, number of gradients."""
        self.refused = 0

    def forget(self) -> None:
        after = self.options.expire_after
        if after:
            oldest = self.step + 1 - after
            self.rows = {i: row for i, row in self.rows.items() if row[1] >= oldest}
            self.waiting = {i: one for i, one in self.waiting.items() if one[0] >= oldest}

    def read(self, id_: int) -> float:
        return float(self.rows[id_][0]) if id_ in self.rows else self.initial[id_]

    def update(self, grads: dict[int, float], times: dict[int, int], mu: float = 0.0) -> None:
        self.forget()
        now = self.step + 1
        for id_ in grads:
            if id_ not in self.rows:
                count = self.waiting.pop(id_, (0, 0))[1] + times[id_]
                if count < self.options.admit_after:
                    self.waiting[id_] = now, count
                    self.refused += times[id_]
                    continue
                self.rows[id_] = [self.initial[id_], now, count - times[id_], 0.0]
            row = self.rows[id_]
            self.rows[id_] = [row[0], now, row[2] + times[id_], row[3]]
        # The learning rate is 1, and all rows are looked at in each round.
        for id_, row in self.rows.items():
            step = grads.get(id_, 0.0)
            if mu:
                step = row[3] = mu * row[3] + step
            row[0] = row[0] * (1 - self.options.weight_decay) - step
        self.step = now
        self.forget()
        self._evict(grads)

    def _evict(self, grads: dict[int, float]) -> None:
        if not self.options.max_rows:
            return
        most = -(-self.options.max_rows // HASH_SLICES)
        for slice_ in {_slice_of(id_) for id_ in grads}:
            own = [id_ for id_ in self.rows if _slice_of(id_) == slice_]
            if len(own) > most:

                def rank(id_: int) -> tuple[Any, ...]:
                    value, age, count, _ = self.rows[id_]
                    by = {"lru": (age, count), "lfu": (count, age), "norm": (abs(value),)}
                    return (*by[self.options.evict], _row(id_))

                for id_ in sorted(own, key=rank)[: len(own) - (most - most // 10)]:
                    del self.rows[id_]


def _row(id_: int) -> int:
    return int(row_numbers(np.array([id_], np.int64))[0])


def _slice_of(id_: int) -> int:
    return (_row(id_) + 2**63) * HASH_SLICES // 2**64


OPTIONS = st.builds(
    HashTableOptions,
    seed=st.integers(0, 2),
    init=st.just("normal"),
    scale=st.just(1.0),
    admit_after=st.sampled_from([1, 1, 2, 3]),
    expire_after=st.sampled_from([0, 1, 2, 5]),
    max_rows=st.sampled_from([0, 128, 256]),
    evict=st.sampled_from(["lru", "lfu", "norm"]),
    weight_decay=st.sampled_from([0.0, 0.0, 0.5]),
    max_norm=st.just(0.0),
    optimizer=st.just(""),
)
# Ids of two slices, so that there are many in one.
CROWDED = [id_ for id_ in range(3000) if _slice_of(id_) in (5, 70)][:24]


STEPS = st.one_of(st.dictionaries(st.sampled_from(CROWDED), st.integers(1, 3), max_size=8), st.none())


@given(
    OPTIONS, st.lists(STEPS, max_size=14), st.lists(st.sampled_from([0.0, 0.5, 0.9]), min_size=1, max_size=3)
)
@settings(max_examples=120)
def test_rows_come_and_go_as_in_a_dictionary_wherever_they_are_moved(
    options: HashTableOptions, steps: list[dict[int, int] | None], momenta: list[float]
) -> None:
    is_exact = not options.weight_decay and not any(momenta)
    table = HashTable("t", 1, "float64", options, room=64)
    initial = dict(zip(CROWDED, read(table, CROWDED)[:, 0].tolist(), strict=True))
    model = Model(options, initial)
    for number, times in enumerate(steps):
        if times is None:
            table = moved(table)
            continue
        mu = momenta[number % len(momenta)]
        made = optimizer_and_options("sgd", {"learning_rate": 1.0, "momentum": mu})
        grads = torch.arange(1.0, len(times) + 1, dtype=torch.float64)
        update(table, list(times), grads[:, None], made, list(times.values()))
        model.update(dict(zip(times, grads.tolist(), strict=True)), times, mu)
        found, expected = read(table, CROWDED)[:, 0].tolist(), [model.read(id_) for id_ in CROWDED]
        assert found == (expected if is_exact else pytest.approx(expected, abs=1e-9))
        stats = table.stats()
        assert (stats.rows, stats.refused) == (len(model.rows), model.refused)
        assert stats.admitted - stats.evicted == len(table) >= stats.rows
        most = sorted([(-row[2], _row(id_)) for id_, row in model.rows.items()])[:10]
        assert list(stats.hottest) == [(row, -count) for count, row in most]


def test_momentum_that_is_switched_off_and_on_moves_rows_by_what_they_have_decayed_since() -> None:
    options, (rare, often) = HashTableOptions(weight_decay=0.001), CROWDED[:2]
    table = HashTable("t", 1, "float64", options, room=64)
    model = Model(options, dict(zip(CROWDED, read(table, CROWDED)[:, 0].tolist(), strict=True)))
    for ids, mu, rounds in [([rare, often], 0.9, 1), ([often], 0.0, 50), ([often], 0.9, 3)]:
        made = optimizer_and_options("sgd", {"learning_rate": 1.0, "momentum": mu})
        for _ in range(rounds):
            update(table, ids, torch.ones(len(ids), 1, dtype=torch.float64), made, [1] * len(ids))
            model.update(dict.fromkeys(ids, 1.0), dict.fromkeys(ids, 1), mu)
    assert read(table, [rare]).item() == pytest.approx(model.read(rare), abs=1e-12)


def moved(table: HashTable) -> HashTable:
    """Another table with the same rows, which came there slice by slice, the last one first; without empty ones."""
    made = HashTable(table.name, table.width, _dtype_of(table), table.options, room=table.room)
    used = {0, *(_slice_of(id_) for id_ in (*CROWDED, *range(IDS)))}
    if table.step:
        for number in sorted(used, reverse=True):
            made.put_slice_state(number, table.step, table.slice_state(number))
    return made


def _dtype_of(table: HashTable) -> str:
    return str(table.weights.dtype).removeprefix("torch.")


@pytest.mark.parametrize(("name", "options"), [*EVERY_OPTIMIZER, MOMENTUM])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_table_that_was_moved_goes_on_with_the_same_bits(
    name: str, options: dict[str, Any], dtype: str
) -> None:
    multi = {"multi_precision": True} if dtype == "bfloat16" and ":" not in name else {}
    made = optimizer_and_options(name, {**options, **multi})
    table = HashTable("t", WIDTH, dtype, HashTableOptions(expire_after=3), room=1000)
    for step in range(8):
        if step == 4:
            other = moved(table)
        ids = torch.randperm(IDS)[:10].tolist()
        grads = torch.randn(len(ids), WIDTH)
        update(table, ids, grads, made)
        if step >= 4:
            update(other, ids, grads, made)
            assert torch.equal(read(other, range(IDS)), read(table, range(IDS)))


@pytest.mark.parametrize(
    "change",
    [
        {"rows": torch.tensor([5, 3])},
        {"rows": torch.tensor([2**62, 2**62 + 1])},
        {"touched": torch.tensor([1, 0], dtype=torch.int32)},
        {"counts": torch.tensor([1, 1, 1], dtype=torch.int32)},
        {"weights": torch.zeros(2, 4)},
        {"weights": torch.zeros(2, 3, dtype=torch.float64)},
        {"state history": torch.zeros(1, 3)},
        {"figures": torch.zeros(3, dtype=torch.int64)},
        {"figures": torch.full((1, 3), float("nan"))},
        {"touched": torch.tensor([1, 3], dtype=torch.int32)},
        {"state sum": torch.zeros(2, 4)},
        {"wide weights": torch.zeros(2, 4)},
        {"wide weights": torch.zeros(2, 3)},
        {"decay": 0.5},
        {"decay": float("nan")},
        {"decay": -1},
        {"decayed": torch.zeros(2, 1, dtype=torch.float64)},
        {"momentum": 1.0},
        {"momentum": torch.zeros(2)},
        {"momentum": 0.9, "momentum since": -1},
        {"momentum": 0.9, "momentum since": 1.5},
        {"state " + "x" * 5000: 1.0},
        {"state a": object()},
        {f"state {at}": 1.0 for at in range(200)},
        {"candidate rows": torch.tensor([1.0])},
    ],
)
def test_a_slice_that_does_not_fit_is_refused_and_nothing_changes(change: dict[str, Tensor]) -> None:
    made = optimizer_and_options("adagrad", {"learning_rate": 1.0})
    table = HashTable("t", 3, "float32", HashTableOptions(admit_after=2), room=100)
    for _ in range(2):
        update(table, CROWDED, torch.ones(len(CROWDED), 3), made)
    number = _slice_of(CROWDED[0])
    good = table.slice_state(number)
    two = {name: value[:, :2] if name == "figures" else value[:2] for name, value in good.items()}
    two["figures"] = good["figures"]
    before = read(table, CROWDED)
    with pytest.raises(ProtocolError):
        table.put_slice_state(number, 2, {**two, **change})
    assert torch.equal(read(table, CROWDED), before)
    table.put_slice_state(number, 2, two)
    assert table.stats().rows == len(CROWDED) - len(good["rows"]) + 2


def test_rows_that_are_put_before_the_first_update_have_initial_state_at_it() -> None:
    made = optimizer_and_options("adagrad", {"learning_rate": 1.0})
    source, table = (HashTable("t", 3, "float32", HashTableOptions(), room=100) for _ in range(2))
    for one in (source, table):
        update(one, CROWDED, torch.ones(len(CROWDED), 3), made)
    source.forget_state()
    for number in range(HASH_SLICES):
        table.put_slice_state(number, 0, source.slice_state(number))
    before = read(table, CROWDED)
    assert torch.equal(before, read(source, CROWDED))
    assert (table.step, table.has_state, len(table)) == (0, False, len(CROWDED))
    update(table, CROWDED, torch.full((len(CROWDED), 3), 4.0), made)
    # Adagrad's first step is as long as the learning rate.
    assert torch.allclose(read(table, CROWDED), before - 1, atol=1e-5)


class Kept:
    """What a change has protected, as a journal keeps it."""

    def __init__(self) -> None:
        self.rows: dict[int, dict[int, Tensor]] = {}

    def protect(self, array: Tensor, which: np.ndarray[Any, Any]) -> None:
        kept = self.rows.setdefault(array.data_ptr(), {})
        for at in which.tolist():
            kept.setdefault(at, array[at].clone())

    def former(self, array: Tensor) -> tuple[np.ndarray[Any, Any], Tensor] | None:
        kept = self.rows.get(array.data_ptr())
        if not kept:
            return None
        return np.array(sorted(kept)), torch.stack([kept[at] for at in sorted(kept)])

    def undo(self, arrays: Sequence[Tensor]) -> None:
        for array in arrays:
            for at, row in self.rows.get(array.data_ptr(), {}).items():
                array[at] = row


@given(
    OPTIONS,
    st.lists(STEPS, max_size=14),
    st.lists(st.sampled_from([0.0, 0.5, 0.9]), min_size=1, max_size=3) | st.none(),
)
@settings(max_examples=80)
def test_what_an_update_has_changed_is_known_and_can_be_undone(
    options: HashTableOptions, steps: list[dict[int, int] | None], momenta: list[float] | None
) -> None:
    made = optimizer_and_options("adagrad", {"learning_rate": 1.0})
    kept, memory = Kept(), dict[str, Tensor]()

    def allocate(name: str, nbytes: int) -> Tensor:
        return memory.setdefault(name, torch.zeros(nbytes, dtype=torch.uint8))

    table = HashTable("t", 1, "float32", options, allocate, kept.protect, room=64)
    for number, times in enumerate(steps):
        if momenta is not None:
            mu = momenta[number % len(momenta)]
            made = optimizer_and_options("sgd", {"learning_rate": 1.0, "momentum": mu})
        before = read(table, CROWDED)
        stats = table.stats()
        kept.rows.clear()
        if times is None:
            table.forget_state()
            assert torch.equal(read(table, CROWDED), before)
            continue
        update(table, list(times), torch.ones(len(times), 1), made, list(times.values()))
        after = read(table, CROWDED)
        assert torch.equal(table.read_former(row_numbers(np.array(CROWDED)), kept.former), before)
        # A process that ends in the middle leaves memory that its successor puts back.
        saved = {name: one.clone() for name, one in memory.items()}
        arrays = [
            *table._arrays(),
            table.slots.memory,
            table._candidates.memory,
            table._head_memory,
            table._entries,
        ]
        kept.undo(arrays)
        other = HashTable("t", 1, "float32", options, allocate, room=64)
        other.restore()
        assert torch.equal(read(other, CROWDED), before)
        assert other.stats()._replace(nbytes=0) == stats._replace(nbytes=0)
        update(other, list(times), torch.ones(len(times), 1), made, list(times.values()))
        assert torch.equal(read(other, CROWDED), after)
        for name, one in saved.items():
            memory[name].copy_(one)


WITH_STATE = [(name, options) for name, options in EVERY_OPTIMIZER if (name, options) != EVERY_OPTIMIZER[0]]


@pytest.mark.parametrize(("name", "options"), WITH_STATE)
def test_memory_that_has_been_used_before_leaves_nothing_in_a_new_state(
    name: str, options: dict[str, Any]
) -> None:
    made, plain = optimizer_and_options(name, options), optimizer_and_options("sgd", {"learning_rate": 0.1})
    kept, memory = Kept(), dict[str, Tensor]()
    count, width = 600, 512  # more rows than are updated at once

    def allocate(label: str, nbytes: int) -> Tensor:
        return memory.setdefault(label, torch.zeros(nbytes, dtype=torch.uint8))

    def make() -> HashTable:
        return HashTable("t", width, "float32", HashTableOptions(), allocate, kept.protect, room=2000)

    fresh = HashTable("t", width, "float32", HashTableOptions(), room=2000)
    grads = torch.ones(count, width)
    # 1. A process dies in the middle of the first update, and its successor makes it.
    table = make()
    update(table, range(count), grads, made)
    kept.undo([*table._arrays(), table.slots.memory, table._head_memory, table._entries])
    table = make()
    table.restore()
    for one in (table, fresh):
        update(one, range(count), grads, made)
    assert torch.equal(read(table, range(count)), read(fresh, range(count)))
    # 2. Another optimizer, and the first one again, which updates some rows and then all.
    for one in (table, fresh):
        one.forget_state()
        update(one, range(count), grads, plain)
        one.forget_state()
        update(one, range(10), grads[:10], made)
        update(one, range(count), grads, made)
    assert torch.equal(read(table, range(count)), read(fresh, range(count)))


@pytest.mark.parametrize("max_rows", [1, 100, 128, 129, 256, 1000, 5000])
def test_a_table_keeps_about_as_many_rows_as_it_may_have(max_rows: int) -> None:
    made = optimizer_and_options("sgd", {"learning_rate": 1.0})
    table = HashTable("t", 1, "float32", HashTableOptions(max_rows=max_rows), room=50_000)
    for first in range(0, 20_000, 2000):
        update(table, range(first, first + 2000), torch.ones(2000, 1), made)
    per_slice = -(-max_rows // HASH_SLICES)
    assert 0.85 * per_slice * HASH_SLICES <= table.stats().rows <= per_slice * HASH_SLICES


def test_rows_that_are_put_into_a_table_count_like_those_that_are_trained() -> None:
    made = optimizer_and_options("sgd", {"learning_rate": 1.0})
    large = HashTable("t", 1, "float32", HashTableOptions(), room=5000)
    small = HashTable("t", 1, "float32", HashTableOptions(max_rows=4 * HASH_SLICES), room=5000)
    for first in range(0, 3000, 1000):
        update(large, range(first, first + 1000), torch.ones(1000, 1), made)
    for number in range(HASH_SLICES):
        small.put_slice_state(number, large.step, large.slice_state(number))
    assert 0.85 * 4 * HASH_SLICES <= small.stats().rows <= 4 * HASH_SLICES
    # Those least recently updated have gone.
    assert small.slots.touched[small.slots.live()].min() > 1


@pytest.mark.parametrize(
    ("evict", "gone"),
    [
        # Of the oldest, the one with fewer gradients goes first.
        ("lru", "cadb"),
        # Of those with fewest gradients, the one that is older.
        ("lfu", "cdef"),
        # The one with the smallest norm, whatever its sign; a new one, too.
        ("norm", "ecbf"),
    ],
)
def test_rows_are_evicted_in_the_order_of_their_ages_counts_or_norms(evict: str, gone: str) -> None:
    # Rows of one slice, which may have four. By their numbers others would go first.
    d, a, c, b, e, f, g, h = sorted([id_ for id_ in CROWDED if _slice_of(id_) == 5], key=_row)[:8]
    ids = dict(zip("abcdefgh", (a, b, c, d, e, f, g, h), strict=True))
    options = HashTableOptions(max_rows=4 * HASH_SLICES, evict=evict, init="normal", scale=1e-6)
    table = HashTable("t", 1, "float64", options, room=64)
    made = optimizer_and_options("sgd", {"learning_rate": 1.0})
    grads = {"a": 50.0, "b": -20.0, "c": 10.0, "d": -60.0, "e": 5.0, "f": -30.0, "g": 70.0, "h": -80.0}
    there: list[str] = []
    # The names of those that are updated, and how often; later updates leave the weights as they are.
    for step in ({"a": 3, "b": 1, "c": 1}, {"b": 1, "d": 1}, {"e": 1}, {"f": 1}, {"g": 1}, {"h": 1}):
        given = [grads[name] * (table.slots.find(row_numbers(np.array([ids[name]])))[0] < 0) for name in step]
        values = torch.tensor(given, dtype=torch.float64)[:, None]
        update(table, [ids[name] for name in step], values, made, list(step.values()))
        before = {*there, *step}
        there = [name for name in ids if table.slots.find(row_numbers(np.array([ids[name]])))[0] >= 0]
        evicted = sorted(before.difference(there))
        assert evicted == ([] if len(before) <= 4 else [gone[0]])
        gone = gone[len(evicted) :]
    assert not gone


def test_rows_that_wait_expire_also_after_another_optimizer_has_come() -> None:
    made = optimizer_and_options("sgd", {"learning_rate": 1.0})
    table = HashTable("t", 1, "float32", HashTableOptions(admit_after=2, expire_after=3), room=100)
    for _ in range(50):
        update(table, [1], torch.ones(1, 1), made)
    update(table, [2], torch.ones(1, 1), made)
    table.forget_state()
    for _ in range(10):
        update(table, [1], torch.ones(1, 1), made)
    update(table, [2], torch.ones(1, 1), made)
    assert table.stats().rows == 1


def test_rows_that_have_expired_make_room_bit_by_bit() -> None:
    made = optimizer_and_options("adagrad", {"learning_rate": 1.0})
    table = HashTable("t", 4, "float32", HashTableOptions(expire_after=2), room=100_000)
    update(table, range(20_000), torch.ones(20_000, 4), made)
    for step in range(10):
        update(table, [20_000 + step], torch.ones(1, 4), made)
    assert table.stats().rows == 2  # those of the last two updates
    assert len(table) < 10
    update(table, range(20_000), torch.ones(20_000, 4), made)
    assert table.slots.end < 21_000  # their slots were taken again
    # What was there before has left nothing behind: the first step of Adagrad has length 1.
    step_lengths = read(table, range(20_000)) - initial_rows(
        table.options, "t", row_numbers(np.arange(20_000)), 4, torch.float32
    )
    assert torch.allclose(step_lengths, torch.tensor(-1.0), atol=1e-4)


def test_a_full_table_refuses_an_update_and_stays_as_it_is() -> None:
    made = optimizer_and_options("sgd", {"learning_rate": 1.0})
    table = HashTable("t", 2, "float32", HashTableOptions(), room=100)
    update(table, range(90), torch.ones(90, 2), made)
    before = read(table, range(200))
    with pytest.raises(OptimizerError, match="'t' has 90 rows"):
        update(table, range(80, 95), torch.ones(15, 2), made)
    assert torch.equal(read(table, range(200)), before)
    assert (table.step, len(table)) == (1, 90)


@pytest.mark.parametrize("name", ["sgd", "adagrad", "rowadam"])
@pytest.mark.parametrize("limit", range(4000, 24_000, 3900))
def test_a_table_says_that_it_is_full_before_an_update_finds_no_room(name: str, limit: int) -> None:
    made = optimizer_and_options(name, {"learning_rate": 1.0})
    table = HashTable("t", 8, "float32", HashTableOptions(), room=10_000)
    claimed = [0]

    def claim(nbytes: int, _what: str) -> None:
        if claimed[0] + nbytes > limit:
            raise ConfigurationError("too little")
        claimed[0] += nbytes

    def step(first: int, count: int) -> None:
        rows, _ = sorted_rows(range(first, first + count))
        table.check_update([rows[: count // 2], rows[count // 3 :]], claim, *made)
        grads = torch.ones(count, 8)
        table.update(RowSet(torch.from_numpy(rows), grads), np.ones(count, np.int64), *made)

    step(0, 10)
    for at in range(1, 100):
        step(0, 10)  # none of these rows is new
        if table.full:
            break
        step(10 * at, 10 - at % 3)  # OptimizerError would end the test
    assert "too little" in table.full


@pytest.mark.parametrize("name", ["adagrad", "rowadam"])
def test_room_for_the_state_is_claimed_before_the_first_update_creates_it(name: str) -> None:
    made = optimizer_and_options(name, {"learning_rate": 1.0})
    table, claimed = HashTable("t", 8, "float32", HashTableOptions(), room=100), list[int]()
    rows, _ = sorted_rows(range(10))
    table.check_update([rows], lambda nbytes, _what: claimed.append(nbytes), *made)
    table.update(RowSet(torch.from_numpy(rows), torch.ones(10, 8)), np.ones(10, np.int64), *made)
    assert sum(claimed) >= table._needs(20)  # two more updates with as many rows


def test_another_optimizer_begins_with_the_state_of_its_own() -> None:
    table = HashTable("t", 3, "float32", HashTableOptions(), room=100)
    update(table, range(10), torch.ones(10, 3), optimizer_and_options("adagrad", {"learning_rate": 1.0}))
    table.forget_state()
    before = read(table, range(12))
    update(
        table, range(12), torch.ones(12, 3), optimizer_and_options("adam", {"lr": 0.5, "lazy_update": True})
    )
    # The first step of Adam has the length of the rate.
    assert torch.allclose(read(table, range(12)), before - 0.5, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("sgd", {"momentum": 0.9, "wd": 0.1}),
        ("sgd", {"momentum": 0.9, "momentum_correction": True}),
        ("sgd", {"momentum": 1.0}),
        ("nag", {"momentum": 0.9}),
        ("adam", {"lazy_update": False}),
        ("lars", {"lazy_update": True}),
        ("torch:SparseAdam", {}),
        ("torch:Adam", {}),
    ],
)
def test_an_optimizer_that_needs_all_rows_is_refused(name: str, options: dict[str, Any]) -> None:
    made = optimizer_and_options(name, options)
    with pytest.raises(ConfigurationError, match="'t'"):
        check_hash_table("table 't'", HashTableOptions(), *made)


def test_momentum_that_moves_rows_without_gradient_is_refused_beside_a_limit_of_norms() -> None:
    made = optimizer_and_options(*MOMENTUM)
    with pytest.raises(ConfigurationError, match=r"'t' has max_norm=2\.5"):
        check_hash_table("table 't'", HashTableOptions(max_norm=2.5), *made)


@pytest.mark.parametrize(("name", "options"), [*EVERY_OPTIMIZER, MOMENTUM])
def test_an_optimizer_that_updates_rows_one_by_one_is_accepted(name: str, options: dict[str, Any]) -> None:
    check_hash_table("table 't'", HashTableOptions(), *optimizer_and_options(name, options))


def test_rows_that_changed_since_a_step_come_with_the_numbers_of_all() -> None:
    made = optimizer_and_options("adagrad", {"learning_rate": 1.0})
    table = HashTable("t", 3, "float32", HashTableOptions(admit_after=2, expire_after=4), room=1000)
    for ids in ([1, 2, 3], [1, 2, 4], [3, 5], [3, 5], [3, 4], [3, 6]):
        update(table, ids, torch.ones(len(ids), 3), made)
    # Rows 1 and 2 have expired; 3, 4 and 5 are there, of which 5 was updated in step 4; 6 waits.
    changed, there, waiting = set[int](), set[int](), list[tuple[int, int]]()
    for number in range(HASH_SLICES):
        all_: Any = table.slice_state(number)
        since: Any = table.slice_state(number, 4)
        is_changed = all_["touched"] > 4
        state = [name for name in all_ if name.startswith("state ")]
        assert state
        for name in ("rows", "counts", "weights", *state):
            assert torch.equal(since[name], all_[name][is_changed])
        assert torch.equal(since["figures"], all_["figures"])
        changed |= set(since["rows"].tolist())
        there |= set(since["present rows"].tolist())
        waiting += zip(since["candidate rows"].tolist(), since["candidate counts"].tolist(), strict=True)
        with pytest.raises(ProtocolError):
            table.put_slice_state(number, table.step, since)
    assert changed == {_row(3), _row(4)}
    assert there == {_row(3), _row(4), _row(5)}
    assert waiting == [(_row(6), 1)]


def test_only_updates_leave_a_slice_its_history() -> None:
    made = optimizer_and_options("sgd", {"learning_rate": 1.0})
    arrays: dict[str, Tensor] = {}

    def allocate(name: str, nbytes: int) -> Tensor:
        return arrays.setdefault(name, torch.zeros(nbytes, dtype=torch.uint8))

    table = HashTable("t", 3, "float32", HashTableOptions(max_rows=128), allocate, room=1000)
    number, seen = _slice_of(CROWDED[0]), set[int]()

    def found() -> list[int]:
        return [table.history(at) for at in range(HASH_SLICES)]

    before = found()
    for ids in (CROWDED, CROWDED[:2], CROWDED):
        update(table, ids, torch.ones(len(ids), 3), made)
    state = table.slice_state(number)
    assert found() == before
    for change in (
        lambda: table.put_slice_state(number, table.step, state),
        lambda: table.clear_slice(number),
        table.forget_state,
    ):
        seen.add(table.history(number))
        change()
        assert table.history(number) not in seen
    update(table, CROWDED, torch.ones(len(CROWDED), 3), made)
    table.put_slice_state(number, 1, table.slice_state(number), history=17)
    assert table.history(number) == 17
    # A process that goes on with the memory of a former one.
    other = HashTable("t", 3, "float32", HashTableOptions(max_rows=128), allocate, room=1000)
    other.restore()
    assert len(other) == len(table)
    assert not {other.history(at) for at in range(HASH_SLICES)} & {*before, *found(), *seen}


def test_a_slice_that_was_put_back_elsewhere_has_another_history() -> None:
    shard, plan = Shard(), make_plan([hash_table_spec("h", (3,), "float32", HashTableOptions(), 0)], 1, True)
    unit = shard.add(plan)
    made = optimizer_and_options("sgd", {"learning_rate": 1.0})
    update(shard.hash_tables[0], CROWDED, torch.ones(len(CROWDED), 3), made)
    index = plan.slices[_slice_of(CROWDED[0])].index
    before = shard.history(unit, index)
    shard.put_state(unit, index, shard.get_state(unit, index))
    assert shard.history(unit, index) != before
