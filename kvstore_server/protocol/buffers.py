"""Pieces of memory on their way into and out of frames; nothing here copies a payload that stands alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from kvstore_server.errors import ProtocolError
from kvstore_server.protocol import messages as m

Frame = bytes | bytearray | memoryview | Any
MAX_FRAME = 1024 * 1024 + 64 * 1024
"""No frame is larger; servers set it as ZMQ_MAXMSGSIZE."""
MAX_PAYLOAD = 1024 * 1024
SENT_ALONE = 64 * 1024
"""A slice of at least this many bytes has a message of its own, so that it can be sent without being copied."""
KEYS_PER_MESSAGE = 4096
"""No message of ours names more keys, slices or tables; servers refuse those with more than --max-message-keys."""


def payload_bytes(payload: m.Payload) -> memoryview:
    """The raw bytes of a payload, without a copy."""
    if isinstance(payload, memoryview):
        return payload.cast("B") if payload.format != "B" else payload
    if isinstance(payload, bytes | bytearray):
        return memoryview(payload)
    return memoryview(payload.view(torch.uint8).numpy())


def payload_size(payload: m.Payload) -> int:
    """The size of a payload in bytes."""
    if isinstance(payload, memoryview):
        return payload.nbytes
    return len(payload) if isinstance(payload, bytes | bytearray) else int(payload.nbytes)


def buffer_of(frame: Frame) -> memoryview:
    """The bytes of a frame as they came, without a copy."""
    return (
        memoryview(frame) if isinstance(frame, bytes | bytearray | memoryview) else memoryview(frame.buffer)
    )


def join_payloads(payloads: Sequence[m.Payload]) -> Frame:
    """Several payloads as one frame; a single one is passed through."""
    if len(payloads) == 1:
        return payload_bytes(payloads[0])
    if not payloads:
        return b""
    kinds = {payload.dtype if isinstance(payload, torch.Tensor) else None for payload in payloads}
    if len(kinds) == 1 and None not in kinds:
        # One call for many small tensors; asking each for its bytes would cost more than all the rest.
        return payload_bytes(torch.cat(list(payloads)))
    return b"".join(payload_bytes(payload) for payload in payloads)


def groups(sizes: Sequence[int]) -> Iterator[slice]:
    """Divide slices of so many bytes into messages, in order; a large one is alone, for then it is not copied."""
    first, nbytes = 0, 0
    for at, size in enumerate(sizes):
        is_full = nbytes + size > MAX_PAYLOAD or at - first == KEYS_PER_MESSAGE
        if at > first and (is_full or size >= SENT_ALONE or sizes[at - 1] >= SENT_ALONE):
            yield slice(first, at)
            first, nbytes = at, 0
        nbytes += size
    if first < len(sizes):
        yield slice(first, len(sizes))


def located(payloads: Sequence[m.Payload], sizes: m.Ints) -> tuple[list[torch.Tensor], m.Ints, m.Ints]:
    """View buffers as bytes; and say of pieces of some sizes in this order, which buffer each is in, and where."""
    sources = [as_bytes(payload) for payload in payloads]
    return sources, *places(np.array(list(map(len, sources)), np.int64), sizes)


def places(buffers: m.Ints, sizes: m.Ints) -> tuple[m.Ints, m.Ints]:
    """Of pieces of some sizes that fill buffers one after the other, which buffer each is in, and where.

    Args:
        buffers, sizes: In bytes.

    Raises:
        ProtocolError: the pieces are not the buffers.
    """
    ends = np.cumsum(buffers, dtype=np.int64)
    starts = np.cumsum(sizes) - sizes
    which = np.minimum(np.searchsorted(ends, starts, side="right"), len(buffers) - 1)
    begins = np.append(0, ends)[which]
    total = int(ends[-1]) if len(ends) else 0
    if (sizes < 0).any() or int(sizes.sum()) != total or (starts + sizes > ends[which]).any():
        raise ProtocolError(f"slices of {int(sizes.sum())} bytes came in payloads of {total}")
    return which, starts - begins


def as_bytes(payload: m.Payload) -> torch.Tensor:
    """View a payload as bytes."""
    if isinstance(payload, torch.Tensor):
        return payload.view(torch.uint8)
    if not len(payload):
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(payload_bytes(payload), dtype=torch.uint8)
