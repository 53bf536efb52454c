"""Messages as bytes: a packed header frame, a body frame, and for data one raw payload frame.

    header   magic "KV", protocol version, kind, session, request number, run id     (32 bytes, little-endian)
    body     control kinds: one msgpack list; data kinds: an array of fixed 64-bit records
    payload  push and weights only: the slices named in the body, one after the other

Everything is checked before it is used: a message that does not fit raises ProtocolError, never anything else.
Nothing here opens a socket.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import msgpack
import numpy as np
import torch

from kvstore_server.errors import ProtocolError, VersionMismatchError
from kvstore_server.protocol import messages as m
from kvstore_server.version import PROTOCOL_VERSION

MAX_FRAME = 1024 * 1024 + 64 * 1024
"""No frame is larger; servers set it as ZMQ_MAXMSGSIZE."""
MAX_PAYLOAD = 1024 * 1024
SENT_ALONE = 64 * 1024
"""A slice of at least this many bytes has a message of its own, so that it can be sent without being copied."""
_MAGIC = b"KV"
_HEADER = struct.Struct("<2sBB4xQQQ")
_PUSH = 0x80
_COMMIT = 0x81
_WEIGHTS = 0x82
_DONE = 0x83
_STATE = 0x84
_RECORD = {_PUSH: 5, _WEIGHTS: 4, _DONE: 2}
"""64-bit words in one record of the body."""
_COMMIT_WORDS = 6

_CONTROL: tuple[type[Any], ...] = (
    m.Hello,
    m.Register,
    m.Abort,
    m.Pull,
    m.SetOptimizer,
    m.Barrier,
    m.GetState,
    m.Heartbeat,
    m.Leave,
    m.Stats,
    m.Welcome,
    m.Registered,
    m.Absent,
    m.Missing,
    m.Pending,
    m.Failed,
    m.Info,
)
_KIND_OF = {cls: kind for kind, cls in enumerate(_CONTROL)}
_FIELDS = {cls: tuple(f.name for f in fields(cls)) for cls in _CONTROL}

Frame = bytes | bytearray | memoryview | Any


def encode_request(request: m.Request) -> list[Frame]:
    """Return the frames of a request; payload buffers are passed through, not copied.

    Raises:
        ProtocolError: a control message is too large for one frame.
    """
    body = request.body
    if isinstance(body, m.PushBatch):
        kind, frames = _PUSH, _encode_pushes(body.pushes)
    elif isinstance(body, m.CommitBatch):
        kind, frames = _COMMIT, _encode_commits(body)
    elif isinstance(body, m.State):
        kind, frames = _STATE, _encode_state(body)
    else:
        kind, frames = _encode_control(body)
    return [
        _HEADER.pack(_MAGIC, PROTOCOL_VERSION, kind, request.session, request.number, request.run),
        *frames,
    ]


def decode_request(frames: Sequence[Frame]) -> m.Request:
    """Rebuild a request from its frames.

    Raises:
        VersionMismatchError: the peer speaks another protocol version.
        ProtocolError: anything else about the bytes is wrong.
    """
    kind, session, number, run = _decode_header(frames)
    body: Any
    if kind == _PUSH:
        body = _decode_pushes(frames)
    elif kind == _COMMIT:
        body = _decode_commits(frames)
    elif kind == _STATE:
        body = _decode_state(frames)
    else:
        body = _decode_control(kind, frames)
    return m.Request(run, session, number, body)


def encode_reply(reply: m.Reply) -> list[Frame]:
    """Return the frames of a reply; payload buffers are passed through, not copied. Raises as `encode_request`."""
    body = reply.body
    if isinstance(body, m.Weights):
        records = [(p.table, p.slice, p.round, _nbytes(p.payload)) for p in body.parts]
        kind, frames = _WEIGHTS, [_pack(records), _join([p.payload for p in body.parts])]
    elif isinstance(body, m.Done):
        kind, frames = _DONE, [_pack(body.rounds)]
    elif isinstance(body, m.State):
        kind, frames = _STATE, _encode_state(body)
    else:
        kind, frames = _encode_control(body)
    return [_HEADER.pack(_MAGIC, PROTOCOL_VERSION, kind, 0, reply.number, 0), *frames]


def decode_reply(frames: Sequence[Frame]) -> m.Reply:
    """Rebuild a reply from its frames; raises as `decode_request`."""
    kind, _, number, _ = _decode_header(frames)
    body: Any
    if kind == _WEIGHTS:
        records = _records(frames, kind, 3)
        parts = _split(frames[2], records[:, 3])
        body = m.Weights(
            tuple(
                m.WeightsPart(t, s, r, part)
                for (t, s, r, _), part in zip(records.tolist(), parts, strict=True)
            )
        )
    elif kind == _DONE:
        body = m.Done(tuple((t, r) for t, r in _records(frames, kind, 2).tolist()))
    elif kind == _STATE:
        body = _decode_state(frames)
    else:
        body = _decode_control(kind, frames)
    return m.Reply(number, body)


def pack_control(value: Any) -> bytes:
    """msgpack with this protocol's settings: lists, maps with string keys, numbers, strings, bytes."""
    return bytes(msgpack.packb(value, use_bin_type=True))


