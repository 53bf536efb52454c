"""Tables of one collection: the results of its tables one by one, and one request and reply for each server."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

import kvtrainer
from kvstore_server.protocol import messages as m
from kvtrainer.client.session import Session
from kvtrainer.common.env import TRANSPORT
from tests.support.processes import Members, Processes, new_name, together

Inputs = Mapping[str, Any]


class Messages:
    """Counts the requests of this process for rows, and the messages that answer them, by server."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: list[int] = []
        self.answered: list[int] = []
        send, dispatch = Session.send, Session._dispatch

        def sent(session: Session, server: int, number: int, body: m.RequestBody, priority: int = 0) -> None:
            self.asked += [server] * isinstance(body, m.PullRows)
            send(session, server, number, body, priority)

        def received(session: Session, server: int, reply: m.Reply, now: float) -> None:
            is_rows = isinstance(reply.body, m.Weights) and m.VALUES in reply.body.parts[:, m.PART_KIND]
            self.answered += [server] * is_rows
            dispatch(session, server, reply, now)

        monkeypatch.setattr(Session, "send", sent)
        monkeypatch.setattr(Session, "_dispatch", received)

    def take(self) -> tuple[list[int], list[int]]:
        found = sorted(self.asked), sorted(self.answered)
        self.asked, self.answered = [], []
        return found


class Worker:
    """A model of tables of several kinds, looked up together or one by one, on data of its rank and step."""

    def __init__(self, store: Any, together: bool, rank: int = 0, workers: int = 1) -> None:
        self.rank, self.workers, self.together = rank, workers, together
        users = kvtrainer.Embedding(16, padding_idx=3)
        self.tables = kvtrainer.EmbeddingBagCollection(
            {
                "odd": kvtrainer.Embedding(3, dtype=torch.bfloat16),
                "users": users,
                "pages": kvtrainer.EmbeddingBag(8, mode="mean", padding_idx=0, admit_after=2),
                "words": kvtrainer.EmbeddingBag(5, mode="sum", dtype=torch.float64, expire_after=3),
                "friends": users,
            }
        )
        self.trainer = kvtrainer.Trainer(self.tables, "sgd", {"learning_rate": 0.1}, kvstore=store)

    def inputs(self, step: int) -> Inputs:
        drawn = torch.Generator().manual_seed(1000 * self.rank + step)
        ids = torch.randint(40, (5, 12), generator=drawn)
        weights = torch.rand(12, generator=drawn, dtype=torch.float64)
        return {
            "odd": ids[0],
            "users": ids[1].view(3, 4),
            "pages": ids[2].view(4, 3),
            "words": (ids[3], torch.tensor([0, 2, 2, 9]), weights),
            "friends": (ids[4],),
        }

    def look_up(self, inputs: Inputs) -> dict[str, Tensor]:
        if self.together:
            return self.tables(inputs)
        calls = {name: given if isinstance(given, tuple) else (given,) for name, given in inputs.items()}
        return {name: self.tables[name](*args) for name, args in calls.items()}

    def train(self, steps: int = 6) -> list[Tensor]:
        """Return the results and the gradients of all steps, and the rows after them."""
        seen = []
        for step in range(steps):
            found = self.look_up(self.inputs(step))
            sum(one.double().square().sum() for one in found.values()).backward()  # type: ignore[union-attr]
            seen += [one.detach() for one in found.values()]
            for parameter in self.tables.parameters():
                assert isinstance(parameter, kvtrainer.RowSparseParameter)
                grad = parameter.grad.coalesce()  # type: ignore[union-attr]
                rows = parameter.rows_of(grad.indices()[0])  # type: ignore[attr-defined]
                order = rows.argsort()
                seen += [rows[order], grad.values()[order]]
            self.trainer.step(self.workers)
            for parameter in self.tables.parameters():
                parameter.grad = None
        with torch.no_grad():
            return seen + list(self.look_up(self.inputs(0)).values())


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


def test_a_collection_in_one_process_has_the_bits_of_its_tables_one_by_one() -> None:
    one_by_one, collected = Worker("local", together=False), Worker("local", together=True)
    with one_by_one.trainer, collected.trainer:
        assert same(collected.train(), one_by_one.train())


