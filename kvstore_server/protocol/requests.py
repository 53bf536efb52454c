"""What a worker says to a server, as plain values; see `messages`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

Payload: TypeAlias = Any
"""A flat tensor, or a buffer (memoryview) of exactly the slice's bytes."""


SECRET_BYTES = 16
"""Length of a routing id and of a nonce."""
MAX_SOCKETS = 8
"""Sockets that one session may have."""


@dataclass(frozen=True, slots=True)
class Hello:
    """Opens a session: one rank of one namespace on one server. Repeated, it is answered with the same session."""

    namespace: str
    rank: int
    num_workers: int
    server: int
    num_servers: int
    capability: str
    """Instruction set of the worker's CPU; bits are only the same between equal ones."""
    address: str
    """`host:pid`, for error messages."""
    nonce: bytes
    """Random, of the process: by this a Hello that comes again is known."""
    sockets: tuple[bytes, ...]
    """Routing ids of all sockets that speak in this session; random too."""
    mode: str = "sync"
    """When a contribution counts: "sync", "async" or "ssp"; the same for all ranks of the namespace."""
    staleness: int = 0
    """With "ssp": by how many updates a rank may be ahead of the slowest one."""
    slow_down: bool = False
    """Whether the learning rate of a contribution is divided by its staleness; not with "sync"."""


@dataclass(frozen=True, slots=True)
class Register:
    """Declares a table: its keys, from which both sides derive the same Plan.

    Answered by Registered; or, while the server needs more keys, by Info with the number of "keys" that it has.
    """

    table: str
    specs: tuple[tuple[str, tuple[int, ...], str, int, bool], ...]
    """(key, shape, dtype, group, is row-sparse) of each key, or of a portion of them."""
    whole_keys: bool
    """Whether every key lies whole on one server."""
    first: int = 0
    """The index of the first of these keys in the table."""
    total: int = -1
    """How many keys the table has; -1: these."""
    digest: str = ""
    """The plan's; a server that has the table with this one needs no keys."""


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
    joined: bool = False
    """This rank has no more data: it contributes nothing from here on, until all ranks have said so."""
    delta: bool = False
    """Of slices that changed by rows alone since `version`, only those rows are wanted."""
    version: int = -1
    """The version of the weights that this rank computed with; -1 where it has none of this server."""
    hold: float = 0.0
    """Above 0: the sum is kept and its partial norms of this type are told, until a Resolve says what becomes of it."""


@dataclass(frozen=True, slots=True)
class CommitBatch:
    """Commits of several tables; each is answered on its own when its round is over."""

    commits: tuple[Commit, ...]
    hyper: bytes = b""
    """msgpack of the hyper-parameters from this round on; empty when nothing changed."""
    absent: tuple[int, ...] = ()
    """Keys (by index) that this rank leaves out of this round."""


@dataclass(frozen=True, slots=True)
class Resolve:
    """What becomes of the sum of a round that is held; the first one counts, for all ranks.

    Never answered by itself: the commits are. One for a round that is over has no effect.
    """

    table: int
    round: int
    coef: float
    """What the sum is multiplied by."""
    clip_value: float | None
    """The limit of the magnitude of each element, after that."""
    skip: bool
    """The round ends without an update."""


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
    timeout: float = 600.0
    """Seconds to wait for ranks that are too far behind, with "ssp"."""


@dataclass(frozen=True, slots=True)
class PullRows:
    """Asks for some rows of one key; answered by Weights, one part for each slice, which has just their values."""

    table: int
    wanted: tuple[tuple[int, int, int], ...]
    """(slice, position of the segment in it, number of ids) of each slice."""
    ids: bytes
    """The ids of all of them in this order, int32, counted from the first row of the segment."""
    timeout: float


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
    """Asks for the optimizer state of one slice; answered by State."""

    table: int
    index: int


@dataclass(frozen=True, slots=True)
class State:
    """The optimizer state of a slice: as a request it replaces the state, as a reply it answers GetState."""

    table: int
    index: int
    summary: Mapping[str, Any]
    """Numbers, and the names and sizes of the tensors in `data`; see `optimizer.state`."""
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


@dataclass(frozen=True, slots=True)
class Command:
    """Asks a function that the server has loaded; answered by Info, once for each request number."""

    head: int
    """Which function."""
    body: bytes
    """What it is given: UTF-8."""


@dataclass(frozen=True, slots=True)
class Profile:
    """Tells the server to record what it does for this namespace, or asks for what it recorded."""

    action: str
    """"run", "stop", "pause", "resume", "fetch" or "finish"."""
    categories: tuple[str, ...] = ()
    """With "run": what is recorded."""
    start: int = 0
    """With "fetch": the number of the first event that is wanted."""


@dataclass(frozen=True, slots=True)
class JoinJob:
    """Tells the scheduler of a job that a process is there; answered by Pending until it can begin, then by Info."""

    role: str
    """"server" or "worker"."""
    num_workers: int
    num_servers: int
    rank: int
    """The rank that the process must have; -1 for any."""
    task: int
    """Orders processes without a rank; -1 where the launcher gives no such number."""
    host: str
    """Orders the others, with the next two: the host's name."""
    started: int
    """When the process was started there, in any unit."""
    pid: int
    machine: str
    """Equal for processes that reach each other on loopback."""


@dataclass(frozen=True, slots=True)
class Listening:
    """Tells the scheduler where a server of its job listens; answered by Pending until all do, then by Info."""

    address: str


RequestBody: TypeAlias = (
    Hello
    | Register
    | PushBatch
    | CommitBatch
    | Resolve
    | Abort
    | Pull
    | PullRows
    | SetOptimizer
    | Barrier
    | GetState
    | State
    | Heartbeat
    | Leave
    | Stats
    | Command
    | Profile
    | JoinJob
    | Listening
)
