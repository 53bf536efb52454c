"""Messages as bytes: every kind survives the way there and back, and nothing but ProtocolError comes of bad bytes."""

from __future__ import annotations

import math
import random
import struct
import weakref
from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgpack
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore_server.errors import ProtocolError, VersionMismatchError
from kvstore_server.protocol import frames as f
from kvstore_server.protocol import messages as m
from kvstore_server.protocol.frames import MAX_FRAME, MAX_PAYLOAD
from tests.support.messages import contribution

REQUESTS: list[Any] = [
    m.Hello("job", 1, 3, 0, 2, "AVX512", "host:17", bytes(16), (b"a" * 16, b"b" * 16)),
    m.Register("w", (("w", (3, 4), "float32", 0, False), ("empty", (), "bfloat16", 1, False)), True),
    m.Resolve(1, 2, 0.25, None, False),
    m.Resolve(1, 2, 1.0, 0.1, False),
    m.Resolve(1, 2, 1.0, None, True),
    m.Abort(1, 2, "because", True),
    m.Abort(1, 2, "because", False, True),
    m.Pull((0, 1, 5), 3.5),
    m.Pull((0,), 3.5, 7),
    m.PullRows(0, (3,), (struct.pack("<2q", 0, 2),), (b"",), 3.5),
    m.PullRows(0, (3,), (struct.pack("<2q", 0, 2),), (b"",), 3.5, 7),
    m.MapRows(7),
    m.SetOptimizer(b"\x81"),
    m.Gather(4, 2.5),
    m.Gather(5, 2.5, b"mine", False),
    m.GetState(1, 2),
    m.GetState(1, 2, 3),
    m.SliceState(1, 2, {"step": 3, "tensors": ["a"]}, bytes(range(256)) * 9000),
    m.Heartbeat(),
    m.Heartbeat(b"\x81\xa5steps\x07"),
    m.Members(1, 7, 3, (0, 2), 5, (b"a", b"b"), 1, True),
    m.LeftOut(1, 7, 6, True, (2, 3), (0, 2), 5, 1, 4, (2,), (b"a", b"b")),
    m.CloseRound(1, 7, 3, (0, 2)),
    m.Leave("done", True),
    m.Stats(),
    m.Command(7, "größe".encode()),
    m.Profile("run", ("calls", "rounds"), 3),
    m.JoinJob("worker", 2, 1, -1, 3, "host", 1234, 17, "machine"),
    m.Listening("tcp://host:1"),
]
HELLO = REQUESTS[0]
REPLIES: list[Any] = [
    m.Welcome(1 << 61, 5),
    m.Registered(3, 7, 1),
    m.Registered(3, 7, 1, True, (b"\x81",), False),
    m.Welcome(1, 5, 0, 60.0),
    m.EffectiveOptions(1, 7, b"\x80", True),
    m.Absent(1, 7, (3, 4)),
    m.Held(1, 7, ((0, 2.5), (3, math.inf)), False),
    m.Held(1, 7, (), True),
    m.Vetoed(1, 7, (0, 2)),
    m.Full(1, 7, "größe"),
    m.Members(1, 7, 3, (0, 2), 5, (b"a", b"b")),
    m.Missing(1, 7, (0, 2)),
    m.Pending((1, 2)),
    m.Gathered((b"a", b"", b"c" * 9)),
    m.Failed("DeadlineError", "too late", 1, 2, 3),
    m.Status({"a": 1, "b": [1.5, "x"]}),
    m.SliceState(1, 2, {}, b"", 1 << 62),
]


def _wire(frames: list[Any]) -> list[bytearray]:
    return [bytearray(frame) for frame in frames]


@pytest.mark.parametrize("body", REQUESTS, ids=lambda body: type(body).__name__)
def test_a_request_comes_out_as_it_went_in(body: Any) -> None:
    request = m.Request(run_id=1 << 62, session=1 << 40, number=99, body=body)
    assert f.decode_frames(_wire(f.encode_frames(request))) == request


@pytest.mark.parametrize("body", REPLIES, ids=lambda body: type(body).__name__)
def test_a_reply_comes_out_as_it_went_in(body: Any) -> None:
    assert f.decode_frames(_wire(f.encode_frames(m.Reply(12, body)))) == (0, 0, 12, body)


