"""One table on one server: vetoes, replaced weights, and the optimizer and options on which its ranks agree."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kvstore_server.codec import make_codec
from kvstore_server.engine.agreed_options import AgreedOptimizer, AgreedOptions, effective_hypers, pack_hypers
from kvstore_server.engine.table import ALL, RankCommit, Table
from kvstore_server.errors import (
    ConfigurationError,
    KVStoreError,
    PlanMismatchError,
    ProtocolError,
    ShapeMismatchError,
    UnknownNameError,
)
from kvstore_server.optimizer import Optimizer, create
from kvstore_server.plan import TensorSpec, make_plan
from kvstore_server.protocol import messages as m
from kvstore_server.protocol.frames import pack_control
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
    leases.location_of = lambda weights: 0
    table = Table(0, "t", make_plan([TensorSpec("k", (1 << 16,), "float32")], 1), 0, 1, Shard(leases))
    for round_ in range(2):
        ones = {slice_.index: torch.ones(slice_.used) for slice_ in table.unit.slices}
        table.apply(ALL, round_, {0: RankCommit(given_to(table.shard, ones), m.ASSIGNS)}, None, None, ())
        counters = table.shard.storage.slots[0].block.counters
        assert counters is not None
        begun, ended = counters
        assert begun.tolist() == ended.tolist()
        assert begun.min() > round_


RANKS = range(3)
PLAN = make_plan([TensorSpec("w", (3,), "float32"), TensorSpec("b", (2,), "float32", group=1)], 1)


def packed(lr: float, lr_mult: dict[int, float] | None = None, in_store: bool = True) -> bytes:
    groups = [
        {"lr": lr, "weight_decay": 0.0, "momentum": 0.0},
        {"lr": 2 * lr, "weight_decay": 0.5, "momentum": 0.0},
    ]
    return pack_hypers(groups, lr_mult or {}, {}, update_on_kvstore=in_store)


def spec(name: str, **options: float) -> bytes:
    return pack_control(create(name, **options).spec())


def test_ranks_that_set_the_same_optimizer_agree() -> None:
    named = AgreedOptimizer()
    for rank in range(2):
        named.set(rank, spec("sgd", learning_rate=0.5))
    agreed = named.agreed()
    assert agreed is not None
    assert agreed.learning_rate == 0.5
    named.set(0, spec("sgd", learning_rate=0.5))
    assert named.agreed() is agreed


@pytest.mark.parametrize(
    ("later", "replaced"),
    [(("sgd", 0.5), None), (("sgd", 0.25), None), (("adam", 0.5), "sgd")],
)
def test_only_another_algorithm_is_reported_as_a_replacement(
    later: tuple[str, float], replaced: str | None
) -> None:
    named = AgreedOptimizer()
    named.set(0, spec("sgd", learning_rate=0.5))
    assert named.set(0, spec(later[0], learning_rate=later[1])) == replaced


def test_ranks_with_different_optimizers_are_both_named() -> None:
    named = AgreedOptimizer()
    named.set(0, spec("sgd"))
    named.set(2, spec("adam"))
    with pytest.raises(PlanMismatchError, match=r"'sgd'.*rank 0.*'adam'.*rank 2"):
        named.agreed()


def test_an_unknown_optimizer_leaves_the_former_one_in_force() -> None:
    named = AgreedOptimizer()
    named.set(0, spec("sgd"))
    with pytest.raises(UnknownNameError, match="no_such"):
        named.set(0, pack_control({"name": "no_such", "hyper": {}}))
    agreed = named.agreed()
    assert agreed is not None
    assert agreed.registered_name == "sgd"


def test_keys_with_equal_numbers_share_one_mapping() -> None:
    plan = make_plan([TensorSpec("a", (1,), "float32"), TensorSpec("b", (1,), "float32")], 1)
    first, second = effective_hypers(plan, create("sgd"), {"groups": None})
    assert first is second


@pytest.mark.parametrize(
    ("first", "second", "said"),
    [
        (packed(0.25), packed(0.125), r"group 0.*lr=0.25.*rank 0 and 0.125.*rank 1"),
        (packed(0.25), packed(0.25, lr_mult={1: 2.0}), r"lr_mult.*\{\}.*rank 0.*\{1: 2.0\}.*rank 1"),
        (packed(0.5), packed(0.5, in_store=False), r"update_on_kvstore is True.*rank 0 and False.*rank 1"),
    ],
    ids=["number", "multiplier", "site of the update"],
)
def test_ranks_that_disagree_are_named_with_both_values(first: bytes, second: bytes, said: str) -> None:
    named = AgreedOptions(PLAN)
    named.set(0, first)
    named.set(1, second)
    with pytest.raises(PlanMismatchError, match=said):
        named.effective(create("sgd"), named.common(RANKS))


@pytest.mark.parametrize("values", [[], {"groups": []}, {"groups": [{}], "lr_mult": {}, "wd_mult": {}}])
def test_bytes_that_are_no_numbers_of_this_table_are_refused(values: object) -> None:
    with pytest.raises(ConfigurationError):
        AgreedOptions(PLAN).check(pack_control(values))


@pytest.mark.parametrize("name", ["lr", "weight_decay"])
def test_a_number_that_is_to_be_multiplied_must_be_one(name: str) -> None:
    with pytest.raises(ConfigurationError):
        AgreedOptions(PLAN).check(pack_hypers([{name: None}] * 2, {}, {}, update_on_kvstore=True))


def test_a_round_without_an_optimizer_fails_too_when_ranks_disagree() -> None:
    table = Table(0, "t", PLAN, 0, 2, Shard())
    [slice_] = PLAN.slices
    parts = {rank: RankCommit(given_to(table.shard, {0: torch.zeros(slice_.used)})) for rank in (0, 1)}
    table.apply(ALL, 0, parts, None, None, ())
    for rank, rate in enumerate((0.5, 0.25)):
        table.hyper.set(rank, packed(rate))
    with pytest.raises(PlanMismatchError, match=r"lr=0\.5.*rank 0 and 0\.25.*rank 1"):
        table.apply(ALL, 1, parts, None, None, ())


def test_an_optimizer_at_the_address_of_one_that_is_gone_brings_its_own_numbers() -> None:
    named = AgreedOptions(PLAN)
    rates = []
    for rate in (0.5, 0.25, 0.125):
        optimizer = create("sgd", learning_rate=rate)
        rates.append(named.effective(optimizer, named.common(RANKS))[0]["lr"])
        del optimizer
    assert rates == [0.5, 0.25, 0.125]


def test_numbers_that_an_update_would_break_off_with_are_refused_and_the_table_lives() -> None:
    table, parts = table_with_values()
    table.hyper.set(0, pack_hypers([{"lr": 0.5, "momentum": "x"}] * 2, {}, {}, update_on_kvstore=True))
    with pytest.raises(ConfigurationError):
        table.apply(ALL, 1, parts, create("sgd"), None, ())
    assert table.conflict is None


def test_a_table_whose_update_broke_off_is_not_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    table, parts = table_with_values()

    def broken(*_: Any) -> None:
        raise MemoryError

    monkeypatch.setattr(table.shard, "update", broken)
    with pytest.raises(KVStoreError):
        table.apply(ALL, 1, parts, create("sgd"), None, ())
    assert table.conflict is not None


def table_with_values() -> tuple[Table, dict[int, RankCommit]]:
    """A table whose first round was applied, and what was given to it."""
    table = Table(0, "t", PLAN, 0, 1, Shard())
    [slice_] = PLAN.slices
    parts = {0: RankCommit(given_to(table.shard, {0: torch.zeros(slice_.used)}))}
    table.apply(ALL, 0, parts, None, None, ())
    return table, parts
