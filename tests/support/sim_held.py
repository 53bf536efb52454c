"""Rounds of the simulation that are held: what processes make of a norm, and what a server must say of its sums."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from kvstore_server.norms import Decision, combine
from tests.support import said as m
from tests.support.sim_compression import Array
from tests.support.sim_lane import NUM_SERVERS, Lane

RAISES = 0.08
"""How often a process gives up a round rather than to tell a server what it makes of it."""
NORM_TYPES = (2.0, 1.0, 3.0, float("inf"))


def decided(held: Mapping[int, m.Held], norm_type: float) -> Decision:
    """What every process makes of the partial norms of all servers: something that no other norm gives."""
    partials = sorted(partial for one in held.values() for partial in one.partials)
    norm = combine((value for _, value in partials), norm_type)
    choice = (int(np.float64(norm).view(np.int64)) >> 7) % 6
    if choice == 0:
        return Decision(skip=True)
    if choice == 1:
        return Decision()
    clip_value = norm / 16 if choice == 2 else None
    return Decision(1.0 / (1.0 + norm), clip_value)


def applied(total: Array, decision: Decision) -> Array:
    """A sum as it is used."""
    if decision.coef != 1.0:
        total = total * np.float32(decision.coef)
    if decision.clip_value is not None:
        limit = np.float32(decision.clip_value)
        total = np.clip(total, -limit, limit)
    return total


def partial(total: Array, norm_type: float) -> float:
    """The partial norm of a slice, from the formula alone."""
    wide = np.abs(total.astype(np.float64))
    return float(wide.max() if norm_type == np.inf else (wide**norm_type).sum())


def is_told(held: m.Held, want: Mapping[int, float]) -> bool:
    """Whether a server said what there was to say: all slices in order, their partial norms, and that all is finite."""
    said = dict(held.partials)
    same_slices = [slice_ for slice_, _ in held.partials] == sorted(want)
    return (
        held.is_finite and same_slices and all(np.isclose(said[s], want[s], rtol=1e-12, atol=0) for s in want)
    )


def note_held(lane: Lane, server: int, held: m.Held) -> None:
    """A server says what it holds; once both have, it is clear what this process makes of it."""
    lane.held[server] = held
    if lane.decision is not None:
        lane.to_resolve += [server]  # it has not heard it yet
    elif lane.was_vetoed:
        note_veto(lane)
    elif len(lane.held) == NUM_SERVERS:
        lane.decision = decided(lane.held, lane.hold)
        lane.to_resolve = list(range(NUM_SERVERS))


def note_veto(lane: Lane) -> None:
    """A rank has vetoed on one server, and its successor has not on the other: both are to end alike."""
    lane.was_vetoed = True
    if lane.held and lane.decision is None:
        lane.decision = Decision(skip=True)
        lane.to_resolve = list(lane.held)


def resolve_of(lane: Lane, server: int) -> m.Resolve:
    """What a process tells a server about the open round."""
    assert lane.decision is not None
    return m.Resolve(lane.numbers[server], lane.round, *lane.decision)


def is_known(lane: Lane) -> bool:
    """Whether a process knows all of a round of which both servers have told it the end."""
    return not lane.hold or len(lane.held) == NUM_SERVERS or lane.was_vetoed