WEIGHTS = m.Weights(
    m.matrix([(1, 2, m.WHOLE, 64)], m.PART_WORDS),
    (torch.arange(16.0),),
    locations=m.matrix([(2, 2, 1 << 40), (3, 2, m.SAME_LOCATION)], m.LOCATION_WORDS),
)
CONTRIBUTE = m.Contribute(
    m.matrix([(3, 7, 0, 64), (4, 7, 2, 0), (9, 8, 1, 16)], m.PUSH_WORDS),
    (torch.full((64,), 1, dtype=torch.uint8), torch.empty(0), torch.full((2,), 0.5, dtype=torch.float64)),
    m.matrix(
        [(1, 7, 2, 2, -1, m.WANTS_WEIGHTS), (2, 8, 1, 1, 5, m.VETOES | m.WANTS_DELTA | m.WANTS_HALF)],
        m.COMMIT_WORDS,
    ),
    b"form",
    b"h",
    ((1, 4), (2, 0)),
    0.25,
    3.5,
    2.0,
)


def test_a_large_payload_is_passed_through_without_a_copy() -> None:
    value = torch.zeros(1000)
    frames = f.encode_frames(m.Request(1, 2, 3, contribution([(0, value)], 0)))
    value.fill_(1.0)
    assert bytes(frames[-1]) == b"\x00\x00\x80\x3f" * 1000


def test_no_frame_of_a_large_state_exceeds_the_limit() -> None:
    frames = f.encode_frames(m.Reply(1, m.SliceState(0, 0, {}, bytes(5 * MAX_FRAME))))
    assert max(len(frame) for frame in frames) <= MAX_FRAME


def test_a_control_message_that_no_frame_can_hold_is_refused_before_it_is_sent() -> None:
    specs = tuple((f"{'very' * 20}_long_name_{i}", (1,), "float32", 0, False) for i in range(20_000))
    with pytest.raises(ProtocolError, match="Register"):
        f.encode_frames(m.Request(1, 2, 3, m.Register("w", specs, False)))


@pytest.mark.parametrize(
    "body",
    [
        contribution([(i, b"abcd") for i in range(40_000)], 0),
        contribution([], 0, table=0, hyper=bytes(MAX_FRAME)),
        m.Command(7, bytes(MAX_FRAME)),
        m.SetOptimizer(bytes(MAX_FRAME)),
        m.Leave("so" * MAX_FRAME, False),
    ],
)
def test_no_message_of_any_kind_leaves_with_a_frame_that_the_other_side_would_not_take(body: Any) -> None:
    with pytest.raises(ProtocolError, match=f"{type(body).__name__} message would have a frame of"):
        f.encode_frames(m.Request(1, 2, 3, body))


HEADER = 32
"""Bytes of the header, ahead of the body."""


class Piece(bytearray):
    """A frame of which one can know whether somebody holds on to it."""


@pytest.mark.parametrize(
    ("head", "more", "told"),
    [
        (m.Pull((0,)), [b"\0" * 1000] * 1500, "a message of 1501 frames is refused"),
        (m.SliceState(0, 0, {}, b""), [b"\0"] * 100, "a message of 101 frames"),
        (
            m.SliceState(0, 0, {}, b""),
            [bytes(MAX_PAYLOAD)] * 9,
            r"up to 8388608 bytes \(--max-message-bytes\)",
        ),
    ],
)
def test_nothing_is_kept_of_a_message_with_too_many_frames_or_bytes(
    head: Any, more: list[bytes], told: str
) -> None:
    incoming = f.LongMessage(f.encode_frames(m.Request(1, 2, 3, head)), 8 * MAX_PAYLOAD)
    held = []
    for data in more:
        piece = Piece(data)
        held.append(weakref.ref(piece))
        incoming.take(piece)
    del piece
    assert [ref() for ref in held if ref() is not None] == []
    with pytest.raises(ProtocolError, match=told):
        incoming.decode()


def test_a_state_within_the_limit_is_taken_whole() -> None:
    state = m.SliceState(3, 1, {"a": 1}, random.Random(0).randbytes(5 * MAX_PAYLOAD + 17))
    incoming = f.LongMessage(f.encode_frames(m.Request(1, 2, 3, state)), 6 * MAX_PAYLOAD)
    assert incoming.decode() == m.Request(1, 2, 3, state)


