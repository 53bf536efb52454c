"""A worker's part in rounds that are held, with scripted servers: when it decides, whom it tells, what goes wrong."""

from __future__ import annotations

import math
from collections.abc import Iterable

import pytest

from kvstore_server.protocol import messages as m
from kvstore_server.shard.norms import Decision, Guard, Measured
from kvtrainer.client.round import Round
from kvtrainer.errors import KVStoreError, OptimizerError
from tests.support.messages import Done
from tests.support.scripted import Act, Bench, is_commit

HALVING = Decision(coef=0.5)


class HeldBench(Bench):
    """Scripted servers, and a worker that wants the 2-norm and decides as `decision` says."""

    def __init__(self, num_servers: int, act: Act, decision: Decision = HALVING, **options: float) -> None:
        super().__init__(num_servers, act, **options)
        self.measured: list[Measured] = []
        self.decision = decision
        self.on_resolve = self.weights_of

    def decide(self, measured: Measured) -> Decision:
        self.measured.append(measured)
        return self.decision

    def start(self, value: float = 1.0) -> Round:
        return self.rounds.start(self.contribution(value, guard=Guard(2.0, self.decide)))

    def held(self, server: int, *values: float, is_finite: bool = True) -> m.Held:
        """What a server says, with a partial norm for each of its first slices."""
        slices = (slice_.index for slice_ in self.plan.slices_of(server))
        return m.Held(server + 5, 3, tuple(zip(slices, values, strict=False)), is_finite)

    def weights_of(self, server: int, resolve: m.Resolve) -> list[m.ReplyBody]:
        return [self.weights(server, 9.0)]

    def resolved(self) -> list[tuple[int, m.Resolve]]:
        """What was said to whom about the sums."""
        return [(to, r.body) for to, r in self.servers.sent if isinstance(r.body, m.Resolve)]

    def _answer(self, server: int, request: m.Request) -> Iterable[m.ReplyBody] | None:
        if isinstance(request.body, m.Resolve):
            return self.on_resolve(server, request.body)
        if isinstance(request.body, m.Abort) and not request.body.undo:
            batches = (r for to, r in self.servers.sent if to == server and is_commit(r.body))
            self.servers.reply(server, next(batches).number, self.failed(server, "RoundAbortedError"))
        return super()._answer(server, request)


def test_every_server_is_told_the_decision_when_all_have_said_what_they_hold() -> None:
    bench = HeldBench(2, lambda server, commit: [bench.held(server, 4.0, 5.0)], Decision(0.25, 3.0))
    bench.run()
    assert bench.measured == [Measured(math.sqrt(82.0), True)]
    assert bench.resolved() == [(s, m.Resolve(s + 5, 3, 0.25, 3.0, False)) for s in (0, 1)]
    holds = [body.hold for body in bench.servers.bodies(m.Contribute) if is_commit(body)]  # type: ignore[attr-defined]
    assert holds == [2.0] * 2
    assert bench.out.unique().tolist() == [9.0]


def test_partial_norms_are_combined_in_the_order_of_the_slices_whoever_holds_them() -> None:
    parts = (1.0, 1e-8, 1e-8, 1e-8)
    bench = HeldBench(2, lambda server, commit: [])
    owners = [slice_.server for slice_ in bench.plan.slices]
    assert owners[0] != owners[1]
    values = {slice_.index: parts[min(slice_.index, 3)] for slice_ in bench.plan.slices}

    def told(server: int, commit: m.Contribute) -> list[m.ReplyBody]:
        mine = [slice_.index for slice_ in bench.plan.slices_of(server)]
        return [m.Held(server + 5, 3, tuple((s, values[s]) for s in reversed(mine)), True)]

    bench.act = told
    bench.run()
    total = 0.0
    for index in sorted(values):
        total += values[index] ** 2
    assert bench.measured == [Measured(math.sqrt(total), True)]


def test_one_server_whose_sum_is_not_finite_is_enough() -> None:
    bench = HeldBench(2, lambda server, commit: [bench.held(server, 4.0, is_finite=server == 0)])
    bench.run()
    assert [measured.is_finite for measured in bench.measured] == [False]


def test_nothing_is_decided_before_the_last_server_has_spoken() -> None:
    bench = HeldBench(2, lambda server, commit: [bench.held(0, 4.0)] if server == 0 else [], timeout=10.0)
    with pytest.raises(KVStoreError):
        bench.run()
    assert not bench.resolved()
    assert not bench.measured


