"""The messages between workers and servers, as plain values.

A round of one table, seen from a worker:

    Contribute           slices, each with a generation (a higher one replaces a lower one), and with the last of them
    a
                         commit; after it, slices cannot be replaced any more
    Weights or Done      sent once every member has committed and the round was applied
    Failed               or: the round failed, with the same error for every member

If every member has declared its commit before giving its slices, Weights of some slices are sent while others are
still on their way. If the round is rolled back, they are sent again with a higher version.

If the commits ask for it, the round is held: the sum is measured, and applied after a decision.

    Held                 once every member has committed: partial norms of the slices on this server
    Resolve              each member's decision from the partial norms of all servers; the first one counts

A contribution is identified by (namespace, rank, table, round, slice): repeating it has no effect. The session says
who sends: a newer process of the same rank fences the older one. Round 0 initialises a table; only rank 0's values
count.

A server numbers the tables of a namespace and all slices of them that it has, their *slots*. Whatever concerns many
tables or slices is one matrix with a row for each. `frames` defines the encoding.
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
"""The most sockets of one session."""
MAX_CLIENT_STATE = 64 << 10
"""The most bytes of a `client_state`."""


@dataclass(frozen=True, slots=True)
class Hello:
    """Opens a session: one rank of one namespace on one server. A repeated Hello gets the same session."""

    namespace: str
    rank: int
    num_workers: int
    server: int
    num_servers: int
    capability: str
    """Instruction set of the worker's CPU. Results are bit-identical only between equal ones."""
    address: str
    """`host:pid`, for error messages."""
    nonce: bytes
    """Random, per process: identifies a repeated Hello."""
    sockets: tuple[bytes, ...]
    """Routing ids, also random, of all sockets that may send in this session."""
    mode: str = "sync"
    """The consistency mode: "sync", "async" or "ssp"; the same for all ranks of the namespace."""
    staleness: int = 0
    """With "ssp": by how many updates a rank may be ahead of the slowest one."""
    slow_down: bool = False
    """Whether the learning rate of a contribution is divided by its staleness; not with "sync"."""
    by_host: bool = False
    """Whether one rank may give the sum of all ranks of its host, and the others nothing; only with "sync"."""
    resumes: bool = False
    """Whether another process can take this rank over and continue, so that the others wait for it."""
    restarts: int = 0
    """How often the process was started again, as far as its launcher says."""
    initial_workers: int = 0
    """Above 0: the members may change. The ranks below this begin, others may join later, up to `num_workers`."""
    min_workers: int = 0
    """If the members may change: how many at least must be left."""
    backup_workers: int = 0
    """If the members may change: how many of them a round leaves out, the slowest ones."""


@dataclass(frozen=True, slots=True)
class Register:
    """Declares a table: its keys, from which both sides derive the same plan.

    Answered by Registered; while the server needs more keys, by Status with the number of "keys" that it has.
    """

    table: str
    specs: tuple[tuple[str, tuple[int, ...], str, int, bool], ...]
    """(key, shape, dtype, group, is row-sparse) of each key, or of some of them."""
    whole_keys: bool
    """Whether every key is on a single server."""
    first: int = 0
    """The index of the first of these keys in the table."""
    total: int = -1
    """How many keys the table has; -1: these."""
    digest: str = ""
    """The plan's digest; a server that has a table with the same one needs no keys."""
    one_server: bool = False
    """Whether the whole table is on one server."""
    delta_encoding: bytes = b""
    """The encoding of new weights: msgpack of the `Codec.spec()` of their changes; empty: plain."""