def test_another_version_is_named_with_our_own(monkeypatch: pytest.MonkeyPatch) -> None:
    own = f.PROTOCOL_VERSION
    frames = f.encode_frames(m.Request(0, 0, 1, m.Stats()))
    monkeypatch.setattr(f, "PROTOCOL_VERSION", own + 1)
    with pytest.raises(
        VersionMismatchError, match=f"peer speaks protocol version {own}, this side speaks {own + 1}"
    ):
        f.decode_frames(frames)


@pytest.mark.parametrize(
    "frames", [[], [b""], [b"GET / HTTP/1.1\r\n"], [b"XX" + bytes(30)], [bytes(33), b""]]
)
def test_bytes_without_our_header_are_asked_whether_they_are_ours(frames: list[bytes]) -> None:
    with pytest.raises(ProtocolError):
        f.decode_frames(frames)


def hello(**wrong: Any) -> bytes:
    """The body of a Hello with some values replaced."""
    right = {
        "namespace": "",
        "rank": 0,
        "workers": 1,
        "server": 0,
        "servers": 1,
        "capability": "",
        "address": "",
        "nonce": bytes(16),
        "sockets": [b"a" * 16, b"b" * 16],
    }
    return bytes(msgpack.packb([*{**right, **wrong}.values(), "sync", 0, False, False, False, 0, 0, 0, 0]))


def register(spec: list[Any]) -> bytes:
    return bytes(msgpack.packb(["w", [spec], False, 0, -1, "", False, b""]))


def contribute(
    pushes: int = 0,
    commits: int = 0,
    rescale: float = 1.0,
    timeout: float = 1.0,
    hold: float = 0.0,
    words: Sequence[int] = (),
    extra: Any = (b"", b"", ()),
) -> list[bytes]:
    """The body of a contribution, and its frame of payloads, which is empty."""
    head = struct.pack("<2q3d", pushes, commits, rescale, timeout, hold)
    return [head + struct.pack(f"<{len(words)}q", *words) + msgpack.packb(extra), b""]


def resolve(flags: int = 0, clip: float = 0.0) -> list[bytes]:
    return [struct.pack("<3q2d", 0, 0, flags, 1.0, clip)]


@pytest.mark.parametrize("size", [23, 25, 32])
def test_a_damaged_answer_of_partial_norms_is_a_protocol_error(size: int) -> None:
    header = f.encode_frames(m.Reply(1, m.Held(0, 0, (), True)))[0][:HEADER]
    with pytest.raises(ProtocolError, match=f"held message of {size} bytes"):
        f.decode_frames([header + bytes(size)])


