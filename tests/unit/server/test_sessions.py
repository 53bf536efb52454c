"""Who may speak for a rank: the process that said hello, from the sockets that it named, and nobody else."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvstore_server.engine.engine import Engine
from kvstore_server.engine.membership import random_token
from kvstore_server.engine.namespace import EngineConfig
from kvstore_server.errors import FencedError, ProtocolError, WorkerLostError
from kvstore_server.protocol import messages as m

DEAD_AFTER = 20.0
OWN, OTHER, STRANGER = b"own socket", b"other socket", b"stranger"


class Place:
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
    place = Place(iter([0, 7, 7, 9, 1 << 63]).__next__)
    assert [place.token(0, b"a"), place.token(1, b"b"), place.token(0, b"c")] == [7, 9, 1 << 63]


def test_tokens_of_a_server_are_random_numbers_of_64_bits() -> None:
    tokens = [Place().token() for _ in range(64)]
    assert len(set(tokens)) == 64
    assert max(tokens) >= 1 << 60  # 16⁻⁶⁴ if not


def test_another_socket_is_refused_as_if_there_were_no_such_session() -> None:
    place = Place()
    refused = [place.ask(STRANGER, token, m.Stats()) for token in (place.token(), 1, 0)]
    assert code(refused[0]) == FencedError.__name__
    assert refused[0] == refused[1] == refused[2]


@pytest.mark.parametrize(
    "body", [m.Leave("bye", True), m.SetOptimizer(b"\x80"), m.Register("w", (("w", (4,), "float32", 0, False),), False)]
)  # fmt: skip
def test_what_another_socket_asks_for_has_no_effect(body: m.RequestBody) -> None:
    place = Place()
    token = place.token()
    assert code(place.ask(STRANGER, token, body)) == FencedError.__name__
    stats = place.ask(OWN, token, m.Stats())
    assert isinstance(stats, m.Status)
    assert (stats.values["tables"], stats.values["messages_in"]) == ([], 1)


def test_another_socket_is_no_sign_of_life() -> None:
    place = Place()
    alive, dead = place.token(0, b"a", (OWN,)), place.token(1, b"b", (OTHER,))
    place.now = DEAD_AFTER + 1
    place.ask(STRANGER, dead, m.Heartbeat())
    place.ask(OWN, alive, m.Gather(0, 60.0))
    [told] = place.engine.tick(place.now)
    assert (told.peer, code(told.reply.body)) == (OWN, WorkerLostError.__name__)


def test_a_hello_that_comes_again_gets_the_same_session_and_begins_nothing_anew() -> None:
    place = Place()
    token = place.token()
    place.ask(OWN, token, m.Gather(0, 60.0))
    assert place.token() == token
    released = place.engine.handle(
        b"b", m.Request(1, place.token(1, b"b", (b"b",)), 1, m.Gather(0, 60.0)), 0.0
    )
    assert [out.peer for out in released] == [OWN, b"b"]


def test_a_hello_that_comes_again_is_a_sign_of_life() -> None:
    place = Place()
    place.token(0, b"a", (OWN,))
    alive = place.token(1, b"b", (OTHER,))
    place.now = DEAD_AFTER + 1
    place.token(0, b"a", (OWN,))
    assert isinstance(place.ask(OTHER, alive, m.Gather(0, 60.0)), m.Pending)


@pytest.mark.parametrize(("nonce", "sockets"), [(b"second", (OWN, OTHER)), (b"first", (b"new", OTHER))])
def test_another_process_of_the_rank_gets_another_session_and_shuts_the_first_out(
    nonce: bytes, sockets: tuple[bytes, ...]
) -> None:
    place = Place()
    first = place.token()
    assert place.token(0, nonce, sockets) != first
    refused = place.ask(OTHER, first, m.Stats())
    assert code(refused) == FencedError.__name__
    assert f"taken over by h0:{nonce!r}" in str(refused)
    assert "taken over" not in str(place.ask(STRANGER, first, m.Stats()))


def test_a_late_hello_of_a_process_that_was_replaced_or_has_left_is_refused() -> None:
    place = Place()
    first, second = place.token(), place.token(0, b"second", (b"new",))
    assert code(place.hello()) == FencedError.__name__
    assert isinstance(place.ask(b"new", second, m.Stats()), m.Status)
    place.ask(b"new", second, m.Leave("done", True))
    assert code(place.hello(0, b"second", (b"new",))) == FencedError.__name__
    assert not place.engine.namespaces
    assert first != second


def test_a_hello_that_does_not_name_its_own_socket_is_refused() -> None:
    place = Place()
    hello = m.Hello("job", 0, 2, 0, 1, "", "h", b"first", (OWN, OTHER))
    assert code(place.ask(STRANGER, 0, hello)) == ProtocolError.__name__
    assert not place.engine.namespaces


def test_sessions_that_ended_long_ago_are_forgotten() -> None:
    place = Place()
    for at in range(3000):
        place.token(0, b"%d" % at)
    assert len(place.engine._sessions._opened) < 1100


def test_who_is_still_there_at_the_end_is_told_and_nobody_else() -> None:
    place = Place()
    place.token(0, b"a", (OWN, OTHER))
    gone = place.token(1, b"b", (b"b",))
    place.ask(b"b", gone, m.Leave("done", True))
    [notice] = place.engine.abandon(0.0)
    assert (notice.peer, notice.reply.number, code(notice.reply.body)) == (
        OWN,
        0,
        "ServerStoppingError",
    )
