"""What a worker knows of its tables: numbers on the servers, next rounds, versions of weights, residuals of
compression.

The facts are arrays over the index of the table, and by server where they differ (`Tables`), so that a round of
thousands of tables reads and advances them with a few operations. `RemoteTable` is a view of one of them.

Error feedback: what a compressed gradient does not say stays behind as a residual and is added to the next gradient.
A residual moves on only when the round was applied, because of a failed round nothing was used. `Compressor` does
this for one table, slice by slice.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from kvstore_server.codec import Codec, torch_dtype
from kvstore_server.engine.views import MemberView
from kvstore_server.errors import KVStoreError
from kvstore_server.plan import Plan, Slice
from kvstore_server.protocol import messages as m
from kvstore_server.protocol.frames import pack_control
from kvtrainer.states.surviving_memory import SurvivingVersions, Version

Place = TypeVar("Place", bound=Hashable)


class Residuals(Generic[Place]):
    """The residuals of applied rounds by place, and those that the present round would leave, in memory that is used
    again.
    """

    def __init__(self, codec: Codec) -> None:
        self.kept: dict[Place, Tensor] = {}
        self.following: dict[Place, Tensor] = {}
        """What replaces them if the round is applied."""
        self._codec = codec
        self._spare: dict[Place, Tensor] = {}

    def pair(self, place: Place, numel: int, dtype: str) -> tuple[Tensor, Tensor] | tuple[None, None]:
        """Return a gradient's residual, zeros at first, and memory for the next; None if the codec loses nothing."""
        kind = self._codec.residual_dtype(dtype)
        if kind is None:
            return None, None
        kept, spare = self.kept.get(place), self._spare.pop(place, None)
        if kept is None or spare is None:
            with torch.inference_mode(False):  # it outlives the call
                kept = torch.zeros(numel, dtype=kind, device="cpu") if kept is None else kept
                spare = torch.empty_like(kept) if spare is None else spare
        return kept, spare

    def accept(self, place: Place) -> None:
        if place in self.kept:
            self._spare[place] = self.kept[place]
        self.kept[place] = self.following.pop(place)

    def forget(self, kept: Collection[Place] = ()) -> None:
        """Drop the next residuals, except for some, because the round did not count."""
        for place in self.following.keys() - kept:
            self._spare[place] = self.following.pop(place)


