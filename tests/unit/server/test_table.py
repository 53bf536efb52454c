"""One table on one server: vetoed rounds, replaced weights, damaged payloads."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kvstore_server.codec import make_codec
from kvstore_server.engine.agreed import pack_hypers
from kvstore_server.engine.table import ALL, RankCommit, Table
from kvstore_server.errors import PlanMismatchError, ProtocolError, ShapeMismatchError
from kvstore_server.optimizer import Optimizer, create
from kvstore_server.plan import TensorSpec, make_plan
from kvstore_server.protocol import messages as m
from kvstore_server.protocol.rows import read_payload
from kvstore_server.shard.shard import Leases, Shard
from tests.support.optimizer_slices import given_to

SGD = create("sgd", learning_rate=1.0, momentum=0.5)


class Ranks:
    """Two ranks of a table with one key of four numbers, initialised to 10."""

    def __init__(self, dtype: str = "float32", optimizer: Optimizer | None = SGD) -> None:
        plan = make_plan([TensorSpec("k", (4,), dtype)], 1)
        self.table = Table(0, "t", plan, 0, 2, Shard())
        self.dtype = getattr(torch, dtype)
        self.optimizer = optimizer
        self.number = 0
        self.round(10.0, None)

    def round(self, *values: float | None, **said: Any) -> list[float]:
        """Every rank gives its value, or nothing where it is None; the distinct weights afterwards.

        `said` has the ranks that veto, or that want the weights replaced.
        """
        parts = {}
        for rank, value in enumerate(values):
            slices = {} if value is None else {0: torch.full((4,), value, dtype=self.dtype)}
            given = given_to(self.table.shard, slices)
            flags = m.VETOES * (rank in said.get("vetoes", ())) | m.ASSIGNS * (
                rank in said.get("assigns", ())
            )
            parts[rank] = RankCommit(given, flags)
        self.table.apply(ALL, self.number, parts, self.optimizer, None, ())
        self.number += 1
        return self.weights

    @property
    def weights(self) -> list[float]:
        return self.table.shard.visible(self.table.unit, 0).unique().tolist()

    @property
    def state(self) -> Tensor:
        return self.table.shard.get_state(self.table.unit, 0).tensors["momentum_buffer"][:4]


def test_a_veto_of_one_rank_keeps_weights_and_state_and_names_the_rank() -> None:
    ranks = Ranks()
    assert ranks.round(1.0, 1.0) == [8.0]
    state = ranks.state
    assert ranks.round(5.0, None, vetoes=[1]) == [8.0]
    assert ranks.table.ends[ALL].vetoes == (1,)
    assert torch.equal(ranks.state, state)
    assert ranks.table.rounds_applied == 1
    assert ranks.round(1.0, 1.0) == [5.0]
    assert ranks.table.ends[ALL].vetoes == ()


def test_a_vetoed_round_that_another_server_failed_can_be_taken_back_though_nothing_is_kept_of_it() -> None:
    ranks = Ranks()
    ranks.round(1.0, None, vetoes=[1])
    assert ranks.table.undo(ALL)
    assert (ranks.table.undone, ranks.table.version) == (1, 0)
    ranks.round(1.0, 1.0)
    assert not ranks.table.undo(ALL)  # SGD cannot raise: no copy is kept


@pytest.mark.parametrize("rank", [0, 1])
def test_a_round_in_which_only_some_replace_the_weights_fails_and_names_one_that_does_not(rank: int) -> None:
    ranks = Ranks()
    with pytest.raises(PlanMismatchError, match=f"rank {1 - rank} updates 't' in a round in which"):
        ranks.round(1.0, 1.0, assigns=[rank])
    assert ranks.weights == [10.0]


def test_replacing_the_weights_without_all_their_slices_fails() -> None:
    ranks = Ranks()
    with pytest.raises(ProtocolError, match=r"rank 0.*'t'.*slices \[0\]"):
        ranks.round(None, 1.0, assigns=[0, 1])
    assert ranks.weights == [10.0]


def test_a_damaged_compressed_payload_is_refused_when_it_comes() -> None:
    codec, plan = make_codec({"type": "2bit"}), make_plan([TensorSpec("k", (4,), "float32")], 1)
    for data, error in (([0b01000000], ProtocolError), ([0, 0], ShapeMismatchError)):
        with pytest.raises(error, match=r"holds the code 01|compressed by"):
            read_payload(plan, plan.slices[0], torch.tensor(data, dtype=torch.uint8), codec)


def test_ranks_that_disagree_on_the_learning_rate_cannot_veto_it_away() -> None:
    ranks = Ranks()
    for rank, lr in enumerate((0.1, 0.2)):
        options = {"lr": lr, "weight_decay": 0.0, "clip_gradient": None, "momentum": 0.5}
        ranks.table.hyper.set(rank, pack_hypers([options], {}, {}, update_on_kvstore=True))
    assert ranks.round(1.0, None, vetoes=[1]) == [10.0]
    with pytest.raises(PlanMismatchError):
        ranks.round(1.0, 1.0)


def test_who_maps_weights_sees_that_they_are_being_replaced() -> None:
    leases = Leases()
    leases.shared = lambda nbytes: torch.zeros(nbytes, dtype=torch.uint8)
    leases.place_of = lambda weights: 0
    table = Table(0, "t", make_plan([TensorSpec("k", (1 << 16,), "float32")], 1), 0, 1, Shard(leases))
    for round_ in range(2):
        ones = {piece.index: torch.ones(piece.used) for piece in table.unit.slices}
        table.apply(ALL, round_, {0: RankCommit(given_to(table.shard, ones), m.ASSIGNS)}, None, None, ())
        marks = table.shard.storage.slots[0].block.marks
        assert marks is not None
        begun, ended = marks
        assert begun.tolist() == ended.tolist()
        assert begun.min() > round_