(
    WANTS_WEIGHTS,
    VETOES,
    ASSIGNS,
    HAS_JOINED,
    WANTS_DELTA,
    WANTS_HALF,
    DISCARD_EAGER,
    MAPS_WEIGHTS,
    LOCATIONS_CACHED,
    DECLARES_INTENT,
    TENTATIVE,
    REPEATS,
    FOLLOWS,
) = (1 << at for at in range(13))
ALL_FLAGS = (1 << 13) - 1
"""Flags of a commit.

WANTS_WEIGHTS: answer with the new weights. VETOES: this rank's gradients are not finite, so the round ends without an
update, on every server and for every rank. ASSIGNS: the lowest rank's values replace the weights and no optimizer
runs; every rank must set it. HAS_JOINED: this rank has no more data, and contributes nothing until all ranks have
joined. WANTS_DELTA: send only what has changed since this rank's version: rows, or changes as the table encodes them.
WANTS_HALF: new weights may be sent as bfloat16. DISCARD_EAGER: ignore slices of generation 0, which this rank pushed
before it knew what it would give. MAPS_WEIGHTS: this worker maps weights; send only the locations of slices that
can be mapped (synchronous rounds). LOCATIONS_CACHED: it still maps all slices that ever had one, where it was told.
DECLARES_INTENT: this is not a commit but declares one in advance, with the generations of slices that will not be
replaced: the slices named by its pushes, which bring no bytes, and one generation for all others. It is not answered.
TENTATIVE: the declaration is tentative, because the rank still computes; another one, or the commit, replaces it.
REPEATS: a commit that an earlier process of this rank has made is asked about; it is never accepted as a new one.
FOLLOWS: with backup workers; this is not a commit but asks for the present weights, as soon as this round is over. The
answer is LeftOut, and the weights.
"""

PART = 32
"""A part of a slice is named by the slot and, from this bit on, the element of the slice at which it ends
(exclusive).
"""
PUSH_WORDS, COMMIT_WORDS, PART_WORDS, LOCATION_WORDS = 4, 6, 4, 3
# The columns of `Contribute.pushes` and `commits`, and of `Weights.parts` and `locations`.
PUSH_SLOT, PUSH_ROUND, PUSH_GENERATION, PUSH_NBYTES = range(PUSH_WORDS)
COMMIT_TABLE, COMMIT_ROUND, COMMIT_COUNT, COMMIT_GENERATIONS, COMMIT_VERSION, COMMIT_FLAGS = range(6)
PART_SLOT, PART_VERSION, PART_KIND, PART_NBYTES = range(PART_WORDS)
LOCATION_SLOT, LOCATION_VERSION, LOCATION_PLACE = range(LOCATION_WORDS)
SAME_LOCATION = -1
"""Stands for the known location of slices that have not moved."""


def unpack_slot(word: int) -> tuple[int, int]:
    """Return the slot of a record, and the element at which its part ends; 0 for the whole slice."""
    return word & (1 << PART) - 1, word >> PART


def matrix(rows: Sequence[Sequence[int]], words: int) -> Matrix:
    """Return a matrix with rows of `words` numbers; there may be no rows."""
    return np.array(rows, np.int64).reshape(-1, words)


NO_PARTS, NO_LOCATIONS = matrix((), PART_WORDS), matrix((), LOCATION_WORDS)


