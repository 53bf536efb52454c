"""Workers that agree over a store of somebody else, which can only broadcast and sum."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from kvtrainer.errors import KVStoreError, RoundAbortedError, StateFileError, StateMismatchError
from kvtrainer.kvstore import KVStoreBase, create
from kvtrainer.strategy import Strategy, agreement_of
from kvtrainer.strategy.parts import share_weights
from tests.support.limits import LIMIT
from tests.support.processes import raised, together
from tests.support.strategies import SGD, Net, same, steps, weights


class Sums:
    """What the members of a job of two add up."""

    def __init__(self) -> None:
        self.barrier = threading.Barrier(2, timeout=LIMIT)
        self.values: dict[int, torch.Tensor] = {}

    def exchange(self, rank: int, value: torch.Tensor) -> dict[int, torch.Tensor]:
        self.values[rank] = value.clone()
        self.barrier.wait()
        found = dict(self.values)
        self.barrier.wait()
        return found


class Member(KVStoreBase):
    def __init__(self, sums: Sums, rank: int) -> None:
        self._sums, self._rank = sums, rank

    type = "sums"
    num_workers = 2

    @property
    def rank(self) -> int:
        return self._rank

    def broadcast(self, key: Any, value: Any, out: Any, priority: int = 0) -> None:
        out.copy_(self._sums.exchange(self._rank, value)[0])

    def pushpull(self, key: Any, value: Any, out: Any = None, priority: int = 0) -> None:
        found = self._sums.exchange(self._rank, value)
        (value if out is None else out).copy_(found[0] + found[1])


@pytest.fixture
def members() -> list[Member]:
    sums = Sums()
    return [Member(sums, rank) for rank in (0, 1)]


def share_weights_of(models: Sequence[nn.Module], members: list[Member]) -> list[Any]:
    """What comes of sharing the weights of each worker's model."""
    pairs = zip(models, members, strict=True)
    return together(*(lambda a=a, b=b: share_weights(a, agreement_of(b)) for a, b in pairs))


def test_one_worker_agrees_with_itself() -> None:
    for store in (None, create("local"), create("device")):
        agreement = agreement_of(store)
        assert (agreement.rank, agreement.size) == (0, 1)
        assert agreement.broadcast(b"a") == b"a"
        assert agreement.gather(b"b") == agreement.all_gather(b"b") == [b"b"]


@pytest.mark.parametrize("length", [0, 1, 3 * 4096 - 8, 3 * 4096 - 7, 3 * 262144 + 3 * 4096])
def test_bytes_of_every_value_and_length_arrive(members: list[Member], length: int) -> None:
    data = bytes(at * 7 % 256 for at in range(length))

    def talk(member: Member) -> Any:
        agreement = agreement_of(member)
        told = agreement.broadcast(data if member.rank == 0 else b"")
        return told, agreement.all_gather(data[: member.rank])

    assert together(*(lambda m=m: talk(m) for m in members)) == [(data, [b"", data[:1]])] * 2


def test_weights_that_have_no_shape_yet_wait_for_the_first_batch(members: list[Member]) -> None:
    models = [nn.Sequential(nn.Linear(2, 2), nn.LazyLinear(3)) for _ in members]
    share_weights_of(models, members)
    mine, theirs = (model.get_parameter("0.weight") for model in models)
    assert torch.equal(mine, theirs)
    assert all(nn.parameter.is_lazy(model.get_parameter("1.weight")) for model in models)


def test_a_worker_with_another_model_fails_on_all(members: list[Member]) -> None:
    found = share_weights_of([nn.Linear(2, 1), nn.Linear(3, 1)], members)
    assert isinstance(found[0], RoundAbortedError)
    assert "rank 1 could not take over the weights of rank 0" in str(found[0])
    assert isinstance(found[1], StateMismatchError)


def test_a_worker_that_fails_is_named_to_the_others(members: list[Member]) -> None:
    def fail_on_0(member: Member) -> None:
        with agreement_of(member).all_or_none("write"):
            if member.rank == 0:
                raise ValueError("full")

    first, second = together(*(lambda m=m: fail_on_0(m) for m in members))
    assert isinstance(first, ValueError)
    assert raised([second], RoundAbortedError) == ["rank 0 could not write: ValueError: full"]


def strategy_of(member: Member, folder: Path) -> Strategy:
    log = {"name": f"member {member.rank}", "log_level": "ERROR"}
    return Strategy(kvstore=member, work_dir=str(folder / str(member.rank)), log_kwargs=log)


def test_strategy_over_such_a_store_shares_names_weights_and_checkpoints(
    members: list[Member], tmp_path: Path
) -> None:
    path = str(tmp_path / "a.pt")

    def run(member: Member) -> Any:
        strategy = strategy_of(member, tmp_path)
        model, trainer = strategy.prepare(Net(), optim_wrapper=SGD)
        steps(model, trainer, 2)
        strategy.save_checkpoint(path)
        expected = weights(model)
        steps(model, trainer, 1)
        rest = strategy.resume(path)
        alike = [strategy.world_size, strategy.timestamp, strategy.seed, rest["meta"]["world_size"]]
        strategy.close()
        return (strategy.rank, alike), expected, weights(model)

    first, second = together(*(lambda m=m: run(m) for m in members))
    assert (first[0], second[0]) == ((0, first[0][1]), (1, first[0][1]))
    assert (first[0][1][0], first[0][1][3]) == (2, 2)
    for expected in (*first[1:], *second[1:]):
        assert all(torch.equal(a, b) for a, b in zip(expected, first[1], strict=True))


def test_a_file_that_is_damaged_for_one_worker_changes_the_weights_of_none(
    members: list[Member], tmp_path: Path
) -> None:
    torch.save(Net().state_dict(), tmp_path / "0.pt")
    (tmp_path / "1.pt").write_bytes((tmp_path / "0.pt").read_bytes()[:-1])

    def run(member: Member) -> Any:
        strategy = strategy_of(member, tmp_path)
        model = strategy.prepare(Net())
        before = weights(model)
        try:
            strategy.load_checkpoint(str(tmp_path / f"{member.rank}.pt"))
        except KVStoreError as error:
            return type(error), same(weights(model), before)
        finally:
            strategy.close()

    found = together(*(lambda m=m: run(m) for m in members))
    assert found == [(RoundAbortedError, True), (StateFileError, True)]