class Compressor:
    """The codec of one table, and its residuals, which start at zero."""

    def __init__(self, codec: Codec, plan: Plan) -> None:
        self.codec = codec
        self.packed_codec = pack_control(codec.spec())
        self._plan = plan
        self._residuals = Residuals[int](codec)
        self._bytes: dict[int, Tensor] = {}
        """Slice (by index) → its bytes in the present round."""
        self._read: dict[int, Tensor] = {}
        """Slice (by index) → bytes that servers have read: memory for the next round."""
        self.survivors: SurvivingVersions | None = None
        """Where residuals are stored too, so that they outlive the process; None if they need not."""

    def encode(
        self,
        values: Mapping[str, Tensor],
        slices: Sequence[Slice],
        absent: frozenset[int],
        kept: Collection[int] = (),
    ) -> dict[int, Tensor]:
        """Compress slices of flat arenas; residuals stay as they are until `accept`.

        The residual of a key that is `absent` does not move at all. The bytes may be overwritten once the round was
        applied and another one is encoded.

        Args:
            kept: Slices (by index) whose eager push counts: they are not encoded again.

        Raises:
            NonFiniteGradientError: a gradient is infinite or not a number; nothing has changed.
        """
        self._residuals.forget(kept)
        found = {place: self._bytes[place] for place in kept}
        for slice_ in slices:
            if slice_.index not in found:
                grad = values[slice_.dtype][slice_.offset : slice_.offset + slice_.used]
                found[slice_.index] = self._encode(grad, slice_, absent)
        self._bytes = found
        return dict(found)

    def encode_eagerly(self, grad: Tensor, slice_: Slice) -> Tensor:
        self._bytes[slice_.index] = self._encode(grad, slice_, frozenset())
        return self._bytes[slice_.index]

    def has_encoded(self, index: int) -> bool:
        return index in self._bytes

    def begin(self) -> None:
        self._residuals.forget()
        self._bytes = {}

    def accept(self) -> None:
        for place in list(self._residuals.following):
            self._residuals.accept(place)
        if self.survivors is not None:
            self.survivors.accept()
        self._read |= self._bytes
        self._bytes = {}

    def reject(self) -> None:
        """Leave the residuals as they were, because the round has changed nothing."""
        if self.survivors is not None:
            self.survivors.drop()

    def store(self, round_: int) -> None:
        """Let the residuals after a round, which was encoded and not sent, outlive the process, if they are to."""
        if self.survivors is not None:
            self.survivors.write(round_, _by_name({**self._residuals.kept, **self._residuals.following}))

    def begin_to_store(self, survivors: SurvivingVersions, round_: int) -> None:
        """Store the present residuals, and from now on those of each round; they hold before a round."""
        survivors.begin(round_, _by_name(self._residuals.kept))
        self.survivors = survivors

    def go_on_with(self, survivors: SurvivingVersions, found: Version) -> None:
        """Take the residuals that an earlier process has stored, and store those of the coming rounds."""
        fresh = Residuals[int](self.codec)
        fresh.kept = {int(name): residual for name, residual in found.tensors.items()}
        self._residuals, self._bytes, self.survivors = fresh, {}, survivors

    def residuals(self) -> dict[int, Tensor]:
        found: dict[int, Tensor] = {}
        for slice_ in self._plan.slices:
            kept = self._residuals.kept.get(slice_.index)
            if kept is None:
                continue
            for segment in slice_.segments:
                spec = self._plan.specs[segment.key]
                whole = found.setdefault(segment.key, torch.zeros(spec.numel, dtype=kept.dtype, device="cpu"))
                part = kept[segment.start : segment.start + segment.numel]
                whole[segment.key_start : segment.key_start + segment.numel] = part
        return {key: whole.view(self._plan.specs[key].shape) for key, whole in found.items()}

    def set_residuals(self, residuals: Mapping[int, Tensor]) -> None:
        """Replace all residuals; a key without an entry starts at zero."""
        fresh = Residuals[int](self.codec)
        for slice_ in self._plan.slices:
            kept, _ = fresh.pair(slice_.index, slice_.used, slice_.dtype)
            if kept is None or not self._plan.is_resident(slice_):
                continue
            for segment in slice_.segments:
                whole = residuals.get(segment.key)
                if whole is not None:
                    part = whole.reshape(-1)[segment.key_start : segment.key_start + segment.numel]
                    kept[segment.start : segment.start + segment.numel] = part
            fresh.kept[slice_.index] = kept
        self._residuals, self._bytes = fresh, {}

    def _encode(self, grad: Tensor, slice_: Slice, absent: frozenset[int]) -> Tensor:
        out = self._read.pop(slice_.index, None)
        if out is None:
            out = torch.empty(
                self.codec.encoded_nbytes(slice_.used, slice_.dtype), dtype=torch.uint8, device="cpu"
            )
        residual, following = self._residuals.pair(slice_.index, slice_.used, slice_.dtype)
        self.codec.encode(grad, residual, out, following)
        if residual is None or following is None:
            return out
        for segment in slice_.segments:
            if segment.key in absent:
                part = slice(segment.start, segment.start + segment.numel)
                following[part] = residual[part]
        self._residuals.following[slice_.index] = following
        return out


def _by_name(residuals: Mapping[int, Tensor]) -> dict[str, Tensor]:
    return {str(place): residual for place, residual in residuals.items()}


class Takeover(NamedTuple):
    """What servers know of this rank if an earlier process of it has taken part in a table's rounds."""

    committed: Mapping[int, int]
    """Server → the last round that the rank has committed there; -1 for none."""
    client_states: Mapping[int, Sequence[bytes]]
    """Server → the latest two `client_state`s that the rank's commits brought there; first -1 → those of another rank,
    if this one has joined."""

    @property
    def first(self) -> int:
        """The last round that the rank has committed on every server."""
        return min(self.committed.values())

    @property
    def is_partial(self) -> bool:
        """Whether the next one was committed on some servers only."""
        return max(self.committed.values()) > self.first


