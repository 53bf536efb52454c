"""What travels is proportional to the rows that are touched: bytes of whole messages, counted at the transport."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kvstore_server.protocol import messages as m
from kvstore_server.protocol.frames import decode, encode
from kvstore_server.server import packed
from kvtrainer import RowSparseParameter, Trainer
from kvtrainer.client.client import Client, Loopback
from kvtrainer.client.session import SessionOptions
from kvtrainer.kvstore import LocalKVStore

WIDTH = 64


class Counting(Loopback):
    """Turns every message into bytes and back, and counts them."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.nbytes = 0

    def send(self, server: int, request: m.Request, priority: int = 0) -> None:
        frames = [bytes(frame) for frame in encode(request)]
        self.nbytes += sum(map(len, frames))
        super().send(server, m.Request(*decode([bytearray(frame) for frame in frames])), priority)
        told = [m.Outgoing(b"", reply) for _, reply in self._replies]
        self._replies.clear()
        self._replies.extend((server, out.reply) for out in packed(told))  # as the server's loop does

    def receive(self, timeout: float) -> tuple[int, m.Reply] | None:
        got = super().receive(timeout)
        if got is None:
            return None
        frames = [bytes(frame) for frame in encode(got[1])]
        self.nbytes += sum(map(len, frames))
        return got[0], m.Reply(*decode([bytearray(frame) for frame in frames])[2:])


class CountingStore(LocalKVStore):
    """Its Trainers' messages are counted."""

    transport: Counting

    def open_client(self, by_host: bool = False) -> Client:
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
