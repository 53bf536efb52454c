"""Data messages as bytes: arrays of fixed 64-bit records, then a payload frame.

push      table, slice, round, generation, size; then, where the payloads are compressed, how; then the payloads
commit    table, round, flags, number of slices, version, rescale, timeout, hold; then (slice, generation) of each
resolve   table, round, flags, coefficient, limit of each element
held      table, round, is finite; then (slice, partial norm) of each slice
weights   table, slice, version, kind, size; then the payloads
done      table, round, version
state     [table, slice, summary, size]; then the bytes in pieces
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np

from kvstore_server.errors import ProtocolError
from kvstore_server.protocol import messages as m
from kvstore_server.protocol.buffers import (
    MAX_PAYLOAD,
    Frame,
    buffer_of,
    join_payloads,
    payload_size,
    split_payload,
)
from kvstore_server.protocol.control import pack_control, unpack_control

_PUSH_WORDS, _WEIGHTS_WORDS, _DONE_WORDS = 5, 5, 3
_COMMIT = struct.Struct("<qqqqqddd")
_WANTS_WEIGHTS, _VETOES, _ASSIGNS, _HAS_JOINED, _WANTS_DELTA = 1, 2, 4, 8, 16
_ALL_FLAGS = 31
"""Bits of a commit's flags."""
_SKIPS, _CLIPS = 1, 2
"""Bits of a resolve's flags."""
_RESOLVE = struct.Struct("<qqqdd")
_HELD = struct.Struct("<qqq")
_PARTIAL = np.dtype([("slice", "<i8"), ("value", "<f8")])


def encode_pushes(batch: m.PushBatch) -> list[Frame]:
    """Records and payloads; the form, where it is not that of plain numbers, is in between."""
    records = [(p.table, p.slice, p.round, p.generation, payload_size(p.payload)) for p in batch.pushes]
    form = [batch.form] if batch.form else []
    return [_pack(records), *form, join_payloads([p.payload for p in batch.pushes])]


def decode_pushes(frames: Sequence[Frame]) -> m.PushBatch:
    """Inverse of `encode_pushes`. Raises ProtocolError on anything else."""
    if len(frames) not in (2, 3):
        raise ProtocolError(f"a push has {len(frames)} frames after its header, expected 2 or 3")
    records = _records(frames, _PUSH_WORDS, len(frames))
    parts = split_payload(frames[-1], records[:, 4])
    rows = zip(records.tolist(), parts, strict=True)
    form = bytes(buffer_of(frames[1])) if len(frames) == 3 else b""
    return m.PushBatch(tuple([m.Push(t, s, r, g, part) for (t, s, r, g, _), part in rows]), form)


def encode_commits(batch: m.CommitBatch) -> list[Frame]:
    """Records, then what holds for all of them: hyper-parameters and absent keys."""
    records = [struct.pack("<q", len(batch.commits))]
    manifests: list[tuple[int, int]] = []
    for commit in batch.commits:
        rescale = math.nan if commit.rescale is None else commit.rescale
        records.append(
            _COMMIT.pack(
                commit.table, commit.round, _flags(commit), len(commit.manifest), commit.version, rescale,
                commit.timeout, commit.hold,
            )
        )  # fmt: skip
        manifests.extend(commit.manifest)
    records.append(np.array(manifests, dtype="<i8").tobytes())
    return [b"".join(records), pack_control([batch.hyper, list(batch.absent)])]


def decode_commits(frames: Sequence[Frame]) -> m.CommitBatch:
    """Inverse of `encode_commits`. Raises ProtocolError on anything else."""
    body = _body(frames, 2)
    count = struct.unpack_from("<q", body)[0] if len(body) >= 8 else -1
    end = 8 + count * _COMMIT.size
    if count < 0 or end > len(body) or (len(body) - end) % 16:
        raise ProtocolError(f"a commit message of {len(body)} bytes cannot hold {count} commits")
    manifest = list(map(tuple, np.frombuffer(body, "<i8", offset=end).reshape(-1, 2).tolist()))
    hyper, absent = _commit_extra(frames[1])
    commits = []
    at = 0
    for table, number, flags, entries, version, rescale, timeout, hold in _COMMIT.iter_unpack(body[8:end]):
        if entries < 0 or at + entries > len(manifest):
            raise ProtocolError(f"a commit names {entries} slices but the message holds {len(manifest) - at}")
        named = tuple(manifest[at : at + entries])
        commits.append(_commit(table, number, flags, version, named, rescale, timeout, hold))
        at += entries
    return m.CommitBatch(tuple(commits), hyper, absent)


def encode_resolve(resolve: m.Resolve) -> list[Frame]:
    """One record."""
    flags = _SKIPS * resolve.skip | _CLIPS * (resolve.clip_value is not None)
    clip = resolve.clip_value if resolve.clip_value is not None else 0.0
    return [_RESOLVE.pack(resolve.table, resolve.round, flags, resolve.coef, clip)]


def decode_resolve(frames: Sequence[Frame]) -> m.Resolve:
    """Inverse of `encode_resolve`. Raises ProtocolError on anything else."""
    body = _body(frames, 1)
    if len(body) != _RESOLVE.size:
        raise ProtocolError(f"a resolve message has {len(body)} bytes, expected {_RESOLVE.size}")
    table, number, flags, coef, clip = _RESOLVE.unpack(body)
    if flags & ~(_SKIPS | _CLIPS) or not clip >= 0:
        raise ProtocolError(f"a resolve message has flags {flags:#x} and a limit of {clip}")
    return m.Resolve(table, number, coef, clip if flags & _CLIPS else None, bool(flags & _SKIPS))