def unpack_control(data: bytes | memoryview) -> Any:
    """Inverse of `pack_control` with every size bounded by the frame itself.

    Raises:
        ProtocolError: the bytes are not msgpack, nest too deep or hold anything but plain values.
    """
    try:
        return msgpack.unpackb(
            data,
            raw=False,
            strict_map_key=False,
            max_array_len=1 << 17,
            max_map_len=1 << 16,
            max_ext_len=0,
            max_str_len=1 << 16,
            max_bin_len=MAX_FRAME,
        )
    except Exception as error:  # msgpack raises a family of unrelated classes on hostile input
        raise ProtocolError(f"a control message of {len(data)} bytes cannot be decoded: {error}") from None


def payload_bytes(payload: m.Payload) -> memoryview:
    """The raw bytes of a payload, without a copy."""
    if isinstance(payload, memoryview):
        return payload.cast("B") if payload.format != "B" else payload
    if isinstance(payload, bytes | bytearray):
        return memoryview(payload)
    return memoryview(payload.view(torch.uint8).numpy())


def _nbytes(payload: m.Payload) -> int:
    if isinstance(payload, memoryview):
        return payload.nbytes
    return len(payload) if isinstance(payload, bytes | bytearray) else int(payload.nbytes)


def _encode_pushes(pushes: Sequence[m.Push]) -> list[Frame]:
    records = [(p.table, p.slice, p.round, p.generation, _nbytes(p.payload)) for p in pushes]
    return [_pack(records), _join([p.payload for p in pushes])]


def _decode_pushes(frames: Sequence[Frame]) -> m.PushBatch:
    records = _records(frames, _PUSH, 3)
    parts = _split(frames[2], records[:, 4])
    rows = zip(records.tolist(), parts, strict=True)
    return m.PushBatch(tuple(m.Push(t, s, r, g, part) for (t, s, r, g, _), part in rows))


def _encode_commits(batch: m.CommitBatch) -> list[Frame]:
    head = np.empty((len(batch.commits), _COMMIT_WORDS), dtype="<i8")
    floats = head.view("<f8")
    manifests: list[tuple[int, int]] = []
    for row, commit in enumerate(batch.commits):
        head[row, 0] = commit.table
        head[row, 1] = commit.round
        head[row, 2] = commit.want_weights
        head[row, 3] = len(commit.manifest)
        floats[row, 4] = np.nan if commit.rescale is None else commit.rescale
        floats[row, 5] = commit.timeout
        manifests.extend(commit.manifest)
    extra = pack_control([batch.hyper, list(batch.absent)])
    return [
        struct.pack("<q", len(batch.commits)) + head.tobytes() + np.array(manifests, dtype="<i8").tobytes(),
        extra,
    ]


