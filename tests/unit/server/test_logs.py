"""What a server and a worker log: the lines of KVSTORE_LOG=debug, slow waits, and how often one line is repeated."""

from __future__ import annotations

import io
import logging
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from kvstore_server.debug_log import MESSAGE_KEYS, ROUND_KEYS, DebugLog, Peer, debug_log
from kvstore_server.engine.rounds import SYNCHRONOUS, Mode
from kvstore_server.log_limit import LogLimit, SlowReports, limited_log
from kvstore_server.protocol import messages as m
from kvstore_server.server import Server, ServerOptions
from kvtrainer.errors import DeadlineError, ServerUnreachableError
from tests.support.engines import EngineJob
from tests.support.messages import Done, contribution
from tests.support.scripted import Bench, Scripted

SERVER, WORKER = "kvstore_server.debug", "kvtrainer.debug"
PEER = Peer("worker:1", "job")
_PAIR = re.compile(r'(\w+)=((?:"(?:[^"\\]|\\.)*"|[^ "])*)(?: |$)')


@pytest.fixture
def debug_lines(caplog: pytest.LogCaptureFixture) -> Callable[[str], list[dict[str, str]]]:
    """Both debug logs are on; gives the debug_lines of one kind so far, each as key → value, and checks their form."""
    caplog.set_level(logging.DEBUG, SERVER)
    caplog.set_level(logging.DEBUG, WORKER)

    def of(kind: str) -> list[dict[str, str]]:
        texts = [one.getMessage() for one in caplog.records if one.name in (SERVER, WORKER)]
        found = [
            _PAIR.findall(text.removeprefix(f"{kind} ")) for text in texts if text.startswith(f"{kind} ")
        ]
        keys = {"message": MESSAGE_KEYS, "round": ROUND_KEYS}[kind]
        assert all(tuple(key for key, _ in pairs) == keys for pairs in found)
        return [dict(pairs) for pairs in found]

    return of


Lines = Callable[[str], list[dict[str, str]]]


def one_line(body: Any, debug_lines: Lines, peer: Peer = PEER, number: int = 7) -> dict[str, str]:
    """The only line of a message."""
    log = debug_log(SERVER)
    assert log is not None
    log.message("received", peer, number, body)
    [line] = debug_lines("message")
    return line


@pytest.mark.parametrize(
    ("body", "table", "slots", "round_", "nbytes", "detail"),
    [
        (contribution([(4, b"12345678"), (5, b"1234")], 3), "-", "4,5", "3", "12", "-"),
        (contribution([], 3, 2, 1), "2", "-", "3", "0", "-"),
        (Done((0, 4, 9), (1, 4, 9), (2, 4, 9)), "0..2", "-", "4", "0", "-"),
        (m.Failed("DeadlineError", "text", 2, 3, 4), "2", "-", "3", "0", "DeadlineError"),
        (m.Failed("a b=c\nround x", "text"), "-", "-", "-", "0", "-"),
        (m.Pending((1, 3), "why"), "-", "-", "-", "0", "worker:1,worker:3"),
        (m.Missing(2, 3, (5, 7)), "2", "5,7", "3", "0", "-"),
        (m.Vetoed(2, 3, (1,)), "2", "-", "3", "0", "worker:1"),
        (m.Pull((0, 2, 4, 6, 8)), "0,2,4,6,…(5)", "-", "-", "0", "-"),
        (m.Registered(2, 40, 1), "2", "-", "1", "0", "-"),
        (m.Register("a b", (), False), '"a b"', "-", "-", "0", "-"),
        (m.Gather(3, 1.0, b"123"), "-", "-", "-", "3", "-"),
        (m.Command(1, b"a secret"), "-", "-", "-", "8", "-"),
    ],
)
def test_a_line_tells_what_a_message_names(
    body: Any, table: str, slots: str, round_: str, nbytes: str, detail: str, debug_lines: Lines
) -> None:
    assert one_line(body, debug_lines) == {
        "direction": "received", "kind": type(body).__name__, "peer": "worker:1", "request": "7",
        "table": table, "slots": slots, "round": round_, "bytes": nbytes, "detail": detail, "namespace": '"job"',
    }  # fmt: skip


def test_an_answer_without_a_table_has_that_of_its_request(debug_lines: Lines) -> None:
    log = debug_log(SERVER)
    assert log is not None
    weights = m.Weights(m.matrix([(4, 9, m.WHOLE, 8)], m.PART_WORDS), (torch.zeros(2),))
    log.message("received", PEER, 7, contribution([(4, b"12345678")], 3, 2, 1))
    log.message("sent", PEER, 7, weights)
    log.message("sent", PEER, 8, weights)
    answers = [(one["table"], one["round"], one["slots"], one["bytes"]) for one in debug_lines("message")[1:]]
    assert answers == [("2", "3", "4", "8"), ("-", "-", "4", "8")]