class RemoteTable:
    """One table as this worker sees it: a view of the arrays of `Tables`."""

    def __init__(self, name: str, plan: Plan, index: int, tables: Tables) -> None:
        self.name = name
        self.plan = plan
        self.index = index
        self._compressor: Compressor | None = None
        self.takes_half = False
        """Whether the weights here are those of the servers, rounded to bfloat16."""
        self.takeover: Takeover | None = None
        """What an earlier process of this rank has done; None if there was none, or it was not asked for."""
        self.view: MemberView | None = None
        """The members of the next round, if these may change."""
        self.is_member = True
        """Whether this rank was one when it declared the table."""
        self.delta_codec: Codec | None = None
        """How changes of weights are encoded; None if weights come as they are."""
        self.followed: dict[int, tuple[int, Tensor]] = {}
        """Slice (by index) → the version and the weights that its next changes are added to, with padding."""
        self._tables = tables
        self._repeated = -1
        """The round of `repeat`."""
        self._at: dict[int, int] | None = None
        """Slice → its position among those of its server; made when it is needed."""

    def __repr__(self) -> str:
        state = "initialised" if self.is_initialised else "not initialised"
        broken = f", broken by {type(self.broken).__name__}" if self.broken is not None else ""
        where = f"next round {self.round}, {state}, numbers {self.numbers}"
        return f"<{type(self).__name__} {self.name!r}, {where}{broken}>"

    @torch.inference_mode(False)
    def new_arenas(self) -> dict[str, Tensor]:
        """Allocate zeros for all values that are not row-sparse, laid out by the plan."""
        sizes = self.plan.resident_sizes
        return {
            dtype: torch.zeros(size, dtype=torch_dtype(dtype), device="cpu") for dtype, size in sizes.items()
        }

    @property
    def compressor(self) -> Compressor | None:
        """How this rank's contributions are compressed; None if they are not."""
        return self._compressor

    @compressor.setter
    def compressor(self, compressor: Compressor | None) -> None:
        self._compressor = compressor
        self._tables.num_changes += 1

    @property
    def round(self) -> int:
        return int(self._tables.round[self.index])

    @property
    def is_initialised(self) -> bool:
        """Whether a round was applied yet; the first one that is gives the initial values."""
        return bool(self._tables.is_initialised[self.index])

    @property
    def numbers(self) -> dict[int, int]:
        return _numbers_by_server(self._tables.number[:, self.index])

    @property
    def versions(self) -> dict[int, int]:
        """Server → the version of its weights that this worker computes with."""
        return _numbers_by_server(self._tables.version[:, self.index])

    @property
    def staleness(self) -> int:
        """How many updates came between the last contribution and its weights, at most on any server."""
        return int(self._tables.staleness[self.index])

    @property
    def broken(self) -> KVStoreError | None:
        """The error of every call with this table; None as long as its servers agree on the last round."""
        return self._tables.broken.get(self.index)

    def stands(self, round_: int) -> bool:
        """Return whether a round of this worker may be applied elsewhere, whatever happened here."""
        return self.round > round_ and self._tables.failed.get(self.index) != round_

    def slot_of(self, slice_: Slice) -> int:
        if self._at is None:
            self._at = {
                p.index: at
                for server in self.plan.servers
                for at, p in enumerate(self.plan.slices_of(server))
            }
        return int(self._tables.slot[slice_.server, self.index]) + self._at[slice_.index]

    def register(self, server: int, registered: m.Registered) -> None:
        self._tables.number[server, self.index] = registered.table
        self._tables.slot[server, self.index] = registered.slot

    @property
    def coordinator(self) -> int:
        """The server that decides about the members, if these may change."""
        return self.plan.servers[0]

    def record_membership(self, told: m.Members) -> None:
        """Record since when this rank is a member, and where it begins if no process of it has taken part since then.

        Then it begins with what another rank has left for its successor.
        """
        assert self.takeover is not None
        self.view = MemberView(told.view, told.ranks, told.num_backup)
        committed = {server: max(one, told.since - 1) for server, one in self.takeover.committed.items()}
        states = {-1: told.client_states, **self.takeover.client_states}
        self.takeover = Takeover(committed, states)

    def follow(self, told: m.LeftOut) -> None:
        """Go on with the open round of the others, after a round without this rank."""
        self.view = MemberView(told.view, told.members, told.num_backup)
        self.resume(told.round, True)

    def record_takeover(self, server: int, registered: m.Registered) -> None:
        """Record what a server says of an earlier process of this rank."""
        known = self.takeover or Takeover({}, {})
        committed = registered.next_round - (not registered.has_committed)
        self.takeover = Takeover(
            {**known.committed, server: committed}, {**known.client_states, server: registered.client_states}
        )

    def take_over(self, is_sync: bool) -> None:
        """Go on where the earlier process of this rank has ended, according to what all servers have said."""
        assert self.takeover is not None
        if max(self.takeover.committed.values()) < 0:
            self.takeover = None
        elif is_sync and not self.takeover.is_partial:
            self.resume(self.takeover.first, True)  # its commit is repeated, to wait for its end
        else:
            self.resume(self.takeover.first + 1, self.takeover.first >= 0)

    def lose_commit(self) -> None:
        """Go on before the last round of the earlier process, because a server has lost that commit."""
        assert self.takeover is not None
        committed = {server: number - 1 for server, number in self.takeover.committed.items()}
        self.takeover = self.takeover._replace(committed=committed)
        if self.takeover.first < 0:
            self.takeover = None
        self.resume(self.round, self.takeover is not None)

    def repeat(self) -> None:
        """Read rows as they were when the next round began, until it is given: some servers may have applied it."""
        self._repeated = self.round

    @property
    def is_repeated(self) -> bool:
        """Whether an earlier process of this rank has given the next round to some servers."""
        return self._repeated == self.round

    def resume(self, round_: int, is_initialised: bool) -> None:
        self._tables.round[self.index] = round_
        self._tables.is_initialised[self.index] = is_initialised

    def record_version(self, server: int, version: int) -> None:
        self._tables.version[server, self.index] = version

    def forget_held(self) -> None:
        """Have all weights sent again: the arena may not hold those of the last round."""
        self._tables.held[:, self.index] = -1


