"""What a server has to say, on its way into messages, and what it was told: nothing is too large, or may change."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from kvstore_server.protocol import messages as m
from kvstore_server.protocol.frames import KEYS_PER_MESSAGE, MAX_PAYLOAD, encode_frames, pack_control
from kvstore_server.protocol.rows import PACKED_ROWS
from kvstore_server.server import ReplyBacklog, Server, ServerOptions, _Sent, pack_replies
from tests.support.messages import contribution


def weights(tables: range, numel: int = 1) -> m.Reply:
    parts = m.matrix([(t, 1, m.WHOLE, 4 * numel) for t in tables], 4)
    return m.Reply(3, m.Weights(parts, tuple(torch.full((numel,), float(t)) for t in tables)))


@pytest.mark.parametrize("kind", ["weights", "done"])
def test_an_answer_about_very_many_small_keys_is_cut_into_messages_that_workers_take(kind: str) -> None:
    many = range(2 * KEYS_PER_MESSAGE + 1)
    reply = weights(many) if kind == "weights" else m.Reply(3, m.Done(m.matrix([(t, 1, 1) for t in many], 3)))
    messages = [out.reply for out in pack_replies([m.Outgoing(b"peer", reply)])]
    assert len(messages) == 3
    for message in messages:
        encode_frames(message)
    told = [
        entry
        for message in messages
        if isinstance(message.body, m.Weights | m.Done)
        for entry in (message.body.parts if isinstance(message.body, m.Weights) else message.body.rounds)
    ]
    assert [entry[0] for entry in told] == list(many)


def test_places_go_with_the_first_message_where_weights_are_cut_into_several() -> None:
    reply = weights(range(KEYS_PER_MESSAGE + 1))
    assert isinstance(reply.body, m.Weights)
    reply.body.locations = m.matrix([(9, 1, 7)], m.LOCATION_WORDS)
    bodies = [out.reply.body for out in pack_replies([m.Outgoing(b"peer", reply)])]
    assert [body.locations.tolist() for body in bodies if isinstance(body, m.Weights)] == [[[9, 1, 7]], []]


def test_weights_whose_frame_is_known_are_cut_for_a_peer_that_takes_less_at_once() -> None:
    def heads(reply: m.Reply, most: int) -> list[bytes]:
        packed = pack_replies([m.Outgoing(b"peer", reply)], lambda _: most)
        return [bytes(encode_frames(out.reply)[0]) for out in packed]

    plain, known = weights(range(4), 1000), weights(range(4), 1000)
    assert isinstance(known.body, m.Weights)
    known.body.encoded = bytes(encode_frames(plain)[0])
    assert heads(known, MAX_PAYLOAD) == [known.body.encoded]
    assert heads(known, 8000) == heads(plain, 8000)
    assert len(heads(plain, 8000)) == 2


def test_messages_with_weights_go_to_workers_in_turn() -> None:
    long = MAX_PAYLOAD // 4
    outs = [m.Outgoing(peer, weights(range(3), long)) for peer in (b"a", b"b")] + [
        m.Outgoing(b"c", weights(range(1), long))
    ]
    found = [
        (out.peer, int(out.reply.body.parts[0, m.PART_SLOT]))
        for out in pack_replies(outs)
        if isinstance(out.reply.body, m.Weights)
    ]
    assert found == [(b"a", 0), (b"b", 0), (b"c", 0), (b"a", 1), (b"b", 1), (b"a", 2), (b"b", 2)]


def test_weights_that_wait_are_not_added_again_by_a_repeated_request() -> None:
    waiting = ReplyBacklog()
    waiting.append(weights(range(4)))
    left = waiting.without_coming(weights(range(2, 6)))
    assert isinstance(left.body, m.Weights)
    assert left.body.parts[:, m.PART_SLOT].tolist() == [4, 5]
    assert [payload[0] for payload in left.body.payloads] == [4.0, 5.0]


def test_a_peer_that_does_not_read_has_one_copy_of_optimizer_state_waiting_and_no_more() -> None:
    waiting = ReplyBacklog()
    waiting.append(weights(range(1)))
    assert not waiting.has_state
    waiting.append(m.Reply(4, m.SliceState(0, 0, {}, bytes(1000))))
    assert waiting.has_state
    waiting.popleft()
    waiting.popleft()
    assert not waiting.has_state


class Recording:
    """A service that keeps what it was given and answers nothing."""

    is_stopping = False

    def __init__(self) -> None:
        self.heard: list[m.Contribute] = []

    def handle(self, peer: bytes, request: m.Request, now: float) -> list[m.Outgoing]:
        assert isinstance(request.body, m.Contribute)
        self.heard.append(request.body)
        return []


@pytest.mark.parametrize(
    ("form", "may_change"), [(b"", True), (PACKED_ROWS, True), (pack_control({"type": "int8"}), False)]
)
def test_a_worker_that_shares_memory_can_change_numbers_that_it_gave_and_not_what_a_codec_has_checked(
    form: bytes, may_change: bool
) -> None:
    service = Recording()
    server = Server(service, ServerOptions())  # type: ignore[arg-type]
    body = contribution([(0, bytes(3000))], 1, encoding=form)
    head, *rest = encode_frames(m.Request(1, 1, 1, body))
    shared = bytearray(rest[-1])
    server._answer(b"peer", [head, *rest[:-1], shared])
    shared[:] = b"x" * len(shared)
    [heard] = service.heard
    assert (heard.payloads[0].tolist() == [ord("x")] * 3000) == may_change
    server.close()


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server(Recording(), ServerOptions())  # type: ignore[arg-type]
    yield made
    made.close()


def test_what_waits_goes_to_workers_in_turn(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[tuple[bytes, int]] = []
    for peer, count in ((b"a", 3), (b"b", 1), (b"c", 2)):
        server._backlog[peer] = waiting = ReplyBacklog()
        for number in range(count):
            waiting.append(m.Reply(number, m.Done(m.matrix([], 3))))

    def take(peer: bytes, reply: m.Reply, waiting: ReplyBacklog) -> Any:
        sent.append((peer, reply.number))
        return _Sent.NOW

    monkeypatch.setattr(server, "_try_send", take)
    server._retry_backlog()
    assert sent == [(b"a", 0), (b"b", 0), (b"c", 0), (b"a", 1), (b"c", 1), (b"a", 2)]
    assert not server._backlog


def test_a_payload_that_several_workers_are_sent_at_once_is_copied_once(server: Server) -> None:
    payload = torch.arange(1 << 16, dtype=torch.float32)
    frame = payload.view(torch.uint8).numpy().data
    copy = server._copy_of(payload, frame)
    assert server._copy_of(payload, frame) is copy
    server._send_all([])
    payload.zero_()
    assert bytes(copy.buffer) == torch.arange(1 << 16, dtype=torch.float32).numpy().tobytes()
    assert bytes(server._copy_of(payload, frame).buffer) == bytes(4 << 16)
