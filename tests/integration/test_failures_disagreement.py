"""Workers of one job that do not fit together: every one of them is told, and nothing has changed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

import kvtrainer
from kvtrainer.errors import ConfigurationError, FencedError, PlanMismatchError, WorkerLostError
from kvtrainer.kvstore import DistKVStore
from tests.support.processes import Call, Members, Process, assert_serve, new_name, raised, round_of, together

Pair = tuple[DistKVStore, DistKVStore]


@pytest.fixture
def members(servers: list[Process]) -> Iterator[Members]:
    with Members() as joined:
        yield joined
        assert_serve(servers)


@pytest.fixture
def pair(members: Members, servers: list[Process]) -> Pair:
    return members.pair(servers)


@pytest.mark.parametrize("shapes", [((3, 4), (3, 5)), ((300_000,), (300_001,))], ids=["one slice", "several"])
def test_a_key_of_two_shapes_is_refused_on_both_workers(
    pair: Pair, shapes: Sequence[tuple[int, ...]]
) -> None:
    """Of a large key one worker already waits on a server that never hears of the second shape."""
    first = Call(lambda: pair[0].init("w", torch.zeros(shapes[0])))
    outcomes = [*together(lambda: pair[1].init("w", torch.zeros(shapes[1]))), first.outcome()]
    for text in raised(outcomes, PlanMismatchError):
        for part in (*(f"'w' float32{[*shape]}" for shape in shapes), "rank 0", "rank 1"):
            assert part in text


def test_a_worker_with_another_number_of_workers_is_refused_and_the_others_learn_why(
    members: Members, servers: list[Process]
) -> None:
    name = new_name()
    store = members.join(servers, 0, 2, name)
    waiting = Call(lambda: store.init("w", torch.zeros(3)))
    with pytest.raises(ConfigurationError, match=r"rank 1.* 3 workers.* 2;"):
        members.join(servers, 1, 3, name)
    [text] = raised([waiting.outcome()], WorkerLostError)
    assert "rank 1 has left (it was refused: rank 1" in text
    assert "3 workers" in text


@pytest.mark.parametrize(
    ("chosen", "named"),
    [
        ([1, 0], "this is server 1 of 2, but rank 1 has it as server 0 of 2"),
        ([0], "server 0 of 2, but .* server 0 of 1"),
    ],
)
def test_a_worker_with_another_list_of_servers_is_refused(
    members: Members, servers: list[Process], chosen: list[int], named: str
) -> None:
    name = new_name()
    store = members.join(servers, 0, 2, name)
    waiting = Call(lambda: store.init("w", torch.zeros(3)))
    with pytest.raises(ConfigurationError, match=named) as caught:
        members.join([servers[i] for i in chosen], 1, 2, name)
    assert (
        "start every server with its --index and --num-servers, and give every worker the same KVSTORE_SERVERS"
        in str(caught.value)
    )
    [text] = raised([waiting.outcome()], WorkerLostError)
    assert "it was refused" in text


def test_a_server_that_does_not_know_the_namespace_forgets_refusals_of_others(
    members: Members, servers: list[Process]
) -> None:
    name = new_name()
    with pytest.raises(ConfigurationError):
        members.join(list(reversed(servers)), 1, 2, name)
    pair = members.join(servers, 0, 2, name), members.join(servers, 1, 2, name)
    assert together(*(lambda s=s: s.init("w", torch.zeros(3)) for s in pair)) == [None, None]


def test_different_optimizers_fail_the_round_on_both_and_the_next_agreeing_round_works(pair: Pair) -> None:
    together(*(lambda s=s: s.init("w", torch.zeros(3)) for s in pair))
    together(lambda: pair[0].set_optimizer("sgd"), lambda: pair[1].set_optimizer("adam"))
    for text in raised(_rounds(pair), PlanMismatchError):
        assert "sgd" in text
        assert "adam" in text
        assert "rank 0" in text
        assert "rank 1" in text
    assert _weights(pair) == [0.0] * 3
    optimizer = kvtrainer.optimizer.create("sgd", learning_rate=0.5)
    together(*(lambda s=s: s.set_optimizer(optimizer) for s in pair))
    assert [out.tolist() for out in _rounds(pair)] == [[-1.0] * 3] * 2


def test_a_learning_rate_that_differs_between_trainers_fails_the_step_and_changes_nothing(pair: Pair) -> None:
    weights = [torch.nn.Parameter(torch.zeros(3)) for _ in pair]
    trainers = [
        kvtrainer.Trainer({"w": w}, "sgd", {"learning_rate": 0.5}, kvstore=s)
        for w, s in zip(weights, pair, strict=True)
    ]

    def steps() -> list[Any]:
        for weight in weights:
            weight.sum().backward()
        return together(*(lambda t=t: t.step(1) for t in trainers))

    assert [result.updated for result in steps()] == [True, True]
    trainers[1].set_learning_rate(0.25)
    texts = raised(steps(), PlanMismatchError)
    assert all("group 0 has lr=0.5 on rank 0 and 0.25 on rank 1" in text for text in texts), texts
    assert [w.tolist() for w in weights] == [[-1.0] * 3] * 2
    trainers[0].set_learning_rate(0.25)
    for weight in weights:
        weight.grad = None
    assert [result.updated for result in steps()] == [True, True]
    assert [w.tolist() for w in weights] == [[-1.5] * 3] * 2


def test_a_second_process_of_a_rank_shuts_the_older_one_out(members: Members, servers: list[Process]) -> None:
    name = new_name()
    older, other = members.join(servers, 0, 2, name), members.join(servers, 1, 2, name)
    newer = members.join(servers, 0, 2, name)
    [text] = raised(together(lambda: older.init("w", torch.ones(3))), FencedError)
    assert "rank 0 was taken over by" in text
    assert together(*(lambda s=s: s.init("w", torch.zeros(3)) for s in (newer, other))) == [None, None]
    assert [out.tolist() for out in _rounds((newer, other))] == [[2.0] * 3] * 2


def _rounds(pair: Pair) -> list[torch.Tensor]:
    return together(*(lambda s=s: round_of(s, "w", torch.ones(3)) for s in pair))


def _weights(pair: Pair) -> list[float]:
    out = torch.empty(3)
    pair[0].pull("w", out=out)
    return out.tolist()


def test_different_models_are_refused_with_the_first_difference_named(pair: Pair) -> None:
    models = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2, bias=False)
    before = models[0].weight.detach().clone()
    trainers = [kvtrainer.Trainer(m, "sgd", kvstore=s) for m, s in zip(models, pair, strict=True)]
    for model in models:
        model(torch.ones(1, 3)).sum().backward()
    texts = raised(together(*(lambda t=t: t.step(1) for t in trainers)), PlanMismatchError)
    assert all("'bias' float32[2]" in text and "missing" in text for text in texts)
    assert torch.equal(models[0].weight, before)
