"""Messages as bytes: a packed header frame, a body frame, and for data one raw payload frame.

    header   magic "KV", protocol version, kind, session, request number, run id     (32 bytes, little-endian)
    body     control kinds: one msgpack list (`control`); data kinds: an array of fixed 64-bit records (`data`)
    payload  push and weights only: the slices named in the body, one after the other

Everything is checked before it is used: a message that does not fit raises ProtocolError, never anything else.
Nothing here opens a socket.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

from kvstore_server.errors import ProtocolError, VersionMismatchError
from kvstore_server.protocol import data
from kvstore_server.protocol import messages as m
from kvstore_server.protocol.buffers import MAX_FRAME, MAX_PAYLOAD, Frame, buffer_of
from kvstore_server.protocol.control import decode_control, encode_control
from kvstore_server.version import PROTOCOL_VERSION

_MAGIC = b"KV"
_HEADER = struct.Struct("<2sBB4xQQQ")
_PUSH = 0x80
_COMMIT = 0x81
_WEIGHTS = 0x82
_DONE = 0x83
_STATE = 0x84
_RESOLVE = 0x85
_HELD = 0x86
_MOST_FRAMES = 4
"""Of any message but a State, whose bytes come in pieces of MAX_PAYLOAD."""


def encode_request(request: m.Request) -> list[Frame]:
    """Return the frames of a request; payload buffers are passed through, not copied.

    Raises:
        ProtocolError: one of the frames would be too large.
    """
    body = request.body
    if isinstance(body, m.PushBatch):
        kind, frames = _PUSH, data.encode_pushes(body)
    elif isinstance(body, m.CommitBatch):
        kind, frames = _COMMIT, data.encode_commits(body)
    elif isinstance(body, m.Resolve):
        kind, frames = _RESOLVE, data.encode_resolve(body)
    elif isinstance(body, m.State):
        kind, frames = _STATE, data.encode_state(body)
    else:
        kind, frame = encode_control(body)
        frames = [frame]
    return _checked(body, [_header(kind, request.session, request.number, request.run), *frames])


def decode_request(frames: Sequence[Frame]) -> m.Request:
    """Rebuild a request from its frames.

    Raises:
        VersionMismatchError: the peer speaks another protocol version.
        ProtocolError: anything else about the bytes is wrong.
    """
    kind, session, number, run = _decode_header(frames)
    rest = frames[1:]
    body: Any
    if kind == _PUSH:
        body = data.decode_pushes(rest)
    elif kind == _COMMIT:
        body = data.decode_commits(rest)
    elif kind == _RESOLVE:
        body = data.decode_resolve(rest)
    elif kind == _STATE:
        body = data.decode_state(rest)
    else:
        body = decode_control(kind, _only(rest))
    return m.Request(run, session, number, body)


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
        if self._is_fine():
            self._frames.append(frame)
        else:
            self._is_refused = True
            self._frames.clear()

    def request(self) -> m.Request:
        """What all frames together say. Raises as `decode_request`, and ProtocolError where there were too many."""
        if not self._is_refused:
            return decode_request(self._frames)
        raise ProtocolError(
            f"a message of {self._count} frames is refused: one may have {_MOST_FRAMES} frames, or be optimizer state "
            f"of up to {self._max_bytes} bytes (--max-message-bytes)"
        )

    def _is_fine(self) -> bool:
        if self._count <= _MOST_FRAMES:
            return True
        head = buffer_of(self._frames[0])
        is_state = len(head) == _HEADER.size and head[3] == _STATE
        needed = 2 + -(-self._nbytes // MAX_PAYLOAD)
        return is_state and self._nbytes <= self._max_bytes and self._count <= needed


def encode_reply(reply: m.Reply) -> list[Frame]:
    """Return the frames of a reply; payload buffers are passed through, not copied. Raises as `encode_request`."""
    body = reply.body
    if isinstance(body, m.Weights):
        kind, frames = _WEIGHTS, data.encode_weights(body)
    elif isinstance(body, m.Done):
        kind, frames = _DONE, data.encode_done(body)
    elif isinstance(body, m.Held):
        kind, frames = _HELD, data.encode_held(body)
    elif isinstance(body, m.State):
        kind, frames = _STATE, data.encode_state(body)
    else:
        kind, frame = encode_control(body)
        frames = [frame]
    return _checked(body, [_header(kind, 0, reply.number, 0), *frames])


def decode_reply(frames: Sequence[Frame]) -> m.Reply:
    """Rebuild a reply from its frames; raises as `decode_request`."""
    kind, _, number, _ = _decode_header(frames)
    rest = frames[1:]
    body: Any
    if kind == _WEIGHTS:
        body = data.decode_weights(rest)
    elif kind == _DONE:
        body = data.decode_done(rest)
    elif kind == _HELD:
        body = data.decode_held(rest)
    elif kind == _STATE:
        body = data.decode_state(rest)
    else:
        body = decode_control(kind, _only(rest))
    return m.Reply(number, body)


def _checked(body: Any, frames: list[Frame]) -> list[Frame]:
    """The frames; raises ProtocolError where one is larger than what the other side takes."""
    for frame in frames:
        if len(frame) > MAX_FRAME:
            raise ProtocolError(
                f"a {type(body).__name__} message would have a frame of {len(frame)} bytes, more than the {MAX_FRAME} "
                "that one may have; use fewer keys, or shorter names, in one namespace"
            )
    return frames


def _header(kind: int, session: int, number: int, run: int) -> bytes:
    return _HEADER.pack(_MAGIC, PROTOCOL_VERSION, kind, session, number, run)


def _decode_header(frames: Sequence[Frame]) -> tuple[int, int, int, int]:
    if not frames or len(frames[0]) != _HEADER.size:
        raise ProtocolError(
            "the message has no header of this protocol; is the peer a kvtrainer worker or server?"
        )
    magic, version, kind, session, number, run = _HEADER.unpack(buffer_of(frames[0]))
    if magic != _MAGIC:
        raise ProtocolError(
            "the message has no header of this protocol; is the peer a kvtrainer worker or server?"
        )
    if version != PROTOCOL_VERSION:
        raise VersionMismatchError(
            f"the peer speaks protocol version {version}, this side speaks {PROTOCOL_VERSION}; "
            "install the same release of kvtrainer on workers and servers"
        )
    return kind, session, number, run


def _only(frames: Sequence[Frame]) -> memoryview:
    if len(frames) != 1:
        raise ProtocolError(f"a control message has {len(frames)} frames after its header, expected 1")
    return buffer_of(frames[0])
