"""Rounds whose messages repeat, on a server: what follows from their shape is kept.

In most rounds each rank sends one message, whose bytes are those of its last one but for the gradients and a few
numbers. A `CapturedBatch` has a template of the message of each rank. One that fits is neither decoded nor recorded: it
is kept unread until those of all ranks are here. Then the sum is applied, the tables go to the next round, and all are
answered by a `CapturedAnswer`, which has the first frame of the message but for versions.

Invariants:

- The result is that of the general path in `Engine`: the same checks have passed for the message from which a template
  was made, and the numbers that may differ are compared with the open round.
- Nothing sees a message that is unread. Before the engine handles anything else it reads those first (`Engine.handle`,
  `tick`, `stop`, `abandon`): they take the general path in the order in which they have come. A round in which only
  some messages fit is a general one.
- `CapturedBatch.finish` has the guard of all that a round depends on beside its messages. What changes it goes through
  the general path, so it is evaluated only if that has handled something since (`Engine.num_handled`).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from kvstore_server.engine.namespace import BatchUpdate, Namespace, TableBatch
from kvstore_server.engine.rounds import Ints, Waiter
from kvstore_server.errors import KVStoreError, ProtocolError
from kvstore_server.optimizer import Optimizer
from kvstore_server.protocol import messages as m
from kvstore_server.protocol.frames import (
    ContributeTemplate,
    Frame,
    WeightsTemplate,
    decode_extra,
    decode_frames,
    divided,
    encode_frames_and_payloads,
)
from kvstore_server.shard.reduction import RankContribution, Run

_log = logging.getLogger(__name__)

MAX_CAPTURED = 64
"""How many rounds of different tables are kept."""
_COUNTS, _FIRST_SLOT = slice(32, 48), slice(72, 80)
"""The bytes of a contribution's first frame with the numbers of slices and commits, and with the first slice."""
_FIXED_OF_PUSH = [m.PUSH_SLOT, m.PUSH_GENERATION, m.PUSH_NBYTES]
_FIXED_OF_COMMIT = [m.COMMIT_TABLE, m.COMMIT_COUNT, m.COMMIT_GENERATIONS, m.COMMIT_FLAGS]
"""The columns that are the same in each round."""
_NO_PUSHES, _NO_COMMITS = m.matrix((), m.PUSH_WORDS), m.matrix((), m.COMMIT_WORDS)

Key = tuple[bytes, bytes, bytes]


def key_of(peer: bytes, frames: Sequence[Frame]) -> Key:
    """Return what tells apart the messages of a peer that repeat: how many slices they have, and the first one."""
    head = memoryview(frames[0])
    return peer, bytes(head[_COUNTS]), bytes(head[_FIRST_SLOT])


class Noted(NamedTuple):
    """A message of a rank that took the general path, without its payload."""

    peer: bytes
    request: m.Request
    """Its body has no payloads."""
    nbytes: int
    """Of the payload."""


def note(peer: bytes, request: m.Request) -> Noted | None:
    """Return what is kept of a message to capture its round; None if it is not plain."""
    body = request.body
    assert isinstance(body, m.Contribute)
    if not (len(body.pushes) and len(body.commits)) or body.hold or _is_special(body):
        return None
    # The matrices are views of the message.
    own = m.Contribute(
        body.pushes.copy(), (), body.commits.copy(), rescale=body.rescale, timeout=body.timeout
    )
    return Noted(peer, request._replace(body=own), sum([one.nbytes for one in body.payloads]))


def _is_special(body: m.Contribute) -> bool:
    """Return whether there is more behind the commits than options and what a successor gets."""
    return bool(body.encoding or body.absent or body.view >= 0)


