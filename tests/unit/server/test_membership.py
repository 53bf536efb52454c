"""Who takes part and who is gone: sessions, barriers, silent ranks, and processes that a server watches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvstore_server.engine.engine import Engine
from kvstore_server.engine.membership import Membership, RankSession, random_token
from kvstore_server.engine.namespace import EngineConfig
from kvstore_server.engine.rounds import Waiter
from kvstore_server.errors import (
    ConfigurationError,
    FencedError,
    KVStoreError,
    ProtocolError,
    ServerLostState,
    ServerStoppingError,
    ServerUnreachableError,
    WorkerLostError,
    describe,
)
from kvstore_server.processes import FINAL_MESSAGE_TIME, ProcessState
from kvstore_server.protocol import messages as m
from kvstore_server.protocol.frames import pack_control
from kvstore_server.protocol.messages import Gather, Hello

DEAD_AFTER = 20.0


def session_of(
    rank: int, token: int = 9, now: float = 0.0, *, num_workers: int = 3, address: str = ""
) -> RankSession:
    hello = Hello("job", rank, num_workers, 0, 1, "", address or f"host{rank}:1{rank}", b"", ())
    return RankSession(token, hello, b"peer", now)


def joined(*ranks: int, now: float = 0.0) -> Membership:
    """Three workers, of which these have joined."""
    members = Membership("job", 3)
    for rank in ranks:
        members.join(session_of(rank, token=rank + 1, now=now))
    return members


def enter(
    members: Membership, rank: int, sequence: int = 0, now: float = 0.0, data: bytes = b""
) -> list[tuple[bytes, int]]:
    """Rank `rank` comes to a barrier, under request number 10 + rank, with 60 s of patience; who is released."""
    waiter = Waiter(b"p%d" % rank, 10 + rank)
    released = members.enter_barrier(rank, Gather(sequence, 60.0, data), waiter, now)
    return [one for one, _ in released]


def test_another_number_of_workers_is_refused_with_both_numbers() -> None:
    with pytest.raises(ConfigurationError, match=r"rank 1 \(host1:11\).* 4 workers.* 3;"):
        joined(0).join(session_of(1, num_workers=4, token=2, now=0.0))


@pytest.mark.parametrize("rank", [-1, 3])
def test_a_rank_out_of_range_is_refused(rank: int) -> None:
    with pytest.raises(ConfigurationError, match=f"rank {rank} is not in 0 … 2"):
        joined().join(session_of(rank, token=1, now=0.0))


def test_the_error_of_a_departed_rank_names_it_and_its_reason() -> None:
    members = joined(0, 1)
    members.leave(1, "ValueError: nan", is_clean=False, now=0.0)
    error = members.lost_error([1], "round 4 of 'w'", 1.0, DEAD_AFTER)
    assert isinstance(error, WorkerLostError)
    assert str(error) == (
        "round 4 of 'w' cannot complete: rank 1 has left (ValueError: nan); "
        "restart the job from its last saved states"
    )


@pytest.mark.parametrize("kind", [ServerUnreachableError, ServerLostState, ServerStoppingError])
def test_the_error_of_a_rank_that_has_left_because_it_lost_a_server_is_that_of_the_server(
    kind: type[KVStoreError],
) -> None:
    members = joined(0, 1)
    members.leave(1, describe(kind("server 2 has not answered")), is_clean=False, now=0.0)
    error = members.lost_error([1], "round 4 of 'w'", 1.0, DEAD_AFTER)
    assert type(error) is kind
    assert "server 2 has not answered" in str(error)


def test_only_where_a_rank_was_done_before_the_others_its_error_speaks_of_joining() -> None:
    members = joined(1, 2)
    members.refuse(0, "it was refused")
    members.leave(1, "nan", is_clean=False, now=0.0)
    members.leave(2, "it closed its kvstore", is_clean=True, now=0.0)
    texts = {rank: str(members.lost_error([rank], "round 4", 1.0, DEAD_AFTER)) for rank in (0, 1, 2)}
    assert {rank: "trainer.join()" in text for rank, text in texts.items()} == {0: False, 1: False, 2: True}
    members.join(session_of(2, token=9, now=1.0))
    members.leave(2, "nan", is_clean=False, now=0.0)
    assert "trainer.join()" not in str(members.lost_error([2], "round 4", 1.0, DEAD_AFTER))


def test_the_error_of_a_silent_rank_says_where_it_runs_and_when_it_was_heard() -> None:
    error = joined(0, 1).lost_error([1], "round 4 of 'w'", 31.25, DEAD_AFTER)
    assert isinstance(error, WorkerLostError)
    for value in (
        "round 4 of 'w'",
        "rank 1 (host1:11)",
        "31.2 s",
        "20 s",
        "--dead-after",
        "KVSTORE_DEAD_AFTER",
    ):
        assert value in str(error)


def test_a_barrier_ahead_of_the_open_one_is_refused() -> None:
    with pytest.raises(ProtocolError, match=r"rank 1.*barrier 2.*barrier 0"):
        enter(joined(0, 1), 1, sequence=2)


def test_a_failed_barrier_can_be_tried_again() -> None:
    members = joined(0, 1, 2)
    enter(members, 0)
    assert members.absent_from_barrier() == [1, 2]
    members.take_barrier()
    for member in members.members.values():
        member.last_heard = 61.0
    # Who waited in vain counts no more before it comes again.
    assert [enter(members, rank, now=61.0) == [] for rank in (1, 2, 0)] == [True, True, False]


def test_whoever_reads_gets_what_all_gave_in_rank_order_also_if_it_asks_again() -> None:
    members, waiters = joined(0, 1, 2), [Waiter(b"p%d" % rank, 10 + rank) for rank in range(3)]
    given = [Gather(0, 60.0, b"of %d" % rank, reads=rank != 2) for rank in range(3)]
    for rank in (2, 0):
        assert not members.enter_barrier(rank, given[rank], waiters[rank], 0.0)
    everything = (b"of 0", b"of 1", b"of 2")
    released = members.enter_barrier(1, given[1], waiters[1], 0.0)
    assert dict(released) == {waiters[0]: everything, waiters[1]: everything, waiters[2]: ()}
    for rank, parts in ((1, everything), (2, ())):
        again = members.enter_barrier(rank, given[rank], waiters[rank], 0.0)
        assert again == [(waiters[rank], parts)]


OWN, OTHER, STRANGER = b"own socket", b"other socket", b"stranger"


class SessionEngine:
    """An engine for jobs of two workers, and what it is asked at which time."""

    def __init__(self, tokens: Callable[[], int] = random_token) -> None:
        self.engine = Engine(EngineConfig(dead_after=DEAD_AFTER), tokens=tokens)
        self.now = 0.0

    def ask(self, peer: bytes, token: int, body: m.RequestBody) -> m.ReplyBody | None:
        """What the peer is told."""
        out = self.engine.handle(peer, m.Request(1, token, 7, body), self.now)
        return next((o.reply.body for o in out if o.peer == peer), None)

    def hello(
        self,
        rank: int = 0,
        nonce: bytes = b"first",
        sockets: tuple[bytes, ...] = (OWN, OTHER),
        job: str = "job",
    ) -> m.ReplyBody | None:
        return self.ask(sockets[0], 0, m.Hello(job, rank, 2, 0, 1, "", f"h{rank}:{nonce!r}", nonce, sockets))

    def token(self, rank: int = 0, nonce: bytes = b"first", sockets: tuple[bytes, ...] = (OWN, OTHER)) -> int:
        welcome = self.hello(rank, nonce, sockets)
        assert isinstance(welcome, m.Welcome)
        return welcome.session


def code(body: m.ReplyBody | None) -> str:
    assert isinstance(body, m.Failed), body
    return body.code


def test_tokens_are_what_their_source_gives_but_never_zero_and_never_the_same_twice() -> None:
    server = SessionEngine(iter([0, 7, 7, 9, 1 << 63]).__next__)
    assert [server.token(0, b"a"), server.token(1, b"b"), server.token(0, b"c")] == [7, 9, 1 << 63]


def test_tokens_of_a_server_are_random_numbers_of_64_bits() -> None:
    tokens = [SessionEngine().token() for _ in range(64)]
    assert len(set(tokens)) == 64
    assert max(tokens) >= 1 << 60  # 16⁻⁶⁴ if not


def test_another_socket_is_refused_as_if_there_were_no_such_session() -> None:
    server = SessionEngine()
    refused = [server.ask(STRANGER, token, m.Stats()) for token in (server.token(), 1, 0)]
    assert code(refused[0]) == FencedError.__name__
    assert refused[0] == refused[1] == refused[2]


@pytest.mark.parametrize(
    "body", [m.Leave("bye", True), m.SetOptimizer(b"\x80"), m.Register("w", (("w", (4,), "float32", 0, False),), False)]
)  # fmt: skip
def test_what_another_socket_asks_for_has_no_effect(body: m.RequestBody) -> None:
    server = SessionEngine()
    token = server.token()
    assert code(server.ask(STRANGER, token, body)) == FencedError.__name__
    stats = server.ask(OWN, token, m.Stats())
    assert isinstance(stats, m.Status)
    assert (stats.values["tables"], stats.values["messages_in"]) == ([], 1)


def test_another_socket_is_no_sign_of_life() -> None:
    server = SessionEngine()
    alive, dead = server.token(0, b"a", (OWN,)), server.token(1, b"b", (OTHER,))
    server.now = DEAD_AFTER + 1
    server.ask(STRANGER, dead, m.Heartbeat())
    server.ask(OWN, alive, m.Gather(0, 60.0))
    [told] = server.engine.tick(server.now)
    assert (told.peer, code(told.reply.body)) == (OWN, WorkerLostError.__name__)


def test_a_hello_that_comes_again_gets_the_same_session_and_starts_nothing_again() -> None:
    server = SessionEngine()
    token = server.token()
    server.ask(OWN, token, m.Gather(0, 60.0))
    assert server.token() == token
    released = server.engine.handle(
        b"b", m.Request(1, server.token(1, b"b", (b"b",)), 1, m.Gather(0, 60.0)), 0.0
    )
    assert [out.peer for out in released] == [OWN, b"b"]


def test_a_hello_that_comes_again_is_a_sign_of_life() -> None:
    server = SessionEngine()
    server.token(0, b"a", (OWN,))
    alive = server.token(1, b"b", (OTHER,))
    server.now = DEAD_AFTER + 1
    server.token(0, b"a", (OWN,))
    assert isinstance(server.ask(OTHER, alive, m.Gather(0, 60.0)), m.Pending)


@pytest.mark.parametrize(("nonce", "sockets"), [(b"second", (OWN, OTHER)), (b"first", (b"new", OTHER))])
def test_another_process_of_the_rank_gets_another_session_and_shuts_the_first_out(
    nonce: bytes, sockets: tuple[bytes, ...]
) -> None:
    server = SessionEngine()
    first = server.token()
    assert server.token(0, nonce, sockets) != first
    refused = server.ask(OTHER, first, m.Stats())
    assert code(refused) == FencedError.__name__
    assert f"taken over by h0:{nonce!r}" in str(refused)
    assert "taken over" not in str(server.ask(STRANGER, first, m.Stats()))


def test_a_late_hello_of_a_process_that_was_replaced_or_has_left_is_refused() -> None:
    server = SessionEngine()
    first, second = server.token(), server.token(0, b"second", (b"new",))
    assert code(server.hello()) == FencedError.__name__
    assert isinstance(server.ask(b"new", second, m.Stats()), m.Status)
    server.ask(b"new", second, m.Leave("done", True))
    assert code(server.hello(0, b"second", (b"new",))) == FencedError.__name__
    assert not server.engine.namespaces
    assert first != second


def test_a_hello_that_does_not_name_its_own_socket_is_refused() -> None:
    server = SessionEngine()
    hello = m.Hello("job", 0, 2, 0, 1, "", "h", b"first", (OWN, OTHER))
    assert code(server.ask(STRANGER, 0, hello)) == ProtocolError.__name__
    assert not server.engine.namespaces


def test_sessions_that_ended_long_ago_are_forgotten() -> None:
    server = SessionEngine()
    for at in range(3000):
        server.token(0, b"%d" % at)
    assert len(server.engine._sessions._opened) < 1100


def test_a_namespace_whose_last_process_was_lost_is_freed_although_its_session_has_ended() -> None:
    server = SessionEngine()
    server.engine = Engine(EngineConfig(dead_after=DEAD_AFTER, rejoin_timeout=1.0))
    tokens: dict[str, int] = {}
    for job in ("job", "job/trainer"):
        for rank in range(2):
            sockets = (OWN if rank else OTHER,)
            body = m.Hello(job, rank, 2, 0, 1, "", f"h{rank}:1", b"n", sockets, resumes=True, initial_workers=2,
                           min_workers=1)  # fmt: skip
            welcome = server.ask(sockets[0], 0, body)
            assert isinstance(welcome, m.Welcome)
            tokens[job] = tokens.get(job, welcome.session)  # that of rank 0
    # Rank 1 falls silent, and rank 0 is done with one of the namespaces.
    server.now = DEAD_AFTER + 2.0
    assert server.ask(OTHER, tokens["job/trainer"], m.Heartbeat()) is not None
    server.ask(OTHER, tokens["job"], m.Leave("", True))
    assert set(server.engine.namespaces) == {"job", "job/trainer"}  # for a successor of rank 1
    server.now = 2 * DEAD_AFTER
    assert server.ask(OTHER, tokens["job/trainer"], m.Heartbeat()) is not None
    server.engine.tick(server.now)
    assert set(server.engine.namespaces) == {"job/trainer"}


def test_of_a_process_that_was_replaced_no_report_is_kept() -> None:
    server = SessionEngine()
    former = server.token(0, b"first")
    report = pack_control({"steps": 3, "seconds a step": 0.5})
    assert isinstance(server.ask(OWN, former, m.Heartbeat(report)), m.Pending)
    kept = server.engine._sessions.known(former)
    assert kept is not None
    assert kept.report == {"steps": 3, "seconds a step": 0.5}
    server.token(0, b"second")
    assert kept.report == {}


def test_who_is_still_there_at_the_end_is_told_and_nobody_else() -> None:
    server = SessionEngine()
    server.token(0, b"a", (OWN, OTHER))
    gone = server.token(1, b"b", (b"b",))
    server.ask(b"b", gone, m.Leave("done", True))
    [notice] = server.engine.abandon(0.0)
    assert (notice.peer, notice.reply.number, code(notice.reply.body)) == (OWN, 0, "ServerStoppingError")


PATIENCE = 600.0
KILLED = "was killed by signal 9 (SIGKILL)"


class SeenProcesses:
    """Processes as the server sees them, of rank 0 and 1."""

    def __init__(self) -> None:
        self.states: dict[tuple[bytes, int], ProcessState] = {}
        self.how = ""

    def ended(self) -> dict[tuple[bytes, int], str]:
        return {key: self.how for key, state in self.states.items() if state is ProcessState.ENDED}

    def state(self, key: tuple[bytes, int]) -> ProcessState:
        return self.states.get(key, ProcessState.UNKNOWN)


class WatchedEngine:
    """An engine with two workers; rank 0 gives signs of life, rank 1 does what the test says."""

    def __init__(self, mode: str = "sync", num_workers: int = 2) -> None:
        self.engine = Engine(EngineConfig(dead_after=DEAD_AFTER))
        self.now = 0.0
        self.seen = SeenProcesses()
        self.keys = []
        for rank in range(num_workers):
            peer = b"p%d" % rank
            hello = m.Hello("job", rank, num_workers, 0, 1, "", f"h{rank}:1{rank}", peer, (peer,), mode)
            [welcome] = self.engine.handle(peer, m.Request(0, 0, 1, hello), 0.0)
            assert isinstance(welcome.reply.body, m.Welcome)
            self.keys.append((peer, welcome.reply.body.session))

    def says(self, rank: int, body: m.RequestBody) -> list[m.Outgoing]:
        peer, token = self.keys[rank]
        return self.engine.handle(peer, m.Request(1, token, 5, body), self.now)

    def waits(self) -> None:
        """Have rank 0 come to a barrier."""
        self.says(0, m.Gather(0, PATIENCE))

    def goes_on(self, until: float) -> list[m.Failed]:
        """Let time pass, in which rank 0 alone is heard; what anybody is told."""
        told: list[Any] = []
        while self.now < until and not told:
            self.now = min(self.now + 0.1, until)
            self.says(0, m.Heartbeat())
            self.engine.check_processes(self.seen, self.now)  # type: ignore[arg-type]
            told += [out.reply.body for out in self.engine.tick(self.now)]
        return told


def test_a_process_that_has_ended_is_told_to_those_who_wait_for_it_once_its_last_words_would_have_come() -> (
    None
):
    server = WatchedEngine()
    server.waits()
    server.seen.states[server.keys[1]], server.seen.how = ProcessState.ENDED, KILLED
    [failed] = server.goes_on(DEAD_AFTER)
    assert failed.code == "WorkerLostError"
    assert f"the process of rank 1 (h1:11) {KILLED}" in failed.text
    assert FINAL_MESSAGE_TIME <= server.now <= FINAL_MESSAGE_TIME + 0.21


def test_a_death_in_a_namespace_that_is_looked_at_rarely_is_told_as_soon() -> None:
    server = WatchedEngine()
    server.waits()
    server.engine.namespaces["job"].next_check = DEAD_AFTER
    server.seen.states[server.keys[1]] = ProcessState.ENDED
    [failed] = server.goes_on(PATIENCE)
    assert failed.code == "WorkerLostError"
    assert server.now <= FINAL_MESSAGE_TIME + 0.31


def test_what_ended_it_may_become_known_later_than_that_it_has_ended() -> None:
    server = WatchedEngine()
    server.waits()
    server.seen.states[server.keys[1]] = ProcessState.ENDED
    assert server.goes_on(0.1) == []
    server.seen.how = KILLED
    [failed] = server.goes_on(DEAD_AFTER)
    assert KILLED in failed.text


def test_what_it_has_said_before_it_ended_counts_although_it_comes_later() -> None:
    server = WatchedEngine()
    server.seen.states[server.keys[1]] = ProcessState.ENDED
    assert server.goes_on(0.2) == []
    assert server.says(1, m.Gather(0, PATIENCE))
    out = server.says(0, m.Gather(0, PATIENCE))
    assert {one.reply.body for one in out} == {m.Gathered((b"", b""))}
    server.says(1, m.Leave("ValueError: sample 17", False))
    server.now += DEAD_AFTER
    server.says(0, m.Gather(1, PATIENCE))
    [failed] = server.goes_on(server.now + 1.0)
    assert "rank 1 has left (ValueError: sample 17)" in failed.text


def test_a_dead_worker_is_counted_and_shown_as_failed() -> None:
    server = WatchedEngine()
    server.seen.states[server.keys[1]], server.seen.how = ProcessState.ENDED, KILLED
    server.goes_on(1.0)
    [stats] = server.says(0, m.Stats())
    assert isinstance(stats.reply.body, m.Status)
    assert stats.reply.body.values["num_dead"] == 1
    [facts] = server.says(0, m.GetStatus())
    assert isinstance(facts.reply.body, m.Status)
    [job] = facts.reply.body.values["jobs"]
    assert [(one["state"], KILLED in one["why"]) for one in job["workers"]] == [
        ("here", False),
        ("failed", True),
    ]


@pytest.mark.parametrize("mode", ["async", "ssp"])
def test_where_a_successor_may_go_on_in_its_place_a_dead_worker_is_waited_for_as_one_that_is_silent(
    mode: str,
) -> None:
    server = WatchedEngine(mode)
    server.waits()
    server.seen.states[server.keys[1]], server.seen.how = ProcessState.ENDED, KILLED
    [failed] = server.goes_on(3 * DEAD_AFTER)
    assert KILLED in failed.text
    assert DEAD_AFTER <= server.now <= DEAD_AFTER + 0.3


def test_a_process_that_runs_is_waited_for_until_the_deadline_of_the_wait_however_silent_it_is() -> None:
    server = WatchedEngine()
    server.waits()
    server.seen.states[server.keys[1]] = ProcessState.RUNS
    [failed] = server.goes_on(2 * PATIENCE)
    assert server.now == pytest.approx(PATIENCE, abs=0.2)
    assert failed.code == "DeadlineError"
    assert "but its process runs" in failed.text


def test_a_namespace_without_values_is_kept_while_a_process_of_it_runs() -> None:
    server = WatchedEngine(num_workers=1)
    server.seen.states[server.keys[0]] = ProcessState.RUNS
    for at in range(int(10 * DEAD_AFTER)):
        server.engine.check_processes(server.seen, float(at))  # type: ignore[arg-type]
        server.engine.tick(float(at))
    assert list(server.engine.namespaces) == ["job"]


def test_a_stopped_process_is_lost_by_its_silence_which_begins_when_it_was_last_seen_to_run() -> None:
    server = WatchedEngine()
    server.waits()
    server.seen.states[server.keys[1]] = ProcessState.RUNS
    assert server.goes_on(3 * DEAD_AFTER) == []
    server.seen.states[server.keys[1]] = ProcessState.STOPPED
    [failed] = server.goes_on(2 * PATIENCE)
    assert failed.code == "WorkerLostError"
    assert "and its process is paused" in failed.text
    assert 3.4 * DEAD_AFTER <= server.now <= 4.1 * DEAD_AFTER


def test_a_process_that_cannot_be_seen_is_lost_by_its_silence_and_the_error_says_what_else_it_may_be() -> (
    None
):
    server = WatchedEngine()
    server.waits()
    [failed] = server.goes_on(2 * PATIENCE)
    assert DEAD_AFTER <= server.now <= DEAD_AFTER + 0.3
    assert "interpreter lock (GIL), raise KVSTORE_DEAD_AFTER" in failed.text


def test_nobody_is_looked_at_who_is_heard() -> None:
    server = WatchedEngine()
    server.seen.states[server.keys[1]] = ProcessState.STOPPED
    server.now = 0.4 * DEAD_AFTER
    server.engine.check_processes(server.seen, server.now)  # type: ignore[arg-type]
    server.now = 0.9 * DEAD_AFTER
    server.engine.check_processes(server.seen, server.now)  # type: ignore[arg-type]
    server.says(1, m.Heartbeat())
    server.engine.check_processes(server.seen, server.now)  # type: ignore[arg-type]
    [pending] = server.says(0, m.Gather(0, PATIENCE))
    assert isinstance(pending.reply.body, m.Pending)
    assert pending.reply.body.why.endswith("rank 1 (h1:11) was last heard 0.0 s ago")
