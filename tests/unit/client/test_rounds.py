"""Rounds with scripted servers: what is sent, what is written when, and how an exchange ends that goes wrong."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence

import pytest
import torch
from torch import Tensor

from kvstore_server.codec import make_codec
from kvstore_server.engine.engine import Engine
from kvstore_server.engine.namespace import EngineConfig
from kvstore_server.plan import TensorSpec, make_plan
from kvstore_server.protocol import messages as m
from kvstore_server.protocol.frames import KEYS_PER_MESSAGE, unpack_control
from kvstore_server.protocol.messages import SECRET_BYTES
from kvtrainer.client.client import Client, LoopbackTransport
from kvtrainer.client.contribution import Contribution
from kvtrainer.client.rounds import Rounds
from kvtrainer.client.session import SessionOptions
from kvtrainer.client.tables import Compressor, RemoteTable
from kvtrainer.errors import (
    DeadlineError,
    FencedError,
    KVStoreError,
    NonFiniteGradientError,
    OptimizerError,
    RoundAbortedError,
    ServerStoppingError,
    ServerUnreachableError,
    WorkerLostError,
)
from tests.support.messages import Done
from tests.support.scripted import SLOT, Bench, Scripted, is_commit, weights


def _values(tensor: Tensor) -> list[float]:
    return tensor.unique().tolist()


def commits(bench: Bench, server: int | None = None) -> list[m.Contribute]:
    found = bench.servers.bodies(m.Contribute, server)
    return [body for body in found if isinstance(body, m.Contribute) and is_commit(body)]


@pytest.fixture
def near(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have servers be on this host: slices go to others in parts."""
    monkeypatch.setattr(Scripted, "is_remote", lambda *_: False)


def test_every_server_gets_its_slices_and_the_commit_with_the_last_of_them(near: None) -> None:
    bench = Bench(2, lambda server, commit: [bench.weights(server, 9.0)])
    bench.run()
    for server in range(2):
        bodies = [r.body for to, r in bench.servers.sent if to == server]
        slices = bench.plan.slices_of(server)
        rows = [row for body in bodies for row in body.pushes.tolist()]  # type: ignore[union-attr]
        assert rows == [[SLOT + at, 3, 0, 4 * slice_.length] for at, slice_ in enumerate(slices)]
        payloads = [payload for body in bodies for payload in body.payloads]  # type: ignore[union-attr]
        rows_of = zip(payloads, slices, strict=True)
        assert all([_values(payload[: slice_.used]) == [1.0] for payload, slice_ in rows_of])
        assert [is_commit(body) for body in bodies] == [False] * (len(bodies) - 1) + [True]
        [commit] = bodies[-1].commits.tolist()  # type: ignore[union-attr]
        assert commit == [server + 5, 3, len(slices), 0, -1, m.WANTS_WEIGHTS]


def test_commits_are_sent_when_all_servers_have_all_other_slices() -> None:
    bench = Bench(2, lambda server, commit: [bench.weights(server, 9.0)])
    bench.run()
    kinds = [is_commit(request.body) for _, request in bench.servers.sent]
    assert kinds == [False] * (len(kinds) - 2) + [True, True]


def test_a_second_round_of_a_table_waits_for_the_first_and_raises_its_error() -> None:
    bench = Bench(1, lambda server, commit: [bench.failed(server, "WorkerLostError")], 10)
    bench.start()
    with pytest.raises(WorkerLostError):
        bench.start()
    assert len(commits(bench)) == 1


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
        if isinstance(request.body, m.Contribute) and server == 1:
            raise KeyboardInterrupt
        send(server, request)

    bench.servers.send = interrupted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        bench.start()
    assert len(bench.servers.bodies(m.Abort)) == 2
    assert (bench.table.round, bench.rounds.open) == (4, {})


def test_the_reason_of_an_abort_is_kept_short() -> None:
    bench = Bench(1, lambda server, commit: [m.Failed("ProtocolError", "x" * 100_000, 5, 3, -1)], 10)
    with pytest.raises(KVStoreError):
        bench.run()
    [abort] = bench.servers.bodies(m.Abort)
    assert len(abort.reason) <= 500  # type: ignore[attr-defined]