class CapturedMessage:
    """What a rank sends in each round, and its message of the open round, unread."""

    def __init__(self, rank: int, noted: Noted, space: Namespace) -> None:
        self.rank, self.peer, self.session = rank, noted.peer, noted.request.session
        body: Any = noted.request.body
        frames, _ = encode_frames_and_payloads(noted.request)
        self._template, self._nbytes = ContributeTemplate(frames[0]), noted.nbytes
        self.key = key_of(noted.peer, frames)
        self.flags, self._timeout = int(body.commits[0, m.COMMIT_FLAGS]), body.timeout
        # 1. Which rounds its numbers are of.
        slots = body.pushes[:, m.PUSH_SLOT]
        self.tables: Ints = body.commits[:, m.COMMIT_TABLE]
        self._push_tables = space.rounds.slots.table[slots]
        # 2. Where in the payload the gradients of neighbouring slices are.
        ends = np.cumsum(body.pushes[:, m.PUSH_NBYTES])
        order = np.argsort(slots)
        offsets = (ends - body.pushes[:, m.PUSH_NBYTES])[order]
        runs = space.rounds.slots.divide(slots[order], offsets)
        begin_of = dict(zip(slots.tolist(), (ends - body.pushes[:, m.PUSH_NBYTES]).tolist(), strict=True))
        # The padding of a run's last slot is left out, so that a sum need not cut it off.
        self._runs = [
            (
                first,
                end,
                space.dtype_of(first),
                begin_of[first],
                nbytes - space.shard.storage.padding_of(end - 1),
            )
            for first, end, nbytes in runs
        ]
        sizes = np.bincount(self._push_tables, body.pushes[:, m.PUSH_NBYTES]).astype(np.int64)
        self.received = [(number, int(sizes[number])) for number in np.flatnonzero(sizes).tolist()]
        # 3. The message of the open round, what is behind its commits, and when it has come.
        self.extra: m.Contribute | None = None
        self.frames: Sequence[Frame] | None = None
        self.number = 0
        self.since = 0.0

    def is_of(self, noted: Noted) -> bool:
        """Return whether a message of the rank that took the general path was like those that are taken here."""
        body: Any = noted.request.body
        return (
            (noted.peer, noted.request.session, noted.nbytes) == (self.peer, self.session, self._nbytes)
            and body.timeout == self._timeout
            and np.array_equal(body.pushes[:, _FIXED_OF_PUSH], self._template.pushes[:, _FIXED_OF_PUSH])
            and np.array_equal(body.commits[:, _FIXED_OF_COMMIT], self._template.commits[:, _FIXED_OF_COMMIT])
        )

    def take(self, frames: Sequence[Frame], rounds: Ints, now: float) -> bool:
        """Keep a message if it is the one of these rounds; return whether it is.

        Args:
            rounds: The open rounds of all tables.
        """
        head, template = frames[0], self._template
        if len(frames) != 2 or len(frames[1]) != self._nbytes or self.frames is not None:
            return False
        fixed, tail = memoryview(head)[: len(template.frame)], memoryview(head)[len(template.frame) :]
        if len(fixed) < len(template.frame):
            return False
        words = np.frombuffer(fixed, np.int64)
        template.words[template.free] = words[template.free]
        template.pushes[:, m.PUSH_ROUND] = rounds[self._push_tables]
        template.commits[:, m.COMMIT_ROUND] = rounds[self.tables]
        if template.frame != fixed or math.isinf(template.rescale[0]):
            return False
        self.extra = None
        if len(tail):
            self.extra = m.Contribute(_NO_PUSHES, (), _NO_COMMITS)
            try:
                decode_extra(tail, self.extra)
            except ProtocolError:
                return False  # the general path says what is wrong
            if _is_special(self.extra):
                return False
        self.frames, self.number, self.since = tuple(frames), int(template.number[0]), now
        return True

    @property
    def hyper(self) -> bytes:
        return b"" if self.extra is None else self.extra.hyper

    @property
    def client_state(self) -> bytes:
        return b"" if self.extra is None else self.extra.client_state

    def contribution(self, optimizer: Optimizer | None) -> RankContribution:
        assert self.frames is not None
        scale = float(self._template.rescale[0])
        payload = self.frames[1]
        runs = [
            Run(
                first,
                end,
                torch.frombuffer(payload, dtype=dtype, count=nbytes // dtype.itemsize, offset=begin),
            )
            for first, end, dtype, begin, nbytes in self._runs
        ]
        if math.isnan(scale):
            scale = 1.0 if optimizer is None else optimizer.rescale_grad
        return RankContribution(runs, scale)

    def decoded(self) -> tuple[Waiter, m.Contribute]:
        assert self.frames is not None
        _, _, number, body = decode_frames(self.frames)
        return Waiter(self.peer, number), body


class CapturedAnswer:
    """The message with new weights that is sent after each round; only versions and weights change in it."""

    def __init__(self, space: Namespace, batch: TableBatch, weights: m.Weights) -> None:
        frames, _ = encode_frames_and_payloads(m.Reply(0, weights))
        template = WeightsTemplate(frames[0])
        self._space, self._frame, self._versions_at = space, bytes(frames[0]), template.versions_at
        self._split = template.first_part
        self._first_location = self._split - m.LOCATION_WORDS * len(weights.locations)
        # 1. The table of each version.
        table_of = dict(zip(batch.part_slots, batch.part_tables.tolist(), strict=True))
        slots = [*weights.locations[:, m.LOCATION_SLOT].tolist(), *weights.parts[:, m.PART_SLOT].tolist()]
        self._tables_of = np.array([table_of[slot] for slot in slots], np.int64)
        self._tables = batch.tables
        # 2. What is sent as bytes.
        self._part_slots = weights.parts[:, m.PART_SLOT].tolist()
        sizes = np.zeros(len(batch.tables), np.int64)
        np.add.at(sizes, self._tables_of[len(weights.locations) :], weights.parts[:, m.PART_NBYTES])
        self._sizes = [(batch.tables[at], int(sizes[at])) for at in np.flatnonzero(sizes).tolist()]

    @staticmethod
    def can_capture(batch: TableBatch, weights: m.Weights) -> bool:
        """Return whether later answers are like this one: one message, which tells no new locations."""
        return (
            (weights.locations[:, m.LOCATION_PLACE] == m.SAME_LOCATION).all()
            and (weights.parts[:, m.PART_KIND] == m.WHOLE).all()
            and len(divided(weights)) == 1
            and not any([table.tracks_reads for table in batch.tables])
        )

    def weights(self, num_ranks: int) -> m.Weights:
        """Return a message with the present weights, which goes to `num_ranks` ranks."""
        frame = bytearray(self._frame)
        words = np.frombuffer(frame, np.int64)
        versions = [table.version for table in self._tables]
        if len(versions) == 1:
            words[self._versions_at] = versions[0]
        else:
            words[self._versions_at] = np.array(versions)[self._tables_of]
        for table, nbytes in self._sizes:
            table.bytes_out += nbytes * num_ranks
        padded = self._space.shard.storage.padded
        payloads = tuple([padded[slot] for slot in self._part_slots])
        parts, located = words[self._split :].reshape(-1, m.PART_WORDS), m.NO_LOCATIONS
        if len(payloads) < len(self._versions_at):
            located = words[self._first_location : self._split].reshape(-1, m.LOCATION_WORDS)
        return m.Weights(parts, payloads, self._space.are_weights_stable, located, frame)


class CapturedBatch:
    """A synchronous round of some tables with plain gradients of all ranks, updated by one call."""

    def __init__(
        self,
        space: Namespace,
        batch: TableBatch,
        update: BatchUpdate,
        messages: Sequence[CapturedMessage],
    ) -> None:
        """`messages` are in the order of ranks, which is that of summation."""
        self.space, self.batch = space, batch
        self.update = update
        self.messages = messages
        self.unread: list[CapturedMessage] = []
        """In the order in which they have come."""
        self._options, self._num_tables = space.num_option_changes, len(space.tables)
        self._answers: dict[int, CapturedAnswer] = {}
        """By flags."""
        self._num_handled = -1
        """As `Engine.num_handled` was when all was as expected."""

    def _take_options(self) -> None:
        """Use the options that have come with the messages, and keep what successors get.

        Raises KVStoreError as the general path does, which takes the same messages once more.
        """
        space, tables, shared = self.space, self.batch.tables, self.space.rounds.shared
        for one in self.messages:
            if one.client_state:
                space.keep_client_state(one.rank, tables, shared, one.client_state)
        new = [one for one in self.messages if one.hyper]
        if not new:
            return
        for table in tables:
            for one in new:
                table.hyper.check(one.hyper)
                table.hyper.set(one.rank, one.hyper)
        if space.changes is not None:
            space.changes.note_hypers(self.batch.number_list)
        packed = [table.hyper.common(shared.members) for table in tables]
        rows = zip(tables, packed, strict=True)
        optimizer = self.update.optimizer
        hypers = [() if optimizer is None else table.hypers((), optimizer, own) for table, own in rows]
        space.num_option_changes += 1
        self.update, self._options = BatchUpdate(optimizer, hypers, packed), space.num_option_changes

    def is_of(self, noted: Mapping[int, Noted], update: BatchUpdate) -> bool:
        """Return whether a round that took the general path was like this one."""
        return (
            self._options == self.space.num_option_changes
            and update.optimizer is self.update.optimizer
            and all([one.rank in noted and one.is_of(noted[one.rank]) for one in self.messages])
        )

    def finish(self, num_handled: int) -> list[m.Outgoing] | None:
        """Apply the round, whose messages are all here, and return the answers.

        Args:
            num_handled: How many requests and ticks the general path has handled.

        Returns:
            None if the general path has to take the messages: nothing has changed, or the tables are broken.
        """
        if self.space.num_option_changes != self._options:
            return None
        if num_handled != self._num_handled and not self._is_usable():
            return None
        self._num_handled = num_handled
        space, batch, shared = self.space, self.batch, self.space.rounds.shared
        # 1. Sum and update.
        try:
            self._take_options()
            contributions = [one.contribution(self.update.optimizer) for one in self.messages]
            space.update_tables(batch, contributions, self.update)
        except KVStoreError:
            return None
        except Exception as error:
            _log.exception("the update of %d tables failed", len(batch.tables))
            for table in batch.tables:
                table.break_off(error)
            return None
        # 2. Go to the next round, as `Engine` does after a general one.
        for one in self.messages:
            for number, nbytes in one.received:
                space.tables[number].bytes_in += nbytes
        space.messages_in += len(self.messages)
        since = {one.rank: one.since for one in self.messages}
        asked = [(one.rank, one.flags, Waiter(one.peer, one.number)) for one in self.messages]
        self._clear()
        space.note_tables(batch.number_list)
        space.shard.storage.end_change(batch.all_slots)
        shared.advance(batch.numbers, since)
        return self._answer(asked)

    def _answer(self, asked: Sequence[tuple[int, int, Waiter]]) -> list[m.Outgoing]:
        """Return the new weights for ranks, given as (rank, flags, waiter). Those with equal flags share a message."""
        known = self._answers
        if self.space.shard.storage.has_moved or not all([flags in known for _, flags, _ in asked]):
            found = self.space.answer_plainly(self.batch, asked)
            for (_, flags, _), out in zip(asked, found, strict=True):
                weights: Any = out.reply.body
                if flags not in known and CapturedAnswer.can_capture(self.batch, weights):
                    known[flags] = CapturedAnswer(self.space, self.batch, weights)
            return found
        of_ranks = [flags for _, flags, _ in asked]
        made = {flags: known[flags].weights(of_ranks.count(flags)) for flags in set(of_ranks)}
        return [m.Outgoing(waiter.peer, m.Reply(waiter.number, made[flags])) for _, flags, waiter in asked]

    def take_unread(self) -> list[tuple[CapturedMessage, tuple[Waiter, m.Contribute]]]:
        """Return the messages that have come, decoded, in their order, and forget them."""
        found = [(one, one.decoded()) for one in self.unread]
        self._clear()
        return found

    def _clear(self) -> None:
        self.unread.clear()
        for one in self.messages:
            one.frames = None

    def _is_usable(self) -> bool:
        """Return whether tables and the job are as they were, and no rank has given anything else."""
        space, shared = self.space, self.space.rounds.shared
        numbers = self.batch.numbers
        return (
            len(space.tables) == self._num_tables
            and not (space.absent or space.recording.active or space.waits.all or space.rounds.pipelined)
            and not (space.shard.undos or space.shard.keeps_undos)
            and len(shared.inputs) <= len(self.messages) == shared.num_members
            and not any([
                inputs.sums[numbers].any() or inputs.partial or inputs.intents for inputs in shared.inputs.values()
            ])
            and not shared.num_committed[numbers].any()
            and all([table.held is None and table.conflict is None for table in self.batch.tables])
        )  # fmt: skip


class Captures:
    """The captured rounds of all namespaces, and the messages from which more can be made."""

    def __init__(self) -> None:
        self.unread: list[CapturedBatch] = []
        """Those with messages that were not read yet."""
        self._found: dict[Key, tuple[CapturedBatch, CapturedMessage]] = {}
        self._rounds: dict[tuple[str, bytes], CapturedBatch] = {}
        """(namespace, its tables) → their captured round, the oldest first."""
        self._noted: dict[tuple[str, bytes], dict[int, Noted]] = {}
        """(namespace, its tables) → by rank, the last message about these."""

    def find(self, peer: bytes, frames: Sequence[Frame]) -> tuple[CapturedBatch, CapturedMessage] | None:
        return self._found.get(key_of(peer, frames))

    def note(self, space: Namespace, rank: int, peer: bytes, request: m.Request) -> None:
        """Keep what is needed to capture the round of a message that takes the general path."""
        noted = note(peer, request)
        if noted is not None:
            if len(self._noted) >= MAX_CAPTURED:
                self._noted.clear()
            key = space.name, request.body.commits[:, m.COMMIT_TABLE].tobytes()  # type: ignore[union-attr]
            self._noted.setdefault(key, {})[rank] = noted

    def capture(self, space: Namespace, batch: TableBatch, update: BatchUpdate) -> None:
        """Capture a round that was just applied, if the messages of all ranks were plain."""
        place = space.name, batch.numbers.tobytes()
        noted = self._noted.pop(place, {})
        ranks, optimizer = space.rounds.shared.members, update.optimizer
        former = self._rounds.get(place)
        if former is not None and former.is_of(noted, update):
            return  # only another message, or a tick, has come between its messages
        if optimizer is not None and (optimizer.may_raise or optimizer.lr_scheduler is not None):
            return
        for rank in ranks:
            body: Any = noted[rank].request.body if rank in noted else None
            if body is None or not np.array_equal(body.commits[:, m.COMMIT_TABLE], batch.numbers):
                return
            if not np.array_equal(np.sort(body.pushes[:, m.PUSH_SLOT]), batch.all_slots):
                return  # some slices came in other messages
        messages = [CapturedMessage(rank, noted[rank], space) for rank in ranks]
        found = CapturedBatch(space, batch, update, messages)
        self._drop(place)
        if len(self._rounds) >= MAX_CAPTURED:
            self._drop(next(iter(self._rounds)))
        self._rounds[place] = found
        self._found.update({one.key: (found, one) for one in messages})

    def _drop(self, place: tuple[str, bytes]) -> None:
        former = self._rounds.pop(place, None)
        for one in () if former is None else former.messages:
            if one.key in self._found and self._found[one.key][0] is former:
                del self._found[one.key]

    def forget(self, space: Namespace) -> None:
        """Drop what is kept of a namespace, which has ended."""
        for place in [place for place, one in self._rounds.items() if one.space is space]:
            self._drop(place)
        self._noted = {key: one for key, one in self._noted.items() if key[0] != space.name}
        self.unread = [one for one in self.unread if one.space is not space]