def _decode_commits(frames: Sequence[Frame]) -> m.CommitBatch:
    body = _body(frames, 3)
    count = struct.unpack_from("<q", body)[0] if len(body) >= 8 else -1
    end = 8 + count * _COMMIT_WORDS * 8
    if count < 0 or end > len(body) or (len(body) - end) % 16:
        raise ProtocolError(f"a commit message of {len(body)} bytes cannot hold {count} commits")
    head = np.frombuffer(body, "<i8", count * _COMMIT_WORDS, 8).reshape(count, _COMMIT_WORDS)
    floats = head.view("<f8")
    manifest = np.frombuffer(body, "<i8", offset=end).reshape(-1, 2).tolist()
    extra = unpack_control(_buffer(frames[2]))
    if not (isinstance(extra, list) and len(extra) == 2 and isinstance(extra[0], bytes)):
        raise ProtocolError("a commit message must end with [hyper-parameters, absent keys]")
    if not (isinstance(extra[1], list) and all(isinstance(key, int) for key in extra[1])):
        raise ProtocolError("the absent keys of a commit must be a list of integers")
    commits = []
    at = 0
    for row, (table, number, want, entries, _, _) in enumerate(head.tolist()):
        if entries < 0 or at + entries > len(manifest):
            raise ProtocolError(f"a commit names {entries} slices but the message holds {len(manifest) - at}")
        rescale, timeout = float(floats[row, 4]), float(floats[row, 5])
        if not 0 <= timeout < math.inf or math.isinf(rescale):
            raise ProtocolError(f"a commit has timeout {timeout} and rescale {rescale}; both must be finite")
        named = tuple((s, g) for s, g in manifest[at : at + entries])
        at += entries
        commits.append(
            m.Commit(
                table,
                number,
                named,
                None if math.isnan(rescale) else rescale,
                bool(want),
                timeout,
            )
        )
    return m.CommitBatch(tuple(commits), extra[0], tuple(extra[1]))


def _encode_state(state: m.State) -> list[Frame]:
    data = memoryview(state.data)
    chunks = [data[at : at + MAX_PAYLOAD] for at in range(0, len(data), MAX_PAYLOAD)]
    return [pack_control([state.table, state.slice, dict(state.summary), len(data)]), *chunks]


def _decode_state(frames: Sequence[Frame]) -> m.State:
    head = unpack_control(_buffer(frames[1])) if len(frames) > 1 else None
    kinds = (int, int, dict, int)
    if not (isinstance(head, list) and len(head) == 4 and all(map(isinstance, head, kinds))):
        raise ProtocolError("a state message must begin with [table, slice, summary, size]")
    data = b"".join(_buffer(frame) for frame in frames[2:])
    if len(data) != head[3]:
        raise ProtocolError(f"a state message names {head[3]} bytes and brings {len(data)}")
    return m.State(head[0], head[1], head[2], data)


def _encode_control(body: Any) -> tuple[int, list[Frame]]:
    frame = pack_control([getattr(body, name) for name in _FIELDS[type(body)]])
    if len(frame) > MAX_FRAME:
        raise ProtocolError(
            f"a {type(body).__name__} message would have {len(frame)} bytes, more than the {MAX_FRAME} that one may "
            "have; use fewer keys in one namespace"
        )
    return _KIND_OF[type(body)], [frame]


def _decode_control(kind: int, frames: Sequence[Frame]) -> Any:
    if kind >= len(_CONTROL):
        raise ProtocolError(f"unknown kind of message: {kind}")
    cls = _CONTROL[kind]
    values = unpack_control(_body(frames, 2))
    if not isinstance(values, list) or len(values) != len(_FIELDS[cls]):
        raise ProtocolError(
            f"a {cls.__name__} message must hold {len(_FIELDS[cls])} values, got {values!r:.80}"
        )
    message = cls(*(_freeze(value) for value in values))
    _check_types(message)
    return message