@pytest.mark.parametrize(
    ("body", "damage", "text"),
    [
        (HELLO, [b"\xc1"], "cannot be decoded"),
        (HELLO, [b""], "cannot be decoded"),
        (HELLO, [b"\x90"], "must hold 18 values"),
        (HELLO, [b"\x90", b"\x90"], "has 2 frames, expected 1"),
        (HELLO, [hello(namespace=1)], "Hello.namespace must be str"),
        (HELLO, [hello(rank=True)], "Hello.rank must be int"),
        (HELLO, [hello(nonce=b"short")], "a nonce and 1 … 8 routing ids, of 16 bytes each"),
        (HELLO, [hello(sockets=[b"a" * 17])], "a nonce and 1 … 8 routing ids, of 16 bytes each"),
        (HELLO, [hello(sockets=["a" * 16])], "Hello.sockets must be"),
        (HELLO, [hello(sockets=[])], "a nonce and 1 … 8 routing ids, of 16 bytes each"),
        (HELLO, [hello(sockets=[b"a" * 16] * 9)], "a nonce and 1 … 8 routing ids, of 16 bytes each"),
        (m.Gather(0, 1.0), [msgpack.packb([0, float("nan"), b"", True])], "Gather.timeout must be float, got nan"),
        (m.Gather(0, 1.0), [msgpack.packb([0, float("inf"), b"", True])], "Gather.timeout must be float, got inf"),
        (m.Missing(0, 0, (0,)), [msgpack.packb([0, 0, ["0"]])], "Missing.slots must be"),
        (m.Missing(0, 0, (0,)), [msgpack.packb([0, 0, [1 << 63]])], "Missing.slots must be"),
        (m.Missing(0, 0, (0,)), [b"\x91" + b"\xdd\xff\xff\xff\xff"], "cannot be decoded"),
        (m.Missing(0, 0, (0,)), [b"\x91" * 5000], "cannot be decoded"),
        (m.Pull((0,)), [b""], "a pull of 0 bytes"),
        (m.Pull((0,)), [bytes(20)], "a pull of 20 bytes"),
        (m.Pull((0,)), [bytes(8)], "a pull of 8 bytes"),
        (m.Pull((0,)), [struct.pack("<d2q", math.inf, -1, 0)], "timeout inf"),
        (m.Register("w", (), False), [register(["k", [1.5], "f", 0, False])], "Register.specs must be"),
        (m.Register("w", (), False), [register(["k", [1], "f", 0])], "Register.specs must be"),
        (m.Register("w", (), False), [register(["k", [1], "f", 0, False, 0])], "Register.specs must be"),
        (m.Register("w", (), False), [register(["k", [1], "f", 0, True, [1, 2]])], "Register.specs must be"),
        (m.Register("w", (), False), [register(["k", [1], "f", 0, False, [0, "a", 1.0, 1, 0, 0, "lru"]])], "Register."),
        (m.SetOptimizer(b""), [msgpack.packb([msgpack.ExtType(1, b"x")])], "cannot be decoded"),
        (CONTRIBUTE, [b""], "has 1 frames, expected 2"),
        (CONTRIBUTE, [b"1234", b""], "a body of 4 bytes"),
        (CONTRIBUTE, contribute(pushes=-1), "cannot hold -1 slices"),
        (CONTRIBUTE, contribute(pushes=1 << 62), "cannot hold 4611686018427387904 slices"),
        (CONTRIBUTE, contribute(commits=1 << 62), "and 4611686018427387904 commits"),
        (CONTRIBUTE, contribute(pushes=1, words=[0, 0, 0, -1]), "body names -1"),
        (CONTRIBUTE, contribute(pushes=1, words=[0, 0, 0, 1 << 40]), "payload has 0 bytes"),
        (CONTRIBUTE, contribute(pushes=4, words=[0, 0, 0, 1 << 62] * 4), "payload has 0 bytes"),
        (CONTRIBUTE, contribute(timeout=-1.0), "timeout -1"),
        (CONTRIBUTE, contribute(rescale=math.inf), "rescale inf"),
        (CONTRIBUTE, contribute(commits=1, words=[0, 0, 0, 0, 0, 1 << 62]), "unknown flags"),
        (CONTRIBUTE, contribute(hold=-1.0), "norm of type -1"),
        (CONTRIBUTE, contribute(hold=float("nan")), "norm of type nan"),
        (CONTRIBUTE, contribute(extra=[]), "must name"),
        (CONTRIBUTE, contribute(extra=[b"", b"", [], bytes(m.MAX_CLIENT_STATE + 1), -1, [], 0, False]), "65537 bytes"),
        (CONTRIBUTE, contribute(extra=[b"", b"", ["x"], b"", -1, [], 0, False]), "list of .table, key."),
        (CONTRIBUTE, contribute(extra=[b"", b"", [[1, "x"]], b"", -1, [], 0, False]), "list of .table, key."),
        (CONTRIBUTE, contribute(extra=[b"", b"", [], b"", 1, ["x"], 0, False]), "list of ranks"),
        (m.Gathered((b"",)), [msgpack.packb([["text"]])], "Gathered.parts must be"),
        (m.Resolve(0, 0, 1.0, None, False), [b"1234"], "4 bytes, expected 40"),
        (m.Resolve(0, 0, 1.0, None, False), resolve(flags=4), "flags 0x4"),
        (m.Resolve(0, 0, 1.0, None, False), resolve(clip=-1.0), "limit of -1"),
        (m.Resolve(0, 0, 1.0, None, False), resolve(clip=float("nan")), "limit of nan"),
        (m.SliceState(0, 0, {}, b""), [msgpack.packb([0, 0, {}, 5, 0]), b"1234"], "names 5 bytes and brings 4"),
        (WEIGHTS, [b"", b""], "0 bytes cannot begin with -1"),
        (WEIGHTS, [struct.pack("<q", -1), b""], "8 bytes cannot begin with -1"),
        (WEIGHTS, [struct.pack("<q", 1 << 62), b""], "8 bytes cannot begin with 4611686018427387904"),
        (WEIGHTS, [struct.pack("<4q", 1, 0, 0, 0) + b"1234", b""], "36 bytes cannot begin with 1"),
        (WEIGHTS, [struct.pack("<5q", 0, 0, 0, 0, 8), b""], "body names 8"),
        (m.Done(m.matrix([], 3)), [b"1234"], "4 bytes cannot begin with -1"),
        (m.Done(m.matrix([], 3)), [struct.pack("<5q", 0, 0, 0, 0, 0)], "40 bytes cannot begin with 0"),
    ],
)  # fmt: skip
def test_a_damaged_body_is_a_protocol_error_that_says_what_is_wrong(
    body: Any, damage: list[bytes], text: str
) -> None:
    header = f.encode_frames(m.Request(1, 2, 3, body))[0][:HEADER]
    with pytest.raises(ProtocolError, match=text):
        f.decode_frames([header + damage[0], *damage[1:]])


