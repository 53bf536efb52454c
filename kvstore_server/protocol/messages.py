"""What workers and servers say to each other, as plain values.

A round of one table, seen from a worker:

    Contribute           slices, each with a generation (a higher one replaces a lower one), and with the last of them a
                         commit: from there on the first one wins
    Weights or Done      withheld until every member has committed and the round was applied
    Failed               or: the round failed for every member, with one and the same error

Where every member has announced its commit before it gave its slices, Weights of some slices come while others are
still on their way; if what they come from is taken back, they come again, with a higher version.

If the commits say so, the round is held between the two: what is summed is measured, and applied when that is decided.

    Held                 when every member has committed: partial norms of what lies on this server
    Resolve              what every member makes of the partial norms of all servers; the first one counts

A contribution is identified by (namespace, rank, table, round, slice): sending it twice has no further effect. The
session says who speaks: a newer process of the same rank shuts an older one out. Round 0 is the initialisation,
in which only rank 0's values count.

A server numbers the tables of a namespace, and all of their slices that it holds: their *slots*. Whatever concerns many
tables or slices travels as one matrix with a row for each. How the messages look as bytes is the business of `frames`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
from torch import Tensor

Matrix: TypeAlias = npt.NDArray[np.int64]
Ints: TypeAlias = npt.NDArray[np.int64]

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
    by_host: bool = False
    """Whether a rank may give the sum of all ranks of its host, which then give nothing; only with "sync"."""


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
    one_server: bool = False
    """Whether the whole table lies on one server."""
    delta_form: bytes = b""
    """How new weights come back: msgpack of the `Codec.spec()` of their changes; empty: as they are."""


(
    WANTS_WEIGHTS,
    VETOES,
    ASSIGNS,
    HAS_JOINED,
    WANTS_DELTA,
    WANTS_HALF,
    DISCARD_EAGER,
    MAPS_WEIGHTS,
    KNOWS_PLACES,
    ANNOUNCES,
    MAY_CHANGE,
) = (1 << at for at in range(11))
ALL_FLAGS = (1 << 11) - 1
"""Flags of a commit.

WANTS_WEIGHTS: it is answered with the new weights. VETOES: this rank's gradients are not finite, so the round ends
without an update, on every server and for every rank. ASSIGNS: the lowest rank's values replace the weights and no
optimizer runs; every rank must say so. HAS_JOINED: this rank has no more data, and contributes nothing until all ranks
have said so. WANTS_DELTA: only what has changed since its version is wanted: rows, or changes in the table's form.
WANTS_HALF: new weights may come as bfloat16. ANEW: slices of generation 0, which this rank pushed before it knew what
it would give, do not count. MAPS_WEIGHTS: of slices that this worker can map it only wants to know where they are; in
synchronous rounds. KNOWS_PLACES: it still maps all slices that ever have a place, where these were. ANNOUNCES: this
commits nothing; it says what the commit will say, and which generations of slices will not be replaced: those that its
pushes name, which bring no bytes, and one generation for all others. It is not answered by itself. MAY_CHANGE: so far
that is only to be expected, because the rank still computes; another announcement, or the commit, says what is so."""

PART = 32
"""A part of a slice is named by the slot and, from this bit on, by the element of the slice before which it ends."""
PUSH_WORDS, COMMIT_WORDS, PART_WORDS, PLACE_WORDS = 4, 6, 4, 3
STILL = -1
"""The place of slices that are where they were."""


def place_of(word: int) -> tuple[int, int]:
    """Return the slot of a record, and the element before which its part ends; 0: it means all."""
    return word & (1 << PART) - 1, word >> PART


def matrix(rows: Sequence[Sequence[int]], words: int) -> Matrix:
    """Make a matrix of rows of so many numbers, of which there may be none."""
    return np.array(rows, np.int64).reshape(-1, words)


NO_PARTS, NO_PLACES = matrix((), PART_WORDS), matrix((), PLACE_WORDS)


@dataclass(slots=True, eq=False)
class Contribute:
    """Slices of a rank for open rounds, and rounds to which it has given all it will.

    Without commits it is not answered. Commits are answered when their rounds are over.
    """

    pushes: Matrix
    """(slot, round, generation, bytes) of each slice. A part of one, see `PART`, comes by itself, in order."""
    payloads: tuple[Tensor, ...]
    """Flat: the bytes of the slices in this order, each in one of them: whole slots with their padding, unless there is
    a `form`."""
    commits: Matrix
    """(table, round, slices given, sum of their generations, version, flags) of each round.

    By the two sums a server knows if it lacks one of the slices. The version is that of the weights that this rank
    computed with; -1 where it has none of this server."""
    form: bytes = b""
    """How the payloads are to be read, if not as plain numbers: msgpack of `Codec.spec()` or of {"type": "rows"}."""
    hyper: bytes = b""
    """msgpack of the hyper-parameters from this round on; empty when nothing changed."""
    absent: tuple[tuple[int, int], ...] = ()
    """(table, key by index) of what this rank leaves out of these rounds."""
    rescale: float | None = None
    """Factor of this contribution in the sum; None means the optimizer's own rescale_grad."""
    timeout: float = 600.0
    """Seconds that this rank is ready to wait for the others."""
    hold: float = 0.0
    """Above 0: the sums are kept and their partial norms of this type are told, until a Resolve says what becomes of
    them."""


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
    """Asks for some rows of a key, as many as fit into a message; answered by Weights, one part with their values.

    Rows of keys that follow side by side count as those of the key.
    """

    table: int
    key: int
    """By index."""
    ids: bytes
    """int64, distinct and ascending, counted from the first row of the key on this server."""
    timeout: float


