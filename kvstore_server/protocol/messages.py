"""What workers and servers say to each other, as plain values.

A round of one table, seen from a worker:

    Push, Push, ...      provisional slices, each with a generation; a higher generation replaces a lower one
    Commit               names every (slice, generation) that counts; from here on the first one wins
    Weights or Done      withheld until every member has committed and the round was applied
    Failed               or: the round failed for every member, with one and the same error

A contribution is identified by (namespace, rank, round, slice): sending it twice has no further effect. The
session only fences: a newer process of the same rank shuts an older one out. Round 0 is the initialisation,
in which only rank 0's values count.

Payloads are flat torch tensors of the slice's dtype, or raw buffers that the engine views as such. How the
messages look as bytes is the business of `frames`.

What exists once per slice and round is a named tuple: making one costs a third of what a frozen dataclass costs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

Payload: TypeAlias = Any
"""A flat tensor, or a buffer (memoryview) of exactly the slice's bytes."""


@dataclass(frozen=True, slots=True)
class Hello:
    """Opens a session: one rank of one namespace on one server."""

    namespace: str
    rank: int
    num_workers: int
    server: int
    num_servers: int
    capability: str
    """Instruction set of the worker's CPU; bits are only the same between equal ones."""
    address: str
    """`host:pid`, for error messages."""


@dataclass(frozen=True, slots=True)
class Register:
    """Declares a table: its keys, from which both sides derive the same Plan."""

    table: str
    specs: tuple[tuple[str, tuple[int, ...], str, int], ...]
    """(key, shape, dtype, group) of each key."""
    whole_keys: bool
    """Whether every key lies whole on one server."""


class Push(NamedTuple):
    """One provisional slice of a contribution."""

    table: int
    slice: int
    round: int
    generation: int
    payload: Payload


@dataclass(frozen=True, slots=True)
class PushBatch:
    """Several slices in one message. Never answered: the commit is."""

    pushes: tuple[Push, ...]
    form: bytes = b""
    """How the payloads are to be read, if not as plain numbers: msgpack of `Codec.spec()` or of {"type": "rows"}."""


class Commit(NamedTuple):
    """Makes a rank's contribution to one round of one table final."""

    table: int
    round: int
    manifest: tuple[tuple[int, int], ...]
    """(slice, generation) of every slice that takes part."""
    rescale: float | None
    """Factor of this contribution in the sum; None means the optimizer's own rescale_grad."""
    want_weights: bool
    timeout: float
    """Seconds that this rank is ready to wait for the others."""
    veto: bool = False
    """This rank's gradients are not finite: the round ends without an update, on every server and for every rank."""
    assign: bool = False
    """The lowest rank's values replace the weights and no optimizer runs; every rank must say so."""


@dataclass(frozen=True, slots=True)
class CommitBatch:
    """Commits of several tables; each is answered on its own when its round is over."""

    commits: tuple[Commit, ...]
    hyper: bytes = b""
    """msgpack of the hyper-parameters from this round on; empty when nothing changed."""
    absent: tuple[int, ...] = ()
    """Keys (by index) that this rank leaves out of this round."""


@dataclass(frozen=True, slots=True)
class Abort:
    """This rank cannot finish a round: if it is still open, it fails for every member."""

    table: int
    round: int
    reason: str
    undo: bool
    """Take the round back if it was applied. Only for a round that another server has failed: then no member
    can have finished it. Without that, a member that was told of new weights would never hear that they are gone."""


@dataclass(frozen=True, slots=True)
class Pull:
    """Asks for the present weights of whole tables."""

    tables: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SetOptimizer:
    """Names the optimizer of the namespace; all ranks that set one must set the same."""

    spec: bytes
    """msgpack of `Optimizer.spec()`."""


@dataclass(frozen=True, slots=True)
class Barrier:
    """Waits for every rank of the namespace to come to the same barrier."""

    sequence: int
    timeout: float


@dataclass(frozen=True, slots=True)
class GetState:
    """Asks for the optimizer state of one slice, or of one whole key; answered by State."""

    table: int
    index: int
    of_key: bool


@dataclass(frozen=True, slots=True)
class State:
    """The optimizer state of a slice or key: as a request it replaces the state, as a reply it answers GetState."""

    table: int
    index: int
    of_key: bool
    summary: Mapping[str, Any]
    """Numbers, and the names and sizes of the tensors in `data`; see `state_blob`."""
    data: bytes


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """Says that this rank is alive; the answer, Pending, says the same of the server."""


@dataclass(frozen=True, slots=True)
class Leave:
    """Ends the session; rounds that still need this rank fail with the reason."""

    reason: str
    is_clean: bool
    """Whether the worker left because it was done; if not, it counts as dead from now on."""


@dataclass(frozen=True, slots=True)
class Stats:
    """Asks for the server's counters and for the members of this namespace."""


RequestBody: TypeAlias = (
    Hello
    | Register
    | PushBatch
    | CommitBatch
    | Abort
    | Pull
    | SetOptimizer
    | Barrier
    | GetState
    | State
    | Heartbeat
    | Leave
    | Stats
)


class Request(NamedTuple):
    """A message from a worker: who it is from, and the number under which it wants to be answered."""

    run: int
    """The server process that the worker believes it talks to; 0 in Hello."""
    session: int
    number: int
    body: RequestBody


@dataclass(frozen=True, slots=True)
class Welcome:
    """Answers Hello."""

    run: int
    session: int


@dataclass(frozen=True, slots=True)
class Registered:
    """Answers Register; `next_round` is above 0 when the table lives on from an earlier process."""

    table: int
    next_round: int


class WeightsPart(NamedTuple):
    """One slice of a table, as of `round`."""

    table: int
    slice: int
    round: int
    payload: Payload


@dataclass(frozen=True, slots=True)
class Weights:
    """Answers a Commit that wanted weights, or a Pull."""

    parts: tuple[WeightsPart, ...]


@dataclass(frozen=True, slots=True)
class Done:
    """Answers Commits that wanted no weights: (table, round) of rounds that were applied."""

    rounds: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Absent:
    """Comes before the Weights or Done of a round that left out keys (by index) because no rank gave any."""

    table: int
    round: int
    keys: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Vetoed:
    """Comes before the Done of a round that was not applied because some ranks had gradients that are not finite."""

    table: int
    round: int
    ranks: tuple[int, ...]


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
    Welcome | Registered | Weights | Done | Absent | Vetoed | Missing | Pending | Failed | Info | State
)


class Reply(NamedTuple):
    """A message to a worker; `number` is that of the request that it answers."""

    number: int
    body: ReplyBody


class Outgoing(NamedTuple):
    """A reply and the peer to which it goes."""

    peer: bytes
    reply: Reply