def test_slices_that_a_server_misses_are_sent_again_with_the_commit(near: None) -> None:
    last = SLOT + len(Bench(1, lambda server, commit: []).plan.slices) - 1

    def act(server: int, commit: m.Contribute) -> list[m.ReplyBody]:
        return (
            [m.Missing(5, 3, (last, last + 7))] if len(commits(bench)) == 1 else [bench.weights(server, 9.0)]
        )

    bench = Bench(1, act)
    bench.run()
    assert _values(bench.out) == [9.0]
    again = bench.servers.sent[-1][1].body
    assert isinstance(again, m.Contribute)
    assert is_commit(again)
    assert again.pushes[:, m.PUSH_SLOT].tolist() == [last]
    sent = [body for body in bench.servers.bodies(m.Contribute) if isinstance(body, m.Contribute)]
    assert sum([len(body.pushes) for body in sent]) == len(bench.plan.slices) + 1


@pytest.mark.parametrize("slices", [1, 4])
def test_a_reply_about_lost_slices_that_weights_have_overtaken_changes_no_weights(
    slices: int, near: None
) -> None:
    """Slices are gathered in the memory in which weights arrive."""

    def act(server: int, commit: m.Contribute) -> list[m.ReplyBody]:
        if server == 1 or len(bench.servers.bodies(m.Contribute, 0)) > sent_at_first:
            return [bench.weights(server, 9.0)]
        some = [torch.full((slice_.length,), 9.0) for slice_ in bench.plan.slices_of(0)[:slices]]
        return [weights(SLOT, some, 3), m.Missing(5, 3, (SLOT,))]

    bench, sent_at_first = Bench(2, act, 8 * 4096), 99
    round_ = bench.start()
    sent_at_first = len(bench.servers.bodies(m.Contribute, 0))
    bench.rounds.wait(round_)
    assert _values(bench.out) == [9.0]


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
    def act(server: int, commit: m.Contribute) -> list[m.ReplyBody]:
        if server == 0:  # it has told the outcome, and is stopped before the other one does
            number = next(request.number for to, request in bench.servers.sent if to == 1)
            bench.servers.reply(1, number, bench.weights(1, 9.0), after=5.0)
            bench.servers.reply(0, 0, m.Failed("ServerStoppingError", "stopped"), after=1.0)
            return [bench.weights(0, 9.0)]
        return []

    bench = Bench(2, act)
    bench.run()
    assert _values(bench.out) == [9.0]
    with pytest.raises(ServerStoppingError, match=r"server 0 \(here\) was shut down"):
        bench.run()


def test_weights_are_not_touched_while_a_part_of_them_is_missing() -> None:
    def act(server: int, commit: m.Contribute) -> list[m.ReplyBody]:
        return [
            weights(SLOT, [torch.full((bench.plan.slices[0].length,), 9.0)], 3),
            bench.failed(0, "ServerStoppingError"),
        ]

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
        bench.rounds.pull([bench.table], [{"float32": bench.out}])
    assert _values(bench.out) == [0.0]
    assert (bench.table.round, bench.servers.bodies(m.Abort)) == (3, [])


def many_tables(count: int) -> tuple[Scripted, Rounds, list[RemoteTable]]:
    """Tables of one number each, in their first round."""
    servers = Scripted(1)
    rounds = Rounds(servers.session())
    plan = make_plan([TensorSpec("w", (1,), "float32")], 1)
    tables = [rounds.tables.add(str(i), plan) for i in range(count)]
    for number, table in enumerate(tables):
        table.register(0, m.Registered(number, number, 0))
    return servers, rounds, tables


def ones(tables: Sequence[RemoteTable]) -> Contribution:
    """One element for each table."""
    return Contribution(tables, [{"float32": torch.ones(1)} for _ in tables], None)


def test_many_tables_travel_in_few_messages_of_bounded_size_with_their_commits() -> None:
    servers, rounds, tables = many_tables(3000)

    def answer(server: int, request: m.Request) -> list[m.ReplyBody] | None:
        assert isinstance(request.body, m.Contribute)
        return [Done(*((table, round_, round_) for table, round_ in request.body.commits[:, :2].tolist()))]

    servers.answer = answer
    rounds.wait(rounds.start(ones(tables)))
    sizes = [len(body.commits) for body in servers.bodies(m.Contribute)]  # type: ignore[attr-defined]
    assert sum(sizes) == 3000
    assert len(sizes) == 3
    assert max(sizes) <= KEYS_PER_MESSAGE
    assert {table.round for table in tables} == {1}


