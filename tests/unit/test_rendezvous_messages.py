"""Messages of the rendezvous as bytes: they come back as they were, and nothing else is let in."""

from __future__ import annotations

import random

import msgpack
import pytest

from kvstore_server.errors import ConfigurationError, ConnectTimeoutError, KVStoreError, ProtocolError
from kvtrainer.rendezvous import messages as m

MESSAGES: list[m.Question | m.Answer] = [
    m.Join("t", "worker", 2, 2, -1, -1, "h", 0, 0, "m"),
    m.Ready("t", "tcp://a:1", "tcp://a:2"),
    m.Alive("t"),
    m.Done("t"),
    m.GivingUp("t", "why"),
    m.Waiting("who"),
    m.Assigned(1, False),
    m.Table(0, ("tcp://a:1",), ("tcp://a:2",), ()),
    m.Refused("ConfigurationError", "no"),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_messages_come_back_as_they_were(message: m.Question | m.Answer) -> None:
    decode = m.decode_question if isinstance(message, m.QUESTIONS) else m.decode_answer
    assert decode(m.encode(message)) == message


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_a_message_in_the_wrong_direction_is_refused(message: m.Question | m.Answer) -> None:
    decode = m.decode_answer if isinstance(message, m.QUESTIONS) else m.decode_question
    with pytest.raises(ProtocolError, match="has no place here"):
        decode(m.encode(message))


@pytest.mark.parametrize(
    "values",
    [
        5,
        [],
        [1],
        [2, 2, "t"],
        [1, "2", "t"],
        [1, True, "t", "a", "b"],
        [1, 2, 5],
        [1, 2, "t", "more"],
        [1, 2, b"t"],
        [1, 2, "t" * 5001],
        [1, 99, "t"],
        [1, -1, "t"],
        [1, 0, "t", "scheduler", 2, 2, -1, -1, "h", 0, 0, "m"],
        [1, 0, "t", "worker", 2, 2, -2, -1, "h", 0, 0, "m"],
        [1, 0, "t", "worker", True, 2, -1, -1, "h", 0, 0, "m"],
        [1, 2, {"a": 1}],
        [1, 2, msgpack.ExtType(1, b"x")],
    ],
)
def test_nonsense_is_refused(values: object) -> None:
    with pytest.raises(ProtocolError):
        m.decode_question(msgpack.packb(values))


def test_random_bytes_are_refused_or_read_but_never_raise_anything_else() -> None:
    generator = random.Random(7)
    refused_ones = 0
    for _ in range(3000):
        data = bytearray(m.encode(generator.choice(MESSAGES[:5])))
        data[generator.randrange(len(data))] = generator.randrange(256)
        try:
            m.decode_question(bytes(data))
        except ProtocolError:
            refused_ones += 1
    assert refused_ones > 500


@pytest.mark.parametrize("kind", [ConfigurationError, ConnectTimeoutError, ProtocolError])
def test_an_error_keeps_its_class_and_its_text(kind: type[KVStoreError]) -> None:
    answer = m.decode_answer(m.encode(m.Refused.because(kind("what happened"))))
    assert isinstance(answer, m.Refused)
    assert (type(answer.error()), str(answer.error())) == (kind, "what happened")


def test_an_error_of_an_unknown_class_becomes_the_base_class() -> None:
    assert type(m.Refused("SystemExit", "x").error()) is KVStoreError
