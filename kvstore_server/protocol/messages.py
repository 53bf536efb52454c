"""What workers and servers say to each other, as plain values.

A round of one table, seen from a worker:

    Push, Push, ...      provisional slices, each with a generation; a higher generation replaces a lower one
    Commit               names every (slice, generation) that counts; from here on the first one wins
    Weights or Done      withheld until every member has committed and the round was applied
    Failed               or: the round failed for every member, with one and the same error

If the commits say so, the round is held between the two: what is summed is measured, and applied when that is decided.

    Held                 when every member has committed: partial norms of what lies on this server
    Resolve              what every member makes of the partial norms of all servers; the first one counts

A contribution is identified by (namespace, rank, round, slice): sending it twice has no further effect. The
session says who speaks: a newer process of the same rank shuts an older one out. Round 0 is the initialisation,
in which only rank 0's values count.

Payloads are flat torch tensors of the slice's dtype, or raw buffers that the engine views as such. How the
messages look as bytes is the business of `frames`.

What exists once per slice and round is a named tuple: making one costs a third of what a frozen dataclass costs.
The bodies are in `requests` and `answers`.
"""

from __future__ import annotations

from typing import NamedTuple

from kvstore_server.protocol.answers import (
    ROWS,
    VALUES,
    WHOLE,
    Absent,
    Done,
    Failed,
    Held,
    Info,
    InForce,
    Missing,
    Pending,
    Registered,
    ReplyBody,
    Vetoed,
    Weights,
    WeightsPart,
    Welcome,
)
from kvstore_server.protocol.requests import (
    Abort,
    Barrier,
    Command,
    Commit,
    CommitBatch,
    GetState,
    Heartbeat,
    Hello,
    JoinJob,
    Leave,
    Listening,
    Payload,
    Profile,
    Pull,
    PullRows,
    Push,
    PushBatch,
    Register,
    RequestBody,
    Resolve,
    SetOptimizer,
    State,
    Stats,
)

__all__ = [
    "ROWS",
    "VALUES",
    "WHOLE",
    "Abort",
    "Absent",
    "Barrier",
    "Command",
    "Commit",
    "CommitBatch",
    "Done",
    "Failed",
    "GetState",
    "Heartbeat",
    "Held",
    "Hello",
    "InForce",
    "Info",
    "JoinJob",
    "Leave",
    "Listening",
    "Missing",
    "Outgoing",
    "Payload",
    "Pending",
    "Profile",
    "Pull",
    "PullRows",
    "Push",
    "PushBatch",
    "Register",
    "Registered",
    "Reply",
    "ReplyBody",
    "Request",
    "RequestBody",
    "Resolve",
    "SetOptimizer",
    "State",
    "Stats",
    "Vetoed",
    "Weights",
    "WeightsPart",
    "Welcome",
]


class Request(NamedTuple):
    """A message from a worker: who it is from, and the number under which it wants to be answered."""

    run: int
    """The server process that the worker believes it talks to; 0 in Hello."""
    session: int
    number: int
    body: RequestBody


class Reply(NamedTuple):
    """A message to a worker; `number` is that of the request that it answers."""

    number: int
    body: ReplyBody


class Outgoing(NamedTuple):
    """A reply and the peer to which it goes."""

    peer: bytes
    reply: Reply
