"""The wire format: messages as frames, one with header and body, and for data one with the raw payloads.

    header       magic "KV", protocol version, kind, session, request number, run id     (32 bytes, little-endian)
    body         control kinds: one msgpack list (`pack_control`); data kinds as below, in 64-bit numbers

    contribute   numbers of pushes and commits, rescale, timeout, hold; the matrix of pushes; that of commits
                 then, unless all are empty, msgpack [encoding, hyper-parameters, absent keys, client state, view,
                 members, num_backup, closes] | the payloads
    pull         timeout, round; the numbers of the tables
    resolve      table, round, flags, coefficient, limit of each element
    held         table, round, is finite; then (slice, partial norm) of each slice
    weights      number of locations; the matrix of locations; that of parts | the payloads
    done         number of rounds; the matrix of rounds
    state        msgpack [table, slice, summary, size] | the bytes in chunks

Everything from a peer is checked before use: bytes that do not fit raise ProtocolError, never anything else. Sizes are
bounded by the frame that names them, so no message makes the receiver allocate more than it sent. Payloads are passed
through without a copy where possible. Nothing here opens a socket.
"""

from __future__ import annotations

import math
import struct
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, replace
from typing import Any, NamedTuple

import msgpack
import numpy as np
import torch
from torch import Tensor

from kvstore_server import PROTOCOL_VERSION
from kvstore_server.errors import ProtocolError, VersionMismatchError, to_wire
from kvstore_server.plan import HashTableOptions
from kvstore_server.protocol import messages as m

Frame = bytes | bytearray | memoryview | Any
"""Anything with a buffer of bytes, ZeroMQ frames included."""
MAX_FRAME = 1024 * 1024 + 64 * 1024
"""The largest frame; servers set it as ZMQ_MAXMSGSIZE."""
MAX_PAYLOAD = 1024 * 1024
SENT_ALONE = 64 * 1024
"""A slice of at least this many bytes gets a message of its own, so that it is not copied together with others."""
KEYS_PER_MESSAGE = 4096
"""The most keys, slices or tables in our messages; servers refuse more than --max-message-keys."""
_MAGIC = b"KV"
_HEADER = struct.Struct("<2sBB4xQQQ")
_NUMBER = slice(16, 24)
"""The bytes of a header with the number of the request."""
MAX_FRAMES = 2
"""For all kinds but a State, whose bytes are sent in chunks of MAX_PAYLOAD."""
_WORD = np.dtype("<i8")
_CONTRIBUTE = struct.Struct("<qqddd")
_RESOLVE = struct.Struct("<qqqdd")
_SKIPS, _CLIPS = 1, 2
"""Bits of a resolve's flags."""
_HELD = struct.Struct("<qqq")
_ROWS = struct.Struct("<q")
_PARTIAL = np.dtype([("slice", "<i8"), ("value", "<f8")])
_NO_COMMITS = m.matrix((), m.COMMIT_WORDS)


def encode_frames(message: m.Request | m.Reply) -> list[Frame]:
    """Return the frames of a message; a single payload is passed through, not copied.

    Raises like `encode_frames_and_payloads`.
    """
    frames, payloads = encode_frames_and_payloads(message)
    return frames if payloads is None else [*frames, _join_payload_frame(payloads)]


