"""One table on one server: vetoed rounds, replaced weights, damaged payloads."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kvstore_server.codec import make_codec
from kvstore_server.errors import PlanMismatchError, ProtocolError, RoundAbortedError, ShapeMismatchError
from kvstore_server.hyper import pack_hypers
from kvstore_server.optimizer import Optimizer, create
from kvstore_server.plan import TensorSpec, make_plan
from kvstore_server.protocol import messages as m
from kvstore_server.table import Table, Waiter

SGD = create("sgd", learning_rate=1.0, momentum=0.5)


class Ranks:
    """Two ranks of a table with one key of four numbers, initialised to 10."""

    def __init__(self, dtype: str = "float32", optimizer: Optimizer | None = SGD) -> None:
        plan = make_plan([TensorSpec("k", (4,), dtype)], 1)
        self.table = Table(0, "t", plan, 0, 2, None)
        self.dtype = getattr(torch, dtype)
        self.optimizer = optimizer
        self.round(10.0, None)

    def round(self, *values: float | None, **said: Any) -> list[float]:
        """Every rank gives its value, or nothing where it is None; the distinct weights afterwards.

        `said` has what the commits say: one value for all ranks, or a list.
        """
        number = self.table.rounds.number
        for rank, value in enumerate(values):
            if value is not None:
                payload = torch.full((4,), value, dtype=self.dtype)
                self.table.push(rank, m.Push(0, 0, number, 0, payload), None)
            mine = {name: v[rank] if isinstance(v, list) else v for name, v in said.items()}
            manifest = ((0, 0),) if value is not None else ()
            commit = m.Commit(0, number, manifest, None, True, 10.0, **mine)
            self.table.rounds.commit(rank, commit, Waiter(b"%d" % rank, 1), 0.0)
        self.table.apply(0, self.optimizer, None)
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
    assert ranks.round(5.0, None, veto=[False, True]) == [8.0]
    assert ranks.table.end_of(0).vetoes == (1,)
    assert torch.equal(ranks.state, state)
    assert ranks.table.counters()["rounds_applied"] == 1
    assert ranks.round(1.0, 1.0) == [5.0]
    assert ranks.table.end_of(0).vetoes == ()


def test_a_veto_counts_without_an_optimizer_too() -> None:
    ranks = Ranks(optimizer=None)
    assert ranks.round(1.0, 2.0) == [3.0]
    assert ranks.round(5.0, 5.0, veto=[True, True]) == [3.0]
    assert ranks.table.end_of(0).vetoes == (0, 1)


def test_a_vetoed_round_that_another_server_failed_becomes_a_failed_one() -> None:
    ranks = Ranks()
    ranks.round(1.0, None, veto=[False, True])
    number = ranks.table.rounds.number - 1
    for _ in range(2):
        ranks.table.abort(0, number, RoundAbortedError("gone"), undo=True)
        assert not ranks.table.rounds.was_applied(number)
    assert ranks.table.counters()["rounds_undone"] == 1


def test_a_failed_round_after_a_vetoed_one_is_not_taken_back_a_second_time() -> None:
    ranks = Ranks()
    ranks.round(1.0, None, veto=[False, True])
    number = ranks.table.rounds.number
    ranks.table.fail(0, RoundAbortedError("first"))
    ranks.table.abort(0, number, RoundAbortedError("second"), undo=True)
    verdict = ranks.table.rounds.commit(0, m.Commit(0, number, (), None, True, 1.0), Waiter(b"0", 9), 0.0)
    assert "first" in str(verdict)


def test_replaced_weights_are_the_lowest_ranks_and_the_state_stays() -> None:
    ranks = Ranks()
    assert ranks.round(1.0, 1.0) == [8.0]  # m = 2
    assert ranks.round(100.0, 7.0, assign=True) == [100.0]
    assert ranks.round(0.0, 0.0) == [99.0]  # m = 1


@pytest.mark.parametrize("said", [[True, False], [False, True]])
def test_a_round_in_which_only_some_replace_the_weights_fails_and_names_one_that_does_not(
    said: list[bool],
) -> None:
    ranks = Ranks()
    with pytest.raises(PlanMismatchError, match=f"rank {said.index(False)} updates 't' in a round in which"):
        ranks.round(1.0, 1.0, assign=said)
    assert ranks.weights == [10.0]


def test_replacing_the_weights_without_all_their_slices_fails() -> None:
    ranks = Ranks()
    with pytest.raises(ProtocolError, match=r"rank 0 gave table 't' values without its slices \[0\]"):
        ranks.round(None, 1.0, assign=True)
    assert ranks.weights == [10.0]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_masters_follow_replaced_weights(dtype: str) -> None:
    optimizer = create("sgd", learning_rate=2.0**-14, multi_precision=True)
    ranks = Ranks(dtype, optimizer)
    ranks.round(0.0, 1.0)
    ranks.round(1.0, None, assign=True)
    for _ in range(64):  # each step is far below the resolution at 1, half of them together are not
        ranks.round(0.5, 0.5)
    assert ranks.weights == [1.0 - 2.0**-8]


def test_a_damaged_compressed_payload_is_refused_when_it_comes() -> None:
    ranks = Ranks()
    codec = make_codec({"type": "2bit"})
    for data, error in (([0b01000000], ProtocolError), ([0, 0], ShapeMismatchError)):
        push = m.Push(0, 0, ranks.table.rounds.number, 0, torch.tensor(data, dtype=torch.uint8))
        with pytest.raises(error, match=r"holds the code 01|2 bytes compressed by"):
            ranks.table.push(0, push, codec)
    assert ranks.round(1.0, 1.0) == [8.0]


def test_ranks_that_disagree_on_the_learning_rate_cannot_veto_it_away() -> None:
    ranks = Ranks()
    for rank, lr in enumerate((0.1, 0.2)):
        options = {"lr": lr, "weight_decay": 0.0, "clip_gradient": None, "momentum": 0.5}
        ranks.table.hyper.set(rank, pack_hypers([options], {}, {}, update_on_kvstore=True))
    assert ranks.round(1.0, None, veto=[False, True]) == [10.0]
    with pytest.raises(PlanMismatchError):
        ranks.round(1.0, 1.0)