@pytest.mark.parametrize(
    ("peer", "body"),
    [(PEER, m.Heartbeat(b"x")), (PEER, m.Pending(())), (Peer(), m.GetStatus()), (Peer(), m.Status({"a": 1}))],
)
def test_what_comes_every_second_has_no_line(peer: Peer, body: Any, debug_lines: Lines) -> None:
    log = debug_log(SERVER)
    assert log is not None
    log.message("received", peer, 0, body)
    assert debug_lines("message") == []


def test_a_process_pays_for_no_log_that_its_logger_does_not_show() -> None:
    assert debug_log("kvstore_server.debug") is None
    assert Bench(1, lambda server, commit: []).session.log is None
    assert EngineJob(1, SYNCHRONOUS).engine.namespaces["j"].log is None


def states(debug_lines: Lines) -> list[tuple[str, ...]]:
    keys = ("state", "round", "rank", "waiting_for", "error")
    return [tuple(one[key] for key in keys) for one in debug_lines("round")]


def test_a_server_tells_who_has_committed_who_is_missing_and_how_the_round_ended(debug_lines: Lines) -> None:
    job = EngineJob(3, SYNCHRONOUS)
    before = len(debug_lines("round"))
    for rank in (1, 0, 2):
        job.commit(rank, 1, 1.0)
    job.commit(0, 2, 1.0)
    job.tick(31.0, alive=[0, 1, 2])
    assert states(debug_lines)[before:] == [
        ("committed", "1", "1", "worker:0,worker:2", "-"),
        ("committed", "1", "0", "worker:2", "-"),
        ("committed", "1", "2", "-", "-"),
        ("applied", "1", "-", "-", "-"),
        ("committed", "2", "0", "worker:1,worker:2", "-"),
        ("failed", "2", "-", "-", "DeadlineError"),
    ]
    assert {(one["table"], one["namespace"], one["name"]) for one in debug_lines("round")} == {
        ("0", '"j"', '"t"')
    }


def test_without_rounds_of_all_ranks_a_transition_is_that_of_its_rank(debug_lines: Lines) -> None:
    job = EngineJob(2, Mode("async"))
    before = len(debug_lines("round"))
    job.commit(1, 1, 1.0)
    assert states(debug_lines)[before:] == [
        ("committed", "1", "1", "-", "-"),
        ("applied", "1", "1", "-", "-"),
    ]


def test_a_server_tells_of_a_round_that_is_held_and_of_one_that_is_undone(debug_lines: Lines) -> None:
    job = EngineJob(1, SYNCHRONOUS)
    before = len(debug_lines("round"))
    job.commit(0, 1, 1.0, hold=2.0)
    job.ask(0, m.Resolve(0, 1, 1.0, None, True))
    job.ask(0, m.Abort(0, 1, "another server has failed it", True))
    assert states(debug_lines)[before:] == [
        ("committed", "1", "0", "-", "-"),
        ("held", "1", "-", "-", "-"),
        ("applied", "1", "-", "-", "-"),
        ("undone", "1", "0", "-", "RoundAbortedError"),
    ]


def test_a_worker_tells_where_its_round_stands_and_which_servers_it_waits_for(debug_lines: Lines) -> None:
    bench = Bench(2, lambda server, commit: [bench.weights(server, 9.0)])
    bench.run()
    assert [(one["state"], one["waiting_for"]) for one in debug_lines("round")] == [
        ("started", "server:0,server:1"),
        ("waiting", "server:0,server:1"),
        ("applied", "-"),
    ]
    assert {(one["table"], one["round"], one["rank"], one["name"]) for one in debug_lines("round")} == {
        ("5", "3", "0", '"w"')
    }
    told = [(one["direction"], one["kind"], one["peer"]) for one in debug_lines("message")]
    assert told.count(("received", "Weights", "server:1")) == 1
    assert ("sent", "Contribute", "server:0") in told


def test_a_worker_tells_why_a_round_failed_and_of_reads_that_they_are_none(debug_lines: Lines) -> None:
    bench = Bench(1, lambda server, commit: [bench.failed(server, "WorkerLostError")])
    with pytest.raises(Exception, match="of server 0"):
        bench.run()
    assert states(debug_lines)[-1] == ("failed", "3", "0", "-", "WorkerLostError")
    bench.servers.answer = lambda server, request: [bench.weights(server, 1.0)]
    bench.rounds.pull([bench.table], [{"float32": bench.out}])
    assert [one["state"] for one in debug_lines("round")[-3:]] == ["reading", "waiting", "read"]


class AnswersOnce:
    """A service that gives one answer."""

    is_stopping, num_ended = False, 0

    def handle(self, peer: bytes, request: m.Request, now: float) -> list[m.Outgoing]:
        return [m.Outgoing(peer, m.Reply(request.number, m.Status()))]


