"""Messages of rounds that repeat: kept unread until all are here, with the effect of the general path."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from kvstore_server.engine.rounds import SYNCHRONOUS
from kvstore_server.protocol import messages as m
from kvstore_server.protocol.frames import encode_frames
from tests.support.captures import handle_frames
from tests.support.engines import EngineJob, contribution


class Repeating(EngineJob):
    """A job of two ranks that give all slices and the commit in one message, whose frames a server compares."""

    def __init__(self, captures: bool = True) -> None:
        super().__init__(2, SYNCHRONOUS)
        self.seen: Counter[str] = Counter()
        self.captures = captures
        for round_ in (1, 2):
            self.give(0, round_), self.give(1, round_)

    def give(
        self,
        rank: int,
        round_: int,
        value: float = 1.0,
        number: int | None = None,
        table: int = 0,
        **said: Any,
    ) -> list[Any]:
        """Let a rank give a round; all answers, to whomever."""
        first = table * len(self.slices)
        given = [(first + slice_.index, torch.full((slice_.length,), value)) for slice_ in self.slices]
        said = {"timeout": 30.0, "flags": m.WANTS_WEIGHTS, **said}
        body = contribution(given, round_, table, len(given), **said)
        number = 1000 * round_ + rank if number is None else number
        request = m.Request(1, self.sessions[rank], number, body)
        peer = b"%d" % rank
        if self.captures:
            out = handle_frames(self.engine, peer, request, self.now, self.seen)
        else:
            out = self.engine.handle(peer, request, self.now)
        self._keep(out)
        return [(int(one.peer), one.reply.number, one.reply.body) for one in out]

    @property
    def value(self) -> float:
        """That of the weights now."""
        [weights] = self.pull(0)
        assert isinstance(weights, m.Weights)
        return float(weights.payloads[0].view(torch.float32)[0])

    @property
    def has_unread(self) -> bool:
        return bool(self.engine.captures and self.engine.captures.unread)


def shown(answers: list[Any]) -> list[Any]:
    """The answers as they are sent."""
    return [
        (rank, [bytes(frame) for frame in encode_frames(m.Reply(number, body))])
        for rank, number, body in answers
    ]


def test_captured_rounds_are_answered_like_others() -> None:
    captured, general = Repeating(), Repeating(captures=False)
    before = captured.seen["captured"]
    for round_ in range(3, 7):
        for rank in (1, 0):
            value = 0.25 * round_ + rank
            assert shown(captured.give(rank, round_, value)) == shown(general.give(rank, round_, value))
        assert captured.value == general.value
    assert captured.seen["captured"] == before + 8


def test_a_message_that_is_unread_is_read_before_any_other_request() -> None:
    job = Repeating()
    job.give(0, 3)
    assert job.has_unread
    [status] = job.ask(1, m.Stats())
    assert not job.has_unread
    assert isinstance(status, m.Status)
    assert job.engine.namespaces["j"].rounds.shared.has_committed(0, 0)
    before = job.value
    job.give(1, 3)
    assert job.value == before + 2.0


def test_a_message_that_is_unread_is_read_by_a_tick_so_that_its_wait_has_a_deadline() -> None:
    job = Repeating()
    job.give(0, 3, number=77)
    job.tick(31.0, alive=(0, 1))
    [failed] = job.replies[0, 77]
    assert isinstance(failed, m.Failed)


def test_a_repeated_message_counts_once() -> None:
    job = Repeating()
    before = job.value
    job.give(0, 3, number=77)
    job.give(0, 3, number=78)
    assert not job.has_unread
    job.give(1, 3)
    assert job.value == before + 2.0
    assert [type(body) for body in job.replies[0, 78]][-1] is m.Weights


@pytest.mark.parametrize("round_", [2, 4])
def test_a_message_of_another_round_takes_the_general_path(round_: int) -> None:
    job = Repeating()
    captured = job.seen["captured"]
    job.give(0, round_)
    assert job.seen["captured"] == captured
    assert not job.has_unread


def test_a_round_of_which_one_message_is_special_is_a_general_one() -> None:
    job = Repeating()
    before = job.value
    job.give(0, 3)
    [answer] = job.give(1, 3, flags=m.VETOES | m.WANTS_WEIGHTS)[-1:]
    assert isinstance(answer[2], m.Vetoed | m.Weights | m.Done)
    assert job.value == before


def test_what_a_successor_gets_is_kept_from_a_captured_round() -> None:
    job = Repeating()
    captured = job.seen["captured"]
    job.give(0, 3, client_state=b"of rank 0")
    job.give(1, 3)
    assert job.seen["captured"] == captured + 2
    assert job.engine.namespaces["j"].client_states[0, 0] == [(3, b"of rank 0")]


def test_an_update_that_raises_fails_a_captured_round_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Repeating()

    def fail(*_: object) -> None:
        raise ValueError("no")

    monkeypatch.setattr(job.engine.namespaces["j"].shard, "update", fail)
    job.give(0, 3, number=77)
    job.give(1, 3, number=78)
    assert [type(job.replies[key][-1]) for key in ((0, 77), (1, 78))] == [m.Failed, m.Failed]


def test_a_process_that_was_replaced_cannot_give_a_captured_round() -> None:
    job = Repeating()
    former = job.sessions[0]
    job.hello(0)
    job.sessions[0], current = former, job.sessions[0]
    [(_, _, refusal)] = job.give(0, 3)
    assert isinstance(refusal, m.Failed)
    assert refusal.code == "FencedError"
    assert current != former


def test_messages_of_several_batches_of_a_job_are_read_in_the_order_in_which_they_have_come() -> None:
    job = Repeating()
    for rank in (0, 1):
        job.ask(rank, m.Register("u", (("k", job.shape, "float32", 0, False),), False))
    for round_ in range(3):
        job.give(0, round_, table=1), job.give(1, round_, table=1)
    handled: list[int] = []
    handle = job.engine._handle

    def note(peer: bytes, request: m.Request, now: float) -> list[m.Outgoing]:
        if isinstance(request.body, m.Contribute):
            handled.append(request.number)
        return handle(peer, request, now)

    job.engine._handle = note  # type: ignore[method-assign]
    job.give(0, 3, number=77)
    assert job.has_unread
    job.give(0, 3, number=78, table=1)
    assert handled == [77, 78]
    job.give(1, 3, number=79, table=1)
    job.give(1, 3, number=80)
    assert [type(job.replies[key][-1]) for key in ((0, 77), (0, 78), (1, 79), (1, 80))] == [m.Weights] * 4
