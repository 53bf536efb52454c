"""A Trainer and its store: which one is used, what it is asked, and several Trainers over one."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import Parameter

from kvstore_server.engine.agreed_options import pack_hypers
from kvtrainer import Trainer, kvstore
from kvtrainer.client.tables import Takeover
from kvtrainer.errors import DeadlineError, KVStoreError
from kvtrainer.options.stages import GradientLimits
from kvtrainer.sync.binding import SentOptions
from kvtrainer.sync.client_state import ASSIGNED, STEP, ClientRecord
from kvtrainer.sync.exchange import StoreExchange


class Recorder(kvstore.KVStoreBase):
    """An allreduce over `num_workers` workers that all do what this one does; it records what it is asked."""

    def __init__(self, type: str = "recorder", num_workers: int = 2) -> None:
        self._type = type
        self._num_workers = num_workers
        self.calls: list[tuple[Any, ...]] = []
        self.weights: dict[int, Tensor] = {}

    @property
    def type(self) -> str:
        return self._type

    @property
    def rank(self) -> int:
        return 1

    @property
    def num_workers(self) -> int:
        return self._num_workers

    def broadcast(self, key: Any, value: Any, out: Any, priority: int = 0) -> None:
        self.calls.append(("broadcast", key, list(value.shape)))
        if key in self.weights:
            out.copy_(self.weights[key])

    def pushpull(self, key: Any, value: Any, out: Any = None, priority: int = 0) -> None:
        self.calls.append(("pushpull", key, priority))
        (value if out is None else out).copy_(self._num_workers * value)


def zeros(count: int = 2) -> list[Parameter]:
    return [Parameter(torch.zeros(1)) for _ in range(count)]


def backward(*parameters: Parameter) -> None:
    sum(p.sum() for p in parameters).backward()  # type: ignore[union-attr]


def values(*parameters: Parameter) -> list[float]:
    return [p.item() for p in parameters]


def test_store_given_as_an_object_gets_every_parameter_once_and_every_gradient_in_every_step() -> None:
    a, b = Parameter(torch.zeros(2, 3)), Parameter(torch.zeros(4))
    store = Recorder()
    trainer = Trainer([a, b], "sgd", {"lr": 1.0}, kvstore=store)
    assert store.calls == []
    for _ in range(2):
        backward(a, b)
        trainer.step(2)
    steps = [("pushpull", 0, 0), ("pushpull", 1, -1)]
    assert store.calls == [("broadcast", 0, [2, 3]), ("broadcast", 1, [4]), *steps, *steps]
    assert a.unique().tolist() == [-2]
    assert trainer.kvstore is store
    assert trainer.server_stats() == []


def test_store_given_by_its_name_is_really_used_with_a_single_process() -> None:
    made: list[Recorder] = []

    @kvstore.register("Recorder-By-Name")
    class ByName(Recorder):
        def __init__(self, type: str) -> None:
            super().__init__(type)
            made.append(self)

    [p] = zeros(1)
    trainer = Trainer([p], "sgd", {"lr": 1.0}, kvstore="recorder-by-NAME")
    backward(p)
    trainer.step(1)
    assert [call[0] for call in made[0].calls] == ["broadcast", "pushpull"]
    assert p.item() == -2


@pytest.mark.parametrize(("num_workers", "expected"), [(1, [-2.5, -1.0]), (2, [-5.0, -3.0])])
def test_third_party_store_of_one_worker_leaves_stale_parameters_out(
    num_workers: int, expected: list[float]
) -> None:
    """With more workers nobody can tell whether another one had a gradient, so momentum goes on."""
    a, b = zeros()
    trainer = Trainer([a, b], "sgd", {"lr": 1.0, "momentum": 0.5}, kvstore=Recorder(num_workers=num_workers))
    backward(a, b)
    trainer.step(1)
    backward(a)
    trainer.step(1, ignore_stale_grad=True)
    assert values(a, b) == expected


def test_update_on_kvstore_makes_a_store_even_for_one_device() -> None:
    [p] = zeros(1)
    trainer = Trainer([p], "sgd", {"lr": 1.0}, kvstore="device", update_on_kvstore=True)
    backward(p)
    trainer.step(1)
    assert isinstance(trainer.kvstore, kvstore.DeviceKVStore)
    assert p.item() == -1
    [stats] = trainer.server_stats()
    assert [(table["rounds_applied"], table["keys"]) for table in stats["tables"]] == [(1, 1)]


@pytest.mark.parametrize("uok", [True, False])
def test_two_trainers_over_one_store_do_not_meet(uok: bool) -> None:
    """MXNet lets both use keys 0, 1, …: the second one's weights are then the first one's."""
    store = kvstore.create("local")
    (a, b), (c, d) = zeros(), [Parameter(torch.full((3,), 5.0)), Parameter(torch.full((1,), 5.0))]
    first = Trainer([a, b], "sgd", {"lr": 1.0, "momentum": 0.5}, kvstore=store, update_on_kvstore=uok)
    second = Trainer([c, d], "adam", {"lr": 1.0}, kvstore=store, update_on_kvstore=uok)
    for _ in range(2):
        backward(a, b)
        first.step(1)
        backward(c, d)
        second.step(1)
    assert values(a, b) == [-2.5, -2.5]
    torch.testing.assert_close(torch.cat([c, d]), torch.full((4,), 3.0))
    assert set(second.state_dict()["state"][1]) == {"step", "exp_avg", "exp_avg_sq"}


def test_keys_optimizer_and_updater_of_the_store_do_not_touch_its_trainer() -> None:
    store = kvstore.LocalKVStore()
    [p] = zeros(1)
    trainer = Trainer([p], "sgd", {"lr": 1.0}, kvstore=store)
    store.init(0, torch.zeros(1))
    store.set_updater(lambda key, merged, stored: stored.add_(merged, alpha=100))
    for _ in range(2):
        backward(p)
        trainer.step(1)
        store.push(0, torch.ones(1))
    out = torch.zeros(1)
    store.pull(0, out)
    assert (p.item(), out.item()) == (-2, 200)


def test_leaving_the_context_closes_the_store_that_the_trainer_made_and_no_other() -> None:
    mine = kvstore.create("local")
    for store in ("local", mine):
        [p] = zeros(1)
        with Trainer([p], "sgd", {"lr": 1.0}, kvstore=store, update_on_kvstore=False) as trainer:
            backward(p)
            trainer.step(1)
        trainer.close()
        backward(p)
        for method in (trainer.step, trainer.update):
            with pytest.raises(KVStoreError, match="this Trainer is closed; build a new one"):
                method(1)
        assert p.item() == -1
    mine.broadcast("still open", torch.ones(1), out=torch.zeros(1))


def test_closed_trainer_leaves_gradients_to_torch() -> None:
    [p] = zeros(1)
    trainer = Trainer([p], "sgd")
    backward(p)
    trainer.step(1)
    trainer.close()
    backward(p)
    assert p.grad is not None
    assert p.grad.item() == 2


def test_failed_first_round_can_be_repeated() -> None:
    class Late(Recorder):
        def broadcast(self, key: Any, value: Any, out: Any, priority: int = 0) -> None:
            super().broadcast(key, value, out, priority)
            if len(self.calls) == 1:
                raise DeadlineError("rank 0 is late")

    a, b = zeros()
    trainer = Trainer([a, b], "sgd", {"lr": 1.0}, kvstore=Late())
    backward(a, b)
    with pytest.raises(DeadlineError):
        trainer.step(1)
    assert values(a, b) == [0, 0]
    trainer.step(1)
    assert values(a, b) == [-2, -2]


def test_failed_round_leaves_weights_and_gradients_and_can_be_repeated() -> None:
    class Flaky(Recorder):
        is_down = False

        def pushpull(self, key: Any, value: Any, out: Any = None, priority: int = 0) -> None:
            super().pushpull(key, value, out, priority)
            if self.is_down:
                raise DeadlineError("rank 1 is gone")

    store, (p,) = Flaky(), zeros(1)
    trainer = Trainer([p], "sgd", {"lr": 1.0}, kvstore=store)
    backward(p)
    store.is_down = True
    with pytest.raises(DeadlineError):
        trainer.step(1)
    assert p.item() == 0
    store.is_down = False
    trainer.step(1)
    assert p.item() == -2


def test_a_stores_counters_have_its_own_keys_and_then_those_of_its_trainers_until_they_close() -> None:
    store = kvstore.create("local")
    store.init("w", torch.zeros(2))
    (a, b), [c] = zeros(), zeros(1)
    first, second = (
        Trainer(given, "sgd", {"lr": 1.0}, kvstore=store, update_on_kvstore=True) for given in ([a, b], [c])
    )
    for steps, trainer, given in ((2, first, [a, b]), (1, second, [c])):
        for _ in range(steps):
            backward(*given)
            trainer.step(1)

    def rows() -> list[tuple[str, int, int]]:
        [stats] = store.server_stats()
        return [(row["table"], row["keys"], row["rounds_applied"]) for row in stats["tables"]]

    assert rows() == [("w", 1, 0), ("parameters", 2, 2), ("parameters", 1, 1)]
    [stats] = store.server_stats()
    assert len({row["namespace"] for row in stats["tables"]}) == 3
    assert first.server_stats()[0]["tables"] == [stats["tables"][1]]
    first.close()
    assert rows() == [("w", 1, 0), ("parameters", 1, 1)]


def test_gradients_by_rows_and_dense_ones_alternate_where_a_store_sums_and_the_trainer_updates() -> None:
    """A table with slices of its own, and one that shares a slice."""
    tables = [nn.Embedding(6_000, 9, sparse=True), nn.Embedding(4, 3, sparse=True)]
    twins = copy.deepcopy(tables)
    trainer = Trainer([t.weight for t in tables], "sgd", {"learning_rate": 0.1}, kvstore.create("local"))
    oracle = torch.optim.SGD([t.weight for t in twins], lr=0.1)
    for is_dense in (False, True, False, False, True, True, False):
        for table in (*tables, *twins):
            (table.weight.square() if is_dense else table(torch.tensor([3, 1, 3])).square()).sum().backward()
        trainer.step(1)
        oracle.step()
        oracle.zero_grad()
    for table, twin in zip(tables, twins, strict=True):
        torch.testing.assert_close(table.weight, twin.weight)


def test_a_schedule_that_raises_when_it_is_asked_before_the_step_is_left_to_that() -> None:
    def read() -> dict[str, Any]:
        raise ZeroDivisionError

    former, limits = {"groups": [{"lr": 0.5}], "lr_mult": {}, "wd_mult": {}}, GradientLimits()
    packed = pack_hypers(**former, update_on_kvstore=True, limits=limits.summary)
    sent = SentOptions()
    assert sent.changed(former, limits, in_store=True) == packed
    assert sent.predict(read, in_store=True) == packed
    sent.confirm()
    assert sent.predict(read, in_store=True) == b""


def test_what_fails_to_close_leaves_nothing_else_open(monkeypatch: pytest.MonkeyPatch) -> None:
    parameter = nn.Parameter(torch.ones(2))
    trainer = Trainer([parameter], "sgd", kvstore="local", update_on_kvstore=True)
    parameter.grad = torch.ones(2)
    trainer.step(1)
    link = trainer._pipeline.binding
    assert link.exchange is not None
    assert link._client is not None

    def broken() -> None:
        raise OSError("no")

    monkeypatch.setattr(link.exchange, "close", broken)
    with pytest.raises(OSError, match="no"):
        trainer.close()
    assert link._client._session.is_closed


def record(kind: str, round_: int) -> bytes:
    return ClientRecord(kind, round_, round_, {}, b"").pack()


@pytest.mark.parametrize(
    ("kinds", "is_sum"),
    [((STEP, ASSIGNED), True), ((ASSIGNED, STEP), False), ((STEP, STEP), True), ((STEP,), False)],
)
def test_what_held_before_a_lost_commit_goes_where_it_belongs(
    kinds: tuple[str, ...], is_sum: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sum to the gradients, assigned and first values to the weights; a round of the other kind was expected."""
    trainer = Trainer(zeros(), "sgd", kvstore=kvstore.LocalKVStore(), update_on_kvstore=False)
    binding, memory = trainer._pipeline.binding, trainer._pipeline.memory
    memory.allocate()
    binding._open_store()
    assert binding._client is not None
    exchange = StoreExchange(binding._client, memory.plan, None)
    states = [record(kind, at) for at, kind in enumerate(kinds, 1)]
    exchange._table.takeover = Takeover({0: len(kinds)}, {0: states})

    def resume(weights: Any, guard: Any, joined: bool = False) -> None:
        exchange._table.takeover = Takeover({0: len(kinds) - 1}, {0: states})
        for flat in weights.values():
            flat.fill_(7.0)

    monkeypatch.setattr(exchange, "resume", resume)
    binding.exchange = exchange
    binding._place_weights(memory, GradientLimits())
    target = memory.arena.grads if is_sum else memory.arena.weights
    assert all(bool((flat == 7.0).all()) for flat in target.values())
    assert binding.resumed is not None
    assert binding.resumed.round == len(kinds) - 1
