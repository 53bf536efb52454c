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
from kvstore_server.reduction import RowSet
from kvtrainer.comm.round import Contribution
from kvtrainer.comm.tables import RemoteTable
from tests.support.switchboard import connected

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
        self._both(
            [
                Contribution([self.tables[0]], [self.arena(weights)], None),
                Contribution([self.tables[1]], None, None),
            ]
        )

    def step(
        self, rows: tuple[Rows, Rows], dense: Mapping[int, Tensor] | None = None, **options: object
    ) -> dict[int, Tensor]:
        """One round: each rank gives its rows, and rank 0 the dense gradients as well; returns all weights."""
        out = self.arena({})
        absent = [frozenset(range(len(self.plan.specs))) - set(mine) - set(dense or {}) for mine in rows]
        self._both([
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

    def _both(self, items: list[Contribution]) -> None:
        tickets = [client.rounds.start(item) for client, item in zip(self.clients, items, strict=True)]
        for client, ticket in zip(self.clients, tickets, strict=True):
            client.rounds.wait(ticket)


def rows(ids: list[int], values: object, width: int) -> RowSet:
    return RowSet(
        torch.tensor(ids, dtype=torch.int64),
        torch.as_tensor(values, dtype=torch.float32).reshape(len(ids), width),
    )


NOTHING = rows([], [], 2)

GOLDEN = {
    ("sgd", 0.1, (("wd", 0.01), ("lazy_update", True))): [0.927043, -1.934066, 0.4495, 3.017, 1.946022, 2.035982],
    ("sgd", 0.1, (("wd", 0.01),)): [0.92515, -1.93018, 0.447505, 3.00503, 1.94014, 2.02992],
    ("sgd", 0.1, (("wd", 0.01), ("momentum", 0.9), ("lazy_update", True))): [
        0.889353, -1.876686, 0.4495, 3.017, 1.926222, 2.052182],
    ("sgd", 0.1, (("wd", 0.01), ("momentum", 0.9))): [0.801548, -1.785635, 0.443443, 2.980661, 1.823988, 2.096497],
    ("adam", 0.01, (("wd", 0.01), ("lazy_update", True))): [
        0.971854, -1.970903, 0.494545, 3.005455, 1.984036, 2.016026],
    ("adam", 0.01, (("wd", 0.01),)): [0.957281, -1.955397, 0.454437, 2.962366, 1.959143, 2.015812],
    ("adagrad", 0.1, ()): [0.723271, -1.771554, 0.4, 3.1, 1.816795, 2.170711],
    ("groupadagrad", 0.1, ()): [0.759836, -1.745827, 0.368694, 3.052522, 1.807419, 2.161721],
    ("ftrl", 0.1, ()): [0.037134, -0.285389, 0.132667, 0.515833, 0.293784, 0.364757],
    ("rmsprop", 0.001, (("wd", 0.01),)): [0.990982, -1.992155, 0.487782, 2.993942, 1.990686, 2.001723],
}  # fmt: skip
"""MXNet 2.0.0b1's weights after five steps in which rows {0}, {0, 2}, {2}, {0}, {1} get the gradient [.1(t+1), -.2]."""


@pytest.mark.parametrize("servers", [1, 2, 3])
@pytest.mark.parametrize("others", [0, 1])
@pytest.mark.parametrize(
    "case", GOLDEN, ids=lambda case: f"{case[0]}-{'-'.join(name for name, _ in case[2])}"
)
def test_lazy_updates_follow_mxnets_trajectories(case: tuple[str, float, tuple[tuple[str, object], ...]], others: int,
                                                 servers: int) -> None:  # fmt: skip
    name, lr, options = case
    specs = [TensorSpec("table", (3, 2), "float32"), *[TensorSpec("beside", (5, 1), "float32")] * others]
    job = Job(specs, servers, name, learning_rate=lr, **dict(options))
    job.start_from({0: torch.tensor([[1.0, -2.0], [0.5, 3.0], [2.0, 2.0]])})
    for t, touched in enumerate([[0], [0, 2], [2], [0], [1]]):
        # Each rank gives half of the gradient; the last row of it comes from rank 1 alone.
        grad = [0.1 * (t + 1), -0.2]
        half = [g / 2 for g in grad]
        if len(touched) == 2:
            given = rows([0], [grad], 2), rows([2], [grad], 2)
        else:
            given = rows(touched, [half], 2), rows(touched, [half], 2)
        weights = job.step(({0: given[0]}, {0: given[1]}), {1: torch.zeros(5, 1)} if others else None)
    assert weights[0].flatten().tolist() == pytest.approx(GOLDEN[case], abs=1.5e-6, rel=1e-6)


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


def test_the_number_of_servers_changes_no_bit() -> None:
    results = []
    for servers in (1, 2, 3):
        gen = torch.Generator().manual_seed(5)
        job = Job([TensorSpec("a", (9_000, 5), "float32"), TensorSpec("b", (40,), "float32")], servers, "sgd",
                  learning_rate=0.1, momentum=0.9, lazy_update=True)  # fmt: skip
        job.start_from({0: torch.randn(9_000, 5, generator=gen), 1: torch.randn(40, generator=gen)})
        for _ in range(4):
            ids = [torch.randperm(9_000, generator=gen)[:200].sort().values for _ in range(2)]
            given = [{0: RowSet(i, torch.randn(200, 5, generator=gen))} for i in ids]
            weights = job.step((given[0], given[1]), {1: torch.randn(40, generator=gen)})
        results.append(weights)
    assert all(torch.equal(results[0][key], other[key]) for other in results[1:] for key in (0, 1))


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


def test_half_precision_rows_move_a_float32_copy() -> None:
    job = Job(
        [TensorSpec("a", (4, 2), "float16")],
        2,
        "sgd",
        learning_rate=1.0,
        lazy_update=True,
        multi_precision=True,
    )
    job.start_from({0: torch.ones(4, 2)})
    small = RowSet(torch.tensor([3]), torch.full((1, 2), 1e-4, dtype=torch.float16))
    for _ in range(50):
        weights = job.step(({0: small}, {0: small}))
    assert weights[0][:3].tolist() == [[1.0, 1.0]] * 3
    assert weights[0][3].float().tolist() == pytest.approx([0.99, 0.99], abs=5e-4)


def test_torchs_sparse_optimizer_gets_a_sparse_gradient() -> None:
    job = Job([TensorSpec("a", (5, 3), "float32")], 2, "torch:SparseAdam", lr=0.01)
    start = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))
    job.start_from({0: start})
    reference = torch.nn.Parameter(start.clone())
    oracle = torch.optim.SparseAdam([reference], lr=0.01)
    gen = torch.Generator().manual_seed(1)
    for ids in ([0, 3], [3], [1, 4]):
        values = torch.randn(len(ids), 3, generator=gen)
        weights = job.step(({0: RowSet(torch.tensor(ids), values)}, {}))
        reference.grad = torch.sparse_coo_tensor([ids], values, (5, 3))
        oracle.step()
    assert torch.equal(weights[0], reference.detach())