@dataclass(slots=True, eq=False)
class Contribute:
    """Slices of a rank for open rounds, and the rounds that the rank commits.

    Without commits it is not answered. Commits are answered when their rounds are over.
    """

    pushes: Matrix
    """(slot, round, generation, bytes) of each slice. A part of a slice, see `PART`, is sent alone, and in order."""
    payloads: tuple[Tensor, ...]
    """Flat: the bytes of the slices in order, each within one payload: whole slots with their padding, unless there is
    an `encoding`.
    """
    commits: Matrix
    """(table, round, slices given, sum of their generations, version, flags) of each round.

    The count and the sum tell a server whether a slice is missing. The version is that of the weights that this rank
    computed with; -1 if it has none of this server.
    """
    encoding: bytes = b""
    """The encoding of the payloads: msgpack of `Codec.spec()` or of {"type": "rows"}; empty: plain numbers."""
    hyper: bytes = b""
    """msgpack of the hyper-parameters from this round on; empty if unchanged."""
    absent: tuple[tuple[int, int], ...] = ()
    """(table, key by index) of what this rank leaves out of these rounds."""
    rescale: float | None = None
    """Factor of this contribution in the sum; None: the optimizer's rescale_grad."""
    timeout: float = 600.0
    """Seconds that this rank waits for the others."""
    hold: float = 0.0
    """Above 0: hold the sums and send their partial norms of this type, until a Resolve decides."""
    client_state: bytes = b""
    """What a process that takes this rank over needs to continue after these rounds, up to `MAX_CLIENT_STATE` bytes."""
    view: int = -1
    """If the members may change: the number of the view with which this rank commits."""
    members: tuple[int, ...] = ()
    """The ranks of that view."""
    num_backup: int = 0
    """How many of them each round leaves out."""
    closes: bool = False
    """Whether it is the view of this round alone, of the ranks with which the coordinator has closed it."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A request about the snapshots of this worker's job; answered by Status.

    action "list" asks what the server holds of the job, and to which rounds it can go back. "restore" lets it go back
    to one of these, or to the beginning; the first of several ranks that ask for the same one counts.

    "cut" asks for a snapshot of the present state, between two rounds of the worker with rank 0.

    "save" asks it to save the present state under a tag, and whether it has; "keep" removes what was saved under the
    tag before, "drop" removes what was saved. "find" asks what can be loaded, "check" whether it is as it was saved;
    "restore" with a tag loads it.
    """

    action: str
    round: int = 0
    """To go back to; 0: to the beginning. Or how many rounds have ended in the state that is written."""
    generation: int = 0
    """How often the job will have gone back then; a server that has gone back as often changes nothing."""
    has_tables: bool = True
    """Whether the server has a part of the job's tables, and so of the snapshot."""
    tag: str = ""
    """The name of what is saved or loaded; empty for snapshots that servers take."""
    save: str = ""
    """Which save of that tag: 24 hexadecimal digits, ascending."""
    keep: tuple[int, ...] = ()
    """The rounds of the snapshots that are kept beside the next one; the server removes the others of the job."""


@dataclass(frozen=True, slots=True)
class Resolve:
    """Decides what happens to the sum of a held round; the first one counts, for all ranks.

    It is not answered; the commits are. After the round is over it has no effect.
    """

    table: int
    round: int
    coef: float
    """Factor of the sum."""
    clip_value: float | None
    """Then the limit of the magnitude of each element."""
    skip: bool
    """End the round without an update."""


@dataclass(frozen=True, slots=True)
class Abort:
    """This rank cannot finish a round: if it is still open, it fails for every member."""

    table: int
    round: int
    reason: str
    undo: bool
    """Undo the round if it was applied. Only for a round that another server has failed, so that no member can have
    finished it: otherwise a member that was sent the new weights would not learn that they are gone.
    """
    is_repeated: bool = False
    """The members may change, and the others make the round again: its error is a RepeatedRoundError for them."""


@dataclass(frozen=True, slots=True)
class Pull:
    """Requests the current weights of whole tables."""

    tables: tuple[int, ...]
    timeout: float = 600.0
    """Seconds to wait for ranks that are too far behind, with "ssp"."""
    round: int = -1
    """The weights as they were when this round began, for a process that repeats it; -1: the present ones."""


@dataclass(frozen=True, slots=True)
class PullRows:
    """Requests some rows of keys, as many as fit into a message; answered by Weights, one part with their values.

    The values are in the order of the request; those of a hash table are encoded as `rows.PulledRows`. Rows of a row
    group count as rows of its first key.
    """

    table: int
    keys: tuple[int, ...]
    """Indices of the keys; the same one may come again."""
    ids: tuple[bytes, ...]
    """For each key int64, distinct and ascending, counted from the first row of the key on this server."""
    held: tuple[bytes, ...]
    """For each key empty, or `rows.HeldRows`: which of the rows the worker has already."""
    timeout: float
    round: int = -1
    """As in `Pull`."""


