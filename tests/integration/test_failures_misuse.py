"""Wrong calls, unknown or failing optimizers, and calls in an unusual order: typed errors, nothing half-changed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import kvtrainer
from kvtrainer.errors import (
    ConfigurationError,
    DeadlineError,
    KeyNotFoundError,
    KVStoreError,
    OptimizerError,
    ShapeMismatchError,
    UnknownNameError,
)
from kvtrainer.kvstore import DistKVStore
from tests.integration import raising_optimizer
from tests.support.limits import SOON
from tests.support.processes import (
    Call,
    Members,
    Process,
    Processes,
    assert_serve,
    impatient,
    raised,
    round_of,
    together,
)

Pair = tuple[DistKVStore, DistKVStore]
SERVER_FLAGS = "--import", raising_optimizer.__name__


@pytest.fixture
def pair(servers: list[Process]) -> Iterator[Pair]:
    """Both workers of a job; key "w" is initialised with zeros."""
    with Members() as members:
        stores = members.pair(servers)
        assert together(*(lambda s=s: s.init("w", torch.zeros(3)) for s in stores)) == [None, None]
        yield stores
        assert_serve(servers)


def _rounds(pair: Pair, key: Any = "w", *values: Tensor) -> list[Any]:
    given = values or (torch.ones(3), torch.ones(3))
    return together(*(lambda s=s, v=v: round_of(s, key, v) for s, v in zip(pair, given, strict=True)))


def _applied(store: DistKVStore) -> list[int]:
    return [row["rounds_applied"] for stats in store.server_stats() for row in stats["tables"]]


def test_a_wrong_call_is_refused_before_anything_is_sent(pair: Pair) -> None:
    other = Call(lambda: round_of(pair[0], "w", torch.ones(3)))
    with pytest.raises(ShapeMismatchError, match=r"'w' .*\[3\].*\[4\]"):
        pair[1].push("w", torch.ones(4))
    assert other.is_running
    # The round of the other worker goes on as if nothing had happened.
    assert round_of(pair[1], "w", torch.ones(3)).tolist() == [2.0] * 3
    assert other.outcome().tolist() == [2.0] * 3
    assert _applied(pair[0]) == [1]


def test_a_round_completes_whether_workers_push_or_pushpull(pair: Pair) -> None:
    pushing = Call(lambda: pair[0].push("w", torch.ones(3)))
    assert round_of(pair[1], "w", torch.full((3,), 2.0)).tolist() == [3.0] * 3
    assert pushing.outcome() is None
    out = torch.empty(3)
    pair[0].pull("w", out=out)
    assert out.tolist() == [3.0] * 3


def test_one_worker_never_completes_a_round_however_often_it_pushes(servers: list[Process]) -> None:
    with Members() as members:
        pair = members.pair(servers)
        together(*(lambda s=s: s.init("w", torch.zeros(3)) for s in pair))

        def push_twice() -> None:
            pair[0].push("w", torch.ones(3))
            pair[0].push("w", torch.ones(3))

        with impatient(pair[0], timeout=SOON):
            [text] = raised(together(push_twice), DeadlineError)
        assert "round 1 of 'w' reached its deadline while waiting for rank 1 (" in text
        assert "was last heard" in text
        assert "KVSTORE_TIMEOUT" in text
        assert _applied(pair[1]) == [0]
        # The late worker gets the same error for the round that it missed; after that both are in step again.
        raised(together(lambda: round_of(pair[1], "w", torch.ones(3))), DeadlineError)
        assert [out.tolist() for out in _rounds(pair)] == [[2.0] * 3] * 2


def test_an_optimizer_that_raises_on_one_of_two_servers_leaves_no_trace_on_either(pair: Pair) -> None:
    name, shape = raising_optimizer.RaisesOnHugeMeans.name, (150, 200)
    weights = [{key: torch.zeros(shape, requires_grad=True) for key in "ab"} for _ in pair]
    trainers = [kvtrainer.Trainer(w, name, kvstore=kv) for w, kv in zip(weights, pair, strict=True)]

    def steps(slope: float) -> list[Any]:
        """Both servers have one of the keys: that of "b" gets this gradient from each worker."""
        for own in weights:
            own["a"].grad, own["b"].grad = torch.ones(shape), torch.full(shape, slope)
        return together(*(lambda t=t: t.step(1) for t in trainers))

    def seen() -> set[float]:
        return {v for own in weights for w in own.values() for v in w.detach().unique().tolist()}

    # memory 2, weight −2
    assert [result.updated for result in steps(1.0)] == [True, True]
    assert seen() == {-2.0}
    for text in raised(steps(1000.0), OptimizerError):
        assert f"{name!r} raised ValueError: the mean of b is 2000" in text
    assert seen() == {-2.0}
    # memory 0.5 · 2 + 2 = 3, weight −2 − 3: neither weights nor state of the failed round are left anywhere
    assert [result.updated for result in steps(1.0)] == [True, True]
    assert seen() == {-5.0}
    # The other server took the round back or, told early enough, never applied it.
    rows = [row for stats in trainers[0].server_stats() for row in stats["tables"]]
    assert [row["rounds_applied"] - row["rounds_undone"] for row in rows] == [2, 2]


def test_a_failed_initialisation_leaves_no_key_behind(servers: list[Process]) -> None:
    with Members() as members:
        pair = members.pair(servers)
        with impatient(pair[0], timeout=SOON):
            raised(together(lambda: pair[0].init("w", torch.ones(3))), DeadlineError)
        with pytest.raises(KeyNotFoundError):
            pair[0].push("w", torch.ones(3))
        with pytest.raises(KVStoreError):
            pair[0].init("w", torch.ones(3))
        assert_serve(servers)


@pytest.mark.parametrize(
    "value",
    [
        pytest.param(torch.ones(3, device="meta"), id="no values"),
        pytest.param(torch.ones(3, dtype=torch.int64), id="no dtype of a store"),
    ],
)
def test_a_refused_value_registers_nothing_and_init_works_with_a_good_one(pair: Pair, value: Tensor) -> None:
    with pytest.raises(ConfigurationError, match="'m'"):
        pair[0].init(["l", "m"], [torch.ones(3), value])
    assert together(*(lambda s=s: s.init(["l", "m"], [torch.ones(3)] * 2) for s in pair)) == [None, None]
    assert [out.tolist() for out in _rounds(pair, "m")] == [[2.0] * 3] * 2


def test_a_worker_that_comes_after_the_others_gave_up_its_init_is_told_so(pair: Pair) -> None:
    with impatient(pair[1], timeout=SOON), pytest.raises(DeadlineError, match="rank 0"):
        pair[1].init("m", torch.ones(3))
    with pytest.raises(ConfigurationError, match=r"round 1 of 'm'"):
        pair[0].init("m", torch.ones(3))


def test_a_server_without_the_users_module_says_so_while_another_one_has_it() -> None:
    with Processes() as processes, Members() as members:
        servers = processes.servers(2, each=[["--import", raising_optimizer.__name__], []])
        name, pair = raising_optimizer.RaisesOnHugeMeans.name, members.pair(servers)
        together(*(lambda s=s: s.init("w", torch.zeros(3)) for s in pair))
        for text in raised(together(*(lambda s=s: s.set_optimizer(name) for s in pair)), UnknownNameError):
            assert f"server 1 cannot run the optimizer: there is no optimizer {name!r}" in text
            assert "--import MODULE" in text
        # Half of the servers may know it now: nobody can push until all of them agree.
        raised(_rounds(pair), UnknownNameError)


def test_a_failed_push_is_reported_by_the_next_call_that_concerns_its_key(servers: list[Process]) -> None:
    with Members() as members:
        pair = members.pair(servers)
        together(*(lambda s=s: s.init("w", torch.zeros(3)) for s in pair))
        with impatient(pair[0], timeout=SOON):
            pair[0].push("w", torch.ones(3))
            with pytest.raises(DeadlineError, match="rank 1"):
                pair[0].pull("w", out=torch.empty(3))
        out = torch.empty(3)
        pair[0].pull("w", out=out)
        assert out.tolist() == [0.0] * 3


def test_a_collective_call_of_one_worker_alone_says_that_all_must_call_it(servers: list[Process]) -> None:
    with Members() as members:
        first, _ = members.pair(servers, timeout=SOON)
        for name, call in (
            ("load_optimizer_states()", lambda: first.load_optimizer_states("states")),
            ("load_rows()", lambda: first.open_agreement("load_rows()")),
        ):
            with pytest.raises(DeadlineError, match="rank 1 never connected") as caught:
                call()
            assert str(caught.value).startswith(f"{name} is collective: all 2 workers call it")
