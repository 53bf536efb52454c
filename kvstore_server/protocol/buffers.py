"""Pieces of memory on their way into and out of frames; nothing here copies a payload that stands alone."""

from __future__ import annotations

from collections.abc import Sequence
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
    kinds = {payload.dtype if isinstance(payload, torch.Tensor) else None for payload in payloads}
    if len(kinds) == 1 and None not in kinds:
        # One call for many small tensors; asking each for its bytes would cost more than all the rest.
        return payload_bytes(torch.cat(list(payloads)))
    return b"".join(payload_bytes(payload) for payload in payloads)


def split_payload(frame: Frame, sizes: np.ndarray[Any, np.dtype[np.int64]]) -> list[memoryview]:
    """Cut a payload frame into pieces of the given sizes.

    Raises:
        ProtocolError: the sizes do not add up to the frame.
    """
    data = buffer_of(frame)
    # Each alone as well: the sum of hostile sizes can wrap around to the right one.
    if ((sizes < 0) | (sizes > len(data))).any() or int(sizes.sum()) != len(data):
        raise ProtocolError(f"the payload has {len(data)} bytes, the body names {int(sizes.sum())}")
    ends = np.cumsum(sizes).tolist()
    return [data[end - size : end] for size, end in zip(sizes.tolist(), ends, strict=True)]