def encode_frames_and_payloads(message: m.Request | m.Reply) -> tuple[list[Frame], Sequence[Tensor] | None]:
    """Return a message's frames, and separately its payloads.

    A reply that does not fit into a frame is replaced by a failure that says so. Raises ProtocolError if a frame of a
    request would be too large.
    """
    body: Any = message.body
    if isinstance(body, m.Weights) and body.encoded:
        encoded = bytearray(body.encoded)
        encoded[_NUMBER] = message.number.to_bytes(8, "little")
        return [encoded], body.payloads
    kind = _KINDS.get(type(body))
    if kind is None:
        code = _KIND_OF[type(body)]
        frames: Sequence[Frame] = [pack_control([getattr(body, name) for name, _ in _FIELDS[type(body)]])]
    else:
        code, frames = kind.code, kind.encode(body)
    run_id, session = (message.run_id, message.session) if isinstance(message, m.Request) else (0, 0)
    longest = _HEADER.size + len(frames[0])
    if longest > MAX_FRAME:
        error = ProtocolError(
            f"a {type(body).__name__} message would have a frame of {longest} bytes, more than the {MAX_FRAME} that "
            "one may have; use fewer keys, or shorter names, in one namespace"
        )
        if isinstance(message, m.Request):
            raise error
        return encode_frames_and_payloads(m.Reply(message.number, m.Failed(*to_wire(error))))
    head = _HEADER.pack(_MAGIC, PROTOCOL_VERSION, code, session, message.number, run_id)
    if isinstance(body, m.Failed) and body.code == VersionMismatchError.__name__:
        return [head, *frames], None  # up to version 15 the header was a frame of its own
    payloads = body.payloads if isinstance(body, m.Contribute | m.Weights) else None
    return [head + frames[0], *frames[1:]], payloads


def decode_frames(frames: Sequence[Frame]) -> tuple[int, int, int, Any]:
    """Decode frames to run id, session, request number and body. Run id and session of a reply are 0.

    Raises:
        VersionMismatchError: The peer speaks another protocol version.
        ProtocolError: The bytes are wrong in any other way.
    """
    head = memoryview(frames[0]) if frames else memoryview(b"")
    try:
        magic, version, code, session, number, run_id = _HEADER.unpack_from(head)
    except struct.error:
        magic = b""
    if magic != _MAGIC:
        raise ProtocolError(
            "the message has no header of this protocol; is the peer a kvtrainer worker or server?"
        )
    if version != PROTOCOL_VERSION:
        raise VersionMismatchError(
            f"the peer speaks protocol version {version}, this side speaks {PROTOCOL_VERSION}; "
            "install the same release of kvtrainer on workers and servers"
        )
    kind, count, packed = _BY_CODE.get(code), len(frames), head[_HEADER.size :]
    expected = 1 if kind is None else kind.num_frames or count
    if count != expected:
        raise ProtocolError(f"the message has {count} frames, expected {expected}")
    body = decode_control(code, packed) if kind is None else kind.decode([packed, *frames[1:]])
    return run_id, session, number, body


def number_of_message(frame: Frame) -> int:
    """Return the request number in the first frame of a message of ours."""
    return int.from_bytes(memoryview(frame)[_NUMBER], "little")