def test_any_subset_of_tables_in_any_order_is_one_message_in_the_order_of_the_server() -> None:
    servers, rounds, tables = many_tables(6)
    servers.answer = lambda server, request: [Done((4, 0, 0), (2, 0, 0), (5, 0, 0))]
    rounds.wait(rounds.start(ones([tables[at] for at in (4, 2, 5)])))
    [body] = servers.bodies(m.Contribute)
    assert body.commits[:, m.COMMIT_TABLE].tolist() == [2, 4, 5]  # type: ignore[attr-defined]
    assert [table.round for table in tables] == [0, 0, 1, 0, 1, 1]


def _keeping(
    bench: Bench, keeps: Callable[[m.Abort], bool], silent: int | None = None
) -> Callable[[int, m.Request], Iterable[m.ReplyBody] | None]:
    """Server 0 says of a round given up whether it keeps it as applied; a silent one says nothing at all."""

    def answer(server: int, request: m.Request) -> Iterable[m.ReplyBody] | None:
        if server == silent:
            return []
        if isinstance(request.body, m.Abort) and server == 0:
            return [m.Status({"applied": keeps(request.body)})]
        return bench._answer(server, request)

    return answer


def _aborting(bench: Bench) -> Callable[[int, m.Request], Iterable[m.ReplyBody] | None]:
    """Server 0 waits until a round is given up, and then says so to whoever had committed it."""

    def answer(server: int, request: m.Request) -> Iterable[m.ReplyBody] | None:
        if isinstance(request.body, m.Abort) and server == 0:
            commit = next(r.number for to, r in bench.servers.sent if to == 0 and is_commit(r.body))
            bench.servers.reply(0, commit, bench.failed(0, "RoundAbortedError"))
        return bench._answer(server, request)

    return answer


def test_many_tables_are_read_in_several_messages_and_only_what_is_missing_is_asked_for_again() -> None:
    servers, rounds, tables = many_tables(3000)
    outs = [torch.zeros(1) for _ in tables]
    lost = {7, 2999}

    def answer(server: int, request: m.Request) -> list[m.ReplyBody]:
        assert isinstance(request.body, m.Pull)
        came = [table for table in request.body.tables if table not in lost]
        lost.clear()
        parts = [(table, 5, m.WHOLE, 64) for table in came]
        return [m.Weights(m.matrix(parts, 4), tuple(torch.full((16,), float(table)) for table in came))]

    servers.answer = answer
    rounds.pull(tables, [{"float32": out} for out in outs])
    assert [int(out[0]) for out in outs] == list(range(3000))
    *first, again = [body.tables for body in servers.bodies(m.Pull)]  # type: ignore[attr-defined]
    assert [number for numbers in first for number in numbers] == list(range(3000))
    assert max(map(len, first)) <= KEYS_PER_MESSAGE
    assert again == (7,)


# ---------------------------------------------------------------- compressed


def compressed(rounds: Rounds, name: str, codec: str = "", numel: int = 40, round_: int = 1) -> RemoteTable:
    """A table of ones that is compressed with a codec, or not at all."""
    plan = make_plan([TensorSpec("k", (numel,), "float32")], 1)
    table = rounds.tables.add(name, plan)
    index = len(rounds.tables.all)
    table.register(0, m.Registered(index, 100 * index, 0))
    table.resume(round_, round_ > 0)
    if codec:
        table.compressor = Compressor(make_codec({"type": codec}), plan)
    return table


def given(*tables: RemoteTable, **options: bool) -> Contribution:
    values = [{"float32": torch.ones(table.plan.specs[0].numel)} for table in tables]
    return Contribution(tables, values, None, **options)  # type: ignore[arg-type]


