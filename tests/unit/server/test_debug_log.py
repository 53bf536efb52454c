"""The lines of KVSTORE_LOG=debug: their fixed form, what they tell of messages and rounds, and what they never do."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from kvstore_server.debug_log import MESSAGE_KEYS, ROUND_KEYS, DebugLog, Peer, debug_log
from kvstore_server.engine.rounds import SYNCHRONOUS, Mode
from kvstore_server.protocol import messages as m
from kvstore_server.server import Server, ServerOptions
from tests.support.engines import EngineJob
from tests.support.messages import Done, contribution
from tests.support.scripted import Bench

SERVER, WORKER = "kvstore_server.debug", "kvtrainer.debug"
PEER = Peer("worker:1", "job")
_PAIR = re.compile(r'(\w+)=((?:"(?:[^"\\]|\\.)*"|[^ "])*)(?: |$)')


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Callable[[str], list[dict[str, str]]]:
    """Both debug logs are on; gives the lines of one kind so far, each as key → value, and checks their form."""
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


def one_line(body: Any, lines: Lines, peer: Peer = PEER, number: int = 7) -> dict[str, str]:
    """The only line of a message."""
    log = debug_log(SERVER)
    assert log is not None
    log.message("received", peer, number, body)
    [line] = lines("message")
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
    body: Any, table: str, slots: str, round_: str, nbytes: str, detail: str, lines: Lines
) -> None:
    assert one_line(body, lines) == {
        "direction": "received", "kind": type(body).__name__, "peer": "worker:1", "request": "7",
        "table": table, "slots": slots, "round": round_, "bytes": nbytes, "detail": detail, "namespace": '"job"',
    }  # fmt: skip


def test_an_answer_without_a_table_has_that_of_its_request(lines: Lines) -> None:
    log = debug_log(SERVER)
    assert log is not None
    weights = m.Weights(m.matrix([(4, 9, m.WHOLE, 8)], m.PART_WORDS), (torch.zeros(2),))
    log.message("received", PEER, 7, contribution([(4, b"12345678")], 3, 2, 1))
    log.message("sent", PEER, 7, weights)
    log.message("sent", PEER, 8, weights)
    answers = [(one["table"], one["round"], one["slots"], one["bytes"]) for one in lines("message")[1:]]
    assert answers == [("2", "3", "4", "8"), ("-", "-", "4", "8")]


@pytest.mark.parametrize(
    ("peer", "body"),
    [(PEER, m.Heartbeat(b"x")), (PEER, m.Pending(())), (Peer(), m.GetStatus()), (Peer(), m.Status({"a": 1}))],
)
def test_what_comes_every_second_has_no_line(peer: Peer, body: Any, lines: Lines) -> None:
    log = debug_log(SERVER)
    assert log is not None
    log.message("received", peer, 0, body)
    assert lines("message") == []


def test_a_process_pays_for_no_log_that_its_logger_does_not_show() -> None:
    assert debug_log("kvstore_server.debug") is None
    assert Bench(1, lambda server, commit: []).session.log is None
    assert EngineJob(1, SYNCHRONOUS).engine.namespaces["j"].log is None


def states(lines: Lines) -> list[tuple[str, ...]]:
    keys = ("state", "round", "rank", "waiting_for", "error")
    return [tuple(one[key] for key in keys) for one in lines("round")]


def test_a_server_tells_who_has_committed_who_is_missing_and_how_the_round_ended(lines: Lines) -> None:
    job = EngineJob(3, SYNCHRONOUS)
    before = len(lines("round"))
    for rank in (1, 0, 2):
        job.commit(rank, 1, 1.0)
    job.commit(0, 2, 1.0)
    job.tick(31.0, alive=[0, 1, 2])
    assert states(lines)[before:] == [
        ("committed", "1", "1", "worker:0,worker:2", "-"),
        ("committed", "1", "0", "worker:2", "-"),
        ("committed", "1", "2", "-", "-"),
        ("applied", "1", "-", "-", "-"),
        ("committed", "2", "0", "worker:1,worker:2", "-"),
        ("failed", "2", "-", "-", "DeadlineError"),
    ]
    assert {(one["table"], one["namespace"], one["name"]) for one in lines("round")} == {("0", '"j"', '"t"')}


def test_without_rounds_of_all_ranks_a_transition_is_that_of_its_rank(lines: Lines) -> None:
    job = EngineJob(2, Mode("async"))
    before = len(lines("round"))
    job.commit(1, 1, 1.0)
    assert states(lines)[before:] == [("committed", "1", "1", "-", "-"), ("applied", "1", "1", "-", "-")]


def test_a_server_tells_of_a_round_that_is_held_and_of_one_that_is_undone(lines: Lines) -> None:
    job = EngineJob(1, SYNCHRONOUS)
    before = len(lines("round"))
    job.commit(0, 1, 1.0, hold=2.0)
    job.ask(0, m.Resolve(0, 1, 1.0, None, True))
    job.ask(0, m.Abort(0, 1, "another server has failed it", True))
    assert states(lines)[before:] == [
        ("committed", "1", "0", "-", "-"),
        ("held", "1", "-", "-", "-"),
        ("applied", "1", "-", "-", "-"),
        ("undone", "1", "0", "-", "RoundAbortedError"),
    ]


def test_a_worker_tells_where_its_round_stands_and_which_servers_it_waits_for(lines: Lines) -> None:
    bench = Bench(2, lambda server, commit: [bench.weights(server, 9.0)])
    bench.run()
    assert [(one["state"], one["waiting_for"]) for one in lines("round")] == [
        ("started", "server:0,server:1"),
        ("waiting", "server:0,server:1"),
        ("applied", "-"),
    ]
    assert {(one["table"], one["round"], one["rank"], one["name"]) for one in lines("round")} == {
        ("5", "3", "0", '"w"')
    }
    told = [(one["direction"], one["kind"], one["peer"]) for one in lines("message")]
    assert told.count(("received", "Weights", "server:1")) == 1
    assert ("sent", "Contribute", "server:0") in told


def test_a_worker_tells_why_a_round_failed_and_of_reads_that_they_are_none(lines: Lines) -> None:
    bench = Bench(1, lambda server, commit: [bench.failed(server, "WorkerLostError")])
    with pytest.raises(Exception, match="of server 0"):
        bench.run()
    assert states(lines)[-1] == ("failed", "3", "0", "-", "WorkerLostError")
    bench.servers.answer = lambda server, request: [bench.weights(server, 1.0)]
    bench.rounds.pull([bench.table], [{"float32": bench.out}])
    assert [one["state"] for one in lines("round")[-3:]] == ["reading", "waiting", "read"]


class Telling:
    """A service that gives one answer."""

    is_stopping, num_ended = False, 0

    def handle(self, peer: bytes, request: m.Request, now: float) -> list[m.Outgoing]:
        return [m.Outgoing(peer, m.Reply(request.number, m.Status()))]


def test_a_server_logs_what_it_has_to_keep_for_a_slow_peer_as_queued(lines: Lines) -> None:
    server = Server(Telling(), ServerOptions(), name_of=lambda _: PEER)  # type: ignore[arg-type]
    try:
        server._budget = 0
        server._send_all([m.Outgoing(b"a secret", m.Reply(7, Done((0, 4, 9))))])
    finally:
        server._backlog.clear()
        server.close()
    assert [(one["direction"], one["peer"], one["round"]) for one in lines("message")] == [
        ("queued", "worker:1", "4")
    ]


def test_lines_hold_no_values_and_nothing_by_which_one_could_speak_for_a_worker(
    lines: Lines, caplog: pytest.LogCaptureFixture
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
    assert len(lines("message")) == 8
    assert not re.search("secret|987654321|61206", caplog.text)  # 612073… is its beginning in hexadecimal


def test_the_name_of_a_namespace_or_table_cannot_forge_a_line(lines: Lines) -> None:
    forged = "x' \"\nround state=applied"
    hello = m.Hello(forged, 1, 2, 0, 1, "", "", b"", ())
    line = one_line(hello, lines, Peer())
    assert "\n" not in line["namespace"]
    assert line["peer"] == "worker:1"


def test_only_so_many_requests_are_remembered() -> None:
    log = DebugLog(logging.Logger("quiet"))
    for number in range(3000):
        log.message("received", PEER, number, contribution([], 3, 2, 1))
    assert len(log._requests) == 1024