@dataclass(frozen=True, slots=True)
class MapRows:
    """Requests the locations of a table's row-sparse slices; answered by Weights, with those that can be mapped."""

    table: int


@dataclass(frozen=True, slots=True)
class SetOptimizer:
    """Sets the optimizer of the namespace; all ranks that set one must set the same."""

    spec: bytes
    """msgpack of `Optimizer.spec()`."""


@dataclass(frozen=True, slots=True)
class Gather:
    """Waits for all ranks of the namespace at a barrier, where each gives bytes; ranks that read get all of them."""

    sequence: int
    timeout: float
    data: bytes = b""
    reads: bool = True


@dataclass(frozen=True, slots=True)
class GetState:
    """Requests the optimizer state of one slice; answered by SliceState."""

    table: int
    index: int
    since: int = 0
    """Of a hash table: a step; rows that were not updated after it are not sent, except for their numbers."""


@dataclass(frozen=True, slots=True)
class SliceState:
    """The optimizer state of a slice. As a request it replaces the state, as a reply it answers GetState."""

    table: int
    index: int
    summary: Mapping[str, Any]
    """Numbers, and the names and sizes of the tensors in `data`; see `optimizer.state`."""
    data: bytes
    history: int = 0
    """Of a slice of a hash table, which keeps this number while updates alone change it; 0 in a request: a new one."""


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """Says that this rank is alive; the answer, Pending, says the same of the server."""

    report: bytes = b""
    """msgpack of name → number that the process reports about itself; empty: unchanged."""


@dataclass(frozen=True, slots=True)
class GetStatus:
    """Requests the status of a server, without a session; answered by Status."""


@dataclass(frozen=True, slots=True)
class Leave:
    """Ends the session; rounds that still need this rank fail with the reason."""

    reason: str
    is_clean: bool
    """True if the worker has finished; otherwise it counts as dead from now on."""


@dataclass(frozen=True, slots=True)
class JoinRounds:
    """Asks the coordinator of a table to make this rank a member; answered by Members once it is one."""

    table: int
    timeout: float


@dataclass(frozen=True, slots=True)
class LeaveRounds:
    """Asks the coordinator of a table to go on without this rank from the open round on; answered by Status.

    Another server is told so that it does not wait for a new process of a rank that the coordinator has given up.
    """

    table: int


@dataclass(frozen=True, slots=True)
class CloseRound:
    """Tells another server with which ranks the coordinator has closed a round; it is not answered.

    Any rank may pass it on, because all of these may have died.
    """

    table: int
    round: int
    view: int
    """The number of the view."""
    ranks: tuple[int, ...]
    """Ascending."""


@dataclass(frozen=True, slots=True)
class Stats:
    """Requests the server's counters and the members of this namespace."""


@dataclass(frozen=True, slots=True)
class Command:
    """Calls a function that the server has loaded; answered by Status, once for each request number."""

    head: int
    """Which function."""
    body: bytes
    """Its argument, UTF-8."""


@dataclass(frozen=True, slots=True)
class Profile:
    """Controls the recording of what the server does for this namespace, or requests the recorded events."""

    action: str
    """"run", "stop", "pause", "resume", "fetch" or "finish"."""
    categories: tuple[str, ...] = ()
    """With "run": what to record."""
    start: int = 0
    """With "fetch": the number of the first event requested."""


@dataclass(frozen=True, slots=True)
class JoinJob:
    """Tells the scheduler of a job that a process is there; answered by Pending until it can begin, then by Status."""

    role: str
    """"server" or "worker"."""
    num_workers: int
    num_servers: int
    rank: int
    """The rank that the process must have; -1 for any."""
    task: int
    """Orders processes without a rank; -1 if the launcher gives no such number."""
    host: str
    """The host's name; orders the others, with the next two."""
    started: int
    """When the process was started there, in any unit."""
    pid: int
    machine: str
    """Equal for processes that reach each other on loopback."""