def sent(servers: Scripted) -> list[tuple[str, list[int]]]:
    """(codec or "", bytes of each slice) of every message with slices."""
    bodies = [body for body in servers.bodies(m.Contribute) if isinstance(body, m.Contribute)]
    return [
        (
            unpack_control(body.encoding)["type"] if body.encoding else "",
            body.pushes[:, m.PUSH_NBYTES].tolist(),
        )
        for body in bodies
        if len(body.pushes)
    ]


def test_slices_of_one_codec_travel_together_and_of_several_apart() -> None:
    servers = Scripted(1)
    rounds = Rounds(servers.session())
    kinds = (("a", "2bit"), ("b", "2bit"), ("c", ""), ("d", ""), ("e", "1bit"))
    rounds.start(given(*[compressed(rounds, name, codec) for name, codec in kinds]))
    assert sent(servers) == [("2bit", [10, 10]), ("1bit", [5]), ("", [192, 192])]


def test_a_large_compressed_slice_is_a_message_of_its_own() -> None:
    servers = Scripted(1)
    rounds = Rounds(servers.session())
    rounds.start(given(compressed(rounds, "a", "2bit"), compressed(rounds, "b", "fp16", numel=600_000)))
    large = [sizes for form, sizes in sent(servers) if form == "fp16"]
    assert sum(sum(sizes) for sizes in large) == 1_200_000
    assert all(len(sizes) == 1 for sizes in large)
    assert ("2bit", [10]) in sent(servers)


@pytest.mark.parametrize(("round_", "assign"), [(0, False), (1, True)])
def test_values_that_replace_what_the_store_holds_are_sent_as_they_are(round_: int, assign: bool) -> None:
    servers = Scripted(1)
    rounds = Rounds(servers.session())
    table = compressed(rounds, "a", "2bit", round_=round_)
    rounds.start(given(table, assign=assign))
    assert sent(servers) == [("", [192])]
    assert table.compressor is not None
    assert table.compressor.residuals() == {}


def test_one_gradient_that_is_not_finite_stops_all_tables_of_the_round() -> None:
    servers = Scripted(1)
    rounds = Rounds(servers.session())
    tables = [compressed(rounds, "a", "2bit"), compressed(rounds, "b", "2bit")]
    contribution = given(*tables)
    assert contribution.values is not None
    contribution.values[1]["float32"][7] = float("inf")
    with pytest.raises(NonFiniteGradientError, match="element 7 of 40"):
        rounds.start(contribution)
    assert sent(servers) == []
    assert all(table.compressor.residuals() == {} for table in tables if table.compressor is not None)


def test_weights_of_an_older_reply_are_not_mixed_with_newer_ones() -> None:
    """Replies may overtake each other where a channel of shared memory has ended and the rest comes over TCP."""

    def answers(server: int, commit: m.RequestBody) -> list[m.ReplyBody]:
        newer, older = bench.weights(server, 9.0, 5), bench.weights(server, 4.0, 4)
        first = m.Weights(newer.parts[:1], newer.payloads[:1])
        rest = m.Weights(newer.parts[1:], newer.payloads[1:])
        return [first, older, rest]

    bench = Bench(1, answers)
    assert len(bench.plan.slices) > 1
    bench.run()
    assert bench.out.eq(9.0).all()
    assert bench.table.versions == {0: 5}


def test_a_fenced_process_leaves_the_round_on_other_servers_to_its_successor() -> None:
    engines = [Engine(EngineConfig(server, 2, run_id=server + 1)) for server in range(2)]
    client = Client(LoopbackTransport(engines, time.monotonic), SessionOptions("job", 0, 2), time.monotonic)
    client.connect()
    [table] = client.register({"w": [TensorSpec("w", (100_000,), "float32")]})
    # The successor has said hello on the first server, and not on the second one yet.
    peer = b"p" * SECRET_BYTES
    hello = m.Hello("job", 0, 2, 0, 2, "", "host", b"n" * SECRET_BYTES, (peer,))
    engines[0].handle(peer, m.Request(0, 0, 1, hello), 0.0)
    values = table.new_arenas()
    for _ in range(2):
        with pytest.raises(FencedError):
            client.rounds.wait(client.rounds.start(Contribution([table], [values], [values])))
    rounds = engines[1].namespaces["job"].rounds.shared
    assert (rounds.number(0), rounds.has_committed(0, 0)) == (0, True)