def test_a_server_logs_what_it_has_to_keep_for_a_slow_peer_as_queued(debug_lines: Lines) -> None:
    server = Server(AnswersOnce(), ServerOptions(), name_of=lambda _: PEER)  # type: ignore[arg-type]
    try:
        server._budget = 0
        server._send_all([m.Outgoing(b"a secret", m.Reply(7, Done((0, 4, 9))))])
    finally:
        server._backlog.clear()
        server.close()
    assert [(one["direction"], one["peer"], one["round"]) for one in debug_lines("message")] == [
        ("queued", "worker:1", "4")
    ]


def test_lines_hold_no_values_and_nothing_by_which_one_could_speak_for_a_worker(
    debug_lines: Lines, caplog: pytest.LogCaptureFixture
) -> None:
    log = debug_log(SERVER)
    assert log is not None
    secret = b"a secret"
    hello = m.Hello("job", 1, 2, 0, 1, "avx2", "host:1", secret, (secret,))
    for body in (
        hello, m.Welcome(987654321, 987654321), m.Command(987654321, secret), m.Gather(1, 1.0, secret),
        m.Leave("a secret", True), m.SliceState(0, 0, {"a secret": 987654321}, secret), m.Status({"a secret": 1}),
        contribution([(0, secret)], 1, 0, 1, hyper=secret),
    ):  # fmt: skip
        log.message("received", PEER, 7, body)
    assert len(debug_lines("message")) == 8
    assert not re.search("secret|987654321|61206", caplog.text)  # 612073… is its beginning in hexadecimal


def test_the_name_of_a_namespace_or_table_cannot_forge_a_line(debug_lines: Lines) -> None:
    forged = "x' \"\nround state=applied"
    hello = m.Hello(forged, 1, 2, 0, 1, "", "", b"", ())
    line = one_line(hello, debug_lines, Peer())
    assert "\n" not in line["namespace"]
    assert line["peer"] == "worker:1"


def test_only_so_many_requests_are_remembered() -> None:
    log = DebugLog(logging.Logger("quiet"))
    for number in range(3000):
        log.message("received", PEER, number, contribution([], 3, 2, 1))
    assert len(log._requests) == 1024


def test_lines_about_one_wait_come_after_ten_seconds_and_then_ever_more_rarely() -> None:
    reports = SlowReports(10.0)
    due = [now for now in range(1, 2001) if reports.is_due(now, now)]
    assert due == [10, 20, 40, 80, 160, 320, 640, 1240, 1840]


def test_a_job_whose_every_round_is_slow_does_not_fill_its_log() -> None:
    reports = SlowReports(10.0)
    due = [now for now in range(1, 10_001) if reports.is_due(now % 15, now)]
    assert len(due) < 25


def test_a_wait_long_after_the_last_slow_one_is_reported_as_soon_as_the_first() -> None:
    reports = SlowReports(10.0)
    assert all(reports.is_due(10.0, now) for now in (10.0, 20.0, 40.0))
    assert [reports.is_due(10.0, now) for now in (1000.0, 1009.0, 1010.0)] == [True, False, True]


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


def test_a_server_names_the_round_and_the_ranks_that_it_waits_for(caplog: pytest.LogCaptureFixture) -> None:
    job = EngineJob(3, SYNCHRONOUS)
    job.tick(1.0)
    job.commit(0, 1, 1.0)
    job.tick(9.0, alive=[1, 2])
    assert warnings_of(caplog) == []
    job.tick(1.5, alive=[1])
    [line] = warnings_of(caplog)
    assert re.findall(r"round 1 of 't'|rank \d \(h\d\)|[\d.]+ s", line) == [
        "round 1 of 't'", "10 s", "rank 1 (h1)", "0.0 s", "rank 2 (h2)", "1.5 s",
    ]  # fmt: skip


def test_a_server_says_of_many_waits_how_many_there_are(caplog: pytest.LogCaptureFixture) -> None:
    job = EngineJob(2, Mode("ssp", 0))
    job.commit(0, 1, 1.0)
    for number in (51, 52, 53):
        job.ask(0, m.Pull((0,), 600.0), number)
    job.tick(11.0, alive=[0, 1])
    [line] = warnings_of(caplog)
    assert "2 more" in line
    assert "rank 1 (h1)" in line


def test_of_many_open_rounds_the_one_is_named_that_waits_longest(caplog: pytest.LogCaptureFixture) -> None:
    job = EngineJob(2, SYNCHRONOUS)
    for rank in (0, 1):
        job.ask(rank, m.Register("u", (("k", (1,), "float32", 0, False),), False))
    commits = m.matrix([(1, 0, 0, 0, -1, 0)], m.COMMIT_WORDS)
    job.ask(0, m.Contribute(m.matrix((), m.PUSH_WORDS), (), commits))
    job.tick(5.0, alive=[0, 1])
    job.commit(0, 1, 1.0)
    job.tick(6.0, alive=[0, 1])
    [line] = warnings_of(caplog)
    assert re.findall(r"round \d of '\w'|\d+ more|[\d.]+ s:", line) == ["round 0 of 'u'", "1 more", "11 s:"]