_SCALARS: dict[str, Any] = {"int": int, "str": str, "float": (float, int), "bytes": bytes, "bool": bool}


def _check_types(message: Any) -> None:
    for f in fields(message):
        value: Any = getattr(message, f.name)
        declared = str(f.type)
        expected = _SCALARS.get(declared) or (tuple if declared.startswith("tuple") else dict)
        if not isinstance(value, expected) or (isinstance(value, bool) and declared != "bool"):
            raise ProtocolError(f"{type(message).__name__}.{f.name} must be {declared}, got {value!r:.80}")
        if isinstance(value, float) and not math.isfinite(value):
            raise ProtocolError(f"{type(message).__name__}.{f.name} must be finite, got {value}")
        if declared == "tuple[int, ...]" and not all(type(item) is int for item in value):
            raise ProtocolError(f"{type(message).__name__}.{f.name} must be {declared}, got {value!r:.80}")
    if isinstance(message, m.Register) and not all(_is_spec(spec) for spec in message.specs):
        raise ProtocolError("Register.specs must be (key, shape, dtype, group) each")


def _is_spec(spec: Any) -> bool:
    if not isinstance(spec, tuple) or len(spec) != 4:
        return False
    key, shape, dtype, group = spec
    return (
        isinstance(key, str)
        and isinstance(shape, tuple)
        and all(type(size) is int for size in shape)
        and isinstance(dtype, str)
        and type(group) is int
    )


def _freeze(value: Any) -> Any:
    return tuple(_freeze(item) for item in value) if isinstance(value, list) else value


def _decode_header(frames: Sequence[Frame]) -> tuple[int, int, int, int]:
    if not frames or len(frames[0]) != _HEADER.size:
        raise ProtocolError(
            "the message has no header of this protocol; is the peer a kvtrainer worker or server?"
        )
    magic, version, kind, session, number, run = _HEADER.unpack(_buffer(frames[0]))
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


def _body(frames: Sequence[Frame], count: int) -> memoryview:
    if len(frames) != count:
        raise ProtocolError(f"the message has {len(frames)} frames, expected {count}")
    return _buffer(frames[1])


def _buffer(frame: Frame) -> memoryview:
    return (
        memoryview(frame) if isinstance(frame, bytes | bytearray | memoryview) else memoryview(frame.buffer)
    )


def _pack(records: Sequence[tuple[int, ...]]) -> bytes:
    return np.array(records, dtype="<i8").tobytes()


def _records(frames: Sequence[Frame], kind: int, count: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    body = _body(frames, count)
    words = _RECORD[kind]
    if len(body) % (words * 8):
        raise ProtocolError(f"a body of {len(body)} bytes is no whole number of {words * 8}-byte records")
    return np.frombuffer(body, "<i8").reshape(-1, words)


def _join(payloads: Sequence[m.Payload]) -> Frame:
    if len(payloads) == 1:
        return payload_bytes(payloads[0])
    kinds = {payload.dtype if isinstance(payload, torch.Tensor) else None for payload in payloads}
    if len(kinds) == 1 and None not in kinds:
        # One call for many small tensors; asking each for its bytes would cost more than all the rest.
        return payload_bytes(torch.cat(list(payloads)))
    return b"".join(payload_bytes(payload) for payload in payloads)


def _split(frame: Frame, sizes: np.ndarray[Any, np.dtype[np.int64]]) -> list[memoryview]:
    data = _buffer(frame)
    # Each alone as well: the sum of hostile sizes can wrap around to the right one.
    if ((sizes < 0) | (sizes > len(data))).any() or int(sizes.sum()) != len(data):
        raise ProtocolError(f"the payload has {len(data)} bytes, the body names {int(sizes.sum())}")
    ends = np.cumsum(sizes).tolist()
    return [data[end - size : end] for size, end in zip(sizes.tolist(), ends, strict=True)]