class LongMessage:
    """A message with more frames than any kind but a State may have. Frames of a refused message are counted, not
    kept.

    Args:
        frames: The frames received so far.
        max_bytes: The limit for all frames together.
    """

    def __init__(self, frames: Sequence[Frame], max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._frames: list[Frame] = []
        self._count = 0
        self.nbytes = 0
        """Bytes of frames kept, at the highest."""
        self._is_refused = (
            len(frames[0]) < _HEADER.size or memoryview(frames[0])[3] != _KINDS[m.SliceState].code
        )
        for frame in frames:
            self.take(frame)

    def take(self, frame: Frame) -> None:
        self._count += 1
        if not self._is_refused:
            self._frames.append(frame)
            self.nbytes += len(frame)
            most = 1 + -(-self.nbytes // MAX_PAYLOAD)
            self._is_refused = self.nbytes > self._max_bytes or self._count > max(most, MAX_FRAMES)
        if self._is_refused:
            self._frames.clear()

    def decode(self) -> tuple[int, int, int, Any]:
        """Decode the complete message, like `decode_frames`. Raises ProtocolError, too, if it was too large."""
        if not self._is_refused:
            return decode_frames(self._frames)
        raise ProtocolError(
            f"a message of {self._count} frames is refused: one may have {MAX_FRAMES} frames, or be optimizer state "
            f"of up to {self._max_bytes} bytes (--max-message-bytes)"
        )


def divided(body: Any, most: int = MAX_PAYLOAD) -> list[Any]:
    """Split slices or new weights into messages of at most `most` bytes; commits are in the last one."""
    if not isinstance(body, m.Contribute | m.Weights):
        return [body]
    # 1. The common case: everything fits into one message.
    sizes = body.parts[:, m.PART_NBYTES] if isinstance(body, m.Weights) else body.pushes[:, m.PUSH_NBYTES]
    if len(sizes) < 2:
        return [body]
    # A large slice gets a message of its own, so that it is not copied together with others.
    alone = SENT_ALONE if most == MAX_PAYLOAD else most
    if len(sizes) <= KEYS_PER_MESSAGE and sizes.sum() <= most and sizes.max() < alone:
        return [body]
    # 2. Group the slices, and cut the payloads accordingly.
    cuts = list(_group_by_size(sizes.tolist(), most, alone))
    payloads: list[Sequence[Tensor]] = [body.payloads[cut] for cut in cuts]
    if len(body.payloads) < len(sizes):
        payloads = list(_split_frame_payloads(body.payloads, [int(sizes[cut].sum()) for cut in cuts]))
    # 3. Build the messages.
    if isinstance(body, m.Weights):
        rows = zip(cuts, payloads, strict=True)
        bodies = [m.Weights(body.parts[cut], tuple(own), body.zero_copy) for cut, own in rows]
        bodies[0].locations = body.locations
        return bodies
    *others, last = [
        m.Contribute(body.pushes[cut], tuple(own), _NO_COMMITS, body.encoding, timeout=body.timeout)
        for cut, own in zip(cuts, payloads, strict=True)
    ]
    return [*others, replace(body, pushes=last.pushes, payloads=last.payloads)]


def _group_by_size(sizes: Sequence[int], most: int, alone: int) -> Iterator[slice]:
    """Group slices of these sizes, in order; slices of at least `alone` bytes get groups of their own."""
    first, nbytes = 0, 0
    for at, size in enumerate(sizes):
        is_full = nbytes + size > most or at - first == KEYS_PER_MESSAGE
        if at > first and (is_full or size >= alone or sizes[at - 1] >= alone):
            yield slice(first, at)
            first, nbytes = at, 0
        nbytes += size
    yield slice(first, len(sizes))


def _split_frame_payloads(payloads: Sequence[Tensor], sizes: Sequence[int]) -> Iterator[list[Tensor]]:
    left = deque(payloads)
    for size in sizes:
        own: list[Tensor] = []
        while size:
            first = left.popleft()
            if first.nbytes > size:
                raw = first.view(torch.uint8)
                first = raw[:size]
                left.appendleft(raw[size:])
            own.append(first)
            size -= first.nbytes
        yield own


# ---------------------------------------------------------------- control messages


_CONTROL: tuple[type[Any], ...] = (
    m.Hello,
    m.Register,
    m.Abort,
    m.SetOptimizer,
    m.Gather,
    m.GetState,
    m.Heartbeat,
    m.Leave,
    m.Stats,
    m.Welcome,
    m.Registered,
    m.Absent,
    m.Vetoed,
    m.Missing,
    m.Pending,
    m.Failed,
    m.Gathered,
    m.Status,
    m.PullRows,
    m.EffectiveOptions,
    m.Command,
    m.Profile,
    m.JoinJob,
    m.Listening,
    m.GetStatus,
    m.MapRows,
    m.Snapshot,
    m.JoinRounds,
    m.LeaveRounds,
    m.Members,
    m.CloseRound,
    m.LeftOut,
    m.Full,
)
_KIND_OF = {cls: kind for kind, cls in enumerate(_CONTROL)}
_FIELDS = {cls: tuple((f.name, str(f.type)) for f in fields(cls)) for cls in _CONTROL}
"""(name, declared type) of each field of a message."""


def pack_control(value: Any) -> bytes:
    """Encode as msgpack with this protocol's settings: lists, maps with string keys, numbers, strings, bytes."""
    return bytes(msgpack.packb(value, use_bin_type=True))


def unpack_control(data: bytes | memoryview) -> Any:
    """Inverse of `pack_control`. Every size is bounded by the frame.

    Raises ProtocolError if the bytes are not msgpack, nest too deeply or contain other than plain values.
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


def decode_control(kind: int, data: memoryview) -> Any:
    """Decode a control message. Raises ProtocolError if the kind is unknown, or the bytes do not fit it."""
    if kind >= len(_CONTROL):
        raise ProtocolError(f"unknown kind of message: {kind}")
    cls = _CONTROL[kind]
    values = unpack_control(data)
    if not isinstance(values, list) or len(values) != len(_FIELDS[cls]):
        raise ProtocolError(
            f"a {cls.__name__} message must hold {len(_FIELDS[cls])} values, got {values!r:.80}"
        )
    values = [_freeze_value(value) for value in values]
    for (name, declared), value in zip(_FIELDS[cls], values, strict=True):
        if not _is_of_type(value, declared):
            raise ProtocolError(f"{cls.__name__}.{name} must be {declared}, got {value!r:.80}")
    message = cls(*values)
    if isinstance(message, m.Register) and not all(_is_spec(spec) for spec in message.specs):
        raise ProtocolError(
            f"Register.specs must be (key, shape of up to {_MAX_DIMS} sizes, dtype, group, is row-sparse), and "
            "options for a hash table, each"
        )
    if isinstance(message, m.Hello) and not _is_identified(message):
        raise ProtocolError(
            f"Hello must hold a nonce and 1 … {m.MAX_SOCKETS} routing ids, of {m.SECRET_BYTES} bytes each"
        )
    return message


_SCALARS: dict[str, Any] = {"int": int, "str": str, "float": (float, int), "bytes": bytes, "bool": bool}


def _is_of_type(value: Any, declared: str) -> bool:
    """Return whether a value has a declared type. Floats must be finite, and ints in tuples fit into 64 bits."""
    expected: Any = _SCALARS.get(declared) or (tuple if declared.startswith("tuple") else dict)
    if not isinstance(value, expected) or (isinstance(value, bool) and declared != "bool"):
        return False
    if declared == "tuple[bytes, ...]":
        return all([type(item) is bytes for item in value])
    if declared == "tuple[int, ...]":
        return all([type(item) is int and item.bit_length() < 64 for item in value])
    return declared != "float" or math.isfinite(value)


def _is_identified(hello: m.Hello) -> bool:
    secrets = (hello.nonce, *hello.sockets)
    return 1 < len(secrets) <= 1 + m.MAX_SOCKETS and all(
        isinstance(secret, bytes) and len(secret) == m.SECRET_BYTES for secret in secrets
    )


_MAX_DIMS, _MAX_SIZE = 64, 1 << 48
"""Limits for shapes, more than any tensor has; without them, multiplying sizes could take minutes."""


def _is_spec(spec: Any) -> bool:
    if not isinstance(spec, tuple) or len(spec) not in (5, 6):
        return False
    key, shape, dtype, group, is_row_sparse, *hash_table = spec
    return (
        isinstance(key, str)
        and isinstance(shape, tuple)
        and len(shape) <= _MAX_DIMS
        and all(type(size) is int and abs(size) < _MAX_SIZE for size in shape)
        and isinstance(dtype, str)
        and type(group) is int
        and isinstance(is_row_sparse, bool)
        and all([one is None or (is_row_sparse and _are_hash_table_options(one)) for one in hash_table])
    )


def _are_hash_table_options(options: Any) -> bool:
    kinds = [type(default) for default in HashTableOptions()]
    return isinstance(options, tuple) and list(map(type, options)) == kinds


def _freeze_value(value: Any) -> Any:
    return tuple(_freeze_value(item) for item in value) if isinstance(value, list) else value


# ---------------------------------------------------------------- data messages


def _encode_contribute(body: m.Contribute) -> list[bytes]:
    rescale = math.nan if body.rescale is None else body.rescale
    head = _CONTRIBUTE.pack(len(body.pushes), len(body.commits), rescale, body.timeout, body.hold)
    return [b"".join((head, body.pushes.tobytes(), body.commits.tobytes(), encode_extra(body)))]


def encode_extra(body: m.Contribute) -> bytes:
    """Encode what goes behind the commits of a contribution, if there is anything."""
    has_extra = body.encoding or body.hyper or body.absent or body.client_state or body.view >= 0
    view = [body.view, body.members, body.num_backup, body.closes]
    fields_ = [body.encoding, body.hyper, body.absent, body.client_state, *view]
    return pack_control(fields_) if has_extra else b""


def _decode_contribute(frames: Sequence[Frame]) -> m.Contribute:
    body = memoryview(frames[0])
    nbytes, begin = len(body), _CONTRIBUTE.size
    if nbytes < begin:
        raise ProtocolError(f"a contribution cannot have a body of {nbytes} bytes")
    # Check the sizes before reading the matrices, which are views of the frame.
    num_pushes, num_commits, rescale, timeout, hold = _CONTRIBUTE.unpack_from(body)
    split = begin + _WORD.itemsize * m.PUSH_WORDS * num_pushes
    size = split + _WORD.itemsize * m.COMMIT_WORDS * num_commits
    if num_pushes < 0 or num_commits < 0 or size > nbytes:
        raise ProtocolError(
            f"a contribution of {nbytes} bytes cannot hold {num_pushes} slices and {num_commits} commits"
        )
    if not 0 <= timeout < math.inf or math.isinf(rescale):
        raise ProtocolError(f"a commit has timeout {timeout} and rescale {rescale}; both must be finite")
    if not hold >= 0:
        raise ProtocolError(f"a commit wants a norm of type {hold}; it must be 0 or more")
    pushes = np.ndarray((num_pushes, m.PUSH_WORDS), _WORD, body, begin)
    commits = np.ndarray((num_commits, m.COMMIT_WORDS), _WORD, body, split)
    if np.bitwise_or.reduce(commits[:, m.COMMIT_FLAGS]) & ~m.ALL_FLAGS:
        raise ProtocolError("a commit has unknown flags")
    payload, factor = (
        _read_payload_frame(frames[1], pushes[:, m.PUSH_NBYTES]),
        None if math.isnan(rescale) else rescale,
    )
    contribution = m.Contribute(pushes, (payload,), commits, rescale=factor, timeout=timeout, hold=hold)
    if nbytes > size:
        decode_extra(body[size:], contribution)
    return contribution


def decode_extra(packed: memoryview, into: m.Contribute) -> None:
    """Inverse of `encode_extra`. Raises ProtocolError."""
    extra = unpack_control(packed)
    kinds = [bytes, bytes, list, bytes, int, list, int, bool]
    if not (isinstance(extra, list) and list(map(type, extra)) == kinds):
        raise ProtocolError(
            "a contribution must name [encoding, hyper-parameters, absent keys, client state, view, members, "
            "num_backup, closes]"
        )
    encoding, hyper, absent, state, view, members, num_backup, closes = extra
    if len(state) > m.MAX_CLIENT_STATE:
        raise ProtocolError(f"a client state has {len(state)} bytes; up to {m.MAX_CLIENT_STATE} are allowed")
    if not all(isinstance(pair, list) and list(map(type, pair)) == [int, int] for pair in absent):
        raise ProtocolError("the absent keys of a commit must be a list of (table, key)")
    if not all(type(rank) is int for rank in members):
        raise ProtocolError("the members of a view must be a list of ranks")
    into.encoding, into.hyper, into.client_state = encoding, hyper, state
    into.absent = tuple([(table, key) for table, key in absent])
    into.view, into.members, into.num_backup, into.closes = view, tuple(members), num_backup, closes


class ContributeTemplate:
    """The first frame of a `Contribute` that comes again and again, and where the numbers are that change.

    These are the number of the request, the factor, the rounds, and the versions that the sender has. There is nothing
    behind the commits.

    Raises ProtocolError if the frame has something else there.
    """

    def __init__(self, frame: Frame) -> None:
        self.frame = bytearray(frame)
        words, begin = np.frombuffer(self.frame, _WORD), (_HEADER.size + _CONTRIBUTE.size) // _WORD.itemsize
        num_pushes, num_commits = words[_HEADER.size // _WORD.itemsize :][:2].tolist()
        split = begin + m.PUSH_WORDS * num_pushes
        self.words, self.number = words, words[2:3]
        self.rescale = words[begin - 3 : begin - 2].view(np.float64)
        self.pushes = words[begin:split].reshape(-1, m.PUSH_WORDS)
        self.commits = words[split:].reshape(-1, m.COMMIT_WORDS)
        versions = np.arange(split + 4, len(words), m.COMMIT_WORDS)
        self.free = np.concatenate(([2, begin - 3], versions))
        """Where in the words the numbers are that the receiver cannot know: the request, the factor, and versions."""
        if len(self.commits) != num_commits:
            raise ProtocolError(
                f"a frame of {len(self.frame)} bytes is not pushes and {num_commits} commits alone"
            )


class WeightsTemplate:
    """The first frame of `Weights` that come again and again; the number of the request and the versions change."""

    def __init__(self, frame: Frame) -> None:
        self.frame = bytearray(frame)
        words, begin = np.frombuffer(self.frame, _WORD), _HEADER.size // _WORD.itemsize
        split = begin + 1 + m.LOCATION_WORDS * int(words[begin])
        self.words, self.number = words, words[2:3]
        self.first_part = split
        """Where in the words those of the parts begin."""
        versions = (
            np.arange(begin + 2, split, m.LOCATION_WORDS),
            np.arange(split + 1, len(words), m.PART_WORDS),
        )
        self.versions_at = np.concatenate(versions)
        """Where in the words versions are: first those of locations, then those of parts."""


def _encode_resolve(resolve: m.Resolve) -> list[bytes]:
    flags = _SKIPS * resolve.skip | _CLIPS * (resolve.clip_value is not None)
    clip = resolve.clip_value if resolve.clip_value is not None else 0.0
    return [_RESOLVE.pack(resolve.table, resolve.round, flags, resolve.coef, clip)]


def _decode_resolve(frames: Sequence[Frame]) -> m.Resolve:
    body = memoryview(frames[0])
    if len(body) != _RESOLVE.size:
        raise ProtocolError(f"a resolve message has {len(body)} bytes, expected {_RESOLVE.size}")
    table, number, flags, coef, clip = _RESOLVE.unpack(body)
    if flags & ~(_SKIPS | _CLIPS) or not clip >= 0:
        raise ProtocolError(f"a resolve message has flags {flags:#x} and a limit of {clip}")
    return m.Resolve(table, number, coef, clip if flags & _CLIPS else None, bool(flags & _SKIPS))


def _encode_held(held: m.Held) -> list[bytes]:
    partials = np.array(list(held.partials), dtype=_PARTIAL)
    return [_HELD.pack(held.table, held.round, held.is_finite) + partials.tobytes()]


def _decode_held(frames: Sequence[Frame]) -> m.Held:
    body = memoryview(frames[0])
    if len(body) < _HELD.size or (len(body) - _HELD.size) % _PARTIAL.itemsize:
        raise ProtocolError(f"a held message of {len(body)} bytes has no whole number of partial norms")
    table, number, is_finite = _HELD.unpack_from(body)
    partials = np.frombuffer(body, _PARTIAL, offset=_HELD.size).tolist()
    return m.Held(table, number, tuple(partials), bool(is_finite))


def _encode_rows(body: m.Weights | m.Done) -> list[bytes]:
    rows, parts = (body.locations, body.parts) if isinstance(body, m.Weights) else (body.rounds, m.NO_PARTS)
    return [b"".join((_ROWS.pack(len(rows)), rows.tobytes(), parts.tobytes()))]


def _decode_rows(frames: Sequence[Frame]) -> m.Weights | m.Done:
    body, is_done = memoryview(frames[0]), len(frames) == 1
    nbytes, begin, row = len(body), _ROWS.size, _WORD.itemsize * m.PART_WORDS
    [num_rows] = _ROWS.unpack_from(body) if nbytes >= begin else [-1]
    split = begin + _WORD.itemsize * m.LOCATION_WORDS * num_rows
    if num_rows < 0 or nbytes < split or (nbytes - split) % row or (is_done and nbytes > split):
        raise ProtocolError(f"a body of {nbytes} bytes cannot begin with {num_rows} locations or rounds")
    rows = np.ndarray((num_rows, m.LOCATION_WORDS), _WORD, body, begin)
    if is_done:
        return m.Done(rows)
    parts = np.ndarray(((nbytes - split) // row, m.PART_WORDS), _WORD, body, split)
    return m.Weights(parts, (_read_payload_frame(frames[1], parts[:, m.PART_NBYTES]),), locations=rows)


def _encode_pull(pull: m.Pull) -> list[bytes]:
    return [struct.pack(f"<d{1 + len(pull.tables)}q", pull.timeout, pull.round, *pull.tables)]


def _decode_pull(frames: Sequence[Frame]) -> m.Pull:
    body = memoryview(frames[0])
    if len(body) < 2 * _WORD.itemsize or len(body) % _WORD.itemsize:
        raise ProtocolError(
            f"a pull of {len(body)} bytes is not a timeout, a round and whole numbers of tables"
        )
    timeout, number, *tables = struct.unpack(f"<d{len(body) // _WORD.itemsize - 1}q", body)
    if not math.isfinite(timeout):
        raise ProtocolError(f"a pull has timeout {timeout}; it must be finite")
    return m.Pull(tuple(tables), timeout, number)


def _encode_state(state: m.SliceState) -> list[Frame]:
    data = memoryview(state.data)
    chunks = [data[at : at + MAX_PAYLOAD] for at in range(0, len(data), MAX_PAYLOAD)]
    head = [state.table, state.index, dict(state.summary), len(data), state.history]
    return [pack_control(head), *chunks]


def _decode_state(frames: Sequence[Frame]) -> m.SliceState:
    head = unpack_control(memoryview(frames[0]))
    kinds = (int, int, dict, int, int)
    if not (isinstance(head, list) and len(head) == len(kinds) and all(map(isinstance, head, kinds))):
        raise ProtocolError("a state message must begin with [table, index, summary, size, history]")
    data = b"".join(frames[1:])
    if len(data) != head[3]:
        raise ProtocolError(f"a state message names {head[3]} bytes and brings {len(data)}")
    return m.SliceState(head[0], head[1], head[2], data, head[4])


def _read_payload_frame(frame: Frame, sizes: m.Ints) -> Tensor:
    """Return the bytes of a payload frame. Raises ProtocolError unless the sizes of its pieces add up to its own."""
    total = len(frame)
    listed = sizes.tolist()  # Python ints: their sum cannot overflow to the right one
    if min(listed, default=0) < 0 or sum(listed) != total:
        raise ProtocolError(f"the payload has {total} bytes, the body names {sum(listed)}")
    return (
        torch.frombuffer(frame, dtype=torch.uint8)
        if total
        else torch.empty(0, dtype=torch.uint8, device="cpu")
    )


def _join_payload_frame(payloads: Sequence[Tensor]) -> Frame:
    """Concatenate payloads into one frame; a single one is passed through."""
    if not payloads:
        return b""
    if len(payloads) == 1:
        [whole] = payloads
    elif len({payload.dtype for payload in payloads}) == 1:
        whole = torch.cat(list(payloads))  # viewing many small tensors as bytes would cost more
    else:
        whole = torch.cat([payload.view(torch.uint8) for payload in payloads])
    return whole.view(torch.uint8).numpy().data


class _FrameKind(NamedTuple):
    code: int
    num_frames: int
    """0: one or more."""
    encode: Callable[[Any], Sequence[Frame]]
    """Encodes the body and all frames but the payloads."""
    decode: Callable[[Sequence[Frame]], Any]
    """Decodes the body and the other frames."""


_KINDS: dict[type[Any], _FrameKind] = {
    m.Contribute: _FrameKind(0x80, 2, _encode_contribute, _decode_contribute),
    m.Weights: _FrameKind(0x82, 2, _encode_rows, _decode_rows),
    m.Done: _FrameKind(0x83, 1, _encode_rows, _decode_rows),
    m.SliceState: _FrameKind(0x84, 0, _encode_state, _decode_state),
    m.Resolve: _FrameKind(0x85, 1, _encode_resolve, _decode_resolve),
    m.Held: _FrameKind(0x86, 1, _encode_held, _decode_held),
    m.Pull: _FrameKind(0x88, 1, _encode_pull, _decode_pull),
}
_BY_CODE = {kind.code: kind for kind in _KINDS.values()}
