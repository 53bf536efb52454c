"""Lets an engine handle requests as a server does that captures rounds: by their frames."""

from __future__ import annotations

from collections import Counter

from kvstore_server.engine.captured import Captures
from kvstore_server.engine.engine import Engine
from kvstore_server.protocol import messages as m
from kvstore_server.protocol.frames import encode_frames


def handle_frames(
    engine: Engine, peer: bytes, request: m.Request, now: float, seen: Counter[str]
) -> list[m.Outgoing]:
    """As `Engine.handle`, but for messages that repeat, which are counted in `seen`."""
    if engine.captures is None:
        engine.captures = Captures()
    frames = [bytearray(frame) for frame in encode_frames(request)]
    taken = engine.take(peer, frames, now) if len(frames) == 2 else None
    if taken is None:
        return engine.handle(peer, request, now)
    seen["captured"] += 1
    return taken
