"""Rounds in which ranks give only some rows of a key: two workers and one to three engines, without sockets."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import pytest
import torch
from torch import Tensor

from kvstore_server.engine import Engine
from kvstore_server.hyper import pack_hypers
from kvstore_server.namespace import EngineConfig
from kvstore_server.optimizer import create
from kvstore_server.plan import TensorSpec
from kvstore_server.rows import RowSet
from kvtrainer.comm.contribution import Contribution
from kvtrainer.comm.tables import RemoteTable
from tests.support.switchboard import connected, play

Rows = Mapping[int, RowSet]


class Job:
    """Two workers whose rounds meet in some engines; `weights` are those of rank 1."""

    def __init__(self, specs: list[TensorSpec], servers: int, optimizer: str, **options: object) -> None:
        engines = [Engine(EngineConfig(server=i, num_servers=servers)) for i in range(servers)]
        built = create(optimizer, **options)
        self.clients = connected(engines, 2)
        self.tables: list[RemoteTable] = []
        for client in self.clients:
            client.set_optimizer(built.spec())
            [table] = client.register({"t": specs}, whole_keys=not built.elementwise)
            self.tables.append(table)
        self.hyper = pack_hypers([dict(built.plain_hyper())], {}, {}, True)
        self.plan = self.tables[0].plan

    def arena(self, values: Mapping[int, Tensor]) -> dict[str, Tensor]:
        """The given keys in their places, zeros elsewhere."""
        flat = {
            name: torch.zeros(size, dtype=getattr(torch, name))
            for name, size in self.plan.arena_sizes.items()
        }
        for key, value in values.items():
            spec, at = self.plan.specs[key], self.plan.key_offsets[key]
            flat[spec.dtype][at : at + spec.numel] = value.reshape(-1).to(flat[spec.dtype].dtype)
        return flat

    def start_from(self, weights: Mapping[int, Tensor]) -> None:
        first = Contribution([self.tables[0]], [self.arena(weights)], None)
        play(self.clients, [first, Contribution([self.tables[1]], None, None)])

    def step(
        self, rows: tuple[Rows, Rows], dense: Mapping[int, Tensor] | None = None, **options: object
    ) -> dict[int, Tensor]:
        """One round: each rank gives its rows, and rank 0 the dense gradients as well; returns all weights."""
        out = self.arena({})
        absent = [frozenset(range(len(self.plan.specs))) - set(mine) - set(dense or {}) for mine in rows]
        play(self.clients, [
            Contribution([self.tables[rank]], [self.arena((dense or {}) if rank == 0 else {})],
                         [out] if rank else None, 1.0, self.hyper, absent[rank],
                         {(0, key): of_key for key, of_key in rows[rank].items()})
            for rank in range(2)
        ])  # fmt: skip
        found = {}
        for key, spec in enumerate(self.plan.specs):
            at = self.plan.key_offsets[key]
            found[key] = out[spec.dtype][at : at + spec.numel].view(spec.shape).clone()
        return found


def rows(ids: list[int], values: object, width: int) -> RowSet:
    return RowSet(
        torch.tensor(ids, dtype=torch.int64),
        torch.as_tensor(values, dtype=torch.float32).reshape(len(ids), width),
    )


NOTHING = rows([], [], 2)


def _lazy_adam(w: np.ndarray, steps: list[tuple[list[int], np.ndarray]], lr: float, wd: float) -> np.ndarray:
    """Adam of MXNet in float64, on the touched rows only; t counts the updates of the key."""
    m, v = np.zeros_like(w), np.zeros_like(w)
    for t, (ids, grad) in enumerate(steps, 1):
        g = grad + wd * w[ids]
        m[ids] = 0.9 * m[ids] + 0.1 * g
        v[ids] = 0.999 * v[ids] + 0.001 * g * g
        rate = lr * math.sqrt(1 - 0.999**t) / (1 - 0.9**t)
        w[ids] -= rate * m[ids] / (np.sqrt(v[ids]) + 1e-8)
    return w


@pytest.mark.parametrize("servers", [1, 2, 3])
def test_a_big_key_is_updated_lazily_slice_by_slice(servers: int) -> None:
    shape = (20_000, 6)
    rng = np.random.default_rng(3)
    start = rng.normal(size=shape)
    job = Job(
        [TensorSpec("table", shape, "float32")], servers, "adam", learning_rate=0.01, wd=0.1, lazy_update=True
    )
    assert len(job.plan.slices) > 3
    job.start_from({0: torch.tensor(start, dtype=torch.float32)})
    steps = []
    for _ in range(6):
        mine = [np.sort(rng.choice(shape[0], size=n, replace=False)) for n in (300, 5)]
        values = [rng.normal(size=(len(ids), shape[1])) for ids in mine]
        whole = np.zeros(shape)
        for ids, value in zip(mine, values, strict=True):
            whole[ids] += value
        union = sorted({*mine[0], *mine[1]})
        steps.append((union, whole[union]))
        given = [{0: rows(ids.tolist(), value, shape[1])} for ids, value in zip(mine, values, strict=True)]
        weights = job.step((given[0], given[1]))
    expected = _lazy_adam(start.astype(np.float32).astype(np.float64), steps, 0.01, 0.1)
    assert np.abs(weights[0].numpy() - expected).max() < 2e-6


def test_a_dense_gradient_of_one_rank_makes_the_sum_dense() -> None:
    job = Job([TensorSpec("a", (4, 2), "float32")], 1, "sgd", learning_rate=1.0, wd=0.5, lazy_update=True)
    job.start_from({0: torch.ones(4, 2)})
    weights = job.step(({}, {0: rows([1], [[1.0, 1.0]], 2)}), {0: torch.ones(4, 2)})
    # Every row: 1 - (1 + 0.5), and row 1 one less.
    assert weights[0].tolist() == [[-0.5, -0.5], [-1.5, -1.5], [-0.5, -0.5], [-0.5, -0.5]]


def test_a_rank_without_rows_takes_part_and_counts_the_update() -> None:
    job = Job([TensorSpec("a", (3, 2), "float32")], 1, "adam", learning_rate=0.1, lazy_update=True)
    job.start_from({0: torch.zeros(3, 2)})
    job.step(({0: NOTHING}, {0: NOTHING}))
    weights = job.step(({0: NOTHING}, {0: rows([2], [[1.0, 1.0]], 2)}))
    rate = 0.1 * math.sqrt(1 - 0.999**2) / (1 - 0.9**2)
    assert weights[0][2].tolist() == pytest.approx([-rate * 0.1 / (math.sqrt(0.001) + 1e-8)] * 2, rel=1e-6)
    assert not weights[0][:2].any()
