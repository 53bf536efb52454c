"""Rows of a hash table that a worker keeps: always as in the table, and sent again only when they have changed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import kvtrainer
from kvstore_server.errors import ConfigurationError, ProtocolError
from kvstore_server.optimizer import create
from kvstore_server.plan import HashTableOptions, TensorSpec, hash_table_spec, slices_of_hashes
from kvstore_server.protocol.rows import (
    INITIAL,
    SAME,
    SENT,
    HeldRows,
    RowSet,
    read_held_rows,
    read_pulled_rows,
)
from kvstore_server.shard.hash_table import HashTable, no_claim
from kvstore_server.shard.id_index import Ints, row_numbers
from kvtrainer.client.row_reads import PlacedRows, RowCache

WIDTH, EVERY = 3, 24
ROWS = np.sort(row_numbers(np.arange(EVERY)))
SLICES = sorted(set(slices_of_hashes(ROWS).tolist()))
"""Those that may have rows."""


def make(options: HashTableOptions) -> tuple[HashTable, TensorSpec]:
    spec = hash_table_spec("t", (WIDTH,), "float32", options)
    return HashTable("t", WIDTH, "float32", options, room=64), spec


def train(table: HashTable, places: Sequence[int], momentum: float = 0.0) -> None:
    rows = ROWS[sorted(places)]
    optimizer = create("sgd", learning_rate=1.0, momentum=momentum)
    table.check_room(len(rows), no_claim)
    grads = torch.full((len(rows), WIDTH), float(table.step + 1))
    table.update(
        RowSet(torch.from_numpy(rows), grads), np.ones(len(rows), np.int64), optimizer, optimizer.hyper
    )


def read(
    cache: RowCache, table: HashTable, spec: TensorSpec, rows: Ints, round_: int = 0
) -> tuple[Tensor, Ints]:
    """The rows as a worker reads them, and in which form each came that it asked for."""
    slots = cache.find(rows)
    out = torch.full((len(rows), WIDTH), float("nan"))
    kept = np.flatnonzero(slots >= 0)
    out[torch.from_numpy(kept)] = cache.values(slots[kept])
    asked = np.flatnonzero(~cache.are_fresh(slots, round_))
    held = cache.held(slots[asked], 0)
    if held is not None:
        held = read_held_rows(held.pack(), len(asked))
    data = table.pull(rows[asked], held)
    placed = PlacedRows(out, asked, spec, rows[asked], cache, held, round_)
    assert placed.write(data, 0, round_) == len(data)
    return out, read_pulled_rows(data, len(asked), WIDTH, torch.float32).forms.astype(np.int64)


OPTIONS = st.builds(
    HashTableOptions,
    seed=st.just(0),
    init=st.just("normal"),
    scale=st.just(1.0),
    admit_after=st.sampled_from([1, 2]),
    expire_after=st.sampled_from([0, 2]),
    max_rows=st.just(0),
    evict=st.just("lru"),
    weight_decay=st.sampled_from([0.0, 0.0, 0.25]),
    max_norm=st.sampled_from([0.0, 2.0]),
    optimizer=st.just(""),
)
PLACES = st.lists(st.integers(0, EVERY - 1), unique=True, max_size=10)
STEPS = st.tuples(st.sampled_from(["train", "read", "read", "move", "with momentum"]), PLACES)


@given(OPTIONS, st.integers(1, 30), st.lists(STEPS, max_size=20))
@settings(max_examples=200)
def test_a_worker_that_keeps_rows_reads_what_the_table_has(
    options: HashTableOptions, capacity: int, steps: list[tuple[str, list[int]]]
) -> None:
    table, spec = make(options)
    cache = RowCache(capacity, 0, WIDTH, torch.float32)
    for what, places in steps:
        rows = ROWS[sorted(places)]
        if what in ("train", "with momentum"):
            train(table, places, 0.5 * (what == "with momentum" and not options.max_norm))
        elif what == "read":
            assert torch.equal(read(cache, table, spec, rows)[0], table.read(rows))
        elif table.step:
            other, _ = make(options)
            train(other, [0, 1, 2])
            for number in SLICES:
                table.put_slice_state(number, table.step, other.slice_state(number) | _one_figure(number))
    every, _ = read(cache, table, spec, ROWS)
    assert torch.equal(every, table.read(ROWS))


def _one_figure(number: int) -> dict[str, Tensor]:
    return {"figures": torch.tensor([[number, 0, 0]])}


def test_only_rows_that_have_changed_are_sent_again() -> None:
    table, spec = make(HashTableOptions())
    cache = RowCache(10, 0, WIDTH, torch.float32)
    train(table, [1, 2, 3])
    assert read(cache, table, spec, ROWS[:5])[1].tolist() == [INITIAL, SENT, SENT, SENT, INITIAL]
    train(table, [2])
    assert read(cache, table, spec, ROWS[:5])[1].tolist() == [INITIAL, SAME, SENT, SAME, INITIAL]
    assert read(cache, table, spec, ROWS[:5])[1].tolist() == [INITIAL, SAME, SAME, SAME, INITIAL]


def test_the_rows_that_were_read_last_are_kept() -> None:
    table, spec = make(HashTableOptions())
    cache = RowCache(8, 0, WIDTH, torch.float32)
    train(table, range(EVERY))
    read(cache, table, spec, ROWS[:8])
    read(cache, table, spec, ROWS[4:8])
    read(cache, table, spec, ROWS[8:10])  # a quarter of those that were read first goes
    forms = read(cache, table, spec, ROWS[:10])[1]
    assert (forms[4:] == SAME).all()
    assert np.count_nonzero(forms[:4] == SAME) == 2


def test_rows_are_used_without_asking_until_they_are_too_old() -> None:
    table, spec = make(HashTableOptions())
    cache = RowCache(10, 2, WIDTH, torch.float32)
    train(table, [1])
    before, _ = read(cache, table, spec, ROWS[1:2], 5)
    train(table, [1])
    for round_ in (5, 6, 7):
        rows, forms = read(cache, table, spec, ROWS[1:2], round_)
        assert torch.equal(rows, before)
        assert len(forms) == 0
    rows, forms = read(cache, table, spec, ROWS[1:2], 8)
    assert torch.equal(rows, table.read(ROWS[1:2]))
    assert not torch.equal(rows, before)
    assert forms.tolist() == [SENT]


def test_a_server_believes_no_step_that_it_has_not_made() -> None:
    table, _ = make(HashTableOptions())
    train(table, [1])
    for epoch, step in ((table.epoch, 2), (table.epoch + 1, 1)):
        data = table.pull(ROWS[1:2], HeldRows(epoch, np.array([step], np.int32)))
        assert read_pulled_rows(data, 1, WIDTH, torch.float32).forms.tolist() == [SENT]
    data = table.pull(ROWS[1:2], HeldRows(table.epoch, np.array([1], np.int32)))
    assert read_pulled_rows(data, 1, WIDTH, torch.float32).forms.tolist() == [SAME]


@pytest.mark.parametrize("packed", [bytes(7), bytes(11), bytes(16)])
def test_what_a_worker_says_that_it_has_must_fit_its_rows(packed: bytes) -> None:
    with pytest.raises(ProtocolError):
        read_held_rows(packed, 1)


def test_rows_that_were_cut_off_are_refused() -> None:
    table, _ = make(HashTableOptions())
    train(table, [1, 2])
    data = table.pull(ROWS[:4])
    for length in (0, 15, 23, len(data) - 8):
        with pytest.raises(ProtocolError):
            read_pulled_rows(data[:length], 4, WIDTH, torch.float32)


@pytest.mark.parametrize(
    "options",
    [{"cache_rows": -1}, {"cache_rows": 1.5}, {"cache_age": 3}, {"cache_rows": 10, "cache_age": -1}],
)
def test_a_wrong_size_or_age_is_refused(options: dict[str, float]) -> None:
    with pytest.raises(ConfigurationError):
        kvtrainer.Embedding(WIDTH, **options)  # type: ignore[arg-type]
