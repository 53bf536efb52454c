"""What a server says to a worker, as plain values; see `messages`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

from kvstore_server.protocol.requests import Payload, State


@dataclass(frozen=True, slots=True)
class Welcome:
    """Answers Hello."""

    run: int
    session: int


@dataclass(frozen=True, slots=True)
class Registered:
    """Answers Register; `next_round` is above 0 when the table lives on from an earlier process.

    Without synchronous rounds the worker goes on with the greatest number that a server says.
    """

    table: int
    next_round: int


WHOLE, ROWS, VALUES = range(3)
"""What the payload of a part is: the whole slice; rows that changed, as `row_payload` packs them; or just the values
of the rows that were asked for."""


class WeightsPart(NamedTuple):
    """One slice of a table, or some of its rows, as of `version`: the number of updates that went into the table."""

    table: int
    slice: int
    version: int
    payload: Payload
    kind: int = WHOLE


@dataclass(frozen=True, slots=True)
class Weights:
    """Answers a Commit that wanted weights, or a Pull."""

    parts: tuple[WeightsPart, ...]


@dataclass(frozen=True, slots=True)
class Done:
    """Answers Commits that wanted no weights: (table, round, version) of rounds that were applied.

    The version is that of the weights right after it.
    """

    rounds: tuple[tuple[int, int, int], ...]


@dataclass(frozen=True, slots=True)
class Held:
    """Answers the commits of a round that is held: the sum is here, and is not applied before a Resolve comes.

    It is said again when a commit is repeated, also after the round was applied.
    """

    table: int
    round: int
    partials: tuple[tuple[int, float], ...]
    """(slice, partial norm) of every slice here that any rank contributed to; see `norms`."""
    is_finite: bool
    """Whether all elements of them are."""


@dataclass(frozen=True, slots=True)
class Absent:
    """Comes before the Weights or Done of a round that left out keys (by index) because no rank gave any."""

    table: int
    round: int
    keys: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Vetoed:
    """Comes before the Done of a round that was not applied because some ranks had gradients that are not finite.

    Without ranks it was held, and a Resolve said so.
    """

    table: int
    round: int
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class InForce:
    """Comes before the Weights or Done of a rank that has joined: the hyper-parameters of the round, and its end."""

    table: int
    round: int
    hyper: bytes
    """msgpack, as a commit's; empty when no rank sent any."""
    is_over: bool
    """All ranks have joined: this round changed nothing, and from the next one on all take part again."""


@dataclass(frozen=True, slots=True)
class Missing:
    """Refuses a Commit that names slices which never arrived; send them again, then commit again."""

    table: int
    round: int
    slices: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Pending:
    """Answers a Heartbeat, and a repeated Commit or Barrier that still waits for other ranks: the server is alive."""

    waiting_for: tuple[int, ...]
    """The first ones of them."""
    why: str = field(default="", compare=False)
    """For people: what waits for whom, and when those were last heard; empty when nothing waits."""


@dataclass(frozen=True, slots=True)
class Failed:
    """A request, or one round of a table, failed."""

    code: str
    text: str
    table: int = -1
    round: int = -1
    next_round: int = -1


@dataclass(frozen=True, slots=True)
class Info:
    """Answers a control request; may be empty."""

    values: Mapping[str, Any] = field(default_factory=dict)


ReplyBody: TypeAlias = (
    Welcome
    | Registered
    | Weights
    | Done
    | Held
    | Absent
    | Vetoed
    | InForce
    | Missing
    | Pending
    | Failed
    | Info
    | State
)
