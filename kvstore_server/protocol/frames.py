"""Messages as bytes: a packed header frame, a body frame, and for data one raw payload frame.

    header       magic "KV", protocol version, kind, session, request number, run id     (32 bytes, little-endian)
    body         control kinds: one msgpack list (`control`); data kinds as below, numbers of 64 bits in all of them

    contribute   numbers of pushes and commits, rescale, timeout, hold; the matrix of pushes; that of commits
                 | msgpack [form, hyper-parameters, absent keys] | the payloads
    resolve      table, round, flags, coefficient, limit of each element
    held         table, round, is finite; then (slice, partial norm) of each slice
    weights      the matrix of parts | the payloads
    done         the matrix of rounds
    state        msgpack [table, slice, summary, size] | the bytes in pieces

Everything is checked before it is used: a message that does not fit raises ProtocolError, never anything else.
Nothing here opens a socket.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from kvstore_server.errors import ProtocolError, VersionMismatchError
from kvstore_server.protocol import messages as m
from kvstore_server.protocol.buffers import MAX_FRAME, MAX_PAYLOAD, Frame, buffer_of, join_payloads
from kvstore_server.protocol.control import decode_control, encode_control, pack_control, unpack_control
from kvstore_server.version import PROTOCOL_VERSION

_MAGIC = b"KV"
_HEADER = struct.Struct("<2sBB4xQQQ")
_MOST_FRAMES = 4
"""Of any message but a State, whose bytes come in pieces of MAX_PAYLOAD."""
_CONTRIBUTE = struct.Struct("<qqddd")
_RESOLVE = struct.Struct("<qqqdd")
_SKIPS, _CLIPS = 1, 2
"""Bits of a resolve's flags."""
_HELD = struct.Struct("<qqq")
_PARTIAL = np.dtype([("slice", "<i8"), ("value", "<f8")])
_ALL_FLAGS = m.WANTS_WEIGHTS | m.VETOES | m.ASSIGNS | m.HAS_JOINED | m.WANTS_DELTA


def encode_request(request: m.Request) -> list[Frame]:
    """Return the frames of a request; a payload that stands alone is passed through, not copied.

    Raises:
        ProtocolError: one of the frames would be too large.
    """
    return _encode(request.body, request.session, request.number, request.run)


def encode_reply(reply: m.Reply) -> list[Frame]:
    """Return the frames of a reply. Raises as `encode_request`."""
    return _encode(reply.body, 0, reply.number, 0)


def decode_request(frames: Sequence[Frame]) -> m.Request:
    """Rebuild a request from its frames.

    Raises:
        VersionMismatchError: the peer speaks another protocol version.
        ProtocolError: anything else about the bytes is wrong.
    """
    session, number, run, body = _decode(frames)
    return m.Request(run, session, number, body)


def decode_reply(frames: Sequence[Frame]) -> m.Reply:
    """Rebuild a reply from its frames; raises as `decode_request`."""
    _, number, _, body = _decode(frames)
    return m.Reply(number, body)


