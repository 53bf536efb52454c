"""Workers that agree; over a third-party store several have no way to, and are refused what needs one."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from kvtrainer import Trainer
from kvtrainer.errors import (
    ConfigurationError,
    KVStoreError,
    RoundAbortedError,
    StateFileError,
    StateMismatchError,
)
from kvtrainer.integrations.workers import Workers
from kvtrainer.kvstore import KVStoreBase, create
from kvtrainer.strategy import Agreement, Strategy, agreement_of
from kvtrainer.strategy.parts import share_weights
from tests.support.limits import LIMIT
from tests.support.processes import raised, together
from tests.support.strategies import Net, same, weights


class Meeting:
    """Where the members of a job of two exchange what they have."""

    def __init__(self) -> None:
        self.barrier = threading.Barrier(2, timeout=LIMIT)
        self.values: dict[int, Any] = {}

    def exchange(self, rank: int, value: Any) -> dict[int, Any]:
        self.values[rank] = value
        self.barrier.wait()
        found = dict(self.values)
        self.barrier.wait()
        return found


class Member(Agreement):
    size = 2

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self.meeting, self.rank = meeting, rank

    def broadcast(self, data: bytes) -> bytes:
        return self.all_gather(data)[0]

    def all_gather(self, mine: bytes) -> list[bytes]:
        found = self.meeting.exchange(self.rank, mine)
        return [found[0], found[1]]


class Store(KVStoreBase):
    """A third-party store of two workers."""

    type, num_workers, rank = "sums", 2, 0

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self.meeting, self.rank = meeting, rank

    def broadcast(self, key: Any, value: Any, out: Any, priority: int = 0) -> None:
        out.copy_(self.meeting.exchange(self.rank, value.clone())[0])

    def pushpull(self, key: Any, value: Any, out: Any = None, priority: int = 0) -> None:
        found = self.meeting.exchange(self.rank, value.clone())
        (value if out is None else out).copy_(found[0] + found[1])


@pytest.fixture
def members() -> list[Member]:
    meeting = Meeting()
    return [Member(meeting, rank) for rank in (0, 1)]


@pytest.fixture
def stores() -> list[Store]:
    meeting = Meeting()
    return [Store(meeting, rank) for rank in (0, 1)]


def share_weights_of(models: Sequence[nn.Module], members: list[Member]) -> list[Any]:
    """What comes of sharing the weights of each worker's model."""
    pairs = zip(models, members, strict=True)
    return together(*(lambda a=a, b=b: share_weights(a, b) for a, b in pairs))


def test_one_worker_agrees_with_itself() -> None:
    for store in (None, create("local"), create("device")):
        agreement = agreement_of(store)
        assert (agreement.rank, agreement.size) == (0, 1)
        assert agreement.broadcast(b"a") == b"a"
        assert agreement.gather(b"b") == agreement.all_gather(b"b") == [b"b"]


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
        with member.all_or_none("write"):
            if member.rank == 0:
                raise ValueError("full")

    first, second = together(*(lambda m=m: fail_on_0(m) for m in members))
    assert isinstance(first, ValueError)
    assert raised([second], RoundAbortedError) == ["rank 0 could not write: ValueError: full"]


class Met(Strategy):
    """A strategy whose workers agree by a member."""

    def __init__(self, member: Member, folder: Path) -> None:
        self.member = member
        log = {"name": f"member {member.rank}", "log_level": "ERROR"}
        super().__init__(kvstore=None, work_dir=str(folder / str(member.rank)), log_kwargs=log)

    def _meet(self) -> Agreement:
        return self.member


def test_a_file_damaged_for_one_worker_changes_no_weights(members: list[Member], tmp_path: Path) -> None:
    torch.save(Net().state_dict(), tmp_path / "0.pt")
    (tmp_path / "1.pt").write_bytes((tmp_path / "0.pt").read_bytes()[:-1])

    def run(member: Member) -> Any:
        strategy = Met(member, tmp_path)
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


# ---------------------------------------------------------------- a third-party store


@pytest.mark.parametrize(
    "use",
    [
        lambda store, folder: agreement_of(store),
        lambda store, folder: Workers(store),
        lambda store, folder: Strategy(kvstore=store, work_dir=str(folder)),
        lambda store, folder: Trainer(Net(), "sgd", kvstore=store).load_states(folder / "x.states"),
    ],
    ids=["agreement_of", "Workers", "Strategy", "load_states"],
)
def test_what_needs_an_agreement_is_refused_first(stores: list[Store], tmp_path: Path, use: Any) -> None:
    with pytest.raises(ConfigurationError, match="2 workers of kvstore 'sums'"):
        use(stores[0], tmp_path)
    assert stores[0].meeting.values == {}


def test_steps_and_states_of_each_worker_need_no_agreement(stores: list[Store], tmp_path: Path) -> None:
    def run(store: Store) -> Any:
        def train(net: Net, trainer: Trainer) -> None:
            for _ in range(2):
                trainer.update_params(net(torch.full((4, 2), 1.0 + store.rank)).square().mean())

        net, again = Net(), Net()
        trainer, resumed = (Trainer(one, "adam", {"lr": 0.1}, store) for one in (net, again))
        train(net, trainer)
        trainer.save_states(tmp_path / f"{store.rank}.states")
        again.load_state_dict(net.state_dict())
        resumed.load_state_dict(trainer.state_dict())
        train(net, trainer)
        train(again, resumed)
        return weights(net), weights(again)

    (first, first_again), (second, second_again) = together(*(lambda one=one: run(one) for one in stores))
    assert all(same(first, other) for other in (first_again, second, second_again))
