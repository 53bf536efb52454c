"""Slices cut into parts, so that servers sum, update and answer the first ones while the last are on their way.

Parts are smaller the less a server has of a table: what is given and not yet answered is about one part, and so is the
time in which a link carries nothing one way.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from kvstore_server.protocol import messages as m
from kvstore_server.protocol.frames import divided

_STEP = 4096
"""Bytes of whose multiples parts are: whole lines, in whole units of every kernel."""
_LEAST, LONGEST = 4 * _STEP, 256 * _STEP
"""Bytes of the smallest parts, for each costs some time; and of the longest ones, which keep a fast link busy."""
_PARTS = 16
"""Parts of what a server has of a table: the first one on its way up and the last one down are a sixteenth each."""


def size_of_parts(share: int) -> int:
    """Return the bytes of a part of a slice on a server that has so many bytes of the table."""
    return min(max(-(-share // (_PARTS * _STEP)) * _STEP, _LEAST), LONGEST)


def cut(body: m.Contribute, most: int) -> Iterator[m.Contribute]:
    """Yield messages that bring slices, without commits, and those larger than `most` bytes in parts of so many."""
    for one in divided(body):
        nbytes = int(one.pushes[0, 3])
        if len(one.pushes) > 1 or nbytes <= most:
            yield one
            continue
        raw = one.payloads[0].view(torch.uint8)
        for begin in range(0, nbytes, most):
            part, pushes = raw[begin : begin + most], one.pushes.copy()
            pushes[0, 0] |= (begin + len(part)) << m.PART
            pushes[0, 3] = len(part)
            yield replace(one, pushes=pushes, payloads=(part,))