@pytest.mark.parametrize("transport", ["auto", "tcp"])
def test_a_collection_on_servers_has_the_bits_of_its_tables_one_by_one(
    transport: str, processes: Processes, members: Members, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(TRANSPORT, transport)
    servers = processes.servers(2)

    def work(collected: bool) -> Callable[[int, str], Callable[[], list[Tensor]]]:
        def of(rank: int, name: str) -> Callable[[], list[Tensor]]:
            def run() -> list[Tensor]:
                worker = Worker(members.join(servers, rank, 2, name), collected, rank, 2)
                with worker.trainer:
                    return worker.train()

            return run

        return of

    found = []
    for collected in (False, True):
        name, of = new_name(), work(collected)
        found.append(together(of(0, name), of(1, name)))
    for rank in range(2):
        assert same(found[0][rank], found[1][rank])


@pytest.mark.parametrize("transport", ["auto", "tcp"])
def test_a_forward_pass_over_many_tables_is_one_request_and_one_reply_for_each_server(
    transport: str, processes: Processes, members: Members, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(TRANSPORT, transport)
    tables = {f"table{at}": kvtrainer.Embedding(4 + at % 3) for at in range(26)}
    collection = kvtrainer.EmbeddingBagCollection(tables)
    store = members.join(processes.servers(2), 0, 1, new_name())
    inputs = {name: torch.arange(100) * (at + 1) for at, name in enumerate(tables)}
    with kvtrainer.Trainer(collection, "sgd", {"learning_rate": 0.1}, kvstore=store) as trainer:

        def received() -> list[int]:
            return [stats["messages_in"] for stats in trainer.server_stats()]

        collection(inputs)
        messages = Messages(monkeypatch)
        before = received()
        found = collection(inputs)
        assert messages.take() == ([0, 1], [0, 1])
        sum(one.sum() for one in found.values()).backward()  # type: ignore[union-attr]
        trainer.step(1)
        # The request for rows, the gradients, and this request for counters.
        assert [after - was for after, was in zip(received(), before, strict=True)] == [3, 3]
        for name, table in tables.items():
            table(inputs[name])
        assert messages.take() == ([0] * 26 + [1] * 26, [0] * 26 + [1] * 26)


def test_more_rows_than_fit_into_a_message_are_those_of_the_tables_one_by_one(
    processes: Processes, members: Members, monkeypatch: pytest.MonkeyPatch
) -> None:
    tables = {f"table{at}": kvtrainer.Embedding(16) for at in range(3)}
    collection = kvtrainer.EmbeddingBagCollection(tables)
    store = members.join(processes.servers(2), 0, 1, new_name())
    inputs = {name: torch.arange(20_000) for name in tables}
    with kvtrainer.Trainer(collection, "sgd", {"learning_rate": 0.1}, kvstore=store), torch.no_grad():
        messages = Messages(monkeypatch)
        found = collection(inputs)
        # 10,000 rows of 72 bytes of each table and server; a message has 1 MiB.
        assert messages.take() == ([0] * 3 + [1] * 3, [0] * 3 + [1] * 3)
        assert all(torch.equal(found[name], table(inputs[name])) for name, table in tables.items())


def test_prefetched_rows_of_a_collection_are_used_and_the_others_are_one_request(
    processes: Processes, members: Members, monkeypatch: pytest.MonkeyPatch
) -> None:
    servers = processes.servers(2)
    plain, ahead = (Worker(members.join(servers, 0, 1, new_name()), together=True) for _ in range(2))
    with plain.trainer, ahead.trainer:
        messages = Messages(monkeypatch)
        for worker in (plain, ahead):
            following = worker.inputs(1)
            first = worker.look_up(worker.inputs(0))
            sum(one.double().sum() for one in first.values()).backward()  # type: ignore[union-attr]
            if worker is ahead:
                wanted = {name: following[name] for name in ("odd", "users", "pages")}
                worker.trainer.prefetch({worker.tables[name].weight: ids for name, ids in wanted.items()})
            messages.take()
            worker.trainer.step(1)
        asked = messages.take()[0]
        assert asked == [0, 1]  # all tables together
        some = {name: following[name] for name in ("odd", "pages")}
        expected, found = plain.look_up(some), ahead.look_up(some)
        assert messages.take()[0] == [0, 1]  # that of the plain one
        assert all(torch.equal(found[name], one) for name, one in expected.items())
        expected, found = plain.look_up(following), ahead.look_up(following)
        assert messages.take()[0] == [0, 0, 1, 1]
        assert all(torch.equal(found[name], one) for name, one in expected.items())


@pytest.mark.parametrize("is_read", [False, True])
def test_a_read_of_a_collection_without_gradients_does_not_affect_the_staleness(
    is_read: bool, processes: Processes, members: Members
) -> None:
    servers, name = processes.servers(2), new_name()
    stores = [members.join(servers, rank, 2, name, type="dist_async") for rank in range(2)]
    slow, fast = (Worker(store, together=True, rank=rank) for rank, store in enumerate(stores))

    def loss(worker: Worker) -> Tensor:
        found = worker.look_up(worker.inputs(0))
        return torch.stack([one.double().sum() for one in found.values()]).sum()

    assert together(lambda: float(loss(slow)), lambda: float(loss(fast)))
    with slow.trainer, fast.trainer:
        late = loss(slow)
        for _ in range(3):
            loss(fast).backward()
            fast.trainer.step(1)
            for parameter in fast.tables.parameters():
                parameter.grad = None
        with torch.set_grad_enabled(not is_read):
            again = loss(slow)
        (late if is_read else again).backward()
        slow.trainer.step(1)
        assert slow.trainer.staleness == (3 if is_read else 0)