def test_places_of_weights_that_a_worker_maps_travel_with_the_bytes_of_others() -> None:
    *_, body = f.decode_frames([bytearray(frame) for frame in f.encode_frames(m.Reply(3, WEIGHTS))])
    assert (body.locations == WEIGHTS.locations).all()
    assert (body.parts == WEIGHTS.parts).all()
    assert body.payloads[0].view(torch.float32).tolist() == WEIGHTS.payloads[0].tolist()


def test_peers_of_an_older_version_read_the_header_of_their_refusal() -> None:
    refusal = m.Failed("VersionMismatchError", "another version")
    header, body = f.encode_frames(m.Reply(0, refusal))
    assert len(header) == HEADER
    assert header[2] == f.PROTOCOL_VERSION
    assert msgpack.unpackb(body)[:2] == [refusal.code, refusal.text]


def test_an_unknown_kind_is_a_protocol_error() -> None:
    frame = bytearray(f.encode_frames(m.Request(1, 2, 3, m.Stats()))[0])
    frame[3] = 0x7F
    with pytest.raises(ProtocolError, match="127"):
        f.decode_frames([frame])


WHOLE = [
    *(f.encode_frames(m.Request(1, 2, 3, body)) for body in [*REQUESTS[:8], CONTRIBUTE]),
    *(f.encode_frames(m.Reply(3, body)) for body in [*REPLIES, WEIGHTS, m.Done(m.matrix([(1, 7, 7)], 3))]),
]
DAMAGE = st.one_of(
    st.sampled_from([b"", b"\xff" * 8, b"\x00" * 8, b"\xdf\xff\xff\xff\xff"]), st.binary(max_size=8)
)


@st.composite
def damaged_messages(draw: st.DrawFn) -> list[bytearray]:
    """A message with bytes that were replaced, taken out or put in, or with a frame too few or too many."""
    frames = [bytearray(frame) for frame in draw(st.sampled_from(WHOLE))]
    for _ in range(draw(st.integers(1, 3))):
        frame = draw(st.sampled_from(frames))
        at = draw(st.integers(0, len(frame)))
        frame[at : at + draw(st.sampled_from([0, 1, 8]))] = draw(DAMAGE)
    return draw(st.sampled_from([frames, frames, frames, frames[:-1], [*frames, bytearray(8)]]))


def test_nothing_but_protocol_errors_comes_of_damaged_messages() -> None:
    outcomes = Counter[bool]()

    @settings(max_examples=1_000)
    @given(damaged_messages())
    def check(frames: list[bytearray]) -> None:
        try:
            f.decode_frames(frames)
        except ProtocolError:
            outcomes[True] += 1
        else:  # damage in a number or a text can leave a message well-formed
            outcomes[False] += 1

    check()
    assert 0 < outcomes[False] < outcomes.total() * 5 / 6


def test_frames_of_a_message_that_is_refused_already_are_not_looked_at() -> None:
    incoming = f.LongMessage([b""] * 5, 8 * MAX_PAYLOAD)
    for _ in range(1000):
        incoming.take(object())  # which has no bytes to look at
    with pytest.raises(ProtocolError, match="1005"):
        incoming.decode()


@pytest.mark.parametrize("shape", [(1,) * 65, (1 << 62,) * 3, (-(1 << 60), 2)])
def test_a_shape_that_no_tensor_has_is_refused_before_its_size_is_computed(shape: tuple[int, ...]) -> None:
    register = m.Register("t", (("k", shape, "float32", 0, False),), False)
    with pytest.raises(ProtocolError):
        f.decode_frames(f.encode_frames(m.Request(1, 2, 3, register)))
