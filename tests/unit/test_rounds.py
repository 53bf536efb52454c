"""Rounds with scripted servers: what is sent, what is written when, and how an exchange ends that goes wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest
import torch
from torch import Tensor

from kvstore_server.plan import TensorSpec, make_plan
from kvstore_server.protocol import messages as m
from kvstore_server.protocol.buffers import KEYS_PER_MESSAGE
from kvtrainer.comm.rounds import Rounds
from kvtrainer.comm.tickets import RemoteTable, RoundItem
from kvtrainer.errors import (
    DeadlineError,
    KVStoreError,
    OptimizerError,
    RoundAbortedError,
    ServerStoppingError,
    ServerUnreachableError,
    WorkerLostError,
)
from tests.support.scripted import Bench, Scripted


def _values(tensor: Tensor) -> list[float]:
    return tensor.unique().tolist()


def test_every_server_gets_its_slices_before_the_commit_that_names_them() -> None:
    bench = Bench(2, lambda server, commit: [bench.weights(server, 9.0)])
    bench.run()
    for server in range(2):
        bodies = [r.body for to, r in bench.servers.sent if to == server]
        pushed = [p for body in bodies[:-1] for p in body.pushes]  # type: ignore[union-attr]
        assert [p.slice for p in pushed] == [piece.index for piece in bench.plan.slices_of(server)]
        assert all(_values(p.payload) == [1.0] for p in pushed)
        [commit] = bodies[-1].commits  # type: ignore[union-attr]
        assert commit.manifest == tuple((p.slice, 0) for p in pushed)
        assert (commit.table, commit.round, commit.want_weights) == (server + 5, 3, True)


def test_new_weights_are_in_place_after_the_wait_and_the_next_round_has_the_next_number() -> None:
    bench = Bench(2, lambda server, commit: [bench.weights(server, 9.0)])
    bench.run()
    assert _values(bench.out) == [9.0]
    assert bench.table.round == 4
    assert bench.table.is_initialised


def test_a_second_round_of_a_table_waits_for_the_first_and_raises_its_error() -> None:
    bench = Bench(1, lambda server, commit: [bench.failed(server, "WorkerLostError")], 10)
    bench.start()
    with pytest.raises(WorkerLostError):
        bench.start()
    assert len(bench.servers.bodies(m.CommitBatch)) == 1


@pytest.mark.parametrize("code", ["OptimizerError", "WorkerLostError", "PlanMismatchError"])
def test_a_failure_on_one_server_leaves_the_weights_of_both_as_they_were(code: str) -> None:
    bench = Bench(2, lambda s, commit: [bench.weights(s, 9.0) if s == 0 else bench.failed(s, code)])
    with pytest.raises(KVStoreError, match=f"{code} of server 1"):
        bench.run()
    assert _values(bench.out) == [0.0]
    assert bench.table.round == 4


def test_a_round_that_one_server_failed_is_given_up_on_the_others_without_waiting_for_them() -> None:
    bench = Bench(
        2, lambda s, commit: [] if s == 0 else [bench.failed(s, "PlanMismatchError")], timeout=600.0
    )
    bench.servers.answer = _aborting(bench)
    with pytest.raises(KVStoreError, match="PlanMismatchError of server 1"):
        bench.run()
    assert bench.servers.now < 101.0
    assert not bench.table.broken


def test_that_somebody_gave_up_is_reported_only_when_nothing_else_is_known() -> None:
    bench = Bench(2, lambda s, commit: [bench.failed(s, ["RoundAbortedError", "OptimizerError"][s])])
    with pytest.raises(OptimizerError):
        bench.run()
    bench = Bench(2, lambda s, commit: [bench.failed(s, "RoundAbortedError")])
    with pytest.raises(RoundAbortedError, match="of server 0"):  # the other one may be this worker's own
        bench.run()


def test_a_round_applied_on_one_server_and_failed_on_another_is_taken_back_there() -> None:
    bench = Bench(
        2, lambda s, commit: [bench.weights(s, 9.0) if s == 0 else bench.failed(s, "OptimizerError")]
    )
    bench.servers.answer = _keeping(bench, lambda abort: not abort.undo)
    with pytest.raises(OptimizerError):
        bench.run()
    aborts = bench.servers.bodies(m.Abort, server=0)
    assert [abort.undo for abort in aborts] == [False, True]
    assert bench.table.broken is None


def test_servers_that_end_up_one_round_apart_are_never_used_again() -> None:
    bench = Bench(
        2, lambda s, commit: [bench.weights(s, 9.0) if s == 0 else bench.failed(s, "OptimizerError")]
    )
    bench.servers.answer = _keeping(bench, lambda abort: True)
    with pytest.raises(OptimizerError):
        bench.run()
    sent = len(bench.servers.sent)
    with pytest.raises(KVStoreError, match=r"server 0 \(here\) had applied it.* Restart the job"):
        bench.run()
    assert len(bench.servers.sent) == sent


def test_an_exception_inside_the_wait_gives_the_round_up_everywhere() -> None:
    bench = Bench(2, lambda server, commit: [])
    ticket = bench.start()

    def interrupted(timeout: float) -> None:
        del bench.servers.receive
        raise KeyboardInterrupt

    bench.servers.receive = interrupted  # type: ignore[assignment,method-assign]
    with pytest.raises(KeyboardInterrupt):
        bench.rounds.wait(ticket)  # type: ignore[arg-type]
    aborts = bench.servers.bodies(m.Abort)
    assert [(a.table, a.round, a.undo) for a in aborts] == [(5, 3, False), (6, 3, False)]  # type: ignore[attr-defined]
    assert all("KeyboardInterrupt" in a.reason for a in aborts)  # type: ignore[attr-defined]


def test_an_exception_while_a_round_is_sent_gives_it_up_too() -> None:
    bench = Bench(2, lambda server, commit: [])
    send = bench.servers.send

    def interrupted(server: int, request: m.Request, priority: int = 0) -> None:
        if isinstance(request.body, m.PushBatch) and server == 1:
            raise KeyboardInterrupt
        send(server, request)

    bench.servers.send = interrupted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        bench.start()
    assert len(bench.servers.bodies(m.Abort)) == 2
    assert (bench.table.round, bench.table.ticket) == (4, None)


def test_the_reason_of_an_abort_is_kept_short() -> None:
    bench = Bench(1, lambda server, commit: [m.Failed("ProtocolError", "x" * 100_000, 5, 3, -1)], 10)
    with pytest.raises(KVStoreError):
        bench.run()
    [abort] = bench.servers.bodies(m.Abort)
    assert len(abort.reason) <= 500  # type: ignore[attr-defined]


def test_slices_that_a_server_misses_are_sent_again_and_the_commit_after_them() -> None:
    def act(server: int, commit: m.Commit) -> list[m.ReplyBody]:
        commits = len(bench.servers.bodies(m.CommitBatch, server))
        if commits == 1:
            return [m.Missing(5, 3, (commit.manifest[-1][0],))]
        return [bench.weights(server, 9.0)]

    bench = Bench(1, act)
    bench.run()
    assert _values(bench.out) == [9.0]
    kinds = [type(request.body).__name__ for _, request in bench.servers.sent]
    assert kinds == ["PushBatch"] * len(bench.plan.slices) + ["CommitBatch", "PushBatch", "CommitBatch"]


def test_a_lost_commit_is_repeated_for_what_is_still_open_only() -> None:
    def act(server: int, commit: m.Commit) -> list[m.ReplyBody]:
        first = len(bench.servers.bodies(m.CommitBatch, server)) == 1
        return [] if first and server == 1 else [bench.weights(server, 9.0)]

    bench = Bench(2, act)
    bench.run()
    assert _values(bench.out) == [9.0]
    assert [len(bench.servers.bodies(m.CommitBatch, server)) for server in range(2)] == [1, 2]


def test_a_silent_server_is_named_and_its_tables_are_not_used_again() -> None:
    bench = Bench(2, lambda s, commit: [bench.weights(s, 9.0)] if s == 0 else [], dead_after=5.0)
    bench.servers.answer = _keeping(bench, lambda abort: True, silent=1)
    with pytest.raises(ServerUnreachableError, match=r"server 1 \(here\) has not answered"):
        bench.run()
    assert _values(bench.out) == [0.0]
    with pytest.raises(KVStoreError, match=r"server 1 \(here\) did not say whether it had been applied"):
        bench.run()


def test_a_server_that_only_ever_says_wait_is_named_after_the_deadline() -> None:
    bench = Bench(1, lambda server, commit: [m.Pending((1,))], 10, timeout=7.0, dead_after=3.0)
    with pytest.raises(DeadlineError, match=r"server 0 \(here\) did not finish with 'w' within 7 s"):
        bench.run()
    assert bench.servers.now == pytest.approx(110.0, abs=1.0)


def test_a_round_ends_that_needs_no_server_any_more_which_says_farewell() -> None:
    def act(server: int, commit: m.Commit) -> list[m.ReplyBody]:
        if server == 0:  # it has told the outcome, and is stopped before the other one does
            bench.servers.reply(1, bench.servers.sent[-1][1].number, bench.weights(1, 9.0), after=5.0)
            bench.servers.reply(0, 0, m.Failed("ServerStoppingError", "stopped"), after=1.0)
            return [bench.weights(0, 9.0)]
        return []

    bench = Bench(2, act)
    bench.run()
    assert _values(bench.out) == [9.0]
    with pytest.raises(ServerStoppingError, match=r"server 0 \(here\) was stopped"):
        bench.run()


def test_weights_are_not_touched_while_a_part_of_them_is_missing() -> None:
    def act(server: int, commit: m.Commit) -> list[m.ReplyBody]:
        return [m.Weights(bench.weights(0, 9.0).parts[:1]), bench.failed(0, "ServerStoppingError")]

    bench = Bench(1, act)
    with pytest.raises(KVStoreError):
        bench.run()
    assert _values(bench.out) == [0.0]


def test_a_failed_pull_leaves_its_target_as_it_was() -> None:
    bench = Bench(2, lambda server, commit: [])

    def answer(server: int, request: m.Request) -> list[m.ReplyBody] | None:
        if not isinstance(request.body, m.Pull):
            return None
        return [bench.weights(server, 9.0) if server == 0 else m.Failed("KeyNotFoundError", "nothing here")]

    bench.servers.answer = answer
    with pytest.raises(KVStoreError, match="nothing here"):
        bench.rounds.pull([(bench.table, {"float32": bench.out})])
    assert _values(bench.out) == [0.0]
    assert (bench.table.round, bench.servers.bodies(m.Abort)) == (3, [])


def test_commits_of_many_tables_go_in_messages_of_bounded_size() -> None:
    servers = Scripted(1)
    session = servers.session()
    plan = make_plan([TensorSpec("w", (1,), "float32")], 1)
    tables = [RemoteTable(str(i), plan, {0: i}) for i in range(3000)]

    def answer(server: int, request: m.Request) -> list[m.ReplyBody] | None:
        if isinstance(request.body, m.CommitBatch):
            return [m.Done(tuple((c.table, c.round, c.round) for c in request.body.commits))]
        return None

    servers.answer = answer
    rounds = Rounds(session)
    values = {"float32": torch.ones(1)}
    rounds.wait(rounds.start([RoundItem(table, values, None) for table in tables]))
    batches = servers.bodies(m.CommitBatch)
    assert max(len(batch.commits) for batch in batches) <= 512  # type: ignore[attr-defined]
    assert sum(len(batch.commits) for batch in batches) == 3000  # type: ignore[attr-defined]
    assert {table.round for table in tables} == {1}


def _keeping(
    bench: Bench, keeps: Callable[[m.Abort], bool], silent: int | None = None
) -> Callable[[int, m.Request], Iterable[m.ReplyBody] | None]:
    """Server 0 says of a round given up whether it keeps it as applied; a silent one says nothing at all."""

    def answer(server: int, request: m.Request) -> Iterable[m.ReplyBody] | None:
        if server == silent:
            return []
        if isinstance(request.body, m.Abort) and server == 0:
            return [m.Info({"applied": keeps(request.body)})]
        return bench._answer(server, request)

    return answer


def _aborting(bench: Bench) -> Callable[[int, m.Request], Iterable[m.ReplyBody] | None]:
    """Server 0 waits until a round is given up, and then says so to whoever had committed it."""

    def answer(server: int, request: m.Request) -> Iterable[m.ReplyBody] | None:
        if isinstance(request.body, m.Abort) and server == 0:
            commit = next(
                r.number for to, r in bench.servers.sent if to == 0 and isinstance(r.body, m.CommitBatch)
            )
            bench.servers.reply(0, commit, bench.failed(0, "RoundAbortedError"))
        return bench._answer(server, request)

    return answer


def test_many_tables_are_read_in_several_messages_and_only_what_is_missing_is_asked_for_again() -> None:
    servers = Scripted()
    plan = make_plan([TensorSpec("k", (1,), "float32")], 1)
    tables = [RemoteTable(str(i), plan, {0: i}, round=1) for i in range(3000)]
    outs = [torch.zeros(16) for _ in tables]
    lost = {7, 2999}

    def answer(server: int, request: m.Request) -> list[m.ReplyBody]:
        assert isinstance(request.body, m.Pull)
        came = [table for table in request.body.tables if table not in lost]
        lost.clear()
        return [m.Weights(tuple(m.WeightsPart(t, 0, 5, torch.tensor([float(t)])) for t in came))]

    session = servers.session()
    servers.answer = answer
    Rounds(session).pull([(table, {"float32": out}) for table, out in zip(tables, outs, strict=True)])
    assert [int(out[0]) for out in outs] == list(range(3000))
    *first, again = [body.tables for body in servers.bodies(m.Pull)]  # type: ignore[attr-defined]
    assert [number for numbers in first for number in numbers] == list(range(3000))
    assert max(map(len, first)) <= KEYS_PER_MESSAGE
    assert again == (7,)