def test_a_server_names_who_is_missing_at_a_barrier(caplog: pytest.LogCaptureFixture) -> None:
    job = EngineJob(2, SYNCHRONOUS)
    job.ask(0, m.Gather(0, 600.0))
    job.tick(11.0, alive=[0, 1])
    [line] = warnings_of(caplog)
    assert "barrier 0" in line
    assert "rank 1 (h1)" in line


def test_a_barrier_that_is_asked_for_again_has_no_more_time_than_it_had() -> None:
    job = EngineJob(2, SYNCHRONOUS)
    job.ask(0, m.Gather(0, 5.0), 51)
    job.tick(4.0, alive=[0, 1])
    [pending] = job.ask(0, m.Gather(0, 5.0), 51)
    assert isinstance(pending, m.Pending)
    told = job.tick(1.5, alive=[0, 1])
    [failure] = told[0, 51]
    assert isinstance(failure, m.Failed)
    assert failure.code == "DeadlineError"


def test_a_rank_that_asks_again_is_told_for_whom_it_waits() -> None:
    job = EngineJob(2, SYNCHRONOUS)
    job.commit(0, 1, 1.0, number=51)
    job.tick(3.0, alive=[0, 1])
    [pending] = job.commit(0, 1, pushed=True, number=51)
    assert isinstance(pending, m.Pending)
    assert pending.waiting_for == (1,)
    assert "round 1 of 't'" in pending.why
    assert "rank 1 (h1)" in pending.why


def test_a_worker_says_for_whom_it_waits(caplog: pytest.LogCaptureFixture) -> None:
    servers = Scripted(1)
    session = servers.session()
    servers.answer = lambda server, request: [m.Pending((1,), f"barrier 0 waits for rank 1, {servers.now:g}")]
    with pytest.raises(DeadlineError):
        session.call(0, m.Gather(0, 60.0), timeout=45.0)
    said = [re.findall(r"rank 0|rank 1|waited \d+ s", line) for line in warnings_of(caplog)]
    assert said == [["rank 0", f"waited {after} s", "rank 1"] for after in (10, 20, 40)]
    assert "more" not in warnings_of(caplog)[-1]  # only what was said since it last asked


def test_a_worker_names_the_server_that_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    servers = Scripted(2)
    session = servers.session(dead_after=30.0)
    servers.answer = lambda server, request: [] if server else None
    with pytest.raises(ServerUnreachableError):
        session.call(1, m.Stats())
    assert len(warnings_of(caplog)) == 2
    assert all("server" in line for line in warnings_of(caplog))


def logged(
    times: list[float], *, name: str = "kvstore_server.test", level: int = logging.WARNING
) -> tuple[list[str], LogLimit]:
    """What a handler writes when one line is logged at these times, and the limit, of three lines in ten seconds."""
    now = 0.0
    limit = LogLimit(3, 10.0, lambda: now)
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.addFilter(limit)
    log = logging.Logger(name)
    log.addHandler(handler)
    for now in times:  # noqa: B007
        log.log(level, "refused %s", "it")
    return stream.getvalue().splitlines(), limit


def test_of_many_lines_the_first_ones_are_written_and_the_others_counted() -> None:
    lines, limit = logged([0.01 * i for i in range(50)])
    assert lines == ["refused it"] * 3
    assert limit.left_out == 47


def test_the_next_line_after_a_while_says_how_many_were_left_out() -> None:
    lines, limit = logged([0.0] * 8 + [11.0, 12.0])
    assert lines[3:] == ["refused it (5 more like this were left out before)", "refused it"]
    assert limit.left_out == 0


def test_lines_at_a_reasonable_distance_are_all_written() -> None:
    assert logged([5.0 * i for i in range(20)])[0] == ["refused it"] * 20


def test_lines_of_others_are_not_touched() -> None:
    assert len(logged([0.0] * 50, name="mine")[0]) == 50


def test_debug_lines_are_all_written() -> None:
    assert len(logged([0.0] * 50, level=logging.DEBUG)[0]) == 50


@pytest.mark.parametrize("is_set_up", [True, False])
def test_the_log_of_a_process_is_limited_while_it_serves_and_not_afterwards(
    is_set_up: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    handler = logging.NullHandler()
    monkeypatch.setattr(logging.getLogger(), "handlers", [handler] if is_set_up else [])
    monkeypatch.setattr(logging, "lastResort", handler)
    with limited_log():
        assert [type(one) for one in handler.filters] == [LogLimit]
    assert handler.filters == []