def encode_held(held: m.Held) -> list[Frame]:
    """What holds for the round, then the partials."""
    partials = np.array(list(held.partials), dtype=_PARTIAL)
    return [_HELD.pack(held.table, held.round, held.is_finite) + partials.tobytes()]


def decode_held(frames: Sequence[Frame]) -> m.Held:
    """Inverse of `encode_held`. Raises ProtocolError on anything else."""
    body = _body(frames, 1)
    if len(body) < _HELD.size or (len(body) - _HELD.size) % _PARTIAL.itemsize:
        raise ProtocolError(f"a held message of {len(body)} bytes holds no whole number of partial norms")
    table, number, is_finite = _HELD.unpack_from(body)
    partials = np.frombuffer(body, _PARTIAL, offset=_HELD.size).tolist()
    return m.Held(table, number, tuple(partials), bool(is_finite))


def encode_weights(weights: m.Weights) -> list[Frame]:
    """Records and payloads."""
    records = [(p.table, p.slice, p.version, p.kind, payload_size(p.payload)) for p in weights.parts]
    return [_pack(records), join_payloads([p.payload for p in weights.parts])]


def decode_weights(frames: Sequence[Frame]) -> m.Weights:
    """Inverse of `encode_weights`. Raises ProtocolError on anything else."""
    records = _records(frames, _WEIGHTS_WORDS, 2)
    parts = split_payload(frames[1], records[:, 4])
    rows = zip(records.tolist(), parts, strict=True)
    return m.Weights(tuple([m.WeightsPart(t, s, v, part, k) for (t, s, v, k, _), part in rows]))


def encode_done(done: m.Done) -> list[Frame]:
    """Records only."""
    return [_pack(done.rounds)]


def decode_done(frames: Sequence[Frame]) -> m.Done:
    """Inverse of `encode_done`. Raises ProtocolError on anything else."""
    return m.Done(tuple([(t, r, v) for t, r, v in _records(frames, _DONE_WORDS, 1).tolist()]))


def encode_state(state: m.State) -> list[Frame]:
    """The summary, then the bytes in pieces that fit into frames."""
    data = memoryview(state.data)
    chunks = [data[at : at + MAX_PAYLOAD] for at in range(0, len(data), MAX_PAYLOAD)]
    return [pack_control([state.table, state.index, dict(state.summary), len(data)]), *chunks]


def decode_state(frames: Sequence[Frame]) -> m.State:
    """Inverse of `encode_state`. Raises ProtocolError on anything else."""
    head = unpack_control(buffer_of(frames[0])) if frames else None
    kinds = (int, int, dict, int)
    if not (isinstance(head, list) and len(head) == len(kinds) and all(map(isinstance, head, kinds))):
        raise ProtocolError("a state message must begin with [table, index, summary, size]")
    data = b"".join(buffer_of(frame) for frame in frames[1:])
    if len(data) != head[3]:
        raise ProtocolError(f"a state message names {head[3]} bytes and brings {len(data)}")
    return m.State(head[0], head[1], head[2], data)


def _flags(commit: m.Commit) -> int:
    return (
        _WANTS_WEIGHTS * commit.want_weights
        | _VETOES * commit.veto
        | _ASSIGNS * commit.assign
        | _HAS_JOINED * commit.joined
        | _WANTS_DELTA * commit.delta
    )


def _commit(
    table: int,
    number: int,
    flags: int,
    version: int,
    manifest: tuple[tuple[int, int], ...],
    rescale: float,
    timeout: float,
    hold: float,
) -> m.Commit:
    if not 0 <= timeout < math.inf or math.isinf(rescale):
        raise ProtocolError(f"a commit has timeout {timeout} and rescale {rescale}; both must be finite")
    if not hold >= 0:
        raise ProtocolError(f"a commit wants a norm of type {hold}, which there is not")
    if flags & ~_ALL_FLAGS:
        raise ProtocolError(f"a commit has unknown flags {flags:#x}")
    factor = None if math.isnan(rescale) else rescale
    return m.Commit(
        table, number, manifest, factor, bool(flags & _WANTS_WEIGHTS), timeout, bool(flags & _VETOES),
        bool(flags & _ASSIGNS), bool(flags & _HAS_JOINED), bool(flags & _WANTS_DELTA), version, hold,
    )  # fmt: skip


def _commit_extra(frame: Frame) -> tuple[bytes, tuple[int, ...]]:
    extra = unpack_control(buffer_of(frame))
    if not (isinstance(extra, list) and len(extra) == 2 and isinstance(extra[0], bytes)):
        raise ProtocolError("a commit message must end with [hyper-parameters, absent keys]")
    if not (isinstance(extra[1], list) and all(isinstance(key, int) for key in extra[1])):
        raise ProtocolError("the absent keys of a commit must be a list of integers")
    return extra[0], tuple(extra[1])


def _body(frames: Sequence[Frame], count: int) -> memoryview:
    if len(frames) != count:
        raise ProtocolError(f"the message has {len(frames)} frames after its header, expected {count}")
    return buffer_of(frames[0])


def _pack(records: Sequence[tuple[int, ...]]) -> bytes:
    return np.array(records, dtype="<i8").tobytes()


def _records(frames: Sequence[Frame], words: int, count: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    body = _body(frames, count)
    if len(body) % (words * 8):
        raise ProtocolError(f"a body of {len(body)} bytes is no whole number of {words * 8}-byte records")
    return np.frombuffer(body, "<i8").reshape(-1, words)