@dataclass(frozen=True, slots=True)
class Listening:
    """Tells the scheduler where a server of its job listens; answered by Pending until all do, then by Status."""

    address: str


@dataclass(frozen=True, slots=True)
class Welcome:
    run_id: int
    session: int
    spread_from: int = 0
    """See `EngineConfig`; the smallest of all servers counts."""
    restart_timeout: float = 0.0
    """Seconds that a worker waits for this server to be restarted with its state; 0: its state ends with it."""
    has_snapshots: bool = False
    """Whether this server writes snapshots, so that `Snapshot` says what it can go back to."""


@dataclass(frozen=True, slots=True)
class Registered:
    """Answers Register; `next_round` is above 0 if the table existed before this process.

    In asynchronous modes the worker continues with the largest number of all servers.
    """

    table: int
    slot: int
    """The number of the table's first slice on this server; the others follow in the order of the plan."""
    next_round: int
    has_committed: bool = False
    """Whether a former process of this rank has committed that round, which is open."""
    client_states: tuple[bytes, ...] = ()
    """What the rank's latest two commits with a `client_state` brought, in order; those that there were."""
    is_member: bool = True
    """Whether the rank takes part in the open round here, if the members may change."""


WHOLE, ROWS, VALUES, HALF, DELTA = range(5)
"""The contents of a part: WHOLE, the whole slice; ROWS, changed rows as packed by `rows`, of as many slices as it says
(empty if none changed in any slice of the key on this server); VALUES, only the values of the requested rows; HALF,
the whole slice rounded to bfloat16; DELTA, changes of the slice since the worker's version, one after the other,
encoded in the table's `delta_encoding`.
"""


@dataclass(slots=True, eq=False)
class Weights:
    """Answers commits that wanted weights, a Pull or PullRows; with locations only, MapRows."""

    parts: Matrix
    """(slot, version, kind, bytes) of each slice, or of a part of one, see `PART`. The version is the number of
    updates of its table.
    """
    payloads: tuple[Tensor, ...]
    """Flat: the bytes of the parts in order, each within one payload; plain numbers if the kind is WHOLE."""
    zero_copy: bool = False
    """Nothing of this changes before the worker contributes again, so it may be read in place. Not sent."""
    locations: Matrix = field(default_factory=lambda: NO_LOCATIONS)
    """(slot, version, location) of each mapped slice: where it begins, in which of the server's memories.

    For a worker that knows them, one slice of each table stands for all that have one, with SAME_LOCATION.
    """
    encoded: bytes | bytearray = b""
    """The first frame of the message, for a request of any number, if it is known already. Not sent."""


@dataclass(slots=True, eq=False)
class Done:
    """Answers commits of applied rounds: before the weights, or alone if none were wanted."""

    rounds: Matrix
    """(table, round, version) of each; the version is that right after the round."""


@dataclass(frozen=True, slots=True)
class Held:
    """Answers the commits of a held round: its sum is complete, and is applied after a Resolve.

    Sent again when a commit is repeated, also after the round was applied.
    """

    table: int
    round: int
    partials: tuple[tuple[int, float], ...]
    """(slice, partial norm) of every slice here that any rank contributed to; see `norms`."""
    is_finite: bool
    """Whether all their elements are."""


@dataclass(frozen=True, slots=True)
class Absent:
    """Precedes the Weights or Done of a round that left keys out: the keys (by index) that no rank gave."""

    table: int
    round: int
    keys: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Vetoed:
    """Precedes the Done of a skipped round: the ranks with non-finite gradients; empty if a Resolve skipped it."""

    table: int
    round: int
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Full:
    """Precedes the Weights or Done of a round after which this server may have no room for new rows of hash tables.

    No rank begins another round of the table: it could fail on this server, and be applied on others.
    """

    table: int
    round: int
    reason: str