class Incoming:
    """A request of which one frame comes after the other; more than it may have is counted, and not kept.

    Args:
        peer: Who sends it.
        max_bytes: Of all frames together.
    """

    def __init__(self, peer: bytes, max_bytes: int) -> None:
        self.peer = peer
        self._max_bytes = max_bytes
        self._frames: list[Frame] = []
        self._count = self._nbytes = 0
        self._is_refused = False

    def take(self, frame: Frame) -> None:
        """Add a frame; of a message that is refused already it is not even looked at."""
        self._count += 1
        if self._is_refused:
            return
        self._nbytes += len(buffer_of(frame))
        if self._count > _MOST_FRAMES:
            head = buffer_of(self._frames[0])
            is_state = len(head) == _HEADER.size and head[3] == _KINDS[m.State].code
            needed = 2 + -(-self._nbytes // MAX_PAYLOAD)
            if not is_state or self._nbytes > self._max_bytes or self._count > needed:
                self._is_refused = True
                self._frames.clear()
                return
        self._frames.append(frame)

    def request(self) -> m.Request:
        """Decode all frames together. Raises as `decode_request`, and ProtocolError where there were too many."""
        if not self._is_refused:
            return decode_request(self._frames)
        raise ProtocolError(
            f"a message of {self._count} frames is refused: one may have {_MOST_FRAMES} frames, or be optimizer state "
            f"of up to {self._max_bytes} bytes (--max-message-bytes)"
        )


# ---------------------------------------------------------------- data messages


def _encode_contribute(body: m.Contribute) -> list[Frame]:
    rescale = math.nan if body.rescale is None else body.rescale
    head = _CONTRIBUTE.pack(len(body.pushes), len(body.commits), rescale, body.timeout, body.hold)
    extra = pack_control([body.form, body.hyper, body.absent])
    return [
        b"".join((head, body.pushes.tobytes(), body.commits.tobytes())),
        extra,
        join_payloads(body.payloads),
    ]


def _decode_contribute(frames: Sequence[Frame]) -> m.Contribute:
    body = buffer_of(frames[0])
    if len(body) < _CONTRIBUTE.size:
        raise ProtocolError(f"a contribution cannot have a body of {len(body)} bytes")
    num_pushes, num_commits, rescale, timeout, hold = _CONTRIBUTE.unpack_from(body)
    words = np.frombuffer(body[_CONTRIBUTE.size : len(body) & ~7], "<i8")
    split = m.PUSH_WORDS * num_pushes
    size = split + m.COMMIT_WORDS * num_commits
    if min(num_pushes, num_commits) < 0 or _CONTRIBUTE.size + 8 * size != len(body):
        raise ProtocolError(
            f"a contribution of {len(body)} bytes cannot hold {num_pushes} slices and {num_commits} commits"
        )
    if not 0 <= timeout < math.inf or math.isinf(rescale):
        raise ProtocolError(f"a commit has timeout {timeout} and rescale {rescale}; both must be finite")
    if not hold >= 0:
        raise ProtocolError(f"a commit wants a norm of type {hold}, which there is not")
    pushes, commits = words[:split].reshape(-1, m.PUSH_WORDS), words[split:].reshape(-1, m.COMMIT_WORDS)
    if (commits[:, 5] & ~_ALL_FLAGS).any():
        raise ProtocolError("a commit has unknown flags")
    extra = unpack_control(buffer_of(frames[1]))
    if not (isinstance(extra, list) and list(map(type, extra)) == [bytes, bytes, list]):
        raise ProtocolError("a contribution must name [form, hyper-parameters, absent keys]")
    form, hyper, absent = extra
    if not all(isinstance(pair, list) and list(map(type, pair)) == [int, int] for pair in absent):
        raise ProtocolError("the absent keys of a commit must be a list of (table, key)")
    payload = _payload(frames[2], pushes[:, 3])
    factor = None if math.isnan(rescale) else rescale
    left_out = tuple(map(tuple, absent))
    return m.Contribute(pushes, (payload,), commits, form, hyper, left_out, factor, timeout, hold)


def _encode_resolve(resolve: m.Resolve) -> list[Frame]:
    flags = _SKIPS * resolve.skip | _CLIPS * (resolve.clip_value is not None)
    clip = resolve.clip_value if resolve.clip_value is not None else 0.0
    return [_RESOLVE.pack(resolve.table, resolve.round, flags, resolve.coef, clip)]


def _decode_resolve(frames: Sequence[Frame]) -> m.Resolve:
    body = buffer_of(frames[0])
    if len(body) != _RESOLVE.size:
        raise ProtocolError(f"a resolve message has {len(body)} bytes, expected {_RESOLVE.size}")
    table, number, flags, coef, clip = _RESOLVE.unpack(body)
    if flags & ~(_SKIPS | _CLIPS) or not clip >= 0:
        raise ProtocolError(f"a resolve message has flags {flags:#x} and a limit of {clip}")
    return m.Resolve(table, number, coef, clip if flags & _CLIPS else None, bool(flags & _SKIPS))


def _encode_held(held: m.Held) -> list[Frame]:
    partials = np.array(list(held.partials), dtype=_PARTIAL)
    return [_HELD.pack(held.table, held.round, held.is_finite) + partials.tobytes()]


def _decode_held(frames: Sequence[Frame]) -> m.Held:
    body = buffer_of(frames[0])
    if len(body) < _HELD.size or (len(body) - _HELD.size) % _PARTIAL.itemsize:
        raise ProtocolError(f"a held message of {len(body)} bytes holds no whole number of partial norms")
    table, number, is_finite = _HELD.unpack_from(body)
    partials = np.frombuffer(body, _PARTIAL, offset=_HELD.size).tolist()
    return m.Held(table, number, tuple(partials), bool(is_finite))


def _encode_weights(weights: m.Weights) -> list[Frame]:
    return [weights.parts.tobytes(), join_payloads(weights.payloads)]


def _decode_weights(frames: Sequence[Frame]) -> m.Weights:
    parts = _matrix(frames[0], 4)
    return m.Weights(parts, (_payload(frames[1], parts[:, 3]),))


def _encode_done(done: m.Done) -> list[Frame]:
    return [done.rounds.tobytes()]


def _decode_done(frames: Sequence[Frame]) -> m.Done:
    return m.Done(_matrix(frames[0], 3))


def _encode_state(state: m.State) -> list[Frame]:
    data = memoryview(state.data)
    chunks = [data[at : at + MAX_PAYLOAD] for at in range(0, len(data), MAX_PAYLOAD)]
    return [pack_control([state.table, state.index, dict(state.summary), len(data)]), *chunks]


def _decode_state(frames: Sequence[Frame]) -> m.State:
    head = unpack_control(buffer_of(frames[0]))
    kinds = (int, int, dict, int)
    if not (isinstance(head, list) and len(head) == len(kinds) and all(map(isinstance, head, kinds))):
        raise ProtocolError("a state message must begin with [table, index, summary, size]")
    data = b"".join(buffer_of(frame) for frame in frames[1:])
    if len(data) != head[3]:
        raise ProtocolError(f"a state message names {head[3]} bytes and brings {len(data)}")
    return m.State(head[0], head[1], head[2], data)


class _Kind(NamedTuple):
    """How messages of one kind look as bytes."""

    code: int
    num_frames: int
    """After the header; 0: one or more."""
    encode: Callable[[Any], list[Frame]]
    decode: Callable[[Sequence[Frame]], Any]


_KINDS: dict[type[Any], _Kind] = {
    m.Contribute: _Kind(0x80, 3, _encode_contribute, _decode_contribute),
    m.Weights: _Kind(0x82, 2, _encode_weights, _decode_weights),
    m.Done: _Kind(0x83, 1, _encode_done, _decode_done),
    m.State: _Kind(0x84, 0, _encode_state, _decode_state),
    m.Resolve: _Kind(0x85, 1, _encode_resolve, _decode_resolve),
    m.Held: _Kind(0x86, 1, _encode_held, _decode_held),
}
_BY_CODE = {kind.code: kind for kind in _KINDS.values()}


# ---------------------------------------------------------------- what they share


def _encode(body: Any, session: int, number: int, run: int) -> list[Frame]:
    kind = _KINDS.get(type(body))
    code, frames = encode_control(body) if kind is None else (kind.code, kind.encode(body))
    for frame in frames:
        if len(frame) > MAX_FRAME:
            raise ProtocolError(
                f"a {type(body).__name__} message would have a frame of {len(frame)} bytes, more than the {MAX_FRAME} "
                "that one may have; use fewer keys, or shorter names, in one namespace"
            )
    return [_HEADER.pack(_MAGIC, PROTOCOL_VERSION, code, session, number, run), *frames]


def _decode(frames: Sequence[Frame]) -> tuple[int, int, int, Any]:
    """Read (session, request number, run id, body)."""
    head = buffer_of(frames[0]) if frames else memoryview(b"")
    if len(head) != _HEADER.size or head[:2] != _MAGIC:
        raise ProtocolError(
            "the message has no header of this protocol; is the peer a kvtrainer worker or server?"
        )
    _, version, code, session, number, run = _HEADER.unpack(head)
    if version != PROTOCOL_VERSION:
        raise VersionMismatchError(
            f"the peer speaks protocol version {version}, this side speaks {PROTOCOL_VERSION}; "
            "install the same release of kvtrainer on workers and servers"
        )
    kind, count = _BY_CODE.get(code), len(frames) - 1
    expected = 1 if kind is None else kind.num_frames or max(count, 1)
    if count != expected:
        raise ProtocolError(f"the message has {count} frames after its header, expected {expected}")
    body = decode_control(code, buffer_of(frames[1])) if kind is None else kind.decode(frames[1:])
    return session, number, run, body


def _matrix(frame: Frame, words: int) -> m.Matrix:
    body = buffer_of(frame)
    if len(body) % (words * 8):
        raise ProtocolError(f"a body of {len(body)} bytes is no whole number of {words * 8}-byte records")
    return np.frombuffer(body, "<i8").reshape(-1, words)


def _payload(frame: Frame, sizes: m.Matrix) -> memoryview:
    """The bytes of a payload frame. Raises ProtocolError where the sizes of its pieces do not add up to it."""
    data = buffer_of(frame)
    # Each alone as well: the sum of hostile sizes can wrap around to the right one.
    if ((sizes < 0) | (sizes > len(data))).any() or int(sizes.sum()) != len(data):
        raise ProtocolError(f"the payload has {len(data)} bytes, the body names {int(sizes.sum())}")
    return data