def test_a_server_that_asks_again_is_told_again_and_the_other_one_is_not() -> None:
    bench = HeldBench(2, lambda server, commit: [bench.held(server, 4.0)])
    heard: list[int] = []

    def deaf_at_first(server: int, resolve: m.Resolve) -> list[m.ReplyBody]:
        heard.append(server)
        return [bench.weights(server, 9.0)] if heard.count(1) == 2 or server == 0 else []

    bench.on_resolve = deaf_at_first
    bench.run()
    assert heard == [0, 1, 1]
    assert len(bench.measured) == 1


def test_weights_without_what_was_measured_are_not_enough() -> None:
    asked: list[int] = []

    def act(server: int, commit: m.Contribute) -> list[m.ReplyBody]:
        asked.append(server)
        told = [bench.held(server, 4.0)] if server == 0 or asked.count(1) > 1 else []
        return [*told, bench.weights(server, 9.0)]  # another worker has decided, and its message was lost

    bench = HeldBench(2, act)
    bench.run()
    assert asked == [0, 1, 1]
    assert bench.measured == [Measured(math.sqrt(32.0), True)]
    assert not bench.resolved()
    assert bench.table.round == 4


def test_a_round_that_another_worker_has_decided_already_is_decided_here_as_well() -> None:
    bench = HeldBench(2, lambda server, commit: [bench.held(server, 4.0), bench.weights(server, 9.0)])
    bench.run()
    assert len(bench.measured) == 1
    assert bench.out.unique().tolist() == [9.0]


def test_a_round_that_was_skipped_leaves_the_weights_and_the_next_one_has_the_next_number() -> None:
    bench = HeldBench(2, lambda server, commit: [bench.held(server, 4.0)], Decision(skip=True))
    bench.on_resolve = lambda server, resolve: _skipped(server)
    ticket = bench.start()
    bench.rounds.wait(ticket)  # type: ignore[arg-type]
    assert bench.out.unique().tolist() == [0.0]
    assert (bench.table.round, ticket.vetoes) == (4, {"w": ()})


def test_what_one_server_has_vetoed_and_another_one_holds_is_skipped() -> None:
    def act(server: int, commit: m.Contribute) -> list[m.ReplyBody]:
        over = Done((server + 5, 3, 2))
        return [bench.held(1, 4.0)] if server else [m.Vetoed(5, 3, (1,)), over]

    bench = HeldBench(2, act)
    bench.on_resolve = lambda server, resolve: _skipped(server)
    bench.run()
    assert bench.resolved() == [(1, m.Resolve(6, 3, 1.0, None, True))]
    assert not bench.measured


def test_a_round_that_failed_on_one_server_is_not_decided() -> None:
    bench = HeldBench(
        2, lambda s, commit: [bench.failed(s, "OptimizerError") if s == 0 else bench.held(s, 4.0)]
    )
    with pytest.raises(OptimizerError):
        bench.run()
    assert not bench.resolved()


def test_a_guard_that_raises_gives_the_round_up_on_all_servers() -> None:
    bench = HeldBench(2, lambda server, commit: [bench.held(server, 4.0)])

    def raising(measured: Measured) -> Decision:
        raise ZeroDivisionError("no decision")

    bench.decide = raising  # type: ignore[method-assign]
    with pytest.raises(ZeroDivisionError):
        bench.run()
    reasons = {abort.reason for abort in bench.servers.bodies(m.Abort)}  # type: ignore[attr-defined]
    assert reasons == {"ZeroDivisionError: no decision"}
    assert not bench.resolved()


@pytest.mark.parametrize("decision", [Decision(), Decision(skip=True)])
def test_servers_that_were_told_otherwise_by_another_worker_are_not_used_again(decision: Decision) -> None:
    def act(server: int, commit: m.Contribute) -> list[m.ReplyBody]:
        ended = _skipped(0) if server == 0 else [bench.weights(1, 9.0)]
        return [bench.held(server, 4.0), *ended]

    bench = HeldBench(2, act, decision)
    for _ in range(2):
        with pytest.raises(KVStoreError, match=r"round 3.*'w'"):
            bench.run()
    assert bench.out.unique().tolist() == [0.0]


def _skipped(server: int) -> list[m.ReplyBody]:
    return [m.Vetoed(server + 5, 3, ()), Done((server + 5, 3, 2))]
