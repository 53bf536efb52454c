"""Compression in the simulation, written down a second time: in numpy, from the formulas alone."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvstore_server.protocol.control import pack_control

Array = npt.NDArray[np.float32]

THRESHOLD = 0.5
TWO_BIT = pack_control({"type": "2bit", "threshold": THRESHOLD})
HALF = pack_control({"type": "fp16"})
"""The codecs of the schedules, as they are named on the wire."""


def said(codec: bytes, total: Array) -> Array:
    """What a sender says of a gradient plus residual; the rest is its next residual."""
    if codec == HALF:
        half: Array = np.clip(total, -65504, 65504).astype(np.float16).astype(np.float32)
        return half
    fired: Array = np.float32(THRESHOLD) * (np.abs(total) >= THRESHOLD) * np.sign(total)
    return fired.astype(np.float32)