class Tables:
    """Facts about all tables, as arrays over their index; those of two dimensions by server and index."""

    def __init__(self, num_servers: int) -> None:
        self.all: list[RemoteTable] = []
        self.round = np.zeros(0, np.int64)
        self.staleness = np.zeros(0, np.int64)
        self.is_initialised = np.zeros(0, np.bool_)
        self.number = np.zeros((num_servers, 0), np.int64)
        """The table's number there; -1 where it has no slices."""
        self.slot = np.zeros((num_servers, 0), np.int64)
        """The number of its first slice there."""
        self.version = np.zeros((num_servers, 0), np.int64)
        """Version of the weights that this worker computes with; -1 for none."""
        self.newest = np.zeros((num_servers, 0), np.int64)
        """Version of the weights after this worker's last round, or of newer ones that came; -1 if unknown."""
        self.held = np.zeros((num_servers, 0), np.int64)
        """Version of the weights in the arena that kept contributions write to."""
        self.num_changes = 0
        """How often it has changed how gradients of a table are sent."""
        self.broken: dict[int, KVStoreError] = {}
        self.full: dict[int, str] = {}
        """Table (index) → why a server may have no room for new rows of the next round."""
        self.failed: dict[int, int] = {}
        """Table (index) → its last round that servers are known to have failed."""

    def add(self, name: str, plan: Plan) -> RemoteTable:
        """Add a table in round 0, without a number, slots or versions on any server, and return it."""
        table = RemoteTable(name, plan, len(self.all), self)
        # `held` grows last. If an interrupt comes before, all arrays grow again.
        if self.held.shape[1] <= table.index:
            more = max(16, table.index)
            self.round, self.staleness = (
                np.append(a, np.zeros(more, np.int64)) for a in (self.round, self.staleness)
            )
            self.is_initialised = np.append(self.is_initialised, np.zeros(more, np.bool_))
            none = np.full((len(self.number), more), -1)
            self.number, self.slot, self.version, self.newest, self.held = (
                np.append(a, none, axis=1)
                for a in (self.number, self.slot, self.version, self.newest, self.held)
            )
        self.all.append(table)
        return table


def _numbers_by_server(by_server: Any) -> dict[int, int]:
    return {server: number for server, number in enumerate(by_server.tolist()) if number >= 0}