@dataclass(frozen=True, slots=True)
class EffectiveOptions:
    """Precedes the Weights or Done of a rank that joined: the effective options, and whether joining is over."""

    table: int
    round: int
    hyper: bytes
    """msgpack, like a commit's; empty if no rank sent any."""
    is_over: bool
    """All ranks have joined: this round changed nothing, and all take part again from the next one on."""


@dataclass(frozen=True, slots=True)
class Members:
    """The members of a round, if they may change; only the coordinator of a table decides about them.

    Precedes the Weights or Done of a round and is then about the next one. Or it refuses a commit of that round,
    because the view has changed: commit again with this one. Or it answers JoinRounds. Or it closes a round: the other
    servers have to be told.
    """

    table: int
    round: int
    view: int
    """Its number."""
    ranks: tuple[int, ...]
    """Ascending."""
    since: int = 0
    """Answering JoinRounds: the first round that has this rank as a member."""
    client_states: tuple[bytes, ...] = ()
    """Answering JoinRounds: what another rank's latest commits before that round brought, in order."""
    num_backup: int = 0
    """How many of the ranks each round leaves out."""
    closes: bool = False
    """Whether they are the ranks of this round alone, which have committed it before the others."""


@dataclass(frozen=True, slots=True)
class LeftOut:
    """Answers a commit of a round that has ended without this rank, or one that FOLLOWS; precedes the present Weights.

    The weights are of one round if all servers name the same `round` and `applied`.
    """

    table: int
    round: int
    """The one that is open."""
    applied: int
    """The last one that was applied."""
    is_skipped: bool
    """Whether that one has changed nothing, because of a veto or a decision."""
    absent: tuple[int, ...]
    """The keys (by index) that no rank gave to it."""
    members: tuple[int, ...]
    """The ranks of the open round."""
    view: int
    """The number of their view."""
    num_backup: int
    """How many of them the open round leaves out."""
    closed_view: int = -1
    """From the coordinator: the number of the view with which it has closed the last round; -1: it has not."""
    closed_ranks: tuple[int, ...] = ()
    """The ranks of that view."""
    client_states: tuple[bytes, ...] = ()
    """From the coordinator: what the latest commits before the open round brought, of this rank or of another one that
    has made more rounds."""


@dataclass(frozen=True, slots=True)
class Missing:
    """Refuses a commit whose slices have not all arrived: send these slots again, then commit again."""

    table: int
    round: int
    slots: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Pending:
    """Answers a Heartbeat, and a repeated commit or Gather that still waits: the server is alive."""

    waiting_for: tuple[int, ...]
    """The first of the ranks waited for."""
    why: str = field(default="", compare=False)
    """For people: what waits for which ranks, and when those were last heard from; empty if nothing waits."""


@dataclass(frozen=True, slots=True)
class Failed:
    code: str
    text: str
    table: int = -1
    round: int = -1
    next_round: int = -1


@dataclass(frozen=True, slots=True)
class Gathered:
    """Answers Gather: the bytes of all ranks, in rank order; empty if they are not read."""

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
    | MapRows
    | SetOptimizer
    | Gather
    | GetState
    | SliceState
    | Snapshot
    | Heartbeat
    | GetStatus
    | Leave
    | JoinRounds
    | LeaveRounds
    | CloseRound
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
    | EffectiveOptions
    | Full
    | Members
    | LeftOut
    | Missing
    | Pending
    | Failed
    | Gathered
    | Status
    | SliceState
)


class Request(NamedTuple):
    """A message from a worker: the sender, and the number under which it expects the answer."""

    run_id: int
    """The server process that the worker expects; 0 in Hello."""
    session: int
    number: int
    body: RequestBody


class Reply(NamedTuple):
    """A message to a worker; `number` is that of the request that it answers."""

    number: int
    body: ReplyBody


class Outgoing(NamedTuple):
    peer: bytes
    reply: Reply