@dataclass(frozen=True, slots=True)
class ShowRows:
    """Asks where the slices of row-sparse keys of a table are; answered by Weights, with the places of those that can
    be mapped."""

    table: int


@dataclass(frozen=True, slots=True)
class SetOptimizer:
    """Names the optimizer of the namespace; all ranks that set one must set the same."""

    spec: bytes
    """msgpack of `Optimizer.spec()`."""


@dataclass(frozen=True, slots=True)
class Gather:
    """Waits for all ranks of the namespace at one barrier, where each gives bytes.

    Those that read get the bytes of all.
    """

    sequence: int
    timeout: float
    data: bytes = b""
    reads: bool = True


@dataclass(frozen=True, slots=True)
class GetState:
    """Asks for the optimizer state of one slice; answered by State."""

    table: int
    index: int


@dataclass(frozen=True, slots=True)
class SliceState:
    """The optimizer state of a slice: as a request it replaces the state, as a reply it answers GetState."""

    table: int
    index: int
    summary: Mapping[str, Any]
    """Numbers, and the names and sizes of the tensors in `data`; see `optimizer.state`."""
    data: bytes


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """Says that this rank is alive; the answer, Pending, says the same of the server."""

    report: bytes = b""
    """msgpack of what the process tells about itself, name → number; empty: what it told last still holds."""


@dataclass(frozen=True, slots=True)
class GetStatus:
    """Asks, in no session, for what a server does; answered by Info."""


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
    """Tells the server to record what it does for this namespace, or asks for that."""

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


@dataclass(frozen=True, slots=True)
class Welcome:
    """Answers Hello."""

    run: int
    session: int
    spread_from: int = 0
    """As of EngineConfig; the least of all servers counts."""


@dataclass(frozen=True, slots=True)
class Registered:
    """Answers Register; `next_round` is above 0 when the table lives on from an earlier process.

    Without synchronous rounds the worker goes on with the greatest number that a server says.
    """

    table: int
    slot: int
    """The number of its first slice there; the others follow in the order of the Plan."""
    next_round: int


WHOLE, ROWS, VALUES, HALF, DELTA = range(5)
"""What the payload of a part is: the whole slice; rows that changed, as `rows` packs them, of as many slices as it says
(empty where none changed in any slice that the key has there); just the values of the rows that were asked for; the
whole slice, of a wider type, rounded to bfloat16; or changes of the slice since the worker's version, one behind the
other, encoded as the table's `delta_form` says."""


@dataclass(slots=True, eq=False)
class Weights:
    """Answers commits that wanted weights, a Pull or PullRows; with places alone, ShowRows."""

    parts: Matrix
    """(slot, version, kind, bytes) of each slice, or of a part of one, see `PART`; the version is the number of updates
    that went into its table."""
    payloads: tuple[Tensor, ...]
    """Flat: the bytes of the parts in this order, each in one of them: plain numbers where the kind is WHOLE."""
    zero_copy: bool = False
    """Nothing of this changes before the worker contributes again, so that it may be read where it lies. Not sent."""
    places: Matrix = field(default_factory=lambda: NO_PLACES)
    """(slot, version, place) of each slice that a worker maps: where in which of the server's memories it begins.

    For a worker that knows the places one slice of each table stands for all that have one, with the place STILL."""


@dataclass(slots=True, eq=False)
class Done:
    """Answers commits of rounds that were applied: ahead of the weights, or alone where none were wanted."""

    rounds: Matrix
    """(table, round, version) each; the version is that of the weights right after it."""


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
    """Comes before the Weights or Done of a round that left keys out. No rank gave any of these (by index)."""

    table: int
    round: int
    keys: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Vetoed:
    """Comes before the Done of a round that was not applied. Some ranks had gradients that are not finite.

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
    """Refuses a commit of which slices never arrived: send again what was given of these, then commit again."""

    table: int
    round: int
    slots: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Pending:
    """Answers a Heartbeat, and a repeated commit or Gather that still waits: the server is alive."""

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
class Gathered:
    """Answers Gather: the bytes of all ranks, in rank order; nothing where they are not read."""

    parts: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Status:
    """Answers a control request; may be empty."""

    values: Mapping[str, Any] = field(default_factory=dict)


RequestBody: TypeAlias = (
    Hello
    | Register
    | Contribute
    | Resolve
    | Abort
    | Pull
    | PullRows
    | ShowRows
    | SetOptimizer
    | Gather
    | GetState
    | SliceState
    | Heartbeat
    | GetStatus
    | Leave
    | Stats
    | Command
    | Profile
    | JoinJob
    | Listening
)

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
    | Gathered
    | Status
    | SliceState
)


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
