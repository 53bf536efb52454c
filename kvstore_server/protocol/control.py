"""Control messages as bytes: one msgpack list each, with every value checked before it is used."""

from __future__ import annotations

import math
from dataclasses import fields
from typing import Any

import msgpack

from kvstore_server.errors import ProtocolError
from kvstore_server.protocol import messages as m
from kvstore_server.protocol.buffers import MAX_FRAME

_CONTROL: tuple[type[Any], ...] = (
    m.Hello,
    m.Register,
    m.Abort,
    m.Pull,
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
    m.Info,
    m.PullRows,
    m.InForce,
    m.Command,
    m.Profile,
    m.JoinJob,
    m.Listening,
)
_KIND_OF = {cls: kind for kind, cls in enumerate(_CONTROL)}
_FIELDS = {cls: tuple(f.name for f in fields(cls)) for cls in _CONTROL}


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


def encode_control(body: Any) -> tuple[int, list[bytes]]:
    """The kind of a control message and its one frame."""
    return _KIND_OF[type(body)], [pack_control([getattr(body, name) for name in _FIELDS[type(body)]])]


def decode_control(kind: int, data: memoryview) -> Any:
    """Rebuild a control message.

    Raises:
        ProtocolError: the kind is unknown or the bytes do not fit it.
    """
    if kind >= len(_CONTROL):
        raise ProtocolError(f"unknown kind of message: {kind}")
    cls = _CONTROL[kind]
    values = unpack_control(data)
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
        if declared == "tuple[bytes, ...]" and not all(type(item) is bytes for item in value):
            raise ProtocolError(f"{type(message).__name__}.{f.name} must be {declared}, got {value!r:.80}")
        if declared == "tuple[int, ...]" and not all(type(item) is int for item in value):
            raise ProtocolError(f"{type(message).__name__}.{f.name} must be {declared}, got {value!r:.80}")
    if isinstance(message, m.Register) and not all(_is_spec(spec) for spec in message.specs):
        raise ProtocolError(
            f"Register.specs must be (key, shape of up to {_MAX_DIMS} sizes, dtype, group, is row-sparse) each"
        )
    if isinstance(message, m.Hello) and not _is_identified(message):
        raise ProtocolError(
            f"Hello must hold a nonce and 1 … {m.MAX_SOCKETS} routing ids, of {m.SECRET_BYTES} bytes each"
        )
    if isinstance(message, m.PullRows) and not all(_is_triple(part) for part in message.wanted):
        raise ProtocolError("PullRows.wanted must be (slice, position, number of ids) each")


def _is_identified(hello: m.Hello) -> bool:
    secrets = (hello.nonce, *hello.sockets)
    return 1 < len(secrets) <= 1 + m.MAX_SOCKETS and all(
        isinstance(secret, bytes) and len(secret) == m.SECRET_BYTES for secret in secrets
    )


_MAX_DIMS, _MAX_SIZE = 64, 1 << 48
"""Of a shape: more than any tensor has; without a limit, their product alone would take minutes."""


def _is_spec(spec: Any) -> bool:
    if not isinstance(spec, tuple) or len(spec) != 5:
        return False
    key, shape, dtype, group, is_row_sparse = spec
    return (
        isinstance(key, str)
        and isinstance(shape, tuple)
        and len(shape) <= _MAX_DIMS
        and all(type(size) is int and abs(size) < _MAX_SIZE for size in shape)
        and isinstance(dtype, str)
        and type(group) is int
        and isinstance(is_row_sparse, bool)
    )


def _is_triple(part: Any) -> bool:
    return isinstance(part, tuple) and len(part) == 3 and all(type(item) is int for item in part)


def _freeze(value: Any) -> Any:
    return tuple(_freeze(item) for item in value) if isinstance(value, list) else value
